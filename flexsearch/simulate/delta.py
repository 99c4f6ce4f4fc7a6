"""Delta simulation: the iteration time of a plan that differs from the one at hand in a few configs.

A proposal changes the templates of its operators, of the edges around them and of their weights (``change``), and the
pass over the plan goes on from the last checkpoint before the first block that changed (``walk``), past what is only
put off (``skip``). The result is that of lowering and simulating the whole plan anew, to the bit; rejecting it leaves
the plan at hand as it was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Final

import numpy as np
import numpy.typing as npt

from flexsearch.cost import Costs
from flexsearch.cost.tally import empty_loads, make_tally
from flexsearch.graph import OperatorGraph
from flexsearch.lower import Lowering
from flexsearch.lower.arrays import RECORD, STRIDE, WRITE, Program, State, Tasks, Work
from flexsearch.lower.change import Change, Wiring, carry_over, place, wire
from flexsearch.lower.keys import RESHARD, WEIGHT
from flexsearch.lower.program import make_program, make_wiring
from flexsearch.lower.templates import Templates
from flexsearch.simulate.attempt import Proposals, attempt_each
from flexsearch.simulate.checkpoint import accept
from flexsearch.simulate.walk import walk
from flexsearch.simulate.write import time_written
from flexsearch.strategy import OperatorConfig, Options
from flexsearch.topology import Topology

Configs = Sequence[OperatorConfig]
Times = npt.NDArray[np.float64]
Numbers = Sequence[int] | npt.NDArray[np.uint32]
_MISSING_ROWS: Final = 4096
_IN_FLIGHT, _HELD, _HELD_ROWS = 8192, 256, 64
"""Room for exchanges in flight; for those that a checkpoint can hold, and for the rows to which they deliver. A pass
with more is void, a checkpoint with more is not used."""


class DeltaSimulator:
    """A plan at hand, and what it would cost to change it.

    >>> simulator = DeltaSimulator(graph, topology, costs, options, configs)
    >>> seconds = simulator.propose({3: config})      # iteration time (s) with operator 3 changed
    >>> simulator.accept()                            # or reject()

    ``room``: tasks of a task graph for which there is room at first; it grows. ``share``: as of ``Templates``.
    """

    def __init__(
        self, graph: OperatorGraph, topology: Topology, costs: Costs, options: Options, configs: Configs,
        lowering: Lowering | None = None, room: int = 4096, share: bool = True,
    ) -> None:  # fmt: skip
        self.graph, self.topology, self.costs, self.options = graph, topology, costs, options
        self.lowering = lowering or Lowering(graph, topology, costs)
        self.templates = Templates(self.lowering, options, share)
        self.program: Program = make_program(graph, topology, self.lowering, costs, options)
        self.wiring: Wiring = make_wiring(graph, topology, self.lowering, self.program)
        self.state, self.proposed = (self._empty_state() for _ in range(2))
        self.work = self._work()
        self.tasks = self._tasks(room)
        self.change = self._change()
        self.passes = self.written = 0
        """Passes that gave the time, and plans whose task graph had to be written down."""
        self.whole = False
        """Whether the checkpoints are those of the plan at hand."""
        self._seconds, self._pending, self._dirty = 0.0, False, False
        self.seconds = self.propose(dict(enumerate(configs)))
        """Iteration time of the plan at hand, s."""
        self.accept()

    @property
    def configs(self) -> tuple[OperatorConfig, ...]:
        """The plan at hand."""
        found = tuple(self.templates.configs[int(c)] for c in self.state.config)
        return tuple(config for config in found if config is not None)

    def propose(self, changes: Mapping[int, OperatorConfig]) -> float:
        """Iteration time (s) of the plan at hand with some operators' configs changed. ``accept`` or ``reject`` it."""
        numbers = {i: self.templates.config(i, c) for i, c in changes.items()}
        return self.attempt(list(numbers), list(numbers.values()))

    def attempt(self, operators: Numbers, numbers: Numbers, limit: float = inf) -> float:
        """As ``propose``, with configs by number. Infinity if the time is certainly above ``limit`` (s): such a
        proposal cannot be accepted."""
        return self.attempt_each(make_proposals([(operators, numbers)]), limit)

    def attempt_each(self, proposals: Proposals, limit: float) -> float:
        """Iteration time (s) of the first of the proposals, from number ``at[0]`` on, that takes at most ``limit`` (s):
        ``accept`` or ``reject`` it. ``at[0]`` becomes its number. If all take more, ``at[0]`` becomes their number, and
        the time is that of the last, or infinity if it is certainly above the limit."""
        self._clean()
        count, seconds = len(proposals.end), inf
        while (first := int(proposals.at[0])) < count:
            attempt_each(
                self.wiring, self.program, self.templates.pools, self.templates.keys.table, self.state, self.proposed,
                self.change, self.work, self.tasks, self.whole, limit, proposals,
            )  # fmt: skip
            self._dirty = True
            seconds = float(proposals.seconds[0])
            self.passes += int(proposals.at[0]) - first
            if seconds < 0.0:
                if self.change.lacking[0]:
                    self.fill()
                    continue
                seconds = self.by_events(limit)
            self.passes += int(proposals.at[0]) < count
            if seconds <= limit or int(proposals.at[0]) == count:
                break
            proposals.at[0] += np.uint64(1)
            if proposals.at[0] < count:
                self._clean()
        self._pending, self._seconds = seconds < inf, seconds
        return seconds

    @property
    def held(self) -> npt.NDArray[np.int64]:
        """At most so many bytes are in use on each device at any moment, under the last proposal."""
        return self.proposed.held

    def _clean(self) -> None:
        """Undo a proposal that was neither accepted nor rejected."""
        if self._dirty:
            carry_over(self.state, self.proposed, self.change)
            self._dirty = False

    def accept(self) -> None:
        """Make the last proposal the plan at hand. Raises RuntimeError if there is none."""
        if not self._pending:
            raise RuntimeError("nothing has been proposed since the last accept, reject or times")
        self._pending = self._dirty = False
        carry_over(self.proposed, self.state, self.change)
        self.seconds = self._seconds
        self.whole = not self.work.broken[0]
        if self.whole:
            accept(self.work)

    def reject(self) -> None:
        """Leave the plan at hand as it is."""
        self._pending = False
        self._clean()

    def from_nothing(self, configs: Mapping[int, OperatorConfig]) -> float:
        """Iteration time (s) of a whole plan, built up from nothing and timed by events: what ``propose`` saves. It
        becomes the plan at hand."""
        self.reject()
        self.state, self.proposed, self.whole = self._empty_state(), self._empty_state(), False
        numbers = [self.templates.config(i, config) for i, config in configs.items()]
        count = self.change.number[0] = len(numbers)
        self.change.operator[:count], self.change.config[:count] = list(configs), numbers
        while True:
            pools, change = self.templates.pools, self.change
            place(self.wiring, self.program, pools, self.proposed, change)
            wire(self.wiring, self.program, pools, self.templates.keys.table, self.proposed, self.state, change)
            if not change.lacking[0]:
                break
            self.fill()
        self._seconds, self._pending = self.by_events(), True
        self.accept()
        return self.seconds

    def use(self, options: Options) -> None:
        """Go on with buckets of another size: templates do not depend on them. The optimizer must stay the same."""
        configs = self.configs
        self.options = options
        self.program = make_program(self.graph, self.topology, self.lowering, self.costs, options)
        self.wiring = make_wiring(self.graph, self.topology, self.lowering, self.program)
        self.state, self.proposed = self._empty_state(), self._empty_state()
        self.work, self.change, self.whole, self._dirty = self._work(), self._change(), False, False
        self.seconds = self.propose(dict(enumerate(configs)))
        self.accept()

    def times(self) -> tuple[Times, Times]:
        """Start and end (s) of every task of the plan at hand, in the order of its task graph. Drops a proposal."""
        self.reject()  # the pass below takes the place of the proposal's
        while self.program.scalars[2] < 2.0:
            self._walk(self.state, RECORD)
            count = int(self.work.moment[1])
            if self.work.broken[0]:
                break
            if count <= len(self.work.start):
                return self.work.start[:count].copy(), self.work.end[:count].copy()
            self.work = self.work._replace(start=np.zeros(2 * count), end=np.zeros(2 * count))
        self._write(self.state, inf, merged=False)
        count = int(self.tasks.written[0])
        return self.tasks.start[:count].copy(), self.tasks.end[:count].copy()

    def _walk(self, state: State, mode: int) -> float:
        arguments = self.program, self.templates.pools, state, self.work, self.tasks
        return float(walk(*arguments, np.uint64(0), np.uint64(mode), inf, self.change.changed, False))

    def by_events(self, limit: float = inf) -> float:
        """Iteration time (s) of the proposal by events; infinity if it is certainly above ``limit`` (s)."""
        self.written += 1
        return self._write(self.proposed, limit, merged=self.program.scalars[2] == 0.0)

    def _write(self, state: State, limit: float, merged: bool) -> float:
        """Makespan (s) by events, of the task graph written down; there are no checkpoints of the plan then."""
        self.tasks.merged[0] = merged
        while self._walk(state, WRITE) < 0.0:
            self.tasks = self._tasks(2 * len(self.tasks.duration))
            self.tasks.merged[0] = merged
        self.work.broken[0] = 1
        return float(time_written(self.tasks, self.work, limit))

    def fill(self) -> None:
        """Add the templates that were missing, and undo the proposal."""
        for kind, a, b in {tuple(row) for row in self.change.missing[: int(self.change.lacking[0])].tolist()}:
            if RESHARD <= kind < WEIGHT:
                self.templates.add(kind, a, b)
            elif kind == WEIGHT:
                slots = self.program.reader[self.program.reader_first[a] : self.program.reader_last[a]]
                wanted = 2 * self._needs(slots) + self.program.flows[slots]
                needs = [(x // 2, bool(x % 2)) for x in dict.fromkeys(wanted.tolist())]
                self.templates.weight(a, needs, bool(b))
            else:
                slots = self.wiring.buffer_slot[self.wiring.buffer_first[a] : self.wiring.buffer_last[a]]
                self.templates.kept(a, self._needs(slots).tolist())
        carry_over(self.state, self.proposed, self.change)
        self._dirty = False

    def _needs(self, slots: npt.NDArray[np.uint32]) -> npt.NDArray[np.int64]:
        """Layouts that readers of the proposal want."""
        pools, config = self.templates.pools, self.proposed.config[self.wiring.slot_operator[slots]]
        wanted = pools.layout[pools.config_reads[config] + self.wiring.slot_position[slots]]
        layouts: npt.NDArray[np.int64] = wanted.astype(np.int64)
        return layouts

    @property
    def _strides(self) -> int:
        return len(self.program.kind) // STRIDE + 1

    def _tasks(self, count: int) -> Tasks:
        return _tasks(len(self.work.left), len(self.topology.devices), count)

    def _change(self) -> Change:
        operators, weights = len(self.graph.operators), len(self.wiring.gather_block)
        slots, tensors = len(self.wiring.slot_operator), len(self.wiring.tensor_producer)
        return Change(
            operator=_numbers(operators), config=_numbers(operators), number=np.zeros(1, np.uint64),
            slot=_numbers(slots), weight=_numbers(weights), touched=np.zeros(2, np.uint64),
            tensor_stamp=np.zeros(tensors, np.uint64), weight_stamp=np.zeros(weights, np.uint64),
            round=np.zeros(1, np.uint64), missing=np.zeros((_MISSING_ROWS, 3), np.uint64),
            lacking=np.zeros(1, np.uint64), begin=np.zeros(1, np.uint64),
            changed=np.zeros(self._strides, np.uint8),
        )  # fmt: skip

    def _empty_state(self) -> State:
        slots, devices = len(self.wiring.slot_operator), len(self.topology.devices)
        resources = len(self.topology.resources)
        return State(
            config=_numbers(len(self.graph.operators)), leader=np.arange(slots, dtype=np.uint32), need=_numbers(slots),
            forward=_numbers(slots), backward=_numbers(slots), plan=_numbers(len(self.wiring.gather_block)),
            stored_bytes=np.zeros(devices, np.uint64), stored_count=np.zeros(devices, np.uint64),
            held=np.full(devices, self.templates.ceiling.always, np.int64), busy=np.zeros(devices, np.int64),
            stride_ticks=np.zeros((self._strides, devices), np.int64), load=np.zeros(resources, np.int64),
            stride_load=np.zeros((self._strides, resources), np.int64),
        )  # fmt: skip

    def _work(self) -> Work:
        slots, devices = len(self.wiring.slot_operator), len(self.topology.devices)
        weights, resources = len(self.wiring.gather_block), len(self.topology.resources)
        rows, checks = 2 * slots + weights, self._strides
        versions, members = rows + len(self.program.bucket_first), int(weights * self.program.scalars[3])
        return Work(
            last=np.zeros(devices), free=np.zeros(resources), seen=np.zeros(resources), order=np.zeros(resources),
            synced=np.zeros(devices), rest=np.zeros(devices, np.int64),
            rest_load=np.zeros(resources, np.int64), base=np.zeros(checks),
            next_base=np.zeros(checks), middle=np.zeros(devices),
            arrived=np.zeros((2, rows, devices)), version=np.zeros(versions, np.uint8),
            fresh=np.zeros(versions, np.uint8), checkpoint=np.zeros((2, checks, 2 * devices + 3 * resources + 3)),
            check_version=np.zeros(checks, np.uint8), check_fresh=np.zeros(checks, np.uint8), load=np.zeros(resources),
            touched=_numbers(resources), group_key=_numbers(2, members), group_head=_numbers(2, members),
            group_tail=_numbers(2, members), group_size=_numbers(2, members), member_exchange=_numbers(2, members),
            member_weight=_numbers(2, members), member_next=_numbers(2, members),
            heap_ready=np.zeros(_IN_FLIGHT), heap_number=np.zeros(_IN_FLIGHT),
            heap_cargo=np.zeros(_IN_FLIGHT, np.uint64),
            parked_ready=np.zeros(_IN_FLIGHT), parked_number=np.zeros(_IN_FLIGHT),
            parked_cargo=np.zeros(_IN_FLIGHT, np.uint64), flying=np.zeros(2, np.uint64),
            left=_numbers(rows), early=_numbers(rows),
            held=_numbers(2, checks, 3), held_ready=np.zeros((2, checks, _HELD)),
            held_number=np.zeros((2, checks, _HELD)), held_cargo=np.zeros((2, checks, _HELD), np.uint64),
            held_row=_numbers(2, checks, _HELD_ROWS, 3), held_arrived=np.zeros((2, checks, _HELD_ROWS, devices)),
            start=np.zeros(1), end=np.zeros(1), broken=np.zeros(1, np.uint8), void=np.zeros(1, np.uint64),
            skipped=np.zeros(1, np.uint64), moment=np.zeros(3), tally=make_tally(self.topology),
            loads=empty_loads(resources),
        )  # fmt: skip


def make_proposals(changes: Sequence[tuple[Numbers, Numbers]]) -> Proposals:
    """Proposals (at least one): the operators of each, and the numbers of their new configs."""
    operators, numbers = zip(*changes, strict=True)
    return Proposals(
        operator=np.concatenate(operators).astype(np.uint32), config=np.concatenate(numbers).astype(np.uint32),
        end=np.cumsum([len(of) for of in operators], dtype=np.uint64), at=np.zeros(1, np.uint64), seconds=np.zeros(1),
    )  # fmt: skip


def _numbers(*size: int) -> npt.NDArray[np.uint32]:
    return np.zeros(size, np.uint32)


def _tasks(rows: int, devices: int, count: int) -> Tasks:
    """Room for ``count`` tasks, with 16 dependencies, links, ... each on average."""
    wide = 16 * count
    return Tasks(
        duration=np.zeros(count), dependency_start=_numbers(count + 1), dependency=_numbers(wide),
        link_start=_numbers(count + 1), link=_numbers(wide), link_s=np.zeros(wide), drag_start=_numbers(count + 1),
        drag=_numbers(wide), drag_s=np.zeros(wide), turn=np.zeros(count), written=np.zeros(8, np.uint64),
        merged=np.zeros(1, np.uint8), open=np.zeros(devices, np.uint8),
        last=_numbers(devices), head=np.zeros((rows, devices), np.uint32), middle=_numbers(devices),
        synced=_numbers(devices), node_task=_numbers(wide), node_next=_numbers(wide), start=np.zeros(count),
        end=np.zeros(count), ready=np.zeros(count), left=np.zeros(count), waiting=_numbers(count),
        reader_start=_numbers(count + 2), reader=_numbers(wide), heap=_numbers(count),
    )  # fmt: skip
