"""Delta simulation equals lowering and simulating the whole plan anew, to the bit, after every step of any walk."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from flexsearch import zoo
from flexsearch.cost import Costs
from flexsearch.cost.ticks import TICK
from flexsearch.graph import OperatorGraph
from flexsearch.graph.importer import import_model
from flexsearch.lower import Lowering
from flexsearch.search.space import Space
from flexsearch.simulate.delta import DeltaSimulator
from flexsearch.simulate.engine import Engine, Times
from flexsearch.strategy import OperatorConfig, Options, States, make_config
from flexsearch.strategy.baselines import baseline
from flexsearch.topology import Device, Link, Topology
from flexsearch.topology.changes import edited
from flexsearch.topology.parts import FORMS
from tests.proposals import propose
from tests.random_strategies import TYPES, strategies
from tests.test_baselines import Builder, cnn, mlp, transformer
from tests.test_spaces import deep as wide_layers

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
    """Hosts of different speeds on one bus of different links; ``sharing`` devices on each processor. Where
    moving bytes takes processor time, so does starting a communication, and computing slows links."""
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
    taken: dict[str, Any] = {"cpu_s": 1e4 * cpu_s_per_byte, "cpu_s_per_byte": cpu_s_per_byte}
    taken |= {"busy_factor": 1.6 if cpu_s_per_byte else 1.0, "pack_s_per_byte": 3 * cpu_s_per_byte}
    taken["tensor_by_form"] = {form: 1e3 * cpu_s_per_byte for form in FORMS}
    communication = preset.communication.model_copy(update=taken)
    fields = {f: getattr(preset, f) for f in Topology.model_fields}
    fields |= {"name": "uneven", "devices": tuple(Device(**dict(d)) for d in devices), "switches": ("bus",)}
    return Topology(**fields | {"links": links, "communication": communication})


def in_turns(topology: Topology, nbytes: int, busy: float = 1.0) -> Topology:
    """The topology with short turns on links, on which what moves gets on more slowly while devices compute."""
    changes = {"turn_bytes": nbytes, "busy_factor": busy}
    return edited(topology, communication=topology.communication.model_copy(update=changes))


TOPOLOGIES = {
    "two nodes of GPUs": lambda: in_turns(Topology.load("p100:2"), 1000),
    "slow hosts": lambda: in_turns(Topology.load("ethernet-1g-4"), 100, 1.5),
    "PCIe": lambda: Topology.load("k80:1"),
    "unequal devices on a bus": lambda: uneven(3, "half", 0.0, 1),
    "unequal hosts that move bytes by CPU": lambda: uneven(4, "full", 1e-9, 1),
    "shared processors": lambda: uneven(4, "full", 1e-9, 2),
}


def differences(new: Configs, old: Configs) -> dict[int, OperatorConfig]:
    return {i: a for i, (a, b) in enumerate(zip(new, old, strict=True)) if a != b}


def check_equal(simulator: DeltaSimulator, configs: Configs, seconds: float, options: Options) -> Any:
    """The proposal's time; returns starts and ends of the whole simulation."""
    rows = simulator.lowering.lower(configs, options).rows
    engine = Engine(rows.schedule, rows.machine)
    assert seconds == engine.run(rows.segments, rows.segment) * TICK
    return in_order(engine.times(rows.segments, rows.segment))


def in_order(times: Times) -> tuple[Any, Any]:
    """Start and end (ticks) of all rows, in the order of their identities."""
    ends = np.append(times.computation_first[1:], times.computation_start.shape[1]).astype(int)
    lasts = np.append(times.communication_first[1:], times.communication_start.shape[1]).astype(int)
    found = []
    for b, (end, last) in enumerate(zip(ends, lasts, strict=True)):
        computes, moves = slice(int(times.computation_first[b]), end), slice(int(times.communication_first[b]), last)
        found.append((times.computation_start[0, computes], times.computation_end[0, computes]))
        found.append((times.communication_start[0, moves], times.communication_end[0, moves]))
    start, end = (np.concatenate([row[k] for row in found]) for k in (0, 1))
    return start[end >= 0], end[end >= 0]


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
        begin, end = in_order(simulator.times())
        assert np.array_equal(begin, now[0]) and np.array_equal(end, now[1])
    return simulator


@pytest.mark.parametrize("name", TOPOLOGIES)
@pytest.mark.parametrize(
    "graph", [mlp(), cnn(), transformer(layers=1), normed, tied], ids=["mlp", "cnn", "transformer", "norm", "tied"]
)
@settings(derandomize=True, deadline=None, phases=(Phase.generate,), max_examples=2)
@given(
    seed=st.integers(0, 2**32 - 1), bucket=st.sampled_from([1, 3000, 25 * 2**20]),
    types=st.sampled_from(sorted(TYPES)),
)  # fmt: skip
def test_a_walk_of_proposals_is_simulated_as_the_whole_plans_are(
    graph: Any, name: str, seed: int, bucket: int, types: str
) -> None:
    made, options = graph if isinstance(graph, OperatorGraph) else graph(), Options(bucket_bytes=bucket, **TYPES[types])  # type: ignore[arg-type]
    walk(options.typed(made), TOPOLOGIES[name](), np.random.default_rng(seed), options, STEPS)


