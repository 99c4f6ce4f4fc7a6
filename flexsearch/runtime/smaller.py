"""A training step on a batch that is smaller than the plan's: the last one of a data set.

It is another graph (means divide by another number of samples), planned as the full one as far as its samples go round.
Where its pieces of weights are others than those that are stored, they are fetched before the step, and gradients
brought back behind it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from flexsearch.cost import Costs
from flexsearch.graph import Box
from flexsearch.graph.importer import Imported
from flexsearch.graph.ops import KernelContext
from flexsearch.graph.ops.calls import dtype_of
from flexsearch.lower import Entry, Layout, lower
from flexsearch.runtime.engine import Engine
from flexsearch.runtime.evaluate import fitted
from flexsearch.runtime.feed import Feed
from flexsearch.runtime.program import compile_program
from flexsearch.runtime.regions import Mover, whole
from flexsearch.runtime.stored import Stored, layouts_of, needs_of
from flexsearch.runtime.wire import Wire, cut
from flexsearch.strategy import Options, Strategy


class SmallerStep:
    """The step of ``imported``, the same model and loss with ``batch`` samples. All ranks must make it together."""

    def __init__(
        self, imported: Imported, strategy: Strategy, stored: Stored, feed: Feed, batch: int, context: KernelContext,
        timeout_s: float, fuse: bool,
    ) -> None:  # fmt: skip
        graph, cluster, options = imported.graph, strategy.cluster, strategy.options
        self.stored, self.feed, self.batch, self.rank, self.graph = stored, feed, batch, stored.rank, graph
        configs = dict(zip((op.name for op in graph.operators), fitted(graph, strategy), strict=True))
        plain = Options(bucket_bytes=options.bucket_bytes, optimizer=options.optimizer, precision=options.precision)
        own = Strategy.make(graph, cluster, configs, plain)
        lowered = lower(graph, own, cluster, Costs(graph, cluster))
        device = stored.device
        self._layouts = layouts_of(lowered)
        self._moved = [name for name in self._layouts if self._layouts[name] != stored.read_layout(name)]
        """Weights and buffers whose pieces are not those that are stored."""
        self._needs: dict[str, Layout] = {}
        for rank in range(feed.ranks):
            for name, box in needs_of(lowered, "input", rank).items():
                self._needs[name] = (*self._needs.get(name, ()), Entry(rank, box, 0))
        weights, fixed = dict(stored.weights), dict(stored.fixed)
        for name in self._moved:
            weights.pop(name, None)
            fixed.pop(name, None)
            for entry in self._layouts[name]:
                if entry.device == self.rank:
                    spec = graph.tensor[name]
                    piece = torch.zeros([b - a for a, b in entry.box], dtype=dtype_of(spec.dtype), device=device)
                    if spec.kind == "parameter":
                        weights[name] = nn.Parameter(piece, spec.requires_grad)
                    else:
                        fixed[name] = entry.box, piece
        for name, box in needs_of(lowered, "constant", self.rank).items():
            values = stored.constant(imported, name)
            fixed[name] = box, cut(values, whole(values.shape), box).to(device, copy=True)
        self._weights, self._fixed = weights, fixed
        wire = Wire(lowered, self.rank, device, timeout_s)
        self.engine = Engine(compile_program(lowered, self.rank, fuse), wire, weights, fixed, lambda: None, context)

    def run(self, named: Mapping[str, Tensor]) -> Tensor:
        """The loss of the batch on every rank; gradients are those of the stored weights afterwards."""
        fed = self._fetch(named)
        self._bring_weights()
        loss = self.engine.step(fed)
        for name in self._moved:
            spec = self.graph.tensor[name]
            if spec.kind == "parameter" and spec.requires_grad:
                self._return_gradient(name)
            elif name in self.graph.buffer_updates:
                self._return_buffer(name)
        return loss

    def _fetch(self, named: Mapping[str, Tensor]) -> dict[str, tuple[Box, Tensor]]:
        """This rank's regions of the inputs: those that other ranks were fed come from them."""
        fed: dict[str, tuple[Box, Tensor]] = {}
        device = self.stored.device
        for name in sorted(self._needs):
            spec, need = self.graph.tensor[name], self._needs[name]
            layout = self.feed.layout(name, spec.shape, self.batch)
            own = [k for k, entry in enumerate(layout) if entry.device == self.rank]
            pieces = {}
            if own and name in named:
                pieces[own[0]] = self.feed.region(name, named[name], self.rank, self.batch, device, own=True)[1]
            made = Mover(layout, need, self.rank, dtype_of(spec.dtype)).run(pieces, device)
            fed.update((name, (need[k].box, tensor)) for k, tensor in made.items())
        return fed

    @torch.no_grad()
    def _bring_weights(self) -> None:
        for name in self._moved:
            source = _copies(self.stored.layouts[name])
            mover = Mover(source, self._layouts[name], self.rank, dtype_of(self.graph.tensor[name].dtype))
            for tensor in mover.run(self.stored.entries(name), self.stored.device).values():
                (self._weights[name] if name in self._weights else self._fixed[name][1]).copy_(tensor)

    def _return_gradient(self, name: str) -> None:
        """Weights whose pieces lie elsewhere: gradients to where they are stored."""
        own = {k: e for k, e in enumerate(self._layouts[name]) if e.device == self.rank}
        parameter = self._weights.get(name)
        made = {}
        for k in own:
            assert parameter is not None
            made[k] = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            parameter.grad = None
        mover = self._back(name)
        for gradient in mover.run(made, self.stored.device).values():
            self.stored.weights[name].grad = gradient

    def _return_buffer(self, name: str) -> None:
        own = {k: self._fixed[name][1] for k, e in enumerate(self._layouts[name]) if e.device == self.rank}
        for tensor in self._back(name).run(own, self.stored.device).values():
            self.stored.fixed[name][1].copy_(tensor)

    def _back(self, name: str) -> Mover:
        """From the pieces of this step to one region of each rank that stores any."""
        wanted = self.stored.read_layout(name)
        return Mover(_copies(self._layouts[name]), wanted, self.rank, dtype_of(self.graph.tensor[name].dtype))


def _copies(layout: Layout) -> Layout:
    """The layout with entries that are copies where they overlap, not partial sums."""
    return tuple(Entry(entry.device, entry.box, 0) for entry in layout)
