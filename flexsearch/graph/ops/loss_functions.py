"""Losses as functions of autograd. Imported where a kernel is made, because it needs torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

PARTS: Final = {"cpu": 16, "cuda": 8}
"""Scores are read in so many parts, by kind of device: a GPU's host has to launch each."""
LEAST_BYTES: Final = {"cpu": 1 << 18, "cuda": 1 << 25}
"""A part has at least so many: fewer are not worth the calls."""
WORTH_BYTES: Final = {"cpu": 1 << 18, "cuda": 1 << 20}
"""Least scores for which their memory is worth the time: PyTorch's own function takes fewer calls, and half as long
where scores stay in the caches (``docs/runtime.md``)."""


class ClassLosses(torch.autograd.Function):
    """Cross-entropy of each row of scores (n, C) and a class (n,), computed in ``dtype``; 0 for the class ``ignored``.

    PyTorch's own keeps the logarithms of the probabilities, has their gradient beside them in the backward pass, and
    casts all scores of half precision: with a large vocabulary these are the largest tensors of a step. Here the scores
    themselves are kept, and what is made of them is made anew, part by part (as in Hsu et al., Liger Kernel, 2024).
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor, classes: Tensor, ignored: int, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(scores, classes)
        ctx.ignored, ctx.dtype = ignored, dtype
        losses = []
        for a, b in _parts(scores, dtype):
            logarithms = torch.log_softmax(scores[a:b], 1, dtype=dtype)
            losses.append(F.nll_loss(logarithms, classes[a:b], ignore_index=ignored, reduction="none"))
        return losses[0] if len(losses) == 1 else torch.cat(losses)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        scores, classes = ctx.saved_tensors
        score_gradient = torch.empty_like(scores, memory_format=torch.contiguous_format)
        out = classes == ctx.ignored
        gradient, there = gradient.masked_fill(out, 0)[:, None], classes.masked_fill(out, 0)[:, None]
        less = -gradient
        for a, b in _parts(scores, ctx.dtype):
            part = _probabilities(scores[a:b], score_gradient[a:b], ctx.dtype)
            part.mul_(gradient[a:b]).scatter_add_(1, there[a:b], less[a:b])
            if part.dtype != score_gradient.dtype:
                score_gradient[a:b] = part
        return score_gradient, None, None, None


def _parts(scores: Tensor, dtype: torch.dtype) -> Iterator[tuple[int, int]]:
    """First rows of parts, and those behind them."""
    each = max(1, scores.shape[1] * dtype.itemsize)
    kind = scores.device.type
    rows = max(-(-len(scores) // PARTS[kind]), LEAST_BYTES[kind] // each, 1)
    for first in range(0, len(scores), rows):
        yield first, min(first + rows, len(scores))


def _probabilities(scores: Tensor, result: Tensor, dtype: torch.dtype) -> Tensor:
    """Of rows of scores, in ``result`` if that has the type."""
    if result.dtype != dtype:
        return torch.softmax(scores, 1, dtype=dtype)
    probabilities: Tensor = torch.ops.aten._softmax.out(scores, 1, False, out=result)  # torch.softmax would copy
    return probabilities
