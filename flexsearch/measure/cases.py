"""Which pieces of a graph's operators are measured, and which are too large to be. Plain data, no torch."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from flexsearch.cost.costed import Costed
from flexsearch.errors import ProfileError
from flexsearch.graph.images import images
from flexsearch.graph.model import Operator, OperatorGraph
from flexsearch.graph.notation import Box
from flexsearch.graph.piece import Piece, chunk, make_piece
from flexsearch.graph.precision import PreciseGraph

CALL_FLOPS = {"cpu": 1e11, "cuda": 1e14}
CALL_BYTES = {"cpu": 1e10, "cuda": 1e12}
"""FLOP/s and B/s that no core, and no GPU, exceeds by much: what takes longer than a budget at these is left out."""
CACHE_BYTES = 128 << 20
"""More than caches hold."""


@dataclass(frozen=True)
class Case:
    """A piece to measure. ``key``: its signature. ``shapes``: of the operator's whole inputs. ``held``: regions of the
    inputs that a rank holds, from which the piece cuts what it reads. ``images``: inputs in the memory format of these.
    ``precise``: of a graph in mixed precision, whose kernels cast what they read.
    """

    key: str
    costed: Costed
    extents: Mapping[str, int]
    piece: Piece
    shapes: tuple[tuple[int, ...], ...]
    held: tuple[Box | None, ...]
    images: tuple[bool, ...]
    precise: bool = False


def plan(graph: OperatorGraph, max_parts: int, measured: frozenset[str] = frozenset()) -> list[list[Case]]:
    """Rounds of cases in the graph's order, each with at most one piece of each operator, and each piece in one round.

    The first round is the whole graph as far as it is not measured. Operators of one form stand in a round with the
    same piece: it is measured at all their places, as far as the pieces before it leave anything of the caches.
    """
    owner: dict[str, str] = {}
    columns: list[list[Case]] = []
    pictures = images(graph)
    for index in range(len(graph.operators)):
        costed = Costed.of(graph, index)
        whole = costed.signature(costed.op.sizes)
        flags = tuple(name in pictures for name in costed.op.inputs)
        pieces = _cases(costed, flags, max_parts, isinstance(graph, PreciseGraph))
        cases = [case for case in pieces if case.key not in measured]
        columns.append([case for case in cases if owner.setdefault(case.key, whole) == whole])
    return [_within_caches([case for case in row if case is not None]) for row in itertools.zip_longest(*columns)]


def _within_caches(cases: Sequence[Case]) -> list[Case]:
    """These cases without repetitions once the ones before them touch more than caches hold."""
    seen: set[str] = set()
    kept, touched = [], 0.0
    for case in cases:
        if case.key not in seen or touched < CACHE_BYTES:
            kept.append(case)
            touched += case.costed.forward(case.extents).nbytes
        seen.add(case.key)
    return kept


def whole_case(costed: Costed, flags: tuple[bool, ...]) -> Case:
    """The piece that is all of an operator. ``flags``: inputs in the memory format of images."""
    (whole,) = _cases(costed, flags, 1)
    return whole


def count(rounds: Sequence[Sequence[Case]]) -> int:
    """How many pieces there are to measure."""
    return sum(len({case.key for case in cases}) for cases in rounds)


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


def _cases(costed: Costed, flags: tuple[bool, ...], max_parts: int, precise: bool = False) -> list[Case]:
    """The distinct pieces of an operator, those that plans have most first (``_rareness``)."""
    op = costed.op
    inputs = tuple(t.shape for t in costed.inputs)
    outputs = [t.shape for t in costed.outputs]
    whole = make_piece(op, {axis: (0, size) for axis, size in op.sizes.items()}, inputs, outputs)
    cases: dict[str, Case] = {}
    for degrees in sorted(_degrees(op, max_parts), key=lambda degrees: _rareness(op, degrees)):
        # Of parts that differ by one, the first is the smallest and the last the largest.
        ends = [
            {chunk(size, degrees.get(axis, 1), 0), chunk(size, degrees.get(axis, 1), degrees.get(axis, 1) - 1)}
            for axis, size in op.sizes.items()
        ]
        for intervals in itertools.product(*map(sorted, ends)):
            axes = dict(zip(op.sizes, intervals, strict=True))
            extents = {axis: high - low for axis, (low, high) in axes.items()}
            key = costed.signature(extents)
            if key not in cases:
                piece = make_piece(op, axes, inputs, outputs)
                cases[key] = Case(key, costed, extents, piece, inputs, _held(piece, whole, inputs), flags, precise)
    return list(cases.values())


def _rareness(op: Operator, degrees: Mapping[str, int]) -> tuple[int, bool, bool, int]:
    """What orders the pieces of an operator where time may end before all are measured: whole, then split on one axis,
    by samples before others (every data-parallel layout and every microbatch has those), into a power of two before
    other numbers, many parts before few; then on several axes."""
    split, parts = [axis for axis, degree in degrees.items() if degree > 1], prod(degrees.values())
    by_samples = all(op.roles[axis] == "sample" for axis in split)
    return len(split), not by_samples, parts & (parts - 1) != 0, -parts


def _held(piece: Piece, whole: Piece, shapes: Sequence[tuple[int, ...]]) -> tuple[Box | None, ...]:
    """Regions that a rank holds of inputs: what the piece reads; all of a dimension of which the ``whole`` operator
    reads a part, as each half of a rotary embedding does."""
    return tuple(
        None if box is None or all_read is None
        else tuple(
            interval if of_all == (0, size) else (0, size)
            for interval, of_all, size in zip(box, all_read, shape, strict=True)
        )
        for box, all_read, shape in zip(piece.inputs, whole.inputs, shapes, strict=True)
    )  # fmt: skip


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
