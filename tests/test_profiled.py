"""Graphs with given times and bytes: what files of measured layers become, what they cost, what is refused."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.profiled import Loads, best_pipeline, equal_devices, random_chain
from flexsearch.cost import Costs
from flexsearch.errors import FlexsearchError, ImportModelError
from flexsearch.graph import OperatorGraph
from flexsearch.graph.batch import with_batch
from flexsearch.graph.dnn_partitioning import read_dnn_partitioning
from flexsearch.graph.ops import kind_of
from flexsearch.graph.ops.check import check_kinds
from flexsearch.graph.piece import make_piece, whole_piece
from flexsearch.graph.pipedream import read_pipedream
from flexsearch.graph.profiled import profiled_graph
from flexsearch.simulate.staged import StagedSimulators
from flexsearch.strategy import Options, make_config
from flexsearch.strategy.pipeline import Pipeline
from tests.conftest import Cli

HERE = Path(__file__).parent / "data"
PIPEDREAM, TRAINING = HERE / "layers.graph.txt", HERE / "layers_training.json"
THIRD_PARTY = os.environ.get("FLEXSEARCH_DATA")
third_party = pytest.mark.skipif(not THIRD_PARTY, reason="FLEXSEARCH_DATA names no folder of third-party files")
TICK_S = 1e-11
SGD = Options(optimizer="sgd")


def pipedream() -> OperatorGraph:
    return profiled_graph("layers", read_pipedream(PIPEDREAM))


def training() -> OperatorGraph:
    return profiled_graph("training", read_dnn_partitioning(TRAINING, batch=8))


def times(graph: OperatorGraph) -> dict[str, tuple[Any, Any]]:
    return {op.name: (op.attributes["forward_s"], op.attributes["backward_s"]) for op in graph.operators}


def test_a_pipedream_profile_is_read_in_topological_order() -> None:
    profile, graph = read_pipedream(PIPEDREAM), pipedream()
    assert (
        profile.batch == graph.batch == 8 and "8 samples, as the outputs of its linear layers say" in profile.notes[0]
    )
    assert [op.name for op in graph.operators] == ["node2", "node3", "node4", "node10", "loss"]
    assert times(graph)["node10"] == (0.002, 0.005) and times(graph)["loss"] == (0.0, 0.0)
    assert [t.name for t in graph.of_kind("input")] == ["node1"]  # whose 9 ms, of loading data, are left out
    nbytes = {t.name: t.nbytes for t in graph.tensors}
    assert (nbytes["node1"], nbytes["node2"], nbytes["node3"], nbytes["node10"]) == (1280, 1280, 1280, 320)
    assert nbytes["node4"] == 32  # at least an element for each sample
    assert (nbytes["node2.weight"], nbytes["node10.weight"]) == (6560, 1640)
    assert graph.operators[3].inputs == ("node3", "node4", "node10.weight")
    assert graph.operators[0].source == "layers.graph.txt:3"


def test_forward_and_backward_nodes_of_a_colour_class_are_one_operator() -> None:
    graph = training()
    assert [op.name for op in graph.operators] == ["node1", "node2", "node3", "loss"]
    assert list(times(graph).values())[:3] == [(0.002, 0.004), (0.003, 0.006), (0.001, 0.002)]
    nbytes = {t.name: t.nbytes for t in graph.tensors}
    assert (nbytes["node1"], nbytes["node1.weight"]) == (1024, 3072) and "node2.weight" not in nbytes
    assert nbytes["node3.weight"] == 2048 and all(graph.has_backward[:3])


def test_a_file_without_backward_nodes_is_of_inference(tmp_path: Path) -> None:
    data = json.loads(TRAINING.read_text())
    data["nodes"], data["edges"] = data["nodes"][:3], data["edges"][:2]
    (tmp_path / "i.json").write_text(json.dumps(data))
    graph = profiled_graph("i", read_dnn_partitioning(tmp_path / "i.json"))
    assert graph.batch == 64 and not any(graph.has_backward)


@pytest.mark.parametrize("make", [pipedream, training])
def test_a_graph_with_given_times_keeps_them_in_a_file(make: Callable[[], OperatorGraph], tmp_path: Path) -> None:
    graph = make()
    check_kinds(graph)
    graph.save(tmp_path / "g.json")
    assert '"flexsearch.graph/2"' in (tmp_path / "g.json").read_text()
    assert OperatorGraph.load(tmp_path / "g.json") == graph


def test_a_piece_takes_its_share_of_the_given_time_on_any_device() -> None:
    graph, topology = pipedream(), equal_devices(2, 1e9)
    costs = Costs(graph, topology)
    op = graph.operators[3]
    extents = [tuple({"b": b}.get(axis, op.sizes[axis]) for axis in op.access.axes) for b in (8, 3, 1)]
    found = costs.of_extents(3, extents, 0)
    np.testing.assert_allclose(found, [[2e-3, 0.75e-3, 0.25e-3], [5e-3, 1.875e-3, 0.625e-3]], atol=TICK_S)
    axes = {axis: (0, n) for axis, n in zip(op.access.axes, extents[1], strict=True)}
    piece = make_piece(op, axes, *([graph.tensor[x].shape for x in names] for names in (op.inputs, op.outputs)))
    assert costs.compute(3, piece, 1) == tuple(found[:, 1])
    many = {axis: np.array([e[k] for e in extents]) for k, axis in enumerate(op.access.axes)}
    np.testing.assert_array_equal(costs.compute_many(3, many, 0), found)


def test_other_batches_take_in_proportion() -> None:
    graph = with_batch(pipedream(), Fraction(1, 4))
    assert graph.batch == 2 and graph.operators[0].attributes["samples"] == 8
    everything = [tuple(graph.operators[3].sizes[axis] for axis in graph.operators[3].access.axes)]
    found = Costs(graph, equal_devices(1, 1e9)).of_extents(3, everything, 0)
    np.testing.assert_allclose(found[:, 0], [0.5e-3, 1.25e-3], atol=TICK_S)


def test_backward_times_count_also_where_no_weight_precedes() -> None:
    graph = training()
    data = json.loads(TRAINING.read_text())
    assert {t.name for t in graph.of_kind("parameter")} == {"node1.weight", "node3.weight"}
    one, topology = [make_config(op, {}, (0,)) for op in graph.operators], equal_devices(1, 1e9)
    seconds = StagedSimulators(graph, topology).simulator(Pipeline(1, (0,), ((0,),)), one, SGD).seconds
    assert seconds == pytest.approx(sum(node["fpgaLatency"] for node in data["nodes"]) / 1e3, rel=1e-4)


def test_a_pipeline_of_given_layers_takes_what_1f1b_takes() -> None:
    """Two stages of 6 and 12 ms a minibatch in 8 microbatches of one sample, transfers of 128 bytes at 1 TB/s."""
    graph, topology = training(), equal_devices(2, 1e12)
    configs = [make_config(op, {}, (min(i, 1),)) for i, op in enumerate(with_batch(graph, Fraction(1, 8)).operators)]
    pipeline = Pipeline(1, (0, 1), ((0,), (1,)), 8)
    found = StagedSimulators(graph, topology).simulator(pipeline, configs, SGD).seconds
    assert found == pytest.approx((12 + 6 / 8) / 1e3, rel=1e-4)


def test_the_best_of_all_pipelines_is_found_by_simulating_few() -> None:
    graph, topology = random_chain(5, 4, 3), equal_devices(2, 1e9)
    optimum = best_pipeline(graph, topology, SGD)
    assert optimum.plans == 4 * 3 + 2 and optimum.simulated < optimum.plans
    found = []
    simulators = StagedSimulators(graph, topology)
    for cut in range(1, 5):
        for count in (1, 2, 4):
            operators = simulators.share(1, count)[0].graph.operators
            configs = [make_config(op, {}, (int(i >= cut),)) for i, op in enumerate(operators)]
            found.append(simulators.simulator(Pipeline(1, (0, cut), ((0,), (1,)), count), configs, SGD).seconds)
    assert optimum.seconds <= min(found)
    assert optimum.seconds == min(found) or len(optimum.pipeline.first) == 1


def test_loads_are_compute_plus_transfers() -> None:
    loads = Loads(TRAINING)
    assert loads.largest([0b111]) == 18.0
    assert loads.load(0b001) == 6.0 + 0.5 + 0.25 and loads.load(0b010) == 9.0 + 2 * 0.5 + 2 * 0.25
    assert loads.best(1) == 18.0 and loads.best(2) == loads.largest([0b001, 0b110]) == 12.75
    assert loads.best(1, 1) == 18.0  # a CPU takes 30 ms for the shortest layer


def test_there_is_nothing_to_run() -> None:
    graph = pipedream()
    op = graph.operators[0]
    shapes = [graph.tensor[name].shape for name in op.inputs]
    with pytest.raises(ImportModelError, match="no operators to run") as refused:
        kind_of(op).kernel(op, whole_piece(op, shapes, [graph.tensor[op.name].shape]), shapes, None)  # type: ignore[arg-type]
    assert "import the PyTorch model" in refused.value.remedy


def test_commands_import_and_simulate_but_do_not_measure(cli: Cli) -> None:
    ran = cli("import", "--format", "pipedream", PIPEDREAM, "-o", "g.json", "--json")
    assert ran.code == 0 and ran.json["batch"] == 8 and ran.json["forward_s"] == 0.004 and "loading data" in ran.err
    ran = cli("simulate", "g.json", "-t", "p100:1", "--baseline", "data-parallel", "--json")
    assert ran.code == 0, ran.err
    assert cli("import", "--format", "dnn-partitioning", TRAINING, "-o", "t.json", "--batch", 16).code == 0
    assert OperatorGraph.load("t.json").batch == 16
    ran = cli("profile", "g.json", "-o", "p.json")
    assert ran.code == 2 and "no operators to measure" in ran.err and not Path("p.json").exists()


LINES = PIPEDREAM.read_text().splitlines()


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", "has no nodes"),
        ("node1 Input", "line 1: .* is not a node"),
        (LINES[0] + "\n" + LINES[0], "line 2: there are two nodes 'node1'"),
        (LINES[1].replace("=2.000", "=-2.000"), 'line 1: forward_compute_time is "-2.000"'),
        (LINES[1].replace("=2.000", "=nan"), 'line 1: forward_compute_time is "nan"'),
        (LINES[1].replace("=320.000", "=[1;x]"), r'line 1: activation_size is "\[1;x\]"'),
        (LINES[1].replace("=320.000", "=1e300"), "line 1: activation_size"),
        (LINES[1].replace("parameter_size", "size"), "line 1: parameter_size is missing"),
        (LINES[1] + "\n\tnode10 -- node9", "line 2: there is no node 'node9'"),
        (LINES[1] + "\n\tnode10", "line 2: .* is not an edge"),
        (LINES[1] + "\n\tnode10 -- node10", "lead in a circle, through node10"),
        (LINES[0], "no layer that computes"),
        (LINES[1].replace("=2.000", "=9e13"), "line 1: forward_compute_time is"),
        ("\0", "not a node"),
    ],
)
def test_a_bad_profile_is_refused_in_words(text: str, wanted: str, cli: Cli) -> None:
    Path("bad.txt").write_text(text)
    ran = cli("import", "--format", "pipedream", "bad.txt", "-o", "g.json")
    assert ran.code == 2 and "Traceback" not in ran.err and not Path("g.json").exists(), ran.err
    assert re.search(wanted, ran.err), ran.err


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        (lambda d: d.pop("nodes"), "nodes"),
        (lambda d: d["nodes"][0].pop("fpgaLatency"), "nodes.0.fpgaLatency"),
        (lambda d: d["nodes"][0].update(fpgaLatency=-1.0), "nodes.0.fpgaLatency"),
        (lambda d: d["nodes"][1].update(id=1), "nodes.1.id: 1 is that of nodes.0 too"),
        (lambda d: d["nodes"][3].update(colorClass=1), "nodes.3.colorClass"),
        (lambda d: d["edges"][0].update(destId=99), "edges.0.destId: there is no node 99"),
        (lambda d: d["edges"][1].update(destId=1), "lead in a circle"),
        (lambda d: d["edges"][0].update(size="many"), "edges.0.size"),
    ],
)
def test_a_bad_layer_graph_is_refused_in_words(change: Callable[[Any], Any], wanted: str, cli: Cli) -> None:
    data = json.loads(TRAINING.read_text())
    change(data)
    Path("bad.json").write_text(json.dumps(data))
    ran = cli("import", "--format", "dnn-partitioning", "bad.json", "-o", "g.json")
    assert ran.code == 2 and wanted in ran.err and "Traceback" not in ran.err and not Path("g.json").exists(), ran.err


@pytest.mark.parametrize(
    "arguments",
    [("--format", "other", PIPEDREAM), ("--format", "pipedream", PIPEDREAM, "--opaque"),
     ("--format", "pipedream", PIPEDREAM, "--set", "a=1"), ("--format", "pipedream", "missing.txt"),
     ("--format", "dnn-partitioning", "."), ("--format", "dnn-partitioning", PIPEDREAM)],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(arguments: tuple[Any, ...], cli: Cli) -> None:
    ran = cli("import", *arguments, "-o", "g.json")
    assert ran.code == 2 and "Traceback" not in ran.err and not Path("g.json").exists(), ran.err


def test_graph_files_with_impossible_times_are_refused(tmp_path: Path) -> None:
    graph = pipedream()
    for change, wanted in (({"forward_s": -1.0}, "forward_s"), ({"samples": 0}, "samples")):
        op = graph.operators[0]
        bad = op.model_copy(update={"attributes": op.attributes | change})
        graph.model_copy(update={"operators": (bad, *graph.operators[1:])}).save(tmp_path / "g.json")
        with pytest.raises(FlexsearchError, match=wanted):
            OperatorGraph.load(tmp_path / "g.json")


@third_party
@pytest.mark.parametrize(("name", "batch", "seconds"), [("vgg16", 128, 0.6725), ("alexnet", 256, 0.0853)])
def test_profiles_of_pipedream_are_read(name: str, batch: int, seconds: float) -> None:
    profile = read_pipedream(Path(THIRD_PARTY or "") / "pipedream" / f"{name}.graph.txt")
    graph = profiled_graph(name, profile)
    assert profile.batch == batch
    assert sum(map(sum, times(graph).values())) == pytest.approx(seconds, abs=5e-5)


@third_party
@pytest.mark.parametrize(
    ("name", "one", "published"), [("bert24_inference", 92.406, 17.7899), ("bert24_training", 217.813, 41.7458)]
)
def test_published_contiguous_splits_are_reproduced(name: str, one: float, published: float) -> None:
    loads = Loads(Path(THIRD_PARTY or "") / "dnn-partitioning" / f"{name}.json")
    assert loads.largest([(1 << len(loads.ids)) - 1]) == pytest.approx(one)
    assert loads.best(6, 1) == pytest.approx(published, abs=5e-5)
