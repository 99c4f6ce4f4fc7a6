"""Shortest routes between devices (networkx), one Dijkstra per source, kept."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import networkx as nx

from flexsearch.topology.parts import Link

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
