"""Cross-entropy of classes, whose backward pass makes one tensor as large as the scores.

PyTorch's makes two: the gradient of the log-probabilities, which is zero but for one of each row, and that of the
scores. With many classes they are the largest of a step.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def class_cross_entropy(scores: Tensor, target: Tensor, ignored: int, summed: bool) -> Tensor:
    """``-log_softmax(scores)`` at the target classes, 0 where they are ``ignored``; their sum if ``summed``. Shapes:
    scores (C) or (n, C, ...), target the same without classes."""
    result: Tensor = _CrossEntropy.apply(scores, target, ignored, summed)  # type: ignore[no-untyped-call]
    return result


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, target: Tensor, ignored: int, summed: bool) -> Tensor:
        logarithms = scores.log_softmax(min(1, scores.dim() - 1))
        ctx.save_for_backward(logarithms, target)
        ctx.ignored = ignored
        how = "sum" if summed else "none"
        return F.nll_loss(logarithms, target, ignore_index=ignored, reduction=how)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logarithms, target = ctx.saved_tensors
        dimension = min(1, logarithms.dim() - 1)
        counts = target != ctx.ignored
        weight = (grad * counts).to(logarithms.dtype).unsqueeze(dimension)
        result = logarithms.exp().mul_(weight)
        place = target.masked_fill(~counts, 0).unsqueeze(dimension)
        return result.scatter_add_(dimension, place, -weight), None, None, None


__all__ = ["class_cross_entropy"]
