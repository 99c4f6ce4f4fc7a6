"""Timelines: what each device computes and each link carries in one training step, of one plan or of several above each
other on the same time axis."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from flexsearch.lower import Lowered, TaskKind
from flexsearch.report.style import literal, plain
from flexsearch.report.tables import PlanRow
from flexsearch.report.units import ratio, seconds, time_unit
from flexsearch.simulate import Simulation

_KINDS: Final = {
    TaskKind.FORWARD: ("forward", "#0072B2"), TaskKind.BACKWARD: ("backward", "#56B4E9"),
    TaskKind.WEIGHT_GRADIENT: ("weight gradients", "#999999"), TaskKind.UPDATE: ("update", "#009E73"),
    TaskKind.RECOMPUTE: ("forward, again", "#666666"), TaskKind.SYNCHRONISE: ("encoding, merging", "#882255"),
}  # fmt: skip
_PURPOSES: Final = {
    "gather": ("weights", "#F0E442"), "forward": ("activations", "#E69F00"),
    "backward": ("gradients of activations", "#CC79A7"), "synchronise": ("gradients of weights", "#D55E00"),
    "recompute": ("activations", "#E69F00"), "regather": ("weights", "#F0E442"),
    "read": ("reading from storage", "#882255"),
}  # fmt: skip
_INCH: Final = 0.3
"""Height of a row."""
_FINE: Final = 3000
"""Bars that are nearer to each other than this part of the time are drawn as one."""
_THIN: Final = 0.005
"""Bars that are shorter than this part of the time, on average, have no edges."""
_UNDER_WAY: Final = 0.35
"""Opacity of communication that is under way, behind the part of it that keeps the link busy."""

Measured = Mapping[int, tuple[float, float]]
"""Task -> measured start and end, s."""


@dataclass
class _Timeline:
    """One plan: the rows to draw, ``(label, device or link, measured)``; links have no device."""

    lowered: Lowered
    simulation: Simulation
    measured: Measured
    devices: list[tuple[str, int, bool]] = field(default_factory=list)
    links: list[int] = field(default_factory=list)

    @property
    def height(self) -> int:
        return len(self.devices) + len(self.links)

    @property
    def span(self) -> float:
        return max([self.simulation.makespan_s, *(end for _, end in self.measured.values())])


def timeline(
    lowered: Lowered, simulation: Simulation, measured: Measured | None = None, title: str = "", most_links: int = 16,
) -> Figure:  # fmt: skip
    """One iteration as a Gantt chart: a row for each device that computes, one for each link that carries data (the
    ``most_links`` busiest). ``measured`` (task -> start, end in s) adds a row below each device's predicted one."""
    spans = {t: row for t, row in (measured or {}).items() if all(map(math.isfinite, row))}
    return _draw([(title, _rows(lowered, simulation, spans, most_links, len(lowered.devices)))])


def timelines(
    rows: Sequence[PlanRow], title: str = "", most_links: int = 4, most_devices: int = 4,
    measured: Mapping[str, tuple[Measured, float]] | None = None,
) -> Figure:  # fmt: skip
    """One iteration of each plan, above each other on one time axis: how much shorter one is than the other is what the
    eye sees. Of each plan the ``most_devices`` first devices of different hosts that compute, and the ``most_links``
    busiest links. ``measured``: by plan, (task -> start and end, iteration time) in s; adds a row below each device's
    predicted one."""
    first = rows[0].simulation.makespan_s if rows else 0.0
    real = measured or {}
    first_real = real[rows[0].name][1] if rows and rows[0].name in real else 0.0
    panels = []
    for k, row in enumerate(rows):
        s = row.simulation.makespan_s
        gain = f", {ratio(first / s)} the speed of {rows[0].name}" if k and s and first != s else ""
        spans, real_s = real.get(row.name, ({}, 0.0))
        told = f"; measured {seconds(real_s)}" if real_s else ""
        told += f", {ratio(first_real / real_s)}" if gain and real_s and first_real else ""
        panel = _rows(row.lowered, row.simulation, spans, most_links, most_devices)
        panels.append((f"{row.name}: {seconds(s)} a step{gain}{told}", panel))
    return _draw(panels, title)


def _rows(lowered: Lowered, simulation: Simulation, spans: Measured, most_links: int, most_devices: int) -> _Timeline:
    resources, panel = lowered.topology.resources, _Timeline(lowered, simulation, spans)
    for d in chosen_devices(lowered, most_devices):
        panel.devices.append((lowered.topology.devices[d].name, d, False))
        if spans:
            panel.devices.append(("measured", d, True))
    carrying = [r for r in range(len(resources)) if resources[r].kind == "link" and simulation.link_bytes[r]]
    panel.links = sorted(sorted(carrying, key=lambda r: -simulation.link_busy_s[r])[:most_links])
    return panel


def chosen_devices(lowered: Lowered, most: int) -> list[int]:
    """Devices to show, at most so many: all, or the first of each rank of a pipeline, or else the first of each host in
    turn, then the second."""
    if len(ranks := sorted({min(devices) for devices in lowered.stages.devices})) > 1:
        return ranks[:most]
    if len(lowered.devices) <= most:
        return list(lowered.devices)
    places: dict[str, int] = {}
    order = []
    for d in lowered.devices:
        host = lowered.topology.devices[d].host
        order.append((places.setdefault(host, 0), d))
        places[host] += 1
    return sorted(d for _, d in sorted(order)[:most])


