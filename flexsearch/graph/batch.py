"""The same graph for another batch: what the access notation says about every tensor, with longer or shorter sample
axes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from fractions import Fraction
from math import prod
from typing import Any, TypeVar

from pydantic import ValidationError

from flexsearch.errors import NotationError
from flexsearch.files import describe
from flexsearch.graph.model import Axis, Operator, OperatorGraph, Tensor
from flexsearch.graph.notation import Operand
from flexsearch.graph.ops import kind_of
from flexsearch.quantities import MAX_SIZE


def microbatch(graph: OperatorGraph, count: int) -> OperatorGraph:
    """One of ``count`` equal parts of a batch; as ``with_batch``. Raises NotationError if there is no such part."""
    return with_batch(graph, Fraction(1, count))


Part = Callable[[OperatorGraph, int], OperatorGraph]
"""``microbatch``, or the like of it that keeps what it has made."""


def with_batch(graph: OperatorGraph, factor: int | Fraction) -> OperatorGraph:
    """``graph`` with ``factor`` times as many samples: for costs and plans. It is the graph of the model at that batch,
    and can be run, unless attributes of a kind tell sizes in a way of their own (divisors of means), which stay.

    Raises NotationError, naming the operator, where the batch is mixed with constants: where a sample axis stands in a
    window with an offset or stride, or two operators would give a tensor different shapes; or where a part of a batch
    would not be a whole number of samples.
    """
    constants = {tensor.name for tensor in graph.of_kind("constant")}
    return rebuilt(graph, [_longer(op, factor) for op in graph.operators], "batch", constants)


def rebuilt(graph: OperatorGraph, operators: Sequence[Operator], what: str, free: Collection[str]) -> OperatorGraph:
    """``graph`` with operators of the same patterns, whose axes have other sizes. ``what``: that changes, for errors;
    ``free``: constants that may change with it, which parameters, buffers and other constants may not.

    Raises NotationError where two operators give a tensor different shapes, or something becomes too large.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for old, op in zip(graph.operators, operators, strict=True):
        pairs = zip((*op.inputs, *op.outputs), (*op.access.inputs, *op.access.outputs), strict=True)
        for name, operand in pairs:
            shape = _shape(old, op, operand, graph.tensor[name], what)
            if shapes.setdefault(name, shape) != shape:
                raise NotationError(
                    f"operator {op.name!r} mixes the {what} with constants: tensor {name!r} would have shape "
                    f"{shapes[name]} or {shape}",
                    f"Import the model again with that {what}.",
                )
            fixed = graph.tensor[name].kind in ("parameter", "buffer", "constant") and name not in free
            if fixed and shape != graph.tensor[name].shape:
                raise NotationError(
                    f"operator {op.name!r} indexes {name!r}, which is no part of it, by the {what}",
                    f"Import the model again with that {what}.",
                )
    try:
        tensors = tuple(_copied(t, {"shape": shapes.get(t.name, t.shape)}) for t in graph.tensors)
        return _copied(graph, {"tensors": tensors, "operators": tuple(operators)})
    except ValidationError as error:  # the graph's own check of patterns against shapes, and of sizes
        problem = describe(error.errors(include_url=False)[0])
        raise NotationError(f"the {what} cannot be changed so: {problem}", "Give a smaller one.") from error


M = TypeVar("M", Operator, OperatorGraph, Tensor)


def _copied(model: M, changes: dict[str, Any]) -> M:
    """A checked copy. Not model_copy, which would keep the properties that have been asked for already."""
    fields: dict[str, Any] = {field: getattr(model, field) for field in type(model).model_fields}
    return type(model)(**fields | changes)


def rows_per_sample(graph: OperatorGraph) -> dict[str, int]:
    """Rows of each input that one sample has: 1, or more of what comes flattened (targets of batch * sequence). Inputs
    that do not run over the batch (masks, tables) are missing. One that nobody reads does if it is as long."""
    rows = {}
    for tensor in graph.of_kind("input"):
        if tensor.shape and tensor.shape[0] == graph.batch and not graph.consumers[tensor.name]:
            rows[tensor.name] = 1
        for consumer, position in graph.consumers[tensor.name] if tensor.shape else ():
            op = graph.operators[consumer]
            axes = op.access.inputs[position].dimensions[0].axes
            if axes and op.roles[axes[0]] == "sample" and tensor.shape[0] % graph.batch == 0:
                rows[tensor.name] = tensor.shape[0] // graph.batch
    return rows


def with_sizes(op: Operator, sizes: Mapping[str, int]) -> Operator:
    """``op`` with axes of other sizes, and the attributes that tell them. Raises NotationError beyond 2^48."""
    if all(sizes[axis.name] == axis.size for axis in op.axes):
        return op
    if (largest := max(sizes.values())) >= MAX_SIZE:
        raise NotationError(f"operator {op.name!r} would have an axis of {largest:.3g} indices", "Give a smaller size.")
    axes = tuple(Axis(name=a.name, size=sizes[a.name], role=a.role) for a in op.axes)
    return _copied(op, {"axes": axes, "attributes": kind_of(op).resized(op, sizes)})


def _longer(op: Operator, factor: int | Fraction) -> Operator:
    samples = {axis for axis, role in op.roles.items() if role == "sample"}
    if kind_of(op).grouped:  # a larger batch makes the groups larger, not more
        samples = {_inside(op).get(axis, axis) for axis in samples}
    samples |= {axis for axis, leader in kind_of(op).follows.items() if leader in samples}
    times, parts = factor.as_integer_ratio()
    sizes = dict(op.sizes)
    for name in filter(samples.__contains__, op.sizes):
        sizes[name], rest = divmod(op.sizes[name] * times, parts)
        if rest:
            raise NotationError(
                f"operator {op.name!r} has {op.sizes[name]} samples (axis {name!r}), which cannot be divided by {parts}"
            )
    return with_sizes(op, sizes)


def _inside(op: Operator) -> dict[str, str]:
    """Axis that counts groups of samples -> axis of the samples in a group: g -> n in ``(g n)``."""
    operands = (*op.access.inputs, *op.access.outputs)
    merged = (d.axes for operand in operands for d in operand.dimensions if d.merged)
    return {axes[0]: axes[-1] for axes in merged}


def _shape(old: Operator, op: Operator, operand: Operand, tensor: Tensor, what: str) -> tuple[int, ...]:
    """Shape of ``tensor`` as ``operand`` of the changed operator reads or writes it."""
    shape = []
    for dimension, size in zip(operand.dimensions, tensor.shape, strict=True):
        longer = [axis for axis in dimension.axes if op.sizes[axis] != old.sizes[axis]]
        if not longer:
            shape.append(size)
        elif dimension.merged or dimension.plain:
            shape.append(prod(op.sizes[axis] for axis in dimension.axes))
        else:
            raise NotationError(
                f'operator {op.name!r} mixes the {what} with constants: "{dimension}" in pattern "{op.pattern}"',
                f"Import the model again with that {what}.",
            )
    return tuple(shape)
