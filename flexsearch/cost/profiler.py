"""Measures each distinct (operator, local shape, dtype) of a graph, forward and backward, on the device at hand.

In training an operator runs once a step: its weights are cold, the activation that it reads was just written, its
output lands in memory that is freshly allocated and stays until the backward pass is through. A loop over one operator
shows none of that. So pieces are measured in **sweeps** that have the shape of a training step: one piece of each
operator, all forward tasks in the graph's order, then all backward tasks in reverse, and each task timed on its own.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from statistics import median
from typing import Any, Literal

import torch
from torch import Tensor

from flexsearch.cost.allocator import keep_freed_memory
from flexsearch.cost.cases import Case, check_memory, plan, quick_enough
from flexsearch.cost.neighbours import neighbours
from flexsearch.cost.profile import Entry, Profile, ProfileDevice, UpdateEntry, cpu_model
from flexsearch.errors import FlexsearchError, ProfileError
from flexsearch.graph.model import OperatorGraph
from flexsearch.graph.notation import Box
from flexsearch.graph.ops import KernelContext, build_kernel
from flexsearch.graph.ops.local import preferred

Progress = Callable[[int, int], None]
"""Called with the number of entries that are measured, and of all."""

ENTRY_S = 0.25
"""After so many seconds of an entry's own time it is not repeated any more."""
FIRST_S = 2.0
"""The first call of an entry counts only if it takes longer."""
HELD_BYTES = 2 << 30
"""A sweep holds about so much memory; longer graphs are swept in parts."""
POOL_BYTES = 128 << 20
"""Random operands come from this much memory, or twice the largest: more than caches hold."""
UPDATE_BYTES = 64 << 20
"""Weights whose update is measured."""


def profile_graph(
    graph: OperatorGraph,
    *,
    device: str = "cpu",
    threads: int = 1,
    max_parts: int = 4,
    known: Profile | None = None,
    repeats: int = 7,
    budget_s: float | None = None,
    progress: Progress | None = None,
    busy_neighbours: int = 0,
) -> Profile:
    """Profile of all pieces of ``graph`` that splitting each operator into up to ``max_parts`` can make.

    ``known``: measurements that are kept and not repeated. ``repeats``: at most so many for each entry, whose median
    counts. ``budget_s``: stop after so many seconds; whole operators and splits of one axis are measured first, and the
    roofline fills what is missing. ``busy_neighbours``: that many processes do the same kind of work meanwhile, as on a
    machine whose cores share the memory. Raises ProfileError if ``known`` is of another device, ``device`` is not
    there, or a count is below 1.
    """
    for option, value in (("threads", threads), ("max_parts", max_parts), ("repeats", repeats)):
        if value < 1:
            raise ProfileError(f"{option} is {value}", "Give at least 1.")
    here = _device(device, threads)
    if here.kind == "cpu":
        keep_freed_memory()  # as the runtime does
    if known is not None:
        known.extended(Profile(device=here, torch=torch.__version__, busy_neighbours=busy_neighbours))  # if they fit
    rounds = plan(graph, max_parts, frozenset(known.entries) if known else frozenset())
    check_memory(rounds)
    rounds = [[case for case in cases if quick_enough(case, here.kind, budget_s)] for cases in rounds]
    deadline = None if budget_s is None else time.monotonic() + budget_s
    entries: dict[str, Entry] = {}
    total = sum(map(len, rounds))
    with _threads(threads), neighbours(graph, device, threads, max_parts, busy_neighbours):
        bench = Bench(device)
        for cases in rounds:
            if deadline is not None and time.monotonic() > deadline:
                break
            entries |= bench.measure(cases, repeats, deadline)
            if progress is not None:
                progress(len(entries), total)
        updates = {} if known and len(known.updates) == len(_OPTIMIZERS) else measure_updates(device)
    new = Profile(
        device=here, torch=torch.__version__, busy_neighbours=busy_neighbours, entries=entries, updates=updates
    )
    return new if known is None else known.extended(new)


