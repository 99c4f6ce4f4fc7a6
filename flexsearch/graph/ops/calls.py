"""A call of a torch operator as a graph holds it: ``target``, ``args`` and ``kwargs``, written and read back.

In the arguments ``{"tensor": 0}`` is operand 0, ``{"dtype": "float32"}`` a dtype, ``{"float": "-inf"}`` and
``{"complex": [0.0, 1.0]}`` numbers that JSON lacks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf, isfinite
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import JsonValue

from flexsearch.errors import ImportModelError
from flexsearch.files import printable
from flexsearch.graph.model import DTYPE_BYTES, Operator
from flexsearch.graph.ops.base import Attributes
from flexsearch.graph.ops.lazy import torch
from flexsearch.graph.ops.value import Value
from flexsearch.graph.targets import check_target, split_target, trusted

if TYPE_CHECKING:
    from torch._ops import OpOverload

    from flexsearch.graph.ops.base import KernelContext

_PLACEMENT = ("device", "layout", "memory_format", "pin_memory", "non_blocking")


class CallAttributes(Attributes):
    """Of an operator that is a call of torch."""

    target: str
    args: list[JsonValue] = []
    kwargs: dict[str, JsonValue] = {}


def encode_call(
    target: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[dict[str, JsonValue], list[Value]]:
    """The attributes ``target``, ``args``, ``kwargs`` of a call as JSON, and its tensors in the order of operands."""
    tensors: list[Value] = []

    def encode(value: Any) -> JsonValue:
        if isinstance(value, Value):
            if value not in tensors:
                tensors.append(value)
            return {"tensor": tensors.index(value)}
        if isinstance(value, list | tuple):
            return [encode(item) for item in value]
        if isinstance(value, torch.dtype):
            return {"dtype": dtype_name(value)}
        if isinstance(value, float) and not isfinite(value):
            return {"float": "inf" if value == inf else "-inf" if value == -inf else "nan"}
        if isinstance(value, complex) and isfinite(value.real) and isfinite(value.imag):
            return {"complex": [value.real, value.imag]}
        if value is None or isinstance(value, bool | int | float | str):
            return value
        raise ImportModelError(f"argument {value!r} of {target} cannot be written to a graph file")

    def placement(value: Any) -> bool:
        return isinstance(value, torch.device | torch.layout | torch.memory_format)

    encoded: list[JsonValue] = [encode(a) for a in args if not placement(a)]
    named: dict[str, JsonValue] = {k: encode(v) for k, v in kwargs.items() if k not in _PLACEMENT}
    return {"target": str(target), "args": encoded, "kwargs": named}, tensors


def check_call(op: Operator, attributes: CallAttributes) -> str:
    """What is wrong with the call of an operator of a graph file: its target is of the closed list, its arguments are
    numbers, modes, dtypes and the operator's operands."""
    try:
        check_target(attributes.target)
    except ValueError as error:
        return f"attributes.target: {printable(attributes.target, 80)!r} {error}"
    values: list[Any] = [attributes.args, attributes.kwargs]
    while values:
        value = values.pop()
        if isinstance(value, list):
            values += value
        elif value is attributes.kwargs:
            values += value.values()
        elif isinstance(value, dict) and (problem := _check_argument(value, len(op.inputs))):
            return f"attributes.args: {problem}"
        elif isinstance(value, str) and value.startswith("torch.") and value[6:] not in DTYPE_BYTES:
            return f"attributes.args: {printable(value, 80)!r} is no dtype that a graph may hold"
    return ""


def _check_argument(value: dict[str, Any], operands: int) -> str:
    """What is wrong with an argument that stands for an operand, a dtype or a number that JSON lacks."""
    if len(value) == 1:
        [(key, what)] = value.items()
        if key == "tensor" and isinstance(what, int) and not isinstance(what, bool) and 0 <= what < operands:
            return ""
        if key == "complex" and isinstance(what, list) and [type(x) for x in what] == [float, float]:
            return "" if all(map(isfinite, what)) else "a complex number must be finite"
        if (key == "dtype" and what in [*DTYPE_BYTES]) or (key == "float" and what in ("inf", "-inf", "nan")):
            return ""
    forms = '{"tensor": OPERAND}, {"dtype": NAME}, {"float": "inf"} or {"complex": [0.0, 1.0]}'
    return f"an object in the arguments must be {forms}"


class _Device:
    """Stands for the device of the operands: a graph may run elsewhere than where it was traced."""


class _Operand(NamedTuple):
    """Stands for operand ``number``."""

    number: int


def local_call(op: Operator, context: KernelContext) -> Callable[..., Any]:
    """The torch call in the attributes of ``op``, as a function of the operands. Raises ImportModelError."""
    target, count = overload(op), len(op.inputs)
    positional: Any = op.attributes.get("args", [])
    named: Any = op.attributes.get("kwargs", {})
    if positional == [{"tensor": i} for i in range(count)] and not named:
        return target  # the common case, without looking for operands at each call
    arguments = {a.name: str(a.type) for a in target._schema.arguments}
    args = [_argument(v, t) for v, t in zip(positional, arguments.values(), strict=False)]
    kwargs = {k: _argument(v, arguments.get(k, "")) for k, v in named.items()}

    def run(*operands: Any) -> Any:
        device = next((x.device for x in operands if isinstance(x, torch.Tensor)), context.device)
        return target(
            *[_bind(a, operands, device) for a in args], **{k: _bind(a, operands, device) for k, a in kwargs.items()}
        )

    return run


def overload(op: Operator) -> OpOverload:
    """The torch operator that an operator's ``target`` names, ``"aten.gelu.default"``: one of the closed list of pure
    operators, or one that the user's own code has called or registered in this process. Raises ImportModelError."""
    target = str(op.attributes.get("target"))
    try:
        if not trusted(target):
            raise ImportModelError(
                f"operator {op.name!r}: {target!r} belongs to a library that this process has not used",
                "Import the model in this process, or register the operator (flexsearch.register).",
            )
    except ValueError as error:
        raise ImportModelError(f"operator {op.name!r}: target {target!r} {error}") from error
    value: Any = torch.ops
    for part in split_target(target):
        value = getattr(value, part, None)
    if not isinstance(value, torch._ops.OpOverload) or value._schema.is_mutable:
        raise ImportModelError(
            f"operator {op.name!r}: this version of PyTorch has no pure operator {target!r}",
            "Import the model again with this version of PyTorch.",
        )
    return value


def _argument(value: Any, kind: str) -> Any:
    """A JSON value as the argument the operator's schema wants; where that has a number, ``"-inf"`` is one, and
    ``"torch.float32"`` is a dtype."""
    if isinstance(value, dict):
        if "tensor" in value:
            return _Operand(value["tensor"])
        if "complex" in value:
            return complex(*value["complex"])
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
        return operands[value.number]
    if isinstance(value, list):
        return [_bind(v, operands, device) for v in value]
    return device if isinstance(value, _Device) else value


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` of ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """``"float32"`` or ``"torch.float32"`` as a dtype. Raises ImportModelError."""
    value = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(value, torch.dtype):
        raise ImportModelError(f"{name!r} is no dtype of PyTorch")
    return value
