"""The fastest plan of a finite space, with proof: depth-first branch and bound.

Operators get their configs one after the other, along the graph. ``relaxation`` gives a lower bound on every completion
of a partial plan; if that is not below the time of the best plan so far, the partial plan is pruned. Complete plans
that remain are simulated. (FlexFlow, MLSys 2019, section 8.4, does the same with A* for two small networks.)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from math import inf, prod
from typing import Final

import numpy as np

from flexsearch.cost import Costs
from flexsearch.errors import StrategyError
from flexsearch.graph import Operator, OperatorGraph
from flexsearch.search.bound import ROUNDING, lower_bound
from flexsearch.search.branch import DONE, PAUSE, PLAN, Tree, descend, proved
from flexsearch.search.evaluate import Configs, Evaluator
from flexsearch.search.relaxation import Relaxation
from flexsearch.search.space import _factored
from flexsearch.strategy import OperatorConfig, Options, make_config
from flexsearch.strategy.baselines import baselines, has_weights
from flexsearch.topology import Topology

CHUNK: Final = 20_000
"""Partial plans between two looks at the clock."""
MOST_DEVICES: Final = 8
MOST_CHOICES: Final = 1000
"""Of one operator. The tables grow with their square, and with two to the power of the number of devices."""

Choices = Callable[[int], Sequence[OperatorConfig]]
"""Operator -> the configs that it may have."""


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


def every_config(graph: OperatorGraph, topology: Topology) -> Choices:
    """All legal configs: any degrees and replicas, any devices in any order (that of replicas of a piece does not
    matter and is ascending), weights whole or in parts."""
    count = len(topology.devices)

    def choices(operator: int) -> list[OperatorConfig]:
        op = graph.operators[operator]
        return [
            make_config(op, degrees, devices, shard)
            for degrees in _degrees(op, count)
            for used in range(prod(degrees.values()), count + 1, prod(degrees.values()))
            for devices in _device_lists(count, used, used // prod(degrees.values()))
            for shard in _storage(graph, operator, used)
        ]

    return choices


def aligned_configs(graph: OperatorGraph, topology: Topology) -> Choices:
    """Configs on blocks of devices: degrees whose product divides a divisor n of their number, on n neighbouring
    devices that begin at a multiple of n, in ascending order; the rest are replicas; weights whole or in parts."""
    count = len(topology.devices)

    def choices(operator: int) -> list[OperatorConfig]:
        op = graph.operators[operator]
        return [
            make_config(op, dict(zip(op.splittable, degrees, strict=True)), range(first, first + used), shard)
            for used in range(1, count + 1)
            if count % used == 0
            for degrees in _factored(used, tuple(op.sizes[a] for a in op.splittable))
            for first in range(0, count, used)
            for shard in _storage(graph, operator, used)
        ]

    return choices


def _storage(graph: OperatorGraph, operator: int, used: int) -> tuple[bool, ...]:
    return (False, True) if used > 1 and has_weights(graph, operator) else (False,)


def _degrees(op: Operator, count: int) -> Iterator[dict[str, int]]:
    """All degrees whose product is at most ``count``."""

    def extend(k: int, left: int, found: dict[str, int]) -> Iterator[dict[str, int]]:
        if k == len(op.splittable):
            yield dict(found)
            return
        axis = op.splittable[k]
        for degree in range(1, min(left, op.sizes[axis]) + 1):
            yield from extend(k + 1, left // degree, found | {axis: degree})

    yield from extend(0, count, {})


def _device_lists(count: int, used: int, replicas: int) -> Iterator[tuple[int, ...]]:
    """Ordered choices of devices, the replicas of a piece in ascending order."""
    for devices in permutations(range(count), used):
        if all(devices[k] < devices[k + 1] for k in range(used - 1) if (k + 1) % replicas):
            yield devices


def exhaustive(
    graph: OperatorGraph,
    topology: Topology,
    costs: Costs,
    options: Options | None = None,
    *,
    choices: Choices | None = None,
    incumbent: Configs | None = None,
    budget_s: float | None = None,
    max_nodes: int | None = None,
    tolerance: float = 1e-6,
    symmetry: bool = True,
    on_progress: Callable[[Step], None] | None = None,
) -> Optimum:
    """The fastest plan of the space that gives each operator one of ``choices`` (default: ``every_config``).

    ``incumbent``: a plan to beat, such as a search's answer, of the space or not. ``budget_s``,
    ``max_nodes``: where to stop; the answer then says what is proved. So does Ctrl-C. ``tolerance``: plans that are
    faster by less than this share are not looked for (0: none is left out, and equal ones are compared one by one).
    ``symmetry``: of plans that differ in the names of interchangeable devices, look at one; they take the same time but
    for the order of what happens at the same moment and for who gets the remainder of an uneven part. Done where the
    choices allow it. Raises StrategyError if an operator has no choice or too many, or if there are too many devices.
    """
    run = _Run(graph, topology, costs, options or Options(), tolerance, on_progress)
    run.budget_s, run.max_nodes = budget_s, max_nodes
    return run.go(choices or every_config(graph, topology), incumbent, symmetry)


class _Stop(Exception):
    """The search is over; the message says why."""


class _Run:
    """One search."""

    def __init__(
        self, graph: OperatorGraph, topology: Topology, costs: Costs, options: Options, tolerance: float,
        on_progress: Callable[[Step], None] | None,
    ) -> None:  # fmt: skip
        self.graph, self.topology, self.costs, self.options = graph, topology, costs, options
        self.tolerance, self.on_progress = tolerance, on_progress
        self.budget_s: float | None = None
        self.max_nodes: int | None = None
        self.evaluate = Evaluator(graph, topology, costs, options)
        self.best: Configs | None = None
        self.best_s = inf
        self.bound_s = lower_bound(graph, topology, costs, options).seconds
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
            self._search(Relaxation(self.evaluate.lowering, self.options, rows, self._report), symmetry)
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
        known = [set(row) for row in self.rows]
        for strategy in baselines(self.graph, self.topology, self.options).values():
            configs = strategy.in_order(self.graph)
            if all(config in row for config, row in zip(configs, known, strict=True)):
                self._try(configs)

    def _try(self, configs: Configs) -> None:
        """Simulate a plan, and keep it if it is the best that fits."""
        found = self.evaluate(configs)
        self.simulated += 1
        if found.time_s < self.best_s and found.feasible:
            self.best, self.best_s = configs, found.time_s

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


def groups(topology: Topology, rows: Sequence[Sequence[OperatorConfig]]) -> list[int]:
    """For each device the first that it can exchange its name with, without changing the topology or the choices."""
    group = list(range(len(topology.devices)))
    for b in group.copy():
        for a in range(b):
            if group[a] == a and interchangeable(topology, a, b) and all(closed(row, a, b) for row in rows):
                group[b] = a
                break
    return group


def closed(row: Sequence[OperatorConfig], a: int, b: int) -> bool:
    """Whether exchanging two devices makes of every choice another choice."""
    other = {a: b, b: a}
    known = set(row)
    return all(renamed(config, other) in known for config in row)


def renamed(config: OperatorConfig, names: Mapping[int, int]) -> OperatorConfig:
    """The config on other devices; replicas of a piece in ascending order."""
    new = [names.get(d, d) for d in config.devices]
    width = config.replicas
    return config.on(d for k in range(0, len(new), width) for d in sorted(new[k : k + width]))


def interchangeable(topology: Topology, a: int, b: int) -> bool:
    """Whether exchanging the names of two devices leaves the topology as it is: figures, processors, and routes with
    the resources that they share."""
    nameless = {"name": "", "host": "", "processor": None}
    if topology.devices[a].model_copy(update=nameless) != topology.devices[b].model_copy(update=nameless):
        return False
    count, other = len(topology.devices), {a: b, b: a}
    same: dict[int, int] = {}
    for i in range(count):
        x = other.get(i, i)
        if same.setdefault(topology.processor_of[i], topology.processor_of[x]) != topology.processor_of[x]:
            return False
        for j in range(count):
            if i == j:
                continue
            one, two = topology.route(i, j), topology.route(x, other.get(j, j))
            if one.latency_s != two.latency_s or len(one.resources) != len(two.resources):
                return False
            for r, s in zip(one.resources, two.resources, strict=True):
                if same.setdefault(r, s) != s or topology.resources[r].bandwidth != topology.resources[s].bandwidth:
                    return False
    return len(set(same.values())) == len(same)
