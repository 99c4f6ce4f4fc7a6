"""A plan by numbers of templates, from nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from flexsearch.compiled import I64, U32
from flexsearch.graph import OperatorGraph
from flexsearch.lower.arrays import STRIDE, Program, State
from flexsearch.lower.change import Change, Wiring, carry_over, place, wire
from flexsearch.lower.keys import RESHARD, WEIGHT
from flexsearch.lower.lowering import Lowering
from flexsearch.lower.program import make_program, make_wiring
from flexsearch.lower.templates import Templates
from flexsearch.strategy import OperatorConfig, Options
from flexsearch.topology import Topology

_MISSING_ROWS: Final = 4096


class Wired:
    """A plan, ``state``, with the templates that it is made of."""

    def __init__(self, lowering: Lowering, configs: Sequence[OperatorConfig], options: Options) -> None:
        graph, topology = lowering.graph, lowering.topology
        self.templates = Templates(lowering, share=False)
        self.program = make_program(graph, topology, lowering, lowering.costs, options)
        self.wiring = make_wiring(graph, topology, lowering, self.program)
        self.state, nothing = (empty_state(topology, self.program, self.wiring) for _ in range(2))
        change = make_change(graph, self.program, self.wiring)
        numbers = [self.templates.config(i, config) for i, config in enumerate(configs)]
        change.number[0] = len(numbers)
        change.operator[:], change.config[:] = range(len(numbers)), numbers
        while True:
            pools = self.templates.pools
            place(self.wiring, self.program, pools, self.state, change)
            wire(self.wiring, self.program, pools, self.templates.keys.table, self.state, nothing, change)
            if not change.lacking[0]:
                break
            fill(self.templates, self.program, self.wiring, self.state, change)
            carry_over(nothing, self.state, change)


def fill(templates: Templates, program: Program, wiring: Wiring, state: State, change: Change) -> None:
    """Add the templates that were missing for the plan ``state``."""

    def needs(slots: U32) -> I64:
        """Layouts that readers want."""
        pools, config = templates.pools, state.config[wiring.slot_operator[slots]]
        found: I64 = pools.layout[pools.config_reads[config] + wiring.slot_position[slots]].astype(np.int64)
        return found

    for kind, a, b in {tuple(row) for row in change.missing[: int(change.lacking[0])].tolist()}:
        if RESHARD <= kind < WEIGHT:
            templates.add(kind, a, b)
        elif kind == WEIGHT:
            slots = program.reader[program.reader_first[a] : program.reader_last[a]]
            wanted = 2 * needs(slots) + program.flows[slots]
            templates.weight(a, [(x // 2, bool(x % 2)) for x in dict.fromkeys(wanted.tolist())], bool(b))
        else:
            slots = wiring.buffer_slot[wiring.buffer_first[a] : wiring.buffer_last[a]]
            templates.kept(a, needs(slots).tolist())


def make_change(graph: OperatorGraph, program: Program, wiring: Wiring) -> Change:
    """Room for the largest change of a plan."""
    operators, weights = len(graph.operators), len(wiring.gather_block)
    slots, tensors = len(wiring.slot_operator), len(wiring.tensor_producer)
    return Change(
        operator=_numbers(operators), config=_numbers(operators), number=np.zeros(1, np.uint64),
        slot=_numbers(slots), weight=_numbers(weights), touched=np.zeros(2, np.uint64),
        tensor_stamp=np.zeros(tensors, np.uint64), weight_stamp=np.zeros(weights, np.uint64),
        round=np.zeros(1, np.uint64), missing=np.zeros((_MISSING_ROWS, 3), np.uint64),
        lacking=np.zeros(1, np.uint64), begin=np.zeros(1, np.uint64),
        changed=np.zeros(strides(program), np.uint8),
    )  # fmt: skip


def empty_state(topology: Topology, program: Program, wiring: Wiring) -> State:
    """No plan: template 0 everywhere, which is none."""
    slots, devices, resources = len(wiring.slot_operator), len(topology.devices), len(topology.resources)
    return State(
        config=_numbers(len(wiring.forward_block)), leader=np.arange(slots, dtype=np.uint32), need=_numbers(slots),
        forward=_numbers(slots), backward=_numbers(slots), plan=_numbers(len(wiring.gather_block)),
        stored_bytes=np.zeros(devices, np.uint64), stored_count=np.zeros(devices, np.uint64),
        busy=np.zeros(devices, np.int64), stride_ticks=np.zeros((strides(program), devices), np.int64),
        load=np.zeros(resources, np.int64), stride_load=np.zeros((strides(program), resources), np.int64),
    )  # fmt: skip


def strides(program: Program) -> int:
    """How many STRIDEs of blocks there are."""
    return len(program.kind) // STRIDE + 1


def _numbers(size: int) -> npt.NDArray[np.uint32]:
    return np.zeros(size, np.uint32)
