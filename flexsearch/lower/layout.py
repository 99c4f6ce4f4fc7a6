"""Where the pieces of a tensor lie (layouts).

The search asks for thousands of layouts and looks at few of them, so they are made as arrays, each one once, and become
tuples of entries where somebody reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from flexsearch.compiled import I64, U32, ZERO
from flexsearch.direct import direct
from flexsearch.graph import Box
from flexsearch.lower.interned import (
    FIRST_ROOM,
    Side,
    empty_interned,
    grown,
    intern_grid,
    intern_layout,
    intern_mesh,
    write_side,
)
from flexsearch.lower.keys import MISSING
from flexsearch.packed import zeros

_intern_mesh = direct(intern_mesh)
_intern_grid = direct(intern_grid)
_intern_layout = direct(intern_layout)
_write_side = direct(write_side)


class Entry(NamedTuple):
    """A region of a tensor on a device. Entries with different ``term`` add up where they overlap (partial sums);
    entries of the same term are copies of the same values."""

    device: int
    box: Box
    term: int


Layout = tuple[Entry, ...]


class Grid:
    """The regions and terms of a layout's entries, without their devices: what an operator's degrees come to."""

    def __init__(self, number: int, box: I64, term: U32) -> None:
        self.number, self.box, self.term = number, box, term

    @cached_property
    def volume(self) -> I64:
        """Elements of each entry."""
        elements: I64 = (self.box[:, :, 1] - self.box[:, :, 0]).prod(axis=1)
        return elements

    @cached_property
    def boxes(self) -> list[Box]:
        """The regions as tuples."""
        return [tuple((low, high) for low, high in box) for box in self.box.tolist()]


class Laid:
    """A layout that is known by a number: equal ones are the same object. ``device``: of each entry."""

    def __init__(self, layouts: Layouts, number: int, grid: Grid, device: U32) -> None:
        self._layouts, self.number, self.grid, self.device = layouts, number, grid, device

    def __len__(self) -> int:
        return len(self.device)

    @cached_property
    def entries(self) -> Layout:
        """The layout itself."""
        return tuple(map(Entry, self.device.tolist(), self.grid.boxes, self.grid.term.tolist()))

    @cached_property
    def side(self) -> Side:
        """The layout for compiled code."""
        side = empty_side(len(self), self.grid.box.shape[1])
        _write_side(self._layouts.pool, np.uint64(self.number), side)
        return side


class Layouts:
    """All layouts that were asked for. ``pool``: the same for compiled code, which adds to it; fetch it again after
    ``grow``, or after adding anything."""

    def __init__(self, devices: int = 64) -> None:
        self.pool = empty_interned(FIRST_ROOM, devices)
        self._grids: dict[int, Grid] = {}
        self._laid: dict[int, Laid] = {}

    def __getitem__(self, number: int) -> Laid:
        if (cached := self._laid.get(number)) is None:
            grid, mesh = int(self.pool.layout_grid[number]), int(self.pool.layout_mesh[number])
            cached = self._laid[number] = Laid(self, number, self._grid(grid), self.devices(mesh))
        return cached

    def devices(self, mesh: int) -> U32:
        """The devices of a mesh."""
        devices: U32 = self.pool.device[int(self.pool.mesh_first[mesh]) : int(self.pool.mesh_last[mesh])].copy()
        return devices

    @property
    def filled(self) -> float:
        """How full the fullest array of the pool is."""
        pool = self.pool
        return max(
            float(used[0]) / room
            for used, room in (
                (pool.meshes, len(pool.mesh_first)), (pool.devices, len(pool.device)),
                (pool.grids, len(pool.grid_first)), (pool.entries, len(pool.volume)), (pool.boxes, len(pool.box)),
                (pool.terms, len(pool.term_first)), (pool.layouts, len(pool.layout_grid)),
            )
        )  # fmt: skip

    def grow(self) -> None:
        """Make room for twice as many layouts."""
        self.pool = grown(self.pool)

    def mesh(self, device: U32) -> int:
        """Number of the mesh of these devices."""
        return self._number(lambda: _intern_mesh(self.pool, device, ZERO, np.uint64(len(device))))

    def grid(self, box: I64, term: U32) -> Grid:
        """The grid of ``box`` (entries, dimensions, 2) and ``term``."""
        count, rank = np.uint64(len(term)), np.uint64(box.shape[1])
        number = self._number(lambda: _intern_grid(self.pool, box, term, count, rank))
        if (cached := self._grids.get(number)) is None:
            cached = self._grids[number] = Grid(number, box, term)
        return cached

    def lay(self, grid: Grid, device: U32) -> Laid:
        """The layout with the entries of ``grid`` on these devices."""
        number, mesh = np.uint32(grid.number), np.uint32(self.mesh(device))
        return self[self._number(lambda: _intern_layout(self.pool, number, mesh))]

    def intern(self, layout: Layout) -> Laid:
        """The layout of these entries."""
        dimensions = len(layout[0].box) if layout else 0
        box = np.array([entry.box for entry in layout], dtype=np.int64).reshape(len(layout), dimensions, 2)
        term = np.array([entry.term for entry in layout], dtype=np.uint32)
        return self.lay(self.grid(box, term), np.array([entry.device for entry in layout], dtype=np.uint32))

    def _number(self, intern: Callable[[], Any]) -> int:
        """What ``intern`` says as soon as there is room."""
        while (number := int(intern())) == int(MISSING):
            self.grow()
        return number

    def _grid(self, number: int) -> Grid:
        if (cached := self._grids.get(number)) is None:
            pool = self.pool
            rows, rank = slice(int(pool.grid_first[number]), int(pool.grid_last[number])), int(pool.grid_rank[number])
            count, begin = rows.stop - rows.start, int(pool.grid_box[number])
            box = pool.box[begin : begin + count * rank].reshape(count, rank, 2).copy()
            cached = self._grids[number] = Grid(number, box, pool.term[rows].copy())
        return cached


def empty_side(entries: int, dimensions: int) -> Side:
    """Room for a layout of so many entries and dimensions."""
    return zeros(Side, entries, box=(entries, dimensions, 2), term_first=entries + 1, size=2)


def bounding(boxes: Sequence[Box]) -> Box:
    """The smallest box that holds all of ``boxes`` (at least one)."""
    return tuple((min(low for low, _ in sides), max(high for _, high in sides)) for sides in zip(*boxes, strict=True))
