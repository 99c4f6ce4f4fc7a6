"""Compiling loops over flat arrays with numba: how every compiled function of flexsearch is made.

Indices are unsigned everywhere: signed ones cost a test for wraparound, and mixed ones become float64.

numba's cache on disk notices changes of the file that holds a function, not of the files that hold the functions it
calls: after an upgrade it could run what an older version did. So all our compiled functions hold a digest of all our
sources, which numba takes for one of the variables that a function closes over.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from types import CellType, FunctionType
from typing import Any, Final, TypeVar, cast

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


def _digest() -> str:
    """Of all files of the package in which something is compiled."""
    found = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        source = path.read_bytes()
        if b"flexsearch.compiled" in source or path == Path(__file__):
            found.update(source)
    return found.hexdigest()


_SOURCES: Final = _digest()


def stamped(function: F) -> F:
    """The function, closing over the digest of our sources."""
    code = function.__code__
    made = FunctionType(
        code.replace(co_freevars=(*code.co_freevars, "_sources")), function.__globals__, function.__name__,
        function.__defaults__, (*(function.__closure__ or ()), CellType(_SOURCES)),
    )  # fmt: skip
    made.__qualname__, made.__doc__, made.__module__ = function.__qualname__, function.__doc__, function.__module__
    return cast(F, made)


def compiled(function: F) -> F:
    """``numba.njit``, cached on disk; not cached where no folder can be written (a read-only installation)."""
    try:
        return cast(F, njit(cache=True, nogil=True)(stamped(function)))
    except RuntimeError:  # numba: "no locator available"
        return cast(F, njit(nogil=True)(function))


def lean(function: F) -> F:
    """As ``compiled``, without counting references to arrays: functions that hand dozens of arrays on compile in
    seconds then, not minutes. They must not make arrays."""
    return _first_that_works(function, {"cache": True, "_nrt": False}, {"_nrt": False})


def inlined(function: F) -> F:
    """As ``lean``, for functions that are small or called in one place: their code is put there. Arrays are handed on
    by value, seven words each; for many of them that takes longer than what most functions do."""
    cached = {"cache": True, "_nrt": False}
    return _first_that_works(function, cached | {"forceinline": True}, cached, {"_nrt": False})


def _first_that_works(function: F, *choices: dict[str, bool]) -> F:
    make: Any = njit
    for options in choices:
        try:
            return cast(F, make(nogil=True, **options)(stamped(function)))
        except (RuntimeError, KeyError, TypeError):  # no folder for the cache, or a numba without these options
            continue
    return compiled(function)
