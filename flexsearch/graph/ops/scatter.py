"""Elements written to where tensors of indices say: scatter, index_put and their like.

A dimension that indices point into can be split: each piece writes what falls into its region. Where contributions are
added, the sources can be split too, into partial sums. Of several sources for one element, PyTorch does not say which
one remains if they are not reduced; neither does flexsearch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from math import prod
from typing import TYPE_CHECKING, Any, Literal

from flexsearch.graph.model import Operator
from flexsearch.graph.ops.attributes import Place
from flexsearch.graph.ops.base import (
    BOTH,
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
    integers,
    rand,
)
from flexsearch.graph.ops.builder import fit, letters
from flexsearch.graph.ops.form import check_form
from flexsearch.graph.ops.index import Lookup, between, check_places, local_ranges
from flexsearch.graph.ops.lazy import torch
from flexsearch.graph.ops.local import extent
from flexsearch.graph.ops.value import Shape
from flexsearch.graph.piece import Piece

if TYPE_CHECKING:
    from torch import Tensor

Reduce = Literal["none", "sum", "prod", "mean", "amax", "amin"]


class Scatter(OperatorKind):
    """``x`` with, for each element of the index along ``dim``, that of the source: in its place, or reduced with it.

    The source may be a scalar. ``include_self``: whether the element that was there takes part in the reduction.
    """

    name = "scatter"
    inputs = (3, 3)
    backward_reads = "gradients"

    class attributes(Attributes):
        dim: Place
        reduce: Reduce
        include_self: bool = True

    def check(self, op: Operator, attributes: Any, shapes: tuple[tuple[int, ...], ...]) -> str:
        rank, source = len(shapes[0]), shapes[2]
        if not -rank <= attributes.dim < rank:
            return f"attributes.dim: {attributes.dim} is no dimension of shape {list(shapes[0])}"
        added = attributes.reduce == "sum" and attributes.include_self
        return check_form(op, scatter_pattern(rank, attributes.dim % rank, bool(source), added), shapes)

    def flops(self, op: Operator, extents: Extents) -> Any:
        """One for each element that is scattered; a piece of the destination looks at all of them."""
        return prod(extents[a] for a in op.access.inputs[1].names())

    def saves(self, op: Operator, *before: Operator) -> Saved:
        return NOTHING if op.attributes["reduce"] in ("none", "sum") else BOTH  # but for the index

    def kernel(self, op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
        """What falls outside goes to an element behind the last one, which is cut off."""
        dim, form = int(str(op.attributes["dim"])) % len(shapes[0]), str(op.attributes["reduce"])
        include_self = bool(op.attributes.get("include_self", True))
        shape, (low, high) = extent(piece.outputs[0]), piece.outputs[0][dim]
        whole = (low, high) == (0, shapes[0][dim])

        def run(x: Tensor | None, index: Tensor, source: Tensor) -> Tensor:
            base = source.new_zeros(shape) if x is None else x
            values = source.expand(index.shape)
            if not whole:
                away = (index < low) | (index >= high)
                index = (index - low).masked_fill(away, high - low)
                base = _longer(base, dim)
            y = _scattered(base, dim, index, values, form, include_self)
            return y if whole else y.narrow(dim, 0, high - low)

        return run

    def samples(self) -> Iterable[Sample]:
        tensors = (rand(4, 5, 3), integers(5, 4, 7, 3), rand(4, 7, 3))
        yield Sample(lambda x, i, s: x.scatter_add(1, i, s), tensors)
        for form in ("sum", "prod", "mean", "amax", "amin"):
            for own in (True, False):
                yield Sample(lambda x, i, s, r=form, o=own: x.scatter_reduce(1, i, s, r, include_self=o), tensors)
        unique = torch.rand(4, 5).argsort(1)[:, :3]
        yield Sample(lambda x, i, s: x.scatter(1, i, s), (rand(4, 5), unique, rand(4, 3)))
        yield Sample(lambda x, i: x.scatter(1, i, 2.0), (rand(4, 5), unique))
        yield Sample(lambda x, i, s: x.scatter_add(0, i, s), (rand(6, 5), integers(6, 3, 2), rand(3, 2)))


def _longer(x: Tensor, dim: int) -> Tensor:
    """``x`` with one more element along ``dim``."""
    return torch.cat((x, x.new_ones([1 if d == dim else n for d, n in enumerate(x.shape)])), dim)


def _scattered(base: Tensor, dim: int, index: Tensor, values: Tensor, form: str, include_self: bool) -> Tensor:
    index = index.long()
    if form == "none":
        return base.scatter(dim, index, values)
    if form == "sum" and include_self:
        return base.scatter_add(dim, index, values)
    return base.scatter_reduce(dim, index, values, form, include_self=include_self)


def scatter_pattern(rank: int, dim: int, elements: bool, added: bool, whole: bool = False) -> str:
    """Pattern of a scatter along ``dim``; ``elements``: whether the source is no scalar. Sources that are ``added`` can
    be split, unless they are to be ``whole``."""
    names = letters(rank)
    target, source = " ".join(names), source_axis(added and not whole)
    read = " ".join(source if d == dim else name for d, name in enumerate(names))
    return f"{'+' * added}{target}, {read}, {read if elements else ''} -> {target}"


def source_axis(added: bool) -> str:
    """Name of an axis of sources, which can be split into partial sums if they are added."""
    return "source" if added else "Source"


def put_pattern(
    entries: Any, first: int, places: Shape, operands: Sequence[Shape], values: Shape, table: Shape, added: bool,
    whole: bool = False,
) -> str:  # fmt: skip
    """Pattern of an assignment by ``entries`` (see :class:`Lookup`) to a tensor of shape ``table``; ``places``: what
    the operands and ranges broadcast to. ``added``, ``whole``: as in :func:`scatter_pattern`."""
    names = letters(len(table))
    axes = [f"{source_axis(added and not whole)}{n}" for n in range(len(places))]
    looked_up = [dim for dim, entry in enumerate(entries) if entry is not None]
    for dim in looked_up:
        if entries[dim].get("operand") is None:
            axes[entries[dim]["axis"]] = names[dim]
    patterns = [" ".join(fit(axes, places, shape)) for shape in operands]
    selected = between(names, looked_up, first, axes), tuple(between(table, looked_up, first, places))
    target = " ".join(names)
    return f"{'+' * added}{target}, {', '.join(patterns)}, {' '.join(fit(*selected, values))} -> {target}"


class IndexPut(OperatorKind):
    """``x[i, :, j] = values``, or ``+= values`` (``accumulate``), which broadcast to what the indices select.

    A dimension whose index is a range along one dimension of the indices, as the batch in ``x[arange(batch), chosen]``,
    is that dimension.
    """

    name = "index_put"
    inputs = (3, 66)
    backward_reads = "gradients"
    saved = NOTHING  # but for the indices

    class attributes(Lookup):
        accumulate: bool

    def check(self, op: Operator, attributes: Any, shapes: tuple[tuple[int, ...], ...]) -> str:
        x, operands, values, result = shapes[0], shapes[1:-2], shapes[-2], shapes[-1]
        ranges = {entry.axis: dim for dim, entry in _looked_up(attributes).items() if entry.operand is None}
        if result != x or len(attributes.indices) != len(x) or None in ranges:
            return f"attributes.indices do not say how elements are put into shape {list(x)}"
        if len(ranges) + len(operands) != len(_looked_up(attributes)):
            return "attributes.indices: two ranges run along one dimension of the indices"
        places = [x[ranges[k]] if k in ranges else 1 for k in range(attributes.rank)]
        for shape in operands:
            for k, size in enumerate(reversed(shape), 1):
                if k <= len(places) and size > 1:
                    places[-k] = size
        selected = tuple(between(x, _looked_up(attributes), attributes.first, places))
        if contradiction := check_places(attributes, x, operands, selected):
            return contradiction
        lead = len(selected) - len(values)
        if lead < 0 or any(n not in (1, size) for n, size in zip(values, selected[lead:], strict=True)):
            return f"values of shape {list(values)} do not fit {list(selected)}"
        entries = op.attributes["indices"]
        added = attributes.accumulate
        return check_form(op, put_pattern(entries, attributes.first, tuple(places), operands, values, x, added), shapes)

    def flops(self, op: Operator, extents: Extents) -> Any:
        entries: Any = op.attributes["indices"]
        dimensions = zip(op.access.inputs[0].dimensions, entries, strict=True)
        pointed = {a for d, entry in dimensions if entry is not None and entry.get("axis") is None for a in d.axes}
        return prod(n for axis, n in extents.items() if axis not in pointed)

    def kernel(self, op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
        """What falls outside goes to an element behind the last one of a dimension, which is cut off."""
        entries: Any = op.attributes["indices"]
        accumulate, box = bool(op.attributes["accumulate"]), piece.outputs[0]
        shape, size = extent(box), shapes[0]
        places = [1] * int(str(op.attributes["rank"]))
        for n, entry in zip(shape, entries, strict=True):
            if entry is not None and entry.get("operand") is None:
                places[entry["axis"]] = n
        ranges = local_ranges(entries, places, context)
        pointed = {d: entry["operand"] for d, entry in enumerate(entries) if entry is not None and d not in ranges}
        whole = all(box[d] == (0, size[d]) for d in pointed)
        last = next(iter(pointed))

        def run(x: Tensor | None, *operands: Tensor) -> Tensor:
            *indices, values = operands
            base = values.new_zeros(shape) if x is None else x
            own = {d: _from_start(indices[k], size[d]) for d, k in pointed.items()}
            if not whole:
                away = reduce(torch.logical_or, (_outside(own[d], *box[d]) for d in own))
                own = {d: (i - box[d][0]).expand(away.shape).masked_fill(away, 0) for d, i in own.items()}
                own[last] = own[last].masked_fill(away, shape[last])
                base = _longer(base, last)
            where = [ranges.get(d, own.get(d)) for d in range(len(size))]
            y: Tensor = torch.ops.aten.index_put.default(base, where, values, accumulate)
            return y if whole else y.narrow(last, 0, shape[last])

        return run

    def samples(self) -> Iterable[Sample]:
        tensors = (rand(4, 5, 3), integers(5, 7) - 2, rand(4, 7, 3))
        yield Sample(lambda x, i, v: torch.ops.aten.index_put(x, [None, i], v, True), tensors)
        yield Sample(lambda x, i, v: x.index_add(1, i.abs(), v, alpha=2), tensors)
        yield Sample(lambda x, i, v: x.index_copy(0, i, v), (rand(4, 3), torch.tensor([2, 0]), rand(2, 3)))
        yield Sample(lambda x, i: x.index_fill(0, i, 1.5), (rand(4, 3), torch.tensor([2, 0])))
        rows = torch.arange(4)
        yield Sample(lambda x, i, v: x.index_put((rows, i), v), (rand(4, 5, 3), integers(5, 4), rand(3)))
        yield Sample(
            lambda x, i, j, v: torch.ops.aten.index_put(x, [i, None, j], v, True),
            (rand(4, 5, 3), integers(4, 2, 1), integers(3, 6), rand(2, 1, 5)),
        )
        yield Sample(lambda x, v: x.diagonal_scatter(v, 1, 0, 2), (rand(3, 2, 5), rand(2, 3)))


def _looked_up(attributes: Lookup) -> dict[int, Any]:
    return {dim: entry for dim, entry in enumerate(attributes.indices) if entry is not None}


def _from_start(index: Tensor, size: int) -> Tensor:
    """``index`` that may count from the end, as one that does not."""
    return torch.where(index < 0, index + size, index).long()


def _outside(index: Tensor, low: int, high: int) -> Tensor:
    return (index < low) | (index >= high)


for _kind in (Scatter(), IndexPut()):
    define(_kind)
