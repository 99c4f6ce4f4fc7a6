"""What the climbs of a search do, and how a budget of proposals is shared out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from flexsearch.cost import Costs
from flexsearch.lower import Lowering
from flexsearch.search import Evaluation, search
from flexsearch.search.budget import Budget
from flexsearch.search.climb import Climbed
from flexsearch.search.climbs import POLISHED, ClimbSchedule, Plan, Start
from flexsearch.search.constants import POLISH, WINDOW
from flexsearch.search.run import Run
from flexsearch.search.space import Space
from flexsearch.search.starts import with_sizes
from flexsearch.search.tuning import Tuned
from flexsearch.simulate import simulate
from flexsearch.strategy import Options
from tests.test_baselines import cnn, ethernet

PATIENCE = 100


def schedule(proposals: int | None, starts: int = 3) -> ClimbSchedule:
    space, rng = Space(cnn(), ethernet(4)), np.random.Generator(np.random.PCG64(0))
    plans = [space.random_plan(rng) for _ in range(starts)]
    order = [Start(f"start {k}", plan, Options(), Evaluation(1.0, 0.0)) for k, plan in enumerate(plans)]
    return ClimbSchedule(order, (), Plan(plans[0], Options(), Evaluation(1.0, 0.0)), "start 0", proposals, PATIENCE, 0)


def test_every_start_has_its_turn_then_every_second_climb_goes_on_from_the_best() -> None:
    plan, done, phases = schedule(None), list[Climbed](), list[str]()
    better = Space(cnn(), ethernet(4)).random_plan(np.random.Generator(np.random.PCG64(9)))
    for n in range(WINDOW + 6):
        climb = plan.plan(n, done[: max(0, n - WINDOW + 1)])
        assert climb is not None and climb.coarse
        if climb.phase == "from best":
            assert climb.configs == better and climb.best.time_s == 0.5
        phases.append(climb.phase)
        done.append(Climbed(n, climb.phase, better, Options(), Evaluation(0.5 if n < 1 else 0.75, 0.0), 10))
    assert phases[:3] == [f"from start {k}" for k in range(3)]
    assert phases[3:WINDOW] == ["from random"] * (WINDOW - 3)
    assert phases[WINDOW:] == ["from best", "from random"] * 3


def test_by_the_clock_the_third_climb_goes_on_from_the_best_that_is_known() -> None:
    plan = schedule(None)
    better = Climbed(1, "from start 1", plan.best.configs[::-1], Options(), Evaluation(0.5, 0.0), 10)
    other = Climbed(2, "from best", (), Options(), Evaluation(0.75, 0.0), 10)
    climbs = [plan.plan(k, [better, other][: max(0, k - 1)]) for k in range(7)]
    phases = [climb.phase for climb in climbs if climb is not None]
    assert phases[:4] == ["from start 0", "from start 1", "from best", "from start 2"]
    assert phases[4:] == ["from best", "from random", "from best"]
    assert all(c.configs == better.configs and c.best.time_s == 0.5 for c in climbs if c and c.phase == "from best")
    assert all(c.best == plan.best.evaluation for c in climbs if c and c.phase != "from best")


def test_by_the_clock_starts_have_their_turn_while_nothing_has_ended() -> None:
    plan = schedule(None)
    climbs = [plan.plan(k, []) for k in range(4)]
    assert [c.phase for c in climbs if c] == ["from start 0", "from start 1", "from start 2", "from random"]


def test_half_of_the_proposals_ends_no_search_that_has_hardly_begun() -> None:
    plan = schedule(1000)
    climbs = [Climbed(k, "from random", (), Options(), Evaluation(2.0, 0.0), 300) for k in range(3)]
    for least, count in ((0, 2), (600, 2), (601, 3), (10_000, 3)):
        plan.least = least
        assert len(plan.within(climbs)[0]) == count
    climbs[0] = Climbed(0, "from start 0", plan.best.configs, Options(), plan.best.evaluation, 300, optimal=True)
    assert len(plan.within(climbs)[0]) == 2  # nothing is missing


def test_the_last_part_of_a_budget_of_proposals_is_for_polishing() -> None:
    budget = 8 * 4 * PATIENCE
    plan, done, spent = schedule(budget), list[Climbed](), 0
    for n in range(100):
        climb = plan.plan(n, done[: max(0, n - WINDOW + 1)])
        if climb is None:
            break
        done.append(Climbed(n, climb.phase, climb.configs or (), Options(), Evaluation(2.0, 0.0), climb.proposals))
        spent += climb.proposals
    real = [climb for climb in done if climb.proposals]
    assert climb is None and spent == budget
    assert [c.phase.endswith(POLISHED) for c in real] == [False] * (len(real) - 1) + [True]
    assert real[-1].proposals == int(POLISH * budget) and real[-1].phase == "from start 0, polished"
    assert all(not done[k].proposals for k in range(len(real) - 1, done.index(real[-1])))  # it waited for the others


def test_what_polishing_leaves_goes_to_other_climbs() -> None:
    budget = 8 * 4 * PATIENCE
    plan, done, polished = schedule(budget), list[Climbed](), False
    for n in range(200):
        climb = plan.plan(n, done[: max(0, n - WINDOW + 1)])
        if climb is None:
            break
        now = climb.phase.endswith(POLISHED) and climb.proposals > 0
        polished = polished or now
        found = Evaluation(0.5 if polished else 0.99 - 0.01 * n, 0.0)
        made = min(climb.proposals, 50) if now else climb.proposals
        done.append(Climbed(n, climb.phase, climb.configs or (), Options(), found, made, optimal=now))
    assert climb is None and polished and sum(c.proposals for c in done) == budget
    assert not done[-1].phase.endswith(POLISHED)


def test_a_search_of_so_many_proposals_ends_in_a_local_optimum() -> None:
    graph, topology = cnn(batch=32, hidden=512), ethernet(2)
    result = search(graph, topology, Costs(graph, topology), proposals=60_000, processes=1)
    assert result.locally_optimal and result.proposals <= 60_000
    assert any(trail.phase.endswith(POLISHED) for trail in result.trails)


def test_a_budget_that_brought_nothing_ends_the_chains_and_the_best_is_still_polished() -> None:
    budget = 8 * 4 * PATIENCE
    plan = schedule(budget)
    chains = [Climbed(k, f"chain {k}", (), Options(), Evaluation(2.0, 0.0), budget // 10) for k in range(7)]
    polished = Climbed(7, f"start 0{POLISHED}", plan.best.configs, Options(), Evaluation(0.9, 0.0), 10, optimal=True)
    kept, why = plan.within([*chains, polished])
    assert [c.index for c in kept] == [0, 1, 2, 3, 4, 7] and "half of the budget" in why
    waited = [Climbed(k, "", (), Options(), Evaluation(2.0, 0.0)) for k in range(7, 6 + WINDOW)]
    number = 6 + WINDOW  # the first that knows what all of the chains brought
    plan._planned = [0] * number
    climb = plan.plan(number, [*chains, *waited])
    assert climb is not None and climb.phase.endswith(POLISHED) and climb.patience == 0
    plan._planned += [0] * WINDOW
    assert plan.plan(number + WINDOW, [*chains, *waited, polished]) is None


def test_a_budget_is_used_up_while_nothing_fits_into_memory() -> None:
    budget = 8 * 4 * PATIENCE
    plan = schedule(budget)
    plan.best = replace(plan.best, evaluation=Evaluation(1.0, 0.5))
    chains = [Climbed(k, f"chain {k}", (), Options(), Evaluation(2.0, 0.5), budget // 10) for k in range(7)]
    assert plan.within(chains) == (chains, f"the budget of {budget} proposals was used up")


def test_the_first_start_has_every_bucket_size_and_the_others_have_them_in_turns() -> None:
    a, b = Options(), Options(bucket_bytes=2**20)
    order = [Start(name, (), a, Evaluation(1.0, 0.0)) for name in "pqrs"]
    turns = [(start.name, start.options is b) for start in with_sizes(order, [a, b])]
    first, once = [("p", False), ("p", True)], [("q", True), ("r", False), ("s", True)]
    assert turns == [*first, *once, ("q", False), ("r", True), ("s", False)]
    assert with_sizes(order, [a]) == order


def test_climbs_have_the_options_of_their_starts_and_of_the_best_plan() -> None:
    plan = schedule(None)
    other = Options(bucket_bytes=2**20)
    plan.order = with_sizes(plan.order, [Options(), other])
    better = Climbed(1, "from start 0", plan.best.configs[::-1], other, Evaluation(0.5, 0.0), 10)
    climbs = [plan.plan(k, [better][: max(0, k - 1)]) for k in range(5)]
    assert [c.options is other for c in climbs if c is not None] == [False, True, True, True, True]
    assert [c.phase for c in climbs if c is not None][2::2] == ["from best"] * 2
    assert plan.turn(5, better, True).options is plan.turn(6, better, False).options is other


def test_a_plan_is_as_fast_as_its_climb_says_with_the_options_of_that_climb() -> None:
    graph, topology = cnn(batch=32, hidden=2048), ethernet(4)
    costs = Costs(graph, topology)
    run = Run(graph, topology, costs, Options(), 0, None, Budget(None, 40_000), None)
    run.begin(None)
    run.sizes = [run.best.options, *(options for options in run.choices if options != run.best.options)]
    run.go(1)
    assert len({climbed.options for climbed in run.climbs}) > 1
    result = run.result("", 0.0, ())
    answer = Tuned(result.strategy.in_order(graph), result.strategy.options, run.best.evaluation)
    for plan in (*result.runners_up, answer):
        lowered = Lowering(graph, topology, costs).lower(plan.configs, plan.options)
        assert simulate(lowered).makespan_s == plan.evaluation.time_s
