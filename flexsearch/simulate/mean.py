"""The mean step under recipes: over the cycle of steps with and without synchronisation, or, where workers go by
themselves, over steps in which their state repeats."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from flexsearch.cost.ticks import TICK
from flexsearch.lower import Lowered
from flexsearch.lower.recipes import cycle
from flexsearch.lower.several import several
from flexsearch.simulate.engine import Engine
from flexsearch.simulate.usage import computing_steps

Simulation = Any
"""``simulation.Simulation``, which imports this module."""
FEW: Final = 8
MOST: Final = 64
"""Steps of every worker that are simulated at first and at most until their state repeats."""
STEADY: Final = 1e-3
"""Where it does not, rates that differ by less from those of half as many steps are taken for steady."""

Ticks = npt.NDArray[np.int64]


def mean_step(lowered: Lowered, simulate: Callable[[Lowered], Simulation]) -> Simulation:
    """What a step takes on average; its ``times`` are those of the step that ``lowered`` describes."""
    shown = simulate(lowered)
    if lowered.asynchronous:
        seconds = steady(lowered).step_s
        return replace(shown, makespan_s=seconds, idle_s=np.maximum(0.0, seconds - shown.busy_s))
    steps = cycle(lowered.recipe_groups)
    if len(steps) < 2:
        return shown
    runs = [(simulate(lowered.at_step(step)), count) for step, count in steps]
    total = sum(count for _, count in runs)

    def mean(value: Callable[[Simulation], npt.NDArray[np.float64]]) -> npt.NDArray[np.float64]:
        whole: npt.NDArray[np.float64] = np.sum([count * value(one) for one, count in runs], axis=0)
        return whole / total

    return replace(
        shown, makespan_s=sum(count * one.makespan_s for one, count in runs) / total, busy_s=mean(lambda s: s.busy_s),
        idle_s=mean(lambda s: s.idle_s), link_busy_s=mean(lambda s: s.link_busy_s),
        link_bytes=mean(lambda s: s.link_bytes.astype(np.float64)).astype(np.int64),
        moved_bytes=round(sum(count * one.moved_bytes for one, count in runs) / total),
    )  # fmt: skip


@dataclass(frozen=True)
class Steady:
    """Workers that go by themselves. ``rates``: steps a second by device that computes; ``step_s``: seconds in which
    all of them together do as many steps as they are. ``exact``: their state repeats."""

    rates: tuple[float, ...]
    exact: bool

    @property
    def step_s(self) -> float:
        """Seconds of a mean step."""
        return len(self.rates) / sum(self.rates)


def steady(lowered: Lowered) -> Steady:
    """The rates at which devices go on, when what they began with is forgotten."""
    steps, before = FEW, None
    while True:
        ends = step_ends(lowered, steps)
        rates = _rates(ends)
        if rates.exact or steps == MOST:
            return rates
        if before is not None and abs(rates.step_s / before.step_s - 1) < STEADY:
            return rates
        steps, before = 2 * steps, rates


def step_ends(lowered: Lowered, steps: int) -> Ticks:
    """When each device that computes ends each of so many steps, ticks: (devices, steps)."""
    rows, blocks = several(lowered, steps), len(lowered.rows.schedule.kind)
    times = Engine(rows.schedule, rows.machine, fold=False).times(rows.segments, rows.segment)
    ends = np.zeros((len(lowered.devices), steps), np.int64)
    place = {device: k for k, device in enumerate(lowered.devices)}
    for device, block, at, _ in computing_steps(rows):
        if device in place:
            row = times.computation_end[:, int(times.computation_first[block]) + at]
            ends[place[device], block // blocks] = max(ends[place[device], block // blocks], int(row.max()))
    return ends


def _rates(ends: Ticks) -> Steady:
    """Rates from the ends of steps. Of the last step it does not count that others have none after it."""
    ends = ends[:, :-1]
    steps = ends.shape[1]
    for period in range(1, steps // 4 + 1):
        later = ends[:, -2 * period :] - ends[:, -3 * period : -period]
        if (later == later[0, 0]).all():
            return Steady((period / (int(later[0, 0]) * TICK),) * len(ends), True)
    last = int(ends[:, -1].min())
    rates = []
    for row in ends:
        inside = row[(row >= last // 2) & (row <= last)]
        if len(inside) < 2:  # so slow that it has done few steps
            inside = np.array([0, *row[: max(1, int((row <= last).sum()))]])
        rates.append((len(inside) - 1) / (int(inside[-1] - inside[0]) * TICK))
    return Steady(tuple(rates), False)
