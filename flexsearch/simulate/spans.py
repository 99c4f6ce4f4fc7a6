"""The spans of memory as arrays, and what they are worked out from; ``lifetimes`` says which there are."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from flexsearch.compiled import FOUR, I64, ONE, THREE, TWO, U8, U32, U64, ZERO, lean
from flexsearch.graph import Flow
from flexsearch.lower.arrays import BlockTable, Pools, Program
from flexsearch.lower.change import Wiring
from flexsearch.lower.footprints import Landings
from flexsearch.lower.interned import Interned
from flexsearch.packed import packed

WEIGHTS, COPIES, GRADIENTS, OPTIMIZER, ACTIVATIONS, BUFFERS = (np.uint64(k) for k in range(6))
"""Parts of memory: what spans are for; COPIES: of sharded weights, gathered."""
CAST = np.uint64(8)
"""Beside GRADIENTS in a part: they are cast from what operators make, which has spans of its own."""
VALUE, GRADIENT = np.uint8(Flow.VALUE), np.uint8(Flow.GRADIENT)
GATHERED: Any = np.uint64(0xFFFFFFFF)
"""In the place of an activation: a weight's copies have no original that readers could use as it is."""
NOT_KEPT, IN_FIRST_HALF, IN_BOTH_HALVES = (np.uint8(k) for k in range(3))
"""Whether autograd keeps a weight for a backward pass, and for which halves of one that is split."""
ALONE, CUT_FIRST, CUT_LATER = (np.uint8(k) for k in range(3))
"""Of a weight in ``Units.shared``: no other is synchronised with it; or others are, and the part of its gradient that
stays on a device is cut out while most of theirs is there, or after some of theirs have gone."""
OUTPUT, WEIGHT, AT_HAND = range(3)
"""What the first tensor of a unit is: made by an operator, a weight, or at hand."""


@packed
class Units(NamedTuple):
    """What no config changes. Rows ``[first[i], last[i])`` of a list belong to item i. Activations and weights have the
    numbers of ``Wiring``; tensors at hand have their own.

    By unit: ``root``, what its first tensor is; ``tensor``, the number of that; its activations, producers
    ascending. By activation: ``place`` among those of its unit; ``itemsize``. By operator: the units ``concerned``
    by its config; whether it ``saves_inputs`` and ``saves_outputs`` for its ``backward``, which it may not have;
    whether its output is a view (``is_view``), and the gradient of that one of an operand, too (``hands_on``);
    bytes saved besides for each element (``extra``), and half elements (``halves``); whether it ``attends``: one
    kernel makes the gradients of its first three operands, all or none, and on devices that are a ``cpu`` widens
    narrow values. By weight: ``weight_itemsize``, ``gradient_itemsize``; ``state_bytes``, that the optimizer keeps for
    each element; ``shared``: whether others are in its bucket (ALONE, CUT_FIRST, CUT_LATER). By tensor at hand: its
    readers' slots (``reader``), ``at_hand_itemsize``, whether a device reads it as an image (``at_hand_image``, by
    tensor and device; ``at_hand_copied``: any does), ``at_hand_shift``, rows from the first microbatch of the batch to
    the last one (0: it does not run over samples), the ``part`` of memory that it belongs to.
    ``several``: (1,) whether there are several microbatches. By operator: ``backward_block`` (the
    forward one if there is none), ``weight_block``, where it is done with what it saved and with the gradients of
    its outputs (the backward one if its backward pass is whole); by slot: until when autograd keeps the weight that
    it reads (``keeps_weight``), and the slot whose gradient alone what it reads is kept for (``only_gradient``;
    NOTHING: there are others, or none); by operator without weights that has one, the slot whose gradient alone it
    makes (``output_gradient``); by weight: ``once_block``, where a weight is gathered for all microbatches;
    ``unpack_block`` and ``unpack_again_block``, the first to read any of those that are gathered together with it,
    whose messages are put together there."""

    root: U8
    tensor: U32
    activation_first: U32
    activation_last: U32
    activation: U32
    place: U32
    itemsize: I64
    concerned_first: U32
    concerned_last: U32
    concerned: U32
    saves_inputs: U8
    saves_outputs: U8
    backward: U8
    keeps_weight: U8
    only_gradient: U32
    output_gradient: U32
    is_view: U8
    hands_on: U8
    extra: I64
    halves: I64
    attends: U8
    cpu: U8
    weight_itemsize: I64
    gradient_itemsize: I64
    shared: U8
    reader_first: U32
    reader_last: U32
    reader: U32
    at_hand_itemsize: I64
    at_hand_image: npt.NDArray[np.uint8]
    at_hand_copied: U8
    at_hand_shift: I64
    part: U8
    state_bytes: I64
    several: U8
    backward_block: U32
    weight_block: U32
    once_block: U32
    unpack_block: U32
    unpack_again_block: U32


