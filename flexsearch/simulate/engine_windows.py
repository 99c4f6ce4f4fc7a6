"""The engine's event loop, compiled: all that happens before a horizon, in the order in which it is ready.

Only communications (and computations of contended processors) are events. A device that does not wait runs until the
horizon; whatever it issues behind it is ready behind it, so all that is ready before the horizon can be served.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flexsearch.compiled import ONE, ZERO, lean
from flexsearch.cost.ticks import FOREVER
from flexsearch.lower.rows import Segments
from flexsearch.simulate.engine_run import advance, serve
from flexsearch.simulate.engine_state import DEADLOCK, ENDED, RUNNING, WAITING, State


@lean
def run_to(state: State, segments: Segments, horizon: Any) -> None:
    """All that happens before the horizon. ``trouble`` says if that was not possible."""
    state.woken_count[0] = ZERO
    for d in range(np.uint64(state.devices.clock.shape[0])):
        if state.devices.status[d] == RUNNING:
            state.woken[state.woken_count[0]] = d
            state.woken_count[0] += ONE
    while state.trouble[0] == 0:
        while state.woken_count[0] > ZERO:
            state.woken_count[0] -= ONE
            advance(state, segments, np.uint64(state.woken[state.woken_count[0]]), horizon)
        if state.queue.size[0] == ZERO or state.queue.ready[0] >= horizon:
            break
        serve(state, segments, horizon)
    if state.trouble[0] == 0:
        _sweep(state, horizon)
    state.now[0] = horizon


@lean
def _sweep(state: State, horizon: Any) -> None:
    """Forget pending communications that ended before the horizon: who waits for one has nothing to wait for."""
    pending, count = state.pending, ZERO
    for slot in range(state.pending_count[0]):
        place = np.uint64(pending.place[slot])
        if 0 <= pending.end[slot] <= horizon:
            state.slot[place] = ENDED
            continue
        if count < slot:
            pending.place[count], pending.identity[count] = place, pending.identity[slot]
            pending.missing[count], pending.ready[count] = pending.missing[slot], pending.ready[slot]
            pending.end[count], pending.turned[count] = pending.end[slot], pending.turned[slot]
            state.slot[place] = count
        count += ONE
    state.pending_count[0] = count


@lean
def next_tick(state: State) -> Any:
    """When something happens next; FOREVER if nothing does before."""
    tick = np.int64(FOREVER)
    if state.queue.size[0] > ZERO:
        tick = min(tick, state.queue.ready[0])
    for d in range(np.uint64(state.devices.clock.shape[0])):
        if state.devices.status[d] == RUNNING:
            tick = min(tick, state.devices.clock[d])
    return tick


@lean
def is_over(state: State) -> Any:
    """Whether nothing can happen any more: all is done, or ``trouble`` is DEADLOCK."""
    if state.queue.size[0] > ZERO:
        return False
    waits = False
    for d in range(np.uint64(state.devices.status.shape[0])):
        if state.devices.status[d] == RUNNING:
            return False
        waits |= state.devices.status[d] == WAITING
    if waits:
        state.trouble[0] = DEADLOCK
    return True
