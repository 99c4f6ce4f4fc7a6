"""Integers as vectors of zeros and ones, and counts of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from flexsearch.graph.model import Operator
from flexsearch.graph.ops.attributes import Scalar
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
    input_elements,
    integers,
    rand,
)
from flexsearch.graph.ops.builder import Builder
from flexsearch.graph.ops.form import check_form
from flexsearch.graph.ops.lazy import torch
from flexsearch.graph.ops.value import Value
from flexsearch.graph.piece import Piece

if TYPE_CHECKING:
    from torch import Tensor


class OneHot(OperatorKind):
    """A new last dimension, in which the element that an integer names is 1; where it is split, a piece has its part
    of the classes."""

    name = "one_hot"
    targets = ("aten.one_hot",)
    pattern = "a.. -> a.. c"
    words = {"c": "classes"}
    saved = NOTHING
    backward = 0.0

    def trace(self, b: Builder, x: Value, num_classes: int = -1) -> Value:
        return b.emit(self.name, [x], b.shape, dtype=b.dtype, short="one_hot")

    def check(self, op: Operator, attributes: Any, shapes: tuple[tuple[int, ...], ...]) -> str:
        return check_form(op, "a.. -> a.. c", shapes)

    def kernel(self, op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
        low, high = piece.outputs[0][-1]

        def run(x: Tensor) -> Tensor:
            return (x[..., None] == torch.arange(low, high, dtype=x.dtype, device=x.device)).long()

        return run

    def samples(self) -> Iterable[Sample]:
        yield Sample(lambda x, i: x * torch.nn.functional.one_hot(i, 5), (rand(3, 4, 5), integers(5, 3, 4)))


class Histogram(OperatorKind):
    """How many elements lie in each of equal intervals from ``low`` to ``high``: all that is split is partial sums, but
    for the bins. If the bounds are equal, they are the least and largest element, and all is whole."""

    name = "histogram"
    targets = ("aten.histc",)
    roles = {"bins": "attribute"}
    words = {"bins": "bins"}
    saved = NOTHING
    backward = 0.0

    class attributes(Attributes):
        low: Scalar
        high: Scalar

    def trace(self, b: Builder, x: Value, bins: int = 100, min: float = 0, max: float = 0) -> Value:
        attributes = {"low": float(min), "high": float(max)}
        return b.emit(self.name, [x], b.shape, _counting(min, max), attributes, dtype=b.dtype, short="histc")

    def check(self, op: Operator, attributes: Any, shapes: tuple[tuple[int, ...], ...]) -> str:
        if attributes.high < attributes.low:
            return f"attributes.high: {attributes.high} is below low, {attributes.low}"
        return check_form(op, _counting(attributes.low, attributes.high), shapes)

    def flops(self, op: Operator, extents: Extents) -> Any:
        return 3.0 * input_elements(op, extents)

    def kernel(self, op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
        (low, high), bins = piece.outputs[0][0], op.sizes[op.access.outputs[0].dimensions[0].axes[0]]
        least, largest = float(str(op.attributes["low"])), float(str(op.attributes["high"]))

        def run(x: Tensor) -> Tensor:
            values = x if x.is_cuda or x.is_floating_point() else x.double()  # torch counts no integers on a CPU
            return torch.histc(values, bins, least, largest)[low:high].to(x.dtype)

        return run

    def samples(self) -> Iterable[Sample]:
        yield Sample(lambda x: x * torch.histc(x.detach(), 4, -1.0, 1.5), (rand(7, 4),))
        yield Sample(lambda x: x * torch.histc(x.detach(), 4), (rand(7, 4),))


def _counting(low: float, high: float) -> str:
    """Pattern of a histogram: where the elements themselves give the bounds, they are whole."""
    return "a.. -> bins" if low < high else "A.. -> bins"


for _kind in (OneHot(), Histogram()):
    define(_kind)
