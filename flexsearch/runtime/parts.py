"""What a rank takes part with in a communication, and where that lies in flat buffers; worked out once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from flexsearch.graph import Box, volume
from flexsearch.graph.images import images
from flexsearch.graph.ops.calls import dtype_of
from flexsearch.graph.ops.local import preferred_format
from flexsearch.graph.orders import CHANNELS_LAST, Order, orders
from flexsearch.lower import Communication, Lowered, Move

Action = Callable[[], None]
ALONE_BYTES = 1 << 16
"""Fewer bytes of a part are copied into a message with others, which takes no longer than one of its own."""
COPIED_BYTES = 1 << 18
"""So are as many, if no rank minds a copy of that size (``liveness.ahead_bytes``): a message costs both sides 35 us."""


def cut(tensor: Tensor, held: Box, wanted: Box) -> Tensor:
    """View of region ``wanted`` of a tensor that holds region ``held``."""
    where = slices(held, wanted)
    return tensor if where is None else tensor[where]


def slices(held: Box, wanted: Box) -> tuple[slice, ...] | None:
    """Where region ``wanted`` lies in a tensor that holds region ``held``; None: it is all of it."""
    if held == wanted:
        return None
    return tuple(slice(w[0] - h[0], w[1] - h[0]) for h, w in zip(held, wanted, strict=True))


def lying(lowered: Lowered, device: torch.device) -> dict[str, Order]:
    """In which order the dimensions of tensors and of their gradients lie in memory, where that is not their own: they
    go in it, so that neither side copies."""
    graph = lowered.graph
    dimension_orders = orders(graph)
    for name in images(graph):
        if preferred_format(4, dtype_of(graph.tensor[name].dtype), device) == torch.channels_last:
            dimension_orders[name] = CHANNELS_LAST
    return dimension_orders


def flat(tensor: Tensor, order: Order | None) -> Tensor:
    """A region as it lies in a flat buffer: a view if its memory is in that order."""
    return (tensor if order is None else tensor.permute(order)).reshape(-1)


def unflat(buffer: Tensor, shape: Sequence[int], order: Order | None) -> Tensor:
    """View of a flat buffer, or of a part of one, as a region of that shape."""
    if order is None:
        return buffer.view(shape)
    return buffer.view([shape[d] for d in order]).permute([order.index(d) for d in range(len(order))])


class Part(NamedTuple):
    """A move of a communication as one side sees it: member position, move, place in the flat buffer (elements)."""

    member: int
    move: Move
    offset: int


class Region(NamedTuple):
    """A region of a sum: where it begins in a flat buffer (elements)."""

    offset: int
    box: Box


@dataclass
class Plan:
    """What this rank does in a communication.

    Of messages, and of an all-to-all in one call: parts to send and to receive by peer, with the buffers' lengths. Of
    an all-gather in one call: the parts that this rank sends to all, under its own number, and to receive by peer, in
    flat buffers of ``block`` elements, one for each device. Of a sum (an all-reduce, or a reduce-scatter in one call):
    the parts that it ``adds`` to regions of a flat buffer of ``length`` elements, with each of these regions; and by
    (member, box) the ``totals`` that it gets, in what the call returns. ``orders``: of members whose regions lie in
    flat buffers in another order of dimensions than theirs (``lying``).
    ``copied_bytes``: copies of so many do not matter to the memory of any of the devices.
    """

    what: Communication
    dtype: torch.dtype
    sends: dict[int, list[Part]] = field(default_factory=dict)
    receives: dict[int, list[Part]] = field(default_factory=dict)
    receive_length: dict[int, int] = field(default_factory=dict)
    adds: list[tuple[Part, Region]] = field(default_factory=list)
    totals: dict[tuple[int, Box], int] = field(default_factory=dict)
    regions: list[Region] = field(default_factory=list)
    length: int = 0
    block: int = 0
    orders: Mapping[int, Order] = field(default_factory=dict)
    copied_bytes: int = 0

    def messages(self, parts: Sequence[Part]) -> list[list[Part]]:
        """What goes in one message each of parts for a peer. A large one goes by itself, without a copy, where that
        keeps nothing alive that is not sent: it is all of its source, or nothing of that stays."""
        rows: list[list[Part]] = []
        apart, least = True, max(ALONE_BYTES, min(COPIED_BYTES, self.copied_bytes))
        for part in parts:
            member, source = self.what.members[part.member], part.move.source
            phase = member.reshard.phases[member.phase]
            alone = phase.source[source].box == part.move.box or all(move.source != source for move in phase.local)
            large = alone and volume(part.move.box) * self.dtype.itemsize >= least
            if large or apart:
                rows.append([])
            rows[-1].append(part)
            apart = large
        return rows


class Arrival(NamedTuple):
    """What is under way to this rank: pending operations; flat buffers by peer in the order of the plan, or of a sum
    the one with the totals; and what must live until then."""

    works: list[dist.Work]
    buffers: list[Tensor]
    sent: Tensor | None = None


def plan_of(
    lowered: Lowered, what: Communication, rank: int, by_name: Mapping[str, Order]
) -> Plan:
    """The part of ``rank`` in a communication. ``by_name``: how tensors are ``lying``."""
    plan = Plan(what, dtype_of(lowered.moved(what.purpose, what.members[0].key).dtype))
    if what.purpose != "synchronise":
        names = [lowered.edges[member.key].tensor for member in what.members]
        plan.orders = {m: by_name[name] for m, name in enumerate(names) if name in by_name}
    if what.form == "all_reduce":
        _plan_all_reduce(plan, rank)
    elif what.sums:
        _plan_reduce_scatter(plan, rank)
    elif what.one_call and what.form == "all_gather":
        _plan_all_gather(plan, rank)
    else:
        _plan_messages(plan, rank)
    return plan


def _plan_messages(plan: Plan, rank: int) -> None:
    send_length = Counter[int]()
    for m, member in enumerate(plan.what.members):
        phase = member.reshard.phases[member.phase]
        for move in member.what.moves:
            source, destination = phase.source[move.source].device, phase.destination[move.destination].device
            if source == rank:
                plan.sends.setdefault(destination, []).append(Part(m, move, send_length[destination]))
                send_length[destination] += volume(move.box)
            elif destination == rank:
                offset = plan.receive_length.get(source, 0)
                plan.receives.setdefault(source, []).append(Part(m, move, offset))
                plan.receive_length[source] = offset + volume(move.box)


def _plan_all_gather(plan: Plan, rank: int) -> None:
    """Each device sends the same to all: what any of them wants of it."""
    offsets: dict[tuple[int, int, Box], int] = {}
    lengths = Counter[int]()
    for m, member in enumerate(plan.what.members):
        phase = member.reshard.phases[member.phase]
        for move in member.what.moves:
            source, key = phase.source[move.source].device, (m, move.source, move.box)
            if key not in offsets:
                offsets[key] = lengths[source]
                lengths[source] += volume(move.box)
                if source == rank:
                    plan.sends.setdefault(rank, []).append(Part(m, move, offsets[key]))
            if phase.destination[move.destination].device == rank:
                plan.receives.setdefault(source, []).append(Part(m, move, offsets[key]))
    plan.block = max(lengths.values())
    plan.receive_length = {peer: plan.block for peer in plan.receives}


def _plan_all_reduce(plan: Plan, rank: int) -> None:
    for m, member in enumerate(plan.what.members):
        box, phase = member.what.box, member.reshard.phases[member.phase]
        assert box is not None
        region = Region(plan.length, box)
        plan.regions.append(region)
        plan.totals[m, box] = plan.length
        moves = [move for move in member.what.moves if phase.source[move.source].device == rank]
        plan.adds += [(Part(m, move, region.offset), region) for move in moves]
        plan.length += volume(box)


def _plan_reduce_scatter(plan: Plan, rank: int) -> None:
    """Each device gets a block with the regions that it wants the sums of."""
    regions: dict[tuple[int, int], Region] = {}
    lengths = Counter[int]()
    for m, member in enumerate(plan.what.members):
        phase = member.reshard.phases[member.phase]
        for destination in sorted({move.destination for move in member.what.moves}):
            entry = phase.destination[destination]
            regions[m, destination] = Region(lengths[entry.device], entry.box)
            if entry.device == rank:
                plan.totals[m, entry.box] = lengths[rank]
            lengths[entry.device] += volume(entry.box)
    plan.block = max(lengths.values())
    plan.length = plan.block * len(plan.what.devices)
    begin = {device: k * plan.block for k, device in enumerate(plan.what.devices)}
    for m, member in enumerate(plan.what.members):
        phase = member.reshard.phases[member.phase]
        for move in member.summed:
            if phase.source[move.source].device == rank:
                own = regions[m, move.destination]
                place = own._replace(offset=own.offset + begin[phase.destination[move.destination].device])
                plan.adds.append((Part(m, move, place.offset), place))
    plan.regions = list(regions.values())
