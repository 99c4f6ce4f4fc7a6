"""Reductions: along the reduced dimensions sums, means, and counts are partial sums of pieces; what is no
sum keeps these dimensions whole."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from flexsearch.graph.model import Dtype, Operator
from flexsearch.graph.ops.along import AlongCall, Form, is_whole
from flexsearch.graph.ops.attributes import Place
from flexsearch.graph.ops.base import (
    BOTH,
    NOTHING,
    OUTPUTS,
    Attributes,
    Extents,
    Kernel,
    KernelContext,
    OperatorKind,
    Sample,
    Shapes,
    define,
    points,
    rand,
    rewrite,
)
from flexsearch.graph.ops.builder import Builder, letters, normal_dims
from flexsearch.graph.ops.calls import dtype_of
from flexsearch.graph.ops.lazy import torch
from flexsearch.graph.ops.local import extent, summed_count
from flexsearch.graph.ops.pointwise import cast, cast_to, pointwise
from flexsearch.graph.ops.shape import view
from flexsearch.graph.ops.value import Value
from flexsearch.graph.piece import Piece

if TYPE_CHECKING:
    pass

NARROW = ("float16", "bfloat16")
"""Too few digits to add up squares in; that is done in float32."""


class Reduced(Attributes):
    """``dims`` are all where they are null or an empty list, as in torch."""

    dims: Place | list[Place] | None = None
    keepdim: bool = False
    dtype: Dtype | None = None


class Reduction(OperatorKind):
    """One number for all elements along ``dims``."""

    attributes: type[Attributes] = Reduced
    additive = False
    """Whether pieces of the reduced dimensions give partial sums."""

    def check(self, op: Operator, attributes: Any, shapes: tuple[tuple[int, ...], ...]) -> str:
        dims = [attributes.dims] if isinstance(attributes.dims, int) else attributes.dims or range(len(shapes[0]))
        rank = len(shapes[0])
        if any(not -rank <= d < rank for d in dims):
            return f"attributes.dims: {list(dims)} are not dimensions of shape {list(shapes[0])}"
        gone = {d % rank for d in dims}
        kept = tuple(1 if d in gone else s for d, s in enumerate(shapes[0]) if attributes.keepdim or d not in gone)
        if shapes[-1] != kept:
            return f"the result of {op.kind} must have shape {list(kept)}"
        if self.additive or all(is_whole(op.access.inputs[0].dimensions[d]) for d in gone):
            return ""
        return f'pattern "{op.pattern}" must keep dimensions {sorted(gone)} whole'

    def flops(self, op: Operator, extents: Extents) -> Any:
        return points(extents)


class Sum(Reduction):
    """The sum of a piece is a part of the sum."""

    name = "sum"
    additive = True
    saved = NOTHING
    backward_reads = "gradients"

    def kernel(self, op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
        dims, keep = reduced(op, len(shapes[0]))
        dtype = result_dtype(op)
        return lambda x: torch.sum(x, dims, keep, dtype=dtype) if dims else x.clone()

    def samples(self) -> Iterable[Sample]:
        yield Sample(lambda x: x.sum(1), (rand(4, 6, 3),))
        yield Sample(lambda x: (x.sum((0, -1), keepdim=True), x.sum(), x.sum_to_size(6, 1)), (rand(4, 6, 3),))
        yield Sample(lambda x: ((x > 0).sum(1), x.nansum(2), x.nanmean(), x.count_nonzero(0)), (rand(4, 6, 3),))


class Mean(Reduction):
    """The local mean times the piece's share, which cannot overflow in half precision."""

    name = "mean"
    additive = True
    saved = NOTHING
    backward_reads = "gradients"

    def kernel(self, op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
        dims, keep = reduced(op, len(shapes[0]))
        dtype, box = result_dtype(op), piece.inputs[0]
        assert box is not None
        share = prod(extent(box)[d] for d in dims) / summed_count(op)
        if share == 1:
            return lambda x: torch.mean(x, dims, keep, dtype=dtype)
        return lambda x: torch.mean(x, dims, keep, dtype=dtype) * share

    def samples(self) -> Iterable[Sample]:
        yield Sample(lambda x: (x.mean(1), x.mean((0, 2), keepdim=True), x.mean()), (rand(4, 6, 3),))


class Largest(Reduction):
    """Ties share the gradient."""

    name = "amax"
    saved = BOTH

    def kernel(self, op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
        call: Any = torch.amax if self.name == "amax" else torch.amin
        dims, keep = reduced(op, len(shapes[0]))
        return lambda x: call(x, dims, keep)

    def samples(self) -> Iterable[Sample]:
        call: Any = torch.amax if self.name == "amax" else torch.amin
        yield Sample(lambda x: (call(x, (0, 2)), call(x, 1, True), x.max(), x.min()), (rand(4, 6, 3).round(),))
        yield Sample(lambda x: (*x.aminmax(), *torch.aminmax(x, dim=1, keepdim=True)), (rand(4, 6, 3).round(),))


class Smallest(Largest):
    name = "amin"


class PositionOfLargest(Reduction):
    """Index of the largest element along one dimension; the first of all, where several are largest."""

    name = "argmax"
    saved = NOTHING

    def check(self, op: Operator, attributes: Any, shapes: tuple[tuple[int, ...], ...]) -> str:
        several = isinstance(attributes.dims, list) and len(attributes.dims) > 1
        return "attributes.dims: must be one" if several else super().check(op, attributes, shapes)

    def kernel(self, op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
        call: Any = torch.argmax if self.name == "argmax" else torch.argmin
        dims, keep = reduced(op, len(shapes[0]))
        dim = dims[0] if op.attributes.get("dims") not in (None, []) else None
        return lambda x: call(x, dim, keep)

    def samples(self) -> Iterable[Sample]:
        call: Any = torch.argmax if self.name == "argmax" else torch.argmin
        yield Sample(lambda x: (call(x, 1), call(x, 0, True), x * call(x)), (rand(4, 6, 3),))


class PositionOfSmallest(PositionOfLargest):
    """Index of the smallest element along one dimension."""

    name = "argmin"


class ReductionCall(AlongCall):
    """Reductions that are no sums: their dimensions are whole."""

    name = "reduction"
    inputs = (1, 2)
    forms = {
        **dict.fromkeys(("aten.prod.default", "aten.median.default", "aten.nanmedian.default"), Form(None)),
        "aten.prod.dim_int": Form(1),
        **dict.fromkeys(("aten.logsumexp.default", "aten.special_logsumexp.default"), Form(1)),
        **dict.fromkeys(
            ("aten.max.dim", "aten.min.dim", "aten.median.dim", "aten.nanmedian.dim", "aten.mode.default"),
            Form(1, 2, OUTPUTS),
        ),
        "aten.kthvalue.default": Form(2, 2, OUTPUTS),
        **dict.fromkeys(("aten.quantile.scalar", "aten.nanquantile.scalar"), Form(2)),
        "aten.linalg_vector_norm": Form(2),
        **dict.fromkeys(("aten.linalg_matrix_norm", "aten.linalg_norm"), Form(2)),
        "aten.nuclear_norm.dim": Form(1),
    }
    targets = tuple(name for name in forms if "norm" not in name)  # norms that are roots of sums are another kind

    def samples(self) -> Iterable[Sample]:
        x = rand(4, 6, 3)
        yield Sample(lambda x: (x.prod(1), x.prod(), x.logsumexp((0, 2)), x.logsumexp(1, keepdim=True)), (x,))
        yield Sample(lambda x: (*x.max(1), *x.min(0, keepdim=True), *x.median(2), x.median()), (x,))
        yield Sample(lambda x: (*x.kthvalue(2, 1), *x.mode(0), x.quantile(0.3, 1), x.nanquantile(0.5)), (x,))
        yield Sample(lambda x: (torch.linalg.matrix_norm(x, 2), torch.linalg.matrix_norm(x, "nuc", (0, 1))), (x,))
        yield Sample(lambda x: (x.norm(0.5, dim=1), torch.linalg.vector_norm(x, -1.0)), (x,))


for _kind in (
    Sum(), Mean(), Largest(), Smallest(), PositionOfLargest(), PositionOfSmallest(), ReductionCall()
):  # fmt: skip
    define(_kind)


def reduced(op: Operator, rank: int) -> tuple[list[int], bool]:
    """Reduced dimensions (all if the attribute is null or empty, as in aten) and whether they stay as size 1."""
    dims: Any = op.attributes.get("dims")
    dims = [dims] if isinstance(dims, int) else dims
    return [d % rank for d in dims] if dims else list(range(rank)), bool(op.attributes.get("keepdim", False))


def result_dtype(op: Operator) -> torch.dtype | None:
    """The dtype in the attributes."""
    name = op.attributes.get("dtype")
    return None if name is None else dtype_of(str(name))


def kept_shape(x: Value, dims: Sequence[int], keepdim: bool) -> tuple[int, ...]:
    """Shape of ``x`` reduced along ``dims``."""
    return tuple(1 if i in dims else s for i, s in enumerate(x.shape) if keepdim or i not in dims)


def reduce_pattern(x: Value, dims: Sequence[int], keepdim: bool, whole: bool = False) -> str:
    """Pattern of a reduction of ``x`` along ``dims``, which are partial sums, or ``whole``."""
    names = letters(x.rank)
    read = [n.upper() if whole and i in dims else n for i, n in enumerate(names)]
    kept = [("1" if keepdim else "") if i in dims else n for i, n in enumerate(names)]
    return f"{' '.join(read)} -> {' '.join(k for k in kept if k)}"


def reduce(b: Builder, kind: str, x: Value, dim: Any = None, keepdim: bool = False, dtype: str | None = None) -> Value:
    """Append a reduction of ``x``; ``dtype`` of the result: that of what torch returns at this place."""
    dims = normal_dims(dim, x.rank)
    whole = kind not in ("sum", "mean")
    attributes = {"dims": list(dims), "keepdim": keepdim}
    pattern = reduce_pattern(x, dims, keepdim, whole)
    return b.emit(kind, [x], kept_shape(x, dims, keepdim), pattern, attributes, dtype=dtype or b.dtype, short=kind)


@rewrite("sum", "mean")
def _sum(b: Builder, x: Value, dim: Any = None, keepdim: bool = False, dtype: torch.dtype | None = None) -> Value:
    return reduce(b, b.target.split(".")[1], cast_to(b, x, dtype), dim, keepdim)


@rewrite("sum_to_size")
def _sum_to_size(b: Builder, x: Value, size: Sequence[int]) -> Value:
    lead = x.rank - len(size)
    dims = [i for i, s in enumerate(x.shape) if i < lead or (size[i - lead] == 1 and s > 1)]
    return view(b, reduce(b, "sum", x, dims) if dims else x, b.shape)


def count(b: Builder, chosen: Value, dim: Any = None, keepdim: bool = False) -> Value:
    """How many elements of a bool tensor are true."""
    return reduce(b, "sum", chosen, dim, keepdim, "int64")


def nonzero(b: Builder, x: Value) -> Value:
    """Which elements are not zero."""
    return x if x.dtype == "bool" else pointwise(b, "ne.Scalar", (x, 0))


@rewrite("any")
def _any(b: Builder, x: Value, dim: Any = None, keepdim: bool = False) -> Value:
    """A count, whose parts add up: more than none."""
    return cast(b, pointwise(b, "gt.Scalar", (count(b, nonzero(b, x), dim, keepdim), 0)), b.dtype)


@rewrite("all")
def _all(b: Builder, x: Value, dim: Any = None, keepdim: bool = False) -> Value:
    """A count of zeros, whose parts add up: none."""
    zero = pointwise(b, "logical_not.default", (x,))
    return cast(b, pointwise(b, "eq.Scalar", (count(b, zero, dim, keepdim), 0)), b.dtype)


@rewrite("count_nonzero")
def _count_nonzero(b: Builder, x: Value, dim: Any = None) -> Value:
    return count(b, nonzero(b, x), dim)


@rewrite("nansum")
def _nansum(b: Builder, x: Value, dim: Any = None, keepdim: bool = False, dtype: torch.dtype | None = None) -> Value:
    return reduce(b, "sum", cast_to(b, _without_nan(b, x), dtype), dim, keepdim)


def _without_nan(b: Builder, x: Value) -> Value:
    return pointwise(b, "masked_fill.Scalar", (x, pointwise(b, "isnan.default", (x,)), 0))


@rewrite("nanmean")
def _nanmean(b: Builder, x: Value, dim: Any = None, keepdim: bool = False, dtype: torch.dtype | None = None) -> Value:
    total = reduce(b, "sum", cast_to(b, _without_nan(b, x), dtype), dim, keepdim)
    numbers = pointwise(b, "eq.Tensor", (x, x))  # nan is the number that is not itself
    return pointwise(b, "div.Tensor", (total, count(b, numbers, dim, keepdim)))


@rewrite("amax", "amin")
def _amax(b: Builder, x: Value, dim: Any = None, keepdim: bool = False) -> Value:
    return reduce(b, b.target.split(".")[1], x, dim, keepdim)


@rewrite("max.default", "min.default")
def _max(b: Builder, x: Value) -> Value:
    return reduce(b, f"a{b.target.split('.')[1]}", x)  # same gradient: shared by ties


@rewrite("aminmax")
def _aminmax(b: Builder, x: Value, dim: int | None = None, keepdim: bool = False) -> tuple[Value, ...]:
    return tuple(reduce(b, kind, x, dim, keepdim) for kind in ("amin", "amax"))


@rewrite("argmax", "argmin")
def _argmax(b: Builder, x: Value, dim: int | None = None, keepdim: bool = False) -> Value:
    kind = b.target.split(".")[1]
    if dim is None:  # the index in the flattened tensor
        return view(b, reduce(b, kind, view(b, x, [-1]), 0), b.shape)
    return reduce(b, kind, x, dim, keepdim)
