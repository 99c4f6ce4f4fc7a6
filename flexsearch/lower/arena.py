"""Where segments are kept: arrays that grow, and lose what no plan uses any more when they are full."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from flexsearch.cost.tally import empty_loads, make_tally
from flexsearch.lower.bucket import Groups
from flexsearch.lower.draft import Draft, Filled
from flexsearch.lower.rows import Segments
from flexsearch.topology import Topology

_LISTS: Final[dict[str, tuple[str, ...]]] = {
    "segment": ("device_steps", "communication_first", "communication_last"),
    "table": ("step_first",),
    "step": ("step_kind", "step_block", "step_row", "step_ticks", "step_host"),
    "communication": (
        "communication_ticks", "missing", "turn", "connection", "link_first", "link_last", "drag_first", "drag_last",
        "receiver_first", "receiver_last", "follower_first", "follower_last",
    ),
    "link": ("link", "link_ticks"),
    "drag": ("drag", "drag_ticks"),
    "receiver": ("receiver",),
    "follower": ("follower_block", "follower_row"),
}  # fmt: skip
"""Columns of each list of ``Segments``, by its name in ``Filled``."""
ROOM: Final = 512
"""Segments of each block for which there is room at first, times devices; and four more."""
DRAFTED: Final = 4096
"""Steps of a block, and exchanges of a bucket, for which there is room at first, if not more."""
GROWTH: Final = 4
"""How much larger a list becomes when it grows."""
_TYPES: Final[dict[str, Any]] = {
    "step_kind": np.uint8, "step_ticks": np.int64, "step_host": np.int64, "communication_ticks": np.int64,
    "turn": np.int64, "connection": np.uint64, "link_ticks": np.int64, "drag_ticks": np.int64,
}  # fmt: skip
"""Types of columns that are not uint32."""


class Arena:
    """Segments of plans of ``blocks`` blocks on a topology, and the draft of the one that is being written.
    ``network``: on which communication is priced."""

    def __init__(self, blocks: int, topology: Topology, network: Topology) -> None:
        self._topology, self._network, devices = topology, network, len(topology.devices)
        room = 64 + blocks * (4 + ROOM // devices)
        most = {"table": devices + 1, "step": devices, "link": 4, "receiver": 2}
        self._room = {name: room * most.get(name, 1) for name in _LISTS}
        self._drafted = max(DRAFTED, 64 * devices)
        self.segments, self.filled = self._segments(), new_filled()
        self.draft = self._draft()

    def _segments(self) -> Segments:
        return Segments(**{
            column: np.zeros(self._room[name], _TYPES.get(column, np.uint32))
            for name, columns in _LISTS.items()
            for column in columns
        })  # fmt: skip

    def _draft(self) -> Draft:
        steps, topology = self._drafted, self._topology
        devices, resources = len(topology.devices), len(self._network.resources)

        def numbers(*size: int) -> npt.NDArray[np.uint32]:
            return np.zeros(size, np.uint32)

        def stamps(count: int) -> npt.NDArray[np.uint64]:
            return np.zeros(count, np.uint64)

        groups = Groups(
            key=numbers(2, steps), head=numbers(2, steps), tail=numbers(2, steps), size=numbers(2, steps),
            counts=stamps(2), exchange=numbers(steps), group=numbers(steps), next=numbers(steps),
            second_first=numbers(steps), second_last=numbers(steps), pair=numbers(4 * steps), pair_first=numbers(steps),
            pair_last=numbers(steps), follows=numbers(steps), seen=stamps(steps), gathers=stamps(1),
            waited=stamps(steps), load=np.zeros(resources),
            listed=stamps(resources), listing=stamps(1), touched=numbers(resources), lopsided=stamps(1),
            many=numbers(resources),
            tally=make_tally(self._network), loads=empty_loads(resources),
        )  # fmt: skip
        return Draft(
            device=numbers(steps), kind=np.zeros(steps, np.uint8), block=numbers(steps), row=numbers(steps),
            ticks=np.zeros(steps, np.int64), host=np.zeros(steps, np.int64), steps=stamps(1), at=stamps(devices),
            mark=stamps(devices), piece=stamps(devices), stamp=stamps(1), full=np.zeros(1, np.uint8), groups=groups,
        )  # fmt: skip

    def clear(self) -> None:
        """Forget all segments."""
        for count in self.filled:
            count[0] = 0

    def copy(self) -> Segments:
        """All segments in use, in arrays of their own."""
        return Segments(**{
            column: getattr(self.segments, column)[: int(getattr(self.filled, name)[0])].copy()
            for name, columns in _LISTS.items()
            for column in columns
        })  # fmt: skip

    def make_room(self, *plans: npt.NDArray[np.uint32]) -> None:
        """Make room where there was none. ``plans``: the segments in use, by block; they get their new numbers. All
        others are forgotten."""
        old, filled = self.segments, self.filled
        full = [name for name in _LISTS if 2 * int(getattr(filled, name)[0]) > self._room[name]]
        if not full:  # the draft was, or a single segment needs more than there is
            full, self._drafted = list(_LISTS), 2 * self._drafted
            self.draft = self._draft()
        used = np.unique(np.concatenate(plans)) if plans else np.zeros(0, np.uint32)
        self._room |= {name: GROWTH * self._room[name] for name in full}
        self.segments, self.filled = self._segments(), new_filled()
        number = np.zeros(int(filled.segment[0]) + 1, np.uint32)
        number[used] = np.arange(len(used))
        self._copy(old, used)
        for plan in plans:
            plan[:] = number[plan]

    def _copy(self, old: Segments, used: npt.NDArray[np.uint32]) -> None:
        """Fill empty arrays with segments of others, in their order."""
        new, filled, width = self.segments, self.filled, len(self._topology.devices) + 1
        tables = old.step_first[old.device_steps[used][:, None] + np.arange(width, dtype=np.uint32)].astype(np.int64)
        new.step_first[: tables.size] = (tables - _shifts(tables[:, 0], tables[:, -1])[:, None]).ravel()
        new.device_steps[: len(used)] = np.arange(len(used)) * width
        filled.segment[0], filled.table[0] = len(used), tables.size
        self._gather(old, "step", _rows(tables[:, 0], tables[:, -1]))
        first, last = (old.communication_first[used], old.communication_last[used])
        new.communication_first[: len(used)], new.communication_last[: len(used)] = _moved(first, last)
        rows = _rows(first, last)
        filled.communication[0] = len(rows)
        for column in ("communication_ticks", "missing", "turn", "connection"):
            getattr(new, column)[: len(rows)] = getattr(old, column)[rows]
        for name in ("link", "drag", "receiver", "follower"):
            first, last = getattr(old, f"{name}_first")[rows], getattr(old, f"{name}_last")[rows]
            getattr(new, f"{name}_first")[: len(rows)], getattr(new, f"{name}_last")[: len(rows)] = _moved(first, last)
            self._gather(old, name, _rows(first, last))

    def _gather(self, old: Segments, name: str, rows: npt.NDArray[np.int64]) -> None:
        """Fill a list with these rows of another."""
        for column in _LISTS[name]:
            getattr(self.segments, column)[: len(rows)] = getattr(old, column)[rows]
        getattr(self.filled, name)[0] = len(rows)


def _shifts(first: npt.NDArray[Any], last: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """By how much rows ``first`` to ``last`` move down where nothing else is kept."""
    begin, count = first.astype(np.int64), last.astype(np.int64) - first
    shift: npt.NDArray[np.int64] = begin + count - np.cumsum(count)
    return shift


def _moved(first: npt.NDArray[Any], last: npt.NDArray[Any]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Where rows ``first`` to ``last`` are where nothing else is kept."""
    shifts = _shifts(first, last)
    return first - shifts, last - shifts


def _rows(first: npt.NDArray[Any], last: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """All rows from each ``first`` to its ``last``."""
    count = last.astype(np.int64) - first
    rows: npt.NDArray[np.int64] = np.arange(count.sum()) + np.repeat(_shifts(first, last), count)
    return rows


def new_filled() -> Filled:
    """Nothing is in use."""
    return Filled(*(np.zeros(1, np.uint64) for _ in Filled._fields))
