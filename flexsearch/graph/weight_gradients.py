"""Weights' gradients as operators of their own, so that a plan can split them in another way than the rest.

An operator whose weights' gradients have a split of their own becomes two. The first one, placed right before the
other, reads the same operands; its forward pass computes nothing, its backward pass makes the gradients of the weights.
The second one computes what the operator computed, and makes the gradients of its other inputs. It has one operand
more, the result of the first: nobody reads its value, but its gradient is that of the operator's output. So whatever
places, moves, costs and runs operators needs to know nothing else: the saved input goes from where it was made to the
pieces of the first, the gradient of the output from the pieces of the second to those of the first, and the gradients
of the weights from there to where these are stored.
"""

from __future__ import annotations

from collections.abc import Collection

from flexsearch.errors import StrategyError
from flexsearch.graph.model import HALF, Operator, OperatorGraph, Tensor
from flexsearch.graph.ops import KINDS, OperatorKind

SUFFIX = ".weight_gradient"
"""What the name of the operator that makes the gradients of the weights has behind that of the other."""


def weight_gradient_of(name: str) -> str:
    """Name of the operator that makes the gradients of the weights of operator ``name``."""
    return name + SUFFIX


def owner_of(name: str) -> str | None:
    """The operator whose weights' gradients operator ``name`` makes; None: its name is that of no such operator."""
    return name.removesuffix(SUFFIX) if name.endswith(SUFFIX) else None


def able(graph: OperatorGraph) -> tuple[str, ...]:
    """Operators whose weights' gradients may have a split of their own."""
    return tuple(op.name for op in graph.operators if not _problem(graph, op))


def divided(graph: OperatorGraph) -> tuple[str, ...]:
    """Operators of ``graph`` that another one makes the weights' gradients of."""
    return tuple(op.name for op in graph.operators if op.half == "inputs")


def with_weight_gradients(graph: OperatorGraph, names: Collection[str]) -> OperatorGraph:
    """``graph`` with operators of their own for the weights' gradients of the operators ``names``, where there are none
    yet. The same graph and names give the same object again. Raises StrategyError where that is not possible."""
    if not (names := set(names) - set(divided(graph))):
        return graph
    graphs: dict[frozenset[str], OperatorGraph] = graph.__dict__.setdefault("_with_weight_gradients", {})
    key = frozenset(names)
    if key not in graphs:
        graphs[key] = _divided(graph, key)
    return graphs[key]


def _problem(graph: OperatorGraph, op: Operator) -> str:
    """Why the weights' gradients of an operator can have no split of their own; empty if they can."""
    if op.half is not None:
        return "makes only a part of the gradients already"
    kinds_able = {k.name for k in KINDS.values() if type(k).weight_gradient is not OperatorKind.weight_gradient}
    if op.kind not in kinds_able:
        return f"is of kind {op.kind!r}; only those of {', '.join(sorted(kinds_able))} can be split apart"
    kinds = [graph.tensor[name].kind for name in op.inputs]
    if kinds[0] == "parameter" or any(kind != "parameter" for kind in kinds[1:]):
        return "has operands besides its first one that are no weights of the model"
    if not all(name in graph.differentiable for name in op.inputs[1:]):
        return "has weights that are not trained"
    if op.outputs[0] not in graph.differentiable:  # of a weight that another operator trains
        return "has a result that no gradient flows through"
    return ""


def _divided(graph: OperatorGraph, names: frozenset[str]) -> OperatorGraph:
    for name in sorted(names):
        if name not in graph.index:
            raise StrategyError(
                f"there is no operator {name!r}, so the gradients of its weights can have no split of their own",
                "Remove it, or run `flexsearch optimize` again.",
            )
        if problem := _problem(graph, graph.operators[graph.index[name]]):
            raise StrategyError(
                f"operator {name!r}: the gradients of its weights can have no split of their own: it {problem}",
                "Remove weight_gradient from its entry.",
            )
    carrier: dict[str, Tensor] = {}
    operators: list[Operator] = []
    for op in graph.operators:
        if op.name in names:
            name, result = f"{op.outputs[0]}.gradient", graph.tensor[op.outputs[0]]
            carrier[result.name] = Tensor(name=name, shape=result.shape, dtype=result.dtype, kind="activation")
            operators += _halves(op, name)
        else:
            operators.append(op)
    # Activations are in the order in which they are made.
    pairs = ((carrier.get(tensor.name), tensor) for tensor in graph.tensors)
    tensors = tuple(tensor for pair in pairs for tensor in pair if tensor is not None)
    fields = {field: getattr(graph, field) for field in OperatorGraph.model_fields}
    return type(graph)(**fields | {"operators": tuple(operators), "tensors": tensors})


def _halves(op: Operator, carrier: str) -> tuple[Operator, Operator]:
    fields = {field: getattr(op, field) for field in Operator.model_fields}
    weights = fields | {
        "name": weight_gradient_of(op.name), "outputs": (carrier,), "attributes": op.attributes | {HALF: "weights"},
    }  # fmt: skip
    read, written = op.pattern.split("->")
    # Where a sum is split, each piece has the whole gradient of its output: one of them hands it on.
    rest = fields | {
        "inputs": (*op.inputs, carrier), "pattern": f"{read.rstrip()}, +{written.strip()} -> {written.strip()}",
        "attributes": op.attributes | {HALF: "inputs"},
    }  # fmt: skip
    return Operator(**weights), Operator(**rest)
