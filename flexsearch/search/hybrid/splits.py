"""How the operators of a layout are split among the devices of their group."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import product
from math import prod

from flexsearch.lower import Lowering
from flexsearch.search.hybrid.layout import Layout, divisors
from flexsearch.simulate.staged import StagedSimulators
from flexsearch.strategy import OperatorConfig, Sharding
from flexsearch.strategy.baselines import inside_group
from flexsearch.strategy.config import make_config
from flexsearch.strategy.pipeline import Pipeline
from flexsearch.strategy.shares import shared_out, speeds
from flexsearch.strategy.weights import has_weights, table_axes

Configs = tuple[OperatorConfig, ...]


class Splits:
    """Splits of the operators of one graph. Configs name the devices of a group by place: 0 is its first."""

    def __init__(self, simulators: StagedSimulators) -> None:
        self.simulators, self.speeds = simulators, speeds(simulators.topology)
        self._configs: dict[Hashable, Configs] = {}
        self._forms: dict[tuple[int, int, int], Hashable] = {}

    def _lowering(self, layout: Layout) -> Lowering:
        return self.simulators.share(layout.data, layout.microbatches)[1]

    def inside(self, layout: Layout, width: int) -> Configs:
        """Megatron's splits (Shoeybi et al., 2019) in each of ``width`` groups of ``layout.tensor`` devices, which
        share out the samples; weights sharded if the layout says so."""
        key = layout.tensor, width, layout.sharding, self._form(layout, layout.tensor * width)
        if key not in self._configs:
            lowering = self._lowering(layout)
            graph = lowering.graph
            configs = inside_group(graph, lowering.topology, layout.tensor, width)
            self._configs[key] = tuple(
                config.sharded(*(layout.sharding if has_weights(graph, i) else Sharding()))
                for i, config in enumerate(configs)
            )
        return self._configs[key]

    def _by_speed(self, layout: Layout, group: Sequence[int]) -> Configs:
        """The same in a group of devices that share out the samples by their speeds."""
        graph, row = self._lowering(layout).graph, self.speeds[layout.speed - 1]
        speed = [row[device] for device in group]
        key = layout.tensor, layout.states, layout.data, layout.microbatches, tuple(speed)
        if key not in self._configs:
            whole = self.inside(layout, len(group) // layout.tensor)
            self._configs[key] = tuple(
                shared_out(op, config, speed) for op, config in zip(graph.operators, whole, strict=True)
            )
        return self._configs[key]

    def _form(self, layout: Layout, devices: int) -> Hashable:
        """What of a microbatch its splits among so many devices depend on: whether samples are as many as they, and
        where an embedding's table weighs more than what is looked up."""
        key = layout.data, layout.microbatches, devices
        if key not in self._forms:
            lowering, graph = self._lowering(layout), self._lowering(layout).graph
            leaders = sorted(set(lowering.costs.alike))
            samples = tuple(min(devices + 1, graph.operators[i].sizes[a]) for i in leaders
                            for a in graph.operators[i].axes_of("sample"))  # fmt: skip
            tables = tuple(table_axes(graph, i) for i in leaders if graph.operators[i].kind == "embedding")
            self._forms[key] = samples, tables
        return self._forms[key]

    def plan(self, layout: Layout, first: tuple[int, ...]) -> tuple[Pipeline, Configs]:
        """The plan of a layout whose stages begin with these operators: Megatron's splits inside each group. Configs
        are those of the first block."""
        groups = layout.groups()
        pipeline = Pipeline(layout.data, first, groups, layout.microbatches, layout.schedule)
        all_configs: list[OperatorConfig] = []
        ends = [*first[1:], len(self.simulators.graph.operators)]
        for group, begin, end in zip(groups, first, ends, strict=True):
            width = len(group) // layout.tensor
            alike = not layout.speed or width == 1
            configs = (self.inside(layout, width) if alike else self._by_speed(layout, group))[begin:end]
            offset = group[0]
            all_configs += configs if not offset else [
                config.on(offset + d for d in config.devices) for config in configs
            ]  # fmt: skip
        return pipeline, tuple(all_configs)

    def alternatives(
        self, layout: Layout, pipeline: Pipeline, configs: Sequence[OperatorConfig]
    ) -> Iterator[Mapping[int, OperatorConfig]]:
        """Changes of a plan: every other split of each sort of operators (of the same shape, in groups of one size),
        wherever they are."""
        lowering = self._lowering(layout)
        ends = [*pipeline.first[1:], len(configs)]
        group_of = [g for g, a, b in zip(pipeline.devices, pipeline.first, ends, strict=True) for _ in range(a, b)]
        alike: dict[tuple[int, int], list[int]] = {}
        for i, leader in enumerate(lowering.costs.alike):
            alike.setdefault((leader, len(group_of[i])), []).append(i)
        for (leader, size), members in sorted(alike.items(), key=lambda item: (-len(item[1]), item[0])):
            for split in self._splits(lowering, leader, size):
                changes = {
                    i: split.on(group_of[i][d] for d in split.devices).sharded(*configs[i].sharding)
                    for i in members
                }
                changes = {i: new for i, new in changes.items() if new != configs[i]}
                if changes:
                    yield changes

    def tails(self, layout: Layout, pipeline: Pipeline, configs: Sequence[OperatorConfig]) -> Iterator[
        Mapping[int, OperatorConfig]
    ]:  # fmt: skip
        """Changes of a plan: what follows an operator with weights in its stage is done by all devices of the stage,
        so that they need not synchronise it; the shortest change first."""
        graph = self._lowering(layout).graph
        ends = [*pipeline.first[1:], len(configs)]
        for group, begin, end in zip(pipeline.devices, pipeline.first, ends, strict=True):
            for first in reversed(range(begin, end if len(group) > 1 else begin)):
                if has_weights(graph, first):
                    yield {i: make_config(graph.operators[i], {}, group) for i in range(first, end)}

    def _splits(self, lowering: Lowering, operator: int, size: int) -> list[OperatorConfig]:
        """Every split of an operator on a group of ``size`` devices: degrees whose product divides that, replicas for
        the rest."""
        if size == 1:
            return []
        op = lowering.graph.operators[operator]
        axes = [axis for axis in op.sizes if axis in op.splittable]
        choices = [[n for n in divisors(size) if n <= op.sizes[axis]] for axis in axes]
        return [
            make_config(op, dict(zip(axes, degrees, strict=True)), range(size))
            for degrees in product(*choices)
            if size % prod(degrees) == 0
        ]  # fmt: skip
