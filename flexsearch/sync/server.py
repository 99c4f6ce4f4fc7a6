"""A parameter server, one or sharded over several (Li et al., 2014): push gradients, pull their mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from flexsearch.errors import RecipeError
from flexsearch.sync.compression import Compression, Sizes
from flexsearch.sync.exchange import Exchange, Group, Payload, served
from flexsearch.sync.kinds import Work, times, work
from flexsearch.sync.options import one_of, whole
from flexsearch.sync.partners import Partners

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Server(Partners):
    """Each of ``shards`` servers keeps an equal part of the vector. ``on``: "workers": the first workers serve, too;
    "devices": so many devices after the workers do nothing else. What is pushed may be compressed, part by part; what
    is pulled is not."""

    shards: int = 1
    on: str = "workers"

    name: ClassVar[str] = "server"
    servers: ClassVar[bool] = True

    def __post_init__(self) -> None:
        whole("shards of server", self.shards)
        one_of("on of server", self.on, ("workers", "devices"))

    def check(self, size: int, hosts: tuple[int, ...], devices: int) -> None:
        if self.on == "workers" and self.shards > size:
            raise RecipeError(
                f"server {size} of {self.shards} is on no host: only {size} workers can serve",
                f"Give at most {size} shards, or on=devices.",
            )
        if self.on == "devices" and size + self.shards > devices:
            fewer = devices - self.shards
            raise RecipeError(
                f"a dedicated server is on no host: {size} workers and {self.shards} servers need "
                f"{size + self.shards} devices, and there are {devices}",
                f"Use a topology with more devices{f', --workers {fewer}' if fewer > 1 else ''}, or on=workers.",
            )

    def owners(self, size: int) -> list[int]:
        """Positions of the servers."""
        first = 0 if self.on == "workers" else size
        return list(range(first, first + self.shards))

    def bounds(self, n: int) -> list[tuple[int, int]]:
        """Which elements each server keeps."""
        return [(j * n // self.shards, (j + 1) * n // self.shards) for j in range(self.shards)]

    def average(
        self, x: Tensor, group: Group, compression: Compression, memory: Any, step: int, sizes: Sizes
    ) -> tuple[Tensor, Tensor, Any]:
        self.refuse_alone(compression)
        bounds = self.bounds(sizes.n)
        shards = [compression.encode(x[:, a:b], step, group.ranks) for a, b in bounds]
        sent = x.new_empty(x.shape)
        for shard, (a, b) in zip(shards, bounds, strict=True):
            sent[:, a:b] = compression.decode(shard, b - a)

        def merge(j: int, pushed: Payload) -> Tensor:
            a, b = bounds[j]
            return compression.decode(pushed, b - a).to(x.dtype).mean(0, keepdim=True)

        mean = x.new_empty(x.shape)
        like = [mean[:, a:b] for a, b in bounds]
        for (a, b), part in zip(bounds, group.serve(shards, self.owners(group.size), merge, like), strict=True):
            mean[:, a:b] = part
        return mean, sent, memory

    def encoding(self, compression: Compression, sizes: Sizes, first: Exchange) -> Work:
        return compression.encoding(sizes) + compression.decoding(sizes) + work(copy=sizes.nbytes)

    def merging(self, compression: Compression, sizes: Sizes, members: int, received: int, place: float) -> Work:
        part = sizes.part(-(-sizes.n // self.shards))
        mean = work(copy=2 * received, add=(members + 1) * part.nbytes // 3)
        return mean + times(members, compression.decoding(part))

    def finishing(self, compression: Compression, sizes: Sizes, members: int, received: int) -> Work:
        return work(copy=sizes.nbytes)

    def exchanges(
        self, members: int, hosts: tuple[int, ...], compression: Compression, sizes: Sizes, step: int
    ) -> list[Exchange] | None:
        there, back = [], []
        for owner, (a, b) in zip(self.owners(members), self.bounds(sizes.n), strict=True):
            pushed = compression.nbytes(sizes.part(b - a))
            if pushed is None:
                return None
            there += [(worker, owner, pushed) for worker in range(members)]
            back += [(owner, worker, (b - a) * sizes.itemsize) for worker in range(members)]
        return served(members, there, back)
