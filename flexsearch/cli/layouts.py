"""``optimize --space layouts``, and ``simulate`` of what it writes: plans with stages and microbatches."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexsearch.cli import signals
from flexsearch.cli.common import show, stdout
from flexsearch.cli.money import tell_cost, with_cost
from flexsearch.cli.progress import Live, compiling

if TYPE_CHECKING:
    from flexsearch.cost.uncertainty import Estimate
    from flexsearch.graph import OperatorGraph
    from flexsearch.report.layouts import StagedRow
    from flexsearch.search.hybrid import Candidate, HybridProgress, HybridResult
    from flexsearch.setting import Setting
    from flexsearch.simulate.staged import Step
    from flexsearch.strategy import Options, Strategy

STATES = 4
"""Copies of the weights that training keeps at least: themselves, gradients, two of Adam's."""


SPLITS = "one stage"
"""Name of the best plan without stages and microbatches in a table of layouts."""

HELP = 0.5
"""Where nothing fits, what would help is looked for in this share of the budget."""


def too_large(graph: OperatorGraph) -> bool:
    """Whether the model cannot be trained on this machine whatever the plan: its states exceed the memory."""
    weights = sum(t.nbytes for t in graph.of_kind("parameter"))
    return STATES * weights > os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def need_time(budget: str) -> float:
    """Seconds of a budget. Raises StrategyError if it is a number of proposals."""
    from flexsearch.errors import StrategyError
    from flexsearch.setting import parse_budget

    seconds, proposals = parse_budget(budget)
    if seconds is None:
        raise StrategyError(
            f"a search over layouts needs a budget of time, not of {proposals} proposals", "Give --budget 60s."
        )
    return seconds


def optimize_layouts(
    setting: Setting, options: Options, budget: str, processes: int | None, output: Path, as_json: bool, size: str,
    large: bool, cost_per_hour: float | None, free: Callable[[str], float | None] | None = None,
    margin: float | None = None,
) -> None:  # fmt: skip
    """Search over layouts, write the best plan, print it. ``size``: the options that gave the graph its size.
    ``large``: the model is too large for this machine, and nothing else was searched. ``cost_per_hour``: money for a
    device. ``free``: seconds of the best of all plans, found within a budget; the other half then goes to layouts that
    can be exported, which are written. ``margin``: as of ``search.search``."""
    from flexsearch.cli.details import tell
    from flexsearch.cli.space import halved, native_words, tell_export
    from flexsearch.errors import StrategyError

    seconds = need_time(budget)
    native, free_s = free is not None, None
    if free is not None:
        budget, seconds = halved(budget), seconds / 2
        free_s = free(budget)
        with signals.current.released():
            result = search_layouts(setting, options, budget, processes, native, margin)
        free_s = min(free_s, result.best.seconds) if free_s is not None else None
    else:
        result = search_layouts(setting, options, budget, processes, margin=margin)
    if not result.best.feasible:
        raise StrategyError(*_nothing_fits(setting, options, result, seconds))
    result.strategy.save(output)

    def say_more() -> None:
        if large:
            tell("\nThe model is too large for this machine, so layouts were searched.")
        if native:
            tell(native_words(result.best.seconds, free_s))
            tell_export(output, size)

    more: dict[str, Any] = {"space": "native-layouts", "free_s": free_s} if native else {"space": "layouts"}
    answer_layouts(setting, result, output, as_json, size, cost_per_hour, more=more, say_more=say_more)


def answer_layouts(
    setting: Setting, result: HybridResult, output: Path, as_json: bool, size: str, cost_per_hour: float | None, *,
    more: dict[str, Any], say_more: Callable[[], None], splits: Strategy | None = None,
) -> None:  # fmt: skip
    """Print a layout and what stands beside it. ``splits``: the best plan of one stage, if that was searched too;
    ``more``: what else the JSON says; ``say_more``: what else is said."""
    rows = [_row(name, candidate, step) for name, (candidate, step) in result.baselines.items()]
    if not result.baseline:
        rows.insert(0, _row("found", result.best, result.step))
    if splits is not None:
        rows.append(setting.staged_row(SPLITS, splits))
    rows.sort(key=lambda row: (row.name != (result.baseline or "found"), row.step.missing > 0, row.step.makespan_s))
    data = with_cost(_data(setting, result, rows, output) | more, setting, cost_per_hour)

    def human() -> None:
        _say(setting, result, rows, output, size, cost_per_hour)
        say_more()

    show(as_json, data, human)


