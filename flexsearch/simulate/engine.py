"""The engine: how long a plan takes, from its rows, and how much longer or shorter with other segments for some blocks.

>>> engine = Engine(schedule, machine)
>>> ticks = engine.run(segments, segment_of_block)
>>> ticks = engine.propose(segments, segment_of_block, changed_blocks, limit)     # LATE: above the limit
>>> engine.accept()                                                             # or reject()

What happens when is defined by ``tests/engine_oracle.py``; the engine gives the same ticks. Compiled code calls
``engine_delta.propose``, ``accept`` and ``reject`` with ``Engine.state``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flexsearch.compiled import I64, U32, U64
from flexsearch.cost.ticks import FOREVER, TICK
from flexsearch.direct import direct
from flexsearch.errors import FlexsearchError
from flexsearch.lower.order import Order
from flexsearch.lower.rows import (
    BACKWARD,
    COMPUTE,
    FORWARD,
    GATHER,
    GATHER_ONCE,
    READ,
    RECIPE,
    RECOMPUTE,
    REGATHER,
    SYNCHRONISE,
    Machine,
    Schedule,
    Segments,
    steps_of,
)
from flexsearch.simulate.engine_delta import accept, propose, reject
from flexsearch.simulate.engine_queue import MICROBATCH, NUMBER, block_of
from flexsearch.simulate.engine_state import (
    DEADLOCK,
    MALFORMED,
    ROOM,
    WAITING,
    Record,
    Services,
    State,
    make_services,
    make_state,
)
from flexsearch.simulate.engine_whole import LATE, simulate

_simulate = direct(simulate)
_propose = direct(propose)
_accept = direct(accept)
_reject = direct(reject)

__all__ = ["LATE", "Engine", "Times"]

PLACES = 1 << 21
"""Places for communications of which an engine makes more than it needs, so that it seldom has to grow."""
SERVICES = 1 << 16
"""Services that there is room for at first; it doubles."""
_KINDS = {
    GATHER: "gather", GATHER_ONCE: "gather", FORWARD: "forward", BACKWARD: "backward", SYNCHRONISE: "synchronisation",
    RECOMPUTE: "recomputation", REGATHER: "second gather", READ: "reading", RECIPE: "recipe",
}  # fmt: skip


@dataclass(frozen=True)
class Times:
    """Start and end (ticks) of every row: by microbatch, and by place. Number n of block b has the place
    ``computation_first[b] + n`` or ``communication_first[b] + n``. -1: it did not happen."""

    computation_first: U64
    communication_first: U64
    computation_start: I64
    computation_end: I64
    communication_start: I64
    communication_end: I64

    def of(self, order: Order) -> tuple[I64, I64]:
        """Start and end of the rows of a plan, in their order."""
        start, end = np.zeros((2, len(order)), np.int64)
        communications = self.communication_first, self.communication_start, self.communication_end
        computations = self.computation_first, self.computation_start, self.computation_end
        for communicates, (first, begun, ended) in enumerate((computations, communications)):
            rows = np.flatnonzero(order.communicates == communicates)
            at = order.microbatch[rows], first[order.block[rows]].astype(np.int64) + order.number[rows]
            start[rows], end[rows] = begun[at], ended[at]
        return start, end


class Engine:
    """Times plans that have the same schedule and machine.

    ``room``: how many communications there is room for to be pending at the same time, at first; it grows. ``fold``:
    whether periods of microbatches are jumped over; the times are the same.
    """

    def __init__(self, schedule: Schedule, machine: Machine, room: int = 1024, fold: bool = True) -> None:
        self.schedule, self.machine, self._room, self._fold = schedule, machine, room, fold
        self._acceptable = False
        self.state: State = make_state(schedule, machine, np.ones(len(schedule.kind), np.uint64), room, fold)

    def run(self, segments: Segments, segment_of_block: U32, limit: int = LATE) -> int:
        """Makespan (ticks) of a plan, which becomes the plan at hand; LATE if it is certainly above ``limit`` (ticks),
        and then there is none. Raises FlexsearchError where devices wait for what nothing starts, and without a limit
        where it is ``FOREVER``."""
        self._acceptable = False
        while (ticks := int(_simulate(self.state, segments, segment_of_block, np.int64(limit)))) == -ROOM:
            self._grow(segments, segment_of_block)
        check(self.schedule, ticks, self.state, limit)
        return ticks

    def propose(self, segments: Segments, segment_of_block: U32, changed: U32, limit: int = LATE) -> int:
        """Makespan (ticks) of the plan at hand with the segments that the ``changed`` blocks have in
        ``segment_of_block``; LATE if it is above ``limit`` (ticks). ``accept`` or ``reject`` it. Raises as ``run``."""
        self._acceptable = False
        numbers = segments, segment_of_block, changed, np.uint64(len(changed)), np.int64(limit)
        while (ticks := int(_propose(self.state, *numbers))) == -ROOM:
            self.make_room(segments, segment_of_block)
        check(self.schedule, ticks, self.state, limit)
        self._acceptable = ticks < LATE
        return ticks

    def make_room(self, segments: Segments, segment_of_block: U32) -> None:
        """What to do when ``engine_delta.propose`` returns -ROOM: the plan at hand stays, ``state`` is another."""
        at_hand = self.state.kept.segment.copy()
        self._grow(segments, segment_of_block)
        self.run(segments, at_hand)

    def accept(self) -> None:
        """Make the last proposal the plan at hand. Raises RuntimeError if there is none, or if it was LATE."""
        if not self._acceptable:
            raise RuntimeError("there is no proposal that could be accepted")
        self._acceptable = False
        _accept(self.state)

    def reject(self) -> None:
        """Leave the plan at hand as it is."""
        self._acceptable = False
        _reject(self.state)

    def renumber(self, segment_of_block: U32) -> None:
        """The segments of the plan at hand have other numbers now, and are the same."""
        self.reject()
        self.state.kept.segment[:] = segment_of_block
        self.state.segment[:] = segment_of_block

    @property
    def makespan(self) -> int:
        """Of the plan at hand, ticks."""
        return int(self.state.kept.makespan[0])

    def times(self, segments: Segments, segment_of_block: U32) -> Times:
        """Start and end of every row of a plan. It costs a whole run, and leaves the plan at hand alone."""
        return self._recorded(segments, segment_of_block, 0)[0]

    def times_and_services(self, segments: Segments, segment_of_block: U32) -> tuple[Times, Services]:
        """As ``times``, and what kept the resources, one after the other."""
        return self._recorded(segments, segment_of_block, SERVICES)

    def _recorded(self, segments: Segments, segment_of_block: U32, served: int) -> tuple[Times, Services]:
        """``served``: how many services there is room for at first; 0: none are noted."""
        communications = communications_of(segments, segment_of_block)
        microbatches, room = int(self.schedule.microbatches[0]), self._room
        record = make_record(self.schedule, segments, segment_of_block)
        while True:
            services = make_services(served, int(self.machine.resources[0]) if served else 0)
            record = record._replace(services=services)
            state = make_state(self.schedule, self.machine, communications, room, False)._replace(record=record)
            ticks = int(_simulate(state, segments, segment_of_block, np.int64(LATE)))
            if ticks != -ROOM:
                break
            if served and services.total[0] == served:
                served *= 2
            else:
                room *= 2
        check(self.schedule, ticks, state, LATE)
        columns = record.begin, record.finish, record.start, record.end
        by_microbatch = (column.reshape(microbatches, -1) for column in columns)
        return Times(record.computation_first, state.first, *by_microbatch), services

    def _grow(self, segments: Segments, segment_of_block: U32) -> None:
        """Make room for a plan: for its communications, or if there is enough, for more that are pending."""
        rows = communications_of(segments, segment_of_block)
        if (rows <= self.state.capacity).all():
            self._room *= 2
        capacity = np.maximum(self.state.capacity, np.where(rows > self.state.capacity, 2 * rows, rows))
        if int(capacity.sum()) * int(self.schedule.microbatches[0]) < PLACES:
            # The next plan has more in other blocks, and each time costs a whole run.
            capacity = np.maximum(capacity, np.minimum(2 * self.state.capacity, capacity.max()))
        self.state = make_state(self.schedule, self.machine, capacity.astype(np.uint64), self._room, self._fold)


def check(schedule: Schedule, ticks: int, state: State, limit: int) -> None:
    """Raise FlexsearchError if a run could not go on."""
    if ticks == LATE == limit:
        busy = state.kept.new_compute  # a sum beyond an int64 may be negative
        endless = np.flatnonzero((busy < 0) | (busy >= FOREVER))
        raise FlexsearchError(
            f"a step takes more than {FOREVER * TICK / 86400:.0f} days, which is too long to be simulated",
            f"Check memory_bandwidth, flops and overhead_s of device {endless[0]}, and the times of its profile."
            if len(endless)
            else "Check bandwidth, latency_s and overhead_s of the topology's links, communication and devices.",
        )
    if ticks == -MALFORMED:
        raise FlexsearchError(
            "a communication is issued more often than it says",
            "This is an error in flexsearch; please report it with the command that you used.",
        )
    if ticks == -DEADLOCK:
        d = int(np.flatnonzero(state.devices.status == WAITING)[0])
        raise FlexsearchError(
            f"device {d} waits forever for {_name(schedule, int(state.devices.awaited[d]))}",
            "Give the devices an order of actions in which each can be reached.",
        )


def _name(schedule: Schedule, identity: int) -> str:
    """A communication in words."""
    block, microbatch = int(block_of(np.uint64(identity))), identity >> int(MICROBATCH)
    kind = _KINDS.get(int(schedule.kind[block]), "update")
    number = identity & int(NUMBER)
    return f"communication {number} of block {block} ({kind} {schedule.argument[block]}) for microbatch {microbatch}"


def communications_of(segments: Segments, segment_of_block: U32) -> U64:
    """How many communications each block has."""
    first, last = segments.communication_first[segment_of_block], segments.communication_last[segment_of_block]
    return (last - first).astype(np.uint64)


def _computations(segments: Segments, segment_of_block: U32, devices: int) -> U64:
    """One more than the largest number of a computation, by block."""
    step, block, _ = steps_of(segments, segment_of_block, devices)
    computes = segments.step_kind[step] == COMPUTE
    counts = np.zeros(len(segment_of_block), np.uint64)
    np.maximum.at(counts, block[computes], segments.step_row[step[computes]] + np.uint64(1))
    return counts


def make_record(schedule: Schedule, segments: Segments, segment_of_block: U32) -> Record:
    """Room for start and end of every row."""
    communications = communications_of(segments, segment_of_block)
    computations = _computations(segments, segment_of_block, len(schedule.group))
    counts = communications, communications, computations, computations
    rows = [int(schedule.microbatches[0]) * int(count.sum()) for count in counts]
    start, end, begin, finish = (np.full(count, -1, np.int64) for count in rows)
    return Record(
        computation_first=(np.cumsum(computations) - computations).astype(np.uint64),
        computations=np.array([computations.sum()], np.uint64),
        start=start, end=end, begin=begin, finish=finish, enabled=np.ones(1, np.uint8), services=make_services(0, 0),
    )  # fmt: skip
