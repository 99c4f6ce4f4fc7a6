"""Entries of at least some magnitude: a fixed one (Strom, 2015), or one that keeps a share of them, estimated from a
sample (Dryden et al., 2016; sampling as by Lin et al., 2018)."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, ClassVar

from flexsearch.sync.compression import Compression, Sizes, Sparse, marked
from flexsearch.sync.exchange import INDEX_BYTES, Payload
from flexsearch.sync.kinds import Work, work
from flexsearch.sync.options import number

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Expected(Sparse):
    """What plans take for it: a share ``density`` of the entries is sent; the threshold is found in a ``sample``."""

    density: float = 0.01
    sample: float = 0.0

    name: ClassVar[str] = "expected"

    def encoding(self, sizes: Sizes) -> Work:
        sample = self.sample * sizes.nbytes
        return work(mark=sizes.nbytes, select=sample, sort=self.density * sample)

    def nbytes(self, sizes: Sizes) -> int | None:
        return INDEX_BYTES + ceil(self.density * sizes.n) * (sizes.itemsize + INDEX_BYTES)


@dataclass(frozen=True)
class Threshold(Sparse):
    """Each row sends its entries of magnitude ``tau`` or more. ``expect``: the share of them that plans expect."""

    tau: float = 0.01
    expect: float = 0.01

    name: ClassVar[str] = "threshold"
    changes: ClassVar[str] = "only large entries are sent"

    def __post_init__(self) -> None:
        number("tau of threshold", self.tau)
        number("expect of threshold", self.expect, most=1.0)

    @property
    def planned(self) -> Compression:
        return Expected(self.feedback, self.expect)

    def encode(self, x: Tensor, step: int, ranks: tuple[int, ...]) -> Payload:
        return marked(x, x.abs() >= self.tau)

    def nbytes(self, sizes: Sizes) -> int | None:
        return None


@dataclass(frozen=True)
class AdaptiveThreshold(Sparse):
    """As ``Threshold``, with a threshold of each row and step: the smallest of the largest share ``density`` of a
    ``sample`` of the entries, one of each so many in a row; the sample moves on by one in each step."""

    density: float = 0.01
    sample: float = 0.1

    name: ClassVar[str] = "adaptive-threshold"
    changes: ClassVar[str] = "only the largest entries are sent"

    def __post_init__(self) -> None:
        number("density of adaptive-threshold", self.density, most=1.0)
        number("sample of adaptive-threshold", self.sample, most=1.0)

    @property
    def planned(self) -> Compression:
        return Expected(self.feedback, self.density, self.sample)

    def encode(self, x: Tensor, step: int, ranks: tuple[int, ...]) -> Payload:
        size = x.abs()
        every = min(x.shape[1], max(1, round(1 / self.sample)))
        sample = size[:, step % every :: every]
        least = sample.topk(max(1, ceil(self.density * sample.shape[1])), 1).values[:, -1:]
        return marked(x, (size >= least) & (size > 0))

    def nbytes(self, sizes: Sizes) -> int | None:
        return None
