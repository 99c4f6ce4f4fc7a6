"""A quick upper bound on the memory of a lowered plan: as if everything were alive at the same time.

Most plans fit by this bound already, and then the exact account, which follows every span of the step, need not be
made. It counts each kind of span of ``flexsearch.simulate.memory``, so it is never below the true peak.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from flexsearch.graph import OperatorGraph, volume
from flexsearch.lower import Layout, Lowered, Reshard
from flexsearch.lower.lowering import Placed
from flexsearch.lower.weights import WeightPlan
from flexsearch.simulate.memory import STATE_COPIES
from flexsearch.strategy import Options
from flexsearch.topology import Topology

Bytes = npt.NDArray[np.int64]
"""Bytes by device index of the topology."""


class Ceiling:
    """Upper bounds for plans of one graph under ``options``; what a placement or a reshard adds is remembered."""

    def __init__(self, graph: OperatorGraph, topology: Topology, options: Options) -> None:
        self.graph, self.count = graph, len(topology.devices)
        self.copies = 1 + STATE_COPIES[options.optimizer]
        # Whole on every device: their bounding boxes can be no larger.
        self.always = sum(t.nbytes for t in graph.of_kind("input", "buffer", "constant"))
        self._known: dict[tuple[int, int], tuple[object, Bytes]] = {}
        """(id of a part, bytes per element or operator) -> (the part, kept so that its id stays its own; its bytes)."""

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
        """Outputs of an operator and the gradients of its inputs."""
        if (known := self._known.get((id(placed), operator))) is not None:
            return known[1]
        op, placement, found = self.graph.operators[operator], placed.placement, np.zeros(self.count, dtype=np.int64)
        for name, layout in zip(op.outputs, placement.writes, strict=True):
            found += self._held(layout, self.graph.tensor[name].itemsize)
        for name, layout in zip(op.inputs, placement.reads, strict=True):
            if name in self.graph.differentiable:
                found += self._held(layout, self.graph.tensor[name].itemsize)
        self._known[id(placed), operator] = placed, found
        return found

    def moved(self, plan: Reshard, itemsize: int) -> Bytes:
        """New copies that a reshard makes, intermediate ones, and receive buffers."""
        if (known := self._known.get((id(plan), itemsize))) is not None:
            return known[1]
        found = np.zeros(self.count, dtype=np.int64)
        for phase in () if plan.trivial else plan.phases:
            found += self._held(phase.destination, itemsize)
            for exchange in phase.exchanges:
                for move in exchange.moves:
                    found[phase.destination[move.destination].device] += volume(move.box) * itemsize
        self._known[id(plan), itemsize] = plan, found
        return found

    def weight(self, plan: WeightPlan, itemsize: int) -> Bytes:
        """A stored weight with the state of its optimizer, gathered copies, and what synchronising it takes."""
        if (known := self._known.get((id(plan), itemsize))) is not None:
            return known[1]
        found = self._held(plan.storage, itemsize)
        for forward in plan.forward:
            if forward.exchanges:
                found = found + self.moved(forward, itemsize)
        found = self.copies * found
        if plan.sync is not None:
            found = found + self.moved(plan.sync, itemsize)
        self._known[id(plan), itemsize] = plan, found
        return found

    def _held(self, layout: Layout, itemsize: int) -> Bytes:
        found = np.zeros(self.count, dtype=np.int64)
        for device, box, _ in layout:
            found[device] += volume(box) * itemsize
        return found
