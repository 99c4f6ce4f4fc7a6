"""What a chain may propose, drawn at random in compiled code: which operators change, and the numbers of their configs.

What a move needs and does not know yet (the 17th candidate of an operator, the config that follows another over an
edge) is noted as missing; Python adds it, and the same move is drawn again from the same random numbers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from flexsearch.compiled import F64, ONE, THREE, TWO, U8, U32, U64, ZERO, inlined, lean
from flexsearch.lower.change import Change, miss
from flexsearch.lower.configs import derived, like, moved_on, over, renamed, swapped, with_sharding
from flexsearch.lower.keys import CANDIDATE, FIRST_HALF, MISSING, find
from flexsearch.lower.tables import TemplateTables
from flexsearch.packed import packed

REDRAW, COPY, GROUP, REPEATED, SWAP, SHARD, SPAN, SPLIT = range(8)
UNIFORMS = 24
"""Random numbers for a proposal. The last decides on acceptance."""
NEITHER, JOIN = np.uint8(2), np.uint8(3)
"""In the place of a half: the operator is outside of the span, or joins both halves."""


@packed
class Rates(NamedTuple):
    """How often, (1,) each; see ``constants``."""

    twice: F64
    exchange: F64
    beside: F64
    alternate: F64
    both: F64


@packed
class Moves(NamedTuple):
    """The space for the moves; rows ``[first[i], last[i])`` of a list belong to item i."""

    often: F64  # cumulative probabilities of the moves
    rates: Rates
    leader: U32
    alike: U32  # by operator: the first one that shares its configs
    leader_at: U32  # by operator: its place among the leaders, or MISSING
    likely: F64  # cumulative probabilities of the leaders
    group_first: U32  # by leader: the operators that follow it
    group_last: U32
    member: U32
    member_source: U32
    member_link: U32
    main_source: U32  # by operator: the producer that it follows in a span (itself: none), and the link from there
    main_link: U32
    link_first: U32  # by operator
    link_last: U32
    link_target: U32
    link_kind: U32  # the first link that is alike; member_link and main_link are such ones
    link_forward: U8
    class_first: U32
    class_last: U32
    class_member: U32
    led_classes: U64  # (1,): classes of leaders; they come first
    alternates: U8  # by class: whether its members may have configs in turn
    apart: U8  # (led class, led class): whether they have no operators in common
    partner_first: U32  # by led class: classes of its shape and number of members; no two have any in common
    partner_last: U32
    partner: U32
    weighted: U32
    sharding: U32  # ways to keep weights (ranks of ``Sharding``)
    devices: U64  # (1,)
    axis_orders: U64  # (1,): ways of renaming devices by permuting the axes of the machine
    relabel: npt.NDArray[np.uint32]  # by such a way and device: its new name
    chosen: U32  # work array, by operator: its new config


@packed
class Draws(NamedTuple):
    """``uniform``: (rows, UNIFORMS) random numbers; ``row``: (1,) of the proposal at hand; ``move``: (1,) its number.
    Candidates have numbers from ``first_candidate`` on, ``candidates`` ((1,) each) of them for each operator.
    ``half``: a work array by operator."""

    uniform: F64
    row: U64
    move: U64
    first_candidate: U64
    candidates: U64
    half: U8


@inlined
def draw(moves: Moves, draws: Draws, now: U32, tables: TemplateTables, change: Change) -> Any:
    """Fill ``change`` with a random move's configs; False if some are missing. ``now``: the plan's configs."""
    change.lacking[0] = ZERO
    change.number[0] = ZERO
    u = draws.uniform[draws.row[0]]
    move = ZERO
    while move < np.uint64(SPLIT) and u[0] >= moves.often[move]:
        move += ONE
    draws.move[0] = move
    if move == REDRAW:
        i = _pick(u[1], np.uint64(now.shape[0]))
        _add(change, i, _candidate(moves, draws, tables, change, i, u[2]))
    elif move == COPY:
        _copy(moves, now, tables, change, u)
    elif move == REPEATED and moves.class_first.shape[0] > 0:
        _repeat(moves, draws, now, tables, change, u)
    elif move == SPAN:
        _span(moves, draws, now, tables, change, u)
    elif move == SWAP and moves.devices[0] > ONE:
        _rename(moves, now, tables, change, u)
    elif move == SHARD and moves.weighted.shape[0] > 0:
        _shard(moves, now, tables, change, u)
    elif move == SPLIT and moves.devices[0] > ONE:
        _split(moves, draws, now, tables, change, u)
    else:
        _group(moves, draws, tables, change, u)
    return change.lacking[0] == ZERO and tables.full[0] == 0


@lean
def _pick(u: float, count: Any) -> Any:
    """A number below ``count``."""
    return min(np.uint64(u * float(count)), count - ONE)


@lean
def _candidate(moves: Moves, draws: Draws, tables: TemplateTables, change: Change, i: Any, u: float) -> Any:
    """Config of a candidate's number; MISSING, and noted, if it is not known."""
    k = draws.first_candidate[0] + _pick(u, draws.candidates[0])
    config = find(tables.keys, CANDIDATE, moves.alike[i], k)
    if config == MISSING:
        miss(change, CANDIDATE, moves.alike[i], k)
    return config


