"""Longest paths through plans of which only some operators have a config, compiled; see ``relaxation``."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from flexsearch.compiled import compiled, lean
from flexsearch.packed import packed

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
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
    made: I64  # (edges, configs of the producer): which layout
    wanted: I64  # (edges, configs of the reader)
    there: F64  # (rows, device, device): from the end of a forward piece to the start of one that reads it
    back: F64  # from the end of a backward piece to the start of the one of its producer
    edge_tensor: I64  # which tensor, -1: an edge of two operators that only share devices
    layout: I64  # (edges, configs of the reader): number of the layout, the same for all edges of a tensor
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
    arrived: F64  # by edge and device
    free: F64  # by mask of senders and resource: when the last exchange of these senders leaves it
    queue: F64  # what follows the start of the last exchange
    latency: F64  # by key
    links: F64  # by key and resource
    follows: F64
    send: I64
    found: F64  # by config: the bounds


def make_work(t: Tables) -> Work:
    """Room for one search."""
    operators, most, count = t.forward.shape
    resources, keys = t.sync_links.shape[1], int(t.keys[0])
    long, table, row, links = (operators + most, count), (operators, count), count, (1 << count, resources)
    sizes = (
        [long] * 2 + [table] * 3 + [row] * 6 + [(len(t.edge_to), count), links, links, keys, (keys, resources), keys]
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
    found = np.inf
    for d in range(times.shape[0]):
        if mask >> d & 1 == 1:
            found = min(found, times[d])
    return found


@lean
def _row(t: Tables, e: Any, producer: Any, reader: Any) -> Any:
    """Row of ``there`` and ``back`` for an edge, given both configs."""
    return t.edge_table[e] + t.made[e, producer] * t.edge_width[e] + t.wanted[e, reader]


@lean
def _shared(t: Tables, j: Any, c: Any, m: Any, c2: Any, ends: F64, tails: F64, reached: F64) -> float:
    """When the weights are updated that ``j`` and the later operator ``m`` read, after ``j``'s backward pieces."""
    count, found = ends.shape[0], NEVER
    for w in range(t.pair_width.shape[0]):
        if t.pair_reader[w, 0] == j and t.pair_reader[w, 1] == m:
            row = t.pair_row[w] + t.pair_variant[w, 0, c] * t.pair_width[w] + t.pair_variant[w, 1, c2]
            for d in range(count):
                if t.on[j, c] >> d & 1 == 1:
                    column = (1 << d) if count <= 4 else 1 + d
                    done = max(reached[column], ends[d] + tails[column, d])
                    found = max(found, done + t.pair_sink[row, d])
    return found


