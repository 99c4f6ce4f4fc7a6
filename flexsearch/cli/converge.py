"""``converge``: training under synchronisation recipes, on simulated ranks. It needs torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from flexsearch.cli.common import DEFAULT_TOPOLOGY, FINITE, JsonOption, check_outputs, show, stdout
from flexsearch.cli.progress import Live

if TYPE_CHECKING:
    from flexsearch.converging import OnEpoch
    from flexsearch.sync.record import Epoch

SHOWN = 8
"""Recipes that were tried (--allow) that tables show."""


RecipesArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[RECIPE]...",
        help="Parts joined by +: local-sgd, diloco, async, stale; all-reduce, server, gossip, ring, matrix; threshold, "
        "adaptive-threshold, top-k, gtop-k, random-k, qsgd, 16-bit, sign, powersgd; warm-up, momentum-correction. "
        "Options follow a colon: local-sgd:period=16+top-k:k=99. Or a strategy file. Default with --allow: all-reduce.",
    ),
]
AllowOption = Annotated[
    str,
    typer.Option(
        "--allow",
        metavar="R,...",
        help="Find the recipe that reaches the target first, among all exact ones and these (names, whole recipes, "
        "or all), alone and combined, as optimize --allow.",
    ),
]
ModelOption = Annotated[
    str, typer.Option("--model", "-m", metavar="M", help="mlp, cnn, or MODULE:CALLABLE as in import.")
]
DatasetOption = Annotated[
    str,
    typer.Option(
        "--dataset",
        "-d",
        metavar="D",
        help="text (Python's own library), digits (needs scikit-learn), or cifar10:FOLDER.",
    ),
]
ClusterOption = Annotated[
    str, typer.Option("--topology", "-t", metavar="T", help="A preset (ethernet-1g:16), or a topology file.")
]
WorkersOption = Annotated[
    int | None, typer.Option("--workers", metavar="N", help="Train on the first N devices. Default: all.")
]
EpochsOption = Annotated[int, typer.Option("--epochs", metavar="N", help="Passes over the data.")]
BatchOption = Annotated[int, typer.Option("--batch", metavar="N", help="Samples per worker and step.")]
OptimizerOption = Annotated[Literal["sgd", "adam"], typer.Option("--optimizer", help="Optimizer of each worker.")]
RateOption = Annotated[
    float | None, typer.Option("--lr", metavar="X", help="Learning rate. Default: 0.1, or 0.001 for adam.", **FINITE)
]
MomentumOption = Annotated[float, typer.Option("--momentum", metavar="X", help="Momentum of sgd.", **FINITE)]
LossOption = Annotated[
    float | None,
    typer.Option(
        "--target-loss", metavar="X", help="Compare times to this loss. Default: one that all reach.", **FINITE
    ),
]
AccuracyOption = Annotated[
    float | None,
    typer.Option("--target-accuracy", metavar="X", help="Compare times to this accuracy, as 0.45.", **FINITE),
]
StepTimeOption = Annotated[
    float | None,
    typer.Option("--step-time", metavar="S", help="Seconds a worker computes in a step. Default: simulated.", **FINITE),
]
SlowOption = Annotated[
    list[str] | None,
    typer.Option("--slow", metavar="WORKER:FACTOR", help="A worker that takes FACTOR times as long. Repeatable."),
]
JitterOption = Annotated[
    float, typer.Option("--jitter", metavar="X", help="Each step takes up to this share longer, at random.", **FINITE)
]
SeedOption = Annotated[int, typer.Option("--seed", metavar="N", help="Seed of the order of samples and of jitter.")]
CurvesOption = Annotated[
    Path | None, typer.Option("--output", "-o", help="Draw the curves: a .png, .svg or .pdf file.")
]


def converge(
    recipes: RecipesArgument = None,
    allow: AllowOption = "",
    model: ModelOption = "mlp",
    dataset: DatasetOption = "text",
    topology: ClusterOption = DEFAULT_TOPOLOGY,
    workers: WorkersOption = None,
    epochs: EpochsOption = 3,
    batch: BatchOption = 32,
    optimizer: OptimizerOption = "sgd",
    lr: RateOption = None,
    momentum: MomentumOption = 0.9,
    target_loss: LossOption = None,
    target_accuracy: AccuracyOption = None,
    step_time: StepTimeOption = None,
    slow: SlowOption = None,
    jitter: JitterOption = 0.0,
    seed: SeedOption = 0,
    output: CurvesOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train under each synchronisation recipe, and compare loss against time on a cluster.

    Workers are simulated in this process: arithmetic is exactly the recipe's; time is what computing takes on the
    devices, and what is really sent on the links.
    """
    recipes = recipes or []
    _check_files(output, topology, recipes)
    from flexsearch.converging import converge as train
    from flexsearch.search.recipes import read_allowed

    allowed = read_allowed(allow) if allow else ()
    with Live("preparing", float(len(recipes) * max(1, epochs)) if not allowed else None) as live:
        result = train(
            recipes, model, dataset, topology, workers=workers, epochs=epochs, batch=batch, optimizer=optimizer, lr=lr,
            momentum=momentum, seed=seed, target_loss=target_loss, target_accuracy=target_accuracy, allow=allowed,
            step_s=step_time, slow=_slow(slow or []), jitter=jitter, on_epoch=_telling(live),
        )  # fmt: skip
    if output is not None:
        from flexsearch.output import write
        from flexsearch.report.plots import rendered

        write(output, rendered(result.figure(), output.suffix.removeprefix(".")))
    show(as_json, result.data() | {"path": str(output) if output is not None else None}, lambda: _say(result, output))


def _check_files(output: Path | None, topology: str, recipes: list[str]) -> None:
    """Refuse a picture that cannot be drawn, or that would replace what is read."""
    from flexsearch.report.plots import FORMATS

    if output is not None and output.suffix.removeprefix(".") not in FORMATS:
        raise typer.BadParameter(f"{output} cannot be drawn; give a .png, .svg or .pdf file", param_hint="--output")
    check_outputs({"--output": output}, topology, *(recipe for recipe in recipes if recipe.endswith(".json")))


def _telling(live: Live) -> OnEpoch:
    """What says after each epoch how far training is."""
    done = 0

    def tell_of(name: str, epoch: Epoch) -> None:
        nonlocal done
        done += 1
        live.show(f"training: {name}", done, state=f"epoch {epoch.epoch}, loss {epoch.loss:.4g}")

    return tell_of


def _slow(options: list[str]) -> dict[int, float]:
    """WORKER:FACTOR options."""
    factors: dict[int, float] = {}
    for item in options:
        worker, _, factor = item.partition(":")
        try:
            factors[int(worker)] = float(factor)
        except ValueError:
            raise typer.BadParameter(
                f'"{item}" is not of the form WORKER:FACTOR, as 3:2.5', param_hint="--slow"
            ) from None
    return factors


def _say(result: Any, output: Path | None) -> None:
    from flexsearch.cli.details import tell
    from flexsearch.report.convergence import headline, remarks

    if result.raced:
        result = result.leading(SHOWN)
    tell(headline(result), indent=2)
    stdout.print()
    stdout.print(result.table())
    tell("\nAfter each epoch:")
    stdout.print(result.epochs_table())
    stdout.print()
    for remark in remarks(result):
        tell(remark, indent=2)
    if output is not None:
        stdout.print(f"\nWrote {output}.", soft_wrap=True)
