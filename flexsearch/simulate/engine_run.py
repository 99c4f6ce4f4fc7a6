"""What happens in the engine, compiled: devices run their steps, and what they issue is served. Its definition is
``tests/engine_oracle.py``."""

from __future__ import annotations

from typing import Any

import numpy as np

from flexsearch.compiled import ONE, ZERO, inlined, lean
from flexsearch.cost.ticks import FOREVER
from flexsearch.lower.rows import COMPUTE, NEVER, WAIT, Segments
from flexsearch.simulate.engine_connections import acquire, admit_next, enqueue, must_wait, release, row_of
from flexsearch.simulate.engine_queue import (
    COMMUNICATION,
    MICROBATCH,
    NUMBER,
    block_of,
    drop_first,
    identity_of,
    place_of,
    push,
)
from flexsearch.simulate.engine_state import (
    COMPUTING,
    DONE,
    ENDED,
    MALFORMED,
    ROOM,
    RUNNING,
    WAITING,
    State,
)


@lean
def enter(state: State, d: Any, action: Any, block: Any) -> Any:
    """Put a device before the first block that it runs, from ``block`` of ``action`` on; False if there is none."""
    schedule = state.schedule
    last = np.uint64(schedule.action_last[np.uint64(schedule.group[d])])
    final = np.uint64(schedule.final[0])
    while action < last:
        microbatch = np.uint64(schedule.microbatch[action])
        while block < np.uint64(schedule.block_last[action]):
            only = final if schedule.last[block] else ZERO
            if microbatch == only or (schedule.once[block] | schedule.last[block]) == 0:
                state.devices.action[d], state.devices.block[d], state.devices.step[d] = action, block, ZERO
                state.kept.new_touched[block] |= ONE << state.window[0]
                if d == state.reference[0]:
                    _visit(state, action, block)
                return True
            block += ONE
        action += ONE
        if action < last:
            block = np.uint64(schedule.block_first[action])
    state.devices.action[d], state.devices.block[d], state.devices.step[d] = action, ZERO, ZERO
    state.devices.status[d] = DONE
    return False


@lean
def _visit(state: State, action: Any, block: Any) -> None:
    """Note when the reference device begins a block, and how much later that is than in the plan at hand."""
    kept, clock = state.kept, state.devices.clock[state.reference[0]]
    visit = kept.visit_first[action] + block - np.uint64(state.schedule.block_first[action])
    if kept.visits[0] < np.uint64(kept.visited.shape[0]):
        kept.visited[kept.visits[0]] = visit
        kept.visits[0] += ONE
    kept.new_window[visit], kept.new_tick[visit] = state.window[0] + ONE, clock
    if kept.visit_window[visit] > 0:
        old_clock = kept.horizon[np.uint64(kept.visit_window[visit]) - ONE] + kept.visit_tick[visit]
        state.shift[0] = clock - old_clock
    if action != state.fold.current[0]:
        state.fold.current[0] = action
        state.fold.begun[action] = clock


@lean
def _is_for_each(state: State, block: Any) -> Any:
    """Whether a block is run for every microbatch, as most are: no need to ask ``enter`` for it."""
    schedule = state.schedule
    return schedule.microbatches[0] == 1 or schedule.once[block] | schedule.last[block] == 0


@lean
def _pass_over(state: State, d: Any, block: Any, ends: Any) -> Any:
    """From a block on, the first before ``ends`` in which the device has steps, or that is not for each microbatch."""
    window, word, bit = ONE << state.window[0], d >> np.uint64(6), d & np.uint64(63)
    while block < ends and _is_for_each(state, block):
        state.kept.new_touched[block] |= window
        if (state.busy[block, word] >> bit) & ONE == ONE:
            break
        block += ONE
    return block


