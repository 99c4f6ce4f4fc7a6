"""Fits a topology to what the probe measured: hosts around a switch, with figures that explain the measurements.

A pure function of plain data, so that it can be tested and repeated without a cluster.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

from flexsearch.cost.communication import Pricing
from flexsearch.measure.machine import Compute, Facts
from flexsearch.topology import Communication, Device, Figure, Link, Sources, Topology
from flexsearch.topology.kernels import USUAL
from flexsearch.topology.parts import FORMS

Pair = tuple[int, int]
UNEVEN = 1.5
"""Pairs inside a host whose bandwidths differ by more than this factor get links of their own."""
ALIKE = 1.15
"""Pairs of hosts whose bandwidths differ by less than this factor count as equal."""
PROBED: tuple[Figure, ...] = (
    "devices.flops", "devices.memory_bandwidth", "devices.memory_bytes", "devices.overhead_s", "links.bandwidth",
    "links.latency_s", "communication.overhead_s", "communication.factors",
    "communication.message_s", "communication.cpu_s", "communication.cpu_s_per_byte", "communication.cpu_by_form",
    "communication.busy_factor", "communication.pack_s_per_byte",
    "communication.tensor_by_form",
)  # fmt: skip
"""What is measured; the rest is that of the backend."""
PAUSE_BYTES = 8
"""Of an all-reduce between computations."""
GPU_MEMORY = 0.93
"""Share of a GPU's memory that plans may use, as in the presets."""
SLOWED = 1.5
"""A device slower than others of its model by less than this factor is taken to have been disturbed."""


@dataclass(frozen=True)
class FormTime:
    """One form of communication among all ranks: ``nbytes`` that each rank sends to each it sends to (all-reduce: that
    each holds), and the seconds it took. ``lost_s``: how much later ranks are done that compute meanwhile, and
    ``busy_s``: seconds it takes then (of all-reduces);
    processor time for which a rank puts together what it sends (``packing_s``), and with that what came
    (``copying_s``); 0 if not measured."""

    nbytes: int
    seconds: float
    lost_s: float = 0.0
    busy_s: float = 0.0
    copying_s: float = 0.0
    packing_s: float = 0.0


@dataclass(frozen=True)
class Measured:
    """All that was measured. By pair of ranks (lower first): ``latency_s`` one way; ``bandwidth`` B/s in each direction
    while nothing else moves. ``together``: B/s into and out of each place of several ranks while all of them talk to
    other places. Of a few bytes among all ranks: ``small_all_reduce_s`` where they do nothing else, ``pause_s`` (of
    ``PAUSE_BYTES``) where it interrupts what they compute, ``overlapped_s`` where they go on computing; 0 if not
    measured. ``tensor_s``: by form, processor time in which a rank puts a further tensor in its place."""

    backend: Literal["gloo", "nccl"]
    facts: Sequence[Facts]
    compute: Sequence[Compute]
    latency_s: Mapping[Pair, float]
    bandwidth: Mapping[Pair, float]
    together: Mapping[str, float]
    small_all_reduce_s: float
    pause_s: float
    overlapped_s: float
    forms: Mapping[str, FormTime]
    tensor_s: Mapping[str, float] = field(default_factory=dict)


def messages(form: str, ranks: int, nbytes: int) -> list[tuple[int, int, int]]:
    """The point-to-point messages (source, destination, bytes) that the probe measures a form with."""
    if form == "exchange":
        return [(i, (i + 1) % ranks, nbytes) for i in range(ranks)]
    return [(i, j, nbytes) for i in range(ranks) for j in range(ranks) if i != j]


def fit(measured: Measured, name: str, source: str) -> Topology:
    """The topology that explains the measurements. Each place (host, or container with its own network) has a link to
    the switch; ranks of one place are joined inside it."""
    overhead = _overhead(measured)
    devices = _devices(measured)
    switches, links = _wiring(measured, [d.name for d in devices], overhead)
    sharing = _sharing(measured.facts)
    communication = Communication(
        backend=measured.backend,
        overhead_s=overhead,
        message_s=overhead,
        factors=dict.fromkeys(FORMS, 1.0),
        cpu_s=measured.overlapped_s / sharing,
    )
    sources = (Sources(figures=PROBED, kind="measured", origin="flexsearch probe"),)
    ideal = Topology(
        name=name, devices=devices, switches=switches, links=links, communication=communication, source=source,
        sources=sources,
    )  # fmt: skip
    factors = {form: _factor(ideal, form, time) for form, time in measured.forms.items()}
    if not factors:  # a single rank has nobody to talk to: the backend's usual figures
        return ideal.model_copy(update={"communication": Communication(backend=measured.backend)})
    # Ranks did nothing else while they were measured; a step's communications stand between computations.
    idle_s = Pricing(ideal).all_reduce(range(len(devices)), PAUSE_BYTES).duration_s
    pause = max(0.0, measured.pause_s - idle_s)
    by_form = {form: _cpu_s_per_byte(form, len(devices), time, sharing) for form, time in measured.forms.items()}
    figures = {
        "factors": factors, "overhead_s": overhead + pause, "cpu_s_per_byte": by_form.pop("exchange", 0.0),
        "cpu_by_form": {form: seconds for form, seconds in by_form.items() if seconds},
        "busy_factor": max([1.0, *(time.busy_s / time.seconds for time in measured.forms.values())]),
        "pack_s_per_byte": _pack_s_per_byte(measured.forms, sharing),
        "tensor_by_form": {form: sharing * seconds for form, seconds in measured.tensor_s.items()},
    }  # fmt: skip
    return ideal.model_copy(update={"communication": communication.model_copy(update=figures)})


