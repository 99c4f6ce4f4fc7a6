"""Gradients of weights with a split of their own: the strategy file, rows, memory, and what ranks compute."""

from __future__ import annotations

import json
import random
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st
from torch import nn

from flexsearch.changing import on_changed
from flexsearch.cost import Costs
from flexsearch.errors import FlexsearchError, StrategyError
from flexsearch.graph import OperatorGraph
from flexsearch.graph.importer import import_model, import_with_constants
from flexsearch.graph.weight_gradients import able, weight_gradient_of, with_weight_gradients
from flexsearch.lower import Lowering, lower
from flexsearch.report.words import in_words
from flexsearch.search.climb import Climb, Climbed, Climber, Watch
from flexsearch.setting import Setting
from flexsearch.simulate.delta import DeltaSimulator
from flexsearch.simulate.simulation import simulate
from flexsearch.strategy import Options, Strategy, make_config
from flexsearch.strategy.baselines import baseline
from flexsearch.strategy.stage import Stage
from flexsearch.topology import Topology
from tests import test_delta, test_emit, test_memory
from tests.random_strategies import configs as random_configs
from tests.random_strategies import strategies
from tests.ranks import pool
from tests.staged_plans import deep, staged_plan, tokens_loss
from tests.test_baselines import cnn, mlp
from tests.test_delta import TOPOLOGIES, normed, tied
from tests.test_numerics import CASES, NOISE, STAGED, _imported, _parallel, _single, _staged, agree

FIXED = settings(derandomize=True, deadline=None, phases=(Phase.generate,), max_examples=15)
GRAPHS = {"mlp": mlp, "cnn": cnn, "norm": normed, "tied": tied}


@cache
def divided(name: str) -> OperatorGraph:
    graph = GRAPHS[name]()
    return with_weight_gradients(graph, able(graph))


def of(graph: OperatorGraph, topology: Topology, degrees: dict[str, int], *names: str) -> Strategy:
    """Data parallelism, with the gradients of the weights of some operators split so."""
    plan = baseline("data-parallel", graph, topology)
    own = {
        weight_gradient_of(name): make_config(graph.operators[graph.index[name]], degrees, range(len(topology.devices)))
        for name in names
    }
    return Strategy.make(graph, topology, {**plan.configs, **own}, plan.options)


# ---- what ranks compute


@pytest.mark.parametrize("name", ["mlp", "convolutions", "sequence1d", "decoder", "images"])
def test_any_split_gives_the_gradients_of_one_device(name: str) -> None:
    imported = _imported(name)
    graph, expected = imported.graph, [_single(name, adamw=adamw) for adamw in (False, True)]
    assert able(graph)

    @settings(
        max_examples=CASES, derandomize=True, database=None, deadline=None,
        suppress_health_check=list(HealthCheck), phases=[Phase.generate],
    )  # fmt: skip
    @given(data=st.data(), ranks=st.integers(1, 4), local=st.booleans(), adamw=st.booleans())
    def check(data: Any, ranks: int, local: bool, adamw: bool) -> None:
        strategy = data.draw(strategies(graph, Topology.load(f"ethernet-1g:{ranks}"), divided=True))
        file = strategy.to_file().model_dump_json()
        note(file)
        for found in pool(ranks).run(partial(_parallel, adamw=adamw), name, imported, file, local):
            agree(expected[adamw], found, noise=NOISE if adamw else 1e-14)

    check()


def test_so_do_stages_microbatches_and_schedules() -> None:
    model, tokens, targets = deep()
    imported = import_with_constants(model, (tokens,), tokens_loss, targets=targets)
    single = baseline("single", imported.graph, Topology.load("ethernet-1g:1")).to_file().model_dump_json()
    expected = pool(1).run(_staged, imported, single, False)[0]
    for number in range(STAGED):
        plan = staged_plan(imported.graph, random.Random(1000 + number), divided=0.7)
        assert plan.weight_gradients
        file, ranks = plan.to_file().model_dump_json(), pool(len(plan.cluster.devices))
        for rank, history in enumerate(ranks.run(_staged, imported, file, False, timeout_s=60)):
            try:
                agree(expected, history)
            except AssertionError as error:
                raise AssertionError(f"plan {number}, rank {rank}: {file}") from error


