"""Assignments of all forms, written with scatter, index_put, where and cat."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from flexsearch.graph.model import Operator
from flexsearch.graph.ops.base import (
    NOTHING,
    Kernel,
    KernelContext,
    OperatorKind,
    Sample,
    Shapes,
    define,
    rand,
    rewrite,
)
from flexsearch.graph.ops.builder import Builder, broadcast_shapes
from flexsearch.graph.ops.form import check_form
from flexsearch.graph.ops.index import (
    by_dimension,
    constant,
    diagonal_places,
    index_range,
    integer_range,
    leading,
    look_up,
    negative,
)
from flexsearch.graph.ops.join import cat
from flexsearch.graph.ops.lazy import torch
from flexsearch.graph.ops.pointwise import cast, pointwise
from flexsearch.graph.ops.scatter import put_pattern, scatter_pattern
from flexsearch.graph.ops.shape import cut, expand, permute, view
from flexsearch.graph.ops.value import Value
from flexsearch.graph.piece import Piece

if TYPE_CHECKING:
    pass


class MaskPositions(OperatorKind):
    """For each element of a mask, how many true ones lie before it, row-major: which source it would be assigned."""

    name = "mask_positions"
    pattern = "A.. -> A.."
    saved = NOTHING
    bookkeeping = True

    def check(self, op: Operator, attributes: Any, shapes: tuple[tuple[int, ...], ...]) -> str:
        return check_form(op, "A.. -> A..", shapes)

    def kernel(self, op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
        return lambda mask: (mask.flatten().cumsum(0) - 1).clamp(min=0).view(mask.shape)

    def samples(self) -> Iterable[Sample]:
        mask = torch.tensor([[True, False, True], [False, True, False]])
        yield Sample(lambda x, m, s: x.masked_scatter(m, s), (rand(2, 3), mask, rand(5)))
        yield Sample(lambda x, m, s: x.index_put((m,), s), (rand(2, 3, 4), mask, rand(3, 4)))


define(MaskPositions())


def scatter(
    b: Builder, x: Value, dim: int, index: Value, source: Value, reduce: str = "none", include_self: bool = True
) -> Value:
    """``x`` with the elements of ``source`` (a scalar, or at least as large as ``index``) where ``index`` says along
    ``dim``. Of an ``x`` that is larger in other dimensions, the rest remains as it is."""
    if not x.rank:
        one = [view(b, y, [1]) for y in (x, index)]
        return view(b, scatter(b, one[0], 0, one[1], source, reduce, include_self), [])
    dim %= x.rank
    for d in range(source.rank):
        source = cut(b, source, d, 0, index.shape[d])
    for d in range(x.rank):
        if d != dim and x.shape[d] > index.shape[d]:
            count = index.shape[d]
            inner = scatter(b, cut(b, x, d, 0, count), dim, index, source, reduce, include_self)
            return cat(b, [inner, cut(b, x, d, count, x.shape[d] - count)], d)
    added = reduce == "sum" and include_self
    pattern = scatter_pattern(x.rank, dim, bool(source.rank), added, x.dtype == "bool")
    attributes = {"dim": dim, "reduce": reduce, "include_self": include_self}
    return b.emit("scatter", [x, index, source], x.shape, pattern, attributes, dtype=x.dtype, short="scatter")


def put(b: Builder, x: Value, index_of: dict[int, Value], values: Value, accumulate: bool = False) -> Value:
    """``x`` with ``values`` where the indices, by dimension, say: in the place of what was there, or added to it."""
    shape, first = broadcast_shapes(*(index.shape for index in index_of.values())), leading(index_of)
    indices: list[Any] = [None] * x.rank
    operands: list[Value] = []
    ranges: set[int] = set()
    for dim in sorted(index_of):
        axis = _full_range(index_of[dim], shape, x.shape[dim])
        if axis is not None and axis not in ranges and len(ranges) + 1 < len(index_of):
            indices[dim] = {"axis": axis}
            ranges.add(axis)
        else:
            indices[dim] = {"operand": len(operands)}
            operands.append(index_of[dim])
    own = [index.shape for index in operands]
    pattern = put_pattern(indices, first, shape, own, values.shape, x.shape, accumulate, x.dtype == "bool")
    attributes = {"indices": indices, "rank": len(shape), "first": first, "negative": any(map(negative, operands))}
    attributes |= {"accumulate": accumulate}
    return b.emit("index_put", [x, *operands, values], x.shape, pattern, attributes, dtype=x.dtype, short="index_put")


def _full_range(index: Value, shape: Sequence[int], size: int) -> int | None:
    """The dimension of the indices along which ``index`` runs through all of a dimension of ``size``, if it does."""
    progression = index_range(index, tuple(shape), size)
    return progression[0] if progression is not None and progression[1] == range(size) else None


def masked_put(b: Builder, x: Value, dim: int, mask: Value, values: Value, accumulate: bool = False) -> Value:
    """``x`` with ``values`` where ``mask``, of the dimensions from ``dim``, is true. Values may have a dimension for
    the true elements, in their order."""
    behind = x.rank - dim - mask.rank
    if values.rank > behind:
        count = values.rank - behind - 1
        if values.shape[count] > 1:
            positions = b.emit("mask_positions", [mask], mask.shape, dtype="int64", short="mask_positions")
            values = look_up(b, values, {count: positions})
        else:
            before, after = values.shape[:count], values.shape[count + 1 :]
            values = view(b, values, (*before, *[1] * mask.rank, *after))
    mask = view(b, mask, (*mask.shape, *[1] * behind))
    if accumulate:
        values = pointwise(b, "add.Tensor", (x, values))
    return pointwise(b, "where.self", (mask, values, x))


@rewrite("index_put", "_unsafe_index_put")
def _index_put(b: Builder, x: Value, indices: Sequence[Value | None], values: Value, accumulate: bool = False) -> Value:
    present = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if len(present) == 1 and present[0][1].dtype in ("bool", "uint8"):
        dim, mask = present[0]
        return masked_put(b, x, dim, cast(b, mask, "bool"), values, accumulate)
    return put(b, x, by_dimension(b, indices), values, accumulate)


@rewrite("masked_scatter")
def _masked_scatter(b: Builder, x: Value, mask: Value, source: Value) -> Value:
    mask = expand(b, mask, b.shape)
    return masked_put(b, expand(b, x, b.shape), 0, mask, view(b, source, [-1]))


@rewrite("put")
def _put(b: Builder, x: Value, index: Value, source: Value, accumulate: bool = False) -> Value:
    return view(b, put(b, view(b, x, [-1]), {0: index}, view(b, source, index.shape), accumulate), x.shape)


@rewrite("index_add")
def _index_add(b: Builder, x: Value, dim: int, index: Value, source: Value, alpha: float = 1) -> Value:
    source = source if alpha == 1 else pointwise(b, "mul.Tensor", (source, alpha))
    return put(b, x, {dim % x.rank: view(b, index, [-1])}, source, accumulate=True)


@rewrite("index_copy")
def _index_copy(b: Builder, x: Value, dim: int, index: Value, source: Value) -> Value:
    return put(b, x, {dim % x.rank: view(b, index, [-1])}, source)


@rewrite("index_fill")
def _index_fill(b: Builder, x: Value, dim: int, index: Value, value: float | Value) -> Value:
    return put(b, x, {dim % x.rank: view(b, index, [-1])}, _scalar(b, value, x.dtype))


@rewrite("index_reduce")
def _index_reduce(
    b: Builder, x: Value, dim: int, index: Value, source: Value, reduce: str, include_self: bool = True
) -> Value:
    dim %= x.rank
    index = view(b, index, [-1 if d == dim else 1 for d in range(x.rank)])
    return scatter(b, x, dim, expand(b, index, source.shape), source, reduce, include_self)


def _scalar(b: Builder, value: float | Value, dtype: str) -> Value:
    if isinstance(value, Value):
        return cast(b, value, dtype)
    return constant(torch.tensor(value, dtype=getattr(torch, dtype)))


_OLD_NAMES = {"add": "sum", "multiply": "prod"}


@rewrite("scatter")
def _scatter(
    b: Builder, x: Value, dim: int, index: Value, src: Value | None = None, value: float = 0, reduce: str = "none"
) -> Value:
    source = _scalar(b, value, x.dtype) if src is None else src
    return scatter(b, x, dim, index, source, _OLD_NAMES.get(reduce, reduce))


@rewrite("scatter_add")
def _scatter_add(b: Builder, x: Value, dim: int, index: Value, src: Value) -> Value:
    return scatter(b, x, dim, index, src, "sum")


@rewrite("scatter_reduce")
def _scatter_reduce(
    b: Builder, x: Value, dim: int, index: Value, src: Value, reduce: str, include_self: bool = True
) -> Value:
    return scatter(b, x, dim, index, src, reduce, include_self)


@rewrite("select_scatter")
def _select_scatter(b: Builder, x: Value, src: Value, dim: int, index: int) -> Value:
    dim %= x.rank
    return assign(b, x, view(b, src, (*src.shape[:dim], 1, *src.shape[dim:])), dim, range(x.shape[dim])[index:][:1])


@rewrite("slice_scatter")
def _slice_scatter(
    b: Builder, x: Value, src: Value, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Value:
    dim %= x.rank
    return assign(b, x, src, dim, range(x.shape[dim])[slice(start, end, step)])


def assign(b: Builder, x: Value, source: Value, dim: int, chosen: range) -> Value:
    """``x`` with the elements ``chosen`` along ``dim`` replaced: what lies before and after is concatenated to them."""
    size, step = x.shape[dim], chosen.step
    if not chosen:
        return x
    if step == 1:
        parts = [cut(b, x, dim, 0, chosen.start), source, cut(b, x, dim, chosen.stop, size - chosen.stop)]
        return cat(b, parts, dim)
    if size % step or chosen != range(chosen.start % step, size, step):
        return put(b, x, {dim: integer_range(chosen.start, len(chosen), step)}, source)

    def periods(y: Value, length: int) -> Value:
        return view(b, y, (*y.shape[:dim], size // step, length, *y.shape[dim + 1 :]))

    inner = assign(b, periods(x, step), periods(source, 1), dim + 1, range(chosen.start, chosen.start + 1))
    return view(b, inner, x.shape)


@rewrite("diagonal_scatter")
def _diagonal_scatter(b: Builder, x: Value, src: Value, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Value:
    index_of = diagonal_places(x, offset, dim1 % x.rank, dim2 % x.rank)
    first, last = leading(index_of), src.rank - 1
    return put(b, x, index_of, permute(b, src, [*range(first), last, *range(first, last)]))


@rewrite("zero")
def _zero(b: Builder, x: Value) -> Value:
    return expand(b, _scalar(b, 0, x.dtype), x.shape)
