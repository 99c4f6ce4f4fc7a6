"""Longest paths through plans of which only some operators have a config, compiled; see ``relaxation``."""

from __future__ import annotations

from typing import Any

from flexsearch.compiled import F64, I64, lean
from flexsearch.proof.ahead import from_here
from flexsearch.proof.tables import NEVER, Tables, Work, edge_row, pair_row


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
        row = pair_row(t, chosen, pair)
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
                    w.remaining[d] += t.launch_issue[d]


@lean
def children(t: Tables, w: Work, ahead: F64, chosen: I64, m: Any) -> float:
    """Lower bound (s) of the plans that continue ``chosen`` (config by operator, -1: none yet); fills ``w.bound`` with
    those that give operator ``m`` each of its configs, unless ``m`` is -1.

    Operators and then, as further steps, the configs of ``m`` go through the same loops: each call of a helper is
    compiled in, which takes seconds.
    """
    operators, count = chosen.shape[0], t.forward.shape[2]
    steps = operators + (t.choices[m] if m >= 0 else 0)
    busy = _forward(t, w, chosen, m, steps)
    _backward(t, w, chosen, m, steps)
    launching = _close(t, w, chosen)
    node: float = max(busy / count, launching)
    for d in range(count):
        node = max(node, w.last[d] + w.tail[d], w.launched[d] + w.behind[d])
    for step in range(steps):
        fixed = step < operators
        i, c = (step, chosen[step]) if fixed else (m, step - operators)
        going = not fixed
        if fixed and c >= 0:
            for o in range(t.out_first[i], t.out_last[i]):
                going = going or chosen[t.edge_to[t.out[o]]] < 0
        if going:
            bound = from_here(t, ahead, i, c, w.start[step], w.after[step], w.rest[i])
            if fixed:
                node = max(node, bound)
            else:
                busier = (busy - t.least_busy[m] + t.busy[m, c]) / count
                w.bound[c] = max(node, busier, bound, _launch(t, w, chosen, m, c, w.after[step], launching))
    return node


@lean
def _close(t: Tables, w: Work, chosen: I64) -> float:
    """The time of all launching if all hosts took equally long; ``w.launched`` counts backward passes from now on."""
    seconds = 0.0
    for d in range(w.last.shape[0]):
        w.launched[d] += w.remaining[d]
        seconds += t.launch_share[d] * (w.launched[d] + w.updates[d])
    for i in range(chosen.shape[0]):
        if chosen[i] < 0:
            seconds += t.least_launch[i]
    return seconds


@lean
def _launch(t: Tables, w: Work, chosen: I64, m: Any, c: Any, after: F64, launching: float) -> float:
    """The least makespan if hosts launch config ``c`` of operator ``m``, too. ``after``: what follows its backward
    pieces; ``launching``: as of ``_close``."""
    count, bound = w.last.shape[0], 0.0
    together: float = launching - t.least_launch[m]
    for d in range(count):
        w.sent[d] = 0.0
        w.returned[d] = 0.0
    for e in range(t.into_first[m], t.into_last[m]):
        p = t.edge_from[e]
        if chosen[p] >= 0 and _joins(t, chosen, e, t.layout[e, c], m) == 0:
            row = edge_row(t, e, chosen[p], c)
            for d in range(count):
                w.sent[d] += t.there_launch[row, d]
                w.returned[d] += t.back_launch[row, d]
    for d in range(count):
        backward, update = t.launch_backward[m, c, d], t.launch_update[m, c, d]
        follows = backward + max(0.0, t.backward[m, c, d]) + after[d] - w.remaining_here[d]
        backward += w.returned[d]
        follows = max(follows, w.behind[d], backward + w.behind_here[d])
        if update > 0.0:
            follows = max(follows, backward + update + w.updates[d] + t.update[m, c, d])
        forward = t.launch_forward[m, c, d] + w.sent[d]
        bound = max(bound, w.launched[d] + forward + follows)
        together += t.launch_share[d] * (forward + backward + update)
    return float(max(bound, together))


@lean
def _forward(t: Tables, w: Work, chosen: I64, m: Any, steps: Any) -> float:
    """When forward pieces start and end, of the operators that are chosen and of the configs of ``m``. Returns the
    seconds of all computing, at least."""
    operators, count = chosen.shape[0], t.forward.shape[2]
    for d in range(count):
        w.last[d] = 0.0
        w.update[d] = 0.0
        w.sofar[d] = 0.0
        w.launched[d] = 0.0
    for mask in range(w.free.shape[0]):
        for r in range(w.free.shape[1]):
            w.free[mask, r] = 0.0
            w.queue[mask, r] = NEVER
    busy: float = t.other_update[0] + _updates(t, chosen, w.update)
    for step in range(steps):
        fixed = step < operators
        i, c = (step, chosen[step]) if fixed else (m, step - operators)
        if fixed:
            if i == m:
                for d in range(count):
                    w.last_here[d] = w.last[d]
                    w.launched_here[d] = w.launched[d]
            if c < 0:
                busy += t.least_busy[i]
                continue
            busy += t.busy[i, c]
        last, launched = (w.last, w.launched) if fixed else (w.last_here, w.launched_here)
        _begin(t, w, chosen, i, c, last, launched, w.start[step], fixed)
        if fixed:
            for d in range(count):
                w.end[i, d] = w.start[i, d] + t.forward[i, c, d]
                w.last[d] = max(w.last[d], w.end[i, d])
                w.launched[d] += t.launch_forward[i, c, d]
            _deliver(t, w, chosen, i)
    return busy


