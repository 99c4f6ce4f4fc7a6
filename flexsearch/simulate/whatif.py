"""What would help: the same strategy simulated where something of the setting is different.

Other links, latencies, buckets and another batch are lowered anew, so routes, algorithms and recipes are those that
suit them. Faster devices and other synchronisation change the rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import log2
from typing import Final

import numpy as np
import numpy.typing as npt

from flexsearch.cost import Costs, Profile
from flexsearch.errors import NotationError, TopologyError
from flexsearch.graph.batch import with_batch
from flexsearch.lower import Lowered, Lowering
from flexsearch.lower.rows import SYNCHRONISE, UPDATE, Rows, blocks_run
from flexsearch.lower.share import share_of
from flexsearch.simulate.memory import memory
from flexsearch.simulate.simulation import makespan, rows_seconds
from flexsearch.topology import Topology
from flexsearch.topology.changes import edited, padded, with_links
from flexsearch.topology.parts import Communication

FACTOR: Final = 2
"""Links and devices are made so many times as fast, batches so many times as large."""
MANY_CLASSES: Final = 6
ALL_AT_ONCE: Final = 2**62
"""A bucket that holds every gradient, bytes."""


@dataclass(frozen=True, slots=True)
class LinkClass:
    """Links of the same sort: ``name`` with stars for numbers, the resources (directions)."""

    name: str
    resources: tuple[int, ...]


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


Ask = Callable[[], WhatIf]


def link_classes(topology: Topology) -> tuple[LinkClass, ...]:
    """Links grouped by name, where numbers do not count; where that leaves many, by bandwidth (powers of two)."""
    for key in (_pattern, _about):
        grouped: dict[str, list[int]] = {}
        for r, resource in enumerate(topology.resources):
            if resource.kind == "link":
                grouped.setdefault(key(resource.name, resource.bandwidth), []).append(r)
        if len(grouped) <= MANY_CLASSES:
            break
    return tuple(LinkClass(name, tuple(members)) for name, members in grouped.items())


def _pattern(name: str, bandwidth: float) -> str:
    ends = [re.sub(r"\d+", "*", end) for end in re.split(r"<?->", name)]
    return " - ".join(sorted(ends))


def _about(name: str, bandwidth: float) -> str:
    return f"about {2.0 ** round(log2(bandwidth)):.2g} B/s"


def what_ifs(lowered: Lowered, profile: Profile | None) -> list[Ask]:
    """Every change, simulated when it is called; the first is no change at all."""
    base = _ask("nothing", "as it is", partial(makespan, lowered))
    return [base, *_hardware(lowered, profile), *_synchronisation(lowered), partial(_batch, lowered, profile)]


def _ask(change: str, words: str, seconds: Callable[[], float]) -> Ask:
    return lambda: WhatIf(change, words, seconds())


def without_reading(lowered: Lowered) -> float:
    """Iteration time (s) if a batch were there without being read."""
    return _on(lowered, edited(lowered.lowering.network, storage=None), lowered.lowering.costs.profile)


# ---- hardware


def _hardware(lowered: Lowered, profile: Profile | None) -> Iterator[Ask]:
    topology = lowered.lowering.network
    classes = link_classes(topology)

    def edit(**fields: object) -> Callable[[], float]:
        return lambda: _on(lowered, edited(topology, **fields), profile)

    def faster(change: str, words: str, resources: Collection[int] | None) -> WhatIf:
        try:
            return WhatIf(change, words, _on(lowered, with_links(topology, FACTOR, resources), profile))
        except TopologyError as error:  # as fast as a link can be
            return WhatIf(change, words, None, remark=error.message)

    for links in classes:
        words = f"twice the bandwidth of {links.name}" if len(classes) > 1 else "twice the bandwidth"
        yield partial(faster, f"bandwidth x2: {links.name}", words, links.resources)
    if len(classes) > 1:
        yield partial(faster, "bandwidth x2", "twice the bandwidth of all links", None)
    near = tuple(link.model_copy(update={"latency_s": link.latency_s / FACTOR}) for link in topology.links)
    yield _ask("latency / 2", "half the link latency", edit(links=near))
    quick = _quicker(topology.communication)
    yield _ask("overhead / 2", "half the start-up time of messages", edit(communication=quick))
    rows = lowered.rows
    halved = _with(rows, step_ticks=_halved(rows.segments.step_ticks))
    yield _ask("compute x2", "computation twice as fast", partial(rows_seconds, halved))
    if rows.machine.hosted[0]:
        captured = _with(rows, step_host=np.zeros_like(rows.segments.step_host))
        yield _ask("launches", "no time for launches (a captured graph)", partial(rows_seconds, captured))
    if _pads(topology, profile):
        words = "matrix products padded to multiples of 8 (vocabularies, features)"
        yield _ask("padding", words, lambda: _on(lowered, padded(topology), profile))
    if topology.storage is not None:
        yield _ask("reading", "no time for reading (all batches in memory)", partial(without_reading, lowered))


def _on(lowered: Lowered, topology: Topology, profile: Profile | None) -> float:
    """Iteration time (s) of the same plan on another topology."""
    fold, graph, parts = lowered.lowering.fold, lowered.graph, None
    if fold is not None:
        share = share_of(fold.whole, topology, fold.replicas, lowered.stages.microbatches)
        graph, topology, parts = share.graph, share.topology, share.fold
    lowering = Lowering(graph, topology, Costs(graph, topology, profile), parts)
    return rows_seconds(lowering.rows(lowered.configs, lowered.options, lowered.stages))


def _pads(topology: Topology, profile: Profile | None) -> bool:
    """Whether padding can be told: products that a profile measured are as they are."""
    measured = profile is not None and (bool(profile.entries) or profile.figures is not None)
    return not measured and padded(topology) is not topology


def _quicker(communication: Communication) -> Communication:
    """Half of all times that software takes to start a message or a collective."""
    groups = []
    for group in communication.groups:
        quicker = [one.model_copy(update={"startup_s": one.startup_s / FACTOR}) for one in group.protocols]
        starts = {name: getattr(group, name) / FACTOR for name in ("startup_s", "least_s")}
        groups.append(group.model_copy(update={**starts, "protocols": tuple(quicker)}))
    halved = {name: getattr(communication, name) / FACTOR for name in ("overhead_s", "message_s")}
    return communication.model_copy(update={**halved, "groups": tuple(groups)})


def _halved(ticks: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Half of each, at least one tick; 0 where there is nothing."""
    return np.maximum(np.minimum(ticks, 1), ticks // FACTOR)


def _with(rows: Rows, **columns: npt.NDArray[np.generic]) -> Rows:
    """Rows with other columns of their segments."""
    return replace(rows, segments=rows.segments._replace(**columns))  # type: ignore[arg-type]


# ---- synchronisation


def _synchronisation(lowered: Lowered) -> Iterator[Ask]:
    options, rows = lowered.options, lowered.rows
    for name, words, changed in (
        ("gradients at no cost", "gradient synchronisation for free (a limit)", _without_synchronisation),
        ("no overlap", "gradients synchronised after the backward pass", _after_backward),
    ):
        yield _ask(name, words, partial(rows_seconds, changed(rows)))

    def bucketed(nbytes: int) -> float:
        other = options.model_copy(update={"bucket_bytes": nbytes})
        return rows_seconds(lowered.lowering.rows(lowered.configs, other, lowered.stages))

    for name, nbytes in (
        ("buckets x4", 4 * options.bucket_bytes),
        ("buckets / 4", max(1, options.bucket_bytes // 4)),
        ("one bucket", ALL_AT_ONCE),
    ):
        size = f"{nbytes / 2**20:.3g} MiB"
        words = f"gradient buckets of {size}" if nbytes < ALL_AT_ONCE else "all gradients in one bucket"
        yield _ask(name, words, partial(bucketed, nbytes))


def _without_synchronisation(rows: Rows) -> Rows:
    """Rows whose synchronisation takes no time and no resource."""
    segments = rows.segments
    columns = {name: getattr(segments, name).copy() for name in ("communication_ticks", "link_ticks", "drag_ticks")}
    for s in rows.segment[rows.schedule.kind == SYNCHRONISE].tolist():
        for c in range(segments.communication_first[s], segments.communication_last[s]):
            columns["communication_ticks"][c] = 0
            columns["link_ticks"][segments.link_first[c] : segments.link_last[c]] = 0
            columns["drag_ticks"][segments.drag_first[c] : segments.drag_last[c]] = 0
    return _with(rows, **columns)


def _after_backward(rows: Rows) -> Rows:
    """Rows whose synchronisation is issued only when a device has ended its backward pass."""
    schedule = rows.schedule
    first, last, actions = [], list[int](), list[tuple[int, int]]()
    for group_first, group_last in zip(schedule.action_first, schedule.action_last, strict=True):
        of_group = range(group_first, group_last)
        every = [(b, int(schedule.microbatch[a])) for a in of_group for b in blocks_run(schedule, a).tolist()]
        first.append(len(actions))
        actions += [row for row in every if schedule.kind[row[0]] not in (SYNCHRONISE, UPDATE)]
        actions += sorted(row for row in every if schedule.kind[row[0]] == SYNCHRONISE)
        actions += [row for row in every if schedule.kind[row[0]] == UPDATE]
        last.append(len(actions))
    block, microbatch = (np.array([row[k] for row in actions], np.uint32) for k in (0, 1))
    return replace(rows, schedule=schedule._replace(
        action_first=np.array(first, np.uint32), action_last=np.array(last, np.uint32), block_first=block,
        block_last=block + np.uint32(1), microbatch=microbatch,
    ))  # fmt: skip


# ---- the batch


def _batch(lowered: Lowered, profile: Profile | None) -> WhatIf:
    """Twice the batch (in twice as many microbatches, if there are several); its time is halved, so that it is that of
    the same number of samples."""
    batch, stages, lowering = lowered.batch, lowered.stages, lowered.lowering
    change, words = "batch x2", f"twice the batch ({FACTOR * batch}), time per {batch}"
    if stages.microbatches > 1 or lowering.fold is not None:
        stages = replace(stages, microbatches=FACTOR * stages.microbatches)
        words = f"twice the batch ({FACTOR * batch}) in {stages.microbatches} microbatches, time per {batch}"
    else:
        try:
            graph = with_batch(lowered.graph, FACTOR)
        except NotationError as error:
            return WhatIf(change, words, None, remark=str(error))
        lowering = Lowering(graph, lowered.topology, Costs(graph, lowered.topology, profile))
    larger = lowering.lower(lowered.configs, lowered.options, stages)
    use = memory(larger)
    missing = max(0, *(m.peak - d.usable_bytes for m, d in zip(use, lowered.topology.devices, strict=True)))
    remark = "pieces that the profile lacks are estimated" if profile is not None else ""
    return WhatIf(change, words, makespan(larger) / FACTOR, missing, remark)
