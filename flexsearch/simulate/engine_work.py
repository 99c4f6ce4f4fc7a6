"""What a block has to do once it has a segment, compiled: by device and link, and which devices have steps in it."""

from __future__ import annotations

from typing import Any

import numpy as np

from flexsearch.compiled import ONE, U64, ZERO, lean
from flexsearch.lower.rows import COMPUTE, Segments
from flexsearch.simulate.engine_state import State


@lean
def add_work(state: State, segments: Segments, block: Any, segment: Any, sign: Any) -> None:
    """Add (or take away) the work in a segment: ticks of computing by device, ticks of carrying by resource."""
    kept, contended = state.kept, state.machine.contended[0]
    table, most = np.uint64(segments.device_steps[segment]), np.uint32(0)
    for group in range(np.uint64(state.runs.shape[0])):
        most = max(most, state.runs[group, block])
    first = np.uint64(segments.step_first[table])
    for d in range(np.uint64(state.devices.clock.shape[0])):
        last, ticks = np.uint64(segments.step_first[table + d + ONE]), np.int64(0)
        if first == last:  # most devices have no part in most blocks of a pipeline
            continue
        for step in range(first, last):
            if segments.step_kind[step] == COMPUTE:
                ticks += segments.step_ticks[step]
        first = last
        ticks *= sign * np.int64(state.runs[np.uint64(state.schedule.group[d]), block])
        kept.new_compute[d] += ticks
        if contended:
            kept.new_carry[np.uint64(state.machine.processor[d])] += ticks
    times = sign * np.int64(most)
    for row in range(
        np.uint64(segments.communication_first[segment]), np.uint64(segments.communication_last[segment])
    ):  # fmt: skip
        for k in range(np.uint64(segments.link_first[row]), np.uint64(segments.link_last[row])):
            ticks = min(segments.link_ticks[k], segments.communication_ticks[row])
            kept.new_carry[np.uint64(segments.link[k])] += times * ticks


@lean
def put_segment(state: State, segments: Segments, block: Any, segment: Any) -> None:
    """Give a block a segment."""
    state.segment[block] = segment
    table = np.uint64(segments.device_steps[segment])
    for word in range(np.uint64(state.busy.shape[1])):
        state.busy[block, word] = ZERO
    for d in range(np.uint64(state.devices.clock.shape[0])):
        runs = state.runs[np.uint64(state.schedule.group[d]), block] > 0
        if runs and segments.step_first[table + d] < segments.step_first[table + d + ONE]:
            state.busy[block, d >> np.uint64(6)] |= ONE << (d & np.uint64(63))


@lean
def keep_busy(source: U64, target: U64, block: Any) -> None:
    """Copy which devices have steps in a block."""
    for word in range(np.uint64(source.shape[1])):
        target[block, word] = source[block, word]


@lean
def has_room(state: State, segments: Segments, block: Any, segment: Any) -> Any:
    """Whether the communications of a segment have places in a block."""
    rows = np.uint64(segments.communication_last[segment]) - np.uint64(segments.communication_first[segment])
    return rows <= state.capacity[block]
