"""``calibrate``: figures of the cost model, fitted to measured iteration times."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flexsearch.cli.common import CodeOption, JsonOption, check_outputs, load_topology, show, stdout
from flexsearch.cli.learning import new_profile
from flexsearch.cli.progress import Live

if TYPE_CHECKING:
    from flexsearch.calibrating import Calibrated

WORDS: dict[str, str] = {
    "compute": "seconds of computing, over what is predicted", "task_s": "host time of a task beyond that, s",
    "time": "seconds of moving bytes, over what is predicted", "start_s": "start of a message beyond that, s",
    "matrix": "share of the peak of large matrix products", "matrix_size": "size at which a side halves it",
    "attention_forward": "share of the peak of attention, forward",
    "attention_backward": "share of the peak of attention, backward", "memory": "share of the memory bandwidth",
    "overhead_s": "start of an operator, s", "other": "share of the peak of operators that are no products",
}  # fmt: skip
"""Figures in words."""


def _words(name: str) -> str:
    """A figure in words. Shares of traffic are those of the memory's bandwidth; figures of full precision say so."""
    from flexsearch.cost.learned import FULL, TRAFFIC

    own = name.removeprefix(FULL)
    words = f"share of the memory bandwidth, {own.removeprefix(TRAFFIC)}" if own.startswith(TRAFFIC) else WORDS[own]
    return words if own == name else f"{words}, not in half precision"


def calibrate(
    rows: Annotated[Path, typer.Argument(metavar="ROWS", help="CSV file of plans and their measured times.")],
    topology: Annotated[str, typer.Option("--topology", "-t", metavar="T", help="The cluster they were measured on.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Profile file to write.")] = Path("profile.json"),
    profile: Annotated[
        Path | None, typer.Option("--profile", "-p", metavar="P", help="Profile to start from. May be the output.")
    ] = None,
    code: CodeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Fit the cost model to measured iteration times, and write the result as a profile.

    A row names a strategy file, or a graph and a layout, and has measured_s. The fit changes
    only as many figures as improve predictions for plans left out of it, at most one for every three plans.
    """
    check_outputs({"--output": output}, rows)
    from flexsearch.calibrating import calibrate as fitted
    from flexsearch.calibrating import read_rows
    from flexsearch.cost import Profile

    cluster = load_topology(topology, code)
    before_fit = Profile.load(profile) if profile is not None else new_profile(cluster)
    with Live("reading rows"):
        measured = read_rows(rows, cluster)
    with Live(f"fitting {len(measured)} rows"):
        result = fitted(measured, cluster, before_fit)
    if result.changed:
        result.profile.save(output)
    show(as_json, _data(result, output), lambda: _say(result, output))


def _data(result: Calibrated, output: Path) -> dict[str, Any]:
    fitted = result.fitted
    names = ("error_before", "error_after", "error_left_out")
    errors = zip(fitted.before.tolist(), fitted.after.tolist(), fitted.left_out.tolist(), strict=True)
    learned = result.profile.learned
    return {
        "path": str(output) if result.changed else None, "most_figures": result.most,
        "figures": {name: {"before": before, "after": after} for name, (before, after) in result.changed.items()},
        "doubtful": result.doubtful, "odd": result.odd,
        "residual": None if learned is None or learned.residual is None else learned.residual.model_dump(),
        "rows": [
            {"plan": row.name, "group": row.group, "measured_s": row.measured_s, **dict(zip(names, own, strict=True))}
            for row, own in zip(result.rows, errors, strict=True)
        ],
    }  # fmt: skip


def _say(result: Calibrated, output: Path) -> None:
    from flexsearch.cli.details import tell
    from flexsearch.measure.learning import typical
    from flexsearch.report.grid import Column, Grid
    from flexsearch.report.units import digits, percent, seconds

    fitted, signed = result.fitted, "{:+.0f} %"
    grid = Grid(
        (Column("plan", "text"), *map(Column, ("measured", "error\nbefore", "after", "left out"))),
        "Predicted over measured, less 1",
    )
    errors = zip(fitted.before.tolist(), fitted.after.tolist(), fitted.left_out.tolist(), strict=True)
    for row, own in zip(result.rows, errors, strict=True):
        grid.add(row.name, seconds(row.measured_s), *(signed.format(100 * error) for error in own))
    stdout.print(grid)
    if odd := result.odd:
        more = f" and {len(odd) - 1} more" if len(odd) > 1 else ""
        tell(f"\n{odd[0]}{more}: over 100 times as long, or as short, as predicted. Is measured_s in seconds?")
    if not result.changed:
        tell(
            f"\nNothing was learned, and no file written: no figure would predict plans better that were left out "
            f"(median error {percent(typical(fitted.before))})."
        )
        return
    tell("")
    for name, (before, after) in result.changed.items():
        tell(f"  {name}: {digits(before)} -> {digits(after)} ({_words(name)})", indent=2)
    count = len(result.changed)
    allowed = f"{count} figure{'s' if count != 1 else ''} of {result.most} that the rows allow"
    tell(
        f"{allowed}. Median error {percent(typical(fitted.before))} -> {percent(typical(fitted.after))}; of rows that "
        f"were left out {percent(typical(fitted.left_out))}."
    )
    for name, reason in result.doubtful.items():
        tell(
            f"Doubtful: {name}; {reason}. It takes up something that the model lacks, so plans that differ from these "
            "rows may be far off. Is the code the one that the topology describes (--code)? Had each rank a processor "
            "of its own?",
            indent=2,
        )
    stdout.print(f"Wrote {output}. Give it with --profile.", soft_wrap=True)
