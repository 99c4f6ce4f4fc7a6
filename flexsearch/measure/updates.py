"""Measures the updates of torch.optim's optimizers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from math import prod
from statistics import median

import torch
from torch import Tensor

from flexsearch.cost.profile import Optimizer, UpdateEntry
from flexsearch.graph.model import OperatorGraph
from flexsearch.measure.cases import CACHE_BYTES
from flexsearch.measure.sweeps import Bench

UPDATE_BYTES = 64 << 20
"""Weights whose update is measured: all tensors, of which the largest are cut."""
UPDATE = "update "
"""What busy neighbours are told, with the optimizer's name behind it."""
MORE_TENSORS = 8
"""Into so many parts each of them is cut, to see what a tensor costs."""

OPTIMIZERS: dict[Optimizer, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "sgd": lambda weights: torch.optim.SGD(weights, lr=1e-3),
    "momentum": lambda weights: torch.optim.SGD(weights, lr=1e-3, momentum=0.9),
    "adam": lambda weights: torch.optim.Adam(weights, lr=1e-3),
}


def measure_updates(
    graph: OperatorGraph, bench: Bench, switch: Callable[[str], None] | None = None, repeats: int = 5
) -> dict[Optimizer, UpdateEntry]:
    """Time of torch.optim's updates of the graph's weights (UPDATE_BYTES of them), and of as many bytes in more
    tensors; from the difference what a tensor costs. Of a host it is its share in the time of the whole call.
    ``switch``: has busy neighbours do the same, since all ranks update at the end of a step, and updates take what
    memory gives."""
    few = _weight_sizes(graph)
    if bench.queued and 4 * sum(few) < UPDATE_BYTES:  # small ones alone tell nothing of bytes
        few.append(UPDATE_BYTES // 4)
    many = [len(part) for size in few for part in torch.empty(size, device="meta").chunk(MORE_TENSORS)]
    nbytes = 4 * sum(few)
    # The forward pass writes activations; the backward pass reads them, and writes as many gradients.
    written = 3 * sum(graph.tensor[name].nbytes for op in graph.operators for name in op.outputs)
    entries: dict[Optimizer, UpdateEntry] = {}
    for name, make in OPTIMIZERS.items():
        if switch is not None:
            switch(f"{UPDATE}{name}")
        measured = [_update_s(make, bench, sizes, min(written, CACHE_BYTES), repeats) for sizes in (few, many)]
        (small, host_s), (large, _) = measured
        per_tensor = max(0.0, (large - small) / max(1, len(many) - len(few)))
        per_byte = max(0.0, small - len(few) * per_tensor) / nbytes
        host_s_per_tensor = host_s / len(few) if bench.queued else None
        entries[name] = UpdateEntry(
            s_per_byte=per_byte, s_per_tensor=per_tensor, host_s_per_tensor=host_s_per_tensor
        )
    return entries


def updating(graph: OperatorGraph, bench: Bench, name: Optimizer) -> Callable[[], object]:
    """An update of the same weights, to be called again and again."""
    weights = [torch.zeros(size, device=bench.device, requires_grad=True) for size in _weight_sizes(graph)]
    for weight in weights:
        weight.grad = bench.fill(torch.empty_like(weight, requires_grad=False))
    return OPTIMIZERS[name](weights).step


def _weight_sizes(graph: OperatorGraph) -> list[int]:
    """Elements of the graph's weights, in its order, UPDATE_BYTES of float32 at most: of more, the largest are cut to
    one size. Some of a graph without any."""
    sizes = [size for weight in graph.of_kind("parameter") if (size := prod(weight.shape))]
    left, most = UPDATE_BYTES // 4, 1
    for k, size in enumerate(sorted(sizes)):
        most = max(1, left // (len(sizes) - k))
        if size > most:
            break
        left, most = left - size, size
    return [min(size, most) for size in sizes] or [UPDATE_BYTES // 16] * 4


def _update_s(
    make: Callable[[list[Tensor]], torch.optim.Optimizer], bench: Bench, sizes: Sequence[int], touched: int,
    repeats: int,
) -> tuple[float, float]:  # fmt: skip
    """Seconds of an update of float32 weights of these sizes, with clearing the gradients, where the step has
    ``touched`` so many bytes since the last one: on the device, and what its host takes."""
    weights = [torch.zeros(size, device=bench.device, requires_grad=True) for size in sizes]
    parts = torch.zeros(max(len(weights), touched // 4), device=bench.device).tensor_split(len(weights))
    optimizer = make(weights)
    times, hosts = [], [0.0]
    for _ in range(repeats + 1):
        for weight, part in zip(reversed(weights), parts, strict=True):
            part.add_(1.0)  # gradients are made all through the backward pass
            weight.grad = bench.fill(torch.empty_like(weight, requires_grad=False))
        bench.clock.hold(2 * max(hosts))
        start, began = bench.clock.mark(), time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        hosts.append(time.perf_counter() - began)
        end = bench.clock.mark()
        bench.clock.wait()
        times.append(bench.clock.between(start, end))
    return median(times[1:]), median(hosts[2:])  # the first makes the state
