"""Losses with margins and of pairs: rows of class scores are whole; the others are made of elementwise operators."""

from __future__ import annotations

from collections.abc import Iterable
from math import log, pi
from typing import TYPE_CHECKING, Any, Literal

from flexsearch.graph.model import Operator
from flexsearch.graph.ops.along import is_whole
from flexsearch.graph.ops.base import (
    INPUTS,
    Attributes,
    Extents,
    Kernel,
    KernelContext,
    OperatorKind,
    Sample,
    Shapes,
    define,
    input_elements,
    integers,
    rand,
    rewrite,
)
from flexsearch.graph.ops.builder import Builder
from flexsearch.graph.ops.lazy import F
from flexsearch.graph.ops.loss import REDUCTIONS
from flexsearch.graph.ops.norms import inner, pairwise_distance
from flexsearch.graph.ops.pointwise import pointwise
from flexsearch.graph.ops.reduce import reduce
from flexsearch.graph.ops.value import Value
from flexsearch.graph.piece import Piece

if TYPE_CHECKING:
    pass


class MultilabelMargin(OperatorKind):
    """How far, in each row, the scores of the right classes lie below those of the others. The right ones are those
    that the target names before its first -1."""

    name = "multilabel_margin_loss"
    targets = ("aten.multilabel_margin_loss",)
    inputs = (2, 2)
    saved = INPUTS

    class attributes(Attributes):
        reduction: Literal["none", "mean", "sum"] = "mean"

    def trace(self, b: Builder, x: Value, target: Value, reduction: int = 1, **_: Any) -> Value:
        row = "n" if x.rank > 1 else ""
        pattern = f"{row} C, {row} C -> {'' if reduction else row}"
        return b.emit(self.name, [x, target], b.shape, pattern, {"reduction": REDUCTIONS[reduction]})

    def check(self, op: Operator, attributes: Any, shapes: tuple[tuple[int, ...], ...]) -> str:
        if not 1 <= len(shapes[0]) <= 2 or not is_whole(op.access.inputs[0].dimensions[-1]):
            return f'pattern "{op.pattern}" has no rows of scores'
        same = shapes[0] == shapes[1]
        return "" if same else f"the targets must have shape {list(shapes[0])}, not {list(shapes[1])}"

    def flops(self, op: Operator, extents: Extents) -> Any:
        return 4.0 * input_elements(op, extents)

    def kernel(self, op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
        how = op.attributes.get("reduction", "mean")
        rows = shapes[0][0] if how == "mean" and len(shapes[0]) > 1 else 1
        local = "none" if how == "none" else "sum"
        return lambda x, target: F.multilabel_margin_loss(x, target, reduction=local) / rows

    def samples(self) -> Iterable[Sample]:
        target = integers(6, 4, 6)
        target[:, 3] = -1
        yield Sample(F.multilabel_margin_loss, (rand(4, 6), target))
        yield Sample(lambda x, t: F.multilabel_margin_loss(x, t, reduction="none"), (rand(4, 6), target))
        yield Sample(lambda x, t: F.multilabel_margin_loss(x, t, reduction="sum"), (rand(6), target[0]))


define(MultilabelMargin())


def _reduced(b: Builder, losses: Value, reduction: int) -> Value:
    """Mean or sum of the losses, or themselves."""
    return losses if not reduction else reduce(b, REDUCTIONS[reduction], losses, dtype=losses.dtype)


def _positive(b: Builder, x: Value) -> Value:
    return pointwise(b, "clamp_min.default", (x, 0))


def _where_target(b: Builder, target: Value, operator: str, number: int, x: Value) -> Value:
    """``x`` where a comparison of the target with the number holds, else 0."""
    return pointwise(b, "where.ScalarOther", (pointwise(b, f"{operator}.Scalar", (target, number)), x, 0))


@rewrite("hinge_embedding_loss")
def _hinge_embedding(b: Builder, x: Value, target: Value, margin: float = 1.0, reduction: int = 1) -> Value:
    apart = _where_target(b, target, "ne", 1, _positive(b, pointwise(b, "rsub.Scalar", (x, margin))))
    near = _where_target(b, target, "ne", -1, x)
    return _reduced(b, pointwise(b, "add.Tensor", (apart, near)), reduction)


@rewrite("margin_ranking_loss")
def _margin_ranking(
    b: Builder, input1: Value, input2: Value, target: Value, margin: float = 0.0, reduction: int = 1
) -> Value:
    order = pointwise(b, "mul.Tensor", (target, pointwise(b, "sub.Tensor", (input2, input1))))
    return _reduced(b, _positive(b, pointwise(b, "add.Scalar", (order, margin))), reduction)


@rewrite("triplet_margin_loss")
def _triplet_margin(
    b: Builder, anchor: Value, positive: Value, negative: Value, margin: float = 1.0, p: float = 2.0,
    eps: float = 1e-6, swap: bool = False, reduction: int = 1,
) -> Value:  # fmt: skip
    near = pairwise_distance(b, anchor, positive, p, eps)
    far = pairwise_distance(b, anchor, negative, p, eps)
    if swap:
        far = pointwise(b, "minimum.default", (far, pairwise_distance(b, positive, negative, p, eps)))
    behind = pointwise(b, "sub.Tensor", (near, far))
    return _reduced(b, _positive(b, pointwise(b, "add.Scalar", (behind, margin))), reduction)


@rewrite("cosine_embedding_loss")
def _cosine_embedding(
    b: Builder, input1: Value, input2: Value, target: Value, margin: float = 0.0, reduction: int = 1
) -> Value:
    squares = [pointwise(b, "add.Scalar", (inner(b, x, x, -1), 1e-12)) for x in (input1, input2)]
    norms = pointwise(b, "sqrt.default", (pointwise(b, "mul.Tensor", squares),))
    cosine = pointwise(b, "div.Tensor", (inner(b, input1, input2, -1), norms))
    near = _where_target(b, target, "eq", 1, pointwise(b, "rsub.Scalar", (cosine, 1)))
    apart = _where_target(b, target, "eq", -1, _positive(b, pointwise(b, "sub.Scalar", (cosine, margin))))
    return _reduced(b, pointwise(b, "add.Tensor", (near, apart)), reduction)


@rewrite("poisson_nll_loss")
def _poisson(b: Builder, input: Value, target: Value, log_input: bool, full: bool, eps: float, reduction: int) -> Value:
    if log_input:
        rate, logarithm = pointwise(b, "exp.default", (input,)), input
    else:
        rate, logarithm = input, pointwise(b, "log.default", (pointwise(b, "add.Scalar", (input, eps)),))
    loss = pointwise(b, "sub.Tensor", (rate, pointwise(b, "mul.Tensor", (target, logarithm))))
    if full:  # Stirling's approximation of the logarithm of the factorial
        power = pointwise(b, "mul.Tensor", (target, pointwise(b, "log.default", (target,))))
        half = pointwise(b, "mul.Scalar", (pointwise(b, "log.default", (target,)), 0.5))
        stirling = pointwise(b, "add.Tensor", (pointwise(b, "sub.Tensor", (power, target)), half))
        stirling = pointwise(b, "add.Scalar", (stirling, 0.5 * log(2 * pi)))
        loss = pointwise(b, "add.Tensor", (loss, _where_target(b, target, "gt", 1, stirling)))
    return _reduced(b, loss, reduction)
