"""Plans that differ in the names of interchangeable devices only: of these one is looked at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flexsearch.strategy import OperatorConfig
from flexsearch.topology import Topology


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
    choices = set(row)
    return all(renamed(config, other) in choices for config in row)


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
