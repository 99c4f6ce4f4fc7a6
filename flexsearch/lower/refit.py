"""A plan on another graph of the same model: at another batch, in another mode, or of the forward pass alone."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

import numpy as np

from flexsearch.cost import Costs
from flexsearch.errors import FlexsearchError, StrategyError
from flexsearch.graph import Operator, OperatorGraph
from flexsearch.graph.batch import microbatch
from flexsearch.graph.weight_gradients import divided, with_weight_gradients
from flexsearch.lower.layout import Layout
from flexsearch.lower.lowering import Lowered, Lowering
from flexsearch.lower.schedule import Stages
from flexsearch.strategy import OperatorConfig, Options, make_config
from flexsearch.strategy.config import check_config


def refit(lowered: Lowered, graph: OperatorGraph) -> Lowered:
    """The training step of ``graph``, which is that of ``lowered`` at a smaller batch: the same stages, in microbatches
    that are no larger than planned, which keeps within the plan's memory."""
    graph = with_weight_gradients(graph, divided(lowered.graph))
    graph = lowered.options.typed(graph)
    for count in _microbatches(graph.batch, lowered.graph.batch):
        with suppress(FlexsearchError):
            part = microbatch(graph, count) if count > 1 else graph
            return _lower(lowered, part, graph, _stages(lowered, graph, count), lowered.options)
    return _lower(lowered, graph, graph, Stages.one(len(lowered.topology.devices)), _plain(lowered.options))


def refit_forward(lowered: Lowered, graph: OperatorGraph, results: Mapping[str, Layout]) -> Lowered:
    """The forward pass ``graph`` of the same model in one go, with the plan of ``lowered``. ``results``: by output,
    where it is wanted."""
    graph = lowered.options.typed(graph)
    stages = Stages.one(len(lowered.topology.devices))
    return _lower(lowered, graph, graph, stages, _plain(lowered.options), results)


def _lower(
    lowered: Lowered, part: OperatorGraph, graph: OperatorGraph, stages: Stages, options: Options,
    results: Mapping[str, Layout] | None = None,
) -> Lowered:  # fmt: skip
    costs = Costs(part, lowered.topology, lowered.lowering.costs.profile)
    lowering = Lowering(part, lowered.topology, costs, batch_graph=graph, results=results, reads=False)
    return lowering.lower(refitted(part, lowered), options, stages)


def _plain(options: Options) -> Options:
    """What does not depend on a graph's modules and stages."""
    return options.model_copy(update={"recompute": "none", "recompute_blocks": None})


def _microbatches(batch: int, most: int) -> list[int]:
    """Into how many parts of at most ``most`` samples a batch may be cut, the fewest first."""
    return [count for count in range(1, batch + 1) if batch % count == 0 and batch // count <= most]


def _stages(lowered: Lowered, graph: OperatorGraph, microbatches: int) -> Stages:
    """The stages of a plan on a graph of the same operators. Raises StrategyError for others."""
    if [op.name for op in graph.operators] != [op.name for op in lowered.graph.operators]:
        raise StrategyError(f"graph {graph.name!r} at a batch of {graph.batch} has other operators than the plan's")
    same = microbatches == lowered.stages.microbatches
    return replace(lowered.stages, microbatches=microbatches, orders=lowered.stages.orders if same else ())


# ---- configs


def refitted(graph: OperatorGraph, lowered: Lowered) -> tuple[OperatorConfig, ...]:
    """Configs for a graph that is not quite that of a plan. An operator of the same name is split as there, on the same
    devices: an axis that is too short for its parts has fewer, and the devices of those that it lacks are replicas, so
    that weights stay where they are. Another operator is split over samples on the devices of the one
    before it."""
    names, count = [op.name for op in lowered.graph.operators], len(lowered.topology.devices)
    own = dict(zip(names, lowered.configs, strict=True))
    configs: list[OperatorConfig] = []
    for op in graph.operators:
        fit = _shortened(op, own[op.name], count) if op.name in own else None
        configs.append(fit or _like(op, configs[-1] if configs else lowered.configs[0]))
    return tuple(configs)


def _shortened(op: Operator, config: OperatorConfig, count: int) -> OperatorConfig | None:
    """A config with no more parts than an axis has indices; None if the operator cannot be split so."""
    if not all(axis in op.sizes for axis, _ in config.degrees):
        return None
    parts = {axis: _divisor(degree, op.sizes[axis]) for axis, degree in config.degrees}
    sizes = [size for axis, degree in config.degrees for size in (parts[axis], degree // parts[axis])]
    grid = np.array(config.devices).reshape(*sizes, config.replicas)
    order = [*range(0, len(sizes), 2), *range(1, len(sizes), 2), len(sizes)]
    devices = grid.transpose(order).reshape(-1).tolist()
    shares = {axis: own for axis, own in config.shares if len(own) == parts[axis]}
    fit = make_config(op, parts, devices, shares=shares).sharded(*config.sharding)
    try:
        check_config(op, fit, count)
    except StrategyError:
        return None
    return fit


def _divisor(degree: int, size: int) -> int:
    """The largest divisor of a degree that is at most ``size``."""
    return next(parts for parts in range(min(degree, size), 0, -1) if degree % parts == 0)


def _like(op: Operator, before: OperatorConfig) -> OperatorConfig:
    """An operator that the plan does not know, over samples on the devices of the one before it."""
    axis = next(iter(op.axes_of("sample")), None)
    degrees: Mapping[str, int] = {axis: _divisor(len(before.devices), op.sizes[axis])} if axis is not None else {}
    return make_config(op, degrees, before.devices).sharded(*before.sharding)
