"""Random moves from one plan to the next, for walks in tests and benchmarks.

A move is a function of (random generator, space, configs) that returns new configs; a mixture of them is proposed. The
search draws its own moves, compiled (``flexsearch.search.chain``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from flexsearch.search.evaluate import Configs
from flexsearch.search.space import Space
from flexsearch.strategy import OperatorConfig, States

Move = Callable[[np.random.Generator, Space, Configs], Configs]


def redraw(rng: np.random.Generator, space: Space, configs: Configs) -> Configs:
    """One operator anywhere in its space, all else as it is."""
    i = int(rng.integers(len(configs)))
    return _with(configs, {i: space.draw(rng, i)})


def copy(rng: np.random.Generator, space: Space, configs: Configs) -> Configs:
    """One operator does as a neighbour does, and so on for a few steps along the graph in one direction."""
    at = int(rng.integers(len(configs)))
    forward = bool(rng.random() < 0.5)
    new: dict[int, OperatorConfig] = {}
    while True:
        links = [link for link in space.propagation.links[at] if link.forward == forward and link.target not in new]
        if not links:
            return _with(configs, new)
        link = links[rng.integers(len(links))]
        followed = space.propagation.over(at, new.get(at, configs[at]), link)
        new[link.target] = followed.sharded(*configs[link.target].sharding)
        at = link.target
        if rng.random() < 0.35:
            return _with(configs, new)


def group(rng: np.random.Generator, space: Space, configs: Configs) -> Configs:
    """An operator with weights anywhere, or as another one like it; its pointwise, view, pooling neighbours follow."""
    leader = space.leaders[int(rng.choice(len(space.leaders), p=space.importance))]
    return _with(configs, _led(space, leader, space.draw(rng, leader)))


def repeated(rng: np.random.Generator, space: Space, configs: Configs) -> Configs:
    """The same for every layer of the same kind and shape; or all of them do as one of them does already."""
    if not space.classes:
        return group(rng, space, configs)
    members = space.classes[rng.integers(len(space.classes))]
    model = members[rng.integers(len(members))]
    config = space.draw(rng, model) if rng.random() < 0.7 else configs[model]
    new: dict[int, OperatorConfig] = {}
    for leader in members:
        new |= _led(space, leader, config)
    return _with(configs, new)


def swap(rng: np.random.Generator, space: Space, configs: Configs) -> Configs:
    """Two devices exchange their work, in a group of operators or everywhere."""
    if space.count < 2:
        return configs
    a, b = (int(d) for d in rng.choice(space.count, size=2, replace=False))
    leader = space.leaders[rng.integers(len(space.leaders))]
    chosen = [leader, *(i for _, i, _ in space.groups[leader])] if rng.random() < 0.7 else range(len(configs))
    other = {a: b, b: a}
    return _with(configs, {i: configs[i].on(other.get(d, d) for d in configs[i].devices) for i in chosen})


def shard(rng: np.random.Generator, space: Space, configs: Configs) -> Configs:
    """Keep other states of the weights of one operator in parts; or of all."""
    if not space.weighted:
        return configs
    i = space.weighted[rng.integers(len(space.weighted))]
    chosen = [i] if rng.random() < 0.8 else space.weighted
    to = States((configs[i].states + int(rng.integers(1, len(States)))) % len(States))
    over = int(rng.choice([0, 2, space.topology.host_size]))
    changed = {k: configs[k].sharded(to if len(configs[k].devices) > 1 else States.WHOLE, over) for k in chosen}
    return _with(configs, changed)


MOVES: Final[dict[Move, float]] = {redraw: 2.0, copy: 3.0, group: 4.0, repeated: 2.0, swap: 0.5, shard: 0.5}
"""Moves and how often each is proposed."""

_CUMULATIVE: Final = np.cumsum(list(MOVES.values())) / sum(MOVES.values())


def propose(rng: np.random.Generator, space: Space, configs: Configs) -> tuple[str, Configs]:
    """A random move: its name and the new configs. Tries again a few times if nothing changed."""
    name, new = "", configs
    for _ in range(8):
        move = list(MOVES)[int(np.searchsorted(_CUMULATIVE, rng.random(), side="right"))]
        name, new = getattr(move, "__name__", "move"), move(rng, space, configs)
        if new != configs:
            break
    return name, new


def _led(space: Space, leader: int, config: OperatorConfig) -> dict[int, OperatorConfig]:
    """A leader's config and what the operators of its group make of it."""
    new = {leader: config}
    for source, member, link in space.groups[leader]:
        new[member] = space.propagation.over(source, new[source], link)
    return new


def _with(configs: Configs, new: dict[int, OperatorConfig]) -> Configs:
    return tuple(new.get(i, config) for i, config in enumerate(configs)) if new else configs
