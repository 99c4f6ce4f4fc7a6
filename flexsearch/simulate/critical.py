"""The critical path of a task graph: tasks that fill the whole iteration, each waiting for the one before.

The event simulation (``kernel``) is run again in plain Python, and every start is remembered with what it waited for:
a dependency that ended at that very moment, another task that kept a link or processor until then, or the bytes that
the processor had to move first. Starts are maxima of such moments, so the chain has no gaps, to the bit.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from flexsearch.lower import TaskGraph, TaskKind

Why = Literal["start", "order", "data", "link", "processor", "turn"]
"""What a step waited for: nothing; the device's previous task; data of another task; a link that another communication
kept busy; a processor that another task, or the moving of bytes, kept busy; its next turn on a shared processor."""


@dataclass(frozen=True, slots=True)
class Step:
    """A stretch of the critical path: ``task`` from ``begin`` to ``end`` (s), when the next step could begin.

    ``why``: what it had to wait for before ``begin``; the step before is that. ``resource``: the link or processor it
    waited for (index into ``Topology.resources``), else -1. ``moves_bytes``: the step is not the task itself but the
    time for which its bytes kept a processor from computing. A step may end before its task does (a link is free before
    the last byte has arrived).
    """

    task: int
    begin: float
    end: float
    why: Why
    resource: int
    moves_bytes: bool = False

    @property
    def seconds(self) -> float:
        """Length, s."""
        return self.end - self.begin


@dataclass(slots=True)
class _Moments:
    """Every moment at which a task began something, by number, with the moment before that it waited for (-1: none)."""

    task: list[int] = field(default_factory=list)
    begin: list[float] = field(default_factory=list)
    before: list[int] = field(default_factory=list)
    why: list[Why] = field(default_factory=list)
    resource: list[int] = field(default_factory=list)
    moves: list[bool] = field(default_factory=list)

    def add(self, task: int, begin: float, before: int, why: Why, resource: int = -1, moves: bool = False) -> int:
        self.task.append(task)
        self.begin.append(begin)
        self.before.append(before)
        self.why.append(why if before >= 0 else "start")
        self.resource.append(resource)
        self.moves.append(moves)
        return len(self.task) - 1


def critical_path(tasks: TaskGraph) -> tuple[Step, ...]:
    """The steps from 0 to the makespan, each beginning exactly when the one before ends.

    Where a task waited for several things that ended at the same moment, one of them stands on the path.
    """
    if not len(tasks):
        return ()
    moments, last, makespan = _replay(tasks)
    steps: list[Step] = []
    at, end = last, makespan
    while at >= 0:
        begin = moments.begin[at]
        row = moments.task[at], begin, end, moments.why[at], moments.resource[at], moments.moves[at]
        steps.append(Step(*row))
        at, end = moments.before[at], begin
    return tuple(_joined(steps[::-1]))


def _joined(steps: Sequence[Step]) -> list[Step]:
    """A task's turns that nothing came between as one step."""
    found: list[Step] = []
    for step in steps:
        if found and step.why == "turn" and found[-1].task == step.task and not found[-1].moves_bytes:
            one = found.pop()
            step = Step(one.task, one.begin, step.end, one.why, one.resource)
        found.append(step)
    return found


def _replay(tasks: TaskGraph) -> tuple[_Moments, int, float]:
    """The moments of a simulation, the one that ends last, and its end (s). The rules are those of ``kernel.run``."""
    count = len(tasks)
    readers: list[list[int]] = [[] for _ in range(count)]
    missing = [len(row) for row in tasks.dependencies]
    for task, row in enumerate(tasks.dependencies):
        for dependency in row:
            readers[dependency].append(task)
    moments = _Moments()
    ready, left = [0.0] * count, list(tasks.duration)
    ready_by = [-1] * count  # the moment whose end made a task ready
    free: dict[int, tuple[float, int]] = {}  # resource -> when it is free, and the moment that keeps it until then
    last, makespan = -1, -1.0
    heap = [(0.0, task) for task in range(count) if not missing[task]]
    while heap:
        _, task = heapq.heappop(heap)
        begin, before, resource = ready[task], ready_by[task], -1
        for r, _ in tasks.links[task]:
            if r in free and free[r][0] > begin:
                begin, before, resource = free[r][0], free[r][1], r
        why = _why(tasks, moments, task, before, resource)
        now = moments.add(task, begin, before, why, resource)
        if tasks.turn[task] < left[task]:
            left[task] -= tasks.turn[task]
            ready[task], ready_by[task] = begin + tasks.turn[task], now
            for r, _ in tasks.links[task]:
                free[r] = ready[task], now
            heapq.heappush(heap, (ready[task], task))
            continue
        for r, seconds in tasks.links[task]:
            free[r] = begin + (seconds if left[task] == tasks.duration[task] else left[task]), now
        for r, seconds in tasks.drag[task]:
            held, holder = free.get(r, (0.0, -1))
            waits = held > ready[task]
            moment = moments.add(
                task, max(held, ready[task]), holder if waits else ready_by[task], "processor" if waits else "data",
                r if waits else -1, True,
            )  # fmt: skip
            free[r] = max(held, ready[task]) + seconds, moment
        finish = begin + left[task]
        if finish > makespan:
            last, makespan = now, finish
        for follower in readers[task]:
            if finish > ready[follower] or ready_by[follower] < 0:
                ready[follower], ready_by[follower] = max(ready[follower], finish), now
            missing[follower] -= 1
            if not missing[follower]:
                heapq.heappush(heap, (ready[follower], follower))
    return moments, last, makespan


def _why(tasks: TaskGraph, moments: _Moments, task: int, before: int, resource: int) -> Why:
    if resource >= 0:
        return "processor" if tasks.kind[task] != TaskKind.COMMUNICATION else "link"
    other = moments.task[before] if before >= 0 else -1
    if other == task:
        return "turn"
    return "order" if other >= 0 and tasks.device[other] == tasks.device[task] >= 0 else "data"
