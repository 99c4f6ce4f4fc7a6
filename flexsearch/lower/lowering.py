"""Graph x strategy x topology -> pieces, edges and weights, and the rows of what every device does.

What there is decides :mod:`flexsearch.lower.pieces`, when it happens :mod:`flexsearch.lower.schedule`; the rows are
written by :mod:`flexsearch.lower.emit`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from flexsearch.cost import Costs
from flexsearch.errors import StrategyError
from flexsearch.graph import Flow, OperatorGraph, Tensor
from flexsearch.lower.bucket import added_before, bucket_of
from flexsearch.lower.folding import Fold, fold
from flexsearch.lower.layout import Layout
from flexsearch.lower.pieces import Edge, Pieces, Placed, Weight, kept
from flexsearch.lower.plan import PlanRows
from flexsearch.lower.program import sums_of
from flexsearch.lower.recipe_rows import with_recipes
from flexsearch.lower.recipes import RecipeGroup, cycle, recipe_groups
from flexsearch.lower.rows import Rows
from flexsearch.lower.schedule import Stages
from flexsearch.lower.share import share_of, stages_of
from flexsearch.lower.templates import Templates
from flexsearch.lower.view import Described
from flexsearch.strategy import OperatorConfig, Options, Sharding, Strategy
from flexsearch.strategy.config import check_config
from flexsearch.strategy.pipeline import Pipeline
from flexsearch.topology import Topology


@dataclass(frozen=True)
class Lowered(Described):
    """Everything that simulator and runtime need. ``lowering`` made it. ``placed[i]`` belongs to operator i;
    ``edges_of[name]``: edges of a tensor; ``result_edges``: tensor -> edge that brings it to where it is wanted, the
    loss to every device; ``update_edges``: buffer -> edge of its new value. ``rows``: what every device does, in order;
    ``plain_rows``: the same without recipes. With several microbatches, ``graph`` is that of one."""

    lowering: Lowering
    options: Options
    placed: tuple[Placed, ...]
    edges_of: Mapping[str, tuple[int, ...]]
    plain_rows: Rows

    def moved(self, purpose: str, key: int) -> Tensor:
        """What a communication moves: the tensor of an edge, or the gradient of a weight as it is held."""
        if purpose == "synchronise":
            return self.graph.gradient[self.weights[key].tensor]
        return self.graph.tensor[self.edges[key].tensor]

    def exchanged(self, weight: int) -> tuple[int, int]:
        """The block that sends first phases of the gradients of a weight, and the one before which ranks add what all
        phases bring."""
        blocks, sharding = self.plain_rows.blocks, Sharding(self.weights[weight].plan.states).rank
        bucket = bucket_of(blocks, sharding, weight)
        return int(blocks.started_by[bucket]), int(added_before(blocks, sharding, bucket))

    @property
    def asynchronous(self) -> bool:
        """Whether some devices go by themselves."""
        return any(group.recipe.asynchronous is not None for group in self.recipe_groups)

    @cached_property
    def recipe_groups(self) -> tuple[RecipeGroup, ...]:
        """Replicas that synchronise by a recipe. Raises StrategyError or RecipeError if some cannot."""
        return recipe_groups(self)

    def at_step(self, step: int) -> Lowered:
        """The same with the rows that recipes have in a step (0: the first)."""
        return replace(self, rows=with_recipes(self, self.plain_rows, step)) if self.options.recipes else self

    @cached_property
    def digest(self) -> str:
        """Of the tasks: what is computed and communicated, by whom and in which order. Ranks whose digests agree fit
        each other."""
        digest, tasks = hashlib.sha256(), self.tasks
        for task, what in enumerate(tasks.communication):
            moved: list[object] = []
            if what is not None:
                moved += [what.purpose, what.form, what.devices, what.senders, what.receivers]
                moved += [(m.key, m.phase, m.exchange, m.what.box, m.what.moves) for m in what.members]
            row = [int(column[task]) for column in (tasks.kind, tasks.operator, tasks.device, tasks.microbatch)]
            digest.update(repr((row, moved)).encode())
        return digest.hexdigest()[:16]

    @property
    def batch_graph(self) -> OperatorGraph:
        """The graph of the whole batch."""
        return self.lowering.batch_graph

    @property
    def is_whole(self) -> bool:
        """Whether the step is cut neither into stages, nor microbatches, nor equal blocks of devices."""
        return len(self.stages) == self.stages.microbatches == self.lowering.replicas == 1

    @property
    def batch(self) -> int:
        """Samples of a step, all microbatches of all blocks together."""
        return self.graph.batch * self.stages.microbatches * self.lowering.replicas

    @cached_property
    def devices(self) -> tuple[int, ...]:
        """Devices that compute anything."""
        return tuple(sorted({d for config in self.configs for d in config.devices}))


class Lowering(Pieces):
    """Lowers strategies of one graph on one topology."""

    def __init__(
        self, graph: OperatorGraph, topology: Topology, costs: Costs, fold: Fold | None = None,
        batch_graph: OperatorGraph | None = None, results: Mapping[str, Layout] | None = None, reads: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(graph, topology, costs, fold, results, reads)
        self.batch_graph = batch_graph or graph
        """Of the whole batch, where ``graph`` is that of one microbatch."""
        self._plan_rows: tuple[tuple[Options, Stages], PlanRows] | None = None
        """Of the last strategy whose rows were asked for."""
        self._at_hand: tuple[OperatorConfig, ...] = ()
        """Its configs."""

    @cached_property
    def _templates(self) -> Templates:
        """They do not depend on options."""
        return Templates(self)

    def lower(
        self, configs: Sequence[OperatorConfig], options: Options, stages: Stages | None = None
    ) -> Lowered:
        """Lower one strategy, given as a config for each operator in order (assumed legal). ``stages``: how the step is
        cut; by default, not at all. With several microbatches, the graph is that of one."""
        return _Assembly(self, configs, options, stages or Stages.one(len(self.topology.devices))).finish()

    def plan_rows(self, configs: Sequence[OperatorConfig], options: Options, stages: Stages) -> PlanRows:
        """The rows of a strategy with the templates that they are made of, until another one is asked for."""
        key, plan = (options, stages), tuple(configs)
        if self._plan_rows is None or self._plan_rows[0] != key:
            self._plan_rows, self._at_hand = (key, PlanRows(self, self._templates, options, stages)), ()
        plan_rows = self._plan_rows[1]
        if self._at_hand != plan:
            self._at_hand = ()
            plan_rows.set(dict(enumerate(plan)))
            self._at_hand = plan
        return plan_rows

    def rows(self, configs: Sequence[OperatorConfig], options: Options, stages: Stages) -> Rows:
        """The rows of a strategy."""
        return self.plan_rows(configs, options, stages).copy()


def lower(
    graph: OperatorGraph, strategy: Strategy, topology: Topology, costs: Costs, reads: bool = True
) -> Lowered:
    """Lower a strategy after checking it, in its precision: of one with stages or microbatches, what one block of
    devices does with one microbatch (``lower.share``). ``reads``: with what is read from storage. A plan with recipes
    is lowered for all devices. Raises StrategyError if it does not belong to graph and topology or cannot be divided
    so."""
    strategy.check(graph, topology)
    batch_graph = graph
    graph = strategy.options.typed(strategy.planned(graph))
    configs = strategy.in_order(graph)
    if strategy.options.recipes and Pipeline.of(strategy, graph).replicas > 1:
        return lower_for_ranks(batch_graph, strategy, topology, costs, reads)
    if strategy.is_plain:
        if graph is not costs.graph:
            costs = Costs(graph, topology, costs.profile)
        return Lowering(graph, topology, costs, reads=reads).lower(configs, strategy.options)
    pipeline = Pipeline.of(strategy, graph)
    share = share_of(graph, topology, pipeline.replicas, pipeline.microbatches)
    for op, config in zip(share.graph.operators, configs, strict=True):
        check_config(op, config, len(share.topology.devices))  # a microbatch has fewer samples than the batch
    own = Costs(share.graph, share.topology, costs.profile)
    lowering = Lowering(share.graph, share.topology, own, share.fold, graph, reads=reads)
    return lowering.lower(configs, strategy.options, stages_of(pipeline))


def lower_for_ranks(
    graph: OperatorGraph, strategy: Strategy, topology: Topology, costs: Costs, reads: bool = False
) -> Lowered:
    """As :func:`lower`, with the pieces of all blocks of devices, each of which a rank runs, and by default without
    reading, which is the training loop's. Raises StrategyError."""
    pipeline = Pipeline.of(strategy, strategy.planned(graph))
    if pipeline.replicas == 1:
        return lower(graph, strategy, topology, costs, reads)
    strategy.check(graph, topology)
    graph = strategy.options.typed(strategy.planned(graph))
    parts = fold(graph, topology, pipeline.replicas, pipeline.microbatches)
    part = share_of(graph, topology, 1, pipeline.microbatches).graph
    configs = parts.unfold(strategy.in_order(graph))
    for op, config in zip(part.operators, configs, strict=True):
        check_config(op, config, len(topology.devices))
    stages = stages_of(pipeline.unfolded(parts.devices))
    lowering = Lowering(part, topology, Costs(part, topology, costs.profile), batch_graph=graph, reads=reads)
    return lowering.lower(configs, strategy.options, stages)


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
        self.result_edges: dict[str, int] = {}
        self.update_edges: dict[str, int] = {}

    def finish(self) -> Lowered:
        self._check_stages()
        self._connect()
        rows = self.lowering.rows(self.configs, self.options, self.stages)
        lowered = Lowered(
            lowering=self.lowering, graph=self.graph, topology=self.topology, options=self.options,
            configs=self.configs, placed=self.placed, edges=tuple(self.edges), weights=tuple(self.weights),
            edges_of=self.edges_of, edge_of=self.edge_of, result_edges=self.result_edges,
            update_edges=self.update_edges, stages=self.stages, rows=rows, plain_rows=rows,
        )  # fmt: skip
        if not self.options.recipes:
            return lowered
        # The step of the cycle in which most is exchanged stands for the others.
        steps = [lowered.at_step(step) for step, _ in cycle(lowered.recipe_groups)]
        return max(steps, key=lambda one: sum(len(b.exchanges) for b in one.rows.recipes.values()))

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
            groups: dict[tuple[int, Flow], list[tuple[int, int]]] = {}
            for operator, position in graph.consumers[tensor.name]:
                key = self.placed[operator].reads[position].number, graph.flows[operator][position]
                groups.setdefault(key, []).append((operator, position))
            if tensor.kind == "parameter" and groups:  # a model may return one that no operator reads
                self._connect_weight(tensor, groups)
            else:
                self.edges_of[tensor.name] = tuple(
                    self._add_edge(self._edge(tensor, tuple(readers), *key)) for key, readers in groups.items()
                )
        for name, need in self.lowering.results.items():
            self.result_edges[name] = self._result_edge(name, need)
        for buffer, name in graph.buffer_updates.items():
            reads = [self.placed[o].reads[p].entries for o, p in graph.consumers[buffer]]
            self.update_edges[buffer] = self._result_edge(name, kept(reads))

    def _result_edge(self, name: str, need: Layout) -> int:
        """Edge without readers: it brings a result (the loss, a buffer's new value) to where it is kept."""
        tensor, number = self.graph.tensor[name], self.lowering.intern(need)
        index = self._add_edge(self._edge(tensor, (), number, Flow.VALUE))
        self.edges_of[name] = (*self.edges_of[name], index)
        return index

    def _add_edge(self, edge: Edge) -> int:
        for reader in edge.readers:
            self.edge_of[reader] = len(self.edges)
        self.edges.append(edge)
        return len(self.edges) - 1

    def _edge(self, tensor: Tensor, readers: tuple[tuple[int, int], ...], need: int, flow: Flow) -> Edge:
        lowering, layout = self.lowering, self.lowering.layout(need)
        if tensor.kind != "activation":
            return Edge(tensor.name, readers, layout, None, None)
        producer = self.graph.producer[tensor.name]
        written = self.placed[producer].writes[self.graph.operators[producer].outputs.index(tensor.name)].number
        forward = lowering.reshard(written, need, tensor.itemsize) if flow != Flow.GRADIENT else None
        backward = lowering.reshard(need, written, tensor.itemsize) if flow != Flow.VALUE else None
        return Edge(tensor.name, readers, layout, forward, backward)

    def _connect_weight(self, tensor: Tensor, groups: Mapping[tuple[int, Flow], list[tuple[int, int]]]) -> None:
        sharding = max((self.configs[o].sharding.rank for readers in groups.values() for o, _ in readers), default=0)
        needs = tuple(need for need, _ in groups)
        plan = self.lowering.weight(tensor, needs, [flow for _, flow in groups], sharding, sums_of(self.options))
        indices = tuple(
            self._add_edge(Edge(tensor.name, tuple(readers), self.lowering.layout(need), plan.forward[k], None))
            for k, ((need, _), readers) in enumerate(groups.items())
        )
        self.edges_of[tensor.name] = indices
        self.weights.append(Weight(tensor.name, indices, plan))
