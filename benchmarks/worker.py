"""What each rank of ``hybrid_vs_ddp`` and ``runtime_vs_torch`` runs: ``python -m benchmarks.worker JOB.json``, with
torchrun's environment.

A job names a model and variants of its training step; they are measured, and rank 0 prints the result as
JSON on the last line of its standard output.
"""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import json
import runpy
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.harness import alternate
from flexsearch.graph.loading import Loaded, load_callable
from flexsearch.ranks import prefer_throughput
from flexsearch.runtime.launch import end, report
from flexsearch.runtime.parallel import Parallel, parallelize
from flexsearch.runtime.timeline import Timeline, record
from flexsearch.strategy import Strategy

LEARNING_RATE = 0.01
MOMENTUM = 0.9
PHASES = {"recipe": ("synchronise_gradients", "synchronise_weights"), "exchange": ("all_reduce", "_messages")}
"""Methods of the parts of a recipe on a rank whose time is taken."""
DDP, SINGLE = "ddp", "single process"
"""Variants that are not plans: PyTorch's DistributedDataParallel, and plain PyTorch on rank 0 alone."""


@dataclass(frozen=True)
class Job:
    """``model``: "module:callable", called with ``batch`` and ``arguments``. ``variants``: DDP, SINGLE, strategy files
    or exported plans (``.py``), by name. Each gets ``warmup`` steps, then ``rounds`` turns of
    ``steps`` steps. ``together``: all variants are alive at once and take turns; else one after another, which needs
    less memory. ``timeline``: measure one more step of each plan task by task."""

    model: str
    batch: int
    variants: dict[str, str]
    rounds: int
    steps: int
    warmup: int
    together: bool
    timeline: bool
    timeout_s: float
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Write the job for the workers."""
        path.write_text(json.dumps(dataclasses.asdict(self)), encoding="utf-8")


@dataclass(frozen=True)
class Measured:
    """Of one variant. ``turns_s``: seconds of a step, mean over each turn's steps, on the slowest rank. ``losses``: of
    the whole batch, step by step, warm-up included. ``sent_bytes``: by rank and step; ``payload_bytes``: of them,
    what its recipes gave to the backend, an all-reduce as a ring. ``recipe_s``: of a step, what recipes take on the
    slowest rank, and ``exchange_s``, what of that is exchanges. ``timeline``: of a step that was run operator by
    operator, if it was asked for."""

    turns_s: list[float]
    losses: list[float]
    sent_bytes: list[int]
    timeline: Timeline | None
    payload_bytes: list[int] = dataclasses.field(default_factory=list)
    recipe_s: float = 0.0
    exchange_s: float = 0.0

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> Measured:
        """From what a worker printed."""
        told = row.pop("timeline")
        if told is None:
            return cls(**row, timeline=None)
        spans = {int(task): (start, end) for task, (start, end) in told["spans"].items()}
        return cls(**row, timeline=Timeline(spans, frozenset(told["hidden"]), told["iteration_s"]))


@dataclass
class Variant:
    """A training step under measurement. ``step``: returns the loss of this rank's samples, or None on ranks without
    one."""

    step: Callable[[], Tensor | None]
    parallel: Parallel | None = None
    losses: list[Tensor] = dataclasses.field(default_factory=list)
    sent: int = 0
    payload: int = 0
    steps: int = 0
    spent: dict[str, float] = dataclasses.field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))

    def turn(self, steps: int) -> float:
        """Seconds that ``steps`` steps take on this rank, all ranks starting together; per step."""
        dist.barrier()
        sent, payload, began = sent_bytes(), self.payload_bytes, time.perf_counter()
        for _ in range(steps):
            loss = self.step()
            if loss is not None:
                self.losses.append(loss.detach().reshape(()))
        taken = time.perf_counter() - began
        dist.barrier()  # what is still under way has now left this host
        self.sent += sent_bytes() - sent
        self.payload += self.payload_bytes - payload
        self.steps += steps
        return taken / steps

    @property
    def payload_bytes(self) -> int:
        """What recipes on this rank have given to the backend so far."""
        members = [] if self.parallel is None else self.parallel.synchronisation.members
        return sum(member.sent for member in members)


def build(name: str, file: str, job: Job) -> Variant:
    """A variant of the job's model with seeded weights and data, the same on every rank."""
    if file == DDP:
        return ddp(job)
    if file == SINGLE:
        return single(job)
    return exported(file, job) if file.endswith(".py") else plan(file, job)


def optimizer(weights: Any) -> torch.optim.Optimizer:
    """The optimizer of all variants."""
    return torch.optim.SGD(weights, lr=LEARNING_RATE, momentum=MOMENTUM)


def model_of(job: Job) -> Loaded:
    """The job's model with inputs and targets, dropout off."""
    return load_callable(job.model, batch=job.batch, device="cpu", **job.arguments)


