"""A chain, step by step: how it cools, and what it shares between operators and links that are alike."""

from __future__ import annotations

import numpy as np
import pytest

from flexsearch.cost import Costs
from flexsearch.graph import OperatorGraph
from flexsearch.search.chain import LEVEL
from flexsearch.search.climb import Climber
from flexsearch.search.runner import EXCESS, FIRST
from flexsearch.strategy import Options
from tests.test_baselines import cnn, ethernet, mlp, transformer
from tests.test_search import recurrent


def test_a_temperature_lasts_longer_while_it_brings_gains() -> None:
    graph, topology, patience = cnn(batch=32, hidden=512), ethernet(4), 200
    climber = Climber(graph, topology, Costs(graph, topology), Options(), seed=0)
    rng, lasted = np.random.Generator(np.random.PCG64(1)), []
    for number in range(6):
        start = climber.space.random_plan(rng)
        now = climber.evaluate(start)
        climber.runner.begin(start, now, now, number, patience)
        since, level, ended = 0, 0, False
        while not ended and level < len(EXCESS) - 1 - FIRST[number % len(FIRST)]:
            ended = climber.runner.go(rng, 1)
            since += 1
            if (reached := int(climber.runner._chain.counts[LEVEL])) > level:
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
    climber.runner.begin(start, now, now, 0, 1)
    templates, moves = climber.evaluate.at(start).templates, climber.runner._moves
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
