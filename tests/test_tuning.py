"""A baseline is tuned the same way everywhere, has the same time everywhere, and is called by its name."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path

import pytest

from flexsearch.api import compare
from flexsearch.cli.answer import _few, _what_it_is
from flexsearch.cost import Costs
from flexsearch.errors import StrategyError
from flexsearch.graph import OperatorGraph
from flexsearch.lower import Lowering
from flexsearch.report.layouts import layout_words
from flexsearch.search import Evaluator, SearchResult, search
from flexsearch.search.tuning import BUCKETS, candidates, whole_seconds
from flexsearch.setting import Setting
from flexsearch.simulate.variants import Outcome, Plan, Variants
from flexsearch.strategy import Options, States, Strategy, make_config
from flexsearch.strategy.baselines import PIPELINES, baselines, stage_of
from flexsearch.strategy.stage import ScheduleKind
from flexsearch.topology import Topology
from flexsearch.topology.changes import edited
from tests.conftest import Cli
from tests.test_baselines import cnn, ethernet, mlp, transformer

ARGUMENTS = "alexnet", "-t", "ethernet-1g-4"


def alexnet() -> Setting:
    return Setting.of(OperatorGraph.load("alexnet"), Topology.load("ethernet-1g-4"))


# ---- how a baseline is tuned


@pytest.mark.parametrize("graph", [mlp(), cnn(hidden=2048), transformer(layers=1)], ids=lambda g: g.name)
@pytest.mark.parametrize("preset", ["ethernet-1g-3", "p100:2"])
def test_a_baseline_has_the_best_of_the_sizes_and_ties_go_to_the_default(graph: OperatorGraph, preset: str) -> None:
    setting = Setting.of(graph, Topology.load(preset))
    evaluate = Evaluator(graph, setting.topology, setting.costs, Options(optimizer="adam"))
    whole = sum(t.nbytes for t in graph.of_kind("parameter"))
    for name, plan in setting.baselines(Options(optimizer="adam", bucket_bytes=12345)).items():
        times = {}
        for size in (*BUCKETS, whole):
            evaluate.use(Options(optimizer="adam", bucket_bytes=size))
            times[size] = evaluate(plan.in_order(graph)).time_s
        best = min(times.values())
        assert plan.options.optimizer == "adam"
        assert times[plan.options.bucket_bytes] == best, name
        if times[Options().bucket_bytes] == best:
            assert plan.options.bucket_bytes == Options().bucket_bytes
        assert plan.options == setting.baseline(name, Options(optimizer="adam")).options


def test_sizes_that_make_the_same_buckets_are_tried_once() -> None:
    graph = OperatorGraph.load("lenet")  # 0.25 MB of weights
    lowering = Lowering(graph, ethernet(2), Costs(graph, ethernet(2)))
    assert [o.bucket_bytes for o in candidates(lowering, Options())] == [Options().bucket_bytes]
    assert [o.bucket_bytes for o in candidates(lowering, Options(), 1000)] == [Options().bucket_bytes, 1000]


# ---- the same time everywhere


def test_a_baseline_takes_the_same_time_in_every_command(cli: Cli) -> None:
    found = cli("optimize", *ARGUMENTS, "--budget", 20, "--json").json["plans"]
    times = {row["name"]: row["iteration_s"] for row in found}
    compared = cli("compare", *ARGUMENTS, "--strategy", "strategy.json", "--json").json["plans"]
    every = {row["name"]: row["iteration_s"] for row in compared if row["name"] != "strategy.json"}
    assert every["pipeline"] < every["placement"]
    times |= {"pipeline": every["pipeline"]}  # it has microbatches, which no plan of the search over splits has
    assert every == times
    assert {row.name: row.simulation.makespan_s for row in compare(alexnet().graph, alexnet().topology)} == times
    for name, expected in times.items():
        assert cli("simulate", *ARGUMENTS, "--baseline", name, "--json").json["iteration_s"] == expected
        assert cli("diff", "strategy.json", name, "--json").json["plans"][1]["iteration_s"] == expected


def test_speed_ups_are_over_the_tuned_data_parallelism_and_over_one_device(cli: Cli) -> None:
    rows = cli("compare", *ARGUMENTS, "--json").json["plans"]
    times = {row["name"]: row["iteration_s"] for row in rows}
    for row in rows:
        assert row["speedup_vs_data_parallel"] == times["data-parallel"] / row["iteration_s"]
        assert row["speedup_vs_single"] == times["single"] / row["iteration_s"]
    one = cli("simulate", *ARGUMENTS, "--baseline", "megatron", "--json").json
    assert one["speedup_vs_single"] == times["single"] / times["megatron"]


# ---- the name of the answer


def answer(margin: float = 0.05, options: Options | None = None) -> tuple[Setting, SearchResult]:
    setting = alexnet()
    return setting, setting.search(200, margin=margin, options=options)


def test_an_answer_that_differs_from_a_baseline_in_options_only_is_that_baseline() -> None:
    setting, result = answer(options=Options(bucket_bytes=777_777))
    plain = baselines(setting.graph, setting.topology)
    assert result.baseline == "one-weird-trick" and result.strategy.configs == plain["one-weird-trick"].configs
    assert result.strategy.options == setting.baseline("one-weird-trick").options != Options()
    assert result.strategy.search is not None and result.strategy.search.start == "one-weird-trick"
    assert result.simulation.makespan_s == result.baselines["one-weird-trick"].time_s
    assert setting.name_of(result.strategy) == "one-weird-trick"


def test_even_without_a_margin_a_baseline_is_never_called_found() -> None:
    graph, topology = cnn(batch=32, hidden=2048), ethernet(4)
    for proposals in (1, 200):
        result = search(graph, topology, Costs(graph, topology), proposals=proposals)
        same = [name for name, o in result.baselines.items() if o.strategy.configs == result.strategy.configs]
        assert bool(result.baseline) == bool(same)
        assert result.simulation.makespan_s <= min(o.time_s for o in result.baselines.values())


def test_optimize_names_the_baseline_in_words_and_has_no_row_of_its_own_for_it(cli: Cli) -> None:
    ran = cli("optimize", *ARGUMENTS, "--budget", 20)
    assert ran.code == 0 and "found  " not in ran.out
    assert "Best plan: the baseline one-weird-trick with gradient buckets of 1 MiB." in ran.out
    assert "These times are predictions" in ran.out
    data = cli("optimize", *ARGUMENTS, "--budget", 20, "--json").json
    assert data["plan"] == "one-weird-trick"
    assert [row["name"] for row in data["plans"]].count("one-weird-trick") == 1
    assert "found" not in {row["name"] for row in data["plans"]}
    (row,) = (row for row in data["plans"] if row["name"] == "one-weird-trick")
    assert (row["iteration_s"], row["bucket_bytes"]) == (data["iteration_s"], 2**20)


def test_optimize_says_how_much_a_found_plan_gains(cli: Cli) -> None:
    arguments = "optimize", "alexnet256", "-t", "p100:4", "--budget", 6000, "--margin", 0
    data = cli(*arguments, "--json").json
    assert data["plan"] == "found" == data["plans"][0]["name"]
    best = min(row["iteration_s"] for row in data["plans"][1:])
    assert data["iteration_s"] < best and data["set_aside_s"] is None
    out = " ".join(cli(*arguments).out.split())
    assert "found by the search;" in out and "as fast as the best baseline" in out
    plan = out[out.index("Best plan") : out.index("Predicted: ")]
    assert len(plan) < 1500


def test_the_difference_to_a_baseline_with_other_buckets_is_the_buckets(cli: Cli) -> None:
    setting = alexnet()
    plan = setting.baseline("one-weird-trick")
    options = Options(bucket_bytes=64 * 2**20)
    Strategy.make(setting.graph, setting.topology, plan.configs, options).save("mine.json")
    out = cli("diff", "mine.json", "one-weird-trick").out
    assert "A: mine.json (the baseline one-weird-trick)" in out and "gradient buckets" in out
    assert "differ in options" in out and "64 MiB" in out and "1 MiB" in out
    data = cli("diff", "mine.json", "one-weird-trick", "--json").json
    assert [one["baseline"] for one in data["plans"]] == ["one-weird-trick"] * 2
    assert not data["differences"] and len(data["options"]) == 1


def test_compare_and_diff_give_a_baseline_the_same_time_and_say_that_a_plan_is_one(cli: Cli) -> None:
    setting = alexnet()
    options = Options(bucket_bytes=64 * 2**20, optimizer="adam")
    plan = setting.baseline("one-weird-trick")
    relu = next(name for name in plan.configs if name.endswith("relu6"))  # without weights: it does nothing there
    sharded = plan.configs | {relu: replace(plan.configs[relu], states=States.WEIGHTS)}
    assert sharded != plan.configs
    Strategy.make(setting.graph, setting.topology, sharded, options).save("mine.json")
    rows = {row["name"]: row for row in cli("compare", "-s", "mine.json", "--json").json["plans"]}
    assert rows["mine.json"]["note"] == "the baseline one-weird-trick with gradient buckets of 64 MiB"
    assert not rows["one-weird-trick"]["note"]
    for name in ("one-weird-trick", "data-parallel"):
        _, baseline = cli("diff", "mine.json", name, "--json").json["plans"]
        assert baseline["iteration_s"] == rows[name]["iteration_s"]
    (own, _) = cli("diff", "mine.json", "data-parallel", "--json").json["plans"]
    assert own["iteration_s"] == rows["mine.json"]["iteration_s"] and own["baseline"] == "one-weird-trick"


# ---- pipelines


def gpt2() -> Setting:
    return Setting.of(OperatorGraph.load("gpt2"), Topology.load("p100:1"))


def with_memory(setting: Setting, nbytes: int) -> Setting:
    memory = {"memory_bytes": nbytes, "memory_fraction": 1.0}
    devices = tuple(d.model_copy(update=memory) for d in setting.topology.devices)
    return Setting.of(setting.graph, edited(setting.topology, devices=devices))


def test_a_pipeline_has_the_best_of_the_numbers_of_microbatches_and_schedules() -> None:
    setting = gpt2()
    found = setting.baseline("pipeline")
    times = {}
    kinds: tuple[ScheduleKind, ...] = ("gpipe", "1f1b", "zero-bubble")
    for count, schedule in product((2, 4, 8), kinds):
        other = Strategy.make(
            setting.graph, setting.topology, found.configs, found.options, stages=found.stages, microbatches=count,
            schedule=schedule,
        )  # fmt: skip
        times[count, schedule] = setting.step(other).makespan_s
    own = setting.step(found).makespan_s
    assert (found.microbatches, found.schedule) == (8, "zero-bubble") and own == min(times.values())
    placement = setting.row("placement", setting.baseline("placement"))
    assert own < 0.5 * placement.simulation.makespan_s


def test_a_pipeline_has_the_same_time_everywhere_and_is_saved_with_its_stages(cli: Cli) -> None:
    arguments = "gpt2", "-t", "p100:1"
    compared = cli("compare", *arguments, "--save", "pipeline", "-o", "pipeline.json", "--json").json
    row = next(row for row in compared["plans"] if row["name"] == "pipeline")
    assert row["note"] == "8 microbatches, zero bubble (ZB-H1)"
    assert cli("simulate", *arguments, "--baseline", "pipeline", "--json").json["iteration_s"] == row["iteration_s"]
    assert cli("simulate", "-s", "pipeline.json", "--json").json["iteration_s"] == row["iteration_s"]
    assert cli("compare", *arguments, "--save", "data-parallel", "-o", "parallel.json").code == 0
    _, other = cli("diff", "parallel.json", "pipeline", "--json").json["plans"]
    assert other["iteration_s"] == row["iteration_s"]


def test_replicas_inside_a_stage_are_no_tensor_parallelism() -> None:
    setting = Setting.of(OperatorGraph.load("gpt2"), Topology.load("p100:2"))
    told = {
        name: layout_words(setting.staged_row("", setting.baseline(name))).partition(",")[0]
        for name in ("data-parallel", "megatron", "data-parallel x megatron-2", "pipeline", "data-parallel x pipeline")
    }
    assert told == {
        "data-parallel": "data 8", "megatron": "tensor 8", "data-parallel x megatron-2": "tensor 2 x data 4",
        "pipeline": "pipeline 5", "data-parallel x pipeline": "pipeline 2 x data 4",
    }  # fmt: skip
    odd = setting.baseline("data-parallel")
    first = setting.graph.operators[0]
    configs = {**odd.configs, first.name: make_config(first, {}, range(8))}
    own = Strategy.make(setting.graph, setting.topology, configs, odd.options)
    assert layout_words(setting.staged_row("", own)) == "one stage on 8 devices"


def test_a_pipeline_that_does_not_fit_computes_again() -> None:
    setting = gpt2()
    kept = setting.step(setting.baseline("pipeline"))
    small = with_memory(setting, kept.fullest.peak - 10**8)
    found = small.baseline("pipeline")
    assert found.options.recompute != "none" and not small.step(found).missing


def test_the_stages_of_a_pipeline_are_those_of_its_placement() -> None:
    setting = Setting.of(OperatorGraph.load("gpt2"), Topology.load("p100:2"))
    for name, placement in PIPELINES.items():
        of_operator = {n: k for k, stage in enumerate(setting.baseline(name).stages) for n in stage.operators}
        seconds = whole_seconds(setting.graph, setting.costs)
        numbers = stage_of(placement, setting.graph, setting.topology, seconds)
        places = sorted(set(numbers))
        assert [places.index(k) for k in numbers] == [of_operator[op.name] for op in setting.graph.operators]
        devices = [set(config.devices) for config in setting.baseline(placement).in_order(setting.graph)]
        assert all((a == b) == (one == other) for (a, one), (b, other) in pairwise(zip(numbers, devices, strict=True)))


def test_a_pipeline_and_a_plan_of_one_stage_try_the_same_to_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    setting, lists = gpt2(), dict[str, list[Options]]()
    small = with_memory(setting, 10**8)  # nothing fits
    outcome, use = Variants.outcome, Evaluator.use

    def tried(variants: Variants, plan: Plan) -> Outcome:
        lists.setdefault("pipeline", []).append(plan.options)
        return outcome(variants, plan)

    def used(evaluate: Evaluator, options: Options) -> None:
        lists.setdefault("data-parallel", []).append(options)
        use(evaluate, options)

    monkeypatch.setattr(Variants, "outcome", tried)
    pipeline = small.baseline("pipeline")
    monkeypatch.setattr(Evaluator, "use", used)
    parallel = small.baseline("data-parallel")
    saving = {name: {o.recompute for o in row} - {"none"} for name, row in lists.items()}
    assert saving == {"pipeline": {"attention", "full"}, "data-parallel": {"attention", "full"}}
    assert pipeline.options.recompute == parallel.options.recompute == "none"  # as they are, where nothing fits


def test_a_model_without_microbatches_has_no_pipeline() -> None:
    setting = Setting.of(OperatorGraph.load("resnet50"), Topology.load("p100:1"))
    assert "placement" in setting.baselines() and "pipeline" not in setting.baselines()
    with pytest.raises(StrategyError, match=r"microbatches: 2: operator 'bn1\.statistics' takes statistics"):
        setting.baseline("pipeline")


# ---- what an answer says


@pytest.mark.parametrize(("proposals", "few"), [(5, True), (3000, False)])
def test_a_search_that_has_hardly_begun_says_so(cli: Cli, proposals: int, few: bool) -> None:
    arguments = "optimize", *ARGUMENTS, "--budget", proposals, "-j", 1
    data = cli(*arguments, "--json").json
    assert data["few_proposals"] == few
    out = " ".join(cli(*arguments).out.split())
    assert ("Only 5 proposals in" in out and "nothing better than the baselines has been found yet" in out) == few
    assert not (few and "found nothing" in out)


def test_a_search_that_has_hardly_begun_tells_of_the_faster_plan_that_it_did_not_choose() -> None:
    graph, topology = mlp(), ethernet(2)
    result = search(graph, topology, Costs(graph, topology), proposals=1, processes=1)
    own = result.simulation.estimate
    aside = replace(own, seconds=0.99 * own.seconds)
    result = replace(result, baseline="data-parallel", bound_s=0.0, alternatives=10**6, locally_optimal=False)
    assert result.few
    assert "was not chosen" in _what_it_is(replace(result, set_aside=aside))
    assert "there may well be better plans" in _few(replace(result, set_aside=aside))
    assert "found" not in _what_it_is(replace(result, set_aside=None))


@pytest.mark.parametrize(("share", "goes_on"), [(0.98, True), (0.992, False), (1.0, False)])
def test_more_time_is_advised_only_where_there_is_something_to_gain(share: float, goes_on: bool) -> None:
    graph, topology = mlp(), ethernet(2)
    result = search(graph, topology, Costs(graph, topology), proposals=1, processes=1)
    text = _few(replace(result, bound_s=share * result.simulation.makespan_s))
    assert "Only 1 proposals" in text
    assert ("Give the search more time" in text) == goes_on
    assert ("no plan in this space is 1 % faster" in text) != goes_on


# ---- compare --save


@pytest.mark.parametrize("name", ["data-parallel", "one-weird-trick", "single"])
def test_compare_saves_a_baseline_that_is_the_same_plan_again(cli: Cli, name: str) -> None:
    ran = cli("compare", *ARGUMENTS, "--save", name, "-o", "mine.json", "--json")
    assert ran.code == 0, ran.err
    assert (ran.json["saved"], ran.json["path"]) == (name, "mine.json")
    assert "The plans are the same" in cli("diff", "mine.json", name).out
    prediction = Strategy.load("mine.json").prediction
    assert prediction is not None
    assert prediction.iteration_s == next(r["iteration_s"] for r in ran.json["plans"] if r["name"] == name)


def test_compare_saves_under_the_name_of_the_baseline(cli: Cli) -> None:
    ran = cli("compare", "lenet", "-t", "p100:2", "--save", "data-parallel x megatron")
    assert ran.code == 0 and "Wrote data-parallel x megatron to data-parallel-x-megatron.json" in ran.out
    assert Path("data-parallel-x-megatron.json").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--save", "magic"), "magic"),
        (("--save", "layer-wise"), "does not apply"),
        (("-o", "x.json"), "--save"),
        (("--save", "single", "-o", "."), "folder"),
    ],
)
def test_a_wrong_save_is_refused_and_writes_nothing(cli: Cli, arguments: tuple[str, ...], words: str) -> None:
    ran = cli("compare", "lenet", "-t", "ethernet-1g-2", *arguments)
    assert ran.code == 2 and words in ran.err and not ran.out
    assert not list(Path().iterdir())


def test_a_plan_with_a_better_size_than_the_usual_ones_keeps_it() -> None:
    setting = Setting.of(OperatorGraph.load("inception_v3"), Topology.load("p100:2"))

    def iteration_s(plan: Strategy) -> float:
        return setting.row("", plan).simulation.makespan_s

    usual = {name: setting.baseline(name) for name in ("hsdp", "one-weird-trick", "data-parallel", "fsdp")}
    plans = {
        (name, size): Strategy.make(setting.graph, setting.topology, plan.configs, Options(bucket_bytes=size))
        for name, plan in usual.items()
        for size in (k * 2**18 for k in (5, 6, 7, 9, 10, 11, 12, 13))
    }
    (name, size), best = min(plans.items(), key=lambda item: iteration_s(item[1]))
    best_s = iteration_s(best)
    assert best_s < min(map(iteration_s, usual.values()))
    result = setting.search(1, start=best, margin=0.0, options=best.options)
    assert (result.baseline, result.strategy.options.bucket_bytes) == (name, size)
    assert result.simulation.makespan_s == best_s == result.baselines[name].time_s
    assert result.baselines[name].simulation.makespan_s == best_s


def test_a_baseline_that_does_not_fit_computes_again_and_search_and_compare_say_the_same() -> None:
    whole = gpt2()
    kept = whole.baseline("fsdp")
    full = kept.options.model_copy(update={"recompute": "full"})
    again = Strategy.make(whole.graph, whole.topology, kept.configs, full)
    small = with_memory(whole, (whole.step(kept).fullest.peak + whole.step(again).fullest.peak) // 2)
    fsdp = small.baseline("fsdp")
    assert kept.options.recompute == "none" and fsdp.options.recompute != "none" and not small.step(fsdp).missing
    result = search(small.graph, small.topology, small.costs, proposals=20, processes=1)
    assert result.feasible and result.strategy.options.recompute == fsdp.options.recompute
    for name, strategy in small.baselines().items():
        if name in result.baselines:
            assert result.baselines[name].strategy.options == strategy.options, name
            assert result.baselines[name].time_s == small.step(strategy).makespan_s, name


def test_what_the_user_says_of_recomputation_stays() -> None:
    small = with_memory(gpt2(), 10**8)
    assert small.baseline("fsdp", Options(recompute="attention")).options.recompute == "attention"
    assert small.baseline("fsdp").options.recompute == "none"  # nothing fits
    assert small.baseline("pipeline", Options(recompute="attention")).options.recompute == "attention"
