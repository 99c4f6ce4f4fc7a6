"""What does a proposal cost as the cluster grows?

    python -m benchmarks.device_growth [--quick] [--json] [--cases llama_7b,bert_large]

Data x tensor parallel plans of one sample a device, tensor parallel in servers of 8 GPUs. Servers do the same, so one
is simulated (``docs/pipelines.md``). Each case is a process of its own; what is compiled once on a machine is compiled
before.

- ``first_s``: from the graph to the first simulated plan, everything included;
- ``proposal_s``: a proposal after that, median: one operator is split otherwise, and its splits may be new;
- ``peak_bytes``: memory of the process;
- ``ratio``: ``proposal_s`` over that on the smallest cluster.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

from benchmarks.harness import Row, parser, report, say

CASES: Final = ("llama_7b", "bert_large")
DEVICES: Final = (64, 512, 4096)
QUICK: Final = (64, 512)
ROOT: Final = Path(__file__).resolve().parents[1]
_RUN: Final = """
import json, resource, statistics, sys, time
from flexsearch.graph import OperatorGraph
from flexsearch.search.hybrid import Layout, LayoutSearch
from flexsearch.strategy import Options
from flexsearch.topology import Topology
name, devices = sys.argv[1], int(sys.argv[2])
options = Options(optimizer="adam", precision="bf16")

def evaluated():
    graph = OperatorGraph.load(name).resized(str(devices), None)
    one = LayoutSearch(graph, Topology.load(f"dgx-a100:{devices // 8}"), options, None, 1e9, None)
    return one, one.evaluate(layout, options)

def propose(one, plan, seconds):
    simulator = one.trials.simulators.simulator(plan.pipeline, plan.configs, options)
    taken, end = [], time.perf_counter() + seconds
    for change in one.trials.splits.alternatives(layout, plan.pipeline, plan.configs):
        operator = next(iter(change))
        began = time.perf_counter()
        simulator.propose({operator: change[operator]})
        simulator.reject()
        taken.append(time.perf_counter() - began)
        if began > end:
            break
    return taken

layout = Layout(devices // 8, 8, 1)
propose(*evaluated(), 0.0)  # compiles
began = time.perf_counter()
one, plan = evaluated()
first_s = time.perf_counter() - began
taken = propose(one, plan, float(sys.argv[3]))
print(json.dumps({"iteration_s": plan.seconds, "first_s": first_s, "proposals": len(taken),
                  "proposal_s": statistics.median(taken), "mean_proposal_s": statistics.fmean(taken),
                  "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}))
"""


def measure(graph: str, devices: int, seconds: float) -> dict[str, Any]:
    """One case, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", _RUN, graph, str(devices), str(seconds)], cwd=ROOT, text=True, capture_output=True,
        check=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Print the table."""
    arguments = parser(__doc__)
    arguments.add_argument("--cases", help="graphs, separated by commas")
    options = arguments.parse_args()
    rows: list[Row] = []
    for graph in options.cases.split(",") if options.cases else CASES:
        smallest = None
        for devices in QUICK if options.quick else DEVICES:
            say(f"{graph} on {devices}")
            found = measure(graph, devices, 3.0 if options.quick else 10.0)
            smallest = smallest or found["proposal_s"]
            rows.append({"graph": graph, "devices": devices, **found, "ratio": found["proposal_s"] / smallest})
    report(rows, "A proposal as the cluster grows", options.json)


if __name__ == "__main__":
    main()
