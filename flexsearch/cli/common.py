"""What the commands share: options, what is printed where, and reading what the user names."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from flexsearch.errors import FlexsearchError

if TYPE_CHECKING:
    from rich.progress import Progress
    from rich.table import Table

    from flexsearch.api import Setting
    from flexsearch.strategy import Strategy

stdout = Console(highlight=False, width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 132)
"""Results; in a pipe or a file there is room."""
stderr = Console(stderr=True, highlight=False)
"""Progress and remarks."""

GraphArgument = Annotated[
    str, typer.Argument(metavar="GRAPH", help="A graph file, or a shipped graph by name (alexnet, vgg16, gpt2, ...).")
]
TopologyOption = Annotated[
    str,
    typer.Option(
        "--topology", "-t", metavar="T", help="A topology file, or a preset (ethernet-1g-4, p100:8, dgx-a100, ...)."
    ),
]
ProfileOption = Annotated[
    Path | None, typer.Option("--profile", "-p", metavar="P", help="Measured compute times; default: a roofline.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout, and nothing else.")]


def show(as_json: bool, data: dict[str, Any], human: Callable[[], None]) -> None:
    """Print the result of a command: ``data`` as JSON, or what ``human`` prints."""
    if as_json:
        sys.stdout.write(json.dumps(data, indent=2, allow_nan=False) + "\n")
    else:
        human()


def print_table(table: Table) -> None:
    """Print a table without breaking the names in its first column."""
    table.columns[0].no_wrap = True
    stdout.print(table)


def load_setting(graph: str, topology: str, profile: Path | None) -> Setting:
    """Graph, topology and costs by what the user named."""
    from flexsearch.api import Setting
    from flexsearch.cost import Profile
    from flexsearch.graph import OperatorGraph
    from flexsearch.topology import Topology

    return Setting.of(
        OperatorGraph.load(graph), Topology.load(topology), Profile.load(profile) if profile is not None else None
    )


def load_strategy(path: Path, setting: Setting) -> Strategy:
    """The strategy of a file, checked against graph and topology; errors name the file."""
    from flexsearch.strategy import Strategy

    strategy = Strategy.load(path)
    try:
        strategy.check(setting.graph, setting.topology)
    except FlexsearchError as error:
        raise error.at(f"strategy file {path}") from error
    return strategy


def writable(path: Path | None) -> None:
    """Raise now rather than after the work if ``path`` cannot be written to."""
    from flexsearch.errors import FileFormatError

    if path is None:
        return
    if path.is_dir():
        raise FileFormatError(f"cannot write {path}: it is a folder. Give the name of a file.")
    folder = path.parent
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise FileFormatError(f"cannot write {path}: {folder} is not a folder that you may write to.")


def settings(given: list[str]) -> dict[str, Any]:
    """``key=value`` options as keyword arguments: integers, numbers, true/false/none and lists by their JSON, else
    text."""
    found: dict[str, Any] = {}
    for item in given:
        key, equals, text = item.partition("=")
        if not equals or not key.isidentifier():
            raise typer.BadParameter(f'"{item}" is not of the form key=value', param_hint="--set")
        try:
            found[key] = json.loads(text.lower() if re.fullmatch("(?i)true|false|null", text) else text)
        except json.JSONDecodeError:
            found[key] = None if text.lower() == "none" else text
    return found


@contextmanager
def bar(text: str) -> Iterator[tuple[Progress, Any]]:
    """A progress bar on stderr (nothing where that is no terminal), as (bar, its task)."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=stderr, transient=True, disable=not stderr.is_terminal) as progress:
        yield progress, progress.add_task(text, total=None)
