"""Small changes of a plan: of its layout and options, where the graph is cut, the devices of its stages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import get_args

from flexsearch.search.hybrid.constants import QUARTERS, REACH
from flexsearch.search.hybrid.cuts import Cuts
from flexsearch.search.hybrid.estimate import Estimates
from flexsearch.search.hybrid.layout import Layout, neighbours
from flexsearch.search.hybrid.ranking import Key
from flexsearch.strategy import Options, States
from flexsearch.strategy.records import Recompute

First = tuple[int, ...]
"""First operator of each stage."""




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


def moved_devices(layout: Layout, first: First) -> Iterator[tuple[Layout, First]]:
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


class Moves:
    """All moves from plans of one graph. ``host_size``: devices of a host."""

    def __init__(self, estimates: Estimates, host_size: int) -> None:
        self.estimates, self.works, self.cuts, self.host_size = estimates, estimates.works, estimates.cuts, host_size

    def of(self, now: Key) -> Iterator[Key]:
        """All moves from a plan."""
        layout, options, first = now
        for recompute in get_args(Recompute):
            again = options.model_copy(update={"recompute": recompute, "recompute_blocks": None})
            yield Key(layout, again, first)
            if recompute != "none" and recompute in self.works.regions:
                for blocks in self._blocks(layout, again):
                    yield Key(layout, again.model_copy(update={"recompute_blocks": blocks}), first)
        if layout.states:
            for depth in (2 * options.prefetch or 1, options.prefetch // 2):
                yield Key(layout, options.model_copy(update={"prefetch": depth}), first)
        if layout.states == States.WEIGHTS:
            other_way = {"reshard_after_forward": not options.reshard_after_forward}
            yield Key(layout, options.model_copy(update=other_way), first)
        if max(layout.each) > 1:
            for speed in range(1 + len(self.estimates.speeds)):
                yield Key(replace(layout, speed=speed), options, first)
        for other in neighbours(layout, self.works.graph.batch, self.cuts.depth, self.host_size):
            alike = other.stages == layout.stages and other.rank_of() == layout.rank_of()
            yield Key(other, options, first if alike else ())
        for new in moved_borders(self.cuts, first):
            yield Key(layout, options, new)
        for wide, new in chain(moved_devices(layout, first), split_and_joined(self.cuts, layout, first)):
            yield Key(wide, options, new)

    def _blocks(self, layout: Layout, options: Options) -> Iterator[int | tuple[int, ...]]:
        """How many blocks may be computed again: a part of each stage's; or all of the first stages, which keep more
        microbatches than the later ones."""
        every, stages = self.estimates.blocks(layout, options), layout.stages
        yield from sorted({-(-every * part // QUARTERS) for part in range(1, QUARTERS)} - {every})
        whole = 1 + max(self.works.regions[options.recompute])  # wherever the borders are
        for count in sorted({stages * part // QUARTERS for part in range(1, QUARTERS)} | {stages - 1}):
            if count:
                yield (whole,) * count + (0,) * (stages - count)

    def of_two_borders(self, now: Key) -> Iterator[Key]:
        """All moves of two borders at once: while two stages are the slowest, no move of one helps."""
        for one in moved_borders(self.cuts, now.first):
            for two in moved_borders(self.cuts, one):
                yield now._replace(first=two)
