"""The part of a task graph that no config changes: which blocks there are, in which order, and which slots belong to
which tensor. The order is that of :mod:`flexsearch.lower.lowering`, which says why; a test compares them task by task.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from flexsearch.cost import Costs
from flexsearch.graph import OperatorGraph
from flexsearch.lower import Lowering
from flexsearch.lower.arrays import BACKWARD, FORWARD, GATHER, SECOND, STRIDE, SYNCHRONISE, UPDATE, Program
from flexsearch.lower.change import ALWAYS, Wiring
from flexsearch.lower.keys import MISSING, RESHARD
from flexsearch.lower.lowering import everywhere, schedule
from flexsearch.strategy import Options
from flexsearch.topology import Topology

U32 = npt.NDArray[np.uint32]


class Rows:
    """Lists of numbers, one for each item, laid end to end."""

    def __init__(self, rows: Iterable[Sequence[int]]) -> None:
        found = [list(row) for row in rows]
        ends = np.cumsum([0, *map(len, found)]).astype(np.uint32)
        self.first, self.last = ends[:-1].copy(), ends[1:].copy()
        self.all = np.array([x for row in found for x in row], dtype=np.uint32)


def _slots(graph: OperatorGraph) -> tuple[Rows, dict[tuple[int, int], int], int]:
    """Operands' slots by operator, slot by (operator, position), and the first slot of results."""
    count, slot = 0, {}
    rows = []
    for i, op in enumerate(graph.operators):
        rows.append(range(count, count + len(op.inputs)))
        slot.update({(i, p): count + p for p in range(len(op.inputs))})
        count += len(op.inputs)
    return Rows(rows), slot, count


def _results(graph: OperatorGraph, first: int) -> dict[str, list[int]]:
    """Slots of results by tensor: the loss, then new values of buffers."""
    found: dict[str, list[int]] = {}
    for k, name in enumerate((graph.loss, *graph.buffer_updates.values())):
        found.setdefault(name, []).append(first + k)
    return found


def _flow(graph: OperatorGraph, name: str, operator: int) -> bool:
    """Whether a reader of a tensor makes a gradient of it."""
    return name in graph.differentiable and graph.has_backward[operator]


def make_program(
    graph: OperatorGraph, topology: Topology, lowering: Lowering, costs: Costs, options: Options
) -> Program:
    """Blocks and slots of a graph's plans."""
    operands, slot, count = _slots(graph)
    results = _results(graph, count)
    parameters = graph.of_kind("parameter")
    made = Rows(
        [s for name in op.outputs for s in [*(slot[c] for c in graph.consumers[name]), *results.get(name, ())]]
        for op in graph.operators
    )
    readers = Rows([slot[c] for c in graph.consumers[t.name]] for t in parameters)
    blocks = [(GATHER, w) for w in range(len(parameters))] + [(FORWARD, i) for i in range(len(graph.operators))]
    backward, buckets = _backward(graph, lowering.buckets(options.bucket_bytes))
    blocks += [*backward, (SECOND, 0), (UPDATE, 0)]
    members = Rows(buckets)
    flows = [_flow(graph, name, i) for i, op in enumerate(graph.operators) for name in op.inputs]
    place = {block: k for k, block in enumerate(blocks)}
    rates = [costs.update_rates(d, options.optimizer) for d in range(len(topology.devices))]
    turns = np.array(lowering.turns)
    communication = topology.communication
    busy = 2.0 if np.isfinite(turns).any() else float(communication.cpu_s_per_byte > 0.0)
    return Program(
        kind=np.array([kind for kind, _ in blocks], np.uint8),
        argument=np.array([argument for _, argument in blocks], np.uint32),
        operand_first=operands.first, operand_last=operands.last,
        result_first=made.first, result_last=made.last, result=made.all,
        flows=np.array(flows + [False] * sum(map(len, results.values())), np.uint8),
        reader_first=readers.first, reader_last=readers.last, reader=readers.all,
        bucket_first=members.first, bucket_last=members.last, member=members.all,
        processor=np.array(topology.processor_of, np.uint32),
        bandwidth=np.array([r.bandwidth or 0.0 for r in topology.resources], np.float64),
        turn=turns,
        update_byte_s=np.array([b for b, _ in rates]), update_tensor_s=np.array([t for _, t in rates]),
        row_stride=_row_strides(graph, place, buckets),
        routes=topology.routes, rates=lowering.planner.pricing.rates,
        scalars=np.array(
            [communication.overhead_s, communication.cpu_s_per_byte, busy, max(4, 2 * len(topology.devices))]
        ),  # of a weight each device sends at most two messages that go alone
    )  # fmt: skip


