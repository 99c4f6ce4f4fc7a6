"""Writing the task graph of a plan of templates down, compiled, and timing it by the event-driven simulation."""

from __future__ import annotations

from typing import Any

import numpy as np

from flexsearch.simulate.arrays import NOTHING, Program, Tasks, Work
from flexsearch.simulate.kernel import ONE, TWO, compiled, lean, run


@lean
def room(tasks: Tasks, devices: Any) -> bool:
    """Whether a block surely fits: a third of each column is left."""
    for k, size in enumerate(
        (
            tasks.duration.shape[0],
            tasks.dependency.shape[0],
            tasks.link.shape[0],
            tasks.drag.shape[0],
            tasks.node_task.shape[0],
        )
    ):
        if tasks.written[np.uint64(k)] * np.uint64(3) > np.uint64(size) * TWO:
            return False
    return True


@lean
def after_one(tasks: Tasks, task: Any) -> None:
    if task != NOTHING:
        tasks.dependency[tasks.written[1]] = task
        tasks.written[1] += ONE


@lean
def after(tasks: Tasks, head: Any) -> None:
    """The task to be written next depends on all tasks of a list."""
    node = head
    while node != NOTHING:
        tasks.dependency[tasks.written[1]] = tasks.node_task[np.uint64(node)]
        tasks.written[1] += ONE
        node = tasks.node_next[np.uint64(node)]


@lean
def write_link(tasks: Tasks, resource: Any, seconds: float) -> None:
    tasks.link[tasks.written[2]] = resource
    tasks.link_s[tasks.written[2]] = seconds
    tasks.written[2] += ONE


@lean
def write_drag(tasks: Tasks, resource: Any, seconds: float) -> None:
    tasks.drag[tasks.written[3]] = resource
    tasks.drag_s[tasks.written[3]] = seconds
    tasks.written[3] += ONE


@lean
def write_compute(program: Program, tasks: Tasks, d: Any, seconds: float) -> None:
    after_one(tasks, tasks.last[d])
    write_link(tasks, program.processor[d], seconds)
    tasks.last[d] = tasks.written[0]
    write_task(tasks, seconds, program.turn[d])


@lean
def write_task(tasks: Tasks, duration: float, turn: float) -> None:
    """End the task whose dependencies, links and drags have been written."""
    at = tasks.written[0]
    tasks.duration[at] = duration
    tasks.turn[at] = turn
    tasks.written[0] = at + ONE
    tasks.dependency_start[at + ONE] = tasks.written[1]
    tasks.link_start[at + ONE] = tasks.written[2]
    tasks.drag_start[at + ONE] = tasks.written[3]


@compiled
def time_written(tasks: Tasks, work: Work) -> float:
    """Makespan (s) of the task graph that was written; fills ``tasks.start`` and ``tasks.end``."""
    count, dependencies = np.uint64(tasks.written[0]), np.uint64(tasks.written[1])
    links, drags = np.uint64(tasks.written[2]), np.uint64(tasks.written[3])
    makespan: float = run(
        tasks.duration[:count], tasks.dependency_start[: count + ONE], tasks.dependency[:dependencies],
        tasks.link_start[: count + ONE], tasks.link[:links], tasks.link_s[:links], tasks.drag_start[: count + ONE],
        tasks.drag[:drags], tasks.drag_s[:drags], tasks.turn[:count], tasks.start[:count], tasks.end[:count],
        tasks.ready[:count], tasks.left[:count], work.free, tasks.waiting[:count],
        tasks.reader_start[: count + TWO], tasks.reader[:dependencies], tasks.heap[:count],
    )  # fmt: skip
    return makespan