@lean
def _backward(t: Tables, w: Work, chosen: I64, m: Any, steps: Any) -> None:
    """What follows the backward pieces, from the operator whose backward comes last."""
    operators, count = chosen.shape[0], t.forward.shape[2]
    for d in range(count):
        w.tail[d] = w.update[d]
        w.remaining[d] = 0.0
        w.updates[d] = 0.0
        for i in range(operators):
            if chosen[i] >= 0:
                w.updates[d] += t.launch_update[i, chosen[i], d]
        w.behind[d] = w.updates[d] + w.update[d] if w.updates[d] > 0.0 else 0.0
    for step in range(steps):
        fixed = step < operators
        i, c = (step, chosen[step]) if fixed else (m, step - operators)
        if fixed:
            for bucket in range(t.bucket_after.shape[0]):
                if t.bucket_after[bucket] == i:
                    _send(t, w, chosen, bucket)
        for d in range(count):
            w.after[step, d] = NEVER
            if fixed:
                w.rest[i, d] = w.sofar[d]
                w.before[i, d] = NEVER
                if i == m:
                    w.tail_here[d] = w.tail[d]
                    w.behind_here[d] = w.behind[d]
                    w.remaining_here[d] = w.remaining[d]
                if c >= 0:
                    w.sofar[d] += t.own[i, c, d] + max(0.0, t.backward[i, c, d])
        if c < 0 or t.has_backward[i] == 0:
            continue
        _follow(t, w, chosen, i, c, w.tail if fixed else w.tail_here, w.after[step], fixed)
        if fixed:
            for d in range(count):
                if t.on[i, c] >> d & 1 == 1:
                    w.before[i, d] = t.backward[i, c, d] + w.after[i, d]
                    w.tail[d] = w.before[i, d]
                    w.behind[d] = max(w.behind[d], w.before[i, d] - w.remaining[d])
                    w.remaining[d] += t.launch_backward[i, c, d]


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
        row = pair_row(t, chosen, w)
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
        row = edge_row(t, e, chosen[p], c)
        wait, alone = 0.0, _joins(t, chosen, e, t.layout[e, c], t.edge_to[e]) == 0
        if t.there_send[row] != 0 and alone:
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
                if alone and t.there_launch[row, a] > 0.0:
                    leaves = max(leaves, w.launched[a] + t.launch_issue[a])
                w.arrived[e, x] = max(w.arrived[e, x], leaves + t.there[row, a, x])
        if alone:
            for a in range(count):
                w.launched[a] += t.there_launch[row, a]


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
def _begin(t: Tables, w: Work, chosen: I64, i: Any, c: Any, last: F64, launched: F64, start: F64, fixed: Any) -> None:
    """When the forward pieces of an operator can start, by device. ``fixed``: its config is chosen, not only tried;
    then what it reads has queued."""
    count = last.shape[0]
    for d in range(count):
        begin = max(last[d], t.gathered[i, c, d], launched[d] + t.launch_forward[i, c, d])
        start[d] = begin if t.on[i, c] >> d & 1 == 1 else NEVER
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
            there = t.there[edge_row(t, e, chosen[p], c)]
            for d in range(count):
                if t.on[i, c] >> d & 1 == 1:
                    if fixed:
                        start[d] = max(start[d], w.arrived[e, d])
                    else:
                        for a in range(count):
                            start[d] = max(start[d], w.end[p, a] + there[a, d])


@lean
def _follow(t: Tables, w: Work, chosen: I64, i: Any, c: Any, tail: F64, after: F64, fixed: Any) -> None:
    """What follows the backward pieces of an operator at least, by device. ``fixed``: its config is chosen, not only
    tried; then its exchanges queue."""
    count = tail.shape[0]
    for d in range(count):
        if t.on[i, c] >> d & 1 == 1:
            after[d] = tail[d]
    for e in range(t.into_last[i] - 1, t.into_first[i] - 1, -1):  # the last exchange first
        p = t.edge_from[e]
        if chosen[p] >= 0 and t.edge_flows[e] == 1:
            row = edge_row(t, e, chosen[p], c)
            follows = _return(t, w, chosen, e, row) if fixed and t.back_send[row] != 0 else NEVER
            if fixed and _joins(t, chosen, e, t.layout[e, c], i) == 0:
                for d in range(count):
                    w.remaining[d] += t.back_launch[row, d]
            for d in range(count):
                if t.on[i, c] >> d & 1 == 1:
                    if t.back_send[row] >> d & 1 == 1:
                        after[d] = max(after[d], follows)
                    for b in range(count):
                        after[d] = max(after[d], t.back[row, d, b] + w.before[p, b])
