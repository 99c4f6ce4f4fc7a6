"""``import --format``: from a file of measured layers to a graph. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import typer
from pydantic import ValidationError

from flexsearch.cli.common import check_outputs, show, stderr, stdout
from flexsearch.errors import FileFormatError
from flexsearch.files import describe, printable
from flexsearch.graph.dnn_partitioning import read_dnn_partitioning
from flexsearch.graph.model import OperatorGraph
from flexsearch.graph.ops.check import check_kinds
from flexsearch.graph.pipedream import read_pipedream
from flexsearch.graph.profiled import FORMATS, Format, LayerProfile, profiled_graph


def check_options(options: Mapping[str, object]) -> None:
    """Raise UsageError if an option was given that only models have."""
    for option, value in options.items():
        if value:
            raise typer.BadParameter("a file of measured layers has no such choice; leave it out", param_hint=option)


def write_graph(format_: str, source: str, output: Path, batch: int | None, name: str | None, as_json: bool) -> None:
    """Write the graph of a file of measured layers."""
    if format_ not in FORMATS:
        raise typer.BadParameter(f'"{format_}" is none of {", ".join(FORMATS)}', param_hint="--format")
    check_outputs({"--output": output}, source)
    profile = read_profiled(format_, source, batch)
    graph = graph_of(profile, source, name or Path(source).name.split(".")[0])
    graph.save(output)
    for note in profile.notes:
        stderr.print(f"Note: {note}.", soft_wrap=True)
    forward_s = sum(layer.forward_s for layer in profile.layers if not layer.data)
    backward_s = sum(layer.backward_s for layer in profile.layers)
    data = {
        "graph": graph.name, "path": str(output), "hash": graph.content_hash(), "operators": len(graph.operators),
        "parameter_bytes": sum(t.nbytes for t in graph.of_kind("parameter")), "batch": graph.batch,
        "forward_s": forward_s, "backward_s": backward_s, "notes": list(profile.notes),
    }  # fmt: skip

    def human() -> None:
        stdout.print(
            f"{graph.name}: {len(graph.operators)} operators with given times, {forward_s:.4g} s forward and "
            f"{backward_s:.4g} s backward for a batch of {graph.batch} -> {output}",
            soft_wrap=True,
        )
        stdout.print(f"Next: flexsearch optimize {output} --topology ethernet-10g-4", soft_wrap=True)

    show(as_json, data, human)


def read_profiled(format_: Format | str, source: str | Path, batch: int | None) -> LayerProfile:
    """The profile in a file of one of ``FORMATS``. Raises FileFormatError."""
    return (read_pipedream if format_ == "pipedream" else read_dnn_partitioning)(source, batch)


def graph_of(profile: LayerProfile, source: str | Path, name: str) -> OperatorGraph:
    """The graph of a profile. Raises FileFormatError, which names the file, if something is beyond the limits."""
    try:
        graph = profiled_graph(printable(name), profile)
        check_kinds(graph)
        return graph
    except ValueError as error:
        problem = describe(error.errors(include_url=False)[0]) if isinstance(error, ValidationError) else error
        raise FileFormatError(
            f"file {printable(str(source))} makes no graph: {problem}", "Are its times in ms and its sizes in bytes?"
        ) from error