@lean
def advance(state: State, segments: Segments, d: Any, horizon: Any) -> None:
    """Run a device that can run until its clock reaches the horizon, or it has to wait."""
    devices, schedule = state.devices, state.schedule
    clock, computed = devices.clock[d], np.int64(0)
    if clock >= horizon:
        return
    action, block, done = np.uint64(devices.action[d]), np.uint64(devices.block[d]), np.uint64(devices.step[d])
    state.kept.new_touched[block] |= ONE << state.window[0]
    plain = not (state.machine.contended[0] or state.record.enabled[0])
    ends, followed = np.uint64(schedule.block_last[action]), d == state.reference[0]
    hosted, host, slack = state.machine.hosted[0] == 1, devices.host[d], np.int64(NEVER)
    while True:
        table = np.uint64(segments.device_steps[np.uint64(state.segment[block])]) + d
        first, last = np.uint64(segments.step_first[table]), np.uint64(segments.step_first[table + ONE])
        step = first + done
        while step < last and clock < horizon:
            kind = segments.step_kind[step]
            if hosted and kind != WAIT:
                host += segments.step_host[step]
                slack = min(slack, clock - host)
                clock = max(clock, host)
            if kind == COMPUTE and plain:
                clock += segments.step_ticks[step]
                computed += segments.step_ticks[step]
            elif kind == COMPUTE:
                devices.block[d] = block
                clock = _compute(state, segments, d, clock, step, np.uint64(schedule.microbatch[action]))
                if devices.status[d] != RUNNING:
                    break
            else:
                identity = _communicated(state, segments, action, step)
                if kind == WAIT:
                    end = _end_of(state, place_of(state, identity))
                    if end < 0:
                        devices.status[d], devices.awaited[d] = WAITING, identity
                        break
                    clock = max(clock, end)
                else:
                    arrive(state, segments, identity, clock)
            step += ONE
        done = step - first
        if step < last or clock >= horizon:
            break
        block, done = block + ONE, ZERO
        if not followed:
            block = _pass_over(state, d, block, ends)
            if block < ends and _is_for_each(state, block):
                continue
        devices.clock[d] = clock
        enters = enter(state, d, action, block)
        action, block = np.uint64(devices.action[d]), np.uint64(devices.block[d])
        if not enters:
            break
        ends = np.uint64(schedule.block_last[action])
    devices.block[d], devices.step[d], devices.clock[d] = block, done, clock
    state.computed[d] += computed
    if hosted:
        _put_host(state, d, host, slack)
    state.latest[0] = max(state.latest[0], clock)


@inlined
def _communicated(state: State, segments: Segments, action: Any, step: Any) -> Any:
    """The communication that a step of an action starts or waits for."""
    microbatch, block = np.uint64(state.schedule.microbatch[action]), np.uint64(segments.step_block[step])
    return identity_of(state, microbatch, block, COMMUNICATION, np.uint64(segments.step_row[step]))


@inlined
def _put_host(state: State, d: Any, host: Any, slack: Any) -> None:
    """Where the host of a device is now, and how far it was at least ahead."""
    state.devices.host[d] = host
    state.devices.slack[d] = min(state.devices.slack[d], slack)
    state.fold.slack[d] = min(state.fold.slack[d], slack)


@lean
def _compute(state: State, segments: Segments, d: Any, clock: Any, step: Any, microbatch: Any) -> Any:
    """A computation that begins when its device is there; or, on a contended processor, when it is served. Returns the
    device's clock."""
    ticks, block = segments.step_ticks[step], np.uint64(state.devices.block[d])
    identity = identity_of(state, microbatch, block, ZERO, np.uint64(segments.step_row[step]))
    if state.machine.contended[0]:
        state.devices.status[d], state.devices.left[d] = COMPUTING, ticks
        state.devices.awaited[d] = identity
        push(state, clock, identity, d)
        if state.record.enabled[0]:
            state.record.begin[_computation(state, identity)] = -1
        return clock
    row = _computation(state, identity)
    state.record.begin[row], state.record.finish[row] = clock, clock + ticks
    state.computed[d] += ticks
    return clock + ticks


@lean
def _computation(state: State, identity: Any) -> Any:
    """Place of a computation where start and end are written down."""
    row = state.record.computation_first[block_of(identity)] + (identity & NUMBER)
    return (identity >> MICROBATCH) * state.record.computations[0] + row


@lean
def _end_of(state: State, place: Any) -> Any:
    """When a communication ended; some tick before the horizon if it ended there, -1 if it has not been served."""
    if state.stamp[place] == state.run[0]:
        slot = np.uint64(state.slot[place])
        if slot == ENDED:
            return np.int64(0)
        return state.pending.end[slot]
    window = np.uint64(state.kept.window[place])
    if window > ZERO and (state.kept.taken[0] >> (window - ONE)) & ONE == ONE:
        return np.int64(0)
    return np.int64(-1)


