"""The searches of ``optimize``: over splits, over layouts, and for a proof. A signal ends each with the best so far."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flexsearch.cli import signals
from flexsearch.cli.layouts import search_layouts
from flexsearch.cli.progress import SearchLive

if TYPE_CHECKING:
    from flexsearch.cli.search_options import OptimizeOptions
    from flexsearch.proof.exhaustive import Optimum
    from flexsearch.search.hybrid import HybridResult
    from flexsearch.search.outcome import SearchResult
    from flexsearch.setting import Setting
    from flexsearch.strategy import Options, Strategy

SLACK_S = 60.0
"""A search looks at the clock between two plans, and one plan for thousands of devices takes minutes: it is ended this
much later than twice its budget (once for the baselines, once for the climbs)."""


@dataclass(frozen=True)
class Asked:
    """What the options of the command say, and what they name. ``step``: of the whole step; ``first``: the plan to go
    on from; ``margin``: a share, None: what tells plans apart; ``topology``: as it was named; ``trained``: the options
    of ``run`` that name the model."""

    options: OptimizeOptions
    setting: Setting
    step: Options
    first: Strategy | None
    margin: float | None
    allow: tuple[str, ...]
    topology: str
    trained: str

    @property
    def both(self) -> bool:
        """Whether both spaces are searched. What goes on from a plan, or keeps or proves something, is about splits,
        and so is a number of proposals."""
        from flexsearch.setting import parse_budget

        options = self.options
        kept = self.first is not None or bool(options.pin) or options.exhaustive is not None
        return options.space == "free" and not kept and parse_budget(options.budget)[0] is not None


def splits(asked: Asked, budget: str) -> SearchResult:
    """The search over splits. A signal ends it with the best plan so far; later ones only note that the command is to
    end. Raises StrategyError if the cluster is so large that not even one plan was evaluated long after the budget was
    used up."""
    from flexsearch import compiled
    from flexsearch.errors import StrategyError
    from flexsearch.setting import parse_budget

    seconds, setting, options = parse_budget(budget)[0], asked.setting, asked.options
    # Compiling can take longer than that, where a machine is busy, and does not count. Where nothing tells how long it
    # took, there is no limit.
    limit = 2.0 * seconds + SLACK_S if seconds is not None and compiled.compiles_for_all() else None
    late = StrategyError(
        f"the budget of {options.budget} was used up long ago: {setting.topology.name} with "
        f"{len(setting.topology.devices)} devices, or {setting.graph.name} with {len(setting.graph.operators)} "
        "operators, is too large for it",
        "Give more time, or search on fewer devices.",
    )

    def end() -> None:
        signals.no_deadline()
        signals.current.hold()

    with SearchLive(budget) as live, signals.deadline(limit, late, compiled.compiling_s):
        return setting.search(
            budget, seed=options.seed, start=asked.first, pins=tuple(options.pin or ()), processes=options.processes,
            margin=asked.margin, options=asked.first.options if asked.first is not None else asked.step,
            weight_gradients=options.weight_gradients, on_progress=live.update, on_phase=live.prepare, on_end=end,
        )  # fmt: skip


def saved_splits(asked: Asked, budget: str) -> SearchResult:
    """The search over splits, whose plan no signal may lose from then on."""
    result = splits(asked, budget)
    if result.feasible:
        save(asked, result, None)
    return result


def layouts(asked: Asked, budget: str) -> HybridResult | None:
    """The search over layouts; None if it was interrupted before it had a plan. Raises StrategyError."""
    if signals.current.number:
        return None
    try:
        with signals.current.released():
            return search_layouts(asked.setting, asked.step, budget, asked.options.processes, margin=asked.margin)
    except KeyboardInterrupt:
        return None


def free(
    asked: Asked, budget: str, over_splits: Callable[[Asked, str], SearchResult] = splits
) -> tuple[SearchResult, HybridResult | None]:
    """The best plans of both spaces, which share a budget of time; None: that is a number of proposals."""
    from flexsearch.setting import parse_budget
    from flexsearch.spaces import search_both

    if (seconds := parse_budget(budget)[0]) is None:
        return over_splits(asked, budget), None
    return search_both(
        seconds, asked.setting.graph, len(asked.setting.topology.devices), lambda share: over_splits(asked, share),
        lambda share: layouts(asked, share),
    )  # fmt: skip


def prove(asked: Asked, result: SearchResult) -> tuple[SearchResult, Optimum | None]:
    """The result, or what an exhaustive search puts in its place, and that search; None if there was no time for it."""
    budget = asked.options.exhaustive
    if budget is None or signals.current.number or result.stopped.startswith("interrupted"):
        return result, None
    proof = None
    try:
        with signals.current.released(), SearchLive(budget) as live:
            proof = asked.setting.prove(
                result, budget, pins=tuple(asked.options.pin or ()), on_progress=live.proving
            )  # fmt: skip
    except KeyboardInterrupt:  # elsewhere than in the search itself, which catches it
        return result, proof
    return asked.setting.proved(result, proof), proof


def save(asked: Asked, result: SearchResult, staged: HybridResult | None) -> None:
    """Write the plan of one stage, or that of the layout. Raises StrategyError if it fits into no memory."""
    from flexsearch.api import refuse_what_does_not_fit

    if staged is not None:
        staged.strategy.save(asked.options.output)
        return
    refuse_what_does_not_fit(result, asked.setting.topology)
    result.strategy.save(asked.options.output)
