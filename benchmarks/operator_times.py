"""Does a profile say how long operators take in a training step? By kind of operator, on one core.

    python -m benchmarks.operator_times [--quick] [--json] [--models llama,gpt2,alexnet]

Profiled: what ``flexsearch profile`` measures of whole operators. In the step: the same kernels one after the other, in
one autograd graph, with a mark between them; backward, marks are where autograd reaches the gradient of an operator's
result. All times are processor time, which other work on the machine hardly changes.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import Row, median, parser, report, say
from benchmarks.layouts import MODELS
from flexsearch.allocator import keep_freed_memory
from flexsearch.clocks import Clock
from flexsearch.cost.costed import Costed
from flexsearch.graph import OperatorGraph
from flexsearch.graph.importer import import_model
from flexsearch.graph.loading import load_callable
from flexsearch.graph.ops import KernelContext, build_kernel, kind_of
from flexsearch.graph.ops.local import preferred
from flexsearch.measure.cases import Case, plan
from flexsearch.measure.sweeps import Bench

Times = dict[int, list[float]]


class ProcessorTime(Clock):
    """Seconds that this thread has run."""

    def mark(self) -> float:
        return time.thread_time()


class Step:
    """A graph's operators one after the other on random values, with the gradients of its weights."""

    def __init__(self, graph: OperatorGraph, cases: Sequence[Case]) -> None:
        self.graph, self.clock = graph, ProcessorTime()
        self.kernels = [_kernel(case) for case in cases]
        computed = {name for op in graph.operators for name in op.outputs}
        self.fixed = {t.name: self._random(t.name) for t in graph.tensors if t.name not in computed}
        self.weights = [x for x in self.fixed.values() if x.requires_grad]
        self.last = {name: k for k, op in enumerate(graph.operators) for name in op.inputs}

    def run(self, forward: Times, backward: Times) -> None:
        """One step; adds the seconds of each operator."""
        values, marks = dict(self.fixed), []

        def mark(k: int) -> Callable[[Tensor], None]:
            return lambda _: marks.append((k, self.clock.mark()))

        for k, (op, kernel) in enumerate(zip(self.graph.operators, self.kernels, strict=True)):
            operands = [values[name] for name in op.inputs]
            began = self.clock.mark()
            made = kernel(*operands)
            forward[k].append(self.clock.between(began, self.clock.mark()))
            for name, x in zip(op.outputs, made if isinstance(made, tuple) else (made,), strict=True):
                values[name] = x
                if x.requires_grad:
                    x.register_hook(mark(k))
            for name in op.inputs:
                if self.last[name] == k and name not in self.fixed:
                    values.pop(name, None)
            del operands, made
        loss = values.pop(str(self.graph.loss))
        values.clear()
        torch.autograd.grad(loss, self.weights, allow_unused=True)
        ends = [began for _, began in marks[1:]] + [self.clock.mark()]
        seconds: dict[int, float] = defaultdict(float)
        for (k, began), end in zip(marks, ends, strict=True):
            seconds[k] += self.clock.between(began, end)
        for k, spent in seconds.items():
            backward[k].append(spent)

    def _random(self, name: str) -> Tensor:
        tensor = self.graph.tensor[name]
        dtype = getattr(torch, tensor.dtype)
        if dtype.is_floating_point:
            x = preferred(0.05 * torch.randn(tensor.shape, dtype=dtype))
            return x.requires_grad_(tensor.kind == "parameter")
        op = next((op for op in self.graph.operators if name in op.inputs), None)
        high = 2 if op is None or dtype == torch.bool else kind_of(op).integers_below(op)
        return torch.randint(min(high, torch.iinfo(dtype).max), tensor.shape, dtype=dtype)


def _kernel(case: Case) -> Callable[..., Any]:
    """A whole operator, which cuts the parts of its operands that it reads."""
    kernel = build_kernel(case.costed.op, case.piece, case.shapes, KernelContext())
    cuts = [
        None if box is None or box == held else tuple(slice(a, b) for a, b in box)
        for box, held in zip(case.piece.inputs, case.held, strict=True)
    ]
    if not any(cuts):
        return kernel
    return lambda *operands: kernel(*[x if at is None else x[at] for x, at in zip(operands, cuts, strict=True)])


def rows_of(model: str, steps: int, repeats: int) -> list[Row]:
    """By kind of operator, then all: milliseconds in the profile and in a step."""
    named = MODELS[model]
    made = load_callable(named.target, batch=named.batch, device="meta", **named.arguments)
    graph = import_model(made.model, made.inputs, made.loss, targets=made.targets, name=model)
    costed = [Costed.of(graph, k) for k in range(len(graph.operators))]
    keys = [c.signature(c.op.sizes) for c in costed]
    cases, bench = plan(graph, 1), Bench("cpu")
    bench.clock = ProcessorTime()
    say(f"profiling {model}")
    entries = {key: entry for row in cases for key, entry in bench.measure(row, repeats).items()}
    by_key = {case.key: case for row in cases for case in row}
    step = Step(graph, [by_key[key] for key in keys])
    times: tuple[Times, Times] = defaultdict(list), defaultdict(list)
    say(f"running {model}")
    for k in range(steps + 1):
        step.run(*(times if k else (defaultdict(list), defaultdict(list))))
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0] * 4)
    for k, key in enumerate(keys):
        parts = entries[key].forward_s, entries[key].backward_s, *(median(t[k]) if t[k] else 0.0 for t in times)
        for kind in (costed[k].op.kind, "all"):
            sums[kind] = [a + 1e3 * b for a, b in zip(sums[kind], parts, strict=True)]
    return [
        {"model": model, "kind": kind, "forward_profile_ms": f, "forward_step_ms": in_f, "backward_profile_ms": b,
         "backward_step_ms": in_b, "error_percent": 100 * ((f + b) / (in_f + in_b) - 1)}
        for kind, (f, b, in_f, in_b) in sorted(sums.items(), key=lambda item: -item[1][2] - item[1][3])
    ]  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    options = parser(__doc__)
    options.add_argument("--models", help=f"comma-separated, of: {', '.join(MODELS)}")
    chosen = options.parse_args(arguments)
    models = chosen.models.split(",") if chosen.models else ["llama", "gpt2", "alexnet"]
    if unknown := set(models) - set(MODELS):
        options.error(f"--models: {', '.join(sorted(unknown))} is none of {', '.join(MODELS)}")
    torch.set_num_threads(1)
    keep_freed_memory()
    rows = [row for model in models for row in rows_of(model, *((4, 3) if chosen.quick else (12, 7)))]
    report(rows, "operators", chosen.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
