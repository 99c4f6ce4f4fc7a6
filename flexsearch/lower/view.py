"""The rows of a plan as tasks: what runtime, reports and explanations read."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from flexsearch.cost.communication import Pricing, Transfer
from flexsearch.cost.ticks import TICK
from flexsearch.graph import OperatorGraph
from flexsearch.lower.arrays import BlockTable
from flexsearch.lower.pieces import Edge, Weight
from flexsearch.lower.reshard import Exchange
from flexsearch.lower.rows import (
    BACKWARD,
    COMPUTE,
    FORWARD,
    GATHER,
    NEVER,
    RECOMPUTE,
    REGATHER,
    SYNCHRONISE,
    WAIT,
    WEIGHT_GRADIENT,
    Machine,
    Schedule,
    Segments,
)
from flexsearch.lower.taskgraph import Communication, Member, Purpose, Row, TaskGraph, TaskKind
from flexsearch.topology import Topology

_PURPOSES: dict[int, Purpose] = {
    GATHER: "gather", FORWARD: "forward", BACKWARD: "backward", SYNCHRONISE: "synchronise",
    RECOMPUTE: "recompute", REGATHER: "regather",
}  # fmt: skip
_KINDS = {
    FORWARD: TaskKind.FORWARD, BACKWARD: TaskKind.BACKWARD, WEIGHT_GRADIENT: TaskKind.WEIGHT_GRADIENT,
    RECOMPUTE: TaskKind.RECOMPUTE,
}  # fmt: skip


class Synchronised(NamedTuple):
    """An exchange of a weight's synchronisation that is a part of a communication."""

    weight: int
    phase: int
    exchange: int


@dataclass(frozen=True)
class Rows:
    """The rows of a plan. ``segment``: by block. ``together``: by SYNCHRONISE block and communication, the exchanges
    that go as one."""

    schedule: Schedule
    machine: Machine
    blocks: BlockTable
    segments: Segments
    segment: npt.NDArray[np.uint32]
    together: tuple[tuple[tuple[Synchronised, ...], ...], ...]


class Described(Protocol):
    """What of a lowered strategy (``Lowered``) its tasks follow from."""

    @property
    def graph(self) -> OperatorGraph: ...

    @property
    def topology(self) -> Topology: ...

    @property
    def edges(self) -> Sequence[Edge]: ...

    @property
    def weights(self) -> Sequence[Weight]: ...

    @property
    def edge_of(self) -> Mapping[tuple[int, int], int]: ...

    @property
    def loss_edge(self) -> int: ...

    @property
    def update_edges(self) -> Mapping[str, int]: ...

    @property
    def rows(self) -> Rows: ...


def task_graph(lowered: Described) -> TaskGraph:
    """The rows as tasks, those with smaller identities first as far as dependencies allow: with one microbatch, all."""
    return _View(lowered).tasks


def _loads(
    resource: npt.NDArray[np.uint32], ticks: npt.NDArray[np.int64], first: np.uint32, last: np.uint32
) -> tuple[tuple[int, float], ...]:
    """Rows of two columns as (resource, seconds)."""
    rows = slice(int(first), int(last))
    return tuple(zip(resource[rows].tolist(), (ticks[rows] * TICK).tolist(), strict=True))


def _turn(ticks: np.int64) -> float:
    """A turn in seconds."""
    return inf if ticks == NEVER else int(ticks) * TICK


