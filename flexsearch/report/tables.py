"""Plans side by side: time, speed-up over data parallelism and over one device, bytes moved, peak memory, and what the
time is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from flexsearch.lower import Communication, Lowered
from flexsearch.lower.view import links_of
from flexsearch.report.grid import Column, Grid
from flexsearch.report.layouts import changed_words
from flexsearch.report.uncertainty import INTERVAL, time_words
from flexsearch.report.units import nbytes, percent, ratio
from flexsearch.report.words import tensor_words
from flexsearch.simulate import Simulation, busiest, critical_path, over_memory


@dataclass(frozen=True)
class PlanRow:
    """One plan of a comparison. ``note``: what the reader should know of it, in a few words."""

    name: str
    simulation: Simulation
    lowered: Lowered
    note: str = ""

    @cached_property
    def dominates(self) -> str:
        """What most of the critical path is (:func:`dominates`)."""
        return dominates(self.lowered, self.simulation)

    @property
    def shortfall(self) -> list[tuple[int, int]]:
        """(device, missing bytes) where memory does not suffice."""
        return over_memory(self.simulation, self.lowered.topology)


def is_data_parallel(name: str) -> bool:
    """Whether a plan's name says that it is plain data parallelism, the yardstick of comparisons."""
    return name.lower().replace("-", "_").replace(" ", "_") == "data_parallel"


def yardsticks(rows: Sequence[PlanRow]) -> dict[str, float | None]:
    """Iteration times (s) to compare with, as arguments of ``plan_rows`` and ``plan_table``: of the rows called "data
    parallel" and "single"; None without one."""
    return {
        "data_parallel_s": next((r.simulation.makespan_s for r in rows if is_data_parallel(r.name)), None),
        "single_s": next((r.simulation.makespan_s for r in rows if r.name.lower() == "single"), None),
    }


def plan_rows(
    rows: Sequence[PlanRow], data_parallel_s: float | None = None, single_s: float | None = None
) -> list[dict[str, Any]]:
    """The comparison as JSON rows. ``data_parallel_s``, ``single_s``: iteration times to compare with, by default those
    of the rows called "data parallel" and "single" (speed-ups are null without them). ``interval_s``: the 80 % interval
    of the time. ``shortfall_bytes``: missing memory on the worst device, 0 if the plan fits."""
    reference_s = yardsticks(rows)
    data_parallel_s = reference_s["data_parallel_s"] if data_parallel_s is None else data_parallel_s
    single_s = reference_s["single_s"] if single_s is None else single_s
    return [
        {
            "name": row.name,
            "iteration_s": row.simulation.makespan_s,
            "interval_s": row.simulation.estimate.interval_s,
            "speedup_vs_data_parallel": _speedup(data_parallel_s, row.simulation.makespan_s),
            "speedup_vs_single": _speedup(single_s, row.simulation.makespan_s),
            "moved_bytes": row.simulation.moved_bytes,
            "peak_bytes": max(row.simulation.peak_bytes, default=0),
            "bucket_bytes": row.lowered.options.bucket_bytes,
            "synchronise_by": row.lowered.options.synchronise_by,
            "dominates": row.dominates,
            "fits": not row.shortfall,
            "shortfall_bytes": max((missing for _, missing in row.shortfall), default=0),
            "note": row.note,
        }
        for row in rows
    ]


def _speedup(before_s: float | None, now_s: float) -> float | None:
    return before_s / now_s if before_s and now_s else None


