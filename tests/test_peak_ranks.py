"""Measured beside predicted: the peak of the bytes that a rank holds within a step.

These are the kinds of plan for which the two agree; docs/runtime.md says which do not, and by how much.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks import memory_peaks
from flexsearch.api import optimize
from flexsearch.cost import Costs
from flexsearch.errors import StrategyError
from flexsearch.graph import Tracing
from flexsearch.graph.importer import Imported, import_with_constants
from flexsearch.graph.ops.attention_narrow import narrow_attention
from flexsearch.graph.ops.loss_functions import ClassLosses
from flexsearch.graph.ops.zeros import backward_elements, forward_elements, parts_of
from flexsearch.lower import lower_for_ranks
from flexsearch.lower.actions import Action
from flexsearch.runtime.held import held_by
from flexsearch.runtime.live_bytes import LiveBytes
from flexsearch.runtime.parallel import distribute
from flexsearch.simulate import simulate
from flexsearch.simulate.memory import PARTS, memory, memory_curves
from flexsearch.strategy import Options, Strategy, make_config
from flexsearch.strategy.baselines import baseline
from flexsearch.strategy.files import StrategyFile
from flexsearch.strategy.stage import Stage
from flexsearch.topology import Topology
from flexsearch.topology.changes import with_memory
from tests.memory_spans import peaks_within_a_step
from tests.ranks import pool
from tests.staged_plans import Deep, tokens_loss

BATCH, LENGTH, WIDTH = 8, 64, 64


def _batch(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    if name == "mlp":  # nearly all weights
        layers = [layer for _ in range(6) for layer in (nn.Linear(128, 128), nn.GELU())]
        return nn.Sequential(*layers), torch.randn(16, 128), torch.randn(16, 128)
    return Deep(width=WIDTH), torch.randint(7, (BATCH, LENGTH)), torch.randint(7, (BATCH, LENGTH))


@cache
def _imported(name: str) -> Imported:
    model, inputs, targets = _batch(name)
    loss = nn.functional.mse_loss if name == "mlp" else tokens_loss
    return import_with_constants(model, (inputs,), loss, targets=targets, tracing=Tracing())


def _measured(name: str, imported: Imported, file: str) -> int:
    """Peak of the bytes that a step makes, in the second step."""
    model, tokens, targets = _batch(name)
    step = distribute(model, imported, Strategy.from_file(StrategyFile.model_validate_json(file)))
    engine = step.engine
    for _ in range(2):
        for weight in engine.weights.values():
            weight.grad = None
        there = [tokens, targets, *engine.weights.values(), *(t for _, t in engine.fixed.values())]
        with LiveBytes(there) as live:
            step(((tokens,), targets))
    return live.peak


@pytest.mark.parametrize(
    ("name", "error"),
    [("single", 0.02), ("data-parallel", 0.02), ("fsdp", 0.09), ("megatron", 0.08), ("placement", 0.08)],
)
def test_peak_within_a_step_is_near_the_predicted_one(name: str, error: float) -> None:
    imported = _imported("decoder")
    plan = baseline(name, imported.graph, Topology.load("ethernet-1g:2"))
    measured = pool(2).run(_measured, "decoder", imported, plan.to_file().model_dump_json())
    assert measured == pytest.approx(peaks_within_a_step(imported.graph, plan), rel=error)


@pytest.mark.parametrize(
    ("name", "number", "seed"),
    [
        ("decoder", 3, 0),  # heads of attention that move lie inside of positions
        ("decoder", 8, 0),  # values with fewer features than queries
        ("decoder", 10, 0),  # gradients in several layouts, received and added up
        ("decoder", 12, 0),  # halves of a backward pass that keep parts of values
        ("decoder", 9, 3),  # gradients of parts of a value, added in the memory of their sum
        ("decoder", 14, 4),  # two phases, of the first of which a part stays; operands that are put together in turn
        ("decoder", 18, 3),  # attention's kernel makes gradients that another replica is left to send
        ("decoder", 13, 3),  # what the first of two phases leaves, cut from all that is there
        ("mlp", 16, 0),  # weights gathered far ahead
        ("mlp", 2, 2),  # weights gathered again for each microbatch
        ("mlp", 18, 0),  # gradients kept in parts beside gradients that are kept whole
        ("mlp", 10, 3),  # a large gradient and a small one that go in one bucket
        ("decoder", 15, 2),  # a part of a gradient that is all that is left of it
        ("mlp", 2, 1),  # parts cut out of gradients of several weights, one by one
        ("mlp", 12, 4),  # gradients kept in parts: messages count when they are sent
        ("images", 0, 0),  # the last bucket of a microbatch
        ("images", 4, 6),  # a part of a gradient that stays, until what arrives is added to it
        ("images", 8, 2),  # what is sent is waited for; two phases put together where the block before runs elsewhere
        ("images", 12, 2),  # a part of a gradient is cut out behind the pass that makes it
        ("images", 16, 2),  # what a stage receives goes before its first pass computes
    ],
)
def test_ranks_of_random_plans_hold_what_is_predicted(name: str, number: int, seed: int) -> None:
    graph = memory_peaks.imported(name)
    for row in memory_peaks.peaks(name, number, graph, seed):
        assert row["ratio"] == pytest.approx(1, abs=memory_peaks.WITHIN), row["rank"]


def test_what_a_stage_receives_waits_for_the_pass_before_it() -> None:
    """The last stage sends gradients of the first microbatch before the middle stage has run the second one forward."""
    graph = memory_peaks.imported("mlp").graph
    cluster = Topology.load("ethernet-1g:3")
    names = [op.name for op in graph.operators]
    parts = names[:4], names[4:8], names[8:]
    stages = [Stage(tuple(part), (k,), 1) for k, part in enumerate(parts)]
    stage = {name: k for k, part in enumerate(parts) for name in part}
    whole = {op.name: make_config(op, {}, [stage[op.name]]) for op in graph.operators}
    plan = Strategy.make(graph, cluster, whole, stages=stages, microbatches=2, schedule="1f1b")
    lowered = lower_for_ranks(graph, plan, cluster, Costs(graph, cluster))
    tasks = lowered.tasks
    order = {
        (what.purpose, tasks.microbatch[t]): t
        for t, what in enumerate(tasks.communication) if what is not None and what.receivers == (1,)
    }  # fmt: skip
    second = [t for t, row in enumerate(tasks.action) if row == Action(1, "F", 1) and tasks.device[t] == 1]
    assert order["forward", 1] < min(second) <= max(second) < order["backward", 0]


def test_gradients_of_weights_come_behind_what_their_receivers_compute_before() -> None:
    """Of the last microbatch, too: its buckets have the identity of the first, as they are sent once a step."""
    graph = memory_peaks.imported("images").graph
    plan = memory_peaks.plan_of("images", graph, 15, 3)
    lowered = lower_for_ranks(graph, plan, plan.cluster, Costs(graph, plan.cluster))
    tasks, last, checked = lowered.tasks, lowered.stages.microbatches - 1, 0
    for t, what in enumerate(tasks.communication):
        if what is None or what.purpose != "synchronise":
            continue
        block = tasks.identity[t].block
        own = last if lowered.rows.schedule.last[block] else tasks.microbatch[t]
        before = [
            k for k, row in enumerate(tasks.identity)
            if tasks.device[k] in what.devices and row.microbatch == own and row.block <= block
        ]  # fmt: skip
        assert max(before) < t
        checked += bool(set(what.receivers) - set(what.senders))
    assert checked


def test_what_a_stage_reads_through_views_goes_with_them() -> None:
    """Queries, keys and values are views of what the stage is given. When attention has gone backward, so has that,
    though the stage's backward pass still puts their gradients together."""
    imported, cluster = _imported("decoder"), Topology.load("ethernet-1g:1")
    names = [op.name for op in imported.graph.operators]
    cut = names.index("layers.2.select")
    stages = [Stage(tuple(names[:cut]), (0,), 1), Stage(tuple(names[cut:]), (0,), 1)]
    configs = baseline("single", imported.graph, cluster).configs
    plan = Strategy.make(imported.graph, cluster, configs, stages=stages)
    (measured,) = pool(1).run(_measured, "decoder", imported, plan.to_file().model_dump_json())
    assert measured == pytest.approx(peaks_within_a_step(imported.graph, plan)[0], rel=0.02)