def _draw(panels: Sequence[tuple[str, _Timeline]], title: str = "") -> Figure:
    heights = [max(1, panel.height) for _, panel in panels]
    head = 0.35 if title else 0.0
    figure = Figure(figsize=(11, _INCH * sum(heights) + 0.45 * len(panels) + 1.0 + head), layout="constrained")
    grid = figure.subplots(len(panels), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights})
    span = max((panel.span for _, panel in panels), default=1.0) or 1.0
    unit, name = time_unit(span)
    legend: dict[str, str] = {}
    for axes, (text, panel) in zip(grid[:, 0], panels, strict=True):
        _panel(axes, panel, unit, span, legend)
        plain(axes, text)
    last = grid[-1, 0]
    last.set_xlim(0, span / unit)
    last.set_xlabel(f"time ({name})")
    order = dict.fromkeys(label for label, _ in (*_KINDS.values(), *_PURPOSES.values()))  # purposes share labels
    figure.legend(
        handles=[Patch(color=legend[label], label=label) for label in order if label in legend],
        loc="outside lower center", ncols=max(1, len(legend)), frameon=False, fontsize=9,
    )  # fmt: skip
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold", parse_math=False)
    return figure


def _panel(axes: Axes, panel: _Timeline, unit: float, span: float, legend: dict[str, str]) -> None:
    resources = panel.lowered.topology.resources
    labels = [row[0] for row in panel.devices] + [resources[r].name.replace("->", " → ") for r in panel.links]
    for y, (_, device, real) in enumerate(panel.devices):
        bars = _computing(panel.lowered, panel.simulation, panel.measured if real else None, device)
        _bars(axes, panel.lowered, y, bars, unit, span, legend)
    for y, link in enumerate(panel.links, len(panel.devices)):
        for busy in (False, True):
            bars = _carrying(panel.lowered, panel.simulation, link, busy)
            _bars(axes, panel.lowered, y, bars, unit, span, legend, 1.0 if busy else _UNDER_WAY)
    axes.set_yticks(range(len(labels)), [literal(label, 30) for label in labels], fontsize=8)
    if panel.links and panel.devices:
        axes.axhline(len(panel.devices) - 0.5, color="#888888", linewidth=0.8)
    axes.set_ylim(max(1, len(labels)) - 0.5, -0.5)
    axes.axvline(panel.simulation.makespan_s / unit, color="black", linewidth=0.8, linestyle=":")


Bar = tuple[int, float, float, str, str]
"""Task, start (s), length (s), legend label, colour."""


def _computing(lowered: Lowered, simulation: Simulation, spans: Measured | None, device: int) -> Iterator[Bar]:
    for task, owner in enumerate(lowered.tasks.device):
        if owner == device and (spans is None or task in spans):
            start, end = spans[task] if spans is not None else (simulation.start[task], simulation.end[task])
            yield (task, float(start), float(end - start), *_KINDS[TaskKind(lowered.tasks.kind[task])])


def _carrying(lowered: Lowered, simulation: Simulation, link: int, busy: bool) -> Iterator[Bar]:
    """Communication over a link: while it keeps the link ``busy``, or from its start to its end."""
    for task, communication in enumerate(lowered.tasks.communication):
        if communication is not None:
            start, end = float(simulation.start[task]), float(simulation.end[task])
            for resource, busy_s in communication.transfer.links:
                if resource == link:
                    yield (task, start, busy_s if busy else end - start, *_PURPOSES[communication.purpose])


def _bars(
    axes: Axes, lowered: Lowered, y: int, bars: Iterator[Bar], unit: float, span: float, legend: dict[str, str],
    alpha: float = 1.0,
) -> None:  # fmt: skip
    by_label: dict[str, list[tuple[float, float]]] = {}
    for task, start, length, label, colour in bars:
        legend[label] = colour
        by_label.setdefault(label, []).append((start, start + length))
        operator = lowered.tasks.operator[task]
        text = lowered.graph.operators[operator].name.rpartition(".")[2] if operator >= 0 else ""
        if text and alpha == 1.0 and length > (0.0065 * len(text) + 0.01) * span:
            dark = label == _KINDS[TaskKind.FORWARD][0]
            at = (start + length / 2) / unit
            axes.text(at, y, literal(text), ha="center", va="center", fontsize=7,
                      color="white" if dark else "black")  # fmt: skip
    for label, spans in by_label.items():
        shown = [(start / unit, (end - start) / unit) for start, end in _merged(spans, span / _FINE)]
        thin = sum(length for _, length in shown) / len(shown) < _THIN * span / unit
        edge, width = ("none", 0.0) if thin else ("white", 0.3)  # edges would cover bars that are thin
        axes.broken_barh(shown, (y - 0.4, 0.8), facecolors=legend[label], edgecolor=edge, linewidth=width, alpha=alpha)


def _merged(spans: list[tuple[float, float]], near: float) -> list[tuple[float, float]]:
    """Short bars that are near to each other as one; long ones stay as they are."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if merged and start - merged[-1][1] < near and (end - start < near or merged[-1][1] - merged[-1][0] < near):
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged
