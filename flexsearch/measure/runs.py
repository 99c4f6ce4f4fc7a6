"""Runs of single pieces of operators, forward and back, as sweeps measure them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from flexsearch.clocks import Clock
from flexsearch.cost.profile import Entry
from flexsearch.errors import FlexsearchError, ProfileError
from flexsearch.graph.notation import Box
from flexsearch.graph.ops import KernelContext, build_kernel, kind_of
from flexsearch.graph.ops.batch_norm import normalising
from flexsearch.graph.ops.calls import dtype_of
from flexsearch.graph.ops.local import in_types, preferred
from flexsearch.measure.cases import Case
from flexsearch.saved import aside

FIRST_S = 2.0
"""The first sweep of an entry counts only if it takes longer."""
T = TypeVar("T")
Times = tuple[float, float]
"""Seconds of forward and backward tasks."""
BLOCK = 1 << 14
"""Operands hold so many random numbers again and again: to write them, little else is read into the caches."""


@contextmanager
def named(case: Case) -> Iterator[None]:
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


class Numbers:
    """Random numbers for tensors on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._blocks: dict[torch.dtype, Tensor] = {}

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


class Samples:
    """What was measured of an entry, in seconds. ``times``: (forward, backward) of each piece of each sweep;
    ``halves``: (forward, first half, second half) where backward passes have halves; ``hosts``: that the host took for
    forward and backward."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.times: list[Times] = []
        self.halves: list[tuple[float, float, float]] = []
        self.hosts: list[Times] = []

    @property
    def spent(self) -> float:
        """Seconds in all."""
        return sum(map(sum, self.times))

    def forget_first(self) -> None:
        """Drop the first sweep: it set things up, and was the first to touch its memory. Slow ones are kept."""
        if self.spent < FIRST_S:
            self.times = []

    def entry(self) -> Entry:
        """Medians of what was measured. What a forward pass takes longer for backward passes in halves is part of
        their first half."""
        costed, halves = self.case.costed, None
        forward_s, backward_s = _medians(self.times)
        if self.halves:
            ahead, inputs, weights = (median(column) for column in zip(*self.halves, strict=True))
            halves = inputs if costed.trained else max(0.0, ahead - forward_s + inputs), weights
        return Entry(
            kind=costed.op.kind,
            dtype=costed.dtype,
            forward_s=forward_s,
            backward_s=backward_s,
            halves_s=halves,
            repeats=len(self.times),
            forward=costed.forward(self.case.extents),
            backward=costed.backward(self.case.extents),
            product=costed.product_sizes(self.case.extents),
            host_s=_medians(self.hosts) if self.hosts else None,
        )


def _medians(pairs: Sequence[Times]) -> Times:
    return median(a for a, _ in pairs), median(b for _, b in pairs)


class Run:
    """A piece under measurement. Its weights and what the step is given have memory of their own, as in a step."""

    def __init__(self, case: Case, numbers: Numbers, samples: Samples) -> None:
        self.case, self.numbers, self.samples = case, numbers, samples
        op, context = case.costed.op, KernelContext(device=numbers.device)
        self._kernel = normalising(op, case.extents, build_kernel(op, case.piece, case.shapes, context))
        if case.precise:
            input_types, types = ([dtype_of(t.dtype) for t in x] for x in (case.costed.inputs, case.costed.outputs))
            self._kernel = in_types(self._kernel, input_types, types)
        self._cuts = [_cut(held, read) for held, read in zip(case.held, case.piece.inputs, strict=True)]
        self._inputs = [self._input(i, box) for i, box in enumerate(case.held)]
        self._operands: list[Tensor | None] = []
        self._outputs: tuple[Tensor, ...] = ()
        self._seeds: list[tuple[GradientEdge, Tensor]] = []
        """Where gradients of results enter; shapes and strides of these."""
        self.incoming: list[Tensor] = []
        """The gradients of the results."""
        self._saved: set[int] | None = None
        """Operands whose memory autograd keeps for the backward pass."""
        self.gradients: list[Tensor | None] = []
        """Of weights, which live until the sweep is over."""
        self.began: Any = None
        self.ended: Any = None
        """Marks of the forward task."""
        self.entered: Any = None
        self.left: Any = None
        """Marks of the backward task: autograd takes the gradient of a result, and has those of all operands."""
        self._hooks = 0
        self.apart: tuple[Any, Any] = None, None
        """Marks of the second half of the backward task, if it has any."""

    def prepare(self) -> None:
        """Write the activations that the piece reads, as the operator before it would have done."""
        self._operands = []
        for source, need in zip(self._inputs, self.case.costed.needs, strict=True):
            operand = source
            if operand is not None and operand.is_meta:
                operand = self.numbers.fill(torch.empty_like(operand, device=self.numbers.device))
            self._operands.append(operand.detach().requires_grad_() if operand is not None and need else operand)

    def forward(self, halved: bool) -> None:
        """The forward task; ``halved``: for a backward pass in halves."""
        if self._saved is None:
            result, self._saved = self._watched()
        elif halved and not self.case.costed.trained:
            with aside([]):
                result = self._compute()
        else:
            result = self._compute()
        self._outputs = result if isinstance(result, tuple) else (result,)

    def release(self, clock: Clock) -> None:
        """Let go of results and activations that autograd does not keep, as a rank does; ``clock`` is to time the
        backward task."""

        def enter(_: Tensor) -> None:
            if self.entered is None:
                self.entered = clock.mark()

        def leave(_: Tensor) -> None:
            self.left = clock.mark()

        results, self._outputs = self._outputs, ()
        self.entered = self.left = None
        self._hooks = 0
        for y in results:
            if y.requires_grad:
                y.register_hook(enter)  # type: ignore[no-untyped-call]
                self._hooks += 1
                self._seeds.append((get_gradient_edge(y), torch.empty_like(y, device="meta")))
        for k, (x, source) in enumerate(zip(self._operands, self._inputs, strict=True)):
            assert self._saved is not None
            if x is None or not x.requires_grad:
                self._operands[k] = None
                continue
            x.register_hook(leave)  # type: ignore[no-untyped-call]
            self._hooks += 1
            if source is not None and source.is_meta and k not in self._saved and all(x is not y for y in results):
                x.data = x.data.new_empty(0)

    def prepare_backward(self) -> None:
        """Write the gradients of the results, as the operator after it would have done."""
        self.incoming = [self.numbers.fill(torch.empty_like(y, device=self.numbers.device)) for _, y in self._seeds]

    @property
    def edges(self) -> list[GradientEdge]:
        """Where the gradients of the results enter."""
        return [edge for edge, _ in self._seeds]

    def wanted(self, activations: bool = True, weights: bool = True) -> list[tuple[bool, Tensor]]:
        """Operands whose gradients are made, each with whether it is a weight; none where nothing can be made."""
        among = [tensor.kind == "parameter" for tensor in self.case.costed.inputs]
        operands = [(weight, x) for weight, x in zip(among, self._operands, strict=True) if x is not None]
        return [(w, x) for w, x in operands if (weights if w else activations)] if self._seeds else []

    def clear(self) -> None:
        """Let go of what the backward task was the last to use."""
        self._operands, self.incoming, self._seeds = [], [], []

    def times(self, clock: Clock, hook_s: float) -> Times:
        """Seconds of the forward and the backward task, in which the clock has ``hook_s`` for each hook: half of the
        first and half of the last, and all of those between."""
        backward_s = _between(clock, self.entered, self.left)
        return clock.between(self.began, self.ended), max(0.0, backward_s - max(0, self._hooks - 1) * hook_s)

    def halves_times(self, clock: Clock, hook_s: float) -> tuple[float, float, float]:
        """Seconds of the forward task and of the two halves of the backward task."""
        forward_s, inputs_s = self.times(clock, hook_s)
        return forward_s, inputs_s, _between(clock, *self.apart)

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
        tensor, device = self.case.costed.inputs[position], self.numbers.device
        shape, dtype = [high - low for low, high in box], getattr(torch, tensor.dtype)
        if dtype.is_floating_point or dtype.is_complex:
            operand = torch.empty(shape, dtype=dtype, device=device)
            operand = preferred(operand) if self.case.images[position] else operand
            activation = tensor.kind == "activation"
            return torch.empty_like(operand, device="meta") if activation else self.numbers.fill(operand)
        op = self.case.costed.op
        high = 2 if dtype == torch.bool else min(kind_of(op).integers_below(op), torch.iinfo(dtype).max)
        return torch.randint(high, shape, dtype=dtype, device=device)


def hook_s(device: torch.device, length: int = 64, repeats: int = 30) -> float:
    """Seconds that a hook that reads the host's clock adds to a backward pass."""
    marks: list[float] = [0.0]

    def mark(_: Tensor) -> None:
        marks[0] = time.perf_counter()

    def backward_s(hooks: bool) -> float:
        x = y = torch.ones(1, device=device, requires_grad=True)
        for _ in range(length):
            y = -y
            if hooks:
                y.register_hook(mark)  # type: ignore[no-untyped-call]
        began = time.perf_counter()
        torch.autograd.grad(y, x)
        return time.perf_counter() - began

    pairs = [(backward_s(True), backward_s(False)) for _ in range(repeats)]
    with_hooks, without = _medians(pairs)
    return max(0.0, with_hooks - without) / length


