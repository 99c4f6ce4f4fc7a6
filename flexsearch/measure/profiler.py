"""Measures each distinct (operator, local shape, dtype) of a graph, forward and backward, on the device at hand, and
what else a step computes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import median_low

import torch

from flexsearch.allocator import keep_freed_memory
from flexsearch.cost.profile import Entry, Figures, Optimizer, Profile, ProfileDevice, UpdateEntry, cpu_model
from flexsearch.errors import ProfileError
from flexsearch.graph.model import Dtype, OperatorGraph
from flexsearch.graph.precision import Precision, with_precision
from flexsearch.measure.cases import Case, check_memory, count, plan, quick_enough
from flexsearch.measure.figures import Starts, fit_figures, residuals
from flexsearch.measure.machine import kernel_start_s, launch_s
from flexsearch.measure.neighbours import SWEEPS, neighbours
from flexsearch.measure.recipe_work import measure_recipe_work
from flexsearch.measure.reference import TYPES, reference
from flexsearch.measure.sweeps import Bench
from flexsearch.measure.updates import OPTIMIZERS, measure_updates

TURNS = 3
"""Pieces are measured so many times, with all the others between, so that what slows a machine down for a few seconds
does not make all sweeps of a piece slow."""
Progress = Callable[[int, int], None]
"""Called with the number of entries that are measured, and of all."""


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
    precision: Precision = "as-is",
) -> Profile:
    """Profile of all pieces of ``graph`` that splitting each operator into up to ``max_parts`` can make.

    ``known``: measurements that are kept and not repeated. ``repeats``: about so many sweeps over each piece, in
    ``TURNS`` turns, the median of whose medians counts. ``budget_s``: stop after so many seconds; the pieces that plans
    have most are measured first (``cases``), and estimates fill what is missing. ``busy_neighbours``: that many
    processes do the same kind of work meanwhile, as on a machine whose cores share the memory. ``precision``: of the
    plans that these times are for (``Options.precision``). Raises ProfileError if ``known`` is of another device,
    ``device`` is not there, or a count is below 1.
    """
    for option, value in (("threads", threads), ("max_parts", max_parts), ("repeats", repeats)):
        if value < 1:
            raise ProfileError(f"{option} is {value}", "Give at least 1.")
    if name := next((op.name for op in graph.operators if op.kind == "given"), None):
        raise ProfileError(
            f"the graph has no operators to measure: {name!r} is a time and bytes that a profile gave",
            "Such a graph is planned as it is. Import the PyTorch model itself to measure it.",
        )
    here, graph = _device(device, threads), with_precision(graph, precision)
    if here.kind == "cpu":
        keep_freed_memory()  # as the runtime does
    if known is not None:
        known.extended(Profile(device=here, torch=torch.__version__, busy_neighbours=busy_neighbours))  # if they fit
    rounds = plan(graph, max_parts, frozenset(known.entries) if known else frozenset())
    check_memory(rounds)
    rounds = [[case for case in cases if quick_enough(case, here.kind, budget_s)] for cases in rounds]
    deadline = None if budget_s is None else time.monotonic() + budget_s
    with _threads(threads), neighbours(graph, precision, device, threads, max_parts, busy_neighbours) as others:
        bench = Bench(device)
        entries = measure_entries(bench, rounds, repeats, deadline, progress)
        complete = known is not None and not entries and len(known.updates) == len(OPTIMIZERS)
        updates = {} if complete else measure_updates(graph, bench, others.switch)
        recipe_work = {} if known is not None and known.recipe_work else measure_recipe_work(bench, others.switch)
        others.switch(SWEEPS)
        figures = None if known is not None and known.figures is not None else measure_figures(bench, updates)
        new = Profile(
            device=here, torch=torch.__version__, busy_neighbours=busy_neighbours, entries=entries, updates=updates,
            figures=figures, recipe_work=recipe_work,
        )  # fmt: skip
        profile = new if known is None else known.extended(new)
        return profile.model_copy(update={"residuals": residuals(profile)})


def measure_figures(bench: Bench, updates: Mapping[Optimizer, UpdateEntry]) -> Figures:
    """Figures of the device of a bench, from operators of many sizes. ``updates``: measured ones."""
    device, measured = bench.device, dict[Dtype, Sequence[Entry]]()
    for dtype in TYPES[device.type]:
        try:
            rounds = [list(reference(device.type, dtype))]
            measured[dtype] = list(measure_entries(bench, rounds, TURNS, None, None).values())
        except ProfileError:  # this device does not compute in it
            if dtype == "float32":
                raise
    starts = Starts(launch_s(device), kernel_start_s(device)) if device.type == "cuda" else None
    return fit_figures(measured, updates, device.type, starts)


def measure_entries(
    bench: Bench, rounds: Sequence[Sequence[Case]], repeats: int, deadline: float | None, progress: Progress | None
) -> dict[str, Entry]:
    """Entries of all pieces, in turns. What a deadline leaves unmeasured is left out."""
    taken: dict[str, list[Entry]] = {}
    turns, total, done = min(TURNS, repeats), count(rounds), 0
    for turn in range(turns):
        # Where time may end, one sweep over every piece comes before a second one over any.
        sweeps = 1 if deadline is not None and turn == 0 else -(-repeats // turns)
        for cases in rounds:
            if deadline is not None and time.monotonic() > deadline:
                break
            measured = bench.measure(cases, sweeps, deadline)
            for key, entry in measured.items():
                taken.setdefault(key, []).append(entry)
            done += len(measured)
            if progress is not None:
                progress(done // turns, total)
    return {key: _middle(entries) for key, entries in taken.items()}


def _middle(entries: Sequence[Entry]) -> Entry:
    """One entry of those of several turns. Of two the lower counts, and of a GPU's host the least: other work on the
    machine only adds, and in a sweep the code of each task is colder than in a step."""
    halves = [entry.halves_s for entry in entries if entry.halves_s is not None]
    hosts = [entry.host_s for entry in entries if entry.host_s is not None]
    return entries[0].model_copy(
        update={
            "forward_s": median_low(entry.forward_s for entry in entries),
            "backward_s": median_low(entry.backward_s for entry in entries),
            "halves_s": (median_low(a for a, _ in halves), median_low(b for _, b in halves)) if halves else None,
            "host_s": (min(a for a, _ in hosts), min(b for _, b in hosts)) if hosts else None,
            "repeats": sum(entry.repeats for entry in entries),
        }
    )


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
