"""What a plan keeps in memory of weights: as they are stored, gathered, and their gradients (see ``lifetimes``)."""

from __future__ import annotations

from typing import Any

import numpy as np

from flexsearch.compiled import ONE, ZERO, lean
from flexsearch.lower.arrays import NOTHING, State
from flexsearch.lower.footprints import ALIASED, SENDS
from flexsearch.lower.interned import entries_of
from flexsearch.simulate.copies import (
    Exchanged,
    differentiate,
    distribute,
    exchanged,
    land_gradient,
    message_bytes,
)
from flexsearch.simulate.spans import (
    BUFFERS,
    GATHERED,
    GRADIENTS,
    OPTIMIZER,
    VALUE,
    WEIGHTS,
    Sources,
    Spans,
    add,
    computing,
    end_of,
    prolong,
    sent_with,
)
from flexsearch.strategy import OVER_ALL, States

_WEIGHTS = np.uint32(States.WEIGHTS * OVER_ALL)


@lean
def hold_weight(sources: Sources, state: State, w: Any, spans: Spans) -> None:
    """A weight as it is stored, the optimizer's state, gathered copies, and gradients."""
    units, blocks, program, landings = sources.units, sources.blocks, sources.program, sources.landings
    pools, p = sources.pools, np.uint64(state.plan[w])
    template, trained, sharding = np.uint64(pools.plan_sync[p]), pools.plan_sync[p] != 0, pools.plan_sharding[p]
    first, last = np.uint64(program.reader_first[w]), np.uint64(program.reader_last[w])
    once = np.uint32(0) < sharding < _WEIGHTS  # gathered for all microbatches
    for row in range(np.uint64(pools.store_first[p]), np.uint64(pools.store_last[p])):
        d, nbytes = np.uint64(pools.store_device[row]), np.int64(pools.store_bytes[row])
        add(spans, d, nbytes, WEIGHTS, ZERO, end_of(sources))
        if trained and units.state_bytes[w] > 0:
            kept = nbytes // units.weight_itemsize[w] * units.state_bytes[w]
            add(spans, d, kept, OPTIMIZER, ZERO, end_of(sources))
    for every in range(np.uint64(spans.born.shape[0])):
        spans.born[every] = 0
    before, when = ZERO, Exchanged(ZERO, ZERO, ZERO, False, False, ZERO)
    if trained:
        when = exchanged(sources, p, w)
    for k in range(first, last):
        slot = np.uint64(program.reader[k])
        if np.uint64(state.leader[slot]) == slot:
            for again in range(2 if blocks.regather_of[w] != NOTHING and not once else 1):
                gather = computing(
                    blocks.regather_of[w] if again else units.once_block[w] if once else blocks.gather_of[w]
                )
                distribute(sources, state, program.reader, k, last, GATHERED, gather, again, NOTHING, spans)
            if trained and program.flows[slot] != VALUE:
                itemsize = units.weight_itemsize[w]
                differentiate(sources, state, program.reader, k, last, template, before, itemsize, GRADIENTS, spans)
                before += entries_of(sources.layouts, np.uint64(state.need[slot]))
                _send_gradients(sources, w, template, when, spans)
    if trained:
        for row in range(np.uint64(landings.landing_first[template]), np.uint64(landings.landing_last[template])):
            born = np.uint64(spans.born[np.uint64(landings.device[row])])
            # Where no piece makes a gradient, nothing is there before they are sent.
            land_gradient(landings, spans, row, born if born > ZERO else when.sent, when)


@lean
def _send_gradients(sources: Sources, w: Any, template: Any, when: Any, spans: Spans) -> None:
    """Keep the gradients of an edge until they are sent (``when``: ``copies.Exchanged``); those that are stored as they
    are until the update; those of which a part is cut out that stays, until they are complete, if they are summed over
    microbatches."""
    landings, units = sources.landings, sources.units
    for row in range(np.uint64(landings.landing_first[template]), np.uint64(landings.landing_last[template])):
        d, role = np.uint64(landings.device[row]), landings.role[row]
        handle = np.uint64(spans.gradient[d])
        if handle > ZERO:
            if role & SENDS or (when.summed and role & ALIASED == 0):
                prolong(spans, handle, when.sent)
            elif role & ALIASED == 0:
                prolong(spans, handle, sent_with(spans.last[handle - ONE]))
            spans.born[d] = max(spans.born[d], spans.last[handle - ONE])
            if role & ALIASED:
                prolong(spans, handle, when.update)
            elif role & SENDS:
                message = message_bytes(landings, row, spans.nbytes[handle - ONE], units.shared[w])
                if message != 0:
                    add(spans, d, message, BUFFERS, when.sent, when.sent)
