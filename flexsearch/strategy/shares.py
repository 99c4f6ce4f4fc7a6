"""Shares of the batch for devices that are not equally fast."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from flexsearch.graph import Operator
from flexsearch.strategy.config import OperatorConfig, make_config
from flexsearch.topology import Topology

FINEST: Final = 4
"""The slowest device counts as at most so many shares."""
NEARLY: Final = 0.05
"""Shares that are off by less than this part of themselves are as good as finer ones."""


def in_whole_numbers(rates: Sequence[float]) -> tuple[int, ...]:
    """Small whole numbers in about the proportion of ``rates``, all above 0: (2.5, 1) gives (5, 2)."""
    slowest = min(rates)
    tries: list[tuple[float, tuple[int, ...]]] = []
    for unit in range(1, FINEST + 1):
        exact = [unit * rate / slowest for rate in rates]
        shares = tuple(round(share) for share in exact)
        tries.append((max(abs(n - share) / share for n, share in zip(shares, exact, strict=True)), shares))
        if tries[-1][0] <= NEARLY:
            return shares
    return min(tries)[1]


def speeds(topology: Topology) -> tuple[tuple[int, ...], ...]:
    """How fast the devices are beside each other: by what they compute in a second, and by what they move in memory.
    Empty if all are equally fast."""
    flops = in_whole_numbers([device.flops_for("float32") for device in topology.devices])
    bandwidth = in_whole_numbers([device.memory_bandwidth for device in topology.devices])
    return tuple(row for row in dict.fromkeys((flops, bandwidth)) if len(set(row)) > 1)


def shared_out(op: Operator, config: OperatorConfig, speed: Sequence[int]) -> OperatorConfig:
    """The config with its outermost split of samples in proportion to the speeds (by device of the topology): each part
    counts as the slowest of its devices. The same config where it splits no samples, or the shares are equal."""
    axis = next((a for a, _ in config.degrees if op.roles[a] == "sample"), None)
    if axis is None:
        return config
    shares = [min(row) for row in _devices_of_parts(config, axis, speed)]
    uneven = make_config(op, dict(config.degrees), config.devices, config.states, {axis: shares})
    return replace(config, shares=uneven.shares)


def _devices_of_parts(config: OperatorConfig, axis: str, speed: Sequence[int]) -> list[list[int]]:
    """The speeds of the devices that each part of an axis is on."""
    stride, parts = config.replicas, config.degree(axis)
    for name, degree in reversed(config.degrees):
        if name == axis:
            break
        stride *= degree
    rows: list[list[int]] = [[] for _ in range(parts)]
    for position, device in enumerate(config.devices):
        rows[position // stride % parts].append(speed[device])
    return rows
