"""Plans with stages, microbatches and equal blocks of devices: their time and memory, from the rows of one block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

import numpy as np

from flexsearch.cost import Costs, Profile
from flexsearch.cost.uncertainty import Estimate
from flexsearch.graph import Flow, OperatorGraph
from flexsearch.graph.batch import microbatch
from flexsearch.graph.ops import backward_flops, forward_flops, kind_of
from flexsearch.lower import Lowered, Lowering, lower, lower_for_ranks
from flexsearch.lower.share import Share, share_of, stages_of
from flexsearch.lower.templates import Templates
from flexsearch.simulate.delta import DeltaSimulator
from flexsearch.simulate.memory import Memory, memory_of
from flexsearch.simulate.simulation import simulate
from flexsearch.simulate.uncertainty import estimate
from flexsearch.simulate.units import make_account
from flexsearch.simulate.usage import DeviceTime, device_times
from flexsearch.strategy import OperatorConfig, Options, Strategy
from flexsearch.strategy.config import check_config
from flexsearch.strategy.pipeline import Pipeline
from flexsearch.topology import Topology

MOST_UNFOLDED: Final = 64
"""On so many devices at most, all blocks are simulated to see whether one stands for them: that may take as many times
as long as one block as there are blocks."""


class StagedSimulators:
    """Simulators of the plans of one graph on one topology, all in the types of those with ``options``. What was worked
    out for one plan serves all that cut the batch into equal parts."""

    def __init__(
        self, graph: OperatorGraph, topology: Topology, profile: Profile | None = None, options: Options | None = None
    ) -> None:
        self.graph, self.topology, self.profile = (options or Options()).typed(graph), topology, profile
        self._shares: dict[tuple[int, int], tuple[Share, Lowering, Templates]] = {}
        self._parts: dict[int, OperatorGraph] = {}
        """By number of equal parts of the batch: whichever of them are replicas and microbatches."""
        self._costs: dict[int, Costs] = {}
        """By the same number, on the first block that was asked for."""

    def under(self, profile: Profile) -> StagedSimulators:
        """Simulators of the same plans with other costs."""
        other = StagedSimulators(self.graph, self.topology, profile)
        other.graph, other._parts = self.graph, self._parts
        return other

    @cached_property
    def flops(self) -> float:
        """FLOPs of one step of the model."""
        return model_flops(self.graph)

    def share(self, replicas: int, microbatches: int) -> tuple[Share, Lowering, Templates]:
        """One block's part of one microbatch. Raises StrategyError or TopologyError if there is none."""
        key = replicas, microbatches
        if (cached := self._shares.get(key)) is None:
            share = share_of(self.graph, self.topology, replicas, microbatches, self._part)
            lowering = Lowering(share.graph, share.topology, self._costs_of(share, replicas * microbatches), share.fold)
            cached = self._shares[key] = share, lowering, Templates(lowering)
        return cached

    def _part(self, graph: OperatorGraph, count: int) -> OperatorGraph:
        if count not in self._parts:
            self._parts[count] = microbatch(graph, count)
        return self._parts[count]

    def _costs_of(self, share: Share, count: int) -> Costs:
        if count not in self._costs:
            self._costs[count] = Costs(share.graph, share.topology, self.profile)
        return self._costs[count].on(share.topology)

    def simulator(self, pipeline: Pipeline, configs: Sequence[OperatorConfig], options: Options) -> DeltaSimulator:
        """A simulator with this plan at hand. ``configs``: of the first block, one for each operator."""
        share, lowering, templates = self.share(pipeline.replicas, pipeline.microbatches)
        return DeltaSimulator(
            share.graph, share.topology, lowering.costs, options, configs, lowering, stages=stages_of(pipeline),
            templates=templates,
        )  # fmt: skip

    def exact(self, pipeline: Pipeline, configs: Sequence[OperatorConfig], options: Options) -> DeltaSimulator:
        """As ``simulator``; of all devices as one block where the blocks are not alike, so that one of them does not
        take or need what all do. On more than ``MOST_UNFOLDED`` devices nobody asks."""
        simulator = self.simulator(pipeline, configs, options)
        fold = self.share(pipeline.replicas, pipeline.microbatches)[0].fold
        if fold is None or simulator.rows.is_even or len(self.topology.devices) > MOST_UNFOLDED:
            return simulator
        every = self.simulator(pipeline.unfolded(fold.devices), fold.unfold(configs), options)
        alike = simulator.peaks().tolist() * fold.replicas == every.peaks().tolist()
        return simulator if alike and simulator.seconds == every.seconds else every


