"""One layout, simulated without a search."""

from __future__ import annotations

from flexsearch.cost import Profile
from flexsearch.graph import OperatorGraph
from flexsearch.search.hybrid.cuts import Cuts
from flexsearch.search.hybrid.estimate import Estimates
from flexsearch.search.hybrid.layout import Layout
from flexsearch.search.hybrid.splits import Configs, Splits
from flexsearch.search.hybrid.work import Works
from flexsearch.simulate.staged import StagedSimulators, Step, step_of
from flexsearch.strategy import Options
from flexsearch.strategy.pipeline import Pipeline
from flexsearch.strategy.records import check_recompute
from flexsearch.topology import Topology


def simulate_layout(
    graph: OperatorGraph,
    topology: Topology,
    layout: Layout,
    options: Options | None = None,
    profile: Profile | None = None,
    first: tuple[int, ...] | None = None,
) -> tuple[Pipeline, Step]:
    """How a step is cut by ``layout``, and that step, simulated: the plan that a search takes for this layout before
    it moves borders of stages and splits operators otherwise, with Megatron's splits inside a group. ``first``: first
    operator of each stage; None: stages that make the slowest one as fast as possible. Raises StrategyError or another
    FlexsearchError where the graph, the batch or the devices do not suit the layout."""
    options = options or Options()
    simulators = StagedSimulators(graph, topology, profile, options)
    pipeline, configs = plan_layout(simulators, layout, options, first)
    return pipeline, step_of(simulators, simulators.simulator(pipeline, configs, options))


def plan_layout(
    simulators: StagedSimulators, layout: Layout, options: Options, first: tuple[int, ...] | None = None
) -> tuple[Pipeline, Configs]:
    """The plan alone, as in ``simulate_layout``; configs are those of the first block. Raises the same errors."""
    check_recompute(options, layout.stages)
    works = Works(simulators.graph, simulators.topology, simulators.profile, options)
    first = first or Estimates(works, Cuts(simulators.graph)).first(layout)
    return Splits(simulators).plan(layout, first)
