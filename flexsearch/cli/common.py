"""What the commands share: options, what is printed where, and reading what the user names."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import MISSING, fields
from functools import update_wrapper
from inspect import Parameter, Signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeVar, get_type_hints

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from flexsearch import output
from flexsearch.cli import streams
from flexsearch.errors import FlexsearchError, StrategyError

if TYPE_CHECKING:
    from flexsearch.graph import OperatorGraph
    from flexsearch.setting import Setting
    from flexsearch.strategy import Strategy
    from flexsearch.topology import Topology
    from flexsearch.topology.codes import CodeKind

Record = TypeVar("Record")


def with_options(options: type[Record]) -> Callable[[Callable[[Record], None]], Callable[..., None]]:
    """Decorate a function of a record with what typer makes a command of: a function of the record's fields."""
    types = get_type_hints(options, include_extras=True)
    parameters = [
        Parameter(
            field.name, Parameter.KEYWORD_ONLY, annotation=types[field.name],
            default=Parameter.empty if field.default is MISSING else field.default,
        )
        for field in fields(options)  # type: ignore[arg-type]
    ]  # fmt: skip

    def decorate(run: Callable[[Record], None]) -> Callable[..., None]:
        def command(**values: Any) -> None:
            run(options(**values))

        update_wrapper(command, run)
        command.__annotations__ = types
        command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        return command

    return decorate


