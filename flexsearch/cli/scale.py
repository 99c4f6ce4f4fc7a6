"""``scale``: the best plans over the number of devices. It does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from flexsearch.cli import signals
from flexsearch.cli.common import (
    BatchOption,
    GraphArgument,
    JsonOption,
    PriceOption,
    ProfileOption,
    SequenceOption,
    Size,
    check_outputs,
    show,
    stdout,
    with_options,
)
from flexsearch.cli.layouts import need_time, too_large
from flexsearch.cli.plans import GradientsOption, OptimizerOption, PrecisionOption, make_options
from flexsearch.cli.progress import Live, compiling

if TYPE_CHECKING:
    from flexsearch.graph import OperatorGraph
    from flexsearch.planning import PlanProgress
    from flexsearch.report.money import Price
    from flexsearch.report.scaling import Kind, Scaling, ScalingPoint
    from flexsearch.scaling import Scaler
    from flexsearch.spaces import Space
    from flexsearch.strategy import Options
    from flexsearch.topology.sizes import Sizes


@dataclass(frozen=True)
class ScaleOptions:
    """In the order of ``--help``."""

    graph: GraphArgument
    topology: Annotated[
        str,
        typer.Option("--topology", "-t", metavar="T", help="A preset, or a topology file, whose hosts are multiplied."),
    ]
    up_to: Annotated[
        int, typer.Option("--up-to", min=1, max=4096, metavar="N", help="The most devices to plan for.")
    ] = 64
    strong: Annotated[bool, typer.Option("--strong", help="Only strong scaling: the batch stays the same.")] = False
    weak: Annotated[bool, typer.Option("--weak", help="Only weak scaling: the batch grows with the devices.")] = False
    budget: Annotated[
        str,
        typer.Option("--budget", "-b", metavar="15s|500", help="How long to search for each number of devices."),
    ] = "15s"
    profile: ProfileOption = None
    batch: BatchOption = None
    seq: SequenceOption = None
    optimizer: OptimizerOption = "momentum"
    precision: PrecisionOption = "as-is"
    gradients: GradientsOption = "as-is"
    space: Annotated[
        Literal["free", "splits", "layouts"], typer.Option("--space", help="What to search, as in optimize.")
    ] = "free"
    cost_per_hour: PriceOption = None
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Draw the curves: a .png, .svg or .pdf file.")
    ] = None
    as_json: JsonOption = False

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The curves: both if neither or both are asked for."""
        if self.strong == self.weak:
            return "strong", "weak"
        return ("strong",) if self.strong else ("weak",)


@with_options(ScaleOptions)
def scale(options: ScaleOptions) -> None:
    """Plan a training step for more and more devices: step time, efficiency and memory, and where more stop paying.

    The number of devices doubles, from one to whole hosts to --up-to; hosts are those of the topology.

    Ctrl-C ends the command with the rows so far.
    """
    from flexsearch.report.plots import FORMATS

    graph, topology, output, space = options.graph, options.topology, options.output, options.space
    if output is not None and output.suffix.removeprefix(".") not in FORMATS:
        raise typer.BadParameter(f"{output} cannot be drawn; give a .png, .svg or .pdf file", param_hint="--output")
    check_outputs({"--output": output}, graph, topology, options.profile)
    from flexsearch.cli.details import times_words
    from flexsearch.cost import Profile
    from flexsearch.report.money import Price
    from flexsearch.scaling import Scaler
    from flexsearch.setting import parse_budget
    from flexsearch.topology.sizes import Sizes

    parse_budget(options.budget)  # refused before the work
    planned, sizes = Size(options.batch, options.seq).load(graph), Sizes.named(topology)
    measured = Profile.load(options.profile) if options.profile is not None else None
    if space == "free" and too_large(planned):
        space = "layouts"
    if space == "layouts":
        need_time(options.budget)
    step = make_options(options.optimizer, options.precision, "none", False, gradients=options.gradients)
    scaler = Scaler(planned, sizes, options.budget, step, space, measured)
    points = _collect(scaler, options.up_to, options.kinds)
    price = options.cost_per_hour
    curves = _curves(points, planned, Price(price) if price is not None else None)
    if output is not None:
        _draw(output, curves, planned, sizes)
    data = _data(curves, planned, sizes, space, output)
    headline = f"{_title(planned, sizes)}; {times_words(measured)}"
    show(options.as_json, data, lambda: _say(curves, headline, space, step, output))


