"""A plan on another graph of its model, with the weights that are trained: a step on a smaller batch, the last one of a
data set, or a forward pass for predictions.

Such a graph is lowered, compiled and run as the plan's own (``lower.refit``). What is left to do here is to bring what
the plan's step leaves elsewhere: samples that another rank was fed, buffers that only evaluation reads in full.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from flexsearch.errors import RuntimeFailure
from flexsearch.graph import Box, OperatorGraph
from flexsearch.graph.export import Outputs
from flexsearch.graph.fold import derive
from flexsearch.graph.importer import Imported
from flexsearch.graph.ops import KernelContext
from flexsearch.graph.ops.calls import dtype_of
from flexsearch.graph.ops.local import extent, in_range
from flexsearch.lower import Entry, Layout, Lowered, refit, refit_forward
from flexsearch.runtime.engine import Engine
from flexsearch.runtime.feed import Feed
from flexsearch.runtime.parts import cut
from flexsearch.runtime.program import compile_program
from flexsearch.runtime.recipes.plan import without_synchronisation
from flexsearch.runtime.regions import Mover, everywhere, whole
from flexsearch.runtime.retrace import Source
from flexsearch.runtime.stored import Stored, layouts_of, needs_of
from flexsearch.runtime.wire import Wire


class Variant:
    """The step of ``lowered``, with ``batch`` samples. All ranks must make it together."""

    def __init__(
        self, imported: Imported, lowered: Lowered, stored: Stored, feed: Feed, batch: int, context: KernelContext,
        timeout_s: float, fuse: bool,
    ) -> None:  # fmt: skip
        self.stored, self.feed, self.batch, self.rank, self.graph = stored, feed, batch, stored.rank, imported.graph
        self.context = context
        self._layouts = layouts_of(lowered)
        self._moved = [name for name in self._layouts if self._layouts[name] != stored.read_layout(name)]
        """Weights and buffers whose pieces are not those that are stored."""
        self._needs: dict[str, Layout] = {}
        for rank in range(feed.ranks):
            for name, box in needs_of(lowered, "input", rank).items():
                self._needs[name] = (*self._needs.get(name, ()), Entry(rank, box, 0))
        self._weights, self._fixed = dict(stored.weights), dict(stored.fixed)
        for name in self._moved:
            self._make_room(name)
        self._imported, self._loads, self._buffers = imported, stored.loads, stored.buffers_of(imported)
        self._constants = needs_of(lowered, "constant", self.rank)
        self._fixed.update((name, (box, self._part(name, box))) for name, box in self._constants.items())
        program, wire = compile_program(lowered, self.rank, fuse), Wire(lowered, self.rank, stored.device, timeout_s)
        self.engine = Engine(program, wire, self._weights, self._fixed, lambda: None, context)

    def constant(self, name: str) -> Tensor:
        """Its value, for the buffers that there are now."""
        derived = self._imported.derived.get(name)
        return self._imported.constants[name] if derived is None else derive(derived, self._buffers)

    def _part(self, name: str, box: Box) -> Tensor:
        values = self.constant(name)
        part = cut(values, whole(values.shape), box).to(self.stored.device, copy=True)
        return in_range(part, dtype_of(self.graph.tensor[name].dtype))

    def _update_constants(self) -> None:
        """After a state has been loaded."""
        self._loads, self._buffers = self.stored.loads, self.stored.buffers_of(self._imported)
        for name in self._imported.derived.keys() & self._constants.keys():
            box, tensor = self._fixed[name]
            tensor.copy_(self._part(name, box))

    def run(self, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The results on this rank; gradients are those of the stored weights afterwards."""
        if self._loads != self.stored.loads:
            self._update_constants()
        fed = {name: self.fetch(name, named, need) for name, need in self._needs.items()}
        for name in self._moved:
            self._bring(name)
        results = self.engine.step({name: held for name, held in fed.items() if held is not None})
        for name in self._moved:
            if name in self.graph.differentiable:
                self._return_gradient(name)
            elif name in self.graph.buffer_updates:
                self._return_buffer(name)
        return results

    def fetch(self, name: str, named: Mapping[str, Tensor], need: Layout) -> tuple[Box, Tensor] | None:
        """This rank's region of an input: what other ranks were fed of it comes from them."""
        spec, device = self.graph.tensor[name], self.stored.device
        layout = self.feed.layout(name, spec.shape, self.batch)
        own = [k for k, entry in enumerate(layout) if entry.device == self.rank]
        if own and name not in named:
            raise RuntimeFailure(f"rank {self.rank} needs {name} for its samples; pass it")
        pieces = {k: self.feed.region(name, named[name], self.rank, self.batch, device, own=True)[1] for k in own}
        moved = Mover(layout, need, self.rank, dtype_of(spec.dtype)).run(pieces, device)
        return next(((need[k].box, tensor) for k, tensor in moved.items()), None)

    # ---- pieces that are not those that are stored

    def _make_room(self, name: str) -> None:
        self._weights.pop(name, None)
        self._fixed.pop(name, None)
        for entry in self._layouts[name]:
            if entry.device == self.rank:
                spec = self.stored.graph.tensor[name] if name in self.stored.layouts else self.graph.tensor[name]
                piece = torch.zeros(extent(entry.box), dtype=dtype_of(spec.dtype), device=self.stored.device)
                if spec.kind == "parameter":
                    self._weights[name] = nn.Parameter(piece, spec.requires_grad)
                else:
                    self._fixed[name] = entry.box, piece

    @torch.no_grad()
    def _bring(self, name: str) -> None:
        stored = self.stored
        source, held = _copies(stored.layouts.get(name, ())), stored.entries(name) if name in stored.layouts else {}
        if not source:  # every rank has what no step reads
            other = stored.counters.get(name, stored.other.get(name))
            assert other is not None
            source, held = everywhere(other.shape, self.feed.ranks), {self.rank: other.to(stored.device)}
        dtype = dtype_of(self.graph.tensor[name].dtype)
        for tensor in Mover(source, self._layouts[name], self.rank, dtype).run(held, stored.device).values():
            (self._weights[name] if name in self._weights else self._fixed[name][1]).copy_(tensor)

    def _return_gradient(self, name: str) -> None:
        gradients = {}
        for k, entry in enumerate(self._layouts[name]):
            if entry.device == self.rank:
                parameter = self._weights[name]
                gradients[k] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                parameter.grad = None
        for gradient in self._back(name).run(gradients, self.stored.device).values():
            self.stored.weights[name].grad = gradient

    def _return_buffer(self, name: str) -> None:
        own = {k: self._fixed[name][1] for k, e in enumerate(self._layouts[name]) if e.device == self.rank}
        for tensor in self._back(name).run(own, self.stored.device).values():
            self.stored.fixed[name][1].copy_(tensor)

    def _back(self, name: str) -> Mover:
        """From the pieces of this graph to one region of each rank that stores any."""
        wanted = self.stored.read_layout(name)
        return Mover(_copies(self._layouts[name]), wanted, self.rank, dtype_of(self.graph.tensor[name].dtype))


