"""The columns that templates are kept in, which grow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from flexsearch.lower.arrays import Pools
from flexsearch.lower.footprints import Landings
from flexsearch.lower.tables import Used
from flexsearch.packed import dtypes, zeros

Group = tuple[tuple[str, ...], int]
"""Names of columns that grow together, and their rows so far."""

_EXCHANGE: Final = ("send_first", "send_last", "receive_first", "receive_last", "from_first", "from_last",
                    "to_first", "to_last", "link_first", "link_last",
                    "drag_first", "drag_last", "duration", "start", "amount", "form", "turn", "connection", "key",
                    "orbit")  # fmt: skip
_ROWS = 1024
"""Of columns that Python fills, at first; they double."""
_START, _GROWTH = 1 << 14, 4
"""Rows of the columns at first, and how many times as many they become when they grow."""


class Columns:
    """Growing arrays of the same length, by name. ``arrays``: as they are now, with room behind the first ``size``
    values; they are other ones when ``room``, that for values, has grown. ``types``: of what they hold."""

    def __init__(self, types: Mapping[str, Any]) -> None:
        self.arrays: dict[str, npt.NDArray[Any]] = {name: np.zeros(_ROWS, dtype) for name, dtype in types.items()}
        self.size, self.room = 0, _ROWS

    def extend(self, count: int, **values: npt.NDArray[Any] | Sequence[Any] | int) -> int:
        """Append ``count`` values to each column, or one value so often. Returns where they stand."""
        at, end = self.size, self.size + count
        if end > self.room:
            self.room = max(end, 2 * self.room)
            for name, before in self.arrays.items():
                self.arrays[name] = np.zeros(self.room, before.dtype)
                self.arrays[name][:at] = before[:at]
        for name, column in values.items():
            self.arrays[name][at:end] = column
        self.size = end
        return at

    def add(self, **values: int) -> int:
        """Append one value to each column, as ``extend`` does in half the time. Returns where they stand."""
        if (at := self.size) == self.room:
            return self.extend(1, **values)
        for name, value in values.items():
            self.arrays[name][at] = value
        self.size = at + 1
        return at


class GrowingPools:
    """``pools``, ``landings``: as they are now; ``used``: their rows so far, which compiled code counts."""

    def __init__(self) -> None:
        types = dtypes(Pools) | dtypes(Landings)
        self._arrays: dict[str, npt.NDArray[Any]] = {name: np.zeros(_START, dtype) for name, dtype in types.items()}
        self._pools: Pools | None = None
        self._landings: Landings | None = None
        self.used = zeros(Used, landings=2, exchanges=6)
        for count in (self.used.configs, self.used.reshards, self.used.buckets, self.used.plans):
            count[0] = 1  # template 0 of each kind is the empty one

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
                self._arrays[name] = np.zeros(_GROWTH * len(before), before.dtype)
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
