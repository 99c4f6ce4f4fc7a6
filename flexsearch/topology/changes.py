"""The same cluster with other figures: links, memory, devices."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Final, Literal, TypeVar

from pydantic import ValidationError

from flexsearch.errors import TopologyError
from flexsearch.files import describe
from flexsearch.topology.codes import Code, CodeChange, CodeKind, code_change
from flexsearch.topology.kernels import USUAL
from flexsearch.topology.parts import TF32, Communication, Device, Link
from flexsearch.topology.topology import Topology, presets

FIGURES: Final = (
    "kind", "model", "flops", "memory_bandwidth", "memory_bytes", "memory_fraction", "overhead_s", "efficiency",
    "efficiency_full", "launches",
)  # fmt: skip
"""Fields of a device that say what it is, not where."""


def edited(topology: Topology, **fields: object) -> Topology:
    """The topology with other fields, checked. What it has derived from its own is not taken over. Raises
    TopologyError."""
    return _edited(topology, fields)


def with_links(topology: Topology, factor: float, resources: Collection[int] | None = None) -> Topology:
    """Links with ``factor`` times the bandwidth: those that some resources (directions of links) belong to, or all.
    Raises TopologyError for bandwidths that no link has."""
    names = {topology.resources[r].name for r in resources} if resources is not None else None

    def chosen(a: str, b: str) -> bool:
        return names is None or not names.isdisjoint((f"{a}->{b}", f"{a}<->{b}"))

    links = (
        _edited(link, {"bandwidth": link.bandwidth * factor}) if chosen(link.a, link.b) else link
        for link in topology.links
    )
    return edited(topology, links=tuple(links))


def with_memory(topology: Topology, *, factor: float = 1.0, nbytes: int | None = None) -> Topology:
    """Devices with ``factor`` times their memory, or all with ``nbytes``. Raises TopologyError for memories that no
    device has."""
    return _devices(
        topology, lambda device: {"memory_bytes": int(device.memory_bytes * factor) if nbytes is None else nbytes}
    )


def with_speed(topology: Topology, factor: float) -> Topology:
    """Devices that compute, and move bytes in their memory, ``factor`` times as fast. Raises TopologyError for speeds
    that no device has."""

    def faster(device: Device) -> dict[str, object]:
        rates = {dtype: rate * factor for dtype, rate in device.flops.items()}
        return {"flops": rates, "memory_bandwidth": device.memory_bandwidth * factor}

    return _devices(topology, faster)


def with_device(topology: Topology, kind: Device, backend: Literal["gloo", "nccl"] | None = None) -> Topology:
    """Devices with the figures of another one, at the same places. ``backend``: another communication library, by its
    own figures; None: the cluster's. Raises TopologyError if that cannot reach such devices."""
    figures = {field: getattr(kind, field) for field in FIGURES}
    devices = tuple(_edited(device, figures) for device in topology.devices)
    library = topology.communication if backend is None else Communication(backend=backend)
    return edited(topology, devices=devices, communication=library)


def captured(topology: Topology) -> Topology:
    """GPUs whose steps are captured as graphs: their hosts launch nothing. Raises TopologyError where no
    host has launches of its own, as on CPUs, where they are a part of each operator's time."""
    if not any(device.launch_s > 0.0 for device in topology.devices):
        raise TopologyError(
            f"no host of {topology.name} takes time to launch operators, so that captured steps change nothing",
            "Captured graphs are for GPUs whose overhead_s is above 0.",
        )
    return _devices(topology, lambda device: {"overhead_s": 0.0} if device.launch_s > 0.0 else {})


def padded(topology: Topology) -> Topology:
    """Devices whose products all reach what those of multiples of 8 do, as if models were padded; itself if they do
    anyway."""

    def change(device: Device) -> dict[str, object]:
        reached = device.efficiency
        return {} if reached is None else {"efficiency": reached.model_copy(update={"unaligned": USUAL.unaligned})}

    slow = any(d.efficiency is not None and d.efficiency.unaligned != USUAL.unaligned for d in topology.devices)
    return _devices(topology, change) if slow else topology


