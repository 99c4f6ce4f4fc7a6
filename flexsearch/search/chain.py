"""A Markov chain over plans, compiled: draw a move, simulate what it changes, accept or reject.

The target is exp(-beta * cost / reference) (FlexFlow, MLSys 2019, section 6), where the reference is the cost of a good
plan: a temperature means the same for a model of microseconds and one of minutes. The moves are taken as symmetric, as
there; they are not quite (copying a neighbour is easier than undoing it), which matters to an integral over the space,
not to its minimum.

Moves work on numbers of configs. What a move needs and does not know yet (the 17th candidate of an operator, the config
that follows another over an edge) is asked for: the chain returns to Python, which adds it, and goes on with the same
random numbers. The number that decides on acceptance is drawn first: so it is known beforehand how slow a proposal may
be, and most of the slower ones need not be simulated to their end.
"""

from __future__ import annotations

from math import log
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from flexsearch.compiled import F64, I64, ONE, TWO, U8, U32, U64, ZERO, inlined, lean
from flexsearch.cost.ticks import TICK
from flexsearch.lower.arrays import State
from flexsearch.lower.change import Change, miss
from flexsearch.lower.describe import DONE as DESCRIBED
from flexsearch.lower.describe import FULL, LACKING, Plan, drop, keep, rewire, write
from flexsearch.lower.describe import LATE as TOO_MUCH
from flexsearch.lower.keys import MISSING, Table, find
from flexsearch.packed import packed
from flexsearch.simulate.engine_delta import LATE, accept, propose, reject
from flexsearch.simulate.engine_state import State as Engine

CANDIDATE, OVER, SWAP, STORED, LIKE = 11, 12, 13, 14, 15
"""Keys of the table: (operator, k): a config to try; (link, config): the one that follows it; (config, a * devices +
b): the same with two devices exchanged; (config, 0): the same with its weights stored the other way; (operator,
config): the same for another operator of its class. Operators and links stand for all that are alike."""
REDRAW, COPY, GROUP, REPEATED, EXCHANGE, SHARD, SPAN = range(7)
UNIFORMS = 24
"""Random numbers for a proposal. The last decides on acceptance."""
DONE, ASK, ROWS, ENGINE, MEMORY = range(5)
"""Why the chain returned: random numbers or patience are used up; templates or configs are missing; there is no room
for the rows of the proposal; the engine has no room for it, or cannot run it (what it returned is in the place of
PROPOSED); its memory must be worked out."""
CURRENT, BEST, MARK, KNOWN, REFERENCE, LEADERS, PROPOSED, SHORTFALL = range(8)
"""Places in ``Chain.value`` (s). BEST: of the chain's plans that fit; MARK: BEST when
it last gained WORTH; KNOWN: of all plans that fit, for the log;
SHORTFALL: missing memory of the proposal, as in ``evaluate``."""
STEPS, ACCEPTED, IDLE, STAGE, IMPROVED, MOVE, DRAWN, LEVEL, LASTED = range(9)
"""Places in ``Chain.counts``. DRAWN: rows of uniform numbers that are used up; LEVEL: the temperature, as a place in
``Chain.excess``; LASTED: proposals at it."""
TWICE = 0.15
"""How often two classes change at once."""
WORTH = 1e-3
"""Share of the time that a chain must gain to go on: small gains are left to polishing, which is quicker at them."""
FRESH, TIMED, WEIGHED = range(3)
"""Stages of a proposal: to be simulated; to be checked for memory; to be decided on."""


