"""Layouts of data x tensor x pipeline: cuts, what is searched, and that the answer is what is simulated."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flexsearch import zoo
from flexsearch.cost import Costs
from flexsearch.errors import StrategyError
from flexsearch.graph import OperatorGraph
from flexsearch.graph.importer import import_model
from flexsearch.lower import Lowering
from flexsearch.lower.share import stages_of
from flexsearch.report.layouts import StagedRow, layout_words
from flexsearch.search.hybrid import HybridResult, Layout, LayoutSearch, search_hybrid
from flexsearch.search.hybrid.cuts import Cuts
from flexsearch.search.hybrid.layout import divisors, factorings, neighbours
from flexsearch.simulate import makespan
from flexsearch.simulate.delta import DeltaSimulator
from flexsearch.simulate.staged import StagedSimulators, model_flops, step_of, step_of_strategy
from flexsearch.strategy import Options, States, Strategy
from flexsearch.strategy.baselines import baseline
from flexsearch.strategy.pipeline import Pipeline
from flexsearch.strategy.stage import check_batch
from flexsearch.topology import Topology
from tests.conftest import Cli
from tests.test_baselines import mlp

OPTIONS = Options(optimizer="adam")


@cache
def decoder() -> OperatorGraph:
    made = zoo.gpt2(batch=16, seq=8, layers=4, hidden=32, heads=4, vocab=64, device="meta")
    return import_model(made.model, made.inputs, made.loss, targets=made.targets)


@cache
def found() -> HybridResult:
    return search_hybrid(decoder(), Topology.load("dgx-a100:1"), OPTIONS, budget_s=60.0)


# ---- cuts


class Places(Cuts):
    """Cuts at given places."""

    def __init__(self, places: list[int]) -> None:
        self.places = places

    def allowed(self, stages: int) -> list[int]:
        return self.places


@pytest.mark.parametrize("seed", range(20))
def test_the_slowest_stage_is_as_fast_as_any_cut_makes_it(seed: int) -> None:
    rng = np.random.default_rng(seed)
    count = int(rng.integers(5, 14))
    seconds, some = rng.random(count), rng.choice(np.arange(1, count), rng.integers(2, count - 1), replace=False)
    places = [0, *sorted(some.tolist())]

    def slowest(first: tuple[int, ...]) -> float:
        return max(seconds[a:b].sum() for a, b in zip(first, (*first[1:], count), strict=True))

    for stages in range(1, len(places) + 1):
        best = min(slowest((0, *rest)) for rest in combinations(places[1:], stages - 1))
        cut = Places(places).balanced(seconds.tolist(), stages)
        assert len(cut) == stages
        assert set(cut) <= set(places)
        assert slowest(cut) == pytest.approx(best, rel=1e-12)


def test_a_decoder_is_cut_between_its_layers() -> None:
    graph = decoder()
    cuts = Cuts(graph)
    layers = [op.module.split(".")[1] for op in graph.operators if op.module.startswith(("layers.", "h.", "blocks."))]
    assert cuts.depth >= len(set(layers))
    first = cuts.balanced([1.0] * len(graph.operators), 2)
    moved = cuts.moved(first, 1, 1)
    assert moved is not None
    assert moved[1] > first[1]
    assert cuts.moved(first, 1, 10_000) is None


# ---- layouts


def test_factorings_use_all_devices_and_keep_groups_inside_hosts() -> None:
    layouts = list(factorings(16, 8, 32, 4))
    assert all(f.devices == 16 and 8 % f.tensor == 0 and f.pipeline <= 4 and 32 % f.data == 0 for f in layouts)
    assert {(f.data, f.tensor, f.pipeline) for f in layouts} >= {(16, 1, 1), (2, 8, 1), (1, 4, 4), (2, 2, 4)}
    assert len(set(layouts)) == len(layouts)


def test_groups_take_turns_or_come_back() -> None:
    layout = Layout(1, 2, 2, 4, "interleaved-1f1b", 2)
    assert layout.groups() == ((0, 1), (2, 3), (0, 1), (2, 3))
    assert replace(layout, schedule="zero-bubble-v").groups() == ((0, 1), (2, 3), (2, 3), (0, 1))


def test_neighbours_differ_in_one_number_and_divide_the_batch() -> None:
    layout = Layout(2, 2, 2, 4)
    for other in neighbours(layout, 32, 8):
        assert 16 % other.microbatches == 0
        assert (other.data, other.tensor, other.pipeline) == (2, 2, 2)
    assert divisors(12) == [1, 2, 3, 4, 6, 12]


@pytest.mark.parametrize(
    ("batch", "replicas", "microbatches", "message"),
    [
        (12, 5, 1, "a batch of 12 cannot be divided among 5 replicas"),
        (12, 1, 5, "a batch of 12 cannot be divided into 5 microbatches"),
        (24, 2, 5, "a share of 12 samples cannot be divided into 5 microbatches"),
    ],
)
def test_what_does_not_divide_the_batch_is_refused_with_the_nearest_that_do(
    batch: int, replicas: int, microbatches: int, message: str
) -> None:
    with pytest.raises(StrategyError, match=message) as error:
        check_batch(batch, replicas, microbatches)
    assert "Use 4 or 6" in error.value.remedy


# ---- simulating


def test_a_plan_without_stages_takes_as_long_as_any_other_simulation_says() -> None:
    graph, topology = decoder(), Topology.load("dgx-a100:1")
    search = LayoutSearch(graph, topology, OPTIONS, None, 1e9, None)
    candidate = search.evaluate(Layout(1, 8, 1), OPTIONS)
    assert candidate is not None
    plain = DeltaSimulator(graph, topology, Costs(graph, topology), OPTIONS, candidate.configs)
    assert candidate.seconds == plain.seconds
    step = step_of(search.simulators, candidate.pipeline, candidate.configs, OPTIONS)
    assert [m.peak for m in step.memory] == plain.peaks().tolist()


def test_replicas_are_simulated_as_the_whole_plan_is() -> None:
    graph, topology = decoder(), Topology.load("dgx-a100:1")
    simulators = StagedSimulators(graph, topology)
    search = LayoutSearch(graph, topology, OPTIONS, None, 1e9, None)
    candidate = search.evaluate(Layout(4, 2, 1), OPTIONS)
    assert candidate is not None
    share, _, _ = simulators.share(4, 1)
    assert share.fold is not None
    whole = share.fold.unfold(candidate.configs)
    assert candidate.seconds == DeltaSimulator(graph, topology, Costs(graph, topology), OPTIONS, whole).seconds


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble"])
def test_one_replica_with_stages_is_what_lowering_says(schedule: Any) -> None:
    graph, topology = decoder(), Topology.load("dgx-a100:1")
    search = LayoutSearch(graph, topology, OPTIONS, None, 1e9, None)
    candidate = search.evaluate(Layout(1, 2, 4, 4, schedule), OPTIONS)
    assert candidate is not None
    share, _, _ = search.simulators.share(1, 4)
    lowering = Lowering(share.graph, share.topology, Costs(share.graph, share.topology))
    lowered = lowering.lower(candidate.configs, OPTIONS, stages_of(candidate.pipeline))
    assert candidate.seconds == makespan(lowered)


def test_stages_keep_fewer_microbatches_under_1f1b_than_under_gpipe() -> None:
    search = LayoutSearch(decoder(), Topology.load("dgx-a100:1"), OPTIONS, None, 1e9, None)
    one, all_ = (search.evaluate(Layout(1, 2, 4, 16, kind), OPTIONS) for kind in ("1f1b", "gpipe"))
    assert one is not None
    assert all_ is not None
    peaks = [
        step_of(search.simulators, c.pipeline, c.configs, OPTIONS).fullest.activations for c in (one, all_)
    ]
    assert peaks[0] < peaks[1] / 2


def test_utilisation_counts_the_models_flops_once() -> None:
    graph = decoder()
    weights = sum(t.nbytes // t.itemsize for t in graph.of_kind("parameter") if len(t.shape) == 2)
    tokens = 16 * 8
    assert model_flops(graph) == pytest.approx(6 * weights * tokens, rel=0.35)
    step = found().step
    assert step.utilisation == pytest.approx(step.flops / step.makespan_s / step.peak_flops)


# ---- the search


def test_the_search_finds_the_best_of_all_layouts_without_resplitting() -> None:
    graph, topology = decoder(), Topology.load("dgx-a100:1")
    search = LayoutSearch(graph, topology, OPTIONS, None, 1e9, None)
    best = min(
        (
            candidate
            for layout in factorings(8, 8, 16, search.cuts.depth)
            for count in divisors(16 // layout.data)[::2]
            for kind in ("gpipe", "1f1b")
            if (candidate := search.evaluate(replace(layout, microbatches=count, schedule=kind), OPTIONS)) is not None
        ),
        key=lambda c: c.rank,
    )  # fmt: skip
    assert found().best.seconds <= best.seconds
    assert found().best.seconds <= min(c.seconds for c, step in found().baselines.values() if not step.missing)


def test_a_strategy_is_saved_loaded_and_simulated_as_it_was_found(tmp_path: Path) -> None:
    graph, topology = decoder(), Topology.load("dgx-a100:1")
    search = LayoutSearch(graph, topology, OPTIONS, None, 1e9, None)
    candidate = search.evaluate(Layout(2, 2, 2, 4, sharded=True), OPTIONS)
    assert candidate is not None
    strategy = search._result(candidate, "").strategy
    strategy.save(tmp_path / "plan.json")
    loaded = Strategy.load(tmp_path / "plan.json")
    assert loaded == strategy
    assert Pipeline.of(loaded, graph) == candidate.pipeline
    assert step_of_strategy(graph, loaded).makespan_s == candidate.seconds
    with pytest.raises(StrategyError, match="2 stages"):
        loaded.check_supported(graph, topology)


def test_more_parts_than_a_microbatch_has_samples_are_refused() -> None:
    graph, topology = decoder(), Topology.load("dgx-a100:1")
    data = baseline("data-parallel", graph, topology).configs
    strategy = Strategy.make(graph, topology, data, OPTIONS, microbatches=4)
    with pytest.raises(StrategyError, match=r"degree 8 on axis .* of size 4"):
        step_of_strategy(graph, strategy)


def test_short_chains_are_cut_anywhere_between_layers() -> None:
    places = Cuts(mlp()).allowed(2)
    assert len(places) > 2
    assert places[1:] == list(range(places[1], places[-1] + 1))


def test_replicas_at_other_places_are_refused() -> None:
    graph, topology = decoder(), Topology.load("dgx-a100:1")
    search = LayoutSearch(graph, topology, OPTIONS, None, 1e9, None)
    candidate = search.evaluate(Layout(2, 2, 2, 4), OPTIONS)
    assert candidate is not None
    strategy = search._result(candidate, "").strategy
    stages = [replace(stage, mesh=(*stage.positions, *reversed(stage.mesh[2:]))) for stage in strategy.stages]
    other = Strategy(
        strategy.graph, strategy.inputs, strategy.cluster, strategy.configs, stages=stages,
        microbatches=strategy.microbatches,
    )  # fmt: skip
    with pytest.raises(StrategyError, match="are not at the same places"):
        Pipeline.of(other, graph)


def test_a_batch_that_suits_no_layout_is_refused_with_the_remedy() -> None:
    with pytest.raises(StrategyError, match="no layout of 17 devices") as error:
        search_hybrid(mlp(), Topology.load("ethernet-1g-17"), OPTIONS, budget_s=20.0)
    assert "--batch" in error.value.remedy


# ---- the command


def test_plans_on_paper_are_printed_written_and_simulated(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    done = cli("optimize", "gpt2", "-t", "dgx-a100:1", "--plan-only", "-b", "3s", "-o", str(path), "--json")
    assert done.code == 0, done.err
    data = json.loads(done.out)
    assert data["plan_only"]
    assert data["fits"]
    assert data["plans_simulated"] > 5
    assert "data-parallel" in {plan["name"] for plan in data["plans"]}
    again = cli("simulate", "gpt2", "-s", str(path), "--json")
    assert again.code == 0, again.err
    assert json.loads(again.out)["iteration_s"] == pytest.approx(data["iteration_s"], rel=0.01)


def test_a_plan_that_configs_alone_say_is_written_without_stages() -> None:
    graph, topology = decoder(), Topology.load("dgx-a100:1")
    search = LayoutSearch(graph, topology, OPTIONS, None, 1e9, None)
    candidate = search.evaluate(Layout(4, 2, 1), OPTIONS)
    assert candidate is not None
    strategy = search._result(candidate, "").strategy
    assert strategy.is_plain
    strategy.check_supported(graph, topology)
    assert step_of_strategy(graph, strategy).makespan_s == candidate.seconds


def test_a_layout_is_told_in_the_words_of_the_field() -> None:
    step = replace(found().step, samples=64)
    pipeline = Pipeline(8, (0, 3, 5, 9), ((0, 1), (2, 3)) * 2, 4, "interleaved-1f1b")
    options = Options(precision="bf16", recompute="full", reshard_after_forward=True)
    assert layout_words(StagedRow("", pipeline, options, step, States.WEIGHTS)) == (
        "pipeline 2 x tensor 2 x data 8, 4 microbatches of 2, interleaved 1F1B, 2 stages on each device, weights "
        "sharded over 8 and gathered again in the backward pass, bf16 with float32 masters, recompute everything"
    )


def test_a_model_too_large_for_this_machine_is_planned_on_paper_without_being_asked(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flexsearch.cli.layouts.os.sysconf", lambda name: 2**14)  # 256 MiB of memory
    done = cli("optimize", "gpt2", "-t", "p100:1", "-b", "3s", "--json")
    assert done.code == 0, done.err
    assert done.json["plan_only"]


@pytest.mark.parametrize("more", [["--pin", "*: batch=2"], ["--exhaustive", "5s"], ["--seed", "3"], ["-j", "2"]])
def test_options_that_say_nothing_about_layouts_are_refused(cli: Cli, more: list[str]) -> None:
    done = cli("optimize", "gpt2", "-t", "dgx-a100:1", "--plan-only", *more)
    assert done.code == 2
    assert "does not go with a search over layouts" in done.err


def test_what_fits_nowhere_is_said_with_what_would_help(cli: Cli, here: Path) -> None:
    done = cli("optimize", "llama_7b", "-t", "p100:1", "--plan-only", "-b", "3s")
    assert done.code != 0
    assert "fits into memory" in done.err
    assert "--precision bf16" in done.err
    assert not list(here.glob("*.json"))
