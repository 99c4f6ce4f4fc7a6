"""How data gets from one layout to another: every decision about communication, compiled.

``plan`` weighs the candidates that :mod:`flexsearch.lower.reshard` describes against each other, and leaves the moves
and exchanges of the best on the desk. Entries, terms and devices are visited in ascending order, so that the same
layouts always give the same plan.
"""

from __future__ import annotations

from math import inf
from typing import Any

import numpy as np

from flexsearch.compiled import I64, ONE, TWO, U8, U32, U64, ZERO, lean
from flexsearch.cost.communication import Rates, price, ring_edge, ring_steps, send, send_around
from flexsearch.lower.desk import (
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
    Desk,
    Exchanges,
    Groups,
    Moves,
    Sets,
)
from flexsearch.lower.interned import Side
from flexsearch.topology.routes import RouteTable

# Constants that are handed on have a numpy type: for every plain number numba would compile a function again.
FREE, GIVEN, OWN = (np.uint64(k) for k in range(3))
"""From which source entries a destination entry is made: from all terms that reach it; from those of a range that is
given, which are terms of their own; or from one of its own device, of which it is a part."""
NONE: Any = np.uint32(0xFFFFFFFF)
"""No entry; a move that crosses no devices."""
SOON: Any = np.uint32(0xFFFFFFFE)
"""A move that crosses devices, in an exchange that is still to be made; several entries."""
ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, EXCHANGE = (np.uint64(k) for k in range(5))
"""Numbers of forms in ``topology.parts.FORMS``."""
BYTE: Any = np.int64(1)


@lean
def plan(
    routes: RouteTable, rates: Rates, source: Side, destination: Side, mode: Any, itemsize: Any, desk: Desk
) -> None:
    """The cheapest known movement, on ``desk.result``. ``itemsize``: bytes per element (int64)."""
    moves, rows, groups, sets, result = desk.moves, desk.exchanges, desk.groups, desk.sets, desk.result
    _clear(moves.size, rows.size, rows.loads.size, result)
    _plain(groups.done, destination.size[0])
    _collect(routes, source, destination, mode, groups, moves, result)
    _exchange(routes, rates, source, destination, ZERO, itemsize, moves, sets, rows)
    half, middle = moves.size[0], rows.size[0]
    _choose(result, ONE, ZERO, middle, middle, ZERO, half, half)
    best, nbytes = _seconds(rows, ZERO, middle), _nbytes(rows, ZERO, middle)
    if mode == FREE and _share(destination, moves, groups):
        # Second candidate: sums by all-reduce. Ties go to the earlier, simpler plan; bytes break near-ties in which
        # latencies differ by nothing.
        begin, first = half, middle
        _plain(groups.done, destination.size[0])
        if _all_reduces(routes, rates, source, destination, itemsize, groups, moves, rows):
            half = moves.size[0]
            _collect(routes, source, destination, mode, groups, moves, result)
            _exchange(routes, rates, source, destination, half, itemsize, moves, sets, rows)
            last, end = rows.size[0], moves.size[0]
            seconds, more = _seconds(rows, first, last), _nbytes(rows, first, last)
            if seconds < best or (seconds == best and more < nbytes):
                best, nbytes = seconds, more
                _choose(result, ONE, first, last, last, begin, end, end)
        # Third candidate: each device gets a part of what its group wants, and the rest from the group.
        begin, first = moves.size[0], rows.size[0]
        _scatter(destination, groups, desk.middle)
        _plain(groups.done, desk.middle.size[0])
        _collect(routes, source, desk.middle, FREE, groups, moves, result)
        _exchange(routes, rates, source, desk.middle, begin, itemsize, moves, sets, rows)
        half, middle = moves.size[0], rows.size[0]
        _plain(groups.done, destination.size[0])
        _collect(routes, desk.middle, destination, GIVEN, groups, moves, result)
        _exchange(routes, rates, desk.middle, destination, half, itemsize, moves, sets, rows)
        last, end = rows.size[0], moves.size[0]
        seconds = _seconds(rows, first, middle) + _seconds(rows, middle, last)
        more = _nbytes(rows, first, last)
        if seconds < best or (seconds == best and more < nbytes):
            _choose(result, TWO, first, middle, last, begin, half, end)
    if moves.size[1] == ONE or rows.loads.size[2] == ONE:
        result[FULL] = ONE
    else:
        _finish(source, destination, desk)


