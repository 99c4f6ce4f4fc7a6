"""What is proved of a model and its batch: plans for two ranks train it as plain PyTorch does, and as one rank does.

A model is named by a builder, a function of this package, and the family's name: ranks build it again for themselves.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from flexsearch.cost import Costs
from flexsearch.graph import OperatorGraph
from flexsearch.graph.importer import Imported, import_with_constants
from flexsearch.graph.ops import forward_flops, kind_of
from flexsearch.runtime.parallel import distribute
from flexsearch.search import search
from flexsearch.strategy import Options, Strategy, StrategyFile, make_config
from flexsearch.strategy.baselines import baseline
from flexsearch.topology import Topology
from tests.ranks import pool

STEPS, RATE = 2, 0.1
FOUND = 200
"""Proposals of the search."""


class Training(NamedTuple):
    """A model, its batch (keyword arguments), and a loss of the model's output where the model returns none."""

    model: nn.Module
    batch: dict[str, Any]
    loss: Callable[..., Tensor] | None = None
    targets: Tensor | None = None


Builder = Callable[[str, bool], Training]
"""Of a name, in float64, always with the same weights; with or without random draws (dropout, drop path)."""

History = tuple[list[float], dict[str, Tensor]]
"""The loss of each step, and the state after the last."""


@cache
def imported(build: Builder, name: str, draws: bool) -> Imported:
    """Traced once, for all ranks."""
    model, batch, loss, targets = build(name, draws)
    return import_with_constants(model, batch, loss, targets=targets)


def _sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=RATE)


def plain(build: Builder, name: str) -> tuple[dict[str, Tensor], History]:
    """The state before and the history of training in plain PyTorch, without draws."""
    model, batch, loss, targets = build(name, False)
    before = {key: x.clone() for key, x in model.state_dict().items()}
    optimizer, losses = _sgd([p for p in model.parameters() if p.requires_grad]), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        output = model(**batch)
        value = (output["loss"] if isinstance(output, Mapping) else output) if loss is None else loss(output, targets)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return before, (losses, model.state_dict())


def planned(build: Builder, name: str, draws: bool, traced: Imported, file: str) -> History:
    """The history of this rank under a strategy; each rank is fed its own samples only."""
    model, batch, _, targets = build(name, draws)
    strategy = Strategy.from_file(StrategyFile.model_validate_json(file))
    parallel = distribute(model, traced, strategy, _sgd)
    whole = parallel.graph.batch
    low, high = parallel.sample_range

    def own(x: Any) -> Any:
        return x[low:high] if isinstance(x, Tensor) and x.dim() and x.shape[0] == whole else x

    part = {key: own(batch[key]) for key in reversed(batch)}
    return [float(parallel.step(part, own(targets))) for _ in range(STEPS)], parallel.state_dict()


