"""CTC as one operator of a traced program: torch takes its own apart, into one whose results have no known shape."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

import torch
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
def keep_ctc_loss() -> Iterator[None]:
    """While this lasts, ``F.ctc_loss`` is the operator above."""

    def tensor(lengths: Tensor | Sequence[int]) -> Tensor:
        return lengths if isinstance(lengths, Tensor) else torch.tensor(lengths)  # on the CPU, whatever is traced

    def call(
        log_probs: Tensor, targets: Tensor, input_lengths: Tensor | Sequence[int],
        target_lengths: Tensor | Sequence[int], blank: int = 0, reduction: int = 1, zero_infinity: bool = False,
    ) -> Tensor:  # fmt: skip
        lengths = tensor(input_lengths), tensor(target_lengths)
        result: Tensor = ctc_loss(log_probs, targets, *lengths, blank, reduction, zero_infinity)
        return result

    with mock.patch.object(torch, "ctc_loss", call):
        yield
