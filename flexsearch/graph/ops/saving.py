"""What autograd keeps of the operators of a graph for their backward passes."""

from __future__ import annotations

from flexsearch.graph.model import Flow, Operator, OperatorGraph
from flexsearch.graph.ops.base import INPUTS, Saved, kind_of


def saved_tensors(graph: OperatorGraph) -> tuple[Saved, ...]:
    """For each operator of a graph, what is saved for its backward: the rule behind the lifetime of activations.

    It follows what PyTorch's autograd saves. Kinds that do not say save both, which is never too little.
    """

    def before(op: Operator) -> Operator | None:
        maker = graph.producer.get(op.inputs[0]) if op.inputs else None
        return None if maker is None else graph.operators[maker]

    def rule(op: Operator) -> Saved:
        if op.half is not None:
            return INPUTS if op.half == "weights" else kind_of(op).saved_without_weights
        return kind_of(op).saves(op, *([] if (one := first[op.name]) is None else filter(None, (one, first[one.name]))))

    first = {op.name: before(op) for op in graph.operators}
    return tuple(rule(op) for op in graph.operators)


def kept_weights(graph: OperatorGraph) -> frozenset[tuple[int, int]]:
    """(operator, operand) of the weights that autograd keeps for the backward pass: what gradients of other operands
    are made of, of all but those that are added (biases). Where there are none to make, only operators keep them that
    always save what they read."""
    kept = set()
    for i, (op, rule) in enumerate(zip(graph.operators, saved_tensors(graph), strict=True)):
        if not graph.has_backward[i] or op.half == "weights" or not (rule.inputs or op.half):
            continue  # what has its weights' gradients made apart saves none of its other operands for them
        operands = zip(op.inputs, op.access.inputs, graph.flows[i], strict=True)
        wanted = [
            name in graph.differentiable and not operand.once and flow == Flow.BOTH for name, operand, flow in operands
        ]
        always = kind_of(op).saved_without_weights.inputs
        for p, (name, operand) in enumerate(zip(op.inputs, op.access.inputs, strict=True)):
            weight = graph.tensor[name].kind == "parameter" and not operand.once
            if weight and (always or any(wanted[:p] + wanted[p + 1 :])):
                kept.add((i, p))
    return frozenset(kept)


def released_weights(graph: OperatorGraph) -> frozenset[tuple[int, int]]:
    """(operator, operand) of the weights that no gradient of a weight is made of: where a backward pass is split, its
    second half does without them. Of a product with one weight its gradient is made of the other factors."""
    released: set[tuple[int, int]] = set()
    for i, op in enumerate(graph.operators):
        if kind_of(op).contraction:
            factors = [
                p for p, (name, operand) in enumerate(zip(op.inputs, op.access.inputs, strict=True))
                if graph.tensor[name].kind == "parameter" and not operand.once
            ]  # fmt: skip
            released.update((i, p) for p in factors if len(factors) == 1)
    return frozenset(released)
