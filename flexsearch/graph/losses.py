"""Losses of PyTorch that cannot be traced as they are, in a form that can.

CTC becomes one operator: torch takes its own apart, into one whose results have no known shape. The Gaussian negative
log-likelihood does not look at the values of its variances.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import log, pi
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

_call = torch.ctc_loss


@torch.library.custom_op("flexsearch::ctc_loss", mutates_args=())
def ctc_loss(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int, reduction: int,
    zero_infinity: bool,
) -> Tensor:  # fmt: skip
    """``torch.ctc_loss`` with the lengths as tensors."""
    return _call(log_probs, targets, input_lengths, target_lengths, blank, reduction, zero_infinity)


@ctc_loss.register_fake
def _(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int, reduction: int,
    zero_infinity: bool,
) -> Tensor:  # fmt: skip
    return log_probs.new_empty(() if reduction else log_probs.shape[1:-1])


@contextmanager
def traceable_losses() -> Iterator[None]:
    """While this lasts, ``F.ctc_loss`` and ``F.gaussian_nll_loss`` can be traced."""
    with mock.patch.object(torch, "ctc_loss", _ctc_loss), mock.patch.object(F, "gaussian_nll_loss", _gaussian_nll_loss):
        yield


def _ctc_loss(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor | Sequence[int], target_lengths: Tensor | Sequence[int],
    blank: int = 0, reduction: int = 1, zero_infinity: bool = False,
) -> Tensor:  # fmt: skip
    def tensor(lengths: Tensor | Sequence[int]) -> Tensor:
        return lengths if isinstance(lengths, Tensor) else torch.tensor(lengths)  # on the CPU, whatever is traced

    lengths = tensor(input_lengths), tensor(target_lengths)
    result: Tensor = ctc_loss(log_probs, targets, *lengths, blank, reduction, zero_infinity)
    return result


def _gaussian_nll_loss(
    input: Tensor, target: Tensor, var: Tensor | float, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> Tensor:
    """``0.5 * (log(var) + (input - target) ** 2 / var)``; a variance below ``eps`` counts as that, but its gradient
    passes."""
    if not isinstance(var, Tensor):
        var = torch.full_like(input, var)
    elif var.shape != input.shape and var.shape == input.shape[:-1]:
        var = var.unsqueeze(-1)
    var = var + (var.clamp(min=eps) - var).detach()
    loss = 0.5 * (torch.log(var) + (input - target) ** 2 / var)
    if full:
        loss = loss + 0.5 * log(2 * pi)
    return loss if reduction == "none" else loss.mean() if reduction == "mean" else loss.sum()
