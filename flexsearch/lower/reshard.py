"""From the layout in which a tensor lies to the one in which it is needed, by the movement that costs least.

A reshard is a sequence of at most two **phases**. A phase takes the entries of one layout to those of the next: each
destination entry is the sum, over the terms that reach it, of regions copied locally, received, or all-reduced. What
crosses devices in a phase falls into **exchanges**, one for each set of devices that talk to each other; where each of
them sends and receives few messages (halos, shifts), one for each message.

Replicated destinations of partial sums are made in the manner of Rabenseifner (reduce-scatter, then all-gather: two
phases), or by the backend's all-reduce where every device of the group takes part; replicated destinations of remote
data by direct messages or by scatter + all-gather. The candidates are costed on the topology and the fastest is kept.
Among more than 64 hosts, sums are all-reduced, or added up in each host and then all-reduced among hosts, wherever that
is possible; nothing is costed, since messages from each to each would be the square of the devices.

:mod:`flexsearch.lower.planner` decides; here stands what it decided. A search needs sums of it (``Outline``), at once
and for thousands of reshards; the moves are made again, by the same code, for the few reshards that somebody reads.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from flexsearch.compiled import U32
from flexsearch.cost import Profile
from flexsearch.cost.communication import Pricing, Transfer, priced_transfer
from flexsearch.direct import direct
from flexsearch.graph import Box, intersect, volume
from flexsearch.lower.layout import Laid, Layout, Layouts
from flexsearch.lower.moves import FREE, GIVEN, OWN
from flexsearch.lower.outline import LOCAL, Details, Outline, details_of, outline_of, rows_of
from flexsearch.lower.planner import plan
from flexsearch.lower.workspace import (
    ERROR,
    FIRST,
    FULL,
    LAST,
    Workspace,
    make_workspace,
)
from flexsearch.topology import Topology
from flexsearch.topology.parts import FORMS

_plan = direct(plan)
ROOM = 1 << 14
"""Moves, and rows of links, for which there is room at first."""


class Move(NamedTuple):
    """Copy region ``box`` of source entry ``source`` into (or add it to) destination entry ``destination``."""

    source: int
    destination: int
    box: Box


class Planner:
    """Plans reshards on a topology. ``profile``: what was learned of its network."""

    def __init__(self, topology: Topology, profile: Profile | None = None) -> None:
        self.topology, self.pricing = topology, Pricing(topology, profile)
        self._dimensions, self._entries, self._rows = 4, 2 * len(topology.devices), ROOM
        self.workspace = self._new_workspace()
        self.at_hand: Reshard | None = None
        """The reshard that is in the workspace."""

    def _new_workspace(self) -> Workspace:
        sizes = len(self.topology.devices), self._dimensions, self._entries, self._rows, self._rows
        return make_workspace(self.pricing.tally, *sizes)

    def room_for(self, dimensions: int, entries: int) -> Workspace:
        """The workspace, large enough for layouts of so many dimensions and entries; what is on it counts no more."""
        self.at_hand = None
        if dimensions > self._dimensions or entries > self._entries:
            self._dimensions, self._entries = max(self._dimensions, dimensions), max(self._entries, 2 * entries)
            self.workspace = self._new_workspace()
        return self.workspace

    def run(
        self, source: Laid, destination: Laid, mode: Any, ranges: tuple[U32, U32] | None, itemsize: int
    ) -> Workspace:  # fmt: skip
        """Plan; the answer is in the workspace until the next call."""
        a, b = source.side, destination.side
        workspace = self.room_for(b.box.shape[1], max(len(source), len(destination)))
        while True:
            if ranges is not None:
                for row, values in zip((workspace.groups.first, workspace.groups.end), ranges, strict=True):
                    row[: len(values)] = values
            _plan(self.topology.routes, self.pricing.rates, a, b, mode, np.int64(itemsize), workspace)
            if not workspace.result[FULL]:
                break
            self._rows *= 2
            workspace = self.workspace = self._new_workspace()
        assert not workspace.result[ERROR], "a device does not hold what it is to cut a part from"
        return workspace


class Exchange:
    """Moves between different devices that happen together, or one all-reduce (``form`` "all_reduce": every device of
    ``devices`` contributes the sum of its local moves and all receive the total of region ``box``)."""

    def __init__(self, plan: Reshard, x: int) -> None:
        outline = plan.outline
        self._plan, self._x = plan, x
        self.form: str = FORMS[int(outline.form[x])]
        self.nbytes = int(outline.nbytes[x])
        """Bytes that cross devices."""
        self.amount, self.start_s = int(outline.amount[x]), float(outline.start[x])
        """Bytes by which a collective is priced (of messages 0); seconds until bytes flow (of messages)."""
        self.senders = tuple(outline.send[rows_of(outline.send_end, x)].tolist())
        self.receivers = tuple(outline.receive[rows_of(outline.receive_end, x)].tolist())
        self.devices = tuple(sorted({*self.senders, *self.receivers}))

    @cached_property
    def transfer(self) -> Transfer:
        """What it costs."""
        o, x = self._plan.outline, self._x
        links, drags = rows_of(o.link_end, x), rows_of(o.drag_end, x)
        return priced_transfer(float(o.duration[x]), o.loads, links, drags, int(o.unit[x]))

    @cached_property
    def moves(self) -> tuple[Move, ...]:
        """What moves, in the order of the destination entries."""
        return self._plan.moves_of(self._x)

    @property
    def messages(self) -> tuple[tuple[int, int, int], ...]:
        """(source device, destination device, bytes) of the moves; empty for an all-reduce."""
        details = self._plan.details
        return tuple(details.messages[rows_of(details.message_end, self._x)])

    @property
    def box(self) -> Box | None:
        """Region that an all-reduce sums up."""
        if self.form != "all_reduce":
            return None
        return self._plan.destination[int(self._plan.outline.leader[self._x])].box


@dataclass(frozen=True)
class Phase:
    """One step of a reshard: from ``source`` entries to ``destination`` entries by local moves and exchanges."""

    source: Layout
    destination: Layout
    local: tuple[Move, ...]
    exchanges: tuple[Exchange, ...]


class Reshard:
    """Phases from ``source`` to ``destination``; made by :func:`reshard` and its like."""

    def __init__(
        self, planner: Planner, source: Laid, destination: Laid, itemsize: int, mode: Any = FREE,
        ranges: tuple[U32, U32] | None = None,
    ) -> None:  # fmt: skip
        self._planner, self._source, self._destination = planner, source, destination
        self._itemsize, self._mode, self._ranges = itemsize, mode, ranges
        self._count: int | None = None

    def planned(self) -> Workspace:
        """The planner's workspace, with this reshard in it until another is planned: rows FIRST to LAST of its
        exchanges."""
        planner = self._planner
        if planner.at_hand is not self:
            workspace = planner.run(self._source, self._destination, self._mode, self._ranges, self._itemsize)
            planner.at_hand = self
            self._count = int(workspace.result[LAST] - workspace.result[FIRST])
        return planner.workspace

    @cached_property
    def outline(self) -> Outline:
        """What it comes to, in sums."""
        return outline_of(self.planned())

    @cached_property
    def details(self) -> Details:
        """The rest: what moves."""
        return details_of(self.planned(), self._source, self._destination)

    @property
    def crosses(self) -> bool:
        """Whether anything crosses devices."""
        if self._mode == OWN:
            return False
        if self._count is None:
            self.planned()
        return bool(self._count)

    @property
    def aliased(self) -> frozenset[int]:
        """Devices on which the only destination entry is exactly a local source entry, so that nothing at all is done
        there."""
        return self.details.aliased

    @property
    def used(self) -> frozenset[int]:
        """Source entries of which anything is made, on their device or elsewhere: replicas leave it to each other."""
        return self.details.used

    @property
    def trivial(self) -> bool:
        """Whether nothing is done anywhere: no move, no copy."""
        return self.outline.trivial

    @property
    def source(self) -> Layout:
        return self._source.entries

    @property
    def destination(self) -> Layout:
        return self._destination.entries

    @cached_property
    def exchanges(self) -> tuple[Exchange, ...]:
        """All communication, in order."""
        return tuple(Exchange(self, x) for x in range(len(self.outline.form)))

    @cached_property
    def phase_exchanges(self) -> tuple[tuple[Exchange, ...], ...]:
        """The communication of each phase."""
        middle = self.outline.middle
        return (self.exchanges,) if self.outline.phases == 1 else (self.exchanges[:middle], self.exchanges[middle:])

    @cached_property
    def phases(self) -> tuple[Phase, ...]:
        """The phases, with their local moves."""
        local, layouts = self._moves_by_exchange[0], self._layouts
        pairs = zip(layouts, layouts[1:], self.phase_exchanges, strict=False)
        return tuple(Phase(a, b, tuple(local[p]), exchanges) for p, (a, b, exchanges) in enumerate(pairs))

    @cached_property
    def staged(self) -> tuple[dict[int, int], ...]:
        """For each phase by device: elements that arrive in receive buffers, as they are only a part of what they are
        for, or are added to more. An all-reduce is done in place."""
        return tuple(_staged(phase) for phase in self.phases)

    @property
    def _layouts(self) -> tuple[Layout, ...]:
        between = (self.details.between,) if self.outline.phases == 2 else ()
        return (self.source, *between, self.destination)

    @cached_property
    def _moves_by_exchange(self) -> tuple[list[list[Move]], list[tuple[Move, ...]]]:
        """Local moves of each phase, moves of each exchange."""
        details, layouts = self.details, self._layouts
        local: list[list[Move]] = [[] for _ in layouts[1:]]
        remote: list[list[Move]] = [[] for _ in self.outline.form]
        rows = zip(details.source, details.destination, details.exchange, strict=True)
        for m, (s, k, x) in enumerate(rows):
            phase = int(len(local) == 2 and m >= details.half)
            box = intersect(layouts[phase][s].box, layouts[phase + 1][k].box)
            assert box is not None
            (local[phase] if x == LOCAL else remote[x]).append(Move(s, k, box))
        return local, [tuple(moves) for moves in remote]

    def moves_of(self, x: int) -> tuple[Move, ...]:
        """What moves in exchange ``x``."""
        return self._moves_by_exchange[1][x]

    @cached_property
    def form(self) -> str:
        """What it is, in the field's words: "nothing", "slice", or the names of its exchanges' forms."""
        if not self.exchanges:
            return "nothing" if self.trivial else "slice"
        return " + ".join(dict.fromkeys(exchange.form for exchange in self.exchanges))

    @property
    def seconds(self) -> float:
        """Duration if nothing else used the links: of each phase the slowest exchange, or the link that several of its
        exchanges share; phases in sequence."""
        total = 0.0
        for exchanges in self.phase_exchanges:
            shared: Counter[int] = Counter()
            for exchange in exchanges:
                shared.update(dict(exchange.transfer.links))  # whole ticks: sums are exact
            total += max([e.transfer.duration_s for e in exchanges] + [*shared.values()], default=0.0)
        return total

    @property
    def nbytes(self) -> int:
        """Bytes that cross devices."""
        return int(self.outline.nbytes.sum())


def _staged(phase: Phase) -> dict[int, int]:
    arriving = Counter(m.destination for moves in (phase.local, *(e.moves for e in phase.exchanges)) for m in moves)
    staged: dict[int, int] = {}
    for exchange in phase.exchanges:
        if exchange.form != "all_reduce":
            for move in exchange.moves:
                entry = phase.destination[move.destination]
                if arriving[move.destination] > 1 or move.box != entry.box:
                    staged[entry.device] = staged.get(entry.device, 0) + volume(move.box)
    return staged


def reshard(source: Layout, destination: Layout, itemsize: int, topology: Topology) -> Reshard:
    """The cheapest known movement. ``itemsize``: bytes per element. ``destination`` terms are ignored."""
    layouts = Layouts(len(topology.devices))
    return Reshard(Planner(topology), layouts.intern(source), layouts.intern(destination), itemsize)


def assemble(planner: Planner, source: Laid, destination: Laid, first: U32, last: U32, itemsize: int) -> Reshard:
    """Reshard that puts each destination entry together from its range of the source entries, each of which is a term
    of its own (a sharded weight)."""
    return Reshard(planner, source, destination, itemsize, GIVEN, (first, last))


def local_reshard(planner: Planner, source: Laid, destination: Laid, itemsize: int) -> Reshard:
    """Reshard in which every destination entry is cut from an entry of its own device (a weight from its storage)."""
    return Reshard(planner, source, destination, itemsize, OWN)
