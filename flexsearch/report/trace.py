"""Timeline as Chrome trace JSON (Trace Event Format), which Perfetto and chrome://tracing open.

One process for each device with its compute tasks, one for the links with a row each; arrows lead from a communication
to the tasks that wait for it. Measured times, where given, stand in processes of their own right below the predicted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flexsearch.graph import volume
from flexsearch.lower import Lowered, TaskKind
from flexsearch.output import write
from flexsearch.report.words import task_words, treatment
from flexsearch.simulate import Simulation
from flexsearch.simulate.critical import turns

Event = dict[str, Any]
_CATEGORY = {
    TaskKind.FORWARD: "forward", TaskKind.BACKWARD: "backward", TaskKind.UPDATE: "update",
    TaskKind.WEIGHT_GRADIENT: "weight gradient", TaskKind.COMMUNICATION: "communication",
    TaskKind.RECOMPUTE: "recompute",
}  # fmt: skip


def chrome_trace(
    lowered: Lowered, simulation: Simulation, measured: Mapping[int, tuple[float, float]] | None = None
) -> Event:
    """The trace as a JSON object. ``measured``: task -> (start, end) in seconds; NaN or absent where not measured."""
    known = {t: row for t, row in (measured or {}).items() if all(map(math.isfinite, row))}
    topology, count = lowered.topology, len(lowered.topology.devices)
    links, seen = 2 * count + 1, 2 * count + 2  # process numbers: 2d + 1 and 2d + 2 belong to device d
    used = [d for d in range(count) if d in set(lowered.tasks.device)]
    events: list[Event] = []
    for d in used:
        title = topology.devices[d].name
        events += _process(2 * d + 1, f"{title}: predicted" if known else title, {0: "compute"})
        if known:
            events += _process(2 * d + 2, f"{title}: measured", {0: "compute"})
    names = {r: x.name for r, x in enumerate(topology.resources) if simulation.link_bytes[r]}
    events += _process(links, "links: predicted" if known else "links", names)
    turns_of = turns(lowered.tasks)
    for task, device in enumerate(lowered.tasks.device):
        if device >= 0:
            events.append(_compute(lowered, task, 2 * device + 1, simulation.start[task], simulation.end[task]))
            if task in known:
                events.append(_compute(lowered, task, 2 * device + 2, *known[task]))
        else:
            events += _on_links(lowered, task, turns_of[task], links)
    events += _arrows(lowered, simulation, links)
    if known:
        events += _measured_communication(lowered, known, seen)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "graph": lowered.graph.name, "topology": topology.name, "iteration_s": simulation.makespan_s,
            "moved_bytes": simulation.moved_bytes, "peak_bytes": list(simulation.peak_bytes),
        },
    }  # fmt: skip


def save_trace(
    path: str | Path, lowered: Lowered, simulation: Simulation,
    measured: Mapping[int, tuple[float, float]] | None = None,
) -> None:  # fmt: skip
    """Write ``chrome_trace`` to ``path``. Raises OutputError if that is not possible."""
    write(path, json.dumps(chrome_trace(lowered, simulation, measured)) + "\n")


def _process(pid: int, name: str, rows: Mapping[int, str]) -> list[Event]:
    return [
        {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}},
        {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}},
        *({"ph": "M", "name": "thread_name", "pid": pid, "tid": t, "args": {"name": row}} for t, row in rows.items()),
        *({"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": t, "args": {"sort_index": t}} for t in rows),
    ]


def _slice(lowered: Lowered, task: int, pid: int, tid: int, start: float, end: float, args: Event) -> Event:
    return {
        "ph": "X", "name": task_words(lowered, task), "cat": _CATEGORY[TaskKind(lowered.tasks.kind[task])],
        "pid": pid, "tid": tid, "ts": float(start) * 1e6, "dur": float(end - start) * 1e6, "args": args,
    }  # fmt: skip


def _compute(lowered: Lowered, task: int, pid: int, start: float, end: float) -> Event:
    args: Event = {"task": task, "predicted_s": lowered.tasks.duration[task]}
    operator = lowered.tasks.operator[task]
    if operator >= 0:
        op, config = lowered.graph.operators[operator], lowered.configs[operator]
        piece = lowered.placed[operator].placement.piece_on(lowered.tasks.device[task])
        args |= {
            "kind": op.kind,
            "module": op.module,
            "config": treatment(lowered.graph, lowered.topology, op, config),
            "degrees": dict(config.degrees),
            "replicas": config.replicas,
            "piece": " ".join(f"{axis}={low}:{high}" for axis, (low, high) in piece.axes.items()),
            "output_bytes": sum(
                volume(box) * lowered.graph.tensor[name].itemsize
                for name, box in zip(op.outputs, piece.outputs, strict=True)
            ),
        }
    return _slice(lowered, task, pid, 0, start, end, args)


def _communication_args(lowered: Lowered, task: int) -> Event:
    what = lowered.tasks.communication[task]
    assert what is not None
    return {
        "task": task, "form": what.form, "purpose": what.purpose, "bytes": what.nbytes, "devices": list(what.devices),
        "predicted_s": lowered.tasks.duration[task],
    }  # fmt: skip


def _on_links(lowered: Lowered, task: int, taken: Sequence[tuple[float, float]], pid: int) -> list[Event]:
    """A communication on every link it keeps busy, in each of its turns."""
    communication = lowered.tasks.communication[task]
    if communication is None:
        return []
    args, carried = _communication_args(lowered, task), dict(communication.transfer.link_bytes)
    return [
        _slice(
            lowered, task, pid, r, begin, begin + min(lowered.tasks.turn[task], busy - done),
            args | {"link_bytes": carried.get(r, 0)},
        )
        for begin, done in taken
        for r, busy in lowered.tasks.links[task]
        if busy > done
    ]  # fmt: skip


def _arrows(lowered: Lowered, simulation: Simulation, pid: int) -> list[Event]:
    """Flow events from each communication's busiest link to the compute tasks that wait for it."""
    events: list[Event] = []
    tasks = lowered.tasks
    for task, row in enumerate(tasks.dependencies):
        if tasks.device[task] < 0:
            continue
        for before in row:
            if tasks.communication[before] is not None and tasks.links[before]:
                link = max(tasks.links[before], key=lambda r: (r[1], -r[0]))[0]
                flow: Event = {"name": "data", "cat": "data", "id": len(events) // 2}
                events.append(flow | {"ph": "s", "pid": pid, "tid": link, "ts": float(simulation.start[before]) * 1e6})
                events.append(
                    flow | {
                        "ph": "f", "bp": "e", "pid": 2 * tasks.device[task] + 1, "tid": 0,
                        "ts": float(simulation.start[task]) * 1e6,
                    }
                )  # fmt: skip
    return events


def _measured_communication(lowered: Lowered, known: Mapping[int, tuple[float, float]], pid: int) -> list[Event]:
    """Measured communications, in as many rows as happen at the same time."""
    rows: list[float] = []  # end of the last one in each row
    events: list[Event] = []
    for task in sorted((t for t in known if lowered.tasks.device[t] < 0), key=lambda t: (known[t], t)):
        start, end = known[task]
        row = next((k for k, busy_until in enumerate(rows) if busy_until <= start), len(rows))
        rows[row : row + 1] = [end]
        events.append(_slice(lowered, task, pid, row, start, end, _communication_args(lowered, task)))
    return _process(pid, "communication: measured", {k: f"communication {k}" for k in range(len(rows))}) + events