# ---- rows, times and memory


@FIXED
@given(data=st.data(), graph=st.sampled_from(sorted(GRAPHS)), name=st.sampled_from(sorted(TOPOLOGIES)))
def test_rows_are_those_of_the_definition(data: Any, graph: str, name: str) -> None:
    topology = TOPOLOGIES[name]()
    strategy = data.draw(strategies(GRAPHS[graph](), topology, divided=True))
    planned = strategy.planned(GRAPHS[graph]())
    lowering = Lowering(planned, topology, Costs(planned, topology))
    test_emit.check(lowering, strategy.in_order(planned), strategy.options)


@FIXED
@given(data=st.data(), graph=st.sampled_from(sorted(GRAPHS)), name=st.sampled_from(sorted(TOPOLOGIES)))
def test_spans_are_those_of_the_definition(data: Any, graph: str, name: str) -> None:
    topology = TOPOLOGIES[name]()
    strategy = data.draw(strategies(GRAPHS[graph](), topology, divided=True))
    planned = strategy.planned(GRAPHS[graph]())
    lowering = Lowering(planned, topology, Costs(planned, topology))
    test_memory.check(lowering.lower(strategy.in_order(planned), strategy.options))


@pytest.mark.parametrize("name", sorted(GRAPHS))
def test_a_walk_of_proposals_is_simulated_as_the_whole_plans_are(name: str) -> None:
    for k, topology in enumerate(TOPOLOGIES.values()):
        rng = np.random.default_rng(k)
        test_delta.walk(divided(name), topology(), rng, Options(bucket_bytes=3000), test_delta.STEPS)


@FIXED
@given(data=st.data(), graph=st.sampled_from(sorted(GRAPHS)), name=st.sampled_from(sorted(TOPOLOGIES)))
def test_so_is_any_legal_strategy(data: Any, graph: str, name: str) -> None:
    planned, topology = divided(graph), TOPOLOGIES[name]()
    simulator, configs, options = None, test_delta.Configs(), Options()
    for _ in range(3):
        new = tuple(data.draw(random_configs(op, len(topology.devices))) for op in planned.operators)
        if simulator is None:
            simulator = DeltaSimulator(planned, topology, Costs(planned, topology), options, new)
            test_delta.check_equal(simulator, new, simulator.seconds, options)
        else:
            seconds = simulator.propose(test_delta.differences(new, configs))
            test_delta.check_equal(simulator, new, seconds, options)
            simulator.accept()
        configs = new


@pytest.mark.parametrize("name", sorted(GRAPHS))
def test_the_account_of_a_walk_is_that_of_the_plan(name: str) -> None:
    test_memory.walk(divided(name), TOPOLOGIES["slow hosts"](), 0, 12)


# ---- what it costs


def test_the_two_halves_cost_what_the_whole_does() -> None:
    graph, topology = mlp(), TOPOLOGIES["slow hosts"]()
    halves = divided("mlp")
    whole, parts = Costs(graph, topology), Costs(halves, topology)
    for name in able(graph):
        i = graph.index[name]
        weights, inputs = halves.index[weight_gradient_of(name)], halves.index[name]
        extent = [tuple(graph.operators[i].sizes[axis] for axis in graph.operators[i].access.axes)]
        together = sum(parts.of_extents(k, extent, 0)[:, 0] for k in (weights, inputs))
        assert together == pytest.approx(whole.of_extents(i, extent, 0)[:, 0], abs=3e-9)
        assert parts.of_extents(weights, extent, 0)[0, 0] < 2e-9


