"""``clusters``: the presets, and where the figures of a topology come from."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from flexsearch.cli.common import JsonOption, show, stdout
from flexsearch.report.grid import Column, Grid
from flexsearch.report.units import digits, nbytes
from flexsearch.topology import Topology, presets
from flexsearch.topology.sources import FIGURES


def clusters(
    topology: Annotated[str | None, typer.Argument(metavar="[TOPOLOGY]", help="A preset or a topology file.")] = None,
    as_json: JsonOption = False,
) -> None:
    """List the presets; or say of one of them, or of a file, which figures were measured, published or guessed."""
    if topology is None:
        loaded = [Topology.load(name) for name in presets()]
        show(as_json, {"clusters": [_data(cluster) for cluster in loaded]}, lambda: stdout.print(_table(loaded)))
        return
    cluster = Topology.load(topology)

    def human() -> None:
        stdout.print(f"{cluster.name}: {cluster.source or 'nothing is said of it'}", soft_wrap=True, markup=False)
        stdout.print(_sources(cluster))

    show(as_json, _data(cluster), human)


def _data(cluster: Topology) -> dict[str, Any]:
    device = cluster.devices[0]
    origin = {figure: record.origin for record in cluster.sources for figure in record.figures}
    return {
        "name": cluster.name, "source": cluster.source, "hosts": len(cluster.hosts), "devices": len(cluster.devices),
        "model": device.model, "flops_per_s": device.flops, "memory_bytes": device.memory_bytes,
        "memory_bandwidth_bytes_per_s": device.memory_bandwidth, "backend": cluster.communication.backend,
        "figures": {
            figure: {"kind": cluster.source_kind(figure), "origin": origin.get(figure)} for figure in FIGURES
        },
    }  # fmt: skip


def _table(loaded: list[Topology]) -> Grid:
    columns = (
        Column("preset", "text"), Column("devices"), Column("model", "text"), Column("TFLOP/s\nhalf"),
        Column("TFLOP/s\nfloat32"), Column("memory"), Column("bandwidth"), Column("efficiency", "below"),
    )  # fmt: skip
    grid = Grid(columns, "Presets (NAME:N for N servers; flexsearch clusters NAME says where figures come from)")
    for cluster in loaded:
        device = cluster.devices[0]
        half = digits(max(map(device.flops_for, ("bfloat16", "float16"))) / 1e12)
        single = digits(device.flops_for("float32") / 1e12)
        kind = cluster.source_kind("devices.efficiency") if device.efficiency is not None else "one for all shapes"
        grid.add(
            cluster.name, str(len(cluster.devices)), device.model, half, single, nbytes(device.memory_bytes),
            f"{nbytes(device.memory_bandwidth)}/s", kind,
        )  # fmt: skip
    return grid


def _sources(cluster: Topology) -> Grid:
    grid = Grid((Column("figure", "text"), Column("kind", "text"), Column("from", "text")), "Where figures come from")
    for record in cluster.sources:
        for figure in record.figures:
            grid.add(figure, record.kind, record.origin)
    named = {figure for record in cluster.sources for figure in record.figures}
    for figure in FIGURES:
        if figure not in named:
            grid.add(figure, "guessed", "nothing is said of it")
    return grid
