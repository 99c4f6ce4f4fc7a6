"""Branch and bound finds the optimum that trying every plan finds, and its bounds are below every plan."""

from __future__ import annotations

from itertools import permutations, product
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexsearch.cost import Costs
from flexsearch.errors import StrategyError
from flexsearch.graph import Operator, OperatorGraph
from flexsearch.lower import Lowering
from flexsearch.proof.bound import lower_bound
from flexsearch.proof.exhaustive import Step, exhaustive, search_order
from flexsearch.proof.relaxation import Relaxation
from flexsearch.proof.spaces import aligned_configs, every_config
from flexsearch.proof.symmetry import interchangeable, renamed
from flexsearch.search import Evaluator, search
from flexsearch.simulate import makespan, memory
from flexsearch.simulate.memory import Memory
from flexsearch.strategy import OperatorConfig, Options, States, Strategy, check_config, make_config
from flexsearch.topology import Topology
from tests.random_strategies import configs
from tests.test_baselines import Builder, ethernet, mlp, transformer, with_kernels, without_launching
from tests.test_bound import GRAPHS
from tests.test_delta import TOPOLOGIES, uneven
from tests.test_search import with_memory

SMALL = {
    "two hosts": lambda: Topology.load("ethernet-1g-2"),
    "three GPUs": lambda: Topology.load("p100:1").subset([0, 1, 2]),
    "unequal devices on a bus": lambda: uneven(3, "half", 0.0, 1),
    "unequal hosts that move bytes by CPU": lambda: uneven(2, "full", 1e-9, 1),
    "shared processors": lambda: uneven(3, "full", 1e-9, 2),
}


@st.composite
def small_graphs(draw: st.DrawFn) -> OperatorGraph:
    """Three or four operators, which read anything made before them."""
    b = Builder("small")
    size = draw(st.sampled_from([7, 64, 700]))
    known = [b.source("x", 8, size)]
    unread = set[str]()
    for k in range(draw(st.integers(1, 2))):
        picked = known[draw(st.integers(0, len(known) - 1))]
        made = b.linear(f"l{k}", picked, size) if draw(st.booleans()) else b.pointwise(f"p{k}", picked)
        unread = (unread - {picked}) | {made}
        known.append(made)
    last = b.pointwise("sum", *sorted(unread)) if len(unread) > 1 else unread.pop()
    return b.finish(b.linear("head", last, 12))


@settings(derandomize=True, deadline=None, max_examples=25)
@given(data=st.data(), graph=small_graphs(), name=st.sampled_from(sorted(SMALL)))
def test_it_finds_what_trying_all_plans_finds(data: Any, graph: OperatorGraph, name: str) -> None:
    topology = SMALL[name]()
    costs, options = Costs(graph, topology), Options(bucket_bytes=data.draw(st.sampled_from([1, 3000, 25 * 2**20])))
    each = {1: 500, 2: 25, 3: 10, 4: 6, 5: 4}[len(graph.operators)]
    every = every_config(graph, topology)
    rows = []
    for i in range(len(graph.operators)):
        row = every(i)
        rows.append([row[k] for k in data.draw(st.permutations(range(len(row))))[:each]])
    lowering = Lowering(graph, topology, costs)
    evaluate = Evaluator(graph, topology, costs, options)
    times = [evaluate(plan).time_s for plan in product(*rows)]
    found = exhaustive(Evaluator(graph, topology, costs, options), choices=rows.__getitem__, tolerance=0.0)
    assert found.complete and found.plans == len(times) and found.configs is not None
    assert found.time_s == makespan(lowering.lower(found.configs, options)) == min(times) == found.bound_s


@settings(derandomize=True, deadline=None, max_examples=3)
@given(graph=small_graphs(), kind=st.sampled_from(["two hosts", "three GPUs"]))
def test_renaming_equal_devices_makes_nothing_faster(graph: OperatorGraph, kind: str) -> None:
    topology = SMALL[kind]()
    costs = Costs(graph, topology)
    whole = exhaustive(Evaluator(graph, topology, costs, Options()), symmetry=False)
    half = exhaustive(Evaluator(graph, topology, costs, Options()))
    assert whole.complete and half.complete and half.nodes <= whole.nodes
    assert half.time_s == pytest.approx(whole.time_s, rel=1e-5)


