"""How data gets from one layout to another: every decision about communication, compiled.

``plan`` weighs the candidates that :mod:`flexsearch.lower.reshard` describes against each other, and leaves the moves
and exchanges of the best in the workspace. Entries, terms and devices are visited in ascending order, so that the same
layouts always give the same plan.
"""

from __future__ import annotations

from math import inf
from typing import Any

import numpy as np

from flexsearch.compiled import I64, ONE, TWO, U32, U64, ZERO, lean
from flexsearch.cost.collectives import ALL_REDUCE
from flexsearch.cost.tally import Rates
from flexsearch.cost.ticks import FOREVER, TICK
from flexsearch.lower.interned import Side
from flexsearch.lower.moves import (
    BY_ALL_REDUCE,
    BY_BYTES,
    BY_PARTS,
    FREE,
    GIVEN,
    SHARED,
    clear_done,
    collect,
    cut_part,
    equal,
    group_by_box,
    share,
)
from flexsearch.lower.sums import all_reduces, number_hosts, number_sets, reduce_across, scatter, sum_within
from flexsearch.lower.traffic import NONE, SOON, make_exchanges
from flexsearch.lower.workspace import (
    DRAG,
    FIRST,
    FULL,
    LAST,
    LINK,
    MIDDLE,
    MOVE_FIRST,
    MOVE_LAST,
    MOVE_MIDDLE,
    PHASES,
    TRIVIAL,
    Exchanges,
    Groups,
    Moves,
    Sets,
    Workspace,
)
from flexsearch.topology.routes import RouteTable

# Constants that are handed on have a numpy type: for every plain number numba would compile a function again.
MANY: Any = np.uint64(64)
"""All-reduces among more devices than that are not compared with messages."""


@lean
def plan(
    routes: RouteTable, rates: Rates, source: Side, destination: Side, mode: Any, itemsize: Any, workspace: Workspace
) -> None:
    """The cheapest known movement, on ``workspace.result``. ``itemsize``: bytes per element (int64)."""
    moves, rows, groups, result = workspace.moves, workspace.exchanges, workspace.groups, workspace.result
    starts, form = mode != BY_BYTES and (mode != SHARED or rates.by_group[ALL_REDUCE] == 1), mode
    mode = FREE if mode >= SHARED else mode
    _clear(moves.size, rows.size, rows.loads.size, result)
    if mode == FREE and _all_at_once(routes, rates, source, destination, itemsize, groups, moves, rows):
        _choose(result, ONE, ZERO, rows.size[0], rows.size[0], ZERO, moves.size[0], moves.size[0])
        _end(source, destination, workspace)
        return
    _clear(moves.size, rows.size, rows.loads.size, result)
    if mode == FREE and _host_by_host(routes, rates, source, destination, itemsize, workspace):
        return
    _clear(moves.size, rows.size, rows.loads.size, result)
    clear_done(groups.done, destination.size[0])
    collect(routes, source, destination, mode, groups, moves, result)
    make_exchanges(routes, rates, source, destination, ZERO, itemsize, moves, workspace.sets, rows)
    nothing = (inf, np.int64(0))
    best = _weigh(rates, workspace, ONE, ZERO, rows.size[0], ZERO, moves.size[0], starts, nothing)
    if mode == FREE and share(destination, moves, groups):
        if form == BY_PARTS:
            _in_parts(routes, rates, source, destination, itemsize, workspace, starts, nothing)
        else:
            best = nothing if form == BY_ALL_REDUCE else best
            reduced, best = _by_all_reduces(routes, rates, source, destination, itemsize, workspace, starts, best)
            if form != BY_ALL_REDUCE:
                best = _in_parts(routes, rates, source, destination, itemsize, workspace, starts, best)
            if not reduced:
                _within_sets(routes, rates, source, destination, itemsize, workspace, starts, best)
    _end(source, destination, workspace)


@lean
def _by_all_reduces(
    routes: RouteTable, rates: Rates, source: Side, destination: Side, itemsize: Any, workspace: Workspace,
    starts: Any, best: Any,
) -> tuple[Any, Any]:  # fmt: skip
    """Weigh sums by all-reduces. Also says whether there are any."""
    moves, rows, groups = workspace.moves, workspace.exchanges, workspace.groups
    begin, first = moves.size[0], rows.size[0]
    clear_done(groups.done, destination.size[0])
    if not all_reduces(routes, rates, source, destination, itemsize, groups, moves, rows):
        return False, best
    half = moves.size[0]
    collect(routes, source, destination, FREE, groups, moves, workspace.result)
    make_exchanges(routes, rates, source, destination, half, itemsize, moves, workspace.sets, rows)
    return True, _weigh(rates, workspace, ONE, first, rows.size[0], begin, moves.size[0], starts, best)


