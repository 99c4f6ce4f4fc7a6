"""``clusters``: the presets, and where the figures of a topology come from."""

from __future__ import annotations

from typing import Annotated

import typer

from flexsearch.cli.common import JsonOption, show, stdout


def clusters(
    topology: Annotated[str | None, typer.Argument(metavar="[TOPOLOGY]", help="A preset or a topology file.")] = None,
    as_json: JsonOption = False,
) -> None:
    """List the presets, or show the figures of one (or of a file) and which were measured, published or guessed."""
    from flexsearch.cli import cluster_tables as told
    from flexsearch.report.units import percent
    from flexsearch.topology import Topology, presets

    if topology is None:
        loaded = [Topology.load(name) for name in presets()]
        rows = {"clusters": [told.data(cluster) for cluster in loaded]}
        show(as_json, rows, lambda: stdout.print(told.table(loaded)))
        return
    cluster = Topology.load(topology)

    def human() -> None:
        stdout.print(f"{cluster.name}: {cluster.source or 'source not stated'}", soft_wrap=True, markup=False)
        if (code := cluster.code) is not None:
            off = code.standard_error
            error = f"; other codes differ by {percent(off)} (standard error)" if off else ""
            stdout.print(f"Code: {code.kind}: {code.describes}{error}: {code.reason}", soft_wrap=True, markup=False)
        stdout.print(told.sources(cluster))

    show(as_json, told.data(cluster), human)
