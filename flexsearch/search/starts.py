"""In which order climbs start: from the baselines and a given plan, whole or folded into equal blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Final

from flexsearch.search.climb import Climber
from flexsearch.search.climbs import Plan, Start
from flexsearch.search.evaluate import Configs
from flexsearch.search.folded import folded_starts
from flexsearch.search.space import Rule
from flexsearch.strategy import Options

GIVEN: Final = "the given plan"


def in_order(
    climber: Climber, plans: Mapping[str, Plan], best: str, rule: Rule | None, continued: bool
) -> tuple[tuple[int, ...], list[Start]]:
    """Into how many blocks plans can be folded, and the starts: folded plans and whole ones in turn, the ``best`` of
    ``plans`` first, as short budgets go there, then data parallel. ``continued``: a search before climbed from the
    baselines."""
    distinct: dict[Configs, str] = {}
    for name in sorted(plans, key=lambda name: (name != best, name != "data-parallel")):
        if not continued or name in (GIVEN, best):
            distinct.setdefault(plans[name].configs, name)
    whole = [Start(name, configs, plans[name].options, plans[name].evaluation) for configs, name in distinct.items()]
    folds, folded = folded_starts(climber, whole) if rule is None else ((), [])
    order = sorted(folded, key=lambda start: start.rank)
    if folded and whole and whole[0].rank < order[0].rank:
        order.insert(0, whole.pop(0))
    order = [start for pair in zip_longest(order, whole) for start in pair if start is not None]
    return folds, order


def with_sizes(order: Sequence[Start], sizes: Sequence[Options]) -> list[Start]:
    """The starts, each with all bucket sizes: the first start with one after the other, then the others in turns, so
    that neighbours have different ones."""
    n = len(sizes)
    pairs = [(k, replace(start, options=sizes[(k + turn) % n])) for turn in range(n) for k, start in enumerate(order)]
    return [start for _, start in sorted(pairs, key=lambda pair: pair[0] > 0)]
