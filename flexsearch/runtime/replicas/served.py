"""Workers that go by themselves, and the server that they meet at: events in simulated time."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from flexsearch.cost.waiting import Queue, Workers
from flexsearch.sync import Recipe
from flexsearch.sync.compression import Sizes
from flexsearch.sync.record import Staleness
from flexsearch.sync.work import before

Gradients = Callable[[Tensor, list[int], list[int]], tuple[Tensor, Tensor]]
"""Of copies of the weights, (rows, n), with which workers are in their so-manieth steps: (rows, n), losses (rows,)."""
Update = Callable[[Tensor], Tensor]
"""The server's optimizer: of a gradient, (1, n), the new weights, (1, n)."""


class Served:
    """A worker computes the gradient of the weights that it pulled last, pushes it, and pulls. A push has arrived when
    all its shards have; the server then updates, and answers at once, or, with a bound, as soon as the worker's lead
    allows it to begin its next step."""

    def __init__(
        self, recipe: Recipe, workers: Workers, sizes: Sizes, gradients: Gradients, update: Update, weights: Tensor
    ) -> None:
        assert recipe.asynchronous is not None
        assert recipe.server is not None
        self._recipe, self._workers, self._sizes = recipe, workers, sizes
        self._gradients, self._update, self._weights = gradients, update, weights
        self._share = recipe.asynchronous.share or 1.0 / workers.size
        self._bound = recipe.asynchronous.lead
        self._owners = recipe.server.owners(workers.size)
        self._parts = recipe.server.bounds(sizes.n)
        self._queue = Queue(workers)
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
        self._pushed: dict[int, Tensor] = {}
        self._losses: list[Tensor] = []
        self._now = 0.0
        self._worked = [0.0] * size
        self._events: list[tuple[float, int, Literal["computed", "arrived", "pulled"], int]] = []
        self._count = 0
        for worker in range(size):
            self._begin(0.0, worker)

    def run_until(self, updates: int) -> tuple[Tensor, float, float]:
        """Go on until so many gradients have arrived in all. The mean loss of those since the last call, the time, and
        how much of it the worker that came last did not compute, s."""
        last = 0
        while self._updates < updates:
            self._now, _, kind, worker = heapq.heappop(self._events)
            if kind == "computed":
                self._push(worker)
            elif kind == "arrived":
                self._arrive(worker)
                last = worker
            else:
                self._begin(self._now, worker)
        loss = torch.stack(self._losses).mean()
        self._losses.clear()
        return loss, self._now, self._now - self._worked[last]

    @property
    def staleness(self) -> Staleness:
        """So far."""
        return Staleness(self._behind / max(1, self._updates), self._most, self._lead)

    def _at(self, seconds: float, kind: Literal["computed", "arrived", "pulled"], worker: int) -> None:
        self._count += 1
        heapq.heappush(self._events, (seconds, self._count, kind, worker))

    def _begin(self, now: float, worker: int) -> None:
        self._lead = max(self._lead, self.steps[worker] - min(self.steps))
        seconds = self._workers.step_s(worker, self.steps[worker])
        seconds += self._workers.encode_s(worker, before(self._recipe.planned, self._sizes))
        self._worked[worker] += seconds
        self._at(now + seconds, "computed", worker)

    def _push(self, worker: int) -> None:
        if (
            worker not in self._computed
        ):  # a gradient depends on what was pulled alone: compute all that are due at once
            due = sorted(self._copies)
            copies = torch.cat([self._copies.pop(w) for w in due])
            found, losses = self._gradients(copies, due, [self.steps[w] for w in due])
            self._computed.update((w, (found[k : k + 1], losses[k])) for k, w in enumerate(due))
        gradient, loss = self._computed.pop(worker)
        self._losses.append(loss)
        pushed = self._recipe.pushed(worker, self._residual[worker], gradient, self.steps[worker], self._sizes)
        self._residual[worker], self._pushed[worker] = pushed.residual, pushed.arrived
        sizes = [payload.nbytes[0] for payload in pushed.payloads]
        ends = [self._send(worker, owner, size) for owner, size in zip(self._owners, sizes, strict=True)]
        self._at(max(ends), "arrived", worker)

    def _arrive(self, worker: int) -> None:
        behind = self._updates - self._pulled_at[worker]
        self._behind, self._most = self._behind + behind, max(self._most, behind)
        self._weights = self._update(self._pushed.pop(worker) * self._share)
        self._updates += 1
        self.steps[worker] += 1
        self._held.append(worker)
        slowest = min(self.steps)
        for waiting in list(self._held):
            if self._bound is None or self.steps[waiting] - slowest <= self._bound:
                self._held.remove(waiting)
                self._answer(waiting)

    def _answer(self, worker: int) -> None:
        self._copies[worker], self._pulled_at[worker] = self._weights, self._updates
        parts = [(b - a) * self._sizes.itemsize for a, b in self._parts]
        ends = [self._send(owner, worker, size) for owner, size in zip(self._owners, parts, strict=True)]
        self._at(max(ends), "pulled", worker)

    def _send(self, source: int, target: int, nbytes: int) -> float:
        if source != target:
            self.sent, self.messages = self.sent + nbytes, self.messages + 1
        return self._queue.send(self._now, source, target, nbytes)
