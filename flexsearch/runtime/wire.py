"""Communication of one rank: issues the exchanges of the task graph on a process group and hands out what arrives.

gloo: receives are posted where the program says, at the latest before this rank sends its part, which makes
point-to-point traffic full duplex. Sends keep what they send alive: before a rank sends more, and behind its waits, it
waits for its oldest ones until no more than ``ahead_bytes`` are under way. The backend's ring computes all-reduces.
NCCL: collectives are the backend's own; both sides of an exchange are issued together, in an order that is the same on
all ranks, so nothing can block.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from flexsearch.errors import RuntimeFailure
from flexsearch.graph import Box, volume
from flexsearch.graph.ops.local import extent
from flexsearch.graph.orders import Order
from flexsearch.lower import Communication, Lowered, Move
from flexsearch.runtime import collectives
from flexsearch.runtime.collectives import present
from flexsearch.runtime.faults import lost
from flexsearch.runtime.group import directions
from flexsearch.runtime.instructions import AwaitSends, Post, Start, Wait
from flexsearch.runtime.liveness import ahead_bytes
from flexsearch.runtime.parts import Action, Arrival, Part, Plan, flat, lying, plan_of, slices, unflat

_groups: dict[tuple[dist.ProcessGroup | None, tuple[int, ...]], dist.ProcessGroup] = {}


def process_group(ranks: tuple[int, ...], timeout: timedelta | None = None) -> dist.ProcessGroup:
    """Process group of some ranks; made once in the life of the world group, on all ranks at the same place."""
    key = dist.group.WORLD, ranks
    if key not in _groups:
        _groups[key] = dist.new_group(list(ranks), timeout=timeout)
    return _groups[key]


def _nothing() -> None:
    """Nothing."""


def _region(values: list[Any], slot: int, peer: int, part: Part, order: Order | None) -> Callable[[], Tensor]:
    first, last, shape = part.offset, part.offset + volume(part.move.box), extent(part.move.box)
    return lambda: unflat(values[slot].buffers[peer][first:last], shape, order)


def _alike(plan: Plan) -> list[tuple[list[int], list[Part]]]:
    """What goes out, with the peers that it goes to: those that get the same share it."""
    peers: dict[object, list[int]] = {}
    for peer, parts in plan.sends.items():
        peers.setdefault(tuple((p.member, p.move.source, p.move.box) for p in parts), []).append(peer)
    return [(row, plan.sends[row[0]]) for row in peers.values()]


class Works(NamedTuple):
    """Several messages that one peer sends."""

    works: list[dist.Work]

    def wait(self) -> None:
        """Block until all are here."""
        for work in self.works:
            work.wait()


class Wire:
    """Issues and completes communications by task index. ``rank`` is also the device's index in the topology."""

    def __init__(self, lowered: Lowered, rank: int, device: torch.device, timeout_s: float) -> None:
        self.lowered, self.rank, self.device = lowered, rank, device
        self.eager = dist.get_backend() == "gloo"
        self.plans: dict[int, Plan] = {}
        self._ways = directions(lowered.topology, timeout_s)
        self.lying, ahead = lying(lowered, device), [ahead_bytes(lowered, d) for d in range(dist.get_world_size())]
        for task, what in enumerate(lowered.tasks.communication):
            if what is not None:
                if what.one_call:
                    # Every rank makes every group, in the order of the task graph, as torch.distributed requires.
                    process_group(what.devices, timedelta(seconds=timeout_s))
                if rank in what.devices:
                    self.plans[task] = plan_of(lowered, what, rank, self.lying)
                    self.plans[task].copied_bytes = min(ahead[d] for d in what.devices)
        self._sent: deque[tuple[int, list[dist.Work], list[Tensor], int]] = deque()
        """What has been sent in this step and may not have left yet; bytes that are kept for it alone."""
        self._sending = 0
        self._issued = 0
        """So many messages have been sent."""
        self._unposted: dict[int, int] = {}
        """Receives whose place in the order has passed -> what had been sent there. The other side may wait for them:
        none of the later sends may be waited for before they are posted."""
        self._ahead = ahead[rank]

    # ---- what a program does, as closures over its slots; the slot of a task holds an ``Arrival``

    def post(self, values: list[Any], instruction: Post) -> Action:
        """On gloo: allocate what a task brings here, and let it come."""
        task, plan, slot = instruction.task, self.plans[instruction.task], instruction.slot
        dtype, device = plan.dtype, self.device
        if not self.eager:
            return _nothing
        rows = [
            (
                peer, self._ways.group(peer, self.rank, length * dtype.itemsize), length,
                [(m[0].offset, m[-1].offset + volume(m[-1].move.box)) for m in plan.messages(parts)],
            )
            for (peer, length), parts in zip(plan.receive_length.items(), plan.receives.values(), strict=True)
        ]

        def run() -> None:
            works: list[dist.Work] = []
            buffers = []
            for peer, group, length, places in rows:
                buffer = torch.empty(length, dtype=dtype, device=device)
                messages = [buffer[a:b].view(torch.uint8) for a, b in places]
                own = [present(dist.irecv(message, peer, group, tag=task)) for message in messages]
                works.append(own[0] if len(own) == 1 else cast(dist.Work, Works(own)))
                buffers.append(buffer)
            values[slot] = Arrival(works, buffers)
            self._unposted.pop(task, None)

        return self._watched(task, run)

    def start(self, values: list[Any], instruction: Start) -> Action:
        """Issue a communication."""
        plan = self.plans[instruction.task]
        call = self._call if plan.what.one_call else self._exchange
        return self._watched(instruction.task, call(values, plan, instruction))

    def waiting(self, values: list[Any], instruction: Wait) -> Action:
        """Block until what a task brings to this rank has arrived."""
        task, slot = instruction.task, instruction.slot

        def wait() -> None:
            self.wait(task, values[slot].works)
            self._finish_down_to(self._ahead)

        return self._watched(task, wait)

    def awaiting_sends(self, instruction: AwaitSends) -> Action:
        """Wait until messages under way keep no more than so many bytes."""
        return partial(self._finish_down_to, instruction.nbytes)

    def wait(self, task: int, works: Sequence[dist.Work]) -> None:
        """Block until parts of a communication are done."""
        for work in works:
            work.wait()

    def _call(self, values: list[Any], plan: Plan, instruction: Start) -> Action:
        """Leave it to the backend."""
        group, slot = process_group(plan.what.devices), instruction.slot
        if plan.what.sums:
            return collectives.sum_up(values, plan, instruction, group, self.device)
        packs = {peer: self._packed(values, plan, parts, instruction) for peer, parts in plan.sends.items()}
        if plan.what.form == "all_gather":
            return collectives.gather_all(values, plan, slot, packs[self.rank], group, self.device)
        return collectives.swap_all(values, plan, slot, packs, group, self.device)

    def _exchange(self, values: list[Any], plan: Plan, instruction: Start) -> Action:
        rows = _alike(plan)
        packs = [
            (peers, self._packed(values, plan, message, instruction))
            for peers, parts in rows
            for message in self._grouped(plan, parts)
        ]
        task, slot, sent = instruction.task, instruction.slot, self._sent
        lengths, dtype, device = list(plan.receive_length.items()), plan.dtype, self.device
        stored = plan.what.purpose in ("gather", "regather")  # what is stored lives anyway
        kept = [
            0 if stored and len(parts) == 1 else dtype.itemsize * sum(volume(part.move.box) for part in parts)
            for parts in (message for peers, parts in rows for message in self._grouped(plan, parts))
        ]
        total = sum(kept)
        bytes_to = {p: dtype.itemsize * sum(volume(x.move.box) for x in parts) for p, parts in plan.sends.items()}
        groups = {peer: self._ways.group(self.rank, peer, nbytes) for peer, nbytes in bytes_to.items()}

        def send() -> None:
            if lengths and values[slot] is None:
                self._unposted[task] = self._issued
            self._finish_down_to(self._ahead - total)
            for (peers, pack), nbytes in zip(packs, kept, strict=True):
                packed = pack()
                message = packed.view(torch.uint8)
                works = [present(dist.isend(message, peer, groups[peer], tag=task)) for peer in peers]
                self._note_sent(task, works, packed, nbytes)
            self._issued += len(packs)

        def exchange() -> None:
            packed = [(peer, one) for peers, pack in packs for one in (pack(),) for peer in peers]
            buffers = [torch.empty(length, dtype=dtype, device=device) for _, length in lengths]
            rows = zip(lengths, buffers, strict=True)
            operations = [dist.P2POp(dist.irecv, buffer.view(torch.uint8), peer) for (peer, _), buffer in rows]
            operations += [dist.P2POp(dist.isend, pack.view(torch.uint8), peer) for peer, pack in packed]
            works = self._issue(plan.what, operations)
            values[slot] = Arrival(works, buffers)
            sent.append((task, works, [pack for _, pack in packed], 0))

        return send if self.eager else exchange

    def _grouped(self, plan: Plan, parts: list[Part]) -> list[list[Part]]:
        """The messages that parts for a peer go in: on NCCL one."""
        return plan.messages(parts) if self.eager else [parts]

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
            order = plan.orders.get(part.member)
            pieces.append((slot, slices(entry.box, part.move.box), volume(part.move.box), order))
        dtype, device = plan.dtype, self.device

        def piece(slot: int, where: tuple[slice, ...] | None, count: int, order: Order | None) -> Tensor:
            tensor: Tensor | None = values[slot]
            if tensor is None:  # the loss does not depend on it
                return torch.zeros(count, dtype=dtype, device=device)
            tensor = tensor.detach()
            return flat((tensor if where is None else tensor[where]).to(dtype), order)

        def run() -> Tensor:
            packed = piece(*pieces[0]).contiguous() if len(pieces) == 1 else torch.cat([piece(*p) for p in pieces])
            # A single element counts as contiguous whatever its stride, but cannot be seen as bytes.
            return packed if packed.stride(0) == 1 else packed.clone(memory_format=torch.contiguous_format)

        return run

    def total(self, values: list[Any], slot: int, task: int, member: int, box: Box) -> Callable[[], Tensor] | None:
        """What the backend has summed up in a region that a member of a task is for; None: it sums up none."""
        first = self.plans[task].totals.get((member, box))
        if first is None:
            return None
        last, shape = first + volume(box), extent(box)
        return lambda: values[slot].buffers[0][first:last].view(shape)

    def received(
        self, values: list[Any], slot: int, task: int, member: int
    ) -> list[tuple[Move, Callable[[], Tensor]]]:
        """Moves of a member that end here, and their data."""
        result = []
        for k, parts in enumerate(self.plans[task].receives.values()):
            for part in parts:
                if part.member == member:
                    result.append((part.move, _region(values, slot, k, part, self.plans[task].orders.get(member))))
        return result

    def _note_sent(self, task: int, works: list[dist.Work], packed: Tensor, nbytes: int) -> None:
        """Remember what a message keeps: all of the memory that it is a part of, once; nothing if ``nbytes`` is 0."""
        storage = packed.untyped_storage()
        if nbytes:
            nbytes = storage.nbytes()
            before = self._sent[-1] if self._sent else None
            if before is not None and before[2][0].untyped_storage().data_ptr() == storage.data_ptr():
                self._sent[-1] = (*before[:3], 0)
                self._sending -= before[3]
        self._sent.append((task, works, [packed], nbytes))
        self._sending += nbytes

    def end(self) -> None:
        """Finish a step: wait for what has been sent."""
        while self._sent:
            self._finish_oldest()

    def _finish_down_to(self, most: int) -> None:
        """Wait for the oldest sends until those under way keep no more bytes than that, or the next may not be."""
        last = next(iter(self._unposted.values()), self._issued)  # they ascend
        while self._sending > most and self._sending and self._issued - len(self._sent) < last:
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
        peers = set(what.devices) - {self.rank}
        return lost(f"{what.form} of {name!r} ({what.purpose})", peers, error)
