"""A topology: its file, its checks, and what lowering and simulation ask of it (resources, routes)."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import Field, Strict, model_validator

from flexsearch import files
from flexsearch.errors import FileFormatError, TopologyError
from flexsearch.quantities import MAX_DEVICES, MAX_LINKS, Text
from flexsearch.topology.codes import Code
from flexsearch.topology.kernels import USUAL
from flexsearch.topology.parts import TF32, Communication, Device, Link, Name, Resource, Route
from flexsearch.topology.routes import Routes, RouteTable, decisive, separated, wiring
from flexsearch.topology.sources import Figure, SourceKind, Sources, said_twice
from flexsearch.topology.storage import Storage
from flexsearch.topology.template import Template


class Topology(files.FileModel):
    """Devices and the links between them. Device and resource indices follow the order of the file.

    Raises TopologyError if the parts contradict each other (names, endpoints, processors, missing routes).
    """

    format: Literal["flexsearch.topology/1"] = "flexsearch.topology/1"
    name: Text
    devices: Annotated[tuple[Device, ...], Field(max_length=MAX_DEVICES)]
    switches: Annotated[tuple[Name, ...], Field(max_length=MAX_LINKS)] = ()
    links: Annotated[tuple[Link, ...], Field(max_length=MAX_LINKS)] = ()
    communication: Communication
    storage: Storage | None = None  # from where batches are read; None: reading takes no time
    source: Text | None = None  # what the cluster is
    sources: Annotated[tuple[Sources, ...], Strict(False)] = ()  # where its figures come from; the others: guessed
    code: Code | None = None  # which training code they describe; None: the one at hand

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not self.devices:
            raise TopologyError("devices: empty", "A topology needs at least one device.")
        self._check_names()
        self._check_links()
        if (figure := said_twice(self.sources)) is not None:
            raise TopologyError(f'sources: "{figure}" is named twice', "Leave it in one of the records.")
        if (pair := separated(self._graph, [d.name for d in self.devices])) is not None:
            raise TopologyError(f'links: no route between devices "{pair[0]}" and "{pair[1]}"', "Add the missing link.")
        if self.communication.backend == "nccl" and (cpus := [d.name for d in self.devices if d.kind == "cpu"]):
            raise TopologyError(f'communication.backend: nccl cannot reach the cpu device "{cpus[0]}"; use gloo')
        return self

    def _check_names(self) -> None:
        seen: dict[str, str] = {}
        fields = [(f"devices.{k}.name", d.name) for k, d in enumerate(self.devices)]
        for field, name in fields + [(f"switches.{k}", s) for k, s in enumerate(self.switches)]:
            if name in seen:
                raise TopologyError(f'{field}: "{name}" is already the name in {seen[name]}; names must be unique')
            seen[name] = field

    def _check_links(self) -> None:
        ends = {d.name for d in self.devices} | set(self.switches)
        seen: dict[frozenset[str], int] = {}
        for k, link in enumerate(self.links):
            for field, end in (("a", link.a), ("b", link.b)):
                if end not in ends:
                    raise TopologyError(f'links.{k}.{field}: no device or switch is called "{end}"{_hint(end, ends)}')
            if link.a == link.b:
                raise TopologyError(f'links.{k}: joins "{link.a}" with itself; remove it')
            if (other := seen.setdefault(frozenset((link.a, link.b)), k)) != k:
                raise TopologyError(
                    f'links.{k}: joins "{link.a}" and "{link.b}" again, as links.{other} does; '
                    f"give one link with the sum of their bandwidths"
                )

    def source_kind(self, figure: Figure) -> SourceKind:
        """Whether a figure ("devices.efficiency") was measured, published or guessed; what no record names is
        guessed."""
        return next((record.kind for record in self.sources if figure in record.figures), "guessed")

    @cached_property
    def hosts(self) -> tuple[str, ...]:
        """Host names in the order of their first device."""
        return tuple(dict.fromkeys(d.host for d in self.devices))

    @cached_property
    def host_size(self) -> int:
        """Devices of a host, where there are several hosts, each with equally many (2 or more) consecutive ones; else
        0."""
        host = [d.host for d in self.devices]
        size, rest = divmod(len(host), len(self.hosts))
        regular = rest == 0 and all(host[k] == host[k - k % size] for k in range(len(host)))
        return size if regular and 1 < size < len(host) else 0

    @cached_property
    def resources(self) -> tuple[Resource, ...]:
        """What tasks compete for: one per processor, then one per link direction (one in all for half duplex)."""
        processors: dict[str, float] = {}
        for device in self.devices:
            name = _processor(device)
            processors[name] = max(device.memory_bandwidth, processors.get(name, 0.0))
        wires = {name: link.bandwidth for link in self.links for name in _directions(link)}
        return (
            *(Resource("processor", name, bandwidth) for name, bandwidth in processors.items()),
            *(Resource("link", name, bandwidth) for name, bandwidth in wires.items()),
            *self._ways_to_storage(),
        )

    def _ways_to_storage(self) -> Iterator[Resource]:
        """One for each host, and the server that they share."""
        if (storage := self.storage) is not None:
            for host in self.hosts:
                yield Resource("storage", f"storage of {host}", storage.bandwidth)
            if storage.server_bandwidth is not None:
                yield Resource("storage", "storage server", storage.server_bandwidth)

    @cached_property
    def processor_of(self) -> tuple[int, ...]:
        """Device index -> index of its processor among ``resources``."""
        index = {r.name: k for k, r in enumerate(self.resources) if r.kind == "processor"}
        return tuple(index[_processor(device)] for device in self.devices)

    @property
    def shares_processors(self) -> bool:
        """Whether some devices are on the same processor."""
        return len(set(self.processor_of)) < len(self.devices)

    @cached_property
    def links_of_processors(self) -> dict[int, tuple[int, ...]]:
        """Processor -> links that its devices hang on, each direction; indices into ``resources``."""
        links_of: dict[int, set[int]] = {}
        processor = {device.name: p for device, p in zip(self.devices, self.processor_of, strict=True)}
        for (a, b), (link, _) in self._hops.items():
            for end in (a, b):
                if end in processor:
                    links_of.setdefault(processor[end], set()).add(link)
        return {p: tuple(sorted(links)) for p, links in links_of.items()}

    def route(self, i: int, j: int) -> Route:
        """The way from device ``i`` to device ``j``: the fastest for a message of 1 MB, never through a third device
        where another way exists. TopologyError if there is no such device."""
        for index in (i, j):
            self._check_index(index)
        table, pieces = self.routes, self._routes.pieces(i, j)
        spans = [slice(int(table.first[p]), int(table.first[p + 1])) for p in pieces]
        return Route(
            resources=tuple(r for span in spans for r in table.resource[span].tolist()),
            latency_s=float(table.latency[pieces[0]] + table.latency[pieces[1]]),
            bandwidth=min(float(table.bandwidth[p]) for p in pieces),
        )

    @property
    def routes(self) -> RouteTable:
        """All routes, for compiled code."""
        return self._routes.table

    @property
    def ways(self) -> Routes:
        """What the routes are made of."""
        return self._routes

    def link_between(self, a: str, b: str) -> Link | None:
        """The link of two endpoints; None if there is none."""
        return self._hops[a, b][1] if (a, b) in self._hops else None

    def resource_between(self, a: str, b: str) -> int:
        """Index of the resource that carries what goes from ``a`` to ``b``, which a link joins."""
        return self._hops[a, b][0]

    @cached_property
    def decisive(self) -> npt.NDArray[np.bool_]:
        """By resource: whether it can be what a transfer waits for (``routes.decisive``)."""
        return decisive(self._routes.rows(), [resource.bandwidth for resource in self.resources])

    @cached_property
    def nearest_s(self) -> float:
        """The least latency between two devices, s; 0 if there is only one."""
        return self._routes.nearest_s()

    @cached_property
    def host_of(self) -> npt.NDArray[np.uint32]:
        """Device index -> index of its host among ``hosts``."""
        number = {host: k for k, host in enumerate(self.hosts)}
        return np.array([number[d.host] for d in self.devices], np.uint32)

    def subset(self, devices: Sequence[int]) -> Topology:
        """The topology of these device indices, in this order, with the links that lie on routes between them.

        A dropped device that such a route passes through stays as a switch. TopologyError if an index is unknown,
        repeated, or there is none.
        """
        chosen: set[int] = set()
        for index in devices:
            self._check_index(index)
            if index in chosen:
                raise TopologyError(f"device {index} is in the subset twice")
            chosen.add(index)
        kept = tuple(self.devices[i] for i in devices)
        paths = self._routes.paths(sorted(chosen))
        used = {frozenset(pair) for path in paths for pair in pairwise(path)}
        passed = {name for path in paths for name in path} - {d.name for d in kept}
        return Topology(
            name=f"{self.name}[{','.join(map(str, devices)) if len(devices) <= 64 else f'{len(devices)} devices'}]",
            devices=kept,
            switches=tuple(n for n in (*self.switches, *(d.name for d in self.devices)) if n in passed),
            links=tuple(link for link in self.links if frozenset((link.a, link.b)) in used),
            communication=self.communication,
            storage=self.storage,
            source=self.source,
            sources=self.sources,
            code=self.code,
        )

    def with_reading(self, **fields: object) -> Topology:
        """The same cluster whose hosts read other batches: ``fields`` of :class:`Reading`; the others stay. Raises
        TopologyError if it has no storage, or for fields that no reading has."""
        if self.storage is None:
            raise TopologyError(
                f"topology {self.name} has no storage, so reading takes no time there",
                'Add "storage" to its file.',
            )
        values = {name: getattr(self, name) for name in type(self).model_fields}
        return type(self)(**values | {"storage": self.storage.with_reading(fields)})

    def content_hash(self) -> str:
        """Hash of everything that affects a plan, hence without ``name``, what is said of sources, and the memory that
        plans leave free. Fields that came later count where they differ from what every earlier file meant: the hash of
        a file stays."""
        described = self.model_dump(mode="json", exclude={"name", "source", "sources", "code"})
        for field in self.communication.assumed():
            del described["communication"][field]
        for group in described["communication"].get("groups", ()):
            if not group["protocols"]:
                del group["protocols"], group["least_s"]
        if self.storage is None:
            del described["storage"]
        else:  # what is read is no part of the cluster
            del described["storage"]["reading"]
        for device in described["devices"]:
            _leave_out_usual(device)
        return files.content_hash(described)

    def save(self, path: str | Path) -> None:
        """Write the explicit form to ``path``."""
        files.save(self, path)

    @classmethod
    def load(cls, path_or_preset: str | Path) -> Topology:
        """The topology of a file, or a shipped preset.

        ``NAME:N`` and, for presets, ``NAME-N`` give the number of nodes of a file in the compact form ("p100:8",
        "ethernet-1g-64"). Raises FileFormatError for a malformed file, TopologyError for a contradictory one and for
        an unknown name.
        """
        path, count = _find(str(path_or_preset))
        data = files.read_json(path, "topology")
        try:
            return _build(cls, data, f"file {files.printable(str(path))}", count)
        except TopologyError as error:
            raise error.at(f"topology file {files.printable(str(path))}") from error

    @cached_property
    def _graph(self) -> Any:
        return wiring([*(d.name for d in self.devices), *self.switches], self.links)

    @cached_property
    def _routes(self) -> Routes:
        names, hosts = [d.name for d in self.devices], [d.host for d in self.devices]
        return Routes(self._graph, names, self.switches, self.links, self._hops, hosts)

    @cached_property
    def _hops(self) -> dict[tuple[str, str], tuple[int, Link]]:
        """(from, to) of neighbours -> index of the resource that carries this direction, and the link."""
        index = {r.name: k for k, r in enumerate(self.resources) if r.kind == "link"}
        hops: dict[tuple[str, str], tuple[int, Link]] = {}
        for link in self.links:
            there, *back = _directions(link)
            hops[link.a, link.b] = index[there], link
            hops[link.b, link.a] = index[back[0] if back else there], link
        return hops

    def _check_index(self, index: int) -> None:
        if not 0 <= index < len(self.devices):
            raise TopologyError(
                f"topology {self.name} has no device {index}: its {len(self.devices)} devices are numbered from 0"
            )


def presets() -> list[str]:
    """Names of the shipped topologies, sorted (``profiles/`` holds measured costs too)."""
    return [name for name in files.shipped_names("profiles") if _preset(name) is not None]


def _leave_out_usual(device: dict[str, Any]) -> None:
    """Delete the figures of a described device that say what files without them mean, and its memory's fraction, which
    is no property of the device."""
    if not device["tf32"]:
        del device["tf32"]
        device["flops"].pop(TF32, None)
    del device["memory_fraction"]
    for field in ("efficiency", "efficiency_full", "launches"):
        if device[field] is None:
            del device[field]
            continue
        for name in ("other", "traffic", "passes"):
            if device[field].get(name) == getattr(USUAL, name):
                del device[field][name]


def _processor(device: Device) -> str:
    return device.processor if device.processor is not None else device.name


def _directions(link: Link) -> tuple[str, ...]:
    """Names of the resources that a link is."""
    return (f"{link.a}->{link.b}", f"{link.b}->{link.a}") if link.duplex == "full" else (f"{link.a}<->{link.b}",)


def _hint(name: str, candidates: Sequence[str] | set[str] | dict[str, int]) -> str:
    close = get_close_matches(name, sorted(candidates), n=3) if len(candidates) <= MAX_DEVICES else []
    return f"; did you mean {' or '.join(json.dumps(c) for c in close)}?" if close else ""


def _build(cls: type[Topology], data: Any, source: str, count: int | None) -> Topology:
    if not isinstance(data, dict) or "nodes" not in data:
        if count is not None:
            raise TopologyError(f'":{count}" asks for a number of nodes, but the file lists its devices one by one')
        return files.parse(cls, data, source, "topology")
    if "devices" in data:
        raise TopologyError('gives both "nodes" and "devices"; describe the devices in one of them')
    return cls(**files.parse(Template, data, source, "topology").expand(count))


def _find(name: str) -> tuple[Path, int | None]:
    """The file that ``name`` means, and the number of nodes it asks for."""
    if os.path.isfile(name):
        return Path(name), None
    if (path := _preset(name)) is not None:
        return path, None
    if os.path.exists(name):  # a folder or a device: reading it says so
        return Path(name), None
    if match := re.fullmatch(r"(.+)([:-])([0-9]+)", name):
        base, sign, digits = match.groups()
        path = Path(base) if sign == ":" and os.path.isfile(base) else _preset(base)
        if path is not None:
            if len(digits) > 6 or not 1 <= int(digits) <= MAX_DEVICES:
                count = files.printable(digits, 20)
                raise TopologyError(
                    f'topology "{files.printable(name)}": the number of nodes must be from 1 to {MAX_DEVICES:,}, '
                    f"not {count}"
                )
            return path, int(digits)
    preset_names = presets()
    close = get_close_matches(name[:100], preset_names, n=len(preset_names) or 1, cutoff=0.4)
    listed = ", ".join([*close, *(k for k in preset_names if k not in close)])
    what = "file" if name.endswith(".json") or "/" in name else "file or preset"
    raise TopologyError(
        f'no topology {what} "{files.printable(name)}"',
        f'Give the path of a topology file, or a preset, with ":N" for another number of nodes: {listed}.',
    )


def _preset(name: str) -> Path | None:
    path = files.shipped("profiles", name) if re.fullmatch(r"[\w.+-]+", name) else None
    if path is None:
        return None
    try:
        data = files.read_json(path, "topology")
    except FileFormatError:
        return None
    return path if isinstance(data, dict) and data.get("format") == Topology.model_fields["format"].default else None
