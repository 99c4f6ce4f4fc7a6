"""Delta simulation: the iteration time of a plan that differs from the one at hand in a few configs.

A proposal changes the templates of its operators, of the edges around them and of their weights, and with them the rows
of a few blocks (``flexsearch.lower``). The engine goes on from the last moment before any of them. The result is that
of lowering and simulating the whole plan anew, to the tick; rejecting it leaves the plan at hand as it was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import compress
from math import floor, inf
from operator import is_not
from typing import Final

import numpy as np
import numpy.typing as npt

from flexsearch.cost import Costs
from flexsearch.cost.ticks import TICK
from flexsearch.direct import direct
from flexsearch.errors import StrategyError
from flexsearch.graph import OperatorGraph
from flexsearch.lower import Lowering
from flexsearch.lower.describe import drop, keep
from flexsearch.lower.plan import Numbers, PlanRows
from flexsearch.lower.schedule import Stages
from flexsearch.lower.templates import Templates
from flexsearch.simulate.account import Account, forget, missing_memory
from flexsearch.simulate.attempt import ENGINE, attempt
from flexsearch.simulate.engine import LATE, Engine, Times
from flexsearch.simulate.engine_delta import accept
from flexsearch.simulate.spans import Sources
from flexsearch.simulate.units import make_account
from flexsearch.strategy import OperatorConfig, Options
from flexsearch.topology import Topology

_attempt = direct(attempt)
_accept = direct(accept)
_keep = direct(keep)
_drop = direct(drop)
_missing_memory = direct(missing_memory)

Configs = Sequence[OperatorConfig]

PREPARED: Final = 8
"""For so many options, rows and account are kept: more than bucket sizes are tried for a plan."""


class DeltaSimulator:
    """A plan at hand, and what it would cost to change it.

    >>> simulator = DeltaSimulator(graph, topology, costs, options, configs)
    >>> seconds = simulator.propose({3: config})      # iteration time (s) with operator 3 changed
    >>> simulator.accept()                            # or reject()

    ``share``: as of ``Templates``. ``stages``: how the step is cut; ``graph`` is that of one microbatch.
    ``templates``: of the same lowering, from another simulator.
    """

    def __init__(
        self, graph: OperatorGraph, topology: Topology, costs: Costs, options: Options, configs: Configs,
        lowering: Lowering | None = None, share: bool = True, stages: Stages | None = None,
        templates: Templates | None = None,
    ) -> None:  # fmt: skip
        if options.recipes:
            raise StrategyError(
                "changes of a plan whose weights synchronise by recipes cannot be weighed",
                "Leave its synchronisation.recipes out, or use simulate, compare or plot.",
            )
        self.graph, self.topology, self.costs, self.options = graph, topology, costs, options
        self.lowering = lowering or Lowering(graph, topology, costs)
        self.templates = templates or Templates(self.lowering, share, halved=stages is not None)
        self._stages = stages
        self.proposed = 0
        """Proposals so far."""
        self._pending, self._dirty, self._seconds = False, False, 0.0
        self.rows: PlanRows
        self.engine: Engine
        self._prepared: dict[str, tuple[PlanRows, Engine, Account, Sources]] = {}
        """By options, of which only ``synchronise_by`` may be another: making these takes longer than a whole run, and
        an engine grows several times before it has room for all that proposals need."""
        numbers = [self.templates.config(i, config) for i, config in enumerate(configs)]
        self._asked = tuple(configs), np.array(numbers, np.uint32)
        """The plan that ``go_to`` was asked for last, and its numbers."""
        self._start(options, self._asked[1])

    def _start(self, options: Options, numbers: Numbers) -> None:
        key = options.model_dump_json(exclude={"synchronise_by"})
        if (prepared := self._prepared.pop(key, None)) is None:
            arena = next((rows.arena for rows, *_ in self._prepared.values()), None)
            rows = PlanRows(self.lowering, self.templates, options, self._stages, arena)
            prepared = rows, Engine(rows.schedule, rows.machine), *make_account(rows)
        if len(self._prepared) == PREPARED:
            del self._prepared[next(iter(self._prepared))]
        self._prepared[key] = prepared
        self.options = options
        self.rows, self.engine, self.account, self._sources = prepared
        self.rows.use(options)
        forget(self.account)  # it compares configs; with the same ones it would keep the reshards of gradients
        self.rows.set_numbers(range(len(numbers)), numbers)
        self.seconds = self.engine.run(self.rows.plan.segments, self.rows.segment) * TICK
        """Iteration time of the plan at hand, s."""

    @property
    def configs(self) -> tuple[OperatorConfig, ...]:
        """The plan at hand."""
        return self.rows.configs

    def propose(self, changes: Mapping[int, OperatorConfig]) -> float:
        """Iteration time (s) of the plan at hand with some operators' configs changed. ``accept`` or ``reject`` it."""
        numbers = {i: self.templates.config(i, c) for i, c in changes.items()}
        return self.attempt(list(numbers), list(numbers.values()))

    def attempt(self, operators: Numbers, numbers: Numbers, limit: float = inf) -> float:
        """As ``propose``, with configs by number. Infinity if the time is above ``limit`` (s): then there is nothing
        to accept."""
        self._clean()
        self.rows.ask(operators, numbers)
        most = ticks_of(limit)
        ticks = self._attempt(most)
        self.proposed += 1
        self._pending = ticks <= most
        self._seconds = ticks * TICK if self._pending else inf
        return self._seconds

    def go_to(self, configs: Configs, limit: float = inf) -> bool:
        """Make a whole plan the plan at hand; False, and nothing done, if its time is above ``limit`` (s)."""
        before, numbers = self._asked[0], self._asked[1].copy()
        for i in compress(range(len(configs)), map(is_not, configs, before)):
            numbers[i] = self.templates.config(i, configs[i])
        self._asked = tuple(configs), numbers
        changed = np.flatnonzero(numbers != self.rows.state.config).astype(np.uint32)
        if self.attempt(changed, numbers[changed], limit) == inf:
            self.reject()
            return False
        self.accept()
        return True

    def _attempt(self, limit: int) -> int:
        """Ticks of what was asked for; LATE if they are above ``limit``."""
        while True:
            self._dirty = True
            ticks = int(_attempt(self.rows.plan, self.engine.state, self.templates.tables, np.int64(limit)))
            if ticks >= 0:
                return ticks
            if ticks == -ENGINE:
                return self.run_again(limit)
            self.go_on(-ticks)

    def run_again(self, limit: int = LATE) -> int:
        """Ticks of the proposal whose rows have been written; LATE if they are above ``limit``. The engine gets the
        room that it needs. Raises FlexsearchError where devices wait for what nothing starts."""
        plan = self.rows.plan
        changed = plan.change.block[: int(plan.change.blocks[0])]
        return self.engine.propose(plan.segments, plan.new_segment, changed, limit)

    def go_on(self, status: int) -> None:
        """Drop a proposal that could not be described (``status``: LACKING or FULL), and make it possible."""
        self._dirty = False
        if self.rows.go_on(status):
            self.engine.renumber(self.rows.segment)

    def missing_memory(self) -> float:
        """Memory that the last proposal (or the plan at hand) lacks over what the device has, summed over the devices;
        0.0 if it fits."""
        return float(_missing_memory(self.account, self.sources, self.rows.proposed))

    def peaks(self) -> npt.NDArray[np.int64]:
        """Peak memory of each device under the last proposal (or the plan at hand), bytes."""
        _missing_memory(self.account, self.sources, self.rows.proposed)
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
            self.give_up()

    def give_up(self) -> None:
        """Leave rows and engine as they were before the proposal."""
        _drop(self.rows.plan)
        self.engine.reject()
        self._dirty = False

    def accept(self) -> None:
        """Make the last proposal the plan at hand. Raises RuntimeError if there is none."""
        if not self._pending:
            raise RuntimeError("nothing has been proposed since the last accept, reject or times")
        self._pending = self._dirty = False
        _keep(self.rows.plan)
        _accept(self.engine.state)
        self.seconds = self._seconds

    def reject(self) -> None:
        """Leave the plan at hand as it is."""
        self._pending = False
        self._clean()

    def use(self, options: Options) -> None:
        """Go on under other options: templates do not depend on them. The optimizer must stay the same."""
        self.reject()
        self._start(options, self.rows.state.config.copy())

    def times(self) -> Times:
        """Start and end (ticks) of every row of the plan at hand. Drops a proposal."""
        self.reject()
        return self.engine.times(self.rows.plan.segments, self.rows.segment)


def ticks_of(seconds: float) -> int:
    """The largest number of ticks that takes at most so many seconds."""
    return LATE if seconds >= LATE * TICK else floor(seconds / TICK)
