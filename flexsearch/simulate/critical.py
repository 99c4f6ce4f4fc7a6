"""The critical path of a task graph: tasks that fill the whole iteration, each waiting for the one before.

The simulation is run again in plain Python, by the rules of the engine, and every start is remembered with what it
waited for: a dependency that ended at that very moment, another task that kept a link or processor until then, or the
bytes that the processor had to move first. Times are whole ticks, so the chain has no gaps, to the bit.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from flexsearch.lower import TaskGraph, TaskKind

Why = Literal["start", "host", "order", "data", "link", "processor", "turn"]
"""What a step waited for: nothing; its host, which had not launched it; the device's previous task; data of another
task; a link that another communication kept busy; a processor that another task, or the moving of bytes, kept busy; its
next turn on a processor or on links that it shares."""


@dataclass(frozen=True, slots=True)
class Step:
    """A stretch of the critical path: ``task`` from ``begin`` to ``end`` (s), when the next step could begin.

    ``why``: what it had to wait for before ``begin``; the step before is that. ``resource``: the link or processor it
    waited for (index into ``Topology.resources``), else -1. ``moves_bytes``: the step is not the task itself but the
    time for which its bytes kept a processor from computing. A step may end before its task does (a link is free before
    the last byte has arrived). ``done``: s of the task that earlier turns did. ``launches``: the step is not the task
    but its host, which launches all tasks up to this one; it is the first then.
    """

    task: int
    begin: float
    end: float
    why: Why
    resource: int
    moves_bytes: bool = False
    done: float = 0.0
    launches: bool = False

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
    done: list[float] = field(default_factory=list)

    def add(
        self, task: int, begin: float, before: int, why: Why, resource: int = -1, moves: bool = False,
        done: float = 0.0,
    ) -> int:  # fmt: skip
        self.task.append(task)
        self.begin.append(begin)
        self.before.append(before)
        self.why.append(why if before >= 0 else "host" if begin > 0.0 else "start")
        self.resource.append(resource)
        self.moves.append(moves)
        self.done.append(done)
        return len(self.task) - 1


def critical_path(tasks: TaskGraph) -> tuple[Step, ...]:
    """The steps from 0 to the makespan, each beginning exactly when the one before ends.

    Where a task waited for several things that ended at the same moment, one of them stands on the path.
    """
    if not len(tasks):
        return ()
    replay = _Replay(tasks)
    replay.run()
    moments, at, end = replay.moments, replay.last, replay.makespan
    steps: list[Step] = []
    while at >= 0:
        begin = moments.begin[at]
        row = moments.task[at], begin, end, moments.why[at], moments.resource[at], moments.moves[at], moments.done[at]
        steps.append(Step(*row))
        at, end = moments.before[at], begin
    if end > 0.0:
        steps.append(Step(steps[-1].task, 0.0, end, "start", -1, launches=True))
    return tuple(_joined(steps[::-1]))


def turns(tasks: TaskGraph) -> dict[int, list[tuple[float, float]]]:
    """When each communication got its links: at the beginning of each of its turns (s), and how much of it (s) the
    turns before had done. One that does not share its links has a single turn."""
    replay, found = _Replay(tasks), dict[int, list[tuple[float, float]]]()
    replay.run()
    moments = replay.moments
    for task, begin, moves, done in zip(moments.task, moments.begin, moments.moves, moments.done, strict=True):
        if tasks.device[task] < 0 and not moves:
            found.setdefault(task, []).append((begin, done))
    return found


def _joined(steps: Sequence[Step]) -> list[Step]:
    """A task's turns that nothing came between as one step."""
    joined: list[Step] = []
    for step in steps:
        if joined and step.why == "turn" and joined[-1].task == step.task and not joined[-1].moves_bytes:
            step = replace(joined.pop(), end=step.end)
        joined.append(step)
    return joined


class _Replay:
    """A simulation that remembers reasons. ``last``: the moment that ends last, at ``makespan`` (s)."""

    def __init__(self, tasks: TaskGraph) -> None:
        count = len(tasks)
        self.tasks, self.moments = tasks, _Moments()
        self.last, self.makespan = -1, -1.0
        self.readers: list[list[int]] = [[] for _ in range(count)]
        for task, row in enumerate(tasks.dependencies):
            for dependency in row:
                self.readers[dependency].append(task)
        self.missing = [len(row) for row in tasks.dependencies]
        self.ready, self.done = list(tasks.launched), [0.0] * count
        self.ready_by = [-1] * count
        """By task: the moment whose end made it ready; -1: its host did."""
        self.free: dict[int, tuple[float, int]] = {}
        """Resource -> when it is free (s), and the moment that keeps it until then."""
        self.heap = [(self.ready[task], tasks.identity[task], task) for task in range(count) if not self.missing[task]]
        heapq.heapify(self.heap)

    def run(self) -> None:
        while self.heap:
            _, _, task = heapq.heappop(self.heap)
            if self.done[task] == 0.0:
                self._drag(task)
            begin, now, again = self._take(task)
            if again:
                self.done[task] += self.tasks.turn[task]
                self.ready[task], self.ready_by[task] = begin + self.tasks.turn[task], now
                self._push(task)
            else:
                self._end(task, begin + max(0.0, self.tasks.duration[task] - self.done[task]), now)

    def _push(self, task: int) -> None:
        heapq.heappush(self.heap, (self.ready[task], self.tasks.identity[task], task))

    def _drag(self, task: int) -> None:
        """Its bytes keep processors from computing as soon as it is ready, even if it still waits for a link."""
        ready = self.ready[task]
        for r, seconds in self.tasks.drag[task]:
            until, holder = self.free.get(r, (0.0, -1))
            waits = until > ready
            moment = self.moments.add(
                task, max(until, ready), holder if waits else self.ready_by[task], "processor" if waits else "data",
                r if waits else -1, True,
            )  # fmt: skip
            self.free[r] = max(until, ready) + seconds, moment

    def _take(self, task: int) -> tuple[float, int, bool]:
        """Keep its links from the moment when all are free, for a turn or what is left of each: that moment (s), its
        number, and whether another turn is to come."""
        tasks, done, turn = self.tasks, self.done[task], self.tasks.turn[task]
        begin, before, resource = self.ready[task], self.ready_by[task], -1
        for r, _ in tasks.links[task]:
            until, holder = self.free.get(r, (0.0, -1))
            if until > begin:
                begin, before, resource = until, holder, r
        now = self.moments.add(task, begin, before, self._why(task, before, resource), resource, done=done)
        again = max((seconds - done for _, seconds in tasks.links[task]), default=0.0) > turn
        for r, seconds in tasks.links[task]:
            left = max(0.0, seconds - done)
            self.free[r] = begin + (min(turn, left) if again else left), now
        return begin, now, again

    def _end(self, task: int, finish: float, now: int) -> None:
        if finish > self.makespan:
            self.last, self.makespan = now, finish
        for reader in self.readers[task]:
            if finish > self.ready[reader] or (finish == self.ready[reader] and self.ready_by[reader] < 0):
                self.ready[reader], self.ready_by[reader] = finish, now
            self.missing[reader] -= 1
            if not self.missing[reader]:
                self._push(reader)

    def _why(self, task: int, before: int, resource: int) -> Why:
        tasks = self.tasks
        if resource >= 0:
            return "processor" if tasks.kind[task] != TaskKind.COMMUNICATION else "link"
        other = self.moments.task[before] if before >= 0 else -1
        if other == task:
            return "turn"
        return "order" if other >= 0 and tasks.device[other] == tasks.device[task] >= 0 else "data"
