"""What would help: the same strategy simulated where something of the setting is different.

Faster links, latencies and devices change how long the same messages and pieces take; routes and the algorithms of the
communications stay as they are, so a cluster that really had those links could do a little better still. Other buckets
and another batch are lowered anew.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import log2
from typing import Final

import numpy as np
import numpy.typing as npt

from flexsearch.cost import Costs, Profile
from flexsearch.errors import NotationError
from flexsearch.graph.batch import with_batch
from flexsearch.lower import Lowered, Lowering, TaskArrays, TaskGraph, TaskKind
from flexsearch.simulate.breakdown import kind_of
from flexsearch.simulate.kernel import times
from flexsearch.simulate.memory import memory
from flexsearch.topology import Topology

FACTOR: Final = 2
"""Links and devices are made so many times as fast, batches so many times as large."""
MANY_CLASSES: Final = 6
ALL_AT_ONCE: Final = 2**62
"""A bucket that holds every gradient, bytes."""


@dataclass(frozen=True, slots=True)
class LinkClass:
    """Links of the same sort: ``name`` with stars for numbers, the resources (directions), their bandwidths in B/s."""

    name: str
    resources: tuple[int, ...]
    slowest: float
    fastest: float


@dataclass(frozen=True, slots=True)
class WhatIf:
    """``change``: what is different, a name for programs; ``words``: for people. ``seconds``: iteration time, for the
    batch that the strategy is for (of a larger batch: the share of it). ``shortfall``: bytes missing on the worst
    device, where memory changes. ``remark``: why there is no time (``seconds`` None), or what to know about it."""

    change: str
    words: str
    seconds: float | None
    shortfall: int = 0
    remark: str = ""


def link_classes(topology: Topology) -> tuple[LinkClass, ...]:
    """Links grouped by name, where numbers do not count; where that leaves many, by bandwidth (powers of two)."""
    for key in (_pattern, _about):
        found: dict[str, list[int]] = {}
        for r, resource in enumerate(topology.resources):
            if resource.kind == "link":
                found.setdefault(key(resource.name, resource.bandwidth), []).append(r)
        if len(found) <= MANY_CLASSES:
            break
    classes = []
    for name, members in found.items():
        speeds = [topology.resources[r].bandwidth for r in members]
        classes.append(LinkClass(name, tuple(members), min(speeds), max(speeds)))
    return tuple(classes)


def _pattern(name: str, bandwidth: float) -> str:
    ends = [re.sub(r"\d+", "*", end) for end in re.split(r"<?->", name)]
    return " - ".join(sorted(ends))


def _about(name: str, bandwidth: float) -> str:
    return f"about {2.0 ** round(log2(bandwidth)):.2g} B/s"


def what_ifs(lowered: Lowered, lowering: Lowering, profile: Profile | None) -> Iterator[WhatIf]:
    """Every change in turn; the first is no change at all. ``lowering`` made ``lowered``."""
    arrays = lowered.tasks.arrays()
    yield WhatIf("nothing", "as it is", times(arrays)[0])
    yield from _hardware(lowered, arrays)
    yield from _synchronisation(lowered, lowering, arrays)
    yield _batch(lowered, profile)


def count(topology: Topology) -> int:
    """How many :func:`what_ifs` there are."""
    classes = len(link_classes(topology))
    return 1 + classes + (classes > 1) + 3 + 5 + 1


def _hardware(lowered: Lowered, arrays: TaskArrays) -> Iterator[WhatIf]:
    topology = lowered.topology
    classes = link_classes(topology)
    for links in classes:
        rates = np.ones(len(topology.resources))
        rates[list(links.resources)] = FACTOR
        words = f"twice the bandwidth of {links.name}" if len(classes) > 1 else "twice the bandwidth"
        yield WhatIf(f"bandwidth x2: {links.name}", words, _retimed(lowered, arrays, rates))
    if len(classes) > 1:
        everywhere = np.full(len(topology.resources), float(FACTOR))
        yield WhatIf("bandwidth x2", "twice the bandwidth of all links", _retimed(lowered, arrays, everywhere))
    same = np.ones(len(topology.resources))
    yield WhatIf("latency / 2", "half the link latency", _retimed(lowered, arrays, same, latency=0.5))
    yield WhatIf("overhead / 2", "half the start-up time of messages", _retimed(lowered, arrays, same, overhead=0.5))
    yield WhatIf("compute x2", "computation twice as fast", _retimed(lowered, arrays, same, compute=0.5))


def _retimed(
    lowered: Lowered, arrays: TaskArrays, rates: npt.NDArray[np.float64], latency: float = 1.0, overhead: float = 1.0,
    compute: float = 1.0,
) -> float:  # fmt: skip
    """Iteration time (s) with the links ``rates`` times as fast (by resource), and latencies, software overheads of a
    communication and computations these shares of what they are."""
    communicates = np.array(lowered.tasks.kind) == TaskKind.COMMUNICATION
    task_of = _tasks_of(arrays.link_start)
    moves = communicates[task_of]
    link_s = np.where(moves, arrays.link_s / rates[arrays.link], arrays.link_s * compute)
    busiest, faster = np.zeros(len(communicates)), np.zeros(len(communicates))
    np.maximum.at(busiest, task_of, arrays.link_s)
    np.maximum.at(faster, task_of, link_s)
    start_s = lowered.topology.communication.overhead_s
    travel = np.maximum(0.0, arrays.duration - busiest - start_s)
    moving = overhead * start_s + latency * travel + faster
    duration = np.where(communicates, moving, arrays.duration * compute)
    return times(replace(arrays, duration=duration, link_s=link_s))[0]


def _tasks_of(starts: npt.NDArray[np.uint32]) -> npt.NDArray[np.int64]:
    """The task of every entry of compressed rows that start so."""
    sizes = starts[1:].astype(np.int64) - starts[:-1].astype(np.int64)
    return np.repeat(np.arange(len(sizes)), sizes)


def _synchronisation(lowered: Lowered, lowering: Lowering, arrays: TaskArrays) -> Iterator[WhatIf]:
    tasks, options = lowered.tasks, lowered.options
    sync = np.array([kind_of(tasks, t) == "synchronise" for t in range(len(tasks))], dtype=bool)
    yield WhatIf("gradients at no cost", "gradient synchronisation for free (a limit)", _without(arrays, sync))
    yield WhatIf("no overlap", "gradients synchronised after the backward pass", _after_backward(tasks, sync))
    for name, nbytes in (
        ("buckets x4", 4 * options.bucket_bytes),
        ("buckets / 4", max(1, options.bucket_bytes // 4)),
        ("one bucket", ALL_AT_ONCE),
    ):
        size = f"{nbytes / 2**20:.3g} MiB"
        words = f"gradient buckets of {size}" if nbytes < ALL_AT_ONCE else "all gradients in one bucket"
        other = options.model_copy(update={"bucket_bytes": nbytes})
        if lowering.buckets(nbytes) == lowering.buckets(options.bucket_bytes):
            seconds = times(arrays)[0]
        else:
            seconds = times(lowering.lower(lowered.configs, other).tasks.arrays())[0]
        yield WhatIf(name, words, seconds)


def _without(arrays: TaskArrays, tasks: npt.NDArray[np.bool_]) -> float:
    """Iteration time (s) if some tasks took no time and no resource."""
    link, drag = tasks[_tasks_of(arrays.link_start)], tasks[_tasks_of(arrays.drag_start)]
    duration, link_s = np.where(tasks, 0.0, arrays.duration), np.where(link, 0.0, arrays.link_s)
    return times(replace(arrays, duration=duration, link_s=link_s, drag_s=np.where(drag, 0.0, arrays.drag_s)))[0]


def _after_backward(tasks: TaskGraph, sync: npt.NDArray[np.bool_]) -> float:
    """Iteration time (s) if gradients were synchronised only when their senders have ended the backward pass."""
    last = {d: t for t, (kind, d) in enumerate(zip(tasks.kind, tasks.device, strict=True)) if kind == TaskKind.BACKWARD}
    late = replace(tasks)
    late.dependencies = [
        sorted({*row, *(last[d] for d in what.senders if d in last)}) if sync[t] and what is not None else row
        for t, (row, what) in enumerate(zip(tasks.dependencies, tasks.communication, strict=True))
    ]
    return times(late.arrays())[0]


def _batch(lowered: Lowered, profile: Profile | None) -> WhatIf:
    """Twice the batch; its time is halved, so that it is that of the same number of samples."""
    change, words = "batch x2", f"twice the batch ({FACTOR * lowered.graph.batch}), time per {lowered.graph.batch}"
    try:
        graph = with_batch(lowered.graph, FACTOR)
    except NotationError as error:
        return WhatIf(change, words, None, remark=str(error))
    larger = Lowering(graph, lowered.topology, Costs(graph, lowered.topology, profile)).lower(
        lowered.configs, lowered.options
    )
    use = memory(larger)
    missing = max(0, *(m.peak - d.memory_bytes for m, d in zip(use, lowered.topology.devices, strict=True)))
    remark = "pieces that the profile lacks are estimated" if profile is not None else ""
    return WhatIf(change, words, times(larger.tasks.arrays())[0] / FACTOR, missing, remark)
