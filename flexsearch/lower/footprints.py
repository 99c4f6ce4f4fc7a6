"""What templates hold in memory, by device: the account of memory (``flexsearch.simulate.account``) is made of these.

They have the numbers of the templates in ``Pools``: reshards, plans of weights, and layouts by their own numbers.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np

from flexsearch.compiled import I64, ONE, U8, U32, U64, ZERO, lean
from flexsearch.lower.column import Column
from flexsearch.lower.desk import (
    FIRST,
    LAST,
    MIDDLE,
    MOVE_FIRST,
    MOVE_LAST,
    MOVE_MIDDLE,
    PHASES,
    RECEIVE,
    SEND,
    Desk,
    Exchanges,
)
from flexsearch.lower.layout import Laid, Side
from flexsearch.lower.planner import ALL_REDUCE, NONE
from flexsearch.packed import packed

TAKES_PART, TAKES_PART_AGAIN, RECEIVES, ALIASED = (np.uint8(1 << k) for k in range(4))
"""Bits of ``Landings.role``: the device sends or receives in the first phase; in the second; it receives in any; what
it gets is exactly what it has, so that nothing is done there."""


@packed
class Landings(NamedTuple):
    """What reshards leave on devices. Reshard r has rows ``[reshard_first[r], reshard_last[r])``, one for each device
    that it concerns: ``device``, its ``role``, and bytes of the new ``copy``, of the layout in between (``middle``),
    and of what arrives in receive buffers in the first and second phase (``staged``, ``staged_again``): what is only a
    part of what it is for, or is added to more. ``most``: by reshard, the most bytes on one device, all together."""

    reshard_first: U32
    reshard_last: U32
    most: I64
    device: U32
    role: U8
    copy: I64
    middle: I64
    staged: I64
    staged_again: I64


@packed
class Holdings(NamedTuple):
    """What layouts and plans of weights put on devices. Layout n has the entries ``[layout_first[n], layout_last[n])``
    of ``entry_device`` and ``entry_elements``, and ``layout_most[n]`` elements at most on one device; the region of the
    entry at row k begins at ``box[entry_box[k]]``: low and high of each of ``entry_rank[k]`` dimensions. Plan p stores
    ``stored_bytes`` on ``stored_device`` in rows ``[plan_first[p], plan_last[p])``, at most ``plan_most[p]`` on one
    device."""

    layout_first: U32
    layout_last: U32
    layout_most: I64
    entry_device: U32
    entry_elements: I64
    entry_box: U32
    entry_rank: U8
    box: I64
    plan_first: U32
    plan_last: U32
    plan_most: I64
    stored_device: U32
    stored_bytes: I64


@packed
class Footprints(NamedTuple):
    """All of it."""

    landings: Landings
    holdings: Holdings


@packed
class Sums(NamedTuple):
    """Where the rows of a reshard are added up, by device; zeros between two reshards."""

    role: U8
    copy: I64
    middle: I64
    staged: I64
    staged_again: I64


@lean
def append_landing(desk: Desk, destination: Side, itemsize: Any, sums: Sums, landings: Landings, size: U64) -> Any:
    """Add what the reshard on the desk leaves on devices. ``size``: (2,) reshards and rows so far, which grow. False,
    and nothing added, if there is no room."""
    devices = np.uint64(sums.role.shape[0])
    if size[0] == np.uint64(landings.most.shape[0]) or size[1] + devices > np.uint64(landings.device.shape[0]):
        return False
    result, rows, arriving = desk.result, desk.exchanges, desk.sets.arriving
    _join(rows, result[FIRST], result[MIDDLE], TAKES_PART, sums.role)
    _join(rows, result[MIDDLE], result[LAST], TAKES_PART_AGAIN, sums.role)
    if result[PHASES] == ONE:
        _stage(desk, destination, arriving, result[MOVE_FIRST], result[MOVE_LAST], sums.staged)
    else:
        _stage(desk, desk.middle, arriving, result[MOVE_FIRST], result[MOVE_MIDDLE], sums.staged)
        _stage(desk, destination, arriving, result[MOVE_MIDDLE], result[MOVE_LAST], sums.staged_again)
        for k in range(desk.middle.size[0]):
            sums.middle[np.uint64(desk.middle.device[k])] += desk.middle.volume[k]
    for k in range(destination.size[0]):
        device = np.uint64(destination.device[k])
        if result[PHASES] == ONE and desk.aliased[k] == 1:
            sums.role[device] |= ALIASED
        else:
            sums.copy[device] += destination.volume[k]
    _write(itemsize, sums, landings, size)
    return True


@lean
def _join(rows: Exchanges, first: Any, last: Any, bit: Any, role: U8) -> None:
    """Note who takes part in a phase."""
    for x in range(first, last):
        for k in range(_begin(rows, SEND, x), np.uint64(rows.end[SEND, x])):
            role[np.uint64(rows.send[k])] |= bit
        for k in range(_begin(rows, RECEIVE, x), np.uint64(rows.end[RECEIVE, x])):
            role[np.uint64(rows.receive[k])] |= bit | RECEIVES


@lean
def _begin(rows: Exchanges, k: Any, x: Any) -> Any:
    return np.uint64(rows.end[k, x - ONE]) if x > ZERO else ZERO


@lean
def _stage(desk: Desk, to: Side, arriving: I64, first: Any, last: Any, staged: I64) -> None:
    """Elements that moves of a phase to the layout ``to`` bring into receive buffers. An all-reduce is done in place,
    and so is what arrives whole and alone."""
    moves = desk.moves
    for k in range(to.size[0]):
        arriving[k] = 0
    for m in range(first, last):
        arriving[np.uint64(moves.destination[m])] += 1
    for m in range(first, last):
        if moves.exchange[m] != NONE and np.uint64(desk.exchanges.form[np.uint64(moves.exchange[m])]) != ALL_REDUCE:
            entry = np.uint64(moves.destination[m])
            if arriving[entry] > 1 or moves.volume[m] != to.volume[entry]:
                staged[np.uint64(to.device[entry])] += moves.volume[m]


@lean
def _write(itemsize: Any, sums: Sums, landings: Landings, size: U64) -> None:
    """One row for each device that is concerned; the sums are zero again afterwards."""
    number, most = size[0], np.int64(0)
    landings.reshard_first[number] = size[1]
    for d in range(np.uint64(sums.role.shape[0])):
        total = sums.copy[d] + sums.middle[d] + sums.staged[d] + sums.staged_again[d]
        if total == 0 and sums.role[d] == 0:
            continue
        at = size[1]
        landings.device[at], landings.role[at] = d, sums.role[d]
        landings.copy[at], landings.middle[at] = itemsize * sums.copy[d], itemsize * sums.middle[d]
        landings.staged[at], landings.staged_again[at] = itemsize * sums.staged[d], itemsize * sums.staged_again[d]
        most = max(most, itemsize * total)
        sums.role[d] = 0
        sums.copy[d] = sums.middle[d] = sums.staged[d] = sums.staged_again[d] = 0
        size[1] = at + ONE
    landings.reshard_last[number], landings.most[number] = size[1], most
    size[0] = number + ONE


_TYPES: Final[dict[str, Any]] = {
    "role": np.uint8, "most": np.int64, "copy": np.int64, "middle": np.int64, "staged": np.int64,
    "staged_again": np.int64, "layout_most": np.int64, "entry_elements": np.int64, "entry_rank": np.uint8,
    "box": np.int64, "plan_most": np.int64, "stored_bytes": np.int64,
}  # fmt: skip
"""Columns that are not uint32."""


class FootprintColumns:
    """Footprints of the templates so far, for ``devices`` devices. Number 0 of reshards and of plans is none."""

    def __init__(self, devices: int) -> None:
        self._devices = devices
        self._columns = {name: Column(_TYPES.get(name, np.uint32)) for name in (*Landings._fields, *Holdings._fields)}
        self._sums = Sums(np.zeros(devices, np.uint8), *(np.zeros(devices, np.int64) for _ in range(4)))
        self._size = np.array([1, 0], np.uint64)
        self._landings = self._record(Landings)
        self._footprints: Footprints | None = None
        self.add_plan(np.zeros(0, np.uint32), np.zeros(0, np.int64))

    @property
    def footprints(self) -> Footprints:
        """All columns; fetch them again after adding anything."""
        if self._footprints is None:
            self._footprints = Footprints(self._landings, self._record(Holdings))
        return self._footprints

    def _record(self, record: Any) -> Any:
        return record(**{name: self._columns[name].array for name in record._fields})

    def add_reshard(self, desk: Desk, destination: Laid, itemsize: int) -> None:
        """Add what the reshard on the desk, to the layout ``destination``, leaves on devices."""
        while not append_landing(desk, destination.side, np.int64(itemsize), self._sums, self._landings, self._size):
            for name in Landings._fields:
                self._columns[name].double()
            self._landings, self._footprints = self._record(Landings), None

    def add_layout(self, laid: Laid) -> None:
        """Add a layout under its number, unless it is there."""
        columns, number = self._columns, laid.number
        missing = number + 1 - columns["layout_first"].size
        if missing > 0:
            for name in ("layout_first", "layout_last", "layout_most"):
                self._extend(name, np.zeros(missing))
        elif columns["layout_last"].array[number]:
            return
        begin, count = columns["entry_device"].size + (columns["entry_device"].size == 0), len(laid)
        if columns["entry_device"].size == 0:  # row 0 is none: a layout that ends at 0 has not been added
            for name in ("entry_device", "entry_elements", "entry_box", "entry_rank"):
                self._extend(name, np.zeros(1))
        box, place = laid.grid.box, columns["box"].size
        self._extend("entry_device", laid.device)
        self._extend("entry_elements", laid.grid.volume)
        self._extend("entry_box", place + 2 * box.shape[1] * np.arange(count))
        self._extend("entry_rank", np.full(count, box.shape[1]))
        self._extend("box", box.reshape(-1))
        columns["layout_first"].array[number], columns["layout_last"].array[number] = begin, begin + count
        columns["layout_most"].array[number] = laid.elements(self._devices).max(initial=0)

    def add_plan(self, device: U32, nbytes: I64) -> None:
        """Add what a weight's plan stores on devices."""
        begin = self._columns["stored_device"].size
        self._extend("stored_device", device)
        self._extend("stored_bytes", nbytes)
        for name, value in (("first", begin), ("last", begin + len(device)), ("most", nbytes.max(initial=0))):
            self._extend(f"plan_{name}", np.array([value]))

    def _extend(self, name: str, values: Any) -> None:
        if self._columns[name].extend(values):
            self._footprints = None
