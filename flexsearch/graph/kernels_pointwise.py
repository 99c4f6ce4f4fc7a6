"""Elementwise and opaque aten operators, reductions, softmax, embedding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flexsearch.errors import ImportModelError
from flexsearch.graph.kernels_base import (
    Kernel,
    KernelContext,
    Shapes,
    dtype_of,
    extent,
    first_tensor,
    register_kernel,
    summed_count,
)
from flexsearch.graph.model import Operator
from flexsearch.graph.piece import Piece
from flexsearch.graph.targets import split_target, trusted


class _Device:
    """Stands for the device of the operands: a graph may run elsewhere than where it was traced."""


class _Operand:
    """Stands for operand ``index``."""

    def __init__(self, index: int) -> None:
        self.index = index


@register_kernel("pointwise")
def pointwise(op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
    call = _aten(op, context)
    if op.attributes.get("args") == [{"tensor": i} for i in range(len(shapes))] and not op.attributes.get("kwargs"):
        direct: Kernel = _target(op)
        return direct  # the common case, without looking for operands at each call
    return call


@register_kernel("opaque")
def opaque(op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
    call, count = _aten(op, context), len(op.outputs)

    def run(*operands: Tensor) -> Any:
        result = call(*operands)
        if isinstance(result, Tensor):
            return result
        tensors = tuple(x for x in _flat(result) if isinstance(x, Tensor))[:count]
        return tensors[0] if count == 1 else tensors

    return run


def _flat(value: Any) -> list[Any]:
    return [x for item in value for x in _flat(item)] if isinstance(value, list | tuple) else [value]


def _target(op: Operator) -> Any:
    """The operator overload that ``target`` names, ``"aten.gelu.default"``: one of the closed list of pure operators,
    or one that the user's own code has called or registered in this process."""
    target = str(op.attributes.get("target"))
    try:
        if not trusted(target):
            raise ImportModelError(
                f"operator {op.name!r}: {target!r} belongs to a library that this process has not used",
                "Import the model in this process, or register the operator (flexsearch.graph.operators.register).",
            )
    except ValueError as error:
        raise ImportModelError(f"operator {op.name!r}: target {target!r} {error}") from error
    found: Any = torch.ops
    for part in split_target(target):
        found = getattr(found, part, None)
    if not isinstance(found, torch._ops.OpOverload) or found._schema.is_mutable:
        raise ImportModelError(
            f"operator {op.name!r}: this version of PyTorch has no pure operator {target!r}",
            "Import the model again with this version of PyTorch.",
        )
    return found


def _aten(op: Operator, context: KernelContext) -> Callable[..., Any]:
    target = _target(op)
    arguments = {a.name: str(a.type) for a in target._schema.arguments}
    positional: Any = op.attributes.get("args", [])
    named: Any = op.attributes.get("kwargs", {})
    args = [_argument(v, t) for v, t in zip(positional, arguments.values(), strict=False)]
    kwargs = {k: _argument(v, arguments.get(k, "")) for k, v in named.items()}

    def run(*operands: Any) -> Any:
        tensor = first_tensor(operands)
        device = context.device if tensor is None else tensor.device
        return target(
            *[_bind(a, operands, device) for a in args], **{k: _bind(a, operands, device) for k, a in kwargs.items()}
        )

    return run


def _argument(value: Any, kind: str) -> Any:
    """A JSON value as the argument the operator's schema wants: ``{"tensor": 0}`` is an operand, ``"torch.float32"`` or
    ``{"dtype": "float32"}`` a dtype, ``{"float": "-inf"}`` or, where the schema has a number, ``"-inf"`` that."""
    if isinstance(value, dict):
        if "tensor" in value:
            return _Operand(value["tensor"])
        return dtype_of(value["dtype"]) if "dtype" in value else float(value["float"])
    if isinstance(value, list):
        return [_argument(v, kind.replace("List[", "", 1).removesuffix("]")) for v in value]
    if "Device" in kind or "device" in kind:
        return None if value is None else _Device()
    if not isinstance(value, str):
        return value
    if value.startswith("torch."):
        return dtype_of(value)
    if any(number in kind for number in ("number", "float", "Scalar")):
        return float(value)
    return value


def _bind(value: Any, operands: Sequence[Any], device: torch.device) -> Any:
    if isinstance(value, _Operand):
        return operands[value.index]
    if isinstance(value, list):
        return [_bind(v, operands, device) for v in value]
    return device if isinstance(value, _Device) else value


@register_kernel("softmax", "log_softmax")
def softmax(op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
    call: Any = F.softmax if op.kind == "softmax" else F.log_softmax
    dim, name = int(str(op.attributes["dim"])), op.attributes.get("dtype")
    dtype = None if name is None else dtype_of(str(name))
    return lambda x: call(x, dim=dim, dtype=dtype)


@register_kernel("sum", "mean")
def reduce_sum(op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
    """The local sum; of a mean, the local mean times the piece's share, which cannot overflow in half precision."""
    dims, keep = _reduced(op, len(shapes[0]))
    name = op.attributes.get("dtype")
    dtype = None if name is None else dtype_of(str(name))
    if op.kind == "sum":
        return lambda x: torch.sum(x, dims, keep, dtype=dtype) if dims else x.clone()
    box = piece.inputs[0]
    assert box is not None
    share = prod(extent(box)[d] for d in dims) / summed_count(op)
    if share == 1:
        return lambda x: torch.mean(x, dims, keep, dtype=dtype)
    return lambda x: torch.mean(x, dims, keep, dtype=dtype) * share


@register_kernel("amax", "amin")
def extremum(op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
    call: Any = torch.amax if op.kind == "amax" else torch.amin
    dims, keep = _reduced(op, len(shapes[0]))
    return lambda x: call(x, dims, keep)


@register_kernel("argmax", "argmin")
def arg_extremum(op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
    call: Any = torch.argmax if op.kind == "argmax" else torch.argmin
    dims, keep = _reduced(op, len(shapes[0]))
    dim = dims[0] if op.attributes.get("dims") not in (None, []) else None
    return lambda x: call(x, dim, keep)


def _reduced(op: Operator, rank: int) -> tuple[list[int], bool]:
    """Reduced dimensions (all if the attribute is null or empty, as in aten) and whether they stay as size 1."""
    dims: Any = op.attributes.get("dims")
    dims = [dims] if isinstance(dims, int) else dims
    return [d % rank for d in dims] if dims else list(range(rank)), bool(op.attributes.get("keepdim", False))


@register_kernel("embedding")
def embedding(op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
    """Rows of the table; where the vocabulary is split, each piece gives the rows it holds and zero for the others."""
    box = piece.inputs[1]
    assert box is not None
    low, high = box[0]
    given: Any = op.attributes.get("padding_idx")
    padding = given - low if given is not None and low <= given < high else None
    if (low, high) == (0, shapes[1][0]):
        return lambda index, table: F.embedding(index, table, padding)

    def run(index: Tensor, table: Tensor) -> Tensor:
        away = (index < low) | (index >= high)
        rows = F.embedding((index - low).masked_fill(away, 0), table, padding)
        return rows.masked_fill(away.unsqueeze(-1), 0)

    return run
