"""Processes that do the same kind of work while a device is profiled: cores of a machine share its memory.

``python -m flexsearch.measure.neighbours`` is such a process; it is told what to do on its standard input.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from flexsearch import children
from flexsearch.errors import ProfileError
from flexsearch.graph.model import OperatorGraph


@contextmanager
def neighbours(graph: OperatorGraph, device: str, threads: int, max_parts: int, count: int) -> Iterator[None]:
    """``count`` other processes that sweep over the same graph until the end of the block."""
    request = json.dumps(
        {"graph": graph.model_dump(mode="json"), "device": device, "threads": threads, "max_parts": max_parts}
    )
    processes = [
        children.start(children.module("flexsearch.measure.neighbours"), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(count)
    ]
    try:
        for process in processes:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(f"{request}\n".encode())
            process.stdin.flush()
        for process in processes:
            assert process.stdout is not None
            if process.stdout.readline() != b"ready\n":
                raise ProfileError("a neighbour process failed to start", "Its error is printed above.")
        yield
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def _be_neighbour() -> None:
    """What a neighbour process does: sweeps over random rounds until it is killed or its parent is gone."""
    import torch

    from flexsearch.allocator import keep_freed_memory
    from flexsearch.measure.cases import plan
    from flexsearch.measure.sweeps import Bench, Run, Samples, parts

    parent = os.getppid()
    children.end_with(parent)
    request = json.loads(sys.stdin.readline())
    _leave_cores_of_parent()
    torch.set_num_threads(request["threads"])
    keep_freed_memory()
    rounds = plan(OperatorGraph.model_validate_json(json.dumps(request["graph"])), request["max_parts"])
    bench = Bench(request["device"])
    print("ready", flush=True)
    for cases in itertools.cycle(rounds):
        for part in parts(cases):
            bench.sweep([Run(case, bench, Samples(case)) for case in part])
            if os.getppid() != parent:
                return


def _leave_cores_of_parent() -> None:
    """Where the parent is pinned to some cores, work on the others."""
    if hasattr(os, "sched_setaffinity"):
        others = set(range(os.cpu_count() or 1)) - os.sched_getaffinity(0)
        with suppress(OSError):  # a container may forbid it; then all share
            os.sched_setaffinity(0, others or os.sched_getaffinity(0))


if __name__ == "__main__":
    _be_neighbour()
