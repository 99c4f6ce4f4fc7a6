"""Convolution and pooling: pieces of their windows, padded by exactly what the tensor's border cut off."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flexsearch.graph.kernels_base import (
    Kernel,
    KernelContext,
    Shapes,
    cut,
    extent,
    integers,
    register_kernel,
)
from flexsearch.graph.model import Operator
from flexsearch.graph.piece import Piece


def _padding(
    op: Operator, piece: Piece, spans: Sequence[int], strides: Sequence[int], limit: Sequence[int] | None = None
) -> tuple[list[int], list[int]]:
    """Padding of the spatial dimensions: what the aten operator can do itself, and what F.pad must add before.

    Aten pads both sides alike, so it takes over a dimension where that gives just the piece's windows (too much on the
    right is harmless if no further window fits); copying the operand for the other dimensions is the slow way.
    """
    box, output = piece.inputs[0], piece.outputs[0]
    assert box is not None
    rank, inside, outside = len(spans), [], []
    for i, (span, stride) in enumerate(zip(spans, strides, strict=True)):
        left, right = cut(op, piece, 0, len(box) - rank + i)
        length = extent(box)[len(box) - rank + i]
        count = extent(output)[len(output) - rank + i]
        fits = left >= right and (length + 2 * left - span) // stride + 1 == count
        if fits and (limit is None or left <= limit[i]):
            inside.append(left)
            outside.append((0, 0))
        else:
            inside.append(0)
            outside.append((left, right))
    flat = [side for pair in reversed(outside) for side in pair]  # F.pad counts dimensions from the last one
    return inside, flat if any(flat) else []


@register_kernel("conv1d", "conv2d", "conv3d")
def convolution(op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
    rank = len(shapes[1]) - 2
    strides, dilations = integers(op, "stride", rank, 1), integers(op, "dilation", rank, 1)
    call: Callable[..., Tensor] = (F.conv1d, F.conv2d, F.conv3d)[rank - 1]
    size = extent(piece.outputs[0])
    if piece.inputs[0] is None:  # all its windows lie in the padding

        def only_bias(x: None, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            zero = weight.new_zeros(size)
            return zero if bias is None else zero + bias.reshape(-1, *[1] * rank)

        return only_bias
    spans = [d * (k - 1) + 1 for d, k in zip(dilations, shapes[1][2:], strict=True)]
    inside, outside = _padding(op, piece, spans, strides)
    assert piece.inputs[1] is not None
    groups = extent(piece.inputs[0])[-rank - 1] // extent(piece.inputs[1])[1]

    def run(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if outside:
            x = F.pad(x, outside)
        return call(x, weight, bias, strides, inside, dilations, groups)

    return run


@register_kernel("max_pool1d", "max_pool2d", "max_pool3d")
def max_pool(op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
    rank, kernel, strides = _pool(op)
    dilations = integers(op, "dilation", rank, 1)
    call: Callable[..., Tensor] = (torch.max_pool1d, torch.max_pool2d, torch.max_pool3d)[rank - 1]
    spans = [d * (k - 1) + 1 for d, k in zip(dilations, kernel, strict=True)]
    inside, outside = _padding(op, piece, spans, strides, [k // 2 for k in kernel])

    def run(x: Tensor) -> Tensor:
        if outside:
            x = F.pad(x, outside, value=-torch.inf)
        return call(x, kernel, strides, inside, dilations)

    return run


@register_kernel("avg_pool1d", "avg_pool2d", "avg_pool3d")
def avg_pool(op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
    """The mean over all of the window, zeros included, times a factor per output element where the divisor differs."""
    rank, kernel, strides = _pool(op)
    call: Callable[..., Tensor] = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[rank - 1]
    inside, outside = _padding(op, piece, kernel, strides, [k // 2 for k in kernel])
    factor = _divisor_factor(op, piece, shapes[0][-rank:], kernel, strides)
    cache: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def run(x: Tensor) -> Tensor:
        if outside:
            x = F.pad(x, outside)
        y = call(x, kernel, strides, inside)
        if factor is None:
            return y
        key = (y.dtype, y.device)
        if key not in cache:
            cache[key] = factor.to(y.device, y.dtype)
        return y * cache[key]

    return run


def _pool(op: Operator) -> tuple[int, list[int], list[int]]:
    rank = int(op.kind[-2])
    kernel = integers(op, "kernel_size", rank, 1)
    return rank, kernel, integers(op, "stride", rank, 0) if op.attributes.get("stride") else kernel


def _divisor_factor(
    op: Operator, piece: Piece, sizes: Sequence[int], kernel: Sequence[int], strides: Sequence[int]
) -> Tensor | None:
    """Full window size over the operator's own divisor, per output element of the piece; None if it is 1 everywhere."""
    override: Any = op.attributes.get("divisor_override")
    if override:
        return None if override == prod(kernel) else torch.tensor(prod(kernel) / override, dtype=torch.float64)
    rank = len(kernel)
    padding = integers(op, "padding", rank, 0)
    include = bool(op.attributes.get("count_include_pad", True))
    factor = torch.ones(()).double()
    for size, k, s, p, (first, last) in zip(sizes, kernel, strides, padding, piece.outputs[0][-rank:], strict=True):
        start = torch.arange(first, last) * s - p
        end = (start + k).clamp(max=size + p)  # a window of ceil_mode may reach beyond the padding: not counted
        count = end - start if include else end.clamp(max=size) - start.clamp(min=0)
        factor = factor.unsqueeze(-1) * (k / count.double())
    return None if bool((factor == 1).all()) else factor


@register_kernel("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_max_pool1d", "adaptive_max_pool2d")
def adaptive_pool(op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
    rank = int(op.kind[-2])
    call: Callable[..., Tensor] = getattr(F, op.kind)
    size = list(extent(piece.outputs[0])[-rank:])
    return lambda x: call(x, size)
