"""What exchanges of synchronisation recipes cost on a topology, and their work on devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from flexsearch.cost.communication import Pricing, Transfer
from flexsearch.cost.efficiency import moving_rate, start_seconds
from flexsearch.cost.profile import WorkRate
from flexsearch.sync import Exchange
from flexsearch.sync.kinds import Work
from flexsearch.topology import Device
from flexsearch.topology.kernels import recipe_passes


def price(pricing: Pricing, devices: Sequence[int], exchange: Exchange) -> Transfer:
    """The cost of an exchange on its own; ``devices``: by position."""
    members = [devices[k] for k in range(exchange.members)]
    if exchange.form == "all_reduce":
        return pricing.all_reduce(members, exchange.nbytes[0])
    if exchange.form == "all_gather" and pricing.by_group("all_gather"):
        # Parts are padded to the longest; every one is to reach all others.
        padded = max(exchange.nbytes) * exchange.members * (exchange.members - 1)
        return pricing.collective("all_gather", members, padded)
    return pricing.transfer(exchange.form, ((devices[a], devices[b], size) for a, b, size in exchange.messages()))


def independent(exchange: Exchange) -> list[Exchange]:
    """An exchange as those of positions that have nothing to do with each other: they need not wait for others."""
    if exchange.form != "exchange":
        return [exchange]
    root = {position: position for pair in exchange.pairs for position in pair}

    def find(position: int) -> int:
        while root[position] != position:
            root[position] = position = root[root[position]]
        return position

    for a, b in exchange.pairs:
        root[find(a)] = find(b)
    parts: dict[int, list[int]] = {}
    for k, (a, _) in enumerate(exchange.pairs):
        parts.setdefault(find(a), []).append(k)
    return [
        replace(exchange, nbytes=tuple(exchange.nbytes[k] for k in row), pairs=tuple(exchange.pairs[k] for k in row))
        for row in parts.values()
    ]


def work_seconds(
    work: Work, device: Device, rates: Mapping[str, WorkRate], dtype: str = "float32", vector: int = 0
) -> float:  # fmt: skip
    """Seconds of work of a recipe on a device, for a vector of so many bytes: by kind, at the measured rate, or where
    there is none as the passes over memory that it takes."""
    seconds, passes = 0.0, recipe_passes(device.kind)
    for kind, nbytes in sorted(work.items()):
        if (rate := rates.get(kind)) is not None:
            seconds += rate.seconds(nbytes, vector)
        else:
            seconds += streaming_seconds(device, passes[kind] * nbytes, dtype)
    return seconds


def streaming_seconds(device: Device, nbytes: float, dtype: str = "float32") -> float:
    """Seconds of a kernel that reads and writes so many bytes; 0 of none."""
    work = nbytes / moving_rate(device, dtype)
    return work + float(start_seconds(device, device.efficiency_for(dtype), work)) if nbytes else 0.0
