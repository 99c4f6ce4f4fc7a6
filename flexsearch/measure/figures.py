"""Figures of the device at hand (``cost.profile.Figures``), fitted to reference operators, and how well a profile fits.

Of each type: two of matrix products, one of convolutions, two of attention, one for each way of reading and writing
memory, one of other computing, and the start of a kernel. A median or a scan each, so that single slow times do not
matter, and few enough that each size can be predicted from all others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Final, NamedTuple

import numpy as np

from flexsearch.cost.efficiency import of_shape, work_of
from flexsearch.cost.filling import Filling, estimated
from flexsearch.cost.learned import Residual
from flexsearch.cost.profile import Entry, Figures, Optimizer, Profile, UpdateEntry
from flexsearch.cost.updates import STREAMS
from flexsearch.graph.model import Dtype
from flexsearch.topology import Device
from flexsearch.topology.kernels import HALF, Efficiency, Launches

STEPS: Final = 100
"""Sizes that are tried for matrix products, from a hundredth of the smallest side to ten times the largest; and rates
of other computing."""
CASTS: Final = {"cpu": 2, "cuda": 1}
"""Launches for each weight that a rank casts to half precision, and its gradient back: on a GPU their memory is
allocated one by one, and all are copied together (``runtime.casts``)."""
STARTED: Final = 3.0
"""Tasks that take less than so many starts of a kernel tell nothing of rates."""
LEAST_S: Final = 1e-9
LEAST: Final = 1e-3
"""Of a share."""


class Starts(NamedTuple):
    """``host_s``: that launching an operator takes a host; ``kernel_s``: from one kernel to the next on the device."""

    host_s: float
    kernel_s: float


@dataclass(frozen=True)
class Reached:
    """What tasks of one type reach. ``flops``: FLOP/s of large matrix products, ``size``: of a side that halves them,
    ``unaligned``: at most, of those of odd sizes, and of multiples of 2 and of 4;
    ``convolution``: over those of such products;
    ``attention``: FLOP/s forward and backward; ``other``: FLOP/s; ``bandwidth``: B/s by ``work_of``; ``start_s``."""

    flops: float
    size: float
    convolution: float
    attention: tuple[float, float]
    other: float
    bandwidth: Mapping[str, float]
    start_s: float
    unaligned: tuple[float, float, float]

    def efficiency(self, peak: float, bandwidth: float) -> Efficiency:
        """The same as shares of these peaks."""

        def share(rate: float, of: float, most: float = 1.0) -> float:
            return min(max(rate / of, LEAST), most)

        traffic = {work: share(rate, bandwidth) for work, rate in self.bandwidth.items() if work != "streaming"}
        return Efficiency.model_validate(
            {
                "matrix": share(self.flops, peak), "matrix_size": self.size,
                "unaligned": tuple(share(rate, peak) for rate in self.unaligned),
                "convolution": self.convolution, "other": share(self.other, peak),
                "attention_forward": share(self.attention[0], peak, 2.0),
                "attention_backward": share(self.attention[1], peak, 2.0),
                "memory": share(self.bandwidth.get("streaming", bandwidth), bandwidth), "traffic": traffic,
                "overhead_s": self.start_s,
            }
        )  # fmt: skip


@dataclass(frozen=True)
class _Task:
    """A measured task of a reference operator."""

    entry: Entry
    backward: bool

    @property
    def seconds(self) -> float:
        return self.entry.backward_s if self.backward else self.entry.forward_s

    @property
    def flops(self) -> float:
        return (self.entry.backward if self.backward else self.entry.forward).flops

    @property
    def nbytes(self) -> float:
        return (self.entry.backward if self.backward else self.entry.forward).nbytes


def fit_figures(
    measured: Mapping[Dtype, Sequence[Entry]], updates: Mapping[Optimizer, UpdateEntry], kind: str,
    starts: Starts | None,
) -> Figures:  # fmt: skip
    """The figures that explain what was measured of reference operators, by type. ``starts``: of a device that computes
    what its host launches; None: an operator's start is what the shortest one takes."""
    reached = {dtype: _reached(_tasks(entries)) for dtype, entries in measured.items()}
    errors: dict[str, list[float]] = {}
    for dtype, entries in measured.items():
        for place, entry in enumerate(entries):
            others = _reached(_tasks([*entries[:place], *entries[place + 1 :]]))
            device = _assembled({"float32": others, dtype: others}, None).on(_plain(kind))
            for task in _tasks([entry]):
                error = abs(estimated(task.entry, device, task.backward) / max(task.seconds, LEAST_S) - 1.0)
                errors.setdefault(f"{dtype} {_work(entry)}", []).append(error)
    # Times of small operators hold what launching them takes a host, so they are compared with starts that do, too.
    launches = _launches(measured["float32"], updates, _assembled(reached, None), kind)
    fits = {work: residual(values) for work, values in sorted(errors.items())}
    figures = _assembled(reached, starts).model_copy(update={"launches": launches, "fits": fits})
    if "adam" not in updates:
        return figures
    return _with_updates(figures, STREAMS["adam"] / max(updates["adam"].s_per_byte, LEAST_S / figures.memory_bandwidth))


