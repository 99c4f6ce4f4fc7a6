"""What the rows of a plan mean, in plain Python: the definition of simulated time. The compiled engine must agree.

All devices run as far as they can; then the row that was ready first is served, the one with the smaller identity of
those that were ready at the same tick; and so on. Links and processors are resources, each with a tick from which on it
is free. The host of a device launches its steps in their order and never waits; none begins before it is launched.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from flexsearch.lower.rows import COMPUTE, WAIT, Machine, Schedule, Segments

Row = tuple[int, int, bool, int]
"""Microbatch, block, whether it is a communication, number in the block."""
Times = dict[Row, tuple[int, int]]


class Deadlock(Exception):
    """Devices wait for communications that nothing starts: device -> what it waits for."""


@dataclass
class Device:
    steps: Iterator[tuple[int, int, int]]
    """Microbatch, block, step."""
    clock: int = 0
    host: int = 0
    waits: Row | None = None
    """What it stands at: a communication that has not ended, or a computation of its own that has not."""


@dataclass
class Simulation:
    schedule: Schedule
    machine: Machine
    segments: Segments
    segment: Any
    """Number of the segment of each block."""
    times: Times = field(default_factory=dict)
    order: Callable[[Row], Any] = lambda row: row
    """Of rows that are ready at the same tick, the one with the smallest comes first."""
    begins: tuple[list[int], list[int]] | None = None
    """By device: from which tick on it is free, and its host; by default, from 0 on."""
    makespan: int = 0
    heap: list[tuple[int, Any, Row]] = field(default_factory=list)
    free: dict[int, int] = field(default_factory=dict)
    computing: dict[int, int] = field(default_factory=dict)
    """By link, until when a device that slows it computes."""
    held: Counter[int] = field(default_factory=Counter)
    """How many communications on a connection are between two of their turns, or admitted."""
    waiting: defaultdict[int, list[Row]] = field(default_factory=lambda: defaultdict(list))
    """By connection, what waits for it, the first one first."""
    admitted: set[Row] = field(default_factory=set)
    """What waited for its connection, and has it."""
    missing: dict[Row, int] = field(default_factory=dict)
    ready: dict[Row, int] = field(default_factory=dict)
    served: dict[Row, int] = field(default_factory=dict)
    ended: dict[Row, int] = field(default_factory=dict)

    def steps(self, d: int) -> Iterator[tuple[int, int, int]]:
        s, last = self.schedule, int(self.schedule.final[0])
        group = s.group[d]
        for a in range(s.action_first[group], s.action_last[group]):
            for b in range(s.block_first[a], s.block_last[a]):
                m = int(s.microbatch[a])
                if (s.last[b] and m != last) or (s.once[b] and not s.last[b] and m != 0):
                    continue
                table = int(self.segments.device_steps[self.segment[b]]) + d
                for step in range(self.segments.step_first[table], self.segments.step_first[table + 1]):
                    yield m, b, step

    def name(self, m: int, b: int, communication: bool, number: int) -> Row:
        return (0 if self.schedule.once[b] else m, int(b), communication, int(number))

    def run(self) -> int:
        """The makespan; ``times`` has start and end of every row then. Raises Deadlock."""
        clock, host = self.begins or ([0] * len(self.schedule.group),) * 2
        self.devices = [Device(self.steps(d), *both) for d, both in enumerate(zip(clock, host, strict=True))]
        for d in range(len(self.devices)):
            self.advance(d)
        while self.heap:
            ready, _, row = heapq.heappop(self.heap)
            self.serve(row, ready)
        if stuck := {d: device.waits for d, device in enumerate(self.devices) if device.waits}:
            raise Deadlock(stuck)
        ends = [device.clock for device in self.devices] + [end for _, end in self.times.values()]
        self.makespan = max(ends, default=0)
        return self.makespan

    def push(self, ready: int, row: Row) -> None:
        heapq.heappush(self.heap, (ready, self.order(row), row))

    def advance(self, d: int) -> None:
        """Run a device until it waits."""
        device, s = self.devices[d], self.segments
        for m, b, step in device.steps:
            if s.step_kind[step] != WAIT:
                device.host += int(s.step_host[step])
                device.clock = max(device.clock, device.host)
            if s.step_kind[step] == COMPUTE:
                row, ticks = self.name(m, b, False, s.step_row[step]), int(s.step_ticks[step])
                if self.machine.contended[0]:
                    device.waits, self.ready[row], self.served[row] = row, ticks, d
                    self.push(device.clock, row)
                    return
                self.times[row] = device.clock, device.clock + ticks
                device.clock += ticks
            elif s.step_kind[step] == WAIT:
                row = self.name(m, s.step_block[step], True, s.step_row[step])
                if row not in self.ended:
                    device.waits = row
                    return
                device.clock = max(device.clock, self.ended[row])
            else:
                self.arrive(self.name(m, b, True, s.step_row[step]), device.clock)
        device.waits = None

    def arrive(self, row: Row, tick: int) -> None:
        """A sender issues a communication, or one that it follows has ended."""
        c = self.segments.communication_first[self.segment[row[1]]] + row[3]
        self.missing.setdefault(row, int(self.segments.missing[c]))
        self.ready[row] = max(self.ready.get(row, 0), tick)
        self.missing[row] -= 1
        assert self.missing[row] >= 0
        if not self.missing[row]:
            self.served[row] = 0
            self.push(self.ready[row], row)

    def take(self, row: Row, ready: int, links: list[tuple[int, int]], turn: int) -> int | None:
        """Keep links from the moment when all are free, for a turn or what is left of each; None: another turn comes.
        Otherwise the begin of the last one. ``links``: (resource, ticks that are left)."""
        begin = max([ready, *(self.free.get(r, 0) for r, _ in links)])
        self.times.setdefault(row, (begin, -1))
        again = max((left for _, left in links), default=0) > turn
        for r, left in links:
            kept = min(turn, left)
            self.free[r] = begin + kept + self.slowed(min(kept, max(0, self.computing.get(r, 0) - begin)))
        if again:
            self.push(begin + turn, row)
        return None if again else begin

    def serve(self, row: Row, ready: int) -> None:
        s, (m, b, communication, number) = self.segments, row
        if not communication:
            d = self.served[row]
            turn, ticks = int(self.machine.turn[d]), self.ready[row]
            begin = self.take(row, ready, [(int(self.machine.processor[d]), ticks)], turn)
            self.slow(d, self.free[int(self.machine.processor[d])], min(turn, ticks))
            if begin is None:
                self.ready[row] -= turn
            else:
                self.devices[d].clock = begin + ticks
                self.end(row, begin + ticks, [d])
            return
        c, gone = s.communication_first[self.segment[b]] + number, self.served[row]
        turn, connection = int(s.turn[c]), int(s.connection[c])
        holds = gone > 0 or row in self.admitted
        if not holds and self.held[connection] > connection % 2:
            self.waiting[connection].append(row)
            return
        if not gone:
            for k in range(s.drag_first[c], s.drag_last[c]):
                r = int(s.drag[k])
                self.free[r] = max(self.free.get(r, 0), ready) + int(s.drag_ticks[k])
        links = [(int(s.link[k]), int(s.link_ticks[k]) - gone) for k in range(s.link_first[c], s.link_last[c])]
        links = [(r, left) for r, left in links if left > 0]
        begin = self.take(row, ready, links, turn)
        if begin is None:
            self.served[row] += turn
            self.held[connection] += not holds
            return
        self.held[connection] -= holds
        if holds and self.waiting[connection]:
            self.admitted.add(first := self.waiting[connection].pop(0))
            self.held[connection] += 1
            self.push(begin + max((left for _, left in links), default=0), first)
        end = begin + max(0, int(s.communication_ticks[c]) - gone)
        for k in range(s.follower_first[c], s.follower_last[c]):
            self.arrive(self.name(m, s.follower_block[k], True, s.follower_row[k]), end)
        self.end(row, end, s.receiver[s.receiver_first[c] : s.receiver_last[c]])

    def slow(self, d: int, end: int, ticks: int) -> None:
        """A device computed for so many ticks until ``end``: links that were busy meanwhile are free later."""
        for k in range(self.machine.slows[d], self.machine.slows[d + 1]):
            link = int(self.machine.slowed[k])
            both = min(ticks, max(0, self.free.get(link, 0) - (end - ticks)))
            self.free[link] = self.free.get(link, 0) + self.slowed(both)
            self.computing[link] = max(self.computing.get(link, 0), end)

    def slowed(self, ticks: int) -> int:
        """How much longer a link is kept busy if a device computes for so many ticks meanwhile."""
        return ticks * int(self.machine.slowing[0]) >> 10

    def end(self, row: Row, tick: int, receivers: Any) -> None:
        self.times[row] = self.times[row][0], tick
        self.ended[row] = tick
        for d in map(int, receivers):
            device = self.devices[d]
            if device.waits == row:
                device.clock = max(device.clock, tick)
                self.advance(d)
