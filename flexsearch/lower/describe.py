"""From a proposal's configs to its rows, compiled."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from flexsearch.compiled import ONE, U32, ZERO, lean
from flexsearch.lower.arrays import NOTHING, BlockTable, Pools, Program, State
from flexsearch.lower.change import Change, Wiring
from flexsearch.lower.draft import Draft, Filled, finish
from flexsearch.lower.emit import compute, gather, mark_pieces, send, synchronise, update, wait
from flexsearch.lower.keys import Table
from flexsearch.lower.reading import read
from flexsearch.lower.rows import (
    BACKWARD,
    GATHER_ONCE,
    NEVER,
    READ,
    RESULT,
    SYNCHRONISE,
    UPDATE,
    WEIGHT_GRADIENT,
    Segments,
    is_gather,
)
from flexsearch.lower.wiring import carry_over, place, wire
from flexsearch.packed import packed

DONE, LATE, LACKING, FULL = range(4)
"""What came of it: all is well; some device or link alone has too much to do; templates are missing
(``Change.missing``); there is no room in the arena."""


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
def rewire(plan: Plan, limit: Any) -> Any:
    """Find the templates of the plan at hand with the configs in ``change``, and which blocks have other rows. Whatever
    is returned, ``keep`` or ``drop`` it; ``write`` it before if it is DONE. ``limit``: ticks above which the plan is of
    no interest: then it may be LATE."""
    change, proposed = plan.change, plan.proposed
    place(plan.blocks, plan.pools, proposed, change)
    if limit < NEVER and _too_busy(plan, limit):  # before templates for its edges are asked for
        return LATE
    wire(plan.wiring, plan.blocks, plan.program, plan.pools, plan.table, proposed, plan.state, change)
    for r in range(np.uint64(proposed.load.shape[0])):
        if proposed.load[r] > limit:  # without what is lacking
            return LATE
    return DONE if change.lacking[0] == ZERO else LACKING


@lean
def write(plan: Plan) -> Any:
    """Write the rows of what is proposed: DONE, or FULL."""
    blocks, pools, state, draft, segments = plan.blocks, plan.pools, plan.proposed, plan.draft, plan.segments
    count = np.uint64(plan.segment.shape[0])
    every = plan.whole[0] == 1
    last = count if every else plan.change.blocks[0] + ONE
    draft.groups.gathers[0] = ZERO
    for k in range(last):
        b: Any = k
        if not every:
            # The update reads the segments of all synchronisation, so it comes last.
            b = np.uint64(plan.change.block[k]) if k + ONE < last else count - ONE
            if (b + ONE == count) != (k + ONE == last) or plan.change.block_stamp[b] != plan.change.round[0]:
                continue
        kind, argument = blocks.kind[b], np.uint64(blocks.argument[b])
        draft.steps[0] = ZERO
        draft.full[0] = 0
        first = plan.filled.communication[0]
        if kind == SYNCHRONISE:
            synchronise(blocks, plan.program, pools, state, draft, segments, plan.filled, b, argument)
        elif kind == RESULT:
            send(blocks, pools, state.forward, draft, segments, plan.filled, b)
        elif kind == READ:
            read(plan.program, pools, state, draft, segments, plan.filled, b)
        elif kind == UPDATE:
            update(blocks, plan.program, state, draft, segments, plan.new_segment, b)
        else:
            templates = state.kept if kind == GATHER_ONCE else state.backward if kind == BACKWARD else state.forward
            if is_gather(kind):
                gather(blocks, plan.program, pools, templates, draft, segments, plan.filled, b)
            else:
                config = np.uint64(state.config[argument])
                if kind != WEIGHT_GRADIENT:  # what that one reads, the BACKWARD block before it has waited for
                    mark_pieces(pools, draft, config)
                    wait(blocks, plan.program, pools, state, draft, kind, argument)
                compute(blocks, plan.program, pools, draft, config, b)
                send(blocks, pools, templates, draft, segments, plan.filled, b)
        segment = finish(segments, plan.filled, draft, first)
        if segment == NOTHING:
            return FULL
        plan.new_segment[b] = segment
    return DONE


@lean
def _too_busy(plan: Plan, limit: Any) -> Any:
    """Whether some processor alone has more than ``limit`` ticks to compute."""
    busy, processor, total = plan.proposed.busy, plan.program.processor, plan.draft.groups.load
    for d in range(np.uint64(busy.shape[0])):
        total[np.uint64(processor[d])] = 0.0
    most = 0.0
    for d in range(np.uint64(busy.shape[0])):
        p = np.uint64(processor[d])
        total[p] += float(busy[d])  # whole numbers of ticks, which are exact
        most = max(most, total[p])
    return most * float(plan.program.microbatches[0]) > float(limit)


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
