"""Arrays that grow as templates are added."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

_START = 1024


class Columns:
    """Growing arrays of the same length, by name. ``arrays``: as they are now, with room behind the first ``size``
    values; they are other ones when ``room``, that for values, has grown. ``types``: of what they hold."""

    def __init__(self, types: Mapping[str, Any]) -> None:
        self.arrays: dict[str, npt.NDArray[Any]] = {name: np.zeros(_START, dtype) for name, dtype in types.items()}
        self.size, self.room = 0, _START

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
