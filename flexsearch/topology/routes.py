"""Shortest routes between devices, kept by structure: what grows is the number of devices, not of pairs.

Most clusters fall apart into hosts when one switch is taken away (the fabric, the Ethernet switch): the **center**.
Every way between devices of different parts leads through it, so a shortest one is the shortest way up to the center
and the shortest way down from it. A route is therefore at most two **pieces**: for two devices of one part a piece of
their own, else ``up`` of the one and ``down`` of the other. Parts that are wired alike share their searches. A topology
that no switch separates is one part, with a piece for each pair.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import combinations, pairwise
from math import fsum, inf
from typing import Any, NamedTuple

import networkx as nx
import numpy as np
import numpy.typing as npt

from flexsearch.compiled import F64, U32, lean
from flexsearch.errors import TopologyError
from flexsearch.packed import packed
from flexsearch.topology.parts import Link
from flexsearch.topology.rings import MOST_LANES, MOST_MEMBERS, lanes_of, rings

REFERENCE_BYTES = 1e6  # the message that routes are best for; small ones mind latency, large ones bandwidth
MAX_PART = 1024
"""Devices of one part: it has a route for each pair of them."""


def wiring(names: Iterable[str], links: Iterable[Link]) -> nx.Graph:
    """Graph of the endpoints; an edge's ``cost`` is the time (s) of the reference message over that link."""
    graph = nx.Graph()
    graph.add_nodes_from(names)
    for link in links:
        graph.add_edge(link.a, link.b, cost=link.latency_s + REFERENCE_BYTES / link.bandwidth)
    return graph


def separated(graph: nx.Graph, devices: Sequence[str]) -> tuple[str, str] | None:
    """The first two devices without any way between them, or None."""
    reached = nx.node_connected_component(graph, devices[0])
    return next(((devices[0], name) for name in devices if name not in reached), None)


@packed
class RouteTable(NamedTuple):
    """Routes for compiled code. By device: ``part``, its ``place`` among the devices of that part, and the pieces
    ``up`` to the center and ``down`` from it. By part: the piece from place i to place j is
    ``inside[inside_first + i * size + j]``. Piece p crosses the resources ``resource[first[p]:first[p + 1]]``;
    ``latency`` (s) and ``bandwidth`` (B/s) are by piece. Piece 0 crosses nothing. Devices of a host that direct links
    join have a ``lane``, the width of one (B/s; else 0), a ``bit`` each, and rings over sets of them (``rings``) from
    ``rings_first`` on."""

    part: U32
    place: U32
    up: U32
    down: U32
    size: U32
    inside_first: U32
    inside: U32
    first: U32
    resource: U32
    latency: F64
    bandwidth: F64
    lane: F64
    bit: U32
    rings_first: U32
    rings: U32


@lean
def first_piece(routes: RouteTable, i: Any, j: Any) -> Any:
    """The first piece of the route from device ``i`` to device ``j``."""
    part = np.uint64(routes.part[i])
    if part != np.uint64(routes.part[j]):
        return np.uint64(routes.up[i])
    at = np.uint64(routes.inside_first[part]) + np.uint64(routes.place[i]) * np.uint64(routes.size[part])
    return np.uint64(routes.inside[at + np.uint64(routes.place[j])])


@lean
def second_piece(routes: RouteTable, i: Any, j: Any) -> Any:
    """The other piece: 0, which crosses nothing, inside a part."""
    return np.uint64(routes.down[j]) if routes.part[i] != routes.part[j] else np.uint64(0)


@lean
def rings_among(routes: RouteTable, devices: Any, first: Any, last: Any) -> Any:
    """How many rings over direct links there can be at once among ``devices[first:last]`` of one host (``rings``); 0 if
    there is none."""
    members = np.uint64(0)
    for k in range(first, last):
        device = np.uint64(devices[np.uint64(k)])
        if routes.lane[device] == 0.0:
            return np.uint64(0)
        members |= np.uint64(1) << np.uint64(routes.bit[device])
    return np.uint64(routes.rings[np.uint64(routes.rings_first[np.uint64(devices[np.uint64(first)])]) + members])


