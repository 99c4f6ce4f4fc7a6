"""Whether a numba that is newer than those that were tried still is what ``linking`` relies on.

Without it every function is a program of its own (``numba.njit``), and the first run on a machine compiles for minutes.
So a small program is compiled and run once, and the result is kept beside compiled code. Only a numba that fails at it
is used without ``linking``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np

Program = Callable[..., Any]
WORKS: Final = "works"
LEAN: Final = {"nogil": True, "_nrt": False}


def is_fit(program: Program, large: int, version: str, folder: Path | None) -> bool:
    """Whether functions made by ``program`` compute what they should, as found now or before (in ``folder``).
    ``large``: functions in a program that is not compiled into others. One that ends the process is not fit, either."""
    if folder is None:
        return _computes(program, large)
    record = folder / f"numba-{version}"
    with suppress(OSError):
        if record.exists():
            return record.read_text() == WORKS
        record.write_text("under way")
    fit = _computes(program, large)
    with suppress(OSError):
        record.write_text(WORKS if fit else "fails")
    return fit


def _computes(program: Program, large: int) -> bool:
    """Compile a program of many functions, and one that calls it; run both."""

    def last(values: Any, k: Any) -> Any:
        return 2.0 * values[k, k]

    def step_before(function: Any) -> Any:
        def step(values: Any, k: Any) -> Any:
            values[k, k] += 1.0
            return function(values, k)

        return program(step, LEAN)

    try:
        steps = program(last, LEAN)
        for _ in range(large):
            steps = step_before(steps)

        def check_inner(values: Any, k: Any) -> Any:
            return steps(values, k)

        inner = program(check_inner, LEAN)
        inner.is_entry = True

        def check_outer(values: Any, k: Any) -> Any:
            return inner(values, k) + 0.5

        outer = program(check_outer, LEAN)
        one, values = np.uint64(1), np.zeros((2, 2))
        results = outer(values, one), inner(values, one), float(values[1, 1])
    except Exception:  # whatever changed in numba
        return False
    return results == (2.0 * large + 0.5, 4.0 * large, 2.0 * large)
