"""Floor 5: where no plan fits into memory, what would help, tried by the search in bounded time."""

from __future__ import annotations

import time
from math import ceil
from typing import Final

from flexsearch.cost.updates import bytes_in_training
from flexsearch.errors import FlexsearchError, TopologyError
from flexsearch.planning import OnProgress, plan
from flexsearch.report.fitting import Attempt, Fitting
from flexsearch.setting import Setting
from flexsearch.strategy import Options
from flexsearch.topology.sizes import Sizes

SHARES: Final = 4
"""The time is divided so: for half precision, and for three numbers of hosts. Taken."""


def what_would_fit(
    setting: Setting, options: Options, budget_s: float, on_progress: OnProgress | None = None
) -> Fitting:
    """Search layouts in half precision, if the options do not ask for one and its states have room; then on twice as
    many hosts, and so on, but on no fewer than the states need, until something fits; then between the last two
    numbers. All together takes about ``budget_s`` (s). Ctrl-C ends it with what has been tried."""
    tries = _Tries(setting, options, budget_s, on_progress or (lambda now: None))
    half = tries.half_precision() if tries.half_states is not None and tries.half_states <= tries.room else None
    tries.hosts()
    return Fitting(
        tries.states, tries.half_states, tries.room, tries.least, tries.most > tries.now, tries.tried, half
    )


class _Tries:
    """Searches, one after the other, as long as there is time."""

    def __init__(self, setting: Setting, options: Options, budget_s: float, report: OnProgress) -> None:
        self.setting, self.options, self.report = setting, options, report
        self.each_s, self.end = budget_s / SHARES, time.monotonic() + budget_s
        self.sizes, self.now = Sizes(setting.topology), len(setting.topology.hosts)
        try:
            self.most = self.sizes.most_hosts
        except TopologyError:  # hosts of different sizes
            self.most = self.now
        self.states = training_bytes(setting, options)
        self.half_states: int | None = None
        if options.precision == "as-is":
            self.half_states = training_bytes(setting, options.model_copy(update={"precision": "bf16"}))
        self.room = sum(device.usable_bytes for device in setting.topology.devices)
        self.least = ceil(self.states * self.now / self.room)
        self.tried: dict[int, Attempt] = {}

    def half_precision(self) -> Attempt | None:
        options = self.options.model_copy(update={"precision": "bf16"})
        return self._search(self.setting, options, "--precision bf16")

    def hosts(self) -> None:
        """Twice as many each time until something fits, then half-way between."""
        count, below = 2 * self.now, max(self.now, self.least - 1)
        while count < self.least:
            count *= 2
        while count <= self.most and (attempt := self._on(count)) is not None:
            if attempt.fits:
                break
            count, below = 2 * count, count
        fits = count in self.tried and self.tried[count].fits
        while fits and count - below > 1 and (attempt := self._on((count + below) // 2)) is not None:
            middle = (count + below) // 2
            count, below = (middle, below) if attempt.fits else (count, middle)

    def _on(self, hosts: int) -> Attempt | None:
        """An attempt on so many hosts, noted; None if the time is over."""
        topology = self.sizes.of_hosts(hosts)
        words = f"{hosts} hosts ({len(topology.devices):,} devices)"
        there = Setting.of(self.setting.graph, topology, self.setting.costs.profile)
        attempt = self._search(there, self.options, words)
        if attempt is not None:
            self.tried[hosts] = attempt
        return attempt

    def _search(self, setting: Setting, options: Options, change: str) -> Attempt | None:
        seconds = min(self.each_s, self.end - time.monotonic())
        if seconds < 0.2 * self.each_s:
            return None
        try:
            best = plan(setting, f"{seconds:.6f}s", options, space="layouts", on_progress=self.report)
        except KeyboardInterrupt:
            best = None
        except FlexsearchError:
            return Attempt(change, None)
        if best is None or best.interrupted:
            self.end = 0.0
            return None
        return Attempt(change, best.step, best.words)


def training_bytes(setting: Setting, options: Options) -> int:
    """Bytes of all weights, their gradients and what the optimizer keeps: a copy of each."""
    graph = options.typed(setting.graph)
    weights = ((w, graph.gradient[w.name]) for w in graph.of_kind("parameter"))
    return sum(int(bytes_in_training(*both, options.optimizer, options.precision)) for both in weights)
