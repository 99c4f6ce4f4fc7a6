"""Which operators of an unrolled recurrent network lie at the same depth: the layers that experts place on devices.

A layer is a set of operators that read the same weight in the same way: its steps. It is recurrent where one of them
depends on another. The depth of a layer is one more than that of the layers that feed its first step from below; so
an encoder and a decoder lie side by side, as in Wu et al. (2016).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate
from math import inf

from flexsearch.graph import OperatorGraph


def depths(graph: OperatorGraph) -> tuple[int, ...] | None:
    """Depth of each operator, from 0 without gaps; None if no layer is recurrent.

    Operators outside of layers have the depth of the deepest layer that they read from, those before all layers (an
    embedding) that of the first layer that reads from them.
    """
    layer = unrolled(graph)
    before = [tuple(graph.producer[n] for n in op.inputs if n in graph.producer) for op in graph.operators]
    if not _recurrent(layer, before):
        return None
    states = _state_operands(graph, layer)
    of_layer: dict[int, int] = {}
    depth: list[int] = []
    for i, op in enumerate(graph.operators):
        own = layer.get(i)
        read = [
            depth[graph.producer[name]]
            for position, name in enumerate(op.inputs)
            # A decoder may start from an encoder's last state, which is no input from below.
            if name in graph.producer and (own, position) not in states
        ]
        base = max(read, default=-1)
        depth.append(base if own is None else of_layer.setdefault(own, base + 1))
    for i in reversed(range(len(depth))):
        if depth[i] < 0:
            readers = {c for name in graph.operators[i].outputs for c, _ in graph.consumers[name]}
            depth[i] = min((depth[c] for c in readers if depth[c] >= 0), default=0)
    return tuple(depth)


def unrolled(graph: OperatorGraph) -> dict[int, int]:
    """Operator -> the first operator of its layer, for operators that share a weight with others of their pattern."""
    first: dict[int, int] = {}

    def root(i: int) -> int:
        while first.setdefault(i, i) != i:
            i = first[i]
        return i

    for tensor in graph.of_kind("parameter"):
        alike: dict[tuple[str, str], list[int]] = defaultdict(list)
        for i, _ in graph.consumers[tensor.name]:
            alike[graph.operators[i].kind, graph.operators[i].pattern].append(i)
        for steps in alike.values():
            for i in steps[1:]:
                a, b = root(steps[0]), root(i)
                first[max(a, b)] = min(a, b)
    return {i: root(i) for i in sorted(first)}


def _recurrent(layer: dict[int, int], before: Sequence[Sequence[int]]) -> bool:
    """Whether an operator of some layer depends on another of it."""
    bit = {number: 1 << k for k, number in enumerate(sorted(set(layer.values())))}
    above: list[int] = []  # as bits: the layers that an operator and what it depends on belong to
    for i, producers in enumerate(before):
        reached = 0
        for p in producers:
            reached |= above[p]
        own = bit[layer[i]] if i in layer else 0
        if reached & own:
            return True
        above.append(reached | own)
    return False


def _state_operands(graph: OperatorGraph, layer: dict[int, int]) -> set[tuple[int | None, int]]:
    """(layer, operand position) of what a layer's operators read from other operators of it."""
    return {
        (own, position)
        for i, own in layer.items()
        for position, name in enumerate(graph.operators[i].inputs)
        if layer.get(graph.producer.get(name, -1)) == own
    }


def balance(loads: Sequence[float], count: int) -> list[int]:
    """Which of ``count`` places (at most as many as ``loads``) each load goes to: in order, at least one to each place,
    and so that the sum of the places' squared loads is least."""
    total = [0.0, *accumulate(loads)]
    least = [0.0] + [inf] * len(loads)  # [n]: of the first n loads on the places so far
    cuts: list[list[int]] = []
    for place in range(count):
        costs = [
            [(least[s] + (total[n] - total[s]) * (total[n] - total[s]), s) for s in range(place, n)]
            for n in range(len(loads) + 1)
        ]
        best = [min(row, default=(inf, 0)) for row in costs]
        least = [cost for cost, _ in best]
        cuts.append([start for _, start in best])
    places, end = [0] * len(loads), len(loads)
    for place in reversed(range(count)):
        start = cuts[place][end]
        places[start:end] = [place] * (end - start)
        end = start
    return places
