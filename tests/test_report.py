"""Reports: plans told in words, tables, traces that tell every task, and pictures."""

from __future__ import annotations

import io
import json
import math
import re
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from rich.console import Console

from flexsearch.cli import details
from flexsearch.cost import Costs
from flexsearch.graph import Axis, Operator, OperatorGraph
from flexsearch.graph.notation import instantiate
from flexsearch.graph.ops import forward_flops
from flexsearch.lower import Lowered, Lowering, TaskKind, lower
from flexsearch.report import (
    PlanRow,
    axis_word,
    chrome_trace,
    device_set,
    dominates,
    groups,
    in_words,
    plan_rows,
    plan_table,
    save_trace,
)  # fmt: skip
from flexsearch.report.plots import chains, plan_bars, scaling_curve, timeline
from flexsearch.report.summary import Group, layer_of, layer_range, lines, ranges, summarised, told_apart
from flexsearch.report.units import nbytes, percent, ratio, seconds
from flexsearch.report.words import treatment
from flexsearch.search import search
from flexsearch.search.space import Space
from flexsearch.simulate import simulate
from flexsearch.strategy import Options, States, make_config
from flexsearch.strategy.baselines import baseline
from flexsearch.topology import Topology
from tests.test_simulate import GraphMaker, convnet, mlp, plan, weird_trick


@pytest.fixture(scope="module")
def hosts() -> Topology:
    return Topology.load("ethernet-1g:4")


@pytest.fixture(scope="module")
def data_parallel(hosts: Topology) -> Lowered:
    return plan(convnet(), hosts, {})


@pytest.fixture(scope="module")
def trick(hosts: Topology) -> Lowered:
    return weird_trick(convnet(), hosts)


def costed(lowered: Lowered) -> Lowered:
    """The same plan with costs that tables know the errors of."""
    costs = Costs(lowered.graph, lowered.topology)
    return Lowering(lowered.graph, lowered.topology, costs).lower(lowered.configs, lowered.options)


@pytest.fixture(scope="module")
def rows(data_parallel: Lowered, trick: Lowered) -> list[PlanRow]:
    first, second = costed(data_parallel), costed(trick)
    return [
        PlanRow("data parallel", simulate(first), first),
        PlanRow("one weird trick", simulate(second), second, "by hand"),
    ]


def restless(name: str, share: float, seed: int, on: str = "p100:4", start: str = "megatron") -> Lowered:
    """A baseline with a share of the layers, and what follows them, at random."""
    graph, topology = OperatorGraph.load(name), Topology.load(on)
    space, rng = Space(graph, topology), np.random.default_rng(seed)
    configs = list(baseline(start, graph, topology).in_order(graph))
    for leader in space.groups:
        if rng.random() < share:
            for i, config in space.follow(leader, space.draw_simple(rng, leader)).items():
                configs[i] = config
    return Lowering(graph, topology, Costs(graph, topology)).lower(tuple(configs), Options())


# units


def is_brief(lowered: Lowered) -> None:
    """A plan takes at most ten printed lines, and no layer is told twice or left out."""
    told, graph = groups(lowered), lowered.graph
    assert 1 <= lines(told) <= 10, in_words(lowered)
    operators = [i for group in told for i in group.operators]
    assert len(operators) == len(set(operators)), "no operator is in two groups"
    weighted = {i for i, op in enumerate(graph.operators) if any(
        graph.tensor[n].kind == "parameter" for n in op.inputs
    )}  # fmt: skip
    assert weighted <= set(operators), "every operator with weights is in one"
    each = {i: treatment(graph, lowered.topology, op, lowered.configs[i]) for i, op in enumerate(graph.operators)}
    assert sorted(i for group in summarised(graph, each) for i in group.operators) == [*each]


