"""What must hold for the parts of a graph to fit together: whoever lowers, costs or runs it relies on every line here.

Everything raises ValueError, which pydantic and ``OperatorGraph.load`` turn into an error that names the file; the
message begins with the field.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

from flexsearch.errors import NotationError
from flexsearch.graph.notation import Access, Operand, infer_sizes
from flexsearch.quantities import MAX_GRAPH_BYTES, MAX_ITERATIONS, MAX_MOVED_BYTES, MAX_SIZE

if TYPE_CHECKING:
    from flexsearch.graph.model import Operator, OperatorGraph


def check_graph(graph: OperatorGraph) -> None:
    """Names, order, patterns against shapes, loss, buffers and total size. Raises ValueError."""
    seen: set[str] = set()
    for k, tensor in enumerate(graph.tensors):
        if tensor.name in seen:
            raise ValueError(f"tensors.{k}.name: two tensors have the same name, {tensor.name!r}")
        seen.add(tensor.name)
    total = sum(tensor.nbytes for tensor in graph.tensors)
    if total >= MAX_GRAPH_BYTES:
        raise ValueError(f"tensors: together they have {total:.3g} bytes; the limit is 2^56 (64 PiB)")
    weights = sum(tensor.nbytes for tensor in graph.tensors if tensor.kind == "parameter")
    if weights >= MAX_MOVED_BYTES:
        raise ValueError(f"tensors: the parameters have {weights:.3g} bytes together; the limit is 2^50 (1 PiB)")
    ready = _check_order(graph, seen)
    checked: set[tuple[object, ...]] = set()
    for k, op in enumerate(graph.operators):
        shapes = tuple(graph.tensor[name].shape for name in (*op.inputs, *op.outputs))
        same = (op.pattern, len(op.inputs), shapes, *((axis.name, axis.size) for axis in op.axes))
        if same not in checked:  # blocks repeat
            check_pattern(graph, op, place(k, op))
            checked.add(same)
    for k, tensor in enumerate(graph.tensors):
        if tensor.name not in ready:
            raise ValueError(f"tensors.{k}: activation {tensor.name!r} is made by no operator")
    _check_results(graph)


def place(number: int, op: Operator) -> str:
    """How errors name an operator."""
    return f"operators.{number} ({op.name!r})"


def _check_order(graph: OperatorGraph, tensor_names: set[str]) -> set[str]:
    """Every operator reads what there is and makes what there is not. Returns the names of all tensors made."""
    ready = {t.name for t in graph.tensors if t.kind != "activation"}
    names: set[str] = set()
    for k, op in enumerate(graph.operators):
        where = place(k, op)
        if op.name in names:
            raise ValueError(f"{where}: two operators have the same name")
        names.add(op.name)
        for name in (*op.inputs, *op.outputs):
            if name not in tensor_names:
                raise ValueError(f"{where} uses tensor {name!r}, which is not in the graph")
        for name in op.inputs:
            if name not in ready:
                raise ValueError(f"{where} reads {name!r} before it is made; order the operators, without a cycle")
        for name in op.outputs:
            if name in ready:
                raise ValueError(f"{where} makes {name!r}, which exists already")
            ready.add(name)
    return ready


def check_pattern(graph: OperatorGraph, op: Operator, where: str) -> None:
    """The pattern agrees with shapes and axes, and every piece of it writes a part of every output."""
    inputs = [graph.tensor[name].shape for name in op.inputs]
    outputs = [graph.tensor[name].shape for name in op.outputs]
    try:
        access = op.access
        if (len(access.inputs), len(access.outputs)) != (len(inputs), len(outputs)):
            raise NotationError(f'pattern "{op.pattern}" does not have as many operands as the operator')
        sizes = infer_sizes(access, inputs, outputs, op.sizes)
    except NotationError as error:
        raise ValueError(f"{where}.pattern: {error}") from error
    if len(op.sizes) != len(op.axes) or set(sizes) != set(op.sizes):
        listed = [axis.name for axis in op.axes]
        raise ValueError(f"{where} lists axes {listed}, its pattern has {list(sizes)}")
    if (points := prod(sizes.values())) >= MAX_ITERATIONS:
        raise ValueError(f"{where}: its axes have {points:.3g} points together; the limit is 2^59")
    for operand, shape in zip(access.outputs, outputs, strict=True):
        _check_output(operand, shape, access, where)
    for operand, shape in zip(access.inputs, inputs, strict=True):
        _check_input(operand, shape, op, where)


def _check_output(operand: Operand, shape: Sequence[int], access: Access, where: str) -> None:
    """Each element is written once: dimensions are axes, merged axes or single elements, no axis stands in two."""
    seen: set[str] = set()
    for dimension, size in zip(operand.dimensions, shape, strict=True):
        plain = dimension.plain or dimension.merged or (not dimension.axes and dimension.offset == 0 and size == 1)
        if not plain or operand.once or seen & set(dimension.axes) or len(set(dimension.axes)) < len(dimension.axes):
            raise ValueError(
                f'{where}.pattern: output "{operand}" of "{access}" must be made of axes, each of them once, '
                "without windows"
            )
        seen |= set(dimension.axes)


def _check_input(operand: Operand, shape: Sequence[int], op: Operator, where: str) -> None:
    """Each dimension reaches the tensor: a selected element exists, a window does not lie wholly outside."""
    whole = {axis: (0, size) for axis, size in op.sizes.items()}
    for dimension, size in zip(operand.dimensions, shape, strict=True):
        problem = ""
        if dimension.merged:
            if len(set(dimension.axes)) < len(dimension.axes):
                problem = "names an axis twice"
        elif not dimension.plain:
            low, high = dimension.window(whole)
            if not dimension.axes and not 0 <= low < size:
                problem = f"selects an element that a dimension of size {size} does not have"
            elif len(set(dimension.axes)) < len(dimension.axes):
                problem = "names an axis twice"
            elif max(low, 0) >= min(high, size):
                problem = f"lies wholly outside of a dimension of size {size}"
            elif -low >= MAX_SIZE or high >= 2 * MAX_SIZE:
                problem = "reaches too far"
        if problem:
            raise ValueError(f'{where}.pattern: "{dimension}" of operand "{operand}" {problem}')


def _check_results(graph: OperatorGraph) -> None:
    """The loss, and what a step changes besides the weights."""
    if not graph.loss and not graph.buffer_updates:
        return  # a forward pass
    if graph.loss not in graph.producer:
        raise ValueError(f"loss: {graph.loss!r} is not made by any operator; it must be a scalar that one makes")
    loss = graph.tensor[graph.loss]
    if loss.shape != () or not loss.floating:
        raise ValueError(f"loss: {graph.loss!r} must be a floating-point scalar")
    for name, value in graph.buffer_updates.items():
        where = f"buffer_updates.{name}"
        if name not in graph.tensor or graph.tensor[name].kind != "buffer" or value not in graph.tensor:
            raise ValueError(f"{where}: {name!r} <- {value!r} does not name a buffer and a tensor")
        if graph.tensor[name].shape != graph.tensor[value].shape:
            raise ValueError(f"{where}: {value!r} has another shape than the buffer")
    for k, name in enumerate(graph.counters):
        tensor = graph.tensor.get(name)
        if tensor is None or tensor.kind != "buffer" or tensor.shape != () or tensor.floating or tensor.dtype == "bool":
            raise ValueError(f"counters.{k}: {name!r} is not an integer scalar buffer")
