"""Attention with dropped probabilities, in blocks of queries that the backward computes again.

Of the scores only one block is in memory at a time; inputs, output and one number for each row are kept for the
backward, as FlashAttention does (Dao et al., 2022). The mask of what is dropped is drawn again with the block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

BLOCK = 1 << 23
"""Scores of a block, about."""
ROWS = 64
"""Least queries of a block: fewer would read all keys again for too little work."""


@dataclass(frozen=True)
class Settings:
    """``scale`` of the scores (None: one over the root of the features); share ``p`` of probabilities that are dropped;
    ``causal``: position of the first query if queries see no later keys; ``keep(part, seen, device)``: which are not
    dropped, Bool, of ``part`` of the dimensions before the keys and the first ``seen`` keys."""

    scale: float | None
    p: float
    causal: int | None
    keep: Callable[[tuple[slice, ...], int, torch.device], Tensor]

    @property
    def factor(self) -> float:
        """What probabilities that are not dropped are multiplied by."""
        return 1 / (1 - self.p) if self.p < 1 else 0.0


def blockwise_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, settings: Settings) -> Tensor:
    """``dropout(softmax(q @ k.mT * scale + mask)) @ v``.

    Shapes: q (..., Q, E), k (..., K, E), v (..., K, V) with the same leading dimensions; the mask, bool or added to the
    scores, has as many dimensions and broadcasts to (..., Q, K). Rows that see nothing give 0.
    """
    result: Tensor = _Blockwise.apply(q, k, v, mask, settings)  # type: ignore[no-untyped-call]
    return result


def _blocks(q: Tensor, keys: int, settings: Settings) -> Iterator[tuple[tuple[slice, ...], int]]:
    """Parts of q's dimensions but the last, and how many keys each of them sees."""
    *lead, queries = q.shape[:-1]
    total = keys
    for length in lead:
        total *= length
    rows = min(queries, max(ROWS, BLOCK // max(total, 1)))
    step = max(1, BLOCK // max(1, rows * (total // max(1, lead[0])))) if lead else 1
    outer = [[slice(i, min(i + step, lead[0])) for i in range(0, lead[0], step)]] if lead else []
    inner = [[slice(0, length)] for length in lead[1:]]
    for start in range(0, queries, rows):
        stop = min(start + rows, queries)
        seen = keys if settings.causal is None else min(keys, settings.causal + stop)
        for head in product(*outer, *inner):
            yield (*head, slice(start, stop)), seen


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, first: int, settings: Settings) -> Tensor:
    """Scores of a block, whose first query is ``first``, at least in float32; -inf where it may not look."""
    scale = q.shape[-1] ** -0.5 if settings.scale is None else settings.scale
    scores = (q @ k.mT).to(torch.promote_types(q.dtype, torch.float32)) * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    if settings.causal is not None and settings.causal + first < k.shape[-2] - 1:
        rows = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril(settings.causal + first)
        scores = scores.masked_fill(~rows, -torch.inf)
    return scores


def _part(mask: Tensor | None, part: tuple[slice, ...], seen: int) -> tuple[slice, ...]:
    """Index of a block in the mask, whose dimensions may be 1."""
    if mask is None:
        return ()
    places = (*part, slice(0, seen))
    return tuple(slice(None) if n == 1 else place for n, place in zip(mask.shape, places, strict=True))


class _Blockwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, settings: Settings) -> Tensor:
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
        total = torch.empty(q.shape[:-1], dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
        for part, seen in _blocks(q, k.shape[-2], settings):
            near, keys = part[:-1], slice(0, seen)
            block = None if mask is None else mask[_part(mask, part, seen)]
            scores = _scores(q[part], k[(*near, keys)], block, part[-1].start, settings)
            rows = scores.logsumexp(-1)
            # Such a number, not -inf, makes the probabilities of a row that sees nothing 0 and not nan.
            total[part] = rows = rows.masked_fill(rows == -torch.inf, torch.inf)
            kept = (scores - rows[..., None]).exp_() * settings.keep(part, seen, q.device)
            out[part] = (kept.to(v.dtype) @ v[(*near, keys)]) * settings.factor
        ctx.save_for_backward(q, k, v, mask, out, total)
        ctx.settings = settings
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, mask, out, total = ctx.saved_tensors
        settings: Settings = ctx.settings
        scale = q.shape[-1] ** -0.5 if settings.scale is None else settings.scale
        dq, dk, dv = torch.zeros_like(q), *(torch.zeros(x.shape, dtype=total.dtype, device=q.device) for x in (k, v))
        dmask = torch.zeros_like(mask) if mask is not None and ctx.needs_input_grad[3] else None
        for part, seen in _blocks(q, k.shape[-2], settings):
            keys, place = (*part[:-1], slice(0, seen)), _part(mask, part, seen)
            scores = _scores(q[part], k[keys], None if mask is None else mask[place], part[-1].start, settings)
            weights = (scores - total[part][..., None]).exp_()
            kept = settings.keep(part, seen, q.device).to(weights.dtype) * settings.factor
            dv[keys] += (weights * kept).to(v.dtype).mT @ grad[part]
            inner = (grad[part].to(total.dtype) * out[part]).sum(-1, keepdim=True)
            dscores = weights * ((grad[part] @ v[keys].mT) * kept - inner)
            if dmask is not None:
                dmask[place] += dscores.sum_to_size(dmask[place].shape).to(dmask.dtype)
            dscores = (dscores * scale).to(q.dtype)
            dq[part] = dscores @ k[keys]
            dk[keys] += dscores.mT @ q[part]
        return dq, dk.to(k.dtype), dv.to(v.dtype), dmask, None


__all__ = ["BLOCK", "Settings", "blockwise_attention"]
