"""The unit of simulated time. All durations are whole ticks: sums of them are exact in float64 up to 2.4 hours, so the
order of adding does not matter, and a schedule that is shifted in time keeps its bits."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from flexsearch.compiled import lean

TICK: Final = 2.0**-40
"""Seconds."""
LAUNCH_PARTS: Final = 16
"""Launches are counted in such parts of one: by what a host takes, a view is much less than a product."""
FOREVER: Final = 2**61
"""Ticks (24 days): what takes longer counts as so long, and a plan that takes so long is not simulated to its end. Sums
of a few such durations are below 2^63."""


@lean
def whole(seconds: Any) -> Any:
    """The nearest whole number of ticks, at most ``FOREVER``, in seconds."""
    return min(np.rint(seconds / TICK), float(FOREVER)) * TICK


@lean
def ticks_of(seconds: Any) -> Any:
    """Of a whole number of ticks in seconds."""
    return np.int64(seconds / TICK)


def task_seconds(seconds: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """As ``whole``, of many, and at least one tick: so a device that has computed anything is not at time 0."""
    rounded: npt.NDArray[np.float64] = np.clip(np.rint(seconds / TICK), 1.0, float(FOREVER)) * TICK
    return rounded
