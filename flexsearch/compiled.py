"""Compiling loops over flat arrays with numba: how every compiled function of flexsearch is made.

Indices are unsigned everywhere: signed ones cost a test for wraparound, and mixed ones become float64.

numba's cache on disk notices changes of the file that holds a function, not of the files that hold the functions it
calls: after an upgrade it could run what an older version did, or fail on the name of a class that is no more. So the
names of all our compiled functions, by which numba names the files of its cache, end in a digest of all our sources,
and files with other digests are deleted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
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


_SOURCES: Final = _digest()[:16]


def _forget_others() -> None:
    """Delete what was compiled from other sources than the present ones."""
    for path in Path(__file__).parent.rglob("__pycache__/*.nb[ic]"):
        if _SOURCES not in path.name:
            with suppress(OSError):  # another process was first, or the installation is read-only
                path.unlink()


_forget_others()


def stamped(function: F) -> F:
    """The function, with a name that ends in the digest of our sources."""
    if not function.__qualname__.endswith(_SOURCES):
        function.__qualname__ += f"_{_SOURCES}"
    return function


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
