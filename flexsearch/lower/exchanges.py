"""The exchanges of a planned reshard as rows of the pools, compiled: a search asks for thousands of reshards."""

from __future__ import annotations

from typing import Any

import numpy as np

from flexsearch.compiled import F64, ONE, TWO, U8, U32, U64, ZERO, lean
from flexsearch.cost.collectives import ALL_REDUCE, note_least
from flexsearch.cost.tally import Rates, turn_of
from flexsearch.cost.ticks import ticks_of
from flexsearch.direct import direct
from flexsearch.lower.arrays import Pools
from flexsearch.lower.orbits import (
    RECEIVES,
    SENDS,
    BlockMap,
    add_places,
    at_once,
    crosses_blocks,
    mixed,
    number_of,
    orbit_of,
)
from flexsearch.lower.reshard import Reshard
from flexsearch.lower.workspace import (
    DRAG,
    FIRST,
    LAST,
    LINK,
    MIDDLE,
    RECEIVE,
    SEND,
    Exchanges,
    Workspace,
    begin_of,
)
from flexsearch.topology.routes import RouteTable


@lean
def append(
    workspace: Workspace, routes: RouteTable, rates: Rates, bandwidth: F64, decisive: U8, blocks: BlockMap,
    pools: Pools, size: U64,
) -> Any:  # fmt: skip
    """Add the exchanges in the workspace to the pools. Links that no transfer can wait for (``Topology.decisive``) are
    left out, and so are exchanges that another one of their orbit stands for. ``bandwidth``: of the links in the pools.
    ``size``: (6,) sends, receives, links, drags and exchanges there so far, which grow, and how many of these there
    were before the second phase. False, and nothing added, if there is no room."""
    rows = workspace.exchanges
    first, last, end = workspace.result[FIRST], workspace.result[LAST], workspace.exchanges.end
    for k in range(np.uint64(DRAG) + ONE):
        most = np.uint64(end[k, last - ONE]) - begin_of(end, k, first) if last > first else ZERO
        if size[k] + (TWO * most if k in (SEND, RECEIVE) else most) > _room(pools, k):
            return False
    if size[4] + last - first > np.uint64(pools.duration.shape[0]):
        return False
    folded = _is_folded(blocks, rows, first, last)
    for phase in range(2):
        if phase == 1:
            size[5] = size[4]
        begin, stop = (workspace.result[MIDDLE], last) if phase == 1 else (first, workspace.result[MIDDLE])
        for x in range(begin, stop):
            if not folded or _stands_for_itself(workspace, blocks, begin, x):
                count = workspace.orbits.missing[x] if folded else ONE
                own = folded and count == ONE
                _append_one(rows, routes, rates, bandwidth, decisive, blocks, own, count, pools, size, x)
        if folded:
            _check_orbits(workspace, blocks, begin, stop)
    return True


Standing = tuple[tuple[tuple[int, int], ...], ...]
"""By phase of a reshard: the exchanges (by number in it) that stand for their orbits, and how many these have."""


def standing(reshard: Reshard, blocks: BlockMap) -> Standing:
    """Which exchanges of a reshard ``append`` adds to the pools."""
    phases = reshard.phase_exchanges
    if blocks.replicas[0] == ONE:
        return tuple(tuple((x, 1) for x in range(len(exchanges))) for exchanges in phases)
    workspace = reshard.planned()
    first, last, middle = (np.uint64(workspace.result[k]) for k in (FIRST, LAST, MIDDLE))
    folded = bool(_folded(blocks, workspace.exchanges, first, last))
    by_phase = []
    for begin, end in ((first, last),) if len(phases) == 1 else ((first, middle), (middle, last)):
        own: list[tuple[int, int]] = []
        for x in range(int(begin), int(end)):
            if not folded:  # it stays inside of the first block, and every block does the same
                own.append((x - int(begin), int(blocks.replicas[0])))
            elif _stands(workspace, blocks, begin, np.uint64(x)):
                own.append((x - int(begin), int(workspace.orbits.missing[x])))
        by_phase.append(tuple(own))
    return tuple(by_phase)


