"""Where segments are kept: arrays that grow, and lose all when they are full."""

from __future__ import annotations

from typing import Final

from flexsearch.cost.tally import empty_loads, make_tally
from flexsearch.lower.bucket import Groups
from flexsearch.lower.draft import Draft, Filled
from flexsearch.lower.rows import Segments
from flexsearch.packed import zeros
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
        return zeros(Segments, **{column: self._room[name] for name, columns in _LISTS.items() for column in columns})

    def _draft(self) -> Draft:
        steps, devices, resources = self._drafted, len(self._topology.devices), len(self._network.resources)
        of_groups = dict.fromkeys(("key", "head", "tail", "size"), (2, steps))
        by_resource = dict.fromkeys(("load", "listed", "touched", "many"), resources)
        groups = zeros(
            Groups, steps, **of_groups, **by_resource, counts=2, pair=4 * steps, gathers=1, listing=1, lopsided=1,
            tally=make_tally(self._network), loads=empty_loads(resources),
        )  # fmt: skip
        return zeros(Draft, steps, steps=1, at=devices, mark=devices, piece=devices, stamp=1, full=1, groups=groups)

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

    def grow(self) -> None:
        """Make room where there was none, and forget all segments."""
        full = [name for name in _LISTS if 2 * int(getattr(self.filled, name)[0]) > self._room[name]]
        if not full:  # the draft was, or a single segment needs more than there is
            full, self._drafted = list(_LISTS), 2 * self._drafted
            self.draft = self._draft()
        self._room |= {name: GROWTH * self._room[name] for name in full}
        self.segments, self.filled = self._segments(), new_filled()


def new_filled() -> Filled:
    """Nothing is in use."""
    return zeros(Filled)
