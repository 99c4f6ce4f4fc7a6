"""What the measured timeline of one run teaches about costs: its tasks, and its whole step.

Tasks of one kind (forward passes of linear operators, all-reduces of gradients) are one observation, which weighs as
much as it takes of all tasks; the iteration time weighs as much as all of them. Costs of tasks are linear in what can
be learned, so they are priced once beside the prior for each figure; the step is simulated.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from flexsearch.cost import Costs, Learned, Network, Profile
from flexsearch.cost.learned import network_name
from flexsearch.errors import ProfileError
from flexsearch.graph import OperatorGraph
from flexsearch.lower import Lowered, TaskKind, lower_for_ranks
from flexsearch.measure.learning import Lesson, Vector, learn
from flexsearch.simulate.simulation import makespan
from flexsearch.strategy import Strategy

LEAST_S: Final = 1e-9
"""No prediction of a task is below."""
STEPS: Final = (0.1, 20e-6, 0.1, 20e-6)
"""How far from the prior costs are priced: of the scale of computing, s of a task, of moving bytes, s of a message."""


def learn_from_tasks(
    graph: OperatorGraph, plan: Strategy, lowered: Lowered, spans: Mapping[int, tuple[float, float]],
    hidden: frozenset[int], iteration_s: float, profile: Profile,
) -> Lesson:  # fmt: skip
    """``lowered``: the tasks that ran; ``spans``: task -> (start, end), s; ``hidden``: tasks whose end is not known;
    ``iteration_s``: measured, of ordinary steps. Raises ProfileError where nothing can be learned of this run."""
    topology, prior = plan.cluster, profile.learned or Learned()
    run = _Run(graph, plan, lowered, {t: b - a for t, (a, b) in spans.items() if t not in hidden}, profile, prior)
    measured = [*run.measured_s, iteration_s]
    shares = np.array(run.measured_s) * run.counts
    weights = np.array([*(shares / shares.sum()), 1.0]) / 2
    lesson = learn(
        run.predict, measured, prior, topology.name, max(device.overhead_s for device in topology.devices),
        topology.communication.overhead_s, weights=weights, plans=1,
    )  # fmt: skip
    before, after = (abs(run.iteration(x) / iteration_s - 1.0) for x in (prior, lesson.learned))
    if lesson.changed and after > before:
        raise ProfileError("what its tasks teach would predict the whole step worse")
    return lesson


class _Run:
    """Mean times of the groups of tasks of a run: as measured, and as predicted. ``counts``: tasks of each."""

    def __init__(
        self, graph: OperatorGraph, plan: Strategy, lowered: Lowered, taken_s: Mapping[int, float], profile: Profile,
        prior: Learned,
    ) -> None:  # fmt: skip
        self.graph, self.plan, self.profile, self.digest = graph, plan, profile, lowered.digest
        groups: dict[tuple[str, str], list[int]] = {}
        for task in taken_s:
            groups.setdefault(_group(lowered, task), []).append(task)
        self.groups = list(groups.values())
        self.measured_s = [sum(taken_s[t] for t in tasks) / len(tasks) for tasks in self.groups]
        self.counts = np.array([len(tasks) for tasks in self.groups])
        self.prior = self.figures(prior)
        self.base = self.means(prior)
        moved = [self.means(self.beside(prior, k)) for k in range(len(STEPS))]
        self.slopes = np.stack([(m - self.base) / step for m, step in zip(moved, STEPS, strict=True)], axis=1)

    def lower(self, learned: Learned) -> Lowered:
        costs = Costs(self.graph, self.plan.cluster, self.profile.model_copy(update={"learned": learned}))
        return lower_for_ranks(self.graph, self.plan, self.plan.cluster, costs)

    def means(self, learned: Learned) -> Vector:
        """Predicted mean time of the tasks of each group, s."""
        lowered = self.lower(learned)
        if lowered.digest != self.digest:
            raise ProfileError("with what it says, this plan communicates in other forms than it did in the run")
        seconds = np.array(lowered.tasks.duration)
        return np.array([seconds[tasks].mean() for tasks in self.groups])

    def figures(self, learned: Learned) -> Vector:
        network = learned.network(self.plan.cluster.name)
        return np.array([learned.compute, learned.task_s, network.time, network.start_s])

    def beside(self, learned: Learned, figure: int) -> Learned:
        """``learned`` with one figure moved by its step."""
        compute, task_s, time, start_s = self.prior + np.eye(len(STEPS))[figure] * STEPS[figure]
        networks = learned.networks | {network_name(self.plan.cluster.name): Network(time=time, start_s=start_s)}
        return learned.model_copy(update={"compute": compute, "task_s": task_s, "networks": networks})

    def predict(self, learned: Learned, number: int) -> float:
        """Of group ``number``, or (the last) of the step, s."""
        if number == len(self.groups):
            return self.iteration(learned)
        return float(max(LEAST_S, self.base[number] + self.slopes[number] @ (self.figures(learned) - self.prior)))

    def iteration(self, learned: Learned) -> float:
        return makespan(self.lower(learned))


def _group(lowered: Lowered, task: int) -> tuple[str, str]:
    """What tasks are one observation."""
    kind, what = TaskKind(lowered.tasks.kind[task]), lowered.tasks.communication[task]
    if what is not None:
        return what.purpose, what.form
    operator = lowered.tasks.operator[task]
    return kind.name, lowered.graph.operators[operator].kind if operator >= 0 else ""
