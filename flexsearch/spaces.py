"""Floor 5: the spaces of plans, how a budget is shared among their searches, and which of two plans is the answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal

from flexsearch.errors import StrategyError
from flexsearch.graph import OperatorGraph
from flexsearch.graph.samples import is_sum_over_samples
from flexsearch.search.hybrid import HybridResult
from flexsearch.search.outcome import SearchResult, is_faster

Space = Literal["free", "splits", "layouts"]
"""``splits``: any split of any operator, one stage, one microbatch. ``layouts``: data x tensor x pipeline layouts with
stages, microbatches, recomputation and sharding. ``free``: both."""

LAYOUTS: Final = 0.25
"""Share of a budget of time that is kept for layouts. They are fewer and are estimated before they are simulated: on 16
P100s the search over those of BERT ended by itself after 5 s."""


def search_both(
    seconds: float, graph: OperatorGraph, devices: int, splits: Callable[[str], SearchResult],
    layouts: Callable[[str], HybridResult | None],
) -> tuple[SearchResult, HybridResult | None]:  # fmt: skip
    """Both searches within a budget (s): that over splits, and in what it leaves that over layouts, each called with
    its budget. No layouts (None) where they have nothing to offer (one device, or a model without microbatches, and a
    plan of one stage fits), where none suits graph or devices, or after Ctrl-C."""
    offer = devices > 1 and is_sum_over_samples(graph)
    result = splits(f"{((1.0 - LAYOUTS) if offer else 1.0) * seconds:.6f}s")
    if "interrupted" in result.stopped or (result.feasible and not offer):
        return result, None
    try:
        return result, layouts(f"{max(LAYOUTS * seconds, seconds - result.elapsed_s):.6f}s")
    except StrategyError:
        return result, None


def prefers_layout(layouts: HybridResult | None, splits: SearchResult, margin: float | None) -> bool:
    """Whether the best layout is the answer: it alone fits, or it is faster, by ``margin`` (``is_faster``). At equal
    times the plan of one stage is."""
    if layouts is None or not layouts.best.feasible:
        return False
    if not splits.feasible:
        return True
    shorter = layouts.step.makespan_s < splits.simulation.makespan_s
    return shorter and is_faster(layouts.step, splits.simulation, margin)
