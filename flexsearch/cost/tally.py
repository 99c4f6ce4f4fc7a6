"""What the messages of one communication add up to: bytes on each link, bytes that each processor moves.

Everything is counted by compiled functions, which lowering calls for each of the thousands of communications that it
weighs against each other: ``send`` and ``carry`` add messages to a tally, ``settle`` makes seconds of it.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from flexsearch.compiled import F64, I64, ONE, TWO, U8, U32, U64, ZERO, lean
from flexsearch.cost.learned import Network
from flexsearch.cost.ticks import TICK, whole
from flexsearch.packed import packed, zeros
from flexsearch.topology import Topology
from flexsearch.topology.parts import FORMS
from flexsearch.topology.routes import RouteTable, first_piece, second_piece

NEVER: Any = np.iinfo(np.int64).max
"""Ticks of a turn that does not end."""
MOST_TURNS: Any = np.int64(4096)
"""Of one communication: each is simulated, and finer ones would change nothing that matters."""
ROUNDS: Final = 6.0
"""Turns of gloo's all-reduce at least, for each member but one. Measured: 1 MB behind 25 MB takes 34 to 41 ms on two
hosts at 1 Gbit/s and 52 to 84 on three, instead of 13 alone; 21 to 36 behind a message (``benchmarks.link_sharing``).
"""


@packed
class Rates(NamedTuple):
    """Figures of a topology. ``bandwidth``: B/s by resource (of a processor: 0). By number of a form in ``FORMS``:
    ``factor``; ``cpu_s_per_byte``, processor time; ``tensor_s`` of each tensor but one; ``by_group``: whether the
    library has algorithms for groups of devices (``collectives``); ``two_at_once``: whether a group has two of them
    under way. ``turn_bytes``: (1,), 0: none. By device: ``processor``
    (its resource), ``host``. By members of a group on one host: ``step_s`` of a collective, ``group_factor``; both 0 if
    not known; ``least_s``, and of each of two protocols ``protocol_s`` and ``protocol_factor``, which are 0 if there is
    but one. (1,): ``overhead_s``, ``message_s``, ``launch_s`` of a collective; ``cpu_s``, processor time of a
    communication, whatever its bytes; ``pack_s_per_byte``, until an all-reduce begins; ``reduces_numbers``, whether
    sums of single numbers go by all-reduce whatever messages would take."""

    bandwidth: F64
    factor: F64
    cpu_s_per_byte: F64
    tensor_s: F64
    by_group: U8
    two_at_once: U8
    turn_bytes: F64
    processor: U32
    host: U32
    step_s: F64
    group_factor: F64
    least_s: F64
    protocol_s: npt.NDArray[np.float64]
    protocol_factor: npt.NDArray[np.float64]
    overhead_s: F64
    message_s: F64
    launch_s: F64
    cpu_s: F64
    pack_s_per_byte: F64
    reduces_numbers: U8


WORD: Any = np.uint64(64)
"""Devices that a word of a group's key has bits for."""
WAYS: Any = np.uint64(5)
"""Lists of a group (``collectives``)."""
SLOTS: Final = 1024
ROWS: Final = 1 << 18


@packed
class GroupTable(NamedTuple):
    """What the algorithms for groups of devices bring onto links, for groups that were priced (``collectives``). A
    group has the slot that its key's hash says, from which it drives out another one. By slot: ``member``, its key in
    words (all 0: the slot is empty), the first of which says of which sort it is, and in the others, bit by bit, which
    devices belong to it; ``hosts``, and the ``fewest`` and ``most`` members on one; ``rings`` over direct links inside
    them (at least 1), by which amounts are multiplied; ``latency`` of the longest edge of its rings, s. By slot and
    way: rows ``first`` to ``middle`` are links, those to ``last`` processors, each a ``resource`` and an ``amount``.
    (1,): rows so far, ``size``. ``key``: room for the key of the group at hand."""

    member: U64
    hosts: U32
    fewest: U32
    most: U32
    rings: U32
    latency: F64
    first: U32
    middle: U32
    last: U32
    resource: U32
    amount: I64
    size: U64
    key: U64


