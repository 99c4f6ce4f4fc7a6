"""Floor 5: explanations and differences of plans, put together from simulation, search space and report."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from typing import TYPE_CHECKING

from flexsearch.errors import StrategyError
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
from flexsearch.strategy import Strategy
from flexsearch.strategy.baselines import baseline

if TYPE_CHECKING:
    from flexsearch.api import Setting

OnProgress = Callable[[str, int, int], None]
"""Called with what is done, how many are done, and of how many."""


def explain(setting: Setting, strategy: Strategy, tries: int, on_progress: OnProgress | None = None) -> Explanation:
    """See ``Setting.explain``."""
    report = on_progress or (lambda what, done, of: None)
    strategy.check_supported(setting.graph, setting.topology)
    lowering = Lowering(setting.graph, setting.topology, setting.costs)
    configs = strategy.in_order(setting.graph)
    lowered = lowering.lower(configs, strategy.options)
    row = PlanRow("the plan", simulate(lowered), lowered)
    steps = critical_path(lowered.tasks)
    changes = []
    for one in what_ifs(lowered, lowering, setting.costs.profile):
        changes.append(one)
        report("what would help", len(changes), count(setting.topology))
    space, effects = Space(setting.graph, setting.topology), Effects(lowering, configs, strategy.options)
    plain = baseline("data-parallel", setting.graph, setting.topology).in_order(setting.graph)
    choices = []
    for k, group in enumerate(told := groups(lowered)):
        report("what the choices bring", k, len(told))
        if any(configs[i] != plain[i] for i in group.operators):
            choices.append(Choice(group, reverted(space, effects, group.operators, plain)))
    single = SingleChanges(0, 0, ())
    for tried, single in single_changes(space, effects, tries):
        report("other configs", tried, min(tries, single.possible))
    return Explanation(row, steps, tuple(changes), tuple(choices), single)


def choice(setting: Setting, strategy: Strategy, operator: str, most: int | None) -> OperatorChoice:
    """See ``Setting.choice``."""
    strategy.check_supported(setting.graph, setting.topology)
    index = find_operator(setting, operator)
    lowering, space = Lowering(setting.graph, setting.topology, setting.costs), Space(setting.graph, setting.topology)
    effects = Effects(lowering, strategy.in_order(setting.graph), strategy.options)
    found = best_first(list(alternatives(space, effects, index)))
    told = alike(found)[:most]
    weighed = weigh(effects, index, [one for one, _ in told])
    shown = tuple((one, more) for one, (_, more) in zip(weighed, told, strict=True))
    follow = tuple(i for i in space.follow(index, effects.configs[index]) if i != index)
    leaders = {member: leader for leader, members in space.groups.items() for _, member, _ in members}
    return OperatorChoice(
        effects.lower({}), index, effects.base_s, effects.loads({}), tuple(found), shown, follow, leaders.get(index)
    )


def find_operator(setting: Setting, name: str) -> int:
    """Index of the operator of a name, or of the only one that a module of that name has. Raises StrategyError."""
    graph = setting.graph
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


def difference(setting: Setting, a: Strategy, b: Strategy, names: tuple[str, str]) -> Comparison:
    """See ``Setting.difference``."""
    lowering, space = Lowering(setting.graph, setting.topology, setting.costs), Space(setting.graph, setting.topology)
    for strategy in (a, b):
        strategy.check_supported(setting.graph, setting.topology)
    first, second = (s.in_order(setting.graph) for s in (a, b))
    rows = [
        PlanRow(name, simulate(lowered), lowered)
        for name, lowered in zip(
            names, (lowering.lower(c, s.options) for c, s in ((first, a), (second, b))), strict=True
        )
    ]
    sorts = changed(space, first, second)
    found = tuple(
        differences(Effects(lowering, first, a.options), Effects(lowering, second, b.options), sorts)
    ) if sorts else ()  # fmt: skip
    options = []
    for field, words in (("bucket_bytes", "gradient buckets"), ("optimizer", "optimizer")):
        old, new = getattr(a.options, field), getattr(b.options, field)
        if old != new:
            there, back = a.options.model_copy(update={field: new}), b.options.model_copy(update={field: old})
            times = (makespan(lowering.lower(c, o).tasks) for c, o in ((first, there), (second, back)))
            options.append(OptionEffect(words, str(old), str(new), *times))
    paths = tuple(critical_path(row.lowered.tasks) for row in rows)
    known = setting.name_of(a), setting.name_of(b)
    return Comparison(rows[0], rows[1], paths[0], paths[1], found, tuple(options), known)
