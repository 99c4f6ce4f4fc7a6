"""What the backward of an operator needs of its forward: the rule behind the lifetime of activations.

It follows what PyTorch's autograd saves. Kinds that are not listed keep both, which is never too little.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from flexsearch.graph import Operator, OperatorGraph


class Keep(NamedTuple):
    """Whether inputs and outputs live until the operator's backward. ``alias``: the output is the input's memory.
    Besides, for each element of the outputs: ``extra`` bytes (the int64 indices of a max pool), and as much memory as
    so many half elements have."""

    inputs: bool
    outputs: bool
    alias: bool = False
    extra: int = 0
    halves: int = 0

    def besides(self, elements: Any, itemsize: int) -> Any:
        """Bytes kept besides of an output of so many elements (a number, or an array of them)."""
        return elements * self.extra + elements * self.halves * itemsize // 2


NOTHING = Keep(False, False)
INPUTS = Keep(True, False)
OUTPUTS = Keep(False, True)
BOTH = Keep(True, True)
INDICES = Keep(True, False, extra=8)
GATES = Keep(True, True, halves=5)
"""Of an LSTM cell: four gates and tanh(c), shared by its two outputs."""
ALIAS = Keep(False, False, alias=True)

_STRIDED = ("permute", "expand", "slice")
_KINDS = {
    **dict.fromkeys(("view", *_STRIDED), ALIAS),
    "lstm_cell": GATES,
    **dict.fromkeys(("max_pool1d", "max_pool2d", "adaptive_max_pool1d", "adaptive_max_pool2d"), INDICES),
    **dict.fromkeys(
        ("cat", "pad", "sum", "mean", "embedding", "argmax", "valid_count", "batch_norm_running"), NOTHING
    ),
    **dict.fromkeys(("softmax", "log_softmax", "dropout"), OUTPUTS),  # dropout: its mask, of the output's size
    **dict.fromkeys(
        (
            "conv1d", "conv2d", "linear", "einsum", "addmm", "avg_pool1d", "avg_pool2d", "adaptive_avg_pool1d",
            "adaptive_avg_pool2d", "batch_statistics", "batch_norm", "batch_norm_inference", "layer_norm", "rms_norm",
            "group_norm", "cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1", "bce_with_logits",
        ),
        INPUTS,
    ),
}  # fmt: skip

_OF_RESULT = {"relu", "sigmoid", "tanh", "exp", "sqrt", "rsqrt", "reciprocal", "expm1", "tan"}
_LINEAR = {"add", "sub", "rsub", "neg", "clone", "_to_copy", "to", "copy", "alias", "detach", "zeros_like", "ones_like"}
_SCALED = {"mul", "div"}  # by a number they need nothing, by a tensor both factors


def keep(op: Operator, before: Operator | None = None) -> Keep:
    """The rule for ``op``. ``before``: what makes its first input: a view of something strided is a copy."""
    if op.kind == "view" and before is not None and before.kind in _STRIDED:
        return NOTHING
    if op.kind == "dropout" and not op.attributes.get("p", 1.0):
        return ALIAS
    if op.kind != "pointwise":
        return _KINDS.get(op.kind, BOTH)
    parts = str(op.attributes.get("target", "")).split(".")
    name = (parts[1] if len(parts) > 1 else parts[0]).removesuffix("_")
    if name in _LINEAR or (name in _SCALED and len(op.inputs) == 1):
        return NOTHING
    return OUTPUTS if name in _OF_RESULT else INPUTS


def rules(graph: OperatorGraph) -> tuple[Keep, ...]:
    """The rule for each operator of a graph."""
    makers = (graph.producer.get(op.inputs[0]) if op.inputs else None for op in graph.operators)
    return tuple(
        keep(op, None if maker is None else graph.operators[maker])
        for op, maker in zip(graph.operators, makers, strict=True)
    )


def trivial(op: Operator) -> bool:
    """Whether ``op`` only moves or maps single elements and has no weights of interest: a view or pointwise."""
    return op.kind in ("view", "permute", "expand", "slice", "pointwise", "dropout", "pad", "cat")
