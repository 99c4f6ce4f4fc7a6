"""Normalisation of each sample by itself: over its last dimensions, or over groups of its channels; and of weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from flexsearch.graph.model import Operator
from flexsearch.graph.ops.base import (
    INPUTS,
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
from flexsearch.graph.ops.batch_norm import Norm, by_running
from flexsearch.graph.ops.builder import Builder, letters
from flexsearch.graph.ops.lazy import F
from flexsearch.graph.ops.pointwise import cast, pointwise
from flexsearch.graph.ops.reduce import reduce
from flexsearch.graph.ops.spatial import check_pattern
from flexsearch.graph.ops.value import Value
from flexsearch.graph.piece import Piece

if TYPE_CHECKING:
    from torch import Tensor


class _OverDimensions(OperatorKind):
    """Normalises over the last dimensions, which are whole; the others can be split."""

    attributes = Norm
    backward = 2.0
    traffic = "normalisation"
    saved = INPUTS

    def trace(
        self, b: Builder, input: Value, normalized_shape: Sequence[int], weight: Value | None = None,
        bias: Value | None = None, eps: float | None = None, **_: Any,
    ) -> Value:  # fmt: skip
        width = len(normalized_shape)
        whole = " ".join(name.upper() for name in letters(width, "d"))
        batch = " ".join(f"b{i}" for i in range(input.rank - width))
        return _normalise(b, self.name, input, weight, bias, f"{batch} {whole}", whole, eps=eps)

    def check(self, op: Operator, attributes: Any, shapes: tuple[tuple[int, ...], ...]) -> str:
        dimensions = op.access.inputs[0].dimensions
        whole = [i for i, d in enumerate(dimensions) if d.axes and d.axes[0][0].isupper()]
        if not whole:
            return f'pattern "{op.pattern}" keeps no dimension whole, so nothing is normalised'
        size = shapes[0][whole[0] :]
        if whole != list(range(whole[0], len(dimensions))) or (attributes.normalized_shape or list(size)) != list(size):
            return f'pattern "{op.pattern}" must keep the last dimensions whole, which are normalised'
        if wrong := [shape for shape in shapes[1:-1] if shape != size]:
            return f"{op.kind} over dimensions of shape {list(size)} with weights of shape {list(wrong[0])}"
        if shapes[0] != shapes[-1] or op.access.outputs[0] != op.access.inputs[0]:
            return f"{op.kind} of a tensor of shape {list(shapes[0])} has another shape"
        return ""


class LayerNorm(_OverDimensions):
    name = "layer_norm"
    targets = ("aten.layer_norm",)
    pattern = "b.. D.., D.., D.. -> b.. D.."
    inputs = (1, 3)

    def flops(self, op: Operator, extents: Extents) -> Any:
        return 8.0 * output_elements(op, extents)

    def kernel(self, op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
        eps, size = float(str(op.attributes["eps"])), _normalised(op, shapes)
        return lambda x, weight=None, bias=None: F.layer_norm(x, size, weight, bias, eps)

    def samples(self) -> Iterable[Sample]:
        yield Sample(lambda x, w, b: F.layer_norm(x, (5,), w, b), (rand(3, 4, 5), rand(5), rand(5)))
        yield Sample(lambda x: F.layer_norm(x, (4, 5), eps=1e-3), (rand(3, 4, 5),))


class RootNorm(_OverDimensions):
    name = "rms_norm"
    targets = ("aten.rms_norm",)
    pattern = "b.. D.., D.. -> b.. D.."
    inputs = (1, 2)

    class attributes(Norm):
        eps: Annotated[float, Field(ge=0.0, le=1e6)] | None = None  # type: ignore[assignment]  # None: the dtype's

    def flops(self, op: Operator, extents: Extents) -> Any:
        return 5.0 * output_elements(op, extents)

    def kernel(self, op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
        attribute, size = op.attributes.get("eps"), _normalised(op, shapes)
        eps = None if attribute is None else float(str(attribute))
        return lambda x, weight=None: F.rms_norm(x, size, weight, eps)

    def samples(self) -> Iterable[Sample]:
        yield Sample(lambda x, w: F.rms_norm(x, (5,), w), (rand(3, 4, 5), rand(5)))
        yield Sample(lambda x: F.rms_norm(x, (4, 5), eps=1e-3), (rand(3, 4, 5),))


def _normalised(op: Operator, shapes: Shapes) -> list[int]:
    """Sizes of the trailing whole dimensions of x, which are normalised together."""
    dimensions = op.access.inputs[0].dimensions
    whole = [i for i, d in enumerate(dimensions) if d.axes and d.axes[0][0].isupper()]
    return list(shapes[0][whole[0] :])


class GroupNorm(OperatorKind):
    """Over all elements of a group of channels; instance normalisation is that with a group for each channel."""

    name = "group_norm"
    pattern = "n (g C) S.., (g C), (g C) -> n (g C) S.."
    targets = ("aten.group_norm",)
    roles = {"g": "parameter"}
    words = {"g": "channel groups"}
    inputs = (1, 3)
    backward = 2.0
    traffic = "normalisation"
    saved = INPUTS

    class attributes(Norm):
        groups: Annotated[int, Field(ge=1, lt=2**31)]

    def trace(
        self, b: Builder, input: Value, num_groups: int, weight: Value | None = None, bias: Value | None = None,
        eps: float = 1e-5, **_: Any,
    ) -> Value:  # fmt: skip
        return _normalise(b, "group_norm", input, weight, bias, "n (g C) S..", "(g C)", groups=num_groups, eps=eps)

    def check(self, op: Operator, attributes: Any, shapes: tuple[tuple[int, ...], ...]) -> str:
        if len(shapes[0]) < 2 or shapes[0][1] % attributes.groups:
            return f"attributes.groups: {attributes.groups} do not divide the channels of shape {list(shapes[0])}"
        template = f"n (g C) S..{', (g C)' * (len(op.inputs) - 1)} -> n (g C) S.."
        return check_pattern(op, template, shapes, {"g": attributes.groups})

    def flops(self, op: Operator, extents: Extents) -> Any:
        return 8.0 * output_elements(op, extents)

    def kernel(self, op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
        eps, groups = float(str(op.attributes["eps"])), int(str(op.attributes["groups"]))
        channels = shapes[0][1] // groups

        def run(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
            # With channels last, aten's backward crashes where the weights need a gradient and x does not.
            return F.group_norm(x.contiguous(), x.shape[1] // channels, weight, bias, eps)

        return run

    def samples(self) -> Iterable[Sample]:
        yield Sample(lambda x, w, b: F.group_norm(x, 3, w, b), (rand(2, 6, 4), rand(6), rand(6)))
        yield Sample(lambda x: F.instance_norm(x, eps=1e-3), (rand(2, 3, 4, 5),))


for _kind in (LayerNorm(), RootNorm(), GroupNorm()):
    define(_kind)


def _normalise(
    b: Builder, kind: str, x: Value, weight: Value | None, bias: Value | None, pattern: str, operand: str, **more: Any
) -> Value:
    affine = [p for p in (weight, bias) if p is not None]
    template = f"{pattern}{f', {operand}' * len(affine)} -> {pattern}"
    attributes = {**more, "has_weight": weight is not None, "has_bias": bias is not None}
    sizes = {"g": more["groups"]} if "groups" in more else None
    return b.emit(kind, [x, *affine], x.shape, template, attributes, sizes=sizes, short=kind)


@rewrite("instance_norm")
def _instance_norm(
    b: Builder, input: Value, weight: Value | None = None, bias: Value | None = None,
    running_mean: Value | None = None, running_var: Value | None = None, use_input_stats: bool = True,
    momentum: float = 0.1, eps: float = 1e-5, **_: Any,
) -> Value:  # fmt: skip
    """By its own statistics a group normalisation with a group for each channel. Torch's operator writes the running
    ones in place without saying so: their new values are updates that the traced program lacks."""
    affine = [x for x in (weight, bias) if x is not None]
    running = [x for x in (running_mean, running_var) if x is not None]
    if not use_input_stats:
        return by_running(b, input, [*affine, *running], {"eps": eps, "affine": bool(affine)})
    channels = input.shape[1]
    for old, new in zip(running, _instance_statistics(b, input) if running else (), strict=True):
        if old.kind == "buffer":
            last = b.updates.get(old, old)
            b.updates[old] = pointwise(b, "lerp.Scalar", (last, cast(b, new, old.dtype), momentum))
    return _normalise(b, "group_norm", input, weight, bias, "n (g C) S..", "(g C)", groups=channels, eps=eps)


def _instance_statistics(b: Builder, x: Value) -> tuple[Value, Value]:
    """Mean and (unbiased) variance of the samples' channels, averaged over the batch."""
    space, count = range(2, x.rank), prod(x.shape[2:])
    x = b.emit("detach", [x], x.shape, short="detach") if x.grad else x
    mean = reduce(b, "mean", x, space, True, x.dtype)
    apart = pointwise(b, "sub.Tensor", (x, mean))
    squares = reduce(b, "sum", pointwise(b, "mul.Tensor", (apart, apart)), space, False, x.dtype)
    var = pointwise(b, "div.Scalar", (reduce(b, "mean", squares, [0], False, x.dtype), max(1, count - 1)))
    return reduce(b, "mean", x, [0, *space], False, x.dtype), var


