"""One pass over a plan made of templates, in the order of its task graph, compiled.

A plan is a template for each operator (its config), each edge (a reshard) and each weight (its synchronisation); the
order of the blocks follows from the graph alone. The pass keeps the moments at which devices and links become free and
at which data arrives, and needs no list of tasks: a task's start is a maximum over a few of these.

**When that is exact.** The event-driven simulation (``kernel.run``) takes tasks by (ready time, index). A task's start
depends only on the tasks before it that share a resource. What a device computes comes in the order of the index
anyway; exchanges are held back until somebody needs them (``flight``) and taken by (ready time, index). So the pass
gives the same bits as long as on every resource that order never goes back, which it watches. Where it does (or where
devices take turns on a shared processor), the pass is repeated to write the task graph down, and ``kernel.run`` times
that.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flexsearch.compiled import ONE, TWO, U8, ZERO, inlined, lean
from flexsearch.cost.compute import update_seconds
from flexsearch.cost.ticks import TICK
from flexsearch.lower.arrays import (
    BACKWARD,
    FORWARD,
    GATHER,
    NOTHING,
    RECORD,
    SECOND,
    STRIDE,
    SYNCHRONISE,
    TIME,
    WRITE,
    Pools,
    Program,
    State,
    Tasks,
    Work,
)  # fmt: skip
from flexsearch.simulate.checkpoint import restore, save
from flexsearch.simulate.flight import (
    base_of,
    later,
    merge,
    merge_drags,
    new_row,
    push,
    record,
    send,
    sent_at,
    take,
    version_of,
)
from flexsearch.simulate.skip import ahead
from flexsearch.simulate.write import (
    after,
    after_device,
    fits,
    go_on,
    goes_on,
    note_all,
    start,
    write_compute,
    write_drag,
    write_exchange,
    write_link,
    write_reshard,
    write_task,
)


@inlined
def walk(
    program: Program, pools: Pools, state: State, work: Work, tasks: Tasks, first: Any, mode: Any, limit: float,
    changed: U8, skips: Any,
) -> Any:  # fmt: skip
    """Makespan (s) of the plan, from the last checkpoint before block ``first`` on. ``work.broken[0]`` is 1 afterwards
    if the result is void. In mode WRITE: fills ``tasks`` from the beginning and returns 0; -1 if ``tasks`` is too
    small. In mode TIME: infinity as soon as it is certain that the makespan is above ``limit`` (s). If ``skips``: there
    is a plan at hand with checkpoints, from which this one differs only in the STRIDEs of blocks that are ``changed``;
    others may be skipped."""
    slots = np.uint64(program.flows.shape[0])
    if mode == WRITE:
        start(tasks)
    b: Any = restore(program, work, first)
    _set_rest(state, work, b // np.uint64(STRIDE))
    while b < np.uint64(program.kind.shape[0]):
        kind, argument = program.kind[b], np.uint64(program.argument[b])
        if mode != WRITE:
            mark = b % np.uint64(STRIDE) == ZERO
            until = _until(program, state, work, kind, mark)
            while work.flying[0] > ZERO and (
                work.heap_ready[0] <= until or _waits(program, state, work, kind, argument, slots)
            ):
                take(program, pools, state.plan, work, mode)
            if work.broken[0] == 1 and mode == TIME:
                return 0.0
            if mark:
                c = b // np.uint64(STRIDE)
                save(program, pools, state, work, c)
                if mode == TIME:
                    if _too_late(work, limit):
                        return np.inf
                    to: Any = ahead(program, work, changed, c) if skips else c
                    _pass_by(state, work, c, max(to, c + ONE))
                    if to > c:
                        b = to * np.uint64(STRIDE)
                        continue
        if kind <= BACKWARD:
            # One loop for all three, and one call of each helper: every further call is compiled in anew.
            forward = kind != BACKWARD
            if kind == GATHER:
                k, last = np.uint64(program.reader_first[argument]), np.uint64(program.reader_last[argument])
            else:
                _compute(program, pools, state, work, tasks, argument, forward, mode)
                if forward:
                    k, last = np.uint64(program.result_first[argument]), np.uint64(program.result_last[argument])
                else:
                    k, last = np.uint64(program.operand_first[argument]), np.uint64(program.operand_last[argument])
            while k < last:
                slot, row = k, slots + k
                if kind == GATHER:
                    slot = np.uint64(program.reader[k])
                elif forward:
                    slot = np.uint64(program.result[k])
                template = state.backward[slot]
                if forward:
                    template, row = state.forward[slot], slot
                if _moves(pools, template) and mode == WRITE:
                    write_reshard(pools, tasks, np.uint64(template), row)
                elif _moves(pools, template):
                    send(pools, work, np.uint64(template), row)
                k += ONE
        elif kind == SYNCHRONISE:
            _synchronise(program, pools, state, work, tasks, argument, mode)
        elif kind == SECOND:
            _second(program, pools, state, work, tasks, mode)
        else:
            _update(program, state, work, tasks, mode)
        b += ONE
    if mode == WRITE and not fits(tasks):
        return -1.0
    makespan = work.moment[0]
    for d in range(np.uint64(program.processor.shape[0])):
        makespan = max(makespan, work.last[d])
    return makespan


@inlined
def _until(program: Program, state: State, work: Work, kind: Any, mark: Any) -> Any:
    """Exchanges that are ready up to this moment (s) are given their times before a block. Where they take time from
    processors, that is all that have been sent; at a checkpoint, all that nothing can come before."""
    if kind >= SECOND or program.scalars[2] > 0.0:
        return np.inf
    if not mark or work.flying[0] == ZERO:
        return -1.0
    behind = np.inf
    for d in range(np.uint64(state.busy.shape[0])):
        if state.busy[d] > 0:
            behind = min(behind, work.last[d])
    return behind


@inlined
def _waits(program: Program, state: State, work: Work, kind: Any, operator: Any, slots: Any) -> Any:
    """Whether a block needs something that is in flight."""
    if kind == FORWARD:
        for j in range(np.uint64(program.operand_first[operator]), np.uint64(program.operand_last[operator])):
            if work.left[np.uint64(state.leader[j])] > 0:
                return True
    elif kind == BACKWARD:
        for j in range(np.uint64(program.result_first[operator]), np.uint64(program.result_last[operator])):
            if work.left[slots + np.uint64(program.result[j])] > 0:
                return True
    return False


@inlined
def _set_rest(state: State, work: Work, c: Any) -> None:
    """What each device has to compute, and each resource to carry, for blocks from checkpoint ``c`` on."""
    for d in range(np.uint64(work.rest.shape[0])):
        work.rest[d] = state.busy[d]
    for r in range(np.uint64(work.rest_load.shape[0])):
        work.rest_load[r] = state.load[r]
    _pass_by(state, work, ZERO, c)


@lean
def _pass_by(state: State, work: Work, first: Any, last: Any) -> None:
    """The blocks from checkpoint ``first`` to ``last`` are no longer to come."""
    for k in range(first, last):
        for d in range(np.uint64(work.rest.shape[0])):
            work.rest[d] -= state.stride_ticks[k, d]
        for r in range(np.uint64(work.rest_load.shape[0])):
            work.rest_load[r] -= state.stride_load[k, r]


@inlined
def _too_late(work: Work, limit: float) -> Any:
    """Whether the makespan is certainly above ``limit`` (s): some device still has too much to compute, or some
    resource too much to carry."""
    for d in range(np.uint64(work.rest.shape[0])):
        if work.last[d] + float(work.rest[d]) * TICK > limit:
            return True
    for r in range(np.uint64(work.rest_load.shape[0])):
        if work.free[r] + float(work.rest_load[r]) * TICK > limit:
            return True
    return False


@lean
def _moves(pools: Pools, template: Any) -> Any:
    """Whether anything crosses devices."""
    return pools.reshard_first[np.uint64(template)] < pools.reshard_last[np.uint64(template)]


@inlined
def _compute(
    program: Program, pools: Pools, state: State, work: Work, tasks: Tasks, operator: Any, forward: Any, mode: Any,
) -> None:  # fmt: skip
    """The forward or backward tasks of an operator on its devices."""
    config = np.uint64(state.config[operator])
    slots = np.uint64(program.flows.shape[0])
    first, last = np.uint64(pools.config_first[config]), np.uint64(pools.config_last[config])
    if forward:
        low, high = np.uint64(program.operand_first[operator]), np.uint64(program.operand_last[operator])
    else:
        low, high = np.uint64(program.result_first[operator]), np.uint64(program.result_last[operator])
    shared = program.scalars[2] > 0.0
    waits = False
    for j in range(low, high):
        waits = waits or _source(program, pools, state, j, forward, slots) != np.uint64(NOTHING)
    work.moment[1] += float(last - first)
    if mode == TIME and not waits and not shared:  # most blocks: every device just goes on
        if forward:
            for k in range(first, last):
                work.last[np.uint64(pools.entry_device[k])] += pools.entry_forward_s[k]
        else:
            for k in range(first, last):
                work.last[np.uint64(pools.entry_device[k])] += pools.entry_backward_s[k]
        return
    if mode == WRITE:
        for k in range(first, last):
            d = np.uint64(pools.entry_device[k])
            seconds = pools.entry_forward_s[k] if forward else pools.entry_backward_s[k]
            if not waits and goes_on(tasks, d):
                go_on(tasks, d, seconds)
                continue
            arrivals = tasks.written[1]
            for j in range(low, high):
                row = _source(program, pools, state, j, forward, slots)
                if row != np.uint64(NOTHING):
                    after(tasks, tasks.head[row, d])
            if arrivals == tasks.written[1] and goes_on(tasks, d):
                go_on(tasks, d, seconds)
            else:
                write_compute(program, tasks, d, seconds)
        return
    # Ready times first: a row at a time, each a plain loop over the devices.
    for k in range(first, last):
        d = np.uint64(pools.entry_device[k])
        work.middle[d] = work.last[d]
    for j in range(low, high):
        row = _source(program, pools, state, j, forward, slots)
        if row != np.uint64(NOTHING):
            arrived, base = work.arrived[version_of(work, row), row], base_of(program, work, row)
            for k in range(first, last):
                d = np.uint64(pools.entry_device[k])
                work.middle[d] = max(work.middle[d], later(arrived[d], base))
    for k in range(first, last):
        d = np.uint64(pools.entry_device[k])
        begin = work.middle[d]
        seconds = pools.entry_forward_s[k] if forward else pools.entry_backward_s[k]
        if shared:
            p = np.uint64(program.processor[d])
            if begin < work.seen[p]:
                work.broken[0] = 1
            work.seen[p] = begin
            work.order[p] = work.moment[1] - float(last - k)
            begin = max(begin, work.free[p])
            work.free[p] = begin + seconds
        finish = begin + seconds
        work.last[d] = finish
        if mode == RECORD:
            record(work, work.moment[1] - float(last - k), begin, finish)


@lean
def _source(program: Program, pools: Pools, state: State, j: Any, forward: Any, slots: Any) -> Any:
    """Row of what an operand (forward) or a reader's gradient (backward) arrives in, or NOTHING."""
    if forward:
        leader = np.uint64(state.leader[j])
        return leader if _moves(pools, state.forward[leader]) else np.uint64(NOTHING)
    slot = np.uint64(program.result[j])
    if _moves(pools, state.backward[slot]):
        return slots + slot
    return np.uint64(NOTHING)