@lean
def _clear(moves: U64, rows: U64, loads: U64, result: U64) -> None:
    for k in range(np.uint64(moves.shape[0])):
        moves[k] = ZERO
    for k in range(np.uint64(rows.shape[0])):
        rows[k] = ZERO
    for k in range(np.uint64(loads.shape[0])):
        loads[k] = ZERO
    for k in range(np.uint64(result.shape[0])):
        result[k] = ZERO


@lean
def _plain(done: U8, count: Any) -> None:
    for k in range(count):
        done[k] = 0


@lean
def _choose(result: U64, phases: Any, first: Any, middle: Any, last: Any, begin: Any, half: Any, end: Any) -> None:
    result[PHASES] = phases
    result[FIRST], result[MIDDLE], result[LAST] = first, middle, last
    result[MOVE_FIRST], result[MOVE_MIDDLE], result[MOVE_LAST] = begin, half, end


@lean
def _seconds(rows: Exchanges, first: Any, last: Any) -> Any:
    """Duration of a phase if nothing else used the links: its slowest exchange."""
    slowest = 0.0
    for x in range(first, last):
        slowest = max(slowest, rows.duration[x])
    return slowest


@lean
def _nbytes(rows: Exchanges, first: Any, last: Any) -> Any:
    total = np.int64(0)
    for x in range(first, last):
        total += rows.nbytes[x]
    return total


@lean
def _common(a: I64, i: Any, b: I64, j: Any) -> Any:
    """Elements that boxes ``a[i]`` and ``b[j]`` have in common."""
    count = np.int64(1)
    for r in range(np.uint64(min(a.shape[1], b.shape[1]))):  # a desk's boxes may have dimensions to spare
        low, high = max(a[i, r, 0], b[j, r, 0]), min(a[i, r, 1], b[j, r, 1])
        if low >= high:
            return np.int64(0)
        count *= high - low
    return count


@lean
def _equal(a: I64, i: Any, b: I64, j: Any, rank: Any) -> Any:
    equal = True
    for r in range(rank):
        equal = equal and a[i, r, 0] == b[j, r, 0] and a[i, r, 1] == b[j, r, 1]
    return equal


# ---- moves


@lean
def _collect(
    routes: RouteTable, source: Side, destination: Side, mode: Any, groups: Groups, moves: Moves, result: U64
) -> None:
    """Moves to all destination entries that are not done."""
    for d in range(np.uint64(moves.sent.shape[0])):
        moves.sent[d] = 0
    for k in range(destination.size[0]):
        if groups.done[k] == 1:
            continue
        device = np.uint64(destination.device[k])
        if mode == FREE:
            for t in range(source.size[1]):
                begin, end = np.uint64(source.term_first[t]), np.uint64(source.term_first[t + ONE])
                volume = _common(source.box, np.uint64(source.copy[begin]), destination.box, k)
                if volume > 0:
                    best = _nearest(routes, source.copy, source.device, begin, end, device, moves.sent)
                    _move(moves, best, np.uint64(source.device[best]), k, device, volume)
        elif mode == GIVEN:
            for s in range(np.uint64(groups.first[k]), np.uint64(groups.end[k])):
                volume = _common(source.box, s, destination.box, k)
                if volume > 0:
                    _move(moves, s, np.uint64(source.device[s]), k, device, volume)
        else:
            found = False
            for s in range(source.size[0]):
                if not found and np.uint64(source.device[s]) == device:
                    volume = _common(source.box, s, destination.box, k)
                    if volume == destination.volume[k]:
                        found = True
                        _move(moves, s, device, k, device, volume)
            if not found:
                result[ERROR] = ONE


@lean
def _nearest(routes: RouteTable, copies: U32, devices: U32, first: Any, last: Any, device: Any, sent: I64) -> Any:
    """Of the entries ``copies[first:last]`` the one to send to ``device``: its own; else by bandwidth, latency, and
    what the owner sends already."""
    best = np.uint64(copies[first])
    if last - first == ONE:
        return best
    slowness, latency, least = inf, inf, np.int64(0)
    for c in range(first, last):
        s = np.uint64(copies[c])
        owner = np.uint64(devices[s])
        if owner == device:
            return s
        route = np.uint64(routes.number[owner, device])
        a, b, n = routes.slowness[route], routes.latency[route], sent[owner]
        if c == first or a < slowness or (a == slowness and (b < latency or (b == latency and n < least))):
            best, slowness, latency, least = s, a, b, n
    return best


