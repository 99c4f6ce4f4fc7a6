"""Batch normalisation, in two operators: statistics and normalisation, so that pieces of the batch can add up their
statistics in between."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from flexsearch.graph.model import Operator, Role
from flexsearch.graph.ops.attributes import Share
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
    output_elements,
    rand,
    rewrite,
)
from flexsearch.graph.ops.builder import Builder
from flexsearch.graph.ops.lazy import F, torch
from flexsearch.graph.ops.spatial import check_pattern
from flexsearch.graph.ops.value import Value
from flexsearch.graph.piece import Piece
from flexsearch.quantities import Size

if TYPE_CHECKING:
    from torch import Tensor

CHANNELS: dict[str, Role] = {"c": "parameter"}


class Norm(Attributes):
    eps: Annotated[float, Field(ge=0.0, le=1e6)]
    has_weight: bool = False
    has_bias: bool = False
    affine: bool = False
    normalized_shape: list[Size] | None = None


def _grouped(op: Operator) -> bool:
    """Whether parts of the batch have statistics of their own, with an axis ``g`` over the parts."""
    return "g" in op.sizes


def _samples(groups: int) -> tuple[str, str, dict[str, int]]:
    """Dimensions of samples and of statistics in a pattern, and the sizes of axes. One group has no axis of its own, so
    that its statistics may be added up over any split of the batch."""
    return ("(g n)", "g M", {"g": groups}) if groups > 1 else ("n", "M", {})


def _reading_any(kernel: Any) -> Kernel:
    """A kernel that computes as precisely as it has to, whatever the types of its operands are."""
    kernel.in_type = lambda _: kernel
    return kernel  # type: ignore[no-any-return]


class BatchStatistics(OperatorKind):
    """Mean and mean square of each channel, float64: (2, channels), or (groups, 2, channels)."""

    name = "batch_statistics"
    pattern = "n c s.. -> M c"
    roles = CHANNELS
    image = True
    grouped = True
    traffic = "normalisation"
    saved = INPUTS

    class attributes(Attributes):
        count: Annotated[int, Field(ge=1, lt=2**48)]

    def check(self, op: Operator, attributes: Any, shapes: tuple[tuple[int, ...], ...]) -> str:
        fits = len(shapes[0]) >= 2 and shapes[1][-2:] == (2, shapes[0][1]) and len(shapes[1]) < 4
        if not fits:
            return f"statistics of shape {list(shapes[0])} cannot have shape {list(shapes[1])}"
        samples, rows, sizes = _samples(prod(shapes[1][:-2]))
        return check_pattern(op, f"{samples} c s.. -> {rows} c", shapes, sizes)

    def flops(self, op: Operator, extents: Extents) -> Any:
        return 3.0 * input_elements(op, extents)

    def kernel(self, op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
        from flexsearch.graph.ops.norm_functions import Statistics

        count = prod(shapes[0]) // shapes[0][1]
        if not _grouped(op):
            return _reading_any(lambda x: Statistics.apply(x, count))  # type: ignore[no-untyped-call]
        share, groups = count // op.sizes["g"], piece.extent("g")
        return _reading_any(lambda x: torch.stack([Statistics.apply(p, share) for p in x.chunk(groups)]))  # type: ignore

    def samples(self) -> Iterable[Sample]:
        yield Sample(lambda x: F.batch_norm(x, None, None, training=True), (rand(4, 3, 2, 3),))


class BatchNorm(OperatorKind):
    """Normalisation by the statistics that the second operand holds."""

    name = "batch_norm"
    pattern = "n c s.., M c, c, c -> n c s.."
    roles = CHANNELS
    attributes = Norm
    inputs = (2, 4)
    backward = 2.0
    image = True
    grouped = True
    traffic = "normalisation"
    saved = INPUTS

    def check(self, op: Operator, attributes: Any, shapes: tuple[tuple[int, ...], ...]) -> str:
        if len(shapes[0]) < 2 or shapes[1][-2:] != (2, shapes[0][1]) or len(shapes[1]) > 3:
            return f"batch normalisation of shape {list(shapes[0])} by statistics of shape {list(shapes[1])}"
        samples, rows, sizes = _samples(prod(shapes[1][:-2]))
        affine = ", c" * (len(op.inputs) - 2)
        return check_pattern(op, f"{samples} c s.., {rows} c{affine} -> {samples} c s..", shapes, sizes)

    def flops(self, op: Operator, extents: Extents) -> Any:
        return 4.0 * output_elements(op, extents)

    def kernel(self, op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
        from flexsearch.graph.ops.norm_functions import Normalise

        eps = float(str(op.attributes["eps"]))

        def run(x: Tensor, statistics: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Any:
            return Normalise.apply(x, statistics, weight, bias, eps)  # type: ignore[no-untyped-call]

        def run_groups(x: Tensor, statistics: Tensor, *affine: Tensor) -> Tensor:
            parts = zip(x.chunk(len(statistics)), statistics.unbind(), strict=True)
            done = [run(part, own, *affine) for part, own in parts]
            return done[0] if len(done) == 1 else torch.cat(done)

        return _reading_any(run_groups if _grouped(op) else run)

    def samples(self) -> Iterable[Sample]:
        yield Sample(
            lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True), (rand(4, 3, 5), rand(3), rand(3))
        )


class BatchNormRunning(OperatorKind):
    """New running mean and variance."""

    name = "batch_norm_running"
    pattern = "M c, c, c -> c, c"
    roles = CHANNELS
    inputs = (3, 3)
    outputs = 2
    backward = 0.0
    image = True
    bookkeeping = True
    saved = NOTHING

    class attributes(BatchStatistics.attributes):
        momentum: Share

    def check(self, op: Operator, attributes: Any, shapes: tuple[tuple[int, ...], ...]) -> str:
        if len(shapes[0]) not in (2, 3) or shapes[0][-2] != 2:
            return f"{op.kind} by statistics of shape {list(shapes[0])}"
        group = "1 " * (len(shapes[0]) - 2)
        return check_pattern(op, f"{group}M c, c, c -> c, c", shapes)

    def flops(self, op: Operator, extents: Extents) -> Any:
        return 3.0 * output_elements(op, extents)

    def kernel(self, op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
        momentum, count = float(str(op.attributes["momentum"])), int(str(op.attributes["count"]))
        return partial(_updated, momentum=momentum, unbiased=count / max(1, count - 1))

    def samples(self) -> Iterable[Sample]:
        yield Sample(_with_running, (rand(4, 3, 5), rand(3), rand(3)))


def _with_running(x: Tensor, mean: Tensor, var: Tensor) -> Any:
    """Training batch normalisation as it is traced, with the new running statistics among its results."""
    call = torch.ops.aten._native_batch_norm_legit_functional.default
    y, _, _, *running = call(x, None, None, mean.detach(), var.detach(), True, 0.1, 1e-5)
    return y, *(new.detach() for new in running)


def _updated(
    statistics: Tensor, mean: Tensor, var: Tensor, momentum: float, unbiased: float
) -> tuple[Tensor, Tensor]:
    """New running mean and variance. ``unbiased``: samples of each channel over one less."""
    with torch.no_grad():
        new = statistics.double().reshape(-1, 2, statistics.shape[-1])[0]  # of the first group, if there are groups
        new_var = torch.addcmul(new[1], new[0], new[0], value=-1) * unbiased
        return torch.lerp(mean, new[0].to(mean.dtype), momentum), torch.lerp(var, new_var.to(var.dtype), momentum)


class BatchNormInference(OperatorKind):
    """Normalisation by running statistics."""

    name = "batch_norm_inference"
    pattern = "n c s.., c, c, c, c -> n c s.."
    roles = CHANNELS
    attributes = Norm
    inputs = (3, 5)
    image = True
    traffic = "normalisation"
    saved = INPUTS

    def check(self, op: Operator, attributes: Any, shapes: tuple[tuple[int, ...], ...]) -> str:
        if len(shapes[0]) < 2:
            return "batch normalisation needs samples and channels"
        return check_pattern(op, f"n c s..{', c' * (len(op.inputs) - 1)} -> n c s..", shapes)

    def flops(self, op: Operator, extents: Extents) -> Any:
        return 4.0 * output_elements(op, extents)

    def kernel(self, op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
        eps = float(str(op.attributes["eps"]))

        def run(x: Tensor, *others: Tensor) -> Tensor:
            *affine, mean, var = others
            weight, bias = (*affine, None, None)[:2]
            return F.batch_norm(x, mean, var, weight, bias, False, 0.0, eps)

        return run

    def samples(self) -> Iterable[Sample]:
        yield Sample(
            lambda x, w, b: F.batch_norm(x, torch.ones(3).double(), torch.ones(3).double() * 2, w, b),
            (rand(4, 3, 5, 2), rand(3), rand(3)),
        )


for _kind in (BatchStatistics(), BatchNorm(), BatchNormRunning(), BatchNormInference()):
    define(_kind)


@rewrite(
    "_native_batch_norm_legit_functional", "_native_batch_norm_legit.no_stats", "_native_batch_norm_legit_no_training",
    "_native_batch_norm_legit.default",
)  # fmt: skip
def _batch_norm(
    b: Builder, input: Value, weight: Value | None, bias: Value | None, eps: float, momentum: float,
    running_mean: Value | None = None, running_var: Value | None = None, training: bool = False,
) -> tuple[Value | None, ...]:  # fmt: skip
    """Batch normalisation as three operators, so that statistics of split batches are partial sums like any other.

    With groups, each equal part of the batch has statistics of its own; the running ones are those of the first.
    Returns what the torch operator does: output, two saved statistics (None), and the new running ones.
    """
    affine = [x for x in (weight, bias) if x is not None]
    attributes = {"eps": eps, "affine": bool(affine)}
    if not training:
        assert running_mean is not None and running_var is not None
        return by_running(b, input, [*affine, running_mean, running_var], attributes), None, None
    batch, channels, *space = input.shape
    groups = b.batch_norm_groups
    if batch % groups:
        raise b.error(f"has a batch of {batch}, which batch_norm_groups={groups} does not divide into equal parts")
    count = prod((batch // groups, *space))
    samples, rows, sizes = _samples(groups)
    grouped = (groups,) if groups > 1 else ()
    statistics = b.emit(
        "batch_statistics", [input], (*grouped, 2, channels), f"{samples} c s.. -> {rows} c", {"count": count},
        dtype="float64", sizes=sizes, short="statistics", auxiliary=True,
    )  # fmt: skip
    pattern = f"{samples} c s.., {rows} c{', c' * len(affine)} -> {samples} c s.."
    operands = [input, statistics, *affine]
    out = b.emit("batch_norm", operands, input.shape, pattern, attributes, sizes=sizes, short="batch_norm")
    if running_mean is None or running_var is None:
        return out, None, None
    mean, var = b.emit_all(
        "batch_norm_running",
        [statistics, running_mean, running_var],
        [(running_mean.shape, running_mean.dtype), (running_var.shape, running_var.dtype)],
        f"{'1 ' * len(grouped)}M c, c, c -> c, c",
        attributes={"momentum": momentum, "count": count},
        short="running",
        auxiliary=True,
    )
    return out, None, None, mean, var


def by_running(b: Builder, x: Value, channels: Sequence[Value], attributes: dict[str, Any]) -> Value:
    """Normalisation by running statistics, the last two of ``channels``; before them the weights."""
    pattern = f"n c s..{', c' * len(channels)} -> n c s.."
    return b.emit("batch_norm_inference", [x, *channels], x.shape, pattern, attributes, short="batch_norm")


def batch_norm_at_once(operators: Sequence[Operator], kernels: Sequence[Kernel]) -> Kernel:
    """(x, weight, bias) -> (statistics, output) of ``batch_statistics`` and ``batch_norm`` (``operators``) on a device
    that has all that they need; with ``batch_norm_running`` behind them (x, weight, bias, mean, variance) -> (None,
    output, mean, variance), which are updated in place. ``kernels``: theirs, which are faster where channels do not
    come last."""
    momentum = float(str(operators[2].attributes["momentum"])) if len(operators) > 2 else 0.0
    return _at_once(operators[1], kernels, momentum)


def _at_once(op: Operator, kernels: Sequence[Kernel], momentum: float) -> Kernel:
    """:func:`batch_norm_at_once` of the normalisation ``op``."""
    from flexsearch.graph.ops import norm_functions as functions

    statistics, normalise, *running = kernels
    eps, grouped = float(str(op.attributes["eps"])), _grouped(op)

    def run(x: Tensor, *others: Tensor) -> tuple[Tensor | None, ...]:
        affine, buffers = (others[:-2], others[-2:]) if running else (others, ())
        single = all(t.dtype == torch.float32 for t in (x, *others))
        half = x.is_cuda and x.dtype in (torch.bfloat16, torch.float16)
        if half or (single and (x.is_cuda or functions.channels_last(x))):
            weight, bias = (*(t.float() for t in affine), None, None)[:2]
            if running and functions.by_torch(x):
                mean, var = buffers
                out = torch.batch_norm(x, weight, bias, mean, var, True, momentum, eps, torch.backends.cudnn.enabled)
                return None, out, mean, var
            both, out = functions.BatchNorm.apply(x, weight, bias, eps, momentum, *buffers)  # type: ignore
            return (None, out, *buffers) if running else (both[None] if grouped else both, out)
        moments = statistics(x)
        out = normalise(x, moments, *affine)
        if not running:
            return moments, out
        for buffer, new in zip(buffers, running[0](moments, *buffers), strict=True):
            buffer.copy_(new)
        return None, out, *buffers

    return run


def normalising(op: Operator, extents: Mapping[str, int], kernel: Kernel) -> Kernel:
    """What a device does for a piece of an operator of batch normalisation, as one measures it; else ``kernel``, the
    piece's own.

    By all samples it takes statistics and updates running ones with the normalisation (:func:`batch_norm_at_once`). By
    some of them it has three kernels. What updating takes is then measured with the statistics, and nothing is left for
    ``batch_norm_running``, whose sizes do not tell the two apart. Statistics that nobody keeps are measured as if they
    were kept."""
    if op.kind == "batch_norm_running":
        return lambda _, *buffers: buffers
    if op.kind not in ("batch_statistics", "batch_norm"):
        return kernel
    others = {axis: size for axis, size in op.sizes.items() if axis not in ("c", "g")}
    whole = all(extents[axis] == size for axis, size in others.items()) and extents.get("g", 1) == 1
    update: Kernel = partial(_updated, momentum=0.1, unbiased=1.0)  # of any figures: they take as long
    buffers: list[Tensor] = []

    def running(x: Tensor) -> list[Tensor]:
        if not buffers:
            buffers.extend(x.new_ones(x.shape[1], dtype=torch.promote_types(x.dtype, torch.float32)) for _ in range(2))
        return buffers

    if op.kind == "batch_statistics":
        if whole:
            return _reading_any(lambda x: x.new_zeros((*([1] * _grouped(op)), 2, x.shape[1]), dtype=torch.float64))

        def with_running(x: Tensor) -> Tensor:
            both: Tensor = kernel(x)
            update(both, *running(x))
            return both

        return _reading_any(with_running)
    if not whole:
        return kernel
    from flexsearch.graph.ops.norm_functions import Statistics

    def statistics(x: Tensor) -> Tensor:
        both: Tensor = Statistics.apply(x, x.numel() // x.shape[1])  # type: ignore[no-untyped-call]
        return both[None] if _grouped(op) else both

    joined = _at_once(op, [statistics, kernel, update], momentum=0.1)
    return _reading_any(lambda x, _, *affine: joined(x, *affine, *running(x))[1])
