"""The search: never worse than a baseline, never over memory, the same for the same seed, and optimal where that can be
checked."""

from __future__ import annotations

from itertools import pairwise
from itertools import product as combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexsearch.cost import Costs
from flexsearch.errors import StrategyError
from flexsearch.graph import OperatorGraph
from flexsearch.search import Evaluator, Progress, SearchResult, optimize, search
from flexsearch.search.mcmc import init, step
from flexsearch.search.optimize import better
from flexsearch.search.proposals import MOVES, propose
from flexsearch.search.space import Space
from flexsearch.simulate import memory
from flexsearch.simulate.ceiling import Ceiling
from flexsearch.strategy import OperatorConfig, Options, Strategy, check_config, make_config
from flexsearch.topology import Topology
from tests.test_baselines import Builder, cnn, ethernet, mlp, transformer


def find(graph: OperatorGraph, topology: Topology, proposals: int = 150, seed: int = 0) -> SearchResult:
    return search(graph, topology, Costs(graph, topology), proposals=proposals, seed=seed)


def with_memory(topology: Topology, nbytes: int) -> Topology:
    devices = tuple(d.model_copy(update={"memory_bytes": nbytes}) for d in topology.devices)
    return Topology(**{f: getattr(topology, f) for f in Topology.model_fields} | {"devices": devices})


def two_layers() -> OperatorGraph:
    b = Builder("tiny")
    return b.finish(b.linear("fc", b.source("x", 64, 2048), 1024))


@pytest.mark.parametrize("graph", [mlp(), cnn(), transformer(layers=1)], ids=lambda g: g.name)
@pytest.mark.parametrize("preset", ["ethernet-1g-3", "p100:2"])
def test_the_answer_is_legal_and_never_worse_than_the_best_baseline(graph: OperatorGraph, preset: str) -> None:
    topology = Topology.load(preset)
    result = find(graph, topology, 60)
    result.strategy.check(graph, topology)
    best = min(o.simulation.makespan_s for o in result.baselines.values() if o.feasible)
    assert result.feasible and result.simulation.makespan_s <= best
    assert result.prediction.iteration_s == result.simulation.makespan_s == result.history[-1].time_s
    assert result.proposals == 60 and "60 proposals" in result.stopped
    times = [improvement.time_s for improvement in result.history]
    assert times == sorted(times, reverse=True)


def test_the_same_seed_gives_the_same_plan_and_another_seed_another_walk(tmp_path: Path) -> None:
    graph, topology = cnn(batch=32, hidden=2048), ethernet(4)
    one, two, other = (find(graph, topology, 200, seed) for seed in (7, 7, 8))
    one.strategy.save(tmp_path / "one.json")
    two.strategy.save(tmp_path / "two.json")
    assert (tmp_path / "one.json").read_bytes() == (tmp_path / "two.json").read_bytes()
    assert one.history == two.history != other.history


def test_a_search_ended_by_its_time_is_repeated_by_its_number_of_proposals(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, topology = mlp(width=256), ethernet(3)
    timed = search(graph, topology, Costs(graph, topology), budget_s=0.5, seed=3)
    monkeypatch.undo()
    again = find(graph, topology, timed.proposals, 3)
    assert again.history == timed.history and again.strategy.configs == timed.strategy.configs


def test_it_stops_when_half_of_the_budget_brought_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(10**9))
    monkeypatch.setattr(optimize.time, "monotonic", lambda: next(clock) / 10)
    graph, topology = two_layers(), ethernet(2)
    result = search(graph, topology, Costs(graph, topology), budget_s=500.0)
    assert "half of the budget of 500 s brought nothing better" in result.stopped
    last = result.history[-1].proposal
    assert result.proposals - last >= 2450  # ten a second, one call a proposal, another an improvement


def test_an_interrupted_search_returns_its_best() -> None:
    def interrupt(progress: Progress) -> None:
        assert progress.proposals == 1 and progress.phase.startswith("chain from")
        raise KeyboardInterrupt

    graph, topology = cnn(), ethernet(4)
    result = search(graph, topology, Costs(graph, topology), proposals=10**6, on_progress=interrupt)
    assert result.stopped == "interrupted" and result.proposals == 1
    result.strategy.check(graph, topology)


