"""Floor 5: the best plan for a setting, from whichever search suits it: of single operators, or of layouts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from flexsearch.api import Setting
from flexsearch.report import groups
from flexsearch.report.layouts import StagedRow, layout_words
from flexsearch.report.units import seconds
from flexsearch.search.hybrid import HybridProgress
from flexsearch.search.outcome import Progress
from flexsearch.simulate.staged import Step
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
    setting: Setting, budget: str | float, options: Options, *, layouts: bool, start: Strategy | None = None,
    seed: int = 0, on_progress: OnProgress | None = None,
) -> Planned:  # fmt: skip
    """Search for the fastest plan. ``layouts``: among data x tensor x pipeline layouts, with a budget of time; else
    among the splits of single operators, from ``start`` too. A plan that fits nowhere is answered all the same
    (``step.missing``). Raises StrategyError where there is no plan."""
    report = on_progress or (lambda now: None)
    if layouts:
        return _layout(setting, budget, options, report)
    return _splits(setting, budget, options, start, seed, report)


def _layout(setting: Setting, budget: str | float, options: Options, report: OnProgress) -> Planned:
    def watch(now: HybridProgress) -> None:
        report(PlanProgress(now.phase, now.elapsed_s, now.plans, now.best_s))

    result = setting.search_layouts(budget, options=options, on_progress=watch)
    best = result.best
    row = StagedRow("", best.pipeline, best.options, result.step, best.layout.sharding, best.changed)
    step = result.baselines["data-parallel"][1] if "data-parallel" in result.baselines else None
    return Planned(
        result.strategy, result.step, layout_words(row), result.plans,
        step.makespan_s if step is not None and not step.missing else None, "interrupted" in result.stopped,
    )  # fmt: skip


def _splits(
    setting: Setting, budget: str | float, options: Options, start: Strategy | None, seed: int, report: OnProgress
) -> Planned:
    def watch(now: Progress) -> None:
        report(PlanProgress(now.phase, now.elapsed_s, now.proposals, now.best_s))

    result = setting.search(budget, options=options, start=start, seed=seed, on_progress=watch)
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
        return setting.name_of(strategy) or "; ".join(f"{g.layers}: {g.treatment}" for g in groups(lowered))
    return layout_words(setting.staged_row("", strategy))
