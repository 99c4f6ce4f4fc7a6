"""The definition of a plan's tasks and their order, for one stage and one microbatch, in plain Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf, prod

from flexsearch.cost.communication import Transfer
from flexsearch.cost.efficiency import moving_rate
from flexsearch.cost.ticks import TICK, whole
from flexsearch.graph import Flow, volume
from flexsearch.graph.samples import counting
from flexsearch.lower import Communication, Exchange, Lowered, Lowering, Member, Reshard, TaskGraph, TaskKind
from flexsearch.lower.taskgraph import Purpose


def task_graph(lowering: Lowering, lowered: Lowered) -> TaskGraph:
    """The tasks of a plan, from its pieces, edges and weights."""
    return _Definition(lowering, lowered).tasks


class _Definition:
    def __init__(self, lowering: Lowering, lowered: Lowered) -> None:
        self.lowering, self.lowered, self.graph = lowering, lowered, lowered.graph
        self.tasks = TaskGraph()
        self.last: dict[int, int] = {}  # by device, what it computed last
        self.arrived: dict[tuple[str, int], dict[int, list[int]]] = {}
        """(purpose, edge or weight) -> device -> communications that deliver there."""
        self.forward()
        self.backward()
        self.results()
        self.update()

    def forward(self) -> None:
        packs = self.packs()
        needed = sorted({reader for _, reader in packs})
        early = counting(self.graph)
        for i in sorted(range(len(self.graph.operators)), key=lambda i: i not in early):
            op = self.graph.operators[i]
            for pack, reader in packs:
                before = needed.index(reader) - self.lowered.options.prefetch
                if i == (needed[before] if before >= 0 else 0):
                    self.gather(pack)
            self.compute(TaskKind.FORWARD, i, self.seconds(i, 0), ("forward", "gather"), [
                self.lowered.edge_of[i, p] for p in range(len(op.inputs)) if op.half != "weights"
            ])  # fmt: skip
            for name in op.outputs:
                for e in self.lowered.edges_of[name]:
                    if e not in self.lowered.result_edges.values():
                        self.forward_reshard(e)

    def results(self) -> None:
        """The loss, at the end of the step."""
        for e in self.lowered.result_edges.values():
            self.forward_reshard(e)

    def forward_reshard(self, e: int) -> None:
        forward = self.lowered.edges[e].forward
        if forward is not None:  # else a gradient alone passes
            self.reshard("forward", e, forward)

    def packs(self) -> list[tuple[list[int], int]]:
        """Weights that are gathered together, and the first operator that reads one of them: neighbours that one
        operator each reads, as many as fill a bucket."""
        found: list[tuple[list[int], int]] = []
        bucket, filled = None, 0
        consumers = [
            [o for o, p in self.graph.consumers[weight.tensor] if self.graph.flows[o][p] != Flow.GRADIENT]
            for weight in self.lowered.weights
        ]
        for w in sorted(range(len(consumers)), key=lambda w: (min(consumers[w], default=0), w)):
            first, nbytes = min(consumers[w], default=0), self.graph.tensor[self.lowered.weights[w].tensor].nbytes
            if len(set(consumers[w])) > 1:
                found.append(([w], first))
            elif bucket is not None and filled + nbytes <= self.lowered.options.bucket_bytes:
                bucket.append(w)
                filled += nbytes
            else:
                bucket, filled = [w], nbytes
                found.append((bucket, first))
        return sorted(found, key=lambda row: row[1])

    def gather(self, pack: Sequence[int]) -> None:
        """Exchanges of the same form, senders, receivers and type of elements as one."""
        together: dict[object, list[Member]] = {}
        for w in pack:
            weight, dtype = self.lowered.weights[w], self.graph.tensor[self.lowered.weights[w].tensor].dtype
            for e, plan in zip(weight.edges, weight.plan.forward, strict=True):
                for x, exchange in enumerate(plan.phase_exchanges[0] if plan is not None and plan.exchanges else ()):
                    key = exchange.form, exchange.senders, exchange.receivers, dtype
                    assert plan is not None
                    together.setdefault(key, []).append(Member(e, plan, 0, x))
        for members in together.values():
            self.communicate("gather", members, {})

    def backward(self) -> None:
        graph, lowered = self.graph, self.lowered
        bucket_of = self.lowering.buckets(lowered.options.bucket_bytes)
        readers = [
            [o for o, p in graph.consumers[weight.tensor] if graph.flows[o][p] != Flow.VALUE]
            for weight in lowered.weights
        ]  # fmt: skip
        done: dict[int, list[int]] = {}  # bucket -> its weights whose gradients are complete
        before: list[int] = []
        for i in reversed(range(len(graph.operators))):
            if not graph.has_backward[i]:
                continue
            op = graph.operators[i]
            late = [lowered.edge_of[i, p] for p in range(len(op.inputs))] if op.half == "weights" else []
            purposes = ("forward", "backward") if late else ("backward",)
            self.compute(TaskKind.BACKWARD, i, self.with_casts(i), purposes, late + [
                e for name in op.outputs for e in lowered.edges_of[name] if lowered.edges[e].backward is not None
            ])  # fmt: skip
            for e in dict.fromkeys(lowered.edge_of[i, p] for p in range(len(op.inputs))):
                edge = lowered.edges[e]
                if edge.backward is not None and edge.readers[0][0] == i:
                    self.reshard("backward", e, edge.backward)
            for w, of in enumerate(readers):
                if of and min(of) == i:
                    bucket = bucket_of[lowered.weights[w].tensor]
                    done.setdefault(bucket, []).append(w)
                    if len(done[bucket]) == sum(bool(r) and bucket_of[lowered.weights[v].tensor] == bucket
                                                for v, r in enumerate(readers)):  # fmt: skip
                        self.synchronise(before, 1)
                        self.synchronise(done[bucket], 0)
                        before = done[bucket]
        self.synchronise(before, 1)

    def seconds(self, i: int, backward: int) -> list[float]:
        """Of the forward or backward tasks of an operator's pieces."""
        placed, costs = self.lowered.placed[i], self.lowering.costs
        return [costs.compute(i, *row)[backward] for row in zip(placed.pieces, placed.devices, strict=True)]

    def with_casts(self, i: int) -> list[float]:
        """Backward passes, and behind each a cast of the gradients of weights that it makes. Costs follow from extents,
        as if each piece made that of a bias."""
        op, graph, placed = self.graph.operators[i], self.graph, self.lowered.placed[i]
        seconds = []
        for piece, device, alone in zip(placed.pieces, placed.devices, self.seconds(i, 1), strict=True):
            moved = 0
            for name, flow, operand in zip(op.inputs, graph.flows[i], op.access.inputs, strict=True):
                made, held = graph.tensor[name], graph.gradient[name]
                if flow != Flow.VALUE and made.dtype != held.dtype:
                    moved += prod(map(piece.extent, operand.names())) * (made.itemsize + held.itemsize)
            rate = moving_rate(self.lowered.topology.devices[device], "float32")
            seconds.append(alone + float(whole(moved / rate)))
        return seconds

    def synchronise(self, weights: Sequence[int], phase: int) -> None:
        """A phase of a bucket: exchanges of the same form, senders, receivers and type of elements as one."""
        together: dict[tuple[str, tuple[int, ...], tuple[int, ...], str], list[Member]] = {}
        for w in weights:
            sync = self.lowered.weights[w].plan.sync
            assert sync is not None
            for x, exchange in enumerate(sync.phase_exchanges[phase] if phase < len(sync.phase_exchanges) else ()):
                dtype = self.graph.tensor[self.lowered.weights[w].tensor].dtype
                key = exchange.form, exchange.senders, exchange.receivers, dtype
                together.setdefault(key, []).append(Member(w, sync, phase, x))
        before = {key: dict(row) for key, row in self.arrived.items()} if phase else {}
        before = {key: {d: list(tasks) for d, tasks in row.items()} for key, row in before.items()}
        for members in together.values():
            self.communicate("synchronise", members, before)

    def update(self) -> None:
        stored: dict[int, dict[int, int]] = {}
        for w, weight in enumerate(self.lowered.weights):
            if weight.plan.sync is not None:
                for device, box, _ in weight.plan.storage:
                    row = stored.setdefault(device, {})
                    row[w] = volume(box) * self.graph.tensor[weight.tensor].itemsize
        for device, row in sorted(stored.items()):
            after = [t for w in range(len(self.lowered.weights))
                     for t in self.arrived.get(("synchronise", w), {}).get(device, ())]  # fmt: skip
            options = self.lowered.options
            seconds = self.lowering.costs.update(
                sum(row.values()), len(row), device, options.optimizer, options.precision
            )
            self.task(TaskKind.UPDATE, -1, device, seconds, after)

    def compute(
        self, kind: TaskKind, operator: int, seconds: Sequence[float], purposes: Sequence[str], edges: Sequence[int]
    ) -> None:
        arrived = [self.arrived[p, e] for e in edges for p in purposes if (p, e) in self.arrived]
        for device, duration in zip(self.lowered.configs[operator].devices, seconds, strict=True):
            self.task(kind, operator, device, duration, [t for found in arrived for t in found.get(device, ())])

    def task(self, kind: TaskKind, operator: int, device: int, seconds: float, after: list[int]) -> None:
        if device in self.last:
            after.append(self.last[device])
        self.last[device] = self.tasks.compute(
            kind, operator, device, self.lowered.topology.processor_of[device], seconds, sorted(set(after)),
            self.lowering.turns[device],
        )  # fmt: skip

    def reshard(self, purpose: Purpose, key: int, plan: Reshard) -> None:
        for phase in range(len(plan.phase_exchanges) if plan.exchanges else 0):
            # What the previous phase delivered to the senders must be there, and only that.
            before = {(purpose, key): {d: list(t) for d, t in self.arrived.get((purpose, key), {}).items()}}
            for x in range(len(plan.phase_exchanges[phase])):
                self.communicate(purpose, [Member(key, plan, phase, x)], before)

    def communicate(
        self, purpose: Purpose, members: Sequence[Member], before: Mapping[tuple[str, int], Mapping[int, Sequence[int]]]
    ) -> None:
        exchanges = [member.what for member in members]
        one = exchanges[0]
        senders = tuple(sorted({d for x in exchanges for d in x.senders}))
        receivers = tuple(sorted({d for x in exchanges for d in x.receivers}))
        cost = one.transfer if len(exchanges) == 1 else self.bucket_cost(exchanges)
        nbytes, nccl = sum(x.nbytes for x in exchanges), self.lowered.topology.communication.backend == "nccl"
        called = one.form == "all_reduce" or (nccl and one.form != "exchange")
        what = Communication(purpose, one.form, one.devices, senders, receivers, tuple(members), cost, nbytes, called)
        after = {self.last[d] for d in senders if d in self.last}
        for member in members:
            for device in member.what.senders:
                after.update(before.get((purpose, member.key), {}).get(device, ()))
        decisive = tuple((r, seconds) for r, seconds in cost.links if self.lowered.topology.decisive[r])
        turn = self.turn(one.form, len(one.devices), decisive)
        task = self.tasks.communicate(what, sorted(after), cost.duration_s, decisive, cost.drag, turn)
        for member in members:
            arrived = self.arrived.setdefault((purpose, member.key), {})
            for device in member.what.receivers:
                arrived.setdefault(device, []).append(task)

    def bucket_cost(self, exchanges: Sequence[Exchange]) -> Transfer:
        """Messages add up on every link and start with the one that starts last; collectives become one. Each further
        tensor takes time, of processors, too."""
        one, pricing = exchanges[0], self.lowering.planner.pricing
        of_tensor = self.lowered.topology.communication.tensor_by_form.get(one.form, 0.0)
        more = float(whole(of_tensor * (len(exchanges) - 1)))
        if pricing.by_group(one.form):
            cost = pricing.collective(one.form, one.devices, sum(x.amount for x in exchanges))
        else:
            start_s = max(x.start_s for x in exchanges)
            cost = pricing.transfer(one.form, [message for x in exchanges for message in x.messages], start_s)
        drag = tuple((processor, seconds + more) for processor, seconds in cost.drag)
        return replace(cost, duration_s=cost.duration_s + more, drag=drag)

    def turn(self, form: str, members: int, links: Sequence[tuple[int, float]]) -> float:
        """A communication lets others on its links go first after so many bytes on the slowest of them, or a 4096th;
        gloo's all-reduce, six times at least for each member but one. One that is done by then does not."""
        topology = self.lowered.topology
        nbytes, longest = topology.communication.turn_bytes, max((seconds for _, seconds in links), default=0.0)
        if nbytes is None or not links:
            return inf
        slowest = min(topology.resources[r].bandwidth for r, _ in links)
        usual = float(whole(topology.communication.factors[form] * nbytes / slowest))
        if form == "all_reduce" and topology.communication.backend == "gloo":
            usual = min(usual, longest / (6 * max(1, members - 1)))
        turn = max(int(usual / TICK), int(longest / TICK) // 4096 + 1) * TICK
        return turn if turn < longest else inf