def search_layouts(
    setting: Setting, options: Options, budget: str, processes: int | None, native: bool = False,
    margin: float | None = None,
) -> HybridResult:
    """The search, with its progress on the terminal. A signal ends it with the best plan so far."""
    seconds, before = need_time(budget), signals.current.graceful
    with Live(compiling(), seconds) as live:

        def report(now: HybridProgress) -> None:
            signals.current.graceful = before or now.plans > 0
            best = f", best {now.best_s:.4g} s" if now.plans else ""
            live.show(now.phase, now.elapsed_s, seconds, f"{now.considered:,} plans{best}")

        return setting.search_layouts(
            budget, options=options, processes=processes, on_progress=report, on_end=signals.current.hold,
            native=native, margin=margin,
        )


def _row(name: str, candidate: Candidate, step: Step) -> StagedRow:
    from flexsearch.report.layouts import StagedRow

    return StagedRow(
        name, candidate.pipeline, candidate.options, step, candidate.layout.sharding, candidate.changed
    )  # fmt: skip


def _nothing_fits(setting: Setting, options: Options, result: HybridResult, seconds: float) -> tuple[str, str]:
    """That no plan fits, the one that lacks least, and what would help: tried in half of the time that the search
    had."""
    from flexsearch.fitting import what_would_fit
    from flexsearch.planning import PlanProgress
    from flexsearch.report.fitting import fitting_words
    from flexsearch.report.layouts import layout_words, memory_words
    from flexsearch.report.units import nbytes

    row = _row("", result.best, result.step)
    text = (
        f"of {result.considered:,} plans considered, none of the {result.plans:,} simulated fits into memory; the "
        f"nearest is {nbytes(result.step.missing)} short on the fullest device: {layout_words(row)} "
        f"({memory_words(result.step)})"
    )
    if signals.current.number:
        return text, "Give more devices or more memory."
    with signals.current.released(), Live("looking for what would fit", HELP * seconds) as live:

        began = time.monotonic()

        def report(now: PlanProgress) -> None:  # ``now.elapsed_s`` starts again with each search
            state = f"{now.plans:,} plans" if now.plans else ""
            live.show(f"looking for what would fit: {now.phase}", time.monotonic() - began, HELP * seconds, state)

        fitting = what_would_fit(setting, options, HELP * seconds, report)
    pipeline = row.pipeline
    return text, fitting_words(fitting, result.step.samples == pipeline.replicas * pipeline.microbatches)


def _data(setting: Setting, result: HybridResult, rows: list[StagedRow], output: Path) -> dict[str, Any]:
    from flexsearch.report.layouts import staged_data
    from flexsearch.report.uncertainty import estimate_data, near

    return {
        "graph": setting.graph.name, "topology": setting.topology.name, "path": str(output),
        **staged_data(setting.graph, rows[0]), **estimate_data(rows[0].step.estimate),
        "too_near": near(rows[0].step.estimate, _beside(rows)),
        "set_aside_s": None if result.set_aside is None else result.set_aside.seconds,
        "plans_considered": result.considered,
        "plans_simulated": result.plans,
        "elapsed_s": result.elapsed_s, "stopped": result.stopped, "bound_s": result.bound_s,
        "plans": [staged_data(setting.graph, row) for row in rows],
    }  # fmt: skip


def _beside(rows: list[StagedRow]) -> dict[str, Estimate]:
    """What stands beside the first plan and fits."""
    return {row.name: row.step.estimate for row in rows[1:] if not row.step.missing}


