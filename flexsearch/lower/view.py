"""The rows of a plan as tasks: what runtime, reports and explanations read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from flexsearch.cost.communication import Pricing, Transfer
from flexsearch.cost.ticks import TICK
from flexsearch.graph import OperatorGraph
from flexsearch.lower.actions import Action
from flexsearch.lower.exchanges import Standing, standing
from flexsearch.lower.orbits import make_block_map
from flexsearch.lower.order import Order, order_of
from flexsearch.lower.pieces import Edge, Pieces, Weight
from flexsearch.lower.reading import sample_bytes
from flexsearch.lower.reshard import Exchange, Reshard
from flexsearch.lower.rows import (
    BACKWARD,
    FORWARD,
    GATHER,
    GATHER_ONCE,
    NEVER,
    READ,
    RECIPE,
    RECOMPUTE,
    REGATHER,
    RESULT,
    SYNCHRONISE,
    UPDATE,
    WEIGHT_GRADIENT,
    Rows,
    Segments,
    Sent,
)
from flexsearch.lower.schedule import Stages, orders_of
from flexsearch.lower.taskgraph import Communication, Member, Purpose, Row, TaskGraph, TaskKind
from flexsearch.strategy import OperatorConfig
from flexsearch.topology import Topology

T = TypeVar("T", int, float)

_PURPOSES: dict[int, Purpose] = {
    GATHER: "gather", FORWARD: "forward", BACKWARD: "backward", SYNCHRONISE: "synchronise",
    RECOMPUTE: "recompute", REGATHER: "regather", GATHER_ONCE: "gather", RESULT: "forward", READ: "read",
}  # fmt: skip
_KINDS = {
    FORWARD: TaskKind.FORWARD, BACKWARD: TaskKind.BACKWARD, WEIGHT_GRADIENT: TaskKind.WEIGHT_GRADIENT,
    RECOMPUTE: TaskKind.RECOMPUTE, RECIPE: TaskKind.SYNCHRONISE,
}  # fmt: skip


@dataclass(frozen=True)
class Described:
    """What of a lowered strategy (``Lowered``) its tasks follow from."""

    lowering: Pieces
    graph: OperatorGraph
    topology: Topology
    configs: tuple[OperatorConfig, ...]
    edges: tuple[Edge, ...]
    weights: tuple[Weight, ...]
    edge_of: Mapping[tuple[int, int], int]
    result_edges: Mapping[str, int]
    update_edges: Mapping[str, int]
    stages: Stages
    rows: Rows

    @cached_property
    def communications(self) -> Communications:
        """What the rows communicate."""
        return Communications(self)

    @cached_property
    def order(self) -> Order:
        """What the rows wait for."""
        return order_of(self.rows)

    @cached_property
    def tasks(self) -> TaskGraph:
        """The rows as tasks."""
        return task_graph(self)


class Actions:
    """Which action of a pipeline a row belongs to."""

    def __init__(self, lowered: Described) -> None:
        stages = lowered.stages
        self.plain = len(stages) == stages.microbatches == 1
        self.table = lowered.rows.blocks
        _, orders = orders_of(stages)
        self.divided = {(a.stage, a.microbatch) for row in orders for a in row if a.kind == "W"}

    def of(self, row: Row) -> Action | None:
        """None: it happens once a step, or nothing is divided into stages or microbatches."""
        kind, stage = int(self.table.kind[row.block]), int(self.table.stage[row.block])
        if self.plain or kind in (GATHER, GATHER_ONCE, SYNCHRONISE, RESULT, UPDATE, READ, RECIPE):
            return None
        if kind == FORWARD:
            return Action(stage, "F", row.microbatch)
        if (stage, row.microbatch) not in self.divided:
            return Action(stage, "B", row.microbatch)
        return Action(stage, "W" if kind == WEIGHT_GRADIENT else "I", row.microbatch)


def _loads(
    resource: npt.NDArray[np.uint32], ticks: npt.NDArray[np.int64], first: np.uint32, last: np.uint32
) -> tuple[tuple[int, float], ...]:
    """Rows of two columns as (resource, seconds)."""
    rows = slice(int(first), int(last))
    return tuple(zip(resource[rows].tolist(), (ticks[rows] * TICK).tolist(), strict=True))


def links_of(segments: Segments, communication: int) -> tuple[tuple[int, float], ...]:
    """Links of a communication, given by its number in the segments, and for how long (s) it keeps each busy."""
    return _loads(
        segments.link, segments.link_ticks, segments.link_first[communication], segments.link_last[communication]
    )


def _turn(ticks: np.int64) -> float:
    """A turn in seconds."""
    return inf if ticks == NEVER else int(ticks) * TICK


class Communications:
    """What a plan communicates: of each block, the same for every microbatch."""

    def __init__(self, lowered: Described) -> None:
        self.lowered, self.rows, lowering = lowered, lowered.rows, lowered.lowering
        self.pricing = Pricing(lowering.network, lowering.costs.profile)
        self.blocks = make_block_map(
            lowering.image, lowering.replicas, len(lowered.topology.devices), lowering.inside
        )
        self._standing: dict[int, Standing] = {}
        """By identity of a reshard."""
        self._communications: dict[tuple[int, int], Communication] = {}
        self.members = self._members()

    def of(self, block: int, number: int) -> Communication:
        """One of them, as devices of the first block take part in it."""
        if (own := self.rows.recipes.get(block)) is not None:
            return own.communications[number]
        key = block, number
        if (cached := self._communications.get(key)) is None and self.rows.blocks.kind[block] == READ:
            cached = self._communications[key] = self._read(key)
        if cached is None:
            members = self.members[block][number]
            exchanges = [member.what for member in members]
            one, size = exchanges[0], len(self.lowered.topology.devices)
            cached = self._communications[key] = Communication(
                _PURPOSES[int(self.rows.blocks.kind[block])], one.form, one.devices,
                tuple(sorted({d % size for x in exchanges for d in x.senders})),
                tuple(sorted({d % size for x in exchanges for d in x.receivers})), members,
                self._here(
                    one.transfer if len(exchanges) == 1 else self._transfer(exchanges),
                    self._count(members[0]) if self.pricing.by_group(one.form) else 1,
                ),
                self._count(members[0]) * sum(x.nbytes for x in exchanges),
                self.lowered.topology.communication.in_one_call(one.form),
            )  # fmt: skip
        return cached

    def _read(self, key: tuple[int, int]) -> Communication:
        """What a host reads from storage."""
        segments, lowering = self.rows.segments, self.lowered.lowering
        c = int(segments.communication_first[self.rows.segment[key[0]]]) + key[1]
        receivers = segments.receiver[segments.receiver_first[c] : segments.receiver_last[c]].tolist()
        devices, seconds = tuple(sorted(receivers)), int(segments.communication_ticks[c]) * TICK
        links = _loads(segments.link, segments.link_ticks, segments.link_first[c], segments.link_last[c])
        samples = lowering.samples_read(self.lowered.configs, self.lowered.stages.microbatches)
        storage = self.lowered.topology.storage
        assert storage is not None
        each = storage.reading.sample_bytes or sample_bytes(lowering.graph)
        nbytes = round(samples[int(lowering.topology.host_of[devices[0]])] * each * storage.missing(each))
        transfer = Transfer(seconds, links, (), tuple((r, nbytes) for r, _ in links))
        return Communication("read", "read", devices, tuple(receivers[:1]), devices, (), transfer, 0, False)

    def _transfer(self, exchanges: list[Exchange]) -> Transfer:
        """What exchanges of a bucket cost together."""
        one = exchanges[0]
        if self.pricing.by_group(one.form):
            return self.pricing.collective(one.form, one.devices, sum(x.amount for x in exchanges))
        start_s = max(x.start_s for x in exchanges)  # what goes to one device is one message
        return self.pricing.transfer(one.form, [message for x in exchanges for message in x.messages], start_s)

    def _here(self, transfer: Transfer, count: int) -> Transfer:
        """A transfer on the links of the first block. Where one stands for several, each carries as much; where several
        of the ``count`` exchanges that this one stands for use the same link, it carries them all."""
        if self.lowered.lowering.fold is None:
            return transfer
        image = self.lowered.lowering.image.tolist()

        def most(rows: Iterable[tuple[int, T]]) -> tuple[tuple[int, T], ...]:
            largest: dict[int, T] = {}
            for resource, value in rows:
                largest[image[resource]] = max(value, largest.get(image[resource], value))
            return tuple(largest.items())

        links, many = most(transfer.links), Counter(image[resource] for resource, _ in transfer.links)
        times = {r: max(1, count * many[r] // int(self.blocks.images[r])) for r, _ in links}
        more = max((s * times[r] for r, s in links), default=0.0) - max((s for _, s in links), default=0.0)
        return replace(
            transfer, duration_s=transfer.duration_s + more, links=tuple((r, s * times[r]) for r, s in links),
            drag=most(transfer.drag), link_bytes=tuple((r, n * times[r]) for r, n in most(transfer.link_bytes)),
        )  # fmt: skip

    def _stand(self, reshard: Reshard) -> Standing:
        if (cached := self._standing.get(id(reshard))) is None:
            cached = self._standing[id(reshard)] = standing(reshard, self.blocks)
        return cached

    def _count(self, member: Member) -> int:
        """How many exchanges that are each other's images a member stands for."""
        return dict(self._stand(member.reshard)[member.phase])[member.exchange]

    def _members(self) -> list[list[tuple[Member, ...]]]:
        """By block and communication."""
        lowered, blocks = self.lowered, self.rows.blocks
        edges = [lowered.edge_of[i, p] for i, op in enumerate(lowered.graph.operators) for p in range(len(op.inputs))]
        edges += [*lowered.result_edges.values(), *lowered.update_edges.values()]
        by_block: list[list[tuple[Member, ...]]] = []
        for block, (kind, argument, first, last) in enumerate(
            zip(blocks.kind, blocks.argument, blocks.sent_first, blocks.sent_last, strict=True)
        ):
            if (together := self.rows.together.get(block)) is not None:
                by_block.append([self._together(rows, None if kind == SYNCHRONISE else edges) for rows in together])
                continue
            here: list[tuple[Member, ...]] = []
            for e in dict.fromkeys(edges[slot] for slot in blocks.sent[first:last]):
                edge = lowered.edges[e]
                leads = kind != BACKWARD or (edge.readers and edge.readers[0][0] == argument)
                reshard = edge.backward if kind == BACKWARD else edge.forward
                if reshard is not None and leads:
                    for phase, exchanges in enumerate(self._stand(reshard)):
                        here += [(Member(e, reshard, phase, x),) for x, _ in exchanges]
            by_block.append(here)
        return by_block

    def _together(self, rows: tuple[Sent, ...], edges: Sequence[int] | None) -> tuple[Member, ...]:
        """What goes as one: synchronisation, or if ``edges`` (by slot) is given, gathers."""
        members = []
        for item, phase, x in rows:
            key = item if edges is None else edges[item]
            reshard = self.lowered.weights[key].plan.sync if edges is None else self.lowered.edges[key].forward
            assert reshard is not None
            members.append(Member(key, reshard, phase, self._stand(reshard)[phase][x][0]))
        return tuple(members)


