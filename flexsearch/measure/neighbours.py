"""Processes that do the same kind of work while a device is profiled: cores of a machine share its memory.

``python -m flexsearch.measure.neighbours`` is such a process; it is told what to do on its standard input.
"""

from __future__ import annotations

import itertools
import json
import os
import select
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

from flexsearch import children
from flexsearch.errors import ProfileError
from flexsearch.graph.model import OperatorGraph
from flexsearch.graph.precision import Precision, with_precision

if TYPE_CHECKING:
    from flexsearch.measure.sweeps import Bench

SWEEPS: Final = "sweeps"
"""Over the pieces of the graph. Other work is an optimizer's update, and what recipes of synchronisation compute."""


class Neighbours:
    """Processes that are busy until the end of a block."""

    def __init__(self, processes: Sequence[subprocess.Popen[bytes]]) -> None:
        self._processes = processes

    def switch(self, work: str) -> None:
        """Have all of them do other work; all do when this returns. Raises ProfileError if one has ended."""
        for process in self._processes:
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # that it does not answer tells more
                process.stdin.write(f"{work}\n".encode())
                process.stdin.flush()
        for process in self._processes:
            assert process.stdout is not None
            if process.stdout.readline() != b"busy\n":
                raise ProfileError("a neighbour process has ended", "Its error is printed above.")


@contextmanager
def neighbours(
    graph: OperatorGraph, precision: Precision, device: str, threads: int, max_parts: int, count: int
) -> Iterator[Neighbours]:
    """``count`` other processes that sweep over the same graph until they are told otherwise, or the block ends."""
    request = json.dumps(
        {"graph": with_precision(graph, "as-is").model_dump(mode="json"), "precision": precision, "device": device,
         "threads": threads, "max_parts": max_parts}
    )
    processes = [
        children.start(children.module("flexsearch.measure.neighbours"), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(count)
    ]
    try:
        together = Neighbours(processes)
        together.switch(request)
        yield together
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def _be_neighbour() -> None:
    """What a neighbour process does: works until it is killed or its parent is gone."""
    import torch

    from flexsearch.allocator import keep_freed_memory
    from flexsearch.measure.sweeps import Bench

    parent = os.getppid()
    children.end_with(parent)
    request = json.loads(sys.stdin.readline())
    _leave_cores_of_parent()
    torch.set_num_threads(request["threads"])
    keep_freed_memory()
    graph = with_precision(OperatorGraph.model_validate_json(json.dumps(request["graph"])), request["precision"])
    bench, work = Bench(request["device"]), SWEEPS
    while work and os.getppid() == parent:
        once = _work(graph, bench, request["max_parts"], work)
        print("busy", flush=True)
        while not select.select([sys.stdin], [], [], 0)[0]:  # its next line waits for ours: none is in the buffer
            once()
        work = sys.stdin.readline().strip()


def _work(graph: OperatorGraph, bench: Bench, max_parts: int, work: str) -> Callable[[], object]:
    """What does a part of the work, again and again."""
    from flexsearch.measure.cases import plan
    from flexsearch.measure.recipe_work import RECIPE, working
    from flexsearch.measure.runs import Run, Samples
    from flexsearch.measure.sweeps import parts
    from flexsearch.measure.updates import OPTIMIZERS, UPDATE, updating

    if work.startswith(RECIPE):
        return working(bench, work.removeprefix(RECIPE))
    for name in OPTIMIZERS:
        if work == f"{UPDATE}{name}":
            return updating(graph, bench, name)
    rounds = itertools.cycle(part for cases in plan(graph, max_parts) for part in parts(cases))
    return lambda: bench.sweep([Run(case, bench.numbers, Samples(case)) for case in next(rounds)])


def _leave_cores_of_parent() -> None:
    """Where the parent is pinned to some cores, work on the others."""
    if hasattr(os, "sched_setaffinity"):
        others = set(range(os.cpu_count() or 1)) - os.sched_getaffinity(0)
        with suppress(OSError):  # a container may forbid it; then all share
            os.sched_setaffinity(0, others or os.sched_getaffinity(0))


if __name__ == "__main__":
    _be_neighbour()
