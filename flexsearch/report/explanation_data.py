"""A plan explained, for programs: the JSON of ``flexsearch explain --json``."""

from __future__ import annotations

from typing import Any

from flexsearch.report.explain import Explanation
from flexsearch.report.path import path_data
from flexsearch.report.reading import reading, reading_data
from flexsearch.report.recipes import recipe_data
from flexsearch.report.words import treatment
from flexsearch.simulate import DeviceTime, by_resource, device_times
from flexsearch.simulate.memory import PARTS as MEMORY_PARTS
from flexsearch.simulate.usage import stage_seconds


def explanation_data(explained: Explanation) -> dict[str, Any]:
    """The explanation as a JSON object; times in seconds, sizes in bytes."""
    lowered, now = explained.row.lowered, explained.row.simulation.makespan_s
    return reading_data(reading(lowered, now)) | {
        "iteration_s": now if explained.mean_s is None else explained.mean_s,
        "recipes": recipe_data(lowered),
        "devices": _devices(explained),
        "critical_path": path_data(lowered, explained.steps) if explained.steps else None,
        "resources": _resources(explained),
        "what_if": [
            {
                "change": one.change, "words": one.words, "iteration_s": one.seconds,
                "shortfall_bytes": one.shortfall, "remark": one.remark,
            }
            for one in explained.what_ifs
        ],
        "choices": [
            {"layers": c.group.layers, "treatment": c.group.treatment, "as_data_parallel_s": c.otherwise_s}
            for c in explained.choices
        ],
        "layouts": [
            {
                "part": one.part, "now": one.now, "instead": one.instead, "iteration_s": one.seconds,
                "missing_bytes": one.missing,
            }
            for one in explained.layouts
        ],
        "stages": [
            {"stage": s, "forward_s": forward, "backward_s": backward}
            for s, (forward, backward) in enumerate(stage_seconds(lowered.rows, lowered.stages))
        ],
        "single_changes": _single_changes(explained),
    }  # fmt: skip


def _devices(explained: Explanation) -> list[dict[str, Any]]:
    simulation, lowered = explained.row.simulation, explained.row.lowered
    times = device_times(lowered.rows, simulation.times)
    return [
        {
            "name": device.name, **_time(time), "peak_bytes": simulation.peak_bytes[d],
            **{f"{part}_bytes": getattr(simulation.memory[d], part) for part in MEMORY_PARTS},
        }
        for d, (device, time) in enumerate(zip(lowered.topology.devices, times, strict=True))
    ]  # fmt: skip


def _time(time: DeviceTime) -> dict[str, Any]:
    return {
        "compute_s": time.compute_s, "communicate_s": time.communicate_s, "host_s": time.host_s, "idle_s": time.idle_s,
        "moving_s": time.moving_s, "work_s": dict(time.work_s), "exposed_s": dict(time.exposed_s),
    }  # fmt: skip


def _resources(explained: Explanation) -> list[dict[str, Any]]:
    simulation, lowered = explained.row.simulation, explained.row.lowered
    on_path = by_resource(lowered.tasks, explained.steps) if explained.steps else {}
    return [
        {
            "name": resource.name, "kind": resource.kind, "busy_s": float(simulation.link_busy_s[r]),
            "moved_bytes": int(simulation.link_bytes[r]), "critical_s": on_path.get(r, 0.0),
        }
        for r, resource in enumerate(lowered.topology.resources)
    ]  # fmt: skip


def _single_changes(explained: Explanation) -> dict[str, Any]:
    graph, changes = explained.row.lowered.graph, explained.changes
    return {
        "tried": changes.tried,
        "possible": changes.possible,
        "improvements": [
            {
                "operator": graph.operators[one.operator].name,
                "treatment": treatment(
                    graph, explained.row.lowered.topology, graph.operators[one.operator], one.config
                ),
                "iteration_s": one.seconds,
                "together": one.together,
            }
            for one in changes.improvements
        ],
    }
