"""How data gets from one layout to another: every decision about communication, compiled.

``plan`` weighs the candidates that :mod:`flexsearch.lower.reshard` describes against each other, and leaves the moves
and exchanges of the best in the workspace. Entries, terms and devices are visited in ascending order, so that the same
layouts always give the same plan.
"""

from __future__ import annotations

from math import inf
from typing import Any

import numpy as np

from flexsearch.compiled import I64, ONE, TWO, U8, U32, U64, ZERO, lean
from flexsearch.cost.collectives import ALL_REDUCE, price_collective
from flexsearch.cost.tally import Rates
from flexsearch.cost.ticks import FOREVER, TICK
from flexsearch.lower.interned import Side
from flexsearch.lower.traffic import NONE, SOON, close, make_exchanges
from flexsearch.lower.workspace import (
    ERROR,
    FIRST,
    FULL,
    LAST,
    LINK,
    MIDDLE,
    MOVE_FIRST,
    MOVE_LAST,
    MOVE_MIDDLE,
    PHASES,
    TRIVIAL,
    Exchanges,
    Groups,
    Moves,
    Sets,
    Workspace,
)
from flexsearch.topology.routes import RouteTable, first_piece, second_piece

# Constants that are handed on have a numpy type: for every plain number numba would compile a function again.
MANY: Any = np.uint64(64)
"""All-reduces among more devices than that are not compared with messages."""
FREE, GIVEN, OWN, SHARED = (np.uint64(k) for k in range(4))
"""From which source entries a destination entry is made: from all terms that reach it; from those of a range that is
given, which are terms of their own; or from one of its own device, of which it is a part. SHARED: as FREE, for what
goes in a communication with others: of messages and the ring of gloo, whose time is a start and the bytes, the choice
looks at the bytes, as the start is paid once for all."""


@lean
def plan(
    routes: RouteTable, rates: Rates, source: Side, destination: Side, mode: Any, itemsize: Any, workspace: Workspace
) -> None:
    """The cheapest known movement, on ``workspace.result``. ``itemsize``: bytes per element (int64)."""
    moves, rows, groups = workspace.moves, workspace.exchanges, workspace.groups
    sets, result = workspace.sets, workspace.result
    starts = mode != SHARED or rates.by_group[ALL_REDUCE] == 1
    mode = FREE if mode == SHARED else mode
    _clear(moves.size, rows.size, rows.loads.size, result)
    if mode == FREE and _all_at_once(routes, rates, source, destination, itemsize, groups, moves, rows):
        _choose(result, ONE, ZERO, rows.size[0], rows.size[0], ZERO, moves.size[0], moves.size[0])
        if moves.size[1] == ONE or rows.loads.size[2] == ONE:
            result[FULL] = ONE
        else:
            _finish(source, destination, workspace)
        return
    _clear(moves.size, rows.size, rows.loads.size, result)
    if mode == FREE and _host_by_host(routes, rates, source, destination, itemsize, workspace):
        return
    _clear(moves.size, rows.size, rows.loads.size, result)
    _plain(groups.done, destination.size[0])
    _collect(routes, source, destination, mode, groups, moves, result)
    make_exchanges(routes, rates, source, destination, ZERO, itemsize, moves, sets, rows)
    half, middle = moves.size[0], rows.size[0]
    _choose(result, ONE, ZERO, middle, middle, ZERO, half, half)
    best, nbytes = _seconds(rows, ZERO, middle, starts), _nbytes(rows, ZERO, middle)
    if mode == FREE and _share(destination, moves, groups):
        # Second candidate: sums by all-reduce. Ties go to the earlier, simpler plan; bytes break near-ties in which
        # latencies differ by nothing.
        begin, first = half, middle
        _plain(groups.done, destination.size[0])
        reduced = _all_reduces(routes, rates, source, destination, itemsize, groups, moves, rows)
        if reduced:
            half = moves.size[0]
            _collect(routes, source, destination, mode, groups, moves, result)
            make_exchanges(routes, rates, source, destination, half, itemsize, moves, sets, rows)
            last, end = rows.size[0], moves.size[0]
            seconds, more = _seconds(rows, first, last, starts), _nbytes(rows, first, last)
            if seconds < best or (seconds == best and more < nbytes):
                best, nbytes = seconds, more
                _choose(result, ONE, first, last, last, begin, end, end)
        # Third candidate: each device gets a part of what its group wants, and the rest from the group.
        begin, first = moves.size[0], rows.size[0]
        _scatter(destination, groups, workspace.middle)
        _plain(groups.done, workspace.middle.size[0])
        _collect(routes, source, workspace.middle, FREE, groups, moves, result)
        make_exchanges(routes, rates, source, workspace.middle, begin, itemsize, moves, sets, rows)
        half, middle = moves.size[0], rows.size[0]
        _plain(groups.done, destination.size[0])
        _collect(routes, workspace.middle, destination, GIVEN, groups, moves, result)
        make_exchanges(routes, rates, workspace.middle, destination, half, itemsize, moves, sets, rows)
        last, end = rows.size[0], moves.size[0]
        seconds = _seconds(rows, first, middle, starts) + _seconds(rows, middle, last, starts)
        more = _nbytes(rows, first, last)
        if seconds < best or (seconds == best and more < nbytes):
            best, nbytes = seconds, more
            _choose(result, TWO, first, middle, last, begin, half, end)
        # Fourth candidate: partial sums where each part of the whole is once, then all-reduces of equal parts.
        boxes = ZERO if reduced else _number_sets(destination, groups)
        if boxes > ONE:
            begin, first, found = moves.size[0], rows.size[0], False
            if _sum_within(routes, source, destination, ZERO, boxes, moves, groups, workspace.middle):
                make_exchanges(routes, rates, source, workspace.middle, begin, itemsize, moves, sets, rows)
                half, middle = moves.size[0], rows.size[0]
                _reduce_across(routes, rates, destination, ZERO, boxes, itemsize, groups, moves, rows)
                last, end = rows.size[0], moves.size[0]
                seconds = _seconds(rows, first, middle, starts) + _seconds(rows, middle, last, starts)
                more = _nbytes(rows, first, last)
                found = seconds < best or (seconds == best and more < nbytes)
            if found:
                _choose(result, TWO, first, middle, last, begin, half, end)
            elif result[PHASES] == TWO:
                _scatter(destination, groups, workspace.middle)  # it was written over
    if moves.size[1] == ONE or rows.loads.size[2] == ONE:
        result[FULL] = ONE
    else:
        _finish(source, destination, workspace)


