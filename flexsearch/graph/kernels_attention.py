"""Scaled dot product attention of a piece of the batch, the heads and the query positions."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flexsearch.graph.kernels_base import Kernel, KernelContext, Shapes, register_kernel
from flexsearch.graph.kernels_random import keep_mask
from flexsearch.graph.model import Operator
from flexsearch.graph.piece import Piece


@register_kernel("attention")
def attention(op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
    """Causal rows ``low..high`` of the queries see keys up to ``high`` only: the rest is cut off before the product."""
    box = piece.inputs[0]
    assert box is not None
    low, high = box[-2]
    keys = shapes[1][-2]
    causal, grouped = bool(op.attributes.get("causal")), bool(op.attributes.get("grouped"))
    scale: Any = op.attributes.get("scale")
    p = float(str(op.attributes.get("dropout") or 0))
    seen = min(high, keys) if causal else keys
    triangle = causal and low < seen - 1  # later rows see all keys
    simple = triangle and low == 0
    cache: dict[torch.device, Tensor] = {}

    def visible(device: torch.device) -> Tensor:
        """Bool (queries, keys): what the causal rows may look at."""
        if device not in cache:
            cache[device] = torch.ones(high - low, seen, dtype=torch.bool, device=device).tril(low)
        return cache[device]

    def combined(q: Tensor, mask: Tensor | None) -> Tensor | None:
        """The mask operand and the causal one together, over the keys that are left."""
        if mask is not None and mask.shape[-1] != 1:
            mask = mask[..., :seen]
        if not triangle:
            return mask
        rows = visible(q.device)
        if mask is None:
            return rows
        return mask & rows if mask.dtype == torch.bool else mask.masked_fill(~rows, -torch.inf)

    def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        if seen < keys:
            k, v = k[..., :seen, :], v[..., :seen, :]
        if simple and mask is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
        mask = combined(q, mask)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=grouped)

    if p <= 0:
        return run
    salt = int(str(op.attributes.get("salt", 0)))
    rows = [prod(op.sizes[a] for a in d.axes) for d in op.access.outputs[0].dimensions[:-1]]
    shape, region = (*rows, keys), (*piece.outputs[0][:-1], (0, seen))

    def run_dropping(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """The probabilities written out, for only so can their mask be that of the whole operator."""
        k, v = k[..., :seen, :], v[..., :seen, :]
        if grouped:
            k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
        scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
        mask = combined(q, mask)
        blind = None
        if mask is not None and mask.dtype == torch.bool:
            # a finite number, as a row that sees nothing must give 0, and its gradient too
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
            blind = ~mask.any(-1, keepdim=True)
        elif mask is not None:
            scores = scores + mask
        weights = scores.softmax(-1)
        if blind is not None:
            weights = weights.masked_fill(blind, 0)
        y: Tensor = weights * keep_mask(shape, region, p, context, salt, q.device) @ v
        return y / (1 - p)

    return run_dropping
