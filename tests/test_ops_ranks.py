"""Every kind of operator on several ranks: its samples, under random strategies, give PyTorch's loss and gradients."""

from __future__ import annotations

import os
import random

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, note, seed, settings
from hypothesis import strategies as st
from torch import Tensor

from flexsearch.cost import Costs
from flexsearch.graph.importer import Imported
from flexsearch.lower import Lowering
from flexsearch.runtime.parallel import distribute
from flexsearch.strategy import OperatorConfig, Strategy, StrategyFile
from flexsearch.strategy.baselines import baseline
from flexsearch.topology import Topology
from tests.op_samples import SAMPLES, draws, imported, model
from tests.random_strategies import strategies
from tests.ranks import pool

CASES = int(os.environ.get("FLEXSEARCH_OPS_CASES", "1"))
"""Strategies for each sample: the simplest, which is drawn first and not run, and random ones; hundreds offline, one in
CI."""
RATE = 0.5

Stepped = tuple[float, dict[str, Tensor]]
"""Loss of a step and the weights after it."""


def _sgd(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=RATE)


def _single(name: str, number: int) -> Stepped:
    """On one device: in plain PyTorch, or, where random numbers are drawn, those that flexsearch draws."""
    if draws(imported(name, number).graph):
        plan = baseline("single", imported(name, number).graph, Topology.load("ethernet-1g:1"))
        return pool(1).run(_parallel, name, number, imported(name, number), plan.to_file().model_dump_json())[0]
    called = model(name, number)
    optimizer = _sgd(list(called.parameters()))
    loss = called(*called.inputs())
    loss.backward()
    optimizer.step()
    return loss.item(), {key: x.detach() for key, x in called.state_dict().items()}


def _parallel(name: str, number: int, traced: Imported, file: str) -> Stepped:
    """On this rank, under the strategy. ``traced``: what tracing gave, which takes longer than all else."""
    called = model(name, number)
    strategy = Strategy.from_file(StrategyFile.model_validate_json(file))
    parallel = distribute(called, traced, strategy, _sgd)
    return parallel.step(called.inputs()).item(), parallel.state_dict()


FIRST = [(name, number) for name, number in SAMPLES if number == 0 or CASES > 2]
"""In CI the first sample of each kind; ``test_ops`` computes all of them in pieces."""


@pytest.mark.parametrize(("name", "number"), FIRST)
def test_any_strategy_computes_what_one_device_does(name: str, number: int) -> None:
    traced, expected = imported(name, number), _single(name, number)
    graph = traced.graph
    if not any(op.splittable for op in graph.operators):
        return

    @settings(max_examples=CASES, database=None, deadline=None, suppress_health_check=list(HealthCheck),
              phases=[Phase.explicit, Phase.generate])  # fmt: skip
    @seed(random.Random(f"{name} {number}").randrange(2**32))  # not derandomize, whose one case is the simplest
    @given(data=st.data(), ranks=st.integers(2, 3))
    def check(data: st.DataObject, ranks: int) -> None:
        strategy = data.draw(strategies(graph, Topology.load(f"ethernet-1g:{ranks}")))
        if strategy.devices == (0,):
            return
        file = strategy.to_file().model_dump_json()
        note(file)
        for loss, state in pool(ranks).run(_parallel, name, number, traced, file):
            assert loss == pytest.approx(expected[0], rel=1e-9, abs=1e-12)
            for key, x in expected[1].items():
                torch.testing.assert_close(state[key], x, rtol=1e-9, atol=1e-10, msg=lambda m, k=key: f"{k}: {m}")

    check()


def test_halos_go_message_by_message() -> None:
    name, number = "conv2d", 0
    graph, topology = imported(name, number).graph, Topology.load("ethernet-1g:3")
    strategy = baseline("data-parallel", graph, topology)
    for op in graph.operators:
        if long := [axis.name for axis in op.axes if axis.role == "attribute" and axis.size >= 3]:
            strategy.configs[op.name] = OperatorConfig(((long[-1], 3),), (0, 1, 2), 1)
    lowered = Lowering(graph, topology, Costs(graph, topology)).lower(strategy.in_order(graph), strategy.options)
    moving = [c for c in lowered.tasks.communication if c is not None and c.purpose != "synchronise"]
    assert len(moving) > 3 and all((len(c.senders), len(c.receivers)) == (1, 1) for c in moving)
    loss, weights = _single(name, number)
    file = strategy.to_file().model_dump_json()
    for answer, held in pool(3).run(_parallel, name, number, imported(name, number), file):
        assert answer == pytest.approx(loss, rel=1e-9)
        for key, value in weights.items():
            torch.testing.assert_close(held[key], value, rtol=1e-9, atol=1e-12)