@inlined
def _synchronise(
    program: Program, pools: Pools, state: State, work: Work, tasks: Tasks, bucket: Any, mode: Any
) -> None:
    """The first phases of a bucket's weights: exchanges of the same key as one task."""
    slots, rows = np.uint64(program.flows.shape[0]), np.uint64(work.left.shape[0])
    lead, last = np.uint64(program.bucket_first[bucket]), np.uint64(program.bucket_last[bucket])
    work.fresh[rows + bucket] = 1
    v = version_of(work, rows + bucket)
    first: Any = lead * np.uint64(program.scalars[3])
    groups = members = first
    for k in range(lead, last):
        w = np.uint64(program.member[k])
        t = np.uint64(pools.plan_sync[np.uint64(state.plan[w])])
        if pools.reshard_middle[t] < pools.reshard_last[t]:
            if mode == WRITE:
                tasks.head[TWO * slots + w, :] = NOTHING
            else:
                new_row(work, TWO * slots + w)
        for x in range(np.uint64(pools.reshard_first[t]), np.uint64(pools.reshard_middle[t])):
            g = first
            while g < groups and work.group_key[v, g] != pools.key[x]:
                g += ONE
            if g == groups:
                work.group_key[v, g] = pools.key[x]
                work.group_head[v, g] = members
                work.group_size[v, g] = 0
                groups += ONE
            else:
                work.member_next[v, np.uint64(work.group_tail[v, g])] = members
            work.group_tail[v, g] = members
            work.group_size[v, g] += np.uint32(1)
            work.member_exchange[v, members] = x
            work.member_weight[v, members] = w
            members += ONE
    for g in range(first, groups):
        if mode == WRITE:
            _write_group(program, pools, state, work, tasks, v, g)
            continue
        m, ready = np.uint64(work.group_head[v, g]), 0.0
        for _ in range(np.uint64(work.group_size[v, g])):
            ready = max(ready, sent_at(pools, work, np.uint64(work.member_exchange[v, m])))
            m = np.uint64(work.member_next[v, m])
        push(work, ready, g, rows + bucket)