@packed
class Moves(NamedTuple):
    """The space for the moves; rows ``[first[i], last[i])`` of a list belong to item i."""

    often: F64  # cumulative probabilities of the moves
    leader: U32
    alike: U32  # by operator: the first one that shares its configs
    leader_at: U32  # by operator: its place among the leaders, or MISSING
    likely: F64  # cumulative probabilities of the leaders
    group_first: U32  # by leader: the operators that follow it
    group_last: U32
    member: U32
    member_source: U32
    member_link: U32
    main_source: U32  # by operator: the producer that it follows in a span (itself: none), and the link from there
    main_link: U32
    link_first: U32  # by operator
    link_last: U32
    link_target: U32
    link_kind: U32  # the first link that is alike; member_link and main_link are such ones
    link_forward: U8
    class_first: U32
    class_last: U32
    class_member: U32
    led_classes: U64  # (1,): classes of leaders; they come first
    apart: npt.NDArray[np.uint8]  # (led class, led class): whether they have no operators in common
    weighted: U32
    memory: I64  # by device, bytes


@packed
class Chain(NamedTuple):
    """Where a chain is. ``uniform``: rows of random numbers. ``candidates``: (2,) first number and how many, for each
    operator. ``excess``: cooling, how much slower than the best a plan may typically be. ``best``: config numbers of
    the best plan that fits. ``log_value``, ``log_step``, ``log_move``: improvements."""

    uniform: F64
    value: F64
    counts: U64
    candidates: U64
    excess: F64
    patience: U64
    penalty: F64
    chosen: U32
    best: U32
    log_value: F64
    log_step: U64
    log_move: U64


@lean
def advance(moves: Moves, chain: Chain, plan: Plan, engine: Engine) -> Any:
    """Go on until something is needed; returns what. ``plan`` is the chain's plan and what it proposes."""
    while True:
        if chain.counts[STAGE] == FRESH:
            if chain.counts[IDLE] >= chain.patience[0] or chain.counts[DRAWN] == np.uint64(chain.uniform.shape[0]):
                return DONE
            if not draw(moves, chain, plan.state.config, plan.pools.config_shard, plan.table, plan.change):
                return ASK
            most = limit(chain) / TICK
            ticks, late = np.int64(LATE), np.int64(most) if most < float(LATE) else np.int64(LATE)
            status = rewire(plan, late)
            if status == DESCRIBED:
                status = write(plan)
            if status == LACKING:
                return ASK
            if status == FULL:
                return ROWS
            if status != TOO_MUCH:
                change = plan.change
                ticks = propose(engine, plan.segments, plan.new_segment, change.block, change.blocks[0], late)
            if ticks < 0:
                chain.value[PROPOSED] = float(ticks)
                return ENGINE
            chain.value[PROPOSED] = float(ticks) * TICK if ticks != LATE else np.inf
            chain.value[SHORTFALL] = 0.0
            chain.counts[STAGE] = TIMED
        if chain.counts[STAGE] == TIMED:
            chain.counts[STAGE] = WEIGHED
            if chain.value[PROPOSED] <= limit(chain) and not _fits(moves, plan.proposed):
                return MEMORY
        _decide(chain, plan, engine)
        chain.counts[STAGE] = FRESH
        chain.counts[DRAWN] += ONE


@lean
def limit(chain: Chain) -> Any:
    """What a proposal may cost (s) to be accepted. Never below the current cost, nor below the best."""
    beta = chain.value[LEADERS] / chain.excess[chain.counts[LEVEL]]
    uniform = chain.uniform[chain.counts[DRAWN], UNIFORMS - 1]
    return chain.value[CURRENT] - chain.value[REFERENCE] / beta * log(1.0 - uniform)


