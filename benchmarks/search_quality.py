"""How good are the plans that the search finds, and how soon? For the FlexFlow paper's networks and clusters.

    python -m benchmarks.search_quality [--quick] [--json] [--only networks] [--keep records.jsonl]

Five tables:

- ``networks``: for each graph and cluster the simulated iteration time of data parallelism, of the expert's plan (one
  weird trick; layer-wise for recurrent networks), of the best baseline, of the best plan in the space of FlexFlow's
  released code (batch degrees and consecutive devices; the same search, longest budget), of the plans found within
  each budget, and the time that no plan can beat. ``time_s``: median over the seeds; ``least_s``, ``most_s``: its
  spread; ``vs_data_parallel``, ``vs_expert``: how many times as fast; ``over_longest``, ``over_bound``: time over that
  of the longest budget, and over the bound; ``optimal_seeds``: seeds whose plan no change of a single operator makes
  faster; ``most_elapsed_s``: what a search really took. The paper's clusters (section 8.1) are 4 nodes of 4 P100 and 16
  of 4 K80: p100:1 and k80:1 are one node of each, p100:16 is more than the paper had.
- ``local``: whether the plans found within the longest budget on the first 2, 4 and 8 P100 are locally optimal: no
  change of a single operator, alone or with those that follow it, makes them faster.
- ``exhaustive``: whether the search reaches, with every seed, the best plan that branch and bound knows
  (``best_known_s``). If the proof is ``complete``, that is the optimum of the plans on aligned blocks of devices;
  else none of them takes less than ``proved_s``. ``latest_find_s``: when the last seed found its plan.
- ``dense``: a report by a user of FlexFlow: 8 dense layers, batch 16384, 4 V100, where the plan after 500,000 proposals
  was slower than data parallelism (flexflow/flexflow-train, issue 217).
- ``alternating``: four linear layers on two servers, where the best plans split layers in turn, on the plain and on the
  transposed mesh. ``integer_s``: the plan of an exact integer program; ``over_integer``: the found one's time over it,
  of the median and the worst seed; ``within``: seeds that reach 0.968 of it, to which a search from that plan came.

All of it takes about 7 hours. ``--keep FILE`` notes every search when it has ended, and does not make it again: so it
can be run in parts. Start a new file when the search has changed.
"""

from __future__ import annotations

import json
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.cases import ReleasedSpace, expert, first_devices, in_turn, load_graph, options_of
from benchmarks.harness import Row, median, parser, report_tables, say
from flexsearch.api import simulate
from flexsearch.cost import Costs
from flexsearch.errors import FlexsearchError
from flexsearch.graph import OperatorGraph
from flexsearch.search import Progress, SearchResult, search
from flexsearch.setting import Setting
from flexsearch.strategy import Strategy
from flexsearch.topology import Topology

GRAPHS = ("alexnet256", "inception_v3", "resnet101", "rnntc", "rnnlm", "nmt")
CLUSTERS = ("p100:1", "p100:4", "p100:16", "k80:1", "k80:4", "k80:16")
SMALL = ("lenet", "rnnlm_2")
SMALL_DEVICES = (2, 4)
LOCAL_DEVICES = (2, 4, 8)
SMALL_S = 10.0
"""Budget of a search that is compared with the optimum."""
ALTERNATING_S = 20.0
"""Budget of a search of the table ``alternating``."""
CONTINUED = 0.968
"""Share of the time of the integer program's plan that a search which starts from it reaches."""
EQUAL = 1e-6
"""Times that differ by a smaller share are the same: the tolerance of the exhaustive search."""
TITLES = {
    "networks": "Simulated iteration time of plans",
    "local": "Local optima within the longest budget, on the first P100 GPUs",
    "exhaustive": f"Search within {SMALL_S:g} s against the optimum, on GPUs of one p100 node",
    "dense": "8 dense layers, batch 16384, on 4 V100 (flexflow-train, issue 217)",
    "alternating": "4 layers of 4096 features, batch 256, on 2 servers of 4 H100",
}


