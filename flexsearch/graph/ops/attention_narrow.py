"""Attention of values with fewer features than queries, on a CPU.

The kernel that saves no scores takes values as wide as queries: zeros are put behind them. What is kept for the
backward pass has none, which is what ``saved_tensors`` says; it puts them there again. The kernel is private to
PyTorch; where a version has none, callers put the zeros there themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

_NAME = "_scaled_dot_product_flash_attention_for_cpu"
_PARTS = 4
"""Of the batch, for each of which the backward pass puts the zeros there: all of them would be as much again as it
reads."""


def fits(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> bool:
    """Whether ``narrow_attention`` serves a call: four dimensions, no broadcasting, a mask without gradient."""
    plain = mask is None or (mask.dim() in (2, 4) and not mask.requires_grad)
    lie = all(x.dim() == 4 and x.stride(-1) == 1 for x in (q, k, v))
    alike = q.shape[:2] == k.shape[:2] == v.shape[:2] and 0 not in (*q.shape, *k.shape)
    return hasattr(torch.ops.aten, _NAME) and plain and lie and alike


def narrow_attention(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:  # fmt: skip
    """``softmax(q @ k.mT * scale + mask) @ v``. Shapes: q (b, h, Q, E), k (b, h, K, E), v (b, h, K, V) with V < E; the
    result (b, h, Q, V) lies as (b, Q, h, V)."""
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill_(~attn_mask, -torch.inf)
    result: Tensor = _Narrow.apply(q, k, v, attn_mask, is_causal, scale)  # type: ignore[no-untyped-call]
    return result


def _widened(x: Tensor, q: Tensor) -> Tensor:
    return F.pad(x, (0, q.shape[-1] - x.shape[-1]))


def _narrowed(x: Tensor, features: int) -> Tensor:
    """The first features, in memory of their own that lies as (b, positions, h, features)."""
    return x.transpose(1, 2)[..., :features].contiguous().transpose(1, 2)


class _Narrow(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None
    ) -> Tensor:  # fmt: skip
        attend = getattr(torch.ops.aten, _NAME)
        out, rows = attend(q, k, _widened(v, q), 0.0, causal, attn_mask=mask, scale=scale)
        out = _narrowed(out, v.shape[-1])
        ctx.save_for_backward(q, k, v, mask, out, rows)
        ctx.causal, ctx.scale = causal, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, mask, out, rows = ctx.saved_tensors
        made = [_like_heads(x) for x in (q, k, v)]
        bounds = [len(q) * k // _PARTS for k in range(_PARTS + 1)]
        for at in (slice(low, high) for low, high in pairwise(bounds) if low < high):
            own = mask[at] if mask is not None and mask.dim() == 4 and len(mask) > 1 else mask
            wide = _gradients(grad[at], q[at], k[at], v[at], out[at], rows[at], own, ctx.causal, ctx.scale)
            for whole, gradient in zip(made, wide, strict=True):
                whole[at].copy_(gradient[..., : whole.shape[-1]])
        return *made, None, None, None


def _like_heads(x: Tensor) -> Tensor:
    """Memory for the gradient of ``x``, which lies as (b, positions, h, features)."""
    return torch.empty_like(x.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)


def _gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, rows: Tensor, mask: Tensor | None, causal: bool,
    scale: float | None,
) -> Sequence[Tensor]:  # fmt: skip
    """Those of q, k and, with zeros behind it, v."""
    differentiate = getattr(torch.ops.aten, f"{_NAME}_backward")
    wide = _widened(grad, q), q, k, _widened(v, q), _widened(out, q), rows
    made: Sequence[Tensor] = differentiate(*wide, 0.0, causal, attn_mask=mask, scale=scale)
    return made
