"""The search for the fastest plan: baselines, Markov chains from several starts, and greedy polishing, in turn.

The order of everything depends on the seed and on numbers of proposals, never on the clock, which only ends the search:
a search that was ended by its time is repeated exactly by giving the number of proposals it reports.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import numpy as np

from flexsearch.cost import Costs
from flexsearch.errors import StrategyError
from flexsearch.graph import OperatorGraph, whole_piece
from flexsearch.search.evaluate import Configs, Evaluation, Evaluator
from flexsearch.search.mcmc import State, init, step
from flexsearch.search.proposals import propose
from flexsearch.search.space import Space
from flexsearch.simulate import Simulation, simulate
from flexsearch.strategy import Options, Prediction, Search, Strategy
from flexsearch.strategy.baselines import Seconds, baselines
from flexsearch.topology import Topology

EXCESS: Final = (0.1, 0.03, 0.01, 0.003, 0.0005)
"""How much slower than the best plan a chain may typically be, one after the other: its temperatures. Each of the N
operators that can be changed alone adds about 1 / beta to the cost (equipartition), so beta = N / excess, whatever the
model's size and speed."""


BUCKETS: Final = (2**20, 4 * 2**20)
"""Bucket sizes (bytes) that are tried besides the given one: small buckets leave early, large ones cost few starts."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a search is. ``phase``: what it is doing ("chain from megatron", "polish"). ``best_s``: iteration time of
    the best plan that fits (of the best at all as long as none fits)."""

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


@dataclass(frozen=True)
class Outcome:
    """A plan with its simulation, for tables. ``feasible``: whether it fits into every device's memory."""

    strategy: Strategy
    simulation: Simulation
    feasible: bool


