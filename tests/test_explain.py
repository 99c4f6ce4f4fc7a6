"""Explanations are true: the critical path has no gap, and every number is that of a whole simulation."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexsearch import zoo
from flexsearch.cost import Costs
from flexsearch.errors import NotationError, StrategyError
from flexsearch.graph import OperatorGraph
from flexsearch.graph.batch import microbatch, with_batch
from flexsearch.graph.importer import import_model
from flexsearch.graph.precision import with_precision
from flexsearch.lower import Lowered, Lowering, TaskGraph, lower_for_ranks
from flexsearch.lower.schedule import Stages
from flexsearch.report.choices import operator_choice, operator_data
from flexsearch.report.differences import comparison_data
from flexsearch.report.explain import explanation
from flexsearch.report.path import SCREEN, by_layer, stretches
from flexsearch.report.tables import dominates
from flexsearch.search.alternatives import alternatives, single_changes
from flexsearch.search.space import Space
from flexsearch.setting import Setting
from flexsearch.simulate import Step, by_kind, by_resource, critical_path, device_times, makespan, simulate
from flexsearch.simulate.effects import Effects
from flexsearch.simulate.whatif import WhatIf, link_classes, what_ifs
from flexsearch.strategy import Options, States, Strategy, make_config
from flexsearch.strategy.baselines import baseline, baselines
from flexsearch.topology import Topology
from flexsearch.topology.kernels import USUAL, USUAL_LAUNCHES
from tests.conftest import Cli
from tests.random_strategies import strategies
from tests.test_baselines import Builder, cnn, mlp, transformer, with_kernels
from tests.test_delta import TOPOLOGIES

# ---- the critical path


def check_path(tasks: TaskGraph, steps: tuple[Step, ...], total: float, start: Any, end: Any) -> None:
    """From 0 to the makespan without a gap, and each step was waited for by the next for the reason that it gives."""
    assert (steps[0].begin, steps[-1].end, end[steps[-1].task]) == (0.0, total, total)
    for step in steps:
        assert step.end >= step.begin
        if tasks.turn[step.task] == inf and not step.moves_bytes and not step.launches:
            assert step.begin == start[step.task]
    for one, after in pairwise(steps):
        assert one.end == after.begin  # to the bit
        assert one.launches == (after.why == "host") and not after.launches
        if one.launches:
            assert one.task == after.task and one.begin == 0.0 and one.end == tasks.launched[one.task]
        elif after.why in ("data", "order"):
            assert one.task in tasks.dependencies[after.task] and one.end == end[one.task]
            assert (after.why == "order") == (tasks.device[one.task] == tasks.device[after.task] >= 0)
        elif after.why == "turn":
            assert one.task == after.task
        else:
            held = {r for r, _ in (tasks.drag if one.moves_bytes else tasks.links)[one.task]}
            wanted = {r for r, _ in (tasks.drag if after.moves_bytes else tasks.links)[after.task]}
            assert after.resource in held & wanted


@settings(derandomize=True, max_examples=40, deadline=None)
@given(st.data(), st.sampled_from(sorted(TOPOLOGIES)), st.sampled_from([cnn, mlp, transformer]))
def test_the_critical_path_of_any_plan_has_no_gap_and_its_parts_add_up_to_the_iteration(
    data: Any, name: str, made: Any
) -> None:
    graph, topology = made(), TOPOLOGIES[name]()
    strategy = data.draw(strategies(graph, topology))
    everyone = tuple(range(len(topology.devices)))
    stages = data.draw(st.sampled_from([Stages.one(len(everyone)), Stages((0, 3), (everyone, everyone), 3)]))
    lowering = Lowering(graph, topology, Costs(graph, topology))
    lowered = lowering.lower(strategy.in_order(graph), strategy.options, stages)
    simulation = simulate(lowered)
    assert simulation.makespan_s == makespan(lowered)
    steps, total = critical_path(lowered), simulation.makespan_s
    check_path(lowered.tasks, steps, total, simulation.start, simulation.end)
    assert sum(by_kind(lowered.tasks, steps).values()) == pytest.approx(total)
    assert sum(sum(row.values()) for row in by_layer(lowered, steps).values()) == pytest.approx(total)
    assert sum(by_resource(lowered.tasks, steps).values()) <= total * (1 + 1e-12)
    for time, busy in zip(device_times(lowered.rows, simulation.times), simulation.busy_s, strict=True):
        assert time.compute_s == busy
        assert time.compute_s + time.communicate_s + time.host_s + time.idle_s == pytest.approx(total)
        assert time.host_s == 0.0 or lowered.rows.machine.hosted[0]


def test_a_wait_for_a_busy_link_and_for_a_processor_that_moves_bytes_is_told() -> None:
    topology = TOPOLOGIES["unequal hosts that move bytes by CPU"]()
    found = set()
    for graph in (mlp(), cnn()):
        setting = Setting.of(graph, topology)
        for strategy in baselines(setting.graph, setting.topology, Options(bucket_bytes=1)).values():
            steps = critical_path(setting.lower(strategy))
            found |= {(step.why, step.moves_bytes) for step in steps}
    assert {("link", False), ("order", False), ("data", False), ("data", True)} <= found


@pytest.mark.parametrize("name", ["data-parallel", "megatron", "fsdp"])
def test_a_long_path_is_told_on_one_screen_without_losing_time(name: str) -> None:
    setting = Setting.of(OperatorGraph.load("gpt2"), Topology.load("p100:1"))
    lowered = setting.lower(setting.baseline(name))
    steps = critical_path(lowered)
    told = stretches(lowered, steps)
    assert len(told) <= SCREEN + 1
    assert sum(row.seconds for row in told) == pytest.approx(makespan(lowered))
    assert sorted(step.begin for row in told for step in row.steps) == [step.begin for step in steps]
    assert any("blocks.0-11." in layer for layer in by_layer(lowered, steps, repeated=True))


# ---- what would help


def lowered_plan(setting: Setting, name: str, **options: Any) -> tuple[Lowered, Lowering]:
    strategy = baseline(name, setting.graph, setting.topology, Options(**options))
    lowering = Lowering(setting.graph, setting.topology, setting.costs)
    return lowering.lower([strategy.configs[op.name] for op in setting.graph.operators], strategy.options), lowering


def edited(topology: Topology, **parts: Any) -> Topology:
    fields = {field: getattr(topology, field) for field in Topology.model_fields}
    return Topology(**fields | {k: tuple(v) if isinstance(v, list) else v for k, v in parts.items()})


def test_a_step_that_is_bound_by_its_host_says_so() -> None:
    """A small model on a GPU: its host takes longer to launch operators than the GPU to run them."""
    graph, topology = mlp(), Topology.load("p100:1")
    costs, strategy = Costs(graph, topology), baseline("single", graph, topology)
    lowered = Lowering(graph, topology, costs).lower(strategy.in_order(graph), strategy.options)
    simulation = simulate(lowered)
    device = next(iter(lowered.devices))
    launches = sum(sum(costs.launches(k)[:2]) for k in range(len(graph.operators)))
    launches += sum(t.kind == "parameter" for t in graph.tensors)  # the update
    launches += USUAL_LAUNCHES.communication  # the loss goes to the other devices
    assert simulation.makespan_s == pytest.approx(launches * topology.devices[device].launch_s, rel=1e-3)
    (first, *_), time = critical_path(lowered), device_times(lowered.rows, simulation.times)[device]
    assert first.launches and first.seconds > 0.9 * simulation.makespan_s
    waited = simulation.makespan_s - time.compute_s - time.communicate_s  # the loss is sent meanwhile
    assert time.host_s == pytest.approx(waited, rel=0.01) and time.host_s > 0.7 * simulation.makespan_s
    assert dominates(lowered, simulation).startswith("launching operators (host)")
    told = stretches(lowered, critical_path(lowered))[0]
    assert (told.phase, told.where) == ("launch", "host")
    words = [part for part in explanation(Setting.of(graph, topology).explain(strategy, tries=1)) if type(part) is str]
    assert any(part.startswith("\nThe bottleneck: hosts, which launch operators for 100 %") for part in words)


def scaled(things: Any, **factors: float) -> tuple[Any, ...]:
    def times_(value: Any, factor: float) -> Any:
        return {k: v * factor for k, v in value.items()} if isinstance(value, dict) else value * factor

    return tuple(
        type(x)(**{f: times_(getattr(x, f), factors.get(f, 1)) if f in factors else getattr(x, f)
                   for f in type(x).model_fields}) for x in things
    )  # fmt: skip


def asked(lowered: Lowered) -> list[WhatIf]:
    """All that is asked about a plan, each once."""
    found = [ask() for ask in what_ifs(lowered, None)]
    assert len({one.change for one in found}) == len(found)
    return found


@pytest.mark.parametrize(("name", "plan"), [("ethernet-1g-4", "fsdp"), ("p100:2", "megatron"), ("k80:1", "fsdp")])
def test_what_ifs_are_simulations_of_the_changed_setting(name: str, plan: str) -> None:
    graph, topology = OperatorGraph.load("alexnet"), Topology.load(name)
    setting = Setting.of(graph, topology)
    lowered, lowering = lowered_plan(setting, plan)
    found = {one.change: one for one in asked(lowered)}
    communication = topology.communication
    half = communication.model_copy(update={
        "overhead_s": communication.overhead_s / 2, "message_s": communication.message_s / 2,
        "groups": scaled(communication.groups, startup_s=0.5),
    })  # fmt: skip
    hosted = topology.devices[0].launch_s > 0.0
    slow = {} if hosted else {"overhead_s": 0.5}  # launching is no computing where a host does it
    fast = scaled(topology.devices, flops=2, memory_bandwidth=2, **slow)
    (first, *_), everywhere = link_classes(topology), "bandwidth x2"
    some = scaled(topology.links, bandwidth=2)
    for change, other in (
        ("nothing", topology),
        (everywhere if everywhere in found else f"{everywhere}: {first.name}", edited(topology, links=some)),
        ("latency / 2", edited(topology, links=scaled(topology.links, latency_s=0.5))),
        ("overhead / 2", edited(topology, communication=half)),
        ("compute x2", with_kernels(edited(topology, devices=fast), USUAL.overhead_s / 2)),
        *([("launches", edited(topology, devices=scaled(topology.devices, overhead_s=0)))] if hosted else []),
    ):
        again = Lowering(graph, other, Costs(graph, other)).lower(lowered.configs, lowered.options)
        assert found[change].seconds == pytest.approx(makespan(again), rel=1e-8), change
    whole = lowered.options.model_copy(update={"bucket_bytes": 10**12})
    assert found["one bucket"].seconds == makespan(lowering.lower(lowered.configs, whole))
    assert found["gradients at no cost"].seconds <= found["nothing"].seconds
    assert found["no overlap"].seconds >= found["gradients at no cost"].seconds


def test_gradients_that_are_sent_for_every_microbatch_can_all_be_sent_late() -> None:
    graph, topology = OperatorGraph.load("mlp"), Topology.load("ethernet-1g:2")
    plan = baseline("fsdp", graph, topology)
    configs = {name: config.sharded(States.GRADIENTS) for name, config in plan.configs.items()}
    strategy = Strategy.make(graph, topology, configs, plan.options, microbatches=4)
    lowered = lower_for_ranks(graph, strategy, topology, Costs(graph, topology))
    found = {one.change: one.seconds or 0.0 for one in asked(lowered)}
    assert found["gradients at no cost"] < found["nothing"] < found["no overlap"]


def test_an_odd_vocabulary_is_told_to_be_padded() -> None:
    """In half precision, on GPUs whose tensor cores read such rows slowly."""
    graph, topology = OperatorGraph.load("gpt2"), Topology.load("hgx-h100:1").subset([0])
    for precision, least, most in (("bf16", 0.1, 0.5), ("as-is", 0.0, 1e-6)):
        setting = Setting.of(with_precision(graph, precision), topology)  # type: ignore[arg-type]
        lowered, _ = lowered_plan(setting, "single", precision=precision)
        found = {one.change: one.seconds or 0.0 for one in asked(lowered)}
        assert least <= 1.0 - found["padding"] / found["nothing"] <= most, precision
    old, _ = lowered_plan(Setting.of(graph, Topology.load("p100:1")), "single")
    assert "padding" not in {one.change for one in asked(old)}


def test_every_link_is_in_one_class() -> None:
    for name in ("p100:4", "v100-nvlink-4", "ethernet-1g-4"):
        topology = Topology.load(name)
        wires = [r for r, x in enumerate(topology.resources) if x.kind == "link"]
        assert sorted(r for links in link_classes(topology) for r in links.resources) == wires
    named = Topology.load("ethernet-1g-8")
    names = dict(zip((d.name for d in named.devices), "abcdefgh", strict=True))
    odd = edited(
        named, devices=[d.model_copy(update={"name": names[d.name]}) for d in named.devices],
        links=[link.model_copy(update={"a": names[link.a]}) for link in named.links],
    )  # fmt: skip
    assert len(link_classes(odd)) == 1  # by bandwidth, where names tell nothing


ZOO = {
    "gpt2": lambda batch: zoo.gpt2(batch=batch, seq=8, layers=2, hidden=16, heads=2, vocab=32, device="meta"),
    "resnet50": lambda batch: zoo.resnet50(
        batch=batch, size=32, width=4, blocks=(1, 1, 1, 1), classes=8, device="meta"
    ),
}


@cache
def imported(name: str, batch: int, groups: int = 1) -> OperatorGraph:
    made = ZOO[name](batch)
    return import_model(made.model, made.inputs, made.loss, targets=made.targets, batch_norm_groups=groups)


@pytest.mark.parametrize(("name", "groups"), [("gpt2", 1), ("resnet50", 2)])
def test_a_graph_at_twice_the_batch_is_that_of_the_model_at_twice_the_batch(name: str, groups: int) -> None:
    larger, expected = with_batch(imported(name, 8, groups), 2), imported(name, 16, groups)
    assert larger.batch == expected.batch == 16
    assert {t.name: t.shape for t in larger.tensors} == {t.name: t.shape for t in expected.tensors}
    assert [op.sizes for op in larger.operators] == [op.sizes for op in expected.operators]
    topology = Topology.load("p100:1")
    pair = []
    for graph in (larger, expected):
        setting = Setting.of(graph, topology)
        pair.append(simulate(setting.lower(setting.baseline("data-parallel"))))
    assert pair[0].makespan_s == pair[1].makespan_s
    assert pair[0].peak_bytes == pair[1].peak_bytes


@pytest.mark.parametrize(("name", "groups"), [("gpt2", 1), ("resnet50", 2)])
def test_a_microbatch_is_the_graph_of_the_model_at_a_part_of_the_batch(name: str, groups: int) -> None:
    smaller, expected = microbatch(imported(name, 16, groups), 2), imported(name, 8, groups)
    assert {t.name: t.shape for t in smaller.tensors} == {t.name: t.shape for t in expected.tensors}
    assert [op.sizes for op in smaller.operators] == [op.sizes for op in expected.operators]
    with pytest.raises(NotationError, match="cannot be divided by 3"):
        microbatch(expected, 3)


def test_a_graph_that_mixes_the_batch_with_constants_is_refused_and_the_row_says_so() -> None:
    b = Builder("shifted")
    x = b.linear("fc", b.source("x", 8, 16), 12)
    x = b.add("shift", "pad", "(n-1) c -> n c", [x], [8, 12])
    graph = b.finish(x)
    with pytest.raises(NotationError, match="'shift' mixes the batch with constants") as error:
        with_batch(graph, 2)
    assert error.value.remedy == "Import the model again with that batch."
    setting = Setting.of(graph, Topology.load("ethernet-1g-2"))
    lowered, _ = lowered_plan(setting, "data-parallel")
    *_, batch = asked(lowered)
    assert batch.change == "batch x2" and batch.seconds is None and "'shift'" in batch.remark


# ---- alternatives


@pytest.mark.parametrize("name", ["ethernet-1g-4", "p100:1"])
def test_alternatives_take_the_time_of_a_whole_simulation(name: str) -> None:
    setting = Setting.of(cnn(), Topology.load(name))
    strategy = baseline("data-parallel", setting.graph, setting.topology, Options(bucket_bytes=1000))
    configs = tuple(strategy.configs[op.name] for op in setting.graph.operators)
    lowering, space = Lowering(setting.graph, setting.topology, setting.costs), Space(setting.graph, setting.topology)
    effects = Effects(lowering, configs, strategy.options)

    def fresh(changes: Mapping[int, Any]) -> float:
        plan = tuple(changes.get(i, c) for i, c in enumerate(configs))
        again = Lowering(setting.graph, setting.topology, setting.costs)
        return makespan(again.lower(plan, strategy.options))

    assert effects.base_s == fresh({})
    seen = 0
    for operator in (space.leaders[0], space.leaders[-1]):
        for one in alternatives(space, effects, operator):
            assert one.alone_s == fresh({operator: one.config})
            if one.together_s is not None:
                assert one.together_s == fresh(one.followed)
                assert len(one.followed) > 1 and one.followed[operator] == one.config
            assert one.best_s == fresh(one.changes(operator))
            seen += 1
    assert seen > 10
    assert effects.seconds({}) == effects.base_s  # asking changed nothing


def test_the_best_alternative_comes_first_and_work_is_the_difference_of_sums() -> None:
    setting = Setting.of(OperatorGraph.load("alexnet"), Topology.load("ethernet-1g-4"))
    found = setting.choice(setting.baseline("data-parallel"), "classifier.fc6", most=3)
    assert [one.best_s for one in found.alternatives] == sorted(one.best_s for one in found.alternatives)
    best = found.shown[0][0]
    assert best.alternative.best_s < 0.6 * found.now_s  # fully connected layers should not be data parallel
    assert best.more.weights_s < -1.0  # as their gradients are large
    text = " ".join(str(part) for part in operator_choice(found) if isinstance(part, str))
    worse = len(found.alternatives) - sum(1 + n for _, n in found.shown)
    assert "A better one" in text and f"{worse} that are worse" in text
    rows = operator_data(found)["alternatives"]
    assert len(rows) == len(found.alternatives) and sum("more_weights_s" in row for row in rows) == 3


def test_memory_of_alternatives_is_told() -> None:
    graph, topology = OperatorGraph.load("alexnet"), Topology.load("ethernet-1g-4")
    small = edited(topology, devices=[d.model_copy(update={"memory_bytes": 600 * 10**6}) for d in topology.devices])
    setting = Setting.of(graph, small)
    strategy = setting.baseline("one-weird-trick")
    found = setting.choice(strategy, "classifier.fc6", most=None)
    assert {one.shortfall > 0 for one, _ in found.shown} == {True, False}
    for weighed, _ in found.shown:
        changes = weighed.alternative.changes(found.operator)
        plan = [changes.get(i, c) for i, c in enumerate(found.lowered.configs)]
        peak = max(simulate(Lowering(graph, small, setting.costs).lower(plan, strategy.options)).peak_bytes)
        assert weighed.shortfall == max(0, peak - 600 * 10**6)


def test_single_changes_that_help_are_found_and_an_optimum_is_called_one() -> None:
    setting = Setting.of(OperatorGraph.load("lenet"), Topology.load("ethernet-1g-2"))
    space, lowering = Space(setting.graph, setting.topology), Lowering(setting.graph, setting.topology, setting.costs)
    configs = [setting.baseline("data-parallel").configs[op.name] for op in setting.graph.operators]
    for _ in range(60):  # steepest descent
        effects = Effects(lowering, tuple(configs), Options())
        *_, (tried, changes) = single_changes(space, effects, 10**6)
        assert tried == changes.tried == changes.possible
        if not changes.improvements:
            break
        best = changes.improvements[0]
        members = space.groups.get(best.operator, ()) if best.together else ()
        configs[best.operator] = best.config
        for source, member, link in members:
            configs[member] = space.propagation.over(source, configs[source], link)
        assert makespan(lowering.lower(configs, Options())) == best.seconds < effects.base_s
    assert not changes.improvements
    *_, (tried, changes) = single_changes(space, effects, 7)
    assert tried == changes.tried == 7 < changes.possible
    *_, (tried, changes) = single_changes(space, effects, 0)
    assert tried == changes.tried == 0 < changes.possible


# ---- differences


@settings(derandomize=True, max_examples=12, deadline=None)
@given(st.data(), st.sampled_from(["slow hosts", "unequal hosts that move bytes by CPU", "shared processors"]))
def test_single_effects_of_differences_are_those_of_whole_simulations(data: Any, name: str) -> None:
    graph, topology = cnn(), TOPOLOGIES[name]()
    setting = Setting.of(graph, topology)
    a, b = data.draw(strategies(graph, topology)), data.draw(strategies(graph, topology))
    found = setting.difference(a, b)

    def seconds(one: Strategy, other: Strategy, operators: tuple[int, ...]) -> float:
        names = {graph.operators[i].name for i in operators}
        mixed = {n: (other if n in names else one).configs[n] for n in one.configs}
        return makespan(setting.lower(Strategy.make(graph, topology, mixed, one.options)))

    changed = [i for i, op in enumerate(graph.operators) if a.configs[op.name] != b.configs[op.name]]
    assert sorted(i for one in found.differences for i in one.operators) == changed
    for one in found.differences:
        assert one.a_changed_s == seconds(a, b, one.operators)
        assert one.b_changed_s == seconds(b, a, one.operators)
    assert len(found.options) == (a.options != b.options)
    for option in found.options:
        assert option.a_changed_s == makespan(setting.lower(Strategy.make(graph, topology, a.configs, b.options)))
    data_ = comparison_data(found)
    assert [plan["iteration_s"] for plan in data_["plans"]] == [makespan(setting.lower(s)) for s in (a, b)]


def test_layers_that_change_alike_are_one_difference() -> None:
    graph, topology = OperatorGraph.load("alexnet"), Topology.load("ethernet-1g-4")
    setting = Setting.of(graph, topology)
    plain, trick = (baseline(name, graph, topology) for name in ("data-parallel", "one-weird-trick"))
    (one,) = setting.difference(plain, trick).differences
    assert {graph.operators[i].name for i in one.operators} >= {f"classifier.fc{k}" for k in (6, 7, 8)}
    assert one.a_changed_s == makespan(setting.lower(trick))
    assert not setting.difference(plain, plain).differences


def test_an_optimizer_that_differs_is_an_option_with_a_price() -> None:
    setting = Setting.of(mlp(), Topology.load("ethernet-1g-2"))
    plain, adam = (setting.baseline("data-parallel", Options(optimizer=o)) for o in ("sgd", "adam"))  # type: ignore[arg-type]
    (option,) = setting.difference(plain, adam).options
    assert (option.a, option.b) == ("sgd", "adam")
    assert option.a_changed_s == makespan(setting.lower(adam)) > makespan(setting.lower(plain))


# ---- the commands


@pytest.fixture
def plans(tmp_path: Path) -> Path:
    """found.json (half of LeNet on one host), trick.json and plain.json for two hosts; mlp.json; lenet4.json."""
    graph, topology = OperatorGraph.load("lenet"), Topology.load("ethernet-1g-2")
    setting = Setting.of(graph, topology)
    setting.baseline("data-parallel").save(tmp_path / "plain.json")
    baseline("megatron", graph, topology, Options(bucket_bytes=1000)).save(tmp_path / "megatron.json")
    configs = dict(setting.baseline("data-parallel").configs)
    for op in graph.operators[7:]:
        configs[op.name] = make_config(op, {}, [1])
    Strategy.make(graph, topology, configs).save(tmp_path / "half.json")
    for name, net, cluster in (("mlp", "mlp", "ethernet-1g-2"), ("lenet4", "lenet", "ethernet-1g-4")):
        Setting.of(OperatorGraph.load(net), Topology.load(cluster)).baseline("data-parallel").save(
            tmp_path / f"{name}.json"
        )
    return tmp_path


def test_explain_tells_people_and_programs_the_same(cli: Cli, plans: Path) -> None:
    ran = cli("explain", "half.json", "--tries", 60)
    assert ran.code == 0, ran.err
    for words in (
        "lenet (0.0617 M parameters, batch 64) on ethernet-1g", "The plan:", "Where the time goes",
        "The critical path:", "The bottleneck: ", "What would help", "twice the bandwidth",
        "twice the batch (128), time per 64", "What each choice brings", "on host1", "60 of ",
    ):  # fmt: skip
        assert words in ran.out, words
    assert max(map(len, ran.out.splitlines()[2:])) <= 100
    assert len(ran.out.splitlines()) < 100
    data = cli("explain", "half.json", "--tries", 60, "--json").json
    graph = OperatorGraph.load("lenet")
    strategy = Strategy.load("half.json")
    assert data["iteration_s"] == makespan(Setting.of(graph, strategy.cluster).lower(strategy))
    steps = data["critical_path"]["steps"]
    assert (steps[0]["begin_s"], steps[-1]["end_s"]) == (0.0, data["iteration_s"])
    assert data["what_if"][0] == {
        "change": "nothing", "words": "as it is", "iteration_s": data["iteration_s"], "shortfall_bytes": 0, "remark": ""
    }  # fmt: skip
    assert len(data["devices"]) == 2 and data["single_changes"]["tried"] == 60
    assert any(choice["treatment"] == "on host1" for choice in data["choices"])


def test_explain_an_operator(cli: Cli, plans: Path) -> None:
    ran = cli("explain", "half.json", "--operator", "fc3")
    assert ran.code == 0, ran.err
    assert "fc3 (linear): on host1" in ran.out and "What follows it: relu_2" in ran.out
    assert max(map(len, ran.out.splitlines()[1:])) <= 100
    data = cli("explain", "half.json", "--operator", "fc3", "--json", "--all").json
    assert data["operator"] == "fc3" and data["followed_by"][0] == "relu_2"
    assert {"treatment": "on host0"}.items() <= next(
        row for row in data["alternatives"] if row["devices"] == [0]
    ).items()
    assert cli("explain", "half.json", "--operator", "relu_2").out.count("It follows fc3") == 1


def test_diff_tells_people_and_programs_the_same(cli: Cli, plans: Path) -> None:
    ran = cli("diff", "half.json", "megatron.json")
    assert ran.code == 0, ran.err
    assert "A: half.json" in ran.out and "gradient buckets" in ran.out and "is interaction" in ran.out
    assert max(map(len, ran.out.splitlines()[1:])) <= 100
    data = cli("diff", "half.json", "megatron.json", "--json").json
    assert [plan["name"] for plan in data["plans"]] == ["half.json", "megatron.json"]
    assert data["options"][0]["option"] == "gradient buckets"
    for plan, (low, high) in zip(data["plans"], data["intervals_s"], strict=True):
        assert low < plan["iteration_s"] < high
    apart = abs(data["plans"][0]["iteration_s"] - data["plans"][1]["iteration_s"]) >= data["apart_s"]
    words = "tell them apart from a difference of" if apart else "cannot tell which is faster"
    assert words in " ".join(ran.out.split())
    assert "The plans are the same" in cli("diff", "plain.json", "data-parallel").out


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (("no operator 'fc9'", "fc3"), ("explain", "half.json", "--operator", "fc9")),
        (("gone.json", "No such file"), ("explain", "gone.json")),
        (("gone.json", "No such file"), ("diff", "half.json", "gone.json")),
        (("not for 'mlp'", "half.json"), ("explain", "half.json", "--graph", "mlp")),
        (("no graph file alexnett",), ("explain", "half.json", "--graph", "alexnett")),
        (("mlp.json", "half.json", "same graph"), ("diff", "half.json", "mlp.json")),
        (("lenet4.json", "ethernet-1g", "same topology"), ("diff", "half.json", "lenet4.json")),
        (("neither a strategy file nor a baseline", "megatron"), ("diff", "half.json", "megatronn")),
        (("at least one", "strategy file"), ("diff", "single", "fsdp")),
        (("--tries",), ("explain", "half.json", "--tries", "-1")),
    ],
)
def test_wrong_input_ends_with_code_2_and_a_message(
    cli: Cli, plans: Path, words: tuple[str, ...], command: tuple[str, ...]
) -> None:
    ran = cli(*command)
    assert ran.code == 2 and not ran.out and "Traceback" not in ran.err
    for word in words:
        assert word in ran.err


def test_a_strategy_of_a_graph_that_is_not_shipped_needs_its_graph(cli: Cli, plans: Path) -> None:
    relu = {"target": "aten.relu.default", "args": [{"tensor": 0}]}
    data = mlp().model_dump(mode="json")
    for op in data["operators"]:
        op["attributes"] = relu if op["kind"] == "pointwise" else {}
    graph = OperatorGraph.model_validate_json(json.dumps(data))
    graph.save("mine.json")
    Setting.of(graph, Topology.load("ethernet-1g-2")).baseline("data-parallel").save("plan.json")
    refused = cli("explain", "plan.json")
    assert refused.code == 2 and "--graph" in refused.err
    assert cli("explain", "plan.json", "--graph", "mine.json", "--tries", 5).code == 0


def test_operators_are_found_by_name_only_where_that_is_clear() -> None:
    setting = Setting.of(OperatorGraph.load("alexnet"), Topology.load("ethernet-1g-2"))
    plan = setting.baseline("data-parallel")
    with pytest.raises(StrategyError, match=r"did you mean .*classifier\.fc6"):
        setting.choice(plan, "fc66")


def test_explaining_never_imports_torch(plans: Path) -> None:
    import subprocess
    import sys

    code = (
        "import sys\n"
        "from flexsearch.cli import main\n"
        "for command in (['explain', 'half.json', '--tries', '5'], ['explain', 'half.json', '--operator', 'fc3'],\n"
        "                ['diff', 'half.json', 'plain.json']):\n"
        "    sys.argv = ['flexsearch', *command, '--json']\n"
        "    try:\n"
        "        main()\n"
        "    except SystemExit as end:\n"
        "        assert not end.code, end.code\n"
        "print('torch' in sys.modules, file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=plans)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "False"


def test_numbers_of_the_path_are_those_of_the_engine() -> None:
    """The end of the path is the makespan that the engine gives without notes, also with turns."""
    topology = TOPOLOGIES["shared processors"]()
    setting = Setting.of(transformer(), topology)
    for strategy in setting.baselines().values():
        lowered = setting.lower(strategy)
        assert critical_path(lowered)[-1].end == makespan(lowered)
        assert np.isfinite([step.seconds for step in critical_path(lowered)]).all()
