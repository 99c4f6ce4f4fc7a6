"""Floor 5: a graph on a topology, where plans are simulated, searched, proved and explained. No torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import gcd, prod
from typing import TYPE_CHECKING

from flexsearch.cost import Costs, Profile
from flexsearch.errors import StrategyError
from flexsearch.graph import OperatorGraph
from flexsearch.lower import Lowered
from flexsearch.lower.limits import refuse_endless_turns
from flexsearch.proof.exhaustive import Optimum, Step, exhaustive
from flexsearch.proof.spaces import aligned_configs
from flexsearch.search.evaluate import Evaluator
from flexsearch.search.hybrid import HybridProgress, HybridResult, search_hybrid
from flexsearch.search.native import NativeResult, search_native
from flexsearch.search.optimize import search
from flexsearch.search.outcome import Progress, SearchResult
from flexsearch.search.pins import parse_pins
from flexsearch.search.tuning import Tuned, pipelined, tuned_baseline, tuned_baselines, whole_seconds
from flexsearch.search.weight_gradients import search_weight_gradients
from flexsearch.simulate import simulate as simulate_lowered
from flexsearch.simulate.staged import Step as StagedStep
from flexsearch.simulate.staged import lower_exactly, step_of_strategy
from flexsearch.simulate.variants import Plan, Variants
from flexsearch.strategy import OperatorConfig, Options, Prediction, Strategy
from flexsearch.strategy.baselines import PIPELINES, baselines, stage_of
from flexsearch.strategy.pipeline import Pipeline
from flexsearch.strategy.weights import effective, has_weights
from flexsearch.topology import Topology

if TYPE_CHECKING:

    from flexsearch.report import PlanRow
    from flexsearch.report.choices import OperatorChoice
    from flexsearch.report.differences import Comparison
    from flexsearch.report.explain import Explanation
    from flexsearch.report.layout_differences import LayoutComparison
    from flexsearch.report.layouts import StagedRow


LONGEST_S = 3.6e6
"""Seconds of the longest budget, 1000 hours."""


@dataclass(frozen=True)
class Setting:
    """A graph on a topology with its costs: where plans are compared."""

    graph: OperatorGraph
    topology: Topology
    costs: Costs

    @classmethod
    def of(cls, graph: OperatorGraph, topology: Topology, profile: Profile | None = None) -> Setting:
        """Raises ProfileError if the profile fits no device of the topology, StrategyError if simulating would not
        end."""
        costs = Costs(graph, topology, profile)
        refuse_endless_turns(graph, topology, costs)
        return cls(graph, topology, costs)

    def row(self, name: str, strategy: Strategy) -> PlanRow:
        """A strategy, lowered and simulated, as a row of a comparison."""
        from flexsearch.report import PlanRow
        from flexsearch.report.layouts import SCHEDULES

        lowered, note = self.lower(strategy), ""
        if strategy.microbatches > 1:
            note = f"{strategy.microbatches} microbatches, {SCHEDULES[strategy.schedule]}"
        return PlanRow(name, simulate_lowered(lowered), lowered, note)

    def lower(self, strategy: Strategy) -> Lowered:
        """The strategy's task graph: of one with replicas of its stages, that of one block of devices, if all do the
        same. Raises StrategyError if it was made for another graph or topology."""
        return lower_exactly(self.graph, strategy, self.topology, self.costs)

    def staged_row(self, name: str, strategy: Strategy) -> StagedRow:
        """Any strategy, also one with stages and microbatches, as a row of a comparison of layouts."""
        from flexsearch.report.layouts import StagedRow

        sharding = max((config.sharding for config in strategy.configs.values()), key=lambda one: one.rank)
        pipeline = Pipeline.of(strategy, strategy.planned(self.graph))
        within = self.replicas_within(strategy) if not strategy.is_plain or self.name_of(strategy) else 0
        return StagedRow(name, pipeline, strategy.options, self.step(strategy), sharding, within=within)

    def replicas_within(self, strategy: Strategy) -> int:
        """Into how many parts at least the devices of a stage divide the samples of each layer with weights."""
        graph = strategy.planned(self.graph)
        parts = [
            prod(n for axis, n in config.degrees if op.roles[axis] == "sample")
            for i, (op, config) in enumerate(zip(graph.operators, strategy.in_order(graph), strict=True))
            if has_weights(graph, i) and "sample" in op.roles.values()
        ]
        return gcd(*parts) or 1

    def under(self, options: Options | None) -> Setting:
        """The same in the element types of plans with these options."""
        graph = (options or Options()).typed(self.graph)
        if graph is self.graph:
            return self
        return Setting(graph, self.topology, Costs(graph, self.topology, self.costs.profile))

    def baseline(self, name: str, options: Options | None = None) -> Strategy:
        """A baseline by name, with the bucket size that suits it best (of ``options`` the bucket size does not
        count), a pipeline with the microbatches that do. Raises StrategyError if there is none of this name, or if it
        makes no sense here."""
        here, plain = self.under(options), PIPELINES.get(name, name)
        plan = self._strategy(tuned_baseline(plain, here.graph, here.topology, here.costs, _exact(options)))
        return plan if plain == name else self._pipelined(plain, plan)

    def baselines(self, options: Options | None = None) -> dict[str, Strategy]:
        """Every baseline that makes sense here, by name, as :meth:`baseline` gives it."""
        here = self.under(options)
        plans = tuned_baselines(here.graph, here.topology, here.costs, _exact(options))
        strategies = {name: self._strategy(plan) for name, plan in plans.items()}
        for name, placement in PIPELINES.items():
            if placement in strategies:
                with suppress(StrategyError):
                    strategies[name] = self._pipelined(placement, strategies[placement])
        return strategies

    def _pipelined(self, name: str, placement: Strategy) -> Strategy:
        here = self.under(placement.options)
        stages = stage_of(name, here.graph, here.topology, whole_seconds(here.graph, here.costs))
        return pipelined(self._variants, placement, stages)

    def _strategy(self, plan: Tuned) -> Strategy:
        named = {op.name: config for op, config in zip(self.graph.operators, plan.configs, strict=True)}
        return Strategy.make(self.graph, self.topology, named, plan.options)

    def name_of(self, strategy: Strategy) -> str:
        """Name of the baseline that splits every operator as the strategy does, whatever its options for the whole
        step; empty if none does, as with stages, microbatches, or splits of weights' gradients."""
        if not strategy.is_plain or strategy.weight_gradients:
            return ""
        here = self.under(strategy.options)
        plans = baselines(here.graph, here.topology, strategy.options.exact, whole_seconds(here.graph, here.costs))
        own = self._effective(strategy)
        return next((name for name, plan in plans.items() if self._effective(plan) == own), "")

    def _effective(self, strategy: Strategy) -> list[OperatorConfig]:
        return [effective(self.graph, i, config) for i, config in enumerate(strategy.in_order(self.graph))]

    def named_row(self, name: str, strategy: Strategy) -> PlanRow:
        """As :meth:`row`. If the strategy splits every operator as a baseline does, the row's note names it, with the
        options that differ from that baseline's."""
        row, same = self.row(name, strategy), self.name_of(strategy)
        if strategy.options.recipes:
            told = ", ".join(dict.fromkeys(entry.recipe for entry in strategy.options.recipes))
            return replace(row, note=f"{f'the baseline {same} ' if same else ''}with {told}")
        if not same:
            return row
        usual, own = self.baseline(same, strategy.options).options, strategy.options
        buckets = f" with gradient buckets of {own.bucket_bytes / 2**20:.3g} MiB" if own != usual else ""
        way = f", gradients summed by {own.synchronise_by}" if own.synchronise_by != usual.synchronise_by else ""
        return replace(row, note=f"the baseline {same}{buckets}{way}")

    def yardsticks(self, options: Options | None = None) -> dict[str, float | None]:
        """Iteration times (s) that speed-ups compare with, as arguments of ``report.plan_rows``: those of the baselines
        data parallel and single device."""
        times = {}
        for name, key in (("data-parallel", "data_parallel_s"), ("single", "single_s")):
            times[key] = simulate_lowered(self.lower(self.baseline(name, options))).makespan_s
        return {**times}

    def with_prediction(self, strategy: Strategy) -> Strategy:
        """The strategy with what the simulator says of it in its ``prediction``."""
        simulation = simulate_lowered(self.lower(strategy))
        prediction = Prediction(
            iteration_s=simulation.makespan_s,
            interval_s=simulation.estimate.interval_s,
            data_parallel_s=self.yardsticks(strategy.options)["data_parallel_s"],
            peak_bytes=max(simulation.peak_bytes),
        )
        return Strategy.make(
            self.graph, self.topology, strategy.configs, strategy.options, prediction, strategy.search,
            stages=strategy.stages, microbatches=strategy.microbatches, schedule=strategy.schedule,
            orders=strategy.orders,
        )  # fmt: skip

    def search(
        self,
        budget: str | float,
        *,
        seed: int = 0,
        start: Strategy | None = None,
        pins: Sequence[str] = (),
        margin: float | None = None,
        options: Options | None = None,
        processes: int | None = None,
        weight_gradients: bool = False,
        on_progress: Callable[[Progress], None] | None = None,
        on_phase: Callable[[str], None] | None = None,
        on_end: Callable[[], None] | None = None,
    ) -> SearchResult:
        """The search (:func:`flexsearch.search.search`), with a budget as :func:`parse_budget` takes it.
        ``weight_gradients``: half of the budget is for plans in which gradients of weights have splits of their own."""
        budget_s, proposals = parse_budget(budget)
        if weight_gradients:
            budget_s = None if budget_s is None else budget_s / 2
            proposals = None if proposals is None else proposals // 2
        if options is None and start is not None:
            options = Options(precision=start.options.precision, gradients=start.options.gradients)
        here = self.under(options)
        result = search(
            here.graph, here.topology, here.costs, options, budget_s=budget_s, proposals=proposals, seed=seed,
            start=start, pins=pins, margin=margin, processes=processes, on_progress=on_progress,
            on_phase=on_phase, on_end=None if weight_gradients else on_end,
        )  # fmt: skip
        if not weight_gradients:
            return result
        try:
            if "interrupted" not in result.stopped:
                result = search_weight_gradients(
                    here.graph, here.topology, here.costs, result, budget_s=budget_s, proposals=proposals, seed=seed,
                    pins=pins, margin=margin,
                )  # fmt: skip
        except KeyboardInterrupt:
            result = replace(result, stopped="interrupted")
        if on_end is not None:
            on_end()
        return result

    def contenders(self, result: SearchResult, count: int) -> dict[str, Strategy]:
        """What of a search is worth measuring, by name: the answer ("found", unless it is a baseline), the next best
        plans up to ``count`` of them in all, and every baseline that fits into memory."""
        plans = {} if result.baseline else {"found": result.strategy}
        for plan in result.runners_up:
            if len(plans) >= count:
                break
            if plan.evaluation.time_s != result.simulation.makespan_s:
                plans[f"found {len(plans) + 1}" if plans else "found"] = self.with_prediction(self._strategy(plan))
        fitting = {name: o.strategy for name, o in result.baselines.items() if o.feasible}
        return plans | {name: self.with_prediction(strategy) for name, strategy in fitting.items()}

    def chosen(self, result: SearchResult, name: str, strategy: Strategy) -> SearchResult:
        """The result with one of its contenders as the answer."""
        if strategy.search is None and result.strategy.search is not None:
            same = {"start": name, "locally_optimal": False}
            strategy.search = result.strategy.search.model_copy(update=same)
        return replace(
            result, strategy=strategy, simulation=simulate_lowered(self.lower(strategy)), feasible=True,
            locally_optimal=result.locally_optimal and strategy.content_hash() == result.strategy.content_hash(),
            baseline=name if name in result.baselines else "", set_aside=None,
        )  # fmt: skip

    def search_native(
        self, budget: str | float, *, options: Options | None = None,
        on_progress: Callable[[int, float], None] | None = None,
    ) -> NativeResult:  # fmt: skip
        """The search among plans that ``flexsearch export`` writes as ordinary PyTorch
        (:func:`flexsearch.search.native.search_native`), with a budget as :func:`parse_budget` takes it."""
        budget_s, plans = parse_budget(budget)
        here = self.under(options)
        return search_native(
            here.graph, here.topology, here.costs, options or Options(), budget_s=budget_s, plans=plans,
            on_progress=on_progress,
        )  # fmt: skip

    def search_layouts(
        self, budget: str | float, *, options: Options | None = None, processes: int | None = None,
        on_progress: Callable[[HybridProgress], None] | None = None, on_end: Callable[[], None] | None = None,
        native: bool = False, margin: float | None = None,
    ) -> HybridResult:  # fmt: skip
        """The search over data x tensor x pipeline layouts (:func:`flexsearch.search.hybrid.search_hybrid`), with a
        budget of time, on ``processes`` at most (None: one for each core). Its plans can be simulated (:meth:`step`)
        and run. Raises StrategyError."""
        budget_s, _ = parse_budget(budget)
        return search_hybrid(
            self.graph, self.topology, options, self.costs.profile, budget_s=budget_s or LONGEST_S,
            processes=processes, on_progress=on_progress, on_end=on_end, native=native, margin=margin,
        )  # fmt: skip

    def step(self, strategy: Strategy) -> StagedStep:
        """The simulated step of any strategy, also of one with stages and microbatches. Raises StrategyError if it was
        made for another graph or topology."""
        return step_of_strategy(self.graph, strategy, self.costs.profile)

    @property
    def _variants(self) -> Variants:
        return Variants(self.graph, self.topology, self.costs.profile)

    def explain(
        self, strategy: Strategy, tries: int = 500, on_progress: Callable[[str, int, int], None] | None = None
    ) -> Explanation:
        """Where a plan's time goes, what would help, and what its choices bring: for ``report.explain.explanation`` and
        ``explanation_data``. ``tries``: at most so many other configs of single operators are simulated.
        ``on_progress``: called with (what, done, of how many). Raises StrategyError."""
        from flexsearch.explaining import explain

        lowered = self.lower(strategy)
        layout = None if strategy.is_plain else (self._variants, Plan.of(strategy, self.graph))
        return explain(lowered, layout, self.costs.profile, tries, on_progress)

    def choice(self, strategy: Strategy, operator: str, most: int | None = 12) -> OperatorChoice:
        """Why an operator is as it is and not otherwise: for ``report.choices.operator_choice`` and ``operator_data``.
        ``most``: alternatives that are weighed (work by sort, memory); None: all. Raises StrategyError for an unknown
        name, with the names that are close."""
        from flexsearch.explaining import choice

        return choice(self.lower(strategy), operator, most)

    def difference(
        self, a: Strategy, b: Strategy, names: tuple[str, str] = ("A", "B")
    ) -> Comparison | LayoutComparison:
        """What differs between two plans and what each difference costs: for ``report.differences.comparison`` and
        ``comparison_data``; if one of them has stages or microbatches, for ``layout_comparison`` and
        ``layout_comparison_data``. Raises StrategyError if one was made for another graph or topology, or if they have
        neither and are not in the same precision, or their gradients are not."""
        from flexsearch.explaining import difference, layout_difference

        if a.options.recipes or b.options.recipes:
            raise StrategyError(
                "what differs is not worked out for plans whose weights synchronise by recipes",
                "Compare their times with `flexsearch compare -s A -s B`.",
            )
        if not (a.is_plain and b.is_plain):
            for strategy in (a, b):
                strategy.check(self.graph, self.topology)
            plans = Plan.of(a, self.graph), Plan.of(b, self.graph)
            return layout_difference(
                self._variants, plans, (self.staged_row(names[0], a), self.staged_row(names[1], b))
            )
        for what in ("precision", "gradients"):
            if (one := getattr(a.options, what)) != (other := getattr(b.options, what)):
                raise StrategyError(
                    f"the plans differ in {what}, {one} and {other}",
                    "Compare their times with `flexsearch compare -s A -s B`.",
                )
        return difference((self.lower(a), self.lower(b)), names, (self.name_of(a), self.name_of(b)))

    def prove(
        self,
        result: SearchResult,
        budget: str | float,
        *,
        pins: Sequence[str] = (),
        on_progress: Callable[[Step], None] | None = None,
    ) -> Optimum:
        """Exhaustive search of the plans on aligned blocks of devices (``aligned_configs``), pins obeyed, for one that
        beats the result of a search. ``budget``: a time, or a number of partial plans to look at."""
        budget_s, nodes = parse_budget(budget)
        here = self.under(result.strategy.options)
        choices, rule = aligned_configs(self.graph, self.topology), parse_pins(pins, self.graph, self.topology)

        def allowed(operator: int) -> Sequence[OperatorConfig]:
            return [rule(operator, config) for config in choices(operator)] if rule is not None else choices(operator)

        return exhaustive(
            Evaluator(here.graph, here.topology, here.costs, result.strategy.options), choices=allowed,
            incumbent=result.strategy.in_order(self.graph), budget_s=budget_s, max_nodes=nodes, on_progress=on_progress,
        )  # fmt: skip

    def proved(self, result: SearchResult, proof: Optimum) -> SearchResult:
        """The result with the plan of an exhaustive search in its place, where that is better. Whether a change of one
        operator to a config outside of the blocks would make that faster is not known."""
        if proof.configs is None or (proof.time_s >= result.simulation.makespan_s and result.feasible):
            return result
        old = result.strategy
        named = {op.name: config for op, config in zip(self.graph.operators, proof.configs, strict=True)}
        strategy = Strategy.make(self.graph, self.topology, named, old.options)
        simulation = simulate_lowered(self.lower(strategy))
        if old.prediction is not None and old.search is not None:
            peak = max(simulation.peak_bytes)
            strategy.prediction = old.prediction.model_copy(
                update={
                    "iteration_s": simulation.makespan_s,
                    "interval_s": simulation.estimate.interval_s,
                    "peak_bytes": peak,
                }
            )
            strategy.search = old.search.model_copy(update={"start": "exhaustive search", "locally_optimal": False})
        return replace(
            result, strategy=strategy, simulation=simulation, feasible=True, locally_optimal=False, baseline="",
            set_aside=None,
        )  # fmt: skip


def _exact(options: Options | None) -> Options | None:
    """Options of baselines, which have no recipes."""
    return options.exact if options is not None else None


def parse_budget(budget: str | float) -> tuple[float | None, int | None]:
    """(seconds, proposals) of a budget: "30s", "2m", "1h", "500ms"; or a number of proposals, 500 or "500".

    Raises StrategyError."""
    text = str(budget).strip()
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?)\s*(ms|s|min|m|h)?", text)
    if match is not None and float(match[1]) > 0:
        number, unit = match[1], match[2]
        if unit is not None:
            seconds = float(number) * {"ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}[unit]
            if seconds <= LONGEST_S:
                return seconds, None
        elif number.isdigit():
            return None, int(number)
    raise StrategyError(
        f'budget "{text}" is neither a time such as 30s, 2m or 1h, nor a number of proposals, as 500',
        "Give one of them, at most 1000h or 15 digits.",
    )
