"""The configs that each operator may have: drawn at random, or listed as alternatives to a given one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property, lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt

from flexsearch.graph import Operator, OperatorGraph
from flexsearch.graph.ops import forward_flops
from flexsearch.strategy import OperatorConfig, make_config
from flexsearch.strategy.baselines import has_weights, is_heavy
from flexsearch.strategy.depth import unrolled
from flexsearch.strategy.propagate import Link, Propagation
from flexsearch.topology import Topology

Rule = Callable[[int, OperatorConfig], OperatorConfig]
"""(operator, any config of it) -> the one nearest to it that is allowed. Applied twice, it changes nothing more."""

FEW: Final = 8
"""Up to this many devices, numbers of devices that do not divide them evenly are drawn twice as often: there are few,
and the best plan may need them."""


class Space:
    """What can be changed in plans of one graph on one topology. ``rule`` makes the space smaller: what a user pins."""

    def __init__(self, graph: OperatorGraph, topology: Topology, rule: Rule | None = None) -> None:
        self.graph, self.topology, self.rule = graph, topology, rule
        self.propagation = Propagation(graph)
        self.count = len(topology.devices)
        self._even = 0.8 if self.count <= FEW else 0.9
        self._blocks: dict[tuple[int, bool], tuple[OperatorConfig, ...]] = {}
        self.weighted = tuple(i for i in range(len(graph.operators)) if has_weights(graph, i))
        self.leaders = tuple(i for i in range(len(graph.operators)) if is_heavy(graph, i)) or tuple(
            range(len(graph.operators))
        )

    def fix(self, operator: int, config: OperatorConfig) -> OperatorConfig:
        """The allowed config that is nearest to ``config``."""
        return config if self.rule is None else self.rule(operator, config)

    def fixed(self, configs: Iterable[OperatorConfig]) -> tuple[OperatorConfig, ...]:
        """The allowed plan that is nearest to ``configs``."""
        return tuple(self.fix(i, config) for i, config in enumerate(configs))

    @cached_property
    def groups(self) -> dict[int, tuple[tuple[int, int, Link], ...]]:
        """Leader (an operator worth a config of its own) -> the operators around it that follow it, as (source,
        operator, link from source), in an order in which every source comes first."""
        groups: dict[int, list[tuple[int, int, Link]]] = {leader: [] for leader in self.leaders}
        of = {leader: leader for leader in self.leaders}
        indices = range(len(self.graph.operators))
        for forward, order in ((True, indices), (False, reversed(indices))):
            for i in order:
                if i in of:
                    continue
                links = [
                    (link.nbytes, -source, link)
                    for source in {link.target for link in self.propagation.links[i]} & of.keys()
                    for link in self.propagation.links[source]
                    if link.target == i and link.forward == forward
                ]
                if links:
                    _, minus, link = max(links, key=lambda entry: entry[:2])
                    of[i] = of[-minus]
                    groups[of[i]].append((-minus, i, link))
        return {leader: tuple(members) for leader, members in groups.items()}

    @cached_property
    def importance(self) -> npt.NDArray[np.float64]:
        """Share of each leader in what there is to gain, summing to 1: half of it the same for all, the rest by FLOPs
        and by bytes of weights, whose gradients are to be synchronised."""
        graph = self.graph
        operators = [graph.operators[i] for i in self.leaders]
        flops = np.array([1.0 + forward_flops(op, op.sizes) for op in operators])
        nbytes = np.array([1.0 + sum(graph.tensor[n].nbytes for n in op.inputs if graph.tensor[n].kind == "parameter")
                           for op in operators])  # fmt: skip
        return np.asarray(0.5 / len(operators) + 0.25 * flops / flops.sum() + 0.25 * nbytes / nbytes.sum())

    @cached_property
    def by_importance(self) -> tuple[int, ...]:
        """All operators: the leaders, the important ones first, then the others in graph order."""
        importance = dict(zip(self.leaders, self.importance.tolist(), strict=True))
        return tuple(sorted(range(len(self.graph.operators)), key=lambda i: (-importance.get(i, 0.0), i)))

    @cached_property
    def classes(self) -> tuple[tuple[int, ...], ...]:
        """Leaders that a move may change together: those of the same kind and shape (the same layer in repeated
        blocks), then the steps of each unrolled layer. Only classes of several.

        A layer may be applied to tensors of different sizes (towers with shared weights): those are classes apart,
        as a degree that one of them can take may be impossible for another."""
        found: dict[tuple[object, ...], list[int]] = {}
        for i in self.leaders:
            found.setdefault(self.shape(i), []).append(i)
        steps: dict[tuple[object, ...], list[int]] = {}
        for i, layer in unrolled(self.graph).items():
            if i in self.groups:
                steps.setdefault((layer, *self.shape(i)), []).append(i)
        classes = (tuple(sorted(members)) for members in (*found.values(), *steps.values()) if len(members) > 1)
        return tuple(dict.fromkeys(classes))

    @cached_property
    def parts(self) -> tuple[tuple[int, ...], ...]:
        """What a coarse plan gives one config each: the classes, and the leaders that are in none."""
        several = {i for members in self.classes for i in members}
        return (*self.classes, *((i,) for i in self.leaders if i not in several))

    @cached_property
    def loose_classes(self) -> tuple[tuple[int, ...], ...]:
        """As ``classes``, of operators that are no leaders."""
        found: dict[tuple[object, ...], list[int]] = {}
        for i in range(len(self.graph.operators)):
            if i not in self.groups:
                found.setdefault(self.shape(i), []).append(i)
        return tuple(tuple(members) for members in found.values() if len(members) > 1)

    def shape(self, operator: int) -> tuple[object, ...]:
        """What operators have in common that can have each other's configs."""
        op = self.graph.operators[operator]
        return op.kind, op.pattern, op.axes

    def draw(self, rng: np.random.Generator, operator: int) -> OperatorConfig:
        """A random config over the whole legal space. Plans that use all devices, one axis and neighbouring devices are
        likelier, as they are better; every legal config of prime factors of its number of devices can come."""
        op, count = self.graph.operators[operator], self._draw_count(rng)
        slots = [*op.splittable, None]
        favourite = slots[rng.integers(len(slots))] if rng.random() < 0.6 else None
        degrees = dict.fromkeys(op.splittable, 1)
        replicas = 1
        for prime in _primes(count):
            order = [slots[k] for k in rng.permutation(len(slots))]
            if favourite is not None:
                order.insert(0, favourite)
            axis = next((a for a in order if a is None or degrees[a] * prime <= op.sizes[a]), None)
            if axis is None:
                replicas *= prime if rng.random() < 0.5 else 1  # else fewer devices
            else:
                degrees[axis] *= prime
        used = replicas * int(np.prod(list(degrees.values()), dtype=np.int64))
        shard = operator in self.weighted and used > 1 and rng.random() < 0.05
        return make_config(op, degrees, self._draw_devices(rng, used), shard)

    def _draw_count(self, rng: np.random.Generator) -> int:
        kind = rng.random()
        if kind < 0.5:
            return self.count
        options = self.counts if kind < self._even else range(1, self.count + 1)
        return int(options[rng.integers(len(options))])

    def _draw_devices(self, rng: np.random.Generator, count: int) -> tuple[int, ...]:
        kind = rng.random()
        if kind < 0.05:
            return tuple(int(d) for d in rng.permutation(self.count)[:count])
        if kind < 0.15:  # spread over the hosts
            step = self.count // count
            first = int(rng.integers(step))
            return tuple(range(first, first + step * count, step))
        step = count if self.count % count == 0 else 1
        first = step * int(rng.integers((self.count - count) // step + 1))
        return tuple(range(first, first + count))

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Numbers of devices that divide the machine evenly."""
        return tuple(n for n in range(1, self.count + 1) if self.count % n == 0)

    def draw_simple(self, rng: np.random.Generator, operator: int, samples: bool = False) -> OperatorConfig:
        """As ``draw``, among configs that split one axis at most (``samples``: of samples), over neighbouring devices:
        an aligned block, or, on FEW devices, now and then any number of them."""
        op = self.graph.operators[operator]
        uneven = self.count <= FEW and rng.random() >= self._even
        options = range(1, self.count + 1) if uneven else self.counts
        count = int(options[rng.integers(len(options))])
        axes = [a for a in (op.axes_of("sample") if samples else op.splittable) if op.sizes[a] >= count]
        if axes and count > 1:
            degrees = {axes[rng.integers(len(axes))]: count}
        else:
            degrees, count = {}, 1
        step = count if self.count % count == 0 else 1
        first = step * int(rng.integers((self.count - count) // step + 1))
        return make_config(op, degrees, range(first, first + count))

    def alternatives(self, operator: int, configs: tuple[OperatorConfig, ...]) -> Iterator[OperatorConfig]:
        """Configs of one operator to try with everything else fixed: what its neighbours suggest, other weights
        storage, then every way to factor a divisor of the number of devices over its axes, on each aligned block."""
        now = configs[operator]
        seen = {now}
        for found in self._alternatives(operator, configs):
            candidate = self.fix(operator, found)
            if candidate not in seen:
                seen.add(candidate)
                yield candidate

    def _alternatives(self, operator: int, configs: tuple[OperatorConfig, ...]) -> Iterator[OperatorConfig]:
        op, shard = self.graph.operators[operator], configs[operator].shard_weights
        for link in self.propagation.links[operator]:
            back = next(x for x in self.propagation.links[link.target] if x.target == operator)
            yield sharded(self.propagation.over(link.target, configs[link.target], back), shard)
        if operator in self.weighted and len(configs[operator].devices) > 1:
            yield sharded(configs[operator], not shard)
        if (known := self._blocks.get((operator, shard))) is None:
            known = self._blocks[operator, shard] = tuple(self._on_blocks(op, shard))
        yield from known

    @cached_property
    def alternatives_on_blocks(self) -> int:
        """How many of all operators' alternatives lie on aligned blocks: about what a look at all of them takes."""
        return sum(
            len(_factored(count, tuple(op.sizes[a] for a in op.splittable))) * (self.count // count)
            for op in self.graph.operators
            for count in self.counts
        )

    def _on_blocks(self, op: Operator, shard: bool) -> Iterator[OperatorConfig]:
        for count in reversed(self.counts):
            for degrees in _factored(count, tuple(op.sizes[a] for a in op.splittable)):
                named = dict(zip(op.splittable, degrees, strict=True))
                for first in range(0, self.count, count):
                    yield make_config(op, named, range(first, first + count), shard and count > 1)

    def random_plan(self, rng: np.random.Generator) -> tuple[OperatorConfig, ...]:
        """Every leader at random, the others following."""
        found: dict[int, OperatorConfig] = {}
        for leader, members in self.groups.items():
            found[leader] = self.fix(leader, self.draw(rng, leader))
            for source, member, link in members:
                found[member] = self.fix(member, self.propagation.over(source, found[source], link))
        return self.fixed(found.get(i) or self.draw(rng, i) for i in range(len(self.graph.operators)))

    def follow(self, leader: int, config: OperatorConfig) -> dict[int, OperatorConfig]:
        """A leader's config and what the operators of its group make of it."""
        new = {leader: config}
        for source, member, link in self.groups.get(leader, ()):
            new[member] = self.fix(member, self.propagation.over(source, new[source], link))
        return new


def sharded(config: OperatorConfig, shard: bool) -> OperatorConfig:
    """The config with weights stored in parts, or not."""
    return OperatorConfig(config.degrees, config.devices, config.replicas, shard)


@lru_cache(maxsize=4096)
def _primes(number: int) -> tuple[int, ...]:
    """Prime factors, ascending."""
    factors, divisor = [], 2
    while number > 1:
        while number % divisor == 0:
            factors.append(divisor)
            number //= divisor
        divisor += 1
    return tuple(factors)


@lru_cache(maxsize=4096)
def _factored(count: int, sizes: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """All degrees (at most ``sizes``) whose product divides ``count``; the rest of it are replicas."""
    if not sizes:
        return ((),)
    return tuple(
        (degree, *rest)
        for degree in range(1, min(count, sizes[0]) + 1)
        if count % degree == 0
        for rest in _factored(count // degree, sizes[1:])
    )
