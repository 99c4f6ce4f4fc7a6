"""Proposals from their configs to their times, compiled."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np

from flexsearch.compiled import I64, ONE, U32, U64, ZERO, lean
from flexsearch.lower.describe import LACKING, Plan, describe, drop, keep
from flexsearch.lower.describe import LATE as TOO_MUCH
from flexsearch.packed import packed
from flexsearch.simulate.engine_delta import LATE, accept, propose, reject
from flexsearch.simulate.engine_state import State

NO_TEMPLATES: Final = -16
"""In the place of ticks: templates are missing (``Change.missing``)."""
NO_SPACE: Final = -17
"""In the place of ticks: there is no room for rows. Other negative numbers are the engine's."""


@packed
class Proposals(NamedTuple):
    """The operators and configs of proposal k end at ``end[k]``. ``at``: (1,) the next one. ``ticks``: (1,) of the last
    one."""

    operator: U32
    config: U32
    end: U64
    at: U64
    ticks: I64


@lean
def attempt_each(plan: Plan, engine: State, limit: Any, proposals: Proposals) -> None:
    """``attempt`` the proposals from number ``at[0]`` on, until one takes at most ``limit`` (ticks) or needs something;
    else ``at[0]`` becomes their number. What is proposed is then the last one."""
    count = np.uint64(proposals.end.shape[0])
    while proposals.at[0] < count:
        at = proposals.at[0]
        first = proposals.end[at - ONE] if at > ZERO else ZERO
        plan.change.number[0] = proposals.end[at] - first
        for k in range(plan.change.number[0]):
            plan.change.operator[k] = proposals.operator[first + k]
            plan.change.config[k] = proposals.config[first + k]
        ticks = attempt(plan, engine, limit)
        proposals.ticks[0] = ticks
        if ticks <= limit:  # what is needed is less than any
            return
        proposals.at[0] += ONE
        if proposals.at[0] < count:
            give_up(plan, engine)


@lean
def attempt(plan: Plan, engine: State, limit: Any) -> Any:
    """Iteration time (ticks) of the plan at hand with the configs in ``change``; LATE as soon as it is certain that it
    is above ``limit`` (ticks); a negative number if something is needed. ``take`` it or ``give_up``."""
    status = describe(plan, limit)
    if status == TOO_MUCH:
        return np.int64(LATE)
    if status != 0:
        return np.int64(NO_TEMPLATES if status == LACKING else NO_SPACE)
    change = plan.change
    return propose(engine, plan.segments, plan.new_segment, change.block, change.blocks[0], limit)


@lean
def take(plan: Plan, engine: State) -> None:
    """Make the proposal the plan at hand."""
    keep(plan)
    accept(engine)


@lean
def give_up(plan: Plan, engine: State) -> None:
    """Leave the plan at hand as it is."""
    drop(plan)
    reject(engine)
