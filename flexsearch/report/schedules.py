"""Pictures of pipeline schedules: what each rank runs when, if all stages take equally long and transfers nothing.

``python -m flexsearch.report.schedules docs/schedules.svg`` makes the picture of docs/pipelines.md.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flexsearch.lower.actions import Action, actions
from flexsearch.lower.list_schedule import Passes, spans_of_order
from flexsearch.report.layouts import SCHEDULES
from flexsearch.report.plots import rendered
from flexsearch.report.style import COLOURS, plain
from flexsearch.strategy.schedule import SPLIT_KINDS, V_KINDS, placement
from flexsearch.strategy.stage import ScheduleKind

NAMES: Final = {"F": "forward", "B": "backward", "I": "input gradients", "W": "weight gradients"}
DRAWN: Final[tuple[tuple[ScheduleKind, int], ...]] = (("gpipe", 1), ("1f1b", 1), ("interleaved-1f1b", 2),
    ("zero-bubble", 1))  # fmt: skip
"""Schedules of the picture, each with the stages of a rank."""


class Bar(NamedTuple):
    """A pass in time: ``begin`` and ``length`` in units of the forward pass of a rank."""

    action: Action
    begin: float
    length: float


def bars(kind: ScheduleKind, ranks: int, microbatches: int, each: int = 1) -> list[list[Bar]]:
    """The passes of each rank, ``each`` stages on every one, as early as data allows. The work of a rank is the same
    for any ``each``. Raises FlexsearchError where a schedule does not fit."""
    held = placement(kind, ranks, each)
    orders, column = actions(kind, held, microbatches), (1,) * (ranks * each)
    passes = Passes(tuple(map(tuple, held)), column, column, column, (0,) * len(column), column, column[:ranks])
    return [
        [Bar(action, begin / each, (end - begin) / each) for action, (begin, end) in zip(row, spans, strict=True)]
        for row, spans in zip(orders, spans_of_order(passes, orders, whole=True), strict=True)
    ]


def makespan(rows: Sequence[Sequence[Bar]]) -> float:
    """End of the last pass, in the unit of ``bars``."""
    return max(bar.begin + bar.length for row in rows for bar in row)


def draw_schedules(ranks: int, microbatches: int, drawn: Sequence[tuple[ScheduleKind, int]] = DRAWN) -> Figure:
    """Schedules below each other, on one axis of time: a row for each rank, numbers are microbatches."""
    figure = Figure(figsize=(10, 1.55 * len(drawn) + 0.5), layout="constrained")
    axes: list[Axes] = list(figure.subplots(len(drawn), 1, sharex=True, squeeze=False)[:, 0])
    for place, (kind, each) in zip(axes, drawn, strict=True):
        rows = bars(kind, ranks, microbatches, each)
        many = f", {each} stages on each rank" if each > 1 else ""
        idle = 1.0 - 3 * microbatches / makespan(rows)
        plain(place, f"{SCHEDULES[kind]}{many}: {100 * idle:.0f} % idle")
        for rank, row in enumerate(rows):
            for bar in row:
                _draw(place, rank, bar, each, ranks, kind)
        place.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
        place.invert_yaxis()
    axes[-1].set_xlabel("time, in forward passes of a rank")
    split = any(kind in SPLIT_KINDS for kind, _ in drawn)
    handles = [axes[0].barh([0], [0], color=COLOURS[k], label=NAMES[x]) for k, x in enumerate("FBIW") if split or k < 2]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False)
    return figure


def _draw(place: Axes, rank: int, bar: Bar, each: int, ranks: int, kind: ScheduleKind) -> None:
    """One pass. Passes of a rank's later stages are paler."""
    later = bar.action.stage >= ranks if kind in V_KINDS or each > 1 else False
    colour = COLOURS["FBIW".index(bar.action.kind)]
    place.barh(rank, bar.length, left=bar.begin, height=0.9, color=colour, alpha=0.55 if later else 0.9,
               edgecolor="white", linewidth=0.6)  # fmt: skip
    place.text(bar.begin + bar.length / 2, rank, str(bar.action.microbatch), ha="center", va="center",
               fontsize=6 if bar.length < 1 else 7)  # fmt: skip


def main(arguments: Sequence[str]) -> None:
    """Write the picture of four ranks and eight microbatches."""
    path = Path(arguments[0])
    path.write_bytes(rendered(draw_schedules(4, 8), path.suffix[1:]))


if __name__ == "__main__":
    main(sys.argv[1:])
