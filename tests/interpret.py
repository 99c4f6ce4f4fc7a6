"""A graph computed on one device, operator by operator, whole or in pieces: the meaning of what the importer wrote."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product

import torch
from torch import Tensor

from flexsearch.graph import Box, Interval, Operator, OperatorGraph, Piece, make_piece
from flexsearch.graph.ops import KernelContext, build_kernel

Intervals = Mapping[str, Sequence[Interval]]
"""How each axis of an operator is cut."""


def whole(op: Operator) -> Intervals:
    """Every axis in one part."""
    return {axis: [(0, size)] for axis, size in op.sizes.items()}


def interpret(
    graph: OperatorGraph,
    values: Mapping[str, Tensor],
    context: KernelContext | None = None,
    cuts: Callable[[Operator], Intervals] = whole,
) -> dict[str, Tensor]:
    """All tensors of the graph, from those that no operator makes; each operator in the pieces that ``cuts`` says,
    whose contributions are added up. Checks the shape and dtype of each tensor."""
    context = context or KernelContext()
    known = {name: x.reshape(graph.tensor[name].shape) if name in graph.tensor else x for name, x in values.items()}
    for op in graph.operators:
        shapes = [graph.tensor[name].shape for name in op.inputs]
        made = [graph.tensor[name].shape for name in op.outputs]
        intervals = cuts(op)
        pieces = [
            make_piece(op, dict(zip(intervals, combination, strict=True)), shapes, made)
            for combination in product(*intervals.values())
        ]
        parts = [_run(op, piece, shapes, [known[name] for name in op.inputs], context) for piece in pieces]
        for i, name in enumerate(op.outputs):
            tensor = graph.tensor[name]
            value = _sum([(part[i], piece.outputs[i]) for part, piece in zip(parts, pieces, strict=True)], tensor.shape)
            assert tuple(value.shape) == tensor.shape, (op, value.shape, tensor.shape)
            assert str(value.dtype) == f"torch.{tensor.dtype}", (op, value.dtype, tensor.dtype)
            known[name] = value
    return known


def _run(
    op: Operator, piece: Piece, shapes: Sequence[tuple[int, ...]], operands: Sequence[Tensor], context: KernelContext
) -> tuple[Tensor, ...]:
    local = [
        None if box is None else x[tuple(slice(low, high) for low, high in box)]
        for x, box in zip(operands, piece.inputs, strict=True)
    ]
    result = build_kernel(op, piece, shapes, context)(*local)
    return result if isinstance(result, tuple) else (result,)


def _sum(parts: Sequence[tuple[Tensor, Box]], shape: tuple[int, ...]) -> Tensor:
    """What the parts at their regions add up to."""
    first, box = parts[0]
    if len(parts) == 1 and tuple(first.shape) == shape:
        return first
    total = torch.zeros(shape, dtype=first.dtype)
    for value, box in parts:
        index = tuple(slice(low, high) for low, high in box)
        assert tuple(value.shape) == tuple(high - low for low, high in box), (value.shape, box)
        grown = torch.zeros(shape, dtype=value.dtype)
        grown[index] = value  # differentiable: autograd records the assignment
        total = total | grown if value.dtype == torch.bool else total + grown
    return total
