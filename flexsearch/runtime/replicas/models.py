"""Small models for the data sets, or any of the user's."""

from __future__ import annotations

from typing import Final

import torch
from torch import nn

from flexsearch.errors import ImportModelError
from flexsearch.graph.loading import load_callable
from flexsearch.runtime.replicas.data import LETTERS, Dataset
from flexsearch.runtime.replicas.replicas import Loss

HIDDEN: Final = 128
MODELS: Final = ("mlp", "cnn")


def load_model(name: str, dataset: Dataset) -> tuple[nn.Module, Loss]:
    """ "mlp" (of text: Bengio et al., 2003, an embedding of each letter before it), "cnn" (images), or
    MODULE:CALLABLE, whose own inputs and targets do not count. Weights of the small ones are drawn with seed 0. Raises
    ImportModelError."""
    if name in MODELS:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return (_mlp(dataset) if name == "mlp" else _cnn(dataset)), nn.functional.cross_entropy
    if ":" not in name:
        raise ImportModelError(f"there is no model {name!r}", f"Give {', '.join(MODELS)}, or MODULE:CALLABLE.")
    loaded = load_callable(name)
    if loaded.loss is None or loaded.targets is None:
        raise ImportModelError(
            f"{name} returns no loss of outputs and targets", "Return (model, inputs, targets, loss)."
        )
    return loaded.model, loaded.loss


def _mlp(dataset: Dataset) -> nn.Module:
    each = dataset.inputs[0].numel()
    first: list[nn.Module] = [nn.Flatten()]
    if dataset.is_text:
        first, each = [nn.Embedding(LETTERS, 16), nn.Flatten()], 16 * each
    return nn.Sequential(*first, nn.Linear(each, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, dataset.classes))


def _cnn(dataset: Dataset) -> nn.Module:
    if dataset.is_text or dataset.inputs.dim() != 4:
        raise ImportModelError(f"cnn is for images, and {dataset.name} has none", "Take mlp.")
    channels, side = dataset.inputs.shape[1], dataset.inputs.shape[2] // 4
    return nn.Sequential(
        nn.Conv2d(channels, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * side * side, 64), nn.ReLU(), nn.Linear(64, dataset.classes),
    )  # fmt: skip