@lean
def _move(moves: Moves, s: Any, owner: Any, k: Any, device: Any, volume: Any) -> None:
    """Note a move from entry ``s`` of ``owner`` to entry ``k`` of ``device``."""
    at = moves.size[0]
    if at >= np.uint64(moves.source.shape[0]):
        moves.size[1] = ONE
        return
    moves.source[at], moves.destination[at], moves.volume[at], moves.exchange[at] = s, k, volume, NONE
    if owner != device:
        moves.sent[owner] += volume
        moves.exchange[at] = SOON
    moves.size[0] = at + ONE


# ---- what is sent together


@lean
def _exchange(
    routes: RouteTable, rates: Rates, source: Side, destination: Side, first: Any, itemsize: Any, moves: Moves,
    sets: Sets, rows: Exchanges,
) -> None:  # fmt: skip
    """Exchanges of the moves from ``first`` on: one for each set of devices that they connect."""
    count = _connect(source.device, destination.device, moves, first, sets)
    if count == ZERO or moves.size[1] == ONE:
        return
    base, entries, seats = rows.size[0], destination.size[0], np.uint64(sets.end[count - ONE])
    for i in range(seats * seats):
        sets.pair[i] = 0
    for k in range(entries):
        sets.arriving[k], sets.stamp[k] = 0, NONE
    for c in range(count):
        sets.moves[c], sets.whole[c], sets.over[c] = 0, 1, 0
    for m in range(first, moves.size[0]):
        if moves.exchange[m] == SOON:
            to = np.uint64(moves.destination[m])
            a, b = np.uint64(source.device[np.uint64(moves.source[m])]), np.uint64(destination.device[to])
            own = np.uint64(sets.number[a])
            moves.exchange[m] = base + own
            sets.pair[np.uint64(sets.seat[a]) * seats + np.uint64(sets.seat[b])] += moves.volume[m] * itemsize
            sets.arriving[to] += moves.volume[m]
            sets.moves[own] += np.uint32(1)
            if moves.volume[m] != destination.volume[to]:
                sets.whole[own] = 0
    for k in range(entries):
        if sets.arriving[k] > destination.volume[k]:
            sets.over[np.uint64(sets.number[np.uint64(destination.device[k])])] = 1
    begin = ZERO
    for c in range(count):
        end, total = np.uint64(sets.end[c]), np.int64(0)
        for i in range(begin, end):
            a = np.uint64(sets.seated[i])
            if sets.role[a] != 2:
                rows.send[rows.size[1]] = a
                rows.size[1] += ONE
            if sets.role[a] != 1:
                rows.receive[rows.size[2]] = a
                rows.size[2] += ONE
            for j in range(begin, end):
                nbytes = sets.pair[i * seats + j]
                if nbytes > 0:
                    b, at = np.uint64(sets.seated[j]), rows.size[3]  # there is room: moves are no fewer
                    send(routes, rates, rows.tally, a, b, nbytes)
                    rows.message[0, at], rows.message[1, at], rows.message_bytes[at] = a, b, nbytes
                    rows.size[3] = at + ONE
                    total += nbytes
        form = _form(destination.device, destination.same, entries, np.uint64(c), begin, end, sets)
        _close(rates, rows, form, total, BYTE, BYTE, np.int64(0), NONE)
        begin = end


@lean
def _connect(senders: U32, receivers: U32, moves: Moves, first: Any, sets: Sets) -> Any:
    """Find the sets of devices that are connected by the moves from ``first`` on, in the order of their first devices.
    Returns their number."""
    devices = np.uint64(sets.root.shape[0])
    for d in range(devices):
        sets.root[d], sets.role[d] = d, 0
    for m in range(first, moves.size[0]):
        if moves.exchange[m] == SOON:
            sender, receiver = senders[np.uint64(moves.source[m])], receivers[np.uint64(moves.destination[m])]
            sets.role[np.uint64(sender)] |= np.uint8(1)
            sets.role[np.uint64(receiver)] |= np.uint8(2)
            a, b = sender, receiver
            while sets.root[np.uint64(a)] != a:
                a = sets.root[np.uint64(a)]
            while sets.root[np.uint64(b)] != b:
                b = sets.root[np.uint64(b)]
            low = min(a, b)
            sets.root[np.uint64(max(a, b))] = low
            sets.root[np.uint64(sender)] = sets.root[np.uint64(receiver)] = low  # shorter ways next time
    count = ZERO
    for d in range(devices):  # the root is the first device of its set, and roots come before what they lead
        if sets.role[d] > 0:
            root = np.uint64(sets.root[d])
            if root == np.uint64(d):
                sets.number[d], sets.end[count] = count, 0
                count += ONE
            else:
                sets.number[d] = sets.number[root]
            sets.end[np.uint64(sets.number[d])] += np.uint32(1)
    total = np.uint32(0)
    for c in range(count):  # ends by counting: first the beginnings, which move on as seats are taken
        size = sets.end[c]
        sets.end[c] = total
        total += size
    for d in range(devices):
        if sets.role[d] > 0:
            own = np.uint64(sets.number[d])
            sets.seat[d], sets.seated[np.uint64(sets.end[own])] = sets.end[own], d
            sets.end[own] += np.uint32(1)
    return count


