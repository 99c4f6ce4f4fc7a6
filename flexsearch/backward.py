"""Calls of autograd's engine, and how gradients enter them.

``torch.autograd.grad`` checks its arguments in Python, which takes about 15 us a call; a step of a small model that is
split makes a hundred calls, always of the same tensors. The engine behind it is private to PyTorch, and called in this
module alone; where a version of PyTorch has none, ``torch.autograd.grad`` serves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

_ENGINE: Callable[..., Any] | None = getattr(
    getattr(torch.autograd.Variable, "_execution_engine", None), "run_backward", None
)
HANDED_OVER_BYTES = 1 << 14
"""Least bytes of a gradient that autograd is made the only holder of: a smaller one is not worth the host's time."""


def gradients_of(
    outputs: Sequence[GradientEdge], gradients: Sequence[Tensor], wanted: Sequence[Any], keep: bool
) -> Sequence[Tensor | None]:
    """Gradients of what is ``wanted``, tensors and GradientEdges (None: there is none), from those of ``outputs``, of
    their shapes and dtypes. ``keep``: the graph, for another call."""
    if _ENGINE is None:
        return torch.autograd.grad(outputs, wanted, gradients, retain_graph=keep, allow_unused=True)
    wanted_gradients: Sequence[Tensor | None] = _ENGINE(
        tuple(outputs), tuple(gradients), keep, False, tuple(wanted), allow_unreachable=True, accumulate_grad=False
    )
    return wanted_gradients


def accumulate(outputs: Sequence[GradientEdge], gradients: Sequence[Tensor]) -> None:
    """Add gradients to those of all leaves that ``outputs`` depend on. Takes less than ``gradients_of``, which first
    looks through the graph for what leads to each that is wanted."""
    if _ENGINE is None:
        torch.autograd.backward(outputs, gradients)
    else:
        _ENGINE(tuple(outputs), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True)


def entry_of(result: Tensor) -> GradientEdge | None:
    """Where the gradient of a result enters: if it may be handed over, a node that nothing but that goes through. None:
    it has none."""
    if not result.requires_grad:
        return None
    return get_gradient_edge(result.view_as(result) if result.nbytes >= HANDED_OVER_BYTES else result)


def handed_over(gradient: Tensor, entry: GradientEdge) -> Tensor:
    """Something of the shape of a gradient, without memory, in place of which autograd gets the gradient itself: it
    keeps what it is called with to its end, but lets go of what it gets on its way once that is used."""
    held = [gradient]
    entry.node.register_prehook(lambda _: (held.pop(),))
    return gradient.new_empty(()).expand(gradient.shape)
