"""What one rank's step is made of: instructions over numbered slots, each of which holds one value at a time.

An instruction says which slots it ``reads`` and ``writes``. A slot is empty before it is first written, and is emptied
again by the ``Free`` behind its last use.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from flexsearch.graph import Box
from flexsearch.lower import Lowered, Reshard
from flexsearch.lower.taskgraph import Purpose

Slot = int


class Key(NamedTuple):
    """Name of a value on this rank, of which there is one for each microbatch.

    ``home``: an activation where its producer left it, or a stored weight; ``edge``: a tensor as the readers of an edge
    want it; ``home gradient``, ``edge gradient``: their gradients; ``weight gradient``: of a weight as it is stored;
    ``phase``, ``kept``: parts of a reshard under way; ``arrived``: what a task receives; ``saved``: what the forward
    pass of a segment leaves for its backward pass; ``total``: the sum of a result over the microbatches. ``again``:
    computed for the second time."""

    kind: str
    name: object
    microbatch: int = 0
    again: bool = False


class Transport(NamedTuple):
    """One reshard of the plan, carried out: of edge ``key``, or (``synchronise``) of weight ``key``."""

    purpose: Purpose
    key: int
    microbatch: int = 0


class Leaf(NamedTuple):
    """A value that enters a segment: where it lies, and where its gradient goes (None: it needs none). ``microbatch``:
    the one that it is of, where that is not the one at hand."""

    value: Key
    gradient: Key | None
    microbatch: int | None = None


class Call(NamedTuple):
    """One kernel of a segment. ``operators``: those that it carries out; ``kind``: that of the operator, or the name of
    the rewrite that joined several. ``arguments``: for each operand its leaf (index into the segment's ``leaves``) or,
    as ``~i``, result i of the segment; None where the piece reads nothing. ``results``: their numbers in the segment.
    ``parts``: of these operands those of which only a part is read: (region held, region read)."""

    operators: tuple[int, ...]
    kind: str
    arguments: tuple[int | None, ...]
    results: tuple[int, ...]
    parts: Mapping[int, tuple[Box, Box]]


@dataclass
class Segment:
    """Operators that run as one, by ``calls``. Results are numbered over all outputs of the operators in order.
    ``exports``: (result, name) of results that are used outside. ``seeds``: exports with a gradient. ``region``:
    that is computed again, or -1. ``halves``: whether it makes gradients of weights, in a second backward pass.
    ``late``: its forward pass does nothing but keep what its backward pass needs, and runs right before that."""

    operators: tuple[int, ...]
    region: int = -1
    leaves: list[Leaf] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    exports: list[tuple[int, str]] = field(default_factory=list)
    seeds: list[tuple[int, str]] = field(default_factory=list)
    backward: bool = False
    halves: bool = False
    late: bool = False


@dataclass(frozen=True)
class Instruction:
    """Something that a rank does."""

    @property
    def reads(self) -> tuple[Slot, ...]:
        """Slots whose values it needs."""
        return ()

    @property
    def writes(self) -> tuple[Slot, ...]:
        """Slots that it gives values, or adds to."""
        return ()


@dataclass(frozen=True)
class Load(Instruction):
    """Take the stored part of a weight, in the precision of the plan."""

    name: str
    slot: Slot

    @property
    def writes(self) -> tuple[Slot, ...]:
        return (self.slot,)


@dataclass(frozen=True)
class Fetch(Instruction):
    """Cut what an edge wants out of an input, a buffer or a constant, for one microbatch; where only a gradient passes
    (``graph.Flow``), something of that shape without memory."""

    edge: int
    microbatch: int
    slot: Slot

    @property
    def writes(self) -> tuple[Slot, ...]:
        return (self.slot,)


@dataclass(frozen=True)
class Post(Instruction):
    """Allocate what task ``task`` brings here, and let it come."""

    task: int
    slot: Slot

    @property
    def writes(self) -> tuple[Slot, ...]:
        return (self.slot,)


@dataclass(frozen=True)
class Start(Instruction):
    """Issue the communication of a task. ``sources``: by member, source entry of its phase -> slot."""

    task: int
    sources: tuple[Mapping[int, Slot], ...]
    slot: Slot

    @property
    def reads(self) -> tuple[Slot, ...]:
        return tuple(slot for source in self.sources for slot in source.values())

    @property
    def writes(self) -> tuple[Slot, ...]:
        return (self.slot,)


@dataclass(frozen=True)
class Wait(Instruction):
    """Wait until what a task brings here has arrived."""

    task: int
    slot: Slot

    @property
    def reads(self) -> tuple[Slot, ...]:
        return (self.slot,)


@dataclass(frozen=True)
class AwaitSends(Instruction):
    """Wait for the oldest messages that this rank has sent until those under way keep no more than ``nbytes``."""

    nbytes: int


@dataclass(frozen=True)
class Keep(Instruction):
    """Copy the parts of a gradient that stay here, so that the rest can go. ``parts``: local move of the first phase ->
    (slot of its source, slot of the copy)."""

    transport: Transport
    parts: Mapping[int, tuple[Slot, Slot]]

    @property
    def reads(self) -> tuple[Slot, ...]:
        return tuple(source for source, _ in self.parts.values())

    @property
    def writes(self) -> tuple[Slot, ...]:
        return tuple(copy for _, copy in self.parts.values())


@dataclass(frozen=True)
class Assemble(Instruction):
    """Put the results of a phase of a reshard together. ``sources``: source entry -> slot; ``kept``: local move ->
    slot of its copy; ``received``: exchange -> (task, member, slot); ``results``: destination entry -> slot. ``adds``:
    to a gradient; ``refills``: a weight whose memory had been let go of; ``owns``: the result has memory of its own,
    which can be let go of."""

    transport: Transport
    phase: int
    sources: Mapping[int, Slot]
    kept: Mapping[int, Slot]
    received: Mapping[int, tuple[int, int, Slot]]
    results: Mapping[int, Slot]
    adds: bool = False
    refills: bool = False
    owns: bool = False

    @property
    def reads(self) -> tuple[Slot, ...]:
        before = tuple(self.results.values()) if self.refills else ()
        return (*self.sources.values(), *self.kept.values(), *(s for _, _, s in self.received.values()), *before)

    @property
    def writes(self) -> tuple[Slot, ...]:
        return tuple(self.results.values())


@dataclass(frozen=True)
class Forward(Instruction):
    """Run the operators of a segment. ``exports``: (result, slot). ``saved``: slot for the backward pass; None: this
    segment is computed again before it."""

    segment: int
    microbatch: int
    again: bool
    leaves: tuple[Slot, ...]
    exports: tuple[tuple[int, Slot], ...]
    saved: Slot | None

    @property
    def reads(self) -> tuple[Slot, ...]:
        return self.leaves

    @property
    def writes(self) -> tuple[Slot, ...]:
        return (*(slot for _, slot in self.exports), *(() if self.saved is None else (self.saved,)))


Part = Literal["all", "inputs", "weights"]
"""Of a backward pass: gradients of everything, of activations, of weights."""


@dataclass(frozen=True)
class Backward(Instruction):
    """Run the backward pass of a segment, or a ``part`` of it. ``seeds``: slots of the gradients of its exports (None:
    of the loss, which is 1), of which nothing else reads those that it ``takes``; ``gradients``: by leaf, the slot to
    add its gradient to; ``weights``: slots of weights that were gathered again for it."""

    segment: int
    microbatch: int
    part: Part
    saved: Slot
    seeds: tuple[Slot | None, ...]
    gradients: tuple[Slot | None, ...]
    weights: tuple[Slot, ...] = ()
    takes: frozenset[Slot] = frozenset()

    @property
    def reads(self) -> tuple[Slot, ...]:
        return (self.saved, *(s for s in self.seeds if s is not None), *self.weights)

    @property
    def writes(self) -> tuple[Slot, ...]:
        return tuple(slot for slot in self.gradients if slot is not None)


@dataclass(frozen=True)
class Deliver(Instruction):
    """Add synchronised gradients to those of stored weights. ``weights``: (weight, slot of its gradient)."""

    weights: tuple[tuple[int, Slot], ...]

    @property
    def reads(self) -> tuple[Slot, ...]:
        return tuple(slot for _, slot in self.weights)


@dataclass(frozen=True)
class Add(Instruction):
    """Add this device's part of a result of a microbatch to ``total``, that of all microbatches so far."""

    slot: Slot
    total: Slot

    @property
    def reads(self) -> tuple[Slot, ...]:
        return (self.slot,)

    @property
    def writes(self) -> tuple[Slot, ...]:
        return (self.total,)


@dataclass(frozen=True)
class Result(Instruction):
    """Take over a result: the new value of ``name``, a buffer, or (not ``kept``) the loss or an output."""

    name: str
    slot: Slot
    kept: bool = False

    @property
    def reads(self) -> tuple[Slot, ...]:
        return (self.slot,)


@dataclass(frozen=True)
class Empty(Instruction):
    """Let go of the memory of a gathered weight until it is gathered again."""

    slot: Slot


@dataclass(frozen=True)
class Free(Instruction):
    """Let go of values."""

    slots: tuple[Slot, ...]


@dataclass(frozen=True)
class Update(Instruction):
    """Run the optimizer on this rank's weights."""


@dataclass(frozen=True)
class Program:
    """Instructions of ``device`` for one step, the segments that they run, and the value of each slot."""

    lowered: Lowered
    device: int
    segments: tuple[Segment, ...]
    instructions: tuple[Instruction, ...]
    slots: tuple[Key, ...]


def reshard_of(lowered: Lowered, transport: Transport) -> Reshard:
    """The reshard that a transport carries out."""
    if transport.purpose == "synchronise":
        plan = lowered.weights[transport.key].plan.sync
    elif transport.purpose == "backward":
        plan = lowered.edges[transport.key].backward
    else:
        plan = lowered.edges[transport.key].forward
    assert plan is not None
    return plan