@settings(derandomize=True, deadline=None, max_examples=30)
@given(data=st.data(), graph=st.sampled_from(sorted(GRAPHS)), name=st.sampled_from(sorted(TOPOLOGIES)))
def test_no_plan_is_faster_than_the_bound_of_any_part_of_it(data: Any, graph: str, name: str) -> None:
    made, topology = GRAPHS[graph](), TOPOLOGIES[name]()
    if len(topology.devices) > 4:
        topology = topology.subset(range(3))
    if len(made.operators) > 40:
        topology = ethernet(3)
    costs, options = Costs(made, topology), Options(bucket_bytes=data.draw(st.sampled_from([1, 3000, 25 * 2**20])))
    lowering = Lowering(made, topology, costs)
    rows = [[data.draw(configs(op, len(topology.devices))) for _ in range(2)] for op in made.operators]
    relaxation = Relaxation(lowering, options, rows)
    plan = [data.draw(st.integers(0, 1)) for _ in rows]
    seconds = makespan(lowering.lower([row[c] for row, c in zip(rows, plan, strict=True)], options))
    chosen = np.full(len(rows), -1, dtype=np.int64)
    before = 0.0
    for operator in search_order(made, costs):
        bound = relaxation.bounds(chosen, operator)[plan[operator]]
        chosen[operator] = plan[operator]
        now = relaxation.bound(chosen)
        assert bound <= seconds and now <= seconds
        before = max(before, bound, now)
    assert before > 0.0
    chosen[:] = -1
    for operator in data.draw(st.permutations(range(len(rows)))):  # in any order, though not as sharp
        assert relaxation.bound(chosen) <= seconds
        chosen[operator] = plan[operator]


def test_what_is_sent_behind_an_all_reduce_that_takes_turns_need_not_wait_for_its_end() -> None:
    """gloo: the exchange of ``second`` gets the link after the first turn of the all-reduce of 17 MB before it."""
    b = Builder("turns")
    x = b.source("x", 256, 2048)
    large, slow = b.linear("first", x, 16384), b.linear("second", x, 256)
    for k in range(3):
        slow = b.linear(f"slow{k}", slow, 256)
    short = b.pointwise("short", large)
    joined = b.add("join", "cat", "n (h), n (h-256) -> n h", [slow, short], [256, 16640], sizes={"h": 16640})
    graph, topology = b.finish(joined), ethernet(2)
    degrees = {"first": {"i": 2}, "short": {}, "second": {"o": 2}}
    plan = tuple(
        make_config(op, degrees.get(op.name, {op.axes_of("sample")[0]: 2}), (0, 1)) for op in graph.operators
    )
    evaluate = Evaluator(graph, topology, Costs(graph, topology), Options())
    relaxation = Relaxation(evaluate.lowering, Options(), [[config] for config in plan])
    forms = [c.form for c in evaluate.lower(plan).tasks.communication if c is not None and c.purpose == "forward"]
    assert forms[:2] == ["all_reduce", "all_to_all"]
    assert relaxation.bound(np.zeros(len(plan), dtype=np.int64)) <= evaluate(plan).time_s


def test_what_waits_in_line_for_its_connection_holds_up_nothing() -> None:
    """gloo: ``small`` goes to the same host as ``large``, behind it; ``both``, sent later, shares the link with it."""
    b, batch = Builder("line"), 8300
    x = b.source("x", batch, 128)
    large, small, tail = b.linear("large", x, 64), b.linear("small", x, 15), b.linear("both", x, 4)
    for k in range(12):
        tail = b.linear(f"tail{k}", tail, 128 if k < 11 else 64)
    parts = [tail, b.pointwise("short", large), b.pointwise("little", small)]
    joined = b.add("join", "cat", "n (h), n (h-64), n (h-128) -> n h", parts, [batch, 143], sizes={"h": 143})
    graph, topology = b.finish(joined), ethernet(2)

    def config(op: Operator) -> OperatorConfig:
        if op.name == "both" or op.name.startswith("tail"):
            return make_config(op, {"o": 2} if op.name == "both" else {op.axes_of("sample")[0]: 2}, (0, 1))
        return make_config(op, {}, (0,) if op.name in ("large", "small") else (1,))

    plan = tuple(map(config, graph.operators))
    evaluate = Evaluator(graph, topology, Costs(graph, topology), Options())
    relaxation = Relaxation(evaluate.lowering, Options(), [[one] for one in plan])
    bound = relaxation.bound(np.zeros(len(plan), dtype=np.int64))
    assert 0.95 * evaluate(plan).time_s < bound <= evaluate(plan).time_s


