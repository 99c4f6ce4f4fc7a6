"""Proposals from their configs to their times, compiled."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from flexsearch.compiled import F64, ONE, U32, U64, ZERO, inlined, lean
from flexsearch.cost.ticks import TICK
from flexsearch.lower.arrays import TIME, Pools, Program, State, Tasks, Work
from flexsearch.lower.change import Change, Wiring, carry_over, place, wire
from flexsearch.lower.keys import Table
from flexsearch.packed import packed
from flexsearch.simulate.walk import walk

MOST = np.uint64(7)
"""After so many passes in a row that were void, every eighth proposal tries one."""
UNKNOWN = -1.0
"""In the place of seconds: templates are missing (``change.lacking``) or, if none is, the plan must be timed by
events."""


@packed
class Proposals(NamedTuple):
    """The operators and configs of proposal k end at ``end[k]``. ``at``: (1,) the next one. ``seconds``: (1,) of the
    last one."""

    operator: U32
    config: U32
    end: U64
    at: U64
    seconds: F64


@lean
def attempt_each(
    wiring: Wiring, program: Program, pools: Pools, table: Table, state: State, proposed: State, change: Change,
    work: Work, tasks: Tasks, whole: Any, limit: float, proposals: Proposals,
) -> None:  # fmt: skip
    """``attempt`` the proposals from number ``at[0]`` on, until one takes at most ``limit`` (s) or is UNKNOWN; else
    ``at[0]`` becomes their number. ``proposed`` is then the plan with the configs of the last one."""
    count = np.uint64(proposals.end.shape[0])
    while proposals.at[0] < count:
        at = proposals.at[0]
        first = proposals.end[at - ONE] if at > ZERO else ZERO
        change.number[0] = proposals.end[at] - first
        for k in range(change.number[0]):
            change.operator[k] = proposals.operator[first + k]
            change.config[k] = proposals.config[first + k]
        seconds = attempt(wiring, program, pools, table, state, proposed, change, work, tasks, whole, limit)
        proposals.seconds[0] = seconds
        if seconds <= limit:  # UNKNOWN is less than any
            return
        proposals.at[0] += ONE
        if proposals.at[0] < count:
            carry_over(state, proposed, change)


@inlined
def attempt(
    wiring: Wiring, program: Program, pools: Pools, table: Table, state: State, proposed: State, change: Change,
    work: Work, tasks: Tasks, whole: Any, limit: float,
) -> Any:  # fmt: skip
    """Make ``proposed``, which is equal to ``state``, the plan with the configs in ``change``, and return its iteration
    time (s); infinity as soon as it is certain that it is above ``limit`` (s); else UNKNOWN.

    ``whole``: whether the checkpoints are those of ``state``. Afterwards ``change`` says what was touched.
    """
    place(wiring, program, pools, proposed, change)
    if _too_busy(program, proposed, work, limit):  # before templates for its edges are asked for
        return np.inf
    wire(wiring, program, pools, table, proposed, state, change)
    if change.lacking[0] > ZERO:
        return UNKNOWN
    for r in range(np.uint64(proposed.load.shape[0])):
        if float(proposed.load[r]) * TICK > limit * (1.0 + 1e-9):
            return np.inf
    # Where plans have to be timed by events, their neighbours mostly have to, too.
    if program.scalars[2] == 2.0 or change.round[0] % (min(work.void[0], MOST) + ONE) != ZERO:
        return UNKNOWN
    last = np.uint64(program.kind.shape[0]) - ONE  # where a proposal that changes nothing begins
    begin = min(np.uint64(change.begin[0]), last) if whole else ZERO
    seconds = walk(
        program, pools, proposed, work, tasks, begin, np.uint64(TIME), limit,
        change.changed, whole,
    )  # fmt: skip
    if work.broken[0] == 1:
        work.void[0] += ONE
        return UNKNOWN
    work.void[0] = ZERO
    return seconds


@inlined
def _too_busy(program: Program, state: State, work: Work, limit: float) -> Any:
    """Whether some processor alone has more than ``limit`` seconds to compute."""
    for d in range(np.uint64(state.busy.shape[0])):
        work.load[np.uint64(program.processor[d])] += float(state.busy[d])
    found = False
    for d in range(np.uint64(state.busy.shape[0])):
        p = np.uint64(program.processor[d])
        found = found or work.load[p] * TICK > limit * (1.0 + 1e-9)
        work.load[p] = 0.0
    return found
