"""What kernels reach of a device's peaks: figures of the device where it has some, else one share for all."""

from __future__ import annotations

from math import prod
from typing import Any, Final

from flexsearch.graph.model import Operator
from flexsearch.graph.ops import KINDS, kind_of
from flexsearch.graph.ops.base import Extents
from flexsearch.topology import Device
from flexsearch.topology.parts import Efficiency

# Share of the peak FLOP/s that is reached. Matrix work: 0.6, amid what cuDNN and oneDNN reach for the shapes of
# ordinary networks (0.4 to 0.8). Other work does no fused multiply-adds and hardly ever fills all pipes.
MATRIX_EFFICIENCY: Final = 0.6
OTHER_EFFICIENCY: Final = 0.25
# Share of the peak memory bandwidth that streaming reads and writes reach (STREAM gives 0.75 to 0.9).
MEMORY_EFFICIENCY: Final = 0.8
# Between the end of a GPU's kernel and the begin of the next one on a stream, s: 1 to 3 us, whatever the kernels.
KERNEL_S: Final = 2e-6

HALF: Final = ("float16", "bfloat16")

Product = tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]
"""Axes of a matrix product: those of its rows, of its columns, and those summed away."""


def roofline(kind: str, flops: float, nbytes: float, dtype: str, device: Device) -> float:
    """Seconds of work of an operator kind on ``device``, by its peaks and one share of them for all shapes."""
    matrix = kind in KINDS and (KINDS[kind].contraction or KINDS[kind].matrix)
    computing = device.flops_for(dtype) * (MATRIX_EFFICIENCY if matrix else OTHER_EFFICIENCY)
    work = max(flops / computing, nbytes / (device.memory_bandwidth * MEMORY_EFFICIENCY))
    return work + float(start_seconds(device, None, work))


def efficiency_of(device: Device, dtype: str) -> Efficiency | None:
    """The device's figures, if they hold for computing in ``dtype``."""
    return device.efficiency if dtype in HALF else None


def moving_rate(device: Device, dtype: str) -> float:
    """Bytes a second that kernels which compute in ``dtype`` read and write."""
    reached = efficiency_of(device, dtype)
    return device.memory_bandwidth * (MEMORY_EFFICIENCY if reached is None else reached.memory)


def start_seconds(device: Device, reached: Efficiency | None, work: Any) -> Any:
    """Seconds that an operator takes on its device besides its ``work`` (s; of an array of them: an array): on a CPU
    launching it; on a GPU, whose host does that, starting kernels, which what only makes a view does not."""
    if device.kind == "cpu":
        return device.overhead_s
    return (work > 0.0) * (KERNEL_S if reached is None else reached.overhead_s)


def computing_rates(
    op: Operator, product: Product | None, extents: Extents, dtype: str, device: Device
) -> tuple[Any, Any]:  # fmt: skip
    """FLOP/s of the forward and of the backward task of a piece (of arrays of extents: arrays). ``product``: see
    ``product_of``."""
    peak, kind, reached = device.flops_for(dtype), kind_of(op), efficiency_of(device, dtype)
    if reached is None:
        share: Any = MATRIX_EFFICIENCY if kind.contraction or kind.matrix else OTHER_EFFICIENCY
        return peak * share, peak * share
    if kind.fused_attention:
        return peak * reached.attention_forward, peak * reached.attention_backward
    if product is not None:
        share = shape_share(reached, *(prod(extents[axis] for axis in axes) for axes in product))
    else:
        share = reached.matrix if kind.contraction or kind.matrix else OTHER_EFFICIENCY
    return peak * share, peak * share


def shape_share(reached: Efficiency, rows: Any, columns: Any, summed: Any) -> Any:
    """Share of the peak that the product of a (rows, summed) and a (summed, columns) matrix reaches. It is the same for
    the two products of the backward pass, whose sizes are these three in another order."""
    return reached.matrix * of_shape(reached.matrix_size, rows, columns, summed)


def of_shape(size: float, rows: Any, columns: Any, summed: Any) -> Any:
    """What a product of this shape reaches, over what large ones do. ``size``: of a side that halves it, elements."""
    return 1.0 / ((1.0 + size / rows) * (1.0 + size / columns) * (1.0 + size / summed))


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
