"""The bytes of all storages that are made within a block of code and still alive, operator by operator."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees what every operator returns, in backward passes too. ``live``: bytes at the moment; ``peak``: most at a time
    behind an operator, since it was set. ``there``: tensors that do not count. Workspace inside a kernel is not seen.

    A storage's Python object lives as long as the storage does, so that a weak reference to it tells when it dies.

    Autograd adds to a gradient in its memory if nobody else holds it, but never under a mode like this one. Such a sum
    is counted as what it is without the mode.
    """

    def __init__(self, there: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._there = {t.untyped_storage()._cdata for t in there}
        self._storages: dict[int, tuple[weakref.ReferenceType[torch.UntypedStorage], int]] = {}
        self.live = self.peak = 0
        self._alone = _alone()

    def leave_out(self, there: Iterable[Tensor]) -> None:
        """More tensors that do not count, none of which an operator has returned yet."""
        self._there.update(t.untyped_storage()._cdata for t in there)

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        replaced = self._replaced(func, args)
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._note(tensor.untyped_storage())
        self.peak = max(self.peak, self.live - replaced)
        return result

    def refresh(self) -> None:
        """Look at the sizes again: memory of a storage can be taken and given back without an operator."""
        for reference, _ in list(self._storages.values()):
            if (storage := reference()) is not None:
                self._note(storage)

    def _replaced(self, func: Callable[..., Any], args: tuple[Any, ...]) -> int:
        """Bytes that the result of an operator takes the place of where there is no mode: those of a gradient that
        autograd alone holds and adds another one to."""
        if func is not torch.ops.aten.add.Tensor or not _in_backward():
            return 0
        before = args[0]
        nbytes = int(before.untyped_storage().nbytes())
        whole = nbytes == before.numel() * before.itemsize
        return nbytes if whole and _holders(before) == self._alone else 0

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


def _in_backward() -> bool:
    """Whether autograd's engine runs."""
    return torch._C._current_autograd_node() is not None and not torch.is_grad_enabled()


def _holders(tensor: Tensor) -> tuple[int, int]:
    """References to a tensor, an argument of an operator under a dispatch mode, and to its storage."""
    return tensor._use_count(), torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)  # type: ignore[attr-defined]


@cache
def _alone() -> tuple[int, int]:
    """``_holders`` of a gradient that autograd's engine alone holds."""
    counts: list[tuple[int, int]] = []

    class Counts(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (),
            kwargs: Mapping[str, Any] | None = None,
        ) -> Any:  # fmt: skip
            if func is torch.ops.aten.add.Tensor and _in_backward():
                before = args[0]  # a variable, as where this is compared
                counts.append(_holders(before))
            return func(*args, **(kwargs or {}))

    with torch.enable_grad():
        leaf = torch.ones(2, requires_grad=True)
        value = leaf * 2
        total = ((value * 3) * (value * 5)).sum()
    with Counts():  # type: ignore[no-untyped-call]
        torch.autograd.grad(total, leaf)
    return counts[0]
