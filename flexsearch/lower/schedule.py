"""When: the blocks of a plan in the order of one microbatch; which of them each device runs, for which microbatches.

Blocks follow from the graph, the options and the stages, never from a config. Their order is

- gathers of weights that several stages read;
- the forward pass, stage by stage: operators in topological order. The gather of a sharded weight stands ``prefetch``
  operators with weights before the first operator that reads it, so that it moves while those compute;
- the backward pass, stage by stage from the last: operators in reverse. Before a checkpointed region is entered, its
  forward pass stands again; before that, gathers of weights that were let go of (``lower.recompute``). After the
  operator that completes the gradients of a bucket its synchronisation starts. Second phases of a bucket are sent when
  those of the next one start, so that they wait for nothing and hold nothing up; those of a stage's last bucket after
  its last operator;
- synchronisation of weights that several stages read, and the update.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

import numpy as np

from flexsearch.errors import FlexsearchError
from flexsearch.graph import OperatorGraph
from flexsearch.lower.recompute import before_backward, regathered_weights, regions_of
from flexsearch.lower.rows import BACKWARD, FORWARD, GATHER, RECOMPUTE, REGATHER, SYNCHRONISE, UPDATE, Schedule
from flexsearch.strategy import Options
from flexsearch.strategy.stage import ScheduleKind

NOBODY: Final = -1
"""In the place of a bucket: none."""


@dataclass(frozen=True)
class Stages:
    """How a step is cut. ``first``: the operator that each stage begins with, ascending from 0; ``devices``: of each
    stage; several stages on one device take turns there. The batch is cut into ``microbatches``; ``kind``: of the
    schedule by which they pass through the stages."""

    first: tuple[int, ...]
    devices: tuple[tuple[int, ...], ...]
    microbatches: int = 1
    kind: ScheduleKind = "1f1b"

    def __post_init__(self) -> None:
        if not self.first or self.first[0] != 0 or list(self.first) != sorted(set(self.first)):
            raise FlexsearchError(
                f"stages begin with the operators {self.first}, which is not ascending from 0",
                "Give the first operator of each stage in topological order.",
            )
        if len(self.devices) != len(self.first) or not all(self.devices):
            raise FlexsearchError(
                f"{len(self.first)} stages have {len(self.devices)} groups of devices",
                "Give each stage its devices, at least one.",
            )
        if self.microbatches < 1:
            raise FlexsearchError(
                f"a step of {self.microbatches} microbatches does nothing", "Use at least one microbatch."
            )

    @staticmethod
    def one(devices: int) -> Stages:
        """All operators in one stage on all devices, the whole batch at once."""
        return Stages((0,), (tuple(range(devices)),))

    def __len__(self) -> int:
        return len(self.first)

    def of(self, operators: int) -> list[int]:
        """Stage of each of so many operators."""
        ends = [*self.first[1:], operators]
        return [s for s, (first, last) in enumerate(zip(self.first, ends, strict=True)) for _ in range(first, last)]


class Action(NamedTuple):
    """Forward (F) or backward (B) pass of a stage for a microbatch, written as PyTorch's pipelining writes it: 1F0."""

    stage: int
    kind: Literal["F", "B"]
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


# ---- actions


