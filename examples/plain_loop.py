"""An ordinary training loop under a plan: an optimizer with two groups, clipping, a schedule, evaluation.

    torchrun --nproc-per-node 2 examples/plain_loop.py
"""

from __future__ import annotations

import os

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import flexsearch


def classifier() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 4))


def data(samples: int, seed: int) -> TensorDataset:
    """Points whose class is the largest of four sums."""
    x = torch.randn(samples, 16, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x.view(-1, 4, 4).sum(2).argmax(1))


def main(epochs: int = 3, batch: int = 32) -> tuple[float, float]:
    """Train; returns the loss of the last step and the accuracy on other data."""
    model, training, test = classifier(), data(200, 1), data(48, 2)
    ranks = os.environ.get("WORLD_SIZE", "1")
    # The first rank searches, and the others get its plan; or plan once, and Strategy.load("plan.json").
    plan = flexsearch.optimize(
        model, training[:batch], f"ethernet-1g:{ranks}", loss=F.cross_entropy, budget=200, processes=1
    )
    step = flexsearch.parallelize(model, plan)
    optimizer = torch.optim.AdamW(step.parameter_groups(decay=0.1), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    loss = 0.0
    for epoch in range(epochs):
        for part in step.loader(training, epoch=epoch):  # the last batch has 8 samples
            loss = step(part).loss.item()
            step.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()
    right = total = 0
    with step.evaluating():
        for first in range(0, len(test), batch):
            x, target = test[first : first + batch]
            logits = step.forward(x, samples=len(x), everything=True)
            right, total = right + int((logits.argmax(1) == target).sum()), total + len(x)
    if step.rank == 0:
        print(f"loss {loss:.3f}, accuracy {right / total:.0%}")
    return loss, right / total


if __name__ == "__main__":
    main()
