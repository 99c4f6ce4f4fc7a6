"""What a plan keeps in memory on every device, and from when to when: the one definition, compiled.

Memory needs no times: each device runs the blocks of a plan in a fixed order, and a block has four **moments**: its
first operand is put together (number 4 * block), the others are (4 * block + 1), it computes (4 * block + 2), and it
communicates (4 * block + 3). A **span** is bytes on a device from its first to its last moment, both included. These
are the spans:

- **At hand**, all the time: of inputs, buffers and constants the smallest box that holds all that a device's pieces
  read in all microbatches, from the first row to the last; weights as they are stored, with the optimizer's state for
  those that are trained (one copy for momentum, two for adam; of weights in half precision: in float32, and a master
  copy besides). Of images at hand a CPU makes copies with the channels last (``graph.ops.formats``), of what readers
  want alike: from the first of them to the last use.
- A **gathered weight**, whatever is kept in parts of it (``strategy.States``: in parts it is stored, too): from the
  communication that brings it to the last forward, and to the backwards that need it (``graph.ops.kept_weights``). It
  is gathered once, for both directions. A part cut from what the device stores is a view and takes nothing.
- An **output**: from the forward that makes it to the last of: its readers' forwards; the backwards that use it
  (``saved_tensors``); the communication that sends it, which lets go of it when it has been issued. What an operator
  saves besides lives from its forward to its backward. What attention on a CPU makes wider is there while it computes,
  in each pass (``graph.ops.zeros``). An output that is its input's memory (a view) has no span of its
  own: what uses it prolongs the input's.
- A **copy** in another layout: from the communication that brings it (or from the forward, if it is cut from what the
  device has) to the last reader's use, as above. Where a device gets exactly what it has, there is none, and readers
  prolong the original. A result (the loss, a buffer's new value) is kept to the end of the step; the loss of a
  microbatch is added to that of the others where it is made.
- What is **computed again** (``lower.recompute``) has all of this twice: from its forward pass it lives for readers'
  forward passes alone, unless they are outside of its checkpointed region; from its second forward pass for what its
  region needs in the backward pass. What a region reads from outside lives until the region reads it again, and to the
  backwards that use it. A weight that is **gathered again** lives from each gather to the last use before the next.
- The **layout in between** of a reshard of two phases, which is put together before the second one: from the first
  communication that the device takes part in to that of the second phase, or until a copy is put together from a part
  of it; of gradients of weights, which a device keeps its part of, until they are added.
- A **receive buffer**, for what is only a part of what it is for, or is added to more: from the communication to the
  first computation that waits for it. Right before that, what it reads is put together: the first operand, in a
  backward pass the gradient of the output, and then the others. There the buffer and what else it is made of end, and
  the copy begins. What the first of two phases brings has gone when the rest comes, so that of the smaller of both
  nothing more is counted. Weights that are gathered together are put together where the first of
  them is read (``Units.unpack_block``); those that are gathered once for several microbatches count from the
  communication on.
- The **gradient of an activation**, as the readers' pieces make it: from the first backward that adds to it (the last
  reader's) to the last one, and until it has been sent; its copies in the producer's layout until the producer's
  backward. What readers in several layouts leave there is added up, at once where nothing is received for it on the
  device, else where it is put together: there is one sum. What is added to it needs no copy of that size where the
  sum has memory of its own, as it was received, or is larger than what a reader made of it. An operator whose output
  is its input's memory, all of it once, hands its gradient on as it is, and so does one whose weights' gradients
  another makes, to that.
- Where nothing is made of a gradient, as a replica sends its own, it is not made, unless attention's kernel makes it
  with others: then it is there while that runs. What an operator keeps for that gradient alone
  (``Units.only_gradient``) goes after its forward.
- The **gradient of a weight**, as the pieces make it: likewise, until it has been sent to be synchronised. Where it is
  held in another type (``OperatorGraph.gradient``), what each reader makes is there, too, while that computes: it is
  cast, or added to what earlier readers and microbatches made. As it is stored: from that communication to the update,
  or from where it is added, if it is put together there: behind two phases, or of parts (the device's own is there
  until then, or if it is as large, until right before). Where a part stays and nothing is sent, it is cut out behind
  the backward, or with the synchronisation if gradients are summed over the microbatches. Where both are the same
  memory, until the update. Of weights that are kept in parts, what a communication brings lives until it is added,
  where a later bucket is sent (``lower.schedule``), or the second phase; with several microbatches to the sum, which is
  there from the first one on. What the last buckets of a stage bring is added where the next microbatch sends its first
  one, or by the update; the part that stays lives as long, beside the sum.
- The **message** with parts of a weight's gradient of which another part stays, if it is a copy, when it is sent: that
  of a bucket with several weights, or of a part that does not lie in one run of memory
  (``weight_lifetimes._message_bytes``).

Where a schedule splits backward passes, an operator with trained weights has two: the first makes the gradients of its
other inputs, the second those of its weights. What it saved and the gradients of its outputs live until the second, a
gathered weight of a product until the first (``graph.ops.released_weights``); the gradient of a weight begins with the
second.

"Last" means last in the order of blocks. A microbatch passes the blocks of a stage in that order, and so do the weight
gradients of all stages of a device. But where a device holds two stages, the weight gradients of the later stage may
run after the input gradients of the earlier one: what both use is taken to be let go with the latter.

Not counted: workspace inside a kernel, what a communication library keeps until the other side has taken it,
fragmentation, the libraries themselves.

Spans are grouped in **units**: an activation, a weight or a tensor at hand, together with everything that is a view of
it. The spans of a unit follow from the configs of the operators that make and read its tensors, and from nothing else.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flexsearch.compiled import ONE, ZERO, lean
from flexsearch.graph.ops.formats import takes_copy
from flexsearch.graph.ops.zeros import backward_elements, forward_elements, parts_of
from flexsearch.lower.arrays import NOTHING, State
from flexsearch.lower.change import ALWAYS, is_late
from flexsearch.lower.footprints import ALIASED, RECEIVES
from flexsearch.lower.interned import entries_of, rank_of
from flexsearch.simulate.copies import (
    arrives_in_parts,
    distribute,
    hand_on,
    land,
    last_use,
    leave,
)
from flexsearch.simulate.gradients import differentiate, note_gradient
from flexsearch.simulate.spans import (
    ACTIVATIONS,
    AT_HAND,
    GRADIENT,
    VALUE,
    WEIGHT,
    Sources,
    Spans,
    Units,
    add,
    computing,
    end_of,
    joining,
    prolong,
)
from flexsearch.simulate.weight_lifetimes import hold_weight

_takes_copy = lean(takes_copy)
_parts_of, _forward_elements = lean(parts_of), lean(forward_elements)
_backward_elements = lean(backward_elements)


@lean
def list_spans(sources: Sources, state: State, u: Any, spans: Spans) -> None:
    """The spans of unit ``u``."""
    units = sources.units
    spans.size[0] = ZERO
    first, last = np.uint64(units.activation_first[u]), np.uint64(units.activation_last[u])
    for place in range(last - first):
        for d in range(np.uint64(spans.gradient.shape[0])):
            spans.output[place, d] = 0
            spans.again[place, d] = 0
            spans.arrived[place, d] = 0
    if units.root[u] == AT_HAND:
        t = np.uint64(units.tensor[u])
        begin, end = np.uint64(units.reader_first[t]), np.uint64(units.reader_last[t])
        part = np.uint64(units.part[t])
        _hold_box(sources, state, begin, end, t, part, spans)
        if units.at_hand_copied[t] == 1:
            for k in range(begin, end):
                _hold_image(sources, state, begin, k, end, t, spans)
    elif units.root[u] == WEIGHT:
        hold_weight(sources, state, np.uint64(units.tensor[u]), spans)
    for k in range(first, last):
        _forward(sources, state, np.uint64(units.activation[k]), spans)
    for k in range(last - first):
        _backward(sources, state, np.uint64(units.activation[last - ONE - k]), spans)


@lean
def _hold_box(sources: Sources, state: State, begin: Any, end: Any, t: Any, part: Any, spans: Spans) -> None:
    """The bounding box of what the readers ``begin`` to ``end`` of a tensor at hand want on each device, in all
    microbatches, all the time."""
    layouts, units = sources.layouts, sources.units
    for every in range(np.uint64(spans.reads.shape[0])):
        spans.reads[every] = 0
    rank = ZERO
    for k in range(begin, end):
        slot = np.uint64(units.reader[k])
        if sources.program.flows[slot] == GRADIENT:
            continue
        layout = _read_layout(sources, state, slot)
        rank, box = rank_of(layouts, layout), np.uint64(layouts.grid_box[np.uint64(layouts.layout_grid[layout])])
        first = np.uint64(layouts.mesh_first[np.uint64(layouts.layout_mesh[layout])])
        for row in range(entries_of(layouts, layout)):
            d = np.uint64(layouts.device[first + row])
            if d >= np.uint64(spans.reads.shape[0]):  # in another block, which does the same
                continue
            for r in range(rank):
                low, high = layouts.box[box + row * rank + r, 0], layouts.box[box + row * rank + r, 1]
                if spans.reads[d] == 1:
                    low, high = min(low, spans.low[d, r]), max(high, spans.high[d, r])
                spans.low[d, r], spans.high[d, r] = low, high
            spans.reads[d] = 1
    for reading in range(np.uint64(spans.reads.shape[0])):
        if spans.reads[reading] == 1:
            nbytes = units.at_hand_itemsize[t]
            for r in range(rank):
                rows = spans.high[reading, r] - spans.low[reading, r]
                nbytes *= rows + units.at_hand_shift[t] if r == 0 else rows
            add(spans, reading, nbytes, part, ZERO, end_of(sources))


@lean
def _read_layout(sources: Sources, state: State, slot: Any) -> Any:
    """The layout in which the reader of a slot wants what is at hand."""
    wiring, pools = sources.wiring, sources.pools
    config = np.uint64(state.config[np.uint64(wiring.slot_operator[slot])])
    return np.uint64(pools.layout[np.uint64(pools.config_reads[config]) + np.uint64(wiring.slot_position[slot])])


@lean
def _hold_image(sources: Sources, state: State, begin: Any, k: Any, end: Any, t: Any, spans: Spans) -> None:
    """The copies, channels last, of an image at hand for the reader k of those from ``begin`` to ``end``, and for the
    later ones that want the same of it: from the first of them to the last use."""
    units, blocks, layouts = sources.units, sources.blocks, sources.layouts
    slot = np.uint64(units.reader[k])
    for j in range(begin, k):
        if _reads_alike(sources, state, slot, np.uint64(units.reader[j])):
            return
    if sources.program.flows[slot] == GRADIENT:
        return
    begun, until = end_of(sources), ZERO
    for j in range(k, end):
        other = np.uint64(units.reader[j])
        if _reads_alike(sources, state, slot, other):
            reader = np.uint64(sources.wiring.slot_operator[other])
            passes = units.backward_block if is_late(blocks, sources.program, reader) else blocks.forward_of
            begun = min(begun, computing(passes[reader]))
            until = max(until, last_use(sources, state, units.reader, j))
    layout = _read_layout(sources, state, slot)
    first = np.uint64(layouts.mesh_first[np.uint64(layouts.layout_mesh[layout])])
    grid = np.uint64(layouts.layout_grid[layout])
    entry, box = np.uint64(layouts.grid_first[grid]), np.uint64(layouts.grid_box[grid])
    for row in range(entries_of(layouts, layout)):
        d = np.uint64(layouts.device[first + row])
        if d >= np.uint64(spans.reads.shape[0]) or units.at_hand_image[t, d] == 0:
            continue
        at, volume = box + row * rank_of(layouts, layout), layouts.volume[entry + row]
        samples, channels = layouts.box[at, 1] - layouts.box[at, 0], layouts.box[at + ONE, 1] - layouts.box[at + ONE, 0]
        if _takes_copy(channels, volume // (samples * channels)):
            handle = add(spans, d, volume * units.at_hand_itemsize[t], ACTIVATIONS, begun, until)
            for j in range(k, end):
                other = np.uint64(units.reader[j])
                if _reads_alike(sources, state, slot, other):
                    hand_on(sources, state, other, other, d, handle, 0, NOTHING, spans)


@lean
def _reads_alike(sources: Sources, state: State, slot: Any, other: Any) -> Any:
    """Whether the readers of two slots want the same of what is at hand."""
    alike = _read_layout(sources, state, slot) == _read_layout(sources, state, other)
    return alike and sources.program.flows[slot] == sources.program.flows[other]


# ---- activations


@lean
def _forward(sources: Sources, state: State, t: Any, spans: Spans) -> None:
    """An activation where it is made, and its copies for its readers; likewise where it is computed again."""
    units, blocks, wiring = sources.units, sources.blocks, sources.wiring
    producer, place = np.uint64(wiring.tensor_producer[t]), np.uint64(units.place[t])
    first, last = np.uint64(wiring.tensor_first[t]), np.uint64(wiring.tensor_last[t])
    for again in range(2 if blocks.recompute_of[producer] != NOTHING else 1):
        now = computing(blocks.recompute_of[producer] if again else blocks.forward_of[producer])
        if sources.program.late[producer] == 1:  # only its gradient is ever there
            return
        if units.is_view[producer] == 0:
            _make(sources, state, t, producer, now, again, spans)
        for k in range(first, last):
            slot = np.uint64(wiring.tensor_slot[k])
            if np.uint64(state.leader[slot]) == slot and (
                not again or blocks.region[np.uint64(wiring.slot_operator[slot])] == blocks.region[producer]
            ):
                home = blocks.region[producer]
                distribute(sources, state, wiring.tensor_slot, k, last, place, now, again, home, spans)
    for k in range(np.uint64(wiring.result_first[t]), np.uint64(wiring.result_last[t])):
        returned = wiring.result_buffer[k] == ALWAYS
        now = computing(blocks.kind.shape[0] - 2 if returned else blocks.forward_of[producer])  # the loss is sent there
        distribute(sources, state, wiring.result_slot, k, k, place, now, 0, NOTHING, spans)


@lean
def _make(sources: Sources, state: State, t: Any, producer: Any, now: Any, again: Any, spans: Spans) -> None:
    """The output as the pieces of its producer make it, and what they save besides (if it is computed again: then)."""
    units, wiring, layouts, pools = sources.units, sources.wiring, sources.layouts, sources.pools
    config = np.uint64(state.config[producer])
    layout = np.uint64(pools.layout[np.uint64(pools.config_writes[config]) + np.uint64(wiring.tensor_output[t])])
    back = now
    if units.backward[producer] == 1 and (again or sources.blocks.recompute_of[producer] == NOTHING):
        back = computing(sources.units.weight_block[producer])
    partner = units.output_gradient[producer]
    if partner != NOTHING:
        note_gradient(sources, state, np.uint64(partner), spans)
    itemsize, place = units.itemsize[t], np.uint64(units.place[t])
    first = np.uint64(layouts.mesh_first[np.uint64(layouts.layout_mesh[layout])])
    entry = np.uint64(layouts.grid_first[np.uint64(layouts.layout_grid[layout])])
    for row in range(entries_of(layouts, layout)):
        d, elements = np.uint64(layouts.device[first + row]), layouts.volume[entry + row]
        if d >= np.uint64(spans.reads.shape[0]):
            continue
        saved = back if partner == NOTHING or spans.reads[d] != 0 else now
        until = saved if units.saves_outputs[producer] == 1 else now
        handle = add(spans, d, elements * itemsize, ACTIVATIONS, now, until)
        if again:
            spans.again[place, d] = handle
        else:
            spans.output[place, d] = handle
        more = besides(units, producer, elements, itemsize)
        if more > 0 and saved > now:
            add(spans, d, more, ACTIVATIONS, now, saved)
        if units.attends[producer] == 1 and units.cpu[d] == 1:
            q, k = _read_elements(sources, config, ZERO, row), _read_elements(sources, config, ONE, row)
            if q > elements:
                parts = _parts_of(q * itemsize)
                add(spans, d, _forward_elements(q, k, elements, parts) * itemsize, ACTIVATIONS, now, now)
                if back > now:
                    at = computing(units.backward_block[producer])
                    add(spans, d, _backward_elements(q, k, elements, parts) * itemsize, ACTIVATIONS, at, at)


@lean
def _read_elements(sources: Sources, config: Any, position: Any, row: Any) -> Any:
    """Elements of an operand that a row of a config reads."""
    layouts, pools = sources.layouts, sources.pools
    layout = np.uint64(pools.layout[np.uint64(pools.config_reads[config]) + position])
    return layouts.volume[np.uint64(layouts.grid_first[np.uint64(layouts.layout_grid[layout])]) + row]


@lean
def besides(units: Units, producer: Any, elements: Any, itemsize: Any) -> Any:
    """Bytes saved besides, as in ``graph.ops.Saved``."""
    return elements * units.extra[producer] + elements * units.halves[producer] * itemsize // np.int64(2)


@lean
def _backward(sources: Sources, state: State, t: Any, spans: Spans) -> None:
    """Gradients of an activation: as its readers make them, and in the layout of its producer."""
    wiring, program = sources.wiring, sources.program
    first, last = np.uint64(wiring.tensor_first[t]), np.uint64(wiring.tensor_last[t])
    for d in range(np.uint64(spans.born.shape[0])):
        spans.born[d] = 0
    for place in range(last - first):  # the last reader's backward runs first
        k = last - ONE - place
        slot = np.uint64(wiring.tensor_slot[k])
        if np.uint64(state.leader[slot]) == slot and program.flows[slot] != VALUE:
            itemsize = sources.units.itemsize[t]
            back = np.uint64(state.backward[slot])
            now = differentiate(
                sources, state, wiring.tensor_slot, k, last, back, ZERO, itemsize, ACTIVATIONS, np.int64(0), spans
            )
            _return(sources, state, slot, t, now, spans)


@lean
def _return(sources: Sources, state: State, slot: Any, t: Any, now: Any, spans: Spans) -> None:
    """Bring the gradients of an edge, complete at ``now``, to the layout of the producer of activation ``t``. They are
    added to those of edges before, and let go: at once, or where something is received, when it is put together."""
    landings, template = sources.landings, np.uint64(state.backward[slot])
    producer, place, sent = np.uint64(sources.wiring.tensor_producer[t]), np.uint64(sources.units.place[t]), now + ONE
    used = until = joined = sent
    if sources.units.backward[producer] == 1:
        used = computing(sources.units.backward_block[producer])
        until = computing(sources.units.weight_block[producer])
        # Of one that has only this pass, operands come first.
        first = not is_late(sources.blocks, sources.program, producer)
        joined = max(sent, joining(sources.units.backward_block[producer], first))
        if sources.units.hands_on[producer] == 1:  # it is that of an operand, too
            until = used - ONE
    for row in range(np.uint64(landings.landing_first[template]), np.uint64(landings.landing_last[template])):
        d, role = np.uint64(landings.device[row]), landings.role[row]
        original = np.uint64(spans.gradient[d])
        leave(landings, spans, row, original, sent, joined)
        holder = land(landings, spans, row, sent, joined, joined, ACTIVATIONS)
        if role & ALIASED:
            holder = original
        total = np.uint64(spans.arrived[place, d])
        own = role & ALIASED == 0
        if holder > ZERO and total == ZERO:
            prolong(spans, holder, until)
            spans.arrived[place, d] = holder
            larger = original == ZERO or landings.copy[row] > spans.nbytes[original - ONE]
            spans.born[d] = own and (larger or role & RECEIVES != 0)
        elif holder > ZERO and role & RECEIVES:
            prolong(spans, holder, joined)
            if spans.born[d] == 1 and used > sent and arrives_in_parts(landings, row):
                spans.size[0] = holder - ONE  # added in the memory of the sum
            spans.born[d] = 1
        elif holder > ZERO and original > ZERO:
            spans.first[total - ONE] = min(np.uint64(spans.first[total - ONE]), now)
            if own and spans.born[d] == 1:
                spans.size[0] = holder - ONE
            elif own:
                spans.born[d] = 1
