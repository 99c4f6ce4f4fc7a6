"""Tensors put together: concatenation, padding, repetition, assignment to a part, overlapping windows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, Literal

from flexsearch.graph.model import Dtype, Operator
from flexsearch.graph.ops.attributes import Along, Place, Positive, Scalar, Signed
from flexsearch.graph.ops.base import (
    MANY,
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
from flexsearch.graph.ops.calls import dtype_of
from flexsearch.graph.ops.lazy import F, torch
from flexsearch.graph.ops.local import cut as outside
from flexsearch.graph.ops.local import extent
from flexsearch.graph.ops.pointwise import cast
from flexsearch.graph.ops.shape import cut, expand, view
from flexsearch.graph.ops.value import Value
from flexsearch.graph.piece import Piece

if TYPE_CHECKING:
    from torch import Tensor


class _Joining(OperatorKind):
    """No arithmetic, but new memory."""

    traffic = "copy"
    saved = NOTHING
    windows = True
    backward_reads: Literal["nothing", "gradients", "inputs"] = "gradients"

    def flops(self, op: Operator, extents: Extents) -> Any:
        return 0.0


class Cat(_Joining):
    """Concatenation along ``dim``; a piece reads only the operands that it touches."""

    name = "cat"
    attributes = Along
    inputs = (1, MANY)
    trivial = True
    copies = True
    backward_reads = "nothing"

    def check(self, op: Operator, attributes: Any, shapes: tuple[tuple[int, ...], ...]) -> str:
        """The parts lie one after the other along ``dim`` and fill the result."""
        rank, end = len(shapes[-1]), 0
        if not -rank <= attributes.dim < rank:
            return f"attributes.dim: {attributes.dim} is no dimension of shape {list(shapes[-1])}"
        dim = attributes.dim % rank
        for shape, operand in zip(shapes[:-1], op.access.inputs, strict=True):
            if len(shape) != rank or any(
                s != t for i, (s, t) in enumerate(zip(shape, shapes[-1], strict=True)) if i != dim
            ):
                return f"parts of shapes {list(shapes[:-1])[:4]} do not make {list(shapes[-1])}"
            position = operand.dimensions[dim]
            if position.coefficients != (1,) or position.offset != -end:
                return f'"{position}" of pattern "{op.pattern}" must begin where the part before it ends, at {end}'
            end += shape[dim]
        size = shapes[-1][dim]
        return "" if end == size else f"the parts have {end} elements along dimension {dim}, not {size}"

    def kernel(self, op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
        dim = int(str(op.attributes["dim"]))

        def run(*operands: Tensor | None) -> Tensor:
            present = [x for x in operands if x is not None]
            return present[0] if len(present) == 1 else torch.cat(present, dim)

        return run

    def samples(self) -> Iterable[Sample]:
        yield Sample(lambda *parts: torch.cat(parts, 1), (rand(3, 2, 4), rand(3, 5, 4), rand(3, 1, 4)))


class Pad(_Joining):
    """Padding by a constant ``value`` (negative: cropping); a piece that lies in the padding reads nothing."""

    name = "pad"
    trivial = True

    class attributes(Attributes):
        pad: list[Signed] = []
        value: Scalar | Literal["inf", "-inf", "nan"] | None = None
        dtype: Dtype | None = None

    def check(self, op: Operator, attributes: Any, shapes: tuple[tuple[int, ...], ...]) -> str:
        same = len(shapes[0]) == len(shapes[1]) and all(len(d.axes) < 2 for d in op.access.inputs[0].dimensions)
        return "" if same else f"padding shape {list(shapes[0])} does not give {list(shapes[1])}"

    def kernel(self, op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
        value: Any = op.attributes.get("value") or 0
        value = float(value) if isinstance(value, str) else value
        box = piece.inputs[0]
        if box is None:
            return only_padding(op, piece, context, value)
        sides = [side for i in reversed(range(len(box))) for side in outside(op, piece, 0, i)]
        return (lambda x: F.pad(x, sides, value=value)) if any(sides) else (lambda x: x)

    def samples(self) -> Iterable[Sample]:
        yield Sample(lambda x: F.pad(x, (2, 1, -1, 3), value=0.5), (rand(3, 4, 5),))


class Unfold(OperatorKind):
    """Windows along a dimension, their elements as a new last one: a view of overlapping parts."""

    name = "unfold"
    windows = True
    free = True
    backward_reads = "gradients"

    class attributes(Attributes):
        dim: Place
        step: Positive

    def check(self, op: Operator, attributes: Any, shapes: tuple[tuple[int, ...], ...]) -> str:
        source, result = shapes
        rank, step = len(source), attributes.step
        if not -rank <= attributes.dim < rank or len(result) != rank + 1:
            return f"attributes.dim: {attributes.dim} is no dimension of shape {list(source)}"
        dim, size = attributes.dim % rank, result[-1]
        expected = (*source[:dim], (source[dim] - size) // step + 1, *source[dim + 1 :], size)
        reads = op.access.inputs[0].dimensions[dim]
        if result != expected or reads.coefficients != (step, 1) or reads.offset:
            return f"windows of shape {list(source)} with step {step} do not give {list(result)}"
        return ""

    def flops(self, op: Operator, extents: Extents) -> Any:
        return 0.0

    def kernel(self, op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
        """The region reaches from the first element of the piece's windows to the last: they are what it unfolds to."""
        dim, step = int(str(op.attributes["dim"])), int(str(op.attributes["step"]))
        size = extent(piece.outputs[0])[-1]
        return lambda x: x.unfold(dim, size, step)

    def samples(self) -> Iterable[Sample]:
        yield Sample(lambda x: x.unfold(1, 3, 2) * 1, (rand(2, 9, 4),))


