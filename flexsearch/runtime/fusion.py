"""Which operators of a rank run as one: the segments of its program.

Consecutive operators of the rank without communication between them, forward or backward, form a **segment**. It lies
in one stage, and in one region that is computed again or in none.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import pairwise

from flexsearch.graph import Box, Flow, volume
from flexsearch.graph.samples import COUNTS, counting
from flexsearch.lower import Lowered, TaskKind
from flexsearch.lower.recompute import regions_of
from flexsearch.lower.rows import FORWARD
from flexsearch.lower.schedule import trains
from flexsearch.runtime.instructions import Call, Key, Leaf, Segment, Transport, reshard_of
from flexsearch.runtime.rewrites import rewrite

PART_BYTES = 1 << 14
"""Least bytes of a weight's gradient, of which a part is cut out, for which a segment ends."""


class Fusion:
    """The segments of ``device``. ``fuse=False``: every operator is one of its own."""

    def __init__(self, lowered: Lowered, device: int, fuse: bool) -> None:
        self.lowered, self.graph, self.device, self.fuse = lowered, lowered.graph, device, fuse
        graph = lowered.graph
        self.mine = [i for i in _in_order(lowered) if device in lowered.placed[i].devices]
        """The operators of this device, in the order of its forward pass."""
        self.home = {n for i in self.mine for n in graph.operators[i].outputs}
        """Activations made here."""
        self.stage_of = lowered.stages.of(len(graph.operators))
        options = lowered.options
        self.regions = regions_of(graph, options.recompute, self.stage_of, options.recompute_blocks)
        self.parts: dict[int, tuple[Box, Box]] = {}
        """Edges that are parts of what is made here, without communication: (region held, region read). A segment
        takes them itself, so that autograd puts their gradients together; results, such as a buffer's new value, have
        no segment that would."""
        parts = {e: part for e, x in enumerate(lowered.edges) if x.readers and (part := self._part(e)) is not None}
        summed = {lowered.edges[e].tensor for e in range(len(lowered.edges)) if e not in parts and self._crosses(e)}
        self.parts.update((e, part) for e, part in parts.items() if lowered.edges[e].tensor not in summed)
        self.used = set(self._used_gradients())
        """Edges of which this device makes a gradient that is used: replicas may leave it to each other."""
        self.early = counting(graph) if lowered.stages.microbatches > 1 else frozenset()
        """Operators that run for all microbatches before anything else."""
        cuts = self._ends()
        while scattered := self._scattered(cuts):
            self.parts = {e: part for e, part in self.parts.items() if lowered.edges[e].tensor not in scattered}
            cuts = self._ends()
        self.segments = [
            Segment(tuple(self.mine[a:b]), region=self.regions[self.mine[a]]) for a, b in pairwise(cuts)
        ]
        self.segment_of = {o: s for s, segment in enumerate(self.segments) for o in segment.operators}
        for s, segment in enumerate(self.segments):
            self._wire(segment, s)
            rewrite(lowered, device, segment)

    def active(self, transport: Transport) -> bool:
        """Whether the transport does anything on this device that its segments do not do."""
        if transport.purpose in ("forward", "backward") and transport.key in self.parts:
            return False
        if transport.purpose == "forward" and self.lowered.edges[transport.key].forward is None:
            return False
        plan = reshard_of(self.lowered, transport)
        if any(self.device in x.devices for x in plan.exchanges):
            return True
        return self.arrives(transport) and self.device not in plan.aliased

    def arrives(self, transport: Transport) -> bool:
        """Whether the transport has a result on this device."""
        return any(e.device == self.device for e in reshard_of(self.lowered, transport).destination)

    def _crosses(self, number: int) -> bool:
        """Whether what this device makes is put together for its gradient by an edge: each part is then added there,
        where autograd would make a gradient as large as the whole for it."""
        edge = self.lowered.edges[number]
        return edge.tensor in self.home and edge.backward is not None and self.active(Transport("backward", number))

    def _used_gradients(self) -> Iterable[int]:
        """Edges of whose gradients something is made that starts from what this device has."""
        for e, edge in enumerate(self.lowered.edges):
            if (plan := edge.backward) is not None:
                yield from (e for k in plan.used if plan.source[k].device == self.device)
        for weight in self.lowered.weights:
            if (plan := weight.plan.sync) is not None:
                here = (k for k in plan.used if plan.source[k].device == self.device)
                yield from (weight.edges[weight.plan.origin[k]] for k in here)

    def waits(self, number: int) -> bool:
        """Whether the readers of an edge run in the backward pass alone: a part of a value, which may be let go of
        before, gets memory of its own."""
        readers = self.lowered.edges[number].readers
        late = all(self.graph.operators[reader].half == "weights" for reader, _ in readers)
        return bool(readers) and late and self.regions[readers[0][0]] < 0

    def _part(self, number: int) -> tuple[Box, Box] | None:
        """The region held and the one read of an edge that is a part of a value of this device, and whose gradient
        flows back in the same way; None for others, and for those that wait for the backward pass."""
        edge = self.lowered.edges[number]
        if edge.tensor not in self.home or edge.forward is None or self.waits(number):
            return None
        ends = []
        for plan in filter(None, (edge.forward, edge.backward)):
            if any(self.device in x.devices for x in plan.exchanges):
                return None
            ends.append([[e.box for e in end if e.device == self.device] for end in (plan.source, plan.destination)])
        held, wanted = ends[0]
        if len(held) != 1 or len(wanted) != 1 or held == wanted or ends[1:] not in ([], [[wanted, held]]):
            return None
        return held[0], wanted[0]

    def _ends(self) -> list[int]:
        """Where segments begin and end, ascending."""
        return sorted({c for c in self._cuts() if c < len(self.mine)} | {len(self.mine)})

    def _scattered(self, ends: Sequence[int]) -> set[str]:
        """Values whose parts are read in several segments: for each part, autograd would make a gradient as large as
        the whole."""
        position = {o: k for k, o in enumerate(self.mine)}
        segments: dict[str, set[int]] = {}
        for e in self.parts:
            edge = self.lowered.edges[e]
            where = {bisect_right(ends, position[reader]) for reader, _ in edge.readers if reader in position}
            segments.setdefault(edge.tensor, set()).update(where)
        return {name for name, where in segments.items() if len(where) > 1 and self.fuse}

    def _cuts(self) -> set[int]:
        """Operators of this rank before which a segment must begin."""
        position = {o: k for k, o in enumerate(self.mine)}
        if not self.fuse:
            return set(range(len(self.mine)))
        cuts = {0, *self._cuts_by_order(position), *(position[o] for o in self._of_parts() if o in position)}
        for k, (a, b) in enumerate(pairwise(self.mine)):
            together = self.stage_of[a], self.regions[a], a in self.early
            whole = b in self.early and self.graph.operators[b].kind in COUNTS
            # What makes gradients of weights alone runs in the backward pass alone.
            whole = whole or self.graph.operators[a].half == "weights" or self.graph.operators[b].half == "weights"
            if together != (self.stage_of[b], self.regions[b], b in self.early) or whole:
                cuts.add(k + 1)
        for e, edge in enumerate(self.lowered.edges):
            if edge.tensor in self.graph.producer:
                plans = [Transport("forward", e)] + ([Transport("backward", e)] if edge.backward else [])
                if any(self.active(t) for t in plans):
                    if edge.tensor in self.home:
                        cuts.add(position[self.graph.producer[edge.tensor]] + 1)
                    # The first reader needs it first, and is the last whose backward adds to its gradient.
                    cuts.add(min((position[reader] for reader, _ in edge.readers if reader in position), default=0))
        return cuts

    def _of_parts(self) -> Iterable[int]:
        """Operators behind whose backward pass a part is cut out of the gradient of a weight, and nothing is sent: the
        whole ones of a segment would else be there together."""
        for weight in self.lowered.weights:
            plan = weight.plan.sync
            if plan is None or any(self.device in exchange.devices for exchange in plan.exchanges):
                continue
            first, itemsize = plan.phases[0], self.graph.tensor[weight.tensor].itemsize
            for move in first.local:
                held = first.source[move.source]
                large = volume(held.box) * itemsize >= PART_BYTES
                if large and held.device == self.device and move.box != held.box:
                    edge = self.lowered.edges[weight.edges[weight.plan.origin[move.source]]]
                    yield from (reader for reader, _ in edge.readers)

    def _cuts_by_order(self, position: dict[int, int]) -> set[int]:
        """Where this device issues a communication between two operators of a pass."""
        cuts: set[int] = set()
        previous: tuple[int, int, int] | None = None
        between = False
        tasks = self.lowered.tasks
        for t, kind in enumerate(tasks.kind):
            what = tasks.communication[t]
            if what is not None:
                between = between or self.device in what.senders
            elif tasks.device[t] == self.device and kind not in (TaskKind.UPDATE, TaskKind.SYNCHRONISE):
                here = kind, tasks.microbatch[t], position[tasks.operator[t]]
                if between and previous is not None and previous[:2] == here[:2]:
                    cuts.add(here[2] if kind in (TaskKind.FORWARD, TaskKind.RECOMPUTE) else previous[2])
                previous, between = here, False
        return cuts

    def _wire(self, segment: Segment, number: int) -> None:
        """Fill in where operands come from and which results leave the segment."""
        leaves: dict[Leaf, int] = {}
        results: dict[str, int] = {}
        segment.backward = any(self.graph.has_backward[o] for o in segment.operators)
        splits = self.lowered.stages.splits(self.stage_of[segment.operators[0]])
        segment.halves = splits and any(trains(self.graph, o) for o in segment.operators)
        segment.late = segment.region < 0 and self.graph.operators[segment.operators[0]].half == "weights"
        for o in segment.operators:
            op, arguments = self.graph.operators[o], self._arguments(o, leaves, results)
            numbers = tuple(range(len(results), len(results) + len(op.outputs)))
            segment.calls.append(Call((o,), op.kind, arguments, numbers, self._parts_read(o)))
            results.update(zip(op.outputs, numbers, strict=True))
        segment.leaves = list(leaves)
        for name, result in results.items():
            if self._leaves_segment(name, number):
                segment.exports.append((result, name))
                if name in self.graph.differentiable:
                    segment.seeds.append((result, name))

    def _arguments(self, o: int, leaves: dict[Leaf, int], results: dict[str, int]) -> tuple[int | None, ...]:
        op = self.graph.operators[o]
        piece = self.lowered.placed[o].piece_on(self.device)
        row: list[int | None] = []
        microbatches = self.lowered.stages.microbatches
        several: Sequence[int | None] = range(microbatches) if op.kind in COUNTS and microbatches > 1 else (None,)
        for m in several:
            for p, region in enumerate(piece.inputs):
                if region is None:
                    row.append(None)
                    continue
                value = self._place(o, p)
                if value.kind == "home" and value.name in results:
                    row.append(~results[str(value.name)])
                else:
                    leaf = Leaf(value, self._gradient(o, p), m)
                    row.append(leaves.setdefault(leaf, len(leaves)))
        return tuple(row)

    def _parts_read(self, o: int) -> dict[int, tuple[Box, Box]]:
        """Operands of which only a part is read: (region held, region read)."""
        inputs = self.lowered.placed[o].piece_on(self.device).inputs
        edges = {p: self.lowered.edge_of[o, p] for p, region in enumerate(inputs) if region is not None}
        times = self.lowered.stages.microbatches if self.graph.operators[o].kind in COUNTS else 1
        return {m * len(inputs) + p: self.parts[e] for p, e in edges.items() if e in self.parts for m in range(times)}

    def _leaves_segment(self, name: str, number: int) -> bool:
        """Whether a result of a segment is used outside of it."""
        for e in self.lowered.edges_of[name]:
            edge = self.lowered.edges[e]
            if not edge.readers or any(self.segment_of.get(reader) != number for reader, _ in edge.readers):
                return True
            if self.active(Transport("forward", e)):
                return True
            if edge.backward is not None and self.active(Transport("backward", e)):
                return True
        return False

    def _place(self, operator: int, position: int) -> Key:
        """Where an operand lies on this device."""
        name = self.graph.operators[operator].inputs[position]
        kind = self.graph.tensor[name].kind
        e = self.lowered.edge_of[operator, position]
        if self.graph.flows[operator][position] == Flow.GRADIENT:
            return Key("edge", e)
        if kind == "activation":
            return Key("edge", e) if self.active(Transport("forward", e)) else Key("home", name)
        if kind == "parameter":
            return Key("edge", e) if self.active(Transport("gather", e)) else Key("home", name)
        return Key("edge", e)  # inputs, buffers and constants are cut to the edge's region when they are fetched

    def _gradient(self, operator: int, position: int) -> Key | None:
        """Where the gradient with respect to an operand goes."""
        name = self.graph.operators[operator].inputs[position]
        if self.graph.flows[operator][position] == Flow.VALUE:
            return None
        e = self.lowered.edge_of[operator, position]
        if self.graph.tensor[name].kind == "parameter" or self.active(Transport("backward", e)):
            return Key("edge gradient", e) if e in self.used else None
        # else another replica's gradient is used
        return Key("home gradient", name) if name in self.home else None


def _in_order(lowered: Lowered) -> list[int]:
    """All operators in the order of the forward pass."""
    blocks = lowered.rows.blocks
    return [int(i) for i, kind in zip(blocks.argument, blocks.kind, strict=True) if kind == FORWARD]
