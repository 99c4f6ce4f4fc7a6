"""One pass over a plan made of templates, in the order of its task graph, compiled.

A plan is a template for each operator (its config), each edge (a reshard) and each weight (its synchronisation); the
order of the blocks follows from the graph alone. The pass keeps the moments at which devices and links become free and
at which data arrives, and needs no list of tasks: a task's start is a maximum over a few of these.

**When that is exact.** The event-driven simulation (``kernel.run``) takes tasks by (ready time, index). A task's start
depends only on the tasks before it that share a resource, so going by the index gives the same bits as long as on every
resource the ready times never decrease, which the pass watches. Where they do (or where devices take turns on a shared
processor), the pass is repeated to write the task graph down, and ``kernel.run`` times that.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flexsearch.compiled import F64, ONE, THREE, TWO, U32, ZERO, lean
from flexsearch.simulate.arrays import (
    BACKWARD,
    GATHER,
    NOTHING,
    RECORD,
    SECOND,
    STRIDE,
    SYNCHRONISE,
    TICK,
    TIME,
    WRITE,
    Pools,
    Program,
    State,
    Tasks,
    Work,
)  # fmt: skip
from flexsearch.simulate.write import (
    after,
    after_device,
    fits,
    goes_on,
    note,
    write_compute,
    write_drag,
    write_link,
    write_links,
    write_part,
    write_task,
)


@lean
def walk(
    program: Program, pools: Pools, state: State, work: Work, tasks: Tasks, first: Any, mode: Any, limit: float
) -> Any:
    """Makespan (s) of the plan, from block ``first`` on (a multiple of STRIDE; what came before is as in the
    checkpoint). ``work.broken[0]`` is 1 afterwards if the result is void. In mode WRITE: fills ``tasks`` from the
    beginning and returns 0; -1 if ``tasks`` is too small. In mode TIME: infinity as soon as it is certain that the
    makespan is above ``limit`` (s)."""
    slots = np.uint64(program.flows.shape[0])
    devices = np.uint64(program.processor.shape[0])
    moment = work.moment
    _restore(work, first, devices)
    work.broken[0] = 0
    work.fresh[:] = 0
    work.check_fresh[:] = 0
    if mode == WRITE:
        tasks.written[:] = 0
        tasks.parts[:] = 0
        tasks.open[:] = 0
        tasks.last[:] = NOTHING
        tasks.synced[:] = NOTHING
    b = np.uint64(first)
    while b < np.uint64(program.kind.shape[0]):
        if mode != WRITE and b % np.uint64(STRIDE) == ZERO:
            _save(work, b // np.uint64(STRIDE), devices, moment)
            if mode == TIME and too_long(program, state, work, limit):
                return np.inf
        if work.broken[0] == 1 and mode == TIME:
            return 0.0
        kind, argument = program.kind[b], np.uint64(program.argument[b])
        if kind <= BACKWARD:
            # One loop for all three, and one call of each helper: every further call is compiled in anew.
            forward = kind != BACKWARD
            if kind == GATHER:
                k, last = np.uint64(program.reader_first[argument]), np.uint64(program.reader_last[argument])
            else:
                _compute(program, pools, state, work, tasks, argument, forward, mode, moment)
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
                if _moves(pools, template):
                    _reshard(pools, work, tasks, row, np.uint64(template), mode, moment)
                k += ONE
        elif kind == SYNCHRONISE:
            _synchronise(program, pools, state, work, tasks, argument, mode, moment)
        elif kind == SECOND:
            _second(program, pools, state, work, tasks, mode, moment)
        else:
            _update(program, state, work, tasks, mode, moment)
        b += ONE
    if mode == WRITE and not fits(tasks):
        return -1.0
    work.counted[0] = moment[1]
    for d in range(devices):
        moment[0] = max(moment[0], work.last[d])
    return moment[0]


@lean
def too_long(program: Program, state: State, work: Work, limit: float) -> Any:
    """Whether the makespan is certainly above ``limit`` (s): some device has waited for too long, beside what it
    computes, or some link still has too much to carry. ``work`` is that of a pass, anywhere on its way."""
    limit *= 1.0 + 1e-9  # more than all rounding in sums of seconds
    for d in range(np.uint64(state.busy.shape[0])):
        if work.idle[d] + float(state.busy[d]) * TICK > limit:
            return True
    for r in range(np.uint64(state.load.shape[0])):
        if work.free[r] + (float(state.load[r]) * TICK - work.sent[r]) > limit:
            return True
    return False


@lean
def _moves(pools: Pools, template: Any) -> Any:
    """Whether anything crosses devices."""
    return pools.reshard_first[np.uint64(template)] < pools.reshard_last[np.uint64(template)]


@lean
def _restore(work: Work, first: Any, devices: Any) -> None:
    """Set the moments to those of the checkpoint before block ``first``. ``work.moment``: makespan and tasks so far."""
    moment = work.moment
    moment[:] = 0.0
    if first == 0:
        work.last[:] = 0.0
        work.free[:] = 0.0
        work.seen[:] = 0.0
        work.synced[:] = 0.0
        work.idle[:] = 0.0
        work.sent[:] = 0.0
        return
    c = np.uint64(first) // np.uint64(STRIDE)
    row = work.checkpoint[work.check_version[c], c]
    links = np.uint64(work.free.shape[0])
    k = ZERO
    while k < devices:
        work.last[k] = row[k]
        work.synced[k] = row[devices + k]
        work.idle[k] = row[TWO * devices + k]
        k += ONE
    at = THREE * devices
    k = ZERO
    while k < links:
        work.free[k] = row[at + k]
        work.seen[k] = row[at + links + k]
        work.sent[k] = row[at + TWO * links + k]
        k += ONE
    moment[0] = row[at + THREE * links]
    moment[1] = row[at + THREE * links + ONE]


@lean
def _save(work: Work, c: Any, devices: Any, moment: F64) -> None:
    row = work.checkpoint[ONE - np.uint64(work.check_version[c]), c]
    work.check_fresh[c] = 1
    links = np.uint64(work.free.shape[0])
    k = ZERO
    while k < devices:
        row[k] = work.last[k]
        row[devices + k] = work.synced[k]
        row[TWO * devices + k] = work.idle[k]
        k += ONE
    at = THREE * devices
    k = ZERO
    while k < links:
        row[at + k] = work.free[k]
        row[at + links + k] = work.seen[k]
        row[at + TWO * links + k] = work.sent[k]
        k += ONE
    row[at + THREE * links] = moment[0]
    row[at + THREE * links + ONE] = moment[1]


@lean
def accept(work: Work) -> None:
    """Make what the last pass wrote the state's own."""
    for k in range(np.uint64(work.fresh.shape[0])):
        work.version[k] ^= work.fresh[k]
    for k in range(np.uint64(work.check_fresh.shape[0])):
        work.check_version[k] ^= work.check_fresh[k]


