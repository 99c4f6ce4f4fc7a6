"""What one rank does in a step: its part of the task graph, compiled once to a straight list of instructions.

Needs no torch. Order and communication are those of the task graph; a segment runs where the first of its tasks of a
pass stands. Between segments stand the rank's parts of reshards: issued where the task graph has them, put together
before the first use of what they bring.
"""

from __future__ import annotations

from collections import Counter

from flexsearch.graph.ops import kind_of
from flexsearch.lower import Communication, Lowered, Move, TaskKind
from flexsearch.lower.taskgraph import Purpose
from flexsearch.runtime.fusion import Fusion
from flexsearch.runtime.instructions import (
    Add,
    Assemble,
    Backward,
    Deliver,
    Fetch,
    Forward,
    Instruction,
    Keep,
    Key,
    Leaf,
    Load,
    Part,
    Program,
    Result,
    Segment,
    Slot,
    Start,
    Transport,
    Update,
    Wait,
    reshard_of,
)
from flexsearch.runtime.liveness import with_lifetimes
from flexsearch.strategy import States


def compile_program(lowered: Lowered, device: int, fuse: bool = True) -> Program:
    """Instructions of ``device``. ``fuse=False`` makes every operator its own segment, for measuring task by task."""
    compiler = _Compiler(lowered, device, Fusion(lowered, device, fuse))
    compiler.compile()
    slots = tuple(compiler.slots)
    instructions = with_lifetimes(lowered, device, compiler.instructions, slots)
    return Program(lowered, device, tuple(compiler.segments), tuple(instructions), slots)