@lean
def lanes_between(routes: RouteTable, i: Any, j: Any) -> Any:
    """Lanes of the direct link from device ``i`` to ``j``, of a host whose devices such links join; 0 if there is
    none."""
    piece = first_piece(routes, i, j)
    if i == j or routes.first[piece + np.uint64(1)] - routes.first[piece] != 1:
        return np.int64(0)
    return min(np.int64(routes.bandwidth[piece] / routes.lane[i] + 0.5), MOST_LANES)


class Part(NamedTuple):
    """What is left when the center is taken away, and its devices' ways. ``devices``: indices, ascending. ``paths``:
    endpoints from the i-th of them to the j-th, i < j."""

    devices: list[int]
    paths: dict[tuple[int, int], list[str]]


class Routes:
    """All routes of a topology. ``hops``: (from, to) of neighbours -> the resource that carries this direction, and the
    link. The same file always gives the same routes: Dijkstra breaks ties by the order of devices, switches and links,
    and the way from j to i is that from i to j reversed. A way does not pass through other devices unless nothing else
    leads there: GPUs forward no traffic of others, but on a bare NVLink mesh a library must do that.

    ``hosts``: by device. ``up``: endpoints from each device to the center, if there is one. TopologyError if a part has
    more than ``MAX_PART`` devices.
    """

    def __init__(
        self, graph: nx.Graph, devices: Sequence[str], switches: Sequence[str], links: Sequence[Link],
        hops: Mapping[tuple[str, str], tuple[int, Link]], hosts: Sequence[str],
    ) -> None:  # fmt: skip
        self._hops, self._hosts = hops, hosts
        self.center = _center(graph, devices, switches)
        self.up = _ways(graph, self.center, devices) if self.center is not None else {}
        self.parts = _parts(graph, self.center, devices, switches, links)
        self.table = self._lay_out(len(devices))

    def paths(self, devices: Sequence[int]) -> list[list[str]]:
        """Endpoints of what the routes between these devices are made of."""
        places: dict[int, list[int]] = {}
        for device in devices:
            places.setdefault(int(self.table.part[device]), []).append(int(self.table.place[device]))
        inside = [self.parts[k].paths[pair] for k, own in places.items() for pair in combinations(sorted(own), 2)]
        return inside + ([self.up[device] for device in devices] if len(places) > 1 else [])

    def pieces(self, i: int, j: int) -> tuple[int, int]:
        """Numbers of the two pieces of a route."""
        return int(first_piece(self.table, i, j)), int(second_piece(self.table, i, j))

    def rows(self) -> list[tuple[int, ...]]:
        """What routes cross together, as resources: all pieces. Where there are only two parts, everything that leaves
        one of them enters the other, so that what all pieces there have in common comes with each of these."""
        table = self.table
        pieces = [tuple(table.resource[a:b].tolist()) for a, b in pairwise(table.first.tolist())]
        if len(self.parts) != 2:
            return sorted(set(pieces))
        rows = {pieces[k] for k in table.inside.tolist()}
        for leaving, entering in ((0, 1), (1, 0)):
            up = [pieces[k] for k in table.up[self.parts[leaving].devices].tolist()]
            down = [pieces[k] for k in table.down[self.parts[entering].devices].tolist()]
            first, last = (tuple(sorted(set(side[0]).intersection(*side[1:]))) for side in (up, down))
            rows |= {(*row, *last) for row in up} | {(*first, *row) for row in down}
        return sorted(rows)

    def nearest_s(self) -> float:
        """The least latency between two devices, s; 0 if there is only one device."""
        table, latencies = self.table, []
        for k, part in enumerate(self.parts):
            count, begin = len(part.devices), int(table.inside_first[k])
            numbers = table.inside[begin : begin + count * count].reshape(count, count)
            latencies += table.latency[numbers[~np.eye(count, dtype=bool)]].tolist()
        if len(self.parts) > 1:
            up = [min(table.latency[table.up[part.devices]]) for part in self.parts]
            latencies.append(fsum(sorted(up)[:2]))
        return float(min(latencies, default=0.0))

    def _lay_out(self, count: int) -> RouteTable:
        pieces: list[tuple[int, ...]] = [()]
        latency, bandwidth = [0.0], [inf]

        def piece(path: Sequence[str]) -> int:
            hops = [self._hops[pair] for pair in pairwise(path)]
            pieces.append(tuple(resource for resource, _ in hops))
            latency.append(fsum(link.latency_s for _, link in hops))
            bandwidth.append(min(link.bandwidth for _, link in hops))
            return len(pieces) - 1

        part, place = np.zeros(count, np.uint32), np.zeros(count, np.uint32)
        up, down = np.zeros(count, np.uint32), np.zeros(count, np.uint32)
        inside: list[int] = []
        inside_first = []
        for number, (devices, paths) in enumerate(self.parts):
            inside_first.append(len(inside))
            for i, device in enumerate(devices):
                part[device], place[device] = number, i
                if device in self.up:
                    up[device], down[device] = piece(self.up[device]), piece(self.up[device][::-1])
                for j in range(len(devices)):
                    way = paths[min(i, j), max(i, j)] if i != j else []
                    inside.append(piece(way if i < j else way[::-1]) if way else 0)
        return RouteTable(
            part=part, place=place, up=up, down=down,
            size=np.array([len(p.devices) for p in self.parts], np.uint32),
            inside_first=np.array(inside_first, np.uint32), inside=np.array(inside, np.uint32),
            first=np.cumsum([0, *map(len, pieces)]).astype(np.uint32),
            resource=np.array([r for row in pieces for r in row], np.uint32),
            latency=np.array(latency), bandwidth=np.array(bandwidth), **self._meshes(),
        )  # fmt: skip

    def _meshes(self) -> dict[str, Any]:
        """The last fields of the table: of hosts of up to ``MOST_MEMBERS`` devices whose direct links are full duplex.
        A link counts where it is the way between its ends."""
        count = len(self._hosts)
        lane, bit, first = np.zeros(count), np.zeros(count, np.uint32), np.zeros(count, np.uint32)
        wires: dict[str, list[tuple[int, int, Link]]] = {}
        for part in self.parts:
            for (i, j), path in part.paths.items():
                one, other = part.devices[i], part.devices[j]
                if len(path) == 2 and self._hosts[one] == self._hosts[other]:
                    wires.setdefault(self._hosts[one], []).append((one, other, self._hops[path[0], path[1]][1]))
        tables: dict[Any, int] = {}
        numbers: list[int] = []
        for joins in wires.values():
            members = sorted({device for one, other, _ in joins for device in (one, other)})
            if len(members) > MOST_MEMBERS or any(link.duplex == "half" for _, _, link in joins):
                continue
            narrowest = min(link.bandwidth for _, _, link in joins)
            square = np.zeros((len(members), len(members)), np.int64)
            for one, other, link in joins:
                at, to = members.index(one), members.index(other)
                square[at, to] = square[to, at] = lanes_of(link.bandwidth, narrowest)
            key = tuple(map(tuple, square.tolist()))
            if key not in tables:
                tables[key] = len(numbers)
                numbers += rings(key).tolist()
            lane[members], first[members], bit[members] = narrowest, tables[key], range(len(members))
        return {"lane": lane, "bit": bit, "rings_first": first, "rings": np.array(numbers or [0], np.uint32)}


