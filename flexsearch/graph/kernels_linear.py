"""Contractions: linear, addmm, einsum. A piece of a summed axis gives a partial sum; the bias comes with the first."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flexsearch.graph.kernels_base import Kernel, KernelContext, Shapes, register_kernel
from flexsearch.graph.model import Operator
from flexsearch.graph.notation import Operand
from flexsearch.graph.piece import Piece


@register_kernel("linear")
def linear(op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
    return F.linear


@register_kernel("addmm")
def addmm(op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
    alpha: Any = op.attributes.get("alpha", 1)
    beta: Any = op.attributes.get("beta", 1)

    def run(bias: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
        if bias is not None:
            return torch.addmm(bias, a, b, alpha=alpha, beta=beta)
        y = a @ b
        return y if alpha == 1 else y * alpha

    return run


@register_kernel("einsum")
def einsum(op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
    """torch.matmul where the pattern is one, otherwise torch.einsum, without the broadcast dimensions (``1``)."""
    inputs, output = op.access.inputs, op.access.outputs[0]
    if len(inputs) == 2:
        flips = _as_matmul(inputs[0], inputs[1], output)
        if flips is not None:
            first, second = flips

            def matmul(a: Tensor, b: Tensor) -> Tensor:
                return (a.mT if first else a) @ (b.mT if second else b)

            return matmul
    letter = {axis: i for i, axis in enumerate(op.access.axes)}
    subscripts = [[letter[d.axes[0]] for d in operand.dimensions if d.axes] for operand in inputs]
    fixed = [tuple(i for i, d in enumerate(operand.dimensions) if not d.axes) for operand in inputs]
    result = [letter[d.axes[0]] for d in output.dimensions if d.axes]
    added = [i for i, d in enumerate(output.dimensions) if not d.axes]

    def run(*operands: Tensor) -> Tensor:
        arguments: list[Any] = []
        for x, drop, subscript in zip(operands, fixed, subscripts, strict=True):
            arguments += [x.squeeze(drop) if drop else x, subscript]
        y: Tensor = torch.einsum(*arguments, result)
        for position in added:
            y = y.unsqueeze(position)
        return y

    return run


def _as_matmul(a: Operand, b: Operand, output: Operand) -> tuple[bool, bool] | None:
    """Whether to flip the last two dimensions of each operand for ``a @ b`` to be the output; None if it is none."""
    names = [[d.axes[0] if d.axes else "1" for d in operand.dimensions] for operand in (a, b, output)]
    if any(len(n) < 2 or len(set(n) - {"1"}) != len([x for x in n if x != "1"]) for n in names):
        return None
    left, right, result = names
    i, k = result[-2:]
    if "1" in (i, k) or len(result) != max(len(left), len(right)):
        return None
    for position, axis in enumerate(reversed(result[:-2]), 3):
        found = {n[-position] for n in (left, right) if len(n) >= position}
        if found - {axis, "1"} or axis not in found:
            return None
    first, second = i != left[-2], k != right[-1]
    row = left[-2:][::-1] if first else left[-2:]
    column = right[-2:][::-1] if second else right[-2:]
    if row[0] != i or column[1] != k or row[1] != column[0] or row[1] in {"1", *result}:
        return None
    return first, second
