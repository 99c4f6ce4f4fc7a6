"""Communications that ranks leave to one call of the backend, as closures over the slots of a program.

All devices of the group take part in each. Parts of unequal lengths are padded to the longest; where that would move
more than 1/8 too much, the planner has left them as messages (``lower.traffic``). All-to-alls have the lengths that
they have. What is not summed goes as bytes, whatever its type.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flexsearch.graph import volume
from flexsearch.graph.ops.local import extent
from flexsearch.runtime.instructions import Start
from flexsearch.runtime.parts import Action, Arrival, Plan, slices

Pack = Callable[[], Tensor]
# torch 2.13 gave them other names.
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def sum_up(
    values: list[Any], plan: Plan, instruction: Start, group: dist.ProcessGroup, device: torch.device
) -> Action:
    """An all-reduce or a reduce-scatter of what this rank adds."""
    rows = []
    for part, region in plan.adds:
        member = plan.what.members[part.member]
        entry = member.reshard.phases[member.phase].source[part.move.source]
        slot = instruction.sources[part.member][part.move.source]
        inside, where = slices(region.box, part.move.box), slices(entry.box, part.move.box)
        rows.append((part.offset, part.offset + volume(region.box), extent(region.box), inside, slot, where))
    # One part fills each region, so that nothing need be zero before.
    alone = len({first for first, *_ in rows}) == len(rows) == len(plan.regions) and all(row[3] is None for row in rows)
    slot_of_task, dtype, reduces = instruction.slot, plan.dtype, plan.what.form == "all_reduce"

    def run() -> None:
        flat = (torch.empty if alone else torch.zeros)(plan.length, dtype=dtype, device=device)
        for first, last, shape, inside, slot, where in rows:
            tensor = values[slot]
            region = flat[first:last].view(shape)
            if tensor is None:  # the loss does not depend on it
                if alone:
                    region.zero_()
                continue
            tensor = tensor.detach() if where is None else tensor.detach()[where]
            if alone:
                region.copy_(tensor)
            else:
                (region if inside is None else region[inside]).add_(tensor)
        if reduces:
            values[slot_of_task] = Arrival([present(dist.all_reduce(flat, group=group, async_op=True))], [flat])
            return
        total = torch.empty(plan.block, dtype=dtype, device=device)
        work = _reduce_scatter(_real(total), _real(flat), group=group, async_op=True)
        values[slot_of_task] = Arrival([present(work)], [total], flat)

    return run


def gather_all(
    values: list[Any], plan: Plan, slot: int, pack: Pack, group: dist.ProcessGroup, device: torch.device
) -> Action:
    """An all-gather of what this rank sends, ``pack``."""
    devices, block, dtype = plan.what.devices, plan.block, plan.dtype
    places = [devices.index(peer) * block for peer in plan.receives]

    def run() -> None:
        own = pack()
        if own.numel() < block:
            own = torch.cat((own, own.new_empty(block - own.numel())))
        flat = torch.empty(len(devices) * block, dtype=dtype, device=device)
        work = all_gather(flat.view(torch.uint8), own.view(torch.uint8), group=group, async_op=True)
        values[slot] = Arrival([present(work)], [flat[at : at + block] for at in places], own)

    return run


def swap_all(
    values: list[Any], plan: Plan, slot: int, packs: dict[int, Pack], group: dist.ProcessGroup, device: torch.device
) -> Action:
    """An all-to-all of ``packs``, by peer."""
    devices, dtype = plan.what.devices, plan.dtype
    lengths = [plan.receive_length.get(peer, 0) for peer in devices]
    bytes_in = [n * dtype.itemsize for n in lengths]
    begin = {peer: sum(lengths[:k]) for k, peer in enumerate(devices)}
    views = [(begin[peer], begin[peer] + length) for peer, length in plan.receive_length.items()]
    ordered = [packs[peer] for peer in devices if peer in packs]
    parts_to = [plan.sends.get(peer, ()) for peer in devices]
    bytes_out = [dtype.itemsize * sum(volume(part.move.box) for part in parts) for parts in parts_to]

    def run() -> None:
        sent = torch.cat([pack() for pack in ordered])
        flat = torch.empty(sum(lengths), dtype=dtype, device=device)
        work = dist.all_to_all_single(
            flat.view(torch.uint8), sent.view(torch.uint8), bytes_in, bytes_out, group=group, async_op=True
        )
        values[slot] = Arrival([present(work)], [flat[first:last] for first, last in views], sent)

    return run


def _real(flat: Tensor) -> Tensor:
    """Complex numbers as pairs of real ones, which have the same sums."""
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat


def present(work: dist.Work | None) -> dist.Work:
    """What an asynchronous call returns to ranks of its group."""
    assert work is not None
    return work
