"""Greedy descent to a local optimum: over other configs of classes of operators, then of single ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from math import nextafter

from flexsearch.lower.templates import Templates
from flexsearch.search.chain import Chain
from flexsearch.search.constants import LOOK
from flexsearch.search.evaluate import Configs, Evaluation, Evaluator
from flexsearch.search.space import Space
from flexsearch.search.trials import empty_trials
from flexsearch.strategy import Sharding

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
    """Descents over one space. What they may try, in turn: ``classes`` of operators worth a config of their own;
    ``together`` with other classes, and every second and third member of them; ``all``, with each operator, the
    important ones first, alone and with those that follow it."""

    def __init__(self, evaluate: Evaluator, space: Space, chain: Chain) -> None:
        self.evaluate, self.space, self.chain = evaluate, space, chain
        self._numbered: tuple[Templates | None, dict[tuple[int, Sharding], list[int]]] = None, {}
        self.classes: tuple[Subject, ...] = space.classes
        self.together: tuple[Subject, ...] = (*space.classes, *space.loose_classes, *space.alternating)
        self.all: tuple[Subject, ...] = (*self.together, *((i,) for i in space.by_importance))

    def descend(
        self, configs: Configs, now: Evaluation, proposals: int, subjects: Sequence[Subject], look: Look,
        gain: float = 0.0,
    ) -> bool:  # fmt: skip
        """Go from a plan, which ``now`` evaluates, to better ones for at most so many proposals. Whether it came to an
        end: no subject has an alternative that is better, by more than the share ``gain`` of the cost."""
        descent = _Descent(self.evaluate, self.chain, configs, now, proposals, look, gain)
        quiet, k = 0, 0
        while quiet < len(subjects):
            subject = subjects[k % len(subjects)]
            gained = descent.step(subject, self._numbers(descent.simulator.templates, subject, descent.configs))
            if gained is None:
                return False
            quiet, k = (0 if gained else quiet + 1), k + 1
        return True

    def _numbers(self, templates: Templates, subject: Subject, configs: Configs) -> Iterator[int]:
        """Numbers of the alternatives of a subject's first operator (``Space.alternatives``)."""
        first, space = subject[0], self.space
        nearby = (templates.config(first, space.fix(first, config)) for config in space.nearby(first, configs))
        seen = {templates.config(first, configs[first])}
        for number in chain(nearby, self._on_blocks(templates, first, configs[first].sharding)):
            if number not in seen:
                seen.add(number)
                yield number

    def _on_blocks(self, templates: Templates, operator: int, sharding: Sharding) -> Iterator[int]:
        """Numbers of ``Space.on_blocks``, the same whenever an operator's turn comes; made as far as needed."""
        if self._numbered[0] is not templates:
            self._numbered = templates, {}
        configs, key = self.space.on_blocks(operator, sharding), (templates.alike[operator], sharding)
        numbers = self._numbered[1].setdefault(key, [])
        for k, config in enumerate(configs):
            if k == len(numbers):
                numbers.append(templates.config(operator, self.space.fix(operator, config)))
            yield numbers[k]


class _Descent:
    """One descent: the plan at hand, and what is left to spend."""

    def __init__(
        self, evaluate: Evaluator, chain: Chain, configs: Configs, now: Evaluation, proposals: int, look: Look,
        gain: float,
    ) -> None:  # fmt: skip
        self.chain, self.configs, self.now, self.look, self.gain = chain, configs, now, look, gain
        self.simulator, self.proposals = evaluate.at(configs), proposals
        self.trials = empty_trials(len(configs), LOOK, proposals)

    @property
    def tried(self) -> int:
        return self.proposals - int(self.trials.left[0])

    def step(self, subject: Subject, numbers: Iterator[int]) -> bool | None:
        """Try configs, given by number; take the first that is better. Whether there was one; None if there are no more
        proposals."""
        trials = self.trials
        trials.operators[0] = len(subject)
        trials.operator[: len(subject)] = subject
        while trials.left[0] and (some := list(islice(numbers, LOOK))):
            trials.configs[0], trials.next[0], trials.alone[0] = len(some), 0, 0
            trials.config[: len(some)] = some
            trials.limit[0] = nextafter(self.now.cost * (1.0 - self.gain), 0.0)
            trials.fits[0] = self.now.feasible
            taken = self._take() if self.chain.try_each(self.simulator, trials) else None
            self.look(self.tried, taken)
            if taken is not None:
                return True
        return False if trials.left[0] else None

    def _take(self) -> Taken:
        """The better plan, which is at hand."""
        self.configs = self.simulator.configs
        self.now = Evaluation(float(self.trials.seconds[0]), float(self.trials.shortfall[0]))
        return Taken(self.configs, self.now, int(self.simulator.rows.change.number[0]))
