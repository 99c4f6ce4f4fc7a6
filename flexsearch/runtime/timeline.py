"""The measured timeline of a step, task by task, on one clock, and where it differs from the prediction.

Compute tasks are the spans of the engine's instructions. A communication lasts from when its last sender issues it
until its last receiver has the data. That end is visible only if a receiver waits for it. If the data arrives before it
is needed, the task is ``hidden``: its end is an upper bound.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist

from flexsearch.lower import Lowered, TaskKind
from flexsearch.ranks import kernel_identity
from flexsearch.runtime.engine import Engine
from flexsearch.runtime.instructions import Backward, Forward, Instruction, Program, Start, Update
from flexsearch.runtime.parallel import Parallel
from flexsearch.runtime.program import compile_program
from flexsearch.runtime.wire import Wire
from flexsearch.simulate import Simulation

Spans = Mapping[int, tuple[float, float]]
"""Task -> (start, end), s."""
WAITED_S = 20e-6
"""A wait shorter than this found its data there."""


@dataclass(frozen=True)
class Timeline:
    """``spans``: task -> (start, end) in seconds since the step began; median over the recorded steps. ``hidden``:
    communications whose end is only an upper bound. ``iteration_s``: of the recorded steps, on the slowest rank."""

    spans: Spans
    hidden: frozenset[int]
    iteration_s: float


class Row(NamedTuple):
    """Tasks of one kind and operator (of a communication: purpose, form and tensor) in one pass of a stage, all
    devices and microbatches together. ``stage_pass``: stage and pass as in 1F; "" where a plan has no stages or
    microbatches, and for what happens once a step.
    ``predicted_s`` and ``measured_s``: mean length of a task. ``difference_s``: measured less predicted, over all
    ``tasks``; 0 for hidden communications that were predicted to be shorter than what is known of them."""

    stage_pass: str
    kind: str
    name: str
    tasks: int
    predicted_s: float
    measured_s: float
    difference_s: float


class Watched(Wire):
    """A wire that notes for which communication it waited, and when."""

    def __init__(self, wire: Wire) -> None:
        vars(self).update(vars(wire))  # the same groups, plans and buffers
        self.waits: list[tuple[int, float, float]] = []

    def wait(self, task: int, works: Sequence[dist.Work]) -> None:
        """As ``Wire.wait``."""
        began = time.perf_counter()
        super().wait(task, works)
        self.waits.append((task, began, time.perf_counter()))


def record(parallel: Parallel, step: Callable[[], object], steps: int = 3) -> Timeline:
    """Run ``step`` (which calls ``parallel.step``) ``steps`` times, operator by operator, and return what every task
    took. All ranks must call it; all get the same timeline. These are real training steps."""
    engine, offset = parallel.engine, clock_offset()
    wire = Watched(engine.wire)
    program = compile_program(parallel.lowered, parallel.rank, fuse=False)
    watched = Engine(program, wire, engine.weights, engine.fixed, engine.update, engine.context)
    watched.spans = []
    recorded = []
    parallel.engine = watched
    try:
        step()  # first calls allocate and compile
        for _ in range(steps):
            wire.waits.clear()
            dist.barrier()
            began = time.perf_counter()
            step()
            if parallel.device.type == "cuda":
                torch.cuda.synchronize()
            ended = time.perf_counter()
            assert watched.spans is not None
            mine = compute_spans(program, watched.spans)
            issued = {i.task: a for i, a, _ in watched.spans if isinstance(i, Start)}
            recorded.append(_Recorded(began, ended, mine, issued, list(wire.waits)).shifted(-offset))
    finally:
        parallel.engine = engine
    ranks: list[list[_Recorded] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, recorded)
    known = [row for row in ranks if row is not None]
    return _typical([_together(parallel.lowered, [row[k] for row in known]) for k in range(steps)])


def compute_spans(
    program: Program, spans: Sequence[tuple[Instruction, float, float]]
) -> dict[int, tuple[float, float]]:
    """Compute tasks of a rank, from the spans of its instructions. A segment of several operators is shared out in
    proportion to their predicted times."""
    lowered, device = program.lowered, program.device
    tasks = lowered.tasks
    index = {
        (kind, tasks.operator[t], tasks.microbatch[t]): t
        for t, kind in enumerate(tasks.kind)
        if tasks.device[t] == device
    }  # an update's operator is -1
    update = next((t for (kind, _, _), t in index.items() if kind == TaskKind.UPDATE), None)
    found: dict[int, tuple[float, float]] = {}
    for instruction, start, end in spans:
        if isinstance(instruction, Update):
            assert update is not None
            found[update] = start, end
        elif isinstance(instruction, Forward | Backward):
            kinds, m = _kinds(instruction), instruction.microbatch
            operators = program.segments[instruction.segment].operators
            members = sorted(index[kind, o, m] for kind in kinds for o in operators if (kind, o, m) in index)
            total = sum(tasks.duration[t] for t in members)
            for t in members:
                share = tasks.duration[t] / total if total > 0 else 1 / len(members)
                found[t] = start, start + share * (end - start)
                start, total = found[t][1], total - tasks.duration[t]
    return found


def _kinds(instruction: Forward | Backward) -> tuple[TaskKind, ...]:
    """Of the tasks that an instruction carries out: a whole backward pass is both of its halves."""
    if isinstance(instruction, Forward):
        return (TaskKind.RECOMPUTE if instruction.again else TaskKind.FORWARD,)
    if instruction.part == "weights":
        return (TaskKind.WEIGHT_GRADIENT,)
    return (TaskKind.BACKWARD,) if instruction.part == "inputs" else (TaskKind.BACKWARD, TaskKind.WEIGHT_GRADIENT)


def compare(lowered: Lowered, simulation: Simulation, measured: Timeline) -> list[Row]:
    """Where the error of the prediction sits: rows by falling absolute difference."""
    groups: dict[tuple[str, str, str], list[int]] = {}
    for task in measured.spans:
        groups.setdefault(_title(lowered, task), []).append(task)
    rows = []
    for (stage_pass, kind, name), tasks in groups.items():
        predicted = [float(simulation.end[t] - simulation.start[t]) for t in tasks]
        taken = [measured.spans[t][1] - measured.spans[t][0] for t in tasks]
        difference = sum(
            min(0.0, m - p) if t in measured.hidden else m - p for t, p, m in zip(tasks, predicted, taken, strict=True)
        )
        count = len(tasks)
        rows.append(Row(stage_pass, kind, name, count, sum(predicted) / count, sum(taken) / count, difference))
    return sorted(rows, key=lambda row: (-abs(row.difference_s), row.stage_pass, row.kind, row.name))


def clock_offset(rounds: int = 20, ping: bool | None = None) -> float:
    """Seconds that this rank's ``time.perf_counter`` is ahead of rank 0's. All ranks must call it.

    Processes under one kernel share that clock. From other machines rank 0's is asked for, and taken to have been read
    half-way through the fastest of ``rounds`` round trips (Cristian 1989). ``ping=True`` asks in any case.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    machines: list[str | None] = [None] * size
    dist.all_gather_object(machines, kernel_identity())
    apart = [r for r in range(1, size) if ping or (ping is None and machines[r] != machines[0])]
    if not apart:
        return 0.0
    group = dist.new_group(backend="gloo") if dist.get_backend() == "nccl" else dist.group.WORLD
    result = 0.0
    for other in apart:
        if rank in (0, other):
            offset = _ping(0 if rank == other else other, rank == other, rounds, group)
            result = offset if rank == other else result
    return result


