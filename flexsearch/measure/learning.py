"""What measured iteration times teach about the costs that they were predicted from.

Named figures are fitted: of a profile's corrections four (:func:`learn`), of a device's efficiency some more
(:mod:`flexsearch.measure.calibrate`). A third as many as there are plans at most, and one only if it helps to predict
plans that were left out. Makespans are piecewise linear in these figures, or nearly so: plans are simulated at one
point and a step beside it for each figure, the linear problem is solved robustly (Huber's loss, by reweighting), and
that is repeated from there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import inf
from statistics import median
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from flexsearch.cost import Learned, Network
from flexsearch.cost.learned import network_name
from flexsearch.errors import ProfileError

PLANS_EACH: Final = 3
"""Measured plans for each figure that is fitted."""
NOISE: Final = 0.02
"""Relative error of a measured time, at least. Plans that are predicted twice as well teach nothing."""
HUBER: Final = 1.345
"""Residuals above so many standard deviations count linearly: 95 % as efficient as least squares on normal errors."""
WORTH: Final = 0.8
"""One figure more must bring the error of left-out plans down to this share."""
MEMORY: Final = 24
"""Earlier plans count for no more than so many: machines change."""
ROUNDS: Final = 6
REWEIGHTINGS: Final = 12
HALVINGS: Final = 3
"""A step that makes errors larger is halved so often: what is linear beside a point is less so far from it."""

Vector = npt.NDArray[np.float64]
Predict = Callable[[Learned, int], float]
"""Iteration time (s) of the plan of this number, with these corrections of the costs."""


class Figure(NamedTuple):
    """One that may be fitted. ``spread``: how far from the prior it may well lie, one standard deviation; it makes
    sense from ``least`` to ``most``. ``earlier``: plans that taught it before, for each plan now."""

    name: str
    prior: float
    spread: float
    least: float
    most: float = inf
    earlier: float = 0.0


@dataclass(frozen=True)
class Fitted:
    """``point``: values of the figures, of which ``chosen`` (places) differ from the prior. By plan, predicted over
    measured less 1: ``before``, ``after``, and ``left_out``, predicted by what the plans of other groups teach,
    which are the ``others``, a point for each plan."""

    point: Vector
    chosen: tuple[int, ...]
    before: Vector
    after: Vector
    left_out: Vector
    others: tuple[Vector, ...]


@dataclass(frozen=True)
class Lesson:
    """``learned``: the prior itself where nothing was. ``changed``: names of the figures that were fitted.
    Errors are medians of |predicted / measured - 1|: ``before``, ``after``, and ``left_out``, each plan
    predicted by what the others teach."""

    learned: Learned
    changed: tuple[str, ...]
    before: float
    after: float
    left_out: float


def learn(
    predict: Predict, measured_s: Sequence[float], prior: Learned, topology: str, overhead_s: float, start_s: float,
    *, weights: Vector | None = None, plans: int | None = None,
) -> Lesson:  # fmt: skip
    """What the measured times of plans teach. ``topology``: its name; ``overhead_s``: host time of a task on its
    devices, ``start_s``: the start of a message, as its file says. ``weights``: of the times, in proportion; equal
    unless given. ``plans``: that the times are of, where these are no plans but parts of some. Raises ProfileError for
    fewer than 3 times."""
    plans = plans or len(measured_s)
    figures = (
        *computing_figures(prior, overhead_s, plans), *network_figures(prior, topology, start_s, plans)
    )  # fmt: skip

    def at(point: Vector) -> Learned:
        return corrected(prior, topology, dict(zip((f.name for f in figures), point.tolist(), strict=True)))

    fitted = fit(lambda point, k: predict(at(point), k), measured_s, figures, weights=weights)
    before, after, left_out = map(typical, (fitted.before, fitted.after, fitted.left_out))
    if not fitted.chosen:
        return Lesson(prior, (), before, before, before)
    learned = at(fitted.point).model_copy(update={"plans": prior.plans + plans, "error": left_out})
    return Lesson(learned, tuple(figures[k].name for k in fitted.chosen), before, after, left_out)


def computing_figures(prior: Learned, overhead_s: float, plans: int) -> tuple[Figure, ...]:
    """Scale of computing, and host time of a task. That is often many times what an idle machine needs: ranks that
    share cores wait for each other."""
    earlier = min(prior.plans, MEMORY) / plans
    return (
        Figure("compute", prior.compute, 0.5 * prior.compute, 0.01, earlier=earlier),
        Figure("task_s", prior.task_s, 5.0 * max(overhead_s, 5e-6), 0.0, earlier=earlier),
    )


def network_figures(prior: Learned, topology: str, start_s: float, plans: int) -> tuple[Figure, ...]:
    """Scale of moving bytes, and the start of a message beyond ``start_s``."""
    network = prior.network(topology)
    earlier = min(prior.plans, MEMORY) / plans if network_name(topology) in prior.networks else 0.0
    return (
        Figure("time", network.time, 0.5 * network.time, 0.01, earlier=earlier),
        Figure("start_s", network.start_s, 10.0 * max(start_s, 30e-6), -start_s, earlier=earlier),
    )


def corrected(prior: Learned, topology: str, values: Mapping[str, float]) -> Learned:
    """``prior`` with these values of its figures; those that are none of its own belong to the device's efficiency."""
    own = {name: value for name, value in values.items() if name in ("compute", "task_s")}
    network = {name: value for name, value in values.items() if name in Network.model_fields}
    rest = {name: value for name, value in values.items() if name not in own and name not in network}
    changed: dict[str, object] = {**own, "efficiency": prior.efficiency | rest}
    if network:
        changed["networks"] = prior.networks | {network_name(topology): Network(**network)}
    return prior.model_copy(update=changed)


