"""Instructions of one rank as they are emitted, each once; what transports bring is put together where it is needed."""

from __future__ import annotations

from collections.abc import Mapping

from flexsearch.lower import Lowered
from flexsearch.runtime.fusion import Fusion
from flexsearch.runtime.instructions import (
    Assemble,
    Instruction,
    Keep,
    Key,
    Load,
    Slot,
    Transport,
    Wait,
    reshard_of,
)
from flexsearch.runtime.transports import Transports


class Emitter:
    """Of ``device``, whose segments ``fusion`` has: the instructions so far, over numbered slots."""

    def __init__(self, lowered: Lowered, device: int, fusion: Fusion) -> None:
        self.lowered, self.graph, self.device, self.fusion = lowered, lowered.graph, device, fusion
        self.segments, self.transports = fusion.segments, Transports(lowered, device, fusion.early)
        self.slots: dict[Key, Slot] = {}
        self.instructions: list[Instruction] = []
        self.done: set[object] = set()
        """What has been emitted: passes of segments, waits, phases of reshards, loads, results."""

    def slot(self, key: Key) -> Slot:
        return self.slots.setdefault(key, len(self.slots))

    def emit(self, instruction: Instruction) -> None:
        self.instructions.append(instruction)

    def once(self, what: object) -> bool:
        """Whether it is done for the first time."""
        if what in self.done:
            return False
        self.done.add(what)
        return True

    # ---- what transports take and bring

    def sources(self, transport: Transport, phase: int) -> dict[int, Slot]:
        """Source entries of a phase on this device, and their slots."""
        entries = reshard_of(self.lowered, transport).phases[phase].source
        own = [k for k, entry in enumerate(entries) if entry.device == self.device]
        if phase > 0:
            self._assemble(transport, phase - 1, {k: self.slot(Key("phase", (transport, k))) for k in own})
            return {k: self.slot(Key("phase", (transport, k))) for k in own}
        return {k: self.source(transport, k) for k in own}

    def source(self, transport: Transport, entry: int) -> Slot:
        purpose, key, m = transport
        if purpose == "synchronise":
            weight = self.lowered.weights[key]
            return self.slot(Key("edge gradient", weight.edges[weight.plan.origin[entry]], m))
        if purpose == "backward":
            return self.slot(Key("edge gradient", key, m))
        name = self.lowered.edges[key].tensor
        if self.lowered.result_edges.get(name) == key:
            return self.total(name)
        if purpose in ("gather", "regather"):
            return self.stored(name)
        return self.slot(Key("home", name, m, purpose == "recompute"))

    def finish(self, transport: Transport) -> Slot:
        """Where a transport puts its result on this device, which is there from now on."""
        purpose, key, m = transport
        if purpose == "synchronise":
            result = Key("weight gradient", key, m)
        elif purpose == "backward":
            result = Key("home gradient", self.lowered.edges[key].tensor, m)
        else:
            result = Key("edge", key, m, purpose == "recompute")
        slot = self.slot(result)
        if self.once(transport):
            self.assemble_phases(transport, slot)
        return slot

    def assemble_phases(self, transport: Transport, slot: Slot) -> None:
        last = len(reshard_of(self.lowered, transport).phases) - 1
        entries = reshard_of(self.lowered, transport).phases[last].destination
        # an operator has one piece on a device, a weight one stored region
        (own,) = (k for k, entry in enumerate(entries) if entry.device == self.device)
        self._assemble(transport, last, {own: slot})

    def _assemble(self, transport: Transport, phase: int, results: dict[int, Slot]) -> None:
        """Put the results of a phase together, after waiting for what they are made of."""
        if not self.once((transport, phase)):
            return
        step = reshard_of(self.lowered, transport).phases[phase]
        if transport.purpose == "synchronise" and phase == 0:
            self.keep(transport)
        wanted = {
            (m, move.source)
            for m, move in self.transports.local(transport, phase)
            if step.source[move.source].device == step.destination[move.destination].device == self.device
        }
        here = self.sources(transport, phase) if wanted else {}
        # Copies are of what the first phase leaves here.
        own = {m: self.slots.get(Key("kept", (transport, m))) if phase == 0 else None for m, _ in wanted}
        kept = {m: slot for m, slot in own.items() if slot is not None}
        sources = {entry: here[entry] for m, entry in sorted(wanted) if m not in kept}
        received = {}
        for x, exchange in enumerate(step.exchanges):
            if self.device in exchange.receivers:
                task, member = self.transports.task_of[transport, phase, x]
                received[x] = task, member, self.wait(task)
        last = phase == len(reshard_of(self.lowered, transport).phases) - 1
        adds, refills = (last and transport.purpose == purpose for purpose in ("backward", "regather"))
        owns = transport in self.transports.again or self._outlives(transport, received, last)
        self.emit(Assemble(transport, phase, sources, kept, received, results, adds, refills, owns))

    def wait(self, task: int) -> Slot:
        slot = self.slot(Key("arrived", task))
        if self.once(("wait", task)):
            self.emit(Wait(task, slot))
        return slot

    def keep(self, transport: Transport) -> None:
        """Cut out what stays here of gradients, as the whole of them would else live until the update."""
        if not self.once(("keep", transport)):
            return
        step = reshard_of(self.lowered, transport).phases[0]
        parts = {}
        for m, move in self.transports.local(transport, 0):
            entry = step.source[move.source]
            if entry.device == self.device and move.box != entry.box:
                parts[m] = self.source(transport, move.source), self.slot(Key("kept", (transport, m)))
        if parts:
            self.emit(Keep(transport, parts))

    def _outlives(self, transport: Transport, received: Mapping[int, tuple[int, int, Slot]], last: bool) -> bool:
        """Whether what a phase brings, the ``last`` one or not, may live longer than what it is cut from: kernels read
        an activation, or a view of it, and may save that, or the second half of a backward pass waits for the gradient,
        or it is a weight's gradient, or a weight that came in a message with others, or another phase follows. Sums of
        a bucket stay together."""
        if transport.purpose == "synchronise":
            brought = (self.lowered.tasks.communication[task] for task, _, _ in received.values())
            return not any(what is not None and what.sums for what in brought)
        if transport.purpose == "gather":
            return bool(received)
        if not last:
            return True
        edge, graph = self.lowered.edges[transport.key], self.lowered.graph
        if transport.purpose == "backward":
            return self.segments[self.fusion.segment_of[graph.producer[edge.tensor]]].halves
        return graph.tensor[edge.tensor].kind == "activation"

    def stored(self, name: str) -> Slot:
        slot = self.slot(Key("home", name))
        if self.once(("load", name)):
            self.emit(Load(name, slot))
        return slot

    def total(self, name: str) -> Slot:
        """This device's part of a result of the step."""
        return self.slot(Key("total" if self.lowered.stages.microbatches > 1 else "home", name))
