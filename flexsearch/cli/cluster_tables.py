"""What ``clusters`` tells of topologies."""

from __future__ import annotations

from typing import Any

from flexsearch.report.grid import Column, Grid
from flexsearch.report.units import digits, nbytes
from flexsearch.topology import Topology
from flexsearch.topology.kernels import USUAL, recipe_passes
from flexsearch.topology.sources import FIGURES, Figure


def data(cluster: Topology) -> dict[str, Any]:
    """A topology and its figures with their sources, as one JSON object: FLOP/s, bytes, B/s, seconds."""
    device = cluster.devices[0]
    origin = {figure: record.origin for record in cluster.sources for figure in record.figures}
    return {
        "name": cluster.name, "source": cluster.source,
        "code": None if (code := cluster.code) is None else code.model_dump() | {
            "error": code.standard_error, "origin": code.reason,
        },
        "hosts": len(cluster.hosts), "devices": len(cluster.devices),
        "model": device.model, "flops_per_s": device.flops, "memory_bytes": device.memory_bytes,
        "memory_bandwidth_bytes_per_s": device.memory_bandwidth, "backend": cluster.communication.backend,
        "figures": {
            name: {"value": _value(cluster, name), "kind": cluster.source_kind(name), "origin": origin.get(name)}
            for name in FIGURES
        },
    }  # fmt: skip


def table(loaded: list[Topology]) -> Grid:
    """Topologies, one a row."""
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


def sources(cluster: Topology) -> Grid:
    """The figures of one topology, and where they come from."""
    columns = Column("figure", "text"), Column("value", "text"), Column("kind", "text"), Column("from", "text")
    grid = Grid(columns, "Figures of a device, of links and of the library (FLOP/s, bytes, B/s, s)")
    origin = {figure: record.origin for record in cluster.sources for figure in record.figures}
    before = ""
    for figure in FIGURES:
        told, source = _told(_value(cluster, figure)), origin.get(figure, "not stated")
        grid.add(figure, told, cluster.source_kind(figure), "as above" if source == before else source)
        before = source
    return grid


def _value(cluster: Topology, figure: Figure) -> Any:
    """What costs are computed from, whether the file says it or not."""
    place, _, field = figure.partition(".")
    device, communication = cluster.devices[0], cluster.communication
    efficiency = {"efficiency": device.efficiency or USUAL, "efficiency_full": device.efficiency_full or USUAL}
    if place == "links":
        values = sorted({getattr(link, field) for link in cluster.links})
        return values if len(values) != 1 else values[0]
    if field in efficiency:
        return efficiency[field].model_dump(exclude={"other", "traffic"})
    if field == "convolution":
        return efficiency["efficiency"].convolution
    if field == "traffic":
        return {name: {"other": own.other, **own.traffic} for name, own in efficiency.items()}
    if field == "launches":
        return device.launched.model_dump()
    if field == "recipe_passes":
        return dict(recipe_passes(device.kind))
    if field == "groups":
        return [group.model_dump(exclude_defaults=True) for group in communication.groups]
    return getattr(device if place == "devices" else communication, field)


def _told(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_told(one)}" for name, one in value.items() if one != {}) or "none"
    if isinstance(value, list | tuple):
        return "; ".join(map(_told, value)) or "none"
    return f"{value:.4g}" if isinstance(value, int | float) else str(value)
