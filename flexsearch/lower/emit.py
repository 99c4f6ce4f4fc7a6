"""The rows of one block under the templates of a plan, compiled: the parts of which ``describe.write`` makes segments.

Per device its steps are waits, computations, issues, each in the order of their numbers.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flexsearch.compiled import ONE, U32, ZERO, lean
from flexsearch.cost.tally import turn_of
from flexsearch.cost.ticks import ticks_of
from flexsearch.cost.updates import cast_ticks, update_seconds
from flexsearch.lower.arrays import NOTHING, BlockTable, Pools, Program, State
from flexsearch.lower.bucket import GRADIENTS, collect, collect_gathers, follow, is_sent_by, merge, merge_drags
from flexsearch.lower.change import is_late
from flexsearch.lower.draft import (
    Draft,
    Filled,
    add_drag,
    add_ends,
    add_exchange,
    add_follower,
    add_link,
    add_step,
    close,
    new_stamp,
    open_communication,
)
from flexsearch.lower.rows import BACKWARD, COMPUTE, FORWARD, WAIT, WEIGHT_GRADIENT, Segments, is_gather

# ---- computing


@lean
def mark_pieces(pools: Pools, draft: Draft, config: Any) -> None:
    """Note which devices hold a piece of an operator."""
    stamp = new_stamp(draft)
    for k in range(np.uint64(pools.config_first[config]), np.uint64(pools.config_last[config])):
        draft.piece[np.uint64(pools.entry_device[k])] = stamp


@lean
def compute(blocks: BlockTable, program: Program, pools: Pools, draft: Draft, config: Any, b: Any) -> None:
    """The computations of an operator's pieces in block ``b``. Gradients of weights are cast where that makes them, and
    added to those of earlier microbatches, unless each microbatch's are sent."""
    kind, halved = blocks.kind[b], blocks.halved[np.uint64(blocks.argument[b])] == 1
    summed = np.int64(1 if pools.config_sharding[config] >= GRADIENTS else program.microbatches[0])
    first = np.uint64(pools.config_first[config])
    for k in range(first, np.uint64(pools.config_last[config])):
        ticks: Any = pools.entry_forward[k]
        if kind == WEIGHT_GRADIENT:
            ticks = pools.entry_weight[k] + cast_ticks(pools.entry_cast[k], summed)
        elif kind == BACKWARD and halved:
            ticks = pools.entry_inputs[k]
        elif kind == BACKWARD:
            ticks = pools.entry_backward[k] + cast_ticks(pools.entry_cast[k], summed)
        device = np.uint64(pools.entry_device[k])
        add_step(draft, device, COMPUTE, b, k - first, ticks, np.int64(blocks.launches[b]) * blocks.launch[device])


@lean
def wait(
    blocks: BlockTable, program: Program, pools: Pools, state: State, draft: Draft, kind: Any, operator: Any
) -> None:
    """Wait for what the pieces of an operator read: operands, or gradients of its outputs. What was gathered again is
    waited for where it is first read again: in the recomputed forward pass if there is one, else in the backward."""
    if kind == (BACKWARD if is_late(blocks, program, operator) else FORWARD):
        _wait_for_operands(blocks, program, pools, state, draft, blocks.forward, state.forward, operator)
        _wait_for_operands(blocks, program, pools, state, draft, blocks.kept, state.kept, operator)
    if kind == FORWARD:
        return
    if kind != BACKWARD or blocks.recompute_of[operator] == NOTHING:
        _wait_for_operands(blocks, program, pools, state, draft, blocks.again, state.forward, operator)
    if kind == BACKWARD:
        for k in range(np.uint64(program.result_first[operator]), np.uint64(program.result_last[operator])):
            result = np.uint64(program.result[k])
            _wait_for(blocks, pools, draft, blocks.backward[result], state.backward, result)


@lean
def _wait_for_operands(
    blocks: BlockTable, program: Program, pools: Pools, state: State, draft: Draft, sources: U32, templates: U32,
    operator: Any,
) -> None:  # fmt: skip
    """Wait for operands, where the blocks ``sources`` (by slot) send them by ``templates``."""
    first, last = np.uint64(program.operand_first[operator]), np.uint64(program.operand_last[operator])
    for slot in range(first, last):
        if sources[slot] == NOTHING:
            continue
        leader = np.uint64(state.leader[slot])
        again = False
        for other in range(first, slot):
            again = again or np.uint64(state.leader[other]) == leader
        if not again:
            _wait_for(blocks, pools, draft, sources[leader], templates, leader)


