"""What compiled steps ask for: the configs that a move needs and that have no number yet."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

import numpy as np

from flexsearch.lower.templates import Templates
from flexsearch.search.moves import CANDIDATE, HALF, LIKE, OVER, PERMUTED, STORED, VARIANT
from flexsearch.search.space import Space, sharded
from flexsearch.strategy import OperatorConfig

COARSE_FIRST: Final = 2**24
"""Number of the first candidate of coarse chains; the numbers below are for other chains."""


class Requests:
    """Configs by the keys of ``moves``, for one space."""

    def __init__(self, space: Space, seed: int) -> None:
        self.space, self.seed = space, seed
        self._links = [(i, link) for i, links in enumerate(space.propagation.links) for link in links]
        self._drawn: dict[tuple[int, int], OperatorConfig] = {}

    def number(self, templates: Templates, kind: int, a: int, b: int) -> int:
        """Number of the config that a key asks for."""
        operator, config = self._config(templates, kind, a, b)
        return templates.config(operator, self.space.fix(operator, config))

    def _config(self, templates: Templates, kind: int, a: int, b: int) -> tuple[int, OperatorConfig]:
        if kind == CANDIDATE:
            return a, self.candidate(a, b)
        old = templates.configs[b if kind in (OVER, LIKE) else a]
        assert old is not None
        if kind == OVER:
            source, link = self._links[a]
            return link.target, self.space.propagation.over(source, old, link)
        if kind == LIKE:
            return a, old
        assert kind == VARIANT
        return templates.operators[a], self._variant(templates.operators[a], old, b)

    def _variant(self, operator: int, config: OperatorConfig, number: int) -> OperatorConfig:
        """The config with something changed; ``moves`` numbers the ways."""
        space, renamings = self.space, self.space.meshes.relabelings
        if number == STORED:
            return sharded(config, not config.shard_weights and len(config.devices) > 1)
        if number < PERMUTED:
            return space.half(operator, config, number - int(HALF))
        number -= int(PERMUTED)
        if number < len(renamings):
            return config.on(renamings[number][d] for d in config.devices)
        first, second = divmod(number - len(renamings), space.count)
        other = {first: second, second: first}
        return config.on(other.get(d, d) for d in config.devices)

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
