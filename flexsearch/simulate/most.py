"""A quick upper bound of what a unit takes in memory, compiled: where even that fits, spans need not be listed."""

from __future__ import annotations

from typing import Any

import numpy as np

from flexsearch.compiled import ONE, lean
from flexsearch.lower.arrays import NOTHING, Pools, State
from flexsearch.lower.interned import Interned, entries_of
from flexsearch.simulate.lifetimes import besides
from flexsearch.simulate.spans import AT_HAND, VALUE, WEIGHT, Sources


@lean
def most_bytes(sources: Sources, state: State, u: Any) -> Any:
    """At most so many bytes does unit ``u`` take on any device, all its spans together."""
    units, wiring, pools = sources.units, sources.wiring, sources.pools
    blocks, landings = sources.blocks, sources.landings
    total = np.int64(0)
    if units.root[u] == AT_HAND:
        total = units.at_hand_bytes[np.uint64(units.tensor[u])]
    elif units.root[u] == WEIGHT:
        w = np.uint64(units.tensor[u])
        p = np.uint64(state.plan[w])
        stored = _most_stored(pools, p)
        total = stored + stored // units.weight_itemsize[w] * units.state_bytes[w]
        total += landings.most[np.uint64(pools.plan_sync[p])]
        times = np.int64(2 if blocks.regather_of[w] != NOTHING else 1)
        for k in range(np.uint64(sources.program.reader_first[w]), np.uint64(sources.program.reader_last[w])):
            slot = np.uint64(sources.program.reader[k])
            total += times * _most_of_edge(sources, state, slot, units.weight_itemsize[w])
            total += _most_of_gradient(sources, state, slot, units.weight_itemsize[w])  # the message with it
    for a in range(np.uint64(units.activation_first[u]), np.uint64(units.activation_last[u])):
        t = np.uint64(units.activation[a])
        producer = np.uint64(wiring.tensor_producer[t])
        at = np.uint64(pools.config_writes[np.uint64(state.config[producer])]) + np.uint64(wiring.tensor_output[t])
        elements = _most_elements(sources.layouts, np.uint64(pools.layout[at]))
        more = elements * units.itemsize[t] + besides(units, producer, elements, units.itemsize[t])
        if units.attends[producer] == 1:  # at most 3 (q + k) elements in each pass
            reads = np.uint64(pools.config_reads[np.uint64(state.config[producer])])
            queries = _most_elements(sources.layouts, np.uint64(pools.layout[reads]))
            keys = _most_elements(sources.layouts, np.uint64(pools.layout[reads + ONE]))
            more += np.int64(6) * (queries + keys) * units.itemsize[t]
        for k in range(np.uint64(wiring.tensor_first[t]), np.uint64(wiring.tensor_last[t])):
            more += _most_of_edge(sources, state, np.uint64(wiring.tensor_slot[k]), units.itemsize[t])
        for k in range(np.uint64(wiring.result_first[t]), np.uint64(wiring.result_last[t])):
            more += landings.most[np.uint64(state.forward[np.uint64(wiring.result_slot[k])])]
        total += more if blocks.recompute_of[producer] == NOTHING else np.int64(2) * more
    return total


@lean
def _most_of_edge(sources: Sources, state: State, slot: Any, itemsize: Any) -> Any:
    """At most so many bytes are copies and gradients of a slot's edge, on any device; 0 if another slot leads it."""
    landings = sources.landings
    if np.uint64(state.leader[slot]) != slot:
        return np.int64(0)
    total = landings.most[np.uint64(state.forward[slot])] + landings.most[np.uint64(state.backward[slot])]
    total += landings.most[np.uint64(state.kept[slot])]
    return total + _most_of_gradient(sources, state, slot, itemsize)


@lean
def _most_of_gradient(sources: Sources, state: State, slot: Any, itemsize: Any) -> Any:
    """The same of the gradient that the pieces make of an edge."""
    if np.uint64(state.leader[slot]) != slot or sources.program.flows[slot] == VALUE:
        return np.int64(0)
    return _most_elements(sources.layouts, np.uint64(state.need[slot])) * itemsize


@lean
def _most_elements(layouts: Interned, layout: Any) -> Any:
    """The largest piece of a layout, of which no device has several."""
    most, first = np.int64(0), np.uint64(layouts.grid_first[np.uint64(layouts.layout_grid[layout])])
    for k in range(entries_of(layouts, layout)):
        most = max(most, layouts.volume[first + k])
    return most


@lean
def _most_stored(pools: Pools, p: Any) -> Any:
    """The most bytes that a weight's plan stores on one device."""
    most = np.int64(0)
    for row in range(np.uint64(pools.store_first[p]), np.uint64(pools.store_last[p])):
        most = max(most, np.int64(pools.store_bytes[row]))
    return most
