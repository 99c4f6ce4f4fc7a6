"""Where the pieces of a weight are stored, how they get to the operators, and how their gradients are synchronised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flexsearch.graph import Box
from flexsearch.lower.layout import Entry, Layout
from flexsearch.lower.reshard import Reshard, assemble, local_reshard, reshard, split_box
from flexsearch.topology import Topology


@dataclass(frozen=True)
class WeightPlan:
    """``storage``: the region that each device keeps and updates (one entry a device). ``forward[e]``: from storage to
    what the readers of edge e need. ``sync``: from the gradients that the edges' pieces make (``origin[k]`` is the edge
    of its source entry k) to storage; None if the weight is not trained."""

    storage: Layout
    forward: tuple[Reshard, ...]
    sync: Reshard | None
    origin: tuple[int, ...]


def plan_weight(
    needs: Sequence[Layout], trained: Sequence[bool], shard: bool, itemsize: int, topology: Topology
) -> WeightPlan:
    """``needs[e]``: layout in which the readers of edge e want the weight; ``trained[e]``: whether they make gradients.

    A device stores the bounding box of all it needs; with ``shard``, devices that need the same box divide it.
    """
    boxes = _bounding_boxes(needs)
    groups: dict[Box, list[int]] = {}
    for device, box in boxes.items():
        groups.setdefault(box, []).append(device)
    storage: list[Entry] = []
    parts: dict[Box, tuple[int, ...]] = {}
    for box, devices in groups.items():
        owned = split_box(box, devices) if shard else [(device, box) for device in devices]
        first = len(storage)
        parts[box] = tuple(range(first, first + len(owned)))
        storage.extend(Entry(device, part, first + k) for k, (device, part) in enumerate(owned))
    stored = tuple(storage)
    forward = tuple(
        # Groups gather among themselves: their boxes may overlap, which must not be taken for partial sums.
        assemble(stored, need, [parts[boxes[e.device]] for e in need], itemsize, topology)
        if shard
        else local_reshard(stored, need)
        for need in needs
    )
    source: list[Entry] = []
    origin: list[int] = []
    for edge, need in enumerate(needs):
        if trained[edge]:
            # Gradients of different edges are different terms, even where the pieces' numbers agree.
            source.extend(Entry(e.device, e.box, e.term * len(needs) + edge) for e in need)
            origin.extend([edge] * len(need))
    sync = reshard(tuple(source), stored, itemsize, topology) if source else None
    return WeightPlan(stored, forward, sync, tuple(origin))


def _bounding_boxes(needs: Sequence[Layout]) -> dict[int, Box]:
    boxes: dict[int, Box] = {}
    for need in needs:
        for device, box, _ in need:
            known = boxes.get(device, box)
            boxes[device] = tuple((min(a[0], b[0]), max(a[1], b[1])) for a, b in zip(known, box, strict=True))
    return dict(sorted(boxes.items()))
