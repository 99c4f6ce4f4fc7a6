"""How the operators of a layout are split among the devices of their group."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import prod

from flexsearch.lower import Lowering
from flexsearch.search.hybrid.cuts import Cuts
from flexsearch.search.hybrid.layout import Layout, divisors
from flexsearch.simulate.staged import StagedSimulators
from flexsearch.strategy import OperatorConfig, States
from flexsearch.strategy.baselines import has_weights, inside_group
from flexsearch.strategy.config import make_config
from flexsearch.strategy.pipeline import Pipeline

Configs = tuple[OperatorConfig, ...]


class Splits:
    """Splits of the operators of one graph. Configs name the devices of a group by place: 0 is its first."""

    def __init__(self, simulators: StagedSimulators) -> None:
        self.simulators = simulators
        self._known: dict[tuple[int, int, int, bool], Configs] = {}

    def _lowering(self, layout: Layout) -> Lowering:
        return self.simulators.share(layout.data, layout.microbatches)[1]

    def tensor_parallel(self, layout: Layout) -> Configs:
        """Megatron's splits of a group (Shoeybi et al., 2019); weights sharded over the shares if it says so."""
        key = layout.data, layout.microbatches, layout.tensor, layout.sharded
        if key not in self._known:
            lowering = self._lowering(layout)
            graph = lowering.graph
            configs = inside_group(graph, lowering.topology, layout.tensor)
            self._known[key] = tuple(
                replace(config, states=States.WEIGHTS if layout.sharded and has_weights(graph, i) else States.WHOLE)
                for i, config in enumerate(configs)
            )
        return self._known[key]

    def seconds(self, layout: Layout, configs: Sequence[OperatorConfig]) -> list[float]:
        """Seconds of each operator, forward and backward, on the busiest device of a group."""
        lowering = self._lowering(layout)
        placed = (lowering.placed(i, config) for i, config in enumerate(configs))
        return [float(p.seconds.sum(axis=0).max()) for p in placed]

    def plan(self, layout: Layout, cuts: Cuts) -> tuple[Pipeline, Configs]:
        """The plan of a layout: Megatron's splits inside each group, and the cut that makes the slowest stage as fast
        as possible. Configs are those of the first block."""
        configs = self.tensor_parallel(layout)
        first = cuts.balanced(self.seconds(layout, configs), layout.stages)
        pipeline = Pipeline(layout.data, first, layout.groups(), layout.microbatches, layout.schedule)
        return pipeline, self.placed(layout, configs, first)

    def placed(self, layout: Layout, configs: Sequence[OperatorConfig], first: Sequence[int]) -> Configs:
        """The configs on the groups of their stages."""
        groups, found = layout.groups(), []
        ends = [*first[1:], len(configs)]
        for group, begin, end in zip(groups, first, ends, strict=True):
            found += [config.on(group[d % layout.tensor] for d in config.devices) for config in configs[begin:end]]
        return tuple(found)

    def alternatives(self, layout: Layout, configs: Sequence[OperatorConfig]) -> Iterator[Mapping[int, OperatorConfig]]:
        """Changes of a plan: every other split of each sort of operators (of the same shape), wherever they are."""
        lowering = self._lowering(layout)
        alike: dict[int, list[int]] = {}
        for i, leader in enumerate(lowering.costs.alike):
            alike.setdefault(leader, []).append(i)
        for leader, members in sorted(alike.items(), key=lambda item: (-len(item[1]), item[0])):
            if layout.tensor == 1:
                continue
            for split in self._splits(layout, leader):
                changes = {
                    i: replace(
                        split.on(_group(configs[i], layout)[d] for d in split.devices),
                        states=configs[i].states,
                    )
                    for i in members
                }
                changes = {i: new for i, new in changes.items() if new != configs[i]}
                if changes:
                    yield changes

    def _splits(self, layout: Layout, operator: int) -> list[OperatorConfig]:
        """Every split of an operator on a group: degrees whose product divides its devices, replicas for the rest."""
        op = self._lowering(layout).graph.operators[operator]
        axes = [axis for axis in op.sizes if axis in op.splittable]
        choices = [[n for n in divisors(layout.tensor) if n <= op.sizes[axis]] for axis in axes]
        found = []
        for degrees in product(*choices):
            parts = prod(degrees)
            if layout.tensor % parts == 0:
                found.append(make_config(op, dict(zip(axes, degrees, strict=True)), range(layout.tensor)))
        return found


def _group(config: OperatorConfig, layout: Layout) -> list[int]:
    """Devices of the group in which a config is."""
    begin = config.devices[0] // layout.tensor * layout.tensor
    return list(range(begin, begin + layout.tensor))
