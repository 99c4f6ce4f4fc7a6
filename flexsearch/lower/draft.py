"""Where the segment of a block is put together, compiled: its communications go to the arena as they come; its steps
are noted one after the other and laid out by device at the end."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from flexsearch.compiled import I64, ONE, U8, U32, U64, ZERO, lean
from flexsearch.lower.arrays import NOTHING, BlockTable, Pools
from flexsearch.lower.bucket import Groups
from flexsearch.lower.rows import ISSUE, NEVER, Segments
from flexsearch.packed import packed


@packed
class Filled(NamedTuple):
    """How many entries of each list of ``Segments`` are in use, (1,) each."""

    segment: U64
    table: U64
    step: U64
    communication: U64
    link: U64
    drag: U64
    receiver: U64
    follower: U64


@packed
class Draft(NamedTuple):
    """A segment so far. Its ``steps`` ((1,)): ``device``, ``kind``, ``block``, ``row``, ``ticks``, ``host``.
    ``at``: by device, a count or a place; ``mark``: by device, the last ``stamp`` ((1,)) that it was given; ``piece``:
    by device, the stamp of the last block of which it holds a piece. ``full``: (1,) 1 if there was no room for
    something. ``groups``: exchanges of a bucket."""

    device: U32
    kind: U8
    block: U32
    row: U32
    ticks: I64
    host: I64
    steps: U64
    at: U64
    mark: U64
    piece: U64
    stamp: U64
    full: U8
    groups: Groups


@lean
def add_step(draft: Draft, device: Any, kind: Any, block: Any, row: Any, ticks: Any, host: Any) -> None:
    """One more step. ``host``: ticks that launching it takes."""
    at = draft.steps[0]
    if at == np.uint64(draft.device.shape[0]):
        draft.full[0] = 1
        return
    draft.device[at], draft.kind[at], draft.block[at] = device, kind, block
    draft.row[at], draft.ticks[at], draft.host[at] = row, ticks, host
    draft.steps[0] = at + ONE


@lean
def new_stamp(draft: Draft) -> Any:
    """A stamp that no device has been given yet."""
    draft.stamp[0] += ONE
    return draft.stamp[0]


@lean
def add_follower(segments: Segments, filled: Filled, draft: Draft, block: Any, row: Any) -> Any:
    """One more follower of the communication written last; False if there is no room."""
    at = filled.follower[0]
    if at == np.uint64(segments.follower_row.shape[0]):
        draft.full[0] = 1
        return False
    segments.follower_block[at], segments.follower_row[at] = block, row
    filled.follower[0] = at + ONE
    return True


@lean
def open_communication(segments: Segments, filled: Filled, draft: Draft, links: Any, drags: Any, receivers: Any) -> Any:
    """The next communication, without a link yet; ``full`` if there is no room for it and so many entries."""
    c = filled.communication[0]
    if (
        c == np.uint64(segments.missing.shape[0])
        or filled.link[0] + links > np.uint64(segments.link.shape[0])
        or filled.drag[0] + drags > np.uint64(segments.drag.shape[0])
        or filled.receiver[0] + receivers > np.uint64(segments.receiver.shape[0])
    ):
        draft.full[0] = 1
        return c
    segments.link_first[c], segments.drag_first[c] = filled.link[0], filled.drag[0]
    segments.receiver_first[c], segments.follower_first[c] = filled.receiver[0], filled.follower[0]
    segments.follower_last[c] = filled.follower[0]
    segments.turn[c], segments.connection[c] = NEVER, ZERO
    filled.communication[0] = c + ONE
    return c


@lean
def add_link(segments: Segments, filled: Filled, resource: Any, ticks: Any) -> None:
    """The communication that is open keeps a link busy."""
    at = filled.link[0]
    segments.link[at], segments.link_ticks[at] = resource, ticks
    filled.link[0] = at + ONE


@lean
def add_drag(segments: Segments, filled: Filled, resource: Any, ticks: Any) -> None:
    """The communication that is open takes time from a processor."""
    at = filled.drag[0]
    segments.drag[at], segments.drag_ticks[at] = resource, ticks
    filled.drag[0] = at + ONE


@lean
def close(segments: Segments, filled: Filled, c: Any, ticks: Any) -> None:
    """The communication that is open has all that it needs."""
    segments.link_last[c], segments.drag_last[c] = filled.link[0], filled.drag[0]
    segments.receiver_last[c] = filled.receiver[0]
    segments.communication_ticks[c] = ticks


@lean
def add_ends(
    blocks: BlockTable, pools: Pools, draft: Draft, segments: Segments, filled: Filled, b: Any, c: Any, row: Any,
    x: Any, sending: Any, receiving: Any,
) -> None:  # fmt: skip
    """Senders and receivers of exchange ``x``, those left out that have the stamp ``sending`` or ``receiving``: they
    are given these. Senders that do not run the block pass on what they receive without a step of their own."""
    runs = np.uint64(blocks.stage[b]) * np.uint64(draft.mark.shape[0])
    for k in range(np.uint64(pools.send_first[x]), np.uint64(pools.send_last[x])):
        d = np.uint64(pools.send[k])
        if draft.mark[d] != sending and blocks.runs[runs + d] == 1:
            draft.mark[d] = sending
            segments.missing[c] += np.uint32(1)
            add_step(draft, d, ISSUE, b, row, np.int64(0), blocks.issue[d])
    for k in range(np.uint64(pools.receive_first[x]), np.uint64(pools.receive_last[x])):
        d = np.uint64(pools.receive[k])
        if draft.at[d] != receiving:
            draft.at[d] = receiving
            segments.receiver[filled.receiver[0]] = d
            filled.receiver[0] += ONE


@lean
def add_exchange(
    blocks: BlockTable, pools: Pools, draft: Draft, segments: Segments, filled: Filled, b: Any, row: Any, x: Any
) -> None:
    """One exchange as a communication of its own; what else it misses stands in ``missing`` already."""
    links = np.uint64(pools.link_last[x] - pools.link_first[x])
    drags = np.uint64(pools.drag_last[x] - pools.drag_first[x])
    receivers = np.uint64(pools.receive_last[x] - pools.receive_first[x])
    c = open_communication(segments, filled, draft, links, drags, receivers)
    if draft.full[0] == 1:
        return
    for k in range(np.uint64(pools.link_first[x]), np.uint64(pools.link_last[x])):
        add_link(segments, filled, pools.link[k], pools.link_ticks[k])
    for k in range(np.uint64(pools.drag_first[x]), np.uint64(pools.drag_last[x])):
        add_drag(segments, filled, pools.drag[k], pools.drag_ticks[k])
    stamp = new_stamp(draft)
    add_ends(blocks, pools, draft, segments, filled, b, c, row, x, stamp, stamp)
    close(segments, filled, c, pools.duration[x])
    segments.turn[c], segments.connection[c] = pools.turn[x], pools.connection[x]


@lean
def finish(segments: Segments, filled: Filled, draft: Draft, first: Any) -> Any:
    """Lay the steps out by device. ``first``: the block's first communication."""
    number, table, at = filled.segment[0], filled.table[0], filled.step[0]
    devices, count = np.uint64(draft.at.shape[0]), draft.steps[0]
    if (
        draft.full[0] == 1
        or number == np.uint64(segments.device_steps.shape[0])
        or table + devices + ONE > np.uint64(segments.step_first.shape[0])
        or at + count > np.uint64(segments.step_kind.shape[0])
    ):
        return np.uint64(NOTHING)
    for d in range(devices):
        draft.at[d] = ZERO
    for k in range(count):
        draft.at[np.uint64(draft.device[k])] += ONE
    for d in range(devices):
        segments.step_first[table + d] = at
        here = draft.at[d]
        draft.at[d] = at
        at += here
    segments.step_first[table + devices] = at
    for k in range(count):
        device = np.uint64(draft.device[k])
        to = draft.at[device]
        segments.step_kind[to], segments.step_block[to] = draft.kind[k], draft.block[k]
        segments.step_row[to], segments.step_ticks[to] = draft.row[k], draft.ticks[k]
        segments.step_host[to] = draft.host[k]
        draft.at[device] = to + ONE
    for d in range(devices):
        draft.at[d] = ZERO
    segments.device_steps[number] = table
    segments.communication_first[number], segments.communication_last[number] = first, filled.communication[0]
    filled.segment[0], filled.table[0], filled.step[0] = number + ONE, table + devices + ONE, at
    return number