@lean
def arrive(state: State, segments: Segments, identity: Any, tick: Any) -> None:
    """A sender issues a communication, or one that it follows has ended."""
    pending, place = state.pending, place_of(state, identity)
    if state.stamp[place] != state.run[0]:
        slot = state.pending_count[0]
        if slot == np.uint64(pending.place.shape[0]):
            state.trouble[0] = ROOM
            return
        state.pending_count[0] = slot + ONE
        state.stamp[place], state.slot[place] = state.run[0], slot
        pending.place[slot], pending.identity[slot] = place, identity
        pending.missing[slot] = segments.missing[row_of(state, segments, identity)]
        pending.ready[slot], pending.end[slot], pending.turned[slot] = 0, -1, 0
    slot = np.uint64(state.slot[place])
    if slot == ENDED or pending.missing[slot] == 0:
        state.trouble[0] = MALFORMED
        return
    pending.ready[slot] = max(pending.ready[slot], tick)
    pending.missing[slot] -= np.uint32(1)
    if pending.missing[slot] == 0:
        push(state, pending.ready[slot], identity, place)


# ---- what is served


@lean
def _note(state: State, identity: Any, ready: Any, moves: Any) -> Any:
    """Write down that a row is served; returns the number of the service."""
    services = state.record.services
    number = services.total[0]
    if number == np.uint64(services.identity.shape[0]):
        state.trouble[0] = ROOM
        return ZERO
    services.total[0] = number + ONE
    services.identity[number], services.begin[number], services.moves[number] = identity, ready, moves
    services.resource[number] = services.before[number] = -1
    return number


@lean
def _note_keeping(state: State, number: Any, resource: Any) -> None:
    """A service is about to keep a resource, from the moment when this, and what it keeps besides, is free."""
    services = state.record.services
    if state.free[resource] > services.begin[number]:
        services.begin[number], services.resource[number] = state.free[resource], np.int64(resource)
        services.before[number] = services.keeper[resource]
    services.keeper[resource] = np.int64(number)


@lean
def serve(state: State, segments: Segments, horizon: Any) -> None:
    """Serve the first row of the queue. Nothing but what is in the queue can happen before the ``horizon``."""
    ready, identity, item = state.queue.ready[0], state.queue.identity[0], np.uint64(state.queue.item[0])
    drop_first(state)
    if identity & COMMUNICATION == ZERO:
        _serve_computation(state, ready, identity, item)
        return
    slot, row = np.uint64(state.slot[item]), row_of(state, segments, identity)
    state.kept.new_touched[block_of(identity)] |= ONE << state.window[0]
    turned = state.pending.turned[slot]
    if turned == 0 and state.connections.held[0] > ZERO and must_wait(state, segments.connection[row]):
        enqueue(state, segments, slot, row)
        return
    holds, turned = turned != 0, max(0, turned)
    if turned == 0:
        for k in range(np.uint64(segments.drag_first[row]), np.uint64(segments.drag_last[row])):
            r = np.uint64(segments.drag[k])
            if state.record.services.keeper.shape[0] > 0:
                _note_keeping(state, _note(state, identity, ready, True), r)
            state.free[r] = min(max(state.free[r], ready), FOREVER) + segments.drag_ticks[k]
    if state.record.services.keeper.shape[0] > 0:
        number = _note(state, identity, ready - np.int64(holds), False)  # what keeps a link until then is noted, too
        for k in range(np.uint64(segments.link_first[row]), np.uint64(segments.link_last[row])):
            if segments.link_ticks[k] > turned:
                _note_keeping(state, number, np.uint64(segments.link[k]))
        state.record.services.begin[number] = max(state.record.services.begin[number], ready)
    if state.queue.size[0] > ZERO:
        horizon = min(horizon, state.queue.ready[0])
    begin, before, left, again = _keep_links(state, segments, row, ready, turned, horizon)
    then = begin + before + left
    if state.record.enabled[0] and turned == 0:
        state.record.start[item] = begin
    if again:
        if not holds:
            acquire(state, identity, segments.connection[row])
        state.pending.ready[slot], state.pending.turned[slot] = then, turned + before + left
        push(state, then, identity, item)
        return
    end = begin + max(before, segments.communication_ticks[row] - turned)
    state.pending.end[slot] = end
    state.latest[0] = max(state.latest[0], end)
    state.kept.log[state.logged[0]] = item
    state.logged[0] += ONE
    if state.record.enabled[0]:
        state.record.end[item] = end
    if holds:
        release(state, identity)
        if state.connections.waiting[0] > ZERO:
            admit_next(state, segments, segments.connection[row], then)
    _hand_on(state, segments, row, identity, end)


@lean
def _slowed_by(ticks: Any, slowing: Any) -> Any:
    """1024ths of so many ticks; no product exceeds an int64."""
    return (ticks >> 10) * slowing + (((ticks & 1023) * slowing) >> 10)


