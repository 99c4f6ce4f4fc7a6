"""Attention of values with fewer features than queries, on a CPU.

The kernel that saves no scores takes values as wide as queries: zeros are put behind them. What is kept for the
backward pass has none, which is what ``saved_tensors`` says; it puts them there again. The kernel is private to
PyTorch; where a version has none, callers put the zeros there themselves.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

_NAME = "_scaled_dot_product_flash_attention_for_cpu"


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
        differentiate = getattr(torch.ops.aten, f"{_NAME}_backward")
        dq, dk, dv = differentiate(
            _widened(grad, q), q, k, _widened(v, q), _widened(out, q), rows, 0.0, ctx.causal, attn_mask=mask,
            scale=ctx.scale,
        )  # fmt: skip
        return dq, dk, _narrowed(dv, v.shape[-1]), None, None, None
