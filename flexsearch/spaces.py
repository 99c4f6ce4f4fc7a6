"""Floor 5: the spaces of plans, how a budget is shared among their searches, and which of two plans is the answer."""

from __future__ import annotations

from typing import Final, Literal

from flexsearch.graph import OperatorGraph
from flexsearch.graph.samples import is_sum_over_samples
from flexsearch.search.hybrid import HybridResult
from flexsearch.search.outcome import SearchResult

Space = Literal["free", "splits", "layouts"]
"""``splits``: any split of any operator, one stage, one microbatch. ``layouts``: data x tensor x pipeline layouts with
stages, microbatches, recomputation and sharding. ``free``: both."""

LAYOUTS: Final = 0.25
"""Share of a budget of time that is kept for layouts. They are fewer and are estimated before they are simulated: on 16
P100s the search over those of BERT ended by itself after 5 s."""


def seconds_of_splits(seconds: float, graph: OperatorGraph) -> float:
    """The part of a budget (s) that the search over splits has, if both spaces are searched."""
    return (1.0 - LAYOUTS) * seconds if is_sum_over_samples(graph) else seconds


def seconds_of_layouts(seconds: float, graph: OperatorGraph, splits: SearchResult) -> float:
    """What is left of a budget (s) for layouts, behind the search over splits; 0 where they have nothing to offer: one
    device, or a model without microbatches, that fits into memory anyway."""
    if splits.feasible and (len(splits.strategy.cluster.devices) == 1 or not is_sum_over_samples(graph)):
        return 0.0
    return max(LAYOUTS * seconds, seconds - splits.elapsed_s)


def prefers_layout(layouts: HybridResult | None, splits: SearchResult, margin: float) -> bool:
    """Whether the best layout is the answer: it alone fits, or it is faster by more than this share of its time."""
    if layouts is None or not layouts.best.feasible:
        return False
    return not splits.feasible or layouts.step.makespan_s * (1.0 + margin) < splits.simulation.makespan_s
