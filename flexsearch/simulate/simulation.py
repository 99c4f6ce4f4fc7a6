"""When every task of a lowered strategy runs, and what follows from it: makespan, busy time, bytes, memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flexsearch.cost.ticks import TICK
from flexsearch.lower import Lowered
from flexsearch.lower.view import Rows
from flexsearch.simulate.engine import Engine, Times
from flexsearch.simulate.memory import Memory, memory
from flexsearch.topology import Topology

Seconds = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Simulation:
    """One simulated training step.

    ``makespan_s``: iteration time. ``start``/``end``: seconds by task index. By device index of the topology:
    ``busy_s`` (own compute tasks), ``idle_s`` (the rest of the makespan), ``peak_bytes`` and ``memory`` (the peak and
    what it is made of). By resource index: ``link_bytes`` (bytes carried) and ``link_busy_s`` (seconds kept busy; of a
    processor: compute of all its devices, and the time that moving bytes takes from it). ``moved_bytes``: bytes that
    cross from one device to another. ``times``: of the rows. Where equal blocks of devices are folded
    (``lower.folding``), devices and resources are those of the first block, moved bytes those of all.
    """

    makespan_s: float
    start: Seconds
    end: Seconds
    busy_s: Seconds
    idle_s: Seconds
    link_bytes: npt.NDArray[np.int64]
    link_busy_s: Seconds
    peak_bytes: tuple[int, ...]
    memory: tuple[Memory, ...]
    moved_bytes: int
    times: Times


def makespan(lowered: Lowered) -> float:
    """Iteration time (s) alone."""
    return rows_seconds(lowered.rows)


def rows_seconds(rows: Rows) -> float:
    """Iteration time (s) of rows."""
    return Engine(rows.schedule, rows.machine).run(rows.segments, rows.segment) * TICK


def simulate(lowered: Lowered) -> Simulation:
    """Simulate one training step of a lowered strategy."""
    tasks, topology = lowered.tasks, lowered.topology
    times = times_of(lowered.rows)
    start, end = _of_tasks(lowered, times)
    total = float(end.max(initial=0.0))
    busy, occupied = np.zeros(len(topology.devices)), np.zeros(len(topology.resources))
    carried = np.zeros(len(topology.resources), dtype=np.int64)
    moved = 0
    for task, communication in enumerate(tasks.communication):
        if communication is None:
            busy[tasks.device[task]] += tasks.duration[task]
            links = tasks.links[task]
        else:
            moved += communication.nbytes
            links = communication.transfer.links
            for resource, nbytes in communication.transfer.link_bytes:
                carried[resource] += nbytes
        for resource, seconds in (*links, *tasks.drag[task]):
            occupied[resource] += seconds
    use = memory(lowered)
    return Simulation(
        total, start, end, busy, total - busy, carried, occupied, tuple(m.peak for m in use), use, moved, times
    )


def times_of(rows: Rows) -> Times:
    """When every row starts and ends."""
    return Engine(rows.schedule, rows.machine).times(rows.segments, rows.segment)


def _of_tasks(lowered: Lowered, times: Times) -> tuple[Seconds, Seconds]:
    """Start and end (s) of the tasks."""
    computes = times.computation_first, times.computation_start, times.computation_end
    moves = times.communication_first, times.communication_start, times.communication_end
    start, end = np.zeros((2, len(lowered.tasks)))
    for task, (microbatch, block, communicates, number) in enumerate(lowered.tasks.identity):
        first, begun, ended = moves if communicates else computes
        place = int(first[block]) + number
        start[task], end[task] = begun[microbatch, place] * TICK, ended[microbatch, place] * TICK
    return start, end


def over_memory(simulation: Simulation, topology: Topology) -> list[tuple[int, int]]:
    """(device, bytes missing) for every device whose peak does not fit into its memory."""
    return [
        (d, peak - topology.devices[d].memory_bytes)
        for d, peak in enumerate(simulation.peak_bytes)
        if peak > topology.devices[d].memory_bytes
    ]
