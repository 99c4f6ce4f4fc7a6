"""What all benchmarks share: their options, their tables, and timing that noise on the machine does not bias."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

Row = Mapping[str, Any]


def parser(description: str | None) -> argparse.ArgumentParser:
    """A command line with ``--quick`` and ``--json``; the benchmark adds its own options."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--quick", action="store_true", help="small sizes and few repetitions: does it run at all?")
    made.add_argument("--json", action="store_true", help='print one JSON object, {"rows": [...]}, and nothing else')
    return made


def options_with_data(made: argparse.ArgumentParser, *names: str) -> argparse.Namespace:
    """The options of a benchmark that reads some of the files or folders ``names``, where ``data`` is the folder that
    holds them. Their ``measured`` folder may be left out. Ends the program where there is none of them."""
    made.add_argument("data", type=Path, help="folder of the measurements")
    options = made.parse_args()
    for folder in (options.data, options.data / "measured"):
        if any((folder / name).exists() for name in names):
            options.data = folder
            return options
    made.error(f"{options.data} has no {' or '.join(names)}")


def say(text: str) -> None:
    """Tell the user what is going on, on standard error: standard output is for results."""
    print(text, file=sys.stderr, flush=True)


def report(rows: Sequence[Row], title: str, as_json: bool) -> None:
    """Print ``rows`` as a table, or as one JSON object ``{"rows": [...]}``. Columns come in the order first seen."""
    if as_json:
        print(json.dumps({"rows": list(rows)}))
        return
    columns = list(dict.fromkeys(name for row in rows for name in row))
    table = Table(title=title, title_justify="left")
    for name in columns:
        numeric = all(isinstance(row.get(name), int | float | None) for row in rows)
        table.add_column(name, justify="right" if numeric else "left")
    for row in rows:
        table.add_row(*(_cell(row.get(name)) for name in columns))
    # A file or a pipe has no width of its own; wrapped cells would make a table there unreadable.
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def report_tables(rows: Sequence[Row], titles: Mapping[str, str], as_json: bool) -> None:
    """Print rows that say in "table" which of these tables they belong to: each under its title, without tables that
    have no rows and columns that have no values, or all rows as one JSON object."""
    if as_json:
        report(rows, "", True)
        return
    for table, title in titles.items():
        if of_table := [row for row in rows if row["table"] == table]:
            values = [{k: v for k, v in row.items() if k != "table" and v is not None} for row in of_table]
            report(values, title, False)


def times(step: Callable[[], object], repeat: int, warmup: int = 1) -> list[float]:
    """Seconds that each of ``repeat`` calls of ``step`` took, after ``warmup`` calls that are not counted."""
    for _ in range(warmup):
        step()
    taken = []
    for _ in range(repeat):
        start = time.perf_counter()
        step()
        taken.append(time.perf_counter() - start)
    return taken


def alternate(variants: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Measure each of ``variants`` (a call that returns seconds) ``rounds`` times, in turn.

    Noise that comes and goes on the machine then meets all of them, and their ratios hold. Every other round goes
    backwards, so that none always runs in the wake of the same other one.
    """
    measured: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(rounds):
        for name in list(variants) if turn % 2 == 0 else reversed(list(variants)):
            measured[name].append(variants[name]())
    return measured


def median(values: Sequence[float]) -> float:
    """Median of ``values``, in their unit."""
    return statistics.median(values)


def spread(values: Sequence[float]) -> float:
    """Half the distance between the quartiles, in the unit of ``values``: how far a median is to be trusted."""
    if len(values) < 2:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / 2


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