def task_graph(lowered: Described) -> TaskGraph:
    """The rows as tasks, in their order."""
    order, rows, tasks, actions = lowered.order, lowered.rows, TaskGraph(), Actions(lowered)
    segments, blocks, machine = rows.segments, rows.blocks, rows.machine
    first, after, launched = order.first.tolist(), order.after.tolist(), (order.launched * TICK).tolist()
    places = zip(order.identities(), order.device.tolist(), order.step.tolist(), strict=True)
    for k, (row, device, step) in enumerate(places):
        tasks.identity.append(row)
        tasks.action.append(actions.of(row))
        awaited = after[first[k] : first[k + 1]]
        if row.communicates:
            links = links_of(segments, step)
            drag = _loads(segments.drag, segments.drag_ticks, segments.drag_first[step], segments.drag_last[step])
            seconds, turn = int(segments.communication_ticks[step]) * TICK, _turn(segments.turn[step])
            what = lowered.communications.of(row.block, row.number)
            tasks.communicate(what, awaited, seconds, links, drag, turn, row.microbatch, launched[k])
            continue
        kind = _KINDS.get(int(blocks.kind[row.block]), TaskKind.UPDATE)
        operator = -1 if kind in (TaskKind.UPDATE, TaskKind.SYNCHRONISE) else int(blocks.argument[row.block])
        processor, turn = int(machine.processor[device]), _turn(machine.turn[device])
        seconds = int(segments.step_ticks[step]) * TICK
        tasks.compute(kind, operator, device, processor, seconds, awaited, turn, row.microbatch, launched[k])
    return tasks