class _View:
    def __init__(self, lowered: Described) -> None:
        self.lowered, self.rows = lowered, lowered.rows
        self.pricing = Pricing(lowered.topology)
        self.members = self._members()
        self.after: dict[Row, list[Row]] = {}
        self.step: dict[Row, tuple[int, int]] = {}
        """Device and step of a computation."""
        for device in range(len(self.rows.schedule.group)):
            self._follow(device)
        self._add_followers()
        self.tasks = TaskGraph()
        for row, after in self._in_order():
            self._add(row, after)

    # ---- dependencies

    def _steps(self, device: int) -> Iterator[tuple[int, int, int]]:
        """Microbatch, block and step, in the order in which a device runs them."""
        s, segments, final = self.rows.schedule, self.rows.segments, int(self.rows.schedule.final[0])
        group = s.group[device]
        for a in range(s.action_first[group], s.action_last[group]):
            microbatch = int(s.microbatch[a])
            for b in range(s.block_first[a], s.block_last[a]):
                if microbatch == final if s.last[b] else microbatch == 0 or not s.once[b]:
                    table = int(segments.device_steps[self.rows.segment[b]]) + device
                    for step in range(segments.step_first[table], segments.step_first[table + 1]):
                        yield microbatch, b, step

    def _row(self, microbatch: int, block: int, communicates: int, number: int) -> Row:
        return Row(0 if self.rows.schedule.once[block] else microbatch, block, communicates, number)

    def _follow(self, device: int) -> None:
        """What the rows of a device wait for."""
        segments, last, waits = self.rows.segments, list[Row](), list[Row]()
        for microbatch, _, step in self._steps(device):
            block, number = int(segments.step_block[step]), int(segments.step_row[step])
            kind = segments.step_kind[step]
            row = self._row(microbatch, block, int(kind != COMPUTE), number)
            if kind == WAIT:
                waits.append(row)
            elif kind == COMPUTE:
                self.after[row] = [*waits, *last]
                self.step[row] = device, step
                last, waits = [row], []
            else:
                self.after.setdefault(row, []).extend(last)

    def _add_followers(self) -> None:
        segments = self.rows.segments
        for row in list(self.after):
            if row.communicates:
                c = self._communication(row)
                for k in range(segments.follower_first[c], segments.follower_last[c]):
                    block, number = int(segments.follower_block[k]), int(segments.follower_row[k])
                    self.after.setdefault(self._row(row.microbatch, block, 1, number), []).append(row)

    def _communication(self, row: Row) -> int:
        return int(self.rows.segments.communication_first[self.rows.segment[row.block]]) + row.number

    def _in_order(self) -> Iterator[tuple[Row, list[int]]]:
        """Rows with the places of those that they wait for."""
        readers: dict[Row, list[Row]] = {row: [] for row in self.after}
        missing = {row: len(set(after)) for row, after in self.after.items()}
        for row, after in self.after.items():
            for other in set(after):
                readers[other].append(row)
        heap = [row for row, count in missing.items() if not count]
        heapq.heapify(heap)
        place: dict[Row, int] = {}
        while heap:
            row = heapq.heappop(heap)
            place[row] = len(place)
            yield row, sorted({place[other] for other in self.after[row]})
            for reader in readers[row]:
                missing[reader] -= 1
                if not missing[reader]:
                    heapq.heappush(heap, reader)

    # ---- tasks

    def _add(self, row: Row, after: list[int]) -> None:
        segments, blocks = self.rows.segments, self.rows.blocks
        self.tasks.identity.append(row)
        if row.communicates:
            c = self._communication(row)
            links = _loads(segments.link, segments.link_ticks, segments.link_first[c], segments.link_last[c])
            drag = _loads(segments.drag, segments.drag_ticks, segments.drag_first[c], segments.drag_last[c])
            what = self._what(_PURPOSES[int(blocks.kind[row.block])], self.members[row.block][row.number])
            seconds, turn = int(segments.communication_ticks[c]) * TICK, _turn(segments.turn[c])
            self.tasks.communicate(what, after, seconds, links, drag, turn, row.microbatch)
            return
        device, step = self.step[row]
        kind = _KINDS.get(int(blocks.kind[row.block]), TaskKind.UPDATE)
        operator = -1 if kind == TaskKind.UPDATE else int(blocks.argument[row.block])
        processor, turn = int(self.rows.machine.processor[device]), _turn(self.rows.machine.turn[device])
        seconds = int(segments.step_ticks[step]) * TICK
        self.tasks.compute(kind, operator, device, processor, seconds, after, turn, row.microbatch)

    def _what(self, purpose: Purpose, members: tuple[Member, ...]) -> Communication:
        exchanges = [member.what for member in members]
        one = exchanges[0]
        return Communication(
            purpose, one.form, one.devices, tuple(sorted({d for x in exchanges for d in x.senders})),
            tuple(sorted({d for x in exchanges for d in x.receivers})), members,
            one.transfer if len(exchanges) == 1 else self._transfer(exchanges), sum(x.nbytes for x in exchanges),
        )  # fmt: skip

    def _transfer(self, exchanges: list[Exchange]) -> Transfer:
        """What exchanges of a bucket cost together."""
        one = exchanges[0]
        if self.pricing.by_group(one.form):
            return self.pricing.collective(one.form, one.devices, sum(x.amount for x in exchanges))
        start_s = max(x.start_s for x in exchanges)  # what goes to one device is one message
        return self.pricing.transfer(one.form, [message for x in exchanges for message in x.messages], start_s)

    def _members(self) -> list[list[tuple[Member, ...]]]:
        """By block and communication."""
        lowered, blocks = self.lowered, self.rows.blocks
        edges = [lowered.edge_of[i, p] for i, op in enumerate(lowered.graph.operators) for p in range(len(op.inputs))]
        edges += [lowered.loss_edge, *lowered.update_edges.values()]
        found: list[list[tuple[Member, ...]]] = []
        for kind, argument, first, last in zip(
            blocks.kind, blocks.argument, blocks.sent_first, blocks.sent_last, strict=True
        ):
            if kind == SYNCHRONISE:
                found.append([self._synchronised(rows) for rows in self.rows.together[argument]])
                continue
            here: list[tuple[Member, ...]] = []
            for e in dict.fromkeys(edges[slot] for slot in blocks.sent[first:last]):
                edge = lowered.edges[e]
                leads = kind != BACKWARD or (edge.readers and edge.readers[0][0] == argument)
                reshard = edge.backward if kind == BACKWARD else edge.forward
                if reshard is not None and leads:
                    for phase, exchanges in enumerate(reshard.phase_exchanges):
                        here += [(Member(e, reshard, phase, x),) for x in range(len(exchanges))]
            found.append(here)
        return found

    def _synchronised(self, rows: tuple[Synchronised, ...]) -> tuple[Member, ...]:
        found = []
        for w, phase, x in rows:
            sync = self.lowered.weights[w].plan.sync
            assert sync is not None
            found.append(Member(w, sync, phase, x))
        return tuple(found)