@packed
class Spans(NamedTuple):
    """The spans of one unit: ``device``, ``first`` and ``last`` moment, ``nbytes``, ``part``; ``size``: (1,) how many.
    Where ``last`` is before ``first`` it is of the next microbatch, and for the final one the update.

    Work arrays. A **handle** is the number of a span plus 1; 0: none, at hand all the time. By place of the activation
    in its unit and device: ``output``, what holds it where it was made; ``again``, where it was computed again;
    ``arrived``, what holds its gradient in the producer's layout. By device: ``gradient``, what holds the readers'
    gradient of the edge at hand, and ``born``, the moment since when all gradients of a weight are there; of
    an activation, whether (1) its sum has memory of its own. ``low``,
    ``high``: by device and dimension, of what is at hand; ``reads``: by device, whether it reads it, or whether its
    gradient of an edge is used.
    """

    device: U32
    first: U32
    last: U32
    nbytes: I64
    part: U8
    size: U64
    output: npt.NDArray[np.uint32]
    arrived: npt.NDArray[np.uint32]
    gradient: U32
    born: U32
    again: npt.NDArray[np.uint32]
    low: npt.NDArray[np.int64]
    high: npt.NDArray[np.int64]
    reads: U8


@packed
class Sources(NamedTuple):
    """What spans are worked out from, besides a plan's ``State``: what no config changes, and all templates."""

    units: Units
    blocks: BlockTable
    wiring: Wiring
    program: Program
    pools: Pools
    layouts: Interned
    landings: Landings


@lean
def add(spans: Spans, device: Any, nbytes: Any, part: Any, first: Any, last: Any) -> Any:
    """A new span; returns its handle."""
    at = spans.size[0]
    spans.device[at], spans.nbytes[at], spans.part[at] = device, nbytes, part
    spans.first[at], spans.last[at] = first, max(first, last)
    spans.size[0] = at + ONE
    return at + ONE


@lean
def prolong(spans: Spans, handle: Any, moment: Any) -> None:
    if handle > ZERO:
        spans.last[handle - ONE] = max(np.uint64(spans.last[handle - ONE]), moment)


@lean
def carry(spans: Spans, handle: Any, moment: Any, carried: Any) -> None:
    """If it is ``carried``, let what begins in a microbatch end at an earlier moment of the next one."""
    if carried:
        spans.last[handle - ONE] = moment


@lean
def joining(block: Any, first: Any) -> Any:
    """The moment at which what a block reads is put together: its ``first`` operand, or the others."""
    return FOUR * np.uint64(block) + (ZERO if first else ONE)


def moment_of(block: Any) -> Any:
    """The moment at which a block computes, behind those at which what it reads is put together; in the next one it
    communicates."""
    return FOUR * np.uint64(block) + TWO


computing = lean(moment_of)
"""The same for compiled functions."""


@lean
def sent_with(moment: Any) -> Any:
    """The moment at which the block of a moment communicates."""
    return np.uint64(moment) // FOUR * FOUR + THREE


@lean
def updating(sources: Sources) -> Any:
    """The moment of the update, the last block."""
    return computing(sources.blocks.kind.shape[0] - 1)


@lean
def end_of(sources: Sources) -> Any:
    """The last moment of a step."""
    return updating(sources) + ONE
