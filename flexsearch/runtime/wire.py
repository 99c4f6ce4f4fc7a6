"""Communication of one rank: issues the exchanges of the task graph on a process group and hands out what arrives.

gloo: all receives are posted at the start of the step, before anything is sent, which makes point-to-point traffic full
duplex (half as fast if they are posted after the sends); the backend's ring computes all-reduces. NCCL: both sides of
an exchange are issued together, in an order that is the same on all ranks, so nothing can block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from flexsearch.errors import RuntimeFailure
from flexsearch.graph import Box, volume
from flexsearch.graph.ops.calls import dtype_of
from flexsearch.graph.ops.local import extent
from flexsearch.lower import Communication, Lowered, Move


def cut(tensor: Tensor, held: Box, wanted: Box) -> Tensor:
    """View of region ``wanted`` of a tensor that holds region ``held``."""
    if held == wanted:
        return tensor
    return tensor[tuple(slice(w[0] - h[0], w[1] - h[0]) for h, w in zip(held, wanted, strict=True))]


_groups: dict[tuple[dist.ProcessGroup | None, tuple[int, ...]], dist.ProcessGroup] = {}


def _group(ranks: tuple[int, ...], timeout: timedelta | None = None) -> dist.ProcessGroup:
    """Process group of some ranks; made once in the life of the world group, on all ranks at the same place."""
    key = dist.group.WORLD, ranks
    if key not in _groups:
        _groups[key] = dist.new_group(list(ranks), timeout=timeout)
    return _groups[key]


@dataclass
class Part:
    """A move of a communication as one side sees it: member position, move, place in the flat buffer (elements)."""

    member: int
    move: Move
    offset: int


@dataclass
class Plan:
    """What this rank does in a communication: parts to send and to receive by peer, with the buffers' lengths; for an
    all-reduce the offsets of the members' regions in the flat buffer."""

    what: Communication
    dtype: torch.dtype
    sends: dict[int, list[Part]] = field(default_factory=dict)
    receives: dict[int, list[Part]] = field(default_factory=dict)
    receive_length: dict[int, int] = field(default_factory=dict)
    offsets: list[int] = field(default_factory=list)
    length: int = 0


