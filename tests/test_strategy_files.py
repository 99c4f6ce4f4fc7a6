"""Strategy files: stages, meshes and positions; what is left out in the plain case; version 1."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexsearch.errors import FileFormatError, FlexsearchError, StrategyError
from flexsearch.graph import OperatorGraph
from flexsearch.quantities import MAX_DEVICES
from flexsearch.strategy import OperatorConfig, Options, Stage, States, Strategy, make_config
from flexsearch.strategy.baselines import baseline
from flexsearch.strategy.positions import expanded, strided
from flexsearch.topology import Topology

VERSION_1 = Path(__file__).parent / "data" / "strategy-1.json"
Data = dict[str, Any]


@pytest.fixture(scope="module")
def graph() -> OperatorGraph:
    return OperatorGraph.load("mlp")


@pytest.fixture(scope="module")
def cluster() -> Topology:
    return Topology.load("p100:2")


def staged(graph: OperatorGraph, cluster: Topology) -> Strategy:
    """Two stages: the loss on the second host, in reverse; everything before it twice on pairs of the first one."""
    names = [op.name for op in graph.operators]
    stages = (Stage(tuple(names[:-1]), (0, 2, 1, 3), 2), Stage((names[-1],), (7, 6, 5, 4)))
    configs = {op.name: make_config(op, {op.axes_of("sample")[0]: 2}, (2, 0)) for op in graph.operators[:-1]}
    configs[names[-1]] = make_config(graph.operators[-1], {}, (6, 7))
    return Strategy.make(
        graph, cluster, configs, Options(bucket_bytes=1 << 20, prefetch=2), stages=stages, microbatches=4,
        schedule="gpipe",
    )  # fmt: skip


def written(strategy: Strategy, path: Path) -> Data:
    strategy.save(path)
    data: Data = json.loads(path.read_text())
    return data


def test_a_file_of_version_1_means_what_it_meant() -> None:
    strategy = Strategy.load(VERSION_1)
    old = json.loads(VERSION_1.read_text())
    for name, config in old["operators"].items():
        assert strategy.configs[name] == OperatorConfig(
            tuple(config["degrees"].items()), tuple(config["devices"]), config["replicas"],
            States.WEIGHTS if config["shard_weights"] else States.WHOLE,
        )
    assert strategy.configs["loss.valid_count"].devices == (0, 2, 1, 3) and strategy.configs["loss"].devices == (2,)
    assert strategy.options == Options(bucket_bytes=4 << 20, optimizer="adam")
    assert [stage.mesh for stage in strategy.stages] == [(0, 1, 2, 3)] and strategy.microbatches == 1
    assert strategy.prediction is not None and strategy.prediction.model_dump(exclude_none=True) == old["prediction"]
    assert strategy.search is not None and strategy.search.locally_optimal and strategy.search.climbs == 2
    strategy.check_supported(OperatorGraph.load("mlp"), strategy.cluster)


def test_a_file_of_version_1_is_written_as_version_2(tmp_path: Path) -> None:
    strategy = Strategy.load(VERSION_1)
    data = written(strategy, tmp_path / "new.json")
    assert data["format"] == "flexsearch.strategy/2"
    assert data["operators"]["loss.valid_count"] == {"degrees": {"n0": 4}, "positions": [0, 2, 1, 3]}
    assert data["operators"]["layers.fc1"] == {"degrees": {"b0": 4}, "states": "weights"}
    assert Strategy.load(tmp_path / "new.json") == strategy


@pytest.mark.parametrize(
    ("place", "value"),
    [(("operators", "loss", "devices"), [-1]), (("search", "pins"), ["x"]), (("search", "seed"), "0")],
)
def test_errors_in_a_file_of_version_1_name_its_field(tmp_path: Path, place: tuple[str, ...], value: object) -> None:
    data = json.loads(VERSION_1.read_text())
    at = data
    for key in place[:-1]:
        at = at[key]
    at[place[-1]] = value
    (tmp_path / "old.json").write_text(json.dumps(data))
    with pytest.raises(FileFormatError, match=r"\.".join(place)):
        Strategy.load(tmp_path / "old.json")


def test_the_plain_case_is_written_shortly(tmp_path: Path, graph: OperatorGraph, cluster: Topology) -> None:
    data = written(baseline("data-parallel", graph, cluster), tmp_path / "plain.json")
    assert not {"stages", "microbatches", "schedule"} & set(data)
    assert data["operators"]["layers.fc1"] == {"degrees": {"b0": 8}}
    assert data["synchronisation"] == {"bucket_bytes": 25 * 2**20} and data["optimizer"] == "momentum"


def test_stages_come_back_as_they_were_written(tmp_path: Path, graph: OperatorGraph, cluster: Topology) -> None:
    strategy = staged(graph, cluster)
    data = written(strategy, tmp_path / "staged.json")
    first, last = graph.operators[0].name, graph.operators[-2].name
    assert data["stages"] == [
        {"range": {"first": first, "last": last}, "mesh": [0, 2, 1, 3], "replicas": 2},
        {"operators": [graph.operators[-1].name], "mesh": [7, 6, 5, 4]},
    ]
    assert data["microbatches"] == 4 and data["schedule"] == "gpipe" and data["synchronisation"]["prefetch"] == 2
    assert data["operators"][first]["positions"] == [1, 0]  # of the first replica's mesh: devices 0 and 2
    loaded = Strategy.load(tmp_path / "staged.json")
    assert loaded == strategy and loaded.stages == strategy.stages and loaded.configs == strategy.configs
    loaded.check(graph, cluster)


def test_a_mesh_by_its_axes(tmp_path: Path, graph: OperatorGraph, cluster: Topology) -> None:
    data = written(baseline("data-parallel", graph, cluster), tmp_path / "plain.json")
    for stage, devices in (
        ({"axes": "devices x hosts"}, (0, 4, 1, 5, 2, 6, 3, 7)),
        ({"axes": "hosts x devices"}, tuple(range(8))),
        ({"mesh": {"shape": [4, 2], "strides": [1, 4]}}, (0, 4, 1, 5, 2, 6, 3, 7)),
        ({"mesh": {"first": 1, "shape": [4], "strides": [2]}}, (1, 3, 5, 7)),
    ):
        (tmp_path / "mesh.json").write_text(json.dumps(data | {"stages": [stage]}))
        strategy = Strategy.load(tmp_path / "mesh.json")
        assert strategy.stages[0].mesh == strategy.configs["layers.fc1"].devices == devices


@given(st.permutations(range(12)) | st.lists(st.integers(0, 40), min_size=1, max_size=12, unique=True))
def test_strides_describe_a_list_or_nothing(numbers: list[int]) -> None:
    if (form := strided(numbers)) is not None:
        assert expanded(*form) == tuple(numbers)


@given(st.permutations(range(3)), st.lists(st.integers(2, 4), min_size=3, max_size=3))
def test_every_order_that_permutes_the_axes_has_strides(order: list[int], shape: list[int]) -> None:
    whole = [shape[1] * shape[2], shape[2], 1]
    lengths, strides = [shape[k] for k in order], [whole[k] for k in order]
    numbers = expanded(0, lengths, strides)
    form = strided(numbers)
    assert form is not None and expanded(*form) == numbers and sorted(numbers) == list(range(len(numbers)))


def test_orders_of_many_devices_are_written_by_strides(tmp_path: Path, graph: OperatorGraph) -> None:
    cluster = Topology.load("p100:4")
    plan = baseline("data-parallel", graph, cluster)
    order = expanded(0, (4, 4), (1, 4))
    configs = {name: config.on(order[: len(config.devices)]) for name, config in plan.configs.items()}
    strategy = Strategy.make(graph, cluster, configs)
    data = written(strategy, tmp_path / "order.json")
    assert data["operators"]["layers.fc1"]["positions"] == {"first": 0, "shape": [4, 4], "strides": [1, 4]}
    assert Strategy.load(tmp_path / "order.json") == strategy


Edit = Callable[[Data], object]


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda d: d["stages"][0].update(axes="hosts x devices"), ("stages.0", "remove one")),
        (lambda d: d["stages"][0].update(replicas=3), ("stages.0.replicas", "4 devices")),
        (lambda d: d["stages"][0].update(mesh={"shape": [2]}), ("stages.0.mesh", "strides")),
        (lambda d: d["stages"][0].update(mesh={"shape": [2**40], "strides": [1]}), ("stages.0.mesh", str(MAX_DEVICES))),
        (lambda d: d["stages"][0].update(mesh={"shape": [2], "strides": [-1]}), ("stages.0.mesh",)),
        (lambda d: d["stages"][0]["range"].update(last="ghost"), ("stages.0.range", "ghost")),
        (lambda d: d["stages"][1].pop("operators"), ("stages.1", "range")),
        (lambda d: d["stages"].pop(), ("no stage", "'loss'")),
        (lambda d: d.update(microbatches=0), ("microbatches", "at least 1")),
        (lambda d: d.update(schedule="random"), ("schedule", "gpipe")),
        (lambda d: d["operators"]["loss"].update(positions=[4]), ("operators.loss.positions", "0 to 3")),
        (lambda d: d["operators"]["loss"].update(positions=[0.5]), ("operators.loss.positions.0",)),
        (lambda d: d["operators"]["loss"].update(states="half"), ("operators.loss.states", "sharded")),
        (lambda d: d["operators"]["loss"].update(devices=[0]), ("operators.loss.devices", "remove")),
        (lambda d: d["synchronisation"].update(prefetch=-1), ("synchronisation.prefetch", "at least 0")),
    ],
)  # fmt: skip
def test_errors_name_the_field(
    tmp_path: Path, graph: OperatorGraph, cluster: Topology, edit: Edit, words: tuple[str, ...]
) -> None:
    data = written(staged(graph, cluster), tmp_path / "wrong.json")
    edit(data)
    (tmp_path / "wrong.json").write_text(json.dumps(data))
    with pytest.raises(FileFormatError) as error:
        Strategy.load(tmp_path / "wrong.json")
    assert all(word in str(error.value) for word in ("wrong.json", *words)) and error.value.remedy


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        ([((0, 2), (0, 1)), ((1, 9), (0, 1))], "is in stage 0 and in stage 1"),
        ([((6, 9), (0, 1)), ((0, 6), (0, 1))], "in the later stage 1"),
        ([((0, 9), (0, 0, 1))], "twice"),
        ([((0, 9), (0, 99))], "0 to 7"),
        ([((0, 9), (1, 2))], "not in the mesh"),
        ([((1, 9), (0, 1))], "in no stage"),
    ],
)
def test_stages_that_make_no_sense_are_refused(
    graph: OperatorGraph, cluster: Topology, stages: list[tuple[tuple[int, int], tuple[int, ...]]], words: str
) -> None:
    names = [op.name for op in graph.operators]
    built = [Stage(tuple(names[slice(*cut)]), mesh) for cut, mesh in stages]
    configs = {op.name: make_config(op, {}, (0,)) for op in graph.operators}
    with pytest.raises(StrategyError, match=words):
        Strategy.make(graph, cluster, configs, stages=built)


def test_stages_are_of_equally_many_devices_a_host_where_axes_are_named(graph: OperatorGraph) -> None:
    from flexsearch.strategy.stage import by_axes

    uneven = Topology.load("p100:2").subset([0, 1, 2, 3, 4])
    with pytest.raises(StrategyError, match="4, 1"):
        by_axes(uneven, "devices x hosts")


def test_more_microbatches_than_samples_are_refused(graph: OperatorGraph, cluster: Topology) -> None:
    configs = baseline("data-parallel", graph, cluster).configs
    with pytest.raises(StrategyError, match="microbatches"):
        Strategy.make(graph, cluster, configs, microbatches=graph.batch + 1)


@pytest.mark.parametrize("what", ["stages", "mesh", "microbatches"])
def test_what_the_search_over_configs_cannot_take_is_refused_with_what_to_do(
    graph: OperatorGraph, cluster: Topology, what: str
) -> None:  # fmt: skip
    plan = baseline("data-parallel", graph, cluster)
    names = [op.name for op in graph.operators]
    everything, order = tuple(range(8)), (4, 5, 6, 7, 0, 1, 2, 3)
    strategies = {
        "stages": Strategy.make(graph, cluster, plan.configs, stages=[
            Stage(tuple(names[:-1]), everything), Stage(tuple(names[-1:]), everything)
        ]),
        "mesh": Strategy.make(graph, cluster, plan.configs, stages=[Stage(tuple(names), order)]),
        "microbatches": Strategy.make(graph, cluster, plan.configs, microbatches=2),
    }  # fmt: skip
    with pytest.raises(FlexsearchError, match={"mesh": "stages"}.get(what, what)) as error:
        strategies[what].check_supported(graph, cluster)
    assert "flexsearch optimize" in error.value.remedy
