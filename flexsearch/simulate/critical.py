"""The critical path of a plan: tasks that fill the whole iteration, each waiting for the one before.

The simulation is run again in plain Python, by the rules of the engine, and every start is remembered with what it
waited for: a dependency that ended at that very moment, another task that kept a link or processor until then, or the
bytes that the processor had to move first. Times are whole ticks, so the chain has no gaps, to the bit.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np

from flexsearch.cost.ticks import TICK
from flexsearch.lower import Lowered
from flexsearch.lower.rows import NEVER

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


class _Moment(NamedTuple):
    """When a task began something (tick), with the moment before that it waited for (number; -1: none). ``resource``,
    ``moves``, ``done`` (ticks): as of ``Step``."""

    task: int
    begin: int
    before: int
    resource: int
    moves: bool
    done: int


def critical_path(lowered: Lowered) -> tuple[Step, ...]:
    """The steps from 0 to the makespan, each beginning exactly when the one before ends.

    Where a task waited for several things that ended at the same moment, one of them stands on the path.
    """
    replay = _Replay(lowered)
    replay.run()
    at, end = replay.last, replay.makespan
    steps: list[Step] = []
    while at >= 0:
        one = _Moment(*replay.moments[at])
        steps.append(
            Step(one.task, one.begin * TICK, end * TICK, replay.why(one), one.resource, one.moves, one.done * TICK)
        )
        at, end = one.before, one.begin
    if end > 0:
        steps.append(Step(steps[-1].task, 0.0, end * TICK, "start", -1, launches=True))
    return tuple(_joined(steps[::-1]))


def turns(lowered: Lowered) -> dict[int, list[tuple[float, float]]]:
    """When each communication got its links: at the beginning of each of its turns (s), and how much of it (s) the
    turns before had done. One that does not share its links has a single turn."""
    replay, found = _Replay(lowered), dict[int, list[tuple[float, float]]]()
    replay.run()
    for one in map(_Moment._make, replay.moments):
        if replay.device[one.task] < 0 and not one.moves:
            found.setdefault(one.task, []).append((one.begin * TICK, one.done * TICK))
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
    """A simulation that remembers reasons, in ticks. ``last``: the moment that ends last, at ``makespan``."""

    def __init__(self, lowered: Lowered) -> None:
        self.order, self.rows = lowered.order, lowered.rows
        order, count = self.order, len(self.order)
        self.moments: list[tuple[int, int, int, int, bool, int]] = []
        """Fields of each ``_Moment``."""
        self.last, self.makespan = -1, 0
        self.device, self.step, self.rank = order.device.tolist(), order.step.tolist(), order.rank.tolist()
        by_awaited = np.argsort(order.after, kind="stable")
        lengths = np.diff(order.first)
        self.missing: list[int] = lengths.tolist()
        self.readers: list[int] = np.repeat(np.arange(count), lengths)[by_awaited].tolist()
        self.first: list[int] = np.searchsorted(order.after[by_awaited], np.arange(count + 1)).tolist()
        self.ready: list[int] = order.launched.tolist()
        self.ready_by = [-1] * count
        """By task: the moment whose end made it ready; -1: its host did."""
        self.done = [0] * count
        self.free: dict[int, tuple[int, int]] = {}
        """Resource -> when it is free, and the moment that keeps it until then."""
        self._columns()
        self.heap: list[tuple[int, int, int]] = []
        for task, missing in enumerate(self.missing):
            if not missing:
                self._push(task)

    def _columns(self) -> None:
        """What of the segments is read task by task."""
        segments, machine = self.rows.segments, self.rows.machine
        computes = self.order.device >= 0
        device, step = np.where(computes, self.order.device, 0), self.order.step
        of = np.where(computes, 0, step)  # a communication of which nothing is read, for computations
        ticks = segments.step_ticks[np.where(computes, step, 0)]
        turn = machine.turn[device]
        if len(segments.communication_ticks):
            ticks = np.where(computes, ticks, segments.communication_ticks[of])
            turn = np.where(computes, turn, segments.turn[of])
        self.processor = machine.processor[device].tolist()
        self.duration: list[int] = ticks.tolist()
        self.turn: list[int] = turn.tolist()
        self.link_rows, self.drag_rows = (
            list(zip(first.tolist(), last.tolist(), strict=True))
            for first, last in ((segments.link_first, segments.link_last), (segments.drag_first, segments.drag_last))
        )
        self.link = list(zip(segments.link.tolist(), segments.link_ticks.tolist(), strict=True))
        self.slowing, slows = int(machine.slowing[0]), machine.slows.tolist()
        self.slowed = [machine.slowed[first:last].tolist() for first, last in pairwise(slows)]
        """Links of each device."""
        self.drag = list(zip(segments.drag.tolist(), segments.drag_ticks.tolist(), strict=True))

    def run(self) -> None:
        while self.heap:
            _, _, task = heapq.heappop(self.heap)
            if not self.done[task] and self.device[task] < 0:
                self._drag(task)
            begin, now, again = self._take(task)
            if again:
                self.done[task] += self.turn[task]
                self.ready[task], self.ready_by[task] = begin + self.turn[task], now
                self._push(task)
            else:
                self._end(task, begin + max(0, self.duration[task] - self.done[task]), now)

    def _push(self, task: int) -> None:
        heapq.heappush(self.heap, (self.ready[task], self.rank[task], task))

    def _drag(self, task: int) -> None:
        """Its bytes keep processors from computing as soon as it is ready, even if it still waits for a link."""
        ready = self.ready[task]
        for r, ticks in self.drag[slice(*self.drag_rows[self.step[task]])]:
            until, holder = self.free.get(r, (0, -1))
            waits = until > ready
            begin = max(until, ready)
            self.free[r] = begin + ticks, len(self.moments)
            before, resource = (holder, r) if waits else (self.ready_by[task], -1)
            self.moments.append((task, begin, before, resource, True, 0))

    def _take(self, task: int) -> tuple[int, int, bool]:
        """Keep its links from the moment when all are free, for a turn or what is left of each: that moment (tick), its
        number, and whether another turn is to come."""
        done, turn, free = self.done[task], self.turn[task], self.free
        begin, before, resource = self.ready[task], self.ready_by[task], -1
        if self.device[task] < 0:
            links = self.link[slice(*self.link_rows[self.step[task]])]
        else:
            links = [(self.processor[task], self.duration[task])]
        for r, _ in links:
            until, holder = free.get(r, (0, -1))
            if until > begin:
                begin, before, resource = until, holder, r
        now = len(self.moments)
        self.moments.append((task, begin, before, resource, False, done))
        again = False
        if turn < NEVER:
            again = max((ticks - done for _, ticks in links), default=0) > turn
        for r, ticks in links:
            left = max(0, ticks - done)
            free[r] = begin + (min(turn, left) if again else left), now
        if (device := self.device[task]) >= 0:
            self._slow(device, begin, free[self.processor[task]][0] - begin)
        return begin, now, again

    def _slow(self, device: int, begin: int, ticks: int) -> None:
        """Links that are busy while their device computes are free later."""
        for link in self.slowed[device]:
            until, holder = self.free.get(link, (0, -1))
            both = min(ticks, max(0, until - begin))
            self.free[link] = until + (both * self.slowing >> 10), holder

    def _end(self, task: int, finish: int, now: int) -> None:
        if finish > self.makespan or self.last < 0:
            self.last, self.makespan = now, finish
        ready = self.ready
        for reader in self.readers[self.first[task] : self.first[task + 1]]:
            if finish > ready[reader] or (finish == ready[reader] and self.ready_by[reader] < 0):
                ready[reader], self.ready_by[reader] = finish, now
            self.missing[reader] -= 1
            if not self.missing[reader]:
                self._push(reader)

    def why(self, moment: _Moment) -> Why:
        """What a moment waited for."""
        task, communicates = moment.task, self.device[moment.task] < 0
        if moment.before < 0:
            return "host" if moment.begin > 0 else "start"
        if moment.resource >= 0:
            return "link" if communicates and not moment.moves else "processor"
        if moment.moves:
            return "data"
        other = self.moments[moment.before][0]
        if other == task:
            return "turn"
        return "order" if not communicates and self.device[other] == self.device[task] else "data"