def _with_updates(figures: Figures, rate: float) -> Figures:
    """With the share of the bandwidth that updates of weights reach; ``rate``: B/s."""
    share = min(max(rate / figures.memory_bandwidth, LEAST), 1.0)
    traffic = dict(figures.efficiency_full.traffic) | {"update": share}
    return figures.model_copy(
        update={"efficiency_full": figures.efficiency_full.model_copy(update={"traffic": traffic})}
    )


def nominal(profile: Profile) -> Device:
    """The device that a profile was measured on, with the profile's figures."""
    device = _plain(profile.device.kind)
    return device if profile.figures is None else profile.figures.on(device)


def residuals(profile: Profile) -> dict[str, Residual]:
    """By kind of operator with several entries, how well each is filled from the others."""
    errors = Filling(profile, nominal(profile)).errors(profile)
    return {kind: residual(values) for kind, values in sorted(errors.items())}


def residual(errors: Sequence[float]) -> Residual:
    """Of these relative errors."""
    capped = np.minimum(errors, 1e9)
    return Residual(n=len(errors), median=float(np.median(capped)), p90=float(np.quantile(capped, 0.9)))


def _plain(kind: str) -> Device:
    """A device whose own figures do not matter."""
    return Device.model_validate(
        {"name": "device", "kind": kind, "host": "host", "model": "", "flops": {"float32": 1e9},
         "memory_bandwidth": 1e9, "memory_bytes": 1, "overhead_s": 0.0}
    )  # fmt: skip


def _tasks(entries: Iterable[Entry]) -> list[_Task]:
    both = (_Task(entry, backward) for entry in entries for backward in (False, True))
    return [task for task in both if task.seconds > 0.0]


def _work(entry: Entry) -> str:
    return {"attention": "attention", "conv2d": "convolutions"}.get(entry.kind, work_of(entry.kind))


def _assembled(reached: Mapping[Dtype, Reached], starts: Starts | None) -> Figures:
    """Figures of all types; the half ones share what the last of them reaches, but for the rate of their products."""
    if starts is not None:
        reached = {dtype: replace(one, start_s=starts.kernel_s) for dtype, one in reached.items()}
    bandwidth = max(rate for one in reached.values() for rate in one.bandwidth.values())
    full, half = reached["float32"], [one for dtype, one in reached.items() if dtype in HALF]
    return Figures(
        flops={dtype: one.flops for dtype, one in reached.items()}, memory_bandwidth=bandwidth,
        overhead_s=full.start_s if starts is None else starts.host_s,
        efficiency=half[-1].efficiency(half[-1].flops, bandwidth) if half else None,
        efficiency_full=full.efficiency(full.flops, bandwidth), launches=Launches(),
    )  # fmt: skip


def _reached(tasks: Sequence[_Task]) -> Reached:
    """What explains these times best."""
    by_work: dict[str, list[_Task]] = {}
    for task in tasks:
        by_work.setdefault(_work(task.entry), []).append(task)
    start_s = min(task.seconds for task in tasks if not task.backward)
    products, convolutions, attention = (by_work.pop(w) for w in ("matrix products", "convolutions", "attention"))
    bandwidth = {work: _rate(group, start_s, lambda task: task.nbytes) for work, group in by_work.items()}
    by_alignment = [[task for task in products if _alignment(task) == of] for of in (1, 2, 4)]
    flops, size = _products([task for task in products if _alignment(task) == 0], start_s)
    convolution = _rate(
        convolutions, start_s,
        lambda task: task.flops / (flops * float(of_shape(size, *(task.entry.product or (1, 1, 1))))),
    )  # fmt: skip
    computing = [_rate([t for t in attention if t.backward == back], start_s, lambda t: t.flops) for back in (0, 1)]
    one, two, four = (_rate(tasks, start_s, lambda t: t.flops) if tasks else flops for tasks in by_alignment)
    reached = computing[0], computing[1]
    fitted = Reached(flops, size, convolution, reached, flops, bandwidth, start_s, (one, two, four))
    return replace(fitted, other=_other([task for group in by_work.values() for task in group], fitted))


