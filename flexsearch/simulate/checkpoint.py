"""Checkpoints of a pass, compiled: the moments at hand before a block, and the exchanges in flight, from which a later
pass can go on. Each has two versions: what a proposal writes leaves those of the plan at hand as they are.

Where a pass skipped what is only put off (``skip``), checkpoints and what arrived keep the moments they had, and
``work.base`` says by how much later they are; moments of 0, where nothing has happened, stay."""

from __future__ import annotations

from typing import Any

import numpy as np

from flexsearch.compiled import ONE, THREE, TWO, ZERO, inlined, lean
from flexsearch.lower.arrays import STRIDE, Pools, Program, State, Work
from flexsearch.simulate.flight import HALF, LOW, base_of, later, new_row, version_of

VOID = np.uint32(0xFFFFFFFF)
"""Too much was in flight to be written down."""


@inlined
def _begin_again(work: Work) -> None:
    """Set the moments to those before the first block."""
    for column in (work.last, work.free, work.seen, work.order, work.synced, work.moment):
        column[:] = 0.0
    work.broken[0] = 0
    work.fresh[:] = 0
    work.check_fresh[:] = 0
    work.left[:] = 0
    work.early[:] = 0
    work.flying[:] = 0
    work.next_base[:] = 0.0


@inlined
def restore(program: Program, work: Work, first: Any) -> Any:
    """Set the moments to those of the last checkpoint at or before block ``first``; returns its block."""
    _begin_again(work)
    c = np.uint64(first) // np.uint64(STRIDE)
    while c > ZERO and work.held[work.check_version[c], c, 0] == VOID:
        c -= ONE
    if c == ZERO:
        return ZERO
    for k in range(c):
        work.next_base[k] = work.base[k]
    v, base = np.uint64(work.check_version[c]), work.base[c]
    row = work.checkpoint[v, c]
    devices, links = np.uint64(work.last.shape[0]), np.uint64(work.free.shape[0])
    for k in range(devices):
        work.last[k] = later(row[k], base)
        work.synced[k] = later(row[devices + k], base)
    at = TWO * devices
    for k in range(links):
        work.free[k] = later(row[at + k], base)
        work.seen[k] = later(row[at + links + k], base)
        work.order[k] = row[at + TWO * links + k]
    at += THREE * links
    work.moment[0] = later(row[at], base)
    work.moment[1] = row[at + ONE]
    work.moment[2] = later(row[at + TWO], base)
    restore_flight(program, work, v, c, base)
    return c * np.uint64(STRIDE)


@lean
def restore_flight(program: Program, work: Work, v: Any, c: Any, base: float) -> None:
    """Put what version ``v`` of checkpoint ``c`` holds into flight, ``base`` (s) later."""
    heap, parked = np.uint64(work.held[v, c, 0]), np.uint64(work.held[v, c, 1])
    for k in range(heap):
        work.heap_ready[k] = later(work.held_ready[v, c, k], base)
        work.heap_number[k] = work.held_number[v, c, k]
        work.heap_cargo[k] = work.held_cargo[v, c, k]
    for k in range(parked):
        work.parked_ready[k] = later(work.held_ready[v, c, heap + k], base)
        work.parked_number[k] = work.held_number[v, c, heap + k]
        work.parked_cargo[k] = work.held_cargo[v, c, heap + k]
    work.flying[0] = heap
    work.flying[1] = parked
    for k in range(np.uint64(work.held[v, c, 2])):
        to = np.uint64(work.held_row[v, c, k, 0])
        work.left[to] = work.held_row[v, c, k, 1]
        work.early[to] = work.held_row[v, c, k, 2]
        new_row(work, to)
        arrived, own = work.arrived[version_of(work, to), to], base_of(program, work, to)
        for d in range(np.uint64(work.last.shape[0])):
            if work.held_arrived[v, c, k, d] > 0.0:
                arrived[d] = work.held_arrived[v, c, k, d] + base - own


