"""The search: never worse than a baseline, never over memory, the same for the same seed, and optimal where that can be
checked."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from itertools import product as combinations
from math import inf, nextafter
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from flexsearch import zoo
from flexsearch.cost import Costs
from flexsearch.errors import StrategyError
from flexsearch.graph import OperatorGraph
from flexsearch.graph.importer import import_model
from flexsearch.search import Evaluation, Evaluator, Progress, SearchResult, chain, climb, search, simpler, workers
from flexsearch.search import run as one_search
from flexsearch.search.budget import Budget
from flexsearch.search.climb import Climb, Climbed, Climber
from flexsearch.search.climbs import POLISHED, ClimbSchedule
from flexsearch.search.constants import FEW, ROWS, SIMPLER
from flexsearch.search.evaluate import better
from flexsearch.search.space import Space
from flexsearch.simulate import over_memory
from flexsearch.strategy import OperatorConfig, Options, States, Strategy, check_config, make_config
from flexsearch.topology import Topology
from tests.proposals import MOVES, propose
from tests.test_baselines import Builder, cnn, ethernet, mlp, transformer


def find(graph: OperatorGraph, topology: Topology, proposals: int = 150, seed: int = 0) -> SearchResult:
    return search(graph, topology, Costs(graph, topology), proposals=proposals, seed=seed, processes=1)


def with_memory(topology: Topology, nbytes: int, fraction: float = 1.0) -> Topology:
    memory = {"memory_bytes": nbytes, "memory_fraction": fraction}
    devices = tuple(d.model_copy(update=memory) for d in topology.devices)
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
    best = min(o.time_s for o in result.baselines.values() if o.feasible)
    assert all(o.time_s == o.simulation.makespan_s for o in result.baselines.values())
    assert result.feasible and result.simulation.makespan_s <= best
    assert result.prediction.iteration_s == result.simulation.makespan_s
    assert result.history[-1].time_s <= result.simulation.makespan_s <= (1.0 + SIMPLER) * result.history[-1].time_s
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


class LazyWorkers(workers.Workers):
    """The main process takes nothing before ``eager`` is true of it: so workers are sure to have their part."""

    eager: Callable[[workers.Workers], bool]
    alone: ClassVar[list[int]] = []
    """Climbs of the main process."""

    def _take(self, waiting: Callable[[], None] | None = None) -> Climb | None:
        until = time.monotonic() + 60.0
        while waiting is not None and not type(self).eager(self) and time.monotonic() < until:
            time.sleep(0.02)
        climb = super()._take(waiting)
        if waiting is not None and climb is not None:
            self.alone.append(climb.index)
        return climb


def lazy(monkeypatch: pytest.MonkeyPatch, eager: Callable[[workers.Workers], bool]) -> list[int]:
    """Let searches be made by lazy workers; the climbs that their main process will make."""
    monkeypatch.setattr(LazyWorkers, "eager", staticmethod(eager), raising=False)
    monkeypatch.setattr(LazyWorkers, "alone", [])
    monkeypatch.setattr(one_search, "Workers", LazyWorkers)
    return LazyWorkers.alone


@pytest.mark.parametrize("processes", [2, 3])
def test_any_number_of_processes_gives_the_same_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: int
) -> None:
    graph, topology = cnn(batch=32, hidden=2048), ethernet(4)
    costs = Costs(graph, topology)
    one = search(graph, topology, costs, proposals=40_000, seed=3, processes=1)
    alone = lazy(monkeypatch, lambda made: bool(made.ended))
    many = search(graph, topology, costs, proposals=40_000, seed=3, processes=processes)
    assert len(one.trails) > 2 and set(range(len(one.trails))) - set(alone)  # workers ended these
    one.strategy.save(tmp_path / "one.json")
    many.strategy.save(tmp_path / "many.json")
    assert (tmp_path / "one.json").read_bytes() == (tmp_path / "many.json").read_bytes()
    assert one.history == many.history and one.trails == many.trails and one.stopped == many.stopped


def test_templates_that_are_forgotten_between_climbs_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, topology = cnn(batch=32, hidden=2048), ethernet(4)
    whole, forgotten = find(graph, topology, 9000), list[int]()
    forget = Evaluator.forget

    def noted(evaluate: Evaluator) -> None:
        forgotten.append(evaluate.template_bytes)
        forget(evaluate)
        assert evaluate.template_bytes == 0

    monkeypatch.setattr(Evaluator, "forget", noted)
    monkeypatch.setattr(climb, "MOST_TEMPLATES", 2**16)
    again = find(graph, topology, 9000)
    assert sum(nbytes > 2**16 for nbytes in forgotten) > 1
    assert again.history == whole.history and again.strategy.configs == whole.strategy.configs


def test_several_climbs_have_a_share_in_a_budget_of_proposals() -> None:
    graph, topology = cnn(batch=32, hidden=2048), ethernet(4)
    found = find(graph, topology, 40_000)
    phases = [trail.phase for trail in found.trails]
    assert len(phases) > 3 and any(phase.endswith(POLISHED) for phase in phases) and found.proposals <= 40_000


def test_a_worker_that_dies_takes_nothing_with_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    graph, topology = cnn(batch=32, hidden=2048), ethernet(4)
    costs = Costs(graph, topology)
    before = search(graph, topology, costs, proposals=30_000, processes=1)
    worker = tmp_path / "worker"
    worker.write_text("#!/bin/sh\nsleep 1\n")  # long enough to be given a climb
    worker.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(worker))
    died: list[bool] = []

    def has_died(made: workers.Workers) -> bool:
        died.extend([True] * bool(made._again))
        return bool(died)

    alone = lazy(monkeypatch, has_died)
    after = search(graph, topology, costs, proposals=30_000, processes=2)
    assert died and 0 in alone  # the main process took over what the worker was given
    assert after.history == before.history


def test_it_stops_when_half_of_the_budget_brought_nothing() -> None:
    budget = Budget(500.0, None)
    assert not budget.ended(elapsed_s=499.0, idle_s=249.0)
    assert "half of the budget of 500 s brought nothing better" in budget.ended(499.0, 250.0)
    assert "was used up" in budget.ended(500.0, 300.0)
    graph, topology = two_layers(), ethernet(2)
    result = find(graph, topology, 4000)
    assert "half of the budget of 4000 proposals brought nothing better" in result.stopped
    assert 4000 > result.proposals >= result.history[-1].proposal + 2000
    timed = search(graph, topology, Costs(graph, topology), budget_s=1.0, processes=1)
    assert "of the budget of 1 s" in timed.stopped and timed.elapsed_s < 30.0


def test_half_of_the_time_ends_no_search_that_has_hardly_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, topology = two_layers(), ethernet(2)
    run = one_search.Run(graph, topology, Costs(graph, topology), Options(), 0, None, Budget(100.0, None), None)
    run.begin(None)
    climbed = Climbed(0, "chain", run.best.configs, Options(), run.best.evaluation, run._alternatives - 1)
    run._schedule = ClimbSchedule([], (), run.best, run.found_in, None, run.climber.patience, 0)
    run._look({0: climbed}, 0)
    monkeypatch.setattr(one_search.time, "monotonic", lambda: run.began + 60.0)
    run._look({0: climbed}, 0)
    climbed.proposals += 1
    with pytest.raises(one_search.Stop, match="half of the budget"):
        run._look({0: climbed}, 0)
    climbed.proposals, climbed.optimal = 1, True  # then nothing is missing
    with pytest.raises(one_search.Stop, match="half of the budget"):
        run._look({0: climbed}, 0)


def test_a_search_names_what_it_does_after_the_climbs(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, topology, phases = cnn(batch=32, hidden=512), ethernet(4), list[str]()
    arguments = graph, topology, Costs(graph, topology)
    result = search(*arguments, proposals=2000, processes=1, on_phase=phases.append)
    after = [phase for phase in phases if not phase.startswith("baselines")]
    assert not result.baseline and list(dict.fromkeys(after)) == [
        "making the plan simpler", "choosing the bucket size", "working out the interval", "working out the bound"
    ]  # fmt: skip
    phases.clear()

    def interrupted(run: object, processes: int) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(one_search.Run, "go", interrupted)
    search(*arguments, proposals=2000, processes=1, on_phase=phases.append)
    assert all(phase.startswith("baselines") for phase in phases)  # what it calls may raise the interrupt again


def test_an_interrupted_search_returns_its_best() -> None:
    def interrupt(progress: Progress) -> None:
        assert 0 < progress.proposals <= ROWS and progress.phase.startswith("from")
        raise KeyboardInterrupt

    graph, topology = cnn(), ethernet(4)
    result = search(graph, topology, Costs(graph, topology), proposals=10**6, on_progress=interrupt)
    assert result.stopped == "interrupted" and 0 < result.proposals <= ROWS
    result.strategy.check(graph, topology)


def test_the_answer_is_a_local_optimum_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simpler, "simplify", lambda space, configs, evaluate, **rest: configs)
    graph, topology = cnn(batch=32, hidden=512), ethernet(2)
    result = find(graph, topology, 80_000)
    assert result.locally_optimal and result.strategy.search is not None and result.strategy.search.locally_optimal
    evaluate = Evaluator(graph, topology, Costs(graph, topology), result.strategy.options)
    space = Space(graph, topology)
    configs = tuple(result.strategy.configs[op.name] for op in graph.operators)
    best = evaluate(configs)
    for i in range(len(configs)):
        for config in space.alternatives(i, configs):
            for new in (space.follow(i, config), {i: config}):
                other = evaluate(tuple(new.get(k, old) for k, old in enumerate(configs)))
                assert not better(other, best)
    assert not find(graph, topology, 130).locally_optimal


def test_a_resumed_search_goes_on_where_it_ended() -> None:
    graph, topology = cnn(batch=32, hidden=2048), ethernet(4)
    before = find(graph, topology, 700)
    after = search(graph, topology, Costs(graph, topology), proposals=700, start=before.strategy, processes=1)
    one, two = before.strategy.search, after.strategy.search
    assert one is not None and two is not None
    assert after.simulation.makespan_s <= before.simulation.makespan_s
    assert two.proposals == one.proposals + after.proposals and two.climbs == one.climbs + len(after.trails)
    assert after.trails[0].phase == "from the given plan"
    assert after.trails[0].points != before.trails[0].points


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
    assert kept.baseline == name == kept.strategy.search.start and found.baseline == beaten.baseline == ""
    assert kept.simulation.makespan_s == best.simulation.makespan_s
    assert kept.strategy.options == best.strategy.options
    assert kept.set_aside_s == found.simulation.makespan_s and found.set_aside_s is None


def test_the_best_plan_is_made_simpler_before_it_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, topology = cnn(batch=32, hidden=2048), ethernet(4)
    costs, seen = Costs(graph, topology), []
    single = tuple(make_config(op, {}, (0,)) for op in graph.operators)

    def simplify(
        space: Space, configs: tuple[OperatorConfig, ...], evaluate: Callable[..., Evaluation], *, limit: float,
        stop: Callable[[], bool],
    ) -> tuple[OperatorConfig, ...]:
        assert not stop()  # a budget of proposals has no clock
        seen.append((evaluate(configs).cost, limit))
        evaluate(single)
        return single

    monkeypatch.setattr(simpler, "simplify", lambda space, configs, evaluate, **rest: configs)
    before = search(graph, topology, costs, proposals=400, processes=1)
    monkeypatch.setattr(simpler, "simplify", simplify)
    after = search(graph, topology, costs, proposals=400, processes=1)
    best = min(outcome.time_s for outcome in before.baselines.values())
    assert before.baseline == "" and seen == [(before.simulation.makespan_s, nextafter(best, 0.0))]
    assert after.baseline and not after.locally_optimal  # what it was made to is slower than the best baseline
    assert after.set_aside_s == after.baselines["single"].time_s


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
    for states in (States.WHOLE, States.WEIGHTS) if operator in space.weighted else (States.WHOLE,):
        for devices in ((0, 1), (1, 0)):
            for axis in (None, *op.splittable):
                found.append(make_config(op, {axis: 2} if axis else {}, devices, states))
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


def test_plans_use_the_share_of_the_memory_that_a_device_gives_them() -> None:
    graph, whole = mlp(batch=64, width=1024, layers=4), ethernet(4)
    peak = max(find(graph, whole, 1).baselines["fsdp"].simulation.peak_bytes)
    shared = with_memory(whole, peak * 100 // 93 + 2, 0.93)
    usable = shared.devices[0].usable_bytes
    assert peak <= usable < shared.devices[0].memory_bytes
    same = with_memory(whole, usable)
    ours, alike = (find(graph, topology, 100) for topology in (shared, same))
    assert ours.strategy.configs == alike.strategy.configs and max(ours.simulation.peak_bytes) <= usable
    for name, outcome in ours.baselines.items():
        assert over_memory(outcome.simulation, shared) == over_memory(alike.baselines[name].simulation, same)
    missing = max(ours.baselines["data-parallel"].simulation.peak_bytes) - usable
    assert over_memory(ours.baselines["data-parallel"].simulation, shared)[0] == (0, missing) and missing > 0


def test_baselines_are_simulated_in_full_only_when_somebody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    simulate = one_search.simulate
    monkeypatch.setattr(one_search, "simulate", lambda lowered: (calls.append(lowered), simulate(lowered))[1])
    result = find(mlp(), ethernet(4), 1)
    assert len(calls) == 1  # of the answer
    outcome = result.baselines["data-parallel"]
    assert outcome.simulation.makespan_s == outcome.time_s and outcome.simulation is outcome.simulation
    assert len(calls) == 2


@pytest.mark.parametrize("graph", [mlp(), cnn(), transformer(layers=1)], ids=lambda g: g.name)
@pytest.mark.parametrize("devices", [4, 8, 16])
def test_simple_draws_are_blocks_of_neighbours_and_the_simplest_split_samples_only(
    graph: OperatorGraph, devices: int
) -> None:
    space, rng = Space(graph, ethernet(devices)), np.random.Generator(np.random.PCG64(0))
    split = uneven = 0
    for i, op in enumerate(graph.operators):
        for _ in range(20):
            config = space.draw_simple(rng, i, samples=True)
            check_config(op, config, devices)
            axes, count = {axis for axis, parts in config.degrees if parts > 1}, len(config.devices)
            assert axes <= {*op.axes_of("sample")}
            assert config.devices == tuple(range(config.devices[0], config.devices[0] + count))
            assert config.devices[0] % count == 0 or devices % count > 0
            split, uneven = split + bool(axes), uneven + (devices % count > 0)
    assert split > 20 and (uneven > 0) == (devices <= FEW)


def test_the_shortfall_guides_it_to_a_plan_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_search, "fitted", lambda plan, evaluate: plan)  # no baseline fits by gathering twice
    graph = mlp(batch=2048, width=512, layers=4)
    free = find(graph, ethernet(4), 1)
    limit = min(max(o.simulation.peak_bytes) for o in free.baselines.values()) * 95 // 100  # less than any baseline
    result = find(graph, with_memory(ethernet(4), limit), 6000, seed=1)
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


@cache
def pooled() -> OperatorGraph:
    """Max pools keep indices."""
    made = zoo.lenet(batch=8, device="meta")
    return import_model(made.model, made.inputs, made.loss, targets=made.targets)


@cache
def recurrent() -> OperatorGraph:
    """LSTM cells keep their gates."""
    made = zoo.rnntc(batch=4, steps=3, layers=2, hidden=8, vocab=16, classes=4, device="meta")
    return import_model(made.model, made.inputs, made.loss, targets=made.targets)


class Towers(nn.Module):
    """One layer applied to tensors of different sizes: the batch, and a prompt that all samples share."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor, prompt: Tensor) -> Tensor:
        return torch.tanh(self.layer(x) + self.layer(prompt)).sum()


