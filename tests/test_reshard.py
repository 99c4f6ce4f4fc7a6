"""Reshards bring every destination entry all it needs."""

from __future__ import annotations

import numpy as np

from flexsearch.lower import Entry, Reshard
from flexsearch.lower.weights import plan_weight
from flexsearch.topology import Topology


def arrived(plan: Reshard, values: np.ndarray) -> list[np.ndarray]:
    """What the destination entries hold, where each source entry holds its part of ``values`` in its own term's share."""
    phase = plan.phases[0]
    held = [np.zeros([high - low for low, high in e.box]) for e in phase.source]
    for part, entry in zip(held, phase.source, strict=True):
        part[...] = values[tuple(slice(low, high) for low, high in entry.box)]
    for phase in plan.phases:
        made = [np.zeros([high - low for low, high in e.box]) for e in phase.destination]
        for moves in (phase.local, *(exchange.moves for exchange in phase.exchanges)):
            for move in moves:
                source, destination = phase.source[move.source], phase.destination[move.destination]
                there, here = (
                    tuple(slice(a - o[0], b - o[0]) for (a, b), o in zip(move.box, entry.box, strict=True))
                    for entry in (source, destination)
                )
                made[move.destination][here] += held[move.source][there]
        held = made
    return held


def test_groups_that_shard_a_weight_gather_all_of_it() -> None:
    topology = Topology.load("p100:4")  # 16 devices, half of the weight on each half of them
    need = tuple(Entry(d, ((8 * (d // 8), 8 * (d // 8) + 8), (0, 8)), d) for d in range(16))
    plan = plan_weight([need], [True], True, 4, topology)
    values = np.arange(128.0).reshape(16, 8)
    for entry, held in zip(need, arrived(plan.forward[0], values), strict=True):
        (low, high), _ = entry.box
        assert (held == values[low:high]).all()
    assert len({entry.term for entry in plan.storage}) == len(plan.storage)
