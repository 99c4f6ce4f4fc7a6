"""Sweeps: measuring pieces of operators in the surroundings of a training step.

In training an operator's weights were last used a step ago, the activation that it reads was just written, its output
lands in memory that is freshly allocated, and what autograd saves stays until the backward pass is through. Whether
data and code are still in the caches then depends on how much a step touches in between. A loop over one operator shows
none of that. So pieces are measured in **sweeps** that have the shape of a training step: one piece of each operator,
repeated layers too, all forward tasks in the graph's order, then all backward tasks in reverse, each timed on its own.

A rank calls autograd once for a run of operators, a sweep once for each piece. So the clock of a backward task runs
from when the engine reaches the gradients of the results to when it has those of the operands: without the call. Where
a schedule puts off the gradients of weights, a rank calls autograd for each layer, and has what operators without
weights save set aside, each tensor by a call of Python, forward and backward. So some sweeps do that and go back twice:
for the gradients of what is no weight, and then, with the call, for those of the weights.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from flexsearch.clocks import clock_of
from flexsearch.cost.profile import Entry
from flexsearch.errors import FlexsearchError, ProfileError
from flexsearch.graph.notation import Box
from flexsearch.graph.ops import KernelContext, build_kernel, kind_of
from flexsearch.graph.ops.batch_norm import normalising
from flexsearch.graph.ops.calls import dtype_of
from flexsearch.graph.ops.local import in_types, preferred
from flexsearch.measure.cases import Case
from flexsearch.saved import aside

ENTRY_S = 0.1
"""After so many seconds of an entry's own time its round is not repeated for it any more in this turn."""
HALVED_SWEEPS = 1
"""So many sweeps of a turn at most measure backward passes in two halves."""
FIRST_S = 2.0
"""The first sweep of an entry counts only if it takes longer."""
HELD_BYTES = 2 << 30
"""A sweep holds about so much memory; longer graphs are swept in parts."""
AHEAD = 32
"""A device is held back for so many tasks at a time, whose launches fit into its queue of about a thousand."""
HELD_FOR = 3.0
"""Times as long as launching them has taken at the least."""
HOST_S = 1e-3
"""More than a host takes to make the operands of a task and launch it."""
BLOCK = 1 << 14
"""Operands hold so many random numbers again and again: to write them, little else is read into the caches."""