class ForwardPass:
    """The forward pass of ``imported`` (``import_forward``), for ``batch`` samples. ``everything``: every rank gets the
    outputs of the whole batch, not of its own samples alone."""

    def __init__(
        self, imported: Imported, lowered: Lowered, stored: Stored, feed: Feed, batch: int, context: KernelContext,
        timeout_s: float, fuse: bool, everything: bool,
    ) -> None:  # fmt: skip
        self._names, self._needs, graph = imported.outputs, dict[str, Layout](), imported.graph
        for name in imported.outputs:
            shape = graph.tensor[name].shape
            rows = 0 if everything else _rows_of_output(graph, name, feed)
            self._needs[name] = feed.shares(shape, rows, batch) if rows else everywhere(shape, feed.ranks)
        computed = {name: need for name, need in self._needs.items() if name in graph.producer}
        self._variant = Variant(
            imported, refit_forward(lowered, graph, computed), stored, feed, batch, context, timeout_s, fuse
        )

    def run(self, named: Mapping[str, Tensor], seed: int, step: int) -> list[Tensor]:
        """The model's outputs on this rank. ``seed``, ``step``: of random draws."""
        self._variant.context.seed, self._variant.context.step = seed, step
        results = self._variant.run(named)
        return [self._output(name, results, named) for name in self._names]

    def _output(self, name: str, results: Mapping[str, Tensor], named: Mapping[str, Tensor]) -> Tensor:
        variant = self._variant
        spec, stored, need = variant.graph.tensor[name], variant.stored, self._needs[name]
        if name in results:
            return results[name].to(dtype_of(spec.dtype))
        if spec.kind == "constant":
            return variant.constant(name).to(stored.device)
        if spec.kind in ("parameter", "buffer"):
            other = stored.counters.get(name, stored.other.get(name))
            return (stored.whole(name) if other is None else other).to(stored.device)
        held = variant.fetch(name, named, need) if spec.kind == "input" else None
        if held is not None:
            return held[1]
        return torch.zeros((0, *spec.shape[1:]), dtype=dtype_of(spec.dtype), device=stored.device)  # no samples here


