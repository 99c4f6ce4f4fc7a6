"""How operands, pattern and attributes of an operator of each kind must agree: what ``kinds`` checks last.

A rule takes the operator, its attributes as :mod:`flexsearch.graph.kinds` has read them, and the shapes of inputs and
then outputs. It says what is wrong, in words that follow the operator's place, or gives an empty text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any, Final

from flexsearch.files import printable
from flexsearch.graph.model import DTYPE_BYTES, Operator
from flexsearch.graph.notation import Dimension
from flexsearch.graph.rules_index import INDEX_RULES
from flexsearch.graph.targets import check_target

Shapes = tuple[tuple[int, ...], ...]
Rule = Callable[[Operator, Any, Shapes], str]


def _each(value: Any, count: int, default: int) -> list[int]:
    """As the kernels read it: one number for all dimensions, a list of one or of ``count``, or nothing."""
    listed = [] if value is None else [value] if isinstance(value, int) else list(value)
    return listed * count if len(listed) == 1 else listed or [default] * count


def _window(op: Operator, attributes: Any, shapes: Shapes) -> str:
    """Windows of a convolution or pool are those that stride, padding, dilation and kernel say."""
    spatial, pool = int(op.kind[-2]), "pool" in op.kind
    image, result = op.access.inputs[0].dimensions[-spatial:], op.access.outputs[0].dimensions[-spatial:]
    if not spatial < len(shapes[0]) == len(shapes[-1]) <= spatial + 2 or (not pool and len(shapes[1]) != spatial + 2):
        return f"{op.kind} with operands of shapes {list(shapes)}"
    sizes = _each(attributes.kernel_size, spatial, 1) if pool else list(shapes[1][2:])
    stride = _each(attributes.stride, spatial, 0 if pool else 1)
    stride = sizes if pool and not any(stride) else stride
    padding, dilation = _each(attributes.padding, spatial, 0), _each(attributes.dilation, spatial, 1)
    if len({len(x) for x in (sizes, stride, padding, dilation)}) != 1:
        return f"attributes of {op.kind} must have {spatial} numbers, or one"
    for i, (reads, makes) in enumerate(zip(image, result, strict=True)):
        (axis, *_), kernel = makes.axes or ("",), [a for a in reads.axes if a not in makes.axes]
        steps = dict(zip(reads.axes, reads.coefficients, strict=True))
        expected = {axis: stride[i], **dict.fromkeys(kernel, dilation[i])}
        if not makes.plain or len(kernel) != 1 or steps != expected or reads.offset != -padding[i]:
            return f'pattern "{op.pattern}" does not have the windows of stride {stride}, padding {padding}, ' + (
                f"dilation {dilation}"
            )
        if op.sizes[kernel[0]] != sizes[i]:
            return f"axis {kernel[0]!r} has size {op.sizes[kernel[0]]}, the kernel has {sizes[i]}"
        last = stride[i] * (op.sizes[axis] - 1) - padding[i]
        if pool and (2 * padding[i] > sizes[i] or last >= shapes[0][len(shapes[0]) - spatial + i]):
            return "a window of the pool lies wholly in the padding"
    return "" if pool else _channels(op, attributes, shapes)


def _channels(op: Operator, attributes: Any, shapes: Shapes) -> str:
    """Channels of a convolution come in equal groups."""
    weight, groups, position = shapes[1], attributes.groups, len(shapes[0]) - len(shapes[1]) + 1
    inside, outside = shapes[0][position], shapes[-1][position]
    if weight[0] != outside or weight[0] % groups or weight[1] * groups != inside:
        return f"{inside} channels into {outside} in {groups} groups do not fit weights of shape {list(weight)}"
    return ""


def _contraction(op: Operator, attributes: Any, shapes: Shapes) -> str:
    x, weight, y = shapes[0], shapes[1], shapes[-1]
    if len(weight) != 2 or not x or (x[:-1], x[-1], y[-1:]) != (y[:-1], weight[1], weight[:1]):
        return f"linear of shapes {list(shapes)} is no product"
    operands = [[d.axes for d in o.dimensions] for o in (*op.access.inputs[:2], *op.access.outputs)]
    if operands[0][-1] != operands[1][1] or operands[1][0] != operands[2][-1] or operands[0][:-1] != operands[2][:-1]:
        return f'pattern "{op.pattern}" is not that of linear'
    return ""


def _same_shape(op: Operator, attributes: Any, shapes: Shapes) -> str:
    return "" if shapes[0] == shapes[-1] else f"{op.kind} of a tensor of shape {list(shapes[0])} has another shape"


def _along(op: Operator, attributes: Any, shapes: Shapes) -> str:
    rank = len(shapes[0])
    if not -rank <= attributes.dim < max(rank, 1):
        return f"attributes.dim: {attributes.dim} is no dimension of shape {list(shapes[0])}"
    if rank and not _whole(op.access.inputs[0].dimensions[attributes.dim]):
        return f'pattern "{op.pattern}" does not keep dimension {attributes.dim} whole'
    return _same_shape(op, attributes, shapes)


def _whole(dimension: Dimension) -> bool:
    return all(axis[0].isupper() for axis in dimension.axes)


def _reduction(op: Operator, attributes: Any, shapes: Shapes) -> str:
    dims = [attributes.dims] if isinstance(attributes.dims, int) else attributes.dims or range(len(shapes[0]))
    rank = len(shapes[0])
    if any(not -rank <= d < rank for d in dims):
        return f"attributes.dims: {list(dims)} are not dimensions of shape {list(shapes[0])}"
    gone = {d % rank for d in dims}
    kept = tuple(1 if d in gone else s for d, s in enumerate(shapes[0]) if attributes.keepdim or d not in gone)
    return "" if shapes[1] == kept else f"the result of {op.kind} must have shape {list(kept)}"


def _view(op: Operator, attributes: Any, shapes: Shapes) -> str:
    return "" if prod(shapes[0]) == prod(shapes[1]) else f"a view of shape {list(shapes[0])} has other elements"


def _permutation(op: Operator, attributes: Any, shapes: Shapes) -> str:
    dims, rank = attributes.dims, len(shapes[0])
    if sorted(d % max(rank, 1) for d in dims) != list(range(rank)):
        return f"attributes.dims: {dims} is no order of {rank} dimensions"
    fits = shapes[1] == tuple(shapes[0][d] for d in dims)
    return "" if fits else f"attributes.dims: shape {list(shapes[0])} in the order {dims} is not {list(shapes[1])}"


def _expansion(op: Operator, attributes: Any, shapes: Shapes) -> str:
    lead = len(shapes[1]) - len(shapes[0])
    fits = lead >= 0 and all(s in (1, t) for s, t in zip(shapes[0], shapes[1][lead:], strict=True))
    return "" if fits else f"shape {list(shapes[0])} cannot be expanded to {list(shapes[1])}"


def _slice(op: Operator, attributes: Any, shapes: Shapes) -> str:
    whole = {axis: (0, size) for axis, size in op.sizes.items()}
    for dimension, size in zip(op.access.inputs[0].dimensions, shapes[0], strict=True):
        low, high = (0, size) if dimension.merged else dimension.window(whole)
        if low < 0 or high > size or (not dimension.plain and len(dimension.axes) > 1):
            return f'"{dimension}" of pattern "{op.pattern}" reaches out of a dimension of size {size}'
    return ""


def _concatenation(op: Operator, attributes: Any, shapes: Shapes) -> str:
    """The parts lie one after the other along ``dim`` and fill the result."""
    rank, end = len(shapes[-1]), 0
    if not -rank <= attributes.dim < rank:
        return f"attributes.dim: {attributes.dim} is no dimension of shape {list(shapes[-1])}"
    dim = attributes.dim % rank
    for shape, operand in zip(shapes[:-1], op.access.inputs, strict=True):
        if len(shape) != rank or any(
            s != t for i, (s, t) in enumerate(zip(shape, shapes[-1], strict=True)) if i != dim
        ):
            return f"parts of shapes {list(shapes[:-1])[:4]} do not make {list(shapes[-1])}"
        position = operand.dimensions[dim]
        if position.coefficients != (1,) or position.offset != -end:
            return f'"{position}" of pattern "{op.pattern}" must begin where the part before it ends, at {end}'
        end += shape[dim]
    return (
        "" if end == shapes[-1][dim] else f"the parts have {end} elements along dimension {dim}, not {shapes[-1][dim]}"
    )


def _pad(op: Operator, attributes: Any, shapes: Shapes) -> str:
    same = len(shapes[0]) == len(shapes[1]) and all(len(d.axes) < 2 for d in op.access.inputs[0].dimensions)
    return "" if same else f"padding shape {list(shapes[0])} does not give {list(shapes[1])}"


def _norm(op: Operator, attributes: Any, shapes: Shapes) -> str:
    if op.kind == "group_norm" and (len(shapes[0]) < 2 or shapes[0][1] % attributes.groups):
        return f"attributes.groups: {attributes.groups} do not divide the channels of shape {list(shapes[0])}"
    if op.kind in ("layer_norm", "rms_norm") and not any(_whole(d) and d.axes for d in op.access.inputs[0].dimensions):
        return f'pattern "{op.pattern}" keeps no dimension whole, so nothing is normalised'
    return _same_shape(op, attributes, shapes)


def _batch_norm(op: Operator, attributes: Any, shapes: Shapes) -> str:
    return (
        "batch normalisation needs samples and channels" if len(shapes[0]) < 2 else _same_shape(op, attributes, shapes)
    )


def _statistics(op: Operator, attributes: Any, shapes: Shapes) -> str:
    fits = len(shapes[0]) >= 2 and shapes[1][-2:] == (2, shapes[0][1])
    return "" if fits else f"statistics of shape {list(shapes[0])} cannot have shape {list(shapes[1])}"


def _embedding(op: Operator, attributes: Any, shapes: Shapes) -> str:
    fits = len(shapes[1]) == 2 and shapes[2] == (*shapes[0], shapes[1][1])
    return "" if fits else f"embedding of shapes {list(shapes)} is none"


def _attention(op: Operator, attributes: Any, shapes: Shapes) -> str:
    q, k, v, y = shapes[0], shapes[1], shapes[2], shapes[-1]
    fits = min(map(len, (q, k, v))) >= 2 and q[-1] == k[-1] and k[-2] == v[-2] and y[-2:] == (q[-2], v[-1])
    if not fits or not {"E", "K", "v"} <= set(op.sizes):
        return f"attention of shapes {list(shapes)} is none"
    return "" if not attributes.grouped or min(map(len, (q, k, v))) > 2 else "grouped attention needs heads"


def _cell(op: Operator, attributes: Any, shapes: Shapes) -> str:
    fits = all(len(shape) == 2 for shape in shapes[:3]) and {"b", "h", "G", "I", "K"} <= set(op.sizes)
    return "" if fits and shapes[-1] == shapes[2] else f"lstm_cell of shapes {list(shapes)} is none"


def _class_loss(op: Operator, attributes: Any, shapes: Shapes) -> str:
    """The classes are the axis C, dimension 1 of the scores."""
    classes = op.access.inputs[0].dimensions[min(1, len(shapes[0]) - 1)].axes if shapes[0] else ()
    if classes != ("C",):
        return f'pattern "{op.pattern}" does not have the classes C in its first operand'
    extra = [shape for shape in shapes[2:-1] if len(shape) > 1]
    return f"weights and counts of a loss are vectors and scalars, not of shape {list(extra[0])}" if extra else ""


def _element_loss(op: Operator, attributes: Any, shapes: Shapes) -> str:
    extra = attributes.has_weight + attributes.has_pos_weight
    fits = len(op.inputs) == 2 + extra
    return "" if fits else f"{op.kind} has {len(op.inputs)} inputs, its attributes speak of {2 + extra}"


def _call(op: Operator, attributes: Any, shapes: Shapes) -> str:
    """The target is of the closed list, and its arguments are numbers, modes, dtypes and the operator's operands."""
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
        elif isinstance(value, dict) and (problem := _argument(value, len(op.inputs))):
            return f"attributes.args: {problem}"
        elif isinstance(value, str) and value.startswith("torch.") and value[6:] not in DTYPE_BYTES:
            return f"attributes.args: {printable(value, 80)!r} is no dtype that a graph may hold"
    return ""


