"""Training of replicas that go together: one step of all, then the recipe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from flexsearch.errors import DatasetError, RuntimeFailure
from flexsearch.runtime.replicas.data import Dataset
from flexsearch.runtime.replicas.replicas import Replicas
from flexsearch.runtime.replicas.served import Served
from flexsearch.simulate.training import SynchronousTime, Workers
from flexsearch.sync import Exchange, Recipe, Simulated
from flexsearch.sync.record import Epoch, Staleness

OnEpoch = Callable[[Epoch], bool]
"""Called after each epoch; True: training ends."""


@dataclass(frozen=True)
class Trained:
    """The ``epochs``; ``staleness`` of workers that went by themselves; ``weights``, (n,), the mean of all."""

    epochs: tuple[Epoch, ...]
    weights: Tensor
    staleness: Staleness | None = None


@dataclass(frozen=True)
class Training:
    """``batch``: samples of a worker's step. ``optimizer``: of the workers, or of an asynchronous server. ``seed``: of
    the order of samples."""

    dataset: Dataset
    epochs: int
    batch: int
    optimizer: Literal["sgd", "adam"] = "sgd"
    lr: float = 0.1
    momentum: float = 0.9
    seed: int = 0

    def steps(self, workers: int) -> int:
        """Of an epoch. Raises DatasetError if there are too few samples for one."""
        steps = len(self.dataset.inputs) // (workers * self.batch)
        if not steps:
            raise DatasetError(
                f"{self.dataset.name} has {len(self.dataset.inputs)} samples, and a step of {workers} workers takes "
                f"{workers * self.batch}", f"Give a batch of at most {len(self.dataset.inputs) // workers}.",
            )  # fmt: skip
        return steps

    def samples(self, workers: int, epoch: int) -> Tensor:
        """(steps, workers, batch) indices of the samples of an epoch, those of all recipes."""
        steps, order = (
            self.steps(workers),
            np.random.default_rng((self.seed, epoch)).permutation(len(self.dataset.inputs)),
        )
        return torch.from_numpy(order[: steps * workers * self.batch]).view(steps, workers, self.batch)

    def make_optimizer(self, weights: nn.Parameter, momentum: float) -> torch.optim.Optimizer:
        """The optimizer, which works element by element."""
        if self.optimizer == "adam":
            return torch.optim.AdamW([weights], lr=self.lr)
        return torch.optim.SGD([weights], lr=self.lr, momentum=momentum)

    def run(self, recipe: Recipe, replicas: Replicas, workers: Workers, on_epoch: OnEpoch | None = None) -> Trained:
        """Train under a recipe. Raises RecipeError if the workers cannot follow it."""
        recipe.check(workers.size, replicas.sizes, workers.hosts, len(workers.topology.devices))
        if recipe.asynchronous is not None:
            return self._run_served(recipe, replicas, workers, on_epoch)
        return self._run_together(recipe, replicas, workers, on_epoch)

    def _run_together(
        self, recipe: Recipe, replicas: Replicas, workers: Workers, on_epoch: OnEpoch | None
    ) -> Trained:  # fmt: skip
        size, sizes, data = workers.size, replicas.sizes, self.dataset
        group, epochs = Simulated(size, workers.hosts), list[Epoch]()
        time = SynchronousTime(workers, recipe, sizes)
        weights = nn.Parameter(replicas.initial.expand(size, -1).clone())
        optimizer = self.make_optimizer(weights, 0.0 if recipe.correction else self.momentum)
        state, total = recipe.start(weights.detach(), sizes), _Total()
        for epoch in range(self.epochs):
            losses: list[Tensor] = []
            for at in self.samples(size, epoch):
                gradients, loss = replicas.gradients(weights, data.inputs[at], data.targets[at], group.ranks)
                losses.append(loss.mean())
                weights.grad, state = recipe.before_update(state, group, gradients, sizes)
                optimizer.step()
                weights.data, state = recipe.after_update(state, group, weights.data, sizes)
                time.step(group.exchanges)
                total.add(group.exchanges)
                group.exchanges.clear()
            mean = weights.detach().mean(0)
            epochs.append(
                Epoch(
                    epoch + 1,
                    state.step,
                    _finite(torch.stack(losses).mean()),
                    *replicas.evaluate(mean, data.held_inputs, data.held_targets),
                    time.seconds,
                    time.communicated,
                    total.sent,
                    total.messages,
                )
            )
            if on_epoch is not None and on_epoch(epochs[-1]):
                break
        return Trained(tuple(epochs), weights.detach().mean(0))

    def _run_served(
        self, recipe: Recipe, replicas: Replicas, workers: Workers, on_epoch: OnEpoch | None
    ) -> Trained:  # fmt: skip
        size, data, epochs = workers.size, self.dataset, list[Epoch]()
        weights = nn.Parameter(replicas.initial.clone().unsqueeze(0))
        optimizer = self.make_optimizer(weights, self.momentum)
        steps, orders = self.steps(size), dict[int, Tensor]()

        def gradients(copies: Tensor, ranks: list[int], counts: list[int]) -> tuple[Tensor, Tensor]:
            for epoch in {count // steps for count in counts} - orders.keys():
                orders[epoch] = self.samples(size, epoch)
            rows = [orders[n // steps][n % steps, r] for r, n in zip(ranks, counts, strict=True)]
            at = torch.stack(rows)
            return replicas.gradients(copies, data.inputs[at], data.targets[at], ranks)

        def update(gradient: Tensor) -> Tensor:
            weights.grad = gradient
            optimizer.step()
            return weights.detach().clone()

        most = self.epochs * steps * size
        served = Served(recipe, workers, replicas.sizes, gradients, update, weights.detach().clone(), most)
        for epoch in range(self.epochs):
            loss, seconds, communicated = served.run_until((epoch + 1) * steps * size)
            held = replicas.evaluate(weights.detach()[0], data.held_inputs, data.held_targets)
            done = (epoch + 1) * steps
            epochs.append(
                Epoch(epoch + 1, done, _finite(loss), *held, seconds, communicated, served.sent, served.messages)
            )
            if on_epoch is not None and on_epoch(epochs[-1]):
                break
        return Trained(tuple(epochs), weights.detach()[0], served.staleness)


class _Total:
    """Bytes and messages so far."""

    def __init__(self) -> None:
        self.sent = self.messages = 0

    def add(self, phases: list[Exchange]) -> None:
        self.sent += sum(phase.sent for phase in phases)
        self.messages += sum(phase.count for phase in phases)


def _finite(loss: Tensor) -> float:
    """Raises RuntimeFailure for a loss that is no number."""
    if not bool(torch.isfinite(loss)):
        raise RuntimeFailure("training diverged: the loss is no number any more", "Give a smaller --lr.")
    return float(loss)