@compiled
def look_ahead(t: Tables, ahead: F64, j: Any) -> None:
    """Fill ``ahead`` of operator ``j``: (operators, configs, A, 1 + 2 B); that of all later operators is known. At
    least so many seconds pass from the start of the forward pieces on A to

    - column 0: the end of the step;
    - the next columns: the end of the backward pieces on B;
    - the last columns: the end of all that devices B do for this and later operators, with the updates of weights that
      no earlier operator reads; that is one after the other on each device, whoever waits for what.

    A and B are numbers of ``family``."""
    count, every = t.forward.shape[2], (1 << t.forward.shape[2]) - 1
    sets = families(count)
    columns = 1 + 2 * sets
    ends = np.full((sets, count), NEVER)
    tails = np.full((columns, count), NEVER)
    starts = np.full((sets, sets), NEVER)
    after = np.full((columns, sets), NEVER)
    least = np.full((sets, columns), NEVER)
    reached = np.full(columns, NEVER)
    moment = np.full(count, NEVER)
    for c in range(t.choices[j]):
        on, value = t.on[j, c], ahead[j, c]
        ends[:] = NEVER
        tails[:] = NEVER
        for k in range(sets):
            mask = family(count, k, on)
            for d in range(count):
                if mask >> d & 1 == 1:
                    ends[k, d] = t.forward[j, c, d]
                    if t.has_backward[j] == 1:
                        tails[1 + k, d] = t.backward[j, c, d]
                        tails[0, d] = t.backward[j, c, d] + max(0.0, t.sink[j, c, d])
            mask = family(count, k, every)
            for d in range(count):
                if mask >> d & 1 == 1:
                    tails[1 + sets + k, d] = t.own[j, c, d] + max(0.0, t.backward[j, c, d])
        for a in range(sets):
            for b in range(columns):
                for d in range(count):
                    value[a, b] = max(value[a, b], ends[a, d] + tails[b, d])
            for d in range(count):
                value[a, 0] = max(value[a, 0], ends[a, d])
        for o in range(t.out_first[j], t.out_last[j]):
            e = t.out[o]
            m = t.edge_to[e]
            least[:] = np.inf
            for c2 in range(t.choices[m]):
                on2 = t.on[m, c2]
                row = _row(t, e, c, c2)
                there, back = t.there[row], t.back[row]
                for a in range(sets):
                    for x in range(count):
                        moment[x] = ends[a, x]
                        for d in range(count):
                            moment[x] = max(moment[x], ends[a, d] + there[d, x])
                    for k in range(sets):
                        mask = family(count, k, on2)
                        starts[a, k] = least_in(moment, mask) if mask != 0 else NEVER
                for b in range(1 + sets, columns):
                    for k in range(sets):
                        after[b, k] = least_in(tails[b], family(count, k, every))
                for b in range(1 + sets):
                    for y in range(count):
                        moment[y] = NEVER
                        if t.has_backward[m] == 1:
                            moment[y] = tails[b, y]
                            if t.edge_flows[e] == 1:
                                for d in range(count):
                                    moment[y] = max(moment[y], back[y, d] + tails[b, d])
                    for k in range(sets):
                        mask = family(count, k, on2)
                        after[b, k] = least_in(moment, mask) if mask != 0 else NEVER
                for a in range(sets):
                    if family(count, a, on) == 0:
                        continue
                    for b in range(columns - 1, -1, -1):
                        reached[b] = NEVER
                        if 0 < b <= sets and family(count, b - 1, on) == 0:
                            continue
                        timeline = sets if b > sets else 0
                        found = NEVER
                        for k in range(sets):
                            if starts[a, k] == NEVER:
                                continue
                            through = ahead[m, c2, k]
                            if b == 0:
                                found = max(found, starts[a, k] + through[0])
                            for q in range(sets):
                                found = max(found, starts[a, k] + through[1 + timeline + q] + after[b, q])
                        reached[b] = found
                        if b == 0:
                            found = max(found, _shared(t, j, c, m, c2, ends[a], tails, reached))
                        least[a, b] = min(least[a, b], found)
            for a in range(sets):
                for b in range(columns):
                    if least[a, b] < np.inf:
                        value[a, b] = max(value[a, b], least[a, b])
        for a in range(sets):
            for b in range(1, columns):
                value[a, 0] = max(value[a, 0], value[a, b])


@lean
def from_here(t: Tables, ahead: F64, j: Any, c: Any, starts: F64, after: F64, rest: F64) -> float:
    """The least makespan if, by device, the pieces of operator ``j`` start no earlier than ``starts``, ``after``
    seconds follow their backward pieces, and ``rest`` seconds are to be spent on earlier operators from then on."""
    count, every = t.forward.shape[2], (1 << t.forward.shape[2]) - 1
    sets = families(count)
    on, through = t.on[j, c], ahead[j, c]
    found = 0.0
    for a in range(sets):
        mask = family(count, a, on)
        if mask == 0:
            continue
        start = least_in(starts, mask)
        found = max(found, start + through[a, 0])
        for b in range(sets):
            mask = family(count, b, on)
            if mask != 0:
                found = max(found, start + through[a, 1 + b] + least_in(after, mask))
            found = max(found, start + through[a, 1 + sets + b] + least_in(rest, family(count, b, every)))
    return found


@lean
def _pair(t: Tables, chosen: I64, w: Any) -> Any:
    """Row of a weight with two readers, -1 if one of them has no config yet."""
    a, b = chosen[t.pair_reader[w, 0]], chosen[t.pair_reader[w, 1]]
    if a < 0 or b < 0:
        return -1
    return t.pair_row[w] + t.pair_variant[w, 0, a] * t.pair_width[w] + t.pair_variant[w, 1, b]