@rewrite("native_group_norm")
def _native_group_norm(
    b: Builder, input: Value, weight: Value | None, bias: Value | None, group: int, eps: float, **_: Any
) -> tuple[Value, None, None]:
    y = _normalise(b, "group_norm", input, weight, bias, "n (g C) S..", "(g C)", groups=group, eps=eps)
    return y, None, None


@rewrite("native_layer_norm")
def _native_layer_norm(b: Builder, **call: Any) -> tuple[Value, None, None]:
    return LayerNorm().trace(b, **call), None, None


@rewrite("_fused_rms_norm")
def _fused_rms_norm(b: Builder, **call: Any) -> tuple[Value, None]:
    return RootNorm().trace(b, **call), None


@rewrite("_weight_norm", "_weight_norm_interface")
def _weight_norm(b: Builder, v: Value, g: Value, dim: int = 0) -> Any:
    """``v`` scaled to the length ``g``: of all of it (dim -1), or of each of its parts along ``dim``."""
    rest = [d for d in range(v.rank) if dim == -1 or d != dim]
    squares = pointwise(b, "mul.Tensor", (v, v))
    total = reduce(b, "sum", squares, rest, dim != -1, v.dtype) if rest else squares
    scale = pointwise(b, "div.Tensor", (g, pointwise(b, "sqrt.default", (total,))))
    result = pointwise(b, "mul.Tensor", (v, scale))
    return result if len(b.results) == 1 else (result, None)
