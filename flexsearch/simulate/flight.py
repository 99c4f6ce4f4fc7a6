"""Exchanges in flight, compiled: those that have been sent, as far as a pass has come, and have no time yet.

An exchange is ready when its senders have computed what comes before it. It is given its time as late as possible,
when a device waits for what it brings, and always the one that is ready first: so what comes later in the program and
is ready earlier mostly still comes in front of it, as in the event-driven simulation (``kernel.run``). Where it does
not, the pass is void (``work.broken``): every resource knows what it carried last.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flexsearch.compiled import F64, ONE, TWO, U32, ZERO, inlined, lean
from flexsearch.cost.collectives import price_collective
from flexsearch.cost.tally import drag_seconds, duration, link_seconds
from flexsearch.lower.arrays import RECORD, Pools, Program, Work

LOW = np.uint64(0xFFFFFFFF)
HALF = np.uint64(32)


@lean
def version_of(work: Work, row: Any) -> Any:
    """Which version of a row holds what has arrived: that of this pass if it came by, else that of the state."""
    return np.uint64(work.version[row] ^ work.fresh[row])


@lean
def new_row(work: Work, row: Any) -> None:
    """Nothing has arrived in a row yet."""
    work.fresh[row] = 1
    work.arrived[version_of(work, row), row, :] = 0.0


@lean
def base_of(program: Program, work: Work, row: Any) -> Any:
    """By how much later (s) things arrive than a row says."""
    return work.next_base[np.uint64(program.row_stride[row])]


@lean
def later(moment: float, base: float) -> Any:
    """A moment (s) that is ``base`` later than written down; 0, where nothing has happened, stays."""
    return moment + base if moment > 0.0 else 0.0


@lean
def record(work: Work, number: Any, begin: float, finish: float) -> None:
    """Note the times (s) of task ``number``."""
    at = np.uint64(number)
    if at < np.uint64(work.start.shape[0]):
        work.start[at] = begin
        work.end[at] = finish


@lean
def sent_at(pools: Pools, work: Work, x: Any) -> Any:
    """When the senders of exchange ``x`` have computed what they have been given so far (s)."""
    ready = 0.0
    for k in range(np.uint64(pools.send_first[x]), np.uint64(pools.send_last[x])):
        ready = max(ready, work.last[np.uint64(pools.send[k])])
    return ready


@inlined
def send(pools: Pools, work: Work, template: Any, row: Any) -> None:
    """Put all exchanges of a reshard into flight; they deliver to ``row``. Second phases wait for the first ones."""
    new_row(work, row)
    middle, last = np.uint64(pools.reshard_middle[template]), np.uint64(pools.reshard_last[template])
    first = np.uint64(pools.reshard_first[template])
    work.left[row] = last - first
    work.early[row] = middle - first if middle < last else ZERO
    for x in range(first, last):
        ready = sent_at(pools, work, x)
        if x < middle or work.early[row] == 0:
            push(work, ready, x, row)
        else:
            _park(work, ready, x, row)


@inlined
def push(work: Work, ready: float, what: Any, row: Any) -> None:
    """The next task is an exchange, or a group of them, that is ready to be given its time."""
    _insert(work, ready, work.moment[1], np.uint64(what) | np.uint64(row) << HALF)
    work.moment[1] += 1.0


@inlined
def _park(work: Work, ready: float, what: Any, row: Any) -> None:
    at = work.flying[1]
    if at == np.uint64(work.parked_ready.shape[0]):
        work.broken[0] = 1
        return
    work.parked_ready[at] = ready
    work.parked_number[at] = work.moment[1]
    work.parked_cargo[at] = np.uint64(what) | np.uint64(row) << HALF
    work.flying[1] = at + ONE
    work.moment[1] += 1.0


@inlined
def _insert(work: Work, ready: float, number: float, cargo: Any) -> None:
    """Into the heap, ordered by (ready, number)."""
    at = work.flying[0]
    if at == np.uint64(work.heap_ready.shape[0]):
        work.broken[0] = 1  # too many at once
        return
    work.flying[0] = at + ONE
    while at > ZERO:
        above = (at - ONE) >> ONE
        other = work.heap_ready[above]
        if other < ready or (other == ready and work.heap_number[above] < number):
            break
        work.heap_ready[at] = other
        work.heap_number[at] = work.heap_number[above]
        work.heap_cargo[at] = work.heap_cargo[above]
        at = above
    work.heap_ready[at] = ready
    work.heap_number[at] = number
    work.heap_cargo[at] = cargo


@inlined
def _remove(work: Work) -> None:
    """Take the first exchange out of the heap."""
    size = work.flying[0] - ONE
    work.flying[0] = size
    ready, number = work.heap_ready[size], work.heap_number[size]
    at = ZERO
    while True:
        below = at * TWO + ONE
        if below >= size:
            break
        if below + ONE < size:
            one, two = work.heap_ready[below], work.heap_ready[below + ONE]
            if two < one or (two == one and work.heap_number[below + ONE] < work.heap_number[below]):
                below += ONE
        other = work.heap_ready[below]
        if ready < other or (ready == other and number < work.heap_number[below]):
            break
        work.heap_ready[at] = other
        work.heap_number[at] = work.heap_number[below]
        work.heap_cargo[at] = work.heap_cargo[below]
        at = below
    work.heap_ready[at] = ready
    work.heap_number[at] = number
    work.heap_cargo[at] = work.heap_cargo[size]


@inlined
def take(program: Program, pools: Pools, state_plan: Any, work: Work, mode: Any) -> None:
    """Give the exchange, or the group of them, that is ready first its time, and deliver what it brings.
    ``state_plan``: the plan of each weight."""
    ready, number, cargo = work.heap_ready[0], work.heap_number[0], work.heap_cargo[0]
    _remove(work)
    what, row = cargo & LOW, cargo >> HALF
    rows, buckets = np.uint64(work.left.shape[0]), np.uint64(program.bucket_first.shape[0])
    several = False
    x, v = what, version_of(work, row) if row < rows + buckets else ZERO
    if rows <= row < rows + buckets:
        several = work.group_size[v, what] > 1
        x = np.uint64(work.member_exchange[v, np.uint64(work.group_head[v, what])])
    if several:
        begin, finish = _together(program, pools, work, v, what, ready, number)
    else:
        begin, finish = _exchange(pools, work, x, ready, number)
    work.moment[0] = max(work.moment[0], finish)
    if mode == RECORD:
        record(work, number, begin, finish)
    if row < rows:
        arrived, base = work.arrived[v, row], base_of(program, work, row)
        _deliver(pools, what, arrived, finish - base)
        work.moment[2] = max(work.moment[2], finish)
        work.left[row] -= np.uint32(1)
        if work.early[row] > 0:
            work.early[row] -= np.uint32(1)
            if work.early[row] == 0:
                _release(pools, work, row, arrived, base)
    elif row < rows + buckets:
        _deliver_group(program, pools, state_plan, work, v, what, finish)
    else:  # the second phase of a weight's synchronisation
        _deliver(pools, what, work.synced, finish)


@inlined
def _release(pools: Pools, work: Work, row: Any, arrived: F64, base: float) -> None:
    """The first phase of a reshard has ended: its second phases can go."""
    kept = ZERO
    for k in range(np.uint64(work.flying[1])):
        cargo, ready = work.parked_cargo[k], work.parked_ready[k]
        if cargo >> HALF == row:
            x = cargo & LOW
            for j in range(np.uint64(pools.send_first[x]), np.uint64(pools.send_last[x])):
                ready = max(ready, later(arrived[np.uint64(pools.send[j])], base))
            _insert(work, ready, work.parked_number[k], cargo)
        else:
            work.parked_ready[kept] = ready
            work.parked_number[kept] = work.parked_number[k]
            work.parked_cargo[kept] = cargo
            kept += ONE
    work.flying[1] = kept


@inlined
def _carries(work: Work, r: Any, ready: float, number: float) -> None:
    """Resource ``r`` carries an exchange; void if it has carried one that came later."""
    if ready < work.seen[r] or (ready == work.seen[r] and number < work.order[r]):
        work.broken[0] = 1
    work.seen[r] = ready
    work.order[r] = number


@inlined
def _exchange(pools: Pools, work: Work, x: Any, ready: float, number: float) -> Any:
    """The start and the end (s) of one communication task."""
    begin = ready
    for k in range(np.uint64(pools.link_first[x]), np.uint64(pools.link_last[x])):
        r = np.uint64(pools.link[k])
        begin = max(begin, work.free[r])
        _carries(work, r, ready, number)
    for k in range(np.uint64(pools.link_first[x]), np.uint64(pools.link_last[x])):
        work.free[np.uint64(pools.link[k])] = begin + pools.link_s[k]
    for k in range(np.uint64(pools.drag_first[x]), np.uint64(pools.drag_last[x])):
        _drag(work, np.uint64(pools.drag[k]), ready, number, pools.drag_s[k])
    return begin, begin + pools.duration[x]


@inlined
def _drag(work: Work, r: Any, ready: float, number: float, seconds: float) -> None:
    _carries(work, r, ready, number)
    work.free[r] = max(work.free[r], ready) + seconds


@inlined
def _deliver(pools: Pools, x: Any, arrived: F64, finish: float) -> None:
    """Note on the receivers of exchange ``x`` when it ended."""
    for k in range(np.uint64(pools.receive_first[x]), np.uint64(pools.receive_last[x])):
        d = np.uint64(pools.receive[k])
        arrived[d] = max(arrived[d], finish)


@inlined
def _together(program: Program, pools: Pools, work: Work, v: Any, g: Any, ready: float, number: float) -> Any:
    """The start and the end (s) of exchanges of a bucket that are one task."""
    touched, seconds = merge(program, pools, work, v, g)
    begin = ready
    for j in range(ZERO, touched):
        r = np.uint64(work.touched[j])
        begin = max(begin, work.free[r])
        _carries(work, r, ready, number)
    for j in range(ZERO, touched):
        r = np.uint64(work.touched[j])
        work.free[r] = begin + work.load[r]
        work.load[r] = 0.0
    for j in range(ZERO, merge_drags(program, pools, work, v, g)):
        r = np.uint64(work.touched[j])
        _drag(work, r, ready, number, work.load[r])
        work.load[r] = 0.0
    return begin, begin + seconds


@inlined
def _deliver_group(
    program: Program, pools: Pools, state_plan: Any, work: Work, v: Any, g: Any, finish: float
) -> None:  # fmt: skip
    """Note on the receivers of a bucket's exchanges when they ended."""
    m, slots = np.uint64(work.group_head[v, g]), np.uint64(program.flows.shape[0])
    ring = pools.key_group[np.uint64(work.group_key[v, g])] == 1
    for i in range(np.uint64(work.group_size[v, g])):
        x, w = np.uint64(work.member_exchange[v, m]), np.uint64(work.member_weight[v, m])
        if i == ZERO or not ring:  # collectives of one group are among the same devices
            _deliver(pools, x, work.synced, finish)
        t = np.uint64(pools.plan_sync[np.uint64(state_plan[w])])
        if pools.reshard_middle[t] < pools.reshard_last[t]:
            to = TWO * slots + w
            _deliver(pools, x, work.arrived[version_of(work, to), to], finish - base_of(program, work, to))
        m = np.uint64(work.member_next[v, m])


