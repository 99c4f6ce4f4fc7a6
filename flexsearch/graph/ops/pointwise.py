"""Operators that compute each element from the corresponding elements of their operands, and casts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flexsearch.graph.model import Operator
from flexsearch.graph.ops.base import (
    INPUTS,
    MANY,
    NOTHING,
    OUTPUTS,
    OperatorKind,
    Sample,
    Saved,
    Trace,
    define,
    rand,
    rewrite,
)
from flexsearch.graph.ops.builder import Builder, broadcast, broadcast_shapes
from flexsearch.graph.ops.calls import CallAttributes, check_call, dtype_name, encode_call
from flexsearch.graph.ops.lazy import torch
from flexsearch.graph.ops.value import Value
from flexsearch.graph.targets import POINTWISE, trust

if TYPE_CHECKING:
    from torch._ops import OpOverload

_OF_RESULT = {"relu", "sigmoid", "tanh", "exp", "sqrt", "rsqrt", "reciprocal", "expm1", "tan"}
"""Their gradient is a function of the result."""
_LINEAR = {"add", "sub", "rsub", "neg", "clone", "_to_copy", "to", "copy", "alias", "detach", "zeros_like", "ones_like"}
_SCALED = {"mul", "div"}  # by a number they need nothing, by a tensor both factors


class Pointwise(OperatorKind):
    """A torch operator whose operands broadcast: addition, activation functions, comparisons, casts, ..."""

    name = "pointwise"
    attributes = CallAttributes
    inputs = (1, MANY)
    trivial = True

    def check(self, op: Operator, attributes: Any, shapes: tuple[tuple[int, ...], ...]) -> str:
        return check_call(op, attributes)

    def saves(self, op: Operator, *before: Operator) -> Saved:
        parts = str(op.attributes.get("target", "")).split(".")
        name = (parts[1] if len(parts) > 1 else parts[0]).removesuffix("_")
        if name in _LINEAR or (name in _SCALED and len(op.inputs) == 1):
            return NOTHING
        return OUTPUTS if name in _OF_RESULT else INPUTS

    def samples(self) -> Iterable[Sample]:
        yield Sample(lambda x, y: torch.add(x, y, alpha=2), (rand(4, 1, 3), rand(2, 3)))
        yield Sample(lambda x: torch.where(x > 0, x, x.exp() - 1).clamp(max=1.5), (rand(4, 3),))
        yield Sample(lambda x: torch.nn.functional.gelu(x, approximate="tanh"), (rand(4, 3),))
        yield Sample(lambda x: (x.float() * 2).double(), (rand(4, 3),))


define(Pointwise())


def pointwise(
    b: Builder, target: str | OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None
) -> Value:
    """Append an elementwise operator; ``target`` names it ("add.Tensor") or is the torch operator itself."""
    overload = _overload(target) if isinstance(target, str) else target
    attributes, tensors = encode_call(overload, args, kwargs or {})
    shape = broadcast_shapes(*(v.shape for v in tensors))
    chosen = (kwargs or {}).get("dtype")
    dtype = dtype_name(chosen) if chosen else _result_dtype(overload, args, kwargs or {})
    short = str(overload).split(".")[1].strip("_")
    return b.emit("pointwise", tensors, shape, broadcast(tensors, shape), attributes, dtype=dtype, short=short)


def _overload(name: str) -> OpOverload:
    packet, overload = name.split(".")
    value: OpOverload = getattr(getattr(torch.ops.aten, packet), overload)
    return value


def _result_dtype(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Dtype by torch's own promotion: the operator on the meta device, where 0-dim operands count as such."""

    def stand_in(value: Any) -> Any:
        if isinstance(value, Value):
            return torch.empty((1,) * min(value.rank, 1), dtype=getattr(torch, value.dtype), device="meta")
        return [stand_in(v) for v in value] if isinstance(value, list | tuple) else value

    result = target(*map(stand_in, args), **{k: stand_in(v) for k, v in kwargs.items()})
    return dtype_name(result.dtype)


def pointwise_trace(target: OpOverload) -> Trace | None:
    """How ``target`` is traced if it is elementwise, listed so or tagged so by torch; else None."""
    library, name = target._schema.name.split("::")
    if name in POINTWISE if library == "aten" else torch.Tag.pointwise in target.tags:
        trust(str(target))  # the user's model has just called it
        return lambda b, **_: pointwise(b, target, b.args, b.kwargs)
    return None


def cast(b: Builder, x: Value, dtype: str) -> Value:
    """``x`` as ``dtype`` ("float32"); ``x`` itself if it is."""
    if dtype == x.dtype:
        return x
    attributes, _ = encode_call(torch.ops.aten._to_copy.default, (x,), {"dtype": getattr(torch, dtype)})
    return b.emit("pointwise", [x], x.shape, broadcast([x], x.shape), attributes, dtype=dtype, short="to_copy")


def cast_to(b: Builder, x: Value, dtype: torch.dtype | None) -> Value:
    """``x`` as ``dtype``, if one is asked for."""
    return x if dtype is None else cast(b, x, dtype_name(dtype))


@rewrite("_to_copy", "to.dtype", "type_as")
def _to_copy(b: Builder, x: Value, **_: Any) -> Value:
    return cast(b, x, b.dtype)


@rewrite("log_sigmoid_forward")
def _log_sigmoid(b: Builder, x: Value) -> tuple[Value, None]:
    return pointwise(b, "log_sigmoid.default", (x,)), None
