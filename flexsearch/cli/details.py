"""One simulated plan in detail, as JSON and for people."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexsearch.cli.common import stdout
from flexsearch.report import Column, Grid, groups, hanging, in_words, plan_rows, plan_table
from flexsearch.report.layouts import WAYS
from flexsearch.report.reading import reading, reading_data
from flexsearch.report.recipes import recipe_words
from flexsearch.report.summary import INDENT
from flexsearch.report.uncertainty import estimate_data
from flexsearch.report.units import nbytes, percent, seconds
from flexsearch.simulate.memory import PARTS

if TYPE_CHECKING:
    from flexsearch.cost import Profile
    from flexsearch.lower import Lowered
    from flexsearch.report import PlanRow
    from flexsearch.setting import Setting

_MOST = 16
"""Rows of a table of devices or links, those that are alike in one; JSON has all."""
_WIDE = 100
"""Longest lines of text, where the terminal is wider."""


def headline(setting: Setting) -> str:
    """What is compared: model, batch, cluster, where the costs come from."""
    from flexsearch.report import device_set

    graph, topology, profile = setting.graph, setting.topology, setting.costs.profile
    weights = sum(t.nbytes // t.itemsize for t in graph.of_kind("parameter"))
    where = device_set(topology, range(len(topology.devices)))
    count = f"{weights / 1e9:.3g} B" if weights >= 1e9 else f"{weights / 1e6:.3g} M"
    return (
        f"{graph.name} ({count} parameters, batch {graph.batch}) on {topology.name} ({where}); "
        f"{times_words(profile)}"
    )


def times_words(profile: Profile | None) -> str:
    """Where compute times come from."""
    if profile is None:
        return "compute times from the topology's figures"
    words = f"as profiled on {profile.device}" if profile.entries else "from the topology's figures"
    return f"compute times {words}" + (", corrected by measured steps" if profile.learned is not None else "")


def tell(text: str, indent: int = 0) -> None:
    """Print a text as it is, each of its lines broken at the width of the terminal, what follows indented."""
    for line in text.split("\n"):
        first = len(line) - len(line.lstrip(" "))
        for part in hanging(line.lstrip(" "), min(stdout.width, _WIDE), first=first, indent=first + indent):
            stdout.print(part, soft_wrap=True)


def tell_plan(lowered: Lowered) -> None:
    """Print a plan in words."""
    for group in groups(lowered):
        tell(" " * INDENT + group.words, indent=INDENT)
    way = WAYS.get(lowered.options.synchronise_by)
    for text in (*([way] if way else []), *recipe_words(lowered)):
        tell(" " * INDENT + text, indent=INDENT)


def simulation_data(setting: Setting, row: PlanRow, yardsticks: dict[str, float | None]) -> dict[str, Any]:
    """The simulation of a plan as a JSON object. ``yardsticks``: times to compare with, as of ``plan_rows``."""
    simulation, topology = row.simulation, setting.topology
    (summary,) = plan_rows([row], yardsticks["data_parallel_s"], yardsticks["single_s"])
    return reading_data(reading(row.lowered, simulation.makespan_s)) | {
        "graph": setting.graph.name,
        "topology": topology.name,
        "plan": row.name,
        **{k: v for k, v in summary.items() if k not in ("name", "note")},
        **estimate_data(simulation.estimate),
        "words": in_words(row.lowered),
        "tasks": len(row.lowered.tasks),
        "devices": [
            {
                "name": device.name,
                "busy_s": float(simulation.busy_s[d]),
                "idle_s": float(simulation.idle_s[d]),
                "peak_bytes": simulation.peak_bytes[d],
                **{f"{part}_bytes": getattr(simulation.memory[d], part) for part in PARTS},
            }
            for d, device in enumerate(topology.devices)
        ],
        "links": [
            {
                "name": resource.name,
                "moved_bytes": int(simulation.link_bytes[r]),
                "busy_s": float(simulation.link_busy_s[r]),
            }
            for r, resource in enumerate(topology.resources)
            if resource.kind == "link"
        ],
    }


def print_details(setting: Setting, row: PlanRow, yardsticks: dict[str, float | None], trace: Path | None) -> None:
    """The simulation of a plan as tables."""
    data = simulation_data(setting, row, yardsticks)
    total = row.simulation.makespan_s or 1.0
    tell(headline(setting), indent=2)
    stdout.print()
    stdout.print(plan_table([row], "", yardsticks["data_parallel_s"], yardsticks["single_s"]))
    tell("\nThe plan:")
    tell_plan(row.lowered)
    stdout.print()
    devices = Grid(
        (
            Column("device", "text"),
            Column("busy"),
            Column("idle"),
            Column("peak\nmemory"),
            Column("what it holds", "below", least=34),
        )
    )
    for device in sorted(data["devices"], key=lambda d: -d["busy_s"]):
        parts = [f"{part} {nbytes(device[f'{part}_bytes'])}" for part in PARTS if device[f"{part}_bytes"]]
        busy, idle = (f"{seconds(t)} ({percent(t / total)})" for t in (device["busy_s"], device["idle_s"]))
        devices.add(device["name"], busy, idle, nbytes(device["peak_bytes"]), ", ".join(parts))
    _print(devices, "devices")
    carrying = sorted((x for x in data["links"] if x["moved_bytes"]), key=lambda x: -x["busy_s"])
    if carrying:
        stdout.print()
        links = Grid((Column("link", "text"), Column("bytes"), Column("busy")))
        for link in carrying:
            busy = f"{seconds(link['busy_s'])} ({percent(link['busy_s'] / total)})"
            links.add(link["name"], nbytes(link["moved_bytes"]), busy)
        _print(links, "links")
    if (read := reading(row.lowered, total)) is not None:
        stdout.print()
        tell(read.words())
    if trace is not None:
        stdout.print(f"\nWrote {trace}. Open it at https://ui.perfetto.dev", soft_wrap=True, markup=False)


def _print(grid: Grid, what: str) -> None:
    """Print a table of devices or links; those that do the same are one row, named after the first."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for (name, *cells), _ in grid.rows:
        alike.setdefault(tuple(cells), []).append(name)
    shown = Grid(grid.columns)
    for same, names in list(alike.items())[:_MOST]:
        shown.add(names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} like it", *same)
    stdout.print(shown)
    left = sum(len(names) for names in list(alike.values())[_MOST:])
    if left:
        tell(f"... and {left} {what} that are less busy (--json lists all)")