@lean
def _write_group(program: Program, pools: Pools, state: State, work: Work, tasks: Tasks, v: Any, g: Any) -> None:
    """Write the task down that several exchanges of a bucket are together."""
    m = np.uint64(work.group_head[v, g])
    if work.group_size[v, g] == 1:
        write_exchange(pools, tasks, np.uint64(work.member_exchange[v, m]), tasks.middle, False)
    else:
        for _ in range(np.uint64(work.group_size[v, g])):
            x = np.uint64(work.member_exchange[v, m])
            for k in range(np.uint64(pools.send_first[x]), np.uint64(pools.send_last[x])):
                after_device(tasks, np.uint64(pools.send[k]))
            m = np.uint64(work.member_next[v, m])
        touched, duration = merge(program, pools, work, v, g)
        for j in range(ZERO, touched):
            r = np.uint64(work.touched[j])
            write_link(tasks, r, work.load[r])
            work.load[r] = 0.0
        for j in range(ZERO, merge_drags(program, pools, work, v, g)):
            r = np.uint64(work.touched[j])
            write_drag(tasks, r, work.load[r])
            work.load[r] = 0.0
        write_task(tasks, duration, np.inf)
    m = np.uint64(work.group_head[v, g])
    for _ in range(np.uint64(work.group_size[v, g])):
        x, w = np.uint64(work.member_exchange[v, m]), np.uint64(work.member_weight[v, m])
        note_all(pools, tasks, x, tasks.synced)
        t = np.uint64(pools.plan_sync[np.uint64(state.plan[w])])
        if pools.reshard_middle[t] < pools.reshard_last[t]:
            note_all(pools, tasks, x, tasks.head[TWO * np.uint64(program.flows.shape[0]) + w])
        m = np.uint64(work.member_next[v, m])


@inlined
def _second(program: Program, pools: Pools, state: State, work: Work, tasks: Tasks, mode: Any) -> None:
    """The second phases of all synchronisations."""
    slots = np.uint64(program.flows.shape[0])
    synced = np.uint64(work.left.shape[0]) + np.uint64(program.bucket_first.shape[0])  # in the place of a row
    for k in range(np.uint64(program.member.shape[0])):
        w = np.uint64(program.member[k])
        t = np.uint64(pools.plan_sync[np.uint64(state.plan[w])])
        row = TWO * slots + w
        for x in range(np.uint64(pools.reshard_middle[t]), np.uint64(pools.reshard_last[t])):
            if mode == WRITE:
                write_exchange(pools, tasks, x, tasks.head[row], True)
                note_all(pools, tasks, x, tasks.synced)
                continue
            arrived, ready = work.arrived[version_of(work, row), row], sent_at(pools, work, x)
            for j in range(np.uint64(pools.send_first[x]), np.uint64(pools.send_last[x])):
                ready = max(ready, later(arrived[np.uint64(pools.send[j])], base_of(program, work, row)))
            push(work, ready, x, synced)


@inlined
def _update(program: Program, state: State, work: Work, tasks: Tasks, mode: Any) -> None:
    shared = program.scalars[2] > 0.0
    for d in range(np.uint64(program.processor.shape[0])):
        if state.stored_count[d] == 0:
            continue
        seconds = update_seconds(
            state.stored_bytes[d], state.stored_count[d], program.update_byte_s[d], program.update_tensor_s[d]
        )
        if mode == WRITE:
            after(tasks, tasks.synced[d])
            write_compute(program, tasks, d, seconds)
            continue
        begin = max(work.last[d], work.synced[d])
        if shared:
            p = np.uint64(program.processor[d])
            if begin < work.seen[p]:
                work.broken[0] = 1
            work.seen[p] = begin
            work.order[p] = work.moment[1]
            begin = max(begin, work.free[p])
            work.free[p] = begin + seconds
        work.last[d] = begin + seconds
        if mode == RECORD:
            record(work, work.moment[1], begin, begin + seconds)
        work.moment[1] += 1.0
