"""Random numbers that are a function of the element's place in the whole tensor, so that any split draws the same."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flexsearch.graph.kernels_base import Kernel, KernelContext, Shapes, register_kernel
from flexsearch.graph.model import Operator
from flexsearch.graph.notation import Box
from flexsearch.graph.piece import Piece

_WORD = (1 << 32) - 1


def _signed(value: int) -> int:
    """The int32 with the low 32 bits of ``value``."""
    return ((value + (1 << 31)) & _WORD) - (1 << 31)


# A Weyl sequence, then the two rounds of Chris Wellons' hash "lowbias32" (github.com/skeeto/hash-prospector), less the
# last shift: only the high bits are compared with the threshold.
_WEYL, _FIRST, _SECOND = _signed(0x9E3779B1), _signed(0x7FEB352D), _signed(0x846CA68B)
_HIGH = 0xC2B2AE3D  # spreads tensors of more than 2**32 elements


def _key(*words: int) -> tuple[int, int]:
    """Two 32-bit keys from integers, by splitmix64."""
    state = 0
    for word in words:
        state = (state ^ word) + 0x9E3779B97F4A7C15 & (1 << 64) - 1
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & (1 << 64) - 1
        state = (state ^ state >> 27) * 0x94D049BB133111EB & (1 << 64) - 1
        state ^= state >> 31
    return _signed(state), _signed(state >> 32)


def keep_mask(
    shape: tuple[int, ...], box: Box, p: float, context: KernelContext, salt: int, device: torch.device
) -> Tensor:
    """Bool tensor of the region ``box`` of a tensor of ``shape``: each element is kept with probability 1 - p."""
    return _random_bits(shape, box, context, salt, device) >= _signed(round(p * (1 << 32)) - (1 << 31))


def _random_bits(shape: tuple[int, ...], box: Box, context: KernelContext, salt: int, device: torch.device) -> Tensor:
    """Random int32 numbers for the region ``box`` of a tensor of ``shape``; their high bits are the good ones.

    A counter-based generator: a number depends on (seed, step, salt) and the element's row-major index alone.
    """
    first, second = _key(context.seed, context.step, salt)
    strides = [1] * len(shape)
    for i in reversed(range(len(shape) - 1)):
        strides[i] = strides[i + 1] * shape[i + 1]
    # The index is made as rows + columns in one pass; columns take in as many dimensions as lie contiguous.
    split, columns, start = len(shape), 1, 0
    while split > 0 and columns < 1024 and (split == len(shape) or columns == strides[split - 1]):
        split -= 1
        low, high = box[split]
        start += low * strides[split]
        columns *= high - low
    rows = torch.full((1,), start, dtype=torch.int64, device=device)
    for i in range(split):
        index = torch.arange(*box[i], dtype=torch.int64, device=device) * strides[i]
        if i == 0:  # what lies 2**32 elements apart must differ; of the leading index alone, as any split finds that
            index = index + (index >> 32) * _HIGH
        rows = (rows[:, None] + index).reshape(-1)
    rows = (rows & _WORD) * _WEYL + first  # no overflow: 32 bits times 31
    rows = ((rows + (1 << 31)) & _WORD) - (1 << 31)
    x = rows.to(torch.int32)[:, None] + torch.arange(columns, dtype=torch.int32, device=device) * _WEYL
    shifted = torch.bitwise_right_shift(x, 15)
    x.bitwise_xor_(shifted.bitwise_and_(0x1FFFF)).mul_(_FIRST).add_(second)
    torch.bitwise_right_shift(x, 16, out=shifted)
    x.bitwise_xor_(shifted.bitwise_and_(0xFFFF)).mul_(_SECOND)
    return x.reshape([high - low for low, high in box])


@register_kernel("dropout")
def dropout(op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
    p, salt = float(str(op.attributes["p"])), int(str(op.attributes.get("salt", 0)))
    shape, box = shapes[0], piece.outputs[0]
    if p <= 0:
        return lambda x: x
    if p >= 1:
        return lambda x: x * 0
    scale: Any = 1 / (1 - p)
    return lambda x: x * keep_mask(shape, box, p, context, salt, x.device) * scale


@register_kernel("uniform")
def uniform(op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
    """Numbers in [0, 1) with 24 bits; the operand is a scalar that says nothing but where and of what dtype."""
    salt, box = int(str(op.attributes["salt"])), piece.outputs[0]
    shape = tuple(op.sizes[dimension.axes[0]] for dimension in op.access.outputs[0].dimensions)

    def run(x: Tensor) -> Tensor:
        bits = _random_bits(shape, box, context, salt, x.device)
        return ((bits >> 8) & 0xFFFFFF).to(x.dtype) / (1 << 24)

    return run
