"""What kernels reach of a device's peaks, by the device's own figures (``topology.kernels``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from flexsearch.graph.model import Operator
from flexsearch.graph.ops import KINDS, kind_of
from flexsearch.graph.ops.base import OperatorKind
from flexsearch.topology import Device
from flexsearch.topology.kernels import HALF, Efficiency, Traffic

Product = tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]
"""Axes of a matrix product: those of its rows, of its columns, and those summed away."""
Sizes = tuple[Any, Any, Any]
"""Their indices."""


def moving_rate(device: Device, dtype: str, traffic: Traffic | None = None) -> float:
    """Bytes a second that kernels which compute in ``dtype`` read and write. ``traffic``: how; None: they stream."""
    return device.memory_bandwidth * device.efficiency_for(dtype).bandwidth_share(traffic)


def traffic_of(kind: OperatorKind) -> Traffic | None:
    """How the kernels of a kind of operator read and write."""
    return "lookup" if kind.table is not None else kind.traffic


def work_of(kind: str) -> str:
    """What the time of an operator kind goes into: "matrix products", or a way of reading and writing memory, of which
    "streaming" is the usual one."""
    if (of := KINDS.get(kind)) is None:
        return "unknown work"
    return "matrix products" if _is_matrix(of) else traffic_of(of) or "streaming"


def start_seconds(device: Device, reached: Efficiency, work: Any, kind: str | None = None) -> Any:
    """Seconds that an operator takes on its device besides its ``work`` (s; of an array of them: an array): on a CPU
    launching it; on a GPU, whose host does that, starting kernels, which what only makes a view does not. ``kind``: of
    the operator, which may be a chain of several kernels."""
    kernels = device.launched.kernels.get(kind, 1) if kind is not None else 1
    if device.kind == "cpu":
        return kernels * device.overhead_s
    return (work > 0.0) * (kernels * reached.overhead_s)


def task_seconds_of(
    kind: str, flops: Any, nbytes: Any, sizes: Sizes | None, dtype: str, device: Device, backward: bool,
    most: Callable[[Any, Any], Any] = max,
) -> Any:  # fmt: skip
    """Seconds of a task of an operator kind by the device's figures: what takes longer of computing ``flops`` and of
    moving ``nbytes``, and its start. ``sizes``: of the matrix product that it is; ``most``: the larger of two numbers,
    or of arrays, if the others are."""
    of, reached = KINDS.get(kind), device.efficiency_for(dtype)
    if of is not None and _is_product(of) and device.rounds(dtype):
        # Tensor cores compute it, which need as large sizes as in half precision.
        rate = device.product_flops_for(dtype) * _computing_share(of, sizes, device.efficiency_for(HALF[0]), backward)
    else:
        rate = device.flops_for(dtype) * _computing_share(of, sizes, reached, backward)
    moving = moving_rate(device, dtype, None if of is None else traffic_of(of))
    work = most(flops / rate, nbytes * reached.passes.get(kind, 1.0) / moving)
    return work + start_seconds(device, reached, work, kind)


def _computing_share(kind: OperatorKind | None, sizes: Sizes | None, reached: Efficiency, backward: bool) -> Any:
    """Share of the peak that a task reaches. ``sizes``: see ``task_seconds_of``."""
    if kind is None or not _is_matrix(kind):
        return reached.other
    if kind.fused_attention:
        return reached.attention_backward if backward else reached.attention_forward
    large = reached.matrix * (reached.convolution if kind.windows else 1.0)
    if sizes is None:
        return large
    share = large * of_shape(reached.matrix_size, *sizes)
    return share if kind.windows else of_alignment(share, reached.unaligned, *sizes[1:])


def update_rates(device: Device, optimizer: str, streams: float) -> tuple[float, float]:
    """Seconds of an update for each byte of weights, of which it moves ``streams`` times as many, and for each tensor:
    on a CPU launching its passes. Masters and states are of full precision."""
    passes = device.efficiency_for("float32").passes.get(optimizer, 1.0)
    per_byte = streams * passes / moving_rate(device, "float32", "update")
    return per_byte, device.launched.update(optimizer) * (device.overhead_s - device.launch_s)


def _is_matrix(kind: OperatorKind) -> bool:
    return kind.contraction or kind.matrix


def _is_product(kind: OperatorKind) -> bool:
    """Whether it is a plain matrix product. What convolutions reach in float32 has cuDNN's TF32 already, and attention
    in one kernel has its own code."""
    return _is_matrix(kind) and not kind.windows and not kind.fused_attention


def of_shape(size: float, rows: Any, columns: Any, summed: Any) -> Any:
    """What the product of a (rows, summed) and a (summed, columns) matrix reaches, over what large ones do. It is the
    same for the two products of the backward pass, whose sizes are these three in another order. ``size``: of a side
    that halves it, elements."""
    return 1.0 / ((1.0 + size / rows) * (1.0 + size / columns) * (1.0 + size / summed))


def of_alignment(share: Any, unaligned: Sequence[float], columns: Any, summed: Any) -> Any:
    """Share of the peak that a product reaches which would reach ``share`` if its columns and summed indices (integers,
    or arrays of them) were multiples of 8: at most ``unaligned`` if they are odd, or multiples of 2 or 4. Rows of its
    operands, of its result and of their gradients have one length or the other."""
    either = columns | summed
    if isinstance(either, int):
        lowest = either & -either
        return share if lowest >= 8 else min(share, unaligned[lowest.bit_length() - 1])
    odd, two, four = ((either & bits) != 0 for bits in (1, 2, 4))
    most = np.where(odd, unaligned[0], np.where(two, unaligned[1], np.where(four, unaligned[2], 1.0)))
    return np.minimum(share, most)


def product_of(op: Operator) -> Product | None:
    """The axes of the matrix product that a contraction of two factors is; None of other operators. What indexes both
    factors and the result counts products, and belongs to none of the three."""
    if not kind_of(op).contraction:
        return None
    factors = [set(operand.names()) for operand in op.access.inputs if not operand.once]
    if len(factors) != 2:
        return None
    (first, second), result = factors, set(op.access.outputs[0].names())
    own = first & result - second, second & result - first, (first | second) - result
    rows, columns, summed = (tuple(sorted(axes)) for axes in own)
    return rows, columns, summed