@lean
def _add(t: Tables, w: Work, x: Any) -> None:
    """Put exchange ``x`` into the bucket at hand."""
    k = t.sync_key[x]
    if w.latency[k] == NEVER:
        w.send[k] = 0
        w.follows[k] = 0.0
        for r in range(w.links.shape[1]):
            w.links[k, r] = 0.0
    w.latency[k] = max(w.latency[k], t.sync_latency[x])
    w.send[k] |= t.sync_send[x]
    for r in range(w.links.shape[1]):
        w.links[k, r] += t.sync_links[x, r]
    for d in range(w.update.shape[0]):
        if t.sync_receive[x] >> d & 1 == 1:
            w.follows[k] = max(w.follows[k], w.update[d])
        if t.second_receive[x] >> d & 1 == 1:
            w.follows[k] = max(w.follows[k], t.second[x] + w.update[d])


@lean
def _send(t: Tables, w: Work, chosen: I64, bucket: Any) -> None:
    """Lengthen ``w.tail`` by the synchronisation of the weights of a bucket as far as their operators are chosen."""
    for k in range(w.latency.shape[0]):
        w.latency[k] = NEVER
    for i in range(chosen.shape[0]):
        c = chosen[i]
        if c >= 0:
            for x in range(t.sync_first[i, c], t.sync_last[i, c]):
                if t.sync_bucket[x] == bucket:
                    _add(t, w, x)
    for pair in range(t.pair_width.shape[0]):
        row = _pair(t, chosen, pair)
        if row >= 0:
            for x in range(t.pair_first[row], t.pair_last[row]):
                if t.sync_bucket[x] == bucket:
                    _add(t, w, x)
    for k in range(w.latency.shape[0]):
        if w.latency[k] > NEVER:
            busiest = 0.0
            for r in range(w.links.shape[1]):
                busiest = max(busiest, w.links[k, r])
            follows = w.latency[k] + busiest + w.follows[k]
            for r in range(w.links.shape[1]):
                if w.links[k, r] > 0.0:
                    w.queue[w.send[k], r] = max(w.queue[w.send[k], r], follows)
            for d in range(w.tail.shape[0]):
                if w.send[k] >> d & 1 == 1:
                    w.tail[d] = max(w.tail[d], follows)


@lean
def children(t: Tables, w: Work, ahead: F64, chosen: I64, m: Any) -> float:
    """Lower bound (s) of the plans that continue ``chosen`` (config by operator, -1: none yet); fills ``w.found`` with
    those that give operator ``m`` each of its configs, unless ``m`` is -1.

    Operators and then, as further steps, the configs of ``m`` go through the same loops: each call of a helper is
    compiled in, which takes seconds.
    """
    operators, count = chosen.shape[0], t.forward.shape[2]
    steps = operators + (t.choices[m] if m >= 0 else 0)
    for d in range(count):
        w.last[d] = 0.0
        w.update[d] = 0.0
        w.sofar[d] = 0.0
    for mask in range(w.free.shape[0]):
        for r in range(w.free.shape[1]):
            w.free[mask, r] = 0.0
            w.queue[mask, r] = NEVER
    busy = t.other_update[0] + _updates(t, chosen, w.update)
    for step in range(steps):
        known = step < operators
        i, c = (step, chosen[step]) if known else (m, step - operators)
        if known:
            if i == m:
                for d in range(count):
                    w.last_here[d] = w.last[d]
            if c < 0:
                busy += t.least_busy[i]
                continue
            busy += t.busy[i, c]
        _begin(t, w, chosen, i, c, w.last if known else w.last_here, w.start[step], known)
        if known:
            for d in range(count):
                w.end[i, d] = w.start[i, d] + t.forward[i, c, d]
                w.last[d] = max(w.last[d], w.end[i, d])
            _deliver(t, w, chosen, i)
    for d in range(count):
        w.tail[d] = w.update[d]
    for step in range(steps):  # from the operator whose backward comes last
        known = step < operators
        i, c = (step, chosen[step]) if known else (m, step - operators)
        if known:
            for bucket in range(t.bucket_after.shape[0]):
                if t.bucket_after[bucket] == i:
                    _send(t, w, chosen, bucket)
        for d in range(count):
            w.after[step, d] = NEVER
            if known:
                w.rest[i, d] = w.sofar[d]
                w.before[i, d] = NEVER
                if i == m:
                    w.tail_here[d] = w.tail[d]
                if c >= 0:
                    w.sofar[d] += t.own[i, c, d] + max(0.0, t.backward[i, c, d])
        if c < 0 or t.has_backward[i] == 0:
            continue
        _follow(t, w, chosen, i, c, w.tail if known else w.tail_here, w.after[step], known)
        if known:
            for d in range(count):
                if t.on[i, c] >> d & 1 == 1:
                    w.before[i, d] = t.backward[i, c, d] + w.after[i, d]
                    w.tail[d] = w.before[i, d]
    node: float = busy / count
    for d in range(count):
        node = max(node, w.last[d] + w.tail[d])
    for step in range(steps):
        known = step < operators
        i, c = (step, chosen[step]) if known else (m, step - operators)
        going = not known
        if known and c >= 0:
            for o in range(t.out_first[i], t.out_last[i]):
                going = going or chosen[t.edge_to[t.out[o]]] < 0
        if going:
            bound = from_here(t, ahead, i, c, w.start[step], w.after[step], w.rest[i])
            if known:
                node = max(node, bound)
            else:
                busier = (busy - t.least_busy[m] + t.busy[m, c]) / count
                w.found[c] = max(node, busier, bound)
    return node