@lean
def _is_folded(blocks: BlockMap, rows: Exchanges, first: Any, last: Any) -> Any:
    """Whether exchanges ``first`` to ``last`` go beyond the first block."""
    if blocks.replicas[0] == ONE or first == last:
        return False
    send, receive = np.uint64(rows.end[SEND, last - ONE]), np.uint64(rows.end[RECEIVE, last - ONE])
    beyond = crosses_blocks(blocks, rows.send, begin_of(rows.end, SEND, first), send)
    return beyond or crosses_blocks(blocks, rows.receive, begin_of(rows.end, RECEIVE, first), receive)


@lean
def _stands_for_itself(workspace: Workspace, blocks: BlockMap, first: Any, x: Any) -> Any:
    """Whether exchange ``x`` is the first of its orbit among those of its phase, from ``first`` on, which is noted. Of
    exchanges among the same devices, the n-th belongs to the n-th orbit. Where it moves other amounts than the first,
    blocks are not treated alike."""
    rows, orbits = workspace.exchanges, workspace.orbits
    orbits.own[x], orbits.digest[x], count = orbit_of(
        blocks, rows.send, begin_of(rows.end, SEND, x), np.uint64(rows.end[SEND, x]), rows.receive,
        begin_of(rows.end, RECEIVE, x), np.uint64(rows.end[RECEIVE, x]),
    )  # fmt: skip
    orbits.missing[x], orbits.crosses[x], before = ZERO, ZERO, ZERO
    for y in range(first, x):
        if orbits.own[y] == orbits.own[x]:
            before += ONE
    for y in range(first, x):
        if orbits.digest[y] == orbits.digest[x] and orbits.missing[y] > ZERO:
            if before == ZERO:
                orbits.missing[y] -= ONE
                if rows.form[y] != rows.form[x] or rows.nbytes[y] != rows.nbytes[x]:
                    blocks.lopsided[0] += ONE
                return False
            before -= ONE
    orbits.missing[x] = count
    # Messages from block to block take turns on links, in an order that no renaming of blocks keeps.
    within = count == ONE or _is_in_one_block(blocks, rows, x)
    orbits.crosses[x] = ZERO if within else ONE
    return True


_folded = direct(_is_folded)
_stands = direct(_stands_for_itself)


@lean
def _is_in_one_block(blocks: BlockMap, rows: Exchanges, x: Any) -> Any:
    """Whether all devices of exchange ``x`` are in the same block."""
    first = np.uint64(rows.send[begin_of(rows.end, SEND, x)]) // blocks.devices[0]
    for k in range(begin_of(rows.end, SEND, x), np.uint64(rows.end[SEND, x])):
        if np.uint64(rows.send[k]) // blocks.devices[0] != first:
            return False
    for k in range(begin_of(rows.end, RECEIVE, x), np.uint64(rows.end[RECEIVE, x])):
        if np.uint64(rows.receive[k]) // blocks.devices[0] != first:
            return False
    return True


@lean
def _check_orbits(workspace: Workspace, blocks: BlockMap, first: Any, last: Any) -> None:
    """Note if an orbit of the exchanges ``first`` to ``last`` lacks some: blocks are not treated alike then."""
    for x in range(first, last):
        if workspace.orbits.missing[x] > ONE or workspace.orbits.crosses[x] == ONE:
            blocks.lopsided[0] += ONE
            return