@lean
def _add(change: Change, i: Any, config: Any) -> None:
    """One more operator with a new config."""
    change.operator[change.number[0]] = i
    change.config[change.number[0]] = config
    change.number[0] += ONE


@lean
def _lead(moves: Moves, tables: TemplateTables, change: Change, at: Any, config: Any) -> None:
    """A leader with a new config, and the operators of its group following it."""
    if config == MISSING:
        return
    leader = np.uint64(moves.leader[at])
    _add(change, leader, config)
    moves.chosen[leader] = config
    for k in range(np.uint64(moves.group_first[at]), np.uint64(moves.group_last[at])):
        i = np.uint64(moves.member[k])
        follows = over(tables, change, moves.member_link[k], moves.chosen[np.uint64(moves.member_source[k])])
        if follows == MISSING:
            return
        _add(change, i, follows)
        moves.chosen[i] = follows


@lean
def lead(moves: Moves, tables: TemplateTables, change: Change, i: Any, config: Any) -> None:
    """An operator with a new config, and if it is a leader the operators of its group following it."""
    if moves.leader_at[i] != MISSING:
        _lead(moves, tables, change, np.uint64(moves.leader_at[i]), config)
    elif config != MISSING:
        _add(change, i, config)


@lean
def _group(moves: Moves, draws: Draws, tables: TemplateTables, change: Change, u: F64) -> None:
    """A leader gets a candidate, the likelier the more there is to gain; its group follows."""
    at = ZERO
    while at + ONE < np.uint64(moves.leader.shape[0]) and u[1] >= moves.likely[at]:
        at += ONE
    config = _candidate(moves, draws, tables, change, np.uint64(moves.leader[at]), u[2])
    _lead(moves, tables, change, at, config)


@lean
def _shard(moves: Moves, now: U32, tables: TemplateTables, change: Change, u: F64) -> None:
    """The weights of an operator, or of all, are sharded otherwise, or kept whole again."""
    at = _pick(u[1], np.uint64(moves.weighted.shape[0]))
    sharding, last = tables.pools.config_sharding, np.uint64(moves.sharding.shape[0]) - ONE
    k = _pick(u[3], last)  # of the others
    if moves.sharding[k] == sharding[np.uint64(now[np.uint64(moves.weighted[at])])]:
        k = last
    to = moves.sharding[k]
    for k in range(np.uint64(moves.weighted.shape[0])):
        i = np.uint64(moves.weighted[k])
        if (u[2] >= 0.8 or k == at) and sharding[np.uint64(now[i])] != to:
            _add(change, i, with_sharding(tables, change, now[i], to))


