"""Peak memory of every device, and what it is made of: the account of ``lifetimes``, for reports."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from flexsearch.cost.ticks import TICK
from flexsearch.direct import direct
from flexsearch.lower import Lowered
from flexsearch.lower.arrays import State
from flexsearch.lower.rows import Rows
from flexsearch.lower.taskgraph import Row
from flexsearch.simulate.account import BLOCK_CELLS, Account, enter, which_cells
from flexsearch.simulate.engine import Times
from flexsearch.simulate.lifetimes import list_spans
from flexsearch.simulate.recipe_memory import Kept, recipe_spans
from flexsearch.simulate.spans import CAST, OPTIMIZER, Sources
from flexsearch.simulate.units import make_account
from flexsearch.simulate.usage import computations

_list_spans = direct(list_spans)
_enter = direct(enter)

Part = Literal["weights", "gathered", "gradients", "optimizer", "activations", "buffers"]
PARTS: Final[tuple[Part, ...]] = ("weights", "gathered", "gradients", "optimizer", "activations", "buffers")
"""In the order of their numbers in ``spans``."""


@dataclass(frozen=True)
class Memory:
    """Bytes in use on a device at the moment of its peak, by what they hold.

    ``weights``: stored; buffers and constants of the model. ``gathered``: copies of sharded weights. ``gradients``: of
    weights, as the pieces make them and as they are stored. ``optimizer``: its state, and that of recipes by which
    weights synchronise. ``activations``: inputs, outputs,
    their copies in other layouts, and their gradients. ``buffers``: what is received and used elsewhere, and layouts in
    between. Not counted: workspace inside a kernel, fragmentation, the libraries themselves.
    """

    weights: int = 0
    gathered: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    buffers: int = 0

    @property
    def peak(self) -> int:
        """The peak, bytes."""
        return sum(getattr(self, part) for part in PARTS)


def memory(lowered: Lowered) -> tuple[Memory, ...]:
    """Peak memory by device index of the topology."""
    return memory_of(*_account(lowered), tuple(recipe_spans(lowered)))


def memory_of(account: Account, sources: Sources, state: State, more: Sequence[Kept] = ()) -> tuple[Memory, ...]:
    """Peak memory of a plan by device, with an account of no plan. Of devices that hold the same, one after the other,
    the first is worked out. ``more``: what recipes hold."""
    devices, account = range(len(account.schedule.group)), _with_spans(account, sources, state, more)
    with _held(account):
        top = _of_different(account, lambda d: int(_curve(account, d).argmax()))
    columns = []
    for part in range(len(PARTS)):
        with _held(account, part):
            columns.append(_of_different(account, lambda d: int(_changes(account, d)[: top[d] + 1].sum()), top))
    return tuple(Memory(*(column[d] for column in columns)) for d in devices)


def standing_of(account: Account, sources: Sources, state: State) -> list[int]:
    """By device, the least bytes of activations at any moment of a step: the batch, which no microbatch lets go of."""
    account = _with_spans(account, sources, state, ())
    with _held(account, PARTS.index("activations")):
        curves = [_curve(account, d)[1:-1] for d in range(len(account.schedule.group))]  # nothing before and behind
        return [int(curve.min()) if len(curve) else 0 for curve in curves]


def _of_different(account: Account, value: Callable[[int], int], also: Sequence[int] | None = None) -> list[int]:
    """By device, a value that follows from its cells, the order of its actions, and what it has in ``also``."""
    by_device: list[int] = []
    group, cells = account.schedule.group, account.cells
    for d in range(len(group)):
        same = d and group[d] == group[d - 1] and (also is None or also[d] == also[d - 1])
        by_device.append(by_device[-1] if same and np.array_equal(cells[:, d], cells[:, d - 1]) else value(d))
    return by_device


@dataclass(frozen=True)
class Curve:
    """What a device holds as a step goes on. ``times``: s, ascending, (n,); ``use``: bytes from each of them on, by
    part (``PARTS``), (parts, n). Of what changes at the same time every state is there, in the order of its rows."""

    times: npt.NDArray[np.floating[Any]]
    use: npt.NDArray[np.int64]

    @property
    def peak(self) -> Memory:
        """At the moment of the peak."""
        return Memory(*self.use[:, int(self.use.sum(axis=0).argmax())].tolist())

    def thinned(self, most: int) -> Curve:
        """At most about so many states: of those near each other in time, the one that holds most."""
        if len(self.times) <= most:
            return self
        span = float(self.times[-1]) or 1.0
        part = np.minimum((self.times / span * most).astype(np.int64), most - 1)
        order = np.lexsort((-np.arange(len(part)), self.use.sum(axis=0), part))
        last = np.flatnonzero(np.diff(part[order], append=most))
        kept = np.sort(order[last])
        return Curve(self.times[kept], self.use[:, kept])


class Use(NamedTuple):
    """What a device holds as a step goes on, bytes, without the state of the optimizer. ``after``: each of its cells
    (``account``); ``place``: by microbatch and block, the number of the first of the block's cells; ``peak``."""

    after: npt.NDArray[np.int64]
    place: Mapping[tuple[int, int], int]
    peak: int

    def brought(self, row: Row) -> int:
        """The number of the first cell that has what a communication brings: that with which its block begins to
        communicate, or where the device does not run that, the first one of the next block that it runs."""
        own = self.place.get((row.microbatch, row.block))
        if own is not None:
            return own + BLOCK_CELLS - 2
        later = (place for (m, block), place in self.place.items() if m == row.microbatch and block > row.block)
        return min(later, default=len(self.after))