def _collect(scaler: Scaler, most: int, kinds: tuple[Kind, ...]) -> dict[Kind, list[ScalingPoint]]:
    """The points of each curve. Ctrl-C ends the work; what it cut short is left out."""
    from dataclasses import replace

    from flexsearch.setting import parse_budget

    points: dict[Kind, list[ScalingPoint]] = {kind: [] for kind in kinds}
    each = parse_budget(scaler.budget)
    with Live(compiling(), each[0] or each[1]) as live:

        def report(what: str, now: PlanProgress) -> None:
            signals.current.poll()
            done = now.elapsed_s if each[0] is not None else now.plans
            live.show(f"{what}: {now.phase}", done, state=now.words)

        try:
            for kind, point in replace(scaler, on_progress=report).points(most, kinds):
                points[kind].append(point)
                signals.current.graceful = True  # there is a row
        except KeyboardInterrupt:
            pass
    signals.current.hold()
    if not any(points.values()):
        raise KeyboardInterrupt
    return points


def _curves(points: dict[Kind, list[ScalingPoint]], graph: OperatorGraph, price: Price | None) -> list[Scaling]:
    from flexsearch.graph.sequence import sequence_length
    from flexsearch.report.scaling import Scaling

    length = sequence_length(graph)
    return [Scaling(kind, tuple(curve), length, price=price) for kind, curve in points.items()]


def _draw(path: Path, curves: list[Scaling], graph: OperatorGraph, sizes: Sizes) -> None:
    from flexsearch.output import write
    from flexsearch.report.plots import rendered
    from flexsearch.report.scaling import scaling_figure

    write(path, rendered(scaling_figure(curves, _title(graph, sizes)), path.suffix.removeprefix(".")))


def _title(graph: OperatorGraph, sizes: Sizes) -> str:
    from flexsearch.graph.sequence import sequence_length

    length = sequence_length(graph)
    each = f" of {length:,} tokens" if length else ""
    return f"{graph.name}, batch {graph.batch:,}{each}, on hosts of {sizes.whole.name.split(':')[0]}"


def _data(
    curves: list[Scaling], graph: OperatorGraph, sizes: Sizes, space: Space, output: Path | None
) -> dict[str, Any]:
    from flexsearch.report.scaling import scaling_data

    return {
        "graph": graph.name, "topology": sizes.whole.name, "batch": graph.batch, "space": space,
        "interrupted": bool(signals.current.number), "path": str(output) if output is not None else None,
        **{curve.kind: scaling_data(curve) for curve in curves},
    }  # fmt: skip


def _say(curves: list[Scaling], headline: str, space: Space, options: Options, output: Path | None) -> None:
    from flexsearch.cli.details import tell
    from flexsearch.report.scaling import scaling_table, verdict

    tell(headline, indent=2)
    headings = {"strong": "the same batch on more devices", "weak": "the batch grows with the devices"}
    for curve in curves:
        tell(f"\n{curve.kind.capitalize()} scaling: {headings[curve.kind]}")
        stdout.print(scaling_table(curve))
        tell(f"\n{verdict(curve)}")
    if signals.current.number:
        tell("\nInterrupted: larger clusters were not planned.")
    if not any(curve.fitting for curve in curves):
        others = {"--space free": space == "splits", "--precision bf16": options.precision == "as-is"}
        remedies = [option for option, helps in others.items() if helps]
        tell(f"\nTry {', '.join(['more devices (--up-to)', *remedies])} or a shorter --seq.")
    if output is not None:
        stdout.print(f"\nWrote {output}.", soft_wrap=True)
