"""What crosses devices in a phase, as exchanges: which moves go together, in which form, and what that costs.

The devices that moves connect, directly or by way of others, form a set. What a set moves is one exchange: a collective
if it amounts to one, else messages between pairs; these are an exchange each where no device has more than a few.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flexsearch.compiled import ONE, TWO, U32, ZERO, lean
from flexsearch.cost.collectives import ALL_GATHER, ALL_TO_ALL, EXCHANGE, REDUCE_SCATTER, price_collective
from flexsearch.cost.communication import price_messages
from flexsearch.cost.tally import Rates, send, start_of_messages
from flexsearch.lower.interned import Side
from flexsearch.lower.workspace import DRAG, LINK, MESSAGE, RECEIVE, SEND, Exchanges, Moves, Sets
from flexsearch.topology.routes import RouteTable

NONE: Any = np.uint32(0xFFFFFFFF)
"""No entry; a move that crosses no devices."""
SOON: Any = np.uint32(0xFFFFFFFE)
"""A move that crosses devices, in an exchange that is still to be made; several entries."""
FEW: Any = np.uint32(2)
"""Where no device of a set sends or receives more messages than that, each message is an exchange: halos, shifts."""


@lean
def make_exchanges(
    routes: RouteTable, rates: Rates, source: Side, destination: Side, first: Any, itemsize: Any, moves: Moves,
    sets: Sets, rows: Exchanges,
) -> None:  # fmt: skip
    """Exchanges of the moves from ``first`` on: one for each set of devices that they connect, or for each message of a
    set that has few."""
    count = _connect(source.device, destination.device, moves, first, sets)
    if count == ZERO or moves.size[1] == ONE or not _pair_up(source, destination, first, itemsize, moves, sets, count):
        return
    begin = at = ZERO
    for c in range(count):
        end = np.uint64(sets.end[c])
        form = _form(destination.device, destination.same, destination.size[0], np.uint64(c), begin, end, sets)
        if rates.by_group[form] == 1 and _longest(sets, begin, end, at) == 0:
            form = EXCHANGE if form == REDUCE_SCATTER else ALL_TO_ALL
        if rates.by_group[form] == 1:
            _collective(routes, rates, form, begin, end, at, sets, rows)
        else:
            _point_to_point(routes, rates, form, begin, end, at, sets, rows, np.uint64(c))
        at += (end - begin) * (end - begin)
        begin = end
    for m in range(first, moves.size[0]):
        if moves.exchange[m] == SOON:
            a = np.uint64(source.device[np.uint64(moves.source[m])])
            b = np.uint64(destination.device[np.uint64(moves.destination[m])])
            moves.exchange[m] = sets.pair[_place(sets, a, b)]


@lean
def _place(sets: Sets, a: Any, b: Any) -> Any:
    """Where ``sets.pair`` has what goes from device ``a`` to device ``b`` of the same set."""
    own = np.uint64(sets.number[a])
    begin = np.uint64(sets.end[own - ONE]) if own > ZERO else ZERO
    size = np.uint64(sets.end[own]) - begin
    return np.uint64(sets.first[own]) + (np.uint64(sets.seat[a]) - begin) * size + np.uint64(sets.seat[b]) - begin


@lean
def _pair_up(
    source: Side, destination: Side, first: Any, itemsize: Any, moves: Moves, sets: Sets, count: Any
) -> Any:  # fmt: skip
    """Add up what the moves from ``first`` on bring from device to device, and to each entry. False if there is no room
    for all pairs."""
    begin = total = ZERO
    for c in range(count):
        size = np.uint64(sets.end[c]) - begin
        sets.first[c], sets.moves[c], sets.adds[c] = total, 0, 0
        begin, total = begin + size, total + size * size
    if total > np.uint64(sets.pair.shape[0]):
        moves.size[1] = ONE
        return False
    for i in range(total):
        sets.pair[i] = 0
    for i in range(begin):
        device = np.uint64(sets.seated[i])
        sets.sends[device], sets.receives[device] = 0, 0
    for k in range(destination.size[0]):
        sets.arriving[k], sets.total[k], sets.stamp[k] = 0, 0, NONE
    for m in range(first, moves.size[0]):
        to = np.uint64(moves.destination[m])
        sets.total[to] += moves.volume[m]
        if moves.exchange[m] == SOON:
            a, b = np.uint64(source.device[np.uint64(moves.source[m])]), np.uint64(destination.device[to])
            own, at = np.uint64(sets.number[a]), _place(sets, a, b)
            if sets.pair[at] == 0:
                sets.sends[a] += np.uint32(1)
                sets.receives[b] += np.uint32(1)
            sets.pair[at] += moves.volume[m] * itemsize
            sets.arriving[to] += moves.volume[m]
            sets.moves[own] += np.uint32(1)
    for k in range(destination.size[0]):
        if sets.arriving[k] > 0 and sets.total[k] > destination.volume[k]:
            sets.adds[np.uint64(sets.number[np.uint64(destination.device[k])])] = 1
    return True


@lean
def _longest(sets: Sets, begin: Any, end: Any, at: Any) -> Any:
    """Bytes of the longest message of a set (seats ``begin`` to ``end``, pairs from ``at`` on): a collective moves as
    much for each pair, as parts are padded. 0 if that would be more than 1/8 too much: messages are left as they are
    then."""
    total = longest = np.int64(0)
    pairs = np.int64((end - begin) * (end - begin - ONE))
    for k in range(at, at + (end - begin) * (end - begin)):
        total += sets.pair[k]
        longest = max(longest, np.int64(sets.pair[k]))
    return longest if longest * pairs <= total + total // np.int64(8) else np.int64(0)


@lean
def _ends(rows: Exchanges, device: Any, role: Any) -> None:
    """List a device that sends (1), receives (2) or both (3)."""
    if role != 2:
        rows.send[rows.size[1]] = device
        rows.size[1] += ONE
    if role != 1:
        rows.receive[rows.size[2]] = device
        rows.size[2] += ONE


@lean
def _message(rows: Exchanges, a: Any, b: Any, nbytes: Any) -> None:
    at = rows.size[3]  # there is room: moves are no fewer
    rows.message[0, at], rows.message[1, at], rows.message_bytes[at] = a, b, nbytes
    rows.size[3] = at + ONE


@lean
def _collective(
    routes: RouteTable, rates: Rates, form: Any, begin: Any, end: Any, at: Any, sets: Sets, rows: Exchanges
) -> None:
    """The exchange of a set whose devices (seats ``begin`` to ``end``, pairs from ``at`` on) all talk to each other, by
    the library's algorithms."""
    total, first = np.int64(0), rows.size[1]
    padded = _longest(sets, begin, end, at) * np.int64((end - begin) * (end - begin - ONE))
    for i in range(begin, end):
        a = np.uint64(sets.seated[i])
        _ends(rows, a, 3)
        for j in range(begin, end):
            if sets.pair[at] > 0:
                _message(rows, a, np.uint64(sets.seated[j]), sets.pair[at])
                total += sets.pair[at]
                sets.pair[at] = np.int64(rows.size[0])
            at += ONE
    seconds = price_collective(routes, rates, rows.tally, rows.loads, form, rows.send, first, rows.size[1], padded)
    close(rows, form, total, padded, 0.0, seconds, NONE)


