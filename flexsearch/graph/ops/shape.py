"""Other shapes of the same elements, parts of them, and other orders: what moves data without changing it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from math import gcd, prod
from typing import Annotated, Any, Literal

from pydantic import Field

from flexsearch.graph.model import Operator
from flexsearch.graph.ops.attributes import Along, Place, Positive, Signed
from flexsearch.graph.ops.base import (
    ALIAS,
    NOTHING,
    Attributes,
    Extents,
    Kernel,
    KernelContext,
    OperatorKind,
    Sample,
    Saved,
    Shapes,
    define,
    rand,
    rewrite,
)
from flexsearch.graph.ops.builder import Builder, empty, letters
from flexsearch.graph.ops.local import extent
from flexsearch.graph.ops.pointwise import cast
from flexsearch.graph.ops.value import Shape, Value
from flexsearch.graph.piece import Piece

STRIDED = ("permute", "expand", "slice")
"""Kinds whose result is not contiguous: a view of it is a copy."""


class _Moving(OperatorKind):
    """No arithmetic; the result is another view of the same memory."""

    traffic = "copy"
    saved = ALIAS
    trivial = True
    free = True
    backward_reads: Literal["nothing", "gradients", "inputs"] = "gradients"

    def flops(self, op: Operator, extents: Extents) -> Any:
        return 0.0


class View(_Moving):
    """A row-major reshape."""

    name = "view"
    backward_reads = "nothing"

    def check(self, op: Operator, attributes: Any, shapes: tuple[tuple[int, ...], ...]) -> str:
        same = prod(shapes[0]) == prod(shapes[1])
        return "" if same else f"a view of shape {list(shapes[0])} has other elements"

    def kernel(self, op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
        size = extent(piece.outputs[0])
        return lambda x: x.reshape(size)

    def saves(self, op: Operator, *before: Operator) -> Saved:
        if not before or before[0].kind not in STRIDED:
            return ALIAS
        # Fused attention lays its result out by position and head, as it is wanted next.
        swaps = before[0].kind == "permute" and before[0].attributes.get("dims") == [0, 2, 1, 3]
        fused = before[-1].kind == "attention" and not before[-1].attributes.get("dropout")
        return ALIAS if swaps and fused else NOTHING

    def samples(self) -> Iterable[Sample]:
        yield Sample(lambda x: x.view(4, 2, 3, 5).flatten(2), (rand(4, 6, 5),))
        yield Sample(lambda x: x.reshape(8, 3), (rand(4, 6),))


class Permute(_Moving):
    """Dimensions in another order, ``dims``."""

    name = "permute"
    backward_reads = "nothing"

    class attributes(Attributes):
        dims: list[Place]

    def check(self, op: Operator, attributes: Any, shapes: tuple[tuple[int, ...], ...]) -> str:
        dims, rank = attributes.dims, len(shapes[0])
        if sorted(d % max(rank, 1) for d in dims) != list(range(rank)):
            return f"attributes.dims: {dims} is no order of {rank} dimensions"
        fits = shapes[1] == tuple(shapes[0][d] for d in dims)
        return "" if fits else f"attributes.dims: shape {list(shapes[0])} in the order {dims} is not {list(shapes[1])}"

    def kernel(self, op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
        dims: Any = op.attributes["dims"]
        return lambda x: x.permute(dims)

    def samples(self) -> Iterable[Sample]:
        yield Sample(lambda x: x.permute(2, 0, 1) * 1, (rand(2, 3, 4),))


class Expand(_Moving):
    """Broadcast to ``shape``."""

    name = "expand"

    class attributes(Attributes):
        shape: list[Annotated[int, Field(ge=-1, lt=2**48)]] | None = None

    def check(self, op: Operator, attributes: Any, shapes: tuple[tuple[int, ...], ...]) -> str:
        lead = len(shapes[1]) - len(shapes[0])
        fits = lead >= 0 and all(s in (1, t) for s, t in zip(shapes[0], shapes[1][lead:], strict=True))
        return "" if fits else f"shape {list(shapes[0])} cannot be expanded to {list(shapes[1])}"

    def kernel(self, op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
        size = extent(piece.outputs[0])
        return lambda x: x.expand(size)

    def resized(self, op: Operator, sizes: Mapping[str, int]) -> dict[str, Any]:
        """The shape that was asked for, of which -1 stays."""
        shape: Any = op.attributes.get("shape")
        if shape is None:
            return op.attributes
        extents = (prod(sizes[a] for a in d.axes) for d in op.access.outputs[0].dimensions)
        return {**op.attributes, "shape": [-1 if n == -1 else m for n, m in zip(shape, extents, strict=True)]}

    def samples(self) -> Iterable[Sample]:
        yield Sample(lambda x: x.expand(4, 3, -1) * 1, (rand(3, 1),))


class Slice(_Moving):
    """A part of a dimension, with a ``step``, or one element of it."""

    name = "slice"
    windows = True

    class attributes(Along):
        dim: Place = 0
        start: Signed = 0
        step: Positive = 1
        index: Signed = 0

    def check(self, op: Operator, attributes: Any, shapes: tuple[tuple[int, ...], ...]) -> str:
        whole = {axis: (0, size) for axis, size in op.sizes.items()}
        for dimension, size in zip(op.access.inputs[0].dimensions, shapes[0], strict=True):
            low, high = (0, size) if dimension.merged else dimension.window(whole)
            if low < 0 or high > size or (not dimension.plain and len(dimension.axes) > 1):
                return f'"{dimension}" of pattern "{op.pattern}" reaches out of a dimension of size {size}'
        return ""

    def kernel(self, op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
        """The region spans the first to the last element read: what is left is the step, and dropping selected ones."""
        size = extent(piece.outputs[0])
        steps = [d.coefficients[0] if len(d.axes) == 1 else 1 for d in op.access.inputs[0].dimensions]
        if all(step == 1 for step in steps):
            return lambda x: x if x.shape == size else x.reshape(size)
        index = tuple(slice(None, None, step) for step in steps)
        return lambda x: x[index].reshape(size)

    def samples(self) -> Iterable[Sample]:
        yield Sample(lambda x: x[:, 1:7:2, -1] * 1, (rand(4, 8, 3),))


class Detach(OperatorKind):
    """The same elements, through which no gradient flows."""

    name = "detach"
    pattern = "a.. -> a.."
    free = True

    def check(self, op: Operator, attributes: Any, shapes: tuple[tuple[int, ...], ...]) -> str:
        return "" if shapes[0] == shapes[1] else f"detach of a tensor of shape {list(shapes[0])} has another shape"

    def flops(self, op: Operator, extents: Extents) -> Any:
        return 0.0

    def kernel(self, op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
        return lambda x: x.detach()

    def samples(self) -> Iterable[Sample]:
        yield Sample(lambda x: x * x.detach(), (rand(4, 3),))


for _kind in (View(), Permute(), Expand(), Slice(), Detach()):
    define(_kind)


def view(b: Builder, x: Value, shape: Sequence[int]) -> Value:
    """``x`` reshaped (-1: whatever remains); ``x`` itself if it has that shape already."""
    fixed = prod(s for s in shape if s != -1)
    target = tuple(prod(x.shape) // fixed if s == -1 else s for s in shape)
    if target == x.shape:
        return x
    pattern, sizes = view_pattern(x.shape, target)
    return b.emit("view", [x], target, pattern, sizes=sizes, short="view")


def view_pattern(source: Shape, target: Shape) -> tuple[str, dict[str, int]]:
    """Pattern and axis sizes of a row-major reshape.

    The dimensions fall into the smallest groups of equal size on both sides. In a group where several dimensions are
    made from one, or otherwise, the common divisor of the leading sizes can be split, and everything else is whole.
    """
    names, sizes = iter(letters(3 * (len(source) + len(target)))), {}

    def fresh(size: int, whole: bool) -> str:
        name = next(names).upper() if whole else next(names)
        sizes[name] = size
        return name

    remaining = [[s for s in shape if s > 1] for shape in (source, target)]
    sides: list[list[str]] = [[], []]
    while remaining[0] and remaining[1]:
        group = [[side.pop(0)] for side in remaining]
        while (products := [prod(dims) for dims in group])[0] != products[1]:
            smaller = int(products[1] < products[0])
            group[smaller].append(remaining[smaller].pop(0))
        for side, dimensions in zip(sides, _factor(group[0], group[1], fresh), strict=True):
            side.extend(axes[0] if len(axes) == 1 else f"({' '.join(axes)})" for axes in dimensions)
    texts = []
    for shape, side in zip((source, target), sides, strict=True):
        tokens = iter(side)
        texts.append(" ".join("1" if s == 1 else next(tokens) for s in shape))
    return " -> ".join(texts), sizes


def _factor(left: list[int], right: list[int], fresh: Callable[[int, bool], str]) -> list[list[list[str]]]:
    """Axes of every dimension of the two sides of a group; shared ones, where the factors of both sides nest."""
    if len(left) == len(right) == 1:
        axis = fresh(left[0], False)
        return [[[axis]], [[axis]]]
    total, lead = prod(left), gcd(left[0], right[0])
    spans = [list(pairwise([total, *(total // p for p in accumulate(dims, int.__mul__))])) for dims in (left, right)]
    strides = {total // lead} | {low for side in spans for _, low in side}
    bounds = sorted(strides | {total}, reverse=True)
    if all(outer % inner == 0 for outer, inner in pairwise(bounds)):
        axes = [(o, i, fresh(o // i, o < total or lead == 1)) for o, i in pairwise(bounds)]
        return [[[axis for o, i, axis in axes if high >= o and i >= low] for high, low in side] for side in spans]
    shared = [fresh(lead, False)] if lead > 1 else []
    result = []
    for dims in (left, right):
        rest = [dims[0] // lead, *dims[1:]]
        side = [[fresh(size, True)] if size > 1 else [] for size in rest]
        result.append([shared + side[0], *side[1:]])
    return result


def permute(b: Builder, x: Value, dims: Sequence[int]) -> Value:
    """Dimension ``i`` of the result is dimension ``dims[i]`` of ``x``."""
    order = [d % x.rank for d in dims]
    if order == list(range(x.rank)):
        return x
    names = letters(x.rank)
    pattern = f"{' '.join(names)} -> {' '.join(names[d] for d in order)}"
    shape = tuple(x.shape[d] for d in order)
    return b.emit("permute", [x], shape, pattern, {"dims": order}, short="permute")


def expand(b: Builder, x: Value, shape: Sequence[int]) -> Value:
    """``x`` broadcast to ``shape`` (-1: as it is)."""
    lead = len(shape) - x.rank
    target = tuple(x.shape[i - lead] if s == -1 else s for i, s in enumerate(shape))
    if target == x.shape:
        return x
    names = letters(len(target))
    read = ["1" if x.shape[i - lead] != target[i] else names[i] for i in range(lead, len(target))]
    pattern = f"{' '.join(read)} -> {' '.join(names)}"
    return b.emit("expand", [x], target, pattern, {"shape": list(target)}, short="expand")


def cut(b: Builder, x: Value, dim: int, start: int, length: int, step: int = 1) -> Value:
    """Elements start, start + step, ... (``length`` of them) along ``dim``."""
    dim %= x.rank
    if (start, length, step) == (0, x.shape[dim], 1):
        return x
    if not length:
        return empty((*x.shape[:dim], 0, *x.shape[dim + 1 :]), x.dtype)
    names = letters(x.rank)
    read = list(names)
    read[dim] = f"({step}*{names[dim]}+{start})"
    shape = tuple(length if i == dim else s for i, s in enumerate(x.shape))
    pattern = f"{' '.join(read)} -> {' '.join(names)}"
    attributes = {"dim": dim, "start": start, "step": step}
    return b.emit("slice", [x], shape, pattern, attributes, short="slice")


def pick(b: Builder, x: Value, dim: int, index: int) -> Value:
    """Element ``index`` along ``dim``, which goes away."""
    dim, index = dim % x.rank, index % x.shape[dim]
    names = letters(x.rank)
    read = [f"({index})" if i == dim else name for i, name in enumerate(names)]
    kept = [name for i, name in enumerate(names) if i != dim]
    shape = tuple(s for i, s in enumerate(x.shape) if i != dim)
    pattern = f"{' '.join(read)} -> {' '.join(kept)}"
    return b.emit("slice", [x], shape, pattern, {"dim": dim, "index": index}, short="select")


@rewrite("view.default", "_unsafe_view", "view_copy", "unsqueeze", "unsqueeze_copy", "squeeze", "squeeze_copy")
def _view(b: Builder, x: Value, **_: Any) -> Value:
    return view(b, x, b.shape)


@rewrite("permute")
def _permute(b: Builder, x: Value, dims: Sequence[int]) -> Value:
    return permute(b, x, dims)


@rewrite("transpose")
def _transpose(b: Builder, x: Value, dim0: int, dim1: int) -> Value:
    order = list(range(x.rank))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return permute(b, x, order)


@rewrite("t")
def _matrix_transpose(b: Builder, x: Value) -> Value:
    return permute(b, x, tuple(range(x.rank))[::-1])


@rewrite("expand")
def _expand(b: Builder, x: Value, **_: Any) -> Value:
    return expand(b, x, b.shape)


@rewrite("copy")
def _copy(b: Builder, x: Value, src: Value, **_: Any) -> Value:
    """Assignment: the source, broadcast to what it is assigned to and in its dtype."""
    return expand(b, cast(b, src, x.dtype), x.shape)


@rewrite("broadcast_tensors")
def _broadcast_tensors(b: Builder, tensors: Sequence[Value]) -> tuple[Value, ...]:
    return tuple(expand(b, x, shape) for x, (shape, _) in zip(tensors, b.results, strict=True))


@rewrite("slice.Tensor")
def _slice(
    b: Builder, x: Value, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Value:
    indices = range(x.shape[dim])[slice(start, end, step)]
    return cut(b, x, dim, indices.start, len(indices), step)


@rewrite("select.int")
def _select(b: Builder, x: Value, dim: int, index: int) -> Value:
    return pick(b, x, dim, index)


@rewrite("unbind")
def _unbind(b: Builder, x: Value, dim: int = 0) -> tuple[Value, ...]:
    return tuple(pick(b, x, dim, i) for i in range(x.shape[dim]))


@rewrite("split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes")
def _split(b: Builder, x: Value, dim: int = 0, **_: Any) -> tuple[Value, ...]:
    parts, start = [], 0
    for shape, _dtype in b.results:
        parts.append(cut(b, x, dim, start, shape[dim]))
        start += shape[dim]
    return tuple(parts)


@rewrite("alias", "alias_copy", "clone", "lift_fresh_copy")
def _same(b: Builder, x: Value, **_: Any) -> Value:
    return x


@rewrite("detach")
def _detach(b: Builder, x: Value) -> Value:
    return b.emit("detach", [x], x.shape, short="detach") if x.grad else x
