"""The search over layouts: every factoring is simulated; the best are improved number by number, then stage by stage
and operator by operator."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from math import log2
from typing import Final, get_args

import numpy as np

from flexsearch.cost import Profile
from flexsearch.cost.compute import state_bytes
from flexsearch.errors import FlexsearchError, StrategyError
from flexsearch.graph import OperatorGraph
from flexsearch.quantities import MAX_PIECES
from flexsearch.search.hybrid.cuts import Cuts
from flexsearch.search.hybrid.layout import Layout, factorings, neighbours
from flexsearch.search.hybrid.outcome import Candidate, HybridProgress, HybridResult
from flexsearch.search.hybrid.splits import Configs, Splits
from flexsearch.simulate.delta import DeltaSimulator
from flexsearch.simulate.staged import StagedSimulators, Step, step_of
from flexsearch.strategy import Options, Prediction, Search, Strategy
from flexsearch.strategy.pipeline import Pipeline
from flexsearch.strategy.records import Recompute
from flexsearch.topology import Topology

CLIMBED: Final = 4
"""Layouts that are improved number by number: the best of so many different factorings. Taken."""
STARTS: Final = 0.5
"""Share of the budget for looking at every factoring, once one of them fits. Taken."""
DOUBLED: Final = 0.05
"""Share of a step that tensor parallelism of twice as many devices may cost. Taken: it only sets an order."""
POLISHED: Final = 2
"""Plans whose stages and splits are improved. Taken."""

Key = tuple[Layout, Options]


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


def _promise(layout: Layout) -> tuple[float, int]:
    """Key that sorts layouts by what they may lose: to bubbles (Narayanan et al., SC 2021, section 2.2), and to what
    tensor parallelism sends, some percent each time that groups double."""
    return (layout.pipeline - 1) / layout.microbatches + DOUBLED * log2(layout.tensor), layout.tensor


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
        self.cuts, self.splits = Cuts(graph), Splits(self.simulators)
        self.known: dict[Key, Candidate | None] = {}
        self._climbed: set[Key] = set()
        self.plans, self.phase = 0, ""
        self.began = time.monotonic()
        self.best: Candidate | None = None

    def run(self, on_end: Callable[[], None]) -> HybridResult:
        stopped = "no change of a number, a border or a split of one sort of operators makes it faster"
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
                f"its batch of {self.graph.batch} can be divided among none, or the devices are not equal blocks",
                "Give another --batch, or a cluster of equal hosts.",
            )
        return self._result(self.best, stopped)

    def _look(self) -> None:
        """All there is to do. Raises _Over."""
        self._factorings()
        for candidate in self._of_different_factorings(CLIMBED):
            self._climb(candidate)
        for candidate in self._baselines().values():
            self._climb(candidate)  # as an expert would set them
        for candidate in self._of_different_factorings(POLISHED):
            self._polish(candidate)

    # ---- simulating

    def evaluate(self, layout: Layout, options: Options) -> Candidate | None:
        """The plan of a layout; None where it has none."""
        key = layout, options
        if key not in self.known:
            try:
                self.known[key] = self._candidate(layout, options)
            except FlexsearchError:  # batches, blocks or stages that do not suit the layout
                self.known[key] = None
        return self.known[key]

    def _candidate(self, layout: Layout, options: Options) -> Candidate:
        return self.simulated(layout, options, *self.splits.plan(layout, self.cuts))

    def simulated(
        self, layout: Layout, options: Options, pipeline: Pipeline, configs: Configs, changed: int = 0
    ) -> Candidate:
        """A plan, simulated."""
        simulator = self.simulators.simulator(pipeline, configs, options)
        shortfall = _shortfall(simulator)
        return self.noted(Candidate(layout, options, pipeline, configs, simulator.seconds, shortfall, changed))

    def _elapsed(self) -> float:
        return time.monotonic() - self.began

    def noted(self, candidate: Candidate) -> Candidate:
        """Count a plan, and keep it if it is the best. Raises _Over."""
        self.plans += 1
        if self.best is None or candidate.rank < self.best.rank:
            self.best = candidate
        now = self._elapsed()
        if self.on_progress is not None:
            self.on_progress(HybridProgress(self.plans, self.best.seconds, now, self.phase))
        if now > self.budget_s:
            raise _Over
        return candidate

    # ---- layouts

    def _factorings(self) -> None:
        """Every factoring, with microbatches of one sample, which keep least; then, while it does not fit, with what
        saves memory. The most promising come first."""
        hosts: dict[str, int] = {}
        for device in self.topology.devices:
            hosts[device.host] = hosts.get(device.host, 0) + 1
        batch = self.graph.batch
        found = factorings(len(self.topology.devices), min(hosts.values()), batch, self.cuts.depth)
        self.phase = "layouts"
        for layout in sorted((replace(f, microbatches=batch // f.data) for f in found), key=_promise):
            for start, options in self._saving_memory(layout):
                candidate = self.evaluate(start, options)
                if self.plans == 1:
                    self.began = time.monotonic()  # the first one compiles, on a new machine
                if candidate is None or candidate.feasible:
                    break
            if self.best is not None and self.best.feasible and self._elapsed() > STARTS * self.budget_s:
                break

    def _saving_memory(self, layout: Layout) -> Iterator[Key]:
        """A layout (unless its states alone exceed the memory), and what is done if it does not fit: sharding, which
        costs communication; computing again, which costs more; both."""
        whole = self._states / (layout.tensor * layout.pipeline) <= self._room
        again = self.options.model_copy(update={"recompute": "full"})
        if whole:
            yield layout, self.options
        if layout.data > 1:
            yield replace(layout, sharded=True), self.options
        if whole or layout.data == 1:  # if nothing fits, the answer says by how much
            yield layout, again
        if layout.data > 1:
            yield replace(layout, sharded=True), again
            yield replace(layout, sharded=True), again.model_copy(update={"reshard_after_forward": True})

    @cached_property
    def _states(self) -> float:
        """Bytes of all weights, their gradients and what the optimizer keeps."""
        weights, options = self.simulators.graph.of_kind("parameter"), self.options
        return sum(
            2.0 * w.nbytes + w.nbytes / w.itemsize * state_bytes(w, options.optimizer, options.precision)
            for w in weights
        )

    @cached_property
    def _room(self) -> int:
        """Bytes of the device that has most."""
        return max(device.memory_bytes for device in self.topology.devices)

    def _of_different_factorings(self, count: int) -> list[Candidate]:
        """The best plans, one of each factoring."""
        found: dict[tuple[int, int, int], Candidate] = {}
        for candidate in sorted((c for c in self.known.values() if c is not None), key=lambda c: c.rank):
            layout = candidate.layout
            found.setdefault((layout.data, layout.tensor, layout.pipeline), candidate)
        return list(found.values())[:count]

    def _climb(self, candidate: Candidate) -> None:
        """Change one number at a time while that helps; the first change that does is taken."""
        self.phase = "microbatches and schedules"
        while (key := (candidate.layout, candidate.options)) not in self._climbed:
            self._climbed.add(key)
            for layout, options in self._near(candidate):
                new = self.evaluate(layout, options)
                if new is not None and new.rank < candidate.rank:
                    candidate = new
                    break

    def _near(self, candidate: Candidate) -> Iterator[Key]:
        layout, options = candidate.layout, candidate.options
        for recompute in get_args(Recompute):
            yield layout, options.model_copy(update={"recompute": recompute})
        if layout.sharded:
            yield layout, options.model_copy(update={"reshard_after_forward": not options.reshard_after_forward})
        for other in neighbours(layout, self.graph.batch, self.cuts.depth):
            yield other, options

    # ---- inside a layout

    def _polish(self, candidate: Candidate) -> Candidate:
        """Move borders of stages, then split sorts of operators otherwise, while that helps."""
        self.phase = "borders of stages"
        candidate = self._move_borders(candidate)
        self.phase = "splits of operators"
        return self._resplit(candidate)

    def _move_borders(self, candidate: Candidate) -> Candidate:
        moved = True
        while moved:
            moved = False
            for stage in range(1, len(candidate.pipeline.first)):
                for by in (-1, 1):
                    first = self.cuts.moved(candidate.pipeline.first, stage, by)
                    if first is None:
                        continue
                    configs = self.splits.placed(candidate.layout, candidate.configs, first)
                    new = self.simulated(
                        candidate.layout, candidate.options, replace(candidate.pipeline, first=first), configs
                    )
                    if new.rank < candidate.rank:
                        candidate, moved = new, True
        return candidate

    def _resplit(self, candidate: Candidate) -> Candidate:
        """Greedy descent over the splits of each sort of operators, in all stages at once."""
        simulator = self.simulators.simulator(candidate.pipeline, candidate.configs, candidate.options)
        improved = True
        while improved:
            improved = False
            for changes in self.splits.alternatives(candidate.layout, candidate.configs):
                seconds = simulator.propose(changes)
                configs = tuple(changes.get(i, config) for i, config in enumerate(candidate.configs))
                new = replace(
                    candidate, configs=configs, seconds=seconds, shortfall=_shortfall(simulator),
                    changed=candidate.changed + 1,
                )  # fmt: skip
                self.noted(new)
                if new.rank < candidate.rank:
                    simulator.accept()
                    candidate, improved = new, True
                else:
                    simulator.reject()
        return candidate

    # ---- the answer

    def _baselines(self) -> dict[str, Candidate]:
        """The best plan of each family that people write by hand."""
        families: Mapping[str, Callable[[Layout], bool]] = {
            "data-parallel": lambda f: f.tensor == f.pipeline == 1 and not f.sharded,
            "fsdp": lambda f: f.tensor == f.pipeline == 1 and f.sharded,
            "tensor x data": lambda f: f.pipeline == 1 and f.tensor > 1 and not f.sharded,
            "pipeline x data": lambda f: f.pipeline > 1 and f.tensor == 1 and not f.sharded,
            "megatron": lambda f: f.pipeline > 1 and f.tensor > 1 and not f.sharded,
        }
        plans = sorted((c for c in self.known.values() if c is not None), key=lambda c: c.rank)
        found = {name: next((c for c in plans if holds(c.layout)), None) for name, holds in families.items()}
        return {name: candidate for name, candidate in found.items() if candidate is not None}

    def _result(self, best: Candidate, stopped: str) -> HybridResult:
        elapsed = self._elapsed()
        step = step_of(self.simulators, best.pipeline, best.configs, best.options)
        strategy = self._strategy(best, step)
        baselines = {
            name: (c, step_of(self.simulators, c.pipeline, c.configs, c.options))
            for name, c in self._baselines().items()
        }
        same = next((name for name, (candidate, _) in baselines.items() if candidate == best), "")
        return HybridResult(best, strategy, step, baselines, same, self.plans, elapsed, stopped)

    def _strategy(self, best: Candidate, step: Step) -> Strategy:
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
            Prediction(iteration_s=best.seconds, peak_bytes=max(m.peak for m in step.memory)),
            Search(seed=0, proposals=self.plans, start="layouts"),
            stages=stages, microbatches=pipeline.microbatches, schedule=pipeline.schedule,
        )  # fmt: skip


def _shortfall(simulator: DeltaSimulator) -> float:
    """Share of its memory that the fullest device lacks."""
    room = np.array([device.memory_bytes for device in simulator.topology.devices])
    return max(0.0, float((simulator.peaks() / room - 1.0).max()))
