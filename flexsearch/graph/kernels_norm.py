"""Normalisation. Batch norm comes in two operators, statistics and normalisation, so that pieces of the batch can add
up their statistics in between."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from flexsearch.graph.kernels_base import Kernel, KernelContext, Shapes, register_kernel
from flexsearch.graph.model import Operator
from flexsearch.graph.piece import Piece


def _affine(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """``x * scale + shift`` per channel, float64 (c,) each: one fused pass, which addcmul with broadcasting is not."""
    narrow = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
    scale, shift = scale.to(narrow), shift.to(narrow)
    zero, one = torch.zeros_like(scale), torch.ones_like(scale)
    return torch.native_batch_norm(x, scale, shift, zero, one, False, 0.0, 0.0)[0]


def _moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Local mean and mean square of each channel, float64 (c,).

    On the CPU, PyTorch's own variance is fast where channels are last (8x256x56x56, one thread: 1.3 ms by
    batch_norm_update_stats). Elsewhere sums and norms of rows are ten times as fast (1.2 ms, 10.7 by
    batch_norm_update_stats, 35 by var_mean). They lose digits where the mean is large against the deviation; then the
    slow way is taken.
    """
    if x.dtype in (torch.float16, torch.bfloat16):
        x = x.float()
    n, c = x.shape[:2]
    if x.device.type == "cpu" and not _channels_last(x):
        rows = x.reshape(n, c, -1)
        if rows.shape[2] == 1:
            rows = rows.reshape(1, n, c).transpose(1, 2)
        total = rows.sum(2, dtype=x.dtype).double().sum(0)
        square = torch.linalg.vector_norm(rows, dim=2).double().square_().sum(0)
        count = x.numel() // c
        mean, mean_square = total / count, square / count
        if x.dtype == torch.float64 or bool((mean * mean * 17 <= mean_square * 16).all()):
            return mean, mean_square
    if x.device.type == "cpu":
        mean, var = (y.double() for y in torch.batch_norm_update_stats(x, None, None, 0.0))
    else:
        var, mean = (y.double() for y in torch.var_mean(x, [0, *range(2, x.dim())], correction=0))
    return mean, var + mean * mean


def _channels_last(x: Tensor) -> bool:
    return x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()


def _settled(x: Tensor, alike: Tensor) -> Tensor:
    """``x`` in the layout of ``alike``, with the strides that its shape gives. With a single channel both layouts fit;
    aten then takes x for one and the gradient for the other, and crashes."""
    if _channels_last(alike):
        return x.contiguous(memory_format=torch.channels_last)
    strides = [prod(x.shape[d + 1 :]) for d in range(x.dim())]
    return x.contiguous().as_strided(x.shape, strides)


class _Statistics(torch.autograd.Function):
    """Rows sum(x) / count and sum(x * x) / count of each channel: x (n, c, ...) -> float64 (2, c)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(x)
        ctx.count = count
        share = x.numel() // x.shape[1] / count
        return torch.stack(_moments(x)) * share

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        gradient = gradient / ctx.count
        return _affine(x, 2 * gradient[1], gradient[0]), None


class _Normalise(torch.autograd.Function):
    """(x - mean) / sqrt(var + eps) * weight + bias with the variance ``mean square - mean ** 2``."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, statistics: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Tensor:
        mean = statistics[0]
        var = torch.addcmul(statistics[1], mean, mean, value=-1).clamp_(min=0)
        narrow = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
        center, invstd = mean.to(narrow), (var + eps).rsqrt().to(narrow)
        x = _settled(x, x)
        ctx.save_for_backward(x, statistics, weight, center, invstd)
        ctx.eps = eps
        gain, shift = (None if p is None else p.to(narrow) for p in (weight, bias))  # aten wants all alike
        return torch.native_batch_norm(x, gain, shift, center, var.to(narrow), False, 0.0, eps)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, statistics, weight, center, invstd = ctx.saved_tensors
        gain = torch.ones_like(center) if weight is None else weight.to(center.dtype)
        var = invstd.pow(-2) - ctx.eps  # aten takes the inverse deviation from the running variance
        wanted = [ctx.needs_input_grad[0], True, True]
        # aten is ten times as slow where the two are laid out differently.
        gx, gw, gb = torch.ops.aten.native_batch_norm_backward(
            _settled(gradient, x), x, gain, center, var, center, invstd, False, ctx.eps, wanted
        )
        wide, deviation = gain.double(), invstd.double()
        by_square = -0.5 * deviation.square() * wide * gw.double()
        by_mean = -deviation * wide * gb.double() - 2 * statistics[0] * by_square
        affine = (None, None) if weight is None else (gw.to(weight.dtype), gb.to(weight.dtype))
        return gx, torch.stack((by_mean, by_square)), *affine, None


