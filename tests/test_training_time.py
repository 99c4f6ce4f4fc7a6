"""When workers that train under a recipe are through with their steps, and when what they push arrives: by the same rows
and the same engine as plans."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest

from flexsearch.api import Setting
from flexsearch.cost.communication import Pricing
from flexsearch.cost.exchanges import streaming_seconds
from flexsearch.cost.ticks import TICK
from flexsearch.lower.recipe_rows import SERVER_PASSES, with_exchanges, with_pushes
from flexsearch.lower.rows import RECIPE
from flexsearch.lower.several import computing, repeated
from flexsearch.simulate.asynchronous import STEPS, Arrival, AsynchronousTime
from flexsearch.simulate.engine import Engine
from flexsearch.simulate.mean import mean_step
from flexsearch.simulate.simulation import simulate, simulate_step
from flexsearch.simulate.stepping import Run, device_of_steps
from flexsearch.simulate.training import SynchronousTime, Workers
from flexsearch.strategy import Options, Strategy
from flexsearch.strategy.baselines import inside_group
from flexsearch.strategy.records import WeightRecipe
from flexsearch.sync import Recipe, parse_recipe
from flexsearch.sync.compression import Sizes
from flexsearch.topology import Topology
from flexsearch.topology.changes import edited
from tests.engine_oracle import Simulation as Oracle
from tests.test_simulate import mlp

ETHERNET = Topology.load("ethernet-1g:4")
GRAPH = mlp(batch=8, widths=(512, 512, 64), inputs=512)
SIZES = Sizes(tuple(t.shape for t in GRAPH.of_kind("parameter")), 4)


def workers(size: int = 4, jitter: float = 0.0, slow: tuple[float, ...] = (), topology: Topology = ETHERNET) -> Workers:
    return Workers.of(GRAPH, topology, size, slow, jitter, seed=3)


def exchanged(recipe: Recipe, of: Workers, steps: int, time: SynchronousTime) -> None:
    for step in range(steps):
        found = recipe.exchanges(of.size, of.hosts, SIZES, step)
        assert found is not None
        time.step(found)


def mean_of(text: str, topology: Topology = ETHERNET, size: int = 4) -> float:
    """Mean step of the data-parallel plan with a recipe, by ``simulate``; but the loss stays where it is."""
    named = dict(zip((op.name for op in GRAPH.operators), inside_group(GRAPH, topology, 1, shares=size), strict=True))
    options = Options(recipes=(WeightRecipe(recipe=text),))
    setting = Setting.of(GRAPH, topology)
    lowered = setting.lower(Strategy.make(GRAPH, topology, named, options))
    if lowered.asynchronous:
        return simulate(lowered).makespan_s
    alone = replace(lowered, plain_rows=computing(lowered))
    return mean_step(alone.at_step(0), simulate_step).makespan_s


# ---- workers that go together

TOGETHER = (
    "all-reduce", "all-reduce:form=ring", "all-reduce:form=tree", "all-reduce:form=halving-doubling",
    "all-reduce:form=everyone", "server", "server:shards=2", "server:on=devices", "gossip", "gossip:what=weights",
    "ring", "top-k:density=0.01", "gtop-k:density=0.01", "random-k:density=0.1", "qsgd", "16-bit", "sign", "powersgd",
    "threshold:tau=0.1", "local-sgd:period=4", "local-sgd:period=3+gossip+top-k:density=0.01", "diloco:period=2",
)  # fmt: skip


@pytest.mark.parametrize("text", TOGETHER)
def test_a_mean_step_is_that_of_the_plan(text: str) -> None:
    """Of the same rows, by ``simulate``: all recipes in which workers go together."""
    topology = Topology.load("ethernet-1g:5") if "devices" in text else ETHERNET
    recipe, of = parse_recipe(text).planned, workers(topology=topology)
    time, steps = SynchronousTime(of, recipe, SIZES), 2 * recipe.cycle(4)
    exchanged(recipe, of, steps, time)
    assert time.seconds / steps == pytest.approx(mean_of(text, topology), rel=1e-9)


@pytest.mark.parametrize("text", ("all-reduce", "gossip", "local-sgd:period=2+ring", "server:shards=2"))
def test_steps_that_go_on_are_those_of_one_long_run(text: str) -> None:
    """Step by step, from where workers stand, as by the definition of simulated time for all steps at once."""
    recipe, of, steps = parse_recipe(text), workers(jitter=0.5, slow=(1.0, 1.0, 2.0, 1.0)), 5
    time, oracle = SynchronousTime(of, recipe, SIZES), None
    exchanged(recipe, of, steps, time)
    devices = [0] * 4, [0] * 4
    for step in range(steps):
        group = of.group(recipe, SIZES)
        found = recipe.exchanges(of.size, of.hosts, SIZES, step)
        assert found is not None
        run = Run(with_exchanges(of.lowered, of.rows, group, found, False))
        run.scale(of.factors([step] * 4))
        free = oracle.free if oracle is not None else {}
        oracle = Oracle(run.rows.schedule, run.rows.machine, run.segments, run.rows.segment, free=free)
        oracle.begins = devices
        oracle.run()
        devices = [d.clock for d in oracle.devices], [d.host for d in oracle.devices]
    assert round(time.seconds / TICK) == max(devices[0])


def test_who_is_slow_and_chance_make_steps_longer() -> None:
    plain, slow = workers().compute_s, workers(slow=(1.0, 3.0, 1.0, 1.0)).compute_s
    assert slow[1] == pytest.approx(3 * plain[1], rel=1e-6) and slow[0] == plain[0]
    of, recipe = workers(jitter=0.5), parse_recipe("local-sgd:period=100")
    time = SynchronousTime(of, recipe, SIZES)
    exchanged(recipe, of, 50, time)
    longer = [sum(of.factors([step] * 4)[w] for step in range(50)) for w in range(4)]
    assert time.seconds == pytest.approx(max(longer) * plain[0], rel=1e-6) and 50 * 1.1 < min(longer) < 50 * 1.4
    assert time.communicated == 0


# ---- workers that go by themselves


def arrivals(text: str, of: Workers, count: int) -> list[Arrival]:
    time, found = AsynchronousTime(of, parse_recipe(text), SIZES, count), list[Arrival]()
    while len(found) < count:
        found += time.advance()
    return found[:count]


def at_once(text: str, of: Workers, steps: int) -> list[tuple[int, int]]:
    """(Tick, worker) of all arrivals in so many steps of every worker, from one run of the engine, until the first
    worker has none left."""
    recipe = parse_recipe(text)
    group = of.group(recipe, SIZES)
    rows = repeated(with_pushes(of.lowered, of.rows, group), (group,), steps)
    segments, blocks, device = rows.segments, len(rows.schedule.kind) // steps, device_of_steps(rows)
    factors = np.array([of.factors([k] * of.size) for k in range(steps)])
    scaled = (segments.step_kind == 0) & (rows.schedule.kind[segments.step_block] != RECIPE) & (device >= 0)
    ticks = segments.step_ticks.copy()
    ticks[scaled] = np.rint(ticks[scaled] * factors[segments.step_block[scaled] // blocks, device[scaled]])
    times = Engine(rows.schedule, rows.machine, fold=False).times(segments._replace(step_ticks=ticks), rows.segment)
    assert recipe.server is not None
    shards, found, last = recipe.server.shards, [], []
    for k in range(steps):
        block = next(b for b in rows.recipes if b // blocks == k)
        end = times.communication_end[0, int(times.communication_first[block]) :][: 2 * shards * of.size]
        pushes = end.reshape(of.size, 2, shards)[:, 0].max(1)
        found += [(int(t), w) for w, t in enumerate(pushes)]
        last = pushes.tolist()
    return sorted(row for row in found if row[0] <= min(last))


ALONE = ("async+server", "async+server:shards=2", "async+server:on=devices", "stale:bound=0+server",
         "stale:bound=2+server:shards=2")  # fmt: skip


@pytest.mark.parametrize("jitter", (0.0, 0.4))
@pytest.mark.parametrize("text", ALONE)
def test_pushes_arrive_as_in_one_long_run(text: str, jitter: float) -> None:
    """The window changes nothing: neither times nor order, for several times as many steps as it has."""
    topology = Topology.load("ethernet-1g:5") if "devices" in text else ETHERNET
    of = workers(jitter=jitter, slow=(1.0, 1.7, 1.0, 2.3), topology=topology)
    expected = at_once(text, of, 5 * STEPS)
    assert len({w for _, w in expected}) == 4 and len(expected) > 4 * STEPS
    found = arrivals(text, of, len(expected))
    assert [(round(a.seconds / TICK), a.worker) for a in found] == expected
