"""How a step is cut: into equal shares of the batch for blocks of devices, stages, and microbatches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from flexsearch.errors import StrategyError
from flexsearch.graph import OperatorGraph
from flexsearch.strategy.stage import ScheduleKind, Stage

if TYPE_CHECKING:
    from flexsearch.strategy.model import Strategy


@dataclass(frozen=True)
class Pipeline:
    """All devices fall into ``replicas`` equal blocks of consecutive ones; each does the same with its share of the
    batch. In the first block, stage s begins with operator ``first[s]`` (ascending from 0) and runs on ``devices[s]``;
    a device may run several stages. The share of a block is cut into ``microbatches``, which pass through the stages in
    the order of ``schedule``; or in the ``orders`` of a strategy, if there are any."""

    replicas: int
    first: tuple[int, ...]
    devices: tuple[tuple[int, ...], ...]
    microbatches: int = 1
    schedule: ScheduleKind = "1f1b"
    orders: tuple[str, ...] = ()

    def stages(self, graph: OperatorGraph, block: int) -> tuple[Stage, ...]:
        """The stages of a strategy. ``block``: devices of a block."""
        names = [op.name for op in graph.operators]
        ends = [*self.first[1:], len(names)]
        return tuple(
            Stage(tuple(names[first:end]), mesh, self.replicas)
            for first, end, mesh in zip(self.first, ends, self.unfolded(block).devices, strict=True)
        )

    def unfolded(self, block: int) -> Pipeline:
        """The same as one block of all devices. ``block``: devices of a block."""
        meshes = (tuple(d + k * block for k in range(self.replicas) for d in devices) for devices in self.devices)
        return replace(self, replicas=1, devices=tuple(meshes))

    @classmethod
    def of(cls, strategy: Strategy, graph: OperatorGraph) -> Pipeline:
        """How a strategy (checked) cuts its step. Raises StrategyError where stages are not runs of operators, or their
        replicas not equal blocks of consecutive devices."""
        replicas = {stage.replicas for stage in strategy.stages}
        if len(replicas) > 1:
            raise StrategyError(
                f"stages: they have {', '.join(map(str, sorted(replicas)))} replicas",
                "Give all stages the same number of replicas.",
            )
        count = replicas.pop()
        block, rest = divmod(len(strategy.cluster.devices), count)
        at, first = 0, []
        for number, stage in enumerate(strategy.stages):
            names = tuple(op.name for op in graph.operators[at : at + len(stage.operators)])
            if sorted(names) != sorted(stage.operators):
                raise StrategyError(
                    f"stages: stage {number} is not a run of operators in the order of the graph",
                    f"Begin it with {graph.operators[at].name!r}.",
                )
            own = stage.positions
            if rest or stage.mesh != tuple(d + k * block for k in range(count) for d in own) or max(own) >= block:
                raise StrategyError(
                    f"stages: the replicas of stage {number} are not at the same places of {count} equal blocks of "
                    "devices",
                    "List the devices of the first block, then those at the same places of the next, and so on.",
                )
            first.append(at)
            at += len(stage.operators)
        devices = tuple(stage.positions for stage in strategy.stages)
        return cls(count, tuple(first), devices, strategy.microbatches, strategy.schedule, strategy.orders)
