"""One step of a Markov chain over plans, compiled: propose, evaluate, accept or reject.

The target is exp(-beta * cost / reference) (FlexFlow, MLSys 2019, section 6), where the reference is the cost of a good
plan: a temperature means the same for a model of microseconds and one of minutes. The moves are taken as symmetric, as
there; they are not quite (copying a neighbour is easier than undoing it), which matters to an integral over the space,
not to its minimum.

``advance`` takes the state of a chain through as many steps as there are random numbers for, and returns to Python when
it needs something; ``Info`` says what became of the proposal at hand and which ones were better than any before. The
number that decides on acceptance is drawn first: so it is known beforehand how slow a proposal may be, and most of the
slower ones need not be simulated to their end. It is computed in operations that IEEE 754 fixes: the same seed decides
the same on any machine.
"""

from __future__ import annotations

from decimal import Context, Decimal
from typing import Any, NamedTuple

import numpy as np

from flexsearch.compiled import F64, ONE, U32, U64, ZERO, inlined, lean
from flexsearch.cost.ticks import TICK
from flexsearch.lower.arrays import State
from flexsearch.lower.describe import FULL, LACKING, Plan, drop, keep
from flexsearch.lower.tables import TemplateTables
from flexsearch.packed import packed
from flexsearch.search.moves import UNIFORMS, Draws, Moves, draw
from flexsearch.simulate.account import Account, missing_memory
from flexsearch.simulate.attempt import attempt
from flexsearch.simulate.engine_delta import accept, reject
from flexsearch.simulate.engine_state import State as Engine
from flexsearch.simulate.engine_whole import LATE
from flexsearch.simulate.spans import Sources

DONE, ASK, NO_ROWS, ENGINE = range(4)
"""Why ``advance`` returned: random numbers or patience are used up; templates or configs are missing; there is no room
for the rows of the proposal; the engine has no room for it, or cannot run it."""
CELLS = 256
_EXACT = Context(prec=40)
LOGARITHMS = np.array([float(-(Decimal(CELLS + k) / (2 * CELLS)).ln(_EXACT)) for k in range(CELLS + 1)])
"""-ln(x) at CELLS + 1 places from 1/2 to 1, rounded from 40 digits, so the same on any machine."""
LN2 = float(Decimal(2).ln(_EXACT))


@packed
class ChainState(NamedTuple):
    """Where a chain is; (1,) each. ``cost``: of the plan at hand, s; ``best``: of the chain's plans that fit;
    ``mark``: ``best`` when it last gained what is worth it; ``fastest``: of all plans that fit, of the search too;
    ``reference``: of a good plan. ``steps``, ``accepted``: proposals; ``idle``: those since the last gain; ``level``:
    the temperature, as a place in ``Schedule.excess``; ``lasted``: proposals at it. ``best_config``: numbers of
    the best plan's configs."""

    cost: F64
    best: F64
    mark: F64
    fastest: F64
    reference: F64
    steps: U64
    accepted: U64
    idle: U64
    level: U64
    lasted: U64
    best_config: U32


@packed
class Info(NamedTuple):
    """What became of proposals. Of the one at hand, (1,) each: its ``seconds`` and missing memory
    (``shortfall``, as in ``evaluate``). ``improvements``: (1,) number of those that were better than any before; of
    each: ``better_s``, ``better_step``, ``better_move``."""

    seconds: F64
    shortfall: F64
    improvements: U64
    better_s: F64
    better_step: U64
    better_move: U64


@packed
class Schedule(NamedTuple):
    """How a chain cools and ends. ``freedom``: (1,) number of things that can change alone. ``excess``: by temperature,
    how much slower than the best a plan may typically be. ``patience``: (1,) proposals without gain that end it.
    ``worth``: (1,) share of the time that is a gain. ``penalty``: (1,) of missing memory."""

    freedom: F64
    excess: F64
    patience: U64
    worth: F64
    penalty: F64