def test_a_baseline_is_kept_unless_it_is_beaten_by_the_margin() -> None:
    graph, topology = cnn(batch=32, hidden=2048), ethernet(4)
    costs = Costs(graph, topology)
    found = search(graph, topology, costs, proposals=200)
    name = min(found.baselines, key=lambda name: found.baselines[name].simulation.makespan_s)
    best = found.baselines[name]
    gain = 1 - found.simulation.makespan_s / best.simulation.makespan_s
    assert gain > 0.02
    beaten = search(graph, topology, costs, proposals=200, margin=gain / 2)
    assert beaten.strategy.configs == found.strategy.configs
    kept = search(graph, topology, costs, proposals=200, margin=0.9)
    assert kept.strategy.configs == best.strategy.configs and kept.strategy.search is not None
    assert f"less than 90 % faster than {name}" in kept.stopped and kept.strategy.search.start == name
    assert kept.simulation.makespan_s <= best.simulation.makespan_s


def test_it_goes_on_from_a_given_plan() -> None:
    graph, topology = cnn(batch=32, hidden=2048), ethernet(4)
    before = find(graph, topology, 200)
    after = search(graph, topology, Costs(graph, topology), proposals=1, start=before.strategy)
    assert after.simulation.makespan_s <= before.simulation.makespan_s
    with pytest.raises(StrategyError, match="was made for graph"):
        search(mlp(), topology, Costs(mlp(), topology), proposals=1, start=before.strategy)


def test_it_wants_a_budget_and_devices() -> None:
    graph = mlp()
    with pytest.raises(StrategyError, match="needs a budget"):
        search(graph, ethernet(2), Costs(graph, ethernet(2)))
    assert "only one device" in find(graph, ethernet(1)).stopped


def all_configs(space: Space, operator: int) -> list[OperatorConfig]:
    """Every legal config on two devices."""
    op = space.graph.operators[operator]
    found = [make_config(op, {}, (d,)) for d in (0, 1)]
    for shard in {False, operator in space.weighted}:
        for devices in ((0, 1), (1, 0)):
            for axis in (None, *op.splittable):
                found.append(make_config(op, {axis: 2} if axis else {}, devices, shard))
    return found


@pytest.mark.parametrize("seed", range(3))
def test_it_finds_the_optimum_of_a_space_that_can_be_searched_through(seed: int) -> None:
    graph, topology = two_layers(), ethernet(2)
    space, evaluate = Space(graph, topology), Evaluator(graph, topology, Costs(graph, topology), Options())
    plans = combinations(*(all_configs(space, i) for i in range(len(graph.operators))))
    optimum = min(evaluate(plan).cost for plan in plans)
    assert find(graph, topology, 300, seed).simulation.makespan_s == optimum


def test_alexnet_on_slow_hosts_is_three_times_as_fast_as_data_parallel() -> None:
    graph, topology = OperatorGraph.load("alexnet"), ethernet(4)
    result = find(graph, topology, 200)
    assert result.baselines["data-parallel"].simulation.makespan_s > 3 * result.simulation.makespan_s
    assert result.strategy.search is not None and result.strategy.search.proposals == 200


def test_a_plan_over_memory_is_never_the_answer_where_one_fits() -> None:
    graph = mlp(batch=64, width=1024, layers=4)
    free = find(graph, ethernet(4), 1)
    peaks = {name: max(o.simulation.peak_bytes) for name, o in free.baselines.items()}
    limit = peaks["fsdp"] * 11 // 10
    assert peaks["data-parallel"] > limit and peaks["single"] > limit
    topology = with_memory(ethernet(4), limit)
    for seed in range(2):
        result = find(graph, topology, 100, seed)
        assert result.feasible and max(result.simulation.peak_bytes) <= limit
        assert not result.baselines["data-parallel"].feasible