class Bench:
    """Runs sweeps on one device."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.clock = clock_of(self.device)
        self.queued = self.device.type == "cuda"
        """Whether the device computes what its host launches ahead."""
        self._host_s = HOST_S
        """The least mean time of launching a task of a few."""
        self.hook_s = _hook_s(self.device) if self.queued else 0.0
        """That autograd takes to call a hook."""
        self._blocks: dict[torch.dtype, Tensor] = {}

    def measure(self, cases: Sequence[Case], repeats: int, deadline: float | None = None) -> dict[str, Entry]:
        """Entries of these cases, which stand in the graph's order. What a deadline leaves unmeasured is left out."""
        entries: dict[str, Entry] = {}
        for part in parts(cases):
            if deadline is not None and time.monotonic() > deadline:
                break
            samples = {case.key: Samples(case) for case in part}
            runs = []
            for case in part:
                with _named(case):
                    runs.append(Run(case, self, samples[case.key]))
            for sweep in range(repeats + 1):
                if sweep == 1:
                    for sample in samples.values():
                        sample.forget_first()
                # All go on until all have enough: a sweep over some of the operators leaves more in the caches.
                if all(len(sample.times) >= repeats or sample.spent > ENTRY_S for sample in samples.values()):
                    break
                if sweep > 1 and deadline is not None and time.monotonic() > deadline:
                    break
                self.sweep(runs)
            self._measure_halves(runs, repeats, deadline)
            entries |= {key: sample.entry(self.queued) for key, sample in samples.items()}
        return entries

    def _measure_halves(self, runs: Sequence[Run], repeats: int, deadline: float | None) -> None:
        """Sweeps with backward passes in two halves, if a piece has weights."""
        if any(run.case.costed.trained for run in runs):
            for _ in range(min(repeats, HALVED_SWEEPS)):
                if deadline is not None and time.monotonic() > deadline:
                    break
                self.sweep(runs, halved=True)

    def sweep(self, runs: Sequence[Run], halved: bool = False) -> None:
        """One pass forward through the runs and back, each task timed. ``halved``: back twice, as where the gradients
        of weights are put off."""
        marks = []
        gc.disable()  # no pause for a collection inside a measurement
        try:
            for run in self._ahead(runs):
                run.prepare()
                with _named(run.case):
                    start = self.clock.mark()
                    run.forward(halved)
                    marks.append((start, self.clock.mark()))
                run.release()
            for run in self._ahead(list(reversed(runs))):
                run.prepare_backward()
                with _named(run.case):
                    run.backward(halved)
            for run in self._ahead(list(reversed(runs))) if halved else ():
                with _named(run.case):
                    run.backward_of_weights()
        finally:
            gc.enable()
        self.clock.wait()
        for run, (start, end) in zip(runs, marks, strict=True):
            run.finish(start, end)

    def _ahead(self, runs: Sequence[Run]) -> Iterator[Run]:
        """The runs. A device that computes what its host launches is held back for each few of them until they are
        launched: their kernels then follow each other as fast as it computes them. Before that it does what is left,
        so that the host never waits for room in its queue."""
        if not self.queued:
            yield from runs
            return
        for first in range(0, len(runs), AHEAD):
            few = runs[first : first + AHEAD]
            self.clock.wait()
            self.clock.hold(HELD_FOR * self._host_s * len(few))
            began = time.perf_counter()
            yield from few
            self._host_s = min(time.perf_counter() - began, self._host_s * len(few)) / len(few)

    def fill(self, tensor: Tensor) -> Tensor:
        """Write random numbers to a new tensor, dense in memory. They lie in [0, 1): every operator has a value and a
        derivative there."""
        block = self._blocks.get(tensor.dtype)
        if block is None:
            block = self._blocks[tensor.dtype] = torch.rand(BLOCK, dtype=tensor.dtype, device=self.device)
        flat = tensor.as_strided((tensor.numel(),), (1,))
        whole = len(flat) // BLOCK * BLOCK
        flat[:whole].view(-1, BLOCK).copy_(block)
        flat[whole:].copy_(block[: len(flat) - whole])
        return tensor


def _hook_s(device: torch.device, repeats: int = 200) -> float:
    """Seconds from one hook of a tensor to the next."""
    times: list[float] = []
    x = torch.ones(1, device=device, requires_grad=True)
    y = x + 1.0
    for _ in range(2):
        y.register_hook(lambda _: times.append(time.perf_counter()))  # type: ignore[no-untyped-call]
    for _ in range(repeats):
        torch.autograd.grad(y, x, retain_graph=True)
    return median(b - a for a, b in zip(times[::2], times[1::2], strict=True))


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


