"""What every row of a plan waits for, in columns that are read off the devices' steps: task graphs and critical paths
follow from them."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from flexsearch.lower.rows import (
    BACKWARD,
    COMPUTE,
    FORWARD,
    ISSUE,
    RECOMPUTE,
    SYNCHRONISE,
    WAIT,
    Numbers,
    Rows,
    blocks_run,
    ranges,
    steps_at,
)
from flexsearch.lower.taskgraph import Row

_PASSES = (FORWARD, BACKWARD, RECOMPUTE)
"""Kinds of blocks that send activations and their gradients."""


@dataclass(frozen=True)
class Order:
    """The rows of a plan, those with smaller identities first as far as dependencies allow: with one microbatch, all.
    With several, devices go through their actions side by side. Once what a communication waits for is done it stands
    before the next computing of its senders, which may be of an earlier microbatch with smaller identities and must not
    hold it back; but activations and their gradients stand behind the actions of their receivers that come before the
    one that waits for them, and gradients of weights behind what their receivers compute of the same action before, as
    far as that goes: they take no memory there until then.

    By row: ``microbatch``, ``block``, ``communicates`` and ``number``, its identity; ``rank``, its place by that; of a
    computation its ``device`` and its ``step`` in the segments, of a communication -1 and its number in the segments;
    ``launched``: ticks until the hosts of its devices have launched it (0 for a communication that follows others: it
    is not launched). Row k waits for the rows ``after[first[k]:first[k + 1]]``, ascending."""

    microbatch: Numbers
    block: Numbers
    communicates: Numbers
    number: Numbers
    rank: Numbers
    device: Numbers
    step: Numbers
    launched: Numbers
    first: Numbers
    after: Numbers

    def __len__(self) -> int:
        return len(self.rank)

    def identities(self) -> list[Row]:
        """Of all rows."""
        columns = self.microbatch, self.block, self.communicates, self.number
        return list(map(Row._make, zip(*(column.tolist() for column in columns), strict=True)))


class _Keys:
    """Identities as numbers that are in the same order."""

    def __init__(self, rows: Rows) -> None:
        segments = rows.segments
        self.blocks = len(rows.segment)
        self.once = rows.schedule.once.astype(bool)
        self.width = 1 + int(max(segments.step_row.max(initial=0), segments.follower_row.max(initial=0)))

    def of(self, microbatch: Numbers, block: Numbers, communicates: Numbers, number: Numbers) -> Numbers:
        own = np.where(self.once[block], 0, microbatch)
        return ((own * self.blocks + block) * 2 + communicates) * self.width + number

    def of_microbatch(self, microbatch: int) -> int:
        """How far the rows of a microbatch are behind those of the first."""
        return microbatch * self.blocks * 2 * self.width

    def parts(self, key: Numbers) -> tuple[Numbers, Numbers, Numbers, Numbers]:
        """The inverse of ``of``."""
        rest, number = np.divmod(key, self.width)
        rest, communicates = np.divmod(rest, 2)
        microbatch, block = np.divmod(rest, self.blocks)
        return microbatch, block, communicates, number


@dataclass(frozen=True)
class _Steps:
    """The steps of a device that compute or communicate: keys of their rows, steps, actions (numbers on the device),
    ticks until they are launched; and keys in pairs: (waiting row, row that it waits for); (communication that it
    issues, what it computes next). ``used``: (communication that it waits for, number of the action that does)."""

    key: Numbers
    step: Numbers
    action: Numbers
    launched: Numbers
    waiting: Numbers
    awaited: Numbers
    issued: Numbers
    following: Numbers
    used: tuple[Numbers, Numbers]


def order_of(rows: Rows) -> Order:
    """The order of a plan's rows."""
    keys = _Keys(rows)
    devices = [_steps(rows, keys, device) for device in range(len(rows.schedule.group))]
    waiting = [one.waiting for one in devices]
    awaited = [one.awaited for one in devices]
    row_keys = np.unique(np.concatenate([one.key for one in devices]))
    following, followed = _followers(rows, keys, row_keys)
    row_keys = np.union1d(row_keys, following)
    count = len(row_keys)
    device, step, launched, action, issued = (np.full(count, fill, np.int64) for fill in (-1, -1, 0, 0, -1))
    microbatch, block, communicates, number = keys.parts(row_keys)
    sent = np.flatnonzero(communicates)
    step[sent] = rows.segments.communication_first[rows.segment[block[sent]]].astype(np.int64) + number[sent]
    for d, one in enumerate(devices):
        at = np.searchsorted(row_keys, one.key)
        np.maximum.at(launched, at, one.launched)
        computes = communicates[at] == 0
        device[at[computes]], step[at[computes]], action[at[computes]] = d, one.step[computes], one.action[computes]
        np.maximum.at(issued, at[~computes], one.action[~computes])
    pairs = np.searchsorted(row_keys, np.concatenate((*waiting, following))) * count
    pairs = np.unique(pairs + np.searchsorted(row_keys, np.concatenate((*awaited, followed))))
    late, early = np.divmod(pairs, max(count, 1))
    several = int(rows.schedule.microbatches[0]) > 1
    rank = np.arange(count)
    if several or (late <= early).any():
        sending = _Sending([{} for _ in range(count)], [[] for _ in range(count)])
        for d, one in enumerate(devices if several else ()):
            used, sent, after = (np.searchsorted(row_keys, keys) for keys in (one.used[0], one.issued, one.following))
            np.maximum.at(action, used, one.used[1])
            for c in np.unique(used).tolist():
                sending.receivers[c].append(d)
            for c, n in zip(sent.tolist(), after.tolist(), strict=True):
                sending.holds[c][n] = None
        kind = rows.schedule.kind[block]
        action[np.isin(kind, _PASSES, invert=True) & (communicates == 1)] = -1
        turn, place = 2 * action + (communicates == 0) if several else np.zeros(count, np.int64), row_keys.copy()
        if several:  # gradients of weights stand where their block does, in the pass of the final microbatch if once
            synchronises = (kind == SYNCHRONISE) & (communicates == 1)
            turn[synchronises] = 2 * issued[synchronises] + 1
            once = synchronises & (rows.schedule.once[block] == 1)
            place[once] += keys.of_microbatch(int(rows.schedule.final[0]))
        rank = _sorted(list(zip(turn.tolist(), place.tolist(), strict=True)), device.tolist(), late, early, sending)
        place = np.argsort(rank)
        pairs = np.sort(place[late] * count + place[early])
        late, early = np.divmod(pairs, max(count, 1))
    return Order(
        microbatch[rank], block[rank], communicates[rank], number[rank], rank, device[rank], step[rank],
        launched[rank], np.searchsorted(late, np.arange(count + 1)), early,
    )  # fmt: skip


