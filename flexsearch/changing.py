"""Floor 5: a plan on a changed cluster, beside what a new search finds there."""

from __future__ import annotations

from flexsearch.errors import FlexsearchError
from flexsearch.graph.sequence import sequence_length
from flexsearch.planning import OnProgress, plan, words_of
from flexsearch.report.whatif import Changed, PlanOnCluster
from flexsearch.setting import Setting
from flexsearch.spaces import Space
from flexsearch.strategy import Options, Strategy
from flexsearch.topology import Topology


def on_changed(
    setting: Setting, strategy: Strategy, topology: Topology, change: str, budget: str | float, *, space: Space,
    on_progress: OnProgress | None = None,
) -> tuple[Changed, Strategy | None]:  # fmt: skip
    """A strategy for ``setting`` as it is and on ``topology``, and what a new search finds there; with the strategy for
    the changed cluster that is faster, None where none fits. ``change``: in words; ``space``: as of
    ``planning.plan``. Raises StrategyError if the strategy is not for the setting, ProfileError if the profile of the
    setting is of other devices than the changed ones."""
    words = words_of(setting, strategy)
    today = PlanOnCluster(setting.step(strategy), words)
    there = Setting.of(setting.graph, topology, setting.costs.profile)
    start, same = _moved(there, strategy, words)
    options = strategy.options.exact
    if space == "layouts":  # the search sets the others
        options = Options(optimizer=options.optimizer, precision=options.precision, gradients=options.gradients)
    looked_at, kept = 0, True
    anew, best = same, start
    try:
        begin = start.undivided() if start is not None and start.weight_gradients else start
        if strategy.options.recipes:  # the search is for exact plans
            begin = None
        planned = plan(there, budget, options, space=space, start=begin, on_progress=on_progress)
    except FlexsearchError as error:
        if start is None:
            anew = PlanOnCluster(None, reason=error.message)
    else:
        looked_at = planned.looked_at
        other = PlanOnCluster(planned.step, planned.words)
        if _rank(other) < _rank(same):
            anew, best, kept = other, planned.strategy, False
    changed = Changed(change, today, same, anew, kept and start is not None, looked_at, sequence_length(setting.graph))
    return changed, best if anew.fits else None


def _moved(there: Setting, strategy: Strategy, words: str) -> tuple[Strategy | None, PlanOnCluster]:
    """The same plan on another cluster; None, and why, where it is none there."""
    before, after = len(strategy.cluster.devices), len(there.topology.devices)
    if before != after:
        return None, PlanOnCluster(None, reason=f"it is made for {before:,} devices, and there would be {after:,}")
    try:
        changes = {"cluster": there.topology, "prediction": None, "search": None}
        moved = Strategy.from_file(strategy.to_file().model_copy(update=changes))
        moved.check(there.graph, there.topology)
        return moved, PlanOnCluster(there.step(moved), words)
    except FlexsearchError as error:
        return None, PlanOnCluster(None, reason=error.message)


def _rank(one: PlanOnCluster) -> tuple[bool, int, float]:
    """Key that sorts the better one first: what fits, else what lacks least."""
    if one.step is None:
        return True, 2**62, 0.0
    return not one.fits, one.step.missing, one.step.makespan_s
