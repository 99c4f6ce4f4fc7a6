"""The space as the arrays that compiled moves read."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from flexsearch.lower.keys import MISSING
from flexsearch.lower.program import Rows
from flexsearch.search.constants import ALTERNATE, BESIDE, BOTH, EXCHANGED, MOVES, TWICE
from flexsearch.search.moves import Moves, Rates
from flexsearch.search.space import Space
from flexsearch.strategy.propagate import Link


def make_moves(space: Space, alike: Sequence[int]) -> Moves:
    """For chains over single operators. ``alike``: by operator, the first one that shares its configs."""
    links = [(i, link) for i, of in enumerate(space.propagation.links) for link in of]
    kinds = link_kinds(links, alike)
    number = dict(zip(links, kinds, strict=True))
    place = {leader: k for k, leader in enumerate(space.leaders)}
    groups = [space.groups[leader] for leader in space.leaders]
    members = Rows([i for _, i, _ in group] for group in groups)
    targets = Rows([link.target for link in of] for of in space.propagation.links)
    classes = Rows((*space.classes, *space.loose_classes))
    partners = _partners(space, space.classes)
    main = _main_links(space)
    return Moves(
        often=np.cumsum(list(MOVES.values())) / sum(MOVES.values()),
        rates=Rates(*(np.array([rate]) for rate in (TWICE, EXCHANGED, BESIDE, ALTERNATE, BOTH))),
        leader=_numbers(space.leaders), alike=_numbers(alike), likely=np.array(space.likely),
        group_first=members.first, group_last=members.last, member=members.all,
        member_source=_numbers([source for group in groups for source, _, _ in group]),
        member_link=_numbers([number[source, link] for group in groups for source, _, link in group]),
        main_source=_numbers([i if link is None else link[0] for i, link in enumerate(main)]),
        main_link=_numbers([0 if link is None else number[link] for link in main]),
        link_first=targets.first, link_last=targets.last, link_target=targets.all, link_kind=_numbers(kinds),
        link_forward=np.array([link.forward for _, link in links], np.uint8),
        class_first=classes.first, class_last=classes.last, class_member=classes.all,
        led_classes=_count(len(space.classes)), alternates=_alternates(space, space.classes),
        apart=_apart(space.classes),
        partner_first=partners.first, partner_last=partners.last, partner=partners.all,
        leader_at=_numbers([place.get(i, int(MISSING)) for i in range(len(space.graph.operators))]),
        weighted=_numbers(space.weighted),
        sharding=_numbers([of.rank for of in space.shardings]), devices=_count(space.count),
        axis_orders=_count(len(space.meshes.relabelings)),
        relabel=np.array(space.meshes.relabelings, np.uint32).reshape(-1, space.count),
        chosen=np.zeros(len(space.graph.operators), np.uint32),
    )  # fmt: skip


def coarse_moves(moves: Moves, space: Space) -> Moves:
    """For coarse chains: only whole classes change."""
    classes, partners = Rows((*space.parts, *space.loose_classes)), _partners(space, space.parts)
    return moves._replace(
        often=np.cumsum([float(name == "repeated") for name in MOVES]), class_first=classes.first,
        class_last=classes.last, class_member=classes.all, led_classes=_count(len(space.parts)),
        alternates=_alternates(space, space.parts), apart=_apart(space.parts),
        partner_first=partners.first, partner_last=partners.last, partner=partners.all,
    )  # fmt: skip


def link_kinds(links: Sequence[tuple[int, Link]], alike: Sequence[int]) -> list[int]:
    """By link: the first one over which the same follows."""
    first: dict[object, int] = {}
    return [
        first.setdefault((alike[i], alike[link.target], link.pairs, link.forward, link.picked), k)
        for k, (i, link) in enumerate(links)
    ]


def _main_links(space: Space) -> list[tuple[int, Link] | None]:
    """What each operator follows in a span, as (producer, link from there): the largest tensor that carries degrees."""
    main: list[tuple[int, Link] | None] = []
    for i, links in enumerate(space.propagation.links):
        back = [link for link in links if not link.forward]
        if not back:
            main.append(None)
            continue
        best = max(back, key=lambda link: (len(link.pairs) > 0, link.nbytes))
        forth = next(x for x in space.propagation.links[best.target] if x.target == i and x.forward)
        main.append((best.target, forth))
    return main


def _alternates(space: Space, led: Sequence[Sequence[int]]) -> npt.NDArray[np.uint8]:
    """By class, whether members may have configs in turn."""
    return np.array([space.may_alternate(members) for members in (*led, *space.loose_classes)], np.uint8)


def _apart(classes: Sequence[Sequence[int]]) -> npt.NDArray[np.uint8]:
    """Of each two classes, whether they have no operators in common."""
    members = [set(of) for of in classes]
    return np.array([[not a & b for b in members] for a in members], np.uint8).reshape(len(classes), len(classes))


def _partners(space: Space, classes: Sequence[Sequence[int]]) -> Rows:
    """By class, those that it may exchange configs with. No two of them have operators in common either."""
    kind, apart = [(len(members), space.model[members[0]]) for members in classes], _apart(classes)
    partners: list[list[int]] = []
    for a, own in enumerate(kind):
        several: list[int] = []
        for b, of in enumerate(kind):
            if of == own and apart[a, b] and all(apart[b, c] for c in several):
                several.append(b)
        partners.append(several)
    return Rows(partners)


def _numbers(values: Sequence[int]) -> npt.NDArray[np.uint32]:
    return np.array(values, dtype=np.uint32)


def _count(value: int) -> npt.NDArray[np.uint64]:
    return np.array([value], np.uint64)
