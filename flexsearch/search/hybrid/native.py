"""Layouts as PyTorch's own parts run them."""

from __future__ import annotations

from dataclasses import replace

from flexsearch.errors import StrategyError
from flexsearch.graph import OperatorGraph
from flexsearch.search.hybrid.splits import Configs
from flexsearch.strategy import Options, Strategy
from flexsearch.strategy.native import torch_plan
from flexsearch.strategy.pipeline import Pipeline
from flexsearch.topology import Topology


def as_native(
    graph: OperatorGraph, topology: Topology, pipeline: Pipeline, configs: Configs, options: Options
) -> Configs:  # fmt: skip
    """The configs of the first block as PyTorch's modules run this plan. Raises StrategyError with the first operator
    or option that they do not express."""
    named = {op.name: config for op, config in zip(graph.operators, configs, strict=True)}
    strategy = Strategy.make(
        graph, topology, named, options, stages=pipeline.stages(graph, len(topology.devices) // pipeline.replicas),
        microbatches=pipeline.microbatches, schedule=pipeline.schedule,
    )  # fmt: skip
    plan = torch_plan(strategy, graph)
    if plan.data != pipeline.replicas:
        raise StrategyError(f"samples are split {plan.data} times by {pipeline.replicas} replicas of the stages")
    ends = [*pipeline.first[1:], len(configs)]
    groups = [g for g, a, b in zip(pipeline.devices, pipeline.first, ends, strict=True) for _ in range(a, b)]
    return tuple(
        replace(own.on(group[d] for d in own.devices), states=config.states)
        for own, group, config in zip(plan.flow.configs, groups, configs, strict=True)
    )
