"""Options of ``optimize``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from flexsearch.cli.common import (
    FINITE,
    BatchOption,
    CodeOption,
    DataOption,
    JsonOption,
    MaybeGraphArgument,
    PriceOption,
    ProfileOption,
    SequenceOption,
    Size,
    TopologyOption,
)
from flexsearch.cli.models import SetOption
from flexsearch.cli.plans import (
    GradientsOption,
    OptimizerOption,
    PrefetchOption,
    RecomputeOption,
    ReshardOption,
    RoundedOption,
)
from flexsearch.cli.verify import VerifyModelOption, VerifyOption, VerifyStepsOption

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
        help="Keep the best baseline unless a plan is faster by this much. Default: by enough for predictions to "
        "tell the two apart.", **FINITE,
    ),
]  # fmt: skip
ProcessesOption = Annotated[
    int | None,
    typer.Option("--processes", "-j", min=1, max=4096, metavar="N", help="Search processes. Default: one per core."),
]
ExhaustiveOption = Annotated[
    str | None,
    typer.Option(
        "--exhaustive", metavar="60s|N", help="Then try to prove the optimum, for this time or number of partial plans."
    ),
]
SpaceOption = Annotated[
    Literal["free", "splits", "layouts", "native", "native-layouts"],
    typer.Option(
        "--space",
        help="free: all plans. splits: one stage, any split of any operator. layouts: data x tensor x pipeline, with "
        "stages, microbatches and recomputation. native: only what `flexsearch export` can write as ordinary PyTorch, "
        "in one stage. native-layouts: the same for layouts.",
    ),
]
PlanOnlyOption = Annotated[bool, typer.Option("--plan-only", hidden=True, help="The same as --space layouts.")]
WeightGradientsOption = Annotated[
    bool,
    typer.Option(
        "--weight-gradients",
        help="Spend half of the budget on plans that split a weight's gradient differently from its layer.",
    ),
]
AllowOption = Annotated[
    str | None,
    typer.Option(
        "--allow",
        metavar="RECIPES",
        help="Also try synchronisation recipes that change the mathematics: local-sgd,gossip,top-k, whole recipes "
        "with options, or all.",
    ),
]
PlotOption = Annotated[
    Path | None, typer.Option("--plot", help="Draw the progress of the search: a .png, .svg or .pdf file.")
]


@dataclass(frozen=True)
class OptimizeOptions:
    """In the order of ``--help``."""

    graph: MaybeGraphArgument = None
    topology: TopologyOption = None
    budget: BudgetOption = "30s"
    seed: SeedOption = 0
    output: OutputOption = Path("strategy.json")
    profile: ProfileOption = None
    batch: BatchOption = None
    seq: SequenceOption = None
    reads: DataOption = None
    code: CodeOption = None
    resume: ResumeOption = None
    pin: PinOption = None
    optimizer: OptimizerOption = "momentum"
    precision: RoundedOption = "as-is"
    gradients: GradientsOption = "as-is"
    recompute: RecomputeOption = "none"
    reshard_after_forward: ReshardOption = False
    prefetch: PrefetchOption = 1
    margin: MarginOption = None
    processes: ProcessesOption = None
    exhaustive: ExhaustiveOption = None
    space: SpaceOption = "free"
    plan_only: PlanOnlyOption = False
    weight_gradients: WeightGradientsOption = False
    verify: VerifyOption = None
    model: VerifyModelOption = None
    set_: SetOption = None
    verify_steps: VerifyStepsOption = 10
    cost_per_hour: PriceOption = None
    plot: PlotOption = None
    allow: AllowOption = None
    as_json: JsonOption = False

    @property
    def size(self) -> Size:
        """The size of the graph."""
        return Size(self.batch, self.seq)

    @property
    def share(self) -> float | None:
        """``--margin`` as a share. What is to be proved is the best plan, not the simplest of the good ones."""
        if self.margin is not None:
            return self.margin / 100
        return None if self.exhaustive is None else 0.0
