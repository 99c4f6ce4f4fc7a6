"""Images of another size: interpolation, whose rows and columns are split where sizes have a common divisor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import gcd, prod
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import Field

from flexsearch.graph.model import Operator
from flexsearch.graph.ops.base import (
    NOTHING,
    Attributes,
    Extents,
    Kernel,
    KernelContext,
    OperatorKind,
    Sample,
    Shapes,
    define,
    output_elements,
    rand,
    rewrite,
)
from flexsearch.graph.ops.builder import Builder
from flexsearch.graph.ops.lazy import F, torch
from flexsearch.graph.ops.local import extent
from flexsearch.graph.ops.shape import permute, view
from flexsearch.graph.ops.spatial import IMAGE, INSIDE, PLACES, REACH, WORDS, check_pattern
from flexsearch.graph.ops.value import Value
from flexsearch.graph.piece import Piece

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

_NAMES = {
    "upsample_nearest1d": "nearest", "upsample_nearest2d": "nearest", "upsample_nearest3d": "nearest",
    "_upsample_nearest_exact1d": "nearest-exact", "_upsample_nearest_exact2d": "nearest-exact",
    "_upsample_nearest_exact3d": "nearest-exact", "upsample_linear1d": "linear", "upsample_bilinear2d": "bilinear",
    "upsample_trilinear3d": "trilinear", "upsample_bicubic2d": "bicubic", "_upsample_bilinear2d_aa": "bilinear",
    "_upsample_bicubic2d_aa": "bicubic",
}  # fmt: skip
_TAPS = {"nearest": 1, "nearest-exact": 1, "linear": 2, "bilinear": 2, "trilinear": 2, "bicubic": 4}
_LONGEST = 1 << 20
"""Dimensions that are longer are not split: their tables would take too long."""
Factor = Annotated[float, Field(gt=0.0, le=1e9)]


class Interpolation(Attributes):
    """``scales``: factors that the call gave, where they say where elements lie; otherwise the sizes do."""

    mode: Literal["nearest", "nearest-exact", "linear", "bilinear", "trilinear", "bicubic"]
    align_corners: bool = False
    antialias: bool = False
    scales: Annotated[list[Factor | None], Field(max_length=3)]


class Taps(NamedTuple):
    """For each element of a result (rows): the elements of its source that it is made of, and their weights."""

    places: NDArray[np.int64]
    weights: NDArray[np.float64]


@dataclass(frozen=True)
class Resized:
    """One dimension: ``size`` elements become ``count``; ``scale`` is the factor of the call, if it counts."""

    mode: str
    size: int
    count: int
    scale: float | None
    align_corners: bool
    antialias: bool

    @property
    def ratio(self) -> float:
        """Distance in the source of neighbours in the result."""
        if _TAPS[self.mode] == 2 and self.size == self.count:
            return 1.0  # torch copies then, whatever the factor
        if self.align_corners:
            return (self.size - 1) / (self.count - 1) if self.count > 1 else 0.0
        return 1.0 / self.scale if self.scale else self.size / self.count

    def taps(self) -> Taps:
        """What every element is made of. Nearest neighbours are found in single precision, as torch does."""
        if _TAPS[self.mode] == 1:
            shift = np.float32(0.5 if self.mode == "nearest-exact" else 0.0)
            nearest = np.floor((np.arange(self.count, dtype=np.float32) + shift) * np.float32(self.ratio))
            return Taps(np.minimum(nearest.astype(np.int64), self.size - 1)[:, None], np.ones((self.count, 1)))
        index = np.arange(self.count, dtype=np.float64)
        source = index * self.ratio if self.align_corners else (index + 0.5) * self.ratio - 0.5
        cubic = self.mode == "bicubic"
        first = np.floor(source if cubic else np.maximum(source, 0.0))
        t = source - first if cubic else np.clip(source - first, 0.0, 1.0)
        places = first[:, None].astype(np.int64) + (np.arange(-1, 3) if cubic else np.arange(2))
        weights = np.stack(_cubic(t) if cubic else (1 - t, t), axis=1)
        return Taps(np.clip(places, 0, self.size - 1), weights)

    def axes(self, place: str, reach: str, inside: str) -> tuple[str, str, dict[str, int]]:
        """How patterns read and write this dimension, and the sizes of axes.

        Both sides are cut into as many blocks as their sizes allow; a block of the result reads one of the source and
        what its outermost elements need besides. Antialiased dimensions and those without a common divisor are whole.
        """
        blocks = gcd(self.size, self.count)
        whole = reach, inside, {reach: self.size, inside: self.count}
        # PyTorch's gradient of nearest neighbours is another than that of its forward where the factor is not exact.
        rounded = _TAPS[self.mode] == 1 and self.scale is not None and self.size * self.scale != self.count
        if self.antialias or blocks == 1 or rounded or max(self.size, self.count) > _LONGEST:
            return whole
        step, per = self.size // blocks, self.count // blocks
        written, sizes = (place, {place: blocks}) if per == 1 else (f"({place} {inside})", {place: blocks, inside: per})
        places, weights = self.taps()
        apart = places - step * (np.arange(self.count) // per)[:, None]
        used = apart[weights != 0.0]
        low, high = int(used.min()), int(used.max())
        if (step, low, high) == (1, 0, 0):
            return place, written, sizes
        return f"({step}*{place}+{reach}{low:+d})", written, {**sizes, reach: high - low + 1}


def _cubic(t: NDArray[np.float64]) -> tuple[NDArray[np.float64], ...]:
    """Weights of the four neighbours of a point at ``t`` between the middle two, with torch's coefficient."""
    a = -0.75

    def near(x: NDArray[np.float64]) -> NDArray[np.float64]:
        return ((a + 2) * x - (a + 3)) * x * x + 1

    def far(x: NDArray[np.float64]) -> NDArray[np.float64]:
        return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a

    return far(t + 1), near(t), near(1 - t), far(2 - t)