@lean
def advance(
    moves: Moves, draws: Draws, schedule: Schedule, chain: ChainState, info: Info, plan: Plan, engine: Engine,
    account: Account, sources: Sources, tables: TemplateTables,
) -> Any:  # fmt: skip
    """Make steps until something is needed; returns what. ``plan`` is the chain's plan and what it proposes."""
    while True:
        if chain.idle[0] >= schedule.patience[0] or draws.row[0] == np.uint64(draws.uniform.shape[0]):
            return DONE
        if not draw(moves, draws, plan.state.config, tables, plan.change):
            return ASK
        most = threshold(draws, schedule, chain) / TICK
        limit = np.int64(most) if most < float(LATE) else np.int64(LATE)
        ticks = attempt(plan, engine, tables, limit)
        if ticks < 0:
            return ASK if ticks == -LACKING else NO_ROWS if ticks == -FULL else ENGINE
        info.seconds[0] = float(ticks) * TICK if ticks != LATE else np.inf
        slow = info.seconds[0] > threshold(draws, schedule, chain)
        info.shortfall[0] = 0.0 if slow else missing_memory(account, sources, plan.proposed)
        _decide(draws, schedule, chain, info, plan, engine)
        draws.row[0] += ONE


@lean
def threshold(draws: Draws, schedule: Schedule, chain: ChainState) -> Any:
    """What a proposal may cost (s) to be accepted. Never below the current cost."""
    typical = chain.reference[0] * schedule.excess[chain.level[0]] / schedule.freedom[0]
    return chain.cost[0] + typical * exponential(draws.uniform[draws.row[0], UNIFORMS - 1])


@lean
def exponential(uniform: float) -> Any:
    """-ln(1 - uniform), to seven digits, in operations that are exact or rounded as IEEE 754 says. ``uniform`` is at
    least 0 and below 1."""
    rest, doublings = 1.0 - uniform, 0.0
    while rest < 0.5:
        rest *= 2.0
        doublings += 1.0
    place = (rest - 0.5) * float(2 * CELLS)
    cell = min(np.uint64(place), np.uint64(CELLS - 1))
    slope = LOGARITHMS[cell + ONE] - LOGARITHMS[cell]
    return doublings * LN2 + (LOGARITHMS[cell] + (place - float(cell)) * slope)


@inlined
def _decide(
    draws: Draws, schedule: Schedule, chain: ChainState, info: Info, plan: Plan, engine: Engine
) -> None:  # fmt: skip
    """Accept or reject the proposal, and note what is better than anything before."""
    most = threshold(draws, schedule, chain)
    cost = info.seconds[0] * (1.0 + schedule.penalty[0] * info.shortfall[0])
    chain.steps[0] += ONE
    chain.idle[0] += ONE
    if info.shortfall[0] == 0.0 and cost <= most:
        _note(draws, schedule, chain, info, plan.proposed, cost)
    _cool(schedule, chain)
    if cost <= most:
        keep(plan)
        accept(engine)
        chain.cost[0] = cost
        chain.accepted[0] += ONE
    else:
        drop(plan)
        reject(engine)


@inlined
def _note(
    draws: Draws, schedule: Schedule, chain: ChainState, info: Info, proposed: State, cost: float
) -> None:  # fmt: skip
    """Keep an accepted plan that fits if it is the chain's best; log it if it is the best of all."""
    if cost < chain.best[0]:
        chain.best[0] = cost
        if cost < chain.mark[0] * (1.0 - schedule.worth[0]):
            chain.mark[0] = cost
            chain.idle[0] = ZERO
        for i in range(np.uint64(proposed.config.shape[0])):
            chain.best_config[i] = proposed.config[i]
    if cost < chain.fastest[0]:
        chain.fastest[0] = cost
        chain.reference[0] = cost
        at = info.improvements[0]
        if at < np.uint64(info.better_s.shape[0]):
            info.better_s[at] = cost
            info.better_step[at] = chain.steps[0]
            info.better_move[at] = draws.move[0]
            info.improvements[0] = at + ONE


@inlined
def _cool(schedule: Schedule, chain: ChainState) -> None:
    """A temperature lasts for a quarter of the patience, and up to four times as long while it still brings gains."""
    chain.lasted[0] += ONE
    quarter = schedule.patience[0] // np.uint64(4)
    spent = chain.lasted[0] >= quarter and chain.idle[0] >= quarter
    if spent or chain.lasted[0] >= schedule.patience[0]:
        chain.level[0] = min(chain.level[0] + ONE, np.uint64(schedule.excess.shape[0]) - ONE)
        chain.lasted[0] = ZERO
