"""A plan without the exact synchronisation of weights that follow a recipe, and without what makes workers wait for
each other that go by themselves."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from copy import copy
from dataclasses import replace

import numpy as np

from flexsearch.errors import RuntimeFailure
from flexsearch.graph.samples import COUNTS
from flexsearch.lower import Communication, Edge, Lowered, Reshard
from flexsearch.lower.recipes import RecipeGroup
from flexsearch.lower.reshard import assemble
from flexsearch.lower.weights import unsynchronised


def without_synchronisation(lowered: Lowered, names: Collection[str]) -> Lowered:
    """``lowered``, but every device keeps the gradients that it makes itself of the weights of these ``names``. Tasks
    keep their numbers. Raises RuntimeFailure if devices of a plan at a smaller batch make the same gradients."""
    if not names:
        return lowered
    lowering, tensors = lowered.lowering, lowered.graph.tensor
    dropped = {w for w, weight in enumerate(lowered.weights) if weight.tensor in names and weight.plan.sync is not None}
    weights = list(lowered.weights)
    for w in dropped:
        plan, name = weights[w].plan, weights[w].tensor
        assert plan.sync is not None
        terms = [(entry.term, entry.box) for entry in plan.sync.source]
        if len(set(terms)) < len(terms):
            raise RuntimeFailure(
                f"replicas of {name!r} would make the same gradients of a batch of {lowered.batch} samples, which a "
                "recipe would count twice",
                "Give batches that divide evenly (step.loader(..., drop_last=True)).",
            )
        local = unsynchronised(plan, tensors[name].itemsize, lowering.planner, lowering.layouts)
        weights[w] = replace(weights[w], plan=local)
    tasks = copy(lowered.tasks)
    tasks.communication = [_without(what, dropped) for what in lowered.tasks.communication]
    result = replace(lowered, weights=tuple(weights))
    vars(result)["tasks"] = tasks
    return result


def _without(what: Communication | None, dropped: Collection[int]) -> Communication | None:
    """A communication without the synchronisation of some weights: of nobody, if nothing is left."""
    if what is None or what.purpose != "synchronise":
        return what
    members = tuple(member for member in what.members if member.key not in dropped)
    if len(members) == len(what.members):
        return what
    if not members:
        return replace(what, members=(), devices=(), senders=(), receivers=(), one_call=False)
    exchanges = [member.what for member in members]
    return replace(
        what, members=members,
        senders=tuple(sorted({d for x in exchanges for d in x.senders})),
        receivers=tuple(sorted({d for x in exchanges for d in x.receivers})),
    )  # fmt: skip


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
    tasks = copy(lowered.tasks)
    tasks.communication = [
        replace(what, members=(), devices=(), senders=(), receivers=(), one_call=False)
        if what is not None and what.purpose == "forward" and {member.key for member in what.members} <= dropped
        else what
        for what in lowered.tasks.communication
    ]
    worker = list(range(len(lowered.topology.devices)))
    for what in filter(None, tasks.communication):
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
    result = replace(lowered, edges=tuple(edges))
    vars(result)["tasks"] = tasks
    return result


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
    return assemble(lowering.planner, many, wanted, first, first + np.uint32(size), itemsize)
