"""Activations that are computed again and weights that are gathered again: rows, times, memory, files."""

from __future__ import annotations

from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from flexsearch import zoo
from flexsearch.api import simulate
from flexsearch.cost import Costs
from flexsearch.errors import StrategyError
from flexsearch.graph import OperatorGraph
from flexsearch.graph.importer import import_model
from flexsearch.graph.precision import with_precision
from flexsearch.lower import Lowered, Lowering, TaskKind
from flexsearch.lower.plan import PlanRows
from flexsearch.lower.recompute import regions_of
from flexsearch.lower.rows import FORWARD, GATHER, GATHER_ONCE, RECOMPUTE, REGATHER
from flexsearch.lower.schedule import Stages
from flexsearch.lower.templates import Templates
from flexsearch.search.hybrid import Layout, simulate_layout
from flexsearch.search.space import Space
from flexsearch.simulate.account import missing_memory
from flexsearch.simulate.engine import Engine
from flexsearch.simulate.units import make_account
from flexsearch.strategy import Options, States, Strategy, make_config
from flexsearch.strategy.baselines import baseline
from flexsearch.topology import Topology
from tests import test_delta, test_memory
from tests.conftest import Cli
from tests.engine_oracle import Simulation as EngineOracle
from tests.memory_spans import spans_of
from tests.test_baselines import mlp, transformer
from tests.test_delta import TOPOLOGIES, tied

FULL = Options(recompute="full", optimizer="adam")
RESHARD = Options(reshard_after_forward=True)
FIRST = Options(recompute="full", recompute_blocks=1)
NOT_LAST = Options(recompute="full", recompute_blocks=(2, 0))
EVERY = (FULL, Options(recompute="attention"), RESHARD, Options(recompute="full", reshard_after_forward=True), FIRST)
NAMES = ("full", "attention", "reshard", "both", "first")
BATCH, SEQ, HIDDEN, HEADS = 2, 64, 32, 4


class Plain(nn.Module):
    """A layer as Korthikanti et al. count it, without dropout; attention in parts or fused."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.ln1, self.ln2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.q, self.k, self.v, self.out = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        h = self.ln1(x)
        q, k, v = (f(h).view(BATCH, SEQ, HEADS, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        if self.fused:
            y = nn.functional.scaled_dot_product_attention(q, k, v)
        else:
            y = torch.softmax(q @ k.transpose(-1, -2), -1) @ v
        x = x + self.out(y.transpose(1, 2).reshape(BATCH, SEQ, HIDDEN))
        return x + self.down(nn.functional.gelu(self.up(self.ln2(x))))


class Stack(nn.Module):
    def __init__(self, layers: int, fused: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Plain(fused) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.0
        for layer in self.layers:
            x = layer(x)
        return x


@cache
def stack(layers: int, fused: bool = False) -> OperatorGraph:
    x = torch.zeros(BATCH, SEQ, HIDDEN)
    return with_precision(import_model(Stack(layers, fused), (x,), nn.functional.mse_loss, targets=x), "bf16")


def lowered(graph: OperatorGraph, options: Options, plan: str = "single") -> Lowered:
    topology = Topology.load("p100:1")
    lowering = Lowering(graph, topology, Costs(graph, topology))
    return lowering.lower(baseline(plan, graph, topology, options).in_order(graph), options)


def kept(graph: OperatorGraph, options: Options) -> int:
    """Bytes of activations that live from the forward to the backward pass."""
    plan = lowered(graph, options)
    blocks = plan.rows.blocks
    middle = 4 * max(int(b) for b in np.flatnonzero(blocks.kind == FORWARD)) + 3
    return sum(s.nbytes for s in spans_of(plan) if s.part == "activations" and s.first <= middle < s.last)


def of_a_layer(recompute: Any, fused: bool = False) -> int:
    """What one more layer adds."""
    options = Options(recompute=recompute, precision="bf16")
    few, more = (kept(stack(layers, fused), options) for layers in (2, 3))
    return more - few


def test_a_layer_keeps_what_korthikanti_et_al_count() -> None:
    """MLSys 2023, table 2: 34 sbh + 5 a s^2 b bytes, of which masks of dropout are 2 sbh + a s^2 b and the result of
    attention's dropout 2 a s^2 b; selective recomputation leaves 34 sbh, full 2 sbh."""
    sbh, scores = SEQ * BATCH * HIDDEN, HEADS * SEQ**2 * BATCH
    assert of_a_layer("none") == pytest.approx((34 - 2) * sbh + (5 - 3) * scores, rel=0.03)
    assert of_a_layer("attention") == pytest.approx((34 - 2) * sbh, rel=0.03)
    # The result of fused attention is what the projection behind it reads.
    assert of_a_layer("none", fused=True) == pytest.approx((34 - 2) * sbh, rel=0.03)
    assert of_a_layer("full") == 2 * sbh == of_a_layer("full", fused=True)