class _Plain(Console):
    """A console that prints names as they are: no markup in them, and nothing that steers the terminal."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control is None and not segment.text.isprintable():
                segment = Segment(streams.printable(segment.text), segment.style)
            yield segment


def _console(error: bool, width: int | None = None) -> Console:
    return _Plain(stderr=error, width=width, highlight=False, markup=False, emoji=False)


stdout = _console(False, None if (sys.stdout and sys.stdout.isatty()) or "COLUMNS" in os.environ else 132)
"""Results; in a pipe or a file there is room."""
stderr = _console(True)
"""Progress and remarks."""


def _is_finite(value: float | None) -> float | None:
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number")
    return value


FINITE: dict[str, Any] = {"callback": _is_finite}
"""For options that are numbers: neither inf nor nan."""

GraphArgument = Annotated[
    str, typer.Argument(metavar="GRAPH", help="A graph file, or a shipped graph by name (alexnet, vgg16, gpt2, ...).")
]
MaybeGraphArgument = Annotated[
    str | None,
    typer.Argument(metavar="GRAPH", help="A graph file, or a shipped graph by name (alexnet, vgg16, gpt2, ...)."),
]
TopologyOption = Annotated[
    str | None,
    typer.Option(
        "--topology", "-t", metavar="T", help="A topology file, or a preset (ethernet-1g-4, p100:8, dgx-a100, ...)."
    ),
]
ProfileOption = Annotated[
    Path | None,
    typer.Option("--profile", "-p", metavar="P", help="Measured compute times. Default: peak rates of the devices."),
]
DataOption = Annotated[
    str | None,
    typer.Option(
        "--data", metavar="KEY=VALUE,...",
        help="Training data read from the topology's storage: sample-bytes=110k, files-per-sample=1, "
        "files-per-batch=0, prefetch=1 (batches ahead), samples=1.2M (in the data set).",
    ),
]  # fmt: skip
CodeOption = Annotated[
    Literal["fused", "eager", "compiled", "captured"] | None,
    typer.Option(
        "--code",
        help="The training code on GPUs. fused: fused kernels; eager: PyTorch without compilation; compiled: by "
        "torch.compile; captured: compiled, run as one CUDA graph. Default: as the topology says.",
    ),
]
BatchOption = Annotated[
    str | None,
    typer.Option(
        "--batch",
        metavar="512|1M-tokens",
        help="Global batch, in samples or in tokens (k is 1024, M is 1024^2). Default: the graph's.",
    ),
]
SequenceOption = Annotated[
    int | None,
    typer.Option("--seq", min=1, max=2**40, metavar="N", help="Tokens per sequence. Default: the graph's."),
]


class Size(NamedTuple):
    """The batch and the sequence length that were asked for, if any."""

    batch: str | None = None
    sequence: int | None = None

    def load(self, graph: str) -> OperatorGraph:
        """The graph of a file or a shipped one, of this size."""
        from flexsearch.graph import OperatorGraph

        return OperatorGraph.load(graph).resized(self.batch, self.sequence)

    def words(self) -> str:
        """The options that say it."""
        options = (("--batch", self.batch), ("--seq", self.sequence))
        return " ".join(f"{option} {value}" for option, value in options if value is not None)


PriceOption = Annotated[
    float | None,
    typer.Option(
        "--cost-per-hour", min=0.0, metavar="X", help="Price of one device an hour; adds what a step costs.", **FINITE
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout, also for errors.")]

DEFAULT_GRAPH, DEFAULT_TOPOLOGY = "mlp", "ethernet-1g-4"
"""The example: what ``optimize`` and ``compare`` do if they are told nothing. It takes seconds to search, and the best
plan is none of the baselines."""


def example(graph: str | None, topology: str | None, *others: object) -> tuple[str, str]:
    """Graph and topology, or the example where nothing was named. ``others``: what else only fits one graph. Raises
    UsageError if something was named, but not the graph."""
    if graph is None and (topology is not None or any(others)):
        raise typer.BadParameter("name the graph as well: a file, or a shipped one such as alexnet", param_hint="GRAPH")
    return graph or DEFAULT_GRAPH, topology or DEFAULT_TOPOLOGY


def refuse_with(search: str, **options: object) -> None:
    """Raise UsageError for options that say nothing about a kind of search."""
    for name, value in options.items():
        if value:
            raise typer.BadParameter(f"does not go with a search {search}", param_hint=f"--{name}")


def show(as_json: bool, data: dict[str, Any], human: Callable[[], None]) -> None:
    """Print the result of a command: ``data`` as JSON, or what ``human`` prints."""
    if as_json:
        streams.emit(data)
    else:
        human()


def load_setting(
    graph: str, topology: str, profile: Path | None, size: Size, data: str | None = None, code: CodeKind | None = None,
    rounds: bool = False,
) -> Setting:  # fmt: skip
    """Graph, topology and costs by what the user named. ``data``: what is read from its storage; ``code``: that
    trains; ``rounds``: products in TF32."""
    from flexsearch.cost import Profile
    from flexsearch.setting import Setting
    from flexsearch.topology.changes import with_tf32

    cluster = load_topology(topology, code)
    if rounds:
        if profile is not None:
            raise typer.BadParameter("a profile has no times in TF32; leave one of them out", param_hint="--precision")
        cluster = with_tf32(cluster)
    if data is not None:
        cluster = cluster.with_reading(**_reading(data))
    return Setting.of(size.load(graph), cluster, Profile.load(profile) if profile is not None else None)


def load_topology(name: str, code: CodeKind | None) -> Topology:
    """A topology by what the user named, with the code that trains there."""
    from flexsearch.topology import Topology
    from flexsearch.topology.changes import with_code

    cluster = Topology.load(name)
    return cluster if code is None else with_code(cluster, code)


def refuse_code(code: object, rounds: bool) -> None:
    """Raise UsageError where a plan brings the cluster that it was made for, and with it the code and TF32."""
    if code is not None or rounds:
        raise typer.BadParameter(
            "a strategy brings the cluster that it was made for; what-if says what another one takes",
            param_hint="--code" if code is not None else "--precision tf32",
        )


_COUNTS = {"k": 10**3, "M": 10**6, "G": 10**9}


def _reading(data: str) -> dict[str, Any]:
    """Fields of ``topology.Reading`` from "sample-bytes=110k,prefetch=2"."""
    from flexsearch.topology import Reading

    reading: dict[str, Any] = {}
    for item in data.split(","):
        key, _, text = item.strip().partition("=")
        name, match = key.replace("-", "_"), re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?)([kMG]?)", text)
        if name not in Reading.model_fields or match is None:
            keys = ", ".join(field.replace("_", "-") for field in Reading.model_fields)
            raise typer.BadParameter(f'"{item}" is not KEY=NUMBER with a KEY of {keys}', param_hint="--data")
        number = float(match[1]) * _COUNTS.get(match[2], 1)
        reading[name] = int(number) if name in ("prefetch", "samples") and number.is_integer() else number
    return reading


def load_strategy(path: Path, setting: Setting, staged: bool = False) -> Strategy:
    """The strategy of a file, checked against graph and topology; errors name the file. ``staged``: it may have stages
    and microbatches."""
    from flexsearch.strategy import Strategy

    strategy = Strategy.load(path)
    try:
        (strategy.check if staged else strategy.check_supported)(setting.graph, setting.topology)
    except FlexsearchError as error:
        raise error.at(f"strategy file {path}") from error
    return strategy


def setting_of(
    path: Path, plan: Strategy, graph: str | None, topology: str | None, profile: Path | None, size: Size, how: str
) -> Setting:
    """The setting that the strategy of a file was made for. Its topology is in the file; its graph is only named there,
    so it must be shipped or given (``how`` says how). Raises StrategyError if what was given is something else."""
    from flexsearch.cost import Profile
    from flexsearch.files import shipped_names
    from flexsearch.setting import Setting
    from flexsearch.topology import Topology

    if graph is None and plan.graph.name not in shipped_names("graphs"):
        raise StrategyError(
            f"strategy file {path} was made for graph {plan.graph.name!r} ({plan.graph.hash}), which is none of the "
            "shipped ones",
            f"Give the graph with {how}.",
        )
    loaded = size.load(graph or plan.graph.name)
    if plan.graph.hash != loaded.content_hash():
        _check_size(path, plan, Size().load(graph or plan.graph.name), size)
    cluster = Topology.load(topology) if topology is not None else plan.cluster
    try:
        plan.check(loaded, cluster)
    except FlexsearchError as error:
        remedy = error.remedy if graph is not None else f"{error.remedy} Give the graph with {how}.".lstrip()
        raise type(error)(f"strategy file {path}: {error.message}", remedy) from error
    return Setting.of(loaded, cluster, Profile.load(profile) if profile is not None else None)


def _check_size(path: Path, plan: Strategy, graph: OperatorGraph, size: Size) -> None:
    """Raise StrategyError with the options to give if the strategy was made for another size of ``graph``, which is as
    its file has it, than ``size``."""
    needed = plan.resizing(graph)
    if needed or plan.graph.hash == graph.content_hash():
        raise StrategyError(
            f"strategy file {path} was made for another size of graph {plan.graph.name!r}: its first input has shape "
            f"{list(plan.inputs[0].shape)}",
            f"Give {needed}." if needed else f"Leave out {size.words()}.",
        )


def check_outputs(outputs: dict[str, Path | None], *inputs: str | Path | None) -> None:
    """Raise OutputError now rather than after the work if a file cannot be written, or is one of the inputs (by file,
    or by the name of a shipped graph or topology)."""
    from flexsearch.files import shipped

    sources: list[str | Path | None] = list(inputs)
    for name in filter(None, map(str, filter(None, inputs))):
        if re.fullmatch(r"[\w.+:-]+", name):
            sources += [shipped("graphs", name), shipped("profiles", re.sub(r"[:-]\d+$", "", name))]
    output.check(outputs, sources)


def file_of(model: str) -> str:
    """The file that MODULE:CALLABLE or hf:CONFIG is read from, if it lies in this folder."""
    if model.startswith("hf:"):
        return model.removeprefix("hf:")
    place = model.rpartition(":")[0]
    return place if place.endswith(".py") else f"{place.replace('.', '/')}.py"


def settings(options: list[str]) -> dict[str, Any]:
    """``key=value`` options as keyword arguments: integers, numbers, true/false/none and lists by their JSON, else
    text."""
    values: dict[str, Any] = {}
    for item in options:
        key, equals, text = item.partition("=")
        if not equals or not key.isidentifier():
            raise typer.BadParameter(f'"{item}" is not of the form key=value', param_hint="--set")
        try:
            values[key] = json.loads(text.lower() if re.fullmatch("(?i)true|false|null", text) else text)
        except json.JSONDecodeError:
            values[key] = None if text.lower() == "none" else text
        except RecursionError:
            raise typer.BadParameter(f"the value of {key} is nested too deeply", param_hint="--set") from None
        except ValueError:  # Python's limit
            raise typer.BadParameter(f"the value of {key} has too many digits", param_hint="--set") from None
    return values
