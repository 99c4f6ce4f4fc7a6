"""Elements looked up by tensors of indices: indexing, gather."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import ConfigDict, Field

from flexsearch.graph.model import Operator
from flexsearch.graph.ops.attributes import Along, Natural
from flexsearch.graph.ops.base import (
    Attributes,
    Kernel,
    KernelContext,
    OperatorKind,
    Sample,
    Shapes,
    define,
    integers,
    rand,
    rewrite,
)
from flexsearch.graph.ops.builder import Builder, broadcast_shapes, fit, letters
from flexsearch.graph.ops.form import check_form
from flexsearch.graph.ops.lazy import torch
from flexsearch.graph.ops.local import extent
from flexsearch.graph.ops.shape import cut, expand, permute, view
from flexsearch.graph.ops.value import Shape, Value
from flexsearch.graph.piece import Piece

if TYPE_CHECKING:
    from torch import Tensor


class Entry(Attributes):
    """How one dimension is looked up: by an operand, or by a range along an axis of the indices (None: one element)."""

    model_config = ConfigDict(extra="forbid", strict=True)
    operand: Natural | None = None
    axis: Natural | None = None


class Lookup(Attributes):
    """``indices``: an entry for each dimension, None for one that is kept. ``rank``: of what the indices broadcast to,
    whose dimensions are ``first`` and those after it of the result. ``negative``: whether they may count from the end.
    """

    indices: list[Entry | None]
    rank: Annotated[int, Field(ge=0, lt=64)]
    first: Annotated[int, Field(ge=0, lt=64)]
    negative: bool


class Index(OperatorKind):
    """``x[i, :, j]``: dimensions by operands, which are whole, or by a range along an axis of the indices."""

    name = "index"
    attributes = Lookup
    inputs = (1, 65)
    table = 0

    def check(self, op: Operator, attributes: Any, shapes: tuple[tuple[int, ...], ...]) -> str:
        first, rank = attributes.first, attributes.rank
        if contradiction := check_places(attributes, shapes[0], shapes[1:-1], shapes[-1]):
            return contradiction
        pattern = _pattern(op.attributes["indices"], first, shapes[-1][first : first + rank], shapes[1:-1])
        return check_form(op, pattern, shapes)

    def kernel(self, op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
        """Ranges run through the piece's own part of an axis of the indices."""
        entries: Any = op.attributes["indices"]
        shape, first = extent(piece.outputs[0]), int(str(op.attributes["first"]))
        places = shape[first : first + int(str(op.attributes["rank"]))]
        looked_up = [dim for dim, entry in enumerate(entries) if entry is not None]
        ranges = local_ranges(entries, places, context)
        if len(looked_up) == 1 and not ranges:
            return _rows(looked_up[0], shapes[0][looked_up[0]], shape, bool(op.attributes["negative"]))

        def run(x: Tensor, *operands: Tensor) -> Tensor:
            return x[
                tuple(
                    slice(None) if entry is None else ranges[dim] if dim in ranges else operands[entry["operand"]]
                    for dim, entry in enumerate(entries)
                )
            ]

        return run

    def samples(self) -> Iterable[Sample]:
        yield Sample(lambda x, i: x[:, i], (rand(3, 5, 2), integers(5, 2, 3)))
        yield Sample(lambda x, i: x[i, :, i.flip(0)], (rand(4, 3, 5), integers(4, 6) - 3))
        yield Sample(lambda x, i: x[torch.arange(4), i], (rand(4, 5, 2), integers(5, 4)))
        yield Sample(lambda x, i: x.take(i), (rand(4, 5), integers(20, 3, 2)))


def _rows(dim: int, size: int, shape: Sequence[int], negative: bool) -> Kernel:
    """Rows along one whole dimension of ``size``, by torch's index_select, which takes no indices from the end."""

    def run(x: Tensor, index: Tensor) -> Tensor:
        index = torch.where(index < 0, index + size, index) if negative else index
        return x.index_select(dim, index.reshape(-1)).reshape(shape)

    return run