def test_a_region_is_a_block_of_the_model() -> None:
    graph = tied()
    regions = regions_of(graph, "full", [0] * len(graph.operators))
    by_region: dict[int, set[str]] = {}
    for op, region in zip(graph.operators, regions, strict=True):
        by_region.setdefault(region, set()).add(".".join(op.module.split(".")[:2]) if "blocks" in op.module else "")
    assert by_region == {-1: {""}, 0: {"blocks.0"}, 1: {"blocks.1"}}
    attention = regions_of(graph, "attention", [0] * len(graph.operators))
    assert [op.kind for op, r in zip(graph.operators, attention, strict=True) if r >= 0] == ["attention"] * 2


def test_of_each_stage_the_first_blocks_are_computed_again() -> None:
    graph = tied()
    count = len(graph.operators)
    whole = regions_of(graph, "full", [0] * count)
    first = regions_of(graph, "full", [0] * count, 1)
    assert first == [region if region == 0 else -1 for region in whole]
    cut = whole.index(1)
    assert regions_of(graph, "full", [int(i >= cut) for i in range(count)], 1) == whole
    plans = [lowered(graph, Options(recompute="full", recompute_blocks=n)) for n in (1, 2)]
    again = [sum(kind == TaskKind.RECOMPUTE for kind in plan.tasks.kind) for plan in plans]
    assert 0 < 2 * again[0] == again[1]


def test_each_stage_has_its_own_number_of_blocks() -> None:
    graph, options = tied(), Options(recompute="full", recompute_blocks=(1, 0))
    whole = regions_of(graph, "full", [0] * len(graph.operators))
    stage_of = [int(i >= whole.index(1)) for i in range(len(graph.operators))]
    assert regions_of(graph, "full", stage_of, (1, 0)) == [0 if region == 0 else -1 for region in whole]
    assert regions_of(graph, "full", stage_of, (0, 1)) == [0 if region == 1 else -1 for region in whole]
    topology = Topology.load("p100:1")
    with pytest.raises(StrategyError, match="2 numbers, and there are 1 stages"):
        baseline("single", graph, topology, options)


def test_the_last_stage_of_a_pipeline_keeps_its_activations() -> None:
    """Under 1F1B it has one microbatch at a time: computing again costs it time and saves it little."""
    graph, topology = OperatorGraph.load("gpt2").resized(16), Topology.load("p100:1")
    first, layout = (0, *(graph.index[f"blocks.{k}.ln1"] for k in (3, 6, 9))), Layout(1, 1, 4, 8)
    every, but_last = (
        simulate_layout(graph, topology, layout, Options(recompute="full", recompute_blocks=blocks), first=first)[1]
        for blocks in (None, (12, 12, 12, 0))
    )
    assert but_last.makespan_s < every.makespan_s
    peaks = [[memory.peak for memory in step.memory] for step in (every, but_last)]
    assert peaks[1][:3] == peaks[0][:3] and peaks[1][3] > peaks[0][3]
    with pytest.raises(StrategyError, match="3 numbers, and there are 4 stages"):
        simulate_layout(graph, topology, layout, Options(recompute="full", recompute_blocks=(1, 1, 0)))


def test_without_names_a_region_lies_between_sums() -> None:
    made = zoo.resnet50(batch=4, size=16, width=4, blocks=(2, 1, 1, 1), classes=8, device="meta")
    graph = import_model(made.model, made.inputs, made.loss, targets=made.targets)
    anonymous = OperatorGraph(**{f: getattr(graph, f) for f in OperatorGraph.model_fields} | {
        "operators": tuple(op.model_copy(update={"module": ""}) for op in graph.operators)
    })  # fmt: skip
    regions = regions_of(anonymous, "full", [0] * len(graph.operators))
    assert max(regions) >= 2 and regions[0] == regions[-1] == -1


