"""How many plans does the search evaluate in a second, on one thread?

    python -m benchmarks.search_speed [--quick] [--json] [--graphs alexnet256,nmt] [--clusters p100:1,p100:4]

For each graph and cluster the search's own chain goes from data parallelism for some seconds, and then the same way
again. Everything is counted: drawing, templates, simulating, accepting or restoring.

- ``proposals_per_s``: the second time, when all templates are known; ``first_proposals_per_s``: the first time;
- ``full_per_s``: whole plans from scratch, all templates known, compiled: their rows written and run;
  ``delta_over_full`` is the ratio to it; ``python_full_per_s``: plans lowered, with their tasks as Python sees them;
- ``accepted_share``;
- ``flexflow_per_s``: what FlexFlow's released code reached on a similar machine (2 cores, one thread), where known;
  ``flexflow_ratio``: proposals_per_s over it;
- ``peak_bytes``: memory of the process, which made nothing else.

Rows with ``stages`` and ``microbatches`` are of another walk: other splits of random operators in their stages, each
simulated and rejected, limited by the plan at hand, all templates known. Microbatches are of equal size, so that a
batch grows with their number; ``ratio_to_plain`` compares with the same stages and one microbatch.

Machines differ and are shared. ``reference_per_s`` is the rate of a fixed loop (an event loop in plain Python over
2,000 tasks on 16 devices; 400 on 2 shared cores of ours); ``proposals_per_reference`` compares across machines.
"""

from __future__ import annotations

import heapq
import json
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Final

import numpy as np

from benchmarks.harness import Row, median, parser, report, say
from flexsearch.cost import Costs
from flexsearch.graph import OperatorGraph
from flexsearch.graph.batch import with_batch
from flexsearch.lower.schedule import Stages
from flexsearch.search.climb import Climber
from flexsearch.search.constants import ROWS
from flexsearch.search.evaluate import Configs
from flexsearch.search.hybrid.cuts import Cuts
from flexsearch.simulate.delta import DeltaSimulator
from flexsearch.simulate.staged import StagedSimulators
from flexsearch.strategy import OperatorConfig, Options, make_config
from flexsearch.strategy.baselines import baseline
from flexsearch.strategy.pipeline import Pipeline
from flexsearch.topology import Topology

GRAPHS: Final = ("alexnet256", "inception_v3", "resnet101", "gpt2", "rnntc", "rnnlm", "nmt")
CLUSTERS: Final = ("p100:1", "p100:4", "p100:16")
SECONDS, QUICK_SECONDS = 20.0, 3.0
FULL_PLANS: Final = 10
STAGED: Final = ("gpt2", "resnet101")
"""Graphs that are measured in stages, too."""
STAGES: Final = 4
MICROBATCHES: Final = (1, 16, 64)
PROPOSED: Final = 500
FLEXFLOW: Final = {
    ("alexnet256", 4): 21_814, ("alexnet256", 16): 2_786,
    ("inception_v3", 4): 1_246, ("inception_v3", 16): 350, ("inception_v3", 64): 49,
    ("resnet101", 4): 779, ("resnet101", 16): 253, ("resnet101", 64): 34,
    ("gpt2", 4): 4_335, ("gpt2", 16): 1_196,
}  # fmt: skip
"""Evaluations per CPU second of FlexFlow's own simulator and MCMC (C++ -O2, one thread), by graph and devices. It
simulates an operator with its activation and normalisation as one, and proposes batch splits only."""


def chain(climber: Climber, start: Configs, seconds: float, most: int) -> tuple[int, int, float]:
    """Chains from ``start``, one after the other, for a time or a number of proposals: proposals, accepted, seconds."""
    done = accepted = generation = 0
    began = time.perf_counter()
    while done < most and time.perf_counter() - began < seconds:
        now = climber.evaluate(start)
        climber.chain.begin(start, now, now, generation, climber.patience)
        rng, ended = np.random.Generator(np.random.PCG64(generation)), False
        before = done
        while not ended and done < most and time.perf_counter() - began < seconds:
            ended = climber.chain.run(rng, min(ROWS, most - done))
            done = before + climber.chain.steps
        accepted += climber.chain.accepted
        generation += 1
    return done, accepted, time.perf_counter() - began