@dataclass(frozen=True)
class SearchResult:
    """``strategy``: the best plan, with its Prediction and Search records. ``simulation``: of that plan. ``feasible``:
    whether it fits into memory (if not, no known plan does). ``baselines``: every baseline by name. ``stopped``: why
    the search ended, in words."""

    strategy: Strategy
    simulation: Simulation
    feasible: bool
    baselines: dict[str, Outcome]
    history: tuple[Improvement, ...]
    proposals: int
    accepted: int
    elapsed_s: float
    stopped: str

    @property
    def prediction(self) -> Prediction:
        """What the simulator says of the best plan."""
        assert self.strategy.prediction is not None
        return self.strategy.prediction


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
    margin: float = 0.0,
    on_progress: Callable[[Progress], None] | None = None,
) -> SearchResult:
    """The best plan that is found within ``budget_s`` seconds or ``proposals`` proposals, whichever ends first (at
    least one must be given). With ``budget_s`` the search also stops when half of it brought nothing better.

    ``start``: a plan to go on from. ``margin``: the share of the time by which a plan must beat the best baseline to be
    preferred to it; a smaller gain is within the error of any prediction, and the baseline is simpler. Ctrl-C ends the
    search with the best plan so far. The plan is never slower than the best baseline that fits into memory, and fits if
    any known plan does. Raises StrategyError if ``start`` is not legal or no budget is given.
    """
    if budget_s is None and proposals is None:
        raise StrategyError("the search needs a budget: seconds, or a number of proposals")
    run = _Run(graph, topology, costs, options or Options(), budget_s, proposals, seed, on_progress)
    try:
        with _rare_collections():
            run.begin(start)
            run.go()
    except _Stop as stop:
        reason = str(stop)
    except KeyboardInterrupt:
        if "data-parallel" not in run.outcomes:
            raise
        reason = "interrupted"
    return run.result(reason, margin)


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
    """One search: the budget, the best so far, and the phases."""

    def __init__(
        self, graph: OperatorGraph, topology: Topology, costs: Costs, options: Options,
        budget_s: float | None, proposals: int | None, seed: int, on_progress: Callable[[Progress], None] | None,
    ) -> None:  # fmt: skip
        self.graph, self.topology, self.options = graph, topology, options
        self.budget_s, self.limit, self.seed, self.on_progress = budget_s, proposals, seed, on_progress
        self.rng = np.random.Generator(np.random.PCG64(seed))
        self.evaluate = Evaluator(graph, topology, costs, options)
        self.seconds = whole_seconds(graph, costs)
        self.space = Space(graph, topology)
        self.patience = min(1000, max(100, 6 * len(self.space.leaders)))
        self.began = self.improved = time.monotonic()
        self.reported = 0.0
        self.proposals = self.accepted = 0
        self.phase = self.found_in = "baselines"
        self.outcomes: dict[str, Outcome] = {}
        self.starts: dict[str, State] = {}
        self.history: list[Improvement] = []
        self.best: State

    def begin(self, start: Strategy | None) -> None:
        """Evaluate the baselines and the given start."""
        plans = baselines(self.graph, self.topology, self.options, self.seconds)
        # The first simulation on a machine compiles the simulator; the budget is for searching.
        self.evaluate(tuple(plans["single"].configs[op.name] for op in self.graph.operators))
        self.began = self.improved = time.monotonic()
        for name, strategy in plans.items():
            state = self._start(name, strategy)
            simulation = simulate(self.evaluate.lower(state.configs))
            self.outcomes[name] = Outcome(strategy, simulation, state.evaluation.feasible)
        if start is not None:
            start.check(self.graph, self.topology)
            self._start("the given plan", start)
        self._choose_bucket()

    def _choose_bucket(self) -> None:
        """Go on with the bucket size that suits the best plan so far; ties go to the given size."""
        given, best = self.options, self.best
        for size in BUCKETS:
            options = given.model_copy(update={"bucket_bytes": size})
            self.evaluate.use(options)
            state = init(self.best.configs, self.evaluate)
            if better(state.evaluation, best.evaluation):
                self.options, best = options, state
        self.evaluate.use(self.options)
        if self.options is not given:
            self._improve(best, self.found_in, "bucket size")
            self.starts = {name: init(state.configs, self.evaluate) for name, state in self.starts.items()}

    def _start(self, name: str, strategy: Strategy) -> State:
        state = self.starts[name] = init(tuple(strategy.configs[op.name] for op in self.graph.operators), self.evaluate)
        if not self.history or better(state.evaluation, self.best.evaluation):
            self._improve(state, name, "")
        return state

    def go(self) -> None:
        """Chains and polishing in turn, until the budget ends it. First from the best start: short budgets go there."""
        if len(self.topology.devices) < 2:
            raise _Stop("there is only one device: nothing to search")
        first = self.found_in
        self._chain(f"chain from {first}", self.best)
        self._polish()
        if first != "data-parallel":
            self._chain("chain from data-parallel", self.starts["data-parallel"])
            self._polish()
        while True:
            self._chain("chain from random", init(self.space.random_plan(self.rng), self.evaluate))
            self._polish()
            for _ in range(3):
                self._chain("chain from best", self.best)
                self._polish()

    def _chain(self, phase: str, state: State) -> None:
        """A chain that cools down, and ends when ``patience`` proposals in a row brought it nothing new."""
        self.phase, best, idle, steps = phase, state.evaluation, 0, 0
        while idle < self.patience:
            self._spend()
            beta = len(self.space.leaders) / EXCESS[min(4 * steps // self.patience, len(EXCESS) - 1)]
            reference = self.best.evaluation.cost
            state, info = step(self.rng, state, self._propose, self.evaluate, beta, reference)
            steps, idle = steps + 1, idle + 1
            self.accepted += info.accepted
            if info.proposed.evaluation.shortfall is not None:
                if better(info.proposed.evaluation, best):
                    best, idle = info.proposed.evaluation, 0
                if better(info.proposed.evaluation, self.best.evaluation):
                    self._improve(info.proposed, phase, info.move)

    def _polish(self) -> None:
        """Greedy descent from the best plan over the configs of single operators (with and without those that follow
        them), the important ones first, until none helps; at most a few times ``patience`` proposals in a row."""
        self.phase = "polish"
        self.evaluate.hold(self.best.configs)
        last = self.proposals + 4 * self.patience
        importance = dict(zip(self.space.leaders, self.space.importance, strict=True))
        order = sorted(range(len(self.graph.operators)), key=lambda i: (-importance.get(i, 0.0), -self.seconds(i, 0)))
        quiet, k = 0, 0
        while quiet < len(order) and self.proposals < last:
            quiet = 0 if self._descend(order[k % len(order)]) else quiet + 1
            k += 1

    def _descend(self, operator: int) -> bool:
        """Try the alternatives of one operator; take the first that is better. Whether there was one."""
        for move, configs in self._neighbours(operator):
            self._spend()
            found = self.evaluate(configs, self.best.evaluation.cost)
            if found.shortfall is not None and better(found, self.best.evaluation):
                self.accepted += 1
                self.evaluate.hold(configs)
                self._improve(State(configs, found), "polish", move)
                return True
        return False

    def _neighbours(self, operator: int) -> Iterator[tuple[str, Configs]]:
        configs = self.best.configs
        members = self.space.groups.get(operator, ())
        for config in self.space.alternatives(operator, configs):
            alone = (*configs[:operator], config, *configs[operator + 1 :])
            if members:
                following = {operator: config}
                for source, member, link in members:
                    following[member] = self.space.propagation.over(source, following[source], link)
                yield "group", tuple(following.get(i, c) for i, c in enumerate(configs))
            yield "single", alone

    def _propose(self, rng: np.random.Generator, configs: Configs) -> tuple[str, Configs]:
        return propose(rng, self.space, configs)

    def _improve(self, state: State, phase: str, move: str) -> None:
        self.best, self.found_in, self.improved = state, phase, time.monotonic()
        self.history.append(Improvement(self.proposals, state.evaluation.time_s, phase, move))

    def _spend(self) -> None:
        """Count a proposal; end the search if there is no budget for it."""
        if self.limit is not None and self.proposals >= self.limit:
            raise _Stop(f"{self.limit} proposals were made")
        now = time.monotonic()
        if self.budget_s is not None:
            if now - self.began >= self.budget_s:
                raise _Stop(f"the budget of {self.budget_s:g} s was used up")
            if now - self.improved >= self.budget_s / 2:
                raise _Stop(f"half of the budget of {self.budget_s:g} s brought nothing better")
        self.proposals += 1
        if self.on_progress is not None and now - self.reported >= 0.1:
            self.reported = now
            best_s = self.best.evaluation.time_s
            self.on_progress(Progress(self.proposals, self.accepted, best_s, now - self.began, self.phase))

    def result(self, reason: str, margin: float) -> SearchResult:
        """The best plan with all records; the best baseline if nothing beats it by the margin."""
        known = {name: self.starts[name] for name in self.outcomes}
        name, baseline = min(known.items(), key=lambda item: (not item[1].evaluation.feasible, item[1].evaluation.cost))
        needed = baseline.evaluation.cost * (1.0 - margin)
        if self.found_in != name and baseline.evaluation.feasible and self.best.evaluation.cost > needed:
            reason += f"; the best plan found is less than {100 * margin:g} % faster than {name}, which is simpler"
            self.best, self.found_in = baseline, name
        configs, evaluation = self.best.configs, self.best.evaluation
        simulation = simulate(self.evaluate.lower(configs))
        strategy = Strategy.make(
            self.graph,
            self.topology,
            {op.name: config for op, config in zip(self.graph.operators, configs, strict=True)},
            self.options,
            Prediction(
                iteration_s=simulation.makespan_s,
                data_parallel_s=self.outcomes["data-parallel"].simulation.makespan_s,
                peak_bytes=max(simulation.peak_bytes),
            ),
            Search(seed=self.seed, proposals=self.proposals, start=self.found_in),
        )
        return SearchResult(
            strategy, simulation, evaluation.feasible, self.outcomes, tuple(self.history),
            self.proposals, self.accepted, time.monotonic() - self.began, reason,
        )  # fmt: skip


def better(a: Evaluation, b: Evaluation) -> bool:
    """Whether ``a`` is a better answer than ``b``: what fits into memory before what does not, then by cost."""
    return (not a.feasible, a.cost) < (not b.feasible, b.cost)


def whole_seconds(graph: OperatorGraph, costs: Costs) -> Seconds:
    """Seconds of a whole operator on a device, forward and backward: what balances pipeline stages."""
    shape = {t.name: t.shape for t in graph.tensors}
    pieces = [whole_piece(op, [shape[n] for n in op.inputs], [shape[n] for n in op.outputs]) for op in graph.operators]

    def seconds(operator: int, device: int) -> float:
        return sum(costs.compute(operator, pieces[operator], device))

    return seconds
