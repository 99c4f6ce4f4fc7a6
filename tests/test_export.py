"""Exported plans: files of ordinary PyTorch train as one device does, flags say the layout, other plans are refused."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

from flexsearch.errors import StrategyError
from flexsearch.graph import OperatorGraph
from flexsearch.graph.importer import import_model
from flexsearch.report.export import megatron_flags, torch_file, torchtitan_flags
from flexsearch.strategy import Options, States, Strategy
from flexsearch.strategy.baselines import baseline
from flexsearch.strategy.native import native_plan
from flexsearch.topology import Topology
from tests.conftest import Cli
from tests.exported import alone, build, layout, train
from tests.ranks import pool

LLAMA = ("layers.1.input_norm", "layers.2.input_norm", "layers.3.input_norm")
FULL = Options(recompute="full")


@cache
def graph(name: str) -> OperatorGraph:
    model, inputs, targets, loss = build(name)
    return import_model(model, inputs, loss, targets=targets, name=name)


def plans() -> dict[str, tuple[str, Strategy, tuple[str, ...]]]:
    """By what they are: the model, the plan, and what its file must contain."""
    sharded = {"states": States.WEIGHTS, "options": FULL.model_copy(update={"reshard_after_forward": True})}
    llama, net = graph("llama"), graph("mlp")
    return {
        "data": ("lenet", layout(graph("lenet"), 4), ("DistributedDataParallel",)),
        "data, microbatches": ("mlp", layout(net, 4, microbatches=2), ("no_sync", "forward_backward")),
        "ZeRO-1": ("mlp", layout(net, 4, states=States.OPTIMIZER), ("ZeroRedundancyOptimizer",)),
        "ZeRO-3, microbatches": (
            "lenet", layout(graph("lenet"), 4, states=States.WEIGHTS, microbatches=2),
            ("fully_shard", "reshard_after_forward=False"),
        ),
        "tensor": ("mlp", layout(net, 1, 4), ("RowwiseParallel()", "ColwiseParallel()")),
        "data x tensor, tied weights": (
            "gpt2", layout(graph("gpt2"), 2, 2, microbatches=2),
            ("lm_head.weight = model.wte.weight", "divide_heads", '"shard"', "set_requires_gradient_sync"),
        ),
        "data x tensor, sharded, recomputed": (
            "llama", layout(llama, 2, 2, **sharded), ("checkpoint_wrapper", "reshard_after_forward=True"),
        ),
        "pipeline x data, 1F1B": (
            "llama", layout(llama, 2, 1, LLAMA[1:2], ranks=2, microbatches=4, **sharded), ("Schedule1F1B(",),
        ),
        "pipeline x tensor, interleaved": (
            "llama",
            layout(llama, 1, 2, LLAMA, ranks=2, schedule="interleaved-1f1b", microbatches=4, options=FULL),
            ("ScheduleInterleaved1F1B(", "HELD = ((0, 2), (1, 3))"),
        ),
        "pipeline, GPipe": (
            "mlp", layout(net, 2, 1, ["layers.fc2"], ranks=2, schedule="gpipe", microbatches=2), ("ScheduleGPipe(",),
        ),
        "pipeline, zero bubble": (
            "llama", layout(llama, 1, 1, LLAMA, ranks=4, schedule="zero-bubble", microbatches=4),
            ("ScheduleInterleavedZeroBubble(",),
        ),
    }  # fmt: skip


def test_exported_files_give_the_losses_and_weights_of_one_device() -> None:
    for what, (name, strategy, needed) in plans().items():
        text = torch_file(strategy, graph(name))
        assert all(part in text for part in needed), (what, text)
        losses, weights = alone(name)
        plan = native_plan(strategy, graph(name))
        answers = pool(4).run(train, name, text)
        told = {d: answers[d][0] for stage in plan.mesh for row in stage for d in row[:1] if answers[d][0]}
        assert len(told) == plan.data, what  # each replica has its own samples
        means = [sum(column) / plan.data for column in zip(*told.values(), strict=True)]
        assert means == pytest.approx(losses, rel=1e-9), what
        assert {key for _, errors in answers for key in errors} == weights.keys(), what
        assert max(error for _, errors in answers for error in errors.values()) < 1e-9, what


def test_an_exported_file_in_bf16_trains_near_the_model() -> None:
    strategy = layout(graph("llama"), 4, states=States.WEIGHTS, options=Options(precision="bf16"))
    answers = pool(4).run(train, "llama", torch_file(strategy, graph("llama")), torch.float32)
    losses, _ = alone("llama")
    assert sum(answer[0][0] for answer in answers) / 4 == pytest.approx(losses[0], rel=2e-2)
    assert max(error for _, errors in answers for error in errors.values()) < 5e-2