def fit(
    predict: Callable[[Vector, int], float], measured_s: Sequence[float], figures: Sequence[Figure], *,
    weights: Vector | None = None, groups: Sequence[int] | None = None, most: int | None = None,
    every: bool = False, rounds: int = ROUNDS,
) -> Fitted:  # fmt: skip
    """The values of ``figures`` that the measured times of plans teach. ``predict``: iteration time (s) of a plan with
    these values. ``groups``: by plan; those of one group are left out together; default: each alone. ``most``: figures
    that are fitted at most; default: a third of the plans. ``every``: fit the first ``most`` figures, whatever they
    bring. ``rounds``: linearisations at most. Raises ProfileError for fewer than 3 times."""
    if (count := len(measured_s)) < PLANS_EACH:
        raise ProfileError(f"{count} measured plans are too few to learn from", f"Measure at least {PLANS_EACH}.")
    weights = np.ones(count) if weights is None else weights * count / weights.sum()
    own = np.arange(count) if groups is None else np.array(groups)
    most = count // PLANS_EACH if most is None else most
    return _Fit(predict, np.array(measured_s), weights, own, figures, min(most, len(figures)), every, rounds).fitted()


class _Fit:
    """Every point is a vector of the figures."""

    def __init__(
        self, predict: Callable[[Vector, int], float], measured_s: Vector, weights: Vector, groups: npt.NDArray[Any],
        figures: Sequence[Figure], most: int, every: bool, rounds: int,
    ) -> None:  # fmt: skip
        self.predict, self.measured_s, self.weights, self.groups = predict, measured_s, weights, groups
        _, prior, spread, least, top, earlier = zip(*figures, strict=True)
        self.prior, self.spread, self.least = np.array(prior), np.array(spread), np.array(least)
        self.top, self.earlier, self.most = np.array(top), np.array(earlier), most
        self.every, self.rounds = every, rounds

    def fitted(self) -> Fitted:
        """Linearise, choose figures, solve; again from there. The best point counts."""
        at, residual = self.prior, self.residuals(self.prior)
        before, chosen = residual, tuple[int, ...]()
        best = self.size(residual), at, chosen, residual
        for _ in range(self.rounds):
            slopes = self.slopes(at, residual)
            chosen = self.choose(at, residual, slopes)
            now = self.solve(at, residual, slopes, chosen, self.weights)
            if np.all(np.abs(now - at) <= 1e-4 * self.spread):
                break
            at, residual = self.step(at, residual, now)
            if self.size(residual) < best[0]:
                best = self.size(residual), at, chosen, residual
        _, at, chosen, residual = best
        points = self.without_each(at, residual, self.slopes(at, residual), chosen) if chosen else []
        if not chosen or (not self.every and self.size(self.left_out(points)) >= WORTH * self.size(before)):
            return Fitted(self.prior, (), before, before, before, (self.prior,) * len(before))
        at, others = self.beside_earlier(at), tuple(map(self.beside_earlier, points))
        return Fitted(at, chosen, before, self.residuals(at), self.left_out(others), others)

    def step(self, at: Vector, residual: Vector, to: Vector) -> tuple[Vector, Vector]:
        """The point ``to``, or one on the way there, from one with these residuals; and its own."""
        before, after = self.size(residual), self.residuals(to)
        for _ in range(HALVINGS):
            if self.size(after) < before:
                break
            to = (at + to) / 2.0
            after = self.residuals(to)
        return to, after

    def residuals(self, point: Vector) -> Vector:
        """Predicted over measured, less 1, of every plan."""
        return np.array([self.predict(point, k) for k in range(len(self.measured_s))]) / self.measured_s - 1.0

    def slopes(self, point: Vector, residual: Vector) -> Vector:
        """(plans, figures) derivatives of the residuals."""
        columns = []
        for k, spread in enumerate(self.spread):
            beside = point.copy()
            beside[k] += (step := 0.02 * spread)
            columns.append((self.residuals(beside) - residual) / step)
        return np.stack(columns, axis=1)

    def choose(self, at: Vector, residual: Vector, slopes: Vector) -> tuple[int, ...]:
        """The figures that predict left-out plans best, as few as will do."""
        if self.every:
            return tuple(range(self.most))
        best, chosen = self.size(residual + slopes @ (self.prior - at)), tuple[int, ...]()
        for count in range(1, self.most + 1):
            errors = {
                some: self.size(self.predicted_left_out(at, residual, slopes, some))
                for some in combinations(range(len(self.prior)), count)
            }
            least = min(errors, key=errors.__getitem__)
            if best > NOISE / 2 and errors[least] < WORTH * best:
                best, chosen = errors[least], least
        return chosen

    def predicted_left_out(self, at: Vector, residual: Vector, slopes: Vector, chosen: tuple[int, ...]) -> Vector:
        """Residual of each plan by what the others teach, as far as makespans are linear."""
        points = self.without_each(at, residual, slopes, chosen)
        return np.array([residual[k] + slopes[k] @ (point - at) for k, point in enumerate(points)])

    def left_out(self, points: Sequence[Vector]) -> Vector:
        """The same, simulated. ``points``: by plan, what the others teach."""
        predicted = [self.predict(point, k) for k, point in enumerate(points)]
        return np.array(predicted) / self.measured_s - 1.0

    def beside_earlier(self, point: Vector) -> Vector:
        """What the plans of a fit say, and the earlier ones."""
        return np.array(self.prior + (point - self.prior) / (1.0 + self.earlier))

    def size(self, residuals: Vector) -> float:
        """Mean error; one plan that is far off counts no more than as being off by its whole time."""
        return float(np.average(np.minimum(np.abs(residuals), 1.0), weights=self.weights))

    def without_each(self, at: Vector, residual: Vector, slopes: Vector, chosen: tuple[int, ...]) -> list[Vector]:
        """What the plans of all other groups teach, for each plan."""
        points = {}
        for group in dict.fromkeys(self.groups.tolist()):
            some = self.groups != group
            points[group] = self.solve(at, residual[some], slopes[some], chosen, self.weights[some])
        return [points[group] for group in self.groups.tolist()]

    def solve(
        self, at: Vector, residual: Vector, slopes: Vector, chosen: tuple[int, ...], weight: Vector
    ) -> Vector:  # fmt: skip
        """The point that explains the residuals, linearised ``at`` a point, with ``chosen`` figures; others are as the
        prior says. Robust, within limits, and drawn to the prior as far as the plans leave it open."""
        point, some = self.prior.copy(), list(chosen)
        base = residual + slopes @ (self.prior - at)
        while some:
            moved = self.prior[some] + self.drawn(slopes[:, some] * self.spread[some], base, weight) * self.spread[some]
            beyond = [k for k, value in zip(some, moved, strict=True) if not self.least[k] <= value <= self.top[k]]
            if not beyond:
                point[some] = moved
                break
            # What lies beyond its limit is put there, and the others explain what is left.
            for k, value in zip(some, moved, strict=True):
                if k in beyond:
                    point[k] = np.clip(value, self.least[k], self.top[k])
                    base = base + slopes[:, k] * (point[k] - self.prior[k])
            some = [k for k in some if k not in beyond]
        return point

    def drawn(self, columns: Vector, base: Vector, weight: Vector) -> Vector:
        """By how much figures move, in units of ``spread`` from the prior."""
        moved = np.linalg.lstsq(columns, -base, rcond=1e-3)[0]
        for _ in range(REWEIGHTINGS):
            errors = base + columns @ moved
            noise = max(NOISE, 1.4826 * float(np.median(np.abs(errors))))
            weights = np.sqrt(weight * np.minimum(1.0, HUBER * noise / np.maximum(np.abs(errors), 1e-12)))
            # Not ``noise``: where little is explained yet, the prior is no better.
            rows = np.concatenate([columns * weights[:, None], NOISE * np.eye(columns.shape[1])])
            wanted = np.concatenate([-base * weights, np.zeros(columns.shape[1])])
            moved = np.linalg.lstsq(rows, wanted, rcond=None)[0]
        return np.array(moved)


def typical(residuals: Vector) -> float:
    """Median error."""
    return float(median(np.abs(residuals).tolist()))
