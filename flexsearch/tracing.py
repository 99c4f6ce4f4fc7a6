"""Floor 5: the measured timeline of a training step beside the predicted one, as a file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from flexsearch.report import trace
from flexsearch.simulate import simulate

if TYPE_CHECKING:
    from flexsearch.runtime.parallel import Parallel
    from flexsearch.runtime.timeline import Timeline


def save_trace(path: str | Path, step: Parallel, timeline: Timeline) -> None:
    """Write what ``step.trace(batch)`` measured, beside what is predicted of the step, for ui.perfetto.dev. Rank 0
    writes, the others may call it. Raises OutputError."""
    if step.rank == 0:
        trace.save_trace(path, step.lowered, simulate(step.lowered), timeline.spans, timeline.curves())
