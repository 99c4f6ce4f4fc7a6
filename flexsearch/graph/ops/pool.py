"""Pooling: maxima and means over windows, which pieces of an image read with their halos."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from flexsearch.graph.model import Operator
from flexsearch.graph.ops.base import (
    INPUTS,
    NOTHING,
    Attributes,
    Extents,
    Kernel,
    KernelContext,
    OperatorKind,
    Sample,
    Saved,
    Shapes,
    define,
    points,
    rand,
)
from flexsearch.graph.ops.builder import Builder
from flexsearch.graph.ops.lazy import F, torch
from flexsearch.graph.ops.local import extent, numbers
from flexsearch.graph.ops.spatial import (
    IMAGE,
    INSIDE,
    KERNELS,
    PLACES,
    REACH,
    WORDS,
    Window,
    check_pattern,
    check_windows,
    each,
    padding_sides,
    windows,
)
from flexsearch.graph.ops.value import Value
from flexsearch.graph.piece import Piece

if TYPE_CHECKING:
    from torch import Tensor

WITH_INDICES = Saved(True, False, extra=8)
"""A maximum pool keeps the int64 position of each maximum."""


class _Pool(OperatorKind):
    """Over 1, 2 or 3 spatial dimensions."""

    roles = IMAGE
    words = WORDS
    attributes: type[Attributes] = Window
    windows = True
    traffic = "windows"
    image = True
    spatial: int

    def flops(self, op: Operator, extents: Extents) -> Any:
        return points(extents)

    def check(self, op: Operator, attributes: Any, shapes: tuple[tuple[int, ...], ...]) -> str:
        """Windows are those that the attributes say, and none lies wholly in the padding."""
        spatial, (x, y) = self.spatial or len(attributes.kernel_size), shapes
        if not spatial < len(x) == len(y) <= spatial + 2:
            return f"{op.kind} with operands of shapes {list(shapes)}"
        sizes = each(attributes.kernel_size, spatial)
        stride, padding = each(attributes.stride, spatial, 0), each(attributes.padding, spatial, 0)
        stride = stride if any(stride) else sizes
        geometry = {"kernel_size": sizes, "stride": stride, "padding": padding}
        if problem := check_windows(op, spatial, {**geometry, "dilation": each(attributes.dilation, spatial)}):
            return problem
        for size, step, pad, count, length in zip(sizes, stride, padding, y[-spatial:], x[-spatial:], strict=True):
            if 2 * pad > size or step * (count - 1) - pad >= length:
                return "a window of the pool lies wholly in the padding"
        return ""


def _numbers(op: Operator, rank: int) -> tuple[list[int], list[int], list[int]]:
    """Kernel, strides and dilations."""
    kernel = numbers(op, "kernel_size", rank, 1)
    strides = numbers(op, "stride", rank, 0) if op.attributes.get("stride") else kernel
    return kernel, strides, numbers(op, "dilation", rank, 1)


class MaxPool(_Pool):
    saved = WITH_INDICES

    def __init__(self, spatial: int) -> None:
        self.spatial = spatial
        self.name = f"max_pool{spatial}d"
        self.targets = (f"aten.max_pool{spatial}d", f"aten.max_pool{spatial}d_with_indices")

    def trace(
        self, b: Builder, x: Value, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1,
        ceil_mode: bool = False,
    ) -> Any:  # fmt: skip
        window = (kernel_size, stride, padding)
        pooled = pool(b, x, self.name, *window, dilation=dilation, ceil_mode=ceil_mode)
        if len(b.results) == 1:
            return pooled
        return pooled, pool(b, x, "max_pool_indices", *window, dilation=dilation, ceil_mode=ceil_mode)

    def kernel(self, op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
        rank = self.spatial
        kernel, strides, dilations = _numbers(op, rank)
        call = getattr(F, self.name)
        spans = [d * (k - 1) + 1 for d, k in zip(dilations, kernel, strict=True)]
        inside, outside = padding_sides(op, piece, spans, strides, [k // 2 for k in kernel])

        def run(x: Tensor) -> Any:
            if outside:
                x = F.pad(x, outside, value=-torch.inf)
            return call(x, kernel, strides, inside, dilations)

        return run

    def samples(self) -> Iterable[Sample]:
        call, image = getattr(F, self.name), (9, 6, 5)[: self.spatial]
        yield Sample(lambda x: call(x, 3, 2, padding=1, ceil_mode=True), (rand(2, 3, *image),))
        yield Sample(lambda x: call(x, 2, 1, dilation=2), (rand(3, *image),))


class MaxPoolIndices(_Pool):
    """Where in its image each maximum lies (row-major)."""

    name = "max_pool_indices"
    saved = NOTHING
    backward = 0.0
    spatial = 0

    def check(self, op: Operator, attributes: Any, shapes: tuple[tuple[int, ...], ...]) -> str:
        listed = isinstance(attributes.kernel_size, list) and 1 <= len(attributes.kernel_size) <= 3
        return super().check(op, attributes, shapes) if listed else "attributes.kernel_size must have 1 to 3 numbers"

    def kernel(self, op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
        sizes: Any = op.attributes["kernel_size"]
        rank, box = len(sizes), piece.inputs[0]
        assert box is not None
        kernel, strides, dilations = _numbers(op, rank)
        spans = [d * (k - 1) + 1 for d, k in zip(dilations, kernel, strict=True)]
        inside, outside = padding_sides(op, piece, spans, strides, [k // 2 for k in kernel])
        before = outside[-2::-2] if outside else [0] * rank
        corner = [low - pad for (low, _), pad in zip(box[-rank:], before, strict=True)]
        call, image = getattr(F, f"max_pool{rank}d"), shapes[0][-rank:]

        def run(x: Tensor) -> Tensor:
            x = F.pad(x, outside, value=-torch.inf) if outside else x
            _, places = call(x, kernel, strides, inside, dilations, return_indices=True)
            return in_image(places, x.shape[-rank:], corner, image)

        return run

    def samples(self) -> Iterable[Sample]:
        yield Sample(lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True), (rand(2, 3, 7, 6),))
        yield Sample(lambda x: F.max_pool1d(x, 2, ceil_mode=True, return_indices=True), (rand(3, 7),))
        yield Sample(lambda x: F.max_pool3d(x, 2, 1, return_indices=True), (rand(2, 3, 4, 3, 5),))


def in_image(places: Tensor, local: Sequence[int], corner: Sequence[int], image: Sequence[int]) -> Tensor:
    """Row-major ``places`` in a part of shape ``local`` as such in the ``image``, where the part is at ``corner``."""
    result, stride, rest = torch.zeros_like(places), 1, places
    for size, first, length in zip(reversed(local), reversed(corner), reversed(image), strict=True):
        result = result + (rest % size + first) * stride
        rest, stride = rest // size, stride * length
    return result


class AveragePool(_Pool):
    saved = INPUTS

    def __init__(self, spatial: int) -> None:
        self.spatial = spatial
        self.name = f"avg_pool{spatial}d"
        self.targets = (f"aten.avg_pool{spatial}d",)

    def trace(
        self, b: Builder, x: Value, kernel_size: Any, stride: Any = None, padding: Any = 0, ceil_mode: bool = False,
        count_include_pad: bool = True, divisor_override: int | None = None,
    ) -> Value:  # fmt: skip
        extra = {"ceil_mode": ceil_mode, "count_include_pad": count_include_pad, "divisor_override": divisor_override}
        return pool(b, x, self.name, kernel_size, stride, padding, **extra)

    def kernel(self, op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
        """The mean over all of the window, zeros included, times a factor where the divisor differs."""
        rank = self.spatial
        kernel, strides, _ = _numbers(op, rank)
        call = getattr(F, self.name)
        assert piece.inputs[0] is not None
        lengths = extent(piece.inputs[0])[-rank:]
        # In 3-D, torch wants the operand itself to hold a window, whatever it is padded by.
        limit = [k // 2 if rank < 3 or size >= k else -1 for k, size in zip(kernel, lengths, strict=True)]
        inside, outside = padding_sides(op, piece, kernel, strides, limit)
        factor = _divisor_factor(op, piece, shapes[0][-rank:], kernel, strides)
        cache: dict[tuple[torch.dtype, torch.device], Tensor] = {}

        def run(x: Tensor) -> Any:
            y = call(F.pad(x, outside) if outside else x, kernel, strides, inside)
            if factor is None:
                return y
            key = (y.dtype, y.device)
            if key not in cache:
                cache[key] = factor.to(y.device, y.dtype)
            return y * cache[key]

        return run

    def samples(self) -> Iterable[Sample]:
        call, image = getattr(F, self.name), (9, 6, 5)[: self.spatial]
        yield Sample(lambda x: call(x, 3, 2, padding=1, ceil_mode=True, count_include_pad=False), (rand(2, 3, *image),))
        yield Sample(lambda x: call(x, 3, 2, padding=1, ceil_mode=True), (rand(3, *image),))
        if self.spatial > 1:
            yield Sample(lambda x: call(x, 2, divisor_override=3), (rand(2, 3, *image),))


def _divisor_factor(
    op: Operator, piece: Piece, sizes: Sequence[int], kernel: Sequence[int], strides: Sequence[int]
) -> Tensor | None:
    """Full window size over the operator's own divisor, per output element of the piece; None if it is 1 everywhere."""
    override: Any = op.attributes.get("divisor_override")
    if override:
        return None if override == prod(kernel) else torch.tensor(prod(kernel) / override, dtype=torch.float64)
    rank = len(kernel)
    padding = numbers(op, "padding", rank, 0)
    include = bool(op.attributes.get("count_include_pad", True))
    factor = torch.ones(()).double()
    for size, k, s, p, (first, last) in zip(sizes, kernel, strides, padding, piece.outputs[0][-rank:], strict=True):
        start = torch.arange(first, last) * s - p
        end = (start + k).clamp(max=size + p)  # a window of ceil_mode may reach beyond the padding: not counted
        count = end - start if include else end.clamp(max=size) - start.clamp(min=0)
        factor = factor.unsqueeze(-1) * (k / count.double())
    return None if bool((factor == 1).all()) else factor


