"""Whole runs, and stretches of runs until a tick, compiled: each ends where it is certain to be too late."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from flexsearch.compiled import U32, ZERO, lean
from flexsearch.cost.ticks import FOREVER
from flexsearch.lower.rows import NEVER, Segments
from flexsearch.simulate.engine_fold import consider_fold, start_fold
from flexsearch.simulate.engine_late import is_late
from flexsearch.simulate.engine_run import enter
from flexsearch.simulate.engine_state import DONE, ROOM, RUNNING, WINDOWS, State
from flexsearch.simulate.engine_windows import is_over, next_tick, run_to
from flexsearch.simulate.engine_work import add_work, has_room, keep_busy, put_segment
from flexsearch.simulate.snapshots import copy

LATE: Final = NEVER
"""In the place of a makespan: it is certain that it is above the limit, or at least ``FOREVER``."""
MOST: Any = np.int64(FOREVER - 1)
"""Ticks of the longest plan."""


@lean
def _begin(state: State) -> None:
    """All devices before their first block at tick 0."""
    state.run[0] += np.uint32(1)
    state.pending_count[0] = state.queue.size[0] = state.logged[0] = state.window[0] = ZERO
    state.kept.visits[0], state.kept.taken[0] = ZERO, ZERO
    state.connections.held[0], state.connections.waiting[0] = ZERO, ZERO
    state.now[0] = state.latest[0] = state.shift[0] = 0
    state.trouble[0], state.fold.jumped[0], state.kept.host_shifted[0] = 0, 0, ZERO
    state.free[:] = 0
    state.computing[:] = 0
    state.computed[:] = 0
    state.carried[:] = 0
    state.kept.new_touched[:] = 0
    start_fold(state)
    for d in range(np.uint64(state.devices.clock.shape[0])):
        state.devices.clock[d], state.devices.status[d], state.devices.host[d] = 0, RUNNING, 0
        group = np.uint64(state.schedule.group[d])
        action = np.uint64(state.schedule.action_first[group])
        if action < np.uint64(state.schedule.action_last[group]):
            enter(state, d, action, np.uint64(state.schedule.block_first[action]))
        else:
            state.devices.status[d] = DONE


@lean
def simulate(state: State, segments: Segments, segment_of_block: U32, limit: Any) -> Any:
    """Run a plan from the beginning. Returns its makespan (ticks), LATE, or minus what the trouble is. Nothing is kept
    of it, and nothing of the plan before it."""
    kept, limit = state.kept, min(limit, MOST)
    kept.new_compute[:] = 0
    kept.new_carry[:] = 0
    kept.visit_window[:] = 0
    kept.changes[0], kept.valid[0], state.path.doubt[0] = ZERO, 0, NEVER
    state.reference[0] = ZERO
    for block in range(np.uint64(segment_of_block.shape[0])):
        segment = np.uint64(segment_of_block[block])
        if not has_room(state, segments, block, segment):
            return -ROOM
        put_segment(state, segments, block, segment)
        kept.segment[block] = segment
        keep_busy(state.busy, kept.busy, block)
        add_work(state, segments, block, segment, 1)
    chunk = np.int64(1)
    for d in range(np.uint64(kept.new_compute.shape[0])):
        chunk = max(chunk, kept.new_compute[d] // WINDOWS)
        if kept.new_compute[d] > kept.new_compute[state.reference[0]]:
            state.reference[0] = d
    copy(kept.total_compute, kept.new_compute)
    copy(kept.total_carry, kept.new_carry)
    _begin(state)
    result = run_window(state, segments, NEVER, chunk, limit)
    if result == 0 and state.latest[0] > MOST:
        result = np.int64(LATE)
    if result == 0:
        kept.makespan[0] = result = state.latest[0]
    return result


@lean
def begin_again(state: State) -> None:
    """Begin the plan at hand once more, to keep its snapshots."""
    kept = state.kept
    width = (kept.makespan[0] - state.fold.jumped[0]) // WINDOWS + 1
    for k in range(np.uint64(WINDOWS + 1)):
        kept.horizon[k] = width * np.int64(k)
    kept.chunk[0] = max(1, width // 2)
    kept.visit_window[:] = 0
    kept.window[:] = 0
    kept.touched[:] = 0
    kept.new_snapshot[:] = 0
    _begin(state)
    kept.first_makespan[0] = kept.makespan[0]


@lean
def run_window(state: State, segments: Segments, end: Any, chunk: Any, limit: Any) -> Any:
    """Run until a tick of the plan at hand, shifted as the reference device is; NEVER: until all is done. Returns 0,
    LATE, or minus what the trouble is. Something happens before each stop, or a long wait would take many."""
    while True:
        until = np.int64(NEVER)
        if end != NEVER:
            until = min(max(state.now[0], end + state.shift[0]), np.int64(FOREVER))
        if state.now[0] >= until:
            return np.int64(0)
        stop = min(until, max(state.now[0] + chunk, next_tick(state) + 1), FOREVER)
        if state.fold.enabled[0]:
            stop = min(stop, state.fold.due[0])
        run_to(state, segments, stop)
        if state.trouble[0] > 0:
            return -np.int64(state.trouble[0])
        if is_late(state, segments, limit):
            return np.int64(LATE)
        over = is_over(state)
        if state.trouble[0] > 0:
            return -np.int64(state.trouble[0])
        if end == NEVER and (over or stop == FOREVER):
            return np.int64(0) if over else np.int64(LATE)
        if over:
            chunk, state.fold.due[0] = until, NEVER
        else:
            state.shift[0] += consider_fold(state)
        chunk = min(chunk + (chunk >> 4) + 1, FOREVER)
