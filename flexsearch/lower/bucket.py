"""Exchanges that go as one communication, compiled: those of a bucket, or of weights that are gathered together, of
equal form, devices and type of elements.

The bytes of exchanges that go together add up on every link; collectives become one. A second phase of a group
follows the first phases that deliver to its senders.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from flexsearch.compiled import F64, ONE, U32, U64, ZERO, lean
from flexsearch.cost.collectives import price_collective
from flexsearch.cost.tally import Loads, Tally, drag_seconds, duration, link_seconds, takes_cpu
from flexsearch.cost.ticks import whole
from flexsearch.lower.arrays import BlockTable, Pools, Program
from flexsearch.lower.orbits import at_once
from flexsearch.lower.schedule import ALL, EACH
from flexsearch.packed import packed
from flexsearch.strategy import OVER_ALL, States

GRADIENTS = np.uint32(States.GRADIENTS * OVER_ALL)
NO_ROOM: Any = np.uint64(0xFFFFFFFF)
"""In the place of a member: there is no room for it."""


@packed
class Groups(NamedTuple):
    """The exchanges of a bucket, both phases, or of a pack of gathers. By (phase, group): ``key``, ``head`` and
    ``tail`` (members), ``size``; ``counts``: (2,), groups of each phase. By member, those of a weight one after the
    other: ``exchange``, ``group``, ``next`` of its group, ``second_first`` and ``second_last`` (members of the second
    phase of its weight). ``pair``: groups of the second phase that follow those of the first, by ``pair_first`` and
    ``pair_last``; ``follows``: by group of the second phase, how many groups it follows; ``seen``: the last one, plus
    1. ``gathers``: (1,) the block whose gathers they are, plus 1; 0: none; ``waited``: by group of these, the stamp of
    the operator that waited for it last. ``load``: by resource, bytes, then seconds; ``listed``: by resource, a stamp
    (``listing``, (1,)), and as how ``many`` it counts; ``touched``: resources. ``lopsided``: (1,) links that stand for
    others with another load. ``tally``, ``loads``: what collectives are priced with."""

    key: npt.NDArray[np.uint32]
    head: npt.NDArray[np.uint32]
    tail: npt.NDArray[np.uint32]
    size: npt.NDArray[np.uint32]
    counts: U64
    exchange: U32
    group: U32
    next: U32
    second_first: U32
    second_last: U32
    pair: U32
    pair_first: U32
    pair_last: U32
    follows: U32
    seen: U64
    gathers: U64
    waited: U64
    load: F64
    listed: U64
    listing: U64
    touched: U32
    many: U32
    lopsided: U64
    tally: Tally
    loads: Loads


def bucket_of(blocks: BlockTable, sharding: Any, w: Any) -> Any:
    """The bucket of weight ``w``, of which what ``sharding`` (its rank) says is kept in parts."""
    return blocks.each[w] if sharding >= GRADIENTS else blocks.bucket[w]


def added_before(blocks: BlockTable, sharding: Any, bucket: Any) -> Any:
    """The block before which what ``bucket`` brings is added to a weight of that ``sharding`` (its rank): the update if
    it is kept whole."""
    return blocks.added_by[bucket] if sharding > 0 else blocks.kind.shape[0] - 1


find_bucket, find_added = lean(bucket_of), lean(added_before)
"""The same for compiled functions."""


@lean
def is_member(pools: Pools, plan: Any, sums: Any) -> Any:
    """Whether a weight with that plan is among those (ALL, ONCE, EACH) that a bucket sends."""
    return sums == ALL or (sums == EACH) == (pools.plan_sharding[plan] >= GRADIENTS)


@lean
def collect(blocks: BlockTable, bucket: Any, pools: Pools, plan: U32, groups: Groups) -> Any:
    """Group the exchanges of a bucket's weights; 1 if there is no room. ``plan``: of each weight."""
    groups.counts[:] = ZERO
    groups.gathers[0] = at = ZERO
    for k in range(np.uint64(blocks.member_first[bucket]), np.uint64(blocks.member_last[bucket])):
        p = np.uint64(plan[np.uint64(blocks.member[k])])
        if not is_member(pools, p, blocks.sums[bucket]):
            continue
        at = _add(pools, groups, np.uint64(pools.plan_sync[p]), at)
        if at == NO_ROOM:
            return 1
    return 0