def _rate(tasks: Sequence[_Task], start_s: float, amount: Callable[[_Task], float]) -> float:
    """Median of what a second does beyond the start, of tasks that take longer; of the longest if none does."""
    tasks = [task for task in tasks if amount(task) > 0.0]
    long = [task for task in tasks if task.seconds > STARTED * start_s]
    long = long or [max(tasks, key=lambda task: task.seconds)]
    return median(amount(task) / max(task.seconds - start_s, LEAST_S) for task in long)


def _products(tasks: Sequence[_Task], start_s: float) -> tuple[float, float]:
    """FLOP/s of large products, and the side that halves them: the least mean of |log(fitted / measured)|, at most 1
    each."""
    sizes = np.array([task.entry.product for task in tasks], float).T
    flops, seconds = np.array([task.flops for task in tasks]), np.array([task.seconds for task in tasks])
    beyond = np.maximum(seconds - start_s, LEAST_S)
    long = seconds > min(STARTED * start_s, float(np.median(seconds)))
    best = (np.inf, 1.0, 0.0)
    for size in (0.0, *np.geomspace(sizes.min() / 100.0, sizes.max() * 10.0, STEPS).tolist()):
        shape = of_shape(size, *sizes)
        peak = float(np.median((flops / beyond / shape)[long]))
        error = _error(start_s + flops / (peak * shape), seconds)
        best = min(best, (error, peak, size))
    return best[1], best[2]


def _alignment(task: _Task) -> int:
    """Of a matrix product: the lowest of the bits 1, 2 and 4 of the number of its columns or summed indices; 0: none,
    or it is no product."""
    _, columns, summed = task.entry.product or (0, 0, 0)
    either = (columns | summed) & 7
    return either & -either


def _other(tasks: Sequence[_Task], fitted: Reached) -> float:
    """FLOP/s of what is no matrix product, which counts only where it says more than bytes do: the highest of the rates
    that explain all of it best."""
    flops, seconds = np.array([task.flops for task in tasks]), np.array([task.seconds for task in tasks])
    moving = np.array([task.nbytes / fitted.bandwidth[_work(task.entry)] for task in tasks])
    rates = np.geomspace(fitted.flops, fitted.flops * LEAST, STEPS).tolist()
    errors = [_error(fitted.start_s + np.maximum(flops / rate, moving), seconds) for rate in rates]
    return float(rates[int(np.argmin(errors))])


def _error(fitted: np.ndarray, seconds: np.ndarray) -> float:
    return float(np.mean(np.minimum(np.abs(np.log(fitted / np.maximum(seconds, LEAST_S))), 1.0)))


def _launches(
    entries: Sequence[Entry], updates: Mapping[Optimizer, UpdateEntry], figures: Figures, kind: str
) -> Launches:  # fmt: skip
    """How many starts the smallest operator of each kind takes besides its work, where that is less than a start; and
    an update of each tensor."""
    device, start_s = figures.on(_plain(kind)), max(figures.efficiency_full.overhead_s, LEAST_S)
    least: dict[str, Entry] = {}
    for entry in entries:
        least[entry.kind] = min(entry, least.get(entry.kind, entry), key=lambda one: one.forward_s)
    starts: dict[str, int] = {}
    for name, entry in least.items():
        if (work_s := estimated(entry, device, False) - start_s) < start_s:
            starts[name] = round((entry.forward_s - work_s) / start_s)
    kernels = {kind: count for kind, count in sorted(starts.items()) if count > 1}
    tensors = {name: max(1, round(entry.s_per_tensor / start_s)) for name, entry in updates.items()}
    return Launches.model_validate({"kernels": kernels, "casts": CASTS[kind], **tensors})
