"""What the backward pass computes again: the forward passes of checkpointed regions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from itertools import groupby, pairwise
from typing import Final, get_args

from flexsearch.errors import StrategyError
from flexsearch.graph import OperatorGraph
from flexsearch.strategy.records import Recompute

NO_REGION: Final = -1
"""In the place of a region: the operator is not computed again."""
_CORE: Final = frozenset({"attention", "dropout", "softmax", "safe_softmax"})
"""Kinds that selective recomputation computes again (Korthikanti et al., MLSys 2023, section 5)."""


def regions_of(
    graph: OperatorGraph, recompute: Recompute, stage_of: Sequence[int], blocks: int | tuple[int, ...] | None = None
) -> list[int]:  # fmt: skip
    """By operator, the checkpointed region that it belongs to; NO_REGION: none.

    A region is a run of operators in the order of the graph, in one stage. Its whole forward pass is computed again
    before the first of its backward tasks, as PyTorch's checkpoint does; only what it reads from outside is kept.
    ``full``: each call of a repeated module (``layers.3``) is one; where there are none, what lies between two sums of
    activations that all that follows goes through. ``attention``: runs of fused attention; scores, softmax, dropout and
    the product with the values. ``blocks``: of each stage only so many, the first ones (Megatron-LM's
    ``--recompute-method block``), the same number or one by stage; None: all. Raises StrategyError where a graph has no
    such region."""
    if recompute == "none":
        return [NO_REGION] * len(graph.operators)
    keys = _core_attention(graph) if recompute == "attention" else _repeated(graph) or _between_sums(graph)
    regions, number, of_stage = [NO_REGION] * len(graph.operators), 0, Counter[int]()
    most = blocks if isinstance(blocks, tuple) else (blocks,) * (max(stage_of) + 1)
    for (key, stage), run in groupby(range(len(keys)), key=lambda i: (keys[i], stage_of[i])):
        members = list(run)
        limit = most[stage]
        if key and any(graph.has_backward[i] for i in members) and (limit is None or of_stage[stage] < limit):
            for i in members:
                regions[i] = number
            number += 1
            of_stage[stage] += 1
    if not number and not (isinstance(blocks, tuple) and any(keys)):  # stages with numbers may have no regions
        what = "attention" if recompute == "attention" else "repeated block"
        raise StrategyError(
            f"graph {graph.name!r} has no {what} that could be computed again",
            'Use recompute "none"' + (' or "full".' if recompute == "attention" else "."),
        )
    return regions


def recomputations(graph: OperatorGraph) -> dict[Recompute, list[int]]:
    """What can be computed again in a graph: by kind, the regions of a plan of one stage."""
    regions: dict[Recompute, list[int]] = {}
    for recompute in get_args(Recompute):
        with suppress(StrategyError):
            regions[recompute] = regions_of(graph, recompute, [0] * len(graph.operators))
    return regions


def _repeated(graph: OperatorGraph) -> list[str]:
    """By operator, the outermost module that it is in and that is one of several ("layers.3" beside "layers.2"), each
    with two operators or more that have weights; empty if there is none at all."""
    children: dict[str, dict[str, int]] = {}
    names = {t.name for t in graph.of_kind("parameter")}
    for op in graph.operators:
        for parent, child in _numbered(op.module):
            count = children.setdefault(parent, {})
            count[child] = count.get(child, 0) + (not names.isdisjoint(op.inputs))
    blocks = {parent for parent, count in children.items() if len(count) > 1 and min(count.values()) > 1}
    keys = [next((child for parent, child in _numbered(op.module) if parent in blocks), "") for op in graph.operators]
    return keys if any(keys) else []


def _numbered(module: str) -> list[tuple[str, str]]:
    """("layers", "layers.3") for every part of a dotted name that is a number, the outermost first."""
    parts = module.split(".")
    return [(".".join(parts[:k]), ".".join(parts[: k + 1])) for k, part in enumerate(parts) if k and part.isdigit()]


def _between_sums(graph: OperatorGraph) -> list[str]:
    """By operator, a name for the run between two residual points: sums of two activations that are the only one which
    is read later. Nothing before the first and after the last."""
    last = {name: max((i for i, _ in users), default=-1) for name, users in graph.consumers.items()}
    alive: set[str] = set()
    points = []
    for i, op in enumerate(graph.operators):
        alive = {n for n in (*alive, *op.outputs) if n in graph.differentiable and last[n] > i}
        added = [n for n in op.inputs if graph.tensor[n].kind == "activation"]
        if op.kind == "pointwise" and len(set(added)) == 2 and alive == set(op.outputs):
            points.append(i)
    keys = [""] * len(graph.operators)
    for k, (first, end) in enumerate(pairwise(points)):
        keys[first + 1 : end + 1] = [str(k)] * (end - first)
    return keys


def _core_attention(graph: OperatorGraph) -> list[str]:
    """By operator, the attention that it belongs to. Of attention in parts: the softmax, the dropout of its result, the
    product that it is read by, and what lies between the product that makes the scores and the softmax."""
    keys = [""] * len(graph.operators)
    for i, op in enumerate(graph.operators):
        if op.kind == "attention":
            keys[i] = op.name
        elif op.kind in ("softmax", "safe_softmax"):
            first = _back_to_product(graph, i)
            last = _on_to_product(graph, i)
            if first is not None and last is not None:
                keys[first : last + 1] = [op.name] * (last + 1 - first)
    return keys


def _back_to_product(graph: OperatorGraph, i: int) -> int | None:
    """The contraction of two activations that a softmax is of, through elementwise operators; None: there is none."""
    while graph.operators[i].kind not in ("einsum", "linear"):
        inputs = (n for n in graph.operators[i].inputs if n in graph.differentiable)
        producers = [graph.producer[n] for n in inputs if n in graph.producer]
        if not producers:
            return None
        i = producers[0]
    return i if graph.operators[i].kind == "einsum" else None


def _on_to_product(graph: OperatorGraph, i: int) -> int | None:
    """The contraction that reads a softmax, through dropout and views; None: there is none."""
    while graph.operators[i].kind != "einsum":
        users = graph.consumers[graph.operators[i].outputs[0]]
        if not users or graph.operators[users[0][0]].kind not in (*_CORE, "einsum", "view", "permute", "expand"):
            return None
        i = users[0][0]
    return i


def entered_regions(graph: OperatorGraph, regions: Sequence[int]) -> dict[int, list[int]]:
    """Operator -> the operators of the checkpointed region that is entered with its backward pass, in order."""
    entry: dict[int, int] = {}
    for i in reversed(range(len(graph.operators))):
        if graph.has_backward[i]:
            entry.setdefault(regions[i], i)
    entered: dict[int, list[int]] = {}
    for o, region in enumerate(regions):
        if region != NO_REGION:
            entered.setdefault(entry[region], []).append(o)
    return entered
