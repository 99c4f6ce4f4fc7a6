"""Trials of a descent, compiled: the same operators with one config after the other, until one is better."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from flexsearch.compiled import F64, ONE, U8, U32, U64, ZERO, lean
from flexsearch.cost.ticks import TICK
from flexsearch.lower.change import Change
from flexsearch.lower.configs import like
from flexsearch.lower.describe import FULL, LACKING, Plan, drop, keep
from flexsearch.lower.keys import MISSING
from flexsearch.lower.tables import TemplateTables
from flexsearch.packed import packed
from flexsearch.search.constants import PENALTY
from flexsearch.search.moves import Moves, lead
from flexsearch.search.step import ASK, DONE, ENGINE, NO_ROWS
from flexsearch.simulate.account import Account, missing_memory
from flexsearch.simulate.attempt import attempt
from flexsearch.simulate.engine_delta import accept, reject
from flexsearch.simulate.engine_state import State as Engine
from flexsearch.simulate.engine_whole import LATE
from flexsearch.simulate.spans import Sources

BETTER = 1 + max(DONE, ASK, NO_ROWS, ENGINE)
"""A trial is better than the plan at hand, and in its place now."""


@packed
class Trials(NamedTuple):
    """``operator``: those that change together, ``operators`` ((1,)) of them, and those of their groups follow.
    ``config``: numbers of configs of the first one to try, ``configs`` ((1,)) of them. (1,) each: ``next``, the place
    of the trial at hand; ``alone``, whether it is without the operators that follow; ``left``, how many may be made.
    Of the plan at hand ``limit``, what a better one costs at most (s), and whether it ``fits`` into memory. ``penalty``
    as in ``step.Schedule``. Of the trial at hand ``seconds`` and ``shortfall``, as in ``step.Info``."""

    operator: U32
    operators: U64
    config: U32
    configs: U64
    next: U64
    alone: U8
    left: U64
    limit: F64
    fits: U8
    penalty: F64
    seconds: F64
    shortfall: F64


@lean
def try_each(
    trials: Trials, moves: Moves, plan: Plan, engine: Engine, account: Account, sources: Sources,
    tables: TemplateTables,
) -> Any:  # fmt: skip
    """Make trials from the one at hand on, until one is BETTER or something is needed; returns what. DONE: all were
    made that there are, or may be."""
    most = trials.limit[0] / TICK
    limit = np.int64(most) if most < float(LATE) else np.int64(LATE)
    while trials.next[0] < trials.configs[0] and trials.left[0] > ZERO:
        change, one = plan.change, trials.operators[0] == ONE
        if not _fill(trials, moves, tables, change):
            return ASK
        followed = one and change.number[0] > ONE
        if trials.alone[0] == 1:
            change.number[0] = ONE
        ticks = attempt(plan, engine, tables, limit)
        if ticks < 0:
            return ASK if ticks == -LACKING else NO_ROWS if ticks == -FULL else ENGINE
        trials.left[0] -= ONE
        again = followed and trials.alone[0] == 0
        trials.alone[0] = 1 if again else 0
        trials.next[0] += ZERO if again else ONE
        if ticks != LATE and _is_better(trials, account, sources, plan, ticks):
            keep(plan)
            accept(engine)
            return BETTER
        drop(plan)
        reject(engine)
    return DONE


@lean
def _fill(trials: Trials, moves: Moves, tables: TemplateTables, change: Change) -> Any:
    """Fill ``change`` with the trial at hand; False if some configs are missing."""
    change.lacking[0] = change.number[0] = ZERO
    config: Any = trials.config[trials.next[0]]
    for k in range(trials.operators[0]):
        operator = np.uint64(trials.operator[k])
        own: Any = config
        if k > 0:
            own = like(tables, change, moves.alike[operator], config)
        if own != MISSING:
            lead(moves, tables, change, operator, own)
    return change.lacking[0] == ZERO and tables.full[0] == 0


@lean
def _is_better(trials: Trials, account: Account, sources: Sources, plan: Plan, ticks: Any) -> Any:
    """Whether the trial at hand, which takes so many ticks, is better than the plan at hand: what fits into memory is
    better than what does not."""
    seconds = float(ticks) * TICK
    shortfall = missing_memory(account, sources, plan.proposed)
    trials.seconds[0], trials.shortfall[0] = seconds, shortfall
    cost = seconds * (1.0 + trials.penalty[0] * shortfall)
    return cost <= trials.limit[0] and (shortfall == 0.0 or trials.fits[0] == 0)


def empty_trials(operators: int, configs: int, proposals: int) -> Trials:
    """Room for so many operators and configs; at most ``proposals`` may be made."""
    return Trials(
        operator=np.zeros(operators, np.uint32), operators=np.zeros(1, np.uint64), config=np.zeros(configs, np.uint32),
        configs=np.zeros(1, np.uint64), next=np.zeros(1, np.uint64), alone=np.zeros(1, np.uint8),
        left=np.array([proposals], np.uint64), limit=np.zeros(1), fits=np.zeros(1, np.uint8),
        penalty=np.array([PENALTY]), seconds=np.zeros(1), shortfall=np.zeros(1),
    )  # fmt: skip
