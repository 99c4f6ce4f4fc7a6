"""Variances, by sums of squares about the mean: partial sums, so that no dimension is whole."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from flexsearch.graph.model import Operator
from flexsearch.graph.ops.base import (
    INPUTS,
    Extents,
    Kernel,
    KernelContext,
    Sample,
    Shapes,
    define,
    points,
    rand,
    rewrite,
)
from flexsearch.graph.ops.builder import Builder, letters, normal_dims
from flexsearch.graph.ops.lazy import torch
from flexsearch.graph.ops.local import extent
from flexsearch.graph.ops.norms import root
from flexsearch.graph.ops.pointwise import cast, pointwise
from flexsearch.graph.ops.reduce import NARROW, Reduction, kept_shape, reduce_pattern, reduced
from flexsearch.graph.ops.shape import view
from flexsearch.graph.ops.value import Value
from flexsearch.graph.piece import Piece

if TYPE_CHECKING:
    from torch import Tensor


class SquaredDeviation(Reduction):
    """Sum of ``(x - mean) ** 2`` for means, the second operand, of the whole tensor.

    A piece adds the squares about its own mean and what the two means differ by, which loses no digits; autograd then
    saves ``x`` alone.
    """

    name = "squared_deviation"
    inputs = (2, 2)
    additive = True
    saved = INPUTS
    backward = 2.0

    def check(self, op: Operator, attributes: Any, shapes: tuple[tuple[int, ...], ...]) -> str:
        gone = normal_dims(attributes.dims, len(shapes[0])) if shapes[0] else ()
        means = tuple(1 if d in gone else s for d, s in enumerate(shapes[0]))
        if shapes[1] != means:
            return f"the means of shape {list(shapes[0])} must have shape {list(means)}"
        return super().check(op, attributes, shapes)

    def flops(self, op: Operator, extents: Extents) -> Any:
        return 3.0 * points(extents)

    def kernel(self, op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
        dims, keep = reduced(op, len(shapes[0]))
        box, gone = piece.inputs[0], sorted(dims, reverse=True)
        assert box is not None
        count = prod(extent(box)[d] for d in dims)

        def run(x: Tensor, mean: Tensor) -> Tensor:
            variance, own = torch.var_mean(x.to(mean.dtype), dims, correction=0, keepdim=True)
            y = (variance + (own - mean).square()) * count
            for d in () if keep else gone:
                y = y.squeeze(d)
            return y

        return run

    def samples(self) -> Iterable[Sample]:
        yield Sample(lambda x: (x.var(1), x.std((0, 2), keepdim=True), x.var()), (rand(4, 6, 3) + 50,))
        yield Sample(lambda x: (*torch.var_mean(x, 0, correction=0), *torch.std_mean(x, 1)), (rand(4, 6),))


define(SquaredDeviation())


@rewrite("var", "std", "var_mean", "std_mean")
def _var(
    b: Builder, x: Value, dim: Any = None, unbiased: bool = True, correction: float | None = None, keepdim: bool = False
) -> Any:
    """Squares about the mean, divided by their number less ``correction`` (1 if nothing is said)."""
    if x.dtype.startswith("complex"):
        raise b.error("is of complex numbers", "Add the variances of x.real and x.imag.")
    name, dims = b.target.split(".")[1], normal_dims(dim, x.rank)
    less = float(unbiased) if correction is None else correction
    dtype = "float32" if x.dtype in NARROW else x.dtype
    mean = _exact_mean(b, x, dims, dtype)
    attributes = {"dims": list(dims), "keepdim": keepdim}
    pattern = reduce_pattern(x, dims, keepdim).split(" -> ")
    centre = " ".join("1" if i in dims else n for i, n in enumerate(letters(x.rank)))
    squares = b.emit(
        "squared_deviation", [x, mean], kept_shape(x, dims, keepdim), f"{pattern[0]}, {centre} -> {pattern[1]}",
        attributes, dtype=dtype, short=name.removesuffix("_mean"),
    )  # fmt: skip
    spread = pointwise(b, "div.Scalar", (squares, max(0.0, prod(x.shape[d] for d in dims) - less)))
    if name.startswith("std"):
        spread = root(b, spread, 2.0)
    spread = cast(b, spread, x.dtype)
    return (spread, cast(b, view(b, mean, spread.shape), x.dtype)) if name.endswith("_mean") else spread


def _exact_mean(b: Builder, x: Value, dims: Sequence[int], dtype: str) -> Value:
    """Means along ``dims``, which stay, with the digits of ``dtype``."""
    attributes = {"dims": list(dims), "keepdim": True, **({"dtype": dtype} if dtype != x.dtype else {})}
    pattern = reduce_pattern(x, dims, keepdim=True)
    return b.emit("mean", [x], kept_shape(x, dims, True), pattern, attributes, dtype=dtype, short="mean")
