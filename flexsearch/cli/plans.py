"""``simulate`` and ``compare``: plans on paper. Neither imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from flexsearch.cli.common import (
    BatchOption,
    CodeOption,
    DataOption,
    JsonOption,
    MaybeGraphArgument,
    PriceOption,
    ProfileOption,
    SequenceOption,
    Size,
    TopologyOption,
    check_outputs,
    example,
    load_setting,
    load_strategy,
    refuse_code,
    setting_of,
    show,
    stdout,
    with_options,
)
from flexsearch.cli.layouts import compare_staged, simulate_staged
from flexsearch.cli.money import tell_cost, with_cost
from flexsearch.cli.progress import Live, compiling
from flexsearch.quantities import MAX_COUNT

if TYPE_CHECKING:
    from flexsearch.report import PlanRow
    from flexsearch.setting import Setting
    from flexsearch.strategy import Options, Strategy

OptimizerOption = Annotated[
    Literal["sgd", "momentum", "adam"],
    typer.Option("--optimizer", help="The training optimizer, which sets the memory per weight."),
]


_HELP = "Type of weights, activations and gradients; master weights stay float32. as-is: what the graph says."
PrecisionOption = Annotated[Literal["as-is", "bf16", "fp16"], typer.Option("--precision", help=_HELP)]
RoundedOption = Annotated[
    Literal["as-is", "bf16", "fp16", "tf32"],
    typer.Option(
        "--precision", help=f"{_HELP} tf32: the same, but float32 products are timed as TF32; set PyTorch's flag."
    ),
]  # fmt: skip

RecomputeOption = Annotated[
    Literal["none", "attention", "full"],
    typer.Option(
        "--recompute", help="Recompute activations in the backward pass to save memory; full: of whole repeated blocks."
    ),
]
GradientsOption = Annotated[
    Literal["as-is", "float32"],
    typer.Option(
        "--gradients",
        help="Type in which gradients of weights are added up and sent, with --precision bf16 or fp16. as-is: that.",
    ),
]
ReshardOption = Annotated[
    bool,
    typer.Option(
        "--reshard-after-forward", help="To save memory, free sharded weights after the forward pass and gather again."
    ),
]
PrefetchOption = Annotated[
    int,
    typer.Option(
        "--prefetch", min=0, max=MAX_COUNT,
        help="Gather sharded weights this many buckets ahead.",
    ),
]  # fmt: skip


def make_options(
    optimizer: Literal["sgd", "momentum", "adam"], precision: Literal["as-is", "bf16", "fp16", "tf32"],
    recompute: Literal["none", "attention", "full"], reshard_after_forward: bool, prefetch: int = 1,
    gradients: Literal["as-is", "float32"] = "as-is",
) -> Options:  # fmt: skip
    """Options for the whole step, as the commands name them."""
    from flexsearch.strategy import Options

    if gradients == "float32" and precision not in ("bf16", "fp16"):
        raise typer.BadParameter("give --precision bf16 or fp16, too", param_hint="--gradients float32")
    return Options(
        optimizer=optimizer, precision="as-is" if precision == "tf32" else precision, gradients=gradients,
        recompute=recompute, reshard_after_forward=reshard_after_forward, prefetch=prefetch,
    )  # fmt: skip


@dataclass(frozen=True)
class CompareOptions:
    """In the order of ``--help``."""

    graph: MaybeGraphArgument = None
    topology: TopologyOption = None
    strategy: Annotated[
        list[Path] | None, typer.Option("--strategy", "-s", metavar="S", help="Strategy file. Repeatable.")
    ] = None
    profile: ProfileOption = None
    batch: BatchOption = None
    seq: SequenceOption = None
    reads: DataOption = None
    code: CodeOption = None
    optimizer: OptimizerOption = "momentum"
    precision: RoundedOption = "as-is"
    gradients: GradientsOption = "as-is"
    recompute: RecomputeOption = "none"
    reshard_after_forward: ReshardOption = False
    prefetch: PrefetchOption = 1
    save: Annotated[
        str | None, typer.Option("--save", metavar="NAME", help="Write this baseline as a strategy file.")
    ] = None
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The file that --save writes; default: NAME.json.")
    ] = None
    as_json: JsonOption = False

    @property
    def path(self) -> Path | None:
        """What ``save`` writes."""
        if self.output is not None and self.save is None:
            raise typer.BadParameter("give --save NAME: the baseline to write", param_hint="--output")
        return self.output or (Path(f"{self.save.replace(' ', '-')}.json") if self.save is not None else None)


@with_options(CompareOptions)
def compare(options: CompareOptions) -> None:
    """Compare the baselines and any strategy files under the simulator.

    Each baseline gets the bucket size that suits it best, a pipeline the microbatches, and one that lacks memory what
    it computes again; --save writes one of them, to be run, explained or changed.
    With a strategy for a shipped graph, GRAPH and --topology may be left out. Where a strategy has stages or
    microbatches, the table has the strategies alone.
    """
    from flexsearch.report import plan_rows

    path, save, strategies = options.path, options.save, options.strategy or []
    setting = _compared_setting(options)
    check_outputs({"--output": path}, options.graph, options.topology, options.profile, *strategies)
    loaded = {str(path): load_strategy(path, setting, staged=True) for path in strategies}
    if not all(plan.is_plain for plan in loaded.values()):
        if save is not None:
            raise typer.BadParameter(
                "compare plans with stages or microbatches without it; they have no baselines in this table",
                param_hint="--save",
            )
        compare_staged(setting, loaded, options.as_json)
        return
    step = next(iter(loaded.values())).options if loaded else make_options(
        options.optimizer, options.precision, options.recompute, options.reshard_after_forward, options.prefetch,
        options.gradients,
    )  # fmt: skip
    with Live(compiling()):
        baselines = setting.baselines(step)
        if save is not None and save not in baselines:
            setting.baseline(save, step)  # says why it does not apply
        rows = [setting.named_row(name, s) for name, s in loaded.items()]
        others = [setting.row(name, s) for name, s in baselines.items()]
    if save is not None and path is not None:
        setting.with_prediction(baselines[save]).save(path)
    data = {
        "graph": setting.graph.name, "topology": setting.topology.name,
        "plans": plan_rows(in_order(rows, others)),
        "saved": save, "path": str(path) if path is not None else None,
    }  # fmt: skip

    def human() -> None:
        print_plans(setting, rows, others, near=True)
        if path is not None:
            stdout.print(f"\nWrote {save} to {path}.", soft_wrap=True)

    show(options.as_json, data, human)


def _compared_setting(options: CompareOptions) -> Setting:
    """What was named, else what the first strategy was made for, else the example."""
    from flexsearch.strategy import Strategy

    graph, topology, profile, size = options.graph, options.topology, options.profile, Size(options.batch, options.seq)
    rounds = options.precision == "tf32"
    if options.strategy and (graph is None or topology is None):
        path = options.strategy[0]
        first = Strategy.load(path)
        refuse_code(options.code, rounds)
        return setting_of(path, first, graph, topology, profile, size, "GRAPH, before the options")
    return load_setting(*example(graph, topology, profile), profile, size, options.reads, options.code, rounds)


@dataclass(frozen=True)
class SimulateOptions:
    """In the order of ``--help``."""

    graph: MaybeGraphArgument = None
    topology: TopologyOption = None
    strategy: Annotated[Path | None, typer.Option("--strategy", "-s", metavar="S", help="Strategy file.")] = None
    baseline: Annotated[
        str | None, typer.Option("--baseline", metavar="NAME", help="A baseline instead: data-parallel, megatron, ...")
    ] = None
    profile: ProfileOption = None
    batch: BatchOption = None
    seq: SequenceOption = None
    reads: DataOption = None
    code: CodeOption = None
    trace: Annotated[
        Path | None, typer.Option("--trace", help="Write the timeline as a Chrome trace, for ui.perfetto.dev.")
    ] = None
    optimizer: OptimizerOption = "momentum"
    precision: RoundedOption = "as-is"
    gradients: GradientsOption = "as-is"
    recompute: RecomputeOption = "none"
    reshard_after_forward: ReshardOption = False
    prefetch: PrefetchOption = 1
    cost_per_hour: PriceOption = None
    as_json: JsonOption = False


@with_options(SimulateOptions)
def simulate(options: SimulateOptions) -> None:
    """Simulate one training step of a plan: its time, how busy each device and link is, and peak memory.

    A strategy brings its topology, and names its graph if that is a shipped one; a baseline needs both.
    """
    trace, price = options.trace, options.cost_per_hour
    if (options.strategy is None) == (options.baseline is None):
        raise typer.BadParameter("give either --strategy or --baseline")
    check_outputs({"--trace": trace}, options.graph, options.topology, options.strategy, options.profile)
    from flexsearch.report import save_trace

    name, plan, setting = _named_plan(options)
    if not plan.is_plain:
        simulate_staged(setting, name, plan, trace, options.as_json, price)
        return
    with Live(compiling()):
        row = setting.row(name, plan)
        yardsticks = setting.yardsticks(plan.options)
    if trace is not None:
        save_trace(trace, row.lowered, row.simulation)

    from flexsearch.cli.details import print_details, simulation_data

    data = simulation_data(setting, row, yardsticks) | {"trace": str(trace) if trace is not None else None}

    def human() -> None:
        print_details(setting, row, yardsticks, trace)
        tell_cost(setting, row.simulation.makespan_s, price)

    show(options.as_json, with_cost(data, setting, price), human)


def _named_plan(options: SimulateOptions) -> tuple[str, Strategy, Setting]:
    """The strategy or baseline to simulate, its name, and where it runs."""
    from flexsearch.strategy import Strategy

    graph, topology, profile, size = options.graph, options.topology, options.profile, Size(options.batch, options.seq)
    rounds = options.precision == "tf32"
    if options.strategy is not None:
        refuse_code(options.code, rounds)
        plan = Strategy.load(options.strategy)
        how = "GRAPH, before the options"
        return str(options.strategy), plan, setting_of(options.strategy, plan, graph, topology, profile, size, how)
    assert options.baseline is not None
    if graph is None or topology is None:
        raise typer.BadParameter("a baseline needs a GRAPH and a --topology")
    setting = load_setting(graph, topology, profile, size, options.reads, options.code, rounds)
    step = make_options(
        options.optimizer, options.precision, options.recompute, options.reshard_after_forward, options.prefetch,
        options.gradients,
    )  # fmt: skip
    with Live(compiling()):  # its best bucket size is found by simulating it
        plan = setting.baseline(options.baseline, step)
    return options.baseline, plan, setting


def in_order(rows: list[PlanRow], others: list[PlanRow]) -> list[PlanRow]:
    """The rows, and after them the others, each by time."""
    from flexsearch.api import by_time

    return by_time(rows) + by_time(others)


def print_plans(setting: Setting, rows: list[PlanRow], others: list[PlanRow], near: bool = False) -> None:
    """The table of plans under its headline; ``near``: and what predictions cannot tell apart from the first."""
    from flexsearch.cli.details import headline, tell
    from flexsearch.report import plan_table
    from flexsearch.report.uncertainty import near_words

    tell(headline(setting), indent=2)
    stdout.print()
    stdout.print(plan_table(in_order(rows, others)))
    fitting = [row for row in (*rows, *others) if not row.shortfall]
    if near and fitting:
        best = min(fitting, key=lambda row: row.simulation.makespan_s)
        beside = {row.name: row.simulation.estimate for row in fitting if row is not best}
        if words := near_words(best.simulation.estimate, beside):
            tell(f"The fastest is {best.name}. {words}")
