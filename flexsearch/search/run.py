"""One search: the baselines, then climbs until the budget is used up, then the answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from math import inf, nextafter

from flexsearch.cost import Costs
from flexsearch.cost.uncertainty import Estimate
from flexsearch.graph import OperatorGraph
from flexsearch.lower import Lowering
from flexsearch.proof.bound import lower_bound
from flexsearch.quantities import MAX_COUNT
from flexsearch.search.budget import Budget
from flexsearch.search.climb import Climb, Climbed, Climber
from flexsearch.search.climbs import ClimbSchedule, Plan
from flexsearch.search.constants import ENOUGH, NEAR, POLISH, REBUCKET, SIMPLIFYING, WINDOW
from flexsearch.search.evaluate import Configs, Evaluation, better, by_rank
from flexsearch.search.outcome import Improvement, Outcome, Progress, SearchResult, Trail, is_faster, runners_up
from flexsearch.search.simpler import simpler
from flexsearch.search.space import Rule
from flexsearch.search.starts import GIVEN, in_order, with_sizes
from flexsearch.search.tuning import Tuned, best_options, candidates, evaluations, fitted, synchronised, whole_seconds
from flexsearch.search.workers import Turn, Workers
from flexsearch.simulate import Simulation, simulate
from flexsearch.strategy import Options, Prediction, Search, Strategy
from flexsearch.strategy.baselines import baselines
from flexsearch.topology import Topology

INTERVAL = "working out the interval"


class Stop(Exception):
    """The search is over; the message says why."""


class Run:
    """One search: the budget, the best so far, and what the climbs are to do."""

    def __init__(
        self, graph: OperatorGraph, topology: Topology, costs: Costs, options: Options, seed: int, rule: Rule | None,
        budget: Budget, on_progress: Callable[[Progress], None] | None,
        on_phase: Callable[[str], None] | None = None,
    ) -> None:  # fmt: skip
        self.graph, self.topology, self.costs = graph, topology, costs
        self.options = options
        self.seed, self.rule, self.budget, self.on_progress = seed, rule, budget, on_progress
        self.on_phase = on_phase or (lambda phase: None)
        self.climber = Climber(graph, topology, costs, options, seed, rule)
        self.evaluate = self.climber.evaluate
        self.seconds = whole_seconds(graph, costs)
        self.began = self.improved = time.monotonic()
        self.outcomes: dict[str, Outcome] = {}
        self.starts: dict[str, Plan] = {}
        self.tuned: dict[str, Tuned] = {}
        """Baselines, each with the options that suit it best."""
        self.choices: tuple[Options, ...] = ()
        """Options that differ in their bucket size: what plans are tuned over."""
        self.standard: tuple[Options, ...] = ()
        """The first of them: what baselines are tuned over."""
        self.sizes: list[Options] = []
        """Those of climbs: the best plan's, then others with which some start is hardly slower."""
        self.history: list[Improvement] = []
        self.trails: list[Trail] = []
        self.found_in = ""
        self.best: Plan
        self.proposals = self.accepted = 0
        self.climbs: Sequence[Climbed] = ()
        self.before = Search(seed=seed, proposals=0)
        self._schedule: ClimbSchedule
        self._simulated: tuple[Configs, Options, Simulation] | None = None
        self._said = 0.0
        self._seen: Evaluation | None = None
        self._processes = 1
        self._turned: int | None = None
        """The climb of this process that goes on from the best plan, as the time is nearly over."""

    # ---- the starts

    def begin(self, start: Strategy | None) -> None:
        """Evaluate the baselines and the given start, each with every bucket size, and go on with the size that suits
        the best of them. Raises Stop if that takes longer than the budget: it is for the climbs, but where one plan
        takes long, nobody waits for all of these. Data parallel, the yardstick, is always evaluated, and first; so is
        the given start."""
        named = baselines(self.graph, self.topology, self.options, self.seconds)
        # The first time on a machine, this compiles.
        self.climber.warm(named["data-parallel"].in_order(self.graph))
        self.began = time.monotonic()
        if start is not None:
            if start.search is not None and start.search.seed == self.seed:
                self.before = start.search
            named = {**named, GIVEN: start}
        plans = {name: self.climber.space.fixed(plan.in_order(self.graph)) for name, plan in named.items()}
        table: dict[str, list[tuple[Options, Evaluation]]] = {name: [] for name in plans}
        try:
            late = self._evaluate(named, plans, table)
        finally:  # also when it is interrupted: what was evaluated can be the answer
            self._settle(plans, table)
        if late:
            raise Stop(f"the budget of {self.budget.seconds:g} s was used up by the baselines")
        self._fit_baselines()
        at = self.choices.index(self.best.options)
        self.starts = {name: Plan(configs, self.best.options, table[name][at][1]) for name, configs in plans.items()}
        self.evaluate.use(self.best.options)
        self.sizes = self._sizes_near_the_best(list(table.values()))
        self.began = self.improved = time.monotonic()

    def _evaluate(
        self, named: Mapping[str, Strategy], plans: Mapping[str, Configs],
        table: dict[str, list[tuple[Options, Evaluation]]],
    ) -> bool:  # fmt: skip
        """Fill ``table``: what each plan costs with each bucket size. Whether the budget ended that, which it can only
        when data parallel and the given start have been evaluated once."""
        lowering = self.climber.evaluate.lowering
        self.standard = candidates(lowering, self.options)
        sizes = (plan.options.bucket_bytes for plan in named.values())  # of the given options, of the given plan
        self.choices = candidates(lowering, self.options, *sizes)
        seconds = self.budget.seconds
        first = {name: plans[name] for name in ("data-parallel", GIVEN) if name in plans}
        for name, options, evaluation in evaluations(self.evaluate, first | dict(plans), self.choices):
            table[name].append((options, evaluation))
            self.on_phase(f"baselines: {name}")
            late = seconds is not None and time.monotonic() - self.began >= seconds
            if late and all(table[name] for name in first):
                return not all(len(tried) == len(self.choices) for tried in table.values())
        return False

    def _settle(self, plans: Mapping[str, Configs], table: Mapping[str, list[tuple[Options, Evaluation]]]) -> None:
        """Give each plan that was evaluated the options that suit it best, and go on with those of the best plan."""
        lowering = Lowering(self.graph, self.topology, self.costs)  # not the search's: results would keep all of it
        for name, tried in table.items():
            if not tried:
                continue
            best = best_options(plans[name], tried if name == GIVEN else tried[: len(self.standard)])
            if name != GIVEN:
                self.tuned[name] = best
                self.outcomes[name] = self._outcome(best, lowering)
            if not self.history or better(best.evaluation, self.best.evaluation):
                self._improve(0, Plan(best.configs, best.options, best.evaluation), name, "")

    def _sizes_near_the_best(self, table: Sequence[Sequence[tuple[Options, Evaluation]]]) -> list[Options]:
        """What ``sizes`` says. Of options that cost the same, the first: there, sizes make no difference."""
        least, first = self.best.evaluation.cost, dict[float, Options]()
        for k, options in enumerate(self.choices):
            first.setdefault(min((row[k][1] for row in table), key=by_rank).cost, options)
        return [self.best.options, *(first[cost] for cost in sorted(first) if least < cost <= (1.0 + NEAR) * least)]

    def _fit_baselines(self) -> None:
        """Give baselines the way to sum gradients that suits them best; let those that lack memory compute again, or
        gather twice, where they fit so."""
        lowering = Lowering(self.graph, self.topology, self.costs)
        summed = synchronised(self.tuned, self.evaluate)
        for name, plan in self.tuned.items():
            self.tuned[name] = fitted(summed[name], self.evaluate)
            if self.tuned[name] is not plan:
                self.outcomes[name] = self._outcome(self.tuned[name], lowering)

    def _outcome(self, plan: Tuned, lowering: Lowering) -> Outcome:
        simulated = partial(_simulated, lowering, plan.configs, plan.options)
        strategy = self._strategy(plan.configs, plan.options)
        return Outcome(strategy, plan.evaluation.time_s, plan.evaluation.feasible, simulated)

    # ---- the climbs

    def go(self, processes: int) -> str:
        """Climb until the budget ends it; why it ended. First from the best start: short budgets go there."""
        if len(self.topology.devices) < 2:
            return "there is only one device: nothing to search"
        folds, order = in_order(self.climber, self.starts, self.found_in, self.rule, bool(self.before.climbs))
        self._schedule = ClimbSchedule(
            with_sizes(order, self.sizes), folds, self.best, self.found_in, self.budget.proposals,
            self.climber.patience, self.before.climbs, self._alternatives,
        )  # fmt: skip
        self._processes = max(1, min(processes, WINDOW))
        setup = self.graph, self.topology, self.costs, self.options, self.seed, self.rule
        workers = Workers(self.climber, setup, processes - 1, self._schedule.plan, self._look)
        try:
            workers.work()
        finally:
            self.climbs = [workers.climbs[k] for k in sorted(workers.climbs)]
        self.climbs, reason = self._schedule.within(self.climbs)
        return reason

    def _look(self, climbed: dict[int, Climbed], here: int | None) -> None:
        """Say how it goes; end the search if the time is over, and turn to the best plan if it nearly is. ``here``: the
        climb of this process."""
        now, climbs = time.monotonic(), list(climbed.values())
        best = min((c.evaluation for c in climbs), key=by_rank, default=self.best.evaluation)
        if self._seen is None or better(best, self._seen):
            self._seen, self.improved = best, now
        turned = here is not None and here == self._turned
        total, accepted = sum(c.proposals for c in climbs), sum(c.accepted for c in climbs)
        optimal = any(c.optimal and not better(best, c.evaluation) for c in climbs)
        idle_s = 0.0 if total < self._alternatives and not optimal else now - self.improved  # 0: it has hardly begun
        waits = turned or not best.feasible  # then it goes on to the end
        rate = total / max(now - self.began, 1e-9) / self._processes
        reserve_s = self._seconds_of_alternatives(rate) if optimal else 0.0
        reason = self.budget.ended(now - self.began, 0.0 if waits else idle_s, reserve_s)
        if self.on_progress is not None and (reason or now - self._said >= 0.1) and total:
            self._said = now
            best_s = min(best, self.best.evaluation, key=by_rank).time_s
            self.on_progress(Progress(total, accepted, best_s, now - self.began, climbs[-1].phase))
        if reason:
            raise Stop(reason)
        left_s = self.budget.left(now - self.began, idle_s)
        if left_s and not turned:
            polish = rate * left_s > ENOUGH * self.climber.space.alternatives_on_blocks
            self._turn_to_best(climbs, here, polish)

    def _seconds_of_alternatives(self, rate: float) -> float:
        """Seconds to try every alternative once, with so many proposals a second, as is done where a local optimum has
        been made simpler. 0 if the budget is too short for that."""
        seconds = self.climber.space.alternatives_on_blocks / rate if rate else inf
        return seconds if self.budget.seconds and seconds <= POLISH * self.budget.seconds else 0.0

    def _turn_to_best(self, climbs: list[Climbed], here: int | None, polish: bool) -> None:
        """Raise Turn, to polish the best plan, unless one as good is a local optimum or on its way there; or if there
        is no time for that, to go on from it with a chain, unless the climb of this process has found it."""
        best = min(climbs, key=lambda c: (*by_rank(c.evaluation), not c.optimal, not c.polishing), default=None)
        if best is None or best.optimal or better(self.best.evaluation, best.evaluation):
            return
        if best.polishing:
            self._turned = here if best.index == here else self._turned
            return
        if not polish and best.index == here:
            return

        def turn(index: int) -> Climb:
            self._turned = index
            return self._schedule.turn(index, best, polish)

        raise Turn(turn)

    # ---- the result

    def _improve(self, proposal: int, state: Plan, phase: str, move: str) -> None:
        self.best, self.found_in = state, phase
        self.history.append(Improvement(proposal, state.evaluation.time_s, phase, move))

    def _merge(self) -> None:
        """Put together what the climbs found, in their order."""
        for climbed in self.climbs:
            for step in climbed.steps:
                if step.time_s < self.history[-1].time_s or not self.best.evaluation.feasible:
                    improvement = Improvement(self.proposals + step.proposal, step.time_s, climbed.phase, step.move)
                    self.history.append(improvement)
            if better(climbed.evaluation, self.best.evaluation):
                self.best = Plan(climbed.configs, climbed.options, climbed.evaluation, climbed.optimal)
                self.found_in = climbed.phase
            elif climbed.optimal and not self.best.optimal and self._instead(climbed):
                self.best = Plan(climbed.configs, climbed.options, climbed.evaluation, True)
            points = tuple((self.proposals + n, cost) for n, cost in climbed.curve)
            self.trails.append(Trail(climbed.phase, points))
            self.proposals += climbed.proposals
            self.accepted += climbed.accepted

    def _instead(self, climbed: Climbed) -> bool:
        """Whether a local optimum takes the place of the best plan, being the same or as good (but starts stay)."""
        as_good = by_rank(climbed.evaluation) == by_rank(self.best.evaluation) and self.found_in not in self.starts
        return (climbed.configs, climbed.options) == (self.best.configs, self.best.options) or as_good

    def _strategy(self, configs: Configs, options: Options) -> Strategy:
        named = {op.name: config for op, config in zip(self.graph.operators, configs, strict=True)}
        return Strategy.make(self.graph, self.topology, named, options)

    def _rebucket(self) -> None:
        """Give the best plan the bucket size and the way to sum gradients that suit it best, as every baseline has."""
        configs, before = self.best.configs, self.best.evaluation
        tried = [(options, cost) for _, options, cost in evaluations(self.evaluate, {"": configs}, self.choices)]
        best = synchronised({"": best_options(configs, tried)}, self.evaluate, REBUCKET)[""]
        if better(best.evaluation, before) and best.evaluation.cost < (1.0 - REBUCKET) * before.cost:
            self._improve(self.proposals, Plan(configs, best.options, best.evaluation), self.found_in, "bucket size")
        self.evaluate.use(self.best.options)

    def _choose(self, margin: float | None) -> tuple[str, Estimate | None]:
        """Name of the baseline that is the answer, empty if the best plan is none; and the time of a plan that was set
        aside for it. A plan that differs from a baseline in its options only is that baseline."""
        best_name, baseline = min(self.tuned.items(), key=lambda item: by_rank(item[1].evaluation))
        same = [name for name, plan in self.tuned.items() if plan.configs == self.best.configs]
        fits_alone = baseline.evaluation.feasible and not self.best.evaluation.feasible  # by computing again
        name = best_name if best_name in same or fits_alone else next(iter(same), "")
        aside = None
        if not name:
            limit = nextafter(baseline.evaluation.cost, 0.0) if baseline.evaluation.feasible else inf
            seconds = self.budget.seconds
            end = inf if seconds is None else max(time.monotonic(), self.began + seconds) + SIMPLIFYING * seconds
            self.on_phase("making the plan simpler")
            self.best = simpler(self.climber, self.best, limit, end)
            self.on_phase("choosing the bucket size")
            self._rebucket()
            self.on_phase(INTERVAL)
            simulation = self._simulation()
            feasible = baseline.evaluation.feasible
            if not feasible or is_faster(simulation, self.outcomes[best_name], margin):
                return "", None
            aside, name = simulation.estimate, best_name
        elif better(now := self.best.evaluation, self.tuned[name].evaluation):  # by a size of the user's
            self.tuned[name] = Tuned(self.best.configs, self.best.options, now)
            lowering = Lowering(self.graph, self.topology, self.costs)
            self.outcomes[name] = self._outcome(self.tuned[name], lowering)
        chosen = self.tuned[name]
        optimal = self.best.optimal and (self.best.configs, self.best.options) == (chosen.configs, chosen.options)
        self.best, self.found_in = Plan(chosen.configs, chosen.options, chosen.evaluation, optimal), name
        self.evaluate.use(chosen.options)
        return name, aside

    def _simulation(self) -> Simulation:
        """Of the best plan."""
        configs, options = self.best.configs, self.best.options
        if self._simulated is None or self._simulated[:2] != (configs, options):
            self._simulated = configs, options, simulate(self.evaluate.lower(configs))
        return self._simulated[2]

    def result(self, reason: str, margin: float | None, pins: tuple[str, ...]) -> SearchResult:
        """The best plan with all records; the best baseline if nothing beats it by the margin."""
        self._merge()
        self.evaluate.use(self.best.options)
        others = runners_up(self.climbs, (plan.evaluation.time_s for plan in self.tuned.values()))
        name, aside = self._choose(margin)
        self.on_phase(INTERVAL)
        simulation = self.outcomes[name].simulation if name else self._simulation()
        strategy = self._strategy(self.best.configs, self.best.options)
        strategy.prediction = Prediction(
            iteration_s=simulation.makespan_s,
            interval_s=simulation.estimate.interval_s,
            data_parallel_s=self.outcomes["data-parallel"].time_s,
            peak_bytes=max(simulation.peak_bytes),
        )
        self.on_phase("working out the bound")
        bound_s = lower_bound(self.graph, self.topology, self.costs, self.best.options).seconds
        strategy.search = Search(
            seed=self.seed, proposals=min(self.before.proposals + self.proposals, MAX_COUNT), start=self.found_in,
            climbs=min(self.before.climbs + len(self.climbs), MAX_COUNT), pins=pins, locally_optimal=self.best.optimal,
            bound_s=bound_s,
        )  # fmt: skip
        return SearchResult(
            strategy, simulation, self.best.evaluation.feasible, self.best.optimal, bound_s, self.outcomes,
            tuple(self.history), tuple(self.trails), self.proposals, self.accepted, time.monotonic() - self.began,
            reason, name, aside, others, len(self.climber.space.parts), self._alternatives,
        )  # fmt: skip

    @cached_property
    def _alternatives(self) -> int:
        """Other configs of one layer of each sort, together."""
        space = self.climber.space
        return sum(space.alternatives_of(members[0]) for members in space.parts)


def _simulated(lowering: Lowering, configs: Configs, options: Options) -> Simulation:
    return simulate(lowering.lower(configs, options))
