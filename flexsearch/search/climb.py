"""One climb: a chain from a plan until it finds nothing new, then greedy descent to a local optimum.

A climb depends only on its inputs, so it gives the same result in any process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import nextafter
from typing import Final

import numpy as np
import numpy.typing as npt

from flexsearch.cost import Costs
from flexsearch.graph import OperatorGraph
from flexsearch.search.evaluate import Configs, Evaluation, Evaluator, better, by_rank
from flexsearch.search.runner import ROWS, Runner
from flexsearch.search.space import Rule, Space
from flexsearch.simulate.delta import DeltaSimulator, make_proposals
from flexsearch.strategy import OperatorConfig, Options
from flexsearch.topology import Topology

U32 = npt.NDArray[np.uint32]
COARSE: Final = (1200, 1200, 2400, 2400, 3600)
"""Patience of coarse chains by number of the climb: early climbs get short ones, to suit short budgets."""
TRIES: Final = 5
"""Most coarse chains of a climb."""
GAIN: Final = 0.01
"""A coarse chain that gains less than this share of the time is the climb's last."""
LOOK: Final = 32
"""Most alternatives between two looks at the clock."""


@dataclass(frozen=True, slots=True)
class Climb:
    """What to do. ``index``: its number in the search. ``stream``: its number among all climbs of this seed, which sets
    its random numbers and candidates. ``proposals``: at most so many. ``best``: the best plan known to the search when
    it was planned. ``configs``: the start; None: random. ``optimal``: the start is known to be a local optimum.
    ``patience``: how slowly the chain cools; 0: no chain, only descent. ``coarse``: whether coarse chains come first;
    the descent is then over classes of operators only."""

    index: int
    stream: int
    phase: str
    configs: Configs | None
    proposals: int
    best: Evaluation
    optimal: bool = False
    patience: int = 1
    coarse: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """An improvement: after so many proposals of the climb, to which iteration time (s), by which move."""

    proposal: int
    time_s: float
    move: str


@dataclass(slots=True)
class Climbed:
    """What came of it, so far. ``configs``, ``evaluation``: the best plan. ``steps``: times better than the search's
    best. ``optimal``: whether no change of a single operator (alone, or with those that follow it) makes the plan
    better. ``polishing``: whether these are being tried. ``curve``: (proposals, cost of the chain's plan in s) now and
    then."""

    index: int
    phase: str
    configs: Configs
    evaluation: Evaluation
    proposals: int = 0
    accepted: int = 0
    optimal: bool = False
    polishing: bool = False
    steps: list[Step] = field(default_factory=list)
    curve: list[tuple[int, float]] = field(default_factory=list)


Watch = Callable[[Climbed], None]
"""Called now and then. What it raises ends the climb; the argument then holds what was found so far."""


