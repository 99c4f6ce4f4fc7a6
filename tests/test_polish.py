"""Polishing: many alternatives in one compiled call, and the end of a search's time."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, nextafter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexsearch.cost import Costs
from flexsearch.graph import OperatorGraph
from flexsearch.search import Evaluation, Evaluator, search
from flexsearch.search import run as one_search
from flexsearch.search.budget import Budget
from flexsearch.search.climb import Climb, Climbed, Climber, Watch
from flexsearch.search.climbs import POLISHED, ClimbSchedule
from flexsearch.search.constants import ENOUGH, REBUCKET, SIMPLER, WORTH
from flexsearch.search.polish import Look, Polish, Subject, Taken
from flexsearch.search.space import Space
from flexsearch.search.workers import Turn, Workers
from flexsearch.strategy import Options
from flexsearch.topology import Topology
from tests.proposals import propose
from tests.test_baselines import cnn, ethernet
from tests.test_search import recurrent


@pytest.mark.parametrize("graph", [cnn(batch=32, hidden=512), recurrent()], ids=lambda g: g.name)
@pytest.mark.parametrize("topology", [ethernet(4), Topology.load("p100:1")], ids=lambda t: t.name)
@settings(derandomize=True, deadline=None, max_examples=8)
@given(seed=st.integers(0, 2**32 - 1))
def test_a_proposal_is_evaluated_up_to_a_limit(graph: OperatorGraph, topology: Topology, seed: int) -> None:
    space, rng = Space(graph, topology), np.random.Generator(np.random.PCG64(seed))
    costs, options = Costs(graph, topology), Options()
    simulator = Evaluator(graph, topology, costs, options).at(space.random_plan(rng))
    fresh = Evaluator(graph, topology, costs, options)
    for _ in range(4):
        have, changes, times = simulator.configs, [], []
        for _ in range(6):
            _, new = propose(rng, space, have)
            found = {i: c for i, (c, old) in enumerate(zip(new, have, strict=True)) if c != old}
            changes.append((list(found), [simulator.templates.config(i, c) for i, c in found.items()]))
            times.append(fresh(new).time_s)
        limit = float(rng.uniform(0.95 * min(times), max(times)))
        fast = [k for k, seconds in enumerate(times) if seconds <= limit]
        for k, (operators, numbers) in enumerate(changes):
            assert simulator.attempt(operators, numbers, limit) == (times[k] if k in fast else inf)
            assert simulator.configs == have
            if k not in fast:
                with pytest.raises(RuntimeError):
                    simulator.accept()
        if fast:
            simulator.attempt(*changes[fast[0]], limit)
            simulator.accept()
            assert simulator.seconds == times[fast[0]] == fresh(simulator.configs).time_s


def test_a_local_optimum_has_no_better_alternative() -> None:
    graph, topology = cnn(batch=32, hidden=512), ethernet(2)
    climber = Climber(graph, topology, Costs(graph, topology), Options(), seed=0)
    start = climber.space.random_plan(np.random.Generator(np.random.PCG64(3)))
    before = climber.evaluate(start)
    done = climber.climb(Climb(0, 0, "polish", start, 10**6, before, Options(), patience=0), lambda _: None)
    assert done.optimal and done.evaluation.cost < before.cost and done.accepted > 0
    fresh = Evaluator(graph, topology, Costs(graph, topology), Options())
    assert fresh(done.configs) == done.evaluation
    for i in range(len(graph.operators)):
        for config in climber.space.alternatives(i, done.configs):
            for changes in ({i: config}, climber.space.follow(i, config)):
                plan = tuple(changes.get(k, old) for k, old in enumerate(done.configs))
                assert fresh(plan).cost > nextafter(done.evaluation.cost, 0.0)


def test_small_gains_do_not_take_the_place_of_a_local_optimum(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, topology = cnn(batch=32, hidden=512), ethernet(2)
    climber = Climber(graph, topology, Costs(graph, topology), Options(), seed=0)
    start, other = (climber.space.random_plan(np.random.Generator(np.random.PCG64(k))) for k in (3, 4))
    passes: list[tuple[float, Evaluation]] = []

    def descend(
        self: Polish, configs: object, now: Evaluation, proposals: int, subjects: object, look: Look, gain: float
    ) -> bool:
        passes.append((gain, now))
        share = 0.9 if gain else gains.pop()
        look(len(passes), Taken(other if gain else start, Evaluation(share * now.time_s, 0.0), 1))
        return gain > 0.0

    monkeypatch.setattr(Polish, "descend", descend)
    for small, optimal in ((1.0 - REBUCKET / 2, True), (1.0 - REBUCKET * 2, False)):
        passes.clear()
        gains = [small]
        done = climber.climb(Climb(0, 0, "", start, 10**6, Evaluation(1.0, 0.0), Options(), patience=0), lambda _: None)
        (first, before), (second, after) = passes
        assert first == WORTH and second == 0.0 and after.time_s == 0.9 * before.time_s
        assert done.optimal is optimal and done.evaluation.time_s == after.time_s * (1.0 if optimal else small)


def test_polishing_ends_where_proposals_end() -> None:
    graph, topology = cnn(batch=32, hidden=512), ethernet(4)
    climber = Climber(graph, topology, Costs(graph, topology), Options(), seed=0)
    start = climber.space.random_plan(np.random.Generator(np.random.PCG64(3)))
    task = Climb(0, 0, "polish", start, 75, climber.evaluate(start), Options(), patience=0)
    done = climber.climb(task, lambda _: None)
    assert done.proposals == 75 and not done.optimal


def test_a_search_whose_chain_does_not_end_polishes_its_best_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    begin, polish, polished = Climber.__init__, Climber._polish, list[str]()

    def patient(self: Climber, *arguments: object, **named: object) -> None:
        begin(self, *arguments, **named)  # type: ignore[arg-type]
        self.patience = 10**9

    def watched(
        self: Climber, climb: Climb, done: Climbed, watch: Watch, proposals: int, subjects: Sequence[Subject]
    ) -> None:
        polish(self, climb, done, watch, proposals, subjects)
        if subjects is not self.polish.all:
            return
        polished.append(climb.phase)
        raise KeyboardInterrupt  # what chains find afterwards need not be a local optimum

    monkeypatch.setattr(Climber, "__init__", patient)
    monkeypatch.setattr(Climber, "_polish", watched)
    monkeypatch.setattr(Budget, "left", lambda self, elapsed_s, idle_s: 1e6 if elapsed_s > 0.3 else 0.0)
    graph, topology = cnn(batch=32, hidden=512), ethernet(2)
    result = search(graph, topology, Costs(graph, topology), budget_s=1e6, processes=1)
    assert result.locally_optimal and polished[0].endswith(POLISHED) and polished[0] in [t.phase for t in result.trails]
    found_s = result.history[-1].time_s
    assert found_s <= result.simulation.makespan_s <= found_s * (1 + SIMPLER)


def test_when_a_search_turns_to_its_best_plan() -> None:
    graph, topology = cnn(batch=32, hidden=512), ethernet(2)
    budget = Budget(100.0, None)
    run = one_search.Run(graph, topology, Costs(graph, topology), Options(), 0, None, budget, None)
    run.begin(None)
    run._schedule = ClimbSchedule([], (), run.best, run.found_in, None, run.climber.patience, 0)
    run._schedule._planned = [10, 10]
    start, seconds = run.best.configs, run.best.evaluation.time_s
    good = Climbed(0, "from megatron", start, Options(), Evaluation(seconds / 2, 0.0))
    other = Climbed(1, "from fsdp", start, Options(), Evaluation(seconds * 3 / 4, 0.0))
    with pytest.raises(Turn) as turn:
        run._turn_to_best([good, other], here=1, polish=True)
    climb = turn.value.plan(2)
    assert climb.phase == "from megatron, polished" and climb.configs == start and climb.patience == 0
    assert run._turned == 2 and len(run._schedule._planned) == 3 and run._schedule._turns == 1
    good.polishing = True  # in another process
    run._turn_to_best([good, other], here=1, polish=True)
    assert run._turned == 2
    run._turn_to_best([good, other], here=0, polish=True)  # here: no other climb takes its place
    assert run._turned == 0
    good.polishing = False
    run._turn_to_best([good, other], here=0, polish=False)  # its own chain may go on
    with pytest.raises(Turn) as turn:
        run._turn_to_best([good, other], here=1, polish=False)
    climb = turn.value.plan(3)
    assert climb.phase == "from best" and climb.configs == start and climb.patience == 1 and not climb.coarse
    assert climb.best == good.evaluation and run._turned == 3
    good.optimal = True
    run._turn_to_best([good, other], here=1, polish=True)
    worse = Climbed(0, "", start, Options(), Evaluation(seconds * 2, 0.0))  # than a baseline
    run._turn_to_best([worse], here=0, polish=True)
    assert budget.left(50.0, 10.0) == 0.0 and budget.left(70.0, 0.0) == 30.0 and budget.left(50.0, 35.0) == 50.0
    assert Budget(100.0, 10**9).left(99.0, 0.0) == 0.0 == Budget(None, 10**9).left(99.0, 99.0)


def test_a_chain_goes_on_from_the_best_plan_where_time_is_short_for_polishing(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, topology = cnn(batch=32, hidden=512), ethernet(2)
    run = one_search.Run(graph, topology, Costs(graph, topology), Options(), 0, None, Budget(100.0, None), None)
    run.begin(None)
    run._schedule = ClimbSchedule([], (), run.best, run.found_in, None, run.climber.patience, 0)
    run._seen = Evaluation(run.best.evaluation.time_s / 2, 0.0)
    costs = [Evaluation(run._seen.time_s * (k + 1), 0.0) for k in (0, 1)]
    found = {k: Climbed(k, "chain", run.best.configs, Options(), cost) for k, cost in enumerate(costs)}
    monkeypatch.setattr(one_search.time, "monotonic", lambda: run.began + 80.0)
    run.improved = run.began + 79.0
    enough = int(80 / 20 * ENOUGH * run.climber.space.alternatives_on_blocks)
    found[0].proposals = enough - 5
    run._look(found, 0)
    with pytest.raises(Turn) as turn:
        run._look(found, 1)
    assert turn.value.plan(2).patience
    found[0].proposals = enough + 5
    with pytest.raises(Turn) as turn:
        run._look(found, 0)
    assert not turn.value.plan(3).patience
    run._turned = 0
    run._look(found, 0)


def test_a_search_with_a_local_optimum_leaves_time_for_one_more_look_at_every_alternative(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph, topology = cnn(batch=32, hidden=512), ethernet(2)
    run = one_search.Run(graph, topology, Costs(graph, topology), Options(), 0, None, Budget(100.0, None), None)
    run.begin(None)
    alternatives = run.climber.space.alternatives_on_blocks
    best = Climbed(0, "chain", run.best.configs, run.best.options, run.best.evaluation, optimal=True)
    run.improved = run.began + 79.0

    def look(elapsed_s: float, proposals: int) -> str:
        monkeypatch.setattr(one_search.time, "monotonic", lambda: run.began + elapsed_s)
        best.proposals = proposals
        try:
            run._look({0: best}, 0)
        except one_search.Stop as stop:
            return str(stop)
        return ""

    assert not look(79.0, 5 * alternatives)  # a look takes 16 s
    assert look(85.0, 5 * alternatives) == (
        "the rest of the budget of 100 s was kept to check a locally optimal plan once more"
    )
    assert look(100.0, 5 * alternatives) == "the budget of 100 s was used up"
    assert not look(85.0, 2 * alternatives)  # 42 s, too long for this budget
    run._turned = 0  # nothing to turn to
    best.optimal = False
    assert not look(85.0, 5 * alternatives)


def test_of_plans_as_good_the_local_optimum_is_the_answer() -> None:
    graph, topology = cnn(batch=32, hidden=512), ethernet(2)
    run = one_search.Run(graph, topology, Costs(graph, topology), Options(), 0, None, Budget(100.0, None), None)
    run.begin(None)
    rng = np.random.Generator(np.random.PCG64(0))
    a, b, c = (run.climber.space.random_plan(rng) for _ in range(3))
    good = Evaluation(run.best.evaluation.time_s / 2, 0.0)
    equal = Climbed(0, "x", c, run.best.options, run.best.evaluation, optimal=True)
    run.climbs = [equal]
    run._merge()
    assert run.best.configs != c  # a baseline stays
    run.climbs = [Climbed(1, "x", a, run.best.options, good), Climbed(2, "y", b, run.best.options, good, optimal=True)]
    run._merge()
    assert run.best.configs == b and run.best.optimal


def test_a_turn_leaves_the_climb_as_it_is_and_the_simulator_right() -> None:
    graph, topology = cnn(batch=32, hidden=512), ethernet(4)
    climber = Climber(graph, topology, Costs(graph, topology), Options(), seed=0)
    start = climber.space.random_plan(np.random.Generator(np.random.PCG64(1)))
    now, left = climber.evaluate(start), list[tuple[int, ...]]()

    def plan(index: int, _: object) -> Climb | None:
        return Climb(index, index, "chain", start, 10**6, now, Options()) if index < 3 else None

    def look(found: dict[int, Climbed], here: int | None) -> None:
        if here is not None and found[here].phase == "chain" and found[here].proposals > 50 * (here + 1):
            left.append((here, found[here].proposals))
            raise Turn(lambda index: Climb(index, index, "polish", found[here].configs, 40, now, Options(), patience=0))

    workers = Workers(climber, (), 0, plan, look)
    workers.work()
    assert [workers.climbs[k].phase for k in sorted(workers.climbs)] == ["chain", "polish", "chain", "polish"]
    assert [(k, workers.climbs[k].proposals) for k in (0, 2)] == left
    fresh = Evaluator(graph, topology, Costs(graph, topology), Options())
    for climbed in workers.climbs.values():
        assert fresh(climbed.configs) == climbed.evaluation