class _Compiler:
    def __init__(self, lowered: Lowered, device: int, fusion: Fusion) -> None:
        self.lowered, self.graph, self.device, self.fusion = lowered, lowered.graph, device, fusion
        self.segments = fusion.segments
        self.slots: dict[Key, Slot] = {}
        self.instructions: list[Instruction] = []
        self.done: set[object] = set()
        """What has been emitted: passes of segments, waits, phases of reshards, loads, results."""
        self.task_of: dict[tuple[Transport, int, int], tuple[int, int]] = {}
        """(transport, phase, exchange) -> (task, member)."""
        self.tasks_of: dict[Transport, set[int]] = {}
        """Communications that bring parts of a gather here."""
        self.members_of: dict[int, list[Transport]] = {}
        """Gathers of which such a communication brings parts."""
        self.started: set[int] = set()
        """Communications that are issued."""
        self.left: Counter[Transport] = Counter()
        """First phases of synchronisation that this device has yet to issue."""
        self.issues: Counter[Transport] = Counter()
        """The same of all phases, and of what this device receives."""
        self.issued: list[Transport] = []
        """Synchronisation of gradients that this device has made, all of whose communication with it is issued."""
        self.weight_of = {weight.tensor: w for w, weight in enumerate(lowered.weights)}
        self.repeated: set[tuple[Purpose, int]] = set()
        """What is sent for each microbatch."""
        self.again: set[Transport] = set()
        """Gathers whose memory is let go of before the backward pass."""
        self.fetched: dict[str, int] = {}
        """Buffer -> the microbatch that has read it last."""
        self.place = {task: k for k, task in enumerate(self._order())}
        """Where a task stands in the order in which all ranks issue communications."""
        self.ends: dict[Transport, int] = {}
        """The last task of a transport in that order."""
        self.missing: Counter[Transport] = Counter()
        """Backward passes that have yet to add to a gradient of a weight."""
        self._read_tasks()
        self.repeated.update([("synchronise", w) for w in range(len(lowered.weights)) if self._cuts_each(w)])
        for segment in self.segments:
            for m in range(lowered.stages.microbatches):
                self.missing.update(self._synchronisations(segment, m))

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

    def _read_tasks(self) -> None:
        tasks = self.lowered.tasks
        for task, what in enumerate(tasks.communication):
            for m, member in enumerate(what.members if what is not None else ()):
                assert what is not None
                transport = Transport(what.purpose, member.key, tasks.microbatch[task])
                if transport.microbatch:
                    self.repeated.add((what.purpose, member.key))
                self.task_of[transport, member.phase, member.exchange] = task, m
                if what.purpose in ("gather", "regather") and self.device in member.what.receivers:
                    self.tasks_of.setdefault(transport, set()).add(task)
                    self.members_of.setdefault(task, []).append(transport)
                if self.place[self.ends.setdefault(transport, task)] < self.place[task]:
                    self.ends[transport] = task
                self.left[transport] += self.device in what.senders and member.phase == 0
                self.issues[transport] += self.device in what.devices
                if what.purpose == "regather" and self.device in what.receivers:
                    self.again.add(transport._replace(purpose="gather"))

    def _cuts_each(self, w: int) -> bool:
        """Whether this device cuts its part of the gradient of a weight out of each microbatch's, though nothing
        moves, as the sum of the whole ones would be larger."""
        plan, blocks = self.lowered.weights[w].plan, self.lowered.plain_rows.blocks
        transport = Transport("synchronise", w)
        if plan.sync is None or plan.states < States.GRADIENTS or blocks.each[w] == blocks.bucket[w]:
            return False
        return self.fusion.arrives(transport) and not self._moves(transport) and self._whole(transport) is None

    def instance(self, purpose: Purpose, key: int, microbatch: int) -> Transport:
        """The transport that serves a microbatch: its own, or the one of the step."""
        return Transport(purpose, key, microbatch if (purpose, key) in self.repeated else 0)

    def compile(self) -> None:
        tasks = self.lowered.tasks
        for t in self.place:
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
                self._wait(t)

    def _order(self) -> list[int]:
        """The tasks in the order of the graph; before them, for all microbatches, those of counts over the batch. The
        update comes last, as it takes the gradients of all microbatches, whichever of them it stands with."""
        tasks = self.lowered.tasks
        first = [t for t in range(len(tasks)) if self._is_early(t)]
        first.sort(key=lambda t: (tasks.identity[t][1:3], tasks.identity[t].microbatch, tasks.identity[t].number))
        last = [t for t, kind in enumerate(tasks.kind) if kind == TaskKind.UPDATE]
        apart = {*first, *last}
        return [*first, *(t for t in range(len(tasks)) if t not in apart), *last]

    def _is_early(self, task: int) -> bool:
        what = self.lowered.tasks.communication[task]
        if what is None:
            return self.lowered.tasks.kind[task] == TaskKind.FORWARD and (
                self.lowered.tasks.operator[task] in self.fusion.early
            )
        if what.purpose != "forward":
            return False
        names = (self.lowered.edges[member.key].tensor for member in what.members)
        return all(self.graph.producer[name] in self.fusion.early for name in names)

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
                    self.emit(Add(self.slot(Key("home", name, m)), self._total(name)))
        for _, name in segment.exports:
            for e in self.lowered.edges_of[name] if not again else ():
                self._cut(Transport("forward", e, m))

    def _cut(self, transport: Transport) -> None:
        """Cut out what only the backward pass reads of a value that is made here, as the whole of it would else live
        until then."""
        if self.fusion.waits(transport.key) and not self._receives(transport) and (
            self.fusion.active(transport) and self.fusion.arrives(transport)
        ):
            self._finish(transport)

    def _backward(self, s: int, m: int, kind: TaskKind) -> None:
        segment = self.segments[s]
        seeds = []
        for _, name in segment.seeds if kind != TaskKind.WEIGHT_GRADIENT else ():
            for e in self.lowered.edges_of[name]:
                if self.lowered.edges[e].backward is not None:
                    transport = Transport("backward", e, m)
                    if self.fusion.active(transport) and self.fusion.arrives(transport):
                        self._finish(transport)
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
        return {self.instance("synchronise", w, m) for w in weights if w is not None}

    def _deliver_own(self, segment: Segment, m: int) -> None:
        """Cut the part that this device stores out of gradients that are complete and that it does not send, as the
        whole of them would else live until the update, and add up those of several microbatches."""
        for transport in sorted(self._synchronisations(segment, m)):
            self.missing[transport] -= 1
            if self.missing[transport]:
                continue
            if self._moves(transport):
                self._over(transport)
            elif self.fusion.arrives(transport):
                each = ("synchronise", transport.key) in self.repeated
                if each or self._whole(transport) is None:
                    self._deliver_one(transport)

    def _over(self, transport: Transport) -> None:
        """Keep what stays of gradients that are complete, if all first phases have been issued; note if all has."""
        if not self.left[transport]:
            self._keep(transport)
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
            if self.fusion.active(transport) and self.fusion.arrives(transport) and not self._receives(transport):
                self._finish(transport)

    def _receives(self, transport: Transport) -> bool:
        """Whether this device gets something from another one in a transport."""
        return any(self.device in exchange.receivers for exchange in reshard_of(self.lowered, transport).exchanges)

    def _moves(self, transport: Transport) -> bool:
        """Whether this device takes part in a communication of a transport."""
        return any(
            self.device in exchange.senders or self.device in exchange.receivers
            for phase in reshard_of(self.lowered, transport).phases for exchange in phase.exchanges
        )  # fmt: skip

    def _gradient(self, leaf: Leaf, m: int, part: Part) -> Slot | None:
        """Where the gradient of a leaf is added, if this ``part`` of the backward pass makes it."""
        key = leaf.gradient
        assert key is not None
        trained = self._weight_of_edge(key)
        if part != "all" and (part == "weights") != (trained is not None):
            return None
        at = m if trained is None else self.instance("synchronise", trained, m).microbatch
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
                return self._stored(str(name))
            return self.slot(Key("home", name, m, again and self._inside(str(name), segment)))
        e = int(str(name))
        tensor = self.graph.tensor[self.lowered.edges[e].tensor]
        if self.lowered.edges[e].forward is None:
            return self._fetch(e, m)
        if tensor.kind == "activation":
            second = again and self._inside(tensor.name, segment)
            return self._finish(Transport("recompute" if second else "forward", e, m))
        if tensor.kind == "parameter":
            return self._gathered(self.instance("gather", e, m), again)
        raise AssertionError(f"{tensor.name} has no place")

    def _gathered(self, transport: Transport, again: bool) -> Slot:
        """Where a gathered weight is, which is there from now on, with all that came in the same messages: these would
        else live until nothing is left of them."""
        slot = self._finish(transport)
        for other in self._together(transport):
            self._finish(other)
        if again and transport in self.again:
            self._refill(transport)
        return slot

    def _together(self, transport: Transport) -> list[Transport]:
        """What else comes in messages of a gather and has all been issued."""
        return [
            other
            for other in sorted({t for task in self.tasks_of.get(transport, ()) for t in self.members_of[task]})
            if self.tasks_of[other] <= self.started and self.fusion.arrives(other)
        ]

    def _inside(self, name: str, segment: Segment) -> bool:
        """Whether an activation is made in the region of a segment, and so is computed again with it."""
        return self.fusion.regions[self.graph.producer[name]] == segment.region >= 0

    def _stored(self, name: str) -> Slot:
        slot = self.slot(Key("home", name))
        if self.once(("load", name)):
            self.emit(Load(name, slot))
        return slot

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
                transport = self.instance("gather", int(str(leaf.value.name)), m)
                if transport in self.again:
                    self._refill(transport)
                    slots.append(self.slot(Key("edge", transport.key, transport.microbatch)))
        return slots

    def _refill(self, gather: Transport) -> None:
        transport = gather._replace(purpose="regather")
        if self.once(transport):
            self._assemble_phases(transport, self.slot(Key("edge", gather.key, gather.microbatch)))
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
            here = self._sources(transport, member.phase) if wanted else {}
            sources.append({entry: here[entry] for entry in sorted(wanted)})
            self.issues[transport] -= 1
            self.left[transport] -= self.device in what.senders and member.phase == 0
            last.append(transport)
        self.emit(Start(task, tuple(sources), self.slot(Key("arrived", task))))
        self.started.add(task)
        for transport in dict.fromkeys(last) if what.purpose == "synchronise" else ():
            if not self.missing[transport]:  # else its own gradients are still to come
                self._over(transport)

    def _sources(self, transport: Transport, phase: int) -> dict[int, Slot]:
        """Source entries of a phase on this device, and their slots."""
        entries = reshard_of(self.lowered, transport).phases[phase].source
        own = [k for k, entry in enumerate(entries) if entry.device == self.device]
        if phase > 0:
            self._assemble(transport, phase - 1, {k: self.slot(Key("phase", (transport, k))) for k in own})
            return {k: self.slot(Key("phase", (transport, k))) for k in own}
        return {k: self._source(transport, k) for k in own}

    def _source(self, transport: Transport, entry: int) -> Slot:
        purpose, key, m = transport
        if purpose == "synchronise":
            weight = self.lowered.weights[key]
            return self.slot(Key("edge gradient", weight.edges[weight.plan.origin[entry]], m))
        if purpose == "backward":
            return self.slot(Key("edge gradient", key, m))
        name = self.lowered.edges[key].tensor
        if self.lowered.result_edges.get(name) == key:
            return self._total(name)
        if purpose in ("gather", "regather"):
            return self._stored(name)
        return self.slot(Key("home", name, m, purpose == "recompute"))

    def _finish(self, transport: Transport) -> Slot:
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
            self._assemble_phases(transport, slot)
        return slot

    def _assemble_phases(self, transport: Transport, slot: Slot) -> None:
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
            self._keep(transport)
        wanted = {
            (m, move.source)
            for m, move in self._local(transport, phase)
            if step.source[move.source].device == step.destination[move.destination].device == self.device
        }
        here = self._sources(transport, phase) if wanted else {}
        # Copies are of what the first phase leaves here.
        own = {m: self.slots.get(Key("kept", (transport, m))) if phase == 0 else None for m, _ in wanted}
        kept = {m: slot for m, slot in own.items() if slot is not None}
        sources = {entry: here[entry] for m, entry in sorted(wanted) if m not in kept}
        received = {}
        for x, exchange in enumerate(step.exchanges):
            if self.device in exchange.receivers:
                task, member = self.task_of[transport, phase, x]
                received[x] = task, member, self._wait(task)
        last = phase == len(reshard_of(self.lowered, transport).phases) - 1
        adds, refills = (last and transport.purpose == purpose for purpose in ("backward", "regather"))
        # A gradient is not to keep what it was cut from until the update, nor a weight a message with others.
        copies = transport.purpose == "synchronise" or (transport.purpose == "gather" and received)
        owns = last and bool(copies or transport in self.again or self._saved(transport))
        self.emit(Assemble(transport, phase, sources, kept, received, results, adds, refills, owns))

    def _local(self, transport: Transport, phase: int) -> list[tuple[int, Move]]:
        """Moves of a phase that cross no devices, but for those that the backend adds to what crosses."""
        step, tasks = reshard_of(self.lowered, transport).phases[phase], self.lowered.tasks
        summed: set[int] = set()
        for x, exchange in enumerate(step.exchanges):
            what = tasks.communication[self.task_of[transport, phase, x][0]]
            if what is not None and what.sums:
                summed.update(move.destination for move in exchange.moves)
        return [(m, move) for m, move in enumerate(step.local) if move.destination not in summed]

    def _wait(self, task: int) -> Slot:
        slot = self.slot(Key("arrived", task))
        if self.once(("wait", task)):
            self.emit(Wait(task, slot))
        return slot

    # ---- gradients of weights and results

    def _keep(self, transport: Transport) -> None:
        """Cut out what stays here of gradients, as the whole of them would else live until the update."""
        if not self.once(("keep", transport)):
            return
        step = reshard_of(self.lowered, transport).phases[0]
        parts = {}
        for m, move in self._local(transport, 0):
            entry = step.source[move.source]
            if entry.device == self.device and move.box != entry.box:
                parts[m] = self._source(transport, move.source), self.slot(Key("kept", (transport, m)))
        if parts:
            self.emit(Keep(transport, parts))

    def _deliver(self) -> None:
        """Add all synchronised gradients that are still to come to those of the weights."""
        for w, weight in enumerate(self.lowered.weights):
            if weight.plan.sync is not None and self.fusion.arrives(Transport("synchronise", w)):
                count = self.lowered.stages.microbatches if ("synchronise", w) in self.repeated else 1
                for m in range(count):
                    self._deliver_one(Transport("synchronise", w, m))

    def _saved(self, transport: Transport) -> bool:
        """Whether kernels read an activation that the transport brings, and may save it, or the second half of a
        backward pass waits for the gradient that it brings: views would keep all that they are cut from."""
        edge, graph = self.lowered.edges[transport.key], self.lowered.graph
        if transport.purpose == "backward":
            return self.segments[self.fusion.segment_of[graph.producer[edge.tensor]]].halves
        if transport.purpose not in ("forward", "recompute"):
            return False
        operators = [graph.operators[reader] for reader, _ in edge.readers]
        return graph.tensor[edge.tensor].kind == "activation" and not all(kind_of(op).is_free(op) for op in operators)

    def _deliver_earlier(self, following: Transport | None, task: int) -> None:
        """Add gradients of which this device has issued all, before it does ``task``: those that are to be added before
        the block of the task, if all ranks have issued them in earlier ones; and if it synchronises, as ``following``,
        those of the same weight or another one and an earlier microbatch. Their buffers would else wait for the
        update."""
        rows = self.lowered.tasks.identity
        at, update = rows[task], len(self.lowered.plain_rows.blocks.kind) - 1
        for transport in [t for t in self.issued if t != following]:
            end, added = self.ends[transport], self.lowered.added_before(transport.key)
            later = rows[end].block < at.block and added <= at.block
            earlier = following is not None and transport.microbatch != at.microbatch
            over = self.place[end] < self.place[task] and ((later and transport.microbatch == at.microbatch) or earlier)
            over = over and added < update
            if (following is None or transport.key != following.key) and not over:
                continue
            self.issued.remove(transport)
            if self.fusion.arrives(transport):
                self._deliver_one(transport)

    def _deliver_one(self, transport: Transport) -> None:
        if not self.once(("deliver", transport)):
            return
        whole = self._whole(transport)
        row = transport.key, self._finish(transport) if whole is None else whole
        before = self.instructions[-1]
        if isinstance(before, Deliver):
            self.instructions[-1] = Deliver((*before.weights, row))
        else:
            self.emit(Deliver((row,)))

    def _whole(self, transport: Transport) -> Slot | None:
        """The slot of a gradient that is the stored weight's as it is: nothing is moved, cut out or added."""
        phases = reshard_of(self.lowered, transport).phases
        (own,) = (k for k, entry in enumerate(phases[-1].destination) if entry.device == self.device)
        moves = [move for _, move in self._local(transport, 0) if move.destination == own]
        if len(phases) > 1 or self._moves(transport) or len(moves) != 1:
            return None
        entry = phases[0].source[moves[0].source]
        alike = entry.device == self.device and entry.box == phases[0].destination[own].box
        return self._source(transport, moves[0].source) if alike else None

    def _finish_results(self) -> None:
        for name in self.lowered.update_edges:
            if (m := self.fetched.get(name)) is not None:
                self._finish_buffer(name, m)
        for name, e in self.lowered.result_edges.items():
            if any(entry.device == self.device for entry in self.lowered.edges[e].need):
                self.emit(Result(name, self._result(Transport("forward", e), self._total(name))))

    def _finish_buffer(self, name: str, m: int) -> None:
        e = self.lowered.update_edges[name]
        home = self.slot(Key("home", self.lowered.edges[e].tensor, m))
        self.emit(Result(name, self._result(Transport("forward", e, m), home), True))

    def _result(self, transport: Transport, home: Slot) -> Slot:
        """What an edge without readers brings here; ``home`` if that is what this device has made."""
        arrives = self.fusion.active(transport) and self.fusion.arrives(transport)
        return self._finish(transport) if arrives else home

    def _total(self, name: str) -> Slot:
        """This device's part of a result of the step."""
        return self.slot(Key("total" if self.lowered.stages.microbatches > 1 else "home", name))