@lean
def _in_parts(
    routes: RouteTable, rates: Rates, source: Side, destination: Side, itemsize: Any, workspace: Workspace,
    starts: Any, best: Any,
) -> Any:  # fmt: skip
    """Weigh that each device gets a part of what its group wants, and the rest from the group."""
    moves, rows, groups, between = workspace.moves, workspace.exchanges, workspace.groups, workspace.middle
    begin, first = moves.size[0], rows.size[0]
    scatter(destination, groups, between)
    clear_done(groups.done, between.size[0])
    collect(routes, source, between, FREE, groups, moves, workspace.result)
    make_exchanges(routes, rates, source, between, begin, itemsize, moves, workspace.sets, rows)
    half, middle = moves.size[0], rows.size[0]
    clear_done(groups.done, destination.size[0])
    collect(routes, between, destination, GIVEN, groups, moves, workspace.result)
    make_exchanges(routes, rates, between, destination, half, itemsize, moves, workspace.sets, rows)
    return _weigh(rates, workspace, TWO, first, middle, begin, half, starts, best)


@lean
def _within_sets(
    routes: RouteTable, rates: Rates, source: Side, destination: Side, itemsize: Any, workspace: Workspace,
    starts: Any, best: Any,
) -> None:  # fmt: skip
    """Weigh partial sums where each part of the whole is once, then all-reduces of equal parts."""
    moves, rows, groups, result = workspace.moves, workspace.exchanges, workspace.groups, workspace.result
    boxes = number_sets(destination, groups)
    if boxes <= ONE:
        return
    begin, first, phases = moves.size[0], rows.size[0], result[PHASES]
    if sum_within(routes, source, destination, ZERO, boxes, moves, groups, workspace.middle):
        make_exchanges(routes, rates, source, workspace.middle, begin, itemsize, moves, workspace.sets, rows)
        half, middle = moves.size[0], rows.size[0]
        reduce_across(routes, rates, destination, ZERO, boxes, itemsize, groups, moves, rows)
        if _weigh(rates, workspace, TWO, first, middle, begin, half, starts, best) != best:
            return
    if phases == TWO:
        scatter(destination, groups, workspace.middle)  # it was written over


@lean
def _weigh(
    rates: Rates, workspace: Workspace, phases: Any, first: Any, middle: Any, begin: Any, half: Any, starts: Any,
    best: Any,
) -> Any:  # fmt: skip
    """Choose the exchanges from ``first`` on, ``middle`` being the first of a second phase, and the moves from
    ``begin`` and ``half`` on, if they take less than ``best``: seconds, and bytes, which decide where latencies differ
    by nothing. Returns the less of the two. Ties go to what was weighed earlier, which is simpler."""
    rows, last = workspace.exchanges, workspace.exchanges.size[0]
    seconds = _seconds(rates, rows, first, middle, starts) + _seconds(rates, rows, middle, last, starts)
    nbytes = _nbytes(rows, first, last)
    if seconds < best[0] or (seconds == best[0] and nbytes < best[1]):
        _choose(workspace.result, phases, first, middle, last, begin, half, workspace.moves.size[0])
        return seconds, nbytes
    return best


@lean
def _end(source: Side, destination: Side, workspace: Workspace) -> None:
    """Say whether there was room for all; if so, make the chosen plan ready to be read."""
    if workspace.moves.size[1] == ONE or workspace.exchanges.loads.size[2] == ONE:
        workspace.result[FULL] = ONE
    else:
        _finish(source, destination, workspace)