@lean
def _updates(t: Tables, chosen: I64, update: F64) -> float:
    """Add the updates on each device as far as they are known; returns the least sum of all updates."""
    count, total = update.shape[0], 0.0
    for i in range(chosen.shape[0]):
        if chosen[i] < 0:
            total += t.least_update[i]
        else:
            for d in range(count):
                update[d] += t.update[i, chosen[i], d]
                total += t.update[i, chosen[i], d]
    for w in range(t.pair_width.shape[0]):
        row = _pair(t, chosen, w)
        if row < 0:
            total += t.pair_least[w]
        for d in range(count):
            if row >= 0:
                update[d] += t.pair_update[row, d]
                total += t.pair_update[row, d]
            else:
                for r in range(2):
                    c = chosen[t.pair_reader[w, r]]
                    if c >= 0:
                        update[d] += t.pair_half[w, r, t.pair_variant[w, r, c], d]
    return total


@lean
def _joins(t: Tables, chosen: I64, e: Any, layout: Any, last: Any) -> Any:
    """Whether edge ``e``, which wants ``layout``, is one with that of another reader of its tensor before operator
    ``last`` (or of an operand before): 1, 0, or -1 if that is not known yet."""
    p = t.edge_from[e]
    for o in range(t.out_first[p], t.out_last[p]):
        other = t.out[o]
        before = t.edge_to[other] < last or (t.edge_to[other] == t.edge_to[e] and other < e)
        if before and t.edge_tensor[other] == t.edge_tensor[e]:
            c = chosen[t.edge_to[other]]
            if c < 0:
                return -1
            if t.layout[other, c] == layout:
                return 1
    return 0


@lean
def _depart(t: Tables, w: Work, row: Any, ready: float) -> float:
    """When the exchange of a forward edge starts, if its senders are ready at ``ready``. What was sent before, by some
    of the same devices and no others, was ready no later and goes first on the links that they share."""
    send = t.there_send[row]
    begin = ready
    for mask in range(1, w.free.shape[0]):
        if mask & send == mask:
            for r in range(w.free.shape[1]):
                if t.there_holds[row, r] > 0.0:
                    begin = max(begin, w.free[mask, r])
    for r in range(w.free.shape[1]):
        if t.there_holds[row, r] > 0.0:
            w.free[send, r] = max(w.free[send, r], begin + t.there_holds[row, r])
    return begin