def interpolation(
    mode: str, source: Sequence[int], result: Sequence[int], scales: Sequence[float | None],
    align_corners: bool = False, antialias: bool = False,
) -> tuple[str, dict[str, int]]:  # fmt: skip
    """Pattern of an interpolation of an image of shape ``source`` to ``result``, and the sizes of its spatial axes."""
    return _pattern(_dims(mode, source, result, scales, align_corners, antialias))


def _pattern(dims: Sequence[Resized]) -> tuple[str, dict[str, int]]:
    rank, sizes = len(dims), dict[str, int]()
    reads, writes = [], []
    for dim, place, reach, inside in zip(dims, PLACES[rank], REACH[rank], INSIDE[rank], strict=True):
        read, written, own = dim.axes(place, reach, inside)
        reads.append(read)
        writes.append(written)
        sizes |= own
    return f"n c {' '.join(reads)} -> n c {' '.join(writes)}", sizes


class Interpolate(OperatorKind):
    """``F.interpolate``: pieces read their part of the source and the neighbours that their elements need."""

    name = "interpolate"
    targets = tuple(f"aten.{name}" for name in _NAMES)
    roles = IMAGE
    words = WORDS
    attributes = Interpolation
    windows = True
    image = True
    saved = NOTHING
    backward_reads: Literal["nothing", "gradients", "inputs"] = "gradients"

    def trace(
        self, b: Builder, x: Value | None = None, input: Value | None = None, align_corners: bool = False,
        scale_factors: Sequence[float] | None = None, output_size: Any = None, **named: float | None,
    ) -> Value:  # fmt: skip
        source, name = x or input, b.target.split(".")[1]
        assert source is not None
        spatial = source.rank - 2
        scales = list(scale_factors or named.values()) or [None] * spatial
        sizes = zip(source.shape[2:], b.shape[2:], scales, strict=True)
        kept = [s if s is not None and int(size * s) == count else None for size, count, s in sizes]
        mode, antialias = _NAMES[name], name.endswith("_aa")
        template, axes = interpolation(mode, source.shape, b.shape, kept, align_corners, antialias)
        attributes = {"mode": mode, "align_corners": align_corners, "antialias": antialias, "scales": kept}
        return b.emit(self.name, [source], b.shape, template, attributes, sizes=axes, short="interpolate")

    def check(self, op: Operator, attributes: Any, shapes: tuple[tuple[int, ...], ...]) -> str:
        (x, y), spatial = shapes, len(attributes.scales)
        wanted = {"linear": 1, "bilinear": 2, "bicubic": 2, "trilinear": 3}.get(attributes.mode, spatial)
        if len(x) != spatial + 2 or len(y) != len(x) or spatial != wanted:
            return f"{attributes.mode} interpolation of shape {list(x)} with {spatial} scales"
        if attributes.antialias and attributes.mode not in ("bilinear", "bicubic"):
            return f"{attributes.mode} interpolation has no antialiasing"
        for size, count, scale in zip(x[2:], y[2:], attributes.scales, strict=True):
            if scale is not None and int(size * scale) != count:
                return f"attributes.scales: {size} elements times {scale} are not {count}"
        more = attributes.scales, attributes.align_corners, attributes.antialias
        template, sizes = interpolation(attributes.mode, x, y, *more)
        return check_pattern(op, template, shapes, sizes)

    def flops(self, op: Operator, extents: Extents) -> Any:
        """A multiplication and an addition for each element that is read; nothing where elements are only copied."""
        taps = _TAPS[str(op.attributes["mode"])]
        each = 2.0 * taps ** (len(op.access.outputs[0].dimensions) - 2) if taps > 1 else 0.0
        return each * output_elements(op, extents)

    def kernel(self, op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
        box, written = piece.inputs[0], piece.outputs[0]
        assert box is not None
        shape = [prod(op.sizes[a] for a in d.axes) for d in op.access.outputs[0].dimensions]
        # All may be written from less than all: the outermost elements of a source need not count.
        whole = (extent(box)[2:], extent(written)[2:]) == (tuple(shapes[0][2:]), tuple(shape[2:]))
        mode = str(op.attributes["mode"])
        scales: Any = op.attributes["scales"]
        corners, antialias = (bool(op.attributes.get(name)) for name in ("align_corners", "antialias"))
        dims = _dims(mode, shapes[0], shape, scales, corners, antialias)
        copies = _TAPS[mode] == 1 and all(d.plain for d in op.access.inputs[0].dimensions)
        if not whole and not copies and not antialias:
            tables = [dim.taps() for dim in dims]
            return _weighted([(*table, *r) for table, *r in zip(tables, written[2:], box[2:], strict=True)])
        size = extent(written)[2:]
        # A dimension that is cut has an integer factor here, which the sizes of its part tell as well.
        parts = zip(dims, size, strict=True)
        factors = [dim.scale if count == dim.count else None for dim, count in parts]
        name = next(n for n, m in _NAMES.items() if m == mode and n.endswith("_aa") == antialias and _fits(n, size))
        call: Any = getattr(torch.ops.aten, name).default
        aligned = [] if _TAPS[mode] == 1 else [corners]
        return lambda x: call(x, size, *aligned, *factors)

    def samples(self) -> Iterable[Sample]:
        for mode, spatial in (("linear", 1), ("bilinear", 2), ("trilinear", 3), ("bicubic", 2)):
            for corners in (False, True):
                yield Sample(_resize(mode, corners, scale_factor=2), (rand(2, 3, *(4, 3, 2)[:spatial]),))
                yield Sample(_resize(mode, corners, size=(6, 2, 3)[:spatial]), (rand(2, 3, *(9, 5, 3)[:spatial]),))
        yield Sample(_resize("bilinear", False, scale_factor=1.3), (rand(2, 3, 10, 7),))
        yield Sample(_resize("linear", False, scale_factor=1.3), (rand(2, 3, 2),))
        yield Sample(_resize("bilinear", False, scale_factor=1.3), (rand(2, 3, 3, 10),))
        yield Sample(_resize("nearest", None, scale_factor=1.3), (rand(2, 3, 10, 20),))
        yield Sample(_resize("nearest-exact", None, size=(9, 4)), (rand(2, 3, 6, 8),))
        yield Sample(_resize("bilinear", False, size=(4, 6), antialias=True), (rand(2, 3, 8, 6),))
        for spatial in (1, 2, 3):
            yield Sample(_resize("nearest", None, scale_factor=3), (rand(2, 3, *(4, 3, 2)[:spatial]),))
            yield Sample(_resize("nearest-exact", None, size=(6, 4, 3)[:spatial]), (rand(2, 3, *(3, 6, 2)[:spatial]),))


def _resize(mode: str, corners: bool | None, **size: Any) -> Any:
    return lambda x: F.interpolate(x, mode=mode, align_corners=corners, **size)


def _fits(name: str, size: Sequence[int]) -> bool:
    """Whether a torch operator is that for so many spatial dimensions."""
    return name.removesuffix("_aa").endswith(f"{len(size)}d")


def _dims(
    mode: str, source: Sequence[int], result: Sequence[int], scales: Sequence[float | None],
    align_corners: bool = False, antialias: bool = False,
) -> list[Resized]:  # fmt: skip
    sizes = zip(source[2:], result[2:], scales, strict=True)
    return [Resized(mode, size, count, scale, align_corners, antialias) for size, count, scale in sizes]


def _weighted(tables: Sequence[tuple[Any, ...]]) -> Kernel:
    """Kernel that computes a part of each spatial dimension from a part of the source, one dimension after the other.

    ``tables``: for each, places and weights of all its elements, the part that is written and the part that is read.
    """
    parts = []
    for places, weights, (first, end), (low, high) in tables:
        # Neighbours without weight may lie outside of what is read.
        local = np.clip(places[first:end], low, high - 1) - low
        parts.append((torch.from_numpy(local), torch.from_numpy(weights[first:end].copy())))

    def run(x: Tensor) -> Tensor:
        dtype = x.dtype
        y = x.float() if dtype in (torch.float16, torch.bfloat16) else x
        for i, (places, weights) in enumerate(parts):
            dim = i + 2
            shape = [-1] + [1] * (x.dim() - dim - 1)
            index, factors = places.to(x.device), weights.to(x.device, y.dtype)
            if index.shape[1] == 1:
                y = y.index_select(dim, index[:, 0])
                continue
            taps = (y.index_select(dim, index[:, k]) * factors[:, k].view(shape) for k in range(index.shape[1]))
            y = sum(taps, start=torch.zeros((), dtype=y.dtype, device=y.device))
        return y.to(dtype)

    return run


define(Interpolate())


@rewrite("pixel_shuffle")
def _pixel_shuffle(b: Builder, x: Value, upscale_factor: int) -> Value:
    """(..., c * r * r, h, w) -> (..., c, h * r, w * r)"""
    *lead, c, h, w = x.shape
    r, k = upscale_factor, len(lead)
    apart = view(b, x, (*lead, c // (r * r), r, r, h, w))
    order = (*range(k), k, k + 3, k + 1, k + 4, k + 2)
    return view(b, permute(b, apart, order), b.shape)


@rewrite("pixel_unshuffle")
def _pixel_unshuffle(b: Builder, x: Value, downscale_factor: int) -> Value:
    """(..., c, h * r, w * r) -> (..., c * r * r, h, w)"""
    *lead, c, h, w = x.shape
    r, k = downscale_factor, len(lead)
    apart = view(b, x, (*lead, c, h // r, r, w // r, r))
    order = (*range(k), k, k + 2, k + 4, k + 1, k + 3)
    return view(b, permute(b, apart, order), b.shape)


@rewrite("channel_shuffle", "native_channel_shuffle")
def _channel_shuffle(b: Builder, x: Value, groups: int) -> Value:
    """Channels (group, position) in the order (position, group)."""
    n, c, *space = x.shape
    apart = view(b, x, (n, groups, c // groups, *space))
    return view(b, permute(b, apart, (0, 2, 1, *range(3, 3 + len(space)))), b.shape)
