"""Puts the results of reshards together: slices are worked out once, when a program is set up."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexsearch.graph import Box, volume
from flexsearch.graph.notation import intersect
from flexsearch.graph.ops.calls import dtype_of
from flexsearch.graph.ops.local import extent, preferred
from flexsearch.graph.orders import Order
from flexsearch.lower import Lowered
from flexsearch.runtime.instructions import Assemble, Keep, Slot, Transport, reshard_of
from flexsearch.runtime.parts import slices, unflat
from flexsearch.runtime.wire import Wire

Values = list[Any]
Take = Callable[[], Tensor]
Where = tuple[slice, ...] | None
Own = dict[Slot, weakref.ref[Tensor]]
Place = Callable[[Tensor], None]
Action = Callable[[], None]


@dataclass(frozen=True)
class Piece:
    """A region that is added to a result. ``term``: order of summation; ``arrived``: in a message, or
    kept: nobody else reads it."""

    term: int
    box: Box
    take: Take
    arrived: bool = False


def dtype_of_transport(lowered: Lowered, transport: Transport) -> torch.dtype:
    """Element type of what a transport moves."""
    return dtype_of(lowered.moved(transport.purpose, transport.key).dtype)


def source(
    values: Values, slot: Slot, held: Box, wanted: Box, dtype: torch.dtype, device: torch.device
) -> Take:
    """Region ``wanted`` of what a slot holds, a view; zeros if it holds nothing (the loss does not depend on it)."""
    where = slices(held, wanted)
    shape = extent(wanted)

    def take() -> Tensor:
        tensor: Tensor | None = values[slot]
        if tensor is None:
            return torch.zeros(shape, dtype=dtype, device=device)
        tensor = tensor.detach()
        return tensor if where is None else tensor[where]

    return take


def keep(values: Values, lowered: Lowered, instruction: Keep, device: torch.device) -> Action:
    """Copy parts of gradients."""
    transport = instruction.transport
    step, dtype = reshard_of(lowered, transport).phases[0], dtype_of_transport(lowered, transport)
    copies = []
    for m, (slot, copy) in instruction.parts.items():
        move = step.local[m]
        copies.append((copy, source(values, slot, step.source[move.source].box, move.box, dtype, device)))

    def run() -> None:
        for slot, take in copies:
            values[slot] = take().clone()

    return run


def assemble(
    values: Values, lowered: Lowered, rank: int, instruction: Assemble, wire: Wire, pictures: Collection[str],
    own: Own,
) -> Action:  # fmt: skip
    """Put the results of a phase together. ``pictures``: tensors in the memory format of images; ``own``: gradients
    that were put together here before, in memory that nothing else reads."""
    transport = instruction.transport
    step, dtype = reshard_of(lowered, transport).phases[instruction.phase], dtype_of_transport(lowered, transport)
    results, sums = [], list[_Sum]()
    if instruction.refills:
        parts = {k: _pieces(values, lowered, rank, instruction, wire, k) for k in instruction.results}
        return _refilling(
            values, [(slot, _placing(step.destination[k].box, parts[k])) for k, slot in instruction.results.items()]
        )
    # What arrives lies in this order, or in that of the dimensions.
    name = None if transport.purpose == "synchronise" else lowered.edges[transport.key].tensor
    image, order = name in pictures, wire.lying.get(name or "")
    for k, slot in instruction.results.items():
        pieces = _pieces(values, lowered, rank, instruction, wire, k)
        box = step.destination[k].box
        results.append((slot, take := _joined(box, pieces, dtype, wire.device, order)))
        alone = len(pieces) == 1 and pieces[0].box == box
        fresh = _true if not alone else _is_whole if pieces[0].arrived else _false
        sums.append(_Sum(slot, take, fresh, None if alone else _terms(box, pieces)))
    owns = instruction.owns
    if instruction.adds:
        return _adding(values, sums, image, owns, own)

    def run() -> None:
        for slot, take in results:
            result = take()
            if image:
                result = preferred(result)
            if owns and not _is_whole(result):
                result = result.clone()
            values[slot] = result

    return run


class _Sum(NamedTuple):
    """A slot whose gradient grows by what ``take`` gives, in memory of its own if it is ``fresh``; or else by terms,
    each added to a part of it (None: to all)."""

    slot: Slot
    take: Take
    fresh: Callable[[Tensor], bool]
    terms: Sequence[tuple[Where, Take]] | None


def _adding(values: Values, sums: Sequence[_Sum], image: bool, owns: bool, own: Own) -> Action:
    """Add to gradients: in the memory of what is there where that is the gradient's own, and not a view of more or of
    what others read. Terms are added one after the other whatever is there, so that replicas agree to the bit.
    ``image``: whether gradients lie in the memory format of images; ``owns``: they must have memory of their own."""

    def run() -> None:
        for slot, take, fresh, terms in sums:
            before = values[slot]
            mine = before is not None and slot in own and own[slot]() is before
            if before is not None and terms is not None:
                result = before if mine else before.clone()
                for where, term in terms:
                    (result if where is None else result[where]).add_(term())
            else:
                result = preferred(take()) if image else take()
                if before is None:
                    if owns and not _is_whole(result):
                        result = result.clone()
                    elif not fresh(result):
                        values[slot] = result
                        continue
                elif mine:
                    result = before.add_(result)
                else:
                    result = result.add_(before) if fresh(result) else before + result
            values[slot], own[slot] = result, weakref.ref(result)

    return run


def _true(_: Tensor) -> bool:
    return True


def _false(_: Tensor) -> bool:
    return False


def _is_whole(tensor: Tensor) -> bool:
    """Whether a tensor is all that its memory holds."""
    return tensor.untyped_storage().nbytes() == tensor.nbytes


def _refilling(values: Values, results: Sequence[tuple[Slot, Place]]) -> Action:
    """Give a weight, which autograd has saved, its memory back, as PyTorch's FSDP does."""

    def run() -> None:
        for slot, place in results:
            data = values[slot].data  # whose version autograd does not check
            data.untyped_storage().resize_(data.numel() * data.itemsize)
            place(data)

    return run


