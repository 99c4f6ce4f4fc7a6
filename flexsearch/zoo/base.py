"""What a zoo builder returns, and the seeded construction that all of them share."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

Loss = Callable[..., Tensor]
"""Of the model's output and the targets."""


class ZooModel(NamedTuple):
    """A training step: ``loss(model(*inputs), targets)`` is a scalar tensor."""

    model: nn.Module
    inputs: tuple[Tensor, ...]
    targets: Tensor
    loss: Loss


def build(
    make_model: Callable[[], nn.Module],
    make_data: Callable[[], tuple[tuple[Tensor, ...], Tensor]],
    loss: Loss,
    device: str | torch.device,
) -> ZooModel:
    """Model and ``(inputs, targets)`` made after ``torch.manual_seed(0)``; the caller's random state is left as it was.

    Everything is drawn on the CPU and then moved, so that all devices start from the same numbers; only on the meta
    device is it made in place, because a model that is put there may not fit into memory.
    """
    device = torch.device(device)
    with torch.random.fork_rng(devices=[]), torch.device("meta" if device.type == "meta" else "cpu"):
        torch.default_generator.manual_seed(0)  # of the CPU alone, which is all that is drawn from here
        model = make_model()
        inputs, targets = make_data()
    return ZooModel(model.to(device), tuple(x.to(device) for x in inputs), targets.to(device), loss)
