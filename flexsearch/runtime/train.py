"""``flexsearch run``: a short training run of a strategy, with every step timed and compared with the prediction."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flexsearch.cost import Costs, Profile
from flexsearch.errors import FlexsearchError, RuntimeFailure
from flexsearch.graph import OperatorGraph
from flexsearch.graph.loading import Loaded, load_callable
from flexsearch.lower import Lowered, lower_for_ranks
from flexsearch.runtime.faults import REMEDY
from flexsearch.runtime.held import MemoryRow
from flexsearch.runtime.parallel import MakeOptimizer, Parallel, Traced, distribute, parallelize
from flexsearch.runtime.timeline import Row, Timeline, compare, compare_memory, record
from flexsearch.simulate import Simulation, simulate
from flexsearch.strategy import Prediction, Strategy

WARM_UP = 2
"""First steps that are not counted: they allocate memory and open connections."""
CLASSES = 10
"""Random class targets are below this; they are used where the example batch has no data."""


@dataclass(frozen=True)
class Step:
    """One training step: loss of the whole batch before the update, and seconds on the slowest rank."""

    step: int
    loss: float
    iteration_s: float


@dataclass(frozen=True)
class Training:
    """A training run, the same on all ranks that wait for each other. ``graph``: of the model; ``simulation`` is of
    ``lowered``; ``timeline`` if it was asked for."""

    steps: tuple[Step, ...]
    prediction: Prediction
    graph: OperatorGraph
    lowered: Lowered
    simulation: Simulation
    timeline: Timeline | None

    @property
    def predicted_s(self) -> float:
        """Predicted iteration time, s."""
        return self.prediction.iteration_s

    @property
    def measured_s(self) -> float:
        """Median iteration time after warm-up, s."""
        counted = self.steps[WARM_UP:] if len(self.steps) > WARM_UP else self.steps[-1:]
        return median(step.iteration_s for step in counted)

    def errors(self) -> list[Row]:
        """Where the error of the prediction sits, largest first; empty without a timeline."""
        return compare(self.lowered, self.simulation, self.timeline) if self.timeline is not None else []

    def memory_errors(self) -> list[MemoryRow]:
        """What each rank was predicted to hold, and held; empty without a timeline."""
        return compare_memory(self.lowered, self.simulation, self.timeline) if self.timeline is not None else []

    def summary(self) -> dict[str, Any]:
        """As JSON: ``steps``, ``median_iteration_s``, ``predicted_iteration_s``, ``predicted_interval_s``, and with
        a timeline ``errors`` and ``memory``."""
        result: dict[str, Any] = {
            "steps": [vars(step) for step in self.steps],
            "median_iteration_s": self.measured_s,
            "predicted_iteration_s": self.predicted_s,
            "predicted_interval_s": self.prediction.interval_s,
        }
        if self.timeline is not None:
            result["traced_iteration_s"] = self.timeline.iteration_s
            result["errors"] = [row._asdict() for row in self.errors()]
            result["memory"] = [row._asdict() for row in self.memory_errors()]
        return result


def train(
    strategy: Strategy | str | Path,
    model: str | Loaded,
    *,
    steps: int = 10,
    trace: bool = False,
    arguments: Mapping[str, Any] | None = None,
    profile: str | Path | None = None,
    rate: float = 0.01,
    seed: int = 0,
    timeout_s: float = 300.0,
    progress: Callable[[Step], None] | None = None,
    compile: bool = False,
    tolerate: bool = False,
    traced: Traced | None = None,
) -> Training:
    """Train ``model`` ("module:callable", called with ``arguments``) under a strategy on the ranks of this run, on the
    example batch that comes with it. All ranks must call it.

    The optimizer is the one that the strategy was planned for, with learning rate ``rate``. ``trace``: afterwards run a
    few more steps operator by operator, and record each task. ``profile``: measured costs for the prediction;
    without, it is the one in the strategy file, or that of the topology's figures. ``progress`` is called after each
    step. ``compile``, ``tolerate``: as of ``parallelize``. Where workers do not wait for each other, losses and times
    are those of this rank. ``traced``: of this model, if it was traced before. Raises StrategyError
    if the strategy was made for another model, RuntimeFailure if the ranks do not fit it, or when one of them dies.
    """
    if steps < 1:
        raise RuntimeFailure(f"cannot train for {steps} steps", "Give at least 1.")
    if not isinstance(strategy, Strategy):
        strategy = Strategy.load(strategy)
    loaded = load_callable(model, **dict(arguments or {})) if isinstance(model, str) else model
    if any(tensor.is_meta for tensor in loaded.model.parameters()):
        raise RuntimeFailure("the model is on the meta device and has no weights to train", "Build it on the CPU.")
    generator = torch.Generator().manual_seed(seed)
    inputs, targets = _filled(loaded.inputs, generator), _filled(loaded.targets, generator)
    update = _optimizer(strategy.options.optimizer, rate)
    if traced is None:
        parallel = parallelize(
            loaded.model, strategy, loss=loaded.loss, optimizer=update, inputs=inputs, targets=targets, seed=seed,
            timeout_s=timeout_s, compile=compile, tolerate=tolerate,
        )  # fmt: skip
    else:
        traced.check(strategy)
        parallel = distribute(
            loaded.model, traced.imported, strategy, update, seed=seed, timeout_s=timeout_s, compile=compile,
            tolerate=tolerate, example=(inputs, targets, loaded.loss),
        )  # fmt: skip
    if trace:
        parallel.refuse_trace()
    lowered, simulation, predicted = _prediction(parallel, strategy, profile)

    def step() -> Tensor:
        return parallel.step(inputs, targets)

    try:
        done, timeline = _run(parallel, step, steps, trace, progress)
    except Exception as error:
        raise _told(parallel, partial(_plainly, loaded, inputs, targets), error) from error
    return Training(done, predicted, parallel.graph, lowered, simulation, timeline)


def _run(
    parallel: Parallel, step: Callable[[], Tensor], steps: int, trace: bool, progress: Callable[[Step], None] | None
) -> tuple[tuple[Step, ...], Timeline | None]:
    """So many steps, and those that are recorded afterwards."""
    done: list[Step] = []
    for number in range(steps):
        done.append(_timed(parallel, step, number))
        if progress is not None:
            progress(done[-1])
    timeline = record(parallel, step) if trace else None
    parallel.close()
    return tuple(done), timeline


def _told(parallel: Parallel, plainly: Callable[[], object], error: Exception) -> Exception:
    """What to raise for an ``error`` of a step. It is the user's if the model fails ``plainly``, too."""
    place, words = f"rank {parallel.rank}", f"{type(error).__name__}: {error}"
    if parallel.failures.goes_on and isinstance(error, RuntimeError):  # of a barrier, say: no step has failed here
        return RuntimeFailure(f"{place}: another rank has died or hangs ({error})", REMEDY)
    if parallel.failures.goes_on or isinstance(error, FlexsearchError):
        return error
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in words:
        return RuntimeFailure(
            f"{place} has run out of memory: {words}",
            "Use more devices, a smaller batch, or a plan with recomputation (--recompute full).",
        )
    try:
        plainly()
    except Exception:
        return RuntimeFailure(
            f"{place}: the model fails on its batch: {words}",
            "It does so without a plan, too: check the values that come with --model, such as class numbers.",
        )
    return error


