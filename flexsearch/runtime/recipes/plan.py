"""A plan without the exact synchronisation of weights that follow a recipe."""

from __future__ import annotations

from collections.abc import Collection
from copy import copy
from dataclasses import replace

from flexsearch.errors import RuntimeFailure
from flexsearch.lower import Communication, Lowered
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
