"""What the rows of a plan say about a few of its operators: their computing, and how long data takes between them.

Sampled plans differ in the configs of some operators. What is read depends on nothing else, so that each row of
``relaxation``'s tables is read from one plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from flexsearch.compiled import F64
from flexsearch.cost.ticks import LAUNCH_PARTS, TICK
from flexsearch.lower import Lowering
from flexsearch.lower.arrays import NOTHING
from flexsearch.lower.bucket import bucket_of
from flexsearch.lower.plan import PlanRows
from flexsearch.lower.rows import BACKWARD, COMPUTE, ISSUE
from flexsearch.lower.rows import NEVER as NO_TURN
from flexsearch.lower.templates import Templates
from flexsearch.proof.bound import UPDATE_ROUNDING
from flexsearch.proof.tables import NEVER
from flexsearch.strategy import OperatorConfig, Options


class Moved(NamedTuple):
    """What the reshard of an edge means to the devices at its ends. ``delays``: seconds from the end of the last task
    of device a to the arrival of what device b receives. ``send``: mask of the senders, if all of it begins with one
    communication that keeps its links until it has ended, else 0; for how long it ``holds`` each resource, if it need
    not wait for its ``connection``. ``launch``: seconds of a device's host."""

    delays: F64
    send: int
    holds: F64
    connection: int
    launch: F64


class Sync(NamedTuple):
    """A communication of the first phase of the synchronisation of one weight. ``key``: those of a bucket with the same
    key go as one. ``links``: seconds on each resource that it adds at least, if it goes with others. Masks: ``send``,
    ``receive``. ``second``: the longest communication of the second phase that follows, with its receivers."""

    bucket: int
    key: int
    seconds: float
    links: F64
    send: int
    receive: int
    second: float
    second_receive: int


