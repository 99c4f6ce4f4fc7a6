"""Options of ``optimize``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from flexsearch.cli.common import FINITE

BudgetOption = Annotated[
    str, typer.Option("--budget", "-b", metavar="30s|500", help="How long to search: a time, or a number of proposals.")
]
SeedOption = Annotated[int, typer.Option("--seed", min=0, max=2**63 - 1, metavar="N", help="Seed of the search.")]
OutputOption = Annotated[Path, typer.Option("--output", "-o", help="Strategy file to write.")]
ResumeOption = Annotated[
    Path | None,
    typer.Option("--resume", metavar="S", help="Strategy file to start from, with its options. May be the output."),
]
PinOption = Annotated[
    list[str] | None,
    typer.Option("--pin", metavar="PIN", help='Fix part of the plan: "encoder.*: batch=4, devices=0-3". Repeatable.'),
]
MarginOption = Annotated[
    float | None,
    typer.Option(
        "--margin", min=0.0, max=100.0, metavar="PERCENT",
        help="Keep the best baseline unless a plan beats it by so much. Default: by so much that their predictions "
        "can be told apart.", **FINITE,
    ),
]  # fmt: skip
ProcessesOption = Annotated[
    int | None,
    typer.Option("--processes", "-j", min=1, max=4096, metavar="N", help="Search processes. Default: one per core."),
]
ExhaustiveOption = Annotated[
    str | None,
    typer.Option(
        "--exhaustive", metavar="60s|N", help="Then try to prove the optimum, for a time or a number of partial plans."
    ),
]
SpaceOption = Annotated[
    Literal["free", "splits", "layouts", "native", "native-layouts"],
    typer.Option(
        "--space",
        help="free: all plans. splits: one stage, any split of any operator. layouts: data x tensor x pipeline, with "
        "stages, microbatches and recomputation. native: only what `flexsearch export` can write as ordinary PyTorch, "
        "in one stage. native-layouts: the same of layouts.",
    ),
]
PlanOnlyOption = Annotated[bool, typer.Option("--plan-only", hidden=True, help="The same as --space layouts.")]
WeightGradientsOption = Annotated[
    bool,
    typer.Option(
        "--weight-gradients",
        help="Spend half of the search over splits on plans in which gradients of weights have splits of their own.",
    ),
]
AllowOption = Annotated[
    str | None,
    typer.Option(
        "--allow", metavar="RECIPES",
        help="Recipes of synchronisation that change the mathematics and may be chosen: local-sgd,gossip,top-k, whole "
        "recipes, or all.",
    ),
]
PlotOption = Annotated[
    Path | None, typer.Option("--plot", help="Draw the progress of the search: a .png, .svg or .pdf file.")
]
