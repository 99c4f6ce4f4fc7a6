"""Communication of one rank: issues the exchanges of the task graph on a process group and hands out what arrives.

gloo: receives are posted where the program says, at the latest before this rank sends its part, which makes
point-to-point traffic full duplex; a rank waits for its oldest sends only where more than ``ahead_bytes`` of them are
under way, as they keep what they send alive; the backend's ring computes all-reduces. NCCL: both sides of an exchange
are issued together, in an order that is the same on all ranks, so nothing can block.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from flexsearch.errors import RuntimeFailure
from flexsearch.graph import Box, volume
from flexsearch.graph.ops.calls import dtype_of
from flexsearch.graph.ops.local import extent
from flexsearch.lower import Communication, Lowered, Move
from flexsearch.runtime.instructions import Post, Start, Wait
from flexsearch.runtime.liveness import ahead_bytes

Action = Callable[[], None]


def cut(tensor: Tensor, held: Box, wanted: Box) -> Tensor:
    """View of region ``wanted`` of a tensor that holds region ``held``."""
    where = slices(held, wanted)
    return tensor if where is None else tensor[where]


def slices(held: Box, wanted: Box) -> tuple[slice, ...] | None:
    """Where region ``wanted`` lies in a tensor that holds region ``held``; None: it is all of it."""
    if held == wanted:
        return None
    return tuple(slice(w[0] - h[0], w[1] - h[0]) for h, w in zip(held, wanted, strict=True))


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


class Arrival(NamedTuple):
    """What is under way to this rank: pending operations, and flat buffers by peer in the order of the plan."""

    works: list[dist.Work]
    buffers: list[Tensor]


def _present(work: dist.Work | None) -> dist.Work:
    assert work is not None
    return work


def _nothing() -> None:
    """Nothing."""


def _region(values: list[Any], slot: int, peer: int, part: Part) -> Callable[[], Tensor]:
    first, last, shape = part.offset, part.offset + volume(part.move.box), extent(part.move.box)
    return lambda: values[slot].buffers[peer][first:last].view(shape)


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
        self._sent: deque[tuple[int, list[dist.Work], list[Tensor], int]] = deque()
        """What has been sent in this step and may not have left yet; bytes that are kept for it alone."""
        self._sending = 0
        self._ahead = ahead_bytes(lowered, rank)

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

    # ---- what a program does, as closures over its slots; the slot of a task holds an ``Arrival``

    def post(self, values: list[Any], instruction: Post) -> Action:
        """On gloo: allocate what a task brings here, and let it come."""
        task, plan, slot = instruction.task, self.plans[instruction.task], instruction.slot
        lengths, dtype, device = list(plan.receive_length.items()), plan.dtype, self.device
        if not self.eager:
            return _nothing

        def run() -> None:
            works, buffers = [], []
            for peer, length in lengths:
                buffer = torch.empty(length, dtype=dtype, device=device)
                works.append(_present(dist.irecv(buffer.view(torch.uint8), peer, tag=task)))
                buffers.append(buffer)
            values[slot] = Arrival(works, buffers)

        return self._watched(task, run)

    def start(self, values: list[Any], instruction: Start) -> Action:
        """Issue a communication."""
        plan = self.plans[instruction.task]
        if plan.what.form == "all_reduce":
            return self._watched(instruction.task, self._all_reduce(values, plan, instruction))
        return self._watched(instruction.task, self._exchange(values, plan, instruction))

    def waiting(self, values: list[Any], instruction: Wait) -> Action:
        """Block until what a task brings to this rank has arrived."""
        task, slot = instruction.task, instruction.slot
        return self._watched(task, lambda: self.wait(task, values[slot].works))

    def wait(self, task: int, works: Sequence[dist.Work]) -> None:
        """Block until parts of a communication are done."""
        for work in works:
            work.wait()

    def _all_reduce(self, values: list[Any], plan: Plan, instruction: Start) -> Action:
        adds = []
        rows = zip(plan.what.members, plan.offsets, instruction.sources, strict=True)
        for member, offset, sources in rows:
            exchange, phase = member.what, member.reshard.phases[member.phase]
            assert exchange.box is not None
            for move in exchange.moves:
                entry = phase.source[move.source]
                if entry.device == self.rank:
                    inside, part = slices(exchange.box, move.box), slices(entry.box, move.box)
                    adds.append((offset, exchange.box, inside, sources[move.source], part))
        regions = [(offset, offset + volume(box), extent(box), inside, slot, part)
                   for offset, box, inside, slot, part in adds]  # fmt: skip
        alone = sum(volume(box) for _, box, inside, _, _ in adds if inside is None) == plan.length == sum(
            volume(box) for _, box, _, _, _ in adds
        )
        group, slot_of_task, length = _group(plan.what.devices), instruction.slot, plan.length
        dtype, device = plan.dtype, self.device

        def run() -> None:
            flat = (torch.empty if alone else torch.zeros)(length, dtype=dtype, device=device)
            for first, last, shape, inside, slot, part in regions:
                tensor = values[slot]
                region = flat[first:last].view(shape)
                if tensor is None:
                    if alone:
                        region.zero_()
                    continue
                tensor = tensor.detach() if part is None else tensor.detach()[part]
                if alone:
                    region.copy_(tensor)
                else:
                    (region if inside is None else region[inside]).add_(tensor)
            work = _present(dist.all_reduce(flat, group=group, async_op=True))
            values[slot_of_task] = Arrival([work], [flat])

        return run

    def _exchange(self, values: list[Any], plan: Plan, instruction: Start) -> Action:
        packs = [(peer, self._packed(values, plan, parts, instruction)) for peer, parts in plan.sends.items()]
        task, slot, sent = instruction.task, instruction.slot, self._sent
        lengths, dtype, device = list(plan.receive_length.items()), plan.dtype, self.device
        stored = plan.what.purpose in ("gather", "regather")

        def send() -> None:
            for peer, pack in packs:
                flat = pack()
                nbytes = 0 if stored and len(plan.sends[peer]) == 1 else flat.numel() * flat.itemsize
                sent.append((task, [_present(dist.isend(flat.view(torch.uint8), peer, tag=task))], [flat], nbytes))
                self._sending += nbytes
            while self._sending > self._ahead and sent[0][0] != task:
                self._finish_oldest()

        def exchange() -> None:
            packed = [(peer, pack()) for peer, pack in packs]
            buffers = [torch.empty(length, dtype=dtype, device=device) for _, length in lengths]
            rows = zip(lengths, buffers, strict=True)
            operations = [dist.P2POp(dist.irecv, buffer.view(torch.uint8), peer) for (peer, _), buffer in rows]
            operations += [dist.P2POp(dist.isend, flat.view(torch.uint8), peer) for peer, flat in packed]
            works = self._issue(plan.what, operations)
            values[slot] = Arrival(works, buffers)
            sent.append((task, works, [flat for _, flat in packed], 0))

        return send if self.eager else exchange

    def _issue(self, what: Communication, operations: list[dist.P2POp]) -> list[dist.Work]:
        """Start both sides of an exchange on NCCL. A single message goes over the communicator of its two ranks, where
        it waits for no message between others; what both ranks see must choose, as the communicators differ."""
        if len(what.senders) > 1 or len(what.receivers) > 1:
            return dist.batch_isend_irecv(operations)
        works = [operation.op(operation.tensor, operation.peer) for operation in operations]
        return [work for work in works if work is not None]

    def _packed(
        self, values: list[Any], plan: Plan, parts: Sequence[Part], instruction: Start
    ) -> Callable[[], Tensor]:
        """What goes to one peer as a flat tensor."""
        pieces = []
        for part in parts:
            member = plan.what.members[part.member]
            entry = member.reshard.phases[member.phase].source[part.move.source]
            slot = instruction.sources[part.member][part.move.source]
            pieces.append((slot, slices(entry.box, part.move.box), volume(part.move.box)))
        dtype, device = plan.dtype, self.device

        def piece(slot: int, where: tuple[slice, ...] | None, count: int) -> Tensor:
            tensor: Tensor | None = values[slot]
            if tensor is None:  # the loss does not depend on it
                return torch.zeros(count, dtype=dtype, device=device)
            tensor = tensor.detach()
            return (tensor if where is None else tensor[where]).to(dtype).reshape(-1)

        def run() -> Tensor:
            flat = piece(*pieces[0]).contiguous() if len(pieces) == 1 else torch.cat([piece(*p) for p in pieces])
            # A single element counts as contiguous whatever its stride, but cannot be seen as bytes.
            return flat if flat.stride(0) == 1 else flat.clone(memory_format=torch.contiguous_format)

        return run

    def reduced(self, values: list[Any], slot: int, task: int, member: int) -> Callable[[], Tensor]:
        """The total that all-reduce ``task`` made of its member's region."""
        plan = self.plans[task]
        box = plan.what.members[member].what.box
        assert box is not None
        first, last, shape = plan.offsets[member], plan.offsets[member] + volume(box), extent(box)
        return lambda: values[slot].buffers[0][first:last].view(shape)

    def received(
        self, values: list[Any], slot: int, task: int, member: int
    ) -> list[tuple[Move, Callable[[], Tensor]]]:
        """Moves of a member that end here, and their data."""
        result = []
        for k, parts in enumerate(self.plans[task].receives.values()):
            for part in parts:
                if part.member == member:
                    result.append((part.move, _region(values, slot, k, part)))
        return result

    def end(self) -> None:
        """Finish a step: wait for what has been sent."""
        while self._sent:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        """Wait for the oldest send."""
        task, works, _, nbytes = self._sent[0]
        self._watched(task, partial(self.wait, task, works))()
        self._sent.popleft()
        self._sending -= nbytes

    def _watched(self, task: int, run: Action) -> Action:
        """``run``, with an error that names the communication."""

        def watched() -> None:
            try:
                run()
            except RuntimeError as error:
                raise self._failure(task, error) from error

        return watched

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
