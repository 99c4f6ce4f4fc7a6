"""What convolutions, pools and windows of images share: the numbers of each spatial dimension, and where pieces lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from flexsearch.errors import NotationError
from flexsearch.graph.model import Operator, Role
from flexsearch.graph.notation import instantiate
from flexsearch.graph.ops.attributes import Each, Padding, Positive
from flexsearch.graph.ops.base import Attributes
from flexsearch.graph.ops.local import cut, extent
from flexsearch.graph.piece import Piece

PLACES = {1: ("h",), 2: ("h", "w"), 3: ("z", "h", "w")}
"""Axes of the spatial dimensions of a result, by their number: (depth,) height, width."""
KERNELS = {1: ("KH",), 2: ("KH", "KW"), 3: ("KZ", "KH", "KW")}
"""Axes of the dimensions of a window."""
INSIDE = {1: ("P",), 2: ("P", "Q"), 3: ("O", "P", "Q")}
"""Axes of the results that are computed together, of each spatial dimension."""
REACH = {1: ("H",), 2: ("H", "W"), 3: ("Z", "H", "W")}
"""Axes of what is read for these."""
IMAGE: Mapping[str, Role] = {"z": "attribute", "h": "attribute", "w": "attribute"}
WORDS = {"z": "depth"}


class Window(Attributes):
    """Of a convolution or a pool: a number for each spatial dimension, or one for all."""

    kernel_size: Each = None
    stride: Each = None
    padding: Padding = None
    dilation: Each = None
    groups: Positive = 1
    ceil_mode: bool = False
    count_include_pad: bool = True
    divisor_override: Positive | None = None


def each(value: Any, count: int, default: int = 1) -> list[int]:
    """An argument that may be one number, a list of one or of ``count``, or nothing (``default``)."""
    listed = [] if value is None else [value] if isinstance(value, int) else list(value)
    return listed * count if len(listed) == 1 else listed or [default] * count


def windows(stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]) -> str:
    """The dimensions of an image in which windows lie, as patterns have them: ``(2*h+KH-1) (2*w+KW-1)``."""
    rank = len(stride)
    parts = zip(PLACES[rank], KERNELS[rank], stride, padding, dilation, strict=True)
    return " ".join(f"({s}*{place}+{d}*{kernel}-{p})" for place, kernel, s, p, d in parts)


def check_windows(op: Operator, spatial: int, numbers: Mapping[str, Sequence[int]]) -> str:
    """What contradicts ``numbers`` (kernel_size, stride, padding, dilation) in the pattern of ``op``, if anything."""
    if any(len(values) != spatial for values in numbers.values()):
        return f"attributes of {op.kind} must have {spatial} numbers, or one"
    reads, makes = op.access.inputs[0].dimensions[-spatial:], op.access.outputs[0].dimensions[-spatial:]
    for i, (source, result) in enumerate(zip(reads, makes, strict=True)):
        size, stride, padding, dilation = (
            numbers[name][i] for name in ("kernel_size", "stride", "padding", "dilation")
        )
        axis = result.axes[0] if result.axes else ""
        kernel = [a for a in source.axes if a not in result.axes]
        steps = dict(zip(source.axes, source.coefficients, strict=True))
        expected = {axis: stride, **dict.fromkeys(kernel, dilation)}
        if not result.plain or len(kernel) != 1 or steps != expected or source.offset != -padding:
            told = ", ".join(f"{name} {list(numbers[name])}" for name in ("stride", "padding", "dilation"))
            return f'pattern "{op.pattern}" does not have the windows of {told}'
        if op.sizes[kernel[0]] != size:
            return f"axis {kernel[0]!r} has size {op.sizes[kernel[0]]}, the kernel has {size}"
    return ""


def check_pattern(
    op: Operator, template: str, shapes: Sequence[tuple[int, ...]], sizes: Mapping[str, int] | None = None
) -> str:
    """What is wrong with an operator whose pattern and axis sizes must be those of ``template`` for its ``shapes``."""
    count = len(op.inputs)
    try:
        pattern, expected = instantiate(template, shapes[:count], shapes[count:], None, sizes)
    except NotationError as error:
        return str(error)
    if str(op.access) == pattern and op.sizes == expected:
        return ""
    return f'pattern and axes of {op.kind} must be "{pattern}" with {expected}'


def padding_sides(
    op: Operator, piece: Piece, spans: Sequence[int], strides: Sequence[int], limit: Sequence[int] | None = None
) -> tuple[list[int], list[int]]:
    """Padding of the spatial dimensions: what the torch operator can do itself, and what F.pad must add before.

    Torch pads both sides alike, so it takes over a dimension where that gives just the piece's windows (too much on the
    right is harmless if no further window fits); copying the operand for the other dimensions is the slow way.
    """
    box, output = piece.inputs[0], piece.outputs[0]
    assert box is not None
    rank, inside, outside = len(spans), [], []
    for i, (span, stride) in enumerate(zip(spans, strides, strict=True)):
        left, right = cut(op, piece, 0, len(box) - rank + i)
        length = extent(box)[len(box) - rank + i]
        count = extent(output)[len(output) - rank + i]
        fits = left >= right and (length + 2 * left - span) // stride + 1 == count
        if fits and (limit is None or left <= limit[i]):
            inside.append(left)
            outside.append((0, 0))
        else:
            inside.append(0)
            outside.append((left, right))
    return inside, pad_sides(outside)


def pad_sides(sides: Sequence[tuple[int, int]]) -> list[int]:
    """(Before, after) of the last dimensions as F.pad takes them, the last one first; empty if all are 0."""
    flat = [side for pair in reversed(sides) for side in pair]
    return flat if any(flat) else []


class Overlap(NamedTuple):
    """One dimension in which windows are added up where they overlap (a transposed convolution, col2im).

    Window ``i`` writes elements ``stride * i + dilation * k - padding``, ``k`` below ``kernel``, of ``size`` elements
    (0 where they do not matter).
    Elements come in blocks of ``stride``: block ``h`` has contributions of the ``reach`` windows from ``h + offset``.
    """

    windows: int
    kernel: int
    stride: int
    padding: int
    dilation: int
    size: int = 0

    @property
    def blocks(self) -> int:
        """Number of blocks that cover all elements."""
        return -(-self.size // self.stride)

    @property
    def offset(self) -> int:
        """First window that reaches the first element."""
        return -((self.dilation * (self.kernel - 1) - self.padding) // self.stride)

    @property
    def reach(self) -> int:
        """Windows from there to the last that reaches the first block."""
        return -(-self.padding // self.stride) - self.offset + 1

    def axes(self, place: str, reach: str, inside: str) -> tuple[str, str, dict[str, int]]:
        """How patterns read windows and write elements of this dimension, and the sizes of the axes."""
        sizes, read, written = {place: self.blocks}, place, place
        if (self.reach, self.offset, self.windows) != (1, 0, self.blocks):
            read = f"({place}+{reach}{self.offset:+d})"
            sizes[reach] = self.reach
        if self.stride > 1:
            written = f"({place} {inside})"
            sizes[inside] = self.stride
        return read, written, sizes

    def crop(self, read: tuple[int, int], written: tuple[int, int]) -> tuple[int, int]:
        """What the windows ``read`` write before and after the elements ``written``; negative: elements missing."""
        first = self.stride * read[0] - self.padding
        end = self.stride * (read[1] - 1) - self.padding + self.dilation * (self.kernel - 1) + 1
        return written[0] - first, end - written[1]


def overlap_axes(dims: Sequence[Overlap]) -> tuple[str, str, dict[str, int]]:
    """As :meth:`Overlap.axes`, of all spatial dimensions."""
    rank, sizes = len(dims), dict[str, int]()
    reads, writes = [], []
    for dim, place, reach, inside in zip(dims, PLACES[rank], REACH[rank], INSIDE[rank], strict=True):
        read, written, own = dim.axes(place, reach, inside)
        reads.append(read)
        writes.append(written)
        sizes |= own
    return " ".join(reads), " ".join(writes), sizes