def _steps(rows: Rows, keys: _Keys, device: int) -> _Steps:
    """What a device does, in its order."""
    schedule, segments = rows.schedule, rows.segments
    group = schedule.group[device]
    blocks, microbatches, actions = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for n, a in enumerate(range(schedule.action_first[group], schedule.action_last[group])):
        blocks.append(blocks_run(schedule, a))
        microbatches.append(np.full(len(blocks[-1]), int(schedule.microbatch[a])))
        actions.append(np.full(len(blocks[-1]), n))
    block = np.concatenate(blocks)
    step, at = steps_at(segments, segments.device_steps[rows.segment[block]].astype(np.int64) + device)
    microbatch, action = np.concatenate(microbatches)[at], np.concatenate(actions)[at]
    kind = segments.step_kind[step]
    number = segments.step_row[step].astype(np.int64)
    key = keys.of(microbatch, segments.step_block[step].astype(np.int64), (kind != COMPUTE).astype(np.int64), number)
    is_wait, place = kind == WAIT, np.arange(len(step))
    waits, acts = np.flatnonzero(is_wait), np.flatnonzero(~is_wait)
    computed = np.maximum.accumulate(np.where(kind == COMPUTE, place, -1))
    before = np.concatenate(([-1], computed[:-1]))[acts] if len(step) else acts
    launched = np.cumsum(np.where(is_wait, 0, segments.step_host[step]))[acts]
    # Of the waits since the computation before.
    begin, end = np.searchsorted(waits, before), np.searchsorted(waits, acts)
    later = np.flatnonzero(before >= 0)
    waiting = np.concatenate((np.repeat(key[acts], end - begin), key[acts[later]]))
    received, used = key[waits[ranges(begin, end - begin)]], np.repeat(action[acts], end - begin)
    awaited = np.concatenate((received, key[before[later]]))
    issues, computes = np.flatnonzero(kind == ISSUE), np.flatnonzero(kind == COMPUTE)
    issues = issues[np.searchsorted(computes, issues) < len(computes)]
    following = key[computes[np.searchsorted(computes, issues)]]
    return _Steps(
        key[acts], step[acts], action[acts], launched, waiting, awaited, key[issues], following, (received, used)
    )