def test_without_contention_the_bound_of_a_whole_plan_is_its_time() -> None:
    """Where kernels take longer than messages and than launching them: bounds know nothing of waiting for hosts."""
    graph, topology = mlp(), with_kernels(without_launching(Topology.load("p100:1")), 100e-6)
    costs, rng = Costs(graph, topology), np.random.default_rng(0)
    lowering = Lowering(graph, topology, costs)
    rows = [aligned_configs(graph, topology)(i) for i in range(len(graph.operators))]
    relaxation, exact = Relaxation(lowering, Options(), rows), 0
    for _ in range(100):
        chosen = np.array([rng.integers(len(row)) for row in rows])
        seconds = makespan(lowering.lower([row[c] for row, c in zip(rows, chosen, strict=True)], Options()))
        exact += relaxation.bound(chosen) == pytest.approx(seconds, rel=1e-8)
    assert exact > 30


def test_where_all_wait_for_hosts_few_plans_are_looked_at() -> None:
    graph, topology = mlp(layers=2), Topology.load("p100:1").subset([0, 1])
    costs = Costs(graph, topology)
    best = exhaustive(Evaluator(graph, topology, costs, Options()), choices=aligned_configs(graph, topology))
    assert lower_bound(graph, topology, costs).decides == "launches"
    assert best.complete and best.nodes < best.plans / 100 and best.simulated < 50


def test_the_whole_space_has_every_legal_config_once() -> None:
    graph, count = mlp(batch=4, width=3, layers=1), 3
    every = every_config(graph, ethernet(count))
    for i, op in enumerate(graph.operators):
        row = every(i)
        for config in row:
            check_config(op, config, count)
        assert len(set(row)) == len(row)
        weighted = any(graph.tensor[name].kind == "parameter" for name in op.inputs)
        expected = set()
        for degrees in product(*(range(1, min(count, op.sizes[a]) + 1) for a in op.splittable)):
            for used in range(1, count + 1):
                if used % prod(degrees) == 0:
                    for devices in permutations(range(count), used):
                        for states in ((States.WHOLE, States.WEIGHTS) if weighted and used > 1 else (States.WHOLE,)):
                            config = make_config(op, dict(zip(op.splittable, degrees, strict=True)), devices, states)
                            expected.add(renamed(config, {}))
        assert set(row) == expected


def test_aligned_configs_are_some_of_them() -> None:
    graph = mlp()
    for i in range(len(graph.operators)):
        aligned, every = aligned_configs(graph, ethernet(4))(i), set(every_config(graph, ethernet(4))(i))
        assert set(aligned) < every and len(set(aligned)) == len(aligned)


def test_it_is_never_slower_than_a_search_or_a_given_plan() -> None:
    graph, topology = mlp(batch=64, width=512, layers=2), ethernet(2)
    costs = Costs(graph, topology)
    found = search(graph, topology, costs, proposals=300)
    incumbent = tuple(found.strategy.configs[op.name] for op in graph.operators)
    best = exhaustive(Evaluator(graph, topology, costs, found.strategy.options), incumbent=incumbent)
    assert best.complete and best.time_s <= found.simulation.makespan_s
    assert best.bound_s == pytest.approx(best.time_s, rel=2e-6) and best.nodes < best.plans
    assert best.configs is not None
    Strategy.make(graph, topology, {op.name: c for op, c in zip(graph.operators, best.configs, strict=True)})


def test_a_search_that_is_cut_short_says_what_it_has_proved() -> None:
    graph, topology = transformer(layers=1), ethernet(2)
    costs = Costs(graph, topology)
    found = exhaustive(Evaluator(graph, topology, costs, Options()), max_nodes=300)
    assert not found.complete and "partial plans" in found.stopped
    assert 0.0 < found.bound_s < found.time_s and found.configs is not None
    timed = exhaustive(Evaluator(graph, topology, costs, Options()), budget_s=0.0)
    assert not timed.complete and "budget of 0 s" in timed.stopped and timed.bound_s <= timed.time_s


def test_an_interrupted_search_returns_its_best() -> None:
    def interrupt(step: Step) -> None:
        raise KeyboardInterrupt

    graph, topology = transformer(layers=1), ethernet(2)
    found = exhaustive(Evaluator(graph, topology, Costs(graph, topology), Options()), on_progress=interrupt)
    assert not found.complete and found.stopped == "interrupted" and found.configs is not None