class Climber:
    """Climbs in one process: templates that one has made, the next need not make again."""

    def __init__(
        self, graph: OperatorGraph, topology: Topology, costs: Costs, options: Options, seed: int,
        rule: Rule | None = None,
    ) -> None:  # fmt: skip
        self.graph, self.seed = graph, seed
        self.evaluate = Evaluator(graph, topology, costs, options, share=rule is None)
        self.space = Space(graph, topology, rule)
        self.runner = Runner(self.evaluate, self.space, seed)
        self.patience = min(6000, max(3000, 8 * len(self.space.leaders)))
        classes = (*self.space.classes, *self.space.loose_classes)
        self._classes: Sequence[tuple[int, ...]] = classes
        self._subjects: Sequence[tuple[int, ...]] = (*classes, *((i,) for i in self.space.by_importance))
        self._numbers: dict[tuple[tuple[int, ...], OperatorConfig], tuple[U32, U32]] = {}

    def warm(self, configs: Configs) -> None:
        """Do what is done once: compile, the first time on a machine."""
        self.evaluate(self.space.random_plan(np.random.Generator(np.random.PCG64(0))))
        self.evaluate.at(configs).by_events()
        now = self.evaluate(configs)
        self.runner.begin(configs, now, now, 0, 1)
        self.runner.go(np.random.Generator(np.random.PCG64(0)), 1)

    def climb(self, climb: Climb, watch: Watch) -> Climbed:
        """Run it."""
        rng = np.random.Generator(np.random.PCG64([self.seed, climb.stream]))
        start = self.space.random_plan(rng) if climb.configs is None else climb.configs
        done = Climbed(climb.index, climb.phase, start, self.evaluate(start))
        if better(done.evaluation, climb.best):
            done.steps.append(Step(0, done.evaluation.time_s, ""))
        if climb.patience:
            if climb.coarse:
                self._coarse(climb, rng, done, watch)
            self._chain(climb, rng, done, watch)
        if climb.optimal and done.configs == start:
            done.optimal = True
        else:
            self._polish(climb, done, watch)
        watch(done)
        return done

    def _coarse(self, climb: Climb, rng: np.random.Generator, done: Climbed, watch: Watch) -> None:
        """Chains over whole classes of operators: first from the climb's start, then from the best plan so far."""
        for _ in range(TRIES):
            before = done.evaluation
            self._chain(climb, rng, done, watch, coarse=True)
            if done.evaluation.cost > (1.0 - GAIN) * before.cost:
                return

    def _chain(
        self, climb: Climb, rng: np.random.Generator, done: Climbed, watch: Watch, coarse: bool = False
    ) -> None:  # fmt: skip
        """A chain that cools down, and ends when ``patience`` proposals in a row brought it nothing new."""
        best = min(done.evaluation, climb.best, key=by_rank)
        patience = (COARSE[min(climb.index, len(COARSE) - 1)] if coarse else self.patience) * climb.patience
        self.runner.begin(done.configs, done.evaluation, best, climb.stream, patience, coarse)
        done.curve.append((done.proposals, self.runner.cost))
        ended, before, accepted = False, done.proposals, done.accepted

        def note() -> None:
            done.proposals, done.accepted = before + self.runner.steps, accepted + self.runner.accepted
            found = self.runner.found()
            if found:
                done.steps += [Step(before + one.step, one.time_s, one.move) for one in found]
                done.configs, done.evaluation = self.runner.best

        def look() -> None:
            note()
            watch(done)

        while not ended and done.proposals < climb.proposals:
            ended = self.runner.go(rng, min(ROWS, climb.proposals - done.proposals), look)
            note()
            done.curve.append((done.proposals, self.runner.cost))
            watch(done)
        configs, now = self.runner.best
        if better(now, done.evaluation):  # where nothing fits into memory, a chain may end worse than it began
            done.configs, done.evaluation = configs, now

    def _polish(self, climb: Climb, done: Climbed, watch: Watch) -> None:
        """Greedy descent over the configs of classes of operators, and of single ones (with and without those that
        follow them), the important ones first, until none helps."""
        simulator = self.evaluate.at(done.configs)
        subjects = self._classes if climb.coarse else self._subjects
        quiet, k, done.polishing = 0, 0, not climb.coarse
        while quiet < len(subjects):
            found = self._descend(climb, done, simulator, subjects[k % len(subjects)], watch)
            if found is None:
                break
            quiet, k = (0 if found else quiet + 1), k + 1
        else:
            done.optimal = not climb.coarse
        done.polishing = False

    def _descend(
        self, climb: Climb, done: Climbed, simulator: DeltaSimulator, subject: tuple[int, ...], watch: Watch
    ) -> bool | None:
        """Try the alternatives of an operator, or of several together; take the first that is better. Whether there was
        one; None if there are no more proposals."""
        changes = self._changes(simulator, subject, done.configs)
        while some := list(islice(changes, min(LOOK, climb.proposals - done.proposals))):
            proposals, tried = make_proposals(some), 0
            while tried < len(some):
                seconds = simulator.attempt_each(proposals, nextafter(done.evaluation.cost, 0.0))
                now = int(proposals.at[0])
                found = now < len(some)
                done.proposals += now - tried + found
                if found and self._take(climb, done, simulator, *some[now], seconds):
                    watch(done)
                    return True
                tried = now + found
                proposals.at[0] = tried
            watch(done)
        return None if done.proposals >= climb.proposals else False

    def _take(
        self, climb: Climb, done: Climbed, simulator: DeltaSimulator, operators: U32, numbers: U32, seconds: float
    ) -> bool:
        """Take what takes so many seconds, if it is better."""
        configs = list(done.configs)
        for i, n in zip(operators.tolist(), numbers.tolist(), strict=True):
            config = simulator.templates.configs[n]
            assert config is not None
            configs[i] = config
        found = Evaluation(seconds, self.evaluate.shortfall(configs, simulator.held))
        if not better(found, done.evaluation):
            return False
        simulator.accept()
        done.accepted += 1
        done.configs, done.evaluation = tuple(configs), found
        if found.feasible and better(found, climb.best):
            done.steps.append(Step(done.proposals, found.time_s, f"polish {len(operators)}"))
        done.curve.append((done.proposals, found.cost))
        return True

    def _changes(
        self, simulator: DeltaSimulator, subject: tuple[int, ...], configs: Configs
    ) -> Iterator[tuple[U32, U32]]:
        """Operators and numbers of configs to try: each alternative of the subject, with those of its groups following;
        and, for a single operator, alone."""
        for config in self.space.alternatives(subject[0], configs):
            known = self._numbers.get((subject, config))
            if known is None:
                number = simulator.templates.config
                led = [number(operator, self.space.fix(operator, config)) for operator in subject]
                known = self._numbers[subject, config] = self.runner.follow(simulator, subject, led)
            yield known
            operators, numbers = known
            if len(subject) == 1 and len(operators) > 1:
                yield operators[:1], numbers[:1]
