"""Calls of compiled functions from Python that cost next to nothing.

numba looks at the types of all arguments in every call; of packed records it does so in Python, which takes 60 us and
more. A direct function remembers by the kinds of its arguments which machine code is theirs, and calls that (under
1 us).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar, cast

import numba
import numpy as np

_typeof: Any = numba.typeof
F = TypeVar("F", bound=Callable[..., Any])


def direct(function: F) -> F:
    """A compiled function, to be called from Python."""
    compiled: Any = function
    if not hasattr(compiled, "overloads"):  # compiling is off
        return function
    if hasattr(compiled, "entry"):
        compiled.is_entry = True
        compiled = compiled.entry
    return cast(F, _Direct(compiled))


class _Direct:
    def __init__(self, function: Any) -> None:
        self._function = function
        self._entries: dict[tuple[Any, ...], Callable[..., Any]] = {}

    def __call__(self, *arguments: Any) -> Any:
        kinds = tuple(map(_kind, arguments))
        if (entry := self._entries.get(kinds)) is not None:
            return entry(*arguments)
        result = self._function(*arguments)  # compiles it, if need be
        overload = self._function.overloads.get(tuple(_typeof(argument) for argument in arguments))
        if overload is not None:
            self._entries[kinds] = overload.entry_point
        return result


def _kind(argument: Any) -> Any:
    """What the type of an argument depends on."""
    kind = type(argument)
    if kind is np.ndarray:
        return argument.dtype.num, argument.ndim, argument.flags.num  # bits: contiguous, aligned, writeable
    if (is_record := _RECORDS.get(kind)) is None:
        is_record = _RECORDS[kind] = issubclass(kind, tuple)
    # Of a packed record: there is one object for each type, which lives on; its own hash is slow, in Python.
    return id(argument.packed_type) if is_record else kind


_RECORDS: Final[dict[type, bool]] = {}
"""By type of an argument, whether it is a packed record."""