class Bench:
    """Runs sweeps on one device. Operands come from a pool larger than the caches, at ever other places."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.clock = _CudaClock() if self.device.type == "cuda" else _Clock()
        self._pools: dict[torch.dtype, Tensor] = {}
        self._next: dict[torch.dtype, int] = {}

    def measure(self, cases: Sequence[Case], repeats: int, deadline: float | None = None) -> dict[str, Entry]:
        """Entries of these cases, which stand in the graph's order. What a deadline leaves unmeasured is left out."""
        entries: dict[str, Entry] = {}
        for part in parts(cases):
            if deadline is not None and time.monotonic() > deadline:
                break
            runs = []
            for case in part:
                with _named(case):
                    runs.append(Run(case, self))
            waiting = list(runs)
            for sweep in range(repeats + 1):
                if sweep == 1:
                    for run in runs:
                        run.forget_first()
                waiting = [run for run in waiting if len(run.times) < repeats and run.spent < ENTRY_S]
                if not waiting or (sweep > 1 and deadline is not None and time.monotonic() > deadline):
                    break
                self.sweep(waiting)
            entries |= {run.case.key: run.entry() for run in runs}
        return entries

    def sweep(self, runs: Sequence[Run]) -> None:
        """One pass forward through the runs and back, each task timed."""
        marks = []
        gc.disable()  # no pause for a collection inside a measurement
        try:
            for run in runs:
                run.prepare()
                with _named(run.case):
                    start = self.clock.mark()
                    run.forward()
                    marks.append([start, self.clock.mark()])
            for run, mark in zip(reversed(runs), reversed(marks), strict=True):
                run.prepare_backward()
                with _named(run.case):
                    mark.append(self.clock.mark())
                    run.backward()
                    mark.append(self.clock.mark())
        finally:
            gc.enable()
        self.clock.wait()
        for run, (a, b, c, d) in zip(runs, marks, strict=True):
            run.times.append((self.clock.between(a, b), self.clock.between(c, d) if run.has_backward else 0.0))
            run.gradients = ()

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A random tensor of the pool. Floats lie in [0, 1): every operator has a value and a derivative there."""
        count = prod(shape)
        pool = self._pools.get(dtype)
        if pool is None or pool.numel() < 2 * count:
            size = max(2 * count, POOL_BYTES // dtype.itemsize)
            pool = self._pools[dtype] = torch.rand(size, dtype=dtype, device=self.device)
            self._next[dtype] = 0
        start = self._next[dtype]
        if start + count > pool.numel():
            start = 0
        self._next[dtype] = start + -(-count // 64) * 64  # keep the alignment of fresh tensors
        return pool[start : start + count].view(tuple(shape))


@contextmanager
def _named(case: Case) -> Iterator[None]:
    """Errors of PyTorch become ProfileErrors that name the operator: the graph says of it what cannot be computed."""
    try:
        yield
    except FlexsearchError:
        raise
    except Exception as error:  # PyTorch raises many types
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ProfileError(
            f"operator {case.costed.op.name!r} cannot be computed as the graph says: {lines[0][:200]}",
            "Import the model again.",
        ) from error


class Run:
    """A case under measurement. ``times``: (forward, backward) seconds of each sweep."""

    def __init__(self, case: Case, bench: Bench) -> None:
        self.case, self.bench = case, bench
        self.times: list[tuple[float, float]] = []
        self.spent = 0.0
        self.has_backward = any(case.costed.needs)
        self.gradients: Any = ()
        self._kernel = build_kernel(case.costed.op, case.piece, case.shapes, KernelContext())
        self._sources = [self._source(i, box) for i, box in enumerate(case.piece.inputs)]
        self._operands: list[Tensor | None] = []
        self._outputs: tuple[Tensor, ...] = ()
        self._incoming: list[Tensor] = []

    def prepare(self) -> None:
        """Write the activations that the piece reads, as the operator before it would have done."""
        self._operands = []
        for source, tensor, need in zip(self._sources, self.case.costed.inputs, self.case.costed.needs, strict=True):
            fresh = source.clone() if source is not None and tensor.kind == "activation" else source
            fresh = None if fresh is None else preferred(fresh)
            self._operands.append(fresh.detach().requires_grad_() if fresh is not None and need else fresh)

    def forward(self) -> None:
        """The forward task."""
        result = self._kernel(*self._operands)
        self._outputs = result if isinstance(result, tuple) else (result,)

    def prepare_backward(self) -> None:
        """Write the gradients of the outputs, as the operator after it would have done."""
        self._outputs = tuple(y for y in self._outputs if y.requires_grad)
        self._incoming = [torch.empty_like(y).copy_(self.bench.take(y.shape, y.dtype)) for y in self._outputs]

    def backward(self) -> None:
        """The backward task, and letting go of what it was the last to use."""
        if self._outputs and self.has_backward:
            wanted = [x for x in self._operands if x is not None and x.requires_grad]
            self.gradients = torch.autograd.grad(self._outputs, wanted, self._incoming, allow_unused=True)
        self._operands, self._incoming = [], []

    def forget_first(self) -> None:
        """Drop the first measurement: it set things up, and was the first to touch its memory. Slow ones are kept."""
        self.spent = sum(map(sum, self.times))
        if self.spent < FIRST_S:
            self.times, self.spent = [], 0.0

    def entry(self) -> Entry:
        """Medians of what was measured."""
        costed = self.case.costed
        return Entry(
            kind=costed.op.kind,
            dtype=costed.dtype,
            forward_s=median(f for f, _ in self.times),
            backward_s=median(b for _, b in self.times),
            repeats=len(self.times),
            forward=costed.forward(self.case.extents),
            backward=costed.backward(self.case.extents),
        )

    def _source(self, position: int, box: Box | None) -> Tensor | None:
        if box is None:
            return None
        tensor = self.case.costed.inputs[position]
        shape, dtype = [high - low for low, high in box], getattr(torch, tensor.dtype)
        if dtype.is_floating_point or dtype.is_complex:
            return self.bench.take(shape, dtype)
        sizes = self.case.costed.op.sizes  # classes of a loss, rows of an embedding; elsewhere any integer will do
        high = 2 if dtype == torch.bool else min(sizes.get("C", sizes.get("v", 2)), torch.iinfo(dtype).max)
        return torch.randint(high, shape, dtype=dtype, device=self.bench.device)


class _Clock:
    """Wall-clock of the CPU."""

    def mark(self) -> Any:
        return time.perf_counter()

    def wait(self) -> None:
        """Until all marks are known."""

    def between(self, start: Any, end: Any) -> float:
        return float(end - start)


class _CudaClock(_Clock):
    """Events in the stream: the device's own time, without stopping it."""

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def wait(self) -> None:
        torch.cuda.synchronize()

    def between(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end)) * 1e-3


