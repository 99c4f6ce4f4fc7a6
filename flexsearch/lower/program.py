"""What no config changes, as arrays: slots and tensors, blocks, and what the engine needs of a topology."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from math import inf
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from flexsearch.cost import Costs
from flexsearch.cost.ticks import LAUNCH_PARTS, TICK
from flexsearch.graph import Flow, OperatorGraph
from flexsearch.lower.arrays import NOTHING, BlockTable, Program
from flexsearch.lower.change import ALWAYS, Wiring
from flexsearch.lower.keys import MISSING, RESHARD
from flexsearch.lower.moves import SHARED
from flexsearch.lower.orbits import images_of
from flexsearch.lower.pieces import Pieces
from flexsearch.lower.reading import make_read_table
from flexsearch.lower.rows import (
    BACKWARD,
    FORWARD,
    GATHER,
    GATHER_ONCE,
    NEVER,
    READ,
    RECOMPUTE,
    REGATHER,
    RESULT,
    SYNCHRONISE,
    UPDATE,
    WEIGHT_GRADIENT,
    Machine,
)
from flexsearch.lower.schedule import EACH, ONCE, Blocks, Stages
from flexsearch.strategy import Options
from flexsearch.strategy.records import SynchroniseBy
from flexsearch.topology import Topology

U32 = npt.NDArray[np.uint32]


class Rows:
    """Lists of numbers, one for each item, laid end to end."""

    def __init__(self, rows: Iterable[Sequence[int]]) -> None:
        lists = [list(row) for row in rows]
        ends = np.cumsum([0, *map(len, lists)]).astype(np.uint32)
        self.first, self.last = ends[:-1].copy(), ends[1:].copy()
        self.all = np.array([x for row in lists for x in row], dtype=np.uint32)

    def row(self, item: int) -> list[int]:
        """The list of an item."""
        values: list[int] = self.all[self.first[item] : self.last[item]].tolist()
        return values


def numbers(values: Iterable[int]) -> U32:
    """An array of them; NOTHING for those below 0."""
    return np.array([value if value >= 0 else int(NOTHING) for value in values], np.uint32)


def _slots(graph: OperatorGraph) -> tuple[Rows, dict[tuple[int, int], int], int]:
    """Operands' slots by operator, slot by (operator, position), and the first slot of results."""
    count, slot = 0, {}
    rows = []
    for i, op in enumerate(graph.operators):
        rows.append(range(count, count + len(op.inputs)))
        slot.update({(i, p): count + p for p in range(len(op.inputs))})
        count += len(op.inputs)
    return Rows(rows), slot, count


def _results(lowering: Pieces, first: int) -> dict[str, list[int]]:
    """Slots of results by tensor: what a step returns, the loss (or outputs), then new values of buffers."""
    slots: dict[str, list[int]] = {}
    for k, name in enumerate((*lowering.results, *lowering.graph.buffer_updates.values())):
        slots.setdefault(name, []).append(first + k)
    return slots


def make_program(
    graph: OperatorGraph, topology: Topology, lowering: Pieces, options: Options, microbatches: int
) -> Program:
    """Slots of a graph's plans, and rates."""
    operands, slot, count = _slots(graph)
    results = _results(lowering, count)
    output_slots, read = _written(graph, slot, results), _read(graph, slot)
    flows = [int(flow) for row in graph.flows for flow in row]
    rates = [lowering.costs.update_rates(d, options.optimizer, options.precision) for d in range(len(topology.devices))]
    return Program(
        operand_first=operands.first, operand_last=operands.last,
        result_first=output_slots.first, result_last=output_slots.last, result=output_slots.all,
        flows=np.array(flows + [int(Flow.VALUE)] * sum(map(len, results.values())), np.uint8),
        late=np.array([op.half == "weights" for op in graph.operators], np.uint8),
        reader_first=read.first, reader_last=read.last, reader=read.all,
        processor=np.array(topology.processor_of, np.uint32),
        bandwidth=np.array([r.bandwidth or 0.0 for r in topology.resources], np.float64),
        update_byte_s=np.array([b for b, _ in rates]), update_tensor_s=np.array([t for _, t in rates]),
        routes=lowering.network.routes, rates=lowering.planner.pricing.rates, image=lowering.image,
        images=images_of(lowering.image), microbatches=np.array([microbatches], np.uint32),
        sums=np.array([sums_of(options)]),
        reading=make_read_table(
            graph, topology, lowering.readers, microbatches, lowering.inside, lowering.replicas
        ),
    )  # fmt: skip


def sums_of(options: Options) -> Any:
    """How a plan's gradients are summed, as ``moves.SHARED`` and following."""
    return SHARED + np.uint64(get_args(SynchroniseBy).index(options.synchronise_by))


def _written(graph: OperatorGraph, slot: dict[tuple[int, int], int], results: dict[str, list[int]]) -> Rows:
    """By operator: slots of those that read its outputs, output by output."""
    return Rows(
        [s for name in op.outputs for s in [*(slot[c] for c in graph.consumers[name]), *results.get(name, ())]]
        for op in graph.operators
    )


