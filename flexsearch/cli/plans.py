"""``simulate``, ``optimize`` and ``compare``: plans on paper. None of them imports torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from flexsearch.cli.common import (
    GraphArgument,
    JsonOption,
    ProfileOption,
    TopologyOption,
    load_setting,
    load_strategy,
    print_table,
    show,
    stderr,
    stdout,
    writable,
)

if TYPE_CHECKING:
    from flexsearch.api import Setting
    from flexsearch.report import PlanRow
    from flexsearch.search.outcome import Progress, SearchResult
    from flexsearch.strategy import Options

OptimizerOption = Annotated[
    Literal["sgd", "momentum", "adam"],
    typer.Option("--optimizer", help="How much state the optimizer keeps for each weight."),
]


def _options(optimizer: Literal["sgd", "momentum", "adam"]) -> Options:
    from flexsearch.strategy import Options

    return Options(optimizer=optimizer)


def optimize(
    graph: GraphArgument = "alexnet",
    topology: TopologyOption = "ethernet-1g-4",
    budget: Annotated[
        str, typer.Option("--budget", "-b", metavar="30s|500", help="A time, or a number of proposals (repeatable).")
    ] = "30s",
    seed: Annotated[int, typer.Option("--seed", min=0, help="Same seed, same number of proposals: same strategy.")] = 0,
    output: Annotated[Path, typer.Option("--output", "-o", help="Strategy file to write.")] = Path("strategy.json"),
    profile: ProfileOption = None,
    start: Annotated[Path | None, typer.Option("--start", "-s", metavar="S", help="Strategy to go on from.")] = None,
    optimizer: OptimizerOption = "momentum",
    margin: Annotated[
        float | None,
        typer.Option("--margin", min=0.0, max=100.0, help="Percent by which a plan must beat the best baseline [5]."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Search for the fastest plan and write it as a strategy file.

    Without arguments: AlexNet on four hosts with 1 Gbit/s. Ctrl-C ends the search with the best plan so far.
    """
    writable(output)
    from flexsearch.api import MARGIN, refuse_what_does_not_fit
    from flexsearch.report import PlanRow

    setting = load_setting(graph, topology, profile)
    first = load_strategy(start, setting) if start is not None else None
    with _Live(budget) as live:
        result = setting.search(
            budget, seed=seed, start=first, margin=MARGIN if margin is None else margin / 100, on_progress=live.update,
            options=first.options if first is not None else _options(optimizer),
        )  # fmt: skip
    found = PlanRow("found", result.simulation, setting.lower(result.strategy))
    others = [PlanRow(name, o.simulation, setting.lower(o.strategy)) for name, o in result.baselines.items()]
    if not as_json:
        _print_table(setting, [found], others)
    refuse_what_does_not_fit(result, setting.topology)
    result.strategy.save(output)
    show(as_json, _found_data(setting, result, found, others, output), lambda: _say(graph, result, found, output))


def compare(
    graph: GraphArgument = "alexnet",
    topology: TopologyOption = "ethernet-1g-4",
    strategy: Annotated[
        list[Path] | None, typer.Option("--strategy", "-s", metavar="S", help="Strategy file; as many as you like.")
    ] = None,
    profile: ProfileOption = None,
    optimizer: OptimizerOption = "momentum",
    as_json: JsonOption = False,
) -> None:
    """The table of the baselines, and of the given strategies, under the simulator."""
    from flexsearch.report import plan_rows

    setting = load_setting(graph, topology, profile)
    given = {str(path): load_strategy(path, setting) for path in strategy or []}
    options = next(iter(given.values())).options if given else _options(optimizer)
    rows = [setting.row(name, s) for name, s in given.items()]
    others = [setting.row(name, s) for name, s in setting.baselines(options).items()]
    show(
        as_json,
        {"graph": setting.graph.name, "topology": setting.topology.name, "plans": plan_rows(_in_order(rows, others))},
        lambda: _print_table(setting, rows, others),
    )


