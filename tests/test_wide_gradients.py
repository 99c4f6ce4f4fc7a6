"""Gradients of weights in float32 beside half precision: what ranks compute, send and hold."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache, partial
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flexsearch.graph.importer import Imported, import_with_constants
from flexsearch.runtime.engine import Engine
from flexsearch.runtime.instructions import Instruction
from flexsearch.runtime.live_bytes import LiveBytes
from flexsearch.runtime.parallel import Parallel, distribute
from flexsearch.strategy import States, Strategy, StrategyFile
from flexsearch.strategy.baselines import baseline
from tests.memory_spans import peaks_within_a_step
from tests.random_strategies import TYPES
from tests.ranks import cluster, pool
from tests.staged_plans import deep, staged_plan, tokens_loss


def _layers() -> tuple[nn.Module, Tensor, Tensor]:
    """Nearly all weights; its targets lie far off, so that samples' gradients point to one side."""
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(96, 96), nn.GELU())]
    return nn.Sequential(*layers), torch.randn(128, 96), torch.randn(128, 96) + 2.0


def _model(name: str) -> tuple[nn.Module, Tensor, Tensor, Any]:
    model, inputs, targets = _layers() if name == "layers" else deep()
    return model.float(), inputs, targets, nn.functional.mse_loss if name == "layers" else tokens_loss


@cache
def _imported(name: str) -> Imported:
    model, inputs, targets, loss = _model(name)
    return import_with_constants(model, (inputs,), loss, targets=targets)


def _distributed(name: str, imported: Imported, file: str) -> tuple[Parallel, Tensor, Tensor]:
    model, inputs, targets, _ = _model(name)
    return distribute(model, imported, Strategy.from_file(StrategyFile.model_validate_json(file))), inputs, targets


def _gradients(name: str, imported: Imported, file: str) -> dict[str, tuple[Tensor, tuple[slice, ...]]]:
    """By weight, what this rank stores of its gradient after one step, and where that lies."""
    parallel, inputs, targets = _distributed(name, imported, file)
    if parallel.strategy.options.gradients == "float32":
        parallel.engine.around = partial(_check_types, parallel.engine)
    parallel((inputs, targets))
    stored = parallel.stored
    return {
        n: (w.grad, tuple(slice(low, high) for low, high in stored.pieces(n)[0][0]))
        for n, w in stored.weights.items() if w.grad is not None
    }  # fmt: skip


def _check_types(engine: Engine, _: Instruction, action: Callable[[], None]) -> None:
    """Whatever holds gradients of weights between two instructions, whole or in parts, is in float32."""
    action()
    weights = {e for weight in engine.lowered.weights for e in weight.edges}
    for key, value in zip(engine.program.slots, engine._values, strict=True):
        name: Any = key.name
        of_weight = key.kind == "weight gradient" or (key.kind == "edge gradient" and name in weights)
        if of_weight or (key.kind in ("phase", "kept") and name[0].purpose == "synchronise"):
            assert value is None or value.dtype == torch.float32, key


def _of_one_device() -> dict[str, Tensor]:
    """Gradients of the layers in plain PyTorch."""
    model, inputs, targets, loss = _model("layers")
    loss(model.double()(inputs.double()), targets.double()).backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def _error(found: dict[str, tuple[Tensor, tuple[slice, ...]]], expected: dict[str, Tensor]) -> float:
    """Relative to the norm of each gradient, the largest."""
    errors = [float((g.double() - expected[n][at]).norm() / expected[n].norm()) for n, (g, at) in found.items()]
    return max(errors)


def _plan(name: str, which: str, ranks: int, types: str, microbatches: int = 1) -> Strategy:
    graph = _imported(name).graph
    plan = baseline("data-parallel" if which == "zero" else which, graph, cluster(ranks))
    configs = {n: c.sharded(States.OPTIMIZER) if which == "zero" else c for n, c in plan.configs.items()}
    plan = Strategy.make(graph, plan.cluster, configs, plan.options, microbatches=microbatches)
    plan.options = plan.options.model_copy(update=TYPES[types])
    return plan


