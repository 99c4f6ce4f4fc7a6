"""Where a microbatch lies in its batch. A plan is lowered for one microbatch; what runs is a part of the whole graph,
so that divisors of means and dropout masks are those of the batch."""

from __future__ import annotations

from flexsearch.graph import Box, Operator, Piece
from flexsearch.graph.piece import make_piece
from flexsearch.lower import Lowered


def box_in_batch(lowered: Lowered, name: str, box: Box, microbatch: int) -> Box:
    """A region of an input or constant of one microbatch, in that of the batch."""
    own, batch = lowered.graph.tensor[name].shape, lowered.batch_graph.tensor[name].shape
    steps = [part if part != size else 0 for part, size in zip(own, batch, strict=True)]
    return tuple((low + microbatch * s, high + microbatch * s) for (low, high), s in zip(box, steps, strict=True))


def boxes_in_batch(lowered: Lowered, name: str, box: Box) -> list[Box]:
    """The same of every microbatch."""
    return [box_in_batch(lowered, name, box, m) for m in range(lowered.stages.microbatches)]


def piece_in_batch(
    lowered: Lowered, operator: int, device: int, microbatch: int
) -> tuple[Operator, Piece, list[tuple[int, ...]]]:
    """An operator, the piece of it that a device computes for a microbatch, and the shapes of its operands."""
    graph, op = lowered.graph, lowered.graph.operators[operator]
    piece = lowered.placed[operator].piece_on(device)
    whole = lowered.batch_graph.operators[operator]
    if lowered.stages.microbatches == 1:
        return op, piece, [graph.tensor[name].shape for name in op.inputs]
    step = {axis: size if size != whole.sizes[axis] else 0 for axis, size in op.sizes.items()}
    axes = {a: (low + microbatch * step[a], high + microbatch * step[a]) for a, (low, high) in piece.axes.items()}
    batch = lowered.batch_graph
    inputs = [batch.tensor[name].shape for name in op.inputs]
    return whole, make_piece(whole, axes, inputs, [batch.tensor[name].shape for name in op.outputs]), inputs
