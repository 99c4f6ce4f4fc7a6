"""Microbatches are for losses that are sums over samples; where samples depend on each other they are refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexsearch.errors import NotationError, StrategyError
from flexsearch.graph import OperatorGraph, Tracing
from flexsearch.graph.importer import import_model, import_with_constants
from flexsearch.graph.samples import check_sum_over_samples
from flexsearch.lower.share import share_of
from flexsearch.topology import Topology
from tests.small_models import case


@pytest.mark.parametrize("name", ["alexnet", "bert", "llama_7b", "mixtral_8x7b", "nmt", "rnntc"])
def test_losses_of_sequences_and_images_are_sums_over_samples(name: str) -> None:
    check_sum_over_samples(OperatorGraph.load(name))


@pytest.mark.parametrize("running", [False, True])
def test_statistics_of_groups_of_samples_allow_no_microbatches(running: bool) -> None:
    """Two groups of 4 are not four groups of 2, even where no running statistics are kept."""
    norm = nn.BatchNorm2d(4, track_running_stats=running)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.Flatten(), nn.Linear(144, 5))
    targets = torch.zeros(8, dtype=torch.long)
    graph = import_model(model, (torch.randn(8, 3, 8, 8),), nn.CrossEntropyLoss(), targets=targets, batch_norm_groups=2)
    with pytest.raises(NotationError, match="statistics of groups of samples, which are smaller in a microbatch"):
        check_sum_over_samples(graph)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("towers", "'matmul' compares samples with each other"), ("lookups", "'add_3' reads a sum over all samples"),
        ("convolutions", "'norm.statistics' takes statistics of groups of samples"),
        ("statistics", "'std' reads a sum over all samples"),
    ],
)  # fmt: skip
def test_a_model_whose_samples_depend_on_each_other_has_no_microbatches(name: str, problem: str) -> None:
    made = case(name, "float64")
    tracing = Tracing(batch_norm_groups=made.groups)
    graph = import_with_constants(made.model, made.inputs, made.loss, targets=made.targets, tracing=tracing).graph
    with pytest.raises(StrategyError, match=problem):
        share_of(graph, Topology.load("ethernet-1g:2"), 1, graph.batch)


def test_a_loss_with_a_term_of_the_weights_alone_has_no_microbatches() -> None:
    layer = torch.nn.Linear(4, 3)

    def loss(scale: float) -> Callable[..., Tensor]:
        def total(out: Tensor, target: Tensor) -> Tensor:
            task = sum([2 * F.cross_entropy(out, target), layer.bias[0].exp() * 0.1 * out.square().mean() / 7])
            return task + scale * layer.weight.square().sum() if scale else task

        return total

    batch = torch.randn(6, 4), torch.zeros(6, dtype=torch.long)
    for scale in (0.0, 1e-3):
        graph = import_model(layer, batch[:1], loss(scale), targets=batch[1])
        if scale:
            with pytest.raises(NotationError, match="with a sum over all samples, and not as a sum would"):
                check_sum_over_samples(graph)
        else:
            check_sum_over_samples(graph)


class Slower(nn.Module):
    """Divides by the number of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return (self.linear(x) / self.calls).square().sum()


def test_a_buffer_that_each_step_changes_allows_no_microbatches() -> None:
    """Each would change it, and the next one would read what it has become."""
    with pytest.raises(NotationError, match="buffer 'calls' has a new value after each step"):
        check_sum_over_samples(import_model(Slower(), torch.ones(4, 8)))
