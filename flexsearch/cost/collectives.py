"""Time of a collective among a group of devices: the best of the algorithms that the library has for it.

gloo: one ring. NCCL, by what its documentation and ``src/graph`` describe; S is what each device holds in the end (of
an all-reduce: from the start), n the number of devices on H hosts, p the passes over the data (2 for an all-reduce):

- **ring over rails**: as many rings as devices on the host that has fewest, each of which enters and leaves a host by
  other devices, and so through other NICs. Each edge of the rings together carries p (n-1)/n S; the data goes around
  in p (n-1) steps, p (H-1) of them between hosts.
- **hierarchical** (Horovod's, Megatron's): reduce-scatter within each host, all-reduces between the hosts, one on each
  rail, all-gather within; the phases follow each other. p (m-1)/m S on the edges inside a host of m devices, and
  p (H-1)/H S/m on each rail, in p (m-1) + p (H-1) steps.
- **tree** (all-reduce only): chains inside hosts, a double binary tree between them. A host within the tree sends its
  sum up and totals down to its children: 2 S, over all rails. 2 ((m-1) + log2 H) steps.

Inside a host whose devices direct links join, the bytes of a ring are shared out among as many rings as its links carry
(``topology.rings``); where the hosts of a group differ, as many as on the host that has fewest.

A group within one host goes by its measured start and bus bandwidth (``Communication.groups``), which are those of the
algorithm that NCCL picks, or by those of the two protocols that it changes between. Between hosts a step inside costs
what the measured starts say, one across the route's latency more; ``factors`` holds for all links.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flexsearch.compiled import ONE, TWO, U32, ZERO, lean
from flexsearch.cost.tally import WAYS, WORD, Loads, Rates, Tally, carry, clear, link_seconds, settle, sort
from flexsearch.topology.routes import RouteTable, lanes_between, rings_among

# Constants that are handed on have a numpy type: for every plain number numba would compile a function again.
ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, EXCHANGE = (np.uint64(k) for k in range(5))
"""Numbers of forms in ``topology.parts.FORMS``."""
RINGS, INSIDE, BETWEEN, BOTH, TREE = (np.uint64(k) for k in range(5))
"""What is known of a group: rings, the phases of the hierarchical algorithm, both together, the tree."""
MOST_LISTS: Any = np.uint64(2 * WAYS)
MIX: Any = np.uint64(0x9E3779B97F4A7C15)
HALF: Any = np.uint64(32)
LOW: Any = np.uint64(0xFFFFFFFF)


@lean
def ring_edge(count: Any, nbytes: Any) -> Any:
    """Bytes that every edge of a ring all-reduce carries where each device has ``nbytes``: 2 (n-1)/n of them, rounded
    down, as 2 ``nbytes`` less their n-th part, rounded up, which does not overflow."""
    twice = np.int64(2) * np.int64(nbytes)
    return twice - (twice + np.int64(count) - np.int64(1)) // np.int64(count)


@lean
def _sizes(form: Any, count: Any, nbytes: Any, rings: Any) -> Any:
    """Of a collective among ``count`` members: passes, bytes that each edge of one of ``rings`` carries, and the share
    of a ring of those that the members have or get."""
    shares = np.int64(rings)
    if form == ALL_REDUCE:
        return np.int64(2), ring_edge(count, nbytes) // shares, np.int64(nbytes) // shares
    members = np.int64(count)
    return np.int64(1), np.int64(nbytes) // members // shares, np.int64(nbytes) // (members - np.int64(1)) // shares


@lean
def price_collective(
    routes: RouteTable, rates: Rates, tally: Tally, loads: Loads, form: Any, devices: U32, first: Any, last: Any,
    nbytes: Any,
) -> Any:  # fmt: skip
    """Seconds of a collective among ``devices[first:last]`` (ascending, at least two). ``nbytes``: of an all-reduce
    those that each device holds; of an all-gather or reduce-scatter those that are to cross devices, all together.
    Adds rows to ``loads``; leaves ``tally.unit``."""
    count = last - first
    slot = _slot_of(routes, rates, tally, rates.by_group[form], devices, first, count)
    passes, edge, size = _sizes(form, count, nbytes, tally.groups.rings[slot])
    steps = np.float64(passes * (np.int64(count) - np.int64(1)))
    if tally.groups.hosts[slot] > np.uint32(1):
        return _across(rates, tally, loads, form, slot, count, passes, steps, edge, size)
    factor, start = rates.factor[form], rates.overhead_s[0] + steps * tally.groups.latency[slot]
    if form == ALL_REDUCE:  # of many tensors or one, ranks copy them first
        start += rates.pack_s_per_byte[0] * np.float64(nbytes)
    if rates.by_group[form] == 1 and rates.group_factor[count] > 0.0:
        factor, start = rates.group_factor[count], rates.launch_s[0] + steps * rates.step_s[count]
        if rates.protocol_factor[count, ZERO] > 0.0:
            moving = _busiest(rates, tally, slot, RINGS, 1.0, edge)
            factor, start = _faster(rates, count, moving, np.float64(passes) / 2.0)
    _restore(tally, slot, RINGS)
    return settle(rates, tally, loads, form, factor, edge, start)


@lean
def _faster(rates: Rates, count: Any, moving: Any, share: Any) -> Any:
    """Factor and start (s) of the faster protocol. ``moving``: time over a factor, s; ``share``: of the steps of an
    all-reduce."""
    launch, factors = rates.launch_s[0], rates.protocol_factor
    one = launch + (rates.protocol_s[count, ZERO] - launch) * share
    other = launch + (rates.protocol_s[count, ONE] - launch) * share
    k = ZERO if one + factors[count, ZERO] * moving <= other + factors[count, ONE] * moving else ONE
    least = launch + (rates.least_s[count] - launch) * share
    return factors[count, k], max(one if k == ZERO else other, least - factors[count, k] * moving)


@lean
def _across(
    rates: Rates, tally: Tally, loads: Loads, form: Any, slot: Any, count: Any, passes: Any, steps: Any, edge: Any,
    size: Any,
) -> Any:  # fmt: skip
    """As ``price_collective``, among the ``count`` members of a group in ``tally.groups`` that are on several hosts."""
    groups = tally.groups
    hosts, fewest, most = np.uint64(groups.hosts[slot]), np.uint64(groups.fewest[slot]), np.uint64(groups.most[slot])
    rails, factor, launch = np.int64(fewest), rates.factor[form], rates.launch_s[0]
    members, others = rates.step_s[most], np.float64(np.int64(hosts) - np.int64(1))
    step, far = rates.step_s[count], groups.latency[slot]  # far: between hosts
    hop, extra = (step, far) if step > 0.0 else (far, 0.0)  # of what is not measured, every step takes it
    near = members if members > 0.0 else far
    start, unit, best = launch + steps * hop + np.float64(passes) * others * extra, edge // rails, RINGS
    least = start + _busiest(rates, tally, slot, RINGS, factor, unit)
    if fewest == most and most > ONE:
        across = launch * np.float64(passes + np.int64(1)) + np.float64(passes) * others * (hop + extra)
        part = passes * size // (rails * np.int64(hosts))
        across += np.float64(passes * (rails - np.int64(1))) * near
        seconds = _busiest(rates, tally, slot, INSIDE, factor, part)
        seconds += _busiest(rates, tally, slot, BETWEEN, factor, part)
        if across + seconds < least:
            # ``settle`` adds the busiest link of both phases together; the rest of the other one is part of the start.
            together = _busiest(rates, tally, slot, BOTH, factor, part)
            least, start, unit, best = across + seconds, across + seconds - together, part, BOTH
    if form == ALL_REDUCE:
        levels = 0.0
        while 2.0**levels < np.float64(hosts):
            levels += 1.0
        climb = launch + 2.0 * ((np.float64(most) - 1.0) * near + levels * (hop + extra))
        seconds = climb + _busiest(rates, tally, slot, TREE, factor, size // rails)
        if seconds < least:
            start, unit, best = climb, size // rails, TREE
    _restore(tally, slot, best)
    return settle(rates, tally, loads, form, factor, unit, start)


@lean
def note_least(
    routes: RouteTable, rates: Rates, tally: Tally, loads: Loads, begin: Any, end: Any, form: Any, devices: U32,
    first: Any, last: Any, nbytes: Any,
) -> None:  # fmt: skip
    """Lower ``least_s`` of rows ``begin`` to ``end`` of ``loads``, which ``price_collective`` made of these arguments:
    seconds that a collective with these and other bytes keeps the link busy at least on their behalf. Which algorithm
    and protocol it uses depends on all its bytes, so it is the least of all."""
    count = last - first
    slot, groups = _slot_of(routes, rates, tally, rates.by_group[form], devices, first, count), tally.groups
    passes, edge, size = _sizes(form, count, nbytes, groups.rings[slot])
    hosts, rails, factor = np.uint64(groups.hosts[slot]), np.int64(groups.fewest[slot]), rates.factor[form]
    if hosts == ONE:
        if rates.by_group[form] == 1 and rates.group_factor[count] > 0.0:
            factor = rates.group_factor[count]
            if rates.protocol_factor[count, ZERO] > 0.0:
                factor = min(rates.protocol_factor[count, ZERO], rates.protocol_factor[count, ONE])
        _lower(rates, tally, loads, begin, end, slot, RINGS, factor, edge)
        return
    _lower(rates, tally, loads, begin, end, slot, RINGS, factor, edge // rails)
    if groups.fewest[slot] == groups.most[slot] and rails > 1:
        part = passes * size // (rails * np.int64(hosts))
        _lower(rates, tally, loads, begin, end, slot, BOTH, factor, part)
    if form == ALL_REDUCE:
        _lower(rates, tally, loads, begin, end, slot, TREE, factor, size // rails)


@lean
def _lower(
    rates: Rates, tally: Tally, loads: Loads, begin: Any, end: Any, slot: Any, way: Any, factor: Any, unit: Any
) -> None:
    """Lower ``least_s`` to what an algorithm of a group brings onto each link."""
    _restore(tally, slot, way)
    for k in range(begin, end):
        r = np.uint64(loads.link[k])
        seconds = link_seconds(factor, np.float64(tally.load[r]) * np.float64(unit), rates.bandwidth[r])
        loads.least_s[k] = min(loads.least_s[k], seconds)
    clear(tally)


# ---- groups: what their algorithms bring onto links, worked out once


@lean
def _slot_of(
    routes: RouteTable, rates: Rates, tally: Tally, by_group: Any, devices: U32, first: Any, count: Any
) -> Any:  # fmt: skip
    """Slot in ``tally.groups`` of the group of ``devices[first:first + count]``, which is filled if it was not.
    ``by_group``: 0 for one ring, whatever hosts there are."""
    groups, key = tally.groups, tally.groups.key
    width = np.uint64(key.shape[0])
    for w in range(width):
        key[w] = ZERO
    key[0] = np.uint64(by_group) + ONE  # no empty slot has it
    for k in range(first, first + count):
        device = np.uint64(devices[k])
        key[ONE + device // WORD] |= ONE << (device % WORD)
    code = ZERO
    for w in range(width):
        code = (code ^ key[w]) * MIX
        code ^= code >> HALF
    slot, filled = code % np.uint64(groups.hosts.shape[0]), True
    for w in range(width):
        filled = filled and groups.member[slot * width + np.uint64(w)] == key[w]
    if not filled:
        room = np.uint64(groups.resource.shape[0]) - groups.size[0]
        if room < MOST_LISTS * np.uint64(tally.load.shape[0]):
            groups.size[0] = ZERO
            groups.member[:] = 0
        for w in range(width):
            groups.member[slot * width + np.uint64(w)] = key[w]
        _fill(routes, rates, tally, slot, by_group, devices, first, count)
    return slot


@lean
def _fill(
    routes: RouteTable, rates: Rates, tally: Tally, slot: Any, by_group: Any, devices: U32, first: Any, count: Any
) -> None:
    """Work out what the algorithms of a group bring onto links and processors."""
    groups = tally.groups
    hosts = _by_host(rates, tally, devices, first, count)
    if by_group == 0:
        hosts, tally.begin[1] = ONE, count
    fewest, most = count, ZERO
    for h in range(hosts):
        members = np.uint64(tally.begin[np.uint64(h) + ONE]) - np.uint64(tally.begin[h])
        fewest, most = min(fewest, members), max(most, members)
    groups.hosts[slot], groups.fewest[slot], groups.most[slot] = hosts, fewest, most
    groups.rings[slot] = _direct_rings(routes, tally, hosts) if by_group == 1 else ONE
    rings = np.uint64(groups.rings[slot])
    _rings(routes, rates, tally, hosts, fewest if hosts > ONE else ONE, rings)
    groups.latency[slot] = tally.latency[0]
    _note(tally, slot, RINGS)
    if hosts == ONE:
        return
    if fewest == most and most > ONE:
        _phase_inside(routes, rates, tally, hosts, rings)
        _note(tally, slot, INSIDE)
        _phase_between(routes, rates, tally, hosts, rings)
        _note(tally, slot, BETWEEN)
        _phase_inside(routes, rates, tally, hosts, rings)
        _phase_between(routes, rates, tally, hosts, rings)
        _note(tally, slot, BOTH)
    _tree(routes, rates, tally, hosts, fewest, rings)
    _note(tally, slot, TREE)


@lean
def _note(tally: Tally, slot: Any, way: Any) -> None:
    """Move what was added to the tally to the rows of a group's algorithm."""
    groups, at = tally.groups, tally.groups.size[0]
    row = slot * WAYS + way
    groups.first[row] = at
    for k in range(tally.listed[0]):
        r = np.uint64(tally.touched[k])
        groups.resource[at], groups.amount[at] = r, tally.load[r]
        at += ONE
    groups.middle[row] = at
    for k in range(tally.listed[1]):
        p = np.uint64(tally.dragged[k])
        groups.resource[at], groups.amount[at] = p, tally.moved[p]
        at += ONE
    groups.last[row] = groups.size[0] = at
    clear(tally)


