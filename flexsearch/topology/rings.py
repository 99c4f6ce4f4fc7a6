"""How many rings fit over the direct links among devices of one host: NVLink meshes without a switch.

A library opens as many rings at once as the links carry (NCCL: channels). A link counts as **lanes** as wide as the
narrowest direct link of its host: of two NVLinks to one device and one to another, 2 and 1. Every ring leaves each
proper part of its group at least once, and crosses a link at most once in each direction. So t rings, half of which run
the other way round, need min(lanes, t/2) summed over the links across every cut of the group to be at least t; the
largest such t counts. There is none where no closed way over direct links visits each member once: NCCL uses PCIe then
(NVIDIA/nccl, issue 301). NCCL reaches the bound: 6 rings on a DGX-1 with V100, 4 with P100, and on four V100 with two
NVLinks for each pair 6, as the graph says that it dumps (issue 713).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

MOST_MEMBERS = 10
"""Of a host whose rings are counted: tables have a number for each set of them. Larger meshes are one ring."""
MOST_LANES: Any = np.int64(32)
"""Of one link."""

Lanes = tuple[tuple[int, ...], ...]


def lanes_of(bandwidth: float, narrowest: float) -> int:
    """Lanes of a link."""
    return min(int(bandwidth / narrowest + 0.5), int(MOST_LANES))


def rings(lanes: Lanes) -> npt.NDArray[np.uint32]:
    """By set of devices, as bits: rings over its direct links that can run at once; 0 if not even one. ``lanes``: from
    each device to each, the same both ways."""
    within = cache(lambda count: _within(lanes, count))
    table = np.zeros(1 << len(lanes), np.uint32)
    for members, closed in enumerate(_closed(lanes)):
        if closed and members.bit_count() == 2:
            i, j = _bits(members)
            table[members] = lanes[i][j]
        elif closed:
            count, most = 0, 2 * int(MOST_LANES) * len(lanes)
            while count != most:
                count, sums = most, within(most)
                most = min(sums[members] - sums[part] - sums[members ^ part] for part in _parts(members)) // 2
            table[members] = count
    return table


def _within(lanes: Lanes, rings: int) -> list[int]:
    """By set: twice what so many rings can use of the lanes inside it."""
    sums = [0] * (1 << len(lanes))
    for members in range(1, len(sums)):
        lowest, *others = _bits(members)
        sums[members] = sums[members & (members - 1)] + sum(min(2 * lanes[lowest][j], rings) for j in others)
    return sums


def _closed(lanes: Lanes) -> Sequence[bool]:
    """By set of at least two devices: whether a closed way over direct links visits each once (Held and Karp)."""
    joined = [sum(1 << j for j, n in enumerate(row) if n) for row in lanes]
    ends = [0] * (1 << len(lanes))  # of ways through a set that begin at its lowest member
    closed = [False] * len(ends)
    for members in range(1, len(ends)):
        lowest, *others = _bits(members)
        ends[members] = 0 if others else members
        for j in others:
            if ends[members ^ (1 << j)] & joined[j]:
                ends[members] |= 1 << j
        closed[members] = bool(others) and bool(ends[members] & joined[lowest])
    return closed


def _parts(members: int) -> Iterator[int]:
    """The proper parts of a set, one of each half."""
    rest = members & (members - 1)
    part = rest
    while part:
        yield part
        part = (part - 1) & rest


def _bits(members: int) -> list[int]:
    """Places of the bits, ascending."""
    return [k for k in range(members.bit_length()) if members >> k & 1]
