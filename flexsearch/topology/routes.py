"""Shortest routes between devices (networkx), one Dijkstra per source, kept; and the same as flat arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import networkx as nx
import numpy as np
import numpy.typing as npt

from flexsearch.packed import packed
from flexsearch.topology.parts import Link, Route

REFERENCE_BYTES = 1e6  # the message that routes are best for; small ones mind latency, large ones bandwidth


def wiring(names: Iterable[str], links: Sequence[Link]) -> nx.Graph:
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


class Router:
    """Paths as endpoint names. A path does not pass through other devices unless nothing else leads there: GPUs
    forward no traffic of others, but on a bare NVLink mesh a library must do that.

    The same file always gives the same paths: Dijkstra breaks ties by the order of devices, switches and links.
    The path from j to i is that from i to j reversed.
    """

    def __init__(self, graph: nx.Graph, devices: Sequence[str]) -> None:
        self._graph = graph
        self._devices = devices
        self._transitless = frozenset(devices)
        self._from: dict[int, dict[str, list[str]]] = {}

    def path(self, i: int, j: int) -> list[str]:
        """Endpoints from device ``i`` to device ``j``, both included."""
        if i > j:
            return self.path(j, i)[::-1]
        if i not in self._from:
            self._from[i] = self._paths_from(self._devices[i])
        return self._from[i][self._devices[j]]

    def _paths_from(self, source: str) -> dict[str, list[str]]:
        def cost(u: str, v: str, edge: dict[str, Any]) -> float | None:
            return None if u != source and u in self._transitless else edge["cost"]  # None hides the edge

        paths: dict[str, list[str]] = nx.single_source_dijkstra_path(self._graph, source, weight=cost)
        if not all(device in paths for device in self._devices):
            paths = nx.single_source_dijkstra_path(self._graph, source, weight="cost") | paths
        return paths


@packed
class RouteTable(NamedTuple):
    """Routes as arrays. Route r = ``number[i, j]`` leads from device i to device j over the resources
    ``resource[first[r]:first[r + 1]]``; ``latency`` (s) and ``slowness`` (1 / its bandwidth, s/B) are by route. Route 0
    stands for what nobody has asked for yet, and for the way from a device to itself."""

    number: npt.NDArray[np.uint32]
    first: npt.NDArray[np.uint32]
    resource: npt.NDArray[np.uint32]
    latency: npt.NDArray[np.float64]
    slowness: npt.NDArray[np.float64]


class Routes:
    """The table of the routes of ``count`` devices, which grows by the devices that are asked for. ``route``: the way
    from one device to another."""

    def __init__(self, count: int, route: Callable[[int, int], Route]) -> None:
        self._route = route
        self._covered: dict[int, None] = {}
        self._found: list[Route] = [Route((), 0.0, np.inf)]
        self._number = np.zeros((count, count), np.uint32)
        self._table: RouteTable | None = None

    def between(self, devices: Iterable[int]) -> RouteTable:
        """The table, with the routes between all of ``devices``."""
        for device in devices:
            if device not in self._covered:
                self._cover(device)
                self._table = None
        if self._table is None:
            self._table = self._made()
        return self._table

    def _cover(self, device: int) -> None:
        for other in self._covered:
            for i, j in ((device, other), (other, device)):
                self._number[i, j] = len(self._found)
                self._found.append(self._route(i, j))
        self._covered[device] = None

    def _made(self) -> RouteTable:
        return RouteTable(
            number=self._number,
            first=np.cumsum([0, *(len(route.resources) for route in self._found)]).astype(np.uint32),
            resource=np.array([r for route in self._found for r in route.resources], dtype=np.uint32),
            latency=np.array([route.latency_s for route in self._found]),
            slowness=np.array([1 / route.bandwidth for route in self._found]),
        )


def decisive(routes: Iterable[Route], bandwidth: Sequence[float]) -> npt.NDArray[np.bool_]:
    """By resource: whether it can be what a transfer waits for. One is not if another, no wider, is on every route that
    it is on: whatever crosses the one keeps the other busy from the same moment, and no shorter."""
    rows = sorted({route.resources for route in routes})
    crossed = np.zeros((len(rows), len(bandwidth)))
    for row, resources in enumerate(rows):
        crossed[row, list(resources)] = 1.0
    together = crossed.T @ crossed  # exact: whole numbers far below 2^53
    often, width = together.diagonal(), np.array(bandwidth)
    wider = width[:, None] >= width[None, :]
    covered = wider & (together == often[:, None]) & (often[:, None] > 0.0)  # [a, b]: b is on all routes of a
    place = np.arange(len(width))
    # Of those that cover each other, the first stays.
    covered &= ~covered.T | (place[:, None] > place[None, :])
    np.fill_diagonal(covered, False)
    found: npt.NDArray[np.bool_] = ~covered.any(axis=1)
    return found
