"""The critical path of a plan: tasks that fill the whole iteration, each waiting for the one before.

The engine notes what each service of a link or processor waited for: nothing, or the service that kept it until then.
Where it waited for nothing, a dependency of its task, or its host, ended at that very tick. Times are whole ticks, so
the chain has no gaps, to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Literal

import numpy as np

from flexsearch.compiled import U64
from flexsearch.cost.ticks import TICK
from flexsearch.lower import Lowered
from flexsearch.lower.order import Order
from flexsearch.lower.rows import Numbers
from flexsearch.simulate.engine import Engine
from flexsearch.simulate.engine_queue import BLOCK, COMMUNICATION, MICROBATCH

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


def critical_path(lowered: Lowered) -> tuple[Step, ...]:
    """The steps from 0 to the makespan, each beginning exactly when the one before ends.

    Where a task waited for several things that ended at the same moment, one of them stands on the path.
    """
    if not len(lowered.order):
        return ()
    noted, steps = _Noted(lowered), list[Step]()
    task = int(np.argmax(noted.end))
    service, end = noted.last[task], noted.end[task]
    while task >= 0:
        begin = noted.begin[task] if service < 0 else noted.served[service]
        why, *before = noted.before(task, service, begin)
        steps.append(noted.step(task, service, begin, end, why))
        (task, service), end = before, begin
    if end > 0:
        steps.append(Step(steps[-1].task, 0.0, end * TICK, "start", -1, launches=True))
    return tuple(_joined(steps[::-1]))


def turns(lowered: Lowered) -> dict[int, list[tuple[float, float, float]]]:
    """When each communication had its links: from when on (s), how much of it (s) was done before, and how much after.
    Turns that nothing came between are one; a communication that does not share its links has a single one."""
    noted, begins = _Noted(lowered), dict[int, list[tuple[int, int]]]()
    for service, task in enumerate(noted.task):
        if lowered.order.communicates[task] and not noted.moves[service]:
            begin, done = noted.served[service], noted.done(task, service)
            rows = begins.setdefault(task, [])
            if not rows or begin - done > rows[-1][0] - rows[-1][1]:
                rows.append((begin, done))
    return {
        task: [
            (begin * TICK, done * TICK, after * TICK)
            for (begin, done), after in zip(rows, [*(done for _, done in rows[1:]), inf], strict=True)
        ]
        for task, rows in begins.items()
    }


def _joined(steps: Sequence[Step]) -> list[Step]:
    """A task's turns that nothing came between as one step."""
    joined: list[Step] = []
    for step in steps:
        if joined and step.why == "turn" and joined[-1].task == step.task and not joined[-1].moves_bytes:
            step = replace(joined.pop(), end=step.end)
        joined.append(step)
    return joined


class _Noted:
    """What the engine notes of a plan. By task: ``begin``, ``end`` (ticks), ``last`` (its last service, -1: it has
    none). By service: its ``task``, when it is ``served`` (tick), the ``resource`` that it waits for (-1: none),
    ``keeper`` (the service that keeps that until then), whether it ``moves`` bytes, and the ``turn`` of its task that
    it is, from 0 on."""

    def __init__(self, lowered: Lowered) -> None:
        self.order, rows = lowered.order, lowered.rows
        times, services = Engine(rows.schedule, rows.machine).times_and_services(rows.segments, rows.segment)
        begin, end = times.of(self.order)
        self.begin: list[int] = begin.tolist()
        self.end: list[int] = end.tolist()
        count = int(services.total[0])
        task = _tasks_of(self.order, services.identity[:count])
        self.task: list[int] = task.tolist()
        self.served: list[int] = services.begin[:count].tolist()
        self.resource: list[int] = services.resource[:count].tolist()
        self.keeper: list[int] = services.before[:count].tolist()
        self.moves: list[bool] = services.moves[:count].astype(bool).tolist()
        self.last, self.turn = [-1] * len(self.order), [0] * count
        self._turn_before = [-1] * count
        for service, (of, moves) in enumerate(zip(self.task, self.moves, strict=True)):
            if moves:
                continue
            if (before := self.last[of]) >= 0:
                self._turn_before[service], self.turn[service] = before, self.turn[before] + 1
            self.last[of] = service
        self._machine_turn, self._communication_turn = rows.machine.turn, rows.segments.turn

    def done(self, task: int, service: int) -> int:
        """Ticks of a task that its turns before a service did."""
        if service < 0 or not (turn := self.turn[service]):
            return 0
        device, step = int(self.order.device[task]), int(self.order.step[task])
        return turn * int(self._communication_turn[step] if device < 0 else self._machine_turn[device])

    def step(self, task: int, service: int, begin: int, end: int, why: Why) -> Step:
        """A stretch of the path."""
        resource, moves = (self.resource[service], self.moves[service]) if service >= 0 else (-1, False)
        return Step(task, begin * TICK, end * TICK, why, resource, moves, self.done(task, service) * TICK)

    def before(self, task: int, service: int, begin: int) -> tuple[Why, int, int]:
        """What a service (-1: a computation that is not served) of a task waited for until ``begin``, and the task and
        service that ended then (-1: none)."""
        communicates, moves = self.order.communicates[task], service >= 0 and self.moves[service]
        if service >= 0 and self.resource[service] >= 0 and self.keeper[service] != self._turn_before[service]:
            keeper = self.keeper[service]
            return "link" if communicates and not moves else "processor", self.task[keeper], keeper
        if service >= 0 and self._turn_before[service] >= 0:
            return "turn", task, self._turn_before[service]
        first, last = self.order.first[task : task + 2].tolist()
        for other in self.order.after[first:last].tolist():
            if self.end[other] == begin:
                follows = not communicates and self.order.device[other] == self.order.device[task]
                return "order" if follows else "data", other, self.last[other]
        return "host" if begin > 0 else "start", -1, -1


def _tasks_of(order: Order, identity: U64) -> Numbers:
    """The tasks with these identities of rows, as the engine packs them."""
    microbatch, block, communicates, number = (
        column.astype(np.uint64) for column in (order.microbatch, order.block, order.communicates, order.number)
    )
    packed = (microbatch << MICROBATCH) | (block << BLOCK) | (communicates * COMMUNICATION) | number
    sort = np.argsort(packed)
    return sort[np.searchsorted(packed[sort], identity)]
