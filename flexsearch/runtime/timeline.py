"""The measured timeline of a step, task by task, on one clock, and where it differs from the prediction.

Compute tasks are the spans of the engine's instructions. A communication lasts from when its bytes can flow (all
senders have issued it, all receivers have room for it, and one of its connections has delivered what it carried before)
until its last receiver has the data. Where nobody waited when the data came, the task is ``hidden``: its end is an
upper bound.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from flexsearch.clocks import clock_of
from flexsearch.lower import Lowered, TaskKind
from flexsearch.ranks import kernel_identity
from flexsearch.runtime.arrivals import Receipt, Watched, flows_from, free_since
from flexsearch.runtime.engine import Action, Engine
from flexsearch.runtime.held import Held, MemoryRow, compare_held, held_by
from flexsearch.runtime.instructions import Instruction, Program, Start
from flexsearch.runtime.program import compile_program
from flexsearch.runtime.recipes.plan import without_synchronisation
from flexsearch.runtime.tasks import tasks_of
from flexsearch.simulate import Simulation
from flexsearch.simulate.memory import memory_curves

Spans = Mapping[int, tuple[float, float]]
"""Task -> (start, end), s."""


@dataclass(frozen=True)
class Timeline:
    """``spans``: task -> (start, end) in seconds since the step began; median over the recorded steps. ``hidden``:
    communications whose end is only an upper bound. ``iteration_s``: of the recorded steps, on the slowest rank.
    ``memory``: by rank, what its instructions held."""

    spans: Spans
    hidden: frozenset[int]
    iteration_s: float
    memory: Sequence[Sequence[Held]] = ()

    def curves(self) -> dict[int, list[tuple[float, int]]]:
        """By rank, (time s, bytes held from then on), ascending: the most that is held while an instruction runs, and
        what is left behind it."""
        rows = {}
        for device, states in enumerate(self.memory):
            row = [state for x in states for state in ((x.start, x.most), (x.end, x.left))]
            rows[device] = [state for k, state in enumerate(row) if k == 0 or state[1] != row[k - 1][1]]
        return rows


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


class Traceable(Protocol):
    """A step as recording it needs it: ``runtime.step.Parallel``, which builds on this module."""

    engine: Engine
    optimizer: Optimizer | None
    device: torch.device

    @property
    def lowered(self) -> Lowered: ...

    @property
    def rank(self) -> int: ...


def record(
    parallel: Traceable, step: Callable[[], object], steps: int = 3, optimizer: Optimizer | None = None
) -> Timeline:
    """Run ``step`` (which calls ``parallel.step``) ``steps`` times, operator by operator, and return what every task
    took; and twice more, before that, to allocate and compile, and to see what is held in memory. All ranks must call
    it; all get the same timeline. These are real training steps. ``optimizer``: another than ``parallel``'s own."""
    engine, offset = parallel.engine, clock_offset()
    program = compile_program(engine.program.lowered, parallel.rank, fuse=False)
    wire = Watched(engine.wire, program.instructions, clock_of(parallel.device))
    watched = Engine(program, wire, engine.weights, engine.fixed, engine.update, engine.context)
    recorded: list[_Recorded] = []
    parallel.engine = watched
    try:
        wire.begin()
        step()  # first calls allocate and compile
        wire.begin()
        nbytes = held_by(watched, optimizer or parallel.optimizer, step)
        for _ in range(steps):
            wire.begin()
            dist.barrier()
            recorded.append(_recorded(watched, wire, step).shifted(-offset))
    finally:
        wire.close()
        parallel.engine = engine
    ranks: list[tuple[list[_Recorded], list[Held]] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, (recorded, nbytes))
    records = [row for row in ranks if row is not None]
    together = [_together(parallel.lowered, [row[k] for row, _ in records]) for k in range(steps)]
    return _typical(together, [held for _, held in records])


def _recorded(engine: Engine, wire: Watched, step: Callable[[], object]) -> _Recorded:
    """One step of this rank, on its device's clock, which the host does not wait for."""
    clock, marks = wire.clock, list[tuple[Instruction, Any, Any]]()

    def around(instruction: Instruction, action: Action) -> None:
        start = clock.mark()
        action()
        marks.append((instruction, start, clock.mark()))

    engine.around = around
    clock.wait()
    began, zero = time.perf_counter(), clock.mark()
    step()
    last = clock.mark()
    clock.wait()
    engine.around = None

    def when(mark: Any) -> float:
        return clock.when(mark, zero, began)

    spans = [(instruction, when(start), when(end)) for instruction, start, end in marks]
    issued = {i.task: a for i, a, _ in spans if isinstance(i, Start)}
    compute = compute_spans(engine.program, spans)
    return _Recorded(began, when(last), compute, issued, wire.receipts(when), [(a, b) for _, a, b in spans])


