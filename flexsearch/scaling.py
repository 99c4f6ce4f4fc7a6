"""Floor 5: the best plans for more and more devices, with the same batch or with one that grows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction

from flexsearch.cost import Profile
from flexsearch.errors import FlexsearchError
from flexsearch.graph import OperatorGraph
from flexsearch.graph.batch import with_batch
from flexsearch.planning import PlanProgress, plan
from flexsearch.report.scaling import Kind, ScalingPoint
from flexsearch.setting import Setting
from flexsearch.spaces import Space
from flexsearch.strategy import Options, Strategy
from flexsearch.topology.sizes import Sizes

OnProgress = Callable[[str, PlanProgress], None]
"""Called with what is planned ("16 devices, strong scaling"), and where its search is."""


@dataclass(frozen=True)
class Scaler:
    """Plans ``graph`` on clusters of one sort. ``budget``: of each search; ``space``: as of ``planning.plan``."""

    graph: OperatorGraph
    sizes: Sizes
    budget: str | float
    options: Options
    space: Space
    profile: Profile | None = None
    on_progress: OnProgress | None = None

    def points(self, most: int, kinds: tuple[Kind, ...]) -> Iterator[tuple[Kind, ScalingPoint]]:
        """The best plan for each number of devices up to ``most``. Strong scaling keeps the batch of the graph. Weak
        scaling begins with the fewest devices on which that batch fits, and its batch grows with the devices. The
        generator ends early after Ctrl-C: the plan whose search it cut short is left out. Raises TopologyError if
        hosts are of different sizes."""
        base: int | None = None
        last: Strategy | None = None
        for devices in self.sizes.numbers(most):
            for alike in (kinds,) if base is None else tuple((kind,) for kind in kinds):
                grows = base is not None and alike == ("weak",)
                factor = Fraction(devices, base) if base is not None and grows else Fraction(1)
                words, start = f"{' and '.join(alike)} scaling", None if grows else last
                if (planned := self._point(devices, factor, words, start)) is None:
                    return
                point, strategy = planned
                last = last if grows else strategy
                yield from ((kind, point) for kind in alike)
                if base is None and point.fits:
                    base = devices

    def _point(
        self, devices: int, factor: Fraction, words: str, start: Strategy | None
    ) -> tuple[ScalingPoint, Strategy | None] | None:
        """The best plan for so many devices and a batch ``factor`` times as large; None if Ctrl-C cut it short.
        ``start``: a plan for fewer devices, which is one for more."""
        batch = self.graph.batch * factor

        def report(now: PlanProgress) -> None:
            if self.on_progress is not None:
                self.on_progress(f"{devices} device{'s' * (devices > 1)}, {words}", now)

        try:
            setting = Setting.of(with_batch(self.graph, factor), self.sizes.of(devices), self.profile)
            if start is not None and not start.is_plain:
                start = None  # the search over splits begins with plans of one stage
            if start is not None:
                start = Strategy.make(self.graph, setting.topology, start.configs, start.options)
            best = plan(setting, self.budget, self.options, space=self.space, start=start, on_progress=report)
        except FlexsearchError as error:  # no plan of this batch for these devices
            return ScalingPoint(devices, int(batch), None, reason=error.message), start
        if best.interrupted:
            return None
        return ScalingPoint(
            devices, int(batch), best.step, best.words, data_parallel_s=best.data_parallel_s, looked_at=best.looked_at
        ), best.strategy
