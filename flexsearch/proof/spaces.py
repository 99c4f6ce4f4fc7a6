"""Finite spaces of plans: the configs that each operator may have."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import permutations
from math import prod

from flexsearch.graph import Operator, OperatorGraph
from flexsearch.strategy import OperatorConfig, Sharding, make_config
from flexsearch.strategy.weights import has_weights, shardings
from flexsearch.topology import Topology

Choices = Callable[[int], Sequence[OperatorConfig]]
"""Operator -> the configs that it may have."""


def every_config(graph: OperatorGraph, topology: Topology) -> Choices:
    """All legal configs: any degrees and replicas, any devices in any order (that of replicas of a piece does not
    matter and is ascending), weights whole or in parts (of all devices that need them, or those of a host)."""
    count = len(topology.devices)

    def choices(operator: int) -> list[OperatorConfig]:
        op = graph.operators[operator]
        return [
            make_config(op, degrees, devices).sharded(*sharding)
            for degrees in _degrees(op, count)
            for used in range(prod(degrees.values()), count + 1, prod(degrees.values()))
            for devices in _device_lists(count, used, used // prod(degrees.values()))
            for sharding in _shardings(graph, topology, operator, used)
        ]

    return choices


def aligned_configs(graph: OperatorGraph, topology: Topology) -> Choices:
    """Configs on blocks of devices: degrees whose product divides a divisor n of their number, on n neighbouring
    devices that begin at a multiple of n, in ascending order; the rest are replicas; weights as in ``every_config``."""
    count = len(topology.devices)

    def choices(operator: int) -> list[OperatorConfig]:
        op = graph.operators[operator]
        return [
            make_config(op, degrees, range(first, first + used)).sharded(*sharding)
            for used in range(1, count + 1)
            if count % used == 0
            for degrees in _degrees(op, used)
            if used % prod(degrees.values()) == 0
            for first in range(0, count, used)
            for sharding in _shardings(graph, topology, operator, used)
        ]

    return choices


def _shardings(graph: OperatorGraph, topology: Topology, operator: int, used: int) -> tuple[Sharding, ...]:
    several = used > 1 and has_weights(graph, operator)
    return shardings(topology) if several else shardings(topology)[:1]


def _degrees(op: Operator, count: int) -> Iterator[dict[str, int]]:
    """All degrees whose product is at most ``count``."""

    def extend(k: int, left: int, degrees: dict[str, int]) -> Iterator[dict[str, int]]:
        if k == len(op.splittable):
            yield dict(degrees)
            return
        axis = op.splittable[k]
        for degree in range(1, min(left, op.sizes[axis]) + 1):
            yield from extend(k + 1, left // degree, degrees | {axis: degree})

    yield from extend(0, count, {})


def _device_lists(count: int, used: int, replicas: int) -> Iterator[tuple[int, ...]]:
    """Ordered choices of devices, the replicas of a piece in ascending order."""
    for devices in permutations(range(count), used):
        if all(devices[k] < devices[k + 1] for k in range(used - 1) if (k + 1) % replicas):
            yield devices
