"""Layouts: the numbers by which people describe how a large model is trained."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from flexsearch.strategy.schedule import V_KINDS, placement
from flexsearch.strategy.stage import ScheduleKind


@dataclass(frozen=True)
class Layout:
    """``data`` x ``pipeline`` x ``tensor`` devices: so many shares of the batch, groups of devices for each, and
    devices of a group. Each group has ``chunks`` stages; a share passes in ``microbatches`` through them, in the
    order of ``schedule``. ``sharded``: weights are sharded over the shares (ZeRO-3)."""

    data: int
    tensor: int
    pipeline: int
    microbatches: int = 1
    schedule: ScheduleKind = "1f1b"
    chunks: int = 1
    sharded: bool = False

    @property
    def stages(self) -> int:
        return self.pipeline * self.chunks

    @property
    def devices(self) -> int:
        return self.data * self.tensor * self.pipeline

    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Devices of each stage in the first block, as the schedule places stages."""
        held = placement(self.schedule, self.pipeline, self.chunks)
        rank_of = {stage: rank for rank, stages in enumerate(held) for stage in stages}
        ranks = [rank_of[stage] for stage in range(self.stages)]
        return tuple(tuple(range(rank * self.tensor, (rank + 1) * self.tensor)) for rank in ranks)


def factorings(devices: int, host: int, batch: int, depth: int) -> Iterator[Layout]:
    """All data x tensor x pipeline layouts of so many devices: groups inside a host of ``host`` devices, at most
    ``depth`` stages, shares that divide the batch. One microbatch."""
    for tensor in divisors(devices):
        if tensor > host or host % tensor:
            continue
        for pipeline in divisors(devices // tensor):
            data = devices // tensor // pipeline
            if pipeline <= depth and batch % data == 0:
                yield Layout(data, tensor, pipeline)


def neighbours(layout: Layout, batch: int, depth: int) -> Iterator[Layout]:
    """Layouts that differ in one of their numbers."""
    share = batch // layout.data
    sizes = divisors(share)
    at = sizes.index(layout.microbatches)
    for near in (at - 1, at + 1):
        if 0 <= near < len(sizes):
            yield replace(layout, microbatches=sizes[near])
    for factor in (2, 4):
        if share % (layout.microbatches * factor) == 0:
            yield replace(layout, microbatches=layout.microbatches * factor)
        if layout.microbatches % factor == 0:
            yield replace(layout, microbatches=layout.microbatches // factor)
    if layout.data > 1:
        yield replace(layout, sharded=not layout.sharded)
    if layout.pipeline > 1:
        yield from _orders(layout, depth)


def _orders(layout: Layout, depth: int) -> Iterator[Layout]:
    """The same stages in other orders, and other numbers of stages a group."""
    for schedule in ("gpipe", "1f1b", "zero-bubble"):
        yield replace(layout, schedule=schedule, chunks=1)
    for chunks in (2, 3, 4, 6, 8):
        if chunks * layout.pipeline <= depth:
            yield replace(layout, schedule="interleaved-1f1b", chunks=chunks)
    if 2 * layout.pipeline <= depth:
        yield replace(layout, schedule="breadth-first", chunks=2)
        for schedule in sorted(V_KINDS):
            yield replace(layout, schedule=schedule, chunks=2)


def divisors(count: int) -> list[int]:
    """All divisors, ascending."""
    low = [n for n in range(1, int(count**0.5) + 1) if count % n == 0]
    return sorted({*low, *(count // n for n in low)})