def simulate(
    graph: GraphArgument,
    topology: TopologyOption,
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
    """Simulate one training step of a plan: time, busy devices, bytes over each link, peak memory."""
    if (strategy is None) == (baseline is None):
        raise typer.BadParameter("give either --strategy or --baseline")
    writable(trace)
    from flexsearch.report import save_trace

    setting = load_setting(graph, topology, profile)
    if strategy is not None:
        name, plan = str(strategy), load_strategy(strategy, setting)
    else:
        assert baseline is not None
        name, plan = baseline, setting.baseline(baseline, _options(optimizer))
    row = setting.row(name, plan)
    yardstick = setting.row("data-parallel", setting.baseline("data-parallel", plan.options)).simulation.makespan_s
    if trace is not None:
        save_trace(trace, row.lowered, row.simulation)

    from flexsearch.cli.details import print_details, simulation_data

    data = simulation_data(setting, row, yardstick) | {"trace": str(trace) if trace is not None else None}
    show(as_json, data, lambda: print_details(setting, row, yardstick, trace))


def _in_order(rows: list[PlanRow], others: list[PlanRow]) -> list[PlanRow]:
    from flexsearch.api import by_time

    return by_time(rows) + by_time(others)


def _print_table(setting: Setting, rows: list[PlanRow], others: list[PlanRow]) -> None:
    from flexsearch.cli.details import headline
    from flexsearch.report import plan_table

    stdout.print(headline(setting), soft_wrap=True)
    print_table(plan_table(_in_order(rows, others)))


def _found_data(
    setting: Setting, result: SearchResult, found: PlanRow, others: list[PlanRow], output: Path
) -> dict[str, Any]:
    from flexsearch.report import groups, in_words, plan_rows

    plans = plan_rows(_in_order([found], others))
    of_found = next(p for p in plans if p["name"] == found.name)
    return {
        "graph": setting.graph.name,
        "topology": setting.topology.name,
        "path": str(output),
        **{k: v for k, v in of_found.items() if k not in ("name", "note")},
        "words": in_words(found.lowered),
        "groups": [{"layers": g.layers, "treatment": g.treatment} for g in groups(found.lowered)],
        "seed": result.strategy.search.seed if result.strategy.search else None,
        "proposals": result.proposals,
        "accepted": result.accepted,
        "elapsed_s": result.elapsed_s,
        "proposals_per_s": result.proposals / result.elapsed_s if result.elapsed_s else None,
        "stopped": result.stopped,
        "plans": plans,
    }


def _say(graph: str, result: SearchResult, found: PlanRow, output: Path) -> None:
    """The plan in words, how the search ended, and what to do next."""
    from flexsearch.graph.shipped import SHIPPED
    from flexsearch.report import groups

    stdout.print("\nThe plan:")
    for group in groups(found.lowered):
        stdout.print(f"  {group.layers}: {group.treatment}", soft_wrap=True)
    rate = result.proposals / result.elapsed_s if result.elapsed_s else 0.0
    share = result.accepted / result.proposals if result.proposals else 0.0
    stdout.print(
        f"\n{result.proposals:,} proposals in {result.elapsed_s:.1f} s ({rate:,.0f}/s, {share:.0%} accepted). "
        f"Stopped: {result.stopped}.",
        soft_wrap=True,
    )
    model = "--model MODULE:CALLABLE"
    if (source := SHIPPED.get(graph)) is not None:
        model = f"--model flexsearch.zoo:{source.builder}"
        for name, value in source.arguments.items():
            model += f" --batch {value}" if name == "batch" else f" --set {name}={value}"
    count = len(result.strategy.cluster.devices)
    stdout.print(f"Wrote {output}. Next: flexsearch run -n {count} {output} {model}", soft_wrap=True)


class _Live:
    """The search on one line of the terminal: phase, how far, best so far, proposals per second, acceptance."""

    def __init__(self, budget: str) -> None:
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bar

        from flexsearch.api import parse_budget

        self.budget_s, self.limit = parse_budget(budget)
        self.bar = Bar(
            TextColumn("{task.description}"), BarColumn(bar_width=24), TextColumn("{task.fields[state]}"),
            console=stderr, transient=True, disable=not stderr.is_terminal,
        )  # fmt: skip
        self.task = self.bar.add_task(
            "getting ready (compiling once, the first time)", total=self.budget_s or self.limit, state=""
        )

    def __enter__(self) -> _Live:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def update(self, now: Progress) -> None:
        """Show where the search is."""
        from flexsearch.report.units import seconds

        rate = now.proposals / now.elapsed_s if now.elapsed_s else 0.0
        self.bar.update(
            self.task,
            description=now.phase,
            completed=now.elapsed_s if self.budget_s is not None else now.proposals,
            state=f"best {seconds(now.best_s)}   {rate:,.0f} proposals/s   {now.accepted / now.proposals:.0%} accepted",
        )
