"""The exchanges of a planned reshard as rows of the pools, compiled: a search asks for thousands of reshards."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from flexsearch.compiled import F64, I64, ONE, U8, U32, U64, ZERO, lean
from flexsearch.cost.tally import Loads
from flexsearch.cost.ticks import TICK
from flexsearch.lower.desk import DRAG, FIRST, LAST, LINK, RECEIVE, SEND
from flexsearch.packed import packed

LISTS: Final = ("send", "receive", "link", "drag")
"""Lists of an exchange, in the order of their numbers in ``lower.desk``."""


@packed
class Rows(NamedTuple):
    """The columns of ``Pools`` that hold exchanges, by the same names."""

    send_first: U32
    send_last: U32
    receive_first: U32
    receive_last: U32
    link_first: U32
    link_last: U32
    drag_first: U32
    drag_last: U32
    duration: F64
    start: F64
    amount: U64
    key: U32
    send: U32
    receive: U32
    link: U32
    link_s: F64
    link_ticks: I64
    link_load: F64
    drag: U32
    drag_s: F64
    drag_load: F64


@lean
def append(
    result: U64, end: npt.NDArray[np.uint32], send: U32, receive: U32, loads: Loads, start: F64, duration: F64,
    amount: I64, linear: U8, decisive: npt.NDArray[np.bool_], rows: Rows, size: U64,
) -> Any:  # fmt: skip
    """Add what lies on the desk (``result``, ``end``, ...: see ``lower.desk``) to the pools. Links that no transfer can
    wait for (``Topology.decisive``) are left out. ``size``: (5,) sends, receives, links, drags and exchanges there so
    far, which grow. False, and nothing added, if there is no room."""
    first, last = result[FIRST], result[LAST]
    for k in range(np.uint64(DRAG) + ONE):
        begin = np.uint64(end[k, first - ONE]) if first > ZERO else ZERO
        most = np.uint64(end[k, last - ONE]) - begin if last > first else ZERO
        if size[k] + most > _room(rows, k):
            return False
    if size[4] + last - first > np.uint64(rows.duration.shape[0]):
        return False
    for x in range(first, last):
        at = size[4]
        size[4] += ONE
        rows.start[at], rows.duration[at], rows.amount[at] = start[x], duration[x], np.uint64(amount[x])
        rows.key[at] = 0
        rows.send_first[at] = size[SEND]
        for k in range(_begin(end, SEND, x), np.uint64(end[SEND, x])):
            rows.send[size[SEND]] = send[k]
            size[SEND] += ONE
        rows.send_last[at], rows.receive_first[at] = size[SEND], size[RECEIVE]
        for k in range(_begin(end, RECEIVE, x), np.uint64(end[RECEIVE, x])):
            rows.receive[size[RECEIVE]] = receive[k]
            size[RECEIVE] += ONE
        rows.receive_last[at], rows.link_first[at] = size[RECEIVE], size[LINK]
        for k in range(_begin(end, LINK, x), np.uint64(end[LINK, x])):
            if decisive[np.uint64(loads.link[k])]:
                to = size[LINK]
                rows.link[to], rows.link_s[to], rows.link_load[to] = loads.link[k], loads.link_s[k], loads.link_load[k]
                least = min(loads.link_s[k], duration[x]) if linear[x] == 1 else 0.0
                rows.link_ticks[to] = np.int64(least / TICK)
                size[LINK] += ONE
        rows.link_last[at], rows.drag_first[at] = size[LINK], size[DRAG]
        for k in range(_begin(end, DRAG, x), np.uint64(end[DRAG, x])):
            to = size[DRAG]
            rows.drag[to], rows.drag_s[to], rows.drag_load[to] = loads.drag[k], loads.drag_s[k], loads.drag_load[k]
            size[DRAG] += ONE
        rows.drag_last[at] = size[DRAG]
    return True


@lean
def _begin(end: npt.NDArray[np.uint32], k: Any, x: Any) -> Any:
    """Where list ``k`` of exchange ``x`` begins."""
    return np.uint64(end[k, x - ONE]) if x > ZERO else ZERO


@lean
def _room(rows: Rows, k: Any) -> Any:
    """How many entries the column of list ``k`` can hold."""
    if k == SEND:
        return np.uint64(rows.send.shape[0])
    if k == RECEIVE:
        return np.uint64(rows.receive.shape[0])
    return np.uint64(rows.link.shape[0] if k == LINK else rows.drag.shape[0])