class Samples:
    """Rows of the plans of one graph under ``options``. ``first``: configs to begin with."""

    def __init__(self, lowering: Lowering, options: Options, first: Sequence[OperatorConfig]) -> None:
        self.rows = PlanRows(lowering, Templates(lowering), options)
        self.rows.set(dict(enumerate(first)))
        self.count, self.resources = len(lowering.topology.devices), len(lowering.topology.resources)
        costs = lowering.costs
        self.launch = LAUNCH_PARTS * self.rows.table.launch * TICK
        self.issue = self.rows.table.issue * TICK
        """Seconds of one launch, and of handing over a communication, by device."""
        self.updates = costs.update_launches(options.optimizer, options.precision)
        """Launches of the update of a tensor."""
        self.rates = [costs.update_rates(d, options.optimizer, options.precision) for d in range(self.count)]

    def take(self, configs: Mapping[int, OperatorConfig]) -> None:
        """Go on to the plan with these configs of some operators."""
        self.rows.replace(configs)

    def read(self, operator: int, config: OperatorConfig, position: int) -> int:
        """Number of the layout in which an operator under a config reads an operand."""
        number = self.rows.templates.config(operator, config)
        pools = self.rows.templates.pools
        return int(pools.layout[int(pools.config_reads[number]) + position])

    def written(self, operator: int, config: OperatorConfig, output: int) -> int:
        """Likewise of an output."""
        number = self.rows.templates.config(operator, config)
        pools = self.rows.templates.pools
        return int(pools.layout[int(pools.config_writes[number]) + output])

    def computing(self, operator: int, backward: bool = False) -> F64:
        """Seconds of an operator's forward or backward tasks, by device; NEVER where it has none."""
        table, seconds = self.rows.table, np.full(self.count, NEVER)
        block = int((table.backward_of if backward else table.forward_of)[operator])
        if block != NOTHING:
            segments = self.rows.arena.segments
            for device, step in self._steps(block):
                if segments.step_kind[step] == COMPUTE:
                    seconds[device] = int(segments.step_ticks[step]) * TICK
        return seconds

    def launching(self, operator: int, backward: bool = False) -> F64:
        """Seconds in which hosts launch these tasks, by device."""
        table, seconds = self.rows.table, np.zeros(self.count)
        block = int((table.backward_of if backward else table.forward_of)[operator])
        if block != NOTHING:
            segments = self.rows.arena.segments
            for device, step in self._steps(block):
                if segments.step_kind[step] == COMPUTE:
                    seconds[device] = int(segments.step_host[step]) * TICK
        return seconds

    def nothing(self) -> Moved:
        """What moves where nothing does."""
        return Moved(np.full((self.count, self.count), NEVER), 0, np.zeros(self.resources), 0, np.zeros(self.count))

    def moved(self, operator: int, position: int, backward: bool = False) -> Moved:
        """The reshard of what an operator reads, or of the gradient that it makes of that."""
        block, sent = self.rows.sent(int(self.rows.program.operand_first[operator]) + position, backward)
        delays, send, holds, connection, launch = self.nothing()
        if not sent:
            return Moved(delays, send, holds, connection, launch)
        segments = self.rows.arena.segments
        begin = int(segments.communication_first[self.rows.segment[block]])
        senders: dict[int, list[int]] = {row: [] for row in sent}
        for device, step in self._steps(block):
            if segments.step_kind[step] == ISSUE and (row := int(segments.step_row[step])) in senders:
                senders[row].append(device)
                launch[device] += int(segments.step_host[step]) * TICK
        followers = {row: _list(segments, "follower", begin + row, "follower_row") for row in sent}
        for row in sent:
            self._delay(delays, senders[row], begin + row, 0)
            for after in followers[row]:
                self._delay(delays, senders[row], begin + after, int(segments.communication_ticks[begin + row]))
        firsts = set(sent).difference(*followers.values())
        first = min(firsts)
        alone = firsts == {first} and set(followers[first]) == set(sent) - firsts
        if alone and segments.turn[begin + first] == NO_TURN:
            send, connection = mask(senders[first]), int(segments.connection[begin + first])
            rows = slice(int(segments.link_first[begin + first]), int(segments.link_last[begin + first]))
            np.add.at(holds, segments.link[rows], segments.link_ticks[rows] * TICK)
        return Moved(delays, send, holds, connection, launch)

    def shared_connections(self) -> list[int]:
        """Connections for which what needs a single turn may have to wait: something has several there. What goes in
        buckets may, with what else is in them."""
        pools = self.rows.templates.pools
        several = ((pools.turn > 0) & (pools.turn < NO_TURN)) | (pools.key > 0)
        return np.unique(pools.connection[several]).tolist() if self.rows.program.rates.turn_bytes[0] else []

    def _delay(self, delays: F64, senders: list[int], communication: int, before: int) -> None:
        """Lengthen the way from some devices to where a communication arrives that starts so many ticks later."""
        segments = self.rows.arena.segments
        seconds = (before + int(segments.communication_ticks[communication])) * TICK
        at = np.ix_(senders, _list(segments, "receiver", communication))
        delays[at] = np.maximum(delays[at], seconds)

    def _steps(self, block: int) -> list[tuple[int, int]]:
        """Device and number of each step of a block."""
        segments = self.rows.arena.segments
        table = int(segments.device_steps[self.rows.segment[block]])
        ends = segments.step_first[table : table + self.count + 1].tolist()
        return [(d, step) for d in range(self.count) for step in range(ends[d], ends[d + 1])]

    # ---- weights, each by itself: in the rows, several go as one

    def gathered(self, operator: int, position: int) -> F64:
        """When a weight that an operator reads has arrived on each device at the earliest, s."""
        pools, state = self.rows.templates.pools, self.rows.state
        arrived = np.zeros(self.count)
        slot = int(self.rows.program.operand_first[operator]) + position
        template = int(state.forward[state.leader[slot]])
        for x in range(int(pools.reshard_first[template]), int(pools.reshard_last[template])):
            on = _list(pools, "receive", x)
            arrived[on] = np.maximum(arrived[on], int(pools.duration[x]) * TICK)
        return arrived

    def update(self, weight: int) -> F64:
        """Seconds of updating a weight, by device, at least."""
        pools, plan, seconds = self.rows.templates.pools, int(self.rows.state.plan[weight]), np.zeros(self.count)
        if pools.plan_sync[plan]:
            for k in range(int(pools.store_first[plan]), int(pools.store_last[plan])):
                per_byte, per_tensor = self.rates[int(pools.store_device[k])]
                seconds[int(pools.store_device[k])] += per_tensor + per_byte * int(pools.store_bytes[k])
            seconds = np.maximum(seconds - UPDATE_ROUNDING, 0.0)
        return seconds

    def launching_updates(self, weight: int) -> F64:
        """Seconds in which hosts launch the updates of a weight, by device."""
        pools, plan, count = self.rows.templates.pools, int(self.rows.state.plan[weight]), np.zeros(self.count)
        if pools.plan_sync[plan]:
            np.add.at(count, pools.store_device[int(pools.store_first[plan]) : int(pools.store_last[plan])], 1.0)
        return count * self.launch * self.updates

    def synchronised(self, weight: int) -> list[Sync]:
        """How a weight is synchronised."""
        pools, plan = self.rows.templates.pools, int(self.rows.state.plan[weight])
        sync = int(pools.plan_sync[plan])
        first, middle, last = (
            int(column[sync]) for column in (pools.reshard_first, pools.reshard_middle, pools.reshard_last)
        )
        if first == last:
            return []
        bucket, syncs = int(bucket_of(self.rows.table, pools.plan_sharding[plan], weight)), []
        for x in range(first, middle):
            links, send, receive = np.zeros(self.resources), _list(pools, "send", x), _list(pools, "receive", x)
            rows = slice(int(pools.link_first[x]), int(pools.link_last[x]))
            np.add.at(links, pools.link[rows], pools.link_least[rows] * TICK)
            follow = [y for y in range(middle, last) if set(_list(pools, "send", y)) & set(receive)]
            longest = max(follow, key=lambda y: int(pools.duration[y]), default=None)
            second = 0 if longest is None else mask(_list(pools, "receive", longest))
            seconds = 0.0 if longest is None else int(pools.duration[longest]) * TICK
            syncs.append(Sync(
                bucket, int(pools.key[x]), int(pools.duration[x]) * TICK, links, mask(send), mask(receive), seconds,
                second,
            ))  # fmt: skip
        return syncs

    def sent_after(self, bucket: int) -> int:
        """The operator after whose backward pass a bucket is sent."""
        table = self.rows.table
        before = table.kind[: int(table.started_by[bucket])]
        return int(table.argument[int(np.flatnonzero(before == BACKWARD)[-1])])


def mask(devices: Sequence[int]) -> int:
    """Bit d is device d."""
    return sum(1 << d for d in devices)


def _list(columns: Any, name: str, item: int, column: str | None = None) -> list[int]:
    """The list ``name`` of an item."""
    first, last = (int(getattr(columns, f"{name}_{end}")[item]) for end in ("first", "last"))
    values: list[int] = getattr(columns, column or name)[first:last].tolist()
    return values
