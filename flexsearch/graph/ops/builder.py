"""From torch operators to operators of the graph: the builder that the traces of kinds write to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flexsearch.errors import ImportModelError, NotationError
from flexsearch.graph.model import DTYPE_BYTES
from flexsearch.graph.notation import Access, infer_sizes, instantiate, parse
from flexsearch.graph.ops.base import KINDS, axis_roles
from flexsearch.graph.ops.calls import encode_call
from flexsearch.graph.ops.lazy import torch
from flexsearch.graph.ops.value import Draft, Shape, Value
from flexsearch.graph.targets import check_target, trust

if TYPE_CHECKING:
    from torch._ops import OpOverload


@dataclass(eq=False)
class Builder:
    """Collects drafts; ``module``, ``source`` and ``target`` say where the torch operator at hand comes from."""

    drafts: list[Draft] = field(default_factory=list)
    module: str = ""
    source: str = ""
    library: str = ""
    """The installed package that ``source`` is a line of; empty for the user's own code."""
    target: str = ""
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Of the call at hand, with a :class:`Value` for each tensor."""
    results: tuple[tuple[Shape, str], ...] = ()
    """Shape and dtype of what the torch operator at hand returns."""
    updates: dict[Value, Value] = field(default_factory=dict)
    """New values of buffers that an operator writes although its schema does not say so."""
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
        """Append an operator that returns ``results`` (shape, dtype); ``pattern`` is a template, or the kind's own.

        ``parameters``, ``sizes``: as :func:`flexsearch.graph.notation.instantiate` takes them. ``short``: the name
        within the layer (default: the torch operator's).
        """
        template = pattern if pattern is not None else KINDS[kind].pattern
        assert template is not None, f"kind {kind} has no pattern of its own"
        for shape, name in results:
            if name not in DTYPE_BYTES or any(s < 1 for s in shape):
                remedy = "Give the model inputs of which no dimension is 0." if name in DTYPE_BYTES else ""
                raise self.error(f"makes a tensor of shape {shape} and dtype {name}, which a graph cannot hold", remedy)
        shapes, result_shapes = [v.shape for v in inputs], [shape for shape, _ in results]
        text, template_sizes = instantiate(template, shapes, result_shapes, parameters, sizes)
        access = parse(text)
        axis_sizes = infer_sizes(access, shapes, result_shapes, template_sizes)
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

    def emit_call(self, kind: str, pattern: str | None = None, **more: Any) -> Any:
        """Append the call at hand as one operator, whose operands are the call's tensors in their order and whose
        attributes are the call. Returns what the call does: a Value, or a tuple of them."""
        attributes, tensors = encode_call(self.overload, self.args, self.kwargs)
        try:
            results = self.emit_all(kind, tensors, self.results, pattern, attributes, **more)
        except NotationError as error:
            raise self.error(f"does not fit the pattern of {kind!r}: {error}") from error
        return results if len(results) > 1 else results[0]

    @property
    def overload(self) -> OpOverload:
        """The torch operator at hand."""
        value: Any = torch.ops
        for part in self.target.split("."):
            value = getattr(value, part)
        overload: OpOverload = value
        return overload

    @property
    def shape(self) -> Shape:
        """Shape of what the torch operator at hand returns (its first output)."""
        return self.results[0][0]

    @property
    def dtype(self) -> str:
        """Dtype of what the torch operator at hand returns (its first output)."""
        return self.results[0][1]

    @property
    def salt(self) -> int:
        """A number that no other operator of the graph has: how many there are already. Random draws begin with it."""
        return len(self.drafts)

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
    names: set[str] = set()
    for operand, value in zip(access.inputs, inputs, strict=True):
        for dimension, sample in zip(operand.dimensions, value.sample, strict=True):
            if sample and dimension.axes:
                names.update(dimension.axes[:1] if dimension.merged else dimension.axes)
    return names


def opaque(
    b: Builder,
    target: OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    whole: Callable[[list[Value]], str] | None = None,
) -> tuple[Value, ...]:
    """An operator that flexsearch does not look into: all dimensions whole, or the pattern that ``whole`` gives."""
    try:
        check_target(str(target))
    except ValueError as error:
        raise b.error(f"{error}; write it with others, or register it (flexsearch.register)") from error
    trust(str(target))  # the user's model has just called it
    attributes, tensors = encode_call(target, args, kwargs)
    if flops := _matrix_flops(target, args, kwargs):
        attributes["matrix_flops"] = flops
    return b.emit_all("opaque", tensors, b.results, (whole or _all_whole(b))(tensors), attributes)


def _matrix_flops(target: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """FLOPs of the matrix products and convolutions that a call comes down to, as torch counts them; 0 if it cannot
    tell (an operator without an implementation for the meta device)."""
    from torch.utils import _pytree as pytree
    from torch.utils.flop_counter import FlopCounterMode

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


def bind(target: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by their names in the operator's schema, defaults filled in; ``self`` of the schema is ``x``."""
    schema = target._schema.arguments
    bound = {a.name: a.default_value for a in schema if a.has_default_value()}
    bound.update({a.name: value for a, value in zip(schema, args, strict=False)})
    bound.update(kwargs)
    return {"x" if name == "self" else name: value for name, value in bound.items()}


def letters(count: int, start: str = "a") -> list[str]:
    """``count`` axis names: a, b, c, ... then a1, b1, ..."""
    alphabet = "abcdefghijklmnopqrstuvwxyz"
    shift = alphabet.index(start)
    return [alphabet[(shift + i) % 26] + (str(i // 26) if i >= 26 else "") for i in range(count)]


def fit(names: Sequence[str], shape: Shape, own: Shape) -> list[str]:
    """Axis names of an operand of shape ``own`` that broadcasts to ``shape``, of which the axes are ``names``."""
    lead = len(shape) - len(own)
    return [n if s == t else "1" for n, s, t in zip(names[lead:], own, shape[lead:], strict=True)]


def broadcast(tensors: Sequence[Value], shape: Shape) -> str:
    """Pattern of operands that broadcast to ``shape``."""
    names = letters(len(shape))
    operands = [" ".join(fit(names, shape, x.shape)) for x in tensors]
    return f"{', '.join(operands)} -> {' '.join(names)}"


def broadcast_shapes(*shapes: Sequence[int]) -> Shape:
    """Shape that the given ones broadcast to."""
    return tuple(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]


def normal_dims(dims: int | Iterable[int] | None, rank: int) -> tuple[int, ...]:
    """Sorted non-negative dimensions; None or none at all means every one."""
    if dims is None:
        return tuple(range(rank))
    listed = [dims] if isinstance(dims, int) else list(dims)
    return tuple(sorted(d % rank for d in listed)) if listed and rank else tuple(range(rank))


def empty(shape: Shape, dtype: str) -> Value:
    """A tensor without elements. Only concatenations read such a one, and leave it out: it is never in a graph."""
    return Value(
        shape, dtype, "constant", "constant", weight=True, data=torch.empty(shape, dtype=getattr(torch, dtype))
    )