@lean
def _form(devices: U32, same: U32, entries: Any, c: Any, first: Any, last: Any, sets: Sets) -> Any:
    """The collective that the moves of set ``c`` amount to; "exchange" for other point-to-point traffic."""
    n = last - first
    for i in range(first, last):
        if sets.role[np.uint64(sets.seated[i])] != 3:
            return EXCHANGE
    if n < TWO or np.uint64(sets.moves[c]) < n * (n - ONE):
        return EXCHANGE
    regions = ZERO
    for k in range(entries):
        if sets.arriving[k] > 0 and np.uint64(sets.number[np.uint64(devices[k])]) == c:
            leader = np.uint64(same[k])
            if np.uint64(sets.stamp[leader]) != c:
                sets.stamp[leader] = c
                regions += ONE
    if sets.over[c] == 1 or sets.whole[c] == 1:
        return REDUCE_SCATTER if regions == n else EXCHANGE
    return ALL_GATHER if regions == ONE else ALL_TO_ALL


@lean
def _close(
    rates: Rates, rows: Exchanges, form: Any, nbytes: Any, edge: Any, steps: Any, amount: Any, leader: Any
) -> None:
    """Complete the exchange at hand, whose lists are written, and whose messages are in the tally."""
    at = rows.size[0]
    rows.form[at], rows.nbytes[at], rows.edge[at], rows.amount[at], rows.leader[at] = form, nbytes, edge, amount, leader
    rows.latency[at] = rows.tally.latency[0]
    rows.duration[at] = price(rates, rows.tally, rows.loads, form, edge, steps)
    rows.end[SEND, at], rows.end[RECEIVE, at], rows.end[MESSAGE, at] = rows.size[1], rows.size[2], rows.size[3]
    rows.end[LINK, at], rows.end[DRAG, at] = rows.loads.size[0], rows.loads.size[1]
    rows.size[0] = at + ONE


# ---- replicated destinations


@lean
def _share(destination: Side, moves: Moves, groups: Groups) -> Any:
    """Find the groups of destination entries with the same region, some of which comes from other devices. Says whether
    there are any."""
    for k in range(destination.size[0]):
        groups.members[k], groups.shared[k], groups.following[k], groups.last[k] = 0, 0, NONE, k
        leader = np.uint64(destination.same[k])
        groups.members[leader] += np.uint32(1)
        if leader != np.uint64(k):
            groups.following[np.uint64(groups.last[leader])] = k
            groups.last[leader] = k
    found = False
    for m in range(moves.size[0]):
        leader = np.uint64(destination.same[np.uint64(moves.destination[m])])
        if moves.exchange[m] != NONE and groups.members[leader] > 1:
            groups.shared[leader] = 1
            found = True
    return found


@lean
def _all_reduces(
    routes: RouteTable, rates: Rates, source: Side, destination: Side, itemsize: Any, groups: Groups, moves: Moves,
    rows: Exchanges,
) -> Any:  # fmt: skip
    """All-reduces for the shared groups where they are possible, which are done then. Says whether there are any."""
    found = False
    for leader in range(destination.size[0]):
        if groups.shared[leader] == 0:
            continue
        count = _contribute(source, destination, leader, groups, moves, rows.size[0])
        if count == ZERO:
            continue
        found = True
        k = np.uint32(leader)
        while k != NONE:
            groups.done[np.uint64(k)] = 1
            k = groups.following[np.uint64(k)]
        begin = rows.size[1]
        for d in range(np.uint64(groups.member.shape[0])):
            if groups.member[d] != NONE:
                rows.send[rows.size[1]] = rows.receive[rows.size[2]] = d
                rows.size[1] += ONE
                rows.size[2] += ONE
        send_around(routes, rates, rows.tally, rows.send, begin, rows.size[1])
        nbytes, steps = destination.volume[leader] * itemsize, ring_steps(count)
        _close(rates, rows, ALL_REDUCE, steps * nbytes, ring_edge(count, nbytes), steps, nbytes, np.uint32(leader))
    return found