def ddp(job: Job) -> Variant:
    """DistributedDataParallel with its defaults, each rank with its equal share of the batch."""
    made, ranks, rank = model_of(job), dist.get_world_size(), dist.get_rank()
    if job.batch % ranks:
        raise ValueError(f"DDP averages equal shares only; {job.batch} samples do not divide by {ranks} ranks")
    share = slice(rank * job.batch // ranks, (rank + 1) * job.batch // ranks)
    inputs, targets = tuple(x[share].clone() for x in made.inputs), made.targets[share].clone()
    return Variant(_plain(DistributedDataParallel(made.model), inputs, targets, made.loss))


def single(job: Job) -> Variant:
    """Plain PyTorch on rank 0; the other ranks wait in the barrier, which takes no processor time."""
    if dist.get_rank():
        return Variant(lambda: None)
    made = model_of(job)
    return Variant(_plain(made.model, made.inputs, made.targets, made.loss))


def _plain(
    model: nn.Module, inputs: tuple[Tensor, ...], targets: Tensor, loss_function: Callable[..., Tensor] | None
) -> Callable[[], Tensor]:
    stepper = optimizer(model.parameters())
    assert loss_function is not None

    def step() -> Tensor:
        loss = loss_function(model(*inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        stepper.step()
        stepper.zero_grad()
        return loss

    return step


def exported(file: str, job: Job) -> Variant:
    """The model, run by ordinary PyTorch as a file that ``flexsearch export`` wrote says."""
    made, applied = model_of(job), runpy.run_path(file)
    inputs, targets = tuple(applied["share"](x) for x in made.inputs), applied["share"](made.targets)
    if "HELD" not in applied:
        return Variant(_plain(applied["apply_plan"](made.model), inputs, targets, made.loss))
    parts, schedule = applied["apply_plan"](made.model, made.loss)
    stepper = optimizer(parts.parameters())

    def step() -> Tensor | None:
        loss: Tensor | None = applied["forward_backward"](parts, schedule, inputs, targets)
        stepper.step()
        stepper.zero_grad()
        return loss

    return Variant(step)


def plan(file: str, job: Job) -> Variant:
    """The model, run as a strategy file says; every rank is given the whole batch and takes its part."""
    made = model_of(job)
    strategy = Strategy.load(file)
    parallel = parallelize(made.model, strategy, loss=made.loss, optimizer=optimizer, timeout_s=job.timeout_s)
    inputs, targets = made.inputs, made.targets
    variant = Variant(lambda: parallel.step(inputs, targets), parallel=parallel)
    for member in parallel.synchronisation.members:
        for name in PHASES["recipe"]:
            _time(variant.spent, "recipe", member, name)
        for name in PHASES["exchange"]:
            _time(variant.spent, "exchange", member.ranks, name)
    return variant


def _time(spent: dict[str, float], phase: str, owner: object, name: str) -> None:
    """Have an object add the seconds that calls of its method take."""
    method = getattr(owner, name)

    def timed(*arguments: Any) -> Any:
        began = time.perf_counter()
        try:
            return method(*arguments)
        finally:
            spent[phase] += time.perf_counter() - began

    setattr(owner, name, timed)


def sent_bytes() -> int:
    """Bytes that this host has sent so far, over all interfaces but the loopback."""
    rows = [line.split(":", 1) for line in Path("/proc/self/net/dev").read_text().splitlines() if ":" in line]
    return sum(int(counts.split()[8]) for name, counts in rows if name.strip() != "lo")


def measure(job: Job) -> dict[str, Measured]:
    """Run the job; the same result on every rank."""
    if job.together:
        variants = {name: _warm(build(name, file, job), job) for name, file in job.variants.items()}
        turns = alternate({n: lambda v=v: v.turn(job.steps) for n, v in variants.items()}, job.rounds)  # type: ignore
        return {name: _result(variant, turns[name], job) for name, variant in variants.items()}
    results = {}
    for name, file in job.variants.items():
        variant = _warm(build(name, file, job), job)
        results[name] = _result(variant, [variant.turn(job.steps) for _ in range(job.rounds)], job)
        del variant
        gc.collect()
        _return_freed_memory()
    return results


def _return_freed_memory() -> None:
    """To the system, what glibc keeps (``flexsearch.allocator``) of a model that is not needed any more."""
    with suppress(OSError, AttributeError):  # no glibc
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def _warm(variant: Variant, job: Job) -> Variant:
    variant.turn(job.warmup)
    gc.collect()  # or the full pass that building leads to, 0.2 s, falls into a turn
    variant.sent = variant.payload = variant.steps = 0
    variant.spent.update(dict.fromkeys(PHASES, 0.0))
    return variant


def _result(variant: Variant, turns: list[float], job: Job) -> Measured:
    everyone: list[Any] = [None] * dist.get_world_size()
    steps = max(1, variant.steps)
    mine = turns, [float(loss) for loss in variant.losses], variant.sent // steps, variant.payload // steps, [
        variant.spent[phase] / steps for phase in PHASES
    ]
    dist.all_gather_object(everyone, mine)
    losses = [own for _, own, *_ in everyone if own]
    return Measured(
        turns_s=[max(ranks) for ranks in zip(*(turns for turns, *_ in everyone), strict=True)],
        losses=[sum(ranks) / len(losses) for ranks in zip(*losses, strict=True)],
        sent_bytes=[sent for _, _, sent, *_ in everyone],
        payload_bytes=[payload for *_, payload, _ in everyone],
        recipe_s=max(recipe_s for *_, (recipe_s, _) in everyone),
        exchange_s=max(exchange_s for *_, (_, exchange_s) in everyone),
        timeline=record(variant.parallel, variant.step, 1) if job.timeline and variant.parallel else None,
    )


def main(arguments: list[str]) -> None:
    """Join the other ranks, run the job, and leave the result of rank 0 for what started it, or print it."""
    job = Job(**json.loads(Path(arguments[0]).read_text(encoding="utf-8")))
    torch.set_num_threads(1)
    prefer_throughput()  # as ``parallelize`` does: PyTorch's own parts gain by it, too
    dist.init_process_group("gloo", timeout=timedelta(seconds=job.timeout_s))
    results, rank = measure(job), dist.get_rank()
    dist.destroy_process_group()
    if rank == 0:
        text = json.dumps({name: dataclasses.asdict(row) for name, row in results.items()}, default=list)
        if not report(json.loads(text)):
            print(text)
    end(0)


if __name__ == "__main__":
    main(sys.argv[1:])
