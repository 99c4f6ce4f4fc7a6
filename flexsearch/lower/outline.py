"""What was decided of a reshard, read off the planner's workspace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from flexsearch.compiled import F64, I64, U8, U32, U64
from flexsearch.cost.tally import Loads
from flexsearch.direct import direct
from flexsearch.lower.footprints import note_used
from flexsearch.lower.layout import Entry, Laid, Layout
from flexsearch.lower.traffic import NONE
from flexsearch.lower.workspace import (
    DRAG,
    FIRST,
    LAST,
    LINK,
    MESSAGE,
    MIDDLE,
    MOVE_FIRST,
    MOVE_LAST,
    MOVE_MIDDLE,
    PHASES,
    RECEIVE,
    SEND,
    TRIVIAL,
    Workspace,
)

_note_used = direct(note_used)
LOCAL = int(NONE)
"""Exchange of a move that crosses no devices."""


class Outline(NamedTuple):
    """A reshard in sums. One row for each exchange, the first ``middle`` of them in the first phase: ``form`` (number
    in ``FORMS``), ``nbytes`` (that cross devices); ``amount``, ``unit``, ``start`` (s), ``duration`` (s):
    see ``workspace.Exchanges``. Lists of exchange x are rows ``end[x - 1]`` to ``end[x]`` of ``send``, ``receive``
    (devices, ascending) and of the links and processors in ``loads``."""

    form: U8
    nbytes: I64
    amount: I64
    unit: I64
    start: F64
    duration: F64
    leader: U32
    send_end: U32
    receive_end: U32
    link_end: U32
    drag_end: U32
    send: U32
    receive: U32
    loads: Loads
    phases: int
    middle: int
    trivial: bool


class Details(NamedTuple):
    """The rest of what was decided. ``between``: layout between the phases, if there are two. By move, the first
    ``half`` of them of the first phase: ``source`` and ``destination`` entry, and ``exchange`` (LOCAL: none). Exchange
    x has the ``messages`` (source and destination device, bytes) from ``message_end[x - 1]`` to ``message_end[x]``.
    ``aliased``, ``used``: see ``Reshard``."""

    between: Layout
    source: list[int]
    destination: list[int]
    exchange: list[int]
    half: int
    message_end: list[int]
    messages: list[tuple[int, int, int]]
    aliased: frozenset[int]
    used: frozenset[int]


def outline_of(workspace: Workspace) -> Outline:
    """The sums of the reshard that is in the workspace."""
    rows, result = workspace.exchanges, workspace.result.tolist()
    first, last = result[FIRST], result[LAST]

    def ends(row: int) -> tuple[U32, slice]:
        values = rows.end[row]
        begin = values[first - 1] if first else np.uint32(0)
        end = values[last - 1] if last else np.uint32(0)
        return values[first:last] - begin, slice(int(begin), int(end))

    of = slice(first, last)
    (send_end, sends), (receive_end, receives) = ends(SEND), ends(RECEIVE)
    (link_end, links), (drag_end, drags) = ends(LINK), ends(DRAG)
    loads = rows.loads
    return Outline(
        form=rows.form[of].copy(), nbytes=rows.nbytes[of].copy(), amount=rows.amount[of].copy(),
        unit=rows.unit[of].copy(), start=rows.start[of].copy(),
        duration=rows.duration[of].copy(), leader=rows.leader[of].copy(), send_end=send_end,
        receive_end=receive_end, link_end=link_end, drag_end=drag_end,
        send=rows.send[sends].copy(), receive=rows.receive[receives].copy(),
        loads=Loads(
            loads.link[links].copy(), loads.link_load[links].copy(), loads.link_s[links].copy(),
            loads.least_s[links].copy(), loads.drag[drags].copy(), loads.drag_load[drags].copy(),
            loads.drag_s[drags].copy(), loads.size,
        ),
        phases=result[PHASES], middle=result[MIDDLE] - first, trivial=bool(result[TRIVIAL]),
    )  # fmt: skip


def details_of(workspace: Workspace, source: Laid, destination: Laid) -> Details:
    """The rest of the reshard that is in the workspace, between these layouts."""
    rank = destination.grid.box.shape[1]
    result = workspace.result.tolist()
    first, last, begin, end = result[FIRST], result[LAST], result[MOVE_FIRST], result[MOVE_LAST]
    exchange = workspace.moves.exchange[begin:end].astype(np.int64)
    exchange[exchange != LOCAL] -= first
    rows, message_end = workspace.exchanges, workspace.exchanges.end[MESSAGE].astype(np.int64)
    before = message_end[first - 1] if first else 0
    ends = (message_end[first:last] - before).tolist()
    of = slice(before, before + (ends[-1] if ends else 0))
    columns = *rows.message[:, of].tolist(), rows.message_bytes[of].tolist()
    between: Layout = ()
    if result[PHASES] == 2:
        count = int(workspace.middle.size[0])
        boxes = workspace.middle.box[:count, :rank].tolist()
        between = tuple(
            Entry(device, tuple((low, high) for low, high in box), term)
            for term, (device, box) in enumerate(zip(workspace.middle.device[:count].tolist(), boxes, strict=True))
        )
    aliased = destination.device[np.flatnonzero(workspace.aliased[: len(destination)])].tolist()
    used = np.zeros(len(source), np.uint8)
    _note_used(workspace, np.uint64(0), used)
    return Details(
        between, workspace.moves.source[begin:end].tolist(), workspace.moves.destination[begin:end].tolist(),
        exchange.tolist(), result[MOVE_MIDDLE] - begin, ends, list(zip(*columns, strict=True)),
        frozenset(aliased) if result[PHASES] == 1 else frozenset(), frozenset(np.flatnonzero(used).tolist()),
    )  # fmt: skip


def rows_of(ends: Sequence[int] | U32 | U64, x: int) -> slice:
    """The rows of exchange ``x``, by where those of each end."""
    return slice(int(ends[x - 1]) if x else 0, int(ends[x]))
