"""Weights, gradients and optimizer states in parts: what is sent how often, and what is kept meanwhile."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from flexsearch.cost import Costs
from flexsearch.graph import OperatorGraph, volume
from flexsearch.lower import Lowered, Lowering, TaskKind
from flexsearch.lower.schedule import Stages
from flexsearch.simulate import memory
from flexsearch.simulate.delta import DeltaSimulator
from flexsearch.strategy import OperatorConfig, Options, States
from flexsearch.strategy.baselines import baseline
from flexsearch.topology import Communication, Link, Topology
from tests.memory_spans import spans_of
from tests.test_baselines import mlp, transformer
from tests.test_recompute import stack

DEVICES, MICROBATCHES = 4, 3


def plan(
    states: States, options: Options, graph: Any = None, kind: Any = "1f1b", microbatches: int = MICROBATCHES
) -> Lowered:
    """Data parallelism in microbatches, one stage."""
    graph, topology = graph or transformer(layers=1), Topology.load(f"p100:{DEVICES // 4}")
    configs = baseline("fsdp", graph, topology).in_order(graph)
    configs = tuple(replace(c, states=states if c.states else States.WHOLE) for c in configs)
    stages = Stages((0,), (tuple(range(DEVICES)),), microbatches, kind)
    return Lowering(graph, topology, Costs(graph, topology)).lower(configs, options, stages)


def sent(lowered: Lowered) -> Counter[str]:
    """Communications of a step by purpose, weights of a bucket one by one."""
    found = [c for c in lowered.tasks.communication if c is not None]
    return Counter(c.purpose for c in found for _ in c.members)


@pytest.mark.parametrize("reshard", [False, True])
def test_what_is_sent_once_a_step_and_what_for_every_microbatch(reshard: bool) -> None:
    options = Options(reshard_after_forward=reshard)
    once = {states: sent(plan(states, options, microbatches=1)) for states in States}
    for states in States:
        found, each = sent(plan(states, options)), once[states]
        assert found["synchronise"] == each["synchronise"] * (MICROBATCHES if states >= States.GRADIENTS else 1)
        again = reshard and states == States.WEIGHTS
        assert found["gather"] == each["gather"] * (MICROBATCHES if again else 1)
        assert (found["gather"] > 0) == (states > States.WHOLE)
        assert (found["regather"] > 0) == again and found["regather"] == each["regather"] * MICROBATCHES


@pytest.mark.parametrize("states", States)
def test_what_is_kept_from_one_microbatch_to_the_next_is_what_zero_counts(states: States) -> None:
    """Rajbhandari et al., SC 2020, figure 1: Adam with masters takes 16 bytes for each parameter, or 4 + 12 / n,
    2 + 14 / n, 16 / n where the optimizer's states, gradients and weights are in parts. Here a weight is stored in
    parts in all three cases, 2 / n, and is whole beside that from its gather, once a step, to its last use."""
    graph = stack(3)
    lowered = plan(states, Options(optimizer="adam", precision="bf16"), graph)
    schedule, end = lowered.rows.schedule, 4 * len(lowered.rows.schedule.kind) - 1
    elements, kept = sum(t.nbytes // t.itemsize for t in graph.of_kind("parameter")), Counter[str]()
    for span in spans_of(lowered):
        if span.device == 0:
            begins, ends = schedule.once[span.first // 4], schedule.once[span.last // 4]
            always = span.part in ("weights", "optimizer") and span.first == 0 and span.last == end
            summed = span.part == "gradients" and not begins and bool(ends)
            gathered = span.part == "gathered" and bool(begins) and not ends
            kept[span.part] += span.nbytes * (always or summed or gathered)
    parts = {"weights": 2, "gradients": 2, "optimizer": 12}
    levels = {"optimizer": States.OPTIMIZER, "gradients": States.GRADIENTS, "weights": States.OPTIMIZER}
    assert kept["gathered"] == pytest.approx(2 * elements * (states > States.WHOLE), rel=0.01)
    for part, nbytes in parts.items():
        whole = elements * nbytes / (len(lowered.devices) if states >= levels[part] else 1)
        assert kept[part] == pytest.approx(whole, rel=0.01), part


def slow_between_hosts() -> Topology:
    """Two hosts with two devices each, where bytes cost and messages do not."""
    topology = Topology.load("ethernet-1g:4")
    devices = tuple(d.model_copy(update={"host": f"host{k // 2}"}) for k, d in enumerate(topology.devices))
    links = [Link(a=d.name, b=d.host, bandwidth=1e9, latency_s=0.0) for d in devices]
    links.append(Link(a="host0", b="host1", bandwidth=1e7, latency_s=0.0))
    return Topology(
        name="slow between", devices=devices, switches=("host0", "host1"), links=tuple(links),
        communication=Communication(backend="gloo", overhead_s=0.0, message_s=0.0),
    )  # fmt: skip


@pytest.mark.parametrize("states", [states for states in States if states])
def test_hybrid_sharding_divides_by_the_devices_of_a_host_and_sums_up_across_hosts(states: States) -> None:
    """Zhao et al., VLDB 2023, section 3.2.2: gathers stay inside a host; gradients are reduce-scattered there, and
    equal parts all-reduced between hosts."""
    graph, topology = OperatorGraph.load("mlp"), slow_between_hosts()
    host, count = topology.host_size, len(topology.devices)
    configs = baseline("hsdp", graph, topology).in_order(graph)
    configs = tuple(config.sharded(states, host) if config.states else config for config in configs)
    lowered = Lowering(graph, topology, Costs(graph, topology)).lower(configs, Options(optimizer="adam"))
    held, elements = Counter[int](), 0
    for weight in lowered.weights:
        held.update({device: volume(box) for device, box, _ in weight.plan.storage})
        elements += volume(tuple((0, size) for size in graph.tensor[weight.tensor].shape))
        for exchange in weight.plan.forward[0].exchanges:
            assert len({device // host for device in exchange.devices}) == 1
    assert list(held.values()) == [pytest.approx(elements / host, rel=0.001)] * count
    largest = max(lowered.weights, key=lambda weight: volume(weight.plan.storage[0].box))
    assert largest.plan.sync is not None
    inside, across = largest.plan.sync.phase_exchanges
    assert [(x.form, x.devices) for x in inside] == [
        ("reduce_scatter", tuple(range(first, first + host))) for first in range(0, count, host)
    ]
    assert [(x.form, x.devices) for x in across] == [
        ("all_reduce", tuple(range(k, count, host))) for k in range(host)
    ]  # fmt: skip


def test_each_level_needs_less_memory() -> None:
    options = Options(optimizer="adam", reshard_after_forward=True, bucket_bytes=1)
    peaks = [max(m.peak for m in memory(plan(states, options, stack(3)))) for states in States]
    assert peaks == sorted(set(peaks), reverse=True)


@pytest.mark.parametrize("microbatches", [1, MICROBATCHES])
def test_what_reduce_scatters_read_does_not_wait_for_the_update(microbatches: int) -> None:
    """Each block's gradients are added before those of the next one are sent, so that more blocks take no more."""
    peaks = []
    for layers in (3, 6):
        graph, topology = stack(layers), Topology.load("hgx-h100:1")
        options = Options(bucket_bytes=1, recompute="full", reshard_after_forward=True)
        configs = baseline("fsdp", graph, topology).in_order(graph)
        stages = Stages((0,), (tuple(range(8)),), microbatches)
        spans = spans_of(Lowering(graph, topology, Costs(graph, topology)).lower(configs, options, stages))
        buffers = [s for s in spans if s.device == 0 and s.part == "buffers"]
        peaks.append(max(sum(t.nbytes for t in buffers if t.first <= s.first <= t.last) for s in buffers))
    assert peaks[0] == peaks[1] > 0


