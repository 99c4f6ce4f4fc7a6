"""Small changes of where a graph is cut and of the devices of its stages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from flexsearch.search.hybrid.cuts import Cuts
from flexsearch.search.hybrid.layout import Layout

First = tuple[int, ...]
"""First operator of each stage."""


REACH: Final = 2
"""A border of a long graph moves by so many places at most. Taken."""


def moved_borders(cuts: Cuts, first: First) -> Iterator[First]:
    """Cuts with one border at another place. Of a short graph, at any: two stages are one then, and another is two."""
    places = cuts.allowed(len(first))
    for border in first[1:]:
        near = places
        if not cuts.short and border in places:
            at = places.index(border)
            near = places[max(1, at - REACH) : at + REACH + 1]
        for place in near:
            if place not in first:
                yield tuple(sorted({*first, place} - {border}))


def moved_devices(cuts: Cuts, layout: Layout, first: First) -> Iterator[tuple[Layout, First]]:
    """One group of devices more for a rank, one less for its neighbour."""
    if layout.chunks > 1:
        return
    for a in range(layout.pipeline - 1):
        for giver, taker in ((a, a + 1), (a + 1, a)):
            widths = list(layout.each)
            widths[giver] -= 1
            widths[taker] += 1
            if widths[giver]:
                yield layout.wide(tuple(widths)), first


def split_and_joined(cuts: Cuts, layout: Layout, first: First) -> Iterator[tuple[Layout, First]]:
    """A stage of several groups split in two; two neighbouring stages as one."""
    if layout.chunks > 1:
        return
    widths = layout.each
    for a in range(layout.pipeline - 1):
        joined = (*widths[:a], widths[a] + widths[a + 1], *widths[a + 2 :])
        yield layout.wide(joined), (*first[: a + 1], *first[a + 2 :])
    places = cuts.allowed(layout.pipeline + 1)
    for a, width in enumerate(widths):
        end = first[a + 1] if a + 1 < len(first) else len(cuts.crossing)
        inside = [place for place in places if first[a] < place < end]
        for part in range(1, width):
            for place in inside[:: max(1, len(inside) // 8)]:
                wide = layout.wide((*widths[:a], part, width - part, *widths[a + 1 :]))
                yield replace(wide, schedule=layout.schedule), (*first[: a + 1], place, *first[a + 1 :])
