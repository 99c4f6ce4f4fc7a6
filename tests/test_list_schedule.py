"""Orders made from the ticks of a pipeline's own passes."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from flexsearch.cost import Costs
from flexsearch.cost.ticks import TICK
from flexsearch.errors import FlexsearchError
from flexsearch.lower.actions import Action, actions
from flexsearch.lower.list_schedule import RULES, Listing, ListSchedule, Passes, list_schedule, peaks, ticks_of_order
from flexsearch.lower.schedule import Stages
from flexsearch.lower.stage_passes import stage_passes
from flexsearch.simulate.delta import DeltaSimulator
from flexsearch.strategy import OperatorConfig, Options
from flexsearch.strategy.schedule import SPLIT_KINDS, placement
from flexsearch.strategy.stage import ScheduleKind
from flexsearch.topology import Topology
from tests.pipelines import Pipeline
from tests.test_baselines import mlp

KINDS: tuple[ScheduleKind, ...] = get_args(ScheduleKind)
PLACEMENTS: list[tuple[ScheduleKind, int]] = [("1f1b", 1), ("1f1b", 2), ("zero-bubble", 2), ("zero-bubble-v", 2)]


def equal(held: list[list[int]], limit: int, ticks: int = 1000) -> Passes:
    """Equal passes without transfers; a microbatch keeps one byte on a stage."""
    column = (ticks,) * sum(map(len, held))
    rows = tuple(map(tuple, held))
    return Passes(rows, column, column, column, (0,) * len(column), (1,) * len(column), (limit,) * len(held))


@st.composite
def uneven(draw: st.DrawFn) -> tuple[Passes, int]:
    """Passes that take unequally long and keep unequally much, and a number of microbatches. Backward passes of the
    first stage are whole."""
    kind, each = draw(st.sampled_from(PLACEMENTS))
    held = tuple(map(tuple, placement(kind, draw(st.integers(1, 4)), each)))
    stages = sum(map(len, held))
    lengths = st.lists(st.integers(0, 50), min_size=stages, max_size=stages).map(tuple)
    nbytes = draw(st.lists(st.integers(1, 5), min_size=stages, max_size=stages).map(tuple))
    least = [sum(nbytes[s] for s in row) for row in held]
    limit = tuple(n + draw(st.integers(0, 4 * n)) for n in least)
    transfer = (draw(st.integers(0, 30)),) * stages
    forward, inputs, weights = (draw(lengths) for _ in range(3))
    return Passes(held, forward, (0, *inputs[1:]), weights, transfer, nbytes, limit), draw(st.integers(1, 10))


def named(passes: Passes, microbatches: int) -> dict[ScheduleKind, int]:
    """Ticks of the named schedules that fit."""
    found = {}
    for kind in KINDS:
        try:
            orders = actions(kind, passes.held, microbatches)
        except FlexsearchError:
            continue
        if all(used <= limit for used, limit in zip(peaks(passes, orders), passes.limit, strict=True)):
            found[kind] = ticks_of_order(passes, orders, kind not in SPLIT_KINDS)
    return found


def simulated(passes: Passes, microbatches: int, found: ListSchedule) -> int:
    """Ticks of an order by the real engine."""
    held = [list(row) for row in passes.held]
    kind = found.kind or "zero-bubble"
    columns = passes.forward, passes.inputs, passes.weights
    return Pipeline(kind, held, microbatches, *columns, passes.transfer[0], found.orders).run()


def check(passes: Passes, microbatches: int, found: ListSchedule) -> None:
    """Every pass once, microbatches in order on each stage, weight gradients from the last stage on; within limits."""
    for row, stages in zip(found.orders, passes.held, strict=True):
        for stage in stages:
            for k in "FIW":
                assert [a.microbatch for a in row if a[:2] == (stage, k)] == list(range(microbatches))
        assert len(row) == 3 * microbatches * len(stages)
        for m in range(microbatches):
            assert [a.stage for a in row if a.kind == "W" and a.microbatch == m] == sorted(stages, reverse=True)
    assert all(used <= limit for used, limit in zip(peaks(passes, found.orders), passes.limit, strict=True))


@settings(derandomize=True, deadline=None, max_examples=60, phases=(Phase.generate,))
@given(case=uneven())
def test_the_model_is_that_of_the_engine_and_no_named_schedule_is_faster(case: tuple[Passes, int]) -> None:
    passes, microbatches = case
    found = list_schedule(passes, microbatches)
    if found.kind is None:
        check(passes, microbatches, found)
    assert found.ticks == simulated(passes, microbatches, found)
    assert all(found.ticks <= ticks for ticks in named(passes, microbatches).values())
    assert found.ticks >= max(
        microbatches * sum(passes.forward[s] + passes.inputs[s] + passes.weights[s] for s in row) for row in passes.held
    )


@settings(derandomize=True, deadline=None, max_examples=20, phases=(Phase.generate,))
@given(case=uneven())
def test_every_rule_gives_an_order_that_fits(case: tuple[Passes, int]) -> None:
    passes, microbatches = case
    for rule in RULES:
        orders = Listing(passes, microbatches, *rule).orders()
        check(passes, microbatches, ListSchedule(orders, None, 0))
        assert ticks_of_order(passes, orders) > 0 or not any(passes.forward + passes.inputs + passes.weights)


def test_uneven_stages_are_where_it_pays() -> None:
    faster = 0
    for slow in range(4):
        column = tuple(1500 if stage == slow else 1000 for stage in range(4))
        passes = Passes(((0,), (1,), (2,), (3,)), column, column, column, (100,) * 4, (1,) * 4, (6,) * 4)
        found = list_schedule(passes, 12)
        faster += found.ticks < min(named(passes, 12).values())
    assert faster >= 3


@pytest.mark.parametrize("p", [2, 4])
def test_equal_stages_need_no_other_order_than_the_published_one(p: int) -> None:
    """The last rank begins when the first microbatch has reached it, and computes until it is done: it cannot be
    faster."""
    found = list_schedule(equal(placement("1f1b", p), 2 * p), 4 * p)
    assert found.kind == "zero-bubble" and found.ticks == 3000 * 4 * p + 1000 * (p - 1)


def test_a_limit_holds_named_schedules_back() -> None:
    held = placement("1f1b", 4)
    ample, tight = (list_schedule(equal(held, limit), 8) for limit in (8, 2))
    assert ample.ticks < tight.ticks and set(named(equal(held, 2), 8)) == set()
    assert tight.kind is None and max(peaks(equal(held, 2), tight.orders)) == 2


def test_what_cannot_be_listed_is_refused() -> None:
    with pytest.raises(FlexsearchError, match="one microbatch keeps 2 bytes on rank 0"):
        list_schedule(equal([[0, 1], [2, 3]], 1), 4)
    rows: Any = ((0,), (1,))
    with pytest.raises(FlexsearchError, match="one by one"):
        Passes(rows, (1,), (1, 1), (1, 1), (0, 0), (1, 1), (9, 9))
    with pytest.raises(FlexsearchError, match="missing or on two ranks"):
        Passes(((0,), (0,)), (1, 1), (1, 1), (1, 1), (0, 0), (1, 1), (9, 9))
    stuck = [[Action(0, "I", 0), Action(0, "F", 0)], [Action(1, "F", 0), Action(1, "I", 0)]]
    with pytest.raises(FlexsearchError, match="wait for each other"):
        ticks_of_order(equal([[0], [1]], 9), stuck)


def test_what_is_listed_for_a_plan_is_simulated_as_it_stands() -> None:
    """Four stages, the last of them short: the listed order is faster than the named ones, by the engine too."""
    graph, topology = mlp(batch=4096, width=1024), Topology.load("p100:1")
    cuts, devices = (0, 1, 3, 5), ((0,), (1,), (2,), (3,))
    plan = [OperatorConfig((), (d,), 1) for d in Stages(cuts, devices).of(len(graph.operators))]

    def simulator(kind: ScheduleKind, orders: Any = ()) -> DeltaSimulator:
        stages = Stages(cuts, devices, 8, kind, orders)
        return DeltaSimulator(graph, topology, Costs(graph, topology), Options(), plan, stages=stages)

    passes = stage_passes(simulator("1f1b").rows, [1] * 4, [8] * 4)
    assert passes.held == ((0,), (1,), (2,), (3,)) and min(passes.transfer[:3]) > 0
    found = list_schedule(passes, 8)
    assert found.kind is None
    seconds = simulator("zero-bubble", found.orders).seconds
    assert seconds == pytest.approx(found.ticks * TICK, rel=0.01)  # the update, and synchronisation of nothing
    assert seconds < 0.9 * min(simulator(kind).seconds for kind in ("gpipe", "1f1b", "zero-bubble"))
