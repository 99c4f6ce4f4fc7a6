"""``explain`` and ``diff``: why a plan takes the time it takes. Neither imports torch."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flexsearch.cli.common import (
    BatchOption,
    JsonOption,
    ProfileOption,
    SequenceOption,
    Size,
    setting_of,
    show,
    stdout,
)
from flexsearch.cli.progress import Live, compiling

if TYPE_CHECKING:
    from flexsearch.report import PlanRow
    from flexsearch.report.explain import Told
    from flexsearch.setting import Setting
    from flexsearch.strategy import Strategy

WIDTH = 100

GraphOption = Annotated[
    str | None,
    typer.Option("--graph", "-g", metavar="GRAPH", help="The graph it was made for. Not needed for a shipped one."),
]


def explain(
    strategy: Annotated[Path, typer.Argument(metavar="STRATEGY", help="A strategy file.")],
    operator: Annotated[
        str | None,
        typer.Option("--operator", metavar="NAME", help="Explain one operator: what its other configs would cost."),
    ] = None,
    graph: GraphOption = None,
    profile: ProfileOption = None,
    batch: BatchOption = None,
    seq: SequenceOption = None,
    tries: Annotated[
        int,
        typer.Option(
            "--tries", min=0, max=10**9, metavar="N", help="Simulate at most N other configs of single operators."
        ),
    ] = 500,
    everything: Annotated[
        bool, typer.Option("--all", help="With --operator: all alternatives, not only the best.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Explain a plan: where its time goes, what holds it up, what would help, and what its choices bring.

    With --operator: what every other config of that operator would cost, everything else fixed.
    """
    plan = _load(strategy)
    setting = setting_of(strategy, plan, graph, None, profile, Size(batch, seq), "--graph GRAPH")
    if operator is not None:
        _explain_operator(setting, plan, operator, None if everything else 12, as_json)
        return
    from flexsearch.report.explain import explanation
    from flexsearch.report.explanation_data import explanation_data
    from flexsearch.report.uncertainty import estimate_data
    from flexsearch.strategy.pipeline import Pipeline

    with Live(compiling()) as live:
        told = setting.explain(plan, tries, live.show)
    data = {"graph": setting.graph.name, "topology": setting.topology.name, "path": str(strategy)}

    def say() -> None:
        from flexsearch.cli.details import tell, tell_plan

        _headline(setting, strategy, plan, told.row if told.mean_s is None else setting.row("the plan", plan))
        tell("\nThe plan:")
        if not plan.is_plain:
            from flexsearch.report.layouts import pipeline_words

            pipeline = Pipeline.of(plan, setting.graph)
            sharding = max((config.sharding for config in plan.configs.values()), key=lambda one: one.rank)
            within = setting.replicas_within(plan)
            tell(f"  {pipeline_words(pipeline, plan.options, setting.graph.batch, sharding, within)}", indent=2)
        tell_plan(told.row.lowered)
        _print(explanation(told))

    show(as_json, data | explanation_data(told) | estimate_data(told.row.simulation.estimate), say)


def diff(
    a: Annotated[Path, typer.Argument(metavar="A", help="A strategy file, or a baseline such as data-parallel.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another one for the same graph and topology.")],
    graph: GraphOption = None,
    profile: ProfileOption = None,
    batch: BatchOption = None,
    seq: SequenceOption = None,
    as_json: JsonOption = False,
) -> None:
    """What differs between two plans, in words, and what each difference costs."""
    from flexsearch.report.differences import comparison, comparison_data
    from flexsearch.report.layout_differences import LayoutComparison, layout_comparison, layout_comparison_data

    (first, second), setting = _two(a, b, graph, profile, Size(batch, seq))
    with Live(compiling()):
        difference = setting.difference(first, second, (str(a), str(b)))
        if isinstance(difference, LayoutComparison):
            data, parts = layout_comparison_data(setting.graph, difference), layout_comparison(difference)
            one, other = difference.a.step.estimate, difference.b.step.estimate
        else:
            data, parts = comparison_data(difference), comparison(difference)
            one, other = difference.a.simulation.estimate, difference.b.simulation.estimate
    data |= {"intervals_s": [one.interval_s, other.interval_s], "apart_s": one.apart(other)}

    def say() -> None:
        from flexsearch.cli.details import headline, tell
        from flexsearch.report.uncertainty import apart_words

        tell(headline(setting), indent=2)
        _print(parts)
        if one.seconds != other.seconds:
            tell(f"\n{apart_words(one, other)}")

    show(as_json, data, say)


