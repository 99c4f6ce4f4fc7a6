"""Templates that a proposal lacks, made and put where ``wire`` looks for them, compiled: a search needs hundreds of
thousands, and few of them are ever read in Python."""

from __future__ import annotations

from typing import Any

import numpy as np

from flexsearch.compiled import ONE, ZERO, lean
from flexsearch.cost.collectives import ALL_REDUCE
from flexsearch.lower.arrays import Program, State
from flexsearch.lower.change import Change, Wiring
from flexsearch.lower.interned import (
    entries_of,
    intern_grid,
    intern_layout,
    intern_mesh,
    rank_of,
)
from flexsearch.lower.keys import (
    BUCKET,
    HELD,
    LAYOUT,
    MISSING,
    PLAN,
    STEP,
    WEIGHT,
    find,
    is_full,
    number,
    put,
)
from flexsearch.lower.moves import GIVEN
from flexsearch.lower.orbits import place_of
from flexsearch.lower.planner import store
from flexsearch.lower.requested import plan_all, request, request_reshard
from flexsearch.lower.tables import TemplateTables
from flexsearch.lower.wiring import FLOWS, GRADIENT, VALUE, charge, need_of, typed
from flexsearch.strategy import OVER_ALL

ALL, NO_ROOM, IN_PYTHON, OVER = range(4)
"""What came of ``fill``: all was added; there was no room; a buffer is left whose readers want different layouts, which
Python must add; some link has more to carry than was allowed, so the rest is of no interest."""
_OVER_ALL = np.uint64(OVER_ALL)
RECEIVERS = np.uint64(11)
"""First bit of the receivers in a key of a bucket, behind form and dtype."""


@lean
def fill(tables: TemplateTables, wiring: Wiring, program: Program, state: State, change: Change, limit: Any) -> Any:
    """Add what ``change`` says is missing for the plan ``state``, which is to be undone afterwards: what is added is
    charged to its links, until one has more than ``limit`` ticks to carry. Anything of it may be there already."""
    left = ALL
    for k in range(change.lacking[0]):
        kind, a, b = change.missing[k, 0], change.missing[k, 1], change.missing[k, 2]
        template, alone = ZERO, True
        if is_full(tables.keys):
            return NO_ROOM
        if kind == np.uint64(WEIGHT):
            if not request_weight(tables, wiring, program, state, a, b):
                return NO_ROOM
            if tables.weight.planned[0] == 0 and not (plan_all(tables) and finish_weight(tables)):
                return NO_ROOM
            weight = np.uint64(find(tables.keys, PLAN, tables.weight.node[0], ZERO))
            template, alone = np.uint64(tables.pools.plan_sync[weight]), False
        elif kind == np.uint64(HELD):
            if not keep(tables, wiring, state, a):
                left = IN_PYTHON
        else:
            request_reshard(tables, kind, a, b)
            if not plan_all(tables):
                return NO_ROOM
            template = np.uint64(find(tables.keys, kind, a, b))
        charge(tables.pools, state, ZERO, template, alone)
        for r in range(np.uint64(state.load.shape[0])):
            if state.load[r] > limit:
                return OVER
    return left


# ---- weights


