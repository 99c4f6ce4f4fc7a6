"""Regions of tensors that lie on several ranks: who holds what, and how it gets to where it is wanted.

A step and a forward pass move data by the rows of their plans. This is for everything else: the samples that a rank
was fed and another one reads, the state as a whole. Every rank works out the same messages from the layouts alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from flexsearch.graph import Box, intersect, volume
from flexsearch.graph.ops.local import extent
from flexsearch.lower import Entry, Layout, Move
from flexsearch.runtime.faults import lost
from flexsearch.runtime.parts import cut


def whole(shape: Sequence[int]) -> Box:
    """The region that is all of a tensor of ``shape``."""
    return tuple((0, size) for size in shape)


def without(box: Box, other: Box) -> list[Box]:
    """What is left of ``box`` outside of ``other``, in disjoint regions."""
    common = intersect(box, other)
    if common is None:
        return [box]
    left, rest = list[Box](), box
    for d, ((low, high), (first, last)) in enumerate(zip(box, common, strict=True)):
        left += [(*rest[:d], side, *rest[d + 1 :]) for side in ((low, first), (last, high)) if side[0] < side[1]]
        rest = (*rest[:d], (first, last), *rest[d + 1 :])
    return left


def uncovered(box: Box, boxes: Iterable[Box]) -> list[Box]:
    """What of ``box`` lies in none of ``boxes``, in disjoint regions."""
    parts = [box]
    for other in boxes:
        parts = [left for part in parts for left in without(part, other)]
    return parts


def disjoint(boxes: Sequence[Box]) -> list[list[Box]]:
    """For each box, what of it lies in none before it."""
    return [[] if box in boxes[:k] else uncovered(box, boxes[:k]) for k, box in enumerate(boxes)]


def moves(source: Layout, destination: Layout) -> list[Move]:
    """How ``destination`` is made of ``source``: for each of its entries, every term of the source once, from the same
    device where that has it, else from holders in turn. What no source entry holds is left out."""
    terms: dict[int, list[int]] = {}
    for s, entry in enumerate(source):
        terms.setdefault(entry.term, []).append(s)
    result = []
    for d, wanted in enumerate(destination):
        for holders in terms.values():
            turn = d % len(holders)
            order = sorted(holders[turn:] + holders[:turn], key=lambda s: source[s].device != wanted.device)
            missing = [wanted.box]
            for s in order:
                if not missing:
                    break
                overlaps = [(box, common) for box in missing if (common := intersect(box, source[s].box)) is not None]
                result += [Move(s, d, common) for _, common in overlaps]
                missing = [left for box in missing for left in without(box, source[s].box)]
    return result


class Mover:
    """Makes this rank's entries of one layout from those of another. Terms of the source add up, in their order."""

    def __init__(self, source: Layout, destination: Layout, rank: int, dtype: torch.dtype) -> None:
        self.source, self.destination, self.rank, self.dtype = source, destination, rank, dtype
        self._moves = sorted(moves(source, destination), key=lambda m: (m.destination, source[m.source].term))
        self._sends: dict[int, list[Move]] = {}
        self._receives: dict[int, list[Move]] = {}
        for move in self._moves:
            a, b = source[move.source].device, destination[move.destination].device
            if a == rank != b:
                self._sends.setdefault(b, []).append(move)
            elif b == rank != a:
                self._receives.setdefault(a, []).append(move)

    @property
    def idle(self) -> bool:
        """Whether nothing crosses between this rank and others."""
        return not self._sends and not self._receives

    def run(self, pieces: Mapping[int, Tensor], device: torch.device) -> dict[int, Tensor]:
        """Entries of the destination on this rank, by index. ``pieces``: those of the source. All ranks between which
        something moves must call it. An entry that is one source entry is that tensor itself."""
        arrived = self._exchange(pieces, device)
        parts: dict[int, list[tuple[Box, Tensor]]] = {}
        for move in self._moves:
            if self.destination[move.destination].device == self.rank:
                part = arrived[move] if move in arrived else self._piece(pieces, move)
                parts.setdefault(move.destination, []).append((move.box, part))
        return {
            d: self._join(entry.box, parts.get(d, []), device)
            for d, entry in enumerate(self.destination)
            if entry.device == self.rank
        }

    def _join(self, box: Box, parts: list[tuple[Box, Tensor]], device: torch.device) -> Tensor:
        """The sum of parts placed in ``box``, in their order, so that all ranks agree to the bit."""
        if len(parts) == 1 and parts[0][0] == box:
            return parts[0][1]
        total = torch.zeros(extent(box), dtype=self.dtype, device=device)
        for region, part in parts:
            place = cut(total, box, region)
            if self.dtype == torch.bool:  # is no partial sum
                place.copy_(part)
            else:
                place.add_(part)
        return total

    def _piece(self, pieces: Mapping[int, Tensor], move: Move) -> Tensor:
        return cut(pieces[move.source], self.source[move.source].box, move.box)

    def _exchange(self, pieces: Mapping[int, Tensor], device: torch.device) -> dict[Move, Tensor]:
        """One message to and from each peer; receives are posted first."""
        if self.idle:
            return {}
        flat = {
            peer: torch.empty(sum(volume(m.box) for m in parts), dtype=self.dtype, device=device)
            for peer, parts in self._receives.items()
        }
        packed = {
            peer: torch.cat([self._piece(pieces, m).to(device, self.dtype).reshape(-1) for m in parts])
            for peer, parts in self._sends.items()
        }
        operations = [dist.P2POp(dist.irecv, x.view(torch.uint8), peer) for peer, x in flat.items()]
        operations += [dist.P2POp(dist.isend, x.view(torch.uint8), peer) for peer, x in packed.items()]
        try:
            for work in dist.batch_isend_irecv(operations):
                work.wait()
        except RuntimeError as error:
            raise lost("moving pieces of a tensor", {*flat, *packed}, error) from error
        arrived: dict[Move, Tensor] = {}
        for peer, parts in self._receives.items():
            sizes = [volume(m.box) for m in parts]
            for move, part in zip(parts, torch.split(flat[peer], sizes), strict=True):
                arrived[move] = part.view(extent(move.box))
        return arrived


def everywhere(shape: Sequence[int], ranks: int) -> Layout:
    """The layout in which every rank has all of a tensor."""
    return tuple(Entry(rank, whole(shape), 0) for rank in range(ranks))
