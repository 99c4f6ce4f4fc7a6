"""Where the pieces of a tensor lie (layouts), and what each device computes of an operator (placements)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from flexsearch.graph import Box, Operator, Piece, make_piece
from flexsearch.strategy import OperatorConfig


class Entry(NamedTuple):
    """A region of a tensor on a device. Entries with different ``term`` add up where they overlap (partial sums);
    entries of the same term are copies of the same values."""

    device: int
    box: Box
    term: int


Layout = tuple[Entry, ...]


@dataclass(frozen=True)
class Placement:
    """An operator's pieces under a config. ``pieces[k]`` runs on ``devices[k]``; ``terms[k]`` tells pieces that compute
    something different from replicas. ``reads[i]`` is the layout of operand i as the pieces need it, and of the
    gradients with respect to it as they make them; ``writes[j]`` the layout of output j."""

    devices: tuple[int, ...]
    pieces: tuple[Piece, ...]
    terms: tuple[int, ...]
    reads: tuple[Layout, ...]
    writes: tuple[Layout, ...]

    def piece_on(self, device: int) -> Piece:
        """The piece that ``device`` computes."""
        return self.pieces[self.devices.index(device)]


def place(
    op: Operator, config: OperatorConfig, inputs: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]
) -> Placement:
    """Pieces, regions and layouts of ``op`` under ``config``; ``inputs``/``outputs`` are the operands' whole shapes."""
    pieces, known = [], {}
    for position in range(len(config.devices)):
        term = position // config.replicas
        if term not in known:
            known[term] = make_piece(op, config.intervals(op, position), inputs, outputs)
        pieces.append(known[term])
    terms = tuple(k // config.replicas for k in range(len(config.devices)))
    placed = tuple(zip(config.devices, pieces, terms, strict=True))
    reads = tuple(
        tuple(Entry(d, box, t) for d, p, t in placed if (box := p.inputs[i]) is not None) for i in range(len(inputs))
    )
    writes = tuple(tuple(Entry(d, p.outputs[j], t) for d, p, t in placed) for j in range(len(outputs)))
    return Placement(config.devices, tuple(pieces), terms, reads, writes)
