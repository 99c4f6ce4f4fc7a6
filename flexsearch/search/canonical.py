"""Simpler plans that are as good: what a search answers is to be read by people.

A climb leaves traces that gain nothing: one layer of twelve split otherwise, weights sharded where nobody else needs
them, devices in an order that does not matter. ``simplify`` takes them back.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import Final

from flexsearch.search.constants import ROUNDS, SIMPLER
from flexsearch.search.evaluate import Configs, Evaluation
from flexsearch.search.space import Space
from flexsearch.strategy import OperatorConfig, States
from flexsearch.strategy.depth import depths
from flexsearch.strategy.weights import effective

CANDIDATES: Final = 3
"""So many configs, the commonest first, are tried for all layers that are alike."""

_BLOCK: Final = re.compile(r"(?<![_\d])\d+")
_STEP: Final = re.compile(r"_\d+$")
"""Numbers in names of operators: layers.3.norm, decoder.layers.0_17."""

Evaluate = Callable[[Configs, float], Evaluation]
"""Of a plan and the time (s) above which it is of no interest."""
Changes = Mapping[int, OperatorConfig]
"""Configs of some operators, the rest as it is."""


@dataclass(frozen=True, slots=True)
class Complexity:
    """How much there is to tell of a plan. ``runs``: over all sorts of operators, how often the config changes from one
    to the next of that sort. ``shards``: operators that shard weights. ``orders``: different lists of devices, those
    out of order counted twice. ``stray``: operators whose devices are out of order."""

    runs: int
    shards: int
    orders: int
    stray: int

    def simpler(self, than: Complexity) -> bool:
        """Whether there is less to tell: first of configs, then of devices, then of storage."""
        return (self.runs, self.stray, self.orders, self.shards) < (than.runs, than.stray, than.orders, than.shards)


def complexity(alike: Sequence[Sequence[int]], configs: Configs) -> Complexity:
    """How much there is to tell of a plan. ``alike``: the ``sorts`` of its operators."""
    runs = sum(_runs([configs[i] for i in members]) for members in alike)
    lists = Counter(config.devices for config in configs)
    stray = sum(count for devices, count in lists.items() if _words(devices) > 1)
    return Complexity(runs, sum(config.states > 0 for config in configs), sum(map(_words, lists)), stray)


def _runs(row: Sequence[OperatorConfig]) -> int:
    """Runs of equal configs in a row; most of them are the same object."""
    return 1 + sum(a is not b and a != b for a, b in pairwise(row))


def _words(devices: Sequence[int]) -> int:
    """What a list of devices adds to ``orders``."""
    return 1 + (sorted(devices) != list(devices))


def sorts(space: Space) -> tuple[tuple[int, ...], ...]:
    """Operators that are alike: of the same shape, with names that differ in the number of a block only; in a recurrent
    network, whose layers lie on devices of their own, in the number of a step only. So the queries of all blocks are
    one sort, and queries and outputs are two, though they may have the same shape. In graph order."""
    number = _BLOCK if depths(space.graph) is None else _STEP
    rows: dict[object, list[int]] = {}
    for i, op in enumerate(space.graph.operators):
        rows.setdefault((number.sub("", op.name), *space.shape(i)), []).append(i)
    return tuple(map(tuple, rows.values()))


def simplify(
    space: Space,
    configs: Configs,
    evaluate: Evaluate,
    *,
    loss: float = SIMPLER,
    limit: float = inf,
    stop: Callable[[], bool] = lambda: False,
) -> Configs:
    """A plan like ``configs`` that is told in fewer words: layers that are alike are split alike, weights are sharded
    only where that helps, devices stand in ascending order (where they are alike, under other numbers), light operators
    follow their neighbours; all of it only where it costs little.

    ``evaluate``: the exact cost of a plan (an ``Evaluator``); of one that takes longer than it may, infinity will do.
    It is called for each plan that is tried, and at last for the plan that is returned, which it then has at hand. The
    result costs at most 1 + ``loss`` times as much as ``configs``,
    and at most ``limit`` (s; give the cost of the best baseline) unless ``configs`` costs more; it fits
    into memory if ``configs`` does, and lacks no more memory otherwise. First everything is done that costs nothing.
    ``stop``: asked before each change that is tried; once it says yes, the best so far is the answer. Pins are obeyed.

    Call it once, with the best plan of a search, before that is compared with the baselines. If the result differs from
    ``configs``, what single changes would bring it is not known.
    """
    first = evaluate(configs, inf)
    run = Simplifying(space, evaluate, stop, configs, first)
    for most in (first.cost, max(first.cost, min(limit, first.cost * (1.0 + loss)))):
        for _ in range(ROUNDS):
            before = run.configs
            for changes in run.changes():
                run.attempt(changes, most)
            if run.configs == before:
                break
    evaluate(run.configs, inf)
    return run.configs


class Simplifying:
    """The plan so far, and what it costs. Equal configs are one object here."""

    def __init__(
        self, space: Space, evaluate: Evaluate, stop: Callable[[], bool], configs: Configs, now: Evaluation
    ) -> None:  # fmt: skip
        self.space, self.evaluate, self.stop = space, evaluate, stop
        self._objects: dict[OperatorConfig, OperatorConfig] = {}
        self.sorts = sorts(space)
        self._sort = {i: k for k, members in enumerate(self.sorts) for i in members}
        self.classes = [
            *(members for members in self.sorts if len(members) > 1),
            *(members for members in space.classes if len({self._sort[i] for i in members}) == 1),
        ]
        """Operators that are changed together: sorts, and the parts of them that the search changes together."""
        self._tried: set[tuple[tuple[int, ...], float]] = set()
        """By the identities of the objects."""
        self._keep(tuple(map(self._object, configs)), now)

    def _object(self, config: OperatorConfig) -> OperatorConfig:
        return self._objects.setdefault(config, config)

    def _keep(self, configs: Configs, now: Evaluation) -> None:
        self.configs, self.now = configs, now
        self.complexity = complexity(self.sorts, configs)
        self._runs = [_runs([configs[i] for i in members]) for members in self.sorts]
        self._lists = Counter(config.devices for config in configs)

    def changes(self) -> Iterator[Changes]:
        """What to try, of the plan so far, until it is time to stop."""
        for propose in (_renumbered, _without_shards, _ascending, _alike, _following, _smoothed):
            for changes in propose(self, self.configs):
                if self.stop():
                    return
                yield changes

    def attempt(self, changes: Changes, most: float) -> None:
        """Keep ``changes`` if they make the plan simpler, no larger, and no more expensive than ``most``."""
        if self.space.rule is not None:
            changes = {i: self.space.fix(i, config) for i, config in changes.items()}
        changes = {i: one for i, config in changes.items() if (one := self._object(config)) is not self.configs[i]}
        if not changes or not self.after(changes).simpler(self.complexity):
            return
        configs = list(self.configs)
        for i, config in changes.items():
            configs[i] = config
        tried = tuple(configs)
        key = tuple(map(id, tried)), most
        if key in self._tried:
            return
        self._tried.add(key)
        cost = self.evaluate(tried, most)
        if cost.cost <= most and cost.shortfall <= self.now.shortfall:
            self._keep(tried, cost)

    def after(self, changes: Changes) -> Complexity:
        """As ``complexity`` of the plan with these changes."""
        now, was = self.configs, self.complexity
        runs, shards, orders, stray = was.runs, was.shards, was.orders, was.stray
        for k in {self._sort[i] for i in changes}:
            runs += _runs([changes.get(i, now[i]) for i in self.sorts[k]]) - self._runs[k]
        more = Counter[tuple[int, ...]]()
        for i, config in changes.items():
            shards += (config.states > 0) - (now[i].states > 0)
            more[config.devices] += 1
            more[now[i].devices] -= 1
        for devices, count in more.items():
            before, words = self._lists[devices], _words(devices)
            orders += words * ((before + count > 0) - (before > 0))
            stray += count * (words > 1)
        return Complexity(runs, shards, orders, stray)


def _without_shards(run: Simplifying, configs: Configs) -> Iterator[Changes]:
    """Weights whole: where the option can do nothing, then in layers that are alike."""
    plain = {i: effective(run.space.graph, i, config) for i, config in enumerate(configs)}
    yield {i: config for i, config in plain.items() if config != configs[i]}
    for members in run.sorts:
        if on := [i for i in members if configs[i].states]:
            yield {i: configs[i].sharded(States.WHOLE) for i in on}


def _ascending(run: Simplifying, configs: Configs) -> Iterator[Changes]:
    """Devices in ascending order: everywhere, then list by list, then only among replicas of a piece."""
    stray = [i for i, config in enumerate(configs) if list(config.devices) != sorted(config.devices)]
    if not stray:
        return
    yield {i: configs[i].on(sorted(configs[i].devices)) for i in stray}
    for devices in dict.fromkeys(configs[i].devices for i in stray):
        yield {i: configs[i].on(sorted(devices)) for i in stray if configs[i].devices == devices}
    yield {i: _ordered_replicas(configs[i]) for i in stray}


def _renumbered(run: Simplifying, configs: Configs) -> Iterator[Changes]:
    """The devices of all operators under other numbers, which put one of the commonest stray orders right: where
    devices are alike, plans that differ in these numbers only are the same."""
    stray = Counter(config.devices for config in configs if _words(config.devices) > 1)
    for devices, _ in stray.most_common(CANDIDATES):
        to = dict(zip(devices, sorted(devices), strict=True))
        yield {i: config.on(to.get(d, d) for d in config.devices) for i, config in enumerate(configs)}


def _ordered_replicas(config: OperatorConfig) -> OperatorConfig:
    width, devices = config.replicas, config.devices
    return config.on(d for k in range(0, len(devices), width) for d in sorted(devices[k : k + width]))


def _alike(run: Simplifying, configs: Configs) -> Iterator[Changes]:
    """One of the commonest configs for all layers that are alike, with what follows them and alone."""
    for members in run.classes:
        count = Counter(configs[i] for i in members)
        if len(count) < 2:
            continue
        for config, _ in count.most_common(CANDIDATES):
            others = [i for i in members if configs[i] is not config]
            yield _with_followers(run.space, dict.fromkeys(others, config))
            yield dict.fromkeys(others, config)


def _following(run: Simplifying, configs: Configs) -> Iterator[Changes]:
    """Light operators as they follow from the leaders: all, then those of each sort of layer."""
    leaders = {i: configs[i] for i in run.space.groups}
    yield _with_followers(run.space, leaders)
    for members in run.space.parts:
        yield _with_followers(run.space, {i: leaders[i] for i in members})


def _smoothed(run: Simplifying, configs: Configs) -> Iterator[Changes]:
    """Runs of layers that are alike, the shortest first, as the run before or after them."""
    for members in run.classes:
        runs: list[list[int]] = []
        for i in members:
            if runs and configs[runs[-1][-1]] is configs[i]:
                runs[-1].append(i)
            else:
                runs.append([i])
        order = sorted(range(len(runs)), key=lambda k: (len(runs[k]), k)) if len(runs) > 1 else []
        for k in order:
            for near in (k - 1, k + 1):
                if 0 <= near < len(runs):
                    changes = dict.fromkeys(runs[k], configs[runs[near][0]])
                    yield _with_followers(run.space, changes)
                    yield changes


def _with_followers(space: Space, changes: Changes) -> Changes:
    """The changes of leaders, and what the operators of their groups make of them."""
    followed: dict[int, OperatorConfig] = {}
    for leader, config in changes.items():
        followed.update(space.follow(leader, config))
    return followed
