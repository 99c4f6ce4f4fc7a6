"""Shapes that an exported program leaves open although constants decide them: what a constant mask selects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from flexsearch.graph.fold import Folded, derive
from flexsearch.graph.ops.value import Value

_SELECTIONS = ("aten.index.Tensor", "aten.masked_select.default")
"""Operators whose result has a shape that the values of their first operand do not decide."""


class Sizes:
    """Symbols of a program whose values have turned out."""

    def __init__(self) -> None:
        self.values: dict[Any, int] = {}

    def settle(self, node: torch.fx.Node) -> None:
        """Put numbers in the place of the symbols in what ``node`` returns, where they are all known."""
        node.meta["val"] = pytree.tree_map(self._settled, node.meta.get("val"))

    def measure(self, node: torch.fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Find out the sizes of what ``node`` returns by computing it, if constants decide them."""
        leaves = pytree.tree_leaves((list(args), dict(kwargs)))
        variable = [x for x in leaves if isinstance(x, Value)]
        selects = str(node.target) in _SELECTIONS and variable == [args[0]]
        if (variable and not selects) or any(isinstance(x, Folded) and derive(x, {}).is_meta for x in leaves):
            return
        target: Any = node.target
        with torch.no_grad():
            result = target(*pytree.tree_map(_stand_in, list(args)), **pytree.tree_map(_stand_in, dict(kwargs)))
        symbolic = [x for x in pytree.tree_leaves(node.meta["val"]) if isinstance(x, torch.Tensor)]
        real = [x for x in pytree.tree_leaves(result) if isinstance(x, torch.Tensor)]
        for x, y in zip(symbolic, real, strict=True):
            for size, number in zip(x.shape, y.shape, strict=True):
                if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                    self.values[size.node.expr] = number
        self.settle(node)

    def _settled(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            shape = [self._settled(size) for size in value.shape]
            if any(isinstance(size, torch.SymInt) for size in value.shape) and all(type(n) is int for n in shape):
                return torch.empty(shape, dtype=value.dtype, device="meta")
            return value
        if not isinstance(value, torch.SymInt | torch.SymBool | torch.SymFloat):
            return value
        expression = value.node.expr.subs(self.values)
        if expression.free_symbols:
            return value
        return bool(expression) if isinstance(value, torch.SymBool) else int(expression)


def _stand_in(x: Any) -> Any:
    """A tensor that takes no memory for one whose values do not matter."""
    if isinstance(x, Value):
        return torch.zeros((), dtype=getattr(torch, x.dtype)).expand(x.shape)
    return derive(x, {}).expand(x.shape) if isinstance(x, Folded) else x
