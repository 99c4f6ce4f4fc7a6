"""Whether the pattern in a graph file is one that importing writes for the operator's shapes and attributes."""

from __future__ import annotations

from collections.abc import Sequence

from flexsearch.errors import NotationError
from flexsearch.graph.model import Operator
from flexsearch.graph.notation import Operand, instantiate, is_whole, parse


def check_form(op: Operator, template: str, shapes: Sequence[Sequence[int]]) -> str:
    """What is wrong if the pattern of ``op`` is not ``template``; ``shapes``: of its inputs and then its outputs.

    The axes may have other names, and may be whole where the template's are not.
    """
    wrong = f'pattern "{op.pattern}" is not that of {op.kind}, "{template}"'
    count = len(op.inputs)
    try:
        text, _ = instantiate(template, shapes[:count], shapes[count:])
    except NotationError as error:
        return f"{op.kind} of shapes {[list(shape) for shape in shapes]} is none: {error}"
    access, names = parse(text), dict[str, str]()
    operands, expected = (*op.access.inputs, *op.access.outputs), (*access.inputs, *access.outputs)
    if len(operands) != len(expected) or not all(map(_same, operands, expected)):
        return wrong
    for operand, other in zip(operands, expected, strict=True):
        for dimension, own in zip(operand.dimensions, other.dimensions, strict=True):
            for axis, name in zip(dimension.axes, own.axes, strict=True):
                if names.setdefault(name, axis) != axis or (is_whole(name) and not is_whole(axis)):
                    return wrong
    return "" if len(set(names.values())) == len(names) else wrong


def _same(operand: Operand, other: Operand) -> bool:
    """Whether two operands differ in nothing but the names of axes."""
    forms = [
        [(len(d.axes), d.coefficients, d.offset, d.merged, d.plain) for d in x.dimensions] for x in (operand, other)
    ]
    return forms[0] == forms[1] and operand.once == other.once
