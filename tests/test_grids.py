"""Plans on a grid of model groups and batch groups."""

from __future__ import annotations

import pytest

from flexsearch import Topology, grid_plans
from flexsearch.graph import OperatorGraph
from flexsearch.grids import Inside
from flexsearch.setting import Setting

HOSTS = Setting.of(OperatorGraph.load("alexnet"), Topology.load("ethernet-1g:4"))
SHAPES = [(1, 4), (2, 2), (4, 1)]


@pytest.mark.parametrize("inside", ["megatron", "one-weird-trick"])
def test_the_ends_of_a_grid_are_the_baselines(inside: Inside) -> None:
    plans = grid_plans(HOSTS, inside)
    assert list(plans) == SHAPES
    for shape, name in (((1, 4), "data-parallel"), ((4, 1), inside)):
        assert HOSTS.name_of(plans[shape]) == name
        assert plans[shape].options == HOSTS.baseline(name).options


def test_a_mixed_grid_splits_features_within_groups_and_samples_between_them() -> None:
    plan = grid_plans(HOSTS)[2, 2]
    linear = next(op for op in HOSTS.graph.operators if op.name.endswith("fc7"))
    config = plan.configs[linear.name]
    samples, features = linear.axes_of("sample")[0], linear.axes_of("parameter")[0]
    rest = linear.axes_of("reduction")[0]
    assert config.degree(samples) == 2 and config.degree(features) * config.degree(rest) == 2
    groups = {tuple(sorted(d for k, d in enumerate(config.devices) if config.intervals(linear, k)[samples][0] == low))
              for low in (0, HOSTS.graph.batch // 2)}  # fmt: skip
    assert groups == {(0, 1), (2, 3)}


def test_grids_with_more_batch_groups_than_samples_are_left_out() -> None:
    small = Setting.of(HOSTS.graph.resized(2), HOSTS.topology)
    assert list(grid_plans(small)) == [(2, 2), (4, 1)]
