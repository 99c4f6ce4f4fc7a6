"""What follows for the templates of a plan when configs change, compiled: which edges readers share, the reshards on
them, the plans of weights. Templates are found by number (``keys``); what is not there yet is listed as missing.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from flexsearch.compiled import ONE, TWO, U8, U32, U64, ZERO, inlined, lean
from flexsearch.lower.arrays import STRIDE, Pools, Program, State
from flexsearch.lower.keys import HELD, LAYOUT, MISSING, PLAN, STEP, WEIGHT, Table, find
from flexsearch.packed import packed

ALWAYS = np.uint32(0xFFFFFFFE)
"""Slot without an operator: the loss, which goes everywhere."""


@packed
class Wiring(NamedTuple):
    """Which slots belong to which tensors; rows ``[first[i], last[i])`` of a list belong to item i."""

    slot_operator: U32
    slot_position: U32
    slot_tensor: U32
    slot_kind: U8  # 0: at hand; 1: an activation; 2: a weight; 3: a buffer
    tensor_producer: U32
    tensor_output: U32
    tensor_tag: U8
    tensor_first: U32  # readers' slots, in ``tensor_slot``
    tensor_last: U32
    tensor_slot: U32
    result_first: U32  # results' slots of a tensor, in ``result_slot``
    result_last: U32
    result_slot: U32
    result_buffer: U32  # by place in ``result_slot``: the buffer, or ALWAYS
    made_first: U32  # by operator: tensors that it makes
    made_last: U32
    buffer_first: U32  # by buffer: slots that read it, in ``buffer_slot``
    buffer_last: U32
    buffer_slot: U32
    buffer_result: U32  # by buffer: the tensor that replaces it, or MISSING
    everywhere: U32  # (1,): layout number of the loss
    forward_block: U32  # by operator
    backward_block: U32  # by operator; the forward one if there is no other
    gather_block: U32  # by weight
    sync_block: U32  # by weight
    weight_type: U32  # by weight: number of its dtype, by which weights share plans


@packed
class Change(NamedTuple):
    """Work arrays. ``operator``, ``config``: what a proposal changes, ``number`` ((1,)) of them. ``slot``, ``weight``:
    what it touched, ``touched`` ((2,)) of them. ``tensor_stamp``, ``weight_stamp``: tensors and weights that were done
    in this round (``round``, (1,)). ``missing``: rows (kind, a, b) of keys that were not found; ``lacking``: (1,) how
    many. ``begin``: (1,) first block that changes; ``changed``: by STRIDE of blocks, whether any of them does."""

    operator: U32
    config: U32
    number: U64
    slot: U32
    weight: U32
    touched: U64
    tensor_stamp: U64
    weight_stamp: U64
    round: U64
    missing: U64
    lacking: U64
    begin: U64
    changed: U8


MOST_MISSING = 4096
"""Keys that are noted as missing at a time."""


def empty_change(wiring: Wiring, operators: int, strides: int) -> Change:
    """Work arrays for so many operators, and STRIDEs of blocks."""
    weights, slots, tensors = len(wiring.gather_block), len(wiring.slot_operator), len(wiring.tensor_producer)
    return Change(
        operator=np.zeros(operators, np.uint32), config=np.zeros(operators, np.uint32), number=np.zeros(1, np.uint64),
        slot=np.zeros(slots, np.uint32), weight=np.zeros(weights, np.uint32), touched=np.zeros(2, np.uint64),
        tensor_stamp=np.zeros(tensors, np.uint64), weight_stamp=np.zeros(weights, np.uint64),
        round=np.zeros(1, np.uint64), missing=np.zeros((MOST_MISSING, 3), np.uint64), lacking=np.zeros(1, np.uint64),
        begin=np.zeros(1, np.uint64), changed=np.zeros(strides, np.uint8),
    )  # fmt: skip


@lean
def miss(change: Change, kind: Any, a: Any, b: Any) -> None:
    """Note a key that was not found."""
    at = np.uint64(change.lacking[0])
    if at < np.uint64(change.missing.shape[0]):
        change.missing[at, 0] = np.uint64(kind)
        change.missing[at, 1] = np.uint64(a)
        change.missing[at, 2] = np.uint64(b)
        change.lacking[0] = at + ONE


@inlined
def place(wiring: Wiring, program: Program, pools: Pools, state: State, change: Change) -> None:
    """Give the operators of a proposal their new configs. ``change.begin[0]`` becomes the first block that differs."""
    change.round[0] += ONE
    change.lacking[0] = ZERO
    change.touched[0] = ZERO
    change.touched[1] = ZERO
    change.begin[0] = np.uint64(program.kind.shape[0])
    change.changed[:] = 0
    for k in range(ZERO, np.uint64(change.number[0])):
        i = np.uint64(change.operator[k])
        old, new = np.uint64(state.config[i]), np.uint64(change.config[k])
        if old != new:
            state.config[i] = change.config[k]
            for d in range(np.uint64(state.held.shape[0])):
                state.held[d] += pools.config_held[new, d] - pools.config_held[old, d]
            forth = np.uint64(wiring.forward_block[i]) // np.uint64(STRIDE)
            back = np.uint64(wiring.backward_block[i]) // np.uint64(STRIDE)
            _mark(change, wiring.forward_block[i])
            _mark(change, wiring.backward_block[i])
            for e in range(np.uint64(pools.config_first[old]), np.uint64(pools.config_last[old])):
                _computes(pools, state, e, forth, back, -1)
            for e in range(np.uint64(pools.config_first[new]), np.uint64(pools.config_last[new])):
                _computes(pools, state, e, forth, back, 1)
            change.begin[0] = min(change.begin[0], np.uint64(wiring.forward_block[i]))


@lean
def _computes(pools: Pools, state: State, entry: Any, forth: Any, back: Any, sign: Any) -> None:
    """Account for what an operator computes on one device, in two STRIDEs of blocks."""
    d = np.uint64(pools.entry_device[entry])
    state.busy[d] += sign * (pools.entry_forward[entry] + pools.entry_backward[entry])
    state.stride_ticks[forth, d] += sign * pools.entry_forward[entry]
    state.stride_ticks[back, d] += sign * pools.entry_backward[entry]


@inlined
def wire(
    wiring: Wiring, program: Program, pools: Pools, table: Table, state: State, before: State, change: Change
) -> None:
    """Update edges and weights around the operators whose configs in ``state`` are not those in ``before``.

    If ``change.lacking[0]`` is not 0 afterwards, templates were missing and ``state`` is to be undone.
    """
    for k in range(ZERO, np.uint64(change.number[0])):
        i = np.uint64(change.operator[k])
        if state.config[i] == before.config[i]:
            continue
        first, made = np.uint64(program.operand_first[i]), np.uint64(wiring.made_first[i])
        operands = np.uint64(program.operand_last[i]) - first
        for j in range(operands + np.uint64(wiring.made_last[i]) - made):
            tensor = made + j - operands
            if j < operands:
                tensor = np.uint64(wiring.slot_tensor[first + j])
                if wiring.slot_kind[first + j] == 2:
                    _wire_weight(wiring, program, pools, table, state, before, change, tensor)
                    continue
                if wiring.slot_kind[first + j] == 3:
                    tensor = np.uint64(wiring.buffer_result[tensor])
                if wiring.slot_kind[first + j] == 0 or tensor == np.uint64(MISSING):
                    continue
            _wire_tensor(wiring, program, pools, table, state, before, change, tensor)


@lean
def carry_over(source: State, target: State, change: Change) -> None:
    """Make ``target`` equal to ``source``: they differ in nothing but what the last proposal touched."""
    for k in range(ZERO, np.uint64(change.number[0])):
        i = np.uint64(change.operator[k])
        target.config[i] = source.config[i]
    for c in range(np.uint64(change.changed.shape[0])):
        if change.changed[c] == 1:
            for d in range(np.uint64(source.held.shape[0])):
                target.stride_ticks[c, d] = source.stride_ticks[c, d]
            for r in range(np.uint64(source.load.shape[0])):
                target.stride_load[c, r] = source.stride_load[c, r]
    for k in range(ZERO, np.uint64(change.touched[0])):
        slot = np.uint64(change.slot[k])
        target.leader[slot] = source.leader[slot]
        target.need[slot] = source.need[slot]
        target.forward[slot] = source.forward[slot]
        target.backward[slot] = source.backward[slot]
    for k in range(ZERO, np.uint64(change.touched[1])):
        w = np.uint64(change.weight[k])
        target.plan[w] = source.plan[w]
    for d in range(np.uint64(source.held.shape[0])):
        target.held[d] = source.held[d]
        target.busy[d] = source.busy[d]
        target.stored_bytes[d] = source.stored_bytes[d]
        target.stored_count[d] = source.stored_count[d]
    for r in range(np.uint64(source.load.shape[0])):
        target.load[r] = source.load[r]


@lean
def _touch(change: Change, slot: Any) -> None:
    change.slot[np.uint64(change.touched[0])] = slot
    change.touched[0] += ONE


@lean
def _leading(program: Program, state: State, slots: U32, first: Any, k: Any, need: Any) -> Any:
    """The slot whose edge slot ``slots[k]`` shares: the first one, from ``first`` on, that wants the same layout."""
    slot = np.uint64(slots[k])
    for j in range(first, k):
        other = np.uint64(slots[j])
        if state.need[other] == need and program.flows[other] == program.flows[slot]:
            return np.uint64(state.leader[other])
    return slot


@lean
def _charge(pools: Pools, state: State, old: Any, new: Any, block: Any) -> None:
    """Account for a reshard that takes the place of another, sent by ``block``."""
    of_stride = state.stride_load[np.uint64(block) // np.uint64(STRIDE)]
    for template, sign in ((old, -1), (new, 1)):
        first, last = np.uint64(pools.reshard_first[template]), np.uint64(pools.reshard_last[template])
        if first < last:  # the links of its exchanges lie one after the other
            for k in range(np.uint64(pools.link_first[first]), np.uint64(pools.link_last[last - ONE])):
                r = np.uint64(pools.link[k])
                state.load[r] += sign * pools.link_ticks[k]
                of_stride[r] += sign * pools.link_ticks[k]


@lean
def need_of(wiring: Wiring, pools: Pools, state: State, slot: Any) -> Any:
    """Layout that a reader wants."""
    config = np.uint64(state.config[np.uint64(wiring.slot_operator[slot])])
    return pools.layout[np.uint64(pools.config_reads[config]) + np.uint64(wiring.slot_position[slot])]


@inlined
def _wire_tensor(
    wiring: Wiring, program: Program, pools: Pools, table: Table, state: State, before: State, change: Change, t: Any
) -> None:
    """Edges of an activation: readers that want the same layout share the first one's."""
    if change.tensor_stamp[t] == change.round[0]:
        return
    change.tensor_stamp[t] = change.round[0]
    producer = np.uint64(wiring.tensor_producer[t])
    config = np.uint64(state.config[producer])
    made = pools.layout[np.uint64(pools.config_writes[config]) + np.uint64(wiring.tensor_output[t])]
    tag = wiring.tensor_tag[t]
    first, last = np.uint64(wiring.tensor_first[t]), np.uint64(wiring.tensor_last[t])
    moved = returned = False
    for k in range(first, last):
        slot = np.uint64(wiring.tensor_slot[k])
        _touch(change, slot)
        need = need_of(wiring, pools, state, slot)
        leader = _leading(program, state, wiring.tensor_slot, first, k, need)
        state.leader[slot] = leader
        state.need[slot] = need
        forward = backward = np.uint32(0)
        if leader == slot:
            forward = find(table, tag, made, need)
            if forward == MISSING:
                miss(change, tag, made, need)
                continue
            if program.flows[slot] == 1:
                backward = find(table, tag, need, made)
                if backward == MISSING:
                    miss(change, tag, need, made)
                    continue
        _set(wiring, pools, state, slot, forward, backward, producer)
        moved = moved or forward != before.forward[slot] or state.leader[slot] != before.leader[slot]
        if backward != before.backward[slot]:
            returned = True
            _mark(change, wiring.backward_block[np.uint64(wiring.slot_operator[slot])])
    for k in range(np.uint64(wiring.result_first[t]), np.uint64(wiring.result_last[t])):
        slot = np.uint64(wiring.result_slot[k])
        _touch(change, slot)
        need = wiring.everywhere[0]
        if wiring.result_buffer[k] != ALWAYS:
            need = _kept(wiring, pools, table, state, change, np.uint64(wiring.result_buffer[k]))
            if need == MISSING:
                continue
        forward = find(table, tag, made, need)
        if forward == MISSING:
            miss(change, tag, made, need)
            continue
        _set(wiring, pools, state, slot, forward, np.uint32(0), producer)
        moved = moved or forward != before.forward[slot]
    if returned:
        _mark(change, wiring.backward_block[producer])
    if moved:
        change.begin[0] = min(change.begin[0], np.uint64(wiring.forward_block[producer]))
        _mark(change, wiring.forward_block[producer])
        for k in range(first, last):
            _mark(change, wiring.forward_block[np.uint64(wiring.slot_operator[np.uint64(wiring.tensor_slot[k])])])