class _BatchNorm(torch.autograd.Function):
    """Statistics and normalisation in one, where a device has the whole batch (or group) of its channels: aten's own,
    which reads x less often. The statistics have no gradient; only running ones may read them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
        x = _settled(x, x)
        out, mean, invstd = torch.native_batch_norm(x, weight, bias, None, None, True, 0.0, eps)
        wide = mean.double()
        statistics = torch.stack((wide, invstd.double().pow(-2) - eps + wide * wide))
        ctx.save_for_backward(x, weight, mean, invstd)
        ctx.eps = eps
        ctx.mark_non_differentiable(statistics)
        return statistics, out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, invstd = ctx.saved_tensors
        wanted = [ctx.needs_input_grad[0], weight is not None, weight is not None]
        gx, gw, gb = torch.ops.aten.native_batch_norm_backward(
            _settled(gradient, x), x, weight, None, None, mean, invstd, True, ctx.eps, wanted
        )
        return gx, gw, gb, None


def fused_batch_norm(op: Operator, statistics: Kernel, normalise: Kernel) -> Callable[..., tuple[Tensor, Tensor]]:
    """(x, weight, bias) -> (statistics, output) of ``batch_statistics`` and ``batch_norm`` on a device that has all
    that they need. ``statistics``, ``normalise``: their kernels, which are faster where channels do not come last
    (``_moments``)."""
    eps, grouped = float(str(op.attributes["eps"])), _grouped(op)

    def run(x: Tensor, *affine: Tensor) -> tuple[Tensor, Tensor]:
        single = all(t.dtype == torch.float32 for t in (x, *affine))
        if single and (x.is_cuda or _channels_last(x)):
            weight, bias = (*affine, None, None)[:2]
            found, out = _BatchNorm.apply(x, weight, bias, eps)  # type: ignore[no-untyped-call]
            return found[None] if grouped else found, out
        made = statistics(x)
        return made, normalise(x, made, *affine)

    return run


def _grouped(op: Operator) -> bool:
    """Whether parts of the batch have statistics of their own, with an axis ``g`` over the parts."""
    return "g" in op.sizes


@register_kernel("batch_statistics")
def batch_statistics(op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
    if not _grouped(op):
        count = prod(shapes[0]) // shapes[0][1]
        return lambda x: _Statistics.apply(x, count)  # type: ignore[no-untyped-call]
    count, groups = prod(shapes[0]) // shapes[0][1] // op.sizes["g"], piece.extent("g")
    return lambda x: torch.stack([_Statistics.apply(part, count) for part in x.chunk(groups)])  # type: ignore


@register_kernel("batch_norm")
def batch_norm(op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
    eps = float(str(op.attributes["eps"]))

    def run(x: Tensor, statistics: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Any:
        return _Normalise.apply(x, statistics, weight, bias, eps)  # type: ignore[no-untyped-call]

    def run_groups(x: Tensor, statistics: Tensor, *affine: Tensor) -> Tensor:
        parts = zip(x.chunk(len(statistics)), statistics.unbind(), strict=True)
        done = [run(part, own, *affine) for part, own in parts]
        return done[0] if len(done) == 1 else torch.cat(done)

    return run_groups if _grouped(op) else run


@register_kernel("batch_norm_running")
def batch_norm_running(op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
    momentum, count = float(str(op.attributes["momentum"])), int(str(op.attributes["count"]))
    unbiased = count / max(1, count - 1)

    @torch.no_grad()
    def run(statistics: Tensor, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
        new = statistics.double().reshape(2, -1)  # of the first group, if there are groups
        new_var = torch.addcmul(new[1], new[0], new[0], value=-1) * unbiased
        return torch.lerp(mean, new[0].to(mean.dtype), momentum), torch.lerp(var, new_var.to(var.dtype), momentum)

    return run


@register_kernel("batch_norm_inference")
def batch_norm_inference(op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
    eps = float(str(op.attributes["eps"]))

    def run(x: Tensor, *others: Tensor) -> Tensor:
        *affine, mean, var = others
        weight, bias = (*affine, None, None)[:2]
        return F.batch_norm(x, mean, var, weight, bias, False, 0.0, eps)

    return run


@register_kernel("layer_norm")
def layer_norm(op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
    eps, size = float(str(op.attributes["eps"])), _normalised(op, shapes)
    return lambda x, weight=None, bias=None: F.layer_norm(x, size, weight, bias, eps)


@register_kernel("rms_norm")
def rms_norm(op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
    given, size = op.attributes.get("eps"), _normalised(op, shapes)
    eps = None if given is None else float(str(given))
    return lambda x, weight=None: F.rms_norm(x, size, weight, eps)


def _normalised(op: Operator, shapes: Shapes) -> list[int]:
    """Sizes of the trailing whole dimensions of x, which are normalised together."""
    size: Any = op.attributes.get("normalized_shape")
    if size:
        return [int(n) for n in size]
    dimensions = op.access.inputs[0].dimensions
    whole = [i for i, d in enumerate(dimensions) if d.axes and d.axes[0][0].isupper()]
    return list(shapes[0][whole[0] :])


@register_kernel("group_norm")
def group_norm(op: Operator, piece: Piece, shapes: Shapes, context: KernelContext) -> Kernel:
    eps, groups = float(str(op.attributes["eps"])), int(str(op.attributes["groups"]))
    channels = shapes[0][1] // groups

    def run(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        # With channels last, aten's backward crashes where the weights need a gradient and x does not.
        return F.group_norm(x.contiguous(), x.shape[1] // channels, weight, bias, eps)

    return run
