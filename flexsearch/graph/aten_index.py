"""Handlers of torch operators that look elements up by tensors of indices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from flexsearch.graph.aten import Builder, Shape, Value, aten, broadcast_shapes, letters
from flexsearch.graph.aten_math import fit
from flexsearch.graph.aten_shape import cut, expand, permute, view


@aten("index_select")
def _index_select(b: Builder, self: Value, dim: int, index: Value) -> Value:
    return _look_up(b, self, {dim % self.rank: view(b, index, [-1])})


@aten("index.Tensor")
def _index(b: Builder, self: Value, indices: Sequence[Value | None]) -> Value:
    given = {dim: index for dim, index in enumerate(indices) if index is not None}
    if any(index.dtype not in ("int64", "int32") for index in given.values()):
        raise b.error("indexes with a mask, whose result would have another shape for other values", "Use torch.where.")
    return _look_up(b, self, given)


def _look_up(b: Builder, x: Value, given: Mapping[int, Value]) -> Value:
    """Elements of ``x`` by indices of its dimensions, which broadcast to each other.

    A dimension that is looked up is whole, but for one whose index is a range along one dimension of the indices (the
    batch in ``x[arange(batch), chosen]``, the outer product ``mask[batch[:, None], keys]``): it is a dimension of the
    result, and can be split.
    """
    shape = broadcast_shapes(*(index.shape for index in given.values()))
    dims, places = sorted(given), [f"i{n}" for n in range(len(shape))]
    names = letters(x.rank)
    first = dims[0] if dims[-1] - dims[0] == len(dims) - 1 else 0  # torch puts the indices in front if they are apart
    kept = [d for d in range(x.rank) if d not in given]
    written = [*(names[d] for d in kept if d < first), *places, *(names[d] for d in kept if d >= first)]
    read, patterns = list(names), []
    operands: list[Value] = []
    indices: list[Any] = [None] * x.rank
    for dim in dims:
        index = given[dim]
        if (known := _range(index, shape, x.shape[dim])) is not None:
            axis, indexes = known
            x = cut(b, x, dim, indexes.start, len(indexes), indexes.step)
            read[dim] = "1" if axis is None else places[axis]
            indices[dim] = {"axis": axis}
        else:
            indices[dim] = {"operand": len(operands)}
            operands.append(index)
            read[dim] = f"V{dim}"
            patterns.append(" ".join(fit(places, shape, index.shape)))
    if not operands and len(set(read)) == len(read):
        return _arranged(b, x, read, written)
    attributes = {"indices": indices, "rank": len(shape), "first": first, "negative": any(map(_negative, operands))}
    pattern = f"{', '.join([' '.join(read), *patterns])} -> {' '.join(written)}"
    return b.emit("index", [x, *operands], b.shape, pattern, attributes, short="index")


def _range(index: Value, shape: Shape, size: int) -> tuple[int | None, range] | None:
    """(the only dimension of ``shape`` along which a constant index changes, the range that it runs through); None if
    it is another index. A single element changes along none."""
    if index.data is None or index.data.is_meta:
        return None
    along = [d + len(shape) - index.rank for d, n in enumerate(index.shape) if n > 1]
    values = [v + size if v < 0 else v for v in index.data.flatten().tolist()] if len(along) < 2 else []
    if not values:
        return None
    step = values[1] - values[0] if along else 1
    known = range(values[0], values[-1] + 1, step) if step > 0 else range(0)
    return (along[0] if along else None, known) if list(known) == values else None


def _negative(index: Value) -> bool:
    """Whether an index may count from the end; of what is computed, or on the meta device, that is not known."""
    return index.data is None or index.data.is_meta or bool(torch.any(index.data < 0))


def _arranged(b: Builder, x: Value, read: Sequence[str], written: Sequence[str]) -> Value:
    """``x`` with dimensions ``read`` as ``written``: in another order, and repeated along what it lacks."""
    named = [d for d, name in enumerate(read) if name != "1"]
    x = view(b, x, [x.shape[d] for d in named])
    order = sorted(range(len(named)), key=lambda k: written.index(read[named[k]]))
    x = permute(b, x, order)
    present = {read[d] for d in named}
    x = view(b, x, [n if name in present else 1 for name, n in zip(written, b.shape, strict=True)])
    return expand(b, x, b.shape)


@aten("gather")
def _gather(b: Builder, self: Value, dim: int, index: Value, **_: Any) -> Value:
    """Of a tensor that is larger than the index in other dimensions, only the part that the index reaches counts."""
    dim, names = dim % self.rank, letters(self.rank)
    for i in range(self.rank):
        if i != dim:
            self = cut(b, self, i, 0, index.shape[i])
    read = " ".join("V" if i == dim else n for i, n in enumerate(names))
    pattern = f"{read}, {' '.join(names)} -> {' '.join(names)}"
    return b.emit("gather", [self, index], index.shape, pattern, {"dim": dim}, short="gather")
