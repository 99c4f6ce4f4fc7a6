"""Layouts of data x tensor x pipeline: cuts, what is searched, and that the answer is what is simulated."""

from __future__ import annotations

import ast
import json
import threading
from dataclasses import replace
from functools import cache
from itertools import combinations, pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flexsearch
from benchmarks import llm_plans
from benchmarks.profiled import best_pipeline, equal_devices, random_chain
from flexsearch import zoo
from flexsearch.cost import Costs
from flexsearch.errors import FlexsearchError, StrategyError
from flexsearch.graph import OperatorGraph
from flexsearch.graph.importer import import_model
from flexsearch.graph.profiled import LayerProfile, ProfiledLayer, profiled_graph
from flexsearch.lower import Lowering
from flexsearch.lower.share import stages_of
from flexsearch.proof.bound import lower_bound
from flexsearch.report.fitting import Fitting, fitting_words
from flexsearch.report.layouts import StagedRow, layout_words
from flexsearch.search.hybrid import HybridResult, Layout, LayoutSearch, ahead, search_hybrid
from flexsearch.search.hybrid import search as search_module
from flexsearch.search.hybrid.ahead import Ahead
from flexsearch.search.hybrid.answer import plain_options, simplified, with_least_memory
from flexsearch.search.hybrid.constants import EQUAL
from flexsearch.search.hybrid.cuts import Cuts
from flexsearch.search.hybrid.divide import Divider
from flexsearch.search.hybrid.estimate import Estimate
from flexsearch.search.hybrid.layout import divisors, factorings, neighbours
from flexsearch.search.hybrid.moves import moved_borders
from flexsearch.search.hybrid.outcome import FAMILIES, Candidate
from flexsearch.search.hybrid.ranking import Key, Ranking, Ratios
from flexsearch.search.hybrid.trials import Answer, Request
from flexsearch.simulate import makespan
from flexsearch.simulate.delta import DeltaSimulator
from flexsearch.simulate.staged import StagedSimulators, model_flops, step_of, step_of_strategy
from flexsearch.strategy import Options, Sharding, States, Strategy
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


@cache
def bounded(cluster: str) -> tuple[LayoutSearch, float]:
    """A search on four devices, alike or not, and the bound of all its plans."""
    topology = unlike((3e9, 1e9, 1e9, 2e9)) if cluster == "unlike" else equal_devices(4, 1e9)
    search = LayoutSearch(decoder(), topology, OPTIONS, None, 1e9, None)
    return search, lower_bound(search.works.graph, topology, search.works.costs, OPTIONS, None).seconds


def unlike(rates: tuple[float, ...]) -> Topology:
    """Hosts with Ethernet whose devices compute so many FLOP/s."""
    topology = Topology.load(f"ethernet-1g-{len(rates)}")
    devices = zip(topology.devices, rates, strict=True)
    return topology.model_copy(
        update={"devices": tuple(d.model_copy(update={"flops": {"float32": rate}}) for d, rate in devices)}
    )


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
    moved = list(moved_borders(cuts, first))
    assert moved
    assert all(len(new) == 2 and new[0] == 0 and new != first and new[1] in cuts.allowed(2) for new in moved)


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
    for other in neighbours(layout, 32, 8, 4):
        assert 16 % other.microbatches == 0
        assert (other.data, other.tensor, other.pipeline) == (2, 2, 2)
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
    inside = [other for other in neighbours(Layout(8, 1, 2), 32, 8, 4) if other.over]
    assert [other.sharding for other in inside] == [Sharding(states, 4) for states in States if states]
    assert {other.divided for other in inside} == {2}
    assert not any(other.over for other in neighbours(Layout(2, 1, 2), 32, 8, 4))  # all replicas are in one host


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
    step = search.trials._step(candidate)
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
    share, _, _ = search.trials.simulators.share(1, 4)
    lowering = Lowering(share.graph, share.topology, Costs(share.graph, share.topology))
    lowered = lowering.lower(candidate.configs, OPTIONS, stages_of(candidate.pipeline))
    assert candidate.seconds == makespan(lowered)


