"""What one rank does in a step: its part of the task graph, compiled once to a straight list of instructions.

Needs no torch. Order and communication are those of the task graph; a segment runs where the first of its tasks of a
pass stands. Between segments stand the rank's parts of reshards: issued where the task graph has them, put together
before the first use of what they bring.
"""

from __future__ import annotations

from collections import Counter

from flexsearch.lower import Communication, Lowered, TaskKind
from flexsearch.runtime.emitter import Emitter
from flexsearch.runtime.fusion import Fusion
from flexsearch.runtime.instructions import (
    Add,
    Backward,
    Deliver,
    Fetch,
    Forward,
    Key,
    Leaf,
    Part,
    Program,
    Result,
    Segment,
    Slot,
    Start,
    Transport,
    Update,
    reshard_of,
)
from flexsearch.runtime.liveness import with_lifetimes
from flexsearch.runtime.room import with_room
from flexsearch.strategy import States


def compile_program(lowered: Lowered, device: int, fuse: bool = True) -> Program:
    """Instructions of ``device``. ``fuse=False`` makes every operator its own segment, for measuring task by task."""
    compiler = _Compiler(lowered, device, Fusion(lowered, device, fuse))
    compiler.compile()
    slots = tuple(compiler.slots)
    instructions = with_lifetimes(lowered, device, compiler.instructions, slots)
    program = Program(lowered, device, tuple(compiler.segments), tuple(instructions), slots)
    return with_room(program, compiler.transports.place)


