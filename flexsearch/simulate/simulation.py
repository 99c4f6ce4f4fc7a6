"""When every task of a lowered strategy runs, and what follows from it: makespan, busy time, bytes, memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from flexsearch.cost.ticks import TICK
from flexsearch.cost.uncertainty import Estimate
from flexsearch.lower import Lowered
from flexsearch.lower.rows import Rows
from flexsearch.simulate.engine import Engine, Times
from flexsearch.simulate.mean import mean_step
from flexsearch.simulate.memory import Memory, memory
from flexsearch.simulate.uncertainty import estimate
from flexsearch.simulate.usage import computing_columns, makespan_of, repeats
from flexsearch.topology import Topology

Seconds = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Simulation:
    """One simulated training step.

    ``makespan_s``: iteration time. By device index of the topology:
    ``busy_s`` (own compute tasks), ``idle_s`` (the rest of the makespan), ``peak_bytes`` and ``memory`` (the peak and
    what it is made of). By resource index: ``link_bytes`` (bytes carried) and ``link_busy_s`` (seconds kept busy; of a
    processor: compute of all its devices, and the time that moving bytes takes from it). ``moved_bytes``: bytes that
    cross from one device to another. ``times``: of the rows of ``lowered``. Where equal blocks of devices are folded
    (``lower.folding``), devices and resources are those of the first block, moved bytes those of all.
    """

    makespan_s: float
    busy_s: Seconds
    idle_s: Seconds
    link_bytes: npt.NDArray[np.int64]
    link_busy_s: Seconds
    peak_bytes: tuple[int, ...]
    memory: tuple[Memory, ...]
    moved_bytes: int
    times: Times
    lowered: Lowered = field(repr=False)

    @cached_property
    def estimate(self) -> Estimate:
        """The makespan with what it rests on, and so its interval. It takes a dozen simulations. A mean step rests on
        the same as the step that is shown."""
        shown = estimate(self.lowered.lowering, self.lowered.rows, self.lowered.configs)
        if not self.lowered.options.recipes or not shown.seconds:
            return shown
        factor = self.makespan_s / shown.seconds
        return Estimate(self.makespan_s, {source: factor * share for source, share in shown.shares.items()})

    @property
    def start(self) -> Seconds:
        """By task."""
        return self._of_tasks[0]

    @property
    def end(self) -> Seconds:
        """By task."""
        return self._of_tasks[1]

    @cached_property
    def _of_tasks(self) -> tuple[Seconds, Seconds]:
        """Start and end (s) of the tasks."""
        start, end = (TICK * ticks.astype(np.float64) for ticks in self.times.of(self.lowered.order))
        return start, end


def makespan(lowered: Lowered) -> float:
    """Iteration time (s) alone."""
    return rows_seconds(lowered.rows)


def rows_seconds(rows: Rows) -> float:
    """Iteration time (s) of rows."""
    return Engine(rows.schedule, rows.machine).run(rows.segments, rows.segment) * TICK


def simulate(lowered: Lowered) -> Simulation:
    """Simulate one training step of a lowered strategy: with recipes that do not the same in every step, the mean step
    (``simulate.mean``)."""
    return mean_step(lowered, simulate_step) if lowered.options.recipes else simulate_step(lowered)


def simulate_step(lowered: Lowered) -> Simulation:
    """Simulate the step that a lowered strategy describes."""
    rows, topology, times = lowered.rows, lowered.topology, times_of(lowered.rows)
    device, block_of, _, ticks = computing_columns(rows)
    times_run = repeats(rows)
    seconds = times_run[block_of] * ticks * TICK
    busy, occupied = np.zeros(len(topology.devices)), np.zeros(len(topology.resources))
    np.add.at(busy, device, seconds)
    np.add.at(occupied, np.array(topology.processor_of)[device], seconds)
    carried, moved = [0] * len(topology.resources), 0
    for block, number, drags in _communications(rows):
        what, often = lowered.communications.of(block, number), int(times_run[block])
        moved += often * what.nbytes
        for resource, nbytes in what.transfer.link_bytes:
            carried[resource] += often * nbytes
        for resource, kept in (*what.transfer.links, *drags):
            occupied[resource] += often * kept
    total, use = makespan_of(times) * TICK, memory(lowered)
    peaks = tuple(m.peak for m in use)
    link_bytes, link_busy_s = np.array(carried, np.int64), np.array(occupied, np.float64)
    return Simulation(total, busy, total - busy, link_bytes, link_busy_s, peaks, use, moved, times, lowered)


def _communications(rows: Rows) -> Iterator[tuple[int, int, list[tuple[int, float]]]]:
    """Block, number, and (processor, seconds of computing that it takes from it), of each of one microbatch."""
    segments = rows.segments
    for block, segment in enumerate(rows.segment.tolist()):
        first = int(segments.communication_first[segment])
        for c in range(first, int(segments.communication_last[segment])):
            of = slice(int(segments.drag_first[c]), int(segments.drag_last[c]))
            seconds = segments.drag_ticks[of] * TICK
            yield block, c - first, list(zip(segments.drag[of].tolist(), seconds.tolist(), strict=True))


def times_of(rows: Rows) -> Times:
    """When every row starts and ends."""
    return Engine(rows.schedule, rows.machine).times(rows.segments, rows.segment)


def over_memory(simulation: Simulation, topology: Topology) -> list[tuple[int, int]]:
    """(device, bytes missing) for every device whose peak does not fit into its memory."""
    return [
        (d, peak - topology.devices[d].usable_bytes)
        for d, peak in enumerate(simulation.peak_bytes)
        if peak > topology.devices[d].usable_bytes
    ]
