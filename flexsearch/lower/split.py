"""The regions that the pieces of an operator read and write, by degrees: what does not depend on the devices.

A dimension's interval follows from the pieces of its own axes alone. So each dimension is asked once for each of them
(``Dimension.interval``), and the regions of all pieces are put together from the answers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from math import prod

import numpy as np
import numpy.typing as npt

from flexsearch.compiled import I64, U32
from flexsearch.graph import Box, Interval, Operator, Piece, chunks
from flexsearch.graph.notation import Dimension
from flexsearch.lower.layout import Grid, Laid, Layouts
from flexsearch.strategy import OperatorConfig
from flexsearch.strategy.config import Shares

Degrees = tuple[tuple[str, int], ...]
Index = npt.NDArray[np.intp]
Mask = npt.NDArray[np.bool_]
Shapes = Sequence[Sequence[int]]
Axes = tuple[str, ...]


@dataclass(frozen=True)
class Blocks:
    """How an operator is shared out among equal blocks of ``devices`` devices (``lower.folding``): ``replicas`` of them
    (1: it is not). ``axis``: the samples that they share out; None: each does all of it. ``spread``: by operand,
    whether all blocks hold it, as terms of their samples or as copies."""

    replicas: int = 1
    devices: int = 0
    axis: str | None = None
    spread: tuple[bool, ...] = ()


@dataclass(frozen=True)
class Region:
    """The regions of one operand. ``held``: the positions (pieces, replicas counted) that touch it; None: all do.
    ``blocks``: so many blocks hold it, each on devices ``stride`` after those of the one before: position k of block b
    is number ``b * positions + k`` then."""

    grid: Grid
    held: Index | None
    blocks: int = 1
    stride: int = 0

    def on(self, layouts: Layouts, device: U32) -> Laid:
        """The layout where position k is on ``device[k]``."""
        if self.held is None:
            return layouts.lay(self.grid, device)
        block, position = np.divmod(self.held, len(device))
        return layouts.lay(self.grid, device[position] + (block * self.stride).astype(np.uint32))

    def boxes(self, count: int) -> list[Box | None]:
        """The region of each of ``count`` positions."""
        if self.held is None:
            return list(self.grid.boxes)
        box_of = dict(zip(self.held.tolist(), self.grid.boxes, strict=True))
        return [box_of.get(k) for k in range(count)]


@dataclass(frozen=True)
class Shared:
    """What splitters of all operators have in common. ``intervals``: what a dimension reaches for every combination of
    the parts of its axes, and which of it is not empty (None: all). ``forms``: numbers of the ways in which the split
    axes of an operator cut an operand (``_Cut``). ``regions``: of operands, by what they follow from
    (``Splitter._region``)."""

    intervals: dict[tuple[object, ...], tuple[I64, Mask | None]] = field(default_factory=dict)
    forms: dict[tuple[object, ...], int] = field(default_factory=dict)
    regions: dict[tuple[object, ...], Region] = field(default_factory=dict)


@dataclass(frozen=True)
class _Cut:
    """How some axes cut an operand. ``form``: number of the way, whatever their names and degrees; None where only the
    first part of a sum has the operand. ``dimensions``: those that are cut, with the axes that cut them."""

    form: int | None
    dimensions: tuple[tuple[int, Axes], ...]


@dataclass(frozen=True)
class Split:
    """The pieces of an operator for some degrees and replicas. ``extents``: indices on each axis, of the different
    sizes of pieces that there are; ``extent_of``: which of them a position has."""

    inputs: tuple[Region, ...]
    outputs: tuple[Region, ...]
    extents: tuple[tuple[int, ...], ...]
    extent_of: Index


class Splitter:
    """Splits of an operator, or of all operators of the same pattern and sizes. ``inputs``/``outputs``: shapes of the
    whole operands."""

    def __init__(
        self, op: Operator, inputs: Shapes, outputs: Shapes, layouts: Layouts, shared: Shared | None = None,
        blocks: Blocks | None = None,
    ) -> None:  # fmt: skip
        self.op, self.layouts, self.blocks = op, layouts, blocks or Blocks()
        self.inputs = len(inputs)
        self.operands = (
            *zip(op.access.inputs, inputs, strict=True),
            *zip(op.access.outputs, outputs, strict=True),
        )
        self._splits: dict[tuple[Degrees, int, Shares], Split] = {}
        self._shared = shared or Shared()
        axes = list(op.sizes)
        self._outside = frozenset(axes[: axes.index(self.blocks.axis)] if self.blocks.axis is not None else axes)
        """Axes outside of the one that blocks share out; all where they share out none, as replicas come last."""
        self._cuts: dict[Axes, tuple[_Cut, ...]] = {}
        self._shares: dict[str, tuple[int, ...]] = {}
        """Of the split at hand."""
        self._dimension_forms = [
            [self._dimension_form(d, size) for d, size in zip(operand.dimensions, shape, strict=True)]
            for operand, shape in self.operands
        ]
        self._whole: list[tuple[I64, bool]] = []
        """By operand: what the whole operator reaches, and whether it is anything."""
        for n, (operand, _) in enumerate(self.operands):
            asked = [self._asked(n, d, ()) for d in range(len(operand.dimensions))]
            box = np.array([interval[0] for interval, _ in asked], dtype=np.int64).reshape(len(asked), 2)
            self._whole.append((box, all(inside is None for _, inside in asked)))

    def split(self, config: OperatorConfig) -> Split:
        """The pieces of a config, wherever they are."""
        key = config.degrees, config.replicas, config.shares
        if (cached := self._splits.get(key)) is None:
            cached = self._splits[key] = self._split(*key)
        return cached

    def pieces(self, config: OperatorConfig) -> tuple[Piece, ...]:
        """The pieces of a config as objects, by position; replicas are the same object."""
        split, count = self.split(config), len(config.devices)
        reads = list(zip(*(region.boxes(count) for region in split.inputs), strict=True)) or [()] * count
        writes = list(zip(*(region.boxes(count) for region in split.outputs), strict=True)) or [()] * count
        pieces: list[Piece] = []
        for k in range(0, count, config.replicas):
            written = tuple(box for box in writes[k] if box is not None)
            pieces += [Piece(config.intervals(self.op, k), tuple(reads[k]), written)] * config.replicas
        return tuple(pieces)

    def _split(self, degrees: Degrees, replicas: int, shares: Shares) -> Split:
        self._replicas, self._shares = replicas, dict(shares)
        axes, parts = tuple(axis for axis, _ in degrees), tuple(count for _, count in degrees)
        places, term = _positions(parts, replicas)
        at = dict(zip(axes, places, strict=True))
        key = parts, replicas, tuple(self._shares.get(axis) for axis in axes) if shares else ()
        if (cuts := self._cuts.get(axes)) is None:
            cuts = self._cuts[axes] = tuple(self._cut(n, axes) for n in range(len(self.operands)))
        regions = tuple([self._region(n, cut, degrees, key, at, term) for n, cut in enumerate(cuts)])
        inputs, outputs = regions[: self.inputs], regions[self.inputs :]
        if any(region.held is not None and region.blocks == 1 for region in outputs):  # patterns index outputs plainly
            raise AssertionError(f"{self.op.name}: a piece writes nothing of its output")
        return Split(inputs, outputs, *self._extents(degrees, at, len(term)))

    def _extents(self, degrees: Degrees, at: dict[str, Index], count: int) -> tuple[tuple[tuple[int, ...], ...], Index]:
        axes, parts, sizes = self.op.access.axes, dict(degrees), self.op.sizes
        if not self._shares and all(sizes[axis] % count == 0 for axis, count in degrees):
            return (tuple(sizes[a] // parts.get(a, 1) for a in axes),), np.zeros(count, dtype=np.intp)
        lengths = {
            axis: np.array([high - low for low, high in self._chunks(axis, parts)])[at[axis]] for axis, parts in degrees
        }
        if all((length == length[0]).all() for length in lengths.values()):
            one = tuple(int(lengths[axis][0]) if axis in lengths else self.op.sizes[axis] for axis in axes)
            return (one,), np.zeros(count, dtype=np.intp)
        columns = (lengths[axis].tolist() if axis in lengths else [self.op.sizes[axis]] * count for axis in axes)
        distinct: dict[tuple[int, ...], int] = {}
        of = [distinct.setdefault(row, len(distinct)) for row in zip(*columns, strict=True)]
        return tuple(distinct), np.array(of, dtype=np.intp)

    def _chunks(self, axis: str, parts: int) -> list[Interval]:
        return chunks(self.op.sizes[axis], parts, self._shares.get(axis, ()))

    def _region(
        self, n: int, cut: _Cut, degrees: Degrees, key: tuple[object, ...], at: dict[str, Index], term: U32
    ) -> Region:  # fmt: skip
        """Region of operand number ``n``. ``key``: what it follows from beside its form. ``at``: index of the part, by
        split axis and position."""
        if cut.form is None:
            return self._make_region(n, cut, degrees, at, term)
        whole = cut.form, key, self._outer(n, degrees)
        if (cached := self._shared.regions.get(whole)) is None:
            cached = self._shared.regions[whole] = self._make_region(n, cut, degrees, at, term)
        return cached

    def _cut(self, n: int, axes: Axes) -> _Cut:
        """How ``axes``, in their order, cut operand number ``n``."""
        operand, _ = self.operands[n]
        dimensions = tuple(
            (d, own) for d, of in enumerate(operand.dimensions)
            if (own := tuple(axis for axis in dict.fromkeys(of.axes) if axis in axes))
        )  # fmt: skip
        if operand.once and any(axis in self.op.access.summed for axis in axes):
            return _Cut(None, dimensions)
        (box, inside), place = self._whole[n], {axis: k for k, axis in enumerate(axes)}
        ways = ((d, self._dimension_forms[n][d], *map(place.get, operand.dimensions[d].axes)) for d, _ in dimensions)
        forms = self._shared.forms
        return _Cut(forms.setdefault((box.tobytes(), inside, *ways), len(forms)), dimensions)

    def _dimension_form(self, dimension: Dimension, size: int) -> tuple[object, ...]:
        """A dimension of ``size``, whatever the names of its axes."""
        sizes, axes = self.op.sizes, dimension.axes
        own = tuple((axes.index(a), sizes[a]) for a in axes)
        return dimension.coefficients, dimension.offset, dimension.merged, size, own

    def _make_region(self, n: int, cut: _Cut, degrees: Degrees, at: dict[str, Index], term: U32) -> Region:
        operand, shape = self.operands[n]
        parts = dict(degrees)
        box = np.empty((len(term), len(shape), 2), dtype=np.int64)
        touched: Mask | None = None
        box[:], inside = self._whole[n]
        if not inside:
            touched = np.zeros(len(term), dtype=np.bool_)
        for d, axes in cut.dimensions:
            own = tuple([(axis, parts[axis]) for axis in axes])
            interval, within = self._asked(n, d, own)
            which = _flat(own, at)
            box[:, d] = interval[which]
            if within is not None:
                touched = within[which] if touched is None else touched & within[which]
        if operand.once:
            own = tuple((axis, parts) for axis, parts in degrees if axis in self.op.access.summed)
            if own:
                first = np.array([not self.op.access.skips(operand, piece) for piece in self._pieces(own)])
                touched = first[_flat(own, at)] if touched is None else touched & first[_flat(own, at)]
        held = None if touched is None or touched.all() else np.flatnonzero(touched)
        if held is not None:
            box, term = box[held], term[held]
        if (outer := self._outer(n, degrees)) is None:
            return Region(self.layouts.grid(box, term), held)
        return self._spread(box, held, degrees, outer[0])

    def _outer(self, n: int, degrees: Degrees) -> tuple[int, bool] | None:
        """Of an operand that all blocks hold: parts of the axes outside of the one that they share out, and whether
        there is such a one. None where they do not."""
        blocks = self.blocks
        if blocks.replicas == 1 or not blocks.spread[n]:
            return None
        return prod(count for axis, count in degrees if axis in self._outside), blocks.axis is not None

    def _spread(self, box: I64, held: Index | None, degrees: Degrees, outer: int) -> Region:
        """The region in all blocks, its entries in the order and with the terms that the unfolded config has."""
        blocks, count = self.blocks, self._replicas * prod(parts for _, parts in degrees)
        order, terms = _in_blocks(
            count, outer, blocks.replicas, self._replicas * (blocks.replicas if blocks.axis is None else 1)
        )
        if held is not None:
            chosen = np.isin(order % count, held)
            order, terms = order[chosen], terms[chosen]
        row = order % count if held is None else np.searchsorted(held, order % count)
        return Region(self.layouts.grid(box[row], terms), order, blocks.replicas, blocks.devices)

    def _pieces(self, own: Degrees) -> Iterator[dict[str, Interval]]:
        """Intervals of some axes, for each combination of their parts in row-major order."""
        for parts in product(*(self._chunks(axis, count) for axis, count in own)):
            yield dict(zip((axis for axis, _ in own), parts, strict=True))

    def _asked(self, n: int, d: int, own: Degrees) -> tuple[I64, Mask | None]:
        """What dimension ``d`` of operand number ``n`` reaches where its axes have the degrees ``own``."""
        operand, shape = self.operands[n]
        dimension, parts = operand.dimensions[d], dict(own)
        split = tuple([(parts.get(a), a in parts and self._shares.get(a)) for a in dimension.axes])
        key = self._dimension_forms[n][d], split
        if (cached := self._shared.intervals.get(key)) is None:
            sizes = self.op.sizes
            whole = {axis: (0, sizes[axis]) for axis in dimension.axes}
            reached = [dimension.interval(whole | piece, sizes, shape[d]) for piece in self._pieces(own)]
            inside = np.array([interval is not None for interval in reached])
            intervals = np.array([interval or (0, 0) for interval in reached], dtype=np.int64)
            cached = self._shared.intervals[key] = intervals, None if inside.all() else inside
        return cached


def _flat(own: Degrees, at: dict[str, Index]) -> Index:
    """Number of each position's combination of parts, in row-major order."""
    (axis, _), *rest = own
    which = at[axis]
    for axis, parts in rest:
        which = which * parts + at[axis]
    return which


@lru_cache(maxsize=4096)
def _positions(shape: tuple[int, ...], replicas: int) -> tuple[tuple[Index, ...], U32]:
    """Index of the part along each split axis, and the term, of every position: row-major, replicas last."""
    count = prod(shape)
    places = np.unravel_index(np.arange(count), shape) if shape else ()
    return tuple(np.repeat(place, replicas) for place in places), np.repeat(np.arange(count, dtype=np.uint32), replicas)


@lru_cache(maxsize=4096)
def _in_blocks(count: int, outer: int, blocks: int, copies: int) -> tuple[Index, U32]:
    """Positions of all blocks in the order of the unfolded config, of which each block has ``count``, in ``outer``
    groups that lie outside of the axis that the blocks share out; and the terms, of ``copies`` positions each."""
    order = np.arange(blocks * count).reshape(blocks, outer, -1).swapaxes(0, 1).ravel()
    return order, (np.arange(len(order)) // copies).astype(np.uint32)
