"""Does a rank hold what was predicted? The peak of live bytes within a step of random plans, measured and predicted.

    python -m benchmarks.memory_peaks [--quick] [--json] [--plans 20] [--seed 0] [--models decoder,images,mlp]
    python -m benchmarks.memory_peaks --only 3 [--seed 0] [--models decoder]

Plans are random over stages, schedules, microbatches, replicas, recomputation, states kept in parts, buckets, prefetch
and splits of their own for gradients of weights (``tests.staged_plans``), on 1 to 4 gloo ranks of this machine. Counted
are a rank's weights, the part of the batch that it reads, and every storage that lives within the step, messages under
way included (``runtime.held``). ``--only N`` shows for plan N what each rank holds at its peak, by the value that holds
it, beside the parts of memory that the account has at that task. It takes about 3 minutes on two cores.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.harness import Row, median, parser, report
from flexsearch.cost import Costs
from flexsearch.graph import Tracing
from flexsearch.graph.importer import Imported, import_with_constants
from flexsearch.lower import lower_for_ranks
from flexsearch.runtime.engine import Engine
from flexsearch.runtime.held import held_by
from flexsearch.runtime.instructions import Instruction
from flexsearch.runtime.live_bytes import LiveBytes
from flexsearch.runtime.parallel import Parallel, distribute
from flexsearch.runtime.program import compile_program
from flexsearch.runtime.tasks import tasks_of
from flexsearch.simulate import simulate
from flexsearch.simulate.memory import PARTS, memory, memory_curves
from flexsearch.strategy import Strategy
from flexsearch.strategy.files import StrategyFile
from tests.ranks import pool
from tests.staged_plans import Deep, staged_plan, tokens_loss

WITHIN = 0.05
"""A peak that differs by no more counts as predicted."""
LARGE_BYTES = 300_000
"""Ranks that hold less, as measured and predicted, are counted apart: a few numbers are much of them."""


class Model(NamedTuple):
    """A model with a batch and its loss."""

    module: nn.Module
    inputs: Tensor
    targets: Tensor
    loss: Callable[[Tensor, Tensor], Tensor]


def _decoder() -> Model:
    return Model(Deep(width=64), torch.randint(7, (8, 64)), torch.randint(7, (8, 64)), tokens_loss)


def _images() -> Model:
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Flatten(), nn.Linear(32 * 16, 128), nn.ReLU(), nn.Linear(128, 10)]
    loss = nn.functional.cross_entropy
    return Model(nn.Sequential(*layers), torch.randn(8, 3, 16, 16), torch.randint(10, (8,)), loss)


def _mlp() -> Model:
    layers = [layer for _ in range(5) for layer in (nn.Linear(256, 256), nn.GELU())]
    return Model(nn.Sequential(*layers), torch.randn(64, 256), torch.randn(64, 256), nn.functional.mse_loss)


MODELS: dict[str, Callable[[], Model]] = {"decoder": _decoder, "images": _images, "mlp": _mlp}


def model_of(name: str) -> Model:
    """The model with a batch, always the same."""
    torch.manual_seed(0)
    return MODELS[name]()


def imported(name: str) -> Imported:
    """The model's graph."""
    model = model_of(name)
    return import_with_constants(model.module, (model.inputs,), model.loss, targets=model.targets, tracing=Tracing())


def plan_of(name: str, graph: Any, number: int, seed: int = 0) -> Strategy:
    """Random plan ``number`` of a model."""
    return staged_plan(graph, random.Random(f"{name} {number}" + f" {seed}" * bool(seed)), divided=0.2)


class AtPeak(NamedTuple):
    """What a rank holds at its peak: where in its program that is, and bytes by what holds them."""

    nbytes: int
    instruction: int
    holders: dict[str, int]


def measured_peak(name: str, graph: Imported, file: str, holders: bool) -> AtPeak:
    """On a rank: the peak of its second step."""
    model = model_of(name)
    step = distribute(model.module, graph, Strategy.from_file(StrategyFile.model_validate_json(file)))

    def run() -> None:
        for weight in step.engine.weights.values():
            weight.grad = None
        step(((model.inputs,), model.targets))

    run()
    rows = held_by(step.engine, None, run)
    peak = max(row.most for row in rows)
    at = next(k for k, row in enumerate(rows) if row.most == peak)
    return AtPeak(peak, at, _holders(step, run, at) if holders else {})


