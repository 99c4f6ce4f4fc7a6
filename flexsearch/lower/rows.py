"""The rows of a plan: what every device does, in which order, and what crosses the links, as flat arrays.

A **block** is what all devices do for one pass of one operator (or for gathering weights, synchronising a bucket,
updating). Blocks have fixed numbers, in the order of one microbatch: they follow from the graph and the options, never
from a config. A **segment** holds the rows of one block under some configs; changing a config gives a few blocks other
segments and leaves all else alone. A **schedule** says which blocks each device runs, in which order, for which
microbatches.

Each device runs the **steps** of its segments one after the other: COMPUTE keeps it busy; WAIT lets it go on when a
communication has ended; ISSUE hands a communication its share and goes on at once. The host of a device launches its
steps in the same order, one after the other from tick 0 on, and waits for nothing: a step begins when its device is
there, and not before the host has launched it (``step_host`` of it and of all before). A communication is ready when
all its senders have issued it and all communications that it follows have ended; it starts when its links are free,
keeps each of them busy for its own time, and ends after ``communication_ticks``.

The identity of a row is (microbatch, block, number within the block), computations before communications: it survives
changes elsewhere in the plan. Of rows that are ready at the same tick, the one with the smaller identity comes first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from flexsearch.compiled import I64, U8, U32, U64, lean
from flexsearch.lower.arrays import BlockTable
from flexsearch.lower.taskgraph import RecipeBlock
from flexsearch.packed import packed

Numbers = npt.NDArray[np.int64]

(
    GATHER, FORWARD, BACKWARD, SYNCHRONISE, UPDATE, WEIGHT_GRADIENT, RECOMPUTE, REGATHER, GATHER_ONCE, RESULT, READ,
    RECIPE,
) = range(12)  # fmt: skip
"""Kinds of blocks; their arguments: pack (of weights), operator, operator, bucket, none, operator, operator, pack,
pack, none, none, group of weights with a recipe. RESULT sends what a step returns, the loss, to all devices; READ reads
a batch (``lower.reading``). Where an operator has a WEIGHT_GRADIENT block, its BACKWARD block makes the gradients of
its other inputs only. Where GATHER runs for every microbatch, GATHER_ONCE is for weights that are whole from one step
to the next. RECIPE blocks (``lower.recipe_rows``) have the last numbers, wherever they run; all others are written by
``lower.emit``."""
COMPUTE, WAIT, ISSUE = range(3)
"""Kinds of steps."""
NOBODY: Final = -1
"""In the place of a bucket or a stage: none."""
NEVER: Final = np.iinfo(np.int64).max
"""Ticks of a turn that does not end."""


@lean
def is_gather(kind: Any) -> Any:
    """Whether blocks of a kind gather weights."""
    return kind in (GATHER, REGATHER, GATHER_ONCE)


@packed
class Schedule(NamedTuple):
    """Which blocks there are, and which of them each device runs when.

    By block: ``kind``, ``argument``, ``once`` (1: it runs once a step, as microbatch 0: gathers, synchronisation,
    update; waiting for it from any microbatch means that one), ``last`` (1: only together with the microbatch ``final``
    ((1,)), the first or the last one, whose gradients complete the sums: what synchronises a bucket stands between the
    blocks of the backward pass, the update behind them). By device: ``group``. Group g runs the
    actions ``action_first[g]`` to ``action_last[g]``; action a means the blocks from ``block_first[a]`` to before
    ``block_last[a]`` for microbatch ``microbatch[a]``. ``microbatches``: (1,) how many there are.
    """

    kind: U8
    argument: U32
    once: U8
    last: U8
    group: U32
    action_first: U32
    action_last: U32
    block_first: U32
    block_last: U32
    microbatch: U32
    microbatches: U32
    final: U32


@packed
class Segments(NamedTuple):
    """Segments by number; once written, one does not change. Lists of item i are rows ``[first[i], last[i])``.

    By segment: ``device_steps``: where its table of devices begins in ``step_first``: steps of device d are
    ``step_first[t + d]`` to ``step_first[t + d + 1]``, where t is that place; its communications are rows
    ``communication_first`` to ``communication_last``, numbered from 0 within the block.

    By step: ``step_kind``; ``step_block``, ``step_row``: of a WAIT, block of the communication and its number there; of
    an ISSUE its own block and the number; of a COMPUTE its own block and the number of the computation. ``step_ticks``:
    of a COMPUTE, how long it takes. ``step_host``: of a COMPUTE or an ISSUE, how long the host takes to launch it.

    By communication: ``communication_ticks`` from start to end; ``missing``: senders that issue it plus communications
    that it follows; ``turn``: ticks after which it lets others on its links go first (NEVER: it is done by then);
    ``connection``: a number of the connection that it goes on, which carries one communication after the other, or if
    it is odd, two at once. Links (a
    resource, and the ticks for which it is kept busy), drags (a processor, and the ticks of computing that moving the
    bytes takes from it, from the moment when the communication is ready), receiving devices (those that may WAIT for
    it), and the communications that follow it (block and number there), which wait for its end.
    """

    device_steps: U32
    communication_first: U32
    communication_last: U32
    step_first: U32
    step_kind: U8
    step_block: U32
    step_row: U32
    step_ticks: I64
    step_host: I64
    communication_ticks: I64
    missing: U32
    turn: I64
    connection: U64
    link_first: U32
    link_last: U32
    link: U32
    link_ticks: I64
    drag_first: U32
    drag_last: U32
    drag: U32
    drag_ticks: I64
    receiver_first: U32
    receiver_last: U32
    receiver: U32
    follower_first: U32
    follower_last: U32
    follower_block: U32
    follower_row: U32


@packed
class Machine(NamedTuple):
    """What the engine needs of a topology. ``processor``: resource by device. ``turn``: by device, ticks after which a
    computation lets others of its processor go first (NEVER where it has its own). ``contended``: (1,) 1 if a device
    may have to wait for its processor: where several devices share one, or moving bytes takes time from them.
    ``hosted``: (1,) 1 if devices have hosts that launch their steps. ``slowing``: (1,) how much later, in 1024ths of
    the time for which device d computes meanwhile, its links ``slowed[slows[d] : slows[d + 1]]`` are free."""

    processor: U32
    turn: I64
    contended: U8
    hosted: U8
    resources: U32  # (1,): how many resources there are
    slowing: I64
    slows: U32
    slowed: U32


class Sent(NamedTuple):
    """An exchange that is a part of a communication. ``item``: the weight whose synchronisation it belongs to, or the
    slot that reads the weight that it gathers."""

    item: int
    phase: int
    exchange: int


@dataclass(frozen=True)
class Rows:
    """The rows of a plan. ``segment``: by block. ``together``: of blocks that gather or synchronise weights, by block
    and communication, the exchanges that go as one. ``recipes``: of blocks of recipes, what they hold."""

    schedule: Schedule
    machine: Machine
    blocks: BlockTable
    segments: Segments
    segment: npt.NDArray[np.uint32]
    together: Mapping[int, tuple[tuple[Sent, ...], ...]]
    recipes: Mapping[int, RecipeBlock] = field(default_factory=dict)


def blocks_run(schedule: Schedule, action: int) -> Numbers:
    """The blocks that an action runs, ascending: those that run once with the first microbatch or the final one."""
    microbatch = schedule.microbatch[action]
    blocks = np.arange(schedule.block_first[action], schedule.block_last[action])
    final, once = schedule.last[blocks] == 1, schedule.once[blocks] == 1
    runs: Numbers = blocks[np.where(final, microbatch == schedule.final[0], (microbatch == 0) | ~once)]
    return runs


def ranges(first: Numbers, lengths: Numbers) -> Numbers:
    """The numbers from each first one on, one range after the other."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    return np.repeat(first - (ends - lengths), lengths) + np.arange(total)


def listed(first: U32, last: U32) -> tuple[Numbers, Numbers]:
    """The rows of lists, list by list, and for each row the number of its list."""
    begin = first.astype(np.int64)
    lengths = last - begin
    return ranges(begin, lengths), np.repeat(np.arange(len(begin)), lengths)


def steps_at(segments: Segments, tables: npt.NDArray[np.integer[Any]]) -> tuple[Numbers, Numbers]:
    """The steps at some places of ``step_first``, each that of a device in a segment's table: their numbers, place by
    place, and for each the number of its place in ``tables``."""
    return listed(segments.step_first[tables], segments.step_first[tables + 1])


def steps_of(segments: Segments, segment: U32, devices: int) -> tuple[Numbers, Numbers, Numbers]:
    """The steps of one microbatch, where blocks have the segments ``segment``: number, block and device of each, blocks
    ascending, of a block devices ascending, of a device in its order."""
    tables = segments.device_steps[segment].astype(np.int64)[:, None] + np.arange(devices)
    step, place = steps_at(segments, tables.ravel())
    return step, *np.divmod(place, devices)