def use_of(lowered: Lowered, device: int) -> Use:
    """What a device holds, in the order of its program; with no times."""
    account, sources, state = _account(lowered)
    account = _with_spans(account, sources, state, tuple(recipe_spans(lowered)))
    spans, schedule = account.spans, account.schedule
    nbytes = np.where((spans.part == OPTIMIZER) | (spans.device != device), 0, spans.nbytes)
    account = account._replace(spans=spans._replace(nbytes=nbytes))
    with _held(account):
        after = _curve(account, device)
    place, group = dict[tuple[int, int], int](), schedule.group[device]
    for a in range(schedule.action_first[group], schedule.action_last[group]):
        for block in range(schedule.block_first[a], schedule.block_last[a]):
            place[int(schedule.microbatch[a]), block] = 1 + BLOCK_CELLS * len(place)
    return Use(after, place, int(after.max()))


def memory_curves(lowered: Lowered, times: Times) -> tuple[Curve, ...]:
    """What each device holds over time, by device index of the topology; ``times``: of the rows of ``lowered``."""
    account, sources, state = _account(lowered)
    clocks = _clocks(lowered.rows, times, account)
    return tuple(
        # With its last moment a step ends, and with it all spans.
        Curve(clock[: max(1, len(clock) - 1)] * TICK, use[:, : max(1, len(clock) - 1)])
        for clock, use in zip(clocks, _uses(account, sources, state, tuple(recipe_spans(lowered))), strict=True)
    )


def _uses(
    account: Account, sources: Sources, state: State, more: Sequence[Kept]
) -> list[npt.NDArray[np.int64]]:  # fmt: skip
    """By device: bytes by part, after each of its cells."""
    curves, account = [], _with_spans(account, sources, state, more)
    for part in range(len(PARTS)):
        with _held(account, part):
            curves.append([_curve(account, d) for d in range(len(account.schedule.group))])
    return [np.stack(of_device) for of_device in zip(*curves, strict=True)]


@contextmanager
def _held(account: Account, part: int | None = None) -> Iterator[None]:
    """The spans at hand, or one part of them, entered into the cells of an account of no plan, and taken out again:
    that touches less memory than clearing all cells."""
    spans = account.spans
    if part is not None:
        account = account._replace(spans=spans._replace(nbytes=np.where(spans.part % CAST == part, spans.nbytes, 0)))
    _enter(account, 1)
    yield
    _enter(account, -1)


def _clocks(rows: Rows, times: Times, account: Account) -> Iterator[npt.NDArray[np.int64]]:
    """By device: ticks of each of its cells, as ``_curve`` has them. What a block holds begins when it computes, and
    communicates when it has; where it computes nothing on a device, when what the device runs before has."""
    devices, blocks = len(rows.schedule.group), len(rows.schedule.kind)
    first, last = np.full((2, devices, blocks), -1)
    for device, block, place, _ in computations(rows, times):
        last[device, block] = place
        if first[device, block] < 0:
            first[device, block] = place
    schedule, begun, ended = account.schedule, times.computation_start, times.computation_end
    for d, group in enumerate(schedule.group):
        row = [np.zeros(1, np.int64)]
        for a in range(schedule.action_first[group], schedule.action_last[group]):
            of, m = slice(int(schedule.block_first[a]), int(schedule.block_last[a])), int(schedule.microbatch[a])
            own = np.where(schedule.once[of] == 1, 0, m)
            computes = first[d, of] >= 0
            start = np.where(computes, begun[own, first[d, of]], 0)
            end = np.where(computes, ended[own, last[d, of]], 0)
            row.append(np.stack([start, start, start, end, end], axis=1).ravel())
        yield np.maximum.accumulate(np.concatenate(row))


def _account(lowered: Lowered) -> tuple[Account, Sources, State]:
    """An account of no plan, what it is worked out from, and the plan."""
    rows = lowered.lowering.plan_rows(lowered.configs, lowered.options, lowered.stages)
    return *make_account(rows), rows.state


def _with_spans(account: Account, sources: Sources, state: State, more: Sequence[Kept]) -> Account:
    """The account with the spans of all units at hand, then what recipes hold (``more``)."""
    spans = account.spans
    own: tuple[npt.NDArray[Any], ...] = (spans.device, spans.first, spans.last, spans.nbytes, spans.part)
    columns: list[list[npt.NDArray[Any]]] = [[] for _ in own]
    for unit in range(len(sources.units.root)):
        _list_spans(sources, state, np.uint64(unit), spans)
        for column, rows in zip(columns, own, strict=True):
            column.append(rows[: int(spans.size[0])].copy())
    for k, (column, rows) in enumerate(zip(columns, own, strict=True)):
        column.append(np.array([row[k] for row in more], rows.dtype))
    device, first, last, nbytes, part = map(np.concatenate, columns)
    size = np.array([len(device)], np.uint64)
    return account._replace(
        spans=spans._replace(device=device, first=first, last=last, nbytes=nbytes, part=part, size=size)
    )


def _curve(account: Account, device: int) -> npt.NDArray[np.int64]:
    """Use of a device after each of its cells, in the order in which it runs them; 0 before the first."""
    return _changes(account, device).cumsum()


def _changes(account: Account, device: int) -> npt.NDArray[np.int64]:
    """What each of its cells adds."""
    schedule, group = account.schedule, account.schedule.group[device]
    row = [np.zeros(1, np.int64)]
    for a in range(schedule.action_first[group], schedule.action_last[group]):
        which = int(which_cells(schedule, np.uint64(schedule.microbatch[a])))
        first, last = (BLOCK_CELLS * int(blocks[a]) for blocks in (schedule.block_first, schedule.block_last))
        row.append(account.cells[which, device, first:last])
    return np.concatenate(row)
