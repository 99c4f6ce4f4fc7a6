"""Reshards that are asked for, planned and added to the pools, compiled."""

from __future__ import annotations

from typing import Any

import numpy as np

from flexsearch.compiled import ONE, ZERO, lean
from flexsearch.lower.exchanges import append
from flexsearch.lower.footprints import append_landing
from flexsearch.lower.interned import Side, rank_of, write_side
from flexsearch.lower.keys import MISSING, RESHARD, find, is_full, put
from flexsearch.lower.moves import FREE, GIVEN, SHARED
from flexsearch.lower.planner import plan
from flexsearch.lower.tables import TemplateTables
from flexsearch.lower.workspace import FIRST, FULL, LAST


@lean
def request_reshard(tables: TemplateTables, kind: Any, source: Any, destination: Any) -> None:
    """Request the reshard of a key, alone."""
    requests = tables.requests
    requests.size[0] = requests.size[1] = ZERO
    request(tables, kind, source, destination, FREE, np.int64(1) << np.int64(kind - np.uint64(RESHARD)))


@lean
def request(tables: TemplateTables, kind: Any, source: Any, destination: Any, mode: Any, itemsize: Any) -> None:
    requests, at = tables.requests, tables.requests.size[0]
    requests.kind[at], requests.source[at], requests.destination[at] = kind, source, destination
    requests.mode[at], requests.itemsize[at] = mode, itemsize
    requests.size[0] = at + ONE


@lean
def plan_all(tables: TemplateTables) -> Any:
    """Plan the reshards that are requested, from number ``size[1]`` on, and add them to the pools. False if there is no
    room for the next one: it can go on then."""
    requests, layouts, scratch, workspace = tables.requests, tables.layouts, tables.scratch, tables.workspace
    while requests.size[1] < requests.size[0]:
        k = requests.size[1]
        kind, source, destination = requests.kind[k], requests.source[k], requests.destination[k]
        requests.size[1] += ONE
        # Several edges may have asked for the same.
        if kind > ZERO and find(tables.keys, kind, source, destination) != MISSING:
            continue
        a, b = scratch.source, scratch.destination
        if rank_of(layouts, destination) == ZERO:
            a, b = scratch.plain_source, scratch.plain_destination
        write_side(layouts, source, a)
        write_side(layouts, destination, b)
        if requests.mode[k] == GIVEN:
            for e in range(b.size[0]):
                workspace.groups.first[e] = scratch.first[requests.begin[k] + e]
                workspace.groups.end[e] = scratch.end[requests.begin[k] + e]
        plan(tables.routes, tables.rates, a, b, requests.mode[k], requests.itemsize[k], workspace)
        if workspace.result[FULL] == ONE or is_full(tables.keys) or not _append(tables, k, a, b):
            requests.size[1] = k
            return False
        if kind > ZERO:
            put(tables.keys, kind, source, destination, requests.template[k])
    return True


@lean
def _append(tables: TemplateTables, k: Any, source: Side, destination: Side) -> Any:
    """Add request ``k``, whose reshard between two layouts is in the workspace, to the pools; a gathering that moves
    nothing is template 0. False if there is no room."""
    pools, used, workspace = tables.pools, tables.used, tables.workspace
    template, first = used.reshards[0], used.exchanges[4]
    if tables.requests.mode[k] == GIVEN and workspace.result[LAST] == workspace.result[FIRST]:
        tables.requests.template[k] = 0
        return True
    if template == np.uint64(pools.reshard_first.shape[0]):
        return False
    landed = append_landing(
        workspace, source, destination, tables.requests.mode[k] >= SHARED, tables.requests.itemsize[k], tables.sums,
        tables.blocks, tables.landings, template, used.landings,
    )  # fmt: skip
    exchanges = used.exchanges
    if not landed or not append(
        workspace, tables.routes, tables.rates, tables.bandwidth, tables.decisive, tables.blocks, pools, exchanges
    ):
        return False
    pools.reshard_first[template] = first
    pools.reshard_middle[template] = exchanges[5]
    pools.reshard_last[template] = used.exchanges[4]
    used.reshards[0] = template + ONE
    tables.requests.template[k] = template
    return True