def _row_strides(graph: OperatorGraph, place: Mapping[tuple[int, int], int], buckets: list[list[int]]) -> U32:
    """By row, where things arrive: the STRIDE of the block that sends them. An operand's or result's from its producer,
    the gradients of operands and results from their readers, the first phases of weights' synchronisation."""
    weights = {t.name: w for w, t in enumerate(graph.of_kind("parameter"))}
    sent, returned = [], []
    for i, op in enumerate(graph.operators):
        for name in op.inputs:
            made = (FORWARD, graph.producer[name]) if name in graph.producer else (GATHER, weights.get(name, 0))
            sent.append(place.get(made, 0))
            returned.append(place.get((BACKWARD, i), 0))
    for name in (graph.loss, *graph.buffer_updates.values()):
        sent.append(place.get((FORWARD, graph.producer.get(name, 0)), 0))
        returned.append(0)
    return np.array([*sent, *returned, *_sync_blocks(place, buckets, len(weights))], np.uint32) // np.uint32(STRIDE)


def _sync_blocks(place: Mapping[tuple[int, int], int], buckets: list[list[int]], weights: int) -> list[int]:
    """By weight: the block that starts its synchronisation; of those that have none, the last."""
    found = [max(place.values())] * weights
    for bucket, members in enumerate(buckets):
        for w in members:
            found[w] = place[SYNCHRONISE, bucket]
    return found


def _backward(graph: OperatorGraph, bucket_of: dict[str, int]) -> tuple[list[tuple[int, int]], list[list[int]]]:
    """Blocks of the backward pass, and the weights of each bucket in the order of completion."""
    blocks: list[tuple[int, int]] = []
    done: list[list[int]] = []
    for operator, buckets in schedule(graph, bucket_of):
        blocks.append((BACKWARD, operator))
        blocks += [(SYNCHRONISE, len(done) + k) for k in range(len(buckets))]
        done += buckets
    return blocks, done


def make_wiring(graph: OperatorGraph, topology: Topology, lowering: Lowering, program: Program) -> Wiring:
    """Which slots belong to which tensors of a graph."""
    _, slot, count = _slots(graph)
    results = _results(graph, count)
    parameters = {t.name: w for w, t in enumerate(graph.of_kind("parameter"))}
    buffers = {name: b for b, name in enumerate(graph.buffer_updates)}
    activations = {t.name: k for k, t in enumerate(graph.of_kind("activation"))}
    kinds, tensors, operators, positions = [], [], [], []
    for i, op in enumerate(graph.operators):
        for p, name in enumerate(op.inputs):
            kind = 1 if name in activations else 2 if name in parameters else 3 if name in buffers else 0
            kinds.append(kind)
            tensors.append((activations, parameters, buffers)[kind - 1][name] if kind else 0)
            operators.append(i)
            positions.append(p)
    loose = sum(map(len, results.values()))
    consumers = Rows([slot[c] for c in graph.consumers[name]] for name in activations)
    kept = Rows(results.get(name, ()) for name in activations)
    owner = {count: int(ALWAYS)} | {count + 1 + b: b for b in range(len(buffers))}
    producer = [graph.producer[name] for name in activations]
    outputs = [graph.operators[p].outputs.index(name) for p, name in zip(producer, activations, strict=True)]
    made = Rows([activations[name] for name in op.outputs] for op in graph.operators)
    read = Rows([slot[c] for c in graph.consumers[name]] for name in buffers)
    replaced = [activations.get(name, int(MISSING)) for name in graph.buffer_updates.values()]
    blocks = list(zip(program.kind.tolist(), program.argument.tolist(), strict=True))
    members = [
        program.member[first:last].tolist()
        for first, last in zip(program.bucket_first, program.bucket_last, strict=True)
    ]
    place = {block: k for k, block in enumerate(blocks)}

    def numbers(values: Iterable[int]) -> U32:
        return np.array(list(values), dtype=np.uint32)

    return Wiring(
        slot_operator=numbers([*operators, *[int(ALWAYS)] * loose]), slot_position=numbers([*positions, *[0] * loose]),
        slot_tensor=numbers([*tensors, *[0] * loose]), slot_kind=np.array([*kinds, *[0] * loose], np.uint8),
        tensor_producer=numbers(producer), tensor_output=numbers(outputs),
        tensor_tag=np.array([RESHARD + graph.tensor[name].itemsize.bit_length() - 1 for name in activations], np.uint8),
        tensor_first=consumers.first, tensor_last=consumers.last, tensor_slot=consumers.all,
        result_first=kept.first, result_last=kept.last, result_slot=kept.all,
        result_buffer=numbers(owner[int(s)] for s in kept.all),
        made_first=made.first, made_last=made.last,
        buffer_first=read.first, buffer_last=read.last, buffer_slot=read.all, buffer_result=numbers(replaced),
        everywhere=numbers([lowering.intern(everywhere(topology))]),
        forward_block=numbers(place[FORWARD, i] for i in range(len(graph.operators))),
        backward_block=numbers(place.get((BACKWARD, i), place[FORWARD, i]) for i in range(len(graph.operators))),
        gather_block=numbers(place[GATHER, w] for w in range(len(parameters))),
        sync_block=numbers(_sync_blocks(place, members, len(parameters))),
    )  # fmt: skip