def _center(graph: nx.Graph, devices: Sequence[str], switches: Sequence[str]) -> str | None:
    """Of the switches that separate devices, the one that leaves the smallest parts, as far as those with different
    numbers of links tell (of equally many, the first is looked at); None if there is none."""
    if len(devices) < 3:
        return None
    inner = set(nx.articulation_points(graph)) & set(switches)
    first: dict[int, str] = {}
    for name in switches:
        if name in inner:
            first.setdefault(graph.degree(name), name)
    return min(
        (first[degree] for degree in sorted(first, reverse=True)), key=partial(_sizes, graph, devices), default=None
    )


def _sizes(graph: nx.Graph, devices: Sequence[str], switch: str) -> tuple[int, int, int]:
    """Devices of the largest part without a switch, by how much the smallest is smaller, and the same of endpoints: of
    two hosts with a switch each and one between them, the one between them leaves equal parts."""
    own = set(devices)
    rest = graph.subgraph(name for name in graph if name != switch)
    parts = list(nx.connected_components(rest))
    sizes, all_sizes = [len(own.intersection(part)) for part in parts], [len(part) for part in parts]
    return max(sizes), max(sizes) - min(sizes), max(all_sizes) - min(all_sizes)


def _ways(graph: nx.Graph, center: str, devices: Sequence[str]) -> dict[int, list[str]]:
    """Endpoints from each device to the center."""
    paths = _paths_from(graph, center, devices)
    return {d: paths[name][::-1] for d, name in enumerate(devices)}


