"""Graph x strategy x topology -> task graph. The one place that decides which piece of which operator runs where, what
must move in between, and in which order every device does its part.

The order is the graph's topological order for the forward tasks, its reverse for the backward ones, then the updates.
A communication stands right after the tasks whose data it carries, so every rank issues its part as soon as it can, and
in the same order as every other rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf

import numpy as np

from flexsearch.compiled import F64, U32
from flexsearch.cost import Costs
from flexsearch.cost.communication import Transfer
from flexsearch.graph import Operator, OperatorGraph, Tensor, volume
from flexsearch.lower.layout import Entry, Laid, Layout, Layouts, Placement
from flexsearch.lower.reshard import Exchange, Planner, Reshard
from flexsearch.lower.split import Intervals, Split, Splitter
from flexsearch.lower.taskgraph import Communication, Member, Purpose, TaskGraph, TaskKind
from flexsearch.lower.weights import WeightPlan, plan_weight
from flexsearch.strategy import OperatorConfig, Options, Strategy
from flexsearch.topology import Topology

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
    """Everything that simulator and runtime need. ``placed[i]`` belongs to operator i; ``edges_of[name]``: edges of a
    tensor; ``loss_edge``: brings the loss to every device; ``update_edges``: buffer -> edge of its new value."""

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
    tasks: TaskGraph

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
        self.layouts, self.planner = Layouts(), Planner(topology)
        self._splitters: dict[object, Splitter] = {}
        self._intervals: Intervals = {}
        self._splitter_of = [self._splitter(op) for op in graph.operators]
        self._placed: dict[tuple[int, OperatorConfig], Placed] = {}
        self._reshards: dict[tuple[int, int, int], Reshard] = {}
        self._weights: dict[tuple[tuple[int, ...], tuple[bool, ...], bool, int], WeightPlan] = {}
        self._parameters = graph.of_kind("parameter")
        users = Counter(topology.processor_of)
        self.turns = [TURN_S if users[processor] > 1 else inf for processor in topology.processor_of]
        self._buckets: dict[int, dict[str, int]] = {}

    def _splitter(self, op: Operator) -> Splitter:
        """Operators of the same form share one."""
        inputs, outputs = (tuple(tuple(self.graph.tensor[n].shape) for n in names) for names in (op.inputs, op.outputs))
        key = op.pattern, op.axes, inputs, outputs
        if key not in self._splitters:
            self._splitters[key] = Splitter(op, inputs, outputs, self.layouts, self._intervals)
        return self._splitters[key]

    def lower(self, configs: Sequence[OperatorConfig], options: Options) -> Lowered:
        """Lower one strategy, given as a config for each operator in order (assumed legal)."""
        return _Assembly(self, configs, options).finish()

    def placed(self, operator: int, config: OperatorConfig) -> Placed:
        """The pieces of an operator under a config, with their costs."""
        key = operator, config
        if (known := self._placed.get(key)) is None:
            known = self._placed[key] = Placed(
                self._splitter_of[operator], config,
                lambda split, device: self.costs.pieces(operator, split.extents, split.extent_of, device),
            )  # fmt: skip
        return known

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
        """Parameter -> number of its synchronisation bucket. Buckets are filled in the order in which the backward pass
        finishes the gradients, from the whole sizes of the weights, so that they do not depend on any config."""
        if (known := self._buckets.get(bucket_bytes)) is None:
            first = {t.name: min((i for i, _ in self.graph.consumers[t.name]), default=-1) for t in self._parameters}
            known, bucket, filled = {}, 0, 0
            for tensor in sorted(self._parameters, key=lambda t: -first[t.name]):
                if filled and filled + tensor.nbytes > bucket_bytes:
                    bucket, filled = bucket + 1, 0
                known[tensor.name] = bucket
                filled += tensor.nbytes
            self._buckets[bucket_bytes] = known
        return known


def lower(graph: OperatorGraph, strategy: Strategy, topology: Topology, costs: Costs) -> Lowered:
    """Lower a strategy after checking it. Raises StrategyError if it does not belong to graph and topology."""
    strategy.check(graph, topology)
    return Lowering(graph, topology, costs).lower(strategy.in_order(graph), strategy.options)


def schedule(graph: OperatorGraph, bucket_of: Mapping[str, int]) -> list[tuple[int, list[list[int]]]]:
    """The backward pass: operators in reverse, each with the buckets (weights, by number among the parameters) whose
    last gradient is complete after it. It follows from the graph alone."""
    parameters = graph.of_kind("parameter")
    ready: dict[int, list[int]] = {}  # operator -> weights whose gradient is complete after its backward task
    missing: Counter[int] = Counter()
    for w, tensor in enumerate(parameters):
        readers = [o for o, _ in graph.consumers[tensor.name] if graph.has_backward[o]]
        if readers and tensor.name in graph.differentiable:
            ready.setdefault(min(readers), []).append(w)
            missing[bucket_of[tensor.name]] += 1
    order: list[tuple[int, list[list[int]]]] = []
    waiting: dict[int, list[int]] = {}
    for i in reversed(range(len(graph.operators))):
        if graph.has_backward[i]:
            complete = []
            for w in ready.get(i, ()):
                bucket = bucket_of[parameters[w].name]
                waiting.setdefault(bucket, []).append(w)
                missing[bucket] -= 1
                if not missing[bucket]:
                    complete.append(waiting.pop(bucket))
            order.append((i, complete))
    return order


def everywhere(topology: Topology) -> Layout:
    """Layout of the loss: every device gets it."""
    return tuple(Entry(device, (), 0) for device in range(len(topology.devices)))


def kept(reads: Iterable[Layout]) -> Layout:
    """Layout of a buffer's new value: every region that a reader of the buffer wants, once on each device."""
    return tuple({(entry.device, entry.box): entry for read in reads for entry in read}.values())


