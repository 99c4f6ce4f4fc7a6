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
from flexsearch.lower.rows import (
    BACKWARD,
    COMPUTE,
    FORWARD,
    RECOMPUTE,
    WEIGHT_GRADIENT,
    Rows,
    Segments,
    listed,
    steps_of,
)
from flexsearch.simulate.engine import Engine
from flexsearch.strategy import OperatorConfig

STEP: Final = 16
"""Times are made longer by one part in so many: about as much as they may be off."""
OF_OPERATORS: Final = (FORWARD, BACKWARD, RECOMPUTE, WEIGHT_GRADIENT)

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
    segments, schedule, kinds = rows.segments, rows.schedule, pieces.costs.kinds
    step, block, device = steps_of(segments, rows.segment, len(kinds))
    sort = kinds[device]
    for kind in _present(sort).tolist():
        launched = step[sort == kind]
        yield sources.launching(kind), "step_host", launched, segments.step_host[launched]
    computes = segments.step_kind[step] == COMPUTE
    step, block, sort = step[computes], block[computes], sort[computes]
    of_operators = np.isin(schedule.kind[block], OF_OPERATORS)
    for kind in _present(sort[~of_operators]).tolist():
        here = step[~of_operators & (sort == kind)]
        yield sources.update(kind), "step_ticks", here, segments.step_ticks[here]
    step, operator, sort = step[of_operators], schedule.argument[block[of_operators]], sort[of_operators]
    order = np.lexsort((sort, operator))
    step, operator, sort = step[order], operator[order].astype(np.int64), sort[order].astype(np.int64)
    begins = np.flatnonzero(np.diff(operator, prepend=-1) | np.diff(sort, prepend=-1))
    for first, last in pairwise((*begins.tolist(), len(step))):
        one, kind = int(operator[first]), int(sort[first])
        ticks = segments.step_ticks[step[first:last]]
        launch = np.minimum(ticks, round(sources.launch_s(one, kind) / TICK))
        own = sources.computing(one, _extents(pieces, one, configs[one]), kind)
        yield own, "step_ticks", step[first:last], ticks - launch
        yield sources.start(one, kind), "step_ticks", step[first:last], launch


def _extents(pieces: Pieces, operator: int, config: OperatorConfig) -> Mapping[str, int]:
    """Of the largest piece of an operator."""
    op = pieces.graph.operators[operator]
    return {axis: -(-op.sizes[axis] // config.degree(axis)) for axis in op.access.axes}


def _moving(sources: Sources, pieces: Pieces, rows: Rows) -> Iterator[Scaled]:
    """Communications: bytes by the links that they cross (and what moving them takes of processors), and the start."""
    segments, starting, of_network = rows.segments, sources.starting(), sources.links()
    distinct = list(dict.fromkeys((starting, *of_network.values())))
    place_of = np.zeros(int(rows.machine.resources[0]), np.int64)  # by resource, the place of its source among these
    for resource, source in of_network.items():
        place_of[pieces.image[resource]] = distinct.index(source)
    used = np.unique(rows.segment)
    every, _ = listed(segments.communication_first[used], segments.communication_last[used])
    links, of_link = listed(segments.link_first[every], segments.link_last[every])
    drags, of_drag = listed(segments.drag_first[every], segments.drag_last[every])
    ticks, source_of = segments.link_ticks[links], place_of[segments.link[links]]
    busiest = _largest(ticks, of_link, len(every))
    order = np.lexsort((-ticks, of_link))
    busiest_link = order[np.flatnonzero(np.diff(of_link, prepend=-1))]  # the first of them, of each that has links
    of_busiest = np.full(len(every), -1)
    of_busiest[of_link[busiest_link]] = source_of[busiest_link]
    for k, source in enumerate(distinct):
        own = source_of == k
        yield source, "link_ticks", links[own], ticks[own]
        crossing = _present(of_link[own])
        longest = _largest(ticks + np.where(own, ticks // STEP, 0), of_link, len(every)) - busiest
        yield source, "communication_ticks", every[crossing], longest[crossing] * STEP
        dragging = drags[of_busiest[of_drag] == k]
        yield source, "drag_ticks", dragging, segments.drag_ticks[dragging]
    yield starting, "communication_ticks", every, segments.communication_ticks[every] - busiest


def _present(numbers: Places) -> Places:
    """Which numbers there are, ascending."""
    return np.flatnonzero(np.bincount(numbers))


def _largest(ticks: Ticks, of: Places, count: int) -> Ticks:
    """By list, the most ticks of its rows; 0 of an empty one."""
    most = np.zeros(count, np.int64)
    np.maximum.at(most, of, ticks)
    return most