def test_what_cannot_be_computed_again_is_refused() -> None:
    graph = mlp()
    for recompute in ("full", "attention"):
        with pytest.raises(StrategyError, match="could be computed again"):
            lowered(graph, Options(recompute=recompute))  # type: ignore[arg-type]


def test_a_full_recomputation_costs_a_forward_pass_of_the_blocks_and_its_communication() -> None:
    graph = tied()
    plain, again = (lowered(graph, o, "megatron") for o in (Options(), Options(recompute="full")))
    regions = regions_of(graph, "full", [0] * len(graph.operators))
    forward = [t for t in range(len(plain.tasks)) if plain.tasks.kind[t] == TaskKind.FORWARD]
    inside = [t for t in forward if regions[plain.tasks.operator[t]] >= 0]
    extra = [t for t in range(len(again.tasks)) if again.tasks.kind[t] == TaskKind.RECOMPUTE]
    assert sorted(work(again, t) for t in extra) == sorted(work(plain, t) for t in inside)
    for t in extra:  # before the backward task there
        back = [u for u in range(t) if again.tasks.kind[u] == TaskKind.BACKWARD]
        assert work(again, t)[:2] not in [work(again, u)[:2] for u in back]
    moved = Counter[tuple[str, str]]()
    for communication in again.tasks.communication:
        if communication is None or communication.purpose not in ("forward", "recompute"):
            continue
        for edge in (again.edges[member.key] for member in communication.members):
            region = regions[graph.producer[edge.tensor]]
            if region >= 0 and region in {regions[o] for o, _ in edge.readers}:
                moved[communication.purpose, edge.tensor] += 1
    for kind in ("forward", "recompute"):
        assert {name for purpose, name in moved if purpose == kind}
    assert all(moved["forward", name] == moved["recompute", name] for _, name in moved)


def work(plan: Lowered, task: int) -> tuple[int, int, float]:
    """Operator, device and duration of a task."""
    return plan.tasks.operator[task], plan.tasks.device[task], plan.tasks.duration[task]


def test_weights_are_gathered_once_more_and_do_not_live_through_the_step() -> None:
    graph = stack(3)
    plain, again = (lowered(graph, o, "fsdp") for o in (Options(), RESHARD))
    counts = [[c.purpose for c in p.tasks.communication if c is not None] for p in (plain, again)]
    gathers = counts[0].count("gather")
    assert gathers == counts[1].count("gather") > 0 and counts[0].count("regather") == 0
    trained = sum(1 for kind in again.rows.blocks.kind if kind == REGATHER)
    packs = sum(1 for kind in plain.rows.blocks.kind if kind == GATHER)
    assert counts[1].count("regather") == trained * gathers // packs
    peaks = [weights_at_the_end_of_forward(p) for p in (plain, again)]
    assert peaks[1] < 0.6 * peaks[0]


def weights_at_the_end_of_forward(plan: Lowered) -> int:
    middle = 4 * max(int(b) for b in np.flatnonzero(plan.rows.blocks.kind == FORWARD)) + 3
    return sum(s.nbytes for s in spans_of(plan) if s.part in ("weights", "gathered") and s.first <= middle < s.last)


@pytest.mark.parametrize("options", EVERY, ids=NAMES)
@pytest.mark.parametrize("graph", [tied, lambda: stack(2)], ids=["tied", "parts"])
def test_every_span_is_that_of_the_definition(graph: Any, options: Options) -> None:
    made, topology = graph(), TOPOLOGIES["slow hosts"]()
    space, rng = Space(made, topology), np.random.Generator(np.random.PCG64(5))
    lowering = Lowering(made, topology, Costs(made, topology))
    plans = [space.random_plan(rng) for _ in range(2)]
    plans.append(baseline("fsdp", made, topology).in_order(made))
    for configs in plans:
        test_memory.check(lowering.lower(configs, options))


@pytest.mark.parametrize("options", EVERY, ids=NAMES)
def test_walks_are_simulated_as_the_whole_plans_are(options: Options) -> None:
    graph = tied()
    topology, rng = TOPOLOGIES["slow hosts"](), np.random.default_rng(2)
    test_delta.walk(graph, topology, rng, options, 12)
    topology = TOPOLOGIES["shared processors"]()
    test_delta.walk(graph, topology, rng, options, 6, baseline("fsdp", graph, topology).in_order(graph))


