"""Softmax along one dimension, which is whole."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from flexsearch.graph.model import Operator
from flexsearch.graph.ops.along import is_whole
from flexsearch.graph.ops.attributes import Along
from flexsearch.graph.ops.base import (
    OUTPUTS,
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
from flexsearch.graph.ops.lazy import F, torch
from flexsearch.graph.ops.pointwise import cast_to
from flexsearch.graph.ops.reduce import result_dtype
from flexsearch.graph.ops.value import Value
from flexsearch.graph.piece import Piece


class Softmax(OperatorKind):
    """Shares that add up to 1."""

    name = "softmax"
    attributes = Along
    traffic = "normalisation"
    saved = OUTPUTS

    def check(self, op: Operator, attributes: Any, shapes: tuple[tuple[int, ...], ...]) -> str:
        rank = len(shapes[0])
        if not -rank <= attributes.dim < max(rank, 1):
            return f"attributes.dim: {attributes.dim} is no dimension of shape {list(shapes[0])}"
        if rank and not is_whole(op.access.inputs[0].dimensions[attributes.dim]):
            return f'pattern "{op.pattern}" does not keep dimension {attributes.dim} whole'
        same = shapes[0] == shapes[-1]
        return "" if same else f"{op.kind} of a tensor of shape {list(shapes[0])} has another shape"

    def flops(self, op: Operator, extents: Extents) -> Any:
        return 5.0 * output_elements(op, extents)

    def kernel(self, op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
        call, dim, dtype = self.call(), int(str(op.attributes["dim"])), result_dtype(op)
        return lambda x: call(x, dim=dim, dtype=dtype)

    def call(self) -> Any:
        """The function of PyTorch."""
        return F.softmax

    def samples(self) -> Iterable[Sample]:
        call = self.call()
        yield Sample(lambda x: (call(x, 1), call(x.float(), -1, dtype=torch.float64)), (rand(4, 6, 3),))


class LogSoftmax(Softmax):
    """Logarithms of these shares."""

    name = "log_softmax"

    def call(self) -> Any:
        return F.log_softmax


class SafeSoftmax(Softmax):
    """Softmax that is 0 where all of a row is masked, -inf."""

    name = "safe_softmax"

    def call(self) -> Any:
        return torch.ops.aten._safe_softmax.default

    def samples(self) -> Iterable[Sample]:
        blind = rand(4, 6) > 0
        blind[1] = True
        yield Sample(lambda x, m: self.call()(x.masked_fill(m, float("-inf")), 1), (rand(4, 6), blind))


for _kind in (Softmax(), LogSoftmax(), SafeSoftmax()):
    define(_kind)


@rewrite("softmax", "log_softmax", "_softmax", "_log_softmax", "special_softmax", "special_log_softmax")
@rewrite("_safe_softmax")
def _softmax(b: Builder, x: Value, dim: int, dtype: torch.dtype | None = None, half_to_float: bool = False) -> Value:
    name = b.target.split(".")[1]
    kind = next(k for k in ("log_softmax", "safe_softmax", "softmax") if name.endswith(k))
    x = cast_to(b, x, torch.float32 if half_to_float else dtype)
    dim %= max(x.rank, 1)
    axes = " ".join(n.upper() if i == dim else n for i, n in enumerate(letters(x.rank)))
    return b.emit(kind, [x], x.shape, f"{axes} -> {axes}", {"dim": dim}, short=kind)
