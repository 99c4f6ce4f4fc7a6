"""A graph computed on one device, operator by operator, with whole pieces: the meaning of what the importer wrote."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from flexsearch.graph.kernels import KernelContext, build_kernel
from flexsearch.graph.model import OperatorGraph
from flexsearch.graph.piece import whole_piece


def interpret(
    graph: OperatorGraph, values: Mapping[str, Tensor], context: KernelContext | None = None
) -> dict[str, Tensor]:
    """All tensors of the graph, from those that no operator makes. Checks the shape and dtype of each."""
    context = context or KernelContext()
    known = {name: x.reshape(graph.tensor[name].shape) if name in graph.tensor else x for name, x in values.items()}
    for op in graph.operators:
        shapes = [graph.tensor[name].shape for name in op.inputs]
        piece = whole_piece(op, shapes, [graph.tensor[name].shape for name in op.outputs])
        operands = [
            None if box is None else known[name][tuple(slice(low, high) for low, high in box)]
            for name, box in zip(op.inputs, piece.inputs, strict=True)
        ]
        result = build_kernel(op, piece, shapes, context)(*operands)
        for name, value in zip(op.outputs, result if isinstance(result, tuple) else (result,), strict=True):
            tensor = graph.tensor[name]
            assert tuple(value.shape) == tensor.shape, (op, value.shape, tensor.shape)
            assert str(value.dtype) == f"torch.{tensor.dtype}", (op, value.dtype, tensor.dtype)
            known[name] = value
    return known