@lean
def request_weight(
    tables: TemplateTables, wiring: Wiring, program: Program, state: State, w: Any, sharding: Any
) -> Any:
    """Request the reshards of a weight's plan, for what its readers want in ``state``: where it is gathered (if it is
    stored in parts), then its synchronisation. ``weight`` says what else ``finish_weight`` needs. False if there is no
    room."""
    scratch, requests, count = tables.scratch, tables.requests, ZERO
    dtype = np.uint64(wiring.weight_type[w])
    node = number(tables.keys, WEIGHT, typed(wiring, program, w), sharding)
    requests.size[0] = requests.size[1] = ZERO
    for k in range(np.uint64(program.reader_first[w]), np.uint64(program.reader_last[w])):
        slot = np.uint64(program.reader[k])
        if np.uint64(state.leader[slot]) == slot:
            scratch.need[count], scratch.flows[count] = state.need[slot], program.flows[slot]
            step = np.uint64(state.need[slot]) * FLOWS + np.uint64(program.flows[slot])
            node = number(tables.keys, STEP, node, step)
            count += ONE
    weight = tables.weight
    weight.node[0], weight.edges[0], weight.dtype[0] = node, count, dtype
    weight.planned[0] = 1
    if find(tables.keys, PLAN, node, ZERO) != MISSING:
        return True
    weight.planned[0], weight.trained[0], weight.sharding[0] = 0, 0, sharding
    stored = _store(tables, count, sharding % _OVER_ALL if sharding > ZERO else ONE)
    if stored == MISSING:
        return False
    weight.stored[0] = stored
    begin, itemsize = ZERO, tables.itemsize[dtype]
    for e in range(count):
        need = np.uint64(scratch.need[e])
        if sharding > ZERO and scratch.flows[e] != GRADIENT:  # else every device cuts from what it stores
            requests.begin[requests.size[0]] = begin
            request(tables, ZERO, np.uint64(stored), need, GIVEN, itemsize)
            begin += entries_of(tables.layouts, need)
        if scratch.flows[e] != VALUE:
            weight.trained[0] = 1
    if weight.trained[0] == 1:
        source = _gradients(tables, count)
        if source == MISSING:
            return False
        request(tables, ZERO, np.uint64(source), np.uint64(stored), program.sums[0], tables.gradient_itemsize[dtype])
    return True


@lean
def finish_weight(tables: TemplateTables) -> Any:
    """Add the plan of the weight whose reshards were planned last, as ``weights.plan_weight`` makes it. False if there
    is no room."""
    pools, used, weight = tables.pools, tables.used, tables.weight
    requests, edges, stored = tables.requests, np.uint64(weight.edges[0]), np.uint64(weight.stored[0])
    itemsize, template = tables.itemsize[np.uint64(weight.dtype[0])], used.plans[0]
    last = used.stores[0] + _stored_here(tables, stored)
    full = is_full(tables.keys) or template == np.uint64(pools.plan_sync.shape[0])
    full = full or used.gathers[0] + edges > np.uint64(pools.gather.shape[0])
    if full or last > np.uint64(pools.store_device.shape[0]):
        return False
    sync = np.uint64(requests.template[requests.size[0] - ONE]) if weight.trained[0] == 1 else ZERO
    gathered = requests.size[0] > np.uint64(weight.trained[0])
    for k in range(requests.size[0]):
        if not _set_keys(tables, np.uint64(requests.template[k]), np.uint64(weight.dtype[0])):
            return False
    k = ZERO
    for e in range(edges):
        pools.gather[used.gathers[0] + e] = 0
        if gathered and tables.scratch.flows[e] != GRADIENT:
            pools.gather[used.gathers[0] + e] = requests.template[k]
            k += ONE
    _list_stored(tables, stored, used.stores[0], itemsize)
    if tables.blocks.replicas[0] > ONE:
        _check_stored(tables, stored)
    pools.plan_gather[template], pools.plan_sync[template] = used.gathers[0], sync
    pools.plan_sharding[template] = weight.sharding[0]
    pools.store_first[template], pools.store_last[template] = used.stores[0], last
    used.gathers[0] += edges
    used.stores[0], used.plans[0] = last, template + ONE
    put(tables.keys, PLAN, weight.node[0], ZERO, template)
    return True


