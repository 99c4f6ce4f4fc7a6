"""The flat arrays that describe plans for compiled code: what each holds, and how it is indexed."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from flexsearch.compiled import F64, I64, U8, U32, U64
from flexsearch.cost.tally import Rates
from flexsearch.packed import packed
from flexsearch.topology.routes import RouteTable

NOTHING = np.uint32(0xFFFFFFFF)
"""No block, bucket or segment."""


@packed
class ReadTable(NamedTuple):
    """Who reads from storage, and what it takes. ``operator``: those that compute with what is read (none: nothing is).
    ``host``: by device; ``way``: by host, resource of its way to the storage; ``server``: (1,) resource, or NOTHING.
    ``seconds``: (4,) of a batch's files, of a sample with its files, and of a sample's bytes, on a host's way; of a
    sample's bytes on the server, for all hosts that one stands for. ``prefetch``: (1,)."""

    operator: U32
    host: U32
    way: U32
    server: U32
    seconds: F64
    prefetch: U32


@packed
class Program(NamedTuple):
    """What follows from graph and topology. Slots are operands in order, then results (the loss, new buffers) that are
    kept; rows ``[first[i], last[i])`` of a list belong to item i. ``routes``, ``rates``: what
    communications are priced by; ``image``: by resource there, the resource that stands for it (``lower.folding``);
    ``images``: by that, for how many;
    ``microbatches``: (1,); ``sums``: (1,) how gradients are summed (``moves.SHARED`` and following)."""

    operand_first: U32  # by operator: its operands' slots
    operand_last: U32
    result_first: U32  # by operator: slots of those that read its outputs, in ``result``
    result_last: U32
    result: U32
    flows: U8  # by slot: ``graph.Flow``
    late: U8  # by operator: whether its forward pass does nothing, so that its backward pass waits for its operands
    reader_first: U32  # by weight: its readers' slots, in ``reader``
    reader_last: U32
    reader: U32
    processor: U32
    bandwidth: F64  # by resource; of a processor 0
    update_byte_s: F64  # by device
    update_tensor_s: F64
    routes: RouteTable
    rates: Rates
    image: U32
    images: U32
    microbatches: U32
    sums: U64
    reading: ReadTable


@packed
class Pools(NamedTuple):
    """Templates by number; rows as in ``Program``. An exchange is a communication task, alone or in a bucket."""

    config_first: U32
    config_last: U32
    config_reads: U32
    config_writes: U32
    config_sharding: U32  # rank of its ``strategy.Sharding``
    config_split: U32  # its pieces without their devices
    config_mesh: U32
    entry_device: U32
    entry_forward: I64  # ticks
    entry_backward: I64
    entry_inputs: I64  # of a backward pass in two halves, the one that makes gradients of inputs
    entry_weight: I64  # and of weights
    entry_cast: I64  # of casting these gradients once to the type in which they are held
    entry_samples: U32  # of what is read: how many samples, and the first entry of the config with the same
    entry_part: U32
    layout: U32
    reshard_first: U32
    reshard_middle: U32
    reshard_last: U32
    send_first: U32
    send_last: U32
    receive_first: U32
    receive_last: U32
    from_first: U32  # rows of ``send`` with all senders, also those that one in the first block stands for
    from_last: U32
    to_first: U32  # of ``receive``
    to_last: U32
    link_first: U32
    link_last: U32
    drag_first: U32
    drag_last: U32
    duration: I64  # ticks
    start: F64  # of messages: s until bytes flow
    amount: U64  # what a collective is priced by, of messages 0
    form: U8  # number of its form
    turn: I64  # ticks
    connection: U64
    key: U32  # exchanges of the same key go together in a bucket
    send: U32
    receive: U32
    link: U32
    link_ticks: I64
    orbit: U32  # of how many exchanges it stands for all
    link_least: I64  # as ``link_ticks``, at least: in a bucket, it adds so much
    link_load: F64  # of messages: bytes
    drag: U32
    drag_ticks: I64
    drag_load: F64
    key_form: U8  # number in ``FORMS``
    key_group: U8  # 1: a collective, among the senders; 0: messages
    plan_sync: U32
    plan_sharding: U32  # of the reader that keeps least
    plan_gather: U32
    gather: U32
    store_first: U32
    store_last: U32
    store_device: U32
    store_bytes: U64


@packed
class State(NamedTuple):
    """A plan: numbers of templates. ``leader``: the slot whose edge a slot reads; ``need``: its layout. ``forward``,
    ``backward``: reshards of a leader's edge, else template 0, which is empty; ``kept``: of a weight that is gathered
    once a step where others are gathered for each microbatch (which has no ``forward`` then). ``plan``: of each weight.
    ``stored_bytes``, ``stored_count``: of trained weights, by device. ``busy``: ticks of computing on each device for
    one microbatch; ``load``: ticks for which the transfers of one microbatch and those of weights keep each resource
    busy (those in a common bucket: at least)."""

    config: U32
    leader: U32
    need: U32
    forward: U32
    backward: U32
    kept: U32
    plan: U32
    stored_bytes: U64
    stored_count: U64
    busy: I64
    load: I64


@packed
class BlockTable(NamedTuple):
    """The blocks of a graph; rows ``[first[i], last[i])`` of a list belong to item i.

    By device: ``launch``: ticks that its host takes to launch an operator (0: it has no queue for that); ``issue``: to
    hand over a communication. By block: ``kind``, ``argument``; ``launches``: of each computation (of an update: of
    each tensor); ``sent``: slots whose
    reshards it sends, in order; ``stage``: row of ``runs``, which says by device whether it runs such blocks. By slot:
    ``forward``, ``backward``: the block that sends what it reads, and the one that sends its gradient (NOTHING: none);
    ``again``: the RECOMPUTE or REGATHER block that sends what it reads once more (NOTHING: none); ``kept``: the
    GATHER_ONCE block that sends it (NOTHING: none). By operator: ``forward_of``, ``backward_of`` (NOTHING: it has
    none), ``weight_of`` (NOTHING: none), ``halved`` (whether its stage puts off gradients of weights), ``recompute_of``
    (NOTHING: none), ``region`` (NOTHING: not computed again); by weight: ``gather_of``, ``regather_of`` and
    ``gather_once_of`` (NOTHING: none), ``bucket``, in which gradients go that are summed over the microbatches, and
    ``each``, in which they go for each (NOTHING: it is not trained; the same one where there is no other).
    By SYNCHRONISE block: ``starts``, ``finishes``: bucket whose first or second phases it sends (NOTHING: none),
    ``block``: its number. By bucket: ``member``: its weights in the order of completion; ``sums``: which of them (ALL,
    ONCE, EACH of ``schedule``); ``started_by``, ``finished_by``, ``added_by`` (before which it is added, as in
    ``Blocks.added``): blocks."""

    launch: I64
    issue: I64
    kind: U8
    argument: U32
    launches: U32
    sent_first: U32
    sent_last: U32
    sent: U32
    stage: U32
    runs: U8  # (stages + 1, devices), flat
    forward: U32
    backward: U32
    again: U32
    kept: U32
    forward_of: U32
    backward_of: U32
    weight_of: U32
    halved: U8
    recompute_of: U32
    read_of: U32
    region: U32
    gather_of: U32
    regather_of: U32
    gather_once_of: U32
    bucket: U32
    each: U32
    starts: U32
    finishes: U32
    block: U32
    member_first: U32
    member_last: U32
    member: U32
    sums: U8
    started_by: U32
    finished_by: U32
    added_by: U32