@lean
def _deliver(t: Tables, w: Work, chosen: I64, p: Any) -> None:
    """When what operator ``p`` makes arrives at the readers that are chosen."""
    count = w.last.shape[0]
    for o in range(t.out_first[p], t.out_last[p]):
        e = t.out[o]
        c = chosen[t.edge_to[e]]
        if c < 0 or t.edge_width[e] == 0:
            continue
        row = _row(t, e, chosen[p], c)
        wait = 0.0
        if t.there_send[row] != 0 and _joins(t, chosen, e, t.layout[e, c], t.edge_to[e]) == 0:
            ready = 0.0
            for d in range(count):
                if t.there_send[row] >> d & 1 == 1:
                    ready = max(ready, w.last[d])
            wait = _depart(t, w, row, ready)
        for x in range(count):
            w.arrived[e, x] = NEVER
            for a in range(count):
                # ``wait`` is a moment from which on the whole exchange takes as long as from its slowest sender.
                leaves = max(w.end[p, a], wait) if t.there_send[row] >> a & 1 == 1 else w.end[p, a]
                w.arrived[e, x] = max(w.arrived[e, x], leaves + t.there[row, a, x])


@lean
def _return(t: Tables, w: Work, chosen: I64, e: Any, row: Any) -> float:
    """What follows the start of the exchange of gradients of edge ``e``: its own delivery, or exchanges that are sent
    after it on the same links, by all of its senders and perhaps others."""
    count, send, p = w.last.shape[0], t.back_send[row], t.edge_from[e]
    follows = NEVER
    for d in range(count):
        if send >> d & 1 == 1:
            for b in range(count):
                follows = max(follows, t.back[row, d, b] + w.before[p, b])
    if _joins(t, chosen, e, t.layout[e, chosen[t.edge_to[e]]], t.edge_to[e]) != 0:
        return follows
    for mask in range(1, w.queue.shape[0]):
        if mask & send == send:
            for r in range(w.queue.shape[1]):
                if t.back_holds[row, r] > 0.0:
                    follows = max(follows, t.back_holds[row, r] + w.queue[mask, r])
    for r in range(w.queue.shape[1]):
        if t.back_holds[row, r] > 0.0:
            w.queue[send, r] = max(w.queue[send, r], follows)
    return follows


@lean
def _begin(t: Tables, w: Work, chosen: I64, i: Any, c: Any, last: F64, start: F64, known: Any) -> None:
    """When the forward pieces of an operator can start, by device. ``known``: its config is chosen, not only tried;
    then what it reads has queued."""
    count = last.shape[0]
    for d in range(count):
        start[d] = max(last[d], t.gathered[i, c, d]) if t.on[i, c] >> d & 1 == 1 else NEVER
    for pair in range(t.pair_width.shape[0]):
        for r in range(2):
            other = chosen[t.pair_reader[pair, 1 - r]]
            if t.pair_reader[pair, r] == i and other >= 0:
                a, b = (c, other) if r == 0 else (other, c)
                row = t.pair_row[pair] + t.pair_variant[pair, 0, a] * t.pair_width[pair] + t.pair_variant[pair, 1, b]
                for d in range(count):
                    if t.on[i, c] >> d & 1 == 1:
                        start[d] = max(start[d], t.pair_gathered[row, r, d])
    for e in range(t.into_first[i], t.into_last[i]):
        p = t.edge_from[e]
        if chosen[p] >= 0:
            there = t.there[_row(t, e, chosen[p], c)]
            for d in range(count):
                if t.on[i, c] >> d & 1 == 1:
                    if known:
                        start[d] = max(start[d], w.arrived[e, d])
                    else:
                        for a in range(count):
                            start[d] = max(start[d], w.end[p, a] + there[a, d])


@lean
def _follow(t: Tables, w: Work, chosen: I64, i: Any, c: Any, tail: F64, after: F64, known: Any) -> None:
    """What follows the backward pieces of an operator at least, by device. ``known``: its config is chosen, not only
    tried; then its exchanges queue."""
    count = tail.shape[0]
    for d in range(count):
        if t.on[i, c] >> d & 1 == 1:
            after[d] = tail[d]
    for e in range(t.into_last[i] - 1, t.into_first[i] - 1, -1):  # the last exchange first
        p = t.edge_from[e]
        if chosen[p] >= 0 and t.edge_flows[e] == 1:
            row = _row(t, e, chosen[p], c)
            follows = _return(t, w, chosen, e, row) if known and t.back_send[row] != 0 else NEVER
            for d in range(count):
                if t.on[i, c] >> d & 1 == 1:
                    if t.back_send[row] >> d & 1 == 1:
                        after[d] = max(after[d], follows)
                    for b in range(count):
                        after[d] = max(after[d], t.back[row, d, b] + w.before[p, b])
