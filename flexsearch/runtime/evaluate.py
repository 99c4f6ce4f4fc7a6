"""The forward pass alone, for predictions: the operators of a model in any mode and at any batch, split as the plan of
its training splits them.

One operator after the other in the order of the graph, each with what it needs brought to it before. Nothing overlaps,
so it takes longer than the forward part of a training step; it reads the very weights that are trained.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from flexsearch.cost import Costs
from flexsearch.errors import RuntimeFailure, StrategyError
from flexsearch.graph import Operator, OperatorGraph
from flexsearch.graph.importer import Imported
from flexsearch.graph.ops import KernelContext, build_kernel
from flexsearch.graph.ops.calls import dtype_of
from flexsearch.graph.ops.local import preferred
from flexsearch.lower import Entry, Layout
from flexsearch.lower.pieces import Pieces
from flexsearch.runtime.feed import Feed
from flexsearch.runtime.regions import Mover, everywhere, whole
from flexsearch.runtime.stored import Stored
from flexsearch.strategy import OperatorConfig, Strategy, make_config
from flexsearch.strategy.config import check_config


def fitted(graph: OperatorGraph, strategy: Strategy) -> tuple[OperatorConfig, ...]:
    """Configs for a graph that is not quite the one of the strategy: at another batch, or in another mode. An operator
    of the same name is split as there, into fewer parts where an axis is too short. Another one is split over samples
    as the one before it."""
    count = len(strategy.cluster.devices)
    configs: list[OperatorConfig] = []
    stages = {name: stage for stage in strategy.stages for name in stage.operators}
    for op in graph.operators:
        config = strategy.configs.get(op.name)
        if config is not None:
            stage = stages[op.name]
            config = _all_replicas(op, config, stage.replicas, len(stage.mesh) // stage.replicas, stage.mesh)
        fit = None if config is None else _shortened(op, config, count)
        configs.append(fit or _like(op, configs[-1] if configs else None, count))
    return tuple(configs)


def _all_replicas(
    op: Operator, config: OperatorConfig, replicas: int, size: int, mesh: Sequence[int]
) -> OperatorConfig:
    """A config on the devices of every replica of its stage: each takes a part of the samples."""
    if replicas == 1:
        return config
    place = {device: k for k, device in enumerate(mesh[:size])}
    devices = tuple(mesh[place[d] + k * size] for k in range(replicas) for d in config.devices)
    axis = next((a for a in op.axes_of("sample") if a == next(iter(op.sizes))), None)
    degrees = dict(config.degrees)
    if axis is None or degrees.get(axis, 1) * replicas > op.sizes[axis]:
        return config
    return make_config(op, {**degrees, axis: degrees.get(axis, 1) * replicas}, devices, config.states)


def _shortened(op: Operator, config: OperatorConfig, count: int) -> OperatorConfig | None:
    """A config with no more parts than an axis has indices; None if the operator cannot be split so."""
    if not all(axis in op.splittable for axis, _ in config.degrees):
        return None
    degrees = {axis: min(parts, op.sizes[axis]) for axis, parts in config.degrees}
    grid = np.array(config.devices).reshape(*(parts for _, parts in config.degrees), config.replicas)
    kept = grid[tuple(slice(parts) for parts in degrees.values())]
    fit = make_config(op, degrees, kept.reshape(-1).tolist(), config.states, dict(config.shares))
    try:
        check_config(op, fit, count)
    except StrategyError:
        return None
    return fit


def _like(op: Operator, before: OperatorConfig | None, count: int) -> OperatorConfig:
    """An operator that the plan does not know, over samples on the devices of the one before it."""
    devices = before.devices if before is not None else tuple(range(count))
    axis = next(iter(op.axes_of("sample")), None)
    degrees = {axis: min(len(devices), op.sizes[axis])} if axis is not None else {}
    parts = max(degrees.values(), default=1)
    return make_config(op, degrees, devices[:parts])


class _Move(NamedTuple):
    """Bring a tensor to the readers of a layout. ``entry``: its index on this rank; None: it gets nothing."""

    name: str
    key: tuple[str, int]
    mover: Mover
    entry: int | None


class _Run(NamedTuple):
    """Run an operator's piece on this rank."""

    operator: Operator
    kernel: Callable[..., Tensor | tuple[Tensor, ...]]
    operands: tuple[tuple[str, int] | None, ...]


