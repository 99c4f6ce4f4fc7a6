"""Arrays that grow as templates are added."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

_START = 1024


class Column:
    """A growing array; ``width``: of its rows, if they are rows. ``extend`` and ``add`` say whether it is a new one."""

    def __init__(self, dtype: Any, width: int | None = None) -> None:
        self.array: npt.NDArray[Any] = np.zeros(_START if width is None else (_START, width), dtype=dtype)
        self.size = 0

    def extend(self, values: npt.NDArray[Any] | Sequence[Any], count: int) -> bool:
        """Append so many values (or rows), or one value so often."""
        end = self.size + count
        full = end > len(self.array)
        if full:
            grown = np.zeros((max(end, 2 * len(self.array)), *self.array.shape[1:]), dtype=self.array.dtype)
            grown[: self.size] = self.array[: self.size]
            self.array = grown
        if count:
            self.array[self.size : end] = values
        self.size = end
        return full

    def double(self) -> None:
        """Make room for twice as many."""
        self.array = np.concatenate((self.array, np.zeros_like(self.array)))

    def add(self, value: Any) -> bool:
        """Append one value (or row)."""
        if self.size == len(self.array):
            return self.extend([value], 1)
        self.array[self.size] = value
        self.size += 1
        return False
