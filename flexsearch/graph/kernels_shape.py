"""Moving elements without changing them: a piece's operands are already the right elements, only the shape is left."""

from __future__ import annotations

from collections.abc import Sequence
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
    dtype_of,
    extent,
    integers,
    register_kernel,
)
from flexsearch.graph.model import Operator
from flexsearch.graph.piece import Piece


@register_kernel("detach")
def detach(op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
    return lambda x: x.detach()


@register_kernel("view", "flatten", "reshape")
def view(op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
    size = extent(piece.outputs[0])
    return lambda x: x.reshape(size)


@register_kernel("permute")
def permute(op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
    dims: Any = op.attributes["dims"]
    return lambda x: x.permute(dims)


@register_kernel("expand")
def expand(op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
    size = extent(piece.outputs[0])
    return lambda x: x.expand(size)


@register_kernel("slice")
def slicing(op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
    """The region spans the first to the last element read: what is left is the step, and dropping selected ones."""
    size = extent(piece.outputs[0])
    steps = [d.coefficients[0] if len(d.axes) == 1 else 1 for d in op.access.inputs[0].dimensions]
    if all(step == 1 for step in steps):
        return lambda x: x.reshape(size)
    index = tuple(slice(None, None, step) for step in steps)
    return lambda x: x[index].reshape(size)


@register_kernel("cat")
def cat(op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
    dim = int(str(op.attributes["dim"]))

    def run(*operands: Tensor | None) -> Tensor:
        present = [x for x in operands if x is not None]
        return present[0] if len(present) == 1 else torch.cat(present, dim)

    return run


@register_kernel("pad")
def pad(op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
    value: Any = op.attributes.get("value") or 0
    value = float(value) if isinstance(value, str) else value
    box = piece.inputs[0]
    if box is None:
        return _only_padding(op, piece, context, value)
    sides = [side for i in reversed(range(len(box))) for side in cut(op, piece, 0, i)]
    return (lambda x: F.pad(x, sides, value=value)) if any(sides) else (lambda x: x)


@register_kernel("index")
def index(op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
    """Dimensions by operands, which are whole, or by a range of the piece's own part of an axis of the indices."""
    entries: Any = op.attributes["indices"]
    rank, first = int(str(op.attributes["rank"])), int(str(op.attributes["first"]))
    shape = extent(piece.outputs[0])
    ranges: dict[int, Tensor] = {}
    for dim, entry in enumerate(entries):
        if entry is not None and "axis" in entry:
            axis = entry["axis"]
            places = [1] * rank if axis is None else [shape[first + axis] if k == axis else 1 for k in range(rank)]
            ranges[dim] = torch.arange(prod(places), device=context.device).view(places)
    looked_up = [dim for dim, entry in enumerate(entries) if entry is not None]
    if len(looked_up) == 1 and not ranges:
        return _rows(looked_up[0], shapes[0][looked_up[0]], shape, bool(op.attributes["negative"]))

    def run(x: Tensor, *operands: Tensor) -> Tensor:
        return x[
            tuple(
                slice(None) if entry is None else ranges[dim] if dim in ranges else operands[entry["operand"]]
                for dim, entry in enumerate(entries)
            )
        ]

    return run


def _rows(dim: int, size: int, shape: Sequence[int], negative: bool) -> Kernel:
    """Rows along one whole dimension of ``size``, by torch's index_select, which takes no indices from the end."""

    def run(x: Tensor, index: Tensor) -> Tensor:
        index = torch.where(index < 0, index + size, index) if negative else index
        return x.index_select(dim, index.reshape(-1)).reshape(shape)

    return run


@register_kernel("gather")
def gather(op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
    dim = int(str(op.attributes["dim"]))
    return lambda x, index: x.gather(dim, index)


@register_kernel("unfold")
def unfold(op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
    """The region reaches from the first element of the piece's windows to the last: they are what it unfolds to."""
    dim, step = int(str(op.attributes["dim"])), int(str(op.attributes["step"]))
    size = extent(piece.outputs[0])[-1]
    return lambda x: x.unfold(dim, size, step)


@register_kernel("im2col")
def im2col(op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
    kernel, dilation, stride = (tuple(integers(op, name, 2, 1)) for name in ("kernel_size", "dilation", "stride"))
    if piece.inputs[0] is None:
        return _only_padding(op, piece, context, 0.0)
    rank = len(shapes[0])
    sides = [side for i in (rank - 1, rank - 2) for side in cut(op, piece, 0, i)]
    return lambda x: F.unfold(F.pad(x, sides) if any(sides) else x, kernel, dilation, 0, stride)


def _only_padding(op: Operator, piece: Piece, context: KernelContext, value: float) -> Kernel:
    """A piece that lies wholly outside its operand."""
    size, name = extent(piece.outputs[0]), op.attributes.get("dtype")

    def run(x: None) -> Tensor:
        dtype = context.dtype if name is None else dtype_of(str(name))
        return torch.full(size, value, dtype=dtype, device=context.device)

    return run
