"""Proposals, compiled.

A proposal changes the segments of some blocks. It goes on from the last snapshot of the plan at hand before anything of
them happens. At later horizons (those of the plan at hand, shifted as the reference device is) the state is compared
with the snapshot there: if it is the same, all windows up to the next one in which something of a changed block happens
go as they did. A proposal writes only what is its own; ``accept`` makes that the plan at hand.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from flexsearch.compiled import ONE, U32, ZERO, lean
from flexsearch.lower.rows import NEVER, Segments
from flexsearch.simulate.engine_fold import start_fold
from flexsearch.simulate.engine_late import is_late, runs_long
from flexsearch.simulate.engine_state import ROOM, WINDOWS, State
from flexsearch.simulate.engine_whole import LATE, MOST, begin_again, run_window
from flexsearch.simulate.engine_work import add_work, has_room, keep_busy, put_segment
from flexsearch.simulate.snapshots import copy, forget_pending, is_same, load, save

_WINDOWS: Any = np.uint64(WINDOWS)
_STALE: Any = np.uint64(512)
"""After so many accepted proposals, or when the makespan is half longer or shorter, the windows are made anew: by then
they are of unequal lengths. Measured, NMT on 16 P100, 15,000 proposals: after 128, or at an eighth, they are made anew
twice as often, and proposals run 9 % more steps in all."""
_NOTHING: Final = -(2**62)
"""Latest end in a window in which nothing ends."""


# ---- windows


@lean
def _go_through(state: State, segments: Segments, first: Any, forbidden: Any, starts: Any, limit: Any) -> Any:
    """Go through the windows from ``first`` on; those that are ``forbidden`` (bits) must be run. ``starts``: the run
    begins here, with nothing kept. Returns the makespan (ticks), LATE, or minus what the trouble is."""
    kept, results = state.kept, state.snapshots
    k, is_kept = first, not starts
    kept.new_makespan[0] = 0
    for j in range(first):
        kept.new_horizon[j] = kept.horizon[j]
        kept.new_makespan[0] = max(kept.new_makespan[0], kept.horizon[j] + results.latest[kept.work[j], j])
    while k < _WINDOWS:
        state.window[0], kept.new_horizon[k] = k, state.now[0]
        if not is_kept:
            if (forbidden >> k) & ONE == ZERO and _goes_alike(state, k):
                k = _take_over(state, segments, k, forbidden)
                is_kept = True
                if kept.new_makespan[0] > limit:
                    return np.int64(LATE)
                continue
            save(state, ONE - np.uint64(kept.snapshot[k]), k)
            kept.new_snapshot[k] = 1
        _note_begin(state, k)
        end = kept.horizon[k + ONE] if k + ONE < _WINDOWS else np.int64(NEVER)
        state.path.windows[0] += ONE
        result = run_window(state, segments, end, kept.chunk[0], limit)
        if result != 0:
            return result
        _note_end(state, k)
        is_kept = False
        k += ONE
    return kept.new_makespan[0] if kept.new_makespan[0] <= limit else np.int64(LATE)


@lean
def _note_begin(state: State, k: Any) -> None:
    """Note what was done before window ``k``."""
    kept, results, v = state.kept, state.snapshots, ONE - np.uint64(state.kept.work[k])
    copy(results.computed[v, k], state.computed)
    copy(results.carried[v, k], state.carried)
    state.devices.slack[:] = NEVER
    state.latest[0] = 0
    kept.log_first[k] = state.logged[0]


@lean
def _note_end(state: State, k: Any) -> None:
    """Note what was done in window ``k``."""
    kept, results, v = state.kept, state.snapshots, ONE - np.uint64(state.kept.work[k])
    kept.log_last[k] = state.logged[0]
    for d in range(np.uint64(state.computed.shape[0])):
        results.computed[v, k, d] = state.computed[d] - results.computed[v, k, d]
        results.slack[v, k, d] = state.devices.slack[d]
    for r in range(np.uint64(state.carried.shape[0])):
        results.carried[v, k, r] = state.carried[r] - results.carried[v, k, r]
    results.latest[v, k] = _NOTHING
    if state.latest[0] > 0:
        results.latest[v, k] = state.latest[0] - kept.new_horizon[k]
        kept.new_makespan[0] = max(kept.new_makespan[0], state.latest[0])


@lean
def _goes_alike(state: State, k: Any) -> Any:
    """Whether the state is that of snapshot ``k``, and hosts as far ahead as window ``k`` takes."""
    v = np.uint64(state.kept.snapshot[k])
    if not is_same(state, v, k, ZERO):
        return False
    if state.machine.hosted[0]:
        for d in range(np.uint64(state.devices.host.shape[0])):
            state.kept.host_shift[k, d] = state.devices.host[d] - state.now[0] - state.snapshots.host[v, k, d]
    return _hosts_go_alike(state, k)


@lean
def _hosts_go_alike(state: State, k: Any) -> Any:
    """Whether nothing in window ``k`` is put off, or earlier, by ``host_shift``: it is the plan at hand's own, or no
    device waits for its host, neither then nor now."""
    kept, slacks = state.kept, state.snapshots.slack[state.kept.work[k], k]
    if state.machine.hosted[0]:
        for d in range(np.uint64(slacks.shape[0])):
            shift, slack = kept.host_shift[k, d], slacks[d]
            if shift != 0 and (slack < 0 or shift > slack):
                return False
    return True


@lean
def _take_over(state: State, segments: Segments, k: Any, forbidden: Any) -> Any:
    """The state is that of snapshot ``k``: go on from the snapshot at the start of the next window that must be run.
    Returns its number."""
    kept, results, begin = state.kept, state.snapshots, k
    shift = state.now[0] - kept.horizon[k]
    while k < _WINDOWS and (forbidden >> k) & ONE == ZERO and _hosts_go_alike(state, k):
        _add_done(state, k)
        kept.taken[0] |= ONE << k
        latest = kept.horizon[k] + shift + results.latest[kept.work[k], k]
        kept.new_makespan[0] = max(kept.new_makespan[0], latest)
        k += ONE
        kept.new_horizon[k] = kept.horizon[k] + shift
        if state.machine.hosted[0]:
            copy(kept.host_shift[k], kept.host_shift[begin])
    state.now[0], state.shift[0] = kept.new_horizon[k], shift
    start_fold(state)
    if k < _WINDOWS:
        load(state, segments, np.uint64(kept.snapshot[k]), k)
    else:
        forget_pending(state)
    if state.machine.hosted[0]:
        kept.host_shifted[0] |= (ONE << (k + ONE)) - (ONE << begin)
        for d in range(np.uint64(state.devices.host.shape[0])):
            state.devices.host[d] += kept.host_shift[k, d]
    return k


@lean
def _add_done(state: State, k: Any) -> None:
    """Add the work that the plan at hand does in window ``k``."""
    v = np.uint64(state.kept.work[k])
    for d in range(np.uint64(state.computed.shape[0])):
        state.computed[d] += state.snapshots.computed[v, k, d]
    for r in range(np.uint64(state.carried.shape[0])):
        state.carried[r] += state.snapshots.carried[v, k, r]


# ---- proposals


@lean
def propose(state: State, segments: Segments, segment_of_block: U32, changed: U32, count: Any, limit: Any) -> Any:
    """Time the plan at hand with other segments for some of the first ``count`` blocks in ``changed``. Returns its
    makespan (ticks), LATE if that is above ``limit``, or minus what the trouble is. ``accept`` or ``reject`` it;
    another proposal rejects it, too."""
    kept = state.kept
    reject(state)
    if count == 0:
        return kept.makespan[0] if kept.makespan[0] <= limit else np.int64(LATE)
    copy(kept.new_compute, kept.total_compute)
    copy(kept.new_carry, kept.total_carry)
    while True:  # at most twice: there may be no snapshots yet
        starts, first, forbidden, most = kept.valid[0] == 0, ZERO, (ONE << _WINDOWS) - ONE, MOST
        state.path.doubt[0] = NEVER
        if starts:
            begin_again(state)
        else:
            forbidden = _change(state, segments, segment_of_block, changed, np.uint64(count))
            most = min(np.int64(limit), MOST)
            if state.trouble[0] > 0:
                return -np.int64(state.trouble[0])
            while first < _WINDOWS and (forbidden >> first) & ONE == ZERO:
                first += ONE
            _go_back(state, segments, first)
            if state.path.ordered[0]:
                state.path.run[0], state.path.doubt[0] = forbidden, most - kept.makespan[0]
                if runs_long(state):
                    state.path.doubt[0] = -1
            if first < _WINDOWS and is_late(state, segments, most):
                return np.int64(LATE)
            state.path.windows[0] -= state.path.windows[0] >> np.uint64(4)
        result = _go_through(state, segments, first, forbidden, starts, most)
        if not starts or result < 0:
            return result
        _settle(state)
        kept.valid[0], kept.accepted[0] = 1, ZERO


@lean
def _change(state: State, segments: Segments, segment_of_block: U32, changed: U32, count: Any) -> Any:
    """Give blocks other segments. Returns the windows in which something of them happens, bit by bit."""
    kept = state.kept
    forbidden = ZERO
    state.trouble[0] = 0
    for j in range(count):
        block = np.uint64(changed[j])
        segment = np.uint64(segment_of_block[block])
        if segment == np.uint64(state.segment[block]):
            continue
        if not has_room(state, segments, block, segment):
            state.trouble[0] = ROOM
            break
        kept.changed[kept.changes[0]] = block
        kept.changes[0] += ONE
        add_work(state, segments, block, np.uint64(kept.segment[block]), -1)
        add_work(state, segments, block, segment, 1)
        put_segment(state, segments, block, segment)
        forbidden |= kept.touched[block]
    return forbidden


@lean
def _go_back(state: State, segments: Segments, first: Any) -> None:
    """To the snapshot at the start of a window; the number of windows: to the end."""
    kept = state.kept
    state.run[0] += np.uint32(1)
    state.pending_count[0] = state.queue.size[0] = state.logged[0] = ZERO
    state.connections.held[0] = state.connections.waiting[0] = ZERO
    state.trouble[0] = 0
    state.latest[0] = state.shift[0] = 0
    state.computed[:] = 0
    state.carried[:] = 0
    kept.host_shifted[0] = ZERO
    kept.new_touched[:] = 0
    kept.new_snapshot[:] = 0
    kept.visits[0] = ZERO
    kept.taken[0] = (ONE << first) - ONE
    for k in range(first):
        _add_done(state, k)
    start_fold(state)
    kept.new_horizon[_WINDOWS] = kept.horizon[_WINDOWS]
    if first < _WINDOWS:
        state.now[0] = kept.horizon[first]
        load(state, segments, np.uint64(kept.snapshot[first]), first)


@lean
def reject(state: State) -> None:
    """Leave the plan at hand as it is."""
    kept = state.kept
    for j in range(kept.changes[0]):
        block = np.uint64(kept.changed[j])
        state.segment[block] = kept.segment[block]
        keep_busy(kept.busy, state.busy, block)
    kept.changes[0] = ZERO


@lean
def _shift_hosts(state: State, k: Any) -> None:
    """Hosts were ahead by more or less at snapshot ``k``, and in window ``k`` if it went as in the plan at hand."""
    kept, results = state.kept, state.snapshots
    v, work, taken = np.uint64(kept.snapshot[k]), np.uint64(kept.work[k]), (kept.taken[0] >> k) & ONE == ONE
    for d in range(np.uint64(state.devices.host.shape[0])):
        results.host[v, k, d] += kept.host_shift[k, d]
        if taken and results.slack[work, k, d] < NEVER:
            results.slack[work, k, d] -= kept.host_shift[k, d]


@lean
def accept(state: State) -> None:
    """Make the last proposal the plan at hand. Its makespan must have been returned."""
    if state.kept.changes[0] > ZERO:
        _settle(state)


@lean
def _settle(state: State) -> None:
    """Keep what the last run brought."""
    kept = state.kept
    for j in range(kept.changes[0]):
        block = np.uint64(kept.changed[j])
        kept.segment[block] = state.segment[block]
        keep_busy(state.busy, kept.busy, block)
        for m in range(np.uint64(state.schedule.microbatches[0])):
            first = m * state.places[0] + state.first[block]
            for place in range(first, first + state.capacity[block]):
                kept.window[place] = 0
    kept.changes[0] = ZERO
    for b in range(np.uint64(kept.touched.shape[0])):
        kept.touched[b] = (kept.touched[b] & kept.taken[0]) | kept.new_touched[b]
    for k in range(np.uint64(WINDOWS)):
        if (kept.taken[0] >> k) & ONE == ZERO:
            kept.work[k] ^= np.uint8(1)
            for at in range(kept.log_first[k], kept.log_last[k]):
                kept.window[kept.log[at]] = k + ONE
        if kept.new_snapshot[k]:
            kept.snapshot[k] ^= np.uint8(1)
        if (kept.host_shifted[0] >> k) & ONE == ONE:
            _shift_hosts(state, k)
    copy(kept.horizon, kept.new_horizon)
    for j in range(kept.visits[0]):
        visit = np.uint64(kept.visited[j])
        kept.visit_window[visit] = kept.new_window[visit]
        kept.visit_tick[visit] = kept.new_tick[visit] - kept.horizon[np.uint64(kept.new_window[visit]) - ONE]
    copy(kept.total_compute, kept.new_compute)
    copy(kept.total_carry, kept.new_carry)
    kept.makespan[0] = kept.new_makespan[0]
    kept.accepted[0] += ONE
    if kept.accepted[0] > _STALE or abs(kept.makespan[0] - kept.first_makespan[0]) > kept.first_makespan[0] >> 1:
        kept.valid[0] = 0
