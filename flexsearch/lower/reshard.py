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

:mod:`flexsearch.lower.planner` decides; here stands what it decided. Compiled code reads that off the workspace; for
reports and ranks it becomes objects: exchanges at once, moves, which may be the square of the devices, where they are
asked for, by planning once more.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from flexsearch.compiled import U32
from flexsearch.cost import Profile
from flexsearch.cost.communication import Pricing, priced_transfer
from flexsearch.direct import direct
from flexsearch.graph import Box, intersect
from flexsearch.lower.layout import Entry, Laid, Layout, Layouts
from flexsearch.lower.moves import FREE, GIVEN
from flexsearch.lower.planner import plan
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
    Exchanges,
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

    def _new_workspace(self) -> Workspace:
        sizes = len(self.topology.devices), self._dimensions, self._entries, self._rows, self._rows
        return make_workspace(self.pricing.tally, *sizes)

    def room_for(self, dimensions: int, entries: int) -> Workspace:
        """The workspace, large enough for layouts of so many dimensions and entries; what is on it counts no more."""
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
    ``devices`` contributes the sum of its local moves and all receive the total of region ``box``, else None).
    ``nbytes``: that cross devices; ``amount``: bytes by which a collective is priced (of messages 0); ``start_s``:
    seconds until bytes flow (of messages); ``transfer``: what it costs."""

    def __init__(self, reshard: Reshard, rows: Exchanges, x: int, number: int) -> None:
        self._reshard, self._number = reshard, number
        self.form: str = FORMS[int(rows.form[x])]
        self.nbytes, self.amount, self.start_s = int(rows.nbytes[x]), int(rows.amount[x]), float(rows.start[x])
        self.senders = tuple(rows.send[_rows(rows, SEND, x)].tolist())
        self.receivers = tuple(rows.receive[_rows(rows, RECEIVE, x)].tolist())
        self.devices = tuple(sorted({*self.senders, *self.receivers}))
        links, drags = _rows(rows, LINK, x), _rows(rows, DRAG, x)
        self.transfer = priced_transfer(float(rows.duration[x]), rows.loads, links, drags, int(rows.unit[x]))
        leader = int(rows.leader[x])
        self.box: Box | None = reshard.destination[leader].box if self.form == "all_reduce" else None

    @property
    def moves(self) -> tuple[Move, ...]:
        """What moves, in the order of the destination entries."""
        return self._reshard.movement.remote[self._number]

    @property
    def messages(self) -> tuple[tuple[int, int, int], ...]:
        """(source device, destination device, bytes) of the moves; empty for an all-reduce."""
        return self._reshard.messages[self._number]


def _rows(rows: Exchanges, k: int, x: int) -> slice:
    """The rows of list ``k`` that exchange ``x`` has."""
    return slice(int(rows.end[k, x - 1]) if x else 0, int(rows.end[k, x]))


class Movement(NamedTuple):
    """What moves in a reshard. ``layouts``: from phase to phase. ``local``: by phase, what crosses no devices;
    ``remote``: by exchange. ``aliased``, ``used``: see ``Reshard``."""

    layouts: tuple[Layout, ...]
    local: list[list[Move]]
    remote: list[tuple[Move, ...]]
    aliased: frozenset[int]
    used: frozenset[int]


@dataclass(frozen=True)
class Phase:
    """One step of a reshard: from ``source`` entries to ``destination`` entries by local moves and exchanges."""

    source: Layout
    destination: Layout
    local: tuple[Move, ...]
    exchanges: tuple[Exchange, ...]


class Reshard:
    """Phases from ``source`` to ``destination``. ``itemsize``: bytes per element; ``mode``: from which entries each is
    made (``moves``). ``ranges``: by destination entry, first and last of the source entries that it is put together
    from, each of which is a term of its own (a sharded weight)."""

    def __init__(
        self, planner: Planner, source: Laid, destination: Laid, itemsize: int, mode: Any = FREE,
        ranges: tuple[U32, U32] | None = None,
    ) -> None:  # fmt: skip
        self._planner, self._source, self._destination = planner, source, destination
        self._itemsize, self._mode, self._ranges = itemsize, mode if ranges is None else GIVEN, ranges

    def planned(self) -> Workspace:
        """The planner's workspace, with this reshard in it until another is planned: rows FIRST to LAST of its
        exchanges."""
        return self._planner.run(self._source, self._destination, self._mode, self._ranges, self._itemsize)

    @cached_property
    def _decided(self) -> tuple[tuple[tuple[Exchange, ...], ...], bool]:
        """The communication of each phase, and whether nothing at all is done."""
        workspace = self.planned()
        result = workspace.result.tolist()
        first, middle, last = result[FIRST], result[MIDDLE], result[LAST]
        exchanges = tuple(Exchange(self, workspace.exchanges, x, x - first) for x in range(first, last))
        two = exchanges[: middle - first], exchanges[middle - first :]
        return two if result[PHASES] == 2 else (exchanges,), bool(result[TRIVIAL])

    @property
    def trivial(self) -> bool:
        """Whether nothing is done anywhere: no move, no copy."""
        return self._decided[1]

    @property
    def aliased(self) -> frozenset[int]:
        """Devices on which the only destination entry is exactly a local source entry, so that nothing at all is done
        there."""
        return self.movement.aliased

    @property
    def used(self) -> frozenset[int]:
        """Source entries of which anything is made, on their device or elsewhere: replicas leave it to each other."""
        return self.movement.used

    @property
    def source(self) -> Layout:
        return self._source.entries

    @property
    def destination(self) -> Layout:
        return self._destination.entries

    @property
    def phase_exchanges(self) -> tuple[tuple[Exchange, ...], ...]:
        """The communication of each phase."""
        return self._decided[0]

    @cached_property
    def exchanges(self) -> tuple[Exchange, ...]:
        """All communication, in order."""
        return tuple(exchange for exchanges in self.phase_exchanges for exchange in exchanges)

    @cached_property
    def phases(self) -> tuple[Phase, ...]:
        """The phases, with their local moves."""
        layouts, local = self.movement.layouts, self.movement.local
        rows = zip(layouts, layouts[1:], local, self.phase_exchanges, strict=False)
        return tuple(Phase(a, b, tuple(moves), exchanges) for a, b, moves, exchanges in rows)

    @cached_property
    def messages(self) -> tuple[tuple[tuple[int, int, int], ...], ...]:
        """By exchange, its messages."""
        workspace = self.planned()
        messages, rows = [], workspace.exchanges
        for x in range(workspace.result[FIRST], workspace.result[LAST]):
            of = _rows(rows, MESSAGE, x)
            messages.append(tuple(zip(*rows.message[:, of].tolist(), rows.message_bytes[of].tolist(), strict=True)))
        return tuple(messages)

    @cached_property
    def movement(self) -> Movement:
        """What moves."""
        count, workspace = len(self.exchanges), self.planned()
        result = workspace.result.tolist()
        between = [_between(workspace, self._destination.grid.box.shape[1])] if result[PHASES] == 2 else []
        layouts = self.source, *between, self.destination
        local: list[list[Move]] = [[] for _ in self.phase_exchanges]
        remote: list[list[Move]] = [[] for _ in range(count)]
        begin, end, used = result[MOVE_FIRST], result[MOVE_LAST], set[int]()
        columns = workspace.moves.source, workspace.moves.destination, workspace.moves.exchange
        for m, (s, k, x) in enumerate(zip(*(column[begin:end].tolist() for column in columns), strict=True), begin):
            phase = int(len(local) == 2 and m >= result[MOVE_MIDDLE])
            box = intersect(layouts[phase][s].box, layouts[phase + 1][k].box)
            assert box is not None
            if not phase:
                used.add(s)
            (local[phase] if x == int(NONE) else remote[x - result[FIRST]]).append(Move(s, k, box))
        alone = self._destination.device[np.flatnonzero(workspace.aliased[: len(self._destination)])].tolist()
        aliased = frozenset(alone if len(local) == 1 else ())
        return Movement(layouts, local, [tuple(moves) for moves in remote], aliased, frozenset(used))

    @cached_property
    def form(self) -> str:
        """What it is, in the field's words: "nothing", "slice", or the names of its exchanges' forms."""
        if not self.exchanges:
            return "nothing" if self.trivial else "slice"
        return " + ".join(dict.fromkeys(exchange.form for exchange in self.exchanges))


def _between(workspace: Workspace, rank: int) -> Layout:
    """Layout between the phases of the reshard in the workspace."""
    middle = workspace.middle
    count = int(middle.size[0])
    entries = zip(middle.device[:count].tolist(), middle.box[:count, :rank].tolist(), strict=True)
    return tuple(
        Entry(device, tuple((low, high) for low, high in box), term) for term, (device, box) in enumerate(entries)
    )


def reshard(source: Layout, destination: Layout, itemsize: int, topology: Topology) -> Reshard:
    """The cheapest known movement. ``itemsize``: bytes per element. ``destination`` terms are ignored."""
    layouts = Layouts(len(topology.devices))
    return Reshard(Planner(topology), layouts.intern(source), layouts.intern(destination), itemsize)