def actions(kind: ScheduleKind, held: Sequence[Sequence[int]], microbatches: int) -> list[list[Action]]:
    """What each group of devices runs. ``held``: the stages of each group, ascending; groups in the order of their
    first stage.

    Raises FlexsearchError where a schedule does not fit: in ``1f1b`` the stages of a group follow each other;
    ``interleaved-1f1b`` needs equally many stages on each group, dealt out in turn, and microbatches in whole rounds.
    """
    if kind == "gpipe" or microbatches == 1:
        return [_gpipe(row, microbatches) for row in held]
    if kind == "zero-bubble":
        raise FlexsearchError(
            "zero-bubble splits backward passes in two, which plans cannot say", "Use gpipe, 1f1b or interleaved-1f1b."
        )
    stages = 1 + max(stage for row in held for stage in row)
    if sum(map(len, held)) != stages:
        raise FlexsearchError(
            f"{kind} cannot run stages that share a part of their devices",
            "Give stages that share a device the same devices, or use gpipe.",
        )
    if kind == "1f1b":
        if any(row[-1] - row[0] + 1 != len(row) for row in held):
            raise FlexsearchError(
                f"1f1b cannot run the stages {[list(row) for row in held]}",
                "Use interleaved-1f1b, or give each group of devices stages that follow each other.",
            )
        return [_one_by_one(row, stages, microbatches) for row in held]
    groups = len(held)
    if stages % groups or any(list(row) != list(range(g, stages, groups)) for g, row in enumerate(held)):
        raise FlexsearchError(
            f"interleaved-1f1b cannot run the stages {[list(row) for row in held]}",
            "Deal the stages out in turn, equally many to each group of devices.",
        )
    rounds = max(1, microbatches // groups)
    if microbatches % rounds:
        raise FlexsearchError(
            f"interleaved-1f1b cannot run {microbatches} microbatches on {groups} groups of devices",
            f"Use a multiple of {groups} microbatches.",
        )
    return [_interleaved(g, row, groups, microbatches, microbatches // rounds) for g, row in enumerate(held)]


def _gpipe(held: Sequence[int], microbatches: int) -> list[Action]:
    """All forward passes, then all backward ones."""
    forward = [Action(stage, "F", m) for stage in held for m in range(microbatches)]
    return forward + [Action(stage, "B", m) for stage in reversed(held) for m in range(microbatches)]


def _one_by_one(held: Sequence[int], stages: int, microbatches: int) -> list[Action]:
    """So many microbatches ahead as stages lie behind, then one backward pass for each forward pass."""
    ahead = min(microbatches, stages - 1 - held[-1])
    forward = [[Action(stage, "F", m) for stage in held] for m in range(microbatches)]
    found = [action for row in forward[:ahead] for action in row]
    for m in range(microbatches):
        if m + ahead < microbatches:
            found += forward[m + ahead]
        found += (Action(stage, "B", m) for stage in reversed(held))
    return found


def _interleaved(group: int, held: Sequence[int], groups: int, microbatches: int, per_round: int) -> list[Action]:
    """The schedule of Narayanan et al. (SC 2021), as PyTorch's ``ScheduleInterleaved1F1B`` builds it: rounds of
    microbatches pass the group's stages in turn."""
    count = len(held) * microbatches
    warm = min(count, (len(held) - 1) * per_round + 2 * (groups - 1 - group))

    def at(k: int, backward: bool) -> Action:
        local = (k // per_round) % len(held)
        microbatch = k // (per_round * len(held)) * per_round + k % per_round
        return Action(held[len(held) - 1 - local if backward else local], "B" if backward else "F", microbatch)

    found = [at(k, False) for k in range(warm)]
    for k in range(count):
        if k + warm < count:
            found.append(at(k + warm, False))
        found.append(at(k, True))
    return found


# ---- buckets


def buckets_of(graph: OperatorGraph, bucket_bytes: int, stage_of: Sequence[int] | None = None) -> dict[str, int]:
    """Parameter -> number of its synchronisation bucket. Buckets are filled in the order in which the backward pass
    finishes the gradients, from the whole sizes of the weights, so that they do not depend on any config. A bucket
    holds weights of one stage, or such that several stages read."""
    parameters = graph.of_kind("parameter")
    first = {t.name: min((i for i, _ in graph.consumers[t.name]), default=-1) for t in parameters}
    stage = dict.fromkeys(first, 0) if stage_of is None else weight_stages(graph, stage_of)
    found: dict[str, int] = {}
    bucket = filled = 0
    last: int | None = None
    for tensor in sorted(parameters, key=lambda t: (stage[t.name] == NOBODY, -first[t.name])):
        if filled and (filled + tensor.nbytes > bucket_bytes or stage[tensor.name] != last):
            bucket, filled = bucket + 1, 0
        found[tensor.name] = bucket
        filled, last = filled + tensor.nbytes, stage[tensor.name]
    return found


def weight_stages(graph: OperatorGraph, stage_of: Sequence[int]) -> dict[str, int]:
    """Parameter -> the stage that reads it; NOBODY if several do (0 if nothing does)."""
    found = {}
    for tensor in graph.of_kind("parameter"):
        stages = {stage_of[i] for i, _ in graph.consumers[tensor.name]} or {0}
        found[tensor.name] = stages.pop() if len(stages) == 1 else NOBODY
    return found


def backward_pass(graph: OperatorGraph, bucket_of: Mapping[str, int]) -> list[tuple[int, list[list[int]]]]:
    """The backward pass: operators in reverse, each with the buckets (weights, by number among the parameters) whose
    last gradient is complete after it. It follows from the graph alone."""
    parameters = graph.of_kind("parameter")
    ready: dict[int, list[int]] = {}  # operator -> weights whose gradient is complete after its backward task
    missing: Counter[int] = Counter()
    for w, tensor in enumerate(parameters):
        readers = [o for o, _ in graph.consumers[tensor.name] if graph.has_backward[o]]
        if readers and tensor.name in graph.differentiable:
            ready.setdefault(min(readers), []).append(w)
            missing[bucket_of[tensor.name]] += 1
    order: list[tuple[int, list[list[int]]]] = []
    waiting: dict[int, list[int]] = {}
    for i in reversed(range(len(graph.operators))):
        if graph.has_backward[i]:
            complete = []
            for w in ready.get(i, ()):
                bucket = bucket_of[parameters[w].name]
                waiting.setdefault(bucket, []).append(w)
                missing[bucket] -= 1
                if not missing[bucket]:
                    complete.append(waiting.pop(bucket))
            order.append((i, complete))
    return order


# ---- blocks


@dataclass
class Blocks:
    """The blocks of a graph under some options. By block: ``kind``, ``argument``, ``once``, ``last`` (see ``Schedule``;
    the argument of a SYNCHRONISE block is its number among them), ``stage`` (NOBODY: all devices run it).
    ``region``: by operator (see ``regions_of``). ``buckets``: weights of each bucket in the order of completion.
    ``starts``, ``finishes``: by SYNCHRONISE block, the bucket whose first and whose second phases it sends (NOBODY:
    none). ``forward``, ``backward``: by stage, range of its blocks; ``before``, ``after``: those that all devices run
    first and last, once a step."""

    kind: list[int] = field(default_factory=list)
    argument: list[int] = field(default_factory=list)
    once: list[bool] = field(default_factory=list)
    last: list[bool] = field(default_factory=list)
    stage: list[int] = field(default_factory=list)
    region: list[int] = field(default_factory=list)
    buckets: list[list[int]] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    finishes: list[int] = field(default_factory=list)
    forward: list[range] = field(default_factory=list)
    backward: list[range] = field(default_factory=list)
    before: range = range(0)
    after: range = range(0)

    def __len__(self) -> int:
        return len(self.kind)

    def add(self, kind: int, argument: int, stage: int, repeated: bool = False) -> None:
        """One more block. ``repeated``: it runs for every microbatch, as passes always do."""
        self.kind.append(kind)
        self.argument.append(argument)
        self.once.append(not repeated and kind not in (FORWARD, BACKWARD, RECOMPUTE, REGATHER))
        self.last.append(kind == SYNCHRONISE and stage != NOBODY)
        self.stage.append(stage)

    def synchronise(self, starts: int, finishes: int, stage: int) -> None:
        """One more block of synchronisation."""
        self.add(SYNCHRONISE, len(self.starts), stage)
        self.starts.append(starts)
        self.finishes.append(finishes)


def make_blocks(graph: OperatorGraph, options: Options, stages: Stages) -> Blocks:
    """The blocks of a graph whose operators are cut into ``stages``. Raises StrategyError if nothing can be computed
    again as the options ask for."""
    stage_of = stages.of(len(graph.operators))
    of_weight = list(weight_stages(graph, stage_of).values())
    shared = [w for w, stage in enumerate(of_weight) if stage == NOBODY]
    gathers = _gathers(graph, options.prefetch, stage_of, of_weight)
    regathered = regathered_weights(graph, of_weight) if options.reshard_after_forward else {}
    blocks = Blocks(region=regions_of(graph, options.recompute, stage_of))
    for w in shared:
        blocks.add(GATHER, w, NOBODY)
    blocks.before = range(len(blocks))
    ends = [*stages.first[1:], len(graph.operators)]
    for stage, (first, last) in enumerate(zip(stages.first, ends, strict=True)):
        begin = len(blocks)
        for i in range(first, last):
            for w in gathers.get(i, ()):
                blocks.add(GATHER, w, stage, repeated=w in regathered)
            blocks.add(FORWARD, i, stage)
        blocks.forward.append(range(begin, len(blocks)))
    again = before_backward(graph, blocks.region, stage_of, regathered, options.prefetch)
    _add_backward(blocks, graph, buckets_of(graph, options.bucket_bytes, stage_of), stage_of, set(shared), again)
    return blocks


def _gathers(
    graph: OperatorGraph, prefetch: int, stage_of: Sequence[int], of_weight: Sequence[int]
) -> dict[int, list[int]]:
    """Operator -> weights (by number) whose gathers stand before it, those that are read first in front."""
    parameters = graph.of_kind("parameter")
    names = {t.name for t in parameters}
    reading = [i for i, op in enumerate(graph.operators) if not names.isdisjoint(op.inputs)]
    place = {i: k for k, i in enumerate(reading)}
    found: dict[int, list[tuple[int, int]]] = {}
    for w, tensor in enumerate(parameters):
        if of_weight[w] == NOBODY:
            continue
        first = min((i for i, _ in graph.consumers[tensor.name]), default=0)
        before = place.get(first, 0) - prefetch
        at = reading[before] if first in place and before >= 0 else 0
        if stage_of[at] != of_weight[w]:
            at = stage_of.index(of_weight[w])
        found.setdefault(at, []).append((first, w))
    return {i: [w for _, w in sorted(rows)] for i, rows in found.items()}


def _add_backward(
    blocks: Blocks, graph: OperatorGraph, bucket_of: Mapping[str, int], stage_of: Sequence[int], shared: set[int],
    again: Mapping[int, list[tuple[int, int]]],
) -> None:  # fmt: skip
    """The backward pass with what is done ``again`` in it and its synchronisation, and the update."""
    late: list[int] = []
    ranges: dict[int, range] = {}
    before, stage, begin = NOBODY, max(stage_of), len(blocks)

    def close() -> None:
        nonlocal before, begin
        if before != NOBODY:
            blocks.synchronise(NOBODY, before, stage)
        ranges[stage] = range(begin, len(blocks))
        before, begin = NOBODY, len(blocks)

    for i, complete in backward_pass(graph, bucket_of):
        while stage != stage_of[i]:
            close()
            stage -= 1
        for kind, argument in again.get(i, ()):
            blocks.add(kind, argument, stage)
        blocks.add(BACKWARD, i, stage)
        for weights in complete:
            bucket = len(blocks.buckets)
            blocks.buckets.append(weights)
            if weights[0] in shared:
                late.append(bucket)
            else:
                blocks.synchronise(bucket, before, stage)
                before = bucket
    close()
    blocks.backward = [ranges.get(s, range(begin, begin)) for s in range(max(stage_of) + 1)]
    stage = NOBODY
    for bucket in late:
        blocks.synchronise(bucket, before, NOBODY)
        before = bucket
    if before != NOBODY:
        blocks.synchronise(NOBODY, before, NOBODY)
    blocks.add(UPDATE, 0, NOBODY)
    blocks.after = range(begin, len(blocks))


# ---- the schedule


def make_schedule(blocks: Blocks, stages: Stages, devices: int) -> Schedule:
    """Which blocks each of ``devices`` runs when. Devices without a stage run none."""
    held: dict[tuple[int, ...], list[int]] = {}
    for d in range(devices):
        row = tuple(s for s, of in enumerate(stages.devices) if d in of)
        held.setdefault(row, []).append(d)
    groups = sorted(row for row in held if row)
    plans: dict[tuple[int, ...], list[tuple[range, int]]] = {(): []}
    for row, plan in zip(groups, actions(stages.kind, groups, stages.microbatches), strict=True):
        middle = [((blocks.forward if a.kind == "F" else blocks.backward)[a.stage], a.microbatch) for a in plan]
        plans[row] = _joined([(blocks.before, 0), *middle, (blocks.after, 0)])
    numbers = {row: g for g, row in enumerate(plans)}
    ends = np.cumsum([0, *(len(plan) for plan in plans.values())]).astype(np.uint32)
    of_device = {d: numbers[row] for row, members in held.items() for d in members}
    every = [action for plan in plans.values() for action in plan]

    def column(value: Callable[[tuple[range, int]], int]) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
        return np.array([value(action) for action in every], np.uint32)

    return Schedule(
        kind=np.array(blocks.kind, np.uint8), argument=np.array(blocks.argument, np.uint32),
        once=np.array(blocks.once, np.uint8), last=np.array(blocks.last, np.uint8),
        group=np.array([of_device[d] for d in range(devices)], np.uint32),
        action_first=ends[:-1].copy(), action_last=ends[1:].copy(),
        block_first=column(lambda a: a[0].start), block_last=column(lambda a: a[0].stop),
        microbatch=column(lambda a: a[1]),
        microbatches=np.array([stages.microbatches], np.uint32),
    )  # fmt: skip


def _joined(plan: list[tuple[range, int]]) -> list[tuple[range, int]]:
    """The same with actions of a microbatch as one whose blocks follow each other, and without empty ones."""
    found: list[tuple[range, int]] = []
    for of, microbatch in plan:
        if found and found[-1][1] == microbatch and found[-1][0].stop == of.start:
            found[-1] = (range(found[-1][0].start, of.stop), microbatch)
        elif of:
            found.append((of, microbatch))
    return found
