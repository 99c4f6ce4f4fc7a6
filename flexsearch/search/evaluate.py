"""The cost of a plan: its simulated time, with a penalty if it does not fit into memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from flexsearch.cost import Costs
from flexsearch.graph import OperatorGraph
from flexsearch.lower import Lowered, Lowering
from flexsearch.lower.folding import Fold
from flexsearch.search.constants import PENALTY
from flexsearch.simulate.delta import DeltaSimulator
from flexsearch.strategy import OperatorConfig, Options
from flexsearch.topology import Topology

Configs = tuple[OperatorConfig, ...]
"""A config for each operator, in graph order."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """``time_s``: simulated iteration. ``shortfall``: bytes missing over the device's memory, summed over the devices.
    ``cost``: seconds, with the penalty for missing memory."""

    time_s: float
    shortfall: float

    @property
    def cost(self) -> float:
        return self.time_s * (1.0 + PENALTY * self.shortfall)

    @property
    def feasible(self) -> bool:
        return self.shortfall == 0.0


def by_rank(evaluation: Evaluation) -> tuple[bool, float]:
    """Key that sorts the better answer first: what fits into memory before what does not, then by cost."""
    return not evaluation.feasible, evaluation.cost


def better(a: Evaluation, b: Evaluation) -> bool:
    """Whether ``a`` is a better answer than ``b``."""
    return by_rank(a) < by_rank(b)


class Evaluator:
    """Evaluates plans of one graph on one topology, as changes of a plan at hand. ``share``: as of ``Templates``; not
    where operators that are alike may have different configs. ``fold``: the graph and the topology are a part of it, as
    are the plans; what is missing in memory is that of all blocks."""

    def __init__(
        self, graph: OperatorGraph, topology: Topology, costs: Costs, options: Options, share: bool = True,
        fold: Fold | None = None,
    ) -> None:  # fmt: skip
        self.graph, self.topology, self.costs, self.options, self.share = graph, topology, costs, options, share
        self.fold = fold
        self._simulator: DeltaSimulator | None = None
        self.forget()

    def forget(self) -> None:
        """Give back the memory of all templates. They are made again where they are asked for."""
        self._simulator = None
        self.lowering = Lowering(self.graph, self.topology, self.costs, self.fold)

    @property
    def template_bytes(self) -> int:
        """Bytes of the templates so far."""
        return 0 if self._simulator is None else self._simulator.templates.nbytes

    def __call__(self, configs: Configs, limit: float = inf) -> Evaluation:
        """Evaluation of ``configs``, which become the plan at hand; infinite, and nothing done, if they take longer
        than ``limit`` (s)."""
        if limit < inf and self._simulator is not None and not self._simulator.go_to(configs, limit):
            return Evaluation(inf, 0.0)
        simulator = self.at(configs)
        return Evaluation(simulator.seconds, simulator.missing_memory())

    def at(self, configs: Configs) -> DeltaSimulator:
        """The simulator, with ``configs`` as its plan at hand."""
        if self._simulator is None:
            self._simulator = DeltaSimulator(
                self.graph, self.topology, self.costs, self.options, configs, self.lowering, share=self.share
            )
        else:
            self._simulator.go_to(configs)
        return self._simulator

    @property
    def at_hand(self) -> Configs:
        """The plan at hand."""
        assert self._simulator is not None
        return self._simulator.configs

    def use(self, options: Options) -> None:
        """Evaluate under other options from now on."""
        if self._simulator is not None and options.optimizer == self.options.optimizer:
            self._simulator.use(options)
        else:
            self._simulator = None
        self.options = options

    def lower(self, configs: Sequence[OperatorConfig]) -> Lowered:
        """The lowered plan."""
        return self.lowering.lower(configs, self.options)
