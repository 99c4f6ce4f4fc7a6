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
    "step": ("step_kind", "step_block", "step_row", "step_ticks"),
    "communication": (
        "communication_ticks", "missing", "turn", "link_first", "link_last", "drag_first", "drag_last",
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
    "step_kind": np.uint8, "step_ticks": np.int64, "communication_ticks": np.int64, "turn": np.int64,
    "link_ticks": np.int64, "drag_ticks": np.int64,
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
            pair_last=numbers(steps), follows=numbers(steps), seen=stamps(steps), load=np.zeros(resources),
            listed=stamps(resources), listing=stamps(1), touched=numbers(resources), lopsided=stamps(1),
            many=numbers(resources),
            tally=make_tally(self._network), loads=empty_loads(resources),
        )  # fmt: skip
        return Draft(
            device=numbers(steps), kind=np.zeros(steps, np.uint8), block=numbers(steps), row=numbers(steps),
            ticks=np.zeros(steps, np.int64), steps=stamps(1), at=stamps(devices), mark=stamps(devices),
            piece=stamps(devices), stamp=stamps(1), full=np.zeros(1, np.uint8), groups=groups,
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
        for n, segment in enumerate(used.tolist()):
            number[segment] = n
            self._copy(old, segment)
        for plan in plans:
            plan[:] = number[plan]

    def _copy(self, old: Segments, segment: int) -> None:
        """Append a segment of another arena."""
        new, filled = self.segments, self.filled
        table, to = int(old.device_steps[segment]), int(filled.table[0])
        ends = old.step_first[table : table + len(self._topology.devices) + 1].astype(np.int64)
        new.step_first[to : to + len(ends)] = ends + (int(filled.step[0]) - ends[0])
        for column in _LISTS["step"]:
            _append(new, old, column, filled.step, int(ends[0]), int(ends[-1]))
        at, first, last = int(filled.communication[0]), *_range(old, "communication", segment)
        for column in ("communication_ticks", "missing", "turn"):
            _append(new, old, column, filled.communication, first, last)
        for name in ("link", "drag", "receiver", "follower"):
            self._copy_list(old, name, slice(first, last), slice(at, at + last - first))
        number = int(filled.segment[0])
        new.device_steps[number] = to
        new.communication_first[number], new.communication_last[number] = at, at + last - first
        for field, count in (
            (filled.table, len(ends)), (filled.step, int(ends[-1] - ends[0])), (filled.communication, last - first),
            (filled.segment, 1),
        ):  # fmt: skip
            field[0] += np.uint64(count)

    def _copy_list(self, old: Segments, name: str, source: slice, target: slice) -> None:
        """The list ``name`` of some communications, whose rows lie one after the other."""
        first, last = getattr(old, f"{name}_first")[source], getattr(old, f"{name}_last")[source]
        if not len(first):
            return
        filled = getattr(self.filled, name)
        begin, end = int(first[0]), int(last[-1])
        shift = int(filled[0]) - begin
        getattr(self.segments, f"{name}_first")[target] = first.astype(np.int64) + shift
        getattr(self.segments, f"{name}_last")[target] = last.astype(np.int64) + shift
        for column in _LISTS[name]:
            _append(self.segments, old, column, filled, begin, end)
        filled[0] += np.uint64(end - begin)


def new_filled() -> Filled:
    """Nothing is in use."""
    return Filled(*(np.zeros(1, np.uint64) for _ in Filled._fields))


def _range(segments: Segments, name: str, item: int) -> tuple[int, int]:
    return int(getattr(segments, f"{name}_first")[item]), int(getattr(segments, f"{name}_last")[item])


def _append(new: Segments, old: Segments, column: str, filled: npt.NDArray[np.uint64], first: int, last: int) -> None:
    """Copy rows of a column behind those in use."""
    at = int(filled[0])
    getattr(new, column)[at : at + last - first] = getattr(old, column)[first:last]
