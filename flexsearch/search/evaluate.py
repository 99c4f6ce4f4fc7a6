"""What a set of configs costs: simulated, and made dearer where it does not fit into memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Final

import numpy as np

from flexsearch.cost import Costs
from flexsearch.graph import OperatorGraph
from flexsearch.lower import Lowered, Lowering
from flexsearch.simulate import memory
from flexsearch.simulate.ceiling import Bytes
from flexsearch.simulate.delta import DeltaSimulator
from flexsearch.strategy import OperatorConfig, Options
from flexsearch.topology import Topology

Configs = tuple[OperatorConfig, ...]
"""A config for each operator, in graph order."""

PENALTY: Final = 30.0
"""A plan that needs twice the memory of one device counts as 31 times as slow."""
KNOWN_LIMIT: Final = 20_000


@dataclass(frozen=True, slots=True)
class Evaluation:
    """``time_s``: simulated iteration. ``shortfall``: bytes missing over the device's memory, summed over the devices;
    None where it was not asked for. ``cost``: seconds, with the penalty for missing memory (a lower bound where the
    shortfall is unknown)."""

    time_s: float
    shortfall: float | None

    @property
    def cost(self) -> float:
        return self.time_s * (1.0 + PENALTY * (self.shortfall or 0.0))

    @property
    def feasible(self) -> bool:
        return self.shortfall == 0.0


class Evaluator:
    """Evaluates configs of one graph on one topology, as changes of a plan at hand, and remembers."""

    def __init__(self, graph: OperatorGraph, topology: Topology, costs: Costs, options: Options) -> None:
        self.graph, self.topology, self.costs, self.options = graph, topology, costs, options
        self.lowering = Lowering(graph, topology, costs)
        self._memory_bytes = np.array([device.memory_bytes for device in topology.devices], dtype=np.int64)
        self._known: dict[Configs, Evaluation] = {}
        self._simulator: DeltaSimulator | None = None
        self._hand: Configs = ()
        self._last: Configs = ()

    def __call__(self, configs: Configs, limit: float = inf) -> Evaluation:
        """Evaluation of ``configs``. Memory is only worked out if the time alone does not exceed ``limit`` (s)."""
        known = self._known.get(configs)
        if known is not None and (known.shortfall is not None or known.time_s > limit):
            return known
        seconds, held = self._simulate(configs)
        found = Evaluation(seconds, None if seconds > limit else self._shortfall(configs, held))
        if len(self._known) >= KNOWN_LIMIT:
            self._known.pop(next(iter(self._known)))
        self._known[configs] = found
        return found

    def hold(self, configs: Configs) -> None:
        """Say that the next plans will differ little from ``configs``: it saves time, and changes no result."""
        if self._simulator is not None and configs is not self._hand:
            if configs is not self._last:
                self._simulate(configs)
            self._simulator.accept()
            self._hand = configs

    def _simulate(self, configs: Configs) -> tuple[float, Bytes]:
        """Iteration time (s), and an upper bound on the memory of each device."""
        self._last = configs
        if self._simulator is None:
            self._hand = configs
            self._simulator = DeltaSimulator(
                self.graph, self.topology, self.costs, self.options, configs, self.lowering
            )
            return self._simulator.seconds, self._simulator.held
        pairs = enumerate(zip(configs, self._hand, strict=True))
        changes = {i: new for i, (new, old) in pairs if new is not old and new != old}
        return self._simulator.propose(changes), self._simulator.held

    def use(self, options: Options) -> None:
        """Evaluate under other options from now on."""
        if self._simulator is not None and options.optimizer == self.options.optimizer:
            self._simulator.use(options)
        else:
            self._simulator = None
        self.options, self._last = options, ()
        self._known.clear()

    def lower(self, configs: Sequence[OperatorConfig]) -> Lowered:
        """The lowered plan."""
        return self.lowering.lower(configs, self.options)

    def _shortfall(self, configs: Configs, held: Bytes) -> float:
        if (held <= self._memory_bytes).all():
            return 0.0
        pairs = zip(memory(self.lower(configs)), self.topology.devices, strict=True)
        return sum(max(0.0, held.peak / device.memory_bytes - 1.0) for held, device in pairs)
