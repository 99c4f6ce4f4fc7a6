"""Handmade pipelines: one device on each rank, one block for each pass of a stage, run by the real engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flexsearch.lower.actions import Action
from flexsearch.lower.list_schedule import Orders
from flexsearch.lower.rows import BACKWARD, COMPUTE, FORWARD, ISSUE, NEVER, WAIT, WEIGHT_GRADIENT, Machine, Schedule
from flexsearch.lower.schedule import Blocks, Stages, make_schedule
from flexsearch.simulate.engine import Engine
from flexsearch.strategy.stage import ScheduleKind
from tests.random_rows import Arena, Block, Communication, unslowed


@dataclass
class Pipeline:
    """Ticks of each stage's forward pass, input gradients and weight gradients; of a transfer to the next stage."""

    kind: ScheduleKind
    held: list[list[int]]
    microbatches: int
    forward: Sequence[int]
    inputs: Sequence[int]
    weights: Sequence[int]
    transfer: int = 0
    orders: Orders = ()

    def __post_init__(self) -> None:
        self.stages = len(self.forward)
        self.rank = {stage: rank for rank, row in enumerate(self.held) for stage in row}
        devices_of = tuple((self.rank[s],) for s in range(self.stages))
        cut = Stages(tuple(range(self.stages)), devices_of, self.microbatches, self.kind, self.orders)
        self.split = cut.splits_backward
        self.blocks = Blocks()
        self.arena = Arena(len(self.held))
        self.segment: list[int] = []
        for stage in range(self.stages):
            self.blocks.forward.append(self._add(FORWARD, stage, self.forward[stage]))
        of_backward = {}
        for stage in reversed(range(self.stages)):
            ticks = self.inputs[stage] if self.split else self.inputs[stage] + self.weights[stage]
            first = self._add(BACKWARD, stage, ticks)
            second = (
                self._add(WEIGHT_GRADIENT, stage, self.weights[stage]) if self.split else range(first.stop, first.stop)
            )
            of_backward[stage] = first, second
        self.blocks.backward = [of_backward[stage][0] for stage in range(self.stages)]
        self.blocks.weight = [of_backward[stage][1] for stage in range(self.stages)]
        self.schedule: Schedule = make_schedule(self.blocks, cut, len(self.held))
        devices = np.arange(len(self.held), dtype=np.uint32)
        turn, free = np.full(len(devices), NEVER, np.int64), np.zeros(1, np.uint8)
        self.machine = Machine(devices, turn, free, free, np.array([len(devices)], np.uint32), *unslowed(len(devices)))
        self.segments = self.arena.segments()

    def _add(self, kind: int, stage: int, ticks: int) -> range:
        """A block: wait for the stage before in its direction, compute, send to the next one."""
        b, step = len(self.blocks), 1 if kind == FORWARD else -1
        self.blocks.add(kind, stage, stage)
        steps: list[tuple[int, int, int, int]] = [(COMPUTE, b, 0, ticks)]
        communications = []
        if kind != WEIGHT_GRADIENT:
            if self._crosses(stage - step, stage):
                places = list(zip(self.blocks.kind, self.blocks.argument, strict=True))
                steps.insert(0, (WAIT, places.index((kind, stage - step)), 0, 0))
            if self._crosses(stage, stage + step):
                steps.append((ISSUE, b, 0, 0))
                ends = [self.rank[stage]], [self.rank[stage + step]]
                communications.append(Communication(*ends, self.transfer, []))
        rows: list[list[tuple[int, int, int, int]]] = [[] for _ in self.held]
        rows[self.rank[stage]] = steps
        self.segment.append(self.arena.add(Block(rows, communications)))
        return range(b, b + 1)

    def _crosses(self, before: int, after: int) -> bool:
        inside = min(before, after) >= 0 and max(before, after) < self.stages
        return inside and self.rank[before] != self.rank[after]

    def run(self) -> int:
        """Makespan, ticks."""
        engine = Engine(self.schedule, self.machine)
        return engine.run(self.segments, np.array(self.segment, np.uint32))

    def idle(self) -> list[int]:
        """By rank, ticks between its first and its last pass in which it computes nothing."""
        times = Engine(self.schedule, self.machine).times(self.segments, np.array(self.segment, np.uint32))
        found = []
        for row in self.held:
            blocks = [b for b, stage in enumerate(self.blocks.stage) if stage in row]
            places = [int(times.computation_first[b]) for b in blocks]
            begin, end = times.computation_start[:, places], times.computation_end[:, places]
            found.append(int(end.max() - begin.min() - (end - begin).sum()))
        return found


def equal(kind: ScheduleKind, held: list[list[int]], microbatches: int, ticks: int = 1000, **more: Any) -> Pipeline:
    """All passes take equally long: a whole backward pass twice as long as a forward pass."""
    each = [ticks] * sum(map(len, held))
    return Pipeline(kind, held, microbatches, each, each, each, **more)


def most_in_flight(row: Sequence[Action], until: str = "BW") -> int:
    """The most microbatches, counted for each stage, for which a rank has run the forward pass and not yet one of the
    passes ``until``."""
    most = now = 0
    for action in row:
        now += action.kind == "F"
        most = max(most, now)
        now -= action.kind in until
    return most
