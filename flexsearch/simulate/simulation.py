"""When every task of a lowered strategy runs, and what follows from it: makespan, busy time, bytes, memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from flexsearch.cost.ticks import TICK
from flexsearch.lower import Lowered, TaskArrays, TaskGraph
from flexsearch.simulate.engine import Engine
from flexsearch.simulate.kernel import Times, times
from flexsearch.simulate.memory import Memory, memory
from flexsearch.topology import Topology


@dataclass(frozen=True)
class Simulation:
    """One simulated training step.

    ``makespan_s``: iteration time. ``start``/``end``: seconds by task index. By device index of the topology:
    ``busy_s`` (own compute tasks), ``idle_s`` (the rest of the makespan), ``peak_bytes`` and ``memory`` (the peak and
    what it is made of). By resource index: ``link_bytes`` (bytes carried) and ``link_busy_s`` (seconds kept busy; of a
    processor: compute of all its devices, and the time that moving bytes takes from it). ``moved_bytes``: bytes that
    cross from one device to another.
    """

    makespan_s: float
    start: Times
    end: Times
    busy_s: Times
    idle_s: Times
    link_bytes: npt.NDArray[np.int64]
    link_busy_s: Times
    peak_bytes: tuple[int, ...]
    memory: tuple[Memory, ...]
    moved_bytes: int


def makespan(tasks: TaskGraph | TaskArrays) -> float:
    """Iteration time (s) alone: what the search asks again and again."""
    return times(tasks.arrays() if isinstance(tasks, TaskGraph) else tasks)[0]


def simulate(lowered: Lowered) -> Simulation:
    """Simulate one training step of a lowered strategy."""
    tasks, topology = lowered.tasks, lowered.topology
    arrays = tasks.arrays()
    total, start, end = _times(lowered)
    device = np.array(tasks.device, dtype=np.int64)
    computes = device >= 0
    busy = _sums(device[computes], arrays.duration[computes], len(topology.devices))
    resources = len(topology.resources)
    occupied = _sums(arrays.link, arrays.link_s, resources) + _sums(arrays.drag, arrays.drag_s, resources)
    carried = np.zeros(resources, dtype=np.int64)
    moved = 0
    for communication in tasks.communication:
        if communication is not None:
            moved += communication.nbytes
            for resource, nbytes in communication.transfer.link_bytes:
                carried[resource] += nbytes
    use = memory(lowered)
    return Simulation(total, start, end, busy, total - busy, carried, occupied, tuple(m.peak for m in use), use, moved)


def _times(lowered: Lowered) -> tuple[float, Times, Times]:
    """Makespan, start and end (s) of the tasks."""
    rows = lowered.rows
    found = Engine(rows.schedule, rows.machine).times(rows.segments, rows.segment)
    computes = found.computation_first, found.computation_start, found.computation_end
    moves = found.communication_first, found.communication_start, found.communication_end
    start, end = np.zeros((2, len(lowered.tasks)))
    for task, (microbatch, block, communicates, number) in enumerate(lowered.tasks.identity):
        first, begun, ended = moves if communicates else computes
        place = int(first[block]) + number
        start[task], end[task] = begun[microbatch, place] * TICK, ended[microbatch, place] * TICK
    return float(end.max(initial=0.0)), start, end


def _sums(index: npt.NDArray[np.integer[Any]], values: Times, count: int) -> Times:
    """Sum of the values of each index, ``count`` of them."""
    return np.bincount(index, weights=values, minlength=count).astype(np.float64)


def over_memory(simulation: Simulation, topology: Topology) -> list[tuple[int, int]]:
    """(device, bytes missing) for every device whose peak does not fit into its memory."""
    return [
        (d, peak - topology.devices[d].memory_bytes)
        for d, peak in enumerate(simulation.peak_bytes)
        if peak > topology.devices[d].memory_bytes
    ]