@lean
def _all_at_once(
    routes: RouteTable, rates: Rates, source: Side, destination: Side, itemsize: Any, groups: Groups, moves: Moves,
    rows: Exchanges,
) -> Any:  # fmt: skip
    """Whether all-reduces among more than MANY devices each, or of single numbers where ``reduces_numbers`` says so,
    are all that is needed; they are added then. Nothing else is weighed against them: messages from each to each would
    take the square of the devices to write down."""
    numbers = rates.reduces_numbers[0] == 1 and destination.size[0] > ZERO
    for k in range(destination.size[0]):
        numbers = numbers and destination.volume[k] == 1
    if destination.size[0] <= MANY and not numbers:
        return False
    _group(destination, groups)
    for k in range(destination.size[0]):
        groups.shared[k] = 1 if groups.members[k] > 0 else 0
        if not numbers and ZERO < np.uint64(groups.members[k]) <= MANY:
            return False
    _plain(groups.done, destination.size[0])
    if not _all_reduces(routes, rates, source, destination, itemsize, groups, moves, rows):
        return False
    left = False
    for k in range(destination.size[0]):
        left = left or groups.done[k] == 0
    return not left


@lean
def _host_by_host(
    routes: RouteTable, rates: Rates, source: Side, destination: Side, itemsize: Any, workspace: Workspace
) -> Any:
    """Whether partial sums can be added up in each host first, and then by all-reduces among hosts, each of more than
    MANY devices; that is planned then. Nothing else is weighed against it, as in ``_all_at_once``."""
    groups, moves, rows = workspace.groups, workspace.moves, workspace.exchanges
    if destination.size[0] <= MANY:
        return False
    _group(destination, groups)
    for k in range(destination.size[0]):
        if ZERO < np.uint64(groups.members[k]) <= MANY:
            return False
    boxes = _number_sets(destination, groups)
    hosts = _number_hosts(rates, destination, boxes, groups) if boxes > ONE else ZERO
    if hosts <= MANY:
        return False
    if not _sum_within(routes, source, destination, hosts, boxes, moves, groups, workspace.middle):
        workspace.result[FULL] = moves.size[1]
        return moves.size[1] == ONE
    make_exchanges(routes, rates, source, workspace.middle, ZERO, itemsize, moves, workspace.sets, rows)
    half, middle = moves.size[0], rows.size[0]
    _reduce_across(routes, rates, destination, hosts, boxes, itemsize, groups, moves, rows)
    _choose(workspace.result, TWO, ZERO, middle, rows.size[0], ZERO, half, moves.size[0])
    if moves.size[1] == ONE or rows.loads.size[2] == ONE:
        workspace.result[FULL] = ONE
    else:
        _finish(source, destination, workspace)
    return True


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
def _seconds(rows: Exchanges, first: Any, last: Any, starts: Any) -> Any:
    """Duration of a phase if nothing else used the links: its slowest exchange, or the link that several share; without
    ``starts``: its busiest link."""
    slowest, load, loads = 0.0, rows.tally.load, rows.loads
    for x in range(first, last):
        slowest = max(slowest, rows.duration[x]) if starts else slowest
    if last - first > ONE or (last > first and not starts):
        begin = np.uint64(rows.end[LINK, first - ONE]) if first > ZERO else ZERO
        end = np.uint64(rows.end[LINK, last - ONE])
        for k in range(begin, end):
            r = np.uint64(loads.link[k])
            load[r] = min(load[r] + np.int64(loads.link_s[k] / TICK), FOREVER)  # or many might exceed an int64
            slowest = max(slowest, np.float64(load[r]) * TICK)
        for k in range(begin, end):
            load[np.uint64(loads.link[k])] = 0
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
    for r in range(np.uint64(min(a.shape[1], b.shape[1]))):  # a workspace's boxes may have dimensions to spare
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
            leader, first = np.uint64(destination.same[k]), moves.size[0]
            if leader == k:
                for t in range(source.size[1]):
                    begin = np.uint64(source.term_first[t])
                    volume = _common(source.box, np.uint64(source.copy[begin]), destination.box, k)
                    if volume > 0:
                        _move_term(routes, source, t, k, device, volume, moves)
            else:  # the terms that the first entry with its box gets
                for m in range(np.uint64(groups.moves_first[leader]), np.uint64(groups.moves_end[leader])):
                    _move_term(routes, source, np.uint64(moves.term[m]), k, device, moves.volume[m], moves)
            groups.moves_first[k], groups.moves_end[k] = first, moves.size[0]
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
def _move_term(routes: RouteTable, source: Side, t: Any, k: Any, device: Any, volume: Any, moves: Moves) -> None:
    """Note a move from the nearest copy of term ``t`` to entry ``k`` of ``device``."""
    begin, end, at = np.uint64(source.term_first[t]), np.uint64(source.term_first[t + ONE]), moves.size[0]
    best = _nearest(routes, source.copy, source.device, begin, end, device, moves.sent)
    _move(moves, best, np.uint64(source.device[best]), k, device, volume)
    if at < moves.size[0]:
        moves.term[at] = t


