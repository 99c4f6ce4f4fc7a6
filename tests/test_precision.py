"""Half precision as an option of a plan: element types, rates, memory of a parameter, files, refusals."""

from __future__ import annotations

import json
import pickle
from fractions import Fraction
from math import prod
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from flexsearch.api import simulate
from flexsearch.calibrating import read_rows
from flexsearch.cost import Costs, Profile, ProfileDevice
from flexsearch.cost.efficiency import moving_rate
from flexsearch.cost.ticks import TICK
from flexsearch.errors import FileFormatError, StrategyError
from flexsearch.fitting import training_bytes
from flexsearch.graph import OperatorGraph
from flexsearch.graph.batch import with_batch
from flexsearch.graph.precision import with_precision
from flexsearch.graph.weight_gradients import able, with_weight_gradients
from flexsearch.lower import Lowered, Lowering
from flexsearch.lower.backward_order import buckets_of
from flexsearch.lower.rows import BACKWARD, COMPUTE
from flexsearch.report.layout_differences import layout_comparison_data
from flexsearch.report.layouts import layout_words
from flexsearch.runtime.room import sent_bytes
from flexsearch.search.space import Space
from flexsearch.setting import Setting
from flexsearch.simulate.staged import StagedSimulators
from flexsearch.strategy import Options, States, Strategy
from flexsearch.strategy.baselines import baseline
from flexsearch.strategy.pipeline import Pipeline
from flexsearch.strategy.records import WeightRecipe
from flexsearch.topology import Topology
from flexsearch.topology.changes import with_code
from tests.conftest import Cli
from tests.memory_spans import spans_of
from tests.test_baselines import mlp, transformer
from tests.test_delta import TOPOLOGIES, normed, tied
from tests.test_memory import check, walk

ADAM = Options(optimizer="adam", precision="bf16")
PURPOSES = ("gather", "synchronise")


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
    times = [c.compute(linear, Lowering(c.graph, c.topology, c).placed(linear, config).pieces[0], 0)[0] for c in
             (*costs, fast)]  # fmt: skip
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


# ---- gradients in float32

WIDE = Options(optimizer="adam", precision="bf16", gradients="float32")


