"""Distances of all pairs, and the products of vectors in space."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import Field

from flexsearch.graph.model import Operator
from flexsearch.graph.ops.along import is_whole
from flexsearch.graph.ops.base import (
    Attributes,
    Extents,
    Kernel,
    KernelContext,
    OperatorKind,
    Sample,
    Shapes,
    define,
    output_elements,
    points,
    rand,
    rewrite,
)
from flexsearch.graph.ops.builder import Builder, fit, letters
from flexsearch.graph.ops.lazy import torch
from flexsearch.graph.ops.pointwise import cast
from flexsearch.graph.ops.value import Value
from flexsearch.graph.piece import Piece

_MANY_POINTS = 25
"""Above so many points on either side, torch takes Euclidean distances from products of matrices by default."""


class Distances(OperatorKind):
    """Distance of each row of the first operand to each of the second: rows are split, coordinates whole."""

    name = "cdist"
    inputs = (2, 2)
    backward = 2.0
    words = {"r": "rows", "c": "rows of the other operand"}

    class attributes(Attributes):
        p: Annotated[float, Field(ge=0.0, le=1e300)] | Literal["inf"] = 2.0
        products: bool = False
        """Whether Euclidean distances are made from products, which loses digits where they are small."""

    def check(self, op: Operator, attributes: Any, shapes: tuple[tuple[int, ...], ...]) -> str:
        x, y, z = shapes
        if min(len(x), len(y), len(z)) < 2 or x[-1] != y[-1] or z[-2:] != (x[-2], y[-2]):
            return f"distances of shapes {list(shapes)} are none"
        first, second, output = (o.dimensions for o in (*op.access.inputs, *op.access.outputs))
        if not is_whole(first[-1]) or first[-1] != second[-1] or (first[-2], second[-2]) != output[-2:]:
            return f'pattern "{op.pattern}" is not that of distances'
        return ""

    def flops(self, op: Operator, extents: Extents) -> Any:
        return 3.0 * points(extents)

    def kernel(self, op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
        p = float(str(op.attributes.get("p", 2.0)))
        mode = "use_mm_for_euclid_dist" if op.attributes.get("products") else "donot_use_mm_for_euclid_dist"
        return lambda x, y: torch.cdist(x, y, p, mode)

    def samples(self) -> Iterable[Sample]:
        yield Sample(torch.cdist, (rand(4, 5, 3), rand(4, 6, 3)))
        yield Sample(lambda x, y: torch.cdist(x, y, 1.0), (rand(2, 1, 5, 3), rand(4, 6, 3)))
        yield Sample(lambda x, y: torch.cdist(x, y, float("inf")), (rand(5, 3), rand(6, 3)))
        yield Sample(lambda x, y: torch.cdist(x, y) + torch.cdist(x, y, 3.0), (rand(30, 3), rand(4, 3)))


define(Distances())


@rewrite("cdist", "_cdist_forward", "_euclidean_dist")
def _cdist(b: Builder, x1: Value, x2: Value, p: float = 2.0, compute_mode: int | None = None) -> Value:
    mode = 1 if b.target.startswith("aten._euclid") else compute_mode or 0
    products = p == 2 and (mode == 1 or (not mode and max(x1.shape[-2], x2.shape[-2]) > _MANY_POINTS))
    batch, names = b.shape[:-2], [f"b{i}" for i in range(len(b.shape) - 2)]
    read = [" ".join([*fit(names, batch, x.shape[:-2]), rows, "M"]) for x, rows in ((x1, "r"), (x2, "c"))]
    attributes = {"p": "inf" if p == float("inf") else float(p), "products": products}
    operands = [cast(b, x, b.dtype) for x in (x1, x2)]
    pattern = f"{', '.join(read)} -> {' '.join([*names, 'r c'])}"
    return b.emit("cdist", operands, b.shape, pattern, attributes, dtype=b.dtype, short="cdist")


class Cross(OperatorKind):
    """Products of vectors of three coordinates, which are whole."""

    name = "cross"
    inputs = (2, 2)

    class attributes(Attributes):
        dim: Annotated[int, Field(ge=-64, lt=0)]

    def check(self, op: Operator, attributes: Any, shapes: tuple[tuple[int, ...], ...]) -> str:
        if any(len(shape) < -attributes.dim or shape[attributes.dim] != 3 for shape in shapes):
            return f"attributes.dim: shapes {list(shapes)} are no vectors of three coordinates along {attributes.dim}"
        whole = all(is_whole(o.dimensions[attributes.dim]) for o in (*op.access.inputs, *op.access.outputs))
        return "" if whole else f'pattern "{op.pattern}" does not keep dimension {attributes.dim} whole'

    def flops(self, op: Operator, extents: Extents) -> Any:
        return 3.0 * output_elements(op, extents)

    def kernel(self, op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
        dim = int(str(op.attributes["dim"]))
        return lambda x, y: torch.linalg.cross(x, y, dim=dim)

    def samples(self) -> Iterable[Sample]:
        yield Sample(lambda x, y: torch.linalg.cross(x, y, dim=1), (rand(4, 3, 5), rand(1, 3, 5)))
        yield Sample(torch.cross, (rand(4, 3), rand(4, 3)))


define(Cross())


@rewrite("cross", "linalg_cross")
def _cross(b: Builder, x: Value, other: Value, dim: int | None = -1) -> Value:
    rank = len(b.shape)
    along = x.shape.index(3) if dim is None else dim % rank  # torch.cross takes the first of three
    names = [n.upper() if i == along else n for i, n in enumerate(letters(rank))]
    operands = [cast(b, v, b.dtype) for v in (x, other)]
    read = [" ".join(fit(names, b.shape, v.shape)) for v in operands]
    pattern = f"{', '.join(read)} -> {' '.join(names)}"
    return b.emit("cross", operands, b.shape, pattern, {"dim": along - rank}, dtype=b.dtype, short="cross")
