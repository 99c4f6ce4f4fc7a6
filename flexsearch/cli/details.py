"""One simulated plan in detail, as JSON and for people."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from flexsearch.cli.common import print_table, stdout
from flexsearch.report import groups, in_words, plan_rows, plan_table
from flexsearch.report.units import nbytes, percent, seconds
from flexsearch.simulate.memory import PARTS

if TYPE_CHECKING:
    from flexsearch.api import Setting
    from flexsearch.report import PlanRow

_MOST = 16
"""Rows of a table of devices or links; JSON has all."""


def headline(setting: Setting) -> str:
    """What is compared: model, batch, cluster, where the costs come from."""
    from flexsearch.report import device_set

    graph, topology, profile = setting.graph, setting.topology, setting.costs.profile
    weights = sum(t.nbytes // t.itemsize for t in graph.of_kind("parameter"))
    where = device_set(topology, range(len(topology.devices)))
    measured = f"profile of {profile.device}" if profile is not None else "roofline"
    return (
        f"{graph.name} ({weights / 1e6:.3g} M parameters, batch {graph.batch}) on {topology.name} ({where}); "
        f"compute times: {measured}"
    )


def simulation_data(setting: Setting, row: PlanRow, data_parallel_s: float) -> dict[str, Any]:
    """The simulation of a plan as a JSON object."""
    simulation, topology = row.simulation, setting.topology
    (summary,) = plan_rows([row], data_parallel_s)
    return {
        "graph": setting.graph.name,
        "topology": topology.name,
        "plan": row.name,
        **{k: v for k, v in summary.items() if k not in ("name", "note")},
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


def print_details(setting: Setting, row: PlanRow, data_parallel_s: float, trace: Path | None) -> None:
    """The simulation of a plan as tables."""
    data = simulation_data(setting, row, data_parallel_s)
    total = row.simulation.makespan_s or 1.0
    stdout.print(headline(setting), soft_wrap=True)
    print_table(plan_table([row], data_parallel_s=data_parallel_s))
    stdout.print("\nThe plan:")
    for group in groups(row.lowered):
        stdout.print(f"  {group.layers}: {group.treatment}", soft_wrap=True)
    stdout.print()
    devices = _table("device", "busy", "idle", "peak memory")
    devices.add_column("of which")
    for device in sorted(data["devices"], key=lambda d: -d["busy_s"])[:_MOST]:
        parts = [f"{part} {nbytes(device[f'{part}_bytes'])}" for part in PARTS if device[f"{part}_bytes"]]
        busy, idle = (f"{seconds(t)} ({percent(t / total)})" for t in (device["busy_s"], device["idle_s"]))
        devices.add_row(device["name"], busy, idle, nbytes(device["peak_bytes"]), ", ".join(parts))
    _print(devices, len(data["devices"]), "devices")
    carrying = sorted((x for x in data["links"] if x["moved_bytes"]), key=lambda x: -x["busy_s"])
    if carrying:
        links = _table("link", "bytes", "busy")
        for link in carrying[:_MOST]:
            busy = f"{seconds(link['busy_s'])} ({percent(link['busy_s'] / total)})"
            links.add_row(link["name"], nbytes(link["moved_bytes"]), busy)
        _print(links, len(carrying), "links")
    if trace is not None:
        stdout.print(f"Wrote {trace}; open it in https://ui.perfetto.dev", soft_wrap=True)


def _table(first: str, *rest: str) -> Table:
    table = Table()
    table.add_column(first, no_wrap=True)
    for heading in rest:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _print(table: Table, count: int, what: str) -> None:
    print_table(table)
    if count > _MOST:
        stdout.print(f"... and {count - _MOST} {what} less busy (--json lists all)")
