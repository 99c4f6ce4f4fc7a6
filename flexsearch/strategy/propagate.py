"""Configs that follow from other configs, so that tensors need not move: degrees are carried along an edge through the
dimensions of its tensor.

A dimension is split by at most one axis of each operator that touches it: its only axis, the first long one of a merged
dimension ``(c h w)``, the splittable one of a window ``(2*h+KH-1)``. Two operators that touch the same tensor can so
pass degrees to each other, in either direction. A degree that the other side cannot take (a whole axis, an axis that
the tensor lacks, fewer indices than parts) turns into replicas: its devices then hold the same piece.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from flexsearch.errors import StrategyError
from flexsearch.graph import Operator, OperatorGraph, chunks
from flexsearch.graph.notation import Operand
from flexsearch.strategy.config import OperatorConfig, make_config


@dataclass(frozen=True, slots=True)
class Link:
    """A tensor between two operators. ``pairs``: (axis of the one asked, axis of ``target``) that split the same
    dimension of it. ``forward``: ``target`` reads what the one asked makes; else the other way round. ``picked``:
    (axis of the producer, its only index that the consumer reads)."""

    target: int
    tensor: str
    pairs: tuple[tuple[str, str], ...]
    nbytes: int
    forward: bool
    picked: tuple[tuple[str, int], ...] = ()


def carriers(op: Operator, operand: Operand) -> tuple[str | None, ...]:
    """For each dimension of ``operand`` the axis of ``op`` that can split it, or None."""
    carrying: list[str | None] = []
    for dimension in operand.dimensions:
        long = [axis for axis in dimension.axes if op.sizes[axis] > 1]
        candidates = long[:1] if dimension.merged else long
        carrying.append(next((axis for axis in candidates if axis in op.splittable), None))
    return tuple(carrying)


def picks(producer: Operator, written_as: Operand, read: Operand) -> tuple[tuple[str, int], ...]:
    """Axes of ``producer`` of which the reader wants a single index, and that index (statistics of the first group)."""
    indices = []
    for written, dimension in zip(written_as.dimensions, read.dimensions, strict=True):
        if not dimension.axes and written.plain and written.axes[0] in producer.splittable:
            indices.append((written.axes[0], dimension.offset))
    return tuple(indices)


def carry(
    source: Operator,
    config: OperatorConfig,
    target: Operator,
    pairs: Sequence[tuple[str, str]],
    picked: Sequence[tuple[str, int]] = (),
) -> OperatorConfig:
    """The config of ``target`` that uses the devices of ``config`` and takes over the degrees of the paired axes.

    ``pairs``: (axis of ``source``, axis of ``target``). Every device keeps its place along the carried axes. Of the
    ``picked`` axes of ``source`` only the devices that hold the index are used.
    """
    axes, shares = [axis for axis, _ in config.degrees], dict(config.shares)
    to = {a: b for a, b in pairs if 1 < config.degree(a) <= target.sizes[b]}
    where = {b: axes.index(a) for a, b in reversed(to.items())}  # an axis split twice follows the first dimension
    order = [where[b] for b in target.sizes if b in where]
    rest = [k for k in range(len(axes) + 1) if k not in order]
    degrees = {b: config.degrees[k][1] for b, k in where.items()}
    uneven = {b: shares[axes[k]] for b, k in where.items() if axes[k] in shares and target.roles[b] == "sample"}
    order += rest
    if not picked and order == sorted(order):
        return make_config(target, degrees, config.devices, shares=uneven)
    grid = np.array(config.devices).reshape([parts for _, parts in config.degrees] + [config.replicas])
    for axis, index in picked:
        if axis in axes:
            parts = config.degree(axis)
            cut = chunks(source.sizes[axis], parts, shares.get(axis, ()))
            part = next(k for k, (_, high) in enumerate(cut) if index < high)
            grid = grid.take([part], axes.index(axis))
    return make_config(target, degrees, grid.transpose(order).ravel().tolist(), shares=uneven)


class Propagation:
    """Which operators of a graph can follow which, computed once."""

    def __init__(self, graph: OperatorGraph) -> None:
        self.graph = graph
        first: dict[object, int] = {}
        self._like = [first.setdefault((op.kind, op.pattern, op.axes), i) for i, op in enumerate(graph.operators)]
        self._carried: dict[tuple[object, ...], OperatorConfig] = {}

    def _carry(
        self, source: int, config: OperatorConfig, target: int, pairs: tuple[tuple[str, str], ...],
        picked: tuple[tuple[str, int], ...],
    ) -> OperatorConfig:  # fmt: skip
        """``carry``, once for all operators that are alike."""
        key = self._like[source], config, self._like[target], pairs, picked
        if (cached := self._carried.get(key)) is None:
            operators = self.graph.operators
            cached = self._carried[key] = carry(operators[source], config, operators[target], pairs, picked)
        return cached

    @cached_property
    def links(self) -> tuple[tuple[Link, ...], ...]:
        """For each operator its links to producers and consumers over activations, in graph order."""
        graph = self.graph
        links_of: list[dict[tuple[int, tuple[tuple[str, str], ...]], Link]] = [{} for _ in graph.operators]
        joined: dict[tuple[int, int, int, int], tuple[tuple[tuple[str, str], ...], tuple[tuple[str, int], ...]]] = {}
        for c, consumer in enumerate(graph.operators):
            for place, name in enumerate(consumer.inputs):
                if (p := graph.producer.get(name)) is None:
                    continue
                output = graph.operators[p].outputs.index(name)
                key = self._like[p], output, self._like[c], place
                if key not in joined:
                    joined[key] = _joined(graph.operators[p], output, consumer, place)
                pairs, picked = joined[key]
                back = tuple((b, a) for a, b in pairs)
                nbytes = graph.tensor[name].nbytes
                links_of[p].setdefault((c, pairs), Link(c, name, pairs, nbytes, True, picked))
                links_of[c].setdefault((p, back), Link(p, name, back, nbytes, False, picked))
        return tuple(tuple(links.values()) for links in links_of)

    def follow(self, source: int, config: OperatorConfig, target: int) -> OperatorConfig:
        """Config of operator ``target`` that follows ``config`` of its producer or consumer ``source``. Where several
        tensors join them, the one that carries most. Raises StrategyError if none does."""
        links = [link for link in self.links[source] if link.target == target]
        if not links:
            a, b = self.graph.operators[source].name, self.graph.operators[target].name
            raise StrategyError(f"operators {a!r} and {b!r} share no activation; only neighbours can follow")
        return max((self.over(source, config, link) for link in links), key=lambda config_of_link: config_of_link.parts)

    def over(self, source: int, config: OperatorConfig, link: Link) -> OperatorConfig:
        """Config of ``link.target`` that follows ``config`` of operator ``source`` over this link."""
        return self._carry(source, config, link.target, link.pairs, link.picked if link.forward else ())

    def best(self, target: int, configs: Mapping[int, OperatorConfig]) -> OperatorConfig | None:
        """What ``target`` should be to follow its producers among ``configs``. The config with most parts wins, as
        replicas waste devices; then the largest tensor, then the first. None if it has no such neighbour."""
        candidates: list[tuple[int, int, OperatorConfig]] = []
        for link in self.links[target]:
            if not link.forward and link.target in configs:
                back = tuple((a, b) for b, a in link.pairs)
                config = self._carry(link.target, configs[link.target], target, back, link.picked)
                candidates.append((config.parts, link.nbytes, config))
        return max(candidates, key=lambda entry: entry[:2])[2] if candidates else None


def _joined(
    producer: Operator, output: int, consumer: Operator, place: int
) -> tuple[tuple[tuple[str, str], ...], tuple[tuple[str, int], ...]]:
    """``pairs`` and ``picked`` of the link over an output that is read at a place."""
    written, read = producer.access.outputs[output], consumer.access.inputs[place]
    both = zip(carriers(producer, written), carriers(consumer, read), strict=True)
    return tuple((a, b) for a, b in both if a is not None and b is not None), picks(producer, written, read)


def follow(graph: OperatorGraph, source: int, config: OperatorConfig, target: int) -> OperatorConfig:
    """Config of operator ``target`` that follows ``config`` of its neighbour ``source`` (indices), in either direction.
    Raises StrategyError if no activation joins them. For many calls on one graph keep a ``Propagation``."""
    return Propagation(graph).follow(source, config, target)
