"""The search over layouts: all are estimated, the most promising simulated, until none that is left promises more; the
best are improved number by number and stage by stage, then operator by operator."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from math import exp
from typing import Final, get_args

import numpy as np
import numpy.typing as npt

from flexsearch.cost import Profile
from flexsearch.errors import StrategyError, TopologyError
from flexsearch.graph import OperatorGraph
from flexsearch.quantities import MAX_PIECES
from flexsearch.search.hybrid.cuts import Cuts
from flexsearch.search.hybrid.estimate import Estimate, Estimates
from flexsearch.search.hybrid.layout import Layout, neighbours, runs
from flexsearch.search.hybrid.moves import moved_borders, moved_devices, split_and_joined
from flexsearch.search.hybrid.numbers import Numbers
from flexsearch.search.hybrid.order import listed
from flexsearch.search.hybrid.outcome import Candidate, HybridProgress, HybridResult
from flexsearch.search.hybrid.ranking import Key, Ranking, Ratios
from flexsearch.search.hybrid.splits import Configs, Splits
from flexsearch.search.hybrid.work import Works
from flexsearch.simulate.delta import DeltaSimulator
from flexsearch.simulate.staged import StagedSimulators, step_of
from flexsearch.strategy import Options, Prediction, Search, States, Strategy
from flexsearch.strategy.pipeline import Pipeline
from flexsearch.strategy.records import Recompute
from flexsearch.topology import Topology

CLIMBED: Final = 4
"""Layouts that are improved move by move: the best of so many different groups of devices. Taken."""
SURE: Final = 2.0
"""Sorts of layouts are left out if their estimates are worse than the best plan by so many standard deviations of what
simulations say of others. Taken."""
PATIENCE: Final = 10
"""So many plans in a row that are no better end a series of trials. Taken."""
SHORT_PATIENCE, SHORT_MARGIN = 80, 1.05
"""The same for short graphs, whose plans are simulated in milliseconds; and so many times the best time an estimate of
theirs may be. Taken."""
EXPLORED: Final = 0.4
"""Share of the budget after which no more sorts are tried. Taken."""
FEW: Final = 6
"""Most plans of a family that are simulated for its own sake. Taken."""
LISTED: Final = 4096
"""Most passes in one direction that list scheduling puts in order. Taken."""
QUARTERS: Final = 4
"""Stages that compute blocks again may do so with every fourth part of them. Taken."""
POLISHED: Final = 2
"""Plans whose splits are improved; of a short graph, those of all groups of devices. Taken."""

FAMILIES: Final[Mapping[str, Callable[[Layout], bool]]] = {
    "data-parallel": lambda f: f.tensor == f.pipeline == 1 and not f.states,
    "zero": lambda f: f.tensor == f.pipeline == 1 and f.states in (States.OPTIMIZER, States.GRADIENTS) and not f.over,
    "fsdp": lambda f: f.tensor == f.pipeline == 1 and f.states == States.WEIGHTS and not f.over,
    "hsdp": lambda f: f.tensor == f.pipeline == 1 and f.states == States.WEIGHTS and f.over > 0,
    "tensor x data": lambda f: f.pipeline == 1 and f.tensor > 1 and f.states <= States.OPTIMIZER,
    "pipeline x data": lambda f: f.pipeline > 1 and f.tensor == 1 and f.states <= States.OPTIMIZER,
    "megatron": lambda f: f.pipeline > 1 and f.tensor > 1 and f.states <= States.OPTIMIZER,
}
"""Layouts that people write by hand: those whose ranks are alike."""


def search_hybrid(
    graph: OperatorGraph,
    topology: Topology,
    options: Options | None = None,
    profile: Profile | None = None,
    *,
    budget_s: float = 60.0,
    on_progress: Callable[[HybridProgress], None] | None = None,
    on_end: Callable[[], None] | None = None,
) -> HybridResult:
    """The fastest plan that is found among data x tensor x pipeline layouts of all devices, and with other splits of
    operators and other borders of stages inside them. It may need memory that no plan of one stage and one microbatch
    could do with. ``options``: of the whole step; the search sets those that a layout leaves open. Ctrl-C ends the
    search with the best plan so far. ``on_end``: called once, when the search itself is over.

    Raises StrategyError if the graph cannot be planned so: no batch to divide, or devices that are not alike."""
    search = LayoutSearch(graph, topology, options or Options(), profile, budget_s, on_progress)
    return search.run(on_end or (lambda: None))


class _Over(Exception):
    """The time is over."""


class LayoutSearch:
    """One search; ``evaluate`` simulates the plan of a layout. Arguments as of ``search_hybrid``."""

    def __init__(
        self, graph: OperatorGraph, topology: Topology, options: Options, profile: Profile | None, budget_s: float,
        on_progress: Callable[[HybridProgress], None] | None,
    ) -> None:  # fmt: skip
        self.graph, self.topology, self.options, self.budget_s = graph, topology, options, budget_s
        self.on_progress = on_progress
        self.simulators = StagedSimulators(graph, topology, profile, options.precision)
        self.cuts, self.splits = Cuts(self.simulators.graph), Splits(self.simulators)
        self.works = Works(self.simulators.graph, topology, profile, options)
        self.estimates, self.ratios = Estimates(self.works, self.cuts), Ratios()
        self.numbers = Numbers(self.estimates, options)
        self.known: dict[Key, Candidate | None] = {}
        self.considered: set[Key] = set()
        self.kept: dict[str, tuple[Candidate, DeltaSimulator]] = {}
        """The best plan of each family, with its simulator."""
        self._climbed: set[Key] = set()
        self.patience, self.margin = (SHORT_PATIENCE, SHORT_MARGIN) if self.cuts.short else (PATIENCE, 1.0)
        self.plans, self.phase, self._longest_s = 0, "", 0.0
        self.began = time.monotonic()
        self.best: Candidate | None = None

    def run(self, on_end: Callable[[], None]) -> HybridResult:
        stopped = "no layout that is left has a better estimate, and no move makes the best ones faster"
        try:
            try:
                self._look()
            except _Over:
                stopped = f"the budget of {self.budget_s:g} s was used up"
            on_end()
        except KeyboardInterrupt:
            if self.best is None:
                raise
            on_end()
            stopped = "the search was interrupted"
        if self.best is None:
            raise StrategyError(
                f"no layout of {len(self.topology.devices)} devices of {self.topology.name} suits {self.graph.name}: "
                f"its batch of {self.graph.batch} can be divided among none",
                "Give another --batch, or fewer devices.",
            )
        return self._result(self.best, stopped)

    def _look(self) -> None:
        """All there is to do. Raises _Over."""
        self.phase = "layouts"
        ranking = Ranking(self.ratios, self._estimated(self.numbers.layouts()))
        self._simulate_best(ranking)
        self.phase = "stages of different sizes"
        uneven = Ranking(self.ratios, self._estimated(self.numbers.divisions()))
        self._simulate_best(uneven)
        self.phase = "other layouts"
        for others in (ranking, uneven):
            self._explore(others)
            self._simulate_best(others)
        self.phase = "baselines"
        for name, suits in FAMILIES.items():
            among = ranking.chosen(lambda key, suits=suits: suits(key.layout))  # type: ignore[misc]
            self._simulate_best(ranking, among, lambda name=name: self._of_family(name), FEW)  # type: ignore[misc]
        self.phase = "moves"
        for candidate in self._different(lambda c: c.layout.factoring, None if self.cuts.short else CLIMBED):
            self._climb(candidate)
        self.phase = "splits of operators"
        if self.cuts.short:
            self.evaluate(Layout(1, 1, 1, widths=(len(self.topology.devices),)), self.options)
        for candidate in self._different(lambda c: c.layout.factoring, None if self.cuts.short else POLISHED):
            self._resplit(candidate)
        self.phase = "orders of passes"
        for candidate in self._different(lambda c: c.layout.factoring, POLISHED):
            self._list(candidate)

    # ---- simulating

    def evaluate(self, layout: Layout, options: Options, first: tuple[int, ...] = ()) -> Candidate | None:
        """The plan of a layout, cut before these operators (default: so that the slowest stage takes as short as
        possible); None where it suits graph, batch, devices or schedule not."""
        key = Key(layout, options, first)
        if key not in self.known:
            suits = self._suits(layout, options) and self._shared(layout)
            self.known[key] = self._candidate(key) if suits else None
        return self.known[key]

    def _suits(self, layout: Layout, options: Options) -> bool:
        """Whether the numbers of a layout go with the graph, its batch and each other."""
        share, rest = divmod(self.graph.batch, layout.data)
        if rest or share % layout.microbatches or share // layout.microbatches < max(layout.each):
            return False
        few = layout.stages <= len(self.graph.operators)
        return few and options.recompute in self.works.regions and runs(layout)

    def _shared(self, layout: Layout) -> bool:
        """Whether the blocks of a layout are alike, and the samples of the graph can be shared out among them."""
        try:
            self.simulators.share(layout.data, layout.microbatches)
        except (StrategyError, TopologyError):
            return False
        return True

    def _candidate(self, key: Key) -> Candidate:
        layout, options, first = key
        before = time.monotonic()
        if before - self.began + self._longest_s / 2 > self.budget_s and self.best is not None:
            raise _Over
        pipeline, configs = self.splits.plan(layout, first or self.estimates.first(layout))
        found = self.simulated(layout, options, pipeline, configs, own=not first)
        self.ratios.learn(key, self.estimates.estimate(*key), Estimate(found.seconds, found.used))
        if self.plans == 1:
            self.began = time.monotonic()  # the first one compiles, on a new machine
        else:
            self._longest_s = max(self._longest_s, time.monotonic() - before)
        self._check_time()
        return found

    def simulated(
        self, layout: Layout, options: Options, pipeline: Pipeline, configs: Configs, changed: int = 0,
        own: bool = False,
    ) -> Candidate:  # fmt: skip
        """A plan, simulated. ``own``: it is cut as the layout is by itself, so it may be a baseline."""
        simulator = self.simulators.simulator(pipeline, configs, options)
        candidate = Candidate(layout, options, pipeline, configs, simulator.seconds, _used(simulator), changed)
        self._note(candidate, simulator)
        if own and not layout.widths:
            for name, suits in FAMILIES.items():
                kept = self._of_family(name)
                if suits(layout) and (kept is None or candidate.rank < kept.rank):
                    self.kept[name] = candidate, simulator
        return candidate

    def _of_family(self, name: str) -> Candidate | None:
        return self.kept[name][0] if name in self.kept else None

    def _elapsed(self) -> float:
        return time.monotonic() - self.began

    def _note(self, candidate: Candidate, simulator: DeltaSimulator | None) -> None:
        """Count a plan, and keep it if it is the best. ``simulator``: with this plan at hand; None: not for long."""
        self.plans += 1
        if self.best is None or candidate.rank < self.best.rank:
            self.best = candidate
            self.kept.pop("", None)
            if simulator is not None:
                self.kept[""] = candidate, simulator
        if self.on_progress is not None:
            count = max(self.plans, len(self.considered))
            self.on_progress(HybridProgress(self.plans, count, self.best.seconds, self._elapsed(), self.phase))

    def _check_time(self) -> None:
        if self._elapsed() > self.budget_s:
            raise _Over

    # ---- estimates

    def _estimated(self, keys: Iterator[Key]) -> Iterator[tuple[Key, Estimate]]:
        """Plans that have not been estimated before, with their estimates."""
        for key in keys:
            if key not in self.considered:
                self.considered.add(key)
                yield key, self.estimates.estimate(*key)
                if self.best is not None:
                    self._check_time()

    def _simulate_best(
        self, ranking: Ranking, among: npt.NDArray[np.bool_] | None = None,
        best: Callable[[], Candidate | None] | None = None, most: int | None = None,
    ) -> None:  # fmt: skip
        """Simulate plans, those with the best estimates first, until no estimate is better than the ``best`` simulated
        plan (of all), or ``most`` plans have been simulated. Where none fits, some more are tried."""
        tried = missed = 0
        while (most is None or tried < most) and (next_ := ranking.take(among)) is not None:
            key, cost = next_
            now = self.best if best is None else best()
            better = now is None or cost < now.cost * self.margin
            if (not better and (now is None or now.feasible)) or missed >= self.patience:
                return
            tried += self.evaluate(*key) is not None
            missed = missed + 1 if now is (self.best if best is None else best()) else 0

    def _explore(self, ranking: Ranking) -> None:
        """Simulate a plan of each sort that has not been tried, where its estimate is not far from the best plan: then
        the estimates of the sort are corrected by its own ratio."""
        missed = 0
        while (next_ := ranking.take(ranking.untried)) is not None and self.best is not None:
            (key, cost), before = next_, self.best
            late = self._elapsed() > EXPLORED * self.budget_s or missed >= self.patience
            if late or cost > exp(SURE * self.ratios.spread) * before.cost:
                return
            self.evaluate(*key)
            missed = missed + 1 if self.best is before else 0

    # ---- moves

    def _different(self, what: Callable[[Candidate], Hashable], count: int | None = None) -> list[Candidate]:
        """The best plans that differ in something."""
        found: dict[Hashable, Candidate] = {}
        for candidate in sorted((c for c in self.known.values() if c is not None), key=lambda c: c.rank):
            found.setdefault(what(candidate), candidate)
        return list(found.values())[:count]

    def _climb(self, candidate: Candidate) -> Candidate:
        """Make one move at a time while that helps; the first of the most promising moves that does is taken."""
        improved = True
        while improved:
            improved = False
            now = Key(candidate.layout, candidate.options, candidate.pipeline.first)
            if now in self._climbed:
                return candidate
            self._climbed.add(now)
            for key in self._promising(self._near(now))[: self.patience]:
                new = self.evaluate(*key)
                if new is not None and new.rank < candidate.rank:
                    candidate, improved = new, True
                    break
        return candidate

    def _promising(self, moves: Iterator[Key]) -> list[Key]:
        """Plans that suit, the most promising first."""
        found: list[tuple[float, int, Key]] = []
        for key in dict.fromkeys(moves):
            if self.known.get(key, True) is not None and self._suits(key.layout, key.options):
                self.considered.add(key)
                cost = self.ratios.corrected(key, self.estimates.estimate(*key)).cost
                found.append((cost, len(found), key))
        return [key for _, _, key in sorted(found)]

    def _near(self, now: Key) -> Iterator[Key]:
        """All moves from a plan."""
        layout, options, first = now
        for recompute in get_args(Recompute):
            again = options.model_copy(update={"recompute": recompute, "recompute_blocks": None})
            yield Key(layout, again, first)
            if recompute != "none" and recompute in self.estimates.works.regions:
                every = self.estimates.blocks(layout, again)
                for count in sorted({-(-every * part // QUARTERS) for part in range(1, QUARTERS)} - {every}):
                    yield Key(layout, again.model_copy(update={"recompute_blocks": count}), first)
        if layout.states:
            for depth in (2 * options.prefetch or 1, options.prefetch // 2):
                yield Key(layout, options.model_copy(update={"prefetch": depth}), first)
        if layout.states == States.WEIGHTS:
            other_way = {"reshard_after_forward": not options.reshard_after_forward}
            yield Key(layout, options.model_copy(update=other_way), first)
        for other in neighbours(layout, self.graph.batch, self.cuts.depth, self.topology.host_size):
            alike = other.stages == layout.stages and other.rank_of() == layout.rank_of()
            yield Key(other, options, first if alike else ())
        for new in moved_borders(self.cuts, first):
            yield Key(layout, options, new)
        for moves in (moved_devices, split_and_joined):
            for wide, new in moves(self.cuts, layout, first):
                yield Key(wide, options, new)

    def _resplit(self, candidate: Candidate) -> Candidate:
        """Greedy descent over the splits of each sort of operators, in all stages at once."""
        simulator = self.simulators.simulator(candidate.pipeline, candidate.configs, candidate.options)
        improved = True
        while improved:
            improved = False
            at_hand = candidate.layout, candidate.pipeline, candidate.configs
            tails = self.splits.tails(*at_hand) if self.cuts.short else ()
            for changes in filter(None, chain(tails, self.splits.alternatives(*at_hand))):
                seconds = simulator.propose(changes)
                configs = tuple(changes.get(i, config) for i, config in enumerate(candidate.configs))
                new = replace(
                    candidate, configs=configs, seconds=seconds, used=_used(simulator),
                    changed=candidate.changed + 1,
                )  # fmt: skip
                if new.rank < candidate.rank:
                    simulator.accept()
                    candidate, improved = new, True
                else:
                    simulator.reject()
                self._note(new, None)
                self._check_time()
        return candidate

    def _list(self, candidate: Candidate) -> None:
        """The order that list scheduling makes for a plan, if that is not a named schedule."""
        layout, options, pipeline = candidate.layout, candidate.options, candidate.pipeline
        if layout.pipeline == 1 or layout.stages * layout.microbatches > LISTED:
            return
        simulator = self.simulators.simulator(pipeline, candidate.configs, options)
        if (order := listed(simulator, pipeline)) is not None:
            self.simulated(layout, options, order, candidate.configs, candidate.changed)
            self._check_time()

    # ---- the answer

    def _result(self, best: Candidate, stopped: str) -> HybridResult:
        elapsed, steps = self._elapsed(), {}
        if "" not in self.kept:
            self.kept[""] = best, self.simulators.simulator(best.pipeline, best.configs, best.options)
        for name, (candidate, simulator) in self.kept.items():
            steps[name] = candidate, step_of(self.simulators, candidate.pipeline, simulator)
        step = steps.pop("")[1]
        strategy = self._strategy(best, max(m.peak for m in step.memory))
        baselines = {name: steps[name] for name in FAMILIES if name in steps}
        same = next((name for name, (candidate, _) in baselines.items() if candidate == best), "")
        considered = max(self.plans, len(self.considered))
        return HybridResult(best, strategy, step, baselines, same, self.plans, considered, elapsed, stopped)

    def _strategy(self, best: Candidate, peak_bytes: int) -> Strategy:
        """The plan as a file has it: without stages and replicas where configs alone say it, so that it can be run."""
        pipeline, configs = best.pipeline, best.configs
        devices = len(self.topology.devices)
        stages = pipeline.stages(self.graph, devices // pipeline.replicas)
        parts = self.simulators.share(pipeline.replicas, pipeline.microbatches)[0].fold
        plain = len(stages) == pipeline.microbatches == 1 and len(configs) * devices <= MAX_PIECES
        if plain and parts is not None:
            configs, stages = parts.unfold(configs), ()
        named = {op.name: config for op, config in zip(self.graph.operators, configs, strict=True)}
        return Strategy.make(
            self.graph, self.topology, named, best.options,
            Prediction(iteration_s=best.seconds, peak_bytes=peak_bytes),
            Search(seed=0, proposals=self.plans, start="layouts"),
            stages=stages, microbatches=pipeline.microbatches, schedule=pipeline.schedule, orders=pipeline.orders,
        )  # fmt: skip


def _used(simulator: DeltaSimulator) -> float:
    """Share of its memory that the fullest device needs."""
    room = np.array([device.memory_bytes for device in simulator.topology.devices])
    return max(1e-12, float((simulator.peaks() / room).max()))
