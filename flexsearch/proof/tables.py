"""Arrays that bounds of partial plans are worked out from, and in; see ``relaxation``."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from flexsearch.compiled import F64, I64, lean
from flexsearch.packed import packed

NEVER = -np.inf
"""Delay between devices that do not wait for each other."""


@packed
class Tables(NamedTuple):
    """Everything about the configs at choice. Arrays by (operator, config, device) unless said otherwise, seconds; -inf
    where there is no piece or no dependency. Rows ``[first, last)`` of a list belong to an item. Masks: bit d is device
    d."""

    choices: I64  # (operators,)
    has_backward: I64  # (operators,)
    on: I64  # (operators, configs): mask of devices
    forward: F64
    backward: F64
    gathered: F64  # when the operator's weights have been gathered at the earliest
    update: F64  # update of the operator's weights
    launch_forward: F64  # launching by the device's host; 0.0 where there is nothing to launch
    launch_backward: F64
    launch_update: F64
    launch_issue: F64  # (devices,): of one communication
    launch_share: F64  # (devices,): share of a host in launching if all do so equally long; 0.0 if one takes no time
    least_launch: F64  # (operators,): launching it on one device, shared out so
    sink: F64  # from the end of the backward piece to the end of the step: own gradients synchronised, own update
    busy: F64  # (operators, configs): seconds of all pieces
    least_busy: F64  # (operators,)
    own: F64  # update of the weights that no earlier operator reads, at least
    least_update: F64  # (operators,): of all pieces of the weights that only this operator reads
    into_first: I64  # (operators,): edges by reader, in ``edge_*``
    into_last: I64
    out_first: I64  # (operators,): edges by producer, in ``out``
    out_last: I64
    out: I64
    edge_from: I64
    edge_to: I64
    edge_flows: I64  # whether a gradient flows back
    edge_table: I64  # first row of ``there`` and ``back``
    edge_width: I64  # layouts that readers can want
    produced: I64  # (edges, configs of the producer): which layout
    wanted: I64  # (edges, configs of the reader)
    there: F64  # (rows, device, device): from the end of a forward piece to the start of one that reads it
    back: F64  # from the end of a backward piece to the start of the one of its producer
    edge_tensor: I64  # which tensor, -1: an edge of two operators that only share devices
    layout: I64  # (edges, configs of the reader): number of the layout, the same for all edges of a tensor
    there_launch: F64  # (rows, device): launching all communications of the reshard
    back_launch: F64
    there_send: I64  # (rows,): mask of the senders, if the (first) phase is one exchange; else 0
    there_holds: F64  # (rows, resources): seconds for which that exchange keeps links busy
    back_send: I64
    back_holds: F64
    sync_first: I64  # (operators, configs): exchanges in ``sync_*``
    sync_last: I64
    sync_key: I64  # exchanges of a bucket with the same key are one
    sync_latency: F64  # with the start of a communication
    sync_links: F64  # (exchanges, resources)
    sync_send: I64  # masks
    sync_receive: I64
    second: F64  # the longest exchange of a second phase
    second_receive: I64
    sync_bucket: I64
    bucket_after: I64  # (buckets,): the operator after whose backward it is sent
    keys: I64  # (1,)
    pair_reader: I64  # (weights with two readers, 2): operators
    pair_variant: I64  # (pairs, 2, configs): what the weight's plan depends on
    pair_width: I64  # (pairs,): variants of the second reader
    pair_row: I64  # (pairs,): first row by pair of variants
    pair_first: I64  # (rows,): exchanges in ``sync_*``
    pair_last: I64
    pair_update: F64  # (rows, device)
    pair_sink: F64  # (rows, device): as ``sink``, from the backward piece of the first reader
    pair_gathered: F64  # (rows, 2, device)
    pair_half: F64  # (pairs, 2, variants, device): update at least, if only this reader's config is known
    pair_least: F64  # (pairs,): seconds of all updates at least
    other_update: F64  # (1,): likewise of weights with more readers


@packed
class Work(NamedTuple):
    """Where bounds are worked out: seconds by operator and device, by device, by link, or by key of a bucket."""

    start: F64  # of forward pieces; after the operators' those of the configs that are tried
    after: F64  # likewise: what follows the end of a backward piece
    end: F64  # of forward pieces
    before: F64  # what follows the start of a backward piece
    rest: F64  # what a device has to do for earlier operators after its backward piece
    last: F64  # by device: end of the last forward piece
    tail: F64  # what follows once a device has nothing to do any more
    update: F64
    sofar: F64
    last_here: F64  # the same where the operator at hand is
    tail_here: F64
    launched: F64  # by device: when its host has launched what it has to, but for updates
    launched_here: F64
    remaining: F64  # launching after that of the backward pieces at hand
    behind: F64  # how much longer than ``launched`` the step takes at least, as launches of backward pieces tell
    remaining_here: F64
    behind_here: F64
    sent: F64  # launching what an operator that is tried receives
    returned: F64  # and its gradients
    updates: F64  # launching of updates
    arrived: F64  # by edge and device
    free: F64  # by mask of senders and resource: when the last exchange of these senders leaves it
    queue: F64  # what follows the start of the last exchange
    latency: F64  # by key
    links: F64  # by key and resource
    follows: F64
    send: I64
    bound: F64  # by config


def make_work(t: Tables) -> Work:
    """Room for one search."""
    operators, most, count = t.forward.shape
    resources, keys = t.sync_links.shape[1], int(t.keys[0])
    long, table, row, links = (operators + most, count), (operators, count), count, (1 << count, resources)
    sizes = (
        [long] * 2 + [table] * 3 + [row] * 15 + [(len(t.edge_to), count), links, links, keys, (keys, resources), keys]
    )
    columns: list[Any] = [*(np.zeros(size) for size in sizes), np.zeros(keys, dtype=np.int64), np.zeros(most)]
    return Work(*columns)


@lean
def family(count: Any, k: Any, on: Any) -> Any:
    """Set number ``k`` of devices for which there are columns: all sets of up to four devices; of more devices single
    ones and all of a config, which is on the devices ``on``. 0: not for this config."""
    if count <= 4:
        return k + 1 if (k + 1) & on == k + 1 else 0
    if k == count:
        return on
    return (1 << k) & on


@lean
def families(count: Any) -> Any:
    """How many there are."""
    return (1 << count) - 1 if count <= 4 else count + 1


def room_ahead(t: Tables) -> F64:
    """Room for what ``look_ahead`` finds."""
    sets = int(families(t.forward.shape[2]))
    return np.full((*t.forward.shape[:2], sets, 1 + 2 * sets), NEVER)


@lean
def least_in(times: F64, mask: Any) -> float:
    """The least of ``times`` over a set of devices."""
    least = np.inf
    for d in range(times.shape[0]):
        if mask >> d & 1 == 1:
            least = min(least, times[d])
    return least


@lean
def edge_row(t: Tables, e: Any, producer: Any, reader: Any) -> Any:
    """Row of ``there`` and ``back`` for an edge, given both configs."""
    return t.edge_table[e] + t.produced[e, producer] * t.edge_width[e] + t.wanted[e, reader]


@lean
def pair_row(t: Tables, chosen: I64, w: Any) -> Any:
    """Row of a weight with two readers, -1 if one of them has no config yet."""
    a, b = chosen[t.pair_reader[w, 0]], chosen[t.pair_reader[w, 1]]
    if a < 0 or b < 0:
        return -1
    return t.pair_row[w] + t.pair_variant[w, 0, a] * t.pair_width[w] + t.pair_variant[w, 1, b]
