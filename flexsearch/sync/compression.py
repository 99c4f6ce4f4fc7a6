"""How much is sent: what every compression can do, and sending everything."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil, isqrt
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np

from flexsearch.errors import RecipeError
from flexsearch.sync.exchange import INDEX_BYTES, Exchange, Group, Payload
from flexsearch.sync.kinds import Work, times, work
from flexsearch.sync.options import number, whole

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Sizes:
    """What a recipe works on: ``shapes`` of the tensors that lie one after the other in a row, ``itemsize`` of an
    element, bytes."""

    shapes: tuple[tuple[int, ...], ...]
    itemsize: int

    @property
    def n(self) -> int:
        """Elements of a row."""
        return sum(int(np.prod(shape, dtype=np.int64)) for shape in self.shapes)

    @property
    def nbytes(self) -> int:
        """Bytes of a row."""
        return self.n * self.itemsize

    def part(self, n: int) -> Sizes:
        """The same for a row of ``n`` elements."""
        return replace(self, shapes=((n,),))


Mean = Callable[["Tensor"], "Tensor"]
"""The mean over all positions, (rows, n), by the all-reduce of the recipe."""
Means = Callable[[int, int], list[Exchange]]
"""The exchanges of that for rows of so many elements, of so many bytes each."""


@dataclass(frozen=True)
class Compression:
    """What replicas send of a vector. ``feedback``: what was not sent is added to the next vector."""

    feedback: bool = True

    name: ClassVar[str]
    changes: ClassVar[str] = ""
    """What it changes in the mathematics, in words; empty: nothing."""
    alone: ClassVar[str] = ""
    """Why it works only among all, by collectives; empty: payloads can be sent to anyone."""
    keeps_size: ClassVar[bool] = True
    """Whether what arrives is of the size of what was sent, not only of its direction."""

    @property
    def planned(self) -> Compression:
        """The same, or where bytes depend on the numbers, one that sends as many as plans expect."""
        return self

    def check(self, sizes: Sizes) -> None:
        """Raise RecipeError if it does not fit such vectors."""

    def start(self, sizes: Sizes, like: Tensor) -> Any:
        """What it remembers from step to step, for rows as those of ``like``."""
        return None

    def encode(self, x: Tensor, step: int, ranks: tuple[int, ...]) -> Payload:
        """(rows, n) -> what the rows send."""
        raise NotImplementedError

    def decode(self, payload: Payload, n: int) -> Tensor:
        """What arrived, as (rows, n)."""
        raise NotImplementedError

    def nbytes(self, sizes: Sizes) -> int | None:
        """Bytes of a payload; None where they depend on the numbers."""
        raise NotImplementedError

    # ---- what a replica computes for it

    def encoding(self, sizes: Sizes) -> Work:
        """Of ``encode``, and of ``average`` up to its first exchange."""
        raise NotImplementedError

    def decoding(self, sizes: Sizes) -> Work:
        """Of ``decode``, for one payload."""
        raise NotImplementedError

    def totalling(self, sizes: Sizes, members: int) -> Work:
        """Of ``total``, for the payloads of so many."""
        return times(members, self.decoding(sizes)) + work(add=(members + 1) * sizes.nbytes // 3)

    def merging(self, sizes: Sizes, received: int, place: float) -> Work:
        """Of ``average`` between two of its exchanges, for one who received so many bytes; ``place``: the share of the
        exchanges that is over."""
        return work()

    def finishing(self, sizes: Sizes, members: int) -> Work:
        """Of ``average`` after its last exchange."""
        arrived = work(copy=2 * members * (self.nbytes(sizes) or 0) + sizes.nbytes)
        return arrived + self.totalling(sizes, members) + self.decoding(sizes)

    # ---- a step

    def average(
        self, x: Tensor, group: Group, mean: Mean, memory: Any, step: int, sizes: Sizes
    ) -> tuple[Tensor, Tensor, Any]:
        """Mean over all positions of what they send, (rows, n); what counts as sent of each row; the new memory."""
        payload = self.encode(x, step, group.ranks)
        total = self.total(group.all_gather(payload), sizes.n)
        return (total / group.size).expand_as(x), self.decode(payload, sizes.n), memory

    def total(self, payload: Payload, n: int) -> Tensor:
        """The sum of what all rows of a payload bring, (1, n)."""
        return self.decode(payload, n).sum(0, keepdim=True)

    def exchanges(self, members: int, means: Means, sizes: Sizes) -> list[Exchange] | None:
        """Those of ``average``; None where they depend on the numbers."""
        size = self.nbytes(sizes)
        return None if size is None else [Exchange("all_gather", members, (size,) * members)]


@dataclass(frozen=True)
class Everything(Compression):
    """Everything is sent, as it is."""

    feedback: bool = False

    name: ClassVar[str] = "everything"

    def encode(self, x: Tensor, step: int, ranks: tuple[int, ...]) -> Payload:
        return Payload((x,))

    def decode(self, payload: Payload, n: int) -> Tensor:
        return payload.parts[0]

    def nbytes(self, sizes: Sizes) -> int | None:
        return sizes.nbytes

    def encoding(self, sizes: Sizes) -> Work:
        return work()

    def decoding(self, sizes: Sizes) -> Work:
        return work()

    def finishing(self, sizes: Sizes, members: int) -> Work:
        return work(copy=sizes.nbytes)

    def average(
        self, x: Tensor, group: Group, mean: Mean, memory: Any, step: int, sizes: Sizes
    ) -> tuple[Tensor, Tensor, Any]:
        return mean(x), x, memory

    def exchanges(self, members: int, means: Means, sizes: Sizes) -> list[Exchange] | None:
        return means(sizes.n, sizes.itemsize)


# ---- some of the entries


def sparse(x: Tensor, at: Tensor) -> Payload:
    """The values of rows at their indices (rows, k), and these."""
    return Payload((x.gather(1, at), at.int()))


def dense(payload: Payload, n: int) -> Tensor:
    """Values at their indices, zeros elsewhere, (rows, n)."""
    values, at = payload.parts
    return values.new_zeros(values.shape[0], n).scatter_add_(1, at.long(), values)


def added(payload: Payload, n: int) -> Tensor:
    """The sum of all rows of values at their indices, (1, n), without a dense vector for each."""
    values, at = payload.parts
    return values.new_zeros(1, n).scatter_add_(1, at.long().view(1, -1), values.reshape(1, -1))


LONG: Final = 1 << 16
"""Elements of a row from which on the largest are first looked for in a sample."""
SAMPLED: Final = 61
"""One of so many is in it; not a divisor of usual sizes."""


def largest(x: Tensor, k: int) -> Tensor:
    """Places of the ``k`` entries of largest magnitude of each row, (rows, k), as ``topk`` selects them. On a CPU, it
    makes pairs of all values and places, four times the memory of the row, and goes through them in a time that depends
    on their order. So only entries are looked at that a sample of the row shows to be large enough."""
    size = x.abs()
    if x.device.type != "cpu" or x.shape[1] < LONG:
        return size.topk(k, 1).indices
    rows = [_largest(row, k) for row in size]
    places = rows[0].new_empty(len(rows), k)
    for r, row in enumerate(rows):
        places[r] = row
    return places


def _largest(size: Tensor, k: int) -> Tensor:
    """Of one long row without negative entries."""
    sample = size[::SAMPLED]
    expected = ceil(k / len(size) * len(sample))
    rank = expected + 4 * isqrt(expected) + 1  # four standard deviations: too few are hardly ever left
    if rank < len(sample):
        least = sample.topk(rank, sorted=False).values.min()
        # Not "at least": entries that are no numbers count as the largest.
        left = (size <= least if least == 0 else size < least).logical_not_().nonzero().squeeze(1)
        if len(left) >= k:
            return left[size[left].topk(k).indices]
    return size.topk(k).indices


def marked(x: Tensor, chosen: Tensor) -> Payload:
    """The values of rows where ``chosen`` is true, rows of different lengths, and their indices."""
    length = chosen.sum(1)
    row, column = chosen.nonzero(as_tuple=True)
    place = (chosen.cumsum(1) - 1)[row, column]
    values = x.new_zeros(x.shape[0], max(1, int(length.max())))
    at = values.int()
    values[row, place], at[row, place] = x[row, column], column.int()
    return Payload((values, at), length)


@dataclass(frozen=True)
class Sparse(Compression):
    """Some entries are sent, with their indices."""

    def decode(self, payload: Payload, n: int) -> Tensor:
        return dense(payload, n)

    def total(self, payload: Payload, n: int) -> Tensor:
        return added(payload, n)

    def decoding(self, sizes: Sizes) -> Work:
        return self.totalling(sizes, 1)

    def totalling(self, sizes: Sizes, members: int) -> Work:
        return work(fill=sizes.nbytes, scatter=members * (self.nbytes(sizes) or 0))


@dataclass(frozen=True)
class Chosen(Sparse):
    """``k`` entries of a vector are sent, or a share ``density`` of them (at least one)."""

    k: int | None = None
    density: float | None = None

    def __post_init__(self) -> None:
        if (self.k is None) == (self.density is None):
            raise RecipeError(f"{self.name} needs either k or density", f"Write {self.name}:density=0.01.")
        if self.k is not None:
            whole(f"k of {self.name}", self.k)
        else:
            number(f"density of {self.name}", self.density, most=1.0)

    def check(self, sizes: Sizes) -> None:
        if self.k is not None and self.k > sizes.n:
            raise RecipeError(
                f"k of {self.name} is {self.k}, but what is sent has {sizes.n} elements",
                f"Give a k of at most {sizes.n}, or a density.",
            )

    def selecting(self, sizes: Sizes) -> Work:
        """Of selecting the largest, and taking them out."""
        k = self.entries(sizes.n)
        return work(select=sizes.nbytes, sort=k * sizes.itemsize, scatter=k * (sizes.itemsize + INDEX_BYTES))

    def entries(self, n: int) -> int:
        """How many of ``n``."""
        return self.k if self.k is not None else min(n, max(1, ceil(float(self.density or 0.0) * n)))


# ---- random numbers, the same on every machine

CHOICE: Final = 1
ROUNDING: Final = 2
START: Final = 3


def drawn(purpose: int, *key: int) -> np.random.Generator:
    """A generator for a purpose and, for instance, a step and a position."""
    return np.random.default_rng((purpose, *key))