def full_seconds(simulator: DeltaSimulator) -> float:
    """One plan from nothing, with templates at hand: configs placed, edges wired, tasks written, events simulated."""
    taken = []
    configs, rows = simulator.configs, simulator.rows
    for _ in range(FULL_PLANS):
        began = time.process_time()
        numbers = [simulator.templates.config(i, config) for i, config in enumerate(configs)]
        rows.set_numbers(range(len(numbers)), numbers)
        simulator.engine.run(rows.plan.segments, rows.segment)
        taken.append(time.process_time() - began)
    return median(taken)


def reference_per_s() -> float:
    """Rate of the fixed loop: 2,000 tasks on 16 devices, each after the last of its device and two others."""
    rng, count, devices = np.random.default_rng(0), 2000, 16
    rows = [sorted({max(0, t - devices), *rng.integers(0, max(t, 1), 2).tolist()} - {t}) for t in range(count)]
    seconds = rng.random(count).tolist()
    taken = []
    for _ in range(50):
        began = time.perf_counter()
        _event_loop(rows, seconds, devices)
        taken.append(time.perf_counter() - began)
    return 1 / median(taken)


def _event_loop(dependencies: Sequence[Sequence[int]], seconds: Sequence[float], devices: int) -> float:
    """Makespan of tasks (task t on device t % ``devices``), in plain Python: nothing of flexsearch."""
    readers: list[list[int]] = [[] for _ in seconds]
    for task, row in enumerate(dependencies):
        for dependency in row:
            readers[dependency].append(task)
    missing, ready, free = [len(row) for row in dependencies], [0.0] * len(seconds), [0.0] * devices
    heap = [(0.0, task) for task, count in enumerate(missing) if not count]
    while heap:
        begin, task = heapq.heappop(heap)
        end = free[task % devices] = max(begin, free[task % devices]) + seconds[task]
        for reader in readers[task]:
            ready[reader] = max(ready[reader], end)
            missing[reader] -= 1
            if not missing[reader]:
                heapq.heappush(heap, (ready[reader], reader))
    return max(free)


def measure(name: str, cluster: str, seconds: float) -> Row:
    """One row of the table."""
    graph, topology = OperatorGraph.load(name), Topology.load(cluster)
    climber = Climber(graph, topology, Costs(graph, topology), Options(), seed=0)
    start = baseline("data-parallel", graph, topology).in_order(graph)
    climber.warm(start)
    first, accepted, first_s = chain(climber, start, seconds, sys.maxsize)
    simulator = climber.evaluate.at(start)
    # The same way again; several times if it is short.
    rounds = [chain(climber, start, np.inf, first)[2] for _ in range(3 if first_s < 30 * seconds else 1)]
    rate, devices = first / median(rounds), len(topology.devices)
    python_s = []
    for _ in range(2):
        began = time.perf_counter()
        lowered = climber.evaluate.lower(start)
        tasks = len(lowered.tasks)
        python_s.append(time.perf_counter() - began)
    full_s, reference, flexflow = full_seconds(simulator), reference_per_s(), FLEXFLOW.get((name, devices))
    return {
        "graph": name,
        "cluster": cluster,
        "devices": devices,
        "operators": len(graph.operators),
        "tasks": tasks,
        "proposals": first,
        "proposals_per_s": rate,
        "first_proposals_per_s": first / first_s,
        "full_per_s": 1 / full_s,
        "delta_over_full": rate * full_s,
        "python_full_per_s": 1 / min(python_s),
        "accepted_share": accepted / first,
        "flexflow_per_s": flexflow,
        "flexflow_ratio": rate / flexflow if flexflow else None,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "reference_per_s": reference,
        "proposals_per_reference": rate / reference,
    }


