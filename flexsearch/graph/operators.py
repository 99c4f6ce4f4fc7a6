"""The operator table: a line per kind, from which shapes, regions, roles and FLOPs of every operator follow.

A line gives the access pattern (see :mod:`flexsearch.graph.notation`), the roles of the axes it names, and FLOPs where
they are not one per output element. Kinds without a pattern get theirs from the importer, because it depends on more
than ranks (a reshape, a concatenation). :func:`register` adds lines for operators of your own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from flexsearch.graph.model import Operator, Role
from flexsearch.graph.notation import Dimension

Flops = Callable[[Operator, Mapping[str, Any]], Any]
"""Forward FLOPs of a piece, given its number of indices on each axis. Those of the shipped table also take arrays of
numbers, one for each piece, and give an array."""


@dataclass(frozen=True, slots=True)
class OperatorSpec:
    """``backward``: backward FLOPs over forward FLOPs; of a ``contraction``, for each operand that needs a gradient.
    ``matrix``: most of the FLOPs are those of matrix products, as a contraction's are. ``table``: position of the
    operand of which only those elements are read that another one names."""

    pattern: str | None = None
    roles: Mapping[str, Role] = field(default_factory=dict)
    flops: Flops | None = None
    backward: float = 1.0
    contraction: bool = False
    matrix: bool = False
    table: int | None = None


def _outputs(op: Operator, extents: Mapping[str, Any]) -> Any:
    """Elements of the outputs."""
    return sum(prod(extents[a] for a in operand.names()) for operand in op.access.outputs)


def _domain(op: Operator, extents: Mapping[str, Any]) -> Any:
    """Points of the iteration space."""
    return prod(extents.values())


def _per_output(count: float) -> Flops:
    return lambda op, extents: count * _outputs(op, extents)


def _per_point(count: float) -> Flops:
    return lambda op, extents: count * _domain(op, extents)


def _per_input(count: float) -> Flops:
    """``count`` for each element of the first operand (a normalisation or a loss, whatever its other operands)."""
    return lambda op, extents: count * prod(extents[a] for a in op.access.inputs[0].names())


def _touched(op: Operator, extents: Mapping[str, Any]) -> Any:
    """Elements that are read and written, one FLOP for each, and the FLOPs of matrix products that importing counted.

    What an operator that flexsearch does not look into computes of each element is unknown; but its axes are those of
    its operands, side by side, and their product would be no number of anything."""
    operands = (*op.access.inputs, *op.access.outputs)
    return sum(prod(_span(d, extents) for d in operand.dimensions) for operand in operands) + _counted(op, extents)


def _span(dimension: Dimension, extents: Mapping[str, Any]) -> Any:
    """Indices of a dimension that a piece reaches, as if no window were clipped."""
    if dimension.merged:
        return prod(extents[a] for a in dimension.axes)
    return 1 + sum(c * (extents[a] - 1) for a, c in zip(dimension.axes, dimension.coefficients, strict=True))


def _counted(op: Operator, extents: Mapping[str, Any]) -> Any:
    """A piece's share of the FLOPs in the attribute ``matrix_flops``, those of the whole operator."""
    whole: Any = op.attributes.get("matrix_flops", 0)
    return whole * prod(extents[a] / size for a, size in op.sizes.items()) if whole else 0


def _attention(op: Operator, extents: Mapping[str, Any]) -> Any:
    """Two matrix products and a softmax of 5 operations per score; a causal mask is counted as full work."""
    scores = prod(extents[a] for a in op.access.inputs[0].names() if a != "E") * extents["K"]
    return scores * (2 * (extents["E"] + extents["v"]) + 5)


def _lstm_cell(op: Operator, extents: Mapping[str, Any]) -> Any:
    """Two matrix products for each gate, and about 20 operations on each hidden feature after them."""
    products = 2 * extents["G"] * (extents["I"] + extents["K"])
    return extents["b"] * extents["h"] * (products + 20)


_FREE = _per_output(0.0)  # moves data, or nothing at all
_WINDOW = "n c (s*h+d*KH-p) (t*w+e*KW-q) -> n c h w"
_IMAGE: Mapping[str, Role] = {"h": "attribute", "w": "attribute"}
_CONV: Mapping[str, Role] = {"g": "parameter", "o": "parameter", "c": "reduction", **_IMAGE}
_CHANNELS: Mapping[str, Role] = {"c": "parameter"}
_HEADS: Mapping[str, Role] = {"h": "parameter", "k": "parameter", "g": "parameter", "q": "attribute"}
_CONTRACT = _per_point(2.0)

