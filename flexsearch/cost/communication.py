"""Time of a communication: software overhead + route latency + factor * (bytes over the busiest link / bandwidth).

The factor of each form is measured (``flexsearch probe``) for the algorithm that the runtime uses on that backend.
Everything is counted by compiled functions, which lowering calls for each of the thousands of communications that it
weighs against each other: ``send`` and ``send_around`` add messages to a tally, ``price`` makes seconds of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from flexsearch.compiled import F64, I64, ONE, TWO, U32, U64, ZERO, lean
from flexsearch.cost.ticks import whole
from flexsearch.packed import packed
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


@packed
class Rates(NamedTuple):
    """Figures of a topology. ``bandwidth``: B/s by resource (of a processor: 0). ``factor``: by number of a form in
    ``FORMS``. ``processor``: resource by device. ``fixed``: start of a communication (s), processor seconds per
    byte."""

    bandwidth: F64
    factor: F64
    processor: U32
    fixed: F64


@packed
class Tally(NamedTuple):
    """What the messages of one communication add up to. ``load``: amount by resource, for the ``listed[0]`` links that
    are listed in ``touched``; ``moved``: likewise amounts that the ``listed[1]`` processors in ``dragged`` send or
    receive; ``latency``: (1,) the longest, s."""

    load: I64
    touched: U32
    moved: I64
    dragged: U32
    listed: U64
    latency: F64


@packed
class Loads(NamedTuple):
    """Rows of priced communications, one after the other: ascending resources, amounts and seconds. ``size``: (3,) rows
    of links and of processors so far, and whether there was no room for all."""

    link: U32
    link_load: I64
    link_s: F64
    drag: U32
    drag_load: I64
    drag_s: F64
    size: U64


@lean
def send(routes: RouteTable, rates: Rates, tally: Tally, source: Any, destination: Any, amount: Any) -> None:
    """Add a message between two devices."""
    route = np.uint64(routes.number[source, destination])
    tally.latency[0] = max(tally.latency[0], routes.latency[route])
    if amount == 0:  # would be listed again and again
        return
    for k in range(np.uint64(routes.first[route]), np.uint64(routes.first[route + ONE])):
        r = np.uint64(routes.resource[k])
        if tally.load[r] == 0:
            tally.touched[tally.listed[0]] = r
            tally.listed[0] += ONE
        tally.load[r] += amount
    for device in (source, destination):
        p = np.uint64(rates.processor[device])
        if tally.moved[p] == 0:
            tally.dragged[tally.listed[1]] = p
            tally.listed[1] += ONE
        tally.moved[p] += amount


@lean
def send_around(routes: RouteTable, rates: Rates, tally: Tally, devices: U32, first: Any, last: Any) -> None:
    """Add a message of 1 from each of ``devices[first:last]`` to the next one: the edges of a ring. They are ascending,
    which keeps devices of one host together."""
    for k in range(first, last):
        following = k + ONE if k + ONE < last else first
        send(routes, rates, tally, np.uint64(devices[k]), np.uint64(devices[following]), np.int64(1))


@lean
def ring_steps(count: Any) -> Any:
    """Rounds of a ring all-reduce among ``count`` devices that wait for each other."""
    return np.int64(2) * (np.int64(count) - np.int64(1))


@lean
def ring_edge(count: Any, nbytes: Any) -> Any:
    """Bytes that every edge of the ring carries where each device has ``nbytes``: 2 (n-1)/n of them."""
    return ring_steps(count) * np.int64(nbytes) // np.int64(count)


@lean
def _sort(values: U32, count: Any) -> None:
    """Shell sort of the first ``count`` values, ascending."""
    gap = count // TWO
    while gap > ZERO:
        for k in range(gap, count):
            value, at = values[k], np.uint64(k)
            while at >= gap and values[at - gap] > value:
                values[at] = values[at - gap]
                at -= gap
            values[at] = value
        gap //= TWO


@lean
def link_seconds(factor: Any, nbytes: Any, bandwidth: Any) -> Any:
    """For so long bytes keep a link busy, s."""
    return whole(factor * nbytes / bandwidth)


@lean
def drag_seconds(per_byte: Any, nbytes: Any) -> Any:
    """So much computing time moving bytes takes from a processor, s."""
    return whole(per_byte * nbytes)


@lean
def duration(overhead_s: Any, steps: Any, latency_s: Any, busiest_s: Any) -> Any:
    """From the start of a communication to its end, s: ``busiest_s`` is that of its busiest link."""
    return whole(overhead_s + steps * latency_s) + busiest_s


@lean
def price(rates: Rates, tally: Tally, loads: Loads, form: Any, edge: Any, steps: Any) -> Any:
    """Seconds of what the tally says, times ``edge`` bytes (1 where amounts are bytes already), in ``steps`` rounds
    that wait for each other; each pays the longest route's latency. Adds rows to ``loads`` and clears the tally."""
    factor, per_byte, busiest = rates.factor[form], rates.fixed[1], 0.0
    links, drags = tally.listed[0], tally.listed[1] if per_byte > 0.0 else ZERO
    room = loads.size[0] + links <= np.uint64(loads.link.shape[0]) and loads.size[1] + drags <= np.uint64(
        loads.drag.shape[0]
    )
    if not room:
        loads.size[2] = ONE
    _sort(tally.touched, links)
    for k in range(links):
        r = np.uint64(tally.touched[k])
        seconds = link_seconds(factor, np.float64(tally.load[r] * edge), rates.bandwidth[r])
        busiest = max(busiest, seconds)
        if room:
            at = loads.size[0] + np.uint64(k)
            loads.link[at], loads.link_load[at], loads.link_s[at] = r, tally.load[r], seconds
        tally.load[r] = 0
    _sort(tally.dragged, tally.listed[1])
    for k in range(tally.listed[1]):
        p = np.uint64(tally.dragged[k])
        if room and per_byte > 0.0:
            at = loads.size[1] + np.uint64(k)
            loads.drag[at], loads.drag_load[at] = p, tally.moved[p]
            loads.drag_s[at] = drag_seconds(per_byte, np.float64(tally.moved[p] * edge))
        tally.moved[p] = 0
    if room:
        loads.size[0] += links
        loads.size[1] += drags
    seconds = duration(rates.fixed[0], np.float64(steps), tally.latency[0], busiest)
    tally.listed[0] = tally.listed[1] = ZERO
    tally.latency[0] = 0.0
    return seconds


