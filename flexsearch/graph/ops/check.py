"""What an operator of each kind needs besides a pattern that fits: attributes of the right types, operands that agree.

Checked when a graph file is loaded: kernels and cost rules read attributes without asking again. Kinds that users
register have rules of their own, which a file cannot tell; it must then name the torch operator (``target``).
"""

from __future__ import annotations

from pydantic import ValidationError

from flexsearch.files import describe, dotted
from flexsearch.graph.consistency import place
from flexsearch.graph.model import Operator, OperatorGraph
from flexsearch.graph.ops.base import KINDS, MANY, shipped
from flexsearch.graph.targets import check_target


def check_kinds(graph: OperatorGraph) -> None:
    """Raise ValueError, naming the field, if an operator's kind is unknown or contradicts its other fields."""
    for k, op in enumerate(graph.operators):
        where = place(k, op)
        if shipped(op.kind):
            _check_operator(graph, op, where)
        elif op.kind not in KINDS and not _named_elsewhere(op):
            raise ValueError(
                f"{where}.kind: {op.kind!r} is no kind of operator; one that you registered names its torch operator "
                "in attributes.target"
            )


def _named_elsewhere(op: Operator) -> bool:
    """Whether an unknown kind is one that somebody registered for a torch operator."""
    try:
        check_target(str(op.attributes.get("target")))
    except ValueError:
        return False
    return True


def _check_operator(graph: OperatorGraph, op: Operator, where: str) -> None:
    kind = KINDS[op.kind]
    try:
        attributes = kind.attributes.model_validate(op.attributes)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        raise ValueError(f"{where}.attributes.{dotted(problem['loc'])}: {describe(problem)}") from error
    least, most = kind.inputs
    if not least <= len(op.inputs) <= most or (len(op.outputs) != kind.outputs and kind.outputs != MANY):
        raise ValueError(
            f"{where}: {op.kind} with {len(op.inputs)} inputs and {len(op.outputs)} outputs; it has {least} to {most} "
            f"inputs and {kind.outputs} outputs"
        )
    for axis, role in op.roles.items():
        if role not in ("sample", kind.roles.get(axis, role)):
            raise ValueError(f"{where}.axes: {axis!r} of {op.kind} is a {kind.roles[axis]} axis, not {role}")
    windows = any(not d.plain and not d.merged and d.axes for o in op.access.inputs for d in o.dimensions)
    if windows and not kind.windows:
        raise ValueError(f'{where}.pattern: {op.kind} reads no windows, as in "{op.pattern}"')
    shapes = tuple(graph.tensor[name].shape for name in (*op.inputs, *op.outputs))
    if contradiction := kind.check(op, attributes, shapes):
        raise ValueError(f"{where}: {contradiction}")
