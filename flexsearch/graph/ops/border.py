"""Padding by what lies at the border of a tensor: reflected, repeated, or from the other side."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from flexsearch.graph.model import Operator
from flexsearch.graph.ops.attributes import Natural
from flexsearch.graph.ops.base import (
    NOTHING,
    Attributes,
    Extents,
    Kernel,
    KernelContext,
    OperatorKind,
    Sample,
    Shapes,
    define,
    rand,
    rewrite,
)
from flexsearch.graph.ops.builder import Builder, letters
from flexsearch.graph.ops.join import cat
from flexsearch.graph.ops.join import pad as pad_constant
from flexsearch.graph.ops.lazy import F, torch
from flexsearch.graph.ops.shape import cut
from flexsearch.graph.ops.spatial import check_pattern
from flexsearch.graph.ops.value import Value
from flexsearch.graph.piece import Piece

if TYPE_CHECKING:
    from torch import Tensor


class Border(Attributes):
    """``pad``: elements before and after each of the last dimensions, the last one first."""

    mode: Literal["reflect", "replicate"]
    pad: Annotated[list[Natural], Field(min_length=2, max_length=6)]


class BorderPad(OperatorKind):
    """Elements outside are those at the border, reflected or repeated: pieces read halos on both sides."""

    name = "border_pad"
    attributes = Border
    saved = NOTHING
    windows = True
    copies = True
    backward_reads: Literal["nothing", "gradients", "inputs"] = "gradients"

    def check(self, op: Operator, attributes: Any, shapes: tuple[tuple[int, ...], ...]) -> str:
        sides, (x, y) = attributes.pad, shapes
        if len(sides) % 2 or not len(sides) // 2 < len(x) == len(y):
            return f"attributes.pad: {sides} is no padding of shape {list(x)}"
        padding = by_dimension(sides, len(x))
        if y != tuple(before + size + after for size, (before, after) in zip(x, padding, strict=True)):
            return f"padding shape {list(x)} by {sides} does not give {list(y)}"
        if attributes.mode == "reflect" and any(max(p) >= n for p, n in zip(padding, x, strict=True)):
            return f"attributes.pad: {sides} reflects more than there is of shape {list(x)}"
        template, sizes = bordered(attributes.mode, padding)
        return check_pattern(op, template, shapes, sizes)

    def flops(self, op: Operator, extents: Extents) -> Any:
        return 0.0

    def kernel(self, op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
        mode, sides, written = str(op.attributes["mode"]), list[int](), piece.outputs[0]
        pad: Any = op.attributes["pad"]
        sides = [int(n) for n in pad]
        padding, box = by_dimension(sides, len(written)), piece.inputs[0]
        assert box is not None
        padded = [i for i, pair in enumerate(padding) if any(pair)]
        if all(written[i] == (0, sum(padding[i]) + shapes[0][i]) for i in padded):
            return lambda x: F.pad(x, sides, mode)
        tables = [(i, _sources(mode, shapes[0][i], padding[i][0], *written[i]) - box[i][0]) for i in padded]

        def run(x: Tensor) -> Tensor:
            for dim, index in tables:
                x = x.index_select(dim, index.to(x.device))
            return x

        return run

    def samples(self) -> Iterable[Sample]:
        for mode in ("reflect", "replicate"):
            yield Sample(_padded(mode, (2, 1, 0, 3)), (rand(2, 3, 5, 4),))
            yield Sample(_padded(mode, (1, 2)), (rand(3, 4),))


def _padded(mode: str, sides: Sequence[int]) -> Any:
    return lambda x: F.pad(x, sides, mode)


def by_dimension(sides: Sequence[int], rank: int) -> list[tuple[int, int]]:
    """(Before, after) of each dimension, from what F.pad takes: the last dimension first."""
    pairs = [(sides[i], sides[i + 1]) for i in range(0, len(sides), 2)]
    return [(0, 0)] * (rank - len(pairs)) + pairs[::-1]


def _sources(mode: str, size: int, before: int, first: int, end: int) -> Tensor:
    """Where elements ``first`` to ``end`` of a padded dimension come from."""
    place = torch.arange(first, end) - before
    if mode == "replicate":
        return place.clamp(0, size - 1)
    return size - 1 - (size - 1 - place.abs()).abs()


def bordered(mode: str, padding: Sequence[tuple[int, int]]) -> tuple[str, dict[str, int]]:
    """Pattern, and the sizes of the axes that reach over the border: reflected elements lie twice as far away."""
    names, reads, sizes = letters(len(padding)), [], dict[str, int]()
    for name, (before, after) in zip(names, padding, strict=True):
        far = 2 if mode == "reflect" else 1
        if before or after:
            sizes[name.upper()] = far * (before + after) + 1
            reads.append(f"({name}+{name.upper()}-{before + far * after})")
        else:
            reads.append(name)
    return f"{' '.join(reads)} -> {' '.join(names)}", sizes


define(BorderPad())


@rewrite("pad")
def _pad(b: Builder, x: Value, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Value:
    if mode == "constant":
        return pad_constant(b, x, pad, value)
    return _circular(b, x, pad) if mode == "circular" else _border(b, x, pad, mode)


@rewrite("reflection_pad1d", "reflection_pad2d", "reflection_pad3d")
@rewrite("replication_pad1d", "replication_pad2d", "replication_pad3d")
def _padding(b: Builder, x: Value, padding: Sequence[int]) -> Value:
    return _border(b, x, padding, "reflect" if "reflection" in b.target else "replicate")


@rewrite("_pad_circular")
def _circular(b: Builder, x: Value, pad: Sequence[int]) -> Value:
    """What lies outside comes from the other side; a piece reads only the parts that it touches."""
    x, sides = _cropped(b, x, pad)
    for dim, (before, after) in enumerate(by_dimension(sides, x.rank)):
        if before or after:
            size = x.shape[dim]
            parts = [cut(b, x, dim, size - before, before), x, cut(b, x, dim, 0, after)]
            x = cat(b, parts, dim)
    return x


def _border(b: Builder, x: Value, pad: Sequence[int], mode: str) -> Value:
    x, sides = _cropped(b, x, pad)
    if not any(sides):
        return x
    template, sizes = bordered(mode, by_dimension(sides, x.rank))
    return b.emit("border_pad", [x], b.shape, template, {"mode": mode, "pad": sides}, sizes=sizes, short="pad")


def _cropped(b: Builder, x: Value, pad: Sequence[int]) -> tuple[Value, list[int]]:
    """``x`` without what negative paddings take away, and the others."""
    for dim, (before, after) in enumerate(by_dimension(pad, x.rank)):
        start, end = max(-before, 0), x.shape[dim] - max(-after, 0)
        x = cut(b, x, dim, start, end - start)
    return x, [max(side, 0) for side in pad]
