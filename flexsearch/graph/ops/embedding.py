"""Rows of a table by their numbers, and sums, means and maxima of bags of them."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Any, Literal

from flexsearch.graph.model import Operator
from flexsearch.graph.ops.attributes import Natural, Signed
from flexsearch.graph.ops.base import (
    INPUTS,
    NOTHING,
    Attributes,
    Extents,
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
from flexsearch.graph.ops.builder import Builder
from flexsearch.graph.ops.form import check_form
from flexsearch.graph.ops.lazy import F, torch
from flexsearch.graph.ops.shape import view
from flexsearch.graph.ops.value import Value
from flexsearch.graph.piece import Piece

if TYPE_CHECKING:
    from torch import Tensor


class Embedding(OperatorKind):
    """Rows of the table; where the vocabulary is split, each piece gives the rows it holds and zero for the others."""

    name = "embedding"
    pattern = "b.., v d -> b.. d"
    roles = {"v": "reduction", "d": "parameter"}
    words = {"v": "vocabulary", "d": "embedding features"}
    inputs = (2, 2)
    table = 1
    saved = NOTHING

    class attributes(Attributes):
        padding_idx: Signed | None = None

    def trace(
        self, b: Builder, weight: Value, indices: Value, padding_idx: int = -1, scale_grad_by_freq: bool = False,
        **_: Any,
    ) -> Value:  # fmt: skip
        _refuse_frequencies(b, scale_grad_by_freq)
        attributes = {"padding_idx": padding_idx if padding_idx >= 0 else None}
        return b.emit("embedding", [indices, weight], b.shape, attributes=attributes, dtype=weight.dtype)

    targets = ("aten.embedding",)

    def check(self, op: Operator, attributes: Any, shapes: tuple[tuple[int, ...], ...]) -> str:
        return check_form(op, "b.., v d -> b.. d", shapes)

    def kernel(self, op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
        box = piece.inputs[1]
        assert box is not None
        low, high = box[0]
        padding = _local_padding(op, low, high)
        if (low, high) == (0, shapes[1][0]):
            return lambda index, table: F.embedding(index, table, padding)

        def run(index: Tensor, table: Tensor) -> Tensor:
            away = (index < low) | (index >= high)
            rows = F.embedding((index - low).masked_fill(away, 0), table, padding)
            return rows.masked_fill(away.unsqueeze(-1), 0)

        return run

    def samples(self) -> Iterable[Sample]:
        yield Sample(F.embedding, (integers(7, 3, 4), rand(7, 5)))
        yield Sample(lambda i, w: F.embedding(i, w, 2), (integers(5, 6), rand(5, 3)))


def _padding(op: Operator) -> int | None:
    """The row that takes no part."""
    row: Any = op.attributes.get("padding_idx")
    return None if row is None else int(row)


def _local_padding(op: Operator, low: int, high: int) -> int | None:
    """The row that takes no part, in a table of the rows [low, high) alone."""
    row = _padding(op)
    return row - low if row is not None and low <= row < high else None


def _refuse_frequencies(b: Builder, scale_grad_by_freq: bool) -> None:
    if scale_grad_by_freq:
        raise b.error(
            "divides gradients by how often a row occurs in the batch", "Set scale_grad_by_freq=False.",
            "set scale_grad_by_freq to False in the model's configuration.",
        )  # fmt: skip


class _Bag(OperatorKind):
    """Rows of the table, weighted, and put together bag by bag.

    Of sums and means, indices and vocabulary can be split: each piece adds the rows it holds.
    """

    roles = {"v": "reduction", "s": "reduction", "d": "parameter"}
    words = {"v": "vocabulary", "d": "embedding features", "b": "bags"}
    table = 1
    saved = INPUTS

    def looked_up(self, op: Operator, extents: Extents) -> Any:
        """A row for each index."""
        axes = op.access.inputs[0].names() | set(op.access.inputs[1].dimensions[1].axes)
        return prod(extents[a] for a in axes)

    class attributes(Attributes):
        mode: Literal["sum", "mean", "max"]
        padding_idx: Natural | None = None


class EmbeddingBag(_Bag):
    """Bags of one size, the rows of the indices: ``b s, v d -> b d``, and weights like the indices."""

    name = "embedding_bag"
    inputs = (2, 3)

    def check(self, op: Operator, attributes: Any, shapes: tuple[tuple[int, ...], ...]) -> str:
        weighted = len(shapes) == 4
        if weighted and attributes.mode != "sum":
            return f"weights of bags are those of a sum, not of {attributes.mode}"
        return check_form(op, _bag_pattern(attributes.mode, attributes.padding_idx, weighted), shapes)

    def flops(self, op: Operator, extents: Extents) -> Any:
        """An addition for each element that is looked up; another part of the vocabulary adds as many zeros."""
        return (len(op.inputs) - 1) * self.looked_up(op, extents)

    def kernel(self, op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
        box = piece.inputs[1]
        assert box is not None
        low, high = box[0]
        mode, padding = str(op.attributes["mode"]), _local_padding(op, low, high)
        if (low, high) == (0, shapes[1][0]) and (mode != "mean" or box_is_whole(piece, shapes)):
            return lambda index, table, weights=None: F.embedding_bag(
                index, table, mode=mode, per_sample_weights=weights, padding_idx=padding
            )
        count, row = shapes[0][1], _padding(op)

        def run(index: Tensor, table: Tensor, weights: Tensor | None = None) -> Tensor:
            away = (index < low) | (index >= high)
            factor = (~away).to(table.dtype) if weights is None else weights.masked_fill(away, 0)
            total = F.embedding_bag(
                (index - low).masked_fill(away, 0), table, mode="sum", per_sample_weights=factor, padding_idx=padding
            )
            if mode == "sum":
                return total
            return total / (count if row is None else index.ne(row).sum(1, keepdim=True).clamp(min=1))

        return run

    def samples(self) -> Iterable[Sample]:
        for mode in ("sum", "mean", "max"):
            yield Sample(lambda i, w, m=mode: F.embedding_bag(i, w, mode=m), (integers(7, 3, 4), rand(7, 5)))
            yield Sample(
                lambda i, w, m=mode: F.embedding_bag(i, w, mode=m, padding_idx=1), (integers(3, 5, 2), rand(3, 4))
            )
        yield Sample(
            lambda i, w, f: F.embedding_bag(i, w, mode="sum", per_sample_weights=f),
            (integers(7, 3, 4), rand(7, 5), rand(3, 4)),
        )


def box_is_whole(piece: Piece, shapes: Shapes) -> bool:
    """Whether a piece reads the whole bags of its indices."""
    box = piece.inputs[0]
    return box is not None and box[1] == (0, shapes[0][1])


class RaggedBag(_Bag):
    """Bags that begin at ``offsets``: ``s, v d, O[, s] -> b d``.

    ``last``: whether the last offset is where the last bag ends.
    """

    name = "ragged_bag"
    inputs = (3, 4)

    class attributes(_Bag.attributes):
        last: bool = False

    def check(self, op: Operator, attributes: Any, shapes: tuple[tuple[int, ...], ...]) -> str:
        weighted = len(shapes) == 5
        if weighted and attributes.mode != "sum":
            return f"weights of bags are those of a sum, not of {attributes.mode}"
        if shapes[-1][:1] != (shapes[2][0] - attributes.last,) if shapes[2] else True:
            return f"offsets of shape {list(shapes[2])} do not make bags of shape {list(shapes[-1])}"
        return check_form(op, _ragged_pattern(attributes.mode, attributes.padding_idx, weighted), shapes)

    def flops(self, op: Operator, extents: Extents) -> Any:
        return (len(op.inputs) - 2) * self.looked_up(op, extents)

    def kernel(self, op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
        """Each row is added to its bag; those of bags elsewhere, and those that take no part, to one that is cut off.

        An index lies in the last bag that begins before it, or there.
        """
        (begin, end), (low, high), *_ = (box[0] for box in piece.inputs if box is not None)
        (first, stop), (left, right) = piece.outputs[0]
        mode, row, total = str(op.attributes["mode"]), _padding(op), shapes[0][0]
        starts = shapes[2][0] - bool(op.attributes.get("last"))

        def run(index: Tensor, table: Tensor, offsets: Tensor, weights: Tensor | None = None) -> Tensor:
            positions = torch.arange(begin, end, device=index.device)
            bags = torch.searchsorted(offsets[:starts].contiguous().long(), positions, right=True) - (1 + first)
            idle = (bags < 0) | (bags >= stop - first)
            bags = bags.masked_fill(idle if row is None else idle | (index.eq(row)), stop - first)
            away = (index < low) | (index >= high)
            rows = F.embedding((index - low).masked_fill(away, 0), table)
            rows = rows if weights is None else rows * weights[:, None]
            put, targets = rows.new_zeros(stop - first + 1, right - left), bags.masked_fill(away, stop - first)
            if mode == "max":
                return put.scatter_reduce(0, targets[:, None].expand_as(rows), rows, "amax", include_self=False)[:-1]
            summed = put.index_add(0, targets, rows)[:-1]
            return summed / counts(offsets, bags) if mode == "mean" else summed

        def counts(offsets: Tensor, bags: Tensor) -> Tensor:
            """Rows that each bag of the piece is the mean of, at least 1, as a column."""
            if row is None:
                size = torch.cat((offsets[:starts], offsets.new_full((1,), total))).diff()
                ends = offsets.diff() if starts < len(offsets) else size
                return ends[first:stop, None].clamp(min=1)
            return bags.bincount(minlength=stop - first + 1)[:-1, None].clamp(min=1)

        return run

    def samples(self) -> Iterable[Sample]:
        offsets = torch.tensor([0, 3, 3, 7])
        for mode in ("sum", "mean", "max"):
            yield Sample(
                lambda i, o, w, m=mode: F.embedding_bag(i, w, o, mode=m), (integers(5, 9), offsets, rand(5, 3))
            )
            yield Sample(
                lambda i, o, w, m=mode: F.embedding_bag(i, w, o, mode=m, padding_idx=2, include_last_offset=True),
                (integers(5, 7), offsets, rand(5, 3)),
            )
        yield Sample(
            lambda i, o, w, f: F.embedding_bag(i, w, o, mode="sum", per_sample_weights=f),
            (integers(5, 9), offsets, rand(5, 3), rand(9)),
        )


def _bag_pattern(mode: str, padding: int | None, weighted: bool) -> str:
    """Of a maximum, indices and vocabulary are whole; of a mean, indices that may not count."""
    v, s = "V" if mode == "max" else "v", _places(mode, padding)
    return f"b {s}, {v} d{f', b {s}' if weighted else ''} -> b d"


def _ragged_pattern(mode: str, padding: int | None, weighted: bool) -> str:
    v, s = "V" if mode == "max" else "v", _places(mode, padding)
    return f"{s}, {v} d, O{f', {s}' if weighted else ''} -> b d"


def _places(mode: str, padding: int | None) -> str:
    return "S" if mode == "max" or (mode == "mean" and padding is not None) else "s"


for _kind in (Embedding(), EmbeddingBag(), RaggedBag()):
    define(_kind)

_MODES = ("sum", "mean", "max")


@rewrite("embedding_bag", "_embedding_bag", "_embedding_bag_forward_only")
def _embedding_bag(
    b: Builder, weight: Value, indices: Value, offsets: Value, scale_grad_by_freq: bool = False, mode: int = 0,
    sparse: bool = False, per_sample_weights: Value | None = None, include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> tuple[Value | None, ...]:  # fmt: skip
    """Bags of one size where the offsets say so (``nn.EmbeddingBag`` on a matrix of indices makes such)."""
    _refuse_frequencies(b, scale_grad_by_freq)
    row = padding_idx if padding_idx is not None and padding_idx >= 0 else None
    attributes: dict[str, Any] = {"mode": _MODES[mode], "padding_idx": row}
    size, bags = _bag_size(indices, offsets, include_last_offset), b.shape[0]
    extra = [] if per_sample_weights is None else [per_sample_weights]
    if size:
        operands = [_as_bags(b, x, (bags, size)) for x in (indices, *extra)]
        operands.insert(1, weight)
        pattern = _bag_pattern(_MODES[mode], row, bool(extra))
        out = b.emit("embedding_bag", operands, b.shape, pattern, attributes, dtype=weight.dtype)
    else:
        operands, attributes = [indices, weight, offsets, *extra], attributes | {"last": include_last_offset}
        pattern = _ragged_pattern(_MODES[mode], row, bool(extra))
        out = b.emit("ragged_bag", operands, b.shape, pattern, attributes, dtype=weight.dtype, short="embedding_bag")
    return out, None, None, None


def _bag_size(indices: Value, offsets: Value, last: bool) -> int:
    """Indices in each bag, if it is known that all have as many; else 0."""
    if offsets.data is None or offsets.data.is_meta:
        return 0
    ends = [*offsets.data.tolist(), *([] if last else [indices.shape[0]])]
    sizes = {high - low for low, high in pairwise(ends)}
    return int(next(iter(sizes))) if len(sizes) == 1 and ends[0] == 0 and ends[-1] == indices.shape[0] else 0


def _as_bags(b: Builder, x: Value, shape: tuple[int, int]) -> Value:
    """``x`` with a row for each bag; what it was flattened from, if that had such rows."""
    maker = next((draft for draft in reversed(b.drafts) if x in draft.outputs), None)
    if maker is not None and maker.kind == "view" and maker.inputs[0].shape == shape:
        return maker.inputs[0]
    return view(b, x, shape)


@rewrite("embedding_renorm")
def _embedding_renorm(b: Builder, **_: Any) -> Value:
    raise b.error(
        "scales rows of the table in place (max_norm)",
        "Leave out max_norm and scale what is looked up: x * (max_norm / x.norm(dim=-1, keepdim=True)).clamp(max=1).",
    )
