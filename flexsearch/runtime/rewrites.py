"""Rewrites of a rank's program: calls of a segment that one kernel carries out faster together, with the same results.

They stand here because whether they apply follows from the pieces of the rank: what is split has communication in
between. A rewrite changes the calls of a segment before anything reads them; ``listing`` shows them under its name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from flexsearch.graph.model import Operator
from flexsearch.graph.ops.batch_norm import batch_norm_at_once
from flexsearch.graph.precision import PreciseGraph
from flexsearch.lower import Lowered
from flexsearch.runtime.instructions import Call, Segment

Kernel = Callable[..., Any]
JOINT: Final[Mapping[str, Callable[[Sequence[Operator], Sequence[Kernel]], Kernel]]] = {
    "batch_norm_at_once": batch_norm_at_once
}
"""By name of a rewrite: the kernel of a call that carries out several operators, from theirs."""


def rewrite(lowered: Lowered, device: int, segment: Segment) -> None:
    """Apply all rewrites to the calls of a segment."""
    if not isinstance(lowered.graph, PreciseGraph):
        _join_batch_norms(lowered, device, segment)


def _join_batch_norms(lowered: Lowered, device: int, segment: Segment) -> None:
    """``batch_statistics``, ``batch_norm`` -> ``batch_norm_at_once``, where a device has the whole batch (or group).

    Its statistics have no gradient, so nobody else may read them but the running ones, which pass none on."""
    operators = lowered.graph.operators
    for statistics in [call for call in segment.calls if call.kind == "batch_statistics"]:
        (own,) = statistics.results
        norms = [call for call in segment.calls if call.kind == "batch_norm" and ~own in call.arguments]
        (name,) = operators[statistics.operators[0]].outputs
        readers = [op.kind for op in operators if name in op.inputs and op.kind != "batch_norm_running"]
        if len(norms) != 1 or len(readers) != 1:
            continue
        if _has_all(lowered, device, statistics, norms[0]):
            x, _, *affine = norms[0].arguments
            joined = Call(
                statistics.operators + norms[0].operators, "batch_norm_at_once", (x, *affine),
                statistics.results + norms[0].results, {},
            )  # fmt: skip
            segment.calls[segment.calls.index(statistics)] = joined
            segment.calls.remove(norms[0])


def _has_all(lowered: Lowered, device: int, statistics: Call, norm: Call) -> bool:
    """Whether a device normalises, with the statistics of all of it, just what it takes them of, at the place of the
    latter: the weights are there."""
    x, _, *affine = norm.arguments
    if statistics.parts or norm.parts or statistics.arguments != (x,):
        return False
    if any(a is None or (a < 0 and ~a > statistics.results[0]) for a in affine):
        return False
    piece = lowered.placed[norm.operators[0]].placement.piece_on(device)
    return "g" not in lowered.graph.operators[norm.operators[0]].sizes or piece.extent("g") == 1
