"""Time of workers that synchronise by a recipe: computing, exchanges, and waiting for each other.

Exchanges cost what :class:`flexsearch.cost.communication.Pricing` says. A step is computed, encoded and then sent:
nothing overlaps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flexsearch.cost.communication import Pricing, Transfer
from flexsearch.cost.exchanges import price, work_seconds
from flexsearch.sync import Exchange
from flexsearch.sync.kinds import Work
from flexsearch.topology import Topology


@dataclass(frozen=True)
class Workers:
    """Who works where, and how fast. ``devices``: of ``size`` workers, then of dedicated servers. ``compute_s``: of a
    step, by worker. ``jitter``: each step takes up to that share longer, by chance (``seed``)."""

    topology: Topology
    devices: tuple[int, ...]
    compute_s: tuple[float, ...]
    jitter: float = 0.0
    seed: int = 0

    @property
    def size(self) -> int:
        """Number of workers."""
        return len(self.compute_s)

    @property
    def hosts(self) -> tuple[int, ...]:
        """Number of the host by position."""
        return tuple(int(self.topology.host_of[d]) for d in self.devices[: self.size])

    def step_s(self, worker: int, step: int) -> float:
        """Seconds that a worker computes in a step."""
        chance = np.random.default_rng((self.seed, worker, step)).random() if self.jitter else 0.0
        return self.compute_s[worker] * (1.0 + self.jitter * float(chance))

    def encode_s(self, worker: int, work: Work) -> float:
        """Seconds that a worker's work of a recipe takes."""
        return work_seconds(work, self.topology.devices[self.devices[worker]], {})


class ExchangePrices:
    """Costs of exchanges between positions; each is priced once."""

    def __init__(self, workers: Workers) -> None:
        self._devices, self._pricing = workers.devices, Pricing(workers.topology)
        self._priced: dict[Exchange, Transfer] = {}

    def of(self, exchange: Exchange) -> Transfer:
        """Cost of an exchange on its own."""
        if (priced := self._priced.get(exchange)) is None:
            priced = price(self._pricing, self._devices, exchange)
            if len(self._priced) < 4096:
                self._priced[exchange] = priced
        return priced


class Clock:
    """Time of each worker, where they go together: an exchange begins for a position when those that it sends to or
    receives from are there, too."""

    def __init__(self, workers: Workers) -> None:
        self.workers, self._prices = workers, ExchangePrices(workers)
        self.now = np.zeros(len(workers.devices))
        self.computed = np.zeros(workers.size)

    def compute(self, step: int, encoded: Work) -> None:
        """A step of all, and that work to encode."""
        for worker in range(self.workers.size):
            seconds = self.workers.step_s(worker, step) + self.workers.encode_s(worker, encoded)
            self.computed[worker] += seconds
            self.now[worker] += seconds

    def exchange(self, phases: Sequence[Exchange]) -> None:
        """These exchanges, one after the other."""
        for phase in phases:
            seconds, before = self._prices.of(phase).duration_s, self.now.copy()
            if phase.form != "exchange":
                self.now[: phase.members] = before[: phase.members].max() + seconds
                continue
            for a, b in phase.pairs:
                self.now[[a, b]] = np.maximum(self.now[[a, b]], max(before[a], before[b]) + seconds)

    @property
    def seconds(self) -> float:
        """Until the last worker is there."""
        return float(self.now[: self.workers.size].max())

    @property
    def communicated(self) -> float:
        """Seconds of that which the last worker did not compute."""
        last = int(self.now[: self.workers.size].argmax())
        return float(self.now[last] - self.computed[last])


class Queue:
    """Messages that go at any time: those on one link go one after the other, in the order in which they come."""

    def __init__(self, workers: Workers) -> None:
        self._prices = ExchangePrices(workers)
        self._members = len(workers.devices)
        self._free: dict[int, float] = {}

    def send(self, now: float, source: int, target: int, nbytes: int) -> float:
        """When a message between positions has arrived."""
        if source == target:
            return now
        cost = self._prices.of(Exchange("exchange", self._members, (nbytes,), ((source, target),)))
        begin = max([now, *(self._free.get(link, 0.0) for link, _ in cost.links)])
        self._free.update((link, begin + seconds) for link, seconds in cost.links)
        return begin + cost.duration_s
