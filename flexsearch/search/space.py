"""The configs that each operator may have: drawn at random, or listed as alternatives to a given one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import accumulate, chain
from math import prod
from re import sub

import numpy as np

from flexsearch.graph import Operator, OperatorGraph
from flexsearch.graph.ops import forward_flops
from flexsearch.search.constants import FEW, PERMUTED, STEPS_TOGETHER_FROM
from flexsearch.search.meshes import Meshes
from flexsearch.strategy import OperatorConfig, Sharding, make_config
from flexsearch.strategy.depth import unrolled
from flexsearch.strategy.propagate import Link, Propagation
from flexsearch.strategy.shares import shared_out, speeds
from flexsearch.strategy.weights import has_weights, is_heavy, shardings
from flexsearch.topology import Topology

Rule = Callable[[int, OperatorConfig], OperatorConfig]
"""(operator, any config of it) -> the one nearest to it that is allowed. Applied twice, it changes nothing more."""


class Space:
    """What can be changed in plans of one graph on one topology. ``rule`` makes the space smaller: what a user pins."""

    def __init__(self, graph: OperatorGraph, topology: Topology, rule: Rule | None = None) -> None:
        self.graph, self.topology, self.rule = graph, topology, rule
        self.propagation = Propagation(graph)
        self.meshes = Meshes(topology)
        self.count = len(topology.devices)
        self.speeds = speeds(topology)
        """Of the devices, by which samples may be shared out among them; empty if they are equally fast."""
        self._even = 0.8 if self.count <= FEW else 0.9
        self._blocks: dict[tuple[int, Sharding], tuple[OperatorConfig, ...]] = {}
        first: dict[tuple[object, ...], int] = {}
        self.model = tuple(first.setdefault(self.shape(i), i) for i in range(len(graph.operators)))
        """By operator: the first one of its shape. What is worked out for that holds for all of them."""
        self.shardings = shardings(topology)
        self.weighted = tuple(i for i in range(len(graph.operators)) if has_weights(graph, i))
        self.leaders = tuple(i for i in range(len(graph.operators)) if is_heavy(graph, i)) or tuple(
            range(len(graph.operators))
        )

    def fix(self, operator: int, config: OperatorConfig) -> OperatorConfig:
        """The allowed config that is nearest to ``config``."""
        return config if self.rule is None else self.rule(operator, config)

    def fixed(self, configs: Iterable[OperatorConfig]) -> tuple[OperatorConfig, ...]:
        """The allowed plan that is nearest to ``configs``."""
        if self.rule is None:
            return tuple(configs)
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
    def _importance(self) -> tuple[Fraction, ...]:
        """Share of each leader in what there is to gain, summing to 1: half of it the same for all, the rest by FLOPs
        and by bytes of weights, whose gradients are to be synchronised. In whole numbers, which add up to the same on
        any machine."""
        graph = self.graph
        operators = [graph.operators[i] for i in self.leaders]
        flops = [1 + int(forward_flops(op, op.sizes)) for op in operators]
        nbytes = [1 + sum(graph.tensor[n].nbytes for n in op.inputs if graph.tensor[n].kind == "parameter")
                  for op in operators]  # fmt: skip
        all_flops, all_bytes, even = sum(flops), sum(nbytes), Fraction(1, 2 * len(operators))
        shares = zip(flops, nbytes, strict=True)
        return tuple(even + Fraction(f, 4 * all_flops) + Fraction(n, 4 * all_bytes) for f, n in shares)

    @cached_property
    def importance(self) -> tuple[float, ...]:
        """Share of each leader in what there is to gain, summing to 1."""
        return tuple(float(share) for share in self._importance)

    @cached_property
    def likely(self) -> tuple[float, ...]:
        """Sums of the shares of all leaders up to each."""
        return tuple(float(total) for total in accumulate(self._importance))

    @cached_property
    def by_importance(self) -> tuple[int, ...]:
        """All operators: the leaders, the important ones first, then the others in graph order."""
        importance = dict(zip(self.leaders, self.importance, strict=True))
        return tuple(sorted(range(len(self.graph.operators)), key=lambda i: (-importance.get(i, 0.0), i)))

    @cached_property
    def _layers(self) -> dict[int, int]:
        """Operator -> the first one of its unrolled layer."""
        return unrolled(self.graph)

    @cached_property
    def classes(self) -> tuple[tuple[int, ...], ...]:
        """Leaders that a move may change together: those of the same kind and shape; of these, those that are the same
        layer of repeated blocks (their names differ in numbers only); then the steps of each unrolled layer. Only
        classes of several.

        A layer may be applied to tensors of different sizes (towers with shared weights): those are classes apart,
        as a degree that one of them can take may be impossible for another."""
        shapes: dict[object, list[int]] = {}
        roles: dict[object, list[int]] = {}
        steps: dict[object, list[int]] = {}
        for i in self.leaders:
            shapes.setdefault(self.model[i], []).append(i)
            layer = self._layers.get(i)
            name = self.graph.operators[i if layer is None else layer].name  # steps of a layer stay together
            roles.setdefault((self.model[i], sub("[0-9]+", "#", name)), []).append(i)
            if layer is not None:
                steps.setdefault((layer, self.model[i]), []).append(i)
        classes = (*shapes.values(), *roles.values(), *(sorted(members) for members in steps.values()))
        return tuple(dict.fromkeys(tuple(members) for members in classes if len(members) > 1))

    def may_alternate(self, members: Sequence[int]) -> bool:
        """Whether a chain gives members of a class configs in turn (A, B, A, B): on many devices not the steps of a
        layer, which share weights."""
        return len(members) > 1 and (self.count < STEPS_TOGETHER_FROM or not self._are_steps(members))

    def _are_steps(self, members: Sequence[int]) -> bool:
        """Whether members of a class are steps of unrolled layers."""
        return any(i in self._layers for i in members)

    @cached_property
    def alternating(self) -> tuple[tuple[int, ...], ...]:
        """What descents change together: every second and every third member of a class, where that is neither all of
        them nor a single one; not of the steps of a layer, which share weights."""
        return tuple(dict.fromkeys(
            members[offset::stride]
            for members in (*self.classes, *self.loose_classes) if not self._are_steps(members)
            for stride in (2, 3) for offset in range(stride) if len(members) >= 2 * stride
        ))  # fmt: skip

    @cached_property
    def parts(self) -> tuple[tuple[int, ...], ...]:
        """What a coarse plan gives one config each: the classes, and the leaders that are in none."""
        several = {i for members in self.classes for i in members}
        return (*self.classes, *((i,) for i in self.leaders if i not in several))

    @cached_property
    def loose_classes(self) -> tuple[tuple[int, ...], ...]:
        """As ``classes``, of operators that are no leaders."""
        classes: dict[int, list[int]] = {}
        for i in range(len(self.graph.operators)):
            if i not in self.groups:
                classes.setdefault(self.model[i], []).append(i)
        return tuple(tuple(members) for members in classes.values() if len(members) > 1)

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
            order = [slots[k] for k in rng.permutation(len(slots)).tolist()]
            if favourite is not None:
                order.insert(0, favourite)
            axis = next((a for a in order if a is None or degrees[a] * prime <= op.sizes[a]), None)
            if axis is None:
                replicas *= prime if rng.random() < 0.5 else 1  # else fewer devices
            else:
                degrees[axis] *= prime
        used = replicas * prod(degrees.values())
        parts = operator in self.weighted and used > 1 and rng.random() < 0.05
        config = make_config(op, degrees, self._draw_devices(rng, used))
        if parts:
            config = config.sharded(*self.shardings[1 if len(self.shardings) == 2 else rng.integers(1, 3)])
        return self._share_out(rng, op, config)

    def _share_out(self, rng: np.random.Generator, op: Operator, config: OperatorConfig) -> OperatorConfig:
        """Half of the time, with samples shared out by the speeds of the devices, where these differ."""
        if not self.speeds or rng.random() < 0.5:
            return config
        return shared_out(op, config, self.speeds[rng.integers(len(self.speeds))])

    def _draw_count(self, rng: np.random.Generator) -> int:
        kind = rng.random()
        if kind < 0.5:
            return self.count
        options = self.counts if kind < self._even else range(1, self.count + 1)
        return int(options[rng.integers(len(options))])

    def _draw_devices(self, rng: np.random.Generator, count: int) -> tuple[int, ...]:
        kind = rng.random()
        if kind < 0.05:
            return tuple(rng.permutation(self.count)[:count].tolist())
        if kind < 0.1:  # spread over the machine
            step = self.count // count
            first = int(rng.integers(step))
            return tuple(range(first, first + step * count, step))
        return self.meshes.draw(rng, count, PERMUTED)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Numbers of devices that divide the machine evenly."""
        return tuple(n for n in range(1, self.count + 1) if self.count % n == 0)

    def draw_simple(self, rng: np.random.Generator, operator: int, samples: bool = False) -> OperatorConfig:
        """As ``draw``, among configs that split one axis at most (``samples``: of samples), over an aligned block of
        devices in an order that has the structure of the machine, or, on FEW devices, now and then any number of
        neighbours."""
        op = self.graph.operators[operator]
        uneven = self.count <= FEW and rng.random() >= self._even
        options = range(1, self.count + 1) if uneven else self.counts
        count = int(options[rng.integers(len(options))])
        axes = [a for a in (op.axes_of("sample") if samples else op.splittable) if op.sizes[a] >= count]
        if axes and count > 1:
            degrees = {axes[rng.integers(len(axes))]: count}
        else:
            degrees, count = {}, 1
        return self._share_out(rng, op, make_config(op, degrees, self.meshes.draw(rng, count, PERMUTED)))

    def draw_regular(self, rng: np.random.Generator, operator: int) -> OperatorConfig:
        """As ``draw``, among what descents try: any degrees whose product divides the number of devices, on an aligned
        block of the machine in any order of its axes; half of the time on all devices."""
        op = self.graph.operators[operator]
        count = self.count if rng.random() < 0.5 else int(self.counts[rng.integers(len(self.counts))])
        choices = _factored(count, tuple(op.sizes[a] for a in op.splittable))
        degrees = dict(zip(op.splittable, choices[rng.integers(len(choices))], strict=True))
        return self._share_out(rng, op, make_config(op, degrees, self.meshes.draw(rng, count, PERMUTED)))

    def alternatives(self, operator: int, configs: Sequence[OperatorConfig]) -> Iterator[OperatorConfig]:
        """Configs of one operator to try with everything else fixed: what its neighbours suggest, other weights
        storage, then every way to factor a divisor of the number of devices over its axes, on each aligned block."""
        now = configs[operator]
        seen = {now}
        for config in chain(self.nearby(operator, configs), self.on_blocks(operator, now.sharding)):
            candidate = self.fix(operator, config)
            if candidate not in seen:
                seen.add(candidate)
                yield candidate

    def nearby(self, operator: int, configs: Sequence[OperatorConfig]) -> Iterator[OperatorConfig]:
        """Those of ``alternatives`` that follow from a plan; not ``fixed``, and not all of them different."""
        op, now = self.graph.operators[operator], configs[operator]
        for link in self.propagation.links[operator]:
            back = next(x for x in self.propagation.links[link.target] if x.target == operator)
            yield self.propagation.over(link.target, configs[link.target], back).sharded(*now.sharding)
        if operator in self.weighted and len(now.devices) > 1:
            yield from (now.sharded(*other) for other in self.shardings if other != now.sharding)
        if self.speeds:
            yield replace(now, shares=())
            yield from (shared_out(op, now, speed) for speed in self.speeds)
        for renaming in self.meshes.relabelings:
            yield now.on(renaming[d] for d in now.devices)

    def on_blocks(self, operator: int, sharding: Sharding) -> tuple[OperatorConfig, ...]:
        """The other ``alternatives``: on aligned blocks."""
        key = self.model[operator], sharding
        if (on_blocks := self._blocks.get(key)) is None:
            on_blocks = self._blocks[key] = tuple(self._on_blocks(self.graph.operators[operator], sharding))
        return on_blocks

    @cached_property
    def alternatives_on_blocks(self) -> int:
        """How many of all operators' alternatives lie on aligned blocks: about what a look at all of them takes."""
        return sum(map(self.alternatives_of, range(len(self.graph.operators))))

    def alternatives_of(self, operator: int) -> int:
        """How many of an operator's alternatives lie on aligned blocks."""
        op = self.graph.operators[operator]
        sizes = tuple(op.sizes[a] for a in op.splittable)
        return sum(len(_factored(count, sizes)) * len(self.meshes.blocks(count)) for count in self.counts)

    def _on_blocks(self, op: Operator, sharding: Sharding) -> Iterator[OperatorConfig]:
        """On blocks of the machine's own order, then on those that permute its axes."""
        for permuted in (False, True):
            for count in reversed(self.counts):
                plain = self.count // count
                blocks = self.meshes.blocks(count)[plain:] if permuted else self.meshes.blocks(count)[:plain]
                for degrees in _factored(count, tuple(op.sizes[a] for a in op.splittable)):
                    named = dict(zip(op.splittable, degrees, strict=True))
                    for block in blocks:
                        config = make_config(op, named, block).sharded(*(sharding if count > 1 else Sharding()))
                        yield config
                        yield from (shared_out(op, config, speed) for speed in self.speeds)

    def half(self, operator: int, config: OperatorConfig, which: int) -> OperatorConfig:
        """The config on one half (0 or 1) of its devices: half as many replicas, or half the degree of the outermost
        axis that can be halved; the same config where none can."""
        kept = self.meshes.halves(config.devices)[which]
        devices = [d for d in config.devices if d in kept]
        degrees = dict(config.degrees)
        if config.replicas % 2:
            axis = next((a for a, parts in config.degrees if parts % 2 == 0), None)
            if axis is None:
                return config
            degrees[axis] //= 2
        op = self.graph.operators[operator]
        shares = {axis: row for axis, row in config.shares if degrees[axis] == len(row)}
        sharding = config.sharding if len(devices) > 1 else Sharding()
        return make_config(op, degrees, devices, shares=shares).sharded(*sharding)

    def random_plan(self, rng: np.random.Generator) -> tuple[OperatorConfig, ...]:
        """Every leader at random, the others following."""
        configs: dict[int, OperatorConfig] = {}
        for leader, members in self.groups.items():
            configs[leader] = self.fix(leader, self.draw(rng, leader))
            for source, member, link in members:
                configs[member] = self.fix(member, self.propagation.over(source, configs[source], link))
        return self.fixed(configs.get(i) or self.draw(rng, i) for i in range(len(self.graph.operators)))

    def follow(self, leader: int, config: OperatorConfig) -> dict[int, OperatorConfig]:
        """A leader's config and what the operators of its group make of it."""
        new = {leader: config}
        for source, member, link in self.groups.get(leader, ()):
            new[member] = self.fix(member, self.propagation.over(source, new[source], link))
        return new


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
