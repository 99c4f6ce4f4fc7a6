"""How good are the pipelines that the search finds? For layers whose times are given, against known answers.

    python -m benchmarks.pipeline_quality [--quick] [--json] [--only chains] [--data FOLDER]

Three tables. Devices are equal, on one switch; what takes time is only what is given, and transfers at the full rate of
the links. All times but the last table's are of simulated, synchronous training steps.

- ``chains``: random chains of layers. ``optimum_s``: of the best of ``plans``, all contiguous cuts x numbers of
  stages x replicas x microbatches in 1F1B order with a device for each stage; ``simulated``: those of them that a lower
  bound could not exclude. ``found_s``: of the plan that the search over layouts found, which knows more schedules and
  may shard weights; ``over_optimum``: its time over the optimum, below 1 where one of those is faster; ``plain_s``,
  ``plain_over_optimum``: the better one of its baselines of data parallelism and of pipelines with replicas, as far as
  they are among ``plans``; ``reach_s``: when the search had a plan as fast as the optimum (none: never);
  ``search_s``: what it took in all; both in one process, in processor time, as neighbours come and go.
- ``vgg16``: PipeDream's profile (SOSP 2019) on 4 devices at 1e9 B/s. ``published``: its plan, the first 17 layers on
  three devices, the rest on one, with the best number of microbatches. ``layouts``, ``operators``: the plans of the
  search over layouts and of the search over operators; ``vs_data_parallel``: how many times as fast; ``busiest_s``: the
  busiest device's given time. ``pipedream_s``, ``pipedream_vs_data_parallel``: the same of asynchronous training, by
  PipeDream's own cost model.
- ``splits``: graphs of dnn-partitioning (NeurIPS 2020) on as many accelerators as they say, by its objective: the
  largest load of a device, compute plus transfers, ms. ``contiguous_ms``: the smallest of contiguous splits;
  ``with_cpu_ms``: with their CPU too; ``published_ms``: what the authors' solver finds, which has the CPU. ``cut_ms``:
  of the best stages that the search over layouts begins with, after its moves of borders while they help.

The last two read third-party files: ``--data`` names the folder (default: $FLEXSEARCH_DATA) with ``pipedream/`` and
``dnn-partitioning/``; without it they are left out. All of it takes a few minutes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import Row, parser, report, say
from benchmarks.profiled import Loads, best_pipeline, equal_devices, random_chain
from flexsearch.cost import Costs
from flexsearch.graph import OperatorGraph
from flexsearch.graph.dnn_partitioning import BYTES_PER_MS, read_dnn_partitioning
from flexsearch.graph.pipedream import read_pipedream
from flexsearch.graph.profiled import ProfiledLayer, profiled_graph
from flexsearch.search import search
from flexsearch.search.hybrid import HybridProgress, search_hybrid
from flexsearch.search.hybrid.cuts import Cuts
from flexsearch.search.hybrid.divide import Divider
from flexsearch.search.hybrid.estimate import Estimates
from flexsearch.search.hybrid.layout import Layout
from flexsearch.search.hybrid.moves import moved_borders
from flexsearch.search.hybrid.work import Works
from flexsearch.simulate.staged import StagedSimulators
from flexsearch.strategy import OperatorConfig, Options, make_config
from flexsearch.strategy.pipeline import Pipeline

CHAINS = ((8, 4), (10, 4), (12, 6), (12, 8), (16, 4), (16, 8))
"""Layers and devices."""
QUICK_CHAINS = ((8, 4), (10, 4), (10, 8))
CHAIN_BATCH = 32
BANDWIDTH = 1e9
"""Of links, B/s: PipeDream's own figure for the published VGG-16 plan."""
FIRST_STAGE = 17
"""Layers of VGG-16 (node2 to node18; the Input node is none) in the published plan's first stage, on three devices of
four. Behind them PipeDream's own model finds its bottleneck: 102,760,448 bytes, there and back, in 0.2055 s."""
PUBLISHED_MS = {"bert24_inference": 17.7899, "bert24_training": 41.7458, "resnet50_training": 78.6318}
"""Best contiguous splits, by the reference solver."""
PLAIN = Options(optimizer="sgd")
TITLES = {
    "chains": "The search over layouts against all pipelines of random chains",
    "vgg16": "PipeDream's VGG-16 on 4 devices at 1e9 B/s",
    "splits": "Largest load of contiguous splits, by the objective of dnn-partitioning",
}


