"""From the layout in which a tensor lies to the one in which it is needed, by the movement that costs least.

A reshard is a sequence of at most two **phases**. A phase takes the entries of one layout to those of the next: each
destination entry is the sum, over the terms that reach it, of regions copied locally, received, or all-reduced. What
crosses devices in a phase falls into **exchanges**, one for each set of devices that talk to each other.

Replicated destinations of partial sums are made in the manner of Rabenseifner (reduce-scatter, then all-gather: two
phases), or by the backend's all-reduce where every device of the group takes part; replicated destinations of remote
data by direct messages or by scatter + all-gather. The candidates are costed on the topology and the fastest is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from flexsearch.cost.communication import Transfer, all_reduce, transfer
from flexsearch.graph import Box, chunk, intersect, volume
from flexsearch.lower.layout import Entry, Layout
from flexsearch.topology import Topology

MANY: Final = 128
"""Pairs of entries from which on they are compared by numpy."""


@dataclass(frozen=True, slots=True)
class Move:
    """Copy region ``box`` of source entry ``source`` into (or add it to) destination entry ``destination``."""

    source: int
    destination: int
    box: Box


@dataclass(frozen=True)
class Exchange:
    """Moves between different devices that happen together, or one all-reduce (``form`` "all_reduce": every device of
    ``devices`` contributes the sum of its local moves and all receive the total of region ``box``)."""

    form: str
    devices: tuple[int, ...]
    moves: tuple[Move, ...]
    nbytes: int
    transfer: Transfer
    senders: tuple[int, ...]
    receivers: tuple[int, ...]
    messages: tuple[tuple[int, int, int], ...] = ()
    """(source device, destination device, bytes) of the moves; empty for an all-reduce."""
    box: Box | None = None


@dataclass(frozen=True)
class Phase:
    """One step of a reshard: from ``source`` entries to ``destination`` entries by local moves and exchanges."""

    source: Layout
    destination: Layout
    local: tuple[Move, ...]
    exchanges: tuple[Exchange, ...]


@dataclass(frozen=True)
class Reshard:
    """Phases from ``source`` to ``destination``. ``aliased``: devices on which the only destination entry is exactly a
    local source entry, so that nothing at all is done there."""

    phases: tuple[Phase, ...]
    aliased: frozenset[int]

    @cached_property
    def trivial(self) -> bool:
        """Whether nothing is done anywhere: no move, no copy."""
        return not self.exchanges and self.aliased >= {e.device for e in self.phases[-1].destination}

    @cached_property
    def exchanges(self) -> tuple[Exchange, ...]:
        """All communication, in order."""
        return tuple(exchange for phase in self.phases for exchange in phase.exchanges)

    @property
    def source(self) -> Layout:
        return self.phases[0].source

    @property
    def destination(self) -> Layout:
        return self.phases[-1].destination

    @cached_property
    def form(self) -> str:
        """What it is, in the field's words: "nothing", "slice", or the names of its exchanges' forms."""
        if not self.exchanges:
            return "nothing" if self.trivial else "slice"
        return " + ".join(dict.fromkeys(exchange.form for exchange in self.exchanges))

    @cached_property
    def seconds(self) -> float:
        """Duration if nothing else used the links: the slowest exchange of each phase, phases in sequence."""
        return sum(max((e.transfer.duration_s for e in phase.exchanges), default=0.0) for phase in self.phases)

    @cached_property
    def nbytes(self) -> int:
        """Bytes that cross devices."""
        return sum(exchange.nbytes for exchange in self.exchanges)


def reshard(source: Layout, destination: Layout, itemsize: int, topology: Topology) -> Reshard:
    """The cheapest known movement. ``itemsize``: bytes per element. ``destination`` terms are ignored."""
    direct = _Planner(source, destination, itemsize, topology).phase()
    candidates: list[tuple[Phase, ...]] = [(direct,)]
    groups = _replicated(destination)
    remote = {m.destination for e in direct.exchanges for m in e.moves}
    shared = [group for group in groups if any(k in remote for k in group)]
    if shared:
        reduced = _Planner(source, destination, itemsize, topology).phase(shared)
        if any(e.form == "all_reduce" for e in reduced.exchanges):
            candidates.append((reduced,))
        middle, regather = _scattered(destination, shared)
        scatter = _Planner(source, middle, itemsize, topology).phase()
        gather = _Planner(middle, destination, itemsize, topology).phase(fixed=regather)
        candidates.append((scatter, gather))
    plans = [Reshard(phases, _aliased(source, destination, phases)) for phases in candidates]
    # Ties go to the earlier, simpler plan; bytes break near-ties in which latencies differ by nothing.
    return min(plans, key=lambda plan: (plan.seconds, plan.nbytes))


def assemble(
    source: Layout, destination: Layout, allowed: Sequence[tuple[int, ...]], itemsize: int, topology: Topology
) -> Reshard:
    """Reshard that puts each destination entry together from the source entries allowed for it (a sharded weight)."""
    phase = _Planner(source, destination, itemsize, topology).phase(fixed=dict(enumerate(allowed)))
    return Reshard((phase,), _aliased(source, destination, (phase,)))


def local_reshard(source: Layout, destination: Layout) -> Reshard:
    """Reshard in which every destination entry is cut from an entry of its own device (a weight from its storage)."""
    moves = []
    for k, need in enumerate(destination):
        for s, entry in enumerate(source):
            if entry.device == need.device and intersect(entry.box, need.box) == need.box:
                moves.append(Move(s, k, need.box))
                break
        else:
            raise AssertionError(f"device {need.device} does not hold {need.box}")
    phase = Phase(source, destination, tuple(moves), ())
    return Reshard((phase,), _aliased(source, destination, (phase,)))


def _aliased(source: Layout, destination: Layout, phases: tuple[Phase, ...]) -> frozenset[int]:
    if len(phases) > 1:
        return frozenset()
    (phase,) = phases
    count: dict[int, int] = {}
    for entry in destination:
        count[entry.device] = count.get(entry.device, 0) + 1
    arriving: dict[int, int] = {}
    for exchange in phase.exchanges:
        for move in exchange.moves:
            arriving[move.destination] = arriving.get(move.destination, 0) + 1
        if exchange.form == "all_reduce":
            count.update(dict.fromkeys(exchange.devices, 0))
    local: dict[int, list[Move]] = {}
    for move in phase.local:
        local.setdefault(move.destination, []).append(move)
    return frozenset(
        entry.device
        for k, entry in enumerate(destination)
        if count[entry.device] == 1
        and k not in arriving
        and len(local.get(k, ())) == 1
        and source[local[k][0].source].box == entry.box
    )


def _replicated(destination: Layout) -> list[tuple[int, ...]]:
    """Groups of at least two destination entries with the same region on different devices."""
    by_box: dict[Box, list[int]] = {}
    for k, entry in enumerate(destination):
        by_box.setdefault(entry.box, []).append(k)
    return [tuple(group) for group in by_box.values() if len(group) > 1]


def _scattered(destination: Layout, groups: Sequence[tuple[int, ...]]) -> tuple[Layout, dict[int, tuple[int, ...]]]:
    """The intermediate layout, in which each member of a group owns a part of the group's region, and for each
    destination entry the intermediate entries it is put together from."""
    middle: list[Entry] = []
    sources: dict[int, tuple[int, ...]] = {}
    grouped = {k for group in groups for k in group}
    for k, entry in enumerate(destination):
        if k not in grouped:
            sources[k] = (len(middle),)
            middle.append(Entry(entry.device, entry.box, len(middle)))
    for group in groups:
        members = []
        for device, part in split_box(destination[group[0]].box, [destination[k].device for k in group]):
            members.append(len(middle))
            middle.append(Entry(device, part, len(middle)))
        sources.update(dict.fromkeys(group, tuple(members)))
    return tuple(middle), sources


def split_box(box: Box, devices: Sequence[int]) -> list[tuple[int, Box]]:
    """``box`` cut along its first dimension that is long enough for all devices (else the longest; then some devices
    get nothing and are left out), as equal as possible."""
    lengths = [high - low for low, high in box]
    if not lengths:
        return [(devices[0], box)]
    axis = next((a for a, n in enumerate(lengths) if n >= len(devices)), max(range(len(box)), key=lengths.__getitem__))
    low = box[axis][0]
    parts = []
    for k, device in enumerate(devices):
        first, last = chunk(lengths[axis], len(devices), k)
        if first < last:
            parts.append((device, (*box[:axis], (low + first, low + last), *box[axis + 1 :])))
    return parts


class _Planner:
    """Builds one phase between two layouts."""

    def __init__(self, source: Layout, destination: Layout, itemsize: int, topology: Topology) -> None:
        self.source, self.destination = source, destination
        self.itemsize, self.topology = itemsize, topology
        self.copies: dict[int, list[int]] = {}
        for s, entry in enumerate(source):
            self.copies.setdefault(entry.term, []).append(s)
        self.sent = [0] * len(topology.devices)

    def phase(self, groups: Sequence[tuple[int, ...]] = (), fixed: dict[int, tuple[int, ...]] | None = None) -> Phase:
        """``groups``: destination entries to serve by an all-reduce where that is possible. ``fixed``: for each
        destination, the only source entries that it may be put together from."""
        local: list[Move] = []
        remote: list[Move] = []
        exchanges: list[Exchange] = []
        done: set[int] = set()
        for group in groups:
            if (reduced := self._all_reduce(group)) is not None:
                exchanges.append(reduced)
                done.update(group)
        touching = self._touching()
        for k in range(len(self.destination)):
            if k not in done:
                for move in self._moves(k, touching[k], None if fixed is None else fixed[k]):
                    same = self.source[move.source].device == self.destination[k].device
                    (local if same else remote).append(move)
        exchanges.extend(self._exchange(moves) for moves in self._components(remote))
        return Phase(self.source, self.destination, tuple(local), tuple(exchanges))

    def _touching(self) -> Sequence[Sequence[int]]:
        """For each destination the terms that may overlap it, ascending. In large layouts, where few pairs do, all
        pairs are compared at once."""
        terms = sorted(self.copies)
        if len(terms) * len(self.destination) < MANY or not self.destination[0].box:
            return [terms] * len(self.destination)
        made = np.array([self.source[self.copies[term][0]].box for term in terms])
        need = np.array([entry.box for entry in self.destination])
        low = np.maximum(made[None, :, :, 0], need[:, None, :, 0])
        overlaps = (low < np.minimum(made[None, :, :, 1], need[:, None, :, 1])).all(axis=2)
        return [[terms[t] for t in np.flatnonzero(row)] for row in overlaps]

    def _moves(self, k: int, terms: Sequence[int], allowed: tuple[int, ...] | None) -> list[Move]:
        """For each of ``terms`` that overlaps destination ``k``: its region from the best copy."""
        need = self.destination[k]
        moves = []
        for term in terms:
            copies = self.copies[term]
            if allowed is not None:
                copies = [s for s in copies if s in allowed]
            common = intersect(self.source[copies[0]].box, need.box) if copies else None
            if common is None:
                continue
            best = copies[0] if len(copies) == 1 else min(copies, key=lambda s: self._distance(s, need.device))
            if self.source[best].device != need.device:
                self.sent[self.source[best].device] += volume(common)
            moves.append(Move(best, k, common))
        return moves

    def _distance(self, s: int, device: int) -> tuple[float, float, int, int]:
        owner = self.source[s].device
        if owner == device:
            return 0.0, 0.0, 0, s
        route = self.topology.route(owner, device)
        return 1 / route.bandwidth, route.latency_s, self.sent[owner], s

    def _all_reduce(self, group: tuple[int, ...]) -> Exchange | None:
        """All-reduce over the group's devices if partial sums of its region lie on at least two of them and nowhere
        else. A term that has copies is contributed by one of them."""
        box = self.destination[group[0]].box
        members = {self.destination[k].device: k for k in group}
        moves: list[Move] = []
        load = dict.fromkeys(members, 0)
        if len(members) != len(group):
            return None
        for term in sorted(self.copies):
            common = intersect(self.source[self.copies[term][0]].box, box)
            if common is None:
                continue
            owners = [s for s in self.copies[term] if self.source[s].device in members]
            if not owners:
                return None
            best = min(owners, key=lambda s: (load[self.source[s].device], s))
            load[self.source[best].device] += 1
            moves.append(Move(best, members[self.source[best].device], common))
        if sum(1 for count in load.values() if count) < 2 or sum(volume(m.box) for m in moves) <= volume(box):
            return None  # no sum is pending: gathering moves less
        devices = tuple(sorted(members))
        nbytes = volume(box) * self.itemsize
        cost = all_reduce(self.topology, devices, nbytes)
        crossing = 2 * (len(devices) - 1) * nbytes
        return Exchange("all_reduce", devices, tuple(moves), crossing, cost, devices, devices, box=box)

    def _components(self, moves: Sequence[Move]) -> list[list[Move]]:
        """Moves grouped by the sets of devices that they connect."""
        root: dict[int, int] = {}

        def find(device: int) -> int:
            while root.setdefault(device, device) != device:
                device = root[device]
            return device

        for move in moves:
            a, b = find(self.source[move.source].device), find(self.destination[move.destination].device)
            root[max(a, b)] = min(a, b)
        groups: dict[int, list[Move]] = {}
        for move in moves:
            groups.setdefault(find(self.source[move.source].device), []).append(move)
        return [groups[key] for key in sorted(groups)]

    def _exchange(self, moves: Sequence[Move]) -> Exchange:
        pairs: dict[tuple[int, int], int] = {}
        for move in moves:
            pair = self.source[move.source].device, self.destination[move.destination].device
            pairs[pair] = pairs.get(pair, 0) + volume(move.box) * self.itemsize
        senders = tuple(sorted({a for a, _ in pairs}))
        receivers = tuple(sorted({b for _, b in pairs}))
        form = self._form(moves, senders, receivers)
        messages = tuple((a, b, n) for (a, b), n in sorted(pairs.items()))
        cost = transfer(self.topology, form, messages)
        devices = tuple(sorted({*senders, *receivers}))
        return Exchange(form, devices, tuple(moves), sum(pairs.values()), cost, senders, receivers, messages)

    def _form(self, moves: Sequence[Move], senders: tuple[int, ...], receivers: tuple[int, ...]) -> str:
        """The collective that the moves amount to; "exchange" for other point-to-point traffic."""
        n = len(senders)
        if n < 2 or senders != receivers or len({(m.source, m.destination) for m in moves}) < n * (n - 1):
            return "exchange"
        boxes = {self.destination[m.destination].box for m in moves}
        arriving: dict[int, int] = {}
        for move in moves:
            arriving[move.destination] = arriving.get(move.destination, 0) + volume(move.box)
        summed = any(amount > volume(self.destination[k].box) for k, amount in arriving.items()) or (
            all(m.box == self.destination[m.destination].box for m in moves)
        )
        if summed:
            return "reduce_scatter" if len(boxes) == n else "exchange"
        if len(boxes) == 1:
            return "all_gather"
        return "all_to_all"
