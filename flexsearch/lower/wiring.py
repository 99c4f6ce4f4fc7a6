"""What follows for the templates of a plan when configs change, compiled: which edges readers share, the reshards on
them, the plans of weights. Templates are found by number (``keys``); what is not there yet is listed as missing.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flexsearch.compiled import ONE, U32, ZERO, lean
from flexsearch.graph import Flow
from flexsearch.lower.arrays import NOTHING, BlockTable, Pools, Program, State
from flexsearch.lower.bucket import find_bucket
from flexsearch.lower.change import ALWAYS, Change, Wiring, mark, mark_readers, miss, sends
from flexsearch.lower.keys import HELD, LAYOUT, MISSING, PLAN, STEP, WEIGHT, Table, find
from flexsearch.strategy import OVER_ALL, States

_WEIGHTS = np.uint32(States.WEIGHTS * OVER_ALL)
VALUE, GRADIENT = np.uint8(Flow.VALUE), np.uint8(Flow.GRADIENT)
FLOWS: Any = np.uint64(len(Flow))


@lean
def place(blocks: BlockTable, pools: Pools, state: State, change: Change) -> None:
    """Give the operators of a proposal their new configs."""
    change.round[0] += ONE
    change.lacking[0] = change.blocks[0] = change.sources[0] = ZERO
    change.touched[0] = ZERO
    change.touched[1] = ZERO
    for k in range(ZERO, np.uint64(change.number[0])):
        i = np.uint64(change.operator[k])
        old, new = np.uint64(state.config[i]), np.uint64(change.config[k])
        if old != new:
            state.config[i] = change.config[k]
            mark(change, blocks.forward_of[i])
            mark(change, blocks.backward_of[i])
            mark(change, blocks.weight_of[i])
            mark(change, blocks.recompute_of[i])
            mark(change, blocks.read_of[i])
            twice = blocks.recompute_of[i] != NOTHING
            for e in range(np.uint64(pools.config_first[old]), np.uint64(pools.config_last[old])):
                _compute(pools, state, e, twice, -1)
            for e in range(np.uint64(pools.config_first[new]), np.uint64(pools.config_last[new])):
                _compute(pools, state, e, twice, 1)


@lean
def _compute(pools: Pools, state: State, entry: Any, twice: Any, sign: Any) -> None:
    """Account for what an operator computes on one device; ``twice``: its forward pass is computed again."""
    d = np.uint64(pools.entry_device[entry])
    state.busy[d] += sign * (pools.entry_forward[entry] + pools.entry_backward[entry])
    if twice:
        state.busy[d] += sign * pools.entry_forward[entry]


@lean
def wire(
    wiring: Wiring, blocks: BlockTable, program: Program, pools: Pools, table: Table, state: State, before: State,
    change: Change,
) -> None:  # fmt: skip
    """Update edges and weights around the operators whose configs in ``state`` are not those in ``before``, and mark
    the blocks whose rows change.

    If ``change.lacking[0]`` is not 0 afterwards, templates were missing (they count as empty) and ``state`` is to be
    undone.
    """
    for k in range(ZERO, np.uint64(change.number[0])):
        i = np.uint64(change.operator[k])
        if state.config[i] == before.config[i]:
            continue
        first, first_output = np.uint64(program.operand_first[i]), np.uint64(wiring.output_first[i])
        operands = np.uint64(program.operand_last[i]) - first
        for j in range(operands + np.uint64(wiring.output_last[i]) - first_output):
            tensor = first_output + j - operands
            if j < operands:
                tensor = np.uint64(wiring.slot_tensor[first + j])
                if wiring.slot_kind[first + j] == 2:
                    _wire_weight(wiring, blocks, program, pools, table, state, before, change, tensor)
                    continue
                if wiring.slot_kind[first + j] == 3:
                    tensor = np.uint64(wiring.buffer_result[tensor])
                if wiring.slot_kind[first + j] == 0 or tensor == np.uint64(MISSING):
                    continue
            _wire_tensor(wiring, blocks, program, pools, table, state, before, change, tensor)
    if change.lacking[0] == ZERO:
        for k in range(change.sources[0]):
            mark_readers(wiring, blocks, program, pools, state, before, change, np.uint64(change.source[k]))


@lean
def carry_over(source: State, target: State, change: Change) -> None:
    """Make ``target`` equal to ``source``: they differ in nothing but what the last proposal touched."""
    for k in range(ZERO, np.uint64(change.number[0])):
        i = np.uint64(change.operator[k])
        target.config[i] = source.config[i]
    for k in range(ZERO, np.uint64(change.touched[0])):
        slot = np.uint64(change.slot[k])
        target.leader[slot] = source.leader[slot]
        target.need[slot] = source.need[slot]
        target.forward[slot] = source.forward[slot]
        target.backward[slot] = source.backward[slot]
        target.kept[slot] = source.kept[slot]
    for k in range(ZERO, np.uint64(change.touched[1])):
        w = np.uint64(change.weight[k])
        target.plan[w] = source.plan[w]
    for d in range(np.uint64(source.busy.shape[0])):
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
def charge(pools: Pools, state: State, old: Any, new: Any, alone: Any) -> None:
    """Account for a reshard that takes the place of another. ``alone``: its exchanges are communications of their own;
    else they may go together with others."""
    for template, sign in ((old, -1), (new, 1)):
        for x in range(np.uint64(pools.reshard_first[template]), np.uint64(pools.reshard_last[template])):
            for k in range(np.uint64(pools.link_first[x]), np.uint64(pools.link_last[x])):
                ticks = min(pools.link_ticks[k], pools.duration[x]) if alone else pools.link_least[k]
                state.load[np.uint64(pools.link[k])] += sign * ticks


@lean
def need_of(wiring: Wiring, pools: Pools, state: State, slot: Any) -> Any:
    """Layout that a reader wants."""
    config = np.uint64(state.config[np.uint64(wiring.slot_operator[slot])])
    return pools.layout[np.uint64(pools.config_reads[config]) + np.uint64(wiring.slot_position[slot])]


@lean
def _wire_tensor(
    wiring: Wiring, blocks: BlockTable, program: Program, pools: Pools, table: Table, state: State, before: State,
    change: Change, t: Any,
) -> None:  # fmt: skip
    """Edges of an activation: readers that want the same layout share the first one's."""
    if change.tensor_stamp[t] == change.round[0]:
        return
    change.tensor_stamp[t] = change.round[0]
    producer = np.uint64(wiring.tensor_producer[t])
    config = np.uint64(state.config[producer])
    written = pools.layout[np.uint64(pools.config_writes[config]) + np.uint64(wiring.tensor_output[t])]
    tag = wiring.tensor_tag[t]
    first, last = np.uint64(wiring.tensor_first[t]), np.uint64(wiring.tensor_last[t])
    for k in range(first, last):
        slot = np.uint64(wiring.tensor_slot[k])
        _touch(change, slot)
        need = need_of(wiring, pools, state, slot)
        leader = _leading(program, state, wiring.tensor_slot, first, k, need)
        state.leader[slot] = leader
        state.need[slot] = need
        forward = backward = np.uint32(0)
        if leader == slot:
            if program.flows[slot] != GRADIENT:
                forward = _reshard(table, change, tag, written, need)
            if program.flows[slot] != VALUE:
                backward = _reshard(table, change, tag, need, written)
        _set(blocks, pools, state, before, change, slot, forward, backward)
    for k in range(np.uint64(wiring.result_first[t]), np.uint64(wiring.result_last[t])):
        slot = np.uint64(wiring.result_slot[k])
        _touch(change, slot)
        need = wiring.result_need[k]
        if wiring.result_buffer[k] != ALWAYS:
            need = _kept(wiring, pools, table, state, change, np.uint64(wiring.result_buffer[k]))
        forward = _reshard(table, change, tag, written, need) if need != MISSING else np.uint32(0)
        _set(blocks, pools, state, before, change, slot, forward, np.uint32(0))