def place_names(facts: Sequence[Facts]) -> dict[str, str]:
    """Place -> readable name: its host's, numbered where several places have the same."""
    first = {fact.place: re.sub(r"[\s{}/]+", "-", fact.hostname) or "host" for fact in facts}
    count, seen, names = Counter(first.values()), Counter[str](), {}
    for place, base in first.items():
        names[place] = base if count[base] == 1 else f"{base}-{seen[base]}"
        seen[base] += 1
    return names


def processors(facts: Sequence[Facts]) -> list[int]:
    """Number of the processor of each rank; ranks with the same number take turns on it.

    An accelerator is one processor. CPU ranks that may run on the same cores share them: as many as have cores for
    their threads run beside each other, the rest wait for one of those.
    """
    group = list(range(len(facts)))  # the lowest rank whose cores or accelerator overlap, directly or by way of others
    for rank, fact in enumerate(facts):
        for other in range(rank):
            if group[other] != group[rank] and _overlap(fact, facts[other]):
                low, high = sorted((group[other], group[rank]))
                group = [low if g == high else g for g in group]
    result, free = [0] * len(facts), 0
    for lowest in dict.fromkeys(group):
        members = [rank for rank, g in enumerate(group) if g == lowest]
        cores = {core for rank in members for core in facts[rank].cores}
        threads = max(facts[rank].threads for rank in members)
        slots = 1 if facts[lowest].processor else max(1, min(len(members), len(cores) // threads))
        for k, rank in enumerate(members):
            result[rank] = free + k % slots
        free += slots
    return result


def _overlap(a: Facts, b: Facts) -> bool:
    if a.machine != b.machine or a.processor != b.processor:
        return False
    return bool(a.processor) or bool(set(a.cores) & set(b.cores))


def _sharing(facts: Sequence[Facts]) -> float:
    """Ranks on a processor."""
    shared = processors(facts)
    return median(map(shared.count, shared))


def _overhead(measured: Measured) -> float:
    """Software start of one communication, s. A message takes o + l, a ring all-reduce of a few bytes among n takes
    o + 2 (n - 1) l: two equations for the start o and the latency l of one step."""
    if not measured.latency_s:
        return 0.0
    one, ring = max(measured.latency_s.values()), measured.small_all_reduce_s
    steps = 2 * (len(measured.facts) - 1)
    start_s = (steps * one - ring) / (steps - 1)
    return min(max(start_s, 0.0), 0.9 * min(measured.latency_s.values()))


def _devices(measured: Measured) -> tuple[Device, ...]:
    facts = measured.facts
    names, shared, number = place_names(facts), processors(facts), Counter[str]()
    users = Counter(shared)
    on_machine = Counter(fact.machine for fact in facts if fact.kind == "cpu")
    devices = []
    for rank, fact in enumerate(facts):
        compute = _alike(measured, rank)
        place = names[fact.place]
        devices.append(
            Device(
                name=f"{place}/{fact.kind}{number[fact.place]}",
                kind="cuda" if fact.kind == "cuda" else "cpu",
                host=place,
                model=fact.model,
                flops=compute.flops,
                # The measured copy streams; the file gives the peak of which streaming reaches a known share.
                memory_bandwidth=compute.copy_bandwidth / USUAL.memory,
                memory_bytes=fact.memory_bytes // (on_machine[fact.machine] if fact.kind == "cpu" else 1),
                memory_fraction=GPU_MEMORY if fact.kind == "cuda" else 1.0,
                processor=f"processor{shared[rank]}" if users[shared[rank]] > 1 else None,
                overhead_s=compute.overhead_s,
            )
        )
        number[fact.place] += 1
    return tuple(devices)


def _alike(measured: Measured, rank: int) -> Compute:
    """What a device computes: the best of all devices of its model, unless it is really slower than those."""
    own, fact = measured.compute[rank], measured.facts[rank]
    alike = [
        compute
        for compute, other in zip(measured.compute, measured.facts, strict=True)
        if (other.kind, other.model, other.threads) == (fact.kind, fact.model, fact.threads)
        and compute.flops["float32"] < SLOWED * own.flops["float32"]
        and compute.copy_bandwidth < SLOWED * own.copy_bandwidth
    ]
    return Compute(
        {dtype: max(c.flops.get(dtype, 0.0) for c in alike) for dtype in own.flops},
        max(c.copy_bandwidth for c in alike),
        min(c.overhead_s for c in alike),
    )


def _wiring(measured: Measured, names: Sequence[str], overhead: float) -> tuple[tuple[str, ...], tuple[Link, ...]]:
    facts, readable = measured.facts, place_names(measured.facts)
    places: dict[str, list[int]] = {}
    for rank, fact in enumerate(facts):
        places.setdefault(fact.place, []).append(rank)
    across = {pair: b for pair, b in measured.bandwidth.items() if facts[pair[0]].place != facts[pair[1]].place}
    switches = ["switch"] if len(places) > 1 else []
    links: list[Link] = []
    for place, ranks in places.items():
        outside = {pair: b for pair, b in across.items() if set(pair) & set(ranks)}
        latency = _hop(measured, outside, overhead)
        if len(ranks) > 1:
            inside = {pair: b for pair, b in measured.bandwidth.items() if set(pair) <= set(ranks)}
            bus = f"{readable[place]}/bus"
            inner = _inside(measured, inside, [names[r] for r in ranks], names, bus, overhead)
            links += inner
            switches += [bus] if any(bus in (link.a, link.b) for link in inner) else []
        one = _speed(outside.values(), across.values())
        if len(places) > 1 and len(ranks) == 1:
            links.append(Link(a=names[ranks[0]], b="switch", bandwidth=one, latency_s=latency))
        elif len(places) > 1:
            nic = f"{readable[place]}/nic"
            switches.append(nic)
            links += [Link(a=names[r], b=nic, bandwidth=one, latency_s=latency / 2) for r in ranks]
            shared = max(one, measured.together.get(place, 0.0))
            links.append(Link(a=nic, b="switch", bandwidth=shared, latency_s=latency / 2))
    return tuple(switches), tuple(links)


def _inside(
    measured: Measured,
    pairs: Mapping[Pair, float],
    ends: Sequence[str],
    names: Sequence[str],
    bus: str,
    overhead: float,
) -> list[Link]:
    """A bus that all ranks of a place hang on; or, where some pairs are much nearer than others, a wire for each."""
    if max(pairs.values()) > UNEVEN * min(pairs.values()):
        return [
            Link(a=names[i], b=names[j], bandwidth=b, latency_s=max(0.0, measured.latency_s[i, j] - overhead))
            for (i, j), b in sorted(pairs.items())
        ]
    latency, bandwidth = _hop(measured, pairs, overhead), median(pairs.values())
    return [Link(a=end, b=bus, bandwidth=bandwidth, latency_s=latency) for end in ends]


def _speed(own: Collection[float], everyone: Collection[float]) -> float:
    """B/s of a place's link from its pairs. A pair is as fast as the slower of its ends, so the fastest pair of a place
    shows the place's own speed. Differences of a few hundredths between all pairs are taken for noise."""
    if not own or max(everyone) < ALIKE * min(everyone):
        return median(everyone) if everyone else 0.0
    return max(own)


def _hop(measured: Measured, pairs: Mapping[Pair, float], overhead: float) -> float:
    """Half of what a message between these pairs takes beyond its software start, s: there are two hops."""
    return max(0.0, median(measured.latency_s[pair] for pair in pairs) - overhead) / 2 if pairs else 0.0


def _cpu_s_per_byte(form: str, ranks: int, time: FormTime, sharing: float) -> float:
    """Computing time that each byte takes which a rank sends or receives, s. Ranks that share a processor are late by
    what all of them lose."""
    moves = messages(form, ranks, time.nbytes)
    # An all-reduce goes round a ring twice, n - 1 steps each, with an nth of the bytes.
    moved = 4 * (ranks - 1) / ranks * time.nbytes if form == "all_reduce" else 2 * sum(n for _, _, n in moves) / ranks
    return (time.lost_s / sharing + time.copying_s) / moved


def _pack_s_per_byte(forms: Mapping[str, FormTime], sharing: float) -> float:
    """Time until what a rank adds to an all-reduce is put together, for each byte of it, s. Those that share a
    processor do it at the same time."""
    time = forms.get("all_reduce")
    return 0.0 if time is None else sharing * time.packing_s / time.nbytes


def _factor(ideal: Topology, form: str, time: FormTime) -> float:
    """Measured time over ideal, of the part that grows with the bytes."""
    ranks, pricing = range(len(ideal.devices)), Pricing(ideal)
    moves = messages(form, len(ranks), time.nbytes)
    if pricing.by_group(form):
        nbytes = time.nbytes if form == "all_reduce" else sum(n for _, _, n in moves)
        cost = pricing.collective(form, ranks, nbytes)
    else:
        cost = pricing.transfer(form, moves)
    moving = max(seconds for _, seconds in cost.links)
    return max(0.1, (time.seconds - (cost.duration_s - moving)) / moving)
