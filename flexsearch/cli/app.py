"""The commands by name."""

from __future__ import annotations

from typing import Annotated

import typer

from flexsearch import __version__
from flexsearch.cli import (
    calibrate,
    cluster,
    clusters,
    converge,
    explain,
    export,
    models,
    optimize,
    plans,
    plot,
    scale,
    whatif,
)

app = typer.Typer(
    help="Find, explain and run the fastest way to split a PyTorch training step over a set of devices.",
    invoke_without_command=True, pretty_exceptions_enable=False, add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)  # fmt: skip


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"flexsearch {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


app.command("import")(models.import_)
app.command()(models.profile)
app.command()(calibrate.calibrate)
app.command()(cluster.probe)
app.command()(clusters.clusters)
app.command()(plans.simulate)
app.command()(optimize.optimize)
app.command()(plans.compare)
app.command()(explain.explain)
app.command()(explain.diff)
app.command("what-if")(whatif.what_if)
app.command()(scale.scale)
app.command()(converge.converge)
app.command()(plot.plot)
app.command()(export.export)
app.command()(cluster.run)
