"""A plan as templates and rows, and what a change of some configs makes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from flexsearch.direct import direct
from flexsearch.lower.arena import Arena, new_filled
from flexsearch.lower.arrays import State
from flexsearch.lower.bucket import collect, collect_gathers, is_member
from flexsearch.lower.change import empty_change
from flexsearch.lower.describe import DONE, FULL, LACKING, Plan, drop, keep, rewire, write
from flexsearch.lower.emit import row_of
from flexsearch.lower.pieces import Pieces
from flexsearch.lower.program import make_block_table, make_machine, make_program, sums_of
from flexsearch.lower.rows import GATHER_ONCE, NEVER, NOBODY, SYNCHRONISE, Rows, Sent, is_gather
from flexsearch.lower.schedule import Stages, make_blocks, make_schedule
from flexsearch.lower.templates import Templates
from flexsearch.packed import zeros
from flexsearch.strategy import OperatorConfig, Options

_keep = direct(keep)
_drop = direct(drop)
_rewire = direct(rewire)
_write = direct(write)
_collect = direct(collect)
_collect_gathers = direct(collect_gathers)
_row_of = getattr(row_of, "py_func", row_of)
_is_member = getattr(is_member, "py_func", is_member)
_is_gather = getattr(is_gather, "py_func", is_gather)

Numbers = Sequence[int] | npt.NDArray[np.uint32]


class PlanRows:
    """Rows of the plans of one graph, one cut into stages and one set of options. ``plan`` is what compiled code takes;
    fetch it again after anything here was called. ``arena``: of rows that are not in use any more."""

    def __init__(
        self, lowering: Pieces, templates: Templates, options: Options, stages: Stages | None = None,
        arena: Arena | None = None,
    ) -> None:  # fmt: skip
        graph, topology = lowering.graph, lowering.topology
        devices = len(topology.devices)
        self.lowering, self.templates, self.options = lowering, templates, options
        self.stages = stages or Stages.one(devices)
        self.blocks = make_blocks(graph, options, self.stages, bool(lowering.readers))
        self.schedule = make_schedule(self.blocks, self.stages, devices)
        self.machine = make_machine(topology, lowering.turns, lowering.network, lowering.image)
        self.program = make_program(graph, topology, lowering, options, self.stages.microbatches)
        self.wiring = templates.wiring
        self.table = make_block_table(lowering, self.blocks, self.stages, devices, options)
        self.arena = arena or Arena(len(self.blocks), topology, lowering.network)
        self.change = empty_change(self.wiring, len(graph.operators), len(self.blocks))
        self._plan: Plan
        self.clear()

    def use(self, options: Options) -> None:
        """Sum gradients as other options say, which are the same otherwise. The plan at hand must be set anew."""
        self.options = options
        self.program.sums[0] = sums_of(options)

    def clear(self) -> None:
        """Forget the plan at hand."""
        self.state, self.proposed = self.empty_state(), self.empty_state()
        self.segment, self.new_segment = (np.zeros(len(self.blocks), np.uint32) for _ in range(2))
        self.whole = np.ones(1, np.uint32)
        self.arena.clear()
        self.kept = new_filled()
        self._plan = self._record()

    @property
    def plan(self) -> Plan:
        """All arrays."""
        if self._plan.pools is not self.templates.pools or self._plan.table is not self.templates.keys.table:
            self._plan = self._record()
        return self._plan

    def _record(self) -> Plan:
        return Plan(
            self.program, self.table, self.wiring, self.templates.pools, self.templates.keys.table, self.state,
            self.proposed, self.change, self.arena.draft, self.arena.segments, self.segment, self.new_segment,
            self.kept, self.arena.filled, self.whole,
        )  # fmt: skip

    @property
    def is_even(self) -> bool:
        """Whether all blocks of devices are certain to do the same, down to the last element. If not, what one block
        takes and needs may differ from what all do."""
        return not self.templates.tables.blocks.lopsided[0] and not self.arena.draft.groups.lopsided[0]

    @property
    def configs(self) -> tuple[OperatorConfig, ...]:
        """The plan at hand."""
        configs = tuple(self.templates.configs[int(c)] for c in self.state.config)
        return tuple(config for config in configs if config is not None)

    def set(self, configs: Mapping[int, OperatorConfig]) -> None:
        """Write the rows of a whole plan, which becomes the plan at hand. All operators need a config."""
        self.set_numbers(list(configs), [self.templates.config(i, config) for i, config in configs.items()])

    def set_numbers(self, operators: Numbers, configs: Numbers) -> None:
        """As ``set``, with configs by number."""
        self.clear()
        self._take(operators, configs)

    def replace(self, configs: Mapping[int, OperatorConfig]) -> None:
        """Give some operators of the plan at hand other configs."""
        self._take(list(configs), [self.templates.config(i, config) for i, config in configs.items()])

    def _take(self, operators: Numbers, configs: Numbers) -> None:
        """Give some operators of the plan at hand other configs, by number."""
        self.ask(operators, configs)
        while (status := self.describe(NEVER)) != DONE:
            self.go_on(status)
        _keep(self.plan)

    def sent(self, slot: int, backward: bool = False) -> tuple[int, range]:
        """The block of the plan at hand that sends what a slot reads, or the gradient that its reader makes of that,
        and its communications there (by number in the block)."""
        pools, leader = self.templates.pools, int(self.state.leader[slot])
        templates = self.state.backward if backward else self.state.forward
        block = int((self.table.backward if backward else self.table.forward)[leader])
        template = int(templates[leader])
        count = int(pools.reshard_last[template]) - int(pools.reshard_first[template])
        if not count:
            return block, range(0)
        first = int(_row_of(self.table, pools, templates, block, leader))
        return block, range(first, first + count)

    def copy(self) -> Rows:
        """The rows of the plan at hand, for those who keep them."""
        segment = self.segment.copy()
        return Rows(self.schedule, self.machine, self.table, self.arena.copy(), segment, self._together())

    def _together(self) -> dict[int, tuple[tuple[Sent, ...], ...]]:
        """``Rows.together``."""
        by_block: dict[int, tuple[tuple[Sent, ...], ...]] = {}
        for block, kind in enumerate(self.table.kind.tolist()):
            if kind == SYNCHRONISE:
                by_block[block] = self._synchronised(int(self.table.argument[block]))
            elif _is_gather(kind):
                by_block[block] = self._gathered(block)
        return by_block

    def _synchronised(self, n: int) -> tuple[tuple[Sent, ...], ...]:
        """The communications of a SYNCHRONISE block."""
        communications: list[tuple[Sent, ...]] = []
        for phase, bucket in ((1, self.blocks.finishes[n]), (0, self.blocks.starts[n])):
            if bucket == NOBODY:
                continue
            pools, state, sums = self.templates.pools, self.state, self.blocks.sums[bucket]
            weights = [w for w in self.blocks.buckets[bucket] if _is_member(pools, state.plan[w], sums)]
            while _collect(self.table, np.uint64(bucket), pools, state.plan, self.arena.draft.groups):
                self.make_room()
            communications += self._grouped([(w, int(pools.plan_sync[state.plan[w]])) for w in weights], phase)
        return tuple(communications)

    def _gathered(self, block: int) -> tuple[tuple[Sent, ...], ...]:
        """The communications of a block that gathers weights."""
        templates = self.state.kept if self.table.kind[block] == GATHER_ONCE else self.state.forward
        number, pools = np.uint64(block), self.templates.pools
        self.arena.draft.groups.gathers[0] = 0
        while _collect_gathers(self.table, number, pools, templates, self.arena.draft.groups):
            self.make_room()
        slots = self.table.sent[self.table.sent_first[block] : self.table.sent_last[block]].tolist()
        return tuple(self._grouped([(slot, int(templates[slot])) for slot in slots], 0))

    def _grouped(self, items: Sequence[tuple[int, int]], phase: int) -> list[tuple[Sent, ...]]:
        """A phase of the reshards (``items``: what each is of, and its number) whose exchanges have just been
        collected."""
        pools, groups = self.templates.pools, self.arena.draft.groups
        rows: list[list[Sent]] = [[] for _ in range(int(groups.counts[phase]))]
        at = 0
        for item, template in items:
            begin, middle, end = (
                int(column[template]) for column in (pools.reshard_first, pools.reshard_middle, pools.reshard_last)
            )
            for x in range(begin, end):
                if (x >= middle) == phase:
                    rows[groups.group[at]].append(Sent(item, phase, x - (middle if phase else begin)))
                at += 1
        return [tuple(row) for row in rows]

    def ask(self, operators: Numbers, configs: Numbers) -> None:
        """Propose other configs, given by number, for some operators."""
        count = self.change.number[0] = len(operators)
        self.change.operator[:count], self.change.config[:count] = operators, configs

    def describe(self, limit: int) -> int:
        """Write the rows of what was asked for: DONE, or why not (see ``flexsearch.lower.describe``)."""
        status = int(_rewire(self.plan, np.int64(limit)))
        return status if status != DONE else int(_write(self.plan))

    def go_on(self, status: int) -> bool:
        """Drop a proposal for which templates were LACKING or the arena was FULL, and help: it can be described again
        then. Returns whether segments have other numbers now."""
        if status == LACKING:
            self.templates.fill(self.wiring, self.program, self.proposed, self.change)
            _drop(self.plan)
            return False
        assert status == FULL
        _drop(self.plan)
        self.make_room()
        return True

    def make_room(self) -> None:
        """Forget all segments; write those of the plan at hand anew, with more room: they get other numbers. There must
        be no proposal."""
        at_hand, status = not self.whole[0], FULL
        self.whole[0] = 1
        while status == FULL:
            self.arena.grow()
            self.kept = new_filled()
            self._plan = self._record()
            status = int(_write(self._plan)) if at_hand else DONE
        if at_hand:
            _keep(self._plan)

    def empty_state(self) -> State:
        """No plan: template 0 everywhere, which is none."""
        slots, devices = len(self.wiring.slot_operator), len(self.lowering.topology.devices)
        return zeros(
            State, slots, config=len(self.lowering.graph.operators), leader=np.arange(slots, dtype=np.uint32),
            plan=len(self.table.gather_of), stored_bytes=devices, stored_count=devices, busy=devices,
            load=len(self.lowering.topology.resources),
        )  # fmt: skip
