"""Half precision as an option of a plan: element types, rates, memory of a parameter, files, refusals."""

from __future__ import annotations

import pickle
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from flexsearch.api import simulate
from flexsearch.cost import Costs
from flexsearch.errors import StrategyError
from flexsearch.graph import OperatorGraph
from flexsearch.graph.batch import with_batch
from flexsearch.graph.precision import with_precision
from flexsearch.lower import Lowering
from flexsearch.search.space import Space
from flexsearch.setting import Setting
from flexsearch.strategy import Options, Strategy
from flexsearch.strategy.baselines import baseline
from flexsearch.topology import Topology
from tests.conftest import Cli
from tests.memory_spans import spans_of
from tests.test_baselines import mlp, transformer
from tests.test_delta import TOPOLOGIES, normed, tied
from tests.test_memory import check, walk

ADAM = Options(optimizer="adam", precision="bf16")


def test_parameters_and_activations_are_half_as_wide_and_the_loss_is_not() -> None:
    graph = tied()
    half = with_precision(graph, "bf16")
    dtypes = {t.name: (t.dtype, half.tensor[t.name].dtype) for t in graph.tensors}
    floating = {name for name, (old, _) in dtypes.items() if old == "float32"}
    kept = {name for name in floating if dtypes[name][1] == "float32"}
    assert kept == {"loss.valid_count", graph.loss}
    assert {dtypes[name][1] for name in floating - kept} == {"bfloat16"}
    assert all(old == new for name, (old, new) in dtypes.items() if name not in floating)


def test_statistics_and_running_means_stay_float32() -> None:
    graph = with_precision(normed(), "fp16")
    for op in graph.operators:
        if op.kind in ("batch_statistics", "batch_norm_running"):
            assert {graph.tensor[name].dtype for name in op.outputs} <= {"float32", "float64"}
        if op.kind == "batch_norm":
            assert {graph.tensor[name].dtype for name in op.outputs} == {"float16"}
    assert {t.dtype for t in graph.of_kind("input", "buffer") if t.floating} == {"float32"}


def test_a_plan_in_another_precision_is_one_for_the_same_model() -> None:
    graph = mlp()
    half = with_precision(graph, "bf16")
    assert half.content_hash() == graph.content_hash()
    assert with_precision(graph, "bf16") is half and with_precision(half, "as-is") is graph
    assert with_precision(half, "fp16") is with_precision(graph, "fp16")
    again = pickle.loads(pickle.dumps(half))
    assert again == half and again.content_hash() == graph.content_hash()