def plan_table(
    rows: Sequence[PlanRow], title: str = "", /, data_parallel_s: float | None = None, single_s: float | None = None
) -> Grid:
    """The comparison for a terminal, with half of the 80 % interval of each time. The fastest plan that fits is bold;
    plans that do not fit are red and say so."""
    grid = Grid(
        (
            Column("plan", "text"), Column(f"iteration,\n{INTERVAL}"), Column("vs data\nparallel"),
            Column("vs one\ndevice"), Column("bytes\nmoved", "number below"), Column("peak\nmemory", "number below"),
            Column("what takes the time", "below", least=36),
        ),
        title,
    )  # fmt: skip
    values = plan_rows(rows, data_parallel_s, single_s)
    best = min((r["iteration_s"] for r in values if r["fits"]), default=None)
    for row, one in zip(rows, values, strict=True):
        peak = nbytes(one["peak_bytes"])
        remarks = [one["dominates"], one["note"], *changed_words(row.lowered.options)]
        if row.shortfall:
            device, missing = max(row.shortfall, key=lambda pair: pair[1])
            peak += " !"
            remarks.insert(0, f"does not fit: {nbytes(missing)} short on {row.lowered.topology.devices[device].name}")
        speedups = (one[f"speedup_vs_{name}"] for name in ("data_parallel", "single"))
        grid.add(
            one["name"], time_words(row.simulation.estimate),
            *("-" if s is None else ratio(s) for s in speedups),
            nbytes(one["moved_bytes"]), peak, "; ".join(r for r in remarks if r),
            style="red" if row.shortfall else "bold" if one["iteration_s"] == best else "",
        )  # fmt: skip
    return grid


def dominates(lowered: Lowered, simulation: Simulation) -> str:
    """What most of the critical path is: "compute 71 %", "all_reduce of gradient of fc6.weight and 7 more 80 %, link
    host0->switch", or "waiting for messages 55 %" (overhead and latency rather than bytes)."""
    path = critical_path(lowered)
    # Of the step that the rows describe, which with recipes may take longer than the mean one.
    total = path[-1].end if lowered.options.recipes and path else simulation.makespan_s
    if not path or total <= 0.0:
        return "nothing"
    compute = waiting = launching = 0.0
    messages = 0
    moving: dict[tuple[str, str], dict[int, float]] = {}
    for step in path:
        task, share = step.task, step.seconds
        if step.launches:
            launching += share
            continue
        if not lowered.order.communicates[task] or step.moves_bytes:
            compute += share
            continue
        communication = _communication(lowered, task)
        busy = min(share, busiest(links_of(lowered.rows.segments, int(lowered.order.step[task])), step))
        group = moving.setdefault((communication.form, communication.purpose), {})
        group[task] = group.get(task, 0.0) + busy
        waiting += share - busy
        messages += 1
    form_purpose = max(moving, key=lambda key: sum(moving[key].values()), default=None)
    moved = sum(moving[form_purpose].values()) if form_purpose else 0.0
    if launching >= max(compute, moved, waiting):
        return f"launching operators (host) {percent(launching / total)}"
    if compute >= max(moved, waiting) or form_purpose is None:
        return f"compute {percent(compute / total)}"
    if waiting > moved:
        return f"waiting for messages {percent(waiting / total)} ({messages} in a row)"
    group = moving[form_purpose]
    return f"{_what(lowered, group)} {percent(moved / total)}, {_where(lowered, group)}"


def _what(lowered: Lowered, group: dict[int, float]) -> str:
    """The communications of a group by the tensor that takes longest."""
    longest = _communication(lowered, max(group, key=lambda t: group[t]))
    text = f"{longest.form} of {tensor_words(lowered, longest)}"
    return text if len(group) == 1 else f"{text} and {len(group) - 1} like it"


def _where(lowered: Lowered, group: dict[int, float]) -> str:
    """The link that the group keeps busy longest."""
    busy: dict[int, float] = {}
    for task in group:
        for link, seconds_ in links_of(lowered.rows.segments, int(lowered.order.step[task])):
            busy[link] = busy.get(link, 0.0) + seconds_
    resource = lowered.topology.resources[max(busy, key=lambda r: busy[r])]
    return f"link {resource.name}" if resource.kind == "link" else resource.name


def _communication(lowered: Lowered, task: int) -> Communication:
    return lowered.communications.of(int(lowered.order.block[task]), int(lowered.order.number[task]))
