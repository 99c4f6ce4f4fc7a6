"""Workers that train, step by step, on the engine: when they are through, and when what they push arrives.

The rows of a step are what each worker computes in the data-parallel plan, and the rows of its recipe
(``lower.recipe_rows``) for what is really exchanged. Workers share nothing else within a step: neither losses nor
statistics. Each step takes a worker as many times as long as it is slow, and by chance longer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from pydantic import JsonValue

from flexsearch.compiled import I64
from flexsearch.cost import Costs
from flexsearch.cost.sources import Sources
from flexsearch.cost.ticks import TICK
from flexsearch.cost.uncertainty import Estimate
from flexsearch.graph import Axis, Operator, OperatorGraph, Tensor
from flexsearch.lower import Lowered, lower
from flexsearch.lower.limits import refuse_endless_turns
from flexsearch.lower.recipe_rows import with_exchanges
from flexsearch.lower.recipes import RecipeGroup, group_of
from flexsearch.lower.rows import Rows
from flexsearch.lower.several import computing
from flexsearch.simulate.stepping import Factors, Run, Stand, longer
from flexsearch.simulate.uncertainty import estimate
from flexsearch.strategy import Strategy
from flexsearch.strategy.baselines import inside_group
from flexsearch.sync import Exchange, Recipe
from flexsearch.sync.compression import Sizes
from flexsearch.topology import Topology

KEPT: Final = 32
"""Steps that exchange differently whose rows are kept."""


@dataclass(frozen=True)
class Workers:
    """Who works where, and how fast. ``lowered``: data parallelism over the first ``size`` devices, with equal shares;
    devices after them can be dedicated servers. ``slow``: by worker, times as long (empty: 1). ``jitter``: each step
    takes up to that share longer, by chance (``seed``)."""

    lowered: Lowered
    size: int
    slow: tuple[float, ...] = ()
    jitter: float = 0.0
    seed: int = 0

    @classmethod
    def of(
        cls, graph: OperatorGraph, topology: Topology, size: int, slow: tuple[float, ...] = (), jitter: float = 0.0,
        seed: int = 0,
    ) -> Workers:  # fmt: skip
        """Workers that share out the batch of a graph. Raises StrategyError if simulating would not end."""
        costs = Costs(graph, topology)
        refuse_endless_turns(graph, topology, costs)
        configs = inside_group(graph, topology, 1, shares=size)
        named = {op.name: config for op, config in zip(graph.operators, configs, strict=True)}
        strategy = Strategy.make(graph, topology, named)
        return cls(lower(graph, strategy, topology, costs), size, slow, jitter, seed)

    @classmethod
    def timed(
        cls, step_s: float, topology: Topology, size: int, slow: tuple[float, ...] = (), jitter: float = 0.0,
        seed: int = 0,
    ) -> Workers:  # fmt: skip
        """Workers that compute so many seconds in a step, on any device."""
        return cls.of(_timed(step_s, size), topology, size, slow, jitter, seed)

    @property
    def topology(self) -> Topology:
        """Where they are."""
        return self.lowered.topology

    @property
    def hosts(self) -> tuple[int, ...]:
        """Number of the host by worker."""
        return tuple(int(self.topology.host_of[d]) for d in range(self.size))

    @cached_property
    def rows(self) -> Rows:
        """What they compute in a step."""
        return computing(self.lowered)

    @property
    def compute_s(self) -> tuple[float, ...]:
        """Seconds that a step takes each when there is nothing to exchange, without chance."""
        return tuple((self._alone[0] * self._slow[: self.size] * TICK).tolist())

    @property
    def waits(self) -> I64:
        """By worker: ticks of such a step in which it waits, for its host and storage, where it is not slow."""
        return self._alone[1]

    @cached_property
    def _alone(self) -> tuple[I64, I64]:
        """By worker: ticks of a step without exchanges, and how many of them it waits."""
        run = Run(self.rows)
        run.begin()
        run.to_the_end()
        ticks = run.state.devices.clock[: self.size]
        return ticks, ticks - run.state.computed[: self.size]

    def estimate(self, seconds: float, communicated: float) -> Estimate:
        """Seconds of training, with what they rest on: those that are ``communicated`` on links, the others on what
        computing a step does."""
        lowering, resources = self.lowered.lowering, self.topology.resources
        alone = self._computing
        steps = (seconds - communicated) / alone.seconds if alone.seconds else 0.0
        shares = {source: share * steps for source, share in alone.shares.items()}
        of_links = Sources(lowering.costs, self.topology).links()
        links = [source for r, source in of_links.items() if resources[r].kind == "link"]
        return Estimate(seconds, shares | {max(links, key=lambda source: source.error): communicated})

    @cached_property
    def _computing(self) -> Estimate:
        return estimate(self.lowered.lowering, self.rows, self.lowered.configs)

    def factors(self, step: int) -> Factors:
        """By device: how many times as long it computes in a step (0: the first)."""
        factors = self._slow.copy()
        factors[: self.size] *= [self.chance(worker, step) for worker in range(self.size)]
        return factors

    def chance(self, worker: int, step: int) -> float:
        """How many times as long as usual a worker computes in a step."""
        if not self.jitter:
            return 1.0
        return 1.0 + self.jitter * float(np.random.default_rng((self.seed, worker, step)).random())

    def group(self, recipe: Recipe, sizes: Sizes) -> RecipeGroup:
        """The workers as replicas of one vector of such sizes. Raises RecipeError if they cannot follow the recipe."""
        devices = tuple(range(len(self.topology.devices)))
        return group_of(recipe, self.topology, devices[: self.size], devices[self.size :], sizes)

    @cached_property
    def _slow(self) -> Factors:
        """By device."""
        slow = np.ones(len(self.topology.devices))
        slow[: len(self.slow)] = self.slow
        return slow


def _timed(step_s: float, size: int) -> OperatorGraph:
    """A graph that takes each of ``size`` workers so many seconds."""
    batch = Axis(name="b", size=size, role="sample")
    times: dict[str, JsonValue] = {"forward_s": step_s, "backward_s": 0.0, "samples": 1}
    step = Operator(
        name="step", kind="given", pattern="b 1 -> ", axes=(batch,), inputs=("samples",), outputs=("loss",),
        attributes=times,
    )  # fmt: skip
    tensors = (
        Tensor(name="samples", shape=(size, 1), dtype="float32", kind="input"),
        Tensor(name="loss", shape=(), dtype="float32", kind="activation"),
    )
    return OperatorGraph(name="step", tensors=tensors, operators=(step,), loss="loss")


class SynchronousTime:
    """Time of workers that go together. A step begins for each where it ended its last one."""

    def __init__(self, workers: Workers, recipe: Recipe, sizes: Sizes) -> None:
        self._workers, self._recipe, self._group = workers, recipe, workers.group(recipe, sizes)
        self._runs: dict[tuple[bool, tuple[Exchange, ...]], Run] = {}
        self._stand: Stand | None = None
        self._passed, self._steps = 0, 0
        """Ticks before those of ``_stand``; steps."""
        self._computed = np.zeros(workers.size, np.int64)

    def step(self, exchanges: Sequence[Exchange]) -> None:
        """One more step of all, with these exchanges in it."""
        size = self._workers.size
        run = self._run(self._steps < self._recipe.warm_up, tuple(exchanges))
        factors = self._workers.factors(self._steps)
        run.scale(factors)
        run.begin(self._stand)
        run.to_the_end()
        self._computed += run.state.computed[:size] + longer(self._workers.waits, factors[:size])
        self._steps += 1
        stand = run.stand
        first = int(stand.clock[:size].min())
        self._passed += first
        clock, free, computing = (np.maximum(x - first, 0) for x in (stand.clock, stand.free, stand.computing))
        self._stand = Stand(clock, stand.host - first, free, computing)

    @property
    def seconds(self) -> float:
        """Until the last worker is through."""
        return self._ticks(self._last) * TICK

    @property
    def communicated(self) -> float:
        """Seconds of that which the last worker would not take alone."""
        return max(0, self._ticks(self._last) - int(self._computed[self._last])) * TICK

    @property
    def _last(self) -> int:
        return 0 if self._stand is None else int(self._stand.clock[: self._workers.size].argmax())

    def _ticks(self, worker: int) -> int:
        return 0 if self._stand is None else self._passed + int(self._stand.clock[worker])

    def _run(self, exact: bool, exchanges: tuple[Exchange, ...]) -> Run:
        key = exact, exchanges
        if (run := self._runs.get(key)) is None:
            rows = with_exchanges(self._workers.lowered, self._workers.rows, self._group, exchanges, exact)
            run = Run(rows)
            if len(self._runs) == KEPT:
                self._runs.clear()
            self._runs[key] = run
        return run
