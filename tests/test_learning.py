"""What measured plans teach: figures that made the times come back, few plans few figures, and costs obey them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from flexsearch.cost import Costs, Learned, Network, Profile, ProfileDevice
from flexsearch.cost.communication import Pricing, least_seconds
from flexsearch.errors import ProfileError
from flexsearch.graph import OperatorGraph
from flexsearch.lower import Lowered, lower_for_ranks
from flexsearch.measure.learning import Figure, Lesson, fit, learn
from flexsearch.measure.traced import learn_from_tasks
from flexsearch.setting import Setting
from flexsearch.simulate.simulation import makespan
from flexsearch.simulate.staged import step_of_strategy
from flexsearch.strategy import Strategy
from flexsearch.topology import Topology

TOPOLOGY = Topology.load("ethernet-1g:2")
START_S, OVERHEAD_S = 100e-6, 20e-6
"""Of this topology."""


@cache
def plans() -> tuple[OperatorGraph, tuple[Strategy, ...]]:
    graph = OperatorGraph.load("lenet")
    return graph, tuple(Setting.of(graph, TOPOLOGY).baselines().values())


def profile(learned: Learned | None) -> Profile:
    return Profile(device=ProfileDevice(kind="cpu", model="core"), torch="2", learned=learned)


def predict(learned: Learned, number: int) -> float:
    graph, strategies = plans()
    return step_of_strategy(graph, strategies[number], profile(learned)).makespan_s


def machine(learned: Learned, number: int) -> float:
    """Iteration time of a plan on a made-up machine, which overlaps some of its communication."""
    compute_s, tasks, moving_s, messages = PLANS[number]
    found = learned.network(TOPOLOGY.name)
    moves = moving_s * found.time + messages * (START_S + found.start_s)
    return max(compute_s * learned.compute + tasks * (OVERHEAD_S + learned.task_s) + 0.4 * moves, moves)


DRAW = np.random.default_rng(0)
PLANS = [
    (compute_s, tasks, moving_s, messages)
    for compute_s, tasks, moving_s, messages in zip(
        DRAW.uniform(0.01, 0.05, 8), DRAW.integers(100, 400, 8), DRAW.uniform(0.0, 0.03, 8),
        DRAW.integers(10, 200, 8), strict=True,
    )
]  # fmt: skip
"""Seconds of computing, tasks, seconds of moving bytes, messages."""


def taught(
    predict: Callable[[Learned, int], float], count: int, truth: Learned, prior: Learned | None = None,
    change: Callable[[int, float], float] = lambda number, s: s,
) -> Lesson:  # fmt: skip
    """What is learned from times that ``truth`` makes, each changed."""
    measured = [change(k, predict(truth, k)) for k in range(count)]
    return learn(predict, measured, prior or Learned(), TOPOLOGY.name, OVERHEAD_S, START_S)


def network(time: float = 1.0, start_s: float = 0.0) -> dict[str, Network]:
    return {"ethernet-1g": Network(time=time, start_s=start_s)}


def assert_is(lesson: Lesson, truth: Learned, changed: set[str]) -> None:
    assert set(lesson.changed) == changed
    assert lesson.before > 0.01 and lesson.after < 0.005 and lesson.left_out < 0.01
    assert lesson.learned.compute == pytest.approx(truth.compute, rel=0.03)
    assert lesson.learned.task_s == pytest.approx(truth.task_s, rel=0.05)
    found, made = lesson.learned.network(TOPOLOGY.name), truth.network(TOPOLOGY.name)
    assert found.time == pytest.approx(made.time, rel=0.03) and found.start_s == pytest.approx(made.start_s, rel=0.05)
    assert lesson.learned.error == lesson.left_out


@pytest.mark.parametrize(
    ("truth", "changed"),
    [
        (Learned(compute=1.4), {"compute"}),
        (Learned(networks=network(start_s=-5e-5)), {"start_s"}),
        (Learned(compute=2.0, networks=network(time=0.5)), {"compute", "time"}),
    ],
)
def test_the_figures_that_made_simulated_times_come_back(truth: Learned, changed: set[str]) -> None:
    lesson = taught(predict, len(plans()[1]), truth)
    assert_is(lesson, truth, changed)
    assert lesson.learned.plans == len(plans()[1])


@pytest.mark.parametrize(
    ("truth", "changed"),
    [
        (Learned(compute=0.6), {"compute"}),
        (Learned(task_s=1e-4), {"task_s"}),
        (Learned(networks=network(time=1.8)), {"time"}),
        (Learned(networks=network(start_s=2e-4)), {"start_s"}),
        (Learned(compute=0.7, networks=network(start_s=2e-4)), {"compute", "start_s"}),
        (Learned(task_s=1e-4, networks=network(time=2.0)), {"task_s", "time"}),
    ],
)
def test_any_figures_come_back(truth: Learned, changed: set[str]) -> None:
    assert_is(taught(machine, 8, truth), truth, changed)


def test_one_plan_that_was_disturbed_changes_little() -> None:
    lesson = taught(machine, 8, Learned(compute=1.4), change=lambda number, s: 3 * s if number == 2 else s)
    assert lesson.changed == ("compute",) and lesson.learned.compute == pytest.approx(1.4, rel=0.03)


def test_what_is_right_already_stays_and_so_does_what_other_networks_taught() -> None:
    prior = Learned(compute=1.4, networks={"elsewhere": Network(time=2.0)})
    lesson = taught(machine, 8, prior, prior, lambda number, s: s * (1.005 if number % 2 else 0.995))
    assert lesson.learned is prior and lesson.changed == () and lesson.after == lesson.before
    more = taught(machine, 8, Learned(compute=1.4, networks=network(start_s=3e-4)), prior)
    assert more.changed == ("start_s",) and more.learned.compute == 1.4
    assert more.learned.networks["elsewhere"] == Network(time=2.0)


def test_earlier_plans_weigh_as_much_as_those_of_now() -> None:
    first = taught(machine, 8, Learned(compute=1.2)).learned
    assert first.plans == 8
    second = taught(machine, 8, Learned(compute=1.8), first).learned
    assert second.plans == 16 and second.compute == pytest.approx(1.5, abs=0.05)
    old = first.model_copy(update={"plans": 800})
    assert taught(machine, 8, Learned(compute=1.8), old).learned.compute == pytest.approx(1.35, abs=0.05)
    elsewhere = first.model_copy(update={"networks": {"elsewhere": Network()}})
    moved = taught(machine, 8, Learned(compute=1.2, networks=network(start_s=4e-4)), elsewhere).learned
    assert moved.networks["ethernet-1g"].start_s == pytest.approx(4e-4, rel=0.05), "of this network nothing was learned"


def test_times_without_a_pattern_seldom_teach_anything() -> None:
    draw, taken = np.random.default_rng(0), 0
    for _ in range(40):
        factors = np.exp(draw.permutation([0.3] * 4 + [-0.3] * 4))
        taken += bool(taught(machine, 8, Learned(), change=lambda k, s, f=factors: s * f[k]).changed)  # type: ignore[misc]
    assert taken <= 8


def test_noisy_times_are_predicted_better_than_before() -> None:
    draw, truth = np.random.default_rng(0), Learned(compute=1.5, networks=network(start_s=2e-4))
    for _ in range(10):
        factors = np.exp(draw.normal(0.0, 0.05, 8))
        lesson = taught(machine, 8, truth, change=lambda k, s, f=factors: s * f[k])  # type: ignore[misc]
        true = [machine(truth, k) for k in range(8)]
        off = [abs(machine(lesson.learned, k) / true[k] - 1.0) for k in range(8)]
        assert np.median(off) < 0.07 < 0.2 < lesson.before


def test_never_more_figures_than_a_third_of_the_plans() -> None:
    truth = Learned(compute=1.5, task_s=5e-5, networks=network(time=1.7, start_s=2e-4))
    for count in (3, 5, 6, 8):
        assert len(taught(machine, count, truth).changed) <= count // 3


def timeline(truth: Learned) -> tuple[Strategy, Lowered, dict[int, tuple[float, float]], float]:
    """Of a plan where ``truth`` holds: its tasks as they are priced without, what they take, and the whole step, s."""
    graph, strategies = plans()
    plan = strategies[-1]
    priced, real = (lower_for_ranks(graph, plan, TOPOLOGY, Costs(graph, TOPOLOGY, p)) for p in (None, profile(truth)))
    assert priced.digest == real.digest
    return plan, priced, {t: (1.0, 1.0 + s) for t, s in enumerate(real.tasks.duration)}, makespan(real)


@pytest.mark.parametrize("truth", [Learned(compute=1.5), Learned(task_s=200e-6), Learned(compute=0.7, task_s=80e-6)])
def test_the_tasks_of_one_run_teach_as_plans_do(truth: Learned) -> None:
    plan, lowered, spans, step_s = timeline(truth)
    lesson = learn_from_tasks(plans()[0], plan, lowered, spans, frozenset(), step_s, profile(None))
    assert lesson.learned.compute == pytest.approx(truth.compute, rel=0.02)
    assert lesson.learned.task_s == pytest.approx(truth.task_s, abs=4e-6)
    assert lesson.learned.plans == 1 and lesson.after < 0.02 < lesson.before
    again = learn_from_tasks(plans()[0], plan, lowered, spans, frozenset(), step_s, profile(lesson.learned))
    assert again.changed == ()


def test_what_earlier_runs_taught_weighs_as_much_as_a_run() -> None:
    plan, lowered, spans, step_s = timeline(Learned(compute=2.0))
    prior = profile(Learned(compute=1.0, plans=1))
    lesson = learn_from_tasks(plans()[0], plan, lowered, spans, frozenset(), step_s, prior)
    assert lesson.learned.compute == pytest.approx(1.5, rel=0.02) and lesson.learned.plans == 2


def test_tasks_whose_end_is_unknown_teach_nothing() -> None:
    plan, lowered, spans, step_s = timeline(Learned())
    moving = frozenset(t for t, what in enumerate(lowered.tasks.communication) if what is not None)
    assert moving
    late = {t: (a, b + (9.0 if t in moving else 0.0)) for t, (a, b) in spans.items()}
    assert learn_from_tasks(plans()[0], plan, lowered, late, moving, step_s, profile(None)).changed == ()


def test_two_plans_are_too_few() -> None:
    with pytest.raises(ProfileError, match="2 measured plans are too few"):
        learn(predict, [1.0, 2.0], Learned(), TOPOLOGY.name, OVERHEAD_S, START_S)


# ---- costs obey it


def test_compute_tasks_and_updates_take_what_was_learned() -> None:
    graph, _ = plans()
    plain = Costs(graph, TOPOLOGY, profile(None))
    costs = Costs(graph, TOPOLOGY, profile(Learned(compute=1.5, task_s=1e-3)))
    for number, op in enumerate(graph.operators):
        sizes = tuple(op.sizes[axis] for axis in op.access.axes)
        columns = {axis: np.array([op.sizes[axis]]) for axis in op.sizes}
        many = [column.tolist() for column in costs.compute_many(number, columns, 0)]
        for row, before, again in zip(
            costs.of_extents(number, [sizes], 0), plain.of_extents(number, [sizes], 0), many, strict=True
        ):
            assert row.tolist() == again
            assert row[0] == pytest.approx(1.5 * before[0] + 1e-3, abs=2e-9) if before[0] else row[0] == 0.0
    assert costs.update(10**6, 3, 0, "adam") == pytest.approx(1.5 * plain.update(10**6, 3, 0, "adam"), rel=1e-6)


def test_communication_takes_what_was_learned_of_this_kind_of_cluster() -> None:
    learned = profile(Learned(networks=network(time=1.5, start_s=2e-4)))
    for name in ("ethernet-1g:2", "ethernet-1g:3"):  # of any number of hosts
        topology = Topology.load(name)
        plain, priced = Pricing(topology), Pricing(topology, learned)
        small, large = ((plain.all_reduce([0, 1], n), priced.all_reduce([0, 1], n)) for n in (0, 10**7))
        assert small[1].duration_s - small[0].duration_s == pytest.approx(2e-4, abs=2e-9)
        assert large[1].duration_s - 2e-4 - small[0].duration_s == pytest.approx(
            1.5 * (large[0].duration_s - small[0].duration_s), rel=1e-6
        )
        two = [p.transfer("exchange", [(0, 1, 0), (0, 1, 0)]).duration_s for p in (plain, priced)]
        assert two[1] - two[0] == pytest.approx(4e-4, abs=2e-9), "gloo starts each message anew"
        assert least_seconds(topology, learned) == pytest.approx(least_seconds(topology) + 2e-4)
    other = Topology.load("ethernet-10g:2")
    assert Pricing(other, learned).all_reduce([0, 1], 10**6) == Pricing(other).all_reduce([0, 1], 10**6)


def test_a_start_never_gets_negative() -> None:
    learned = profile(Learned(networks=network(start_s=-1.0)))
    assert Pricing(TOPOLOGY, learned).transfer("exchange", [(0, 1, 0)]).duration_s >= 0.0


def test_a_profile_file_keeps_what_was_learned(tmp_path: Path) -> None:
    made = profile(Learned(compute=1.25, networks=network(start_s=-2e-5), plans=6, error=0.07))
    made.save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json") == made
    assert "learned" not in profile(None).model_dump(exclude_none=True)
    assert made.extended(profile(None)).learned == made.learned


def test_a_step_that_makes_errors_larger_is_halved() -> None:
    """Where times hardly change with a figure, a linear problem asks for far too much of it."""
    figure = Figure("steep", 0.5, 1.0, 0.0)
    fitted = fit(
        lambda point, _: 1.0 + 0.5 * float(np.arctan(5.0 * (point[0] - 2.0))), [1.0] * 6, [figure], every=True
    )
    assert fitted.point[0] == pytest.approx(2.0, abs=0.05)
    assert abs(fitted.after).max() < 0.1 < 0.7 < abs(fitted.before).min()


def test_where_a_figure_is_at_its_limit_the_others_explain_the_rest() -> None:
    figures = [Figure("limited", 1.0, 1.0, 0.0, 1.5), Figure("free", 1.0, 1.0, 0.0)]
    fitted = fit(
        lambda point, _: 1.0 + 0.2 * float(point[0] + point[1] - 4.0), [1.0] * 6, figures, every=True, rounds=1
    )
    assert fitted.point == pytest.approx([1.5, 2.5], abs=0.05)
    assert abs(fitted.after).max() < 0.01
