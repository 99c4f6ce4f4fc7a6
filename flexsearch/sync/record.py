"""What training under a recipe reached, and what it took."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Epoch:
    """After an epoch. ``train_loss``: mean over its batches; ``loss`` and ``accuracy`` (share) on held-out data, of the
    mean of all workers' weights. From the beginning: simulated ``seconds``, of which the slowest worker
    ``communicated`` or waited; bytes ``sent`` and ``messages`` of all devices together; ``steps`` of a worker."""

    epoch: int
    steps: int
    train_loss: float
    loss: float
    accuracy: float
    seconds: float
    communicated: float
    sent: int
    messages: int


@dataclass(frozen=True)
class Staleness:
    """Of workers that go by themselves: by how many updates of others weights were behind when a gradient of them
    arrived, on average and at ``most``; ``lead``: by how many steps a worker that began one was ahead of the slowest,
    at most."""

    mean: float
    most: int
    lead: int
