"""What an iteration time rests on: the seconds of it that scale with each source of costs.

The rows of a plan are simulated again with the ticks of one source after the other made longer by a sixteenth. What the
makespan then gains, times sixteen, is the part of the critical path that the source has (more, where the path moves).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

from flexsearch.cost.sources import Sources
from flexsearch.cost.ticks import TICK
from flexsearch.cost.uncertainty import Estimate, Source
from flexsearch.lower.pieces import Pieces
from flexsearch.lower.rows import BACKWARD, COMPUTE, FORWARD, RECOMPUTE, WEIGHT_GRADIENT, Rows, Segments, steps_of
from flexsearch.simulate.engine import Engine
from flexsearch.strategy import OperatorConfig

STEP: Final = 16
"""Times are made longer by one part in so many: about as much as they may be off."""
OF_OPERATORS: Final = frozenset({FORWARD, BACKWARD, RECOMPUTE, WEIGHT_GRADIENT})

Ticks = npt.NDArray[np.int64]
Places = npt.NDArray[np.int64]


def estimate(pieces: Pieces, rows: Rows, configs: Sequence[OperatorConfig]) -> Estimate:
    """The iteration time of rows, which ``pieces`` were cut for, with what it rests on."""
    engine = Engine(rows.schedule, rows.machine)
    base = engine.run(rows.segments, rows.segment)
    parts: dict[Source, _Part] = {}
    sources = Sources(pieces.costs, pieces.network)
    for source, column, places, ticks in chain(
        _computing(sources, pieces, rows, configs), _moving(sources, pieces, rows)
    ):
        parts.setdefault(source, _Part(rows)).add(column, places, ticks)
    shares: dict[Source, float] = {}
    for source, part in parts.items():
        longer = engine.run(part.longer(), rows.segment)
        if longer > base:
            shares[source] = (longer - base) * STEP * TICK
    if base and (code := sources.code()) is not None:
        shares[code] = base * TICK
    return Estimate(base * TICK, shares)


class _Part:
    """What of some rows scales with one source: by column of the segments, so many ticks at these places."""

    def __init__(self, rows: Rows) -> None:
        self.segments = rows.segments
        self.more: dict[str, list[tuple[Places, Ticks]]] = {}

    def add(self, column: str, places: Places, ticks: Ticks) -> None:
        self.more.setdefault(column, []).append((places, ticks))

    def longer(self) -> Segments:
        columns = {}
        for column, rows in self.more.items():
            columns[column] = changed = getattr(self.segments, column).copy()
            places, first = np.unique(np.concatenate([p for p, _ in rows]), return_index=True)
            # Blocks may share a segment, which is made longer once.
            changed[places] += np.concatenate([t for _, t in rows])[first] // STEP
        return self.segments._replace(**columns)


Scaled = tuple[Source, str, Places, Ticks]
"""A source, a column of the segments, the places there, and the ticks at each that scale with the source."""


def _computing(sources: Sources, pieces: Pieces, rows: Rows, configs: Sequence[OperatorConfig]) -> Iterator[Scaled]:
    """Computations: each by its operator and device, launching apart; sums of gradients and updates of weights; and
    what hosts take to launch them and communications."""
    segments, kinds = rows.segments, pieces.costs.kinds
    every, of, on = steps_of(segments, rows.segment, len(kinds))
    for block, (first, last) in enumerate(pairwise(np.searchsorted(of, np.arange(len(rows.segment) + 1)))):
        kind, argument = int(rows.schedule.kind[block]), int(rows.schedule.argument[block])
        steps, device = every[first:last], on[first:last]
        for sort in np.unique(kinds[device]).tolist():
            launched = steps[kinds[device] == sort]
            yield sources.launching(sort), "step_host", launched, segments.step_host[launched]
        computes = segments.step_kind[steps] == COMPUTE
        steps, device = steps[computes], device[computes]
        for sort in np.unique(kinds[device]).tolist():
            here = steps[kinds[device] == sort]
            ticks = segments.step_ticks[here]
            if kind not in OF_OPERATORS:
                yield sources.update(sort), "step_ticks", here, ticks
                continue
            launch = np.minimum(ticks, round(sources.launch_s(argument, sort) / TICK))
            own = sources.computing(argument, _extents(pieces, argument, configs[argument]), sort)
            yield own, "step_ticks", here, ticks - launch
            yield sources.start(argument, sort), "step_ticks", here, launch


def _extents(pieces: Pieces, operator: int, config: OperatorConfig) -> Mapping[str, int]:
    """Of the largest piece of an operator."""
    op = pieces.graph.operators[operator]
    return {axis: -(-op.sizes[axis] // config.degree(axis)) for axis in op.access.axes}


def _moving(sources: Sources, pieces: Pieces, rows: Rows) -> Iterator[Scaled]:
    """Communications: bytes by the links that they cross (and what moving them takes of processors), and the start."""
    segments, of_network, starting = rows.segments, sources.links(), sources.starting()
    source_of = {int(pieces.image[r]): source for r, source in of_network.items()}
    for segment in rows.segment.tolist():
        for c in range(segments.communication_first[segment], segments.communication_last[segment]):
            first, last = int(segments.link_first[c]), int(segments.link_last[c])
            ticks = segments.link_ticks[first:last]
            busiest = int(ticks.max(initial=0))
            of_link = [source_of.get(r, starting) for r in segments.link[first:last].tolist()]
            for source in dict.fromkeys(of_link):
                own = np.array([one is source for one in of_link])
                yield source, "link_ticks", first + np.flatnonzero(own), ticks[own]
                longest = int((ticks + np.where(own, ticks // STEP, 0)).max()) - busiest
                yield source, "communication_ticks", np.array([c]), np.array([longest * STEP])
            drags = np.arange(segments.drag_first[c], segments.drag_last[c])
            if len(drags) and of_link:
                yield of_link[int(ticks.argmax())], "drag_ticks", drags, segments.drag_ticks[drags]
            start = int(segments.communication_ticks[c]) - busiest
            yield starting, "communication_ticks", np.array([c]), np.array([start])