def _inside(graph: OperatorGraph, slot: dict[tuple[int, int], int], region: Sequence[int]) -> Rows:
    """By operator: slots of those that read its outputs in the same checkpointed region."""
    return Rows(
        [slot[c] for name in op.outputs for c in graph.consumers[name] if region[c[0]] == region[i] >= 0]
        for i, op in enumerate(graph.operators)
    )


def _read(graph: OperatorGraph, slot: dict[tuple[int, int], int]) -> Rows:
    """By weight: its readers' slots."""
    return Rows([slot[c] for c in graph.consumers[t.name]] for t in graph.of_kind("parameter"))


def make_machine(topology: Topology, turns: Sequence[float], network: Topology, image: U32) -> Machine:
    """Devices and resources of a topology. ``turns``: seconds of a turn of each device, infinite if it takes none.
    ``network``: the whole of which the topology is a block, ``image``: by resource of it, the topology's."""
    users = Counter(topology.processor_of)
    slowing = round(1024 * (1.0 - 1.0 / topology.communication.busy_factor))
    contended = max(users.values()) > 1 or topology.communication.takes_cpu or slowing > 0
    slowed: list[list[int]] = [[] for _ in topology.devices]
    # Of a link that stands for several, one: as many devices slow it as that one, perhaps at the same place in blocks.
    stands = set(np.unique(image, return_index=True)[1].tolist()) if slowing else set()
    for d, processor in enumerate(network.processor_of if slowing else ()):
        links = network.links_of_processors.get(processor, ())
        slowed[d % len(slowed)] += [int(image[link]) for link in links if link in stands]
    return Machine(
        processor=np.array(topology.processor_of, np.uint32),
        turn=np.array([NEVER if s == inf else round(s / TICK) for s in turns], np.int64),
        contended=np.array([contended], np.uint8),
        hosted=np.array([any(device.launch_s > 0.0 for device in topology.devices)], np.uint8),
        resources=np.array([len(topology.resources)], np.uint32),
        slowing=np.array([slowing], np.int64),
        slows=np.cumsum([0, *map(len, slowed)]).astype(np.uint32),
        slowed=np.array([link for row in slowed for link in row], np.uint32),
    )  # fmt: skip


def make_wiring(graph: OperatorGraph, lowering: Pieces) -> Wiring:
    """Which slots belong to which tensors of a graph."""
    _, slot, count = _slots(graph)
    results = _results(lowering, count)
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
    owner = [int(ALWAYS)] * len(lowering.results) + list(range(len(buffers)))
    needs = [lowering.intern(need) for need in lowering.results.values()] + [0] * len(buffers)
    producer = [graph.producer[name] for name in activations]
    outputs = [graph.operators[p].outputs.index(name) for p, name in zip(producer, activations, strict=True)]
    output_tensors = Rows([activations[name] for name in op.outputs] for op in graph.operators)
    read = Rows([slot[c] for c in graph.consumers[name]] for name in buffers)
    replaced = [activations.get(name, int(MISSING)) for name in graph.buffer_updates.values()]

    return Wiring(
        slot_operator=numbers([*operators, *[int(ALWAYS)] * loose]), slot_position=numbers([*positions, *[0] * loose]),
        slot_tensor=numbers([*tensors, *[0] * loose]), slot_kind=np.array([*kinds, *[0] * loose], np.uint8),
        tensor_producer=numbers(producer), tensor_output=numbers(outputs),
        tensor_tag=np.array([RESHARD + graph.tensor[name].itemsize.bit_length() - 1 for name in activations], np.uint8),
        tensor_first=consumers.first, tensor_last=consumers.last, tensor_slot=consumers.all,
        result_first=kept.first, result_last=kept.last, result_slot=kept.all,
        result_buffer=numbers(owner[int(s) - count] for s in kept.all),
        output_first=output_tensors.first, output_last=output_tensors.last,
        buffer_first=read.first, buffer_last=read.last, buffer_slot=read.all, buffer_result=numbers(replaced),
        result_need=numbers(needs[int(s) - count] for s in kept.all),
        weight_type=numbers(lowering.weight_types[graph.tensor[name].dtype] for name in parameters),
    )  # fmt: skip


def _launches(
    costs: Costs, options: Options, kind: int, operator: int, blocks: Collection[tuple[int, int]]
) -> float:  # fmt: skip
    """Of each computation of a block, one of ``blocks`` (kind and argument); of an update, for each tensor: PyTorch's
    optimizers have kernels for many tensors at once, but list them one by one."""
    if kind == UPDATE:
        return costs.update_launches(options.optimizer, options.precision)
    if kind not in (FORWARD, BACKWARD, RECOMPUTE, WEIGHT_GRADIENT):
        return 0
    forward, backward, weights = costs.launches(operator)
    if kind == WEIGHT_GRADIENT:
        return weights
    if kind == BACKWARD:
        return backward - weights if (WEIGHT_GRADIENT, operator) in blocks else backward
    return forward


