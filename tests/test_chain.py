"""A chain, step by step: how it cools, and what it shares between operators and links that are alike."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from flexsearch.cost import Costs
from flexsearch.graph import OperatorGraph
from flexsearch.search.chain import Chain
from flexsearch.search.climb import Climb, Climbed, Climber, Watch
from flexsearch.search.constants import COARSE_CHAINS, EXCESS, FIRST, GAIN
from flexsearch.search.evaluate import Evaluation
from flexsearch.search.moves import REPEATED, SHARD, SWAP, draw
from flexsearch.strategy import OperatorConfig, Options, States
from flexsearch.strategy.baselines import baseline
from flexsearch.strategy.depth import unrolled
from flexsearch.topology import Topology
from tests.test_baselines import cnn, ethernet, mlp, transformer
from tests.test_search import recurrent


def test_a_temperature_lasts_longer_while_it_brings_gains() -> None:
    graph, topology, patience = cnn(batch=32, hidden=512), ethernet(4), 80
    climber = Climber(graph, topology, Costs(graph, topology), Options(), seed=0)
    rng, lasted = np.random.Generator(np.random.PCG64(1)), []
    for number in range(6):
        start = climber.space.random_plan(rng)
        now = climber.evaluate(start)
        climber.chain.begin(start, now, now, number, patience)
        since, level, ended = 0, 0, False
        while not ended and level < len(EXCESS) - 1 - FIRST[number % len(FIRST)]:
            ended = climber.chain.run(rng, 1)
            since += 1
            if (reached := int(climber.chain._state.level[0])) > level:
                assert reached == level + 1
                lasted.append(since)
                since, level = 0, reached
    assert min(lasted) == patience // 4
    assert patience // 4 < max(lasted) <= patience


@pytest.mark.parametrize("graph", [mlp(), cnn(), transformer(layers=2), recurrent()], ids=lambda g: g.name)
def test_links_that_are_alike_lead_to_the_same_configs(graph: OperatorGraph) -> None:
    topology = ethernet(4)
    climber = Climber(graph, topology, Costs(graph, topology), Options(), seed=0)
    space, rng, shared = climber.space, np.random.Generator(np.random.PCG64(0)), 0
    start = space.random_plan(rng)
    now = climber.evaluate(start)
    climber.chain.begin(start, now, now, 0, 1)
    templates, moves = climber.evaluate.at(start).templates, climber.chain._moves
    links = [(i, link) for i, links in enumerate(space.propagation.links) for link in links]
    for kind, (source, link) in zip(moves.link_kind.tolist(), links, strict=True):
        like_source, like = links[kind]
        shared += kind != links.index((source, link))
        for _ in range(3):
            config = space.draw(rng, source)
            target = space.propagation.over(source, config, link)
            number = templates.config(link.target, target)
            assert templates.config(source, config) == templates.config(like_source, config)
            assert number == templates.config(like.target, space.propagation.over(like_source, config, like))
    assert shared or graph.name == mlp().name


def test_a_coarse_chain_keeps_the_steps_of_a_layer_alike_on_many_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flexsearch.search.space.STEPS_TOGETHER_FROM", 4)
    graph, topology = recurrent(), Topology.load("p100:1")
    climber = Climber(graph, topology, Costs(graph, topology), Options(), seed=0)
    layers: dict[int, list[int]] = {}
    for i, layer in unrolled(graph).items():
        if i in climber.space.groups:
            layers.setdefault(layer, []).append(i)
    assert len(layers) > 1 and all(len(steps) > 1 for steps in layers.values())
    start = baseline("data-parallel", graph, topology).in_order(graph)
    now, rng, seen = climber.evaluate(start), np.random.Generator(np.random.PCG64(0)), set()
    for coarse in (True, False):
        climber.chain.begin(start, now, now, 0, 40_000, coarse)
        mixed = False
        for _ in range(2000):
            climber.chain.run(rng, 16)
            configs = climber.evaluate.at_hand
            kinds = [{configs[i] for i in steps} for steps in layers.values()]
            mixed = mixed or any(len(kind) > 1 for kind in kinds)
            seen.add(configs)
        assert mixed != coarse
    assert len(seen) > 20


@pytest.mark.parametrize("coarse", [False, True])
def test_only_a_fine_chain_changes_or_swaps_parts_of_a_config(coarse: bool) -> None:
    graph, topology = cnn(batch=32, hidden=512), ethernet(4)
    climber = Climber(graph, topology, Costs(graph, topology), Options(), seed=0)
    start = baseline("data-parallel", graph, topology).in_order(graph)
    now = climber.evaluate(start)
    climber.chain.begin(start, now, now, 0, 10, coarse)
    rates = np.diff(climber.chain._moves.often, prepend=0.0)
    assert bool(rates[[SHARD, SWAP]].any()) != coarse and rates[REPEATED] > 0


def test_classes_that_change_together_have_no_operators_in_common() -> None:
    graph, topology = recurrent(), ethernet(4)
    climber = Climber(graph, topology, Costs(graph, topology), Options(), seed=0)
    start = baseline("data-parallel", graph, topology).in_order(graph)
    now = climber.evaluate(start)
    climber.chain.begin(start, now, now, 0, 1, coarse=True)
    apart, parts = climber.chain._moves.apart, climber.space.parts
    assert {i for part in parts for i in part} == set(climber.space.leaders)
    assert 0 < apart.sum() < apart.size - len(parts)  # all layers of a shape, and each of them
    for a, first in enumerate(parts):
        for b, second in enumerate(parts):
            assert apart[a, b] == (not set(first) & set(second))


def test_coarse_chains_go_on_from_the_best_plan_while_they_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, topology = cnn(batch=32, hidden=512), ethernet(4)
    climber = Climber(graph, topology, Costs(graph, topology), Options(), seed=0)
    start = climber.space.random_plan(np.random.Generator(np.random.PCG64(1)))
    kinds, ends, chain = list[bool](), [climber.evaluate(start).cost], Climber._chain

    def watched(
        self: Climber, climb: Climb, rng: np.random.Generator, done: Climbed, watch: Watch, coarse: bool = False
    ) -> None:
        before = done.configs
        chain(self, climb, rng, done, watch, coarse)
        assert starts[-1] == before and (done.evaluation.cost < ends[-1] or done.configs == before)
        kinds.append(coarse)
        ends.append(done.evaluation.cost)

    begin, starts = Chain.begin, list[tuple[OperatorConfig, ...]]()

    def noting(self: Chain, configs: tuple[OperatorConfig, ...], *rest: object) -> None:
        starts.append(configs)
        begin(self, configs, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Climber, "_chain", watched)
    monkeypatch.setattr(Chain, "begin", noting)
    climb = Climb(0, 0, "from random", start, 10**6, climber.evaluate(start), Options(), coarse=True)
    done = climber.climb(climb, lambda _: None)
    assert kinds == [True] * (len(kinds) - 1) + [False] and 2 < len(kinds) <= COARSE_CHAINS + 1
    gains = [1.0 - b / a for a, b in pairwise(ends[:-1])]
    assert all(gain >= GAIN for gain in gains[:-1]) and (gains[-1] < GAIN or len(gains) == COARSE_CHAINS)
    assert not done.optimal  # operators one by one are left to other climbs


@pytest.mark.parametrize("kind", [0.0, 0.75, 0.86, 0.95], ids=["candidate", "like", "swap", "neighbour"])
def test_what_a_class_changes_to(kind: float) -> None:
    graph, topology = recurrent(), Topology.load("p100:1")
    climber = Climber(graph, topology, Costs(graph, topology), Options(), seed=0)
    space, chain = climber.space, climber.chain
    start = space.random_plan(np.random.Generator(np.random.PCG64(2)))
    now, different = climber.evaluate(start), 0
    chain.begin(start, now, now, 0, 1, coarse=True)
    simulator, draws = climber.evaluate.at(start), chain._draws
    for k, part in enumerate(space.parts):
        row = draws.uniform[0]
        row[:] = 0.0
        row[1], row[4], row[7], row[8] = (k + 0.5) / len(space.parts), kind, 0.9, 1.0
        row[16] = row[19] = row[21] = 1.0  # neither in turn nor exchanged nor side by side
        draws.row[0] = 0
        change, now = simulator.rows.change, simulator.rows.state.config
        while not draw(chain._moves, draws, now, simulator.templates.tables, change):
            chain._requests.supply(simulator.templates, change)
        drawn = dict(zip(change.operator[: int(change.number[0])].tolist(), change.config.tolist(), strict=False))
        found = {i: simulator.templates.configs[n] for i, n in drawn.items()}
        assert len({found[i] for i in part}) == 1
        model, config = part[0], found[part[0]]
        neighbours = {
            OperatorConfig(
                over.degrees, over.devices, over.replicas,
                start[model].states if len(over.devices) > 1 else States.WHOLE,
            )
            for link in space.propagation.links[model]
            for back in space.propagation.links[link.target]
            if back.target == model
            for over in [space.propagation.over(link.target, start[link.target], back)]
        }
        swapped = start[model].on({0: 3, 3: 0}.get(d, d) for d in start[model].devices)
        wanted = {0.0: {config}, 0.75: {start[model]}, 0.86: {swapped}, 0.95: neighbours or {start[model]}}[kind]
        assert config in wanted
        different += config != start[model]
    assert (different > 0) == (kind != 0.75)


def test_a_chain_that_ends_worse_than_it_began_leaves_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, topology = cnn(batch=32, hidden=512), ethernet(4)
    climber = Climber(graph, topology, Costs(graph, topology), Options(), seed=0)
    rng = np.random.Generator(np.random.PCG64(1))
    start, worse = climber.space.random_plan(rng), climber.space.random_plan(rng)
    now = climber.evaluate(start)
    monkeypatch.setattr(Chain, "best", property(lambda _: (worse, Evaluation(2.0 * now.cost, 0.0))))
    monkeypatch.setattr(Chain, "gains", lambda _: [])
    done = climber.climb(Climb(0, 0, "from random", start, 64, now, Options(), coarse=True), lambda _: None)
    assert done.proposals == 64 and done.configs == start and done.evaluation == now
