"""What one rank does in a step: its part of the task graph, compiled to a list of instructions. Needs no torch.

Consecutive operators of the rank without communication between them, forward or backward, form a **segment**: one
forward and one backward instruction. Between segments come the rank's parts of reshards: ``Start`` issues a
communication of the task graph, ``Finish`` waits for it and assembles the regions received.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from flexsearch.errors import FlexsearchError
from flexsearch.lower import Lowered, Move, Reshard, TaskKind
from flexsearch.lower.taskgraph import Purpose


class Key(NamedTuple):
    """Name of a value on this rank. ``home``: an activation where its producer left it, or a stored weight, buffer,
    constant or input; ``edge``: a tensor resharded for the readers of an edge."""

    kind: str
    name: str | int


class Transport(NamedTuple):
    """One reshard of the plan: of edge ``key``, or (``synchronise``) of weight ``key``."""

    purpose: Purpose
    key: int


@dataclass(frozen=True)
class Start:
    """Issue the communication of task ``task``."""

    task: int


@dataclass(frozen=True)
class Finish:
    """Wait for what a reshard brings to this rank and put it together."""

    transport: Transport


@dataclass(frozen=True)
class Forward:
    """Run the operators of a segment."""

    segment: int


@dataclass(frozen=True)
class Backward:
    """Run the backward pass of a segment."""

    segment: int


@dataclass(frozen=True)
class Update:
    """Run the optimizer on this rank's weights."""


Instruction = Start | Finish | Forward | Backward | Update


class Leaf(NamedTuple):
    """A value that enters a segment: where it is found, and where its gradient goes (None: it needs none)."""

    value: Key
    gradient: Key | None


@dataclass
class Segment:
    """Operators that run as one. ``arguments[k]``: for each operand of operator k its leaf (index into ``leaves``) or,
    as ``~i``, result i of the segment; None where the piece reads nothing. Results are numbered over all outputs in
    order. ``exports``: (result, name) of results that are used outside. ``seeds``: exports with a gradient."""

    operators: tuple[int, ...]
    leaves: list[Leaf] = field(default_factory=list)
    arguments: list[tuple[int | None, ...]] = field(default_factory=list)
    exports: list[tuple[int, str]] = field(default_factory=list)
    seeds: list[tuple[int, str]] = field(default_factory=list)
    backward: bool = False


