"""In which order the dimensions of tensors lie in memory, where that is not their own."""

from __future__ import annotations

from typing import Any

from flexsearch.graph.images import images
from flexsearch.graph.model import OperatorGraph

Order = tuple[int, ...]
"""Dimensions from the outermost in memory to the innermost."""
CHANNELS_LAST: Order = (0, 2, 3, 1)


def orders(graph: OperatorGraph) -> dict[str, Order]:
    """By tensor: of what attention makes, which lies by position and head, and of what is permuted, and slices of that.
    Their gradients lie likewise. Images have their own (``ops.formats``), and so has what is permuted of them."""
    order_of, pictures = dict[str, Order](), images(graph)
    for op in graph.operators:
        name, attributes = op.outputs[0], op.attributes
        if op.kind == "attention" and len(graph.tensor[name].shape) == 4 and not attributes.get("dropout"):
            order_of[name] = 0, 2, 1, 3
        elif op.kind == "permute" and op.inputs[0] not in pictures:
            dims: Any = attributes["dims"]
            order_of[name] = tuple(map(dims.index, order_of.get(op.inputs[0], range(len(dims)))))
        elif op.kind == "slice" and op.inputs[0] in order_of:
            kept = [k for k, dimension in enumerate(op.access.inputs[0].dimensions) if dimension.axes]
            order_of[name] = tuple(kept.index(d) for d in order_of[op.inputs[0]] if d in kept)
    return {name: order for name, order in order_of.items() if order != tuple(range(len(order)))}