for _kind in (Cat(), Pad(), Unfold()):
    define(_kind)


def only_padding(op: Operator, piece: Piece, context: KernelContext, value: float) -> Kernel:
    """Kernel of a piece that lies wholly outside its operand: ``value``, in the dtype of the attributes."""
    size, name = extent(piece.outputs[0]), op.attributes.get("dtype")

    def run(x: None) -> Tensor:
        dtype = context.dtype if name is None else dtype_of(str(name))
        return torch.full(size, value, dtype=dtype, device=context.device)

    return run


@rewrite("cat", "concat", "concatenate")
def cat(b: Builder, tensors: Sequence[Value], dim: int = 0) -> Value:
    """Concatenation; the axis can be split, and a piece then reads only the operands that it touches.

    Tensors without elements (the KV cache of a decoder's first call, also of shape (0,)) are left out.
    """
    tensors = [cast(b, x, b.dtype) for x in tensors if prod(x.shape)]
    if len(tensors) == 1:
        return tensors[0]
    dim, names = dim % tensors[0].rank, letters(tensors[0].rank)
    operands, offset = [], 0
    for x in tensors:
        operands.append(" ".join(f"({name}-{offset})" if i == dim else name for i, name in enumerate(names)))
        offset += x.shape[dim]
    shape = tuple(offset if i == dim else s for i, s in enumerate(tensors[0].shape))
    pattern = f"{', '.join(operands)} -> {' '.join(names)}"
    return b.emit("cat", tensors, shape, pattern, {"dim": dim}, dtype=b.dtype, short="cat")


@rewrite("stack")
def _stack(b: Builder, tensors: Sequence[Value], dim: int = 0) -> Value:
    dim %= tensors[0].rank + 1
    return cat(b, [view(b, x, (*x.shape[:dim], 1, *x.shape[dim:])) for x in tensors], dim)


@rewrite("constant_pad_nd")
def pad(b: Builder, x: Value, pad: Sequence[int], value: float | None = None) -> Value:
    """Padding by a constant (negative: cropping); a piece that lies in the padding reads nothing."""
    before = {x.rank - 1 - i // 2: pad[i] for i in range(0, len(pad), 2)}
    names = letters(x.rank)
    read = [f"({name}{-before[i]:+d})" if before.get(i) else name for i, name in enumerate(names)]
    after = {x.rank - 1 - i // 2: pad[i] for i in range(1, len(pad), 2)}
    shape = tuple(size + before.get(i, 0) + after.get(i, 0) for i, size in enumerate(x.shape))
    for i, (start, size) in enumerate(zip(x.shape, shape, strict=True)):
        if start != size and not before.get(i):
            read[i] = f"({names[i]})"
    pattern = f"{' '.join(read)} -> {' '.join(names)}"
    attributes = {"pad": list(pad), "value": float(value or 0.0), "dtype": x.dtype}
    return b.emit("pad", [x], shape, pattern, attributes, short="pad")


@rewrite("unfold")
def unfold(b: Builder, x: Value, dimension: int, size: int, step: int) -> Value:
    """Windows along a dimension, their elements as a new last one: a view of overlapping parts."""
    if not x.rank:
        return view(b, x, b.shape)
    dim, names = dimension % x.rank, letters(x.rank)
    read = " ".join(f"({step}*{name}+k0)" if i == dim else name for i, name in enumerate(names))
    attributes = {"dim": dim, "step": step}
    count = (x.shape[dim] - size) // step + 1
    shape = (*x.shape[:dim], count, *x.shape[dim + 1 :], size)
    pattern, sizes = f"{read} -> {' '.join(names)} k0", {names[dim]: count, "k0": size}
    return b.emit("unfold", [x], shape, pattern, attributes, sizes=sizes, short="unfold")


@rewrite("roll")
def _roll(b: Builder, x: Value, shifts: int | Sequence[int], dims: int | Sequence[int] = ()) -> Value:
    by = [shifts] if isinstance(shifts, int) else list(shifts)
    along = [dims] if isinstance(dims, int) else list(dims)
    x = x if along else view(b, x, [-1])
    for shift, dim in zip(by, along or [0], strict=True):
        size = x.shape[dim]
        if shift % size:
            start = size - shift % size
            x = cat(b, [cut(b, x, dim, start, size - start), cut(b, x, dim, 0, start)], dim)
    return view(b, x, b.shape)


@rewrite("repeat", "tile")
def _repeat(b: Builder, x: Value, repeats: Sequence[int] = (), dims: Sequence[int] = ()) -> Value:
    counts = list(repeats or dims)
    counts = [1] * (x.rank - len(counts)) + counts
    shape = (1,) * (len(counts) - x.rank) + x.shape
    apart = view(b, x, [n for s in shape for n in (1, s)])
    return view(b, expand(b, apart, [n for pair in zip(counts, shape, strict=True) for n in pair]), b.shape)


@rewrite("repeat_interleave.self_int")
def _repeat_interleave(b: Builder, x: Value, repeats: int, dim: int | None = None, **_: Any) -> Value:
    flat, dim = (view(b, x, [-1]), 0) if dim is None else (x, dim % x.rank)
    head, tail = flat.shape[: dim + 1], flat.shape[dim + 1 :]
    return view(b, expand(b, view(b, flat, (*head, 1, *tail)), (*head, repeats, *tail)), b.shape)
