"""Stages of different sizes: how many devices each gets, and where the graph is cut.

A dynamic program over cuts and numbers of devices (PipeDream, SOSP 2019, section 3.1) for synchronous steps: these take
the passes of one microbatch through all stages and, for every other microbatch, the slowest stage. So for several
limits on the slowest stage the program finds the least sum. Devices are taken in their order; those of a stage share
out the samples, and the slowest of them decides."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from flexsearch.search.hybrid.constants import LIMITS, PLACES, SLACK, STAGES, SUMS
from flexsearch.search.hybrid.estimate import Estimates
from flexsearch.search.hybrid.layout import Layout
from flexsearch.strategy import Options

Values = npt.NDArray[np.float64]
Division = tuple[tuple[int, ...], tuple[int, ...]]
"""Widths of ranks, first operators of stages."""


class Divider:
    """Divisions of the groups of one block. ``layout``: its numbers; ``units``: groups of ``tensor`` devices."""

    def __init__(self, estimates: Estimates, layout: Layout, options: Options, units: int) -> None:
        self.estimates, self.layout, self.options, self.units = estimates, layout, options, units
        self.works, self.samples = estimates.works, estimates.samples(layout)
        self.places = self._places()
        self.ends = np.array([*self.places, self.works.count])
        self.tables = self._tables()
        self.limits = np.array([np.inf])
        """On the slowest stage, s."""

    def divisions(self) -> Iterator[Division]:
        """Divisions worth a look, for every number of stages."""
        depth = min(STAGES, self.units, len(self.places))
        slowest = self._run(depth, np.maximum, 0)[0][:, 0, -1, self.units]
        slowest = slowest[np.isfinite(slowest)]
        if not len(slowest):
            return
        busy = np.unique([table[0] for table in self.tables.values()])
        near = [busy[(busy >= least) & (busy <= SLACK * least)] for least in np.unique(slowest)]
        most = min(LIMITS, SUMS // (self.units * len(self.ends)) ** 2)
        each = max(2, most // len(near))
        self.limits = np.unique([np.quantile(values, np.linspace(0.0, 1.0, each)) for values in near])
        totals, choices = self._run(depth, np.add, 1)
        for stages in range(1, depth + 1):
            for k in range(len(self.limits)):
                if np.isfinite(totals[stages - 1, k, -1, self.units]):
                    yield self._trace(choices, stages, k)

    def _places(self) -> list[int]:
        """Operators before which a stage may begin."""
        places = self.estimates.cuts.allowed(min(STAGES, self.units))
        if len(places) <= PLACES:
            return places
        work = self.works.work(self.layout.tensor, self.samples, "none", 0)
        done = (work.forward + work.backward)[places]
        wanted = np.linspace(0.0, done[-1], PLACES)
        return [0, *sorted({places[int(k)] for k in np.searchsorted(done, wanted)} - {0})]

    def _tables(self) -> dict[tuple[int, int], Values]:
        """Seconds of the stage from one place (row) to another, for a microbatch, on so many groups from a group on.
        First how long it is busy: what the slowest device computes, with its part of what synchronising takes, or what
        is sent to it; then how long a microbatch takes through it, there and back. Infinity where its memory is
        exceeded."""
        estimates, layout, options = self.estimates, self.layout, self.options
        stored = self.works.stored(layout.tensor, options.recompute)
        count, tables = len(self.ends), {}
        forbidden = np.tril(np.ones((count, count), bool))
        sent = np.concatenate([[0], estimates.cuts.crossing[self.ends[1:-1]], [0]]) * self.samples
        for begin in range(self.units):
            for width in range(1, min(self.units - begin, self.samples) + 1):
                rank = int(begin > 0)
                wide = layout.wide(tuple(filter(None, (begin, width, self.units - begin - width))))
                share, kind = estimates.ranks(wide)[rank]
                work = self.works.work(layout.tensor, share, options.recompute, kind)
                seconds = (work.forward + work.backward + work.again)[self.ends]
                weights, states, kept = (column[self.ends] for column in stored[:3])
                start, each = estimates.agreement(wide, rank)
                busy = _between(seconds) + (start + each * _between(weights)) / layout.microbatches
                table = np.stack([busy, busy])
                if begin:
                    groups = wide.groups()
                    start, each = estimates.between(groups[0][-layout.tensor:], groups[1], layout.tensor)
                    hop = start + each * sent[:, None] / self.works.graph.batch
                    table = np.stack([np.maximum(busy, hop), busy + 2.0 * hop])
                room = estimates.memory[begin * layout.tensor : (begin + width) * layout.tensor].min()
                table[:, forbidden | (_between(states) + share * _between(kept) > room)] = np.inf
                tables[begin, width] = table
        return tables

    def _run(self, depth: int, together: np.ufunc, row: int) -> tuple[Values, npt.NDArray[np.int64]]:
        """By number of stages - 1, limit, place and groups used: the least sum (or maximum) over stages, and the place
        (times ``units + 1``) and number of groups of the last one. ``row``: of the tables."""
        count, units, limits = len(self.ends), self.units, len(self.limits)
        allowed = {key: np.where(table[0] <= self.limits[:, None, None], table[row], np.inf)
                   for key, table in self.tables.items()}  # fmt: skip
        least = np.full((depth, limits, count, units + 1), np.inf)
        choice = np.zeros((depth, limits, count, units + 1), np.int64)
        before = np.full((limits, count, units + 1), np.inf)
        before[:, 0, 0] = 0.0
        for stage in range(depth):
            for (begin, width), table in allowed.items():
                if stage and not begin:
                    continue
                total = together(before[:, :, begin, None], table)  # limit, from, to
                at = total.argmin(axis=1)
                value = np.take_along_axis(total, at[:, None], axis=1)[:, 0]
                used = begin + width
                better = value < least[stage, :, :, used]
                least[stage, :, :, used][better] = value[better]
                choice[stage, :, :, used][better] = (at * (units + 1) + width)[better]
            before = least[stage]
        return least, choice

    def _trace(self, choice: npt.NDArray[np.int64], stages: int, limit: int) -> Division:
        """The division that led to a sum."""
        widths, first, place, used = [], [], len(self.ends) - 1, self.units
        for stage in reversed(range(stages)):
            place, width = divmod(int(choice[stage, limit, place, used]), self.units + 1)
            used -= width
            widths.append(width)
            first.append(int(self.ends[place]))
        return tuple(reversed(widths)), tuple(reversed(first))


def _between(sums: Values) -> Values:
    """What runs from one place (row) to another sum up to."""
    return sums[None, :] - sums[:, None]
