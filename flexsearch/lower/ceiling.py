"""A quick upper bound on the memory of a lowered plan: as if everything were alive at the same time.

Most plans fit by this bound already, and then the exact account, which follows every span of the step, need not be
made. It counts each kind of span of ``flexsearch.simulate.memory``, so it is never below the true peak.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from flexsearch.cost.compute import STATE_COPIES
from flexsearch.graph import OperatorGraph
from flexsearch.graph.ops import saved_tensors
from flexsearch.lower import Lowered, Reshard
from flexsearch.lower.lowering import Placed
from flexsearch.lower.weights import WeightPlan
from flexsearch.strategy import Options
from flexsearch.topology import Topology

Bytes = npt.NDArray[np.int64]
"""Bytes by device index of the topology."""


class Ceiling:
    """Upper bounds for plans of one graph under ``options``."""

    def __init__(self, graph: OperatorGraph, topology: Topology, options: Options) -> None:
        self.graph, self.count, self.rules = graph, len(topology.devices), saved_tensors(graph)
        self.copies = 1 + STATE_COPIES[options.optimizer]
        # Whole on every device: their bounding boxes can be no larger.
        self.always = sum(t.nbytes for t in graph.of_kind("input", "buffer", "constant"))

    def __call__(self, lowered: Lowered) -> Bytes:
        """At most this many bytes are in use on each device at any moment."""
        total = np.full(self.count, self.always, dtype=np.int64)
        for i, placed in enumerate(lowered.placed):
            total += self.placed(i, placed)
        for edge in lowered.edges:
            for plan in (edge.forward, edge.backward):
                if plan is not None and self.graph.tensor[edge.tensor].kind == "activation":
                    total += self.moved(plan, self.graph.tensor[edge.tensor].itemsize)
        for weight in lowered.weights:
            total += self.weight(weight.plan, self.graph.tensor[weight.tensor].itemsize)
        return total

    def placed(self, operator: int, placed: Placed) -> Bytes:
        """Outputs of an operator, what it keeps besides, and the gradients of its inputs; not those of weights, as all
        readers that want the same part add theirs to one."""
        reads, writes = (
            [layout.elements(self.count) for layout in layouts] for layouts in (placed.reads, placed.writes)
        )
        return self.held(operator, reads, writes)

    def held(self, operator: int, reads: Sequence[Bytes], writes: Sequence[Bytes]) -> Bytes:
        """As ``placed``, for the elements of each operand: by device, or by position of a mesh."""
        op, found = self.graph.operators[operator], np.zeros_like([*reads, *writes][-1])
        for name, elements in zip(op.outputs, writes, strict=True):
            itemsize = self.graph.tensor[name].itemsize
            found += elements * itemsize + self.rules[operator].besides(elements, itemsize)
        for name, elements in zip(op.inputs, reads, strict=True):
            if name in self.graph.differentiable and self.graph.tensor[name].kind == "activation":
                found += elements * self.graph.tensor[name].itemsize
        return found

    def moved(self, plan: Reshard, itemsize: int) -> Bytes:
        """New copies that a reshard makes, intermediate ones, and receive buffers."""
        return plan.landed * itemsize

    def weight(self, plan: WeightPlan, itemsize: int) -> Bytes:
        """A stored weight with the state of its optimizer, gathered copies, the gradients that its readers make, and
        what synchronising them takes."""
        found = plan.stored.elements(self.count) * itemsize
        for forward in plan.forward:
            if forward.crosses:
                found = found + self.moved(forward, itemsize)
        found = self.copies * found
        if plan.sync is None:
            return found
        for need in plan.needs:
            found = found + need.elements(self.count) * itemsize
        return found + self.moved(plan.sync, itemsize)
