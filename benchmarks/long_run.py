"""Does memory stay flat and does the loss stay that of one process, over many steps on two ranks?

    python -m benchmarks.long_run [--quick] [--json] [--steps 20000]

A small network trains with tensor parallelism over two gloo ranks in float64, and on one process beside them. Each row
is a checkpoint, said on stderr as it is passed: resident memory and live tensors of rank 0, the loss, and its relative
difference from one process. The run fails (exit code 1) if memory grows by more than 5 % after step 100, if tensors are
left behind, or if losses differ by more than 1e-9.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.harness import Row, parser, report
from flexsearch import zoo
from flexsearch.graph.importer import import_model
from flexsearch.runtime.launch import call
from flexsearch.runtime.parallel import parallelize
from flexsearch.strategy import Strategy
from flexsearch.strategy.baselines import baseline
from flexsearch.topology import Topology

RANKS = 2
SETTLED = 100
"""Steps after which memory is to stay as it is."""
GROWTH = 0.05
TOLERANCE = 1e-9
BATCH = 16


def _model() -> zoo.ZooModel:
    made = zoo.mlp(BATCH, features=16, width=32, layers=2, classes=4)
    return made._replace(model=made.model.double(), inputs=tuple(x.double() for x in made.inputs))


def _batches(count: int = 8) -> list[tuple[Tensor, Tensor]]:
    """Batches that are trained on in turn."""
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(BATCH, 16, generator=generator, dtype=torch.float64),
         torch.randint(4, (BATCH,), generator=generator))
        for _ in range(count)
    ]  # fmt: skip


def _optimizer(weights: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(weights, lr=0.01, momentum=0.9)


def train(plan: str, steps: int) -> list[dict[str, Any]]:
    """Train on the ranks of this run; a row for each checkpoint."""
    made, alone, batches = _model(), _model(), _batches()
    step = parallelize(made.model, Strategy.load(plan), loss=made.loss)
    optimizer, reference = _optimizer(step.parameters()), _optimizer(alone.model.parameters())
    every, rows, began = max(SETTLED, steps // 20), [], time.monotonic()
    for number in range(1, steps + 1):
        inputs, targets = batches[number % len(batches)]
        out = step((inputs, targets))
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            loss = alone.loss(alone.model(inputs), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            reference.step()
            reference.zero_grad()
            if number in (SETTLED, steps) or number % every == 0:
                difference = abs(out.loss.item() - loss.item()) / abs(loss.item())
                rows.append(_row(number, out.loss.item(), difference))
                _say(rows[-1], steps, time.monotonic() - began)
    return rows


def _say(row: Row, steps: int, elapsed_s: float) -> None:
    """A line of progress, on stderr: the rows themselves come at the end."""
    print(
        f"step {row['step']} of {steps}, {elapsed_s:.0f} s: resident {row['resident_bytes'] / 1e6:.1f} MB, "
        f"{row['live_tensors']} tensors, loss {row['loss']:.6f}, "
        f"differs by {row['loss_difference_relative']:.1e}",
        file=sys.stderr, flush=True,
    )  # fmt: skip


def _row(step: int, loss: float, difference: float) -> dict[str, Any]:
    gc.collect()
    resident = next(
        int(line.split()[1]) * 1024 for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmRSS")
    )  # fmt: skip
    live = [x for x in gc.get_objects() if issubclass(type(x), Tensor)]
    return {
        "step": step, "resident_bytes": resident, "live_tensors": len(live),
        "live_tensor_bytes": sum(x.untyped_storage().nbytes() for x in live), "loss": loss,
        "loss_difference_relative": difference,
    }  # fmt: skip


def problems(rows: Sequence[Row]) -> list[str]:
    """What is wrong with a run."""
    first, last, found = rows[0], rows[-1], []
    if last["resident_bytes"] > (1 + GROWTH) * first["resident_bytes"]:
        found.append("memory grows")
    if last["live_tensors"] > first["live_tensors"]:
        found.append("tensors are left behind")
    if max(row["loss_difference_relative"] for row in rows) > TOLERANCE:
        found.append("losses differ from those of one process")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; 0 if memory is flat and losses agree."""
    made = parser(__doc__)
    made.add_argument("--steps", type=int, help="default: 20000; with --quick 500")
    options = made.parse_args(arguments)
    steps = options.steps or (500 if options.quick else 20_000)
    model = _model()
    graph = import_model(model.model, model.inputs, model.loss, targets=model.targets, name="mlp")
    with TemporaryDirectory() as folder:
        plan = Path(folder) / "plan.json"
        baseline("megatron", graph, Topology.load(f"ethernet-1g-{RANKS}")).save(plan)
        rows = call("benchmarks.long_run:train", {"plan": str(plan), "steps": steps}, RANKS, pin=True)
    report(rows, f"{steps} steps on {RANKS} ranks", options.json)
    for problem in (wrong := problems(rows)):
        print(problem, file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
