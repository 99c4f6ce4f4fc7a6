"""When replicas synchronise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flexsearch.sync.options import number, whole


@dataclass(frozen=True)
class Timing:
    """When replicas synchronise."""

    name: ClassVar[str]
    changes: ClassVar[str] = ""
    """What it changes in the mathematics, in words; empty: nothing."""

    @property
    def steps(self) -> int:
        """Steps from one synchronisation to the next; 0: each worker goes by itself, through a server."""
        return 1


@dataclass(frozen=True)
class EveryStep(Timing):
    """Gradients, or weights, in every step."""

    name: ClassVar[str] = "every-step"


@dataclass(frozen=True)
class LocalSGD(Timing):
    """``period`` steps of each worker on its own, then the mean of weights (Yu et al., 2019; Stich, 2019). Compressed,
    or with few others, it is what weights have changed by since then that is sent (Basu et al., 2019)."""

    period: int = 4

    name: ClassVar[str] = "local-sgd"
    changes: ClassVar[str] = "between synchronisations each replica takes steps of its own, and replicas drift apart"

    def __post_init__(self) -> None:
        whole(f"period of {self.name}", self.period)

    @property
    def steps(self) -> int:
        return self.period


@dataclass(frozen=True)
class DiLoCo(LocalSGD):
    """As ``LocalSGD``; what weights have changed by, with its sign turned, is the gradient of an outer optimizer, SGD
    with Nesterov's momentum (Douillard et al., 2023)."""

    period: int = 16
    lr: float = 0.7
    momentum: float = 0.9

    name: ClassVar[str] = "diloco"
    changes: ClassVar[str] = "replicas take steps of their own, and an outer optimizer updates with their mean change"

    def __post_init__(self) -> None:
        super().__post_init__()
        number("lr of diloco", self.lr)
        number("momentum of diloco", self.momentum, most=0.999, least=True)


@dataclass(frozen=True)
class Asynchronous(Timing):
    """Each worker pushes its gradient to a server, which updates on arrival, and pulls the weights (Dean et al., 2012).
    ``share``: gradients are multiplied by it; 0: one over the number of workers, so that all workers' gradients
    together count as much as their mean."""

    share: float = 0.0

    name: ClassVar[str] = "async"
    changes: ClassVar[str] = "gradients are made with weights that other workers have updated since"

    def __post_init__(self) -> None:
        number(f"share of {self.name}", self.share, least=True)

    @property
    def steps(self) -> int:
        return 0

    @property
    def lead(self) -> int | None:
        """Steps by which a worker may be ahead of the slowest; None: any number."""
        return None


@dataclass(frozen=True)
class Stale(Asynchronous):
    """As ``Asynchronous``, but no worker begins a step while it is more than ``bound`` steps ahead of the slowest (Ho
    et al., 2013)."""

    bound: int = 2

    name: ClassVar[str] = "stale"
    changes: ClassVar[str] = "gradients are made with weights that other workers, within the bound, have updated since"

    def __post_init__(self) -> None:
        super().__post_init__()
        whole("bound of stale", self.bound, 0)

    @property
    def lead(self) -> int | None:
        return self.bound
