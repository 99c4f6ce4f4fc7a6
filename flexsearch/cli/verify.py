"""``optimize --verify``: the best plans and the baselines are run for a few steps, and the fastest as measured is the
answer."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from flexsearch.cli.common import settings, stdout
from flexsearch.cli.learning import Learning, taught
from flexsearch.cli.progress import Live
from flexsearch.errors import FlexsearchError, UsageError
from flexsearch.ranks import is_rank

if TYPE_CHECKING:
    from flexsearch.cost import Profile
    from flexsearch.graph import OperatorGraph
    from flexsearch.measure.learning import Lesson
    from flexsearch.search.outcome import SearchResult
    from flexsearch.setting import Setting
    from flexsearch.strategy import Strategy

VerifyOption = Annotated[
    int | None,
    typer.Option(
        "--verify", min=1, max=100, metavar="K",
        help="After the search, run the K best plans and the baselines for a few steps, and take the fastest. Runs "
        "local processes, or under torchrun the cluster itself. A --profile file, which may be new, learns "
        "from the times.",
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
    int, typer.Option("--verify-steps", min=1, max=10**5, metavar="N", help="Steps that --verify times for each plan.")
]

START_S = 300.0
"""Time that ranks need to start and to load a model, at most."""


class Row(NamedTuple):
    """A plan that was run: predicted and measured iteration time, s; the 80 % interval of the prediction."""

    name: str
    predicted_s: float
    measured_s: float
    interval_s: tuple[float, float] | None = None


@dataclass(frozen=True)
class Verified:
    """What was run, the fastest first, and what it taught, if a profile was to learn."""

    rows: list[Row]
    learned: Learning | None = None

    def data(self) -> dict[str, Any]:
        """As JSON."""
        data: dict[str, Any] = {"verified": [row._asdict() for row in self.rows]}
        return data | (self.learned.data() if self.learned is not None else {})


@dataclass(frozen=True)
class Verification:
    """What ``--verify`` asks for. ``topology``: as it was given. ``model``, ``arguments``: as for ``load_callable``.
    ``wait_s``: for so long the other ranks wait for the search. ``profile``: that learns from it. ``own``: whether the
    model is the user's, not that of a shipped graph."""

    count: int
    steps: int
    topology: str
    model: str
    arguments: Mapping[str, Any]
    wait_s: float
    profile: Path | None
    own: bool

    def check(self, setting: Setting) -> None:
        """Before the search: raise an error if the user's model cannot be made, or is another one than the graph's."""
        if not self.own:
            return
        from flexsearch.output import temporary_folder
        from flexsearch.runtime.launch import call
        from flexsearch.strategy.baselines import baseline

        with temporary_folder() as folder, Live(f"checking {self.model}", None):
            baseline("single", setting.graph, setting.topology).save(plan := folder / "plan.json")
            more = {"plan": str(plan), "model": self.model, "arguments": dict(self.arguments)}
            call("flexsearch.runtime.verify:check_model", more, 1)

    def follow(self) -> None:
        """Another rank's part: it has no plans, and measures those of rank 0."""
        from flexsearch.runtime.verify import measured

        measured([], self.topology, self.model, self.arguments, self.steps, self.wait_s)

    def verified(
        self, setting: Setting, result: SearchResult, others: dict[str, Strategy]
    ) -> tuple[SearchResult, Verified]:
        """The result with the fastest contender as measured in its place, and all of them. ``others``: run too; one of
        them does not take the result's place."""
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
            rows.append(Row(name, predicted_s(strategy), measured_s, interval_s(strategy)))
        rows.sort(key=lambda row: row.measured_s)
        learned = None if self.profile is None else self._learned(setting, rows, plans, self.profile)
        verified = Verified(rows, learned)
        if rows[0].name in others:
            return result, verified
        return setting.chosen(result, rows[0].name, plans[rows[0].name]), verified

    def _learned(
        self, setting: Setting, rows: list[Row], plans: Mapping[str, Strategy], path: Path
    ) -> Learning:  # fmt: skip
        """What the rows teach the profile at ``path``."""
        from flexsearch.cost import Learned
        from flexsearch.measure.learning import learn
        from flexsearch.simulate.staged import step_of_strategy

        topology = setting.topology

        def teach(profile: Profile) -> Lesson:
            def predict(learned: Learned, number: int) -> float:
                corrected = profile.model_copy(update={"learned": learned})
                return step_of_strategy(setting.graph, plans[rows[number].name], corrected).makespan_s

            with Live(f"learning from {len(rows)} plans", None):
                return learn(
                    predict, [row.measured_s for row in rows], profile.learned or Learned(), topology.name,
                    max(device.overhead_s for device in topology.devices), topology.communication.overhead_s,
                )  # fmt: skip

        return taught(path, setting.costs.profile, topology, not is_rank(), teach)


