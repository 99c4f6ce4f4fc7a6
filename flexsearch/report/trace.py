"""Timeline as Chrome trace JSON (Trace Event Format), which Perfetto and chrome://tracing open.

One process for each device with its compute tasks and what its memory holds, one for the links with a row each; arrows
lead from a communication to the tasks that wait for it. A device of a pipeline has a row for its passes, named as
PyTorch's pipelining names them (1F0: stage 1, forward, microbatch 0), above that of their tasks. Where equal blocks of
devices do the same, one of them is shown. Measured times and memory, where given, stand in processes of their own right
below the predicted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from flexsearch.cost.ticks import TICK
from flexsearch.graph import volume
from flexsearch.lower import Lowered, TaskKind
from flexsearch.lower.actions import Action
from flexsearch.lower.view import Actions
from flexsearch.output import write
from flexsearch.report.words import task_words, treatment
from flexsearch.simulate import Simulation, simulate
from flexsearch.simulate.critical import turns
from flexsearch.simulate.engine import Times
from flexsearch.simulate.memory import PARTS, Curve, memory_curves
from flexsearch.simulate.simulation import times_of
from flexsearch.simulate.usage import count_tasks, makespan_of, passes

Event = dict[str, Any]
TASKS, PASSES = 1, 0
"""Rows of a device."""
STATES = 2000
"""States of a device's memory that are shown at most."""
MOST_TASKS = 500_000
"""A trace of more would be larger than what opens in a browser, and take minutes."""
_CATEGORY = {
    TaskKind.FORWARD: "forward", TaskKind.BACKWARD: "backward", TaskKind.UPDATE: "update",
    TaskKind.WEIGHT_GRADIENT: "weight gradient", TaskKind.COMMUNICATION: "communication",
    TaskKind.RECOMPUTE: "recompute", TaskKind.SYNCHRONISE: "synchronise",
}  # fmt: skip


def chrome_trace(
    lowered: Lowered, simulation: Simulation, measured: Mapping[int, tuple[float, float]] | None = None,
    held: Mapping[int, Sequence[tuple[float, int]]] = MappingProxyType({}),
) -> Event:  # fmt: skip
    """The trace as a JSON object. ``measured``: task -> (start, end) in seconds; NaN or absent where not measured.
    ``held``: device -> (time s, bytes that it held from then on), as measured."""
    spans = {t: row for t, row in (measured or {}).items() if all(map(math.isfinite, row))}
    topology, count = lowered.topology, len(lowered.topology.devices)
    links, seen = 2 * count + 1, 2 * count + 2  # process numbers: 2d + 1 and 2d + 2 belong to device d
    events = _devices(lowered, simulation.times, "predicted" if spans else "")
    if spans:
        rows = {TASKS: "compute"} if Actions(lowered).plain else {PASSES: "passes", TASKS: "compute"}
        for d in lowered.devices:
            events += _process(2 * d + 2, f"{topology.devices[d].name}: measured", rows)
        events += _measured_passes(lowered, spans)
        for d, states in held.items():
            events += [_counter(2 * d + 2, t, {"bytes": nbytes}) for t, nbytes in states]
    names = {r: x.name for r, x in enumerate(topology.resources) if simulation.link_bytes[r]}
    events += _process(links, "links: predicted" if spans else "links", names)
    shared = any(math.isfinite(turn) for turn in lowered.tasks.turn)
    turns_of = turns(lowered) if shared else {}
    for task, device in enumerate(lowered.tasks.device):
        if device >= 0:
            events.append(_compute(lowered, task, 2 * device + 1, simulation.start[task], simulation.end[task]))
            if task in spans:
                events.append(_compute(lowered, task, 2 * device + 2, *spans[task]))
        else:
            alone = (float(simulation.start[task]), 0.0, math.inf)
            events += _on_links(lowered, task, turns_of.get(task, [alone]), links)
    events += _arrows(lowered, simulation, links)
    if spans:
        events += _measured_communication(lowered, spans, seen)
    more = {"moved_bytes": simulation.moved_bytes, "tasks": len(lowered.tasks)}
    return _trace(lowered, events, simulation.makespan_s, simulation.peak_bytes, more)


