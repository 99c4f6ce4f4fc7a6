"""One step of one rank: walks the rank's program over local tensors. Nothing is decided here."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from flexsearch.graph import Box
from flexsearch.graph.ops import KernelContext
from flexsearch.graph.ops.calls import dtype_of
from flexsearch.graph.ops.local import extent, preferred
from flexsearch.lower import Move
from flexsearch.runtime.gradients import Gradients
from flexsearch.runtime.program import (
    Backward,
    Finish,
    Forward,
    Instruction,
    Key,
    Program,
    Start,
    Transport,
    Update,
    reshard_of,
)
from flexsearch.runtime.segment import Pass, SegmentRunner
from flexsearch.runtime.wire import Wire, cut


class Engine:
    """Executes ``program``. ``weights``: this rank's stored part of each parameter; ``fixed``: buffers and constants by
    name, as (region held, tensor). ``update``: called when all gradients are in place."""

    def __init__(
        self,
        program: Program,
        wire: Wire,
        weights: Mapping[str, torch.nn.Parameter],
        fixed: Mapping[str, tuple[Box, Tensor]],
        update: Callable[[], None],
        context: KernelContext,
    ) -> None:
        self.program, self.lowered, self.rank = program, program.lowered, program.device
        self.wire, self.weights, self.fixed, self.update, self.context = wire, weights, fixed, update, context
        self.segments = [SegmentRunner(self.lowered, self.rank, s, context) for s in program.segments]
        self.task_of = {
            (what.purpose, member.key, member.phase, member.exchange): (task, m)
            for task, what in enumerate(self.lowered.tasks.communication)
            if what is not None
            for m, member in enumerate(what.members)
        }
        self.spans: list[tuple[Instruction, float, float]] | None = None
        """(instruction, start, end) of the last step, seconds of ``time.perf_counter``; None: not recorded."""
        self._clear()

    def _clear(self) -> None:
        self._values: dict[Key, Tensor] = {}
        self._gradients = Gradients()
        self._passes: dict[int, Pass] = {}
        self._phases: dict[tuple[Transport, int], dict[int, Tensor]] = {}
        self._results: dict[Transport, Tensor] = {}
        self._parts: dict[Transport, dict[int, Tensor]] = {}
        """By local move of a first phase: the part of a gradient that stays here."""

    def step(self, inputs: Mapping[str, tuple[Box, Tensor]]) -> Tensor:
        """Forward, backward, synchronise, update. ``inputs``: by name, (region held, tensor). Returns the loss."""
        self.wire.begin()
        self._fetch(inputs)
        recording = self.spans is not None
        spans: list[tuple[Instruction, float, float]] = []
        for position, instruction in enumerate(self.program.instructions):
            began = time.perf_counter() if recording else 0.0
            self._execute(instruction)
            if recording:
                spans.append((instruction, began, time.perf_counter()))
            for transport in self.program.kept_parts.get(position, ()):
                self._keep_parts(transport)
            for key in self.program.last_use.get(position, ()):
                self._values.pop(key, None)
            for key in self.program.last_gradient_use.get(position, ()):
                self._gradients.release(key)
        loss = self._result(self.lowered.loss_edge)
        for buffer, edge in self.lowered.update_edges.items():
            if buffer in self.fixed:
                self.fixed[buffer][1].copy_(self._result(edge))
        self.wire.end()
        self.context.step += 1
        self._clear()
        if recording:
            self.spans = spans
        return loss

    def _fetch(self, inputs: Mapping[str, tuple[Box, Tensor]]) -> None:
        """Put weights at hand, and what the edges want of inputs, buffers and constants."""
        for name, parameter in self.weights.items():
            self._values[Key("home", name)] = parameter
        for e, edge in enumerate(self.lowered.edges):
            held = inputs.get(edge.tensor) or self.fixed.get(edge.tensor)
            if held is not None:
                for entry in edge.need:
                    if entry.device == self.rank:
                        self._values[Key("edge", e)] = preferred(cut(held[1], held[0], entry.box))

    def _execute(self, instruction: Instruction) -> None:
        match instruction:
            case Forward(segment):
                exports, self._passes[segment] = self.segments[segment].forward(self._values)
                self._values.update(exports)
            case Backward(segment):
                self._backward(segment)
            case Start(task):
                self._start(task)
            case Finish(transport):
                self._finish(transport)
            case Update():
                self.update()

    def _backward(self, segment: int) -> None:
        saved = self._passes.pop(segment)
        gradients = {}
        for name, tensor in saved.seeds:
            if name == self.lowered.graph.loss:
                gradients[name] = torch.ones_like(tensor)
            elif (gradient := self._gradients.take(Key("home", name))) is not None:
                gradients[name] = gradient
        for key, gradient in self.segments[segment].backward(saved, gradients):
            self._gradients.add(key, gradient)

    def _start(self, task: int) -> None:
        what = self.lowered.tasks.communication[task]
        assert what is not None
        sources = []
        for member in what.members:
            transport = Transport(what.purpose, member.key)
            wanted = {
                move.source
                for move in member.what.moves
                if member.reshard.phases[member.phase].source[move.source].device == self.rank
            }
            sources.append({s: self._source(transport, member.phase, s) for s in wanted})
        self.wire.start(task, sources)

    def _keep_parts(self, transport: Transport) -> None:
        """Copy what stays here of gradients, which can then go."""
        step, parts = reshard_of(self.lowered, transport).phases[0], dict[int, Tensor]()
        for m, move in enumerate(step.local):
            entry = step.source[move.source]
            if entry.device == self.rank:
                part = cut(self._source(transport, 0, move.source), entry.box, move.box)
                parts[m] = part if move.box == entry.box else part.clone()
        self._parts[transport] = parts

    def _source(self, transport: Transport, phase: int, entry: int) -> Tensor:
        """Tensor of a source entry on this rank."""
        if phase > 0:
            return self._complete(transport, phase - 1)[entry]
        purpose, key = transport
        if purpose == "synchronise":
            weight = self.lowered.weights[key]
            return self._gradient(Key("edge", weight.edges[weight.plan.origin[entry]]), transport, entry)
        name = self.lowered.edges[key].tensor
        if purpose == "forward":
            return self._values[Key("home", name)]
        if purpose == "gather":
            return self.weights[name].detach()
        return self._gradient(Key("edge", key), transport, entry)

    def _gradient(self, key: Key, transport: Transport, entry: int) -> Tensor:
        box = reshard_of(self.lowered, transport).source[entry].box
        return self._gradients.read(
            key, lambda: torch.zeros(extent(box), dtype=self._dtype(transport), device=self.wire.device)
        )

    def _dtype(self, transport: Transport) -> torch.dtype:
        purpose, key = transport
        name = self.lowered.weights[key].tensor if purpose == "synchronise" else self.lowered.edges[key].tensor
        return dtype_of(self.lowered.graph.tensor[name].dtype)

    def _finish(self, transport: Transport) -> None:
        plan = reshard_of(self.lowered, transport)
        results = self._complete(transport, len(plan.phases) - 1)
        (result,) = results.values()  # an operator has one piece on a device, a weight one stored region
        if transport.purpose != "synchronise":
            result = preferred(result)  # what arrives is packed in the order of the dimensions
        purpose, key = transport
        if purpose == "synchronise":
            self.weights[self.lowered.weights[key].tensor].grad = result
        elif purpose == "backward":
            self._gradients.add(Key("home", self.lowered.edges[key].tensor), result)
            self._gradients.release(Key("edge", key))
        else:
            self._values[Key("edge", key)] = result
            if not self.lowered.edges[key].readers:  # the loss, a buffer's new value: kept to the end of the step
                self._results[transport] = result
        for phase in range(len(plan.phases)):
            self._phases.pop((transport, phase), None)

    def _complete(self, transport: Transport, phase: int) -> dict[int, Tensor]:
        """Destination entries of a phase on this rank, by index; waits for what they are made of."""
        if (known := self._phases.get((transport, phase))) is not None:
            return known
        step = reshard_of(self.lowered, transport).phases[phase]
        parts: dict[int, list[tuple[int, Move, Tensor]]] = {}
        results: dict[int, Tensor] = {}
        views: set[int] = set()  # parts of gradients that would keep the whole of them until the update
        kept = self._parts.pop(transport, {}) if phase == 0 else {}
        for m, move in enumerate(step.local):
            entry = step.source[move.source]
            if entry.device == self.rank and step.destination[move.destination].device == self.rank:
                if (piece := kept.get(m)) is None:
                    piece = cut(self._source(transport, phase, move.source), entry.box, move.box)
                    if transport.purpose == "synchronise" and move.box != entry.box:
                        views.add(move.destination)
                parts.setdefault(move.destination, []).append((entry.term, move, piece))
        for x, exchange in enumerate(step.exchanges):
            if self.rank not in exchange.receivers:
                continue
            task, member = self.task_of[(*transport, phase, x)]
            self.wire.wait(task)
            if exchange.box is not None:
                for k, entry in enumerate(step.destination):
                    if entry.device == self.rank and entry.box == exchange.box:
                        results[k] = self.wire.reduced(task, member)
                continue
            for move, piece in self.wire.arrived(task, member):
                parts.setdefault(move.destination, []).append((step.source[move.source].term, move, piece))
        for k, entry in enumerate(step.destination):
            if entry.device == self.rank and k not in results:
                results[k] = self._join(entry.box, parts.get(k, []), self._dtype(transport))
                if k in views and len(parts[k]) == 1:
                    results[k] = results[k].clone()
        self._phases[transport, phase] = results
        return results

    def _join(self, box: Box, parts: list[tuple[int, Move, Tensor]], dtype: torch.dtype) -> Tensor:
        """Sum of parts placed in ``box``, in the order of their terms, so that all replicas agree to the bit."""
        if len(parts) == 1 and parts[0][1].box == box:
            return parts[0][2]
        parts.sort(key=lambda part: (part[0], part[1].box))
        whole = [part for part in parts if part[1].box == box]
        if whole and len(whole) == len(parts):
            total = whole[0][2] + whole[1][2]
            for _, _, piece in whole[2:]:
                total += piece
            return total
        total = torch.zeros(extent(box), dtype=dtype, device=self.wire.device)
        for _, move, piece in parts:
            cut(total, box, move.box).add_(piece)
        return total

    def _result(self, edge: int) -> Tensor:
        """What an edge without readers brought here."""
        known = self._results.get(Transport("forward", edge))
        return known if known is not None else self._values[Key("home", self.lowered.edges[edge].tensor)]