@lean
def _busiest(rates: Rates, tally: Tally, slot: Any, way: Any, factor: Any, unit: Any) -> Any:
    """Seconds of the busiest link under a group's algorithm, if an amount of 1 is ``unit`` bytes."""
    groups, row, most = tally.groups, slot * WAYS + way, 0.0
    for k in range(np.uint64(groups.first[row]), np.uint64(groups.middle[row])):
        nbytes = np.float64(groups.amount[k]) * np.float64(unit)
        most = max(most, link_seconds(factor, nbytes, rates.bandwidth[np.uint64(groups.resource[k])]))
    return most


@lean
def _restore(tally: Tally, slot: Any, way: Any) -> None:
    """Fill the tally, which is empty, with what a group's algorithm brings onto links and processors."""
    groups, row = tally.groups, slot * WAYS + way
    first, middle, last = np.uint64(groups.first[row]), np.uint64(groups.middle[row]), np.uint64(groups.last[row])
    for k in range(first, middle):
        r = groups.resource[k]
        tally.touched[np.uint64(k) - first], tally.load[np.uint64(r)] = r, groups.amount[k]
    for k in range(middle, last):
        p = groups.resource[k]
        tally.dragged[np.uint64(k) - middle], tally.moved[np.uint64(p)] = p, groups.amount[k]
    tally.listed[0], tally.listed[1] = middle - first, last - middle


