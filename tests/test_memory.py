"""Memory: every span of every plan as the plain-Python definition has it; peaks kept up to date exactly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate
from typing import get_args

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from flexsearch.cost import Costs
from flexsearch.graph import OperatorGraph
from flexsearch.graph.precision import with_precision
from flexsearch.graph.weight_gradients import able, with_weight_gradients
from flexsearch.lower import Lowered, Lowering
from flexsearch.lower.plan import PlanRows
from flexsearch.lower.rows import Schedule
from flexsearch.lower.schedule import Stages
from flexsearch.lower.templates import Templates
from flexsearch.search.space import Space
from flexsearch.simulate import Memory, memory
from flexsearch.simulate.account import missing_memory
from flexsearch.simulate.delta import DeltaSimulator
from flexsearch.simulate.memory import memory_of
from flexsearch.simulate.units import make_account, make_units
from flexsearch.strategy import OperatorConfig, Options, make_config
from flexsearch.strategy.records import SynchroniseBy
from flexsearch.strategy.schedule import placement
from flexsearch.strategy.stage import ScheduleKind
from flexsearch.topology import Topology
from tests.memory_oracle import Span as TaskSpan
from tests.memory_oracle import spans_of_tasks
from tests.memory_spans import Span, spans_of
from tests.proposals import propose
from tests.random_strategies import TYPES, strategies
from tests.test_baselines import Builder, cnn, mlp, transformer
from tests.test_delta import TOPOLOGIES, dags, differences, normed, tied
from tests.test_schedule import staged
from tests.test_search import with_memory

Configs = tuple[OperatorConfig, ...]
OPTIMIZERS = ("sgd", "momentum", "adam")


@cache
def viewed() -> OperatorGraph:
    """Views of everything: of an activation with other readers, of a view, of a weight, of an input."""
    b = Builder("viewed")
    flat = b.add("flat", "view", "n h w -> n (h w)", [b.source("x", 8, 4, 4)], [8, 16])
    hidden = b.linear("fc1", flat, 24)
    split = b.add("split", "view", "n (a b) -> n a b", [hidden], [8, 4, 6])
    joined = b.add("join", "view", "n a b -> n (a b)", [b.pointwise("double", split, split)], [8, 24])
    again = b.add("again", "view", "n a b -> n (a b)", [split], [8, 24])
    b.weight("row", 4, 6)
    row = b.add("line", "view", "a b -> (a b)", ["row"], [24])
    scaled = b.add("scale", "pointwise", "n a, a -> n a", [b.pointwise("sum", joined, again, hidden), row], [8, 24])
    return b.finish(b.linear("fc2", scaled, 10))


@cache
def narrow() -> OperatorGraph:
    """Attention of values with fewer features than queries: zeros behind them, for all samples or for a part at a time,
    as queries of a piece are few or many."""
    b, batch, heads, seq = Builder("narrow"), 8, 4, 64
    x, parts = b.source("x", batch, seq, 12), []
    for name, size in (("q", 64), ("k", 64), ("v", 16)):
        z = b.linear(name, x, heads * size)
        z = b.add(f"{name}.view", "view", "b s (h D) -> b s h D", [z], [batch, seq, heads, size])
        parts.append(b.add(f"{name}.t", "permute", "b s h D -> b h s D", [z], [batch, heads, seq, size]))
    pattern = "b h q E, b h K E, b h K v -> b h q v"
    y = b.add("attention", "attention", pattern, parts, [batch, heads, seq, 16])
    y = b.add("back", "permute", "b h s D -> b s h D", [y], [batch, seq, heads, 16])
    y = b.linear("out", b.add("merge", "view", "b s h D -> b s (h D)", [y], [batch, seq, heads * 16]), 10)
    return b.finish(b.add("flat", "view", "b s v -> (b s) v", [y], [batch * seq, 10]))


GRAPHS: dict[str, Callable[[], OperatorGraph]] = {
    "mlp": mlp, "cnn": cnn, "transformer": lambda: transformer(layers=1), "normed": normed, "tied": tied,
    "viewed": viewed, "narrow": narrow, "divided": lambda: with_weight_gradients(mlp(), able(mlp())),
}  # fmt: skip


def moments_of_tasks(lowered: Lowered) -> list[int]:
    """Moment of every task: of its block, computing or communicating."""
    return [4 * row.block + 2 + row.communicates for row in lowered.tasks.identity]


def expected_spans(lowered: Lowered) -> Counter[Span]:
    """The spans of the definition, between moments. Its first task is the beginning of the step, its last the end."""
    moments = moments_of_tasks(lowered)
    begin, end = moments[0], moments[-1]
    return Counter(
        Span(s.device, *_rounded(*_lifetime(s, moments), begin, end), s.nbytes, s.part)
        for s in spans_of_tasks(lowered)
        if s.nbytes
    )


def _lifetime(span: TaskSpan, moments: Sequence[int]) -> tuple[int, int]:
    """Moments. What is cut out of something behind a task is, like that, there when the task's block communicates;
    what is put together before one, like what it is made of, at that moment (``put_together``)."""
    block = 4 * span.block + 2
    first, last = block if span.added else moments[span.first], max(moments[span.last], block if span.block else 0)
    first = span.joined if span.joined >= 0 else first
    last = max(last, span.used_up)
    last = max(last, moments[span.left] // 4 * 4 + 3) if span.left >= 0 else last
    if span.cut < 0:
        return first, last
    behind = moments[span.cut] // 4 * 4 + 3
    return (first if span.first <= span.cut else behind), max(last, behind)


def _rounded(first: int, last: int, begin: int, end: int) -> tuple[int, int]:
    """What begins with the first task, or before it, is there from the beginning; likewise for the end."""
    return 0 if first <= begin else first, end if last >= end else last


def actual_spans(lowered: Lowered, spans: Sequence[Span]) -> Counter[Span]:
    moments = moments_of_tasks(lowered)
    begin, end = moments[0], moments[-1]
    return Counter(Span(s.device, *_rounded(s.first, s.last, begin, end), s.nbytes, s.part) for s in spans if s.nbytes)


def summed(spans: Iterable[Span | TaskSpan], devices: int) -> list[int]:
    """Peak by device of spans between moments (or tasks)."""
    change: list[Counter[int]] = [Counter() for _ in range(devices)]
    for s in spans:
        change[s.device][s.first] += s.nbytes
        change[s.device][s.last + 1] -= s.nbytes
    return [max(accumulate(row[at] for at in sorted(row)), default=0) for row in change]


def check(lowered: Lowered) -> None:
    spans = spans_of(lowered)
    assert actual_spans(lowered, spans) == expected_spans(lowered)
    found = memory(lowered)
    assert [m.peak for m in found] == summed(spans, len(lowered.topology.devices))
    by_task = summed(spans_of_tasks(lowered), len(found))
    assert all(m.peak >= peak for m, peak in zip(found, by_task, strict=True))


@pytest.mark.parametrize("topology", ["slow hosts", "two nodes of GPUs", "unequal devices on a bus"])
@pytest.mark.parametrize("name", GRAPHS)
def test_every_span_is_that_of_the_definition(name: str, topology: str) -> None:
    graph, cluster = GRAPHS[name](), TOPOLOGIES[topology]()
    space, rng = Space(graph, cluster), np.random.Generator(np.random.PCG64(7))
    lowering = Lowering(graph, cluster, Costs(graph, cluster))
    typed = with_precision(graph, "bf16", "float32")
    wide, configs = Lowering(typed, cluster, Costs(typed, cluster)), space.random_plan(rng)
    for k in range(6):
        way = get_args(SynchroniseBy)[k % 4]
        options = Options(optimizer=OPTIMIZERS[k % 3], bucket_bytes=(1, 1000, 25 * 2**20)[k // 2], synchronise_by=way)  # type: ignore[arg-type]
        check(lowering.lower(configs, options))
        check(wide.lower(configs, options))
        configs = space.random_plan(rng) if k % 2 else propose(rng, space, configs)[1]


def test_zeros_are_put_behind_values_on_cpus_alone() -> None:
    for name in ("slow hosts", "two nodes of GPUs"):
        graph, cluster = narrow(), TOPOLOGIES[name]()
        lowering = Lowering(graph, cluster, Costs(graph, cluster))
        for count in (1, 2):  # in four parts; two would save nothing
            samples = [dict.fromkeys(op.axes_of("sample")[:1], count) for op in graph.operators]
            configs = [make_config(op, s, range(count)) for op, s in zip(graph.operators, samples, strict=True)]
            check(lowering.lower(configs, Options()))


@settings(derandomize=True, deadline=None, max_examples=15)
@given(data=st.data())
def test_spans_of_any_strategy_are_those_of_the_definition(data: st.DataObject) -> None:
    graph = data.draw(st.one_of(dags(), st.sampled_from([mlp(), cnn(), transformer(layers=1), viewed()])))
    topology = TOPOLOGIES[data.draw(st.sampled_from(["slow hosts", "unequal devices on a bus"]))]()
    strategy = data.draw(strategies(graph, topology, types=st.sampled_from(sorted(TYPES))))
    options = strategy.options.model_copy(update={"optimizer": data.draw(st.sampled_from(OPTIMIZERS))})
    graph = options.typed(graph)
    check(Lowering(graph, topology, Costs(graph, topology)).lower(strategy.in_order(graph), options))


def test_views_belong_to_what_they_are_views_of() -> None:
    graph = viewed()
    topology = TOPOLOGIES["slow hosts"]()
    lowering = Lowering(graph, topology, Costs(graph, topology))
    rows = PlanRows(lowering, Templates(lowering), Options())
    units = make_units(graph, rows.wiring, rows.table, Options())
    names = [t.name for t in graph.of_kind("activation")]
    members = {
        frozenset(names[t] for t in units.activation[first:last])
        for first, last in zip(units.activation_first, units.activation_last, strict=True)
    }
    assert {"fc1", "split", "again"} in members and {"line"} in members and {"flat"} in members


# ---- kept up to date


def missing_of(found: Sequence[Memory], topology: Topology) -> float:
    return sum(max(0.0, m.peak / d.memory_bytes - 1.0) for m, d in zip(found, topology.devices, strict=True))


def walk(
    graph: OperatorGraph, topology: Topology, seed: int, steps: int, options: Options | None = None
) -> DeltaSimulator:  # fmt: skip
    """A walk of accepted and rejected proposals; memory is asked for after most steps, and compared."""
    rng, space = np.random.Generator(np.random.PCG64(seed)), Space(graph, topology)
    options = options or Options(optimizer=OPTIMIZERS[seed % 3], bucket_bytes=1000)  # type: ignore[arg-type]
    configs = space.random_plan(rng)
    simulator = DeltaSimulator(graph, topology, Costs(graph, topology), options, configs)
    for k in range(steps):
        new = space.random_plan(rng) if rng.random() < 0.1 else propose(rng, space, configs)[1]
        simulator.propose(differences(new, configs))
        found = memory(simulator.lowering.lower(new, options))
        asked = rng.random()
        if asked < 0.7:
            assert simulator.missing_memory() == missing_of(found, topology)
        if asked < 0.3:
            assert simulator.peaks().tolist() == [m.peak for m in found]
        if rng.random() < 0.5:
            simulator.accept()
            configs = new
        else:
            simulator.reject()
        if k % 4 == 0:
            kept = memory(simulator.lowering.lower(configs, options))
            assert simulator.missing_memory() == missing_of(kept, topology)
            assert simulator.peaks().tolist() == [m.peak for m in kept]
    return simulator


def middling(graph: OperatorGraph, topology: Topology) -> Topology:
    """The same devices with memory for about half of all plans."""
    rng, space = np.random.Generator(np.random.PCG64(0)), Space(graph, topology)
    lowering = Lowering(graph, topology, Costs(graph, topology))
    peaks = [max(m.peak for m in memory(lowering.lower(space.random_plan(rng), Options()))) for _ in range(7)]
    return with_memory(topology, sorted(peaks)[3])


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", GRAPHS)
def test_the_account_of_any_walk_is_that_of_the_plan(name: str, seed: int) -> None:
    graph = GRAPHS[name]()
    walk(graph, middling(graph, TOPOLOGIES["slow hosts"]()), seed, 25)


def test_a_change_that_lacks_memory_for_several_microbatches_is_noticed() -> None:
    graph, topology, options = GRAPHS["transformer"](), TOPOLOGIES["slow hosts"](), Options()
    stages = Stages((0,), (tuple(range(len(topology.devices))),), 8, "gpipe")
    rng, space = np.random.Generator(np.random.PCG64(1)), Space(graph, topology)
    configs = space.random_plan(rng)
    lowering = Lowering(graph, topology, Costs(graph, topology))
    peak = max(m.peak for m in memory(lowering.lower(configs, options, stages)))
    topology = with_memory(topology, int(1.3 * peak))
    simulator = DeltaSimulator(graph, topology, Costs(graph, topology), options, configs, stages=stages)
    assert simulator.missing_memory() == 0.0
    for _ in range(5):
        new = propose(rng, space, configs)[1]
        simulator.propose(differences(new, configs))
        found = memory(simulator.lowering.lower(new, options, stages))
        assert simulator.missing_memory() == missing_of(found, topology)
        simulator.reject()


def test_units_that_the_account_overlooks_are_noticed() -> None:
    graph, topology = mlp(), TOPOLOGIES["slow hosts"]()
    space, rng = Space(graph, topology), np.random.Generator(np.random.PCG64(3))
    first, second = space.random_plan(rng), space.random_plan(rng)
    expected = [m.peak for m in memory(Lowering(graph, topology, Costs(graph, topology)).lower(second, Options()))]
    noticed = []
    for overlooked in (None, *range(len(graph.operators))):
        simulator = DeltaSimulator(graph, topology, Costs(graph, topology), Options(), first)
        simulator.peaks()
        if overlooked is not None:
            units = simulator.sources.units
            units.concerned_last[overlooked] = units.concerned_first[overlooked]
        simulator.propose(differences(second, first))
        noticed.append(simulator.peaks().tolist() != expected)
    assert not noticed[0] and any(noticed[1:])


# ---- several microbatches and stages


def unrolled(spans: Sequence[Span], schedule: Schedule, device: int) -> int:
    """Peak of a device, by laying every microbatch's spans out one after the other. What is there once begins with the
    first microbatch for which the device runs the block, and ends with the last; receive buffers end with the first
    that uses them. What ends before it begins ends in the next microbatch. What each microbatch receives is there from
    a block on that the device runs for each."""
    count, group = int(schedule.microbatches[0]), int(schedule.group[device])
    runs: list[tuple[int, int]] = []
    for a in range(int(schedule.action_first[group]), int(schedule.action_last[group])):
        k = int(schedule.microbatch[a])
        for v in range(int(schedule.block_first[a]), int(schedule.block_last[a])):
            if not schedule.once[v] or k == (schedule.final[0] if schedule.last[v] else 0):
                runs.append((v, k))
    place = {run: at for at, run in enumerate(runs)}
    latest, earliest = dict(runs), dict(reversed(runs))
    own = sorted(latest)
    each = [v for v in own if not schedule.once[v] and not schedule.last[v]]
    change = Counter[int]()

    def add(nbytes: int, begin: tuple[int, int], first: int, end: tuple[int, int], last: int) -> None:
        change[4 * place[begin] + first] += nbytes
        change[4 * place[end] + last + 1] -= nbytes

    for s in spans:
        if s.device != device:
            continue
        rows = []
        for moment in (s.first, s.last):
            block = moment // 4
            among = own if block in latest or schedule.once[block] or schedule.last[block] else each or own
            v = next((w for w in among if w >= block), among[-1])
            rows.append((v, moment % 4 if v == block else 0))
        (a, first), (b, last) = rows
        if s.last < s.first:  # each microbatch's ends in the next one
            beside = s.part == "gradients"  # a sum, which is the first one; cut out of what ends where it begins
            order = sorted(range(count), key=lambda k: place[a, k])
            for k, following in zip(order, [*order[1:], None], strict=True):
                if beside and k == order[0]:
                    continue
                change[4 * place[a, k] + first + beside] += s.nbytes
                if following is not None:
                    change[4 * place[b, following] + last + 1] -= s.nbytes
            continue
        if not schedule.once[a] and not schedule.once[b]:
            for k in range(count):
                add(s.nbytes, (a, k), first, (b, k), last)
            continue
        ends = earliest if s.part == "buffers" else latest
        add(s.nbytes, (a, earliest[a]), first, (b, ends[b]), last)
        if s.part == "gradients" and not s.cast and not schedule.once[a]:
            for k in set(range(count)) - {earliest[a]}:
                add(s.nbytes, (a, k), first, (a, k), first)
    use = top = 0
    for moment in sorted(change):
        use += change[moment]
        top = max(top, use)
    return top


CUTS: list[tuple[ScheduleKind, int, int, int]] = [
    *(("1f1b", ranks, 1, count) for ranks in (1, 2) for count in (1, 2, 3, 5)),
    *(("breadth-first", 2, 2, count) for count in (1, 2, 3, 5)),
    *((kind, 2, 2, count) for kind in ("zero-bubble", "zero-bubble-v") for count in (1, 2, 4, 6)),
    *(("dualpipe-v", 2, 2, count) for count in (4, 6)),
]  # fmt: skip
"""Schedule, ranks of two devices, stages on each, microbatches."""


@pytest.mark.parametrize(("kind", "ranks", "each", "count"), CUTS)
def test_the_peak_over_microbatches_is_that_of_the_passes_laid_out(
    kind: ScheduleKind, ranks: int, each: int, count: int
) -> None:
    graph, topology = mlp(), TOPOLOGIES["slow hosts"]()
    rng, space = np.random.Generator(np.random.PCG64(count)), Space(graph, topology)
    devices = {stage: (2 * r, 2 * r + 1) for r, row in enumerate(placement(kind, ranks, each)) for stage in row}
    cuts = {1: (0,), 2: (0, 3), 4: (0, 1, 2, 4)}[ranks * each]
    cut = Stages(cuts, tuple(devices[stage] for stage in range(ranks * each)), count, kind)
    options = Options(optimizer="adam", bucket_bytes=1)
    lowering = Lowering(graph, topology, Costs(graph, topology))
    peaks = set()
    for _ in range(4):
        configs = [
            make_config(
                op, dict([row for row in config.degrees if row[1] == 2][:1]), cut.devices[stage][: len(config.devices)]
            )
            for op, config, stage in zip(
                graph.operators, space.random_plan(rng), cut.of(len(graph.operators)), strict=True
            )
        ]
        rows = PlanRows(lowering, Templates(lowering), options, cut)
        rows.set(dict(enumerate(configs)))
        account, sources = make_account(rows)
        missing_memory(account, sources, rows.state)
        spans = spans_of(lowering.lower(configs, options, cut))
        used = [d for of in cut.devices for d in of]
        expected = [unrolled(spans, rows.schedule, d) for d in used]
        assert account.peak[used].tolist() == expected
        measured = memory_of(*make_account(rows), rows.state)
        assert [measured[d].peak for d in used] == expected
        peaks.add(tuple(expected))
    assert len(peaks) > 1


@settings(derandomize=True, deadline=None, max_examples=12, phases=(Phase.generate,))
@given(data=st.data(), name=st.sampled_from(["slow hosts", "unequal devices on a bus"]))
def test_spans_of_stages_are_those_of_the_definition(data: st.DataObject, name: str) -> None:
    graph, topology = data.draw(st.sampled_from([mlp(), cnn(), transformer(layers=1), viewed()])), TOPOLOGIES[name]()
    stages, configs = data.draw(staged(graph, len(topology.devices), ["gpipe", "zero-bubble", "zero-bubble-v"], 1))
    lowered = Lowering(graph, topology, Costs(graph, topology)).lower(
        configs, Options(), replace(stages, microbatches=1)
    )
    assert actual_spans(lowered, spans_of(lowered)) == expected_spans(lowered)


@settings(derandomize=True, deadline=None, max_examples=25, phases=(Phase.generate,))
@given(data=st.data(), name=st.sampled_from(["slow hosts", "unequal devices on a bus"]))
def test_the_peak_of_any_schedule_is_that_of_the_passes_laid_out(data: st.DataObject, name: str) -> None:
    graph, topology = data.draw(st.sampled_from([mlp(), cnn(), viewed(), tied()])), TOPOLOGIES[name]()
    stages, configs = data.draw(staged(graph, len(topology.devices)))
    types = TYPES[data.draw(st.sampled_from(sorted(TYPES)))]
    again = data.draw(st.booleans())
    options = Options(optimizer="adam", bucket_bytes=1000, reshard_after_forward=again, **types)  # type: ignore[arg-type]
    graph = options.typed(graph)
    lowered = Lowering(graph, topology, Costs(graph, topology)).lower(configs, options, stages)
    spans, found = spans_of(lowered), memory(lowered)
    for d in {d for of in stages.devices for d in of}:
        assert found[d].peak == unrolled(spans, lowered.rows.schedule, d)
