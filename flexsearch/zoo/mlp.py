"""Multi-layer perceptron."""

# Calling a module is untyped in torch, and casts would make these models less plain.
# mypy: disable-error-code="no-any-return"
from __future__ import annotations

from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexsearch.zoo.base import ZooModel, build


class MLP(nn.Module):
    """``layers`` hidden ReLU layers of ``width`` and a linear output: (batch, features) -> (batch, classes)."""

    def __init__(
        self, features: int = 4096, width: int = 4096, layers: int = 2, classes: int = 10, dropout: float = 0.0
    ) -> None:
        super().__init__()
        sizes = [features] + [width] * layers
        parts: OrderedDict[str, nn.Module] = OrderedDict()
        for i in range(layers):
            parts[f"fc{i + 1}"] = nn.Linear(sizes[i], sizes[i + 1])
            parts[f"relu{i + 1}"] = nn.ReLU()
            parts[f"drop{i + 1}"] = nn.Dropout(dropout)
        parts["out"] = nn.Linear(sizes[-1], classes)
        self.layers = nn.Sequential(parts)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def mlp(
    batch: int = 64,
    device: str | torch.device = "cpu",
    *,
    features: int = 4096,
    width: int = 4096,
    layers: int = 2,
    classes: int = 10,
    dropout: float = 0.0,
) -> ZooModel:
    """Two hidden layers of 4096 (33.6 M parameters): large weights, hardly any compute. Inputs (batch, features)."""
    return build(
        lambda: MLP(features, width, layers, classes, dropout),
        lambda: ((torch.randn(batch, features),), torch.randint(classes, (batch,))),
        F.cross_entropy,
        device,
    )
