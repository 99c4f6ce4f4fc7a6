"""Whether the loss of a batch is a sum over its samples: only then do microbatches compute what the batch does."""

from __future__ import annotations

from typing import Final, Literal

from flexsearch.errors import NotationError
from flexsearch.graph.model import Operator, OperatorGraph
from flexsearch.graph.notation import Operand
from flexsearch.graph.ops import kind_of

State = Literal["samples", "sum"]
"""What a tensor holds: something for each sample, or a sum over samples. Neither, for what does not depend on them, and
for counts of targets, which are known before the first microbatch."""

COUNTS: Final = frozenset({"valid_count"})
"""Kinds that count over the batch: each microbatch divides by the counts of all."""
SUMS: Final = frozenset({"aten.add.Tensor", "aten.sub.Tensor"})
"""Pointwise functions of sums that give a sum, if all operands are sums."""
SCALES: Final = frozenset({
    "aten.mul.Tensor", "aten.mul.Scalar", "aten.div.Tensor", "aten.div.Scalar", "aten.neg.default",
    "aten._to_copy.default", "aten.clone.default", "aten.alias.default",
})  # fmt: skip
"""Those that give one, if only the first operand of them is."""
MOVES: Final = frozenset({"cat", "detach", "expand", "mean", "permute", "slice", "sum", "view"})
"""Kinds that only move elements, or add them up."""


def check_sum_over_samples(graph: OperatorGraph) -> None:
    """Raise NotationError, naming the first operator that lets samples depend on each other, or adds to the loss what
    no sample contributes, or a buffer that each step changes: with microbatches it would compute something else."""
    states: dict[str, State] = {}
    early = counting(graph)
    for i, op in enumerate(graph.operators):
        problem = _problem(op, states)
        if op.kind in COUNTS and i not in early:
            problem = "counts over the whole batch what depends on a weight"
        if problem is not None:
            raise NotationError(
                f"operator {op.name!r} {problem}, so microbatches would compute another function than the whole batch",
                "Plan with one microbatch.",
            )
        outputs = zip(op.outputs, op.access.outputs, strict=True)
        states.update((name, state) for name, operand in outputs if (state := _state(op, operand, states)) is not None)
    if graph.buffer_updates:
        raise NotationError(
            f"buffer {next(iter(graph.buffer_updates))!r} has a new value after each step, which microbatches would "
            "change once each",
            "Plan with one microbatch.",
        )


def is_sum_over_samples(graph: OperatorGraph) -> bool:
    """Whether microbatches compute what the batch does, and there is more than one sample to divide."""
    try:
        check_sum_over_samples(graph)
    except NotationError:
        return False
    return graph.batch > 1


def counting(graph: OperatorGraph) -> frozenset[int]:
    """Operators that count over the batch, and what they read: inputs, and what follows from those alone. A count that
    depends on a weight is left out."""
    operators: set[int] = set()
    for i, op in enumerate(graph.operators):
        if op.kind in COUNTS:
            operators |= _without_weights(graph, i)
    return frozenset(operators)


def _without_weights(graph: OperatorGraph, operator: int) -> set[int]:
    """An operator and those that it depends on; none of them if one reads a weight."""
    needed, open_ones = {operator}, [operator]
    while open_ones:
        for name in graph.operators[open_ones.pop()].inputs:
            if graph.tensor[name].kind == "parameter":
                return set()
            producer = graph.producer.get(name, operator)
            if producer not in needed:
                needed.add(producer)
                open_ones.append(producer)
    return needed


def _samples(op: Operator, operand: Operand | None = None) -> set[str]:
    """Axes that run over samples: of an operator, or in one of its operands."""
    axes = {a for d in operand.dimensions for a in d.axes} if operand is not None else set(op.roles)
    return {axis for axis in axes if op.roles[axis] == "sample" and op.sizes[axis] > 1}


def _problem(op: Operator, states: dict[str, State]) -> str | None:
    """In what way an operator is no sum over samples, in words."""
    samples, own = _samples(op), [states.get(name) for name in op.inputs]
    if len(samples) > 1:
        return "compares samples with each other"
    if samples - set(op.splittable):
        return "runs over all samples at once"
    if samples and kind_of(op).grouped:
        return "takes statistics of groups of samples, which are smaller in a microbatch"
    if samples:
        return "reads a sum over all samples for each of them" if "sum" in own else None
    if "samples" in own:
        return "picks single samples"
    if "sum" in own and not _is_linear(op, own):
        return "computes with a sum over all samples, and not as a sum would"
    return None


def _is_linear(op: Operator, own: list[State | None]) -> bool:
    """Whether an operator of sums gives the sum of what it gives for each of them."""
    target = op.attributes.get("target")
    if target in SUMS:
        return all(state == "sum" for state in own) and (len(own) > 1 or _adds_nothing(op))
    if target == "aten.mul.Tensor" and own.count("sum") == 1 and "samples" not in own:
        return True
    if target in SCALES:
        return own[0] == "sum" and "sum" not in own[1:]
    return op.kind in MOVES and all(state == "sum" for state in own)


def _adds_nothing(op: Operator) -> bool:
    """Whether an addition adds the number 0, as sums in Python do that begin with it."""
    args = op.attributes.get("args")
    return isinstance(args, list) and len(args) > 1 and args[1] in (0, 0.0)


def _state(op: Operator, operand: Operand, states: dict[str, State]) -> State | None:
    """What an output holds."""
    if op.kind in COUNTS:
        return None
    if _samples(op):
        return "samples" if _samples(op, operand) else "sum"
    return "sum" if any(states.get(name) == "sum" for name in op.inputs) else None
