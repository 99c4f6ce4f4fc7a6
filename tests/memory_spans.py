"""What the account of memory counts, span by span."""

from __future__ import annotations

from typing import NamedTuple

from flexsearch.cost import Costs
from flexsearch.graph import OperatorGraph
from flexsearch.lower import Lowered, lower_for_ranks
from flexsearch.simulate.memory import PARTS, Part, _account, _with_spans, memory
from flexsearch.simulate.recipe_memory import recipe_spans
from flexsearch.simulate.spans import CAST
from flexsearch.strategy import Strategy


class Span(NamedTuple):
    """Bytes on a device, alive from moment ``first`` to moment ``last``, both included: 4 * block is where its first
    operand is put together, 4 * block + 1 where the others are, 4 * block + 2 its computing, 4 * block + 3 its
    communicating."""

    device: int
    first: int
    last: int
    nbytes: int
    part: Part
    cast: bool = False
    """Of gradients: what is added to them later has spans of its own."""


def spans_of(lowered: Lowered) -> list[Span]:
    """Everything that is counted, with its lifetime."""
    spans = _with_spans(*_account(lowered), tuple(recipe_spans(lowered))).spans
    columns = (spans.device, spans.first, spans.last, spans.nbytes, spans.part)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return [Span(d, first, last, nbytes, PARTS[part % 8], part >= CAST) for d, first, last, nbytes, part in rows]


def peaks_within_a_step(graph: OperatorGraph, plan: Strategy) -> list[int]:
    """Peak by rank of all that is not there all the time."""
    lowered = lower_for_ranks(graph, plan, plan.cluster, Costs(graph, plan.cluster))
    peaks, spans = [m.peak for m in memory(lowered)], spans_of(lowered)
    end = max(span.last for span in spans)
    for span in spans:
        if (span.first, span.last) == (0, end):
            peaks[span.device] -= span.nbytes
    return peaks
