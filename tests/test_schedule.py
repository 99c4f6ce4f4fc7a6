"""Stages and microbatches: which actions devices run, in which order, and that the rows can be run so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from flexsearch.cost import Costs
from flexsearch.cost.ticks import TICK
from flexsearch.errors import FlexsearchError, StrategyError
from flexsearch.graph import OperatorGraph
from flexsearch.graph.samples import counting
from flexsearch.lower import Lowering
from flexsearch.lower.actions import actions
from flexsearch.lower.backward_order import FIRST_BUCKET_BYTES, buckets_of
from flexsearch.lower.rows import BACKWARD, COMPUTE, FORWARD, GATHER, REGATHER, SYNCHRONISE, UPDATE, WEIGHT_GRADIENT
from flexsearch.lower.schedule import EACH, ONCE, Stages, make_blocks, make_schedule
from flexsearch.simulate.delta import DeltaSimulator
from flexsearch.strategy import OperatorConfig, Options
from flexsearch.strategy.baselines import baseline
from flexsearch.strategy.schedule import V_KINDS, placement
from flexsearch.strategy.stage import ScheduleKind
from flexsearch.topology import Topology
from flexsearch.topology.parts import FORMS
from tests.engine_oracle import Simulation
from tests.random_strategies import configs
from tests.test_baselines import cnn, mlp, transformer
from tests.test_delta import TOPOLOGIES, dags, normed, tied

GRAPHS = {"mlp": mlp, "cnn": cnn, "transformer": lambda: transformer(layers=1), "norm": normed, "tied": tied}

KINDS: tuple[ScheduleKind, ...] = get_args(ScheduleKind)


@pytest.mark.parametrize(
    ("first", "devices", "microbatches"),
    [((1,), ((0,),), 1), ((0, 0), ((0,), (1,)), 1), ((0,), ((),), 1), ((0,), ((0,),), 0)],
)
def test_stages_that_make_no_sense_are_refused(first: Any, devices: Any, microbatches: int) -> None:
    with pytest.raises(FlexsearchError):
        Stages(first, devices, microbatches)


def test_a_piece_outside_its_stage_is_refused() -> None:
    graph, topology = mlp(), Topology.load("p100:1")
    lowering = Lowering(graph, topology, Costs(graph, topology))
    plan = [OperatorConfig((), (3,), 1)] * len(graph.operators)
    with pytest.raises(StrategyError, match="device 3"):
        lowering.lower(plan, Options(), Stages((0,), ((0, 1),)))


@pytest.mark.parametrize(
    ("kind", "orders", "says"),
    [("1f1b", 2, "does not divide backward passes"), ("zero-bubble", 1, "1 are given for 2 groups of devices")],
)
def test_orders_that_do_not_fit_their_schedule_are_refused(kind: Any, orders: int, says: str) -> None:
    rows = tuple(map(tuple, actions("zero-bubble", [[0], [1]], 2)))[:orders]
    stages = Stages((0, 2), ((0,), (1,)), 2, kind, rows)
    with pytest.raises(FlexsearchError, match=says):
        make_schedule(make_blocks(mlp(), Options(bucket_bytes=1), stages), stages, 2)


@pytest.mark.parametrize("name", ["data-parallel", "fsdp"])
def test_each_tensor_of_a_bucket_but_one_takes_ranks_what_the_topology_says(name: Any) -> None:
    graph, topology = mlp(width=64, layers=6), Topology.load("ethernet-1g:2")
    per_form = dict.fromkeys(FORMS, 1e-3) | {"all_reduce": 2e-3}
    communication = topology.communication.model_copy(update={"tensor_by_form": per_form})
    longer = topology.model_copy(update={"communication": communication})
    plan = baseline(name, graph, topology, Options()).configs
    configs = [plan[op.name] for op in graph.operators]
    plain, slow = (Lowering(graph, t, Costs(graph, t)).lower(configs, Options()).tasks for t in (topology, longer))
    sizes = set()
    for before, after, what in zip(plain.duration, slow.duration, plain.communication, strict=True):
        more = 0.0 if what is None else per_form[what.form] * (len(what.members) - 1)
        assert after - before == pytest.approx(more)
        sizes.add(0 if what is None else len(what.members))
    assert max(sizes) > 2


def test_the_first_bucket_of_a_stage_is_small() -> None:
    graph = mlp(width=400, layers=12)
    weights = graph.of_kind("parameter")
    assert sum(t.nbytes for t in weights) > 4 * FIRST_BUCKET_BYTES
    count = len(graph.operators)
    for stage_of in (None, Stages((0, count // 2), ((0,), (1,))).of(count)):
        buckets = buckets_of(graph, 25 * 2**20, stage_of)
        members = [[t for t in weights if buckets[t.name] == b] for b in sorted(set(buckets.values()))]
        assert len(members) == 2 * (1 if stage_of is None else 2)
        for first in members[::2]:
            assert len(first) == 1 or sum(t.nbytes for t in first) <= FIRST_BUCKET_BYTES
    assert len(set(buckets_of(graph, 1).values())) == len(graph.of_kind("parameter"))


@pytest.mark.parametrize("graph", GRAPHS)
def test_blocks_of_several_stages(graph: str) -> None:
    made = GRAPHS[graph]()
    count = len(made.operators)
    stages = Stages((0, count // 3, 2 * count // 3), ((0,), (1,), (2,)))
    blocks = make_blocks(made, Options(bucket_bytes=3000), stages)
    of = stages.of(count)
    rows = list(zip(blocks.kind, blocks.argument, blocks.stage, strict=True))
    assert rows[-1][0] == UPDATE and len(set((k, a) for k, a, _ in rows)) == len(rows)
    early = counting(made)  # in their stage, what counts targets comes first
    assert [a for k, a, _ in rows if k == FORWARD] == sorted(range(count), key=lambda i: (of[i], i not in early))
    assert all(of[a] == s for k, a, s in rows if k in (FORWARD, BACKWARD))
    place = {(k, a): b for b, (k, a, _) in enumerate(rows)}
    parameters = made.of_kind("parameter")
    assert sorted(w for pack in blocks.packs for w in pack) == list(range(len(parameters)))
    for p, pack in enumerate(blocks.packs):
        readers = [i for w in pack for i, _ in made.consumers[parameters[w].name]]
        assert all(place[GATHER, p] < place[FORWARD, i] for i in readers)
    for n, (starts, finishes) in enumerate(zip(blocks.starts, blocks.finishes, strict=True)):
        if finishes >= 0:
            assert place[SYNCHRONISE, n] > place[SYNCHRONISE, blocks.starts.index(finishes)]
        if starts >= 0:
            assert blocks.finishes.count(starts) == 1
    trained = sorted(w for bucket in blocks.buckets for w in bucket)
    assert trained == [w for w, t in enumerate(made.of_kind("parameter")) if t.name in made.differentiable]


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("limit", [1, 3000, 1 << 40])
def test_weights_are_gathered_with_their_neighbours_as_many_as_a_bucket_holds(
    graph: str, again: bool, limit: int
) -> None:
    made = GRAPHS[graph]()
    stages = Stages((0, len(made.operators) // 2), ((0,), (1,)))
    blocks = make_blocks(made, Options(bucket_bytes=limit, reshard_after_forward=again), stages)
    parameters, of = made.of_kind("parameter"), stages.of(len(made.operators))
    readers = [{i for i, _ in made.consumers[t.name]} for t in parameters]
    listed = list(zip(blocks.kind, blocks.argument, strict=True))
    gathered = {kind: [a for k, a in listed if k == kind] for kind in (GATHER, REGATHER)}
    assert sorted(gathered[GATHER]) == list(range(len(blocks.packs)))
    assert len(gathered[REGATHER]) == len(set(gathered[REGATHER])) and bool(gathered[REGATHER]) == again
    for pack in blocks.packs:
        assert len(pack) == 1 or sum(parameters[w].nbytes for w in pack) <= limit
        assert len(pack) == 1 or all(len(readers[w]) == 1 for w in pack)
        assert len({of[i] for w in pack for i in readers[w]}) <= (2 if len(pack) == 1 else 1)
        assert [min(readers[w]) for w in pack] == sorted(min(readers[w]) for w in pack)
    if limit == 1 << 40:
        together = {of[min(readers[pack[0]])] for pack in blocks.packs if len(pack) > 1}
        assert together == {0, 1} if graph != "tied" else together


def test_the_last_buckets_of_each_microbatch_are_added_in_the_next_one() -> None:
    """What is sent for each microbatch, behind the block that sends it, or where the stage sends its first bucket."""
    blocks = make_blocks(mlp(), Options(bucket_bytes=1), Stages((0, 3), ((0,), (1,)), 2))
    starts = {blocks.starts[blocks.argument[b]]: b for b, kind in enumerate(blocks.kind) if kind == SYNCHRONISE}
    for stage in range(2):
        each = [k for k, sums in enumerate(blocks.sums) if sums == EACH and blocks.stage[starts[k]] == stage]
        carried = [k for k in each if blocks.added[k] <= starts[k]]
        assert carried and carried == each[-len(carried) :]
        assert {blocks.added[k] for k in carried} == {starts[each[0]]}
        once = [k for k, sums in enumerate(blocks.sums) if sums == ONCE and blocks.stage[starts[k]] == stage]
        assert all(blocks.added[k] > starts[k] for k in once)


def test_a_pack_is_gathered_so_many_packs_before_it_is_read() -> None:
    made = mlp()
    parameters = made.of_kind("parameter")
    blocks = [make_blocks(made, Options(bucket_bytes=1, prefetch=k), Stages.one(1)) for k in range(3)]
    order = [[(k, a) for k, a in zip(b.kind, b.argument, strict=True) if k in (GATHER, FORWARD)] for b in blocks]
    first = [min(i for i, _ in made.consumers[parameters[pack[0]].name]) for pack in blocks[0].packs]
    reading = sorted(set(first))
    for prefetch, rows in enumerate(order):
        for p, reader in enumerate(first):
            ahead = rows[rows.index((GATHER, p)) : rows.index((FORWARD, reader))]
            assert sum(k == FORWARD and a in reading for k, a in ahead) == min(prefetch, reading.index(reader))


def computed(simulator: DeltaSimulator) -> dict[tuple[int, int, int], int]:
    """(kind of block, operator, device) -> ticks."""
    rows, s, found = simulator.rows, simulator.rows.plan.segments, {}
    for b, g in enumerate(rows.segment.tolist()):
        for d in range(len(rows.schedule.group)):
            table = int(s.device_steps[g]) + d
            for step in range(int(s.step_first[table]), int(s.step_first[table + 1])):
                if s.step_kind[step] == COMPUTE and rows.schedule.kind[b] != UPDATE:
                    found[int(rows.schedule.kind[b]), int(rows.schedule.argument[b]), d] = int(s.step_ticks[step])
    return found


@pytest.mark.parametrize("graph", GRAPHS)
def test_the_halves_of_a_backward_pass_take_as_long_as_the_whole_and_the_first_stage_has_none(graph: str) -> None:
    made, topology = GRAPHS[graph](), Topology.load("p100:1")
    half, costs = len(made.operators) // 2, Costs(made, topology)
    plan = [OperatorConfig((), (int(i >= half),), 1) for i in range(len(made.operators))]
    cuts = Stages((0, half), ((0,), (1,)), 2), Stages((0, half), ((0,), (1,)), 2, "zero-bubble")
    whole, halves = (computed(DeltaSimulator(made, topology, costs, Options(), plan, stages=cut)) for cut in cuts)
    assert not any(kind == WEIGHT_GRADIENT for kind, _, _ in whole)
    parts = {key[1:]: ticks for key, ticks in halves.items() if key[0] == WEIGHT_GRADIENT}
    for (kind, i, d), ticks in whole.items():
        part = parts.get((i, d), 0) if kind == BACKWARD else 0
        assert halves[kind, i, d] + part == ticks
        op = made.operators[i]
        weights = [made.tensor[name].kind == "parameter" and name in made.differentiable for name in op.inputs]
        assert ((i, d) in parts) == (any(weights) and i >= half)
        if kind == BACKWARD and (i, d) in parts:
            others = [name in made.differentiable and not own for name, own in zip(op.inputs, weights, strict=True)]
            assert part == ticks if not any(others) else 0 < part < ticks
            if op.kind == "linear" and any(others):
                assert part == pytest.approx(ticks / 2, rel=0.02)  # the bias is a sum


def test_weight_gradients_are_synchronised_after_the_pass_that_makes_them() -> None:
    made = mlp()
    blocks = make_blocks(made, Options(bucket_bytes=1), Stages((0, 3), ((0,), (1,)), 4, "zero-bubble"))
    kinds = ["W" if kind == WEIGHT_GRADIENT else "S" if kind == SYNCHRONISE else "" for kind in blocks.kind]
    assert not blocks.weight[0] and len(blocks.weight) == 2
    for backward, weight in zip(blocks.backward[1:], blocks.weight[1:], strict=True):
        assert set(blocks.kind[backward.start : backward.stop]) == {BACKWARD} and backward.stop == weight.start
        assert kinds[weight.start] == "W" and set(kinds[weight.start : weight.stop]) == {"W", "S"}
    whole = make_blocks(made, Options(bucket_bytes=1), Stages((0, 3), ((0,), (1,)), 4))
    assert not any(whole.weight) and WEIGHT_GRADIENT not in whole.kind and whole.buckets == blocks.buckets
    alone = make_blocks(made, Options(bucket_bytes=1), Stages((0,), ((0,),), 1, "zero-bubble"))
    assert WEIGHT_GRADIENT not in alone.kind


@st.composite
def staged(
    draw: st.DrawFn, graph: OperatorGraph, devices: int, kinds: Sequence[Any] = KINDS, most: int = 2
) -> tuple[Stages, tuple[OperatorConfig, ...]]:
    """A random cut into stages, and configs. ``most``: stages on a device, where a V does not need two."""
    order = draw(st.sampled_from(kinds))
    groups = draw(st.integers(1, min(devices, 3, len(graph.operators) // (2 if order in V_KINDS else 1))))
    each = draw(st.integers(1, min(most, len(graph.operators) // groups))) if order not in V_KINDS else 2
    cuts = sorted(draw(st.permutations(range(1, len(graph.operators))))[: groups * each - 1])
    ends = sorted(draw(st.permutations(range(1, devices)))[: groups - 1])
    members = [tuple(range(a, b)) for a, b in zip([0, *ends], [*ends, devices], strict=True)]
    microbatches = draw(st.sampled_from([1, 2, 3, 4, 6]))
    if order in ("interleaved-1f1b", "zero-bubble"):
        microbatches = groups * draw(st.integers(1, 2))
    elif order == "dualpipe-v":
        microbatches = 2 * groups + draw(st.integers(0, 2))
    held = placement("breadth-first" if order == "gpipe" else order, groups, each)
    of = {stage: members[g] for g, row in enumerate(held) for stage in row}
    stages = Stages((0, *cuts), tuple(of[s] for s in range(groups * each)), microbatches, order)
    chosen = []
    for op, stage in zip(graph.operators, stages.of(len(graph.operators)), strict=True):
        on = stages.devices[stage]
        config = draw(configs(op, len(on)))
        chosen.append(config.on(on[d] for d in config.devices))
    return stages, tuple(chosen)


def check_against_definition(simulator: DeltaSimulator) -> None:
    """Makespan, start and end of every row."""
    rows = simulator.rows
    segments, segment = rows.plan.segments, rows.segment
    definition = Simulation(rows.schedule, rows.machine, segments, segment)
    assert simulator.seconds == definition.run() * TICK
    times, seen = simulator.times(), 0
    for (m, b, communicates, number), (start, end) in definition.times.items():
        firsts = times.communication_first if communicates else times.computation_first
        starts, ends = (
            (times.communication_start, times.communication_end) if communicates
            else (times.computation_start, times.computation_end)
        )  # fmt: skip
        place = int(firsts[b]) + number
        assert (starts[m, place], ends[m, place]) == (start, end)
        seen += 1
    assert seen == (times.communication_end >= 0).sum() + (times.computation_end >= 0).sum()


@pytest.mark.parametrize("name", TOPOLOGIES)
@pytest.mark.parametrize("graph", GRAPHS)
@settings(derandomize=True, deadline=None, max_examples=4, phases=(Phase.generate,))
@given(data=st.data())
def test_random_stages_and_microbatches_run_as_defined(data: Any, graph: str, name: str) -> None:
    made, topology = GRAPHS[graph](), TOPOLOGIES[name]()
    stages, plan = data.draw(staged(made, len(topology.devices)))
    bucket, prefetch = data.draw(st.sampled_from([1, 3000, 25 * 2**20])), data.draw(st.integers(0, 2))
    options = Options(bucket_bytes=bucket, prefetch=prefetch, reshard_after_forward=data.draw(st.booleans()))
    simulator = DeltaSimulator(made, topology, Costs(made, topology), options, plan, stages=stages)
    check_against_definition(simulator)
    tasks = simulator.lowering.lower(plan, options, stages).tasks
    assert all(before < t for t, row in enumerate(tasks.dependencies) for before in row)
    assert set(tasks.microbatch) == set(range(stages.microbatches))


@settings(derandomize=True, deadline=None, max_examples=30, phases=(Phase.generate,))
@given(data=st.data(), graph=dags(), name=st.sampled_from(sorted(TOPOLOGIES)))
def test_a_changed_plan_has_the_rows_that_it_has_from_nothing(data: Any, graph: OperatorGraph, name: str) -> None:
    topology, options = TOPOLOGIES[name](), Options(bucket_bytes=2000, reshard_after_forward=data.draw(st.booleans()))
    stages, plan = data.draw(staged(graph, len(topology.devices)))
    costs = Costs(graph, topology)
    simulator = DeltaSimulator(graph, topology, costs, options, plan, stages=stages)
    for _ in range(4):
        changes = {}
        for i in data.draw(st.lists(st.integers(0, len(plan) - 1), min_size=1, max_size=3)):
            on = stages.devices[stages.of(len(plan))[i]]
            config = data.draw(configs(graph.operators[i], len(on)))
            changes[i] = config.on(on[d] for d in config.devices)
        seconds = simulator.propose(changes)
        if data.draw(st.booleans()):
            simulator.accept()
            plan = tuple(changes.get(i, config) for i, config in enumerate(plan))
            other = DeltaSimulator(graph, topology, costs, options, plan, stages=stages)
            assert seconds == other.seconds
            assert contents(simulator) == contents(other)
            check_against_definition(simulator)
        else:
            simulator.reject()


def contents(simulator: DeltaSimulator) -> list[Any]:
    """All that the segments of a plan say, by block."""
    rows, s = simulator.rows, simulator.rows.plan.segments
    found: list[Any] = []
    for g in rows.segment.tolist():
        table, devices = int(s.device_steps[g]), len(rows.schedule.group)
        for d in range(table, table + devices):
            of = slice(int(s.step_first[d]), int(s.step_first[d + 1]))
            found.append([column[of].tolist() for column in (s.step_kind, s.step_block, s.step_row, s.step_ticks)])
        for c in range(int(s.communication_first[g]), int(s.communication_last[g])):
            found.append([int(column[c]) for column in (s.communication_ticks, s.missing, s.turn)])
            for name, columns in (
                ("link", (s.link, s.link_ticks)), ("drag", (s.drag, s.drag_ticks)), ("receiver", (s.receiver,)),
                ("follower", (s.follower_block, s.follower_row)),
            ):  # fmt: skip
                of = slice(int(getattr(s, f"{name}_first")[c]), int(getattr(s, f"{name}_last")[c]))
                found.append([column[of].tolist() for column in columns])
    return found


def test_rows_that_differ_are_told_apart() -> None:
    graph, topology = mlp(), Topology.load("p100:1")
    one = [OperatorConfig((), (0,), 1)] * len(graph.operators)
    costs = Costs(graph, topology)
    other = [*one[:-1], OperatorConfig((), (1,), 1)]
    simulators = [DeltaSimulator(graph, topology, costs, Options(), plan) for plan in (one, other)]
    assert contents(simulators[0]) != contents(simulators[1])
    ticks = simulators[0].rows.plan.segments.step_ticks
    ticks[np.flatnonzero(ticks)[0]] += 10**9  # 1 ms: one tick more hides behind launches
    with pytest.raises(AssertionError):
        check_against_definition(simulators[0])
