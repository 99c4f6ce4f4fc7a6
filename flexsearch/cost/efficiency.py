"""What kernels reach of a device's peaks, by the device's own figures (``topology.kernels``)."""

from __future__ import annotations

from math import prod
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from flexsearch.graph.model import Operator
from flexsearch.graph.ops import KINDS, kind_of
from flexsearch.graph.ops.base import Extents, OperatorKind
from flexsearch.topology import Device
from flexsearch.topology.kernels import USUAL, Efficiency, Traffic

if TYPE_CHECKING:
    from flexsearch.cost.profile import Profile


class Bandwidth(NamedTuple):
    """``bytes_per_s``: the median of ``n`` measured pieces."""

    n: int
    bytes_per_s: float


Product = tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]
"""Axes of a matrix product: those of its rows, of its columns, and those summed away."""


def roofline(kind: str, flops: float, nbytes: float, dtype: str, device: Device) -> float:
    """Seconds of work of an operator kind on ``device``, by its peaks and the usual shares of them for all shapes."""
    of = KINDS.get(kind)
    computing = device.flops_for(dtype) * (USUAL.matrix if of is not None and _is_matrix(of) else USUAL.other)
    work = max(flops / computing, nbytes / (device.memory_bandwidth * USUAL.memory))
    return work + float(start_seconds(device, USUAL, work, kind))


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


def bandwidths(profile: Profile) -> dict[str, Bandwidth]:
    """What the measured pieces of a profile that are no matrix products reach, forward, by ``work_of``. What the
    shortest of all takes counts as the start of each; those that take less than twice that are left out."""
    start = min((entry.forward_s for entry in profile.entries.values()), default=0.0)
    rates: dict[str, list[float]] = {}
    for entry in profile.entries.values():
        work = work_of(entry.kind)
        if work != "matrix products" and entry.forward.nbytes > 0.0 and entry.forward_s > 2.0 * start:
            rates.setdefault(work, []).append(entry.forward.nbytes / (entry.forward_s - start))
    return {work: Bandwidth(len(values), median(values)) for work, values in sorted(rates.items())}


def start_seconds(device: Device, reached: Efficiency, work: Any, kind: str | None = None) -> Any:
    """Seconds that an operator takes on its device besides its ``work`` (s; of an array of them: an array): on a CPU
    launching it; on a GPU, whose host does that, starting kernels, which what only makes a view does not. ``kind``: of
    the operator, which may be a chain of several kernels."""
    kernels = device.launched.kernels.get(kind, 1) if kind is not None else 1
    if device.kind == "cpu":
        return kernels * device.overhead_s
    return (work > 0.0) * (kernels * reached.overhead_s)


def computing_rates(
    op: Operator, product: Product | None, extents: Extents, dtype: str, device: Device
) -> tuple[Any, Any]:  # fmt: skip
    """FLOP/s of the forward and of the backward task of a piece (of arrays of extents: arrays). ``product``: see
    ``product_of``."""
    peak, kind, reached = device.flops_for(dtype), kind_of(op), device.efficiency_for(dtype)
    if kind.fused_attention:
        return peak * reached.attention_forward, peak * reached.attention_backward
    if product is not None:
        share = shape_share(reached, *(prod(extents[axis] for axis in axes) for axes in product))
    else:
        share = reached.matrix if _is_matrix(kind) else reached.other
    return peak * share, peak * share


def update_rates(device: Device, optimizer: str, streams: int) -> tuple[float, float]:
    """Seconds of an update for each byte of weights, of which it moves ``streams`` times as many, and for each tensor:
    on a CPU launching its passes. Masters and states are of full precision."""
    per_byte = streams / moving_rate(device, "float32", "update")
    return per_byte, device.launched.update(optimizer) * (device.overhead_s - device.launch_s)


def _is_matrix(kind: OperatorKind) -> bool:
    return kind.contraction or kind.matrix


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
