"""Windows of an image as columns (im2col), and their sum (col2im, ``F.fold``)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, Literal

from flexsearch.graph.model import Dtype, Operator
from flexsearch.graph.ops.base import (
    NOTHING,
    Extents,
    Kernel,
    KernelContext,
    OperatorKind,
    Sample,
    Shapes,
    define,
    input_elements,
    rand,
    rewrite,
)
from flexsearch.graph.ops.builder import Builder
from flexsearch.graph.ops.join import only_padding
from flexsearch.graph.ops.lazy import F
from flexsearch.graph.ops.local import cut as outside
from flexsearch.graph.ops.local import extent, numbers
from flexsearch.graph.ops.shape import cut, view
from flexsearch.graph.ops.spatial import (
    IMAGE,
    Overlap,
    Window,
    check_pattern,
    each,
    overlap_axes,
    pad_sides,
    windows,
)
from flexsearch.graph.ops.value import Value
from flexsearch.graph.piece import Piece

if TYPE_CHECKING:
    from torch import Tensor

_NUMBERS = ("kernel_size", "dilation", "padding", "stride")


class Columns(Window):
    dtype: Dtype | None = None


class Im2col(OperatorKind):
    """Windows of an image as columns: (n, channels * window, places)."""

    name = "im2col"
    targets = ("aten.im2col",)
    roles = IMAGE
    attributes = Columns
    saved = NOTHING
    windows = True
    backward_reads: Literal["nothing", "gradients", "inputs"] = "gradients"

    def trace(self, b: Builder, x: Value, **geometry: Any) -> Value:
        geometry = {name: each(geometry[name], 2) for name in _NUMBERS}
        template, sizes = _columns(x.shape, geometry)
        return b.emit(self.name, [x], b.shape, template, {**geometry, "dtype": x.dtype}, sizes=sizes, short=self.name)

    def check(self, op: Operator, attributes: Any, shapes: tuple[tuple[int, ...], ...]) -> str:
        """The pattern has the windows that the attributes say, and each has its column."""
        if len(shapes[0]) not in (3, 4) or any(getattr(attributes, name) is None for name in _NUMBERS):
            return "im2col needs an image, and two numbers each for kernel_size, dilation, padding and stride"
        geometry = {name: each(getattr(attributes, name), 2) for name in _NUMBERS}
        if any(len(values) != 2 for values in geometry.values()):
            return "im2col needs an image, and two numbers each for kernel_size, dilation, padding and stride"
        template, sizes = _columns(shapes[0], geometry)
        if min(sizes.values()) < 1:
            return "an image of im2col must hold a window"
        expected = (*shapes[0][:-3], shapes[0][-3] * prod(geometry["kernel_size"]), sizes["h"] * sizes["w"])
        if shapes[1] != expected:
            return f"columns of shape {list(shapes[0])} have shape {list(expected)}"
        return check_pattern(op, template, shapes, sizes)

    def flops(self, op: Operator, extents: Extents) -> Any:
        return 0.0

    def kernel(self, op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
        kernel, dilation, stride = (tuple(numbers(op, name, 2, 1)) for name in ("kernel_size", "dilation", "stride"))
        if piece.inputs[0] is None:
            return only_padding(op, piece, context, 0.0)
        rank = len(shapes[0])
        sides = [side for i in (rank - 1, rank - 2) for side in outside(op, piece, 0, i)]
        return lambda x: F.unfold(F.pad(x, sides) if any(sides) else x, kernel, dilation, 0, stride)

    def samples(self) -> Iterable[Sample]:
        yield Sample(lambda x: F.unfold(x, (3, 2), padding=1, stride=2), (rand(2, 3, 7, 6),))
        yield Sample(lambda x: F.unfold(x, 2, dilation=2), (rand(3, 5, 6),))


def _columns(shape: Sequence[int], geometry: dict[str, list[int]]) -> tuple[str, dict[str, int]]:
    """Pattern of im2col of an operand of ``shape``, and the sizes of its axes."""
    numbers = zip(shape[-2:], *(geometry[name] for name in _NUMBERS), strict=True)
    rows, columns = ((size + 2 * p - d * (k - 1) - 1) // s + 1 for size, k, d, p, s in numbers)
    n, (kh, kw) = "n " if len(shape) == 4 else "", geometry["kernel_size"]
    sizes = {"h": rows, "w": columns, "KH": kh, "KW": kw, "c": shape[-3]}
    return f"{n}c {windows(geometry['stride'], geometry['padding'], geometry['dilation'])} -> {n}(c KH KW) (h w)", sizes


class Fold(OperatorKind):
    """Windows (n, channels, window height, width, rows, columns) added up where they overlap: (n, channels, height,
    width). Elements come in blocks of the stride, of which each knows the windows that it reads."""

    name = "fold"
    roles = IMAGE
    attributes = Columns
    saved = NOTHING
    windows = True
    image = True
    backward_reads: Literal["nothing", "gradients", "inputs"] = "gradients"

    def check(self, op: Operator, attributes: Any, shapes: tuple[tuple[int, ...], ...]) -> str:
        geometry = [each(getattr(attributes, name), 2, default) for name, default in _DEFAULTS]
        if len(shapes[0]) != 6 or len(shapes[1]) != 4 or any(len(values) != 2 for values in geometry):
            return "fold takes six dimensions to four, and has two numbers for each attribute"
        dims = [
            Overlap(*values) for values in zip(shapes[0][-2:], shapes[0][2:4], *geometry, shapes[1][-2:], strict=True)
        ]
        for dim in dims:
            least = dim.stride * (dim.windows - 1) + dim.dilation * (dim.kernel - 1) + 1 - 2 * dim.padding
            if dim.size % dim.stride or not least <= dim.size < least + 2 * dim.stride:
                return f"{dim.windows} windows of {op.kind} do not make {dim.size} elements"
        template, sizes = _folding(dims)
        return check_pattern(op, template, shapes, sizes)

    def flops(self, op: Operator, extents: Extents) -> Any:
        """An addition for each element of a window."""
        return input_elements(op, {**extents, "H": 1, "W": 1})

    def kernel(self, op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
        box = piece.inputs[0]
        if box is None:
            return only_padding(op, piece, context, 0.0)
        kernel = shapes[0][2:4]
        stride, _, dilation = geometry = [numbers(op, name, 2, default) for name, default in _DEFAULTS]
        dims = [Overlap(*values) for values in zip(shapes[0][-2:], kernel, *geometry, strict=True)]
        lengths = zip(stride, dilation, kernel, extent(box)[-2:], strict=True)
        full = [s * (count - 1) + d * (k - 1) + 1 for s, d, k, count in lengths]
        regions = zip(dims, box[-2:], piece.outputs[0][-2:], strict=True)
        crops = [dim.crop(read, written) for dim, read, written in regions]
        sides = pad_sides([(-before, -after) for before, after in crops])

        def run(x: Tensor) -> Tensor:
            y = F.fold(x.flatten(4).flatten(1, 3), tuple(full), kernel, tuple(dilation), 0, tuple(stride))
            return F.pad(y, sides) if sides else y

        return run

    def samples(self) -> Iterable[Sample]:
        yield Sample(lambda x: F.fold(x, (6, 8), 2, stride=2), (rand(2, 8, 12),))
        yield Sample(lambda x: F.fold(x, (7, 6), 3, padding=1, stride=2, dilation=(1, 2)), (rand(18, 8),))


_DEFAULTS = (("stride", 1), ("padding", 0), ("dilation", 1))


def _folding(dims: Sequence[Overlap]) -> tuple[str, dict[str, int]]:
    """Pattern of ``fold``, and the sizes of its spatial axes."""
    reads, writes, sizes = overlap_axes(dims)
    return f"n c KH KW {reads} -> n c {writes}", sizes


for _kind in (Im2col(), Fold()):
    define(_kind)


@rewrite("col2im")
def _col2im(b: Builder, x: Value, output_size: Any, **geometry: Any) -> Value:
    """Columns with their windows and places apart, which are then added up; an unfinished last block is cut off."""
    size = each(output_size, 2)
    kernel, dilation, padding, stride = (each(geometry[name], 2) for name in _NUMBERS)
    places = [
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, p, d, k, s in zip(size, padding, dilation, kernel, stride, strict=True)
    ]
    dims = [Overlap(*v) for v in zip(places, kernel, stride, padding, dilation, size, strict=True)]
    full = [dim.blocks * dim.stride for dim in dims]
    n, c = (x.shape[0] if x.rank == 3 else 1), x.shape[-2] // prod(kernel)
    apart = view(b, x, (n, c, *kernel, *places))
    attributes = {"stride": stride, "padding": padding, "dilation": dilation, "dtype": x.dtype}
    template, sizes = _folding(dims)
    y = b.emit("fold", [apart], (n, c, *full), template, attributes, sizes=sizes, short="fold")
    for i in (2, 3):
        y = cut(b, y, i, 0, size[i - 2])
    return view(b, y, b.shape)