@lean
def _reshard(table: Table, change: Change, tag: Any, source: Any, destination: Any) -> Any:
    """The reshard between two layouts; if it is missing the empty one, so that loads are too low and not too high."""
    reshard = find(table, tag, source, destination)
    if reshard == MISSING:
        miss(change, tag, source, destination)
        reshard = np.uint32(0)
    return reshard


@lean
def _set(
    blocks: BlockTable, pools: Pools, state: State, before: State, change: Change, slot: Any, forward: Any,
    backward: Any,
) -> None:  # fmt: skip
    """Give an edge other reshards."""
    old, back = np.uint64(state.forward[slot]), np.uint64(state.backward[slot])
    if old != np.uint64(forward) or back != np.uint64(backward):
        if old != np.uint64(forward):
            charge(pools, state, old, np.uint64(forward), True)
        if back != np.uint64(backward):
            charge(pools, state, back, np.uint64(backward), True)
        state.forward[slot] = forward
        state.backward[slot] = backward
    if forward != before.forward[slot] or state.leader[slot] != before.leader[slot]:
        sends(change, blocks.forward[slot])
        sends(change, blocks.again[slot])
    if backward != before.backward[slot]:
        sends(change, blocks.backward[slot])


@lean
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


@lean
def typed(wiring: Wiring, program: Program, w: Any) -> Any:
    """A weight's dtype and how its gradients are summed, as a key."""
    return program.sums[0] << np.uint64(8) | np.uint64(wiring.weight_type[w])


