"""Calls of autograd's engine.

``torch.autograd.grad`` checks its arguments in Python, which takes about 15 us a call; a step of a small model that is
split makes a hundred calls, always of the same tensors. The engine behind it is private to PyTorch, and called in this
module alone; where a version of PyTorch has none, ``torch.autograd.grad`` serves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

_ENGINE: Callable[..., Any] | None = getattr(
    getattr(torch.autograd.Variable, "_execution_engine", None), "run_backward", None
)


def gradients_of(
    outputs: Sequence[GradientEdge], gradients: Sequence[Tensor], wanted: Sequence[Any], keep: bool
) -> Sequence[Tensor | None]:
    """Gradients of what is ``wanted``, tensors and GradientEdges (None: there is none), from those of ``outputs``, of
    their shapes and dtypes. ``keep``: the graph, for another call."""
    if _ENGINE is None:
        return torch.autograd.grad(outputs, wanted, gradients, retain_graph=keep, allow_unused=True)
    made: Sequence[Tensor | None] = _ENGINE(
        tuple(outputs), tuple(gradients), keep, False, tuple(wanted), allow_unreachable=True, accumulate_grad=False
    )
    return made


def accumulate(outputs: Sequence[GradientEdge], gradients: Sequence[Tensor]) -> None:
    """Add gradients to those of all leaves that ``outputs`` depend on. Takes less than ``gradients_of``, which first
    looks through the graph for what leads to each that is wanted."""
    if _ENGINE is None:
        torch.autograd.backward(outputs, gradients)
    else:
        _ENGINE(tuple(outputs), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True)
