"""The columns that templates are kept in, which grow."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from flexsearch.compiled import U64
from flexsearch.lower.arrays import Pools
from flexsearch.lower.footprints import Landings
from flexsearch.lower.tables import Used

Group = tuple[tuple[str, ...], int]
"""Names of columns that grow together, and their rows so far."""

TYPES: dict[str, Any] = {
    "spread": np.uint8,
    "entry_forward": np.int64, "entry_backward": np.int64, "entry_inputs": np.int64,
    "entry_weight": np.int64, "entry_cast": np.int64, "duration": np.int64,
    "start": np.float64, "amount": np.uint64, "form": np.uint8, "turn": np.int64, "connection": np.uint64,
    "key_form": np.uint8, "key_group": np.uint8, "link_ticks": np.int64, "link_least": np.int64,
    "link_load": np.float64, "drag_ticks": np.int64, "drag_load": np.float64, "store_bytes": np.uint64,
    "forward": np.int64, "backward": np.int64, "inputs": np.int64, "weight": np.int64, "cast": np.int64,
    "role": np.uint8, "used": np.uint8, "copy": np.int64, "middle": np.int64, "staged": np.int64,
    "staged_again": np.int64,
}  # fmt: skip
"""Columns of ``Pools``, ``Splits`` and ``Landings`` that are not uint32."""
_EXCHANGE: Final = ("send_first", "send_last", "receive_first", "receive_last", "from_first", "from_last",
                    "to_first", "to_last", "link_first", "link_last",
                    "drag_first", "drag_last", "duration", "start", "amount", "form", "turn", "connection", "key",
                    "orbit")  # fmt: skip
_START, _GROWTH = 1 << 14, 4
"""Rows of the columns at first, and how many times as many they become when they grow."""


class GrowingPools:
    """``pools``, ``landings``: as they are now; ``used``: their rows so far, which compiled code counts."""

    def __init__(self) -> None:
        self._arrays = {name: _zeros(name, _START) for name in (*Pools._fields, *Landings._fields)}
        self._pools: Pools | None = None
        self._landings: Landings | None = None
        # Template 0 of each kind is the empty one.
        self.used = Used(
            configs=_counts(1), entries=_counts(0), layouts=_counts(0), reshards=_counts(1),
            landings=np.zeros(2, np.uint64), exchanges=np.zeros(6, np.uint64), buckets=_counts(1), plans=_counts(1),
            gathers=_counts(0), stores=_counts(0),
        )  # fmt: skip

    @property
    def pools(self) -> Pools:
        """The templates. Rows past their number hold zeros."""
        if self._pools is None:
            self._pools = Pools(**{name: self._arrays[name] for name in Pools._fields})
        return self._pools

    @property
    def landings(self) -> Landings:
        """What the reshards leave on devices."""
        if self._landings is None:
            self._landings = Landings(**{name: self._arrays[name] for name in Landings._fields})
        return self._landings

    @property
    def nbytes(self) -> int:
        """Bytes of all rows so far."""
        return sum(used * self._arrays[name].itemsize for names, used in self.groups() for name in names)

    def full(self) -> list[Group]:
        """Columns that are more than half full."""
        return [(names, used) for names, used in self.groups() if 2 * used > len(self._arrays[names[0]])]

    def grow(self, groups: Iterable[Group]) -> None:
        """Make room in columns."""
        for names, used in groups:
            for name in names:
                before = self._arrays[name]
                self._arrays[name] = _zeros(name, _GROWTH * len(before))
                self._arrays[name][:used] = before[:used]  # the system has no memory yet for what was never written
            self._pools = self._landings = None

    def groups(self) -> list[Group]:
        """All columns."""
        used, sends = self.used, self.used.exchanges.tolist()
        return [
            (tuple(name for name in Pools._fields if name.startswith("config_")), int(used.configs[0])),
            (tuple(name for name in Pools._fields if name.startswith("entry_")), int(used.entries[0])),
            (("layout",), int(used.layouts[0])),
            (("reshard_first", "reshard_middle", "reshard_last", "landing_first", "landing_last", "used_first"),
             int(used.reshards[0])),
            (("device", "role", "copy", "middle", "staged", "staged_again"), int(used.landings[0])),
            (("used",), int(used.landings[1])),
            (("send",), sends[0]), (("receive",), sends[1]),
            (("link", "link_ticks", "link_least", "link_load"), sends[2]),
            (("drag", "drag_ticks", "drag_load"), sends[3]), (_EXCHANGE, sends[4]),
            (("key_form", "key_group"), int(used.buckets[0])),
            (("plan_sync", "plan_sharding", "plan_gather", "store_first", "store_last"), int(used.plans[0])),
            (("gather",), int(used.gathers[0])), (("store_device", "store_bytes"), int(used.stores[0])),
        ]  # fmt: skip


def _zeros(name: str, rows: int) -> npt.NDArray[Any]:
    return np.zeros(rows, TYPES.get(name, np.uint32))


def _counts(value: int) -> U64:
    return np.array([value], np.uint64)