def chain_row(layers: int, devices: int, seed: int, budget_s: float) -> Row:
    """The optimum of a chain, and what the search finds."""
    graph, topology = random_chain(layers, CHAIN_BATCH, seed), equal_devices(devices, BANDWIDTH)
    say(f"{graph.name}, {devices} devices")
    began = time.perf_counter()
    optimum = best_pipeline(graph, topology, PLAIN)
    enumerate_s = time.perf_counter() - began
    reached, began = list[float](), time.process_time()

    def watch(progress: HybridProgress) -> None:
        if progress.best_s <= optimum.seconds:
            reached.append(time.process_time() - began)

    result = search_hybrid(graph, topology, PLAIN, budget_s=budget_s, processes=1, on_progress=watch)
    search_s = time.process_time() - began
    families = [result.baselines[name][0] for name in ("data-parallel", "pipeline x data") if name in result.baselines]
    plain = [c.seconds for c in families if c.layout.schedule == "1f1b" and c.layout.chunks == 1]
    best, layout = optimum.pipeline, result.best.layout
    return {
        "layers": layers, "devices": devices, "seed": seed, "plans": optimum.plans, "simulated": optimum.simulated,
        "enumerate_s": enumerate_s, "optimum": _words(best), "optimum_s": optimum.seconds,
        "found": f"{layout.schedule} {_words(result.best.pipeline)}"
                 f"{f' {layout.states.name.lower()} sharded' if layout.states else ''}"
                 f"{f' tensor {layout.tensor}' if layout.tensor > 1 else ''}",
        "found_s": result.best.seconds, "over_optimum": result.best.seconds / optimum.seconds,
        "plain_s": min(plain, default=None), "plain_over_optimum": min(plain) / optimum.seconds if plain else None,
        "reach_s": min(reached, default=None), "search_s": search_s,
    }  # fmt: skip


def _words(pipeline: Pipeline) -> str:
    sizes = [len(devices) for devices in dict.fromkeys(pipeline.devices)]
    on = f" on {' + '.join(map(str, sizes))} devices" if max(sizes) > 1 else ""
    return f"{pipeline.replicas} x {list(pipeline.first)}{on}, {pipeline.microbatches} microbatches"


def vgg_rows(data: Path, budget_s: float) -> list[Row]:
    """The published plan and ours."""
    profile = read_pipedream(data / "pipedream" / "vgg16.graph.txt")
    graph, topology = profiled_graph("vgg16", profile), equal_devices(4, BANDWIDTH)
    simulators = StagedSimulators(graph, topology)
    say("VGG-16: data parallel and published plans")
    everywhere = [make_config(op, {"b": 4}, range(4)) for op in graph.operators]
    plans = {"data-parallel": simulators.simulator(Pipeline(1, (0,), ((0, 1, 2, 3),)), everywhere, PLAIN).seconds}
    notes = {"data-parallel": "4 x [0], 1 microbatches"}
    plans["published"], count = _published(simulators, FIRST_STAGE)
    notes["published"] = f"3 + 1 devices, {count} microbatches"
    say("VGG-16: search over layouts")
    layouts = search_hybrid(graph, topology, PLAIN, budget_s=budget_s)
    plans["layouts"] = layouts.best.seconds
    notes["layouts"] = f"{layouts.best.layout.schedule} {_words(layouts.best.pipeline)}"
    say("VGG-16: search over operators")
    operators = search(graph, topology, Costs(graph, topology), PLAIN, budget_s=budget_s)
    assert operators.strategy.prediction is not None
    plans["operators"] = operators.strategy.prediction.iteration_s
    configs = operators.strategy.in_order(graph)
    notes["operators"] = _runs(graph, configs)
    busiest_s = {
        "data-parallel": _busiest(graph, everywhere),
        "published": _busiest(graph, _two_stages(graph, FIRST_STAGE)),
        "operators": _busiest(graph, configs),
    }
    own = _pipedream_s(profile.layers)
    return [
        {
            "plan": name, "step_s": seconds, "vs_data_parallel": plans["data-parallel"] / seconds,
            "busiest_s": busiest_s.get(name), "pipedream_s": own.get(name),
            "pipedream_vs_data_parallel": own["data-parallel"] / own[name] if name in own else None,
            "what": notes[name],
        }
        for name, seconds in plans.items()
    ]  # fmt: skip


def _pipedream_s(layers: Sequence[ProfiledLayer], devices: int = 4) -> dict[str, float]:
    """Seconds for a minibatch by the cost model of PipeDream (its optimizer_graph_hierarchical.py): of a stage the
    share of its compute, and 4 (m - 1) / m^2 times its weights over the bandwidth for m replicas; between stages the
    activations and their gradients, one after the other; the slowest of them counts."""
    computing = [layer for layer in layers if not layer.data]
    stages = {"data-parallel": (len(computing), devices, 0), "published": (FIRST_STAGE, devices - 1, 1)}
    found = {}
    for name, (end, replicas, others) in stages.items():
        weights = sum(layer.parameter_bytes for layer in computing[:end])
        first = _given_s(computing[:end]) / replicas + 4 * (replicas - 1) / replicas**2 * weights / BANDWIDTH
        moved = 2 * computing[end - 1].output_bytes / BANDWIDTH if others else 0.0
        found[name] = max(first, moved, _given_s(computing[end:]))
    return found


def _given_s(layers: Sequence[ProfiledLayer]) -> float:
    return sum(layer.forward_s + layer.backward_s for layer in layers)


def _two_stages(graph: OperatorGraph, begin: int) -> list[OperatorConfig]:
    """The first stage by samples on three devices, the rest on the fourth."""
    return [
        make_config(op, {"b": 3}, range(3)) if i < begin else make_config(op, {}, (3,))
        for i, op in enumerate(graph.operators)
    ]


