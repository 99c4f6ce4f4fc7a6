"""Torch operators that no kind knows, written by PyTorch itself with operators that one does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch._ops import OpOverload
from torch.export import default_decompositions

from flexsearch.graph.ops import find_trace
from flexsearch.graph.targets import POINTWISE


def decompositions() -> dict[OpOverload, Callable[..., Any]]:
    """PyTorch's decompositions of the operators that no kind knows (``hstack``, ``kron``, ``bilinear``, ...), for
    ``ExportedProgram.run_decompositions``. What a kind knows stays whole."""
    table: Mapping[Any, Callable[..., Any]] = default_decompositions()
    return {
        target: function
        for target, function in table.items()
        if isinstance(target, OpOverload) and not _is_supported(target)
    }


def _is_supported(target: OpOverload) -> bool:
    library, name = target._schema.name.split("::")
    return find_trace(str(target)) is not None or (library == "aten" and name in POINTWISE)
