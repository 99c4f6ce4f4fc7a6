"""Pictures: plans as bars, memory, scaling curves, chains of a search, timelines. They return
``matplotlib.figure.Figure`` and touch no global state, so they work without a display and beside the caller's own
plots."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Final

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from flexsearch.report.gantt import timeline, timelines
from flexsearch.report.style import COLOURS, literal, plain
from flexsearch.report.tables import PlanRow, yardsticks
from flexsearch.report.units import byte_unit, digits, nbytes, percent, ratio, seconds, time_unit
from flexsearch.simulate.memory import PARTS, Curve

__all__ = [
    "FORMATS", "chains", "memory_bars", "memory_over_time", "plan_bars", "rendered", "scaling_curve", "timeline",
    "timelines",
]  # fmt: skip

_PART_COLOURS: Final = dict(zip(PARTS, COLOURS, strict=False))
FORMATS: Final = ("png", "svg", "pdf")
"""What ``rendered`` makes of a picture."""
STATES: Final = 800
"""States of a device's memory that a picture shows."""
MOST_DEVICES: Final = 16
"""Devices that a picture shows, where there are more."""


def rendered(figure: Figure, kind: str, dpi: int = 110) -> bytes:
    """A picture as the contents of a file of this kind (one of ``FORMATS``), the same whenever it is made."""
    buffer, metadata = io.BytesIO(), {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}[kind]
    with matplotlib.rc_context({"svg.hashsalt": "flexsearch", "font.family": "DejaVu Sans"}):
        figure.savefig(buffer, format=kind, dpi=dpi, metadata=metadata)
    return buffer.getvalue()


def plan_bars(rows: Sequence[PlanRow], title: str = "") -> Figure:
    """Iteration time of each plan, in the given order from the top, with its speed-ups over data parallelism and over
    one device. Plans that do not fit into memory are hatched."""
    figure = Figure(figsize=(8, 0.42 * len(rows) + 1.3), layout="constrained")
    axes = figure.subplots()
    times = [row.simulation.makespan_s for row in rows]
    unit, name = time_unit(max(times, default=1.0))
    reference_s = yardsticks(rows)
    against = {words: s for words, s in zip(("data parallel", "one device"), reference_s.values(), strict=True) if s}
    best = min((t for t, row in zip(times, rows, strict=True) if not row.shortfall), default=None)
    for k, (row, t) in enumerate(zip(rows, times, strict=True)):
        fits = not row.shortfall
        bar = axes.barh(k, t / unit, color=COLOURS[2] if fits and t == best else COLOURS[5], height=0.7)
        label = seconds(t)
        if against and t:
            label += f"  ({', '.join(ratio(s / t) for s in against.values())})"
        if not fits:
            bar[0].set(facecolor="#DDDDDD", hatch="///", edgecolor="#888888")
            label += "  does not fit"
        axes.annotate(
            label, (t / unit, k), xytext=(4, 0), textcoords="offset points", va="center", fontsize=9,
            fontweight="bold" if fits and t == best else "normal",
        )  # fmt: skip
    axes.set_yticks(range(len(rows)), [literal(row.name, 30) for row in rows])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.5 * max(times, default=1.0) / unit)
    remark = f"; in brackets: speed-up over {', over '.join(against)}" if against else ""
    axes.set_xlabel(f"iteration time ({name}){remark}", fontsize=9)
    plain(axes, title)
    return figure


def memory_bars(row: PlanRow, title: str = "") -> Figure:
    """Memory in use on each device (the first ``MOST_DEVICES``) at the moment of its peak, by what it holds, against
    the memory that the device has."""
    devices = row.lowered.topology.devices[:MOST_DEVICES]
    figure = Figure(figsize=(8, 0.34 * len(devices) + 1.6), layout="constrained")
    axes = figure.subplots()
    uses = row.simulation.memory[: len(devices)]
    peaks = [use.peak for use in uses]
    top = max(peaks, default=0) or 1
    unit, name = byte_unit(top)
    for part in PARTS:
        sizes = [getattr(use, part) / unit for use in uses]
        before = [sum(getattr(use, other) for other in PARTS[: PARTS.index(part)]) / unit for use in uses]
        if any(sizes):
            axes.barh(range(len(uses)), sizes, left=before, color=_PART_COLOURS[part], label=part, height=0.7)
    limits = [device.usable_bytes for device in devices]
    near = [(k, limit) for k, limit in enumerate(limits) if limit <= 1.5 * top]
    for k, limit in near:
        axes.plot([limit / unit] * 2, [k - 0.45, k + 0.45], color="black", linewidth=1.5)
    for k, (peak, limit) in enumerate(zip(peaks, limits, strict=True)):
        over = peak > limit
        label = f"{nbytes(peak)} of {nbytes(limit)} ({percent(peak / limit)})" + (" does not fit" if over else "")
        at = max(peak, limit if limit <= 1.5 * top else 0) / unit
        axes.annotate(
            label, (at, k), xytext=(4, 0), textcoords="offset points", va="center", fontsize=9,
            color=COLOURS[4] if over else "black",
        )  # fmt: skip
    axes.set_yticks(range(len(devices)), [literal(device.name, 30) for device in devices])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.6 * max([top, *(limit for _, limit in near)]) / unit)
    left = len(row.lowered.topology.devices) - len(devices)
    more = f"; {left} more devices are not shown" if left else ""
    axes.set_xlabel(f"memory at its peak ({name}){more}", fontsize=9)
    figure.legend(loc="outside lower center", ncols=len(PARTS), frameon=False, fontsize=9)
    plain(axes, title)
    return figure