@pytest.mark.parametrize("start", ["megatron", "fsdp"])
@pytest.mark.parametrize(("name", "on"), [
    ("nmt", "p100:4"), ("nmt", "p100:2"), ("bert", "p100:4"), ("inception_v3", "p100:4"), ("alexnet", "dgx-a100:2"),
])  # fmt: skip
@pytest.mark.parametrize("share", [0.0, 0.03, 0.3, 1.0])
def test_every_plan_is_told_in_ten_printed_lines(name: str, on: str, start: str, share: float) -> None:
    is_brief(restless(name, share, 1, on, start))


@pytest.mark.parametrize(("name", "on"), [("nmt", "p100:2"), ("inception_v3", "p100:4"), ("bert", "dgx-a100:2")])
def test_plans_of_a_search_are_told_in_ten_printed_lines(name: str, on: str) -> None:
    graph, topology = OperatorGraph.load(name), Topology.load(on)
    costs = Costs(graph, topology)
    result = search(graph, topology, costs, proposals=1500, seed=2, processes=1)
    is_brief(lower(graph, result.strategy, topology, costs))


def test_ten_lines_as_they_are_counted_are_ten_on_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    lowered, screen = restless("inception_v3", 0.3, seed=1), io.StringIO()
    monkeypatch.setattr(details, "stdout", Console(file=screen, width=80, highlight=False, markup=False))
    details.tell_plan(lowered)
    printed = screen.getvalue().splitlines()
    assert len(printed) == lines(groups(lowered)) <= 10 and max(map(len, printed)) <= 80


def test_layers_with_most_of_the_computing_are_told_where_there_is_too_much_to_tell() -> None:
    """Every layer of Inception-v3 in a way of its own, in words of two lines."""
    graph = OperatorGraph.load("inception_v3")
    way = {layer_of(graph, i): f"batch (2) over {'GPUs of a long name, ' * 4}{i}" for i in graph.index.values()}
    told = summarised(graph, {i: way[layer_of(graph, i)] for i in graph.index.values()})
    flops = [sum(forward_flops(op, op.sizes) for op in (graph.operators[i] for i in g.operators)) for g in told]
    by_layer = Counter[str]()
    for i, op in enumerate(graph.operators):
        by_layer[layer_of(graph, i)] += int(forward_flops(op, op.sizes))
    assert lines(told) in (9, 10) and sorted(flops[:-1]) == sorted(n for _, n in by_layer.most_common(len(told) - 1))
    share = re.fullmatch(r"\d+ other ways \((\d+) % of the computing\), mostly batch", told[-1].treatment)
    assert share is not None and abs(int(share[1]) - 100 * flops[-1] / sum(flops)) <= 1


def test_layers_of_a_block_keep_their_names_where_there_is_much_to_tell() -> None:
    graph, topology = OperatorGraph.load("bert"), Topology.load("p100:4")
    configs = list(baseline("megatron", graph, topology).in_order(graph))
    sorts = list(dict.fromkeys(re.sub(r"\d+", "*", op.name) for op in graph.operators if op.kind == "linear"))
    for i, op in enumerate(graph.operators):
        if op.kind == "linear":
            k = sorts.index(re.sub(r"\d+", "*", op.name))
            configs[i] = make_config(op, {}, range(16 - k))
    told = groups(Lowering(graph, topology, Costs(graph, topology)).lower(tuple(configs), Options()))
    names = [group.layers for group in told]
    assert {"layers.0-11.attn.k_proj", "layers.0-11.attn.v_proj", "layers.0-11.attn.out_proj"} <= set(names)
    assert len(set(names)) == len(names)


