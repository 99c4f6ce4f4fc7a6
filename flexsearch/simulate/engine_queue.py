"""Identities of rows, and the queue of those that are ready, compiled.

The identity of a row is (microbatch, block, computation or communication, number), packed into one integer: of rows
that are ready at the same tick, the one with the smaller identity is served first.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flexsearch.compiled import ONE, TWO, ZERO, lean
from flexsearch.simulate.engine_state import ROOM, State

MICROBATCH, BLOCK = np.uint64(48), np.uint64(25)
"""First bits of a microbatch and of a block in the identity of a row; below stand a flag and the number."""
COMMUNICATION: Any = np.uint64(1 << 24)
_BLOCKS: Any = np.uint64((1 << 23) - 1)
NUMBER: Any = np.uint64((1 << 24) - 1)


@lean
def identity_of(state: State, microbatch: Any, block: Any, flag: Any, number: Any) -> Any:
    """Identity of a row: blocks that run once belong to microbatch 0."""
    if state.schedule.once[block]:
        microbatch = ZERO
    return (microbatch << MICROBATCH) | (block << BLOCK) | flag | number


@lean
def block_of(identity: Any) -> Any:
    """The block of a row."""
    return (identity >> BLOCK) & _BLOCKS


@lean
def place_of(state: State, identity: Any) -> Any:
    """Place of a communication in the tables."""
    return (identity >> MICROBATCH) * state.places[0] + state.first[block_of(identity)] + (identity & NUMBER)


@lean
def push(state: State, ready: Any, identity: Any, item: Any) -> None:
    """Add a row to the queue."""
    queue = state.queue
    at = queue.size[0]
    if at == np.uint64(queue.item.shape[0]):
        state.trouble[0] = ROOM
        return
    queue.size[0] = at + ONE
    while at > ZERO:
        above = (at - ONE) >> ONE
        if queue.ready[above] < ready or (queue.ready[above] == ready and queue.identity[above] < identity):
            break
        queue.ready[at], queue.identity[at] = queue.ready[above], queue.identity[above]
        queue.item[at] = queue.item[above]
        at = above
    queue.ready[at], queue.identity[at], queue.item[at] = ready, identity, item


@lean
def drop_first(state: State) -> None:
    """Take the first row out of the queue."""
    queue = state.queue
    size = queue.size[0] - ONE
    queue.size[0] = size
    ready, identity, item = queue.ready[size], queue.identity[size], queue.item[size]
    at = ZERO
    while True:
        below = at * TWO + ONE
        if below >= size:
            break
        right = below + ONE
        if right < size:  # without a branch that depends on which is first: half of the guesses would be wrong
            one, other = queue.ready[below], queue.ready[right]
            below += np.uint64((other < one) | ((other == one) & (queue.identity[right] < queue.identity[below])))
        if ready < queue.ready[below] or (ready == queue.ready[below] and identity < queue.identity[below]):
            break
        queue.ready[at], queue.identity[at] = queue.ready[below], queue.identity[below]
        queue.item[at] = queue.item[below]
        at = below
    queue.ready[at], queue.identity[at], queue.item[at] = ready, identity, item
