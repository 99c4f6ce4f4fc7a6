"""Attention of values with fewer features than queries, on a CPU.

The kernel that saves no scores takes values as wide as queries: zeros are put behind them. What is kept for the
backward pass has none, which is what ``saved_tensors`` says; it puts them there again. Samples (of one sample: heads)
are computed part by part, so that only a part has zeros at a time (``zeros``). The kernel is private to PyTorch; where
a version has none, callers put the zeros there themselves.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from flexsearch.graph.ops.zeros import parts_of

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


def _parts(q: Tensor) -> list[tuple[slice, ...]]:
    """Which samples or heads are computed together: enough for all threads."""
    dimension = int(q.shape[0] == 1)
    count = min(parts_of(q.nbytes), q.shape[dimension], q.shape[0] * q.shape[1] // torch.get_num_threads())
    size = -(-q.shape[dimension] // (count if count > 2 else 1))
    rows = (slice(k, k + size) for k in range(0, q.shape[dimension], size))
    return [(slice(None),) * dimension + (row,) for row in rows]


def _part_of(mask: Tensor | None, where: tuple[slice, ...]) -> Tensor | None:
    """A mask for a part, which may be one for all."""
    if mask is None or mask.dim() == 2 or mask.shape[len(where) - 1] == 1:
        return mask
    return mask[where]


def _room(x: Tensor) -> Tensor:
    """Memory for as much as ``x``, which lies as (b, positions, h, features)."""
    b, h, positions, features = x.shape
    return x.new_empty(b, positions, h, features).transpose(1, 2)


def _write(whole: Iterable[Tensor], where: tuple[slice, ...], parts: Iterable[Tensor]) -> None:
    """Put the first features of parts where they belong."""
    for tensor, part in zip(whole, parts, strict=True):
        tensor[where] = part[..., : tensor.shape[-1]]


class _Narrow(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None
    ) -> Any:  # fmt: skip
        attend, features = getattr(torch.ops.aten, _NAME), v.shape[-1]
        out: Any = None
        rows: list[Tensor] = []
        for at in (parts := _parts(q)):
            own = {"attn_mask": _part_of(mask, at), "scale": scale}
            part, sums = attend(q[at], k[at], _widened(v[at], q), 0.0, causal, **own)
            out = _room(q[..., :features]) if out is None else out
            out[at] = part[..., :features]
            rows.append(sums)
            del part  # before the next one is there
        ctx.save_for_backward(q, k, v, mask, out, *rows)
        ctx.causal, ctx.scale, ctx.parts = causal, scale, parts
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, mask, out, *rows = ctx.saved_tensors
        differentiate = getattr(torch.ops.aten, f"{_NAME}_backward")
        whole = None if len(rows) == 1 else tuple(map(_room, (q, k, v)))
        for at, sums in zip(ctx.parts, rows, strict=True):
            gradients = differentiate(
                _widened(grad[at], q), q[at], k[at], _widened(v[at], q), _widened(out[at], q), sums, 0.0, ctx.causal,
                attn_mask=_part_of(mask, at), scale=ctx.scale,
            )  # fmt: skip
            if whole is None:
                return gradients[0], gradients[1], _room(v).copy_(gradients[2][..., : v.shape[-1]]), None, None, None
            _write(whole, at, gradients)
            del gradients  # before the next part's are there
        return *(whole or ()), None, None, None