def make_block_table(
    lowering: Pieces, blocks: Blocks, stages: Stages, devices: int, options: Options
) -> BlockTable:  # fmt: skip
    """The blocks of a graph as arrays."""
    graph = lowering.graph
    place = {block: b for b, block in enumerate(zip(blocks.kind, blocks.argument, strict=True))}
    sent, (forward, backward, again, kept) = _sent(lowering, blocks, place)
    bucket, each = _buckets(blocks, len(graph.of_kind("parameter")))
    runs = np.zeros((len(stages) + 1, devices), np.uint8)
    runs[-1] = 1
    for stage, of in enumerate(stages.devices):
        runs[stage, list(of)] = 1
    member, operators = Rows(blocks.buckets), range(len(graph.operators))
    sync = [place[SYNCHRONISE, n] for n in range(len(blocks.starts))]

    def by_operator(kind: int) -> U32:
        return numbers(place.get((kind, i), -1) for i in operators)

    def by_weight(kind: int) -> U32:
        block_of = {w: place.get((kind, p), -1) for p, pack in enumerate(blocks.packs) for w in pack}
        return numbers(block_of[w] for w in range(len(bucket)))

    def by_bucket(of: Sequence[int]) -> U32:
        block_of = {number: sync[n] for n, number in enumerate(of)}
        return numbers(block_of[number] for number in range(len(blocks.buckets)))

    costs, by_device = lowering.costs, lowering.topology.devices
    launch = np.array([round(costs.launch_s(d) / (LAUNCH_PARTS * TICK)) for d in range(devices)], np.int64)
    return BlockTable(
        launch=launch, issue=LAUNCH_PARTS * launch * np.array([d.launched.communication for d in by_device], np.int64),
        kind=np.array(blocks.kind, np.uint8), argument=numbers(blocks.argument),
        launches=numbers(
            round(LAUNCH_PARTS * _launches(costs, options, k, a, place))
            for k, a in zip(blocks.kind, blocks.argument, strict=True)
        ),
        sent_first=sent.first, sent_last=sent.last, sent=sent.all,
        stage=numbers(stage if stage >= 0 else len(stages) for stage in blocks.stage), runs=runs.ravel(),
        forward=forward, backward=backward, again=again, kept=kept,
        forward_of=by_operator(FORWARD), backward_of=by_operator(BACKWARD), weight_of=by_operator(WEIGHT_GRADIENT),
        halved=np.array([stages.splits(stage) for stage in stages.of(len(operators))], np.uint8),
        recompute_of=by_operator(RECOMPUTE),
        read_of=numbers(place[READ, 0] if i in lowering.readers else -1 for i in operators),
        region=numbers(blocks.region),
        gather_of=by_weight(GATHER), regather_of=by_weight(REGATHER), gather_once_of=by_weight(GATHER_ONCE),
        bucket=bucket, each=each,
        starts=numbers(blocks.starts), finishes=numbers(blocks.finishes), block=numbers(sync),
        member_first=member.first, member_last=member.last, member=member.all, sums=np.array(blocks.sums, np.uint8),
        started_by=by_bucket(blocks.starts), finished_by=by_bucket(blocks.finishes),
        added_by=numbers(block if block >= 0 else len(blocks) - 1 for block in blocks.added),
    )  # fmt: skip


def _sent(lowering: Pieces, blocks: Blocks, place: Mapping[tuple[int, int], int]) -> tuple[Rows, tuple[U32, ...]]:
    """By block, the slots that it sends to; and by slot, the block that sends there forward, backward, again, and
    once for all microbatches. ``place``: of each block, by kind and argument."""
    graph = lowering.graph
    operands, slot, count = _slots(graph)
    results = _results(lowering, count)
    read, output_slots = _read(graph, slot), _written(graph, slot, results)
    returned = range(count, count + len(lowering.results))
    sent_at_once = Rows([s for s in output_slots.row(i) if s not in returned] for i in range(len(graph.operators)))
    packed = Rows([slot for w in pack for slot in read.row(w)] for pack in blocks.packs)
    of_kind = {
        GATHER: packed, FORWARD: sent_at_once, BACKWARD: operands, RECOMPUTE: _inside(graph, slot, blocks.region),
        REGATHER: packed, GATHER_ONCE: packed, RESULT: Rows([returned]),
    }  # fmt: skip
    forward, backward, again, kept = (np.full(count + sum(map(len, results.values())), NOTHING) for _ in range(4))
    by_kind = {BACKWARD: backward, RECOMPUTE: again, REGATHER: again, GATHER_ONCE: kept}
    for (kind, a), b in place.items():
        if kind in of_kind:
            by_kind.get(kind, forward)[of_kind[kind].row(a)] = b
    sent = Rows(of_kind[k].row(a) if k in of_kind else () for k, a in zip(blocks.kind, blocks.argument, strict=True))
    return sent, (forward, backward, again, kept)


def _buckets(blocks: Blocks, weights: int) -> tuple[U32, U32]:
    """By weight: its bucket of sums over all microbatches, and that of each microbatch's own."""
    once, each = (np.full(weights, NOTHING) for _ in range(2))
    for number, (members, sums) in enumerate(zip(blocks.buckets, blocks.sums, strict=True)):
        if sums != EACH:
            once[members] = number
        if sums != ONCE:
            each[members] = number
    return once, each
