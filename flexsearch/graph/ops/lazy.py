"""PyTorch, imported when a name of it is first used: what plans from a saved graph never imports it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch as torch
    import torch.nn.functional as F
else:

    class _Module:
        """Stands for the module ``name`` and takes each attribute from it once."""

        def __init__(self, name: str) -> None:
            self.__name__ = name

        def __getattr__(self, attribute: str) -> Any:
            value = getattr(import_module(self.__name__), attribute)
            setattr(self, attribute, value)
            return value

    torch, F = _Module("torch"), _Module("torch.nn.functional")

__all__ = ["F", "torch"]