OPERATORS: dict[str, OperatorSpec] = {
    "conv1d": OperatorSpec("n (g c) (s*h+d*KH-p), (g o) c KH, +(g o) -> n (g o) h", _CONV, _CONTRACT, contraction=True),
    "conv2d": OperatorSpec(
        "n (g c) (s*h+d*KH-p) (t*w+e*KW-q), (g o) c KH KW, +(g o) -> n (g o) h w", _CONV, _CONTRACT, contraction=True
    ),
    "linear": OperatorSpec(
        "b.. i, o i, +o -> b.. o", {"o": "parameter", "i": "reduction"}, _CONTRACT, contraction=True
    ),
    "addmm": OperatorSpec(None, {"o": "parameter", "i": "reduction"}, _CONTRACT, contraction=True),
    "einsum": OperatorSpec(None, {}, _CONTRACT, contraction=True),
    "attention": OperatorSpec(None, _HEADS, _attention, backward=2.5, matrix=True),  # scores are computed again
    "lstm_cell": OperatorSpec(None, {"h": "parameter"}, _lstm_cell, backward=2.0, matrix=True),
    "max_pool1d": OperatorSpec("n c (s*h+d*KH-p) -> n c h", _IMAGE, _per_point(1.0)),
    "avg_pool1d": OperatorSpec("n c (s*h+d*KH-p) -> n c h", _IMAGE, _per_point(1.0)),
    "max_pool2d": OperatorSpec(_WINDOW, _IMAGE, _per_point(1.0)),
    "avg_pool2d": OperatorSpec(_WINDOW, _IMAGE, _per_point(1.0)),
    "adaptive_avg_pool1d": OperatorSpec("n c H -> n c P", {}, _per_input(1.0)),
    "adaptive_max_pool1d": OperatorSpec("n c H -> n c P", {}, _per_input(1.0)),
    "adaptive_avg_pool2d": OperatorSpec("n c H W -> n c P Q", {}, _per_input(1.0)),
    "adaptive_max_pool2d": OperatorSpec("n c H W -> n c P Q", {}, _per_input(1.0)),
    "batch_statistics": OperatorSpec("n c s.. -> M c", _CHANNELS, _per_input(3.0)),
    "batch_norm": OperatorSpec("n c s.., M c, c, c -> n c s..", _CHANNELS, _per_output(4.0), backward=2.0),
    "batch_norm_running": OperatorSpec("M c, c, c -> c, c", _CHANNELS, _per_output(3.0), backward=0.0),
    "batch_norm_inference": OperatorSpec("n c s.., c, c, c, c -> n c s..", _CHANNELS, _per_output(4.0)),
    "layer_norm": OperatorSpec("b.. D.., D.., D.. -> b.. D..", {}, _per_output(8.0), backward=2.0),
    "rms_norm": OperatorSpec("b.. D.., D.. -> b.. D..", {}, _per_output(5.0), backward=2.0),
    "group_norm": OperatorSpec(
        "n (g C) S.., (g C), (g C) -> n (g C) S..", {"g": "parameter"}, _per_output(8.0), backward=2.0
    ),
    "embedding": OperatorSpec("b.., v d -> b.. d", {"v": "reduction", "d": "parameter"}, table=1),
    "index": OperatorSpec(None, table=0),
    "gather": OperatorSpec(None, table=0),
    "softmax": OperatorSpec(None, {}, _per_output(5.0)),
    "log_softmax": OperatorSpec(None, {}, _per_output(5.0)),
    "pointwise": OperatorSpec(None),
    "dropout": OperatorSpec("a.. -> a..", {}, _per_output(3.0), backward=0.5),
    "uniform": OperatorSpec(None, {}, _per_output(10.0), backward=0.0),
    "detach": OperatorSpec("a.. -> a..", {}, _FREE),
    "view": OperatorSpec(None, {}, _FREE),
    "permute": OperatorSpec(None, {}, _FREE),
    "expand": OperatorSpec(None, {}, _FREE),
    "slice": OperatorSpec(None, {}, _FREE),
    "unfold": OperatorSpec(None, {}, _FREE),
    "im2col": OperatorSpec(None, _IMAGE, _FREE),
    "cat": OperatorSpec(None, {}, _FREE),
    "pad": OperatorSpec(None, {}, _FREE),
    "sum": OperatorSpec(None, {}, _per_point(1.0)),
    "mean": OperatorSpec(None, {}, _per_point(1.0)),
    "amax": OperatorSpec(None, {}, _per_point(1.0)),
    "amin": OperatorSpec(None, {}, _per_point(1.0)),
    "argmax": OperatorSpec(None, {}, _per_point(1.0)),
    "valid_count": OperatorSpec("n.., C -> ", {}, _per_input(1.0)),
    "cross_entropy": OperatorSpec(None, {}, _per_input(6.0)),
    "nll_loss": OperatorSpec(None, {}, lambda op, extents: _per_input(1.0)(op, extents) / extents["C"]),
    "mse_loss": OperatorSpec(None, {}, _per_input(3.0)),
    "l1_loss": OperatorSpec(None, {}, _per_input(3.0)),
    "smooth_l1_loss": OperatorSpec(None, {}, _per_input(5.0)),
    "huber_loss": OperatorSpec(None, {}, _per_input(5.0)),
    "bce_loss": OperatorSpec(None, {}, _per_input(5.0)),
    "bce_with_logits": OperatorSpec(None, {}, _per_input(8.0)),
    "kl_div": OperatorSpec(None, {}, _per_input(4.0)),
    "opaque": OperatorSpec(None, {}, _touched),
}
