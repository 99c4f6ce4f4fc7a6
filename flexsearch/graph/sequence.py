"""The same graph for another sequence length: which axes run over the sequence follows from the inputs, operator by
operator."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from flexsearch.errors import NotationError
from flexsearch.graph.batch import rebuilt, with_sizes
from flexsearch.graph.model import Operator, OperatorGraph, Tensor
from flexsearch.graph.notation import Dimension
from flexsearch.graph.ops import kind_of

Parts = tuple[tuple[int, bool], ...]
"""What a dimension or an axis is made of, row-major: (size, whether it runs over the sequence)."""

_AGAIN = "Import the model again with that sequence length."


def sequence_length(graph: OperatorGraph) -> int | None:
    """Tokens of a sample: the second dimension of the first input, if that is of integers (batch, sequence) or of
    features (batch, sequence, features); None for images and other inputs."""
    first = next((t for t in graph.of_kind("input") if t.shape), None)
    return first.shape[1] if first is not None and _is_sequence(first) else None


def with_sequence(graph: OperatorGraph, length: int) -> OperatorGraph:
    """``graph`` with sequences of ``length`` tokens: for costs and plans, as ``with_batch``.

    The sequence is the second dimension of every input of token numbers (batch, sequence) or features (batch, sequence,
    features) that is as long as the first input's. From there it is followed through the patterns of the operators.
    Capacities of experts grow with it. Constants along it (the numbers of positions that learned embeddings look up,
    tables of rotary embeddings, masks) are cut for a shorter sequence. What a longer one would have in them is not
    known, so that is refused; tables of embeddings themselves stay as they are.

    Raises NotationError, naming the operator or tensor: for inputs without a sequence; constants that are too short; a
    parameter as long as the sequence (positions that are added without looking them up); operators that mix the
    sequence with constants (windows, shifts by a token, chunks of it).
    """
    old = sequence_length(graph)
    if old is None:
        raise NotationError(
            f"graph {graph.name!r} has no sequence: its first input is neither (batch, sequence) of integers nor "
            "(batch, sequence, features)",
            "Change the batch alone.",
        )
    if length == old:
        return graph
    followed = _Followed(graph, old, length)
    operators = [_resized(op, axes, old, length) for op, axes in zip(graph.operators, followed.axes, strict=True)]
    cut = {name for name, _ in followed.leaves if graph.tensor[name].kind == "constant"}
    return rebuilt(graph, operators, "sequence", cut)


def _is_sequence(tensor: Tensor) -> bool:
    return len(tensor.shape) == (3 if tensor.floating else 2)


def _follows(parts: Parts) -> bool:
    return any(follows for _, follows in parts)


class _Followed:
    """Which axes run over the sequence. ``axes``: of each operator, what its axes are made of. ``leaves``: (tensor,
    dimension) that run over it and that no operator makes."""

    def __init__(self, graph: OperatorGraph, old: int, new: int) -> None:
        self.graph, self.old, self.new = graph, old, new
        self.leaves = {
            (t.name, 1) for t in graph.of_kind("input") if len(t.shape) > 1 and _is_sequence(t) and t.shape[1] == old
        }
        self.required: set[tuple[int, str]] = set()
        """(Operator, axis) that must run over the sequence because of what is done with the result."""
        while True:
            before = len(self.leaves) + len(self.required)
            self._walk()
            if len(self.leaves) + len(self.required) == before:
                return

    def _walk(self) -> None:
        """Follow the sequence from the leaves to the loss; note what else must run over it."""
        self.axes: list[dict[str, Parts]] = []
        self.dimensions: dict[str, list[Parts]] = {
            t.name: [((size, (t.name, k) in self.leaves),) for k, size in enumerate(t.shape)]
            for t in self.graph.tensors
            if t.kind != "activation"
        }
        for number, op in enumerate(self.graph.operators):
            axes = self._read(number, op)
            self.axes.append(axes)
            self._require(op, axes)
            for name, operand in zip(op.outputs, op.access.outputs, strict=True):
                self.dimensions[name] = [
                    tuple(part for a in d.axes for part in axes.get(a, ((op.sizes[a], False),))) or ((1, False),)
                    for d in operand.dimensions
                ]

    def _read(self, number: int, op: Operator) -> dict[str, Parts]:
        """The axes of an operator that run over the sequence, as far as its operands tell."""
        axes: dict[str, Parts] = {a: ((op.sizes[a], True),) for n, a in self.required if n == number}
        for name, operand in zip(op.inputs, op.access.inputs, strict=True):
            for dimension, parts in zip(operand.dimensions, self.dimensions[name], strict=True):
                if not _follows(parts):
                    continue
                if dimension.plain:
                    axes.setdefault(dimension.axes[0], parts)
                elif dimension.merged:
                    shares = zip(dimension.axes, _divided(op, dimension, parts), strict=True)
                    axes |= {a: own for a, own in shares if _follows(own) and a not in axes}
                elif dimension.axes or dimension.offset:
                    raise _mixed(op, dimension)
        for axis, leader in kind_of(op).follows.items():
            if axis in op.sizes and _follows(axes.get(leader, ())):
                axes[axis] = ((op.sizes[axis], True),)
        return axes

    def _require(self, op: Operator, axes: Mapping[str, Parts]) -> None:
        """What is read along an axis of the sequence runs over it, too."""
        for name, operand in zip(op.inputs, op.access.inputs, strict=True):
            for k, (dimension, parts) in enumerate(zip(operand.dimensions, self.dimensions[name], strict=True)):
                if any(a in axes for a in dimension.axes) and not _follows(parts):
                    if not dimension.plain:
                        raise _mixed(op, dimension)
                    self._also(op, name, k)

    def _also(self, op: Operator, name: str, k: int) -> None:
        """Dimension ``k`` of a tensor runs over the sequence as well."""
        tensor = self.graph.tensor[name]
        if tensor.kind in ("parameter", "buffer"):
            raise NotationError(
                f"{tensor.kind} {name!r} of shape {list(tensor.shape)} is as long as the sequence ({op.name!r} reads "
                f"it by position), so another length is another model",
                _AGAIN,
            )
        if tensor.kind == "constant" and self.new > tensor.shape[k]:
            raise NotationError(
                f"constant {name!r} has {tensor.shape[k]} positions ({op.name!r} reads it); it can be cut, but what "
                f"further ones would hold is not known",
                f"Give at most {tensor.shape[k]}, or import the model again with that sequence length.",
            )
        if tensor.kind != "activation":
            self.leaves.add((name, k))
            return
        producer = self.graph.producer[name]
        maker = self.graph.operators[producer]
        dimension = maker.access.outputs[maker.outputs.index(name)].dimensions[k]
        candidates = [a for a in dimension.axes if maker.sizes[a] == tensor.shape[k] or maker.sizes[a] == self.old]
        if len(candidates) != 1:
            raise _mixed(maker, dimension)
        self.required.add((producer, candidates[0]))


def _divided(op: Operator, dimension: Dimension, parts: Parts) -> list[Parts]:
    """What each axis of a merged dimension is made of. Raises NotationError if one would have a part of a sequence."""
    rest, shares = [part for part in parts if part[0] > 1], []
    for axis in dimension.axes:
        size, own = op.sizes[axis], list[tuple[int, bool]]()
        while size > 1:
            if not rest:
                raise _mixed(op, dimension)
            first, follows = rest.pop(0)
            if size % first == 0:
                own.append((first, follows))
                size //= first
            elif first % size == 0 and not follows:
                own.append((size, False))
                rest.insert(0, (first // size, False))
                size = 1
            else:
                raise _mixed(op, dimension)
        shares.append(tuple(own))
    return shares


def _resized(op: Operator, axes: Mapping[str, Parts], old: int, new: int) -> Operator:
    """``op`` with another sequence length."""
    sizes = dict(op.sizes)
    for axis, parts in axes.items():
        sizes[axis] = prod(_scaled(op, axis, size, old, new) if follows else size for size, follows in parts)
    return with_sizes(op, sizes) if sizes != op.sizes else op


def _scaled(op: Operator, axis: str, size: int, old: int, new: int) -> int:
    scaled, rest = divmod(size * new, old)
    if rest:
        raise NotationError(
            f"operator {op.name!r} has {size} indices (axis {axis!r}) for {old} tokens, which is no whole number for "
            f"{new}",
            "Give a length with a larger common divisor.",
        )
    return scaled


def _mixed(op: Operator, dimension: Dimension) -> NotationError:
    return NotationError(
        f'operator {op.name!r} mixes the sequence with constants: "{dimension}" in pattern "{op.pattern}"', _AGAIN
    )
