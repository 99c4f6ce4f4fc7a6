"""Which compute tasks of the task graph the instructions of a rank carry out. Needs no torch."""

from __future__ import annotations

from flexsearch.lower import TaskKind
from flexsearch.runtime.instructions import Backward, Forward, Program, Update


def tasks_of(program: Program) -> list[list[int]]:
    """By instruction, the compute tasks that it carries out, ascending."""
    tasks, device = program.lowered.tasks, program.device
    index = {
        (kind, tasks.operator[t], tasks.microbatch[t]): t
        for t, kind in enumerate(tasks.kind)
        if tasks.device[t] == device
    }  # an update's operator is -1
    update = [t for (kind, _, _), t in index.items() if kind == TaskKind.UPDATE]
    rows: list[list[int]] = []
    for instruction in program.instructions:
        if isinstance(instruction, Forward | Backward):
            kinds, m = _kinds(instruction), instruction.microbatch
            operators = program.segments[instruction.segment].operators
            rows.append(sorted(index[kind, o, m] for kind in kinds for o in operators if (kind, o, m) in index))
        else:
            rows.append(update[:1] if isinstance(instruction, Update) else [])
    return rows


def _kinds(instruction: Forward | Backward) -> tuple[TaskKind, ...]:
    """Of the tasks that an instruction carries out: a whole backward pass is both of its halves."""
    if isinstance(instruction, Forward):
        return (TaskKind.RECOMPUTE if instruction.again else TaskKind.FORWARD,)
    if instruction.part == "weights":
        return (TaskKind.WEIGHT_GRADIENT,)
    return (TaskKind.BACKWARD,) if instruction.part == "inputs" else (TaskKind.BACKWARD, TaskKind.WEIGHT_GRADIENT)
