"""The bytes that storages made within a block of code take together, at most at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Sees what every operator returns, in backward passes too. ``peak``: bytes, most at a time behind an operator.
    ``known``: tensors that were there before. Workspace inside a kernel is not seen."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.known = {t.untyped_storage()._cdata for t in known}
        self.live: dict[int, StorageWeakRef] = {}
        self.peak = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                # A dead storage's address may be that of a new one.
                if storage._cdata not in self.known and self._nbytes(storage._cdata) is None:
                    self.live[storage._cdata] = StorageWeakRef(storage)
        sizes = {key: self._nbytes(key) for key in self.live}
        self.live = {key: ref for key, ref in self.live.items() if sizes[key] is not None}
        self.peak = max(self.peak, sum(size or 0 for size in sizes.values()))
        return result

    def _nbytes(self, key: int) -> int | None:
        """As the storage is now: it may have been emptied. None: nobody holds it any more."""
        if key not in self.live:
            return None
        storage = torch.UntypedStorage._new_with_weak_ptr(self.live[key].cdata)
        return None if storage is None else int(storage.nbytes())
