"""Losses: a piece's contribution is its local sum over the global count, so contributions just add up."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flexsearch.graph.kernels_base import Kernel, KernelContext, Shapes, dtype_of, inputs_count, register_kernel
from flexsearch.graph.model import Operator
from flexsearch.graph.piece import Piece


@register_kernel("valid_count")
def valid_count(op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
    """Number (or class weight) of the targets that count: the divisor of a mean loss."""
    ignored: Any = op.attributes.get("ignore_index", -100)
    dtype = dtype_of(str(op.attributes.get("dtype", "float32")))

    def run(target: Tensor, weight: Tensor | None = None) -> Tensor:
        kept: Tensor = target.ne(ignored)
        if weight is None:
            return kept.sum().to(dtype)
        return torch.where(kept, weight[torch.where(kept, target, 0)], 0).sum().to(dtype)

    return run


@register_kernel("cross_entropy")
def cross_entropy(op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
    smoothing: Any = op.attributes.get("label_smoothing") or 0.0
    if op.attributes.get("probabilities"):
        return _class_loss(op, shapes, lambda x, t, weight, how: F.cross_entropy(
            x, t, weight, reduction=how, label_smoothing=smoothing))  # fmt: skip
    ignored: Any = op.attributes.get("ignore_index", -100)
    return _class_loss(op, shapes, lambda x, t, weight, how: F.cross_entropy(
        x, t, weight, ignore_index=ignored, reduction=how, label_smoothing=smoothing))  # fmt: skip


@register_kernel("nll_loss")
def nll_loss(op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
    ignored: Any = op.attributes.get("ignore_index", -100)
    return _class_loss(
        op, shapes, lambda x, t, weight, how: F.nll_loss(x, t, weight, ignore_index=ignored, reduction=how)
    )


def _class_loss(op: Operator, shapes: Shapes, loss: Any) -> Kernel:
    """``loss(input, target, weight, reduction)``; further operands are the count (a scalar) and the class weights."""
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


_ELEMENTWISE: dict[str, Any] = {
    "mse_loss": F.mse_loss,
    "l1_loss": F.l1_loss,
    "smooth_l1_loss": F.smooth_l1_loss,
    "huber_loss": F.huber_loss,
    "kl_div": F.kl_div,
    "bce_loss": F.binary_cross_entropy,
    "bce_with_logits": F.binary_cross_entropy_with_logits,
}


@register_kernel(*_ELEMENTWISE)
def elementwise_loss(op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
    """Attributes besides ``reduction``: the loss's own (``beta``, ``delta``, ``log_target``), and ``has_weight`` and
    ``has_pos_weight``: which operands follow the target."""
    call = _ELEMENTWISE[op.kind]
    how = "none" if op.attributes.get("reduction") == "none" else "sum"
    count = inputs_count(op)
    mean = op.attributes.get("reduction", "mean") == "mean"
    options: Any = {k: v for k, v in op.attributes.items() if k in ("beta", "delta", "log_target")}
    listed = [name for name in ("weight", "pos_weight") if op.attributes.get(f"has_{name}")]

    def run(x: Tensor, target: Tensor, *others: Tensor) -> Tensor:
        if x.shape != target.shape:
            x, target = torch.broadcast_tensors(x, target)  # type: ignore[no-untyped-call]
        y: Tensor = call(x, target, reduction=how, **options, **dict(zip(listed, others, strict=True)))
        return y / count if mean else y

    return run
