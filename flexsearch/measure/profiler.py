"""Measures each distinct (operator, local shape, dtype) of a graph, forward and backward, on the device at hand, and
the updates of the optimizers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from statistics import median
from typing import Literal

import torch
from torch import Tensor

from flexsearch.allocator import keep_freed_memory
from flexsearch.cost.profile import Entry, Profile, ProfileDevice, UpdateEntry, cpu_model
from flexsearch.errors import ProfileError
from flexsearch.graph.model import OperatorGraph
from flexsearch.measure.cases import CACHE_BYTES, check_memory, count, plan, quick_enough
from flexsearch.measure.neighbours import neighbours
from flexsearch.measure.products import measure_products, nominal, residuals
from flexsearch.measure.recipe_work import measure_recipe_work
from flexsearch.measure.sweeps import Bench

Progress = Callable[[int, int], None]
"""Called with the number of entries that are measured, and of all."""

UPDATE_BYTES = 64 << 20
"""Weights whose update is measured."""
MORE_TENSORS = 8
"""Into so many parts each of them is cut, to see what a tensor costs."""


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
    if given := next((op.name for op in graph.operators if op.kind == "given"), None):
        raise ProfileError(
            f"the graph has no operators to measure: {given!r} is a time and bytes that a profile gave",
            "Such a graph is planned as it is. Import the PyTorch model itself to measure it.",
        )
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
    total = count(rounds)
    with _threads(threads), neighbours(graph, device, threads, max_parts, busy_neighbours):
        bench = Bench(device)
        for cases in rounds:
            if deadline is not None and time.monotonic() > deadline:
                break
            entries |= bench.measure(cases, repeats, deadline)
            if progress is not None:
                progress(len(entries), total)
        complete = known is not None and not entries and len(known.updates) == len(_OPTIMIZERS)
        updates = {} if complete else measure_updates(graph, bench)
        new = Profile(
            device=here, torch=torch.__version__, busy_neighbours=busy_neighbours, entries=entries, updates=updates,
            products={} if known is not None and known.products else measure_products(bench),
            recipe_work={} if known is not None and known.recipe_work else measure_recipe_work(bench),
        )  # fmt: skip
        profile = new if known is None else known.extended(new)
        return profile.model_copy(update={"residuals": residuals(profile, nominal(profile, bench))})


_OPTIMIZERS: dict[Literal["sgd", "momentum", "adam"], Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "sgd": lambda weights: torch.optim.SGD(weights, lr=1e-3),
    "momentum": lambda weights: torch.optim.SGD(weights, lr=1e-3, momentum=0.9),
    "adam": lambda weights: torch.optim.Adam(weights, lr=1e-3),
}


def measure_updates(
    graph: OperatorGraph, bench: Bench, repeats: int = 5
) -> dict[Literal["sgd", "momentum", "adam"], UpdateEntry]:
    """Time of torch.optim's updates of the graph's weights (the first UPDATE_BYTES of them), and of as many bytes in
    more tensors; from the difference what a tensor costs."""
    few = _weight_sizes(graph)
    many = [len(part) for size in few for part in torch.empty(size, device="meta").chunk(MORE_TENSORS)]
    nbytes = 4 * sum(few)
    written = sum(graph.tensor[name].nbytes for op in graph.operators for name in op.outputs)
    entries: dict[Literal["sgd", "momentum", "adam"], UpdateEntry] = {}
    for name, make in _OPTIMIZERS.items():
        small, large = (_update_s(make, bench, sizes, min(written, CACHE_BYTES), repeats) for sizes in (few, many))
        per_tensor = max(0.0, (large - small) / max(1, len(many) - len(few)))
        per_byte = max(0.0, small - len(few) * per_tensor) / nbytes
        entries[name] = UpdateEntry(s_per_byte=per_byte, s_per_tensor=per_tensor)
    return entries


def _weight_sizes(graph: OperatorGraph) -> list[int]:
    """Elements of the graph's weights, in its order, UPDATE_BYTES of float32 at most; some of a graph without any."""
    left, sizes = UPDATE_BYTES // 4, []
    for weight in graph.of_kind("parameter"):
        if left > 0:
            sizes.append(min(prod(weight.shape), left))
            left -= sizes[-1]
    return [size for size in sizes if size] or [UPDATE_BYTES // 16] * 4


def _update_s(
    make: Callable[[list[Tensor]], torch.optim.Optimizer], bench: Bench, sizes: Sequence[int], touched: int,
    repeats: int,
) -> float:  # fmt: skip
    """Seconds of an update of float32 weights of these sizes, with clearing the gradients, where the step has
    ``touched`` so many bytes since the last one."""
    weights = [torch.zeros(size, device=bench.device, requires_grad=True) for size in sizes]
    activations = torch.zeros(max(1, touched // 4), device=bench.device)
    optimizer = make(weights)
    times = []
    for _ in range(repeats + 1):
        activations.add_(1.0)
        for weight in reversed(weights):
            weight.grad = bench.fill(torch.empty_like(weight, requires_grad=False))
        start = bench.clock.mark()
        optimizer.step()
        optimizer.zero_grad()
        end = bench.clock.mark()
        bench.clock.wait()
        times.append(bench.clock.between(start, end))
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
