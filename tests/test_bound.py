"""No plan is faster than the bound, and where the optimum is known the bound is that."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexsearch.cost import Costs
from flexsearch.errors import StrategyError
from flexsearch.graph import Operator, OperatorGraph, chunk, make_piece
from flexsearch.graph.batch import with_batch
from flexsearch.lower import Lowering, lower
from flexsearch.proof.bound import Bound, always_read, lower_bound, piece_extents
from flexsearch.search import search
from flexsearch.search.space import Space
from flexsearch.simulate import makespan
from flexsearch.strategy import OperatorConfig, Options, Strategy, make_config
from flexsearch.strategy.baselines import baselines
from flexsearch.strategy.shares import speeds
from flexsearch.strategy.stage import Stage
from flexsearch.topology import Topology
from tests.random_strategies import configs, strategies
from tests.staged_plans import hosts, staged_plan
from tests.test_baselines import Builder, cnn, ethernet, mlp, transformer
from tests.test_delta import TOPOLOGIES, dags, normed, tied, uneven

GRAPHS: dict[str, Callable[[], OperatorGraph]] = {
    "mlp": mlp, "cnn": cnn, "transformer": lambda: transformer(layers=1), "norm": normed, "tied": tied,
}  # fmt: skip


@cache
def bound_of(graph: str, topology: str) -> tuple[OperatorGraph, Topology, Costs, Bound]:
    made, on = GRAPHS[graph](), TOPOLOGIES[topology]()
    costs = Costs(made, on)
    return made, on, costs, lower_bound(made, on, costs)


@settings(derandomize=True, deadline=None, max_examples=80)
@given(data=st.data(), graph=st.sampled_from(sorted(GRAPHS)), topology=st.sampled_from(sorted(TOPOLOGIES)))
def test_no_random_plan_is_faster(data: Any, graph: str, topology: str) -> None:
    made, on, costs, bound = bound_of(graph, topology)
    strategy = data.draw(strategies(made, on, unequal=bool(speeds(on))))
    assert bound.seconds <= makespan(lower(made, strategy, on, costs))


@settings(derandomize=True, deadline=None, max_examples=60)
@given(data=st.data(), graph=dags(), topology=st.sampled_from(sorted(TOPOLOGIES)))
def test_nor_one_of_a_random_graph(data: Any, graph: OperatorGraph, topology: str) -> None:
    on = TOPOLOGIES[topology]()
    costs = Costs(graph, on)
    strategy = data.draw(strategies(graph, on, unequal=bool(speeds(on))))
    assert lower_bound(graph, on, costs).seconds <= makespan(lower(graph, strategy, on, costs))


@pytest.mark.parametrize("topology", sorted(TOPOLOGIES))
def test_nor_a_baseline_nor_a_plan_that_a_search_found(topology: str) -> None:
    for graph in GRAPHS:
        made, on, costs, bound = bound_of(graph, topology)
        for strategy in baselines(made, on).values():
            assert bound.seconds <= makespan(lower(made, strategy, on, costs))
    made, on, costs, bound = bound_of("mlp", topology)
    assert bound.seconds <= search(made, on, costs, proposals=100).simulation.makespan_s


def test_nor_is_a_plan_in_which_every_device_computes_everything() -> None:
    made, on, costs, bound = bound_of("mlp", "unequal devices on a bus")
    everyone = tuple(range(len(on.devices)))
    whole = {op.name: OperatorConfig((), everyone, len(everyone)) for op in made.operators}
    lowered = lower(made, Strategy.make(made, on, whole, Options()), on, costs)
    assert not any(lowered.tasks.communication) and bound.seconds <= makespan(lowered)


def test_plans_that_follow_each_other_are_not_faster_either() -> None:
    """Random plans whose operators follow a few leaders move little, and come closest to the bound."""
    for graph, topology in [("mlp", "unequal devices on a bus"), ("cnn", "two nodes of GPUs")]:
        made, on, costs, bound = bound_of(graph, topology)
        space, lowering, rng = Space(made, on), Lowering(made, on, costs), np.random.default_rng(0)
        for _ in range(150):
            assert bound.seconds <= makespan(lowering.lower(space.random_plan(rng), Options()))


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("graph", sorted(GRAPHS))
def test_on_one_device_it_is_the_iteration_time(graph: str, optimizer: Any) -> None:
    made, on = GRAPHS[graph](), ethernet(1)
    costs, options = Costs(made, on), Options(optimizer=optimizer)
    bound = lower_bound(made, on, costs, options)
    single = makespan(lower(made, baselines(made, on, options)["single"], on, costs))
    # Weights that are updated together start their kernels once each, as they do in the bound.
    assert bound.seconds == pytest.approx(single, rel=1e-6) and bound.decides == "work" and bound.devices == 1


def free(topology: Topology) -> Topology:
    """The same with links that take no time, and without any overhead."""
    fields = {f: getattr(topology, f) for f in Topology.model_fields}
    links = tuple(link.model_copy(update={"bandwidth": 1e15, "latency_s": 0.0}) for link in topology.links)
    devices = tuple(d.model_copy(update={"overhead_s": 0.0, "memory_bandwidth": 1e15}) for d in topology.devices)
    overheads = dict.fromkeys(("overhead_s", "message_s", "cpu_s", "cpu_s_per_byte"), 0.0)
    communication = topology.communication.model_copy(update=overheads)
    return Topology(**fields | {"links": links, "devices": devices, "communication": communication})


@pytest.mark.parametrize("devices", [2, 4])
def test_with_free_links_work_that_divides_evenly_takes_its_share_of_the_time(devices: int) -> None:
    graph, on = mlp(batch=16, width=32, classes=8), free(ethernet(devices))
    costs = Costs(graph, on)
    bound = lower_bound(graph, on, costs)
    plan = makespan(lower(graph, baselines(graph, on)["data-parallel"], on, costs))
    alone = makespan(lower(graph, baselines(graph, on)["single"], on, costs))
    # Whole ticks, and the fastest memory that a topology may have.
    assert bound.seconds == pytest.approx(plan, rel=1e-3) == pytest.approx(alone / devices, rel=1e-3)
    assert bound.devices == devices


def test_unequal_devices_share_the_work_by_their_speeds() -> None:
    graph, on = mlp(batch=60, width=32), free(uneven(3, "full", 0.0, 1))  # 1, 2 and 3 times as fast
    costs = Costs(graph, on)
    bound = lower_bound(graph, on, costs)
    slowest = makespan(lower(graph, baselines(graph, ethernet_like(on, 0))["single"], ethernet_like(on, 0),
                             Costs(graph, ethernet_like(on, 0))))  # fmt: skip
    assert bound.parts["work"] == pytest.approx(slowest / 6, rel=1e-3)


def ethernet_like(topology: Topology, device: int) -> Topology:
    return topology.subset([device])


def test_devices_that_share_a_processor_count_as_one() -> None:
    graph = mlp(width=64)
    alone, shared = (free(uneven(4, "full", 0.0, sharing)) for sharing in (1, 4))
    work = [lower_bound(graph, on, Costs(graph, on)).parts["work"] for on in (alone, shared)]
    assert work[1] == pytest.approx(work[0] * (1 + 2 + 3 + 4) / 4, rel=1e-3)  # the fastest of the four does it all


def test_a_chain_of_operators_that_cannot_be_split_is_bounded_by_its_path() -> None:
    b = Builder("chain")
    x = b.source("x", 1, 4096)
    for k in range(4):
        x = b.add(f"softmax{k}", "softmax", "b D -> b D", [x], [1, 4096])
    graph, on = b.finish(b.linear("out", x, 2)), free(ethernet(8))
    bound = lower_bound(graph, on, Costs(graph, on))
    assert bound.decides == "critical path" and bound.seconds == max(bound.parts.values())


def test_slower_devices_and_fewer_of_them_raise_it() -> None:
    graph = cnn()
    bounds = [lower_bound(graph, ethernet(n), Costs(graph, ethernet(n))).seconds for n in (8, 4, 2, 1)]
    assert bounds == sorted(bounds) and bounds[0] < bounds[-1]


@settings(derandomize=True, deadline=None, max_examples=80)
@given(data=st.data(), graph=st.sampled_from(sorted(GRAPHS)))
def test_every_piece_of_every_config_is_among_those_that_were_counted(data: Any, graph: str) -> None:
    made, count = GRAPHS[graph](), 6
    op: Operator = data.draw(st.sampled_from(made.operators))
    config = data.draw(configs(op, count, unequal=False))
    extents, parts, share = piece_extents(op, count)
    known = set(zip(*(column.tolist() for column in extents.values()), parts.tolist(), strict=True))
    total = 0.0
    shares = dict(zip(zip(*(c.tolist() for c in extents.values()), strict=True), share.tolist(), strict=True))
    for position in range(0, len(config.devices), config.replicas):
        piece = config.intervals(op, position)
        widths = tuple(piece[a][1] - piece[a][0] for a in extents)
        assert (*widths, config.parts) in known
        total += shares[widths]
    assert total == pytest.approx(1.0)


@settings(derandomize=True, deadline=None, max_examples=80)
@given(data=st.data(), graph=st.sampled_from(sorted(GRAPHS)), microbatches=st.integers(2, 4))
def test_the_extents_of_every_piece_of_every_microbatch_are_counted(data: Any, graph: str, microbatches: int) -> None:
    op: Operator = data.draw(st.sampled_from(GRAPHS[graph]().operators))
    samples = [a for a in op.splittable if op.roles[a] == "sample"]
    config = data.draw(configs(op, 6, unequal=False))
    extents, parts, _ = piece_extents(op, 6, microbatches)
    counted = set(zip(*(column.tolist() for column in extents.values()), parts.tolist(), strict=True))
    for number in range(microbatches):
        low = {a: chunk(op.sizes[a], microbatches, number) for a in samples if op.sizes[a] >= microbatches}
        sizes = op.sizes | {a: high - start for a, (start, high) in low.items()}
        if any(parts > sizes[a] for a, parts in config.degrees):
            continue  # not legal for so short a microbatch
        for part in product(*(range(config.degree(a)) for a in extents)):
            ends = [chunk(sizes[a], config.degree(a), k) for a, k in zip(extents, part, strict=True)]
            assert (*(high - start for start, high in ends), config.parts) in counted


@settings(derandomize=True, deadline=None, max_examples=30)
@given(
    data=st.data(), graph=st.sampled_from(["mlp", "cnn", "transformer"]), topology=st.sampled_from(sorted(TOPOLOGIES)),
    microbatches=st.integers(2, 4),
)  # fmt: skip
def test_microbatches_one_after_the_other_are_no_faster_than_the_bound(
    data: Any, graph: str, topology: str, microbatches: int
) -> None:
    one, on = GRAPHS[graph](), TOPOLOGIES[topology]()
    whole = with_batch(one, microbatches)
    bound = lower_bound(whole, on, Costs(whole, on), microbatches=microbatches)
    each = makespan(lower(one, data.draw(strategies(one, on, unequal=bool(speeds(on)))), on, Costs(one, on)))
    assert bound.seconds <= microbatches * each


def gpus(count: int) -> Topology:
    return Topology.load("dgx-a100").subset(range(count))


def norms(layers: int = 6) -> OperatorGraph:
    """A chain that only stages can share out: one sample, and each operator reads all of it."""
    b = Builder("norms")
    x = b.source("x", 1, 65536)
    for k in range(layers):
        x = b.norm(f"norm{k}", x)
    return b.finish(b.linear("out", x, 2))


@cache
def split_bound(graph: str, cluster: str, devices: int, count: int | None, options: Options) -> float:
    """Of plans with so many microbatches, whose backward passes may be split."""
    made, on = STAGED[graph](), CLUSTERS[cluster](devices)
    return lower_bound(made, on, Costs(made, on), options, count, split_backward=True).seconds


STAGED: dict[str, Callable[[], OperatorGraph]] = {
    "mlp": lambda: mlp(batch=16), "transformer": lambda: transformer(layers=1), "norms": cache(norms),
}  # fmt: skip
CLUSTERS: dict[str, Callable[[int], Topology]] = {
    "hosts": hosts, "GPUs": gpus, "free hosts": cache(lambda count: free(hosts(count))),
}  # fmt: skip


@pytest.mark.parametrize("cluster", sorted(CLUSTERS))
@pytest.mark.parametrize("graph", sorted(STAGED))
def test_no_plan_with_stages_and_microbatches_is_faster(graph: str, cluster: str) -> None:
    """With any schedule, states in parts, and what is computed or gathered again."""
    made, split, several = STAGED[graph](), 0, 0
    for number in range(40):
        plan = staged_plan(made, random.Random(number), cluster=CLUSTERS[cluster])
        on = CLUSTERS[cluster](len(plan.cluster.devices))
        seconds = makespan(lower(made, plan, on, Costs(made, on)))
        for count in (plan.microbatches, None):
            options = Options(optimizer=plan.options.optimizer, precision=plan.options.precision)
            assert split_bound(graph, cluster, len(on.devices), count, options) <= seconds, (number, count)
        split += plan.schedule.startswith(("zero", "dual"))
        several += plan.microbatches > 1 and len(plan.stages) > 1
    assert split > 3 and (several > 3 or graph == "norms")


def pipelines(graph: OperatorGraph, topology: Topology, costs: Costs) -> dict[int, float]:
    """Seconds of the fastest plan of two stages on a device each, in any schedule, by microbatches."""
    names, best = [op.name for op in graph.operators], dict[int, float]()
    for cut, order, count, schedule in product(
        range(1, len(names)), ((0, 1), (1, 0)), (1, 2, 4), ("gpipe", "1f1b", "zero-bubble")
    ):
        meshes = [order[:1], order[1:]]
        stages = [Stage(tuple(names[:cut]), meshes[0]), Stage(tuple(names[cut:]), meshes[1])]
        placed = {op.name: make_config(op, {}, meshes[k >= cut]) for k, op in enumerate(graph.operators)}
        with suppress(StrategyError):  # too few samples
            plan = Strategy.make(graph, topology, placed, stages=stages, microbatches=count, schedule=schedule)
            seconds = makespan(lower(graph, plan, topology, costs))
            best[count] = min(seconds, best.get(count, seconds))
    return best


@pytest.mark.parametrize("graph", ["mlp", "norms"])
def test_the_fastest_of_all_pipelines_is_not_faster(graph: str) -> None:
    made, topology = STAGED[graph](), free(hosts(2))
    costs = Costs(made, topology)
    for count, seconds in pipelines(made, topology, costs).items():
        bound = lower_bound(made, topology, costs, microbatches=count, split_backward=True)
        assert bound.seconds <= seconds
        if graph == "norms":
            assert bound.decides == "critical path" and bound.seconds > 0.9 * seconds


def test_the_check_can_fail() -> None:
    """A path of whole backward passes is longer than a plan that splits them."""
    graph, topology = norms(), free(hosts(2))
    costs = Costs(graph, topology)
    whole = lower_bound(graph, topology, costs)
    assert pipelines(graph, topology, costs)[1] < whole.seconds


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    data=st.data(), graph=st.sampled_from(sorted(GRAPHS)), microbatches=st.integers(1, 4),
    count=st.sampled_from((6, 200)),
)  # fmt: skip
def test_with_any_number_of_microbatches_a_row_stands_for_every_piece(
    data: Any, graph: str, microbatches: int, count: int
) -> None:
    op: Operator = data.draw(st.sampled_from(GRAPHS[graph]().operators))
    config = data.draw(configs(op, 6, unequal=False))
    extents, parts, share = piece_extents(op, count, None)
    rows = np.array(list(extents.values())).reshape(len(extents), -1)
    for k in range(len(config.devices)):
        piece = []
        for a, (begin, end) in config.intervals(op, k).items():
            low, high = chunk(end - begin, microbatches, 0) if op.roles[a] == "sample" else (0, end - begin)
            piece.append(max(1, high - low))
        own = np.prod([n / op.sizes[a] for a, n in zip(extents, piece, strict=True)])
        fits = (rows <= np.array(piece)[:, None]).all(axis=0) & (parts <= config.parts) & (share >= own * (1 - 1e-12))
        assert fits.any()


def test_every_microbatch_starts_its_operators_anew() -> None:
    graph, topology = mlp(), ethernet(1)
    costs = Costs(graph, topology)
    bounds = [lower_bound(graph, topology, costs, microbatches=count).seconds for count in (1, 2, 4)]
    assert bounds[0] < bounds[1] < bounds[2], "launching more, smaller pieces takes longer"


@settings(derandomize=True, deadline=None, max_examples=80)
@given(data=st.data(), graph=st.sampled_from(sorted(GRAPHS)))
def test_what_every_piece_is_said_to_read_every_piece_reads(data: Any, graph: str) -> None:
    made = GRAPHS[graph]()
    op: Operator = data.draw(st.sampled_from(made.operators))
    config = data.draw(configs(op, 6, unequal=False))
    shapes = [made.tensor[n].shape for n in op.inputs], [made.tensor[n].shape for n in op.outputs]
    pieces = [make_piece(op, config.intervals(op, k), *shapes) for k in range(len(config.devices))]
    for p, operand in enumerate(op.access.inputs):
        if always_read(op, operand, shapes[0][p]):
            assert all(piece.inputs[p] is not None for piece in pieces)


def test_a_concatenated_part_and_a_bias_of_partial_sums_are_not_read_by_every_piece() -> None:
    b = Builder("cat")
    x, y = b.source("x", 4, 6), b.source("y", 4, 6)
    b.add("cat", "cat", "n (h), n (h-6) -> n h", [x, y], [4, 12], sizes={"h": 12})
    b.linear("fc", "cat", 5)
    cat, linear = b.operators
    assert [always_read(cat, o, (4, 6)) for o in cat.access.inputs] == [False, False]
    assert [always_read(linear, o, s) for o, s in zip(linear.access.inputs, [(4, 12), (5, 12), (5,)], strict=True)] == [
        True, True, False,
    ]  # fmt: skip
    assert always_read(linear, linear.access.inputs[0], (4, 12)) and make_config(linear, {"i": 2}, (0, 1)).parts == 2