def _in_bf16(gradients: dict[str, tuple[Tensor, tuple[slice, ...]]]) -> bool:
    """Whether all numbers are such of bfloat16."""
    return all(torch.equal(g, g.bfloat16().float()) for g, _ in gradients.values())


@pytest.mark.parametrize(
    ("which", "ranks", "microbatches"),
    [("data-parallel", 2, 1), ("fsdp", 2, 1), ("single", 1, 4), ("zero", 3, 4)],
)
def test_sums_over_ranks_and_microbatches_are_in_float32(which: str, ranks: int, microbatches: int) -> None:
    for types, narrow in (("half", True), ("wide", False)):
        plan = _plan("layers", which, ranks, types, microbatches)
        for found in pool(ranks).run(_gradients, "layers", _imported("layers"), plan.to_file().model_dump_json()):
            assert {g.dtype for g, _ in found.values()} == {torch.float32}
            # Those of one microbatch of one rank are numbers of bfloat16; their sums, seldom.
            assert _in_bf16(found) == narrow


def test_what_one_pass_makes_is_made_in_the_type_of_the_plan() -> None:
    found = [
        pool(1).run(
            _gradients, "layers", _imported("layers"), _plan("layers", "single", 1, t).to_file().model_dump_json()
        )[0]
        for t in ("half", "wide")
    ]  # fmt: skip
    assert _in_bf16(found[1]) and all(torch.equal(found[0][n][0], found[1][n][0]) for n in found[0])


def test_many_microbatches_add_up_more_exactly_in_float32() -> None:
    expected, errors = _of_one_device(), {}
    for types in ("half", "wide"):
        for count in (1, 128):
            file = _plan("layers", "single", 1, types, count).to_file().model_dump_json()
            errors[types, count] = _error(pool(1).run(_gradients, "layers", _imported("layers"), file)[0], expected)
    assert errors["wide", 128] < 1.5 * errors["wide", 1]
    assert errors["half", 128] > 2 * errors["wide", 128]


def test_any_plan_computes_what_one_device_does() -> None:
    imported = _imported("deep")
    single = baseline("single", imported.graph, cluster(1)).to_file().model_dump_json()
    expected = {n: g.double() for n, (g, _) in pool(1).run(_gradients, "deep", imported, single)[0].items()}
    plans = [staged_plan(imported.graph, random.Random(number), 0.3, cluster) for number in range(12)]
    assert sum(plan.microbatches > 1 for plan in plans) > 3
    for plan in plans:
        plan.options = plan.options.model_copy(update=TYPES["wide"] | {"recompute": plan.options.recompute})
        file = plan.to_file().model_dump_json()
        for found in pool(len(plan.cluster.devices)).run(_gradients, "deep", imported, file):
            assert {g.dtype for g, _ in found.values()} <= {torch.float32}
            assert not found or _error(found, expected) < 0.1, file[-3000:]


def _peak(name: str, imported: Imported, file: str) -> int:
    """Peak of the bytes that a second step makes."""
    parallel, inputs, targets = _distributed(name, imported, file)
    engine = parallel.engine
    for _ in range(2):
        for weight in engine.weights.values():
            weight.grad = None
        there = [inputs, targets, *engine.weights.values(), *(t for _, t in engine.fixed.values())]
        with LiveBytes(there) as live:
            parallel((inputs, targets))
    return int(live.peak)


@pytest.mark.parametrize(
    ("which", "ranks", "microbatches", "error"),
    [("single", 1, 4, 0.05), ("data-parallel", 2, 1, 0.001), ("fsdp", 2, 1, 0.001), ("fsdp", 2, 4, 0.01)],
)
def test_ranks_hold_what_the_account_says(which: str, ranks: int, microbatches: int, error: float) -> None:
    imported, plan = _imported("layers"), _plan("layers", which, ranks, "wide", microbatches)
    expected = peaks_within_a_step(imported.graph, plan)
    if which == "single":  # what operators read of weights, which goes before gradients are sent elsewhere
        expected[0] += 2 * sum(prod(tensor.shape) for tensor in imported.graph.of_kind("parameter"))
    measured = pool(ranks).run(_peak, "layers", imported, plan.to_file().model_dump_json())
    assert measured == pytest.approx(expected, rel=error)