def staged_plan(
    simulators: StagedSimulators, graph: OperatorGraph, stages: int, microbatches: int
) -> tuple[Pipeline, list[OperatorConfig], list[tuple[int, OperatorConfig]]]:  # fmt: skip
    """A pipeline of equally many devices and operators a stage, data parallel inside; and other splits of operators."""
    each, operators = len(simulators.topology.devices) // stages, len(graph.operators)
    first = Cuts(graph).balanced([1.0] * operators, stages)
    devices = tuple(tuple(range(s * each, (s + 1) * each)) for s in range(stages))
    pipeline = Pipeline(1, first, devices, microbatches)
    configs, others = [], []
    stage_of = Stages(first, devices).of(operators)
    for i, op in enumerate(simulators.share(1, microbatches)[0].graph.operators):
        mesh = devices[stage_of[i]]
        splits = [make_config(op, {axis: each}, mesh) for axis in op.splittable if op.sizes[axis] >= each > 1]
        choices = [*splits, make_config(op, {}, mesh), make_config(op, {}, mesh[:1])]
        configs.append(next((c for c in choices if any(op.roles[a] == "sample" for a, _ in c.degrees)), choices[-1]))
        others += [(i, config) for config in choices if config != configs[-1]]
    return pipeline, configs, others


def measure_staged(name: str, cluster: str, seconds: float) -> list[Row]:
    """Rows for one graph in stages, with ever more microbatches; in processor time, as neighbours come and go."""
    one, topology, rows = OperatorGraph.load(name), Topology.load(cluster), list[Row]()
    for microbatches in MICROBATCHES:
        graph = with_batch(one, microbatches)
        simulators = StagedSimulators(graph, topology)
        pipeline, configs, others = staged_plan(simulators, graph, STAGES, microbatches)
        simulator = simulators.simulator(pipeline, configs, Options())
        order = np.random.default_rng(0).integers(len(others), size=PROPOSED)
        numbers = [([i], [simulator.templates.config(i, config)]) for i, config in (others[k] for k in order)]
        taken = []
        for _ in range(4):  # the first time makes templates
            began, done = time.process_time(), 0
            while done < PROPOSED and time.process_time() - began < seconds:
                simulator.attempt(*numbers[done], simulator.seconds)
                simulator.reject()
                done += 1
            taken.append((time.process_time() - began) / done)
        rate, full_s = 1 / median(taken[1:]), full_seconds(simulator)
        rows.append({
            "graph": name, "cluster": cluster, "devices": len(topology.devices), "operators": len(graph.operators),
            "stages": STAGES, "microbatches": microbatches, "proposals_per_s": rate, "full_per_s": 1 / full_s,
            "delta_over_full": rate * full_s,
            "ratio_to_plain": rate / rows[0]["proposals_per_s"] if rows else 1.0,
        })  # fmt: skip
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark, each row in a process of its own."""
    made = parser(__doc__)
    made.add_argument("--graphs", help=f"comma-separated shipped graphs or files; default: {','.join(GRAPHS)}")
    made.add_argument("--clusters", help=f"comma-separated topologies; default: {','.join(CLUSTERS)}")
    made.add_argument("--seconds", type=float, help=f"time of the first walk of each row; default: {SECONDS:g}")
    options = made.parse_args(arguments)
    graphs = options.graphs.split(",") if options.graphs else GRAPHS
    clusters = options.clusters.split(",") if options.clusters else CLUSTERS[:2] if options.quick else CLUSTERS
    seconds = options.seconds or (QUICK_SECONDS if options.quick else SECONDS)
    if len(graphs) == len(clusters) == 1:
        rows = [measure(graphs[0], clusters[0], seconds)]
        if graphs[0] in STAGED and len(Topology.load(clusters[0]).devices) > STAGES:  # else stages have no splits
            rows += measure_staged(graphs[0], clusters[0], seconds)
    else:
        rows = []
        for graph in graphs:
            for cluster in clusters:
                say(f"walking over {graph} on {cluster}")
                command = [sys.executable, "-m", "benchmarks.search_speed", "--graphs", graph, "--clusters", cluster]
                ran = subprocess.run(
                    [*command, "--seconds", str(seconds), "--json"], stdout=subprocess.PIPE, check=True, text=True
                )
                rows += json.loads(ran.stdout)["rows"]
    report(rows, "Proposals evaluated in a second, one thread", options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
