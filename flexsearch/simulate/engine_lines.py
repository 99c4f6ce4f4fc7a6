"""Lines of communications that go on one connection, compiled.

A connection carries one communication after the other, or two at once. Those that have had a turn on their links and
not their last hold it; what becomes ready meanwhile waits in line. Its place there is ``Pending.turned``: -2 is the
first. One that is called has -1: it holds the connection, and is served as the next turn there would be. What needs a
single turn and need not wait holds nothing: it keeps its links as soon as it is served.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from flexsearch.compiled import ONE, ZERO, inlined, lean
from flexsearch.lower.rows import Segments
from flexsearch.simulate.engine_queue import NUMBER, block_of, push
from flexsearch.simulate.engine_state import State

_CALLED: Final = -1


@inlined
def row_of(state: State, segments: Segments, identity: Any) -> Any:
    """The row of a communication in the segments."""
    return np.uint64(segments.communication_first[np.uint64(state.segment[block_of(identity)])]) + (identity & NUMBER)


@lean
def must_wait(state: State, connection: Any) -> Any:
    """Whether as many communications hold a connection as it carries at once."""
    lines, held = state.lines, ZERO
    for k in range(lines.held[0]):
        if lines.connection[k] == connection:
            held += ONE
    return held > connection & ONE


@inlined
def _goes_on(state: State, segments: Segments, slot: Any, connection: Any) -> Any:
    """Whether a pending communication goes on a connection."""
    return segments.connection[row_of(state, segments, state.pending.identity[slot])] == connection


@lean
def stand_in_line(state: State, segments: Segments, slot: Any, row: Any) -> None:
    """A communication that is ready waits behind those that wait for its connection already."""
    pending, last = state.pending, np.int64(_CALLED)
    for other in range(state.pending_count[0]):
        if pending.turned[other] < last and _goes_on(state, segments, other, segments.connection[row]):
            last = pending.turned[other]
    pending.turned[slot] = last - 1
    state.lines.waiting[0] += ONE


@lean
def hold(state: State, identity: Any, connection: Any) -> None:
    """A communication holds its connection."""
    lines, k = state.lines, state.lines.held[0]
    lines.identity[k], lines.connection[k] = identity, connection
    lines.held[0] = k + ONE


@lean
def call_next(state: State, segments: Segments, connection: Any, tick: Any) -> None:
    """From a tick on, a connection may carry the first one that waits for it."""
    pending = state.pending
    for slot in range(state.pending_count[0]):
        if pending.turned[slot] < _CALLED and _goes_on(state, segments, slot, connection):
            pending.turned[slot] += 1
            if pending.turned[slot] == _CALLED:
                state.lines.waiting[0] -= ONE
                pending.ready[slot] = tick
                hold(state, pending.identity[slot], connection)
                push(state, tick, pending.identity[slot], np.uint64(pending.place[slot]))


@lean
def let_go(state: State, identity: Any) -> None:
    """A communication that holds its connection has its last turn."""
    lines, last = state.lines, state.lines.held[0] - ONE
    for k in range(last):
        if lines.identity[k] == identity:
            lines.identity[k], lines.connection[k] = lines.identity[last], lines.connection[last]
            break
    lines.held[0] = last


@lean
def stand_again(state: State, segments: Segments, slot: Any) -> None:
    """A pending communication that all have issued, and that has not ended, is in the queue again, or in a line."""
    pending, identity = state.pending, state.pending.identity[slot]
    if pending.turned[slot] < _CALLED:
        state.lines.waiting[0] += ONE
        return
    push(state, pending.ready[slot], identity, np.uint64(pending.place[slot]))
    if pending.turned[slot] != 0:
        hold(state, identity, segments.connection[row_of(state, segments, identity)])