@cache
def towers() -> OperatorGraph:
    return import_model(Towers(), (torch.zeros(4, 6, 8), torch.zeros(1, 6, 8)))


def test_what_changes_together_has_the_same_sizes() -> None:
    for graph in (towers(), recurrent()):
        space = Space(graph, ethernet(4))
        for members in (*space.classes, *space.loose_classes):
            assert len({space.shape(i) for i in members}) == 1
    assert Space(recurrent(), ethernet(4)).classes  # the steps of its layers


@pytest.mark.parametrize("seed", range(3))
def test_a_layer_that_is_used_twice_on_different_sizes_is_searched(seed: int) -> None:
    topology = Topology.load("ethernet-1g-4")
    find(towers(), topology, 400, seed).strategy.check(towers(), topology)


@pytest.mark.parametrize("graph", [mlp(), cnn(), transformer(layers=1)], ids=lambda g: g.name)
@pytest.mark.parametrize("preset", ["ethernet-1g-4", "p100:2"])
@pytest.mark.parametrize("coarse", [False, True], ids=["fine", "coarse"])
def test_a_chain_is_at_a_plan_that_costs_what_it_says(graph: OperatorGraph, preset: str, coarse: bool) -> None:
    topology = Topology.load(preset)
    climber = Climber(graph, topology, Costs(graph, topology), Options(), seed=0)
    fresh = Evaluator(graph, topology, Costs(graph, topology), Options())
    rng = np.random.Generator(np.random.PCG64(0))
    start = climber.space.random_plan(rng)
    now = climber.evaluate(start)
    climber.chain.begin(start, now, now, 0, 400, coarse)
    costs = [now.cost]
    for _ in range(4):
        ended = climber.chain.run(rng, 64)
        configs = climber.evaluate.at_hand
        for op, config in zip(graph.operators, configs, strict=True):
            check_config(op, config, len(topology.devices))
        assert climber.chain.cost == fresh(configs).cost
        best, evaluation = climber.chain.best
        assert fresh(best).cost == evaluation.cost
        costs.append(climber.chain.cost)
        if ended:
            break
    assert climber.chain.accepted > 0 and len(set(costs)) > 1
    assert min(costs) >= evaluation.cost