@lean
def _mark(change: Change, block: Any) -> None:
    """A block changes."""
    change.changed[np.uint64(block) // np.uint64(STRIDE)] = 1


@inlined
def _set(wiring: Wiring, pools: Pools, state: State, slot: Any, forward: Any, backward: Any, producer: Any) -> None:
    """Give an edge other reshards; ``producer``: of its tensor."""
    old, back = np.uint64(state.forward[slot]), np.uint64(state.backward[slot])
    if old != np.uint64(forward) or back != np.uint64(backward):
        for d in range(np.uint64(state.held.shape[0])):
            state.held[d] += (
                pools.reshard_held[np.uint64(forward), d] - pools.reshard_held[old, d]
                + pools.reshard_held[np.uint64(backward), d] - pools.reshard_held[back, d]
            )  # fmt: skip
        _charge(pools, state, old, np.uint64(forward), wiring.forward_block[producer])
        if back != np.uint64(backward):
            reader = np.uint64(wiring.slot_operator[slot])
            _charge(pools, state, back, np.uint64(backward), wiring.backward_block[reader])
        state.forward[slot] = forward
        state.backward[slot] = backward


@inlined
def _kept(wiring: Wiring, pools: Pools, table: Table, state: State, change: Change, buffer: Any) -> Any:
    """Layout in which a buffer is kept: where its readers want it."""
    node = find(table, HELD, buffer, ZERO)
    if node == MISSING:
        miss(change, HELD, buffer, ZERO)
        return MISSING
    for k in range(np.uint64(wiring.buffer_first[buffer]), np.uint64(wiring.buffer_last[buffer])):
        need = need_of(wiring, pools, state, np.uint64(wiring.buffer_slot[k]))
        node = find(table, STEP, node, need)
        if node == MISSING:
            miss(change, HELD, buffer, ZERO)
            return MISSING
    layout = find(table, LAYOUT, node, ZERO)
    if layout == MISSING:
        miss(change, HELD, buffer, ZERO)
    return layout


@inlined
def _wire_weight(
    wiring: Wiring, program: Program, pools: Pools, table: Table, state: State, before: State, change: Change, w: Any
) -> None:
    """Edges, gathering and synchronisation of a weight."""
    if change.weight_stamp[w] == change.round[0]:
        return
    change.weight_stamp[w] = change.round[0]
    change.weight[np.uint64(change.touched[1])] = w
    change.touched[1] += ONE
    first, last = np.uint64(program.reader_first[w]), np.uint64(program.reader_last[w])
    shard = ZERO
    for k in range(first, last):
        slot = np.uint64(program.reader[k])
        config = np.uint64(state.config[np.uint64(wiring.slot_operator[slot])])
        if pools.config_shard[config] == 1:
            shard = ONE
    node = find(table, WEIGHT, wiring.weight_type[w], shard)
    for k in range(first, last):
        slot = np.uint64(program.reader[k])
        _touch(change, slot)
        need = need_of(wiring, pools, state, slot)
        leader = _leading(program, state, program.reader, first, k, need)
        state.leader[slot] = leader
        state.need[slot] = need
        if leader == slot and node != MISSING:
            node = find(table, STEP, node, np.uint64(need) * TWO + np.uint64(program.flows[slot]))
    plan = find(table, PLAN, node, ZERO) if node != MISSING else MISSING
    if plan == MISSING:
        miss(change, WEIGHT, w, shard)
        return
    p, old = np.uint64(plan), np.uint64(state.plan[w])
    at = np.uint64(pools.plan_gather[p])
    moved = False
    for k in range(first, last):
        slot = np.uint64(program.reader[k])
        gather = np.uint32(0)
        if state.leader[slot] == slot:
            gather = pools.gather[at]
            at += ONE
        _charge(pools, state, np.uint64(state.forward[slot]), np.uint64(gather), wiring.gather_block[w])
        state.forward[slot] = gather
        moved = moved or gather != before.forward[slot] or state.leader[slot] != before.leader[slot]
    if moved:
        change.begin[0] = min(change.begin[0], np.uint64(wiring.gather_block[w]))
        _mark(change, wiring.gather_block[w])
        for k in range(first, last):
            _mark(change, wiring.forward_block[np.uint64(wiring.slot_operator[np.uint64(program.reader[k])])])
    if p != old:
        _mark(change, wiring.sync_block[w])
        for k in range(np.uint64(pools.store_first[old]), np.uint64(pools.store_last[old])):
            state.stored_bytes[np.uint64(pools.store_device[k])] -= pools.store_bytes[k]
            state.stored_count[np.uint64(pools.store_device[k])] -= ONE
        for k in range(np.uint64(pools.store_first[p]), np.uint64(pools.store_last[p])):
            state.stored_bytes[np.uint64(pools.store_device[k])] += pools.store_bytes[k]
            state.stored_count[np.uint64(pools.store_device[k])] += ONE
        for d in range(np.uint64(state.held.shape[0])):
            state.held[d] += pools.plan_held[p, d] - pools.plan_held[old, d]
        _charge(pools, state, np.uint64(pools.plan_sync[old]), np.uint64(pools.plan_sync[p]), wiring.sync_block[w])
        state.plan[w] = plan
