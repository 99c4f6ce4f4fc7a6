"""A hash table from keys of small numbers to numbers of templates, which compiled code looks up and Python fills."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from flexsearch.compiled import ONE, U32, U64, ZERO, lean
from flexsearch.packed import packed

RESHARD, WEIGHT, STEP, PLAN, HELD, LAYOUT = 1, 6, 7, 8, 9, 10
"""Kinds of keys. RESHARD + log2(bytes per element), which is at most 4 (complex128): (source, destination layout) ->
template. The others make a number of a tuple, element by element: (WEIGHT: weight, sharded) or (HELD: buffer, 0) ->
node; (STEP: node, element) -> node; (PLAN: node, 0) -> plan of a weight; (LAYOUT: node, 0) -> layout in which a buffer
is kept. The search has more."""
MISSING = np.uint32(0xFFFFFFFF)
_ROOM = 2048


@packed
class Table(NamedTuple):
    """Open-addressing hash table; key 0 is an empty place."""

    keys: U64
    values: U32


@lean
def _place_of(table: Table, key: Any) -> Any:
    """Where a key is, or would be."""
    h = key * np.uint64(0x9E3779B97F4A7C15)
    h ^= h >> np.uint64(29)
    h *= np.uint64(0xBF58476D1CE4E5B9)
    h ^= h >> np.uint64(32)
    mask = np.uint64(table.keys.shape[0]) - ONE
    at = h & mask
    while table.keys[at] != ZERO and table.keys[at] != key:
        at = (at + ONE) & mask
    return at


@lean
def find(table: Table, kind: Any, a: Any, b: Any) -> Any:
    """Value of a key, or MISSING. ``kind`` has 4 bits, ``a`` 28, ``b`` 32."""
    at = _place_of(table, (np.uint64(kind) << np.uint64(60)) | (np.uint64(a) << np.uint64(32)) | np.uint64(b))
    return table.values[at] if table.keys[at] != ZERO else MISSING


@lean
def _put(table: Table, keys: U64, values: U32) -> None:
    """Set the values of keys; key 0 is none."""
    for k in range(np.uint64(keys.shape[0])):
        if keys[k] != ZERO:
            at = _place_of(table, keys[k])
            table.keys[at] = keys[k]
            table.values[at] = values[k]


class Keys:
    """The table as Python sees it. Keys set since somebody fetched ``table`` are put there together."""

    def __init__(self) -> None:
        self._table = Table(np.zeros(_ROOM, np.uint64), np.zeros(_ROOM, np.uint32))
        self._known: dict[int, int] = {}
        self._new: list[int] = []

    @property
    def table(self) -> Table:
        """All keys so far; fetch it again after setting any."""
        if self._new:
            keys = np.array(self._new, np.uint64)
            values = np.array([self._known[key] for key in self._new], np.uint32)
            self._new.clear()
            while 2 * len(self._known) > len(self._table.keys):
                old, room = self._table, 4 * len(self._table.keys)
                self._table = Table(np.zeros(room, np.uint64), np.zeros(room, np.uint32))
                _put(self._table, *old)
            _put(self._table, keys, values)
        return self._table

    def put(self, kind: int, a: int, b: int, value: int) -> None:
        """Set the value of a key."""
        key = kind << 60 | a << 32 | b
        self._known[key] = value
        self._new.append(key)

    def number(self, kind: int, a: int, b: int) -> int:
        """Value of a key; of a new one, how many keys there are."""
        known = self._known.get(kind << 60 | a << 32 | b)
        if known is None:
            known = len(self._known)
            self.put(kind, a, b, known)
        return known
