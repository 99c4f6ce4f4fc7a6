"""The shipped graphs of large transformers: sizes, fused attention, experts that can be split; and that they lower."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexsearch import zoo
from flexsearch.errors import NotationError
from flexsearch.graph import OperatorGraph
from flexsearch.graph.deepen import deepened
from flexsearch.graph.importer import import_model
from flexsearch.graph.shipped import SHIPPED
from flexsearch.lower import Lowering
from flexsearch.setting import Setting
from flexsearch.strategy.baselines import baseline
from flexsearch.topology import Topology

LARGE = {  # parameters, (batch, seq), layers, hidden features, heads of queries and of keys, vocabulary
    "llama_7b": (6_738_415_616, (16, 4096), 32, 4096, 32, 32, 32_000),
    "llama_70b": (68_976_648_192, (16, 4096), 80, 8192, 64, 8, 32_000),
    "llama_405b": (405_853_388_800, (16, 8192), 126, 16384, 128, 8, 128_256),
    "gpt3_175b": (174_604_259_328, (16, 2048), 96, 12288, 96, 96, 50_257),
    "mixtral_8x7b": (46_702_792_704, (16, 4096), 32, 4096, 32, 8, 32_000),
}
"""Published sizes."""


@pytest.mark.parametrize("name", LARGE)
def test_a_large_graph_has_the_published_sizes_in_a_small_file(name: str) -> None:
    parameters, (batch, seq), layers, hidden, heads, kv_heads, vocab = LARGE[name]
    graph = OperatorGraph.load(name)
    assert sum(t.nbytes // t.itemsize for t in graph.of_kind("parameter")) == parameters
    assert [t.shape for t in graph.of_kind("input")] == [(batch, seq)] * 2
    attention = [op for op in graph.operators if op.kind == "attention"]
    assert len(attention) == layers
    size = hidden // heads
    for op in attention:
        shapes = [graph.tensor[x].shape for x in (*op.inputs, *op.outputs)]
        assert shapes == [(batch, n, seq, size) for n in (heads, kv_heads, kv_heads, heads)]
        assert op.attributes["causal"]
    [logits] = [graph.tensor[op.outputs[0]] for op in graph.operators if op.name == "lm_head"]
    assert logits.shape == (batch, seq, vocab)
    assert (Path(__file__).parent.parent / "graphs" / f"{name}.json").stat().st_size < 30_000
    assert SHIPPED[name].arguments == {"batch": batch, "seq": seq}


def test_the_experts_of_mixtral_can_be_split() -> None:
    graph = OperatorGraph.load("mixtral_8x7b")
    products = [op for op in graph.operators if op.kind == "einsum"]
    assert len(products) == 3 * 32
    for op in products:
        assert graph.tensor[op.inputs[1]].kind == "parameter"
        experts = op.access.outputs[0].dimensions[1].axes[0]
        assert op.roles[experts] == "parameter" and experts in op.splittable and op.sizes[experts] == 8
        assert graph.tensor[op.outputs[0]].shape[:3] == (16, 8, 2 * 4096 // 8)
        assert graph.tensor[op.outputs[0]].shape[3] in (14336, 4096)
    for kind in ("dispatch", "combine"):
        placing = [op for op in graph.operators if op.kind == kind]
        assert len(placing) == 32 and all(op.roles["e"] == "parameter" and "e" in op.splittable for op in placing)


def test_data_parallel_llama_7b_is_lowered_and_lacks_memory() -> None:
    graph, topology = OperatorGraph.load("llama_7b"), Topology.load("p100:1")
    setting = Setting.of(graph, topology)
    plan = baseline("data-parallel", graph, topology)
    assert Lowering(graph, topology, setting.costs).lower(plan.in_order(graph), plan.options).graph is graph
    row = setting.row("data-parallel", setting.baseline("data-parallel"))
    assert row.simulation.makespan_s > 0 and row.shortfall


def small(layers: int, **arguments: int) -> OperatorGraph:
    """A small Mixtral."""
    sizes = {"batch": 2, "seq": 8, "hidden": 16, "heads": 4, "kv_heads": 2, "ffn": 24, "vocab": 31, "experts": 4}
    model, inputs, targets, loss = zoo.mixtral(layers=layers, **sizes | arguments)
    return import_model(model, inputs, loss, targets=targets, name="small")


def test_a_deepened_graph_is_that_of_the_deeper_model() -> None:
    assert deepened(small(3), 5) == small(5)


def test_a_graph_without_one_block_is_not_deepened() -> None:
    with pytest.raises(NotationError, match="has 0 blocks of operators that repeat"):
        deepened(small(1), 5)