def test_what_most_of_the_computing_has_in_common_is_told_first() -> None:
    graph, topology = OperatorGraph.load("bert"), Topology.load("p100:4")
    configs = list(baseline("data-parallel", graph, topology).in_order(graph))
    odd = [i for i, op in enumerate(graph.operators) if re.search(r"layers\.(1|4|6|9)\.attn\.k_proj", op.name)]
    for i in odd:
        configs[i] = make_config(graph.operators[i], {}, range(4))
    told = groups(Lowering(graph, topology, Costs(graph, topology)).lower(tuple(configs), Options()))
    assert re.fullmatch(r"most layers \(9\d % of the computing\)", told[0].layers)
    assert told[0].treatment == "batch over the 8 GPUs of node0, node1"
    assert ("layers.1,4,6,9.attn.k_proj", "replicated on the 4 GPUs of node0") in [
        (g.layers, g.treatment) for g in told
    ]


def test_exceptions_among_many_steps_are_counted() -> None:
    told = groups(restless("nmt", 0.03, seed=1))
    assert any(re.search(r"hidden features over 16 GPUs.*\(\d of 80 otherwise\)", group.treatment) for group in told)


@pytest.mark.parametrize("every", [1, 50])
def test_slices_of_a_sequence_take_no_lines_from_layers(every: int) -> None:
    graph, topology = OperatorGraph.load("nmt"), Topology.load("p100:2")
    configs = list(baseline("data-parallel x layer-wise", graph, topology).in_order(graph))
    slices = [i for i, op in enumerate(graph.operators) if op.kind == "slice"]
    for k, i in enumerate(slices[::every]):
        configs[i] = make_config(graph.operators[i], {}, [k * k % 8])
    told = groups(Lowering(graph, topology, Costs(graph, topology)).lower(tuple(configs), Options()))
    *layers, other = told
    assert not any("slice" in group.layers for group in told)
    assert {"encoder.layers.0-1", "decoder.layers.0-1"} <= {group.layers for group in layers}
    assert (other.layers, set(slices) & set(other.operators)) == ("other layers", set(other.operators))
    assert re.fullmatch(r"\d+ other ways \(hardly any computing\)", other.treatment)


@pytest.mark.parametrize("others", [2, 30])
def test_a_part_of_the_model_that_is_treated_alike_is_told_by_its_name(others: int) -> None:
    graph, told = OperatorGraph.load("inception_v3"), dict[int, str]()
    for i, op in enumerate(graph.operators):
        told[i] = f"batch ({1 + i % others}) x channels (2) over 4 GPUs"
        if re.match(r"blocks\.(4\.deep|9|10)\b", op.module):
            told[i] = "height over 4 GPUs"
        elif re.match(r"blocks\.[67]\.(deep|branch7)\.\d+\.conv", op.module):
            told[i] = "channels over 4 GPUs"
    names = {group.treatment: group.layers for group in summarised(graph, told)}
    assert len(names) <= 10 and names["height over 4 GPUs"] == "blocks.4.deep, blocks.9-10"
    assert names["channels over 4 GPUs"] == "blocks.6-7.branch7.0-2.conv, blocks.6-7.deep.0-4.conv"
    rest = re.fullmatch(r"\d+ other ways \(\d+ % of the computing\), mostly batch x channels", [*names][-1])
    assert bool(rest) == (others == 30)


def test_figures_have_three_digits_and_a_unit() -> None:
    assert [seconds(t) for t in (3.6604, 0.71, 1.25e-5, 0.0, 123.4, 0.9996)] == [
        "3.66 s", "710 ms", "12.5 µs", "0 s", "123 s", "1.00 s",
    ]  # fmt: skip
    assert [nbytes(n) for n in (0, 12, 244_400_000, 1_200_000_000, 999_950)] == [
        "0 B", "12 B", "244 MB", "1.20 GB", "1.00 MB",
    ]  # fmt: skip
    assert (percent(0.714), ratio(5.154)) == ("71 %", "5.15x")
    assert ranges([6, 0, 1, 2, 3]) == "0-3,6"


# words


