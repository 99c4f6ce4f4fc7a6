"""Delta simulation equals lowering and simulating the whole plan anew, to the bit, after every step of any walk."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexsearch import zoo
from flexsearch.cost import Costs
from flexsearch.cost.ticks import EXACT_S, TICK
from flexsearch.graph import OperatorGraph
from flexsearch.graph.importer import import_model
from flexsearch.lower import Lowering
from flexsearch.lower.ceiling import Ceiling
from flexsearch.search.space import Space
from flexsearch.simulate.delta import DeltaSimulator
from flexsearch.simulate.kernel import times
from flexsearch.strategy import OperatorConfig, Options
from flexsearch.strategy.baselines import baseline
from flexsearch.topology import Device, Link, Topology
from tests.proposals import propose
from tests.random_strategies import strategies
from tests.test_baselines import Builder, cnn, mlp, transformer

Configs = tuple[OperatorConfig, ...]
STEPS = 12


@cache
def normed() -> OperatorGraph:
    """With batch normalisation: buffers that are replaced, statistics that two operators read."""
    made = zoo.resnet50(batch=8, size=32, width=4, blocks=(1, 1, 1, 1), classes=8, device="meta")
    return import_model(made.model, made.inputs, made.loss, targets=made.targets, batch_norm_groups=2)


@cache
def tied() -> OperatorGraph:
    """With a weight that several operators read, and one buffer of a layer that is used twice."""
    made = zoo.gpt2(batch=4, seq=8, layers=2, hidden=16, heads=2, vocab=32, device="meta")
    return import_model(made.model, made.inputs, made.loss, targets=made.targets)


@st.composite
def dags(draw: st.DrawFn) -> OperatorGraph:
    """Operators that read anything made before them; what nothing reads is added up at the end."""
    b = Builder("dag")
    known, unread = [b.source("x", 8, 16)], set()
    for k in range(draw(st.integers(2, 9))):
        picked = [known[draw(st.integers(0, len(known) - 1))] for _ in range(draw(st.integers(1, 3)))]
        made = b.pointwise(f"p{k}", *picked)
        if draw(st.booleans()):
            made = b.linear(f"l{k}", made, 16)
        unread = (unread - set(picked)) | {made}
        known.append(made)
    return b.finish(b.linear("head", b.pointwise("sum", *sorted(unread)), 12))


def uneven(count: int, duplex: str, cpu_s_per_byte: float, sharing: int) -> Topology:
    """Hosts of different speeds on one bus of different links; ``sharing`` devices on each processor."""
    preset = Topology.load("ethernet-1g-2")
    devices = tuple(
        preset.devices[0].model_copy(update={
            "name": f"d{k}", "host": f"h{k}", "processor": f"p{k // sharing}",
            "flops": {"float32": 1e10 * (1 + k)}, "overhead_s": 1e-6 * k,
        })
        for k in range(count)
    )  # fmt: skip
    links = tuple(
        Link(a=f"d{k}", b="bus", bandwidth=1e8 * (1 + k % 2), latency_s=1e-5 * (1 + k), duplex=duplex)  # type: ignore
        for k in range(count)
    )
    communication = preset.communication.model_copy(update={"cpu_s_per_byte": cpu_s_per_byte})
    fields = {f: getattr(preset, f) for f in Topology.model_fields}
    fields |= {"name": "uneven", "devices": tuple(Device(**dict(d)) for d in devices), "switches": ("bus",)}
    return Topology(**fields | {"links": links, "communication": communication})


TOPOLOGIES = {
    "two nodes of GPUs": lambda: Topology.load("p100:2"),
    "slow hosts": lambda: Topology.load("ethernet-1g-4"),
    "PCIe": lambda: Topology.load("k80:1"),
    "unequal devices on a bus": lambda: uneven(3, "half", 0.0, 1),
    "unequal hosts that move bytes by CPU": lambda: uneven(4, "full", 1e-9, 1),
    "shared processors": lambda: uneven(4, "full", 1e-9, 2),
}


def differences(new: Configs, old: Configs) -> dict[int, OperatorConfig]:
    return {i: a for i, (a, b) in enumerate(zip(new, old, strict=True)) if a != b}


def check_equal(simulator: DeltaSimulator, configs: Configs, seconds: float, options: Options) -> Any:
    """The proposal's time and memory bound; returns starts and ends of the whole simulation."""
    lowered = simulator.lowering.lower(configs, options)
    makespan, start, end = times(lowered.tasks.arrays())
    assert seconds == makespan
    assert (simulator.held == Ceiling(simulator.graph, simulator.topology, options)(lowered)).all()
    return start, end