def elements(graph: OperatorGraph) -> int:
    return sum(t.nbytes // t.itemsize for t in graph.of_kind("parameter"))


def test_gradients_in_float32_are_those_of_weights_in_half_precision_alone() -> None:
    graph = normed()
    half, wide = with_precision(graph, "bf16"), with_precision(graph, "bf16", "float32")
    assert wide.tensors == half.tensors and wide != half and wide.content_hash() == graph.content_hash()
    assert with_precision(wide, "bf16") is half and with_precision(half, "bf16", "float32") is wide
    assert {wide.gradient[t.name].dtype for t in wide.of_kind("parameter")} == {"float32"}
    assert {t.dtype for t in wide.of_kind("parameter")} == {"bfloat16", "float32"}  # those of batch norms
    for name in {t.name for t in graph.tensors} - {t.name for t in graph.of_kind("parameter")}:
        assert wide.gradient[name] == wide.tensor[name]
    assert all(half.gradient[name] == half.tensor[name] for name in half.tensor)
    for part in (with_batch(wide, Fraction(1, 4)), with_weight_gradients(wide, able(wide))):
        assert {part.gradient[t.name].dtype for t in part.of_kind("parameter")} == {"float32"}
    again = pickle.loads(pickle.dumps(wide))
    assert type(again) is type(wide) and again.tensors == wide.tensors and again.gradient == wide.gradient


def test_they_take_4_bytes_a_parameter_and_2_more_while_they_are_made() -> None:
    graph, topology = mlp(), Topology.load("dgx-a100:1")
    lowered = [Setting.of(graph, topology).lower(baseline("single", graph, topology, o)) for o in (ADAM, WIDE)]
    half, wide = ([s for s in spans_of(one) if s.part == "gradients"] for one in lowered)
    assert sum(s.nbytes for s in half) == 2 * elements(graph)
    assert sum(s.nbytes for s in wide if s.last > s.first) == 4 * elements(graph)
    assert sum(s.nbytes for s in wide if s.last == s.first) == 2 * elements(graph)
    others = [[s for s in spans_of(one) if s.part != "gradients"] for one in lowered]
    assert others[0] == others[1]
    assert training_bytes(Setting.of(graph, topology), WIDE) == 18 * elements(graph)


def test_exchanges_of_gradients_have_4_bytes_an_element_and_gathers_2() -> None:
    graph, topology = mlp(), Topology.load("dgx-a100:1")
    for name in ("data-parallel", "fsdp"):
        rows = [Setting.of(graph, topology).lower(baseline(name, graph, topology, o)).tasks for o in (ADAM, WIDE)]
        moved = [
            {p: sum(c.nbytes for c in tasks.communication if c is not None and c.purpose == p) for p in PURPOSES}
            for tasks in rows
        ]
        assert moved[1]["synchronise"] == 2 * moved[0]["synchronise"] > 0
        assert moved[1]["gather"] == moved[0]["gather"] and bool(moved[0]["gather"]) == (name == "fsdp")


def test_buckets_and_messages_count_what_is_sent() -> None:
    graph, topology = mlp(), Topology.load("ethernet-1g-2")
    half, wide = (o.typed(graph) for o in (ADAM, WIDE))
    assert buckets_of(wide, 8000) == buckets_of(graph, 8000) == buckets_of(half, 4000) != buckets_of(half, 8000)
    sent = []
    for options in (ADAM, WIDE):
        plan = baseline("fsdp", graph, topology, options)  # sums go in messages here
        lowered = Setting.of(graph, topology).lower(plan)
        tasks = [t for t, what in enumerate(lowered.tasks.communication) if what is not None]
        sent.append(sum(sent_bytes(lowered, 0, t) for t in tasks))
    assert sent[1] == 2 * sent[0] > 0


def test_recipes_count_vectors_of_float32() -> None:
    graph, topology = mlp(), Topology.load("p100:1")
    recipes = (WeightRecipe(recipe="top-k:k=10"),)
    groups = []
    for options in (ADAM, WIDE):
        plan = baseline("data-parallel", graph, topology, options)
        plan.options = options.model_copy(update={"recipes": recipes})
        groups += Setting.of(graph, topology).lower(plan).recipe_groups
    assert [group.sizes.itemsize for group in groups] == [2, 4]


@pytest.mark.parametrize(("count", "states", "nbytes"), [(1, 0, 6), (4, 0, 9), (4, 1, 9), (4, 2, 6), (4, 3, 6)])
def test_casting_and_adding_moves_so_many_bytes_an_element(count: int, states: int, nbytes: int) -> None:
    """A cast reads 2 and writes 4, and what adds to a sum, all microbatches but the first, reads 4 more."""
    graph, topology = mlp(batch=64), Topology.load("dgx-a100:1")
    rate = moving_rate(topology.devices[0], "float32")
    ticks = []
    for options in (ADAM, WIDE):
        plan = baseline("data-parallel", graph, topology, options)
        configs = {name: config.sharded(States(states)) for name, config in plan.configs.items()}
        plan = Strategy.make(graph, topology, configs, options, microbatches=count)
        ticks.append(backward_ticks(Setting.of(graph, topology).lower(plan)))
    for op in graph.operators:
        weights = sum(prod(graph.tensor[n].shape) for n in op.inputs if graph.tensor[n].kind == "parameter")
        more = ticks[1][op.name] - ticks[0][op.name]
        assert more == pytest.approx(weights * nbytes / rate / TICK, abs=1.5), op.name
        assert (more > 0) == (weights > 0)


def backward_ticks(lowered: Lowered) -> dict[str, int]:
    """Ticks of the backward passes of a device, by operator."""
    rows, found = lowered.rows, dict.fromkeys((op.name for op in lowered.graph.operators), 0)
    for block, (kind, argument) in enumerate(zip(rows.schedule.kind, rows.schedule.argument, strict=True)):
        if kind == BACKWARD:
            first = int(rows.segments.step_first[rows.segments.device_steps[rows.segment[block]]])
            last = int(rows.segments.step_first[rows.segments.device_steps[rows.segment[block]] + 1])
            computes = [k for k in range(first, last) if rows.segments.step_kind[k] == COMPUTE]
            found[lowered.graph.operators[argument].name] = int(rows.segments.step_ticks[computes].sum())
    return found


def test_an_update_reads_4_bytes_of_a_gradient_and_casts_none() -> None:
    graph, fused = mlp(), Topology.load("dgx-a100:1")
    rate, count = moving_rate(fused.devices[0], "float32", "update"), 10**9
    seconds = [Costs(o.typed(graph), fused).update(2 * count, 1, 0, "adam", "bf16") for o in (ADAM, WIDE)]
    assert seconds[1] - seconds[0] == pytest.approx(2 * count / rate)
    eager = with_code(fused, "eager")
    rate = moving_rate(eager.devices[0], "float32")
    seconds = [Costs(o.typed(graph), eager).update(2 * count, 1, 0, "adam", "bf16") for o in (ADAM, WIDE)]
    assert seconds[0] - seconds[1] == pytest.approx(6 * count / rate)


def test_a_file_says_that_gradients_are_in_float32(tmp_path: Path) -> None:
    graph, topology, path = mlp(), Topology.load("p100:1"), tmp_path / "plan.json"
    plan = baseline("data-parallel", graph, topology, WIDE)
    plan.save(path)
    assert Strategy.load(path) == plan and plan.options.gradients == "float32"
    assert plan.content_hash() != baseline("data-parallel", graph, topology, ADAM).content_hash()
    data = json.loads(path.read_text())
    assert data["gradients"] == "float32"
    for wrong, said in (({"precision": None}, "precision bf16 or fp16"), ({"gradients": "bf16"}, "float32")):
        path.write_text(json.dumps({k: v for k, v in (data | wrong).items() if v is not None}))
        with pytest.raises(FileFormatError, match=said) as error:
            Strategy.load(path)
        assert "gradients" in str(error.value)
    with pytest.raises(ValidationError, match="precision bf16 or fp16"):
        Options(gradients="float32")


def test_plans_whose_gradients_differ_in_type_are_told_apart() -> None:
    graph, topology = mlp(), Topology.load("p100:1")
    setting = Setting.of(graph, topology)
    half, wide = (baseline("data-parallel", graph, topology, o) for o in (ADAM, WIDE))
    with pytest.raises(StrategyError, match="differ in gradients, as-is and float32"):
        setting.difference(half, wide)
    with pytest.raises(StrategyError, match="gradients float32, and the search is not"):
        setting.search(5, start=wide, options=ADAM, processes=1)
    found = setting.search(5, start=wide, processes=1)
    assert found.strategy.options.gradients == "float32"
    staged = [Strategy.make(graph, topology, p.configs, p.options, microbatches=2) for p in (half, wide)]
    (row,) = layout_comparison_data(graph, setting.difference(*staged))["differences"]  # type: ignore[arg-type]
    assert (row["what"], row["values"]) == ("gradients of weights", ["as-is", "float32"])
    assert layout_words(setting.staged_row("", staged[1])).endswith("bf16 with float32 masters and gradients")


def test_simulators_under_another_profile_keep_the_types_of_plans() -> None:
    graph, topology = mlp(), Topology.load("dgx-a100:1")
    plan = baseline("single", graph, topology, WIDE)
    simulators = StagedSimulators(graph, topology, None, WIDE)
    args = Pipeline.of(plan, graph), plan.in_order(graph), WIDE
    again = simulators.under(Profile(device=ProfileDevice(kind="cuda", model="A100-SXM4-80GB"), torch="2"))
    assert again.simulator(*args).seconds == simulators.simulator(*args).seconds


def test_rows_to_calibrate_with_have_a_column_for_it(tmp_path: Path) -> None:
    topology, path = Topology.load("dgx-a100:1"), tmp_path / "rows.csv"
    path.write_text("graph,data,precision,gradients,measured_s\nmlp,8,bf16,as-is,1\nmlp,8,bf16,float32,1\n")
    profile = Profile(device=ProfileDevice(kind="cuda", model="A100-SXM4-80GB"), torch="2")
    half, wide = (row.predict(profile) for row in read_rows(path, topology))
    assert wide > 1.2 * half
    for wrong in ("mlp,8,as-is,float32,1", "mlp,8,bf16,float16,1"):
        path.write_text(f"graph,data,precision,gradients,measured_s\n{wrong}\n")
        with pytest.raises(FileFormatError, match="gradients is 'float"):
            read_rows(path, topology)


def test_the_command_line_plans_with_gradients_in_float32(cli: Cli) -> None:
    half = ["mlp", "-t", "ethernet-1g-2", "--precision", "bf16"]
    made = cli("optimize", *half, "--gradients", "float32", "--budget", 5, "-o", "a.json", "--json")
    assert made.code == 0, made.err
    assert Strategy.load("a.json").options.gradients == "float32"
    assert cli("simulate", "mlp", "-s", "a.json", "--json").json["iteration_s"] == made.json["iteration_s"]
    times = [cli("simulate", *half, "--baseline", "data-parallel", *more, "--json").json["iteration_s"]
             for more in ((), ("--gradients", "float32"))]  # fmt: skip
    assert times[1] > 1.5 * times[0]
    for command in (["compare"], ["simulate", "--baseline", "single"], ["optimize", "-b", "1"], ["scale"]):
        done = cli(command[0], "mlp", "-t", "ethernet-1g:2", *command[1:], "--gradients", "float32")
        assert done.code == 2 and "--precision bf16 or fp16" in done.err, done.err


def test_graphs_are_compared_after_their_costs_were_asked_for() -> None:
    one, other, different = transformer(layers=1), transformer(layers=1), transformer(layers=2)
    for graph in (one, other):
        Costs(graph, Topology.load("dgx-a100:1"))
        assert all(op.plain is op for op in graph.operators)
    assert one == other and one != different