def _published(simulators: StagedSimulators, begin: int) -> tuple[float, int]:
    """Seconds of the published plan with the best number of microbatches, and that number.

    The stages of a pipeline have as many replicas each, so its first stage is one block, of which each operator is
    split by samples, unevenly; every microbatch has a sample for each of its devices."""
    batch, found = simulators.graph.batch, []
    for count in (n for n in range(1, batch // 3 + 1) if batch % n == 0):
        configs = _two_stages(simulators.share(1, count)[0].graph, begin)
        pipeline = Pipeline(1, (0, begin), ((0, 1, 2), (3,)), count)
        found.append((simulators.simulator(pipeline, configs, PLAIN).seconds, count))
    return min(found)


def _busiest(graph: OperatorGraph, configs: Sequence[OperatorConfig]) -> float:
    """Given seconds of the busiest device."""
    busy: dict[int, float] = {}
    for op, config in zip(graph.operators, configs, strict=True):
        seconds = float(op.attributes["forward_s"]) + float(op.attributes["backward_s"])  # type: ignore[arg-type]
        for device in config.devices:
            busy[device] = busy.get(device, 0.0) + seconds / config.parts
    return max(busy.values())


def _runs(graph: OperatorGraph, configs: Sequence[OperatorConfig]) -> str:
    """Shares of the samples and devices of runs of operators."""
    found: list[tuple[str, tuple[int, tuple[int, ...]]]] = []
    for op, config in zip(graph.operators, configs, strict=True):
        how = config.parts, config.devices
        if not found or found[-1][1] != how:
            found.append((op.name, how))
    return "; ".join(f"{name}.. {parts} shares on {list(devices)}" for name, (parts, devices) in found)


def split_row(data: Path, name: str) -> Row:
    """The known optimum of a graph's contiguous splits, and the cut of the search over layouts."""
    say(f"splits of {name}")
    path = data / "dnn-partitioning" / f"{name}.json"
    loads, graph = Loads(path), profiled_graph(name, read_dnn_partitioning(path))
    accelerators, cpus = loads.file.maxFPGAs, loads.file.maxCPUs
    cuts, topology = Cuts(graph), equal_devices(accelerators, 1e3 * BYTES_PER_MS)
    estimates = Estimates(Works(graph, topology, None, PLAIN), cuts)

    def largest(first: tuple[int, ...]) -> float:
        parts = [0] * len(first)
        for i, op in enumerate(graph.operators[:-1]):
            stage = sum(i >= begin for begin in first) - 1
            parts[stage] |= 1 << loads.ids.index(int(op.name.removeprefix("node")))
        return loads.largest(parts)

    found = Divider(estimates, Layout(1, 1, 1), PLAIN, accelerators).divisions()
    cut, first = min((largest(first), first) for widths, first in found if set(widths) == {1})
    while (better := min((largest(new), new) for new in moved_borders(cuts, first)))[0] < cut:
        cut, first = better
    contiguous = loads.best(accelerators)
    return {
        "graph": name, "accelerators": accelerators, "one_device_ms": loads.largest([(1 << len(loads.ids)) - 1]),
        "published_ms": PUBLISHED_MS.get(name), "with_cpu_ms": loads.best(accelerators, cpus),
        "contiguous_ms": contiguous, "cut_ms": cut, "cut_over_contiguous": cut / contiguous,
    }  # fmt: skip


def rows_of(table: str, data: Path | None, quick: bool) -> list[Row]:
    """Rows of one of ``TITLES``; none where the files are missing."""
    if table == "chains":
        _compile()
        seeds = range(2 if quick else 5)
        sizes = QUICK_CHAINS if quick else CHAINS
        return [chain_row(n, k, seed, 15.0 if quick else 60.0) for n, k in sizes for seed in seeds]
    if data is None:
        say(f"{table}: left out, as neither --data nor FLEXSEARCH_DATA names the folder of the files")
        return []
    if table == "vgg16":
        _compile()
        return vgg_rows(data, 20.0 if quick else 120.0)
    return [split_row(data, name) for name in PUBLISHED_MS]


def _compile() -> None:
    """The first search on a machine compiles; that is not to be measured."""
    graph, topology = random_chain(3, 4, 0), equal_devices(2, BANDWIDTH)
    search_hybrid(graph, topology, PLAIN, budget_s=600.0)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--only", choices=sorted(TITLES), help="one of the tables")
    options.add_argument("--data", type=Path, help="folder of the third-party files (default: $FLEXSEARCH_DATA)")
    given = options.parse_args()
    data = given.data or (Path(os.environ["FLEXSEARCH_DATA"]) if os.environ.get("FLEXSEARCH_DATA") else None)
    if data is not None and not data.is_dir():
        options.error(f"--data: there is no folder {data}")
    rows: list[Row] = []
    for table in [given.only] if given.only else list(TITLES):
        found = rows_of(table, data, given.quick)
        if given.json:
            rows += [{"table": table, **row} for row in found]
        elif found:
            report(found, TITLES[table], False)
    if given.json:
        report(rows, "", True)


if __name__ == "__main__":
    main()
