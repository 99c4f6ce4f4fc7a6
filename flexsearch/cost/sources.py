"""Which sources the costs of a plan rest on: of computing by what is computed on which device, of communication by
where the links lie. How far off they may be say the file of the topology, and the residuals of a profile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Final

from flexsearch.cost.compute import Costs
from flexsearch.cost.efficiency import start_seconds, traffic_of, work_of
from flexsearch.cost.profile import Profile
from flexsearch.cost.uncertainty import ERRORS, TYPICAL, Source
from flexsearch.graph.ops import kind_of
from flexsearch.topology import Device, Figure, SourceKind, Topology
from flexsearch.topology.kernels import HALF, Traffic

WORK: Final = {
    "matrix": "matrix products", "convolution": "convolutions", "attention": "attention", "update": "updates",
    "other": "other operators",
}  # fmt: skip
"""Kinds of work in words."""
ACCESS: Final[Mapping[Traffic, str]] = {
    "copy": "copies", "lookup": "lookups", "loss": "losses", "normalisation": "normalisation",
    "windows": "pooling",
}  # fmt: skip
"""Ways of reading and writing memory in words."""
LAUNCHING_ERROR: Final = 0.45
"""Relative standard error of what launching takes a host that was not measured: three virtual machines with the same
GPU launched the steps of small models in 11, 19 and 31 ms (docs/accuracy.md, Codes)."""
WORST: tuple[SourceKind, ...] = ("guessed", "published", "measured")


class Sources:
    """Sources of the costs of a graph on a topology. ``network``: of all devices, where ``costs`` are of a part."""

    def __init__(self, costs: Costs, network: Topology) -> None:
        self.costs, self.network = costs, network
        self._learned = None if costs.profile is None else costs.profile.learned
        self.of_work = cache(self._of_work)

    def computing(self, operator: int, extents: Mapping[str, int], kind: int) -> Source:
        """Of a piece of these extents on a kind of device, without launching it."""
        device, profile = self.costs.basis(kind)
        op = self.costs.graph.operators[operator]
        if op.kind == "given":
            return self._source("given times", "measured")
        if profile is None or not profile.entries:
            what = kind_of(op)
            work = "attention" if what.fused_attention else "matrix" if what.contraction or what.matrix else "other"
            work = "convolution" if work == "matrix" and what.windows else work
            return self.of_work(work, kind, self.costs.dtype(operator), traffic_of(what))
        if self.costs.is_measured(operator, extents, kind):
            return self._source(f"{op.kind} on {device.model}", "measured")
        return self._filled(op.kind, device, profile)

    def update(self, kind: int) -> Source:
        """Of updates of weights on a kind of device."""
        device, profile = self.costs.basis(kind)
        if profile is not None and profile.updates:
            return self._source(f"updates on {device.model}", "measured")
        return self.of_work("update", kind, "float32", "update")

    def launching(self, kind: int) -> Source:
        """Of the time that a host takes to launch operators."""
        device, profile = self.costs.basis(kind)
        name = f"launches on {device.model}"
        if device.launch_s > 0.0 and profile is not None and profile.figures is not None:
            return self._source(name, "measured")
        source = self._source(name, self._kind("devices.overhead_s", learned="task_s"))
        return source if source.kind == "measured" or device.launch_s == 0.0 else replace(source, error=LAUNCHING_ERROR)

    def launch_s(self, operator: int, kind: int) -> float:
        """What of an estimated time on the device is launching, s; measured times hold it, and nobody can tell how much
        it is."""
        device, profile = self.costs.basis(kind)
        if profile is not None and profile.entries:
            return 0.0
        op = self.costs.graph.operators[operator]
        return float(start_seconds(device, device.efficiency_for(self.costs.dtype(operator)), 1.0, op.kind))

    def start(self, operator: int, kind: int) -> Source:
        """Of that start: on a CPU of launching, on a GPU of how fast its kernels follow each other."""
        device, _ = self.costs.basis(kind)
        if device.launch_s == 0.0:
            return self.launching(kind)
        half = self.costs.dtype(operator) in HALF
        figure: Figure = "devices.efficiency" if half else "devices.efficiency_full"
        own = (device.efficiency if half else device.efficiency_full) is not None
        said = self._kind(figure, learned="task_s", shares="measured" if own else "guessed")
        return self._source(f"starts of kernels on {device.model}", said)

    def links(self) -> dict[int, Source]:
        """By resource of the network that is a link or a way to storage: what its bandwidth rests on."""
        kind = self._kind("links.bandwidth", "communication.factors", learned="time")
        inside, between = (self._source(f"links {where} hosts", kind) for where in ("inside", "between"))
        host_of = {device.name: device.host for device in self.network.devices}
        hosts = {name: {host} for name, host in host_of.items()}
        for link in self.network.links:
            for switch, device in ((link.a, link.b), (link.b, link.a)):
                if switch not in host_of and device in host_of:
                    hosts.setdefault(switch, set()).add(host_of[device])
        source_of = {}
        for link in self.network.links:
            one, two = (hosts.get(end, set()) for end in (link.a, link.b))
            source = inside if one == two and len(one) == 1 else between
            for a, b in ((link.a, link.b), (link.b, link.a)):
                source_of[self.network.resource_between(a, b)] = source
        ways = (r for r, resource in enumerate(self.network.resources) if resource.kind == "storage")
        source_of.update(dict.fromkeys(ways, self._source("storage", "guessed")))
        return source_of

    def starting(self) -> Source:
        """Of what communications take to start, latencies of links included."""
        figures: tuple[Figure, ...] = ("links.latency_s", "communication.overhead_s")
        return self._source("start of communication", self._kind(*figures, learned="start_s"))

    def code(self) -> Source | None:
        """Of a step as a whole, where its figures are of a code that need not be the one at hand: none of what a
        profile says was measured with that."""
        code, profile = self.network.code, self.costs.profile
        if code is None or not code.standard_error:
            return None
        own = profile is not None and (bool(profile.entries) or profile.figures is not None)
        if own or (self._learned is not None and self._learned.corrects("compute", self.network.name)):
            return None
        return Source(f"{code.kind} code of others", "published", code.standard_error)

    def _of_work(self, work: str, kind: int, dtype: str, traffic: Traffic | None) -> Source:
        """``work``: of ``WORK``; of updates and other operators the bandwidth of the memory decides."""
        device, _ = self.costs.basis(kind)
        name = f"{WORK[work]} on {device.model}"
        figures: list[Figure] = ["devices.efficiency" if dtype in HALF else "devices.efficiency_full"]
        if traffic in device.efficiency_for(dtype).traffic:
            figures = ["devices.traffic"]
        elif work == "other" and traffic is not None:  # no figure says it, and it is taken as streaming
            figures.append("devices.traffic")
            name = f"{ACCESS[traffic]} on {device.model}"
        elif work == "convolution" and dtype in HALF:
            figures.append("devices.convolution")
        if (device.efficiency if dtype in HALF else device.efficiency_full) is not None:
            return self._source(name, self._kind(*figures, learned="compute"))
        # A peak may be published, but what kernels reach of it is not.
        peak: Figure = "devices.memory_bandwidth" if work in ("update", "other") else "devices.flops"
        return self._source(name, self._kind(peak, learned="compute", shares="guessed"))

    def _filled(self, kind: str, device: Device, profile: Profile) -> Source:
        """Of a piece that the profile lacks: by the residuals of what it is filled with, entries of the same kind, or
        else the device's figures."""
        name = f"{kind}, of other sizes, on {device.model}"
        fits = {} if profile.figures is None else profile.figures.fits
        residual = profile.residuals.get(kind) or fits.get(f"float32 {work_of(kind)}")
        if residual is None:
            return self._source(name, "guessed")
        return Source(name, "measured", max(ERRORS["measured"], residual.median / TYPICAL))

    def _kind(self, *figures: Figure, learned: str, shares: SourceKind = "measured") -> SourceKind:
        """The least certain of the figures; what whole steps have taught is measured."""
        if self._learned is not None and self._learned.corrects(learned, self.network.name):
            return "measured"
        kinds = [shares, *map(self.network.source_kind, figures)]
        return next(kind for kind in WORST if kind in kinds)

    def _source(self, name: str, kind: SourceKind) -> Source:
        """Errors of measured figures are those of steps that were measured, where there are some."""
        error = ERRORS[kind]
        if kind == "measured" and self._learned is not None and self._learned.error is not None:
            error = max(self._learned.error / TYPICAL, ERRORS["measured"] / 4)
        return Source(name, kind, error)