@lean
def _wait_for(blocks: BlockTable, pools: Pools, draft: Draft, source: Any, templates: U32, slot: Any) -> None:
    """Wait for the reshard of a slot that block ``source`` sends, where it delivers to devices that hold a piece. An
    operator waits once for what brings several of its weights."""
    template = np.uint64(templates[slot])
    first, last = np.uint64(pools.reshard_first[template]), np.uint64(pools.reshard_last[template])
    if first == last:
        return
    row: Any = row_of(blocks, pools, templates, source, slot)
    stamp, groups = draft.stamp[0], draft.groups
    packed = is_gather(blocks.kind[source])
    if packed:
        draft.full[0] = collect_gathers(blocks, np.uint64(source), pools, templates, groups)
        if draft.full[0] == 1:
            return
    for x in range(first, last):
        number: Any = row
        if packed:
            number = np.uint64(groups.group[row])
            if groups.waited[number] == stamp:
                row += ONE
                continue
            groups.waited[number] = stamp
        for k in range(np.uint64(pools.receive_first[x]), np.uint64(pools.receive_last[x])):
            d = np.uint64(pools.receive[k])
            if draft.piece[d] == stamp:
                add_step(draft, d, WAIT, source, number, np.int64(0), np.int64(0))
        row += ONE


@lean
def row_of(blocks: BlockTable, pools: Pools, templates: U32, source: Any, slot: Any) -> Any:
    """Number within block ``source`` of the first exchange of a slot's reshard; its communication, too, unless the
    block gathers weights."""
    row = ZERO
    for k in range(np.uint64(blocks.sent_first[source]), np.uint64(blocks.sent_last[source])):
        other = np.uint64(blocks.sent[k])
        if other == slot:
            break
        template = np.uint64(templates[other])
        row += np.uint64(pools.reshard_last[template]) - np.uint64(pools.reshard_first[template])
    return row


