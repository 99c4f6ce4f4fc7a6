"""One climb: a chain from a plan until it finds nothing new, then greedy descent to a local optimum.

A climb depends only on its inputs, so it gives the same result in any process.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from flexsearch.cost import Costs
from flexsearch.graph import OperatorGraph
from flexsearch.lower.folding import Fold, fold
from flexsearch.search.chain import Chain
from flexsearch.search.constants import (
    COARSE_CHAINS,
    COARSE_PATIENCE,
    GAIN,
    LOOK_S,
    MOST_TEMPLATES,
    PATIENCE,
    REBUCKET,
    ROWS,
    UNFOLD_S,
    UNFOLDING,
    WORTH,
)
from flexsearch.search.evaluate import Configs, Evaluation, Evaluator, better, by_rank
from flexsearch.search.polish import Polish, Subject, Taken
from flexsearch.search.space import Rule, Space
from flexsearch.strategy import Options
from flexsearch.topology import Topology


@dataclass(frozen=True, slots=True)
class Climb:
    """What to do. ``index``: its number in the search. ``stream``: its number among all climbs of this seed, which sets
    its random numbers and candidates. ``proposals``: at most so many. ``best``: the best of the search's starts, or the
    plan that it starts from; temperatures are relative to that, and improvements are what is better. ``configs``: the
    start; None: random. ``options``: of all its plans. ``optimal``: the start is known to be a local optimum.
    ``patience``: how slowly the chain cools; 0: no chain, only descent. ``coarse``: whether coarse chains come first,
    and no descent over single operators follows. ``replicas``: into how many equal blocks plans are folded, if the
    start can be."""

    index: int
    stream: int
    phase: str
    configs: Configs | None
    proposals: int
    best: Evaluation
    options: Options
    optimal: bool = False
    patience: int = 1
    coarse: bool = False
    replicas: int = 1


@dataclass(frozen=True, slots=True)
class Step:
    """An improvement: after so many proposals of the climb, to which iteration time (s), by which move."""

    proposal: int
    time_s: float
    move: str


@dataclass(slots=True)
class Climbed:
    """What came of it, so far. ``configs``, ``options``, ``evaluation``: the best plan. ``steps``: times better than
    the search's best. ``optimal``: whether no change of a single operator (alone, or with those that follow it) gains
    what is worth it. ``polishing``: whether these are being tried. ``curve``: (proposals, cost of the chain's plan in
    s) now and then."""

    index: int
    phase: str
    configs: Configs
    options: Options
    evaluation: Evaluation
    proposals: int = 0
    accepted: int = 0
    optimal: bool = False
    polishing: bool = False
    steps: list[Step] = field(default_factory=list)
    curve: list[tuple[int, float]] = field(default_factory=list)


Watch = Callable[[Climbed], None]
"""Called now and then. What it raises ends the climb; the argument then holds what was found so far."""


def climbs_of(*arguments: Any) -> Callable[[Climb, Watch], Climbed]:
    """What makes climbs. ``arguments``: of ``Climber``."""
    return Climber(*arguments).climb


class Climber:
    """Climbs in one process: templates that one has made, the next need not make again."""

    def __init__(
        self, graph: OperatorGraph, topology: Topology, costs: Costs, options: Options, seed: int,
        rule: Rule | None = None, fold: Fold | None = None,
    ) -> None:  # fmt: skip
        self.graph, self.topology, self.costs, self.options, self.seed = graph, topology, costs, options, seed
        self.fold = fold
        self._folded: dict[int, Climber] = {}
        self.evaluate = Evaluator(graph, topology, costs, options, share=rule is None, fold=fold)
        self.space = Space(graph, topology, rule)
        self.chain = Chain(self.evaluate, self.space, seed)
        least, each, most = PATIENCE
        self.patience = min(most, max(least, each * len(self.space.leaders)))
        self.polish = Polish(self.evaluate, self.space, self.chain)

    def warm(self, configs: Configs) -> None:
        """Do what is done once: compile, the first time on a machine."""
        self.evaluate(self.space.random_plan(np.random.Generator(np.random.PCG64(0))))
        now = self.evaluate(configs)
        self.chain.begin(configs, now, now, 0, 1)
        self.chain.run(np.random.Generator(np.random.PCG64(0)), 1)

    def folded(self, replicas: int) -> Climber:
        """A climber over plans in which so many equal blocks do the same. Raises TopologyError or StrategyError if
        there are none."""
        if (climber := self._folded.get(replicas)) is None:
            parts = fold(self.graph, self.topology, replicas)
            block = parts.folding.block
            costs = Costs(parts.part, block, self.costs.profile)
            climber = self._folded[replicas] = Climber(parts.part, block, costs, self.options, self.seed, fold=parts)
        climber.use(self.evaluate.options)
        return climber

    def use(self, options: Options) -> None:
        """Climb under other options from now on."""
        if options != self.evaluate.options:
            self.evaluate.use(options)

    def climb(self, climb: Climb, watch: Watch) -> Climbed:
        """Run it."""
        if self.evaluate.template_bytes > MOST_TEMPLATES:
            self.evaluate.forget()
            self.chain.forget()
            gc.collect()  # templates refer to each other, and a search collects but rarely
        self.use(climb.options)
        if climb.replicas > 1:
            inner = self.folded(climb.replicas)
            assert inner.fold is not None
            start = None if climb.configs is None else inner.fold.folded(climb.configs)
            if climb.configs is None or start is not None:
                return FoldedClimb(self, inner, climb, watch).run(start)
        rng = np.random.Generator(np.random.PCG64([self.seed, climb.stream]))
        start = self.space.random_plan(rng) if climb.configs is None else climb.configs
        done = Climbed(climb.index, climb.phase, start, climb.options, self.evaluate(start))
        if better(done.evaluation, climb.best):
            done.steps.append(Step(0, done.evaluation.time_s, ""))
        if climb.patience:
            if climb.coarse:
                self._coarse(climb, rng, done, watch)
            self._chain(climb, rng, done, watch)
        if climb.optimal and done.configs == start:
            done.optimal = True
        elif not climb.coarse:
            self._polish(climb, done, watch, climb.proposals - done.proposals, self.polish.all)
        watch(done)
        return done

    def _coarse(self, climb: Climb, rng: np.random.Generator, done: Climbed, watch: Watch) -> None:
        """Chains over whole classes of operators: first from the climb's start, then from the best plan so far. Then
        greedy descent over classes, which finds what alternates."""
        for _ in range(COARSE_CHAINS):
            before = done.evaluation
            self._chain(climb, rng, done, watch, coarse=True)
            if done.evaluation.cost > (1.0 - GAIN) * before.cost:
                break
        most = min(climb.proposals - done.proposals, self._coarse_patience(climb))
        self._polish(climb, done, watch, most, self.polish.together)

    @staticmethod
    def _coarse_patience(climb: Climb) -> int:
        return COARSE_PATIENCE[min(climb.index, len(COARSE_PATIENCE) - 1)] * climb.patience

    def _chain(
        self, climb: Climb, rng: np.random.Generator, done: Climbed, watch: Watch, coarse: bool = False
    ) -> None:  # fmt: skip
        """A chain that cools down, and ends when ``patience`` proposals in a row brought it nothing new."""
        best = min(done.evaluation, climb.best, key=by_rank)
        patience = self._coarse_patience(climb) if coarse else self.patience * climb.patience
        self.chain.begin(done.configs, done.evaluation, best, climb.stream, patience, coarse)
        done.curve.append((done.proposals, self.chain.cost))
        ended, before, accepted, looked = False, done.proposals, done.accepted, 0.0

        def note() -> None:
            done.proposals, done.accepted = before + self.chain.steps, accepted + self.chain.accepted
            gains = self.chain.gains()
            if gains:
                done.steps += [Step(before + gain.step, gain.time_s, gain.move) for gain in gains]
                done.configs, done.evaluation = self.chain.best

        def look() -> None:
            nonlocal looked
            if time.monotonic() >= looked + LOOK_S:
                note()
                watch(done)
                looked = time.monotonic()

        while not ended and done.proposals < climb.proposals:
            ended = self.chain.run(rng, min(ROWS, climb.proposals - done.proposals), look)
            note()
            done.curve.append((done.proposals, self.chain.cost))
            watch(done)
        configs, now = self.chain.best
        if better(now, done.evaluation):  # where nothing fits into memory, a chain may end worse than it began
            done.configs, done.evaluation = configs, now

    def _polish(
        self, climb: Climb, done: Climbed, watch: Watch, proposals: int, subjects: Sequence[Subject]
    ) -> None:  # fmt: skip
        """Greedy descent, until nothing helps or so many proposals were made. Over all subjects that there are, first
        for gains that are worth it: when there are none, the plan is a local optimum. What smaller gains make of it
        takes its place when there are none of them left either, or when they add up."""
        single = subjects is self.polish.all
        before, taken = done.proposals, Taken(done.configs, done.evaluation, 0)

        def publish() -> None:
            if taken.configs == done.configs:
                return
            done.configs, done.evaluation, done.optimal = taken.configs, taken.evaluation, False
            if taken.evaluation.feasible and better(taken.evaluation, climb.best):
                done.steps.append(Step(done.proposals, taken.evaluation.time_s, f"polish {taken.operators}"))
            done.curve.append((done.proposals, taken.evaluation.cost))

        def look(tried: int, better_one: Taken | None) -> None:
            nonlocal taken
            done.proposals = before + tried
            if better_one is not None:
                done.accepted, taken = done.accepted + 1, better_one
                if not done.optimal or taken.evaluation.cost < (1.0 - REBUCKET) * done.evaluation.cost:
                    publish()
            watch(done)

        done.polishing = single
        for gain in (WORTH, 0.0) if single else (0.0,):
            before = done.proposals
            ended = self.polish.descend(taken.configs, taken.evaluation, proposals, subjects, look, gain)
            proposals -= done.proposals - before
            if not ended:
                break
            publish()
            done.optimal = single
        done.polishing = False


class FoldedClimb:
    """A climb over folded plans, told in whole plans: the best one is unfolded and evaluated now and then, and at the
    end. So what is found is never better in the telling than it is."""

    def __init__(self, outer: Climber, inner: Climber, climb: Climb, watch: Watch) -> None:
        self.outer, self.inner, self.task, self.watch = outer, inner, climb, watch
        self.told: Climbed | None = None
        self._unfolded: Configs = ()
        self._told_of = 0, 0.0
        """How many steps inside were told, and the least time that they were told with."""
        self._next = 0.0

    def run(self, start: Configs | None) -> Climbed:
        """Run it from a folded start; None: a random one."""
        inside: list[Climbed] = []

        def look(climbed: Climbed) -> None:
            inside[:] = [climbed]
            now = time.monotonic()
            told = self._tell(climbed, now >= self._next)
            if now >= self._next:
                self._next = time.monotonic() + max(UNFOLD_S, UNFOLDING * (time.monotonic() - now))
            self.watch(told)

        try:
            self._tell(self.inner.climb(replace(self.task, configs=start, replicas=1), look), True)
        finally:  # also where the watch ends the climb
            if inside:
                self._tell(inside[0], True)
        assert self.told is not None
        return self.told

    def _tell(self, inside: Climbed, unfold: bool) -> Climbed:
        """What came of the climb so far; its best plan as of the last time that it was to ``unfold``."""
        outer, parts = self.outer, self.inner.fold
        assert parts is not None
        if self.told is None or (unfold and inside.configs != self._unfolded):
            whole, self._unfolded = parts.unfold(inside.configs), inside.configs
            evaluation = outer.evaluate(whole)
            if self.told is None:
                self.told = Climbed(self.task.index, self.task.phase, whole, self.task.options, evaluation)
            elif better(evaluation, self.told.evaluation):
                self.told.configs, self.told.evaluation = whole, evaluation
        told, least = self.told, self.told.evaluation.time_s
        told.proposals, told.accepted, told.curve = inside.proposals, inside.accepted, inside.curve
        if (told_of := (len(inside.steps), least)) != self._told_of:
            told.steps, self._told_of = [replace(x, time_s=max(x.time_s, least)) for x in inside.steps], told_of
        return told
