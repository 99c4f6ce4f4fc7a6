"""Which pieces of a graph's operators are measured, and which are too large to be. Plain data, no torch."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from flexsearch.cost.compute import Costed
from flexsearch.errors import ProfileError
from flexsearch.graph.model import Operator, OperatorGraph
from flexsearch.graph.piece import Piece, chunk, make_piece

CALL_FLOPS = {"cpu": 1e11, "cuda": 1e14}
CALL_BYTES = {"cpu": 1e10, "cuda": 1e12}
"""FLOP/s and B/s that no core, and no GPU, exceeds by much: what takes longer than a budget at these is left out."""


@dataclass(frozen=True)
class Case:
    """A piece to measure. ``key``: its signature. ``shapes``: of the operator's whole inputs."""

    key: str
    costed: Costed
    extents: Mapping[str, int]
    piece: Piece
    shapes: tuple[tuple[int, ...], ...]


def plan(graph: OperatorGraph, max_parts: int, known: frozenset[str] = frozenset()) -> list[list[Case]]:
    """Rounds of cases, each with at most one piece of each operator in the graph's order, and no signature twice.

    The first round is the whole graph as far as it is not known.
    """
    seen, columns = set(known), []
    for index in range(len(graph.operators)):
        costed = Costed.of(graph, index)
        column = [case for case in _cases(costed, max_parts) if case.key not in seen]
        seen.update(case.key for case in column)
        columns.append(column)
    rounds = itertools.zip_longest(*columns)
    return [[case for case in row if case is not None] for row in rounds]


def check_memory(rounds: Sequence[Sequence[Case]]) -> None:
    """Raise ProfileError if a piece alone, with its gradients, needs more memory than this machine has."""
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for cases in rounds:
        for case in cases:
            needed = 4 * case.costed.forward(case.extents).nbytes
            if needed > there:
                raise ProfileError(
                    f"operator {case.costed.op.name!r} needs about {needed / 1e9:.3g} GB to be measured, this machine "
                    f"has {there / 1e9:.3g} GB",
                    "Import the model with a smaller batch.",
                )


def quick_enough(case: Case, kind: str, budget_s: float | None) -> bool:
    """Whether a piece may well be measured within the budget: one call of a kernel cannot be stopped."""
    if budget_s is None:
        return True
    work = case.costed.forward(case.extents)
    return max(work.flops / CALL_FLOPS[kind], work.nbytes / CALL_BYTES[kind]) <= budget_s


def _cases(costed: Costed, max_parts: int) -> list[Case]:
    """The distinct pieces of an operator: whole, then split on one axis, many parts first, then on several."""
    op = costed.op
    inputs = tuple(t.shape for t in costed.inputs)
    outputs = [t.shape for t in costed.outputs]
    found: dict[str, Case] = {}
    for degrees in sorted(_degrees(op, max_parts), key=lambda d: (sum(x > 1 for x in d.values()), -prod(d.values()))):
        # Of parts that differ by one, the first is the smallest and the last the largest.
        ends = [
            {chunk(size, degrees.get(axis, 1), 0), chunk(size, degrees.get(axis, 1), degrees.get(axis, 1) - 1)}
            for axis, size in op.sizes.items()
        ]
        for intervals in itertools.product(*map(sorted, ends)):
            axes = dict(zip(op.sizes, intervals, strict=True))
            extents = {axis: high - low for axis, (low, high) in axes.items()}
            key = costed.signature(extents)
            if key not in found:
                found[key] = Case(key, costed, extents, make_piece(op, axes, inputs, outputs), inputs)
    return list(found.values())


def _degrees(op: Operator, max_parts: int) -> Iterator[dict[str, int]]:
    """Degrees above 1 by axis, with a product of up to ``max_parts``."""

    def extend(axes: Sequence[str], left: int) -> Iterator[dict[str, int]]:
        if not axes:
            yield {}
            return
        for degree in range(1, min(left, op.sizes[axes[0]]) + 1):
            for rest in extend(axes[1:], left // degree):
                yield {axes[0]: degree, **rest} if degree > 1 else rest

    return extend(op.splittable, max_parts)