def test_stages_keep_fewer_microbatches_under_1f1b_than_under_gpipe() -> None:
    search = LayoutSearch(decoder(), Topology.load("dgx-a100:1"), OPTIONS, None, 1e9, None)
    one, all_ = (search.evaluate(Layout(1, 2, 4, 16, kind), OPTIONS) for kind in ("1f1b", "gpipe"))
    assert one is not None
    assert all_ is not None
    simulators = (search.trials.simulators.simulator(c.pipeline, c.configs, OPTIONS) for c in (one, all_))
    peaks = [step_of(search.trials.simulators, simulator).fullest.activations for simulator in simulators]
    assert peaks[0] < peaks[1] / 2


def test_the_benchmark_of_large_models_tells_plans_in_words() -> None:
    assert llm_plans.words(found()).startswith(("data ", "tensor ", "pipeline "))


def test_flops_of_a_model_are_those_by_which_papers_count_utilisation() -> None:
    """6 N + 12 L H Q T a token (PaLM, 2022, app. B), N: weights of matrix products; norms and the loss are little."""
    graph, layers, hidden, seq = OperatorGraph.load("llama_7b"), 32, 4096, 4096
    weights = layers * (4 * hidden**2 + 3 * hidden * 11008) + hidden * 32000
    assert model_flops(graph) == pytest.approx(graph.batch * seq * (6 * weights + 12 * layers * hidden * seq), rel=2e-3)


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
    assert found().best.seconds <= (1.0 + EQUAL) * best.seconds
    assert found().best.seconds <= min(c.seconds for c, step in found().baselines.values() if not step.missing)
    assert best.seconds >= found().bound_s > best.seconds / 100
    assert found().strategy.search is not None and found().strategy.search.bound_s == found().bound_s


@pytest.mark.parametrize("layout", [Layout(8, 1, 1, 2, states=States.WEIGHTS), Layout(2, 2, 2, 4)], ids=str)
def test_moves_simulate_no_plan_twice_and_families_hold_what_comes_of_them(layout: Layout) -> None:
    search = LayoutSearch(decoder(), Topology.load("dgx-a100:1"), OPTIONS, None, 1e9)
    candidate = search.evaluate(layout, OPTIONS)
    assert candidate is not None
    assert search.evaluate(layout, OPTIONS, candidate.pipeline.first) is candidate
    search._climb(candidate)
    simulated = [c for c in search.simulated.values() if c is not None]
    assert search.plans == len(simulated) > 1
    assert len({(c.layout, c.options, c.pipeline.first) for c in simulated}) == len(simulated)
    ours = [c for c in simulated if not c.layout.widths and c.pipeline.first == search.estimates.first(c.layout)]
    for name, kept in search.kept.items():
        assert kept.rank == min(c.rank for c in ours if FAMILIES[name](c.layout))


