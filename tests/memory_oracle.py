"""The spans of memory by the tasks of a lowered strategy, in plain Python: what ``simulate.lifetimes`` must equal.

A task stands for the moment of its block. Moments are coarser than tasks: what the communications of one block bring
and let go counts as there at the same time, so peaks between moments are no lower than those between tasks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache
from math import prod

from flexsearch.cost.updates import state_bytes
from flexsearch.graph import Box, Flow, OperatorGraph, Tensor, volume
from flexsearch.graph.ops import kept_weights, kind_of, released_weights, saved_tensors
from flexsearch.graph.ops.formats import has_channels_last, takes_copy
from flexsearch.lower import Layout, Lowered, Phase, Reshard, TaskKind, bounding
from flexsearch.lower.recompute import regions_of
from flexsearch.lower.rows import SYNCHRONISE
from flexsearch.simulate.memory import Part
from flexsearch.strategy import States

_OF_ACTIVATIONS = ("forward", "recompute", "backward")


class Span:
    """Bytes on a device, alive from task ``first`` to task ``last``, both included; and until ``block`` begins to send,
    if that is later (0: it is not), or from then on, if it is ``added`` there. ``cut``: the task behind which, before
    the next one, a part is cut out, which is the begin or the end (-1: none); ``left``: likewise, from which a copy is
    cut. ``joined``: the moment (``put_together``) in which it is put together; ``used_up``: that in which something is
    put together from it (-1: none)."""

    __slots__ = ("added", "block", "cut", "device", "first", "joined", "last", "left", "nbytes", "part", "used_up")

    def __init__(self, device: int, nbytes: int, part: Part, first: int) -> None:
        self.device, self.nbytes, self.part, self.first, self.last = device, nbytes, part, first, first
        self.block, self.added, self.cut, self.left, self.joined, self.used_up = 0, False, -1, -1, -1, -1

    def until(self, task: int) -> None:
        self.last = max(self.last, task)


def put_together(lowered: Lowered, task: int, first: bool = False) -> int:
    """The moment in which what a computation needs is put together: its first operand, or the others."""
    return 4 * lowered.tasks.identity[task].block + (not first)


def _arrivals(phase: Phase) -> Counter[int]:
    """By destination entry, how many moves bring something there."""
    return Counter(m.destination for moves in (phase.local, *(e.moves for e in phase.exchanges)) for m in moves)


@cache
def aliased(plan: Reshard) -> frozenset[int]:
    """Devices on which the only destination entry is exactly a local source entry, so that nothing at all is done
    there."""
    (phase, *more), arrive = plan.phases, _arrivals(plan.phases[0])
    entries = Counter(entry.device for entry in phase.destination)
    alone = (move for move in phase.local if arrive[move.destination] == 1 and not more)
    pairs = ((phase.source[move.source], phase.destination[move.destination]) for move in alone)
    return frozenset(b.device for a, b in pairs if a.box == b.box and entries[b.device] == 1)


@cache
def staged(plan: Reshard) -> tuple[dict[int, int], ...]:
    """For each phase by device: elements that arrive in receive buffers, as they are only a part of what they are for,
    or are added to more. An all-reduce is done in place."""
    by_phase = []
    for phase in plan.phases:
        arrive, elements = _arrivals(phase), dict[int, int]()
        for move in (m for exchange in phase.exchanges if exchange.form != "all_reduce" for m in exchange.moves):
            entry = phase.destination[move.destination]
            if arrive[move.destination] > 1 or move.box != entry.box:
                elements[entry.device] = elements.get(entry.device, 0) + volume(move.box)
        by_phase.append(elements)
    return tuple(by_phase)


def spans_of_tasks(lowered: Lowered) -> list[Span]:
    """Everything that is counted, with its lifetime."""
    return _Walk(lowered).spans


class _Walk:
    """Collects the spans of one lowered strategy."""

    def __init__(self, lowered: Lowered) -> None:
        graph = lowered.graph
        self.lowered, self.graph = lowered, graph
        self.rules, self.kept, self.released = saved_tensors(graph), kept_weights(graph), released_weights(graph)
        self.spans: list[Span] = []
        self.end = max(0, len(lowered.tasks) - 1)
        self.task: dict[tuple[int, int, int], int] = {}
        """(kind, operator, device) -> task."""
        self.crossing: dict[tuple[str, int, int, int], list[int]] = {}
        """(purpose, edge or weight, phase, device) -> communication tasks, in order."""
        self.sending: dict[tuple[int, int], list[int]] = {}
        """(weight, device) -> those in which the device sends gradients as its pieces make them."""
        self.used: dict[tuple[int, int], int] = {}
        """(communication task, device) -> the first compute task there that waits for it."""
        self._index()
        self.given = self._given()
        """(edge, device) whose gradients are made, as they are used."""
        self.held: dict[tuple[int, int], Span] = {}
        """(edge, device) -> what its readers there read; missing: at hand all the time."""
        self.held_again: dict[tuple[int, int], Span] = {}
        """Likewise, of what was computed or gathered again."""
        self.region = regions_of(graph, lowered.options.recompute, lowered.stages.of(len(graph.operators)))
        self._constant()
        self._weights()
        self._forward()
        self._backward()

    def _index(self) -> None:
        tasks = self.lowered.tasks
        for t, (kind, operator, device, communication) in enumerate(
            zip(tasks.kind, tasks.operator, tasks.device, tasks.communication, strict=True)
        ):
            if communication is None:
                self.task[kind, operator, device] = t
                for dependency in tasks.dependencies[t]:
                    self.used.setdefault((dependency, device), t)
            else:
                for member in communication.members:
                    what = member.what
                    for device in {*what.senders, *what.receivers}:
                        key = communication.purpose, member.key, member.phase, device
                        self.crossing.setdefault(key, []).append(t)
                    for device in what.senders if communication.purpose == "synchronise" and not member.phase else ():
                        self.sending.setdefault((member.key, device), []).append(t)

    def _given(self) -> set[tuple[int, int]]:
        """Gradients that are sent, or used where they are made."""
        plans = [([e] * len(edge.need), edge.backward) for e, edge in enumerate(self.lowered.edges)]
        plans += [([w.edges[k] for k in w.plan.origin], w.plan.sync) for w in self.lowered.weights]
        found = set()
        for edge_of, plan in plans:
            if plan is not None:
                first = plan.phases[0]
                moves = [*first.local, *(move for exchange in first.exchanges for move in exchange.moves)]
                found |= {(edge_of[move.source], first.source[move.source].device) for move in moves}
        return found

    def _spared(self, i: int, p: int, device: int) -> bool:
        """Whether an operator keeps an operand, which nobody else reads, for the gradient of one alone, and a device
        does not make that."""
        op, lowered = self.graph.operators[i], self.lowered
        trained = [q for q, flow in enumerate(self.graph.flows[i]) if flow != Flow.VALUE]
        made = [q for q in trained if op.inputs[q] in self.graph.producer and self.graph.flows[i][q] == Flow.BOTH]
        if op.half == "weights" or len(made) != 1 or len(lowered.edges[lowered.edge_of[i, p]].readers) > 1:
            return False
        weights = [q for q in range(len(op.inputs)) if (i, q) in self.kept]
        product = weights == [p] and not kind_of(op).saved_without_weights.inputs
        only = product or (p == made[0] and trained == made)
        return only and (lowered.edge_of[i, made[0]], device) not in self.given

    def _makes_nothing(self, i: int, device: int) -> bool:
        """Whether an operator makes one gradient alone, of an activation, and a device does not make that."""
        op, flows = self.graph.operators[i], self.graph.flows[i]
        trained = [q for q, flow in enumerate(flows) if flow != Flow.VALUE]
        if op.half == "weights" or len(trained) != 1 or op.inputs[trained[0]] not in self.graph.producer:
            return False
        both = flows[trained[0]] == Flow.BOTH and self.graph.has_backward[i]
        return both and (self.lowered.edge_of[i, trained[0]], device) not in self.given

    def _new(self, device: int, nbytes: int, part: Part, first: int) -> Span:
        span = Span(device, nbytes, part, first)
        self.spans.append(span)
        return span

    def _always(self, device: int, nbytes: int, part: Part) -> None:
        self._new(device, nbytes, part, 0).until(self.end)

    def _constant(self) -> None:
        """What is there during the whole step."""
        lowered, options = self.lowered, self.lowered.options
        for tensor in self.graph.of_kind("input", "buffer", "constant"):
            boxes: dict[int, Box] = {}
            for e in lowered.edges_of[tensor.name]:
                for device, box, _ in lowered.edges[e].need:
                    boxes[device] = bounding((boxes.get(device, box), box))
            part: Part = "activations" if tensor.kind == "input" else "weights"
            for device, box in boxes.items():
                self._always(device, volume(box) * tensor.itemsize, part)
            self._images(tensor)
        for weight in lowered.weights:
            tensor = self.graph.tensor[weight.tensor]
            kept = state_bytes(tensor, options.optimizer, options.precision)
            for device, box, _ in weight.plan.storage:
                self._always(device, volume(box) * tensor.itemsize, "weights")
                if weight.plan.sync is not None and kept:
                    self._always(device, volume(box) * kept, "optimizer")

    def _images(self, tensor: Tensor) -> None:
        """The copies of images at hand with the channels last."""
        for e in self.lowered.edges_of[tensor.name]:
            readers = [reader for reader, _ in self.lowered.edges[e].readers]
            for device, box, _ in self.lowered.edges[e].need:
                if not has_channels_last(len(box), tensor.dtype, self.lowered.topology.devices[device].kind):
                    continue
                _, channels, *places = (high - low for low, high in box)
                if not takes_copy(channels, prod(places)):
                    continue
                late = [self.graph.operators[reader].half == "weights" for reader in readers]
                kinds = [TaskKind.BACKWARD if half else TaskKind.FORWARD for half in late]
                now = min(self.task[kind, i, device] for kind, i in zip(kinds, readers, strict=True))
                self.held[e, device] = self._new(device, volume(box) * tensor.itemsize, "activations", now)

    def _weights(self) -> None:
        """Gathered weights; a part cut from what the device stores is a view of it."""
        regathered = {key for purpose, key, _, _ in self.crossing if purpose == "regather"}
        for weight in self.lowered.weights:
            tensor = self.graph.tensor[weight.tensor]
            for e, plan in zip(weight.edges, weight.plan.forward, strict=True):
                if plan is None:  # it is not read
                    continue
                if plan.exchanges:
                    remote = {d for exchange in plan.exchanges for d in exchange.receivers}
                    self._arrive("gather", e, plan, tensor, "gathered", {}, remote)
                    if e in regathered:
                        self._arrive("regather", e, plan, tensor, "gathered", {}, remote, again=True)

    def _forward(self) -> None:
        for i in range(len(self.graph.operators)):
            for device in self.lowered.placed[i].devices:
                self._read(i, device)
            self._make(i, TaskKind.FORWARD)
            if any((TaskKind.RECOMPUTE, i, d) in self.task for d in self.lowered.placed[i].devices):
                self._make(i, TaskKind.RECOMPUTE)

    def _read(self, i: int, device: int) -> None:
        """Until when an operator needs what it reads on a device, in each of its passes."""
        graph, lowered, rule = self.graph, self.lowered, self.rules[i]
        now = self.task[TaskKind.FORWARD, i, device]
        again = self.task.get((TaskKind.RECOMPUTE, i, device))
        back = self.task.get((TaskKind.BACKWARD, i, device))
        late = self.task.get((TaskKind.WEIGHT_GRADIENT, i, device), back)
        for p, name in enumerate(graph.operators[i].inputs):
            e = lowered.edge_of[i, p]
            first, second = self.held.get((e, device)), self.held_again.get((e, device))
            producer = graph.producer.get(name)
            inside = again is not None and producer is not None and self.region[producer] == self.region[i]
            weight = first is not None and first.part == "gathered"
            done = late if rule.inputs else None
            if weight:
                needed = back if (i, p) in self.released or (i, p) not in self.kept else late
                done = needed if second is not None or (i, p) in self.kept else None
            if self._spared(i, p, device) and not (weight and second is not None):
                done = None
            later = [t for t in (again, done) if t is not None]
            if first is not None and (graph.operators[i].half != "weights" or again is not None):
                first.until(now)
            kept = second if inside or (weight and second is not None) else first
            if kept is not None:
                for task in later:
                    kept.until(task)

    def _make(self, i: int, kind: TaskKind) -> None:
        """The outputs of a pass of an operator, and their copies for those that read them there."""
        graph, lowered, op, rule = self.graph, self.lowered, self.graph.operators[i], self.rules[i]
        placement, again = lowered.placed[i], kind == TaskKind.RECOMPUTE
        if op.half == "weights":  # only a gradient
            return
        held = self.held_again if again else self.held
        now = {d: self.task[kind, i, d] for d in placement.devices}
        for j, name in enumerate(op.outputs):
            made: dict[int, Span] = {}
            for k, device in enumerate(placement.devices):
                back = self.task.get((TaskKind.BACKWARD, i, device), now[device])
                back = self.task.get((TaskKind.WEIGHT_GRADIENT, i, device), back)
                if (TaskKind.RECOMPUTE, i, device) in self.task and not again:
                    back = now[device]
                if self._makes_nothing(i, device):
                    back = now[device]
                if rule.alias:
                    source = self._source(i, device, again)
                    if source is not None:
                        made[device] = source
                    continue
                elements, itemsize = volume(placement.pieces[k].outputs[j]), graph.tensor[name].itemsize
                made[device] = self._new(device, elements * itemsize, "activations", now[device])
                made[device].until(back if rule.outputs else now[device])
                besides = rule.besides(elements, itemsize)
                if besides and back > now[device]:
                    self._new(device, besides, "activations", now[device]).until(back)
                self._widen(i, k, device, elements * itemsize, now[device], back)
            for e in lowered.edges_of[name]:
                plan, readers = lowered.edges[e].forward, lowered.edges[e].readers
                assert plan is not None
                if again and not any(self.region[o] == self.region[i] for o, _ in readers):
                    continue
                purpose = "recompute" if again else "forward"
                self._leave(purpose, e, plan, made, now)
                arrived = self._arrive(purpose, e, plan, graph.tensor[name], "activations", now, again=again)
                for device in aliased(plan) & made.keys():
                    arrived[device] = held[e, device] = made[device]
                if not readers:  # the loss, a new running mean: kept to the end
                    for span in arrived.values():
                        span.until(self.end)

    def _widen(self, i: int, place: int, device: int, made: int, now: int, back: int) -> None:
        """What attention on a CPU makes as wide as queries and keys, of values that are not, in each of its passes.
        ``made``: bytes of its result."""
        op, tensor = self.graph.operators[i], self.graph.tensor
        if not _attends(self.graph, i) or self.lowered.topology.devices[device].kind != "cpu":
            return
        boxes, itemsize = self.lowered.placed[i].pieces[place].inputs[:2], tensor[op.inputs[0]].itemsize
        q, k = (volume(box) * itemsize for box in boxes if box is not None)
        if q <= made:
            return
        count = min(8, q >> 17)
        narrow = k // itemsize * (made // itemsize) // (q // itemsize) * itemsize
        whole = count < 3
        self._new(device, q + k - made if whole else (q + k) // itemsize // count * itemsize, "activations", now)
        if back > now:
            both = 2 * (q + k) - narrow if whole else 3 * (q + k) // itemsize // count * itemsize
            at = self.task[TaskKind.BACKWARD, i, device]
            self._new(device, both, "activations", at)

    def _source(self, i: int, device: int, again: bool) -> Span | None:
        """What a view is of: made again only if that is made in the same region."""
        e = self.lowered.edge_of[i, 0]
        producer = self.graph.producer.get(self.graph.operators[i].inputs[0])
        inside = producer is not None and self.region[producer] == self.region[i]
        return (self.held_again if again and inside else self.held).get((e, device))

    def _backward(self) -> None:
        graph, lowered = self.graph, self.lowered
        given = self.given
        gradient: dict[tuple[int, int], Span] = {}  # (edge, device) -> gradient that the readers' pieces add up
        arrived: dict[tuple[int, int], Span] = {}  # (edge, device) -> gradient in the producer's layout
        home: dict[tuple[str, int], Span] = {}  # (tensor, device) -> the first of them, to which others are added
        own = set[tuple[str, int]]()  # (tensor, device) of which the sum has memory of its own
        for i in reversed(range(len(graph.operators))):
            if not graph.has_backward[i]:
                continue
            op, placement = graph.operators[i], lowered.placed[i]
            alias = self.rules[i].alias
            now, previous = {d: self.task[TaskKind.BACKWARD, i, d] for d in placement.devices}, (-1, -1)
            late = {d: self.task.get((TaskKind.WEIGHT_GRADIENT, i, d), now[d]) for d in placement.devices}
            of_output: dict[int, Span] = {}
            for name in op.outputs:
                for e in lowered.edges_of[name]:
                    for device in placement.devices:
                        if (span := arrived.get((e, device))) is not None:
                            if op.half == "inputs":  # an operand's gradient is the same memory from there on
                                span.used_up = max(span.used_up, put_together(lowered, now[device]))
                            else:
                                span.until(late[device])
                            of_output[device] = home[name, device]
            for p, name in enumerate(op.inputs):
                if graph.flows[i][p] == Flow.VALUE:
                    continue
                e, tensor, held = lowered.edge_of[i, p], graph.tensor[name], graph.gradient[name]
                made = late if tensor.kind == "parameter" else now
                for piece, device in zip(placement.pieces, placement.devices, strict=True):
                    box = piece.inputs[p]
                    if box is None:
                        continue
                    if (e, device) not in given:
                        together = {(lowered.edge_of[i, q], device) for q in range(3)} if _attends(graph, i) else set()
                        if given & together and p < 3 and lowered.edges[e].readers[-1] == (i, p):
                            self._new(device, volume(box) * tensor.itemsize, "activations", now[device])
                        continue
                    if held.dtype != tensor.dtype and (e, i) != previous:  # what this reader makes, until it is cast
                        self._new(device, volume(box) * tensor.itemsize, "gradients", made[device])
                    if (e, device) in gradient:
                        gradient[e, device].until(made[device])
                    elif (
                        alias and p == 0 and tensor.kind == "activation" and device in of_output
                        and of_output[device].nbytes == volume(box) * tensor.itemsize
                    ):  # fmt: skip
                        gradient[e, device] = of_output[device]
                    else:
                        part: Part = "gradients" if tensor.kind == "parameter" else "activations"
                        gradient[e, device] = self._new(device, volume(box) * held.itemsize, part, made[device])
                previous = e, i
            for e in dict.fromkeys(lowered.edge_of[i, p] for p in reversed(range(len(op.inputs)))):
                edge = lowered.edges[e]
                if edge.backward is not None and edge.readers[0][0] == i:
                    mine = {d: gradient[e, d] for d in {x.device for x in edge.need} if (e, d) in gradient}
                    self._leave("backward", e, edge.backward, mine, now)
                    found = self._arrive(
                        "backward", e, edge.backward, graph.tensor[edge.tensor], "activations", now, hold=False
                    )
                    found.update({d: mine[d] for d in aliased(edge.backward) & mine.keys()})
                    for d, span in found.items():
                        total = home.setdefault((edge.tensor, d), span)
                        receives = any(d in x.receivers for x in edge.backward.exchanges)
                        copied, summed = d not in aliased(edge.backward), (edge.tensor, d) in own
                        if total is span:
                            arrived[e, d] = span
                            if copied and (receives or d not in mine or span.nbytes > mine[d].nbytes):
                                own.add((edge.tensor, d))
                            continue
                        if receives:  # added where it is put together
                            crossed = [t for x in range(2) for t in self.crossing.get(("backward", e, x, d), ())]
                            span.used_up = max(self._joined("backward", e, d, t) for t in crossed)
                        elif d in mine and total.first > now[d]:
                            total.first, total.joined = now[d], -1
                        if summed and (span.joined >= 0 if receives else d in mine and copied):
                            self.spans.remove(span)  # added in the memory of the sum
                        if receives or (d in mine and copied):
                            own.add((edge.tensor, d))
        self._synchronise(gradient)

    def _synchronise(self, gradient: Mapping[tuple[int, int], Span]) -> None:
        """Gradients of weights: from the pieces' to the stored ones, which live until the update."""
        for w, weight in enumerate(self.lowered.weights):
            sync = weight.plan.sync
            if sync is None:
                continue
            tensor = self.graph.gradient[weight.tensor]
            born: dict[int, int] = {}
            for e in weight.edges:
                mine = {d: gradient[e, d] for d in {x.device for x in self.lowered.edges[e].need} if (e, d) in gradient}
                self._leave("synchronise", w, sync, mine)
                for device, span in mine.items():
                    born[device] = max(born.get(device, 0), span.last)
                    if device in aliased(sync):
                        span.until(self._update(device))
                    elif (w, device) not in self.sending:
                        span.cut = span.last
                    elif message := self._message(w, sync, device, span.nbytes, tensor.itemsize):
                        sent = self.crossing["synchronise", w, 0, device]
                        self._new(device, message, "buffers", min(sent)).until(max(sent))
            for device, span in self._arrive("synchronise", w, sync, tensor, "gradients", born, hold=False).items():
                span.until(self._update(device))

    def _message(self, w: int, sync: Reshard, device: int, made: int, itemsize: int) -> int:
        """Bytes of messages into which a device copies parts of a gradient, as another part of it stays, and they lie
        apart or go with other weights'. Less the part that stays, if that is cut out behind other weights' parts."""
        phase, blocks = sync.phases[0], self.lowered.rows.blocks
        own = {x.source for x in phase.local if x.box != phase.source[x.source].box}
        sent = [x for exchange in phase.exchanges for x in exchange.moves if x.source in own]
        sent = [x for x in sent if phase.source[x.source].device == device]
        apart = any(x.box[1:] != phase.source[x.source].box[1:] for x in sent)
        bucket = blocks.bucket[w]
        members = blocks.member[blocks.member_first[bucket] : blocks.member_last[bucket]].tolist()
        stays = self._kept(sync, device, itemsize)
        if not sent or not (apart or len(members) > 1) or made <= stays:
            return 0
        nbytes = [self.graph.gradient[self.lowered.weights[k].tensor].nbytes for k in members]
        most = [n - sum(nbytes[:k]) for k, n in enumerate(nbytes)]
        return made - stays - (0 if members[most.index(max(most))] == w else stays)

    def _kept(self, sync: Reshard, device: int, itemsize: int) -> int:
        """Bytes of the part of a gradient that a device keeps of what its own pieces make."""
        phase = sync.phases[0]
        whole = _sizes(phase.destination, itemsize).get(device, 0)
        return whole if len(sync.phases) > 1 else whole - self._arriving(sync, device) * itemsize

    def _arriving(self, sync: Reshard, device: int) -> int:
        """Elements that a device puts together in one phase with less of its own than they make, or 0."""
        phase = sync.phases[0]
        boxes = {box for d, box, _ in phase.destination if d == device}
        own = any(x.box in boxes and phase.source[x.source].device == device for x in phase.local)
        most = sum(map(volume, boxes))
        return 0 if own or len(sync.phases) > 1 else min(most, staged(sync)[0].get(device, 0))

    def _until_added(self, key: int, span: Span, begins: bool = False) -> None:
        """Let a span live until what synchronises a weight is added, or begin then."""
        if self.lowered.weights[key].plan.states > States.WHOLE:
            span.block = self._next_but_one(min(self._crossing_of(key)))
            rows = self.lowered.tasks.identity
            if begins and rows[span.first].block < span.block:
                span.added, span.first = True, next(t for t, row in enumerate(rows) if row.block >= span.block)
        elif begins:
            span.first = self._update(span.device)
        else:
            span.until(self._update(span.device))

    def _crossing_of(self, key: int) -> list[int]:
        """The communications of the first phase of a weight's synchronisation."""
        rows = [sent for (p, k, phase, _), sent in self.crossing.items() if (p, k, phase) == ("synchronise", key, 0)]
        return [t for sent in rows for t in sent]

    def _update(self, device: int) -> int:
        return self.task.get((TaskKind.UPDATE, -1, device), self.end)

    def _leave(
        self, purpose: str, key: int, plan: Reshard, spans: Mapping[int, Span], now: Mapping[int, int] | None = None
    ) -> None:
        """What is sent lives until its last communication of the first phase has been issued; that from which a copy is
        cut until then: behind ``now``, the task that has made all of it."""
        made = {device for phase in plan.phases for device, _, _ in phase.destination}
        for device, span in spans.items():
            sent = self.crossing.get((purpose, key, 0, device), ())
            sent = self.sending.get((key, device), ()) if purpose == "synchronise" else sent
            span.until(max(sent, default=span.last))
            if not sent and now is not None and device not in aliased(plan) and device in made:
                span.left = max(span.left, now[device])
            if sent and purpose in _OF_ACTIVATIONS and len(plan.phases) == 1 and staged(plan)[0].get(device):
                span.used_up = max(span.used_up, *(self._joined(purpose, key, device, t) for t in sent))

    def _arrive(
        self, purpose: str, key: int, plan: Reshard, tensor: Tensor, part: Part, born: Mapping[int, int],
        only: Iterable[int] | None = None, hold: bool = True, again: bool = False,
    ) -> dict[int, Span]:  # fmt: skip
        """Spans of the new copies that a reshard makes, by device, with its intermediate and receive buffers. A copy
        exists from the first communication that touches its device, or from ``born`` if it is cut locally."""
        result: dict[int, Span] = {}
        last = len(plan.phases) - 1
        if last:
            for device, nbytes in _sizes(plan.phases[0].destination, tensor.itemsize).items():
                first = min(self.crossing.get((purpose, key, 0, device), (born.get(device, 0),)))
                middle = self._new(device, nbytes, "buffers", first)
                if (purpose, key, 0, device) not in self.crossing and device in born:
                    middle.cut, middle.first = first, first + 1
                second = self.crossing.get((purpose, key, 1, device), ())
                middle.until(max(second, default=first))
                arriving = staged(plan)[1].get(device, 0)
                if purpose != "synchronise" and 0 < arriving < _sizes(plan.destination, 1).get(device, 0):
                    middle.used_up = max(self._joined(purpose, key, device, t) for t in second)
                if purpose == "synchronise" and (purpose, key, 1, device) in self.crossing:
                    self._until_added(key, middle)
        for device, nbytes in _sizes(plan.destination, tensor.itemsize).items():
            if device in aliased(plan) or (only is not None and device not in only):
                continue
            tasks = [t for x in range(last + 1) for t in self.crossing.get((purpose, key, x, device), ())]
            if last and (final := self.crossing.get((purpose, key, last, device))):
                tasks = final
            # Where nothing arrives and nothing is cut, no reader makes a gradient: it is zero, from the first one on.
            otherwise = born.get(device, min(born.values(), default=0))
            result[device] = self._new(device, nbytes, part, min(tasks, default=otherwise))
            sends = (key, device) in self.sending or ("synchronise", key, 1, device) in self.crossing
            local = not sends if purpose == "synchronise" else not tasks and purpose in _OF_ACTIVATIONS
            if local and (device in born or purpose != "synchronise"):
                result[device].cut, result[device].first = otherwise, otherwise + 1
            result[device].until(max(tasks, default=0))
            if purpose == "synchronise":
                self._put_together(key, plan, device, result[device], tensor.itemsize)
            if hold:
                (self.held_again if again else self.held)[key, device] = result[device]
        joined = self._receive(purpose, key, plan, tensor.itemsize)
        for device, task in joined.items():
            if device in result and task > result[device].first:
                result[device].joined, result[device].first = self._put_together_for(purpose, key, task), task
        return result

    def _put_together(self, key: int, plan: Reshard, device: int, result: Span, itemsize: int) -> None:
        """Begin a gradient as it is stored where it is added, if it is put together there: behind two phases, or of
        several parts. The device's own part is there until then, or if it is as large, until right before that."""
        if ("synchronise", key, 1, device) in self.crossing:
            self._until_added(key, result, True)
        elif len(plan.phases) == 1 and staged(plan)[0].get(device, 0):
            arriving = self._arriving(plan, device) * itemsize
            if result.nbytes > arriving:
                own = self._new(device, result.nbytes - arriving, "gradients", result.first)
                own.cut = result.cut
                if arriving:
                    self._until_added(key, own)
                elif self.lowered.weights[key].plan.states > States.WHOLE:
                    own.used_up = 4 * self._next_but_one(min(self._crossing_of(key))) + 1
                else:
                    own.used_up = put_together(self.lowered, self._update(device))
            result.cut = -1
            self._until_added(key, result, True)

    def _receive(self, purpose: str, key: int, plan: Reshard, itemsize: int) -> dict[int, int]:
        """Receive buffers. Returns by device the task before which what they bring is put together."""
        joined: dict[int, int] = {}
        between = {device for device, _, _ in plan.phases[0].destination}
        for x, elements_of in enumerate(staged(plan)):
            for device, elements in elements_of.items():
                tasks = self.crossing.get((purpose, key, x, device), ())
                if tasks:
                    if purpose != "synchronise" and x + 1 < len(plan.phases) and device in between:
                        elements = max(0, elements - staged(plan)[1].get(device, 0))  # gone when that comes
                    buffer = self._new(device, elements * itemsize, "buffers", min(tasks))
                    if purpose == "synchronise" and not x and (again := self.crossing.get((purpose, key, 1, device))):
                        buffer.until(max(again))
                    elif purpose == "synchronise" and self.lowered.weights[key].plan.states > States.WHOLE:
                        # A second phase may end before the block that the first one's gradients are added at.
                        self._until_added(key, buffer)
                        buffer.until(tasks[-1])
                    elif purpose != "synchronise" and x + 1 < len(plan.phases):
                        buffer.until(max(self.crossing.get((purpose, key, 1, device), tasks)))
                    else:
                        used = max(self._unpacked(purpose, key, device, t) for t in tasks)
                        if purpose == "synchronise":
                            buffer.until(used)
                        elif used > max(tasks):
                            joined[device] = max(joined.get(device, 0), used)
                            buffer.used_up = self._put_together_for(purpose, key, joined[device])
        return joined

    def _next_but_one(self, task: int) -> int:
        """The block before which gradients kept in parts are added that ``task`` sends: that of the next bucket but
        one of the stage, each behind some computing, or the last one; the update for weights of several stages."""
        block, rows = self.lowered.tasks.identity[task].block, self.lowered.rows
        stage, kinds = rows.blocks.stage, rows.schedule.kind
        later = [b for b in range(block + 1, len(kinds)) if stage[b] == stage[block]]
        last = len(kinds) - 1
        if stage[block] == len(self.lowered.stages):
            return last
        for _ in range(2):
            computing = next((b for b in later if b > block and kinds[b] != SYNCHRONISE), last)
            block = next((b for b in later if b > computing and kinds[b] == SYNCHRONISE), last)
        return block if block < last else max(b for b in later if kinds[b] == SYNCHRONISE)

    def _unpacked(self, purpose: str, key: int, device: int, task: int) -> int:
        """The first compute task that waits for what a communication brings. Weights that are gathered together are
        unpacked before the first that reads any of them, on whatever device."""
        if purpose in ("gather", "regather"):
            block, rows = self._first_read(key, purpose == "regather"), self.lowered.tasks.identity
            reads = (t for t in range(task + 1, len(rows)) if rows[t].block >= block and not rows[t].communicates)
            return next(reads, task)
        return self.used.get((task, device), task)

    def _joined(self, purpose: str, key: int, device: int, task: int) -> int:
        """The moment in which what a communication brings is put together."""
        return self._put_together_for(purpose, key, self._unpacked(purpose, key, device, task))

    def _put_together_for(self, purpose: str, key: int, task: int) -> int:
        """The moment in which what crosses an edge is put together for a computation: that of its first operand, or of
        the others. A gradient of its output comes before weights that are gathered again; behind what it reads, if it
        has no other pass."""
        if purpose in ("gather", "regather"):
            return put_together(self.lowered, task)
        tasks = self.lowered.tasks
        operator, device = tasks.operator[task], tasks.device[task]
        if purpose == "backward":
            late = self.graph.operators[operator].half == "weights"
            return put_together(self.lowered, task, not late or (TaskKind.RECOMPUTE, operator, device) in self.task)
        return put_together(self.lowered, task, (operator, 0) in self.lowered.edges[key].readers)

    def _first_read(self, edge: int, again: bool) -> int:
        """The first block that reads a weight that is gathered (``again``) with that of an edge."""
        blocks, graph = self.lowered.rows.blocks, self.graph
        names = [tensor.name for tensor in graph.of_kind("parameter")]
        gathers = (blocks.regather_of if again else blocks.gather_of).tolist()
        pack = gathers[names.index(self.lowered.edges[edge].tensor)]
        found = []
        for name, gather in zip(names, gathers, strict=True):
            for i, _ in graph.consumers[name] if gather == pack else ():
                late = graph.operators[i].half == "weights"
                columns = (blocks.recompute_of, blocks.backward_of) if again else (blocks.forward_of,)
                columns = (blocks.backward_of,) if late and not again else columns
                found.append(min(int(column[i]) for column in columns))
        return min(found)


def _attends(graph: OperatorGraph, i: int) -> bool:
    """Whether an operator is attention of one kernel, which makes gradients of all three operands or of none."""
    op = graph.operators[i]
    plain = op.kind == "attention" and not op.attributes.get("dropout") and not op.attributes.get("grouped")
    return plain and len(graph.tensor[op.outputs[0]].shape) == 4


def _sizes(layout: Layout, itemsize: int) -> dict[int, int]:
    sizes: dict[int, int] = {}
    for device, box, _ in layout:
        sizes[device] = sizes.get(device, 0) + volume(box) * itemsize
    return sizes
