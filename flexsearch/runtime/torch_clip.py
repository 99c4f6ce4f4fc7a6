"""``torch.nn.utils.clip_grad_norm_`` on the parameters of a step.

Loops are written with it, and it would take the norm of this rank's pieces alone: each rank would scale by a number of
its own, and nothing would say so. From the first step of a process on, it hands over to the step's own.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from itertools import count
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad

from flexsearch.errors import RuntimeFailure
from flexsearch.runtime.faults import Failures
from flexsearch.runtime.optimizers import refuse_idle


class Pieces(Protocol):
    """A step, whose parameters are pieces of the weights: ``runtime.step.Parallel``."""

    failures: Failures

    def parameters(self) -> Iterable[nn.Parameter]: ...

    def clip_grad_norm_(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> Tensor: ...


_STEPS: WeakValueDictionary[int, Pieces] = WeakValueDictionary()
"""In the order in which they were made."""
_NUMBER = count()


def clip_whole_gradients(step: Pieces | None) -> None:
    """Have PyTorch's function clip the gradients of ``step`` by the norm of the whole model's, where it has pieces of
    them; None: it is right as it is for parameters of the step, not for the model's own."""
    _replace()
    if step is not None:
        _STEPS[next(_NUMBER)] = step


@cache
def _replace() -> None:
    torchs = clip_grad.clip_grad_norm_

    def clip_grad_norm_(
        parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0,
        error_if_nonfinite: bool = False, foreach: bool | None = None,
    ) -> Tensor:  # fmt: skip
        rows = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        step = _step_of(rows)
        if step is None:
            refuse_idle("clip_grad_norm_", rows)
            return torchs(rows, max_norm, norm_type, error_if_nonfinite, foreach)
        return step.clip_grad_norm_(max_norm, norm_type, error_if_nonfinite)

    clip_grad_norm_.__doc__ = torchs.__doc__
    replaced: Any = clip_grad_norm_
    clip_grad.clip_grad_norm_ = torch.nn.utils.clip_grad_norm_ = replaced


def _step_of(parameters: list[Tensor]) -> Pieces | None:
    """The step whose gradients are all of those of ``parameters``; None: they are of none. Raises RuntimeFailure where
    they are some of a step's, or a step's and others."""
    ids, steps = {id(p) for p in parameters}, list(_STEPS.values())
    for step in steps if ids else steps[-1:]:  # a rank without weights may give none, and the others wait for it
        own = {id(p): p.grad is not None for p in step.parameters()}
        if ids and not ids & own.keys():
            continue
        if ids <= own.keys() and not any(trained for p, trained in own.items() if p not in ids):
            return step
        with step.failures.watch():
            raise RuntimeFailure(
                "clip_grad_norm_ got some of a step's parameters, or others beside them: their norm would be that of "
                "this rank's pieces alone",
                "Clip all of a step by step.clip_grad_norm_(max_norm), and other parameters by a call of their own.",
            )
    return None