@lean
def _add_up(pools: Pools, work: Work, v: Any, g: Any, first: U32, last: U32, resource: U32, load: F64) -> Any:
    """What a group's messages bring onto resources: rows ``[first[x], last[x])`` of two columns of exchange x. Fills
    ``work.load`` and lists the resources in ``work.touched``; returns how many there are."""
    m, touched = np.uint64(work.group_head[v, g]), ZERO
    for _ in range(np.uint64(work.group_size[v, g])):
        x = np.uint64(work.member_exchange[v, m])
        for k in range(np.uint64(first[x]), np.uint64(last[x])):
            r = np.uint64(resource[k])
            if work.load[r] == 0.0:
                work.touched[touched] = r
                touched += ONE
            work.load[r] += load[k]
        m = np.uint64(work.member_next[v, m])
    return touched


@lean
def _list(work: Work, resource: U32, seconds: F64, count: Any) -> Any:
    """List rows that were priced in ``work.touched`` and ``work.load``; returns how many there are."""
    for k in range(count):
        work.touched[k] = resource[k]
        work.load[np.uint64(resource[k])] = seconds[k]
    return count


@lean
def merge(program: Program, pools: Pools, work: Work, v: Any, g: Any) -> Any:
    """Resources that the task is on which several exchanges of a bucket are together, and its duration (s): messages
    add up on every link, collectives become one of all bytes. ``work.touched`` lists them, ``work.load`` has the
    seconds of each, to be set to 0."""
    key, start, busiest, total = np.uint64(work.group_key[v, g]), 0.0, 0.0, np.int64(0)
    form, m = np.uint64(pools.key_form[key]), np.uint64(work.group_head[v, g])
    one = np.uint64(work.member_exchange[v, m])
    for _ in range(np.uint64(work.group_size[v, g])):
        x = np.uint64(work.member_exchange[v, m])
        start, total = max(start, pools.start[x]), total + np.int64(pools.amount[x])
        m = np.uint64(work.member_next[v, m])
    if pools.key_group[key] == 1:
        work.loads.size[:] = ZERO
        seconds = price_collective(
            program.routes, program.rates, work.tally, work.loads, form, pools.send, np.uint64(pools.send_first[one]),
            np.uint64(pools.send_last[one]), total,
        )  # fmt: skip
        return _list(work, work.loads.link, work.loads.link_s, work.loads.size[0]), seconds
    touched = _add_up(pools, work, v, g, pools.link_first, pools.link_last, pools.link, pools.link_load)
    for j in range(touched):
        r = np.uint64(work.touched[j])
        work.load[r] = link_seconds(program.rates.factor[form], work.load[r], program.bandwidth[r])
        busiest = max(busiest, work.load[r])
    return touched, duration(start, busiest)


@lean
def merge_drags(program: Program, pools: Pools, work: Work, v: Any, g: Any) -> Any:
    """As ``merge``, which came before: processors from which moving the bytes takes time, and how much (s)."""
    if program.scalars[1] == 0.0:
        return ZERO
    if pools.key_group[np.uint64(work.group_key[v, g])] == 1:
        return _list(work, work.loads.drag, work.loads.drag_s, work.loads.size[1])
    touched = _add_up(pools, work, v, g, pools.drag_first, pools.drag_last, pools.drag, pools.drag_load)
    for j in range(touched):
        r = np.uint64(work.touched[j])
        work.load[r] = drag_seconds(program.scalars[1], work.load[r])
    return touched
