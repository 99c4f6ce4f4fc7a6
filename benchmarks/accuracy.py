"""Predicted beside measured iteration time of many strategies, and where the difference sits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median

import numpy as np

from benchmarks.emulated import OPTIONS, Plans
from benchmarks.harness import Row, say, spread
from benchmarks.worker import Job, Measured
from flexsearch.lower import Lowered, TaskKind
from flexsearch.runtime.timeline import Spans
from flexsearch.search.space import Space
from flexsearch.simulate import Simulation
from flexsearch.strategy import Strategy
from tests.proposals import propose

LONGEST_S = 20.0
"""A random strategy is only measured if a step is predicted to be shorter, or shorter than data parallel."""

WARMUP = 3
"""Steps that are not counted. Memory grows for so long: with VGG-16 in data parallelism one of 4 ranks takes 100,000
page faults in its second or third step, for a buffer of 411 MB that no gap holds, and all wait 1.4 s for it."""


@dataclass(frozen=True)
class Prediction:
    """A strategy with what is predicted of it."""

    strategy: Strategy
    lowered: Lowered
    simulation: Simulation


def accuracy(plans: Plans) -> list[Row]:
    """Rows of one model on one number of hosts: its strategies (fewer than asked for if they do not fit into memory),
    then a summary, then what contributes most to the error."""
    chosen = choose(plans, plans.machine.effort.strategies)
    say(f"measuring {len(chosen)} strategies of {plans.model} on {plans.hosts} hosts")
    total = sum(p.simulation.makespan_s for p in chosen.values())
    effort = plans.machine.effort
    rounds = int(min(effort.rounds, max(2, effort.variant_s * len(chosen) // total)))
    files = plans.save({name: p.strategy for name, p in chosen.items()})
    job = Job(
        plans.target, plans.batch, files, rounds=rounds, steps=1, warmup=WARMUP, together=False,
        timeline=True, timeout_s=120.0 + 60.0 * len(chosen) + 8 * total * (rounds + 3), arguments=plans.arguments,
    )  # fmt: skip
    measured = plans.machine.measure(job, plans.hosts)
    rows = [_row(plans, name, p, measured[name]) for name, p in chosen.items()]
    return [*rows, _summary(plans, rows), *_causes(plans, chosen, measured)]


def choose(plans: Plans, count: int) -> dict[str, Prediction]:
    """The found plan, baselines and random strategies, about a third of these; those that fit into the memory here."""
    room = plans.machine.room_bytes(plans.hosts)
    limit = max(LONGEST_S, plans.predict(plans.baselines["data-parallel"])[1].makespan_s)
    chosen: dict[str, Prediction] = {}

    def take(name: str, strategy: Strategy, limit: float = np.inf) -> None:
        lowered, simulation = plans.predict(strategy)
        if sum(simulation.peak_bytes) > room:
            say(f"leaving out {name} of {plans.model}: {sum(simulation.peak_bytes) / 1e9:.3g} GB on all hosts together")
        elif simulation.makespan_s <= limit:
            chosen[name] = Prediction(strategy, lowered, simulation)

    take("found", plans.found)
    again = plans.setting.name_of(plans.found)  # the same plan twice would be a pair without an order
    others = sorted(plans.baselines.keys() - {again}, key=lambda name: (name != "data-parallel", name))
    for name in others[: count - count // 3 - 1]:
        take(name, plans.baselines[name])
    rng, space = np.random.default_rng(0), Space(plans.graph, plans.topology)
    starts = list(chosen.values())
    for k in range(20 * count):
        if len(chosen) >= count:
            break
        take(f"random {k}", _random(rng, space, plans, starts[k % len(starts)].strategy, k), limit)
    return chosen


def _random(rng: np.random.Generator, space: Space, plans: Plans, start: Strategy, k: int) -> Strategy:
    """In turn a strategy with every operator at random, and one some random moves away from ``start``."""
    operators = plans.graph.operators
    if k % 2:
        configs = space.random_plan(rng)
    else:
        configs = tuple(start.configs[op.name] for op in operators)
        for _ in range(len(operators) // 4 + 1):
            _, configs = propose(rng, space, configs)
    named = {op.name: config for op, config in zip(operators, configs, strict=True)}
    return Strategy.make(plans.graph, plans.topology, named, OPTIONS)


def _row(plans: Plans, name: str, predicted: Prediction, measured: Measured) -> Row:
    seconds, there = predicted.simulation.makespan_s, median(measured.turns_s)
    return {
        "table": "accuracy",
        "model": plans.model,
        "hosts": plans.hosts,
        "strategy": name,
        "predicted_iteration_s": seconds,
        "measured_iteration_s": there,
        "measured_spread_s": spread(measured.turns_s),
        "error_percent": 100 * (seconds / there - 1),
        "predicted_unshared_s": plans.predict_unshared(predicted.strategy),
        "predicted_bytes_sent": max(_sent(plans, predicted.simulation)),
        "measured_bytes_sent": max(measured.sent_bytes),
    }


def _sent(plans: Plans, simulation: Simulation) -> list[int]:
    """Predicted bytes out of each host: what the first link of its routes carries."""
    hosts = range(plans.hosts)
    return [int(simulation.link_bytes[plans.topology.route(h, (h + 1) % plans.hosts).resources[0]]) for h in hosts]


def _summary(plans: Plans, rows: Sequence[Row]) -> Row:
    predicted = [row["predicted_iteration_s"] for row in rows]
    measured = [row["measured_iteration_s"] for row in rows]
    alone = [row["predicted_unshared_s"] for row in rows]
    return {
        "table": "summary",
        "model": plans.model,
        "hosts": plans.hosts,
        "strategies": len(rows),
        **agreement(predicted, measured),
        "unshared_median_error_percent": median_error(alone, measured),
        "unshared_kendall_tau": kendall_tau(alone, measured),
    }


def median_error(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Median of |predicted / measured - 1|, percent."""
    return 100 * median(abs(p / m - 1) for p, m in zip(predicted, measured, strict=True))