@settings(derandomize=True, deadline=None, phases=(Phase.generate,), max_examples=15)
@given(data=st.data(), graph=dags(), name=st.sampled_from(sorted(TOPOLOGIES)), seed=st.integers(0, 2**32 - 1))
def test_so_are_walks_over_random_graphs(data: Any, graph: OperatorGraph, name: str, seed: int) -> None:
    walk(graph, TOPOLOGIES[name](), np.random.default_rng(seed), Options(bucket_bytes=2000), STEPS)


@settings(derandomize=True, deadline=None, phases=(Phase.generate,), max_examples=15)
@given(data=st.data(), name=st.sampled_from(sorted(TOPOLOGIES)))
def test_so_is_any_legal_strategy(data: Any, name: str) -> None:
    graph, topology = data.draw(st.sampled_from([mlp(), cnn(), normed()])), TOPOLOGIES[name]()
    simulator, configs, options = None, (), Options(**TYPES[data.draw(st.sampled_from(sorted(TYPES)))])  # type: ignore[arg-type]
    graph = options.typed(graph)
    for _ in range(3):
        new = data.draw(strategies(graph, topology)).in_order(graph)
        if simulator is None:
            simulator = DeltaSimulator(graph, topology, Costs(graph, topology), options, new)
            check_equal(simulator, new, simulator.seconds, options)
        else:
            check_equal(simulator, new, simulator.propose(differences(new, configs)), options)
            simulator.accept()
        configs = new


@pytest.mark.parametrize("name", ["p100:1", "p100:2", "dgx-a100:1", "dgx-a100:2"])
def test_what_links_carry_at_least_is_known_before_there_are_rows(name: str) -> None:
    graph, topology = transformer(), Topology.load(name)
    space, rng = Space(graph, topology), np.random.default_rng(7)
    apart = baseline("data-parallel", graph, topology, Options()).in_order(graph)
    for configs in (apart, *(space.random_plan(rng) for _ in range(6))):
        for bucket in (1, 25 * 2**20):
            options = Options(bucket_bytes=bucket)
            simulator = DeltaSimulator(graph, topology, Costs(graph, topology), options, configs)
            least, carried = simulator.rows.state.load, simulator.engine.state.kept.total_carry
            assert (least <= carried).all()
            if configs is apart and bucket == 1:  # all gradients cross all links, each as a collective of its own
                assert (4 * least >= carried).all() and least.max() > 0


def test_of_what_carries_too_much_no_more_templates_are_made_than_show_it() -> None:
    graph, topology = transformer(), Topology.load("ethernet-1g-4")
    plain = tuple(make_config(op, {}, [0]) for op in graph.operators)
    simulator = DeltaSimulator(graph, topology, Costs(graph, topology), Options(), plain)
    operators = list(range(1, len(plain) - 1))
    numbers = [simulator.templates.config(i, make_config(graph.operators[i], {}, [i % 4])) for i in operators]
    reshards, counts = simulator.templates.tables.used.reshards, []
    for limit in (6e-4, 6e-4, float("inf")):  # more than any device computes, less than links carry
        simulator.attempt(operators, numbers, limit)
        counts.append(int(reshards[0]))
        simulator.reject()
    assert counts[0] == counts[1] < counts[2]


@pytest.mark.parametrize("name", ["two nodes of GPUs", "unequal hosts that move bytes by CPU"])
@pytest.mark.parametrize("seed", range(3))
def test_a_limit_changes_nothing_but_what_is_above_it(name: str, seed: int) -> None:
    graph, topology, rng = normed(), TOPOLOGIES[name](), np.random.default_rng(seed)
    space, costs, options = Space(graph, topology), Costs(graph, topology), Options()
    configs = space.random_plan(rng)
    whole, limited = (DeltaSimulator(graph, topology, costs, options, configs) for _ in range(2))
    late = 0
    for _ in range(60):
        new = differences(propose(rng, space, configs)[1], configs)
        seconds = whole.propose(new)
        limit = seconds * rng.choice([0.7, 0.98, 1.0, 1.1])
        numbers = [limited.templates.config(i, config) for i, config in new.items()]
        assert limited.attempt(list(new), numbers, limit) == (seconds if seconds <= limit else float("inf"))
        late += seconds > limit
        if seconds <= min(limit, 1.05 * whole.seconds):
            whole.accept()
            limited.accept()
            configs = whole.configs
        else:
            whole.reject()
            limited.reject()
    assert 20 < late < 40