@packed
class Tally(NamedTuple):
    """What the messages of one communication add up to. ``load``: amount by resource, for the links listed in
    ``touched``; ``moved``: likewise amounts that the processors in ``dragged`` send or receive; ``messages``: how many
    each device in ``talking`` sends (device d) and receives (number of devices + d); ``listed``: (3,) how many are
    listed. (1,): ``latency``, the longest, s; ``most`` messages that a device sends or receives; ``unit``, bytes that a
    load of 1 stands for. For groups of devices: ``order``, the members host by host, and where each host's ``begin``;
    ``groups``, what is known of those priced."""

    load: I64
    touched: U32
    moved: I64
    dragged: U32
    messages: U32
    talking: U32
    listed: U64
    latency: F64
    most: U32
    unit: I64
    order: U64
    begin: U32
    groups: GroupTable


@packed
class Loads(NamedTuple):
    """Rows of priced communications, one after the other: ascending resources, amounts and seconds. ``least_s``: see
    ``collectives.note_least``. ``size``: (3,) rows of links and of processors so far, and whether there was no room for
    all."""

    link: U32
    link_load: I64
    link_s: F64
    least_s: F64
    drag: U32
    drag_load: I64
    drag_s: F64
    size: U64


@lean
def turn_of(
    rates: Rates, bandwidth: F64, form: Any, members: Any, times: Any, links: U32, first: Any, last: Any, longest_s: Any
) -> Any:  # fmt: skip
    """Ticks after which a communication of so many ``members`` on ``links[first:last]`` (of a ``bandwidth``, B/s) lets
    others on these go first: until ``turn_bytes`` have crossed the slowest, ``times`` as many where it stands for so
    many. ``NEVER``: by then it is done. ``longest_s``: for so long it keeps its busiest link busy, s; no more than
    ``MOST_TURNS`` are made of that. In gloo's all-reduce each member waits for its neighbour again and again: a short
    one has as many turns."""
    if rates.turn_bytes[0] == 0.0 or last == first:
        return NEVER
    slowest = bandwidth[np.uint64(links[first])]
    for k in range(first, last):
        slowest = min(slowest, bandwidth[np.uint64(links[k])])
    seconds = link_seconds(rates.factor[form], rates.turn_bytes[0], slowest)
    if rates.two_at_once[form] == 1:
        seconds = min(seconds, longest_s / (ROUNDS * max(1.0, np.float64(members) - 1.0)))
    ticks = max(np.int64(seconds / TICK), np.int64(longest_s / TICK) // MOST_TURNS + 1)
    return ticks * np.int64(times) if ticks < np.int64(longest_s / TICK) else NEVER


@lean
def carry(routes: RouteTable, rates: Rates, tally: Tally, source: Any, destination: Any, amount: Any) -> None:
    """Add what goes from one device to another, not counted as a message."""
    one, other = first_piece(routes, source, destination), second_piece(routes, source, destination)
    tally.latency[0] = max(tally.latency[0], routes.latency[one] + routes.latency[other])
    if amount == 0:  # would be listed again and again
        return
    for piece in (one, other):
        for k in range(np.uint64(routes.first[piece]), np.uint64(routes.first[piece + ONE])):
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
def send(routes: RouteTable, rates: Rates, tally: Tally, source: Any, destination: Any, amount: Any) -> None:
    """Add a message between two devices."""
    carry(routes, rates, tally, source, destination, amount)
    for end in (source, destination + np.uint64(rates.processor.shape[0])):
        if tally.messages[end] == 0:
            tally.talking[tally.listed[2]] = end
            tally.listed[2] += ONE
        tally.messages[end] += np.uint32(1)
        tally.most[0] = max(tally.most[0], tally.messages[end])


@lean
def start_of_messages(rates: Rates, tally: Tally) -> Any:
    """Seconds from the start of an exchange of messages until bytes flow: the latency of the longest route, the start
    of the first message of a device, and of the others that it sends or receives one after the other."""
    others = np.float64(max(tally.most[0], np.uint32(1))) - 1.0
    return rates.overhead_s[0] + others * rates.message_s[0] + tally.latency[0]


@lean
def sort(values: Any, count: Any) -> None:
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
def drag_seconds(rates: Rates, form: Any, nbytes: Any) -> Any:
    """So much computing time a communication that moves so many bytes takes from a processor, s."""
    return whole(rates.cpu_s[0] + rates.cpu_s_per_byte[form] * nbytes)


@lean
def takes_cpu(rates: Rates, form: Any) -> Any:
    """Whether communications take computing time."""
    return rates.cpu_s[0] > 0.0 or rates.cpu_s_per_byte[form] > 0.0


@lean
def duration(start_s: Any, busiest_s: Any) -> Any:
    """From the start of a communication to its end, s: ``busiest_s`` is that of its busiest link."""
    return whole(start_s) + busiest_s


@lean
def clear(tally: Tally) -> None:
    """Nothing has been added."""
    for k in range(tally.listed[0]):
        tally.load[np.uint64(tally.touched[k])] = 0
    for k in range(tally.listed[1]):
        tally.moved[np.uint64(tally.dragged[k])] = 0
    for k in range(tally.listed[2]):
        tally.messages[np.uint64(tally.talking[k])] = 0
    tally.listed[0] = tally.listed[1] = tally.listed[2] = ZERO
    tally.latency[0], tally.most[0] = 0.0, 0


@lean
def settle(rates: Rates, tally: Tally, loads: Loads, form: Any, factor: Any, unit: Any, start_s: Any) -> Any:
    """Seconds of what the tally says, times ``unit`` bytes (1 where amounts are bytes already). Adds rows to ``loads``
    and clears the tally."""
    most, links, slowed = 0.0, tally.listed[0], tally.listed[1] if takes_cpu(rates, form) else ZERO
    room = loads.size[0] + links <= np.uint64(loads.link.shape[0]) and loads.size[1] + slowed <= np.uint64(
        loads.drag.shape[0]
    )
    if not room:
        loads.size[2] = ONE
    sort(tally.touched, links)
    for k in range(links):
        r = np.uint64(tally.touched[k])
        seconds = link_seconds(factor, np.float64(tally.load[r]) * np.float64(unit), rates.bandwidth[r])
        most = max(most, seconds)
        if room:
            at = loads.size[0] + np.uint64(k)
            loads.link[at], loads.link_load[at], loads.link_s[at] = r, tally.load[r], seconds
    sort(tally.dragged, slowed)
    for k in range(slowed):
        p = np.uint64(tally.dragged[k])
        if room:
            at = loads.size[1] + np.uint64(k)
            loads.drag[at], loads.drag_load[at] = p, tally.moved[p]
            loads.drag_s[at] = drag_seconds(rates, form, np.float64(tally.moved[p]) * np.float64(unit))
    if room:
        loads.size[0] += links
        loads.size[1] += slowed
    tally.unit[0] = unit
    clear(tally)
    return duration(start_s, most)


def make_rates(topology: Topology, learned: Network) -> Rates:
    """The figures of a topology, corrected by what was ``learned`` of its network: the start of a communication, and of
    gloo that of each message. ``step_s`` and ``group_factor`` follow the lines between the groups that the file names;
    beyond the largest its start grows on as before, its factor stays."""
    communication, resources, devices = topology.communication, topology.resources, len(topology.devices)
    members = np.arange(devices + 1, dtype=np.float64)
    steps, factors, launch = np.zeros(devices + 1), np.zeros(devices + 1), communication.overhead_s
    more_s = learned.start_s if communication.backend == "gloo" else 0.0
    least, protocols = np.zeros(devices + 1), np.zeros((2, devices + 1, 2))
    if groups := communication.groups:
        at, start = np.array([g.members for g in groups]), np.array([g.startup_s for g in groups])
        # Of a single group only the file's own start of a communication tells what does not grow with the members.
        alone = (start[:1] - min(communication.overhead_s, float(start[0]))) / (at[:1] - 1)
        slopes = np.diff(start) / np.diff(at) if len(groups) > 1 else alone
        launch = max(0.0, float(start[0] - slopes[0] * (at[0] - 1)))
        grown = np.interp(members, [1, *at], [launch, *start]) + np.maximum(0.0, members - at[-1]) * slopes[-1]
        steps = (grown - launch) / np.maximum(2.0 * (members - 1.0), 1.0)
        factors = np.interp(members, at, [g.factor for g in groups])
        if groups[0].protocols:
            more = np.maximum(0.0, members - at[-1]) * slopes[-1]
            least = np.interp(members, at, [g.least_s for g in groups]) + more
            for k in range(2):
                lines = [g.protocols[k] for g in groups]
                protocols[0, :, k] = np.interp(members, at, [line.startup_s for line in lines]) + more + learned.start_s
                protocols[1, :, k] = np.interp(members, at, [line.factor for line in lines]) * learned.time
    own_threads = communication.backend == "gloo"
    return Rates(
        bandwidth=np.array([r.bandwidth if r.kind == "link" else 0.0 for r in resources]),
        factor=np.array([communication.factors[form] * learned.time for form in FORMS]),
        cpu_s_per_byte=np.array([communication.cpu_s_per_byte_of(form) for form in FORMS]),
        tensor_s=np.array([communication.tensor_by_form.get(form, 0.0) for form in FORMS]),
        by_group=np.array([communication.by_group(form) for form in FORMS], np.uint8),
        two_at_once=np.array([own_threads and form == "all_reduce" for form in FORMS], np.uint8),
        turn_bytes=np.array([float(communication.turn_bytes or 0)]),
        processor=np.array(topology.processor_of, np.uint32), host=topology.host_of, step_s=steps,
        group_factor=factors * learned.time, least_s=least, protocol_s=protocols[0].copy(),
        protocol_factor=protocols[1].copy(),
        overhead_s=np.array([max(0.0, communication.overhead_s + learned.start_s)]),
        message_s=np.array([max(0.0, communication.message_s + more_s)]),
        launch_s=np.array([max(0.0, launch + learned.start_s)]), cpu_s=np.array([communication.cpu_s]),
        pack_s_per_byte=np.array([communication.pack_s_per_byte]),
        # A thread of gloo's own reduces. The thread that computes posts messages, and where it is preempted while it
        # holds a connection's lock, 4 bytes (a count, the loss) took 6 to 10 ms in a tenth of the steps.
        reduces_numbers=np.array([communication.backend == "gloo"], np.uint8),
    )  # fmt: skip


def make_tally(topology: Topology) -> Tally:
    """An empty one."""
    resources, devices = len(topology.resources), len(topology.devices)
    return zeros(
        Tally, load=resources, touched=resources, moved=resources, dragged=resources, messages=2 * devices,
        talking=2 * devices, listed=3, unit=np.ones(1, np.int64), order=devices, begin=devices + 1,
        groups=_group_table(resources, devices),
    )  # fmt: skip


def _group_table(resources: int, devices: int) -> GroupTable:
    """An empty one, with room for all rows of at least one group."""
    words, rows = 1 - -devices // int(WORD), max(ROWS, 4 * int(WAYS) * resources)
    by_way = dict.fromkeys(("first", "middle", "last"), SLOTS * int(WAYS))
    return zeros(GroupTable, SLOTS, member=SLOTS * words, **by_way, resource=rows, amount=rows, size=1, key=words)


def empty_loads(room: int) -> Loads:
    """Room for so many rows."""
    return zeros(Loads, room, size=3)
