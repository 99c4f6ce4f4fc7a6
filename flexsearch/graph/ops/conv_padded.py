"""What autograd keeps of an image that zeros are put around before a convolution: the image, without the zeros.

PyTorch's convolution pads both sides of a dimension alike. Where a piece of an image has zeros on one side alone, they
are put there before, in a copy that autograd would keep for the backward pass beside the image itself, which the
operator before mostly keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

_hooks_around = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
"""Those that are at work, of which PyTorch calls the innermost alone; None: this version does not tell."""


def padded_call(call: Any, x: Tensor, sides: Sequence[int], *operands: Any) -> Tensor:
    """``call(F.pad(x, sides), *operands)``."""
    image = F.pad(x, sides)
    if _hooks_around is None or torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return call(image, *operands)  # type: ignore[no-any-return]
    memory, (pack, unpack) = image.untyped_storage()._cdata, _hooks_around(False) or (_same, _same)

    def put(tensor: Tensor) -> tuple[bool, Any]:
        padded = tensor.untyped_storage()._cdata == memory
        return padded, pack(x if padded else tensor)

    def take(packed: tuple[bool, Any]) -> Tensor:
        padded, tensor = packed[0], unpack(packed[1])
        return F.pad(tensor, sides) if padded else tensor

    with saved_tensors_hooks(put, take):
        return call(image, *operands)  # type: ignore[no-any-return]


def _same(packed: Any) -> Any:
    return packed
