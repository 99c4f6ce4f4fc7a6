"""Workers that go by themselves, on the engine: when what they push to a server arrives.

The rows are those of a few steps of every worker (``lower.several.repeated``), the window. The engine runs them slice
by slice. After each slice the window moves on: steps that are over leave it, and as many new ones come in behind;
what is under way, in the engine's state, is renumbered. So there may be any number of steps, and each takes its own
time.

Workers that must not be far ahead of others, or read batches together, move on together, by the steps that the last of
them has behind it; all others by their own. So rows that become ready at the same tick, as happens where links are
shared by turns, may be served in another order than in one run of all steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from flexsearch.cost.ticks import FOREVER, TICK
from flexsearch.lower.recipe_rows import PushCost, push_cost, with_pushes
from flexsearch.lower.rows import COMPUTE, READ, RECIPE, Rows
from flexsearch.lower.several import repeated
from flexsearch.simulate.engine_queue import BLOCK, COMMUNICATION
from flexsearch.simulate.engine_state import COMPUTING, DONE, WAITING
from flexsearch.simulate.stepping import Run, device_of_steps, longer
from flexsearch.simulate.training import Workers
from flexsearch.sync import Recipe
from flexsearch.sync.compression import Sizes

STEPS: Final = 16
"""In the window, beside those by which workers may be ahead."""

Numbers = npt.NDArray[np.int64]


class Arrival(NamedTuple):
    """What a worker pushed in its next step has arrived, all shards of it. ``seconds``: from the beginning;
    ``computed_s``: those that the worker would have taken alone."""

    seconds: float
    computed_s: float
    worker: int


class AsynchronousTime:
    """Arrivals in the order in which they happen. ``most``: how many there will be, at most. ``measured``: ``push``
    says how much is pushed in each step, before it is."""

    def __init__(self, workers: Workers, recipe: Recipe, sizes: Sizes, most: int, measured: bool = False) -> None:
        self._workers, self._measured, self._group = workers, measured, workers.group(recipe, sizes)
        assert recipe.asynchronous is not None
        assert recipe.server is not None
        self._shards, lead = recipe.server.shards, recipe.asynchronous.lead
        self._bounded = lead is not None and lead < max(most, STEPS)
        self._lead = lead if lead is not None and self._bounded else 0
        self._steps = STEPS + 2 * self._lead
        rows = with_pushes(workers.lowered, workers.rows, self._group)
        self._layout = _Layout(rows)
        self._run = Run(repeated(rows, (self._group,), self._steps), recorded=True)
        self._run.segments = self._run.segments._replace(**{
            name: getattr(self._run.segments, name).copy()
            for name in ("step_ticks", "step_host", "communication_ticks", "turn", "link_ticks", "drag_ticks")
        })  # fmt: skip
        self._together = self._partners(rows)
        devices = len(workers.topology.devices)
        self._before = np.zeros(devices, np.int64)
        """By device: steps that have left the window."""
        self._arrived = np.zeros(workers.size, np.int64)
        self._computed = np.zeros(workers.size, np.int64)
        self._passed = 0
        """Ticks before the slice at hand."""
        self._work = _work(rows, workers.size)
        self._costs: dict[int, tuple[int, list[PushCost]]] = {}
        self._factors = np.ones((self._steps, devices))
        self._scale(np.full(devices, self._steps))
        self._run.begin()

    def push(self, worker: int, step: int, nbytes: Sequence[int]) -> None:
        """A worker pushes so many bytes to each server in a step (0: its first), which has begun and in which it has
        pushed nothing yet."""
        sizes = enumerate(nbytes)
        costs = [push_cost(self._workers.lowered, self._group, worker, shard, size) for shard, size in sizes]
        self._costs[worker] = step, costs
        self._write(worker)

    def _write(self, worker: int) -> None:
        """Write down what the last push that is known costs."""
        step, costs = self._costs[worker]
        segments, copy = self._run.segments, step - int(self._before[worker])
        if copy < 0:
            return
        for shard, cost in enumerate(costs):
            c = copy * self._layout.communications + self._layout.first_row + 2 * worker * self._shards + shard
            segments.communication_ticks[c], segments.turn[c] = cost.ticks, cost.turn
            segments.link_ticks[segments.link_first[c] : segments.link_last[c]] = cost.links
            segments.drag_ticks[segments.drag_first[c] : segments.drag_last[c]] = cost.drags

    def advance(self) -> list[Arrival]:
        """Go on for a slice, so long that no worker can leave the window, or, if what is pushed is ``measured``, push
        in a step that begins in it; returns the arrivals in it."""
        size, blocks = self._workers.size, self._layout.blocks
        copy = self._run.state.devices.block[:size].astype(np.int64) // blocks
        left = self._steps - self._lead - 2 - int(copy.max())
        ticks = min(FOREVER, self._run.next_tick + self._least * (1 if self._measured else left))
        self._run.until(ticks)
        arrivals = self._arrivals(ticks)
        self._move(ticks)
        return arrivals

    @property
    def _least(self) -> int:
        """Ticks that a worker takes at the least from one arrival to when it pushes again."""
        work = self._work
        slow = np.array(self._workers.slow or 1.0)
        return max(1, int((work.plan * slow + work.encode + work.load).min()))

    def _arrivals(self, until: int) -> list[Arrival]:
        """Of all that ended before a tick."""
        size, layout, end = self._workers.size, self._layout, self._run.state.record.end
        pushes = end.reshape(self._steps, -1)[:, layout.first_place : layout.first_place + 2 * size * self._shards]
        pushes = pushes.reshape(self._steps, size, 2, self._shards)[:, :, 0]
        ended = np.where((pushes >= 0).all(-1), pushes.max(-1), until)
        rows: list[tuple[int, int, int]] = []
        for worker in range(size):
            copy = int(self._arrived[worker] - self._before[worker])
            while copy < self._steps and ended[copy, worker] < until:
                plan, encode, load = (int(column[worker]) for column in self._work)
                times = float(self._factors[copy, worker])
                self._computed[worker] += round((plan + int(self._workers.waits[worker])) * times) + encode
                rows.append((int(ended[copy, worker]), worker, int(self._computed[worker])))
                self._computed[worker] += load
                self._arrived[worker] += 1
                copy += 1
        return [Arrival((self._passed + t) * TICK, c * TICK, worker) for t, worker, c in sorted(rows)]

    # ---- the window

    def _move(self, ticks: int) -> None:
        """Move the window on to a tick, up to which all has happened."""
        state, layout, size = self._run.state, self._layout, self._workers.size
        done = state.devices.block[:size].astype(np.int64) // layout.blocks
        shift = np.zeros(len(state.devices.block), np.int64)
        for together in self._together:
            shift[together] = done[together].min()
        self._before += shift
        self._renumber(shift)
        self._put_off(ticks)
        self._passed += ticks
        if shift.any():
            self._scale(shift)
            for worker in self._costs:
                self._write(worker)

    def _renumber(self, shift: Numbers) -> None:
        """Rows of a device, and of its communications, get the numbers of so many steps before."""
        state, layout = self._run.state, self._layout
        devices, pending, queue = state.devices, state.pending, state.queue
        live = devices.status != DONE
        devices.block[live] -= (shift * layout.blocks).astype(np.uint32)[live]
        devices.action[live] -= (shift * layout.actions).astype(np.uint32)[live]
        by_owner = shift[layout.owner]
        for column in (state.stamp, state.slot, state.record.start, state.record.end):
            table = column.reshape(self._steps, -1)
            at = np.arange(self._steps)[:, None] + by_owner
            inside = at < self._steps
            rest = np.array(-1 if column.dtype == np.int64 else 0, column.dtype)
            table[:] = np.where(inside, np.take_along_axis(table, np.minimum(at, self._steps - 1), 0), rest)
        count = int(state.pending_count[0])
        moved = by_owner[pending.place[:count] % layout.places]
        pending.place[:count] -= (moved * layout.places).astype(np.uint32)
        before = pending.identity[:count].copy()
        pending.identity[:count] = self._earlier(before, moved)
        held, sort = state.connections.identity[: int(state.connections.held[0])], np.argsort(before)
        held[:] = pending.identity[sort[np.searchsorted(before[sort], held)]]
        count = int(queue.size[0])
        identity, item = queue.identity[:count].copy(), queue.item[:count].astype(np.int64)
        sent = identity & COMMUNICATION != 0
        moved = np.where(sent, by_owner[item % layout.places], shift[np.where(sent, 0, item)])
        identity, item = self._earlier(identity, moved), item - np.where(sent, moved * layout.places, 0)
        order = np.lexsort((identity, queue.ready[:count]))  # what is sorted is a heap
        queue.ready[:count], queue.identity[:count] = queue.ready[:count][order], identity[order]
        queue.item[:count] = item[order]
        waits = (devices.status == WAITING) | (devices.status == COMPUTING)
        devices.awaited[waits] = self._earlier(devices.awaited[waits], shift[waits])

    def _earlier(self, identity: npt.NDArray[np.uint64], steps: Numbers) -> npt.NDArray[np.uint64]:
        return identity - ((steps * self._layout.blocks).astype(np.uint64) << BLOCK)

    def _put_off(self, ticks: int) -> None:
        """Let a tick be the first."""
        state = self._run.state
        devices, pending, queue, end = state.devices, state.pending, state.queue, state.record.end
        count, size = int(state.pending_count[0]), int(queue.size[0])
        ready = pending.ready[:count], queue.ready[:size]
        for column in (devices.clock, state.free, state.computing, *ready, state.latest):
            np.maximum(column - ticks, 0, out=column)
        np.subtract(devices.host, ticks, out=devices.host)
        pending.end[:count] -= np.where(pending.end[:count] >= 0, ticks, 0)
        end[:] = np.where(end >= 0, np.maximum(end - ticks, 0), end)
        state.now[0] = 0

    def _scale(self, shift: Numbers) -> None:
        """Give each step in the window the time that it takes; ``shift``: how many are new, by device."""
        steps = self._steps
        at = np.minimum(np.arange(steps)[:, None] + shift, steps - 1)
        self._factors = np.take_along_axis(self._factors, at, 0)
        for worker, slow in enumerate(self._workers.slow or (1.0,) * self._workers.size):
            for copy in range(steps - int(shift[worker]), steps):
                step = int(self._before[worker]) + copy
                self._factors[copy, worker] = slow * self._workers.chance(worker, step)
        if not self._workers.jitter and (self._before > 0).any():
            return  # all steps are alike
        segments, scaled, rows = self._run.segments, self._layout.scaled, self._run.rows.segments
        times = self._factors[:, self._layout.device[scaled]]
        for column, own in ((segments.step_ticks, rows.step_ticks), (segments.step_host, rows.step_host)):
            table = column.reshape(steps, -1)
            table[:, scaled] = longer(own.reshape(steps, -1)[:, scaled], times)

    # ---- what there is

    def _partners(self, rows: Rows) -> list[Numbers]:
        """Workers that move on together."""
        size = self._workers.size
        group = np.zeros(size, np.int64) if self._bounded else np.arange(size)
        segments, device = rows.segments, device_of_steps(rows)
        block, number = segments.step_block, segments.step_row
        reads = (segments.step_kind != COMPUTE) & (rows.schedule.kind[block] == READ)
        for b, row in {*zip(block[reads].tolist(), number[reads].tolist(), strict=True)}:
            using = np.unique(device[reads & (block == b) & (number == row)])
            group[np.isin(group, group[using])] = group[using].min()
        return [np.flatnonzero(group == g) for g in np.unique(group)]


class _Work(NamedTuple):
    """By worker: ticks of what a step computes, ``plan`` and ``encode`` before a push, ``load`` after it."""

    plan: Numbers
    encode: Numbers
    load: Numbers


def _work(rows: Rows, size: int) -> _Work:
    segments, device = rows.segments, device_of_steps(rows)
    kind, computes = rows.schedule.kind[segments.step_block], segments.step_kind == COMPUTE
    ticks = np.zeros((3, size), np.int64)
    for worker in range(size):
        at = np.flatnonzero(device == worker)
        recipe = kind[at] == RECIPE
        sent = np.logical_or.accumulate(recipe & ~computes[at])
        parts = ~recipe, recipe & ~sent, recipe & sent
        ticks[:, worker] = [segments.step_ticks[at][computes[at] & part].sum() for part in parts]
    return _Work(*ticks)


class _Layout:
    """Where what belongs to a step lies in the window. ``blocks``, ``communications``, ``places``: of a step;
    ``first_row``, ``first_place``: of the recipe's communications in it; ``owner``: by place, the device whose
    communication it is; ``actions``: of a step, by device; ``device``, ``scaled``: by step of the rows."""

    def __init__(self, rows: Rows) -> None:
        segments, schedule, segment = rows.segments, rows.schedule, rows.segment
        self.blocks, self.communications = len(schedule.kind), len(segments.missing)
        recipe = int(np.flatnonzero(schedule.kind == RECIPE)[0])
        first = segments.communication_first[segment].astype(np.int64)
        counts = segments.communication_last[segment] - first
        begins = np.cumsum(counts) - counts
        self.places, self.first_place, self.first_row = int(counts.sum()), int(begins[recipe]), int(first[recipe])
        self.actions = (schedule.action_last - schedule.action_first)[schedule.group].astype(np.int64)
        self.owner, self.device = np.zeros(self.places, np.int64), device_of_steps(rows)
        computes, block = segments.step_kind == COMPUTE, segments.step_block
        self.scaled = computes & (schedule.kind[block] != RECIPE) & (self.device >= 0)
        moves = ~computes & (self.device >= 0)
        self.owner[begins[block[moves]] + segments.step_row[moves]] = self.device[moves]