@lean
def _append_one(
    rows: Exchanges, routes: RouteTable, rates: Rates, bandwidth: F64, decisive: U8, blocks: BlockMap, own: Any,
    count: Any, pools: Pools, size: U64, x: Any,
) -> None:  # fmt: skip
    """Add exchange ``x``. ``own``: it is its own image, so that what stands for several links has the same on each;
    else these have it from several exchanges: ``count`` in all."""
    loads, end, at = rows.loads, rows.end, size[4]
    size[4] += ONE
    pools.start[at], pools.amount[at] = rows.start[x], rows.amount[x]
    pools.duration[at] = ticks_of(rows.duration[x])
    pools.key[at], pools.form[at] = 0, rows.form[x]
    begin, last, form = begin_of(end, SEND, x), np.uint64(end[SEND, x]), np.uint64(rows.form[x])
    members = last - begin
    pools.connection[at] = connection_of(
        rates, form, rows.send, begin, last, rows.receive, begin_of(end, RECEIVE, x), np.uint64(end[RECEIVE, x])
    )
    links, ends = begin_of(end, LINK, x), np.uint64(end[LINK, x])
    _bring_least(rows, routes, rates, links, ends, begin, last, x)
    pools.send_first[at], pools.send_last[at], pools.from_first[at], pools.from_last[at] = _list(
        blocks, rows.send, begin, last, pools.send, size, SEND
    )
    begin, last = begin_of(end, RECEIVE, x), np.uint64(end[RECEIVE, x])
    pools.receive_first[at], pools.receive_last[at], pools.to_first[at], pools.to_last[at] = _list(
        blocks, rows.receive, begin, last, pools.receive, size, RECEIVE
    )
    pools.link_first[at], longest = size[LINK], 0.0
    blocks.listing[0] += ONE
    for k in range(links, ends):
        if decisive[np.uint64(loads.link[k])] == 1:
            least = ticks_of(min(loads.least_s[k], rows.duration[x]))
            to = _row_of(blocks, np.uint64(loads.link[k]), pools.link, size, LINK)
            ticks = ticks_of(loads.link_s[k])
            if blocks.seen[0] == ZERO:
                pools.link_ticks[to], pools.link_load[to] = ticks, loads.link_load[k]
                pools.link_least[to] = max(0, least - 1)  # sums of what was rounded up may be more than the whole
                blocks.many[to - np.uint64(pools.link_first[at])] = ONE
            else:
                blocks.many[to - np.uint64(pools.link_first[at])] += ONE
                if not own or ticks != pools.link_ticks[to]:  # in turns on one link: blocks differ
                    blocks.lopsided[0] += ONE
                pools.link_ticks[to] = max(ticks, pools.link_ticks[to])
                pools.link_load[to] = max(np.float64(loads.link_load[k]), pools.link_load[to])
            longest = max(longest, loads.link_s[k])
    times = ONE
    if count > ONE and (form == ALL_REDUCE or rates.by_group[form] == 1):
        times = _add_images(blocks, pools, at, size[LINK], count)
    pools.orbit[at] = count
    pools.link_last[at], pools.drag_first[at] = size[LINK], size[DRAG]
    begin = np.uint64(pools.link_first[at])
    pools.turn[at] = turn_of(rates, bandwidth, form, members, times, pools.link, begin, size[LINK], longest)
    _append_drags(rows, blocks, own, pools, size, x)
    pools.drag_last[at] = size[DRAG]


@lean
def connection_of(
    rates: Rates, form: Any, send: U32, first: Any, last: Any, receive: U32, begin: Any, end: Any
) -> Any:  # fmt: skip
    """A number of the connection from devices ``send[first:last]`` to ``receive[begin:end]``, odd where it carries two
    communications at once. Messages between two devices share one connection, and a group's collectives share those of
    the group, or NCCL's communicator: the first in is the first out. Of the all-reduces of a group, gloo carries out
    two at once, by two threads (measured, ``benchmarks/link_sharing.py``)."""
    number = mixed(TWO if form == ALL_REDUCE or rates.by_group[form] == 1 else ONE)
    for k in range(first, last):
        number += number_of(send[k], SENDS)
    for k in range(begin, end):
        number += number_of(receive[k], RECEIVES)
    return (number << ONE) | np.uint64(rates.two_at_once[form])


