"""How long a search goes on, and on how many processors."""

from __future__ import annotations

import os
from dataclasses import dataclass

from flexsearch.search.constants import POLISH


@dataclass(frozen=True, slots=True)
class Budget:
    """How long to search: seconds, proposals, or both."""

    seconds: float | None
    proposals: int | None

    def ended(self, elapsed_s: float, idle_s: float, reserve_s: float = 0.0) -> str:
        """Why the time is over, in words; empty if it is not. ``idle_s``: time without improvement. ``reserve_s``: time
        that is needed at the end to try every alternative to a local optimum once more."""
        if self.seconds is not None and elapsed_s >= self.seconds:
            return f"the budget of {self.seconds:g} s was used up"
        if self.seconds is not None and idle_s >= self.seconds / 2:
            return f"half of the budget of {self.seconds:g} s brought nothing better"
        if self.seconds is not None and elapsed_s + reserve_s >= self.seconds:
            return f"the rest of the budget of {self.seconds:g} s was kept to check a locally optimal plan once more"
        return ""

    def left(self, elapsed_s: float, idle_s: float) -> float:
        """Seconds for polishing: until the end, if that is near; else 0, as with a budget of proposals."""
        end = self.seconds
        if end is None or self.proposals is not None or max(elapsed_s, 2.0 * idle_s) < (1.0 - POLISH) * end:
            return 0.0
        return end - elapsed_s


def cores() -> int:
    """Number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
