"""Casts of weights and gradients. A GPU takes many small ones together: one by one, launching them takes its host
longer than casting them takes the GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

TOGETHER: Final = 16 << 20
"""Bytes of casts that are made together at most: what was cast stays until all of them are."""
_COPY: Callable[[list[Tensor], list[Tensor]], Any] | None = getattr(torch, "_foreach_copy_", None)
"""What PyTorch's optimizers copy lists of tensors with; private. Where a version has none, they are cast one by one."""


def worthwhile(device: torch.device) -> bool:
    """Whether launching casts takes longer than casting."""
    return device.type == "cuda"


def cast(tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype], together: bool) -> list[Tensor]:
    """The tensors in these types; itself where a tensor has its type. ``together``: by as few calls as there are pairs
    of types; all must be on one device."""
    if not together or _COPY is None:
        return [tensor.to(dtype) for tensor, dtype in zip(tensors, dtypes, strict=True)]
    results = list(tensors)
    pairs: dict[tuple[torch.dtype, torch.dtype], list[int]] = {}
    for k, (tensor, dtype) in enumerate(zip(tensors, dtypes, strict=True)):
        if tensor.dtype != dtype:
            pairs.setdefault((tensor.dtype, dtype), []).append(k)
            results[k] = torch.empty_like(tensor, dtype=dtype)
    with torch.no_grad():
        for places in pairs.values():
            _COPY([results[k] for k in places], [tensors[k] for k in places])
    return results


def in_parts(sizes: Sequence[int]) -> list[range]:
    """Positions of these sizes (bytes) in runs of at most ``TOGETHER``, or of one that is larger."""
    parts, first, total = [], 0, 0
    for k, size in enumerate(sizes):
        if total and total + size > TOGETHER:
            parts.append(range(first, k))
            first, total = k, 0
        total += size
    return [*parts, range(first, len(sizes))] if sizes else []
