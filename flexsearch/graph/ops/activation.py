"""Activation functions that are more than one elementwise operator."""

from __future__ import annotations

from flexsearch.graph.ops.base import rewrite
from flexsearch.graph.ops.builder import Builder
from flexsearch.graph.ops.pointwise import pointwise
from flexsearch.graph.ops.shape import cut, view
from flexsearch.graph.ops.value import Value


@rewrite("glu")
def _glu(b: Builder, x: Value, dim: int = -1) -> Value:
    half = x.shape[dim] // 2
    value, gate = (cut(b, x, dim, start, half) for start in (0, half))
    return pointwise(b, "mul.Tensor", (value, pointwise(b, "sigmoid.default", (gate,))))


@rewrite("prelu", "_prelu_kernel")
def _prelu(b: Builder, x: Value, weight: Value) -> Value:
    """max(0, x) + weight * min(0, x), one weight or one for each channel (dimension 1)."""
    shaped = weight
    if weight.rank == 1 and x.rank > 1:
        shaped = view(b, weight, [1, weight.shape[0]] + [1] * (x.rank - 2))
    negative = pointwise(b, "mul.Tensor", (x, shaped))
    return pointwise(b, "where.self", (pointwise(b, "gt.Scalar", (x, 0)), x, negative))


@rewrite("rrelu")
def _rrelu(
    b: Builder, x: Value, lower: float = 0.125, upper: float = 1 / 3, training: bool = False, **_: object
) -> Value:
    """Negative numbers times their mean slope; in training, times one that is drawn for each."""
    if training:
        raise b.error("draws random slopes in training", "Use LeakyReLU, or import the model in evaluation mode.")
    return pointwise(b, "leaky_relu.default", (x, (lower + upper) / 2))