def _paths_from(graph: nx.Graph, source: str, devices: Sequence[str]) -> dict[str, list[str]]:
    """Endpoints from ``source`` to each of ``devices``."""
    transitless = frozenset(devices)

    def cost(u: str, v: str, edge: dict[str, Any]) -> float | None:
        return None if u != source and u in transitless else edge["cost"]  # None hides the edge

    paths: dict[str, list[str]] = nx.single_source_dijkstra_path(graph, source, weight=cost)
    if not all(device in paths for device in devices):
        paths = nx.single_source_dijkstra_path(graph, source, weight="cost") | paths
    return paths


def _parts(
    graph: nx.Graph, center: str | None, devices: Sequence[str], switches: Sequence[str], links: Sequence[Link]
) -> list[Part]:
    """The parts, in the order of their first devices, with the ways inside them."""
    number = _numbers(graph, center)
    members: dict[int, list[int]] = {}
    for d, name in enumerate(devices):
        members.setdefault(number[name], []).append(d)
    if (most := max(map(len, members.values()))) > MAX_PART:
        raise TopologyError(
            f"links: {most:,} devices that no switch separates; routes between more than {MAX_PART:,} are not made",
            "Join the hosts by one switch.",
        )
    inner: dict[int, list[str]] = {part: [] for part in members}
    for name in switches:
        if name != center and number[name] in inner:
            inner[number[name]].append(name)
    joins: dict[int, list[Link]] = {part: [] for part in members}
    for link in links:
        part = number[link.b if link.a == center else link.a]
        if part in joins:
            joins[part].append(link)
    searched: dict[Any, dict[tuple[int, int], list[int]]] = {}
    parts = []
    for part, indices in members.items():
        own = [devices[d] for d in indices]
        names = [*own, *inner[part], *([center] if center is not None else [])]
        at = {name: k for k, name in enumerate(names)}
        key = len(own), len(names), tuple((at[x.a], at[x.b], x.bandwidth, x.latency_s) for x in joins[part])
        if key not in searched:
            searched[key] = _ways_inside(names, own, joins[part], at)
        paths = {pair: [names[k] for k in path] for pair, path in searched[key].items()}
        parts.append(Part(indices, paths))
    return parts


def _numbers(graph: nx.Graph, center: str | None) -> dict[str, int]:
    """By endpoint other than the center: the number of its part."""
    rest = graph
    if center is not None:
        rest = graph.copy()
        rest.remove_node(center)
    return {name: k for k, names in enumerate(nx.connected_components(rest)) for name in names}


def _ways_inside(
    names: Sequence[str], own: Sequence[str], links: Iterable[Link], at: Mapping[str, int]
) -> dict[tuple[int, int], list[int]]:
    """The ways between the devices ``own`` of a part, as places in ``names``."""
    graph = wiring(names, links)
    ways = {}
    for i in range(len(own) - 1):
        paths = _paths_from(graph, own[i], own)
        for j in range(i + 1, len(own)):
            ways[i, j] = [at[name] for name in paths[own[j]]]
    return ways


def decisive(rows: Iterable[tuple[int, ...]], bandwidth: Sequence[float]) -> npt.NDArray[np.bool_]:
    """By resource: whether it can be what a transfer waits for. One is not if another, no wider, is on every row (what
    a route crosses together) that it is on: whatever crosses the one keeps the other busy from the same moment, and no
    shorter."""
    always: dict[int, set[int]] = {}  # what is on every row that a resource is on
    for row in rows:
        for r in row:
            if r in always:
                always[r].intersection_update(row)
            else:
                always[r] = set(row)
    decides = np.ones(len(bandwidth), np.bool_)
    for r, others in always.items():
        for other in others:
            mutual = r in always[other] and bandwidth[r] == bandwidth[other]
            # Of those that cover each other, the first stays.
            if other != r and bandwidth[other] <= bandwidth[r] and (not mutual or other < r):
                decides[r] = False
    return decides