@lean
def _join(tables: TemplateTables, edges: Any, without: Any) -> Any:
    """Put the entries that the edges want, but those of which only ``without`` (a ``Flow``) passes, one after the
    other; the terms of different edges are different. Returns their number, or MISSING if there is no room."""
    layouts, scratch, count = tables.layouts, tables.scratch, ZERO
    for e in range(edges):
        if scratch.flows[e] == without:
            continue
        need = np.uint64(scratch.need[e])
        if count + entries_of(layouts, need) > np.uint64(scratch.term.shape[0]):
            return MISSING
        rank, entries = rank_of(layouts, need), entries_of(layouts, need)
        if rank > np.uint64(scratch.box.shape[1]):
            return MISSING
        grid, mesh = np.uint64(layouts.layout_grid[need]), np.uint64(layouts.layout_mesh[need])
        first, at = np.uint64(layouts.grid_first[grid]), np.uint64(layouts.grid_box[grid])
        device = np.uint64(layouts.mesh_first[mesh])
        for k in range(entries):
            scratch.device[count] = layouts.device[device + k]
            scratch.term[count] = np.uint64(layouts.term[first + k]) * edges + np.uint64(e)
            for r in range(np.uint64(scratch.box.shape[1])):
                scratch.box[count, r, 0], scratch.box[count, r, 1] = 0, 1
                if r < rank:
                    scratch.box[count, r, 0], scratch.box[count, r, 1] = layouts.box[at, 0], layouts.box[at, 1]
                    at += ONE
            count += ONE
    return np.uint32(count)


@lean
def _store(tables: TemplateTables, edges: Any, over: Any) -> Any:
    """Layout in which a weight is stored, in parts ``over`` so many devices; MISSING if there is no room. The entries
    that each wanted one is put together from are left in ``scratch.first`` and ``end``."""
    layouts, scratch, workspace = tables.layouts, tables.scratch, tables.workspace
    total = _join(tables, edges, GRADIENT)
    if total == MISSING:
        return MISSING
    rank = rank_of(layouts, np.uint64(scratch.need[0]))
    box = scratch.plain_box if rank == ZERO else scratch.box
    store(scratch.device, box, np.uint64(total), over, workspace.groups, workspace.sets, workspace.middle)
    for k in range(np.uint64(total)):
        scratch.first[k], scratch.end[k] = workspace.groups.first[k], workspace.groups.end[k]
    count = workspace.middle.size[0]
    for k in range(count):  # boxes of different groups may overlap, which must not be taken for copies
        scratch.term[k] = k
    grid = intern_grid(layouts, workspace.middle.box, scratch.term, count, rank)
    mesh = intern_mesh(layouts, workspace.middle.device, ZERO, count)
    if grid == MISSING or mesh == MISSING:
        return MISSING
    return intern_layout(layouts, grid, mesh)


@lean
def _gradients(tables: TemplateTables, edges: Any) -> Any:
    """Layout of the gradients that the edges make; MISSING if there is no room."""
    layouts, scratch = tables.layouts, tables.scratch
    count = _join(tables, edges, VALUE)
    if count == MISSING:
        return MISSING
    rank = rank_of(layouts, np.uint64(scratch.need[0]))
    grid = intern_grid(layouts, scratch.box, scratch.term, np.uint64(count), rank)
    mesh = intern_mesh(layouts, scratch.device, ZERO, np.uint64(count))
    if grid == MISSING or mesh == MISSING:
        return MISSING
    return intern_layout(layouts, grid, mesh)


@lean
def _list_stored(tables: TemplateTables, layout: Any, at: Any, itemsize: Any) -> None:
    """Write the bytes of a stored weight to the pools, from row ``at`` on."""
    layouts, pools = tables.layouts, tables.pools
    grid, mesh = np.uint64(layouts.layout_grid[layout]), np.uint64(layouts.layout_mesh[layout])
    first, device = np.uint64(layouts.grid_first[grid]), np.uint64(layouts.mesh_first[mesh])
    for k in range(entries_of(layouts, layout)):
        if np.uint64(layouts.device[device + k]) < tables.blocks.devices[0]:
            pools.store_device[at] = layouts.device[device + k]
            pools.store_bytes[at] = np.uint64(layouts.volume[first + k] * itemsize)
            at += ONE


