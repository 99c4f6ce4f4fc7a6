"""Architectures that are in no library: imported whole, searched, and trained exactly under every plan."""

from __future__ import annotations

import pytest

from flexsearch.setting import Setting
from flexsearch.simulate import simulate
from flexsearch.strategy.baselines import baseline
from flexsearch.topology import Topology
from tests.own_models import DRAWING, MODELS, build
from tests.training import imported, product_flops, prove, prove_draws, torch_flops

pytestmark = pytest.mark.filterwarnings("ignore:use_cache")


SAMPLE = ("unet", "dlrm", "translator", "lstm", "queries", "adversarial", "mixture of experts")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every model with --all-models, else a sample."""
    if "model" in metafunc.fixturenames:
        every = metafunc.config.getoption("--all-models")
        metafunc.parametrize("model", MODELS if every else [name for name in MODELS if name in SAMPLE])


def test_every_plan_computes_what_plain_pytorch_computes(model: str) -> None:
    prove(build, model)


def test_weights_that_are_expanded_for_each_sample_are_split_with_the_batch() -> None:
    """With what is computed of them: replicas exchange gradients, and the loss, and nothing else."""
    graph, hosts = imported(build, "queries", False).graph, Topology.load("ethernet-1g:2")
    assert all("sample" in op.roles.values() for op in graph.operators if op.kind != "valid_count")
    lowered = Setting.of(graph, hosts).lower(baseline("data-parallel", graph, hosts))
    weights, loss = sum(t.nbytes for t in graph.of_kind("parameter")), graph.tensor[graph.loss].nbytes
    sent = 2 * (weights + loss)  # by each of two hosts, in an all-reduce
    assert int(simulate(lowered).link_bytes.sum()) <= 2 * sent + 64
    longer = graph.resized(6)
    assert all(op.sizes[axis] == 6 for op in longer.operators for axis in op.axes_of("sample"))


@pytest.mark.parametrize("name", DRAWING)
def test_random_draws_do_not_depend_on_the_plan(name: str) -> None:
    prove_draws(build, name)


@pytest.mark.parametrize("name", ["unet", "dlrm", "pointnet", "detector", "mixture of experts"])
def test_the_products_of_a_step_are_those_that_torch_counts(name: str) -> None:
    """Not of recurrent layers, which FlopCounterMode counts as nothing."""
    assert product_flops(imported(build, name, False).graph) == pytest.approx(torch_flops(build(name, False)), rel=0.05)