@lean
def _nearest(routes: RouteTable, copies: U32, devices: U32, first: Any, last: Any, device: Any, sent: I64) -> Any:
    """Of the entries ``copies[first:last]`` the one to send to ``device``: its own; else by bandwidth, latency, and
    what the owner sends already."""
    best = np.uint64(copies[first])
    if last - first == ONE:
        return best
    bandwidth, latency, least = 0.0, inf, np.int64(0)
    for c in range(first, last):
        s = np.uint64(copies[c])
        owner = np.uint64(devices[s])
        if owner == device:
            return s
        one, other = first_piece(routes, owner, device), second_piece(routes, owner, device)
        a, b = min(routes.bandwidth[one], routes.bandwidth[other]), routes.latency[one] + routes.latency[other]
        n = sent[owner]
        if c == first or a > bandwidth or (a == bandwidth and (b < latency or (b == latency and n < least))):
            best, bandwidth, latency, least = s, a, b, n
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


# ---- replicated destinations


@lean
def _share(destination: Side, moves: Moves, groups: Groups) -> Any:
    """Find the groups of destination entries with the same region, some of which comes from other devices. Says whether
    there are any."""
    _group(destination, groups)
    found = False
    for m in range(moves.size[0]):
        leader = np.uint64(destination.same[np.uint64(moves.destination[m])])
        if moves.exchange[m] != NONE and groups.members[leader] > 1:
            groups.shared[leader] = 1
            found = True
    return found


@lean
def _group(destination: Side, groups: Groups) -> None:
    """Find the groups of destination entries with the same region."""
    for k in range(destination.size[0]):
        groups.members[k], groups.shared[k], groups.following[k], groups.last[k] = 0, 0, NONE, k
        leader = np.uint64(destination.same[k])
        groups.members[leader] += np.uint32(1)
        if leader != np.uint64(k):
            groups.following[np.uint64(groups.last[leader])] = k
            groups.last[leader] = k


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
        _all_reduce(routes, rates, destination, leader, count, itemsize, groups, rows)
    return found


