"""``flexsearch scale``: which clusters are planned, what the table compares, where it stops paying; what steps cost."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from flexsearch.cost.uncertainty import Estimate
from flexsearch.errors import StrategyError, TopologyError
from flexsearch.graph import OperatorGraph
from flexsearch.graph.batch import with_batch
from flexsearch.planning import PlanProgress, plan
from flexsearch.report.money import Price
from flexsearch.report.scaling import Scaling, ScalingPoint, scaling_data, scaling_table, verdict
from flexsearch.scaling import Scaler
from flexsearch.setting import Setting
from flexsearch.simulate.memory import Memory
from flexsearch.simulate.staged import Step
from flexsearch.strategy import Options
from flexsearch.topology import Topology
from flexsearch.topology.sizes import Sizes
from tests.conftest import Cli
from tests.test_topology import device, link, topology

FIELDS = dict.fromkeys(Memory.__dataclass_fields__, 0)


def step(seconds: float, devices: int, samples: int, peak: int = 10, room: int = 100) -> Step:
    use = Memory(**{**FIELDS, "weights": peak})
    return Step(
        seconds, lambda: (), lambda: Estimate(seconds, {}), (use,) * devices, (room,) * devices, devices, samples, 1.0,
        1.0,
    )  # fmt: skip


def point(devices: int, seconds: float, samples: int = 64, peak: int = 10) -> ScalingPoint:
    return ScalingPoint(devices, samples, step(seconds, devices, samples, peak), "some plan")


# ---- clusters


def test_devices_grow_from_one_to_a_host_and_then_by_whole_hosts() -> None:
    assert Sizes.named("dgx-a100").numbers(70) == [1, 2, 4, 8, 16, 32, 64]
    assert Sizes.named("ethernet-1g-4").numbers(8) == [1, 2, 4, 8]
    six = topology([device(f"d{i}") for i in range(6)], [link(f"d{i}", "s") for i in range(6)], ("s",))
    assert Sizes(six).numbers(64) == [1, 3, 6]


def test_a_part_of_a_host_is_cut_out_and_more_hosts_are_added() -> None:
    sizes = Sizes.named("dgx-a100:2")
    assert [len(sizes.of(n).devices) for n in (1, 2, 8, 16, 64)] == [1, 2, 8, 16, 64]
    assert sizes.of(16) is sizes.whole
    assert sizes.of(64).content_hash() == Topology.load("dgx-a100:8").content_hash()
    part = sizes.of(4)
    assert part.devices == sizes.whole.devices[:4]
    assert part.switches == ("dgx0/nvswitch",)


def test_a_cluster_that_is_no_preset_has_the_hosts_that_it_has(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    Topology.load("p100:4").model_copy(update={"name": "mine"}).save(path)
    sizes = Sizes.named(str(path))
    assert sizes.numbers(64) == [1, 2, 4, 8, 16]
    assert {d.host for d in sizes.of(8).devices} == {"node0", "node1"}
    with pytest.raises(TopologyError, match="mine has 4 hosts and is no preset"):
        sizes.of_hosts(8)


def test_a_file_that_describes_one_node_has_any_number_of_them(tmp_path: Path) -> None:
    source = Path(__file__).resolve().parent.parent / "profiles" / "p100.json"
    (tmp_path / "mine.json").write_text(source.read_text().replace('"name": "p100"', '"name": "mine"'))
    for text in ("mine.json", "mine.json:2"):
        sizes = Sizes.named(str(tmp_path / text))
        assert sizes.numbers(64)[-1] == 64
        assert len(sizes.of_hosts(8).devices) == 32


def test_hosts_of_different_sizes_are_refused() -> None:
    mixed = topology(
        [device("a", "h0"), device("b", "h0"), device("c", "h1")], [link(d, "s") for d in "abc"], ("s",)
    )
    with pytest.raises(TopologyError, match="2 devices on h0, 1 on h1"):
        Sizes(mixed).numbers(4)


# ---- what is compared


def test_efficiency_is_throughput_for_each_device_against_the_fewest_that_fit() -> None:
    curve = Scaling("strong", (point(1, 9.0, peak=200), point(2, 8.0), point(4, 4.0), point(8, 4.0)))
    assert curve.base.devices == 2
    assert [curve.speedup(p) for p in curve.fitting] == [1.0, 2.0, 2.0]
    assert [curve.efficiency(p) for p in curve.fitting] == [1.0, 1.0, 0.5]
    weak = Scaling("weak", (point(2, 8.0), point(4, 8.0, 128), point(8, 16.0, 256)))
    assert [weak.efficiency(p) for p in weak.fitting] == [1.0, 1.0, 0.5]


def test_scaling_pays_as_long_as_added_devices_bring_half_of_their_share() -> None:
    curve = Scaling("strong", (point(1, 8.0), point(2, 5.0), point(4, 4.0), point(8, 3.99)))
    last, after = curve.worth()
    assert (last.devices, after.devices if after else 0) == (2, 4)  # 1.6x for 2x, then 1.25x for 2x
    assert after is not None
    assert curve.gain(last, after) == pytest.approx(0.25)
    words = verdict(curve)
    assert "Strong scaling does not pay beyond 2 devices: on 4 the step is 1.25x as fast, which is 25 %" in words
    assert "On more than 4 devices the step gets no faster" in words
    data = scaling_data(curve)
    assert (data["pays_up_to"], data["next_gain"], data["verdict"]) == (2, pytest.approx(0.25), words)


def test_no_gain_at_all_is_said_so() -> None:
    curve = Scaling("strong", (point(1, 8.0), point(2, 8.0), point(4, 9.0)))
    assert verdict(curve) == "Strong scaling does not pay beyond one device: on 2 the step gets no faster."


def test_a_dip_that_more_devices_make_up_for_does_not_end_it() -> None:
    curve = Scaling("strong", (point(1, 8.0), point(2, 7.0), point(4, 2.0)))
    assert curve.worth() == (curve.points[2], None)
    words = verdict(curve)
    assert "pays up to 4 devices, the most that were tried" in words
    assert "An efficiency above 100 % is no mistake" not in words


def test_more_than_ideal_is_explained() -> None:
    assert "An efficiency above 100 % is no mistake" in verdict(Scaling("strong", (point(1, 8.0), point(2, 3.0))))


def test_where_nothing_fits_the_rows_say_by_how_much() -> None:
    none = ScalingPoint(4, 64, None, reason="64 samples cannot be divided")
    curve = Scaling("strong", (point(2, 8.0, peak=150), none))
    rows = [cells for cells, _ in scaling_table(curve).rows]
    assert "nothing fits; the nearest plan is 50 B short" in rows[0][-1]
    assert rows[1][-1] == "64 samples cannot be divided"
    assert verdict(curve) == "Nothing fits on up to 2 devices."
    assert [row["fits"] for row in scaling_data(curve)["rows"]] == [False, False]
    assert verdict(Scaling("strong", (none,))) == "There is no plan for any of these numbers of devices."


def test_money_is_paid_for_every_device_and_second() -> None:
    price = Price(36.0)
    assert price.step(100.0, 4) == pytest.approx(4.0)
    assert price.amount(100.0, 4, 10, None) == pytest.approx(4e5)
    assert price.amount(100.0, 4, 10, 1000) == pytest.approx(4e5)
    data = price.added({"iteration_s": 100.0, "plans": [{"iteration_s": 200.0}]}, 4, 10, None)
    assert data["cost"] == {"per_device_hour": 36.0, "per_step": pytest.approx(4.0), "per_million_samples": 4e5}
    assert data["plans"][0]["cost"]["per_step"] == pytest.approx(8.0)
    curve = Scaling("strong", (point(1, 8.0), point(2, 4.5)), price=price)
    assert "the least is" in verdict(curve)
    assert "cost of\nmillion samples" in [column.heading for column in scaling_table(curve).columns]


# ---- plans


def scaler(**changes: Any) -> Scaler:
    made = Scaler(OperatorGraph.load("lenet"), Sizes.named("ethernet-1g-2"), 10, Options(), space="splits")
    return replace(made, **changes)


def test_weak_scaling_grows_the_batch_with_the_devices_and_strong_scaling_does_not() -> None:
    found = list(scaler().points(4, ("strong", "weak")))
    assert [(kind, p.devices, p.batch) for kind, p in found] == [
        ("strong", 1, 64), ("weak", 1, 64), ("strong", 2, 64), ("weak", 2, 128), ("strong", 4, 64), ("weak", 4, 256),
    ]  # fmt: skip
    graph = with_batch(OperatorGraph.load("lenet"), Fraction(2))
    alone = plan(Setting.of(graph, Topology.load("ethernet-1g-2")), 10, Options(), space="splits")
    again = found[3][1]
    assert again.step is not None
    assert again.step.makespan_s == alone.step.makespan_s
    assert again.plan == alone.words


def test_a_plan_for_fewer_devices_is_where_the_search_for_more_begins() -> None:
    found = [p for _, p in scaler(budget=1).points(16, ("strong",))]
    times = [p.step.makespan_s for p in found if p.step is not None]
    assert len(times) == 5
    assert all(later <= 1.05 * min(times[:k]) for k, later in enumerate(times) if k)  # baselines are kept for 5 %


def test_weak_scaling_begins_where_the_batch_fits(tmp_path: Path) -> None:
    whole = Topology.load("ethernet-1g-2")
    weights = sum(t.nbytes for t in OperatorGraph.load("lenet").of_kind("parameter"))
    small = tuple(d.model_copy(update={"memory_bytes": 12 * weights}) for d in whole.devices)
    sizes = Sizes(Topology(**{f: getattr(whole, f) for f in Topology.model_fields} | {"devices": small, "name": "x"}))
    found = list(scaler(sizes=sizes).points(8, ("weak",)))
    assert [(p.devices, p.batch, p.fits) for _, p in found] == [(1, 64, False), (2, 64, True)]


def test_what_cannot_be_planned_is_a_row_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(setting: Setting, *_: object, **__: object) -> Any:
        raise StrategyError(f"no layout of {len(setting.topology.devices)} devices", "Give others.")

    monkeypatch.setattr("flexsearch.scaling.plan", refused)
    found = list(scaler().points(2, ("strong",)))
    assert [(p.devices, p.step, p.reason) for _, p in found] == [
        (1, None, "no layout of 1 devices"), (2, None, "no layout of 2 devices"),
    ]  # fmt: skip


# ---- the command


def test_the_command_prints_a_table_a_picture_and_what_it_costs(cli: Cli) -> None:
    arguments = ("scale", "lenet", "-t", "ethernet-1g-2", "--up-to", "2", "-b", "10", "--cost-per-hour", "0.5")
    ran = cli(*arguments, "-o", "scale.svg")
    assert ran.code == 0, ran.err
    assert Path("scale.svg").read_text().startswith("<?xml")
    for words in ("Strong scaling: the same batch", "Weak scaling: the batch grows", "a step costs", "single"):
        assert words in ran.out
    assert ran.out.count("80 % interval") == 2 and ran.out.count(" ± ") == 4
    data = cli(*arguments, "--strong", "--json").json
    assert "weak" not in data
    first, second = data["strong"]["rows"]
    assert all(row["interval_s"][0] < row["iteration_s"] < row["interval_s"][1] for row in (first, second))
    assert first["cost"]["per_step"] == pytest.approx(0.5 * first["iteration_s"] / 3600)
    assert second["cost"]["per_step"] == pytest.approx(0.5 * 2 * second["iteration_s"] / 3600)
    assert second["speedup"] == pytest.approx(first["iteration_s"] / second["iteration_s"])
    assert second["efficiency"] == pytest.approx(second["speedup"] / 2)


def test_layouts_scale_too(cli: Cli) -> None:
    cluster = ("-t", "ethernet-1g-2", "--up-to", "2")
    ran = cli("scale", "lenet", *cluster, "--space", "layouts", "-b", "200ms", "--weak", "--json")
    assert ran.code == 0, ran.err
    assert ran.json["space"] == "layouts"
    assert [row["batch"] for row in ran.json["weak"]["rows"]] == [64, 128]


def test_where_nothing_fits_the_command_says_what_to_try(cli: Cli) -> None:
    whole = Topology.load("ethernet-1g-2")
    small = tuple(d.model_copy(update={"memory_bytes": 1000}) for d in whole.devices)
    whole.model_copy(update={"devices": small, "name": "tiny"}).save("tiny.json")
    ran = cli("scale", "lenet", "-t", "tiny.json", "-b", "10")
    assert ran.code == 0, ran.err
    assert "Nothing fits on up to 2 devices." in ran.out
    assert "Try more devices (--up-to), --precision bf16 or a shorter --seq." in ran.out


def test_ctrl_c_gives_the_rows_so_far(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    count = 0

    def interrupt(*_: object, **__: object) -> Any:
        nonlocal count
        count += 1
        if count == 3:
            raise KeyboardInterrupt
        return plan(*_, **__)  # type: ignore[arg-type]

    monkeypatch.setattr("flexsearch.scaling.plan", interrupt)
    ran = cli("scale", "lenet", "-t", "ethernet-1g-2", "--up-to", "4", "-b", "10", "--strong", "--json")
    assert [row["devices"] for row in ran.json["strong"]["rows"]] == [1, 2]


def test_a_search_that_ctrl_c_cut_short_is_no_row() -> None:
    def look(what: str, now: PlanProgress) -> None:
        if what.startswith("2 devices"):
            raise KeyboardInterrupt

    found = list(scaler(budget="1m", on_progress=look).points(4, ("strong",)))
    assert [p.devices for _, p in found] == [1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--up-to", "0"), "--up-to"),
        (("-t", "nowhere"), "nowhere"),
        (("-b", "soon"), "soon"),
        (("-b", "500", "--space", "layouts"), "needs a budget of time"),
        (("-o", "plot.txt"), ".png"),
        (("--batch", "1.5"), "1.5"),
        (("--cost-per-hour", "inf"), "finite"),
        (("--cost-per-hour", "-1"), "--cost-per-hour"),
        (("--optimizer", "magic"), "magic"),
    ],
)
def test_wrong_input_is_refused_before_anything_is_planned(cli: Cli, arguments: tuple[str, ...], words: str) -> None:
    ran = cli("scale", "lenet", "-t", "ethernet-1g-2", "--up-to", "2", *arguments)
    assert ran.code == 2
    assert words in ran.err
    assert "Traceback" not in ran.err
    assert not list(Path().iterdir())


def test_optimize_and_simulate_say_what_a_step_costs(cli: Cli) -> None:
    ran = cli("optimize", "lenet", "-t", "ethernet-1g-2", "-b", "10", "--cost-per-hour", "3", "--json")
    data = ran.json
    assert data["cost"]["per_step"] == pytest.approx(3 * 2 * data["iteration_s"] / 3600)
    assert all("cost" in row for row in data["plans"])
    again = cli("simulate", "-s", "strategy.json", "--cost-per-hour", "3", "--json").json
    assert again["cost"] == data["cost"]
    assert "a step costs" in cli("simulate", "-s", "strategy.json", "--cost-per-hour", "3").out
    assert "cost" not in cli("simulate", "-s", "strategy.json", "--json").json
    arguments = ("optimize", "lenet", "-t", "ethernet-1g-2", "--space=layouts", "-b", "200ms", "--cost-per-hour", "3")
    layouts = cli(*arguments, "--json").json
    assert layouts["cost"]["per_step"] == pytest.approx(3 * 2 * layouts["iteration_s"] / 3600)
    assert json.dumps(layouts["plans"][0]["cost"]) == json.dumps(layouts["cost"])