def predicted_s(strategy: Strategy) -> float:
    """Iteration time that the strategy says, s."""
    assert strategy.prediction is not None
    return strategy.prediction.iteration_s


def interval_s(strategy: Strategy) -> tuple[float, float] | None:
    """Interval of that time, where the strategy says it."""
    return strategy.prediction.interval_s if strategy.prediction is not None else None


def unmeasured(error: FlexsearchError, output: Path) -> FlexsearchError:
    """An error of ``--verify``, which says what the search has left."""
    left = f"{output} has the best plan as predicted; none was measured."
    return type(error)(error.message, f"{error.remedy} {left}".lstrip())


def print_verified(verified: Verified, strategy: Strategy) -> None:
    """The table of what was run, and what it taught. ``strategy``: the answer."""
    from flexsearch.report.grid import Column, Grid
    from flexsearch.report.units import ratio, seconds, spread

    done = strategy.measurement
    assert done is not None
    title = f"Measured on {done.ranks} processes, {done.steps} steps each (median)"
    numbers = map(Column, ("predicted", "measured", "measured /\npredicted"))
    grid = Grid((Column("plan", "text"), *numbers), title)
    for row in verified.rows:
        shown = ratio(row.measured_s / row.predicted_s) if row.predicted_s else "-"
        half = (row.interval_s[1] - row.predicted_s) if row.interval_s is not None else 0.0
        predicted = spread(row.predicted_s, half) if half and row.predicted_s else seconds(row.predicted_s)
        grid.add(row.name, predicted, seconds(row.measured_s), shown)
    stdout.print()
    stdout.print(grid)
    if not is_rank() and len(strategy.cluster.hosts) > 1:
        stdout.print(
            f"The processes ran on this machine, without the network of {strategy.cluster.name}. To measure that "
            "too, start the command there with torchrun.", soft_wrap=True,
        )  # fmt: skip
    if verified.learned is not None:
        stdout.print(verified.learned.words(strategy.cluster), soft_wrap=True)


def is_follower() -> bool:
    """Whether this process is a rank other than the first: it does not search."""
    return os.environ.get("RANK", "0") != "0"


def verification(
    count: int | None, steps: int, graph: str, topology: str, model: str | None, options: list[str] | None,
    planned: OperatorGraph, budget: str, profile: Path | None,
) -> Verification | None:  # fmt: skip
    """What is to be verified; None: nothing. ``budget``: of the search; ``profile``: that learns. Raises UsageError
    where no model is known."""
    from flexsearch.setting import parse_budget

    if count is None:
        if model is not None or options:
            raise UsageError("--model and --set go with --verify", "Give --verify K, or leave them out.")
        return None
    arguments: dict[str, Any] = settings(options or [])
    own = model is not None or bool(options)
    if model is None:
        if (shipped := shipped_model(graph, planned)) is None:
            raise UsageError(f"--verify trains the model, which {graph} does not hold", "Give --model MODULE:CALLABLE.")
        model, sizes = shipped
        arguments = sizes | arguments
    wait_s = START_S + 2.0 * (parse_budget(budget)[0] or 0.0)
    return Verification(count, steps, topology, model, arguments, wait_s, profile, own)


def shipped_model(graph: str, planned: OperatorGraph) -> tuple[str, dict[str, Any]] | None:
    """The callable of a shipped graph, and its arguments for the batch and sequence length that were planned."""
    from flexsearch.graph.sequence import sequence_length
    from flexsearch.graph.shipped import SHIPPED

    if (source := SHIPPED.get(graph)) is None:
        return None
    sizes = {"batch": planned.batch, "seq": sequence_length(planned)}
    arguments = {name: sizes.get(name, value) for name, value in source.arguments.items()}
    return f"flexsearch.zoo:{source.builder}", arguments
