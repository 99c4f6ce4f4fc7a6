"""``optimize --verify``: the best plans and the baselines are run for a few steps, and the fastest as measured is the
answer."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from flexsearch.cli.common import settings, stdout
from flexsearch.cli.progress import Live
from flexsearch.errors import UsageError
from flexsearch.ranks import is_rank

if TYPE_CHECKING:
    from flexsearch.api import Setting
    from flexsearch.graph import OperatorGraph
    from flexsearch.search.outcome import SearchResult
    from flexsearch.strategy import Strategy

VerifyOption = Annotated[
    int | None,
    typer.Option(
        "--verify", min=1, max=100, metavar="K",
        help="Then run the K best plans and the baselines for a few steps, and take the fastest as measured. Under "
        "torchrun on the cluster itself; else with local processes.",
    ),
]  # fmt: skip
VerifyModelOption = Annotated[
    str | None,
    typer.Option(
        "--model", "-m", metavar="MODULE:CALLABLE",
        help="What --verify trains: the model of the graph. Default: that of a shipped graph.",
    ),
]  # fmt: skip
VerifyStepsOption = Annotated[
    int, typer.Option("--verify-steps", min=1, max=10**5, metavar="N", help="Steps of each plan that --verify times.")
]

START_S = 300.0
"""Time that ranks need to start and to load a model, at most."""


class Row(NamedTuple):
    """A plan that was run: predicted and measured iteration time, s."""

    name: str
    predicted_s: float
    measured_s: float


@dataclass(frozen=True)
class Verification:
    """What ``--verify`` asks for. ``topology``: as it was given. ``model``, ``arguments``: as for ``load_callable``.
    ``wait_s``: for so long the other ranks wait for the search."""

    count: int
    steps: int
    topology: str
    model: str
    arguments: Mapping[str, Any]
    wait_s: float

    def follow(self) -> None:
        """Another rank's part: it has no plans, and measures those of rank 0."""
        from flexsearch.runtime.verify import measured

        measured([], self.topology, self.model, self.arguments, self.steps, self.wait_s)

    def verified(
        self, setting: Setting, result: SearchResult, others: dict[str, Strategy]
    ) -> tuple[SearchResult, list[Row]]:
        """The result with the fastest contender as measured in its place, and all of them, the fastest first.
        ``others``: run too; one of them does not take the result's place."""
        from flexsearch.output import temporary_folder
        from flexsearch.runtime.launch import call
        from flexsearch.strategy import Measurement

        plans = (setting.contenders(result, self.count) if result.feasible else {}) | others
        ranks = len(setting.topology.devices)
        with temporary_folder() as folder, Live(f"measuring {len(plans)} plans", None):
            paths = []
            for number, strategy in enumerate(plans.values()):
                strategy.save(path := folder / f"{number}.json")
                paths.append(str(path))
            times = call(
                "flexsearch.runtime.verify:measured",
                {
                    "plans": paths, "topology": self.topology, "model": self.model, "arguments": dict(self.arguments),
                    "steps": self.steps, "timeout_s": self.wait_s,
                },
                ranks,
            )  # fmt: skip
        rows = []
        for (name, strategy), measured_s in zip(plans.items(), times, strict=True):
            strategy.measurement = Measurement(iteration_s=measured_s, steps=self.steps, ranks=ranks)
            rows.append(Row(name, predicted_s(strategy), measured_s))
        rows.sort(key=lambda row: row.measured_s)
        if rows[0].name in others:
            return result, rows
        return setting.chosen(result, rows[0].name, plans[rows[0].name]), rows


def predicted_s(strategy: Strategy) -> float:
    """Iteration time that the strategy says, s."""
    assert strategy.prediction is not None
    return strategy.prediction.iteration_s


def print_verified(rows: list[Row], strategy: Strategy) -> None:
    """The table of what was run. ``strategy``: the answer."""
    from flexsearch.report.grid import Column, Grid
    from flexsearch.report.units import ratio, seconds

    done = strategy.measurement
    assert done is not None
    title = f"Measured on {done.ranks} processes, {done.steps} steps each (median)"
    numbers = map(Column, ("predicted", "measured", "measured /\npredicted"))
    grid = Grid((Column("plan", "text"), *numbers), title)
    for row in rows:
        shown = ratio(row.measured_s / row.predicted_s) if row.predicted_s else "-"
        grid.add(row.name, seconds(row.predicted_s), seconds(row.measured_s), shown)
    stdout.print()
    stdout.print(grid)
    if not is_rank() and len(strategy.cluster.hosts) > 1:
        stdout.print(
            f"The processes ran on this machine, without the network of {strategy.cluster.name}: start the "
            "command with torchrun there to measure that, too.", soft_wrap=True,
        )  # fmt: skip


def is_follower() -> bool:
    """Whether this process is a rank other than the first: it does not search."""
    return os.environ.get("RANK", "0") != "0"


def verification(
    count: int | None, steps: int, graph: str, topology: str, model: str | None, given: list[str] | None,
    planned: OperatorGraph, budget: str,
) -> Verification | None:  # fmt: skip
    """What is to be verified; None: nothing. ``budget``: of the search. Raises UsageError where no model is known."""
    from flexsearch.api import parse_budget

    if count is None:
        if model is not None or given:
            raise UsageError("--model and --set go with --verify", "Give --verify K, or leave them out.")
        return None
    arguments: dict[str, Any] = settings(given or [])
    if model is None:
        if (known := shipped_model(graph, planned)) is None:
            raise UsageError(f"--verify trains the model, which {graph} does not hold", "Give --model MODULE:CALLABLE.")
        model, own = known
        arguments = own | arguments
    return Verification(count, steps, topology, model, arguments, START_S + 2.0 * (parse_budget(budget)[0] or 0.0))


def shipped_model(graph: str, planned: OperatorGraph) -> tuple[str, dict[str, Any]] | None:
    """The callable of a shipped graph, and its arguments for the batch and sequence length that were planned."""
    from flexsearch.graph.sequence import sequence_length
    from flexsearch.graph.shipped import SHIPPED

    if (source := SHIPPED.get(graph)) is None:
        return None
    sizes = {"batch": planned.batch, "seq": sequence_length(planned)}
    arguments = {name: sizes.get(name, value) for name, value in source.arguments.items()}
    return f"flexsearch.zoo:{source.builder}", arguments
