"""Whether a run is certain to end above a limit, compiled: by the work that is left, and by the longest path to an end.

The path takes no account of queues: each device runs what is left of its rows, and a communication takes as long as it
does alone. It is worked out where the run is so late that it would end above the limit if nothing made up for that, and
again when it is later by what was missing then. Where proposals are long it is worked out for each of them before
anything is run.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flexsearch.compiled import ONE, TWO, ZERO, lean
from flexsearch.lower.rows import COMPUTE, WAIT, Segments
from flexsearch.simulate.engine_queue import NUMBER, block_of
from flexsearch.simulate.engine_state import COMPUTING, DONE, WINDOWS, State

_LONG: Any = np.uint64(16 * 10)
"""From so many on (as ``Path.windows``) the path is worked out before anything is run: ten windows a proposal.
Measured: proposals for NMT and BERT-large run 24 to 29, for Inception-v3 and ResNet-101 7; a path costs about 4."""


@lean
def is_late(state: State, segments: Segments, limit: Any) -> Any:
    """Whether the makespan is certainly above the limit."""
    if state.latest[0] > limit or _has_too_much_to_do(state, limit):
        return True
    if state.shift[0] <= state.path.doubt[0] or not _path_may_pay(state):
        return False
    end = _least_end(state, segments)
    state.path.doubt[0] = state.shift[0] + limit - end
    return end > limit


@lean
def runs_long(state: State) -> Any:
    """Whether proposals run so many windows on average that working out the path takes less."""
    return state.path.windows[0] > _LONG


@lean
def _path_may_pay(state: State) -> Any:
    """Whether so much is still to be run that working out the path may take less: half of the windows that are left."""
    if runs_long(state):
        return True
    run, left = ZERO, np.uint64(WINDOWS) - state.window[0]
    for k in range(state.window[0], np.uint64(WINDOWS)):
        run += (state.path.run[0] >> k) & ONE
    return TWO * run >= left


@lean
def _has_too_much_to_do(state: State, limit: Any) -> Any:
    """Whether what is left to be computed by a device, or carried by a link, does not fit."""
    kept, now = state.kept, state.now[0]
    for d in range(np.uint64(state.devices.clock.shape[0])):
        left = kept.new_compute[d] - state.computed[d]
        if left > 0 and max(now, state.devices.clock[d]) + left > limit:
            return True
    for r in range(np.uint64(state.free.shape[0])):
        left = kept.new_carry[r] - state.carried[r]
        if left > 0 and max(now, state.free[r]) + left > limit:
            return True
    return False


@lean
def _least_end(state: State, segments: Segments) -> Any:
    """A tick before which the run cannot end: that of the longest path from where devices and pending communications
    stand. Only for what is ``ordered``."""
    devices, path, pending = state.devices, state.path, state.pending
    first = count = np.uint64(state.segment.shape[0])
    for d in range(np.uint64(devices.clock.shape[0])):
        path.left[d], path.block[d] = 0, count
        if devices.status[d] != DONE:
            path.block[d] = devices.block[d]
            first = min(first, np.uint64(devices.block[d]))
    _walk_back(state, segments, first)
    end = state.latest[0]
    for d in range(np.uint64(devices.clock.shape[0])):
        if devices.status[d] != DONE:
            end = max(end, max(state.now[0], devices.clock[d]) + path.left[d])
    for slot in range(state.pending_count[0]):
        at, sender = pending.end[slot], block_of(pending.identity[slot])
        number = pending.identity[slot] & NUMBER
        row = np.uint64(segments.communication_first[np.uint64(state.segment[sender])]) + number
        if at < 0:
            left = segments.communication_ticks[row] - max(0, pending.turned[slot])
            at = max(state.now[0], pending.ready[slot]) + left
        after = path.after[np.uint64(pending.place[slot])]
        end = max(end, at + max(after, _after_followers(state, segments, row)))
    return end


@lean
def _walk_back(state: State, segments: Segments, first: Any) -> None:
    """Fill ``path.left`` and ``path.after`` with what is to be done in the blocks from ``first`` on."""
    devices, path, pending = state.devices, state.path, state.pending
    place_first, left, after, stands, busy = state.first, path.left, path.after, path.block, state.busy
    kinds, senders, rows, ticks = segments.step_kind, segments.step_block, segments.step_row, segments.step_ticks
    step_first, whole = segments.step_first, segments.communication_ticks
    follows, followed = segments.follower_first, segments.follower_last
    words, block = np.uint64(busy.shape[1]), np.uint64(state.segment.shape[0])
    path.first[0] = first
    for slot in range(state.pending_count[0]):
        after[np.uint64(pending.place[slot])] = 0
    for each in range(first, block):
        segment = np.uint64(state.segment[each])
        end = place_first[each] + np.uint64(segments.communication_last[segment])
        for place in range(place_first[each], end - np.uint64(segments.communication_first[segment])):
            after[place] = 0
    while block > first:
        block -= ONE
        segment = np.uint64(state.segment[block])
        table, row_first = np.uint64(segments.device_steps[segment]), np.uint64(segments.communication_first[segment])
        for word in range(words):
            those, d = busy[block, word], word << np.uint64(6)
            while those > ZERO:
                if those & ONE == ONE and block >= np.uint64(stands[d]):
                    begin, step = np.uint64(step_first[table + d]), np.uint64(step_first[table + d + ONE])
                    path_left, rest = left[d], np.int64(0)
                    if block == np.uint64(stands[d]):
                        begin += np.uint64(devices.step[d])
                        if devices.status[d] == COMPUTING:
                            begin += ONE
                            rest = devices.left[d]
                    while step > begin:
                        step -= ONE
                        kind = kinds[step]
                        if kind == COMPUTE:
                            path_left += ticks[step]
                        elif kind == WAIT:
                            place = place_first[np.uint64(senders[step])] + np.uint64(rows[step])
                            after[place] = max(after[place], path_left)
                        else:
                            row = row_first + np.uint64(rows[step])
                            then = after[place_first[block] + np.uint64(rows[step])]
                            if follows[row] < followed[row]:
                                then = max(then, _after_followers(state, segments, row))
                            path_left = max(path_left, whole[row] + then)
                    left[d] = path_left + rest
                those >>= ONE
                d += ONE


@lean
def _after_followers(state: State, segments: Segments, row: Any) -> Any:
    """The path from the end of a communication on, over those that follow it."""
    after = np.int64(0)
    for k in range(np.uint64(segments.follower_first[row]), np.uint64(segments.follower_last[row])):
        block, number = np.uint64(segments.follower_block[k]), np.uint64(segments.follower_row[k])
        if block >= state.path.first[0]:
            then = np.uint64(segments.communication_first[np.uint64(state.segment[block])]) + number
            after = max(after, segments.communication_ticks[then] + state.path.after[state.first[block] + number])
    return after
