"""Pins: what the user fixes is in every plan, and the rest is searched."""

from __future__ import annotations

import numpy as np
import pytest

from flexsearch.cost import Costs
from flexsearch.errors import StrategyError
from flexsearch.graph import OperatorGraph
from flexsearch.search import search
from flexsearch.search.climb import Climber
from flexsearch.search.pins import Pins, parse_pins
from flexsearch.search.space import Space
from flexsearch.strategy import Options, States, Strategy, check_config
from flexsearch.topology import Topology
from tests.test_baselines import cnn, ethernet, mlp, transformer


def pins(*texts: str, graph: OperatorGraph | None = None, devices: int = 4) -> Pins:
    found = parse_pins(texts, graph or mlp(), ethernet(devices))
    assert found is not None
    return found


def found_with(graph: OperatorGraph, *texts: str, devices: int = 4, start: Strategy | None = None) -> Strategy:
    topology = ethernet(devices)
    result = search(graph, topology, Costs(graph, topology), proposals=150, pins=texts, start=start, processes=1)
    result.strategy.check(graph, topology)
    assert result.strategy.search is not None and result.strategy.search.pins == texts
    return result.strategy


def test_a_pinned_operator_has_its_config_in_the_answer_and_in_every_baseline() -> None:
    graph = mlp()
    free = [op.name for op in graph.operators if op.kind == "linear"]
    strategy = found_with(graph, f"{free[0]}: batch=2", f"{free[1]}: devices=1,3, parameter=2, shard=no")
    first, second = strategy.configs[free[0]], strategy.configs[free[1]]
    assert first.degree("b0") == 2
    assert second.devices == (1, 3) and dict(second.degrees) == {"o": 2} and not second.states


def test_a_pattern_names_operators_and_modules() -> None:
    graph = transformer(layers=2)
    rule = pins("*: devices=0", graph=graph)
    assert set(rule.pins) == set(range(len(graph.operators)))
    strategy = found_with(graph, "*: devices=2")
    assert {config.devices for config in strategy.configs.values()} == {(2,)}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "texts",
    [
        ("*: batch=2",),
        ("*: devices=1-3",),
        ("*: replicas=2",),
        ("*: batch=2, replicas=2",),
        ("*: devices=0,2, batch=2",),
        ("*: shard=yes", "*: devices=0-3"),
        ("*: states=optimizer", "*: devices=0-3"),
    ],
)
@pytest.mark.parametrize("graph", [mlp(), cnn(), transformer(layers=1)], ids=lambda g: g.name)
def test_the_nearest_config_is_legal_obeys_the_pin_and_is_its_own_nearest(
    graph: OperatorGraph, texts: tuple[str, ...], seed: int
) -> None:
    topology, rng = ethernet(4), np.random.default_rng(seed)
    rule = pins(*texts, graph=graph)
    space = Space(graph, topology, rule)
    for i, op in enumerate(graph.operators):
        for _ in range(5):
            config = space.fix(i, space.draw(rng, i))
            check_config(op, config, 4)
            assert space.fix(i, config) == config
            pin = rule.pins.get(i)
            if pin is not None:
                assert all(config.degree(axis) == parts for axis, parts in pin.degrees)
                assert pin.devices in (None, config.devices)
                if pin.replicas is not None:
                    assert config.replicas == pin.replicas
                if pin.states is not None:
                    assert config.states == (pin.states if i in rule.weighted else States.WHOLE)
    for config in space.alternatives(0, space.random_plan(rng)):
        assert space.fix(0, config) == config


def test_what_is_not_pinned_is_left_as_it_is() -> None:
    graph = mlp()
    name = next(op.name for op in graph.operators if op.kind == "linear")
    rule, space = pins(f"{name}: batch=2"), Space(graph, ethernet(4))
    rng = np.random.default_rng(0)
    for i, op in enumerate(graph.operators):
        config = space.draw(rng, i)
        assert op.name == name or rule(i, config) == config


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("fc0", "cannot be read"),
        ("fc0: batch", "cannot be read"),
        (": batch=2", "cannot be read"),
        ("fc00: batch=2", "Did you mean 'fc0'"),
        ("fc0: bach=2", "has an axis 'bach'"),
        ("fc0: batch=two", "not a number of parts"),
        ("fc0: batch=0", "not a number of parts"),
        ("fc0: batch=100000", "too few for 100000 parts"),
        ("fc0: batch=2, o=4", "8 pieces, but there are 4 devices"),
        ("fc0: devices=0-9", "devices are 0 to 3"),
        ("fc0: devices=1,1", "devices are 0 to 3, each once"),
        ("fc0: devices=a", "not a list of devices"),
        ("fc0: devices=0-2, batch=2", "do not come out even"),
        ("fc0: devices=0-3, replicas=2", "leave replicas out"),
        ("fc0: shard=maybe", "shard is yes or no"),
    ],
)
def test_a_pin_that_cannot_be_obeyed_is_refused(text: str, says: str) -> None:
    with pytest.raises(StrategyError, match=says):
        parse_pins([text], mlp(), ethernet(4))


def test_no_pins_are_no_rule() -> None:
    assert parse_pins([], mlp(), ethernet(4)) is None


def test_a_chain_keeps_to_pins_of_operators_that_are_alike() -> None:
    """Without pins, operators that are alike have one number for a config; with them, each must have its own."""
    graph, topology = mlp(batch=512, width=512, layers=4), Topology.load("p100:1")
    rule = pins("fc1: devices=0-1", "fc2: devices=2,3, batch=2", graph=graph)
    climber = Climber(graph, topology, Costs(graph, topology), Options(), 0, rule)
    space, rng = climber.space, np.random.Generator(np.random.PCG64(0))
    start = tuple(space.fix(i, config) for i, config in enumerate(space.random_plan(rng)))
    now = climber.evaluate(start)
    climber.chain.begin(start, now, now, 0, 10_000)
    climber.chain._schedule.excess[:] = 1e6  # so hot that everything is accepted
    seen = set()
    for _ in range(200):
        climber.chain.run(rng, 10)
        plan = climber.evaluate.at_hand
        assert all(space.fix(i, config) == config for i, config in enumerate(plan))
        seen |= {config.devices for op, config in zip(graph.operators, plan, strict=True) if op.name == "fc3"}
    assert len(seen) > 2  # the others go elsewhere
