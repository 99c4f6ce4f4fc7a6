"""Compiling loops over flat arrays with numba: how every compiled function of flexsearch is made.

Indices are unsigned everywhere: signed ones cost a test for wraparound, and mixed ones become float64. numba's cache on
disk notices changes of the file that holds a function, not of the files that hold the functions it calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt
from numba import njit

F = TypeVar("F", bound=Callable[..., Any])
U8 = npt.NDArray[np.uint8]
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]

ZERO: Any = np.uint64(0)
ONE: Any = np.uint64(1)
TWO: Any = np.uint64(2)
THREE: Any = np.uint64(3)


def compiled(function: F) -> F:
    """``numba.njit``, cached on disk; not cached where no folder can be written (a read-only installation)."""
    try:
        return cast(F, njit(cache=True, nogil=True)(function))
    except RuntimeError:  # numba: "no locator available"
        return cast(F, njit(nogil=True)(function))


def lean(function: F) -> F:
    """As ``compiled``, without counting references to arrays: functions that hand dozens of arrays on compile in
    seconds then, not minutes. They must not make arrays."""
    make: Any = njit
    for options in ({"cache": True, "_nrt": False}, {"_nrt": False}):
        try:
            return cast(F, make(nogil=True, **options)(function))
        except (RuntimeError, KeyError, TypeError):  # no folder for the cache, or a numba without this option
            continue
    return compiled(function)
