"""Recipes that PyTorch has, too: the same losses and weights under both, on two ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

from flexsearch.graph.importer import Imported
from tests.ranks import pool
from tests.test_recipe_steps import BATCH, BETA, LR, Net, batch, imported, plan, stepped

STEPS, WARM_UP, PERIOD, SEED = 10, 2, 3, 0
Trained = tuple[list[float], dict[str, Tensor]]


def _torch(kind: str) -> Trained:
    """DistributedDataParallel with a hook; the loss of this rank's share, and its weights."""
    rank = dist.get_rank()
    model = DistributedDataParallel(Net(), gradient_as_bucket_view=False)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=LR, momentum=BETA)
    averager: Any = None
    if kind == "fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif kind == "powersgd":
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=2, start_powerSGD_iter=WARM_UP, min_compression_rate=1,
            orthogonalization_epsilon=1e-8, random_seed=SEED,
        )  # fmt: skip
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    else:
        local = post_localSGD_hook.PostLocalSGDState(None, None, WARM_UP, post_local_gradient_allreduce=False)
        model.register_comm_hook(local, post_localSGD_hook.post_localSGD_hook)
        averager = PeriodicModelAverager(period=PERIOD, warmup_steps=WARM_UP + PERIOD - 1)
        optimizer = PostLocalSGDOptimizer(optimizer, averager)
    losses = []
    for number in range(STEPS):
        x, target = batch(number)
        half = slice(rank * BATCH // 2, (rank + 1) * BATCH // 2)
        loss = F.cross_entropy(model(x[half]), target[half])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: p.detach().clone() for name, p in model.module.named_parameters()}


def _ours(file: str, traced: Imported, start: list[Tensor]) -> Trained:
    step, optimizer = stepped(file, traced)
    if start:
        (member,) = step.synchronisation.members
        assert [q.shape for q in member.state.memory] == [q.shape for q in start]
        member.state = member.state.__class__(**{**vars(member.state), "memory": tuple(start)})
    losses = []
    for number in range(STEPS):
        losses.append(step(batch(number)).loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: p.detach().clone() for name, p in step.named_parameters()}


def drawn_by_torch() -> list[Tensor]:
    """The matrices with which its hook begins, by weight: it draws them in the order of a bucket, the last weight
    first."""
    columns = [p.shape[1] for p in Net().parameters() if p.dim() > 1]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(np.random.RandomState(SEED).randint(1_000_000_000))
        return [torch.randn(1, size, 2, dtype=torch.float64)[0] for size in reversed(columns)][::-1]


@pytest.mark.parametrize(
    ("kind", "recipe", "start", "tolerance"),
    [
        # Half precision rounds what may differ in the last place of float64 before: by 2^-11 of a gradient.
        ("fp16", "16-bit", list, 1e-4),
        # Its hook adds epsilon to norms of sums, this one to norms of means.
        ("powersgd", f"powersgd:rank=2+warm-up:steps={WARM_UP}", drawn_by_torch, 1e-5),
        ("local", f"local-sgd:period={PERIOD}+warm-up:steps={WARM_UP}", list, 1e-9),
    ],
)
def test_what_pytorch_has_too_gives_the_same_numbers(
    kind: str, recipe: str, start: Callable[[], list[Tensor]], tolerance: float
) -> None:
    theirs: list[Trained] = pool(2).run(_torch, kind)
    ours: list[Trained] = pool(2).run(_ours, plan(recipe), imported(), start())
    expected = [(a + b) / 2 for a, b in zip(theirs[0][0], theirs[1][0], strict=True)]
    for (_, weights), (losses, own) in zip(theirs, ours, strict=True):
        assert losses == pytest.approx(expected, rel=tolerance)
        for name, value in weights.items():
            assert float((own[name] - value).abs().max()) <= tolerance, name