def _explain_operator(setting: Setting, plan: Strategy, operator: str, most: int | None, as_json: bool) -> None:
    from flexsearch.cli.details import headline, tell
    from flexsearch.report.choices import operator_choice, operator_data

    with Live(compiling()):
        choice = setting.choice(plan, operator, most)

    def say() -> None:
        tell(headline(setting), indent=2)
        _print(operator_choice(choice))

    show(as_json, {"graph": setting.graph.name, "topology": setting.topology.name} | operator_data(choice), say)


def _two(
    a: Path, b: Path, graph: str | None, profile: Path | None, size: Size
) -> tuple[tuple[Strategy, Strategy], Setting]:
    """Two strategies of the same graph and topology; one of them may be a baseline by name."""
    from flexsearch.errors import StrategyError
    from flexsearch.strategy.baselines import NAMES

    for path in (a, b):
        if not path.exists() and path.suffix != ".json" and str(path) not in NAMES:
            raise StrategyError(
                f"{path} is neither a strategy file nor a baseline", f"The baselines are: {', '.join(NAMES)}."
            )
    loaded = [None if not path.exists() and str(path) in NAMES else _load(path) for path in (a, b)]
    strategy = next((plan for plan in loaded if plan is not None), None)
    if strategy is None:
        raise StrategyError(
            f"{a} and {b} are baselines; at least one of the two must be a strategy file",
            "`flexsearch compare` shows all baselines.",
        )
    for what in ("graph", "topology"):
        first, second = (getattr(plan or strategy, what) for plan in loaded)
        if first.hash != second.hash:
            raise StrategyError(
                f"{a} was made for {what} {first.name!r} ({first.hash}), {b} for {second.name!r} ({second.hash})",
                f"Only plans for the same {what} can be compared.",
            )
    path = a if loaded[0] is not None else b
    setting = setting_of(path, strategy, graph, None, profile, size, "--graph GRAPH")
    with Live(compiling()):  # the best bucket size of a baseline is found by simulating it
        first, second = (
            plan or setting.baseline(str(path), strategy.options) for plan, path in zip(loaded, (a, b), strict=True)
        )
    return (first, second), setting


def _load(path: Path) -> Strategy:
    from flexsearch.strategy import Strategy

    return Strategy.load(path)


def _headline(setting: Setting, path: Path, plan: Strategy, row: PlanRow) -> None:
    from flexsearch.cli.details import headline, tell
    from flexsearch.report.uncertainty import basis_words, time_words
    from flexsearch.report.units import digits, nbytes, ratio, seconds

    tell(headline(setting), indent=2)
    iteration_s = row.simulation.makespan_s
    rate = f"{digits(setting.graph.batch / iteration_s)} samples/s" if iteration_s else ""
    prediction, same = plan.prediction, setting.name_of(plan)
    against = ""
    if iteration_s and plan.is_plain:
        words = ("data parallel", "one device")
        times = zip(setting.yardsticks(plan.options).values(), words, strict=True)
        against = "".join(f", {ratio(s / iteration_s)} as fast as {w}" for s, w in times if s)
    name = f"{path} (the baseline {same})" if same else str(path)
    estimate = row.simulation.estimate
    tell(f"{name}: {time_words(estimate)} per iteration, {rate}{against}", indent=2)
    if basis := basis_words(estimate):
        tell(basis)
    for device, missing in row.shortfall[:1]:
        name = setting.topology.devices[device].name
        stdout.print(f"It does not fit into memory: {nbytes(missing)} short on {name}", soft_wrap=True)
    if prediction is not None and abs(prediction.iteration_s - iteration_s) > 1e-3 * iteration_s:
        stdout.print(
            f"The file says {seconds(prediction.iteration_s)}: it was made with other costs"
            + (" (with a profile? Give it with --profile)" if setting.costs.profile is None else ""),
            soft_wrap=True,
        )  # fmt: skip


def _print(parts: Iterable[Told]) -> None:
    from flexsearch.cli.details import tell

    for part in parts:
        if isinstance(part, str):
            tell(part, indent=2)
        else:
            stdout.print(part, width=min(stdout.width, WIDTH))
