"""Folding in time, compiled: when the state is that of some microbatches before, put off by a period, then it will be
so again, as long as the lists of actions go on alike. Whole periods are jumped over at once; integers shift exactly.

The reference device says how long a period may be; whether it is one is decided by comparing the states.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from flexsearch.compiled import ONE, ZERO, lean
from flexsearch.cost.ticks import FOREVER
from flexsearch.lower.rows import NEVER, Schedule
from flexsearch.simulate.engine_state import COMPUTING, DONE, ENDED, WAITING, WINDOWS, State
from flexsearch.simulate.engine_windows import next_tick
from flexsearch.simulate.snapshots import copy, is_same, later, save, shift_pending

LONGEST: Final = 4
"""Microbatches of the longest period that is looked for."""
_MARK: Any = np.uint64(WINDOWS)
_FAR: Final = 64
"""Actions of a device among which the same one of an earlier microbatch is looked for."""


@lean
def start_fold(state: State) -> None:
    """Look for periods from now on, and for none that began before."""
    state.fold.due[0], state.fold.tries[0] = NEVER, ZERO
    state.fold.current[0] = np.uint64(state.fold.begun.shape[0]) - ONE


@lean
def consider_fold(state: State) -> Any:
    """At a horizon: jump over periods if the state is that of the mark again. Returns the ticks jumped over."""
    fold = state.fold
    ticks = np.int64(0)
    if fold.enabled[0] == 0 or state.now[0] < fold.due[0] < NEVER:
        return ticks
    if fold.due[0] == state.now[0] and is_same(state, ZERO, _MARK, fold.lag[0]):
        period = state.now[0] - fold.base[0]
        periods = min(_periods(state), np.uint64((FOREVER - state.now[0]) // period))
        periods = min(periods, _periods_of_hosts(state, period))
        if periods > ZERO:
            ticks = np.int64(periods) * period
            _jump(state, periods, ticks)
    _mark(state)
    return ticks


@lean
def _mark(state: State) -> None:
    """Remember this horizon; the next comparison is due a period later, if the reference device tells one."""
    fold = state.fold
    fold.due[0] = NEVER
    fold.lag[0] = ONE + _lag_of(fold.tries[0])
    action = fold.current[0]
    before = _before(state.schedule, action, fold.lag[0], np.uint64(state.schedule.group[state.reference[0]]))
    if before == action:
        return
    period = fold.begun[action] - fold.begun[before]
    if period <= 0 or next_tick(state) >= state.now[0] + period:  # nothing that happens comes again by then
        return
    fold.tries[0] += ONE
    fold.base[0], fold.due[0], fold.log[0] = state.now[0], state.now[0] + period, state.logged[0]
    save(state, ZERO, _MARK)
    copy(fold.computed, state.computed)
    copy(fold.carried, state.carried)
    copy(fold.host, state.devices.host)
    fold.slack[:] = NEVER


@lean
def _periods_of_hosts(state: State, period: Any) -> Any:
    """For how many periods more it does not matter that hosts take another time for a period than devices: all if they
    are ahead and take less; until they are no longer ahead if they take more; none if a device waited for its own."""
    fold, devices, most = state.fold, state.devices, np.uint64(state.schedule.microbatches[0])
    for d in range(np.uint64(devices.host.shape[0])):
        behind = devices.host[d] - fold.host[d] - period
        if behind == 0 or devices.status[d] == DONE:
            continue
        if fold.slack[d] < 0:
            return ZERO
        if behind > 0:
            most = min(most, np.uint64(fold.slack[d] // behind))
    return most


@lean
def _lag_of(tries: Any) -> Any:
    """Microbatches of the period that is looked for, less one: 0, 0, 1, 2, 3, and again."""
    k = tries % np.uint64(LONGEST + 1)
    return k - ONE if k > ZERO else ZERO


@lean
def _before(schedule: Schedule, action: Any, lag: Any, group: Any) -> Any:
    """The action of the same blocks, ``lag`` microbatches before; the action itself if there is none near."""
    first = np.uint64(schedule.action_first[group])
    if action >= np.uint64(schedule.microbatch.shape[0]):
        return action
    a = action
    for _ in range(_FAR):
        if a <= first:
            return action
        a -= ONE
        if (
            schedule.block_first[a] == schedule.block_first[action]
            and schedule.block_last[a] == schedule.block_last[action]
            and np.uint64(schedule.microbatch[a]) + lag == np.uint64(schedule.microbatch[action])
        ):
            return a
    return action


@lean
def _periods(state: State) -> Any:
    """How many periods more the actions of all devices go on alike."""
    schedule, devices = state.schedule, state.devices
    most = np.uint64(schedule.microbatches[0])
    for d in range(np.uint64(devices.action.shape[0])):
        if devices.status[d] == DONE:
            continue
        begin, action = np.uint64(state.snapshots.action[ZERO, _MARK, d]), np.uint64(devices.action[d])
        length = action - begin
        last = np.uint64(schedule.action_last[np.uint64(schedule.group[d])])
        if length == ZERO:
            return ZERO
        alike = ZERO  # actions from ``begin`` on that come again a period later
        while action + alike < last and alike <= most * length and _alike(state, begin + alike, length):
            alike += ONE
        if alike == ZERO:
            return ZERO
        most = min(most, (alike - ONE) // length)
    return most


@lean
def _alike(state: State, action: Any, length: Any) -> Any:
    """Whether an action comes again ``length`` actions later, a period of microbatches later."""
    schedule, other = state.schedule, action + length
    first = np.uint64(schedule.block_first[action])
    last = np.uint64(schedule.block_last[action])
    if first != np.uint64(schedule.block_first[other]) or last != np.uint64(schedule.block_last[other]):
        return False
    microbatch, next_microbatch = np.uint64(schedule.microbatch[action]), np.uint64(schedule.microbatch[other])
    if microbatch + state.fold.lag[0] != next_microbatch:
        return False
    final = np.uint64(schedule.final[0])
    if microbatch == ZERO or next_microbatch == final:  # blocks that run only in the first or the final one
        for block in range(first, last):
            if schedule.once[block] or schedule.last[block]:
                return False
    return True


@lean
def _jump(state: State, periods: Any, ticks: Any) -> None:
    """Go on some periods later."""
    fold, devices, schedule = state.fold, state.devices, state.schedule
    lag = periods * fold.lag[0]
    _serve_all(state, periods)
    shift_pending(state, lag, ticks)
    bit = ONE << state.window[0]
    for d in range(np.uint64(devices.clock.shape[0])):
        devices.clock[d] += ticks
        if devices.status[d] == DONE:
            continue
        hosts = (devices.host[d] - fold.host[d]) * np.int64(periods)
        devices.host[d] += hosts
        if fold.slack[d] < NEVER:
            devices.slack[d] = min(devices.slack[d], fold.slack[d] - max(0, hosts - ticks))
        begin, action = np.uint64(state.snapshots.action[ZERO, _MARK, d]), np.uint64(devices.action[d])
        for a in range(begin, action + ONE):
            for block in range(np.uint64(schedule.block_first[a]), np.uint64(schedule.block_last[a])):
                state.kept.new_touched[block] |= bit
        devices.action[d] = action + periods * (action - begin)
        if devices.status[d] == WAITING or devices.status[d] == COMPUTING:
            devices.awaited[d] = later(schedule, devices.awaited[d], lag)
        state.computed[d] += (state.computed[d] - fold.computed[d]) * np.int64(periods)
    for r in range(np.uint64(state.free.shape[0])):
        state.free[r] += ticks
        state.computing[r] += ticks
        state.carried[r] += (state.carried[r] - fold.carried[r]) * np.int64(periods)
    for d in range(np.uint64(devices.clock.shape[0])):
        state.latest[0] = max(state.latest[0], devices.clock[d])
    for slot in range(state.pending_count[0]):
        state.latest[0] = max(state.latest[0], state.pending.end[slot])
    state.now[0] += ticks
    fold.jumped[0] += ticks
    fold.current[0] = np.uint64(fold.begun.shape[0]) - ONE


@lean
def _serve_all(state: State, periods: Any) -> None:
    """Note that all communications of the periods jumped over have ended."""
    kept, end = state.kept, state.logged[0]
    for j in range(periods):
        put_off = np.uint64((j + ONE) * state.fold.lag[0] * state.places[0])
        for k in range(state.fold.log[0], end):
            place = np.uint64(kept.log[k]) + put_off
            state.stamp[place], state.slot[place] = state.run[0], ENDED
            kept.log[state.logged[0]] = place
            state.logged[0] += ONE
