"""PowerSGD: matrices as products of two of low rank, by one step of power iteration (Vogels et al., 2019)."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar

from flexsearch.sync.compression import START, Compression, Mean, Means, Sizes, drawn
from flexsearch.sync.exchange import Exchange, Group
from flexsearch.sync.kinds import Work, work
from flexsearch.sync.options import whole

if TYPE_CHECKING:
    from torch import Tensor

EPSILON = 1e-8
"""Added to the norms of columns, as in the authors' code."""


@dataclass(frozen=True)
class PowerSGD(Compression):
    """A tensor M is taken as a matrix (first dimension, others): P = mean(M Q), orthogonal; Q = mean(M^T P); what
    arrives is P Q^T, and Q begins the next step. Tensors that this would not make smaller are sent as they are."""

    rank: int = 2
    seed: int = 0

    name: ClassVar[str] = "powersgd"
    changes: ClassVar[str] = "matrices are sent as products of two of low rank"
    alone: ClassVar[str] = "its factors have a meaning only for all workers together"

    def __post_init__(self) -> None:
        whole("rank of powersgd", self.rank)
        whole("seed of powersgd", self.seed, 0)

    def matrices(self, sizes: Sizes) -> list[tuple[int, int, int]]:
        """(First element, rows, columns) of what is compressed."""
        matrices, begin = [], 0
        for shape in sizes.shapes:
            a, b = (shape[0], prod(shape[1:])) if shape else (1, 1)
            if len(shape) > 1 and self.rank * (a + b) < a * b:
                matrices.append((begin, a, b))
            begin += prod(shape)
        return matrices

    def start(self, sizes: Sizes, like: Tensor) -> Any:
        return tuple(
            like.new_tensor(drawn(START, self.seed, k).standard_normal((b, self.rank)))
            for k, (_, _, b) in enumerate(self.matrices(sizes))
        )

    def encoding(self, sizes: Sizes) -> Work:
        places = self.matrices(sizes)
        matrices = sum(a * b for _, a, b in places) * sizes.itemsize
        calls = (5 + 3 * self.rank) * len(places)  # a third each of ``average``'s on every matrix
        return work(product=self.rank * matrices, copy=2 * (sizes.nbytes - matrices), call=calls)

    def merging(self, sizes: Sizes, received: int, place: float) -> Work:
        return self.encoding(sizes) + work(copy=received) if place == 0.5 else work()

    def finishing(self, sizes: Sizes, members: int) -> Work:
        return self.encoding(sizes) + work(copy=2 * sizes.nbytes)

    def average(
        self, x: Tensor, group: Group, mean: Mean, memory: Any, step: int, sizes: Sizes
    ) -> tuple[Tensor, Tensor, Any]:
        rows, places, r = x.shape[0], self.matrices(sizes), self.rank
        whole_ = [k for a, b in _gaps(places, sizes.n) for k in range(a, b)]
        tensors = [x[:, at : at + a * b].view(rows, a, b) for at, a, b in places]
        factors = [m @ q for m, q in zip(tensors, memory, strict=True)]
        first = mean(_joined(x, [x[:, whole_], *factors]))
        result = x.new_zeros(x.shape)
        result[:, whole_] = first[:, : len(whole_)]
        left = [_orthogonal(p) for p in _parts(first[:, len(whole_) :], [(a, r) for _, a, _ in places])]
        second = mean(_joined(x, [m.transpose(1, 2) @ p for m, p in zip(tensors, left, strict=True)])) if places else x
        right = _parts(second, [(b, r) for _, _, b in places])
        for (at, a, b), p, q in zip(places, left, right, strict=True):
            result[:, at : at + a * b] = (p @ q.transpose(1, 2)).flatten(1)
        sent = result.clone()
        sent[:, whole_] = x[:, whole_]
        return result, sent, tuple(q[0] for q in right)

    def exchanges(self, members: int, means: Means, sizes: Sizes) -> list[Exchange] | None:
        places = self.matrices(sizes)
        exact = sizes.n - sum(a * b for _, a, b in places)
        first = exact + sum(a for _, a, _ in places) * self.rank
        second = sum(b for _, _, b in places) * self.rank
        return [*means(first, sizes.itemsize), *(means(second, sizes.itemsize) if places else [])]


def _gaps(places: list[tuple[int, int, int]], n: int) -> list[tuple[int, int]]:
    """The elements outside of the matrices, as ranges."""
    ends = [0, *(at + a * b for at, a, b in places)]
    return list(zip(ends, [*(at for at, _, _ in places), n], strict=True))


def _joined(x: Tensor, parts: list[Tensor]) -> Tensor:
    """Rows of all parts one after the other."""
    flat = [part.flatten(1) for part in parts]
    joined = x.new_zeros(x.shape[0], sum(part.shape[1] for part in flat))
    at = 0
    for part in flat:
        joined[:, at : at + part.shape[1]] = part
        at += part.shape[1]
    return joined


def _parts(x: Tensor, shapes: list[tuple[int, int]]) -> list[Tensor]:
    """The inverse: matrices of these shapes."""
    parts, at = [], 0
    for a, b in shapes:
        parts.append(x[:, at : at + a * b].reshape(-1, a, b))
        at += a * b
    return parts


def _orthogonal(p: Tensor) -> Tensor:
    """Orthonormal columns by Gram and Schmidt, in order."""
    p = p.clone()
    for k in range(p.shape[2]):
        column = p[:, :, k : k + 1] / (p[:, :, k : k + 1].norm(dim=1, keepdim=True) + EPSILON)
        p[:, :, k : k + 1] = column
        rest = p[:, :, k + 1 :]
        p[:, :, k + 1 :] = rest - column * (column * rest).sum(1, keepdim=True)
    return p
