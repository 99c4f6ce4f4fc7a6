"""Every layout of a graph on a cluster: all combinations of its numbers, and stages of different sizes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from itertools import chain

from flexsearch.search.hybrid.constants import DIVISIONS, FEW_UNITS, UNITS
from flexsearch.search.hybrid.divide import Divider
from flexsearch.search.hybrid.estimate import Estimates
from flexsearch.search.hybrid.layout import Layout, divisors, factorings, orders, runs
from flexsearch.search.hybrid.ranking import Key
from flexsearch.strategy import Options, States
from flexsearch.topology.classes import is_foldable


class Numbers:
    """Layouts of the graph and the topology of ``estimates``. ``options``: of the whole step, but for those that a
    layout leaves open."""

    def __init__(self, estimates: Estimates, options: Options) -> None:
        self.estimates, self.options = estimates, options
        self.cuts, self.topology = estimates.cuts, estimates.topology
        self.batch = estimates.works.graph.batch
        self._foldings = {1: True}

    def layouts(self) -> Iterator[Key]:
        """All layouts whose ranks are alike: with replicas in blocks of their own, then inside ranks."""
        hosts: dict[str, int] = {}
        for device in self.topology.devices:
            hosts[device.host] = hosts.get(device.host, 0) + 1
        batch, depth = self.batch, self.cuts.depth
        plain = list(factorings(len(self.topology.devices), min(hosts.values()), batch, depth))
        inside = (wide for layout in plain for wide in self._inside(layout, min(hosts.values())))
        for layout in chain(plain, inside):
            for count in divisors(batch // layout.data // layout.each[0]):
                for order in dict.fromkeys(orders(replace(layout, microbatches=count), depth)):
                    if runs(order):
                        yield from self._with_options(order)

    def _inside(self, layout: Layout, host: int) -> Iterator[Layout]:
        """The same with all replicas inside ranks, or those of a host of ``host`` devices, as Megatron-LM numbers ranks
        (tensor, data, pipeline). On one host, and without stages, only where its blocks are not alike."""
        several = len(self.topology.hosts) > 1 and layout.pipeline > 1
        if layout.data == 1 or not (several or not self.falls_apart(layout.data)):
            return
        for width in dict.fromkeys((layout.data, host // layout.tensor)):
            if width > 1 and layout.data % width == 0:
                yield replace(layout, data=layout.data // width, widths=(width,) * layout.pipeline)

    def falls_apart(self, replicas: int) -> bool:
        """Whether the topology is so many equal blocks."""
        if replicas not in self._foldings:
            self._foldings[replicas] = is_foldable(self.topology, replicas)
        return self._foldings[replicas]

    def _with_options(self, layout: Layout) -> Iterator[Key]:
        """A layout with every way to save memory."""
        for recompute in self.estimates.works.regions:
            options = self.options.model_copy(update={"recompute": recompute, "reshard_after_forward": False})
            yield Key(layout, options)
            if layout.data > 1 or layout.widths:
                again = options.model_copy(update={"reshard_after_forward": True})
                for sharded in layout.shardings(self.topology.host_size):
                    if sharded.states != States.GRADIENTS:
                        yield Key(sharded, options)
                    if sharded.states == States.WEIGHTS:
                        yield Key(sharded, again)

    def divisions(self) -> Iterator[Key]:
        """Stages of different sizes."""
        devices, batch = len(self.topology.devices), self.batch
        regular = len(self.estimates.works.kinds) == 1 and not self.cuts.short
        most = FEW_UNITS if regular else UNITS
        for tensor in self._tensors:
            for data in divisors(devices // tensor):
                units = devices // tensor // data
                if not 1 < units <= most or batch % data:
                    continue
                for count in divisors(batch // data):
                    for speed in range(1 + len(self.estimates.speeds)):
                        yield from self._divided(Layout(data, tensor, 1, count, speed=speed), units)

    @cached_property
    def _tensors(self) -> list[int]:
        """Sizes of groups inside hosts, such that all devices fall into groups."""
        hosts: dict[str, int] = {}
        for device in self.topology.devices:
            hosts[device.host] = hosts.get(device.host, 0) + 1
        return [n for n in divisors(min(hosts.values())) if all(size % n == 0 for size in hosts.values())]

    def _divided(self, layout: Layout, units: int) -> Iterator[Key]:
        """The best divisions of one block. Equal stages of several groups each are a layout of more blocks."""
        alike, divisions = len(self.estimates.works.kinds) == 1, list[tuple[float, int, Layout, tuple[int, ...]]]()
        for widths, first in dict.fromkeys(Divider(self.estimates, layout, self.options, units).divisions()):
            wide = layout.wide(widths)
            plainer = alike and len(set(widths)) == 1 and widths[0] > 1
            if not plainer and (wide.speed or not layout.speed):
                divisions.append((self.estimates.estimate(wide, self.options, first).cost, len(divisions), wide, first))
        for _, _, wide, first in sorted(divisions)[:DIVISIONS]:
            for schedule in ("1f1b", "gpipe", "zero-bubble") if wide.pipeline > 1 else ("1f1b",):
                order = replace(wide, schedule=schedule)
                if runs(order):
                    yield from (Key(layout, options, first) for layout, options, _ in self._with_options(order))
