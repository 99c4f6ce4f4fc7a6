"""What the passes of a plan's stages take, for ``list_schedule``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from flexsearch.lower.list_schedule import Passes
from flexsearch.lower.plan import PlanRows
from flexsearch.strategy.schedule import has_halves


def stage_passes(rows: PlanRows, nbytes: Sequence[int], limit: Sequence[int]) -> Passes:
    """Ticks of the passes of the plan at hand, one microbatch. ``nbytes``: by stage, what a microbatch keeps there,
    bytes; ``limit``: by rank, in the order of their first stages, bytes.

    A pass takes as long as the device of the stage that computes most, a transfer as long as the slowest communication
    that leaves the stage. What devices of a stage exchange among each other is left out. Raises FlexsearchError where
    stages share a part of their devices.
    """
    stages, pools = rows.stages, rows.templates.pools
    load = np.zeros((3, len(stages), len(rows.schedule.group)), np.int64)
    for stage, config in zip(stages.of(len(rows.state.config)), rows.state.config.tolist(), strict=True):
        entries = slice(int(pools.config_first[config]), int(pools.config_last[config]))
        device = pools.entry_device[entries]
        load[0, stage, device] += pools.entry_forward[entries]
        load[2, stage, device] += pools.entry_cast[entries]
        if has_halves(stage):
            load[1, stage, device] += pools.entry_inputs[entries]
            load[2, stage, device] += pools.entry_weight[entries]
        else:
            load[2, stage, device] += pools.entry_backward[entries]
    held: dict[tuple[int, ...], list[int]] = {}
    for stage, devices in enumerate(stages.devices):
        held.setdefault(tuple(sorted(devices)), []).append(stage)
    forward, inputs, weights = (tuple(row) for row in load.max(axis=2).tolist())
    transfer = [
        max(_leaving(rows, rows.blocks.forward[s], s), _leaving(rows, rows.blocks.backward[s + 1], s + 1))
        for s in range(len(stages) - 1)
    ]
    return Passes(
        tuple(map(tuple, held.values())), forward, inputs, weights, (*transfer, 0), tuple(nbytes), tuple(limit)
    )


def _leaving(rows: PlanRows, blocks: Iterable[int], stage: int) -> int:
    """Ticks of the slowest communication of some blocks that reaches devices on which their stage is not."""
    segments, inside, most = rows.plan.segments, set(rows.stages.devices[stage]), 0
    for b in blocks:
        segment = int(rows.segment[b])
        for c in range(int(segments.communication_first[segment]), int(segments.communication_last[segment])):
            receivers = segments.receiver[int(segments.receiver_first[c]) : int(segments.receiver_last[c])]
            if not inside.issuperset(receivers.tolist()):
                most = max(most, int(segments.communication_ticks[c]))
    return most