def memory_over_time(panels: Sequence[tuple[str, Curve, int]], title: str = "") -> Figure:
    """What devices hold as a step goes on, by what it is for, below each other on the same axes. ``panels``: a name,
    what the device holds, its memory (bytes; a dashed line)."""
    figure = Figure(figsize=(9, 1.7 * len(panels) + 1.2), layout="constrained")
    grid = figure.subplots(len(panels), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    curves = [curve.thinned(STATES) for _, curve, _ in panels]
    peaks = [curve.peak.peak for curve in curves]
    top = max(peaks, default=0) or 1
    (unit, name), (second, time_name) = byte_unit(top), time_unit(max(float(c.times[-1]) for c in curves) or 1.0)
    held = [part for k, part in enumerate(PARTS) if any(curve.use[k].any() for curve in curves)]
    for axes, (words, _, capacity), curve, peak in zip(grid, panels, curves, peaks, strict=True):
        use = [curve.use[PARTS.index(part)] / unit for part in held]
        axes.stackplot(curve.times / second, use, colors=[_PART_COLOURS[part] for part in held], step="post")
        axes.axhline(capacity / unit, color="black", linestyle="--", linewidth=1)
        axes.set_ylabel(f"memory ({name})", fontsize=9)
        over = ": does not fit" if peak > capacity else ""
        plain(axes, f"{literal(words, 70)}: peak {nbytes(peak)} of {nbytes(capacity)}{over}")
    near = [capacity for _, _, capacity in panels if capacity <= 1.5 * top]
    grid[-1].set_ylim(0, 1.1 * max([top, *near]) / unit)
    grid[-1].set_xlim(0, max(float(c.times[-1]) for c in curves) / second or 1.0)
    grid[-1].set_xlabel(f"time ({time_name})")
    handles = [Patch(color=_PART_COLOURS[part], label=part) for part in held]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(PARTS), frameon=False, fontsize=9)
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=11, parse_math=False)
    return figure


def scaling_curve(
    series: Mapping[str, Mapping[int, float]], samples: int | Mapping[int, int], title: str = "", unit: str = "hosts"
) -> Figure:
    """Throughput over the number of devices. ``series``: plan -> count -> iteration time (s); a single point is drawn
    as a star. ``samples``: global batch of an iteration, one number or by count. The dashed line is linear scaling from
    the smallest count."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    counts = sorted({n for times in series.values() for n in times})
    batch = {n: samples if isinstance(samples, int) else samples[n] for n in counts}
    for (name, times), colour, marker in zip(series.items(), cycle(COLOURS), cycle("os^Dv"), strict=False):
        points, alone = sorted(times), len(times) == 1 < len(counts)
        axes.plot(
            points, [batch[n] / times[n] for n in points], color=colour, marker="*" if alone else marker,
            markersize=14 if alone else 6, linestyle="none" if alone else "-", label=name,
        )  # fmt: skip
    if counts:
        first = counts[0]
        best = max(batch[first] / times[first] for times in series.values() if first in times)
        ideal = [best * n / first for n in counts]
        axes.plot(counts, ideal, color="#888888", linestyle="--", linewidth=1, label="linear")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(counts, [str(n) for n in counts])
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: digits(value)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(unit)
    axes.set_ylabel("throughput (samples/s)")
    axes.legend(frameon=False)
    axes.grid(alpha=0.3, which="major")
    plain(axes, title)
    return figure


def chains(
    trails: Sequence[tuple[str, Sequence[tuple[int, float]]]], best: Sequence[tuple[int, float]], bound_s: float,
    title: str = "",
) -> Figure:  # fmt: skip
    """The ways of a search's chains. ``trails``: (from where, [(proposals so far, cost of its plan in s)]) of each;
    ``best``: (proposals so far, time of the best plan in s) where it improved; ``bound_s``: no plan is faster."""
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    axes = figure.subplots()
    every = [cost for _, points in trails for _, cost in points] + [t for _, t in best]
    unit, name = time_unit(max(every, default=bound_s))
    end = max((points[-1][0] for _, points in trails if points), default=1)
    named: dict[str, str] = {}
    for phase, points in trails:
        if not points:
            continue
        fresh, colour = phase not in named, named.setdefault(phase, f"C{len(named) % 10}")
        xs, ys = [n for n, _ in points], [cost / unit for _, cost in points]
        axes.plot(xs, ys, color=colour, linewidth=1, alpha=0.8, label=phase if fresh else None)
    steps = [*best, (end, best[-1][1])] if best else []
    xs, ys = [n for n, _ in steps], [t / unit for _, t in steps]
    axes.step(xs, ys, where="post", color=COLOURS[-1], linewidth=1.8, label="best so far")
    axes.axhline(bound_s / unit, color="#888888", linestyle="--", linewidth=1, label="no plan is faster")
    # Random plans can be hundreds of times slower; what matters is near the best.
    least = min((t for _, t in best), default=bound_s)
    axes.set_ylim(0.95 * bound_s / unit, min(max(every, default=1.0), 1.6 * least) / unit)
    axes.set_xlabel("proposals")
    axes.set_ylabel(f"iteration time ({name})")
    axes.legend(frameon=False, fontsize=8, ncols=2, loc="upper right")
    axes.grid(alpha=0.3)
    plain(axes, title)
    return figure