@inlined
def _decide(chain: Chain, plan: Plan, engine: Engine) -> None:
    """Accept or reject the proposal, and note what is better than anything before."""
    most = limit(chain)
    cost = chain.value[PROPOSED] * (1.0 + chain.penalty[0] * chain.value[SHORTFALL])
    chain.counts[STEPS] += ONE
    chain.counts[IDLE] += ONE
    if chain.value[SHORTFALL] == 0.0 and cost <= most:
        if cost < chain.value[BEST]:
            chain.value[BEST] = cost
            if cost < chain.value[MARK] * (1.0 - WORTH):
                chain.value[MARK] = cost
                chain.counts[IDLE] = ZERO
            for i in range(np.uint64(chain.best.shape[0])):
                chain.best[i] = plan.proposed.config[i]
        if cost < chain.value[KNOWN]:
            chain.value[KNOWN] = cost
            chain.value[REFERENCE] = cost
            at = chain.counts[IMPROVED]
            if at < np.uint64(chain.log_value.shape[0]):
                chain.log_value[at] = cost
                chain.log_step[at] = chain.counts[STEPS]
                chain.log_move[at] = chain.counts[MOVE]
                chain.counts[IMPROVED] = at + ONE
    _cool(chain)
    if cost <= most:
        keep(plan)
        accept(engine)
        chain.value[CURRENT] = cost
        chain.counts[ACCEPTED] += ONE
    else:
        drop(plan)
        reject(engine)


@inlined
def _cool(chain: Chain) -> None:
    """A temperature lasts for a quarter of the patience, and up to four times as long while it still brings gains."""
    chain.counts[LASTED] += ONE
    quarter = chain.patience[0] // np.uint64(4)
    spent = chain.counts[LASTED] >= quarter and chain.counts[IDLE] >= quarter
    if spent or chain.counts[LASTED] >= chain.patience[0]:
        chain.counts[LEVEL] = min(chain.counts[LEVEL] + ONE, np.uint64(chain.excess.shape[0]) - ONE)
        chain.counts[LASTED] = ZERO


@lean
def _fits(moves: Moves, proposed: State) -> Any:
    for d in range(np.uint64(moves.memory.shape[0])):  # noqa: SIM110  a generator would not compile
        if proposed.held[d] > moves.memory[d]:
            return False
    return True


@inlined
def draw(moves: Moves, chain: Chain, now: U32, shard: U8, table: Table, change: Change) -> Any:
    """Fill ``change`` with a random move's configs; False if some are missing. ``now``: the plan's configs; ``shard``:
    of each config, whether weights are sharded."""
    change.lacking[0] = ZERO
    change.number[0] = ZERO
    u = chain.uniform[chain.counts[DRAWN]]
    move = ZERO
    while move < np.uint64(SPAN) and u[0] >= moves.often[move]:
        move += ONE
    chain.counts[MOVE] = move
    leaders = np.uint64(moves.leader.shape[0])
    if move == REDRAW:
        i = _pick(u[1], np.uint64(now.shape[0]))
        _add(change, i, _candidate(moves, chain, table, change, i, u[2]))
    elif move == COPY:
        _copy(moves, now, shard, table, change, u)
    elif move == REPEATED and moves.class_first.shape[0] > 0:
        _repeat(moves, chain, now, shard, table, change, u)
    elif move == SPAN:
        _span(moves, chain, now, shard, table, change, u)
    elif move == EXCHANGE and moves.memory.shape[0] > 1:
        _exchange(moves, now, table, change, u)
    elif move == SHARD and moves.weighted.shape[0] > 0:
        at = _pick(u[1], np.uint64(moves.weighted.shape[0]))
        to = ONE - np.uint64(shard[np.uint64(now[np.uint64(moves.weighted[at])])])
        for k in range(np.uint64(moves.weighted.shape[0])):
            i = np.uint64(moves.weighted[k])
            if (u[2] >= 0.8 or k == at) and shard[np.uint64(now[i])] != to:
                _add(change, i, _ask(table, change, STORED, now[i], ZERO))
    else:
        at = ZERO
        while at + ONE < leaders and u[1] >= moves.likely[at]:
            at += ONE
        config = _candidate(moves, chain, table, change, np.uint64(moves.leader[at]), u[2])
        _lead(moves, chain, table, change, at, config)
    return change.lacking[0] == ZERO


@lean
def _pick(u: float, count: Any) -> Any:
    """A number below ``count``."""
    return min(np.uint64(u * float(count)), count - ONE)


