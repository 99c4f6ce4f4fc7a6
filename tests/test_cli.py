"""The commands do what the README says, for people and for programs."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import pytest

import flexsearch
from flexsearch import api
from flexsearch.cli.progress import SearchLive
from flexsearch.cost import Profile
from flexsearch.graph import Operator, OperatorGraph
from flexsearch.setting import Setting, parse_budget
from flexsearch.strategy import Strategy
from flexsearch.strategy.baselines import NAMES
from flexsearch.topology import Topology
from tests.commands import clean
from tests.conftest import Cli
from tests.interpret import Intervals, interpret

PLAN_KEYS = {"name", "iteration_s", "speedup_vs_data_parallel", "moved_bytes", "peak_bytes", "dominates", "fits"}


def test_version_and_help(cli: Cli) -> None:
    assert cli("--version").out.strip() == f"flexsearch {flexsearch.__version__}"
    help_ = cli("--help")
    assert help_.code == 0
    for command in (
        "import", "profile", "probe", "simulate", "optimize", "compare", "explain", "diff", "plot", "export", "run"
    ):  # fmt: skip
        assert f" {command} " in help_.out
        assert cli(command, "--help").code == 0


# ---- optimize


def test_optimize_without_a_graph_is_an_mlp_on_four_hosts_with_1_gbit(cli: Cli) -> None:
    ran = cli("optimize", "--budget", 1000, "-j", 1)
    assert ran.code == 0, ran.err
    strategy = Strategy.load("strategy.json")
    assert strategy.graph.name == "mlp"
    assert strategy.topology.hash == Topology.load("ethernet-1g-4").content_hash()
    for name in ("data-parallel", "megatron", "fsdp", "single"):
        assert name in ran.out
    assert "Best plan, found by the search" in ran.out
    assert "output features over 4 hosts" in ran.out  # the plan in words
    assert "flexsearch run -n 4 strategy.json --model flexsearch.zoo:mlp --batch 64" in ran.out  # what to do next


def test_optimize_says_why_it_stopped(cli: Cli) -> None:
    frozen = gc.get_freeze_count()
    ran = cli("optimize", "alexnet", "-t", "ethernet-1g-4", "--budget", 500)
    assert ran.code == 0, ran.err
    assert "half of the budget of 500 proposals brought nothing better" in " ".join(ran.out.split())
    assert gc.get_freeze_count() <= frozen, "what the command leaves is collected, where the process goes on"  # or dies


def test_optimize_writes_a_strategy_that_is_legal_and_as_fast_as_it_says(cli: Cli) -> None:
    Path("folder").mkdir()
    ran = cli("optimize", "lenet", "-t", "ethernet-10g-2", "--budget", "100", "--json", "-o", "folder/plan.json")
    assert ran.code == 0, ran.err
    graph, topology = OperatorGraph.load("lenet"), Topology.load("ethernet-10g-2")
    strategy = Strategy.load("folder/plan.json")
    strategy.check(graph, topology)
    assert ran.json["path"] == "folder/plan.json"
    assert ran.json["iteration_s"] == api.simulate(graph, topology, strategy).makespan_s
    assert ran.json["iteration_s"] <= min(p["iteration_s"] for p in ran.json["plans"])
    assert {p["name"] for p in ran.json["plans"]} <= {"found", *NAMES}
    assert all(set(plan) >= PLAN_KEYS for plan in ran.json["plans"])
    assert ran.json["proposals"] == 100
    assert ran.json["words"] and ran.json["groups"][0]["layers"]


def test_the_same_seed_and_proposals_give_the_same_file(cli: Cli) -> None:
    for name in ("a.json", "b.json"):
        assert cli("optimize", "lenet", "-t", "p100:1", "--budget", 60, "--seed", 7, "-o", name).code == 0
    assert Path("a.json").read_bytes() == Path("b.json").read_bytes()


def test_optimize_goes_on_from_a_strategy(cli: Cli) -> None:
    first = cli("optimize", "mlp", "-t", "ethernet-1g-2", "--budget", 150, "-o", "a.json", "--json").json
    second = cli(
        "optimize", "mlp", "-t", "ethernet-1g-2", "--budget", 1, "--resume", "a.json", "-o", "b.json", "--json"
    )
    assert second.json["iteration_s"] <= first["iteration_s"]


def test_one_process_and_two_write_the_same_file(cli: Cli) -> None:
    for name, processes in (("one.json", 1), ("two.json", 2)):
        arguments = "optimize", "lenet", "-t", "ethernet-1g-2", "--budget", 12_000, "-j", processes, "-o", name
        assert cli(*arguments).code == 0
    assert Path("one.json").read_bytes() == Path("two.json").read_bytes()


def test_pins_are_obeyed_and_noted(cli: Cli) -> None:
    pins = "conv*: batch=2, devices=1-2", "fc5: devices=0"
    arguments = [word for pin in pins for word in ("--pin", pin)]
    assert cli("optimize", "lenet", "-t", "p100:1", "--budget", 100, *arguments).code == 0
    strategy = Strategy.load("strategy.json")
    for name in ("conv1", "conv2"):
        assert strategy.configs[name].devices == (1, 2) and strategy.configs[name].parts == 2
    assert strategy.configs["fc5"].devices == (0,)
    assert strategy.search is not None and strategy.search.pins == pins


def test_the_answer_is_told_beside_what_no_plan_can_beat_and_can_be_proved(cli: Cli) -> None:
    arguments = "optimize", "lenet", "-t", "ethernet-1g-2", "--budget", 4000, "--exhaustive", "60s"
    ran = cli(*arguments, "--plot", "chains.png")
    assert ran.code == 0, ran.err
    said = " ".join(ran.out.split())
    assert "No plan in this space can be faster than" in said and "Proved in" in said
    assert Path("chains.png").stat().st_size > 1000
    data = cli(*arguments, "--json").json
    assert 0 < data["bound_s"] <= data["iteration_s"] and data["proof"]["complete"]
    assert data["bound_s"] <= data["proof"]["bound_s"] <= data["iteration_s"]
    assert data["proof"]["plans"] > 10**9 and data["locally_optimal"] in (True, False)


def test_ctrl_c_keeps_the_best_plan_so_far(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(SearchLive, "update", interrupt)
    ran = cli("optimize", "lenet", "-t", "ethernet-1g-2", "--budget", "10m", "--json")
    assert ran.json["stopped"] == "interrupted", ran.err
    Strategy.load("strategy.json").check(OperatorGraph.load("lenet"), Topology.load("ethernet-1g-2"))


def test_a_plan_that_fits_nowhere_is_refused_and_not_written(cli: Cli) -> None:
    topology = json.loads(Topology.load("ethernet-1g-2").model_dump_json(exclude_none=True))
    for device in topology["devices"]:
        device["memory_bytes"] = 1000
    Path("tiny.json").write_text(json.dumps(topology))
    ran = cli("optimize", "lenet", "-t", "tiny.json", "--budget", 10)
    assert ran.code == 2
    assert "fits into memory" in ran.err
    assert not Path("strategy.json").exists()


# ---- simulate, compare


def test_simulate_tells_the_time_of_a_plan_and_what_it_is_made_of(cli: Cli) -> None:
    ran = cli("simulate", "lenet", "-t", "ethernet-1g-2", "--baseline", "data-parallel", "--json", "--trace", "t.json")
    data = ran.json
    assert data["speedup_vs_data_parallel"] == 1.0
    assert len(data["devices"]) == 2
    for device in data["devices"]:
        assert device["busy_s"] + device["idle_s"] == pytest.approx(data["iteration_s"])
        assert device["peak_bytes"] == sum(
            device[f"{part}_bytes"] for part in ("weights", "gradients", "optimizer", "activations", "buffers")
        )
    sent = sum(link["moved_bytes"] for link in data["links"] if link["name"].endswith("->switch"))
    assert sent == data["moved_bytes"] > 0
    assert data["trace"] == "t.json"
    assert json.loads(Path("t.json").read_text())["traceEvents"]
    people = cli("simulate", "lenet", "-t", "ethernet-1g-2", "--baseline", "data-parallel")
    assert "host0/cpu->switch" in people.out and "batch over 2 hosts" in people.out


def test_simulate_and_optimize_agree_on_a_strategy_file(cli: Cli) -> None:
    found = cli("optimize", "lenet", "-t", "ethernet-1g-4", "--budget", 50, "--json").json
    said = cli("simulate", "lenet", "-t", "ethernet-1g-4", "--strategy", "strategy.json", "--json").json
    for key in ("iteration_s", "moved_bytes", "peak_bytes", "words", "speedup_vs_data_parallel"):
        assert said[key] == found[key]


def test_compare_is_the_table_alone(cli: Cli) -> None:
    cli("optimize", "lenet", "-t", "ethernet-1g-4", "--budget", 50)
    ran = cli("compare", "lenet", "-t", "ethernet-1g-4", "--strategy", "strategy.json", "--json")
    rows = ran.json["plans"]
    assert rows[0]["name"] == "strategy.json"
    assert {"data-parallel", "single"} < {row["name"] for row in rows}
    times = [row["iteration_s"] for row in rows[1:]]
    assert times == sorted(times)
    assert [r.name for r in api.compare(OperatorGraph.load("lenet"), Topology.load("ethernet-1g-4"))] == [
        row["name"] for row in rows[1:]
    ]


# ---- import, profile


def test_import_makes_the_graph_that_is_shipped(cli: Cli) -> None:
    ran = cli("import", "flexsearch.zoo:lenet", "-o", "graph.json", "--batch", 64, "--json")
    assert ran.code == 0, ran.err
    assert ran.json["hash"] == OperatorGraph.load("lenet").content_hash()
    assert OperatorGraph.load("graph.json").name == "lenet"
    assert ran.json["batch"] == 64 and ran.json["parameters"] == 61706


def test_import_hands_settings_to_the_callable_and_takes_files(cli: Cli) -> None:
    Path("own_builder.py").write_text(
        "import torch\n"
        "def build(batch=2, width=3, relu=False, note=''):\n"
        "    assert note == 'hello'\n"
        "    parts = [torch.nn.Linear(4, width), *([torch.nn.ReLU()] if relu else [])]\n"
        "    model = torch.nn.Sequential(*parts)\n"
        "    return model, (torch.ones(batch, 4),), torch.ones(batch, width), torch.nn.functional.mse_loss\n"
    )
    for spec in ("own_builder.py:build", "own_builder:build"):
        ran = cli("import", spec, "-o", "g.json", "--batch", 6, "--set", "width=5", "--set", "relu=True",
                  "--set", "note=hello", "--name", "mine", "--json")  # fmt: skip
        assert ran.code == 0, ran.err
        graph = OperatorGraph.load("g.json")
        assert graph.name == "mine" and graph.batch == 6
        assert graph.tensor["0.weight"].shape == (5, 4)
        assert any(op.module == "1" for op in graph.operators)


def test_an_operator_outside_the_table_is_named_and_can_be_imported_opaque(cli: Cli) -> None:
    Path("mine.py").write_text(
        "import torch\n"
        "class Odd(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        return torch.pdist(x).sum()\n"
        "def build():\n"
        "    return torch.nn.Sequential(torch.nn.Linear(4, 4), Odd()), (torch.ones(4, 4),)\n"
    )
    refused = cli("import", "mine.py:build", "-o", "g.json")
    assert refused.code == 2 and not Path("g.json").exists()
    for word in ("_pdist_forward", "'1'", "mine.py:4", "--opaque", "register"):
        assert word in refused.err
    ran = cli("import", "mine.py:build", "-o", "g.json", "--opaque", "--json")
    assert ran.code == 0, ran.err
    assert len(ran.json["opaque_operators"]) == 1


def test_profile_measures_extends_and_is_used(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    from flexsearch.measure import recipe_work, updates

    monkeypatch.setattr(recipe_work, "ELEMENTS", (1 << 10, 1 << 12))  # what measuring more would take is time
    monkeypatch.setattr(updates, "UPDATE_BYTES", 1 << 16)
    graph = OperatorGraph.load("lenet")
    ran = cli("profile", "lenet", "-o", "p.json", "--max-parts", 1, "--repeats", 1, "--json")
    assert ran.code == 0, ran.err
    assert 0 < ran.json["entries"] == ran.json["new_entries"] <= len(graph.operators)
    figures = ran.json["figures"]
    assert figures["flops"]["float32"] > 1e8 and figures["fits"]["float32 loss"]["n"] > 0
    again = cli("profile", "lenet", "-o", "p.json", "--max-parts", 2, "--repeats", 1, "--extend", "p.json", "--json")
    assert again.json["entries"] > again.json["new_entries"] > 0
    assert again.json["figures"] == figures  # they are the device's, not the graph's
    profile = Profile.load("p.json")
    topology = Topology.load("ethernet-1g-2")
    row = cli("simulate", "lenet", "-t", "ethernet-1g-2", "--baseline", "single", "-p", "p.json", "--json").json
    strategy = Setting.of(graph, topology, profile).baseline("single")
    assert row["iteration_s"] == api.simulate(graph, topology, strategy, profile).makespan_s


# ---- real processes


def test_run_trains_on_local_ranks_and_puts_predicted_beside_measured(cli: Cli) -> None:
    cli("optimize", "lenet", "-t", "ethernet-1g-2", "--budget", 20)
    ran = cli("run", "-n", 2, "strategy.json", "--model", "flexsearch.zoo:lenet", "--batch", 64, "--steps", 3,
              "--trace", "t.json", "--profile", "p.json", "--json")  # fmt: skip
    assert ran.code == 0, ran.err
    assert "without the network" in ran.json["learned"]["reason"] and not Path("p.json").exists()
    assert [row["device"] for row in ran.json["memory"]] == [0, 1]
    assert [step["step"] for step in ran.json["steps"]] == [0, 1, 2]
    assert all(step["loss"] > 0 and step["iteration_s"] > 0 for step in ran.json["steps"])
    prediction = Strategy.load("strategy.json").prediction
    assert prediction is not None and ran.json["predicted_iteration_s"] == prediction.iteration_s
    assert tuple(ran.json["predicted_interval_s"]) == prediction.interval_s
    names = {e["args"].get("name", "") for e in json.loads(Path("t.json").read_text())["traceEvents"] if e["ph"] == "M"}
    assert any("predicted" in name for name in names) and any("measured" in name for name in names)
    assert ran.json["errors"][0].keys() >= {"kind", "name", "predicted_s", "measured_s"}


def test_run_refuses_the_wrong_number_of_ranks_and_the_wrong_model(cli: Cli) -> None:
    cli("optimize", "lenet", "-t", "ethernet-1g-2", "--budget", 5)
    few = cli("run", "-n", 3, "strategy.json", "--model", "flexsearch.zoo:lenet")
    assert few.code == 2 and "2 devices" in few.err and "-n 2" in few.err
    other = cli("run", "-n", 2, "strategy.json", "--model", "flexsearch.zoo:mlp", "--set", "width=8", "--json")
    clean(other)
    error = other.json["error"]
    assert error["kind"] == "strategy_error" and "'lenet'" in error["message"]
    assert other.err.count("flexsearch: ") == 1 and error["message"].splitlines()[0][:40] in other.err


def test_probe_writes_a_topology_to_optimize_for(cli: Cli) -> None:
    ran = cli("probe", "-n", 1, "--quick", "-o", "here.json", "--json")
    assert ran.code == 0, ran.err
    topology = Topology.load("here.json")
    assert len(topology.devices) == len(ran.json["devices"]) == 1
    assert cli("simulate", "lenet", "-t", "here.json", "--baseline", "single", "--json").json["iteration_s"] > 0


# ---- the same from Python


def test_optimize_in_training_code_takes_a_model_or_a_graph() -> None:
    from flexsearch.zoo import mlp

    model, inputs, targets, loss = mlp(batch=8, features=16, width=32)
    strategy = flexsearch.optimize(model, inputs, "ethernet-1g-2", loss=loss, targets=targets, budget=20)
    graph = flexsearch.import_model(model, inputs, loss, targets=targets)
    topology = flexsearch.Topology.load("ethernet-1g-2")
    strategy.check(graph, topology)
    assert strategy == flexsearch.optimize(graph, topology=topology, budget=20)


@pytest.mark.parametrize(
    ("text", "seconds", "proposals"),
    [("30s", 30, None), ("2m", 120, None), ("1.5h", 5400, None), ("500ms", 0.5, None), ("500", None, 500)],
)
def test_a_budget_is_a_time_or_a_number(text: str | int, seconds: float | None, proposals: int | None) -> None:
    assert parse_budget(text) == (seconds, proposals)


def test_the_package_holds_the_shipped_graphs_and_profiles() -> None:
    package = Path(flexsearch.__file__).parent
    for kind in ("graphs", "profiles"):
        shipped = sorted(p.name for p in (package.parent / kind).glob("*.json"))
        assert shipped == sorted(p.name for p in (package / "_data" / kind).glob("*.json"))
        assert shipped


def test_every_public_name_exists() -> None:
    for name in flexsearch.__all__:
        assert getattr(flexsearch, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = flexsearch.nonsense


def test_the_operator_of_the_documentation_works() -> None:
    import torch

    text = (Path(__file__).parent.parent / "docs" / "operators.md").read_text()
    names: dict[str, object] = {}
    blocks = [block.split("```")[0] for block in text.split("```python\n")[1:]]
    exec(next(block for block in blocks if "flexsearch.register" in block), names)
    scaled_tanh = names["scaled_tanh"]

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.scale = torch.nn.Linear(6, 8), torch.nn.Parameter(torch.ones(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return scaled_tanh(self.linear(x), self.scale)  # type: ignore[operator]

    model, x, y = Model(), torch.ones(4, 6), torch.zeros(4, 8)
    graph = flexsearch.import_model(model, (x,), torch.nn.functional.mse_loss, targets=y)
    op = next(op for op in graph.operators if op.kind == "scaled_tanh")
    assert op.splittable == ("n", "f")
    assert op.roles == {"n": "sample", "f": "parameter"}

    values = dict(model.named_parameters()) | {"input": x, "target": y}

    def halves(op: Operator) -> Intervals:
        return {a: [(0, n // 2), (n // 2, n)] if a in ("n", "f") else [(0, n)] for a, n in op.sizes.items()}

    for loss in (interpret(graph, values), interpret(graph, values, cuts=halves)):
        torch.testing.assert_close(loss[graph.loss], torch.nn.functional.mse_loss(model(x), y))