def scattered(graph: OperatorGraph, topology: Topology, seed: int) -> Strategy:
    """A random legal plan: each operator split on up to two axes, or replicated, on random devices."""
    draw, devices = random.Random(seed), len(topology.devices)
    configs = {}
    for op in graph.operators:
        degrees: dict[str, int] = {}
        parts = 1
        for axis in draw.sample(op.splittable, min(len(op.splittable), 2)):
            degrees[axis] = draw.randint(1, min(op.sizes[axis], devices // parts))
            parts *= degrees[axis]
        replicas = draw.randint(1, devices // parts)
        positions = draw.sample(range(devices), parts * replicas)
        configs[op.name] = make_config(op, degrees, positions, draw.random() < 0.5)
    return Strategy.make(graph, topology, configs, Options(bucket_bytes=draw.choice([1, 1000, 25 * 2**20])))


def plans(graph: OperatorGraph, topology: Topology) -> dict[str, Strategy]:
    """Data parallel, Megatron, FSDP, two random plans, and what a short search finds, which no baseline beats."""
    result = search(graph, topology, Costs(graph, topology), proposals=FOUND, seed=0, processes=1)
    assert result.simulation.makespan_s <= min(o.time_s for o in result.baselines.values() if o.feasible)
    by_hand = {name: baseline(name, graph, topology) for name in ("data-parallel", "megatron", "fsdp")}
    at_random = {f"random {seed}": scattered(graph, topology, seed) for seed in (1, 2)}
    return {**by_hand, **at_random, "found": result.strategy}


def assert_same(expected: History, other: History, before: Mapping[str, Tensor], digits: float, plan: str) -> None:
    """Losses and changes of the state agree to ``digits``, relative to the largest change of the tensor."""
    assert other[0] == pytest.approx(expected[0], rel=digits), f"{plan}: losses"
    assert list(other[1]) == list(expected[1]), f"{plan}: names"
    for key, value in expected[1].items():
        if not value.is_floating_point():
            assert torch.equal(value, other[1][key]), f"{plan}: {key}"
            continue
        change = (value - before[key]).abs().max().item() if value.numel() else 0.0
        slack = digits * max(change, 1e-3)
        assert (value - other[1][key]).abs().max().item() <= slack, f"{plan}: {key}, which changed by {change}"


def precision(graph: OperatorGraph) -> float:
    """How far plans may differ: as float64, or as float32 where a model computes in that whatever its weights are
    (norms, rotary tables, losses): sums in other orders then differ by its rounding."""
    return 1e-9 if all(t.dtype in ("float64", "int64", "bool", "int32") for t in graph.tensors) else 1e-4


def prove(build: Builder, name: str, reference: Builder | None = None) -> None:
    """Imports without opaque operators; a search finds a plan; all plans compute what plain PyTorch computes.

    ``reference``: the same function in a form that plain PyTorch can run, where the model itself is not one.
    """
    traced, topology = imported(build, name, False), Topology.load("ethernet-1g:2")
    graph = traced.graph
    assert_whole(graph)
    digits = precision(graph)
    before, expected = plain(reference or build, name)
    for plan, strategy in plans(graph, topology).items():
        file = strategy.to_file().model_dump_json()
        for history in pool(2).run(planned, build, name, False, traced, file, timeout_s=180):
            assert_same(expected, history, before, digits, plan)


def prove_draws(build: Builder, name: str) -> None:
    """With drop rates as shipped: two ranks draw what one draws, under data parallelism and a random plan."""
    traced = imported(build, name, True)
    graph = traced.graph
    assert_whole(graph)
    digits = precision(graph)
    two = Topology.load("ethernet-1g:2")
    single = baseline("single", graph, Topology.load("ethernet-1g:1")).to_file().model_dump_json()
    before = {key: x.clone() for key, x in build(name, True).model.state_dict().items()}
    expected = pool(1).run(planned, build, name, True, traced, single, timeout_s=180)[0]
    split = {"data-parallel": baseline("data-parallel", graph, two), "random": scattered(graph, two, 3)}
    for plan, strategy in split.items():
        file = strategy.to_file().model_dump_json()
        for history in pool(2).run(planned, build, name, True, traced, file, timeout_s=180):
            assert_same(expected, history, before, digits, plan)


def assert_whole(graph: OperatorGraph) -> None:
    """No operator is opaque."""
    assert not [op.name for op in graph.operators if op.kind == "opaque"]


def product_flops(graph: OperatorGraph) -> float:
    """Forward FLOPs of matrix products, convolutions and attention, those that torch's FlopCounterMode counts."""
    counted = [op for op in graph.operators if kind_of(op).contraction or kind_of(op).matrix]
    return float(sum(forward_flops(op, op.sizes) for op in counted))


def torch_flops(training: Training) -> float:
    """What FlopCounterMode counts in the forward pass and the loss."""
    with FlopCounterMode(display=False) as counter:
        training.model(**training.batch)
    return float(counter.get_total_flops())
