"""What matrix products reach on a device, measured over sizes and fitted by two figures; how well a profile fits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from statistics import median
from typing import Final, NamedTuple

import numpy as np
import torch

from flexsearch.cost.compute import ratios_of
from flexsearch.cost.efficiency import of_shape
from flexsearch.cost.learned import Residual
from flexsearch.cost.profile import Products, Profile
from flexsearch.graph.model import Dtype
from flexsearch.measure.sweeps import Bench
from flexsearch.topology import Device
from flexsearch.topology.kernels import USUAL

SIDES: Final[Mapping[str, tuple[int, ...]]] = {"cpu": (16, 96, 512), "cuda": (128, 1024, 8192)}
"""Rows, columns and indices summed away of the products that are measured, all combinations."""
TYPES: Final[Mapping[str, tuple[Dtype, ...]]] = {"cpu": ("float32",), "cuda": ("float32", "float16", "bfloat16")}
REPEATS: Final = 5
STEPS: Final = 200
"""Sizes that are tried for the best fit, from a hundredth of the smallest side to ten times the largest."""
COPIED: Final = 1 << 26
"""Bytes of a copy: more than caches hold."""


class Timed(NamedTuple):
    """A product of an (m, k) and a (k, n) matrix, and the seconds that it took."""

    m: int
    n: int
    k: int
    seconds: float


def measure_products(bench: Bench) -> dict[Dtype, Products]:
    """By type, what products of all sizes reach on the device of a bench."""
    kind = bench.device.type
    return {dtype: fit_products(list(_timed(bench, dtype, SIDES[kind]))) for dtype in TYPES[kind]}


def _timed(bench: Bench, dtype: Dtype, sides: Sequence[int]) -> Iterator[Timed]:
    for m, n, k in product(sides, repeat=3):
        left, right = (bench.fill(torch.empty(size, dtype=getattr(torch, dtype), device=bench.device)) for size in (
            (m, k), (k, n)
        ))  # fmt: skip
        # As many in a row as take a while: one alone is mostly its launch.
        count = max(1, int(1e8 // (m * n * k)) if bench.device.type == "cpu" else int(1e11 // (m * n * k)))
        times = []
        for _ in range(REPEATS + 1):
            start = bench.clock.mark()
            for _ in range(min(count, 1000)):
                torch.mm(left, right)
            end = bench.clock.mark()
            bench.clock.wait()
            times.append(bench.clock.between(start, end) / min(count, 1000))
        yield Timed(m, n, k, median(times[1:]))


def fit_products(rows: Sequence[Timed]) -> Products:
    """The two figures that explain these times best: the least median of |log(fitted / measured)|."""
    m, n, k, seconds = (np.array(column, float) for column in zip(*rows, strict=True))
    rates, sides = 2.0 * m * n * k / seconds, np.concatenate([m, n, k])
    best: tuple[float, float, float] | None = None
    for size in (0.0, *np.geomspace(sides.min() / 100.0, sides.max() * 10.0, STEPS).tolist()):
        peaks = rates / of_shape(size, m, n, k)
        peak = float(np.median(peaks))
        error = float(np.mean(np.minimum(np.abs(np.log(peaks / peak)), 1.0)))
        if best is None or error < best[0]:
            best = error, peak, size
    assert best is not None
    _, peak, size = best
    errors = np.abs(rates / (peak * of_shape(size, m, n, k)) - 1.0)
    return Products(**_residual(errors.tolist()).model_dump(), flops=peak, size=size)


def nominal(profile: Profile, bench: Bench) -> Device:
    """The device at hand, with peaks that explain what products and a copy reach, and the time of its shortest entry as
    what each operator takes."""
    data = torch.empty(COPIED // 4, device=bench.device)
    other, times = torch.empty_like(data), []
    for _ in range(REPEATS + 1):
        start = bench.clock.mark()
        other.copy_(data)
        end = bench.clock.mark()
        bench.clock.wait()
        times.append(bench.clock.between(start, end))
    bandwidth = 2.0 * COPIED / max(median(times[1:]), 1e-9)
    overhead_s = min((entry.forward_s for entry in profile.entries.values()), default=0.0)
    flops = {dtype: fitted.flops / USUAL.matrix for dtype, fitted in profile.products.items()}
    return Device(
        name="device", kind=profile.device.kind, host="host", model=profile.device.model, flops=flops,
        memory_bandwidth=bandwidth / USUAL.memory, memory_bytes=1, overhead_s=overhead_s,
    )  # fmt: skip


def residuals(profile: Profile, device: Device) -> dict[str, Residual]:
    """By kind of operator with several entries, how well each is filled from the others."""
    errors: dict[str, list[float]] = {}
    for backward in (False, True):
        for kind, ratios in ratios_of(profile, device, backward).items():
            for place, ratio in enumerate(ratios):
                if others := ratios[:place] + ratios[place + 1 :]:
                    errors.setdefault(kind, []).append(abs(median(others) / max(ratio, 1e-12) - 1.0))
    return {kind: _residual(values) for kind, values in sorted(errors.items())}


def _residual(errors: Sequence[float]) -> Residual:
    capped = np.minimum(errors, 1e9)
    return Residual(n=len(errors), median=float(np.median(capped)), p90=float(np.quantile(capped, 0.9)))