@lean
def update(
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
                    add_step(draft, d, WAIT, source, c - first, np.int64(0), np.int64(0))
    row: Any = ZERO
    for e in range(np.uint64(state.stored_count.shape[0])):
        if state.stored_count[e] > ZERO:
            seconds = update_seconds(
                state.stored_bytes[e], state.stored_count[e], program.update_byte_s[e], program.update_tensor_s[e]
            )
            launches = np.int64(state.stored_count[e]) * np.int64(blocks.launches[b])
            add_step(draft, e, COMPUTE, b, row, ticks_of(seconds), launches * blocks.launch[e])
            row += ONE


# ---- communication


@lean
def send(
    blocks: BlockTable, pools: Pools, templates: U32, draft: Draft, segments: Segments, filled: Filled, b: Any
) -> None:  # fmt: skip
    """The reshards that a block sends, by slot ``templates``: of outputs or gradients of operands."""
    origin = filled.communication[0]
    for k in range(np.uint64(blocks.sent_first[b]), np.uint64(blocks.sent_last[b])):
        slot = np.uint64(blocks.sent[k])
        template = np.uint64(templates[slot])
        first, last = np.uint64(pools.reshard_first[template]), np.uint64(pools.reshard_last[template])
        if first < last:
            _reshard(blocks, pools, draft, segments, filled, b, origin, first, last, template)
            if draft.full[0] == 1:
                return


@lean
def _reshard(
    blocks: BlockTable, pools: Pools, draft: Draft, segments: Segments, filled: Filled, b: Any, origin: Any, first: Any,
    last: Any, template: Any,
) -> None:  # fmt: skip
    """Exchanges ``first`` to ``last``. Those of a second phase follow those of the first that deliver to their
    senders. ``origin``: the block's first communication."""
    middle, at = np.uint64(pools.reshard_middle[template]), filled.communication[0]
    if at + last - first > np.uint64(segments.missing.shape[0]):
        draft.full[0] = 1
        return
    for c in range(at, at + last - first):
        segments.missing[c] = 0
    for x in range(first, last):
        c = filled.communication[0]
        add_exchange(blocks, pools, draft, segments, filled, b, c - origin, x)
        if draft.full[0] == 1:
            return
        if x < middle < last:
            stamp = new_stamp(draft)
            for k in range(np.uint64(pools.receive_first[x]), np.uint64(pools.receive_last[x])):
                draft.mark[np.uint64(pools.receive[k])] = stamp
            for y in range(middle, last):
                if is_sent_by(pools, y, draft.mark, stamp):
                    segments.missing[at + y - first] += np.uint32(1)
                    if not add_follower(segments, filled, draft, b, at - origin + y - first):
                        return
        segments.follower_last[c] = filled.follower[0]


@lean
def gather(
    blocks: BlockTable, program: Program, pools: Pools, templates: U32, draft: Draft, segments: Segments,
    filled: Filled, b: Any,
) -> None:  # fmt: skip
    """The weights that a block gathers, by slot ``templates``."""
    origin, groups = filled.communication[0], draft.groups
    draft.full[0] = collect_gathers(blocks, b, pools, templates, groups)
    if draft.full[0] == 1:
        return
    for g in range(groups.counts[0]):
        _group(blocks, program, pools, draft, segments, filled, b, filled.communication[0] - origin, ZERO, g)
        if draft.full[0] == 1:
            return


# ---- synchronisation


@lean
def synchronise(
    blocks: BlockTable, program: Program, pools: Pools, state: State, draft: Draft, segments: Segments, filled: Filled,
    b: Any, n: Any,
) -> None:  # fmt: skip
    """Second phases of the bucket before, then first phases of the next one."""
    origin = filled.communication[0]
    for phase in range(2):
        bucket = blocks.starts[n] if phase == 1 else blocks.finishes[n]
        if bucket == NOTHING:
            continue
        of, groups = np.uint64(1 - phase), draft.groups
        draft.full[0] = collect(blocks, np.uint64(bucket), pools, state.plan, groups)
        if draft.full[0] == 1:
            return
        draft.full[0] = follow(pools, groups, draft.mark, draft.stamp)
        for g in range(groups.counts[of]):
            c = filled.communication[0]
            _group(blocks, program, pools, draft, segments, filled, b, c - origin, of, g)
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
    """Exchanges that go as one communication."""
    groups, c = draft.groups, filled.communication[0]
    if c == np.uint64(segments.missing.shape[0]):
        draft.full[0] = 1
        return
    segments.missing[c] = groups.follows[g] if phase == ONE else np.uint32(0)
    m = np.uint64(groups.head[phase, g])
    if groups.size[phase, g] == 1:
        add_exchange(blocks, pools, draft, segments, filled, b, row, np.uint64(groups.exchange[m]))
        return
    touched, seconds = merge(program, pools, groups, phase, g)
    resources, devices = np.uint64(groups.touched.shape[0]), np.uint64(draft.mark.shape[0])
    open_communication(segments, filled, draft, touched, resources, devices)
    if draft.full[0] == 1:
        return
    longest, once, often, most = 0.0, np.int64(0), np.int64(0), ONE
    for j in range(touched):
        r = np.uint64(groups.touched[j])
        longest, ticks = max(longest, groups.load[r]), ticks_of(groups.load[r])
        once, often = max(once, ticks), max(often, ticks * np.int64(groups.many[r]))
        most = max(most, np.uint64(groups.many[r]))
        add_link(segments, filled, r, ticks * np.int64(groups.many[r]))
    for j in range(merge_drags(program, pools, groups, phase, g)):
        r = np.uint64(groups.touched[j])
        add_drag(segments, filled, r, ticks_of(groups.load[r]))
    stamp = new_stamp(draft)
    for _ in range(np.uint64(groups.size[phase, g])):
        add_ends(blocks, pools, draft, segments, filled, b, c, row, np.uint64(groups.exchange[m]), stamp, stamp)
        m = np.uint64(groups.next[m])
    close(segments, filled, c, ticks_of(seconds) + often - once)
    one = np.uint64(groups.exchange[np.uint64(groups.head[phase, g])])
    members = np.uint64(pools.from_last[one]) - np.uint64(pools.from_first[one])
    segments.connection[c] = pools.connection[one]
    segments.turn[c] = turn_of(
        program.rates, program.bandwidth, np.uint64(pools.form[one]), members, most, segments.link,
        np.uint64(segments.link_first[c]), np.uint64(segments.link_last[c]), longest,
    )  # fmt: skip
