"""The arrays that compiled planning of reshards works on. Each function of the planner takes the few that it needs:
compiling takes the longer the more arrays it hands on."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from flexsearch.compiled import F64, I64, ONE, U8, U32, U64, ZERO, lean
from flexsearch.cost.tally import Loads, Tally, empty_loads
from flexsearch.lower.interned import Side
from flexsearch.packed import packed, zeros

Table = npt.NDArray[np.uint32]
"""Numbers in two dimensions."""
PHASES, FIRST, MIDDLE, LAST, MOVE_FIRST, MOVE_MIDDLE, MOVE_LAST, TRIVIAL, ERROR, FULL = range(10)
"""Places in ``Workspace.result``: number of phases of the plan that was chosen; exchanges of the first one are FIRST to
MIDDLE, of the second MIDDLE to LAST; likewise moves; whether nothing at all is done; whether there is no plan, or no
room for it."""
SEND, RECEIVE, LINK, DRAG, MESSAGE = range(5)
"""Rows of ``Exchanges.end``."""


@packed
class Moves(NamedTuple):
    """Moves: from ``source`` to ``destination`` entry, ``volume`` elements (of ``term``), in which ``exchange``.
    ``size``: (2,) moves so far, and whether there was no room for all. ``sent``: by device, elements that it sends in
    the phase at hand."""

    source: U32
    destination: U32
    volume: I64
    exchange: U32
    term: U32
    size: U64
    sent: I64


@packed
class Exchanges(NamedTuple):
    """Exchanges: ``form`` (number in ``FORMS``), ``nbytes``, ``unit`` (bytes that a load of 1 stands for), ``amount``
    (what a collective is priced by, see ``price_collective``; of messages 0), ``start`` (until bytes flow; of
    messages, s), ``duration`` (s), ``leader`` (destination entry whose region an all-reduce makes), ``end`` (of each
    list). ``send``, ``receive``: devices. ``message``: source and destination devices,
    ``message_bytes``. ``size``: (4,) exchanges, sends, receives, messages so far."""

    form: U8
    nbytes: I64
    unit: I64
    amount: I64
    start: F64
    duration: F64
    leader: U32
    end: Table
    send: U32
    receive: U32
    message: Table
    message_bytes: I64
    size: U64
    loads: Loads
    tally: Tally


@packed
class Groups(NamedTuple):
    """Destination entries with the same region. By entry: ``following``, the next one of its group. By first entry of a
    group: ``members``, ``last``, and whether the group is ``shared``: served together. By entry: ``first`` and ``end``
    of the source entries that it is put together from; whether it is ``done``; its moves, from ``moves_first`` to
    ``moves_end``. By device: the ``member`` of the group at hand, and how many ``terms`` it adds. ``box``: the
    first entries of the groups; ``order``: all entries, group by group (``sums.number_sets``)."""

    following: U32
    members: U32
    last: U32
    shared: U8
    first: U32
    end: U32
    done: U8
    member: U32
    terms: U32
    moves_first: U32
    moves_end: U32
    order: U32
    box: U32


@packed
class Sets(NamedTuple):
    """Sets of devices that talk to each other. By device: ``root`` (a device of its set), ``role`` (1: sends, 2:
    receives, 3: both), ``number`` of its set, and its ``seat``: set c has the devices ``seated[end[c -
    1]:end[c]]``. By set: number of ``moves``, and whether an entry ``adds`` up what it receives. ``pair``: bytes by
    seats of sender and receiver, set c's from ``first[c]`` on; then the exchange that they go in. By device:
    messages that it ``sends`` and ``receives``. By destination entry: elements ``arriving`` from other devices,
    ``total`` with those of its own, and the ``stamp`` of the set that saw it last."""

    root: U32
    role: U8
    number: U32
    seat: U32
    seated: U32
    end: U32
    moves: U32
    adds: U8
    first: U32
    pair: I64
    sends: U32
    receives: U32
    arriving: I64
    total: I64
    stamp: U32


@packed
class Orbits(NamedTuple):
    """Which exchanges other blocks make too (``flexsearch.lower.orbits``). By exchange: a number for its ``own``
    devices and the ``digest`` of its orbit; of the first of an orbit, how many are ``missing`` so far, with itself,
    and whether it ``crosses``: has devices of several blocks, but not of all alike."""

    own: U64
    digest: U64
    missing: U64
    crosses: U64


@packed
class Workspace(NamedTuple):
    """Where a reshard is planned. Candidates leave their moves and exchanges one after the other. ``middle``: layout
    between two phases. By destination entry: ``cuts``, local moves, ``cut``, the source of the last one, and whether it
    is ``aliased``."""

    moves: Moves
    exchanges: Exchanges
    groups: Groups
    sets: Sets
    middle: Side
    cuts: U32
    cut: U32
    aliased: U8
    orbits: Orbits
    result: U64


@lean
def begin_of(end: Table, k: Any, x: Any) -> Any:
    """Where list ``k`` of exchange ``x`` begins; ``end``: as in ``Exchanges``."""
    return np.uint64(end[k, x - ONE]) if x > ZERO else ZERO


def make_workspace(tally: Tally, devices: int, dimensions: int, entries: int, moves: int, links: int) -> Workspace:
    """Room for layouts of ``entries`` entries with ``dimensions`` dimensions, and in all candidates together for so
    many moves and rows of links, and twice as many pairs of devices that talk to each other in a phase."""
    # Four phases; in each of them exchanges share no device, or no entry of a group, or have one message of at most two
    # that a device sends.
    rows = 8 * entries + 4
    by_device = dict.fromkeys(("root", "role", "number", "seat", "seated", "end", "moves", "adds", "first"), devices)
    return zeros(
        Workspace, entries, moves=zeros(Moves, moves, size=2, sent=devices),
        exchanges=zeros(
            Exchanges, rows, end=(5, rows), send=3 * rows, receive=3 * rows, message=(2, moves), message_bytes=moves,
            size=4, loads=empty_loads(links), tally=tally,
        ),
        groups=zeros(Groups, entries, member=devices, terms=devices),
        sets=zeros(Sets, entries, **by_device, pair=2 * moves, sends=devices, receives=devices),
        middle=zeros(Side, entries, box=(entries, dimensions, 2), term_first=1, copy=1, size=2),
        orbits=zeros(Orbits, rows), result=10,
    )  # fmt: skip
