"""The engine gives the times of its definition (``engine_oracle``): whole, from a snapshot, and folded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.engine_oracle import Simulation
from tests.random_rows import Case, make_case, random_change

from flexsearch.lower.rows import Segments
from flexsearch.simulate.engine import LATE, Engine


def oracle(case: Case, segments: Segments, segment: Any) -> Simulation:
    simulation = Simulation(case.schedule, case.machine, segments, segment)
    simulation.makespan = simulation.run()
    return simulation


def numbers(segment: list[int]) -> Any:
    return np.array(segment, np.uint32)


@pytest.mark.parametrize("seed", range(150))
def test_start_and_end_of_every_row_are_those_of_the_definition(seed: int) -> None:
    case = make_case(seed)
    segments, segment = case.arena.segments(), numbers(case.segment)
    expected = oracle(case, segments, segment)
    engine = Engine(case.schedule, case.machine)
    assert engine.run(segments, segment) == expected.makespan
    times = engine.times(segments, segment)
    rows = 0
    for (m, b, communication, number), (start, end) in expected.times.items():
        if communication:
            place = times.communication_first[b] + np.uint64(number)
            assert (times.communication_start[m, place], times.communication_end[m, place]) == (start, end)
        else:
            place = times.computation_first[b] + np.uint64(number)
            assert (times.computation_start[m, place], times.computation_end[m, place]) == (start, end)
        rows += 1
    assert rows == (times.communication_end >= 0).sum() + (times.computation_end >= 0).sum()


@pytest.mark.parametrize("seed", range(60))
def test_a_walk_of_proposals_gives_what_whole_runs_give(seed: int) -> None:
    case = make_case(1000 + seed, blocks=8)
    engine, other = Engine(case.schedule, case.machine), Engine(case.schedule, case.machine, fold=False)
    segment = list(case.segment)
    makespan = engine.run(case.arena.segments(), numbers(segment))
    for step in range(40):
        change = random_change(case)
        proposed = list(segment)
        for b, block in change.items():
            proposed[b] = case.arena.add(block)
        segments = case.arena.segments()
        expected = oracle(case, segments, numbers(proposed)).makespan
        limit = case.random.choice((LATE, makespan, int(makespan * 1.02)))
        ticks = engine.propose(segments, numbers(proposed), numbers(list(change)), limit)
        assert ticks == (expected if expected <= limit else LATE), (step, expected)
        assert other.run(segments, numbers(proposed)) == expected
        if ticks != LATE and case.random.random() < 0.5:
            engine.accept()
            makespan, segment = ticks, proposed
            for b, block in change.items():
                case.blocks[b] = block
        else:
            engine.reject()