@pytest.mark.parametrize(("optimizer", "expected"), [("sgd", 8), ("momentum", 12), ("adam", 16)])
def test_bytes_for_each_parameter_are_those_of_mixed_precision(optimizer: str, expected: int) -> None:
    """Rajbhandari et al., SC 2020, section 3.1: 16 bytes for adam."""
    graph, topology = mlp(), Topology.load("dgx-a100:1")
    options = ADAM.model_copy(update={"optimizer": optimizer})
    plan = baseline("single", graph, topology, options)
    held = simulate(graph, topology, plan).memory[0]
    elements = sum(t.nbytes // t.itemsize for t in graph.of_kind("parameter"))
    assert held.weights + held.optimizer == (expected - 2) * elements
    spans = spans_of(Setting.of(graph, topology).lower(plan))
    assert sum(span.nbytes for span in spans if span.part == "gradients") == 2 * elements


def test_compute_runs_at_the_rate_of_the_type_and_updates_move_the_same_bytes() -> None:
    graph, preset = OperatorGraph.load("gpt2"), Topology.load("dgx-a100:1")
    device = preset.devices[0]
    topology = Topology(**fields(preset, device.flops))
    assert device.flops_for("bfloat16") > device.flops_for("float32")
    half = with_precision(graph, "bf16")
    costs = Costs(graph, topology), Costs(half, topology)
    fast = Costs(graph, Topology(**fields(preset, {"float32": device.flops_for("bfloat16")})))
    linear, config = graph.index["blocks.0.mlp.fc1"], baseline("single", graph, topology).configs["blocks.0.mlp.fc1"]
    times = [Lowering(c.graph, c.topology, c).placed(linear, config).forward_s[0] for c in (*costs, fast)]
    assert times[0] > times[2] >= times[1]  # fewer bytes, too
    elements = 10**9
    assert costs[1].update(2 * elements, 1, 0, "adam", "bf16") == costs[0].update(4 * elements, 1, 0, "adam")


def fields(topology: Topology, flops: dict[str, float]) -> dict[str, object]:
    """A topology whose devices have these peaks, and no figures of what kernels reach of them."""
    devices = tuple(d.model_copy(update={"flops": flops, "efficiency": None}) for d in topology.devices)
    return {name: getattr(topology, name) for name in Topology.model_fields} | {"devices": devices}


def test_data_parallel_sends_half_the_bytes() -> None:
    graph, topology = mlp(), Topology.load("dgx-a100:1")
    moved = [
        simulate(graph, topology, baseline("data-parallel", graph, topology, options)).moved_bytes
        for options in (Options(), Options(precision="bf16"))
    ]
    assert moved[0] / moved[1] == pytest.approx(2, rel=0.01)


@pytest.mark.parametrize("graph", [normed, tied, lambda: transformer(layers=1)], ids=["norm", "tied", "transformer"])
def test_spans_are_those_of_the_definition(graph: object) -> None:
    made = with_precision(graph(), "bf16")  # type: ignore[operator]
    topology = TOPOLOGIES["slow hosts"]()
    space, rng = Space(made, topology), np.random.Generator(np.random.PCG64(1))
    lowering = Lowering(made, topology, Costs(made, topology))
    for _ in range(3):
        check(lowering.lower(space.random_plan(rng), ADAM))


def test_the_account_of_a_walk_is_that_of_the_plan() -> None:
    graph = with_precision(tied(), "bf16")
    walk(graph, TOPOLOGIES["slow hosts"](), 1, 10, ADAM)


def test_a_file_keeps_the_precision_and_says_nothing_of_the_usual(tmp_path: Path) -> None:
    graph, topology = mlp(), Topology.load("p100:1")
    for options in (ADAM, Options()):
        plan = baseline("data-parallel", graph, topology, options)
        plan.save(tmp_path / "plan.json")
        assert Strategy.load(tmp_path / "plan.json") == plan and plan.options == options
        assert ('"precision"' in (tmp_path / "plan.json").read_text()) == (options is ADAM)


def test_a_search_in_half_precision(tmp_path: Path) -> None:
    graph, topology = mlp(), Topology.load("p100:1")
    setting = Setting.of(graph, topology)
    found = setting.search(20, options=ADAM, processes=1)
    assert found.strategy.options.precision == "bf16" and found.strategy.graph.hash == graph.content_hash()
    assert simulate(graph, topology, found.strategy).makespan_s == found.simulation.makespan_s
    again = setting.search(5, start=found.strategy, options=found.strategy.options, processes=1)
    assert again.simulation.makespan_s <= found.simulation.makespan_s
    with pytest.raises(StrategyError, match="precision bf16, and the search is not"):
        setting.search(5, start=found.strategy, options=Options(), processes=1)


def test_a_search_on_many_devices_folds_the_graph_in_half_precision() -> None:
    graph, topology = mlp(batch=64), Topology.load("p100:4")  # folded into four hosts
    result = Setting.of(graph, topology).search(20, options=Options(precision="fp16"), processes=1)
    assert result.strategy.graph.hash == graph.content_hash()
    part = with_batch(with_precision(graph, "fp16"), Fraction(1, 4))
    assert part.content_hash() != graph.content_hash()
    assert with_precision(part, "fp16") == part


def test_the_command_line_plans_in_half_precision(cli: Cli) -> None:
    made = cli("optimize", "mlp", "-t", "ethernet-1g-2", "--precision", "bf16", "--budget", 5, "-o", "a.json", "--json")
    assert made.code == 0, made.err
    again = cli("simulate", "mlp", "-s", "a.json", "--json").json
    assert again["iteration_s"] == made.json["iteration_s"]


def test_activations_take_half_the_bytes() -> None:
    graph, topology = tied(), Topology.load("p100:1")
    spans = [
        spans_of(Setting.of(graph, topology).lower(baseline("data-parallel", graph, topology, options)))
        for options in (Options(optimizer="adam"), ADAM)
    ]
    full, half = (sum(s.nbytes for s in plan if s.part == "activations") for plan in spans)
    assert half == pytest.approx(full / 2, rel=0.05)
