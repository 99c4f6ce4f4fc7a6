"""Floor 5: explanations and differences of plans, put together from simulation, search space and report."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from difflib import get_close_matches
from typing import cast

from flexsearch.cost import Profile
from flexsearch.errors import StrategyError
from flexsearch.graph import OperatorGraph
from flexsearch.lower import Lowered
from flexsearch.report import PlanRow, groups
from flexsearch.report.choices import OperatorChoice, alike
from flexsearch.report.differences import Comparison, OptionEffect
from flexsearch.report.explain import Choice, Explanation, LayoutChoice
from flexsearch.report.layout_differences import LayoutComparison, LayoutDifference
from flexsearch.report.layouts import StagedRow
from flexsearch.report.path import folded
from flexsearch.report.trace import MOST_TASKS
from flexsearch.report.words import split_words
from flexsearch.search.alternatives import alternatives, best_first, reverted, single_changes, weigh
from flexsearch.search.differences import changed, differences
from flexsearch.search.space import Space
from flexsearch.simulate import critical_path, simulate
from flexsearch.simulate.effects import Effects, SingleChanges
from flexsearch.simulate.simulation import rows_seconds, simulate_step
from flexsearch.simulate.usage import count_tasks
from flexsearch.simulate.variants import PARTS, Part, Plan, Variants
from flexsearch.simulate.whatif import what_ifs
from flexsearch.strategy import Options
from flexsearch.strategy.baselines import baseline

OnProgress = Callable[[str, int, int], None]
"""Called with what is done, how many are done, and of how many."""


def explain(
    lowered: Lowered, layout: tuple[Variants, Plan] | None, profile: Profile | None, tries: int,
    on_progress: OnProgress | None = None,
) -> Explanation:  # fmt: skip
    """Where a plan's time goes, what would help, and what its choices bring; see ``Setting.explain``. ``layout``: of
    one with stages or microbatches."""
    report = on_progress or (lambda what, done, of: None)
    row = PlanRow("the plan", simulate_step(lowered), lowered)
    steps = critical_path(lowered) if count_tasks(row.simulation.times) <= MOST_TASKS else ()
    if lowered.options.recipes:
        return Explanation(row, steps, (), (), SingleChanges(0, 0, ()), mean_s=simulate(lowered).makespan_s)
    changes, asks = [], what_ifs(lowered, profile)
    for ask in asks:
        changes.append(ask())
        report("what would help", len(changes), len(asks))
    space, effects = Space(lowered.graph, lowered.topology), effects_of(lowered)
    choices = list(_choices(space, effects, lowered, report)) if layout is None else []
    layouts = list(_layouts(*layout, report)) if layout is not None else []
    single = SingleChanges(0, 0, ())
    for tried, single in single_changes(space, effects, tries):
        report("other configs", tried, min(tries, single.possible))
    return Explanation(row, steps, tuple(changes), tuple(choices), single, tuple(layouts))


def effects_of(lowered: Lowered) -> Effects:
    """What it would cost to change configs of a plan."""
    return Effects(lowered.lowering, lowered.configs, lowered.options, lowered.stages)


def _choices(space: Space, effects: Effects, lowered: Lowered, report: OnProgress) -> Iterator[Choice]:
    """The parts of a plan that are not data parallel."""
    plain = baseline("data-parallel", lowered.graph, lowered.topology).in_order(lowered.graph)
    for k, group in enumerate(told := groups(lowered)):
        report("what the choices bring", k, len(told))
        if any(lowered.configs[i] != plain[i] for i in group.operators):
            yield Choice(group, reverted(space, effects, group.operators, plain))


def _layouts(variants: Variants, plan: Plan, report: OnProgress) -> Iterator[LayoutChoice]:
    """The same layout with one of its numbers, its order or its options changed."""
    others = list(plan.neighbours(variants.topology.host_size))
    for k, (part, other) in enumerate(others):
        report("other layouts", k, len(others))
        outcome = variants.outcome(other)
        if outcome.seconds is not None:
            yield LayoutChoice(part, str(plan.value(part)), str(other.value(part)), outcome.seconds, outcome.missing)


def choice(lowered: Lowered, operator: str, most: int | None) -> OperatorChoice:
    """Why an operator is as it is and not otherwise; see ``Setting.choice``."""
    index = find_operator(lowered.graph, operator)
    space, effects = Space(lowered.graph, lowered.topology), effects_of(lowered)
    candidates = best_first(list(alternatives(space, effects, index)))
    told = alike(candidates)[:most]
    weighed = weigh(effects, index, [one for one, _ in told])
    shown = tuple((one, more) for one, (_, more) in zip(weighed, told, strict=True))
    own = effects.configs[index]
    follow = tuple(i for i in space.follow(index, own) if i != index and effects.allows(i, own))
    leaders = {member: leader for leader, members in space.groups.items() for _, member, _ in members}
    return OperatorChoice(
        lowered, index, effects.base_s, effects.loads({}), tuple(candidates), shown, follow, leaders.get(index)
    )


def find_operator(graph: OperatorGraph, name: str) -> int:
    """Index of the operator of a name, or of the only one that a module of that name has. Raises StrategyError."""
    if name in graph.index:
        return graph.index[name]
    inside = [i for i, op in enumerate(graph.operators) if op.module == name]
    if len(inside) == 1:
        return inside[0]
    last: dict[str, list[str]] = {}  # by the last part of the name: "fc6" is not close to "classifier.fc6"
    for n in graph.index:
        last.setdefault(n.rpartition(".")[2], []).append(n)
    close = [graph.operators[i].name for i in inside] or get_close_matches(name, graph.index, n=4)
    close = close or [n for end in get_close_matches(name.rpartition(".")[2], last, n=4) for n in last[end]]
    hint = f"did you mean {', '.join(close[:4])}?" if close else f"it has {', '.join(list(graph.index)[:4])}, ..."
    raise StrategyError(f"graph {graph.name} has no operator {name!r}; {hint}")


def difference(
    lowered: tuple[Lowered, Lowered], names: tuple[str, str], baselines: tuple[str, str]
) -> Comparison:  # fmt: skip
    """What differs between two plans without stages and microbatches, and what each difference costs; see
    ``Setting.difference``. ``baselines``: the baselines that split every operator as the plans do, empty where there is
    none."""
    rows = [PlanRow(name, simulate(plan), plan) for name, plan in zip(names, lowered, strict=True)]
    space, effects = Space(lowered[0].graph, lowered[0].topology), (effects_of(lowered[0]), effects_of(lowered[1]))
    sorts = changed(space, lowered[0].configs, lowered[1].configs)
    paths = tuple(critical_path(row.lowered) for row in rows)
    return Comparison(
        rows[0], rows[1], paths[0], paths[1], tuple(differences(*effects, sorts)) if sorts else (),
        tuple(_option_effects(*lowered)), baselines,
    )  # fmt: skip


def _option_effects(a: Lowered, b: Lowered) -> Iterator[OptionEffect]:
    """Each option that differs, alone: changed in the first plan, and changed back in the second."""
    for field in Options.model_fields:
        old, new = getattr(a.options, field), getattr(b.options, field)
        if old != new:
            there, back = a.options.model_copy(update={field: new}), b.options.model_copy(update={field: old})
            times = (
                rows_seconds(plan.lowering.rows(plan.configs, options, plan.stages))
                for plan, options in ((a, there), (b, back))
            )
            yield OptionEffect(PARTS[cast(Part, field)], str(old), str(new), *times)


def layout_difference(
    variants: Variants, plans: tuple[Plan, Plan], rows: tuple[StagedRow, StagedRow]
) -> LayoutComparison:  # fmt: skip
    """The same of plans with stages or microbatches."""
    (first, second), graph, layout_differences = plans, variants.graph, []
    for part in (parts := first.differing(second)):
        values = str(first.value(part)), str(second.value(part))
        outcomes = variants.outcome(first.having(part, second)), variants.outcome(second.having(part, first))
        layout_differences.append(LayoutDifference(PARTS[part], values, outcomes))
    if "devices" not in parts:
        space = Space(graph, variants.topology)
        for leader, operators in changed(space, first.configs, second.configs):
            ops = graph.operators
            words = folded([ops[i].module or ops[i].name for i in operators])
            old, new = (split_words(graph, ops[leader], plan.configs[leader]) for plan in plans)
            outcomes = (
                variants.outcome(first.splitting(operators, second)),
                variants.outcome(second.splitting(operators, first)),
            )
            layout_differences.append(LayoutDifference(words, (old, new), outcomes))
    return LayoutComparison(*rows, tuple(layout_differences))
