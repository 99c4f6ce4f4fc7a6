"""``import`` and ``profile``: from a model to a graph, and from a graph to measured costs. Both need torch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import typer

from flexsearch.cli.common import GraphArgument, JsonOption, bar, settings, show, stderr, stdout, writable

ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODULE:CALLABLE",
        help="Returns (model, inputs, targets, loss), as flexsearch.zoo:alexnet does, or (model, inputs) for a model "
        "that returns its loss. A path to a .py file may stand for the module.",
    ),
]
BatchOption = Annotated[int | None, typer.Option("--batch", min=1, help="Global batch: the same as --set batch=N.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Keyword argument of the callable; may be given several times."),
]


def keywords(batch: int | None, given: list[str] | None) -> dict[str, Any]:
    """Keyword arguments for the callable."""
    return ({} if batch is None else {"batch": batch}) | settings(given or [])


def import_(
    model: ModelArgument,
    output: Annotated[Path, typer.Option("--output", "-o", help="Graph file to write.")],
    opaque: Annotated[
        bool, typer.Option("--opaque", help="Import operators outside the table unsplittable instead of refusing them.")
    ] = False,
    batch_norm_groups: Annotated[
        int,
        typer.Option(
            "--batch-norm-groups",
            min=1,
            help="Batch norm takes the statistics of so many equal parts of the batch on their own: not the model's "
            "function, but what DDP over as many ranks computes.",
        ),
    ] = 1,
    batch: BatchOption = None,
    set_: SetOption = None,
    name: Annotated[str | None, typer.Option("--name", help="Name of the graph; default: the callable's.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Turn a PyTorch model with its loss into an operator graph.

    The callable gets --batch and --set as keyword arguments; with the zoo, --set device=meta imports a model of any
    size without memory.
    """
    writable(output)
    from flexsearch.graph import Tracing
    from flexsearch.graph.importer import import_with_constants, load_callable

    tracing = Tracing(opaque=opaque, batch_norm_groups=batch_norm_groups)
    with stderr.status(f"importing {model}"):
        made = load_callable(model, **keywords(batch, set_))
        imported = import_with_constants(
            made.model, made.inputs, made.loss, targets=made.targets, name=name or model.rpartition(":")[2],
            tracing=tracing,
        )  # fmt: skip
    graph = imported.graph
    for note in imported.notes:
        stderr.print(f"Note: {note}.", soft_wrap=True)
    graph.save(output)
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
    threads: Annotated[int, typer.Option("--threads", min=1, help="Threads of one rank on a CPU.")] = 1,
    max_parts: Annotated[
        int, typer.Option("--max-parts", min=1, help="Measure the pieces of splits into up to so many parts.")
    ] = 4,
    extend: Annotated[
        Path | None, typer.Option("--extend", help="Profile whose measurements are kept and not repeated.")
    ] = None,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Measure each piece at most so often.")] = 7,
    budget: Annotated[str | None, typer.Option("--budget", help="Stop after a time, as 10m.")] = None,
    busy_neighbours: Annotated[
        int, typer.Option("--busy-neighbours", min=0, help="Processes that do the same work meanwhile.")
    ] = 0,
    as_json: JsonOption = False,
) -> None:
    """Measure each distinct (operator, local shape, dtype) of a graph on this machine, forward and backward."""
    writable(output)
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise typer.BadParameter(f'"{device}" is none of cpu, cuda, cuda:N', param_hint="--device")
    from flexsearch.api import parse_budget
    from flexsearch.cost import Profile
    from flexsearch.graph import OperatorGraph

    loaded = OperatorGraph.load(graph)
    known = Profile.load(extend) if extend is not None else None
    budget_s = parse_budget(budget)[0] if budget is not None else None
    if budget is not None and budget_s is None:
        raise typer.BadParameter(f'"{budget}" is not a time such as 90s or 10m', param_hint="--budget")

    from flexsearch.cost.profiler import profile_graph

    with bar(f"measuring {loaded.name}") as (progress, task):
        measured = profile_graph(
            loaded, device=device, threads=threads, max_parts=max_parts, known=known, repeats=repeats,
            budget_s=budget_s, busy_neighbours=busy_neighbours,
            progress=lambda done, total: progress.update(task, completed=done, total=total),
        )  # fmt: skip
    measured.save(output)
    old = len(known.entries) if known is not None else 0
    data = {
        "graph": loaded.name, "path": str(output), "device": measured.device.model_dump(mode="json"),
        "entries": len(measured.entries), "new_entries": len(measured.entries) - old,
    }  # fmt: skip
    show(
        as_json,
        data,
        lambda: stdout.print(
            f"{len(measured.entries)} entries ({len(measured.entries) - old} new) of {measured.device} -> {output}\n"
            f"Next: flexsearch optimize {graph} --profile {output}",
            soft_wrap=True,
        ),
    )