@lean
def _contribute(source: Side, destination: Side, leader: Any, groups: Groups, moves: Moves, exchange: Any) -> Any:
    """What a group's devices add to an all-reduce, if partial sums of its region lie on at least two of them and
    nowhere else. A term that has copies is contributed by one of them. Returns the number of devices, or 0."""
    for d in range(np.uint64(groups.member.shape[0])):
        groups.member[d], groups.given[d] = NONE, 0
    k, count = np.uint32(leader), ZERO
    while k != NONE:
        owner = np.uint64(destination.device[np.uint64(k)])
        if groups.member[owner] != NONE:
            return ZERO
        groups.member[owner] = k
        count += ONE
        k = groups.following[np.uint64(k)]
    first, total, givers = moves.size[0], np.int64(0), ZERO
    for t in range(source.size[1]):
        begin, end = np.uint64(source.term_first[t]), np.uint64(source.term_first[t + ONE])
        volume = _common(source.box, np.uint64(source.copy[begin]), destination.box, leader)
        if volume == 0:
            continue
        best, least = NONE, np.uint32(0)
        for c in range(begin, end):
            owner = np.uint64(source.device[np.uint64(source.copy[c])])
            if groups.member[owner] != NONE and (best == NONE or groups.given[owner] < least):
                best, least = source.copy[c], groups.given[owner]
        at = moves.size[0]
        if at >= np.uint64(moves.source.shape[0]):
            moves.size[1] = ONE
            return ZERO
        if best == NONE:
            moves.size[0] = first
            return ZERO
        owner = np.uint64(source.device[np.uint64(best)])
        if groups.given[owner] == 0:
            givers += ONE
        groups.given[owner] += np.uint32(1)
        moves.source[at], moves.destination[at], moves.volume[at] = best, groups.member[owner], volume
        moves.exchange[at] = exchange
        moves.size[0] = at + ONE
        total += volume
    if givers < TWO or total <= destination.volume[leader]:
        moves.size[0] = first
        return ZERO  # no sum is pending: gathering moves less
    return count


@lean
def _scatter(destination: Side, groups: Groups, middle: Side) -> None:
    """The layout in between, in which each member of a shared group owns a part of the group's region, and for each
    destination entry the range of entries in between that it is put together from."""
    rank, count = np.uint64(destination.box.shape[1]), ZERO
    for k in range(destination.size[0]):
        if groups.shared[np.uint64(destination.same[k])] == 0:
            cut_part(middle, count, destination.device[k], destination.box, np.uint64(k), ZERO, ONE)
            groups.first[k], groups.end[k] = count, count + ONE
            count += ONE
    for leader in range(destination.size[0]):
        if groups.shared[leader] == 0:
            continue
        first, at, part, parts = count, np.uint32(leader), ZERO, np.uint64(groups.members[leader])
        while at != NONE:
            device = destination.device[np.uint64(at)]
            count += cut_part(middle, count, device, destination.box, np.uint64(leader), part, parts)
            part += ONE
            at = groups.following[np.uint64(at)]
        at = np.uint32(leader)
        while at != NONE:
            groups.first[np.uint64(at)], groups.end[np.uint64(at)] = first, count
            at = groups.following[np.uint64(at)]
    middle.size[0] = count
    for i in range(count):
        middle.same[i] = i
        for j in range(i):
            if middle.volume[j] == middle.volume[i] and _equal(middle.box, j, middle.box, i, rank):
                middle.same[i] = j
                break


@lean
def cut_part(side: Side, at: Any, device: Any, box: I64, k: Any, part: Any, parts: Any) -> Any:
    """Write part number ``part`` of box ``k`` as entry ``at``. The box is cut along its first dimension that is long
    enough for all parts, else the longest (then some get nothing), as equal as possible. Returns the number of entries
    written, 0 or 1."""
    rank, axis, longest = np.uint64(box.shape[1]), ZERO, np.int64(-1)
    for r in range(rank):
        length = box[k, r, 1] - box[k, r, 0]
        if length >= np.int64(parts):
            axis = np.uint64(r)
            break
        if length > longest:
            axis, longest = np.uint64(r), length
    side.device[at], side.volume[at] = device, 1
    for r in range(np.uint64(side.box.shape[1])):  # one element in dimensions to spare
        low, high = (box[k, r, 0], box[k, r, 1]) if r < rank else (np.int64(0), np.int64(1))
        if np.uint64(r) == axis and r < rank:
            length = high - low
            high = low + (np.int64(part) + np.int64(1)) * length // np.int64(parts)
            low += np.int64(part) * length // np.int64(parts)
        side.box[at, r, 0], side.box[at, r, 1] = low, high
        side.volume[at] *= high - low
    if rank == ZERO and part > ZERO:
        return ZERO
    return ONE if side.volume[at] > 0 else ZERO


