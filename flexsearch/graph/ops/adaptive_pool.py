"""Adaptive pooling: to a given size, whatever that of the image is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import gcd
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
    Shapes,
    define,
    input_elements,
    rand,
)
from flexsearch.graph.ops.builder import Builder
from flexsearch.graph.ops.lazy import F
from flexsearch.graph.ops.local import extent
from flexsearch.graph.ops.pool import WITH_INDICES, in_image, pool
from flexsearch.graph.ops.spatial import (
    IMAGE,
    INSIDE,
    PLACES,
    REACH,
    WORDS,
    check_pattern,
)
from flexsearch.graph.ops.value import Value
from flexsearch.graph.piece import Piece

if TYPE_CHECKING:
    pass


class AdaptivePool(OperatorKind):
    """A pool to a given size whose windows differ: window i of n begins at floor(i * size / n) and ends at
    ceil((i + 1) * size / n). Whole blocks of windows read whole blocks of the image; these can be split."""

    roles = IMAGE
    words = WORDS
    image = True

    def __init__(self, which: str, spatial: int) -> None:
        self.spatial, self.which = spatial, which
        self.name = f"adaptive_{which}_pool{spatial}d"
        self.targets = (f"aten.{self.name}",)
        if which == "avg" and spatial > 1:
            self.targets = (*self.targets, f"aten._{self.name}")
        self.saved = WITH_INDICES if which == "max" else INPUTS

    def trace(self, b: Builder, x: Value, output_size: Any) -> Any:
        spatial, kind = self.spatial, f"{self.which}_pool{self.spatial}d"
        source, target = x.shape[-spatial:], b.shape[-spatial:]
        if all(s % t == 0 for s, t in zip(source, target, strict=True)):
            kernel = [s // t for s, t in zip(source, target, strict=True)]
            extra: dict[str, Any] = {"ceil_mode": False}
            if self.which == "avg":
                extra |= {"count_include_pad": True, "divisor_override": None}
            pooled = x if source == target else pool(b, x, kind, kernel, kernel, 0, **extra)
            if len(b.results) == 1:
                return pooled
            return pooled, pool(b, x, "max_pool_indices", kernel, kernel, 0, ceil_mode=False)
        template, sizes = adaptive_pattern(x.rank, source, target)
        attributes = {"output_size": list(target)}
        pooled = b.emit(self.name, [x], b.shape, template, attributes, sizes=sizes, short=self.name)
        if len(b.results) == 1:
            return pooled
        places = b.emit("adaptive_max_pool_indices", [x], b.shape, template, attributes, dtype="int64", sizes=sizes)
        return pooled, places

    def flops(self, op: Operator, extents: Extents) -> Any:
        return input_elements(op, extents)

    def check(self, op: Operator, attributes: Any, shapes: tuple[tuple[int, ...], ...]) -> str:
        return _check_adaptive(op, self.spatial, shapes)

    def kernel(self, op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
        call, size = getattr(F, self.name), list(extent(piece.outputs[0])[-self.spatial :])
        return lambda x: call(x, size)

    def samples(self) -> Iterable[Sample]:
        call, spatial = getattr(F, self.name), self.spatial
        yield Sample(lambda x: call(x, (4, 2, 6)[:spatial]), (rand(2, 3, *(6, 5, 4)[:spatial]),))
        yield Sample(lambda x: call(x, (3, 2, 2)[:spatial]), (rand(3, *(7, 5, 3)[:spatial]),))


def adaptive_pattern(rank: int, source: Sequence[int], target: Sequence[int]) -> tuple[str, dict[str, int]]:
    """Pattern of an adaptive pool of an operand of ``rank`` dimensions, and the sizes of its spatial axes."""
    spatial, sizes = len(source), dict[str, int]()
    reads: list[str] = []
    writes: list[str] = []
    names = zip(PLACES[spatial], REACH[spatial], INSIDE[spatial], source, target, strict=True)
    for place, reach, inside, size, count in names:
        blocks = gcd(size, count)
        for texts, name, length in ((reads, reach, size), (writes, inside, count)):
            if blocks == 1:
                texts.append(name)
                sizes[name] = length
            else:
                texts.append(place if length == blocks else f"({place} {name})")
                sizes |= {place: blocks} if length == blocks else {place: blocks, name: length // blocks}
    lead = "n c" if rank == spatial + 2 else "c"
    return f"{lead} {' '.join(reads)} -> {lead} {' '.join(writes)}", sizes


def _check_adaptive(op: Operator, spatial: int, shapes: tuple[tuple[int, ...], ...]) -> str:
    x, y = shapes
    if not spatial < len(x) == len(y) <= spatial + 2:
        return f"{op.kind} with operands of shapes {list(shapes)}"
    lead = "n c" if len(x) == spatial + 2 else "c"
    whole = f"{lead} {' '.join(REACH[spatial])} -> {lead} {' '.join(INSIDE[spatial])}"
    if not check_pattern(op, whole, shapes):  # as graphs were once written
        return ""
    template, sizes = adaptive_pattern(len(x), x[-spatial:], y[-spatial:])
    return check_pattern(op, template, shapes, sizes)


class OutputSize(Attributes):
    output_size: list[int]


class AdaptiveMaxPoolIndices(OperatorKind):
    """Where in its image each maximum lies (row-major)."""

    name = "adaptive_max_pool_indices"
    roles = IMAGE
    words = WORDS
    attributes = OutputSize
    image = True
    saved = NOTHING
    backward = 0.0

    def flops(self, op: Operator, extents: Extents) -> Any:
        return input_elements(op, extents)

    def check(self, op: Operator, attributes: Any, shapes: tuple[tuple[int, ...], ...]) -> str:
        spatial = len(attributes.output_size)
        return (
            _check_adaptive(op, spatial, shapes)
            if 1 <= spatial <= 3
            else "attributes.output_size must have 1 to 3 numbers"
        )

    def kernel(self, op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
        output_size: Any = op.attributes["output_size"]
        rank, box = len(output_size), piece.inputs[0]
        assert box is not None
        call, size = getattr(F, f"adaptive_max_pool{rank}d"), list(extent(piece.outputs[0])[-rank:])
        corner, image = [low for low, _ in box[-rank:]], shapes[0][-rank:]
        return lambda x: in_image(call(x, size, return_indices=True)[1], x.shape[-rank:], corner, image)

    def samples(self) -> Iterable[Sample]:
        yield Sample(lambda x: F.adaptive_max_pool2d(x, (4, 2), return_indices=True), (rand(2, 3, 6, 5),))


for _kind in (
    *(AdaptivePool(which, spatial) for which in ("avg", "max") for spatial in (1, 2, 3)),
    AdaptiveMaxPoolIndices(),
):
    define(_kind)
