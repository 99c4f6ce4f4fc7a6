"""The same graph for another batch: what the access notation says about every tensor, with longer or shorter sample
axes."""

from __future__ import annotations

from fractions import Fraction
from math import prod

from flexsearch.errors import NotationError
from flexsearch.graph.model import Axis, Operator, OperatorGraph, Tensor
from flexsearch.graph.notation import Operand
from flexsearch.graph.ops import kind_of


def microbatch(graph: OperatorGraph, count: int) -> OperatorGraph:
    """One of ``count`` equal parts of a batch; as ``with_batch``. Raises NotationError if there is no such part."""
    return with_batch(graph, Fraction(1, count))


def with_batch(graph: OperatorGraph, factor: int | Fraction) -> OperatorGraph:
    """``graph`` with ``factor`` times as many samples: for costs and plans, not to be run (attributes, as target
    shapes or divisors of means, stay those of the given batch).

    Raises NotationError, naming the operator, where the batch is mixed with constants: where a sample axis stands in a
    window with an offset or stride, or two operators would give a tensor different shapes; or where a part of a batch
    would not be a whole number of samples.
    """
    operators = tuple(_longer(op, factor) for op in graph.operators)
    shapes: dict[str, tuple[int, ...]] = {}
    for old, op in zip(graph.operators, operators, strict=True):
        pairs = zip((*op.inputs, *op.outputs), (*op.access.inputs, *op.access.outputs), strict=True)
        for name, operand in pairs:
            shape = _shape(old, op, operand, graph.tensor[name])
            if shapes.setdefault(name, shape) != shape:
                raise NotationError(
                    f"operator {op.name!r} mixes the batch with constants: tensor {name!r} would have shape "
                    f"{shapes[name]} or {shape}"
                )
            if graph.tensor[name].kind in ("parameter", "buffer") and shape != graph.tensor[name].shape:
                raise NotationError(f"operator {op.name!r} indexes {name!r}, which is no part of a batch, by samples")
    tensors = tuple(
        Tensor(**{field: getattr(t, field) for field in Tensor.model_fields} | {"shape": shapes.get(t.name, t.shape)})
        for t in graph.tensors
    )
    try:
        return OperatorGraph(**{field: getattr(graph, field) for field in OperatorGraph.model_fields} | {
            "tensors": tensors, "operators": operators,
        })  # fmt: skip
    except ValueError as error:  # the graph's own check of patterns against shapes
        raise NotationError(f"the batch cannot be changed: {error}") from error


def _longer(op: Operator, factor: int | Fraction) -> Operator:
    samples = {axis for axis, role in op.roles.items() if role == "sample"}
    if kind_of(op).grouped:  # a larger batch makes the groups larger, not more
        samples = {_inside(op).get(axis, axis) for axis in samples}
    sizes = {axis.name: Fraction(axis.size) * (factor if axis.name in samples else 1) for axis in op.axes}
    for name, size in sizes.items():
        if size.denominator > 1:
            raise NotationError(
                f"operator {op.name!r} has {op.sizes[name]} samples (axis {name!r}), which cannot be divided by "
                f"{Fraction(factor).denominator}"
            )
    axes = tuple(Axis(name=a.name, size=int(sizes[a.name]), role=a.role) for a in op.axes)
    # Not model_copy, which would keep the sizes that have been asked for already.
    return Operator(**{field: getattr(op, field) for field in Operator.model_fields} | {"axes": axes})


def _inside(op: Operator) -> dict[str, str]:
    """Axis that counts groups of samples -> axis of the samples in a group: g -> n in ``(g n)``."""
    operands = (*op.access.inputs, *op.access.outputs)
    merged = (d.axes for operand in operands for d in operand.dimensions if d.merged)
    return {axes[0]: axes[-1] for axes in merged}


def _shape(old: Operator, op: Operator, operand: Operand, tensor: Tensor) -> tuple[int, ...]:
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
                f'operator {op.name!r} mixes the batch with constants: "{dimension}" in pattern "{op.pattern}"'
            )
    return tuple(shape)
