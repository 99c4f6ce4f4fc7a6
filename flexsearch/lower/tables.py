"""All that compiled code needs to make templates: the pools they go to, the keys they are found by, and what they are
made of (layouts, splits, the planner's workspace)."""

from __future__ import annotations

from typing import NamedTuple

from flexsearch.compiled import F64, I64, U8, U32, U64
from flexsearch.cost.tally import Rates
from flexsearch.lower.arrays import Pools
from flexsearch.lower.footprints import Landings, Sums
from flexsearch.lower.interned import Interned, Side
from flexsearch.lower.keys import Table
from flexsearch.lower.orbits import BlockMap
from flexsearch.lower.workspace import Workspace
from flexsearch.packed import packed
from flexsearch.topology.routes import RouteTable


@packed
class Used(NamedTuple):
    """Rows of the pools so far, (1,) each. ``landings``: (2,), see ``footprints.append_landing``; ``exchanges``: (6,),
    see ``exchanges.append``."""

    configs: U64
    entries: U64
    layouts: U64
    reshards: U64
    landings: U64
    exchanges: U64
    buckets: U64
    plans: U64
    gathers: U64
    stores: U64


@packed
class Splits(NamedTuple):
    """Operators cut into pieces, without devices; piece k is that at position k of a mesh. Of a split: number of
    ``pieces``, and of their different ``extents``. Rows of ``forward``, ``backward``, ``inputs`` and ``weight``
    (ticks; the last two of a backward pass in two halves) and ``cast`` (of gradients of weights):
    ``cost + kind * extents + e`` for extents e on a kind of device. Piece k has extents ``extent[piece_first + k]``,
    and ``samples`` and ``part`` of ``reading.samples_of``; extents 0 and no samples if ``piece_first`` is MISSING.
    Operands ``[reads, writes)`` and ``[writes, last)``. Operand o has the layout ``grid[o]`` on the positions
    ``position[first[o]:first[o] + held_by[o]]``, or on all if ``first[o]`` is MISSING; in all blocks if ``spread[o]``.
    ``follow_*``: what follows a split over a link is split ``follow_split`` on ``follow_count`` positions from
    ``follow_first`` on; all in order if that is MISSING."""

    pieces: U32
    extents: U32
    cost: U32
    piece_first: U32
    reads: U32
    writes: U32
    last: U32
    operator: U32
    forward: I64
    backward: I64
    inputs: I64
    weight: I64
    cast: I64
    extent: U32
    samples: U32
    part: U32
    grid: U32
    first: U32
    held_by: U32
    position: U32
    spread: U8
    follow_split: U32
    follow_first: U32
    follow_count: U32


@packed
class Scratch(NamedTuple):
    """Work arrays. ``source``, ``destination``: layouts at hand, and ``plain_*`` the same for layouts without
    dimensions. ``box``, ``plain_box``, ``term``, ``device``, ``first``, ``end``: by entry. ``need``, ``flows``: the
    layouts that the readers of a weight want, and what passes (``graph.Flow``)."""

    source: Side
    destination: Side
    plain_source: Side
    plain_destination: Side
    box: I64
    plain_box: I64
    term: U32
    device: U32
    first: U32
    end: U32
    need: U32
    flows: U8


@packed
class Requests(NamedTuple):
    """Reshards to plan: ``kind`` of their keys (0: none), ``source`` and ``destination`` layouts, ``mode`` and
    ``itemsize`` as of ``planner.plan``, where the ranges of their entries ``begin`` in ``Scratch.first``; and the
    number of the ``template`` once it is there. ``size``: (2,) requests, and how many of them are planned."""

    kind: U64
    source: U64
    destination: U64
    mode: U64
    itemsize: I64
    begin: U64
    template: U32
    size: U64


@packed
class WeightAtHand(NamedTuple):
    """The weight whose plan is being made, (1,) each: ``node`` of its key, number of ``edges``, number of its
    ``dtype``, layout in which it is ``stored``, whether it is ``trained``, whether it is ``planned`` already, how
    it is sharded (rank of a ``Sharding``)."""

    node: U32
    edges: U32
    dtype: U32
    stored: U32
    trained: U8
    planned: U8
    sharding: U32


@packed
class TemplateTables(NamedTuple):
    """The whole. ``routes``: between all devices. ``bandwidth``: by resource, B/s. ``decisive``: as
    ``Topology.decisive``. ``blocks``: see ``flexsearch.lower.folding``. ``kind``: of each device.
    ``itemsize``, ``gradient_itemsize``: by dtype of weights. ``ruled``: (1,) whether configs are to be replaced by the
    nearest that is allowed. ``full``: (1,) set where there was no room: Python makes it."""

    pools: Pools
    landings: Landings
    sums: Sums
    keys: Table
    layouts: Interned
    splits: Splits
    used: Used
    workspace: Workspace
    scratch: Scratch
    requests: Requests
    weight: WeightAtHand
    routes: RouteTable
    rates: Rates
    bandwidth: F64
    decisive: U8
    blocks: BlockMap
    kind: U32
    itemsize: I64
    gradient_itemsize: I64
    ruled: U8
    full: U8
