"""The search for the fastest plan: climbs from the baselines, from random plans and from the best, side by side.

What each climb does depends on the seed and on numbers of proposals, never on the clock or on the number of processes:
with a budget of proposals the same inputs give the same plan everywhere. The clock ends a search; where there is a
budget in seconds alone, it also says when to polish the best plan.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final

from flexsearch.cost import Costs
from flexsearch.errors import StrategyError
from flexsearch.graph import OperatorGraph, whole_piece
from flexsearch.lower import Lowering
from flexsearch.quantities import MAX_COUNT, MAX_SEED
from flexsearch.search.agenda import POLISH, Agenda, State
from flexsearch.search.bound import lower_bound
from flexsearch.search.climb import Climb, Climbed, Climber
from flexsearch.search.evaluate import Configs, Evaluation, better, by_rank
from flexsearch.search.outcome import Improvement, Outcome, Progress, SearchResult, Trail
from flexsearch.search.pins import parse_pins
from flexsearch.search.space import Rule
from flexsearch.search.team import WINDOW, Team, Turn
from flexsearch.simulate import Simulation, simulate
from flexsearch.strategy import Options, Prediction, Search, Strategy
from flexsearch.strategy.baselines import Seconds, baselines
from flexsearch.topology import Topology

BUCKETS: Final = (2**20, 4 * 2**20)
"""Bucket sizes (bytes) that are tried besides the given one: small buckets leave early, large ones cost few starts."""
GIVEN: Final = "the given plan"
ENOUGH: Final = 0.25
"""But only if there seems to be time for so much of one look at every alternative: else the chains bring more."""


@dataclass(frozen=True, slots=True)
class Budget:
    """How long to search: seconds, proposals, or both."""

    seconds: float | None
    proposals: int | None

    def ended(self, elapsed_s: float, idle_s: float) -> str:
        """Why the time is over, in words; empty if it is not. ``idle_s``: time without improvement."""
        if self.seconds is not None and elapsed_s >= self.seconds:
            return f"the budget of {self.seconds:g} s was used up"
        if self.seconds is not None and idle_s >= self.seconds / 2:
            return f"half of the budget of {self.seconds:g} s brought nothing better"
        return ""

    def left(self, elapsed_s: float, idle_s: float) -> float:
        """Seconds for polishing: until the end, if that is near; else 0, as with a budget of proposals."""
        end = self.seconds
        if end is None or self.proposals is not None or max(elapsed_s, 2.0 * idle_s) < (1.0 - POLISH) * end:
            return 0.0
        return end - elapsed_s


def search(
    graph: OperatorGraph,
    topology: Topology,
    costs: Costs,
    options: Options | None = None,
    *,
    budget_s: float | None = None,
    proposals: int | None = None,
    seed: int = 0,
    start: Strategy | None = None,
    pins: Sequence[str] = (),
    rule: Rule | None = None,
    margin: float = 0.0,
    processes: int | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> SearchResult:
    """The best plan that is found within ``budget_s`` seconds or ``proposals`` proposals, whichever ends first (at
    least one must be given). The search also stops when half of the budget brought nothing better (FlexFlow, MLSys
    2019, section 6.2); with seconds alone it may then still look for single changes that make the best plan better.

    ``start``: a plan to go on from; if a search with this seed found it, that search is continued. ``pins``: what is
    fixed (:mod:`flexsearch.search.pins`). ``rule``: another restriction, to the configs that it leaves as they are.
    ``margin``: the share of the time by which a plan must beat the best baseline to be preferred to it; a smaller gain
    is within the error of any prediction, and the baseline is simpler. ``processes``: at most so many; None: one for
    each core. Ctrl-C ends the search with the best plan so far. The plan is never slower than the best baseline that
    fits into memory (and obeys the pins), and fits if any known plan does. Raises StrategyError if ``start`` is not
    legal, a pin cannot be obeyed or no budget is given."""
    if budget_s is None and proposals is None:
        raise StrategyError("the search needs a budget: seconds, or a number of proposals")
    if not 0 <= seed < MAX_SEED:
        raise StrategyError(f"seed {seed} is not between 0 and 2^64 - 1")
    if start is not None:
        start.check(graph, topology)
    budget, rule = Budget(budget_s, proposals), parse_pins(pins, graph, topology) or rule
    run = _Run(graph, topology, costs, options or Options(), seed, rule, budget, on_progress)
    try:
        with _rare_collections():
            run.begin(start)
            reason = run.go(cores() if processes is None else processes)
    except _Stop as stop:
        reason = str(stop)
    except KeyboardInterrupt:
        if "data-parallel" not in run.outcomes:
            raise
        reason = "interrupted"
    return run.result(reason, margin, tuple(pins))


def cores() -> int:
    """Number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Looks for reference cycles only rarely: the caches hold millions of tuples, there are hardly any cycles, and
    walking over them all the time takes half of a search."""
    before = gc.get_threshold()
    gc.set_threshold(1_000_000, 50, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)


class _Stop(Exception):
    """The search is over; the message says why."""


class _Run:
    """One search: the budget, the best so far, and what the climbs are to do."""

    def __init__(
        self, graph: OperatorGraph, topology: Topology, costs: Costs, options: Options, seed: int, rule: Rule | None,
        budget: Budget, on_progress: Callable[[Progress], None] | None,
    ) -> None:  # fmt: skip
        self.graph, self.topology, self.costs = graph, topology, costs
        self.options = self.given = options
        self.seed, self.rule, self.budget, self.on_progress = seed, rule, budget, on_progress
        self.climber = Climber(graph, topology, costs, options, seed, rule)
        self.evaluate = self.climber.evaluate
        self.seconds = whole_seconds(graph, costs)
        self.began = self.improved = time.monotonic()
        self.outcomes: dict[str, Outcome] = {}
        self.starts: dict[str, State] = {}
        self.history: list[Improvement] = []
        self.trails: list[Trail] = []
        self.found_in = ""
        self.best: State
        self.proposals = self.accepted = 0
        self.climbs: Sequence[Climbed] = ()
        self.before = Search(seed=seed, proposals=0)
        self._agenda: Agenda
        self._said = 0.0
        self._seen: Evaluation | None = None
        self._processes = 1
        self._polishing: int | None = None
        """The climb of this process that polishes the best plan."""

    # ---- the starts

    def begin(self, start: Strategy | None) -> None:
        """Evaluate the baselines and the given start."""
        plans = baselines(self.graph, self.topology, self.options, self.seconds)
        # The first time on a machine, this compiles. The budget is for the climbs.
        self.climber.warm(plans["data-parallel"].in_order(self.graph))
        lowering = Lowering(self.graph, self.topology, self.costs)  # not the search's: results would keep all of it
        for name, strategy in plans.items():
            state = self._start(name, strategy)
            known, plan = state.evaluation, partial(_simulated, lowering, state.configs, self.options)
            self.outcomes[name] = Outcome(self._strategy(state.configs), known.time_s, known.feasible, plan)
        if start is not None:
            self._start(GIVEN, start)
            if start.search is not None and start.search.seed == self.seed:
                self.before = start.search
        self._choose_bucket()
        self.began = self.improved = time.monotonic()

    def _start(self, name: str, strategy: Strategy) -> State:
        configs = self.climber.space.fixed(strategy.in_order(self.graph))
        state = self.starts[name] = State(configs, self.evaluate(configs))
        if not self.history or better(state.evaluation, self.best.evaluation):
            self._improve(0, state, name, "")
        return state

    def _choose_bucket(self) -> None:
        """Go on with the bucket size that suits the best plan so far; ties go to the given size."""
        given, best = self.options, self.best
        for size in BUCKETS:
            options = given.model_copy(update={"bucket_bytes": size})
            self.evaluate.use(options)
            state = State(self.best.configs, self.evaluate(self.best.configs))
            if better(state.evaluation, best.evaluation):
                self.options, best = options, state
        self.evaluate.use(self.options)
        if self.options is not given:
            self._improve(0, best, self.found_in, "bucket size")
            self.starts = {n: State(s.configs, self.evaluate(s.configs)) for n, s in self.starts.items()}

    # ---- the climbs

    def go(self, processes: int) -> str:
        """Climb until the budget ends it; why it ended. First from the best start: short budgets go there."""
        if len(self.topology.devices) < 2:
            return "there is only one device: nothing to search"
        first = sorted(self.starts.items(), key=lambda item: item[0] not in (self.found_in, "data-parallel"))
        first.sort(key=lambda item: item[0] != self.found_in)
        distinct: dict[Configs, str] = {}
        for name, state in first:
            if not self.before.climbs or name in (GIVEN, self.found_in):  # else the search before climbed from it
                distinct.setdefault(state.configs, name)
        order = [(name, configs) for configs, name in distinct.items()]
        self._agenda = Agenda(
            order, self.best, self.found_in, self.budget.proposals, self.climber.patience, self.before.climbs
        )
        self._processes = max(1, min(processes, WINDOW))
        setup = self.graph, self.topology, self.costs, self.options, self.seed, self.rule
        team = Team(self.climber, setup, processes - 1, self._agenda.plan, self._look)
        try:
            team.work()
        finally:
            self.climbs = [team.found[k] for k in sorted(team.found)]
        self.climbs, reason = self._agenda.within(self.climbs)
        return reason

    def _look(self, found: dict[int, Climbed], here: int | None) -> None:
        """Say how it goes; end the search if the time is over, and turn to polishing if it nearly is. ``here``: the
        climb of this process."""
        now, climbs = time.monotonic(), list(found.values())
        best = min((c.evaluation for c in climbs), key=by_rank, default=self.best.evaluation)
        if self._seen is None or better(best, self._seen):
            self._seen, self.improved = best, now
        polishing = here is not None and here == self._polishing
        reason = self.budget.ended(now - self.began, 0.0 if polishing else now - self.improved)
        total, accepted = sum(c.proposals for c in climbs), sum(c.accepted for c in climbs)
        if self.on_progress is not None and (reason or now - self._said >= 0.1) and total:
            self._said = now
            best_s = min(best, self.best.evaluation, key=by_rank).time_s
            self.on_progress(Progress(total, accepted, best_s, now - self.began, climbs[-1].phase))
        if reason:
            raise _Stop(reason)
        left_s = self.budget.left(now - self.began, now - self.improved)
        rate = total / max(now - self.began, 1e-9) / self._processes
        if not polishing and rate * left_s > ENOUGH * self.climber.space.alternatives_on_blocks:
            self._turn_to_polishing(climbs, here)

    def _turn_to_polishing(self, climbs: list[Climbed], here: int | None) -> None:
        """Raise Turn, to polish the best plan, unless one as good is a local optimum or on its way there."""
        best = min(climbs, key=lambda c: (*by_rank(c.evaluation), not c.optimal, not c.polishing), default=None)
        if best is None or best.optimal or better(self.best.evaluation, best.evaluation):
            return
        if best.polishing:
            self._polishing = here if best.index == here else self._polishing
            return

        def polish(index: int) -> Climb:
            self._polishing = index
            return self._agenda.turn(index, best)

        raise Turn(polish)

    # ---- the result

    def _improve(self, proposal: int, state: State, phase: str, move: str) -> None:
        self.best, self.found_in = state, phase
        self.history.append(Improvement(proposal, state.evaluation.time_s, phase, move))

    def _merge(self) -> None:
        """Put together what the climbs found, in their order."""
        for climbed in self.climbs:
            for step in climbed.steps:
                if step.time_s < self.history[-1].time_s or not self.best.evaluation.feasible:
                    found = Improvement(self.proposals + step.proposal, step.time_s, climbed.phase, step.move)
                    self.history.append(found)
            if better(climbed.evaluation, self.best.evaluation):
                self.best = State(climbed.configs, climbed.evaluation, climbed.optimal)
                self.found_in = climbed.phase
            elif climbed.optimal and not self.best.optimal and self._instead(climbed):
                self.best = State(climbed.configs, climbed.evaluation, True)
            points = tuple((self.proposals + n, cost) for n, cost in climbed.curve)
            self.trails.append(Trail(climbed.phase, points))
            self.proposals += climbed.proposals
            self.accepted += climbed.accepted

    def _instead(self, climbed: Climbed) -> bool:
        """Whether a local optimum takes the place of the best plan, being the same or as good (but starts stay)."""
        as_good = by_rank(climbed.evaluation) == by_rank(self.best.evaluation) and self.found_in not in self.starts
        return climbed.configs == self.best.configs or as_good

    def _strategy(self, configs: Configs) -> Strategy:
        named = {op.name: config for op, config in zip(self.graph.operators, configs, strict=True)}
        return Strategy.make(self.graph, self.topology, named, self.options)

    def result(self, reason: str, margin: float, pins: tuple[str, ...]) -> SearchResult:
        """The best plan with all records; the best baseline if nothing beats it by the margin."""
        self._merge()
        known = {name: self.starts[name] for name in self.outcomes}
        name, baseline = min(known.items(), key=lambda item: by_rank(item[1].evaluation))
        needed = baseline.evaluation.cost * (1.0 - margin)
        if self.found_in != name and baseline.evaluation.feasible and self.best.evaluation.cost > needed:
            bucket = "" if self.options == self.given else f" with buckets of {self.options.bucket_bytes / 2**20:g} MiB"
            reason += (
                f"; the best plan found is less than {100 * margin:g} % faster than {name}{bucket}, which is simpler"
            )
            self.best, self.found_in = baseline, name
        simulation = simulate(self.evaluate.lower(self.best.configs))
        strategy = self._strategy(self.best.configs)
        strategy.prediction = Prediction(
            iteration_s=simulation.makespan_s,
            data_parallel_s=self.outcomes["data-parallel"].time_s,
            peak_bytes=max(simulation.peak_bytes),
        )
        bound_s = lower_bound(self.graph, self.topology, self.costs, self.options).seconds
        strategy.search = Search(
            seed=self.seed, proposals=min(self.before.proposals + self.proposals, MAX_COUNT), start=self.found_in,
            climbs=min(self.before.climbs + len(self.climbs), MAX_COUNT), pins=pins, optimal=self.best.optimal,
            bound_s=bound_s,
        )  # fmt: skip
        return SearchResult(
            strategy, simulation, self.best.evaluation.feasible, self.best.optimal, bound_s, self.outcomes,
            tuple(self.history), tuple(self.trails), self.proposals, self.accepted, time.monotonic() - self.began,
            reason,
        )  # fmt: skip


def _simulated(lowering: Lowering, configs: Configs, options: Options) -> Simulation:
    return simulate(lowering.lower(configs, options))


def whole_seconds(graph: OperatorGraph, costs: Costs) -> Seconds:
    """Seconds of a whole operator on a device, forward and backward: what balances pipeline stages."""
    shape = {t.name: t.shape for t in graph.tensors}
    pieces = [whole_piece(op, [shape[n] for n in op.inputs], [shape[n] for n in op.outputs]) for op in graph.operators]

    def seconds(operator: int, device: int) -> float:
        return sum(costs.compute(operator, pieces[operator], device))

    return seconds
