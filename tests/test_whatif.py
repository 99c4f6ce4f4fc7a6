"""``flexsearch what-if``: changed clusters, the same plan there, a new search there; and what would fit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flexsearch.errors import TopologyError
from flexsearch.fitting import training_bytes, what_would_fit
from flexsearch.graph import OperatorGraph
from flexsearch.planning import Planned
from flexsearch.report.fitting import fitting_words
from flexsearch.report.whatif import Changed, PlanOnCluster, in_a_sentence
from flexsearch.setting import Setting
from flexsearch.strategy import Options, Strategy
from flexsearch.topology import Topology
from flexsearch.topology.changes import captured, device_named, with_device, with_links, with_memory, with_speed
from tests.conftest import Cli
from tests.test_scaling import step
from tests.test_topology import device, link, topology

# ---- changed clusters


def test_all_links_or_some_get_another_bandwidth() -> None:
    now = Topology.load("dgx-a100:2")
    twice = with_links(now, 2.0)
    assert [b.bandwidth / a.bandwidth for a, b in zip(now.links, twice.links, strict=True)] == [2.0] * len(now.links)
    fabric = [r for r, resource in enumerate(now.resources) if "fabric" in resource.name]
    some = with_links(now, 0.5, fabric)
    for a, b in zip(now.links, some.links, strict=True):
        assert b.bandwidth == a.bandwidth * (0.5 if "fabric" in (a.a, a.b) else 1.0)
    assert some.route(0, 8).bandwidth == now.route(0, 8).bandwidth / 2
    assert len({t.content_hash() for t in (now, twice, some)}) == 3


def test_devices_get_other_figures_at_the_same_places() -> None:
    now = Topology.load("dgx-a100:2")
    assert {d.memory_bytes for d in with_memory(now, factor=2.0).devices} == {2 * now.devices[0].memory_bytes}
    assert {d.memory_bytes for d in with_memory(now, nbytes=10**9).devices} == {10**9}
    fast = with_speed(now, 1.5).devices[0]
    assert fast.flops["bfloat16"] == 1.5 * now.devices[0].flops["bfloat16"]
    assert fast.memory_bandwidth == 1.5 * now.devices[0].memory_bandwidth
    other = with_device(now, device_named("H100-SXM5-80GB"))
    h100 = Topology.load("hgx-h100").devices[0]
    assert {d.flops["bfloat16"] for d in other.devices} == {h100.flops["bfloat16"]}
    assert [(d.name, d.host) for d in other.devices] == [(d.name, d.host) for d in now.devices]
    assert device_named("hgx-h100") == h100


def test_hosts_of_captured_steps_launch_nothing() -> None:
    now = Topology.load("dgx-a100:2")
    there = captured(now)
    assert {device.launch_s for device in there.devices} == {0.0}
    kept = {"devices": now.devices}
    assert there.model_copy(update=kept) == now
    graph = OperatorGraph.load("lenet")
    eager, graphs = (Setting.of(graph, t) for t in (now, there))
    steps = [setting.step(setting.baseline("data-parallel")).makespan_s for setting in (eager, graphs)]
    assert steps[1] < 0.7 * steps[0]  # tiny operators on 16 GPUs wait for their hosts
    for nothing_to_capture in (there, Topology.load("ethernet-1g-2")):
        with pytest.raises(TopologyError, match="captured steps change nothing"):
            captured(nothing_to_capture)


def test_another_library_may_come_with_another_device() -> None:
    hosts = Topology.load("ethernet-1g:2")
    gpus = with_device(hosts, device_named("P100"), "nccl")
    assert gpus.communication.backend == "nccl" and {d.kind for d in gpus.devices} == {"cuda"}
    assert gpus.links == hosts.links and hosts.communication.backend == "gloo"


def test_clusters_that_cannot_be_are_refused() -> None:
    now = Topology.load("p100:1")
    for change in (lambda: with_links(now, 1e9), lambda: with_memory(now, nbytes=0), lambda: with_speed(now, 1e15)):
        with pytest.raises(TopologyError, match="no such cluster can be"):
            change()
    with pytest.raises(TopologyError, match="nccl cannot reach"):
        with_device(now, device_named("ethernet-1g"))
    with pytest.raises(TopologyError, match='"B300" is neither a device nor a cluster') as error:
        device_named("B300")
    assert "H100-SXM5-80GB" in error.value.remedy


def test_a_file_with_several_kinds_names_no_device(tmp_path: Path) -> None:
    other = device("b").model_copy(update={"memory_bytes": 5})
    topology([device("a"), other], [link("a", "b")]).save(tmp_path / "two.json")
    with pytest.raises(TopologyError, match="several kinds of devices"):
        device_named(str(tmp_path / "two.json"))


# ---- the command


@pytest.fixture
def plain(cli: Cli) -> str:
    setting = Setting.of(OperatorGraph.load("lenet"), Topology.load("ethernet-1g-2"))
    setting.baseline("data-parallel").save("plain.json")
    return "plain.json"


@pytest.fixture
def staged(cli: Cli) -> str:
    setting = Setting.of(OperatorGraph.load("lenet"), Topology.load("ethernet-1g-2"))
    usual = setting.baseline("data-parallel")
    parts = Strategy.make(setting.graph, setting.topology, usual.configs, usual.options, microbatches=4)
    parts.save("staged.json")
    return "staged.json"


def test_a_plan_is_simulated_on_the_changed_cluster_and_searched_anew(cli: Cli, plain: str) -> None:
    arguments = ("what-if", plain, "--network", "2x", "-b", "20", "--save-topology", "fast.json", "-o", "new.json")
    data = cli(*arguments, "--json").json
    now, fast = Topology.load("ethernet-1g-2"), Topology.load("fast.json")
    assert [b.bandwidth / a.bandwidth for a, b in zip(now.links, fast.links, strict=True)] == [2.0, 2.0]
    assert data["today"]["iteration_s"] == cli("simulate", "-s", plain, "--json").json["iteration_s"]
    same = Strategy.load(plain)
    moved = Strategy.make(OperatorGraph.load("lenet"), fast, same.configs, same.options)
    there = Setting.of(OperatorGraph.load("lenet"), fast)
    assert data["this_plan"]["iteration_s"] == there.step(moved).makespan_s < data["today"]["iteration_s"]
    assert data["searched_anew"]["iteration_s"] <= data["this_plan"]["iteration_s"]
    written = Strategy.load("new.json")
    assert written.cluster == fast
    assert there.step(written).makespan_s == data["searched_anew"]["iteration_s"]
    told = cli(*arguments)
    for words in ("What if: links 2x as fast", "today ", "this plan ", "new search", "With links 2x as fast, this"):
        assert words in told.out
    assert "80 % interval" in told.out and told.out.count(" ± ") == 3
    for row in (data["today"], data["this_plan"], data["searched_anew"]):
        assert row["interval_s"][0] < row["iteration_s"] < row["interval_s"][1]


def test_a_plan_with_microbatches_is_searched_among_layouts(cli: Cli, staged: str) -> None:
    ran = cli("what-if", staged, "--device", "2x", "--memory", "1GB", "-b", "200ms", "--json")
    assert ran.code == 0, ran.err
    data = ran.json
    assert data["change"] == "devices 2x as fast and 1GB of memory on each device"
    assert data["this_plan"]["iteration_s"] < data["today"]["iteration_s"]
    assert "4 microbatches of 16" in data["today"]["plan"]
    refused = cli("what-if", staged, "--device", "2x", "-b", "20", "--save-topology", "fast.json")
    assert refused.code == 2
    assert "needs a budget of time" in refused.err
    assert not Path("fast.json").exists()


def test_another_number_of_devices_asks_for_another_plan(cli: Cli, plain: str) -> None:
    data = cli("what-if", plain, "--hosts", "4", "-b", "20", "--json").json
    assert data["change"] == "4 hosts instead of 2"
    assert "2 devices, and there would be 4" in data["this_plan"]["reason"]
    assert data["searched_anew"]["devices"] == 4
    assert "this plan cannot be used; a new search found" in data["sentence"]


def test_a_plan_may_no_longer_fit(cli: Cli, plain: str) -> None:
    data = cli("what-if", plain, "--memory", "1MB", "-b", "20", "-o", "new.json", "--json").json
    assert not data["this_plan"]["fits"]
    assert data["this_plan"]["iteration_s"] == data["today"]["iteration_s"]
    assert "this plan does not fit" in data["sentence"]
    assert data["searched_anew"]["fits"] == (data["path"] is not None) == Path("new.json").exists()


def test_only_some_links_change_and_another_cluster_may_take_the_place(cli: Cli, plain: str) -> None:
    data = cli("what-if", plain, "--network", "switch=10x", "-t", "ethernet-10g-2", "-b", "20", "--json").json
    assert data["change"] == "the cluster ethernet-10g:2 and host*/cpu - switch 10x as fast"


def test_a_plan_is_simulated_with_captured_steps(cli: Cli) -> None:
    setting = Setting.of(OperatorGraph.load("lenet"), Topology.load("dgx-a100:1"))
    setting.baseline("data-parallel").save("gpus.json")
    data = cli(
        "what-if", "gpus.json", "--code", "captured", "-b", "20", "--save-topology", "captured.json", "--json"
    ).json
    assert data["change"] == "steps captured as graphs"
    assert data["this_plan"]["iteration_s"] < data["today"]["iteration_s"]
    assert {device.overhead_s for device in Topology.load("captured.json").devices} == {0.0}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "say what to change"),
        (("--code", "captured"), "captured steps change nothing"),
        (("--network", "fast"), '"fast" is not a factor'),
        (("--network", "0x"), "above 0"),
        (("--network", "wifi=2x"), "there are: host*/cpu - switch"),
        (("--memory", "80"), '"80" is not a size of memory'),
        (("--memory", "0GB"), "leaves nothing; give a size above 0"),
        (("--device", "B300"), "B300"),
        (("--device", "2x", "--profile", "p.json"), "measured times"),
        (("--hosts", "0"), "--hosts"),
        (("--topology", "nowhere"), "nowhere"),
        (("--network", "2x", "-b", "soon"), "soon"),
        (("--network", "2x", "-o", "plain.json"), "input"),
        (("--network", "2x", "--graph", "mlp"), "mlp"),
    ],
)
def test_wrong_input_is_refused(cli: Cli, plain: str, arguments: tuple[str, ...], words: str) -> None:
    ran = cli("what-if", plain, *arguments)
    assert ran.code == 2
    assert words in ran.err
    assert "Traceback" not in ran.err
    assert [path.name for path in Path().iterdir()] == ["plain.json"]


def test_the_sentence_says_what_the_change_does_and_what_another_plan_adds() -> None:
    times = (10.0, "a"), (8.0, "a"), (6.0, "b")
    today, same, anew = (PlanOnCluster(step(seconds, 2, 8), name) for seconds, name in times)
    told = Changed("links 2x as fast", today, same, anew, False, 5, None)
    assert in_a_sentence(told) == (
        "With links 2x as fast, this plan takes 8.00 s instead of 10.0 s (20 % less); a new search found 6.00 s, "
        "25 % less: b."
    )
    kept = replace(told, same=today, anew=today, kept=True)
    assert in_a_sentence(kept).endswith("this plan takes 10.0 s, as today; a new search found nothing faster.")
    large = PlanOnCluster(step(8.0, 2, 8, peak=150), "a")
    assert "this plan does not fit (50 B short); no plan that a new search found fits" in in_a_sentence(
        replace(told, same=large, anew=large)
    )
    assert "this plan fits and takes 8.00 s" in in_a_sentence(replace(told, today=large))


# ---- what would fit


def fits_on(hosts: int, tried: list[tuple[int, str]]) -> Any:
    """A search whose plans fit on so many hosts, and more."""

    def plan(setting: Setting, budget: str, options: Options, **_: object) -> Planned:
        count = len(setting.topology.hosts)
        tried.append((count, options.precision))
        peak = 10 if count >= hosts else 150
        return Planned(None, step(1.0, 2, 8, peak), "a layout", 3, None, False)  # type: ignore[arg-type]

    return plan


def test_the_fewest_hosts_that_fit_are_looked_for_by_doubling_and_halving(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[tuple[int, str]] = []
    monkeypatch.setattr("flexsearch.fitting.plan", fits_on(3, tried))
    setting = Setting.of(OperatorGraph.load("lenet"), Topology.load("ethernet-1g-1"))
    told = what_would_fit(setting, Options(), 100.0)
    assert tried == [(1, "bf16"), (2, "as-is"), (4, "as-is"), (3, "as-is")]
    assert told.fewest == 3
    words = fitting_words(told, one_sample=True)
    assert "The fewest hosts of 2, 3 and 4 on which a plan fits: with 3 hosts (3 devices) a step takes 1.00 s" in words
    assert "with --precision bf16 the nearest plan is 50 B short" in words
    assert "a shorter --seq helps rather than a smaller --batch" in words


def test_hosts_that_the_states_alone_would_fill_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[tuple[int, str]] = []
    monkeypatch.setattr("flexsearch.fitting.plan", fits_on(7, tried))
    setting = Setting.of(OperatorGraph.load("lenet"), Topology.load("ethernet-1g-1"))
    monkeypatch.setattr("flexsearch.fitting.training_bytes", lambda *_: 5 * setting.topology.devices[0].memory_bytes)
    told = what_would_fit(setting, Options(precision="bf16"), 100.0)
    assert [count for count, _ in tried] == [8, 6, 7]
    assert told.fewest == 7
    assert "so a smaller --batch cannot help" in fitting_words(told, one_sample=True)
    none = replace(told, hosts={8: replace(told.hosts[6], change="8 hosts")})
    assert "Nothing fits on 8 hosts either: with 8 hosts the nearest plan is 50 B short" in fitting_words(none, True)
    assert "need at least 5 hosts; there was no time" in fitting_words(replace(told, hosts={}), True)


def test_adam_in_half_precision_keeps_16_bytes_for_each_parameter() -> None:
    graph = OperatorGraph.load("lenet")
    setting = Setting.of(graph, Topology.load("ethernet-1g-1"))
    count = sum(t.nbytes // t.itemsize for t in graph.of_kind("parameter"))
    assert training_bytes(setting, Options(optimizer="adam", precision="bf16")) == 16 * count
    assert training_bytes(setting, Options(optimizer="sgd")) == 8 * count


def test_a_cluster_that_is_no_preset_cannot_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flexsearch.fitting.plan", fits_on(2, []))
    mine = topology([device("a", "h0"), device("b", "h1")], [link("a", "b")])
    told = what_would_fit(Setting.of(OperatorGraph.load("lenet"), mine), Options(), 100.0)
    assert not told.hosts
    assert "The topology is no preset" in fitting_words(told, one_sample=False)
