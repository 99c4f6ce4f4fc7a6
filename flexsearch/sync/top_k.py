"""The k entries of largest magnitude: values and indices, gathered by all (Aji and Heafield, 2017; Lin et al.,
2018)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from flexsearch.sync.compression import Chosen, Sizes, largest, sparse
from flexsearch.sync.exchange import INDEX_BYTES, Payload
from flexsearch.sync.kinds import Work

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class TopK(Chosen):
    """Each row sends its ``k`` largest entries."""

    name: ClassVar[str] = "top-k"
    changes: ClassVar[str] = "only the largest entries are sent"

    def encode(self, x: Tensor, step: int, ranks: tuple[int, ...]) -> Payload:
        return sparse(x, largest(x, self.entries(x.shape[1])))

    def encoding(self, sizes: Sizes) -> Work:
        return self.selecting(sizes)

    def nbytes(self, sizes: Sizes) -> int | None:
        return self.entries(sizes.n) * (sizes.itemsize + INDEX_BYTES)
