"""What a proposal changes, and which blocks have other rows then, compiled."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from flexsearch.compiled import ONE, U8, U32, U64, lean, wide
from flexsearch.lower.arrays import NOTHING, BlockTable, Pools, Program, State
from flexsearch.lower.rows import BACKWARD, GATHER_ONCE, RECOMPUTE, REGATHER, is_gather
from flexsearch.packed import packed, zeros

ALWAYS = np.uint32(0xFFFFFFFE)
"""Slot without an operator: the loss, which goes everywhere."""


@packed
class Wiring(NamedTuple):
    """Which slots belong to which tensors; rows ``[first[i], last[i])`` of a list belong to item i."""

    slot_operator: U32
    slot_position: U32
    slot_tensor: U32
    slot_kind: U8  # 0: at hand; 1: an activation; 2: a weight; 3: a buffer
    tensor_producer: U32
    tensor_output: U32
    tensor_tag: U8
    tensor_first: U32  # readers' slots, in ``tensor_slot``
    tensor_last: U32
    tensor_slot: U32
    result_first: U32  # results' slots of a tensor, in ``result_slot``
    result_last: U32
    result_slot: U32
    result_buffer: U32  # by place in ``result_slot``: the buffer, or ALWAYS
    output_first: U32  # by operator: tensors that it makes
    output_last: U32
    buffer_first: U32  # by buffer: slots that read it, in ``buffer_slot``
    buffer_last: U32
    buffer_slot: U32
    buffer_result: U32  # by buffer: the tensor that replaces it, or MISSING
    result_need: U32  # by place in ``result_slot``: number of the layout it is wanted in; 0 for buffers
    weight_type: U32  # by weight: number of its dtype, by which weights share plans


@packed
class Change(NamedTuple):
    """What a proposal changes, the ``config`` of each ``operator``, ``number`` ((1,)) of them; and work arrays.
    ``slot``, ``weight``: what it touched, ``touched`` ((2,)) of them. ``tensor_stamp``, ``weight_stamp``,
    ``block_stamp``, ``source_stamp``: tensors, weights and blocks that were done in this round (``round``, (1,)).
    ``missing``: rows (kind, a, b) of keys that were not found; ``lacking``: (1,) how many. ``block``: those whose rows
    change, ``blocks`` ((1,)) of them; ``source``: those that send other reshards, ``sources`` ((1,)) of them. ``row``,
    ``old_row``: by slot, number of its first communication in the block that sends it."""

    operator: U32
    config: U32
    number: U64
    slot: U32
    weight: U32
    touched: U64
    tensor_stamp: U64
    weight_stamp: U64
    block_stamp: U64
    source_stamp: U64
    round: U64
    missing: U64
    lacking: U64
    block: U32
    blocks: U64
    source: U32
    sources: U64
    row: U32
    old_row: U32


MOST_MISSING = 4096
"""Keys that are noted as missing at a time."""


def empty_change(wiring: Wiring, operators: int, blocks: int) -> Change:
    """Room for the largest change of plans of so many operators and blocks."""
    weights, slots, tensors = len(wiring.weight_type), len(wiring.slot_operator), len(wiring.tensor_producer)
    return zeros(
        Change, operator=operators, config=operators, slot=slots, weight=weights, touched=2, tensor_stamp=tensors,
        weight_stamp=weights, block_stamp=blocks, source_stamp=blocks, missing=(MOST_MISSING, 3), block=blocks,
        source=blocks, row=slots, old_row=slots,
    )  # fmt: skip


@wide
def miss(change: Change, kind: Any, a: Any, b: Any) -> None:
    """Note a key that was not found."""
    at = np.uint64(change.lacking[0])
    if at < np.uint64(change.missing.shape[0]):
        change.missing[at, 0] = np.uint64(kind)
        change.missing[at, 1] = np.uint64(a)
        change.missing[at, 2] = np.uint64(b)
        change.lacking[0] = at + ONE


@lean
def mark(change: Change, block: Any) -> None:
    """The rows of a block change."""
    if block != NOTHING and change.block_stamp[np.uint64(block)] != change.round[0]:
        change.block_stamp[np.uint64(block)] = change.round[0]
        change.block[change.blocks[0]] = block
        change.blocks[0] += ONE


@lean
def sends(change: Change, block: Any) -> None:
    """A block sends other reshards."""
    if block != NOTHING and change.source_stamp[np.uint64(block)] != change.round[0]:
        change.source_stamp[np.uint64(block)] = change.round[0]
        change.source[change.sources[0]] = block
        change.sources[0] += ONE


@lean
def is_late(blocks: BlockTable, program: Program, operator: Any) -> Any:
    """Whether an operator waits for its operands in its backward pass: its forward pass does nothing, and is not done
    again."""
    return program.late[operator] == 1 and blocks.recompute_of[operator] == NOTHING


@lean
def mark_readers(
    wiring: Wiring, blocks: BlockTable, program: Program, pools: Pools, state: State, before: State, change: Change,
    source: Any,
) -> None:  # fmt: skip
    """Mark a block that sends other reshards, and those that wait for communications of it that have changed or have
    other numbers now. Of gathers that may be all: what goes together follows from all of them."""
    mark(change, source)
    packed = is_gather(blocks.kind[source])
    backward = blocks.kind[source] == BACKWARD
    again = blocks.kind[source] == RECOMPUTE or blocks.kind[source] == REGATHER
    once = blocks.kind[source] == GATHER_ONCE
    templates, were = (state.kept, before.kept) if once else (state.forward, before.forward)
    row = old_row = np.uint32(0)
    for k in range(np.uint64(blocks.sent_first[source]), np.uint64(blocks.sent_last[source])):
        slot = np.uint64(blocks.sent[k])
        change.row[slot], change.old_row[slot] = row, old_row
        if backward:
            row += _count(pools, state.backward[slot])
            old_row += _count(pools, before.backward[slot])
            if wiring.slot_kind[slot] == 1 and _differs(
                pools, change, state.backward, before.backward, slot, slot, packed
            ):
                producer = wiring.tensor_producer[np.uint64(wiring.slot_tensor[slot])]
                mark(change, blocks.backward_of[np.uint64(producer)])
        else:
            row += _count(pools, templates[slot])
            old_row += _count(pools, were[slot])
            reader = wiring.slot_operator[slot]
            leader, old = np.uint64(state.leader[slot]), np.uint64(before.leader[slot])
            if reader != ALWAYS and _differs(pools, change, templates, were, leader, old, packed):
                waiting = blocks.forward_of[np.uint64(reader)]
                if is_late(blocks, program, np.uint64(reader)):
                    waiting = blocks.backward_of[np.uint64(reader)]
                elif again:
                    waiting = blocks.recompute_of[np.uint64(reader)]
                    if waiting == NOTHING:
                        waiting = blocks.backward_of[np.uint64(reader)]
                mark(change, waiting)


@lean
def _count(pools: Pools, template: Any) -> Any:
    """How many communications a reshard has."""
    t = np.uint64(template)
    return np.uint32(pools.reshard_last[t] - pools.reshard_first[t])


@lean
def _differs(pools: Pools, change: Change, now: U32, before: U32, leader: Any, old: Any, packed: Any) -> Any:
    """Whether what the edge ``leader`` delivers now is another reshard, or has other numbers, than that of ``old``; of
    what is ``packed``, whether there is any."""
    some, had = _count(pools, now[leader]) > 0, _count(pools, before[old]) > 0
    if packed or not some or not had:
        return some or had
    return now[leader] != before[old] or change.row[leader] != change.old_row[old]
