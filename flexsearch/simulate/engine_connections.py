"""Which communications have their connections, and which wait for them, compiled.

A connection carries one communication after the other, or two at once. Those that have had a turn on their links and
not their last hold it; what becomes ready meanwhile waits in a queue. Its place there is ``Pending.turned``: -2 is the
first. One that is admitted has -1: it holds the connection, and is served as the next turn there would be. What needs a
single turn and need not wait holds nothing: it keeps its links as soon as it is served.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from flexsearch.compiled import ONE, ZERO, inlined, lean
from flexsearch.lower.rows import Segments
from flexsearch.simulate.engine_queue import NUMBER, block_of, push
from flexsearch.simulate.engine_state import State

_ADMITTED: Final = -1


@inlined
def row_of(state: State, segments: Segments, identity: Any) -> Any:
    """The row of a communication in the segments."""
    return np.uint64(segments.communication_first[np.uint64(state.segment[block_of(identity)])]) + (identity & NUMBER)


@lean
def must_wait(state: State, connection: Any) -> Any:
    """Whether as many communications hold a connection as it carries at once."""
    connections, held = state.connections, ZERO
    for k in range(connections.held[0]):
        if connections.connection[k] == connection:
            held += ONE
    return held > connection & ONE


@inlined
def _goes_on(state: State, segments: Segments, slot: Any, connection: Any) -> Any:
    """Whether a pending communication goes on a connection."""
    return segments.connection[row_of(state, segments, state.pending.identity[slot])] == connection


@lean
def enqueue(state: State, segments: Segments, slot: Any, row: Any) -> None:
    """A communication that is ready waits behind those that wait for its connection already."""
    pending, last = state.pending, np.int64(_ADMITTED)
    for other in range(state.pending_count[0]):
        if pending.turned[other] < last and _goes_on(state, segments, other, segments.connection[row]):
            last = pending.turned[other]
    pending.turned[slot] = last - 1
    state.connections.waiting[0] += ONE


@lean
def acquire(state: State, identity: Any, connection: Any) -> None:
    """A communication holds its connection."""
    connections, k = state.connections, state.connections.held[0]
    connections.identity[k], connections.connection[k] = identity, connection
    connections.held[0] = k + ONE


@lean
def admit_next(state: State, segments: Segments, connection: Any, tick: Any) -> None:
    """From a tick on, a connection may carry the first one that waits for it."""
    pending = state.pending
    for slot in range(state.pending_count[0]):
        if pending.turned[slot] < _ADMITTED and _goes_on(state, segments, slot, connection):
            pending.turned[slot] += 1
            if pending.turned[slot] == _ADMITTED:
                state.connections.waiting[0] -= ONE
                pending.ready[slot] = tick
                acquire(state, pending.identity[slot], connection)
                push(state, tick, pending.identity[slot], np.uint64(pending.place[slot]))


@lean
def release(state: State, identity: Any) -> None:
    """A communication that holds its connection has its last turn."""
    held, last = state.connections, state.connections.held[0] - ONE
    for k in range(last):
        if held.identity[k] == identity:
            held.identity[k], held.connection[k] = held.identity[last], held.connection[last]
            break
    held.held[0] = last


@lean
def restore(state: State, segments: Segments, slot: Any) -> None:
    """A pending communication that all have issued, and that has not ended, is in the queue again, or waits for its
    connection."""
    pending, identity = state.pending, state.pending.identity[slot]
    if pending.turned[slot] < _ADMITTED:
        state.connections.waiting[0] += ONE
        return
    push(state, pending.ready[slot], identity, np.uint64(pending.place[slot]))
    if pending.turned[slot] != 0:
        acquire(state, identity, segments.connection[row_of(state, segments, identity)])
