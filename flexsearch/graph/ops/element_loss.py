"""Losses of corresponding elements; pieces contribute as in ``loss``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from flexsearch.graph.model import Operator
from flexsearch.graph.ops.base import (
    INPUTS,
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
from flexsearch.graph.ops.builder import Builder, broadcast, broadcast_shapes
from flexsearch.graph.ops.lazy import F, torch
from flexsearch.graph.ops.local import inputs_count
from flexsearch.graph.ops.loss import REDUCTIONS, LossAttributes
from flexsearch.graph.ops.shape import expand
from flexsearch.graph.ops.value import Value
from flexsearch.graph.piece import Piece

if TYPE_CHECKING:
    from torch import Tensor


class ElementLoss(OperatorKind):
    """Of corresponding elements: their mean (over the global count), their sum, or themselves."""

    inputs = (2, 2)
    traffic = "loss"
    saved = INPUTS
    cost: float = 5.0
    """FLOPs of an element."""
    options: tuple[str, ...] = ()
    """Attributes that the function of PyTorch takes."""

    class attributes(LossAttributes):
        has_pos_weight: bool = False
        log_target: bool = False
        beta: Annotated[float, Field(ge=0.0, le=1e300)] = 1.0
        delta: Annotated[float, Field(gt=0.0, le=1e300)] = 1.0

    def check(self, op: Operator, attributes: Any, shapes: tuple[tuple[int, ...], ...]) -> str:
        extra = attributes.has_weight + attributes.has_pos_weight
        fits = len(op.inputs) == 2 + extra
        return "" if fits else f"{op.kind} has {len(op.inputs)} inputs, its attributes speak of {2 + extra}"

    def flops(self, op: Operator, extents: Extents) -> Any:
        return self.cost * input_elements(op, extents)

    def function(self) -> Any:
        """That of PyTorch."""
        return getattr(F, self.name)

    def kernel(self, op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
        call = self.function()
        how = "none" if op.attributes.get("reduction") == "none" else "sum"
        count = inputs_count(op)
        mean = op.attributes.get("reduction", "mean") == "mean"
        options: Any = {k: v for k, v in op.attributes.items() if k in self.options}
        listed = [name for name in ("weight", "pos_weight") if op.attributes.get(f"has_{name}")]

        def run(x: Tensor, target: Tensor, *others: Tensor) -> Tensor:
            if x.shape != target.shape:
                x, target = torch.broadcast_tensors(x, target)  # type: ignore[no-untyped-call]
            y: Tensor = call(x, target, reduction=how, **options, **dict(zip(listed, others, strict=True)))
            return y / count if mean else y

        return run

    def samples(self) -> Iterable[Sample]:
        x, target, call = rand(4, 6), rand(4, 6).sigmoid(), self.function()
        for how in REDUCTIONS:
            yield Sample(lambda x, t, how=how: call(x.sigmoid(), t, reduction=how), (x, target))


class SquaredError(ElementLoss):
    name = "mse_loss"
    cost = 3.0


class AbsoluteError(ElementLoss):
    name = "l1_loss"
    cost = 3.0


class SmoothAbsoluteError(ElementLoss):
    name = "smooth_l1_loss"
    options = ("beta",)

    def samples(self) -> Iterable[Sample]:
        yield Sample(lambda x, t: F.smooth_l1_loss(x, t, beta=0.5), (rand(4, 6), rand(4, 6)))


class Huber(ElementLoss):
    name = "huber_loss"
    options = ("delta",)

    def samples(self) -> Iterable[Sample]:
        yield Sample(lambda x, t: F.huber_loss(x, t, delta=0.5), (rand(4, 6), rand(4, 6)))


class Divergence(ElementLoss):
    """Of Kullback and Leibler."""

    name = "kl_div"
    cost = 4.0
    options = ("log_target",)

    def samples(self) -> Iterable[Sample]:
        x, target = rand(4, 6), rand(4, 6)
        yield Sample(lambda x, t: F.kl_div(x.log_softmax(1), t.softmax(1), reduction="batchmean"), (x, target))
        yield Sample(lambda x, t: F.kl_div(x, t.log_softmax(1), reduction="sum", log_target=True), (x, target))


class BinaryCrossEntropy(ElementLoss):
    name = "bce_loss"
    inputs = (2, 3)

    def function(self) -> Any:
        return F.binary_cross_entropy

    def samples(self) -> Iterable[Sample]:
        yield from super().samples()
        x, target, weight, call = rand(4, 6), rand(4, 6).sigmoid(), rand(6).abs(), self.function()
        yield Sample(lambda x, t, w: call(x.sigmoid(), t, weight=w.detach()), (x, target, weight))


class BinaryCrossEntropyOfLogits(ElementLoss):
    name = "bce_with_logits"
    inputs = (2, 4)
    cost = 8.0

    def function(self) -> Any:
        return F.binary_cross_entropy_with_logits

    def samples(self) -> Iterable[Sample]:
        yield from super().samples()
        x, target, weight, call = rand(4, 6), rand(4, 6).sigmoid(), rand(6).abs(), self.function()
        yield Sample(lambda x, t, w: call(x, t, weight=w.detach(), pos_weight=w.detach() + 1), (x, target, weight))


class SoftMargin(ElementLoss):
    """``log(1 + exp(-target * x))``."""

    name = "soft_margin_loss"

    def samples(self) -> Iterable[Sample]:
        x, target = rand(4, 6), integers(2, 4, 6) * 2 - 1
        for how in REDUCTIONS:
            yield Sample(lambda x, t, how=how: F.soft_margin_loss(x, t, reduction=how), (x, target))


for _kind in (
    SquaredError(), AbsoluteError(), SmoothAbsoluteError(), Huber(), Divergence(), BinaryCrossEntropy(),
    BinaryCrossEntropyOfLogits(), SoftMargin(),
):  # fmt: skip
    define(_kind)


_ELEMENT_LOSSES: Mapping[str, str] = {
    "mse_loss": "mse_loss",
    "l1_loss": "l1_loss",
    "smooth_l1_loss": "smooth_l1_loss",
    "huber_loss": "huber_loss",
    "binary_cross_entropy": "bce_loss",
    "binary_cross_entropy_with_logits": "bce_with_logits",
    "kl_div": "kl_div",
    "soft_margin_loss": "soft_margin_loss",
}


@rewrite(*_ELEMENT_LOSSES)
def _element_loss(b: Builder, x: Value, target: Value, reduction: int = 1, **options: Any) -> Value:
    kind = _ELEMENT_LOSSES[b.target.split(".")[1]]
    shape = broadcast_shapes(x.shape, target.shape)
    extra = [options.pop(name, None) for name in ("weight", "pos_weight")]
    operands = [expand(b, v, shape) for v in (x, target)] + [v for v in extra if v is not None]
    attributes: dict[str, Any] = {"reduction": REDUCTIONS[reduction], **options}
    if kind.startswith("bce"):
        attributes |= {"has_weight": extra[0] is not None, "has_pos_weight": extra[1] is not None}
    elementwise = broadcast(operands, shape)
    pattern = elementwise if reduction == 0 else f"{elementwise.split(' -> ')[0]} -> "
    return b.emit(kind, operands, b.shape, pattern, attributes, short=kind)
