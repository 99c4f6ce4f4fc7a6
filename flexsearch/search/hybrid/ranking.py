"""Layouts in the order of their estimates, which simulated plans correct.

The order decides what is simulated, so it is computed in operations that IEEE 754 fixes, and where costs are equal, by
places: sums of numpy and its partial sorts depend on the processor.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from math import fsum, sqrt
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from flexsearch.search.constants import PENALTY
from flexsearch.search.hybrid.constants import UNKNOWN, WEIGHT
from flexsearch.search.hybrid.estimate import Estimate
from flexsearch.search.hybrid.layout import Layout
from flexsearch.strategy import Options, States

LEVELS: Final = 7
"""Of likeness between plans."""
SORT: Final = 2
"""The level of plans that share devices, states and order."""


class Key(NamedTuple):
    """A plan by its numbers. ``first``: first operators of its stages; empty: as the layout is cut by itself."""

    layout: Layout
    options: Options
    first: tuple[int, ...] = ()


def likeness(key: Key) -> tuple[Hashable, ...]:
    """What plans have in common, most first."""
    layout, options = key.layout, key.options
    states = layout.sharding, layout.states == States.WEIGHTS and options.reshard_after_forward
    order, factoring = (layout.schedule, layout.chunks), layout.factoring
    return (
        (factoring, states, order, options.recompute, options.recompute_blocks, layout.microbatches),
        (factoring, states, order, options.recompute), (factoring, states, order),
        (states, order, options.recompute), (states, options.recompute), states, (),
    )  # fmt: skip


class Ratios:
    """By how much simulated steps differ from their estimates: an estimate is corrected by the mean of those plans that
    are most like it."""

    def __init__(self) -> None:
        self._numbers: list[dict[Hashable, int]] = [{} for _ in range(LEVELS)]
        self._sums: list[list[list[float]]] = [[] for _ in range(LEVELS)]
        """By level and number: how many were simulated, sums of their ratios: of time, of memory."""

    def numbers(self, key: Key) -> list[int]:
        """Of what a plan has in common with others, by level."""
        by_level = []
        for numbers, rows, what in zip(self._numbers, self._sums, likeness(key), strict=True):
            if (number := numbers.get(what)) is None:
                number = numbers[what] = len(rows)
                rows.append([0.0, 0.0, 0.0])
            by_level.append(number)
        return by_level

    def learn(self, key: Key, estimate: Estimate, simulated: Estimate) -> None:
        """Take a simulated plan into account."""
        ratios = 1.0, simulated.seconds / estimate.seconds, simulated.used / estimate.used
        for rows, number in zip(self._sums, self.numbers(key), strict=True):
            rows[number] = [a + b for a, b in zip(rows[number], ratios, strict=True)]

    @property
    def spread(self) -> float:
        """Standard deviation of the ratios of time between sorts of plans, relative to their mean; while these are few,
        near to ``UNKNOWN``."""
        means = [seconds / count for count, seconds, _ in self._sums[SORT] if count]
        middle = fsum(means) / len(means) if means else 1.0
        off = [mean / middle - 1.0 for mean in means]
        squares = fsum(one * one for one in off) + WEIGHT * UNKNOWN * UNKNOWN
        return sqrt(squares / (len(means) + WEIGHT))

    def corrected(self, key: Key, estimate: Estimate) -> Estimate:
        """The estimate of one plan, corrected."""
        for rows, number in zip(self._sums, self.numbers(key), strict=True):
            count, seconds, used = rows[number]
            if count:
                return Estimate(estimate.seconds * (seconds / count), estimate.used * (used / count))
        return estimate

    def counts(self, level: int) -> npt.NDArray[np.float64]:
        """By number, how many plans with this in common were simulated."""
        return np.array([row[0] for row in self._sums[level]])

    def factors(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """By which the time and the memory of plans are to be multiplied (rows). ``numbers``: a row for each level."""
        factors = np.ones((2, numbers.shape[1]))
        for level in reversed(range(LEVELS)):
            count, *sums = np.array(self._sums[level])[numbers[level]].T
            told = count > 0.0
            factors[:, told] = [row[told] / count[told] for row in sums]
        return factors


class Ranking:
    """Plans that can be simulated, and their estimates."""

    def __init__(self, ratios: Ratios, plans: Iterable[tuple[Key, Estimate]]) -> None:
        self.ratios = ratios
        rows = list(plans)
        self.keys = [key for key, _ in rows]
        self.seconds = np.array([estimate.seconds for _, estimate in rows])
        self.used = np.array([estimate.used for _, estimate in rows])
        self.numbers = np.array([ratios.numbers(key) for key in self.keys], np.int64).reshape(-1, LEVELS).T
        self.left = np.ones(len(rows), bool)

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def untried(self) -> npt.NDArray[np.bool_]:
        """Plans of sorts (devices, states and order) of which none has been simulated."""
        untried: npt.NDArray[np.bool_] = self.ratios.counts(SORT)[self.numbers[SORT]] == 0.0
        return untried

    def chosen(self, suits: Callable[[Key], bool]) -> npt.NDArray[np.bool_]:
        """Which plans suit."""
        return np.array([suits(key) for key in self.keys], bool)

    def take(self, among: npt.NDArray[np.bool_] | None = None) -> tuple[Key, float] | None:
        """The plan with the least corrected cost of those that are left (and ``among`` these), and that cost; it is not
        left any more. None if there is none."""
        for best, cost in self._ordered(1, among):
            self.left[best] = False
            return self.keys[best], cost
        return None

    def least(self, among: npt.NDArray[np.bool_]) -> Estimate | None:
        """Of the plans left ``among`` these the one that fits soonest: the least corrected memory over what there is,
        where something fits the least time of those. None if none is left."""
        left = np.flatnonzero(self.left & among)
        if not len(left):
            return None
        time, memory = self.ratios.factors(self.numbers[:, left])
        seconds, used = self.seconds[left] * time, np.maximum(self.used[left] * memory, 1.0)
        best = np.lexsort((seconds, used))[0]
        return Estimate(float(seconds[best]), float(used[best]))

    def following(self, count: int, among: npt.NDArray[np.bool_] | None = None) -> Iterator[tuple[Key, float]]:
        """What ``take`` would return if it were called so often and nothing were learnt between."""
        for best, cost in self._ordered(count, among):
            yield self.keys[best], cost

    def _ordered(self, count: int, among: npt.NDArray[np.bool_] | None) -> list[tuple[int, float]]:
        """Places of the ``count`` plans with the least corrected cost, and that cost, ascending."""
        left = np.flatnonzero(self.left if among is None else self.left & among)
        if not len(left):
            return []
        time, memory = self.ratios.factors(self.numbers[:, left])
        cost = self.seconds[left] * time * (1.0 + PENALTY * np.maximum(0.0, self.used[left] * memory - 1.0))
        last = np.partition(cost, count - 1)[count - 1] if count < len(cost) else np.inf
        least = np.flatnonzero(cost <= last)
        order = np.argsort(cost[least], kind="stable")[:count]
        return [(int(left[k]), float(cost[k])) for k in least[order].tolist()]
