"""The copies in other layouts that the edges of a plan leave in memory, as ``lifetimes`` defines it, compiled."""

from __future__ import annotations

from typing import Any

import numpy as np

from flexsearch.compiled import ONE, U32, ZERO, lean
from flexsearch.lower.arrays import NOTHING, State
from flexsearch.lower.change import is_late
from flexsearch.lower.footprints import (
    ALIASED,
    RECEIVES,
    TAKES_PART,
    TAKES_PART_AGAIN,
    Landings,
)
from flexsearch.simulate.gradients import note_gradient
from flexsearch.simulate.spans import (
    ACTIVATIONS,
    BUFFERS,
    COPIES,
    GATHERED,
    IN_BOTH_HALVES,
    NOT_KEPT,
    Sources,
    Spans,
    add,
    computing,
    end_of,
    joining,
    prolong,
)


@lean
def distribute(
    sources: Sources, state: State, slots: U32, k: Any, last: Any, place: Any, now: Any, again: Any, home: Any,
    spans: Spans,
) -> None:  # fmt: skip
    """The copies that an edge makes of an activation or weight, by its reshard: of the reader ``slots[k]`` and those
    from there to ``last`` that share its edge. ``now``: the moment before it is sent; ``place``: of an activation,
    where the handles of the original are; of a weight GATHERED; ``again``: in the backward pass; ``home``: the region
    of the activation's producer."""
    landings, slot = sources.landings, np.uint64(slots[k])
    gathered = place == GATHERED
    template = np.uint64(state.forward[slot])
    if gathered and state.kept[slot] != 0:
        template = np.uint64(state.kept[slot])
    sent = now + ONE
    spared = until = ZERO
    for backward in range(2):
        spared, until = until, _use(sources, state, slots, k, last, gathered, again, home, backward)
    partner = _only_gradient(sources, state, slots, k, last)
    if partner != NOTHING:
        note_gradient(sources, state, np.uint64(partner), spans)
    if gathered:
        joined = begins = _unpacking(sources, slot, again, sent)
    else:
        joined = begins = _first_use(sources, state, slots, k, last, again, home, sent)
    if gathered and again == 0 and not _gathered_each(sources, slot, now):
        begins = sent  # it is there once, not from one moment of each microbatch on
    for row in range(np.uint64(landings.landing_first[template]), np.uint64(landings.landing_last[template])):
        d, role = np.uint64(landings.device[row]), landings.role[row]
        original = ZERO
        if not gathered:
            original = np.uint64(spans.again[place, d] if again else spans.output[place, d])
            leave(landings, spans, row, original, sent, joined)
        holder = land(landings, spans, row, sent, joined, begins, COPIES if gathered else ACTIVATIONS)
        if role & ALIASED:
            holder = original
        if holder > ZERO:
            prolong(spans, holder, spared if partner != NOTHING and spans.reads[d] == 0 else until)
            for j in range(k, last):
                hand_on(sources, state, np.uint64(slots[j]), slot, d, holder, again, home, spans)


@lean
def _gathered_each(sources: Sources, slot: Any, now: Any) -> Any:
    """Whether the weight that a slot reads is gathered at ``now`` for each microbatch."""
    blocks, w = sources.blocks, np.uint64(sources.wiring.slot_tensor[slot])
    each = blocks.regather_of[w] != NOTHING and now == computing(blocks.gather_of[w])
    return each or sources.units.several[0] == 0


@lean
def _unpacking(sources: Sources, slot: Any, again: Any, sent: Any) -> Any:
    """When what is ``sent`` of the weight that a slot reads is put together."""
    units, w = sources.units, np.uint64(sources.wiring.slot_tensor[slot])
    return max(sent, joining(units.unpack_again_block[w] if again else units.unpack_block[w], False))


@lean
def _first_use(
    sources: Sources, state: State, slots: U32, k: Any, last: Any, again: Any, home: Any, sent: Any
) -> Any:  # fmt: skip
    """When what the edge of ``slots[k]`` brings is put together for the first of the readers that share it; if there is
    none, or one that need not wait, when it is ``sent``."""
    units, blocks, wiring, slot = sources.units, sources.blocks, sources.wiring, np.uint64(slots[k])
    if k == last:
        return sent
    if not again:
        for j in range(k, last):
            other = np.uint64(slots[j])
            late = is_late(blocks, sources.program, np.uint64(wiring.slot_operator[other]))
            if np.uint64(state.leader[other]) == slot and not late:
                return max(sent, _joining(sources, other, blocks.forward_of))
        return max(sent, _joining(sources, slot, units.backward_block))
    earliest, never = end_of(sources), True
    for j in range(k, last):
        other = np.uint64(slots[j])
        if np.uint64(state.leader[other]) == slot:
            reader = np.uint64(wiring.slot_operator[other])
            if home != NOTHING and blocks.region[reader] != home:
                continue
            if blocks.recompute_of[reader] != NOTHING:
                earliest, never = min(earliest, _joining(sources, other, blocks.recompute_of)), False
            elif units.backward[reader] == 1:
                earliest, never = min(earliest, _joining(sources, other, units.backward_block)), False
    return sent if never else max(sent, earliest)


@lean
def _joining(sources: Sources, slot: Any, block: U32) -> Any:
    """When what a slot reads is put together for a pass of its reader, which has the blocks ``block``."""
    return joining(block[np.uint64(sources.wiring.slot_operator[slot])], sources.wiring.slot_position[slot] == 0)


