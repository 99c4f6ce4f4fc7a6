"""Time of a communication: software overhead + route latency + factor * (bytes over the busiest link / bandwidth).

The factor of each form is measured (``flexsearch probe``) for the algorithm that the runtime uses on that backend.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from flexsearch.topology import Topology


@dataclass(frozen=True, slots=True)
class Transfer:
    """Cost of one communication. ``duration_s``: from its start until all data has arrived, s. ``links``: (resource,
    seconds that this communication keeps it busy). ``drag``: (processor resource, seconds of computing time that moving
    the bytes takes from it; gloo moves bytes by CPU). ``link_bytes``: (resource, bytes)."""

    duration_s: float
    links: tuple[tuple[int, float], ...]
    drag: tuple[tuple[int, float], ...]
    link_bytes: tuple[tuple[int, int], ...]


def transfer(topology: Topology, form: str, messages: Iterable[tuple[int, int, int]], steps: int = 1) -> Transfer:
    """Cost of messages (source device, destination device, bytes) that move at the same time.

    ``steps``: rounds of the algorithm that wait for each other; each pays the longest route's latency.
    """
    communication = topology.communication
    load: dict[int, int] = {}
    moved: dict[int, int] = {}
    latency = 0.0
    for source, destination, nbytes in messages:
        route = topology.route(source, destination)
        latency = max(latency, route.latency_s)
        for resource in route.resources:
            load[resource] = load.get(resource, 0) + nbytes
        for device in (source, destination):
            processor = topology.processor_of[device]
            moved[processor] = moved.get(processor, 0) + nbytes
    factor = communication.factors[form]
    links = tuple((r, factor * nbytes / topology.resources[r].bandwidth) for r, nbytes in sorted(load.items()))
    busiest = max((seconds for _, seconds in links), default=0.0)
    per_byte = communication.cpu_s_per_byte
    return Transfer(
        duration_s=communication.overhead_s + steps * latency + busiest,
        links=links,
        drag=tuple((p, per_byte * nbytes) for p, nbytes in sorted(moved.items())) if per_byte else (),
        link_bytes=tuple(sorted(load.items())),
    )


def all_reduce(topology: Topology, devices: Sequence[int], nbytes: int) -> Transfer:
    """Cost of a ring all-reduce of ``nbytes`` per device: every ring edge carries 2 (n-1)/n of them in 2 (n-1) steps.

    The ring visits the devices in ascending order, which keeps devices of one host together.
    """
    n = len(devices)
    edge = 2 * (n - 1) * nbytes // n
    ring = sorted(devices)
    return transfer(
        topology, "all_reduce", [(d, ring[(k + 1) % n], edge) for k, d in enumerate(ring)], steps=2 * (n - 1)
    )
