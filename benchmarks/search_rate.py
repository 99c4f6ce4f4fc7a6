"""How many proposals a second does a real search make, from nothing, and how good is what it finds?

    python -m benchmarks.search_rate [--quick] [--json] [--cases inception_v3@p100,nmt@p100] [--against COMMIT]

Everything a user waits for is in it: templates, baselines, climbs, polishing; one process. What is compiled once on a
machine is compiled before. ``--against``: the same with another commit, from a worktree, turn about.

- ``proposals_per_s``: proposals over the time of the search; ``best_s``: iteration time of the plan that was found, by
  that commit's own simulator;
- ``flexflow_per_s``: what FlexFlow's released code reached on a similar machine; ``flexflow_ratio``: times that;
- ``against_per_s``, ``against_best_s``, ``ratio``: of the other commit, and proposals_per_s over it;
- ``peak_bytes``: memory of the process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from benchmarks.harness import Row, median, parser, report, say
from benchmarks.search_speed import FLEXFLOW
from flexsearch.topology import Topology

CASES: Final = (
    "inception_v3@p100", "resnet101@p100", "nmt@p100", "inception_v3@p100:16", "resnet101@p100:16", "nmt@p100:16",
    "bert_large@dgx-a100:8",
)  # fmt: skip
QUICK: Final = ("inception_v3@p100", "nmt@p100")
SECONDS, QUICK_SECONDS = 20.0, 8.0
ROOT: Final = Path(__file__).resolve().parents[1]
_RUN: Final = """
import json, resource, sys
from flexsearch.cost import Costs
from flexsearch.graph import OperatorGraph
from flexsearch.search import search
from flexsearch.topology import Topology
graph, topology = OperatorGraph.load(sys.argv[1]), Topology.load(sys.argv[2])
costs = Costs(graph, topology)
search(graph, topology, costs, proposals=50, processes=1)
result = search(graph, topology, costs, budget_s=float(sys.argv[3]), processes=1)
print(json.dumps({"proposals": result.proposals, "elapsed_s": result.elapsed_s,
                  "best_s": result.strategy.prediction.iteration_s,
                  "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}))
"""


def search_once(checkout: Path, graph: str, cluster: str, seconds: float) -> dict[str, Any]:
    """One search in a process of its own, with the code of a checkout."""
    done = subprocess.run(
        [sys.executable, "-c", _RUN, graph, cluster, str(seconds)], cwd=checkout, text=True, capture_output=True,
        check=True, env={**os.environ, "PYTHONPATH": str(checkout)},
    )  # fmt: skip
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@contextmanager
def worktree(commit: str | None) -> Iterator[Path | None]:
    """A checkout of another commit; None without one."""
    if commit is None:
        yield None
        return
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["git", "clone", "-q", str(ROOT), folder], check=True)
        subprocess.run(["git", "-C", folder, "checkout", "-q", commit], check=True)
        yield Path(folder)


def measure(case: str, seconds: float, rounds: int, other: Path | None) -> Row:
    """One row of the table."""
    graph, cluster = case.split("@")
    ours, theirs = [], []
    for _ in range(rounds):
        ours.append(search_once(ROOT, graph, cluster, seconds))
        if other is not None:
            theirs.append(search_once(other, graph, cluster, seconds))
    devices = len(Topology.load(cluster).devices)
    rate, flexflow = median([r["proposals"] / r["elapsed_s"] for r in ours]), FLEXFLOW.get((graph, devices))
    before = median([r["proposals"] / r["elapsed_s"] for r in theirs]) if theirs else None
    return {
        "graph": graph, "cluster": cluster, "devices": devices, "proposals_per_s": rate,
        "best_s": median([r["best_s"] for r in ours]), "flexflow_per_s": flexflow,
        "flexflow_ratio": rate / flexflow if flexflow else None, "against_per_s": before,
        "against_best_s": median([r["best_s"] for r in theirs]) if theirs else None,
        "ratio": rate / before if before else None, "peak_bytes": max(r["peak_bytes"] for r in ours),
    }  # fmt: skip


def main() -> None:
    """Print the table."""
    arguments = parser(__doc__ or "")
    arguments.add_argument("--cases", help="graph@cluster, separated by commas")
    arguments.add_argument("--against", metavar="COMMIT", help="compare with another commit")
    arguments.add_argument("--seconds", type=float, help="of each search")
    arguments.add_argument("--rounds", type=int, default=1)
    options = arguments.parse_args()
    seconds = options.seconds or (QUICK_SECONDS if options.quick else SECONDS)
    cases = options.cases.split(",") if options.cases else QUICK if options.quick else CASES
    rows: list[Row] = []
    with worktree(options.against) as other:
        for case in cases:
            say(case)
            rows.append(measure(case, seconds, options.rounds, other))
    report(rows, "Real searches, from nothing", options.json)


if __name__ == "__main__":
    main()
