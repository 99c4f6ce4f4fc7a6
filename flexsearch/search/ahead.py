"""Compiling in two processes: the first time on a machine, a second one begins with what the first will need late.

What is to be compiled, for arguments of which types, a small search says that runs without compiled code. The two
processes take different functions (``compiled``), and each loads what the other has compiled.
"""

from __future__ import annotations

import os
import subprocess
import warnings
from typing import Final

import numpy as np

from flexsearch import children, compiled

ORDER: Final = ("simulate", "list_spans", "missing_memory", "propose", "draw", "write", "accept")
"""Entries that the second process begins with, while the first compiles what comes before them: half of the time."""


def start() -> subprocess.Popen[bytes] | None:
    """A process that helps this one to compile; None if everything is compiled. It ends when it is done, or with
    this one."""
    if compiled.folder is None or compiled.is_warm():
        return None
    return children.start(children.module(__name__), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


def _search() -> None:
    from flexsearch.cost import Costs
    from flexsearch.graph import OperatorGraph
    from flexsearch.search import search
    from flexsearch.topology import Topology

    graph, topology = OperatorGraph.load("mlp"), Topology.load("p100:2")
    with np.errstate(over="ignore"), warnings.catch_warnings(action="ignore"):
        search(graph, topology, Costs(graph, topology), proposals=1, processes=1)


def main() -> None:
    """Compile."""
    children.end_with(os.getppid())
    from flexsearch.linking import record

    calls = record(_search)
    rank = {name: place for place, name in enumerate(ORDER)}
    for entry, types in sorted(calls, key=lambda call: rank.get(call[0].py_func.__name__, len(ORDER))):
        entry.compile(types)


if __name__ == "__main__":
    main()
