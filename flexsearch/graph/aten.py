"""From torch operators to operators of the graph: the builder that handlers write to, and their registry.

A handler is a function of a :class:`Builder` and the operator's arguments, named as in its schema; it emits operators
and returns their output. ``aten_math``, ``aten_shape`` and ``aten_nn`` hold them, by family.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import Any, Literal, TypeVar

import torch
from pydantic import JsonValue
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from flexsearch.errors import ImportModelError, NotationError
from flexsearch.graph.model import DTYPE_BYTES, Role
from flexsearch.graph.notation import Access, infer_sizes, instantiate, parse
from flexsearch.graph.operators import OPERATORS, axis_roles
from flexsearch.graph.targets import check_target, trust

Kind = Literal["input", "parameter", "buffer", "constant", "activation"]
Shape = tuple[int, ...]


@dataclass(eq=False, slots=True)
class Value:
    """A tensor of the graph in the making.

    ``sample``: which dimensions run over the batch (first). ``weight``: made of parameters and constants alone.
    ``grad``: depends on a trained parameter. ``data``: of a constant. ``name``: of an activation given at the end.
    """

    shape: Shape
    dtype: str
    kind: Kind = "activation"
    name: str = ""
    sample: tuple[bool, ...] = ()
    weight: bool = False
    grad: bool = False
    requires_grad: bool = False
    data: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if not self.sample:
            self.sample = (False,) * len(self.shape)

    @property
    def rank(self) -> int:
        return len(self.shape)


@dataclass(eq=False, slots=True)
class Draft:
    """An operator in the making. ``short``: its name within its module; ``auxiliary``: not what its module is for."""

    kind: str
    access: Access
    sizes: dict[str, int]
    roles: dict[str, Role]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    attributes: dict[str, JsonValue]
    short: str
    auxiliary: bool
    module: str
    source: str


@dataclass(eq=False)
class Builder:
    """Collects drafts; ``module``, ``source`` and ``target`` say where the torch operator at hand comes from."""

    drafts: list[Draft] = field(default_factory=list)
    module: str = ""
    source: str = ""
    library: str = ""
    """The installed package that ``source`` is a line of; empty for the user's own code."""
    target: str = ""
    results: tuple[tuple[Shape, str], ...] = ()
    """Shape and dtype of what the torch operator at hand returns."""
    batch: int | None = None
    """Samples of the global batch."""
    batch_norm_groups: int = 1
    """Equal parts of the batch with batch-norm statistics of their own."""

    def emit(
        self,
        kind: str,
        inputs: Sequence[Value],
        shape: Shape,
        pattern: str | None = None,
        attributes: Mapping[str, Any] | None = None,
        *,
        dtype: str | None = None,
        **more: Any,
    ) -> Value:
        """As :meth:`emit_all`, of one output; ``dtype`` defaults to that of the first operand."""
        return self.emit_all(kind, inputs, [(shape, dtype or inputs[0].dtype)], pattern, attributes, **more)[0]

    def emit_all(
        self,
        kind: str,
        inputs: Sequence[Value],
        results: Sequence[tuple[Shape, str]],
        pattern: str | None = None,
        attributes: Mapping[str, Any] | None = None,
        *,
        parameters: Mapping[str, int] | None = None,
        sizes: Mapping[str, int] | None = None,
        short: str | None = None,
        auxiliary: bool = False,
    ) -> tuple[Value, ...]:
        """Append an operator that returns ``results`` (shape, dtype); ``pattern`` is a template, or the table's.

        ``parameters``, ``sizes``: as :func:`flexsearch.graph.notation.instantiate` takes them. ``short``: the name
        within the layer (default: the torch operator's).
        """
        template = pattern if pattern is not None else OPERATORS[kind].pattern
        assert template is not None, f"kind {kind} has no pattern in the table"
        for shape, name in results:
            if name not in DTYPE_BYTES or any(s < 1 for s in shape):
                raise self.error(f"makes a tensor of shape {shape} and dtype {name}, which a graph cannot hold")
        shapes, made = [v.shape for v in inputs], [shape for shape, _ in results]
        text, known = instantiate(template, shapes, made, parameters, sizes)
        access = parse(text)
        axis_sizes = infer_sizes(access, shapes, made, known)
        sample = _sample_axes(access, inputs)
        weight, grad = all(v.weight for v in inputs), kind != "detach" and any(v.grad for v in inputs)
        outputs = tuple(
            Value(
                shape,
                name,
                sample=tuple(bool(d.axes) and d.axes[0] in sample for d in operand.dimensions),
                weight=weight,
                grad=grad and name.startswith(("float", "bfloat", "complex")),
            )
            for (shape, name), operand in zip(results, access.outputs, strict=True)
        )
        self.drafts.append(
            Draft(
                kind=kind,
                access=access,
                sizes=axis_sizes,
                roles=axis_roles(kind, access, sample, [v.weight for v in inputs]),
                inputs=tuple(inputs),
                outputs=outputs,
                attributes=dict(attributes or {}),
                short=short or self.target.split(".")[1].strip("_"),
                auxiliary=auxiliary,
                module=self.module,
                source=self.source,
            )
        )
        return outputs

    @property
    def shape(self) -> Shape:
        """Shape of what the torch operator at hand returns (its first output)."""
        return self.results[0][0]

    @property
    def dtype(self) -> str:
        """Dtype of what the torch operator at hand returns (its first output)."""
        return self.results[0][1]

    def error(self, problem: str, remedy: str = "", outside: str = "") -> ImportModelError:
        """An error about the torch operator at hand; ``problem`` continues the sentence that begins with its name.

        ``remedy`` is for who wrote the layer. Where a library did, its user gets ``outside``, or is told of --opaque.
        """
        layer = f"in layer {self.module!r}" if self.module else "outside any layer"
        message = f"{self.target} {layer}{f' ({self.source})' if self.source else ''} {problem}"
        if self.library:
            remedy = (
                f"The layer is {self.library}'s: {outside or 'import it unsplittable with opaque=True (--opaque).'}"
            )
        return ImportModelError(message, remedy)


