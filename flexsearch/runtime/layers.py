"""Where the second half of a backward pass goes on: from the gradients of results that the first half leaves, at each
call that reads weights. Autograd by itself would go through all activations once more to reach the weights."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from flexsearch.runtime.body import Call


class Layer(NamedTuple):
    """Calls that read weights, none of which reads what another has computed: one call of autograd serves them all.
    ``results``: places of what they compute; ``weights``: (number of the call, leaf) of what they read."""

    results: tuple[int, ...]
    weights: tuple[tuple[int, int], ...]


def layers_of(calls: Sequence[Call], weights: Collection[int]) -> tuple[Layer, ...]:
    """The layers of a segment, last ones first; ``weights``: its leaves that are trained."""
    depth: dict[int | None, int] = {}
    rows: dict[int, tuple[list[int], list[tuple[int, int]]]] = {}
    for k, call in enumerate(calls):
        deepest = max((depth.get(place, 0) for place in call.places), default=0)
        if own := [(k, place) for place in dict.fromkeys(call.places) if place in weights and place is not None]:
            deepest += 1
            results, read = rows.setdefault(deepest, ([], []))
            results.extend(call.results)
            read.extend(own)
        depth |= dict.fromkeys(call.results, deepest)
    return tuple(Layer(tuple(results), tuple(read)) for _, (results, read) in sorted(rows.items(), reverse=True))
