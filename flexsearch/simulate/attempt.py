"""A proposal from its configs to its time, compiled."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from flexsearch.compiled import lean
from flexsearch.lower.describe import DONE, FULL, LACKING, Plan, drop, rewire, write
from flexsearch.lower.describe import LATE as TOO_BUSY
from flexsearch.lower.fill import ALL, OVER, fill
from flexsearch.lower.tables import TemplateTables
from flexsearch.simulate.engine_delta import propose
from flexsearch.simulate.engine_state import State
from flexsearch.simulate.engine_whole import LATE

ENGINE: Final = 1 + max(DONE, TOO_BUSY, LACKING, FULL)
"""The engine has no room for the proposal, or cannot run it."""


@lean
def attempt(plan: Plan, engine: State, tables: TemplateTables, limit: Any) -> Any:
    """Ticks of the plan at hand with the configs in ``plan.change``; LATE if they are above ``limit``. If it cannot be
    said yet, minus the reason: LACKING (templates that Python must add), FULL (no room for rows) or ENGINE. Whatever is
    returned, rows and engine hold the proposal afterwards, to be kept or dropped."""
    status = rewire(plan, limit)
    while status == LACKING:
        left = fill(tables, plan.wiring, plan.program, plan.proposed, plan.change, limit)
        if left == OVER:
            return np.int64(LATE)
        if left != ALL:
            return -np.int64(LACKING)
        drop(plan)
        status = rewire(plan, limit)
    if status == DONE:
        status = write(plan)
    if status == TOO_BUSY:
        return np.int64(LATE)
    if status != DONE:
        return -np.int64(status)
    change = plan.change
    ticks = propose(engine, plan.segments, plan.new_segment, change.block, change.blocks[0], limit)
    return ticks if ticks >= 0 else -np.int64(ENGINE)
