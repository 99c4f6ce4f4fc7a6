"""``optimize --space native``: a search among plans that can be exported, and what keeping to them costs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexsearch.cli import signals
from flexsearch.cli.common import show, stdout
from flexsearch.cli.money import tell_cost, with_cost
from flexsearch.cli.plans import in_order, print_plans
from flexsearch.cli.progress import Live, compiling
from flexsearch.cli.space import native_words, tell_export

if TYPE_CHECKING:
    from flexsearch.report import PlanRow
    from flexsearch.search.hybrid import HybridResult
    from flexsearch.search.native import NativeResult
    from flexsearch.search.outcome import SearchResult
    from flexsearch.setting import Setting
    from flexsearch.strategy import Options


def optimize_native(
    setting: Setting, options: Options, budget: str, free: SearchResult, layouts: HybridResult | None, output: Path,
    as_json: bool, size: str, cost_per_hour: float | None,
) -> None:  # fmt: skip
    """Search among native plans, write the best one, and print it beside the best of all plans of one stage, ``free``;
    tell what it costs against the best of all, ``layouts`` included. ``size``: the options that gave the graph its
    size."""
    from flexsearch.errors import StrategyError
    from flexsearch.report import PlanRow

    result = _search(setting, options, budget)
    if not result.evaluation.feasible:
        raise StrategyError(
            "no plan of one stage that PyTorch's modules express fits into memory",
            "Give --space native-layouts, which tries pipelines and recomputation too, or more devices.",
        )
    lowered = setting.lower(result.strategy)
    answer = setting.row("native", result.strategy)
    if (prediction := result.strategy.prediction) is not None:
        interval = {"interval_s": answer.simulation.estimate.interval_s}
        result.strategy.prediction = prediction.model_copy(update=interval)
    result.strategy.save(output)
    others = [PlanRow(name, o.simulation, setting.lower(o.strategy)) for name, o in free.baselines.items()]
    if not free.baseline:
        others.append(setting.row("found", free.strategy))
    times = [free.simulation.makespan_s] if free.feasible else []
    times += [layouts.best.seconds] if layouts is not None and layouts.best.feasible else []
    free_s = min(*times, answer.simulation.makespan_s) if times else None
    data = {
        "graph": setting.graph.name, "topology": setting.topology.name, "path": str(output), "space": "native",
        **_numbers(answer, others, free_s), "plans_simulated": result.plans, "elapsed_s": result.elapsed_s,
        "stopped": result.stopped,
    }  # fmt: skip

    def human() -> None:
        from flexsearch.cli.details import tell, tell_plan

        print_plans(setting, [answer], others)
        tell("\nBest native plan:")
        tell_plan(lowered)
        tell(f"\n{native_words(answer.simulation.makespan_s, free_s)}")
        tell_cost(setting, answer.simulation.makespan_s, cost_per_hour)
        tell(f"{result.plans:,} native plans in {result.elapsed_s:.3g} s; {result.stopped}.")
        stdout.print(f"\nWrote {output}.", soft_wrap=True)
        tell_export(output, size)

    show(as_json, with_cost(data, setting, cost_per_hour), human)


def _search(setting: Setting, options: Options, budget: str) -> NativeResult:
    from flexsearch.report.units import seconds

    with Live(compiling()) as live, signals.current.released():

        def look(plans: int, best_s: float) -> None:
            live.show("native plans", state=f"{plans:,} plans, best {seconds(best_s)}")

        return setting.search_native(budget, options=options, on_progress=look)


def _numbers(answer: PlanRow, others: list[PlanRow], free_s: float | None) -> dict[str, Any]:
    from flexsearch.report import in_words, plan_rows

    plans = plan_rows(in_order([answer], others))
    own = next(p for p in plans if p["name"] == answer.name)
    return {
        "plan": answer.name, **{k: v for k, v in own.items() if k not in ("name", "note")},
        "words": in_words(answer.lowered), "free_s": free_s, "plans": plans,
    }  # fmt: skip
