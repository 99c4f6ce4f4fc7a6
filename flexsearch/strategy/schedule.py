"""Which schedules fit which stages, ranks and numbers of microbatches. A **rank** is a group of devices that holds the
same stages. ``lower.actions`` has the orders themselves and their sources."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from flexsearch.errors import StrategyError
from flexsearch.strategy.stage import ScheduleKind

SPLIT_KINDS: Final[frozenset[ScheduleKind]] = frozenset({"zero-bubble", "zero-bubble-v", "dualpipe-v"})
"""Schedules that run weight gradients apart from input gradients."""
LOOPED_KINDS: Final[frozenset[ScheduleKind]] = frozenset({"interleaved-1f1b", "breadth-first", "zero-bubble"})
"""Schedules for which rank r of p holds the stages r, r + p, r + 2p, ..."""
V_KINDS: Final[frozenset[ScheduleKind]] = frozenset({"zero-bubble-v", "dualpipe-v"})
"""Schedules for which rank r of p holds the stages r and 2p - 1 - r."""


def has_halves(stage: int) -> bool:
    """Whether such a schedule splits the backward passes of a stage. Nobody waits for gradients of the first stage's
    inputs, so its passes are whole, and run where a schedule has the gradients of its weights."""
    return stage > 0


def placement(kind: ScheduleKind, ranks: int, each: int = 1) -> list[list[int]]:
    """The stages of each rank, ascending, ``each`` of them, as a schedule needs them. Raises StrategyError unless a
    V-shaped schedule gets two."""
    if kind in V_KINDS:
        if each != 2:
            raise StrategyError(
                f"schedule: {kind} cannot run {each} stages on each rank", "Use two stages on each rank."
            )
        return [[rank, 2 * ranks - 1 - rank] for rank in range(ranks)]
    if kind in LOOPED_KINDS:
        return [list(range(rank, ranks * each, ranks)) for rank in range(ranks)]
    return [list(range(rank * each, (rank + 1) * each)) for rank in range(ranks)]


def ranks_of(stages: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """The ranks of a pipeline, each as the stages that it holds, in order. ``stages``: the devices of each."""
    devices = {d for devices in stages for d in devices}
    return sorted({tuple(s for s, of in enumerate(stages) if d in of) for d in devices})


def check_schedule(kind: ScheduleKind, held: Sequence[Sequence[int]], microbatches: int) -> None:
    """Raise StrategyError where a schedule does not fit. ``held``: the stages of each rank, ascending; ranks in the
    order of their first stage.

    All but ``gpipe`` need stages that do not share a part of their devices, and: ``1f1b`` stages of a rank that follow
    each other; the looped schedules equally many stages on each rank, dealt out in turn; the V-shaped ones two, the
    second ones in reverse. ``interleaved-1f1b`` and ``zero-bubble`` need microbatches in whole rounds, ``dualpipe-v``
    as many as there are stages. One microbatch passes any placement where backward passes are whole.
    """
    if kind == "gpipe" or (microbatches == 1 and kind not in SPLIT_KINDS):
        return
    stages = 1 + max(stage for row in held for stage in row)
    _check_placement(kind, held, stages)
    if kind in ("interleaved-1f1b", "zero-bubble"):
        _check_rounds(kind, len(held), microbatches)
    if kind == "dualpipe-v" and microbatches < stages:
        raise StrategyError(
            f"microbatches: dualpipe-v cannot run {microbatches} microbatches through {stages} stages",
            f"Use {stages} microbatches or more.",
        )


def _check_placement(kind: ScheduleKind, held: Sequence[Sequence[int]], stages: int) -> None:
    """Raise StrategyError unless a schedule can run stages where they are."""
    if sum(map(len, held)) != stages:
        raise StrategyError(
            f"schedule: {kind} cannot run stages that share a part of their devices",
            "Give stages that share a device the same devices, or use gpipe.",
        )
    ranks, rows = len(held), [list(row) for row in held]
    if kind == "1f1b":
        fits = all(row[-1] - row[0] + 1 == len(row) for row in rows)
        remedy = "Use interleaved-1f1b, or give each group of devices stages that follow each other."
    elif kind in V_KINDS:
        fits = stages == 2 * ranks and rows == placement(kind, ranks, 2)
        remedy = f"Give group r of the {ranks} groups of devices the stages r and {2 * ranks - 1} - r."
    else:
        fits = stages % ranks == 0 and rows == placement(kind, ranks, stages // ranks)
        remedy = "Deal the stages out in turn, equally many to each group of devices."
    if not fits:
        raise StrategyError(f"schedule: {kind} cannot run the stages {rows}", remedy)


def length_of_a_round(ranks: int, microbatches: int) -> int:
    """Microbatches that pass one stage of a rank before the next stage has its turn, of a looped schedule."""
    return microbatches // max(1, microbatches // ranks)


def _check_rounds(kind: ScheduleKind, ranks: int, microbatches: int) -> None:
    """Raise StrategyError unless rounds are equal."""

    def fits(count: int) -> bool:
        return count % max(1, count // ranks) == 0

    if not fits(microbatches):
        fewer = next(m for m in range(microbatches, 0, -1) if fits(m))
        more = next(m for m in range(microbatches, 2 * microbatches + ranks) if fits(m))
        raise StrategyError(
            f"microbatches: {kind} cannot run {microbatches} microbatches on {ranks} groups of devices",
            f"Use {fewer} or {more} microbatches; a multiple of {ranks} always fits.",
        )