def _cut(held: Box | None, read: Box | None) -> tuple[slice, ...] | None:
    """Where a region lies in the one that is held; None: it is all of it."""
    if held is None or read is None or held == read:
        return None
    return tuple(slice(a - low, b - low) for (low, _), (a, b) in zip(held, read, strict=True))


def _between(clock: Clock, start: Any, end: Any) -> float:
    """Seconds between two marks; 0 if nothing was computed."""
    return 0.0 if start is None or end is None else clock.between(start, end)


def grouped(items: Sequence[T], nbytes: float, case_of: Callable[[T], Case]) -> Iterator[list[T]]:
    """Items side by side whose cases read and write at most so many bytes together, or one that does more."""
    group: list[T] = []
    total = 0.0
    for item in items:
        case = case_of(item)
        size = case.costed.forward(case.extents).nbytes
        if group and total + size > nbytes:
            yield group
            group, total = [], 0.0
        group.append(item)
        total += size
    if group:
        yield group


def forward_tasks(group: Sequence[Run], clock: Clock, halved: bool) -> None:
    """The forward tasks of a group, one right after the other; ``halved``: for backward passes in halves."""
    for run in group:
        run.prepare()
    with named(group[0].case):
        mark = clock.mark()
        for run in group:
            run.began = mark
            run.forward(halved)
            mark = run.ended = clock.mark()
    for run in group:
        run.release(clock)