def test_a_path_that_is_too_long_rejects_before_anything_is_run() -> None:
    graph, topology = mlp(), Topology.load("ethernet-1g-4")
    plain = tuple(make_config(op, {}, [0]) for op in graph.operators)
    simulator = DeltaSimulator(graph, topology, Costs(graph, topology), Options(), plain)
    middle = len(plain) // 2
    number = simulator.templates.config(middle, make_config(graph.operators[middle], {}, [1]))
    seconds, path = simulator.attempt([middle], [number]), simulator.engine.state.path
    simulator.reject()
    assert seconds > simulator.seconds
    for windows in (0, 1000):  # that earlier proposals ran
        path.windows[0] = windows
        assert simulator.attempt([middle], [number], simulator.seconds) == float("inf")
        assert (path.windows[0] == windows) == (windows > 0)
        simulator.reject()


def test_what_waits_for_another_connection_than_in_the_plan_at_hand_is_called_by_that_one() -> None:
    """Of the gathers of sharded weights one waits for the other. In a proposal both do so on other connections."""
    graph, topology = wide_layers(), Topology.load("ethernet-1g:4")
    plain, turned = (0, 1, 2, 3), (0, 1, 3, 2)
    columns, rows = {"b0": 2, "o": 2}, {"b0": 2, "i": 2}
    layers = [
        ({"o": 2}, (2, 1)), (rows, plain), (columns, turned), ({"o": 4}, plain), (columns, plain), (rows, plain),
        (columns, plain), (rows, plain),
    ]  # fmt: skip
    followers = [
        ({"b": 2}, (2, 1)), ({"a": 2}, turned), ({"a": 2, "b": 2}, turned), ({"b": 4}, plain),
        ({"a": 2, "b": 2}, plain), ({"a": 2}, plain), ({"a": 2, "b": 2}, plain), *[({"a": 2}, plain)] * 4,
    ]  # fmt: skip
    pairs = [row for both in zip(layers, followers, strict=False) for row in both] + followers[8:]
    configs = [make_config(op, *row) for op, row in zip(graph.operators, pairs, strict=True)]
    sharded = [i for i, (degrees, _) in enumerate(pairs) if degrees is columns]
    configs = [c.sharded(States.WEIGHTS) if i in sharded else c for i, c in enumerate(configs)]
    simulator = DeltaSimulator(graph, topology, Costs(graph, topology), Options(), tuple(configs))
    changes = {i: configs[i].on(turned) for i in (12, 13)}
    new = tuple(changes.get(i, config) for i, config in enumerate(configs))
    check_equal(simulator, new, simulator.propose(changes), Options())


def test_other_buckets_keep_the_plan_at_hand() -> None:
    graph, topology = cnn(), Topology.load("p100:1")
    space, rng = Space(graph, topology), np.random.default_rng(3)
    configs, new = space.random_plan(rng), space.random_plan(rng)
    simulator = DeltaSimulator(graph, topology, Costs(graph, topology), Options(), configs)
    for bucket in (1, 4096, 25 * 2**20, 4096, 1):  # also ones that were left with a proposal pending
        options = Options(bucket_bytes=bucket)
        simulator.use(options)
        check_equal(simulator, configs, simulator.seconds, options)
        check_equal(simulator, new, simulator.propose(differences(new, configs)), options)


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
    walk(graph, topology, np.random.default_rng(bucket), options, 16, plain)


@pytest.mark.parametrize("name", TOPOLOGIES)
@pytest.mark.parametrize("graph", [normed, tied], ids=["norm", "tied"])
def test_durations_are_whole_ticks_so_that_their_sums_are_exact(graph: Any, name: str) -> None:
    made, topology = graph(), TOPOLOGIES[name]()
    rng, space = np.random.default_rng(0), Space(made, topology)
    tasks = Lowering(made, topology, Costs(made, topology)).lower(space.random_plan(rng), Options()).tasks
    loads = [seconds for row in (*tasks.links, *tasks.drag) for _, seconds in row]
    for seconds in (np.array(tasks.duration), np.array(loads)):
        assert (np.rint(seconds / TICK) * TICK == seconds).all()
    shuffled = rng.permutation(tasks.duration)
    assert np.cumsum(shuffled)[-1] == np.cumsum(tasks.duration)[-1] < 2.0**53 * TICK  # up to there sums are exact


def test_the_check_can_fail() -> None:
    graph, topology, options = mlp(), Topology.load("p100:1"), Options()
    rng, space = np.random.default_rng(0), Space(graph, topology)
    configs, new = space.random_plan(rng), space.random_plan(rng)
    simulator = DeltaSimulator(graph, topology, Costs(graph, topology), options, configs)
    check_equal(simulator, new, simulator.propose(differences(new, configs)), options)
    simulator.templates.pools.entry_forward[:] += 10**9  # 1 ms: one tick more hides behind launches
    with pytest.raises(AssertionError):
        check_equal(simulator, new, simulator.propose(differences(new, configs)), options)
