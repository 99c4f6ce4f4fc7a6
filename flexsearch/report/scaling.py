"""How a step scales with the number of devices: a table, where it stops paying, a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from flexsearch.report.grid import Column, Grid
from flexsearch.report.money import Price, money, unit
from flexsearch.report.style import COLOURS, plain
from flexsearch.report.uncertainty import INTERVAL, time_words
from flexsearch.report.units import byte_unit, digits, nbytes, percent, ratio, time_unit
from flexsearch.simulate.staged import Step

Kind = Literal["strong", "weak"]

WORTH: Final = 0.5
"""Added devices pay if they bring at least this share of what they would bring if the step scaled linearly. Taken: at
less, they would do more as a cluster of their own."""


SAME: Final = 0.01
"""Throughputs that differ by less than this share count as one. Taken."""


@dataclass(frozen=True)
class ScalingPoint:
    """The best plan for so many devices. ``batch``: samples of a step. ``step`` is None where there is no plan;
    ``reason`` says why. ``plan``: in words. ``data_parallel_s``: seconds of a step of plain data parallelism, if it
    fits. ``looked_at``: plans that were simulated."""

    devices: int
    batch: int
    step: Step | None
    plan: str = ""
    reason: str = ""
    data_parallel_s: float | None = None
    looked_at: int = 0

    @property
    def fits(self) -> bool:
        return self.step is not None and not self.step.missing

    @property
    def rate(self) -> float:
        """Samples a second; 0 without a plan that fits."""
        return self.batch / self.step.makespan_s if self.step is not None and self.fits else 0.0


@dataclass(frozen=True)
class Scaling:
    """Plans for more and more devices, those for the fewest first. ``kind``: "strong" (each step has the same batch) or
    "weak" (the batch grows with the devices). ``length``: tokens of a sample, None for images and the like."""

    kind: Kind
    points: tuple[ScalingPoint, ...]
    length: int | None = None
    price: Price | None = field(default=None, kw_only=True)

    @cached_property
    def fitting(self) -> tuple[ScalingPoint, ...]:
        return tuple(point for point in self.points if point.fits)

    @property
    def base(self) -> ScalingPoint:
        """The fewest devices on which something fits: what the others are compared with. There must be one."""
        return self.fitting[0]

    def speedup(self, point: ScalingPoint) -> float:
        """Throughput against that of ``base``."""
        return point.rate / self.base.rate

    def efficiency(self, point: ScalingPoint) -> float:
        """Throughput of a device against that on ``base``."""
        return self.speedup(point) * self.base.devices / point.devices

    def amount(self, point: ScalingPoint) -> float:
        """Money for a billion tokens or a million samples. There must be a price and a step."""
        assert self.price is not None
        assert point.step is not None
        return self.price.amount(point.step.makespan_s, point.devices, point.batch, self.length)

    @staticmethod
    def gain(few: ScalingPoint, many: ScalingPoint) -> float:
        """What the added devices bring, as a share of what they would bring if throughput grew with their number."""
        return (many.rate / few.rate - 1.0) / (many.devices / few.devices - 1.0)

    def worth(self) -> tuple[ScalingPoint, ScalingPoint | None]:
        """The most devices that pay, and the next number, which does not: None if it was not tried. A number pays if
        its gain on the largest one before that pays is at least ``WORTH``."""
        last = self.base
        for point in self.fitting[1:]:
            if self.gain(last, point) >= WORTH:
                last = point
        after = (point for point in self.fitting if point.devices > last.devices)
        return last, next(after, None)


# ---- for people


def scaling_table(scaling: Scaling) -> Grid:
    """One row for each number of devices. Those on which nothing fits are red and say by how much; the most devices
    that pay are bold."""
    tokens, price = scaling.length is not None, scaling.price
    cost = [Column(f"cost of\n{unit(scaling.length)}", "number below")] if price is not None else []
    batch = [Column("batch")] if scaling.kind == "weak" else []
    grid = Grid((
        Column("devices", "text"), *batch, Column(f"step,\n{INTERVAL}"), Column("tokens/s" if tokens else "samples/s"),
        Column("speed-up"), Column("efficiency"), Column("MFU", "number below"),
        Column("peak\nmemory", "number below"), *cost,
        Column("plan", "below", least=40),
    ))  # fmt: skip
    best = scaling.worth()[0] if scaling.fitting else None
    for point in scaling.points:
        grid.add(
            str(point.devices), *([f"{point.batch:,}"] if batch else []), *_cells(scaling, point),
            style="red" if not point.fits else "bold" if point == best else "",
        )  # fmt: skip
    return grid


def _cells(scaling: Scaling, point: ScalingPoint) -> list[str]:
    step, cost = point.step, [""] if scaling.price is not None else []
    if step is None:
        return ["-", "", "", "", "", "", *cost, point.reason]
    if not point.fits:
        words = f"nothing fits; the nearest plan is {nbytes(step.missing)} short on the fullest device: {point.plan}"
        return ["-", "", "", "", "", f"{nbytes(step.fullest.peak)} !", *cost, words]
    if scaling.price is not None:
        cost = [money(scaling.amount(point))]
    rate = point.rate * (scaling.length or 1)
    return [
        time_words(step.estimate), f"{rate:,.0f}" if rate >= 100 else digits(rate), ratio(scaling.speedup(point)),
        percent(scaling.efficiency(point)), percent(step.utilisation), nbytes(step.fullest.peak), *cost, point.plan,
    ]  # fmt: skip


def verdict(scaling: Scaling) -> str:
    """Where scaling stops paying, and by which criterion; what that costs."""
    if not scaling.fitting:
        tried = [point for point in scaling.points if point.step is not None]
        if not tried:
            return "There is no plan for any of these numbers of devices."
        return f"Nothing fits on up to {_devices(tried[-1].devices)}."
    last, after = scaling.worth()
    words = [_pays(scaling, last, after)]
    most = max(point.rate for point in scaling.fitting)
    fastest = next(point for point in scaling.fitting if point.rate > (1.0 - SAME) * most)
    if scaling.kind == "strong" and last.devices < fastest.devices < scaling.fitting[-1].devices:
        words.append(f"On more than {_devices(fastest.devices)} the step gets no faster.")
    if max(scaling.efficiency(point) for point in scaling.fitting) > 1.0 + SAME:
        words.append(
            "An efficiency above 100 % is no mistake: with more devices faster plans fit into memory, and work that "
            "does not grow with the batch, as updating weights, can be divided."
        )
    if scaling.price is not None:
        words.append(_cost_words(scaling, last))
    return " ".join(words)


def _pays(scaling: Scaling, last: ScalingPoint, after: ScalingPoint | None) -> str:
    name = f"{scaling.kind.capitalize()} scaling"
    if len(scaling.fitting) == 1:
        return f"{name}: there is a plan only for {_devices(last.devices)}, so there is nothing to compare."
    least = f"(it pays if that is {percent(WORTH)} or more)"
    if after is None:
        before = scaling.fitting[-2]
        brings = percent(scaling.gain(before, last))
        return (
            f"{name} pays up to {_devices(last.devices)}, the most that were tried: going there from {before.devices} "
            f"brings {brings} of what it would bring ideally {least}."
        )
    times, strong = after.rate / last.rate, scaling.kind == "strong"
    if times < 1.0 + SAME:
        now = "the step gets no faster" if strong else "throughput gets no higher"
        return f"{name} does not pay beyond {_devices(last.devices)}: on {after.devices} {now}."
    now = f"the step is {ratio(times)} as fast" if strong else f"throughput is {ratio(times)} as high"
    return (
        f"{name} does not pay beyond {_devices(last.devices)}: on {after.devices} {now}, which is "
        f"{percent(scaling.gain(last, after))} of what the added devices would bring ideally {least}."
    )


def _cost_words(scaling: Scaling, last: ScalingPoint) -> str:
    assert scaling.price is not None
    assert last.step is not None
    cheapest, what = min(scaling.fitting, key=scaling.amount), unit(scaling.length)
    step = money(scaling.price.step(last.step.makespan_s, last.devices))
    text = f"On {_devices(last.devices)} a step costs {step}, a {what} {money(scaling.amount(last))}"
    if money(scaling.amount(cheapest)) == money(scaling.amount(last)):
        return f"{text}: the least of all."
    return f"{text}; the least is {money(scaling.amount(cheapest))}, on {_devices(cheapest.devices)}."


def _devices(count: int) -> str:
    return f"{count:,} devices" if count > 1 else "one device"


# ---- for programs


def scaling_data(scaling: Scaling) -> dict[str, Any]:
    """The curve as a JSON object. ``pays_up_to``: the most devices that pay by the criterion ``least_gain``."""
    last, after = scaling.worth() if scaling.fitting else (None, None)
    return {
        "least_gain": WORTH, "base_devices": scaling.base.devices if scaling.fitting else None,
        "pays_up_to": last.devices if last is not None else None,
        "next_gain": scaling.gain(last, after) if last is not None and after is not None else None,
        "verdict": verdict(scaling), "rows": [_row_data(scaling, point) for point in scaling.points],
    }  # fmt: skip


def _row_data(scaling: Scaling, point: ScalingPoint) -> dict[str, Any]:
    data: dict[str, Any] = {"devices": point.devices, "batch": point.batch, "fits": point.fits, "plan": point.plan}
    step = point.step
    if step is None:
        return data | {"reason": point.reason}
    data |= {
        "missing_bytes": step.missing, "peak_bytes": step.fullest.peak, "plans_simulated": point.looked_at,
        "iteration_s": step.makespan_s, "mfu": step.utilisation, "data_parallel_s": point.data_parallel_s,
    }  # fmt: skip
    if not point.fits:
        return data
    tokens = {"tokens_per_s": point.rate * scaling.length} if scaling.length else {}
    data |= {"samples_per_s": point.rate, **tokens, "interval_s": step.estimate.interval_s}
    data |= {"speedup": scaling.speedup(point), "efficiency": scaling.efficiency(point)}
    if scaling.price is not None:
        data["cost"] = scaling.price.data(step.makespan_s, point.devices, point.batch, scaling.length)
    return data


# ---- a picture


def scaling_figure(curves: Sequence[Scaling], title: str = "") -> Figure:
    """Step time, efficiency and memory of the fullest device over the number of devices, a line for each curve; dotted:
    plain data parallelism where it fits, and the memory of a device; dashed: linear scaling."""
    figure = Figure(figsize=(11, 3.8), layout="constrained")
    time, efficiency, memory = figure.subplots(1, 3)
    points = [point for curve in curves for point in curve.fitting]
    time_scale, time_name = time_unit(max((p.step.makespan_s for p in points if p.step), default=1.0))
    byte_scale, byte_name = byte_unit(max((max(p.step.capacity) for p in points if p.step), default=1.0))
    for curve, colour, marker in zip(curves, COLOURS, "os", strict=False):
        _draw(curve, (time, efficiency, memory), (time_scale, byte_scale), colour, marker)
    for point in points[:1]:
        assert point.step is not None
        memory.axhline(max(point.step.capacity) / byte_scale, color="#888888", linestyle=":", label="a device has")
    counts = sorted({point.devices for point in points})
    named = ((time, f"step time ({time_name})"), (efficiency, "efficiency (%)"), (memory, f"peak memory ({byte_name})"))
    for axes, name in named:
        axes.set_xscale("log", base=2)
        axes.set_xticks(counts, [str(n) for n in counts])
        axes.set_xlabel("devices")
        axes.grid(alpha=0.3, which="major")
        plain(axes, name)
        if axes is not efficiency:
            axes.legend(frameon=False, fontsize=8)
    time.set_yscale("log")
    time.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    time.yaxis.set_major_formatter(FuncFormatter(lambda value, _: digits(value)))
    time.yaxis.set_minor_formatter(NullFormatter())
    for axes in (efficiency, memory):
        axes.set_ylim(bottom=0)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, parse_math=False)
    return figure


def _draw(
    curve: Scaling, panels: tuple[Axes, Axes, Axes], scales: tuple[float, float], colour: str, marker: str
) -> None:
    time, efficiency, memory = panels
    fitting = [(point.devices, point.step, point) for point in curve.fitting if point.step is not None]
    counts, name = [n for n, _, _ in fitting], f"{curve.kind} scaling"
    time.plot(counts, [step.makespan_s / scales[0] for _, step, _ in fitting], color=colour, marker=marker, label=name)
    data_parallel = {n: p.data_parallel_s / scales[0] for n, _, p in fitting if p.data_parallel_s is not None}
    if data_parallel:
        label = f"data parallel, {curve.kind}"
        time.plot(list(data_parallel), list(data_parallel.values()), color=colour, linestyle=":", label=label)
    efficiency.plot(counts, [100 * curve.efficiency(p) for _, _, p in fitting], color=colour, marker=marker)
    memory.plot(
        counts, [step.fullest.peak / scales[1] for _, step, _ in fitting], color=colour, marker=marker, label=name
    )
    if fitting and curve.kind == "strong":
        base_s = fitting[0][1].makespan_s / scales[0]
        time.plot(
            counts, [base_s * counts[0] / n for n in counts], color="#888888", linestyle="--", linewidth=1,
            label="linear",
        )  # fmt: skip