def test_plans_that_do_not_fit_are_not_allowed() -> None:
    b = Builder("tiny")
    graph, roomy = b.finish(b.linear("fc", b.source("x", 64, 2048), 1024)), ethernet(2)
    costs = Costs(graph, roomy)
    best = exhaustive(Evaluator(graph, roomy, costs, Options()))
    assert best.configs is not None
    evaluate = Evaluator(graph, roomy, costs, Options())
    peak = max(m.peak for m in memory_of(evaluate, best.configs))
    tight = with_memory(roomy, peak - 1)
    other = exhaustive(Evaluator(graph, tight, costs, Options()))
    assert other.complete and other.time_s > best.time_s and other.configs is not None
    assert max(m.peak for m in memory_of(evaluate, other.configs)) < peak
    nothing = exhaustive(Evaluator(graph, with_memory(roomy, 1000), costs, Options()))
    assert nothing.complete and nothing.configs is None and nothing.time_s == nothing.bound_s == float("inf")


def memory_of(evaluate: Evaluator, plan: tuple[OperatorConfig, ...]) -> tuple[Memory, ...]:
    return memory(evaluate.lower(plan))


def test_lenet_on_two_hosts_is_proved_in_the_whole_space_and_on_four_in_that_of_blocks() -> None:
    graph = OperatorGraph.load("lenet")
    for topology, space, plans in ((ethernet(2), every_config, 1e14), (ethernet(4), aligned_configs, 1e19)):
        costs = Costs(graph, topology)
        found = exhaustive(Evaluator(graph, topology, costs, Options()), choices=space(graph, topology))
        assert found.complete and found.plans > plans and found.nodes < 1e6
        assert found.bound_s == pytest.approx(found.time_s, rel=2e-6)
        again = search(graph, topology, costs, proposals=200)
        if again.strategy.options == Options():
            assert again.simulation.makespan_s >= found.bound_s


@settings(derandomize=True, deadline=None, max_examples=15)
@given(data=st.data(), name=st.sampled_from(sorted(SMALL)))
def test_weights_that_two_operators_share_are_bounded_together(data: Any, name: str) -> None:
    topology, b = SMALL[name](), Builder("tied")
    x = b.linear("one", b.source("x", 8, 64), 64)
    x = b.add("two", "linear", "b i, o i, +o -> b o", [x, "one.weight", "one.bias"], [8, 64])
    graph = b.finish(x)
    costs, options = Costs(graph, topology), Options(bucket_bytes=data.draw(st.sampled_from([1, 25 * 2**20])))
    every, evaluate = every_config(graph, topology), Evaluator(graph, topology, costs, options)
    rows = []
    for i in range(len(graph.operators)):
        row = every(i)
        rows.append([row[k] for k in data.draw(st.permutations(range(len(row))))[:10]])
    best = min(evaluate(plan).time_s for plan in product(*rows))
    assert (
        exhaustive(Evaluator(graph, topology, costs, options), choices=rows.__getitem__, tolerance=0.0).time_s == best
    )


def test_an_operator_without_a_choice_is_an_error() -> None:
    graph = mlp()
    with pytest.raises(StrategyError, match=r"operator 'fc0' has no config"):
        exhaustive(Evaluator(graph, ethernet(2), Costs(graph, ethernet(2)), Options()), choices=lambda i: [])


def test_what_no_table_could_hold_is_an_error() -> None:
    graph = mlp()
    with pytest.raises(StrategyError, match=r"9 devices; an exhaustive search can take 8"):
        exhaustive(
            Evaluator(graph, ethernet(9), Costs(graph, ethernet(9)), Options()),
            choices=aligned_configs(graph, ethernet(9)),
        )
    with pytest.raises(StrategyError, match=r"configs to choose from; an exhaustive search can take 1000"):
        exhaustive(Evaluator(graph, ethernet(5), Costs(graph, ethernet(5)), Options()))


def test_devices_are_interchangeable_if_nothing_but_their_names_differs() -> None:
    nodes = Topology.load("p100:2")
    assert interchangeable(nodes, 0, 1) and not interchangeable(nodes, 0, 4)  # alone, 0 cannot leave its node
    pcie = Topology.load("k80:1")
    assert interchangeable(pcie, 0, 1) and not interchangeable(pcie, 1, 2)
    assert all(interchangeable(ethernet(4), a, b) for a in range(4) for b in range(a))
    assert not interchangeable(uneven(3, "full", 0.0, 1), 0, 1)
    assert not interchangeable(uneven(4, "full", 0.0, 2), 1, 2)