def _argument(value: dict[str, Any], operands: int) -> str:
    """What is wrong with an argument that stands for an operand, a dtype or a number that JSON lacks."""
    if len(value) == 1:
        [(key, what)] = value.items()
        if key == "tensor" and isinstance(what, int) and not isinstance(what, bool) and 0 <= what < operands:
            return ""
        if (key == "dtype" and what in [*DTYPE_BYTES]) or (key == "float" and what in ("inf", "-inf", "nan")):
            return ""
    return 'an object in the arguments must be {"tensor": OPERAND}, {"dtype": NAME} or {"float": "inf"}'


RULES: Final[Mapping[str, Rule]] = {
    **dict.fromkeys(("conv1d", "conv2d", "max_pool1d", "max_pool2d", "avg_pool1d", "avg_pool2d"), _window),
    **dict.fromkeys(("softmax", "log_softmax"), _along),
    **dict.fromkeys(("sum", "mean", "amax", "amin", "argmax"), _reduction),
    **dict.fromkeys(("dropout", "detach"), _same_shape),
    **dict.fromkeys(("layer_norm", "rms_norm", "group_norm"), _norm),
    **dict.fromkeys(("batch_norm", "batch_norm_inference"), _batch_norm),
    **dict.fromkeys(("cross_entropy", "nll_loss"), _class_loss),
    **dict.fromkeys(
        ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "bce_loss", "bce_with_logits", "kl_div"), _element_loss
    ),
    **dict.fromkeys(("pointwise", "opaque"), _call),
    "linear": _contraction, "view": _view, "permute": _permutation, "expand": _expansion, "slice": _slice,
    "cat": _concatenation, "pad": _pad, "batch_statistics": _statistics, "embedding": _embedding,
    "attention": _attention, "lstm_cell": _cell, **INDEX_RULES,
}  # fmt: skip