@lean
def _repeat(moves: Moves, draws: Draws, now: U32, tables: TemplateTables, change: Change, u: F64) -> None:
    """Change a class; or two that have no operators in common (one makes room for the other, or they exchange their
    configs); or classes of one shape, side by side; or every second or third member of a class, and perhaps the next
    ones to something else."""
    led, every = np.uint64(moves.led_classes[0]), np.uint64(moves.class_first.shape[0])
    first = _pick(u[1], led) if led > ZERO and (u[5] < 0.8 or led == every) else led + _pick(u[1], every - led)
    several = first < led and moves.partner_first[first] < moves.partner_last[first]
    if several and u[19] < moves.rates.exchange[0]:
        count = np.uint64(moves.partner_last[first] - moves.partner_first[first])
        second = np.uint64(moves.partner[np.uint64(moves.partner_first[first]) + _pick(u[20], count)])
        _take_over(moves, now, tables, change, first, second)
        _take_over(moves, now, tables, change, second, first)
        return
    if several and u[21] < moves.rates.beside[0]:
        _side_by_side(moves, draws, now, tables, change, first, u[2:8])
        return
    if moves.alternates[first] == 1 and u[16] < moves.rates.alternate[0]:
        stride = THREE if u[17] >= 0.8 and moves.class_last[first] - moves.class_first[first] > 2 else TWO
        offset = _pick(u[18], stride)
        _change_members(moves, draws, now, tables, change, first, offset, stride, u[2:8])
        if u[8] < moves.rates.both[0]:
            _change_members(moves, draws, now, tables, change, first, (offset + ONE) % stride, stride, u[10:16])
        return
    _change_members(moves, draws, now, tables, change, first, ZERO, ONE, u[2:8])
    if u[8] < moves.rates.twice[0] and first < led:
        second = _pick(u[9], led)
        if moves.apart[first, second] == 1:
            _change_members(moves, draws, now, tables, change, second, ZERO, ONE, u[10:16])