@lean
def _version(work: Work, row: Any) -> Any:
    """Which version of a row holds what has arrived: that of this pass if it came by, else that of the state."""
    return np.uint64(work.version[row] ^ work.fresh[row])


@lean
def _new_row(work: Work, tasks: Tasks, row: Any, mode: Any) -> None:
    work.fresh[row] = 1
    if mode == WRITE:
        tasks.head[row, :] = NOTHING
    work.arrived[_version(work, row), row, :] = 0.0


@lean
def _compute(
    program: Program, pools: Pools, state: State, work: Work, tasks: Tasks, operator: Any, forward: Any, mode: Any,
    moment: F64,
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
                write_part(tasks, d, seconds)
                continue
            arrivals = tasks.written[1]
            for j in range(low, high):
                row = _source(program, pools, state, j, forward, slots)
                if row != np.uint64(NOTHING):
                    after(tasks, tasks.head[row, d])
            if arrivals == tasks.written[1] and goes_on(tasks, d):
                write_part(tasks, d, seconds)
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
            arrived = work.arrived[_version(work, row), row]
            for k in range(first, last):
                d = np.uint64(pools.entry_device[k])
                work.middle[d] = max(work.middle[d], arrived[d])
    for k in range(first, last):
        d = np.uint64(pools.entry_device[k])
        begin = work.middle[d]
        seconds = pools.entry_forward_s[k] if forward else pools.entry_backward_s[k]
        if shared:
            p = np.uint64(program.processor[d])
            if begin < work.seen[p]:
                work.broken[0] = 1
            work.seen[p] = begin
            begin = max(begin, work.free[p])
            work.free[p] = begin + seconds
        finish = begin + seconds
        work.idle[d] += begin - work.last[d]
        work.last[d] = finish
        if mode == RECORD:
            _record(work, moment, begin, finish)


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


@lean
def _record(work: Work, moment: F64, begin: float, finish: float) -> None:
    at = np.uint64(moment[1])
    if at < np.uint64(work.start.shape[0]):
        work.start[at] = begin
        work.end[at] = finish
    moment[1] += 1.0


@lean
def _reshard(pools: Pools, work: Work, tasks: Tasks, row: Any, template: Any, mode: Any, moment: F64) -> None:
    """All phases of a reshard, delivering to ``row``."""
    _new_row(work, tasks, row, mode)
    arrived = work.arrived[_version(work, row), row]
    middle, last = np.uint64(pools.reshard_middle[template]), np.uint64(pools.reshard_last[template])
    if middle < last:
        work.middle[:] = 0.0
        if mode == WRITE:
            tasks.middle[:] = NOTHING
    for x in range(np.uint64(pools.reshard_first[template]), last):
        finish = _exchange(pools, work, tasks, x, work.middle, tasks.middle, x >= middle, mode, moment)
        _deliver(pools, tasks, x, arrived, tasks.head[row], finish, mode)
        if x < middle < last:
            _deliver(pools, tasks, x, work.middle, tasks.middle, finish, mode)


@lean
def _exchange(
    pools: Pools, work: Work, tasks: Tasks, x: Any, before: F64, heads: U32, second: Any, mode: Any, moment: F64
) -> Any:
    """One communication task; ``before``, ``heads``: what the first phase delivered, which the ``second`` waits for.
    Returns its end (s)."""
    if mode == WRITE:
        for k in range(np.uint64(pools.send_first[x]), np.uint64(pools.send_last[x])):
            d = np.uint64(pools.send[k])
            after_device(tasks, d)
            if second:
                after(tasks, heads[d])
        write_links(tasks, pools.link, pools.link_s, np.uint64(pools.link_first[x]), np.uint64(pools.link_last[x]))
        for k in range(np.uint64(pools.drag_first[x]), np.uint64(pools.drag_last[x])):
            write_drag(tasks, pools.drag[k], pools.drag_s[k])
        write_task(tasks, pools.duration[x], np.inf)
        return 0.0
    ready = 0.0
    for k in range(np.uint64(pools.send_first[x]), np.uint64(pools.send_last[x])):
        d = np.uint64(pools.send[k])
        ready = max(ready, work.last[d])
        if second:
            ready = max(ready, before[d])
    begin = ready
    for k in range(np.uint64(pools.link_first[x]), np.uint64(pools.link_last[x])):
        r = np.uint64(pools.link[k])
        begin = max(begin, work.free[r])
        if ready < work.seen[r]:
            work.broken[0] = 1
        work.seen[r] = ready
    for k in range(np.uint64(pools.link_first[x]), np.uint64(pools.link_last[x])):
        work.free[np.uint64(pools.link[k])] = begin + pools.link_s[k]
        work.sent[np.uint64(pools.link[k])] += pools.link_s[k]
    for k in range(np.uint64(pools.drag_first[x]), np.uint64(pools.drag_last[x])):
        _drag(work, np.uint64(pools.drag[k]), ready, pools.drag_s[k])
    finish = begin + pools.duration[x]
    moment[0] = max(moment[0], finish)
    if mode == RECORD:
        _record(work, moment, begin, finish)
    return finish


@lean
def _drag(work: Work, r: Any, ready: float, seconds: float) -> None:
    if ready < work.seen[r]:
        work.broken[0] = 1
    work.seen[r] = ready
    work.free[r] = max(work.free[r], ready) + seconds


@lean
def _deliver(pools: Pools, tasks: Tasks, x: Any, arrived: F64, heads: U32, finish: float, mode: Any) -> None:
    """Note on the receivers of exchange ``x`` when it ended (or which task it was, the last one written)."""
    for k in range(np.uint64(pools.receive_first[x]), np.uint64(pools.receive_last[x])):
        d = np.uint64(pools.receive[k])
        if mode == WRITE:
            note(tasks, heads, d)
        else:
            arrived[d] = max(arrived[d], finish)


@lean
def _synchronise(
    program: Program, pools: Pools, state: State, work: Work, tasks: Tasks, bucket: Any, mode: Any, moment: F64
) -> None:
    """The first phases of a bucket's weights: exchanges of the same key as one task."""
    slots = np.uint64(program.flows.shape[0])
    groups = members = ZERO
    for k in range(np.uint64(program.bucket_first[bucket]), np.uint64(program.bucket_last[bucket])):
        w = np.uint64(program.member[k])
        t = np.uint64(pools.plan_sync[np.uint64(state.plan[w])])
        if pools.reshard_middle[t] < pools.reshard_last[t]:
            _new_row(work, tasks, TWO * slots + w, mode)
        for x in range(np.uint64(pools.reshard_first[t]), np.uint64(pools.reshard_middle[t])):
            g = ZERO
            while g < groups and work.group_key[g] != pools.key[x]:
                g += ONE
            if g == groups:
                work.group_key[g] = pools.key[x]
                work.group_head[g] = members
                work.group_size[g] = 0
                groups += ONE
            else:
                work.member_next[np.uint64(work.group_tail[g])] = members
            work.group_tail[g] = members
            work.group_size[g] += np.uint32(1)
            work.member_exchange[members] = x
            work.member_weight[members] = w
            members += ONE
    for g in range(ZERO, groups):
        m = np.uint64(work.group_head[g])
        if work.group_size[g] == 1:
            alone = np.uint64(work.member_exchange[m])
            finish = _exchange(pools, work, tasks, alone, work.middle, tasks.middle, False, mode, moment)
        else:
            finish = _merged(program, pools, work, tasks, g, mode, moment)
        for _ in range(np.uint64(work.group_size[g])):
            e, w = np.uint64(work.member_exchange[m]), np.uint64(work.member_weight[m])
            _deliver(pools, tasks, e, work.synced, tasks.synced, finish, mode)
            t = np.uint64(pools.plan_sync[np.uint64(state.plan[w])])
            if pools.reshard_middle[t] < pools.reshard_last[t]:
                row = TWO * slots + w
                _deliver(pools, tasks, e, work.arrived[_version(work, row), row], tasks.head[row], finish, mode)
            m = np.uint64(work.member_next[m])


@lean
def _merged(program: Program, pools: Pools, work: Work, tasks: Tasks, g: Any, mode: Any, moment: F64) -> Any:
    """The task that several exchanges of a bucket are together: their bytes add up on every link."""
    ready, latency, total = 0.0, 0.0, ZERO
    touched = dragged = ZERO
    key = np.uint64(work.group_key[g])
    ring = np.uint64(pools.key_ring[key])
    m = np.uint64(work.group_head[g])
    for i in range(np.uint64(work.group_size[g])):
        x = np.uint64(work.member_exchange[m])
        for k in range(np.uint64(pools.send_first[x]), np.uint64(pools.send_last[x])):
            d = np.uint64(pools.send[k])
            if mode == WRITE:
                after_device(tasks, d)
            else:
                ready = max(ready, work.last[d])
        latency = max(latency, pools.latency[x])
        total += pools.amount[x]
        if ring == ZERO or i == ZERO:
            for k in range(np.uint64(pools.link_first[x]), np.uint64(pools.link_last[x])):
                r = np.uint64(pools.link[k])
                if work.load[r] == 0.0:
                    work.touched[touched] = r
                    touched += ONE
                work.load[r] += pools.link_load[k]
        m = np.uint64(work.member_next[m])
    edge = 1.0
    steps = 1.0
    if ring > ZERO:
        edge = float(TWO * (ring - ONE) * total // ring)
        steps = float(TWO * (ring - ONE))
    factor, busiest, begin = pools.key_factor[key], 0.0, ready
    for j in range(ZERO, touched):
        r = np.uint64(work.touched[j])
        seconds = factor * (work.load[r] * edge) / program.bandwidth[r]
        busiest = max(busiest, seconds)
        begin = max(begin, work.free[r])
        if mode != WRITE:
            if ready < work.seen[r]:
                work.broken[0] = 1
            work.seen[r] = ready
    for j in range(ZERO, touched):
        r = np.uint64(work.touched[j])
        seconds = factor * (work.load[r] * edge) / program.bandwidth[r]
        if mode == WRITE:
            write_link(tasks, r, seconds)
        else:
            work.free[r] = begin + seconds
            work.sent[r] += seconds
        work.load[r] = 0.0
    duration = program.scalars[0] + steps * latency + busiest
    if program.scalars[1] > 0.0:
        m = np.uint64(work.group_head[g])
        for i in range(np.uint64(work.group_size[g])):
            x = np.uint64(work.member_exchange[m])
            if ring == ZERO or i == ZERO:
                for k in range(np.uint64(pools.drag_first[x]), np.uint64(pools.drag_last[x])):
                    r = np.uint64(pools.drag[k])
                    if work.load[r] == 0.0:
                        work.touched[dragged] = r
                        dragged += ONE
                    work.load[r] += pools.drag_load[k]
            m = np.uint64(work.member_next[m])
        for j in range(ZERO, dragged):
            r = np.uint64(work.touched[j])
            seconds = program.scalars[1] * (work.load[r] * edge)
            if mode == WRITE:
                write_drag(tasks, r, seconds)
            else:
                _drag(work, r, ready, seconds)
            work.load[r] = 0.0
    if mode == WRITE:
        write_task(tasks, duration, np.inf)
        return 0.0
    finish = begin + duration
    moment[0] = max(moment[0], finish)
    if mode == RECORD:
        _record(work, moment, begin, finish)
    return finish


@lean
def _second(program: Program, pools: Pools, state: State, work: Work, tasks: Tasks, mode: Any, moment: F64) -> None:
    """The second phases of all synchronisations."""
    slots = np.uint64(program.flows.shape[0])
    for k in range(np.uint64(program.member.shape[0])):
        w = np.uint64(program.member[k])
        t = np.uint64(pools.plan_sync[np.uint64(state.plan[w])])
        row = TWO * slots + w
        for x in range(np.uint64(pools.reshard_middle[t]), np.uint64(pools.reshard_last[t])):
            finish = _exchange(
                pools, work, tasks, x, work.arrived[_version(work, row), row], tasks.head[row], True, mode, moment
            )
            _deliver(pools, tasks, x, work.synced, tasks.synced, finish, mode)


@lean
def _update(program: Program, state: State, work: Work, tasks: Tasks, mode: Any, moment: F64) -> None:
    shared = program.scalars[2] > 0.0
    for d in range(np.uint64(program.processor.shape[0])):
        if state.stored_count[d] == 0:
            continue
        seconds = state.stored_bytes[d] * program.update_byte_s[d] + state.stored_count[d] * program.update_tensor_s[d]
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
            begin = max(begin, work.free[p])
            work.free[p] = begin + seconds
        work.last[d] = begin + seconds
        if mode == RECORD:
            _record(work, moment, begin, begin + seconds)