def test_parts_of_a_layer_that_are_treated_differently_are_told_apart() -> None:
    graph = OperatorGraph.load("nmt")
    attention = [i for i, op in enumerate(graph.operators) if op.module == "attention"]
    by_kind = {
        kind: tuple(i for i in attention if graph.operators[i].kind in kinds)
        for kind, kinds in {"einsum, softmax": ("einsum", "softmax"), "cat": ("cat",)}.items()
    }
    told = [Group("attention", f"way {k}", operators) for k, operators in enumerate(by_kind.values())]
    more = Group("head", "way 0", (len(graph.operators) - 1,))
    names = [group.layers for group in told_apart(graph, [*told, more])]
    assert names == ["attention (einsum, softmax)", "attention (cat)", "head"]


def test_steps_of_a_layer_and_layers_of_a_stack_that_lie_apart_have_names_of_their_own() -> None:
    """NMT with each layer on a GPU of its own, and the steps of its output layer on four."""
    graph, topology = OperatorGraph.load("nmt"), Topology.load("p100:4")
    modules = [op.module for op in graph.operators]
    place = {module: k for k, module in enumerate(sorted(set(modules) - {"head"}))}
    steps = [i for i, module in enumerate(modules) if module == "head"]
    place_of = {i: (12, 13, 13, 12, 14, 15)[k // 7] for k, i in enumerate(steps)}
    configs = [
        make_config(op, {}, [place.get(op.module, place_of.get(i, 0))]) for i, op in enumerate(graph.operators)
    ]  # fmt: skip
    told = groups(Lowering(graph, topology, Costs(graph, topology)).lower(tuple(configs), Options()))
    names = [group.layers for group in told]
    assert len(set(names)) == len(names) <= 10
    assert {"encoder.layers.0", "encoder.layers.1", "decoder.layers.0", "attention.combine"} <= set(names)
    assert "head (linear, steps 7-20)" in names
    assert any("head (linear, 14 of 40 steps from 0 on)" in name for name in names)


def test_layers_in_a_list_of_layers_are_no_list_themselves() -> None:
    assert layer_range(["branch.0", "branch.1"]) == "branch.0,1"
    assert layer_range(["features.conv1", "features.conv2"]) == "features.conv1, conv2"
    assert layer_range(["branch.0", "branch.1", "branch.2"]) == "branch.0..2"


def test_the_same_devices_in_another_order_are_told_apart() -> None:
    graph, cluster = mlp(), Topology.load("p100:2")
    op = graph.operators[0]
    natural = make_config(op, {"b0": 2, "o": 4}, range(8))
    other = natural.on([0, 4, 1, 5, 2, 6, 3, 7]).sharded(States.WEIGHTS)
    splits = "batch (2) x output features (4) over 8 GPUs on 2 hosts"
    assert treatment(graph, cluster, op, natural) == splits
    assert treatment(graph, cluster, op, other) == f"{splits} in the order 0,4,1,5,..., weights sharded"


def test_data_parallelism_is_one_sentence(data_parallel: Lowered) -> None:
    assert in_words(data_parallel) == "all layers: batch over 4 hosts"


def test_layers_with_the_same_treatment_are_told_together(trick: Lowered) -> None:
    words = in_words(trick)
    assert words.startswith(
        "features.conv1..conv5: batch over 4 hosts; classifier.fc6..fc8: output features over 4 hosts"
    )
    assert "relu" not in words


def test_every_operator_with_weights_is_in_exactly_one_group(trick: Lowered) -> None:
    told = [i for group in groups(trick) for i in group.operators]
    assert len(told) == len(set(told))
    weighted = {i for i, op in enumerate(trick.graph.operators) if op.kind in ("linear", "conv2d")}
    assert weighted <= set(told)


def test_splits_replicas_and_sharding_are_told(hosts: Topology) -> None:
    graph = mlp(widths=(64, 64, 64, 64, 64))
    degrees = {"fc0": {"b0": 2, "o": 2}, "fc1": {"i": 4}, "fc2": {"o": 2}, "fc3": {}, "fc4": {"b0": 4}}
    lowered = plan(graph, hosts, degrees, states=States.WEIGHTS)
    told = {graph.operators[g.operators[0]].name: g.treatment for g in groups(lowered)}
    assert told["fc0"] == "batch (2) x output features (2) over 4 hosts, weights sharded"
    assert told["fc1"] == "input features (partial sums) over 4 hosts, weights sharded"
    assert told["fc2"] == "output features (2) x replicated (2) over 4 hosts, weights sharded"
    assert told["fc3"] == "replicated on 4 hosts, weights sharded"
    assert told["fc4"] == "batch over 4 hosts, weights sharded"


def test_repeated_blocks_are_told_once(hosts: Topology) -> None:
    g = GraphMaker()
    x = g.tensor("x", (8, 64), "input")
    degrees = {}
    for k in range(6):
        for name, axis in (("up", "o"), ("down", "i")):
            x = g.linear(f"blocks.{k}.mlp.{name}", x, 64)
            degrees[f"blocks.{k}.mlp.{name}"] = {axis: 4}
    x = g.linear("head", x, 64)
    told = {group.layers: group.treatment for group in groups(plan(g.loss(x), hosts, degrees))}
    assert told["blocks.0-5.mlp.up"] == "output features over 4 hosts"
    assert told["blocks.0-5.mlp.down"] == "input features (partial sums) over 4 hosts"
    assert told["head"] == "batch over 4 hosts"


def test_device_sets_have_names() -> None:
    hosts, cluster = Topology.load("ethernet-1g:4"), Topology.load("p100")
    assert device_set(hosts, range(4)) == "4 hosts"
    assert device_set(hosts, [1]) == "host1"
    assert device_set(hosts, [0, 2]) == "2 hosts (host0, host2)"
    assert device_set(cluster, range(16)) == "16 GPUs on 4 hosts"
    assert device_set(cluster, range(8)) == "the 8 GPUs of node0, node1"
    assert device_set(cluster, [*range(4), *range(8, 16)]) == "the 12 GPUs of node0, node2, node3"
    assert device_set(cluster, range(4)) == "the 4 GPUs of node0"
    assert device_set(cluster, [5]) == "node1/gpu1"
    assert device_set(cluster, [0, 1, 2, 5]) == "GPUs 0-2,5"
    assert device_set(cluster, [0, 1, 4, 5, 8, 9, 12, 13]) == "GPUs 0-1 of each host"
    assert device_set(cluster, [1, 3, 5, 7]) == "GPUs 1,3 of each of node0, node1"
    assert device_set(cluster, [2, 6, 10, 14]) == "GPU 2 of each host"
    many = Topology.load("p100:16")
    assert device_set(many, range(16, 48)) == "the 32 GPUs of node4..node11"
    assert device_set(many, [d for d in range(64) if d // 4 % 2]) == "GPUs " + ",".join(
        f"{d}-{d + 3}" for d in range(4, 64, 8)
    )
    assert device_set(Topology.load("ethernet-1g:8"), range(2, 8)) == "6 hosts (host2..host7)"


@pytest.mark.parametrize(
    ("kind", "template", "inputs", "output", "roles", "words"),
    [
        ("linear", "b.. i, o i -> b.. o", [(2, 8, 4), (4, 4)], (2, 8, 4),
         {"b0": "sample", "b1": "attribute", "o": "parameter"},
         {"b0": "batch", "b1": "sequence", "o": "output features", "i": "input features (partial sums)"}),
        ("embedding", "b.., v d -> b.. d", [(2, 8), (50, 4)], (2, 8, 4),
         {"b0": "sample", "b1": "attribute", "d": "parameter"},
         {"b0": "batch", "b1": "sequence", "v": "vocabulary", "d": "embedding features"}),
        ("attention", "b h q E, b h K E, b h K v -> b h q v", [(2, 4, 8, 4)] * 3, (2, 4, 8, 4),
         {"b": "sample", "h": "parameter", "q": "attribute", "v": "attribute"},
         {"b": "batch", "h": "heads", "q": "sequence", "v": "head features"}),
        ("max_pool2d", "n c (2*h+KH) (2*w+KW) -> n c h w", [(2, 4, 8, 8)], (2, 4, 4, 4),
         {"n": "sample", "c": "attribute", "h": "attribute", "w": "attribute"},
         {"n": "batch", "c": "channels", "h": "height", "w": "width"}),
    ],
)  # fmt: skip
def test_axes_are_called_what_people_call_them(
    kind: str, template: str, inputs: list[tuple[int, ...]], output: tuple[int, ...], roles: dict[str, str],
    words: dict[str, str],
) -> None:  # fmt: skip
    known = {"KH": 2, "KW": 2, "h": 4, "w": 4} if "pool" in kind else {}
    pattern, sizes = instantiate(template, inputs, [output], {}, known)
    axes = tuple(Axis(name=a, size=n, role=roles.get(a, "reduction")) for a, n in sizes.items())  # type: ignore[arg-type]
    op = Operator(name="x", kind=kind, pattern=pattern, axes=axes, inputs=("i",) * len(inputs), outputs=("o",))
    assert {axis: axis_word(op, axis) for axis in words} == words


# tables


def test_rows_have_units_and_compare_with_data_parallelism(rows: list[PlanRow]) -> None:
    first, second = plan_rows(rows)
    assert first["speedup_vs_data_parallel"] == 1.0
    assert second["speedup_vs_data_parallel"] == pytest.approx(first["iteration_s"] / second["iteration_s"])
    assert second["iteration_s"] < first["iteration_s"]
    assert second["moved_bytes"] < first["moved_bytes"]
    assert second["note"] == "by hand"
    for row in (first, second):
        assert row["interval_s"][0] < row["iteration_s"] < row["interval_s"][1]
    assert {"name", "iteration_s", "moved_bytes", "peak_bytes", "dominates", "fits"} <= set(first)
    json.dumps([first, second], allow_nan=False)


def test_without_data_parallelism_there_is_nothing_to_compare_with(rows: list[PlanRow]) -> None:
    assert plan_rows(rows[1:])[0]["speedup_vs_data_parallel"] is None
    assert plan_rows(rows[1:], data_parallel_s=1.0)[0]["speedup_vs_data_parallel"] > 0


def test_what_dominates_is_named(rows: list[PlanRow], hosts: Topology) -> None:
    assert "of gradient of classifier.fc" in dominates(rows[0].lowered, rows[0].simulation)
    assert "link host" in dominates(rows[0].lowered, rows[0].simulation)
    alone = plan(convnet(256), Topology.load("ethernet-1g:1"), {})
    assert dominates(alone, simulate(alone)) == "compute 100 %"
    tiny = plan(mlp(batch=4, widths=(4,) * 8, inputs=4), hosts, {"": {}} | {f"fc{k}": {"o": 4} for k in range(8)})
    assert dominates(tiny, simulate(tiny)).startswith("waiting for messages")


def test_a_plan_that_does_not_fit_is_marked(rows: list[PlanRow]) -> None:
    lowered = rows[0].lowered
    small = tuple(d.model_copy(update={"memory_bytes": 10**6}) for d in lowered.topology.devices)
    cramped = replace(lowered, topology=lowered.topology.model_copy(update={"devices": small}))
    row = PlanRow("data parallel", rows[0].simulation, cramped)
    (values,) = plan_rows([row])
    assert not values["fits"]
    assert values["shortfall_bytes"] == values["peak_bytes"] - 10**6
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(plan_table([row, rows[1]], "Plans"))
    text = console.export_text()
    assert "does not fit" in text
    assert "one weird trick" in text


# traces


def test_a_trace_tells_every_task_once_on_its_device(trick: Lowered) -> None:
    s = simulate(trick)
    trace = chrome_trace(trick, s)
    json.dumps(trace, allow_nan=False)
    slices = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    compute = [e for e in slices if e["cat"] != "communication"]
    assert sorted(e["args"]["task"] for e in compute) == [t for t, d in enumerate(trick.tasks.device) if d >= 0]
    for e in compute:
        assert e["ts"] == pytest.approx(s.start[e["args"]["task"]] * 1e6)
        assert e["ts"] + e["dur"] <= s.makespan_s * 1e6 * (1 + 1e-9)
    moving = {e["args"]["task"] for e in slices if e["cat"] == "communication"}
    assert moving == {t for t, k in enumerate(trick.tasks.kind) if k == TaskKind.COMMUNICATION}
    conv = next(e for e in compute if e["name"] == "features.conv1")
    assert conv["args"]["config"] == "batch over 4 hosts"
    named = {(e["pid"], e.get("tid")) for e in trace["traceEvents"] if e["ph"] == "M"}
    assert all((e["pid"], e["tid"]) in named and (e["pid"], None) in named for e in slices)


def test_slices_of_a_row_do_not_overlap(data_parallel: Lowered) -> None:
    by_row: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for e in chrome_trace(data_parallel, simulate(data_parallel))["traceEvents"]:
        if e["ph"] == "X":
            by_row.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["ts"] + e["dur"]))
    for spans in by_row.values():
        spans.sort()
        assert all(a[1] <= b[0] + 1e-6 for a, b in pairwise(spans))


def test_arrows_come_in_pairs_from_communication_to_consumer(trick: Lowered) -> None:
    events = chrome_trace(trick, simulate(trick))["traceEvents"]
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert starts.keys() == ends.keys()
    assert starts
    assert all(starts[k]["ts"] <= ends[k]["ts"] for k in starts)


def test_measured_times_stand_beside_the_predicted(trick: Lowered, tmp_path: Path) -> None:
    s = simulate(trick)
    measured = {t: (float(s.start[t]) * 1.1, float(s.end[t]) * 1.1) for t in range(len(trick.tasks))}
    measured[0] = (math.nan, math.nan)
    path = tmp_path / "trace.json"
    save_trace(path, trick, s, measured)
    events = json.loads(path.read_text())["traceEvents"]
    title = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    real = [e for e in events if e["ph"] == "X" and title[e["pid"]].endswith(": measured")]
    assert sorted(e["args"]["task"] for e in real) == list(range(1, len(trick.tasks)))
    assert {"host0/cpu: predicted", "host0/cpu: measured", "links: predicted"} <= set(title.values())


# pictures


def test_pictures_are_labelled(rows: list[PlanRow], trick: Lowered, tmp_path: Path) -> None:
    s = rows[1].simulation
    measured = {t: (float(s.start[t]), float(s.end[t])) for t in range(len(trick.tasks))}
    curve = {"data parallel": {1: 1.0, 2: 0.8, 4: 0.7}, "found": {1: 1.0, 2: 0.55, 4: 0.3}}
    for k, figure in enumerate(
        (
            plan_bars(rows, "AlexNet"),
            scaling_curve(curve, 32),
            chains([("from random", [(10, 0.3), (20, 0.2)]), ("from best", [])], [(0, 0.25), (15, 0.2)], 0.1),
            chains([], [], 0.1),
            timeline(trick, rows[1].simulation, title="found"),
            timeline(trick, rows[1].simulation, measured),
        )
    ):
        assert isinstance(figure, Figure)
        (axes,) = figure.axes
        assert axes.get_xlabel()
        figure.savefig(tmp_path / f"{k}.png", dpi=50)
        assert (tmp_path / f"{k}.png").stat().st_size > 1000


def test_pictures_leave_global_state_alone(rows: list[PlanRow]) -> None:
    from matplotlib import pyplot

    plan_bars(rows)
    timeline(rows[0].lowered, rows[0].simulation)
    assert pyplot.get_fignums() == []
