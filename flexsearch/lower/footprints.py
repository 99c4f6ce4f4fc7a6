"""What reshards leave in memory, by device: the account of memory (``flexsearch.simulate.account``) is made of it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from flexsearch.compiled import I64, ONE, U8, U32, U64, lean
from flexsearch.cost.collectives import ALL_REDUCE
from flexsearch.lower.interned import Side
from flexsearch.lower.orbits import BlockMap, mixed, place_of
from flexsearch.lower.traffic import NONE
from flexsearch.lower.workspace import (
    FIRST,
    LAST,
    MIDDLE,
    MOVE_FIRST,
    MOVE_LAST,
    MOVE_MIDDLE,
    PHASES,
    RECEIVE,
    SEND,
    Exchanges,
    Workspace,
    begin_of,
)
from flexsearch.packed import packed

TAKES_PART, TAKES_PART_AGAIN, RECEIVES, ALIASED, SENDS, PARTS, STRIDED, OWN = (np.uint8(1 << k) for k in range(8))
"""Bits of ``Landings.role``: the device sends or receives in the first phase; in the second; it receives in any; what
it gets is exactly what it has, so that nothing is done there; it sends in the first phase. Of gradients of weights
besides: in that it sends parts of what it has, of which another stays; one of them does not lie in one run of memory; a
part of its own is as large as what the first phase makes there."""


@packed
class Landings(NamedTuple):
    """What reshards leave on devices. Reshard r has rows ``[landing_first[r], landing_last[r])``, one for each device
    that it concerns: ``device``, its ``role``, and bytes of the new ``copy``, of the layout in between (``middle``),
    and of what arrives in receive buffers in the first and second phase (``staged``, ``staged_again``): what is only a
    part of what it is for, or is added to more.
    Whether source entry k of reshard r is used (``note_used``) is ``used[used_first[r] + k]``."""

    landing_first: U32
    landing_last: U32
    used_first: U32
    used: U8
    device: U32
    role: U8
    copy: I64
    middle: I64
    staged: I64
    staged_again: I64


@packed
class Sums(NamedTuple):
    """Where the rows of a reshard are added up, by device; zeros between two reshards. ``used``: a hash of which of a
    device's source entries are."""

    role: U8
    used: U64
    copy: I64
    middle: I64
    staged: I64
    staged_again: I64


@lean
def note_used(workspace: Workspace, first: Any, used: U8) -> None:
    """Of which source entries of the reshard in the workspace anything is made, there or elsewhere, in ``used`` from
    ``first`` on, which is zero: replicas leave it to each other. Nobody makes a gradient that is not used."""
    moves, result = workspace.moves, workspace.result
    for m in range(result[MOVE_FIRST], result[MOVE_LAST] if result[PHASES] == ONE else result[MOVE_MIDDLE]):
        used[first + np.uint64(moves.source[m])] = 1


@lean
def append_landing(
    workspace: Workspace, source: Side, destination: Side, synchronises: Any, itemsize: Any, sums: Sums,
    blocks: BlockMap, landings: Landings, number: Any, size: U64,
) -> Any:  # fmt: skip
    """Add what the reshard in the workspace, ``number``, leaves on the devices of the first block. Whether it cuts what
    is there is of interest if it ``synchronises`` gradients. ``size``: (2,) rows, and entries of sources, so far, which
    grow. False, and nothing added, if there is no room."""
    entries = source.size[0]
    if number == np.uint64(landings.landing_first.shape[0]):
        return False
    if size[0] + blocks.devices[0] > np.uint64(landings.device.shape[0]):
        return False
    if size[1] + entries > np.uint64(landings.used.shape[0]):
        return False
    result, rows, arriving = workspace.result, workspace.exchanges, workspace.sets.arriving
    _join(rows, result[FIRST], result[MIDDLE], TAKES_PART, SENDS, sums.role)
    _join(rows, result[MIDDLE], result[LAST], TAKES_PART_AGAIN, TAKES_PART_AGAIN, sums.role)
    if result[PHASES] == ONE:
        _stage(workspace, destination, arriving, result[MOVE_FIRST], result[MOVE_LAST], sums.staged)
    else:
        _stage(workspace, workspace.middle, arriving, result[MOVE_FIRST], result[MOVE_MIDDLE], sums.staged)
        _stage(workspace, destination, arriving, result[MOVE_MIDDLE], result[MOVE_LAST], sums.staged_again)
        for k in range(workspace.middle.size[0]):
            sums.middle[np.uint64(workspace.middle.device[k])] += workspace.middle.volume[k]
    for k in range(destination.size[0]):
        device = np.uint64(destination.device[k])
        if result[PHASES] == ONE and workspace.aliased[k] == 1:
            sums.role[device] |= ALIASED
        else:
            sums.copy[device] += destination.volume[k]
    if synchronises:
        two = result[PHASES] != ONE
        last = result[MOVE_MIDDLE] if two else result[MOVE_LAST]
        _cut(workspace, source, workspace.middle if two else destination, arriving, result[MOVE_FIRST], last, sums.role)
    landings.used_first[number] = size[1]
    for k in range(entries):  # of a reshard for which there was no room elsewhere
        landings.used[size[1] + k] = 0
    note_used(workspace, size[1], landings.used)
    if blocks.replicas[0] > ONE:
        for k in range(entries):
            device = np.uint64(source.device[k])
            sums.used[device] = mixed(sums.used[device] + np.uint64(landings.used[size[1] + k]) + ONE)
        _check_alike(sums, blocks)
    _write(itemsize, sums, blocks.devices[0], landings, number, size)
    size[1] += entries
    return True