def pass_trace(lowered: Lowered, times: Times) -> Event:
    """The trace of a plan with too many tasks to show each: the passes of its devices and their memory."""
    peaks, total = [curve.peak.peak for curve in memory_curves(lowered, times)], makespan_of(times) * TICK
    return _trace(lowered, _devices(lowered, times, ""), total, peaks, {"tasks": count_tasks(times)})


def _trace(lowered: Lowered, events: list[Event], makespan_s: float, peaks: Sequence[int], more: Event) -> Event:
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "graph": lowered.graph.name, "topology": lowered.topology.name, "iteration_s": makespan_s,
            "peak_bytes": list(peaks), "blocks": lowered.lowering.replicas, **more,
        },
    }  # fmt: skip


def _devices(lowered: Lowered, times: Times, remark: str) -> list[Event]:
    """The processes of the devices that compute, with the passes of a pipeline and what is in memory."""
    events, blocks = list[Event](), lowered.lowering.replicas
    rows = {TASKS: "compute"} if Actions(lowered).plain else {PASSES: "passes", TASKS: "compute"}
    for d in lowered.devices:
        title = lowered.topology.devices[d].name + (f": {remark}" if remark else "")
        title += f" (block 1 of {blocks}; the others do the same)" if blocks > 1 else ""
        events += _process(2 * d + 1, title, rows)
    for one in passes(lowered, times):
        events.append(_pass(one.action, 2 * one.device + 1, one.begin * TICK, one.end * TICK))
    for d, curve in enumerate(memory_curves(lowered, times)):
        if d in lowered.devices:
            events += _memory(curve.thinned(STATES), 2 * d + 1)
    return events


def _pass(action: Action, pid: int, begin_s: float, end_s: float) -> Event:
    args = {"stage": action.stage, "pass": action.kind, "microbatch": action.microbatch}
    return {
        "ph": "X", "name": str(action), "cat": f"pass {action.kind}", "pid": pid, "tid": PASSES, "ts": begin_s * 1e6,
        "dur": (end_s - begin_s) * 1e6, "args": args,
    }  # fmt: skip


def _measured_passes(lowered: Lowered, spans: Mapping[int, tuple[float, float]]) -> list[Event]:
    """Passes from their first measured computation to the end of the last one."""
    ends: dict[tuple[int, Action], tuple[float, float]] = {}
    for task, (begin, end) in spans.items():
        device, action = lowered.tasks.device[task], lowered.tasks.action[task]
        if device >= 0 and action is not None:
            before = ends.get((device, action), (begin, end))
            ends[device, action] = min(begin, before[0]), max(end, before[1])
    return [_pass(action, 2 * device + 2, *span) for (device, action), span in sorted(ends.items())]


def _memory(curve: Curve, pid: int) -> list[Event]:
    """Counters of what a device holds, bytes by part."""
    return [
        _counter(pid, float(t), dict(zip(PARTS, use, strict=True)))
        for t, use in zip(curve.times, curve.use.T.tolist(), strict=True)
    ]


def _counter(pid: int, seconds: float, nbytes: Mapping[str, int]) -> Event:
    return {"ph": "C", "name": "memory", "pid": pid, "ts": seconds * 1e6, "args": dict(nbytes)}


def save_trace(
    path: str | Path, lowered: Lowered, simulation: Simulation,
    measured: Mapping[int, tuple[float, float]] | None = None,
    held: Mapping[int, Sequence[tuple[float, int]]] = MappingProxyType({}),
) -> None:  # fmt: skip
    """Write ``chrome_trace`` to ``path``. Raises OutputError if that is not possible."""
    write(path, _text(chrome_trace(lowered, simulation, measured, held)))