def agreement(predicted: Sequence[float], measured: Sequence[float]) -> Row:
    """How near predicted times are to measured ones, and how alike their orders."""
    return {
        "median_error_percent": median_error(predicted, measured), "kendall_tau": kendall_tau(predicted, measured)
    }  # fmt: skip


def kendall_tau(a: Sequence[float], b: Sequence[float]) -> float:
    """Kendall's tau-a: share of pairs in the same order, less the share of those in the opposite one."""
    pairs = [(a[i] - a[j]) * (b[i] - b[j]) for i, j in combinations(range(len(a)), 2)]
    return float(sum(np.sign(pairs)) / len(pairs)) if pairs else 1.0


def _causes(
    plans: Plans, chosen: Mapping[str, Prediction], measured: Mapping[str, Measured], top: int = 6
) -> list[Row]:
    """What makes measured steps differ from predicted ones, over all strategies: the largest shares."""
    differences: dict[str, list[float]] = {}
    for name, p in chosen.items():
        timeline = measured[name].timeline
        if timeline is None:
            continue
        simulated = dict(enumerate(zip(p.simulation.start, p.simulation.end, strict=True)))
        predicted = account(p.lowered, simulated, p.simulation.makespan_s)
        real = account(p.lowered, timeline.spans, timeline.iteration_s)
        for cause in predicted.keys() | real.keys():
            share = (predicted.get(cause, 0.0) - real.get(cause, 0.0)) / timeline.iteration_s
            differences.setdefault(cause, []).append(100 * share)
    count = len(chosen)
    rows: list[Row] = [
        {
            "table": "causes",
            "model": plans.model,
            "hosts": plans.hosts,
            "cause": cause,
            "mean_percent": sum(shares) / count,
            "mean_absolute_percent": sum(map(abs, shares)) / count,
        }
        for cause, shares in differences.items()
    ]
    return sorted(rows, key=lambda row: -row["mean_absolute_percent"])[:top]


def account(lowered: Lowered, spans: Spans, iteration_s: float) -> dict[str, float]:
    """Where an iteration goes, s, mean over the devices: its tasks by phase and kind of operator, and the gaps between
    them by what the next task had to wait for. The parts add up to ``iteration_s``."""
    tasks, clock = lowered.tasks, dict.fromkeys(lowered.devices, 0.0)
    spent: dict[str, float] = {}

    def spend(what: str, seconds: float) -> None:
        spent[what] = spent.get(what, 0.0) + seconds / len(clock)

    for task, device in enumerate(tasks.device):
        if device < 0 or (known := spans.get(task)) is None:
            continue
        start, end = known
        spend(_awaited(lowered, task, spans, clock[device]), start - clock[device])
        spend(_task(lowered, task), end - start)
        clock[device] = end
    for device in clock:
        spend("after its last task", iteration_s - clock[device])
    return spent


def _task(lowered: Lowered, task: int) -> str:
    kind, operator = TaskKind(lowered.tasks.kind[task]), lowered.tasks.operator[task]
    return f"{kind.name.lower()} {lowered.graph.operators[operator].kind}" if operator >= 0 else "update"


def _awaited(lowered: Lowered, task: int, spans: Spans, since: float) -> str:
    """What a task waited for from ``since`` on: the communication that it depends on that ended last."""
    last, cause = since, "between tasks (processor taken, issuing)"
    for before in lowered.tasks.dependencies[task]:
        what, known = lowered.tasks.communication[before], spans.get(before)
        if what is not None and known is not None and known[1] > last:
            last, cause = known[1], f"waiting for {what.purpose} {what.form}"
    return cause