@lean
def _all_reduce(
    routes: RouteTable, rates: Rates, destination: Side, leader: Any, count: Any, itemsize: Any, groups: Groups,
    rows: Exchanges,
) -> None:  # fmt: skip
    """The all-reduce of a group's region among its ``count`` devices, which are in ``groups.member``."""
    begin = rows.size[1]
    for d in range(np.uint64(groups.member.shape[0])):
        if groups.member[d] != NONE:
            rows.send[rows.size[1]] = rows.receive[rows.size[2]] = d
            rows.size[1] += ONE
            rows.size[2] += ONE
    nbytes = destination.volume[leader] * itemsize
    seconds = price_collective(
        routes, rates, rows.tally, rows.loads, ALL_REDUCE, rows.send, begin, rows.size[1], nbytes
    )
    moved = np.int64(2) * (np.int64(count) - np.int64(1)) * nbytes  # a ring's
    close(rows, ALL_REDUCE, moved, nbytes, 0.0, seconds, np.uint32(leader))


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
def _number_sets(destination: Side, groups: Groups) -> Any:
    """List the different boxes in ``groups.box``, and the entries of each in ``groups.order``, from
    ``groups.first[leader]`` on. The n-th of them are a set: write the number of each device's to ``groups.member``.
    Returns the number of boxes; 0 if a device has several."""
    boxes = at = ZERO
    for d in range(np.uint64(groups.member.shape[0])):
        groups.member[d] = NONE
    for leader in range(destination.size[0]):
        if np.uint64(destination.same[leader]) != leader:
            continue
        groups.box[boxes], groups.first[leader] = leader, at
        boxes += ONE
        k, number = np.uint32(leader), np.uint32(0)
        while k != NONE:
            device = np.uint64(destination.device[np.uint64(k)])
            if groups.member[device] != NONE:
                return ZERO
            groups.member[device], groups.order[at] = number, k
            number += np.uint32(1)
            at += ONE
            k = groups.following[np.uint64(k)]
    return boxes


@lean
def _number_hosts(rates: Rates, destination: Side, boxes: Any, groups: Groups) -> Any:
    """Make the devices of each host a set instead: their number, if all have equally many entries of a box, else 0."""
    hosts, before = ZERO, NONE
    for at in range(np.uint64(groups.members[np.uint64(groups.box[0])])):
        host = rates.host[np.uint64(destination.device[np.uint64(groups.order[at])])]
        if host != before:
            groups.given[hosts], before = host, host  # hosts are no more than devices
            hosts += ONE
    for b in range(boxes):
        leader = np.uint64(groups.box[b])
        count, begin = np.uint64(groups.members[leader]), np.uint64(groups.first[leader])
        if count % hosts != ZERO:
            return ZERO
        for at in range(count):
            device, number = np.uint64(destination.device[np.uint64(groups.order[begin + at])]), at * hosts // count
            if rates.host[device] != groups.given[number]:
                return ZERO
            groups.member[device] = number
    return hosts


@lean
def _sum_within(
    routes: RouteTable, source: Side, destination: Side, sets: Any, boxes: Any, moves: Moves, groups: Groups,
    middle: Side,
) -> Any:  # fmt: skip
    """Moves of partial sums to a layout in between that has the boxes of the destination: each set of
    ``_number_sets`` (``sets`` is 0), or of ``_number_hosts``, gets the terms of its own devices. False, and the moves
    of no use, if a term reaches a box that its set lacks, or an entry gets nothing."""
    for d in range(np.uint64(moves.sent.shape[0])):
        moves.sent[d] = 0
    for k in range(destination.size[0]):
        cut_part(middle, k, destination.device[k], destination.box, k, ZERO, ONE)
        middle.same[k], groups.done[k] = destination.same[k], 0
    middle.size[0] = destination.size[0]
    for t in range(source.size[1]):
        begin, end = np.uint64(source.term_first[t]), np.uint64(source.term_first[t + ONE])
        number: Any = NONE
        for c in range(begin, end):
            number = min(number, groups.member[np.uint64(source.device[np.uint64(source.copy[c])])])
        for b in range(boxes):
            leader = np.uint64(groups.box[b])
            volume = _common(source.box, np.uint64(source.copy[begin]), destination.box, leader)
            if volume == 0:
                continue
            each = np.uint64(groups.members[leader]) // sets if sets > ZERO else ONE
            first = each * np.uint64(number)
            if first >= np.uint64(groups.members[leader]) or moves.size[1] == ONE:
                return False
            for at in range(first, first + each):
                entry = np.uint64(groups.order[np.uint64(groups.first[leader]) + at])
                device = np.uint64(destination.device[entry])
                best = _nearest(routes, source.copy, source.device, begin, end, device, moves.sent)
                _move(moves, best, np.uint64(source.device[best]), entry, device, volume)
                groups.done[entry] = 1
    missing = False
    for k in range(destination.size[0]):
        missing = missing or groups.done[k] == 0
    return not missing


