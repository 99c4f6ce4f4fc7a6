"""Partial sums, added up on their way: by all-reduces, in scattered parts, and within a host or a set first."""

from __future__ import annotations

from typing import Any

import numpy as np

from flexsearch.compiled import ONE, TWO, ZERO, lean
from flexsearch.cost.collectives import ALL_REDUCE, price_collective
from flexsearch.cost.tally import Rates
from flexsearch.lower.interned import Side
from flexsearch.lower.moves import common, cut_part, equal, move, nearest
from flexsearch.lower.traffic import NONE, close
from flexsearch.lower.workspace import Exchanges, Groups, Moves
from flexsearch.topology.routes import RouteTable


@lean
def all_reduces(
    routes: RouteTable, rates: Rates, source: Side, destination: Side, itemsize: Any, groups: Groups, moves: Moves,
    rows: Exchanges,
) -> Any:  # fmt: skip
    """All-reduces for the shared groups where they are possible, which are done then. Says whether there are any."""
    any_reduced = False
    for leader in range(destination.size[0]):
        if groups.shared[leader] == 0:
            continue
        count = _contribute(source, destination, leader, groups, moves, rows.size[0])
        if count == ZERO:
            continue
        any_reduced = True
        k = np.uint32(leader)
        while k != NONE:
            groups.done[np.uint64(k)] = 1
            k = groups.following[np.uint64(k)]
        _all_reduce(routes, rates, destination, leader, count, itemsize, groups, rows)
    return any_reduced


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
        groups.member[d], groups.terms[d] = NONE, 0
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
        volume = common(source.box, np.uint64(source.copy[begin]), destination.box, leader)
        if volume == 0:
            continue
        best, least = NONE, np.uint32(0)
        for c in range(begin, end):
            owner = np.uint64(source.device[np.uint64(source.copy[c])])
            if groups.member[owner] != NONE and (best == NONE or groups.terms[owner] < least):
                best, least = source.copy[c], groups.terms[owner]
        at = moves.size[0]
        if at >= np.uint64(moves.source.shape[0]):
            moves.size[1] = ONE
            return ZERO
        if best == NONE:
            moves.size[0] = first
            return ZERO
        owner = np.uint64(source.device[np.uint64(best)])
        if groups.terms[owner] == 0:
            givers += ONE
        groups.terms[owner] += np.uint32(1)
        moves.source[at], moves.destination[at], moves.volume[at] = best, groups.member[owner], volume
        moves.exchange[at] = exchange
        moves.size[0] = at + ONE
        total += volume
    if givers < TWO or total <= destination.volume[leader]:
        moves.size[0] = first
        return ZERO  # no sum is pending: gathering moves less
    return count


@lean
def scatter(destination: Side, groups: Groups, middle: Side) -> None:
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
            if middle.volume[j] == middle.volume[i] and equal(middle.box, j, middle.box, i, rank):
                middle.same[i] = j
                break


@lean
def number_sets(destination: Side, groups: Groups) -> Any:
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
def number_hosts(rates: Rates, destination: Side, boxes: Any, groups: Groups) -> Any:
    """Make the devices of each host a set instead: their number, if all have equally many entries of a box, else 0."""
    hosts, before = ZERO, NONE
    for at in range(np.uint64(groups.members[np.uint64(groups.box[0])])):
        host = rates.host[np.uint64(destination.device[np.uint64(groups.order[at])])]
        if host != before:
            groups.terms[hosts], before = host, host  # hosts are no more than devices
            hosts += ONE
    for b in range(boxes):
        leader = np.uint64(groups.box[b])
        count, begin = np.uint64(groups.members[leader]), np.uint64(groups.first[leader])
        if count % hosts != ZERO:
            return ZERO
        for at in range(count):
            device, number = np.uint64(destination.device[np.uint64(groups.order[begin + at])]), at * hosts // count
            if rates.host[device] != groups.terms[number]:
                return ZERO
            groups.member[device] = number
    return hosts


@lean
def sum_within(
    routes: RouteTable, source: Side, destination: Side, sets: Any, boxes: Any, moves: Moves, groups: Groups,
    middle: Side,
) -> Any:  # fmt: skip
    """Moves of partial sums to a layout in between that has the boxes of the destination: each set of
    ``number_sets`` (``sets`` is 0), or of ``number_hosts``, gets the terms of its own devices. False, and the moves
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
            volume = common(source.box, np.uint64(source.copy[begin]), destination.box, leader)
            if volume == 0:
                continue
            each = np.uint64(groups.members[leader]) // sets if sets > ZERO else ONE
            first = each * np.uint64(number)
            if first >= np.uint64(groups.members[leader]) or moves.size[1] == ONE:
                return False
            for at in range(first, first + each):
                entry = np.uint64(groups.order[np.uint64(groups.first[leader]) + at])
                device = np.uint64(destination.device[entry])
                best = nearest(routes, source.copy, source.device, begin, end, device, moves.sent)
                move(moves, best, np.uint64(source.device[best]), entry, device, volume)
                groups.done[entry] = 1
    missing = False
    for k in range(destination.size[0]):
        missing = missing or groups.done[k] == 0
    return not missing


@lean
def reduce_across(
    routes: RouteTable, rates: Rates, destination: Side, sets: Any, boxes: Any, itemsize: Any, groups: Groups,
    moves: Moves, rows: Exchanges,
) -> None:  # fmt: skip
    """Moves from the layout of ``sum_within`` to the destination: all-reduces among entries with the same box, one of
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
