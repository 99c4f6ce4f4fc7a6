"""Pictures: plans as bars, scaling curves, timelines. They return ``matplotlib.figure.Figure`` and touch no global
state, so they work without a display and beside the caller's own plots."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from flexsearch.lower import Lowered, TaskKind
from flexsearch.report.tables import PlanRow, is_data_parallel
from flexsearch.report.units import digits, ratio, seconds, time_unit
from flexsearch.simulate import Simulation

# Okabe and Ito's colours, which colour-blind readers can tell apart.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#000000")
_KINDS = {
    TaskKind.FORWARD: ("forward", "#0072B2"), TaskKind.BACKWARD: ("backward", "#56B4E9"),
    TaskKind.UPDATE: ("update", "#009E73"),
}  # fmt: skip
_PURPOSES = {
    "gather": ("weights", "#F0E442"), "forward": ("activations", "#E69F00"),
    "backward": ("gradients of activations", "#CC79A7"), "synchronise": ("gradients of weights", "#D55E00"),
}  # fmt: skip


def plan_bars(rows: Sequence[PlanRow], title: str = "") -> Figure:
    """Iteration time of each plan, in the given order from the top, with its speed-up over data parallelism. Plans
    that do not fit into memory are hatched."""
    figure = Figure(figsize=(7.5, 0.42 * len(rows) + 1.3), layout="constrained")
    axes = figure.subplots()
    times = [row.simulation.makespan_s for row in rows]
    unit, name = time_unit(max(times, default=1.0))
    yardstick = next((r.simulation.makespan_s for r in rows if is_data_parallel(r.name)), None)
    best = min((t for t, row in zip(times, rows, strict=True) if not row.shortfall), default=None)
    for k, (row, t) in enumerate(zip(rows, times, strict=True)):
        fits = not row.shortfall
        bar = axes.barh(k, t / unit, color=COLOURS[2] if fits and t == best else COLOURS[5], height=0.7)
        label = seconds(t)
        if yardstick and t and not is_data_parallel(row.name):
            label += f"  ({ratio(yardstick / t)})"
        if not fits:
            bar[0].set(facecolor="#DDDDDD", hatch="///", edgecolor="#888888")
            label += "  does not fit"
        axes.annotate(label, (t / unit, k), xytext=(4, 0), textcoords="offset points", va="center", fontsize=9)
    axes.set_yticks(range(len(rows)), [row.name for row in rows])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.35 * max(times, default=1.0) / unit)
    axes.set_xlabel(f"iteration time ({name}); in brackets: speed-up over data parallelism")
    axes.xaxis.label.set_fontsize(9)
    _plain(axes, title)
    return figure


def scaling_curve(
    series: Mapping[str, Mapping[int, float]], samples: int | Mapping[int, int], title: str = "", unit: str = "hosts"
) -> Figure:
    """Throughput over the number of devices. ``series``: plan -> count -> iteration time (s). ``samples``: global batch
    of an iteration, one number or by count. The dashed line is linear scaling from the smallest count."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    counts = sorted({n for times in series.values() for n in times})
    batch = {n: samples if isinstance(samples, int) else samples[n] for n in counts}
    for (name, times), colour, marker in zip(series.items(), cycle(COLOURS), cycle("os^Dv"), strict=False):
        points = sorted(times)
        axes.plot(points, [batch[n] / times[n] for n in points], color=colour, marker=marker, label=name)
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
    _plain(axes, title)
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
    _plain(axes, title)
    return figure


def timeline(
    lowered: Lowered, simulation: Simulation, measured: Mapping[int, tuple[float, float]] | None = None,
    title: str = "", most_links: int = 16,
) -> Figure:  # fmt: skip
    """One iteration as a Gantt chart: a row for each device that computes, one for each link that carries data (the
    ``most_links`` busiest). ``measured`` (task -> start, end in s) adds a row below each device's predicted one."""
    known = {t: row for t, row in (measured or {}).items() if all(map(math.isfinite, row))}
    resources = lowered.topology.resources
    carrying = [r for r in range(len(resources)) if simulation.link_bytes[r]]
    links = sorted(sorted(carrying, key=lambda r: -simulation.link_busy_s[r])[:most_links])
    rows: list[tuple[str, int, bool]] = []  # label, device or link, measured
    for d in lowered.devices:
        rows.append((lowered.topology.devices[d].name, d, False))
        if known:
            rows.append(("measured", d, True))
    labels = [row[0] for row in rows] + [resources[r].name for r in links]
    figure = Figure(figsize=(11, 0.36 * len(labels) + 1.6), layout="constrained")
    axes = figure.subplots()
    span = max([simulation.makespan_s, *(end for _, end in known.values())]) or 1.0
    unit, name = time_unit(span)
    legend: dict[str, str] = {}
    for y, (_, device, real) in enumerate(rows):
        _bars(axes, lowered, y, _computing(lowered, simulation, known if real else None, device), unit, span, legend)
    for y, link in enumerate(links, len(rows)):
        _bars(axes, lowered, y, _carrying(lowered, simulation, link), unit, span, legend)
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    if links and rows:
        axes.axhline(len(rows) - 0.5, color="#888888", linewidth=0.8)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.set_xlim(0, span / unit)
    axes.set_xlabel(f"time ({name})")
    figure.legend(
        handles=[Patch(color=colour, label=label) for label, colour in legend.items()],
        loc="outside lower center", ncols=max(1, len(legend)), frameon=False, fontsize=8,
    )  # fmt: skip
    _plain(axes, title)
    return figure


Bar = tuple[int, float, float, str, str]
"""Task, start (s), length (s), legend label, colour."""


def _computing(
    lowered: Lowered, simulation: Simulation, known: Mapping[int, tuple[float, float]] | None, device: int
) -> Iterator[Bar]:
    for task, owner in enumerate(lowered.tasks.device):
        if owner == device and (known is None or task in known):
            start, end = known[task] if known is not None else (simulation.start[task], simulation.end[task])
            yield (task, float(start), float(end - start), *_KINDS[TaskKind(lowered.tasks.kind[task])])


def _carrying(lowered: Lowered, simulation: Simulation, link: int) -> Iterator[Bar]:
    for task, communication in enumerate(lowered.tasks.communication):
        if communication is not None:
            for resource, busy in lowered.tasks.links[task]:
                if resource == link:
                    yield (task, float(simulation.start[task]), busy, *_PURPOSES[communication.purpose])


def _bars(
    axes: Axes, lowered: Lowered, y: int, bars: Iterator[Bar], unit: float, span: float, legend: dict[str, str]
) -> None:
    by_label: dict[str, list[tuple[float, float]]] = {}
    for task, start, length, label, colour in bars:
        legend[label] = colour
        by_label.setdefault(label, []).append((start / unit, length / unit))
        operator = lowered.tasks.operator[task]
        text = lowered.graph.operators[operator].name.rpartition(".")[2] if operator >= 0 else ""
        if text and length > (0.006 * len(text) + 0.01) * span:
            dark = label == _KINDS[TaskKind.FORWARD][0]
            at = (start + length / 2) / unit
            axes.text(at, y, text, ha="center", va="center", fontsize=6, color="white" if dark else "black")
    for label, spans in by_label.items():
        axes.broken_barh(spans, (y - 0.4, 0.8), facecolors=legend[label], edgecolor="white", linewidth=0.2)


def _plain(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
