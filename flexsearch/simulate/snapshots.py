"""Snapshots of a run at a horizon, compiled: saved, compared with the run at hand, and gone on from.

A moment before the horizon is as good as the horizon: who waits goes on behind it, and a link that was free before it
is free. So only ticks behind the horizon are kept, and equal snapshots go on equally, whenever their horizons are.
How far a host is ahead counts even where it is before the horizon: it is compared by itself, since a host that is ahead
by more or by less changes nothing as long as no device waits for it (``slack``).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flexsearch.compiled import I64, ZERO, inlined, lean
from flexsearch.lower.rows import Schedule, Segments
from flexsearch.simulate.engine_connections import restore
from flexsearch.simulate.engine_queue import COMMUNICATION, MICROBATCH, block_of, place_of, push
from flexsearch.simulate.engine_state import COMPUTING, DONE, ENDED, RUNNING, State


@lean
def copy(target: I64, source: I64) -> None:
    """``target[:] = source``, for which numba would want memory."""
    for k in range(np.uint64(target.shape[0])):
        target[k] = source[k]


@lean
def save(state: State, v: Any, k: Any) -> None:
    """Keep the state at ``now`` as version ``v`` of snapshot ``k``."""
    kept, devices, pending, now = state.snapshots, state.devices, state.pending, state.now[0]
    for d in range(np.uint64(devices.clock.shape[0])):
        kept.action[v, k, d], kept.block[v, k, d] = devices.action[d], devices.block[d]
        kept.step[v, k, d], kept.status[v, k, d] = devices.step[d], devices.status[d]
        kept.awaited[v, k, d], kept.left[v, k, d] = devices.awaited[d], devices.left[d]
        kept.clock[v, k, d] = max(devices.clock[d] - now, 0)
        kept.host[v, k, d] = devices.host[d] - now
    for r in range(np.uint64(state.free.shape[0])):
        kept.free[v, k, r] = max(state.free[r] - now, 0)
        kept.computing[v, k, r] = max(state.computing[r] - now, 0)
    count = state.pending_count[0]
    kept.total[v, k] = count
    for slot in range(count):
        kept.place[v, k, slot], kept.identity[v, k, slot] = pending.place[slot], pending.identity[slot]
        kept.missing[v, k, slot], kept.turned[v, k, slot] = pending.missing[slot], pending.turned[slot]
        kept.ready[v, k, slot] = max(pending.ready[slot] - now, 0)
        kept.end[v, k, slot] = max(pending.end[slot] - now, -1)


@lean
def is_same(state: State, v: Any, k: Any, lag: Any) -> Any:
    """Whether the state at ``now`` is that of a snapshot, ``lag`` microbatches later, but for how far hosts are."""
    kept, devices, now = state.snapshots, state.devices, state.now[0]
    if kept.total[v, k] != state.pending_count[0]:
        return False
    for d in range(np.uint64(devices.clock.shape[0])):
        if not _same_device(state, v, k, d, lag) or kept.clock[v, k, d] != max(devices.clock[d] - now, 0):
            return False
    for r in range(np.uint64(state.free.shape[0])):
        if kept.free[v, k, r] != max(state.free[r] - now, 0):
            return False
        if kept.computing[v, k, r] != max(state.computing[r] - now, 0):
            return False
    pending = state.pending
    for j in range(kept.total[v, k]):
        place = place_of(state, later(state.schedule, kept.identity[v, k, j], lag))
        if place >= np.uint64(state.stamp.shape[0]) or state.stamp[place] != state.run[0]:  # after the last microbatch
            return False
        slot = np.uint64(state.slot[place])
        if slot == ENDED or pending.missing[slot] != kept.missing[v, k, j]:
            return False
        if max(pending.ready[slot] - now, 0) != kept.ready[v, k, j] or pending.turned[slot] != kept.turned[v, k, j]:
            return False
        if max(pending.end[slot] - now, -1) != kept.end[v, k, j]:
            return False
        if lag == ZERO and pending.turned[slot] != 0 and _is_changed(state, block_of(pending.identity[slot])):
            return False
    return True


@inlined
def _is_changed(state: State, block: Any) -> Any:
    """Whether a proposal changes a block: what of it holds a connection, or waits for one, may do so for another than
    in the plan at hand."""
    return state.segment[block] != state.kept.segment[block]


@lean
def later(schedule: Schedule, identity: Any, lag: Any) -> Any:
    """The identity of the same row, ``lag`` microbatches later."""
    if schedule.once[block_of(identity)]:
        return identity
    return identity + (lag << MICROBATCH)


@lean
def _same_device(state: State, v: Any, k: Any, d: Any, lag: Any) -> Any:
    """Whether a device is at the same step for the same thing, ``lag`` microbatches later."""
    kept, devices, schedule = state.snapshots, state.devices, state.schedule
    status = devices.status[d]
    if status != kept.status[v, k, d] or devices.block[d] != kept.block[v, k, d]:
        return False
    if devices.step[d] != kept.step[v, k, d]:
        return False
    if status == DONE:
        return True
    if lag == ZERO:
        if devices.action[d] != kept.action[v, k, d]:
            return False
    elif (
        schedule.microbatch[np.uint64(devices.action[d])]
        != np.uint64(schedule.microbatch[np.uint64(kept.action[v, k, d])]) + lag
    ):
        return False
    if status != RUNNING and devices.awaited[d] != later(schedule, kept.awaited[v, k, d], lag):
        return False
    return status != COMPUTING or devices.left[d] == kept.left[v, k, d]


@lean
def load(state: State, segments: Segments, v: Any, k: Any) -> None:
    """Go on from a snapshot at ``now``."""
    kept, devices, pending, now = state.snapshots, state.devices, state.pending, state.now[0]
    forget_pending(state)
    for d in range(np.uint64(devices.clock.shape[0])):
        devices.action[d], devices.block[d] = kept.action[v, k, d], kept.block[v, k, d]
        devices.step[d], devices.status[d] = kept.step[v, k, d], kept.status[v, k, d]
        devices.awaited[d], devices.left[d] = kept.awaited[v, k, d], kept.left[v, k, d]
        devices.clock[d], devices.host[d] = kept.clock[v, k, d] + now, kept.host[v, k, d] + now
        if devices.status[d] == COMPUTING:
            push(state, devices.clock[d], devices.awaited[d], d)
    for r in range(np.uint64(state.free.shape[0])):
        state.free[r], state.computing[r] = kept.free[v, k, r] + now, kept.computing[v, k, r] + now
    state.pending_count[0] = kept.total[v, k]
    for slot in range(kept.total[v, k]):
        place, identity = np.uint64(kept.place[v, k, slot]), kept.identity[v, k, slot]
        pending.place[slot], pending.identity[slot] = place, identity
        pending.missing[slot], pending.turned[slot] = kept.missing[v, k, slot], kept.turned[v, k, slot]
        pending.ready[slot], pending.end[slot] = kept.ready[v, k, slot] + now, kept.end[v, k, slot]
        state.stamp[place], state.slot[place] = state.run[0], slot
        if pending.end[slot] >= 0:
            pending.end[slot] += now
        elif pending.missing[slot] == 0:
            restore(state, segments, slot)


@lean
def forget_pending(state: State) -> None:
    """What is pending counts as ended, and nothing is in a queue."""
    for slot in range(state.pending_count[0]):
        state.slot[np.uint64(state.pending.place[slot])] = ENDED
    state.pending_count[0] = state.queue.size[0] = state.connections.held[0] = state.connections.waiting[0] = ZERO


@lean
def shift_pending(state: State, lag: Any, ticks: Any) -> None:
    """Put off what is pending and in the queue by some microbatches and ticks."""
    pending, queue = state.pending, state.queue
    for slot in range(state.pending_count[0]):
        state.slot[np.uint64(pending.place[slot])] = ENDED
    for slot in range(state.pending_count[0]):
        identity = later(state.schedule, pending.identity[slot], lag)
        place = place_of(state, identity)
        pending.identity[slot], pending.place[slot] = identity, place
        state.stamp[place], state.slot[place] = state.run[0], slot
        pending.ready[slot] += ticks
        if pending.end[slot] >= 0:
            pending.end[slot] += ticks
    for j in range(state.connections.held[0]):
        state.connections.identity[j] = later(state.schedule, state.connections.identity[j], lag)
    for j in range(queue.size[0]):
        queue.identity[j] = later(state.schedule, queue.identity[j], lag)
        queue.ready[j] += ticks
        if queue.identity[j] & COMMUNICATION != ZERO:
            queue.item[j] = place_of(state, queue.identity[j])
