"""Triangles and diagonals of matrices. A piece of a triangle knows where in the matrix it lies; nothing is whole."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from flexsearch.graph.model import Operator
from flexsearch.graph.ops.attributes import Signed
from flexsearch.graph.ops.base import (
    NOTHING,
    Attributes,
    Extents,
    Kernel,
    KernelContext,
    OperatorKind,
    Sample,
    Shapes,
    define,
    output_elements,
    rand,
    rewrite,
)
from flexsearch.graph.ops.builder import Builder, letters
from flexsearch.graph.ops.join import pad
from flexsearch.graph.ops.lazy import torch
from flexsearch.graph.ops.linear import contract
from flexsearch.graph.ops.shape import cut, expand, permute, view
from flexsearch.graph.ops.value import Value
from flexsearch.graph.piece import Piece


class Triangle(OperatorKind):
    """The elements of the last two dimensions below (``upper``: above) a diagonal, it included; 0 elsewhere."""

    name = "triangle"
    pattern = "a.. -> a.."
    saved = NOTHING
    trivial = True
    backward_reads = "gradients"

    class attributes(Attributes):
        diagonal: Signed = 0
        upper: bool = False

    def trace(self, b: Builder, x: Value, diagonal: int = 0, upper: bool = False) -> Value:
        attributes = {"diagonal": diagonal, "upper": upper}
        return b.emit(self.name, [x], x.shape, attributes=attributes, short="triu" if upper else "tril")

    def check(self, op: Operator, attributes: Any, shapes: tuple[tuple[int, ...], ...]) -> str:
        if len(shapes[0]) < 2 or shapes[0] != shapes[1]:
            return f"a triangle of shape {list(shapes[0])} cannot have shape {list(shapes[1])}"
        first, second = ([d.axes for d in o.dimensions] for o in (*op.access.inputs, *op.access.outputs))
        return "" if first == second else f'pattern "{op.pattern}" moves elements'

    def flops(self, op: Operator, extents: Extents) -> Any:
        return output_elements(op, extents)

    def kernel(self, op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
        (row, _), (column, _) = piece.outputs[0][-2:]
        diagonal = int(str(op.attributes.get("diagonal", 0))) + row - column
        call = torch.triu if op.attributes.get("upper") else torch.tril
        return lambda x: call(x, diagonal)

    def samples(self) -> Iterable[Sample]:
        yield Sample(lambda x: (x.tril(), x.triu(1), x.tril(-2)), (rand(2, 6, 5),))
        yield Sample(lambda x: (x.diag_embed(), x.diag_embed(2, 0, 1), x.diag_embed(-1), x[0].diag()), (rand(2, 3),))


_TRIANGLE = Triangle()
define(_TRIANGLE)


@rewrite("tril", "triu")
def _triangle(b: Builder, x: Value, diagonal: int = 0) -> Value:
    return _TRIANGLE.trace(b, x, diagonal, b.target.startswith("aten.triu"))


@rewrite("diagonal", "linalg_diagonal")
def take_diagonal(
    b: Builder, x: Value | None = None, offset: int = 0, dim1: int = 0, dim2: int = 1, A: Value | None = None
) -> Value:
    """The elements whose index along ``dim2`` is that along ``dim1`` plus ``offset``, as a new last dimension."""
    x = A if x is None else x
    assert x is not None
    dim1, dim2 = dim1 % x.rank, dim2 % x.rank
    first, second = max(0, -offset), max(0, offset)
    size = min(x.shape[dim1] - first, x.shape[dim2] - second)
    x = cut(b, cut(b, x, dim1, first, size), dim2, second, size)
    names = letters(x.rank)
    names[dim1] = names[dim2] = names[dim1].upper()
    kept = [n for n in names if not n.isupper()]
    return contract(b, [x], f"{' '.join(names)} -> {' '.join([*kept, names[dim1]])}", "diagonal")


@rewrite("trace")
def _trace(b: Builder, x: Value) -> Value:
    size = min(x.shape)
    return contract(b, [cut(b, cut(b, x, 0, 0, size), 1, 0, size)], "A A -> ", "trace")


@rewrite("diagflat")
def _diagflat(b: Builder, x: Value, offset: int = 0) -> Value:
    return _diag_embed(b, view(b, x, [-1]), offset)


@rewrite("diag_embed")
def _diag_embed(b: Builder, x: Value, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Value:
    """A matrix of zeros, but for a diagonal: what is left of repeated rows between two triangles."""
    size = x.shape[-1]
    rows = expand(b, view(b, x, (*x.shape, 1)), (*x.shape, size))
    lower = _TRIANGLE.trace(b, rows)
    matrix = _TRIANGLE.trace(b, lower, upper=True)
    if offset:
        before, after = max(0, offset), max(0, -offset)
        matrix = pad(b, matrix, [before, after, after, before])
    rank = matrix.rank
    order = list(range(rank - 2))
    for place, dim in sorted(((dim1 % rank, rank - 2), (dim2 % rank, rank - 1))):
        order.insert(place, dim)
    return permute(b, matrix, order)


@rewrite("diag")
def _diag(b: Builder, x: Value, diagonal: int = 0) -> Value:
    return _diag_embed(b, x, diagonal) if x.rank == 1 else take_diagonal(b, x, diagonal)
