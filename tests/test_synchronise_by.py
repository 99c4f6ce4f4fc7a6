"""Ways to sum gradients, ``Options.synchronise_by``: each computes the same and is simulated exactly; a plan gets the
one that makes its step fastest."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from flexsearch.cost import Costs
from flexsearch.errors import FileFormatError
from flexsearch.graph import OperatorGraph
from flexsearch.lower import Lowered, Lowering, lower
from flexsearch.search import Evaluator
from flexsearch.search.space import Space
from flexsearch.search.tuning import Tuned, candidates, synchronised, tuned_baseline
from flexsearch.setting import Setting
from flexsearch.simulate import makespan
from flexsearch.simulate.delta import DeltaSimulator
from flexsearch.strategy import Options, Strategy
from flexsearch.strategy.baselines import baseline
from flexsearch.strategy.records import SynchroniseBy
from flexsearch.topology import Topology
from tests.conftest import Cli
from tests.ranks import cluster, pool
from tests.test_baselines import cnn, mlp
from tests.test_delta import TOPOLOGIES, normed, tied, walk
from tests.test_numerics import _imported, _parallel, _single, agree
from tests.test_states import slow_between_hosts

WAYS = get_args(SynchroniseBy)
ALEXNET = "alexnet", "-t", "p100"


def last_forms(lowered: Lowered) -> set[str]:
    """Of what is sent last to sum gradients."""
    return {weight.plan.sync.form.split(" + ")[-1] for weight in lowered.weights if weight.plan.sync is not None}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("way", WAYS)
def test_every_way_computes_what_one_device_does(way: SynchroniseBy, ranks: int) -> None:
    for name, plan in (("mlp", "data-parallel"), ("convolutions", "data-parallel"), ("mlp", "hsdp")):
        topology = slow_between_hosts() if plan == "hsdp" else cluster(ranks)
        if len(topology.devices) != ranks:
            continue
        imported = _imported(name)
        strategy = baseline(plan, imported.graph, topology, Options(synchronise_by=way))
        lowered = lower(imported.graph, strategy, topology, Costs(imported.graph, topology))
        if way != "reduce-scatter":  # on gloo, all-reduces take least
            assert last_forms(lowered) == {"all_reduce"}
        else:
            assert last_forms(lowered) <= {"all_gather", "exchange"}
        for history in pool(ranks).run(_parallel, name, imported, strategy.to_file().model_dump_json(), False):
            agree(_single(name), history)


@pytest.mark.parametrize("name", ["two nodes of GPUs", "unequal hosts that move bytes by CPU"])
@pytest.mark.parametrize("way", WAYS[1:])
def test_a_walk_is_simulated_as_whole_plans_are(way: SynchroniseBy, name: str) -> None:
    for graph in (mlp(), normed()):
        walk(graph, TOPOLOGIES[name](), np.random.default_rng(5), Options(bucket_bytes=3000, synchronise_by=way), 10)


def test_ways_in_turn_cost_what_each_costs_alone() -> None:
    graph, topology = cnn(), Topology.load("p100:2")
    space, rng, costs = Space(graph, topology), np.random.default_rng(3), Costs(graph, topology)
    evaluate, different = Evaluator(graph, topology, costs, Options()), set()
    plans = [baseline(name, graph, topology).in_order(graph) for name in ("data-parallel", "hsdp")]
    for configs in (*plans, *(space.random_plan(rng) for _ in range(3))):
        for bucket, way in product((3000, 2**20), (*WAYS, "auto")):
            options = Options(bucket_bytes=bucket, synchronise_by=way)
            evaluate.use(options)
            alone = Evaluator(graph, topology, costs, options)
            assert evaluate(configs) == alone(configs)
            assert makespan(evaluate.lower(configs)) == alone(configs).time_s
            different.add((bucket, configs, alone(configs).time_s))
    assert len(different) > 2 * 5


def test_memory_is_that_of_the_way_in_use() -> None:
    graph, topology, costs = tied(), Topology.load("p100:2"), Costs(tied(), Topology.load("p100:2"))
    configs, peaks = Space(graph, topology).random_plan(np.random.default_rng(6)), set()
    simulator = DeltaSimulator(graph, topology, costs, Options(), configs)
    for way in WAYS:
        simulator.use(Options(synchronise_by=way))
        alone = DeltaSimulator(graph, topology, costs, Options(synchronise_by=way), configs)
        assert (simulator.peaks() == alone.peaks()).all()
        peaks.add(tuple(alone.peaks()))
    assert len(peaks) > 1


def test_a_file_says_the_way_where_it_is_not_the_usual_one(tmp_path: Path) -> None:
    graph, topology, path = mlp(), Topology.load("p100:1"), tmp_path / "plan.json"
    for way in WAYS:
        strategy = baseline("data-parallel", graph, topology, Options(synchronise_by=way))
        strategy.save(path)
        assert ("synchronise_by" in path.read_text()) == (way != "auto")
        assert Strategy.load(path).options == strategy.options
    path.write_text(path.read_text().replace('"reduce-scatter"', '"by hand"'))
    with pytest.raises(FileFormatError, match="synchronise_by"):
        Strategy.load(path)


# ---- which way a plan gets


@pytest.mark.parametrize("name", ["data-parallel", "fsdp", "hsdp", "one-weird-trick"])
def test_a_baseline_has_a_way_that_gains_and_no_other(name: str) -> None:
    graph, topology = OperatorGraph.load("alexnet"), Topology.load("p100")
    costs = Costs(graph, topology)
    tuned, lowering = tuned_baseline(name, graph, topology, costs), Lowering(graph, topology, costs)
    times = {
        options: makespan(lowering.lower(tuned.configs, options))
        for size in candidates(lowering, Options()) for way in WAYS
        for options in [size.model_copy(update={"synchronise_by": way})]
    }  # fmt: skip
    usual = min(s for options, s in times.items() if options.synchronise_by == "auto")
    assert tuned.evaluation.time_s == times[tuned.options]
    if tuned.options.synchronise_by == "auto":
        assert tuned.evaluation.time_s == usual and min(times.values()) > 0.995 * usual
    else:
        assert tuned.evaluation.time_s == min(times.values()) < 0.995 * usual
    assert (tuned.options.synchronise_by != "auto") == (name != "fsdp")


def test_what_the_user_says_stays() -> None:
    graph, topology = OperatorGraph.load("alexnet"), Topology.load("p100")
    options = Options(synchronise_by="all-reduce")
    tuned = tuned_baseline("one-weird-trick", graph, topology, Costs(graph, topology), options)
    assert tuned.options == options.model_copy(update={"bucket_bytes": tuned.options.bucket_bytes})


def test_the_evaluator_goes_on_as_before() -> None:
    graph, topology = cnn(), Topology.load("p100:1")
    evaluate = Evaluator(graph, topology, Costs(graph, topology), Options())
    configs = baseline("data-parallel", graph, topology).in_order(graph)
    before = evaluate(configs)
    synchronised({"": Tuned(configs, Options(), before)}, evaluate)
    assert evaluate.options == Options() and evaluate(configs) == before


def test_a_baseline_with_its_way_takes_the_same_time_in_every_command(cli: Cli) -> None:
    rows = {row["name"]: row for row in cli("compare", *ALEXNET, "--json").json["plans"]}
    row = rows["one-weird-trick"]
    assert row["synchronise_by"] == "bandwidth" and rows["fsdp"]["synchronise_by"] == "auto"
    simulated = cli("simulate", *ALEXNET, "--baseline", "one-weird-trick", "--json").json
    assert simulated["iteration_s"] == row["iteration_s"]
    setting = Setting.of(OperatorGraph.load("alexnet"), Topology.load("p100"))
    setting.baseline("one-weird-trick").save("own.json")
    setting.baseline("one-weird-trick", Options(synchronise_by="all-reduce")).save("other.json")
    compared = cli("diff", "own.json", "other.json")
    assert "gradients summed by" in compared.out and "bandwidth" in compared.out
    assert compared.out.count("all-reduce") >= 1
    assert "gradients summed by what takes least for their bytes" in cli("explain", "own.json").out
