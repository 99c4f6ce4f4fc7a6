"""Clusters like one, with another number of hosts, or with some of the devices of one host."""

from __future__ import annotations

import os
import re
from collections import Counter
from functools import cached_property
from typing import Self

from flexsearch.errors import TopologyError
from flexsearch.files import shipped_names
from flexsearch.quantities import MAX_DEVICES
from flexsearch.topology.topology import Topology


class Sizes:
    """Clusters with the hosts of ``whole``. Where the file that it comes from describes one host (presets do), there
    may be any number of them; else as many as it has."""

    def __init__(self, whole: Topology, file: str | None = None) -> None:
        """``file``: where it comes from, if that is no preset."""
        self.whole = whole
        base = file or whole.name.split(":")[0]
        self._base = base if (file is not None or base in shipped_names("profiles")) and self._repeats(base) else None

    @classmethod
    def named(cls, text: str) -> Self:
        """Of a file or a preset, as ``Topology.load`` takes it. Raises FileFormatError and TopologyError."""
        match = re.fullmatch(r"(.+):[0-9]+", text)
        files = [name for name in (text, match[1] if match else text) if os.path.isfile(name)]
        return cls(Topology.load(text), files[0] if files else None)

    def _repeats(self, base: str) -> bool:
        """Whether so many hosts of a file or preset are this cluster."""
        try:
            return Topology.load(f"{base}:{len(self.whole.hosts)}").content_hash() == self.whole.content_hash()
        except TopologyError:
            return False

    @cached_property
    def per_host(self) -> int:
        """Devices of a host. Raises TopologyError if hosts have different numbers of them."""
        counts = Counter(device.host for device in self.whole.devices)
        if len(set(counts.values())) > 1:
            (many, most), *_, (few, least) = counts.most_common()
            raise TopologyError(
                f"topology {self.whole.name} has hosts of different sizes: {most} devices on {many}, {least} on {few}",
                "Give a cluster of equal hosts, such as a preset.",
            )
        return next(iter(counts.values()))

    @property
    def most_hosts(self) -> int:
        return MAX_DEVICES // self.per_host if self._base is not None else len(self.whole.hosts)

    def numbers(self, most: int) -> list[int]:
        """Numbers of devices up to ``most``, ascending, each a multiple of the one before: a part of one host, one
        host, and twice as many hosts each time."""
        numbers, part = {1, self.per_host}, self.per_host
        while part % 2 == 0:
            part //= 2
            numbers.add(part)
        hosts = 1
        while hosts <= self.most_hosts:
            numbers.add(hosts * self.per_host)
            hosts *= 2
        return sorted(n for n in numbers if n <= most)

    def of(self, devices: int) -> Topology:
        """So many devices: some of the first host, or whole hosts. Raises TopologyError if there are not so many."""
        if devices >= self.per_host:
            return self.of_hosts(devices // self.per_host)
        return self.of_hosts(1).subset(range(devices))

    def of_hosts(self, count: int) -> Topology:
        """So many hosts. Raises TopologyError if there are not so many."""
        if count == len(self.whole.hosts):
            return self.whole
        if self._base is not None:
            return Topology.load(f"{self._base}:{count}")
        if not 1 <= count <= len(self.whole.hosts):
            raise TopologyError(
                f"topology {self.whole.name} has {len(self.whole.hosts)} hosts and is no preset, so there is none like "
                f"it with {count}",
                "Give a preset such as dgx-a100, or a file that describes one node and their count.",
            )
        chosen = set(self.whole.hosts[:count])
        return self.whole.subset([d for d, device in enumerate(self.whole.devices) if device.host in chosen])