def _sample_axes(access: Access, inputs: Sequence[Value]) -> set[str]:
    """Axes that index a dimension of the batch: of a merged dimension the first, of a window all."""
    found: set[str] = set()
    for operand, value in zip(access.inputs, inputs, strict=True):
        for dimension, sample in zip(operand.dimensions, value.sample, strict=True):
            if sample and dimension.axes:
                found.update(dimension.axes[:1] if dimension.merged else dimension.axes)
    return found


Handler = Callable[..., Any]
H = TypeVar("H", bound=Handler)
HANDLERS: dict[str, Handler] = {}
"""Torch operator, without or (first choice) with its overload, to its handler."""


def aten(*names: str) -> Callable[[H], H]:
    """Register a handler for operators of the ``aten`` namespace: "linear" for all overloads, or "max.dim"."""

    def decorate(handler: H) -> H:
        HANDLERS.update({f"aten.{name}": handler for name in names})
        return handler

    return decorate


def find_handler(target: str) -> Handler | None:
    """Handler of a torch operator given as "aten.linear.default"."""
    return HANDLERS.get(target) or HANDLERS.get(target.rsplit(".", 1)[0])


def bind(target: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by their names in the operator's schema, defaults filled in."""
    schema = target._schema.arguments
    bound = {a.name: a.default_value for a in schema if a.has_default_value()}
    bound.update({a.name: value for a, value in zip(schema, args, strict=False)})
    bound.update(kwargs)
    return bound


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` of ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def letters(count: int, start: str = "a") -> list[str]:
    """``count`` axis names: a, b, c, ... then a1, b1, ..."""
    alphabet = "abcdefghijklmnopqrstuvwxyz"
    shift = alphabet.index(start)
    return [alphabet[(shift + i) % 26] + (str(i // 26) if i >= 26 else "") for i in range(count)]


_PLACEMENT = ("device", "layout", "memory_format", "pin_memory", "non_blocking")


def encode_call(
    target: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
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
        if value is None or isinstance(value, bool | int | float | str):
            return value
        raise ImportModelError(f"argument {value!r} of {target} cannot be written to a graph file")

    def placement(value: Any) -> bool:
        return isinstance(value, torch.device | torch.layout | torch.memory_format)

    encoded: list[JsonValue] = [encode(a) for a in args if not placement(a)]
    named: dict[str, JsonValue] = {k: encode(v) for k, v in kwargs.items() if k not in _PLACEMENT}
    return {"target": str(target), "args": encoded, "kwargs": named}, tensors


def opaque(
    b: Builder,
    target: torch._ops.OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    whole: Callable[[list[Value]], str] | None = None,
) -> tuple[Value, ...]:
    """An operator that flexsearch does not look into: all dimensions whole, or the pattern that ``whole`` gives."""
    try:
        check_target(str(target))
    except ValueError as error:
        raise b.error(f"{error}; write it with others, or register it (flexsearch.graph.operators.register)") from error
    trust(str(target))  # the user's model has just called it
    attributes, tensors = encode_call(target, args, kwargs)
    if flops := _matrix_flops(target, args, kwargs):
        attributes["matrix_flops"] = flops
    return b.emit_all("opaque", tensors, b.results, (whole or _all_whole(b))(tensors), attributes)


def _matrix_flops(target: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """FLOPs of the matrix products and convolutions that a call comes down to, as torch counts them; 0 if it cannot
    tell (an operator without an implementation for the meta device)."""
    real_args, real_kwargs = pytree.tree_map_only(Value, _on_meta, (list(args), dict(kwargs)))
    if "device" in real_kwargs:
        real_kwargs["device"] = torch.device("meta")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        try:
            target(*real_args, **real_kwargs)
        except (RuntimeError, NotImplementedError):
            return 0
    return int(counter.get_total_flops())


def _on_meta(x: Value) -> torch.Tensor:
    return torch.empty(x.shape, dtype=getattr(torch, x.dtype), device="meta")


def _all_whole(b: Builder) -> Callable[[list[Value]], str]:
    def pattern(tensors: list[Value]) -> str:
        ranks = [len(v.shape) for v in tensors] + [len(shape) for shape, _ in b.results]
        names = iter(letters(sum(ranks)))
        operands = [" ".join(next(names).upper() for _ in range(rank)) for rank in ranks]
        return f"{', '.join(operands[: len(tensors)])} -> {', '.join(operands[len(tensors) :])}"

    return pattern


def registered(
    b: Builder, kind: str, target: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Value, ...]:
    """An operator of a kind that the user registered: its tensor arguments are the operands, in order."""
    attributes, tensors = encode_call(target, args, kwargs)
    try:
        return b.emit_all(kind, tensors, b.results, attributes=attributes, short=kind)
    except NotationError as error:
        raise b.error(f"does not fit the pattern registered for {kind!r}: {error}") from error


def cast(b: Builder, x: Value, dtype: str) -> Value:
    """``x`` as ``dtype`` ("float32"); ``x`` itself if it is."""
    if dtype == x.dtype:
        return x
    attributes, _ = encode_call(torch.ops.aten._to_copy.default, (x,), {"dtype": getattr(torch, dtype)})
    names = " ".join(letters(x.rank))
    return b.emit("pointwise", [x], x.shape, f"{names} -> {names}", attributes, dtype=dtype, short="to_copy")


def empty(shape: Shape, dtype: str) -> Value:
    """A tensor without elements. Only concatenations read such a one, and leave it out: it is never in a graph."""
    return Value(
        shape, dtype, "constant", "constant", weight=True, data=torch.empty(shape, dtype=getattr(torch, dtype))
    )


def normal_dims(dims: int | Iterable[int] | None, rank: int) -> tuple[int, ...]:
    """Sorted non-negative dimensions; None or none at all means every one."""
    if dims is None:
        return tuple(range(rank))
    listed = [dims] if isinstance(dims, int) else list(dims)
    return tuple(sorted(d % rank for d in listed)) if listed and rank else tuple(range(rank))


def broadcast_shapes(*shapes: Sequence[int]) -> Shape:
    """Shape that the given ones broadcast to."""
    return tuple(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]
