"""What the account of memory needs of a graph, a topology and a schedule, as the arrays of ``lifetimes`` and
``account``."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Final

import numpy as np
import numpy.typing as npt

from flexsearch.cost.updates import state_bytes
from flexsearch.graph import Flow, OperatorGraph
from flexsearch.graph.batch import rows_per_sample
from flexsearch.graph.ops import kept_weights, kind_of, released_weights, saved_tensors
from flexsearch.graph.ops.formats import has_channels_last
from flexsearch.graph.ops.zeros import attends
from flexsearch.lower.arrays import NOTHING, BlockTable, State
from flexsearch.lower.change import Wiring
from flexsearch.lower.plan import PlanRows
from flexsearch.lower.program import Rows
from flexsearch.lower.rows import Schedule
from flexsearch.packed import zeros
from flexsearch.simulate.account import BLOCK_CELLS, Account
from flexsearch.simulate.spans import (
    ACTIVATIONS,
    ALONE,
    AT_HAND,
    CUT_FIRST,
    CUT_LATER,
    IN_BOTH_HALVES,
    IN_FIRST_HALF,
    NOT_KEPT,
    OUTPUT,
    WEIGHT,
    WEIGHTS,
    Sources,
    Spans,
    Units,
)
from flexsearch.strategy import Options

Numbers = npt.NDArray[np.uint32]
_CHUNK: Final = 64
"""Cells of a chunk: few enough to add them up anew where one changed, so many that chunks are few."""


def make_account(rows: PlanRows) -> tuple[Account, Sources]:
    """The account of no plan, and what memory of the plans of ``rows`` is worked out from."""
    graph, topology, schedule = rows.lowering.graph, rows.lowering.topology, rows.schedule
    shift = (int(schedule.microbatches[0]) - 1) * rows.lowering.replicas * graph.batch
    kinds_of = [device.kind for device in topology.devices]
    units = make_units(graph, rows.wiring, rows.table, rows.options, shift, int(schedule.microbatches[0]), kinds_of)
    sources = Sources(
        units, rows.table, rows.wiring, rows.program, rows.templates.pools, rows.lowering.layouts.pool,
        rows.templates.landings,
    )  # fmt: skip
    devices, blocks = len(topology.devices), len(schedule.kind)
    kinds = {1: 1, 2: 3}.get(int(schedule.microbatches[0]), 4)  # microbatches whose cells differ (``which_cells``)
    chunk_of, chunk_first = _chunks(schedule, blocks)
    capacity = np.array([device.usable_bytes for device in topology.devices], np.int64)
    count, chunks = len(units.root), len(chunk_first) - 1
    return zeros(
        Account, state=_small(rows.empty_state()), spans=_make_spans(graph, sources, devices), schedule=schedule,
        empty=np.ones(1, np.uint8), cells=(kinds, devices, BLOCK_CELLS * blocks), net=(kinds, devices, chunks),
        high=(kinds, devices, chunks), chunk_of=chunk_of, chunk_first=chunk_first, stale=(devices, chunks),
        changed=devices, next_block=_next_blocks(schedule, blocks), peak=devices, capacity=capacity, stamp=count,
        touched=count,
    ), sources  # fmt: skip


def _small(state: State) -> State:
    """The same without what only times need."""
    return state._replace(
        stored_bytes=np.zeros(1, np.uint64), stored_count=np.zeros(1, np.uint64), busy=np.zeros(1, np.int64),
        load=np.zeros(1, np.int64),
    )  # fmt: skip


def _next_blocks(schedule: Schedule, blocks: int) -> npt.NDArray[np.uint32]:
    """``Account.next_block``. What every microbatch receives is there from a block on that runs for each of them."""
    next_block = np.zeros((len(schedule.action_first), blocks), np.uint32)
    each = (schedule.once == 0) & (schedule.last == 0)
    for group, (first, last) in enumerate(zip(schedule.action_first, schedule.action_last, strict=True)):
        runs = np.zeros(blocks, bool)
        for begin, end in zip(schedule.block_first[first:last], schedule.block_last[first:last], strict=True):
            runs[begin:end] = True
        repeated = runs & each if (runs & each).any() else runs
        for among, own in ((runs | ~each, runs), (each & ~runs, repeated)):
            numbers, where = np.flatnonzero(among), np.flatnonzero(own)
            if len(where):
                next_block[group, numbers] = where[np.minimum(np.searchsorted(where, numbers), len(where) - 1)]
    return next_block


def _chunks(schedule: Schedule, blocks: int) -> tuple[Numbers, Numbers]:
    """``Account.chunk_of`` and ``chunk_first``: the blocks of an action are whole chunks."""
    ends = BLOCK_CELLS * np.union1d(schedule.block_first, schedule.block_last).astype(np.int64)
    first = np.union1d(np.arange(0, BLOCK_CELLS * blocks, _CHUNK), ends[ends < BLOCK_CELLS * blocks])
    chunk_of = np.repeat(np.arange(len(first)), np.diff([*first, BLOCK_CELLS * blocks]))
    return chunk_of.astype(np.uint32), np.array([*first, BLOCK_CELLS * blocks], np.uint32)


# ---- units


def make_units(
    graph: OperatorGraph, wiring: Wiring, table: BlockTable, options: Options, shift: int = 0, microbatches: int = 1,
    devices: Sequence[str] = (),
) -> Units:  # fmt: skip
    """The units of a graph whose passes are the blocks of ``table``. ``shift``: samples of the batch from the first
    microbatch of a device to its last one; ``devices``: their kinds."""
    rules = saved_tensors(graph)
    roots, members = _members(graph, [rule.alias for rule in rules])
    number = {name: u for u, names in enumerate(members) for name in names}
    activations = {t.name: k for k, t in enumerate(graph.of_kind("activation"))}
    weights = {t.name: k for k, t in enumerate(graph.of_kind("parameter"))}
    at_hand = {t.name: k for k, t in enumerate(graph.of_kind("input", "buffer", "constant"))}
    views = Rows([activations[name] for name in names if name in activations] for names in members)
    kept, released = kept_weights(graph), released_weights(graph)
    pairs = list(zip(wiring.slot_operator.tolist(), wiring.slot_position.tolist(), strict=True))
    slot, alone = {pair: k for k, pair in enumerate(pairs)}, _only_gradients(graph, kept)
    attend = [attends(op, len(graph.tensor[op.outputs[0]].shape)) for op in graph.operators]
    concerned = Rows(_concerned(graph, number, alone, attend))
    slots = Rows([slot[user] for user in graph.consumers[name]] for name in at_hand)

    def keeps(pair: tuple[int, int]) -> np.uint8:
        return NOT_KEPT if pair not in kept else IN_FIRST_HALF if pair in released else IN_BOTH_HALVES

    tensors = activations | weights | at_hand
    kind = {name: OUTPUT for name in activations} | dict.fromkeys(weights, WEIGHT) | dict.fromkeys(at_hand, AT_HAND)
    parts = [ACTIVATIONS if graph.tensor[name].kind == "input" else WEIGHTS for name in at_hand]
    pictures = _images(graph, at_hand, devices)
    rows_of = rows_per_sample(graph)
    backward = np.where(table.backward_of == NOTHING, table.forward_of, table.backward_of)
    unpack, unpack_again = _unpacked(graph, table, backward, list(weights))
    return Units(
        root=np.array([kind[name] for name in roots], np.uint8),
        tensor=np.array([tensors[name] for name in roots], np.uint32),
        activation_first=views.first, activation_last=views.last, activation=views.all, place=_places(views),
        itemsize=_sizes(graph.tensor[name].itemsize for name in activations),
        concerned_first=concerned.first, concerned_last=concerned.last, concerned=concerned.all,
        saves_inputs=_flags(r.inputs for r in rules), saves_outputs=_flags(r.outputs for r in rules),
        backward=_flags(graph.has_backward), keeps_weight=np.array([keeps(pair) for pair in pairs], np.uint8),
        only_gradient=np.array([NOTHING if (p := alone.get(pair)) is None else slot[p] for pair in pairs], np.uint32),
        output_gradient=_of_outputs(graph, slot, alone),
        is_view=_flags(r.alias for r in rules), hands_on=_flags(op.half == "inputs" for op in graph.operators),
        extra=_sizes(r.extra for r in rules), halves=_sizes(r.halves for r in rules),
        attends=_flags(attend),
        cpu=_flags(device == "cpu" for device in devices),
        weight_itemsize=_sizes(graph.tensor[name].itemsize for name in weights),
        gradient_itemsize=_sizes(graph.gradient[name].itemsize for name in weights),
        shared=_shared(table, [graph.gradient[name].nbytes for name in weights]),
        reader_first=slots.first, reader_last=slots.last, reader=slots.all,
        at_hand_itemsize=_sizes(graph.tensor[name].itemsize for name in at_hand),
        at_hand_image=pictures, at_hand_copied=_flags(bool(row.any()) for row in pictures),
        at_hand_shift=_sizes(shift * rows_of.get(name, 0) for name in at_hand),
        part=np.array(parts, np.uint8),
        state_bytes=_sizes(state_bytes(graph.tensor[name], options.optimizer, options.precision) for name in weights),
        several=_flags([microbatches > 1]),
        backward_block=backward, weight_block=np.where(table.weight_of == NOTHING, backward, table.weight_of),
        once_block=np.where(table.gather_once_of == NOTHING, table.gather_of, table.gather_once_of),
        unpack_block=unpack, unpack_again_block=unpack_again,
    )  # fmt: skip


def _flags(values: Iterable[object]) -> npt.NDArray[np.uint8]:
    """Whether each is true."""
    return np.array([bool(value) for value in values], np.uint8)


def _sizes(values: Iterable[int]) -> npt.NDArray[np.int64]:
    """An array of them."""
    return np.array(list(values), np.int64)


def _places(views: Rows) -> Numbers:
    """``Units.place``."""
    place = np.zeros(len(views.all), np.uint32)
    for first, last in zip(views.first, views.last, strict=True):
        place[views.all[first:last]] = np.arange(last - first)
    return place


def _images(graph: OperatorGraph, names: Iterable[str], devices: Sequence[str]) -> npt.NDArray[np.uint8]:
    """``Units.at_hand_image``."""
    tensors = [graph.tensor[name] for name in names]
    pictures = np.zeros((len(tensors), len(devices)), np.uint8)
    for kind in set(devices):
        alike = [device == kind for device in devices]
        for row, tensor in zip(pictures, tensors, strict=True):
            row[alike] = has_channels_last(len(tensor.shape), tensor.dtype, kind)
    return pictures


def _unpacked(
    graph: OperatorGraph, table: BlockTable, backward: Numbers, weights: Sequence[str]
) -> tuple[Numbers, Numbers]:
    """``Units.unpack_block``, ``unpack_again_block``."""
    last, again = len(table.kind) - 1, np.where(table.recompute_of == NOTHING, backward, table.recompute_of)
    blocks = []
    for read, gathers in ((table.forward_of, table.gather_of), (again, table.regather_of)):
        first: dict[int, int] = {}
        for name, gather in zip(weights, gathers.tolist(), strict=True):
            for i, _ in graph.consumers[name]:
                late = graph.operators[i].half == "weights" and read is table.forward_of
                first[gather] = min(first.get(gather, last), int((backward if late else read)[i]))
        blocks.append(np.array([first.get(gather, last) for gather in gathers.tolist()], np.uint32))
    return blocks[0], blocks[1]


def _shared(table: BlockTable, nbytes: Sequence[int]) -> npt.NDArray[np.uint8]:
    """``Units.shared``. ``nbytes``: of the gradient of each weight. Most is there where a weight's part is cut out that
    is larger than the gradients before it together, which have gone."""
    shared = np.full(len(nbytes), ALONE, np.uint8)
    for first, last in zip(table.member_first, table.member_last, strict=True):
        members = table.member[first:last].tolist()
        if len(members) > 1:
            before = accumulate((nbytes[w] for w in members), initial=0)
            most = max(zip(members, before, strict=False), key=lambda row: nbytes[row[0]] - row[1])[0]
            shared[members] = [CUT_FIRST if w == most else CUT_LATER for w in members]
    return shared


def _members(graph: OperatorGraph, views: Sequence[bool]) -> tuple[list[str], list[list[str]]]:
    """The first tensor of each unit, and all its tensors in topological order: a view belongs to what it is a view
    of."""
    produced = {name for op in graph.operators for name in op.outputs}
    members = {tensor.name: [tensor.name] for tensor in graph.tensors if tensor.name not in produced}
    root = {name: name for name in members}
    for op, view in zip(graph.operators, views, strict=True):
        for name in op.outputs:
            root[name] = root[op.inputs[0]] if view else name
            members.setdefault(root[name], []).append(name)
    return list(members), list(members.values())


def _concerned(
    graph: OperatorGraph, number: Mapping[str, int], alone: Mapping[tuple[int, int], tuple[int, int]],
    attend: Sequence[bool],
) -> list[list[int]]:  # fmt: skip
    """By operator: the units of what it reads and makes, and of the new values of buffers that it reads, as these are
    kept where readers want them; of what is kept for the gradients of what it makes; and of what attention
    (``attend``, by operator) makes the gradients of with those of what it reads or makes."""
    renewed = graph.buffer_updates
    together: dict[str, list[str]] = {}
    for op, one in zip(graph.operators, attend, strict=True):
        for n in op.inputs[:3] if one else ():
            together.setdefault(n, []).extend(op.inputs[:3])
    kept: dict[str, list[str]] = {}
    for (i, p), (_, q) in alone.items():
        op = graph.operators[i]
        kept.setdefault(op.inputs[q], []).extend(op.outputs if p == q else (op.inputs[p],))
    return [
        sorted({
            number[n]
            for n in (
                *op.inputs, *op.outputs, *(renewed[n] for n in op.inputs if n in renewed),
                *(k for n in op.outputs for k in kept.get(n, ())),
                *(k for n in (*op.inputs, *op.outputs) for k in together.get(n, ())),
            )
        })
        for op in graph.operators
    ]  # fmt: skip


def _only_gradients(graph: OperatorGraph, kept: Collection[tuple[int, int]]) -> dict[tuple[int, int], tuple[int, int]]:
    """(operator, operand) of what is kept for the backward pass for the gradient of one operand alone, an activation,
    and that one: weights of products with one other factor, and what operators without weights read."""
    alone = {}
    for i, op in enumerate(graph.operators):
        trained = [p for p, flow in enumerate(graph.flows[i]) if flow != Flow.VALUE]
        produced = [p for p in trained if op.inputs[p] in graph.producer and graph.flows[i][p] == Flow.BOTH]
        if not graph.has_backward[i] or op.half == "weights" or len(produced) != 1:
            continue
        if trained == produced:
            alone[i, produced[0]] = i, produced[0]
        if not kind_of(op).saved_without_weights.inputs:
            weights = [p for p in range(len(op.inputs)) if (i, p) in kept]
            alone.update({(i, p): (i, produced[0]) for p in weights if len(weights) == 1})
    return alone


def _of_outputs(
    graph: OperatorGraph, slot: Mapping[tuple[int, int], int], alone: Mapping[tuple[int, int], tuple[int, int]]
) -> Numbers:
    """``Units.output_gradient``."""
    slots = np.full(len(graph.operators), NOTHING, np.uint32)
    for pair, only in alone.items():
        if pair == only:
            slots[pair[0]] = slot[pair]
    return slots


def _make_spans(graph: OperatorGraph, sources: Sources, devices: int) -> Spans:
    """Room for the spans of the largest unit: on each device, for each slot four of a reshard, four of its gradient's,
    that gradient itself and its message; for each activation its own and what is saved besides; a weight, its state,
    and five of its synchronisation. What is computed or gathered again has spans of its own."""
    units, blocks, wiring, program = sources.units, sources.blocks, sources.wiring, sources.program
    slots = np.zeros(len(units.root), np.int64)
    for u, (root, tensor) in enumerate(zip(units.root, units.tensor, strict=True)):
        if root == WEIGHT:
            slots[u] = program.reader_last[tensor] - program.reader_first[tensor] + 1
        elif root == AT_HAND:
            slots[u] = units.reader_last[tensor] - units.reader_first[tensor]
        for t in units.activation[units.activation_first[u] : units.activation_last[u]]:
            slots[u] += wiring.tensor_last[t] - wiring.tensor_first[t]
            slots[u] += wiring.result_last[t] - wiring.result_first[t] + 1
    passes = 1 if np.all(blocks.recompute_of == NOTHING) and np.all(blocks.regather_of == NOTHING) else 2
    room = int(max(1, (11 * slots + 7).max(initial=1))) * devices * passes
    most = int(max(1, (units.activation_last - units.activation_first).max(initial=1)))
    rank = max((len(tensor.shape) for tensor in graph.tensors), default=1) or 1
    return zeros(
        Spans, devices, device=room, first=room, last=room, nbytes=room, part=room, size=1, output=(most, devices),
        arrived=(most, devices), again=(most, devices), low=(devices, rank), high=(devices, rank),
    )  # fmt: skip
