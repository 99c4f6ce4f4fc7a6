"""What compiled steps ask for: the configs that a move needs and that have no number yet."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

import numpy as np

from flexsearch.lower.change import Change
from flexsearch.lower.keys import CANDIDATE, DERIVED, FIRST_HALF, LIKE, NEAREST, OVER
from flexsearch.lower.templates import Templates
from flexsearch.search.move_tables import link_kinds
from flexsearch.search.space import Space
from flexsearch.strategy import OperatorConfig

COARSE_FIRST: Final = 2**24
"""Number of the first candidate of coarse chains; the numbers below are for other chains."""


_Chains = dict[int, tuple[int, ...]]
"""By operator that stands for those alike: links over which others of its group follow it."""


class Requests:
    """Configs by the keys of ``moves``, for one space."""

    def __init__(self, space: Space, seed: int) -> None:
        self.space, self.seed = space, seed
        self._links = [(i, link) for i, links in enumerate(space.propagation.links) for link in links]
        self._chains: tuple[Templates, _Chains] | None = None
        self._drawn: dict[tuple[int, int], OperatorConfig] = {}

    def supply(self, templates: Templates, change: Change) -> None:
        """Add the configs that ``change`` says are missing, and room."""
        if self.space.rule is not None:
            templates.ruled()
        if templates.tables.full[0]:
            templates.make_room()
        space = self.space
        for kind, a, b in sorted({tuple(row) for row in change.missing[: int(change.lacking[0])].tolist()}):
            if kind == CANDIDATE:
                config = space.fix(a, self.candidate(a, b))
                templates.keys.put(kind, a, b, templates.config(a, config))
                self._follow_on(templates, a, templates.split(a, config))
            elif kind == OVER:
                source = self._links[a][0]
                self._follow(templates, a, b)
                if a in self._chain(templates).get(templates.alike[source], ()):
                    self._follow_on(templates, source, b)
            elif kind == LIKE:
                templates.like(a, b)
            else:
                assert kind == DERIVED
                templates.derive(a, b, partial(self._derived, a))

    def forget(self) -> None:
        """Let go of the templates that configs were added to."""
        self._chains = None

    def _follow(self, templates: Templates, number: int, split: int) -> None:
        """Add what follows a split over a link, and on from there, if it is not known."""
        if (number, split) in templates.followed:
            return
        source, link = self._links[number]
        followed = self.space.propagation.over(source, templates.in_place(split), link)
        self._follow_on(templates, link.target, templates.follows(number, split, link.target, followed))

    def _follow_on(self, templates: Templates, operator: int, split: int) -> None:
        """Add what follows a split of an operator in the groups that it is in: a move that needs the first of these
        configs needs them all, and would come back for one after the other. Not where configs are replaced by allowed
        ones, which may be split otherwise."""
        if self.space.rule is not None:
            return
        for number in self._chain(templates).get(templates.alike[operator], ()):
            self._follow(templates, number, split)

    def _chain(self, templates: Templates) -> _Chains:
        """By operator that stands for those alike: links over which others of its group follow it."""
        if self._chains is None or self._chains[0] is not templates:
            alike, links = templates.alike, dict[int, dict[int, None]]()
            numbers = dict(zip(self._links, link_kinds(self._links, alike), strict=True))
            for members in self.space.groups.values():
                for source, _, link in members:
                    links.setdefault(alike[source], {})[numbers[source, link]] = None
            self._chains = templates, {operator: tuple(of) for operator, of in links.items()}
        return self._chains[1]

    def _derived(self, how: int, operator: int, config: OperatorConfig) -> OperatorConfig:
        if how == NEAREST:
            return self.space.fix(operator, config)
        return self.space.fix(operator, self.space.half(operator, config, how - FIRST_HALF))

    def _draw(self, k: int) -> Callable[[np.random.Generator, int], OperatorConfig]:
        """How candidate ``k`` is drawn: of each four, one splits samples at most and one a single axis; of the others
        of coarse chains, one has any degrees on a block."""
        if k % 4 < 2:
            return partial(self.space.draw_simple, samples=k % 4 == 0)
        return self.space.draw_regular if k % 4 == 2 and k >= COARSE_FIRST else self.space.draw

    def candidate(self, operator: int, k: int) -> OperatorConfig:
        """Candidate ``k``: the same whenever it is asked for, and for all operators of the same shape."""
        model = self.space.model[operator]
        if (config := self._drawn.get((model, k))) is None:
            rng = np.random.Generator(np.random.PCG64([self.seed, model, k]))
            config = self._drawn[model, k] = self._draw(k)(rng, model)
        return config
