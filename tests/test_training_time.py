"""When workers that train under a recipe are through with their steps, and when what they push arrives: by the same
rows and the same engine as plans."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from flexsearch.cost.communication import Pricing
from flexsearch.cost.exchanges import streaming_seconds, work_seconds
from flexsearch.cost.ticks import TICK
from flexsearch.lower import Communication, recipe_rows
from flexsearch.lower.recipe_rows import push_cost, with_exchanges, with_pushes
from flexsearch.lower.recipes import RecipeGroup
from flexsearch.lower.rows import NEVER, RECIPE, Rows, Segments
from flexsearch.lower.several import computing, repeated
from flexsearch.setting import Setting
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
from flexsearch.sync.gossip import Matrix
from flexsearch.sync.work import alone, before
from flexsearch.topology import Reading, Storage, Topology
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
        result = recipe.exchanges(of.size, of.hosts, SIZES, step)
        assert result is not None
        time.step(result)


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
    time, steps = SynchronousTime(of, recipe, SIZES), 2 * recipe.period * recipe.partners.cycle(4)
    exchanged(recipe, of, steps, time)
    assert time.seconds / steps == pytest.approx(mean_of(text, topology), rel=1e-9)


PAIRS = Recipe(partners=Matrix(rows=((0.5, 0, 0.5, 0), (0, 0.5, 0, 0.5), (0.5, 0, 0.5, 0), (0, 0.5, 0, 0.5))))


@pytest.mark.parametrize("recipe", (PAIRS, *map(parse_recipe, ("all-reduce", "local-sgd:period=2+ring", "server"))))
@pytest.mark.parametrize("preset", ("ethernet-1g:4", "epyc:2", "p100:1"))
def test_steps_go_on_from_where_workers_hosts_and_links_stand(recipe: Recipe, preset: str) -> None:
    """By the definition of simulated time. On hosts with two devices, pairs wait for each other's messages."""
    topology, steps = Topology.load(preset), 9
    of = workers(jitter=0.5, slow=(1.0, 1.0, 2.0, 1.0), topology=topology)
    if preset == "epyc:2":
        of = Workers.timed(1e-4, topology, 4, jitter=0.5)
    time = SynchronousTime(of, recipe, SIZES)
    exchanged(recipe, of, steps, time)
    group, clock, host, free = of.group(recipe, SIZES), [0] * 4, [0] * 4, dict[int, int]()
    for step in range(steps):
        result = recipe.exchanges(of.size, of.hosts, SIZES, step)
        assert result is not None
        run = Run(with_exchanges(of.lowered, of.rows, group, result, False))
        run.scale(of.factors(step))
        rows = run.rows
        oracle = Oracle(rows.schedule, rows.machine, run.segments, rows.segment, begins=(clock, host), free=free)
        oracle.run()
        clock, host, free = [d.clock for d in oracle.devices], [d.host for d in oracle.devices], oracle.free
    assert round(time.seconds / TICK) == max(clock)


def test_who_is_slow_and_chance_make_steps_longer() -> None:
    plain, slow = workers().compute_s, workers(slow=(1.0, 3.0, 1.0, 1.0)).compute_s
    assert slow[1] == pytest.approx(3 * plain[1], rel=1e-6) and slow[0] == plain[0]
    of, recipe = workers(jitter=0.5), parse_recipe("local-sgd:period=100")
    time = SynchronousTime(of, recipe, SIZES)
    exchanged(recipe, of, 50, time)
    longer = [sum(of.factors(step)[w] for step in range(50)) for w in range(4)]
    scaled = 50 * work_seconds(alone(recipe, SIZES), ETHERNET.devices[0], {})
    assert time.seconds == pytest.approx(max(longer) * plain[0] + scaled, rel=1e-6)
    assert 50 * 1.1 < min(longer) < 50 * 1.4
    assert time.communicated == 0
    hosted = workers(topology=Topology.load("p100:1"))  # which wait for launches
    time = SynchronousTime(hosted, recipe, SIZES)
    exchanged(recipe, hosted, 50, time)
    assert hosted.waits.min() > 0 and time.communicated < 0.01 * time.seconds


# ---- workers that go by themselves


def arrivals(text: str, of: Workers, count: int) -> list[Arrival]:
    time, result = AsynchronousTime(of, parse_recipe(text), SIZES, count), list[Arrival]()
    while len(result) < count:
        result += time.advance()
    return result[:count]


