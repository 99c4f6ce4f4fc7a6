"""Losses of classes: a piece's contribution is its local sum over the global count, so that contributions add up."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import TYPE_CHECKING, Any, Literal

from flexsearch.graph.model import Dtype, Operator
from flexsearch.graph.ops.attributes import Share, Signed
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
    input_elements,
    integers,
    rand,
    rewrite,
)
from flexsearch.graph.ops.builder import Builder
from flexsearch.graph.ops.calls import dtype_of
from flexsearch.graph.ops.lazy import F, torch
from flexsearch.graph.ops.local import extent, inputs_count
from flexsearch.graph.ops.value import Value
from flexsearch.graph.piece import Piece

if TYPE_CHECKING:
    from torch import Tensor

REDUCTIONS = ("none", "mean", "sum")
"""By torch's numbers for them."""


class LossAttributes(Attributes):
    reduction: Literal["none", "mean", "sum"] = "mean"
    has_weight: bool = False


class ValidCount(OperatorKind):
    """Number (or class weight) of the targets that count: the divisor of a mean loss."""

    name = "valid_count"
    pattern = "n.., C -> "
    inputs = (1, 2)
    saved = NOTHING
    bookkeeping = True

    class attributes(Attributes):
        ignore_index: Signed = -100
        dtype: Dtype = "float32"

    def flops(self, op: Operator, extents: Extents) -> Any:
        return input_elements(op, extents)

    def kernel(self, op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
        ignored: Any = op.attributes.get("ignore_index", -100)
        dtype = dtype_of(str(op.attributes.get("dtype", "float32")))

        def run(target: Tensor, weight: Tensor | None = None) -> Tensor:
            kept: Tensor = target.ne(ignored)
            if weight is None:
                return kept.sum().to(dtype)
            return torch.where(kept, weight[torch.where(kept, target, 0)], 0).sum().to(dtype)

        return run

    def samples(self) -> Iterable[Sample]:
        x, target = rand(5, 4, 3), integers(4, 5, 3)
        target[0] = 2
        yield Sample(lambda x, t: F.cross_entropy(x, t, ignore_index=2), (x, target))


class ClassLoss(OperatorKind):
    """Of scores of classes, which are whole, and targets; then the count, a number, and weights of the classes."""

    inputs = (2, 4)
    traffic = "loss"
    saved = INPUTS

    def check(self, op: Operator, attributes: Any, shapes: tuple[tuple[int, ...], ...]) -> str:
        """The classes are the axis C, dimension 1 of the scores."""
        classes = op.access.inputs[0].dimensions[min(1, len(shapes[0]) - 1)].axes if shapes[0] else ()
        if classes != ("C",):
            return f'pattern "{op.pattern}" does not have the classes C in its first operand'
        extra = [shape for shape in shapes[2:-1] if len(shape) > 1]
        return f"weights and counts of a loss are vectors and scalars, not of shape {list(extra[0])}" if extra else ""

    def function(self, op: Operator) -> Any:
        """(scores, targets, weights, reduction) -> loss."""
        raise AssertionError(f"{self.name} is no loss")

    def kernel(self, op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
        return self.reducing(op, shapes, self.function(op))

    def reducing(self, op: Operator, shapes: Shapes, loss: Any) -> Kernel:
        """The kernel with this function."""
        how = "none" if op.attributes.get("reduction") == "none" else "sum"
        mean = op.attributes.get("reduction", "mean") == "mean"
        count = next((i for i, shape in enumerate(shapes) if i > 1 and shape == ()), None)
        weight = next((i for i, shape in enumerate(shapes) if i > 1 and len(shape) == 1), None)
        classes = shapes[0][min(1, len(shapes[0]) - 1)]
        divisor = inputs_count(op) // classes  # of class probabilities, where no target is ignored

        def run(*operands: Tensor) -> Tensor:
            y: Tensor = loss(operands[0], operands[1], None if weight is None else operands[weight], how)
            if not mean:
                return y
            return y / (divisor if count is None else operands[count])

        return run


class CrossEntropy(ClassLoss):
    """Targets are classes, or probabilities of them."""

    name = "cross_entropy"

    class attributes(LossAttributes):
        ignore_index: Signed = -100
        label_smoothing: Share = 0.0
        probabilities: bool = False
        has_count: bool = False

    def flops(self, op: Operator, extents: Extents) -> Any:
        return 6.0 * input_elements(op, extents)

    def function(self, op: Operator) -> Any:
        smoothing: Any = op.attributes.get("label_smoothing") or 0.0
        if op.attributes.get("probabilities"):
            return lambda x, t, weight, how: F.cross_entropy(x, t, weight, reduction=how, label_smoothing=smoothing)
        ignored: Any = op.attributes.get("ignore_index", -100)
        return lambda x, t, weight, how: F.cross_entropy(
            x, t, weight, ignore_index=ignored, reduction=how, label_smoothing=smoothing
        )

    def kernel(self, op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
        """Of rows of scores in parts; such a kernel reads scores of any type (:func:`local.in_types`)."""
        plain = super().kernel(op, piece, shapes, context)
        special = op.attributes.get("probabilities") or op.attributes.get("label_smoothing")
        if special or len(shapes[0]) != 2 or any(len(shape) == 1 for shape in shapes[2:]):
            return plain
        from flexsearch.graph.ops.loss_functions import WORTH_BYTES, ClassLosses

        if piece.inputs[0] is None or 4 * prod(extent(piece.inputs[0])) < WORTH_BYTES[context.device.type]:
            return plain
        ignored = int(str(op.attributes.get("ignore_index", -100)))

        def computing_in(dtype: torch.dtype | None) -> Kernel:
            def loss(scores: Tensor, classes: Tensor, _: None, how: str) -> Tensor:
                losses: Tensor = ClassLosses.apply(scores, classes, ignored, dtype or scores.dtype)  # type: ignore
                return losses if how == "none" else losses.sum()

            return self.reducing(op, shapes, loss)

        kernel: Any = computing_in(None)
        kernel.in_type = computing_in
        return kernel  # type: ignore[no-any-return]

    def samples(self) -> Iterable[Sample]:
        x, target, weight = rand(5, 4, 3), integers(4, 5, 3), rand(4).abs()
        call: Any = F.cross_entropy
        yield Sample(lambda x, t, w: call(x, t, w.detach(), ignore_index=1, label_smoothing=0.2), (x, target, weight))
        yield Sample(lambda x, t: call(x, t, reduction="none"), (x, target))
        yield Sample(lambda x, t: call(x, t.softmax(1)) + call(x[0], t[0].softmax(0)), (x, rand(5, 4, 3)))
        yield Sample(lambda x, t: call(x, t, reduction="sum"), (rand(4), integers(4)))


class NegativeLogLikelihood(ClassLoss):
    """Targets are classes; of each only the score of its class is read."""

    name = "nll_loss"

    class attributes(LossAttributes):
        ignore_index: Signed = -100
        has_count: bool = False

    def flops(self, op: Operator, extents: Extents) -> Any:
        return input_elements(op, extents) / extents["C"]

    def function(self, op: Operator) -> Any:
        ignored: Any = op.attributes.get("ignore_index", -100)
        return lambda x, t, weight, how: F.nll_loss(x, t, weight, ignore_index=ignored, reduction=how)

    def samples(self) -> Iterable[Sample]:
        x, target, weight = rand(5, 4, 3), integers(4, 5, 3), rand(4).abs()
        yield Sample(lambda x, t, w: F.nll_loss(x, t, w.detach(), ignore_index=1), (x, target, weight))
        yield Sample(lambda x, t: F.nll_loss(x, t), (rand(5, 4), integers(4, 5)))


for _kind in (ValidCount(), CrossEntropy(), NegativeLogLikelihood()):
    define(_kind)


def _class_loss(
    b: Builder, kind: str, x: Value, target: Value, weight: Value | None, reduction: int, ignore_index: int, **more: Any
) -> Value:
    """Cross-entropy or negative log-likelihood; the mean over valid targets divides by a count made beforehand."""
    probabilities = target.dtype.startswith(("float", "bfloat"))
    spatial = x.rank - 2
    batch = "" if x.rank == 1 else " ".join(["n", *(f"s{i}" for i in range(spatial))])
    classes = "C" if x.rank == 1 else " ".join(["n", "C", *(f"s{i}" for i in range(spatial))])
    operands, patterns = [x, target], [classes, classes if probabilities else batch]
    has_count = REDUCTIONS[reduction] == "mean" and not probabilities
    if has_count:
        operands.append(_valid_count(b, target, weight, ignore_index, x.dtype))
        patterns.append("")
    if weight is not None:
        operands.append(weight)
        patterns.append("C")
    attributes = {
        "reduction": REDUCTIONS[reduction], "ignore_index": ignore_index, **more,
        "has_count": has_count, "has_weight": weight is not None,
    }  # fmt: skip
    if kind == "cross_entropy":
        attributes["probabilities"] = probabilities
    pattern = f"{', '.join(patterns)} -> {batch if REDUCTIONS[reduction] == 'none' else ''}"
    return b.emit(kind, operands, b.shape, pattern, attributes, short=kind)


def _valid_count(b: Builder, target: Value, weight: Value | None, ignore_index: int, dtype: str) -> Value:
    operands = [target] if weight is None else [target, weight]
    axes = " ".join(f"n{i}" for i in range(target.rank))
    return b.emit(
        "valid_count", operands, (), f"{axes}{', C' if weight is not None else ''} -> ",
        {"ignore_index": ignore_index, "dtype": dtype}, dtype=dtype, short="valid_count", auxiliary=True,
    )  # fmt: skip


@rewrite("cross_entropy_loss")
def _cross_entropy(
    b: Builder, x: Value, target: Value, weight: Value | None = None, reduction: int = 1, ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Value:  # fmt: skip
    more = {"label_smoothing": label_smoothing}
    return _class_loss(b, "cross_entropy", x, target, weight, reduction, ignore_index, **more)


@rewrite("nll_loss_nd", "nll_loss", "nll_loss2d")
def _nll_loss(
    b: Builder, x: Value, target: Value, weight: Value | None = None, reduction: int = 1, ignore_index: int = -100
) -> Value:
    return _class_loss(b, "nll_loss", x, target, weight, reduction, ignore_index)


@rewrite("nll_loss_forward", "nll_loss2d_forward")
def _nll_loss_forward(b: Builder, x: Value, **call: Any) -> tuple[Value | None, ...]:
    return _class_loss(b, "nll_loss", x, **call), None
