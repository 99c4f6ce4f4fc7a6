"""Compiling in two processes: the first time on a machine, a second one begins with what the first will need late.

What is to be compiled, for arguments of which types, a small search says that runs without compiled code. The two
processes take different functions (``compiled``), and each loads what the other has compiled.
"""

from __future__ import annotations

import os
import warnings
from functools import partial
from typing import Final

import numpy as np

from flexsearch.children import end_with
from flexsearch.cost import Costs
from flexsearch.graph import OperatorGraph
from flexsearch.linking import record
from flexsearch.search.climb import Climber
from flexsearch.search.optimize import search
from flexsearch.strategy import Options
from flexsearch.strategy.baselines import baseline
from flexsearch.topology import Topology

ORDER: Final = ("simulate", "write", "list_spans", "propose")
"""Entries of a climb to begin with, while the first process compiles what comes before them: half of the time."""


def _climb(graph: OperatorGraph, topology: Topology) -> None:
    start = baseline("data-parallel", graph, topology).in_order(graph)
    Climber(graph, topology, Costs(graph, topology), Options(), 0).warm(start)


def _search(graph: OperatorGraph, topology: Topology) -> None:
    search(graph, topology, Costs(graph, topology), proposals=1, processes=1)


def main() -> None:
    """Compile what a search needs and no other process has compiled."""
    end_with(os.getppid())
    rank = {name: place for place, name in enumerate(ORDER)}
    graph, topology = OperatorGraph.load("mlp"), Topology.load("p100:2")
    with np.errstate(over="ignore"), warnings.catch_warnings(action="ignore"):
        for run in (_climb, _search):  # most of it is in the first, which takes a tenth of the time
            calls = record(partial(run, graph, topology))
            for entry, types in sorted(calls, key=lambda call: rank.get(call[0].py_func.__name__, len(ORDER))):
                entry.compile(types)


if __name__ == "__main__":
    main()
