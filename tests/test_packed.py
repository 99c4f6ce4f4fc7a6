"""Records that compiled code takes by pointer: fields are read and written as in Python, whatever is nested."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from numba import njit

from flexsearch.packed import packed


@packed
class Inner(NamedTuple):
    grid: Any
    row: Any


@packed
class Outer(NamedTuple):
    inner: Inner
    total: Any


@njit(nogil=True, _nrt=False)
def add_row(outer: Outer, k: int) -> int:
    for j in range(outer.inner.grid.shape[1]):
        outer.total[k] += outer.inner.grid[k, j] * outer.inner.row[j]
    return len(outer.inner.row)


@njit(nogil=True, _nrt=False)
def add_rows(outer: Outer) -> int:
    columns = 0
    for k in range(len(outer.total)):
        columns += add_row(outer, k)
    return columns


def record(rows: int, columns: int, dtype: type = np.float64) -> Outer:
    grid = np.arange(rows * columns, dtype=dtype).reshape(rows, columns)
    return Outer(Inner(grid, np.arange(columns, dtype=np.uint32)), np.zeros(rows))


def test_fields_of_nested_records_are_read_and_written() -> None:
    outer = record(3, 4)
    assert add_rows(outer) == 12
    np.testing.assert_array_equal(outer.total, outer.inner.grid @ outer.inner.row)


def test_each_record_has_arrays_of_its_own() -> None:
    """numba looks at the type of the first record only; the others must not be taken for it."""
    outers = [record(rows, columns) for rows, columns in ((2, 2), (5, 3), (1, 7))]
    for outer in outers:
        add_rows(outer)
    for outer in outers:
        np.testing.assert_array_equal(outer.total, outer.inner.grid @ outer.inner.row)


def test_element_types_are_part_of_the_type() -> None:
    outer = record(3, 4, np.int64)
    add_rows(record(3, 4))
    add_rows(outer)
    np.testing.assert_array_equal(outer.total, outer.inner.grid @ outer.inner.row)


def test_a_replaced_field_is_seen() -> None:
    outer = record(3, 4)
    add_rows(outer)
    other = outer._replace(total=np.zeros(3))
    add_rows(other)
    np.testing.assert_array_equal(other.total, outer.total)
    assert isinstance(other, Outer)


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_has_descriptors_of_its_own(again: Callable[[Outer], Outer]) -> None:
    outer = record(3, 4)
    add_rows(outer)
    other = again(outer)
    assert "packed_address" not in vars(other) and isinstance(other, Outer)
    other = other._replace(total=np.zeros(3))
    add_rows(other)
    np.testing.assert_array_equal(other.total, outer.total)
    assert other.packed_address != outer.packed_address


def test_arrays_that_compiled_code_would_misread_are_refused() -> None:
    with pytest.raises(TypeError, match=r"Inner\.grid must be a C-contiguous, writable array"):
        add_rows(Outer(Inner(np.zeros((4, 3)).T, np.zeros(4, np.uint32)), np.zeros(3)))


def test_an_error_on_the_way_to_the_arrays_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal may arrive while compiled code is called."""
    add_rows(record(3, 4))

    def interrupted(self: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(Outer, "packed_address", property(interrupted), raising=False)
    with pytest.raises(KeyboardInterrupt):
        add_rows(record(3, 4))