@settings(derandomize=True, deadline=None, max_examples=25)
@given(data=st.data(), cluster=st.sampled_from(["equal", "unlike"]))
def test_no_layout_is_faster_than_the_bound(data: st.DataObject, cluster: str) -> None:
    search, bound_s = bounded(cluster)
    layout = data.draw(st.sampled_from([f for f in factorings(4, 4, 16, search.cuts.depth)]))
    schedule = data.draw(st.sampled_from(["gpipe", "1f1b", "zero-bubble"]))
    count = data.draw(st.sampled_from(divisors(16 // layout.data)))
    key = replace(layout, microbatches=count, schedule=schedule, states=data.draw(st.sampled_from(States)))
    candidate = search.evaluate(key, OPTIONS)
    assert candidate is None or candidate.seconds >= bound_s


def test_the_answer_does_not_depend_on_the_number_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, topology = random_chain(5, 8, 0), equal_devices(4, 1e9)
    monkeypatch.setattr(ahead, "LATE_S", 0.0)
    by_workers: list[int] = []

    class Counting(Ahead):
        def _end(self, request: Request, number: int, answer: Answer) -> None:
            by_workers.append(number)
            super()._end(request, number, answer)

        def get(self, request: Request) -> Answer:
            with self._changed:  # until the worker is there, and has done something
                self._changed.wait_for(lambda: 1 in by_workers or not self._expected, 120.0)
            return super().get(request)

    monkeypatch.setattr(search_module, "Ahead", Counting)
    one, two = (search_hybrid(graph, topology, OPTIONS, budget_s=200.0, processes=count) for count in (1, 2))
    assert set(by_workers) == {0, 1}
    assert one.strategy == two.strategy
    assert (one.plans, one.considered, one.stopped) == (two.plans, two.considered, two.stopped)
    assert {name: candidate.key for name, (candidate, _) in one.baselines.items()} == {
        name: candidate.key for name, (candidate, _) in two.baselines.items()
    }
    assert two.step.bubbles == one.step.bubbles


def test_families_that_may_fit_come_before_those_that_are_far_from_it() -> None:
    """Half of what whole states take fits: data parallelism cannot, and is tried once, last."""
    topology = Topology.load("dgx-a100:1")
    graph = decoder()
    whole = sum(tensor.nbytes for tensor in graph.of_kind("parameter")) * 4
    small = topology.model_copy(
        update={"devices": tuple(d.model_copy(update={"memory_bytes": whole // 2}) for d in topology.devices)}
    )
    search = LayoutSearch(graph, small, OPTIONS, None, 1e9, None)
    ranking = Ranking(search.ratios, search._estimated(search.numbers.layouts()))
    tried: list[str] = []
    evaluate = search.evaluate

    def noted(layout: Layout, options: Options, first: tuple[int, ...] = ()) -> Candidate | None:
        candidate = evaluate(layout, options, first)
        tried.extend(candidate.families if candidate is not None else ())
        return candidate

    search.evaluate = noted  # type: ignore[method-assign]
    search._simulate_families(ranking)
    assert tried.count("data-parallel") == 1
    assert tried.index("data-parallel") > tried.index("tensor x data")
    assert set(tried) == set(search.kept)
    assert search.best is not None and search.best.feasible
    assert not search.kept["data-parallel"].feasible


def test_parts_of_the_batch_that_plans_share_change_nothing() -> None:
    graph, topology = decoder(), Topology.load("dgx-a100:1")
    together = LayoutSearch(graph, topology, OPTIONS, None, 1e9, None)
    layouts = [Layout(8, 1, 1, 1), Layout(4, 2, 1, 2), Layout(2, 2, 2, 4), Layout(1, 4, 2, 8), Layout(1, 1, 8, 8)]
    for layout in layouts:
        alone = LayoutSearch(graph, topology, OPTIONS, None, 1e9, None).evaluate(layout, OPTIONS)
        assert together.evaluate(layout, OPTIONS) == alone
    parts = {id(together.trials.simulators.share(f.data, f.microbatches)[0].graph) for f in layouts}
    assert len(parts) == 1


def test_what_a_lost_worker_had_begun_is_done_here() -> None:
    graph, topology = decoder(), Topology.load("dgx-a100:1")
    search = LayoutSearch(graph, topology, OPTIONS, None, 1e9, processes=2)
    requests = [search._request(Key(Layout(1, 2, 4, count), OPTIONS)) for count in (2, 4)]
    lost = Lost()
    search.ahead._workers[1] = lost  # type: ignore[assignment]
    search.ahead._begun[requests[0].name] = 1
    thread = threading.Thread(target=search.ahead._work_with, args=(1, lost, requests[0]))
    thread.start()
    answers = [search.ahead.get(request).best for request in requests]
    thread.join()
    assert [answer is not None and answer.layout.microbatches for answer in answers] == [2, 4]
    assert not search.ahead._workers


class Lost:
    """A worker that was killed."""

    def ask(self, *_: object) -> None:
        raise EOFError

    def close(self) -> None:
        pass


def test_a_strategy_is_saved_loaded_and_simulated_as_it_was_found(tmp_path: Path) -> None:
    graph, topology = decoder(), Topology.load("dgx-a100:1")
    search = LayoutSearch(graph, topology, OPTIONS, None, 1e9, None)
    candidate = search.evaluate(Layout(2, 2, 2, 4, states=States.WEIGHTS), OPTIONS)
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
        search_hybrid(mlp().resized(1), Topology.load("ethernet-1g-17"), OPTIONS, budget_s=20.0)
    assert "--batch" in error.value.remedy


def test_layouts_that_the_topology_refuses_do_not_use_up_the_patience() -> None:
    """GPUs of this V100 server are not joined alike: no replicas inside it can be folded."""
    graph, topology = OperatorGraph.load("gpt2"), Topology.load("v100-nvlink-4")
    search = LayoutSearch(graph, topology, Options(), None, 1e9, None)
    ranking = Ranking(search.ratios, ((key, search.estimates.estimate(*key)) for key in search.numbers.layouts()))
    search._simulate_best(ranking)
    best = search.best
    assert not any(key.layout.data > 1 for key, plan in search.simulated.items() if plan)
    expert = search.evaluate(Layout(1, 1, 4, 8, "zero-bubble"), Options())
    assert expert is not None and best is not None and best.seconds <= expert.seconds


@pytest.mark.parametrize(
    ("cluster", "inside"),
    [
        ("dgx-a100:1", set()), ("p100:1", set()), ("v100-nvlink-4", {(1, 1, (4,)), (1, 2, (2,)), (1, 1, (2, 2))}),
        ("p100:2", {(1, 1, (4, 4)), (1, 1, (2,) * 4), (1, 2, (2, 2))}),
    ],
)  # fmt: skip
def test_replicas_are_put_inside_ranks_where_blocks_are_not_alike_or_stages_may_be_on_hosts(
    cluster: str, inside: set[tuple[int, int, tuple[int, ...]]]
) -> None:
    topology = Topology.load(cluster)
    search = LayoutSearch(decoder(), topology, OPTIONS, None, 1e9)
    layouts = [key.layout for key in search.numbers.layouts()]
    assert {(f.data, f.tensor, f.widths) for f in layouts if f.widths} == inside
    assert all(f.devices == len(topology.devices) for f in layouts)


def test_stages_on_hosts_with_replicas_inside_them_are_simulated_and_told() -> None:
    search = LayoutSearch(decoder(), Topology.load("p100:2"), OPTIONS, None, 1e9)
    candidate = search.evaluate(Layout(1, 1, 2, 2, widths=(4, 4)), OPTIONS)
    assert candidate is not None and "pipeline x data" in candidate.families
    result = search._result(candidate, "")
    assert [stage.mesh for stage in result.strategy.stages] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert step_of_strategy(decoder(), result.strategy).makespan_s == candidate.seconds
    row = StagedRow("", candidate.pipeline, OPTIONS, result.step, Sharding(States.OPTIMIZER), within=4)
    assert layout_words(row).startswith("pipeline 2 x data 4, 2 microbatches of 8, 1F1B, optimizer sharded over 4")


def test_what_is_wrong_in_a_simulation_is_not_taken_for_a_layout_that_does_not_suit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    search = LayoutSearch(decoder(), Topology.load("dgx-a100:1"), OPTIONS, None, 1e9, None)
    assert search.evaluate(Layout(3, 1, 1), OPTIONS) is None  # 16 samples
    assert search.evaluate(Layout(1, 2, 4, 6), OPTIONS) is None
    assert search.evaluate(Layout(1, 2, 4, 1, "dualpipe-v", 2), OPTIONS) is None

    def wrong(*_: object) -> None:
        raise FlexsearchError("devices wait for each other")

    monkeypatch.setattr(search.trials.simulators, "simulator", wrong)
    with pytest.raises(FlexsearchError, match="wait for each other"):
        search.evaluate(Layout(1, 2, 4, 4), OPTIONS)


def test_the_answer_is_told_from_plans_that_were_simulated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    search = LayoutSearch(decoder(), Topology.load("dgx-a100:1"), OPTIONS, None, 1e9, None)
    for layout in (Layout(8, 1, 1), Layout(4, 2, 1), Layout(2, 2, 2, 4)):
        search.evaluate(layout, OPTIONS)
    monkeypatch.setattr(search.trials.simulators, "simulator", None)
    assert search.best is not None
    result = search._result(search.best, "")
    assert set(result.baselines) == {"data-parallel", "tensor x data", "megatron"}
    assert result.step.makespan_s == search.best.seconds == min(c.seconds for c, _ in result.baselines.values())


# ---- estimates


def test_estimates_are_near_what_is_simulated() -> None:
    search = LayoutSearch(decoder().resized(64), Topology.load("dgx-a100:1"), OPTIONS, None, 1e9, None)
    full = OPTIONS.model_copy(update={"recompute": "full"})
    for layout, options in [
        (Layout(8, 1, 1), OPTIONS), (Layout(1, 8, 1, 4), OPTIONS), (Layout(1, 1, 8, 32), OPTIONS),
        (Layout(1, 2, 4, 8, "gpipe"), full), (Layout(1, 2, 4, 16, "zero-bubble"), OPTIONS),
        (Layout(2, 1, 4, 8, "interleaved-1f1b", 2), OPTIONS), (Layout(8, 1, 1, 2, states=States.WEIGHTS), OPTIONS),
    ]:  # fmt: skip
        estimate, candidate = search.estimates.estimate(layout, options), search.evaluate(layout, options)
        assert candidate is not None
        assert 0.6 < candidate.seconds / estimate.seconds < 1.6, layout
        assert 0.5 < candidate.used / estimate.used < 2.0, layout


def test_what_was_simulated_corrects_the_estimates_of_plans_like_it() -> None:
    ratios, options = Ratios(), Options()
    one, other = Key(Layout(1, 2, 4, 8), options), Key(Layout(4, 2, 1, 8), options)
    ratios.learn(one, Estimate(1.0, 0.5), Estimate(1.2, 0.25))
    assert ratios.corrected(one._replace(layout=Layout(1, 2, 4, 16)), Estimate(1.0, 1.0)).seconds == pytest.approx(1.2)
    ratios.learn(other, Estimate(1.0, 0.5), Estimate(0.8, 0.5))
    ranking = Ranking(ratios, [(one, Estimate(1.0, 0.5)), (other, Estimate(1.1, 0.5))])
    assert ranking.take() == (other, pytest.approx(0.88))
    assert ranking.take() == (one, pytest.approx(1.2))
    assert ranking.take() is None


def test_plans_with_equal_costs_are_taken_in_their_order() -> None:
    """What a partial sort puts first of equal ones depends on the processor."""
    rng = np.random.default_rng(0)
    costs = rng.integers(1, 4, 200).astype(float).tolist()
    keys = [Key(Layout(1, 1, 1, 1 + k), Options()) for k in range(200)]
    ranking = Ranking(Ratios(), [(key, Estimate(cost, 0.5)) for key, cost in zip(keys, costs, strict=True)])
    expected = sorted(range(200), key=lambda k: (costs[k], k))
    for count in (1, 5, 70, 199, 200, 300):
        places = [key.layout.microbatches - 1 for key, _ in ranking.following(count)]
        assert places == expected[:count]


@pytest.mark.parametrize("folder", ["search", "strategy", "cost", "lower", "proof"])
def test_what_decides_uses_no_function_that_ieee_754_leaves_open(folder: str) -> None:
    loose = {"log", "log2", "log10", "log1p", "exp", "exp2", "expm1", "pow", "power", "cbrt"}
    for path in (Path(flexsearch.__file__).parent / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.ImportFrom) else []
            names += [node.func.attr] if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else []
            assert not loose.intersection(names), f"{path} uses {names}"


# ---- stages of different sizes


def chain(layers: list[tuple[float, float, float]], batch: int = 32) -> OperatorGraph:
    """Layers with given times (s, forward and twice that backward), bytes of outputs and of weights."""
    rows = [ProfiledLayer("data", (), 0.0, 0.0, 1e4, 0.0, data=True)]
    for k, (seconds, sent, weights) in enumerate(layers):
        rows.append(ProfiledLayer(f"layer{k}", (rows[-1].name,), seconds, 2 * seconds, sent, weights))
    return profiled_graph("chain", LayerProfile(tuple(rows), True, batch))


def test_divisions_reach_the_best_estimate_of_all_cuts_and_sizes() -> None:
    rng = np.random.default_rng(3)
    graph = chain([(float(a), float(b), float(c)) for a, b, c in 10 ** rng.uniform([-3, 5, 5], [-2, 7, 7], (6, 3))])
    search = LayoutSearch(graph, equal_devices(4, 1e9), Options(optimizer="sgd"), None, 1e9, None)
    layout, options = Layout(1, 1, 1, 8), search.options

    def cost(widths: tuple[int, ...], first: tuple[int, ...]) -> float:
        return search.estimates.estimate(layout.wide(widths), options, first).cost

    every = [
        cost(widths, (0, *cut))
        for stages in range(1, 5)
        for cut in combinations(range(1, 6), stages - 1)
        for widths in product(range(1, 5), repeat=stages)
        if sum(widths) == 4
    ]  # fmt: skip
    found = [cost(*division) for division in Divider(search.estimates, layout, options, 4).divisions()]
    assert min(found) <= 1.02 * min(every)


def test_heavy_layers_with_small_weights_get_several_devices() -> None:
    """As PipeDream has it for VGG-16: three devices for the convolutions, one for the rest."""
    graph = chain([(72e-3, 4e5, 1e5)] + [(4e-3, 1e5, 4e8)] * 6)
    topology, options = equal_devices(4, 1e9), Options(optimizer="sgd")
    search = LayoutSearch(graph, topology, options, None, 1e9, None)
    ranking = Ranking(search.ratios, search._estimated(search.numbers.divisions()))
    key, _ = ranking.take() or pytest.fail("there is no division")
    assert key.layout.widths == (3, 1)
    assert key.first == (0, 1)
    candidate = search.evaluate(*key)
    assert candidate is not None
    assert {config.devices for config in candidate.configs[:1]} == {(0, 1, 2)}
    strategy = search._result(candidate, "").strategy
    assert step_of_strategy(graph, strategy).makespan_s == candidate.seconds
    words = layout_words(StagedRow("", candidate.pipeline, options, step_of_strategy(graph, strategy)))
    assert words.startswith("pipeline 2 on 3 + 1 devices")
    alike = [search.evaluate(f, options) for f in factorings(4, 4, 32, 12)]
    assert candidate.seconds < min(c.seconds for c in alike if c is not None)


def test_the_faster_of_unlike_devices_gets_more_layers() -> None:
    topology = unlike((3e9, 1e9, 1e9))
    result = search_hybrid(decoder(), topology, OPTIONS, budget_s=5.0)
    assert result.best.layout.data == 1
    assert result.considered > result.plans
    search = LayoutSearch(decoder(), topology, OPTIONS, None, 1e9, None)
    first = search.estimates.first(Layout(1, 1, 3, 16))
    work = search.works.work(1, 1, "none", int(search.works.costs.kinds[1])).forward
    each = [float(work[b] - work[a]) for a, b in pairwise((*first, len(work) - 1))]
    assert each[0] > 1.5 * max(each[1:])


def test_unlike_devices_of_a_stage_share_out_samples_by_their_speeds() -> None:
    topology = unlike((3e9, 1e9, 3e9, 1e9))
    search = LayoutSearch(decoder(), topology, OPTIONS, None, 1e9, None)
    layout = Layout(1, 1, 2, 2, widths=(2, 2))
    equal, shared = (search.evaluate(replace(layout, speed=speed), OPTIONS, (0, 30)) for speed in (0, 1))
    assert equal is not None and shared is not None
    assert {config.shares[0][1] for config in shared.configs if config.shares} == {(3, 1)}
    assert not any(config.shares for config in equal.configs)
    assert shared.seconds < equal.seconds
    estimates = [search.estimates.estimate(replace(layout, speed=speed), OPTIONS, (0, 30)) for speed in (0, 1)]
    assert estimates[1].seconds < estimates[0].seconds
    strategy = search._result(shared, "").strategy
    assert step_of_strategy(decoder(), strategy).makespan_s == shared.seconds
    assert any(key.layout.speed for key in LayoutSearch(mlp(), topology, OPTIONS, None, 1e9).numbers.divisions())


@pytest.mark.parametrize("seed", range(2))
def test_the_best_pipeline_of_a_random_chain_is_reached(seed: int) -> None:
    graph, topology, options = random_chain(7, 16, seed), equal_devices(4, 1e9), Options(optimizer="sgd")
    result = search_hybrid(graph, topology, options, budget_s=20.0)
    assert result.best.seconds <= best_pipeline(graph, topology, options).seconds


# ---- the command


def test_plans_on_paper_are_printed_written_and_simulated(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    done = cli("optimize", "gpt2", "-t", "dgx-a100:1", "--space", "layouts", "-b", "5s", "-o", str(path), "--json")
    assert done.code == 0, done.err
    data = json.loads(done.out)
    assert data["space"] == "layouts"
    assert data["fits"]
    assert data["plans_simulated"] > 1
    assert data["bound_s"] < data["iteration_s"]
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
    assert layout_words(StagedRow("", pipeline, options, step, Sharding(States.WEIGHTS))) == (
        "pipeline 2 x tensor 2 x data 8, 4 microbatches of 2, interleaved 1F1B, 2 stages on each device, weights "
        "sharded over 8 and gathered again in the backward pass, bf16 with float32 masters, recompute everything"
    )


def test_a_model_too_large_for_this_machine_is_planned_on_paper_without_being_asked(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flexsearch.cli.layouts.os.sysconf", lambda name: 2**14)  # 256 MiB of memory
    done = cli("optimize", "gpt2", "-t", "p100:1", "-b", "3s", "--json")
    assert done.code == 0, done.err
    assert done.json["space"] == "layouts"


@pytest.mark.parametrize("more", [["--pin", "*: batch=2"], ["--exhaustive", "5s"], ["--seed", "3"]])
def test_options_that_say_nothing_about_layouts_are_refused(cli: Cli, more: list[str]) -> None:
    done = cli("optimize", "gpt2", "-t", "dgx-a100:1", "--space", "layouts", *more)
    assert done.code == 2
    assert "does not go with a search over layouts" in done.err


def test_what_fits_nowhere_is_said_with_what_would_help(cli: Cli, here: Path) -> None:
    done = cli("optimize", "llama_7b", "-t", "p100:1", "--space", "layouts", "-b", "3s")
    assert done.code != 0
    assert "fits into memory" in done.err
    assert "--precision bf16" in done.err
    assert not list(here.glob("*.json"))


def test_half_precision_is_no_advice_to_those_who_asked_for_it() -> None:
    wide = Fitting(states=10**12, half_states=9 * 10**11, room=10**11, least=10, grows=False)
    assert "Nor can --precision bf16" in fitting_words(wide, one_sample=True)
    assert "--precision" not in fitting_words(replace(wide, half_states=None), one_sample=True)


def test_some_blocks_are_computed_again_where_all_are_not_needed() -> None:
    graph, topology = OperatorGraph.load("gpt2"), Topology.load("p100:1")
    search = LayoutSearch(graph, topology, OPTIONS, None, 60.0, None)
    full = OPTIONS.model_copy(update={"recompute": "full"})
    some = full.model_copy(update={"recompute_blocks": 6})
    layout = Layout(1, 1, 1, 1)
    none, part, every = (search.estimates.estimate(layout, options) for options in (OPTIONS, some, full))
    assert none.seconds < part.seconds < every.seconds and none.used > part.used > every.used
    first = search.estimates.first(layout)
    tried = {key.options.recompute_blocks for key in search.moves.of(Key(layout, full, first))}
    assert {None, 3, 6, 9} <= tried
    simulated = [search.evaluate(layout, options) for options in (OPTIONS, some, full)]
    seconds = [candidate.seconds for candidate in simulated if candidate is not None]
    assert len(seconds) == 3 and seconds == sorted(seconds)


def test_of_equally_fast_plans_the_one_with_more_free_memory_is_the_answer() -> None:
    search = LayoutSearch(decoder(), Topology.load("dgx-a100:1"), OPTIONS, None, 1e9, None)
    candidate = search.evaluate(next(iter(search.numbers.layouts())).layout, OPTIONS)
    assert candidate is not None
    roomier = replace(candidate, used=candidate.used / 2)
    assert min(candidate, roomier, key=lambda one: one.rank) is roomier


def test_of_plans_that_hardly_differ_in_time_the_one_that_takes_less_memory_is_the_answer() -> None:
    search = LayoutSearch(decoder(), Topology.load("dgx-a100:1"), OPTIONS, None, 1e9, None)
    candidate = search.evaluate(Layout(2, 2, 2, 4), OPTIONS)
    assert candidate is not None
    family, split = candidate.families[0], replace(candidate, own=False)

    def plan(seconds: float, used: float, of: Candidate = split) -> Candidate:
        return replace(of, seconds=seconds, used=used)

    best, near, far = plan(1.0, 0.9), plan(1.0 + EQUAL / 2, 0.5), plan(1.0 + 2 * EQUAL, 0.1)
    for plans in ([best, near, far], [far, near, best]):
        assert with_least_memory({"": best}, plans) == {"": near}
    # No answer is slower than a baseline that fits, of whose family the one with least memory stands for all.
    baseline, less = plan(1.0 + EQUAL / 4, 0.8, candidate), plan(1.0 + EQUAL, 0.4, candidate)
    assert with_least_memory({"": best, family: baseline}, [best, near, baseline]) == {"": baseline, family: baseline}
    assert with_least_memory({"": best, family: baseline}, [best, near, baseline, less]) == {"": less, family: less}
    over = replace(near, used=1.1)
    assert with_least_memory({"": over}, [over]) == {"": over}


def test_an_option_that_hardly_gains_is_left_as_usual() -> None:
    search = LayoutSearch(decoder(), Topology.load("dgx-a100:1"), OPTIONS, None, 1e9, None)
    layout = next(key.layout for key in search.numbers.layouts() if key.layout.states)
    ahead = search.evaluate(layout, OPTIONS.model_copy(update={"prefetch": 4}))
    plain = search.evaluate(layout, OPTIONS)
    assert ahead is not None and plain is not None and plain_options(ahead, OPTIONS.prefetch) == plain.key
    for share, kept in ((1.004, plain), (1.006, ahead)):
        slower = replace(plain, seconds=share * ahead.seconds)
        simulated = {ahead.key: ahead, plain.key: slower}
        assert simplified(ahead, simulated, OPTIONS.prefetch) == (slower if kept is plain else ahead)
    full = {ahead.key: ahead, plain.key: replace(plain, seconds=ahead.seconds, used=1.1)}
    assert simplified(ahead, full, OPTIONS.prefetch) is ahead
    assert simplified(replace(ahead, changed=1), {ahead.key: ahead, plain.key: plain}, OPTIONS.prefetch).changed