class Samples:
    """What was measured of an entry. ``times``: (forward, backward) seconds of each piece of each sweep; ``halves``:
    (forward, first half, second half) where backward passes have halves; ``hosts``: that the host took for forward and
    backward."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.times: list[tuple[float, float]] = []
        self.halves: list[tuple[float, float, float]] = []
        self.hosts: list[tuple[float, float]] = []

    @property
    def spent(self) -> float:
        """Seconds in all."""
        return sum(map(sum, self.times))

    def forget_first(self) -> None:
        """Drop the first sweep: it set things up, and was the first to touch its memory. Slow ones are kept."""
        if self.spent < FIRST_S:
            self.times, self.hosts = [], []

    def entry(self, queued: bool) -> Entry:
        """Medians of what was measured. ``queued``: the device computes what its host launches. What a forward pass
        takes longer for backward passes in halves is part of their first half."""
        costed, halves = self.case.costed, None
        forward_s = median(f for f, _ in self.times)
        if self.halves:
            ahead, inputs, weights = (median(column) for column in zip(*self.halves, strict=True))
            halves = inputs if costed.trained else max(0.0, ahead - forward_s + inputs), weights
        return Entry(
            kind=costed.op.kind,
            dtype=costed.dtype,
            forward_s=forward_s,
            backward_s=median(b for _, b in self.times),
            halves_s=halves,
            repeats=len(self.times),
            forward=costed.forward(self.case.extents),
            backward=costed.backward(self.case.extents),
            product=costed.product_sizes(self.case.extents),
            host_s=(min(f for f, _ in self.hosts), min(b for _, b in self.hosts)) if queued else None,
        )


class Run:
    """A piece under measurement. Its weights and what the step is given have memory of their own, as in a step."""

    def __init__(self, case: Case, bench: Bench, samples: Samples) -> None:
        self.case, self.bench, self.samples = case, bench, samples
        op, context = case.costed.op, KernelContext(device=bench.device)
        self._kernel = normalising(op, case.extents, build_kernel(op, case.piece, case.shapes, context))
        if case.precise:
            given, types = ([dtype_of(t.dtype) for t in x] for x in (case.costed.inputs, case.costed.outputs))
            self._kernel = in_types(self._kernel, given, types)
        self._cuts = [_cut(held, read) for held, read in zip(case.held, case.piece.inputs, strict=True)]
        self._inputs = [self._input(i, box) for i, box in enumerate(case.held)]
        self._operands: list[Tensor | None] = []
        self._outputs: tuple[Tensor, ...] = ()
        self._seeds: list[tuple[GradientEdge, Tensor]] = []
        """Where gradients of results enter; shapes and strides of these."""
        self._incoming: list[Tensor] = []
        self._saved: set[int] | None = None
        """Operands whose memory autograd keeps for the backward pass."""
        self._gradients: list[Tensor | None] = []
        self._entered: Any = None
        self._left: Any = None
        self._halved = False
        """Whether the backward pass of the sweep at hand has halves."""
        self._halves: list[tuple[Any, Any]] = []
        """Marks at the begin and the end of each half of a backward pass."""
        self._host = 0.0, 0.0
        """Seconds that the host took for the forward and the backward task of the sweep at hand."""
        self._resumed = 0.0

    def prepare(self) -> None:
        """Write the activations that the piece reads, as the operator before it would have done."""
        self._operands = []
        for source, need in zip(self._inputs, self.case.costed.needs, strict=True):
            operand = source
            if operand is not None and operand.is_meta:
                operand = self.bench.fill(torch.empty_like(operand, device=self.bench.device))
            self._operands.append(operand.detach().requires_grad_() if operand is not None and need else operand)

    def forward(self, halved: bool) -> None:
        """The forward task; ``halved``: for a backward pass in halves."""
        self._halved, began = halved, time.perf_counter()
        if self._saved is None:
            result, self._saved = self._watched()
        elif halved and not self.case.costed.trained:
            with aside([]):
                result = self._compute()
        else:
            result = self._compute()
        self._host = time.perf_counter() - began, 0.0
        self._outputs = result if isinstance(result, tuple) else (result,)

    def release(self) -> None:
        """Let go of results and activations that autograd does not keep, as a rank does."""
        results, self._outputs = self._outputs, ()
        for y in results:
            if y.requires_grad:
                y.register_hook(self._enter)  # type: ignore[no-untyped-call]
                self._seeds.append((get_gradient_edge(y), torch.empty_like(y, device="meta")))
        for k, (x, source) in enumerate(zip(self._operands, self._inputs, strict=True)):
            assert self._saved is not None
            if x is None or not x.requires_grad:
                self._operands[k] = None
            elif source is not None and source.is_meta and k not in self._saved and all(x is not y for y in results):
                x.data = x.data.new_empty(0)

    def prepare_backward(self) -> None:
        """Write the gradients of the results, as the operator after it would have done."""
        self._incoming = [self.bench.fill(torch.empty_like(y, device=self.bench.device)) for _, y in self._seeds]
        self._entered = self._left = None
        for x in self._operands:
            if x is not None:
                x.register_hook(self._leave)  # type: ignore[no-untyped-call]

    def backward(self, halved: bool) -> None:
        """The backward task, and letting go of what it was the last to use; or, of weights, the half of it that makes
        no gradients of these. Gradients of weights are kept."""
        half = halved and self.case.costed.trained
        self._gradients = self._computed(lambda weight: not (half and weight), half)
        self._halves = [(self._entered, self._left)]
        if not half:
            self._operands, self._incoming, self._seeds = [], [], []

    def backward_of_weights(self) -> None:
        """The second half of the backward task."""
        if self._seeds and self.case.costed.trained:
            start = self.bench.clock.mark()
            self._gradients = self._computed(lambda weight: weight, False)
            self._halves.append((start, self.bench.clock.mark()))
        self._operands, self._incoming, self._seeds = [], [], []

    def _computed(self, wants: Callable[[bool], bool], keep: bool) -> list[Tensor | None]:
        """Gradients of weights, computed with those of other operands; ``wants``: which, by whether it is a weight."""
        weights = [tensor.kind == "parameter" for tensor in self.case.costed.inputs]
        wanted = [(weights[k], x) for k, x in enumerate(self._operands) if x is not None and wants(weights[k])]
        if not self._seeds or not wanted:
            return []
        edges = [edge for edge, _ in self._seeds]
        computed = torch.autograd.grad(
            edges, [x for _, x in wanted], self._incoming, retain_graph=keep, allow_unused=True
        )
        return [gradient for gradient, (weight, _) in zip(computed, wanted, strict=True) if weight]

    def finish(self, start: Any, end: Any) -> None:
        """Note the times of a sweep. ``start`` and ``end``: marks of the forward task."""
        forward_s, halves = self.bench.clock.between(start, end), [self._between(*marks) for marks in self._halves]
        if self._halved:
            self.samples.halves.append((forward_s, halves[0], sum(halves[1:])))
        else:
            self.samples.times.append((forward_s, halves[0]))
            self.samples.hosts.append(self._host)
        self._gradients, self._halves = [], []

    def _between(self, start: Any, end: Any) -> float:
        """Seconds between two marks; 0 if nothing was computed."""
        return 0.0 if start is None or end is None else self.bench.clock.between(start, end)

    def _enter(self, _: Tensor) -> None:
        """Autograd is about to take the gradient of a result."""
        if self._entered is None:
            self._entered = self.bench.clock.mark()
            self._resumed = time.perf_counter()

    def _leave(self, _: Tensor) -> None:
        """Autograd has computed the gradient of an operand."""
        now = time.perf_counter() - self.bench.hook_s
        self._host = self._host[0], self._host[1] + max(0.0, now - self._resumed)
        self._left = self.bench.clock.mark()
        self._resumed = time.perf_counter()  # what marks take is not the operator's

    def _compute(self) -> Any:
        """The results of the operator."""
        if not any(self._cuts):
            return self._kernel(*self._operands)
        pairs = zip(self._operands, self._cuts, strict=True)
        return self._kernel(*[x if x is None or at is None else x[at] for x, at in pairs])

    def _watched(self) -> tuple[Any, set[int]]:
        """The results, and which operands autograd keeps."""
        kept: set[int] = set()

        def pack(tensor: Tensor) -> Tensor:
            kept.add(tensor.untyped_storage()._cdata)
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            result = self._compute()
        saved = {k for k, x in enumerate(self._operands) if x is not None and x.untyped_storage()._cdata in kept}
        return result, saved

    def _input(self, position: int, box: Box | None) -> Tensor | None:
        """An operand that stays from step to step; of activations, which are written anew, shape and strides."""
        if box is None:
            return None
        tensor = self.case.costed.inputs[position]
        shape, dtype = [high - low for low, high in box], getattr(torch, tensor.dtype)
        if dtype.is_floating_point or dtype.is_complex:
            operand = torch.empty(shape, dtype=dtype, device=self.bench.device)
            operand = preferred(operand) if self.case.images[position] else operand
            return torch.empty_like(operand, device="meta") if tensor.kind == "activation" else self.bench.fill(operand)
        op = self.case.costed.op
        high = 2 if dtype == torch.bool else min(kind_of(op).integers_below(op), torch.iinfo(dtype).max)
        return torch.randint(high, shape, dtype=dtype, device=self.bench.device)


def _cut(held: Box | None, read: Box | None) -> tuple[slice, ...] | None:
    """Where a region lies in the one that is held; None: it is all of it."""
    if held is None or read is None or held == read:
        return None
    return tuple(slice(a - low, b - low) for (low, _), (a, b) in zip(held, read, strict=True))


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
