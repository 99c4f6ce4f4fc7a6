"""The task graph: the rows of a plan as tasks with names for what they do. The runtime executes it, reports and
explanations read it; what it says of times comes from the rows, which the engine runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from math import inf
from typing import Literal, NamedTuple

from flexsearch.cost.communication import Transfer
from flexsearch.lower.actions import Action
from flexsearch.lower.reshard import Exchange, Move, Reshard
from flexsearch.sync import Exchange as RecipeExchange

Purpose = Literal["gather", "forward", "backward", "synchronise", "recompute", "regather", "read"]
"""Why data moves: sharded weights before use, activations, their gradients, gradients of weights; in the backward pass
activations that are computed again, and weights that are gathered again; batches that are read from storage (which have
no members, and no bytes between devices)."""


class TaskKind(IntEnum):
    """What a task does."""

    FORWARD = 0
    BACKWARD = 1
    UPDATE = 2
    COMMUNICATION = 3
    WEIGHT_GRADIENT = 4
    RECOMPUTE = 5
    SYNCHRONISE = 6
    """What a recipe computes."""


class Row(NamedTuple):
    """Identity of a row: (microbatch, block, 0 for a computation and 1 for a communication, number in the block)."""

    microbatch: int
    block: int
    communicates: int
    number: int


@dataclass(frozen=True)
class Member:
    """One exchange of a communication: ``reshard.phases[phase].exchanges[exchange]`` of the value ``key`` (an index
    into ``Lowered.edges``, for ``synchronise`` into ``Lowered.weights``)."""

    key: int
    reshard: Reshard
    phase: int
    exchange: int

    @property
    def what(self) -> Exchange:
        """The exchange itself."""
        return self.reshard.phase_exchanges[self.phase][self.exchange]

    @cached_property
    def summed(self) -> tuple[Move, ...]:
        """What a sum adds up: the moves of the exchange, and those to the same entries that cross no devices."""
        into = {move.destination for move in self.what.moves}
        local = self.reshard.phases[self.phase].local
        return *self.what.moves, *(move for move in local if move.destination in into)


@dataclass(frozen=True)
class Communication:
    """A communication task: one exchange, or a bucket of exchanges between the same devices that go as one.
    ``transfer``: what it brings onto every link, for reports. ``nbytes``: that cross devices. ``one_call``: ranks leave
    it to one call of the backend, a collective; else they send messages. Where equal blocks of devices are folded
    (``lower.folding``), it stands for what other blocks do likewise: ``devices`` are of the whole cluster, ``senders``,
    ``receivers`` and the links of ``transfer`` those of the first block, ``nbytes`` are of all. ``recipe``: the words
    of the one that it belongs to (``lower.recipe_rows``); it has no members then."""

    purpose: Purpose
    form: str
    devices: tuple[int, ...]
    senders: tuple[int, ...]
    receivers: tuple[int, ...]
    members: tuple[Member, ...]
    transfer: Transfer
    nbytes: int
    one_call: bool
    recipe: str = ""

    @property
    def sums(self) -> bool:
        """Whether the backend adds up what the devices send."""
        return self.one_call and self.form in ("all_reduce", "reduce_scatter")


@dataclass(frozen=True)
class RecipeBlock:
    """What a block of a recipe holds, for those who read rows as tasks. ``group``: its number in
    ``Lowered.recipe_groups``. ``exchanges``: those of the recipe in this step. ``work``: what its computations do, by
    number; ``communications``, by number."""

    group: int
    exchanges: tuple[RecipeExchange, ...]
    work: tuple[str, ...]
    communications: tuple[Communication, ...]


@dataclass
class TaskGraph:
    """Tasks in one order that every device follows. Columns are lists of equal length while it is built.

    ``kind``; ``operator``: index of the operator (-1 for updates and communications); ``device``: who computes (-1 for
    communications); ``duration``: seconds from start to end; ``communication``: for communications, what moves.
    ``dependencies``: tasks that must have ended, the previous task of the same device among them. ``links``:
    (resource, seconds) kept busy from the start on; a task starts when all of them are free. Of a communication those
    that it can have to wait for (``Topology.decisive``); ``Communication.transfer`` has all. ``drag``: (processor,
    seconds) taken from computing without waiting for it. ``turn``: seconds after which a task lets others go first: a
    computation on a processor that several devices share, a communication on its links; infinite if it does not.
    ``microbatch``: 0 for what happens once a step. ``identity``: of its row, for tasks that were made of rows.
    ``action``: of a pipeline, that it belongs to (None: it happens once a step). ``launched``: seconds before which the
    hosts of its devices have not launched it; they launch tasks one after the other, whatever the devices do.
    """

    kind: list[int] = field(default_factory=list)
    operator: list[int] = field(default_factory=list)
    device: list[int] = field(default_factory=list)
    duration: list[float] = field(default_factory=list)
    communication: list[Communication | None] = field(default_factory=list)
    dependencies: list[Sequence[int]] = field(default_factory=list)
    links: list[Sequence[tuple[int, float]]] = field(default_factory=list)
    drag: list[Sequence[tuple[int, float]]] = field(default_factory=list)
    turn: list[float] = field(default_factory=list)
    microbatch: list[int] = field(default_factory=list)
    identity: list[Row] = field(default_factory=list)
    action: list[Action | None] = field(default_factory=list)
    launched: list[float] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.kind)

    def compute(
        self, kind: TaskKind, operator: int, device: int, processor: int, seconds: float, after: Sequence[int],
        turn: float = inf, microbatch: int = 0, launched: float = 0.0,
    ) -> int:  # fmt: skip
        """Append a compute task; returns its index."""
        self.kind.append(kind)
        self.operator.append(operator)
        self.device.append(device)
        self.duration.append(seconds)
        self.communication.append(None)
        self.dependencies.append(after)
        self.links.append(((processor, seconds),))
        self.drag.append(())
        self.turn.append(turn)
        self.microbatch.append(microbatch)
        self.launched.append(launched)
        return len(self.kind) - 1

    def communicate(
        self, what: Communication, after: Sequence[int], seconds: float, links: Sequence[tuple[int, float]],
        drag: Sequence[tuple[int, float]] = (), turn: float = inf, microbatch: int = 0, launched: float = 0.0,
    ) -> int:  # fmt: skip
        """Append a communication task; returns its index."""
        self.kind.append(TaskKind.COMMUNICATION)
        self.operator.append(-1)
        self.device.append(-1)
        self.duration.append(seconds)
        self.communication.append(what)
        self.dependencies.append(after)
        self.links.append(links)
        self.drag.append(drag)
        self.turn.append(turn)
        self.microbatch.append(microbatch)
        self.launched.append(launched)
        return len(self.kind) - 1
