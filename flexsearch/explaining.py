"""Floor 5: explanations and differences of plans, put together from simulation, search space and report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
from typing import Final

from flexsearch.errors import StrategyError
from flexsearch.graph import OperatorGraph
from flexsearch.lower import Lowering
from flexsearch.report import PlanRow, groups
from flexsearch.report.choices import OperatorChoice, alike
from flexsearch.report.differences import Comparison, OptionEffect
from flexsearch.report.explain import Choice, Explanation
from flexsearch.search.alternatives import alternatives, best_first, reverted, single_changes, weigh
from flexsearch.search.differences import changed, differences
from flexsearch.search.space import Space
from flexsearch.simulate import critical_path, makespan, simulate
from flexsearch.simulate.effects import Effects, SingleChanges
from flexsearch.simulate.whatif import count, what_ifs
from flexsearch.strategy import OperatorConfig, Options, Strategy
from flexsearch.strategy.baselines import baseline

OnProgress = Callable[[str, int, int], None]
"""Called with what is done, how many are done, and of how many."""

OPTIONS: Final = {
    "bucket_bytes": "gradient buckets", "optimizer": "optimizer", "prefetch": "prefetch of sharded weights",
    "recompute": "recomputation", "reshard_after_forward": "second gather of sharded weights",
}  # fmt: skip
"""Options of the whole step, in words."""


def explain(lowering: Lowering, strategy: Strategy, tries: int, on_progress: OnProgress | None = None) -> Explanation:
    """Where a plan's time goes, what would help, and what its choices bring; see ``Setting.explain``."""
    report = on_progress or (lambda what, done, of: None)
    graph, topology = lowering.graph, lowering.topology
    strategy.check_supported(graph, topology)
    configs = strategy.in_order(graph)
    lowered = lowering.lower(configs, strategy.options)
    row = PlanRow("the plan", simulate(lowered), lowered)
    steps = critical_path(lowered.tasks)
    changes = []
    for one in what_ifs(lowered, lowering, lowering.costs.profile):
        changes.append(one)
        report("what would help", len(changes), count(topology))
    space, effects = Space(graph, topology), Effects(lowering, configs, strategy.options)
    plain = baseline("data-parallel", graph, topology).in_order(graph)
    choices = []
    for k, group in enumerate(told := groups(lowered)):
        report("what the choices bring", k, len(told))
        if any(configs[i] != plain[i] for i in group.operators):
            choices.append(Choice(group, reverted(space, effects, group.operators, plain)))
    single = SingleChanges(0, 0, ())
    for tried, single in single_changes(space, effects, tries):
        report("other configs", tried, min(tries, single.possible))
    return Explanation(row, steps, tuple(changes), tuple(choices), single)


def choice(lowering: Lowering, strategy: Strategy, operator: str, most: int | None) -> OperatorChoice:
    """Why an operator is as it is and not otherwise; see ``Setting.choice``."""
    graph, topology = lowering.graph, lowering.topology
    strategy.check_supported(graph, topology)
    index, space = find_operator(graph, operator), Space(graph, topology)
    effects = Effects(lowering, strategy.in_order(graph), strategy.options)
    found = best_first(list(alternatives(space, effects, index)))
    told = alike(found)[:most]
    weighed = weigh(effects, index, [one for one, _ in told])
    shown = tuple((one, more) for one, (_, more) in zip(weighed, told, strict=True))
    follow = tuple(i for i in space.follow(index, effects.configs[index]) if i != index)
    leaders = {member: leader for leader, members in space.groups.items() for _, member, _ in members}
    return OperatorChoice(
        effects.lower({}), index, effects.base_s, effects.loads({}), tuple(found), shown, follow, leaders.get(index)
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
    lowering: Lowering, a: Strategy, b: Strategy, names: tuple[str, str], baselines: tuple[str, str]
) -> Comparison:
    """What differs between two plans and what each difference costs; see ``Setting.difference``. ``baselines``: the
    baselines that split every operator as the plans do, empty where there is none."""
    graph, topology = lowering.graph, lowering.topology
    for strategy in (a, b):
        strategy.check_supported(graph, topology)
    first, second = (s.in_order(graph) for s in (a, b))
    lowered = lowering.lower(first, a.options), lowering.lower(second, b.options)
    rows = [PlanRow(name, simulate(plan), plan) for name, plan in zip(names, lowered, strict=True)]
    space = Space(graph, topology)
    sorts = changed(space, first, second)
    effects = Effects(lowering, first, a.options), Effects(lowering, second, b.options)
    paths = tuple(critical_path(row.lowered.tasks) for row in rows)
    return Comparison(
        rows[0], rows[1], paths[0], paths[1], tuple(differences(*effects, sorts)) if sorts else (),
        tuple(_option_effects(lowering, (first, a.options), (second, b.options))), baselines,
    )  # fmt: skip


def _option_effects(
    lowering: Lowering, a: tuple[Sequence[OperatorConfig], Options], b: tuple[Sequence[OperatorConfig], Options]
) -> Iterator[OptionEffect]:
    """Each option that differs, alone: changed in the first plan, and changed back in the second."""
    for field, words in OPTIONS.items():
        old, new = getattr(a[1], field), getattr(b[1], field)
        if old != new:
            there, back = a[1].model_copy(update={field: new}), b[1].model_copy(update={field: old})
            times = (makespan(lowering.lower(c, o)) for c, o in ((a[0], there), (b[0], back)))
            yield OptionEffect(words, str(old), str(new), *times)
