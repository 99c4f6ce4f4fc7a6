"""What replicas send each other: payloads, exchanges, and the group in which these happen.

Positions are those of replicas in their group, 0 to size - 1, never devices; dedicated servers follow them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

if TYPE_CHECKING:
    from torch import Tensor

INDEX_BYTES: Final = 4
"""Of an index, and of the number of entries where it is not fixed."""

Source = Sequence[int | None]
"""By position: from whom it receives; None: from nobody."""


@dataclass(frozen=True)
class Exchange:
    """One phase of communication. ``form``: "all_reduce" by the backend's call (``nbytes``: what each member holds),
    "all_gather" (by member, what it sends to every other one), "exchange" of messages between ``pairs`` (sender,
    receiver), of ``nbytes`` each, at the same time."""

    form: Literal["all_reduce", "all_gather", "exchange"]
    members: int
    nbytes: tuple[int, ...]
    pairs: tuple[tuple[int, int], ...] = ()

    def messages(self) -> Iterator[tuple[int, int, int]]:
        """(Sender, receiver, bytes) of each message; of an all-reduce those of a ring, all steps of an edge in one."""
        n = self.members
        if self.form == "all_reduce":
            yield from ((r, (r + 1) % n, 2 * (n - 1) * self.nbytes[0] // n) for r in range(n))
        elif self.form == "all_gather":
            yield from ((a, b, self.nbytes[a]) for a in range(n) for b in range(n) if a != b)
        else:
            yield from ((a, b, size) for (a, b), size in zip(self.pairs, self.nbytes, strict=True))

    @property
    def sent(self) -> int:
        """Bytes that all members send, together."""
        n = self.members
        if self.form == "all_reduce":
            return 2 * (n - 1) * self.nbytes[0]
        return sum(self.nbytes) * (n - 1 if self.form == "all_gather" else 1)

    @property
    def count(self) -> int:
        """Messages that all members send, together; of an all-reduce those of a ring."""
        n = self.members
        return {"all_reduce": 2 * (n - 1) * n, "all_gather": n * (n - 1)}.get(self.form, len(self.pairs))


def rounds(members: int, sources: Sequence[Source], nbytes: int) -> list[Exchange]:
    """One exchange for each of ``sources``: every position that has one receives ``nbytes`` from it."""
    pairs = [tuple((a, b) for b, a in enumerate(source) if a is not None) for source in sources]
    return [Exchange("exchange", members, (nbytes,) * len(p), p) for p in pairs if p]


@dataclass(frozen=True)
class Payload:
    """What replicas send, as it goes over the wire. ``parts``: (rows, entries) tensors. ``length``: (rows,) how many
    entries of a row count, where that is not fixed; the count is sent first. The others are zeros."""

    parts: tuple[Tensor, ...]
    length: Tensor | None = None

    @property
    def nbytes(self) -> tuple[int, ...]:
        """By row."""
        entry = [part.element_size() for part in self.parts]
        if self.length is not None:
            return tuple(INDEX_BYTES + int(count) * sum(entry) for count in self.length.tolist())
        size = sum(part[0].numel() * each for part, each in zip(self.parts, entry, strict=True))
        return (size,) * self.parts[0].shape[0]

    def rows(self, which: Sequence[int]) -> Payload:
        """Some of the rows."""
        at = list(which)
        return Payload(tuple(part[at] for part in self.parts), self.length[at] if self.length is not None else None)


class Group(Protocol):
    """The replicas that synchronise. Tensors have a row for each of ``ranks``, the positions that are held here.
    ``hosts``: by position, the number of its host."""

    size: int
    ranks: tuple[int, ...]
    hosts: tuple[int, ...]

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over all positions, (rows, n), by one call of the backend. Half precision adds in the order of the
        positions."""

    def all_gather(self, payload: Payload) -> Payload:
        """The payloads of all positions, (size, entries)."""

    def receive(self, payload: Payload, source: Source) -> Payload:
        """What each position gets from its source, of the same size; of a row without one, its own."""

    def mix(self, payload: Payload, weights: Any, decode: Callable[[Payload], Tensor]) -> Tensor:
        """Every position sends its payload to those in whose row of ``weights`` (size, size) it counts, and adds up
        what it has and gets, by these weights."""

    def serve(
        self, shards: Sequence[Payload], owners: Sequence[int], merge: Callable[[int, Payload], Tensor],
        like: Sequence[Tensor],
    ) -> list[Tensor]:  # fmt: skip
        """Every position sends payload j to position ``owners[j]``, which makes (1, n_j) of all of them and sends that
        back to everyone. ``like``: of the shape and type of what comes back, (rows, n_j)."""


class Simulated:
    """All positions in this process: exact arithmetic, and a record of the ``exchanges`` that would happen."""

    def __init__(self, size: int, hosts: Sequence[int] | None = None) -> None:
        self.size, self.ranks = size, tuple(range(size))
        self.hosts = tuple(hosts) if hosts is not None else self.ranks
        self.exchanges: list[Exchange] = []

    def all_reduce(self, x: Tensor) -> Tensor:
        self.exchanges.append(Exchange("all_reduce", self.size, (x[0].numel() * x.element_size(),)))
        if x.element_size() > 2:
            return x.sum(0, keepdim=True).expand_as(x)
        total = x[0]
        for row in x[1:]:
            total = total + row
        return total.expand_as(x)

    def all_gather(self, payload: Payload) -> Payload:
        self.exchanges.append(Exchange("all_gather", self.size, payload.nbytes))
        return payload

    def receive(self, payload: Payload, source: Source) -> Payload:
        self.exchanges += rounds(self.size, [source], payload.nbytes[0])
        return payload.rows([b if a is None else a for b, a in enumerate(source)])

    def mix(self, payload: Payload, weights: Any, decode: Callable[[Payload], Tensor]) -> Tensor:
        sizes = payload.nbytes
        pairs = neighbours(weights)
        self.exchanges.append(Exchange("exchange", self.size, tuple(sizes[a] for a, _ in pairs), pairs))
        x = decode(payload)
        return x.new_tensor(weights) @ x

    def serve(
        self, shards: Sequence[Payload], owners: Sequence[int], merge: Callable[[int, Payload], Tensor],
        like: Sequence[Tensor],
    ) -> list[Tensor]:  # fmt: skip
        merged = [merge(j, shard) for j, shard in enumerate(shards)]
        back = [x.numel() * x.element_size() for x in merged]
        there = [
            (a, o, sizes[a]) for sizes, o in zip([s.nbytes for s in shards], owners, strict=True) for a in self.ranks
        ]
        self.exchanges += served(
            self.size, there, [(o, a, b) for o, b in zip(owners, back, strict=True) for a in self.ranks]
        )
        return [x.expand(self.size, -1) for x in merged]


def served(members: int, there: Sequence[tuple[int, int, int]], back: Sequence[tuple[int, int, int]]) -> list[Exchange]:
    """The exchanges of a server: messages to it, and back; what it sends to itself is none."""
    phases = []
    for way in (there, back):
        crossing = [(a, b, size) for a, b, size in way if a != b]
        phases.append(
            Exchange("exchange", members, tuple(s for *_, s in crossing), tuple((a, b) for a, b, _ in crossing))
        )
    return [phase for phase in phases if phase.pairs]


def neighbours(weights: Any) -> tuple[tuple[int, int], ...]:
    """(Sender, receiver) of all messages that mixing by a matrix takes."""
    size = len(weights)
    return tuple((a, b) for b in range(size) for a in range(size) if a != b and weights[b][a] != 0)