@pytest.mark.parametrize("kind", ["1f1b", "gpipe", "breadth-first"])
def test_the_update_comes_after_the_sums_of_all_microbatches(kind: Any) -> None:
    graph, topology = mlp(), Topology.load("p100:1")
    configs = baseline("fsdp", graph, topology).in_order(graph)
    cut = Stages((0,), (tuple(range(DEVICES)),), MICROBATCHES, kind)
    simulator = DeltaSimulator(graph, topology, Costs(graph, topology), Options(), configs, stages=cut)
    times, table = simulator.times(), simulator.rows.table
    updates = int(times.computation_first[-1])
    begin = times.computation_start[:, updates : updates + DEVICES]
    begin = begin[times.computation_end[:, updates : updates + DEVICES] > 0]
    ends = [
        times.communication_end[:, times.communication_first[b] : times.communication_first[b + 1]] for b in table.block
    ]
    assert len(begin) == DEVICES and begin.min() >= max(end.max() for end in ends if end.size)
    tasks = simulator.lowering.lower(configs, Options(), cut).tasks
    final = int(simulator.rows.schedule.final[0])
    for t, kind_of in enumerate(tasks.kind):
        if kind_of == TaskKind.UPDATE:
            waits = [k for k in tasks.dependencies[t] if tasks.communication[k] is not None]
            assert waits and {tasks.microbatch[k] for k in waits} == {final}


