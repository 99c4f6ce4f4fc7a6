"""Moves of a reshard: which source entry each part of a destination entry comes from."""

from __future__ import annotations

from math import inf
from typing import Any

import numpy as np

from flexsearch.compiled import I64, ONE, U8, U32, U64, ZERO, lean
from flexsearch.lower.interned import Side
from flexsearch.lower.traffic import NONE, SOON
from flexsearch.lower.workspace import ERROR, Groups, Moves
from flexsearch.topology.routes import RouteTable, first_piece, second_piece

FREE, GIVEN, OWN, SHARED, BY_BYTES, BY_ALL_REDUCE, BY_PARTS = (np.uint64(k) for k in range(7))
"""From which source entries a destination entry is made: from all terms that reach it; from those of a range that is
given, which are terms of their own; or from one of its own device, of which it is a part. From SHARED on: as FREE, for
gradients, which go in a communication with others: what takes least alone, but of messages and the ring of gloo, whose
time is a start and the bytes, what takes least for its bytes, as the start is paid once for all; what takes least for
its bytes; all-reduces; a reduce-scatter and an all-gather. The last two where they are possible."""


@lean
def clear_done(done: U8, count: Any) -> None:
    for k in range(count):
        done[k] = 0


@lean
def group_by_box(destination: Side, groups: Groups) -> None:
    """Find the groups of destination entries with the same region."""
    for k in range(destination.size[0]):
        groups.members[k], groups.shared[k], groups.following[k], groups.last[k] = 0, 0, NONE, k
        leader = np.uint64(destination.same[k])
        groups.members[leader] += np.uint32(1)
        if leader != np.uint64(k):
            groups.following[np.uint64(groups.last[leader])] = k
            groups.last[leader] = k


@lean
def common(a: I64, i: Any, b: I64, j: Any) -> Any:
    """Elements that boxes ``a[i]`` and ``b[j]`` have in common."""
    count = np.int64(1)
    for r in range(np.uint64(min(a.shape[1], b.shape[1]))):  # a workspace's boxes may have dimensions to spare
        low, high = max(a[i, r, 0], b[j, r, 0]), min(a[i, r, 1], b[j, r, 1])
        if low >= high:
            return np.int64(0)
        count *= high - low
    return count


@lean
def equal(a: I64, i: Any, b: I64, j: Any, rank: Any) -> Any:
    equal = True
    for r in range(rank):
        equal = equal and a[i, r, 0] == b[j, r, 0] and a[i, r, 1] == b[j, r, 1]
    return equal


@lean
def collect(
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
                    volume = common(source.box, np.uint64(source.copy[begin]), destination.box, k)
                    if volume > 0:
                        _move_term(routes, source, t, k, device, volume, moves)
            else:  # the terms that the first entry with its box gets
                for m in range(np.uint64(groups.moves_first[leader]), np.uint64(groups.moves_end[leader])):
                    _move_term(routes, source, np.uint64(moves.term[m]), k, device, moves.volume[m], moves)
            groups.moves_first[k], groups.moves_end[k] = first, moves.size[0]
        elif mode == GIVEN:
            for s in range(np.uint64(groups.first[k]), np.uint64(groups.end[k])):
                volume = common(source.box, s, destination.box, k)
                if volume > 0:
                    move(moves, s, np.uint64(source.device[s]), k, device, volume)
        else:
            contained = False
            for s in range(source.size[0]):
                if not contained and np.uint64(source.device[s]) == device:
                    volume = common(source.box, s, destination.box, k)
                    if volume == destination.volume[k]:
                        contained = True
                        move(moves, s, device, k, device, volume)
            if not contained:
                result[ERROR] = ONE


@lean
def _move_term(routes: RouteTable, source: Side, t: Any, k: Any, device: Any, volume: Any, moves: Moves) -> None:
    """Note a move from the nearest copy of term ``t`` to entry ``k`` of ``device``."""
    begin, end, at = np.uint64(source.term_first[t]), np.uint64(source.term_first[t + ONE]), moves.size[0]
    best = nearest(routes, source.copy, source.device, begin, end, device, moves.sent)
    move(moves, best, np.uint64(source.device[best]), k, device, volume)
    if at < moves.size[0]:
        moves.term[at] = t


@lean
def nearest(routes: RouteTable, copies: U32, devices: U32, first: Any, last: Any, device: Any, sent: I64) -> Any:
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
def move(moves: Moves, s: Any, owner: Any, k: Any, device: Any, volume: Any) -> None:
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


@lean
def share(destination: Side, moves: Moves, groups: Groups) -> Any:
    """Find the groups of destination entries with the same region, some of which comes from other devices. Says whether
    there are any."""
    group_by_box(destination, groups)
    any_shared = False
    for m in range(moves.size[0]):
        leader = np.uint64(destination.same[np.uint64(moves.destination[m])])
        if moves.exchange[m] != NONE and groups.members[leader] > 1:
            groups.shared[leader] = 1
            any_shared = True
    return any_shared


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