@dataclass(frozen=True)
class Program:
    """Instructions of ``device`` for one step, and the segments that they run."""

    lowered: Lowered
    device: int
    segments: tuple[Segment, ...]
    instructions: tuple[Instruction, ...]

    @cached_property
    def last_use(self) -> dict[int, list[Key]]:
        """Position of an instruction -> forward values that no later instruction reads."""
        last: dict[Key, int] = {}
        for position, instruction in enumerate(self.instructions):
            for key in self._reads(instruction):
                last[key] = position
        finished = {i.transport for i in self.instructions if isinstance(i, Finish)}
        results = (self.lowered.loss_edge, *self.lowered.update_edges.values())
        kept = {self.lowered.edges[e].tensor for e in results if Transport("forward", e) not in finished}
        result: dict[int, list[Key]] = {}
        for key, position in last.items():
            if key.name in kept:
                continue
            result.setdefault(position, []).append(key)
        return result

    @cached_property
    def last_gradient_use(self) -> dict[int, list[Key]]:
        """Position of an instruction -> gradients of edges that no later instruction makes or reads."""
        last: dict[Key, int] = {}
        for position, instruction in enumerate(self.instructions):
            for key in (*self._makes_gradients(instruction), *self._reads_gradients(position, instruction)):
                last[key] = position
        result: dict[int, list[Key]] = {}
        for key, position in last.items():
            result.setdefault(position, []).append(key)
        return result

    @cached_property
    def kept_parts(self) -> dict[int, list[Transport]]:
        """Position of an instruction -> synchronisations whose first phase it issues, as the last on this device, and
        that leave parts of gradients here: they are cut out then, as the gradients would else live until the update."""
        last: dict[Transport, int] = {}
        for position, instruction in enumerate(self.instructions):
            what = self.lowered.tasks.communication[instruction.task] if isinstance(instruction, Start) else None
            if what is not None and what.purpose == "synchronise":
                last |= {Transport(what.purpose, m.key): position for m in what.members if m.phase == 0}
        result: dict[int, list[Transport]] = {}
        for transport, position in last.items():
            if any(self._stay_here(transport)):
                result.setdefault(position, []).append(transport)
        return result

    @cached_property
    def _kept(self) -> set[Transport]:
        return {transport for transports in self.kept_parts.values() for transport in transports}

    def _makes_gradients(self, instruction: Instruction) -> Iterator[Key]:
        if isinstance(instruction, Backward):
            for leaf in self.segments[instruction.segment].leaves:
                if leaf.gradient is not None and leaf.gradient.kind == "edge":
                    yield leaf.gradient

    def _reads_gradients(self, position: int, instruction: Instruction) -> Iterator[Key]:
        """Gradients of edges that the engine takes: of what is sent when it is issued; of what stays on this device
        when that is cut out (``kept_parts``), else when something waits for the first phase."""
        if isinstance(instruction, Finish) and instruction.transport not in self._kept:
            yield from self._stay_here(instruction.transport)
        elif isinstance(instruction, Start):
            what = self.lowered.tasks.communication[instruction.task]
            assert what is not None
            for member in what.members:
                transport = Transport(what.purpose, member.key)
                if member.phase == 0:
                    yield from self._gradients_of(transport, member.what.moves)
                elif transport not in self._kept:
                    yield from self._stay_here(transport)
            for transport in self.kept_parts.get(position, ()):
                yield from self._stay_here(transport)

    def _stay_here(self, transport: Transport) -> Iterator[Key]:
        return self._gradients_of(transport, reshard_of(self.lowered, transport).phases[0].local)

    def _gradients_of(self, transport: Transport, moves: Iterable[Move]) -> Iterator[Key]:
        """Gradients on this device that moves of the transport's first phase take."""
        if transport.purpose not in ("backward", "synchronise"):
            return
        source = reshard_of(self.lowered, transport).phases[0].source
        for move in moves:
            if source[move.source].device == self.device:
                edge = transport.key
                if transport.purpose == "synchronise":
                    weight = self.lowered.weights[transport.key]
                    edge = weight.edges[weight.plan.origin[move.source]]
                yield Key("edge", edge)

    def _reads(self, instruction: Instruction) -> Iterator[Key]:
        if isinstance(instruction, Forward):
            segment = self.segments[instruction.segment]
            yield from (leaf.value for leaf in segment.leaves)
            yield from (Key("home", name) for _, name in segment.exports)  # some are only there for their gradients
        elif isinstance(instruction, Finish) and instruction.transport.purpose == "forward":
            phase = reshard_of(self.lowered, instruction.transport).phases[0]
            if any(phase.source[move.source].device == self.device for move in phase.local):
                yield Key("home", self.lowered.edges[instruction.transport.key].tensor)
        elif isinstance(instruction, Start):
            what = self.lowered.tasks.communication[instruction.task]
            assert what is not None
            if what.purpose == "forward":
                yield from (Key("home", self.lowered.edges[member.key].tensor) for member in what.members)


def reshard_of(lowered: Lowered, transport: Transport) -> Reshard:
    """The reshard that a transport carries out."""
    purpose, key = transport
    if purpose == "synchronise":
        plan = lowered.weights[key].plan.sync
    elif purpose == "gather":
        edge = lowered.edges[key]
        plan = edge.forward
    else:
        edge = lowered.edges[key]
        plan = edge.forward if purpose == "forward" else edge.backward
    assert plan is not None
    return plan


