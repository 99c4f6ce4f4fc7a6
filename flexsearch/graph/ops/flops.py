"""What pieces of operators compute, in floating-point operations."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from flexsearch.graph.model import Operator
from flexsearch.graph.ops.base import Extents, kind_of, output_elements


def forward_flops(op: Operator, extents: Extents) -> Any:
    """Forward FLOPs of a piece of ``op`` with ``extents`` indices on each axis (of many pieces: arrays)."""
    return kind_of(op).flops(op, extents)


def backward_flops(op: Operator, extents: Extents, needs: Sequence[bool]) -> Any:
    """Backward FLOPs of a piece; ``needs``: for each operand, whether its gradient is wanted.

    A contraction costs one more of its kind for each factor (a bias only a sum over the output), anything else its
    fixed multiple of the forward, and twice the matrix products of an opaque operator.
    """
    if not any(needs):
        return 0.0
    kind, forward = kind_of(op), forward_flops(op, extents)
    if not kind.contraction:
        return kind.backward * forward + matrix_flops(op, extents)  # two products for each
    pairs = list(zip(op.access.inputs, needs, strict=True))
    factors = sum(1 for operand, need in pairs if need and not operand.once)
    sums = sum(1 for operand, need in pairs if need and operand.once)
    return kind.backward * factors * forward + sums * output_elements(op, extents)


def matrix_flops(op: Operator, extents: Extents) -> Any:
    """A piece's share of the FLOPs in the attribute ``matrix_flops``, those of the whole operator."""
    whole: Any = op.attributes.get("matrix_flops", 0)
    return whole * prod(extents[a] / size for a, size in op.sizes.items()) if whole else 0
