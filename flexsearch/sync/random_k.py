"""k entries at random, the same on all workers, so that no indices are sent and sums are all-reduces (Stich et al.,
2018; Wangni et al., 2018)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from flexsearch.sync.compression import CHOICE, Chosen, Mean, Means, Sizes, drawn
from flexsearch.sync.exchange import Exchange, Group, Payload
from flexsearch.sync.kinds import Work, times, work
from flexsearch.sync.options import whole

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class RandomK(Chosen):
    """Without feedback values are multiplied by n/k, which makes their mean right."""

    seed: int = 0

    name: ClassVar[str] = "random-k"
    changes: ClassVar[str] = "only entries drawn at random are sent"

    def __post_init__(self) -> None:
        super().__post_init__()
        whole("seed of random-k", self.seed, least=0)

    def chosen(self, n: int, step: int) -> np.ndarray[Any, Any]:
        """Indices of the entries in a step, ascending."""
        return np.sort(drawn(CHOICE, self.seed, step).choice(n, self.entries(n), replace=False))

    def encode(self, x: Tensor, step: int, ranks: tuple[int, ...]) -> Payload:
        n = x.shape[1]
        scale = 1.0 if self.feedback else n / self.entries(n)
        # The indices are not sent: everyone can draw them. They travel with the payload as its step, a Python number.
        return RandomPayload((x[:, self.chosen(n, step).tolist()] * scale,), step=step)

    def decode(self, payload: Payload, n: int) -> Tensor:
        assert isinstance(payload, RandomPayload)
        values = payload.parts[0]
        x = values.new_zeros(values.shape[0], n)
        x[:, self.chosen(n, payload.step).tolist()] = values
        return x

    def nbytes(self, sizes: Sizes) -> int | None:
        return self.entries(sizes.n) * sizes.itemsize

    def encoding(self, sizes: Sizes) -> Work:
        sent = self.nbytes(sizes) or 0
        return work(choose=sent, scatter=sent, copy=2 * sent)

    def decoding(self, sizes: Sizes) -> Work:
        sent = self.nbytes(sizes) or 0
        return work(fill=sizes.nbytes, choose=sent, scatter=sent)

    def finishing(self, sizes: Sizes, members: int) -> Work:
        return times(2, self.decoding(sizes)) + work(copy=self.nbytes(sizes) or 0)

    def average(
        self, x: Tensor, group: Group, mean: Mean, memory: Any, step: int, sizes: Sizes
    ) -> tuple[Tensor, Tensor, Any]:
        payload = self.encode(x, step, group.ranks)
        total = RandomPayload((mean(payload.parts[0]),), step=step)
        return self.decode(total, sizes.n), self.decode(payload, sizes.n), memory

    def exchanges(self, members: int, means: Means, sizes: Sizes) -> list[Exchange] | None:
        return means(self.entries(sizes.n), sizes.itemsize)


@dataclass(frozen=True)
class RandomPayload(Payload):
    """Values at the indices that are drawn for a ``step``."""

    step: int = 0

    def rows(self, which: Any) -> RandomPayload:
        return RandomPayload((self.parts[0][list(which)],), step=self.step)