@lean
def _ask(table: Table, change: Change, kind: Any, a: Any, b: Any) -> Any:
    """A config from the table; MISSING, and noted, if it is not there."""
    found = find(table, kind, a, b)
    if found == MISSING:
        miss(change, kind, a, b)
    return found


@lean
def _candidate(moves: Moves, chain: Chain, table: Table, change: Change, i: Any, u: float) -> Any:
    return _ask(table, change, CANDIDATE, moves.alike[i], chain.candidates[0] + _pick(u, chain.candidates[1]))


@lean
def _add(change: Change, i: Any, config: Any) -> None:
    """One more operator with a new config."""
    change.operator[change.number[0]] = i
    change.config[change.number[0]] = config
    change.number[0] += ONE


@lean
def _lead(moves: Moves, chain: Chain, table: Table, change: Change, at: Any, config: Any) -> None:
    """A leader with a new config, and the operators of its group following it."""
    if config == MISSING:
        return
    leader = np.uint64(moves.leader[at])
    _add(change, leader, config)
    chain.chosen[leader] = config
    for k in range(np.uint64(moves.group_first[at]), np.uint64(moves.group_last[at])):
        i = np.uint64(moves.member[k])
        follows = _ask(table, change, OVER, moves.member_link[k], chain.chosen[np.uint64(moves.member_source[k])])
        if follows == MISSING:
            return
        _add(change, i, follows)
        chain.chosen[i] = follows


@lean
def _repeat(moves: Moves, chain: Chain, now: U32, shard: U8, table: Table, change: Change, u: F64) -> None:
    """Change a class, or two that have no operators in common (one makes room for the other)."""
    led, every = np.uint64(moves.led_classes[0]), np.uint64(moves.class_first.shape[0])
    first = _pick(u[1], led) if led > ZERO and (u[5] < 0.8 or led == every) else led + _pick(u[1], every - led)
    _change_class(moves, chain, now, shard, table, change, first, u[2:8])
    if u[8] < TWICE and first < led:
        second = _pick(u[9], led)
        if moves.apart[first, second] == ONE:
            _change_class(moves, chain, now, shard, table, change, second, u[10:16])


@lean
def _change_class(
    moves: Moves, chain: Chain, now: U32, shard: U8, table: Table, change: Change, which: Any, u: F64
) -> None:  # fmt: skip
    """All operators of a class get the same: a candidate, or what one of them has, with two devices exchanged, or what
    it would have after one of its neighbours."""
    first, last = np.uint64(moves.class_first[which]), np.uint64(moves.class_last[which])
    model = np.uint64(moves.class_member[first + _pick(u[1], last - first)])
    like = np.uint64(now[model])
    if 0.85 <= u[2] < 0.88:
        like = _ask(table, change, SWAP, now[model], _pair(moves, u[4], u[5]))
    elif u[2] >= 0.88:
        like = _after_neighbour(moves, now, shard, table, change, model, u[4])
    if like == MISSING:
        return
    for k in range(first, last):
        i = np.uint64(moves.class_member[k])
        # Candidate k is the same for all operators of a class.
        if u[2] < 0.7:
            config = _candidate(moves, chain, table, change, i, u[0])
        else:
            config = _ask(table, change, LIKE, moves.alike[i], like)
        if moves.leader_at[i] != MISSING:
            _lead(moves, chain, table, change, np.uint64(moves.leader_at[i]), config)
        elif config != MISSING:
            _add(change, i, config)


@lean
def _after_neighbour(moves: Moves, now: U32, shard: U8, table: Table, change: Change, i: Any, u: float) -> Any:
    """The config of operator ``i`` that follows one of its neighbours; its own if it has none."""
    first, last = np.uint64(moves.link_first[i]), np.uint64(moves.link_last[i])
    if first == last:
        return np.uint64(now[i])
    source = np.uint64(moves.link_target[first + _pick(u, last - first)])
    back = np.uint64(moves.link_first[source])
    while moves.link_target[back] != i:
        back += ONE
    return _follow(table, change, shard, moves.link_kind[back], now[source], now[i])