def test_what_each_microbatch_receives_is_counted_beside_weights_that_are_gathered_once() -> None:
    """The second stage begins with gathering its weights, once a step, before it receives anything. It holds what its
    backward passes read of all samples before the first of them, in however many microbatches they come."""
    graph, cluster = memory_peaks.imported("mlp").graph, Topology.load("ethernet-1g:3")
    names = [op.name for op in graph.operators]
    configs = {
        op.name: make_config(op, {}, [0]) if k < 4 else make_config(op, {next(iter(op.sizes)): 2}, [1, 2], True)
        for k, op in enumerate(graph.operators)
    }
    stages = [Stage(tuple(names[:4]), (0,), 1), Stage(tuple(names[4:]), (1, 2), 1)]
    most = []
    for count in (2, 4, 8):
        plan = Strategy.make(graph, cluster, configs, stages=stages, microbatches=count, schedule="gpipe")
        lowered = lower_for_ranks(graph, plan, cluster, Costs(graph, cluster))
        curve = memory_curves(lowered, simulate(lowered).times)[1]
        most.append(int(curve.use[PARTS.index("activations")].max()))
    assert len(set(most)) == 1
    assert most[0] >= 7 * (64 // 2 * 256 * 4)  # of 3 linear layers and 3 activations the operands, and of the loss


def test_gradients_of_a_later_microbatch_are_added_one_by_one() -> None:
    imported, cluster = _imported("mlp"), Topology.load("ethernet-1g:1")
    whole = baseline("single", imported.graph, cluster)
    plan = Strategy.make(imported.graph, cluster, whole.configs, microbatches=4)
    measured = pool(1).run(_measured, "mlp", imported, plan.to_file().model_dump_json())
    assert measured == pytest.approx(peaks_within_a_step(imported.graph, plan), rel=0.05)


def _read(imported: Imported, file: str) -> tuple[int, int]:
    """Peak as traces show it, and bytes of the batch."""
    model, inputs, targets = _batch("mlp")
    step = distribute(model, imported, Strategy.from_file(StrategyFile.model_validate_json(file)))

    def run() -> None:
        for weight in step.engine.weights.values():
            weight.grad = None
        step(((inputs,), targets))

    run()
    return max(row.most for row in held_by(step.engine, None, run)), inputs.nbytes + targets.nbytes


def test_traces_count_the_batch_once() -> None:
    imported = _imported("mlp")
    plan = baseline("single", imported.graph, Topology.load("ethernet-1g:1"), options=Options(optimizer="sgd"))
    ((measured, batch),) = pool(1).run(_read, imported, plan.to_file().model_dump_json())
    lowered = lower_for_ranks(imported.graph, plan, plan.cluster, Costs(imported.graph, plan.cluster))
    (predicted,) = memory(lowered)
    assert abs(measured - predicted.peak) < batch / 2


def test_a_sum_of_gradients_counts_as_autograd_makes_it_without_the_mode_that_counts() -> None:
    with torch.enable_grad():
        leaf = torch.ones(1000, requires_grad=True)
        value = leaf * 2
        total = (value * 3).sum() + (value * 5).sum() + (value * 7).sum()
    with LiveBytes(()) as live:
        torch.autograd.grad(total, leaf)
    assert 8000 <= live.peak < 12000  # the sum and one term


def test_values_with_fewer_features_are_kept_as_they_are() -> None:
    q, k, v = (torch.randn(2, 3, 16, features, requires_grad=True) for features in (8, 8, 4))
    with LiveBytes((q, k, v)) as live:
        out = narrow_attention(q, k, v, is_causal=True)
    assert live.live < out.nbytes + q.nbytes  # the output and a number for each row of scores, no zeros
    (expected,) = torch.autograd.grad(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).sum(), v)
    assert torch.allclose(torch.autograd.grad(out.sum(), v)[0], expected, atol=1e-6)