def save_simulated(path: str | Path, lowered: Lowered) -> int:
    """Simulate a plan and write its trace: all tasks, or where these are more than ``MOST_TASKS`` its passes. Returns
    how many tasks it has. Raises OutputError."""
    times = times_of(lowered.rows)
    if (tasks := count_tasks(times)) <= MOST_TASKS:
        save_trace(path, lowered, simulate(lowered))
    else:
        write(path, _text(pass_trace(lowered, times)))
    return tasks


def _text(trace: Event) -> str:
    return json.dumps(trace, separators=(",", ":")) + "\n"


def _process(pid: int, name: str, rows: Mapping[int, str]) -> list[Event]:
    return [
        {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}},
        {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}},
        *({"ph": "M", "name": "thread_name", "pid": pid, "tid": t, "args": {"name": row}} for t, row in rows.items()),
        *({"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": t, "args": {"sort_index": t}} for t in rows),
    ]


def _slice(lowered: Lowered, task: int, pid: int, tid: int, start: float, end: float, args: Event) -> Event:
    action = lowered.tasks.action[task]
    name = task_words(lowered, task)
    if action is not None:
        name, args = f"{action} {name}", args | {"microbatch": action.microbatch}
    return {
        "ph": "X", "name": name, "cat": _CATEGORY[TaskKind(lowered.tasks.kind[task])],
        "pid": pid, "tid": tid, "ts": float(start) * 1e6, "dur": float(end - start) * 1e6, "args": args,
    }  # fmt: skip


def _compute(lowered: Lowered, task: int, pid: int, start: float, end: float) -> Event:
    args: Event = {"task": task, "predicted_s": lowered.tasks.duration[task]}
    operator = lowered.tasks.operator[task]
    if operator >= 0 and lowered.tasks.microbatch[task] == 0:  # the others are alike
        op, config = lowered.graph.operators[operator], lowered.configs[operator]
        piece = lowered.placed[operator].piece_on(lowered.tasks.device[task])
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
    return _slice(lowered, task, pid, TASKS, start, end, args)


def _communication_args(lowered: Lowered, task: int) -> Event:
    what = lowered.tasks.communication[task]
    assert what is not None
    return {
        "task": task, "form": what.form, "purpose": what.purpose, "bytes": what.nbytes, "devices": list(what.devices),
        "predicted_s": lowered.tasks.duration[task],
    }  # fmt: skip


def _on_links(lowered: Lowered, task: int, taken: Sequence[tuple[float, float, float]], pid: int) -> list[Event]:
    """A communication on every link it keeps busy, in each of its turns."""
    communication = lowered.tasks.communication[task]
    if communication is None:
        return []
    args, carried = _communication_args(lowered, task), dict(communication.transfer.link_bytes)
    return [
        _slice(
            lowered, task, pid, r, begin, begin + min(after, busy) - done,
            args | {"link_bytes": carried.get(r, 0)},
        )
        for begin, done, after in taken
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
                        "ph": "f", "bp": "e", "pid": 2 * tasks.device[task] + 1, "tid": TASKS,
                        "ts": float(simulation.start[task]) * 1e6,
                    }
                )  # fmt: skip
    return events


def _measured_communication(lowered: Lowered, spans: Mapping[int, tuple[float, float]], pid: int) -> list[Event]:
    """Measured communications, in as many rows as happen at the same time."""
    rows: list[float] = []  # end of the last one in each row
    events: list[Event] = []
    for task in sorted((t for t in spans if lowered.tasks.device[t] < 0), key=lambda t: (spans[t], t)):
        start, end = spans[task]
        row = next((k for k, busy_until in enumerate(rows) if busy_until <= start), len(rows))
        rows[row : row + 1] = [end]
        events.append(_slice(lowered, task, pid, row, start, end, _communication_args(lowered, task)))
    return _process(pid, "communication: measured", {k: f"communication {k}" for k in range(len(rows))}) + events
