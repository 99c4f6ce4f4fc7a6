"""Constants as operands: in their smallest form where an operator broadcasts, else as large as the program says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils import _pytree as pytree

from flexsearch.graph.fold import Constant, Expanded, Folded, elementwise
from flexsearch.graph.ops.builder import Builder, bind, broadcast_shapes
from flexsearch.graph.ops.shape import expand
from flexsearch.graph.ops.value import Value

if TYPE_CHECKING:
    from torch._ops import OpOverload


class Operands:
    """The constants that operators of a graph in the making read. ``expanded``: those as large as the program has them,
    by the layer that reads them."""

    def __init__(self, builder: Builder) -> None:
        self.builder = builder
        self.constants: dict[Folded, Constant] = {}
        self.expanded: dict[tuple[Folded, str], Value] = {}

    def of(self, target: OpOverload, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments of a call with a Value for each constant."""
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Value | Folded)]
        if not any(isinstance(x, Folded) and x.compact for x in tensors):
            mapped: tuple[Any, Any] = pytree.tree_map_only(Folded, self.constant, (args, kwargs))
            return mapped
        shapes = [x.small.shape if isinstance(x, Folded) else x.shape for x in tensors]
        broadcasts = elementwise(target) and broadcast_shapes(*shapes) == self.builder.shape
        bound = bind(target, args, kwargs) if target._schema.name == "aten::scaled_dot_product_attention" else {}

        def operand(x: Folded) -> Value:
            mask = bound.get("attn_mask") is x and x.small.shape[-2:] == x.shape[-2:]
            return self.constant(x) if broadcasts or mask else self.whole(x)

        mapped = pytree.tree_map_only(Folded, operand, (args, kwargs))
        return mapped

    def constant(self, x: Folded) -> Value:
        """A constant in its smallest form: the buffer that it is, or a constant of the graph."""
        if x.buffer is not None:
            return x.buffer
        if x not in self.constants:
            self.constants[x] = Constant(x, f"{self.builder.module}.constant" if self.builder.module else "constant")
        return self.constants[x]

    def whole(self, x: Folded) -> Value:
        """A constant as large as the program has it."""
        value, b = self.constant(x), self.builder
        if not x.compact:
            return value
        if (x, b.module) not in self.expanded:
            whole = Expanded(x, expand(b, value, x.shape))
            b.drafts[-1].outputs, b.drafts[-1].auxiliary = (whole,), True
            self.expanded[x, b.module] = whole
        return self.expanded[x, b.module]
