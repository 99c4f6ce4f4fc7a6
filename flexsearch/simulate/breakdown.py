"""What an iteration is made of: the kinds of work on the critical path, and how much of each kind of work there is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from flexsearch.cost.ticks import TICK
from flexsearch.lower import TaskGraph, TaskKind
from flexsearch.lower.rows import GATHER, GATHER_ONCE, READ, RECIPE, REGATHER, SYNCHRONISE, Rows
from flexsearch.simulate.critical import Step
from flexsearch.simulate.usage import computing_columns, repeats

Kind = Literal[
    "forward", "backward", "recompute", "update", "activations", "gather", "synchronise", "latency", "handling",
    "launch", "read", "encode",
]  # fmt: skip

KINDS: Final[dict[Kind, str]] = {
    "forward": "forward pass",
    "backward": "backward pass",
    "recompute": "forward pass, again",
    "update": "weight update",
    "activations": "moving activations",
    "gather": "gathering weights",
    "synchronise": "synchronising gradients",
    "encode": "encoding and merging (recipe)",
    "latency": "message latency",
    "handling": "moving bytes on the processor",
    "launch": "launching operators (host)",
    "read": "reading from storage",
}
"""Kinds of work, in words. ``activations``: with their gradients. ``latency``: the part of a communication in which no
link is busy with it."""

_COMPUTE: Final[dict[int, Kind]] = {
    TaskKind.FORWARD: "forward", TaskKind.BACKWARD: "backward", TaskKind.WEIGHT_GRADIENT: "backward",
    TaskKind.UPDATE: "update", TaskKind.RECOMPUTE: "recompute",
    TaskKind.SYNCHRONISE: "encode",
}  # fmt: skip
_PURPOSE: Final[dict[str, Kind]] = {
    "forward": "activations", "backward": "activations", "gather": "gather", "synchronise": "synchronise",
    "recompute": "activations", "regather": "gather", "read": "read",
}  # fmt: skip


def kind_of(tasks: TaskGraph, task: int) -> Kind:
    """What a task does."""
    communication = tasks.communication[task]
    return _COMPUTE[tasks.kind[task]] if communication is None else _PURPOSE[communication.purpose]


def split(tasks: TaskGraph, step: Step) -> list[tuple[Kind, float]]:
    """A step's seconds by kind: of a communication, while its busiest link is busy, and the latency after that."""
    if step.launches:
        return [("launch", step.seconds)]
    if step.moves_bytes:
        return [("handling", step.seconds)]
    kind = kind_of(tasks, step.task)
    if tasks.communication[step.task] is None:
        return [(kind, step.seconds)]
    busy = min(step.seconds, busiest(tasks.links[step.task], step))
    return [(kind, busy), ("latency", step.seconds - busy)]


def busiest(links: Iterable[tuple[int, float]], step: Step) -> float:
    """For so long from its begin on a step keeps the busiest of its task's ``links`` (resource, seconds) busy, s; it
    may be over before."""
    return max(0.0, max((seconds for _, seconds in links), default=0.0) - step.done)


def by_kind(tasks: TaskGraph, steps: Sequence[Step]) -> dict[Kind, float]:
    """Seconds of the critical path by kind of work; kinds that do not occur are left out."""
    totals = dict.fromkeys(KINDS, 0.0)
    for step in steps:
        for kind, seconds in split(tasks, step):
            totals[kind] += seconds
    return {kind: seconds for kind, seconds in totals.items() if seconds > 0.0}


def by_resource(tasks: TaskGraph, steps: Sequence[Step]) -> dict[int, float]:
    """Seconds of the critical path on each resource (index): a communication counts for its busiest link, a computation
    for its processor. Launching has none."""
    totals: dict[int, float] = {}
    for step in steps:
        if step.launches:
            continue
        if step.moves_bytes:
            resource = max(tasks.drag[step.task], key=lambda row: row[1])[0] if step.resource < 0 else step.resource
            totals[resource] = totals.get(resource, 0.0) + step.seconds
        elif tasks.links[step.task]:
            resource, seconds = max(tasks.links[step.task], key=lambda row: (row[1], -row[0]))
            whole = tasks.communication[step.task] is None
            busy = step.seconds if whole else min(step.seconds, max(0.0, seconds - step.done))
            totals[resource] = totals.get(resource, 0.0) + busy
    return totals


@dataclass(frozen=True, slots=True)
class Loads:
    """How much work there is of each sort, s, wherever it lies in time: computing on the device that has most of it;
    on the link that has most of it, moving activations (with their gradients), and weights and their gradients."""

    compute_s: float
    activations_s: float
    weights_s: float

    def __sub__(self, other: Loads) -> Loads:
        return Loads(
            self.compute_s - other.compute_s, self.activations_s - other.activations_s, self.weights_s - other.weights_s
        )


def loads(rows: Rows) -> Loads:
    """The loads of a plan."""
    segments, schedule, often = rows.segments, rows.schedule, repeats(rows)
    compute = np.zeros(len(schedule.group), np.int64)
    activations, weights = np.zeros((2, int(rows.machine.resources[0])), np.int64)
    device, block_of, _, ticks = computing_columns(rows)
    np.add.at(compute, device, often[block_of] * ticks)
    for block, segment in enumerate(rows.segment.tolist()):
        link = weights if schedule.kind[block] in (GATHER, GATHER_ONCE, REGATHER, SYNCHRONISE, RECIPE) else activations
        if schedule.kind[block] == READ:
            continue
        for c in range(segments.communication_first[segment], segments.communication_last[segment]):
            of = slice(int(segments.link_first[c]), int(segments.link_last[c]))
            np.add.at(link, segments.link[of], often[block] * segments.link_ticks[of])
    return Loads(*(float(row.max(initial=0)) * TICK for row in (compute, activations, weights)))
