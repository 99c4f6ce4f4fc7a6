"""What one block of devices does with one microbatch: all that is lowered of a step in which blocks are alike."""

from __future__ import annotations

from dataclasses import dataclass

from flexsearch.errors import NotationError, StrategyError
from flexsearch.graph import OperatorGraph
from flexsearch.graph.batch import Part, microbatch
from flexsearch.graph.samples import check_sum_over_samples
from flexsearch.lower.actions import read_order
from flexsearch.lower.folding import Fold, fold
from flexsearch.lower.schedule import Stages
from flexsearch.strategy.pipeline import Pipeline
from flexsearch.strategy.stage import check_batch
from flexsearch.topology import Topology


@dataclass(frozen=True)
class Share:
    """``graph``: of one microbatch of one block's share. ``topology``: the block. ``fold``: None if there is one
    block."""

    graph: OperatorGraph
    topology: Topology
    fold: Fold | None


def share_of(
    graph: OperatorGraph, topology: Topology, replicas: int, microbatches: int, part_of: Part = microbatch
) -> Share:  # fmt: skip
    """One of ``replicas`` blocks' part of one of ``microbatches``. Raises StrategyError if the batch cannot be divided
    so, or its loss is no sum over samples, TopologyError if the topology does not fall apart into equal blocks."""
    check_batch(graph.batch, replicas, microbatches)
    if microbatches > 1:
        _check_microbatches(graph, microbatches)
    if replicas > 1:
        parts = fold(graph, topology, replicas, microbatches, part_of)
        return Share(parts.part, parts.folding.block, parts)
    try:
        return Share(part_of(graph, microbatches) if microbatches > 1 else graph, topology, None)
    except NotationError as error:
        raise StrategyError(f"the batch cannot be divided by {microbatches}: {error.message}") from error


def _check_microbatches(graph: OperatorGraph, microbatches: int) -> None:
    try:
        check_sum_over_samples(graph)
    except NotationError as error:
        raise StrategyError(f"microbatches: {microbatches}: {error.message}", error.remedy) from error


def stages_of(pipeline: Pipeline) -> Stages:
    """The stages of the first block."""
    orders = tuple(read_order(text) for text in pipeline.orders)
    return Stages(pipeline.first, pipeline.devices, pipeline.microbatches, pipeline.schedule, orders)
