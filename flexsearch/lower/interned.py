"""Layouts by number, compiled: equal meshes, grids and layouts are kept once, in arrays that grow.

A layout is a grid (regions and terms of its entries) on a mesh (the device of each entry). Many layouts share a grid,
and many share a mesh, so a layout is a pair of numbers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from flexsearch.compiled import I64, ONE, TWO, U32, U64, ZERO, lean, wide
from flexsearch.cost.tally import sort
from flexsearch.lower.keys import MISSING
from flexsearch.packed import packed, zeros

FIRST_ROOM = 1 << 12
"""Rows of each array at first."""
_FACTOR = np.uint64(0x9E3779B97F4A7C15)


@packed
class Side(NamedTuple):
    """A layout as compiled code wants it. By entry: ``device``, ``box`` (entries, dimensions, low and high), ``volume``
    (elements), ``same`` (the first entry with the same box). Term t, in ascending order, has the entries
    ``copy[term_first[t]:term_first[t + 1]]``. ``size``: (2,) entries and terms."""

    device: U32
    box: I64
    volume: I64
    same: U32
    term_first: U32
    copy: U32
    size: U64


@packed
class Interned(NamedTuple):
    """Rows ``[first[i], last[i])`` of a list belong to item i. Of a grid: ``grid_rank`` dimensions, entries with
    ``volume``, ``term``, ``same`` and ``copy`` as in ``Side``, ``box`` ((low, high) by entry, then dimension), and
    ``term_first``. ``meshes``, ...: (1,) rows so far. ``*_place``: hash tables of numbers + 1, 0 where nothing is."""

    mesh_first: U32
    mesh_last: U32
    device: U32
    grid_first: U32
    grid_last: U32
    grid_rank: U32
    grid_box: U32  # first row in ``box``
    grid_term: U32  # first row in ``term_first``
    grid_terms: U32  # number of terms
    volume: I64
    term: U32
    same: U32
    copy: U32
    box: I64
    term_first: U32
    layout_grid: U32
    layout_mesh: U32
    mesh_place: U32
    grid_place: U32
    layout_place: U32
    order: U64  # scratch for sorting, and for finding equal boxes; as long as the lists of entries
    bucket: U32
    meshes: U64
    devices: U64
    grids: U64
    entries: U64
    boxes: U64
    terms: U64
    layouts: U64


@wide
def _mixed(h: Any, value: Any) -> Any:
    h = (h ^ np.uint64(value)) * _FACTOR
    return h ^ (h >> np.uint64(29))


@lean
def intern_mesh(pool: Interned, devices: U32, first: Any, last: Any) -> Any:
    """Number of the mesh ``devices[first:last]``; MISSING if there is no room for a new one."""
    h = np.uint64(last - first)
    for k in range(first, last):
        h = _mixed(h, devices[k])
    mask = np.uint64(pool.mesh_place.shape[0]) - ONE
    at = (h ^ (h >> np.uint64(32))) & mask
    while pool.mesh_place[at] != 0:
        m = np.uint64(pool.mesh_place[at]) - ONE
        begin, end = np.uint64(pool.mesh_first[m]), np.uint64(pool.mesh_last[m])
        equal = end - begin == last - first
        if equal:
            for k in range(last - first):
                if pool.device[begin + k] != devices[first + k]:
                    equal = False
                    break
        if equal:
            return np.uint32(m)
        at = (at + ONE) & mask
    m, begin = pool.meshes[0], pool.devices[0]
    if TWO * (m + ONE) > mask or m == np.uint64(pool.mesh_first.shape[0]):
        return MISSING
    if begin + (last - first) > np.uint64(pool.device.shape[0]):
        return MISSING
    for k in range(last - first):
        pool.device[begin + k] = devices[first + k]
    pool.mesh_first[m], pool.mesh_last[m] = begin, begin + (last - first)
    pool.devices[0] += last - first
    pool.meshes[0] += ONE
    pool.mesh_place[at] = m + ONE
    return np.uint32(m)


@lean
def intern_layout(pool: Interned, grid: Any, mesh: Any) -> Any:
    """Number of the layout of a grid on a mesh (a device for each entry); MISSING if there is no room for a new one."""
    h = _mixed(_mixed(ONE, grid), mesh)
    mask = np.uint64(pool.layout_place.shape[0]) - ONE
    at = (h ^ (h >> np.uint64(32))) & mask
    while pool.layout_place[at] != 0:
        number = np.uint64(pool.layout_place[at]) - ONE
        if pool.layout_grid[number] == np.uint32(grid) and pool.layout_mesh[number] == np.uint32(mesh):
            return np.uint32(number)
        at = (at + ONE) & mask
    number = pool.layouts[0]
    if TWO * (number + ONE) > mask or number == np.uint64(pool.layout_grid.shape[0]):
        return MISSING
    pool.layout_grid[number], pool.layout_mesh[number] = grid, mesh
    pool.layouts[0] += ONE
    pool.layout_place[at] = number + ONE
    return np.uint32(number)


@lean
def intern_grid(pool: Interned, box: I64, term: U32, count: Any, rank: Any) -> Any:
    """Number of the grid with ``count`` entries: the first ``rank`` dimensions of ``box`` (entries, dimensions, 2), and
    ``term``. MISSING if there is no room for a new one."""
    h = _mixed(_mixed(ONE, count), rank)
    for k in range(count):
        h = _mixed(h, term[k])
        for r in range(rank):
            h = _mixed(_mixed(h, box[k, r, 0]), box[k, r, 1])
    mask = np.uint64(pool.grid_place.shape[0]) - ONE
    at = (h ^ (h >> np.uint64(32))) & mask
    while pool.grid_place[at] != 0:
        grid = np.uint64(pool.grid_place[at]) - ONE
        if _is_grid(pool, grid, box, term, count, rank):
            return np.uint32(grid)
        at = (at + ONE) & mask
    grid = pool.grids[0]
    full = TWO * (grid + ONE) > mask or grid == np.uint64(pool.grid_first.shape[0])
    full = full or pool.entries[0] + count > np.uint64(pool.volume.shape[0])
    full = full or pool.boxes[0] + count * rank > np.uint64(pool.box.shape[0])
    if full or pool.terms[0] + count + ONE > np.uint64(pool.term_first.shape[0]):
        return MISSING
    _add_grid(pool, grid, box, term, count, rank)
    pool.grid_place[at] = grid + ONE
    return np.uint32(grid)


@lean
def _is_grid(pool: Interned, grid: Any, box: I64, term: U32, count: Any, rank: Any) -> Any:
    first, at = np.uint64(pool.grid_first[grid]), np.uint64(pool.grid_box[grid])
    if np.uint64(pool.grid_last[grid]) - first != count or np.uint64(pool.grid_rank[grid]) != rank:
        return False
    for k in range(count):
        if pool.term[first + k] != term[k]:
            return False
        for r in range(rank):
            if pool.box[at, 0] != box[k, r, 0] or pool.box[at, 1] != box[k, r, 1]:
                return False
            at += ONE
    return True


@lean
def _add_grid(pool: Interned, grid: Any, box: I64, term: U32, count: Any, rank: Any) -> None:
    first, at = pool.entries[0], pool.boxes[0]
    pool.grid_first[grid], pool.grid_last[grid], pool.grid_rank[grid] = first, first + count, rank
    pool.grid_box[grid] = at
    for k in range(count):
        pool.term[first + k], pool.volume[first + k] = term[k], 1
        for r in range(rank):
            pool.box[at, 0], pool.box[at, 1] = box[k, r, 0], box[k, r, 1]
            pool.volume[first + k] *= box[k, r, 1] - box[k, r, 0]
            at += ONE
    pool.boxes[0], pool.entries[0] = at, first + count
    pool.grids[0] += ONE
    _find_same(pool, grid, count, rank)
    _sort_by_term(pool, grid, count)


@lean
def _find_same(pool: Interned, grid: Any, count: Any, rank: Any) -> None:
    """For each entry the first one with the same box: by a hash table in ``bucket``."""
    first, start = np.uint64(pool.grid_first[grid]), np.uint64(pool.grid_box[grid])
    size = ONE
    while size < TWO * count:
        size *= TWO
    for k in range(size):
        pool.bucket[k] = 0
    for k in range(count):
        mine, h = start + np.uint64(k) * rank, ONE
        for r in range(rank):
            h = _mixed(_mixed(h, pool.box[mine + r, 0]), pool.box[mine + r, 1])
        at = (h ^ (h >> np.uint64(32))) & (size - ONE)
        while True:
            if pool.bucket[at] == 0:
                pool.bucket[at] = k + ONE
                pool.same[first + k] = k
                break
            other = np.uint64(pool.bucket[at]) - ONE
            theirs, equal = start + other * rank, True
            for r in range(rank):
                low = pool.box[theirs + r, 0] == pool.box[mine + r, 0]
                equal = equal and low and pool.box[theirs + r, 1] == pool.box[mine + r, 1]
            if equal:
                pool.same[first + k] = other
                break
            at = (at + ONE) & (size - ONE)


@lean
def _sort_by_term(pool: Interned, grid: Any, count: Any) -> None:
    """Lists of the entries of each term, in ascending order of terms and entries."""
    first, start = np.uint64(pool.grid_first[grid]), pool.terms[0]
    order = pool.order
    for k in range(count):
        order[k] = np.uint64(pool.term[first + k]) << np.uint64(32) | np.uint64(k)
    sort(order, count)
    terms = ZERO
    for k in range(count):
        pool.copy[first + k] = order[k] & np.uint64(0xFFFFFFFF)
        if k == ZERO or order[k] >> np.uint64(32) != order[k - ONE] >> np.uint64(32):
            pool.term_first[start + terms] = k
            terms += ONE
    pool.term_first[start + terms] = count
    pool.grid_term[grid], pool.grid_terms[grid] = start, terms
    pool.terms[0] = start + terms + ONE


@lean
def entries_of(pool: Interned, layout: Any) -> Any:
    """Number of entries of a layout."""
    grid = np.uint64(pool.layout_grid[layout])
    return np.uint64(pool.grid_last[grid]) - np.uint64(pool.grid_first[grid])


@lean
def rank_of(pool: Interned, layout: Any) -> Any:
    """Number of dimensions of a layout."""
    return np.uint64(pool.grid_rank[np.uint64(pool.layout_grid[layout])])


@lean
def write_side(pool: Interned, layout: Any, side: Side) -> None:
    """Write a layout to ``side``, which has room for it: one element in dimensions to spare."""
    grid, mesh = np.uint64(pool.layout_grid[layout]), np.uint64(pool.layout_mesh[layout])
    first, device = np.uint64(pool.grid_first[grid]), np.uint64(pool.mesh_first[mesh])
    count, rank = np.uint64(pool.grid_last[grid]) - first, np.uint64(pool.grid_rank[grid])
    at, start, terms = np.uint64(pool.grid_box[grid]), np.uint64(pool.grid_term[grid]), np.uint64(pool.grid_terms[grid])
    side.size[0], side.size[1] = count, terms
    for k in range(count):
        side.device[k], side.volume[k] = pool.device[device + k], pool.volume[first + k]
        side.same[k], side.copy[k] = pool.same[first + k], pool.copy[first + k]
        for r in range(np.uint64(side.box.shape[1])):
            side.box[k, r, 0], side.box[k, r, 1] = 0, 1
            if r < rank:
                side.box[k, r, 0], side.box[k, r, 1] = pool.box[at, 0], pool.box[at, 1]
                at += ONE
    for t in range(terms + ONE):
        side.term_first[t] = pool.term_first[start + t]


@lean
def _place_again(old: Interned, new: Interned, box: I64, term: U32) -> None:
    """Fill the hash tables of ``new``, which holds what ``old`` does: they have grown. ``box``, ``term``: scratch for
    the largest grid."""
    new.meshes[0] = new.devices[0] = new.layouts[0] = ZERO
    new.grids[0] = new.entries[0] = new.boxes[0] = new.terms[0] = ZERO
    for m in range(old.meshes[0]):
        intern_mesh(new, old.device, np.uint64(old.mesh_first[m]), np.uint64(old.mesh_last[m]))
    for n in range(old.layouts[0]):
        intern_layout(new, old.layout_grid[n], old.layout_mesh[n])
    for g in range(old.grids[0]):
        first, at = np.uint64(old.grid_first[g]), np.uint64(old.grid_box[g])
        count, rank = np.uint64(old.grid_last[g]) - first, np.uint64(old.grid_rank[g])
        for k in range(count):
            term[k] = old.term[first + k]
            for r in range(rank):
                box[k, r, 0], box[k, r, 1] = old.box[at, 0], old.box[at, 1]
                at += ONE
        intern_grid(new, box, term, count, rank)


def empty_interned(room: int, devices: int) -> Interned:
    """Room for so many rows of each list; ``devices``: of the topology."""
    long = max(room, 2 * devices)
    by_entry = dict.fromkeys(("device", "volume", "term", "same", "copy", "order"), 4 * long)
    numbers = dict.fromkeys(("meshes", "devices", "grids", "entries", "boxes", "terms", "layouts"), 1)
    return zeros(
        Interned, room, **by_entry, **numbers, box=(16 * long, 2), term_first=5 * long, layout_grid=4 * room,
        layout_mesh=4 * room, mesh_place=_power(2 * room), grid_place=_power(2 * room), layout_place=_power(8 * room),
        bucket=_power(16 * long),
    )  # fmt: skip


def grown(pool: Interned) -> Interned:
    """The same with twice the room; all numbers stay."""
    room = 2 * len(pool.mesh_first)
    new = empty_interned(room, 0)
    largest = int((pool.grid_last - pool.grid_first).max()) + 1
    box = np.zeros((largest, int(pool.grid_rank.max()) + 1, 2), np.int64)
    _place_again(pool, new, box, np.zeros(largest, np.uint32))
    return new


def _power(least: int) -> int:
    return 1 << (least - 1).bit_length()