@dataclass(frozen=True)
class Task:
    """One search. ``space``: "whole" or "released". ``devices``: the first of the cluster."""

    graph: str
    cluster: str
    devices: int
    space: str
    budget_s: float
    seed: int
    processes: int | None


@dataclass(frozen=True)
class Record:
    """What came of it. ``after_s``: when the plan was found; ``baselines``: seconds, and whether it fits."""

    time_s: float
    fits: bool
    optimal: bool
    proposals: int
    elapsed_s: float
    after_s: float
    stopped: str
    bound_s: float
    baselines: dict[str, tuple[float, bool]]


class Records:
    """Searches that were made, in memory and in a file."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.known: dict[Task, Record] = {}
        if path is not None and path.exists():
            for line in path.read_text().splitlines():
                task, record = json.loads(line)
                self.known[Task(**task)] = Record(**record)

    def of(self, task: Task) -> Record:
        """The record of a search, which is made if it was not."""
        if task not in self.known:
            say(f"{task.graph} on {task.devices} of {task.cluster}, {task.space} space, {task.budget_s:g} s, "
                f"seed {task.seed}")  # fmt: skip
            record = self.known[task] = perform(task)[1]
            if self.path is not None:
                with self.path.open("a") as file:
                    file.write(json.dumps([asdict(task), asdict(record)]) + "\n")
        return self.known[task]


@cache
def graph_called(name: str) -> OperatorGraph:
    return load_graph(name)


@cache
def _compiled() -> None:
    """The first search on a machine compiles; that is not to be measured."""
    graph, topology = load_graph("lenet"), Topology.load("p100:2")
    search(graph, topology, Costs(graph, topology), proposals=1000, processes=1)


def perform(task: Task) -> tuple[SearchResult, Record]:
    """Search."""
    _compiled()
    graph, topology = graph_called(task.graph), first_devices(task.cluster, task.devices)
    after = [(0.0, float("inf"))]

    def watch(progress: Progress) -> None:
        if progress.best_s < after[-1][1]:
            after.append((progress.elapsed_s, progress.best_s))

    result = search(
        graph, topology, Costs(graph, topology), options_of(task.graph), budget_s=task.budget_s, seed=task.seed,
        rule=ReleasedSpace.of(graph, topology) if task.space == "released" else None, processes=task.processes,
        on_progress=watch,
    )  # fmt: skip
    known = {name: (o.time_s, o.feasible) for name, o in result.baselines.items()}
    record = Record(
        result.simulation.makespan_s, result.feasible, result.locally_optimal, result.proposals, result.elapsed_s,
        after[-1][0], result.stopped, result.bound_s, known,
    )  # fmt: skip
    return result, record


# ---- the tables


def searched(records: Records, task: Task, options: Namespace) -> list[Record]:
    """A search with every seed."""
    return [records.of(replace(task, seed=seed)) for seed in range(options.seeds)]


def networks(records: Records, table: str, graph: str, cluster: str, options: Namespace) -> list[Row]:
    """Rows of one graph on one cluster."""
    topology = Topology.load(cluster)
    task = Task(graph, cluster, len(topology.devices), "whole", 0.0, 0, options.processes)
    longest = max(options.budgets)

    found = {budget_s: searched(records, replace(task, budget_s=budget_s), options) for budget_s in options.budgets}
    released = searched(records, replace(task, space="released", budget_s=longest), options)
    first, name = found[longest][0], expert(graph_called(graph), topology)
    parallel_s = first.baselines["data-parallel"][0]
    expert_s = first.baselines[name][0] if name is not None else None
    longest_s = median([r.time_s for r in found[longest]])

    def row(plan: str, seconds: Sequence[float], fits: bool, budget_s: float | None = None) -> dict[str, Any]:
        middle = median(seconds)
        return {
            "table": table, "graph": graph, "cluster": cluster, "devices": task.devices, "plan": plan,
            "budget_s": budget_s, "time_s": middle, "least_s": min(seconds), "most_s": max(seconds), "fits": fits,
            "vs_data_parallel": parallel_s / middle,
            "vs_expert": expert_s / middle if expert_s is not None else None,
            "over_longest": middle / longest_s, "over_bound": middle / first.bound_s,
        }  # fmt: skip

    def of_searches(plan: str, budget_s: float, made: Sequence[Record]) -> Row:
        one = row(plan, [r.time_s for r in made], all(r.fits for r in made), budget_s)
        return one | {
            "optimal_seeds": sum(r.optimal for r in made), "seeds": len(made),
            "most_elapsed_s": max(r.elapsed_s for r in made),
            "proposals_per_s": median([r.proposals / r.elapsed_s for r in made]),
        }  # fmt: skip

    best = min(first.baselines, key=lambda n: (not first.baselines[n][1], first.baselines[n][0]))
    named = {"data-parallel": "data-parallel", f"expert ({name})": name, f"best baseline ({best})": best}
    return [
        *(row(plan, [first.baselines[n][0]], first.baselines[n][1]) for plan, n in named.items() if n is not None),
        of_searches("released space", longest, released),
        *(of_searches("found", budget_s, made) for budget_s, made in found.items()),
        row("bound", [first.bound_s], True),
    ]


def local_optima(records: Records, graph: str, devices: int, options: Namespace) -> list[Row]:
    """Searches with each seed, and how many ended in a local optimum."""
    cluster, budget_s = "p100:1" if devices <= 4 else "p100:2", max(options.budgets)
    made = searched(records, Task(graph, cluster, devices, "whole", budget_s, 0, options.processes), options)
    seconds = [record.time_s for record in made]
    row = {
        "table": "local", "graph": graph, "devices": devices, "budget_s": budget_s, "time_s": median(seconds),
        "least_s": min(seconds), "most_s": max(seconds), "optimal_seeds": sum(r.optimal for r in made),
        "seeds": len(made), "vs_data_parallel": made[0].baselines["data-parallel"][0] / median(seconds),
        "latest_find_s": max(r.after_s for r in made),
    }  # fmt: skip
    return [row]


def against_optimum(name: str, devices: int, options: Namespace) -> list[Row]:
    """Searches of a small graph with each seed, and what branch and bound says of the best of them."""
    graph, topology = graph_called(name), first_devices("p100:1", devices)
    setting = Setting(graph, topology, Costs(graph, topology))
    made = []
    for seed in range(options.seeds):
        say(f"{name} on {devices} devices, seed {seed}")
        made.append(perform(Task(name, "p100:1", devices, "whole", SMALL_S, seed, options.processes)))
    best = min((result for result, _ in made), key=lambda r: r.simulation.makespan_s)
    say(f"{name} on {devices} devices: proof")
    proof = setting.prove(best, f"{options.proof:g}s")
    reached = [record.time_s <= proof.time_s * (1.0 + EQUAL) for _, record in made]
    seconds = [record.time_s for _, record in made]
    row = {
        "table": "exhaustive", "graph": name, "devices": devices, "best_known_s": proof.time_s,
        "complete": proof.complete, "proved_s": proof.bound_s, "found_s": median(seconds), "most_s": max(seconds),
        "reached_seeds": sum(reached), "seeds": len(made), "optimal_seeds": sum(record.optimal for _, record in made),
        "latest_find_s": max(record.after_s for _, record in made),
        "data_parallel_s": made[0][1].baselines["data-parallel"][0], "single_s": made[0][1].baselines["single"][0],
        "plans": float(proof.plans), "nodes": proof.nodes, "proof_s": proof.elapsed_s,
    }  # fmt: skip
    return [row]


def alternating(records: Records, options: Namespace) -> list[Row]:
    """Searches of each seed beside the plan of an integer program."""
    graph, cluster, budget_s = graph_called("mlp_4"), "hgx-h100:2/4", ALTERNATING_S
    topology = first_devices(cluster, 8)
    plan = Strategy.make(graph, topology, in_turn(graph, topology))
    integer_s = simulate(graph, topology, plan).makespan_s
    made = searched(records, Task("mlp_4", cluster, 8, "whole", budget_s, 0, options.processes), options)
    seconds = [record.time_s for record in made]
    row = {
        "table": "alternating", "budget_s": budget_s, "integer_s": integer_s, "time_s": median(seconds),
        "most_s": max(seconds), "over_integer": median(seconds) / integer_s, "most_over": max(seconds) / integer_s,
        "within": sum(s <= CONTINUED * integer_s for s in seconds), "seeds": len(made),
        "optimal_seeds": sum(r.optimal for r in made), "latest_find_s": max(r.after_s for r in made),
    }  # fmt: skip
    return [row]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    options = _options(arguments)
    records, rows = Records(options.keep), list[Row]()
    jobs: list[tuple[str, Callable[[Namespace], Sequence[Row]]]] = [
        *(("networks", partial(networks, records, "networks", *p)) for p in product(options.graphs, options.clusters)),
        *(("local", partial(local_optima, records, *p)) for p in product(options.graphs, LOCAL_DEVICES)),
        *(("exhaustive", partial(against_optimum, *p)) for p in product(options.small, SMALL_DEVICES)),
        ("alternating", partial(alternating, records)),
        ("dense", partial(networks, records, "dense", "dense_8", "v100-nvlink-4")),
    ]
    for table, job in jobs:
        if options.only in (None, table):
            began = time.monotonic()
            try:
                rows += job(options)
            except FlexsearchError as error:
                say(f"{table}: {error}")
                return 2
            say(f"  {time.monotonic() - began:.0f} s")
    report_tables(rows, TITLES, options.json)
    return 0


def _options(arguments: Sequence[str] | None) -> Namespace:
    made = parser(__doc__)
    made.add_argument("--only", choices=tuple(TITLES), help="only this table")
    made.add_argument("--graphs", help=f"of networks and local, comma-separated; default: {','.join(GRAPHS)}")
    made.add_argument("--clusters", help=f"of networks, comma-separated; default: {','.join(CLUSTERS)}")
    made.add_argument("--small", help=f"graphs of exhaustive, comma-separated; default: {','.join(SMALL)}")
    made.add_argument("--budgets", help="seconds of a search, comma-separated; default: 1,10,60")
    made.add_argument("--seeds", type=int, help="searches with so many seeds; default: 5")
    made.add_argument("--processes", type=int, help="of a search; default: one for each core")
    made.add_argument("--proof", type=float, help="seconds of an exhaustive search, at most; default: 120")
    made.add_argument("--keep", type=Path, help="file of the searches that were made: they are not made again")
    options = made.parse_args(arguments)
    quick = options.quick
    options.graphs = options.graphs.split(",") if options.graphs else (("alexnet256", "rnnlm") if quick else GRAPHS)
    options.clusters = options.clusters.split(",") if options.clusters else (("p100:1",) if quick else CLUSTERS)
    options.small = options.small.split(",") if options.small else (("lenet",) if quick else SMALL)
    try:
        texts = options.budgets or ("1,3" if quick else "1,10,60")
        options.budgets = sorted({float(text) for text in texts.split(",")})
    except ValueError:
        made.error(f"--budgets {options.budgets}: seconds are wanted, as 1,10,60")
    options.seeds = options.seeds or (2 if quick else 5)
    options.proof = options.proof or (20.0 if quick else 120.0)
    if options.budgets[0] <= 0 or options.seeds < 1 or options.proof <= 0 or (options.processes or 1) < 1:
        made.error("budgets, seeds, processes and proof must be above 0")
    return options


if __name__ == "__main__":
    sys.exit(main())