def walk(
    graph: OperatorGraph, topology: Topology, rng: np.random.Generator, options: Options, steps: int,
    start: Configs | None = None,
) -> DeltaSimulator:  # fmt: skip
    """A walk of accepted and rejected proposals, compared with the whole after every step."""
    space = Space(graph, topology)
    configs = start or space.random_plan(rng)
    simulator = DeltaSimulator(graph, topology, Costs(graph, topology), options, configs)
    now = check_equal(simulator, configs, simulator.seconds, options)
    for _ in range(steps):
        new = space.random_plan(rng) if start is None and rng.random() < 0.1 else propose(rng, space, configs)[1]
        seconds = simulator.propose(differences(new, configs))
        found = check_equal(simulator, new, seconds, options)
        if rng.random() < 0.5:
            simulator.accept()
            configs, now = new, found
        else:
            simulator.reject()
        assert simulator.configs == configs
        begin, end = simulator.times()
        assert np.array_equal(begin, now[0]) and np.array_equal(end, now[1])
    return simulator


@pytest.mark.parametrize("name", TOPOLOGIES)
@pytest.mark.parametrize(
    "graph", [mlp(), cnn(), transformer(layers=1), normed, tied], ids=["mlp", "cnn", "transformer", "norm", "tied"]
)
@settings(derandomize=True, deadline=None, max_examples=4)
@given(seed=st.integers(0, 2**32 - 1), bucket=st.sampled_from([1, 3000, 25 * 2**20]))
def test_a_walk_of_proposals_is_simulated_as_the_whole_plans_are(graph: Any, name: str, seed: int, bucket: int) -> None:
    made = graph if isinstance(graph, OperatorGraph) else graph()
    walk(made, TOPOLOGIES[name](), np.random.default_rng(seed), Options(bucket_bytes=bucket), STEPS)


@settings(derandomize=True, deadline=None, max_examples=40)
@given(data=st.data(), graph=dags(), name=st.sampled_from(sorted(TOPOLOGIES)), seed=st.integers(0, 2**32 - 1))
def test_so_are_walks_over_random_graphs(data: Any, graph: OperatorGraph, name: str, seed: int) -> None:
    walk(graph, TOPOLOGIES[name](), np.random.default_rng(seed), Options(bucket_bytes=2000), STEPS)


@settings(derandomize=True, deadline=None, max_examples=40)
@given(data=st.data(), name=st.sampled_from(sorted(TOPOLOGIES)))
def test_so_is_any_legal_strategy(data: Any, name: str) -> None:
    graph, topology = data.draw(st.sampled_from([mlp(), cnn(), normed()])), TOPOLOGIES[name]()
    simulator, configs = None, ()
    for _ in range(3):
        strategy = data.draw(strategies(graph, topology))
        options, new = Options(), strategy.in_order(graph)
        if simulator is None:
            simulator = DeltaSimulator(graph, topology, Costs(graph, topology), options, new)
            check_equal(simulator, new, simulator.seconds, options)
        else:
            check_equal(simulator, new, simulator.propose(differences(new, configs)), options)
            simulator.accept()
        configs = new


def test_other_buckets_keep_the_plan_at_hand() -> None:
    graph, topology = cnn(), Topology.load("p100:1")
    space, rng = Space(graph, topology), np.random.default_rng(3)
    configs, new = space.random_plan(rng), space.random_plan(rng)
    simulator = DeltaSimulator(graph, topology, Costs(graph, topology), Options(), configs)
    for bucket in (1, 4096, 25 * 2**20):
        options = Options(bucket_bytes=bucket)
        simulator.use(options)
        assert simulator.seconds == times(simulator.lowering.lower(configs, options).tasks.arrays())[0]
        check_equal(simulator, new, simulator.propose(differences(new, configs)), options)


def test_room_for_task_graphs_grows() -> None:
    graph, topology, options = cnn(), uneven(4, "full", 1e-9, 2), Options(bucket_bytes=1)
    rng, space = np.random.default_rng(0), Space(graph, topology)
    configs, new = space.random_plan(rng), space.random_plan(rng)
    simulator = DeltaSimulator(graph, topology, Costs(graph, topology), options, configs, room=1)
    check_equal(simulator, new, simulator.propose(differences(new, configs)), options)
    assert len(simulator.tasks.duration) > 1


def test_only_what_was_just_proposed_can_be_accepted() -> None:
    graph, topology = mlp(), Topology.load("p100:1")
    rng, space = np.random.default_rng(0), Space(graph, topology)
    configs, new = space.random_plan(rng), space.random_plan(rng)
    simulator = DeltaSimulator(graph, topology, Costs(graph, topology), Options(), configs)
    for drop in (simulator.reject, simulator.times, lambda: None):
        simulator.propose(differences(new, simulator.configs))
        drop()
        if drop in (simulator.reject, simulator.times):
            with pytest.raises(RuntimeError, match="nothing has been proposed"):
                simulator.accept()
    simulator.accept()
    assert simulator.configs == new


