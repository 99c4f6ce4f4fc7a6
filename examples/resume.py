"""Training that goes on under another plan, on another number of ranks, from a checkpoint.

    torchrun --nproc-per-node 4 examples/resume.py checkpoint 3
    torchrun --nproc-per-node 2 examples/resume.py checkpoint 3
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import flexsearch


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(8, 12, generator=generator)
    return x, x.sum(1, keepdim=True)


def main(folder: str, steps: int) -> list[float]:
    """Take ``steps`` steps more than the checkpoint in ``folder`` has, if there is one; returns their losses."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Dropout(0.2), nn.Linear(32, 1))
    topology = f"ethernet-1g:{os.environ.get('WORLD_SIZE', '1')}"
    plan = flexsearch.optimize(model, batch(0), topology, loss=F.mse_loss, budget=50, processes=1)
    step = flexsearch.parallelize(model, plan, seed=1)
    optimizer = torch.optim.AdamW(step.parameters(), lr=1e-2)
    done = step.load(folder, optimizer)["steps"] if (Path(folder) / ".metadata").exists() else 0
    losses = []
    for number in range(done, done + steps):
        losses.append(step(batch(number)).loss.item())
        optimizer.step()
        optimizer.zero_grad()
    step.save(folder, optimizer, steps=done + steps)
    if step.rank == 0:
        print(f"steps {done} to {done + steps}: " + ", ".join(f"{loss:.4f}" for loss in losses))
    return losses


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
