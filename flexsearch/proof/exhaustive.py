"""The fastest plan of a finite space, with proof: depth-first branch and bound.

Operators get their configs one after the other, along the graph. ``relaxation`` gives a lower bound on every completion
of a partial plan; if that is not below the time of the best plan so far, the partial plan is pruned. Complete plans
that remain are simulated. (FlexFlow, MLSys 2019, section 8.4, does the same with A* for two small networks.)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, prod
from typing import Final, Protocol

import numpy as np

from flexsearch.cost import Costs
from flexsearch.errors import StrategyError
from flexsearch.graph import OperatorGraph
from flexsearch.lower import Lowering
from flexsearch.proof.bound import ROUNDING, lower_bound
from flexsearch.proof.branch import DONE, PAUSE, PLAN, Tree, descend, proved
from flexsearch.proof.relaxation import Relaxation
from flexsearch.proof.spaces import Choices, every_config
from flexsearch.proof.symmetry import groups
from flexsearch.strategy import OperatorConfig, Options
from flexsearch.strategy.baselines import baselines

Configs = tuple[OperatorConfig, ...]
"""A config for each operator, in graph order."""

CHUNK: Final = 20_000
"""Partial plans between two looks at the clock."""
MOST_DEVICES: Final = 8
MOST_CHOICES: Final = 1000
"""Of one operator. The tables grow with their square, and with two to the power of the number of devices."""


class Evaluation(Protocol):
    """What a plan costs: seconds of an iteration, and whether it fits into every device's memory."""

    @property
    def time_s(self) -> float: ...

    @property
    def feasible(self) -> bool: ...


class Evaluate(Protocol):
    """What evaluates whole plans, exactly (``search.Evaluator``), with the lowering and the options that it uses."""

    @property
    def lowering(self) -> Lowering: ...

    @property
    def options(self) -> Options: ...

    def __call__(self, configs: Configs, /) -> Evaluation: ...


@dataclass(frozen=True, slots=True)
class Step:
    """Where an exhaustive search is. ``plans``: size of the space. ``bound_s``: what is proved so far."""

    plans: int
    nodes: int
    simulated: int
    best_s: float
    bound_s: float
    elapsed_s: float


@dataclass(frozen=True)
class Optimum:
    """``configs``: the best plan of the space that fits into memory (or the incumbent, if it is better), which takes
    ``time_s``; None if nothing fits. ``bound_s``: no plan of the space that fits is faster; equal to ``time_s``, but
    for the tolerance, if ``complete``. ``plans``: size of the space. ``nodes``: partial plans that were bounded;
    ``pruned``: those that were cut off; ``simulated``: whole plans that had to be simulated. ``stopped``: why it ended,
    in words."""

    configs: Configs | None
    time_s: float
    bound_s: float
    complete: bool
    plans: int
    nodes: int
    pruned: int
    simulated: int
    elapsed_s: float
    stopped: str


def exhaustive(
    evaluate: Evaluate,
    *,
    choices: Choices | None = None,
    incumbent: Configs | None = None,
    budget_s: float | None = None,
    max_nodes: int | None = None,
    tolerance: float = 1e-6,
    symmetry: bool = True,
    on_progress: Callable[[Step], None] | None = None,
) -> Optimum:
    """The fastest plan of the space that gives each operator one of ``choices`` (default: ``every_config``), under the
    options of ``evaluate``.

    ``incumbent``: a plan to beat, such as a search's answer, of the space or not. ``budget_s``,
    ``max_nodes``: where to stop; the answer then says what is proved. So does Ctrl-C. ``tolerance``: plans that are
    faster by less than this share are not looked for (0: none is left out, and equal ones are compared one by one).
    ``symmetry``: of plans that differ in the names of interchangeable devices, look at one; they take the same time but
    for the order of what happens at the same moment and for who gets the remainder of an uneven part. Done where the
    choices allow it. Raises StrategyError if an operator has no choice or too many, or if there are too many devices.
    """
    run = _Run(evaluate, tolerance, on_progress)
    run.budget_s, run.max_nodes = budget_s, max_nodes
    return run.go(choices or every_config(run.graph, run.topology), incumbent, symmetry)


class _Stop(Exception):
    """The search is over; the message says why."""


