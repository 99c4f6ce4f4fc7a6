"""What each climb of a search does: where it starts, and how many proposals it may make.

With a budget of proposals, this depends only on climbs that ended at least ``WINDOW`` climbs earlier and on numbers of
proposals, so it is the same for any number of processes. With a budget in seconds, it depends on all that have ended.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from flexsearch.search.climb import Climb, Climbed
from flexsearch.search.constants import FROM_BEST, LENGTH, POLISH, SHARE, SLOWER, WINDOW
from flexsearch.search.evaluate import Configs, Evaluation, better, by_rank
from flexsearch.search.tuning import Tuned
from flexsearch.strategy import Options

POLISHED: Final = ", polished"
"""Ends the phase of climbs that polish what another one found."""


@dataclass(frozen=True, slots=True)
class Start:
    """A plan to start from, and into how many blocks it is folded. ``evaluation``: of the plan as it is folded."""

    name: str
    configs: Configs
    options: Options
    evaluation: Evaluation
    replicas: int = 1

    @property
    def rank(self) -> tuple[bool, float, int]:
        """Key that sorts the better start first; of two that are as good, the one that is folded more."""
        return *by_rank(self.evaluation), -self.replicas


@dataclass(frozen=True, slots=True)
class Plan(Tuned):
    """A plan and what it costs. ``optimal``: as of ``SearchResult``."""

    optimal: bool = False


class ClimbSchedule:
    """``order``: plans to start from. ``folds``: into how many blocks plans may be folded. ``best``: the best of the
    starts, called ``found_in``. ``proposals``: the budget, if there is one. ``patience``: of a chain. ``before``:
    number of earlier climbs with this seed. ``least``: with fewer proposals a search has hardly begun, and nothing but
    its budget or a local optimum ends it."""

    def __init__(
        self, order: Sequence[Start], folds: Sequence[int], best: Plan, found_in: str, proposals: int | None,
        patience: int, before: int, least: int = 0,
    ) -> None:  # fmt: skip
        self.order, self.folds, self.best, self.found_in = order, (1, *folds), best, found_in
        self.proposals, self.patience, self.before, self.least = proposals, patience, before, least
        self._planned: list[int] = []
        self._from_best: set[int] = set()
        """Which climbs start from the best plan, turns not counted."""
        self._turns = 0
        """Climbs that took the place of others, to go on from the best plan."""

    def plan(self, index: int, ended: Sequence[Climbed]) -> Climb | None:
        """What climb ``index`` does. Each start has its turn, then random plans; from climb FROM_BEST on, as soon
        as one has ``ended``, every second one starts from the best plan. Where plans can be folded, they are in
        turns."""
        kept = ended
        if self.proposals is not None:
            ended = ended[: max(0, index - WINDOW + 1)]
            kept = self.within(ended)[0]
        best, place = self._best_of(kept), index - self._turns
        patience = 1 + place // SLOWER
        count = LENGTH * patience * self.patience
        if self.proposals is not None:
            reserve = 0 if best.optimal else int(POLISH * self.proposals)
            spent = sum(c.proposals for c in ended) + sum(self._planned[len(ended) : index])
            share = max(SHARE * self.patience, self.proposals // WINDOW)
            count = min(count, share, self.proposals - reserve - spent) if len(kept) == len(ended) else 0
        waits = any(self._planned[len(ended) : index])
        del self._planned[index:]
        if count <= 0 and not waits:
            return self._last(index, ended, best)
        self._planned.append(count := max(0, count))
        if place >= FROM_BEST and place - 1 not in self._from_best and ended:
            self._from_best.add(place)
        taken = sum(earlier < place for earlier in self._from_best)
        stream = self.before + index
        if place in self._from_best:
            replicas = self.folds[taken % len(self.folds)]
            optimal = best.optimal and replicas == 1
            return Climb(
                index, stream, "from best", best.configs, count, best.evaluation, best.options, optimal, patience,
                coarse=True, replicas=replicas,
            )  # fmt: skip
        at, options = place - taken, best.options
        if at < len(self.order):
            start = self.order[at]
            name, configs, replicas, options = start.name, start.configs, start.replicas, start.options
        else:
            name, configs, replicas = "random", None, self.folds[(at - len(self.order)) % len(self.folds)]
        return Climb(
            index, stream, f"from {name}", configs, count, self.best.evaluation, options, patience=patience,
            coarse=True, replicas=replicas,
        )  # fmt: skip

    def _last(self, index: int, ended: Sequence[Climbed], best: Plan) -> Climb | None:
        """With what is left of a budget of proposals, polish the best plan when all other climbs have ended."""
        assert self.proposals is not None  # the clock ends a search otherwise
        left = self.proposals - sum(c.proposals for c in ended)
        if left <= 0 or best.optimal:
            return None
        self._planned.append(left)
        phase = next((c.phase for c in ended if c.configs == best.configs), f"from {self.found_in}")
        return self._polish(index, phase, best, left)

    def turn(self, index: int, best: Climbed, polish: bool) -> Climb:
        """Go on from what a climb has found, in the place of climb ``index``: with a chain, or only ``polish`` it."""
        self._turns += 1
        self._planned.append(0)
        if polish:
            return self._polish(index, best.phase, Plan(best.configs, best.options, best.evaluation), sys.maxsize)
        return Climb(index, self.before + index, "from best", best.configs, sys.maxsize, best.evaluation, best.options)

    def _polish(self, index: int, phase: str, best: Plan, proposals: int) -> Climb:
        phase = f"{phase.removesuffix(POLISHED)}{POLISHED}"
        stream = self.before + index
        return Climb(index, stream, phase, best.configs, proposals, best.evaluation, best.options, patience=0)

    def _best_of(self, climbs: Sequence[Climbed]) -> Plan:
        """The best plan: of the starts, or what these climbs found."""
        best = self.best
        for climbed in climbs:
            if better(climbed.evaluation, best.evaluation):
                best = Plan(climbed.configs, climbed.options, climbed.evaluation, climbed.optimal)
            elif (climbed.configs, climbed.options) == (best.configs, best.options) and climbed.optimal:
                best = Plan(best.configs, best.options, best.evaluation, True)
        return best

    def within(self, climbs: Sequence[Climbed]) -> tuple[Sequence[Climbed], str]:
        """Those of the climbs, in order, that a budget of proposals leaves time for, and why it ended there. What
        polished the best of them belongs to them. While nothing fits into memory, none of it is saved."""
        limit = self.proposals
        assert limit is not None
        total, last, best = 0, 0, self.best.evaluation
        for n, climbed in enumerate(climbs):
            if better(climbed.evaluation, best):
                last, best = total + (climbed.steps[-1].proposal if climbed.steps else 0), climbed.evaluation
            total += climbed.proposals
            idle = best.feasible and limit > total >= last + limit / 2 and not climbed.phase.endswith(POLISHED)
            if idle and (total >= self.least or self._best_of(climbs[: n + 1]).optimal):
                polished = [c for c in climbs[n + 1 :] if c.phase.endswith(POLISHED)]
                return [*climbs[: n + 1], *polished], f"half of the budget of {limit} proposals brought nothing better"
        return climbs, f"the budget of {limit} proposals was used up"
