"""Time of a communication: start + factor * (bytes over the busiest link / bandwidth).

The factor of each form is measured (``flexsearch probe``) for the algorithm that the runtime uses on that backend. The
start of an exchange of messages is a software overhead, the route's latency, and ``message_s`` for each further message
of the device that has most of them; :mod:`flexsearch.cost.collectives` says what the start of a collective is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flexsearch.compiled import I64, U32, ZERO, lean
from flexsearch.cost.collectives import price_collective
from flexsearch.cost.learned import Network
from flexsearch.cost.profile import Profile
from flexsearch.cost.tally import (
    Loads,
    Rates,
    Tally,
    empty_loads,
    make_rates,
    make_tally,
    send,
    settle,
    start_of_messages,
)
from flexsearch.topology import Topology
from flexsearch.topology.parts import FORMS
from flexsearch.topology.routes import RouteTable


@dataclass(frozen=True, slots=True)
class Transfer:
    """Cost of one communication. ``duration_s``: from its start until all data has arrived, s. ``links``: (resource,
    seconds that this communication keeps it busy). ``drag``: (processor resource, seconds of computing time that moving
    the bytes takes from it; gloo moves bytes by CPU). ``link_bytes``: (resource, bytes)."""

    duration_s: float
    links: tuple[tuple[int, float], ...]
    drag: tuple[tuple[int, float], ...]
    link_bytes: tuple[tuple[int, int], ...]


@lean
def price_messages(rates: Rates, tally: Tally, loads: Loads, form: Any) -> Any:
    """Seconds of the messages that were sent to ``tally``, whose amounts are bytes. Adds rows to ``loads``."""
    return settle(rates, tally, loads, form, rates.factor[form], np.int64(1), start_of_messages(rates, tally))


@lean
def _messages(
    routes: RouteTable, rates: Rates, tally: Tally, loads: Loads, source: U32, destination: U32, nbytes: I64, form: Any,
    start_s: Any,
) -> Any:  # fmt: skip
    for k in range(np.uint64(source.shape[0])):
        send(routes, rates, tally, np.uint64(source[k]), np.uint64(destination[k]), nbytes[k])
    start = start_s if start_s >= 0.0 else start_of_messages(rates, tally)
    return settle(rates, tally, loads, form, rates.factor[form], np.int64(1), start)


class Pricing:
    """Costs of communications on a topology, with the arrays that compiled code needs for them. ``profile``: what was
    learned of its network."""

    def __init__(self, topology: Topology, profile: Profile | None = None) -> None:
        self.topology = topology
        self.rates, self.tally = _rates(topology, profile), make_tally(topology)
        self._loads = empty_loads(len(topology.resources))

    def by_group(self, form: str) -> bool:
        """Whether a communication of this form is one of a group of devices, not of messages between pairs."""
        return form == "all_reduce" or bool(self.rates.by_group[FORMS.index(form)])

    def transfer(self, form: str, messages: Iterable[tuple[int, int, int]], start_s: float | None = None) -> Transfer:
        """Cost of messages (source device, destination device, bytes) that move at the same time. ``start_s``: until
        bytes flow, where it does not follow from the messages."""
        rows = np.array(list(messages), dtype=np.int64).reshape(-1, 3)
        source, destination = (np.ascontiguousarray(rows[:, k], dtype=np.uint32) for k in (0, 1))
        self._loads.size[:] = 0
        seconds = _messages(
            self.topology.routes, self.rates, self.tally, self._loads, source, destination,
            np.ascontiguousarray(rows[:, 2]), np.uint64(FORMS.index(form)), -1.0 if start_s is None else start_s,
        )  # fmt: skip
        return self._priced(float(seconds))

    def collective(self, form: str, devices: Sequence[int], nbytes: int) -> Transfer:
        """Cost of a collective among at least two devices; ``nbytes``: see ``price_collective``."""
        group = np.array(sorted(devices), dtype=np.uint32)
        self._loads.size[:] = 0
        seconds = price_collective(
            self.topology.routes, self.rates, self.tally, self._loads, np.uint64(FORMS.index(form)), group, ZERO,
            np.uint64(len(group)), np.int64(nbytes),
        )  # fmt: skip
        return self._priced(float(seconds))

    def all_reduce(self, devices: Sequence[int], nbytes: int) -> Transfer:
        """Cost of an all-reduce of ``nbytes`` per device."""
        return self.collective("all_reduce", devices, nbytes)

    def _priced(self, seconds: float) -> Transfer:
        links, drags = slice(0, int(self._loads.size[0])), slice(0, int(self._loads.size[1]))
        return priced_transfer(seconds, self._loads, links, drags, int(self.tally.unit[0]))


def priced_transfer(seconds: float, loads: Loads, links: slice, drags: slice, unit: int) -> Transfer:
    """The transfer of some rows, whose amounts are in units of ``unit`` bytes."""
    link = loads.link[links].tolist()
    return Transfer(
        duration_s=seconds,
        links=tuple(zip(link, loads.link_s[links].tolist(), strict=True)),
        drag=tuple(zip(loads.drag[drags].tolist(), loads.drag_s[drags].tolist(), strict=True)),
        link_bytes=tuple((r, load * unit) for r, load in zip(link, loads.link_load[links].tolist(), strict=True)),
    )


def least_seconds(topology: Topology, profile: Profile | None = None) -> float:
    """No communication on a topology of several devices takes less, s."""
    rates = _rates(topology, profile)
    messages = float(rates.overhead_s[0]) + topology.nearest_s
    return min(messages, float(rates.launch_s[0])) if topology.communication.groups else messages


def _rates(topology: Topology, profile: Profile | None) -> Rates:
    """The figures of a topology, as far as nothing else was learned."""
    return make_rates(topology, Network() if profile is None else profile.network(topology.name))