def pool(b: Builder, x: Value, kind: str, kernel: Any, stride: Any, padding: Any, **attributes: Any) -> Value:
    """A pool of ``kind``; the result's shape is that of the torch operator at hand."""
    spatial = int(b.target[b.target.index("pool") + 4])
    kernel = each(kernel, spatial)
    stride = each(stride, spatial) if stride else kernel
    padding, dilation = each(padding, spatial, 0), each(attributes.pop("dilation", 1), spatial)
    lead = "n c" if x.rank == spatial + 2 else "c"
    return b.emit(
        kind,
        [x],
        b.shape,
        f"{lead} {windows(stride, padding, dilation)} -> {lead} {' '.join(PLACES[spatial])}",
        {"kernel_size": kernel, "stride": stride, "padding": padding, "dilation": dilation, **attributes},
        dtype="int64" if kind.endswith("indices") else None,
        sizes=dict(zip(KERNELS[spatial], kernel, strict=True)),
        short=kind,
    )


class MaxUnpool(OperatorKind):
    """The inverse of a maximum pool: each element goes to its place in an image of zeros."""

    name = "max_unpool"
    targets = ("aten.max_unpool2d", "aten.max_unpool3d")
    inputs = (2, 2)
    image = True
    saved = INPUTS

    def trace(self, b: Builder, x: Value, indices: Value, **_: Any) -> Value:
        """Images and channels can be split: a place is known for its whole image."""
        template = _unpooling(x.rank, int(b.target.split(".")[1][-2]))
        return b.emit(self.name, [x, indices], b.shape, template, short=self.name)

    def check(self, op: Operator, attributes: Any, shapes: tuple[tuple[int, ...], ...]) -> str:
        rank = len(shapes[0])
        dims = [len(d.axes) == 1 and d.axes[0][0].isupper() for d in op.access.inputs[0].dimensions]
        spatial = sum(dims)
        if spatial not in (2, 3) or rank not in (spatial + 1, spatial + 2):
            return f"{op.kind} with operands of shapes {list(shapes)}"
        return check_pattern(op, _unpooling(rank, spatial), shapes)

    def kernel(self, op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
        size = extent(piece.outputs[0])
        start = sum(not d.axes[0][0].isupper() for d in op.access.outputs[0].dimensions)

        def run(x: Tensor, indices: Tensor) -> Tensor:
            zeros = x.new_zeros((*size[:start], prod(size[start:])))
            return zeros.scatter(-1, indices.flatten(start), x.flatten(start)).view(size)

        return run

    def samples(self) -> Iterable[Sample]:
        yield Sample(lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), [2, 2]), (rand(2, 3, 4, 6),))
        yield Sample(lambda x: F.max_unpool3d(*F.max_pool3d(x, 2, return_indices=True), [2, 2, 2]), (rand(3, 2, 4, 6),))


def _unpooling(rank: int, spatial: int) -> str:
    lead = "n c" if rank == spatial + 2 else "c"
    reads, writes = f"{lead} {' '.join(REACH[spatial])}", f"{lead} {' '.join(INSIDE[spatial])}"
    return f"{reads}, {reads} -> {writes}"


for _kind in (
    *(kind(spatial) for kind in (MaxPool, AveragePool) for spatial in (1, 2, 3)),
    MaxPoolIndices(),
    MaxUnpool(),
):
    define(_kind)