@lean
def _by_host(rates: Rates, tally: Tally, devices: U32, first: Any, count: Any) -> Any:
    """List the members host by host in ``tally.order``; returns the number of hosts."""
    for k in range(count):
        device = np.uint64(devices[first + np.uint64(k)])
        tally.order[k] = np.uint64(rates.host[device]) << HALF | device
    sort(tally.order, count)
    hosts, before = ZERO, LOW
    for k in range(count):
        host = tally.order[k] >> HALF
        if k == 0 or host != before:
            tally.begin[hosts] = k
            hosts, before = hosts + ONE, host
        tally.order[k] &= LOW
    tally.begin[hosts] = count
    return hosts


@lean
def _direct_rings(routes: RouteTable, tally: Tally, hosts: Any) -> Any:
    """The fewest rings over direct links among the members on one of the hosts; 1 if somewhere there is none, and where
    each host has one member."""
    fewest = LOW
    for h in range(hosts):
        begin, end = np.uint64(tally.begin[h]), np.uint64(tally.begin[np.uint64(h) + ONE])
        if end - begin > ONE:
            fewest = min(fewest, max(rings_among(routes, tally.order, begin, end), ONE))
    return fewest if fewest < LOW else ONE


@lean
def _around(
    routes: RouteTable, rates: Rates, tally: Tally, h: Any, rings: Any, uses: Any, rails: Any, back: Any
) -> None:
    """What goes around host h, where a ring brings ``uses`` onto each of its edges, but 1 less on those that lead to
    the first ``rails`` members. Of several ``rings`` over direct links the mean of that, rounded up, onto each of their
    lanes. ``back``: as much goes the other way round."""
    begin = np.uint64(tally.begin[h])
    members = np.uint64(tally.begin[np.uint64(h) + ONE]) - begin
    if members == ONE:
        return
    if rings > ONE:
        mean = (uses - np.int64(rails) // np.int64(members)) * np.int64(2 if back else 1)
        share = np.int64(rings) if members == TWO else (np.int64(rings) + np.int64(1)) // np.int64(2)
        for p in range(members):
            for q in range(members):
                one, other = tally.order[begin + np.uint64(p)], tally.order[begin + np.uint64(q)]
                lanes = min(lanes_between(routes, one, other), share)
                if lanes > 0:
                    carry(routes, rates, tally, one, other, mean * lanes)
        return
    for q in range(members):
        following = (np.uint64(q) + ONE) % members
        amount = uses - np.int64(1 if following < rails else 0)
        one, other = tally.order[begin + np.uint64(q)], tally.order[begin + following]
        if amount > 0:
            carry(routes, rates, tally, one, other, amount)
            if back:
                carry(routes, rates, tally, other, one, amount)


@lean
def _rings(routes: RouteTable, rates: Rates, tally: Tally, hosts: Any, rails: Any, rings: Any) -> None:
    """Rings over all members: ring r enters a host at its member r and leaves it at the one before. An amount of 1 is
    what one of ``rings`` carries over an edge."""
    for h in range(hosts):  # not over the edge before which a ring leaves
        _around(routes, rates, tally, h, rings, np.int64(rails), rails if hosts > ONE else ZERO, False)
    if hosts > ONE:
        _rails(routes, rates, tally, hosts, rails, np.int64(rings))


@lean
def _rails(routes: RouteTable, rates: Rates, tally: Tally, hosts: Any, rails: Any, amount: Any) -> None:
    """An amount from each host to the next on each rail."""
    for h in range(hosts):
        begin, following = np.uint64(tally.begin[h]), (np.uint64(h) + ONE) % hosts
        members = np.uint64(tally.begin[np.uint64(h) + ONE]) - begin
        for r in range(rails):
            leaves = tally.order[begin + (np.uint64(r) + members - ONE) % members]
            carry(routes, rates, tally, leaves, tally.order[np.uint64(tally.begin[following]) + np.uint64(r)], amount)


@lean
def _phase_inside(routes: RouteTable, rates: Rates, tally: Tally, hosts: Any, rings: Any) -> None:
    """A ring in each host of m members: m - 1 parts of a rail, H of which make a member's share, on each edge."""
    members = np.int64(tally.begin[1])
    for h in range(hosts):
        _around(routes, rates, tally, h, rings, (members - np.int64(1)) * np.int64(hosts), ZERO, False)


@lean
def _phase_between(routes: RouteTable, rates: Rates, tally: Tally, hosts: Any, rings: Any) -> None:
    """A ring over the hosts for each rail, which keeps to the members of one place: H - 1 parts on each edge."""
    members, amount = np.uint64(tally.begin[1]), (np.int64(hosts) - np.int64(1)) * np.int64(rings)
    for h in range(hosts):
        begin, following = np.uint64(tally.begin[h]), np.uint64(tally.begin[(np.uint64(h) + ONE) % hosts])
        for q in range(members):
            one, other = tally.order[begin + np.uint64(q)], tally.order[following + np.uint64(q)]
            carry(routes, rates, tally, one, other, amount)


@lean
def _tree(routes: RouteTable, rates: Rates, tally: Tally, hosts: Any, rails: Any, rings: Any) -> None:
    """Chains inside the hosts, sums one way and totals the other; between hosts what a host within a tree sends."""
    for h in range(hosts):
        _around(routes, rates, tally, h, rings, np.int64(rails), rails, True)
    _rails(routes, rates, tally, hosts, rails, np.int64(2) * np.int64(rings))
