"""The flat arrays that compiled simulation works on: what each holds, and how it is indexed."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from flexsearch.compiled import F64, I64, U8, U32, U64
from flexsearch.cost.tally import Loads, Rates, Tally
from flexsearch.packed import packed
from flexsearch.topology.routes import RouteTable

NOTHING = np.uint32(0xFFFFFFFF)
"""No task, node or row."""
GATHER, FORWARD, BACKWARD, SYNCHRONISE, SECOND, UPDATE = range(6)
"""Blocks of the program; their arguments: weight, operator, operator, bucket, none, none."""
TIME, RECORD, WRITE = 0, 1, 2
"""What a pass does: only the makespan; the start and end of every task, too; or the task graph."""
STRIDE = 16
"""Blocks between two checkpoints, from which a later pass can go on."""


@packed
class Program(NamedTuple):
    """What follows from graph, topology and bucket size. Slots are operands in order, then results (the loss, new
    buffers) that are kept; rows ``[first[i], last[i])`` of a list belong to item i. ``scalars``: start of a
    communication (s); processor seconds per byte; whether processors can hold tasks up (0 no, 1 yes, 2 yes and devices
    that share one take turns); for how many exchanges of a weight a bucket has room."""

    kind: U8
    argument: U32
    operand_first: U32  # by operator: its operands' slots
    operand_last: U32
    result_first: U32  # by operator: slots of those that read its outputs, in ``result``
    result_last: U32
    result: U32
    flows: U8  # by slot: whether a gradient flows back
    reader_first: U32  # by weight: its readers' slots, in ``reader``
    reader_last: U32
    reader: U32
    bucket_first: U32  # by bucket: its weights, in ``member``
    bucket_last: U32
    member: U32  # weights in the order in which their synchronisation starts
    processor: U32
    bandwidth: F64  # by resource; of a processor 0
    turn: F64  # by device
    update_byte_s: F64  # by device
    update_tensor_s: F64
    row_stride: U32  # by row: STRIDE of the block that sends what arrives there
    routes: RouteTable
    rates: Rates
    scalars: F64


@packed
class Pools(NamedTuple):
    """Templates by number; rows as in ``Program``. An exchange is a communication task, alone or in a bucket."""

    config_first: U32
    config_last: U32
    config_reads: U32
    config_writes: U32
    config_shard: U8
    entry_device: U32
    entry_forward_s: F64
    entry_backward_s: F64
    entry_forward: I64  # as ``entry_forward_s``, in ticks
    entry_backward: I64
    layout: U32
    reshard_first: U32
    reshard_middle: U32
    reshard_last: U32
    send_first: U32
    send_last: U32
    receive_first: U32
    receive_last: U32
    link_first: U32
    link_last: U32
    drag_first: U32
    drag_last: U32
    duration: F64
    start: F64  # of messages: s until bytes flow
    amount: U64  # what a collective is priced by, of messages 0
    key: U32  # exchanges of the same key go together in a bucket
    send: U32
    receive: U32
    link: U32
    link_s: F64
    link_ticks: I64  # as ``link_s``, at least: in a bucket, it adds so much
    link_load: F64  # of messages: bytes
    drag: U32
    drag_s: F64
    drag_load: F64
    key_form: U8  # number in ``FORMS``
    key_group: U8  # 1: a collective, among the senders; 0: messages
    plan_sync: U32
    plan_gather: U32
    gather: U32
    store_first: U32
    store_last: U32
    store_device: U32
    store_bytes: U64
    config_held: I64  # (config, device): bytes, as ``State.held``
    reshard_held: I64
    plan_held: I64


@packed
class State(NamedTuple):
    """A plan: numbers of templates. ``leader``: the slot whose edge a slot reads; ``need``: its layout. ``forward``,
    ``backward``: reshards of a leader's edge, else template 0, which is empty. ``plan``: of each weight.
    ``stored_bytes``, ``stored_count``: of trained weights, by device. ``held``: at most so many bytes are in use on
    each device at any moment, as ``flexsearch.lower.ceiling`` counts them. ``busy``: TICKs of computing on each
    device; ``load``: TICKs for which transfers keep each resource busy (those in a common bucket: at least).
    ``stride_ticks``, ``stride_load``: both by STRIDE of the blocks that compute and send, too."""

    config: U32
    leader: U32
    need: U32
    forward: U32
    backward: U32
    plan: U32
    stored_bytes: U64
    stored_count: U64
    held: I64
    busy: I64
    stride_ticks: npt.NDArray[np.int64]
    load: I64
    stride_load: npt.NDArray[np.int64]


@packed
class Work(NamedTuple):
    """Where a pass works. ``arrived``, checkpoints, what they hold and the groups of buckets have two versions, so that
    a rejected proposal leaves the state's own as they were: ``version`` says which is the state's (by row, then by
    bucket), ``fresh`` which the pass at hand has written. ``base``: by STRIDE of blocks, by how much later its
    checkpoint is than it says, and what its blocks send; ``next_base``: the same of the proposal. ``seen``, ``order``:
    ready time and number of the exchange that each resource carried last. ``rest``, ``rest_load``: TICKs that each
    device has still to compute, and each resource to carry for blocks to come."""

    last: F64
    free: F64
    seen: F64
    order: F64
    synced: F64
    rest: I64
    rest_load: I64
    base: F64
    next_base: F64
    middle: F64
    arrived: npt.NDArray[np.float64]
    version: U8
    fresh: U8
    checkpoint: npt.NDArray[np.float64]
    check_version: U8
    check_fresh: U8
    load: F64
    touched: U32
    group_key: npt.NDArray[np.uint32]
    group_head: npt.NDArray[np.uint32]
    group_tail: npt.NDArray[np.uint32]
    group_size: npt.NDArray[np.uint32]
    member_exchange: npt.NDArray[np.uint32]
    member_weight: npt.NDArray[np.uint32]
    member_next: npt.NDArray[np.uint32]
    heap_ready: F64  # exchanges that wait for their time, by (ready, number): a heap
    heap_number: F64
    heap_cargo: U64  # exchange, or group; row * 2**32
    parked_ready: F64  # second phases whose first phase is in flight
    parked_number: F64
    parked_cargo: U64
    flying: U64  # (2,): how many in the heap, how many parked
    left: U32  # by row: exchanges in flight
    early: U32  # by row: of the first of two phases
    held: npt.NDArray[np.uint32]  # by checkpoint: heap, parked and rows that it holds
    held_ready: npt.NDArray[np.float64]
    held_number: npt.NDArray[np.float64]
    held_cargo: npt.NDArray[np.uint64]
    held_row: npt.NDArray[np.uint32]  # row, left, early
    held_arrived: npt.NDArray[np.float64]
    start: F64
    end: F64
    broken: U8  # 1 if exchanges were not taken in the order of time
    void: U64  # (1,): proposals in a row for which that was so
    skipped: U64  # (1,): STRIDEs of blocks, over all passes
    moment: F64  # so far: makespan, tasks, and the last end of an exchange that somebody waits for
    tally: Tally
    loads: Loads


@packed
class Tasks(NamedTuple):
    """The task graph as it is written down. If ``merged``, what a device computes without waiting is one task (not
    where processors are shared, or where moving bytes takes time from them). ``written``: tasks, dependencies, links,
    drags, nodes so far. ``head``: for each row and device a list of the tasks that deliver there, as nodes."""

    duration: F64
    dependency_start: U32
    dependency: U32
    link_start: U32
    link: U32
    link_s: F64
    drag_start: U32
    drag: U32
    drag_s: F64
    turn: F64
    written: U64
    merged: U8  # (1,): whether to merge tasks
    open: U8  # by device: whether what it computes next belongs to its last task
    last: U32
    head: npt.NDArray[np.uint32]
    middle: U32
    synced: U32
    node_task: U32
    node_next: U32
    start: F64  # from here on for the simulation of what was written
    end: F64
    ready: F64
    left: F64
    waiting: U32
    reader_start: U32
    reader: U32
    heap: U32