@lean
def _change_members(
    moves: Moves, draws: Draws, now: U32, tables: TemplateTables, change: Change, which: Any, offset: Any,
    stride: Any, u: F64,
) -> None:  # fmt: skip
    """Members ``offset``, ``offset + stride``, ... of a class get the same: a candidate, or what one of them has, with
    devices renamed, or what it would have after one of its neighbours."""
    first, last = np.uint64(moves.class_first[which]) + offset, np.uint64(moves.class_last[which])
    if first >= last:
        return
    model = np.uint64(moves.class_member[first + stride * _pick(u[1], (last - first + stride - ONE) // stride)])
    same = now[model]
    if 0.85 <= u[2] < 0.88:
        same = _renamed(moves, tables, change, now[model], _renaming(moves, u[0], u[4], u[5]))
    elif u[2] >= 0.88:
        same = _after_neighbour(moves, now, tables, change, model, u[4])
    if same == MISSING:
        return
    if u[2] >= 0.7:
        _all_like(moves, tables, change, first, last, stride, same)
        return
    for k in range(first, last, stride):
        i = np.uint64(moves.class_member[k])
        # Candidate k is the same for all operators of a class.
        lead(moves, tables, change, i, _candidate(moves, draws, tables, change, i, u[0]))


@lean
def _all_like(
    moves: Moves, tables: TemplateTables, change: Change, first: Any, last: Any, stride: Any, same: Any
) -> None:  # fmt: skip
    """Members of a class, by their rows, get a config, which may be that of another operator of their shape."""
    for k in range(np.uint64(first), np.uint64(last), stride):
        i = np.uint64(moves.class_member[k])
        lead(moves, tables, change, i, like(tables, change, moves.alike[i], same))


@lean
def _take_over(moves: Moves, now: U32, tables: TemplateTables, change: Change, to: Any, of: Any) -> None:
    """Members of a class get the configs of those of another class, in order."""
    first, source = np.uint64(moves.class_first[to]), np.uint64(moves.class_first[of])
    for k in range(np.uint64(moves.class_last[to]) - first):
        i = np.uint64(moves.class_member[first + k])
        lead(moves, tables, change, i, now[np.uint64(moves.class_member[source + k])])


@lean
def _side_by_side(
    moves: Moves, draws: Draws, now: U32, tables: TemplateTables, change: Change, which: Any, u: F64
) -> None:  # fmt: skip
    """A class gets a candidate, or keeps what it has, and the classes of its shape get the same on the next devices:
    the layers of a recurrent network work at the same time, so that splitting one further gains nothing until the
    others are."""
    model = np.uint64(moves.class_member[np.uint64(moves.class_first[which])])
    same = _candidate(moves, draws, tables, change, model, u[0]) if u[2] < 0.7 else np.uint32(now[model])
    if same == MISSING:
        return
    _all_like(moves, tables, change, moves.class_first[which], moves.class_last[which], ONE, same)
    first, last = np.uint64(moves.partner_first[which]), np.uint64(moves.partner_last[which])
    if u[1] < 0.5:  # one of them
        first += _pick(u[3], last - first)
        last = first + ONE
    for k in range(first, last):
        same = moved_on(tables, change, same, moves.devices[0])
        if same == MISSING:
            return
        partner = np.uint64(moves.partner[k])
        _all_like(moves, tables, change, moves.class_first[partner], moves.class_last[partner], ONE, same)


@lean
def _after_neighbour(moves: Moves, now: U32, tables: TemplateTables, change: Change, i: Any, u: float) -> Any:
    """The config of operator ``i`` that follows one of its neighbours; its own if it has none."""
    first, last = np.uint64(moves.link_first[i]), np.uint64(moves.link_last[i])
    if first == last:
        return now[i]
    source = np.uint64(moves.link_target[first + _pick(u, last - first)])
    back = np.uint64(moves.link_first[source])
    while moves.link_target[back] != i:
        back += ONE
    return _follow(tables, change, moves.link_kind[back], now[source], now[i])


@lean
def _follow(tables: TemplateTables, change: Change, link: Any, config: Any, has: Any) -> Any:
    """What follows ``config`` over a link, with the states of weights as in the config that the operator ``has``."""
    follows, sharding = over(tables, change, link, config), tables.pools.config_sharding
    if follows != MISSING and sharding[np.uint64(follows)] != sharding[np.uint64(has)]:
        follows = with_sharding(tables, change, follows, sharding[np.uint64(has)])
    return follows


@lean
def _renaming(moves: Moves, u: float, v: float, w: float) -> Any:
    """Number of a way of renaming devices: two are exchanged (a * devices + b, after the others) or, half of the time
    where the machine has several axes, all are renamed by permuting these."""
    devices, orders = np.uint64(moves.devices[0]), np.uint64(moves.axis_orders[0])
    if orders > ZERO and (u < 0.5 or devices == ONE):
        return _pick(v, orders)
    if devices == ONE:
        return orders
    a, b = _pick(v, devices), _pick(w, devices - ONE)
    return orders + a * devices + (b + ONE if b >= a else b)


@lean
def _renamed(moves: Moves, tables: TemplateTables, change: Change, config: Any, renaming: Any) -> Any:
    """A config with its devices renamed."""
    devices, orders = np.uint64(moves.devices[0]), np.uint64(moves.axis_orders[0])
    if renaming < orders:
        return renamed(tables, change, config, moves.relabel[renaming])
    return swapped(tables, change, config, (renaming - orders) // devices, (renaming - orders) % devices)


@lean
def _length(u: float, count: Any) -> Any:
    """A random length up to ``count``: each power of two and what lies below the next is equally likely. In operations
    that are exact, unlike ``count ** u``."""
    doublings = ZERO
    while (ONE << (doublings + ONE)) <= count:
        doublings += ONE
    place = u * float(doublings + ONE)
    doubling = min(np.uint64(place), doublings)
    shortest = ONE << doubling
    return min(count, shortest + np.uint64((place - float(doubling)) * float(shortest)))


@lean
def _span(moves: Moves, draws: Draws, now: U32, tables: TemplateTables, change: Change, u: F64) -> None:
    """A stretch of the graph: its first operator gets a candidate or what it has, the others follow their producers."""
    count = np.uint64(now.shape[0])
    first = _pick(u[1], count)
    last = min(count, first + _length(u[3], count))
    for i in range(first, last):
        moves.chosen[i] = MISSING
    config = np.uint64(now[first])
    if u[4] < 0.8:
        config = _candidate(moves, draws, tables, change, first, u[2])
        if config == MISSING:
            return
        _add(change, first, config)
    moves.chosen[first] = config
    for i in range(first + ONE, last):
        source = np.uint64(moves.main_source[i])
        if source < first or source == i or moves.chosen[source] == MISSING:
            continue
        follows = _follow(tables, change, moves.main_link[i], moves.chosen[source], now[i])
        if follows == MISSING:
            return
        _add(change, i, follows)
        moves.chosen[i] = follows


@lean
def _split(moves: Moves, draws: Draws, now: U32, tables: TemplateTables, change: Change, u: F64) -> None:
    """Operators of a stretch of the graph go to two halves of the devices that each of them has: those before a cut
    and those behind it, or branch by branch. What joins branches of both halves stays."""
    count = np.uint64(now.shape[0])
    first = _pick(u[1], count)
    last = min(count, first + _length(u[2], count))
    cut = first + _pick(u[3], last - first) if u[4] < 0.5 else last
    branches = ZERO
    for i in range(first, last):
        half = np.uint8(0 if i < cut else 1)
        if cut == last:
            half = _half_of_producers(moves, draws, first, i)
            if half == NEITHER:
                half = np.uint8(0 if u[np.uint64(5) + branches % np.uint64(16)] < 0.5 else 1)
                branches += ONE
        draws.half[i] = half
        if half != JOIN:
            _add(change, i, derived(tables, change, FIRST_HALF + np.uint64(half), now[i]))
    for i in range(first, last):
        draws.half[i] = NEITHER


@lean
def _half_of_producers(moves: Moves, draws: Draws, first: Any, i: Any) -> Any:
    """Half of an operator's producers from operator ``first`` on: JOIN if they differ, NEITHER if it has none."""
    half = NEITHER
    for k in range(np.uint64(moves.link_first[i]), np.uint64(moves.link_last[i])):
        source = np.uint64(moves.link_target[k])
        if moves.link_forward[k] == 0 and source >= first and draws.half[source] != NEITHER:
            half = draws.half[source] if half == NEITHER or half == draws.half[source] else JOIN
    return half


@lean
def _rename(moves: Moves, now: U32, tables: TemplateTables, change: Change, u: F64) -> None:
    """Devices are renamed (two exchange their work, or the machine's axes theirs) in a group of operators or
    everywhere."""
    renaming = _renaming(moves, u[5], u[1], u[2])
    if u[3] >= (0.8 if renaming < moves.axis_orders[0] else 0.97):
        for every in range(np.uint64(now.shape[0])):
            _add(change, every, _renamed(moves, tables, change, now[every], renaming))
        return
    at = _pick(u[4], np.uint64(moves.leader.shape[0]))
    leader = np.uint64(moves.leader[at])
    _add(change, leader, _renamed(moves, tables, change, now[leader], renaming))
    for k in range(np.uint64(moves.group_first[at]), np.uint64(moves.group_last[at])):
        i = np.uint64(moves.member[k])
        _add(change, i, _renamed(moves, tables, change, now[i], renaming))


@lean
def _copy(moves: Moves, now: U32, tables: TemplateTables, change: Change, u: F64) -> None:
    """An operator does as a neighbour does, and so on for a few steps in one direction."""
    at = _pick(u[1], np.uint64(now.shape[0]))
    forward = 1 if u[2] < 0.5 else 0
    config = now[at]
    for step in range(np.uint64(8)):
        count = ZERO
        for k in range(np.uint64(moves.link_first[at]), np.uint64(moves.link_last[at])):
            count += ONE if moves.link_forward[k] == forward else ZERO
        if count == ZERO:
            return
        which = _pick(u[np.uint64(3) + TWO * step], count)
        link: Any = ZERO
        for k in range(np.uint64(moves.link_first[at]), np.uint64(moves.link_last[at])):
            if moves.link_forward[k] == forward:
                if which == ZERO:
                    link = k
                    break
                which -= ONE
        at = np.uint64(moves.link_target[link])
        config = _follow(tables, change, moves.link_kind[link], config, now[at])
        if config == MISSING:
            return
        _add(change, at, config)
        if u[np.uint64(4) + TWO * step] < 0.35:
            return
