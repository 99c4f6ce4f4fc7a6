"""Stages and microbatches: which actions devices run, in which order, and that the rows can be run so."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from flexsearch.cost import Costs
from flexsearch.cost.ticks import TICK
from flexsearch.errors import FlexsearchError, StrategyError
from flexsearch.graph import OperatorGraph
from flexsearch.lower import Lowering
from flexsearch.lower.rows import BACKWARD, FORWARD, GATHER, SYNCHRONISE, UPDATE
from flexsearch.lower.schedule import Stages, actions, make_blocks
from flexsearch.runtime.program import compile_program
from flexsearch.simulate.delta import DeltaSimulator
from flexsearch.strategy import OperatorConfig, Options
from flexsearch.topology import Topology
from tests.engine_oracle import Simulation
from tests.random_strategies import configs
from tests.test_baselines import cnn, mlp, transformer
from tests.test_delta import TOPOLOGIES, dags, normed, tied

GRAPHS = {"mlp": mlp, "cnn": cnn, "transformer": lambda: transformer(layers=1), "norm": normed, "tied": tied}


KINDS = ("gpipe", "1f1b", "interleaved-1f1b")


def words(rows: Any) -> list[str]:
    return [" ".join(map(str, row)) for row in rows]


@pytest.mark.parametrize(
    ("order", "held", "microbatches", "expected"),
    [
        ("gpipe", [[0], [1]], 2, ["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"]),
        ("1f1b", [[0], [1]], 3, ["0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"]),
        ("1f1b", [[0, 1]], 2, ["0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1"]),
        ("1f1b", [[0], [1]], 1, ["0F0 0B0", "1F0 1B0"]),
        (
            "interleaved-1f1b", [[0, 2], [1, 3]], 2,
            ["0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1", "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1"],
        ),
    ],
)  # fmt: skip
def test_orders_of_actions(order: Any, held: list[list[int]], microbatches: int, expected: list[str]) -> None:
    assert words(actions(order, held, microbatches)) == expected


@pytest.mark.parametrize("order", KINDS)
@pytest.mark.parametrize("groups", [1, 2, 3, 4])
@pytest.mark.parametrize("each", [1, 2, 3])
@pytest.mark.parametrize("microbatches", [1, 2, 4, 12])
def test_every_stage_runs_every_microbatch_forward_then_backward(
    order: Any, groups: int, each: int, microbatches: int
) -> None:
    held = [list(range(g, groups * each, groups)) for g in range(groups)]
    if order == "1f1b":
        held = [list(range(g * each, (g + 1) * each)) for g in range(groups)]
    rounds = max(1, microbatches // groups)
    if order == "interleaved-1f1b" and microbatches > 1 and microbatches % rounds:
        with pytest.raises(FlexsearchError, match="cannot run"):
            actions(order, held, microbatches)
        return
    for row, stages in zip(actions(order, held, microbatches), held, strict=True):
        assert sorted(row) == sorted((s, k, m) for s in stages for k in "FB" for m in range(microbatches))
        for stage in stages:
            for m in range(microbatches):
                assert row.index((stage, "F", m)) < row.index((stage, "B", m))
            assert [m for s, k, m in row if (s, k) == (stage, "B")][-1] == microbatches - 1


@pytest.mark.parametrize(
    ("order", "held", "microbatches"),
    [("1f1b", [[0, 2], [1]], 2), ("1f1b", [[0], [0, 1]], 2), ("interleaved-1f1b", [[0, 1], [2, 3]], 2),
     ("interleaved-1f1b", [[0, 2], [1, 3]], 5)],
)  # fmt: skip
def test_orders_that_do_not_fit_are_refused(order: Any, held: list[list[int]], microbatches: int) -> None:
    with pytest.raises(FlexsearchError, match="cannot run"):
        actions(order, held, microbatches)


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


@pytest.mark.parametrize("graph", GRAPHS)
def test_blocks_of_several_stages(graph: str) -> None:
    made = GRAPHS[graph]()
    count = len(made.operators)
    stages = Stages((0, count // 3, 2 * count // 3), ((0,), (1,), (2,)))
    blocks = make_blocks(made, Options(bucket_bytes=3000), stages)
    of = stages.of(count)
    rows = list(zip(blocks.kind, blocks.argument, blocks.stage, strict=True))
    assert rows[-1][0] == UPDATE and len(set((k, a) for k, a, _ in rows)) == len(rows)
    assert [a for k, a, _ in rows if k == FORWARD] == list(range(count))
    assert all(of[a] == s for k, a, s in rows if k in (FORWARD, BACKWARD))
    place = {(k, a): b for b, (k, a, _) in enumerate(rows)}
    for w, tensor in enumerate(made.of_kind("parameter")):
        readers = [i for i, _ in made.consumers[tensor.name]]
        assert all(place[GATHER, w] < place[FORWARD, i] for i in readers)
    for n, (starts, finishes) in enumerate(zip(blocks.starts, blocks.finishes, strict=True)):
        if finishes >= 0:
            assert place[SYNCHRONISE, n] > place[SYNCHRONISE, blocks.starts.index(finishes)]
        if starts >= 0:
            assert blocks.finishes.count(starts) == 1
    trained = sorted(w for bucket in blocks.buckets for w in bucket)
    assert trained == [w for w, t in enumerate(made.of_kind("parameter")) if t.name in made.differentiable]


@st.composite
def staged(draw: st.DrawFn, graph: OperatorGraph, devices: int) -> tuple[Stages, tuple[OperatorConfig, ...]]:
    """A random cut into stages with configs on their devices."""
    order = draw(st.sampled_from(KINDS))
    groups = draw(st.integers(1, min(devices, 3)))
    each = draw(st.integers(1, 2)) if order != "1f1b" else 1
    count = min(groups * each, len(graph.operators))
    groups = min(groups, count)
    cuts = sorted(draw(st.permutations(range(1, len(graph.operators))))[: count - 1])
    ends = sorted(draw(st.permutations(range(1, devices)))[: groups - 1])
    members = [tuple(range(a, b)) for a, b in zip([0, *ends], [*ends, devices], strict=True)]
    microbatches = draw(st.sampled_from([1, 2, 3, 4, 6]))
    if order == "interleaved-1f1b":
        count = len(cuts) + 1
        if count % groups:
            order = "gpipe"
        microbatches = groups * draw(st.integers(1, 2))
    stages = Stages((0, *cuts), tuple(members[s % groups] for s in range(len(cuts) + 1)), microbatches, order)
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
    options = Options(bucket_bytes=bucket, prefetch=prefetch)
    simulator = DeltaSimulator(made, topology, Costs(made, topology), options, plan, stages=stages)
    check_against_definition(simulator)
    tasks = simulator.lowering.lower(plan, options, stages).tasks
    assert all(before < t for t, row in enumerate(tasks.dependencies) for before in row)
    assert set(tasks.microbatch) == set(range(stages.microbatches))


@settings(derandomize=True, deadline=None, max_examples=30, phases=(Phase.generate,))
@given(data=st.data(), graph=dags(), name=st.sampled_from(sorted(TOPOLOGIES)))
def test_a_changed_plan_has_the_rows_that_it_has_from_nothing(data: Any, graph: OperatorGraph, name: str) -> None:
    topology, options = TOPOLOGIES[name](), Options(bucket_bytes=2000)
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
    simulators[0].rows.plan.segments.step_ticks[np.flatnonzero(simulators[0].rows.plan.segments.step_ticks)[0]] += 1
    with pytest.raises(AssertionError):
        check_against_definition(simulators[0])


def test_the_runtime_refuses_what_it_cannot_run() -> None:
    graph, topology = mlp(), Topology.load("p100:1")
    lowering = Lowering(graph, topology, Costs(graph, topology))
    plan = [OperatorConfig((), (0,), 1)] * len(graph.operators)
    every = tuple(range(4))
    for stages in (Stages((0,), (every,), 2), Stages((0, 2), (every, every))):
        with pytest.raises(FlexsearchError, match="one stage and one microbatch"):
            compile_program(lowering.lower(plan, Options(), stages), 0)
    assert compile_program(lowering.lower(plan, Options()), 0).segments


def test_a_schedule_that_splits_backward_passes_is_refused() -> None:
    assert words(actions("zero-bubble", [[0], [1]], 1)) == words(actions("gpipe", [[0], [1]], 1))
    with pytest.raises(FlexsearchError, match="zero-bubble"):
        actions("zero-bubble", [[0], [1]], 2)
