"""Measured beside predicted: the peak of the bytes that a rank holds within a step.

These are the kinds of plan for which the two agree; docs/runtime.md says which do not, and by how much.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, nn

from flexsearch.cost import Costs
from flexsearch.graph import Tracing
from flexsearch.graph.importer import Imported, import_with_constants
from flexsearch.lower import lower_for_ranks
from flexsearch.runtime.parallel import distribute
from flexsearch.simulate.memory import memory, spans_of
from flexsearch.strategy import Strategy
from flexsearch.strategy.baselines import baseline
from flexsearch.strategy.model import StrategyFile
from flexsearch.topology import Topology
from tests.live_bytes import LiveBytes
from tests.ranks import pool
from tests.staged_plans import Deep, tokens_loss

BATCH, LENGTH, WIDTH = 8, 64, 64


def _batch() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    return Deep(width=WIDTH), torch.randint(7, (BATCH, LENGTH)), torch.randint(7, (BATCH, LENGTH))


@cache
def _imported() -> Imported:
    model, tokens, targets = _batch()
    return import_with_constants(model, (tokens,), tokens_loss, targets=targets, tracing=Tracing())


def _measured(imported: Imported, file: str) -> int:
    """Peak of the bytes that a step makes, in the second step."""
    model, tokens, targets = _batch()
    step = distribute(model, imported, Strategy.from_file(StrategyFile.model_validate_json(file)))
    engine = step.engine
    for _ in range(2):
        for weight in engine.weights.values():
            weight.grad = None
        there = [tokens, targets, *engine.weights.values(), *(t for _, t in engine.fixed.values())]
        with LiveBytes(there) as live:
            step(((tokens,), targets))
    return live.peak


def _predicted(imported: Imported, plan: Strategy) -> list[int]:
    """Peak by rank of all that is not there all the time."""
    lowered = lower_for_ranks(imported.graph, plan, plan.cluster, Costs(imported.graph, plan.cluster))
    peaks = [m.peak for m in memory(lowered)]
    spans = spans_of(lowered)
    end = max(span.last for span in spans)
    for span in spans:
        if (span.first, span.last) == (0, end):
            peaks[span.device] -= span.nbytes
    return peaks


@pytest.mark.parametrize(
    ("name", "error"),
    [("single", 0.05), ("data-parallel", 0.05), ("fsdp", 0.05), ("megatron", 0.06), ("pipeline", 0.11)],
)
def test_peak_within_a_step_is_near_the_predicted_one(name: str, error: float) -> None:
    imported = _imported()
    plan = baseline(name, imported.graph, Topology.load("ethernet-1g:2"))
    measured = pool(2).run(_measured, imported, plan.to_file().model_dump_json())
    assert measured == pytest.approx(_predicted(imported, plan), rel=error)
