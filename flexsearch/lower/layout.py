"""Where the pieces of a tensor lie (layouts), and what each device computes of an operator (placements).

The search asks for thousands of layouts and looks at few of them, so they are made as arrays, each one once, and become
tuples of entries where somebody reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from flexsearch.compiled import I64, U32, U64
from flexsearch.graph import Box, Piece
from flexsearch.packed import packed


class Entry(NamedTuple):
    """A region of a tensor on a device. Entries with different ``term`` add up where they overlap (partial sums);
    entries of the same term are copies of the same values."""

    device: int
    box: Box
    term: int


Layout = tuple[Entry, ...]


@packed
class Side(NamedTuple):
    """A layout as compiled code wants it. By entry: ``device``, ``box`` (entries, dimensions, low and high), ``volume``
    (elements), ``same`` (the first entry with the same box). Term t, in ascending order, has the entries
    ``copy[term_first[t]:term_first[t + 1]]``. ``size``: (2,) entries and terms."""

    device: U32
    box: I64
    volume: I64
    same: U32
    term_first: U32
    copy: U32
    size: U64


class Grid:
    """The regions and terms of a layout's entries, without their devices: what an operator's degrees come to."""

    def __init__(self, number: int, box: I64, term: U32) -> None:
        self.number, self.box, self.term = number, box, term

    @cached_property
    def volume(self) -> I64:
        """Elements of each entry."""
        found: I64 = (self.box[:, :, 1] - self.box[:, :, 0]).prod(axis=1)
        return found

    @cached_property
    def boxes(self) -> list[Box]:
        """The regions as tuples."""
        return [tuple((low, high) for low, high in box) for box in self.box.tolist()]

    @cached_property
    def same(self) -> U32:
        """For each entry the first one with the same region."""
        first: dict[bytes, int] = {}
        return np.array([first.setdefault(box.tobytes(), k) for k, box in enumerate(self.box)], dtype=np.uint32)

    @cached_property
    def copies(self) -> tuple[U32, U32]:
        """``term_first`` and ``copy`` of ``Side``."""
        order = np.argsort(self.term, kind="stable")
        ordered = self.term[order]
        starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1], [True]))) if len(order) else [0]
        return np.asarray(starts, dtype=np.uint32), order.astype(np.uint32)


class Laid:
    """A layout that is known by a number: equal ones are the same object. ``device``: of each entry."""

    def __init__(self, number: int, grid: Grid, device: U32) -> None:
        self.number, self.grid, self.device = number, grid, device

    def __len__(self) -> int:
        return len(self.device)

    @cached_property
    def entries(self) -> Layout:
        """The layout itself."""
        return tuple(map(Entry, self.device.tolist(), self.grid.boxes, self.grid.term.tolist()))

    @cached_property
    def side(self) -> Side:
        """The layout for compiled code."""
        grid = self.grid
        first, copy = grid.copies
        size = np.array([len(self.device), len(first) - 1], dtype=np.uint64)
        return Side(self.device, grid.box, grid.volume, grid.same, first, copy, size)

    def elements(self, devices: int) -> I64:
        """Elements that lie on each of ``devices`` devices."""
        if self._elements is None:
            # Exact: sums of integers below 2^53.
            sums = np.bincount(self.device, weights=self.grid.volume, minlength=devices)
            self._elements = sums.astype(np.int64)
        return self._elements

    _elements: I64 | None = None


class Layouts:
    """All layouts that were asked for."""

    def __init__(self) -> None:
        self._grids: dict[tuple[tuple[int, ...], bytes, bytes], Grid] = {}
        self._laid: dict[tuple[int, bytes], Laid] = {}
        self._all: list[Laid] = []

    def __getitem__(self, number: int) -> Laid:
        return self._all[number]

    def grid(self, box: I64, term: U32) -> Grid:
        """The grid of ``box`` (entries, dimensions, 2) and ``term``; the arrays must not change any more."""
        key = box.shape, box.tobytes(), term.tobytes()
        if (known := self._grids.get(key)) is None:
            known = self._grids[key] = Grid(len(self._grids), box, term)
        return known

    def lay(self, grid: Grid, device: U32) -> Laid:
        """The layout with the entries of ``grid`` on these devices."""
        key = grid.number, device.tobytes()
        if (known := self._laid.get(key)) is None:
            known = self._laid[key] = Laid(len(self._all), grid, device)
            self._all.append(known)
        return known

    def intern(self, layout: Layout) -> Laid:
        """The layout of these entries."""
        dimensions = len(layout[0].box) if layout else 0
        box = np.array([entry.box for entry in layout], dtype=np.int64).reshape(len(layout), dimensions, 2)
        term = np.array([entry.term for entry in layout], dtype=np.uint32)
        return self.lay(self.grid(box, term), np.array([entry.device for entry in layout], dtype=np.uint32))


@dataclass(frozen=True)
class Placement:
    """An operator's pieces under a config. ``pieces[k]`` runs on ``devices[k]``; ``terms[k]`` tells pieces that compute
    something different from replicas. ``reads[i]`` is the layout of operand i as the pieces need it, and of the
    gradients with respect to it as they make them; ``writes[j]`` the layout of output j."""

    devices: tuple[int, ...]
    pieces: tuple[Piece, ...]
    terms: tuple[int, ...]
    reads: tuple[Layout, ...]
    writes: tuple[Layout, ...]

    def piece_on(self, device: int) -> Piece:
        """The piece that ``device`` computes."""
        return self.pieces[self.devices.index(device)]


def bounding(boxes: Sequence[Box]) -> Box:
    """The smallest box that holds all of ``boxes`` (at least one)."""
    return tuple((min(low for low, _ in sides), max(high for _, high in sides)) for sides in zip(*boxes, strict=True))
