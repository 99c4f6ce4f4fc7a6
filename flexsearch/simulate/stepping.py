"""Runs of the engine that go on from where devices, hosts and resources stand, and rows that take longer on some
devices: what the steps of a training loop need."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from flexsearch.compiled import I64, U32, U64
from flexsearch.cost.ticks import FOREVER, TICK
from flexsearch.direct import direct
from flexsearch.errors import FlexsearchError
from flexsearch.lower.rows import COMPUTE, RECIPE, Rows, steps_of
from flexsearch.simulate.engine import LATE, check, communications_of, make_record
from flexsearch.simulate.engine_state import DEADLOCK, DONE, MALFORMED, RUNNING, State, make_state
from flexsearch.simulate.engine_windows import run_to

_run_to = direct(run_to)
Factors = npt.NDArray[np.float64]
"""How many times as long each device computes."""


class Stand(NamedTuple):
    """From which tick on devices, their hosts and resources are free, and nothing that slows links computes."""

    clock: I64
    host: I64
    free: I64
    computing: I64


class Run:
    """A run of rows in pieces. ``recorded``: ``state.record`` says when rows end."""

    def __init__(self, rows: Rows, recorded: bool = False) -> None:
        self.rows, self.segments = rows, rows.segments
        capacity: U64 = communications_of(rows.segments, rows.segment)
        state = make_state(rows.schedule, rows.machine, capacity, max(1, int(capacity.sum())), False)
        if recorded:
            state = state._replace(record=make_record(rows.schedule, rows.segments, rows.segment))
        self.state: State = state
        self.state.segment[:] = rows.segment
        self.state.busy[:] = np.iinfo(np.uint64).max  # whoever has steps there or not
        self._scaled, self._device = _computing(rows)
        schedule = rows.schedule
        first, last = (column[schedule.group] for column in (schedule.action_first, schedule.action_last))
        self._idle = first == last
        self._action = first
        self._block: U32 = np.where(self._idle, 0, schedule.block_first[np.where(self._idle, 0, first)])

    @property
    def stand(self) -> Stand:
        """Where things stand."""
        state = self.state
        devices = state.devices
        return Stand(*(column.copy() for column in (devices.clock, devices.host, state.free, state.computing)))

    @property
    def next_tick(self) -> int:
        """Until which nothing happens."""
        devices, queue = self.state.devices, self.state.queue
        ticks: list[int] = devices.clock[devices.status == RUNNING].tolist()
        first: list[int] = queue.ready[: min(1, int(queue.size[0]))].tolist()
        return min([*ticks, *first, FOREVER])

    def scale(self, factors: Factors) -> None:
        """Let all computing but that of recipes, and its launches, take times as long, by device."""
        segments, at = self.rows.segments, self._scaled
        if (factors == 1.0).all():
            self.segments = segments
            return
        ticks, host = segments.step_ticks.copy(), segments.step_host.copy()
        times = factors[self._device[at]]
        ticks[at], host[at] = longer(segments.step_ticks[at], times), longer(segments.step_host[at], times)
        self.segments = segments._replace(step_ticks=ticks, step_host=host)

    def begin(self, stand: Stand | None = None) -> None:
        """Put all devices before their first row."""
        state, devices = self.state, self.state.devices
        state.run[0] += np.uint32(1)
        standing = devices.clock, devices.host, state.free, state.computing
        none = state.pending_count, state.queue.size, state.connections.held, state.connections.waiting
        for zero in (*standing, *none, state.now, state.latest, state.trouble, state.computed):
            zero[:] = 0
        if stand is not None:
            for column, values in zip(standing, stand, strict=True):
                column[:] = values
        devices.action[:], devices.block[:], devices.step[:] = self._action, self._block, 0
        devices.status[:] = np.where(self._idle, DONE, RUNNING)

    def until(self, tick: int) -> None:
        """Go on with all that happens before a tick. Raises FlexsearchError as ``Engine.run``."""
        state = self.state
        state.logged[0] = 0
        _run_to(state, self.segments, np.int64(tick))
        trouble = int(state.trouble[0])
        waits = state.queue.size[0] == 0 and not (state.devices.status == RUNNING).any()
        if not trouble and waits and (state.devices.status != DONE).any():
            trouble = DEADLOCK
        if trouble in (DEADLOCK, MALFORMED):
            check(self.rows.schedule, -trouble, state, LATE)
        if state.latest[0] >= FOREVER:
            raise _too_long()

    def to_the_end(self) -> None:
        """Go on until all is done."""
        self.until(FOREVER)
        if (self.state.devices.status != DONE).any():
            raise _too_long()


def _too_long() -> FlexsearchError:
    return FlexsearchError(
        f"a step takes more than {FOREVER * TICK / 86400:.0f} days, which is too long to be simulated",
        "Give shorter steps (--step-time, --slow, --jitter), or check bandwidth, latency_s and overhead_s of the "
        "topology's links, communication and devices.",
    )  # fmt: skip


def longer(ticks: I64, times: Factors) -> I64:
    """So many times as many ticks, at most ``FOREVER``."""
    return np.minimum(np.rint(ticks * times), float(FOREVER)).astype(np.int64)


def device_of_steps(rows: Rows) -> npt.NDArray[np.int64]:
    """By step of the segments: the device that runs it; -1: none."""
    device_of = np.full(len(rows.segments.step_kind), -1)
    step, _, device = steps_of(rows.segments, rows.segment, len(rows.schedule.group))
    device_of[step] = device
    return device_of


def _computing(rows: Rows) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int64]]:
    """By step: whether it is computing of the plan itself, not of its recipes; and the device."""
    device, segments = device_of_steps(rows), rows.segments
    plan = rows.schedule.kind[segments.step_block] != RECIPE
    return (segments.step_kind == COMPUTE) & plan & (device >= 0), device
