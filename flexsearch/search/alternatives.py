"""Other configs of single operators, with the rest of the plan fixed: what they would cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flexsearch.search.space import Space
from flexsearch.simulate.effects import Alternative, Changes, Effects, Improvement, SingleChanges, Weighed
from flexsearch.strategy import OperatorConfig


def alternatives(space: Space, effects: Effects, operator: int) -> Iterator[Alternative]:
    """The neighbours of an operator's config, as the polish of a search tries them."""
    for config in _allowed(space, effects, operator):
        alone = effects.seconds({operator: config})
        followed = _followed(space, effects, operator, config)
        changes = len([i for i, c in followed.items() if effects.configs[i] != c]) > 1
        yield Alternative(config, alone, effects.seconds(followed) if changes else None, followed)


def _allowed(space: Space, effects: Effects, operator: int) -> Iterator[OperatorConfig]:
    """Other configs of an operator on the devices of its stage."""
    return (config for config in space.alternatives(operator, effects.configs) if effects.allows(operator, config))


def _followed(space: Space, effects: Effects, operator: int, config: OperatorConfig) -> Changes:
    """A change with those of the operators that follow it in its stage."""
    return {i: c for i, c in space.follow(operator, config).items() if effects.allows(i, c)}


def best_first(candidates: Sequence[Alternative]) -> list[Alternative]:
    """The fastest first; of equally fast ones those with more parts, and fewer replicas."""
    return sorted(candidates, key=lambda a: (a.best_s, -a.config.parts, a.config.replicas))


def weigh(effects: Effects, operator: int, candidates: Sequence[Alternative]) -> Iterator[Weighed]:
    """What each alternative takes, compared with the plan as it is."""
    now = effects.loads({})
    for alternative in candidates:
        changes = alternative.changes(operator)
        yield Weighed(alternative, effects.shortfall(changes), effects.loads(changes) - now)


def reverted(space: Space, effects: Effects, operators: Sequence[int], other: Sequence[OperatorConfig]) -> float:
    """Iteration time (s) if these operators, and those that follow them, were as in another plan."""
    return effects.seconds(_with_followers(space, operators, other))


def _with_followers(space: Space, operators: Sequence[int], other: Sequence[OperatorConfig]) -> Changes:
    chosen = dict.fromkeys(operators)
    for operator in operators:
        chosen.update(dict.fromkeys(member for _, member, _ in space.groups.get(operator, ())))
    return {i: other[i] for i in chosen}


def single_changes(space: Space, effects: Effects, limit: int) -> Iterator[tuple[int, SingleChanges]]:
    """Try other configs of single operators, at most ``limit``, with and without what follows them: first of the
    operators worth a config of their own, one of each sort of layer before its repetitions, then of the others; the
    likeliest configs of each come first. Yields (how many were tried, what is known) at first and after every one.
    """
    tiers = [
        {i: tuple(_allowed(space, effects, i)) for i in operators} for operators in _important_first(space)
    ]
    possible, tried = sum(len(choices) for tier in tiers for choices in tier.values()), 0
    better: dict[int, Improvement] = {}
    yield 0, SingleChanges(0, possible, ())
    for tier in tiers:
        for depth in range(max(map(len, tier.values()), default=0)):
            for operator, choices in tier.items():
                if depth < len(choices):
                    if tried >= limit:
                        return
                    tried += 1
                    _try(space, effects, operator, choices[depth], better)
                    ordered = sorted(better.values(), key=lambda change: (change.seconds, change.operator))
                    yield tried, SingleChanges(tried, possible, tuple(ordered))


def _try(
    space: Space, effects: Effects, operator: int, config: OperatorConfig, better: dict[int, Improvement]
) -> None:  # fmt: skip
    followed = _followed(space, effects, operator, config)
    for changes in ({operator: config}, followed)[: 1 + (len(followed) > 1)]:
        limit_s = better[operator].seconds if operator in better else effects.base_s
        seconds = effects.seconds(changes)
        if seconds < limit_s and not effects.shortfall(changes):
            better[operator] = Improvement(operator, config, seconds, len(changes) > 1)


def _important_first(space: Space) -> list[list[int]]:
    """Leaders, one of each sort; their repetitions; all other operators."""
    leaders = [i for i in space.by_importance if i in space.groups]
    others = [i for i in space.by_importance if i not in space.groups]
    repeated = {i for members in space.classes for i in members[1:]}
    return [[i for i in leaders if i not in repeated], [i for i in leaders if i in repeated], others]