def backward_tasks(group: Sequence[Run], half: bool) -> None:
    """The backward tasks of a group, or the ``half`` of them that makes no gradients of weights: in one call of
    autograd, which takes what was computed last first."""
    for run in group:
        run.prepare_backward()
    _differentiate(group, weights=not half, keep=half)
    if not half:
        for run in group:
            run.clear()


def weight_tasks(group: Sequence[Run], clock: Clock) -> None:
    """The other half of the backward tasks of a group, a call of autograd for each."""
    for run in group:
        run.apart = None, None
        if run.case.costed.trained and run.wanted():
            first, start = (run.entered, run.left), clock.mark()
            _differentiate([run], activations=False)
            run.apart = start, clock.mark()
            run.entered, run.left = first
        run.clear()


def _differentiate(group: Sequence[Run], *, activations: bool = True, weights: bool = True, keep: bool = False) -> None:
    """Gradients of operands of these kinds. ``keep``: what they are computed from."""
    asked = [(run, run.wanted(activations, weights)) for run in group]
    asked = [(run, wanted) for run, wanted in asked if wanted]
    if not asked:
        return
    with named(asked[0][0].case):
        computed = iter(
            torch.autograd.grad(
                [edge for run, _ in asked for edge in run.edges],
                [x for _, wanted in asked for _, x in wanted],
                [gradient for run, _ in asked for gradient in run.incoming],
                retain_graph=keep,
                allow_unused=True,
            )
        )
    for run, wanted in asked:
        gradients = [(weight, next(computed)) for weight, _ in wanted]
        run.gradients = [gradient for weight, gradient in gradients if weight]