def _holders(step: Parallel, run: Callable[[], None], at: int) -> dict[str, int]:
    """Bytes that are there at the peak of instruction ``at``, by the value that holds them."""
    engine = step.engine
    there = [*engine.weights.values(), *(tensor for _, tensor in engine.fixed.values())]
    names: dict[int, str] = {}
    top = Counter[str]()
    count, operator = [0], [""]

    class Watched(LiveBytes):  # type: ignore[no-untyped-call]
        """Remembers what there was when most was, and where what is there was made."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            before, operator[0] = self.peak, str(func)
            result = super().__torch_dispatch__(func, types, args, kwargs)
            if self.peak > before or not top:
                note()
            return result

        def _note(self, storage: torch.UntypedStorage) -> None:
            if storage._cdata not in self._storages:  # another may have been at its place
                names[storage._cdata] = f"made in {count[0]} by {operator[0]}"
            super()._note(storage)

    def note() -> None:
        top.clear()
        for key, (_, nbytes) in live._storages.items():
            top[names[key]] += nbytes

    with Watched(there) as live:

        def around(_: Instruction, action: Callable[[], None]) -> None:
            if not count[0]:
                live.leave_out(tensor for _, tensor in engine.inputs.values())
            if count[0] <= at:
                names.update(_named(engine))
            live.peak = live.live if count[0] == at else 1 << 60
            if count[0] == at:
                note()
            operator[0] = "itself"
            action()
            live.refresh()
            count[0] += 1

        engine.around = around
        try:
            run()
        finally:
            engine.around = None
    return dict(top.most_common())


def _named(engine: Engine) -> Iterable[tuple[int, str]]:
    for key, value in zip(engine.program.slots, engine._values, strict=True):
        tensors = [value] if isinstance(value, Tensor) else getattr(value, "buffers", [])
        edge = int(str(key.name)) if key.kind in ("edge", "edge gradient") else None
        name = key.name if edge is None else engine.lowered.edges[edge].tensor
        for tensor in tensors:
            yield tensor.untyped_storage()._cdata, f"{key.kind} {name} {key.microbatch} {'again' if key.again else ''}"


def peaks(name: str, number: int, graph: Imported, seed: int = 0) -> list[Row]:
    """One row for each rank of a plan."""
    plan = plan_of(name, graph.graph, number, seed)
    lowered = lower_for_ranks(graph.graph, plan, plan.cluster, Costs(graph.graph, plan.cluster))
    predicted = [m.peak - m.optimizer for m in memory(lowered)]
    measured = pool(len(predicted)).run(measured_peak, name, graph, plan.to_file().model_dump_json(), False)
    options = plan.options
    return [
        {
            "model": name, "plan": number, "rank": rank, "stages": len(lowered.stages.first),
            "schedule": lowered.stages.kind, "microbatches": lowered.stages.microbatches,
            "recompute": options.recompute, "predicted": before, "measured": after.nbytes,
            "ratio": after.nbytes / before,
        }
        for rank, (before, after) in enumerate(zip(predicted, measured, strict=True))
    ]  # fmt: skip


def show(name: str, number: int, graph: Imported, seed: int = 0) -> None:
    """What the ranks of a plan hold at their peaks, and what the account has there."""
    plan = plan_of(name, graph.graph, number, seed)
    lowered = lower_for_ranks(graph.graph, plan, plan.cluster, Costs(graph.graph, plan.cluster))
    simulation = simulate(lowered)
    predicted, curves = memory(lowered), memory_curves(lowered, simulation.times)
    measured = pool(len(predicted)).run(measured_peak, name, graph, plan.to_file().model_dump_json(), True)
    for rank, at in enumerate(measured):
        program = compile_program(lowered, rank)
        use = predicted[rank]
        print(f"rank {rank}: predicted {use.peak - use.optimizer} without optimizer states, measured {at.nbytes}")
        before = next((row[0] for row in reversed(tasks_of(program)[: at.instruction + 1]) if row), 0)
        middle = float(simulation.start[before] + simulation.end[before]) / 2
        there = curves[rank].use[:, max(0, int(np.searchsorted(curves[rank].times, middle, side="right")) - 1)]
        print("  predicted at its peak", {part: getattr(use, part) for part in PARTS})
        print("  predicted there", dict(zip(PARTS, there.tolist(), strict=True)), f"sum {there.sum()}")
        print(f"  instruction {at.instruction} of {len(program.instructions)}: {program.instructions[at.instruction]}")
        for holder, nbytes in at.holders.items():
            print(f"  {nbytes:10d}  {holder}")


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--plans", type=int, default=20)
    options.add_argument("--models", default=",".join(MODELS))
    options.add_argument("--seed", type=int, default=0, help="other seeds make other plans")
    options.add_argument("--only", type=int)
    chosen = options.parse_args()
    rows: list[Row] = []
    for name in chosen.models.split(","):
        graph = imported(name)
        if chosen.only is not None:
            show(name, chosen.only, graph, chosen.seed)
            continue
        for number in range(4 if chosen.quick else chosen.plans):
            rows += peaks(name, number, graph, chosen.seed)
    if rows:
        large = [row for row in rows if max(row["predicted"], row["measured"]) >= LARGE_BYTES]
        title = f"{_summary(rows)}; of those that hold {LARGE_BYTES:,} bytes or more {_summary(large)}"
        report(rows, title, chosen.json)


def _summary(rows: Sequence[Row]) -> str:
    errors = [abs(row["ratio"] - 1) for row in rows]
    near = sum(error <= WITHIN for error in errors)
    text = f"{near} of {len(rows)} ranks within {WITHIN:.0%}"
    return f"{text}, median error {median(errors):.1%}, worst {max(errors):.0%}" if rows else text


if __name__ == "__main__":
    main()
