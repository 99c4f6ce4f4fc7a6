"""How many plans can be simulated in a second? Walks of proposals over shipped graphs, on one thread.

    python -m benchmarks.search_speed [--quick] [--json]

For each graph and cluster: a walk of random proposals from data parallelism, half of them accepted, made once to fill
the caches of templates and then again, measured:

- ``proposals_per_s``: drawing, changing and simulating, with all templates at hand; ``cold_proposals_per_s``: the first
  time, when they are made;
- ``delta_s``: one proposal; ``pass_s``: the compiled pass over a whole plan whose templates are known; ``full_s``:
  lowering the whole plan, in Python, and simulating it by events; ``full_over_delta``;
- ``by_events_share``: proposals whose task graph had to be written down and simulated by events.

Machines differ and are shared. ``reference_per_s`` is the rate of a fixed loop (an event-driven simulation of 2,000
tasks on 16 devices) beside it; compare ``proposals_per_reference``.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.harness import Row, median, parser, report, say
from flexsearch.cost import Costs
from flexsearch.graph import OperatorGraph
from flexsearch.lower import TaskArrays
from flexsearch.search.space import Space
from flexsearch.simulate.delta import DeltaSimulator
from flexsearch.simulate.kernel import times
from flexsearch.strategy import OperatorConfig, Options
from flexsearch.strategy.baselines import baseline
from flexsearch.topology import Topology
from tests.proposals import propose

Configs = tuple[OperatorConfig, ...]
GRAPHS = ("alexnet", "resnet50", "gpt2")
CLUSTERS = ("p100:1", "p100:4")
WALK, QUICK_WALK = 400, 80
FULL_PLANS = 5


@dataclass(frozen=True)
class Step:
    """A proposal, and whether the walk goes on from it."""

    configs: Configs
    accepted: bool


def walk(space: Space, start: Configs, count: int) -> list[Step]:
    """A random walk; which proposals are accepted does not depend on their times, so that it can be repeated."""
    rng, at, steps = np.random.default_rng(0), start, []
    for _ in range(count):
        _, new = propose(rng, space, at)
        steps.append(Step(new, bool(rng.random() < 0.5)))
        at = new if steps[-1].accepted else at
    return steps


def simulate_walk(simulator: DeltaSimulator, space: Space, start: Configs, steps: Sequence[Step]) -> list[float]:
    """Seconds of each step, drawing included: the draws are made again, as a search makes them."""
    rng, at, taken = np.random.default_rng(0), start, []
    simulator.propose(dict(enumerate(start)))
    simulator.accept()
    for step in steps:
        began = time.perf_counter()
        propose(rng, space, at)
        rng.random()
        simulator.propose(
            {i: a for i, (a, b) in enumerate(zip(step.configs, at, strict=True)) if a is not b and a != b}
        )
        if step.accepted:
            simulator.accept()
            at = step.configs
        taken.append(time.perf_counter() - began)
    return taken


def reference_per_s() -> float:
    """Rate of the fixed loop: 2,000 tasks on 16 devices, each after the last of its device and two others."""
    rng, count, devices = np.random.default_rng(0), 2000, 16
    rows = [sorted({max(0, t - devices), *rng.integers(0, max(t, 1), 2).tolist()} - {t}) for t in range(count)]
    starts = np.cumsum([0, *map(len, rows)]).astype(np.uint32)
    each, none = np.arange(count + 1, dtype=np.uint32), np.zeros(count + 1, np.uint32)
    seconds = rng.random(count)
    tasks = TaskArrays(
        seconds, starts, np.array([d for row in rows for d in row], np.uint32), each,
        (np.arange(count) % devices).astype(np.uint32), seconds, none, np.zeros(0, np.uint32), np.zeros(0),
        np.full(count, np.inf),
    )  # fmt: skip
    times(tasks)
    taken = []
    for _ in range(50):
        began = time.perf_counter()
        times(tasks)
        taken.append(time.perf_counter() - began)
    return 1 / median(taken)


def measure(name: str, cluster: str, count: int, reference: float) -> Row:
    """One row of the table."""
    say(f"walking over {name} on {cluster}")
    graph, topology = OperatorGraph.load(name), Topology.load(cluster)
    space, options = Space(graph, topology), Options()
    plan = baseline("data-parallel", graph, topology)
    start = tuple(plan.configs[op.name] for op in graph.operators)
    steps = walk(space, start, count)
    simulator = DeltaSimulator(graph, topology, Costs(graph, topology), options, start)
    cold = simulate_walk(simulator, space, start, steps)
    before = simulator.passes, simulator.written
    warm = simulate_walk(simulator, space, start, steps)
    passes, written = simulator.passes - before[0], simulator.written - before[1]
    passes_s = []
    for _ in range(20):
        simulator.whole = False  # as if there were no checkpoints
        began = time.perf_counter()
        simulator.propose({})
        passes_s.append(time.perf_counter() - began)
    full, tasks = [], 0
    for step in steps[:: max(1, count // FULL_PLANS)]:
        began = time.perf_counter()
        lowered = simulator.lowering.lower(step.configs, options)
        times(lowered.tasks.arrays())
        full.append(time.perf_counter() - began)
        tasks = max(tasks, len(lowered.tasks))
    rate = count / sum(warm)
    return {
        "graph": name,
        "cluster": cluster,
        "devices": len(topology.devices),
        "operators": len(graph.operators),
        "tasks": tasks,
        "proposals_per_s": rate,
        "cold_proposals_per_s": count / sum(cold),
        "delta_s": median(warm),
        "pass_s": median(passes_s),
        "full_s": median(full),
        "full_over_delta": median(full) / median(warm),
        "by_events_share": written / passes,
        "reference_per_s": reference,
        "proposals_per_reference": rate / reference,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    made = parser(__doc__)
    made.add_argument("--graphs", help=f"comma-separated shipped graphs or files; default: {','.join(GRAPHS)}")
    made.add_argument("--clusters", help=f"comma-separated topologies; default: {','.join(CLUSTERS)}")
    options = made.parse_args(arguments)
    graphs = options.graphs.split(",") if options.graphs else GRAPHS
    clusters = options.clusters.split(",") if options.clusters else CLUSTERS
    count, reference = QUICK_WALK if options.quick else WALK, reference_per_s()
    rows = [measure(graph, cluster, count, reference) for graph in graphs for cluster in clusters]
    report(rows, "Proposals simulated in a second, one thread", options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