def test_small_batches_gain_where_gathering_activations_is_cheaper_than_summing_gradients() -> None:
    """Every device makes the whole gradient from the whole batch: nothing is left to be synchronised."""
    graph, topology = mlp(batch=8, width=512), Topology.load("ethernet-1g:4")
    plain = lower(graph, of(graph, topology, {}), topology, Costs(graph, topology))
    gathered = lower(graph, of(graph, topology, {}, *able(graph)), topology, Costs(graph, topology))
    assert all(not w.plan.sync.exchanges for w in gathered.weights if w.plan.sync is not None)
    assert simulate(gathered).makespan_s < 0.5 * simulate(plain).makespan_s
    large = mlp(batch=4096, width=32)
    plain = lower(large, of(large, topology, {}), topology, Costs(large, topology))
    gathered = lower(large, of(large, topology, {}, *able(large)), topology, Costs(large, topology))
    assert simulate(gathered).makespan_s > simulate(plain).makespan_s


# ---- files


def test_a_plan_is_saved_and_loaded(tmp_path: Path) -> None:
    graph, topology = mlp(), Topology.load("ethernet-1g:4")
    plan = of(graph, topology, {"o": 2}, able(graph)[0])
    plan.save(tmp_path / "plan.json")
    entry = json.loads((tmp_path / "plan.json").read_text())["operators"][able(graph)[0]]
    assert entry["weight_gradient"] == {"degrees": {"o": 2}, "replicas": 2}
    loaded = Strategy.load(tmp_path / "plan.json")
    loaded.check(graph, topology)
    assert loaded == plan and loaded.configs == plan.configs and loaded.weight_gradients == able(graph)[:1]


def test_so_is_one_with_stages(tmp_path: Path) -> None:
    graph, topology = mlp(), Topology.load("ethernet-1g:4")
    first, last = able(graph)[0], able(graph)[-1]
    names = [op.name for op in graph.operators]
    cut = graph.index[last]
    stages = Stage(tuple(names[:cut]), (0, 1)), Stage(tuple(names[cut:]), (2, 3))
    configs = {op.name: make_config(op, {}, (0, 1) if i < cut else (2, 3)) for i, op in enumerate(graph.operators)}
    configs[weight_gradient_of(first)] = make_config(graph.operators[graph.index[first]], {"o": 2}, (0, 1))
    configs[weight_gradient_of(last)] = make_config(graph.operators[cut], {"i": 2}, (3, 2))
    plan = Strategy.make(graph, topology, configs, stages=stages, microbatches=2, schedule="zero-bubble")
    plan.save(tmp_path / "plan.json")
    loaded = Strategy.load(tmp_path / "plan.json")
    loaded.check(graph, topology)
    assert loaded == plan and loaded.stages == plan.stages and loaded.configs == plan.configs


def test_what_cannot_be_split_apart_is_refused() -> None:
    topology = Topology.load("ethernet-1g:4")
    graph = tied()
    norm = next(op for op in graph.operators if op.kind == "layer_norm")
    with pytest.raises(StrategyError, match="only those of conv1d, conv2d, conv3d, linear"):
        of(graph, topology, {}, norm.name)
    linear = able(graph)[0]
    with pytest.raises(StrategyError, match=rf"{linear}.weight_gradient.*impossible"):
        of(graph, topology, {"o": 4096}, linear)
    plan = of(graph, topology, {}, linear)
    loose = {**plan.configs, weight_gradient_of("nothing"): plan.configs[linear]}
    with pytest.raises(FlexsearchError, match="unknown operators"):
        Strategy.make(graph, topology, loose, plan.options)


# ---- the search


