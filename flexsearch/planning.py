"""Floor 5: the best plan for a setting, from the searches over splits of operators and over layouts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from flexsearch.cost.uncertainty import UNEQUAL
from flexsearch.report import in_words
from flexsearch.report.layouts import StagedRow, layout_words
from flexsearch.report.units import seconds
from flexsearch.search.hybrid import HybridProgress, HybridResult
from flexsearch.search.outcome import Progress, SearchResult
from flexsearch.setting import Setting, parse_budget
from flexsearch.simulate.staged import Step
from flexsearch.spaces import Space, prefers_layout, search_both
from flexsearch.strategy import Options, Strategy


@dataclass(frozen=True)
class Planned:
    """The best plan of a search. ``words``: the layout, the baseline that it is, or how layers are split.
    ``looked_at``: plans that were simulated. ``data_parallel_s``: seconds of a step of plain data parallelism, if that
    fits. ``interrupted``: Ctrl-C ended the search."""

    strategy: Strategy
    step: Step
    words: str
    looked_at: int
    data_parallel_s: float | None
    interrupted: bool


@dataclass(frozen=True)
class PlanProgress:
    """Where a search is: what it does, seconds so far, plans so far, seconds of a step of the best one (infinite before
    the first)."""

    phase: str
    elapsed_s: float
    plans: int
    best_s: float

    @property
    def words(self) -> str:
        """How many plans, and the best."""
        return f"{self.plans:,} plans, best {seconds(self.best_s)}" if self.plans else ""


OnProgress = Callable[[PlanProgress], None]


def plan(
    setting: Setting, budget: str | float, options: Options, *, space: Space, start: Strategy | None = None,
    seed: int = 0, on_progress: OnProgress | None = None,
) -> Planned:  # fmt: skip
    """Search for the fastest plan in a space; of both spaces the simpler plan, unless a layout is faster. Plans for
    several settings are compared by what they rest on as it is, so a plan need only beat a simpler one by ``UNEQUAL``.
    Layouts need a budget of time; a number of proposals goes to splits.
    ``start``: a plan that the search over splits begins with too. A plan that fits nowhere is answered all the same
    (``step.missing``). Raises StrategyError where there is no plan."""
    report = on_progress or (lambda now: None)
    seconds = parse_budget(budget)[0]
    if space == "layouts":
        return _of_layouts(setting, _layouts(setting, budget, options, report))
    if space == "splits" or seconds is None:
        return _of_splits(setting, _splits(setting, budget, options, start, seed, report))
    splits, layouts = search_both(
        seconds, setting.graph, len(setting.topology.devices),
        lambda share: _splits(setting, share, options, start, seed, report),
        lambda share: _layouts(setting, share, options, report),
    )  # fmt: skip
    best = _of_splits(setting, splits)
    if layouts is None:
        return best
    other = _of_layouts(setting, layouts)
    best, second = (other, best) if prefers_layout(layouts, splits, UNEQUAL) else (best, other)
    return replace(
        best, looked_at=best.looked_at + second.looked_at, interrupted=other.interrupted,
        data_parallel_s=_least(best.data_parallel_s, second.data_parallel_s),
    )  # fmt: skip


def _least(*times: float | None) -> float | None:
    """The shortest time that is one."""
    return min((time_s for time_s in times if time_s is not None), default=None)


def _layouts(setting: Setting, budget: str | float, options: Options, report: OnProgress) -> HybridResult:
    def watch(now: HybridProgress) -> None:
        report(PlanProgress(now.phase, now.elapsed_s, now.plans, now.best_s))

    return setting.search_layouts(budget, options=options, margin=UNEQUAL, on_progress=watch)


def _of_layouts(setting: Setting, result: HybridResult) -> Planned:
    best = result.best
    row = StagedRow("", best.pipeline, best.options, result.step, best.layout.sharding, best.changed)
    step = result.baselines["data-parallel"][1] if "data-parallel" in result.baselines else None
    return Planned(
        result.strategy, result.step, layout_words(row), result.plans,
        step.makespan_s if step is not None and not step.missing else None, "interrupted" in result.stopped,
    )  # fmt: skip


def _splits(
    setting: Setting, budget: str | float, options: Options, start: Strategy | None, seed: int, report: OnProgress
) -> SearchResult:
    def watch(now: Progress) -> None:
        report(PlanProgress(now.phase, now.elapsed_s, now.proposals, now.best_s))

    return setting.search(budget, options=options, start=start, seed=seed, margin=UNEQUAL, on_progress=watch)


def _of_splits(setting: Setting, result: SearchResult) -> Planned:
    parallel = result.baselines.get("data-parallel")
    return Planned(
        result.strategy, setting.step(result.strategy), result.baseline or words_of(setting, result.strategy),
        result.proposals, parallel.time_s if parallel is not None and parallel.feasible else None,
        "interrupted" in result.stopped,
    )  # fmt: skip


def words_of(setting: Setting, strategy: Strategy) -> str:
    """Any plan in words: the baseline that it is, how its layers are split, or its layout."""
    if strategy.is_plain:
        lowered = setting.lower(strategy)
        return setting.name_of(strategy) or in_words(lowered)
    return layout_words(setting.staged_row("", strategy))
