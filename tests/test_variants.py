"""Predictions and a smaller last batch under random plans, whole and in stages: those of one device."""

from __future__ import annotations

import json
import os
import random
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from flexsearch.cost import Costs
from flexsearch.errors import FileFormatError
from flexsearch.graph import OperatorGraph
from flexsearch.graph.importer import Imported, import_forward, import_with_constants
from flexsearch.graph.model import Tracing
from flexsearch.lower import TaskKind, lower_for_ranks, refit_forward
from flexsearch.runtime.parallel import Parallel, distribute
from flexsearch.runtime.regions import everywhere
from flexsearch.runtime.retrace import Source
from flexsearch.runtime.stored import layouts_of
from flexsearch.strategy import Strategy, StrategyFile
from flexsearch.strategy.baselines import baseline
from flexsearch.topology import Topology
from tests.ranks import pool
from tests.staged_plans import deep, staged_plan, tokens_loss

CASES = int(os.environ.get("FLEXSEARCH_VARIANTS", "3"))
SIZES = (8, 7, 3)
SOURCE: list[Source] = []
"""Of the model, on this rank: what one plan has traced again need not be traced for the next."""


@cache
def imported() -> Imported:
    model, tokens, target = deep()
    return import_with_constants(model, tokens, tokens_loss, targets=target)


def stepped(file: str, traced: Imported) -> Parallel:
    model, tokens, target = deep()
    strategy = Strategy.from_file(StrategyFile.model_validate_json(file))
    step = distribute(model, traced, strategy, example=(tokens, target, tokens_loss))
    SOURCE[:] = SOURCE or [step.variants.traceable()]
    step.variants.source = SOURCE[0]
    return step


Answers = list[tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]]


def _answers(file: str, traced: Imported, whole: bool) -> tuple[Answers, list[tuple[int, int]], list[str]]:
    """By size of the batch: all predictions, this rank's own, the loss and the state after a step of gradient descent;
    the samples of this rank, and weights that lay elsewhere in a smaller batch."""
    step = stepped(file, traced)
    _, tokens, target = deep()
    before = step.state_dict()
    answers: Answers = []
    for size in SIZES:
        step.load_state_dict(before)
        low, high = (0, size) if whole else step.feed.range_of(step.rank, size)
        with step.evaluating():
            every = step.forward(tokens[low:high], samples=size, everything=True)
            own = step.forward(tokens[low:high], samples=size)
        step.context.step = 0
        for parameter in step.parameters():
            parameter.grad = None
        loss = step((tokens[low:high], target[low:high]), samples=size).loss
        torch.optim.SGD(step.parameters(), lr=1.0).step()
        answers.append((every, own, loss, step.state_dict()))
    moved = [name for variant in step.variants.steps.values() for name in variant._moved]
    return answers, [step.feed.range_of(step.rank, size) for size in SIZES], moved


@cache
def one_device() -> Answers:
    file = baseline("single", imported().graph, Topology.load("ethernet-1g:1")).to_file().model_dump_json()
    [(answers, _, _)] = pool(1).run(_answers, file, imported(), True)
    return answers


@pytest.mark.parametrize("seed", range(CASES))
def test_predictions_and_smaller_batches_are_those_of_one_device(seed: int) -> None:
    plan = staged_plan(imported().graph, random.Random(seed))
    file, ranks = plan.to_file().model_dump_json(), len(plan.cluster.devices)
    for answers, ranges, moved in pool(ranks).run(_answers, file, imported(), seed % 2 == 0):
        assert not moved  # weights stay where they are
        for (every, own, loss, state), (low, high), wanted in zip(answers, ranges, one_device(), strict=True):
            torch.testing.assert_close(every, wanted[0], rtol=1e-9, atol=1e-12)
            torch.testing.assert_close(own, wanted[0][low:high], rtol=1e-9, atol=1e-12)
            torch.testing.assert_close(loss, wanted[2], rtol=1e-9, atol=1e-12)
            for name, value in wanted[3].items():
                torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-11)


class Running(nn.Module):
    """Evaluates with what training counted and averaged, and with what never changes but by another state."""

    mean: Tensor
    calls: Tensor
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 6)
        self.register_buffer("mean", torch.ones(4))
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("scale", torch.full((4,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(x.mean(0), 0.5)
            self.calls += 1
            loss: Tensor = self.layer((x - x.mean(0)) * self.scale).square().mean()
            return loss
        made: Tensor = self.layer((x - self.mean.sin()) * self.scale.rsqrt())
        return made * torch.exp2(-self.calls)


def _evaluated(file: str, traced: Imported) -> list[Tensor]:
    """Predictions after a step, and after another state was loaded."""
    torch.manual_seed(0)
    model, x = Running().double(), torch.randn(4, 4, dtype=torch.float64)
    strategy = Strategy.from_file(StrategyFile.model_validate_json(file))
    step = distribute(model, traced, strategy, example=(x, None, None))
    step(x)
    model.load_state_dict(step.state_dict())
    expected, found = [], []
    for _ in range(2):
        with step.evaluating():
            found.append(step.forward(x, everything=True))
        expected.append(model.eval()(x).detach())
        step.load_state_dict({name: 2 * value + 1 for name, value in step.state_dict().items()})
        model.load_state_dict(step.state_dict())
    return [y - z for y, z in zip(expected, found, strict=True)]


def test_predictions_follow_buffers_that_training_changes_and_states_bring() -> None:
    traced = import_with_constants(Running().double(), torch.ones(4, 4, dtype=torch.float64))
    plan = baseline("megatron", traced.graph, Topology.load("ethernet-1g:2"))
    for differences in pool(2).run(_evaluated, plan.to_file().model_dump_json(), traced):
        assert all(float(difference.abs().max()) < 1e-12 for difference in differences)


def test_a_forward_pass_has_tasks_of_the_forward_pass_alone() -> None:
    """Its results are where they are wanted; the weights are stored where the plan has them."""
    model, tokens, _ = deep()
    traced, _ = import_forward(model.eval(), tokens, Tracing())
    graph, [output] = imported().graph, traced.outputs
    for seed in range(4):
        plan = staged_plan(graph, random.Random(seed))
        lowered = lower_for_ranks(graph, plan, plan.cluster, Costs(graph, plan.cluster))
        wanted = everywhere(traced.graph.tensor[output].shape, len(plan.cluster.devices))
        forward = refit_forward(lowered, traced.graph, {output: wanted})
        assert set(forward.tasks.kind) <= {TaskKind.FORWARD, TaskKind.COMMUNICATION}
        purposes = {what.purpose for what in forward.tasks.communication if what is not None}
        assert purposes <= {"gather", "forward"}
        assert forward.edges[forward.result_edges[output]].need == wanted
        assert {name: set(layout) for name, layout in layouts_of(forward).items()} == {
            name: set(layout) for name, layout in layouts_of(lowered).items()
        }


def test_a_graph_file_without_a_loss_is_refused(tmp_path: Path) -> None:
    document = imported().graph.model_dump(mode="json") | {"loss": "", "buffer_updates": {}}
    (tmp_path / "graph.json").write_text(json.dumps(document))
    with pytest.raises(FileFormatError, match="loss: it is empty"):
        OperatorGraph.load(tmp_path / "graph.json")