class Variants:
    """The plan's step on smaller batches and its forward passes, each of which is traced once. ``by_recipe``: weights
    that follow a recipe. All ranks must call each method together."""

    def __init__(
        self, lowered: Lowered, stored: Stored, feed: Feed, context: KernelContext, by_recipe: Collection[str],
        timeout_s: float, fuse: bool,
    ) -> None:  # fmt: skip
        self._lowered, self._stored, self._feed, self._context = lowered, stored, feed, context
        self._by_recipe, self._timeout_s, self._fuse = by_recipe, timeout_s, fuse
        self.source: Source | None = None
        self.steps: dict[int, Variant] = {}
        """By number of samples."""
        self._forwards: dict[tuple[int, bool, bool], tuple[ForwardPass, Outputs]] = {}

    def traceable(self) -> Source:
        """The model, to trace it again. Raises RuntimeFailure if it was not kept."""
        if self.source is None:
            raise RuntimeFailure("this step cannot be traced again", "Make it by parallelize.")
        return self.source

    def step(self, batch: int) -> Variant:
        """The training step on ``batch`` samples."""
        if batch not in self.steps:
            imported = self.traceable().training(batch)
            runs = without_synchronisation(refit(self._lowered, imported.graph), self._by_recipe)
            self.steps[batch] = Variant(
                imported, runs, self._stored, self._feed, batch, self._context, self._timeout_s, self._fuse
            )
        return self.steps[batch]

    def forward(self, named: Mapping[str, Tensor], batch: int, evaluating: bool, everything: bool) -> Any:
        """What the model returns for ``batch`` samples (``Parallel.forward``)."""
        key = batch, evaluating, everything
        if key not in self._forwards:
            imported, outputs = self.traceable().forward(batch, evaluating)
            forward = ForwardPass(
                imported, self._lowered, self._stored, self._feed, batch, KernelContext(device=self._stored.device),
                self._timeout_s, self._fuse, everything,
            )  # fmt: skip
            self._forwards[key] = forward, outputs
        forward, outputs = self._forwards[key]
        with torch.no_grad():
            return outputs.nested(forward.run(named, self._context.seed, self._context.step))


def _rows_of_output(graph: OperatorGraph, name: str, feed: Feed) -> int:
    """Rows that a sample has in a tensor; 0 if its first dimension does not run over the batch."""
    shape = graph.tensor[name].shape
    if name not in graph.producer or not shape or shape[0] % graph.batch:
        return feed.rows.get(name, 0)
    op = graph.operators[graph.producer[name]]
    axes = op.access.outputs[op.outputs.index(name)].dimensions[0].axes
    return shape[0] // graph.batch if axes and op.roles[axes[0]] == "sample" else 0


def _copies(layout: Layout) -> Layout:
    """The layout with entries that are copies where they overlap, not partial sums."""
    return tuple(Entry(entry.device, entry.box, 0) for entry in layout)