@lean
def collect_gathers(blocks: BlockTable, b: Any, pools: Pools, templates: U32, groups: Groups) -> Any:
    """Group the exchanges of the weights that block ``b`` gathers, by slot ``templates``, unless they are there from
    the last time; 1 if there is no room."""
    if groups.gathers[0] == b + ONE:
        return 0
    groups.counts[:] = ZERO
    groups.gathers[0] = at = ZERO
    for k in range(np.uint64(blocks.sent_first[b]), np.uint64(blocks.sent_last[b])):
        at = _add(pools, groups, np.uint64(templates[np.uint64(blocks.sent[k])]), at)
        if at == NO_ROOM:
            return 1
    for g in range(groups.counts[0]):
        groups.waited[g] = ZERO
    groups.gathers[0] = b + ONE
    return 0


@lean
def _add(pools: Pools, groups: Groups, template: Any, at: Any) -> Any:
    """Add the exchanges of a reshard as members ``at`` and following; the next number, or NO_ROOM."""
    begin, end = np.uint64(pools.reshard_first[template]), np.uint64(pools.reshard_last[template])
    middle = np.uint64(pools.reshard_middle[template])
    if at + end - begin > np.uint64(groups.exchange.shape[0]):
        return NO_ROOM
    second, over = at + middle - begin, at + end - begin
    for x in range(begin, end):
        phase = ZERO if x < middle else ONE
        g = _group_of(groups, phase, pools.key[x])
        if groups.size[phase, g] == 0:
            groups.head[phase, g] = at
        else:
            groups.next[np.uint64(groups.tail[phase, g])] = at
        groups.tail[phase, g] = at
        groups.size[phase, g] += np.uint32(1)
        groups.exchange[at], groups.group[at] = x, g
        groups.second_first[at], groups.second_last[at] = second, over
        at += ONE
    return over


@lean
def _group_of(groups: Groups, phase: Any, key: Any) -> Any:
    """The group of a key, a new one if there is none."""
    count = groups.counts[phase]
    for g in range(count):
        if groups.key[phase, g] == key:
            return g
    groups.key[phase, count] = key
    groups.size[phase, count] = 0
    groups.counts[phase] = count + ONE
    return count


@lean
def follow(pools: Pools, groups: Groups, mark: U64, stamp: U64) -> Any:
    """Find which groups of the second phase follow which of the first; 1 if there is no room. ``mark``: by device, a
    ``stamp`` ((1,))."""
    for g in range(groups.counts[1]):
        groups.follows[g] = 0
        groups.seen[g] = ZERO
    pairs, room = ZERO, np.uint64(groups.pair.shape[0])
    for g in range(groups.counts[0]):
        groups.pair_first[g] = pairs
        m = np.uint64(groups.head[0, g])
        for _ in range(np.uint64(groups.size[0, g])):
            stamp[0] += ONE
            x = np.uint64(groups.exchange[m])
            for k in range(np.uint64(pools.receive_first[x]), np.uint64(pools.receive_last[x])):
                mark[np.uint64(pools.receive[k])] = stamp[0]
            for n in range(np.uint64(groups.second_first[m]), np.uint64(groups.second_last[m])):
                to = np.uint64(groups.group[n])
                if groups.seen[to] != g + ONE and is_sent_by(pools, np.uint64(groups.exchange[n]), mark, stamp[0]):
                    if pairs == room:
                        return 1
                    groups.seen[to] = g + ONE
                    groups.follows[to] += np.uint32(1)
                    groups.pair[pairs] = to
                    pairs += ONE
            m = np.uint64(groups.next[m])
        groups.pair_last[g] = pairs
    return 0


@lean
def is_sent_by(pools: Pools, x: Any, mark: U64, stamp: Any) -> Any:
    """Whether a device with that stamp is among the senders of an exchange."""
    k, last = np.uint64(pools.send_first[x]), np.uint64(pools.send_last[x])
    while k < last and mark[np.uint64(pools.send[k])] != stamp:
        k += ONE
    return k < last


@lean
def _add_up(groups: Groups, phase: Any, g: Any, first: U32, last: U32, resource: U32, load: F64) -> Any:
    """What a group's messages bring onto resources: rows ``[first[x], last[x])`` of two columns of exchange x. Fills
    ``load`` and lists the resources in ``touched``; returns how many there are."""
    m, touched = np.uint64(groups.head[phase, g]), ZERO
    groups.listing[0] += ONE
    for _ in range(np.uint64(groups.size[phase, g])):
        x = np.uint64(groups.exchange[m])
        for k in range(np.uint64(first[x]), np.uint64(last[x])):
            r = np.uint64(resource[k])
            if groups.listed[r] != groups.listing[0]:
                groups.listed[r] = groups.listing[0]
                groups.load[r], groups.many[r] = 0.0, 1
                groups.touched[touched] = r
                touched += ONE
            groups.load[r] += load[k]
        m = np.uint64(groups.next[m])
    return touched