class _Assembly:
    """Puts the task graph of one strategy together."""

    def __init__(self, lowering: Lowering, configs: Sequence[OperatorConfig], options: Options) -> None:
        self.lowering, self.graph, self.topology = lowering, lowering.graph, lowering.topology
        self.options = options
        self.configs = tuple(configs)
        self.placed = tuple(lowering.placed(i, config) for i, config in enumerate(configs))
        self.edges: list[Edge] = []
        self.edge_of: dict[tuple[int, int], int] = {}
        self.edges_of: dict[str, tuple[int, ...]] = {}
        self.weights: list[Weight] = []
        self.update_edges: dict[str, int] = {}
        self.tasks = TaskGraph()
        self.last: dict[int, int] = {}
        self.arrived: dict[tuple[str, int], dict[int, list[int]]] = {}
        """(purpose, edge or weight) -> device -> communication tasks that deliver there."""

    def finish(self) -> Lowered:
        self._connect()
        self._forward()
        self._backward()
        self._update()
        return Lowered(
            self.graph, self.topology, self.options, self.configs, self.placed, tuple(self.edges), tuple(self.weights),
            self.edges_of, self.edge_of, self.loss_edge, self.update_edges, self.tasks,
        )  # fmt: skip

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

    def _forward(self) -> None:
        for weight in self.weights:
            for e, plan in zip(weight.edges, weight.plan.forward, strict=True):
                self._reshard("gather", e, plan)
        for i, op in enumerate(self.graph.operators):
            self._compute(TaskKind.FORWARD, i, self.placed[i].forward_s, "forward", [
                self.edge_of[i, p] for p in range(len(op.inputs))
            ])  # fmt: skip
            for name in op.outputs:
                for e in self.edges_of[name]:
                    forward = self.edges[e].forward
                    assert forward is not None
                    self._reshard("forward", e, forward)

    def _backward(self) -> None:
        later: list[int] = []
        for i, buckets in schedule(self.graph, self.lowering.buckets(self.options.bucket_bytes)):
            op = self.graph.operators[i]
            self._compute(TaskKind.BACKWARD, i, self.placed[i].backward_s, "backward", [
                e for name in op.outputs for e in self.edges_of[name] if self.edges[e].backward is not None
            ])  # fmt: skip
            for e in dict.fromkeys(self.edge_of[i, p] for p in range(len(op.inputs))):
                edge = self.edges[e]
                if edge.backward is not None and edge.readers[0][0] == i:
                    self._reshard("backward", e, edge.backward)
            for weights in buckets:
                later.extend(self._synchronise(weights))
        for w in later:  # second halves wait for the first; issued last so that they do not hold up the backward pass
            sync = self.weights[w].plan.sync
            assert sync is not None
            self._phase("synchronise", w, sync, 1)

    def _synchronise(self, weights: Sequence[int]) -> list[int]:
        """Emit the first phases of a bucket, exchanges of the same form, senders and receivers as one; returns the
        weights that have a second phase."""
        together: dict[tuple[str, tuple[int, ...], tuple[int, ...], str], list[Member]] = {}
        later = []
        for w in weights:
            sync = self.weights[w].plan.sync
            assert sync is not None
            for x, exchange in enumerate(sync.phase_exchanges[0]):
                dtype = self.graph.tensor[self.weights[w].tensor].dtype
                key = exchange.form, exchange.senders, exchange.receivers, dtype
                together.setdefault(key, []).append(Member(w, sync, 0, x))
            if len(sync.phase_exchanges) > 1:
                later.append(w)
        for members in together.values():
            self._communicate("synchronise", members)
        return later

    def _update(self) -> None:
        stored: dict[int, dict[int, int]] = {}
        for w, weight in enumerate(self.weights):
            if weight.plan.sync is not None:
                for device, box, _ in weight.plan.storage:
                    row = stored.setdefault(device, {})
                    row[w] = volume(box) * self.graph.tensor[weight.tensor].itemsize
        for device, row in sorted(stored.items()):
            after = [t for w in row for t in self.arrived.get(("synchronise", w), {}).get(device, ())]
            seconds = self.lowering.costs.update(sum(row.values()), len(row), device, self.options.optimizer)
            self._task(TaskKind.UPDATE, -1, device, seconds, after)

    def _compute(
        self, kind: TaskKind, operator: int, seconds: Sequence[float], purpose: str, edges: Sequence[int]
    ) -> None:
        purposes = ("forward", "gather") if purpose == "forward" else (purpose,)
        arrived = [self.arrived[p, e] for e in edges for p in purposes if (p, e) in self.arrived]
        for device, duration in zip(self.configs[operator].devices, seconds, strict=True):
            self._task(kind, operator, device, duration, [t for found in arrived for t in found.get(device, ())])

    def _task(self, kind: TaskKind, operator: int, device: int, seconds: float, after: list[int]) -> None:
        if device in self.last:
            after.append(self.last[device])
        self.last[device] = self.tasks.compute(
            kind, operator, device, self.topology.processor_of[device], seconds,
            sorted(set(after)) if len(after) > 1 else after, self.lowering.turns[device],
        )  # fmt: skip

    def _reshard(self, purpose: Purpose, key: int, plan: Reshard) -> None:
        if plan.exchanges:
            for phase in range(len(plan.phase_exchanges)):
                self._phase(purpose, key, plan, phase)

    def _phase(self, purpose: Purpose, key: int, plan: Reshard, phase: int) -> None:
        # What the previous phase delivered to the senders must be there, and only that.
        before = {device: tuple(tasks) for device, tasks in self.arrived.get((purpose, key), {}).items()}
        for x in range(len(plan.phase_exchanges[phase])):
            self._communicate(purpose, [Member(key, plan, phase, x)], before)

    def _communicate(
        self, purpose: Purpose, members: Sequence[Member], before: Mapping[int, Sequence[int]] | None = None
    ) -> None:
        exchanges = [member.what for member in members]
        one = exchanges[0]
        senders = tuple(sorted({d for x in exchanges for d in x.senders}))
        receivers = tuple(sorted({d for x in exchanges for d in x.receivers}))
        cost = one.transfer if len(exchanges) == 1 else self._bucket_cost(exchanges)
        what = Communication(
            purpose, one.form, one.devices, senders, receivers, tuple(members), cost, sum(x.nbytes for x in exchanges)
        )
        after = {self.last[d] for d in senders if d in self.last}
        for device in senders:
            after.update((before or {}).get(device, ()))
        task = self.tasks.communicate(what, sorted(after))
        for member in members:
            arrived = self.arrived.setdefault((purpose, member.key), {})
            for device in member.what.receivers:
                arrived.setdefault(device, []).append(task)

    def _bucket_cost(self, exchanges: Sequence[Exchange]) -> Transfer:
        one, pricing = exchanges[0], self.lowering.planner.pricing
        if pricing.by_group(one.form):
            return pricing.collective(one.form, one.devices, sum(x.amount for x in exchanges))
        start_s = max(x.start_s for x in exchanges)  # what goes to one device is one message
        return pricing.transfer(one.form, [message for x in exchanges for message in x.messages], start_s)
