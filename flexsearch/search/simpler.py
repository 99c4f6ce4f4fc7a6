"""A simpler plan in the place of the best one: made simpler and polished in turn."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import suppress

from flexsearch.search.canonical import simplify
from flexsearch.search.climb import Climber
from flexsearch.search.climbs import Plan
from flexsearch.search.constants import ROUNDS, SIMPLER
from flexsearch.search.polish import Taken


class _Late(Exception):
    """The time is over."""


def simpler(climber: Climber, best: Plan, limit: float, end: float) -> Plan:
    """A simpler plan, if one is hardly slower and costs at most ``limit`` (s), else ``best``. Where that is locally
    optimal, the simpler one is too, but for gains of less than it may cost: a single change that gains more is taken,
    and the result simplified again. ``end``: by ``time.monotonic``, when to stop."""

    def late() -> bool:
        return time.monotonic() > end

    polished = best.optimal
    for _ in range(ROUNDS):
        configs = simplify(climber.space, best.configs, climber.evaluate, limit=limit, stop=late)
        if configs == best.configs:
            break
        best = Plan(configs, best.options, climber.evaluate(configs))
        if polished:
            best = _polished(climber, best, late)
        if best.configs == configs:
            break
    return best


def _polished(climber: Climber, best: Plan, late: Callable[[], bool]) -> Plan:
    """Take single changes that gain more than simplifying may cost. If all were tried, the plan is locally optimal in
    that sense."""
    configs, ended = best.configs, False

    def look(_: int, taken: Taken | None) -> None:
        nonlocal configs
        if taken is not None:
            configs = taken.configs
        if late():
            raise _Late

    with suppress(_Late):
        ended = climber.polish.descend(
            configs, best.evaluation, sys.maxsize, climber.polish.all, look, SIMPLER
        )
    return Plan(configs, best.options, climber.evaluate(configs), ended)