@lean
def _use(
    sources: Sources, state: State, slots: U32, k: Any, last: Any, gathered: Any, again: Any, home: Any, backward: Any
) -> Any:  # fmt: skip
    """The last moment at which readers that share the edge of ``slots[k]`` need what it brings; those that are not
    gathered again count for their ``backward`` passes only if that is not 0."""
    units, blocks, wiring, slot = sources.units, sources.blocks, sources.wiring, np.uint64(slots[k])
    if k == last:
        return end_of(sources)
    until = ZERO
    twice = gathered and state.kept[slot] == 0
    twice = twice and blocks.regather_of[np.uint64(wiring.slot_tensor[slot])] != NOTHING
    for j in range(k, last):
        other = np.uint64(slots[j])
        if np.uint64(state.leader[other]) != slot:
            continue
        reader = np.uint64(wiring.slot_operator[other])
        if again and not gathered and blocks.region[reader] != home:
            continue
        repeated = blocks.recompute_of[reader] != NOTHING
        if not again and not is_late(blocks, sources.program, reader):
            until = max(until, computing(blocks.forward_of[reader]))
            if twice or (not gathered and repeated and blocks.region[reader] == home):
                continue  # what comes later is gathered or computed again
        if repeated and (gathered or again or blocks.region[reader] != home):
            until = max(until, computing(blocks.recompute_of[reader]))
        if not (backward or (gathered and again)):
            continue
        if units.backward[reader] == 1 and not gathered and units.saves_inputs[reader] == 1:
            until = max(until, computing(units.weight_block[reader]))
        if gathered and (again or units.keeps_weight[other] != NOT_KEPT):
            late = units.keeps_weight[other] == IN_BOTH_HALVES
            until = max(until, computing(units.weight_block[reader] if late else units.backward_block[reader]))
    return until


@lean
def last_use(sources: Sources, state: State, slots: U32, k: Any) -> Any:
    """The last moment at which the reader ``slots[k]`` needs what it reads of a tensor at hand."""
    return _use(sources, state, slots, k, k + ONE, False, ZERO, NOTHING, ONE)


@lean
def _only_gradient(sources: Sources, state: State, slots: U32, k: Any, last: Any) -> Any:
    """The slot whose gradient alone the backward passes of the readers of an edge need it for, if there is one reader;
    else NOTHING."""
    partner, readers = NOTHING, ZERO
    for j in range(k, last):
        other = np.uint64(slots[j])
        if state.leader[other] == state.leader[np.uint64(slots[k])]:
            readers += ONE
            partner = sources.units.only_gradient[other] if readers == ONE else NOTHING
    return partner


@lean
def hand_on(
    sources: Sources, state: State, slot: Any, leader: Any, d: Any, holder: Any, again: Any, home: Any, spans: Spans
) -> None:
    """If the reader's outputs are views of what it reads here, what holds this holds them."""
    wiring, units, blocks = sources.wiring, sources.units, sources.blocks
    if np.uint64(state.leader[slot]) != leader or wiring.slot_position[slot] != 0:
        return
    reader = np.uint64(wiring.slot_operator[slot])
    if units.is_view[reader] == 1:
        inside = blocks.recompute_of[reader] != NOTHING and blocks.region[reader] == home
        for t in range(np.uint64(wiring.output_first[reader]), np.uint64(wiring.output_last[reader])):
            if not again:
                spans.output[np.uint64(units.place[t]), d] = holder
            if inside == (again != 0):  # what a region reads from outside is there once
                spans.again[np.uint64(units.place[t]), d] = holder


@lean
def leave(landings: Landings, spans: Spans, row: Any, original: Any, sent: Any, joined: Any) -> None:
    """Keep what a device sends of an activation or its gradient, or cuts a copy from, until it has been ``sent``, or
    where a copy is made of a part of it and of what arrives, until it is put together (``joined``), of two phases by
    the first."""
    if landings.role[row] & TAKES_PART:
        prolong(spans, original, joined if landings.staged[row] > 0 and landings.middle[row] == 0 else sent)
    elif landings.copy[row] > 0 or landings.middle[row] > 0:
        prolong(spans, original, sent)


@lean
def arrives_in_parts(landings: Landings, row: Any) -> Any:
    """Whether the last phase of a reshard brings a device only parts of what it is for."""
    return landings.staged_again[row] > 0 or (landings.staged[row] > 0 and landings.middle[row] == 0)


@lean
def land(landings: Landings, spans: Spans, row: Any, sent: Any, joined: Any, begins: Any, part: Any) -> Any:
    """What a reshard of an activation, its gradient or a weight leaves on a device: the copy (its handle is
    returned; 0: none), the layout in between, receive buffers. ``sent``: the moment of both phases, from which on there
    is what the device cuts from what it has, too; ``joined``: when what arrives is put together, right before a
    computation waits for it; ``begins``: since when the result of that counts. What the first of two phases brings is
    put together before the second one."""
    d, role, middle = np.uint64(landings.device[row]), landings.role[row], landings.middle[row]
    staged, again = landings.staged[row], landings.staged_again[row]
    if middle > 0:
        last = joined if landings.copy[row] > again > 0 else sent  # a part of it stays here
        add(spans, d, middle, BUFFERS, sent, last if role & TAKES_PART_AGAIN else sent)
    if middle > 0:
        staged = max(np.int64(0), staged - again)  # gone when what the second phase brings comes
    if staged > 0:
        add(spans, d, staged, BUFFERS, sent, sent if middle > 0 else joined)
    if again > 0:
        add(spans, d, again, BUFFERS, sent, joined)
    copies = part == ACTIVATIONS or role & RECEIVES != 0  # a part that is cut from a stored weight is a view
    if copies and landings.copy[row] > 0:
        begin = max(sent, begins) if arrives_in_parts(landings, row) else sent
        return add(spans, d, landings.copy[row], part, begin, begin)
    return ZERO
