"""What a search over layouts found."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from flexsearch.cost.uncertainty import Estimate
from flexsearch.search.constants import PENALTY
from flexsearch.search.hybrid.layout import Layout
from flexsearch.search.hybrid.ranking import Key
from flexsearch.simulate.staged import Step
from flexsearch.strategy import OperatorConfig, Options, States, Strategy
from flexsearch.strategy.pipeline import Pipeline

FAMILIES: Final[Mapping[str, Callable[[Layout], bool]]] = {
    "data-parallel": lambda f: f.tensor == f.pipeline == 1 and not f.states,
    "zero": lambda f: f.tensor == f.pipeline == 1 and f.states in (States.OPTIMIZER, States.GRADIENTS) and not f.over,
    "fsdp": lambda f: f.tensor == f.pipeline == 1 and f.states == States.WEIGHTS and not f.over,
    "hsdp": lambda f: f.tensor == f.pipeline == 1 and f.states == States.WEIGHTS and f.over > 0,
    "tensor x data": lambda f: f.pipeline == 1 and f.tensor > 1 and f.states <= States.OPTIMIZER,
    "pipeline x data": lambda f: f.pipeline > 1 and f.tensor == 1 and f.states <= States.OPTIMIZER,
    "megatron": lambda f: f.pipeline > 1 and f.tensor > 1 and f.states <= States.OPTIMIZER,
}
"""Layouts that people write by hand: those whose ranks are alike."""


@dataclass(frozen=True)
class Candidate:
    """A plan that was simulated: its ``layout``, how exactly it is cut, the configs of the first block. ``seconds``: of
    a step; ``used``: share of its memory that the fullest device needs. ``changed``: sorts of operators that are not
    split as the layout says. ``own``: its stages and splits are those that the layout has by itself."""

    layout: Layout
    options: Options
    pipeline: Pipeline
    configs: tuple[OperatorConfig, ...]
    seconds: float
    used: float
    changed: int = 0
    own: bool = False

    @property
    def key(self) -> Key:
        """By which the search finds it."""
        return Key(self.layout, self.options, () if self.own else self.pipeline.first)

    @property
    def families(self) -> list[str]:
        """Families of plans that people write by hand, to which it belongs."""
        alone = not self.own or not self.layout.alike
        return [] if alone else [name for name, suits in FAMILIES.items() if suits(self.layout)]

    @property
    def feasible(self) -> bool:
        return self.used <= 1.0

    @property
    def cost(self) -> float:
        """Seconds, with the penalty for missing memory."""
        return self.seconds * (1.0 + PENALTY * max(0.0, self.used - 1.0))

    @property
    def rank(self) -> tuple[bool, float, float]:
        """Key that sorts the better one first: of equally fast ones, that which leaves more memory free."""
        return not self.feasible, self.cost, self.used


@dataclass(frozen=True)
class HybridProgress:
    """How far a search is: plans simulated, plans considered, the best so far (infinite before the first), what is done
    now."""

    plans: int
    considered: int
    best_s: float
    elapsed_s: float
    phase: str


@dataclass(frozen=True)
class HybridResult:
    """``strategy``: the best plan, ``step``: its simulated step. ``baselines``: by name, the best plan of each family
    that people write by hand; ``baseline``: name of the one that the best plan is, or empty. ``considered``: so
    many plans were estimated, of which ``plans`` were simulated, in ``elapsed_s``. ``bound_s``: no plan takes
    less, whatever its layout (s). ``set_aside``: the time of a faster plan that did not beat the baseline by the
    margin, if there is one."""

    best: Candidate
    strategy: Strategy
    step: Step
    baselines: dict[str, tuple[Candidate, Step]]
    baseline: str
    plans: int
    considered: int
    elapsed_s: float
    stopped: str
    bound_s: float
    set_aside: Estimate | None = None
