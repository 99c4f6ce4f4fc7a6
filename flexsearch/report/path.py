"""The critical path for people: folded to a screen, and summed by kind of work, layer and link."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from flexsearch.graph.ops import kind_of as operator_kind
from flexsearch.lower import Lowered
from flexsearch.report.summary import layer_range, ranges
from flexsearch.report.units import percent, seconds
from flexsearch.report.words import recipe_work, task_words, tensor_words
from flexsearch.simulate import KINDS, Step, by_kind, by_resource
from flexsearch.simulate.breakdown import Kind, kind_of, split

SCREEN: Final = 16
"""Rows of the list; a longer path is folded."""
SHORT: Final = 0.002
"""Rows of a smaller share of the iteration are told together where there are many."""
MUCH: Final = 0.5
"""Where these are a larger share of the iteration, what a stage does for all microbatches is told together."""
_NUMBER: Final = re.compile(r"(?<![^.])\d+(?![^.])|(?<=[a-z])\d+(?=\.)")  # h.0.attn, layer1.0.conv1
_PHASES: Final = {
    "forward": "forward", "gather": "forward", "backward": "backward", "synchronise": "synchronise",
    "recompute": "backward", "regather": "backward", "read": "read",
}  # fmt: skip
_WAITS: Final = {
    "start": "nothing", "host": "host", "order": "device", "data": "data", "link": "link",
    "processor": "processor", "turn": "turn",
}  # fmt: skip


@dataclass(frozen=True)
class Stretch:
    """Steps that are told together. ``what``: in words. ``phase``: forward, backward, synchronise or update; of a
    pipeline, with the stage."""

    phase: str
    what: str
    where: str
    steps: tuple[Step, ...]

    @property
    def seconds(self) -> float:
        """Their time together, s."""
        return sum(step.seconds for step in self.steps)

    @property
    def waited_for(self) -> str:
        """What they waited for, the commonest first; what less than a tenth of them waited for is left out."""
        reasons = Counter(_WAITS[step.why] for step in self.steps).most_common()
        return ", ".join(reason for reason, count in reasons if 10 * count >= len(self.steps))


def layer_of(lowered: Lowered, task: int) -> str:
    """The layer that a task belongs to: of a communication, the one that makes the activation or reads the weight."""
    graph, communication = lowered.graph, lowered.tasks.communication[task]
    if communication is None or communication.recipe:
        operator = lowered.tasks.operator[task]
    elif not communication.members:
        return "the batch"
    else:
        key = communication.members[0].key
        sizes = {}
        for member in communication.members:  # a bucket: the largest
            name = lowered.weights[member.key].tensor if communication.purpose == "synchronise" else (
                lowered.edges[member.key].tensor
            )  # fmt: skip
            sizes[name] = graph.tensor[name].nbytes
        tensor = max(sizes, key=lambda name: sizes[name]) if sizes else lowered.edges[key].tensor
        operator = graph.producer.get(tensor, graph.consumers[tensor][0][0] if graph.consumers[tensor] else -1)
    if operator < 0:
        return "all weights"
    op = graph.operators[operator]
    return op.module or op.name


def stretches(lowered: Lowered, steps: Sequence[Step], most: int = SCREEN) -> tuple[Stretch, ...]:
    """The path, first to last, in at most about ``most`` rows: computations in a row are one; then what is short is
    told together at the end; then the repeated blocks of the model; then all of one kind in one phase."""
    rows = _runs([_single(lowered, step) for step in steps])
    short: list[_Row] = []
    if len(rows) > most:
        short = [row for row in rows if row.seconds < SHORT * steps[-1].end]
        if sum(row.seconds for row in short) > MUCH * steps[-1].end:  # many microbatches
            short, rows = [], _together(rows, lambda row: (row.phase, row.form, row.stage))
        rows = _runs([row for row in rows if row.seconds >= SHORT * steps[-1].end])
    if len(rows) > most:
        rows = _together(rows, lambda row: (row.phase, row.form, tuple(dict.fromkeys(map(_pattern, row.layers)))))
    if len(rows) > most:
        rows = _together(_runs([_single(lowered, step) for step in steps]), lambda row: (row.phase, row.form))
        short = [row for row in rows if row.seconds < SHORT * steps[-1].end]
        rows = [row for row in rows if row.seconds >= SHORT * steps[-1].end]
    told = [_told(lowered, row) for row in rows]
    if left := [step for row in short for step in row.steps]:
        told.append(Stretch("", f"{len(left)} short steps between these", "", tuple(left)))
    return tuple(told)


@dataclass
class _Row:
    phase: str
    form: str  # "" for computing
    layers: list[str]
    steps: list[Step]
    stage: int | None = None  # of a pipeline

    @property
    def seconds(self) -> float:
        return sum(step.seconds for step in self.steps)


def _single(lowered: Lowered, step: Step) -> _Row:
    communication = lowered.tasks.communication[step.task]
    kind, action = kind_of(lowered.tasks, step.task), lowered.tasks.action[step.task]
    stage = action.stage if action is not None and len(lowered.stages) > 1 else None
    if step.launches:
        return _Row("launch", "launch", [layer_of(lowered, step.task)], [step])
    if communication is None:
        return _Row(kind, "", [layer_of(lowered, step.task)], [step], stage)
    form = "handling" if step.moves_bytes else communication.form  # by the processor that moves the bytes
    return _Row(_PHASES[communication.purpose], form, [layer_of(lowered, step.task)], [step], stage)


def _runs(rows: Sequence[_Row]) -> list[_Row]:
    """Computations of a phase that follow each other as one row; communications stay single."""
    runs: list[_Row] = []
    for row in rows:
        alike = runs and (runs[-1].phase, runs[-1].stage) == (row.phase, row.stage)
        if alike and not row.form and not runs[-1].form:
            runs[-1].layers += row.layers
            runs[-1].steps += row.steps
        else:
            runs.append(_Row(row.phase, row.form, list(row.layers), list(row.steps), row.stage))
    return runs


def _together(rows: Sequence[_Row], key: Callable[[_Row], object]) -> list[_Row]:
    """Rows of the same key as one, at the place of the first."""
    merged: dict[object, _Row] = {}
    for row in rows:
        one = merged.setdefault(key(row), _Row(row.phase, row.form, [], [], row.stage))
        one.layers += row.layers
        one.steps += row.steps
    return list(merged.values())


def _pattern(layer: str) -> str:
    return _NUMBER.sub("*", layer)


def _told(lowered: Lowered, row: _Row) -> Stretch:
    phase = row.phase if row.stage is None else f"{row.phase}, stage {row.stage}"
    if not row.form:
        what = "weights" if row.phase == "update" else (
            ", ".join(dict.fromkeys(recipe_work(lowered, step.task) for step in row.steps))
            if row.phase == "encode" else folded(_computed(lowered, row))
        )  # fmt: skip
        return Stretch(phase, what, _devices(lowered, row.steps), tuple(row.steps))
    if row.phase == "launch":
        return Stretch(phase, f"all operators up to {row.layers[0]}", "host", tuple(row.steps))
    longest = max(row.steps, key=lambda step: step.seconds)
    communication = lowered.tasks.communication[longest.task]
    assert communication is not None
    what = f"{row.form} of {tensor_words(lowered, communication)}"
    others = len({step.task for step in row.steps}) - 1
    if others:
        what += f", and {others} like it"
    return Stretch(phase, what, _links(lowered, row.steps), tuple(row.steps))


def _computed(lowered: Lowered, row: _Row) -> list[str]:
    """The layers of a row; bookkeeping, which has no place of its own in the network, does not begin or end it."""
    graph, operator = lowered.graph, lowered.tasks.operator
    pairs = zip(row.layers, row.steps, strict=True)
    kept = [name for name, step in pairs if not operator_kind(graph.operators[operator[step.task]]).bookkeeping]
    names = list(dict.fromkeys(kept or row.layers))
    end = graph.operators[graph.producer[graph.loss]].module
    if row.phase == "forward" and end in names:  # what prepares its targets comes first, but it is the end
        names.append(names.pop(names.index(end)))
    return names


def folded(names: Sequence[str]) -> str:
    """Layers as a range; repeated blocks by the numbers of the blocks; where there are many, the first few."""
    patterns = list(dict.fromkeys(map(_pattern, names)))
    if len(patterns) < len(names):
        matches = (_NUMBER.search(name) for name in names)
        numbers = ranges({int(match[0]) for match in matches if match is not None})
        names = [pattern.replace("*", numbers, 1) for pattern in patterns]
    return layer_range(names)


def _devices(lowered: Lowered, steps: Sequence[Step]) -> str:
    used = list(dict.fromkeys(lowered.tasks.device[step.task] for step in steps))
    first = lowered.topology.devices[used[0]].name
    return first if len(used) == 1 else f"{first} and {len(used) - 1} more"


def _links(lowered: Lowered, steps: Sequence[Step]) -> str:
    busy = by_resource(lowered.tasks, steps)
    if not busy:
        return ""
    first = lowered.topology.resources[max(busy, key=lambda r: (busy[r], -r))].name
    return first if len(busy) == 1 else f"{first} and {len(busy) - 1} more"


def by_layer(lowered: Lowered, steps: Sequence[Step], repeated: bool = False) -> dict[str, dict[Kind, float]]:
    """Seconds of the path by layer and kind of work, the layer with most first. ``repeated``: a layer of the repeated
    blocks of a model counts as one, under the numbers of its blocks."""
    names: dict[str, list[str]] = {}
    sums: dict[str, dict[Kind, float]] = {}
    for step in steps:
        layer = layer_of(lowered, step.task)
        key = _pattern(layer) if repeated else layer
        names.setdefault(key, []).append(layer)
        row = sums.setdefault(key, {})
        for kind, s in split(lowered.tasks, step):
            if s > 0.0:
                row[kind] = row.get(kind, 0.0) + s
    layers = {folded(list(dict.fromkeys(names[key]))): row for key, row in sums.items()}
    return dict(sorted(layers.items(), key=lambda item: -sum(item[1].values())))


def kinds_in_words(kinds: dict[Kind, float], total: float, most: int = len(KINDS)) -> str:
    """ "synchronising gradients 3.08 s (86 %), forward pass 327 ms (9 %)"; what is below half a percent is left
    out."""
    rows = sorted(kinds.items(), key=lambda item: -item[1])[:most]
    shown = [row for row in rows if row[1] >= 0.005 * total] or rows[:1]
    return ", ".join(f"{KINDS[kind]} {seconds(s)} ({percent(s / total)})" for kind, s in shown)


def path_data(lowered: Lowered, steps: Sequence[Step]) -> dict[str, Any]:
    """The path as a JSON object: sums by kind, layer and resource, and every step."""
    resources, tasks = lowered.topology.resources, lowered.tasks
    on = sorted(by_resource(tasks, steps).items(), key=lambda item: -item[1])
    return {
        "by_kind": by_kind(tasks, steps),
        "by_layer": by_layer(lowered, steps),
        "by_resource": {resources[r].name: s for r, s in on},
        "steps": [
            {
                "task": step.task,
                "what": task_words(lowered, step.task),
                "kind": "launch" if step.launches else "handling" if step.moves_bytes else kind_of(tasks, step.task),
                "begin_s": step.begin,
                "end_s": step.end,
                "waited_for": step.why,
                "resource": resources[step.resource].name if step.resource >= 0 else None,
            }
            for step in steps
        ],
    }
