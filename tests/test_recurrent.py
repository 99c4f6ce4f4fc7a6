"""Unrolled recurrent networks: each step of each layer is an operator, hidden features can be split, layers overlap."""

from __future__ import annotations

from collections import Counter
from functools import cache
from itertools import combinations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from flexsearch import zoo
from flexsearch.cost import Costs
from flexsearch.errors import StrategyError
from flexsearch.graph import OperatorGraph
from flexsearch.graph.importer import import_model
from flexsearch.lower import Lowered, TaskKind, lower
from flexsearch.simulate import simulate
from flexsearch.strategy import OperatorConfig, Strategy, make_config
from flexsearch.strategy.baselines import baseline, baselines
from flexsearch.strategy.depth import balance, depths, unrolled
from flexsearch.topology import Topology
from tests.test_baselines import GRAPHS, ethernet, with_kernels, without_launching


@cache
def rnnlm(layers: int = 2) -> OperatorGraph:
    made = zoo.rnnlm(batch=16, steps=4, hidden=64, vocab=200, layers=layers, device="meta")
    return import_model(made.model, made.inputs, made.loss, targets=made.targets, name="rnnlm")


@cache
def nmt() -> OperatorGraph:
    made = zoo.nmt(batch=16, steps=4, hidden=64, vocab=200, device="meta")
    return import_model(made.model, made.inputs, made.loss, targets=made.targets, name="nmt")


def lowered(graph: OperatorGraph, strategy: Strategy, topology: Topology) -> Lowered:
    return lower(graph, strategy, topology, Costs(graph, topology))


# the graph


def test_each_step_of_each_layer_is_an_operator_and_all_read_the_same_weights() -> None:
    graph = rnnlm()
    cells = [op for op in graph.operators if op.kind == "lstm_cell"]
    assert len(cells) == 2 * 4 and len({op.inputs[3:] for op in cells}) == 2
    assert [op.module for op in cells] == ["lstm.layers.0"] * 4 + ["lstm.layers.1"] * 4  # layer by layer
    assert [t.name for t in graph.of_kind("parameter") if t.name.startswith("lstm.layers.0")] == [
        f"lstm.layers.0.{name}" for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    ]
    assert sorted(Counter(unrolled(graph).values()).values()) == [4, 4, 4]  # two LSTM layers and the head
    for name in ("lstm.layers.1.weight_hh", "head.weight"):
        assert len(graph.consumers[name]) == 4
    assert len([op for op in graph.operators if op.kind == "cross_entropy"]) == 4


def test_gates_are_a_dimension_of_their_own_so_that_hidden_features_can_be_split() -> None:
    graph = rnnlm()
    op = graph.operators[graph.index["lstm.layers.0"]]
    assert op.pattern == "b I, b K, b h, G h I, G h K, G h, G h -> b h, b h"
    assert op.splittable == ("b", "h") and op.roles["h"] == "parameter" and op.roles["b"] == "sample"
    assert graph.tensor["lstm.layers.0.weight_ih"].shape == (4, 64, 64)
    assert graph.tensor["lstm.layers.0.bias_ih"].shape == (4, 64)


