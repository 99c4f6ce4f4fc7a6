"""What a rank holds in memory as a step goes on, instruction by instruction, beside what was predicted.

Counted is what is there all the time (weights, the optimizer's state, buffers and constants, of the batch the part that
the rank reads) and every storage that the step makes, messages under way included. Workspace inside a kernel is not
seen. Following every storage takes time, so this is another step than those that are timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor
from torch.optim import Optimizer

from flexsearch.graph import Box, volume
from flexsearch.runtime.engine import Action, Engine
from flexsearch.runtime.instructions import Fetch, Instruction, Program
from flexsearch.runtime.live_bytes import LiveBytes
from flexsearch.runtime.microbatches import box_in_batch
from flexsearch.runtime.tasks import tasks_of
from flexsearch.simulate import Simulation
from flexsearch.simulate.memory import Curve


class Held(NamedTuple):
    """``most``: bytes held while an instruction runs, ``left``: behind it; ``start``, ``end``: s since the step began,
    as measured in other steps."""

    most: int
    left: int
    start: float = 0.0
    end: float = 0.0


class MemoryRow(NamedTuple):
    """Of one device: peaks of a step, bytes; the compute task (as in a timeline's ``Row``) at which it held most beyond
    what was predicted, and both figures there."""

    device: int
    predicted_peak: int
    measured_peak: int
    task: int
    predicted_bytes: int
    measured_bytes: int
    stage_pass: str = ""
    kind: str = ""
    name: str = ""


def held_by(engine: Engine, optimizer: Optimizer | None, step: Callable[[], object]) -> list[Held]:
    """What the instructions of ``engine`` hold on this rank, while ``step`` runs it."""
    there = list(_at_hand(engine, optimizer))
    always = sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in there}.values())
    always += _read_bytes(engine.program)
    rows: list[Held] = []
    with LiveBytes(there) as live:

        def around(_: Instruction, action: Action) -> None:
            if not rows:  # of the batch the part that is read counts, once
                live.leave_out(tensor for _, tensor in engine.inputs.values())
            live.peak = live.live
            action()
            live.refresh()
            rows.append(Held(always + max(live.peak, live.live), always + live.live))

        engine.around = around
        try:
            step()
        finally:
            engine.around = None
    return rows


def _at_hand(engine: Engine, optimizer: Optimizer | None) -> Iterator[Tensor]:
    """What a rank holds between steps."""
    yield from engine.weights.values()
    yield from (tensor for _, tensor in engine.fixed.values())
    if optimizer is not None:
        for state in optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


def _read_bytes(program: Program) -> int:
    """Bytes of the parts of the batch that a rank reads."""
    lowered, boxes = program.lowered, dict[str, Box]()
    for instruction in program.instructions:
        if isinstance(instruction, Fetch):
            edge = lowered.edges[instruction.edge]
            (need,) = {entry.box for entry in edge.need if entry.device == program.device}
            box = box_in_batch(lowered, edge.tensor, need, instruction.microbatch)
            before = boxes.get(edge.tensor, box)
            boxes[edge.tensor] = tuple((min(a, c), max(b, d)) for (a, b), (c, d) in zip(before, box, strict=True))
    tensors = lowered.batch_graph.tensor
    return sum(volume(box) * tensors[t].itemsize for t, box in boxes.items() if tensors[t].kind == "input")


def compare_held(program: Program, simulation: Simulation, curve: Curve, held: Sequence[Held]) -> MemoryRow:
    """Predicted and measured of one device, without the words for the task."""
    use = curve.use.sum(axis=0)
    rows = []
    for members, row in zip(tasks_of(program), held, strict=True):
        if members:
            middles = [float(simulation.start[t] + simulation.end[t]) / 2 for t in members]
            at = np.maximum(np.searchsorted(curve.times, middles, side="right") - 1, 0)
            rows.append((members[0], int(use[at].max()), row.most))
    task, predicted, measured = max(rows, key=lambda row: row[2] - row[1], default=(0, 0, 0))
    peak = max((row.most for row in held), default=0)
    return MemoryRow(program.device, simulation.peak_bytes[program.device], peak, task, predicted, measured)
