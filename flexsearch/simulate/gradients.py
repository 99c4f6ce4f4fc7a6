"""The gradients that the readers of an edge make, as ``lifetimes`` defines it, compiled."""

from __future__ import annotations

from typing import Any

import numpy as np

from flexsearch.compiled import ONE, THREE, U32, ZERO, lean
from flexsearch.lower.arrays import NOTHING, State
from flexsearch.lower.interned import entries_of
from flexsearch.simulate.spans import ACTIVATIONS, CAST, GRADIENTS, Sources, Spans, add, computing, prolong


@lean
def differentiate(
    sources: Sources, state: State, slots: U32, k: Any, last: Any, template: Any, before: Any, itemsize: Any, part: Any,
    cast: Any, spans: Spans,
) -> Any:  # fmt: skip
    """The gradients that the readers of the edge of ``slots[k]`` make, in ``spans.gradient``, where reshard
    ``template`` uses them, ``before`` whose entries of these are so many of other edges. ``cast``: bytes of an element
    as readers make it, if it is cast to ``itemsize``; else 0. Returns the moment at which they are complete: the
    backward of the first reader, as that runs last."""
    wiring, layouts, slot = sources.wiring, sources.layouts, np.uint64(slots[k])
    blocks = sources.units.backward_block if part == ACTIVATIONS else sources.units.weight_block
    latest, through, latest_slot = ZERO, ZERO, slot
    for j in range(k, last):
        other = np.uint64(slots[j])
        if np.uint64(state.leader[other]) == slot:
            reader = np.uint64(wiring.slot_operator[other])
            if reader != latest:
                through = ZERO
            if sources.units.is_view[reader] == 1 and wiring.slot_position[other] == 0 and part == ACTIVATIONS:
                through = ONE
            latest, latest_slot = reader, other
    begin, now = computing(blocks[latest]), computing(blocks[np.uint64(wiring.slot_operator[slot])])
    for every in range(np.uint64(spans.gradient.shape[0])):
        spans.gradient[every] = 0
    need = np.uint64(state.need[slot])
    _note_used(sources, need, template, before, spans)
    first = np.uint64(layouts.mesh_first[np.uint64(layouts.layout_mesh[need])])
    entry = np.uint64(layouts.grid_first[np.uint64(layouts.layout_grid[need])])
    for row in range(entries_of(layouts, need)):
        d, handle = np.uint64(layouts.device[first + row]), ZERO
        if d >= np.uint64(spans.reads.shape[0]):
            continue
        nbytes = layouts.volume[entry + row] * itemsize
        if spans.reads[d] == 0:
            if part == ACTIVATIONS and _by_product(sources, state, latest_slot, d):
                add(spans, d, nbytes, part, begin, begin)
            continue
        if through == ONE:
            for t in range(np.uint64(wiring.output_first[latest]), np.uint64(wiring.output_last[latest])):
                arrived = np.uint64(spans.arrived[np.uint64(sources.units.place[t]), d])
                # That of a slice is a part of what it makes, that of something expanded more.
                if arrived > ZERO and spans.nbytes[arrived - ONE] == nbytes:
                    handle = arrived
        if handle == ZERO:
            handle = add(spans, d, nbytes, part | CAST if cast > 0 else part, begin, begin)
        if cast > 0:
            _make(sources, state, slots, k, last, d, layouts.volume[entry + row] * cast, spans)
        prolong(spans, handle, now)
        spans.gradient[d] = handle
    return now


@lean
def _make(
    sources: Sources, state: State, slots: U32, k: Any, last: Any, d: Any, nbytes: Any, spans: Spans
) -> None:  # fmt: skip
    """The gradients of a weight that each reader of the edge of ``slots[k]`` makes on device ``d``, until they are
    cast."""
    slot, latest = np.uint64(slots[k]), NOTHING
    for j in range(k, last):
        reader = sources.wiring.slot_operator[np.uint64(slots[j])]
        if np.uint64(state.leader[np.uint64(slots[j])]) == slot and reader != latest:
            now = computing(sources.units.weight_block[np.uint64(reader)])
            add(spans, d, nbytes, GRADIENTS, now, now)
            latest = reader


@lean
def note_gradient(sources: Sources, state: State, slot: Any, spans: Spans) -> None:
    """Where the gradient of the activation that a slot reads is made, in ``spans.reads``."""
    leader = np.uint64(state.leader[slot])
    _note_used(sources, np.uint64(state.need[leader]), np.uint64(state.backward[leader]), ZERO, spans)


@lean
def _note_used(sources: Sources, need: Any, template: Any, before: Any, spans: Spans) -> None:
    """On which devices reshard ``template`` uses a gradient in the layout ``need``, in ``spans.reads``. Its source
    entries are those of that layout, behind so many of others ``before``."""
    layouts, landings = sources.layouts, sources.landings
    for every in range(np.uint64(spans.reads.shape[0])):
        spans.reads[every] = 0
    device = np.uint64(layouts.mesh_first[np.uint64(layouts.layout_mesh[need])])
    first = np.uint64(landings.used_first[template]) + before
    for k in range(entries_of(layouts, need)):
        d = np.uint64(layouts.device[device + k])
        if d < np.uint64(spans.reads.shape[0]):
            spans.reads[d] |= landings.used[first + k]


@lean
def _by_product(sources: Sources, state: State, slot: Any, d: Any) -> Any:
    """Whether a device makes the gradient that it does not use of what a slot reads: one kernel makes three."""
    wiring, layouts, landings = sources.wiring, sources.layouts, sources.landings
    if sources.units.attends[np.uint64(wiring.slot_operator[slot])] == 0 or wiring.slot_position[slot] > 2:
        return False
    query = slot - np.uint64(wiring.slot_position[slot])
    for other in range(query, query + THREE):
        leader = np.uint64(state.leader[other])
        need, template = np.uint64(state.need[leader]), np.uint64(state.backward[leader])
        device = np.uint64(layouts.mesh_first[np.uint64(layouts.layout_mesh[need])])
        first = np.uint64(landings.used_first[template])
        for k in range(entries_of(layouts, need) if template > ZERO else ZERO):
            if np.uint64(layouts.device[device + k]) == d and landings.used[first + k] == 1:
                return True
    return False