@lean
def _point_to_point(
    routes: RouteTable, rates: Rates, form: Any, begin: Any, end: Any, at: Any, sets: Sets, rows: Exchanges, c: Any
) -> None:
    """As ``_collective``, by the messages of set ``c``; each of them is an exchange if no device has more than a few.
    What is added up costs what the messages of a reduce-scatter do, of which the sum is measured with them."""
    few, total = form == EXCHANGE, np.int64(0)
    if sets.adds[c] == 1 and rates.by_group[REDUCE_SCATTER] == 0:
        form = REDUCE_SCATTER
    for i in range(begin, end):
        a = np.uint64(sets.seated[i])
        few = few and sets.sends[a] <= FEW and sets.receives[a] <= FEW
    for i in range(begin, end):
        a = np.uint64(sets.seated[i])
        if not few:
            _ends(rows, a, sets.role[a])
        for j in range(begin, end):
            nbytes = sets.pair[at]
            if nbytes > 0:
                b = np.uint64(sets.seated[j])
                send(routes, rates, rows.tally, a, b, nbytes)
                _message(rows, a, b, nbytes)
                sets.pair[at] = np.int64(rows.size[0])
                total += nbytes
                if few:
                    _ends(rows, a, 1)
                    _ends(rows, b, 2)
                    _close_messages(rates, rows, form, nbytes)
            at += ONE
    if not few:
        _close_messages(rates, rows, form, total)


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
    if sets.adds[c] == 1:
        return REDUCE_SCATTER if regions == n else EXCHANGE
    return ALL_GATHER if regions == ONE else ALL_TO_ALL


@lean
def _close_messages(rates: Rates, rows: Exchanges, form: Any, nbytes: Any) -> None:
    """Complete the exchange at hand, whose lists are written, and whose messages are in the tally."""
    start = start_of_messages(rates, rows.tally)
    close(rows, form, nbytes, np.int64(0), start, price_messages(rates, rows.tally, rows.loads, form), NONE)


@lean
def close(rows: Exchanges, form: Any, nbytes: Any, amount: Any, start: Any, seconds: Any, leader: Any) -> None:
    """Complete the exchange at hand, whose lists are written, and which was priced last."""
    at = rows.size[0]
    rows.form[at], rows.nbytes[at], rows.amount[at], rows.leader[at] = form, nbytes, amount, leader
    rows.unit[at], rows.start[at], rows.duration[at] = rows.tally.unit[0], start, seconds
    rows.end[SEND, at], rows.end[RECEIVE, at], rows.end[MESSAGE, at] = rows.size[1], rows.size[2], rows.size[3]
    rows.end[LINK, at], rows.end[DRAG, at] = rows.loads.size[0], rows.loads.size[1]
    rows.size[0] = at + ONE
