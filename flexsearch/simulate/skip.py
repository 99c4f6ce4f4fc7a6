"""Skipping what a change only puts off, compiled.

When all devices are as much later (or earlier) than they were in the plan at hand, nothing is in flight, and links are
either free or that much later too, then all goes on as it did, that much later, up to the next block that changed: its
checkpoint is taken over from the plan at hand. Durations are whole ticks, so moments that are shifted keep their bits
(``flexsearch.cost.ticks``).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flexsearch.compiled import F64, ONE, THREE, TWO, U8, ZERO, inlined, lean
from flexsearch.cost.ticks import EXACT_S
from flexsearch.lower.arrays import STRIDE, Program, Work
from flexsearch.simulate.checkpoint import VOID, restore_flight
from flexsearch.simulate.flight import later

LEAST = np.uint64(2)
"""Fewer STRIDEs of blocks are not worth skipping."""


@inlined
def ahead(program: Program, work: Work, changed: U8, c: Any) -> Any:
    """Skip to a later checkpoint, whose number is returned; ``c``, the one at hand, if that is not possible."""
    to = _next(program, work, changed, c)
    if to < c + LEAST or work.flying[0] > ZERO or work.flying[1] > ZERO:
        return c
    v = np.uint64(work.check_version[c])
    if work.held[v, c, 0] != ZERO or work.held[v, c, 1] != ZERO:  # void, or something in flight
        return c
    then, there = work.checkpoint[v, c], work.checkpoint[np.uint64(work.check_version[to]), to]
    base, base_there = work.base[c], work.base[to]
    devices = np.uint64(work.last.shape[0])
    shift, earliest, latest, found = 0.0, np.inf, 0.0, False
    for d in range(devices):
        if work.last[d] == 0.0 and then[d] == 0.0:
            if there[d] != 0.0:  # has its first work to do
                return c
            continue
        by = work.last[d] - later(then[d], base)
        if found and by != shift:
            return c
        shift, found = by, True
        earliest, latest = min(earliest, work.last[d]), max(latest, work.last[d])
    if not found or latest + abs(shift) + work.moment[0] > EXACT_S / 4.0:
        return c
    if not _as_before(work, then, there, base, base_there, shift, earliest):
        return c
    _take_over(program, work, then, there, base, base_there, shift, c, to)
    return to


@inlined
def _next(program: Program, work: Work, changed: U8, c: Any) -> Any:
    """The next checkpoint whose blocks changed; the end of the program counts as that."""
    last = (np.uint64(program.kind.shape[0]) - TWO) // np.uint64(STRIDE)
    to = c
    while to < last and changed[to] == 0:
        to += ONE
    while to > c and work.held[work.check_version[to], to, 0] == VOID:
        to -= ONE
    return to


@inlined
def _as_before(work: Work, then: F64, there: F64, base: float, base_there: float, shift: float, earliest: float) -> Any:
    """Whether all that is at hand, beside the devices, is ``shift`` later than it was, or of no more concern."""
    devices, links = np.uint64(work.last.shape[0]), np.uint64(work.free.shape[0])
    before = earliest - shift
    at = TWO * devices
    for r in range(links):
        free, seen = later(then[at + r], base), later(then[at + links + r], base)
        stale = work.free[r] <= earliest and free <= before
        if not stale and (work.free[r] - free != shift or work.seen[r] - seen != shift):
            return False
    at += THREE * links
    if work.moment[2] > earliest or later(then[at + TWO], base) > before:
        return False  # something may still be waited for
    if not _known(work.moment[0], later(then[at], base), later(there[at], base_there), shift, earliest):
        return False
    for d in range(devices):
        was, will = later(then[devices + d], base), later(there[devices + d], base_there)
        if not _known(work.synced[d], was, will, shift, work.last[d]):
            return False
    return True


@lean
def _known(now: float, was: float, will: float, shift: float, stale: float) -> Any:
    """Whether a running maximum can be told after the skip: it grew meanwhile, it is as much later as all is, or it is
    too small to matter."""
    return will > was or now >= was + shift or (now <= stale and was + shift <= stale)


@lean
def _grown(now: float, was: float, will: float, shift: float) -> Any:
    """A running maximum after the skip."""
    return max(now, will + shift) if will > was else now


@inlined
def _take_over(
    program: Program, work: Work, then: F64, there: F64, base: float, base_there: float, shift: float, c: Any, to: Any
) -> None:
    """Set the moments to those of checkpoint ``to``, ``shift`` later."""
    devices, links = np.uint64(work.last.shape[0]), np.uint64(work.free.shape[0])
    for k in range(c, to):
        work.next_base[k] = work.base[k] + shift
    work.skipped[0] += to - c
    work.check_fresh[c] = 0  # what was written there is the same
    for d in range(devices):
        if there[d] != 0.0:
            work.last[d] = there[d] + base_there + shift
        was, will = later(then[devices + d], base), later(there[devices + d], base_there)
        work.synced[d] = _grown(work.synced[d], was, will, shift)
    at = TWO * devices
    for r in range(links):
        free = later(there[at + r], base_there)
        if free != later(then[at + r], base):  # used meanwhile
            work.free[r] = free + shift
            work.seen[r] = there[at + links + r] + base_there + shift
            work.order[r] = there[at + TWO * links + r]
    at += THREE * links
    work.moment[0] = _grown(work.moment[0], later(then[at], base), later(there[at], base_there), shift)
    work.moment[2] = _grown(work.moment[2], later(then[at + TWO], base), later(there[at + TWO], base_there), shift)
    work.moment[1] = there[at + ONE] + max(0.0, work.moment[1] - then[at + ONE])
    restore_flight(program, work, np.uint64(work.check_version[to]), to, base_there + shift)