def at_once(
    text: str, of: Workers, steps: int, sizes: Callable[[int], list[int]] | None = None
) -> list[tuple[int, int]]:  # fmt: skip
    """(Tick, worker) of all arrivals in so many steps of every worker, from one run of the engine, until the first
    worker has none left. ``sizes``: bytes that are pushed to each server in a step."""
    recipe = parse_recipe(text)
    group = of.group(recipe, SIZES)
    rows = repeated(with_pushes(of.lowered, of.rows, group), (group,), steps)
    segments, blocks, device = rows.segments, len(rows.schedule.kind) // steps, device_of_steps(rows)
    factors = np.array([of.factors(k) for k in range(steps)])
    scaled = (segments.step_kind == 0) & (rows.schedule.kind[segments.step_block] != RECIPE) & (device >= 0)
    times_as_long = factors[segments.step_block[scaled] // blocks, device[scaled]]
    ticks, host = segments.step_ticks.copy(), segments.step_host.copy()
    for column in (ticks, host):
        column[scaled] = np.rint(column[scaled] * times_as_long)
    segments = segments._replace(step_ticks=ticks, step_host=host)
    if sizes is not None:
        segments = pushing(segments, of, group, {block // blocks: block for block in rows.recipes}, rows, sizes)
    times = Engine(rows.schedule, rows.machine, fold=False).times(segments, rows.segment)
    assert recipe.server is not None
    shards, result, last = recipe.server.shards, [], []
    for k in range(steps):
        block = next(b for b in rows.recipes if b // blocks == k)
        end = times.communication_end[0, int(times.communication_first[block]) :][: 2 * shards * of.size]
        pushes = end.reshape(of.size, 2, shards)[:, 0].max(1)
        result += [(int(t), w) for w, t in enumerate(pushes)]
        last = pushes.tolist()
    return sorted(row for row in result if row[0] <= min(last))


@pytest.fixture
def unequal_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that nothing becomes ready at the same tick, where the window may serve rows in another order."""
    turn = recipe_rows._turn

    def unequal(writer: Any, what: Communication, links: list[int]) -> int:
        return min(NEVER, turn(writer, what, links) + 1000 * what.devices[0] + 7919 * what.devices[-1])

    monkeypatch.setattr(recipe_rows, "_turn", unequal)


ALONE = ("async+server", "async+server:shards=2", "async+server:on=devices", "stale:bound=0+server",
         "stale:bound=2+server:shards=2")  # fmt: skip


@pytest.mark.parametrize("jitter", (0.0, 0.4))
@pytest.mark.parametrize("text", ALONE)
@pytest.mark.usefixtures("unequal_turns")
def test_pushes_arrive_as_in_one_long_run(text: str, jitter: float) -> None:
    """The window changes nothing: neither times nor order, for several times as many steps as it has."""
    topology = Topology.load("ethernet-1g:5") if "devices" in text else ETHERNET
    of = workers(jitter=jitter, slow=(1.0, 1.7, 1.0, 2.3), topology=topology)
    expected = at_once(text, of, 5 * STEPS)
    assert len({w for _, w in expected}) == 4 and len(expected) > 4 * STEPS
    result = arrivals(text, of, len(expected))
    assert [(round(a.seconds / TICK), a.worker) for a in result] == expected


def test_two_workers_and_a_server_by_hand() -> None:
    """Whose link is shared by pushes, and by answers."""
    topology = Topology.load("ethernet-1g:3")
    free = {"cpu_s": 0.0, "cpu_s_per_byte": 0.0}
    topology = edited(topology, communication=topology.communication.model_copy(update=free))
    of = Workers.timed(0.1, topology, 2, slow=(1.0, 1.5))
    nbytes, price = SIZES.n * SIZES.itemsize, Pricing(topology)
    there = price.transfer("exchange", [(0, 2, nbytes)]).duration_s
    back = price.transfer("exchange", [(2, 0, nbytes)]).duration_s
    update = of.lowered.lowering.costs.update(nbytes, 1, 2, "momentum")
    load = streaming_seconds(topology.devices[0], 2 * nbytes)
    assert there + update + back < 0.05
    # Worker 0 pushes after 100 ms, worker 1 after 150 ms, worker 0 again before 250 ms: nothing is in anyone's way.
    encode = work_seconds(before(parse_recipe("async+server"), SIZES), topology.devices[0], {})
    first = 0.1 + encode + there + update
    second = 0.15 + encode + there + update
    third = first + back + load + 0.1 + encode + there + update
    result = arrivals("async+server:on=devices", of, 3)
    assert [a.worker for a in result] == [0, 1, 0]
    assert [a.seconds for a in result] == pytest.approx([first, second, third], rel=1e-6)
    computed = [0.1 + encode, 0.15 + encode, 0.2 + load + 2 * encode]
    assert [a.computed_s for a in result] == pytest.approx(computed, rel=1e-6)
    # Both at the same time: the link is theirs by turns.
    link = max(dict(price.transfer("exchange", [(0, 2, nbytes)]).links).values())
    turn = float(topology.communication.turn_bytes or 0) * topology.communication.factors["exchange"] / 125e6
    same = arrivals("async+server:on=devices", Workers.timed(0.1, topology, 2), 2)
    assert [a.worker for a in same] == [0, 1]
    assert same[0].seconds == pytest.approx(first + link // turn * turn, rel=1e-6)
    assert same[1].seconds == pytest.approx(first + link, rel=1e-6)


def pushing(
    segments: Segments, of: Workers, group: RecipeGroup, block_of: dict[int, int], rows: Rows,
    sizes: Callable[[int], list[int]],
) -> Segments:  # fmt: skip
    """Segments in which workers push so much in each step."""
    names = ("communication_ticks", "turn", "link_ticks", "drag_ticks")
    segments = segments._replace(**{name: getattr(segments, name).copy() for name in names})
    for step, block in block_of.items():
        first, own = int(segments.communication_first[rows.segment[block]]), sizes(step)
        for worker in range(of.size):
            for shard, nbytes in enumerate(own):
                c, cost = first + 2 * worker * len(own) + shard, push_cost(of.lowered, group, worker, shard, nbytes)
                segments.communication_ticks[c], segments.turn[c] = cost.ticks, cost.turn
                segments.link_ticks[segments.link_first[c] : segments.link_last[c]] = cost.links
                segments.drag_ticks[segments.drag_first[c] : segments.drag_last[c]] = cost.drags
    return segments


@pytest.mark.parametrize("text", ("async+server:shards=2+threshold:tau=1", "stale:bound=1+server+threshold:tau=1"))
@pytest.mark.usefixtures("unequal_turns")
def test_bytes_may_be_told_step_by_step(text: str) -> None:
    of, recipe = workers(jitter=0.3, slow=(1.0, 1.0, 1.7, 1.0)), parse_recipe(text)
    assert recipe.server is not None
    shards = recipe.server.shards

    def sizes(step: int) -> list[int]:
        return [4 + (step * 7919 + shard * 31) % 5 * 200_000 for shard in range(shards)]

    expected, steps = at_once(text, of, 3 * STEPS, sizes), defaultdict[int, int](int)
    time, result = AsynchronousTime(of, recipe, SIZES, len(expected), measured=True), list[Arrival]()
    for worker in range(4):
        time.push(worker, 0, sizes(0))
    while len(result) < len(expected):
        for arrival in time.advance():
            result.append(arrival)
            steps[arrival.worker] += 1
            time.push(arrival.worker, steps[arrival.worker], sizes(steps[arrival.worker]))
    assert [(round(a.seconds / TICK), a.worker) for a in result[: len(expected)]] == expected


@pytest.mark.parametrize("text", ALONE)
def test_rates_are_those_of_a_simulated_plan(text: str) -> None:
    """The mean step of all workers, when what they began with is forgotten."""
    topology = Topology.load("ethernet-1g:5") if "devices" in text else ETHERNET
    result = arrivals(text, workers(topology=topology), 800)
    assert 4 * (result[-1].seconds - result[399].seconds) / 400 == pytest.approx(mean_of(text, topology), rel=2e-2)


@pytest.mark.parametrize("prefetch", (0, 2))
def test_workers_that_read_batches_together_wait_for_each_other(prefetch: int) -> None:
    """Those of a host; in windows as in one long run."""
    storage = Storage(kind="local", bandwidth=1e6, reading=Reading(sample_bytes=1000, prefetch=prefetch))
    topology = edited(Topology.load("dgx-a100:4"), storage=storage)
    of = workers(topology=topology, slow=(1.0, 1.0, 2.0, 1.0))
    expected = at_once("async+server", of, 4 * STEPS)
    result = arrivals("async+server", of, len(expected))
    assert [(round(a.seconds / TICK), a.worker) for a in result] == expected
    assert result[-1].seconds / (len(result) / 4) == pytest.approx(8 * 1000 / 1e6, rel=0.1)  # a batch's reading
    counts = [sum(a.worker == w for a in result) for w in range(4)]
    assert max(counts) - min(counts) <= 1
    time, recipe = SynchronousTime(of, parse_recipe("all-reduce"), SIZES), parse_recipe("all-reduce")
    exchanged(recipe, of, 4, time)
    assert time.seconds / 4 == pytest.approx(8 * 1000 / 1e6, rel=0.1)