def parts(cases: Sequence[Case]) -> Iterator[list[Case]]:
    """Runs of consecutive cases that hold a limited amount of memory until their backward passes."""
    part: list[Case] = []
    held = 0.0
    for case in cases:
        size = 2 * case.costed.forward(case.extents).nbytes
        if part and held + size > HELD_BYTES:
            yield part
            part, held = [], 0.0
        part.append(case)
        held += size
    if part:
        yield part


_OPTIMIZERS: dict[Literal["sgd", "momentum", "adam"], Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "sgd": lambda weights: torch.optim.SGD(weights, lr=1e-3),
    "momentum": lambda weights: torch.optim.SGD(weights, lr=1e-3, momentum=0.9),
    "adam": lambda weights: torch.optim.Adam(weights, lr=1e-3),
}


def measure_updates(
    device: str, few: int = 4, many: int = 1024, repeats: int = 5
) -> dict[Literal["sgd", "momentum", "adam"], UpdateEntry]:
    """Time of torch.optim's updates of UPDATE_BYTES of float32 weights in ``few`` and in ``many`` tensors, and from the
    difference what a tensor costs."""
    entries: dict[Literal["sgd", "momentum", "adam"], UpdateEntry] = {}
    for name, make in _OPTIMIZERS.items():
        small, large = (_update_s(make, device, count, repeats) for count in (few, many))
        per_tensor = max(0.0, (large - small) / (many - few))
        per_byte = max(0.0, small - few * per_tensor) / UPDATE_BYTES
        entries[name] = UpdateEntry(s_per_byte=per_byte, s_per_tensor=per_tensor)
    return entries


def _update_s(make: Callable[[list[Tensor]], torch.optim.Optimizer], device: str, count: int, repeats: int) -> float:
    weights = [torch.zeros(UPDATE_BYTES // 4 // count, device=device, requires_grad=True) for _ in range(count)]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer = make(weights)
    clock = _CudaClock() if torch.device(device).type == "cuda" else _Clock()
    times = []
    for _ in range(repeats + 1):
        start = clock.mark()
        optimizer.step()
        end = clock.mark()
        clock.wait()
        times.append(clock.between(start, end))
    return median(times[1:])  # the first makes the state


def _device(device: str, threads: int) -> ProfileDevice:
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise ProfileError(f"there is no device {device!r}", "Give 'cpu', 'cuda' or 'cuda:N'.") from error
    if kind == "cuda":
        if not torch.cuda.is_available():
            raise ProfileError("this machine has no CUDA device to profile", "Give device 'cpu'.")
        return ProfileDevice(kind="cuda", model=torch.cuda.get_device_name(device))
    if kind != "cpu":
        raise ProfileError(f"cannot profile device {device!r}", "Give 'cpu', 'cuda' or 'cuda:N'.")
    return ProfileDevice(kind="cpu", model=cpu_model(), threads=threads)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
