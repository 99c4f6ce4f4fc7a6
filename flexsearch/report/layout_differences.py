"""Two plans of one graph of which at least one has stages or microbatches: what differs, in words, and what each
difference costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from flexsearch.graph import OperatorGraph
from flexsearch.report.explain import Told, relative, table
from flexsearch.report.layouts import SCHEDULES, USES, StagedRow, layout_words, staged_data, usage
from flexsearch.report.units import nbytes, seconds, signed
from flexsearch.simulate.memory import PARTS
from flexsearch.simulate.variants import Outcome


@dataclass(frozen=True)
class LayoutDifference:
    """``words``: what differs; its ``values`` in both plans. ``outcomes``: the first plan with this alone as in the
    second, the second with it as in the first."""

    words: str
    values: tuple[str, str]
    outcomes: tuple[Outcome, Outcome]


@dataclass(frozen=True)
class LayoutComparison:
    """Two plans and what differs."""

    a: StagedRow
    b: StagedRow
    differences: tuple[LayoutDifference, ...]


def layout_comparison(compared: LayoutComparison) -> Iterator[Told]:
    """The comparison for a terminal: lines and tables."""
    for letter, row in zip("AB", (compared.a, compared.b), strict=True):
        yield f"{letter}: {row.name}: {layout_words(row)}"
    if not compared.differences:
        yield "\nThe plans are the same."
        return
    yield ""
    grid = table(("", 16), ("A", None), ("B", None), ("difference", None))
    for words, a, b, words_of in _rows(compared):
        grid.add(words, words_of(a), words_of(b), signed(b - a, words_of))
    yield grid
    yield "\nWhat differs: how A changes if it adopts this difference alone, and B if it drops it"
    grid = table(("difference", 14), ("in A", 12), ("in B", 12), ("A\nwith it", 8), ("B\nwithout it", 8))
    for one in compared.differences:
        effects = (
            _effect(outcome, row)
            for outcome, row in zip(one.outcomes, (compared.a, compared.b), strict=True)
        )
        grid.add(one.words, *(SCHEDULES.get(value, value) for value in one.values), *effects)
    yield grid
    if remarks := {outcome.remark for one in compared.differences for outcome in one.outcomes if outcome.remark}:
        yield "(-: not possible alone: " + "; ".join(sorted(remarks)) + ")"


def _rows(compared: LayoutComparison) -> Iterator[tuple[str, float, float, Callable[[float], str]]]:
    a, b = compared.a.step, compared.b.step
    yield "iteration", a.makespan_s, b.makespan_s, seconds
    ours, theirs = usage(a), usage(b)
    for use, words in USES.items():
        pair = ours.get(use, 0.0) * a.makespan_s, theirs.get(use, 0.0) * b.makespan_s
        if max(pair) >= 0.001 * max(a.makespan_s, b.makespan_s):
            yield f"  {words}", *pair, seconds
    yield "peak memory", a.fullest.peak, b.fullest.peak, nbytes
    for part in PARTS:
        held = getattr(a.fullest, part), getattr(b.fullest, part)
        if any(held):
            yield f"  {part}", *held, nbytes


def _effect(outcome: Outcome, row: StagedRow) -> str:
    if outcome.seconds is None:
        return "-"
    fits = f", {nbytes(outcome.missing)} short" if outcome.missing else ", fits" if row.step.missing else ""
    return relative(outcome.seconds, row.step.makespan_s) + fits


def layout_comparison_data(graph: OperatorGraph, compared: LayoutComparison) -> dict[str, Any]:
    """The comparison as a JSON object; times in seconds."""
    return {
        "plans": [staged_data(graph, row) for row in (compared.a, compared.b)],
        "differences": [
            {
                "what": one.words, "values": list(one.values), "first_with_it_s": one.outcomes[0].seconds,
                "second_without_it_s": one.outcomes[1].seconds,
                "missing_bytes": [outcome.missing for outcome in one.outcomes],
                "remarks": [outcome.remark for outcome in one.outcomes],
            }
            for one in compared.differences
        ],
    }  # fmt: skip
