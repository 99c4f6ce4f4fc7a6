"""The compact form of a topology file: one node described once, repeated ``count`` times around shared switches.

    "nodes": {
      "count": 4, "name": "node",
      "devices": [{"name": "gpu{0..3}", "kind": "cuda", ...}],
      "switches": ["nic"],
      "links": [{"a": "gpu{0..3}", "b": "gpu{0..3}", ...}, {"a": "gpu{0..3}", "b": "nic", ...},
                {"a": "nic", "b": "ib", ...}]
    },
    "switches": ["ib"]

Names inside ``nodes`` are local and become ``node0/gpu1``; a link's end may also be a shared switch. The links outside
join shared switches, or nodes by full names. A range ``gpu{0..3}`` stands for four names. A link between ranges of one
length joins them one to one, a range and a single name make a star, a range and itself joins every pair.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import combinations
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, Strict, field_validator

from flexsearch.errors import TopologyError
from flexsearch.files import FileModel
from flexsearch.quantities import MAX_DEVICES, MAX_LINKS, Text
from flexsearch.topology.codes import Code
from flexsearch.topology.parts import Communication, Device, Link, Name
from flexsearch.topology.sources import Sources
from flexsearch.topology.storage import Storage

_RANGE = re.compile(r"([^{}\s]*)\{(\d{1,5})\.\.(\d{1,5})\}([^{}\s]*)")


def names(pattern: str) -> list[str]:
    """The names that ``pattern`` stands for. ValueError if it is neither a plain name nor one with one range."""
    match = _RANGE.fullmatch(pattern)
    if match is None:
        if not pattern or any(c in "{}" or c.isspace() for c in pattern):
            raise ValueError(f'"{pattern}" is neither a name like "gpu0" nor a range of names like "gpu{{0..3}}"')
        return [pattern]
    before, first, last, after = match.groups()
    if int(first) > int(last):
        raise ValueError(f'the range in "{pattern}" runs backwards; write the smaller number first')
    if int(last) - int(first) >= MAX_DEVICES:
        raise ValueError(f'the range in "{pattern}" stands for more than {MAX_DEVICES} names')
    return [f"{before}{k}{after}" for k in range(int(first), int(last) + 1)]


def _pattern(value: str) -> str:
    names(value)
    return value


Pattern = Annotated[str, AfterValidator(_pattern)]


class NodeDevice(Device):
    """A device of every node; its host is the node."""

    name: Pattern
    host: Name = "node"
    processor: Pattern | None = None

    @field_validator("host")
    @classmethod
    def _no_host(cls, host: str) -> str:
        raise ValueError('leave it out: inside "nodes" the host is the node')


class NodeLink(Link):
    """A link of every node, or of a shared switch with another."""

    a: Pattern
    b: Pattern

    @property
    def count(self) -> int:
        """Number of pairs that this link joins, at most."""
        a, b = len(names(self.a)), len(names(self.b))
        return a * (a - 1) // 2 if self.a == self.b else max(a, b)

    def pairs(self, where: str) -> Iterator[tuple[str, str]]:
        """The pairs of names that this link joins."""
        ends_a, ends_b = names(self.a), names(self.b)
        if self.a == self.b:
            return combinations(ends_a, 2)
        if len(ends_a) == len(ends_b):
            return iter(zip(ends_a, ends_b, strict=True))
        if 1 not in (len(ends_a), len(ends_b)):
            raise TopologyError(
                f'{where}: "{self.a}" are {len(ends_a)} names and "{self.b}" are {len(ends_b)}; '
                f"give ranges of one length, or a range and a single name"
            )
        return ((a, b) for a in ends_a for b in ends_b)


class Nodes(FileModel):
    """The node that is repeated."""

    count: int = Field(ge=1, le=MAX_DEVICES)
    name: Name = "node"
    devices: Annotated[tuple[NodeDevice, ...], Field(min_length=1, max_length=MAX_DEVICES)]
    switches: Annotated[tuple[Pattern, ...], Field(max_length=MAX_DEVICES)] = ()
    links: Annotated[tuple[NodeLink, ...], Field(max_length=MAX_LINKS)] = ()


class Template(FileModel):
    """A topology file in the compact form."""

    format: Literal["flexsearch.topology/1"] = "flexsearch.topology/1"
    name: Text
    source: Text | None = None
    sources: Annotated[tuple[Sources, ...], Strict(False)] = ()
    code: Code | None = None
    nodes: Nodes
    switches: Annotated[tuple[Pattern, ...], Field(max_length=MAX_DEVICES)] = ()
    links: Annotated[tuple[NodeLink, ...], Field(max_length=MAX_LINKS)] = ()
    communication: Communication
    storage: Storage | None = None

    def expand(self, count: int | None = None) -> dict[str, Any]:
        """Fields of the explicit Topology with ``count`` nodes (default: the file's). TopologyError on bad links."""
        nodes, count = self.nodes, self.nodes.count if count is None else count
        self._check_total(count)
        shared = [name for pattern in self.switches for name in names(pattern)]
        local = [name for pattern in nodes.switches for name in names(pattern)]
        node_names = [f"{nodes.name}{k}" for k in range(count)]
        inside = {*local, *(n for d in nodes.devices for n in names(d.name))}
        joins = self._node_joins(inside, set(shared))
        return {
            "name": self.name if count == nodes.count else f"{self.name}:{count}",
            "devices": tuple(device for node in node_names for device in self._devices_of(node)),
            "switches": (*shared, *(f"{node}/{name}" for node in node_names for name in local)),
            "links": tuple(
                _link(link, *(f"{node}/{end}" if is_local else end for end, is_local in ends))
                for node in node_names
                for link, *ends in joins
            )
            + tuple(self._outer_links({*shared, *(f"{node}/{name}" for node in node_names for name in inside)})),
            "communication": self.communication,
            "storage": self.storage,
            "source": self.source,
            "sources": self.sources,
            "code": self.code,
        }

    def _check_total(self, count: int) -> None:
        """Raise TopologyError before anything too large is made."""
        within = sum(len(names(device.name)) for device in self.nodes.devices)
        if count * within > MAX_DEVICES:
            raise TopologyError(
                f"nodes: {count:,} nodes of {within} devices are {count * within:,} devices; "
                f"plans are made for at most {MAX_DEVICES:,}",
                f"Ask for at most {MAX_DEVICES // within} nodes." if within <= MAX_DEVICES else "",
            )
        switches = count * sum(len(names(pattern)) for pattern in self.nodes.switches)
        joins = sum(link.count for link in self.links) + count * sum(link.count for link in self.nodes.links)
        if switches > MAX_LINKS or joins > MAX_LINKS:
            raise TopologyError(
                f"nodes: {switches:,} switches and {joins:,} links in {count:,} nodes; at most {MAX_LINKS:,} may be"
            )

    def _devices_of(self, node: str) -> Iterator[Device]:
        for k, device in enumerate(self.nodes.devices):
            devices = names(device.name)
            processors = names(device.processor) if device.processor is not None else []
            if len(processors) == 1:
                processors *= len(devices)
            if processors and len(processors) != len(devices):
                raise TopologyError(
                    f'nodes.devices.{k}.processor: "{device.processor}" are {len(processors)} names for {len(devices)} '
                    f'devices "{device.name}"; give one for all, or one for each'
                )
            figures = {field: getattr(device, field) for field in Device.model_fields}
            for i, name in enumerate(devices):
                processor = f"{node}/{processors[i]}" if processors else None
                yield Device(**figures | {"name": f"{node}/{name}", "host": node, "processor": processor})

    def _outer_links(self, ends: set[str]) -> Iterator[Link]:
        """The links outside the nodes; their ends are names of the expanded topology."""
        for k, link in enumerate(self.links):
            for a, b in link.pairs(f"links.{k}"):
                for field, end in (("a", a), ("b", b)):
                    if end not in ends:
                        raise TopologyError(
                            f'links.{k}.{field}: "{end}" is neither a shared switch nor a name like '
                            f'"{self.nodes.name}0/..." inside a node; declare it in "switches"'
                        )
                yield _link(link, a, b)

    def _node_joins(
        self, local: set[str], shared: set[str]
    ) -> list[tuple[NodeLink, tuple[str, bool], tuple[str, bool]]]:
        """A node's links, each end with whether it is the node's own."""
        joins = []
        for k, link in enumerate(self.nodes.links):
            where = f"nodes.links.{k}"
            for a, b in link.pairs(where):
                for end in (a, b):
                    if (end in local) == (end in shared):
                        which = "both a name inside the node and" if end in local else "no name inside the node, nor"
                        raise TopologyError(f'{where}: "{end}" is {which} a shared switch; rename or declare it')
                if a in shared and b in shared:
                    raise TopologyError(f'{where}: "{a}" and "{b}" are shared by all nodes; move it to "links" outside')
                joins.append((link, (a, a in local), (b, b in local)))
        return joins


def _link(template: NodeLink, a: str, b: str) -> Link:
    return Link(a=a, b=b, bandwidth=template.bandwidth, latency_s=template.latency_s, duplex=template.duplex)