@torch.no_grad()
def _plainly(loaded: Loaded, inputs: Any, targets: Any) -> None:
    """One forward pass on one device."""
    arguments = inputs if isinstance(inputs, tuple | list) else (inputs,)
    output = loaded.model(**inputs) if isinstance(inputs, Mapping) else loaded.model(*arguments)
    if loaded.loss is not None:
        loaded.loss(output) if targets is None else loaded.loss(output, targets)


def _timed(parallel: Parallel, step: Callable[[], Tensor], number: int) -> Step:
    if not parallel.apart:
        dist.barrier()
    began = time.perf_counter()
    loss = step()
    if parallel.device.type == "cuda":
        torch.cuda.synchronize()
    slowest = torch.tensor([time.perf_counter() - began], dtype=torch.float64, device=parallel.device)
    if parallel.apart:
        return Step(number, loss.item(), slowest.item())
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return Step(number, loss.item(), slowest.item())


def _prediction(
    parallel: Parallel, strategy: Strategy, profile: str | Path | None
) -> tuple[Lowered, Simulation, Prediction]:
    """The lowered strategy with the costs at hand, its simulation, and the predicted iteration time."""
    lowered = parallel.lowered
    if profile is not None:
        costs = Costs(parallel.graph, strategy.cluster, Profile.load(profile))
        priced = lower_for_ranks(parallel.graph, strategy, strategy.cluster, costs)
        if priced.digest != lowered.digest:  # other forms of communication are faster there than those that run
            return lowered, simulate(lowered), _as_prediction(simulate(priced))
        lowered = priced
    simulation = simulate(lowered)
    if profile is None and strategy.prediction is not None:
        return lowered, simulation, strategy.prediction
    return lowered, simulation, _as_prediction(simulation)


def _as_prediction(simulation: Simulation) -> Prediction:
    return Prediction(iteration_s=simulation.makespan_s, interval_s=simulation.estimate.interval_s)


def _optimizer(name: str, rate: float) -> MakeOptimizer:
    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        if name == "adam":
            return torch.optim.Adam(parameters, lr=rate)
        return torch.optim.SGD(parameters, lr=rate, momentum=0.9 if name == "momentum" else 0.0)

    return make


def _filled(value: Any, generator: torch.Generator) -> Any:
    """The example batch, nested as it is; random data where it has none (on the meta device), the same on all ranks."""
    if isinstance(value, Mapping):
        return {name: _filled(item, generator) for name, item in value.items()}
    if isinstance(value, tuple | list):
        return tuple(_filled(item, generator) for item in value)
    if not isinstance(value, Tensor) or not value.is_meta:
        return value
    if value.is_floating_point():
        return torch.randn(value.shape, generator=generator, dtype=value.dtype)
    return torch.randint(CLASSES, value.shape, generator=generator).to(value.dtype)
