"""``import`` and ``profile``: from a model to a graph, and from a graph to measured costs. Both need torch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from flexsearch.cli import common
from flexsearch.cli.common import GraphArgument, JsonOption, check_outputs, file_of, settings, show, stderr, stdout
from flexsearch.cli.progress import Live

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flexsearch.cost import Profile
    from flexsearch.graph import OperatorGraph, Tracing

ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODULE:CALLABLE",
        help="A callable that returns (model, inputs, targets, loss), as flexsearch.zoo:alexnet does, or (model, "
        "inputs) for a model that returns its loss. MODULE may be the path of a .py file. Or hf:TYPE or "
        "hf:CONFIG.json, a model that transformers ships.",
    ),
]
BatchOption = Annotated[
    int | None,
    typer.Option("--batch", min=1, max=2**40, metavar="N", help="Global batch size; short for --set batch=N."),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Keyword argument for the callable. Repeatable."),
]
FormatOption = Annotated[
    str | None,
    typer.Option(
        "--format",
        metavar="pipedream|dnn-partitioning",
        help="Read a file of measured layers in the format of one of these projects; --batch is its minibatch size.",
    ),
]


def keywords(batch: int | None, options: list[str] | None) -> dict[str, Any]:
    """Keyword arguments for the callable."""
    return ({} if batch is None else {"batch": batch}) | settings(options or [])


def import_(
    model: ModelArgument,
    output: Annotated[Path, typer.Option("--output", "-o", help="Graph file to write.")],
    opaque: Annotated[
        bool, typer.Option("--opaque", help="Import unknown operators as unsplittable ones instead of refusing them.")
    ] = False,
    batch_norm_groups: Annotated[
        int,
        typer.Option(
            "--batch-norm-groups",
            min=1,
            max=2**31,
            metavar="N",
            help="Normalise each of N equal parts of the batch separately, as DDP over N ranks does.",
        ),
    ] = 1,
    batch: BatchOption = None,
    set_: SetOption = None,
    name: Annotated[
        str | None, typer.Option("--name", help="Name of the graph. Default: the callable's name, or the file's.")
    ] = None,
    format_: FormatOption = None,
    as_json: JsonOption = False,
) -> None:
    """Turn a PyTorch model with its loss into an operator graph.

    The callable gets --batch and --set as keyword arguments.

    With the zoo, --set device=meta imports a model of any size without allocating it.

    hf:gpt2, or hf: and the path of a config.json, is a model of transformers, without its weights. Nothing is
    downloaded. --set changes a field of its configuration, --set seq=1024 the length of a text, and
    --set head=classification the task.

    With --format, the argument is a file of measured layers. Its graph can be planned and simulated, but not run.
    """
    if name is not None and (not name.isprintable() or not 0 < len(name) <= 200):
        raise typer.BadParameter("give up to 200 printable characters", param_hint="--name")
    if format_ is not None:
        from flexsearch.cli import profiled

        profiled.check_options({"--opaque": opaque, "--batch-norm-groups": batch_norm_groups > 1, "--set": set_})
        profiled.write_graph(format_, model, output, batch, name, as_json)
        return
    arguments = keywords(batch, set_)
    if model.startswith("hf:"):
        arguments = {"device": "meta"} | arguments
    check_outputs({"--output": output}, file_of(model))
    from flexsearch.graph import Tracing

    graph = _imported(model, arguments, name, Tracing(opaque=opaque, batch_norm_groups=batch_norm_groups))
    graph.save(output)
    _show_graph(graph, output, as_json)


def _imported(model: str, arguments: Mapping[str, Any], name: str | None, tracing: Tracing) -> OperatorGraph:
    """The graph of a callable's model, with notes on standard error."""
    from flexsearch.graph.huggingface import graph_name, is_huggingface
    from flexsearch.graph.importer import import_with_constants
    from flexsearch.graph.loading import load_callable

    default_name = graph_name(model) if is_huggingface(model) else model.rpartition(":")[2]
    with Live(f"importing {model}"):
        loaded = load_callable(model, **arguments)
        imported = import_with_constants(
            loaded.model, loaded.inputs, loaded.loss, targets=loaded.targets, name=name or default_name,
            tracing=tracing,
        )  # fmt: skip
    for note in imported.notes:
        stderr.print(f"Note: {note}.", soft_wrap=True)
    return imported.graph


