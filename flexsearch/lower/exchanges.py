"""The exchanges of a planned reshard as rows of the pools, compiled: a search asks for thousands of reshards."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from flexsearch.compiled import ONE, U8, U64, ZERO, lean
from flexsearch.cost.tally import Rates, turn_of
from flexsearch.cost.ticks import ticks_of
from flexsearch.lower.arrays import Pools
from flexsearch.lower.workspace import DRAG, FIRST, LAST, LINK, RECEIVE, SEND, Workspace


@lean
def append(workspace: Workspace, rates: Rates, decisive: U8, pools: Pools, size: U64) -> Any:
    """Add the exchanges in the workspace to the pools. Links that no transfer can wait for (``Topology.decisive``) are
    left out. ``size``: (5,) sends, receives, links, drags and exchanges there so far, which grow. False, and nothing
    added, if there is no room."""
    rows, loads = workspace.exchanges, workspace.exchanges.loads
    first, last, end = workspace.result[FIRST], workspace.result[LAST], workspace.exchanges.end
    for k in range(np.uint64(DRAG) + ONE):
        begin = np.uint64(end[k, first - ONE]) if first > ZERO else ZERO
        most = np.uint64(end[k, last - ONE]) - begin if last > first else ZERO
        if size[k] + most > _room(pools, k):
            return False
    if size[4] + last - first > np.uint64(pools.duration.shape[0]):
        return False
    for x in range(first, last):
        at = size[4]
        size[4] += ONE
        pools.start[at], pools.amount[at] = rows.start[x], rows.amount[x]
        pools.duration[at] = ticks_of(rows.duration[x])
        pools.key[at] = 0
        pools.form[at] = rows.form[x]
        pools.send_first[at] = size[SEND]
        for k in range(_begin(end, SEND, x), np.uint64(end[SEND, x])):
            pools.send[size[SEND]] = rows.send[k]
            size[SEND] += ONE
        pools.send_last[at], pools.receive_first[at] = size[SEND], size[RECEIVE]
        for k in range(_begin(end, RECEIVE, x), np.uint64(end[RECEIVE, x])):
            pools.receive[size[RECEIVE]] = rows.receive[k]
            size[RECEIVE] += ONE
        pools.receive_last[at], pools.link_first[at], longest = size[RECEIVE], size[LINK], 0.0
        for k in range(_begin(end, LINK, x), np.uint64(end[LINK, x])):
            if decisive[np.uint64(loads.link[k])] == 1:
                to = size[LINK]
                pools.link[to], pools.link_ticks[to] = loads.link[k], ticks_of(loads.link_s[k])
                pools.link_load[to], longest = loads.link_load[k], max(longest, loads.link_s[k])
                least = min(loads.link_s[k], rows.duration[x]) if rows.linear[x] == 1 else 0.0
                pools.link_least[to] = ticks_of(least)
                size[LINK] += ONE
        pools.link_last[at], pools.drag_first[at] = size[LINK], size[DRAG]
        begin = np.uint64(pools.link_first[at])
        pools.turn[at] = turn_of(rates, rows.form[x], pools.link, begin, size[LINK], longest)
        for k in range(_begin(end, DRAG, x), np.uint64(end[DRAG, x])):
            to = size[DRAG]
            pools.drag[to], pools.drag_ticks[to] = loads.drag[k], ticks_of(loads.drag_s[k])
            pools.drag_load[to] = loads.drag_load[k]
            size[DRAG] += ONE
        pools.drag_last[at] = size[DRAG]
    return True


@lean
def _begin(end: npt.NDArray[np.uint32], k: Any, x: Any) -> Any:
    """Where list ``k`` of exchange ``x`` begins."""
    return np.uint64(end[k, x - ONE]) if x > ZERO else ZERO


@lean
def _room(pools: Pools, k: Any) -> Any:
    """How many entries the column of list ``k`` can hold."""
    if k == SEND:
        return np.uint64(pools.send.shape[0])
    if k == RECEIVE:
        return np.uint64(pools.receive.shape[0])
    return np.uint64(pools.link.shape[0] if k == LINK else pools.drag.shape[0])
