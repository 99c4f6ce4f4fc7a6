"""One piece of an operator: an interval on each axis, and the regions of its operands that follow from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from flexsearch.graph.model import Operator
from flexsearch.graph.notation import Box, Interval


@dataclass(frozen=True)
class Piece:
    """``axes``: [low, high) of each axis. ``inputs``/``outputs``: the region of each operand, None where untouched."""

    axes: Mapping[str, Interval]
    inputs: tuple[Box | None, ...]
    outputs: tuple[Box, ...]

    def extent(self, axis: str) -> int:
        """Number of indices of an axis in this piece."""
        low, high = self.axes[axis]
        return high - low


def chunk(size: int, parts: int, index: int) -> Interval:
    """Interval ``index`` of ``size`` indices cut into ``parts`` that differ by at most one."""
    return index * size // parts, (index + 1) * size // parts


def chunks(size: int, parts: int, shares: Sequence[int] = ()) -> list[Interval]:
    """``size`` indices cut into ``parts`` that differ by at most one; or in proportion to ``shares``, one for each."""
    ends = [0, *accumulate(shares or [1] * parts)]
    return [(low * size // ends[-1], high * size // ends[-1]) for low, high in pairwise(ends)]


def make_piece(
    op: Operator, axes: Mapping[str, Interval], inputs: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]
) -> Piece:
    """The piece of ``op`` with the given intervals; ``inputs``/``outputs`` are the shapes of the whole operands."""
    access = op.access
    read = tuple(
        access.region(operand, axes, op.sizes, shape) for operand, shape in zip(access.inputs, inputs, strict=True)
    )
    written = []
    for operand, shape in zip(access.outputs, outputs, strict=True):
        box = access.region(operand, axes, op.sizes, shape)
        if box is None:
            raise AssertionError(f"{op.name}: a piece writes nothing of its output")  # patterns index outputs plainly
        written.append(box)
    return Piece(dict(axes), read, tuple(written))


def whole_piece(op: Operator, inputs: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> Piece:
    """The piece that is the whole operator."""
    return make_piece(op, {axis: (0, size) for axis, size in op.sizes.items()}, inputs, outputs)
