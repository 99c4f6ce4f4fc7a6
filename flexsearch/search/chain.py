"""Chains of proposals: sets compiled steps going, and adds the configs and templates that they ask for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

import numpy as np
import numpy.typing as npt

from flexsearch.direct import direct
from flexsearch.lower.describe import FULL, LACKING
from flexsearch.lower.keys import CANDIDATE
from flexsearch.search.constants import (
    CANDIDATES,
    COARSE_CANDIDATES,
    COARSE_EXCESS,
    EXCESS,
    FIRST,
    MOST_OF_CLASS,
    MOVES,
    PENALTY,
    RENEWED,
    ROWS,
    SETS,
    WORTH,
)
from flexsearch.search.evaluate import Configs, Evaluation, Evaluator
from flexsearch.search.move_tables import coarse_moves, make_moves
from flexsearch.search.moves import UNIFORMS, Draws, Moves
from flexsearch.search.requests import COARSE_FIRST, Requests
from flexsearch.search.space import Space
from flexsearch.search.step import (
    ASK,
    DONE,
    ENGINE,
    NO_ROWS,
    ChainState,
    Info,
    Schedule,
    advance,
)
from flexsearch.search.trials import BETTER, Trials, try_each
from flexsearch.simulate.delta import DeltaSimulator

_advance = direct(advance)
_try_each = direct(try_each)

LOGGED = 4096
"""Most improvements between two looks at the chain: more than it makes proposals."""


@dataclass(frozen=True, slots=True)
class Gain:
    """A better plan: at which step of the chain, by which move, its iteration time (s)."""

    step: int
    move: str
    time_s: float


class Chain:
    """Chains over one space, one at a time. ``steps``, ``accepted``: proposals of the chain at hand."""

    def __init__(self, evaluate: Evaluator, space: Space, seed: int) -> None:
        self.evaluate, self.space = evaluate, space
        self._requests = Requests(space, seed)
        self._simulator: DeltaSimulator | None = None
        self._tables: tuple[Moves, Moves]
        """For chains over single operators, and for coarse ones."""
        self._moves: Moves
        self._draws: Draws
        self._schedule: Schedule
        self._state: ChainState
        self._info: Info

    def begin(
        self, configs: Configs, now: Evaluation, best: Evaluation, generation: int, patience: int,
        coarse: bool = False,
    ) -> None:  # fmt: skip
        """Start a chain at ``configs``, which ``now`` evaluates. Improvements are what is better than ``best``.
        ``generation``: chains of different ones draw from different candidates. The chain ends when ``patience``
        proposals in a row brought it nothing new. ``coarse``: it changes whole classes of operators only."""
        simulator = self.evaluate.at(configs)
        self._attach(simulator)
        self._moves = self._tables[int(coarse)]
        self._draws = self._make_draws(generation, coarse)
        excess = COARSE_EXCESS if coarse else EXCESS[FIRST[generation % len(FIRST)] :]
        self._schedule = Schedule(
            freedom=_one(len(self.space.parts if coarse else self.space.leaders)), excess=np.array(excess),
            patience=_count(patience), worth=_one(WORTH), penalty=_one(PENALTY),
        )  # fmt: skip
        fits = now.cost if now.feasible else inf
        self._state = ChainState(
            cost=_one(now.cost), best=_one(fits), mark=_one(fits),
            fastest=_one(best.cost if best.feasible else inf), reference=_one(best.cost), steps=_count(0),
            accepted=_count(0), idle=_count(0), level=_count(0), lasted=_count(0),
            best_config=simulator.rows.state.config.copy(),
        )  # fmt: skip
        self._info = Info(
            seconds=_one(0.0), shortfall=_one(0.0), improvements=_count(0),
            better_s=np.zeros(LOGGED), better_step=np.zeros(LOGGED, np.uint64), better_move=np.zeros(LOGGED, np.uint64),
        )  # fmt: skip

    def _make_draws(self, generation: int, coarse: bool) -> Draws:
        operators = len(self.space.graph.operators)
        number = generation % SETS + SETS * (generation // RENEWED)
        many = min(MOST_OF_CLASS, 1 + COARSE_CANDIDATES // len(self.space.parts)) if coarse else CANDIDATES
        first = COARSE_FIRST if coarse else 0
        return Draws(
            uniform=np.zeros((ROWS, UNIFORMS)), row=_count(ROWS), move=_count(0),
            first_candidate=_count(first + many * number), candidates=_count(many),
            half=np.full(operators, 2, np.uint8),
        )  # fmt: skip

    def run(self, rng: np.random.Generator, count: int, look: Callable[[], None] = lambda: None) -> bool:
        """Up to ``count`` (at most ROWS) proposals; whether the chain has come to its end. ``look`` is called whenever
        Python is at work; what it raises leaves the chain as it is."""
        draws, simulator = self._draws, self._simulator
        assert simulator is not None
        draws.uniform[ROWS - count :] = rng.random((count, UNIFORMS))
        draws.row[0] = ROWS - count
        while (why := self._advance(simulator)) != DONE:
            self._help(why, simulator)
            look()
        return bool(self._state.idle[0] >= self._schedule.patience[0])

    def _advance(self, simulator: DeltaSimulator) -> int:
        return int(_advance(
            self._moves, self._draws, self._schedule, self._state, self._info, simulator.rows.plan,
            simulator.engine.state, simulator.account, simulator.sources, simulator.templates.tables,
        ))  # fmt: skip

    def _help(self, why: int, simulator: DeltaSimulator) -> None:
        """Do what compiled steps need."""
        if why == ASK:
            change = simulator.rows.change
            if change.lacking[0] and change.missing[0, 0] < CANDIDATE:  # configs are asked for before templates
                simulator.go_on(LACKING)
            else:
                self._requests.supply(simulator.templates, change)
        elif why == NO_ROWS:
            simulator.go_on(FULL)
        else:
            assert why == ENGINE
            simulator.run_again()  # which gives the engine room
            simulator.give_up()

    def try_each(self, simulator: DeltaSimulator, trials: Trials) -> bool:
        """Make trials; whether one is better, which is at hand then."""
        self._attach(simulator)
        while (why := self._try_each(simulator, trials)) != DONE:
            if why == BETTER:
                return True
            self._help(why, simulator)
        return False

    def _try_each(self, simulator: DeltaSimulator, trials: Trials) -> int:
        return int(_try_each(
            trials, self._tables[0], simulator.rows.plan, simulator.engine.state, simulator.account, simulator.sources,
            simulator.templates.tables,
        ))  # fmt: skip

    def _attach(self, simulator: DeltaSimulator) -> None:
        """Work with the templates of this simulator from now on."""
        if self._simulator is not simulator:
            fine = make_moves(self.space, simulator.templates.alike)
            self._simulator, self._tables = simulator, (fine, coarse_moves(fine, self.space))
            if self.space.rule is not None:
                simulator.templates.ruled()

    def forget(self) -> None:
        """Let go of the templates worked with."""
        self._simulator = None
        self._requests.forget()

    @property
    def steps(self) -> int:
        return int(self._state.steps[0])

    @property
    def accepted(self) -> int:
        return int(self._state.accepted[0])

    @property
    def cost(self) -> float:
        """Of the plan at hand, s."""
        return float(self._state.cost[0])

    def gains(self) -> list[Gain]:
        """What was better than anything before, since the last call."""
        names, info = list(MOVES), self._info
        rows = range(int(info.improvements[0]))
        info.improvements[0] = 0
        return [Gain(int(info.better_step[k]), names[int(info.better_move[k])], float(info.better_s[k])) for k in rows]

    @property
    def best(self) -> tuple[Configs, Evaluation]:
        """The best of the chain's plans that fit; the plan at hand if none did."""
        assert self._simulator is not None
        best_s = float(self._state.best[0])
        if best_s < inf:
            return self._plan(self._simulator, self._state.best_config), Evaluation(best_s, 0.0)
        configs = self._plan(self._simulator, self._simulator.rows.state.config)
        return configs, self.evaluate(configs)

    @staticmethod
    def _plan(simulator: DeltaSimulator, numbers: npt.NDArray[np.uint32]) -> Configs:
        configs = (simulator.templates.configs[n] for n in numbers.tolist())
        return tuple(config for config in configs if config is not None)


def _one(value: float) -> npt.NDArray[np.float64]:
    return np.array([value], np.float64)


def _count(value: int) -> npt.NDArray[np.uint64]:
    return np.array([value], np.uint64)