@inlined
def _keep_links(state: State, segments: Segments, row: Any, ready: Any, turned: Any, horizon: Any) -> Any:
    """Keep the links of a communication from the moment when all are free, for a turn, and for all further turns that
    begin before the ``horizon``, before which nothing else wants them. Returns that moment, the ticks of these turns
    but the last, and of the last, and whether another is to come."""
    first, last = np.uint64(segments.link_first[row]), np.uint64(segments.link_last[row])
    ticks, turn = segments.communication_ticks[row], segments.turn[row]
    begin, longest, computing = ready, np.int64(0), np.int64(0)
    for k in range(first, last):
        if segments.link_ticks[k] > turned:
            begin = max(begin, state.free[np.uint64(segments.link[k])])
            longest = max(longest, segments.link_ticks[k] - turned)
            computing = max(computing, state.computing[np.uint64(segments.link[k])])
    begin, before = min(begin, FOREVER), np.int64(0)  # too late for the plan to be of interest; sums fit an int64
    if longest > turn and computing <= begin < horizon and not state.record.enabled[0]:
        before = min((horizon - 1 - begin) // turn, (longest - 1) // turn) * turn
    again = longest - before > turn
    for k in range(first, last):
        r, left = np.uint64(segments.link[k]), segments.link_ticks[k] - turned
        if left <= 0:
            continue
        work = max(0, min(left, ticks - turned))
        if again:
            left = min(before + turn, left)
            work = min(left, work)
        both = min(left, max(0, state.computing[r] - begin))
        state.free[r] = begin + left + _slowed_by(both, state.machine.slowing[0])
        state.carried[r] += work
    return begin, before, min(turn, longest - before), again


@inlined
def _hand_on(state: State, segments: Segments, row: Any, identity: Any, end: Any) -> None:
    """A communication ends: it reaches those that follow it, and wakes devices that wait for it."""
    microbatch = identity >> MICROBATCH
    for k in range(np.uint64(segments.follower_first[row]), np.uint64(segments.follower_last[row])):
        block = np.uint64(segments.follower_block[k])
        state.kept.new_touched[block] |= ONE << state.window[0]
        number = np.uint64(segments.follower_row[k])
        arrive(state, segments, identity_of(state, microbatch, block, COMMUNICATION, number), end)
    devices = state.devices
    for k in range(np.uint64(segments.receiver_first[row]), np.uint64(segments.receiver_last[row])):
        d = np.uint64(segments.receiver[k])
        if devices.status[d] == WAITING and devices.awaited[d] == identity:
            _wake(state, d, max(devices.clock[d], end))


@lean
def _wake(state: State, d: Any, clock: Any) -> None:
    """What a device waited for has ended."""
    state.devices.clock[d], state.devices.status[d] = clock, RUNNING
    state.devices.step[d] += np.uint32(1)
    state.woken[state.woken_count[0]] = d
    state.woken_count[0] += ONE


@lean
def _serve_computation(state: State, ready: Any, identity: Any, d: Any) -> None:
    """A computation of a contended processor: whole, or a turn of it. Links of its devices that are busy meanwhile
    are free later: what moves bytes waits for the processor in between."""
    devices, r = state.devices, np.uint64(state.machine.processor[d])
    begin = min(max(ready, state.free[r]), FOREVER)
    if state.record.services.keeper.shape[0] > 0:
        _note_keeping(state, _note(state, identity, ready, False), r)
    if state.record.enabled[0] and state.record.begin[_computation(state, identity)] < 0:
        state.record.begin[_computation(state, identity)] = begin
    state.kept.new_touched[block_of(identity)] |= ONE << state.window[0]
    ticks = min(devices.left[d], state.machine.turn[d])
    end = begin + ticks
    state.free[r] = end
    state.computed[d] += ticks
    state.carried[r] += ticks
    for k in range(np.uint64(state.machine.slows[d]), np.uint64(state.machine.slows[d + ONE])):
        link = np.uint64(state.machine.slowed[k])
        both = min(ticks, max(0, state.free[link] - begin))
        state.free[link] = min(state.free[link] + _slowed_by(both, state.machine.slowing[0]), FOREVER)
        state.computing[link] = max(state.computing[link], end)
    devices.left[d] -= ticks
    if devices.left[d] > 0:
        devices.clock[d] = end
        push(state, end, identity, d)
        return
    if state.record.enabled[0]:
        state.record.finish[_computation(state, identity)] = end
    state.latest[0] = max(state.latest[0], end)
    _wake(state, d, end)
