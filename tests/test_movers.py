"""Regions of tensors: what covers what, and that layouts become each other whatever lies where."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flexsearch.graph import Box
from flexsearch.lower import Entry, Layout
from flexsearch.runtime.regions import Mover, disjoint, uncovered, whole
from tests.ranks import pool

RANKS = 3


@st.composite
def boxes(draw: st.DrawFn, shape: list[int], most: int = 4) -> list[Box]:
    def interval(size: int) -> tuple[int, int]:
        low = draw(st.integers(0, size - 1))
        return low, draw(st.integers(low + 1, size))

    return [tuple(map(interval, shape)) for _ in range(draw(st.integers(0, most)))]


def counted(shape: list[int], regions: list[Box]) -> Tensor:
    """By element, in how many regions it lies."""
    count = torch.zeros(shape, dtype=torch.int64)
    for box in regions:
        count[tuple(slice(*side) for side in box)] += 1
    return count


@settings(derandomize=True, max_examples=60, deadline=None, database=None)
@given(st.data(), st.lists(st.integers(1, 5), max_size=3))
def test_disjoint_regions_hold_every_element_once(data: st.DataObject, shape: list[int]) -> None:
    parts = data.draw(boxes(shape))
    held = counted(shape, parts) > 0
    assert torch.equal(counted(shape, [box for of_one in disjoint(parts) for box in of_one]), held.long())
    assert torch.equal(counted(shape, uncovered(whole(shape), parts)), (~held).long())


def _moved(source: Layout, destination: Layout, values: Tensor) -> list[Tensor]:
    rank = torch.distributed.get_rank()
    pieces = {
        k: values[entry.term][tuple(slice(*side) for side in entry.box)].clone()
        for k, entry in enumerate(source)
        if entry.device == rank
    }
    made = Mover(source, destination, rank, values.dtype).run(pieces, torch.device("cpu"))
    return [made[k] for k in sorted(made)]


@settings(derandomize=True, max_examples=15, deadline=None, database=None)
@given(data=st.data(), shape=st.lists(st.integers(1, 4), max_size=2), terms=st.integers(1, 3))
def test_every_rank_gets_the_sum_of_all_terms(data: st.DataObject, shape: list[int], terms: int) -> None:
    """Terms that overlap add up, copies of one term count once, and what nobody holds is zero."""
    source = tuple(
        Entry(data.draw(st.integers(0, RANKS - 1)), box, term)
        for term in range(terms)
        for box in data.draw(boxes(shape, 3))
    )
    wanted = tuple(Entry(data.draw(st.integers(0, RANKS - 1)), box, 0) for box in data.draw(boxes(shape)))
    values = torch.randint(1, 100, (terms, *shape))
    total = torch.zeros(shape, dtype=torch.int64)
    for term in range(terms):
        total += values[term] * (counted(shape, [e.box for e in source if e.term == term]) > 0)
    for rank, tensors in enumerate(pool(RANKS).run(_moved, source, wanted, values)):
        own = [entry.box for entry in wanted if entry.device == rank]
        for box, tensor in zip(own, tensors, strict=True):
            assert torch.equal(tensor, total[tuple(slice(*side) for side in box)])