def test_what_comes_before_a_change_is_not_simulated_again() -> None:
    graph, topology = mlp(layers=12), Topology.load("p100:1")
    configs = (OperatorConfig((), (0,), 1),) * len(graph.operators)
    simulator = DeltaSimulator(graph, topology, Costs(graph, topology), Options(), configs)
    last = len(graph.operators) - 2
    change = {last: OperatorConfig((), (1,), 1)}
    expected = simulator.propose(change)
    simulator.templates.pools.entry_forward_s[simulator.templates.pools.config_first[simulator.state.config[0]]] *= 2
    assert simulator.propose(change) == expected
    simulator.whole = False  # as if there were no checkpoints
    assert simulator.propose(change) > expected


@cache
def deep() -> OperatorGraph:
    """Many layers, which exchange statistics of their batch: ranks keep in step."""
    made = zoo.resnet50(batch=8, size=32, width=4, blocks=(2, 2, 2, 2), classes=8, device="meta")
    return import_model(made.model, made.inputs, made.loss, targets=made.targets)


@pytest.mark.parametrize("name", ["p100:1", "p100:2", "ethernet-1g-4"])
@pytest.mark.parametrize("bucket", [1, 30_000, 25 * 2**20])
def test_what_is_only_put_off_is_skipped_and_the_times_are_the_same(name: str, bucket: int) -> None:
    graph, topology, options = deep(), Topology.load(name), Options(bucket_bytes=bucket)
    plain = baseline("data-parallel", graph, topology, options).in_order(graph)
    simulator = walk(graph, topology, np.random.default_rng(bucket), options, 40, plain)
    assert simulator.work.skipped[0] > 20
    if name == "p100:1":  # exchanges that are sent out of the order of time are put in order
        assert simulator.written == 0
    elif name == "p100:2":  # those between nodes keep a card and links of several devices busy, and may pass others
        assert simulator.written < 8


@pytest.mark.parametrize("name", TOPOLOGIES)
@pytest.mark.parametrize("graph", [normed, tied], ids=["norm", "tied"])
def test_durations_are_whole_ticks_so_that_their_sums_are_exact(graph: Any, name: str) -> None:
    made, topology = graph(), TOPOLOGIES[name]()
    rng, space = np.random.default_rng(0), Space(made, topology)
    arrays = Lowering(made, topology, Costs(made, topology)).lower(space.random_plan(rng), Options()).tasks.arrays()
    for seconds in (arrays.duration, arrays.link_s, arrays.drag_s):
        assert (np.rint(seconds / TICK) * TICK == seconds).all()
    shuffled = rng.permutation(arrays.duration)
    assert np.cumsum(shuffled)[-1] == np.cumsum(arrays.duration)[-1] < EXACT_S


def test_a_plan_made_from_nothing_takes_as_long_as_one_that_was_proposed() -> None:
    graph, topology = tied(), Topology.load("p100:1")
    rng, space = np.random.default_rng(0), Space(graph, topology)
    first, second = space.random_plan(rng), space.random_plan(rng)
    simulator = DeltaSimulator(graph, topology, Costs(graph, topology), Options(), first)
    expected = simulator.propose(differences(second, first))
    assert simulator.from_nothing(dict(enumerate(second))) == expected
    assert simulator.configs == second


def test_where_ranks_keep_in_step_no_task_graph_is_written_down() -> None:
    graph, topology = mlp(), Topology.load("p100:1")
    space = Space(graph, topology)
    rng, configs = np.random.default_rng(0), space.random_plan(np.random.default_rng(1))
    simulator = DeltaSimulator(graph, topology, Costs(graph, topology), Options(), configs)
    for _ in range(50):
        simulator.propose(differences(propose(rng, space, configs)[1], configs))
    assert simulator.passes == 51 and simulator.written < 40


def test_the_check_can_fail() -> None:
    graph, topology, options = mlp(), Topology.load("p100:1"), Options()
    rng, space = np.random.default_rng(0), Space(graph, topology)
    configs, new = space.random_plan(rng), space.random_plan(rng)
    simulator = DeltaSimulator(graph, topology, Costs(graph, topology), options, configs)
    check_equal(simulator, new, simulator.propose(differences(new, configs)), options)
    simulator.templates.pools.entry_forward_s[:] *= 1 + 1e-12
    with pytest.raises(AssertionError):
        check_equal(simulator, new, simulator.propose(differences(new, configs)), options)