def test_a_cold_chain_only_goes_down(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, topology = cnn(), ethernet(4)

    def walk(excess: float) -> list[float]:
        monkeypatch.setattr(chain, "EXCESS", (excess,))
        monkeypatch.setattr(chain, "FIRST", (0,))
        climber = Climber(graph, topology, Costs(graph, topology), Options(), seed=0)
        start = climber.space.random_plan(np.random.Generator(np.random.PCG64(0)))
        now = climber.evaluate(start)
        climber.chain.begin(start, now, now, 0, 400)
        rng, costs = np.random.Generator(np.random.PCG64(1)), [now.cost]
        for _ in range(40):
            climber.chain.run(rng, 1)
            costs.append(climber.chain.cost)
        return costs

    cold = walk(1e-12)
    assert cold == sorted(cold, reverse=True) == walk(1e-12) and cold[-1] < cold[0]
    assert any(b > a for a, b in pairwise(walk(100.0)))


def test_what_is_rejected_early_is_slower_than_the_limit() -> None:
    graph, topology = cnn(batch=32, hidden=512), ethernet(4)
    space, rng = Space(graph, topology), np.random.Generator(np.random.PCG64(5))
    costs, options = Costs(graph, topology), Options()
    simulator = Evaluator(graph, topology, costs, options).at(space.random_plan(rng))
    fresh = Evaluator(graph, topology, costs, options)
    early = kept = 0
    for _ in range(150):
        have = simulator.configs
        _, new = propose(rng, space, have)
        changes = {i: c for i, (c, old) in enumerate(zip(new, have, strict=True)) if c != old}
        numbers = [simulator.templates.config(i, c) for i, c in changes.items()]
        limit = simulator.seconds * rng.uniform(0.9, 1.6)
        seconds, truth = simulator.attempt(list(changes), numbers, limit), fresh(new).time_s
        assert truth > limit if seconds == inf else seconds == truth
        early, kept = early + (seconds == inf), kept + (seconds < inf)
        if seconds < limit and rng.random() < 0.5:
            simulator.accept()
    assert early > 20 and kept > 20


def test_climbs_of_different_streams_differ_and_the_same_stream_repeats() -> None:
    graph, topology = cnn(batch=32, hidden=512), ethernet(4)
    climber = Climber(graph, topology, Costs(graph, topology), Options(), seed=0)
    start = climber.space.random_plan(np.random.Generator(np.random.PCG64(0)))
    best = climber.evaluate(start)
    one, other, again = (climber.climb(Climb(0, n, "", start, 300, best, Options()), lambda _: None) for n in (0, 1, 0))
    assert one.curve == again.curve != other.curve and one.configs == again.configs


def test_fitting_comes_before_fast() -> None:
    graph = mlp()
    topology = ethernet(2)
    strategies: list[Strategy] = [o.strategy for o in find(graph, topology, 1).baselines.values()]
    tight = Evaluator(graph, with_memory(topology, 1), Costs(graph, topology), Options())
    roomy = Evaluator(graph, topology, Costs(graph, topology), Options())
    configs = tuple(strategies[0].configs[op.name] for op in graph.operators)
    assert better(roomy(configs), tight(configs)) and not tight(configs).feasible
    assert tight(configs).time_s == roomy(configs).time_s and tight(configs).cost > roomy(configs).cost
