"""Meshes of one class: a topology that falls apart into equal blocks, each wired alike inside and to the others.

Where every block does the same at the same time, one of them stands for all: the first one. A link or processor of
another block then has an **image** in the first, and what goes on there goes on in the image at the same moment.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

from flexsearch.errors import TopologyError
from flexsearch.topology.parts import Device, Link
from flexsearch.topology.topology import Topology

Hop = tuple[str, str]
NONE: Final = -1
"""In the place of an image: none is known."""


@dataclass(frozen=True)
class Folding:
    """A topology folded into ``replicas`` blocks of consecutive devices; ``inside`` of them make up a host, or share
    several hosts between them; 1 if a block is a host or more. Blocks take each other's places by a turn inside such
    hosts, and by a turn of the hosts (or of larger blocks). ``block``: the first of them, with its links to the others
    as far as messages take them (they may lead to a switch and end there; a device of another block is a switch at the
    end of each link that leads to it directly). ``image``: by resource of the ``whole``, the
    resource of ``block`` that stands for it."""

    whole: Topology
    block: Topology
    replicas: int
    inside: int
    image: npt.NDArray[np.uint32]


def fold_topology(whole: Topology, replicas: int) -> Folding:
    """``whole`` as ``replicas`` equal blocks. Raises TopologyError, with the reason, if it is not that: if renaming
    every device to the one at its place in the next block changes kinds of devices, routes or links, or if two blocks
    share a link for what goes on inside them."""
    count = len(whole.devices)
    if replicas < 2 or count % replicas:
        raise _unfoldable(whole, replicas, f"{count} devices are not {replicas} times as many")
    return _Folder(whole, replicas).fold()


def foldings(whole: Topology) -> tuple[int, ...]:
    """Into how many blocks a topology can be folded, ascending."""
    return tuple(n for n in range(2, len(whole.devices) + 1) if is_foldable(whole, n))


def is_foldable(whole: Topology, replicas: int) -> bool:
    """Whether a topology is so many equal blocks (``fold_topology``)."""
    try:
        fold_topology(whole, replicas)
    except TopologyError:
        return False
    return True


def _unfoldable(whole: Topology, replicas: int, why: str) -> TopologyError:
    return TopologyError(f"topology {whole.name} cannot be folded into {replicas} equal blocks: {why}")


class _Folder:
    """Follows every route under the renaming of devices by one block."""

    def __init__(self, whole: Topology, replicas: int) -> None:
        self.whole, self.replicas, self.count = whole, replicas, len(whole.devices)
        self.size = self.count // replicas
        self.names = [device.name for device in whole.devices]
        self.foreign = set(self.names[self.size :])
        """Devices of other blocks."""
        self.inside = self._on_the_same_hosts()
        self.step = 1
        """How many blocks on the renaming at hand goes: 1 inside a host, else whole hosts."""
        self.renamed: dict[str, str] = {}
        """Endpoint -> the one that takes its place by the renaming at hand."""
        self.renamings: dict[int, dict[str, str]] = {}
        """By step."""

    def _on_the_same_hosts(self) -> int:
        """How many consecutive blocks have their devices on the same hosts, which are theirs alone; 1 if runs of such
        blocks differ in length."""
        host = self.whole.host_of.reshape(self.replicas, self.size)
        run = int((host != host[0]).any(axis=1).argmax()) or self.replicas
        if self.replicas % run:
            return 1
        runs = host.reshape(-1, run, self.size)
        apart = sum(len(np.unique(row)) for row in runs) == len(self.whole.hosts)
        return run if apart and bool((runs == runs[:, :1]).all()) else 1

    def fold(self) -> Folding:
        used: dict[Hop, None] = {}
        for step in {1, self.inside} if self.inside < self.replicas else {1}:
            self.step, self.renamed = step, {}
            self._rename_devices()
            for path, image in self._paths():
                self._rename_path(path, image)
            if len(set(self.renamed.values())) != len(self.renamed):
                raise self._error("two switches would stand for one")
            self.renamings[step] = self.renamed
            used = dict.fromkeys(hop for path, _ in self._paths() for hop in _hops(path))
            self._compare_links(used)
        return self._check_links(used)

    def _error(self, why: str) -> TopologyError:
        return _unfoldable(self.whole, self.replicas, why)

    def _next(self, device: int) -> int:
        """The device that takes its place."""
        host = self.inside * self.size
        if self.inside > 1 and self.step == 1:
            return device // host * host + (device + self.size) % host
        return (device + self.step * self.size) % self.count

    def _rename_devices(self) -> None:
        processors: dict[int, int] = {}
        owner: dict[int, int] = {}
        for d, device in enumerate(self.whole.devices):
            other = self._next(d)
            if _kind(device) != _kind(self.whole.devices[other]):
                raise self._error(f"{device.name} and {self.whole.devices[other].name} are devices of two kinds")
            one, two = self.whole.processor_of[d], self.whole.processor_of[other]
            if processors.setdefault(one, two) != two or owner.setdefault(one, d // self.size) != d // self.size:
                raise self._error(f"the processor of {device.name} is shared otherwise in the next block")
            self.renamed[device.name] = self.names[other]

    def _paths(self) -> Iterator[tuple[Sequence[str], Sequence[str]]]:
        """The endpoints of every way that routes are made of, and of that between the devices one block on."""
        routes = self.whole.ways
        for d, path in routes.up.items():
            yield path, routes.up[self._next(d)]
        place = {d: (number, k) for number, part in enumerate(routes.parts) for k, d in enumerate(part.devices)}
        for part in routes.parts:
            for (i, j), path in part.paths.items():
                (to, a), (other, b) = place[self._next(part.devices[i])], place[self._next(part.devices[j])]
                if to != other:
                    raise self._error(f"{path[0]} and {path[-1]} are closer than those at their places")
                image = routes.parts[to].paths[min(a, b), max(a, b)]
                yield path, image if a < b else image[::-1]

    def _rename_path(self, path: Sequence[str], image: Sequence[str]) -> None:
        if len(path) != len(image):
            raise self._error(f"the way from {path[0]} to {path[-1]} has other stations in the next block")
        for end, other in zip(path, image, strict=True):
            if self.renamed.setdefault(end, other) != other:
                raise self._error(f"{end} would stand for both {self.renamed[end]} and {other}")

    def _compare_links(self, used: Iterable[Hop]) -> None:
        for u, v in used:
            one, two = self.whole.link_between(u, v), self.whole.link_between(self.renamed[u], self.renamed[v])
            if two is None or _speed(one) != _speed(two):
                raise self._error(f"the link of {u} and {v} differs from that of the next block")

    def _check_links(self, used: Iterable[Hop]) -> Folding:
        whole = self.whole
        image = np.full(len(whole.resources), NONE, np.int64)
        kept: list[Hop] = []
        for path in self._inside():
            if through := self.foreign.intersection(path):
                raise self._error(f"{path[0]} and {path[-1]} are linked through {min(through)}, of another block")
        for hop in self._by_closeness(used):
            if not self.foreign.issuperset(hop) and image[whole.resource_between(*hop)] == NONE:
                kept.append(hop)
                self._mark(hop, image)
        self._check_apart(image)
        return self._folding(kept, image)

    def _by_closeness(self, used: Iterable[Hop]) -> list[Hop]:
        """Those of the first block in front: inside it, then on its way to the others."""
        inside = dict.fromkeys(hop for path in self._inside() for hop in _hops(path))
        up = self.whole.ways.up
        out = dict.fromkeys(hop for d in range(self.size) if d in up for hop in _hops(up[d]))
        others = sorted(used, key=lambda hop: len(self.foreign.intersection(hop)))
        return list(dict.fromkeys([*inside, *out, *others]))

    def _inside(self) -> list[list[str]]:
        """Endpoints of what the routes among the devices of the first block are made of."""
        return self.whole.ways.paths(range(self.size))

    def _mark(self, hop: Hop, image: npt.NDArray[np.int64]) -> None:
        """Set the image of all that a link of the first block stands for."""
        resource, waiting = self.whole.resource_between(*hop), [hop]
        image[resource] = resource
        while waiting:
            u, v = waiting.pop()
            for renamed in self.renamings.values():
                other = renamed[u], renamed[v]
                if image[self.whole.resource_between(*other)] != resource:
                    image[self.whole.resource_between(*other)] = resource
                    waiting.append(other)

    def _check_apart(self, image: npt.NDArray[np.int64]) -> None:
        """What blocks use inside must be theirs alone."""
        inside = {self.whole.resource_between(*hop) for path in self._inside() for hop in _hops(path)}
        for resource in inside:
            if int((image == resource).sum()) != self.replicas:
                raise self._error(f"blocks share the link {self.whole.resources[resource].name}")

    def _folding(self, kept: Sequence[Hop], image: npt.NDArray[np.int64]) -> Folding:
        whole = self.whole
        joined = {frozenset(hop) for hop in kept}
        links, ends, own = list[Link](), dict[str, None](), set(self.names[: self.size])
        hops: dict[int, Hop] = {}  # by resource of the whole
        for link in whole.links:
            if frozenset((link.a, link.b)) in joined:
                # No way leads through a device of another block: each of its links has an end of its own.
                a, b = (f"{u}@{v}" if u in ends and u in self.foreign else u for u, v in _hops((link.a, link.b)))
                links.append(link.model_copy(update={"a": a, "b": b}))
                hops[whole.resource_between(link.a, link.b)] = a, b
                hops[whole.resource_between(link.b, link.a)] = b, a
                ends |= {a: None, b: None}
        inner = tuple(name for name in whole.switches if name in ends)
        block = Topology(
            name=f"{whole.name}[{self.size} of {self.count}]", devices=whole.devices[: self.size],
            switches=(*inner, *(end for end in ends if end not in own.union(inner))), links=tuple(links),
            communication=whole.communication, storage=whole.storage, source=whole.source, sources=whole.sources,
            code=whole.code,
        )  # fmt: skip
        image_of = np.zeros(len(image), np.uint32)
        for resource, stands_for in enumerate(image.tolist()):
            if stands_for != NONE:
                image_of[resource] = block.resource_between(*hops[stands_for])
        for d in range(self.count):
            image_of[whole.processor_of[d]] = block.processor_of[d % self.size]
        ways = [k for k, resource in enumerate(block.resources) if resource.kind == "storage"]
        hosts = len(block.hosts)
        for k, at in enumerate(k for k, resource in enumerate(whole.resources) if resource.kind == "storage"):
            image_of[at] = ways[k % hosts] if k < len(whole.hosts) else ways[-1]
        return Folding(whole, block, self.replicas, self.inside, image_of)


def _hops(path: Sequence[str]) -> Iterator[Hop]:
    """Neighbours on a path, both ways."""
    for u, v in pairwise(path):
        yield u, v
        yield v, u


def _kind(device: Device) -> Device:
    return device.model_copy(update={"name": "", "host": "", "processor": None})


def _speed(link: Link | None) -> object:
    return link and (link.bandwidth, link.latency_s, link.duplex)
