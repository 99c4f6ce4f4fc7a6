"""The two halves of an operator whose weights' gradients have a split of their own (``graph.weight_gradients``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from torch import Tensor

    from flexsearch.graph.ops.base import Kernel, WeightGradient


class _Carried(torch.autograd.Function):
    """A result whose gradient is that of ``carrier``, too."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, carrier: Tensor) -> Tensor:
        return result.view_as(result)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, gradient


class _Weights(torch.autograd.Function):
    """Computes nothing; its backward makes the gradients of the weights."""

    @staticmethod
    def forward(
        ctx: Any, rule: WeightGradient, shape: Sequence[int], x: Tensor | None, *weights: Tensor | None
    ) -> Tensor:
        ctx.rule, ctx.wanted = rule, [weight is not None for weight in weights]
        ctx.save_for_backward(x)
        first = next(weight for weight in weights if weight is not None)
        return first.new_zeros(()).expand(*shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        gradients = ctx.rule(*ctx.saved_tensors, gradient)
        wanted = [gradients[k] if k < len(gradients) and want else None for k, want in enumerate(ctx.wanted)]
        return None, None, None, *wanted


def input_half(kernel: Kernel) -> Kernel:
    """The kernel of an operator with one more operand, which carries the gradient of its result to the other half
    (None where another piece of the same result does)."""

    def run(*operands: Tensor | None) -> Any:
        *own, carrier = operands
        result = kernel(*own)
        return result if carrier is None else _Carried.apply(result, carrier)  # type: ignore[no-untyped-call]

    return run


def weight_half(rule: WeightGradient, shape: Sequence[int]) -> Kernel:
    """A kernel that computes nothing: a value of ``shape`` that nobody reads, but whose gradient gives those of the
    weights by ``rule``."""

    def run(x: Tensor | None, *weights: Tensor | None) -> Any:
        return _Weights.apply(rule, shape, x, *weights)  # type: ignore[no-untyped-call]

    return run
