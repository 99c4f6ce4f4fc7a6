"""What is told of plans with stages and microbatches: traces, memory over time, where the time goes, differences."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flexsearch import explaining
from flexsearch.errors import StrategyError
from flexsearch.lower import Lowered
from flexsearch.lower.schedule import orders_of
from flexsearch.report import trace as traces
from flexsearch.report.explain import explanation
from flexsearch.report.explanation_data import explanation_data
from flexsearch.report.layouts import usage
from flexsearch.report.trace import chrome_trace, save_simulated
from flexsearch.search.hybrid import Layout, LayoutSearch
from flexsearch.setting import Setting
from flexsearch.simulate import SORTS, critical_path, device_times, simulate
from flexsearch.simulate.memory import PARTS, memory_curves
from flexsearch.simulate.simulation import times_of
from flexsearch.simulate.usage import passes
from flexsearch.simulate.variants import Plan, Variants
from flexsearch.strategy import States, Strategy
from flexsearch.topology import Topology
from tests.conftest import Cli
from tests.test_hybrid import OPTIONS, decoder

LAYOUTS = {
    "gpipe": Layout(2, 2, 2, 4, "gpipe"),
    "1f1b": Layout(2, 2, 2, 4),
    "sharded": Layout(2, 1, 4, 4, states=States.WEIGHTS),
    "zero-bubble-v": Layout(1, 2, 2, 4, "zero-bubble-v", 2),
    "data": Layout(8, 1, 1, 2),
}


@cache
def setting() -> Setting:
    return Setting.of(decoder(), Topology.load("dgx-a100:1"))


@cache
def plan(name: str) -> Strategy:
    search = LayoutSearch(setting().graph, setting().topology, OPTIONS, None, 1e9, None)
    candidate = search.evaluate(LAYOUTS[name], OPTIONS)
    assert candidate is not None
    named = {op.name: c for op, c in zip(setting().graph.operators, candidate.configs, strict=True)}
    pipeline = candidate.pipeline
    return Strategy.make(
        setting().graph, setting().topology, named, OPTIONS, microbatches=pipeline.microbatches,
        stages=pipeline.stages(setting().graph, 8 // pipeline.replicas), schedule=pipeline.schedule,
    )  # fmt: skip


@cache
def lowered(name: str) -> Lowered:
    return setting().lower(plan(name))


# ---- passes and times


@pytest.mark.parametrize("name", LAYOUTS)
def test_passes_follow_each_other_in_the_order_of_the_schedule(name: str) -> None:
    one = lowered(name)
    found = passes(one, times_of(one.rows))
    held, orders = orders_of(one.stages)
    for d in one.devices:
        row = [p for p in found if p.device == d]
        rank = held.index(tuple(s for s, devices in enumerate(one.stages.devices) if d in devices))
        assert [p.action for p in row] == list(orders[rank])
        assert all(a.end <= b.begin for a, b in pairwise(row))


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_devices_do_is_what_the_tasks_say_at_every_moment(name: str) -> None:
    one = lowered(name)
    simulation, tasks = simulate(one), one.tasks
    order = tuple(SORTS)
    groups = [tuple(s for s, of in enumerate(one.stages.devices) if d in of) for d in range(len(one.topology.devices))]
    edges = np.unique(np.concatenate([[0.0], simulation.start, simulation.end]))
    found: list[Counter[str]] = [Counter() for _ in groups]
    doing: list[list[tuple[int, str, float, float]]] = [[] for _ in groups]
    for task, what in enumerate(tasks.communication):
        span = float(simulation.start[task]), float(simulation.end[task])
        if what is None:
            doing[tasks.device[task]].append((-1, "compute", *span))
            continue
        members = {*what.senders, *what.receivers}
        sort = {"gather": "gather", "regather": "gather", "synchronise": "synchronise"}.get(what.purpose) or (
            "pipeline" if len({groups[d] for d in members}) > 1 else "tensor"
        )
        for d in members:
            doing[d].append((order.index(sort), sort, *span))
    for d, rows in enumerate(doing):
        first = np.full(len(edges) - 1, len(order))
        for rank, _, start, end in rows:
            of = slice(np.searchsorted(edges, start), np.searchsorted(edges, end))
            first[of] = np.minimum(first[of], rank)
        for rank, length in zip(first.tolist(), np.diff(edges).tolist(), strict=True):
            found[d]["compute" if rank < 0 else (*order, "idle")[rank]] += length
    for time, row in zip(device_times(one.rows, simulation.times), found, strict=True):
        assert time.compute_s == pytest.approx(row["compute"])
        assert time.idle_s + time.host_s == pytest.approx(row["idle"], abs=1e-12)
        assert dict(time.exposed_s) == pytest.approx({s: row[s] for s in order if row[s] > 1e-15})


def test_shares_of_a_step_add_up_and_name_bubbles_apart_from_communication() -> None:
    step = setting().step(plan("1f1b"))
    shares = usage(step)
    assert sum(shares.values()) == pytest.approx(1.0)
    assert shares["bubbles"] == step.bubbles > 0.0 and shares["tensor"] + shares["pipeline"] > 0.0
    assert step.exposed == pytest.approx(sum(shares.get(sort, 0.0) for sort in SORTS))


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_critical_path_fills_the_step(name: str) -> None:
    steps = critical_path(lowered(name))
    assert steps[0].begin == 0.0 and all(a.end == b.begin for a, b in pairwise(steps))
    assert steps[-1].end == setting().step(plan(name)).makespan_s


# ---- memory


@pytest.mark.parametrize("name", LAYOUTS)
def test_memory_over_time_has_the_peak_that_is_reported_by_kind(name: str) -> None:
    one = lowered(name)
    curves = memory_curves(one, times_of(one.rows))
    reported = setting().step(plan(name)).memory
    assert [curve.peak for curve in curves] == list(reported)
    assert [curve.thinned(40).peak for curve in curves] == list(reported)
    for curve in curves:
        assert (np.diff(curve.times) >= 0.0).all() and (curve.use >= 0).all()
        assert len(curve.thinned(40).times) <= 40


def test_gpipe_keeps_more_activations_than_1f1b_and_sharded_weights_are_gathered() -> None:
    peaks = {name: setting().step(plan(name)).memory for name in LAYOUTS}
    assert peaks["gpipe"][0].activations > peaks["1f1b"][0].activations
    assert peaks["sharded"][0].gathered > 0 and peaks["1f1b"][0].gathered == 0


# ---- traces


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_trace_tells_every_task_of_every_microbatch_and_the_passes_above_them(name: str) -> None:
    one = lowered(name)
    simulation = simulate(one)
    events = json.loads(json.dumps(chrome_trace(one, simulation), allow_nan=False))["traceEvents"]
    tasks, actions = one.tasks, orders_of(one.stages)[1]
    for d in one.devices:
        row = sorted((e for e in events if e["ph"] == "X" and e["pid"] == 2 * d + 1), key=lambda e: (e["tid"], e["ts"]))
        computing = [e for e in row if e["tid"] == traces.TASKS]
        assert len(computing) == tasks.device.count(d)
        assert all(a["ts"] + a["dur"] <= b["ts"] * (1 + 1e-9) for a, b in pairwise(computing))
        names = {e["name"] for e in row if e["tid"] == traces.PASSES}
        assert names == {str(a) for a in next(o for o in actions if str(o[0]) in names)}
        assert names == {e["name"].split()[0] for e in computing} - {"update"}
        held = [e["args"] for e in events if e["ph"] == "C" and e["pid"] == 2 * d + 1]
        most = max(held, key=lambda args: sum(args.values()))
        assert most == {part: getattr(simulation.memory[d], part) for part in PARTS}
    named = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    titles, blocks = [named[2 * d + 1] for d in one.devices], LAYOUTS[name].data
    assert all(f"block 1 of {blocks}" in title for title in titles) == (blocks > 1)


def test_a_plan_of_too_many_tasks_is_traced_by_its_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "MOST_TASKS", 10)
    count = save_simulated(tmp_path / "t.json", lowered("1f1b"))
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert count == len(lowered("1f1b").tasks)
    assert {e["tid"] for e in events if e["ph"] == "X"} == {traces.PASSES}
    assert any(e["ph"] == "C" for e in events)


# ---- differences


def test_plans_that_take_over_every_difference_are_each_other() -> None:
    variants = Variants(setting().graph, setting().topology, None)
    plans = {name: Plan.of(plan(name), setting().graph) for name in ("gpipe", "1f1b", "sharded", "data")}
    for a in plans.values():
        assert not a.differing(a)
        for b in plans.values():
            changed = a
            for part in a.differing(b):
                changed = changed.having(part, b)
            changed = changed.splitting(range(len(a.configs)), b)
            assert variants.outcome(changed) == variants.outcome(b)
            assert changed.placed() == b.placed()


def test_a_difference_costs_what_the_plan_with_it_takes() -> None:
    other = replace(Plan.of(plan("1f1b"), setting().graph).pipeline, microbatches=8, schedule="gpipe")
    b = Strategy.make(
        setting().graph, setting().topology, plan("1f1b").configs, OPTIONS.model_copy(update={"recompute": "full"}),
        stages=plan("1f1b").stages, microbatches=8, schedule=other.schedule,
    )  # fmt: skip
    found: Any = setting().difference(plan("1f1b"), b)
    by_words = {one.words: one for one in found.differences}
    assert list(by_words) == ["schedule", "microbatches", "recomputation"]
    assert by_words["schedule"].values == ("1f1b", "gpipe")
    assert by_words["schedule"].outcomes[0].seconds == setting().step(plan("gpipe")).makespan_s
    more = Strategy.make(
        setting().graph, setting().topology, b.configs, OPTIONS, stages=b.stages, microbatches=8, schedule="gpipe"
    )
    assert by_words["recomputation"].outcomes[1].seconds == setting().step(more).makespan_s


def test_the_explanation_names_the_slowest_stage_and_what_other_choices_bring() -> None:
    told = setting().explain(plan("1f1b"), tries=3)
    text = " ".join(part for part in explanation(told) if isinstance(part, str))
    assert "is the slowest" in text and "bubbles" in text and "Memory of the fullest device" in text
    assert told.what_ifs[0].seconds == told.row.simulation.makespan_s == setting().step(plan("1f1b")).makespan_s
    layouts = {(one.part, one.instead): one.seconds for one in told.layouts}
    assert layouts["schedule", "gpipe"] == setting().step(plan("gpipe")).makespan_s
    assert {"schedule", "microbatches", "recompute", "sharding"} <= {part for part, _ in layouts}


def test_the_explanation_of_too_many_tasks_leaves_out_the_critical_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explaining, "MOST_TASKS", 10)
    told = setting().explain(plan("gpipe"), tries=0)
    parts = [part for part in explanation(told) if isinstance(part, str)]
    assert any("left out" in part for part in parts) and any("The bottleneck" in part for part in parts)
    assert explanation_data(told)["critical_path"] is None and told.layouts


def test_a_plan_with_orders_of_its_own_differs_in_its_schedule() -> None:
    one = plan("1f1b")
    orders = [" ".join(map(str, row)) for row in orders_of(lowered("1f1b").stages)[1]]
    own = Strategy.make(
        setting().graph, setting().topology, one.configs, OPTIONS, stages=one.stages, microbatches=one.microbatches,
        schedule="zero-bubble", orders=orders,
    )  # fmt: skip
    found: Any = setting().difference(own, plan("gpipe"))
    (only,) = found.differences
    assert (only.words, only.values) == ("schedule", ("its own", "gpipe"))
    assert [outcome.seconds for outcome in only.outcomes] == [
        setting().step(plan("gpipe")).makespan_s, setting().step(own).makespan_s
    ]  # fmt: skip
    assert {str(p.action) for p in passes(setting().lower(own), times_of(setting().lower(own).rows))} == {
        action for row in orders for action in row.split()
    }


# ---- what a strategy's check refuses


@pytest.mark.parametrize(
    ("change", "message", "remedy"),
    [
        ({"schedule": "zero-bubble-v"}, "schedule: zero-bubble-v cannot run the stages", "stages r and 3 - r"),
        ({"schedule": "zero-bubble", "microbatches": 8, "name": "zero-bubble-v"}, "schedule: zero-bubble", "in turn"),
        ({"schedule": "dualpipe-v", "microbatches": 2, "name": "zero-bubble-v"}, "microbatches: dualpipe-v", "4 micro"),
        ({"schedule": "1f1b", "name": "zero-bubble-v"}, "schedule: 1f1b cannot run the stages", "follow each other"),
    ],
)
def test_a_schedule_that_does_not_fit_the_stages_is_refused_with_the_remedy(
    change: Mapping[str, Any], message: str, remedy: str
) -> None:
    one = plan(change.get("name", "1f1b"))
    with pytest.raises(StrategyError, match=message) as error:
        Strategy.make(
            setting().graph, setting().topology, one.configs, OPTIONS, stages=one.stages,
            microbatches=change.get("microbatches", one.microbatches), schedule=change["schedule"],
        )  # fmt: skip
    assert remedy in error.value.remedy


# ---- the commands


@pytest.fixture
def files(cli: Cli) -> None:
    setting().graph.save("g.json")
    for name in ("1f1b", "gpipe"):
        plan(name).save(f"{name}.json")
    setting().baseline("megatron").save("megatron.json")


def test_every_command_answers_for_staged_plans(cli: Cli, files: None) -> None:
    ran = cli("simulate", "g.json", "-s", "1f1b.json", "--trace", "t.json")
    assert ran.code == 0 and "bubbles" in ran.out and "t.json" in ran.out, ran.err
    assert json.loads(Path("t.json").read_text())["otherData"]["blocks"] == 2
    plans = [x for name in ("gpipe", "1f1b", "megatron") for x in ("-s", f"{name}.json")]
    ran = cli("compare", "g.json", "-t", "dgx-a100:1", *plans, "--json")
    assert ran.code == 0, ran.err
    rows = {row["name"]: row for row in ran.json["plans"]}
    assert rows["megatron.json"]["iteration_s"] == simulate(setting().lower(Strategy.load("megatron.json"))).makespan_s
    assert rows["1f1b.json"]["bubbles"] > 0.0 == rows["megatron.json"]["missing_bytes"]
    ran = cli("diff", "gpipe.json", "1f1b.json", "-g", "g.json")
    assert ran.code == 0 and "GPipe" in ran.out and "bubbles" in ran.out, ran.err
    ran = cli("explain", "1f1b.json", "-g", "g.json", "--tries", "2", "--json")
    assert ran.code == 0 and len(ran.json["stages"]) == 2 and ran.json["layouts"], ran.err
    operator = next(op.name for op in setting().graph.operators if op.kind == "linear")
    ran = cli("explain", "1f1b.json", "-g", "g.json", "--operator", operator, "--json")
    assert ran.code == 0 and ran.json["alternatives"], ran.err
    devices = set(plan("1f1b").stages[0].positions)
    assert all(set(one["devices"]) <= devices for one in ran.json["alternatives"])


def test_memory_over_time_and_timelines_are_drawn(cli: Cli, files: None) -> None:
    for more in (["--what", "memory-over-time", "--beside", "gpipe.json"], ["--what", "timeline"], []):
        ran = cli("plot", "1f1b.json", "-g", "g.json", "-o", "plan.png" if more else "plan.html", *more)
        assert ran.code == 0, ran.err
    assert Path("plan.png").read_bytes().startswith(b"\x89PNG") and Path("plan.html").read_text().count("<svg") == 3
    refused = cli("plot", "1f1b.json", "-g", "g.json", "-o", "plan.png", "--what", "comparison")
    assert refused.code == 2 and "one stage" in refused.err
