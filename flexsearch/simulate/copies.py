"""What the edges of a plan leave in memory, as ``lifetimes`` defines it, compiled: copies in other layouts, and the
gradients that readers make."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from flexsearch.compiled import ONE, THREE, U32, ZERO, lean
from flexsearch.lower.arrays import NOTHING, State
from flexsearch.lower.bucket import find_added, find_bucket
from flexsearch.lower.change import is_late
from flexsearch.lower.footprints import (
    ALIASED,
    OWN,
    PARTS,
    RECEIVES,
    SENDS,
    STRIDED,
    TAKES_PART,
    TAKES_PART_AGAIN,
    Landings,
)
from flexsearch.lower.interned import entries_of
from flexsearch.lower.schedule import ONCE
from flexsearch.simulate.spans import (
    ACTIVATIONS,
    ALONE,
    BUFFERS,
    COPIES,
    CUT_LATER,
    GATHERED,
    GRADIENTS,
    IN_BOTH_HALVES,
    NOT_KEPT,
    Sources,
    Spans,
    add,
    carry,
    computing,
    end_of,
    joining,
    prolong,
    updating,
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
    found, never = end_of(sources), True
    for j in range(k, last):
        other = np.uint64(slots[j])
        if np.uint64(state.leader[other]) == slot:
            reader = np.uint64(wiring.slot_operator[other])
            if home != NOTHING and blocks.region[reader] != home:
                continue
            if blocks.recompute_of[reader] != NOTHING:
                found, never = min(found, _joining(sources, other, blocks.recompute_of)), False
            elif units.backward[reader] == 1:
                found, never = min(found, _joining(sources, other, units.backward_block)), False
    return sent if never else max(sent, found)


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
        for t in range(np.uint64(wiring.made_first[reader]), np.uint64(wiring.made_last[reader])):
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
def exchanged(sources: Sources, plan: Any, w: Any) -> Any:
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
def land_gradient(landings: Landings, spans: Spans, row: Any, born: Any, when: Any) -> None:
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
        stays = own_part(landings, row)
        if stays > 0:
            add(spans, d, stays, GRADIENTS, begin, when.used - (ONE if role & OWN else ZERO))
        begin = when.used
    if when.carried and role & TAKES_PART:
        # Of each microbatch only what stays is there when it is sent, and added to the sum in the next one.
        stays = copy if landings.middle[row] > 0 else own_part(landings, row)
        carry(spans, add(spans, d, stays, GRADIENTS, when.sent, when.sent), when.used, True)
        if stays < copy:
            add(spans, d, copy - stays, BUFFERS, begin, when.update)
        copy = stays
    add(spans, d, copy, GRADIENTS, begin, when.update)


@lean
def own_part(landings: Landings, row: Any) -> Any:
    """Of a weight's gradient as a device stores it, the bytes that its own pieces make. Where there is a layout in
    between, that is what stays of these instead."""
    copy = landings.copy[row]
    return copy if landings.role[row] & OWN else max(np.int64(0), copy - landings.staged[row])


@lean
def message_bytes(landings: Landings, row: Any, gradient: Any, shared: Any) -> Any:
    """What the messages take into which a device copies parts of a gradient of so many bytes (``gradient``) of which
    another part stays: it goes with others of its bucket, or does not lie in one run of memory. In a bucket the parts
    that stay are cut out one after the other, each from a gradient that then goes: but for that of one weight
    (``shared``, as in ``Units``) they take memory that the messages count."""
    role, middle = landings.role[row], landings.middle[row]
    stays = middle if middle > 0 else own_part(landings, row)
    if role & PARTS == 0 or (shared == ALONE and role & STRIDED == 0) or gradient <= stays:
        return np.int64(0)
    return gradient - stays - (stays if shared == CUT_LATER else np.int64(0))


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
def _made_with_others(sources: Sources, state: State, slot: Any, d: Any) -> Any:
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


@lean
def differentiate(
    sources: Sources, state: State, slots: U32, k: Any, last: Any, template: Any, before: Any, itemsize: Any, part: Any,
    spans: Spans,
) -> Any:  # fmt: skip
    """The gradients that the readers of the edge of ``slots[k]`` make, in ``spans.gradient``, where reshard
    ``template`` uses them, ``before`` whose entries of these are so many of other edges. Returns the moment at which
    they are complete: the backward of the first reader, as that runs last."""
    wiring, layouts, slot = sources.wiring, sources.layouts, np.uint64(slots[k])
    blocks = sources.units.backward_block if part == ACTIVATIONS else sources.units.weight_block
    latest, through, made = ZERO, ZERO, slot
    for j in range(k, last):
        other = np.uint64(slots[j])
        if np.uint64(state.leader[other]) == slot:
            reader = np.uint64(wiring.slot_operator[other])
            if reader != latest:
                through = ZERO
            if sources.units.is_view[reader] == 1 and wiring.slot_position[other] == 0 and part == ACTIVATIONS:
                through = ONE
            latest, made = reader, other
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
            if part == ACTIVATIONS and _made_with_others(sources, state, made, d):
                add(spans, d, nbytes, part, begin, begin)
            continue
        if through == ONE:
            for t in range(np.uint64(wiring.made_first[latest]), np.uint64(wiring.made_last[latest])):
                arrived = np.uint64(spans.arrived[np.uint64(sources.units.place[t]), d])
                # That of a slice is a part of what it makes, that of something expanded more.
                if arrived > ZERO and spans.nbytes[arrived - ONE] == nbytes:
                    handle = arrived
        if handle == ZERO:
            handle = add(spans, d, nbytes, part, begin, begin)
        prolong(spans, handle, now)
        spans.gradient[d] = handle
    return now
