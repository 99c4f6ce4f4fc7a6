"""A plan without the exact synchronisation of weights that follow a recipe, and without what makes workers wait for
each other that go by themselves."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np

from flexsearch.errors import RuntimeFailure
from flexsearch.graph.samples import COUNTS
from flexsearch.lower import Communication, Edge, Lowered, Reshard
from flexsearch.lower.recipes import RecipeGroup
from flexsearch.lower.weights import unsynchronised


def without_synchronisation(lowered: Lowered, names: Collection[str]) -> Lowered:
    """``lowered``, but every device keeps the gradients that it makes itself of the weights of these ``names``. What
    recipes do is left out: it is not the program's (``synchronisation``). Tasks keep their numbers."""
    if not names:
        return lowered
    lowering = lowered.lowering
    weights = list(lowered.weights)
    for w, weight in enumerate(weights):
        if weight.tensor in names and weight.plan.sync is not None:
            itemsize = lowered.moved("synchronise", w).itemsize
            local = unsynchronised(weight.plan, itemsize, lowering.planner, lowering.layouts)
            weights[w] = replace(weight, plan=local)
    return _without(_replaced(lowered, weights=tuple(weights)), lambda what: bool(what.recipe))


def _replaced(lowered: Lowered, **changes: Any) -> Lowered:
    """With other fields, and the same tasks."""
    result = replace(lowered, **changes)
    vars(result)["tasks"] = lowered.tasks
    return result


def _without(lowered: Lowered, dropped: Callable[[Communication], bool]) -> Lowered:
    """A plan in which nobody takes part in some communications."""
    nobody: dict[str, Any] = {"members": (), "devices": (), "senders": (), "receivers": (), "one_call": False}
    tasks, result = copy(lowered.tasks), copy(lowered)
    tasks.communication = [
        replace(what, **nobody) if what is not None and dropped(what) else what for what in tasks.communication
    ]
    vars(result)["tasks"] = tasks
    return result


def apart(lowered: Lowered, groups: Sequence[RecipeGroup], why: str) -> Lowered:
    """The plan of workers that wait for each other in nothing but the recipes of ``groups``: each has the loss of its
    own samples, on the devices that compute it, where it is a part of the whole batch's; in divisors that count valid
    targets, each takes the other shares for as good as its own. Raises RuntimeFailure if the plan has them wait in
    anything else; ``why``: they must not."""
    size = len(groups[0].devices)
    counts = {name for op in lowered.graph.operators if op.kind in COUNTS for name in op.outputs}
    result_edge = lowered.result_edges[lowered.graph.loss]
    edges, dropped = list(lowered.edges), {result_edge}
    for e, edge in enumerate(edges):
        if edge.forward is not None and edge.forward.exchanges and edge.tensor in counts:
            counted = _as_many_times(lowered, edge, size)
            if counted is not None:
                edges[e] = replace(edge, forward=counted)
                dropped.add(e)
    alone = _without(lowered, lambda what: what.purpose == "forward" and {m.key for m in what.members} <= dropped)
    worker = list(range(len(lowered.topology.devices)))
    for what in filter(None, alone.tasks.communication):
        numbers = {worker[d] for d in what.devices}
        worker = [min(numbers) if number in numbers else number for number in worker]
    for group in groups:
        if len({worker[d] for d in group.devices}) < len(group.devices) or len(group.devices) != size:
            raise RuntimeFailure(
                f"{why}, but the plan has the replicas of {group.names[0]!r} wait for each other in every step",
                "Name all weights by such a recipe, and split nothing but the batch among replicas (batch "
                "normalisation counts the whole batch).",
            )
    edge = edges[result_edge]
    source = edge.forward.source if edge.forward is not None else edge.need
    if len({worker[entry.device] for entry in source}) < len({(worker[x.device], x.term) for x in source}):
        raise RuntimeFailure(f"{why}, but a worker computes the loss in several parts", "Compute it on one device.")
    edges[result_edge] = replace(edge, need=source, forward=None)
    return _replaced(alone, edges=tuple(edges))


def _as_many_times(lowered: Lowered, edge: Edge, size: int) -> Reshard | None:
    """The reshard that brings ``size`` times what a device has itself to where it is read; None where a device reads
    what another one has."""
    assert edge.forward is not None
    lowering, source = lowered.lowering, {entry.device: entry for entry in edge.forward.source}
    if len(source) < len(edge.forward.source) or any(source.get(x.device, x)[1] != x.box for x in edge.need):
        return None
    if any(x.device not in source for x in edge.need):
        return None
    places = [k for k, entry in enumerate(edge.forward.source) for _ in range(size)]
    of = lowering.layouts.intern(edge.forward.source)
    grid = lowering.layouts.grid(of.grid.box[places], np.arange(len(places), dtype=np.uint32))
    first = np.array([size * list(source).index(x.device) for x in edge.need], np.uint32)
    wanted = lowering.layouts.intern(edge.need)
    itemsize = lowered.graph.tensor[edge.tensor].itemsize
    many = lowering.layouts.lay(grid, of.device[places])
    return Reshard(lowering.planner, many, wanted, itemsize, ranges=(first, first + np.uint32(size)))