def empty(values: Values, slot: Slot) -> Action:
    """Let go of the memory of a weight that is gathered again."""

    def run() -> None:
        values[slot].untyped_storage().resize_(0)

    return run


def _pieces(
    values: Values, lowered: Lowered, rank: int, instruction: Assemble, wire: Wire, destination: int
) -> list[Piece]:
    """What a destination entry is made of."""
    transport = instruction.transport
    step, dtype = reshard_of(lowered, transport).phases[instruction.phase], dtype_of_transport(lowered, transport)
    entry, pieces = step.destination[destination], []
    for task, member, slot in instruction.received.values():
        if (total := wire.total(values, slot, task, member, entry.box)) is not None:
            return [Piece(0, entry.box, total)]
        for move, take in wire.received(values, slot, task, member):
            if move.destination == destination:
                pieces.append(Piece(step.source[move.source].term, move.box, take, True))
    for m, move in enumerate(step.local):
        held = step.source[move.source]
        if held.device == rank and move.destination == destination:
            kept = m in instruction.kept
            if kept:
                take = source(values, instruction.kept[m], move.box, move.box, dtype, wire.device)
            else:
                take = source(values, instruction.sources[move.source], held.box, move.box, dtype, wire.device)
            pieces.append(Piece(held.term, move.box, take, kept))
    return sorted(pieces, key=lambda piece: (piece.term, piece.box))


def _joined(
    box: Box, pieces: Sequence[Piece], dtype: torch.dtype, device: torch.device, order: Order | None
) -> Take:  # fmt: skip
    """Sum of pieces placed in ``box``, in the order of their terms, so that all replicas agree to the bit. ``order``:
    in which its dimensions lie in memory."""
    shape, takes = extent(box), _terms(box, pieces)
    if len(pieces) == 1 and pieces[0].box == box:
        return pieces[0].take
    if pieces and all(piece.box == box for piece in pieces):
        (first, own), (second, also), *rest = ((piece.take, piece.arrived) for piece in pieces)
        others = [take for take, _ in rest]

        def total() -> Tensor:
            result, other = first(), second()
            if own and _is_whole(result):
                result += other
            else:
                result = other.add_(result) if also and _is_whole(other) else result + other
            for take in others:
                result += take()
            return result

        return total
    if _covers(box, pieces):

        place = _placing(box, pieces)

        def copied() -> Tensor:
            result = unflat(torch.empty(volume(box), dtype=dtype, device=device), shape, order)
            place(result)
            return result

        return copied

    def summed() -> Tensor:
        result = unflat(torch.zeros(volume(box), dtype=dtype, device=device), shape, order)
        for where, take in takes:
            (result if where is None else result[where]).add_(take())
        return result

    return summed


def _placing(box: Box, pieces: Sequence[Piece]) -> Place:
    """Writes pieces that lie side by side and fill ``box`` into a tensor of that region."""
    takes = _terms(box, pieces)

    def place(result: Tensor) -> None:
        for where, take in takes:
            (result if where is None else result[where]).copy_(take())

    return place


def _terms(box: Box, pieces: Sequence[Piece]) -> list[tuple[Where, Take]]:
    """Pieces with their places in ``box``."""
    return [(slices(box, piece.box), piece.take) for piece in pieces]


def _covers(box: Box, pieces: Sequence[Piece]) -> bool:
    """Whether pieces lie side by side and fill a box."""
    boxes = [piece.box for piece in pieces]
    apart = all(intersect(a, b) is None for k, a in enumerate(boxes) for b in boxes[:k])
    return apart and sum(map(volume, boxes)) == volume(box)