def compute_spans(
    program: Program, spans: Sequence[tuple[Instruction, float, float]]
) -> dict[int, tuple[float, float]]:
    """Compute tasks of a rank, from the spans of its instructions. A segment of several operators is shared out in
    proportion to their predicted times."""
    tasks = program.lowered.tasks
    task_spans: dict[int, tuple[float, float]] = {}
    for (_, start, end), members in zip(spans, tasks_of(program), strict=True):
        total = sum(tasks.duration[t] for t in members)
        for t in members:
            share = tasks.duration[t] / total if total > 0 else 1 / len(members)
            task_spans[t] = start, start + share * (end - start)
            start, total = task_spans[t][1], total - tasks.duration[t]
    return task_spans


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


def compare_memory(lowered: Lowered, simulation: Simulation, measured: Timeline) -> list[MemoryRow]:
    """What each rank was predicted to hold, and held, devices ascending."""
    rows, curves = [], memory_curves(lowered, simulation.times)
    runs = without_synchronisation(lowered, {name for group in lowered.recipe_groups for name in group.names})
    for device, states in enumerate(measured.memory):
        row = compare_held(compile_program(runs, device, fuse=False), simulation, curves[device], states)
        stage_pass, kind, name = _title(lowered, row.task)
        rows.append(row._replace(stage_pass=stage_pass, kind=kind, name=name))
    return rows


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
    """One step of one rank: when it ``began`` and ``ended``, its compute tasks, when it ``issued`` communications, what
    it received, and (start, end) of its instructions."""

    began: float
    ended: float
    compute: Spans
    issued: Mapping[int, float]
    receipts: Sequence[Receipt]
    instructions: Sequence[tuple[float, float]]

    def shifted(self, by: float) -> _Recorded:
        """The same on another clock."""
        return _Recorded(
            self.began + by,
            self.ended + by,
            {t: (a + by, b + by) for t, (a, b) in self.compute.items()},
            {t: a + by for t, a in self.issued.items()},
            [receipt.shifted(by) for receipt in self.receipts],
            [(a + by, b + by) for a, b in self.instructions],
        )


class _Step(NamedTuple):
    """One step of all ranks, seconds since it began; ``instructions``: of each rank."""

    spans: Spans
    hidden: frozenset[int]
    iteration_s: float
    instructions: Sequence[Sequence[tuple[float, float]]]


def _together(lowered: Lowered, ranks: Sequence[_Recorded]) -> _Step:
    """One step from what all its ranks recorded."""
    began = min(rank.began for rank in ranks)
    spans = {t: (a - began, b - began) for rank in ranks for t, (a, b) in rank.compute.items()}
    receipts: dict[int, dict[tuple[int, int], Receipt]] = {}
    for device, rank in enumerate(ranks):
        for receipt in sorted(rank.receipts, key=lambda x: x.arrived, reverse=True):  # the first notice counts
            receipts.setdefault(receipt.task, {})[receipt.peer, device] = receipt
    free = free_since(receipts)
    hidden = set()
    for task, what in enumerate(lowered.tasks.communication):
        if what is None or task not in receipts:
            continue
        got = {(s, r): x for (s, r), x in receipts[task].items() if r in what.receivers}
        starts = [ranks[d].issued[task] for d in what.senders if task in ranks[d].issued]
        if starts and got:
            start = flows_from(what, starts, got, free)
            last = max(got.values(), key=lambda x: x.arrived)
            spans[task] = start - began, max(start, last.arrived) - began
            if last.late:
                hidden.add(task)
    instructions = [[(a - began, b - began) for a, b in rank.instructions] for rank in ranks]
    return _Step(spans, frozenset(hidden), max(rank.ended for rank in ranks) - began, instructions)


def _typical(steps: Sequence[_Step], held: Sequence[Sequence[Held]]) -> Timeline:
    spans = {
        task: (median(s.spans[task][0] for s in steps), median(s.spans[task][1] for s in steps))
        for task in steps[0].spans
        if all(task in s.spans for s in steps)
    }
    hidden = {task for task in spans if 2 * sum(task in s.hidden for s in steps) > len(steps)}
    memory = []
    for device, rows in enumerate(held):
        times = zip(*(s.instructions[device] for s in steps), strict=True)
        memory.append([
            row._replace(start=median(a for a, _ in each), end=median(b for _, b in each))
            for row, each in zip(rows, times, strict=True)
        ])  # fmt: skip
    return Timeline(spans, frozenset(hidden), median(s.iteration_s for s in steps), memory)


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
