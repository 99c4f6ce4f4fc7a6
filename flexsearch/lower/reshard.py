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
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from flexsearch.compiled import F64, I64, U8, U32, U64
from flexsearch.cost import Profile
from flexsearch.cost.communication import Pricing, Transfer, priced_transfer
from flexsearch.cost.tally import Loads
from flexsearch.direct import direct
from flexsearch.graph import Box, intersect, volume
from flexsearch.lower import planner
from flexsearch.lower.footprints import note_used
from flexsearch.lower.layout import Entry, Laid, Layout, Layouts
from flexsearch.lower.moves import FREE, GIVEN, OWN
from flexsearch.lower.traffic import NONE
from flexsearch.lower.workspace import (
    DRAG,
    ERROR,
    FIRST,
    FULL,
    LAST,
    LINK,
    MESSAGE,
    MIDDLE,
    MOVE_FIRST,
    MOVE_LAST,
    MOVE_MIDDLE,
    PHASES,
    RECEIVE,
    SEND,
    TRIVIAL,
    Workspace,
    make_workspace,
)
from flexsearch.topology import Topology
from flexsearch.topology.parts import FORMS

ROOM = 1 << 14
"""Moves, and rows of links, for which there is room at first."""
_note_used = direct(note_used)
LOCAL = int(NONE)
"""Exchange of a move that crosses no devices."""


class Move(NamedTuple):
    """Copy region ``box`` of source entry ``source`` into (or add it to) destination entry ``destination``."""

    source: int
    destination: int
    box: Box


class Outline(NamedTuple):
    """A reshard in sums. One row for each exchange, the first ``middle`` of them in the first phase: ``form`` (number
    in ``FORMS``), ``nbytes`` (that cross devices); ``amount``, ``unit``, ``start`` (s), ``duration`` (s):
    see ``workspace.Exchanges``. Lists of exchange x are rows ``end[x - 1]`` to ``end[x]`` of ``send``, ``receive``
    (devices, ascending) and of the links and processors in ``loads``."""

    form: U8
    nbytes: I64
    amount: I64
    unit: I64
    start: F64
    duration: F64
    leader: U32
    send_end: U32
    receive_end: U32
    link_end: U32
    drag_end: U32
    send: U32
    receive: U32
    loads: Loads
    phases: int
    middle: int
    trivial: bool


class Details(NamedTuple):
    """The rest of what was decided. ``between``: layout between the phases, if there are two. By move, the first
    ``half`` of them of the first phase: ``source`` and ``destination`` entry, and ``exchange`` (LOCAL: none). Exchange
    x has the ``messages`` (source and destination device, bytes) from ``message_end[x - 1]`` to ``message_end[x]``.
    ``aliased``, ``used``: see ``Reshard``."""

    between: Layout
    source: list[int]
    destination: list[int]
    exchange: list[int]
    half: int
    message_end: list[int]
    messages: list[tuple[int, int, int]]
    aliased: frozenset[int]
    used: frozenset[int]


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
            planner.plan(self.topology.routes, self.pricing.rates, a, b, mode, np.int64(itemsize), workspace)
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
        self.senders = tuple(outline.send[_rows(outline.send_end, x)].tolist())
        self.receivers = tuple(outline.receive[_rows(outline.receive_end, x)].tolist())
        self.devices = tuple(sorted({*self.senders, *self.receivers}))

    @cached_property
    def transfer(self) -> Transfer:
        """What it costs."""
        o, x = self._plan.outline, self._x
        links, drags = _rows(o.link_end, x), _rows(o.drag_end, x)
        return priced_transfer(float(o.duration[x]), o.loads, links, drags, int(o.unit[x]))

    @cached_property
    def moves(self) -> tuple[Move, ...]:
        """What moves, in the order of the destination entries."""
        return self._plan.moves_of(self._x)

    @property
    def messages(self) -> tuple[tuple[int, int, int], ...]:
        """(source device, destination device, bytes) of the moves; empty for an all-reduce."""
        details = self._plan.details
        return tuple(details.messages[_rows(details.message_end, self._x)])

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
        workspace = self.planned()
        rows, result = workspace.exchanges, workspace.result.tolist()
        first, last = result[FIRST], result[LAST]

        def ends(row: int) -> tuple[U32, slice]:
            values = rows.end[row]
            begin = values[first - 1] if first else np.uint32(0)
            end = values[last - 1] if last else np.uint32(0)
            return values[first:last] - begin, slice(int(begin), int(end))

        of = slice(first, last)
        (send_end, sends), (receive_end, receives) = ends(SEND), ends(RECEIVE)
        (link_end, links), (drag_end, drags) = ends(LINK), ends(DRAG)
        loads = rows.loads
        return Outline(
            form=rows.form[of].copy(), nbytes=rows.nbytes[of].copy(), amount=rows.amount[of].copy(),
            unit=rows.unit[of].copy(), start=rows.start[of].copy(),
            duration=rows.duration[of].copy(), leader=rows.leader[of].copy(), send_end=send_end,
            receive_end=receive_end, link_end=link_end, drag_end=drag_end,
            send=rows.send[sends].copy(), receive=rows.receive[receives].copy(),
            loads=Loads(
                loads.link[links].copy(), loads.link_load[links].copy(), loads.link_s[links].copy(),
                loads.drag[drags].copy(), loads.drag_load[drags].copy(), loads.drag_s[drags].copy(), loads.size,
            ),
            phases=result[PHASES], middle=result[MIDDLE] - first, trivial=bool(result[TRIVIAL]),
        )  # fmt: skip

    @cached_property
    def details(self) -> Details:
        """The rest: what moves."""
        workspace, rank = self.planned(), self._destination.grid.box.shape[1]
        result = workspace.result.tolist()
        first, last, begin, end = result[FIRST], result[LAST], result[MOVE_FIRST], result[MOVE_LAST]
        exchange = workspace.moves.exchange[begin:end].astype(np.int64)
        exchange[exchange != LOCAL] -= first
        rows, message_end = workspace.exchanges, workspace.exchanges.end[MESSAGE].astype(np.int64)
        before = message_end[first - 1] if first else 0
        ends = (message_end[first:last] - before).tolist()
        of = slice(before, before + (ends[-1] if ends else 0))
        columns = *rows.message[:, of].tolist(), rows.message_bytes[of].tolist()
        between: Layout = ()
        if result[PHASES] == 2:
            count = int(workspace.middle.size[0])
            boxes = workspace.middle.box[:count, :rank].tolist()
            between = tuple(
                Entry(device, tuple((low, high) for low, high in box), term)
                for term, (device, box) in enumerate(zip(workspace.middle.device[:count].tolist(), boxes, strict=True))
            )
        aliased = self._destination.device[np.flatnonzero(workspace.aliased[: len(self._destination)])].tolist()
        used = np.zeros(len(self._source), np.uint8)
        _note_used(workspace, np.uint64(0), used)
        return Details(
            between, workspace.moves.source[begin:end].tolist(), workspace.moves.destination[begin:end].tolist(),
            exchange.tolist(), result[MOVE_MIDDLE] - begin, ends, list(zip(*columns, strict=True)),
            frozenset(aliased) if result[PHASES] == 1 else frozenset(), frozenset(np.flatnonzero(used).tolist()),
        )  # fmt: skip

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


def _rows(ends: Sequence[int] | U32 | U64, x: int) -> slice:
    return slice(int(ends[x - 1]) if x else 0, int(ends[x]))


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
