"""The mean over all, exactly: the backend's all-reduce, and the algorithms it may be made of.

Bytes that a device sends of S, in messages one after the other, among n: ring 2 (n-1)/n S in 2 (n-1); tree S up and S
down each of log2 n levels; halving and doubling (Rabenseifner) 2 (n-1)/n S in 2 log2 n; everyone to everyone (n-1) S at
once; hierarchical: rings within hosts of m, then between hosts on S/m (Thakur, Rabenseifner and Gropp, 2005)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Any, ClassVar

from flexsearch.errors import RecipeError
from flexsearch.sync.compression import Compression, Sizes
from flexsearch.sync.exchange import Exchange, Group, Payload, Source, rounds
from flexsearch.sync.kinds import Work, work
from flexsearch.sync.options import one_of
from flexsearch.sync.partners import Partners

if TYPE_CHECKING:
    from torch import Tensor

FORMS = ("backend", "ring", "tree", "halving-doubling", "everyone", "hierarchical")


@dataclass(frozen=True)
class AllReduce(Partners):
    """Everyone gets the mean of all. ``form``: the algorithm; "backend": the library's own call."""

    form: str = "backend"

    name: ClassVar[str] = "all-reduce"

    def __post_init__(self) -> None:
        one_of("form of all-reduce", self.form, FORMS)

    def check(self, size: int, hosts: tuple[int, ...], devices: int) -> None:
        if self.form == "halving-doubling" and size & (size - 1):
            raise RecipeError(
                f"halving-doubling needs a power of two of workers, not {size}", "Use the form ring or tree."
            )
        if self.form == "hierarchical":
            inner = rings_of(hosts)
            if len({len(ring) for ring in inner}) > 1 or len(inner) < 2 or len(inner[0]) < 2:
                raise RecipeError(
                    "hierarchical needs several hosts with equally many workers, two or more on each",
                    "Use the form ring or tree.",
                )

    def average(
        self, x: Tensor, group: Group, compression: Compression, memory: Any, step: int, sizes: Sizes
    ) -> tuple[Tensor, Tensor, Any]:
        return compression.average(x, group, lambda v: self.mean(v, group), memory, step, sizes)

    def mean(self, x: Tensor, group: Group) -> Tensor:
        """(rows, n) -> the mean over all positions, in each row."""
        if x.element_size() <= 2:  # as PyTorch's hook for float16 does, lest sums overflow
            return self._sum(x / group.size, group)
        return self._sum(x, group) / group.size

    def _sum(self, x: Tensor, group: Group) -> Tensor:
        n, size = x.shape[1], group.size
        if self.form == "backend":
            return group.all_reduce(x)
        if self.form == "everyone":
            return group.all_gather(Payload((x,))).parts[0].sum(0, keepdim=True).expand_as(x)
        if self.form == "tree":
            return _tree(x, group)
        inner = rings_of(group.hosts) if self.form == "hierarchical" else [list(range(size))]
        pieces = len(inner[0])
        chunks = _split(x, pieces)
        if self.form == "halving-doubling":
            return _halving_doubling(chunks, group)[:, :n]
        chunks = _reduce_scatter(chunks, group, inner)
        if self.form == "hierarchical":
            rails = [list(rail) for rail in zip(*inner, strict=True)]
            own = [(place(inner)[r] + 1) % pieces for r in group.ranks]
            rows = list(range(len(own)))
            part = _split(chunks[rows, own], len(inner))
            part = _all_gather(_reduce_scatter(part, group, rails), group, rails).flatten(1)
            chunks[rows, own] = part[:, : chunks.shape[2]]
        return _all_gather(chunks, group, inner).flatten(1)[:, :n]

    def exchanges(
        self, members: int, hosts: tuple[int, ...], compression: Compression, sizes: Sizes, step: int
    ) -> list[Exchange] | None:
        return compression.exchanges(members, lambda n, size: self.means(members, hosts, n, size), sizes)

    def encoding(self, compression: Compression, sizes: Sizes, first: Exchange) -> Work:
        prepared = work()
        if first.form == "all_reduce":
            prepared = work(copy=first.nbytes[0])
        elif self._chunked:
            size = first.nbytes[0] * (2 if self.form == "halving-doubling" else first.members)
            prepared = work(copy=size)
        return compression.encoding(sizes) + prepared

    def merging(self, compression: Compression, sizes: Sizes, members: int, received: int, place: float) -> Work:
        done = compression.merging(sizes, received, place)
        if self._chunked:
            return done + (work(copy=3 * received, add=received) if place <= 0.5 else work(copy=2 * received))
        return done + (work(copy=received, add=received) if self.form == "tree" and place <= 0.5 else work())

    def finishing(self, compression: Compression, sizes: Sizes, members: int, received: int) -> Work:
        done = compression.finishing(sizes, members)
        if self.form == "everyone":
            each = received // (members - 1)
            return done + work(copy=2 * members * each, add=(members + 1) * each // 3)
        return done + (work(copy=2 * received) if self._chunked else work())

    @property
    def _chunked(self) -> bool:
        """Whether vectors are cut into chunks."""
        return self.form in ("ring", "halving-doubling", "hierarchical")

    def means(self, members: int, hosts: tuple[int, ...], n: int, itemsize: int) -> list[Exchange]:
        """The exchanges of ``mean`` for rows of ``n`` elements."""
        if self.form == "backend":
            return [Exchange("all_reduce", members, (n * itemsize,))]
        if self.form == "everyone":
            return [Exchange("all_gather", members, (n * itemsize,) * members)]
        if self.form == "tree":
            up = climbs(members)
            return rounds(members, [*up, *map(descent, reversed(up))], n * itemsize)
        inner = rings_of(hosts) if self.form == "hierarchical" else [list(range(members))]
        part = ceil(n / len(inner[0]))
        if self.form == "halving-doubling":
            halves = [
                exchange
                for half in _halves(members)
                for exchange in rounds(members, [[r ^ half for r in range(members)]], half * part * itemsize)
            ]
            return [*halves, *reversed(halves)]
        once = rounds(members, [_before(inner)] * (len(inner[0]) - 1), part * itemsize)
        if self.form == "ring":
            return once * 2
        rails = [list(rail) for rail in zip(*inner, strict=True)]
        between = rounds(members, [_before(rails)] * (2 * (len(inner) - 1)), ceil(part / len(inner)) * itemsize)
        return [*once, *between, *once]


def rings_of(hosts: Sequence[int]) -> list[list[int]]:
    """Positions host by host."""
    return [[r for r, h in enumerate(hosts) if h == host] for host in dict.fromkeys(hosts)]


def climbs(size: int) -> list[list[int | None]]:
    """The levels of a binomial tree, from the leaves: who receives from whom; position 0 is the root."""
    levels, step = [], 1
    while step < size:
        levels.append([r + step if r % (2 * step) == 0 and r + step < size else None for r in range(size)])
        step *= 2
    return levels


def descent(source: Source) -> list[int | None]:
    """A level of the tree the other way round."""
    down: list[int | None] = [None] * len(source)
    for receiver, sender in enumerate(source):
        if sender is not None:
            down[sender] = receiver
    return down


def place(rings: list[list[int]]) -> dict[int, int]:
    """By position: its place in its ring."""
    return {r: k for ring in rings for k, r in enumerate(ring)}


def _before(rings: list[list[int]]) -> list[int | None]:
    """By position: the one before it in its ring."""
    before = {r: ring[k - 1] for ring in rings for k, r in enumerate(ring)}
    return [before[r] for r in range(len(before))]


def _split(x: Tensor, pieces: int) -> Tensor:
    """(rows, n) -> (rows, pieces, c), filled up with zeros."""
    c = ceil(x.shape[1] / pieces)
    filled = x.new_empty(x.shape[0], pieces * c)
    filled[:, : x.shape[1]] = x
    filled[:, x.shape[1] :] = 0
    return filled.view(x.shape[0], pieces, c)


def _reduce_scatter(chunks: Tensor, group: Group, rings: list[list[int]]) -> Tensor:
    """After it, the one at place p of a ring of m has the sum of chunk (p + 1) mod m."""
    at, m = place(rings), len(rings[0])
    rows = list(range(chunks.shape[0]))
    for t in range(m - 1):
        sent = Payload((chunks[rows, [(at[r] - t) % m for r in group.ranks]],))
        chunks[rows, [(at[r] - 1 - t) % m for r in group.ranks]] += group.receive(sent, _before(rings)).parts[0]
    return chunks


def _all_gather(chunks: Tensor, group: Group, rings: list[list[int]]) -> Tensor:
    """After it, everyone in a ring has the chunks that ``_reduce_scatter`` left with its members."""
    at, m = place(rings), len(rings[0])
    rows = list(range(chunks.shape[0]))
    for t in range(m - 1):
        sent = Payload((chunks[rows, [(at[r] + 1 - t) % m for r in group.ranks]],))
        chunks[rows, [(at[r] - t) % m for r in group.ranks]] = group.receive(sent, _before(rings)).parts[0]
    return chunks


def _tree(x: Tensor, group: Group) -> Tensor:
    for source in climbs(group.size):
        arrives = [source[r] is not None for r in group.ranks]
        other = group.receive(Payload((x,)), source).parts[0]
        if any(arrives):
            x = x + other * x.new_tensor(arrives).unsqueeze(1)
    for source in reversed(climbs(group.size)):
        x = group.receive(Payload((x,)), descent(source)).parts[0]
    return x


def _halves(size: int) -> Iterator[int]:
    """Half of the positions, a quarter, ... one."""
    while size > 1:
        size //= 2
        yield size


def _halving_doubling(chunks: Tensor, group: Group) -> Tensor:
    rows = [[k] for k in range(chunks.shape[0])]

    def ranges(half: int, kept: bool) -> list[list[int]]:
        """By row: the chunks that it keeps, or sends, where it has 2 ``half`` of them."""
        begin = [r // (2 * half) * 2 * half + (half if bool(r & half) == kept else 0) for r in group.ranks]
        return [list(range(b, b + half)) for b in begin]

    halves = list(_halves(group.size))
    for half in halves:
        source = [r ^ half for r in range(group.size)]
        sent = chunks[rows, ranges(half, False)].flatten(1)
        arrived = group.receive(Payload((sent,)), source).parts[0]
        chunks[rows, ranges(half, True)] += arrived.view(len(rows), half, -1)
    for half in reversed(halves):
        source = [r ^ half for r in range(group.size)]
        sent = chunks[rows, ranges(half, True)].flatten(1)
        arrived = group.receive(Payload((sent,)), source).parts[0]
        chunks[rows, ranges(half, False)] = arrived.view(len(rows), half, -1)
    return chunks.flatten(1)
