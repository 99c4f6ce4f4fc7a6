"""Importing this makes compiled code of lowering and memory ready: ranks forked from a process that did load none."""

from __future__ import annotations

from flexsearch.cost import Costs
from flexsearch.graph import OperatorGraph
from flexsearch.lower import lower
from flexsearch.simulate.memory import use_of
from flexsearch.strategy.baselines import baseline
from flexsearch.topology import Topology


def _lower_once() -> None:
    graph, topology = OperatorGraph.load("lenet"), Topology.load("ethernet-1g:2")
    use_of(lower(graph, baseline("data-parallel", graph, topology), topology, Costs(graph, topology)), 0)


_lower_once()