@lean
def _all_at_once(
    routes: RouteTable, rates: Rates, source: Side, destination: Side, itemsize: Any, groups: Groups, moves: Moves,
    rows: Exchanges,
) -> Any:  # fmt: skip
    """Whether all-reduces among more than MANY devices each, or of single numbers where ``reduces_numbers`` says so,
    are all that is needed; they are added then. Nothing else is weighed against them: messages from each to each would
    take the square of the devices to write down."""
    numbers = rates.reduces_numbers[0] == 1 and destination.size[0] > ZERO
    for k in range(destination.size[0]):
        numbers = numbers and destination.volume[k] == 1
    if destination.size[0] <= MANY and not numbers:
        return False
    group_by_box(destination, groups)
    for k in range(destination.size[0]):
        groups.shared[k] = 1 if groups.members[k] > 0 else 0
        if not numbers and ZERO < np.uint64(groups.members[k]) <= MANY:
            return False
    clear_done(groups.done, destination.size[0])
    if not all_reduces(routes, rates, source, destination, itemsize, groups, moves, rows):
        return False
    left = False
    for k in range(destination.size[0]):
        left = left or groups.done[k] == 0
    return not left


@lean
def _host_by_host(
    routes: RouteTable, rates: Rates, source: Side, destination: Side, itemsize: Any, workspace: Workspace
) -> Any:
    """Whether partial sums can be added up in each host first, and then by all-reduces among hosts, each of more than
    MANY devices; that is planned then. Nothing else is weighed against it, as in ``_all_at_once``."""
    groups, moves, rows = workspace.groups, workspace.moves, workspace.exchanges
    if destination.size[0] <= MANY:
        return False
    group_by_box(destination, groups)
    for k in range(destination.size[0]):
        if ZERO < np.uint64(groups.members[k]) <= MANY:
            return False
    boxes = number_sets(destination, groups)
    hosts = number_hosts(rates, destination, boxes, groups) if boxes > ONE else ZERO
    if hosts <= MANY:
        return False
    if not sum_within(routes, source, destination, hosts, boxes, moves, groups, workspace.middle):
        workspace.result[FULL] = moves.size[1]
        return moves.size[1] == ONE
    make_exchanges(routes, rates, source, workspace.middle, ZERO, itemsize, moves, workspace.sets, rows)
    half, middle = moves.size[0], rows.size[0]
    reduce_across(routes, rates, destination, hosts, boxes, itemsize, groups, moves, rows)
    _choose(workspace.result, TWO, ZERO, middle, rows.size[0], ZERO, half, moves.size[0])
    _end(source, destination, workspace)
    return True


@lean
def _clear(moves: U64, rows: U64, loads: U64, result: U64) -> None:
    for k in range(np.uint64(moves.shape[0])):
        moves[k] = ZERO
    for k in range(np.uint64(rows.shape[0])):
        rows[k] = ZERO
    for k in range(np.uint64(loads.shape[0])):
        loads[k] = ZERO
    for k in range(np.uint64(result.shape[0])):
        result[k] = ZERO


@lean
def _choose(result: U64, phases: Any, first: Any, middle: Any, last: Any, begin: Any, half: Any, end: Any) -> None:
    result[PHASES] = phases
    result[FIRST], result[MIDDLE], result[LAST] = first, middle, last
    result[MOVE_FIRST], result[MOVE_MIDDLE], result[MOVE_LAST] = begin, half, end


@lean
def _seconds(rates: Rates, rows: Exchanges, first: Any, last: Any, starts: Any) -> Any:
    """Duration of a phase if nothing else used the links: its slowest exchange, or the link that several share, and
    what starts take from the processor that takes part in most of them; without ``starts``: its busiest link."""
    slowest, most, load, loads = 0.0, np.int64(0), rows.tally.load, rows.loads
    for x in range(first, last):
        slowest = max(slowest, rows.duration[x]) if starts else slowest
    if last - first > ONE or (last > first and not starts):
        begin = np.uint64(rows.end[LINK, first - ONE]) if first > ZERO else ZERO
        end = np.uint64(rows.end[LINK, last - ONE])
        for k in range(begin, end):
            r = np.uint64(loads.link[k])
            load[r] = min(load[r] + np.int64(loads.link_s[k] / TICK), FOREVER)  # or many might exceed an int64
            slowest = max(slowest, np.float64(load[r]) * TICK)
        for k in range(begin, end):
            load[np.uint64(loads.link[k])] = 0
    if last > first and starts and rates.cpu_s[0] > 0.0:
        begin = np.uint64(rows.end[DRAG, first - ONE]) if first > ZERO else ZERO
        end = np.uint64(rows.end[DRAG, last - ONE])
        for k in range(begin, end):
            load[np.uint64(loads.drag[k])] += 1
            most = max(most, load[np.uint64(loads.drag[k])])
        for k in range(begin, end):
            load[np.uint64(loads.drag[k])] = 0
    return slowest + rates.cpu_s[0] * np.float64(most)


