"""Operators that flexsearch does not look into: a call of torch, of which some or all dimensions are whole."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import TYPE_CHECKING, Any

from flexsearch.graph.model import Operator
from flexsearch.graph.notation import Dimension
from flexsearch.graph.ops.base import (
    MANY,
    Extents,
    Kernel,
    KernelContext,
    OperatorKind,
    Sample,
    Shapes,
    define,
    rand,
)
from flexsearch.graph.ops.calls import CallAttributes, check_call, local_call
from flexsearch.graph.ops.flops import matrix_flops
from flexsearch.graph.ops.lazy import torch
from flexsearch.graph.piece import Piece

if TYPE_CHECKING:
    from torch import Tensor


class Opaque(OperatorKind):
    """One FLOP for each element that is read and written, and the matrix products that importing counted.

    What such an operator computes of each element is unknown; but its axes are those of its operands, side by side,
    and their product would be no number of anything.
    """

    name = "opaque"
    attributes = CallAttributes
    inputs = (1, MANY)
    outputs = MANY

    def check(self, op: Operator, attributes: Any, shapes: tuple[tuple[int, ...], ...]) -> str:
        return check_call(op, attributes)

    def flops(self, op: Operator, extents: Extents) -> Any:
        operands = (*op.access.inputs, *op.access.outputs)
        touched = sum(prod(_span(d, extents) for d in operand.dimensions) for operand in operands)
        return touched + matrix_flops(op, extents)

    def kernel(self, op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
        call, count = local_call(op, context), len(op.outputs)

        def run(*operands: Tensor) -> Any:
            result = call(*operands)
            if isinstance(result, torch.Tensor):
                return result
            tensors = tuple(x for x in _flat(result) if isinstance(x, torch.Tensor))[:count]
            return tensors[0] if count == 1 else tensors

        return run

    def samples(self) -> Iterable[Sample]:
        yield Sample(torch.pdist, (rand(5, 3),))


def _span(dimension: Dimension, extents: Extents) -> Any:
    """Indices of a dimension that a piece reaches, as if no window were clipped."""
    if dimension.merged:
        return prod(extents[a] for a in dimension.axes)
    return 1 + sum(c * (extents[a] - 1) for a, c in zip(dimension.axes, dimension.coefficients, strict=True))


def _flat(value: Any) -> list[Any]:
    return [x for item in value for x in _flat(item)] if isinstance(value, list | tuple) else [value]


define(Opaque())