@lean
def _list(program: Program, groups: Groups, resource: U32, seconds: F64, count: Any) -> Any:
    """List rows that were priced in ``touched`` and ``load``, by the resources that stand for them (``many``: for how
    many rows); returns how many there are."""
    touched = ZERO
    groups.listing[0] += ONE
    for k in range(count):
        r = np.uint64(program.image[np.uint64(resource[k])])
        if groups.listed[r] != groups.listing[0]:
            groups.listed[r] = groups.listing[0]
            groups.load[r], groups.many[r] = seconds[k], 0
            groups.touched[touched] = r
            touched += ONE
        elif groups.load[r] != seconds[k]:
            groups.lopsided[0] += ONE
        groups.load[r] = max(groups.load[r], seconds[k])
        groups.many[r] += np.uint32(1)
    return touched


@lean
def merge(program: Program, pools: Pools, groups: Groups, phase: Any, g: Any) -> Any:
    """How many resources a group's communication keeps busy (``touched``, the seconds of each in ``load``, as often
    as ``many`` says), and its duration (s): messages add up on every link, collectives become one of all bytes, and
    ranks put one tensor after the other in its place."""
    key, start, busiest, total = np.uint64(groups.key[phase, g]), 0.0, 0.0, np.int64(0)
    form, m = np.uint64(pools.key_form[key]), np.uint64(groups.head[phase, g])
    one = np.uint64(groups.exchange[m])
    for _ in range(np.uint64(groups.size[phase, g])):
        x = np.uint64(groups.exchange[m])
        start, total = max(start, pools.start[x]), total + np.int64(pools.amount[x])
        m = np.uint64(groups.next[m])
    if pools.key_group[key] == 1:
        groups.loads.size[:] = ZERO
        seconds = price_collective(
            program.routes, program.rates, groups.tally, groups.loads, form, pools.send,
            np.uint64(pools.from_first[one]), np.uint64(pools.from_last[one]), total,
        )  # fmt: skip
        touched = _list(program, groups, groups.loads.link, groups.loads.link_s, groups.loads.size[0])
        for j in range(touched):
            r = np.uint64(groups.touched[j])
            groups.many[r] = at_once(pools.orbit[one], groups.many[r], program.images[r])
        return touched, seconds + _more_tensors(program, groups, phase, g, form)
    touched = _add_up(groups, phase, g, pools.link_first, pools.link_last, pools.link, pools.link_load)
    for j in range(touched):
        r = np.uint64(groups.touched[j])
        groups.load[r] = link_seconds(program.rates.factor[form], groups.load[r], program.bandwidth[r])
        busiest = max(busiest, groups.load[r])
    return touched, duration(start + _more_tensors(program, groups, phase, g, form), busiest)


@lean
def _more_tensors(program: Program, groups: Groups, phase: Any, g: Any, form: Any) -> Any:
    """Seconds that ranks take for the tensors of a group beyond the first one."""
    return whole(program.rates.tensor_s[form] * (np.float64(groups.size[phase, g]) - 1.0))


@lean
def merge_drags(program: Program, pools: Pools, groups: Groups, phase: Any, g: Any) -> Any:
    """As ``merge``, which came before: processors from which moving the bytes takes time, and how much (s)."""
    key = np.uint64(groups.key[phase, g])
    form = np.uint64(pools.key_form[key])
    if not takes_cpu(program.rates, form):
        return ZERO
    more = _more_tensors(program, groups, phase, g, form)
    if pools.key_group[key] == 1:
        touched = _list(program, groups, groups.loads.drag, groups.loads.drag_s, groups.loads.size[1])
        for j in range(touched):
            groups.load[np.uint64(groups.touched[j])] += more
        return touched
    touched = _add_up(groups, phase, g, pools.drag_first, pools.drag_last, pools.drag, pools.drag_load)
    for j in range(touched):
        r = np.uint64(groups.touched[j])
        groups.load[r] = drag_seconds(program.rates, form, groups.load[r]) + more
    return touched
