"""The search over layouts: all are estimated, the most promising simulated, until none that is left promises more; the
best are improved number by number and stage by stage, then operator by operator."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import replace
from math import inf, prod
from typing import Literal

import numpy as np
import numpy.typing as npt

from flexsearch import compiled
from flexsearch.cost import Profile
from flexsearch.graph import OperatorGraph
from flexsearch.proof.bound import lower_bound
from flexsearch.search.budget import cores
from flexsearch.search.hybrid.ahead import Ahead
from flexsearch.search.hybrid.answer import (
    choose,
    nothing_suits,
    plain_options,
    simplified,
    strategy_of,
    with_least_memory,
)
from flexsearch.search.hybrid.constants import (
    AHEAD,
    ANSWER,
    CLIMBED,
    EVERY_S,
    EXPLORED,
    FAR,
    FEW,
    MOST_ANSWER,
    PATIENCE,
    POLISHED,
    SHORT_MARGIN,
    SHORT_PATIENCE,
    SURE,
)
from flexsearch.search.hybrid.estimate import Estimate, Estimates
from flexsearch.search.hybrid.layout import Layout, runs
from flexsearch.search.hybrid.moves import Moves
from flexsearch.search.hybrid.numbers import Numbers
from flexsearch.search.hybrid.outcome import FAMILIES, Candidate, HybridProgress, HybridResult
from flexsearch.search.hybrid.ranking import SORT, Key, Ranking, Ratios, likeness
from flexsearch.search.hybrid.trials import Answer, Request, Trials
from flexsearch.search.hybrid.work import Works
from flexsearch.simulate.staged import Step
from flexsearch.strategy import Options
from flexsearch.topology import Topology


def search_hybrid(
    graph: OperatorGraph,
    topology: Topology,
    options: Options | None = None,
    profile: Profile | None = None,
    *,
    budget_s: float = 60.0,
    processes: int | None = None,
    on_progress: Callable[[HybridProgress], None] | None = None,
    on_end: Callable[[], None] | None = None,
    native: bool = False,
    margin: float | None = 0.0,
) -> HybridResult:
    """The fastest plan that is found among data x tensor x pipeline layouts of all devices, and with other splits of
    operators and other borders of stages inside them. It may need memory that no plan of one stage and one microbatch
    could do with. ``options``: of the whole step; the search sets those that a layout leaves open. ``processes``:
    at most so many; None: one for each core; a search that ``budget_s`` (s) does not end finds the same with any
    number. ``native``: only plans that PyTorch's own parts express. ``margin``: as of ``search.search``. Ctrl-C
    ends the search with the best plan so far. ``on_end``: called once, when the search itself is over.

    Raises StrategyError if the graph cannot be planned so: no batch to divide, or devices that are not alike."""
    count = cores() if processes is None else processes
    search = LayoutSearch(graph, topology, options or Options(), profile, budget_s, on_progress, count, native)
    return search.run(on_end or (lambda: None), margin)


class _Over(Exception):
    """The time is over."""


class LayoutSearch:
    """One search; ``evaluate`` simulates the plan of a layout. Arguments as of ``search_hybrid``."""

    def __init__(
        self, graph: OperatorGraph, topology: Topology, options: Options, profile: Profile | None, budget_s: float,
        on_progress: Callable[[HybridProgress], None] | None = None, processes: int = 1, native: bool = False,
    ) -> None:  # fmt: skip
        self.began = time.monotonic()
        self.graph, self.topology, self.options, self.budget_s = graph, topology, options, budget_s
        self.on_progress, self.processes, self.native = on_progress, processes, native
        self.trials = Trials(graph, topology, options, profile, native)
        self.ahead = Ahead(self.trials, (graph, topology, options, profile, native), processes - 1, self._watch)
        self.cuts, whole = self.trials.cuts, self.trials.simulators.graph
        self.works = Works(whole, topology, profile, options)
        self.estimates, self.ratios = Estimates(self.works, self.cuts), Ratios()
        self.moves = Moves(self.estimates, topology.host_size)
        self.numbers = Numbers(self.estimates, options)
        self.simulated: dict[Key, Candidate | None] = {}
        """None: the plan suits the devices or the samples not."""
        self.considered: set[Key] = set()
        self.kept: dict[str, Candidate] = {}
        """The best plan of each family."""
        self._climbed: set[Key] = set()
        self.patience, self.margin = (SHORT_PATIENCE, SHORT_MARGIN) if self.cuts.short else (PATIENCE, 1.0)
        self.plans, self.phase, self._longest_s, self._said = 0, "", 0.0, 0.0
        self._seconds: dict[Key, float] = {}
        """By plan, how long its simulation took."""
        self.best: Candidate | None = None
        self._over = False

    def run(self, on_end: Callable[[], None], margin: float | None = 0.0) -> HybridResult:
        """The whole search. ``on_end``, ``margin``: as of ``search_hybrid``."""
        stopped = "no layout that is left has a better estimate, and no move makes the best ones faster"
        try:
            try:
                self._search()
                self._try_plain_options()
            except _Over:
                stopped = f"the budget of {self.budget_s:g} s was used up"
            except KeyboardInterrupt:
                if self.best is None:
                    raise
                stopped = "the search was interrupted"
            on_end()
            if self.best is None:
                raise nothing_suits(self.graph, self.topology, self._refusals() if self.native else None)
            self._over = True
            return self._result(self.best, stopped, margin)
        finally:
            self.ahead.close()

    def _refusals(self) -> str:
        """Why no layout can be exported: as said of the first one with replicas, and of the first with stages alone."""
        reasons: dict[str, str] = {}
        for key in self.numbers.layouts():
            kind = "replicas" if key.layout.data > 1 else "a pipeline" if key.layout.pipeline > 1 else ""
            if kind and kind not in reasons and self._suits(key.layout, key.options):
                reasons[kind] = self.trials.refusal(self._request(key))
            if len(reasons) == 2:
                break
        return "".join(f"; {kind}: {why}" for kind, why in reasons.items() if why)

    def _search(self) -> None:
        """All there is to do. Raises _Over."""
        if compiled.is_warm():  # else workers would compile the same
            self.ahead.start()
        self.phase = "layouts"
        ranking = Ranking(self.ratios, self._estimated(self.numbers.layouts()))
        self._simulate_best(ranking)
        self.phase = "stages of different sizes"
        uneven = Ranking(self.ratios, self._estimated(iter(()) if self.native else self.numbers.divisions()))
        self._simulate_best(uneven)
        self.phase = "other layouts"
        for others in (ranking, uneven):
            self._explore(others)
            self._simulate_best(others)
        self.phase = "baselines"
        self._simulate_families(ranking)
        self.phase = "moves"
        for candidate in self._different(None if self.cuts.short else CLIMBED):
            self._climb(candidate)
        for candidate in self._different(by_order=True) if self.cuts.short else ():
            near = self.best is not None and candidate.cost <= self.best.cost * self.margin
            now = Key(candidate.layout, candidate.options, candidate.pipeline.first)
            if near and (better := self._better(candidate, self.moves.of_two_borders(now))) is not None:
                self._climb(better)
        if self.native:
            return
        self.phase = "splits of operators"
        if self.cuts.short:
            everywhere = Layout(1, 1, 1, widths=(len(self.topology.devices),))
            for speed in range(1 + len(self.estimates.speeds)):
                self.evaluate(replace(everywhere, speed=speed), self.options)
        self._improve("splits", self._different(None if self.cuts.short else POLISHED))
        self.phase = "orders of passes"
        self._improve("order", self._different(POLISHED))

    def _try_plain_options(self) -> None:
        """Simulate the plans that can stand for the best ones in the answer (``answer.simplified``)."""
        self.phase = "simpler options"
        for candidate in self._with_least_memory().values():
            self.evaluate(*plain_options(candidate, self.options.prefetch))

    # ---- simulating

    def evaluate(self, layout: Layout, options: Options, first: tuple[int, ...] = ()) -> Candidate | None:
        """The plan of a layout, cut before these operators (default: so that the slowest stage takes as short as
        possible); None where it suits graph, batch, devices or schedule not."""
        key = self._plain(Key(layout, options, first))
        if key not in self.simulated:
            self.simulated[key] = self._candidate(key) if self._is_possible(layout, options) else None
        return self.simulated[key]

    def _suits(self, layout: Layout, options: Options) -> bool:
        """Whether the numbers of a layout go with the graph, its batch and each other."""
        share, rest = divmod(self.graph.batch, layout.data)
        if rest or share % layout.microbatches or share // layout.microbatches < max(layout.each):
            return False
        few = layout.stages <= len(self.graph.operators)
        if isinstance(options.recompute_blocks, tuple) and len(options.recompute_blocks) != layout.stages:
            return False
        return few and options.recompute in self.works.regions and runs(layout)

    def _is_possible(self, layout: Layout, options: Options) -> bool:
        """Whether a layout suits, and the topology falls apart into its replicas."""
        return self._suits(layout, options) and self.numbers.falls_apart(layout.data)

    def _plain(self, key: Key) -> Key:
        """The key of the same plan without first operators, if the layout is cut there by itself: so that none is
        simulated twice, and one that people write by hand is told as that."""
        own = key.first and self._suits(key.layout, key.options) and key.first == self.estimates.first(key.layout)
        return key._replace(first=()) if own else key

    def _request(self, key: Key) -> Request:
        return Request("plan", key, key.first or self.estimates.first(key.layout))

    def _expect(self, keys: Iterable[Key]) -> None:
        """Say which plans will probably be simulated after the next one."""
        suit = (key for key in keys if key not in self.simulated and self._is_possible(key.layout, key.options))
        self.ahead.expect(map(self._request, suit))

    def _candidate(self, key: Key) -> Candidate | None:
        if self.best is not None and self._left() < self._longest_s / 2:
            raise _Over
        answer = self.ahead.get(self._request(key))
        if answer.best is None:
            return None
        candidate = answer.best
        simulated = Estimate(candidate.seconds, candidate.used)
        self.ratios.learn(key, self.estimates.estimate(*key), simulated)
        self._note(candidate, 1)
        if self.plans > 1:
            self._seconds[key] = answer.seconds
            self._longest_s = max(self._longest_s, answer.seconds)
        else:
            self.began += answer.seconds  # the first one loads what is compiled, or compiles it
            self.ahead.start()
        self._check_time()
        return candidate

    def _note(self, candidate: Candidate, plans: int) -> None:
        """Count simulated plans, of which this is the best, and keep it if it is the best of all or of its family."""
        self.plans += plans
        if self.best is None or candidate.rank < self.best.rank:
            self.best = candidate
        for name in candidate.families:
            if name not in self.kept or candidate.rank < self.kept[name].rank:
                self.kept[name] = candidate
        self._tell()

    def _watch(self, answer: Answer) -> None:
        """Called while an answer is awaited, with what there is of it."""
        if self._over:
            return
        if answer.best is not None:
            self._note(answer.best, 0)
        if self.best is not None:
            self._check_time()

    def _tell(self) -> None:
        """Report the progress."""
        if self.on_progress is not None:
            count, best_s = max(self.plans, len(self.considered)), self.best.seconds if self.best else inf
            self.on_progress(HybridProgress(self.plans, count, best_s, time.monotonic() - self.began, self.phase))

    def _left(self) -> float:
        """Seconds of the budget, without those for the answer."""
        best = [self.best] if self.best is not None else []
        answer_s = ANSWER * sum(self._seconds.get(c.key, 0.0) for c in (*best, *self.kept.values())) / self.processes
        return self.budget_s - min(answer_s, MOST_ANSWER * self.budget_s) - (time.monotonic() - self.began)

    def _check_time(self) -> None:
        if self._left() < 0.0:
            raise _Over

    # ---- estimates

    def _estimated(self, keys: Iterator[Key]) -> Iterator[tuple[Key, Estimate]]:
        """Plans that have not been estimated before, with their estimates: at least until one is simulated, and as long
        as there is time to simulate more."""
        for key in keys:
            if self.best is not None and self._left() < (1.0 - EXPLORED) * self.budget_s:
                return
            if key not in self.considered:
                self.considered.add(key)
                yield key, self.estimates.estimate(*key)
                if time.monotonic() - self._said > EVERY_S:
                    self._said = time.monotonic()
                    self._tell()

    def _simulate_best(
        self, ranking: Ranking, among: npt.NDArray[np.bool_] | None = None,
        best: Callable[[], Candidate | None] | None = None, most: int | None = None,
    ) -> None:  # fmt: skip
        """Simulate plans, those with the best estimates first, until no estimate is better than the ``best`` simulated
        plan (of all), or ``most`` plans have been simulated. Where none fits, some more are tried."""
        tried = missed = 0
        while (most is None or tried < most) and (taken := ranking.take(among)) is not None:
            (key, cost), now = taken, self.best if best is None else best()
            limit = inf if now is None else now.cost * self.margin
            if (cost >= limit and (now is None or now.feasible)) or missed >= self.patience:
                return
            near = inf if now is None or not now.feasible else limit
            self._expect(other for other, cost in ranking.following(AHEAD, among) if cost < near)
            if self.evaluate(*key) is None:  # nothing was simulated
                self._check_time()
                continue
            tried += 1
            missed = missed + 1 if now is (self.best if best is None else best()) else 0

    def _simulate_families(self, ranking: Ranking) -> None:
        """Simulate plans that people write by hand for their own sake, for the answer tells the best of each family:
        the most promising family first, as the budget may end it. Of a family far from fitting one plan is enough."""
        families = []
        for name, suits in FAMILIES.items():
            among = ranking.chosen(lambda key, suits=suits: suits(key.layout))  # type: ignore[misc]
            if (least := ranking.least(among)) is not None:
                families.append((least.used > FAR, least.cost, name, among))
        for far, _, name, among in sorted(families, key=lambda family: family[:2]):
            if not (far and name in self.kept):
                self._simulate_best(ranking, among, lambda name=name: self.kept.get(name), 1 if far else FEW)  # type: ignore[misc]

    def _explore(self, ranking: Ranking) -> None:
        """Simulate a plan of each sort that has not been tried, where its estimate is not far from the best plan: then
        the estimates of the sort are corrected by its own ratio."""
        missed = 0
        while (taken := ranking.take(ranking.untried)) is not None and self.best is not None:
            (key, cost), before = taken, self.best
            limit = prod([1.0 + self.ratios.spread] * SURE) * before.cost
            late = self._left() < (1.0 - EXPLORED) * self.budget_s or missed >= self.patience
            if late or cost > limit:
                return
            if not self._is_possible(key.layout, key.options):
                continue
            near = {likeness(other)[SORT]: other for other, _ in ranking.following(AHEAD, ranking.untried)}
            self._expect(other for sort, other in near.items() if sort != likeness(key)[SORT])
            self.evaluate(*key)
            missed = missed + 1 if self.best is before else 0

    # ---- moves

    def _different(self, count: int | None = None, by_order: bool = False) -> list[Candidate]:
        """The best plans of different groups of devices (``by_order``: and orders of passes)."""
        plans: dict[Hashable, Candidate] = {}
        for candidate in sorted((c for c in self.simulated.values() if c is not None), key=lambda c: c.rank):
            layout = candidate.layout
            order = (layout.schedule, layout.chunks) if by_order else ()
            plans.setdefault((layout.factoring, order), candidate)
        return list(plans.values())[:count]

    def _climb(self, candidate: Candidate) -> None:
        """Make one move at a time while that helps; the first of the most promising moves that does is taken."""
        improved = True
        while improved:
            improved = False
            now = Key(candidate.layout, candidate.options, candidate.pipeline.first)
            if now in self._climbed:
                return
            self._climbed.add(now)
            if (better := self._better(candidate, self.moves.of(now))) is not None:
                candidate, improved = better, True

    def _better(self, candidate: Candidate, moves: Iterator[Key]) -> Candidate | None:
        """The first of the most promising moves that makes a plan better."""
        promising = self._promising(moves)[: self.patience]
        for n, key in enumerate(promising):
            self._expect(promising[n + 1 :])
            new = self.evaluate(*key)
            if new is not None and new.rank < candidate.rank:
                return new
        return None

    def _improve(self, what: Literal["splits", "order"], candidates: Iterable[Candidate]) -> None:
        """Try other splits of operators, or another order of passes."""
        requests = [Request(what, candidate.key, candidate=candidate) for candidate in candidates]
        for n, request in enumerate(requests):
            self.ahead.expect(requests[n + 1 :])
            answer = self.ahead.get(request)
            if answer.best is not None:
                self._seconds[answer.best.key] = self._seconds.get(request.key, 0.0)
                self._note(answer.best, answer.plans)
            self._check_time()

    def _promising(self, moves: Iterator[Key]) -> list[Key]:
        """Plans that suit, the most promising first."""
        plans: list[tuple[float, int, Key]] = []
        for key in dict.fromkeys(map(self._plain, moves)):
            if self.simulated.get(key, True) is not None and self._suits(key.layout, key.options):
                self.considered.add(key)
                cost = self.ratios.corrected(key, self.estimates.estimate(*key)).cost
                plans.append((cost, len(plans), key))
        return [key for _, _, key in sorted(plans)]

    # ---- the answer

    def _with_least_memory(self, best: Candidate | None = None) -> dict[str, Candidate]:
        """See ``answer.with_least_memory``. ``best``: of all plans, if it is not that of the search."""
        if (first := best or self.best) is None:
            return {}
        return with_least_memory({"": first, **self.kept}, filter(None, self.simulated.values()))

    def _result(self, best: Candidate, stopped: str, margin: float | None = 0.0) -> HybridResult:
        plans = self._with_least_memory(best)
        simpler = {name: simplified(c, self.simulated, self.options.prefetch) for name, c in plans.items()}
        self.kept = {name: candidate for name, candidate in simpler.items() if name}
        best = min(simpler.values(), key=lambda candidate: candidate.rank)
        elapsed = time.monotonic() - self.began
        requests = {name: Request("step", c.key, candidate=c) for name, c in {"": best, **self.kept}.items()}
        self.ahead.expect(requests.values())
        steps = {name: self._step(request) for name, request in requests.items()}
        baselines = {name: (self.kept[name], steps[name]) for name in FAMILIES if name in self.kept}
        best, step, baseline, aside = choose(best, steps[""], baselines, margin)
        bound_s = lower_bound(self.works.graph, self.topology, self.works.costs, self.options, None).seconds
        strategy = strategy_of(self.trials, best, step, self.plans, bound_s)
        considered = max(self.plans, len(self.considered))
        return HybridResult(
            best, strategy, step, baselines, baseline, self.plans, considered, elapsed, stopped, bound_s, aside
        )

    def _step(self, request: Request) -> Step:
        step = self.ahead.get(request).step
        assert step is not None
        return step
