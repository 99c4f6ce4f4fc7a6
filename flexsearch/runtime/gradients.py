"""The gradients of one step of one rank, and the order in which they may be added to, read and released."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from flexsearch.runtime.program import Key


class Gradients:
    """Gradients by key. Each is complete when it is first read, and gone once it is released.

    The loss may not depend on a piece, so a missing gradient is a legitimate zero. One that was released would look the
    same; adding to it afterwards, or reading it, is therefore an AssertionError: the program has a wrong order.
    """

    def __init__(self) -> None:
        self._tensors: dict[Key, Tensor] = {}
        self._read: set[Key] = set()
        self._released: set[Key] = set()

    def add(self, key: Key, gradient: Tensor) -> None:
        """Add to the gradient of ``key``. Never in place: autograd may hand out one tensor for several values."""
        if key in self._read or key in self._released:
            raise AssertionError(f"the gradient of {key} grows after it has been used")
        before = self._tensors.get(key)
        self._tensors[key] = gradient if before is None else before + gradient

    def read(self, key: Key, zero: Callable[[], Tensor]) -> Tensor:
        """The complete gradient of ``key``; ``zero()`` if the loss does not depend on it."""
        self._check_present(key)
        self._read.add(key)
        if key not in self._tensors:
            self._tensors[key] = zero()
        return self._tensors[key]

    def take(self, key: Key) -> Tensor | None:
        """The complete gradient of ``key``, which is released; None if the loss does not depend on it."""
        self._check_present(key)
        gradient = self._tensors.get(key)
        self.release(key)
        return gradient

    def release(self, key: Key) -> None:
        """Free the gradient of ``key``; it may be gone already."""
        self._tensors.pop(key, None)
        self._released.add(key)

    def tensors(self) -> list[Tensor]:
        """Those that are there."""
        return list(self._tensors.values())

    def _check_present(self, key: Key) -> None:
        if key in self._released:
            raise AssertionError(f"the gradient of {key} is read after it has been released")