def test_the_shortfall_guides_it_to_a_plan_that_fits() -> None:
    graph = mlp(batch=2048, width=512, layers=4)
    free = find(graph, ethernet(4), 1)
    limit = min(max(o.simulation.peak_bytes) for o in free.baselines.values()) * 9 // 10  # less than any baseline
    result = find(graph, with_memory(ethernet(4), limit), 1500)
    assert not any(o.feasible for o in result.baselines.values())
    assert result.feasible and max(result.simulation.peak_bytes) <= limit


def test_it_says_so_where_nothing_fits() -> None:
    result = find(mlp(), with_memory(ethernet(2), 1), 30)
    assert not result.feasible


@pytest.mark.parametrize("graph", [mlp(), cnn(), transformer(layers=1)], ids=lambda g: g.name)
@settings(derandomize=True, deadline=None, max_examples=25)
@given(seed=st.integers(0, 2**32 - 1), count=st.integers(2, 7))
def test_moves_lead_from_legal_plans_to_legal_plans(graph: OperatorGraph, seed: int, count: int) -> None:
    topology, rng = ethernet(count), np.random.Generator(np.random.PCG64(seed))
    space = Space(graph, topology)
    configs = space.random_plan(rng)
    for _ in range(12):
        _, configs = propose(rng, space, configs)
        for move in MOVES:
            configs = move(rng, space, configs)
            for op, config in zip(graph.operators, configs, strict=True):
                check_config(op, config, count)
    i = int(rng.integers(len(configs)))
    for config in space.alternatives(i, configs):
        assert config != configs[i]
        check_config(graph.operators[i], config, count)


@pytest.mark.parametrize("graph", [mlp(), cnn(), transformer(layers=1)], ids=lambda g: g.name)
@settings(derandomize=True, deadline=None, max_examples=15)
@given(seed=st.integers(0, 2**32 - 1), optimizer=st.sampled_from(["sgd", "momentum", "adam"]))
def test_the_ceiling_is_never_below_the_true_peak(graph: OperatorGraph, seed: int, optimizer: str) -> None:
    topology, rng = ethernet(4), np.random.Generator(np.random.PCG64(seed))
    space = Space(graph, topology)
    options = Options(optimizer=optimizer)  # type: ignore[arg-type]
    evaluate = Evaluator(graph, topology, Costs(graph, topology), options)
    ceiling, configs = Ceiling(graph, topology, options), space.random_plan(rng)
    for move in MOVES:
        configs = move(rng, space, configs)
        lowered = evaluate.lower(configs)
        peaks = [m.peak for m in memory(lowered)]
        assert (ceiling(lowered) >= peaks).all()


def test_a_cold_chain_only_goes_down_and_a_step_changes_nothing_but_the_generator() -> None:
    graph, topology = cnn(), ethernet(4)
    space, evaluate = Space(graph, topology), Evaluator(graph, topology, Costs(graph, topology), Options())
    state = init(space.random_plan(np.random.Generator(np.random.PCG64(0))), evaluate)

    def walk(beta: float, steps: int) -> list[float]:
        rng, at, costs = np.random.Generator(np.random.PCG64(1)), state, [state.evaluation.cost]
        for _ in range(steps):
            at, info = step(rng, at, lambda r, c: propose(r, space, c), evaluate, beta, state.evaluation.cost)
            assert (at is info.proposed) == info.accepted
            costs.append(at.evaluation.cost)
        return costs

    cold = walk(1e12, 60)
    assert cold == sorted(cold, reverse=True) == walk(1e12, 60) and cold[-1] < cold[0]
    hot = walk(1e-3, 20)
    assert any(b > a for a, b in pairwise(hot))


def test_fitting_comes_before_fast() -> None:
    graph = mlp()
    topology = ethernet(2)
    strategies: list[Strategy] = [o.strategy for o in find(graph, topology, 1).baselines.values()]
    tight = Evaluator(graph, with_memory(topology, 1), Costs(graph, topology), Options())
    roomy = Evaluator(graph, topology, Costs(graph, topology), Options())
    configs = tuple(strategies[0].configs[op.name] for op in graph.operators)
    assert better(roomy(configs), tight(configs)) and not tight(configs).feasible
    assert tight(configs).time_s == roomy(configs).time_s and tight(configs).cost > roomy(configs).cost
