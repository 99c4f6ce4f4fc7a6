"""What a plan keeps in memory of weights: as they are stored, gathered, and their gradients (see ``lifetimes``)."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from flexsearch.compiled import ONE, ZERO, lean
from flexsearch.lower.arrays import NOTHING, State
from flexsearch.lower.bucket import find_added, find_bucket
from flexsearch.lower.footprints import ALIASED, OWN, PARTS, SENDS, STRIDED, TAKES_PART, TAKES_PART_AGAIN, Landings
from flexsearch.lower.interned import entries_of
from flexsearch.lower.schedule import ONCE
from flexsearch.simulate.copies import distribute
from flexsearch.simulate.gradients import differentiate
from flexsearch.simulate.spans import (
    ALONE,
    BUFFERS,
    CUT_LATER,
    GATHERED,
    GRADIENTS,
    OPTIMIZER,
    VALUE,
    WEIGHTS,
    Sources,
    Spans,
    add,
    carry,
    computing,
    end_of,
    prolong,
    sent_with,
    updating,
)
from flexsearch.strategy import OVER_ALL, States

_WEIGHTS = np.uint32(States.WEIGHTS * OVER_ALL)


class Exchanged(NamedTuple):
    """When a weight's gradients are exchanged: moments at which the first phase is ``sent`` and the second ``again``,
    and at which what they bring is ``used``; in the next microbatch if it is ``carried`` over. ``summed``: they are
    summed over the microbatches before. ``update``: when the weight is updated."""

    sent: Any
    again: Any
    used: Any
    carried: Any
    summed: Any
    update: Any


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
        when = _exchanged(sources, p, w)
    for k in range(first, last):
        slot = np.uint64(program.reader[k])
        if np.uint64(state.leader[slot]) == slot:
            for again in range(2 if blocks.regather_of[w] != NOTHING and not once else 1):
                gather = computing(
                    blocks.regather_of[w] if again else units.once_block[w] if once else blocks.gather_of[w]
                )
                distribute(sources, state, program.reader, k, last, GATHERED, gather, again, NOTHING, spans)
            if trained and program.flows[slot] != VALUE:
                held, computed = units.gradient_itemsize[w], units.weight_itemsize[w]
                cast = computed if held != computed else np.int64(0)
                differentiate(sources, state, program.reader, k, last, template, before, held, GRADIENTS, cast, spans)
                before += entries_of(sources.layouts, np.uint64(state.need[slot]))
                _send_gradients(sources, w, template, when, spans)
    if trained:
        for row in range(np.uint64(landings.landing_first[template]), np.uint64(landings.landing_last[template])):
            born = np.uint64(spans.born[np.uint64(landings.device[row])])
            # Where no piece makes a gradient, nothing is there before they are sent.
            _land_gradient(landings, spans, row, born if born > ZERO else when.sent, when)


@lean
def _send_gradients(sources: Sources, w: Any, template: Any, when: Any, spans: Spans) -> None:
    """Keep the gradients of an edge until they are sent (``when``: ``Exchanged``); those that are stored as they
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
                message = _message_bytes(landings, row, spans.nbytes[handle - ONE], units.shared[w])
                if message != 0:
                    add(spans, d, message, BUFFERS, when.sent, when.sent)


@lean
def _exchanged(sources: Sources, plan: Any, w: Any) -> Any:
    """``Exchanged`` of weight ``w``, which is trained, under a plan of it. One that is in no bucket, as a recipe
    synchronises it, keeps its gradients until the update."""
    blocks, sharding, update = sources.blocks, sources.pools.plan_sharding[plan], updating(sources)
    if blocks.bucket[w] == NOTHING:
        return Exchanged(update + ONE, update + ONE, update, True, False, update)
    bucket = np.uint64(find_bucket(blocks, sharding, w))
    sent, again = np.uint64(blocks.started_by[bucket]), np.uint64(blocks.finished_by[bucket])
    used = np.uint64(find_added(blocks, sharding, bucket))
    first, second = computing(sent) + ONE, computing(again) + ONE
    return Exchanged(first, second, computing(used), used <= sent, blocks.sums[bucket] == ONCE, update)


@lean
def _land_gradient(landings: Landings, spans: Spans, row: Any, born: Any, when: Any) -> None:
    """What the synchronisation of a weight leaves on a device: its gradient as it is stored, until the update, the
    layout in between, receive buffers. ``born``: since when its pieces have made all of theirs, of which it
    cuts out what stays, unless it sends the rest; ``when``: ``Exchanged``. The layout in between is put together before
    the second phase, from which on it is kept, and the gradient when it is used: until then there is what the device
    keeps of its own."""
    d, role = np.uint64(landings.device[row]), landings.role[row]
    twice, copy, staged = role & TAKES_PART_AGAIN != 0, landings.copy[row], landings.staged[row]
    begin = when.sent if role & SENDS else born
    last = when.again if twice else when.used
    if landings.middle[row] > 0:
        middle = when.sent if role & TAKES_PART else born
        kept = add(spans, d, landings.middle[row], BUFFERS, middle, max(when.used, when.again) if twice else middle)
        carry(spans, kept, when.used, twice and when.carried)
    if staged > 0:
        carry(spans, add(spans, d, staged, BUFFERS, when.sent, last), when.used, when.carried and not twice)
    if landings.staged_again[row] > 0:
        again = add(spans, d, landings.staged_again[row], BUFFERS, when.again, when.used)
        carry(spans, again, when.used, when.carried)
    if copy == 0:
        return
    if twice:
        begin = when.again if when.carried else max(when.used, when.again)
    elif staged > 0 and not when.carried and (role & OWN == 0 or landings.middle[row] == 0):
        # What the device keeps of its own: what arrives is added to that, or put beside it.
        stays = _own_part(landings, row)
        if stays > 0:
            add(spans, d, stays, GRADIENTS, begin, when.used - (ONE if role & OWN else ZERO))
        begin = when.used
    if when.carried and role & TAKES_PART:
        # Of each microbatch only what stays is there when it is sent, and added to the sum in the next one.
        stays = copy if landings.middle[row] > 0 else _own_part(landings, row)
        carry(spans, add(spans, d, stays, GRADIENTS, when.sent, when.sent), when.used, True)
        if stays < copy:
            add(spans, d, copy - stays, BUFFERS, begin, when.update)
        copy = stays
    add(spans, d, copy, GRADIENTS, begin, when.update)


@lean
def _own_part(landings: Landings, row: Any) -> Any:
    """Of a weight's gradient as a device stores it, the bytes that its own pieces make. Where there is a layout in
    between, that is what stays of these instead."""
    copy = landings.copy[row]
    return copy if landings.role[row] & OWN else max(np.int64(0), copy - landings.staged[row])


@lean
def _message_bytes(landings: Landings, row: Any, gradient: Any, shared: Any) -> Any:
    """What the messages take into which a device copies parts of a gradient of so many bytes (``gradient``) of which
    another part stays: it goes with others of its bucket, or does not lie in one run of memory. In a bucket the parts
    that stay are cut out one after the other, each from a gradient that then goes: but for that of one weight
    (``shared``, as in ``Units``) they take memory that the messages count."""
    role, middle = landings.role[row], landings.middle[row]
    stays = middle if middle > 0 else _own_part(landings, row)
    if role & PARTS == 0 or (shared == ALONE and role & STRIDED == 0) or gradient <= stays:
        return np.int64(0)
    return gradient - stays - (stays if shared == CUT_LATER else np.int64(0))
