"""Graph x strategy x topology -> pieces, edges and weights, and the rows of what every device does.

Here is decided what there is: pieces, layouts, reshards. When it happens says :mod:`flexsearch.lower.schedule`; the
rows are written by :mod:`flexsearch.lower.emit`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import TYPE_CHECKING

import numpy as np

from flexsearch.compiled import F64, U32
from flexsearch.cost import Costs
from flexsearch.errors import StrategyError
from flexsearch.graph import Operator, OperatorGraph, Tensor, volume
from flexsearch.lower.layout import Entry, Laid, Layout, Layouts, Placement
from flexsearch.lower.reshard import Planner, Reshard
from flexsearch.lower.schedule import Stages, buckets_of
from flexsearch.lower.split import Intervals, Split, Splitter
from flexsearch.lower.taskgraph import TaskGraph
from flexsearch.lower.view import Rows, task_graph
from flexsearch.lower.weights import WeightPlan, plan_weight
from flexsearch.strategy import OperatorConfig, Options, Strategy
from flexsearch.topology import Topology

if TYPE_CHECKING:
    from flexsearch.lower.plan import PlanRows
    from flexsearch.lower.templates import Templates

TURN_S = 3e-3
"""Devices that share a processor take turns of this length, s (the base slice of Linux's scheduler)."""

Seconds = Callable[[Split, U32], F64]
"""Costs of the pieces of a split on some devices: rows for forward and backward."""


@dataclass(frozen=True)
class Edge:
    """A tensor on its way to the readers that want it in the same layout. ``readers``: (operator, operand position).
    ``forward``: None for inputs, buffers and constants, which every device has at hand. ``backward``: from the
    gradients that the readers' pieces make to the layout of the producer; None where no gradient flows."""

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
    """The pieces of an operator under a config. ``reads``/``writes``: layouts of the operands. ``device``: of each
    piece. ``seconds``: (2, pieces) of its forward and its backward task."""

    def __init__(self, splitter: Splitter, config: OperatorConfig, seconds: Seconds) -> None:
        self._splitter, self._config = splitter, config
        self.device = np.array(config.devices, dtype=np.uint32)
        split = splitter.split(config)
        self.seconds = seconds(split, self.device)
        self.reads = tuple(region.on(splitter.layouts, self.device) for region in split.inputs)
        self.writes = tuple(region.on(splitter.layouts, self.device) for region in split.outputs)

    @property
    def forward_s(self) -> tuple[float, ...]:
        """Seconds of each piece's forward task."""
        return tuple(self.seconds[0].tolist())

    @property
    def backward_s(self) -> tuple[float, ...]:
        """Seconds of each piece's backward task."""
        return tuple(self.seconds[1].tolist())

    @cached_property
    def placement(self) -> Placement:
        """The pieces themselves."""
        return self._splitter.placement(self._config)


@dataclass(frozen=True)
class Lowered:
    """Everything that simulator and runtime need. ``lowering`` made it. ``placed[i]`` belongs to operator i;
    ``edges_of[name]``: edges of a tensor; ``loss_edge``: brings the loss to every device; ``update_edges``: buffer ->
    edge of its new value. ``rows``: what every device does, in order; ``turns``: by device, s (see ``TaskGraph``). With
    several microbatches, ``graph`` is that of one."""


    lowering: Lowering
    graph: OperatorGraph
    topology: Topology
    options: Options
    configs: tuple[OperatorConfig, ...]
    placed: tuple[Placed, ...]
    edges: tuple[Edge, ...]
    weights: tuple[Weight, ...]
    edges_of: Mapping[str, tuple[int, ...]]
    edge_of: Mapping[tuple[int, int], int]
    loss_edge: int
    update_edges: Mapping[str, int]
    stages: Stages
    turns: Sequence[float]
    rows: Rows

    @cached_property
    def tasks(self) -> TaskGraph:
        """The rows as tasks."""
        return task_graph(self)

    @cached_property
    def devices(self) -> tuple[int, ...]:
        """Devices that compute anything."""
        return tuple(sorted({d for config in self.configs for d in config.devices}))

    def stored_bytes(self, device: int) -> int:
        """Bytes of weights that ``device`` keeps."""
        return sum(
            volume(entry.box) * self.graph.tensor[weight.tensor].itemsize
            for weight in self.weights
            for entry in weight.plan.storage
            if entry.device == device
        )


class Lowering:
    """Lowers strategies of one graph on one topology. Placements, reshards and weight plans are cached by what they
    depend on, so that lowering a neighbour of a strategy costs little more than putting the order together."""

    def __init__(self, graph: OperatorGraph, topology: Topology, costs: Costs) -> None:
        self.graph, self.topology, self.costs = graph, topology, costs
        self.layouts, self.planner = Layouts(len(topology.devices)), Planner(topology)
        self._splitters: dict[object, Splitter] = {}
        self._intervals: Intervals = {}
        self._splitter_of = [self._splitter(op) for op in graph.operators]
        self._placed: dict[tuple[int, OperatorConfig], Placed] = {}
        self._reshards: dict[tuple[int, int, int], Reshard] = {}
        self._weights: dict[tuple[tuple[int, ...], tuple[bool, ...], bool, int], WeightPlan] = {}
        self._parameters = graph.of_kind("parameter")
        self.weight_types = {dtype: k for k, dtype in enumerate(sorted({t.dtype for t in self._parameters}))}
        """Numbers of the dtypes of weights."""
        users = Counter(topology.processor_of)
        self.turns = [TURN_S if users[processor] > 1 else inf for processor in topology.processor_of]
        self._buckets: dict[int, dict[str, int]] = {}
        self._templates: dict[str, Templates] = {}
        self._plan_rows: tuple[tuple[Options, Stages], PlanRows] | None = None
        """Of the last strategy that was lowered."""

    def _splitter(self, op: Operator) -> Splitter:
        """Operators of the same form share one."""
        inputs, outputs = (tuple(tuple(self.graph.tensor[n].shape) for n in names) for names in (op.inputs, op.outputs))
        key = op.pattern, op.axes, inputs, outputs
        if key not in self._splitters:
            self._splitters[key] = Splitter(op, inputs, outputs, self.layouts, self._intervals)
        return self._splitters[key]

    def lower(
        self, configs: Sequence[OperatorConfig], options: Options, stages: Stages | None = None
    ) -> Lowered:
        """Lower one strategy, given as a config for each operator in order (assumed legal). ``stages``: how the step is
        cut; by default, not at all. With several microbatches, the graph is that of one."""
        return _Assembly(self, configs, options, stages or Stages.one(len(self.topology.devices))).finish()

    def rows(self, configs: Sequence[OperatorConfig], options: Options, stages: Stages) -> Rows:
        """The rows of a strategy."""
        from flexsearch.lower.plan import PlanRows  # it needs this module
        from flexsearch.lower.templates import Templates

        if options.optimizer not in self._templates:
            self._templates[options.optimizer] = Templates(self)
        key = options, stages
        if self._plan_rows is None or self._plan_rows[0] != key:
            self._plan_rows = key, PlanRows(self, self._templates[options.optimizer], options, stages)
        plan_rows = self._plan_rows[1]
        plan_rows.set(dict(enumerate(configs)))
        return plan_rows.copy()

    def placed(self, operator: int, config: OperatorConfig) -> Placed:
        """The pieces of an operator under a config, with their costs."""
        key = operator, config
        if (known := self._placed.get(key)) is None:
            known = self._placed[key] = Placed(
                self._splitter_of[operator], config,
                lambda split, device: self.costs.pieces(operator, split.extents, split.extent_of, device),
            )  # fmt: skip
        return known

    def split(self, operator: int, config: OperatorConfig) -> Split:
        """The pieces of an operator under a config, wherever they are."""
        return self._splitter_of[operator].split(config)

    def intern(self, layout: Layout) -> int:
        """A small number for a layout; equal layouts have the same."""
        return self.layouts.intern(layout).number

    def layout(self, number: int) -> Layout:
        """The layout of a number."""
        return self.layouts[number].entries

    def reshard(self, source: int, destination: int, itemsize: int) -> Reshard:
        """Cached reshard between interned layouts."""
        key = source, destination, itemsize
        if (known := self._reshards.get(key)) is None:
            known = Reshard(self.planner, self.layouts[source], self.layouts[destination], itemsize)
            self._reshards[key] = known
        return known

    def _between(self, source: Laid, destination: Laid, itemsize: int) -> Reshard:
        return self.reshard(source.number, destination.number, itemsize)

    def weight(self, tensor: Tensor, needs: tuple[int, ...], trained: Sequence[bool], shard: bool) -> WeightPlan:
        """Cached plan of a parameter whose edges want the given layouts. Equal layers share theirs."""
        key = needs, tuple(trained), shard, tensor.itemsize
        if (known := self._weights.get(key)) is None:
            layouts = [self.layouts[n] for n in needs]
            known = self._weights[key] = plan_weight(
                layouts, trained, shard, tensor.itemsize, self.planner, self.layouts, self._between
            )
        return known

    def buckets(self, bucket_bytes: int) -> dict[str, int]:
        """Parameter -> number of its synchronisation bucket, of plans of one stage."""
        if (known := self._buckets.get(bucket_bytes)) is None:
            known = self._buckets[bucket_bytes] = buckets_of(self.graph, bucket_bytes)
        return known


def lower(graph: OperatorGraph, strategy: Strategy, topology: Topology, costs: Costs) -> Lowered:
    """Lower a strategy after checking it. Raises StrategyError if it does not belong to graph and topology."""
    strategy.check_supported(graph, topology)
    return Lowering(graph, topology, costs).lower(strategy.in_order(graph), strategy.options)


def everywhere(topology: Topology) -> Layout:
    """Layout of the loss: every device gets it."""
    return tuple(Entry(device, (), 0) for device in range(len(topology.devices)))


def kept(reads: Iterable[Layout]) -> Layout:
    """Layout of a buffer's new value: every region that a reader of the buffer wants, once on each device."""
    return tuple({(entry.device, entry.box): entry for read in reads for entry in read}.values())


class _Assembly:
    """Puts the edges and weights of one strategy together."""

    def __init__(
        self, lowering: Lowering, configs: Sequence[OperatorConfig], options: Options, stages: Stages
    ) -> None:
        self.lowering, self.graph, self.topology = lowering, lowering.graph, lowering.topology
        self.options, self.stages = options, stages
        self.configs = tuple(configs)
        self.placed = tuple(lowering.placed(i, config) for i, config in enumerate(configs))
        self.edges: list[Edge] = []
        self.edge_of: dict[tuple[int, int], int] = {}
        self.edges_of: dict[str, tuple[int, ...]] = {}
        self.weights: list[Weight] = []
        self.update_edges: dict[str, int] = {}

    def finish(self) -> Lowered:
        self._check_stages()
        self._connect()
        rows = self.lowering.rows(self.configs, self.options, self.stages)
        return Lowered(
            self.lowering, self.graph, self.topology, self.options, self.configs, self.placed, tuple(self.edges),
            tuple(self.weights), self.edges_of, self.edge_of, self.loss_edge, self.update_edges, self.stages,
            self.lowering.turns, rows,
        )  # fmt: skip

    def _check_stages(self) -> None:
        for i, stage in enumerate(self.stages.of(len(self.configs))):
            if outside := set(self.configs[i].devices) - set(self.stages.devices[stage]):
                raise StrategyError(
                    f"operator {self.graph.operators[i].name!r} is placed on device {min(outside)}, on which its stage "
                    f"{stage} is not",
                    "Place it on devices of its stage, or give the stage more devices.",
                )

    def _connect(self) -> None:
        """Make the edges: readers of a tensor that want the same layout share one."""
        graph = self.graph
        for tensor in graph.tensors:
            groups: dict[tuple[int, bool], list[tuple[int, int]]] = {}
            flows = tensor.name in graph.differentiable
            for operator, position in graph.consumers[tensor.name]:
                key = self.placed[operator].reads[position].number, flows and graph.has_backward[operator]
                groups.setdefault(key, []).append((operator, position))
            if tensor.kind == "parameter":
                self._connect_weight(tensor, groups)
            else:
                self.edges_of[tensor.name] = tuple(
                    self._add_edge(self._edge(tensor, tuple(readers), *key)) for key, readers in groups.items()
                )
        self.loss_edge = self._result_edge(graph.loss, everywhere(self.topology))
        for buffer, name in graph.buffer_updates.items():
            reads = [self.placed[o].reads[p].entries for o, p in graph.consumers[buffer]]
            self.update_edges[buffer] = self._result_edge(name, kept(reads))

    def _result_edge(self, name: str, need: Layout) -> int:
        """Edge without readers: it brings a result (the loss, a buffer's new value) to where it is kept."""
        tensor, number = self.graph.tensor[name], self.lowering.intern(need)
        index = self._add_edge(self._edge(tensor, (), number, False))
        self.edges_of[name] = (*self.edges_of[name], index)
        return index

    def _add_edge(self, edge: Edge) -> int:
        for reader in edge.readers:
            self.edge_of[reader] = len(self.edges)
        self.edges.append(edge)
        return len(self.edges) - 1

    def _edge(self, tensor: Tensor, readers: tuple[tuple[int, int], ...], need: int, flows: bool) -> Edge:
        lowering, layout = self.lowering, self.lowering.layout(need)
        if tensor.kind != "activation":
            return Edge(tensor.name, readers, layout, None, None)
        producer = self.graph.producer[tensor.name]
        made = self.placed[producer].writes[self.graph.operators[producer].outputs.index(tensor.name)].number
        forward = lowering.reshard(made, need, tensor.itemsize)
        backward = lowering.reshard(need, made, tensor.itemsize) if flows else None
        return Edge(tensor.name, readers, layout, forward, backward)

    def _connect_weight(self, tensor: Tensor, groups: Mapping[tuple[int, bool], list[tuple[int, int]]]) -> None:
        shard = any(self.configs[o].shard_weights for readers in groups.values() for o, _ in readers)
        needs = tuple(need for need, _ in groups)
        plan = self.lowering.weight(tensor, needs, [flows for _, flows in groups], shard)
        indices = tuple(
            self._add_edge(Edge(tensor.name, tuple(readers), self.lowering.layout(need), plan.forward[k], None))
            for k, ((need, _), readers) in enumerate(groups.items())
        )
        self.edges_of[tensor.name] = indices
        self.weights.append(Weight(tensor.name, indices, plan))