@lean
def _check_stored(tables: TemplateTables, layout: Any) -> None:
    """Note if other blocks store other amounts of a weight than the first."""
    layouts, blocks = tables.layouts, tables.blocks
    first = np.uint64(layouts.grid_first[np.uint64(layouts.layout_grid[layout])])
    device = np.uint64(layouts.mesh_first[np.uint64(layouts.layout_mesh[layout])])
    count, alike = entries_of(layouts, layout), blocks.replicas[0] * _stored_here(tables, layout)
    for k in range(count):
        place, volume, equal = place_of(blocks, layouts.device[device + k]), layouts.volume[first + k], False
        for j in range(count):
            if np.uint64(layouts.device[device + j]) == place and layouts.volume[first + j] == volume:
                equal = True
                break
        if not equal or count != alike:
            blocks.lopsided[0] += ONE
            return


@lean
def _stored_here(tables: TemplateTables, layout: Any) -> Any:
    """How many entries of a layout lie in the first block."""
    layouts, count = tables.layouts, ZERO
    device = np.uint64(layouts.mesh_first[np.uint64(layouts.layout_mesh[layout])])
    for k in range(entries_of(layouts, layout)):
        if np.uint64(layouts.device[device + k]) < tables.blocks.devices[0]:
            count += ONE
    return count


@lean
def _set_keys(tables: TemplateTables, template: Any, dtype: Any) -> Any:
    """Give the exchanges of a reshard their keys: numbers of what those have in common that may go in one bucket: form,
    senders, receivers, dtype. False, and nothing changed, if there is no room."""
    pools, used = tables.pools, tables.used
    first, last = np.uint64(pools.reshard_first[template]), np.uint64(pools.reshard_last[template])
    if used.buckets[0] + last - first > np.uint64(pools.key_form.shape[0]):
        return False
    for again in range(2):  # twice: the second time there is room for everything
        for x in range(first, last):
            senders = intern_mesh(
                tables.layouts, pools.send, np.uint64(pools.from_first[x]), np.uint64(pools.from_last[x])
            )
            receivers = intern_mesh(
                tables.layouts, pools.receive, np.uint64(pools.to_first[x]), np.uint64(pools.to_last[x])
            )
            if senders == MISSING or receivers == MISSING:
                return False
            if again == 1:
                other = np.uint64(receivers) << RECEIVERS | np.uint64(pools.form[x]) << np.uint64(8) | dtype
                _set_key(tables, x, np.uint64(senders) + ONE, other)
    return True


@lean
def _set_key(tables: TemplateTables, x: Any, senders: Any, other: Any) -> None:
    """Give exchange ``x`` its key, a new one if need be."""
    pools, used = tables.pools, tables.used
    key = find(tables.keys, BUCKET, senders, other)
    if key == MISSING:
        key = np.uint32(used.buckets[0])
        form = np.uint64(pools.form[x])
        pools.key_form[used.buckets[0]] = form
        pools.key_group[used.buckets[0]] = 1 if form == ALL_REDUCE else tables.rates.by_group[form]
        used.buckets[0] += ONE
        put(tables.keys, BUCKET, senders, other, key)
    pools.key[x] = key


# ---- buffers


@lean
def keep(tables: TemplateTables, wiring: Wiring, state: State, buffer: Any) -> Any:
    """The layout in which a buffer is kept whose readers all want the same one: that one. False if they do not,
    or if there are none."""
    node = number(tables.keys, HELD, buffer, ZERO)
    layout = MISSING
    for k in range(np.uint64(wiring.buffer_first[buffer]), np.uint64(wiring.buffer_last[buffer])):
        need = need_of(wiring, tables.pools, state, np.uint64(wiring.buffer_slot[k]))
        if layout != MISSING and need != layout:
            return False
        layout = need
        node = number(tables.keys, STEP, node, need)
    if layout == MISSING:
        return False
    put(tables.keys, LAYOUT, node, ZERO, layout)
    return True
