"""What a search over layouts found."""

from __future__ import annotations

from dataclasses import dataclass

from flexsearch.search.constants import PENALTY
from flexsearch.search.hybrid.layout import Layout
from flexsearch.simulate.staged import Step
from flexsearch.strategy import OperatorConfig, Options, Strategy
from flexsearch.strategy.pipeline import Pipeline


@dataclass(frozen=True)
class Candidate:
    """A plan that was simulated: its ``layout``, how exactly it is cut, the configs of the first block. ``seconds``: of
    a step; ``used``: share of its memory that the fullest device needs. ``changed``: sorts of operators that are not
    split as the layout says."""

    layout: Layout
    options: Options
    pipeline: Pipeline
    configs: tuple[OperatorConfig, ...]
    seconds: float
    used: float
    changed: int = 0

    @property
    def feasible(self) -> bool:
        return self.used <= 1.0

    @property
    def cost(self) -> float:
        """Seconds, with the penalty for missing memory."""
        return self.seconds * (1.0 + PENALTY * max(0.0, self.used - 1.0))

    @property
    def rank(self) -> tuple[bool, float]:
        """Key that sorts the better one first."""
        return not self.feasible, self.cost


@dataclass(frozen=True)
class HybridProgress:
    """How far a search is: plans simulated, plans considered, the best so far, what is done now."""

    plans: int
    considered: int
    best_s: float
    elapsed_s: float
    phase: str


@dataclass(frozen=True)
class HybridResult:
    """``strategy``: the best plan, ``step``: its simulated step. ``baselines``: by name, the best plan of each family
    that people write by hand; ``baseline``: name of the one that the best plan is, or empty. ``considered``: so
    many plans were estimated, of which ``plans`` were simulated, in ``elapsed_s``."""

    best: Candidate
    strategy: Strategy
    step: Step
    baselines: dict[str, tuple[Candidate, Step]]
    baseline: str
    plans: int
    considered: int
    elapsed_s: float
    stopped: str
