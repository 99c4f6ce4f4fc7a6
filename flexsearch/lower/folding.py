"""Plans in which equal blocks of devices do the same, each with its share of the batch: one block stands for all.

What is split by samples stays inside a block. What is not (weights, their gradients, the loss) is the same, or a sum,
over all blocks: its layouts name all devices. Of the exchanges that such layouts lead to, each stands for those that
renaming the devices by one block makes of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from flexsearch.errors import NotationError, StrategyError
from flexsearch.graph import OperatorGraph
from flexsearch.graph.batch import Part, microbatch
from flexsearch.strategy import OperatorConfig
from flexsearch.topology import Topology
from flexsearch.topology.classes import Folding, fold_topology


@dataclass(frozen=True)
class Fold:
    """A graph and a topology, folded. ``whole``: the graph of the whole batch; ``part``: of a block's share, or of one
    microbatch of it. ``samples``: by operator, the axis that the blocks share out, or None: every block does all of it.
    ``spread``: tensors that are not split among the blocks."""

    whole: OperatorGraph
    part: OperatorGraph
    folding: Folding
    samples: tuple[str | None, ...]
    spread: frozenset[str]

    @property
    def replicas(self) -> int:
        """Number of blocks."""
        return self.folding.replicas

    @property
    def devices(self) -> int:
        """Devices of a block."""
        return len(self.folding.block.devices)

    def unfold(self, configs: Sequence[OperatorConfig]) -> tuple[OperatorConfig, ...]:
        """The plan of the whole graph on all devices, of which ``configs`` are one block's part."""
        return tuple(self._unfold(i, config) for i, config in enumerate(configs))

    def folded(self, configs: Sequence[OperatorConfig]) -> tuple[OperatorConfig, ...] | None:
        """One block's part of a whole plan; None if the blocks do not all do the same."""
        parts = []
        for i, config in enumerate(configs):
            if (part := self._folded(i, config)) is None:
                return None
            parts.append(part)
        return tuple(parts)

    def _folded(self, operator: int, config: OperatorConfig) -> OperatorConfig | None:
        axis, replicas = self.samples[operator], self.replicas
        own = tuple(d for d in config.devices if d < self.devices)
        if axis is None:
            copies, rest = divmod(config.replicas, replicas)
            degrees = config.degrees
        else:
            copies, (degree, rest) = config.replicas, divmod(config.degree(axis), replicas)
            degrees = tuple((a, degree if a == axis else parts) for a, parts in config.degrees)
            degrees = tuple((a, parts) for a, parts in degrees if parts > 1)
        if rest or not copies:
            return None
        if len(own) * replicas != len(config.devices):
            return None
        shares = tuple((a, row[: dict(degrees)[a]]) for a, row in config.shares if a in dict(degrees))
        part = OperatorConfig(degrees, own, copies, config.states, shares, config.sharded_over)
        return part if self._unfold(operator, part) == config else None

    def _unfold(self, operator: int, config: OperatorConfig) -> OperatorConfig:
        axes, axis = tuple(self.whole.operators[operator].sizes), self.samples[operator]
        return _unfolded(axes, axis, self.replicas, self.devices, config)


@lru_cache(maxsize=1 << 16)  # a plan has few configs, for many operators
def _unfolded(
    axes: tuple[str, ...], samples: str | None, replicas: int, devices: int, config: OperatorConfig
) -> OperatorConfig:
    """The config of an operator with these axes, of which ``config`` is the part of one of so many blocks of so many
    devices. ``samples``: the axis that the blocks share out."""
    degrees = [(name, config.degree(name)) for name in axes if name == samples or config.degree(name) > 1]
    shape = [parts for _, parts in degrees] + [config.replicas]
    own = np.array(config.devices).reshape(shape)
    every = np.stack([own + block * devices for block in range(replicas)])
    place = next((k for k, (name, _) in enumerate(degrees) if name == samples), len(degrees))
    if samples is not None:
        degrees[place] = samples, degrees[place][1] * replicas
    copies = config.replicas * (replicas if samples is None else 1)
    whole = np.moveaxis(every, 0, place).ravel().tolist()
    shares = tuple((name, row * replicas if name == samples else row) for name, row in config.shares)
    return OperatorConfig(tuple(degrees), tuple(whole), copies, config.states, shares, config.sharded_over)



def fold(
    graph: OperatorGraph, topology: Topology, replicas: int, microbatches: int = 1, part_of: Part = microbatch
) -> Fold:  # fmt: skip
    """Fold ``graph`` on ``topology`` into ``replicas`` blocks; the part is that of one of ``microbatches``. Raises
    TopologyError if the topology does not fall apart into so many, StrategyError if the batch cannot be divided among
    them."""
    folding = fold_topology(topology, replicas)
    try:
        part = part_of(graph, replicas * microbatches)
    except NotationError as error:
        raise StrategyError(f"the batch cannot be divided by {replicas * microbatches}: {error.message}") from error
    samples = []
    for whole, own in zip(graph.operators, part.operators, strict=True):
        axes = [axis for axis in whole.sizes if whole.sizes[axis] != own.sizes[axis]]
        if len(axes) > 1 or any(axis not in whole.splittable for axis in axes):
            raise StrategyError(f"operator {whole.name!r} cannot be divided among {replicas} blocks by samples")
        samples.append(axes[0] if axes else None)
    spread = frozenset(t.name for t in graph.tensors if t.shape == part.tensor[t.name].shape)
    return Fold(graph, part, folding, tuple(samples), spread)
