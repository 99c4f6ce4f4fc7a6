"""The rows of one block under the templates of a plan, compiled.

A segment is put together in a ``Draft``: its communications are appended to the arena as they come; its steps are noted
one after the other, then laid out by device. Per device they come as waits, computations, issues, each in the order of
the communications.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from flexsearch.compiled import I64, ONE, U8, U32, U64, ZERO, inlined, lean
from flexsearch.cost.compute import update_seconds
from flexsearch.cost.ticks import TICK
from flexsearch.lower.arrays import NOTHING, Pools, Program, State
from flexsearch.lower.bucket import Groups, collect, follow, merge, merge_drags
from flexsearch.lower.rows import BACKWARD, COMPUTE, FORWARD, GATHER, ISSUE, NEVER, SYNCHRONISE, UPDATE, WAIT, Segments
from flexsearch.packed import packed


@packed
class BlockTable(NamedTuple):
    """The blocks of a graph; rows ``[first[i], last[i])`` of a list belong to item i.

    By block: ``kind``, ``argument``; ``sent``: slots whose reshards it sends, in order; ``stage``: row of ``runs``,
    which says by device whether it runs such blocks. By slot: ``forward``, ``backward``: the block that sends what it
    reads, and the one that sends its gradient (NOTHING: none). By operator: ``forward_of``, ``backward_of`` (NOTHING:
    it has none); by weight: ``gather_of``, ``bucket`` (NOTHING: it is not trained). By SYNCHRONISE block: ``starts``,
    ``finishes``: bucket whose first or second phases it sends (NOTHING: none), ``block``: its number. By bucket:
    ``member``: its weights in the order of completion; ``started_by``, ``finished_by``: blocks."""

    kind: U8
    argument: U32
    sent_first: U32
    sent_last: U32
    sent: U32
    stage: U32
    runs: U8  # (stages + 1, devices), flat
    forward: U32
    backward: U32
    forward_of: U32
    backward_of: U32
    gather_of: U32
    bucket: U32
    starts: U32
    finishes: U32
    block: U32
    member_first: U32
    member_last: U32
    member: U32
    started_by: U32
    finished_by: U32


@packed
class Filled(NamedTuple):
    """How many entries of each list of ``Segments`` are in use, (1,) each."""

    segment: U64
    table: U64
    step: U64
    communication: U64
    link: U64
    drag: U64
    receiver: U64
    follower: U64


@packed
class Draft(NamedTuple):
    """Where a segment is put together. Its ``steps`` ((1,)) so far: ``device``, ``kind``, ``block``, ``row``, ``ticks``.
    ``at``: by device, a count or a place; ``mark``: by device, the last ``stamp`` ((1,)) that it was given; ``piece``:
    by device, the stamp of the last block of which it holds a piece. ``full``: (1,) 1 if there was no room for
    something. ``groups``: exchanges of a bucket."""

    device: U32
    kind: U8
    block: U32
    row: U32
    ticks: I64
    steps: U64
    at: U64
    mark: U64
    piece: U64
    stamp: U64
    full: U8
    groups: Groups


@lean
def emit(
    blocks: BlockTable, program: Program, pools: Pools, state: State, draft: Draft, segments: Segments, filled: Filled,
    segment: U32, b: Any,
) -> Any:  # fmt: skip
    """Write the segment of block ``b``: returns its number, or NOTHING if there is no room. ``segment``: numbers of the
    plan's segments by block; that of an UPDATE block reads those of all SYNCHRONISE blocks."""
    kind, argument = blocks.kind[b], np.uint64(blocks.argument[b])
    draft.steps[0] = ZERO
    draft.full[0] = 0
    first = filled.communication[0]
    if kind == SYNCHRONISE:
        _synchronise(blocks, program, pools, state, draft, segments, filled, b, argument)
    elif kind == UPDATE:
        _update(blocks, program, state, draft, segments, segment, b)
    else:
        if kind != GATHER:
            config = np.uint64(state.config[argument])
            _mark_pieces(pools, draft, config)
            _wait(blocks, program, pools, state, draft, kind == FORWARD, argument)
            _compute(pools, draft, kind == FORWARD, config, b)
        _send(blocks, pools, state, draft, segments, filled, kind != BACKWARD, b)
    return _finish(segments, filled, draft, first)


