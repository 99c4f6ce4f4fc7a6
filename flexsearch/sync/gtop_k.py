"""gTop-k: the k largest entries of the sum, found by a tree of sparse merges, O(k log P) (Shi et al., 2019)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from flexsearch.sync.all_reduce import climbs, descent
from flexsearch.sync.compression import Chosen, Mean, Means, Sizes, dense, largest, sparse
from flexsearch.sync.exchange import INDEX_BYTES, Exchange, Group, Payload, rounds
from flexsearch.sync.kinds import Work, times, work

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class GTopK(Chosen):
    """Neighbours in a tree add their k largest entries up and keep k of these; the root's go to everyone (algorithms 3
    and 4 of the paper). Values whose index is not among the last k go back to the residual of their row. What a merge
    drops of an index that another branch brings to the root is lost, as in the paper."""

    name: ClassVar[str] = "gtop-k"
    changes: ClassVar[str] = "only the largest entries of the sum are applied"
    alone: ClassVar[str] = "its tree of merges is one collective among all workers"

    def nbytes(self, sizes: Sizes) -> int | None:
        return self.entries(sizes.n) * (sizes.itemsize + INDEX_BYTES)

    def encoding(self, sizes: Sizes) -> Work:
        return self.selecting(sizes)

    def merging(self, sizes: Sizes, received: int, place: float) -> Work:
        if place > 0.5:
            return work()
        both = times(2, self.decoding(sizes)) + work(copy=sizes.nbytes, add=sizes.nbytes)
        selected = self.selecting(sizes)
        selected["sort"] //= 2  # almost all are zeros, which are never kept in place of others
        return both + selected

    def finishing(self, sizes: Sizes, members: int) -> Work:
        return times(3, self.decoding(sizes)) + work(copy=sizes.nbytes, add=sizes.nbytes)

    def average(
        self, x: Tensor, group: Group, mean: Mean, memory: Any, step: int, sizes: Sizes
    ) -> tuple[Tensor, Tensor, Any]:
        k, n = self.entries(sizes.n), sizes.n
        own = sparse(x, largest(x, k))
        held = own
        for source in climbs(group.size):
            arrived = [source[r] is not None for r in group.ranks]
            other = group.receive(held, source)
            if not any(arrived):
                continue
            total = dense(held, n) + dense(other, n) * x.new_tensor(arrived).unsqueeze(1)
            held = sparse(total, largest(total, k))
        for source in reversed(climbs(group.size)):
            held = group.receive(held, descent(source))
        result = dense(held, n)
        sent = dense(own, n) * dense(Payload((held.parts[0] * 0 + 1, held.parts[1])), n)
        return result / group.size, sent, memory

    def exchanges(self, members: int, means: Means, sizes: Sizes) -> list[Exchange] | None:
        up = climbs(members)
        return rounds(members, [*up, *map(descent, reversed(up))], self.nbytes(sizes) or 0)