def with_tf32(topology: Topology) -> Topology:
    """Devices that compute float32 matrix products in TF32: their times; ranks compute as the flag of PyTorch says.
    Raises TopologyError where a device has no such rate."""
    for device in topology.devices:
        if TF32 not in device.flops:
            raise TopologyError(
                f"topology {topology.name} gives {device.model} no TF32 rate",
                'GPUs have it since Ampere: add "tf32" to "flops" of the device, or leave the precision as it is.',
            )
    return _devices(topology, lambda device: {"tf32": True})


def with_code(topology: Topology, kind: CodeKind) -> Topology:
    """The cluster with figures of another training code. Raises TopologyError where its own are not known to be of
    fused kernels, from which those of others follow, or where no host launches."""
    own = topology.code
    if own is not None and own.kind == kind:
        return topology
    if kind == "captured" and (own is None or own.kind != "fused"):
        return edited(captured(topology), code=None if own is None else own.model_copy(update={"kind": kind}))
    if own is None or own.kind != "fused":
        what = "does not say which code its figures are of" if own is None else f"has the figures of {own.kind} code"
        raise TopologyError(
            f"topology {topology.name} {what}, so nothing says what {kind} code takes there",
            'Give a cluster whose file has "code" of the kind "fused", as the presets with GPUs have it.',
        )
    change = code_change(kind)
    changed = _devices(topology, lambda device: _chains(device, change))
    code = Code(kind=kind, describes=change.describes)
    return edited(captured(changed) if kind == "captured" else changed, code=code)


def _chains(device: Device, change: CodeChange) -> dict[str, object]:
    """Figures of a device whose fused kernels are the chains of a code."""
    launches = device.launched
    halves = {"efficiency": change.passes_half, "efficiency_full": change.passes_full}
    figures: dict[str, object] = {}
    for name, passes in halves.items():
        reached = getattr(device, name) or USUAL
        start_s = reached.overhead_s if change.start_s is None else min(reached.overhead_s, change.start_s)
        unaligned = USUAL.unaligned if change.pads else reached.unaligned
        more = {"passes": passes, "overhead_s": start_s, "unaligned": unaligned}
        figures[name] = reached.model_copy(update=more)
    if device.launch_s > 0.0:
        figures["overhead_s"] = max(device.overhead_s, change.launch_s)
    counts = {"kernels": launches.kernels | change.kernels, "casts": change.casts}
    return figures | {"launches": launches.model_copy(update=counts)}


def device_named(name: str) -> Device:
    """The device of a preset or topology file, or of this model in any preset ("H100-SXM5-80GB"). Raises TopologyError
    if there is none, or if a file has several kinds."""
    every = {device.model: device for preset in presets() for device in Topology.load(preset).devices}
    if name in every:
        return every[name]
    try:
        devices = Topology.load(name).devices
    except TopologyError as error:
        raise TopologyError(
            f'"{name}" is neither a device nor a cluster',
            f"Give a model ({', '.join(sorted(every))}), a topology file or a preset ({', '.join(presets())}), or a "
            "speed such as 1.5x.",
        ) from error
    if len({tuple(str(getattr(device, field)) for field in FIGURES) for device in devices}) > 1:
        raise TopologyError(f"topology {name} has several kinds of devices", "Give one whose devices are all alike.")
    return devices[0]


def _devices(topology: Topology, change: Callable[[Device], dict[str, object]]) -> Topology:
    return edited(topology, devices=tuple(_edited(device, change(device)) for device in topology.devices))


M = TypeVar("M", Device, Link, Topology)


def _edited(part: M, fields: dict[str, object]) -> M:
    """With other fields, checked: ``model_copy`` checks nothing, and keeps what was derived."""
    values: dict[str, Any] = {name: getattr(part, name) for name in type(part).model_fields}
    try:
        return type(part)(**values | fields)
    except ValidationError as error:
        raise TopologyError(f"no such cluster can be: {describe(error.errors(include_url=False)[0])}") from error