class Wire:
    """Issues and completes communications by task index. ``rank`` is also the device's index in the topology."""

    def __init__(self, lowered: Lowered, rank: int, device: torch.device, timeout_s: float) -> None:
        self.lowered, self.rank, self.device = lowered, rank, device
        self.eager = dist.get_backend() == "gloo"
        self.plans: dict[int, Plan] = {}
        for task, what in enumerate(lowered.tasks.communication):
            if what is not None:
                if what.form == "all_reduce":
                    # Every rank makes every group, in the order of the task graph, as torch.distributed requires.
                    _group(what.devices, timedelta(seconds=timeout_s))
                if rank in what.devices:
                    self.plans[task] = self._plan(what)
        self._works: dict[int, list[dist.Work]] = {}
        self._received: dict[int, dict[int, Tensor]] = {}
        self._reduced: dict[int, Tensor] = {}
        self._unread: dict[int, int] = {}
        """Members of a communication whose data nobody has taken yet."""
        self._kept: dict[int, list[Tensor]] = {}
        """What a communication sends, until it has left."""

    def _plan(self, what: Communication) -> Plan:
        lowered = self.lowered
        first = what.members[0].key
        name = lowered.weights[first].tensor if what.purpose == "synchronise" else lowered.edges[first].tensor
        plan = Plan(what, dtype_of(lowered.graph.tensor[name].dtype))
        send_length: dict[int, int] = {}
        for m, member in enumerate(what.members):
            exchange = member.what
            phase = member.reshard.phases[member.phase]
            if exchange.box is not None:
                plan.offsets.append(plan.length)
                plan.length += volume(exchange.box)
                continue
            for move in exchange.moves:
                source = phase.source[move.source].device
                destination = phase.destination[move.destination].device
                if source == self.rank:
                    offset = send_length.get(destination, 0)
                    plan.sends.setdefault(destination, []).append(Part(m, move, offset))
                    send_length[destination] = offset + volume(move.box)
                elif destination == self.rank:
                    offset = plan.receive_length.get(source, 0)
                    plan.receives.setdefault(source, []).append(Part(m, move, offset))
                    plan.receive_length[source] = offset + volume(move.box)
        return plan

    def begin(self) -> None:
        """Start a step: on gloo, post every receive of the step."""
        if self.eager:
            for task, plan in self.plans.items():
                if plan.receives:
                    self._works[task] = [self._receive(task, plan, peer) for peer in plan.receives]

    def _receive(self, task: int, plan: Plan, peer: int) -> dist.Work:
        buffer = torch.empty(plan.receive_length[peer], dtype=plan.dtype, device=self.device)
        self._received.setdefault(task, {})[peer] = buffer
        work = dist.irecv(buffer.view(torch.uint8), peer, tag=task)
        assert work is not None
        return work

    def start(self, task: int, sources: Sequence[dict[int, Tensor]]) -> None:
        """Issue communication ``task``. ``sources[m]``: this rank's source entries of member m, by index."""
        plan = self.plans[task]
        try:
            if plan.what.form == "all_reduce":
                self._all_reduce(task, plan, sources)
            else:
                self._exchange(task, plan, sources)
        except RuntimeError as error:
            raise self._failure(task, error) from error

    def _all_reduce(self, task: int, plan: Plan, sources: Sequence[dict[int, Tensor]]) -> None:
        flat = torch.zeros(plan.length, dtype=plan.dtype, device=self.device)
        for member, offset, tensors in zip(plan.what.members, plan.offsets, sources, strict=True):
            exchange, phase = member.what, member.reshard.phases[member.phase]
            assert exchange.box is not None
            region = flat[offset : offset + volume(exchange.box)].view(extent(exchange.box))
            for move in exchange.moves:
                entry = phase.source[move.source]
                if entry.device == self.rank:
                    cut(region, exchange.box, move.box).add_(cut(tensors[move.source], entry.box, move.box))
        work = dist.all_reduce(flat, group=_group(plan.what.devices), async_op=True)
        assert work is not None
        self._works[task] = [work]
        self._reduced[task] = flat

    def _exchange(self, task: int, plan: Plan, sources: Sequence[dict[int, Tensor]]) -> None:
        packed = {peer: self._pack(plan, parts, sources) for peer, parts in plan.sends.items()}
        if self.eager:
            works = self._works.setdefault(task, [])
            for peer, flat in packed.items():
                work = dist.isend(flat.view(torch.uint8), peer, tag=task)
                assert work is not None
                works.append(work)
                self._kept.setdefault(task, []).append(flat)
            return
        received = self._received.setdefault(task, {})
        for peer in plan.receives:
            received[peer] = torch.empty(plan.receive_length[peer], dtype=plan.dtype, device=self.device)
        operations = [dist.P2POp(dist.irecv, buffer.view(torch.uint8), peer) for peer, buffer in received.items()]
        operations += [dist.P2POp(dist.isend, flat.view(torch.uint8), peer) for peer, flat in packed.items()]
        self._works[task] = self._issue(plan.what, operations)
        self._kept[task] = list(packed.values())

    def _issue(self, what: Communication, operations: list[dist.P2POp]) -> list[dist.Work]:
        """Start both sides of an exchange on NCCL. A single message goes over the communicator of its two ranks, where
        it waits for no message between others; what both ranks see must choose, as the communicators differ."""
        if len(what.senders) > 1 or len(what.receivers) > 1:
            return dist.batch_isend_irecv(operations)
        works = [operation.op(operation.tensor, operation.peer) for operation in operations]
        return [work for work in works if work is not None]

    def _pack(self, plan: Plan, parts: Sequence[Part], sources: Sequence[dict[int, Tensor]]) -> Tensor:
        pieces = []
        for part in parts:
            member = plan.what.members[part.member]
            entry = member.reshard.phases[member.phase].source[part.move.source]
            tensor = sources[part.member][part.move.source]
            pieces.append(cut(tensor, entry.box, part.move.box).to(plan.dtype).reshape(-1))
        flat = pieces[0].contiguous() if len(pieces) == 1 else torch.cat(pieces)
        # A single element counts as contiguous whatever its stride, but cannot be seen as bytes.
        return flat if flat.stride(0) == 1 else flat.clone(memory_format=torch.contiguous_format)

    def wait(self, task: int) -> None:
        """Block until what ``task`` brings to this rank has arrived (and, on gloo, what it sends has left)."""
        works = self._works.pop(task, None)
        if works is not None:
            try:
                for work in works:
                    work.wait()
            except RuntimeError as error:
                raise self._failure(task, error) from error
            self._kept.pop(task, None)

    def reduced(self, task: int, member: int) -> Tensor:
        """The total that all-reduce ``task`` made of its member's region. It is handed out once."""
        plan = self.plans[task]
        box = plan.what.members[member].what.box
        assert box is not None
        flat = self._reduced[task]
        self._took(task, len(plan.offsets))
        return flat[plan.offsets[member] : plan.offsets[member] + volume(box)].view(extent(box))

    def arrived(self, task: int, member: int) -> list[tuple[Move, Tensor]]:
        """Moves of a member that ended here, with their data. They are handed out once."""
        plan = self.plans[task]
        received = self._received[task]
        self._took(task, len({part.member for parts in plan.receives.values() for part in parts}))
        return [
            (part.move, received[peer][part.offset : part.offset + volume(part.move.box)].view(extent(part.move.box)))
            for peer, parts in plan.receives.items()
            for part in parts
            if part.member == member
        ]

    def _took(self, task: int, members: int) -> None:
        """Somebody takes what arrived for one of so many members; after the last, only they hold it."""
        left = self._unread.get(task, members) - 1
        if left:
            self._unread[task] = left
            return
        self._unread.pop(task, None)
        self._received.pop(task, None)
        self._reduced.pop(task, None)

    def end(self) -> None:
        """Finish a step: wait for the sends that nothing waited for, and let go of all buffers."""
        for task in list(self._works):
            self.wait(task)
        self._unread.clear()
        self._received.clear()
        self._reduced.clear()
        self._kept.clear()

    def _failure(self, task: int, error: RuntimeError) -> RuntimeFailure:
        what = self.plans[task].what
        member = what.members[0]
        lowered = self.lowered
        name = lowered.weights[member.key].tensor if what.purpose == "synchronise" else lowered.edges[member.key].tensor
        peers = sorted(set(what.devices) - {self.rank})
        return RuntimeFailure(
            f"rank {self.rank}: {what.form} of {name!r} ({what.purpose}) with ranks {peers} failed: one of them has "
            f"died, hangs or cannot be reached ({error})",
            "Look at the output of those ranks, then start all ranks again.",
        )