@inlined
def _step(draft: Draft, device: Any, kind: Any, block: Any, row: Any, ticks: Any) -> None:
    at = draft.steps[0]
    if at == np.uint64(draft.device.shape[0]):
        draft.full[0] = 1
        return
    draft.device[at], draft.kind[at], draft.block[at] = device, kind, block
    draft.row[at], draft.ticks[at] = row, ticks
    draft.steps[0] = at + ONE


@lean
def ticks_of(seconds: Any) -> Any:
    """Whole ticks."""
    return np.int64(seconds / TICK)


@lean
def new_stamp(draft: Draft) -> Any:
    """A stamp that no device has been given yet."""
    draft.stamp[0] += ONE
    return draft.stamp[0]


# ---- computing


@inlined
def _mark_pieces(pools: Pools, draft: Draft, config: Any) -> None:
    stamp = new_stamp(draft)
    for k in range(np.uint64(pools.config_first[config]), np.uint64(pools.config_last[config])):
        draft.piece[np.uint64(pools.entry_device[k])] = stamp


@inlined
def _compute(pools: Pools, draft: Draft, forward: Any, config: Any, b: Any) -> None:
    first = np.uint64(pools.config_first[config])
    for k in range(first, np.uint64(pools.config_last[config])):
        ticks = pools.entry_forward[k] if forward else pools.entry_backward[k]
        _step(draft, pools.entry_device[k], COMPUTE, b, k - first, ticks)


@inlined
def _wait(
    blocks: BlockTable, program: Program, pools: Pools, state: State, draft: Draft, forward: Any, operator: Any
) -> None:
    """Wait for what the pieces of an operator read: operands, or gradients of its outputs."""
    if forward:
        first, last = np.uint64(program.operand_first[operator]), np.uint64(program.operand_last[operator])
        for slot in range(first, last):
            leader = np.uint64(state.leader[slot])
            again = False
            for other in range(first, slot):
                again = again or np.uint64(state.leader[other]) == leader
            if not again:
                _wait_for(blocks, pools, draft, blocks.forward[leader], state.forward, leader)
    else:
        for k in range(np.uint64(program.result_first[operator]), np.uint64(program.result_last[operator])):
            result = np.uint64(program.result[k])
            _wait_for(blocks, pools, draft, blocks.backward[result], state.backward, result)


@lean
def _wait_for(blocks: BlockTable, pools: Pools, draft: Draft, source: Any, templates: U32, slot: Any) -> None:
    """Wait for the reshard of a slot that block ``source`` sends, where it delivers to devices that hold a piece."""
    template = np.uint64(templates[slot])
    first, last = np.uint64(pools.reshard_first[template]), np.uint64(pools.reshard_last[template])
    if first == last:
        return
    row: Any = row_of(blocks, pools, templates, source, slot)
    stamp = draft.stamp[0]
    for x in range(first, last):
        for k in range(np.uint64(pools.receive_first[x]), np.uint64(pools.receive_last[x])):
            d = np.uint64(pools.receive[k])
            if draft.piece[d] == stamp:
                _step(draft, d, WAIT, source, row, np.int64(0))
        row += ONE


@lean
def row_of(blocks: BlockTable, pools: Pools, templates: U32, source: Any, slot: Any) -> Any:
    """Number within block ``source`` of the first communication of a slot's reshard."""
    row = ZERO
    for k in range(np.uint64(blocks.sent_first[source]), np.uint64(blocks.sent_last[source])):
        other = np.uint64(blocks.sent[k])
        if other == slot:
            break
        template = np.uint64(templates[other])
        row += np.uint64(pools.reshard_last[template]) - np.uint64(pools.reshard_first[template])
    return row