@lean
def _append_drags(rows: Exchanges, blocks: BlockMap, own: Any, pools: Pools, size: U64, x: Any) -> None:
    """Add what exchange ``x`` takes from processors. ``own``: see ``_append_one``."""
    loads, end = rows.loads, rows.end
    blocks.listing[0] += ONE
    for k in range(begin_of(end, DRAG, x), np.uint64(end[DRAG, x])):
        to = _row_of(blocks, np.uint64(loads.drag[k]), pools.drag, size, DRAG)
        ticks, load = ticks_of(loads.drag_s[k]), loads.drag_load[k]
        if blocks.seen[0] == ZERO:
            pools.drag_ticks[to], pools.drag_load[to] = ticks, load
        elif not own:
            pools.drag_ticks[to] += ticks
            pools.drag_load[to] += load
        else:
            if ticks != pools.drag_ticks[to]:
                blocks.lopsided[0] += ONE
            pools.drag_ticks[to] = max(ticks, pools.drag_ticks[to])
            pools.drag_load[to] = max(np.float64(load), pools.drag_load[to])


@lean
def _bring_least(
    rows: Exchanges, routes: RouteTable, rates: Rates, links: Any, ends: Any, begin: Any, last: Any, x: Any
) -> None:
    """Fill ``least_s`` of the rows ``links`` to ``ends`` of exchange ``x``, whose senders are ``begin`` to ``last``."""
    loads, amount = rows.loads, rows.amount[x]
    for k in range(links, ends):
        loads.least_s[k] = loads.link_s[k]
    if amount > 0:  # a collective
        form = np.uint64(rows.form[x])
        note_least(routes, rates, rows.tally, loads, links, ends, form, rows.send, begin, last, amount)


@lean
def _add_images(blocks: BlockMap, pools: Pools, x: Any, last: Any, count: Any) -> Any:
    """Where several of the ``count`` exchanges of an orbit use a link, exchange ``x`` keeps it busy as long as all of
    them, and ends with the last. ``blocks.many``: links by row; the rows end before ``last``. Returns how many of them
    use the same link at most."""
    before, after, most = np.int64(0), np.int64(0), ONE
    first = np.uint64(pools.link_first[x])
    for row in range(first, last):
        times = at_once(count, blocks.many[row - first], blocks.images[np.uint64(pools.link[row])])
        before, most = max(before, np.int64(pools.link_ticks[row])), max(most, times)
        pools.link_ticks[row] *= np.int64(times)
        pools.link_load[row] *= np.float64(times)
        after = max(after, np.int64(pools.link_ticks[row]))
    pools.duration[x] += after - before
    return most


@lean
def _list(
    blocks: BlockMap, devices: U32, first: Any, last: Any, to: U32, size: U64, k: Any
) -> tuple[Any, Any, Any, Any]:
    """Write the places of ``devices[first:last]`` in their block to list ``k``, and the devices themselves where these
    are others: where the ones and the others begin and end."""
    begin = size[k]
    middle = end = add_places(blocks, devices, first, last, to, begin)
    if blocks.replicas[0] > ONE and crosses_blocks(blocks, devices, first, last):
        for j in range(first, last):
            to[end] = devices[j]
            end += ONE
        size[k] = end
        return begin, middle, middle, end
    size[k] = end
    return begin, middle, begin, middle


@lean
def _row_of(blocks: BlockMap, resource: Any, to: U32, size: U64, k: Any) -> Any:
    """Row of list ``k`` for the image of a resource, a new one unless it is listed (``seen``) already."""
    image = np.uint64(blocks.image[resource])
    blocks.seen[0] = ONE
    if blocks.listed[image] != blocks.listing[0]:
        blocks.listed[image] = blocks.listing[0]
        blocks.row[image] = size[k]
        to[size[k]] = image
        size[k] += ONE
        blocks.seen[0] = ZERO
    return blocks.row[image]


@lean
def _room(pools: Pools, k: Any) -> Any:
    """How many entries the column of list ``k`` can hold."""
    if k == SEND:
        return np.uint64(pools.send.shape[0])
    if k == RECEIVE:
        return np.uint64(pools.receive.shape[0])
    return np.uint64(pools.link.shape[0] if k == LINK else pools.drag.shape[0])