def test_zeros_behind_values_are_there_for_a_part_of_the_samples_at_a_time() -> None:
    q, k, v = (torch.randn(8, 8, 64, features, requires_grad=True) for features in (64, 64, 32))
    mask = torch.randn(8, 1, 64, 64)
    out = narrow_attention(q, k, v, mask)
    assert torch.allclose(out, nn.functional.scaled_dot_product_attention(q, k, v, mask), atol=1e-5)
    expected = torch.autograd.grad(nn.functional.scaled_dot_product_attention(q, k, v, mask).sum(), (q, k, v))
    with LiveBytes((q, k, v, out)) as live:
        gradients = torch.autograd.grad(out.sum(), (q, k, v))
    assert live.peak < 1.4 * sum(x.nbytes for x in gradients)  # zeros behind all values would take as much again
    for got, whole in zip(gradients, expected, strict=True):
        assert torch.allclose(got, whole, atol=1e-5)
    one = narrow_attention(q[:1], k[:1], v[:1], mask[:1])  # of one sample the heads
    assert torch.allclose(one, out[:1], atol=1e-5)


@pytest.mark.parametrize("samples", [1, 2, 8])
def test_zeros_behind_values_take_what_the_account_says(samples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    q, k, v = (torch.randn(samples, 8, 64, features, requires_grad=True) for features in (64, 64, 32))
    with LiveBytes((q, k, v)) as live:
        out = narrow_attention(q, k, v)
    parts, sizes = parts_of(q.nbytes), (q.numel(), k.numel(), out.numel())
    assert (parts > 1) == (samples == 8)
    expected = forward_elements(*sizes, parts) * q.element_size()
    assert live.peak - live.live == pytest.approx(expected, rel=0.05)
    given = torch.ones_like(out)
    with LiveBytes((q, k, v, out, given)) as live:
        gradients = torch.autograd.grad(out, (q, k, v), given)
    expected = backward_elements(*sizes, parts) * q.element_size()
    assert live.peak - sum(x.nbytes for x in gradients) == pytest.approx(expected, rel=0.05)


def test_cross_entropy_makes_one_gradient_as_large_as_the_scores() -> None:
    scores, target = torch.randn(64, 1000, requires_grad=True), torch.randint(1000, (64,))
    loss = ClassLosses.apply(scores, target, -100, torch.float32).sum()
    with LiveBytes((scores, target)) as live:
        (gradient,) = torch.autograd.grad(loss, scores)
    assert live.peak < 1.1 * scores.nbytes
    (expected,) = torch.autograd.grad(nn.functional.cross_entropy(scores, target, reduction="sum"), scores)
    assert torch.allclose(gradient, expected, atol=1e-6)


def _wide() -> tuple[nn.Module, Tensor, Tensor]:
    """A decoder that is nearly all weights."""
    torch.manual_seed(0)
    return Deep(width=256).double(), torch.randint(7, (4, 8)), torch.randint(7, (4, 8))


def _adam(weights: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(weights, lr=1e-3)


def _trained(imported: Imported, file: str) -> tuple[list[float], int]:
    """Losses of three steps with Adam, and the most bytes that this rank holds in the third, those that are there all
    the time included."""
    model, tokens, targets = _wide()
    step = distribute(model, imported, Strategy.from_file(StrategyFile.model_validate_json(file)), _adam)
    losses = [step.step((tokens,), targets).item() for _ in range(2)]
    with LiveBytes(()) as live:
        losses.append(step.step((tokens,), targets).item())
    engine, optimizer = step.engine, step.optimizer
    there: list[Tensor] = [tokens, targets, *engine.weights.values(), *(t for _, t in engine.fixed.values())]
    if optimizer is not None:
        there += [t for state in optimizer.state.values() for t in state.values() if t.dim()]
    return losses, live.peak + sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in there}.values())


def test_a_decoder_whose_states_fit_into_no_rank_trains_on_four() -> None:
    model, tokens, targets = _wide()
    imported = import_with_constants(model, (tokens,), tokens_loss, targets=targets, tracing=Tracing())
    options, weights = Options(optimizer="adam"), sum(tensor.nbytes for tensor in imported.graph.of_kind("parameter"))
    cap = 3 * weights  # weights, gradients and the two moments take 4
    with pytest.raises(StrategyError, match="memory"):
        one = with_memory(Topology.load("ethernet-1g:1"), nbytes=cap)
        optimize(imported.graph, topology=one, budget="5", options=options, processes=1)
    cluster = with_memory(Topology.load("ethernet-1g-4"), nbytes=cap)
    plan = optimize(imported.graph, topology=cluster, budget="200", options=options, processes=1)
    losses, held = zip(*pool(4).run(_trained, imported, plan.to_file().model_dump_json()), strict=True)
    assert max(held) <= cap
    single = baseline("single", imported.graph, Topology.load("ethernet-1g:1"), options=options)
    ((expected, alone),) = pool(1).run(_trained, imported, single.to_file().model_dump_json())
    assert alone > cap
    assert all(row == pytest.approx(expected, rel=1e-7) for row in losses)