@lean
def _follow(table: Table, change: Change, shard: U8, link: Any, config: Any, has: Any) -> Any:
    """What follows ``config`` over a link, with weights stored as those of the config that the operator ``has``."""
    found = _ask(table, change, OVER, link, config)
    if found != MISSING and shard[np.uint64(found)] != shard[np.uint64(has)]:
        found = _ask(table, change, STORED, found, ZERO)
    return found


@lean
def _pair(moves: Moves, u: float, v: float) -> Any:
    """Two devices, as one number."""
    devices = np.uint64(moves.memory.shape[0])
    if devices == ONE:
        return ZERO
    a, b = _pick(u, devices), _pick(v, devices - ONE)
    return a * devices + (b + ONE if b >= a else b)


@lean
def _span(moves: Moves, chain: Chain, now: U32, shard: U8, table: Table, change: Change, u: F64) -> None:
    """A stretch of the graph: its first operator gets a candidate or what it has, the others follow their producers."""
    count = np.uint64(now.shape[0])
    first = _pick(u[1], count)
    length = np.uint64(float(count) ** u[3])
    last = min(count, first + length)
    for i in range(first, last):
        chain.chosen[i] = MISSING
    config = np.uint64(now[first])
    if u[4] < 0.8:
        config = _candidate(moves, chain, table, change, first, u[2])
        if config == MISSING:
            return
        _add(change, first, config)
    chain.chosen[first] = config
    for i in range(first + ONE, last):
        source = np.uint64(moves.main_source[i])
        if source < first or source == i or chain.chosen[source] == MISSING:
            continue
        follows = _follow(table, change, shard, moves.main_link[i], chain.chosen[source], now[i])
        if follows == MISSING:
            return
        _add(change, i, follows)
        chain.chosen[i] = follows


@lean
def _exchange(moves: Moves, now: U32, table: Table, change: Change, u: F64) -> None:
    """Two devices exchange their work, in a group of operators or everywhere."""
    pair = _pair(moves, u[1], u[2])
    if u[3] >= 0.97:
        for every in range(np.uint64(now.shape[0])):
            _add(change, every, _ask(table, change, SWAP, now[every], pair))
        return
    at = _pick(u[4], np.uint64(moves.leader.shape[0]))
    leader = np.uint64(moves.leader[at])
    _add(change, leader, _ask(table, change, SWAP, now[leader], pair))
    for k in range(np.uint64(moves.group_first[at]), np.uint64(moves.group_last[at])):
        i = np.uint64(moves.member[k])
        _add(change, i, _ask(table, change, SWAP, now[i], pair))


@lean
def _copy(moves: Moves, now: U32, shard: U8, table: Table, change: Change, u: F64) -> None:
    """An operator does as a neighbour does, and so on for a few steps in one direction."""
    at = _pick(u[1], np.uint64(now.shape[0]))
    forward = 1 if u[2] < 0.5 else 0
    config = now[at]
    for step in range(np.uint64(8)):
        count = ZERO
        for k in range(np.uint64(moves.link_first[at]), np.uint64(moves.link_last[at])):
            count += ONE if moves.link_forward[k] == forward else ZERO
        if count == ZERO:
            return
        which = _pick(u[np.uint64(3) + TWO * step], count)
        link: Any = ZERO
        for k in range(np.uint64(moves.link_first[at]), np.uint64(moves.link_last[at])):
            if moves.link_forward[k] == forward:
                if which == ZERO:
                    link = k
                    break
                which -= ONE
        at = np.uint64(moves.link_target[link])
        config = _follow(table, change, shard, moves.link_kind[link], config, now[at])
        if config == MISSING:
            return
        _add(change, at, config)
        if u[np.uint64(4) + TWO * step] < 0.35:
            return
