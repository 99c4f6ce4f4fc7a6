"""The axes of a machine, and the ordered sets of devices that follow from them.

Two servers of four GPUs have the axes (2, 4). A config may lie on any aligned block of the devices in their own order,
and of the devices in an order that permutes the axes: ``[0, 4, 1, 5, 2, 6, 3, 7]`` is the transposed one, and
``[0, 4]`` a block of it, a GPU of each server.

The axes are read off the routes. Devices of one host are a group; inside it, and among hosts, those with equally good
routes between them are groups again, as far as all groups of a level have the same size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import combinations, pairwise, permutations
from typing import Final

import numpy as np
import numpy.typing as npt

from flexsearch.topology import Topology

Group = tuple[int, ...]
"""Devices."""

NEARLY: Final = 0.8
"""Bandwidths of at least this share of the next better one count as equal: measured ones are never quite the same."""
MOST_COMPARED: Final = 256
"""Devices or hosts of which all pairs are compared. More are taken to be alike."""
MOST_AXES: Final = 2
"""Axes that are permuted; the inner ones of more count as one. Two have 2 orders, three would have 6, which makes the
alternatives of an operator on 16 K80 (4 hosts, 2 boards, 2 GPUs) twice as many again."""


class Meshes:
    """Ordered sets of devices of one topology. ``grid``: device numbers by place along each axis of the machine, the
    outermost axis first."""

    def __init__(self, topology: Topology) -> None:
        self.grid = machine_grid(topology)
        self.count = self.grid.size
        self._blocks: dict[int, tuple[Group, ...]] = {}

    @cached_property
    def orders(self) -> tuple[Group, ...]:
        """All devices, in the order of the machine and in those that permute its axes."""
        return tuple(dict.fromkeys(_raveled(self.grid, axes) for axes in _axis_orders(self.grid.shape)))

    @cached_property
    def relabelings(self) -> tuple[Group, ...]:
        """Device -> device, for each way of going from the order of the machine to another and back."""
        natural, relabelings = self.orders[0], dict[Group, None]()
        for order in self.orders[1:]:
            for source, destination in ((natural, order), (order, natural)):
                to = dict(zip(source, destination, strict=True))
                relabelings.setdefault(tuple(to[d] for d in range(self.count)))
        return tuple(relabelings)

    def blocks(self, count: int) -> tuple[Group, ...]:
        """The ordered sets of ``count`` devices, a divisor of their number: the aligned blocks of every order, those of
        the machine's own order first; blocks that span several axes in each order of those."""
        if (blocks := self._blocks.get(count)) is None:
            aligned = [order[k : k + count] for order in self.orders for k in range(0, self.count, count)]
            turned = [turn for block in aligned for turn in self._turned(block)]
            blocks = self._blocks[count] = tuple(dict.fromkeys((*aligned, *turned)))
        return blocks

    def _turned(self, block: Group) -> list[Group]:
        """The devices of a block in every order of the axes that they span."""
        if len(self.orders) == 1:
            return []
        places = np.argwhere(np.isin(self.grid, block))
        part = self.grid[np.ix_(*(np.unique(along) for along in places.T))]
        if part.size != len(block):  # not the product of places along each axis
            return []
        return [_raveled(part, axes) for axes in _axis_orders(part.shape)]

    def draw(self, rng: np.random.Generator, count: int, permuted: float) -> Group:
        """A random ordered set of ``count`` devices: neighbours in the machine's own order, or with probability
        ``permuted`` (where there are other orders) one that permutes axes. Aligned where ``count`` divides evenly."""
        if self.count % count:
            order = self.orders[0]
            first = int(rng.integers(self.count - count + 1))
            return order[first : first + count]
        blocks, plain = self.blocks(count), self.count // count
        if len(blocks) > plain and rng.random() < permuted:
            return blocks[plain + int(rng.integers(len(blocks) - plain))]
        return blocks[int(rng.integers(plain))]

    def halves(self, devices: Sequence[int]) -> tuple[frozenset[int], frozenset[int]]:
        """The devices in two halves, cut where the machine's outermost axis cuts them. The first half is the larger."""
        place = {d: k for k, d in enumerate(self.orders[0])}
        ordered = sorted(devices, key=lambda d: place[d])
        middle = (len(ordered) + 1) // 2
        return frozenset(ordered[:middle]), frozenset(ordered[middle:])


