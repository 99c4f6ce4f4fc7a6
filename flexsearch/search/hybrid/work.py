"""What each operator takes, of a graph whose groups of devices are split by Megatron's rules: the numbers from which
layouts are estimated, for any number of samples, without lowering anything."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import ceil, prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from flexsearch.cost import Costs, Profile
from flexsearch.cost.communication import Pricing
from flexsearch.cost.updates import bytes_in_training
from flexsearch.errors import NotationError
from flexsearch.graph import OperatorGraph
from flexsearch.graph.batch import microbatch
from flexsearch.graph.ops import saved_tensors
from flexsearch.lower.recompute import NO_REGION, recomputations
from flexsearch.strategy import OperatorConfig, Options
from flexsearch.strategy.baselines import inside_group
from flexsearch.strategy.records import Recompute
from flexsearch.topology import Topology

Sums = npt.NDArray[np.float64]
"""Sums over the operators before each one, and over all: those of a run are the difference of two."""


class Work(NamedTuple):
    """Of one microbatch on one device of a group. Seconds: ``forward``, ``backward``, ``again`` (computed a second
    time), exchanges inside the group included; of a backward pass in two halves, ``weight`` (gradients of weights), and
    by how much both take ``longer`` than ``backward``."""

    forward: Sums
    backward: Sums
    weight: Sums
    longer: Sums
    again: Sums


class Stored(NamedTuple):
    """Bytes on one device of a group. ``weights``: of parameters; ``states``: of those, their gradients and what the
    optimizer keeps; ``kept``: of activations, by sample, for the backward pass; ``tensors``: number of parameters."""

    weights: Sums
    states: Sums
    kept: Sums
    tensors: Sums


def sums(values: npt.ArrayLike) -> Sums:
    """0 and the sums of all leading values."""
    return np.concatenate([[0.0], np.cumsum(np.asarray(values, np.float64))])


class Works:
    """``Work`` and ``Stored`` of one graph on one topology, cached. ``graph``: of the whole batch, in its precision."""

    def __init__(self, graph: OperatorGraph, topology: Topology, profile: Profile | None, options: Options) -> None:
        self.graph, self.topology, self.options = graph, topology, options
        self.costs, self.pricing = Costs(graph, topology, profile), Pricing(topology, profile)
        self.count = len(graph.operators)
        self.kinds: dict[int, int] = {}
        """Kind of device -> one of them."""
        for device, kind in enumerate(self.costs.kinds.tolist()):
            self.kinds.setdefault(kind, device)
        self._configs: dict[int, list[OperatorConfig]] = {}
        self._works: dict[tuple[int, int, Recompute, int], Work] = {}
        self._computed: dict[tuple[int, int, int], Sums] = {}
        self._stored: dict[tuple[int, Recompute], Stored] = {}
        self._partial: dict[int, tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]] = {}

    def configs(self, tensor: int) -> list[OperatorConfig]:
        """Megatron's splits of a sample in a group of so many devices: their degrees hold for more of them."""
        if tensor not in self._configs:
            graph = self.graph if tensor == 1 else self._sample
            self._configs[tensor] = inside_group(graph, self.topology, tensor)
        return self._configs[tensor]

    @cached_property
    def _sample(self) -> OperatorGraph:
        """The graph of one sample; of the whole batch, if samples cannot be told apart."""
        try:
            return microbatch(self.graph, self.graph.batch)
        except NotationError:
            return self.graph

    @cached_property
    def regions(self) -> dict[Recompute, list[int]]:
        """By setting, the region of each operator; without settings by which nothing could be computed again."""
        return recomputations(self.graph)

    @cached_property
    def wider(self) -> float:
        """How many times as large gradients of weights are as these."""
        weights = self.graph.of_kind("parameter")
        return sum(self.graph.gradient[w.name].nbytes for w in weights) / max(1, sum(w.nbytes for w in weights))

    # ---- time

    @cached_property
    def launches(self) -> Sums:
        """Operators that a host launches for those before each operator: forward and backward; (2, operators + 1)."""
        counts = np.array([self.costs.launches(i)[:2] for i in range(self.count)], np.float64).reshape(-1, 2)
        return np.concatenate([np.zeros((1, 2)), counts.cumsum(axis=0)]).T

    def launch_s(self, kind: int) -> float:
        """Seconds that the host of such a device takes to launch an operator."""
        return self.costs.launch_s(self.kinds[kind])

    def work(self, tensor: int, samples: int, recompute: Recompute, kind: int) -> Work:
        """Of a microbatch of so many samples on a kind of device."""
        key = tensor, samples, recompute, kind
        if key not in self._works:
            rows = self._compute(tensor, samples, kind)
            again = np.where(np.array(self.regions[recompute]) != NO_REGION, rows[0], 0.0)
            self._works[key] = Work(*map(sums, (*rows, again)))
        return self._works[key]

    def _compute(self, tensor: int, samples: int, kind: int) -> Sums:
        """Seconds of each operator, rows as the first columns of ``Work``."""
        key = tensor, samples, kind
        if key in self._computed:
            return self._computed[key]
        configs, costs, rows = self.configs(tensor), self.costs, np.zeros((4, self.count))
        for i, leader in enumerate(costs.alike):
            if leader != i and configs[leader].degrees == configs[i].degrees:
                rows[:, i] = rows[:, leader]
                continue
            extents = [self._extents(i, configs[i], samples)]
            forward, backward = costs.of_extents(i, extents, kind)[:, 0]
            inputs, weight = costs.halves(i, extents, kind)[:, 0]
            cast = costs.casting(i, extents, kind)[0]
            rows[:, i] = forward, backward + cast, weight + cast, inputs + weight - backward
        if tensor > 1:
            for row, nbytes in zip(rows[:2], self._partial_sums(tensor), strict=True):
                row += self._exchanged(tensor, nbytes * samples // self.graph.batch)
        self._computed[key] = rows
        return rows

    def _extents(self, operator: int, config: OperatorConfig, samples: int) -> tuple[int, ...]:
        """Indices of the largest piece on each axis."""
        op = self.graph.operators[operator]
        extents = []
        for axis in op.access.axes:
            size = op.sizes[axis]
            if op.roles[axis] == "sample":
                size = max(1, size * samples // self.graph.batch)
            extents.append(ceil(size / config.degree(axis)))
        return tuple(extents)

    def _partial_sums(self, tensor: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """By operator, bytes of results of the whole batch that are sums over the group: of outputs, and of gradients
        of inputs (those of one tensor once)."""
        if tensor in self._partial:
            return self._partial[tensor]
        graph, outputs, gradients = self.graph, np.zeros(self.count, np.int64), np.zeros(self.count, np.int64)
        seen: set[str] = set()
        for i, (op, config) in enumerate(zip(graph.operators, self.configs(tensor), strict=True)):
            axes = {axis for axis, _ in config.degrees}
            for operand, name in zip(op.access.outputs, op.outputs, strict=True):
                outputs[i] += graph.tensor[name].nbytes * bool(axes - set(operand.names()))
            for operand, name in zip(op.access.inputs, op.inputs, strict=True):
                summed = axes - set(operand.names()) and name in graph.differentiable and graph.has_backward[i]
                if graph.tensor[name].kind == "activation" and summed and name not in seen:
                    seen.add(name)
                    gradients[i] += graph.tensor[name].nbytes
        self._partial[tensor] = outputs, gradients
        return self._partial[tensor]

    def _exchanged(self, tensor: int, nbytes: npt.NDArray[np.int64]) -> Sums:
        """Seconds of all-reduces inside the first group."""
        sizes, where = np.unique(nbytes, return_inverse=True)
        seconds = [self.pricing.all_reduce(range(tensor), int(n)).duration_s if n else 0.0 for n in sizes]
        return np.array(seconds)[where]

    # ---- memory

    def stored(self, tensor: int, recompute: Recompute) -> Stored:
        """Bytes on each device of a group."""
        key = tensor, recompute
        if key not in self._stored:
            weights, states, tensors = self._states(tensor)
            kept = self._kept(tensor, self.regions[recompute])
            self._stored[key] = Stored(sums(weights), sums(states), sums(kept), sums(tensors))
        return self._stored[key]

    def _states(self, tensor: int) -> tuple[Sums, Sums, Sums]:
        graph, options, configs = self.graph, self.options, self.configs(tensor)
        kept = options.optimizer, options.precision
        weights, states, tensors = (np.zeros(self.count) for _ in range(3))
        for parameter in graph.of_kind("parameter"):
            readers = graph.consumers[parameter.name]
            if not readers:
                continue
            i, position = readers[0]
            parts = _parts(configs[i], graph.operators[i].access.inputs[position].names())
            weights[i] += parameter.nbytes / parts
            states[i] += bytes_in_training(parameter, graph.gradient[parameter.name], *kept) / parts
            tensors[i] += 1
        return weights, states, tensors

    def _kept(self, tensor: int, regions: Sequence[int]) -> Sums:
        """By the operator that makes them, bytes a sample of the activations that live until the backward pass."""
        graph, configs, kept = self.graph, self.configs(tensor), np.zeros(self.count)
        rules = saved_tensors(graph)
        root = {t.name: t.name for t in graph.of_kind("activation")}
        for op, rule in zip(graph.operators, rules, strict=True):
            if rule.alias and op.inputs[0] in root:
                root.update((name, root[op.inputs[0]]) for name in op.outputs)
        saved, crossing = set[str](), set[str]()
        for i, (op, rule) in enumerate(zip(graph.operators, rules, strict=True)):
            used = [*(op.inputs if rule.inputs else ()), *(op.outputs if rule.outputs else ())]
            saved |= {root[name] for name in used if name in root and graph.has_backward[i]}
            inputs = {root[name] for name in op.inputs if name in root}
            crossing |= {name for name in inputs if regions[graph.producer[name]] != regions[i] != NO_REGION}
            if regions[i] == NO_REGION and rule.inputs:
                crossing |= inputs
        for name in saved | crossing:
            maker = graph.producer[name]
            if name in crossing or regions[maker] == NO_REGION:
                op = graph.operators[maker]
                parts = _parts(configs[maker], op.access.outputs[op.outputs.index(name)].names())
                kept[maker] += graph.tensor[name].nbytes / parts / graph.batch
        return kept


def _parts(config: OperatorConfig, axes: set[str] | frozenset[str]) -> int:
    """Into how many parts an operand with these axes is divided."""
    return prod(parts for axis, parts in config.degrees if axis in axes)