class Recurrent(nn.Module):
    """A layer that runs twice, the first time without a gradient, as recurrent reasoning models train."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.layer(x).detach())


def test_nor_is_what_no_gradient_flows_through() -> None:
    batch, target = (torch.randn(8, 6),), torch.randint(6, (8,))
    graph = import_model(Recurrent(), batch, nn.functional.cross_entropy, targets=target, name="recurrent")
    assert able(graph) == ("layer_1",)
    with pytest.raises(StrategyError, match="no gradient flows through"):
        with_weight_gradients(graph, ["layer"])


def test_the_search_finds_splits_that_pay() -> None:
    """Where layers are pinned to data parallelism, the gradients alone may still be split otherwise."""
    graph = mlp(batch=8, width=512)
    setting = Setting.of(graph, Topology.load("ethernet-1g:4"))
    pins = [f"{name}: batch=4" for name in able(graph)]
    plain = setting.search(300, pins=pins, processes=1)
    result = setting.search(600, pins=pins, processes=1, weight_gradients=True)
    assert not plain.strategy.weight_gradients and result.strategy.weight_gradients
    assert result.simulation.makespan_s < 0.5 * plain.simulation.makespan_s
    assert result.bound_s <= result.simulation.makespan_s
    again = setting.search(600, pins=pins, processes=1, weight_gradients=True)
    assert again.strategy == result.strategy
    with pytest.raises(StrategyError, match="goes on from plans"):
        setting.search(100, start=result.strategy)


def test_gradients_of_inputs_move_while_those_of_weights_are_computed() -> None:
    """Of layers that are split by output features, the gradients of inputs are partial sums."""
    graph, topology = mlp(batch=256, width=1024), Topology.load("ethernet-1g:2")
    plan = baseline("single", graph, topology)
    split = {op.name: make_config(op, {"o": 2} if op.kind == "linear" else {}, (0, 1)) for op in graph.operators}
    apart = {weight_gradient_of(name): split[name] for name in able(graph)}
    times = [
        simulate(lower(graph, Strategy.make(graph, topology, configs, plan.options), topology, Costs(graph, topology)))
        for configs in (split, split | apart)
    ]
    assert times[1].makespan_s < 0.9 * times[0].makespan_s


def test_a_search_on_a_changed_cluster_begins_with_the_plan_without_them() -> None:
    graph, topology = mlp(batch=8, width=512), Topology.load("ethernet-1g:4")
    plan = of(graph, topology, {}, able(graph)[0])
    assert plan.undivided() == of(graph, topology, {})
    changed, best = on_changed(Setting.of(graph, topology), plan, topology, "nothing", 300, space="splits")
    assert changed.looked_at > 0 and best is not None and not best.weight_gradients


def test_it_keeps_a_plan_that_gains_nothing_by_them() -> None:
    setting = Setting.of(mlp(batch=2048, width=32), Topology.load("ethernet-1g:4"))
    plain = setting.search(300, processes=1)
    result = setting.search(600, processes=1, weight_gradients=True)
    assert not result.strategy.weight_gradients
    assert result.simulation.makespan_s == plain.simulation.makespan_s


@pytest.mark.parametrize("place", ["the climbs", "what follows them"])
def test_ctrl_c_ends_it_with_the_best_plan_so_far(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    graph = mlp(batch=8, width=512)
    setting = Setting.of(graph, Topology.load("ethernet-1g:4"))
    ended: list[str] = []
    pins = [f"{name}: batch=4" for name in able(graph)]

    def interrupted(*arguments: Any) -> None:
        raise KeyboardInterrupt

    def climb(climber: Climber, climb: Climb, watch: Watch) -> Climbed:
        return whole(climber, climb, interrupted if climb.phase == "weight gradients" else watch)

    whole = Climber.climb
    if place == "the climbs":
        monkeypatch.setattr(Climber, "climb", climb)
    else:
        monkeypatch.setattr("flexsearch.search.weight_gradients._simplified", interrupted)
    result = setting.search(600, pins=pins, processes=1, weight_gradients=True, on_end=lambda: ended.append(place))
    assert ended == [place] and result.stopped == "interrupted"
    # A start of the climbs, whole gradients on every device, is better than what the search before them finds.
    assert bool(result.strategy.weight_gradients) == (place == "the climbs")


# ---- words


def test_words_tell_them_with_their_layers() -> None:
    graph, topology = mlp(), Topology.load("ethernet-1g:4")
    first = able(graph)[0]
    plain = in_words(lower(graph, of(graph, topology, {}), topology, Costs(graph, topology)))
    assert plain == "all layers: batch over 4 hosts"
    own = in_words(lower(graph, of(graph, topology, {"o": 4}, first), topology, Costs(graph, topology)))
    assert f"{first}: batch over 4 hosts, gradients of weights output features over 4 hosts" in own
    degrees = dict(baseline("data-parallel", graph, topology).configs[first].degrees)
    same = in_words(lower(graph, of(graph, topology, degrees, first), topology, Costs(graph, topology)))
    assert f"{first}: batch over 4 hosts, gradients of weights likewise, last" in same
