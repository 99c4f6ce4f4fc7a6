"""What two plans of one graph treat differently, and what each difference costs alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flexsearch.search.space import Space
from flexsearch.simulate.effects import Difference, Effects
from flexsearch.strategy import OperatorConfig

Configs = Sequence[OperatorConfig]


def changed(space: Space, a: Configs, b: Configs) -> list[tuple[int, tuple[int, ...]]]:
    """Operators that differ, as (leader, operators) of each sort of change, in graph order.

    Operators that follow another belong to it; layers of the same kind that change from the same config to the same
    config are one sort of change.
    """
    differ = [i for i in range(len(a)) if a[i] != b[i]]
    leader_of = {member: leader for leader, members in space.groups.items() for _, member, _ in members}
    units: dict[int, list[int]] = {}
    for i in differ:
        # What follows an operator that is the same in both plans is a difference of its own.
        leader = leader_of.get(i, i)
        units.setdefault(leader if a[leader] != b[leader] else i, []).append(i)
    sorts: dict[object, tuple[int, list[int]]] = {}
    for leader, members in sorted(units.items()):
        key = space.graph.operators[leader].kind, a[leader], b[leader]
        sorts.setdefault(key, (leader, []))[1].extend(members)
    return [(leader, tuple(sorted(members))) for leader, members in sorts.values()]


def differences(
    in_a: Effects, in_b: Effects, sorts: Sequence[tuple[int, tuple[int, ...]]]
) -> Iterator[Difference]:  # fmt: skip
    """Each sort of change alone: made in the first plan, and taken back in the second."""
    for leader, operators in sorts:
        there, back = ({i: plan.configs[i] for i in operators} for plan in (in_b, in_a))
        yield Difference(operators, leader, in_a.seconds(there), in_b.seconds(back))
