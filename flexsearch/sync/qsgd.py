"""QSGD: stochastic rounding to a few levels of the norm (Alistarh et al., 2017)."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from flexsearch.errors import RecipeError
from flexsearch.sync.bits import pack, packed_bytes, unit_bytes, unpack
from flexsearch.sync.compression import ROUNDING, Compression, Sizes, drawn
from flexsearch.sync.exchange import Payload
from flexsearch.sync.kinds import Work, work
from flexsearch.sync.options import whole

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class QSGD(Compression):
    """Buckets of so many elements are sent as their Euclidean norm and, for each element, its sign and a level from 0
    to s = 2**(bits-1) - 1, rounded up with the probability that makes the mean right: norm * sign * level / s."""

    feedback: bool = False
    bits: int = 4
    bucket: int = 512
    seed: int = 0

    name: ClassVar[str] = "qsgd"
    changes: ClassVar[str] = "entries are rounded at random to a few levels"

    def __post_init__(self) -> None:
        whole("bits of qsgd", self.bits, 2, 8)
        whole("bucket of qsgd", self.bucket)
        whole("seed of qsgd", self.seed, 0)
        levels = (1 << (self.bits - 1)) - 1
        if self.feedback and self.bucket >= levels**2:
            # The variance of what is rounded is up to min(d/s^2, sqrt(d)/s) times the square of the norm (lemma 3.1).
            raise RecipeError(
                f"errors of qsgd with {self.bits} bits and buckets of {self.bucket} may exceed what is sent; feedback "
                "would let them grow",
                "Write feedback=off, or more bits" + (f", or a bucket below {levels**2}." if levels > 1 else "."),
            )

    def encode(self, x: Tensor, step: int, ranks: tuple[int, ...]) -> Payload:
        uniform = np.stack([drawn(ROUNDING, self.seed, step, rank).random(x.shape[1]) for rank in ranks])
        top = (1 << (self.bits - 1)) - 1
        norm, level = rounded(x, x.new_tensor(uniform), top, self.bucket)
        codes = level.int() | ((x < 0).int() << (self.bits - 1))
        return Payload((pack(codes, self.bits), norm))

    def decode(self, payload: Payload, n: int) -> Tensor:
        data, norm = payload.parts
        return restored(unpack(data, n, self.bits), norm, self.bits, self.bucket)

    def encoding(self, sizes: Sizes) -> Work:
        return work(draw=sizes.nbytes, round=sizes.nbytes, pack=unit_bytes(sizes.n, self.bits))

    def decoding(self, sizes: Sizes) -> Work:
        return work(unpack=unit_bytes(sizes.n, self.bits), restore=sizes.nbytes)

    def nbytes(self, sizes: Sizes) -> int | None:
        return packed_bytes(sizes.n, self.bits) + ceil(sizes.n / self.bucket) * sizes.itemsize


def rounded(x: Tensor, uniform: Tensor, top: int, bucket: int) -> tuple[Tensor, Tensor]:
    """Norm of each bucket, (rows, buckets), and level of each element, (rows, n), from 0 to ``top``. ``uniform``:
    (rows, n) numbers from [0, 1)."""
    rows, n = x.shape
    buckets = ceil(n / bucket)
    filled = x.new_zeros(rows, buckets * bucket)
    filled[:, :n] = x
    norm = filled.view(rows, buckets, bucket).norm(dim=2)
    each = _spread(norm, bucket, n)
    share = (x.abs() / each.where(each > 0, each * 0 + 1)).clamp(max=1.0)
    return norm, (share * top + uniform).floor().clamp(max=top)


def restored(codes: Tensor, norm: Tensor, bits: int, bucket: int) -> Tensor:
    """The numbers, (rows, n), that codes stand for, beside the norm of each bucket."""
    top = (1 << (bits - 1)) - 1
    sign = 1 - 2 * (codes >> (bits - 1))
    return (codes & top) * sign * _spread(norm, bucket, codes.shape[1]) / top


def _spread(norm: Tensor, bucket: int, n: int) -> Tensor:
    """(rows, buckets) -> (rows, n), to each element that of its bucket."""
    return norm.unsqueeze(2).expand(*norm.shape, bucket).flatten(1)[:, :n]
