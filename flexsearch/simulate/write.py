"""Writing the task graph of a plan of templates down, compiled, and timing it by the event-driven simulation."""

from __future__ import annotations

from typing import Any

import numpy as np

from flexsearch.compiled import F64, ONE, THREE, TWO, U32, U64, compiled, lean
from flexsearch.lower.arrays import NOTHING, Pools, Program, Tasks, Work
from flexsearch.simulate.kernel import run


@lean
def start(tasks: Tasks) -> None:
    """Nothing is written yet."""
    tasks.written[:] = 0
    tasks.open[:] = 0
    tasks.last[:] = NOTHING
    tasks.synced[:] = NOTHING


@lean
def fits(tasks: Tasks) -> Any:
    """Whether there was room for all that was written. What finds no room is counted, not written."""
    return (
        tasks.written[0] <= np.uint64(tasks.duration.shape[0])
        and tasks.written[1] <= np.uint64(tasks.dependency.shape[0])
        and tasks.written[2] <= np.uint64(tasks.link.shape[0])
        and tasks.written[3] <= np.uint64(tasks.drag.shape[0])
        and tasks.written[4] <= np.uint64(tasks.node_task.shape[0])
    )


@lean
def after_one(tasks: Tasks, task: Any) -> None:
    """The task to be written next depends on ``task``."""
    if task != NOTHING:
        at = np.uint64(tasks.written[1])
        if at < np.uint64(tasks.dependency.shape[0]):
            tasks.dependency[at] = task
        tasks.written[1] = at + ONE


@lean
def after(tasks: Tasks, head: Any) -> None:
    """The task to be written next depends on all tasks of a list."""
    node, at = head, np.uint64(tasks.written[1])
    room = np.uint64(tasks.dependency.shape[0])
    while node != NOTHING:
        if at < room:
            tasks.dependency[at] = tasks.node_task[np.uint64(node)]
        at += ONE
        node = tasks.node_next[np.uint64(node)]
    tasks.written[1] = at


@lean
def note(tasks: Tasks, heads: U32, device: Any) -> None:
    """Add the task that was written last to the list of a device."""
    node = np.uint64(tasks.written[4])
    if node < np.uint64(tasks.node_task.shape[0]):
        tasks.node_task[node] = tasks.written[0] - ONE
        tasks.node_next[node] = heads[device]
        heads[device] = node
    tasks.written[4] = node + ONE


@lean
def _write_pair(written: U64, which: Any, resources: U32, seconds: F64, resource: Any, value: float) -> None:
    """One more row of two columns, whose rows are counted at place ``which``."""
    at = np.uint64(written[which])
    if at < np.uint64(resources.shape[0]):
        resources[at] = resource
        seconds[at] = value
    written[which] = at + ONE


@lean
def note_all(pools: Pools, tasks: Tasks, x: Any, heads: U32) -> None:
    """Add the task that was written last, exchange ``x``, to the lists of its receivers."""
    for k in range(np.uint64(pools.receive_first[x]), np.uint64(pools.receive_last[x])):
        note(tasks, heads, np.uint64(pools.receive[k]))


@lean
def write_link(tasks: Tasks, resource: Any, seconds: float) -> None:
    """The task to be written next keeps a resource busy."""
    _write_pair(tasks.written, TWO, tasks.link, tasks.link_s, resource, seconds)


@lean
def write_links(tasks: Tasks, link: U32, link_s: F64, first: Any, last: Any) -> None:
    """As ``write_link`` for rows ``[first, last)`` of two columns."""
    at = np.uint64(tasks.written[2])
    tasks.written[2] = at + last - first
    if tasks.written[2] <= np.uint64(tasks.link.shape[0]):
        for k in range(first, last):
            tasks.link[at] = link[k]
            tasks.link_s[at] = link_s[k]
            at += ONE


@lean
def write_drag(tasks: Tasks, resource: Any, seconds: float) -> None:
    """The task to be written next takes computing time from a processor."""
    _write_pair(tasks.written, THREE, tasks.drag, tasks.drag_s, resource, seconds)


@lean
def after_device(tasks: Tasks, d: Any) -> None:
    """The task to be written next depends on what device ``d`` has computed so far."""
    after_one(tasks, tasks.last[d])
    tasks.open[d] = 0


