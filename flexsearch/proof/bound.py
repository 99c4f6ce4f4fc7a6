"""A lower bound on the iteration time of every legal plan, not only of those that a search has seen.

For each number m of devices that a plan may use, the bound is the largest of four; the result is the smallest over m:

- **critical path**: each piece of an operator needs something from each producer, so the shortest possible pieces along
  any path through the forward and backward pass add up. Splitting over m devices limits how short pieces can be.
- **work**: the total compute time, with the split that makes it smallest, divided among m processors. Where devices
  differ, a linear program shares the work out among kinds of processors. Its dual gives the bound: any prices of the
  processors prove one, and the code searches for good prices.
- **launches**: hosts launch every task of every operator at least once per microbatch. Among m devices, some host takes
  its share of that.
- **links**: the loss must reach every device that does not make it.

The proof uses only that a task takes at least its duration, starts after its dependencies and its launch, and has its
processor to itself. Contention, latency, the order of events, stages and recomputation can only make a plan slower.

Microbatches split the sample axes in time. The work of an operator is then that of the pieces of all its microbatches,
each of which costs its share of the iteration space at least ``Least.work`` seconds, so that their sum is the bound as
before, with shorter pieces to choose from. Along a path the pieces of one microbatch add up, and every microbatch goes
along every path. So both arguments hold with pieces whose sample axes are divided by the number of microbatches, too.
A schedule that puts off the gradients of weights shortens the path: of the backward tasks along it, only the part that
makes other gradients counts then (``split_backward``).

For a search that chooses the number of microbatches, and the schedule, only work, launches (of one microbatch) and
links count. A piece may then have any number of samples, whether samples are divided among devices or in time. To keep
the pieces few, lengths that are nearly the same are taken together; a row then has the seconds of the shortest of its
pieces and the share of the longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

import numpy as np
import numpy.typing as npt

from flexsearch.cost import Costs, Profile
from flexsearch.cost.communication import least_seconds
from flexsearch.cost.ticks import TICK
from flexsearch.graph import Operator, OperatorGraph, whole_piece
from flexsearch.graph.notation import Box, Operand
from flexsearch.strategy import Options
from flexsearch.topology import Device, Topology

Column = npt.NDArray[np.float64]
"""Seconds by number of devices: entry m - 1 holds for plans that use at most m."""

ROUNDING: Final = 1.0 - 1e-9
"""Allows for rounding: the simulator adds in another order, which changes sums over a million tasks by less."""
UPDATE_ROUNDING: Final = TICK / 2
"""By how much a device's update, the nearest whole number of ticks, may be shorter than its weights' together, s."""
OCTAVE: Final = 64
"""Pieces of so many indices or fewer are looked at one by one; larger ones, if they may have any size, to 1 in 64."""
EXACT: Final = 16
"""Where the number of microbatches is open, pieces of axes in so many parts or fewer are looked at one by one, others
to 1 in so many: the bound of Llama 3 405B on 512 devices takes 2 s."""
PRICE_STEPS: Final = (2.0, 1.4, 1.1, 1.03)
"""Factors by which the prices of processors are changed."""


@dataclass(frozen=True)
class Bound:
    """No legal plan takes less than ``seconds``. ``parts``: what each argument proves by itself ("critical path",
    "work", "launches", "links"), for plans on ``devices`` devices, the number for which least can be proved;
    ``decides``: the largest of them."""

    seconds: float
    parts: dict[str, float]
    decides: str
    devices: int


@dataclass(frozen=True)
class Least:
    """The least that an operator costs. By kind of device: ``forward``, ``backward``: shortest piece (s); ``onward``:
    of its backward task what must end before those of its producers begin; ``work``: seconds of all pieces together."""

    forward: npt.NDArray[np.float64]
    backward: npt.NDArray[np.float64]
    onward: npt.NDArray[np.float64]
    work: npt.NDArray[np.float64]


def lower_bound(
    graph: OperatorGraph, topology: Topology, costs: Costs, options: Options | None = None,
    microbatches: int | None = 1, split_backward: bool = False,
) -> Bound:  # fmt: skip
    """A time (s) below that of every legal plan of ``graph`` on ``topology`` under ``options`` with this number of
    ``microbatches`` (None: any number, in any schedule); buckets of any size. ``split_backward``: also of plans whose
    schedule splits backward passes."""
    options = options or Options()
    count = len(topology.devices)
    kinds = device_kinds(topology.devices)
    least = _least(graph, costs, kinds, count, microbatches, split_backward)
    columns = {
        "work": _work(graph, topology, costs, options, least, kinds),
        "launches": _launches(graph, topology, costs, options, microbatches),
        "links": _loss_everywhere(topology, costs.profile),
    }
    if microbatches is not None:
        columns["critical path"] = _critical_path(graph, topology, costs, options, least, kinds)
    together = np.max(list(columns.values()), axis=0)
    at = int(np.argmin(together))
    parts = {name: float(column[at]) * ROUNDING for name, column in columns.items()}
    decides = max(parts, key=parts.__getitem__)
    return Bound(parts[decides], parts, decides, at + 1)


def device_kinds(devices: Sequence[Device]) -> list[list[int]]:
    """Devices that compute equally fast, together."""
    kinds: dict[object, list[int]] = {}
    for k, d in enumerate(devices):
        key = d.kind, d.model, tuple(sorted(d.flops.items())), d.memory_bandwidth, d.overhead_s
        kinds.setdefault(key, []).append(k)
    return list(kinds.values())


def _least(
    graph: OperatorGraph, costs: Costs, kinds: Sequence[Sequence[int]], count: int,
    microbatches: int | None, split: bool,
) -> list[Least]:  # fmt: skip
    """For each operator; repeated layers are worked out once. Arrays: (kinds, count)."""
    devices, of_leader = [kind[0] for kind in kinds], dict[int, Least]()
    for leader in costs.alike:
        if leader not in of_leader:
            op = graph.operators[leader]
            of_leader[leader] = least_costs(op, leader, costs, devices, count, microbatches, split)
    return [of_leader[leader] for leader in costs.alike]


def least_costs(
    op: Operator, operator: int, costs: Costs, devices: Sequence[int], count: int, microbatches: int | None = 1,
    split: bool = False,
) -> Least:  # fmt: skip
    """Over all pieces of all configs on at most m devices, m from 1 to ``count``; rows: ``devices``, one of each kind.
    Samples are shared out unequally only where there are several. ``split``: backward tasks may be."""
    extents, parts, share = piece_extents(op, count, microbatches, len(devices) > 1)
    columns = [extents[axis].tolist() for axis in op.access.axes]
    pieces = list(zip(*columns, strict=True)) if columns else [()] * len(parts)
    rows = []
    for device in devices:
        forward, backward = costs.compute_many(operator, extents, device)
        onward = backward
        if split:  # the first stage's are whole
            onward = np.minimum(onward, costs.halves(operator, pieces, int(costs.kinds[device]))[0])
        least = []
        for seconds in (forward, backward, onward, (forward + backward) / share):
            column = np.full(count, np.inf)
            np.minimum.at(column, parts - 1, seconds)
            least.append(np.minimum.accumulate(column))
        rows.append(least)
    table: npt.NDArray[np.float64] = np.array(rows)
    return Least(*(table[:, k] for k in range(4)))


def piece_extents(
    op: Operator, count: int, microbatches: int | None = 1, any_share: bool = False
) -> tuple[dict[str, npt.NDArray[np.int64]], npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """All extents that pieces of one microbatch can have on at most ``count`` devices: an array for every axis, how
    many parts the operator is split into at least (microbatches not counted), and which share of its iteration space a
    piece is (where a row stands for several pieces, the shortest and the largest share). ``any_share``: samples may be
    shared out unequally."""
    parts, pieces, share = np.ones(1, np.int64), np.ones((1, 0), np.int64), np.ones(1)
    for axis in op.splittable:
        sample, size = op.roles[axis] == "sample", op.sizes[axis]
        if microbatches is None and not (sample and any_share):
            length, most, cut = _rough_lengths(size, count, sample)
        else:
            each = microbatches if sample else 1
            length, most, cut = _lengths(size, count, each, sample and any_share)
        fits = parts[:, None] * cut <= count
        row, column = np.nonzero(fits)
        pieces = np.column_stack((pieces[row], length[column]))
        parts, share = parts[row] * cut[column], share[row] * most[column] / size
    extents = {a: np.full(len(parts), n, dtype=np.int64) for a, n in op.sizes.items()}
    extents |= {a: pieces[:, k] for k, a in enumerate(op.splittable)}
    return extents, parts, share


def _lengths(
    size: int, count: int, microbatches: int | None, any_share: bool
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Indices of an axis that a piece may have; to how many a row stands for; and in how many parts the axis then is at
    least. An axis of n indices in d equal parts of one of M microbatches has pieces of n // (d M) or one more indices,
    whichever way the remainders fall. In parts of any size, pieces have any number; of many nearly equal numbers one
    row has the smallest, which costs least. With an open number of microbatches, time alone can divide the axis."""
    if any_share:
        whole = max(1, size // microbatches) if microbatches is not None else 1
        most = whole + (size % microbatches > 0) if microbatches is not None else size
        starts, low = [np.arange(1, min(most, OCTAVE) + 1)], OCTAVE + 1
        while low <= most:  # ``OCTAVE`` rows up to twice as much
            step = low // OCTAVE
            starts.append(np.arange(low, min(most, 2 * low) + 1, step))
            low = int(starts[-1][-1]) + step
        length = np.unique(np.concatenate((*starts, [whole])))
        return length, np.concatenate((length[1:] - 1, [most])), np.where(length >= whole, 1, 2)
    assert microbatches is not None
    degree = np.arange(1, max(1, min(-(-size // microbatches), count)) + 1)
    low_ones = np.maximum(size // (degree * microbatches), 1)
    longer = (size > low_ones) & (size % (degree * microbatches) > 0)
    length = np.concatenate((low_ones, low_ones[longer] + 1))
    return length, length, np.concatenate((degree, degree[longer]))


@cache
def _rough_lengths(
    size: int, count: int, sample: bool
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The same of an axis in equal parts: up to ``count`` on as many devices, or, of samples, any number one after the
    other. Lengths that are nearly the same are taken together."""
    parts = np.arange(max(1, size if sample else min(size, count)), 0, -1)
    lengths, cuts = np.concatenate((size // parts, -(-size // parts))), np.tile(parts, 2)
    order = np.lexsort((cuts, lengths))
    lengths, first = np.unique(lengths[order], return_index=True)
    cuts = cuts[order][first]  # the fewest parts of this length
    begins, at = [0], 0
    while at < len(lengths):
        alone = int(cuts[at]) <= EXACT
        at = at + 1 if alone else int(np.searchsorted(lengths * EXACT, int(lengths[at]) * (EXACT + 1)))
        begins.append(at)
    ends = np.array(begins[1:]) - 1
    return lengths[begins[:-1]], lengths[ends], np.ones_like(ends) if sample else cuts[ends]


def _critical_path(
    graph: OperatorGraph, topology: Topology, costs: Costs, options: Options, least: Sequence[Least],
    kinds: Sequence[Sequence[int]],
) -> Column:  # fmt: skip
    """The longest path, by number of devices."""
    zero = np.zeros(len(topology.devices))
    forward = [row.forward.min(axis=0) for row in least]
    backward, onward = [row.backward.min(axis=0) for row in least], [row.onward.min(axis=0) for row in least]
    # ``any_end``: when the first piece of an operator can have ended; ``all_end``: when every element of its outputs
    # has been computed somewhere.
    any_end, all_end = [zero] * len(least), [zero] * len(least)
    for i, op in enumerate(graph.operators):
        ready = complete = zero
        for p, name in enumerate(op.inputs):
            if (producer := graph.producer.get(name)) is None:
                continue
            if always_read(op, op.access.inputs[p], graph.tensor[name].shape):
                ready = np.maximum(ready, any_end[producer])
            if _region(graph, i, p) == _full(graph, name):
                complete = np.maximum(complete, all_end[producer])
        any_end[i] = ready + forward[i]
        all_end[i] = np.maximum(ready, complete) + forward[i]
    last: Column = np.max(all_end, axis=0)
    # ``back``: when the first piece can have made the gradients that others wait for; ``whole``: all of them.
    back, whole = [zero] * len(least), [zero] * len(least)
    for i in reversed(range(len(least))):
        if graph.has_backward[i]:
            ready = any_end[i]
            for name in graph.operators[i].outputs:
                ready = np.maximum(ready, _gradient(graph, name, back, zero))
            back[i], whole[i] = ready + onward[i], ready + backward[i]
            last = np.maximum(last, whole[i])
    rates = [costs.update_rates(kind[0], options.optimizer, options.precision) for kind in kinds]
    for tensor in graph.of_kind("parameter"):
        if tensor.name in graph.differentiable:
            update = min(per_tensor + tensor.itemsize * per_byte for per_byte, per_tensor in rates)
            last = np.maximum(last, _gradient(graph, tensor.name, whole, zero) + update - UPDATE_ROUNDING)
    return last


def _gradient(graph: OperatorGraph, name: str, back: Sequence[Column], zero: Column) -> Column:
    """When the gradient of any region of a tensor can be complete: after a piece of every reader of the whole; and, if
    several read parts of it that make up the whole, after a piece of one of these."""
    if name not in graph.differentiable:
        return zero
    full, ready = _full(graph, name), zero
    parts: list[tuple[Box, Column]] = []
    for j, p in graph.consumers[name]:
        region = _region(graph, j, p)
        if graph.has_backward[j] and region is not None:
            parts.append((region, back[j]))
            if region == full:
                ready = np.maximum(ready, back[j])
    if parts and _covered(full, [region for region, _ in parts]):
        ready = np.maximum(ready, np.min([column for _, column in parts], axis=0))
    return ready


def _full(graph: OperatorGraph, name: str) -> Box:
    return tuple((0, n) for n in graph.tensor[name].shape)


def _region(graph: OperatorGraph, operator: int, position: int) -> Box | None:
    """What the whole operator reads of an operand."""
    op, tensor = graph.operators[operator], graph.tensor
    shapes = [tensor[n].shape for n in op.inputs], [tensor[n].shape for n in op.outputs]
    return whole_piece(op, *shapes).inputs[position]


def _covered(full: Box, regions: Sequence[Box]) -> bool:
    """Whether regions that differ from the whole along one dimension only make up the whole."""
    for axis, (low, high) in enumerate(full):
        rows = sorted(r[axis] for r in regions if (*r[:axis], full[axis], *r[axis + 1 :]) == full)
        reached = low
        for first, end in rows:
            if first <= reached:
                reached = max(reached, end)
        if rows and reached >= high:
            return True
    return any(region == full for region in regions)


def always_read(op: Operator, operand: Operand, shape: Sequence[int]) -> bool:
    """Whether every piece of the operator, however it is split, reads something of the operand."""
    split = set(op.splittable)
    if operand.once and split & op.access.summed:
        return False
    first = {a: (0, 1) if a in split else (0, n) for a, n in op.sizes.items()}
    last = {a: (n - 1, n) if a in split else (0, n) for a, n in op.sizes.items()}
    for dimension, size in zip(operand.dimensions, shape, strict=True):
        if not dimension.merged and (dimension.window(first)[1] <= 0 or dimension.window(last)[0] >= size):
            return False
    return True


def _work(
    graph: OperatorGraph, topology: Topology, costs: Costs, options: Options, least: Sequence[Least],
    kinds: Sequence[Sequence[int]],
) -> Column:  # fmt: skip
    """All computing over the processors, by number of devices."""
    count = len(topology.devices)
    kind_of = {device: k for k, members in enumerate(kinds) for device in members}
    processors: dict[int, set[int]] = {}
    for device, processor in enumerate(topology.processor_of):
        processors.setdefault(processor, set()).add(kind_of[device])
    classes = sorted({tuple(sorted(s)) for s in processors.values()})
    members = np.array([sum(tuple(sorted(s)) == c for s in processors.values()) for c in classes])
    rates = [costs.update_rates(kind[0], options.optimizer, options.precision) for kind in kinds]
    rows = [row.work for row in least]
    for tensor in graph.of_kind("parameter"):
        if tensor.name in graph.differentiable:
            row = np.array([per_tensor + per_byte * tensor.nbytes for per_byte, per_tensor in rates])
            rows.append(np.repeat(row[:, None], count, axis=1))
    # (operators, classes of processors, devices): on a processor the fastest of its devices does the work.
    seconds = np.stack([np.array(rows)[:, list(c)].min(axis=1) for c in classes], axis=1)
    shared = np.array([_shared(seconds[:, :, m], members, min(m + 1, len(processors))) for m in range(count)])
    return np.maximum(shared - UPDATE_ROUNDING, 0.0)


def _shared(seconds: npt.NDArray[np.float64], members: npt.NDArray[np.int64], used: int) -> float:
    """The least time in which ``used`` processors do all work: seconds (operators, classes), how many there are of each
    class. With a price for a second of each class, all work costs at least so much at the cheapest classes, and in
    time T the processors that are used can be paid at most T times the sum of the highest prices."""

    def proved(prices: npt.NDArray[np.float64]) -> float:
        dearest = np.sort(np.repeat(prices, members))[::-1][:used].sum()
        return float((seconds * prices).min(axis=1).sum() / dearest)

    prices = 1.0 / np.maximum(seconds.sum(axis=0), 1e-12)
    best = proved(prices)
    if len(prices) > 1:
        for step in PRICE_STEPS:
            better = True
            while better:
                better = False
                for k in range(len(prices)):
                    for factor in (step, 1.0 / step):
                        tried = prices.copy()
                        tried[k] *= factor
                        if (bound := proved(tried)) > best * (1.0 + 1e-12):
                            prices, best, better = tried, bound, True
    return best


def _launches(
    graph: OperatorGraph, topology: Topology, costs: Costs, options: Options, microbatches: int | None
) -> Column:  # fmt: skip
    """All launches over the hosts that launch fastest, by number of devices."""
    launch = np.sort([costs.launch_s(d) for d in range(len(topology.devices))])
    if launch[0] == 0.0:
        return np.zeros(len(launch))
    tensors = sum(tensor.name in graph.differentiable for tensor in graph.of_kind("parameter"))
    each = sum(sum(costs.launches(i)[:2]) for i in range(len(graph.operators)))
    once = costs.update_launches(options.optimizer, options.precision) * tensors
    seconds: Column = ((microbatches or 1) * each + once) / np.cumsum(1.0 / launch)
    return seconds


def _loss_everywhere(topology: Topology, profile: Profile | None) -> Column:
    """By number of devices that compute, less 1: the loss is sent to every device, in at least one communication that
    reaches the last of them. Only if all devices compute, each may make it itself."""
    seconds = np.zeros(len(topology.devices))
    if len(seconds) > 1:
        seconds[:-1] = least_seconds(topology, profile)
    return seconds
