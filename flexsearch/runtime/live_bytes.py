"""The bytes of all storages that are made within a block of code and still alive, operator by operator."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees what every operator returns, in backward passes too. ``live``: bytes at the moment; ``peak``: most at a time
    behind an operator, since it was set. ``there``: tensors that do not count. Workspace inside a kernel is not seen.

    A storage's Python object lives as long as the storage does, so that a weak reference to it tells when it dies.
    """

    def __init__(self, there: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._there = {t.untyped_storage()._cdata for t in there}
        self._storages: dict[int, tuple[weakref.ReferenceType[torch.UntypedStorage], int]] = {}
        self.live = self.peak = 0

    def leave_out(self, there: Iterable[Tensor]) -> None:
        """More tensors that do not count, none of which an operator has returned yet."""
        self._there.update(t.untyped_storage()._cdata for t in there)

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._note(tensor.untyped_storage())
        self.peak = max(self.peak, self.live)
        return result

    def refresh(self) -> None:
        """Look at the sizes again: memory of a storage can be taken and given back without an operator."""
        for reference, _ in list(self._storages.values()):
            if (storage := reference()) is not None:
                self._note(storage)

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage._cdata, int(storage.nbytes())
        if key in self._there:
            return
        if key not in self._storages:
            self._storages[key] = weakref.ref(storage, lambda _: self._forget(key)), 0
        reference, before = self._storages[key]
        if nbytes != before:
            self._storages[key] = reference, nbytes
            self.live += nbytes - before

    def _forget(self, key: int) -> None:
        self.live -= self._storages.pop(key)[1]
