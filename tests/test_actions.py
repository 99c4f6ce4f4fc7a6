"""The order of passes on each rank: equal to that of PyTorch's own schedules."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from flexsearch.errors import FlexsearchError
from flexsearch.lower.actions import actions, last_microbatch
from flexsearch.strategy.schedule import SPLIT_KINDS, V_KINDS, placement
from flexsearch.strategy.stage import ScheduleKind
from tests.torch_schedules import CLASSES, SINGLE, order_of

KINDS = get_args(ScheduleKind)


def words(rows: Any) -> list[str]:
    return [" ".join(map(str, row)) for row in rows]


@pytest.mark.parametrize(
    ("order", "held", "microbatches", "expected"),
    [
        ("gpipe", [[0], [1]], 2, ["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"]),
        ("1f1b", [[0], [1]], 3, ["0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"]),
        ("1f1b", [[0, 1]], 2, ["0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1"]),
        ("1f1b", [[0], [1]], 1, ["0F0 0B0", "1F0 1B0"]),
        ("breadth-first", [[0, 2], [1, 3]], 2, ["0F0 0F1 2F0 2F1 2B1 2B0 0B1 0B0", "1F0 1F1 3F0 3F1 3B1 3B0 1B1 1B0"]),
        ("zero-bubble", [[0], [1]], 3, ["0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2", "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2"]),
        ("zero-bubble-v", [[0, 1]], 2, ["0F0 1F0 1I0 1W0 0F1 0I0 0W0 1F1 1I1 1W1 0I1 0W1"]),
        (
            "interleaved-1f1b", [[0, 2], [1, 3]], 2,
            ["0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1", "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1"],
        ),
    ],
)  # fmt: skip
def test_orders_of_actions(order: Any, held: list[list[int]], microbatches: int, expected: list[str]) -> None:
    assert words(actions(order, held, microbatches)) == expected


def numbers(kind: str) -> list[tuple[int, int, int]]:
    """Ranks, stages on each, microbatches: 2 to 8 stages, up to 64 microbatches."""
    each = [1] if kind in SINGLE else [2] if kind in V_KINDS else range(1, 9)
    sizes = [(ranks, count) for ranks in range(1, 9) for count in each if 2 <= ranks * count <= 8]
    return [(*size, m) for size in sizes for m in (*range(1, 18), 24, 31, 40, 63, 64)]


@pytest.mark.parametrize("kind", KINDS)
def test_every_rank_runs_what_pytorch_runs(kind: Any) -> None:
    accepted = 0
    for ranks, each, m in numbers(kind):
        held = placement(kind, ranks, each)
        try:
            expected = order_of(kind, ranks, each, m)
        except ValueError:
            if kind != "1f1b" and m > 1:  # PyTorch wants as many microbatches as stages, without need
                with pytest.raises(FlexsearchError, match="cannot run"):
                    actions(kind, held, m)
            continue
        assert [[str(action) for action in row] for row in actions(kind, held, m)] == expected
        accepted += 1
    assert accepted > 40 and set(CLASSES) == set(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_every_stage_runs_every_microbatch_forward_then_backward(kind: Any) -> None:
    for ranks, each, m in numbers(kind):
        held = placement(kind, ranks, each)
        try:
            rows = actions(kind, held, m)
        except FlexsearchError:
            continue
        for row, stages in zip(rows, held, strict=True):
            place = {action: k for k, action in enumerate(row)}
            assert len(place) == len(row)
            for stage, b in ((stage, b) for stage in stages for b in range(m)):
                whole, halves = (stage, "B", b) in place, [(stage, half, b) in place for half in "IW"]
                assert halves == [not whole] * 2 and (kind in SPLIT_KINDS or whole)
                found = [place[stage, k, b] for k in ("FB" if whole else "FIW")]  # type: ignore[index]
                assert found == sorted(found)
            assert len(row) == 2 * m * len(stages) + sum(action.kind == "W" for action in row)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_complete_with_the_last_microbatch(kind: Any) -> None:
    for ranks, each, m in ((2, 2, 8), (4, 2, 8), (3, 2, 12)):
        for row in actions(kind, placement(kind, ranks, each), m):
            last = {action.stage: action.microbatch for action in row if action.kind in "BW"}
            assert set(last.values()) == {last_microbatch(kind, m)}


@pytest.mark.parametrize("kind", sorted(SPLIT_KINDS))
def test_weight_gradients_of_a_microbatch_run_from_the_last_stage_on(kind: Any) -> None:
    """The account of memory takes the order of blocks for the order in which a microbatch passes them."""
    for ranks, each, m in numbers(kind):
        try:
            rows = actions(kind, placement(kind, ranks, each), m)
        except FlexsearchError:
            continue
        for row in rows:
            seen: dict[int, int] = {}
            for action in row:
                if action.kind in "BW":
                    assert action.stage < seen.get(action.microbatch, ranks * each)
                    seen[action.microbatch] = action.stage


@pytest.mark.parametrize(
    ("order", "held", "microbatches", "remedy"),
    [
        ("1f1b", [[0, 2], [1]], 2, "follow each other"),
        ("1f1b", [[0], [0, 1]], 2, "same devices"),
        ("interleaved-1f1b", [[0, 1], [2, 3]], 2, "in turn"),
        ("breadth-first", [[0, 1], [2, 3]], 2, "in turn"),
        ("zero-bubble", [[0, 2], [1]], 2, "in turn"),
        ("interleaved-1f1b", [[0, 2], [1, 3]], 5, "Use 4 or 6 microbatches; a multiple of 2"),
        ("zero-bubble", [[0], [1], [2], [3]], 9, "Use 8 or 10 microbatches; a multiple of 4"),
        ("zero-bubble-v", [[0, 2], [1, 3]], 4, "stages r and 3 - r"),
        ("zero-bubble-v", [[0], [1]], 4, "stages r and 3 - r"),
        ("dualpipe-v", [[0, 3], [1, 2]], 3, "Use 4 microbatches or more"),
    ],
)  # fmt: skip
def test_orders_that_do_not_fit_are_refused(order: Any, held: list[list[int]], microbatches: int, remedy: str) -> None:
    with pytest.raises(FlexsearchError, match=f"(?s)cannot run.*{remedy}"):
        actions(order, held, microbatches)


def test_a_v_needs_two_stages_on_each_rank() -> None:
    assert placement("dualpipe-v", 3, 2) == [[0, 5], [1, 4], [2, 3]]
    with pytest.raises(FlexsearchError, match="two stages"):
        placement("zero-bubble-v", 3, 1)
