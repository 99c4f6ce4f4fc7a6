"""Batch size and sequence length as arguments of planning: the graph is the one that importing at that size gives."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from flexsearch import zoo
from flexsearch.errors import NotationError, StrategyError, UsageError
from flexsearch.graph import OperatorGraph
from flexsearch.graph.importer import import_model
from flexsearch.graph.ops.check import check_kinds
from flexsearch.graph.resize import parse_batch
from flexsearch.graph.sequence import sequence_length, with_sequence
from flexsearch.quantities import MAX_MOVED_BYTES
from flexsearch.setting import Setting
from flexsearch.strategy.baselines import baseline
from flexsearch.topology import Topology
from tests.conftest import Cli

SIZES: Mapping[str, int] = {"layers": 2, "hidden": 16, "heads": 4, "vocab": 32}
LLAMA = {**SIZES, "ffn": 24, "kv_heads": 2}
MODELS: Mapping[str, tuple[Callable[..., zoo.ZooModel], Mapping[str, int]]] = {
    "gpt2": (zoo.gpt2, SIZES),
    "bert": (zoo.bert, SIZES),
    "llama": (zoo.llama7b, LLAMA),
    "mixtral": (zoo.mixtral, {**LLAMA, "experts": 4}),
}


@cache
def imported(name: str, batch: int, seq: int) -> OperatorGraph:
    builder, sizes = MODELS[name]
    model, inputs, targets, loss = builder(batch=batch, seq=seq, device="meta", **sizes)
    return import_model(model, inputs, loss, targets=targets, name=name)


def traced(model: nn.Module, *shape: int) -> OperatorGraph:
    return import_model(model, torch.zeros(shape), lambda y: y.pow(2).mean())


@pytest.mark.parametrize("name", MODELS)
def test_a_resized_graph_is_that_of_the_model_imported_at_that_size(name: str) -> None:
    graph = imported(name, 4, 16)
    assert graph.resized(6, 8) == imported(name, 6, 8)
    assert graph.resized("48-tokens", 8).content_hash() == imported(name, 6, 8).content_hash()
    assert graph.resized(4, 16) is graph and graph.resized() is graph


@pytest.mark.parametrize("name", ["gpt3_175b", "mixtral_8x7b"])
def test_large_shipped_graphs_take_another_batch_and_shorter_sequences(name: str) -> None:
    graph = OperatorGraph.load(name)
    smaller = graph.resized("1M-tokens", 1024)
    check_kinds(smaller)
    assert {t.shape for t in smaller.of_kind("input")} == {(1024, 1024)} and smaller.batch == 1024
    assert [t for t in smaller.tensors if t.kind == "parameter"] == [t for t in graph.tensors if t.kind == "parameter"]
    for old, new in zip(graph.operators, smaller.operators, strict=True):
        assert (old.name, old.pattern, old.inputs) == (new.name, new.pattern, new.inputs)
        if old.kind == "attention":
            assert new.sizes["q"] == new.sizes["K"] == 1024 and new.sizes["E"] == old.sizes["E"]
        if old.kind == "dispatch":
            assert new.attributes["capacity"] == new.sizes["c"] == 256


def test_a_batch_is_a_number_of_samples_or_of_tokens() -> None:
    graph = imported("gpt2", 4, 16)
    for text, samples in (("512", 512), (7, 7), ("1M-tokens", 65536), ("4k-tokens", 256), ("1.5ktokens", 96)):
        assert parse_batch(text, graph) == samples
    with pytest.raises(UsageError, match=r"40 tokens is no whole number of sequences of 16. The nearest that are: "
                       r"32-tokens \(2 samples\) and 48-tokens \(3 samples\)"):  # fmt: skip
        parse_batch("40-tokens", graph)
    with pytest.raises(UsageError, match=r"are: 16-tokens \(1 sample\)\."):
        parse_batch("3-tokens", graph)
    for text in ("", "0", "-1", "four", "1G-tokens", "1k", "9" * 16, "1e3", "tokens"):
        with pytest.raises(UsageError, match="neither a number of samples nor one of tokens"):
            parse_batch(text, graph)
    with pytest.raises(UsageError, match="has no sequences of tokens"):
        parse_batch("1k-tokens", OperatorGraph.load("lenet"))


def test_only_shorter_sequences_can_be_cut_from_positions() -> None:
    graph = imported("gpt2", 4, 16)
    with pytest.raises(NotationError, match=r"constant 'wpe.constant' has 16 positions .*Give at most 16, or import"):
        with_sequence(graph, 32)
    with pytest.raises(NotationError, match=r"constant 'layers.0.attn.constant' has 16 positions"):
        with_sequence(imported("llama", 4, 16), 32)
    assert with_sequence(graph, 8).tensor["wpe.weight"] == graph.tensor["wpe.weight"]


def test_what_has_no_sequence_or_mixes_it_with_constants_is_refused() -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.positions, self.fc = nn.Parameter(torch.zeros(6, 4)), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x + self.positions)

    class Shift(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)[:, 1:]

    class Chunks(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).reshape(len(x), 2, 3, 4).softmax(2)

    assert sequence_length(traced(Positions(), 2, 6, 4)) == 6
    with pytest.raises(NotationError, match=r"parameter 'positions' of shape \[6, 4\] is as long as the sequence"):
        with_sequence(traced(Positions(), 2, 6, 4), 3)
    for model in (Shift(4, 4), Chunks(4, 4)):
        with pytest.raises(NotationError, match="mixes the sequence with constants"):
            with_sequence(traced(model, 2, 6, 4), 4)
    assert with_sequence(traced(nn.Linear(4, 4), 2, 6, 4), 12).tensor["input"].shape == (2, 12, 4)
    for name in ("lenet", "mlp"):
        with pytest.raises(NotationError, match="has no sequence"):
            with_sequence(OperatorGraph.load(name), 3)
    with pytest.raises(NotationError, match=r"room for 8 of 16 tokens at each expert, which is no whole number of 3"):
        with_sequence(imported("mixtral", 4, 16), 3)
    with pytest.raises(UsageError, match="a sequence cannot have 0 tokens"):
        imported("gpt2", 4, 16).resized(sequence=0)
    with pytest.raises(NotationError, match=r"the limit is 2\^50 \(1 PiB\)\. Give a smaller one"):
        OperatorGraph.load("llama_405b").resized(2**20)
    large = OperatorGraph.load("llama_405b").resized(2**10)  # only sums are beyond what one communication may move
    assert sum(tensor.nbytes for tensor in large.tensors) > MAX_MOVED_BYTES > max(t.nbytes for t in large.tensors)
    with pytest.raises(NotationError, match=r"would have an axis of .* indices\. Give a smaller size"):
        imported("gpt2", 4, 16).resized(2**46)


def test_a_strategy_says_which_size_it_was_made_for() -> None:
    graph, topology = imported("gpt2", 4, 16), Topology.load("ethernet-1g-2")
    plan = baseline("data-parallel", graph.resized(8, 8), topology)
    assert [spec.shape for spec in plan.inputs] == [(8, 8), (8, 8)]
    with pytest.raises(StrategyError, match="another batch or sequence length: give --batch 8 --seq 8"):
        plan.check(graph, topology)
    with pytest.raises(StrategyError, match="give --batch 8\\."):
        plan.check(graph.resized(sequence=8), topology)
    plan.check(graph.resized("64-tokens", 8), topology)
    with pytest.raises(StrategyError, match="Give the graph it was made for"):
        plan.check(imported("llama", 4, 16), topology)
    setting = Setting.of(graph.resized(8, 8), topology)
    assert setting.row("data-parallel", plan).simulation.makespan_s > 0


def test_commands_take_the_size_and_say_which_one_a_strategy_needs(tmp_path: Path, cli: Cli) -> None:
    path, graph = tmp_path / "s.json", tmp_path / "g.json"
    imported("gpt2", 4, 16).save(graph)  # named gpt2, but none of the shipped ones
    size = ("--batch", "64-tokens", "--seq", "8")
    made = cli("compare", graph, "-t", "ethernet-1g-2", *size, "--save", "data-parallel", "-o", path)
    assert made.code == 0, made.err
    assert json.loads(path.read_text())["inputs"][0]["shape"] == [8, 8]
    for command in (
        ("simulate", graph, "-s", path), ("compare", graph, "-s", path), ("explain", path, "-g", graph, "--tries", "0"),
        ("diff", path, "single", "-g", graph), ("plot", path, "-g", graph, "-o", tmp_path / "p.svg"),
    ):  # fmt: skip
        for more, remedy in ((), "Give --batch 8 --seq 8."), (("--seq", "4"), "Give --batch 8 --seq 8."):
            refused = cli(*command, *more)
            assert refused.code == 2 and "was made for another size of graph 'gpt2'" in refused.err
            assert remedy in refused.err and "Traceback" not in refused.err
        assert cli(*command, *size).code == 0
