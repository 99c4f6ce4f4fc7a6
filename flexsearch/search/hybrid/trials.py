"""Plans of layouts, simulated and improved in one process; what the search asks for, and the answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, Literal, NamedTuple

import numpy as np

from flexsearch.cost import Profile
from flexsearch.errors import StrategyError, TopologyError
from flexsearch.graph import OperatorGraph
from flexsearch.search.hybrid.constants import LISTED
from flexsearch.search.hybrid.cuts import Cuts
from flexsearch.search.hybrid.native import as_native
from flexsearch.search.hybrid.order import listed
from flexsearch.search.hybrid.outcome import Candidate
from flexsearch.search.hybrid.ranking import Key
from flexsearch.search.hybrid.splits import Configs, Splits
from flexsearch.simulate.delta import DeltaSimulator
from flexsearch.simulate.staged import StagedSimulators, Step, step_of
from flexsearch.strategy import OperatorConfig, Options
from flexsearch.strategy.pipeline import Pipeline
from flexsearch.topology import Topology


class Request(NamedTuple):
    """``plan``: simulate the layout of ``key``, whose stages begin with the operators ``first``. ``splits``: improve
    the splits of operators of ``candidate``. ``order``: put its passes in the order of list scheduling. ``step``: tell
    what devices do in a step of it."""

    what: Literal["plan", "splits", "order", "step"]
    key: Key
    first: tuple[int, ...] = ()
    candidate: Candidate | None = None

    @property
    def name(self) -> tuple[str, Key]:
        """What tells it from others: a candidate is found by its key."""
        return self.what, self.key


@dataclass(frozen=True)
class Answer:
    """The best plan that came of a request, if any, or the step of its plan. ``plans``: so many were simulated;
    ``seconds``: that took so long."""

    best: Candidate | None = None
    plans: int = 0
    seconds: float = 0.0
    step: Step | None = None


Watch = Callable[[Answer], None]
"""Called now and then with what there is so far. What it raises ends the work."""


def trials_of(*arguments: Any) -> Callable[[Request, Watch], Answer]:
    """What answers requests. ``arguments``: of ``Trials``."""
    return Trials(*arguments).answer_with_usage


class Trials:
    """Simulates plans of one graph on one topology; all have the types of ``options``. ``native``: only those that
    PyTorch's own parts express."""

    def __init__(
        self, graph: OperatorGraph, topology: Topology, options: Options, profile: Profile | None, native: bool = False
    ) -> None:
        self.graph, self.topology, self.native = graph, topology, native
        self.simulators = StagedSimulators(graph, topology, profile, options)
        self.splits, self.cuts = Splits(self.simulators), Cuts(self.simulators.graph, native)
        self.kept: dict[str, tuple[Candidate, DeltaSimulator]] = {}
        """The best plan that was simulated here, and that of each family, with their simulators."""

    def answer(self, request: Request, watch: Watch) -> Answer:
        """The answer to any request."""
        began, candidate = time.monotonic(), request.candidate
        if candidate is None:
            best = self._plan(request.key, request.first)
            answer = Answer(best, int(best is not None))
        elif request.what == "splits":
            answer = self._split_otherwise(candidate, watch)
        elif request.what == "order":
            best = self._in_listed_order(candidate)
            answer = Answer(best, int(best is not None))
        else:
            answer = Answer(candidate, step=self._step(candidate))
        return replace(answer, seconds=time.monotonic() - began)

    def answer_with_usage(self, request: Request, watch: Watch) -> Answer:
        """The same, such that it can be sent to another process: a step has worked out what devices do, and what its
        time rests on."""
        answer = self.answer(request, watch)
        if answer.step is None:
            return answer
        step = answer.step
        told = replace(step, measure=partial(tuple, step.usage), weigh=partial(copy, step.estimate))
        return replace(answer, step=told)

    def _plan(self, key: Key, first: tuple[int, ...]) -> Candidate | None:
        """The plan of a layout, simulated; None where its blocks are not alike, the samples of the graph cannot be
        shared out among them, or PyTorch's own parts have to express it and do not."""
        try:
            pipeline, configs = self._planned(key, first)
        except (StrategyError, TopologyError):
            return None
        return self._simulated(Candidate(key.layout, key.options, pipeline, configs, 0.0, 0.0, own=not key.first))

    def _planned(self, key: Key, first: tuple[int, ...]) -> tuple[Pipeline, Configs]:
        layout = key.layout
        self.simulators.share(layout.data, layout.microbatches)
        pipeline, configs = self.splits.plan(layout, first)
        if self.native:
            configs = as_native(self.graph, self.topology, pipeline, configs, key.options)
        return pipeline, configs

    def refusal(self, request: Request) -> str:
        """Why there is no plan of a layout; "" if there is one."""
        try:
            self._planned(request.key, request.first)
        except (StrategyError, TopologyError) as error:
            return error.message
        return ""

    def _simulated(self, plan: Candidate) -> Candidate:
        simulator = self.simulators.simulator(plan.pipeline, plan.configs, plan.options)
        candidate = replace(plan, seconds=simulator.seconds, used=share_used(simulator))
        self._keep(candidate, simulator)
        return candidate

    def _keep(self, candidate: Candidate, simulator: DeltaSimulator) -> None:
        """Keep what the answer of the search may tell about."""
        for name in ("", *candidate.families):
            kept = self.kept.get(name)
            if kept is None or candidate.rank < kept[0].rank:
                self.kept[name] = candidate, simulator

    def _split_otherwise(self, candidate: Candidate, watch: Watch) -> Answer:
        """Greedy descent over the splits of each sort of operators, in all stages at once."""
        simulator = self.simulators.simulator(candidate.pipeline, candidate.configs, candidate.options)
        improved, plans = True, 0
        while improved:
            improved = False
            for changes in self._other_splits(candidate):
                seconds = simulator.propose(changes)
                configs = tuple(changes.get(i, config) for i, config in enumerate(candidate.configs))
                new = replace(
                    candidate, configs=configs, seconds=seconds, used=share_used(simulator),
                    changed=candidate.changed + 1, own=False,
                )  # fmt: skip
                if new.rank < candidate.rank:
                    simulator.accept()
                    candidate, improved = new, True
                else:
                    simulator.reject()
                plans += 1
                watch(Answer(candidate, plans))
        self._keep(candidate, simulator)
        return Answer(candidate, plans)

    def _other_splits(self, candidate: Candidate) -> Iterator[Mapping[int, OperatorConfig]]:
        at_hand = candidate.layout, candidate.pipeline, candidate.configs
        tails = self.splits.tails(*at_hand) if self.cuts.short else ()
        return filter(None, chain(tails, self.splits.alternatives(*at_hand)))

    def _in_listed_order(self, candidate: Candidate) -> Candidate | None:
        """The plan in the order that list scheduling makes, if that is not a named schedule."""
        layout = candidate.layout
        if layout.pipeline == 1 or layout.stages * layout.microbatches > LISTED:
            return None
        simulator = self.simulators.simulator(candidate.pipeline, candidate.configs, candidate.options)
        order = listed(simulator, candidate.pipeline)
        return self._simulated(replace(candidate, pipeline=order, own=False)) if order is not None else None

    def _step(self, candidate: Candidate) -> Step:
        simulator = next((s for kept, s in self.kept.values() if kept == candidate), None)
        if simulator is None:
            simulator = self.simulators.simulator(candidate.pipeline, candidate.configs, candidate.options)
        return step_of(self.simulators, simulator)


def share_used(simulator: DeltaSimulator) -> float:
    """Share of its memory that the fullest device needs."""
    room = np.array([device.usable_bytes for device in simulator.topology.devices])
    return max(1e-12, float((simulator.peaks() / room).max()))
