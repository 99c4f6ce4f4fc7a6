"""The norm of the whole model's gradient, of which every rank holds pieces."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flexsearch.errors import RuntimeFailure
from flexsearch.quantities import is_finite
from flexsearch.runtime.faults import with_all


def check_norm(max_norm: Any, kind: Any) -> tuple[float, float]:
    """The two as numbers. Raises RuntimeFailure for what no gradient can be clipped to, or by."""
    if isinstance(max_norm, Tensor) and max_norm.numel() == 1:
        max_norm = max_norm.item()
    if not ((is_finite(max_norm) or max_norm == inf) and max_norm >= 0):
        raise RuntimeFailure(f"a gradient cannot be clipped to max_norm={max_norm!r}", "Give a number from 0.")
    kind = inf if kind == "inf" else kind  # as PyTorch takes it
    if not ((is_finite(kind) or kind == inf) and kind > 0):
        raise RuntimeFailure(
            f"norm_type={kind!r} is no norm of a gradient",
            "Give a number above 0, or math.inf for the largest element.",
        )
    return float(max_norm), float(kind)


def total_norm(own: Iterable[Tensor], kind: float, device: torch.device) -> Tensor:
    """The ``kind``-norm of all ranks' tensors together, a scalar in float64. All ranks must call it."""
    tensors = [tensor for tensor in own if tensor.numel()]
    norms = [torch.linalg.vector_norm(tensor, kind).to(device, torch.float64) for tensor in tensors]
    values = torch.stack(norms) if norms else torch.zeros(1, dtype=torch.float64, device=device)
    largest = kind == inf
    total = values.max() if largest else values.pow(kind).sum()
    with with_all("the norm of the gradient"):
        dist.all_reduce(total, op=dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM)
    return total if largest else total.pow(1 / kind)


def scale_to(gradients: Sequence[Tensor], total: Tensor, max_norm: float, error_if_nonfinite: bool) -> None:
    """Scale gradients by ``max_norm / total`` if that is below 1, as ``torch.nn.utils.clip_grad_norm_`` does. Raises
    RuntimeFailure if ``total`` is not finite and that is an error."""
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeFailure(
            f"the norm of the gradient is {total.item()}, so it cannot be clipped",
            "Lower the learning rate, or pass error_if_nonfinite=False to go on.",
        )
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for gradient in gradients:
        gradient.mul_(factor.to(gradient.device, gradient.dtype))