# ---- where weights are stored


@lean
def store(device: U32, box: I64, entries: Any, shard: Any, groups: Groups, sets: Sets, middle: Side) -> None:
    """The region that each device stores, on ``middle``: the bounding box of all the boxes that it needs, of which
    ``box`` has one an entry (they are written over). Devices with the same one stand together, and divide it if
    ``shard``. ``groups.first`` and ``end``: where the parts of the box of each entry's device stand."""
    devices, rank = np.uint64(groups.member.shape[0]), np.uint64(box.shape[1])
    for d in range(devices):
        groups.member[d] = NONE
    for k in range(entries):  # the device's first entry grows to its bounding box
        owner = np.uint64(device[k])
        if groups.member[owner] == NONE:
            groups.member[owner] = k
        first = np.uint64(groups.member[owner])
        for r in range(rank):
            box[first, r, 0] = min(box[first, r, 0], box[k, r, 0])
            box[first, r, 1] = max(box[first, r, 1], box[k, r, 1])
    count = ZERO
    for d in range(devices):  # sets of devices with the same box: lists from ``seated`` on along ``root``
        if groups.member[d] == NONE:
            continue
        own, mine = ZERO, np.uint64(groups.member[d])
        while own < count:
            other = np.uint64(groups.member[np.uint64(sets.seated[own])])
            if _equal(box, other, box, mine, rank):
                break
            own += ONE
        if own == count:
            sets.seated[own], sets.moves[own] = d, 0
            count += ONE
        else:
            sets.root[np.uint64(sets.seat[own])] = d
        sets.seat[own], sets.root[d], sets.number[d] = d, NONE, own
        sets.moves[own] += np.uint32(1)
    at = ZERO
    for c in range(count):
        groups.given[c] = at
        holder, part, parts = sets.seated[c], ZERO, np.uint64(sets.moves[c])
        while holder != NONE:
            first = np.uint64(groups.member[np.uint64(holder)])
            at += cut_part(middle, at, holder, box, first, part if shard else ZERO, parts if shard else ONE)
            part += ONE
            holder = sets.root[np.uint64(holder)]
        sets.end[c] = at
    for k in range(entries):
        own = np.uint64(sets.number[np.uint64(device[k])])
        groups.first[k], groups.end[k] = groups.given[own], sets.end[own]
    middle.size[0] = at


# ---- what the plan comes to


@lean
def _finish(source: Side, destination: Side, desk: Desk) -> None:
    """Devices that have nothing to do."""
    result, moves, count = desk.result, desk.moves, destination.size[0]
    arriving, holds, rank = desk.sets.arriving, desk.groups.member, np.uint64(destination.box.shape[1])
    for d in range(np.uint64(holds.shape[0])):
        holds[d] = NONE
    for k in range(count):
        desk.cuts[k], desk.aliased[k], arriving[k] = 0, 0, 0
        device = np.uint64(destination.device[k])
        holds[device] = np.uint32(k) if holds[device] == NONE else SOON
    one = result[PHASES] == ONE
    for m in range(result[MOVE_FIRST if one else MOVE_MIDDLE], result[MOVE_LAST]):
        to = np.uint64(moves.destination[m])
        if moves.exchange[m] != NONE:
            arriving[to] += moves.volume[m]
        else:
            desk.cuts[to] += np.uint32(1)
            desk.cut[to] = moves.source[m]
    trivial = one and result[FIRST] == result[LAST]
    for k in range(count):
        # Exactly a source entry of its device, alone there.
        device = np.uint64(destination.device[k])
        if one and holds[device] == np.uint32(k) and arriving[k] == 0 and desk.cuts[k] == 1:
            desk.aliased[k] = _equal(source.box, np.uint64(desk.cut[k]), destination.box, k, rank)
        trivial = trivial and desk.aliased[k] == 1
    result[TRIVIAL] = ONE if trivial else ZERO
