"""Orders of passes that a strategy holds: schedule "auto"."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from flexsearch.errors import FileFormatError, FlexsearchError
from flexsearch.graph import OperatorGraph
from flexsearch.lower.actions import actions, check_orders, read_order
from flexsearch.search.hybrid.order import listed
from flexsearch.setting import Setting
from flexsearch.simulate.staged import StagedSimulators, step_of
from flexsearch.strategy import OperatorConfig, Options, Strategy
from flexsearch.strategy.pipeline import Pipeline
from flexsearch.strategy.stage import ScheduleKind
from flexsearch.topology import Topology
from tests.test_baselines import mlp

UNEVEN = Pipeline(1, (0, 1, 3, 5), ((0,), (1,), (2,), (3,)), 8)
"""Four stages, the last of them short."""


def setting() -> tuple[OperatorGraph, Topology, list[OperatorConfig]]:
    graph = mlp(batch=8 * 512, width=1024)
    ends = [*UNEVEN.first[1:], len(graph.operators)]
    stages = [s for s, (first, end) in enumerate(zip(UNEVEN.first, ends, strict=True)) for _ in range(first, end)]
    return graph, Topology.load("p100:1"), [OperatorConfig((), (d,), 1) for d in stages]


@pytest.mark.parametrize("kind", [kind for kind in get_args(ScheduleKind) if kind != "gpipe"])
def test_named_schedules_are_orders_and_are_read_as_they_are_written(kind: ScheduleKind) -> None:
    held = [[0, 3], [1, 2]] if kind in ("zero-bubble-v", "dualpipe-v") else [[0], [1]]
    orders = actions(kind, held, 4)
    texts = [" ".join(map(str, row)) for row in orders]
    assert [list(read_order(text)) for text in texts] == orders
    if kind != "breadth-first":  # its last microbatch comes first in the backward pass
        check_orders(orders, held, 4)


@pytest.mark.parametrize(
    ("order", "says"),
    [
        ("0F0 0B0", "does not finish microbatch 1"),
        ("0F0 0F1 0B0 0B1 1F0", "1F0 is no action of this group"),
        ("0F0 0F1 0B0 0B1 0F2", "0F2 is no action"),
        ("0B0 0F0 0F1 0B1", "0B0 comes too early or too often"),
        ("0F0 0F0 0F1 0B0 0B1", "0F0 comes too early or too often"),
        ("0F0 0F1 0W0 0I0 0B1", "0W0 comes too early"),
        ("0F0 0F1 0B1 0B0", "0B1 comes before the gradients of other microbatches"),
        ("0F0 0F1 0I0 0I1 0W1 0W0", "0W1 comes before the gradients"),
    ],
)
def test_orders_that_miss_a_pass_or_mix_them_up_are_refused(order: str, says: str) -> None:
    with pytest.raises(FlexsearchError, match=says):
        check_orders([read_order(order)], [[0]], 2)


def test_devices_that_wait_for_each_other_are_refused() -> None:
    graph, topology, configs = setting()
    pipeline = Pipeline(1, (0, 3), ((0,), (1,)), 2, "zero-bubble", ("0F0 0B0 0F1 0B1", "1F1 1F0 1B0 1B1"))
    stages = [OperatorConfig((), (int(k >= 3),), 1) for k in range(len(configs))]
    with pytest.raises(FlexsearchError, match="waits forever"):
        StagedSimulators(graph, topology).simulator(pipeline, stages, Options())


def test_list_scheduling_pays_where_stages_are_uneven_and_the_file_keeps_its_order(tmp_path: Path) -> None:
    graph, topology, configs = setting()
    simulators = StagedSimulators(graph, topology)

    def seconds(pipeline: Pipeline) -> float:
        return simulators.simulator(pipeline, configs, Options()).seconds

    named = {kind: seconds(replace(UNEVEN, schedule=kind)) for kind in ("gpipe", "1f1b", "zero-bubble")}
    order = listed(simulators.simulator(UNEVEN, configs, Options()), UNEVEN)
    assert order is not None and seconds(order) < 0.9 * min(named.values())
    strategy = Strategy.make(
        graph, topology, dict(zip((op.name for op in graph.operators), configs, strict=True)),
        stages=order.stages(graph, 4), microbatches=8, schedule=order.schedule, orders=order.orders,
    )  # fmt: skip
    strategy.save(tmp_path / "plan.json")
    assert '"schedule": "auto"' in (tmp_path / "plan.json").read_text()
    loaded = Strategy.load(tmp_path / "plan.json")
    assert loaded == strategy
    step = Setting.of(graph, topology).step(loaded)
    assert step == step_of(simulators, simulators.simulator(order, configs, Options()))
    assert step.makespan_s == seconds(order)


def test_little_memory_holds_the_order_back() -> None:
    graph, topology, configs = setting()
    simulators = StagedSimulators(graph, topology)
    simulator = simulators.simulator(UNEVEN, configs, Options())
    most = max(simulator.peaks())
    memory = {"memory_bytes": int(most), "memory_fraction": 1.0}
    tight = topology.model_copy(update={"devices": tuple(d.model_copy(update=memory) for d in topology.devices)})
    limited = StagedSimulators(graph, tight)
    order = listed(limited.simulator(UNEVEN, configs, Options()), UNEVEN)
    ample = listed(simulator, UNEVEN)
    assert ample is not None
    assert order is not None
    held_back, free = limited.simulator(order, configs, Options()), simulators.simulator(ample, configs, Options())
    assert held_back.peaks().max() <= 1.02 * most < free.peaks().max() and held_back.seconds >= free.seconds


@pytest.mark.parametrize(("old", "new"), [('"auto"', '"1f1b"'), ('"orders"', '"order"'), ("0F0", "0X0"), ("0F0 ", "")])
def test_a_file_with_a_wrong_order_is_refused(tmp_path: Path, old: str, new: str) -> None:
    graph, topology, configs = setting()
    simulators = StagedSimulators(graph, topology)
    order = listed(simulators.simulator(UNEVEN, configs, Options()), UNEVEN)
    assert order is not None
    path = tmp_path / "plan.json"
    Strategy.make(
        graph, topology, dict(zip((op.name for op in graph.operators), configs, strict=True)),
        stages=order.stages(graph, 4), microbatches=8, schedule=order.schedule, orders=order.orders,
    ).save(path)  # fmt: skip
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises((FileFormatError, FlexsearchError), match=r"schedule|order"):
        Setting.of(graph, topology).step(Strategy.load(path))