def _show_graph(graph: OperatorGraph, output: Path, as_json: bool) -> None:
    """What was imported."""
    weights = sum(t.nbytes // t.itemsize for t in graph.of_kind("parameter"))
    unsplittable = sorted({op.name for op in graph.operators if op.kind == "opaque"})
    data = {
        "graph": graph.name, "path": str(output), "hash": graph.content_hash(), "operators": len(graph.operators),
        "parameters": weights, "parameter_bytes": sum(t.nbytes for t in graph.of_kind("parameter")),
        "batch": graph.batch, "opaque_operators": unsplittable,
    }  # fmt: skip

    def human() -> None:
        stdout.print(
            f"{graph.name}: {len(graph.operators)} operators, {weights:,} parameters, batch {graph.batch} -> {output}",
            soft_wrap=True,
        )
        if unsplittable:
            stdout.print(f"Unsplittable: {', '.join(unsplittable)}", soft_wrap=True)
        stdout.print(f"Next: flexsearch optimize {output} --topology ethernet-1g-4", soft_wrap=True)

    show(as_json, data, human)


def profile(
    graph: GraphArgument,
    output: Annotated[Path, typer.Option("--output", "-o", help="Profile file to write.")],
    device: Annotated[str, typer.Option("--device", help="cpu, cuda or cuda:N.")] = "cpu",
    batch: common.BatchOption = None,
    seq: common.SequenceOption = None,
    threads: Annotated[int, typer.Option("--threads", min=1, max=1024, help="Threads for each rank on a CPU.")] = 1,
    precision: Annotated[
        Literal["as-is", "bf16", "fp16"],
        typer.Option("--precision", help="Precision of the plans to measure for. as-is: what the graph says."),
    ] = "as-is",
    max_parts: Annotated[
        int,
        typer.Option(
            "--max-parts", min=1, max=2**16, metavar="N", help="Measure the pieces of splits into up to N parts."
        ),
    ] = 4,
    extend: Annotated[
        Path | None, typer.Option("--extend", help="Profile file to add to. May be the output file.")
    ] = None,
    repeats: Annotated[
        int, typer.Option("--repeats", min=1, max=10_000, metavar="N", help="Measure each piece at most N times.")
    ] = 7,
    budget: Annotated[
        str | None, typer.Option("--budget", "-b", metavar="10m", help="Stop measuring after this time.")
    ] = None,
    busy_neighbours: Annotated[
        int,
        typer.Option(
            "--busy-neighbours", min=0, max=256, metavar="N", help="Let N other processes do the same work meanwhile."
        ),
    ] = 0,
    as_json: JsonOption = False,
) -> None:
    """Measure the operators of a graph on this machine, forward and backward, in the sizes that plans use."""
    check_outputs({"--output": output}, graph)
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise typer.BadParameter(f'"{device}" is none of cpu, cuda, cuda:N', param_hint="--device")
    from flexsearch.cost import Profile
    from flexsearch.setting import parse_budget

    loaded = common.Size(batch, seq).load(graph)
    earlier = Profile.load(extend) if extend is not None else None
    budget_s = parse_budget(budget)[0] if budget is not None else None
    if budget is not None and budget_s is None:
        raise typer.BadParameter(f'"{budget}" is not a time such as 90s or 10m', param_hint="--budget")

    from flexsearch.measure.profiler import profile_graph

    with Live("measuring") as live:
        measured = profile_graph(
            loaded, device=device, threads=threads, max_parts=max_parts, known=earlier, repeats=repeats,
            budget_s=budget_s, busy_neighbours=busy_neighbours, precision=precision,
            progress=lambda done, total: live.show("measuring", done, total, f"{done} of {total} pieces"),
        )  # fmt: skip
    measured.save(output)
    old = len(earlier.entries) if earlier is not None else 0
    _show_profile(measured, old, loaded.name, output, _next(graph, output, precision), as_json)


def _next(graph: str, output: Path, precision: str) -> str:
    """The command that uses a profile."""
    command = f"flexsearch optimize {graph} --profile {output}"
    return command if precision == "as-is" else f"{command} --precision {precision}"


def _show_profile(measured: Profile, old: int, name: str, output: Path, following: str, as_json: bool) -> None:
    """What was measured of graph ``name``, beside ``old`` entries, and the command that comes next."""
    data = {
        "graph": name, "path": str(output), "device": measured.device.model_dump(mode="json"),
        "entries": len(measured.entries), "new_entries": len(measured.entries) - old,
    }  # fmt: skip
    data["figures"] = measured.figures.model_dump(mode="json") if measured.figures is not None else None
    data["residuals"] = {kind: fit.model_dump() for kind, fit in measured.residuals.items()}

    def human() -> None:
        _say_fit(measured)
        stdout.print(
            f"{len(measured.entries)} entries ({len(measured.entries) - old} new) of {measured.device} -> {output}\n"
            f"Next: {following}",
            soft_wrap=True,
        )

    show(as_json, data, human)


def _say_fit(profile: Profile) -> None:
    """The device's figures, and how well what was measured predicts other sizes."""
    from flexsearch.cli.details import tell
    from flexsearch.report.figures import figures_in_words, fits_grid
    from flexsearch.report.grid import Column, Grid
    from flexsearch.report.units import percent

    if profile.figures is not None:
        for line in figures_in_words(profile.figures):
            tell(line)
        stdout.print(fits_grid(profile.figures))
    if profile.residuals:
        columns = Column("operator", "text"), *map(Column, ("n", "median", "90th\npercentile"))
        grid = Grid(columns, "Error of times that are filled in from other sizes")
        for kind, fit in profile.residuals.items():
            grid.add(kind, str(fit.n), percent(fit.median), percent(fit.p90))
        stdout.print(grid)
