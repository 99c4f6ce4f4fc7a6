"""Batch normalisation as functions of autograd: statistics and normalisation apart, so that pieces of the batch can add
up their statistics in between, or both in one. Imported where a kernel is made, because it needs torch."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CUDNN_EPSILON, CUDNN_SAMPLES = 1e-5, 65535
"""The least epsilon, and the most samples, that cuDNN takes."""


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
    if x.device.type == "cpu" and not channels_last(x):
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


def channels_last(x: Tensor) -> bool:
    return x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()


def _settled(x: Tensor, alike: Tensor) -> Tensor:
    """``x`` in the layout of ``alike``, with the strides that its shape gives. With a single channel both layouts fit;
    aten then takes x for one and the gradient for the other, and crashes."""
    if channels_last(alike):
        return x.contiguous(memory_format=torch.channels_last)
    strides = [prod(x.shape[d + 1 :]) for d in range(x.dim())]
    return x.contiguous().as_strided(x.shape, strides)


class Statistics(torch.autograd.Function):
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


class Normalise(torch.autograd.Function):
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


def by_torch(x: Tensor) -> bool:
    """Whether PyTorch's own node of autograd normalises ``x`` and updates running statistics. On a GPU a node in Python
    (:class:`BatchNorm`) takes the host longer; on a CPU PyTorch's is ten times as slow where the gradient is laid out
    differently."""
    return x.is_cuda


class BatchNorm(torch.autograd.Function):
    """Statistics and normalisation in one, where a device has the whole batch (or group) of its channels, by the
    library that PyTorch's own layer takes, which reads x less often. The first result is the statistics, which have no
    gradient. ``running``: mean and variance, which are updated in place; the first result is None then."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, momentum: float,
        *running: Tensor,
    ) -> tuple[Tensor | None, Tensor]:
        x = _settled(x, x)
        mean, var = running or (None, None)
        ctx.by_cudnn = _suits_cudnn(x, weight, eps)
        if ctx.by_cudnn:
            outputs = torch.ops.aten.cudnn_batch_norm(x, weight, bias, mean, var, True, momentum, eps)
        else:
            outputs = torch.native_batch_norm(x, weight, bias, mean, var, True, momentum, eps)
        out, center, invstd, *reserve = outputs
        ctx.save_for_backward(x, weight, center, invstd, *reserve)
        ctx.eps = eps
        if running:
            return None, out
        wide = center.double()
        statistics = torch.stack((wide, invstd.double().pow(-2) - eps + wide * wide))
        ctx.mark_non_differentiable(statistics)
        return statistics, out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor | None, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, invstd, *reserve = ctx.saved_tensors
        gradient, nothing = _settled(gradient, x), (None,) * (len(ctx.needs_input_grad) - 3)
        if ctx.by_cudnn:
            gradients = torch.ops.aten.cudnn_batch_norm_backward(
                x, gradient, weight, None, None, mean, invstd, ctx.eps, *reserve
            )
            return (*gradients, *nothing)
        wanted = [ctx.needs_input_grad[0], weight is not None, weight is not None]
        gradients = torch.ops.aten.native_batch_norm_backward(
            gradient, x, weight, None, None, mean, invstd, True, ctx.eps, wanted
        )
        return (*gradients, *nothing)


def _suits_cudnn(x: Tensor, weight: Tensor | None, eps: float) -> bool:
    """Whether PyTorch leaves batch normalisation of ``x`` to cuDNN (``_select_batch_norm_backend`` in its
    Normalization.cpp)."""
    if not x.is_cuda or x.dtype != torch.float32 or x.dim() < 4 or weight is None:
        return False
    there: bool = torch.backends.cudnn.is_acceptable(x)  # type: ignore[no-untyped-call]
    return there and eps >= CUDNN_EPSILON and x.shape[0] <= CUDNN_SAMPLES