class Gather(OperatorKind):
    """For each element, the one of ``x`` that its index names along ``dim``, which is whole."""

    name = "gather"
    attributes = Along
    inputs = (2, 2)
    table = 0

    def check(self, op: Operator, attributes: Any, shapes: tuple[tuple[int, ...], ...]) -> str:
        rank = len(shapes[0])
        if not -rank <= attributes.dim < rank:
            return f"attributes.dim: {attributes.dim} is no dimension of shape {list(shapes[0])}"
        return check_form(op, _gathering(rank, attributes.dim % rank), shapes)

    def kernel(self, op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
        dim = int(str(op.attributes["dim"]))
        return lambda x, index: x.gather(dim, index)

    def samples(self) -> Iterable[Sample]:
        yield Sample(lambda x, i: x.gather(1, i), (rand(4, 5, 3), integers(5, 3, 7, 3)))
        yield Sample(lambda x, i: torch.take_along_dim(x, i, 0), (rand(4, 5), integers(4, 3, 1)))


for _kind in (Index(), Gather()):
    define(_kind)


def _pattern(entries: Any, first: int, places: Shape, operands: Sequence[Shape]) -> str:
    """Of a lookup by ``entries`` (see :class:`Lookup`), one for each dimension: what is looked up is whole."""
    names, axes = letters(len(entries)), [f"i{n}" for n in range(len(places))]
    read = list(names)
    for dim, entry in enumerate(entries):
        if entry is not None and entry.get("operand") is not None:
            read[dim] = f"V{dim}"
        elif entry is not None:
            read[dim] = "1" if entry.get("axis") is None else axes[entry["axis"]]
    patterns = [" ".join(fit(axes, places, shape)) for shape in operands]
    looked_up = [dim for dim, entry in enumerate(entries) if entry is not None]
    written = between(names, looked_up, first, axes)
    return f"{', '.join([' '.join(read), *patterns])} -> {' '.join(written)}"


def _gathering(rank: int, dim: int) -> str:
    """Pattern of a gather along a dimension."""
    names = letters(rank)
    read = " ".join("V" if i == dim else n for i, n in enumerate(names))
    return f"{read}, {' '.join(names)} -> {' '.join(names)}"


def local_ranges(entries: Any, places: Sequence[int], context: KernelContext) -> dict[int, Tensor]:
    """For each dimension that a range looks up, the indices that broadcast to the local ``places``."""
    ranges: dict[int, Tensor] = {}
    for dim, entry in enumerate(entries):
        if entry is not None and entry.get("operand") is None:
            axis = entry.get("axis")
            shape = [size if k == axis else 1 for k, size in enumerate(places)]
            ranges[dim] = torch.arange(prod(shape), device=context.device).view(shape)
    return ranges


def check_places(attributes: Lookup, table: Shape, operands: Sequence[Shape], result: Shape) -> str:
    """What is wrong with a lookup in a tensor of shape ``table``: each dimension is kept, looked up by an operand, or
    is a dimension of the indices; ``result`` is the shape of what it gives."""
    entries, rank, first = attributes.indices, attributes.rank, attributes.first
    kept = [dim for dim, entry in enumerate(entries) if entry is None]
    looked_up = [dim for dim, entry in enumerate(entries) if entry is not None]
    axes = [entry.axis for entry in entries if entry is not None and entry.operand is None]
    named = sorted(entry.operand for entry in entries if entry is not None and entry.operand is not None)
    if any(axis is not None and axis >= rank for axis in axes):
        return f"attributes.indices name a dimension that {rank} dimensions of indices do not have"
    if len(entries) != len(table) or not looked_up or named != list(range(len(operands))):
        return f"attributes.indices do not fit {len(operands)} indices of a tensor of shape {list(table)}"
    # torch puts the dimensions of the indices in front if they are not next to each other
    adjacent = looked_up[-1] - looked_up[0] == len(looked_up) - 1
    if len(result) != len(kept) + rank or first != (looked_up[0] if adjacent else 0):
        return f"attributes.first and rank do not make a result of shape {list(result)}"
    places = result[first : first + rank]
    expected = (*(table[d] for d in kept[:first]), *places, *(table[d] for d in kept[first:]))
    if result != expected:
        return f"looking up in shape {list(table)} does not give {list(result)}"
    for shape in operands:
        lead = rank - len(shape)
        if lead < 0 or any(size not in (1, place) for size, place in zip(shape, places[lead:], strict=True)):
            return f"an index of shape {list(shape)} does not fit places of shape {list(places)}"
    return ""


def look_up(b: Builder, x: Value, index_of: Mapping[int, Value]) -> Value:
    """Elements of ``x`` by indices of its dimensions, which broadcast to each other.

    A dimension that is looked up is whole, but for one whose index is a range along one dimension of the indices (the
    batch in ``x[arange(batch), chosen]``, the outer product ``mask[batch[:, None], keys]``): it is a dimension of the
    result, and can be split.
    """
    shape = broadcast_shapes(*(index.shape for index in index_of.values()))
    first = leading(index_of)
    size = between(x.shape, index_of, first, shape)
    operands: list[Value] = []
    indices: list[Any] = [None] * x.rank
    for dim in sorted(index_of):
        index = index_of[dim]
        if (progression := index_range(index, shape, x.shape[dim])) is not None:
            axis, indexes = progression
            x = cut(b, x, dim, indexes.start, len(indexes), indexes.step)
            indices[dim] = {"axis": axis}
        else:
            indices[dim] = {"operand": len(operands)}
            operands.append(index)
    pattern = _pattern(indices, first, shape, [index.shape for index in operands])
    read, written = (side.split() for side in pattern.split("->")) if not operands else ([], [])
    if not operands and len(set(read)) == len(read):
        return _arranged(b, x, read, written, size)
    attributes = {"indices": indices, "rank": len(shape), "first": first, "negative": any(map(negative, operands))}
    return b.emit("index", [x, *operands], tuple(size), pattern, attributes, short="index")


def leading(index_of: Mapping[int, Value]) -> int:
    """The dimension of the result at which those of the indices begin: torch puts them in front if they are apart."""
    dims = sorted(index_of)
    return dims[0] if dims[-1] - dims[0] == len(dims) - 1 else 0


def between(kept: Sequence[Any], looked_up: Container[int], first: int, places: Sequence[Any]) -> list[Any]:
    """What is said of each dimension of ``x[...]``: ``kept`` of those that are not looked up, and ``places``."""
    rest = [d for d in range(len(kept)) if d not in looked_up]
    return [*(kept[d] for d in rest if d < first), *places, *(kept[d] for d in rest if d >= first)]


def index_range(index: Value, shape: Shape, size: int) -> tuple[int | None, range] | None:
    """(the only dimension of ``shape`` along which a constant index changes, the range that it runs through); None if
    it is another index. A single element changes along none."""
    if index.data is None or index.data.is_meta:
        return None
    along = [d + len(shape) - index.rank for d, n in enumerate(index.shape) if n > 1]
    values = [v + size if v < 0 else v for v in index.data.flatten().tolist()] if len(along) < 2 else []
    if not values:
        return None
    step = values[1] - values[0] if along else 1
    progression = range(values[0], values[-1] + 1, step) if step > 0 else range(0)
    return (along[0] if along else None, progression) if list(progression) == values else None


def negative(index: Value) -> bool:
    """Whether an index may count from the end; of what is computed, or on the meta device, that is not known."""
    return index.data is None or index.data.is_meta or bool(torch.any(index.data < 0))


def _arranged(b: Builder, x: Value, read: Sequence[str], written: Sequence[str], size: Sequence[int]) -> Value:
    """``x`` with dimensions ``read`` as ``written``: in another order, and repeated along what it lacks."""
    named = [d for d, name in enumerate(read) if name != "1"]
    x = view(b, x, [x.shape[d] for d in named])
    order = sorted(range(len(named)), key=lambda k: written.index(read[named[k]]))
    x = permute(b, x, order)
    present = {read[d] for d in named}
    x = view(b, x, [n if name in present else 1 for name, n in zip(written, size, strict=True)])
    return expand(b, x, size)


def by_dimension(b: Builder, indices: Sequence[Value | None]) -> dict[int, Value]:
    """The indices by the dimension that they look up; a constant mask is the places where it is true.

    Raises ImportModelError for a mask that is computed: how many elements it selects depends on values.
    """
    index_of: dict[int, Value] = {}
    dim = 0
    for index in indices:
        if index is None:
            dim += 1
        elif index.dtype in ("bool", "uint8"):
            for column in _true_places(b, index):
                index_of[dim] = column
                dim += 1
        elif index.dtype in ("int64", "int32"):
            index_of[dim] = index
            dim += 1
        else:
            raise b.error(f"has an index of dtype {index.dtype}", "Convert it to int64.")
    return index_of


def _true_places(b: Builder, mask: Value) -> list[Value]:
    if mask.data is None or mask.data.is_meta or not mask.rank:
        raise b.error(
            "indexes with a mask, whose result would have another shape for other values",
            "Use torch.where(mask, x, 0), or select a fixed number of elements with topk.",
            "choose another implementation in the model's configuration, one without selections by masks.",
        )
    return [constant(column) for column in mask.data.nonzero().unbind(1)]


def constant(data: Tensor) -> Value:
    """A constant of the graph."""
    name = str(data.dtype).removeprefix("torch.")
    return Value(tuple(data.shape), name, "constant", "constant", weight=True, data=data.contiguous())


def integer_range(start: int, length: int, step: int = 1) -> Value:
    """The constant integers start, start + step, ..., ``length`` of them."""
    return constant(torch.arange(start, start + length * step, step))


@rewrite("index_select")
def _index_select(b: Builder, x: Value, dim: int, index: Value) -> Value:
    if not x.rank:
        return x
    return look_up(b, x, {dim % x.rank: view(b, index, [-1])})


@rewrite("index.Tensor", "_unsafe_index.Tensor")
def _index(b: Builder, x: Value, indices: Sequence[Value | None]) -> Value:
    return look_up(b, x, by_dimension(b, indices))


@rewrite("masked_select")
def _masked_select(b: Builder, x: Value, mask: Value) -> Value:
    shape = broadcast_shapes(x.shape, mask.shape)
    if mask.data is not None:
        mask = constant(mask.data.expand(shape))
    return look_up(b, expand(b, x, shape), by_dimension(b, [mask]))


@rewrite("take")
def _take(b: Builder, x: Value, index: Value) -> Value:
    return look_up(b, view(b, x, [-1]), {0: index})


@rewrite("gather")
def _gather(b: Builder, x: Value, dim: int, index: Value, **_: Any) -> Value:
    """Of a tensor that is larger than the index in other dimensions, only the part that the index reaches counts."""
    if not x.rank or not index.rank:
        return view(b, x, b.shape) if not x.rank else look_up(b, x, {0: index})
    dim %= x.rank
    for i in range(x.rank):
        if i != dim:
            x = cut(b, x, i, 0, index.shape[i])
    pattern = _gathering(x.rank, dim)
    return b.emit("gather", [x, index], index.shape, pattern, {"dim": dim}, short="gather")


@rewrite("take_along_dim")
def _take_along_dim(b: Builder, x: Value, indices: Value, dim: int | None = None) -> Value:
    if dim is None:
        return _gather(b, view(b, x, [-1]), 0, view(b, indices, [-1]))
    dim %= x.rank
    rest = broadcast_shapes(*(tuple(1 if i == dim else n for i, n in enumerate(y.shape)) for y in (x, indices)))
    wide, index = (expand(b, y, [y.shape[dim] if i == dim else n for i, n in enumerate(rest)]) for y in (x, indices))
    return _gather(b, wide, dim, index)


def diagonal_places(x: Value, offset: int, rows: int, columns: int) -> dict[int, Value]:
    """The indices of a diagonal by their dimension, constants."""
    start = (max(0, -offset), max(0, offset))
    length = max(0, min(x.shape[rows] - start[0], x.shape[columns] - start[1]))
    return {rows: integer_range(start[0], length), columns: integer_range(start[1], length)}
