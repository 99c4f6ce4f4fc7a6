"""What a search says: while it runs, and at its end."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

from flexsearch.cost.uncertainty import Estimate
from flexsearch.search.climb import Climbed
from flexsearch.search.evaluate import by_rank
from flexsearch.search.tuning import Tuned
from flexsearch.simulate import Simulation
from flexsearch.strategy import Prediction, Strategy


class Timed(Protocol):
    """What is simulated of a plan."""

    @property
    def makespan_s(self) -> float: ...

    @property
    def estimate(self) -> Estimate: ...


def is_faster(plan: Timed, than: Timed, margin: float | None) -> bool:
    """Whether a plan is faster than another by at least this share of the other's time; None: by so much that their
    predictions tell them apart. Where it is not, the plan that is better known is the answer."""
    if margin is not None:
        return plan.makespan_s <= than.makespan_s * (1.0 - margin)
    return plan.makespan_s < than.makespan_s and not plan.estimate.is_near(than.estimate)


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a search is. ``phase``: what it is doing ("from megatron"). ``best_s``: iteration time of the best plan
    that fits (of the best at all as long as none fits)."""

    proposals: int
    accepted: int
    best_s: float
    elapsed_s: float
    phase: str


@dataclass(frozen=True, slots=True)
class Improvement:
    """A better plan was found: at which proposal (0: among the starts), how fast it is, where the search was, by which
    move."""

    proposal: int
    time_s: float
    phase: str
    move: str


@dataclass(frozen=True, slots=True)
class Trail:
    """The way of one climb: (proposals of the search so far, cost in s of the plan at hand) now and then. ``phase``:
    from where it went."""

    phase: str
    points: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Outcome:
    """A plan for tables. ``time_s``: simulated iteration time. ``feasible``: whether it fits into every device's
    memory. ``simulate``: makes ``simulation``, when somebody asks for it: on many devices that takes seconds."""

    strategy: Strategy
    time_s: float
    feasible: bool
    simulate: Callable[[], Simulation] = field(compare=False, repr=False)

    @cached_property
    def simulation(self) -> Simulation:
        """The rest of what is simulated."""
        return self.simulate()

    @property
    def makespan_s(self) -> float:
        """Simulated iteration time."""
        return self.time_s

    @property
    def estimate(self) -> Estimate:
        """That time with what it rests on."""
        return self.simulation.estimate


@dataclass(frozen=True)
class SearchResult:
    """``strategy``: the best plan, with its Prediction and Search records. ``simulation``: of that plan. ``feasible``:
    whether it fits into memory (if not, no known plan does). ``locally_optimal``: whether no change of a single
    operator's config (alone, or with the operators that follow it) makes it faster; by more than ``SIMPLER``, where
    what was found has been made simpler: all were tried. ``bound_s``: no legal plan is faster. ``baselines``: every
    baseline by name, with the bucket size that suits it best. ``proposals``: of the climbs. ``stopped``: why the search
    ended, in words. ``trails``: of the climbs. ``baseline``: name of the baseline that the best plan is, empty if it is
    none. ``set_aside``: the time of a faster plan that did not beat that baseline by the margin, if there is one.
    ``runners_up``: other plans that climbs ended with and that fit into memory, the fastest first, no two of which take
    the same time. ``sorts``: of layers that were to be split; ``alternatives``: other configs of one layer of each
    sort, together."""

    strategy: Strategy
    simulation: Simulation
    feasible: bool
    locally_optimal: bool
    bound_s: float
    baselines: dict[str, Outcome]
    history: tuple[Improvement, ...]
    trails: tuple[Trail, ...]
    proposals: int
    accepted: int
    elapsed_s: float
    stopped: str
    baseline: str
    set_aside: Estimate | None
    runners_up: tuple[Tuned, ...]
    sorts: int
    alternatives: int

    @property
    def set_aside_s(self) -> float | None:
        """Iteration time of the plan that was set aside, s."""
        return None if self.set_aside is None else self.set_aside.seconds

    @property
    def few(self) -> bool:
        """Whether the search has hardly begun: it made fewer proposals than one look at the other configs of one layer
        of each sort takes. What it did not find then says little."""
        return self.proposals < self.alternatives and not self.locally_optimal

    @property
    def prediction(self) -> Prediction:
        """What the simulator says of the best plan."""
        assert self.strategy.prediction is not None
        return self.strategy.prediction


def runners_up(climbs: Iterable[Climbed], taken: Iterable[float]) -> tuple[Tuned, ...]:
    """What climbs ended with and fits, the best first. Plans that take the same time are mostly one plan on devices
    that are alike: of each such the first, and none that takes a time in ``taken`` (s), as a baseline does."""
    seen, plans = set(taken), []
    for climbed in sorted(climbs, key=lambda climbed: by_rank(climbed.evaluation)):
        if climbed.evaluation.feasible and climbed.evaluation.time_s not in seen:
            seen.add(climbed.evaluation.time_s)
            plans.append(Tuned(climbed.configs, climbed.options, climbed.evaluation))
    return tuple(plans)