@lean
def _messages(
    routes: RouteTable, rates: Rates, tally: Tally, loads: Loads, source: U32, destination: U32, nbytes: I64, form: Any,
    steps: Any,
) -> Any:  # fmt: skip
    for k in range(np.uint64(source.shape[0])):
        send(routes, rates, tally, np.uint64(source[k]), np.uint64(destination[k]), nbytes[k])
    return price(rates, tally, loads, form, np.int64(1), steps)


@lean
def _ring(routes: RouteTable, rates: Rates, tally: Tally, loads: Loads, devices: U32, nbytes: Any) -> Any:
    count = np.uint64(devices.shape[0])
    send_around(routes, rates, tally, devices, ZERO, count)
    return price(rates, tally, loads, ZERO, ring_edge(count, nbytes), ring_steps(count))


class Pricing:
    """Costs of communications on a topology, with the arrays that compiled code needs for them."""

    def __init__(self, topology: Topology) -> None:
        communication, resources = topology.communication, topology.resources
        self.topology = topology
        self.rates = Rates(
            np.array([r.bandwidth if r.kind == "link" else 0.0 for r in resources]),
            np.array([communication.factors[form] for form in FORMS]),
            np.array(topology.processor_of, np.uint32),
            np.array([communication.overhead_s, communication.cpu_s_per_byte]),
        )
        self.tally = Tally(
            np.zeros(len(resources), np.int64), np.zeros(len(resources), np.uint32),
            np.zeros(len(resources), np.int64), np.zeros(len(resources), np.uint32), np.zeros(2, np.uint64),
            np.zeros(1),
        )  # fmt: skip
        self._loads = empty_loads(len(resources))

    def transfer(self, form: str, messages: Iterable[tuple[int, int, int]], steps: int = 1) -> Transfer:
        """Cost of messages (source device, destination device, bytes) that move at the same time. ``steps``: rounds of
        the algorithm that wait for each other."""
        rows = np.array(list(messages), dtype=np.int64).reshape(-1, 3)
        source, destination = (np.ascontiguousarray(rows[:, k], dtype=np.uint32) for k in (0, 1))
        self._loads.size[:] = 0
        seconds = _messages(
            self.topology.routes.between(np.unique(rows[:, :2]).tolist()), self.rates, self.tally, self._loads, source,
            destination, np.ascontiguousarray(rows[:, 2]), np.uint64(FORMS.index(form)), np.int64(steps),
        )  # fmt: skip
        return self._made(float(seconds), 1)

    def all_reduce(self, devices: Sequence[int], nbytes: int) -> Transfer:
        """Cost of a ring all-reduce of ``nbytes`` per device."""
        ring = np.array(sorted(devices), dtype=np.uint32)
        self._loads.size[:] = 0
        table = self.topology.routes.between(ring.tolist())
        seconds = _ring(table, self.rates, self.tally, self._loads, ring, np.int64(nbytes))
        return self._made(float(seconds), int(ring_edge(np.uint64(len(ring)), np.int64(nbytes))))

    def _made(self, seconds: float, edge: int) -> Transfer:
        return made_transfer(seconds, self._loads, slice(0, int(self._loads.size[0])),
                             slice(0, int(self._loads.size[1])), edge)  # fmt: skip


def empty_loads(room: int) -> Loads:
    """Room for so many rows."""
    return Loads(
        np.zeros(room, np.uint32), np.zeros(room, np.int64), np.zeros(room), np.zeros(room, np.uint32),
        np.zeros(room, np.int64), np.zeros(room), np.zeros(3, np.uint64),
    )  # fmt: skip


def made_transfer(seconds: float, loads: Loads, links: slice, drags: slice, edge: int) -> Transfer:
    """The transfer of some rows, whose amounts are in units of ``edge`` bytes."""
    link = loads.link[links].tolist()
    return Transfer(
        duration_s=seconds,
        links=tuple(zip(link, loads.link_s[links].tolist(), strict=True)),
        drag=tuple(zip(loads.drag[drags].tolist(), loads.drag_s[drags].tolist(), strict=True)),
        link_bytes=tuple((r, load * edge) for r, load in zip(link, loads.link_load[links].tolist(), strict=True)),
    )


def transfer(topology: Topology, form: str, messages: Iterable[tuple[int, int, int]], steps: int = 1) -> Transfer:
    """Cost of messages (source device, destination device, bytes) that move at the same time; see ``Pricing``."""
    return Pricing(topology).transfer(form, messages, steps)


def all_reduce(topology: Topology, devices: Sequence[int], nbytes: int) -> Transfer:
    """Cost of a ring all-reduce of ``nbytes`` per device; see ``Pricing``."""
    return Pricing(topology).all_reduce(devices, nbytes)