def _say(
    setting: Setting, result: HybridResult, rows: list[StagedRow], output: Path, size: str, cost_per_hour: float | None
) -> None:
    from flexsearch.cli.details import headline, tell
    from flexsearch.report.layouts import layout_words, memory_words, rate_words, staged_table, usage_words
    from flexsearch.report.uncertainty import aside_words, basis_words, near_words, time_words
    from flexsearch.report.units import percent, ratio, seconds

    best = rows[0]
    tell(headline(setting), indent=2)
    stdout.print()
    stdout.print(staged_table(setting.graph, rows))
    named = f"the baseline {result.baseline}: " if result.baseline else ""
    tell(f"\nBest plan: {named}{layout_words(best)}.")
    if best.changed:
        tell("Inside a group, some kinds of operator are split differently from Megatron's rules; see the file.")
    if any(config.shares for config in result.best.configs):
        tell("Devices of different speeds share the samples in proportion to their speeds; see the file.")
    fitting = [row.step.makespan_s for row in rows[1:] if not row.step.missing and row.name != SPLITS]
    gain = ""
    if fitting and not result.baseline:
        gain = f", {ratio(min(fitting) / best.step.makespan_s)} as fast as the best baseline"
    if result.set_aside is not None:
        tell(aside_words(best.step.estimate, result.set_aside))
    tell(
        f"A step takes {time_words(best.step.estimate)} ({rate_words(setting.graph, best.step)}, "
        f"MFU {percent(best.step.utilisation)}){gain}. No plan in this space can be faster than "
        f"{seconds(result.bound_s)}."
    )
    for text in filter(None, (basis_words(best.step.estimate), near_words(best.step.estimate, _beside(rows)))):
        tell(text)
    for row in rows:
        if row.name == SPLITS:
            tell(f"With one stage and one microbatch the best plan takes {seconds(row.step.makespan_s)}.")
    tell(f"Devices on average: {usage_words(best.step)}. Communication counts only where it is exposed.")
    tell(f"Memory of the fullest device: {memory_words(best.step)}.")
    tell_cost(setting, best.step.makespan_s, cost_per_hour)
    tell(
        f"Considered {result.considered:,} plans and simulated the {result.plans:,} most promising in "
        f"{result.elapsed_s:.3g} s; {result.stopped}."
    )
    command = " ".join(filter(None, ("flexsearch simulate", setting.graph.name, size, f"-s {output}")))
    tell(f"Wrote {output}. Simulate it with: {command}")


def compare_staged(setting: Setting, strategies: Mapping[str, Strategy], as_json: bool) -> None:
    """Simulate plans of which some have stages or microbatches, and print them, those that fit and the fastest
    first."""
    from flexsearch.report.layouts import staged_data, staged_table

    with Live(compiling()):
        rows = [setting.staged_row(name, strategy) for name, strategy in strategies.items()]
        rows.sort(key=lambda row: (row.step.missing > 0, row.step.makespan_s, row.name))
        data = {
            "graph": setting.graph.name, "topology": setting.topology.name,
            "plans": [staged_data(setting.graph, row) for row in rows],
        }  # fmt: skip

    def human() -> None:
        from flexsearch.cli.details import headline, tell
        from flexsearch.report.layouts import usage_words

        tell(headline(setting), indent=2)
        stdout.print()
        stdout.print(staged_table(setting.graph, rows))
        stdout.print()
        for row in rows:
            tell(f"{row.name}: {usage_words(row.step)}", indent=2)

    show(as_json, data, human)


def simulate_staged(
    setting: Setting, name: str, strategy: Strategy, trace: Path | None, as_json: bool, cost_per_hour: float | None
) -> None:
    """Simulate a plan with stages or microbatches, and print it."""
    from flexsearch.report.layouts import memory_words, staged_data, staged_table, usage_words
    from flexsearch.report.uncertainty import basis_words

    tasks = None
    with Live(compiling()):
        row = setting.staged_row(name, strategy)
        if trace is not None:
            from flexsearch.report.trace import save_simulated

            tasks = save_simulated(trace, setting.lower(strategy))

    def human() -> None:
        from flexsearch.cli.details import headline, tell
        from flexsearch.report.trace import MOST_TASKS

        tell(headline(setting), indent=2)
        stdout.print()
        stdout.print(staged_table(setting.graph, [row]))
        tell(f"\n{basis_words(row.step.estimate)}")
        tell(f"Devices on average: {usage_words(row.step)}. Communication counts only where it is exposed.")
        tell(f"Memory of the fullest device: {memory_words(row.step)}.")
        tell_cost(setting, row.step.makespan_s, cost_per_hour)
        if tasks is not None:
            what = "tasks" if tasks <= MOST_TASKS else "tasks, too many to show each: the trace shows their passes"
            tell(f"\nWrote {trace} ({tasks:,} {what}). Open it at https://ui.perfetto.dev")

    data = {"graph": setting.graph.name, "topology": setting.topology.name, **staged_data(setting.graph, row)}
    traced = {} if trace is None else {"trace": str(trace), "tasks": tasks}
    show(as_json, with_cost(data | traced, setting, cost_per_hour), human)
