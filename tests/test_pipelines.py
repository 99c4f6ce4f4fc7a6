"""Pipelines with equal stages take as long, and hold as many microbatches, as published; none stands still."""

from __future__ import annotations

from itertools import product
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from flexsearch.errors import FlexsearchError
from flexsearch.lower.actions import actions, in_flight
from flexsearch.strategy.schedule import LOOPED_KINDS, V_KINDS, placement
from flexsearch.strategy.stage import ScheduleKind
from tests.engine_oracle import Simulation
from tests.pipelines import Pipeline, equal, most_in_flight

KINDS: tuple[ScheduleKind, ...] = get_args(ScheduleKind)
SIZES = [(p, m) for p in (2, 3, 4, 8) for m in (2 * p, 5 * p)]
T = 1000


def bubble(kind: ScheduleKind, p: int, each: int, m: int) -> int:
    """Ticks of a step in which a rank computes nothing."""
    return equal(kind, placement(kind, p, each), m, T).run() - 3 * T * m * each


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_bubbles_of_whole_backward_passes(p: int, m: int) -> None:
    """(p - 1) / (m + p - 1) of a step; with v stages on a rank, each a v-th as long, a v-th of that idle time."""
    for kind in ("gpipe", "1f1b"):
        assert bubble(kind, p, 1, m) == 3 * T * (p - 1)
        makespan = equal(kind, placement(kind, p), m, T).run()
        assert bubble(kind, p, 1, m) * (m + p - 1) == (p - 1) * makespan
    for each in (1, 2, 3):
        for kind in ("interleaved-1f1b", "breadth-first"):
            assert bubble(kind, p, each, m) == 3 * T * (p - 1)


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_bubbles_of_divided_backward_passes(p: int, m: int) -> None:
    """ZB-H1 (Qi et al., ICLR 2024, section 2): (p - 1)(F + I - W), a third of that of 1F1B. ZB-V: a rank that has begun
    computes until it is done; it begins when the first microbatch has reached it."""
    for each in (1, 2):
        assert bubble("zero-bubble", p, each, m) == T * (p - 1)
    v = equal("zero-bubble-v", placement("zero-bubble-v", p, 2), m, T)
    assert v.idle() == [0] * p and v.run() == 6 * T * m + T * (p - 1)
    assert bubble("dualpipe-v", p, 2, m) == T * (p - 1)


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_microbatches_in_flight(p: int, m: int) -> None:
    """The activations of so many microbatches does a rank hold, in stages of its own."""

    def of(kind: ScheduleKind, each: int = 1, until: str = "BW") -> list[int]:
        return [most_in_flight(row, until) for row in actions(kind, placement(kind, p, each), m)]

    assert of("gpipe") == [m] * p and of("breadth-first", 2) == [2 * m] * p
    assert of("1f1b") == [p - rank for rank in range(p)]
    assert of("interleaved-1f1b", 2) == [p + 2 * (p - 1 - rank) + 1 for rank in range(p)]
    assert of("zero-bubble") == [p] * p and of("zero-bubble", until="BI") == [p - rank for rank in range(p)]
    assert of("zero-bubble-v", 2) == [2 * p] * p  # half a stage each: as many as 1F1B at its first rank
    assert of("dualpipe-v", 2) == [2 * p + 1] * p


@pytest.mark.parametrize("kind", KINDS)
def test_microbatches_in_flight_are_those_of_the_actions(kind: ScheduleKind) -> None:
    """As the estimate of layouts reads them, without writing actions down. With fewer microbatches than fill it, a
    V-shaped pipeline holds fewer."""
    most = 1 if kind == "1f1b" else 3
    for ranks, each, count in product((1, 2, 3, 4), range(1, most + 1), (1, 2, 4, 6, 12)):
        try:
            rows = actions(kind, placement(kind, ranks, each), count)
        except FlexsearchError:
            continue
        held, expected = [most_in_flight(row, "BI") / each for row in rows], in_flight(kind, ranks, each, count)
        assert all(a <= b for a, b in zip(held, expected, strict=True))
        assert held == expected or (kind in V_KINDS and count < 2 * ranks - 1)


@st.composite
def pipelines(draw: st.DrawFn) -> Pipeline:
    """Any schedule with stages that take unequally long."""
    kind = draw(st.sampled_from(KINDS))
    p = draw(st.integers(1, 4))
    each = 2 if kind in V_KINDS else draw(st.integers(1, 3)) if kind in LOOPED_KINDS else 1
    m = draw(st.integers(1, 12))
    if kind in ("interleaved-1f1b", "zero-bubble"):
        m = p * draw(st.integers(1, 4))
    elif kind == "dualpipe-v":
        m += 2 * p
    lengths: Any = [st.lists(st.integers(0, 50), min_size=p * each, max_size=p * each) for _ in range(3)]
    return Pipeline(kind, placement(kind, p, each), m, *map(draw, lengths), transfer=draw(st.integers(0, 40)))


@settings(derandomize=True, deadline=None, max_examples=60, phases=(Phase.generate,))
@given(pipeline=pipelines())
def test_no_order_stands_still(pipeline: Pipeline) -> None:
    definition = Simulation(pipeline.schedule, pipeline.machine, pipeline.segments, np.array(pipeline.segment))
    assert pipeline.run() == definition.run()
    each = zip(pipeline.forward, pipeline.inputs, pipeline.weights, strict=True)
    busy = [sum(row) * pipeline.microbatches for row in each]
    assert pipeline.run() >= max(sum(busy[stage] for stage in row) for row in pipeline.held)


def test_an_order_that_stands_still_is_noticed() -> None:
    pipeline = equal("1f1b", [[0], [1]], 3)
    pipeline.schedule.block_first[:] = pipeline.schedule.block_first[::-1].copy()
    pipeline.schedule.block_last[:] = pipeline.schedule.block_last[::-1].copy()
    with pytest.raises(FlexsearchError, match="waits forever"):
        pipeline.run()
