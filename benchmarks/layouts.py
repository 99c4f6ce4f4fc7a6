"""Models of ``runtime_vs_torch``, and the layouts of them that PyTorch's own parts express, as strategies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

import torch
from torch import Tensor, nn

from flexsearch import zoo
from flexsearch.errors import StrategyError
from flexsearch.graph import OperatorGraph
from flexsearch.strategy import Options, Strategy, make_config
from flexsearch.strategy.baselines import Seconds, baseline
from flexsearch.strategy.depth import balance
from flexsearch.strategy.stage_modules import stage_modules
from flexsearch.topology import Topology
from flexsearch.zoo.base import ZooModel, build
from flexsearch.zoo.transformer import GPT2, token_loss
from tests.exported import layout

BUCKETS_MIB: Final = (1, 25, 100)
"""Of DistributedDataParallel; 25 is its default."""


@dataclass(frozen=True)
class Model:
    """``target``: "module:callable", called with ``batch`` and ``arguments``. ``norms``: it has batch normalisation,
    which PyTorch's data parallelism runs over the samples of each rank, and which has no microbatches."""

    target: str
    batch: int
    arguments: Mapping[str, Any] = field(default_factory=dict)
    norms: bool = False


MODELS: Final[Mapping[str, Model]] = {
    "alexnet": Model("benchmarks.layouts:alexnet", 32),
    "resnet50": Model("flexsearch.zoo:resnet50", 16, norms=True),
    "gpt2": Model("benchmarks.layouts:gpt2", 8),
    "llama": Model(
        "flexsearch.zoo:llama7b", 8, {"seq": 32, "layers": 8, "hidden": 128, "heads": 4, "ffn": 344, "vocab": 1000}
    ),
}


def alexnet(batch: int, device: str = "cpu") -> ZooModel:
    """AlexNet in a row of modules, which PyTorch's pipelines can cut anywhere."""
    made = zoo.alexnet(batch, device=device)
    parts: Any = made.model
    return made._replace(model=nn.Sequential(parts.features, parts.avgpool, nn.Flatten(1), parts.classifier))


class Embedding(nn.Module):
    """Tokens and positions of a GPT-2 as one module, which a stage of PyTorch's pipelines can hold."""

    position_ids: Tensor

    def __init__(self, model: GPT2) -> None:
        super().__init__()
        self.wte, self.wpe = model.wte, model.wpe
        self.register_buffer("position_ids", model.position_ids, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = self.wte(tokens) + self.wpe(self.position_ids[: tokens.shape[1]])
        return embedded


class Decoder(nn.Module):
    """A GPT-2 with output weights of its own: stages of PyTorch's pipelines share none."""

    def __init__(self, model: GPT2, hidden: int, vocab: int) -> None:
        super().__init__()
        self.embed, self.blocks, self.norm = Embedding(model), model.blocks, model.ln_f
        self.head = nn.Linear(hidden, vocab, bias=False)
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def gpt2(
    batch: int, seq: int = 64, layers: int = 8, hidden: int = 256, vocab: int = 4096, device: str = "cpu"
) -> ZooModel:
    """A GPT-2 of 8 layers that takes half a second a step on a core, on random tokens (batch, seq)."""
    return build(
        lambda: Decoder(GPT2(layers, hidden, 8, vocab, 1024), hidden, vocab),
        lambda: ((torch.randint(vocab, (batch, seq)),), torch.randint(vocab, (batch, seq))),
        token_loss, device,
    )  # fmt: skip


Build = Callable[[OperatorGraph, str, int, Seconds], Strategy]
"""Of a graph on a topology (file) of so many devices. Raises StrategyError where PyTorch's parts cannot."""
OPTIONS: Final = Options(optimizer="momentum")


def _data(bucket_mib: int) -> Build:
    options = OPTIONS.model_copy(update={"bucket_bytes": bucket_mib * 2**20})
    return lambda graph, topology, _ranks, _: baseline("data-parallel", graph, Topology.load(topology), options)


def _sharded(graph: OperatorGraph, topology: str, ranks: int, seconds: Seconds) -> Strategy:
    options = OPTIONS.model_copy(update={"reshard_after_forward": True})
    return baseline("fsdp", graph, Topology.load(topology), options)


def _tensor(graph: OperatorGraph, topology: str, ranks: int, seconds: Seconds) -> Strategy:
    strategy = layout(graph, 1, ranks, topology=topology, options=OPTIONS)
    convolutions = [i for i, op in enumerate(graph.operators) if op.kind == "conv2d"]
    for op in graph.operators[: 1 + max(convolutions, default=-1)]:  # parallelize_module splits linear layers alone
        strategy.configs[op.name] = make_config(op, {}, range(ranks))
    strategy.check(graph, strategy.cluster)
    return strategy


def _pipeline(schedule: str, each: int = 1) -> Build:
    def build_it(graph: OperatorGraph, topology: str, ranks: int, seconds: Seconds) -> Strategy:
        if any(op.kind == "batch_norm" for op in graph.operators):
            raise StrategyError("the model has batch normalisation, and so one microbatch", "Use another layout.")
        return layout(
            graph, 1, 1, borders(graph, ranks * each, seconds), ranks=ranks, topology=topology, schedule=schedule,
            microbatches=4, options=OPTIONS,
        )  # fmt: skip

    return build_it


LAYOUTS: Final[Mapping[str, Build]] = {
    **{f"ddp {size} MiB": _data(size) for size in BUCKETS_MIB}, "fsdp": _sharded, "tensor": _tensor,
    "gpipe": _pipeline("gpipe"), "1f1b": _pipeline("1f1b"), "interleaved-1f1b": _pipeline("interleaved-1f1b", 2),
    "zero-bubble": _pipeline("zero-bubble"),
}  # fmt: skip


def borders(graph: OperatorGraph, stages: int, seconds: Seconds) -> list[str]:
    """First operators of all stages but the first: where a model can be taken apart, so that stages take about equally
    long. Raises StrategyError if there are too few such places."""
    count = len(graph.operators)
    at = [0, *(i for i in range(1, count) if _can_cut(graph, i)), count]
    if len(at) - 1 < stages:
        raise StrategyError(f"stages: the model falls into {len(at) - 1} parts, not {stages}", "Use fewer stages.")
    loads = [sum(seconds(i, 0) for i in range(a, b)) for a, b in pairwise(at)]
    places = balance(loads, stages)
    return [graph.operators[at[k]].name for k in range(1, len(loads)) if places[k] != places[k - 1]]


def _can_cut(graph: OperatorGraph, i: int) -> bool:
    try:
        stage_modules(graph, [int(k >= i) for k in range(len(graph.operators))])
    except StrategyError:
        return False
    return True