@lean
def _wire_weight(
    wiring: Wiring, blocks: BlockTable, program: Program, pools: Pools, table: Table, state: State, before: State,
    change: Change, w: Any,
) -> None:  # fmt: skip
    """Edges, gathering and synchronisation of a weight."""
    if change.weight_stamp[w] == change.round[0]:
        return
    change.weight_stamp[w] = change.round[0]
    change.weight[np.uint64(change.touched[1])] = w
    change.touched[1] += ONE
    first, last = np.uint64(program.reader_first[w]), np.uint64(program.reader_last[w])
    sharding = ZERO
    for k in range(first, last):
        slot = np.uint64(program.reader[k])
        config = np.uint64(state.config[np.uint64(wiring.slot_operator[slot])])
        sharding = max(sharding, np.uint64(pools.config_sharding[config]))
    node = find(table, WEIGHT, typed(wiring, program, w), sharding)
    for k in range(first, last):
        slot = np.uint64(program.reader[k])
        _touch(change, slot)
        need = need_of(wiring, pools, state, slot)
        leader = _leading(program, state, program.reader, first, k, need)
        state.leader[slot] = leader
        state.need[slot] = need
        if leader == slot and node != MISSING:
            node = find(table, STEP, node, np.uint64(need) * FLOWS + np.uint64(program.flows[slot]))
    plan = find(table, PLAN, node, ZERO) if node != MISSING else MISSING
    p, old = np.uint64(plan), np.uint64(state.plan[w])
    if plan == MISSING:  # as in ``_reshard``
        miss(change, WEIGHT, w, sharding)
        p = ZERO
    at = np.uint64(pools.plan_gather[p])
    once = blocks.gather_once_of[w] != NOTHING and pools.plan_sharding[p] < _WEIGHTS
    for k in range(first, last):
        slot = np.uint64(program.reader[k])
        gather = np.uint32(0)
        if state.leader[slot] == slot and p > ZERO:
            gather = pools.gather[at]
            at += ONE
        kept = gather if once else np.uint32(0)
        gather = np.uint32(0) if once else gather
        charge(pools, state, np.uint64(state.forward[slot]), np.uint64(gather), False)
        charge(pools, state, np.uint64(state.kept[slot]), np.uint64(kept), False)
        state.forward[slot], state.kept[slot] = gather, kept
        led = state.leader[slot] != before.leader[slot]
        if gather != before.forward[slot] or led:
            sends(change, blocks.gather_of[w])
            sends(change, blocks.regather_of[w])
        if kept != before.kept[slot] or led:
            sends(change, blocks.gather_once_of[w])
    if p != old:
        _replace(blocks, pools, state, change, w, old, p)


@lean
def _replace(blocks: BlockTable, pools: Pools, state: State, change: Change, w: Any, old: Any, new: Any) -> None:
    """Give a weight another plan of storage and synchronisation."""
    before, after = np.uint64(pools.plan_sync[old]), np.uint64(pools.plan_sync[new])
    if blocks.bucket[w] != NOTHING:
        for p, sync in ((old, before), (new, after)):
            bucket = np.uint64(find_bucket(blocks, pools.plan_sharding[p], w))
            mark(change, blocks.started_by[bucket])
            if pools.reshard_middle[sync] < pools.reshard_last[sync]:
                mark(change, blocks.finished_by[bucket])
        mark(change, blocks.kind.shape[0] - 1)  # the update
    if pools.plan_sync[old] != 0:  # else it is not trained
        for k in range(np.uint64(pools.store_first[old]), np.uint64(pools.store_last[old])):
            state.stored_bytes[np.uint64(pools.store_device[k])] -= pools.store_bytes[k]
            state.stored_count[np.uint64(pools.store_device[k])] -= ONE
    if pools.plan_sync[new] != 0:
        for k in range(np.uint64(pools.store_first[new]), np.uint64(pools.store_last[new])):
            state.stored_bytes[np.uint64(pools.store_device[k])] += pools.store_bytes[k]
            state.stored_count[np.uint64(pools.store_device[k])] += ONE
    charge(pools, state, before, after, False)
    state.plan[w] = new
