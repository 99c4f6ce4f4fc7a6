"""Floor 0: operators, their axes and access patterns; ``importer`` and the kernels in ``ops`` need torch."""

from flexsearch.graph.model import Axis, Dtype, Flow, Operator, OperatorGraph, Role, Tensor, Tracing
from flexsearch.graph.notation import Access, Box, Interval, intersect, parse, volume
from flexsearch.graph.piece import Piece, chunk, chunks, make_piece, whole_piece

__all__ = [
    "Access", "Axis", "Box", "Dtype", "Flow", "Interval", "Operator", "OperatorGraph", "Piece", "Role", "Tensor",
    "Tracing", "chunk", "chunks", "intersect", "make_piece", "parse", "volume", "whole_piece",
]  # fmt: skip
