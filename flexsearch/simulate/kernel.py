"""Event-driven simulation of a task graph, compiled.

A task is ready when all its dependencies have ended. Ready tasks are taken in order of (ready time, task index); a task
starts when it is ready and all its link resources are free, keeps each of them busy from then on, and ends after its
duration, which may be longer (latency) or shorter. A task with a finite ``turn`` gives way after that time: it becomes
ready again, behind the tasks that waited for its resource meanwhile. There are only maxima, sums and differences, so
the result does not depend on the machine: a plain Python simulator gives the same bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from flexsearch.compiled import ONE, TWO, ZERO, compiled
from flexsearch.lower import TaskArrays

Times = npt.NDArray[np.float64]


@compiled
def run(
    duration: Times,
    dependency_start: npt.NDArray[np.uint32],
    dependency: npt.NDArray[np.uint32],
    link_start: npt.NDArray[np.uint32],
    link: npt.NDArray[np.uint32],
    link_s: Times,
    drag_start: npt.NDArray[np.uint32],
    drag: npt.NDArray[np.uint32],
    drag_s: Times,
    turn: Times,
    start: Times,
    end: Times,
    ready: Times,
    left: Times,
    free: Times,
    missing: npt.NDArray[np.uint32],
    reader_start: npt.NDArray[np.uint32],
    reader: npt.NDArray[np.uint32],
    heap: npt.NDArray[np.uint32],
    rest: Times,
    limit: float,
) -> float:
    """Fill ``start`` and ``end`` (s, one for each task) and return the makespan (s); infinity as soon as it is certain
    that it is above ``limit`` (s).

    The columns are those of ``TaskArrays``. Work arrays, of any content: ``ready``, ``left`` (tasks), ``free``
    (resources), ``missing`` (tasks), ``reader_start`` (tasks + 2), ``reader`` (dependencies), ``heap`` (tasks),
    ``rest`` (resources).
    """
    count = np.uint64(duration.shape[0])
    size = ZERO
    makespan = 0.0
    free[:] = 0.0
    rest[:] = 0.0
    ready[:] = 0.0
    left[:] = duration
    start[:] = -1.0

    # What is still to be done on each resource. A task may keep one busy for longer than it lasts itself.
    limit *= 1.0 + 1e-9  # more than all rounding in sums of seconds
    t = ZERO
    while t < count:
        k = np.uint64(link_start[t])
        while k < np.uint64(link_start[t + ONE]):
            rest[np.uint64(link[k])] += min(link_s[k], duration[t])
            k += ONE
        t += ONE

    # What is still to be done from every task's start on, whatever the links do; kept in ``end`` until it starts.
    end[:] = 0.0
    t = count
    while t > ZERO:
        t -= ONE
        tail = end[t] + duration[t]
        if tail > limit:
            return np.inf
        end[t] = tail
        k = np.uint64(dependency_start[t])
        while k < np.uint64(dependency_start[t + ONE]):
            d = np.uint64(dependency[k])
            end[d] = max(end[d], tail)
            k += ONE

    # Readers of every task, by counting: row t of ``reader`` is reader[reader_start[t] : reader_start[t + 1]].
    reader_start[:] = 0
    k = ZERO
    while k < np.uint64(dependency.shape[0]):
        reader_start[np.uint64(dependency[k]) + TWO] += np.uint32(1)
        k += ONE
    t = ZERO
    while t < count:
        reader_start[t + ONE] += reader_start[t]
        t += ONE
    t = ZERO
    while t < count:
        first, last = np.uint64(dependency_start[t]), np.uint64(dependency_start[t + ONE])
        missing[t] = last - first
        while first < last:
            d = np.uint64(dependency[first])
            reader[np.uint64(reader_start[d + ONE])] = t
            reader_start[d + ONE] += np.uint32(1)
            first += ONE
        if missing[t] == 0:  # ready at 0 in ascending order: a heap as it stands
            heap[size] = t
            size += ONE
        t += ONE

    while size > ZERO:
        task = np.uint64(heap[ZERO])
        size -= ONE
        if size > ZERO:
            _sift_down(heap, ready, size, np.uint64(heap[size]))
        begin = ready[task]
        first, last = np.uint64(link_start[task]), np.uint64(link_start[task + ONE])
        k = first
        while k < last:
            begin = max(begin, free[np.uint64(link[k])])
            k += ONE
        if start[task] < 0.0:
            if begin + end[task] > limit:
                return np.inf
            start[task] = begin
        if turn[task] < left[task]:
            left[task] -= turn[task]
            ready[task] = begin + turn[task]
            while first < last:
                free[np.uint64(link[first])] = ready[task]
                rest[np.uint64(link[first])] -= turn[task]
                first += ONE
            _sift_up(heap, ready, size, task)
            size += ONE
            continue
        finish = begin + left[task]
        k = first
        while k < last:
            r = np.uint64(link[k])
            seconds = link_s[k] if left[task] == duration[task] else left[task]
            if begin + rest[r] > limit:
                return np.inf
            rest[r] -= min(seconds, duration[task])
            free[r] = begin + seconds
            k += ONE
        k, last = np.uint64(drag_start[task]), np.uint64(drag_start[task + ONE])
        while k < last:
            resource = np.uint64(drag[k])
            # Charged when it is ready: a transfer that still waits for a link must not hold the processor till then.
            free[resource] = max(free[resource], ready[task]) + drag_s[k]
            k += ONE
        end[task] = finish
        makespan = max(makespan, finish)
        k, last = np.uint64(reader_start[task]), np.uint64(reader_start[task + ONE])
        while k < last:
            follower = np.uint64(reader[k])
            ready[follower] = max(ready[follower], finish)
            missing[follower] -= np.uint32(1)
            if missing[follower] == 0:
                _sift_up(heap, ready, size, follower)
                size += ONE
            k += ONE
    return makespan


@compiled
def _sift_up(heap: npt.NDArray[np.uint32], ready: Times, size: Any, task: Any) -> None:
    """Insert ``task`` into the heap of ``size`` tasks, ordered by (ready time, index)."""
    at = size
    key = ready[task]
    while at > ZERO:
        above = (at - ONE) >> ONE
        other = np.uint64(heap[above])
        if ready[other] < key or (ready[other] == key and other < task):
            break
        heap[at] = other
        at = above
    heap[at] = task


@compiled
def _sift_down(heap: npt.NDArray[np.uint32], ready: Times, size: Any, task: Any) -> None:
    """Put ``task`` in the place of the heap's first task; ``size`` tasks remain."""
    at = ZERO
    key = ready[task]
    while True:
        below = at * TWO + ONE
        if below >= size:
            break
        other = np.uint64(heap[below])
        if below + ONE < size:
            right = np.uint64(heap[below + ONE])
            if ready[right] < ready[other] or (ready[right] == ready[other] and right < other):
                below += ONE
                other = right
        if key < ready[other] or (key == ready[other] and task < other):
            break
        heap[at] = other
        at = below
    heap[at] = task


def times(tasks: TaskArrays) -> tuple[float, Times, Times]:
    """Makespan (s), start and end (s, float64, one for each task) of a task graph."""
    count = len(tasks.duration)
    resources = 1 + max(int(column.max(initial=0)) for column in (tasks.link, tasks.drag))
    start, end = np.empty(count), np.empty(count)
    makespan = run(
        tasks.duration, tasks.dependency_start, tasks.dependency, tasks.link_start, tasks.link, tasks.link_s,
        tasks.drag_start, tasks.drag, tasks.drag_s, tasks.turn, start, end, np.empty(count), np.empty(count),
        np.empty(resources),
        np.empty(count, dtype=np.uint32), np.empty(count + 2, dtype=np.uint32),
        np.empty(len(tasks.dependency), dtype=np.uint32), np.empty(count, dtype=np.uint32), np.empty(resources), np.inf,
    )  # fmt: skip
    return float(makespan), start, end
