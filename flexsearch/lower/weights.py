"""Where the pieces of a weight are stored, how they get to the operators, and how their gradients are synchronised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from flexsearch.compiled import I64, U32
from flexsearch.graph import Flow
from flexsearch.lower.layout import Laid, Layout, Layouts
from flexsearch.lower.moves import OWN
from flexsearch.lower.planner import store
from flexsearch.lower.reshard import Planner, Reshard
from flexsearch.strategy import OVER_ALL, Sharding, States


@dataclass(frozen=True)
class WeightPlan:
    """``stored``: the region that each device keeps and updates (one entry a device). ``needs[e]``: what the readers of
    edge e need; ``forward[e]``: from storage to there (None: they make gradients alone). ``sync``: from the gradients
    that the edges' pieces make (``origin[k]`` is the edge of its source entry k) to storage; None if the weight is not
    trained. ``states``: which are kept in parts."""

    stored: Laid
    needs: tuple[Laid, ...]
    forward: tuple[Reshard | None, ...]
    sync: Reshard | None
    origin: tuple[int, ...]
    states: States

    @property
    def storage(self) -> Layout:
        """The entries of ``stored``."""
        return self.stored.entries


def plan_weight(
    needs: Sequence[Laid], flows: Sequence[Flow], sharding: int, itemsize: int, gradient_itemsize: int,
    planner: Planner, layouts: Layouts, sums: Any,
) -> WeightPlan:  # fmt: skip
    """``needs[e]``: layout in which the readers of edge e want the weight; ``flows[e]``: whether they read it, and
    whether they make gradients. ``sharding``: rank of its ``Sharding``; ``itemsize``, ``gradient_itemsize``: bytes of
    an element of it and of its gradient; ``sums``: how gradients are summed (``moves.SHARED`` and following).

    A device stores the bounding box of all it reads; with states in parts, devices that need the same one divide it,
    all of them or those near each other.
    """
    states = Sharding.of_rank(sharding).states
    reading = [edge for edge, flow in enumerate(flows) if flow != Flow.GRADIENT]
    device = np.concatenate([needs[edge].device for edge in reading])
    box = np.concatenate([needs[edge].grid.box for edge in reading])
    workspace = planner.room_for(box.shape[1], len(device))
    over = np.uint64(sharding % OVER_ALL if states else 1)
    store(device, box, np.uint64(len(device)), over, workspace.groups, workspace.sets, workspace.middle)
    count = int(workspace.middle.size[0])
    regions = workspace.middle.box[:count, : box.shape[1]].copy()
    # Every entry is a term of its own: boxes of different groups may overlap, which must not be taken for copies.
    grid = layouts.grid(regions, np.arange(count, dtype=np.uint32))
    stored = layouts.lay(grid, workspace.middle.device[:count].copy())
    rows = [slice(*ends) for ends in pairwise(accumulate((len(needs[edge]) for edge in reading), initial=0))]
    ranges = [(workspace.groups.first[of].copy(), workspace.groups.end[of].copy()) for of in rows]
    forward: list[Reshard | None] = [None] * len(needs)
    for edge, own in zip(reading, ranges, strict=True):
        # Those that divide a box gather among themselves: boxes may overlap, which must not be taken for partial sums.
        forward[edge] = Reshard(planner, stored, needs[edge], itemsize, OWN, own if states else None)
    edges = [edge for edge, flow in enumerate(flows) if flow != Flow.VALUE]
    if not edges:
        return WeightPlan(stored, tuple(needs), tuple(forward), None, (), states)
    box, term, device, origin = _gradients(needs, edges)
    sync = Reshard(planner, layouts.lay(layouts.grid(box, term), device), stored, gradient_itemsize, sums)
    return WeightPlan(stored, tuple(needs), tuple(forward), sync, tuple(origin.tolist()), states)


def _gradients(needs: Sequence[Laid], edges: Sequence[int]) -> tuple[I64, U32, U32, I64]:
    """Of the gradients that the pieces of edges make: box, term, device, and edge. Those of different edges are
    different terms, even where the pieces' numbers agree."""
    term = np.concatenate([needs[edge].grid.term * np.uint32(len(needs)) + np.uint32(edge) for edge in edges])
    box = np.concatenate([needs[edge].grid.box for edge in edges])
    device = np.concatenate([needs[edge].device for edge in edges])
    return box, term, device, np.repeat(np.array(edges, np.int64), [len(needs[edge]) for edge in edges])


def unsynchronised(plan: WeightPlan, gradient_itemsize: int, planner: Planner, layouts: Layouts) -> WeightPlan:
    """The plan in which every device keeps the sum of the gradients that it makes itself (a recipe synchronises
    them)."""
    box, term, device, origin = _gradients(plan.needs, sorted(set(plan.origin)))
    order = np.argsort(device, kind="stable")
    source = layouts.lay(layouts.grid(box[order], term[order]), device[order])
    first, last = (
        np.searchsorted(device[order], plan.stored.device, side).astype(np.uint32) for side in ("left", "right")
    )
    sync = Reshard(planner, source, plan.stored, gradient_itemsize, ranges=(first, last))
    return replace(plan, sync=sync, origin=tuple(origin[order].tolist()))