@lean
def goes_on(tasks: Tasks, d: Any) -> Any:
    """Whether what device ``d`` computes next, without waiting, can belong to its last task: if nothing depends on that
    task alone."""
    return tasks.open[d] == 1 and tasks.merged[0] == 1


@lean
def go_on(tasks: Tasks, d: Any, seconds: float) -> None:
    """The last task of device ``d`` lasts longer. Durations are whole ticks: their sum has the bits of adding them one
    after the other."""
    task = np.uint64(tasks.last[d])
    if task < np.uint64(tasks.duration.shape[0]):
        tasks.duration[task] += seconds
        tasks.link_s[np.uint64(tasks.link_start[task])] += seconds


@lean
def write_compute(program: Program, tasks: Tasks, d: Any, seconds: float) -> None:
    """A task of device ``d``, whose dependencies on other tasks have been written."""
    after_one(tasks, tasks.last[d])
    write_link(tasks, program.processor[d], seconds)
    tasks.last[d] = tasks.written[0]
    tasks.open[d] = 1
    write_task(tasks, seconds, program.turn[d])


@lean
def write_reshard(pools: Pools, tasks: Tasks, template: Any, row: Any) -> None:
    """All phases of a reshard, delivering to ``row``."""
    tasks.head[row, :] = NOTHING
    middle, last = np.uint64(pools.reshard_middle[template]), np.uint64(pools.reshard_last[template])
    if middle < last:
        tasks.middle[:] = NOTHING
    for x in range(np.uint64(pools.reshard_first[template]), last):
        write_exchange(pools, tasks, x, tasks.middle, x >= middle)
        note_all(pools, tasks, x, tasks.head[row])
        if x < middle < last:
            note_all(pools, tasks, x, tasks.middle)


@lean
def write_exchange(pools: Pools, tasks: Tasks, x: Any, heads: U32, second: Any) -> None:
    """One communication task; ``heads``: what the first phase delivered, which the ``second`` waits for."""
    for k in range(np.uint64(pools.send_first[x]), np.uint64(pools.send_last[x])):
        d = np.uint64(pools.send[k])
        after_device(tasks, d)
        if second:
            after(tasks, heads[d])
    write_links(tasks, pools.link, pools.link_s, np.uint64(pools.link_first[x]), np.uint64(pools.link_last[x]))
    for k in range(np.uint64(pools.drag_first[x]), np.uint64(pools.drag_last[x])):
        write_drag(tasks, pools.drag[k], pools.drag_s[k])
    write_task(tasks, pools.duration[x], np.inf)


@lean
def write_task(tasks: Tasks, duration: float, turn: float) -> None:
    """End the task whose dependencies, links and drags have been written."""
    at = np.uint64(tasks.written[0])
    if at < np.uint64(tasks.duration.shape[0]):
        tasks.duration[at] = duration
        tasks.turn[at] = turn
        tasks.dependency_start[at + ONE] = tasks.written[1]
        tasks.link_start[at + ONE] = tasks.written[2]
        tasks.drag_start[at + ONE] = tasks.written[3]
    tasks.written[0] = at + ONE


@compiled
def time_written(tasks: Tasks, work: Work, limit: float) -> float:
    """Makespan (s) of the task graph that was written, or infinity if it is certainly above ``limit``; fills
    ``tasks.start`` and ``tasks.end``."""
    count, dependencies = np.uint64(tasks.written[0]), np.uint64(tasks.written[1])
    links, drags = np.uint64(tasks.written[2]), np.uint64(tasks.written[3])
    makespan: float = run(
        tasks.duration[:count], tasks.dependency_start[: count + ONE], tasks.dependency[:dependencies],
        tasks.link_start[: count + ONE], tasks.link[:links], tasks.link_s[:links], tasks.drag_start[: count + ONE],
        tasks.drag[:drags], tasks.drag_s[:drags], tasks.turn[:count], tasks.start[:count], tasks.end[:count],
        tasks.ready[:count], tasks.left[:count], work.free, tasks.waiting[:count],
        tasks.reader_start[: count + TWO], tasks.reader[:dependencies], tasks.heap[:count], work.seen, limit,
    )  # fmt: skip
    return makespan