@inlined
def _update(
    blocks: BlockTable, program: Program, state: State, draft: Draft, segments: Segments, segment: U32, b: Any
) -> None:
    """Every device that stores trained weights waits for all synchronisation that reaches it, then updates them."""
    for n in range(np.uint64(blocks.block.shape[0])):
        source = np.uint64(blocks.block[n])
        s = np.uint64(segment[source])
        first = np.uint64(segments.communication_first[s])
        for c in range(first, np.uint64(segments.communication_last[s])):
            for k in range(np.uint64(segments.receiver_first[c]), np.uint64(segments.receiver_last[c])):
                d = np.uint64(segments.receiver[k])
                if state.stored_count[d] > ZERO:
                    _step(draft, d, WAIT, source, c - first, np.int64(0))
    row: Any = ZERO
    for e in range(np.uint64(state.stored_count.shape[0])):
        if state.stored_count[e] > ZERO:
            seconds = update_seconds(
                state.stored_bytes[e], state.stored_count[e], program.update_byte_s[e], program.update_tensor_s[e]
            )
            _step(draft, e, COMPUTE, b, row, ticks_of(seconds))
            row += ONE


# ---- communication


@inlined
def _send(
    blocks: BlockTable, pools: Pools, state: State, draft: Draft, segments: Segments, filled: Filled, forward: Any,
    b: Any,
) -> None:  # fmt: skip
    """The reshards that a block sends: of weights, outputs (forward) or gradients of operands."""
    begin = filled.communication[0]
    for k in range(np.uint64(blocks.sent_first[b]), np.uint64(blocks.sent_last[b])):
        slot = np.uint64(blocks.sent[k])
        template = np.uint64(state.forward[slot] if forward else state.backward[slot])
        first, last = np.uint64(pools.reshard_first[template]), np.uint64(pools.reshard_last[template])
        if first < last:
            _reshard(blocks, pools, draft, segments, filled, b, begin, first, last, template)
            if draft.full[0] == 1:
                return


@lean
def _reshard(
    blocks: BlockTable, pools: Pools, draft: Draft, segments: Segments, filled: Filled, b: Any, begin: Any, first: Any,
    last: Any, template: Any,
) -> None:  # fmt: skip
    """Exchanges ``first`` to ``last``. Those of a second phase follow those of the first that deliver to their
    senders. ``begin``: the block's first communication."""
    middle, at = np.uint64(pools.reshard_middle[template]), filled.communication[0]
    if at + last - first > np.uint64(segments.missing.shape[0]):
        draft.full[0] = 1
        return
    for c in range(at, at + last - first):
        segments.missing[c] = 0
    for x in range(first, last):
        c = filled.communication[0]
        _exchange(blocks, pools, draft, segments, filled, b, c - begin, x)
        if draft.full[0] == 1:
            return
        if x < middle < last:
            stamp = new_stamp(draft)
            for k in range(np.uint64(pools.receive_first[x]), np.uint64(pools.receive_last[x])):
                draft.mark[np.uint64(pools.receive[k])] = stamp
            for y in range(middle, last):
                if _sends(pools, draft, y, stamp):
                    segments.missing[at + y - first] += np.uint32(1)
                    if not add_follower(segments, filled, draft, b, at - begin + y - first):
                        return
        segments.follower_last[c] = filled.follower[0]


@lean
def _sends(pools: Pools, draft: Draft, x: Any, stamp: Any) -> Any:
    """Whether a device with that stamp is among the senders of an exchange."""
    for k in range(np.uint64(pools.send_first[x]), np.uint64(pools.send_last[x])):
        if draft.mark[np.uint64(pools.send[k])] == stamp:
            return True
    return False


@lean
def add_follower(segments: Segments, filled: Filled, draft: Draft, block: Any, row: Any) -> Any:
    """One more follower of the communication written last; False if there is no room."""
    at = filled.follower[0]
    if at == np.uint64(segments.follower_row.shape[0]):
        draft.full[0] = 1
        return False
    segments.follower_block[at], segments.follower_row[at] = block, row
    filled.follower[0] = at + ONE
    return True


