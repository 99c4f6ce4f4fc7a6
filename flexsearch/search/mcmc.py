"""Metropolis-Hastings over plans: a pure ``init`` / ``step`` pair over an immutable state, in the style of blackjax.

The target is exp(-beta * cost / reference) (FlexFlow, MLSys 2019, section 6), where the reference is the cost of a good
plan: a temperature means the same for a model of microseconds and one of minutes. The moves are taken as symmetric, as
there; they are not quite (copying a neighbour is easier than undoing it), which matters to an integral over the space,
not to its minimum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import log

import numpy as np

from flexsearch.search.evaluate import Configs, Evaluation, Evaluator

Propose = Callable[[np.random.Generator, Configs], tuple[str, Configs]]


@dataclass(frozen=True, slots=True)
class State:
    """Where a chain is."""

    configs: Configs
    evaluation: Evaluation


@dataclass(frozen=True, slots=True)
class Info:
    """What a step did: the move, what it led to, and whether it was accepted."""

    move: str
    proposed: State
    accepted: bool


def init(configs: Configs, evaluate: Evaluator) -> State:
    """A chain's start."""
    state = State(configs, evaluate(configs))
    evaluate.hold(configs)
    return state


def step(
    rng: np.random.Generator, state: State, propose: Propose, evaluate: Evaluator, beta: float, reference: float
) -> tuple[State, Info]:
    """One proposal, accepted with min(1, exp(-beta * (new cost - cost) / reference)); ``reference`` in seconds.

    The uniform number is drawn first: so it is known beforehand how much the proposal may cost, and the memory of one
    that is too slow (slower than the reference, too) need not be worked out.
    """
    move, configs = propose(rng, state.configs)
    limit = state.evaluation.cost - reference / beta * log(1.0 - rng.random())
    proposed = State(configs, evaluate(configs, max(limit, reference)))
    accepted = proposed.evaluation.shortfall is not None and proposed.evaluation.cost <= limit
    if accepted:
        evaluate.hold(configs)
    return proposed if accepted else state, Info(move, proposed, accepted)
