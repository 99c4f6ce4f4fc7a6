"""Handler of the LSTM cell, and what makes its hidden features splittable.

Torch keeps the weights of the four gates below each other, (4 * hidden, features). A part of the hidden features is
rows of all four, which is no region of such a matrix. As (4, hidden, features), which is the same memory, it is one: so
the graph gives parameters that only LSTM cells read this shape, and the hidden axis goes through the whole cell (gates,
states, weights) without moving anything; only what the cell reads of x and h is whole. One operator for a cell, not one
for each of its products, slices and activations, is what the FlexFlow paper and the libraries' kernels have.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch.utils import _pytree as pytree

from flexsearch.graph.aten import Builder, Shape, Value, aten

GATES = 4


def gate_weight(nodes: Iterable[torch.fx.Node]) -> bool:
    """Whether a parameter (under all its names, ``nodes``) is read, and only as weight or bias of LSTM cells."""
    users = [(node, user) for node in nodes for user in node.users]
    return bool(users) and all(
        user.target is torch.ops.aten.lstm_cell.default and node not in pytree.tree_leaves(user.args[:2])
        for node, user in users
    )


def gate_shape(shape: Shape) -> Shape:
    """(4 * hidden, ...) as (4, hidden, ...)."""
    return (GATES, shape[0] // GATES, *shape[1:])


@aten("lstm_cell")
def _lstm_cell(
    b: Builder, input: Value, hx: Sequence[Value], w_ih: Value, w_hh: Value, b_ih: Value | None = None,
    b_hh: Value | None = None,
) -> tuple[Value, ...]:  # fmt: skip
    """A weight that others read too, or that is computed, has its gates below each other: hidden is then whole."""
    weights = [(w_ih, " I"), (w_hh, " K"), *((bias, "") for bias in (b_ih, b_hh) if bias is not None)]
    patterns = [f"{'G h' if x.rank > len(features.split()) + 1 else '(G h)'}{features}" for x, features in weights]
    pattern = f"b I, b K, b h, {', '.join(patterns)} -> b h, b h"
    operands = [input, *hx, *(x for x, _ in weights)]
    return b.emit_all("lstm_cell", operands, b.results, pattern, sizes={"G": GATES}, short="lstm_cell")
