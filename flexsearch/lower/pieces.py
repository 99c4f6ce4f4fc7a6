"""What there is: pieces of operators, layouts, reshards and weights of the strategies of one graph on one topology."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Any

import numpy as np
import numpy.typing as npt

from flexsearch.cost import Costs
from flexsearch.graph import Box, Flow, Operator, OperatorGraph, Piece, Tensor
from flexsearch.lower.backward_order import buckets_of
from flexsearch.lower.folding import Fold
from flexsearch.lower.layout import Entry, Layout, Layouts, bounding
from flexsearch.lower.reading import readers, samples_of
from flexsearch.lower.reshard import Planner, Reshard
from flexsearch.lower.split import Blocks, Shared, Split, Splitter
from flexsearch.lower.weights import WeightPlan, plan_weight
from flexsearch.strategy import OperatorConfig
from flexsearch.topology import Topology

TURN_S = 3e-3
"""Devices that share a processor take turns of this length, s (the base slice of Linux's scheduler)."""


@dataclass(frozen=True)
class Edge:
    """A tensor on its way to the readers that want it in the same layout. ``readers``: (operator, operand position).
    ``forward``: None for inputs, buffers and constants, which every device has at hand, and where no reader wants the
    value (``graph.Flow``). ``backward``: from the gradients that the readers' pieces make to the layout of the
    producer; None where no gradient flows."""

    tensor: str
    readers: tuple[tuple[int, int], ...]
    need: Layout
    forward: Reshard | None
    backward: Reshard | None


@dataclass(frozen=True)
class Weight:
    """A parameter: its edges (indices into ``Lowered.edges``, in the order of ``plan.forward``) and its storage."""

    tensor: str
    edges: tuple[int, ...]
    plan: WeightPlan


class Placed:
    """The pieces of an operator under a config. ``reads``/``writes``: layouts of the operands, as the pieces need and
    make them. ``device``: of each piece."""

    def __init__(self, splitter: Splitter, config: OperatorConfig) -> None:
        self._splitter, self._config, self.devices = splitter, config, config.devices
        self.device = np.array(config.devices, dtype=np.uint32)
        split = splitter.split(config)
        self.reads = tuple(region.on(splitter.layouts, self.device) for region in split.inputs)
        self.writes = tuple(region.on(splitter.layouts, self.device) for region in split.outputs)

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """The pieces themselves, in the order of ``devices``."""
        return self._splitter.pieces(self._config)

    def piece_on(self, device: int) -> Piece:
        """The piece that ``device`` computes."""
        return self.pieces[self.devices.index(device)]


_NO_SAMPLES = np.zeros(1, np.uint32)


class Pieces:
    """What the strategies of one graph on one topology are made of. Placements, reshards and weight plans are cached by
    what they depend on, so lowering a neighbour of a strategy costs little more than putting the order together."""

    def __init__(
        self, graph: OperatorGraph, topology: Topology, costs: Costs, fold: Fold | None = None,
        results: Mapping[str, Layout] | None = None, reads: bool = True,
    ) -> None:  # fmt: skip
        self.graph, self.topology, self.costs, self.fold = graph, topology, costs, fold
        self.network = topology if fold is None else fold.folding.whole
        """What communication is priced on: all devices."""
        self.results = {graph.loss: everywhere(self.network)} if results is None else dict(results)
        """Tensors that are brought to where they are wanted: the loss, or the outputs of a forward pass."""
        self.layouts, self.planner = Layouts(len(self.network.devices)), Planner(self.network, costs.profile)
        self.readers = {} if topology.storage is None or not reads else readers(graph)
        """Operators that compute with what is read from storage, and positions of the operand."""
        self._splitters: dict[object, Splitter] = {}
        self._shared = Shared()
        self._splitter_of = [self._splitter(i, op) for i, op in enumerate(graph.operators)]
        self._placed: dict[tuple[int, OperatorConfig], Placed] = {}
        self._reshards: dict[tuple[int, int, int], Reshard] = {}
        self._weights: dict[tuple[tuple[int, ...], tuple[Flow, ...], int, int, int, int], WeightPlan] = {}
        self._parameters = graph.of_kind("parameter")
        self.weight_types = {dtype: k for k, dtype in enumerate(sorted({t.dtype for t in self._parameters}))}
        """Numbers of the dtypes of weights."""
        self.replicas = 1 if fold is None else fold.replicas
        """Blocks that do the same, of which one is lowered."""
        self.inside = 1 if fold is None else fold.folding.inside
        self.image = np.arange(len(topology.resources), dtype=np.uint32) if fold is None else fold.folding.image
        """By resource of the network, the resource of the topology that stands for it."""
        users = Counter(topology.processor_of)
        self.turns = [TURN_S if users[processor] > 1 else inf for processor in topology.processor_of]

    def _splitter(self, operator: int, op: Operator) -> Splitter:
        """Operators of the same form share one."""
        blocks = self.blocks(operator)
        key = self.costs.alike[operator], blocks
        if key not in self._splitters:
            inputs, outputs = (
                tuple(tuple(self.graph.tensor[n].shape) for n in names) for names in (op.inputs, op.outputs)
            )
            self._splitters[key] = Splitter(op, inputs, outputs, self.layouts, self._shared, blocks)
        return self._splitters[key]

    def blocks(self, operator: int) -> Blocks:
        """How blocks share an operator."""
        if (fold := self.fold) is None:
            return Blocks()
        op = self.graph.operators[operator]
        spread = tuple(name in fold.spread for name in (*op.inputs, *op.outputs))
        return Blocks(fold.replicas, fold.devices, fold.samples[operator], spread)

    def placed(self, operator: int, config: OperatorConfig) -> Placed:
        """The pieces of an operator under a config, on its devices."""
        key = operator, config
        if (cached := self._placed.get(key)) is None:
            cached = self._placed[key] = Placed(self._splitter_of[operator], config)
        return cached

    def split(self, operator: int, config: OperatorConfig) -> Split:
        """The pieces of an operator under a config, wherever they are."""
        return self._splitter_of[operator].split(config)

    def samples(
        self, operator: int, config: OperatorConfig, split: Split
    ) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
        """``reading.samples_of`` a split; one zero for all pieces where its operator reads none."""
        if operator in self.readers:
            return samples_of(self.graph, operator, config, split)
        return _NO_SAMPLES, _NO_SAMPLES

    def samples_read(self, configs: Sequence[OperatorConfig], microbatches: int) -> dict[int, int]:
        """By host (its number): samples that it takes in a step, those in its memory included, for all blocks on it."""
        most: dict[int, int] = {}
        for operator in self.readers:
            config, own = configs[operator], dict[int, dict[int, int]]()
            held, part = samples_of(self.graph, operator, config, self.split(operator, config))
            for device, samples, first in zip(config.devices, held.tolist(), part.tolist(), strict=True):
                own.setdefault(int(self.topology.host_of[device]), {})[first] = samples
            for host, parts in own.items():
                most[host] = max(most.get(host, 0), sum(parts.values()) * microbatches * self.inside)
        return most

    def intern(self, layout: Layout) -> int:
        """A small number for a layout; equal layouts have the same."""
        return self.layouts.intern(layout).number

    def layout(self, number: int) -> Layout:
        """The layout of a number."""
        return self.layouts[number].entries

    def reshard(self, source: int, destination: int, itemsize: int) -> Reshard:
        """Cached reshard between interned layouts."""
        key = source, destination, itemsize
        if (cached := self._reshards.get(key)) is None:
            cached = Reshard(self.planner, self.layouts[source], self.layouts[destination], itemsize)
            self._reshards[key] = cached
        return cached

    def weight(
        self, tensor: Tensor, needs: tuple[int, ...], flows: Sequence[Flow], sharding: int, sums: Any
    ) -> WeightPlan:
        """Cached plan of a parameter whose edges want the given layouts. Equal layers share theirs. ``sharding``: of
        the reader that keeps least (rank of a ``Sharding``). ``sums``: as of ``plan_weight``."""
        sizes = tensor.itemsize, self.graph.gradient[tensor.name].itemsize
        key = needs, tuple(flows), sharding, *sizes, int(sums)
        if (cached := self._weights.get(key)) is None:
            layouts = [self.layouts[n] for n in needs]
            cached = plan_weight(layouts, flows, sharding, *sizes, self.planner, self.layouts, sums)
            self._weights[key] = cached
        return cached

    def buckets(self, bucket_bytes: int) -> dict[str, int]:
        """Parameter -> number of its synchronisation bucket, of plans of one stage."""
        return buckets_of(self.graph, bucket_bytes)


def everywhere(topology: Topology) -> Layout:
    """Layout of the loss: every device gets it."""
    return tuple(Entry(device, (), 0) for device in range(len(topology.devices)))


def kept(reads: Iterable[Layout]) -> Layout:
    """Layout of a buffer's new value: on each device the region that holds all that its readers want there."""
    boxes: dict[int, dict[Box, None]] = {}
    for read in reads:
        for entry in read:
            boxes.setdefault(entry.device, {})[entry.box] = None
    return tuple(Entry(device, bounding(list(wanted)), 0) for device, wanted in boxes.items())
