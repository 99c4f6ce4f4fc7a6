"""What order of layouts could be had: predictors that know the answer by layout."""

from __future__ import annotations

import pytest

from benchmarks.decoders import Model
from benchmarks.truth import Case, Scored
from benchmarks.truth_order import order_rows, own_line, scatter_rows, slot_rows
from flexsearch.search.hybrid import Layout
from flexsearch.strategy import Options

MODEL = Model(64, 4, 8, 100, 16, fused=False, bias=True)


def _row(tensor: int, pipeline: int, samples: int, measured_s: float, predicted_s: float) -> Scored:
    layout = Layout(2, tensor, pipeline, 48 // 2 // samples)
    case = Case("pipelines", "small", ("small",), "", MODEL, 48, "a100_4nic", layout, Options(), measured_s)
    return Scored(case, predicted_s)


def _slots(samples: int, pipeline: int) -> int:
    return 24 // samples + pipeline - 1


def test_rows_on_a_line_of_their_own_leave_nothing() -> None:
    rows = [_row(2, 4, n, _slots(n, 4) * (0.3 + 0.1 * n), 1.0) for n in (1, 2, 4)]
    assert [row.ratio for row in own_line(rows)] == pytest.approx([1.0, 1.0, 1.0])
    assert [line["scatter"] for line in scatter_rows(rows)] == pytest.approx([0.0], abs=1e-9)


def test_a_line_does_not_fall_below_zero_to_follow_rows() -> None:
    """Slots that take less, the more samples they have: nothing but the constant is left."""
    rows = [_row(2, 4, n, _slots(n, 4) / n, 1.0) for n in (1, 2, 4)]
    slots = {row.predicted_s / _slots(n, 4) for row, n in zip(own_line(rows), (1, 2, 4), strict=True)}
    assert max(slots) == pytest.approx(min(slots))


def test_a_factor_by_layout_puts_layouts_in_order_that_are_right_but_for_it() -> None:
    rows = [_row(2, 4, n, 1.0 + n, (1.0 + n) / 10) for n in (1, 2, 4)]
    rows += [_row(4, 2, n, 2.5 + n, 2.5 + n) for n in (1, 2, 4)]
    taus = {line["predictor"]: line["tau"] for line in order_rows(rows)}
    assert taus["own factor"] == 1.0 > taus["predicted"]


def test_slots_of_the_same_kernels_are_alike_whatever_the_layout() -> None:
    rows = [_row(2, p, n, _slots(n, p) * 8 / p * n * 0.003, 1.0) for p in (2, 4) for n in (1, 2, 4)]
    assert [(line["samples"], line["ms"]) for line in slot_rows(rows)] == [
        (n, pytest.approx(3.0)) for _ in (2, 4) for n in (1, 2, 4)
    ]
