"""Rewrites of a rank's program: calls of a segment that one kernel carries out faster together, with the same results.

They stand here because whether they apply follows from the pieces of the rank: what is split has communication in
between. A rewrite changes the calls of a segment before anything reads them; ``listing`` shows them under its name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from flexsearch.graph import Box
from flexsearch.graph.model import Operator
from flexsearch.graph.ops.batch_norm import batch_norm_at_once
from flexsearch.lower import Lowered
from flexsearch.runtime.instructions import Call, Segment

Kernel = Callable[..., Any]
JOINT: Final[Mapping[str, Callable[[Sequence[Operator], Sequence[Kernel]], Kernel]]] = {
    "batch_norm_at_once": batch_norm_at_once
}
"""By name of a rewrite: the kernel of a call that carries out several operators, from theirs."""
CUTS: Final = "slices_at_once"
"""Name of the rewrite that cuts a tensor into several parts; ``parts`` of such a call are by operator."""


def rewrite(lowered: Lowered, device: int, segment: Segment) -> None:
    """Apply all rewrites to the calls of a segment."""
    _join_batch_norms(lowered, device, segment)
    _join_slices(segment)


def _join_batch_norms(lowered: Lowered, device: int, segment: Segment) -> None:
    """``batch_statistics``, ``batch_norm`` -> ``batch_norm_at_once``, where a device has the whole batch (or group);
    with ``batch_norm_running``, where that reads the statistics there.

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
            running = _running(lowered, segment, own)
            others = [norms[0], *running]
            joined = Call(
                tuple(o for call in (statistics, *others) for o in call.operators), "batch_norm_at_once",
                (x, *affine, *(a for call in running for a in call.arguments[1:])),
                tuple(r for call in (statistics, *others) for r in call.results), {},
            )  # fmt: skip
            segment.calls[segment.calls.index(statistics)] = joined
            for call in others:
                segment.calls.remove(call)


def _running(lowered: Lowered, segment: Segment, statistics: int) -> list[Call]:
    """The call that alone reads these statistics, a result of the segment, for running ones that the step keeps, in a
    list; empty if they are read elsewhere, may be computed twice, or are not whole buffers."""
    calls = [c for c in segment.calls if c.kind == "batch_norm_running" and c.arguments[0] == ~statistics]
    outside = any(result == statistics for result, _ in segment.exports)
    if outside or segment.region >= 0 or len(calls) != 1 or calls[0].parts:
        return []
    kept = {lowered.edges[e].tensor for e in lowered.update_edges.values()}
    outputs = lowered.graph.operators[calls[0].operators[0]].outputs
    whole = all(a is not None and a >= 0 for a in calls[0].arguments[1:])
    return calls if whole and kept.issuperset(outputs) else []


def _has_all(lowered: Lowered, device: int, statistics: Call, norm: Call) -> bool:
    """Whether a device normalises, with the statistics of all of it, just what it takes them of, at the place of the
    latter: the weights are there."""
    x, _, *affine = norm.arguments
    if statistics.parts or norm.parts or statistics.arguments != (x,):
        return False
    if any(a is None or (a < 0 and ~a > statistics.results[0]) for a in affine):
        return False
    piece = lowered.placed[norm.operators[0]].piece_on(device)
    return "g" not in lowered.graph.operators[norm.operators[0]].sizes or piece.extent("g") == 1


def _join_slices(segment: Segment) -> None:
    """Slices that side by side are all of a tensor -> one call that cuts it up, as queries, keys and values from one
    projection. The gradient of each slice alone is as large as the whole tensor; here the parts make it together."""
    of_tensor: dict[int, list[Call]] = {}
    for call in segment.calls:
        if call.kind == "slice" and len(call.arguments) == 1 and 0 in call.parts and call.arguments[0] is not None:
            of_tensor.setdefault(call.arguments[0], []).append(call)
    for argument, calls in of_tensor.items():
        parts = {k: call.parts[0] for k, call in enumerate(calls)}
        if len(calls) == 1 or cut_dimension(list(parts.values())) is None:
            continue
        operators = tuple(o for call in calls for o in call.operators)
        results = tuple(r for call in calls for r in call.results)
        joined = Call(operators, CUTS, (argument,), results, parts)
        segment.calls[segment.calls.index(calls[0])] = joined
        for call in calls[1:]:
            segment.calls.remove(call)


def cut_dimension(parts: Sequence[tuple[Box, Box]]) -> int | None:
    """The dimension in which parts (region held, region read) lie side by side and are all that is held; None if they
    do not, or overlap."""
    held = parts[0][0]
    if any(part[0] != held for part in parts):
        return None
    differ = {d for _, read in parts for d, (a, b) in enumerate(zip(read, held, strict=True)) if a != b}
    if len(differ) != 1:
        return None
    (d,) = differ
    ranges = sorted(read[d] for _, read in parts)
    ends = [held[d][0], *(stop for _, stop in ranges)]
    return d if ends[:-1] == [start for start, _ in ranges] and ends[-1] == held[d][1] else None
