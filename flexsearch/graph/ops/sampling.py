"""Images sampled at given points: ``F.grid_sample`` and ``F.affine_grid``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from flexsearch.graph.model import Operator
from flexsearch.graph.ops.base import (
    INPUTS,
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
)
from flexsearch.graph.ops.builder import Builder
from flexsearch.graph.ops.lazy import F, torch
from flexsearch.graph.ops.spatial import IMAGE, PLACES, REACH, WORDS, check_pattern
from flexsearch.graph.ops.value import Value
from flexsearch.graph.piece import Piece

if TYPE_CHECKING:
    from torch import Tensor

Mode = Annotated[int, Field(ge=0, le=2)]


class GridSample(OperatorKind):
    """Each point of the grid says where in its image it is sampled: the image is whole, all else can be split."""

    name = "grid_sample"
    targets = ("aten.grid_sampler", "aten.grid_sampler_2d", "aten.grid_sampler_3d")
    roles = IMAGE
    words = WORDS
    inputs = (2, 2)
    image = True
    backward = 2.0
    saved = INPUTS

    class attributes(Attributes):
        interpolation_mode: Mode
        padding_mode: Mode
        align_corners: bool

    def trace(self, b: Builder, input: Value, grid: Value, **attributes: Any) -> Value:
        return b.emit(self.name, [input, grid], b.shape, _sampled(input.rank - 2), attributes, short=self.name)

    def check(self, op: Operator, attributes: Any, shapes: tuple[tuple[int, ...], ...]) -> str:
        spatial = len(shapes[0]) - 2
        if spatial not in (2, 3) or shapes[1][-1] != spatial or (spatial == 3 and attributes.interpolation_mode == 2):
            return f"{op.kind} of an image of shape {list(shapes[0])} at points of shape {list(shapes[1])}"
        return check_pattern(op, _sampled(spatial), shapes)

    def flops(self, op: Operator, extents: Extents) -> Any:
        """Linear interpolation of the neighbours in each dimension."""
        return 3.0 * 2.0 ** (len(op.access.outputs[0].dimensions) - 2) * output_elements(op, extents)

    def kernel(self, op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
        options: Any = [op.attributes[name] for name in ("interpolation_mode", "padding_mode", "align_corners")]
        return lambda x, grid: torch.grid_sampler(x, grid, *options)

    def samples(self) -> Iterable[Sample]:
        grid = rand(2, 5, 3, 2).tanh()
        yield Sample(lambda x, g: F.grid_sample(x, g, align_corners=False), (rand(2, 3, 4, 6), grid))
        yield Sample(
            lambda x, g: F.grid_sample(x, g, "bicubic", "reflection", align_corners=True), (rand(2, 3, 4, 6), grid)
        )
        cube = rand(2, 3, 2, 4, 3).tanh()
        yield Sample(
            lambda x, g: F.grid_sample(x, g, padding_mode="border", align_corners=False), (rand(2, 3, 4, 5, 3), cube)
        )


def _sampled(spatial: int) -> str:
    places, image = " ".join(PLACES[spatial]), " ".join(REACH[spatial])
    return f"n c {image}, n {places} D -> n c {places}"


class AffineGrid(OperatorKind):
    """Points of an image under an affine map, (samples, [depth,] height, width, coordinates)."""

    name = "affine_grid"
    targets = ("aten.affine_grid_generator",)
    roles = IMAGE
    words = WORDS
    saved = INPUTS

    class attributes(Attributes):
        align_corners: bool

    def trace(self, b: Builder, theta: Value, align_corners: bool = False, **_: Any) -> Value:
        template = _mapped(len(b.shape) - 2)
        return b.emit(self.name, [theta], b.shape, template, {"align_corners": align_corners}, short=self.name)

    def check(self, op: Operator, attributes: Any, shapes: tuple[tuple[int, ...], ...]) -> str:
        spatial = len(shapes[1]) - 2
        if spatial not in (2, 3) or shapes[0][1:] != (spatial, spatial + 1):
            return f"{op.kind} of shape {list(shapes[1])} by a map of shape {list(shapes[0])}"
        return check_pattern(op, _mapped(spatial), shapes)

    def flops(self, op: Operator, extents: Extents) -> Any:
        return 2.0 * op.sizes["K"] * output_elements(op, extents)

    def kernel(self, op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
        """The piece's own points, times the map."""
        corners, places = bool(op.attributes["align_corners"]), PLACES[len(piece.outputs[0]) - 2]

        def run(theta: Tensor) -> Tensor:
            lines = []
            for place, (first, end) in zip(places, piece.outputs[0][1:-1], strict=True):
                count = op.sizes[place]
                index = torch.arange(first, end, dtype=theta.dtype, device=theta.device)
                last = max(count - 1, 1)
                lines.append((2 * index - (count - 1)) / (last if corners else count))
            grid = torch.meshgrid(*lines, indexing="ij")
            points = torch.stack([*reversed(grid), torch.ones_like(grid[0])], dim=-1)
            return torch.einsum("...k,ndk->n...d", points, theta)

        return run

    def samples(self) -> Iterable[Sample]:
        yield Sample(lambda t: F.affine_grid(t, [2, 3, 5, 4], align_corners=False), (rand(2, 2, 3),))
        yield Sample(lambda t: F.affine_grid(t, [2, 3, 1, 5, 4], align_corners=True), (rand(2, 3, 4),))


def _mapped(spatial: int) -> str:
    return f"n D K -> n {' '.join(PLACES[spatial])} D"


for _kind in (GridSample(), AffineGrid()):
    define(_kind)