def test_weights_that_others_read_too_keep_their_shape_and_hidden_is_whole() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.LSTMCell(4, 3, bias=False)
            self.normal = nn.LSTMCell(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            weight = self.normal.weight_ih / 2
            other, _ = torch.lstm_cell(x, self.normal(x), weight, self.normal.weight_hh)
            return self.cell(x)[0].sum() + F.linear(x, self.cell.weight_ih).sum() + other.sum()

    graph = import_model(Shared(), torch.randn(2, 4))
    patterns = {op.name: op for op in graph.operators if op.kind == "lstm_cell"}
    assert {op.pattern for op in patterns.values()} == {
        "b I, b K, b h, (G h) I, G h K, G h, G h -> b h, b h",  # read by the division as well
        "b I, b K, b h, (G h) I, G h K -> b h, b h",
    }
    assert {op.splittable for op in patterns.values()} == {("b",)}
    assert graph.tensor["cell.weight_ih"].shape == (12, 4) and graph.tensor["cell.weight_hh"].shape == (4, 3, 3)


def test_hidden_features_stay_where_they_are_through_the_cells() -> None:
    """Split over 4 devices, only h is gathered; gates, cell state, weights and their gradients move nothing."""
    graph, topology = rnnlm(), Topology.load("p100:1")
    split = {op.name: make_config(op, {"h": 4} if op.kind == "lstm_cell" else {}, range(4)) for op in graph.operators}
    found = lowered(graph, Strategy.make(graph, topology, split), topology)
    moving = {e.tensor for e in found.edges for plan in (e.forward, e.backward) if plan is not None and plan.exchanges}
    cells = [op for op in graph.operators if op.kind == "lstm_cell"]
    made = {name for op in cells for name in op.outputs[:1]} | {op.inputs[0] for op in cells}
    assert moving & {name for op in cells for name in (*op.inputs, *op.outputs)} <= made
    assert not {op.outputs[1] for op in cells} & moving
    for weight in found.weights:
        if weight.tensor.startswith("lstm"):
            assert weight.plan.sync is not None and not weight.plan.sync.exchanges
            assert len(weight.edges) == 1 and all(
                volume_share(e.box, weight.tensor, graph) == 4 for e in weight.plan.storage
            )


def volume_share(box: tuple[tuple[int, int], ...], tensor: str, graph: OperatorGraph) -> int:
    """How many such regions the tensor has."""
    whole = 1
    for (low, high), size in zip(box, graph.tensor[tensor].shape, strict=True):
        whole *= size // (high - low)
    return whole


# layer-wise


def test_depths_of_a_translator_put_encoder_and_decoder_side_by_side() -> None:
    graph = nmt()
    found = depths(graph)
    assert found is not None
    modules: dict[int, set[str]] = {}
    for op, depth in zip(graph.operators, found, strict=True):
        modules.setdefault(depth, set()).add(op.module.removesuffix(".table"))
    assert modules == {
        0: {"source", "target", "encoder.layers.0", "decoder.layers.0"},
        1: {"encoder.layers.1", "decoder.layers.1", ""},  # "": the stack of the encoder's states
        2: {"attention.query", "attention"},
        3: {"attention.combine", "attention"},
        4: {"head", "loss"},
    }
    for i, op in enumerate(graph.operators):  # an operator runs no earlier than what feeds it, but for an LSTM's state
        for position, name in enumerate(op.inputs):
            if name in graph.producer and (op.kind, position) not in (("lstm_cell", 1), ("lstm_cell", 2)):
                assert found[graph.producer[name]] <= found[i]


def test_depth_needs_layers_that_feed_themselves() -> None:
    assert all(depths(graph) is None for graph in GRAPHS.values())  # tied embeddings among them

    class Siamese(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return (self.b(self.a(x)) * self.b(self.a(-x))).sum()

    assert depths(import_model(Siamese(), torch.randn(2, 4))) is None
    with pytest.raises(StrategyError, match="recurrent layers that are unrolled"):
        baseline("layer-wise", GRAPHS["mlp"], ethernet(2))


def test_plain_cells_of_two_linears_are_recurrent_too() -> None:
    class Elman(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.x, self.h = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.tanh(self.x(x[:, 0]))
            for t in (1, 2):
                h = torch.tanh(self.x(x[:, t]) + self.h(h))
            return h.sum()

    graph = import_model(Elman(), torch.randn(2, 3, 4))
    found = depths(graph)
    assert found is not None
    assert {op.module: d for op, d in zip(graph.operators, found, strict=True) if op.module} == {"x": 0, "h": 1}


@given(loads=st.lists(st.floats(0.0, 10.0), min_size=1, max_size=6), data=st.data())
@settings(derandomize=True, deadline=None, max_examples=50)
def test_balance_is_as_even_as_can_be(loads: list[float], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(loads)))

    def cost(places: list[int]) -> float:
        sums = [0.0] * count
        for load, place in zip(loads, places, strict=True):
            sums[place] += load
        return sum(s * s for s in sums)

    found = balance(loads, count)
    assert found == sorted(found) and set(found) == set(range(count))
    cuts = combinations(range(1, len(loads)), count - 1)
    best = min(cost([sum(i >= cut for cut in chosen) for i in range(len(loads))]) for chosen in cuts)
    assert cost(found) == pytest.approx(best)


def test_layer_wise_gives_each_depth_a_device_and_each_host_a_part_of_the_batch() -> None:
    graph = rnnlm()
    one = baseline("layer-wise", graph, Topology.load("p100:1")).configs
    assert {one[f"lstm.layers.{k}{step}"].devices for k, step in ((0, ""), (0, "_3"))} == {(0,)}
    assert one["embed.table"].devices == (0,)
    assert one["lstm.layers.1_2"].devices == (1,) and one["head_1"].devices == one["loss.mean"].devices == (2,)
    two = baseline("layer-wise", graph, Topology.load("p100:2")).configs
    assert two["lstm.layers.1"] == OperatorConfig((("b", 2),), (1, 5))
    wide = baseline("layer-wise", graph, Topology.load("dgx-a100:1")).configs  # 8 devices: three depths, twice
    assert wide["lstm.layers.1"] == OperatorConfig((("b", 2),), (1, 4))
    lonely = baseline("layer-wise", graph, ethernet(4)).configs  # hosts of one device: they take the layers
    assert lonely["lstm.layers.1"].devices == (1,)
    few = baseline("layer-wise", graph, ethernet(2)).configs
    assert {c.devices for c in few.values()} == {(0,), (1,)}


def test_layers_over_hosts_send_no_gradient_between_them() -> None:
    """One depth of layers to a host, as many hosts as depths at most; each host takes the whole batch."""
    graph, topology = rnnlm(), Topology.load("p100:4")
    plan = baseline("data-parallel x layer-wise", graph, topology)
    assert plan.configs["lstm.layers.0_3"] == OperatorConfig((("b", 4),), (0, 1, 2, 3))
    assert plan.configs["lstm.layers.1"] == OperatorConfig((("b", 4),), (4, 5, 6, 7))
    assert plan.configs["head_1"].devices == (8, 9, 10, 11)
    host = [device.host for device in topology.devices]
    for weight in lowered(graph, plan, topology).weights:
        assert len({host[entry.device] for entry in weight.plan.storage}) == 1
    for alone in (ethernet(4), Topology.load("p100:1")):
        with pytest.raises(StrategyError, match="several hosts with several devices"):
            baseline("data-parallel x layer-wise", graph, alone)


@pytest.mark.parametrize("count", range(1, 9))
def test_every_baseline_is_legal_for_recurrent_networks(count: int) -> None:
    topology = ethernet(count)
    for graph in (rnnlm(), nmt()):
        found = baselines(graph, topology)
        assert ("layer-wise" in found) == (count > 1)
        for strategy in found.values():
            assert lowered(graph, strategy, topology).tasks.kind


def test_steps_of_different_layers_run_at_the_same_time() -> None:
    """Where kernels take longer than messages and launches."""
    graph, topology = rnnlm(3), with_kernels(without_launching(Topology.load("p100:1")), 10e-6)
    plan = lowered(graph, baseline("layer-wise", graph, topology), topology)
    times = simulate(plan)
    spans: dict[tuple[str, TaskKind], list[tuple[float, float]]] = {}
    for task, operator in enumerate(plan.tasks.operator):
        if operator >= 0:
            key = graph.operators[operator].module, TaskKind(plan.tasks.kind[task])
            spans.setdefault(key, []).append((float(times.start[task]), float(times.end[task])))
    for kind in (TaskKind.FORWARD, TaskKind.BACKWARD):
        for a, b in (("lstm.layers.0", "lstm.layers.1"), ("lstm.layers.1", "lstm.layers.2"), ("lstm.layers.2", "head")):
            assert any(
                max(start, other) < min(end, until) for start, end in spans[a, kind] for other, until in spans[b, kind]
            ), (a, b, kind)
    assert times.makespan_s < simulate(lowered(graph, baseline("single", graph, topology), topology)).makespan_s
