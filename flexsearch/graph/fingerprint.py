"""What a module's forward reads besides tensors, as values that can be compared later: has anything changed?"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from enum import Enum
from functools import partial
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

_IMMUTABLE = (
    type(None), bool, int, float, complex, str, bytes, range, type(...),
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size,
)  # fmt: skip
_BY_IDENTITY = (FunctionType, BuiltinFunctionType, ModuleType, type, Enum, torch.Tensor, nn.Module)
_DEPTH = 12


class UnknownStateError(Exception):
    """A value may hold state that nobody can see: an iterator, an object of a C library."""


def fingerprint(value: Any, depth: int = 0) -> Hashable:
    """A hashable value that is equal for two readings of ``value`` only if nothing of it differs.

    Containers are compared by content, objects by identity and by content, so that a shared configuration that changes
    between two readings is noticed. Raises UnknownStateError.
    """
    kind = type(value)
    if kind in _IMMUTABLE:
        return (kind, repr(value) if kind in (float, complex) else value)
    if isinstance(value, _BY_IDENTITY):
        return (kind, id(value))
    if depth > _DEPTH:
        raise UnknownStateError(f"{kind.__name__} is nested too deeply")
    inner = depth + 1
    if isinstance(value, tuple | list):
        return (kind, tuple(fingerprint(x, inner) for x in value), _members(value, inner))
    if isinstance(value, dict):
        items = tuple((fingerprint(k, inner), fingerprint(x, inner)) for k, x in value.items())
        return (kind, items, _members(value, inner))
    if isinstance(value, set | frozenset):
        return (kind, frozenset(fingerprint(x, inner) for x in value), _members(value, inner))
    if isinstance(value, partial):
        return (kind, *(fingerprint(x, inner) for x in (value.func, value.args, value.keywords)))
    if _all_in_dict(value):
        return (kind, id(value), _members(value, inner))
    raise UnknownStateError(f"{kind.__name__} may have a state of its own")


def _members(value: Any, depth: int) -> Hashable:
    """The attributes of an object, or of a subclass of a container."""
    return tuple((name, fingerprint(x, depth)) for name, x in getattr(value, "__dict__", {}).items())


class _Plain:
    pass


_HEAP_TYPE = 1 << 9


def _all_in_dict(value: Any) -> bool:
    """Whether an object's class is written in Python, without slots and built-in bases: that is its whole state."""
    kind = type(value)
    python = all(base is object or base.__flags__ & _HEAP_TYPE for base in kind.__mro__)
    return python and hasattr(value, "__dict__") and kind.__basicsize__ <= _Plain.__basicsize__


class Reads:
    """The attributes of modules that a call reads, as they were: (module, name) -> fingerprint.

    ``complete``: nothing else was read or written that could make another call differ.
    """

    def __init__(self) -> None:
        self.values: dict[tuple[int, str], Hashable] = {}
        self.modules: dict[int, nn.Module] = {}
        self.complete = True

    def add(self, module: nn.Module, name: str, value: Any) -> None:
        """``module.name`` was read."""
        key = (id(module), name)
        if key in self.values:
            return
        self.modules[id(module)] = module
        try:
            self.values[key] = fingerprint(value)
        except UnknownStateError:
            self.complete = False

    def unchanged(self, counterparts: Callable[[nn.Module], list[nn.Module]]) -> bool:
        """Whether the counterparts of all modules have the same values now."""
        try:
            return all(
                name in vars(other) and fingerprint(vars(other)[name]) == value
                for (number, name), value in self.values.items()
                for other in counterparts(self.modules[number])
            )
        except UnknownStateError:
            return False


_ACTIVE: list[Reads] = []
"""What is being recorded: a call, the calls inside it, ..."""


@contextmanager
def recorded() -> Iterator[Reads]:
    """Record what modules' attributes are read and whether any is written; only within :func:`watched`."""
    reads = Reads()
    _ACTIVE.append(reads)
    try:
        yield reads
    finally:
        _ACTIVE.remove(reads)


def read_too(modules: list[tuple[nn.Module, str]]) -> None:
    """Attributes that a call which did not run would have read: those of the call that it repeats."""
    for module, name in modules:
        for reads in _ACTIVE:
            reads.add(module, name, vars(module)[name])


_STRUCTURE = frozenset(vars(nn.Module())) - {"training"}
"""Parameters, buffers, children and hooks: compared as the structure of a module, not attribute by attribute."""
_TRUSTED = (str(torch.__path__[0]), str(Path(__file__).parent))
"""Whose own reading of a module's ``__dict__`` is none of the model's."""


@contextmanager
def watched(ignored: type) -> Iterator[None]:
    """Let :func:`recorded` see the attributes of all modules, but those of type ``ignored``.

    The base class of all modules is changed for a while, so that no module's type is.
    """
    write = nn.Module.__setattr__

    def getattribute(self: nn.Module, name: str) -> Any:
        value = object.__getattribute__(self, name)
        if _ACTIVE and name not in _STRUCTURE and (name[:2] != "__" or name == "__dict__"):
            if type(value) is ignored:
                return value
            if name in object.__getattribute__(self, "__dict__"):
                for reads in _ACTIVE:
                    reads.add(self, name, value)
            elif name == "__dict__" and not sys._getframe(1).f_code.co_filename.startswith(_TRUSTED):
                for reads in _ACTIVE:
                    reads.complete = False
        return value

    def setattribute(self: nn.Module, name: str, value: Any) -> None:
        for reads in _ACTIVE:
            reads.complete = False
        write(self, name, value)

    base: Any = nn.Module
    base.__getattribute__ = getattribute
    base.__setattr__ = setattribute
    try:
        yield
    finally:
        del base.__getattribute__
        base.__setattr__ = write