@dataclass(frozen=True)
class Step:
    """One simulated step of a plan. By device of the first block, or of all blocks where they are not treated alike:
    ``usage``, what it does all the time, and ``memory`` (bytes at the peak, by what they hold); ``measure`` works the
    former out. ``weigh`` says what the time rests on. ``devices``: of all blocks. ``samples``: of the whole batch.
    ``flops``: of the model's forward and backward passes, nothing computed twice. ``peak_flops``: FLOP/s of all devices
    together."""

    makespan_s: float
    measure: Callable[[], tuple[DeviceTime, ...]] = field(repr=False, compare=False)
    weigh: Callable[[], Estimate] = field(repr=False, compare=False)
    memory: tuple[Memory, ...]
    capacity: tuple[int, ...]
    devices: int
    samples: int
    flops: float
    peak_flops: float

    @property
    def missing(self) -> int:
        """Bytes that the fullest device lacks; 0 if the plan fits."""
        return max(0, *(m.peak - room for m, room in zip(self.memory, self.capacity, strict=True)))

    @cached_property
    def fullest(self) -> Memory:
        """Memory of the device with the largest share in use."""
        shares = [m.peak / room for m, room in zip(self.memory, self.capacity, strict=True)]
        return self.memory[int(np.argmax(shares))]

    @property
    def utilisation(self) -> float:
        """Model FLOPs utilisation: share of the peak FLOP/s that the model's own FLOPs take (PaLM, 2022, app. B)."""
        return self.flops / (self.makespan_s * self.peak_flops) if self.makespan_s else 0.0

    @cached_property
    def usage(self) -> tuple[DeviceTime, ...]:
        """By device. It takes as long as a simulation of every microbatch."""
        return self.measure()

    @cached_property
    def estimate(self) -> Estimate:
        """The makespan with what it rests on, and so its interval. It takes a dozen simulations."""
        return self.weigh()

    def share(self, seconds: Callable[[DeviceTime], float]) -> float:
        """Share of the step that devices spend on something, on average."""
        return float(np.mean([seconds(time) for time in self.usage])) / self.makespan_s if self.makespan_s else 0.0

    @property
    def bubbles(self) -> float:
        """Share of the step in which a device, on average, neither computes nor takes part in a communication nor waits
        for its host."""
        return self.share(lambda time: time.idle_s)

    @property
    def exposed(self) -> float:
        """Share of the step that communication takes which nothing hides, on average."""
        return self.share(lambda time: time.communicate_s)


def step_of(simulators: StagedSimulators, simulator: DeltaSimulator) -> Step:
    """The step of the plan that a simulator, one of ``simulators``, has at hand."""
    graph = simulators.graph
    account, sources = make_account(simulator.rows)
    devices, dtype = simulators.topology.devices, _dtype(graph)

    def measure() -> tuple[DeviceTime, ...]:
        return device_times(simulator.rows.copy(), simulator.times())

    def weigh() -> Estimate:
        return estimate(simulator.lowering, simulator.rows.copy(), simulator.configs)

    return Step(
        simulator.seconds, measure, weigh, memory_of(account, sources, simulator.rows.state),
        tuple(device.usable_bytes for device in simulator.topology.devices), len(devices), graph.batch,
        simulators.flops, sum(device.product_flops_for(dtype) for device in devices),
    )  # fmt: skip


def step_of_strategy(graph: OperatorGraph, strategy: Strategy, profile: Profile | None = None) -> Step:
    """The simulated step of a strategy, after checking it. Raises StrategyError."""
    if strategy.options.recipes:
        strategy.check(graph, strategy.cluster)
        return _step_with_recipes(graph, strategy, profile)
    return step_of(*_simulator_of(graph, strategy, profile))


def lower_exactly(graph: OperatorGraph, strategy: Strategy, topology: Topology, costs: Costs) -> Lowered:
    """As ``lower``, but for all devices where blocks are not alike, as of ``StagedSimulators.exact``. Raises
    StrategyError."""
    strategy.check(graph, topology)
    replicas = max(stage.replicas for stage in strategy.stages)
    if replicas > 1 and not strategy.options.recipes and len(topology.devices) <= MOST_UNFOLDED:
        _, simulator = _simulator_of(graph, strategy, costs.profile)
        if len(simulator.topology.devices) == len(topology.devices):
            return lower_for_ranks(graph, strategy, topology, costs, reads=True)
    return lower(graph, strategy, topology, costs)


def _simulator_of(
    graph: OperatorGraph, strategy: Strategy, profile: Profile | None
) -> tuple[StagedSimulators, DeltaSimulator]:  # fmt: skip
    """A strategy in an exact simulator, after checking it."""
    strategy.check(graph, strategy.cluster)
    graph = strategy.planned(graph)
    pipeline, configs = Pipeline.of(strategy, graph), strategy.in_order(graph)
    simulators = StagedSimulators(graph, strategy.cluster, profile, strategy.options)
    share, _, _ = simulators.share(pipeline.replicas, pipeline.microbatches)
    for op, config in zip(share.graph.operators, configs, strict=True):
        check_config(op, config, len(share.topology.devices))  # a microbatch has fewer samples than the batch
    return simulators, simulators.exact(pipeline, configs, strategy.options)


def _step_with_recipes(graph: OperatorGraph, strategy: Strategy, profile: Profile | None) -> Step:
    """The mean step of a strategy with recipes, of all devices."""
    cluster = strategy.cluster
    lowered = lower(graph, strategy, cluster, Costs(graph, cluster, profile))
    simulation, planned = simulate(lowered), strategy.options.typed(strategy.planned(graph))
    dtype = _dtype(planned)
    return Step(
        simulation.makespan_s, lambda: device_times(lowered.rows, simulation.times), lambda: simulation.estimate,
        simulation.memory, tuple(device.usable_bytes for device in cluster.devices), len(cluster.devices), graph.batch,
        model_flops(planned), sum(device.product_flops_for(dtype) for device in cluster.devices),
    )  # fmt: skip


def model_flops(graph: OperatorGraph) -> float:
    """FLOPs of one step of the whole batch, forward and backward, nothing computed twice."""
    total = 0.0
    for i, op in enumerate(graph.operators):
        needs = tuple(flow != Flow.VALUE for flow in graph.flows[i])
        forward = 0.0 if op.half == "weights" else float(forward_flops(op, op.sizes))
        total += forward
        if any(needs):
            total += float(backward_flops(op, op.sizes, needs)) - kind_of(op).again * forward
    return total


def _dtype(graph: OperatorGraph) -> str:
    """Type in which most weights compute."""
    sizes: dict[str, int] = {}
    for tensor in graph.of_kind("parameter"):
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.nbytes
    return max(sizes, key=sizes.__getitem__, default="float32")