@pytest.mark.parametrize("options", EVERY, ids=NAMES)
def test_the_account_of_a_walk_is_that_of_the_plan(options: Options) -> None:
    graph = tied()
    test_memory.walk(graph, test_memory.middling(graph, TOPOLOGIES["slow hosts"]()), 1, 10, options)


@pytest.mark.parametrize("options", (*EVERY, NOT_LAST), ids=(*NAMES, "not last"))
@pytest.mark.parametrize("count", [1, 3])
def test_stages_and_microbatches_do_it_in_every_backward_pass(count: int, options: Options) -> None:
    graph, topology = stack(2), TOPOLOGIES["slow hosts"]()
    border = graph.index["layers.1.ln1"]
    cut = Stages((0, border), ((0, 1), (2, 3)), count)
    lowering = Lowering(graph, topology, Costs(graph, topology))
    configs = [
        make_config(op, {a: 2 for a in op.axes_of("sample")[:1] if op.sizes[a] == 2}, devices, States.WEIGHTS)
        for op, devices in zip(graph.operators, map(cut.devices.__getitem__, cut.of(len(graph.operators))), strict=True)
    ]
    rows = PlanRows(lowering, Templates(lowering), options, cut)
    rows.set(dict(enumerate(configs)))
    account, sources = make_account(rows)
    missing_memory(account, sources, rows.state)
    plan = lowering.lower(configs, options, cut)
    spans = spans_of(plan)
    assert account.peak.tolist() == [test_memory.unrolled(spans, rows.schedule, d) for d in range(4)]
    again = Counter(plan.tasks.kind[t] for t in range(len(plan.tasks)))[TaskKind.RECOMPUTE]
    regions = regions_of(graph, options.recompute, cut.of(len(graph.operators)), options.recompute_blocks)
    assert again == count * sum(len(c.devices) for c, region in zip(configs, regions, strict=True) if region >= 0)
    purposes = Counter(c.purpose for c in plan.tasks.communication if c is not None)
    assert purposes["gather"] and (purposes["regather"] > 0) == options.reshard_after_forward
    expected = EngineOracle(plan.rows.schedule, plan.rows.machine, plan.rows.segments, plan.rows.segment)
    expected.run()
    engine = Engine(plan.rows.schedule, plan.rows.machine)
    assert engine.run(plan.rows.segments, plan.rows.segment) == expected.makespan


def test_plans_that_do_not_ask_for_it_have_the_rows_that_they_had() -> None:
    graph = transformer(layers=1)
    plan = lowered(graph, Options(), "data-parallel")
    assert not {RECOMPUTE, REGATHER, GATHER_ONCE} & set(plan.rows.blocks.kind.tolist())
    assert {c.purpose for c in plan.tasks.communication if c is not None} <= {"forward", "backward", "synchronise"}


@pytest.mark.parametrize("options", EVERY, ids=NAMES)
def test_a_file_keeps_the_options(tmp_path: Path, options: Options) -> None:
    graph, topology = tied(), Topology.load("p100:1")
    plan = baseline("fsdp", graph, topology, options)
    plan.save(tmp_path / "plan.json")
    again = Strategy.load(tmp_path / "plan.json")
    assert again == plan and again.options == options
    assert simulate(graph, topology, again).makespan_s >= simulate(graph, topology, with_options(plan)).makespan_s


def with_options(plan: Strategy) -> Strategy:
    return Strategy(plan.graph, plan.inputs, plan.cluster, plan.configs, Options(optimizer=plan.options.optimizer))


def test_the_command_line_plans_with_them(cli: Cli) -> None:
    options = ["--recompute", "full", "--reshard-after-forward", "--optimizer", "adam", "--precision", "bf16"]
    arguments = ["simulate", "gpt2", "-t", "p100:1", "--baseline", "fsdp", "--json"]
    again, plain = cli(*arguments, *options), cli(*arguments)
    assert again.code == 0, again.err
    assert again.json["peak_bytes"] < 0.5 * plain.json["peak_bytes"]
    assert cli("simulate", "mlp", "-t", "p100:1", "--baseline", "fsdp", "--recompute", "full").code != 0
