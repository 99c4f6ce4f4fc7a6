"""When: the blocks of a plan in the order of one microbatch; which of them each device runs, for which microbatches.

Blocks follow from the graph, the options and the stages, never from a config. Their order is

- what a step reads from storage (``lower.reading``), and gathers of weights that several stages read;
- the forward pass, stage by stage: operators in topological order, those that count targets first, as they wait for no
  other and what they send then moves while the rest computes. Sharded weights are gathered in packs
  (``lower.gathers``), each ``prefetch`` packs before it is first read, so that it moves while operators compute;
- the backward pass, stage by stage from the last: operators in reverse. Before a checkpointed region is entered, its
  forward pass stands again; before that, gathers of weights that were let go of (``lower.recompute``). After the
  operator that completes the gradients of a bucket its synchronisation starts. Second phases of a bucket are sent when
  those of the next one start, so that they wait for nothing and hold nothing up; those of a stage's last bucket after
  its last operator. Schedules that run weight gradients later have two passes for it: the gradients of activations,
  operator by operator, then those of weights, with the synchronisation;
- synchronisation of weights that several stages read, the loss, and the update. The loss is sent once, as the sum over
  the microbatches: nothing waits for it.

With several microbatches a bucket is synchronised in two blocks: one for the final microbatch, which sends gradients
summed over all; one for every microbatch, which sends those of weights that keep only parts of their gradients
(``States``; PyTorch's ``fully_shard`` does so by default). The sums of a bucket use the same links, and so end in the
order of the microbatches: the update waits for the final one. Weights that several stages read are synchronised once,
whatever they keep.

What a bucket brings to weights that are kept in parts (``States`` above ``WHOLE``) is added to their gradients before
the next bucket but one is sent, of those that an operator has computed for meanwhile, so that its buffers, as large as
the whole gradients, do not wait for the update (``Blocks.added``). Before the next one would be too early: a rank that
waits for it there computes for the one after that while nothing moves (``fully_shard`` waits there).

Weights whose updates are made in parts are gathered where the next step needs them, not behind the update: a step
follows a step, and there the gathers move while the first operators compute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from flexsearch.errors import FlexsearchError
from flexsearch.graph import Flow, OperatorGraph
from flexsearch.graph.samples import counting
from flexsearch.lower.actions import Action, actions, check_orders, last_microbatch
from flexsearch.lower.backward_order import backward_pass, buckets_of, weight_stages
from flexsearch.lower.gathers import before_backward, before_forward, packs_of, regathered_weights
from flexsearch.lower.recompute import entered_regions, regions_of
from flexsearch.lower.rows import (
    BACKWARD,
    FORWARD,
    GATHER,
    GATHER_ONCE,
    NOBODY,
    READ,
    RECOMPUTE,
    REGATHER,
    RESULT,
    SYNCHRONISE,
    UPDATE,
    WEIGHT_GRADIENT,
    Schedule,
)
from flexsearch.strategy import Options
from flexsearch.strategy.schedule import SPLIT_KINDS, has_halves, ranks_of
from flexsearch.strategy.stage import ScheduleKind

ALL, ONCE, EACH = range(3)
"""Which weights of a bucket a block synchronises: all; those whose gradients are summed over the microbatches first;
those whose gradients are sent for each."""


@dataclass(frozen=True)
class Stages:
    """How a step is cut. ``first``: the operator that each stage begins with, ascending from 0; ``devices``: of each
    stage; several stages on one device take turns there. The batch is cut into ``microbatches``; ``kind``: of the
    schedule by which they pass through the stages. ``orders``: what each rank runs (``lower.actions``), where that is
    not what the schedule says; with a ``kind`` that divides backward passes in the same manner."""

    first: tuple[int, ...]
    devices: tuple[tuple[int, ...], ...]
    microbatches: int = 1
    kind: ScheduleKind = "1f1b"
    orders: tuple[tuple[Action, ...], ...] = ()

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

    @property
    def splits_backward(self) -> bool:
        """Whether the gradients of weights have a pass of their own. A schedule is of no effect with one stage and one
        microbatch."""
        return self.kind in SPLIT_KINDS and (len(self) > 1 or self.microbatches > 1)

    def splits(self, stage: int) -> bool:
        """Whether they have one on a stage."""
        return self.splits_backward and has_halves(stage)

    def of(self, operators: int) -> list[int]:
        """Stage of each of so many operators."""
        ends = [*self.first[1:], operators]
        return [s for s, (first, last) in enumerate(zip(self.first, ends, strict=True)) for _ in range(first, last)]


# ---- blocks


@dataclass
class Blocks:
    """The blocks of a graph under some options. By block: ``kind``, ``argument``, ``once``, ``last`` (see ``Schedule``;
    the argument of a SYNCHRONISE block is its number among them), ``stage`` (NOBODY: all devices run it). ``region``:
    by operator (see ``regions_of``). ``packs``: weights (by number) that are gathered together. ``buckets``: weights of
    each bucket in the order of completion; ``sums``: which of them (ALL, ONCE, EACH); ``added``: the block before which
    what it brings is added (NOBODY: the update), of the next microbatch if it does not come behind the one that sends
    the bucket. ``starts``, ``finishes``: by SYNCHRONISE block, the bucket whose first and whose second phases it sends
    (NOBODY: none). ``forward``, ``backward``, ``weight``: by stage, range of its blocks in that pass; the third follows
    the second, and is empty if backward passes are whole; ``before``, ``after``: those that all devices run first and
    last, once a step."""

    kind: list[int] = field(default_factory=list)
    argument: list[int] = field(default_factory=list)
    once: list[bool] = field(default_factory=list)
    last: list[bool] = field(default_factory=list)
    stage: list[int] = field(default_factory=list)
    region: list[int] = field(default_factory=list)
    packs: list[list[int]] = field(default_factory=list)
    buckets: list[list[int]] = field(default_factory=list)
    sums: list[int] = field(default_factory=list)
    added: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    finishes: list[int] = field(default_factory=list)
    forward: list[range] = field(default_factory=list)
    backward: list[range] = field(default_factory=list)
    weight: list[range] = field(default_factory=list)
    before: range = range(0)
    after: range = range(0)

    def __len__(self) -> int:
        return len(self.kind)

    def add(self, kind: int, argument: int, stage: int, repeated: bool = False) -> None:
        """One more block. ``repeated``: it runs for every microbatch, as passes always do."""
        self.kind.append(kind)
        self.argument.append(argument)
        passes = FORWARD, BACKWARD, WEIGHT_GRADIENT, RECOMPUTE, REGATHER
        self.once.append(not repeated and kind not in passes)
        self.last.append(not repeated and kind in (SYNCHRONISE, RESULT, UPDATE))
        self.stage.append(stage)

    def bucket(self, weights: list[int], sums: int) -> int:
        """The number of one more bucket, which is added at the update."""
        self.buckets.append(weights)
        self.sums.append(sums)
        self.added.append(NOBODY)
        return len(self.buckets) - 1

    def synchronise(self, starts: int, finishes: int, stage: int, repeated: bool = False) -> None:
        """One more block of synchronisation."""
        self.add(SYNCHRONISE, len(self.starts), stage, repeated)
        self.starts.append(starts)
        self.finishes.append(finishes)

    def of(self, action: Action) -> range:
        """What a pass of a stage runs."""
        if action.kind == "F":
            return self.forward[action.stage]
        inputs, weights = self.backward[action.stage], self.weight[action.stage]
        return inputs if action.kind == "I" else weights if action.kind == "W" else range(inputs.start, weights.stop)


def make_blocks(graph: OperatorGraph, options: Options, stages: Stages, reads: bool = False) -> Blocks:
    """The blocks of a graph whose operators are cut into ``stages``. ``reads``: batches are read from storage.
    Raises StrategyError if nothing can be computed again as the options ask for."""
    stage_of = stages.of(len(graph.operators))
    of_weight = list(weight_stages(graph, stage_of).values())
    shared = {w for w, stage in enumerate(of_weight) if stage == NOBODY}
    regathered = regathered_weights(graph, of_weight) if options.reshard_after_forward else set()
    packs = packs_of(graph, options.bucket_bytes, of_weight, regathered)
    stage_of_pack = [of_weight[pack[0]] for pack in packs]
    gathered_before = before_forward(graph, packs, stage_of_pack, stages.first, options.prefetch)
    blocks = Blocks(region=regions_of(graph, options.recompute, stage_of, options.recompute_blocks), packs=packs)
    if reads:
        blocks.add(READ, 0, NOBODY)
    for p, stage in enumerate(stage_of_pack):
        if stage == NOBODY:
            blocks.add(GATHER, p, NOBODY)
    blocks.before = range(len(blocks))
    ends, early = [*stages.first[1:], len(graph.operators)], counting(graph)
    for stage, (first, last) in enumerate(zip(stages.first, ends, strict=True)):
        begin = len(blocks)
        for i in sorted(range(first, last), key=lambda i: i not in early):
            for p in gathered_before.get(i, ()):
                again = packs[p][0] in regathered
                if again:
                    blocks.add(GATHER_ONCE, p, stage)
                blocks.add(GATHER, p, stage, repeated=again)
            blocks.add(FORWARD, i, stage)
        blocks.forward.append(range(begin, len(blocks)))
    entered = entered_regions(graph, blocks.region)
    gathered_again = before_backward(graph, packs, stage_of_pack, regathered, entered, stage_of, options.prefetch)
    first_again = {i: [(REGATHER, p) for p in row] for i, row in gathered_again.items()}
    for i, row in entered.items():
        first_again.setdefault(i, []).extend((RECOMPUTE, o) for o in row)
    apart = {t.name for t in graph.of_kind("parameter") if options.recipe_of(t.name) is not None}
    _add_backward(blocks, graph, buckets_of(graph, options.bucket_bytes, stage_of, apart), stages, shared, first_again)
    return blocks


def _add_backward(
    blocks: Blocks, graph: OperatorGraph, bucket_of: Mapping[str, int], stages: Stages, shared: set[int],
    again: Mapping[int, list[tuple[int, int]]],
) -> None:  # fmt: skip
    """The backward pass with what is done ``again`` in it and its synchronisation, the loss and the update."""
    late: list[int] = []
    passes: list[list[tuple[int, list[list[int]]]]] = [[] for _ in stages.first]
    stage_of = stages.of(len(graph.operators))
    for i, complete in backward_pass(graph, bucket_of):
        passes[stage_of[i]].append((i, complete))
    for stage in reversed(range(len(stages))):
        begin = len(blocks)
        if stages.splits(stage):
            for i, _ in passes[stage]:
                _add_operator(blocks, i, stage, again)
        middle = len(blocks)
        sums = (ONCE, EACH) if stages.microbatches > 1 else (ALL,)
        more = None if stages.splits(stage) else again
        late += _add_gradients(blocks, graph, passes[stage], stage, shared, more, sums)
        split = middle if stages.splits(stage) else len(blocks)
        blocks.backward.insert(0, range(begin, split))
        blocks.weight.insert(0, range(split, len(blocks)))
    begin, before = len(blocks), NOBODY
    for bucket in late:
        blocks.synchronise(bucket, before, NOBODY)
        before = bucket
    if before != NOBODY:
        blocks.synchronise(NOBODY, before, NOBODY)
    blocks.add(RESULT, 0, NOBODY)
    blocks.add(UPDATE, 0, NOBODY)
    blocks.after = range(begin, len(blocks))


def _add_operator(blocks: Blocks, operator: int, stage: int, again: Mapping[int, list[tuple[int, int]]]) -> None:
    """The backward pass of an operator, after what is done ``again`` for it."""
    for kind, argument in again.get(operator, ()):
        blocks.add(kind, argument, stage)
    blocks.add(BACKWARD, operator, stage)


def _add_gradients(
    blocks: Blocks, graph: OperatorGraph, rows: Sequence[tuple[int, list[list[int]]]], stage: int, shared: set[int],
    again: Mapping[int, list[tuple[int, int]]] | None, sums: Sequence[int],
) -> list[int]:  # fmt: skip
    """A stage's backward pass (with what is done ``again`` in it), or if that is None its half that makes gradients of
    weights only; with its synchronisation, a block of each bucket for each of ``sums``. Returns the buckets that are
    synchronised after all stages."""
    late, before, first = [], dict.fromkeys(sums, NOBODY), dict[int, int]()
    # Buckets that are not added yet, with the number of the row that completed them.
    sent: dict[int, list[tuple[int, int]]] = {which: [] for which in sums}
    for k, (i, complete) in enumerate(rows):
        if again is not None:
            _add_operator(blocks, i, stage, again)
        elif trains(graph, i):
            blocks.add(WEIGHT_GRADIENT, i, stage)
        for weights in complete:
            if weights[0] in shared:
                late.append(blocks.bucket(weights, ALL))
                continue
            for which in sums:
                bucket = blocks.bucket(weights, which)
                first.setdefault(which, len(blocks))
                before_last = max((row for _, row in sent[which] if row < k), default=0)
                while sent[which] and sent[which][0][1] < before_last:
                    blocks.added[sent[which].pop(0)[0]] = len(blocks)
                sent[which].append((bucket, k))
                blocks.synchronise(bucket, before[which], stage, repeated=which == EACH)
                before[which] = bucket
    for which, bucket in before.items():
        if bucket != NOBODY:
            for last, _ in sent[which]:  # those of each microbatch move while the next one computes
                blocks.added[last] = first[which] if which == EACH else len(blocks)
            blocks.synchronise(NOBODY, bucket, stage, repeated=which == EACH)
    return late


def trains(graph: OperatorGraph, operator: int) -> bool:
    """Whether an operator makes the gradient of a weight."""
    return any(
        flow != Flow.VALUE and graph.tensor[name].kind == "parameter"
        for name, flow in zip(graph.operators[operator].inputs, graph.flows[operator], strict=True)
    )


# ---- the schedule


def orders_of(stages: Stages) -> tuple[list[tuple[int, ...]], Sequence[Sequence[Action]]]:
    """The ranks of a pipeline, each as the stages that it holds, and what each of them runs, as PyTorch runs them."""
    groups = ranks_of(stages.devices)
    orders = stages.orders or actions(_kind(stages), groups, stages.microbatches)
    if stages.splits_backward:
        orders = [list(_as_run(row)) for row in orders]
    return groups, orders


def _as_run(order: Iterable[Action]) -> Iterator[Action]:
    """An order of a schedule that splits backward passes, with those whole that have no halves."""
    for action in order:
        if has_halves(action.stage) or action.kind in "FB":
            yield action
        elif action.kind == "W":
            yield action._replace(kind="B")


def _held(stages: Stages, device: int) -> tuple[int, ...]:
    """The stages that a device runs."""
    return tuple(s for s, of in enumerate(stages.devices) if device in of)


def _kind(stages: Stages) -> ScheduleKind:
    """The schedule, which is of no effect with one stage and one microbatch."""
    return "gpipe" if len(stages) == stages.microbatches == 1 else stages.kind


def make_schedule(blocks: Blocks, stages: Stages, devices: int) -> Schedule:
    """Which blocks each of ``devices`` runs when. Devices without a stage run none."""
    groups, orders = orders_of(stages)
    plans: dict[tuple[int, ...], list[tuple[range, int]]] = {(): []}
    kind = _kind(stages)
    final = last_microbatch(kind, stages.microbatches)
    if stages.orders:
        check_orders(stages.orders, groups, stages.microbatches)
    if not stages.splits_backward and any(action.kind in "IW" for row in orders for action in row):
        raise FlexsearchError(
            f"the schedule {kind} does not divide backward passes", "Give a schedule that does, or whole ones."
        )
    for row, plan in zip(groups, orders, strict=True):
        middle = [(blocks.of(action), action.microbatch) for action in plan]
        plans[row] = _joined([(blocks.before, 0), *middle, (blocks.after, final)])
    numbers = {row: g for g, row in enumerate(plans)}
    ends = np.cumsum([0, *(len(plan) for plan in plans.values())]).astype(np.uint32)
    every = [action for plan in plans.values() for action in plan]

    def column(value: Callable[[tuple[range, int]], int]) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
        return np.array([value(action) for action in every], np.uint32)

    return Schedule(
        kind=np.array(blocks.kind, np.uint8), argument=np.array(blocks.argument, np.uint32),
        once=np.array(blocks.once, np.uint8), last=np.array(blocks.last, np.uint8),
        group=np.array([numbers[_held(stages, d)] for d in range(devices)], np.uint32),
        action_first=ends[:-1].copy(), action_last=ends[1:].copy(),
        block_first=column(lambda a: a[0].start), block_last=column(lambda a: a[0].stop),
        microbatch=column(lambda a: a[1]),
        microbatches=np.array([stages.microbatches], np.uint32),
        final=np.array([final], np.uint32),
    )  # fmt: skip


def _joined(plan: list[tuple[range, int]]) -> list[tuple[range, int]]:
    """The same with actions of a microbatch as one whose blocks follow each other, and without empty ones."""
    joined: list[tuple[range, int]] = []
    for of, microbatch in plan:
        if joined and joined[-1][1] == microbatch and joined[-1][0].stop == of.start:
            joined[-1] = (range(joined[-1][0].start, of.stop), microbatch)
        elif of:
            joined.append((of, microbatch))
    return joined
