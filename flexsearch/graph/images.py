"""Which tensors are images: those have a memory format of their own (``ops.formats``)."""

from __future__ import annotations

from flexsearch.graph.model import OperatorGraph
from flexsearch.graph.ops import kind_of


def images(graph: OperatorGraph) -> frozenset[str]:
    """Tensors in the memory format of images: those of four dimensions that a step is given, what convolutions write,
    and what operators make of these (their first operand). Reshaping and permuting end it: heads of attention are no
    images, and attention over them is three times slower in that format."""
    names = {t.name for t in graph.tensors if len(t.shape) == 4 and t.kind in ("input", "buffer", "parameter")}
    for op in graph.operators:
        if op.kind.startswith("conv") or (op.inputs and op.inputs[0] in names and not kind_of(op).is_free(op)):
            names.update(name for name in op.outputs if len(graph.tensor[name].shape) == 4)
    return frozenset(names)