def machine_grid(topology: Topology) -> npt.NDArray[np.int64]:
    """Device numbers by place along each axis of the machine: racks, hosts, sub-groups of a host, devices. One axis
    where the topology is irregular."""
    flat = np.arange(len(topology.devices))
    by_host: dict[str, list[int]] = {}
    for device, description in enumerate(topology.devices):
        by_host.setdefault(description.host, []).append(device)
    hosts = [tuple(devices) for devices in by_host.values()]
    if len({len(host) for host in hosts}) > 1:
        return flat
    quality = _quality(topology)
    above = _levels([host[0] for host in hosts], quality)
    inside = [_levels(host, quality) for host in (hosts if len(topology.devices) <= MOST_COMPARED else hosts[:1])]
    if len({sizes for _, sizes in inside}) > 1:
        inside = [(list(host), (len(host),)) for host in hosts]
    elif len(inside) < len(hosts):
        place = [hosts[0].index(d) for d in inside[0][0]]
        inside = [([host[k] for k in place], inside[0][1]) for host in hosts]
    of_host = {host[0]: devices for host, (devices, _) in zip(hosts, inside, strict=True)}
    ordered = np.array([device for first in above[0] for device in of_host[first]])
    shape = tuple(size for size in (*above[1], *inside[0][1]) if size > 1) or (1,)
    return ordered.reshape(shape)


Quality = Callable[[int, int], tuple[float, int]]
"""Bandwidth (bytes/s) and minus the number of links between two devices."""


def _quality(topology: Topology) -> Quality:
    def quality(a: int, b: int) -> tuple[float, int]:
        route = topology.route(a, b)
        return route.bandwidth, -len(route.resources)

    return quality


def _levels(members: Sequence[int], quality: Quality) -> tuple[list[int], tuple[int, ...]]:
    """Members in an order in which groups of every level are neighbours, and the sizes of the axes, outermost first."""
    count = len(members)
    if not 2 < count <= MOST_COMPARED:
        return list(members), (count,)
    pairs = sorted(((quality(a, b), a, b) for a, b in combinations(members, 2)), key=lambda pair: pair[0], reverse=True)
    group = {member: [member] for member in members}
    sizes, before = [1], None
    for now, a, b in pairs:
        if before is None or now[0] < NEARLY * before[0] or now[1] < before[1]:
            _note_level(group, sizes)
            before = now
        if group[a] is not group[b]:
            first, second = sorted((group[a], group[b]), key=lambda of: members.index(of[0]))
            group |= dict.fromkeys(joined := first + second, joined)
    _note_level(group, sizes)
    if sizes[-1] != count:
        sizes.append(count)
    ordered = list(dict.fromkeys(member for first in members for member in group[first]))
    return ordered, tuple(large // small for small, large in reversed(list(pairwise(sizes))))


def _note_level(group: dict[int, list[int]], sizes: list[int]) -> None:
    """Add a level if all groups now have one size, which the last level's divides."""
    now = {len(of) for of in group.values()}
    size = now.pop()
    if not now and size > sizes[-1] and size % sizes[-1] == 0:
        sizes.append(size)


def _axis_orders(shape: Sequence[int]) -> list[tuple[int, ...]]:
    """Orders of the axes: as they are first. Of many axes, the innermost ones stay together."""
    real = [k for k, size in enumerate(shape) if size > 1]
    free, rest = real[: MOST_AXES - 1], real[MOST_AXES - 1 :]
    blocks: list[list[int]] = [*([k] for k in free), *([rest] if rest else [])]
    ones = [k for k in range(len(shape)) if k not in real]
    return [tuple(ones) + tuple(k for block in order for k in block) for order in permutations(blocks)]


def _raveled(grid: npt.NDArray[np.int64], axes: tuple[int, ...]) -> Group:
    return tuple(grid.transpose(axes).ravel().tolist())
