"""``simulate`` and ``compare``: plans on paper. None of them imports torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from flexsearch.cli.common import (
    JsonOption,
    MaybeGraphArgument,
    ProfileOption,
    TopologyOption,
    check_outputs,
    example,
    load_setting,
    load_strategy,
    print_table,
    setting_of,
    show,
    stdout,
)
from flexsearch.cli.progress import Live, compiling

if TYPE_CHECKING:
    from flexsearch.api import Setting
    from flexsearch.report import PlanRow
    from flexsearch.strategy import Options

OptimizerOption = Annotated[
    Literal["sgd", "momentum", "adam"],
    typer.Option("--optimizer", help="The optimizer of the training, which sets the memory per weight."),
]


def make_options(optimizer: Literal["sgd", "momentum", "adam"]) -> Options:
    """Options with this optimizer."""
    from flexsearch.strategy import Options

    return Options(optimizer=optimizer)


def compare(
    graph: MaybeGraphArgument = None,
    topology: TopologyOption = None,
    strategy: Annotated[
        list[Path] | None, typer.Option("--strategy", "-s", metavar="S", help="Strategy file; as many as you like.")
    ] = None,
    profile: ProfileOption = None,
    optimizer: OptimizerOption = "momentum",
    as_json: JsonOption = False,
) -> None:
    """Compare the baselines and any strategy files under the simulator.

    With a strategy for a shipped graph, GRAPH and --topology may be left out.
    """
    from flexsearch.report import plan_rows
    from flexsearch.strategy import Strategy

    if strategy and (graph is None or topology is None):
        first = Strategy.load(strategy[0])
        setting = setting_of(strategy[0], first, graph, topology, profile, "GRAPH, before the options")
    else:
        setting = load_setting(*example(graph, topology, profile), profile)
    given = {str(path): load_strategy(path, setting) for path in strategy or []}
    options = next(iter(given.values())).options if given else make_options(optimizer)
    with Live(compiling()):
        rows = [setting.row(name, s) for name, s in given.items()]
        others = [setting.row(name, s) for name, s in setting.baselines(options).items()]
    show(
        as_json,
        {"graph": setting.graph.name, "topology": setting.topology.name, "plans": plan_rows(in_order(rows, others))},
        lambda: print_plans(setting, rows, others),
    )


def simulate(
    graph: MaybeGraphArgument = None,
    topology: TopologyOption = None,
    strategy: Annotated[Path | None, typer.Option("--strategy", "-s", metavar="S", help="Strategy file.")] = None,
    baseline: Annotated[
        str | None, typer.Option("--baseline", metavar="NAME", help="A baseline instead: data-parallel, megatron, ...")
    ] = None,
    profile: ProfileOption = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="Write the timeline as a Chrome trace, for ui.perfetto.dev.")
    ] = None,
    optimizer: OptimizerOption = "momentum",
    as_json: JsonOption = False,
) -> None:
    """Simulate one training step of a plan: time, busy devices, bytes over each link, peak memory.

    A strategy brings its topology, and names its graph if that is a shipped one; a baseline needs both.
    """
    if (strategy is None) == (baseline is None):
        raise typer.BadParameter("give either --strategy or --baseline")
    check_outputs({"--trace": trace}, graph, topology, strategy, profile)
    from flexsearch.report import save_trace
    from flexsearch.strategy import Strategy

    if strategy is not None:
        name, plan = str(strategy), Strategy.load(strategy)
        setting = setting_of(strategy, plan, graph, topology, profile, "GRAPH, before the options")
    else:
        assert baseline is not None
        if graph is None or topology is None:
            raise typer.BadParameter("a baseline needs a GRAPH and a --topology")
        setting = load_setting(graph, topology, profile)
        name, plan = baseline, setting.baseline(baseline, make_options(optimizer))
    with Live(compiling()):
        row = setting.row(name, plan)
        yardstick = setting.row("data-parallel", setting.baseline("data-parallel", plan.options)).simulation.makespan_s
    if trace is not None:
        save_trace(trace, row.lowered, row.simulation)

    from flexsearch.cli.details import print_details, simulation_data

    data = simulation_data(setting, row, yardstick) | {"trace": str(trace) if trace is not None else None}
    show(as_json, data, lambda: print_details(setting, row, yardstick, trace))


def in_order(rows: list[PlanRow], others: list[PlanRow]) -> list[PlanRow]:
    """The rows, and after them the others, each by time."""
    from flexsearch.api import by_time

    return by_time(rows) + by_time(others)


def print_plans(setting: Setting, rows: list[PlanRow], others: list[PlanRow]) -> None:
    """The table of plans under its headline."""
    from flexsearch.cli.details import headline
    from flexsearch.report import plan_table

    stdout.print(headline(setting), soft_wrap=True)
    print_table(plan_table(in_order(rows, others)))
