"""Delta simulation: the iteration time of a plan that differs from the one at hand in a few configs.

A proposal changes the templates of its operators, of the edges around them and of their weights, and with them the rows
of a few blocks (``flexsearch.lower``). The engine goes on from the last moment before any of them. The result is that of
lowering and simulating the whole plan anew, to the tick; rejecting it leaves the plan at hand as it was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import floor, inf

import numpy as np
import numpy.typing as npt

from flexsearch.cost import Costs
from flexsearch.cost.ticks import TICK
from flexsearch.graph import OperatorGraph
from flexsearch.lower import Lowering
from flexsearch.lower.describe import FULL, LACKING, Plan
from flexsearch.lower.plan import Numbers, PlanRows
from flexsearch.lower.schedule import Stages
from flexsearch.lower.templates import Templates
from flexsearch.simulate.account import missing_memory
from flexsearch.simulate.attempt import NO_SPACE, NO_TEMPLATES, Proposals, attempt_each, give_up, take
from flexsearch.simulate.engine import LATE, Engine, Times
from flexsearch.simulate.lifetimes import Sources
from flexsearch.simulate.units import make_account
from flexsearch.strategy import OperatorConfig, Options
from flexsearch.topology import Topology

Configs = Sequence[OperatorConfig]


class DeltaSimulator:
    """A plan at hand, and what it would cost to change it.

    >>> simulator = DeltaSimulator(graph, topology, costs, options, configs)
    >>> seconds = simulator.propose({3: config})      # iteration time (s) with operator 3 changed
    >>> simulator.accept()                            # or reject()

    ``share``: as of ``Templates``. ``stages``: how the step is cut; ``graph`` is that of one microbatch.
    """

    def __init__(
        self, graph: OperatorGraph, topology: Topology, costs: Costs, options: Options, configs: Configs,
        lowering: Lowering | None = None, share: bool = True, stages: Stages | None = None,
    ) -> None:  # fmt: skip
        self.graph, self.topology, self.costs, self.options = graph, topology, costs, options
        self.lowering = lowering or Lowering(graph, topology, costs)
        self.templates = Templates(self.lowering, share)
        self._stages = stages
        self.proposed = 0
        """Proposals so far."""
        self._pending, self._dirty, self._seconds = False, False, 0.0
        self.seconds = 0.0
        """Iteration time of the plan at hand, s."""
        self.rows: PlanRows
        self.engine: Engine
        self._start(options, dict(enumerate(configs)))

    def _start(self, options: Options, configs: Mapping[int, OperatorConfig]) -> None:
        self.options = options
        self.rows = PlanRows(self.lowering, self.templates, options, self._stages)
        self.engine = Engine(self.rows.schedule, self.rows.machine)
        self.account, self._sources = make_account(self.rows)
        """Of the plan whose memory was asked for last."""
        self.from_nothing(configs)

    @property
    def configs(self) -> tuple[OperatorConfig, ...]:
        """The plan at hand."""
        return self.rows.configs

    def propose(self, changes: Mapping[int, OperatorConfig]) -> float:
        """Iteration time (s) of the plan at hand with some operators' configs changed. ``accept`` or ``reject`` it."""
        numbers = {i: self.templates.config(i, c) for i, c in changes.items()}
        return self.attempt(list(numbers), list(numbers.values()))

    def attempt(self, operators: Numbers, numbers: Numbers, limit: float = inf) -> float:
        """As ``propose``, with configs by number. Infinity if the time is above ``limit`` (s)."""
        return self.attempt_each(make_proposals([(operators, numbers)]), limit)

    def attempt_each(self, proposals: Proposals, limit: float) -> float:
        """Iteration time (s) of the first of the proposals, from number ``at[0]`` on, that takes at most ``limit`` (s):
        ``accept`` or ``reject`` it. ``at[0]`` becomes its number. If all take more, ``at[0]`` becomes their number, and
        the time is infinity."""
        self._clean()
        first, most, ticks = int(proposals.at[0]), np.int64(ticks_of(limit)), int(LATE)
        while int(proposals.at[0]) < len(proposals.end):
            plan = self.prepare()
            attempt_each(plan, self.engine.state, most, proposals)
            self._dirty = True
            ticks = int(proposals.ticks[0])
            if ticks >= 0:
                break
            self.help(ticks)
        last = int(proposals.at[0])
        self.proposed += min(last + 1, len(proposals.end)) - first
        self._pending = last < len(proposals.end)
        self._seconds = ticks * TICK if self._pending else inf
        return self._seconds

    def prepare(self) -> Plan:
        """All arrays of the rows, and the engine ready for compiled proposals."""
        plan = self.rows.plan
        self.engine.keep(plan.segments)
        return plan

    def help(self, ticks: int) -> None:
        """Undo a proposal that needed something (``attempt`` returned a negative number), and make it possible."""
        plan = self.rows.plan
        self._dirty = False
        if ticks in (NO_TEMPLATES, NO_SPACE):
            if self.rows.go_on(LACKING if ticks == NO_TEMPLATES else FULL):
                self.engine.renumber(self.rows.segment)
            return
        proposed = plan.new_segment.copy()
        give_up(plan, self.engine.state)  # what it wrote stays in the arena until something else is proposed
        self.engine.make_room(plan.segments, plan.segment, proposed, ticks)

    def missing_memory(self) -> float:
        """Memory that the last proposal (or the plan at hand) lacks over what the device has, summed over the devices;
        0.0 if it fits."""
        return float(missing_memory(self.account, self.sources, self.rows.proposed, False))

    def peaks(self) -> npt.NDArray[np.int64]:
        """Peak memory of each device under the last proposal (or the plan at hand), bytes."""
        missing_memory(self.account, self.sources, self.rows.proposed, True)
        return self.account.peak.copy()

    @property
    def sources(self) -> Sources:
        """What memory is worked out from; fetch it again after adding templates."""
        now, tables = self._sources, self.templates.tables
        same = now.pools is tables.pools and now.layouts is tables.layouts
        if not same or now.landings is not tables.landings:
            self._sources = now._replace(pools=tables.pools, layouts=tables.layouts, landings=tables.landings)
        return self._sources

    def _clean(self) -> None:
        """Undo a proposal that was neither accepted nor rejected."""
        if self._dirty:
            give_up(self.rows.plan, self.engine.state)
            self._dirty = False

    def accept(self) -> None:
        """Make the last proposal the plan at hand. Raises RuntimeError if there is none."""
        if not self._pending:
            raise RuntimeError("nothing has been proposed since the last accept, reject or times")
        self._pending = self._dirty = False
        take(self.rows.plan, self.engine.state)
        self.seconds = self._seconds

    def reject(self) -> None:
        """Leave the plan at hand as it is."""
        self._pending = False
        self._clean()

    def from_nothing(self, configs: Mapping[int, OperatorConfig]) -> float:
        """Iteration time (s) of a whole plan, built up and run from nothing: what ``propose`` saves. It becomes the
        plan at hand."""
        self._pending = self._dirty = False
        self.rows.set(configs)
        self.seconds = self.engine.run(self.rows.plan.segments, self.rows.segment) * TICK
        return self.seconds

    def use(self, options: Options) -> None:
        """Go on under other options: templates do not depend on them. The optimizer must stay the same."""
        self._start(options, dict(enumerate(self.configs)))

    def times(self) -> Times:
        """Start and end (ticks) of every row of the plan at hand. Drops a proposal."""
        self.reject()
        return self.engine.times(self.rows.plan.segments, self.rows.segment)


def ticks_of(seconds: float) -> int:
    """The largest number of ticks that takes at most so many seconds."""
    return LATE if seconds >= LATE * TICK else floor(seconds / TICK)


def make_proposals(changes: Sequence[tuple[Numbers, Numbers]]) -> Proposals:
    """Proposals (at least one): the operators of each, and the numbers of their new configs."""
    operators, numbers = zip(*changes, strict=True)
    return Proposals(
        operator=np.concatenate(operators).astype(np.uint32), config=np.concatenate(numbers).astype(np.uint32),
        end=np.cumsum([len(of) for of in operators], dtype=np.uint64), at=np.zeros(1, np.uint64),
        ticks=np.zeros(1, np.int64),
    )  # fmt: skip