def _followers(rows: Rows, keys: _Keys, row_keys: Numbers) -> tuple[Numbers, Numbers]:
    """Pairs of keys: communications that follow others, and these."""
    segments = rows.segments
    microbatch, block, communicates, number = keys.parts(row_keys)
    sends = communicates == 1
    c = segments.communication_first[rows.segment[block[sends]]].astype(np.int64) + number[sends]
    first = segments.follower_first[c].astype(np.int64)
    lengths = segments.follower_last[c].astype(np.int64) - first
    at = ranges(first, lengths)
    blocks, numbers = (column[at].astype(np.int64) for column in (segments.follower_block, segments.follower_row))
    following = keys.of(np.repeat(microbatch[sends], lengths), blocks, np.ones(len(at), np.int64), numbers)
    return following, np.repeat(row_keys[sends], lengths)


class _Sending(NamedTuple):
    """By row, of communications: what their senders compute next (a set), and the devices that wait for them."""

    holds: list[dict[int, None]]
    receivers: list[list[int]]


def _sorted(
    turn: Sequence[tuple[int, int]], device: list[int], late: Numbers, early: Numbers, sending: _Sending
) -> Numbers:
    """Rows, given by rank, such that each comes behind those that it waits for; of those that can come next the one
    with the smallest turn, then rank. Pairs: row ``late[k]`` waits for row ``early[k]``. A communication that can come
    holds back what its senders compute next; it gives way, once, to others that hold back what its receivers compute
    in an earlier turn."""
    missing = np.bincount(late, minlength=len(turn)).tolist()
    by_awaited = np.argsort(early, kind="stable")
    readers, first = late[by_awaited].tolist(), np.searchsorted(early[by_awaited], np.arange(len(turn) + 1)).tolist()
    heap: list[tuple[tuple[int, int], int]] = []
    holders: list[dict[int, None]] = [{} for _ in turn]
    held: dict[int, int] = {}  # device -> what it computes next, if that is held back
    order: list[int] = []
    done, gave_way = set[int](), set[int]()

    def enter(row: int) -> None:
        heapq.heappush(heap, (turn[row], row))
        for other in sending.holds[row]:
            holders[other][row] = None

    for row, count in enumerate(missing):
        if not count:
            enter(row)
    while heap:
        _, row = heapq.heappop(heap)
        if row in done:
            continue
        if holders[row]:
            held[device[row]] = row
            continue
        earlier = [held[d] for d in sending.receivers[row] if d in held and turn[held[d]] < turn[row]]
        if earlier and row not in gave_way:
            gave_way.add(row)
            for entry in [(turn[row], row), *((turn[other], c) for other in earlier for c in holders[other])]:
                heapq.heappush(heap, entry)
            continue
        order.append(row)
        done.add(row)
        for other in sending.holds[row]:
            del holders[other][row]
            if not holders[other] and held.get(device[other]) == other:
                del held[device[other]]
                heapq.heappush(heap, (turn[other], other))
        for reader in readers[first[row] : first[row + 1]]:
            missing[reader] -= 1
            if not missing[reader]:
                enter(reader)
    return np.array(order, np.int64)