def compile_program(lowered: Lowered, device: int, fuse: bool = True) -> Program:
    """Instructions of ``device``. ``fuse=False`` makes every operator its own segment, for measuring task by task.

    Raises FlexsearchError for plans of several stages or microbatches."""
    if len(lowered.stages) > 1 or lowered.stages.microbatches > 1:
        raise FlexsearchError(
            f"the plan has {len(lowered.stages)} stages and {lowered.stages.microbatches} microbatches; so far, the "
            "runtime executes one stage and one microbatch only",
            "Simulate the plan, or run one that does not cut the step.",
        )
    return _Compiler(lowered, device, fuse).compile()


class _Compiler:
    def __init__(self, lowered: Lowered, device: int, fuse: bool) -> None:
        self.lowered, self.graph, self.device = lowered, lowered.graph, device
        self.fuse = fuse
        self.mine = [i for i, p in enumerate(lowered.placed) if device in p.placement.devices]
        self.home = {n for i in self.mine for n in self.graph.operators[i].outputs}
        """Activations made here."""

    def compile(self) -> Program:
        segments = self._segments()
        segment_of = {o: s for s, segment in enumerate(segments) for o in segment.operators}
        for s, segment in enumerate(segments):
            self._wire(segment, s, segment_of)
        return Program(self.lowered, self.device, tuple(segments), tuple(self._instructions(segments, segment_of)))

    def _active(self, transport: Transport) -> bool:
        """Whether the transport does anything on this device."""
        plan = reshard_of(self.lowered, transport)
        if any(self.device in x.devices for x in plan.exchanges):
            return True
        return self._arrives(transport) and self.device not in plan.aliased

    def _arrives(self, transport: Transport) -> bool:
        """Whether the transport has a result on this device."""
        return any(e.device == self.device for e in reshard_of(self.lowered, transport).destination)

    def _cuts(self) -> set[int]:
        """Operators of this rank before which a segment must begin."""
        position = {o: k for k, o in enumerate(self.mine)}
        cuts = set(range(len(self.mine))) if not self.fuse else {0}

        def cut(index: int) -> None:
            cuts.add(index)

        previous: tuple[int, int] | None = None
        between = False
        tasks = self.lowered.tasks
        for t, kind in enumerate(tasks.kind):
            what = tasks.communication[t]
            if what is not None:
                between = between or self.device in what.devices
            elif tasks.device[t] == self.device and kind != TaskKind.UPDATE:
                here = kind, position[tasks.operator[t]]
                if between and previous is not None and previous[0] == here[0]:
                    cut(here[1] if kind == TaskKind.FORWARD else previous[1])
                previous, between = here, False
        for e, edge in enumerate(self.lowered.edges):
            if edge.tensor in self.graph.producer:
                plans = [Transport("forward", e)] + ([Transport("backward", e)] if edge.backward else [])
                if any(self._active(t) for t in plans):
                    if edge.tensor in self.home:
                        cut(position[self.graph.producer[edge.tensor]] + 1)
                    # The first reader needs it first, and is the last whose backward adds to its gradient.
                    cut(min((position[reader] for reader, _ in edge.readers if reader in position), default=0))
        return cuts

    def _segments(self) -> list[Segment]:
        cuts = sorted({c for c in self._cuts() if c < len(self.mine)} | {len(self.mine)})
        return [Segment(tuple(self.mine[a:b])) for a, b in pairwise(cuts)]

    def _wire(self, segment: Segment, number: int, segment_of: dict[int, int]) -> None:
        """Fill in where operands come from and which results leave the segment."""
        leaves: dict[Leaf, int] = {}
        results: dict[str, int] = {}
        segment.backward = any(self.graph.has_backward[o] for o in segment.operators)
        for o in segment.operators:
            op = self.graph.operators[o]
            piece = self.lowered.placed[o].placement.piece_on(self.device)
            row: list[int | None] = []
            for p, name in enumerate(op.inputs):
                if piece.inputs[p] is None:
                    row.append(None)
                    continue
                value = self._found(o, p)
                if value.kind == "home" and value.name in results:
                    row.append(~results[name])
                else:
                    leaf = Leaf(value, self._gradient(o, p) if self.graph.has_backward[o] else None)
                    row.append(leaves.setdefault(leaf, len(leaves)))
            segment.arguments.append(tuple(row))
            for name in op.outputs:
                results[name] = len(results)
        segment.leaves = list(leaves)
        for name, result in results.items():
            edges = [self.lowered.edges[e] for e in self.lowered.edges_of[name]]
            outside = any(
                not edge.readers or any(segment_of.get(reader) != number for reader, _ in edge.readers)
                for edge in edges
            ) or any(
                self._active(Transport("forward", e)) or (self.lowered.edges[e].backward is not None
                and self._active(Transport("backward", e))) for e in self.lowered.edges_of[name]
            )  # fmt: skip
            if outside:
                segment.exports.append((result, name))
                if name in self.graph.differentiable:
                    segment.seeds.append((result, name))

    def _found(self, operator: int, position: int) -> Key:
        """Where an operand is found on this device."""
        name = self.graph.operators[operator].inputs[position]
        kind = self.graph.tensor[name].kind
        e = self.lowered.edge_of[operator, position]
        if kind == "activation":
            return Key("edge", e) if self._active(Transport("forward", e)) else Key("home", name)
        if kind == "parameter":
            return Key("edge", e) if self._active(Transport("gather", e)) else Key("home", name)
        return Key("edge", e)  # inputs, buffers and constants are cut to the edge's region when they are fetched

    def _gradient(self, operator: int, position: int) -> Key | None:
        """Where the gradient with respect to an operand goes."""
        name = self.graph.operators[operator].inputs[position]
        if name not in self.graph.differentiable:
            return None
        e = self.lowered.edge_of[operator, position]
        if self.graph.tensor[name].kind == "parameter" or self._active(Transport("backward", e)):
            return Key("edge", e)
        return Key("home", name) if name in self.home else None  # else another replica's gradient is used

    def _instructions(self, segments: Sequence[Segment], segment_of: dict[int, int]) -> Iterator[Instruction]:
        """Walk the task graph; a segment runs where its first forward (last backward) task stands."""
        tasks = self.lowered.tasks
        finished: set[Transport] = set()

        def finish(transport: Transport) -> Iterator[Instruction]:
            # A gradient that is complete where it was made still has to be handed to the optimizer.
            wanted = transport.purpose == "synchronise" or self._active(transport)
            if transport not in finished and self._arrives(transport) and wanted:
                finished.add(transport)
                yield Finish(transport)

        done: set[tuple[int, int]] = set()
        for t, kind in enumerate(tasks.kind):
            what = tasks.communication[t]
            if what is not None:
                if self.device in what.devices:
                    yield Start(t)
                continue
            if tasks.device[t] != self.device:
                continue
            if kind == TaskKind.UPDATE:
                for w, weight in enumerate(self.lowered.weights):
                    if weight.plan.sync is not None:
                        yield from finish(Transport("synchronise", w))
                yield Update()
                continue
            s = segment_of[tasks.operator[t]]
            if (kind, s) in done:
                continue
            done.add((kind, s))
            if kind == TaskKind.FORWARD:
                for leaf in segments[s].leaves:
                    if leaf.value.kind == "edge":
                        e = int(leaf.value.name)
                        tensor = self.graph.tensor[self.lowered.edges[e].tensor]
                        if tensor.kind in ("activation", "parameter"):
                            yield from finish(Transport("forward" if tensor.kind == "activation" else "gather", e))
                yield Forward(s)
            else:
                for _, name in segments[s].seeds:
                    for e in self.lowered.edges_of[name]:
                        if self.lowered.edges[e].backward is not None:
                            yield from finish(Transport("backward", e))
                yield Backward(s)
        for e in (*self.lowered.update_edges.values(), self.lowered.loss_edge):
            yield from finish(Transport("forward", e))