class _Run:
    """One search."""

    def __init__(self, evaluate: Evaluate, tolerance: float, on_progress: Callable[[Step], None] | None) -> None:
        self.evaluate, self.tolerance, self.on_progress = evaluate, tolerance, on_progress
        lowering = evaluate.lowering
        self.graph, self.topology, self.costs = lowering.graph, lowering.topology, lowering.costs
        self.budget_s: float | None = None
        self.max_nodes: int | None = None
        self.best: Configs | None = None
        self.best_s = inf
        self.bound_s = lower_bound(self.graph, self.topology, self.costs, evaluate.options).seconds
        self.nodes = self.pruned = self.simulated = 0
        self.began = time.monotonic()
        self.reported = 0.0

    def go(self, choices: Choices, incumbent: Configs | None, symmetry: bool) -> Optimum:
        if len(self.topology.devices) > MOST_DEVICES:
            raise StrategyError(
                f"topology {self.topology.name} has {len(self.topology.devices)} devices; an exhaustive search can "
                f"take {MOST_DEVICES}",
                "Search a part of the topology (Topology.subset), or use lower_bound.",
            )
        rows = [list(dict.fromkeys(choices(i))) for i in range(len(self.graph.operators))]
        for op, row in zip(self.graph.operators, rows, strict=True):
            if len(row) > MOST_CHOICES:
                raise StrategyError(
                    f"operator {op.name!r} has {len(row)} configs to choose from; an exhaustive search can take "
                    f"{MOST_CHOICES}",
                    "Give fewer choices or fewer devices, or use lower_bound.",
                )
            if not row:
                raise StrategyError(f"operator {op.name!r} has no config to choose from", "Give it at least one.")
        self.rows, self.plans = rows, prod(map(len, rows))
        complete, why = False, "the whole space was searched"
        try:
            self._start(incumbent)
            self._search(Relaxation(self.evaluate.lowering, self.evaluate.options, rows, self._report), symmetry)
            complete = True
            self.bound_s = max(self.bound_s, self.best_s * (1.0 - self.tolerance)) if self.best else inf
        except _Stop as stop:
            why = str(stop)
        except KeyboardInterrupt:
            why = "interrupted"
        return Optimum(
            self.best, self.best_s, min(self.bound_s, self.best_s), complete, self.plans, self.nodes, self.pruned,
            self.simulated, time.monotonic() - self.began, why,
        )  # fmt: skip

    def _start(self, incumbent: Configs | None) -> None:
        """Plans to beat: the given one, and the baselines that belong to the space."""
        if incumbent is not None:
            self._try(incumbent)
        spaces = [set(row) for row in self.rows]
        for strategy in baselines(self.graph, self.topology, self.evaluate.options).values():
            configs = strategy.in_order(self.graph)
            if all(config in row for config, row in zip(configs, spaces, strict=True)):
                self._try(configs)

    def _try(self, configs: Configs) -> None:
        """Simulate a plan, and keep it if it is the best that fits."""
        evaluation = self.evaluate(configs)
        self.simulated += 1
        if evaluation.time_s < self.best_s and evaluation.feasible:
            self.best, self.best_s = configs, evaluation.time_s

    def _search(self, relaxation: Relaxation, symmetry: bool) -> None:
        """Look at all plans that may be faster than the best. Raises _Stop at the end of the budget."""
        self.bound_s = max(self.bound_s, relaxation.bound(np.full(len(self.rows), -1, dtype=np.int64)))
        tree = make_tree(self.rows, search_order(self.graph, self.costs), len(self.topology.devices))
        if symmetry:
            tree.group[:] = groups(self.topology, self.rows)
        outcome = PAUSE
        while outcome != DONE:
            self._report()
            stop = self.nodes + CHUNK if self.max_nodes is None else min(self.nodes + CHUNK, self.max_nodes)
            limit = self.best_s * (1.0 - self.tolerance)
            outcome = int(descend(relaxation.tables, relaxation.work, relaxation.ahead, tree, limit, stop, ROUNDING))
            _, self.nodes, self.pruned = (int(x) for x in tree.scalars)
            if outcome == PLAN:
                self._try(tuple(row[c] for row, c in zip(self.rows, tree.chosen, strict=True)))
            self.bound_s = max(self.bound_s, float(proved(tree)) if outcome != DONE else 0.0)

    def _report(self) -> None:
        elapsed = time.monotonic() - self.began
        if self.max_nodes is not None and self.nodes >= self.max_nodes:
            raise _Stop(f"the budget of {self.max_nodes} partial plans was used up")
        if self.budget_s is not None and elapsed >= self.budget_s:
            raise _Stop(f"the budget of {self.budget_s:g} s was used up")
        if self.on_progress is not None and elapsed - self.reported >= 0.1:
            self.reported = elapsed
            self.on_progress(
                Step(self.plans, self.nodes, self.simulated, self.best_s, min(self.bound_s, self.best_s), elapsed)
            )


def make_tree(rows: Sequence[Sequence[OperatorConfig]], order: Sequence[int], devices: int) -> Tree:
    """A search at its beginning, in which no devices can be exchanged."""
    operators, most = len(rows), max(map(len, rows))
    listed = np.full((operators, most, devices), -1, dtype=np.int64)
    for i, row in enumerate(rows):
        for c, config in enumerate(row):
            listed[i, c, : len(config.devices)] = config.devices
    opened, width, position, used = np.zeros((4, operators), dtype=np.int64)
    return Tree(
        order=np.array(order, dtype=np.int64), chosen=np.full(operators, -1, dtype=np.int64), opened=opened,
        child=np.zeros((operators, most), dtype=np.int64), bound=np.zeros((operators, most)), width=width,
        position=position, used=used, listed=listed, group=np.arange(devices), scalars=np.zeros(3, dtype=np.int64),
    )  # fmt: skip


def search_order(graph: OperatorGraph, costs: Costs) -> list[int]:
    """Every operator after its producers, those of the longest path first, and what has no producers as late as
    possible: then most of a partial plan hangs together, and its bound is sharp."""
    bound: dict[int, float] = {}
    for i, op in enumerate(graph.operators):
        forward, backward = costs.compute_many(i, {a: np.array([n]) for a, n in op.sizes.items()}, 0)
        before = [bound[graph.producer[name]] for name in op.inputs if name in graph.producer]
        bound[i] = float(forward[0] + backward[0]) + max(before, default=0.0)
    order: dict[int, None] = {}

    def visit(i: int) -> None:
        if i not in order:
            producers = {graph.producer[name] for name in graph.operators[i].inputs if name in graph.producer}
            for producer in sorted(producers, key=lambda p: (-bound[p], p)):
                visit(producer)
            order[i] = None

    for i in sorted(bound, key=lambda i: (-bound[i], i)):
        visit(i)
    return list(order)
