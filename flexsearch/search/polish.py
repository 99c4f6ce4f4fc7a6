"""Greedy descent to a local optimum: over other configs of classes of operators, then of single ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from math import inf, nextafter

import numpy as np
import numpy.typing as npt

from flexsearch.lower.templates import Templates
from flexsearch.search.chain import Chain
from flexsearch.search.constants import LOOK
from flexsearch.search.evaluate import Configs, Evaluation, Evaluator, better
from flexsearch.search.space import Space
from flexsearch.simulate.delta import DeltaSimulator
from flexsearch.strategy import OperatorConfig

U32 = npt.NDArray[np.uint32]
Subject = tuple[int, ...]
"""Operators that change together, to the same config."""


@dataclass(frozen=True, slots=True)
class Taken:
    """A better plan that the descent has gone to, and how many operators changed."""

    configs: Configs
    evaluation: Evaluation
    operators: int


Look = Callable[[int, Taken | None], None]
"""Called with the proposals so far, and with what was taken since the last call. What it raises ends the descent."""


class Polish:
    """Descents over one space. What they try, in turn: each class (and every second and third member of it), then each
    operator, the important ones first, alone and with those that follow it."""

    def __init__(self, evaluate: Evaluator, space: Space, chain: Chain) -> None:
        self.evaluate, self.space, self.chain = evaluate, space, chain
        self.classes: tuple[Subject, ...] = (*space.classes, *space.loose_classes, *space.alternating)
        self._numbers: dict[tuple[Subject, OperatorConfig], tuple[U32, U32]] = {}
        self._number_of: dict[tuple[int, OperatorConfig], int] = {}
        """Number of a config of an operator, or of any that is like it."""

    def descend(
        self, configs: Configs, now: Evaluation, proposals: int, classes_only: bool, look: Look, gain: float = 0.0
    ) -> bool:  # fmt: skip
        """Go from a plan, which ``now`` evaluates, to better ones for at most so many proposals. Whether it came to an
        end: no subject has an alternative that is better, by more than the share ``gain`` of the cost."""
        single: tuple[Subject, ...] = () if classes_only else tuple((i,) for i in self.space.by_importance)
        subjects = (*self.classes, *single)
        descent = _Descent(self.evaluate, configs, now, proposals, look, gain)
        quiet, k = 0, 0
        while quiet < len(subjects):
            subject = subjects[k % len(subjects)]
            gained = descent.step(self._changes(descent.simulator, subject, descent.configs))
            if gained is None:
                return False
            quiet, k = (0 if gained else quiet + 1), k + 1
        return True

    def _changes(
        self, simulator: DeltaSimulator, subject: Subject, configs: Sequence[OperatorConfig]
    ) -> Iterator[tuple[U32, U32]]:
        """Operators and numbers of configs to try: each alternative of the subject, with those of its groups following;
        and, for a single operator, alone."""
        for config in self.space.alternatives(subject[0], configs):
            change = self._numbers.get((subject, config))
            if change is None:
                led = [self._number(simulator.templates, operator, config) for operator in subject]
                change = self._numbers[subject, config] = self.chain.follow(simulator, subject, led)
            yield change
            operators, numbers = change
            if len(subject) == 1 and len(operators) > 1:
                yield operators[:1], numbers[:1]

    def _number(self, templates: Templates, operator: int, config: OperatorConfig) -> int:
        """Number of the allowed config that is nearest to ``config``."""
        key = templates.alike[operator], config
        if (number := self._number_of.get(key)) is None:
            number = self._number_of[key] = templates.config(operator, self.space.fix(operator, config))
        return number


class _Descent:
    """One descent: the plan at hand, and what is left to spend."""

    def __init__(
        self, evaluate: Evaluator, configs: Configs, now: Evaluation, proposals: int, look: Look, gain: float
    ) -> None:
        self.evaluate, self.configs, self.now, self.proposals, self.look = evaluate, configs, now, proposals, look
        self.gain = gain
        self.simulator = evaluate.at(configs)
        self.tried = 0

    def step(self, changes: Iterator[tuple[U32, U32]]) -> bool | None:
        """Try changes; take the first that is better. Whether there was one; None if there are no more proposals."""
        while some := list(islice(changes, min(LOOK, self.proposals - self.tried))):
            for operators, numbers in some:
                self.tried += 1
                seconds = self.simulator.attempt(operators, numbers, self._limit())
                if seconds < inf and (taken := self._take(operators, numbers, seconds)) is not None:
                    self.look(self.tried, taken)
                    return True
            self.look(self.tried, None)
        return None if self.tried >= self.proposals else False

    def _take(self, operators: U32, numbers: U32, seconds: float) -> Taken | None:
        """Take what takes so many seconds, if it is better."""
        configs = list(self.configs)
        for i, n in zip(operators.tolist(), numbers.tolist(), strict=True):
            config = self.simulator.templates.configs[n]
            assert config is not None
            configs[i] = config
        evaluation = Evaluation(seconds, self.simulator.missing_memory())
        if not better(evaluation, self.now) or evaluation.cost > self._limit():
            return None
        self.simulator.accept()
        self.configs, self.now = tuple(configs), evaluation
        return Taken(self.configs, self.now, len(operators))

    def _limit(self) -> float:
        """The most that what is taken may cost (s)."""
        return nextafter(self.now.cost * (1.0 - self.gain), 0.0)