@lean
def _open(segments: Segments, filled: Filled, draft: Draft, links: Any, drags: Any, receivers: Any) -> Any:
    """The next communication, without a link yet; ``full`` if there is no room for it and so many entries."""
    c = filled.communication[0]
    if (
        c == np.uint64(segments.missing.shape[0])
        or filled.link[0] + links > np.uint64(segments.link.shape[0])
        or filled.drag[0] + drags > np.uint64(segments.drag.shape[0])
        or filled.receiver[0] + receivers > np.uint64(segments.receiver.shape[0])
    ):
        draft.full[0] = 1
        return c
    segments.link_first[c], segments.drag_first[c] = filled.link[0], filled.drag[0]
    segments.receiver_first[c], segments.follower_first[c] = filled.receiver[0], filled.follower[0]
    segments.follower_last[c] = filled.follower[0]
    segments.turn[c] = NEVER
    filled.communication[0] = c + ONE
    return c


@lean
def _link(segments: Segments, filled: Filled, resource: Any, ticks: Any) -> None:
    at = filled.link[0]
    segments.link[at], segments.link_ticks[at] = resource, ticks
    filled.link[0] = at + ONE


@lean
def _drag(segments: Segments, filled: Filled, resource: Any, ticks: Any) -> None:
    at = filled.drag[0]
    segments.drag[at], segments.drag_ticks[at] = resource, ticks
    filled.drag[0] = at + ONE


@lean
def _close(segments: Segments, filled: Filled, c: Any, ticks: Any) -> None:
    segments.link_last[c], segments.drag_last[c] = filled.link[0], filled.drag[0]
    segments.receiver_last[c] = filled.receiver[0]
    segments.communication_ticks[c] = ticks


@lean
def _ends(
    blocks: BlockTable, pools: Pools, draft: Draft, segments: Segments, filled: Filled, b: Any, c: Any, row: Any, x: Any,
    sending: Any, receiving: Any,
) -> None:  # fmt: skip
    """Senders and receivers of exchange ``x``, those left out that have the stamp ``sending`` or ``receiving``: they
    are given these. Senders that do not run the block pass on what they receive without a step of their own."""
    runs = np.uint64(blocks.stage[b]) * np.uint64(draft.mark.shape[0])
    for k in range(np.uint64(pools.send_first[x]), np.uint64(pools.send_last[x])):
        d = np.uint64(pools.send[k])
        if draft.mark[d] != sending and blocks.runs[runs + d] == 1:
            draft.mark[d] = sending
            segments.missing[c] += np.uint32(1)
            _step(draft, d, ISSUE, b, row, np.int64(0))
    for k in range(np.uint64(pools.receive_first[x]), np.uint64(pools.receive_last[x])):
        d = np.uint64(pools.receive[k])
        if draft.at[d] != receiving:
            draft.at[d] = receiving
            segments.receiver[filled.receiver[0]] = d
            filled.receiver[0] += ONE


@lean
def _exchange(
    blocks: BlockTable, pools: Pools, draft: Draft, segments: Segments, filled: Filled, b: Any, row: Any, x: Any
) -> None:
    """One exchange as a communication of its own; what else it misses stands in ``missing`` already."""
    links, drags = np.uint64(pools.link_last[x] - pools.link_first[x]), np.uint64(pools.drag_last[x] - pools.drag_first[x])
    c = _open(segments, filled, draft, links, drags, np.uint64(pools.receive_last[x] - pools.receive_first[x]))
    if draft.full[0] == 1:
        return
    for k in range(np.uint64(pools.link_first[x]), np.uint64(pools.link_last[x])):
        _link(segments, filled, pools.link[k], ticks_of(pools.link_s[k]))
    for k in range(np.uint64(pools.drag_first[x]), np.uint64(pools.drag_last[x])):
        _drag(segments, filled, pools.drag[k], ticks_of(pools.drag_s[k]))
    stamp = new_stamp(draft)
    _ends(blocks, pools, draft, segments, filled, b, c, row, x, stamp, stamp)
    _close(segments, filled, c, ticks_of(pools.duration[x]))


# ---- synchronisation


