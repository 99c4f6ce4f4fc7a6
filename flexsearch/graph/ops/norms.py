"""Norms and what is made of them: roots of sums of powers, which are partial sums, so that no dimension is whole."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from flexsearch.graph.model import Operator
from flexsearch.graph.ops.base import (
    INPUTS,
    KINDS,
    OUTPUTS,
    Attributes,
    Extents,
    Kernel,
    KernelContext,
    OperatorKind,
    Sample,
    Shapes,
    define,
    output_elements,
    points,
    rand,
    rewrite,
)
from flexsearch.graph.ops.builder import Builder, broadcast_shapes, fit, letters, normal_dims
from flexsearch.graph.ops.calls import dtype_name
from flexsearch.graph.ops.lazy import torch
from flexsearch.graph.ops.linear import contract
from flexsearch.graph.ops.pointwise import cast, pointwise
from flexsearch.graph.ops.reduce import (
    NARROW,
    Reduced,
    Reduction,
    count,
    kept_shape,
    nonzero,
    reduce,
    reduce_pattern,
    reduced,
    result_dtype,
)
from flexsearch.graph.ops.shape import expand, view
from flexsearch.graph.ops.value import Value
from flexsearch.graph.piece import Piece

if TYPE_CHECKING:
    from torch import Tensor

Order = Annotated[float, Field(ge=1.0, le=1e3)]


class PowerSum(Reduction):
    """Sum of ``abs(x) ** ord``."""

    name = "power_sum"
    additive = True
    saved = INPUTS
    backward = 2.0

    class attributes(Reduced):
        ord: Order

    def flops(self, op: Operator, extents: Extents) -> Any:
        return 2.0 * points(extents)

    def kernel(self, op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
        """By the norm, whose gradient is 0 where all elements are."""
        dims, keep = reduced(op, len(shapes[0]))
        order, dtype = float(str(op.attributes["ord"])), result_dtype(op)
        if not dims:  # a number
            return lambda x: (x if dtype is None else x.to(dtype)).abs() ** order

        def run(x: Tensor) -> Tensor:
            norm = torch.linalg.vector_norm(x, order, dims, keep, dtype=dtype)
            powers: Tensor = norm if order == 1 else norm**order
            return powers

        return run

    def samples(self) -> Iterable[Sample]:
        x = rand(4, 6, 3)
        x[:, 2] = 0
        norm: Any = torch.linalg.vector_norm
        yield Sample(lambda x: (norm(x, dim=2), x.norm(), x.norm(p=1, dim=(0, 1), keepdim=True), norm(x, 3.0)), (x,))
        yield Sample(lambda x: (norm(x, inf, 1), norm(x, 0, 1), norm(x, -inf)), (rand(4, 6, 3),))
        yield Sample(lambda x: (torch.linalg.norm(x), *_matrix_norms(x)), (rand(4, 6, 3),))
        yield Sample(lambda x: (torch.renorm(x, 2, 1, 2.0), torch.nn.functional.normalize(x, dim=0)), (rand(4, 6, 3),))
        distance: Any = torch.nn.functional.pairwise_distance
        yield Sample(lambda x, y: (distance(x, y), distance(x, y, 1.0, keepdim=True), x.dist(y)), (rand(4, 6), rand(6)))
        cosine: Any = torch.cosine_similarity
        yield Sample(lambda x, y: (cosine(x[:, None], y[None], -1), cosine(x, y[:1], 0)), (rand(4, 6), rand(5, 6)))


def _matrix_norms(x: Tensor) -> Sequence[Tensor]:
    norm: Any = torch.linalg.matrix_norm
    return norm(x), norm(x, 1), norm(x, -inf, (0, 2), True), torch.linalg.norm(x, inf, (1, 0))


class Root(OperatorKind):
    """The root of a sum of powers, whose gradient is 0 where the sum is."""

    name = "root"
    pattern = "a.. -> a.."
    saved = OUTPUTS
    trivial = True

    class attributes(Attributes):
        ord: Order

    def check(self, op: Operator, attributes: Any, shapes: tuple[tuple[int, ...], ...]) -> str:
        return "" if shapes[0] == shapes[1] else f"roots of shape {list(shapes[0])} have no other shape"

    def flops(self, op: Operator, extents: Extents) -> Any:
        return 3.0 * output_elements(op, extents)

    def kernel(self, op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
        order = float(str(op.attributes["ord"]))

        def run(x: Tensor) -> Tensor:
            zero = x == 0
            positive = x.masked_fill(zero, 1)
            y = positive.sqrt() if order == 2 else positive ** (1 / order)
            return y.masked_fill(zero, 0)

        return run

    def samples(self) -> Iterable[Sample]:
        yield Sample(lambda x: (x.norm(dim=1), x.norm(p=3.0, dim=0), x.std(1)), (rand(4, 6).round(),))


for _kind in (PowerSum(), Root()):
    define(_kind)


def root(b: Builder, x: Value, order: float) -> Value:
    """The root of sums of powers."""
    return x if order == 1 else b.emit("root", [x], x.shape, attributes={"ord": order}, short="root")


def vector_norm(b: Builder, x: Value, order: float = 2.0, dim: Any = None, keepdim: bool = False) -> Value:
    """``(sum of abs(x) ** order) ** (1 / order)`` along ``dim``, a real number of the width of ``x``."""
    result = {"complex64": "float32", "complex128": "float64"}.get(x.dtype, x.dtype)
    if order == 0:
        return cast(b, count(b, nonzero(b, x), dim, keepdim), result)
    if abs(order) == inf:
        size = pointwise(b, "abs.default", (x,))
        return reduce(b, "amax" if order > 0 else "amin", size, dim, keepdim, result)
    wide = "float32" if result in NARROW else result
    dims = normal_dims(dim, x.rank)
    attributes: dict[str, Any] = {"ord": float(order), "dims": list(dims), "keepdim": keepdim}
    if wide != result:
        attributes["dtype"] = wide
    pattern = reduce_pattern(x, dims, keepdim)
    shape = kept_shape(x, dims, keepdim)
    powers = b.emit("power_sum", [x], shape, pattern, attributes, dtype=wide, short="powers")
    return cast(b, root(b, powers, float(order)), result)


@rewrite("linalg_vector_norm")
def _vector_norm(
    b: Builder, x: Value, ord: float = 2.0, dim: Any = None, keepdim: bool = False, dtype: torch.dtype | None = None
) -> Value:
    if ord < 1 and ord not in (0, -inf):  # no sum of powers that has a gradient everywhere
        whole: Value = KINDS["reduction"].trace(b, x=x, ord=ord, dim=dim, keepdim=keepdim, dtype=dtype)
        return whole
    return vector_norm(b, x if dtype is None else cast(b, x, dtype_name(dtype)), ord, dim, keepdim)


@rewrite("norm", "frobenius_norm")
def _norm(
    b: Builder, x: Value, p: float | None = None, dim: Any = None, keepdim: bool = False,
    dtype: torch.dtype | None = None,
) -> Value:  # fmt: skip
    return _vector_norm(b, x, 2.0 if p is None else p, dim, keepdim, dtype)


@rewrite("linalg_norm")
def _linalg_norm(
    b: Builder, x: Value, ord: float | str | None = None, dim: Any = None, keepdim: bool = False,
    dtype: torch.dtype | None = None,
) -> Value:  # fmt: skip
    dims = list(range(x.rank)) if dim is None else [dim] if isinstance(dim, int) else list(dim)
    if ord is None or len(dims) == 1:
        return _vector_norm(b, x, 2.0 if ord is None else float(ord), dims, keepdim, dtype)
    return _matrix_norm(b, x, ord, dims, keepdim, dtype)


@rewrite("linalg_matrix_norm")
def _matrix_norm(
    b: Builder, x: Value, ord: float | str = "fro", dim: Sequence[int] = (-2, -1), keepdim: bool = False,
    dtype: torch.dtype | None = None,
) -> Value:  # fmt: skip
    """The Frobenius norm, the largest (smallest) sum of a column or a row, or one of singular values."""
    x = x if dtype is None else cast(b, x, dtype_name(dtype))
    if ord == "fro":
        return vector_norm(b, x, 2.0, dim, keepdim)
    row, column = (d % x.rank for d in dim)
    if ord in (2, -2, "nuc"):
        whole: Value = KINDS["reduction"].trace(b, x=x, ord=ord, dim=dim, keepdim=keepdim, dtype=None)
        return whole
    added, kept = (row, column) if abs(float(ord)) == 1 else (column, row)
    sums = reduce(b, "sum", pointwise(b, "abs.default", (x,)), added, True)
    return view(b, reduce(b, "amax" if float(ord) > 0 else "amin", sums, kept, True), b.shape)


@rewrite("renorm")
def _renorm(b: Builder, x: Value, p: float, dim: int, maxnorm: float) -> Value:
    """Each part along ``dim`` scaled down to the norm ``maxnorm``, if its own is larger."""
    norm = vector_norm(b, x, p, [d for d in range(x.rank) if d != dim % x.rank], True)
    least = pointwise(b, "reciprocal.default", (pointwise(b, "add.Scalar", (norm, 1e-7)),))
    scale = pointwise(b, "mul.Scalar", (least, maxnorm))
    scale = pointwise(b, "where.ScalarOther", (pointwise(b, "gt.Scalar", (norm, maxnorm)), scale, 1))
    return pointwise(b, "mul.Tensor", (x, cast(b, scale, x.dtype)))


@rewrite("dist")
def _dist(b: Builder, x: Value, other: Value, p: float = 2.0) -> Value:
    return vector_norm(b, pointwise(b, "sub.Tensor", (x, other)), p)


@rewrite("pairwise_distance")
def pairwise_distance(
    b: Builder, x1: Value, x2: Value, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False
) -> Value:
    """Norms of the differences, to which ``eps`` is added, along the last dimension."""
    apart = pointwise(b, "add.Scalar", (pointwise(b, "sub.Tensor", (x1, x2)), eps))
    return vector_norm(b, apart, p, -1, keepdim)


@rewrite("cosine_similarity")
def _cosine_similarity(b: Builder, x1: Value, x2: Value, dim: int = 1, eps: float = 1e-8) -> Value:
    """Products over norms. Neither operand is broadcast: of all pairs of two sets, this is a product of matrices."""
    product = inner(b, x1, x2, dim)
    lengths = []
    for x in _long(b, (x1, x2), dim):
        norm = vector_norm(b, x, 2.0, dim % max(x1.rank, x2.rank) - max(x1.rank, x2.rank))
        lengths.append(pointwise(b, "clamp_min.default", (norm, eps)))
    return pointwise(b, "div.Tensor", (product, pointwise(b, "mul.Tensor", lengths)))


def inner(b: Builder, left: Value, right: Value, dim: int) -> Value:
    """Sum of products along ``dim`` of the shape that both operands broadcast to."""
    operands = _long(b, (left, right), dim)
    shape = broadcast_shapes(*(x.shape for x in operands))
    names, dim = letters(len(shape)), dim % len(shape)
    read = [" ".join(fit(names, shape, x.shape)) for x in operands]
    written = " ".join(n for i, n in enumerate(names) if i != dim)
    return contract(b, operands, f"{', '.join(read)} -> {written}", "inner")


def _long(b: Builder, operands: Sequence[Value], dim: int) -> list[Value]:
    """The operands in the dtype of the result, each as long along ``dim`` as the shape that all broadcast to."""
    shape = broadcast_shapes(*(x.shape for x in operands))
    after = len(shape) - dim % max(1, len(shape))
    result = []
    for x in operands:
        own = [1] * (after - x.rank) + list(x.shape)
        own[len(own) - after] = shape[len(shape) - after]
        result.append(expand(b, cast(b, x, b.dtype), own))
    return result


@rewrite("linalg_vecdot", "vdot")
def _vecdot(b: Builder, x: Value, y: Value | None = None, other: Value | None = None, dim: int = -1) -> Value:
    right = y if other is None else other
    assert right is not None
    return inner(b, pointwise(b, "conj_physical.default", (x,)) if x.dtype.startswith("complex") else x, right, dim)