def test_weights_of_a_plan_may_differ_in_their_states() -> None:
    graph, topology = mlp(), Topology.load("p100:1")
    configs = list(baseline("fsdp", graph, topology).in_order(graph))
    weighted = [i for i, config in enumerate(configs) if config.states]
    configs[weighted[0]] = replace(configs[weighted[0]], states=States.OPTIMIZER)
    cut, options = Stages((0,), (tuple(range(DEVICES)),), MICROBATCHES), Options(reshard_after_forward=True)
    lowered = Lowering(graph, topology, Costs(graph, topology)).lower(configs, options, cut)
    gathers = Counter[str]()
    for what in lowered.tasks.communication:
        if what is not None and what.purpose in ("gather", "regather"):
            gathers.update(lowered.edges[member.key].tensor for member in what.members)
    mine = {name for name in graph.operators[weighted[0]].inputs if graph.tensor[name].kind == "parameter"}
    assert mine and {gathers[name] for name in mine} == {1}
    assert {count for name, count in gathers.items() if name not in mine} == {2 * MICROBATCHES}


@pytest.mark.parametrize("reshard", [False, True])
def test_a_walk_over_states_is_simulated_as_plans_made_anew(reshard: bool) -> None:
    graph, topology, rng = transformer(layers=1), Topology.load("p100:1"), np.random.default_rng(5)
    options = Options(optimizer="adam", bucket_bytes=4096, reshard_after_forward=reshard)
    half = len(graph.operators) // 2
    cut = Stages((0, half), ((0, 1), (2, 3)), 4)
    fsdp = baseline("fsdp", graph, topology).in_order(graph)

    def placed(i: int, config: OperatorConfig) -> OperatorConfig:
        degrees = tuple((axis, 2) for axis, _ in config.degrees)
        return replace(config, degrees=degrees, devices=cut.devices[int(i >= half)], replicas=1 if degrees else 2)

    configs = [placed(i, config) for i, config in enumerate(fsdp)]
    weighted = [i for i, config in enumerate(configs) if config.states]
    costs = Costs(graph, topology)
    simulator = DeltaSimulator(graph, topology, costs, options, configs, stages=cut)
    for _ in range(12):
        chosen = rng.choice(weighted, int(rng.integers(1, len(weighted))), replace=False).tolist()
        changes = {
            i: configs[i].sharded(States(rng.integers(len(States))), int(rng.choice([0, 2]))) for i in chosen
        }  # fmt: skip
        changes = {i: new for i, new in changes.items() if new != configs[i]}
        after = [changes.get(i, config) for i, config in enumerate(configs)]
        anew = DeltaSimulator(graph, topology, costs, options, after, stages=cut)
        assert simulator.propose(changes) == anew.seconds
        assert simulator.peaks().tolist() == anew.peaks().tolist()
        if rng.random() < 0.6:
            simulator.accept()
            configs = after
        else:
            simulator.reject()