def _ping(peer: int, asking: bool, rounds: int, group: dist.ProcessGroup | None) -> float:
    """Clock of this rank less that of ``peer``, s, if it is ``asking``."""
    best, offset = float("inf"), 0.0
    there = torch.zeros(1, dtype=torch.float64)
    for _ in range(rounds):
        if asking:
            began = time.perf_counter()
            dist.send(there, peer, group=group)
            dist.recv(there, peer, group=group)
            ended = time.perf_counter()
            if ended - began < best:
                best, offset = ended - began, (began + ended) / 2 - there.item()
        else:
            dist.recv(there, peer, group=group)
            there[0] = time.perf_counter()
            dist.send(there, peer, group=group)
    return offset


@dataclass(frozen=True)
class _Recorded:
    """One step of one rank: when it ``began`` and ``ended``, its compute tasks, when it ``issued`` communications, and
    (communication, start, end) of its waits."""

    began: float
    ended: float
    compute: Spans
    issued: Mapping[int, float]
    waits: Sequence[tuple[int, float, float]]

    def shifted(self, by: float) -> _Recorded:
        """The same on another clock."""
        return _Recorded(
            self.began + by,
            self.ended + by,
            {t: (a + by, b + by) for t, (a, b) in self.compute.items()},
            {t: a + by for t, a in self.issued.items()},
            [(t, a + by, b + by) for t, a, b in self.waits],
        )


def _together(lowered: Lowered, ranks: Sequence[_Recorded]) -> Timeline:
    """One step from what all its ranks recorded."""
    began = min(rank.began for rank in ranks)
    spans = {t: (a - began, b - began) for rank in ranks for t, (a, b) in rank.compute.items()}
    hidden = set()
    for task, what in enumerate(lowered.tasks.communication):
        if what is None:
            continue
        starts = [ranks[d].issued[task] for d in what.senders if task in ranks[d].issued]
        waits = [(a, b) for d in what.receivers for t, a, b in ranks[d].waits if t == task]
        if starts and waits:
            start, (_, end) = max(starts), max(waits, key=lambda wait: wait[1])
            spans[task] = start - began, max(start, end) - began
            if all(b - a < WAITED_S for a, b in waits if b == end):
                hidden.add(task)
    return Timeline(spans, frozenset(hidden), max(rank.ended for rank in ranks) - began)


def _typical(steps: Sequence[Timeline]) -> Timeline:
    spans = {
        task: (median(s.spans[task][0] for s in steps), median(s.spans[task][1] for s in steps))
        for task in steps[0].spans
        if all(task in s.spans for s in steps)
    }
    hidden = {task for task in spans if 2 * sum(task in s.hidden for s in steps) > len(steps)}
    return Timeline(spans, frozenset(hidden), median(s.iteration_s for s in steps))


def _title(lowered: Lowered, task: int) -> tuple[str, str, str]:
    action = lowered.tasks.action[task]
    stage_pass = "" if action is None else f"{action.stage}{action.kind}"
    kind, what = TaskKind(lowered.tasks.kind[task]), lowered.tasks.communication[task]
    if what is None:
        operator = lowered.tasks.operator[task]
        return stage_pass, kind.name.lower(), lowered.graph.operators[operator].name if operator >= 0 else "optimizer"
    names = [
        lowered.weights[m.key].tensor if what.purpose == "synchronise" else lowered.edges[m.key].tensor
        for m in what.members
    ]
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return stage_pass, f"{what.purpose} {what.form}", names[0] + more
