"""A hash table from keys of small numbers to numbers of templates, which compiled code looks up and fills."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from flexsearch.compiled import ONE, TWO, U32, U64, ZERO, lean, wide
from flexsearch.direct import direct
from flexsearch.packed import packed, zeros

BUCKET, RESHARD, WEIGHT, STEP, PLAN, HELD, LAYOUT = 0, 1, 6, 7, 8, 9, 10
"""Kinds of keys. RESHARD + log2(bytes per element), which is at most 4 (complex128): (source, destination layout) ->
template. (BUCKET: mesh + 1, form and dtype) -> what exchanges have in common that may go in one bucket. The others make
a number of a tuple, element by element: (WEIGHT: its dtype and how its gradients are summed, sharding) or (HELD:
buffer, 0) -> node; (STEP: node, element) -> node; (PLAN: node, 0) -> plan of a weight; (LAYOUT: node, 0) -> layout in
which a buffer is kept."""
CANDIDATE, OVER, LIKE, DERIVED, CONFIG = 11, 12, 13, 14, 15
"""Kinds of keys of configs: (CANDIDATE: operator, k) -> a config to try; (OVER: link, split) -> row of what follows a
split over a link; (LIKE: operator, split) -> the same split of another operator; (DERIVED: how,
config) -> another config of that operator; (CONFIG: split, mesh * 4 + states) -> config. Operators and links stand for
all that are alike."""
NEAREST, FIRST_HALF, SECOND_HALF, SHARDED = range(4)
"""How a config is derived from another: the nearest that is allowed; the one on the first or the second half of its
devices; with weights sharded over n devices (SHARDED + n) instead of all."""
MISSING = np.uint32(0xFFFFFFFF)
SPARE = np.uint64(4096)
"""Free places that a table keeps before it counts as full: no step that checks for it sets as many keys."""
_ROOM = 1 << 14


@packed
class Table(NamedTuple):
    """Open-addressing hash table; key 0 is an empty place. ``size``: (1,) keys in it."""

    keys: U64
    values: U32
    size: U64


@lean
def place_of(keys: U64, key: Any) -> Any:
    """Where a key is, or would be."""
    h = key * np.uint64(0x9E3779B97F4A7C15)
    h ^= h >> np.uint64(29)
    h *= np.uint64(0xBF58476D1CE4E5B9)
    h ^= h >> np.uint64(32)
    mask = np.uint64(keys.shape[0]) - ONE
    at = h & mask
    while keys[at] != ZERO and keys[at] != key:
        at = (at + ONE) & mask
    return at


@wide
def find(table: Table, kind: Any, a: Any, b: Any) -> Any:
    """Value of a key, or MISSING. ``kind`` has 4 bits, ``a`` 28, ``b`` 32."""
    at = place_of(table.keys, (np.uint64(kind) << np.uint64(60)) | (np.uint64(a) << np.uint64(32)) | np.uint64(b))
    return table.values[at] if table.keys[at] != ZERO else MISSING


@wide
def put(table: Table, kind: Any, a: Any, b: Any, value: Any) -> None:
    """Set the value of a key. The table must not be full."""
    key = (np.uint64(kind) << np.uint64(60)) | (np.uint64(a) << np.uint64(32)) | np.uint64(b)
    at = place_of(table.keys, key)
    if table.keys[at] == ZERO:
        table.keys[at] = key
        table.size[0] += ONE
    table.values[at] = np.uint32(value)


@wide
def number(table: Table, kind: Any, a: Any, b: Any) -> Any:
    """Value of a key; of a new one, how many keys there were. The table must not be full."""
    value = find(table, kind, a, b)
    if value == MISSING:
        value = np.uint32(table.size[0])
        put(table, kind, a, b, value)
    return value


@lean
def is_full(table: Table) -> Any:
    """Whether the table must grow before more keys are set."""
    return TWO * (table.size[0] + SPARE) > np.uint64(table.keys.shape[0])


@lean
def _copy(source: Table, target: Table) -> None:
    for k in range(np.uint64(source.keys.shape[0])):
        if source.keys[k] != ZERO:
            at = place_of(target.keys, source.keys[k])
            target.keys[at] = source.keys[k]
            target.values[at] = source.values[k]
    target.size[0] = source.size[0]


_find = direct(find)
_put = direct(put)
_number = direct(number)


class Keys:
    """The table as Python sees it; it never is full when it is fetched."""

    def __init__(self) -> None:
        self._table = _empty(_ROOM)

    @property
    def table(self) -> Table:
        """All keys so far; fetch it again after setting any."""
        while 2 * (int(self._table.size[0]) + int(SPARE)) > len(self._table.keys):
            grown = _empty(4 * len(self._table.keys))
            _copy(self._table, grown)
            self._table = grown
        return self._table

    def find(self, kind: int, a: int, b: int) -> int | None:
        """Value of a key; None if there is none."""
        value = int(_find(self._table, np.uint64(kind), np.uint64(a), np.uint64(b)))
        return None if value == int(MISSING) else value

    def put(self, kind: int, a: int, b: int, value: int) -> None:
        """Set the value of a key."""
        _put(self.table, np.uint64(kind), np.uint64(a), np.uint64(b), np.uint64(value))

    def number(self, kind: int, a: int, b: int) -> int:
        """Value of a key; of a new one, how many keys there are."""
        return int(_number(self.table, np.uint64(kind), np.uint64(a), np.uint64(b)))


def _empty(room: int) -> Table:
    return zeros(Table, room, size=1)