class _Compiler(Emitter):
    """Goes through the tasks of a device."""

    def __init__(self, lowered: Lowered, device: int, fusion: Fusion) -> None:
        super().__init__(lowered, device, fusion)
        self.left, self.issues = self.transports.sends.copy(), self.transports.parts.copy()
        """First phases that this device has yet to issue; parts of all phases that concern it and have yet to be."""
        self.started: set[int] = set()
        """Communications that are issued."""
        self.issued: list[Transport] = []
        """Synchronisation of gradients that this device has made, all of whose communication with it is issued."""
        self.weight_of = {weight.tensor: w for w, weight in enumerate(lowered.weights)}
        self.fetched: dict[str, int] = {}
        """Buffer -> the microbatch that has read it last."""
        self.missing: Counter[Transport] = Counter()
        """Backward passes that have yet to add to a gradient of a weight."""
        self.transports.repeated.update([("synchronise", w) for w in range(len(lowered.weights)) if self._cuts_each(w)])
        for segment in self.segments:
            for m in range(lowered.stages.microbatches):
                self.missing.update(self._synchronisations(segment, m))

    def _cuts_each(self, w: int) -> bool:
        """Whether this device cuts its part of the gradient of a weight out of each microbatch's, though nothing
        moves, as the sum of the whole ones would be larger."""
        plan, blocks = self.lowered.weights[w].plan, self.lowered.plain_rows.blocks
        transport = Transport("synchronise", w)
        if plan.sync is None or plan.states < States.GRADIENTS or blocks.each[w] == blocks.bucket[w]:
            return False
        still = self.fusion.arrives(transport) and not self.transports.moves(transport)
        return still and self._whole(transport) is None

    def compile(self) -> None:
        tasks = self.lowered.tasks
        for t in self.transports.place:
            what = tasks.communication[t]
            if what is not None:
                if self.device in what.devices:
                    self._start(t, what)
            elif tasks.device[t] == self.device and tasks.kind[t] != TaskKind.SYNCHRONISE:  # not the program's to do
                self._deliver_earlier(None, t)
                self._compute(TaskKind(tasks.kind[t]), tasks.operator[t], tasks.microbatch[t])
        self._finish_results()
        for t, what in enumerate(tasks.communication):
            if what is not None and self.device in what.receivers:
                self.wait(t)

    # ---- computing

    def _compute(self, kind: TaskKind, operator: int, microbatch: int) -> None:
        if kind == TaskKind.UPDATE:
            self._deliver()
            self.emit(Update())
            return
        s = self.fusion.segment_of[operator]
        late = self.segments[s].late
        if (late and kind == TaskKind.FORWARD) or not self.once((kind, s, microbatch)):
            return
        if late and kind == TaskKind.BACKWARD:
            self._forward(s, microbatch, False)
        if kind in (TaskKind.FORWARD, TaskKind.RECOMPUTE):
            self._forward(s, microbatch, kind == TaskKind.RECOMPUTE)
        else:
            self._backward(s, microbatch, kind)

    def _forward(self, s: int, m: int, again: bool) -> None:
        segment = self.segments[s]
        leaves = tuple(self._operand(segment, leaf, m, again) for leaf in segment.leaves)
        exports = tuple((r, self.slot(Key("home", name, m, again))) for r, name in segment.exports)
        trained = segment.backward and (again or segment.region < 0)
        saved = self.slot(Key("saved", s, m)) if trained else None
        self.emit(Forward(s, m, again, leaves, exports, saved))
        if self.lowered.stages.microbatches > 1 and not again:
            for _, name in segment.exports:
                if name in self.lowered.result_edges:
                    self.emit(Add(self.slot(Key("home", name, m)), self.total(name)))
        for _, name in segment.exports:
            for e in self.lowered.edges_of[name] if not again else ():
                self._cut(Transport("forward", e, m))

    def _cut(self, transport: Transport) -> None:
        """Cut out what only the backward pass reads of a value that is made here, as the whole of it would else live
        until then."""
        if self.fusion.waits(transport.key) and not self.transports.receives(transport) and (
            self.fusion.active(transport) and self.fusion.arrives(transport)
        ):
            self.finish(transport)

    def _backward(self, s: int, m: int, kind: TaskKind) -> None:
        segment = self.segments[s]
        seeds = []
        for _, name in segment.seeds if kind != TaskKind.WEIGHT_GRADIENT else ():
            for e in self.lowered.edges_of[name]:
                if self.lowered.edges[e].backward is not None:
                    transport = Transport("backward", e, m)
                    if self.fusion.active(transport) and self.fusion.arrives(transport):
                        self.finish(transport)
            seeds.append(None if name == self.graph.loss else self.slot(Key("home gradient", name, m)))
        part: Part = "all"
        if segment.halves:
            part = "weights" if kind == TaskKind.WEIGHT_GRADIENT else "inputs"
        weights = tuple(self._regathered(segment, m)) if part != "weights" else ()
        gradients = tuple(self._gradient(leaf, m, part) for leaf in segment.leaves if leaf.gradient is not None)
        self.emit(Backward(s, m, part, self.slot(Key("saved", s, m)), tuple(seeds), gradients, weights))
        if part != "weights":
            self._add_up(s, m)
        if part != "inputs":
            self._deliver_own(segment, m)

    def _synchronisations(self, segment: Segment, m: int) -> set[Transport]:
        """Of the weights whose gradients the backward pass of a segment makes."""
        weights = (self._weight_of_edge(leaf.gradient) for leaf in segment.leaves if leaf.gradient is not None)
        return {self.transports.instance("synchronise", w, m) for w in weights if w is not None}

    def _deliver_own(self, segment: Segment, m: int) -> None:
        """Cut the part that this device stores out of gradients that are complete and that it does not send, as the
        whole of them would else live until the update, and add up those of several microbatches."""
        for transport in sorted(self._synchronisations(segment, m)):
            self.missing[transport] -= 1
            if self.missing[transport]:
                continue
            if self.transports.moves(transport):
                self._over(transport)
            elif self.fusion.arrives(transport):
                each = ("synchronise", transport.key) in self.transports.repeated
                if each or self._whole(transport) is None:
                    self._deliver_one(transport)

    def _over(self, transport: Transport) -> None:
        """Keep what stays of gradients that are complete, if all first phases have been issued; note if all has."""
        if not self.left[transport]:
            self.keep(transport)
        if not self.issues[transport] and transport not in self.issued:
            self.issued.append(transport)

    def _add_up(self, s: int, m: int) -> None:
        """Bring gradients to the layout of the producer where nothing is received for it on this device: the sum over
        the readers is there once, rather than each of its terms until the producer's backward pass."""
        for leaf in self.segments[s].leaves:
            if leaf.gradient is None or leaf.gradient.kind != "edge gradient" or (
                self._weight_of_edge(leaf.gradient) is not None
            ):
                continue
            e = int(str(leaf.gradient.name))
            transport = Transport("backward", e, m)
            if self.fusion.segment_of[self.lowered.edges[e].readers[0][0]] != s:
                continue  # one that runs later adds to them
            here = self.fusion.active(transport) and self.fusion.arrives(transport)
            if here and not self.transports.receives(transport):
                self.finish(transport)

    def _gradient(self, leaf: Leaf, m: int, part: Part) -> Slot | None:
        """Where the gradient of a leaf is added, if this ``part`` of the backward pass makes it."""
        key = leaf.gradient
        assert key is not None
        trained = self._weight_of_edge(key)
        if part != "all" and (part == "weights") != (trained is not None):
            return None
        at = m if trained is None else self.transports.instance("synchronise", trained, m).microbatch
        return self.slot(key._replace(microbatch=at))

    def _weight_of_edge(self, key: Key) -> int | None:
        """The weight whose gradient a key names."""
        if key.kind != "edge gradient":
            return None
        return self.weight_of.get(self.lowered.edges[int(str(key.name))].tensor)

    # ---- operands

    def _operand(self, segment: Segment, leaf: Leaf, m: int, again: bool) -> Slot:
        """The slot of a value that a segment reads, which is there from now on."""
        kind, name = leaf.value.kind, leaf.value.name
        if leaf.microbatch is not None:
            m, again = leaf.microbatch, False
        if kind == "home":
            if self.graph.tensor[str(name)].kind == "parameter":
                return self.stored(str(name))
            return self.slot(Key("home", name, m, again and self._inside(str(name), segment)))
        e = int(str(name))
        tensor = self.graph.tensor[self.lowered.edges[e].tensor]
        if self.lowered.edges[e].forward is None:
            return self._fetch(e, m)
        if tensor.kind == "activation":
            second = again and self._inside(tensor.name, segment)
            return self.finish(Transport("recompute" if second else "forward", e, m))
        if tensor.kind == "parameter":
            return self._gathered(self.transports.instance("gather", e, m), again)
        raise AssertionError(f"{tensor.name} has no place")

    def _gathered(self, transport: Transport, again: bool) -> Slot:
        """Where a gathered weight is, which is there from now on, with all that came in the same messages: these would
        else live until nothing is left of them."""
        slot = self.finish(transport)
        for other in self._together(transport):
            self.finish(other)
        if again and transport in self.transports.again:
            self._refill(transport)
        return slot

    def _together(self, transport: Transport) -> list[Transport]:
        """What else comes in messages of a gather and has all been issued."""
        return [
            other
            for other in self.transports.together(transport)
            if self.transports.tasks_of[other] <= self.started and self.fusion.arrives(other)
        ]

    def _inside(self, name: str, segment: Segment) -> bool:
        """Whether an activation is made in the region of a segment, and so is computed again with it."""
        return self.fusion.regions[self.graph.producer[name]] == segment.region >= 0

    def _fetch(self, e: int, m: int) -> Slot:
        slot = self.slot(Key("edge", e, m))
        if self.once(("fetch", e, m)):
            name = self.lowered.edges[e].tensor
            before = self.fetched.get(name, m)
            self.fetched[name] = m
            if before != m and name in self.lowered.update_edges:
                self._finish_buffer(name, before)
            self.emit(Fetch(e, m, slot))
        return slot

    def _regathered(self, segment: Segment, m: int) -> list[Slot]:
        """Slots of weights that the backward pass of a segment needs and that are gathered again."""
        slots = []
        for leaf in segment.leaves:
            if leaf.value.kind == "edge":
                transport = self.transports.instance("gather", int(str(leaf.value.name)), m)
                if transport in self.transports.again:
                    self._refill(transport)
                    slots.append(self.slot(Key("edge", transport.key, transport.microbatch)))
        return slots

    def _refill(self, gather: Transport) -> None:
        transport = gather._replace(purpose="regather")
        if self.once(transport):
            self.assemble_phases(transport, self.slot(Key("edge", gather.key, gather.microbatch)))
            for other in self._together(transport):
                self._refill(other._replace(purpose="gather"))

    # ---- communication

    def _start(self, task: int, what: Communication) -> None:
        sources, last = [], []
        for member in what.members:
            transport = Transport(what.purpose, member.key, self.lowered.tasks.microbatch[task])
            if what.purpose == "synchronise" and member.phase == 0:
                self._deliver_earlier(transport, task)
            phase = member.reshard.phases[member.phase]
            moves = member.summed if what.sums else member.what.moves
            wanted = {mv.source for mv in moves if phase.source[mv.source].device == self.device}
            here = self.sources(transport, member.phase) if wanted else {}
            sources.append({entry: here[entry] for entry in sorted(wanted)})
            self.issues[transport] -= 1
            self.left[transport] -= self.device in what.senders and member.phase == 0
            last.append(transport)
        self.emit(Start(task, tuple(sources), self.slot(Key("arrived", task))))
        self.started.add(task)
        for transport in dict.fromkeys(last) if what.purpose == "synchronise" else ():
            if not self.missing[transport]:  # else its own gradients are still to come
                self._over(transport)

    # ---- gradients of weights and results

    def _deliver(self) -> None:
        """Add all synchronised gradients that are still to come to those of the weights."""
        for w, weight in enumerate(self.lowered.weights):
            if weight.plan.sync is not None and self.fusion.arrives(Transport("synchronise", w)):
                count = self.lowered.stages.microbatches if ("synchronise", w) in self.transports.repeated else 1
                for m in range(count):
                    self._deliver_one(Transport("synchronise", w, m))

    def _deliver_earlier(self, following: Transport | None, task: int) -> None:
        """Add gradients of which this device has issued all, before it does ``task``: those that are due, and if it
        synchronises, as ``following``, those of the same weight and an earlier microbatch. Their buffers would else
        wait for the update."""
        for transport in [t for t in self.issued if t != following]:
            if (following is None or transport.key != following.key) and not self._is_due(transport, task):
                continue
            self.issued.remove(transport)
            if self.fusion.arrives(transport):
                self._deliver_one(transport)

    def _is_due(self, transport: Transport, task: int) -> bool:
        """Whether gradients that all ranks have issued before ``task`` are added before it: the block before which
        they are is no later, or the pass that it belongs to is over."""
        lowered, place, end = self.lowered, self.transports.place, self.transports.ends[transport]
        rows, stage, (sent, added) = lowered.tasks.identity, lowered.rows.blocks.stage, lowered.exchanged(transport.key)
        if added == len(lowered.plain_rows.blocks.kind) - 1 or place[end] > place[task]:
            return False
        at = rows[task]
        same = self._pass_of(sent, transport.microbatch) == self._pass_of(at.block, at.microbatch)
        if added <= sent:  # in the next microbatch
            return not same and added <= at.block and bool(stage[added] == stage[at.block])
        return not same or (rows[end].block < at.block and added <= at.block)

    def _pass_of(self, block: int, microbatch: int) -> int:
        """The microbatch in whose pass a block stands: of what the last pass ends with, the final one."""
        schedule = self.lowered.rows.schedule
        return int(schedule.final[0]) if schedule.last[block] else microbatch

    def _deliver_one(self, transport: Transport) -> None:
        if not self.once(("deliver", transport)):
            return
        whole = self._whole(transport)
        row = transport.key, self.finish(transport) if whole is None else whole
        before = self.instructions[-1]
        if isinstance(before, Deliver):
            self.instructions[-1] = Deliver((*before.weights, row))
        else:
            self.emit(Deliver((row,)))

    def _whole(self, transport: Transport) -> Slot | None:
        """The slot of a gradient that is the stored weight's as it is: nothing is moved, cut out or added."""
        phases = reshard_of(self.lowered, transport).phases
        (own,) = (k for k, entry in enumerate(phases[-1].destination) if entry.device == self.device)
        moves = [move for _, move in self.transports.local(transport, 0) if move.destination == own]
        if len(phases) > 1 or self.transports.moves(transport) or len(moves) != 1:
            return None
        entry = phases[0].source[moves[0].source]
        alike = entry.device == self.device and entry.box == phases[0].destination[own].box
        return self.source(transport, moves[0].source) if alike else None

    def _finish_results(self) -> None:
        for name in self.lowered.update_edges:
            if (m := self.fetched.get(name)) is not None:
                self._finish_buffer(name, m)
        for name, e in self.lowered.result_edges.items():
            if any(entry.device == self.device for entry in self.lowered.edges[e].need):
                self.emit(Result(name, self._result(Transport("forward", e), self.total(name))))

    def _finish_buffer(self, name: str, m: int) -> None:
        e = self.lowered.update_edges[name]
        home = self.slot(Key("home", self.lowered.edges[e].tensor, m))
        self.emit(Result(name, self._result(Transport("forward", e, m), home), True))

    def _result(self, transport: Transport, home: Slot) -> Slot:
        """What an edge without readers brings here; ``home`` if that is what this device has made."""
        arrives = self.fusion.active(transport) and self.fusion.arrives(transport)
        return self.finish(transport) if arrives else home
