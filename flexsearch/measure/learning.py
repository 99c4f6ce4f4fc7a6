"""What the measured iteration times of some plans teach about the costs that they were predicted from.

Four figures may change: the scale of computing, the host time of a task, the scale of moving bytes, and the start of a
message. A third as many as there are plans are fitted at most, and one only if it helps to predict plans that were left
out. What earlier plans taught weighs as much as so many plans now. Makespans are piecewise linear in these figures, so
plans are simulated at one point and a step beside it for each figure, the linear problem is solved robustly (Huber's
loss, by reweighting), and that is repeated from there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median
from typing import Final, NamedTuple

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

Vector = npt.NDArray[np.float64]
Predict = Callable[[Learned, int], float]
"""Iteration time (s) of the plan of this number, with these corrections of the costs."""


class Figure(NamedTuple):
    """One that may be fitted. ``spread``: how far from the prior it may well lie, one standard deviation; ``least``:
    below that it makes no sense."""

    name: str
    spread: float
    least: float


@dataclass(frozen=True)
class Lesson:
    """``learned``: the prior itself where nothing was. ``changed``: names of the figures that were fitted, as in
    ``FIGURES``. Errors are medians of |predicted / measured - 1|: ``before``, ``after``, and ``left_out``, each plan
    predicted by what the others teach."""

    learned: Learned
    changed: tuple[str, ...]
    before: float
    after: float
    left_out: float


FIGURES: Final = ("compute", "task_s", "time", "start_s")


def learn(
    predict: Predict, measured_s: Sequence[float], prior: Learned, topology: str, overhead_s: float, start_s: float,
    *, weights: Vector | None = None, plans: int | None = None,
) -> Lesson:  # fmt: skip
    """What the measured times of plans teach. ``topology``: its name; ``overhead_s``: host time of a task on its
    devices, ``start_s``: the start of a message, as its file says. ``weights``: of the times, in proportion; equal
    unless given. ``plans``: that the times are of, where these are no plans but parts of some. Raises ProfileError for
    fewer than 3 times."""
    if (count := len(measured_s)) < PLANS_EACH:
        raise ProfileError(f"{count} measured plans are too few to learn from", f"Measure at least {PLANS_EACH}.")
    weights = np.ones(count) if weights is None else weights * count / weights.sum()
    fit = _Fit(predict, np.array(measured_s), weights, plans or count, prior, topology, overhead_s, start_s)
    return fit.lesson()


class _Fit:
    """``prior``, and every point, is a vector of ``FIGURES``."""

    def __init__(
        self, predict: Predict, measured_s: Vector, weights: Vector, plans: int, learned: Learned, topology: str,
        overhead_s: float, start_s: float,
    ) -> None:  # fmt: skip
        self.predict, self.measured_s, self.learned, self.topology = predict, measured_s, learned, topology
        self.weights, self.plans = weights, plans
        network = learned.network(topology)
        self.prior = np.array([learned.compute, learned.task_s, network.time, network.start_s])
        # Host times are often many times what an idle machine needs: ranks that share cores wait for each other.
        hosts = 5.0 * max(overhead_s, 5e-6), 10.0 * max(start_s, 30e-6)
        self.spread = np.array([0.5 * self.prior[0], hosts[0], 0.5 * self.prior[2], hosts[1]])
        self.least = np.array([0.01, 0.0, 0.01, -start_s])
        known = [True, True, *[network_name(topology) in learned.networks] * 2]
        self.earlier = np.array(known) * min(learned.plans, MEMORY) / plans
        """By figure: earlier plans that taught it, for each plan now."""

    def lesson(self) -> Lesson:
        """Linearise, choose figures, solve; again from there. The best point counts."""
        at, residual = self.prior, self.residuals(self.prior)
        before, chosen = residual, tuple[int, ...]()
        best = self.size(residual), at, chosen, residual
        for _ in range(ROUNDS):
            slopes = self.slopes(at, residual)
            chosen = self.choose(at, residual, slopes)
            now = self.solve(at, residual, slopes, chosen, self.weights)
            if np.all(np.abs(now - at) <= 1e-4 * self.spread):
                break
            at, residual = now, self.residuals(now)
            if self.size(residual) < best[0]:
                best = self.size(residual), at, chosen, residual
        _, at, chosen, residual = best
        points = self.without_each(at, residual, self.slopes(at, residual), chosen) if chosen else []
        if not chosen or self.size(self.left_out(points)) >= WORTH * self.size(before):
            return Lesson(self.learned, (), _typical(before), _typical(before), _typical(before))
        at, error = self.beside_earlier(at), _typical(self.left_out([self.beside_earlier(one) for one in points]))
        plans = self.learned.plans + self.plans
        learned = self.at(at).model_copy(update={"plans": plans, "error": error})
        changed = tuple(FIGURES[k] for k in chosen)
        return Lesson(learned, changed, _typical(before), _typical(self.residuals(at)), error)

    def at(self, point: Vector) -> Learned:
        """What a point says."""
        compute, task_s, time, start_s = point.tolist()
        networks = self.learned.networks | {network_name(self.topology): Network(time=time, start_s=start_s)}
        return self.learned.model_copy(update={"compute": compute, "task_s": task_s, "networks": networks})

    def residuals(self, point: Vector) -> Vector:
        """Predicted over measured, less 1, of every plan."""
        learned = self.at(point)
        return np.array([self.predict(learned, k) for k in range(len(self.measured_s))]) / self.measured_s - 1.0

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
        most = min(len(FIGURES), len(residual) // PLANS_EACH)
        best, chosen = self.size(residual + slopes @ (self.prior - at)), tuple[int, ...]()
        for count in range(1, most + 1):
            errors = {
                some: self.size(self.predicted_left_out(at, residual, slopes, some))
                for some in combinations(range(len(FIGURES)), count)
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
        predicted = [self.predict(self.at(point), k) for k, point in enumerate(points)]
        return np.array(predicted) / self.measured_s - 1.0

    def beside_earlier(self, point: Vector) -> Vector:
        """What the plans of a fit say, and the earlier ones."""
        return np.array(self.prior + (point - self.prior) / (1.0 + self.earlier))

    def size(self, residuals: Vector) -> float:
        """Mean error; one plan that is far off counts no more than as being off by its whole time."""
        return float(np.average(np.minimum(np.abs(residuals), 1.0), weights=self.weights))

    def without_each(self, at: Vector, residual: Vector, slopes: Vector, chosen: tuple[int, ...]) -> list[Vector]:
        """What all plans but one teach, for each."""
        rest = [np.arange(len(residual)) != k for k in range(len(residual))]
        return [self.solve(at, residual[some], slopes[some], chosen, self.weights[some]) for some in rest]

    def solve(
        self, at: Vector, residual: Vector, slopes: Vector, chosen: tuple[int, ...], weight: Vector
    ) -> Vector:  # fmt: skip
        """The point that explains the residuals, linearised ``at`` a point, with ``chosen`` figures; others are as the
        prior says. Robust, and drawn to the prior as far as the plans leave it open."""
        point = self.prior.copy()
        if not chosen:
            return point
        some = list(chosen)
        # In units of ``spread`` from the prior.
        columns, base = slopes[:, some] * self.spread[some], residual + slopes @ (self.prior - at)
        moved = np.linalg.lstsq(columns, -base, rcond=1e-3)[0]
        for _ in range(REWEIGHTINGS):
            errors = base + columns @ moved
            noise = max(NOISE, 1.4826 * float(np.median(np.abs(errors))))
            weights = np.sqrt(weight * np.minimum(1.0, HUBER * noise / np.maximum(np.abs(errors), 1e-12)))
            # Not ``noise``: where little is explained yet, the prior is no better.
            rows = np.concatenate([columns * weights[:, None], NOISE * np.eye(len(some))])
            wanted = np.concatenate([-base * weights, np.zeros(len(some))])
            moved = np.linalg.lstsq(rows, wanted, rcond=None)[0]
        point[some] += moved * self.spread[some]
        return np.array(np.maximum(point, self.least))


def _typical(residuals: Vector) -> float:
    """Median error."""
    return float(median(np.abs(residuals).tolist()))
