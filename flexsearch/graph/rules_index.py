"""The rules of :mod:`flexsearch.graph.rules` for operators that look elements up, take windows or draw numbers."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, Final

from flexsearch.graph.model import Operator

Shapes = tuple[tuple[int, ...], ...]


def _index(op: Operator, attributes: Any, shapes: Shapes) -> str:
    """Each dimension of the first operand is kept, looked up by an operand, or is a dimension of the indices."""
    entries, rank, first = attributes.indices, attributes.rank, attributes.first
    table, result = shapes[0], shapes[-1]
    kept = [dim for dim, entry in enumerate(entries) if entry is None]
    looked_up = [dim for dim, entry in enumerate(entries) if entry is not None]
    operands = sorted(entry.operand for entry in entries if entry is not None and entry.operand is not None)
    if len(entries) != len(table) or not looked_up or operands != list(range(len(shapes) - 2)):
        return f"attributes.indices do not fit {len(shapes) - 2} indices of a tensor of shape {list(table)}"
    # torch puts the dimensions of the indices in front if they are not next to each other
    adjacent = looked_up[-1] - looked_up[0] == len(looked_up) - 1
    if len(result) != len(kept) + rank or first != (looked_up[0] if adjacent else 0):
        return f"attributes.first and rank do not make a result of shape {list(result)}"
    places = result[first : first + rank]
    expected = (*(table[d] for d in kept[:first]), *places, *(table[d] for d in kept[first:]))
    if result != expected:
        return f"looking up in shape {list(table)} does not give {list(result)}"
    for shape in shapes[1:-1]:
        lead = rank - len(shape)
        if lead < 0 or any(size not in (1, place) for size, place in zip(shape, places[lead:], strict=True)):
            return f"an index of shape {list(shape)} does not fit places of shape {list(places)}"
    return _index_pattern(op, entries, rank, first, table, places)


def _index_pattern(
    op: Operator, entries: Any, rank: int, first: int, table: tuple[int, ...], places: tuple[int, ...]
) -> str:
    """What is looked up is whole; a range runs along a dimension of the result."""
    read, written = op.access.inputs[0].dimensions, op.access.outputs[0].dimensions
    for dim, entry in enumerate(entries):
        if entry is None:
            continue
        if entry.operand is not None:
            fits = read[dim].plain and not set(read[dim].axes) & op.access.outputs[0].names()
        elif entry.axis is None:
            fits = table[dim] == 1
        else:
            fits = entry.axis < rank and table[dim] == places[entry.axis]
            fits = fits and read[dim].axes == written[first + entry.axis].axes
        if not fits:
            return f'dimension {dim} of pattern "{op.pattern}" is not what attributes.indices say'
    return ""


def _gather(op: Operator, attributes: Any, shapes: Shapes) -> str:
    table, index, result = shapes
    rank = len(table)
    if not -rank <= attributes.dim < rank or len(index) != rank:
        return f"attributes.dim: {attributes.dim} is no dimension of shapes {list(table)} and {list(index)}"
    dim = attributes.dim % rank
    same = all(a == b for d, (a, b) in enumerate(zip(table, index, strict=True)) if d != dim)
    if index != result or not same:
        return f"gathering from shape {list(table)} by {list(index)} does not give {list(result)}"
    whole = set(op.access.inputs[0].dimensions[dim].axes) & op.access.outputs[0].names()
    return f'pattern "{op.pattern}" does not keep dimension {dim} whole' if whole else ""


def _unfold(op: Operator, attributes: Any, shapes: Shapes) -> str:
    source, result = shapes
    rank, step = len(source), attributes.step
    if not -rank <= attributes.dim < rank or len(result) != rank + 1:
        return f"attributes.dim: {attributes.dim} is no dimension of shape {list(source)}"
    dim, size = attributes.dim % rank, result[-1]
    expected = (*source[:dim], (source[dim] - size) // step + 1, *source[dim + 1 :], size)
    reads = op.access.inputs[0].dimensions[dim]
    if result != expected or reads.coefficients != (step, 1) or reads.offset:
        return f"windows of shape {list(source)} with step {step} do not give {list(result)}"
    return ""


def _im2col(op: Operator, attributes: Any, shapes: Shapes) -> str:
    numbers = {
        name: values if isinstance(values, list) else [values, values]
        for name in ("kernel_size", "dilation", "padding", "stride")
        if (values := getattr(attributes, name)) is not None
    }
    if len(numbers) != 4 or any(len(values) != 2 for values in numbers.values()) or len(shapes[0]) not in (3, 4):
        return "im2col needs an image, and two numbers each for kernel_size, dilation, padding and stride"
    counts = []
    for i, size in enumerate(shapes[0][-2:]):
        kernel, dilation, padding, stride = (values[i] for values in numbers.values())
        counts.append((size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1)
        reads = op.access.inputs[0].dimensions[len(shapes[0]) - 2 + i]
        sizes = [op.sizes[axis] for axis in reads.axes]
        if reads.coefficients != (stride, dilation) or reads.offset != -padding or sizes != [counts[i], kernel]:
            return f'pattern "{op.pattern}" does not have the windows that the attributes say'
    expected = (*shapes[0][:-3], shapes[0][-3] * prod(numbers["kernel_size"]), prod(counts))
    return "" if shapes[1] == expected else f"columns of shape {list(shapes[0])} have shape {list(expected)}"


def _uniform(op: Operator, attributes: Any, shapes: Shapes) -> str:
    plain = all(dimension.plain for dimension in op.access.outputs[0].dimensions)
    return "" if not shapes[0] and plain else "random numbers need a scalar operand and an axis for each dimension"


INDEX_RULES: Final[Mapping[str, Any]] = {
    "index": _index, "gather": _gather, "unfold": _unfold, "im2col": _im2col, "uniform": _uniform,
}  # fmt: skip
