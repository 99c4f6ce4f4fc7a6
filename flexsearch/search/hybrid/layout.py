"""Layouts: the numbers by which people describe how a large model is trained."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from math import isqrt

from flexsearch.errors import StrategyError
from flexsearch.strategy import Sharding, States
from flexsearch.strategy.schedule import V_KINDS, check_schedule, placement
from flexsearch.strategy.stage import ScheduleKind


@dataclass(frozen=True)
class Layout:
    """``data`` blocks of devices, each with a share of the batch; in a block ``pipeline`` ranks of ``tensor`` devices.
    Each rank has ``chunks`` stages; a share passes in ``microbatches`` through them, in the order of ``schedule``.
    ``states``: which states of weights are kept in parts by the devices that would hold the same; by those among
    ``over`` consecutive devices, if that is not 0. ``widths``: rank r has so many times ``tensor`` devices, which share
    out the samples of each microbatch; empty: once, every rank. ``speed``: they do so by this row, counted from 1, of
    the devices' speeds (``strategy.shares``); 0: equally."""

    data: int
    tensor: int
    pipeline: int
    microbatches: int = 1
    schedule: ScheduleKind = "1f1b"
    chunks: int = 1
    states: States = States.WHOLE
    widths: tuple[int, ...] = ()
    speed: int = 0
    over: int = 0

    @property
    def stages(self) -> int:
        return self.pipeline * self.chunks

    @property
    def each(self) -> tuple[int, ...]:
        """``widths``, also of a layout whose ranks are alike."""
        return self.widths or (1,) * self.pipeline

    @property
    def alike(self) -> bool:
        """Whether all ranks have as many devices, which share out samples equally."""
        return len(set(self.widths)) < 2 and not self.speed

    @property
    def block(self) -> int:
        """Devices of a block."""
        return self.tensor * sum(self.each)

    @property
    def sharding(self) -> Sharding:
        """How weights are kept."""
        return Sharding(self.states, self.over)

    @property
    def divided(self) -> int:
        """Replicas that divide the states of a weight, where ranks are alike and states are in parts."""
        return self.over // self.block if self.over else self.data

    def shardings(self, host: int) -> Iterator[Layout]:
        """The same with states in parts: over all replicas; over those of a host of ``host`` devices (0: there is none
        to speak of), if there are several, but not all."""
        for states in States:
            if states:
                yield replace(self, states=states, over=0)
                if not self.widths and host % self.block == 0 and 1 < host // self.block < self.data:
                    yield replace(self, states=states, over=host)

    @property
    def devices(self) -> int:
        return self.data * self.block

    @property
    def factoring(self) -> tuple[int, int, tuple[int, ...]]:
        """Which devices work together, whatever the order."""
        return self.data, self.tensor, self.each

    def held(self) -> list[list[int]]:
        """The stages of each rank, as the schedule places them."""
        return placement(self.schedule, self.pipeline, self.chunks)

    def rank_of(self) -> tuple[int, ...]:
        """Rank of each stage."""
        return _rank_of(self.schedule, self.pipeline, self.chunks)

    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Devices of each stage in the first block."""
        ends = [self.tensor * end for end in accumulate(self.each, initial=0)]
        return tuple(tuple(range(ends[rank], ends[rank + 1])) for rank in self.rank_of())

    def wide(self, widths: tuple[int, ...]) -> Layout:
        """The same numbers with ranks of these widths."""
        alike = set(widths) == {1}
        return replace(
            self, pipeline=len(widths), widths=() if alike else widths, speed=0 if alike else self.speed,
            over=self.over if alike else 0,
        )  # fmt: skip


@cache
def _rank_of(schedule: ScheduleKind, pipeline: int, chunks: int) -> tuple[int, ...]:
    rank_of = {stage: rank for rank, stages in enumerate(placement(schedule, pipeline, chunks)) for stage in stages}
    return tuple(rank_of[stage] for stage in range(pipeline * chunks))


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


def orders(layout: Layout, depth: int) -> Iterator[Layout]:
    """The same ranks with every schedule and number of stages on each. ``depth``: most stages there can be."""
    yield layout
    if layout.pipeline == 1:
        return
    for schedule in ("gpipe", "1f1b", "zero-bubble"):
        yield replace(layout, schedule=schedule, chunks=1)
    for chunks in (2, 3, 4, 6, 8):
        if chunks * layout.pipeline <= depth:
            yield replace(layout, schedule="interleaved-1f1b", chunks=chunks)
    if 2 * layout.pipeline <= depth:
        yield replace(layout, schedule="breadth-first", chunks=2)
        for schedule in sorted(V_KINDS):
            yield replace(layout, schedule=schedule, chunks=2)


def runs(layout: Layout) -> bool:
    """Whether the schedule of a layout can run its microbatches, and is not the same as a plainer one."""
    if layout.pipeline == 1 or layout.microbatches == 1:
        return layout.chunks == 1 and layout.schedule == "1f1b"
    return _fits(layout.schedule, layout.pipeline, layout.chunks, layout.microbatches)


@cache
def _fits(schedule: ScheduleKind, pipeline: int, chunks: int, microbatches: int) -> bool:
    try:
        check_schedule(schedule, placement(schedule, pipeline, chunks), microbatches)
    except StrategyError:
        return False
    return True


def neighbours(layout: Layout, batch: int, depth: int, host: int) -> Iterator[Layout]:
    """Layouts that differ in one of their numbers, but for their devices. ``host``: see ``Layout.shardings``."""
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
    if layout.data > 1 or max(layout.each) > 1:
        plain = replace(layout, states=States.WHOLE, over=0)
        yield from (other for other in (plain, *layout.shardings(host)) if other != layout)
    yield from orders(layout, depth)


def divisors(count: int) -> list[int]:
    """All divisors, ascending."""
    low = [n for n in range(1, isqrt(count) + 1) if count % n == 0]
    return sorted({*low, *(count // n for n in low)})
