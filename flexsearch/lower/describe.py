"""From a proposal's configs to its rows, compiled."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from flexsearch.compiled import ONE, U32, ZERO, lean
from flexsearch.lower.arrays import NOTHING, Pools, Program, State
from flexsearch.lower.emit import BlockTable, Draft, Filled, emit
from flexsearch.lower.keys import Table
from flexsearch.lower.rows import NEVER, UPDATE, Segments
from flexsearch.lower.wiring import Change, Wiring, carry_over, place, wire
from flexsearch.packed import packed

WRITTEN, LATE, LACKING, FULL = range(4)
"""What ``describe`` did: wrote the rows; gave up, as some device or link alone has too much to do; found templates
missing (``Change.missing``); found no room."""


@packed
class Plan(NamedTuple):
    """The plan at hand (``state``, ``segment`` by block, ``kept`` entries of the arena) and what is ``proposed``:
    ``new_segment``, ``filled`` entries. They differ in nothing but what ``change`` says. ``whole``: (1,) 1 if all
    blocks are to be written, as there is no plan at hand."""

    program: Program
    blocks: BlockTable
    wiring: Wiring
    pools: Pools
    table: Table
    state: State
    proposed: State
    change: Change
    draft: Draft
    segments: Segments
    segment: U32
    new_segment: U32
    kept: Filled
    filled: Filled
    whole: U32


@lean
def describe(plan: Plan, limit: Any) -> Any:
    """Write the rows of the plan at hand with the configs in ``change``. ``keep`` or ``drop`` it, whatever is returned.
    ``limit``: ticks above which the plan is of no interest."""
    change, proposed = plan.change, plan.proposed
    place(plan.blocks, plan.pools, proposed, change)
    if limit < NEVER and _too_busy(plan.program, proposed, limit):  # before templates for its edges are asked for
        return LATE
    wire(plan.wiring, plan.blocks, plan.program, plan.pools, plan.table, proposed, plan.state, change)
    if change.lacking[0] > ZERO:
        return LACKING
    for r in range(np.uint64(proposed.load.shape[0])):
        if proposed.load[r] > limit:
            return LATE
    if plan.whole[0] == 1:
        for every in range(np.uint64(plan.segment.shape[0])):
            if not _write(plan, every):
                return FULL
        return WRITTEN
    update = False
    for k in range(change.blocks[0]):
        b = np.uint64(change.block[k])
        if plan.blocks.kind[b] == UPDATE:
            update = True
        elif not _write(plan, b):
            return FULL
    if update and not _write(plan, np.uint64(plan.segment.shape[0]) - ONE):
        return FULL
    return WRITTEN


@lean
def _write(plan: Plan, b: Any) -> Any:
    """Write the rows of a block; False if there is no room."""
    segment = emit(
        plan.blocks, plan.program, plan.pools, plan.proposed, plan.draft, plan.segments, plan.filled, plan.new_segment,
        b,
    )  # fmt: skip
    if segment == NOTHING:
        return False
    plan.new_segment[b] = segment
    return True


@lean
def _too_busy(program: Program, state: State, limit: Any) -> Any:
    """Whether some processor alone has more than ``limit`` ticks to compute."""
    microbatches = np.int64(program.microbatches[0])
    for d in range(np.uint64(state.busy.shape[0])):
        total = np.int64(0)
        for e in range(np.uint64(state.busy.shape[0])):
            if program.processor[e] == program.processor[d]:
                total += state.busy[e]
        if total * microbatches > limit:
            return True
    return False


@lean
def keep(plan: Plan) -> None:
    """Make what is proposed the plan at hand."""
    carry_over(plan.proposed, plan.state, plan.change)
    _copy(plan, plan.new_segment, plan.segment)
    _copy_filled(plan.filled, plan.kept)
    plan.whole[0] = 0


@lean
def drop(plan: Plan) -> None:
    """Leave the plan at hand as it is."""
    carry_over(plan.state, plan.proposed, plan.change)
    _copy(plan, plan.segment, plan.new_segment)
    _copy_filled(plan.kept, plan.filled)


@lean
def _copy(plan: Plan, source: U32, target: U32) -> None:
    if plan.whole[0] == 1:
        for every in range(np.uint64(source.shape[0])):
            target[every] = source[every]
    else:
        for k in range(plan.change.blocks[0]):
            b = np.uint64(plan.change.block[k])
            target[b] = source[b]


@lean
def _copy_filled(source: Filled, target: Filled) -> None:
    target.segment[0], target.table[0], target.step[0] = source.segment[0], source.table[0], source.step[0]
    target.communication[0], target.link[0], target.drag[0] = source.communication[0], source.link[0], source.drag[0]
    target.receiver[0], target.follower[0] = source.receiver[0], source.follower[0]