@inlined
def _synchronise(
    blocks: BlockTable, program: Program, pools: Pools, state: State, draft: Draft, segments: Segments, filled: Filled,
    b: Any, n: Any,
) -> None:  # fmt: skip
    """Second phases of the bucket before, then first phases of the next one."""
    begin = filled.communication[0]
    for phase in range(2):
        bucket = blocks.starts[n] if phase == 1 else blocks.finishes[n]
        if bucket == NOTHING:
            continue
        of, groups = np.uint64(1 - phase), draft.groups
        draft.full[0] = collect(
            blocks.member, np.uint64(blocks.member_first[bucket]), np.uint64(blocks.member_last[bucket]), pools,
            state.plan, groups,
        )  # fmt: skip
        if draft.full[0] == 1:
            return
        draft.full[0] = follow(pools, groups, draft.mark, draft.stamp)
        for g in range(groups.counts[of]):
            c = filled.communication[0]
            _group(blocks, program, pools, draft, segments, filled, b, c - begin, of, g)
            if draft.full[0] == 1:
                return
            if of == ZERO:
                for k in range(np.uint64(groups.pair_first[g]), np.uint64(groups.pair_last[g])):
                    if not add_follower(segments, filled, draft, blocks.finished_by[bucket], groups.pair[k]):
                        return
                segments.follower_last[c] = filled.follower[0]


@lean
def _group(
    blocks: BlockTable, program: Program, pools: Pools, draft: Draft, segments: Segments, filled: Filled, b: Any,
    row: Any, phase: Any, g: Any,
) -> None:  # fmt: skip
    """Exchanges of a bucket that go as one communication."""
    groups, c = draft.groups, filled.communication[0]
    if c == np.uint64(segments.missing.shape[0]):
        draft.full[0] = 1
        return
    segments.missing[c] = groups.follows[g] if phase == ONE else np.uint32(0)
    m = np.uint64(groups.head[phase, g])
    if groups.size[phase, g] == 1:
        _exchange(blocks, pools, draft, segments, filled, b, row, np.uint64(groups.exchange[m]))
        return
    touched, seconds = merge(program, pools, groups, phase, g)
    _open(segments, filled, draft, touched, np.uint64(groups.touched.shape[0]), np.uint64(draft.mark.shape[0]))
    if draft.full[0] == 1:
        return
    for j in range(touched):
        r = np.uint64(groups.touched[j])
        _link(segments, filled, r, ticks_of(groups.load[r]))
    for j in range(merge_drags(program, pools, groups, phase, g)):
        r = np.uint64(groups.touched[j])
        _drag(segments, filled, r, ticks_of(groups.load[r]))
    stamp = new_stamp(draft)
    for _ in range(np.uint64(groups.size[phase, g])):
        _ends(blocks, pools, draft, segments, filled, b, c, row, np.uint64(groups.exchange[m]), stamp, stamp)
        m = np.uint64(groups.next[m])
    _close(segments, filled, c, ticks_of(seconds))


# ---- the segment


@lean
def _finish(segments: Segments, filled: Filled, draft: Draft, first: Any) -> Any:
    """Lay the steps out by device. ``first``: the block's first communication."""
    number, table, at = filled.segment[0], filled.table[0], filled.step[0]
    devices, count = np.uint64(draft.at.shape[0]), draft.steps[0]
    if (
        draft.full[0] == 1
        or number == np.uint64(segments.device_steps.shape[0])
        or table + devices + ONE > np.uint64(segments.step_first.shape[0])
        or at + count > np.uint64(segments.step_kind.shape[0])
    ):
        return np.uint64(NOTHING)
    for d in range(devices):
        draft.at[d] = ZERO
    for k in range(count):
        draft.at[np.uint64(draft.device[k])] += ONE
    for d in range(devices):
        segments.step_first[table + d] = at
        here = draft.at[d]
        draft.at[d] = at
        at += here
    segments.step_first[table + devices] = at
    for k in range(count):
        device = np.uint64(draft.device[k])
        to = draft.at[device]
        segments.step_kind[to], segments.step_block[to] = draft.kind[k], draft.block[k]
        segments.step_row[to], segments.step_ticks[to] = draft.row[k], draft.ticks[k]
        draft.at[device] = to + ONE
    for d in range(devices):
        draft.at[d] = ZERO
    segments.device_steps[number] = table
    segments.communication_first[number], segments.communication_last[number] = first, filled.communication[0]
    filled.segment[0], filled.table[0], filled.step[0] = number + ONE, table + devices + ONE, at
    return number
