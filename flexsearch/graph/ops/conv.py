"""Convolutions, also transposed ones. Pieces of the input channels give partial sums, pieces of the image halos."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

from flexsearch.graph.model import Operator, Role
from flexsearch.graph.ops.attributes import Padding
from flexsearch.graph.ops.base import (
    INPUTS,
    Extents,
    Kernel,
    KernelContext,
    Sample,
    Shapes,
    WeightGradient,
    define,
    rand,
    rewrite,
)
from flexsearch.graph.ops.builder import Builder
from flexsearch.graph.ops.join import pad
from flexsearch.graph.ops.lazy import F, torch
from flexsearch.graph.ops.linear import Contraction
from flexsearch.graph.ops.local import extent, numbers
from flexsearch.graph.ops.shape import cut, permute
from flexsearch.graph.ops.spatial import (
    IMAGE,
    KERNELS,
    PLACES,
    WORDS,
    Overlap,
    Window,
    check_pattern,
    check_windows,
    each,
    overlap_axes,
    pad_sides,
    padding_sides,
    windows,
)
from flexsearch.graph.ops.value import Value
from flexsearch.graph.piece import Piece

if TYPE_CHECKING:
    from torch import Tensor

_ROLES: dict[str, Role] = {"g": "parameter", "o": "parameter", "c": "reduction", **IMAGE}
_WORDS = {"g": "channel groups", "o": "output channels", "c": "input channels (partial sums)", **WORDS}


class Convolution(Contraction):
    """Over 1, 2 or 3 spatial dimensions; the bias is added by the first piece along the input channels."""

    roles = _ROLES
    words = _WORDS
    attributes = Window
    inputs = (2, 3)
    saved_without_weights = INPUTS  # autograd's convolution always saves both
    windows = True
    image = True

    def __init__(self, spatial: int) -> None:
        self.spatial = spatial
        self.name = f"conv{spatial}d"
        self.targets = (f"aten.conv{spatial}d",)

    def trace(
        self, b: Builder, input: Value, weight: Value, bias: Value | None = None, stride: Any = 1, padding: Any = 0,
        dilation: Any = 1, groups: int = 1,
    ) -> Value:  # fmt: skip
        spatial = self.spatial
        stride, dilation = each(stride, spatial), each(dilation, spatial)
        if padding == "same":
            input, padding = _pad_same(b, input, weight, dilation)
        padding = [0] * spatial if padding == "valid" else each(padding, spatial, 0)
        n, kernel, places = _batch(input, spatial), " ".join(KERNELS[spatial]), " ".join(PLACES[spatial])
        reads = windows(stride, padding, dilation)
        return b.emit(
            self.name,
            [x for x in (input, weight, bias) if x is not None],
            b.shape,
            f"{n}(g c) {reads}, (g o) c {kernel}, +(g o) -> {n}(g o) {places}",
            {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups},
            sizes={"g": groups, "c": weight.shape[1], "o": weight.shape[0] // groups},
            short=self.name,
        )

    def check(self, op: Operator, attributes: Any, shapes: tuple[tuple[int, ...], ...]) -> str:
        """Windows are those that the attributes say, and channels come in equal groups."""
        spatial, (x, weight, *_), y = self.spatial, shapes, shapes[-1]
        if not spatial < len(x) == len(y) <= spatial + 2 or len(weight) != spatial + 2:
            return f"{op.kind} with operands of shapes {list(shapes)}"
        geometry = {"kernel_size": list(weight[2:]), "padding": each(attributes.padding, spatial, 0)}
        geometry |= {name: each(getattr(attributes, name), spatial) for name in ("stride", "dilation")}
        if problem := check_windows(op, spatial, geometry):
            return problem
        groups, inside, outside = attributes.groups, x[-spatial - 1], y[-spatial - 1]
        if weight[0] != outside or weight[0] % groups or weight[1] * groups != inside:
            return f"{inside} channels into {outside} in {groups} groups do not fit weights of shape {list(weight)}"
        return ""

    def kernel(self, op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
        call = getattr(F, self.name)
        if piece.inputs[0] is None:  # all its windows lie in the padding
            return _only_bias(extent(piece.outputs[0]), self.spatial)
        strides, inside, outside, dilations, groups = self._numbers(op, piece, shapes)

        def run(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
            return call(F.pad(x, outside) if outside else x, weight, bias, strides, inside, dilations, groups)

        return run

    def _numbers(
        self, op: Operator, piece: Piece, shapes: Shapes
    ) -> tuple[list[int], list[int], list[int], list[int], int]:
        """Strides, padding within the call and before it, dilations, and groups of channels."""
        rank, image, weight = self.spatial, piece.inputs[0], piece.inputs[1]
        assert image is not None and weight is not None
        strides, dilations = numbers(op, "stride", rank, 1), numbers(op, "dilation", rank, 1)
        spans = [d * (k - 1) + 1 for d, k in zip(dilations, shapes[1][2:], strict=True)]
        inside, outside = padding_sides(op, piece, spans, strides)
        return strides, inside, outside, dilations, extent(image)[-rank - 1] // extent(weight)[1]

    def weight_gradient(self, op: Operator, piece: Piece, shapes: Shapes) -> WeightGradient:
        rank, weight = self.spatial, piece.inputs[1]
        assert weight is not None
        size, biased = extent(weight), len(piece.inputs) > 2 and piece.inputs[2] is not None
        call = None if piece.inputs[0] is None else self._numbers(op, piece, shapes)

        def gradients(x: Tensor | None, gradient: Tensor) -> list[Tensor]:
            sums = gradient.movedim(-rank - 1, 0).flatten(1).sum(1) if biased else None
            if x is None or call is None:
                weights = gradient.new_zeros(size)
            else:
                strides, inside, outside, dilations, groups = call
                image = F.pad(x, outside) if outside else x
                if image.dim() == rank + 1:  # no batch
                    image, gradient = image[None], gradient[None]
                like = gradient.new_empty(1).expand(size)  # only its shape counts
                weights = torch.ops.aten.convolution_backward(
                    gradient, image, like, None, strides, inside, dilations, False, [0] * rank, groups,
                    [False, True, False],
                )[1]  # fmt: skip
            return [weights] if sums is None else [weights, sums]

        return gradients

    def samples(self) -> Iterable[Sample]:
        call, image, kernel = getattr(F, self.name), (5, 7, 4)[: self.spatial], (2, 3, 1)[: self.spatial]
        operands = rand(2, 4, *image), rand(6, 2, *kernel), rand(6)
        yield Sample(lambda x, w, b: call(x, w, b, stride=2, padding=1, groups=2), operands)
        yield Sample(lambda x, w: call(x, w, padding="same", dilation=2), (rand(3, *image), rand(4, 3, *kernel)))


def _batch(x: Value, spatial: int) -> str:
    """The batch in a pattern: an operand may have none."""
    return "n " if x.rank == spatial + 2 else ""


def _pad_same(b: Builder, x: Value, weight: Value, dilation: Sequence[int]) -> tuple[Value, list[int]]:
    """``padding="same"``: torch pads an odd element at the end. The operand with that, and the padding besides."""
    totals = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
    extra = [total % 2 for total in totals]
    if any(extra):
        spatial = len(extra)
        sizes = [s + e for s, e in zip(x.shape[-spatial:], extra, strict=True)]
        wider = replace(b, results=(((*x.shape[:-spatial], *sizes), x.dtype),))
        x = pad(wider, x, [n for e in reversed(extra) for n in (0, e)])
    return x, [total // 2 for total in totals]


def _only_bias(size: tuple[int, ...], rank: int) -> Kernel:
    """Kernel of a piece that no element of the image reaches."""

    def run(x: None, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        zero = weight.new_zeros(size)
        return zero if bias is None else zero + bias.reshape(-1, *[1] * rank)

    return run


class TransposedWindow(Window):
    output_padding: Padding = None


class TransposedConvolution(Contraction):
    """The gradient of a convolution with respect to its image, as a layer.

    An element of the result is written by several windows. So that a piece of the result knows all that it reads, its
    elements come in blocks of ``stride``; a result whose last block is not full is computed in full and then cut.
    """

    roles = _ROLES
    words = _WORDS
    attributes = TransposedWindow
    inputs = (2, 3)
    windows = True
    image = True

    def __init__(self, spatial: int) -> None:
        self.spatial = spatial
        self.name = f"conv_transpose{spatial}d"
        self.targets = (f"aten.conv_transpose{spatial}d",)

    def trace(
        self, b: Builder, input: Value, weight: Value, bias: Value | None = None, stride: Any = 1, padding: Any = 0,
        output_padding: Any = 0, groups: int = 1, dilation: Any = 1,
    ) -> Value:  # fmt: skip
        spatial = self.spatial
        geometry = [each(stride, spatial), each(padding, spatial, 0), each(dilation, spatial)]
        parts = zip(input.shape[-spatial:], weight.shape[2:], *geometry, b.shape[-spatial:], strict=True)
        dims = [Overlap(*numbers) for numbers in parts]
        full = [dim.blocks * dim.stride for dim in dims]
        extra = [
            wanted + size - dim.size
            for wanted, size, dim in zip(each(output_padding, spatial, 0), full, dims, strict=True)
        ]
        attributes = dict(zip(("stride", "padding", "dilation"), geometry, strict=True))
        template, sizes = _transposed(_batch(input, spatial), dims)
        y = b.emit(
            self.name,
            [x for x in (input, weight, bias) if x is not None],
            (*b.shape[:-spatial], *full),
            template,
            {**attributes, "output_padding": extra, "groups": groups},
            sizes={**sizes, "g": groups, "c": weight.shape[0] // groups, "o": weight.shape[1]},
            short=self.name,
        )
        for dim, size in enumerate(b.shape):
            y = cut(b, y, dim, 0, size)
        return y

    def check(self, op: Operator, attributes: Any, shapes: tuple[tuple[int, ...], ...]) -> str:
        rank, (x, weight, *_), y = self.spatial, shapes, shapes[-1]
        if not rank < len(x) == len(y) <= rank + 2 or len(weight) != rank + 2:
            return f"{op.kind} with operands of shapes {list(shapes)}"
        extra, groups = each(attributes.output_padding, rank, 0), attributes.groups
        geometry = [each(getattr(attributes, name), rank, default) for name, default in _DEFAULTS]
        if any(len(values) != rank for values in (extra, *geometry)):
            return f"attributes of {op.kind} must have {rank} numbers, or one"
        inside, outside = x[-rank - 1], y[-rank - 1]
        if weight[0] != inside or inside % groups or weight[1] * groups != outside:
            return f"{inside} channels into {outside} in {groups} groups do not fit weights of shape {list(weight)}"
        dims = [Overlap(*values) for values in zip(x[-rank:], weight[2:], *geometry, y[-rank:], strict=True)]
        for dim, more in zip(dims, extra, strict=True):
            size = sum((dim.stride * (dim.windows - 1), dim.dilation * (dim.kernel - 1) + 1, -2 * dim.padding, more))
            if dim.size != size or dim.size % dim.stride:
                return f"a result of {dim.size} elements has {size}, or no whole blocks of stride {dim.stride}"
        template, sizes = _transposed("n " if len(x) == rank + 2 else "", dims)
        sizes |= {"g": groups, "c": weight[0] // groups, "o": weight[1]}
        return check_pattern(op, template, shapes, sizes)

    def flops(self, op: Operator, extents: Extents) -> Any:
        """Two for each element of the image and of a window: what lies outside the result is computed as well."""
        rank = self.spatial
        strides, paddings, dilations = (numbers(op, name, rank, default) for name, default in _DEFAULTS)
        image: Any = 1.0
        for i, place in enumerate(op.access.outputs[0].dimensions[-rank:]):
            kernel = op.sizes[KERNELS[rank][i]]
            size = prod(op.sizes[a] for a in place.axes) - numbers(op, "output_padding", rank, 0)[i]
            read = (size - dilations[i] * (kernel - 1) - 1 + 2 * paddings[i]) // strides[i] + 1
            image *= kernel * read * extents[place.axes[0]] / op.sizes[place.axes[0]]
        return 2.0 * image * prod(extents[a] for a in ("n", "g", "c", "o") if a in op.sizes)

    def kernel(self, op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
        rank, box = self.spatial, piece.inputs[0]
        if box is None:
            return _only_bias(extent(piece.outputs[0]), rank)
        strides, _, dilations = geometry = [numbers(op, name, rank, default) for name, default in _DEFAULTS]
        dims = [Overlap(*values) for values in zip(shapes[0][-rank:], shapes[1][2:], *geometry, strict=True)]
        regions = zip(dims, box[-rank:], piece.outputs[0][-rank:], strict=True)
        crops = [dim.crop(read, written) for dim, read, written in regions]
        inside, extra, sides = [0] * rank, [0] * rank, [(0, 0)] * rank
        for i, ((before, after), dim) in enumerate(zip(crops, dims, strict=True)):
            # Torch takes as much from both ends, and then adds less than a stride at the end.
            if before >= 0 and 0 <= before - after < max(dim.stride, dim.dilation):
                inside[i], extra[i] = before, before - after
            else:
                sides[i] = (-before, -after)
        groups, rest, call = piece.extent("g"), pad_sides(sides), getattr(F, self.name)

        def run(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
            if not rest:
                return call(x, weight, bias, strides, inside, extra, groups, dilations)
            y = F.pad(call(x, weight, None, strides, inside, extra, groups, dilations), rest)
            return y if bias is None else y + bias.reshape(-1, *[1] * rank)

        return run

    def samples(self) -> Iterable[Sample]:
        call, image, kernel = getattr(F, self.name), (3, 4, 2)[: self.spatial], (4, 3, 2)[: self.spatial]
        operands = rand(2, 4, *image), rand(4, 3, *kernel), rand(6)
        yield Sample(lambda x, w, b: call(x, w, b, stride=2, padding=1, groups=2, output_padding=1), operands)
        yield Sample(lambda x, w: call(x, w, stride=3, dilation=2), (rand(3, *image), rand(3, 2, *kernel)))
        yield Sample(lambda x, w: call(x, w), (rand(2, 3, *image), rand(3, 2, *kernel)))


_DEFAULTS = (("stride", 1), ("padding", 0), ("dilation", 1))


def _transposed(batch: str, dims: Sequence[Overlap]) -> tuple[str, dict[str, int]]:
    """Pattern of a transposed convolution, and the sizes of the axes of its spatial dimensions."""
    reads, writes, sizes = overlap_axes(dims)
    return f"{batch}(g c) {reads}, (g c) o {' '.join(KERNELS[len(dims)])}, +(g o) -> {batch}(g o) {writes}", sizes


_CONVOLUTIONS = {spatial: Convolution(spatial) for spatial in (1, 2, 3)}
_TRANSPOSED = {spatial: TransposedConvolution(spatial) for spatial in (1, 2, 3)}
for _kind in (*_CONVOLUTIONS.values(), *_TRANSPOSED.values()):
    define(_kind)


@rewrite("convolution")
def _convolution(
    b: Builder, transposed: bool, input: Value, weight: Value, output_padding: Any = 0, **call: Any
) -> Value:
    spatial = weight.rank - 2
    if transposed:
        return _TRANSPOSED[spatial].trace(b, input, weight, output_padding=output_padding, **call)
    return _CONVOLUTIONS[spatial].trace(b, input, weight, **call)


@rewrite("conv_tbc")
def _conv_tbc(b: Builder, x: Value, weight: Value, bias: Value, pad: int = 0) -> Value:
    """A 1-D convolution of (time, batch, channels) by weights (kernel, input channels, output channels)."""
    length, batch, channels = b.shape
    inner = replace(b, results=(((batch, channels, length), b.dtype),))
    y = _CONVOLUTIONS[1].trace(inner, permute(b, x, (1, 2, 0)), permute(b, weight, (2, 1, 0)), bias, padding=pad)
    return permute(b, y, (2, 0, 1))