@lean
def _reduce_across(
    routes: RouteTable, rates: Rates, destination: Side, sets: Any, boxes: Any, itemsize: Any, groups: Groups,
    moves: Moves, rows: Exchanges,
) -> None:  # fmt: skip
    """Moves from the layout of ``_sum_within`` to the destination: all-reduces among entries with the same box, one of
    each set."""
    for b in range(boxes):
        leader = np.uint64(groups.box[b])
        begin, members = np.uint64(groups.first[leader]), np.uint64(groups.members[leader])
        each = members // sets if sets > ZERO else ONE
        for j in range(each):
            for d in range(np.uint64(groups.member.shape[0])):
                groups.member[d] = NONE
            for n in range(members // each):
                k, at = groups.order[begin + n * each + j], moves.size[0]
                if at >= np.uint64(moves.source.shape[0]):
                    moves.size[1] = ONE
                    return
                groups.member[np.uint64(destination.device[np.uint64(k)])] = k
                moves.source[at], moves.destination[at], moves.volume[at] = k, k, destination.volume[leader]
                moves.exchange[at] = NONE if members == each else rows.size[0]
                moves.size[0] = at + ONE
            if members > each:
                first = np.uint64(groups.order[begin + j])
                _all_reduce(routes, rates, destination, first, members // each, itemsize, groups, rows)


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
def store(device: U32, box: I64, entries: Any, over: Any, groups: Groups, sets: Sets, middle: Side) -> None:
    """The region that each device stores, on ``middle``: the bounding box of all the boxes that it needs, of which
    ``box`` has one an entry (they are written over). Devices with the same one stand together; those of
    them among ``over`` consecutive devices divide it. ``groups.first`` and ``end``: where the parts stand that an
    entry's device and those it divides its box with have."""
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
            sets.seated[own] = d
            count += ONE
        else:
            sets.root[np.uint64(sets.seat[own])] = d
        sets.seat[own], sets.root[d] = d, NONE
        at = group = ZERO
    for c in range(count):
        holder, part, parts = sets.seated[c], ZERO, ZERO
        while holder != NONE:
            if part == parts:
                part, parts, other = ZERO, ZERO, holder
                while other != NONE and np.uint64(other) // over == np.uint64(holder) // over:
                    parts += ONE
                    other = sets.root[np.uint64(other)]
                groups.given[group] = at
                group += ONE
            first = np.uint64(groups.member[np.uint64(holder)])
            at += cut_part(middle, at, holder, box, first, part, parts)
            sets.number[np.uint64(holder)], sets.end[group - ONE] = group - ONE, at
            part += ONE
            holder = sets.root[np.uint64(holder)]
    for k in range(entries):
        own = np.uint64(sets.number[np.uint64(device[k])])
        groups.first[k], groups.end[k] = groups.given[own], sets.end[own]
    middle.size[0] = at


# ---- what the plan comes to


@lean
def _finish(source: Side, destination: Side, workspace: Workspace) -> None:
    """Devices that have nothing to do."""
    result, moves, count = workspace.result, workspace.moves, destination.size[0]
    arriving, holds, rank = workspace.sets.arriving, workspace.groups.member, np.uint64(destination.box.shape[1])
    for d in range(np.uint64(holds.shape[0])):
        holds[d] = NONE
    for k in range(count):
        workspace.cuts[k], workspace.aliased[k], arriving[k] = 0, 0, 0
        device = np.uint64(destination.device[k])
        holds[device] = np.uint32(k) if holds[device] == NONE else SOON
    one = result[PHASES] == ONE
    for m in range(result[MOVE_FIRST if one else MOVE_MIDDLE], result[MOVE_LAST]):
        to = np.uint64(moves.destination[m])
        if moves.exchange[m] != NONE:
            arriving[to] += moves.volume[m]
        else:
            workspace.cuts[to] += np.uint32(1)
            workspace.cut[to] = moves.source[m]
    trivial = one and result[FIRST] == result[LAST]
    for k in range(count):
        # Exactly a source entry of its device, alone there.
        device = np.uint64(destination.device[k])
        if one and holds[device] == np.uint32(k) and arriving[k] == 0 and workspace.cuts[k] == 1:
            workspace.aliased[k] = _equal(source.box, np.uint64(workspace.cut[k]), destination.box, k, rank)
        trivial = trivial and workspace.aliased[k] == 1
    result[TRIVIAL] = ONE if trivial else ZERO
