"""What each device does all the time, from the rows of a plan and when they start and end: it computes, or takes part
in a communication, or waits for its host, or is idle."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from flexsearch.cost.ticks import TICK
from flexsearch.lower import Lowered
from flexsearch.lower.actions import Action
from flexsearch.lower.rows import (
    BACKWARD,
    COMPUTE,
    FORWARD,
    GATHER,
    GATHER_ONCE,
    ISSUE,
    READ,
    RECIPE,
    RECOMPUTE,
    REGATHER,
    SYNCHRONISE,
    UPDATE,
    WEIGHT_GRADIENT,
    Numbers,
    Rows,
    blocks_run,
    steps_at,
    steps_of,
)
from flexsearch.lower.schedule import Stages
from flexsearch.lower.taskgraph import Row
from flexsearch.lower.view import Actions
from flexsearch.simulate.engine import Times

Spans = npt.NDArray[np.int64]
"""Beginnings and ends, ticks: (n, 2)."""
WORK: Final = ("forward", "recompute", "backward", "update", "encode")
"""Sorts of computing."""
SORTS: Final[dict[str, str]] = {
    "tensor": "moving activations inside a stage", "pipeline": "messages between stages",
    "gather": "gathering weights", "synchronise": "synchronising gradients", "read": "reading from storage",
}  # fmt: skip
"""Sorts of communication, in words. Where several go on while a device computes nothing, the first one counts."""
_WORK: Final[dict[int, str]] = {
    FORWARD: "forward", RECOMPUTE: "recompute", BACKWARD: "backward", WEIGHT_GRADIENT: "backward", UPDATE: "update",
    RECIPE: "encode",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class DeviceTime:
    """What a device does during an iteration, s: it computes; else it takes part in a communication that nothing
    hides; else it waits for its host, before a computation that begins as soon as it is launched; else it is idle,
    which in a pipeline is its bubbles. The four add up to the makespan. ``work_s``: computing by kind; ``exposed_s``:
    communication by sort; ``moving_s``: all its communications, those beside computing too."""

    work_s: Mapping[str, float]
    exposed_s: Mapping[str, float]
    host_s: float
    idle_s: float
    moving_s: float

    @property
    def compute_s(self) -> float:
        """All computing, s."""
        return sum(self.work_s.values())

    @property
    def communicate_s(self) -> float:
        """All communication that nothing hides, s."""
        return sum(self.exposed_s.values())


class Computation(NamedTuple):
    """A computation of a block: on which device, its number in the block, ticks."""

    device: int
    block: int
    number: int
    ticks: int


def computing_columns(rows: Rows) -> tuple[Numbers, Numbers, Numbers, Numbers]:
    """Device, block, number in the block and ticks of the computations of one microbatch, in the order of blocks; of a
    device, in the order in which it runs them."""
    segments = rows.segments
    step, block, device = steps_of(segments, rows.segment, len(rows.schedule.group))
    computes = segments.step_kind[step] == COMPUTE
    step = step[computes]
    return device[computes], block[computes], segments.step_row[step].astype(np.int64), segments.step_ticks[step]


def computing_steps(rows: Rows) -> Iterator[Computation]:
    """The same, one after the other."""
    columns = (column.tolist() for column in computing_columns(rows))
    yield from map(Computation._make, zip(*columns, strict=True))


def repeats(rows: Rows) -> Numbers:
    """By block, for how many microbatches it runs."""
    once = (rows.schedule.once == 1) | (rows.schedule.last == 1)
    return np.where(once, 1, np.int64(rows.schedule.microbatches[0]))


def computations(rows: Rows, times: Times) -> Iterator[tuple[int, int, int, int]]:
    """The same, with the place of their rows in ``Times`` instead of their number."""
    for device, block, number, ticks in computing_steps(rows):
        yield device, block, int(times.computation_first[block]) + number, ticks


def device_times(rows: Rows, times: Times) -> tuple[DeviceTime, ...]:
    """By device."""
    devices, total = len(rows.schedule.group), makespan_of(times)
    work: list[dict[str, int]] = [{} for _ in range(devices)]
    computing: list[list[Spans]] = [[] for _ in range(devices)]
    for device, block, place, ticks in computations(rows, times):
        spans = _spans(times.computation_start, times.computation_end, place)
        computing[device].append(spans)
        kind = _WORK[int(rows.schedule.kind[block])]
        work[device][kind] = work[device].get(kind, 0) + len(spans) * ticks
    moving = _moving(rows, times)
    return tuple(
        _device_time(
            total, work[d], _joined(computing[d]), {sort: _joined(row) for sort, row in moving[d].items()},
            _launching(rows, times, d) if rows.machine.hosted[0] else computing[d][:0],
        )
        for d in range(devices)
    )  # fmt: skip


def _launching(rows: Rows, times: Times, device: int) -> list[Spans]:
    """When a device waits for its host: from the end of a computation to the begin of the next one, if that begins as
    soon as it is launched."""
    schedule, group, final = rows.schedule, rows.schedule.group[device], int(rows.schedule.final[0])
    begun, ended = times.computation_start, times.computation_end
    counted: dict[object, tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], int]] = {}
    waits, host, before = list[Spans](), 0, 0
    for a in range(schedule.action_first[group], schedule.action_last[group]):
        m = int(schedule.microbatch[a])
        key = int(schedule.block_first[a]), int(schedule.block_last[a]), m == 0, m == final
        if key not in counted:
            counted[key] = _launched(rows, times, device, blocks_run(schedule, a))
        places, launched, ticks = counted[key]
        if len(places):
            start, end = begun[m, places], ended[m, places]
            previous = np.concatenate([[before], end[:-1]])
            late = (start == host + launched) & (start > previous)
            waits.append(np.stack([previous[late], start[late]], axis=1))
            before = int(end[-1])
        host += ticks
    return waits


def _launched(
    rows: Rows, times: Times, device: int, blocks: Numbers
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], int]:
    """Of the computations of a device in some blocks: places, ticks of its host until each is launched; and of all."""
    segments = rows.segments
    step, at = steps_at(segments, segments.device_steps[rows.segment[blocks]].astype(np.int64) + device)
    launched, computes = segments.step_host[step].cumsum(), segments.step_kind[step] == COMPUTE
    places = times.computation_first[blocks[at]].astype(np.int64) + segments.step_row[step]
    return places[computes], launched[computes], int(segments.step_host[step].sum())


def stage_seconds(rows: Rows, stages: Stages) -> list[tuple[float, float]]:
    """By stage: computing of one microbatch, forward and backward (what is computed again included), on the device that
    computes most, s."""
    operators = int(rows.schedule.argument[rows.schedule.kind == FORWARD].max()) + 1
    stage_of, ticks = stages.of(operators), np.zeros((len(stages), 2, len(rows.schedule.group)), np.int64)
    for device, block, _, own in computing_steps(rows):
        if (kind := int(rows.schedule.kind[block])) in _WORK and kind not in (UPDATE, RECIPE):
            ticks[stage_of[int(rows.schedule.argument[block])], int(kind != FORWARD), device] += own
    most = ticks[np.arange(len(stages)), :, ticks.sum(axis=1).argmax(axis=1)] * TICK
    return [(float(forward), float(backward)) for forward, backward in most]


class Pass(NamedTuple):
    """An action of a pipeline on a device, from its first computation to the end of its last one, ticks."""

    device: int
    action: Action
    begin: int
    end: int


def passes(lowered: Lowered, times: Times) -> list[Pass]:
    """What devices run of a pipeline, those of a device in order; none of a plan that is cut neither into stages nor
    into microbatches."""
    rows, actions = lowered.rows, Actions(lowered)
    alike: dict[tuple[int, Action | None, int], tuple[int, list[int]]] = {}
    """By device, stage (as an action of the first microbatch) and kind of block: one of the blocks, and its rows."""
    for device, block, place, _ in computations(rows, times):
        key = device, actions.of(Row(0, block, 0, 0)), int(rows.schedule.kind[block])
        alike.setdefault(key, (block, []))[1].append(place)
    ends: dict[tuple[int, Action], tuple[int, int]] = {}
    for (device, _, _), (block, places) in alike.items():
        for m in range(lowered.stages.microbatches):
            if (action := actions.of(Row(m, block, 0, 0))) is not None:
                begin = int(times.computation_start[m, places].min())
                end = int(times.computation_end[m, places].max())
                before = ends.get((device, action), (begin, end))
                ends[device, action] = min(begin, before[0]), max(end, before[1])
    passes = [Pass(device, action, *span) for (device, action), span in ends.items()]
    return sorted(passes, key=lambda one: (one.device, one.begin, one.end))


def count_tasks(times: Times) -> int:
    """How many tasks a step has."""
    return int((times.computation_end >= 0).sum() + (times.communication_end >= 0).sum())


def makespan_of(times: Times) -> int:
    """Ticks until the last row ends."""
    ends = times.computation_end, times.communication_end
    return max(int(end.max(initial=0)) for end in ends)


def _device_time(
    total: int, work: Mapping[str, int], computing: Spans, moving: Mapping[str, Spans], launching: Sequence[Spans]
) -> DeviceTime:  # fmt: skip
    own = sum(work.values())
    # Where devices share a processor, a task's span holds turns of others; those count as waiting, not computing.
    left, together, before = total - own, computing, covered(computing)
    exposed: dict[str, float] = {}
    for sort in SORTS:
        if sort in moving:
            together = np.concatenate([together, moving[sort]])
            now = covered(together)
            alone, before = min(left, now - before), now
            left -= alone
            if alone:
                exposed[sort] = alone * TICK
    host = min(left, covered(np.concatenate([together, *launching])) - before)
    return DeviceTime(
        {kind: ticks * TICK for kind, ticks in work.items()}, exposed, host * TICK, (left - host) * TICK,
        covered(_joined(list(moving.values()))) * TICK,
    )  # fmt: skip


def _moving(rows: Rows, times: Times) -> list[dict[str, list[Spans]]]:
    """By device and sort, when it takes part in communications."""
    segments, devices = rows.segments, len(rows.schedule.group)
    step, of, on = steps_of(segments, rows.segment, devices)
    issues = segments.step_kind[step] == ISSUE
    parties: dict[tuple[int, int], set[int]] = {}
    for block, c, device in zip(*(x[issues].tolist() for x in (of, segments.step_row[step], on)), strict=True):
        parties.setdefault((block, c), set()).add(device)
    by_device: list[dict[str, list[Spans]]] = [{} for _ in range(devices)]
    for block, segment in enumerate(rows.segment.tolist()):
        first = int(segments.communication_first[segment])
        for c in range(int(segments.communication_last[segment]) - first):
            receivers = slice(segments.receiver_first[first + c], segments.receiver_last[first + c])
            members = parties.get((block, c), set()).union(segments.receiver[receivers].tolist())
            place = int(times.communication_first[block]) + c
            spans, sort = _spans(times.communication_start, times.communication_end, place), _sort(rows, block, members)
            for device in members:
                by_device[device].setdefault(sort, []).append(spans)
    return by_device


def _sort(rows: Rows, block: int, members: set[int]) -> str:
    kind = int(rows.schedule.kind[block])
    if kind in (GATHER, GATHER_ONCE, REGATHER):
        return "gather"
    if kind == READ:
        return "read"
    if kind in (SYNCHRONISE, RECIPE):
        return "synchronise"
    return "pipeline" if len({int(rows.schedule.group[d]) for d in members}) > 1 else "tensor"


def _spans(start: npt.NDArray[np.int64], end: npt.NDArray[np.int64], place: int) -> Spans:
    """Of the microbatches for which a row happens."""
    spans = np.stack([start[:, place], end[:, place]], axis=1)
    return spans[spans[:, 1] >= 0]


def _joined(rows: Sequence[Spans]) -> Spans:
    return np.concatenate([np.zeros((0, 2), np.int64), *rows])


def covered(spans: Spans) -> int:
    """Ticks of the union of intervals."""
    if not len(spans):
        return 0
    ordered = spans[np.argsort(spans[:, 0], kind="stable")]
    reach = np.maximum.accumulate(ordered[:, 1])
    before = np.concatenate([ordered[:1, 0], reach[:-1]])
    return int(np.maximum(0, reach - np.maximum(before, ordered[:, 0])).sum())
