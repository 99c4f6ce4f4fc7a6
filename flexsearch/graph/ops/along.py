"""What operators share that mix the elements along some dimensions of their first operand, and no others: these are
whole, everything else can be split, and a piece is computed by the same call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from flexsearch.graph.model import Operator
from flexsearch.graph.notation import Dimension
from flexsearch.graph.ops.base import (
    BOTH,
    MANY,
    Extents,
    OperatorKind,
    Saved,
    input_elements,
    output_elements,
)
from flexsearch.graph.ops.builder import Builder, letters, normal_dims
from flexsearch.graph.ops.calls import CallAttributes, check_call, encode_call
from flexsearch.graph.ops.value import Shape, Value

if TYPE_CHECKING:
    from torch._ops import OpOverload


class Form(NamedTuple):
    """Of a torch operator: position of the argument that names the dimensions, or its name where it goes by that
    (None: all are mixed), number of results, and what is saved for the backward."""

    place: int | str | None = 1
    results: int = 1
    saved: Saved = BOTH


class AlongCall(OperatorKind):
    """A call of one of the operators in ``forms``."""

    attributes = CallAttributes
    outputs = MANY
    forms: Mapping[str, Form] = {}
    """By the torch operator, without its overload where all overloads are alike."""

    def form(self, target: str) -> Form | None:
        """What is said of "aten.sort.stable"; None if nothing is."""
        return self.forms.get(target) or self.forms.get(target.rsplit(".", 1)[0])

    def trace(self, b: Builder, *args: Any, **call: Any) -> Any:
        return self.append(b, b.overload, call, b.results)

    def append(
        self, b: Builder, target: OpOverload, call: Mapping[str, Any], results: Sequence[tuple[Shape, str]]
    ) -> Any:
        """Append a call of ``target`` (arguments by name; those missing have their defaults) with such results."""
        form, schema = self.form(str(target)), target._schema.arguments
        assert form is not None
        names = ["x" if a.name == "self" else a.name for a in schema]
        full: dict[str, Any] = {
            n: a.default_value for n, a in zip(names, schema, strict=True) if a.has_default_value()
        } | dict(call)
        place = names[form.place] if isinstance(form.place, int) else form.place
        rank = full[names[0]].rank
        dims = normal_dims(None if place is None else full[place], rank)
        if place is not None and "List" in str(schema[names.index(place)].type):
            full[place] = [d % max(rank, 1) for d in full[place] or dims]  # in their order, which some transforms mean
        elif place is not None and full[place] is not None:
            full[place] = dims[0] if dims else 0
        positional = [full[n] for n, a in zip(names, schema, strict=True) if not a.kwarg_only]
        named = {n: full[n] for n, a in zip(names, schema, strict=True) if a.kwarg_only and full[n] is not None}
        attributes, tensors = encode_call(target, positional, named)
        values = b.emit_all(self.name, tensors, results, along_pattern(tensors, dims, results), attributes)
        return values if len(values) > 1 else values[0]

    def check(self, op: Operator, attributes: Any, shapes: tuple[tuple[int, ...], ...]) -> str:
        """The call is one of the kind's, and the dimensions that it mixes are whole."""
        if problem := check_call(op, attributes):
            return problem
        form = self.form(attributes.target)
        if form is None:
            return f"attributes.target: {attributes.target!r} is none of {', '.join(self.forms)}"
        if len(op.outputs) != form.results:
            return f"{attributes.target} has {form.results} results, not {len(op.outputs)}"
        if not attributes.args or attributes.args[0] != {"tensor": 0}:
            return 'attributes.args: the first must be {"tensor": 0}'
        value: Any = None
        if isinstance(form.place, str):
            value = attributes.kwargs.get(form.place, "nothing")
        elif form.place is not None:
            value = attributes.args[form.place] if form.place < len(attributes.args) else "nothing"
        listed = value if isinstance(value, list) else [] if value is None else [value]
        rank = len(shapes[0])
        if any(type(d) is not int or not -max(rank, 1) <= d < max(rank, 1) for d in listed):
            return f"attributes.args: {value} is no dimension of shape {list(shapes[0])}"
        for d in normal_dims(listed or None, rank):
            if not is_whole(op.access.inputs[0].dimensions[d]):
                return f'pattern "{op.pattern}" does not keep dimension {d} whole'
        return ""

    def flops(self, op: Operator, extents: Extents) -> Any:
        return input_elements(op, extents) + output_elements(op, extents)

    def saves(self, op: Operator, *before: Operator) -> Saved:
        form = self.form(str(op.attributes.get("target")))
        return self.saved if form is None else form.saved


def is_whole(dimension: Dimension) -> bool:
    """Whether no piece has a part of the dimension only."""
    return all(axis[0].isupper() for axis in dimension.axes)


def along_pattern(tensors: Sequence[Value], dims: Sequence[int], results: Sequence[tuple[Shape, str]]) -> str:
    """Pattern of an operator that mixes ``dims`` of its first operand; those of the others are whole.

    In the results these dimensions are missing, 1, as long as they were, or of another size.
    """
    x = tensors[0]
    names = [n.upper() if i in dims else n for i, n in enumerate(letters(x.rank))]
    others = [" ".join(f"O{k}_{i}" for i in range(v.rank)) for k, v in enumerate(tensors[1:])]
    written = []
    for number, (shape, _) in enumerate(results):
        kept = [i for i in range(x.rank) if len(shape) == x.rank or i not in dims]
        written.append(" ".join(_written(x, i, s, i in dims, number) for i, s in zip(kept, shape, strict=True)))
    return f"{', '.join([' '.join(names), *others])} -> {', '.join(written)}"


def _written(x: Value, dim: int, size: int, mixed: bool, number: int) -> str:
    name = letters(x.rank)[dim]
    if not mixed:
        return name
    return name.upper() if size == x.shape[dim] else "1" if size == 1 else f"{name.upper()}_{number}"
