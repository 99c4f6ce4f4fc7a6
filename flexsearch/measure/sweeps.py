"""Sweeps: measuring pieces of operators in the surroundings of a training step.

In training an operator runs once a step: its weights are cold, the activation that it reads was just written, its
output lands in memory that is freshly allocated and stays until the backward pass is through. A loop over one operator
shows none of that. So pieces are measured in **sweeps** that have the shape of a training step: one piece of each
operator, all forward tasks in the graph's order, then all backward tasks in reverse, and each task timed on its own.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from statistics import median
from typing import Any

import torch
from torch import Tensor

from flexsearch.cost.profile import Entry
from flexsearch.errors import FlexsearchError, ProfileError
from flexsearch.graph.notation import Box
from flexsearch.graph.ops import KernelContext, build_kernel, kind_of
from flexsearch.graph.ops.local import preferred
from flexsearch.measure.cases import Case

ENTRY_S = 0.25
"""After so many seconds of an entry's own time it is not repeated any more."""
FIRST_S = 2.0
"""The first call of an entry counts only if it takes longer."""
HELD_BYTES = 2 << 30
"""A sweep holds about so much memory; longer graphs are swept in parts."""
POOL_BYTES = 128 << 20
"""Random operands come from this much memory, or twice the largest: more than caches hold."""


class Bench:
    """Runs sweeps on one device. Operands come from a pool larger than the caches, at ever other places."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.clock = clock_of(self.device)
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
        op = self.case.costed.op
        high = 2 if dtype == torch.bool else min(kind_of(op).integers_below(op), torch.iinfo(dtype).max)
        return torch.randint(high, shape, dtype=dtype, device=self.bench.device)


class Clock:
    """Wall-clock of the CPU."""

    def mark(self) -> Any:
        return time.perf_counter()

    def wait(self) -> None:
        """Until all marks are known."""

    def between(self, start: Any, end: Any) -> float:
        return float(end - start)


class CudaClock(Clock):
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


def clock_of(device: torch.device) -> Clock:
    """The clock that times tasks on a device."""
    return CudaClock() if device.type == "cuda" else Clock()