@lean
def _nbytes(rows: Exchanges, first: Any, last: Any) -> Any:
    total = np.int64(0)
    for x in range(first, last):
        total += rows.nbytes[x]
    return total


# ---- where weights are stored


@lean
def store(device: U32, box: I64, entries: Any, over: Any, groups: Groups, sets: Sets, middle: Side) -> None:
    """The region that each device stores, on ``middle``: the bounding box of all the boxes that it needs, of which
    ``box`` has one an entry (they are written over). Devices with the same one stand together; those of
    them among ``over`` consecutive devices divide it. ``groups.first`` and ``end``: where the parts stand that an
    entry's device and those it divides its box with have."""
    devices, rank = np.uint64(groups.member.shape[0]), np.uint64(box.shape[1])
    for d in range(devices):
        groups.member[d] = NONE
    for k in range(entries):  # the device's first entry grows to its bounding box
        owner = np.uint64(device[k])
        if groups.member[owner] == NONE:
            groups.member[owner] = k
        first = np.uint64(groups.member[owner])
        for r in range(rank):
            box[first, r, 0] = min(box[first, r, 0], box[k, r, 0])
            box[first, r, 1] = max(box[first, r, 1], box[k, r, 1])
    count = ZERO
    for d in range(devices):  # sets of devices with the same box: lists from ``seated`` on along ``root``
        if groups.member[d] == NONE:
            continue
        own, mine = ZERO, np.uint64(groups.member[d])
        while own < count:
            other = np.uint64(groups.member[np.uint64(sets.seated[own])])
            if equal(box, other, box, mine, rank):
                break
            own += ONE
        if own == count:
            sets.seated[own] = d
            count += ONE
        else:
            sets.root[np.uint64(sets.seat[own])] = d
        sets.seat[own], sets.root[d] = d, NONE
        at = group = ZERO
    for c in range(count):
        holder, part, parts = sets.seated[c], ZERO, ZERO
        while holder != NONE:
            if part == parts:
                part, parts, other = ZERO, ZERO, holder
                while other != NONE and np.uint64(other) // over == np.uint64(holder) // over:
                    parts += ONE
                    other = sets.root[np.uint64(other)]
                groups.terms[group] = at
                group += ONE
            first = np.uint64(groups.member[np.uint64(holder)])
            at += cut_part(middle, at, holder, box, first, part, parts)
            sets.number[np.uint64(holder)], sets.end[group - ONE] = group - ONE, at
            part += ONE
            holder = sets.root[np.uint64(holder)]
    for k in range(entries):
        own = np.uint64(sets.number[np.uint64(device[k])])
        groups.first[k], groups.end[k] = groups.terms[own], sets.end[own]
    middle.size[0] = at


# ---- what the plan comes to


@lean
def _finish(source: Side, destination: Side, workspace: Workspace) -> None:
    """Devices that have nothing to do."""
    result, moves, count = workspace.result, workspace.moves, destination.size[0]
    arriving, holds, rank = workspace.sets.arriving, workspace.groups.member, np.uint64(destination.box.shape[1])
    for d in range(np.uint64(holds.shape[0])):
        holds[d] = NONE
    for k in range(count):
        workspace.cuts[k], workspace.aliased[k], arriving[k] = 0, 0, 0
        device = np.uint64(destination.device[k])
        holds[device] = np.uint32(k) if holds[device] == NONE else SOON
    one = result[PHASES] == ONE
    for m in range(result[MOVE_FIRST if one else MOVE_MIDDLE], result[MOVE_LAST]):
        to = np.uint64(moves.destination[m])
        if moves.exchange[m] != NONE:
            arriving[to] += moves.volume[m]
        else:
            workspace.cuts[to] += np.uint32(1)
            workspace.cut[to] = moves.source[m]
    trivial = one and result[FIRST] == result[LAST]
    for k in range(count):
        # Exactly a source entry of its device, alone there.
        device = np.uint64(destination.device[k])
        if one and holds[device] == np.uint32(k) and arriving[k] == 0 and workspace.cuts[k] == 1:
            workspace.aliased[k] = equal(source.box, np.uint64(workspace.cut[k]), destination.box, k, rank)
        trivial = trivial and workspace.aliased[k] == 1
    result[TRIVIAL] = ONE if trivial else ZERO