@lean
def _join(rows: Exchanges, first: Any, last: Any, bit: Any, sends: Any, role: U8) -> None:
    """Note who takes part in a phase, and who ``sends``."""
    for x in range(first, last):
        for k in range(begin_of(rows.end, SEND, x), np.uint64(rows.end[SEND, x])):
            role[np.uint64(rows.send[k])] |= bit | sends
        for k in range(begin_of(rows.end, RECEIVE, x), np.uint64(rows.end[RECEIVE, x])):
            role[np.uint64(rows.receive[k])] |= bit | RECEIVES


@lean
def _stage(workspace: Workspace, to: Side, arriving: I64, first: Any, last: Any, staged: I64) -> None:
    """Elements that moves of a phase to the layout ``to`` bring into receive buffers. An all-reduce is done in place,
    and so is what arrives whole and alone."""
    moves = workspace.moves
    for k in range(to.size[0]):
        arriving[k] = 0
    for m in range(first, last):
        arriving[np.uint64(moves.destination[m])] += 1
    for m in range(first, last):
        x = np.uint64(moves.exchange[m])
        if moves.exchange[m] != NONE and np.uint64(workspace.exchanges.form[x]) != ALL_REDUCE:
            entry = np.uint64(moves.destination[m])
            if arriving[entry] > 1 or moves.volume[m] != to.volume[entry]:
                staged[np.uint64(to.device[entry])] += moves.volume[m]


@lean
def _cut(workspace: Workspace, source: Side, to: Side, stays: I64, first: Any, last: Any, role: U8) -> None:
    """Note where moves of a phase to the layout ``to`` leave parts of source entries, and send others. A part lies in
    one run of memory if all dimensions but the first are whole."""
    moves = workspace.moves
    for every in range(source.size[0]):
        stays[every] = 0
    for m in range(first, last):
        k = np.uint64(moves.source[m])
        if moves.exchange[m] == NONE and moves.volume[m] < source.volume[k]:
            stays[k] = 1
        if moves.exchange[m] == NONE and moves.volume[m] == to.volume[np.uint64(moves.destination[m])]:
            role[np.uint64(source.device[k])] |= OWN
    for m in range(first, last):
        k, e = np.uint64(moves.source[m]), np.uint64(moves.destination[m])
        if moves.exchange[m] == NONE or stays[k] == 0:
            continue
        bits = PARTS
        for r in range(1, np.uint64(source.box.shape[1])):
            if to.box[e, r, 0] > source.box[k, r, 0] or to.box[e, r, 1] < source.box[k, r, 1]:
                bits = PARTS | STRIDED
        role[np.uint64(source.device[k])] |= bits


@lean
def _check_alike(sums: Sums, blocks: BlockMap) -> None:
    """Note if a reshard that concerns other blocks leaves other amounts there than in the first."""
    alike, beyond = True, False
    for d in range(blocks.devices[0], np.uint64(sums.role.shape[0])):
        place = place_of(blocks, d)
        beyond = beyond or sums.role[d] > 0 or sums.copy[d] > 0
        alike = alike and sums.used[d] == sums.used[place]
        alike = alike and sums.role[d] == sums.role[place] and sums.copy[d] == sums.copy[place]
        alike = alike and sums.middle[d] == sums.middle[place] and sums.staged[d] == sums.staged[place]
        alike = alike and sums.staged_again[d] == sums.staged_again[place]
    if beyond and not alike:
        blocks.lopsided[0] += ONE
    for every in range(np.uint64(sums.used.shape[0])):
        sums.used[every] = 0


@lean
def _write(itemsize: Any, sums: Sums, devices: Any, landings: Landings, number: Any, size: U64) -> None:
    """One row for each device that is concerned; the sums are zero again afterwards."""
    landings.landing_first[number] = size[0]
    for d in range(np.uint64(sums.role.shape[0])):
        total = sums.copy[d] + sums.middle[d] + sums.staged[d] + sums.staged_again[d]
        if total == 0 and sums.role[d] == 0:
            continue
        if np.uint64(d) < devices:
            at = size[0]
            landings.device[at], landings.role[at] = d, sums.role[d]
            landings.copy[at], landings.middle[at] = itemsize * sums.copy[d], itemsize * sums.middle[d]
            landings.staged[at], landings.staged_again[at] = itemsize * sums.staged[d], itemsize * sums.staged_again[d]
            size[0] = at + ONE
        sums.role[d] = 0
        sums.copy[d] = sums.middle[d] = sums.staged[d] = sums.staged_again[d] = 0
    landings.landing_last[number] = size[0]
