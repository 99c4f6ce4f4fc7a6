"""Which weights that are kept in parts are gathered together, and before which operators.

One message for each weight costs more than its bytes where weights are small: a block of a small decoder has nine. So
weights that are read one after the other go together, as many as a gradient bucket holds; they follow from the graph
and the options, never from a config.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from flexsearch.graph import Flow, OperatorGraph
from flexsearch.graph.ops import saved_tensors
from flexsearch.lower.rows import NOBODY


def regathered_weights(graph: OperatorGraph, of_weight: Sequence[int]) -> set[int]:
    """Weights (by number) that are let go of after the forward pass and gathered again: those that one stage reads and
    a backward pass needs. ``of_weight``: their stages. A weight that is read through a view stays, as what autograd
    saved refers to it."""
    views = [rule.alias for rule in saved_tensors(graph)]
    again = set()
    for w, tensor in enumerate(graph.of_kind("parameter")):
        readers = readers_of(graph, tensor.name)
        needed = any(graph.has_backward[i] for i, _ in readers)
        if of_weight[w] != NOBODY and needed and not any(views[i] and p == 0 for i, p in readers):
            again.add(w)
    return again


def packs_of(
    graph: OperatorGraph, bucket_bytes: int, stage_of: Sequence[int], regathered: Collection[int]
) -> list[list[int]]:
    """Weights (by number) that are gathered together, those that are read first in front: of one stage, all or none of
    them gathered again, up to ``bucket_bytes`` of their whole sizes. ``stage_of``: by weight. A weight that several
    operators read is alone, as the others would be held as long."""
    packs: list[list[int]] = []
    last: dict[tuple[int, bool], tuple[list[int], int]] = {}
    parameters, first = graph.of_kind("parameter"), first_readers(graph)
    for w in sorted(range(len(parameters)), key=lambda w: (first[w], w)):
        key, nbytes = (stage_of[w], w in regathered), parameters[w].nbytes
        if stage_of[w] == NOBODY or len({i for i, _ in readers_of(graph, parameters[w].name)}) > 1:
            packs.append([w])
            continue
        pack, filled = last.get(key, ([], 0))
        if not pack or filled + nbytes > bucket_bytes:
            pack, filled = [], 0
            packs.append(pack)
        pack.append(w)
        last[key] = pack, filled + nbytes
    return packs


def first_readers(graph: OperatorGraph) -> list[int]:
    """By weight, the first operator that reads it; 0 if none does."""
    return [min((i for i, _ in readers_of(graph, t.name)), default=0) for t in graph.of_kind("parameter")]


def readers_of(graph: OperatorGraph, name: str) -> list[tuple[int, int]]:
    """(operator, operand position) of those that read the value of a tensor."""
    return [(i, p) for i, p in graph.consumers[name] if graph.flows[i][p] != Flow.GRADIENT]


def before_forward(
    graph: OperatorGraph, packs: Sequence[Sequence[int]], stages: Sequence[int], begins: Sequence[int], prefetch: int
) -> dict[int, list[int]]:
    """Operator -> packs (by number) that are gathered before its forward pass, those that are read first in front.
    ``stages``: by pack, NOBODY: it is not listed; ``begins``: by stage, its first operator."""
    first = first_readers(graph)
    needed = {p: min(first[w] for w in pack) for p, pack in enumerate(packs) if stages[p] != NOBODY}
    return _ahead(needed, stages, dict(enumerate(begins)), prefetch)


def before_backward(
    graph: OperatorGraph, packs: Sequence[Sequence[int]], stages: Sequence[int], regathered: Collection[int],
    entered: Mapping[int, Sequence[int]], stage_of: Sequence[int], prefetch: int,
) -> dict[int, list[int]]:  # fmt: skip
    """Operator -> packs (by number) that are gathered again before its backward pass, those that are needed first in
    front. ``entered``: operators that are computed again before an operator's backward pass (``entered_regions``);
    ``stage_of``: by operator."""
    order = [i for i in reversed(range(len(graph.operators))) if graph.has_backward[i]]
    place = {i: k for k, i in enumerate(order)}
    place |= {o: place[i] for i, again in entered.items() for o in again}
    parameters = graph.of_kind("parameter")
    needed = {
        p: min(place[i] for w in pack for i, _ in readers_of(graph, parameters[w].name) if i in place)
        for p, pack in enumerate(packs)
        if pack[0] in regathered
    }
    begins: dict[int, int] = {}
    for k, i in enumerate(order):
        begins.setdefault(stage_of[i], k)
    return {order[k]: row for k, row in _ahead(needed, stages, begins, prefetch).items()}


def _ahead(
    needed: Mapping[int, int], stages: Sequence[int], begins: Mapping[int, int], prefetch: int
) -> dict[int, list[int]]:
    """Place -> packs that are gathered there: each where the pack that is needed ``prefetch`` places before it in its
    stage is, and if there is none, where the stage begins. ``needed``: by pack, the place by which it must be there."""
    places: dict[int, list[int]] = {}
    for k, stage in sorted({(k, stages[p]) for p, k in needed.items()}):
        places.setdefault(stage, []).append(k)
    number = {(stage, k): n for stage, row in places.items() for n, k in enumerate(row)}
    packs_at: dict[int, list[int]] = {}
    for p, k in sorted(needed.items(), key=lambda row: (row[1], row[0])):
        stage = stages[p]
        before = number[stage, k] - prefetch
        packs_at.setdefault(places[stage][before] if before >= 0 else begins[stage], []).append(p)
    return packs_at
