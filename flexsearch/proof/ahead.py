"""Bounds of what follows an operator whatever the configs of later operators are, compiled; see ``relaxation``."""

from __future__ import annotations

from typing import Any

import numpy as np

from flexsearch.compiled import F64, compiled, lean
from flexsearch.proof.tables import NEVER, Tables, edge_row, families, family, least_in


@lean
def _shared(t: Tables, j: Any, c: Any, m: Any, c2: Any, ends: F64, tails: F64, reached: F64) -> float:
    """When the weights are updated that ``j`` and the later operator ``m`` read, after ``j``'s backward pieces."""
    count, end = ends.shape[0], NEVER
    for w in range(t.pair_width.shape[0]):
        if t.pair_reader[w, 0] == j and t.pair_reader[w, 1] == m:
            row = t.pair_row[w] + t.pair_variant[w, 0, c] * t.pair_width[w] + t.pair_variant[w, 1, c2]
            for d in range(count):
                if t.on[j, c] >> d & 1 == 1:
                    column = (1 << d) if count <= 4 else 1 + d
                    done = max(reached[column], ends[d] + tails[column, d])
                    end = max(end, done + t.pair_sink[row, d])
    return end


@compiled
def look_ahead(t: Tables, ahead: F64, j: Any) -> None:
    """Fill ``ahead`` of operator ``j``: (operators, configs, A, 1 + 2 B); that of all later operators is known. At
    least so many seconds pass from the start of the forward pieces on A to

    - column 0: the end of the step;
    - the next columns: the end of the backward pieces on B;
    - the last columns: the end of all that devices B do for this and later operators, with the updates of weights that
      no earlier operator reads; that is one after the other on each device, whoever waits for what.

    A and B are numbers of ``family``."""
    count = t.forward.shape[2]
    sets = families(count)
    columns = 1 + 2 * sets
    ends, tails = np.full((sets, count), NEVER), np.full((columns, count), NEVER)
    starts, after = np.full((sets, sets), NEVER), np.full((columns, sets), NEVER)
    least, reached, moment = np.full((sets, columns), NEVER), np.full(columns, NEVER), np.full(count, NEVER)
    for c in range(t.choices[j]):
        value = ahead[j, c]
        ends[:] = NEVER
        tails[:] = NEVER
        _own_pieces(t, j, c, ends, tails)
        for a in range(sets):
            for b in range(columns):
                for d in range(count):
                    value[a, b] = max(value[a, b], ends[a, d] + tails[b, d])
            for d in range(count):
                value[a, 0] = max(value[a, 0], ends[a, d])
        for o in range(t.out_first[j], t.out_last[j]):
            e = t.out[o]
            least[:] = np.inf
            for c2 in range(t.choices[t.edge_to[e]]):
                row = edge_row(t, e, c, c2)
                _until_reader(t, e, c2, row, ends, starts, moment)
                _after_reader(t, e, c2, row, tails, after, moment)
                _through_reader(t, ahead, e, c, c2, ends, tails, starts, after, reached, least)
            for a in range(sets):
                for b in range(columns):
                    if least[a, b] < np.inf:
                        value[a, b] = max(value[a, b], least[a, b])
        for a in range(sets):
            for b in range(1, columns):
                value[a, 0] = max(value[a, 0], value[a, b])


@lean
def _own_pieces(t: Tables, j: Any, c: Any, ends: F64, tails: F64) -> None:
    """``ends`` (A, device): from the start of the forward pieces of operator ``j`` on A to the end of that of a device.
    ``tails`` (column, device): from the start of a device's backward piece to what the column stands for."""
    sets, count = ends.shape
    on, every = t.on[j, c], (1 << count) - 1
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


@lean
def _until_reader(t: Tables, e: Any, c2: Any, row: Any, ends: F64, starts: F64, moment: F64) -> None:
    """``starts`` (A, A of the reader): from the start of the producer's forward pieces to that of the reader's."""
    sets, count = ends.shape
    on, there = t.on[t.edge_to[e], c2], t.there[row]
    for a in range(sets):
        for x in range(count):
            moment[x] = ends[a, x]
            for d in range(count):
                moment[x] = max(moment[x], ends[a, d] + there[d, x])
        for k in range(sets):
            mask = family(count, k, on)
            starts[a, k] = least_in(moment, mask) if mask != 0 else NEVER


@lean
def _after_reader(t: Tables, e: Any, c2: Any, row: Any, tails: F64, after: F64, moment: F64) -> None:
    """``after`` (column, B of the reader): from the end of the reader's backward pieces to what the producer's column
    stands for."""
    count, sets = tails.shape[1], after.shape[1]
    m, back, every = t.edge_to[e], t.back[row], (1 << count) - 1
    on = t.on[m, c2]
    for b in range(1 + sets, after.shape[0]):
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
            mask = family(count, k, on)
            after[b, k] = least_in(moment, mask) if mask != 0 else NEVER


@lean
def _through_reader(
    t: Tables, ahead: F64, e: Any, c: Any, c2: Any, ends: F64, tails: F64, starts: F64, after: F64, reached: F64,
    least: F64,
) -> None:  # fmt: skip
    """Lower ``least`` (A, column) of the producer by what the reader with config ``c2`` makes of it."""
    sets, columns = least.shape
    count, j, m = ends.shape[1], t.edge_from[e], t.edge_to[e]
    on = t.on[j, c]
    for a in range(sets):
        if family(count, a, on) == 0:
            continue
        for b in range(columns - 1, -1, -1):
            reached[b] = NEVER
            if 0 < b <= sets and family(count, b - 1, on) == 0:
                continue
            timeline = sets if b > sets else 0
            bound = NEVER
            for k in range(sets):
                if starts[a, k] == NEVER:
                    continue
                through = ahead[m, c2, k]
                if b == 0:
                    bound = max(bound, starts[a, k] + through[0])
                for q in range(sets):
                    bound = max(bound, starts[a, k] + through[1 + timeline + q] + after[b, q])
            reached[b] = bound
            if b == 0:
                bound = max(bound, _shared(t, j, c, m, c2, ends[a], tails, reached))
            least[a, b] = min(least[a, b], bound)


@lean
def from_here(t: Tables, ahead: F64, j: Any, c: Any, starts: F64, after: F64, rest: F64) -> float:
    """The least makespan if, by device, the pieces of operator ``j`` start no earlier than ``starts``, ``after``
    seconds follow their backward pieces, and ``rest`` seconds are to be spent on earlier operators from then on."""
    count, every = t.forward.shape[2], (1 << t.forward.shape[2]) - 1
    sets = families(count)
    on, through = t.on[j, c], ahead[j, c]
    bound = 0.0
    for a in range(sets):
        mask = family(count, a, on)
        if mask == 0:
            continue
        start = least_in(starts, mask)
        bound = max(bound, start + through[a, 0])
        for b in range(sets):
            mask = family(count, b, on)
            if mask != 0:
                bound = max(bound, start + through[a, 1 + b] + least_in(after, mask))
            bound = max(bound, start + through[a, 1 + sets + b] + least_in(rest, family(count, b, every)))
    return bound
