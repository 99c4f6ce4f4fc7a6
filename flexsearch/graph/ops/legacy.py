"""Kinds that still live in the old tables, as objects. Goes when the last family has moved."""

from __future__ import annotations

from typing import Any

from flexsearch.graph.model import Operator
from flexsearch.graph.ops.base import KINDS, Extents, Kernel, KernelContext, OperatorKind, Saved, Shapes, define
from flexsearch.graph.piece import Piece

SAVED = {
    "lstm_cell": Saved(True, True, halves=5),
    **dict.fromkeys(("max_pool1d", "max_pool2d", "adaptive_max_pool1d", "adaptive_max_pool2d"), Saved(True, False, extra=8)),
    **dict.fromkeys(("sum", "mean", "embedding", "argmax", "valid_count", "batch_norm_running"), Saved(False, False)),
    **dict.fromkeys(("softmax", "log_softmax", "dropout"), Saved(False, True)),  # dropout: its mask, of the output's size
    **dict.fromkeys(
        (
            "conv1d", "conv2d", "avg_pool1d", "avg_pool2d", "adaptive_avg_pool1d",
            "adaptive_avg_pool2d", "batch_statistics", "batch_norm", "batch_norm_inference", "layer_norm", "rms_norm",
            "group_norm", "cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1", "bce_with_logits",
        ),
        Saved(True, False),
    ),
}  # fmt: skip
_CONVOLUTIONS = ("conv1d", "conv2d")
WORDS = {
    ("lstm_cell", "h"): "hidden features",
    ("embedding", "v"): "vocabulary",
    ("embedding", "d"): "embedding features",
    ("attention", "h"): "heads",
    ("attention", "k"): "heads",
    ("attention", "g"): "heads of a group",
    ("attention", "q"): "sequence",
    ("attention", "v"): "head features",
    **{(kind, "g"): "channel groups" for kind in (*_CONVOLUTIONS, "group_norm")},
    **{(kind, "o"): "output channels" for kind in _CONVOLUTIONS},
    **{(kind, "c"): "input channels (partial sums)" for kind in _CONVOLUTIONS},
}


class LegacyKind(OperatorKind):
    """A line of the old tables."""

    def __init__(self, name: str) -> None:
        from flexsearch.graph.kinds import KINDS as LIMITS
        from flexsearch.graph.operators import OPERATORS
        from flexsearch.graph.ops.base import BOTH

        spec = OPERATORS[name]
        self.name, self.pattern, self.roles, self.backward = name, spec.pattern, spec.roles, spec.backward
        self.contraction, self.matrix, self.table = spec.contraction, spec.matrix, spec.table
        self.attributes, least, most, self.outputs = LIMITS[name]
        self.inputs = (least, most)
        self.saved = SAVED.get(name, BOTH)
        self.words = {axis: word for (kind, axis), word in WORDS.items() if kind == name}
        self.windows = name.startswith(("conv", "max_pool", "avg_pool", "im2col"))
        self.image = "conv" in name or "pool" in name or "batch_" in name
        self.trivial = name == "dropout"
        self.bookkeeping = name in ("batch_norm_running", "valid_count")
        self.grouped = name in ("batch_statistics", "batch_norm")
        self.free = name in ("view", "permute", "expand", "slice", "unfold", "detach")
        self.backward_reads = "gradients" if name in ("sum", "mean", "im2col") else "inputs"
        self._spec = spec

    def is_free(self, op: Operator) -> bool:
        return self.free or (self.name == "dropout" and op.attributes.get("p") == 0)

    def flops(self, op: Operator, extents: Extents) -> Any:
        return self._spec.flops(op, extents) if self._spec.flops else super().flops(op, extents)

    def check(self, op: Operator, attributes: Any, shapes: tuple[tuple[int, ...], ...]) -> str:
        from flexsearch.graph.rules import RULES

        return RULES[self.name](op, attributes, shapes) if self.name in RULES else ""

    def kernel(self, op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
        from flexsearch.graph import kernels  # noqa: F401
        from flexsearch.graph.kernels_base import _BUILDERS

        return _BUILDERS[self.name](op, piece, shapes, context)

    def saves(self, op: Operator, before: Operator | None) -> Saved:
        if self.name == "dropout" and not op.attributes.get("p", 1.0):
            return Saved(False, False, alias=True)
        return self.saved


def define_legacy() -> None:
    """Every kind of the old table that has no object."""
    from flexsearch.graph.operators import OPERATORS

    for name in OPERATORS:
        if name not in KINDS:
            define(LegacyKind(name))
