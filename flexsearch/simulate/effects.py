"""What changing some configs of a plan does to it, everything else fixed: time, memory, and where the work goes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from flexsearch.lower import Lowered, Lowering
from flexsearch.lower.schedule import Stages
from flexsearch.simulate.breakdown import Loads, loads
from flexsearch.simulate.delta import DeltaSimulator
from flexsearch.strategy import OperatorConfig, Options

Changes = Mapping[int, OperatorConfig]
"""Operator index -> its other config."""


class Effects:
    """A plan that stays as it is, and what it would cost to change it. Times are those of a whole simulation.

    Effects of one graph on one topology can share a ``lowering``, which keeps what it has worked out. ``stages``: how
    the step is cut; by default, not at all.
    """

    def __init__(
        self, lowering: Lowering, configs: tuple[OperatorConfig, ...], options: Options, stages: Stages | None = None
    ) -> None:
        self.lowering, self.configs, self.options = lowering, configs, options
        self.stages = stages or Stages.one(len(lowering.topology.devices))
        self._stage_of = self.stages.of(len(configs))
        self._simulator = DeltaSimulator(
            lowering.graph, lowering.topology, lowering.costs, options, configs, lowering, stages=self.stages
        )  # fmt: skip
        self._room = np.array([device.usable_bytes for device in lowering.topology.devices], dtype=np.int64)
        self.base_s = self._simulator.seconds
        """Iteration time of the plan, s."""

    def allows(self, operator: int, config: OperatorConfig) -> bool:
        """Whether a config stays on the devices of its operator's stage."""
        return set(config.devices) <= set(self.stages.devices[self._stage_of[operator]])

    def seconds(self, changes: Changes) -> float:
        """Iteration time (s) with these configs changed."""
        iteration_s = self._simulator.propose(changes)
        self._simulator.reject()
        return iteration_s

    def shortfall(self, changes: Changes) -> int:
        """Bytes missing on the device that lacks most, with these configs changed; 0 if it fits."""
        self._simulator.propose(changes)
        peaks = self._simulator.peaks()
        self._simulator.reject()
        return max(0, int((peaks - self._room).max()))

    def lower(self, changes: Changes) -> Lowered:
        """The changed plan, lowered."""
        return self.lowering.lower(self.changed(changes), self.options, self.stages)

    def changed(self, changes: Changes) -> tuple[OperatorConfig, ...]:
        """The changed configs of all operators."""
        return tuple(changes.get(i, config) for i, config in enumerate(self.configs))

    def loads(self, changes: Changes) -> Loads:
        """How much work of each sort the changed plan has."""
        return loads(self.lower(changes).rows)


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another config of one operator. ``alone_s``: iteration time (s) if nothing else changes; ``together_s``: if the
    operators that follow it change along, as ``followed`` says (None where nothing follows it)."""

    config: OperatorConfig
    alone_s: float
    together_s: float | None
    followed: Changes

    @property
    def best_s(self) -> float:
        """The better of both, s."""
        return self.alone_s if self.together_s is None else min(self.alone_s, self.together_s)

    def changes(self, operator: int) -> Changes:
        """What changes in the better of both."""
        alone = self.together_s is None or self.alone_s <= self.together_s
        return {operator: self.config} if alone else self.followed


@dataclass(frozen=True, slots=True)
class Weighed:
    """An alternative with what it takes: bytes missing on the worst device, and how much more work of each sort."""

    alternative: Alternative
    shortfall: int
    more: Loads


@dataclass(frozen=True, slots=True)
class Improvement:
    """A change of one operator (and of what follows it, if ``together``) that fits into memory and is faster."""

    operator: int
    config: OperatorConfig
    seconds: float
    together: bool


@dataclass(frozen=True, slots=True)
class SingleChanges:
    """Other configs of single operators that were ``tried``, of all there are (``possible``); of those that make the
    plan faster, the best of each operator, fastest first."""

    tried: int
    possible: int
    improvements: tuple[Improvement, ...]


@dataclass(frozen=True, slots=True)
class Difference:
    """Operators that two plans treat differently in the same way. ``a_changed_s``: iteration time (s) of the first plan
    with these alone as in the second; ``b_changed_s``: of the second with these alone as in the first. ``leader``: the
    operator that tells what the change is."""

    operators: tuple[int, ...]
    leader: int
    a_changed_s: float
    b_changed_s: float