@inlined
def save(program: Program, pools: Pools, state: State, work: Work, c: Any) -> None:
    """Write checkpoint ``c``."""
    v = ONE - np.uint64(work.check_version[c])
    row = work.checkpoint[v, c]
    work.check_fresh[c] = 1
    devices, links = np.uint64(work.last.shape[0]), np.uint64(work.free.shape[0])
    for k in range(devices):
        row[k] = work.last[k]
        row[devices + k] = work.synced[k]
    at = TWO * devices
    for k in range(links):
        row[at + k] = work.free[k]
        row[at + links + k] = work.seen[k]
        row[at + TWO * links + k] = work.order[k]
    at += THREE * links
    for k in range(THREE):
        row[at + k] = work.moment[k]
    heap, parked = np.uint64(work.flying[0]), np.uint64(work.flying[1])
    if heap + parked > np.uint64(work.held_ready.shape[2]):
        work.held[v, c, 0] = VOID
        return
    work.held[v, c, 0] = heap
    work.held[v, c, 1] = parked
    work.held[v, c, 2] = 0
    for k in range(heap):
        work.held_ready[v, c, k] = work.heap_ready[k]
        work.held_number[v, c, k] = work.heap_number[k]
        work.held_cargo[v, c, k] = work.heap_cargo[k]
    for k in range(parked):
        work.held_ready[v, c, heap + k] = work.parked_ready[k]
        work.held_number[v, c, heap + k] = work.parked_number[k]
        work.held_cargo[v, c, heap + k] = work.parked_cargo[k]
    for k in range(heap + parked):
        _hold(program, pools, state, work, v, c, work.held_cargo[v, c, k])


@inlined
def _hold(program: Program, pools: Pools, state: State, work: Work, v: Any, c: Any, cargo: Any) -> None:
    """Keep what has arrived so far in the rows to which an exchange in flight delivers."""
    what, row = cargo & LOW, cargo >> HALF
    rows, buckets = np.uint64(work.left.shape[0]), np.uint64(program.bucket_first.shape[0])
    if row < rows:
        _hold_row(program, work, v, c, row)
    elif row < rows + buckets:
        version, slots = version_of(work, row), np.uint64(program.flows.shape[0])
        m = np.uint64(work.group_head[version, what])
        for _ in range(np.uint64(work.group_size[version, what])):
            w = np.uint64(work.member_weight[version, m])
            t = np.uint64(pools.plan_sync[np.uint64(state.plan[w])])
            if pools.reshard_middle[t] < pools.reshard_last[t]:
                _hold_row(program, work, v, c, TWO * slots + w)
            m = np.uint64(work.member_next[version, m])


@lean
def _hold_row(program: Program, work: Work, v: Any, c: Any, row: Any) -> None:
    if work.held[v, c, 0] == VOID:
        return
    count = np.uint64(work.held[v, c, 2])
    for k in range(count):
        if work.held_row[v, c, k, 0] == row:
            return
    if count == np.uint64(work.held_row.shape[2]):
        work.held[v, c, 0] = VOID
        return
    work.held_row[v, c, count, 0] = row
    work.held_row[v, c, count, 1] = work.left[row]
    work.held_row[v, c, count, 2] = work.early[row]
    arrived, base = work.arrived[version_of(work, row), row], base_of(program, work, row)
    for d in range(np.uint64(work.last.shape[0])):
        work.held_arrived[v, c, count, d] = later(arrived[d], base)
    work.held[v, c, 2] = count + ONE


@lean
def accept(work: Work) -> None:
    """Make what the last pass wrote the state's own."""
    for k in range(np.uint64(work.fresh.shape[0])):
        work.version[k] ^= work.fresh[k]
    for k in range(np.uint64(work.check_fresh.shape[0])):
        work.check_version[k] ^= work.check_fresh[k]
    for k in range(np.uint64(work.base.shape[0])):
        work.base[k] = work.next_base[k]
