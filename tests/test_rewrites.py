"""Rewrites of a rank's program: where they apply, and that the function stays the same."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, nn

from flexsearch.cost import Costs
from flexsearch.graph import OperatorGraph
from flexsearch.graph.importer import Imported, import_with_constants
from flexsearch.lower import lower_for_ranks
from flexsearch.runtime.parallel import distribute
from flexsearch.runtime.program import compile_program
from flexsearch.runtime.rewrites import CUTS, cut_dimension
from flexsearch.runtime.segment import cutting
from flexsearch.strategy import OperatorConfig, Strategy, StrategyFile
from flexsearch.strategy.baselines import baseline
from flexsearch.topology import Topology
from tests.exported import layout
from tests.ranks import pool
from tests.staged_plans import deep, tokens_loss

TWO = "ethernet-1g:2"


def _model() -> tuple[nn.Module, Tensor, Tensor]:
    """The second normalisation has its statistics read by nothing else, and no weights."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 6, 3),
        nn.BatchNorm2d(6, affine=False, track_running_stats=False), nn.Flatten(), nn.Linear(96, 5),
    ).double()  # fmt: skip
    return model, torch.randn(4, 3, 6, 6, dtype=torch.float64), torch.randint(5, (4,))


@cache
def _imported() -> Imported:
    model, x, targets = _model()
    return import_with_constants(model, (x,), nn.functional.cross_entropy, targets=targets)


def _by_channels(graph: OperatorGraph) -> Strategy:
    """Two devices share the channels of everything that has some."""
    topology = Topology.load(TWO)
    plan = baseline("data-parallel", graph, topology)
    for op in graph.operators:
        if op.kind in ("batch_statistics", "batch_norm", "batch_norm_running"):
            plan.configs[op.name] = OperatorConfig((("c", 2),), (0, 1))
    return plan


def _plan(name: str) -> Strategy:
    graph = _imported().graph
    if name == "channels":
        return _by_channels(graph)
    if name == "zero-bubble":
        return layout(graph, borders=["1.statistics"], ranks=2, topology=TWO, schedule=name)
    return baseline(name, graph, Topology.load("ethernet-1g:1" if name == "single" else TWO))


def _kinds(plan: Strategy) -> list[str]:
    lowered = lower_for_ranks(_imported().graph, plan, plan.cluster, Costs(_imported().graph, plan.cluster))
    return [call.kind for segment in compile_program(lowered, 0).segments for call in segment.calls]


@pytest.mark.parametrize(("name", "joined"), [("single", 2), ("channels", 2), ("data-parallel", 0)])
def test_batch_norms_are_computed_at_once_where_a_device_has_the_whole_batch(name: str, joined: int) -> None:
    kinds = _kinds(_plan(name))
    assert kinds.count("batch_norm_at_once") == joined
    assert kinds.count("batch_statistics") == kinds.count("batch_norm") == 2 - joined
    assert kinds.count("batch_norm_running") == (0 if name == "single" else 1)


def _sgd(weights: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(weights, lr=0.1)


def _trained(imported: Imported, file: str) -> tuple[float, dict[str, Tensor]]:
    """After two steps: the loss, and the state with running statistics."""
    model, x, targets = _model()
    step = distribute(model, imported, Strategy.from_file(StrategyFile.model_validate_json(file)), _sgd)
    losses = [step.step((x,), targets).item() for _ in range(2)]
    return losses[-1], step.state_dict()


@pytest.mark.parametrize("name", ["single", "channels", "data-parallel", "zero-bubble"])
def test_weights_and_running_statistics_are_those_of_one_device(name: str) -> None:
    model, x, targets = _model()
    optimizer = _sgd(list(model.parameters()))
    for _ in range(2):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    plan = _plan(name)
    for last, state in pool(len(plan.cluster.devices)).run(_trained, _imported(), plan.to_file().model_dump_json()):
        assert last == pytest.approx(loss.item(), rel=1e-12)
        for key, value in model.state_dict().items():
            torch.testing.assert_close(state[key], value, rtol=1e-9, atol=1e-12)


def test_parts_that_are_all_of_a_projection_are_cut_at_once() -> None:
    """Queries, keys and values of three layers."""
    model, tokens, targets = deep()
    graph = import_with_constants(model, (tokens,), tokens_loss, targets=targets).graph
    for name, devices in (("single", 1), ("data-parallel", 2)):
        plan = baseline(name, graph, Topology.load(f"ethernet-1g:{devices}"))
        lowered = lower_for_ranks(graph, plan, plan.cluster, Costs(graph, plan.cluster))
        calls = [call for segment in compile_program(lowered, 0).segments for call in segment.calls]
        assert sum(call.kind == CUTS for call in calls) == 3 and not any(call.kind == "slice" for call in calls), name


def test_gradients_of_parts_lie_as_the_tensor_that_was_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the view above it takes no copy, where that would take longer than the views."""
    monkeypatch.setattr("flexsearch.runtime.segment.LARGE_BYTES", 0)
    projected = torch.randn(4, 5, 12, requires_grad=True)
    whole = projected.view(4, 5, 3, 2, 2).permute(2, 0, 3, 1, 4)
    held = tuple((0, size) for size in whole.shape)
    parts = [(held, ((k, k + 1), *held[1:])) for k in (1, 0, 2)]
    made = cutting([lambda x: x.reshape(4, 2, 5, 2)] * 3, parts)(whole)
    assert all(torch.equal(part, whole[k]) for part, k in zip(made, (1, 0, 2), strict=True))
    gradients = torch.randn(3, 4, 2, 5, 2)
    (gradient,) = torch.autograd.grad(made, whole, [gradients[k] for k in (1, 0, 2)])
    assert torch.equal(gradient, gradients) and gradient.stride() == whole.stride()


def test_parts_that_overlap_or_leave_a_gap_are_cut_one_by_one() -> None:
    held = ((0, 6), (0, 2))
    for rows in (((0, 3), (2, 6)), ((0, 2), (3, 6)), ((0, 3), (3, 5))):
        assert cut_dimension([(held, (row, (0, 2))) for row in rows]) is None
    assert cut_dimension([(held, (row, (0, 2))) for row in ((4, 6), (0, 4))]) == 0