class Forward:
    """The forward pass of ``imported`` (``import_forward``) on this rank, for ``batch`` samples. ``everything``: every
    rank gets the outputs of the whole batch, not of its own samples alone."""

    def __init__(
        self, imported: Imported, strategy: Strategy, stored: Stored, feed: Feed, batch: int, context: KernelContext,
        everything: bool,
    ) -> None:  # fmt: skip
        self.imported, self.graph, self.stored, self.feed, self.batch = imported, imported.graph, stored, feed, batch
        self.rank, self.context = stored.rank, context
        graph, cluster = self.graph, strategy.cluster
        self._ranks = len(cluster.devices)
        pieces = Pieces(graph, cluster, Costs(graph, cluster))
        self._live = _ancestors(graph, imported.outputs)
        configs = fitted(graph, strategy)
        self._placed = {i: pieces.placed(i, configs[i]) for i in self._live}
        self._sources: dict[str, Layout] = {}
        self.steps: list[_Move | _Run] = []
        moved: set[tuple[str, int]] = set()
        for i in self._live:
            self._add(i, moved)
        self._results = [self._result(name, k, everything) for k, name in enumerate(imported.outputs)]
        self._last = self._last_uses()

    @property
    def inputs(self) -> set[str]:
        """Names of the inputs that the outputs depend on."""
        return {name for i in self._live for name in self.graph.operators[i].inputs
                if self.graph.tensor[name].kind == "input"}  # fmt: skip

    def run(self, named: Mapping[str, Tensor]) -> list[Tensor]:
        """The model's outputs. ``named``: this rank's inputs; those that run over the batch are cut to its samples."""
        values: dict[str, dict[int, Tensor]] = {}
        brought: dict[tuple[str, int], Tensor] = {}
        device = self.stored.device
        for name in self.inputs:
            layout = self._source(name)
            own = [k for k, entry in enumerate(layout) if entry.device == self.rank]
            if own and name in named:
                _, part = self.feed.region(name, named[name], self.rank, self.batch, device, own=True)
                values[name] = {own[0]: part}
            elif own:
                raise RuntimeFailure(f"rank {self.rank} needs {name} for its samples; pass it to forward")
        for position, step in enumerate(self.steps):
            if isinstance(step, _Move):
                result = step.mover.run(self._values(step.name, values), device)
                if step.entry is not None:
                    brought[step.key] = preferred(result[step.entry])
            else:
                made = step.kernel(*[None if key is None else brought[key] for key in step.operands])
                for name, tensor in zip(
                    step.operator.outputs, made if isinstance(made, tuple) else (made,), strict=True
                ):
                    own = [k for k, entry in enumerate(self._source(name)) if entry.device == self.rank]
                    values[name] = {own[0]: tensor}
            for key in self._last.get(position, ()):
                brought.pop(key, None) if isinstance(key, tuple) else values.pop(key, None)
        return [
            mover.run(self._values(name, values), device)[index]
            for name, mover, index in self._results
        ]  # fmt: skip

    # ---- set-up

    def _source(self, name: str) -> Layout:
        """Where a tensor lies before it is read."""
        if name not in self._sources:
            self._sources[name] = self._find(name)
        return self._sources[name]

    def _find(self, name: str) -> Layout:
        spec = self.graph.tensor[name]
        if spec.kind == "activation":
            producer = self.graph.producer[name]
            return self._placed[producer].writes[self.graph.operators[producer].outputs.index(name)].entries
        if spec.kind == "input":
            return self.feed.layout(name, spec.shape, self.batch)
        if name in self.stored.layouts:
            return tuple(Entry(entry.device, entry.box, 0) for entry in self.stored.layouts[name])
        return everywhere(spec.shape, self._ranks)

    def _add(self, i: int, moved: set[tuple[str, int]]) -> None:
        """The moves that operator ``i`` waits for, and its run."""
        op, placed = self.graph.operators[i], self._placed[i]
        for name, read in zip(op.inputs, placed.reads, strict=True):
            key = name, read.number
            if key not in moved:
                moved.add(key)
                self.steps.append(_Move(name, key, *self._mover(name, read.entries)))
        if self.rank in placed.placement.devices:
            piece = placed.placement.piece_on(self.rank)
            kernel = build_kernel(op, piece, [self.graph.tensor[n].shape for n in op.inputs], self.context)
            operands = tuple(
                None if region is None else (name, read.number)
                for name, read, region in zip(op.inputs, placed.reads, piece.inputs, strict=True)
            )
            self.steps.append(_Run(op, kernel, operands))

    def _mover(self, name: str, need: Layout) -> tuple[Mover, int | None]:
        source = self._source(name)
        mover = Mover(source, need, self.rank, dtype_of(self.graph.tensor[name].dtype))
        return mover, next((k for k, entry in enumerate(need) if entry.device == self.rank), None)

    def _result(self, name: str, number: int, everything: bool) -> tuple[str, Mover, int]:
        """How an output gets to this rank: its own samples of it, if it runs over the batch."""
        spec = self.graph.tensor[name]
        need = everywhere(spec.shape, self._ranks)
        rows = _rows_of_output(self.graph, name)
        if rows and not everything:
            ranges = [self.feed.range_of(rank, self.batch) for rank in range(self._ranks)]
            need = tuple(
                Entry(rank, ((low * rows, high * rows), *whole(spec.shape[1:])), 0)
                for rank, (low, high) in enumerate(ranges)
            )
        return name, Mover(self._source(name), need, self.rank, dtype_of(spec.dtype)), self.rank

    def _values(self, name: str, values: Mapping[str, dict[int, Tensor]]) -> dict[int, Tensor]:
        """This rank's entries of a tensor."""
        if name in values:
            return values[name]
        kind, stored = self.graph.tensor[name].kind, self.stored
        if kind in ("parameter", "buffer") and name in stored.layouts:
            return stored.entries(name)
        if kind in ("parameter", "buffer"):
            values_of = stored.counters.get(name, stored.other.get(name))
            return {} if values_of is None else {self.rank: values_of.to(stored.device)}
        if kind == "constant":
            return {self.rank: stored.constant(self.imported, name).to(stored.device)}
        return {}

    def _last_uses(self) -> dict[int, list[str | tuple[str, int]]]:
        """Position of a step -> what no later one reads."""
        last: dict[str | tuple[str, int], int] = {}
        for position, step in enumerate(self.steps):
            if isinstance(step, _Move):
                last[step.name] = last[step.key] = position
            else:
                last.update((key, position) for key in step.operands if key is not None)
                last.update((name, position) for name in step.operator.outputs)
        for name in self.imported.outputs:
            last.pop(name, None)
        result: dict[int, list[str | tuple[str, int]]] = {}
        for key, position in last.items():
            result.setdefault(position, []).append(key)
        return result


def _ancestors(graph: OperatorGraph, names: Sequence[str]) -> list[int]:
    """The operators that tensors depend on, in order."""
    needed, found = set(names), []
    for i in reversed(range(len(graph.operators))):
        op = graph.operators[i]
        if needed.intersection(op.outputs):
            needed.update(op.inputs)
            found.append(i)
    return found[::-1]


def _rows_of_output(graph: OperatorGraph, name: str) -> int:
    """Rows that a sample has in a tensor; 0 if its first dimension does not run over the batch."""
    shape = graph.tensor[name].shape
    if name not in graph.producer or not shape or shape[0] % graph.batch:
        return 0
    op = graph.operators[graph.producer[name]]
    axes = op.access.outputs[op.outputs.index(name)].dimensions[0].axes
    return shape[0] // graph.batch if axes and op.roles[axes[0]] == "sample" else 0
