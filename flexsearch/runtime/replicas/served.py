"""Workers that go by themselves, and the server that they meet at: arithmetic in the order of simulated time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from flexsearch.simulate.asynchronous import Arrival, AsynchronousTime
from flexsearch.simulate.training import Workers
from flexsearch.sync import Recipe
from flexsearch.sync.compression import Sizes
from flexsearch.sync.record import Staleness

Gradients = Callable[[Tensor, list[int], list[int]], tuple[Tensor, Tensor]]
"""Of copies of the weights, (rows, n), with which workers are in their so-manieth steps: (rows, n), losses (rows,)."""
Update = Callable[[Tensor], Tensor]
"""The server's optimizer: of a gradient, (1, n), the new weights, (1, n)."""


class Served:
    """A worker computes the gradient of the weights that it pulled last, pushes it, and pulls. A push has arrived when
    all its shards have; the server then updates, and answers at once, or, with a bound, as soon as the worker's lead
    allows it to begin its next step. When pushes arrive says the engine; it is told their bytes if these depend on the
    numbers. ``most``: gradients that arrive in all."""

    def __init__(
        self, recipe: Recipe, workers: Workers, sizes: Sizes, gradients: Gradients, update: Update, weights: Tensor,
        most: int,
    ) -> None:  # fmt: skip
        assert recipe.asynchronous is not None
        assert recipe.server is not None
        self._recipe, self._sizes = recipe, sizes
        self._gradients, self._update, self._weights = gradients, update, weights
        self._share = recipe.asynchronous.share or 1.0 / workers.size
        self._bound = recipe.asynchronous.lead
        self._owners = recipe.server.owners(workers.size)
        self._parts = recipe.server.bounds(sizes.n)
        self._measured = any(recipe.compression.nbytes(sizes.part(b - a)) is None for a, b in self._parts)
        self._time = AsynchronousTime(workers, recipe, sizes, most, self._measured)
        self._arrivals = deque[Arrival]()
        size = workers.size
        self.steps = [0] * size
        """By worker, those whose gradients have arrived."""
        self.sent = self.messages = 0
        self._residual = [weights * 0 if recipe.compression.feedback else None for _ in range(size)]
        self._copies = {worker: weights for worker in range(size)}
        self._computed: dict[int, tuple[Tensor, Tensor]] = {}
        self._pulled_at = [0] * size
        self._updates, self._behind, self._most, self._lead = 0, 0, 0, 0
        self._held: list[int] = []
        self._pushed: dict[int, tuple[Tensor, list[int]]] = {}
        self._losses: list[Tensor] = []

    def run_until(self, updates: int) -> tuple[Tensor, float, float]:
        """Go on until so many gradients have arrived in all. The mean loss of those since the last call, the time, and
        how much of it the worker that came last would not have taken alone, s."""
        last = Arrival(0.0, 0.0, 0)
        while self._updates < updates:
            if not self._arrivals:
                if self._measured:
                    self._push_all()
                self._arrivals.extend(self._time.advance())
                continue
            last = self._arrivals.popleft()
            self._arrive(last.worker)
        loss = torch.stack(self._losses).mean()
        self._losses.clear()
        return loss, last.seconds, max(0.0, last.seconds - last.computed_s)

    @property
    def staleness(self) -> Staleness:
        """So far."""
        return Staleness(self._behind / max(1, self._updates), self._most, self._lead)

    def _push_all(self) -> None:
        """Tell the engine how much those push that have pulled."""
        for worker in sorted(self._copies):
            self._push(worker)
            self._time.push(worker, self.steps[worker], self._pushed[worker][1])

    def _push(self, worker: int) -> None:
        if (
            worker not in self._computed
        ):  # a gradient depends on what was pulled alone: compute all that are due at once
            due = sorted(self._copies)
            copies = torch.cat([self._copies.pop(w) for w in due])
            gradients, losses = self._gradients(copies, due, [self.steps[w] for w in due])
            self._computed.update((w, (gradients[k : k + 1], losses[k])) for k, w in enumerate(due))
        gradient, loss = self._computed.pop(worker)
        self._losses.append(loss)
        pushed = self._recipe.pushed(worker, self._residual[worker], gradient, self.steps[worker], self._sizes)
        sizes = [payload.nbytes[0] for payload in pushed.payloads]
        self._residual[worker], self._pushed[worker] = pushed.residual, (pushed.arrived, sizes)

    def _arrive(self, worker: int) -> None:
        if worker not in self._pushed:
            self._push(worker)
        arrived, sizes = self._pushed.pop(worker)
        for owner, size in zip(self._owners, sizes, strict=True):
            self._count(worker, owner, size)
        behind = self._updates - self._pulled_at[worker]
        self._behind, self._most = self._behind + behind, max(self._most, behind)
        self._weights = self._update(arrived * self._share)
        self._updates += 1
        self.steps[worker] += 1
        self._held.append(worker)
        slowest = min(self.steps)
        for waiting in list(self._held):
            if self._bound is None or self.steps[waiting] - slowest <= self._bound:
                self._held.remove(waiting)
                self._answer(waiting)

    def _answer(self, worker: int) -> None:
        self._lead = max(self._lead, self.steps[worker] - min(self.steps))
        self._copies[worker], self._pulled_at[worker] = self._weights, self._updates
        for owner, (a, b) in zip(self._owners, self._parts, strict=True):
            self._count(owner, worker, (b - a) * self._sizes.itemsize)

    def _count(self, source: int, target: int, nbytes: int) -> None:
        if source != target:
            self.sent, self.messages = self.sent + nbytes, self.messages + 1
