"""Templates: what placements, reshards and weight plans of :mod:`flexsearch.lower` come to, as flat arrays that grow.

Nothing is decided here. Each number was made by lowering; this module only lays it out for ``walk`` and ``change``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from flexsearch.graph import Tensor, volume
from flexsearch.lower import Lowering, Reshard
from flexsearch.lower.lowering import Placed, kept
from flexsearch.lower.reshard import Exchange
from flexsearch.lower.weights import WeightPlan
from flexsearch.simulate.arrays import TICK, Pools
from flexsearch.simulate.ceiling import Ceiling
from flexsearch.simulate.change import HELD, LAYOUT, MISSING, PLAN, RESHARD, STEP, WEIGHT, Table, find, put
from flexsearch.strategy import OperatorConfig, Options

_TYPES: dict[str, Any] = {
    "config_shard": np.uint8, "entry_forward_s": np.float64, "entry_backward_s": np.float64, "duration": np.float64,
    "latency": np.float64, "amount": np.uint64, "link_s": np.float64, "link_load": np.float64, "drag_s": np.float64,
    "drag_load": np.float64, "key_factor": np.float64, "key_ring": np.uint64, "store_bytes": np.uint64,
    "entry_ticks": np.int64, "link_ticks": np.int64,
    "config_held": np.int64, "reshard_held": np.int64, "plan_held": np.int64,
}  # fmt: skip
"""Columns of ``Pools`` that are not uint32."""
_START = 1024


class Column:
    """A growing array; ``width``: of its rows, if they are rows."""

    def __init__(self, dtype: Any, width: int | None = None) -> None:
        self.array: npt.NDArray[Any] = np.zeros(_START if width is None else (_START, width), dtype=dtype)
        self.size = 0

    def extend(self, values: npt.NDArray[Any] | list[Any]) -> None:
        """Append values (or rows)."""
        end = self.size + len(values)
        if end > len(self.array):
            grown = np.zeros((max(end, 2 * len(self.array)), *self.array.shape[1:]), dtype=self.array.dtype)
            grown[: self.size] = self.array[: self.size]
            self.array = grown
        if len(values):
            self.array[self.size : end] = values
        self.size = end


class Templates:
    """Templates for one graph on one topology, under one set of options. ``pools``, ``table``: as they are now; fetch
    them again after adding anything."""

    def __init__(self, lowering: Lowering, options: Options) -> None:
        self.lowering, self.graph, self.topology = lowering, lowering.graph, lowering.topology
        self.ceiling = Ceiling(self.graph, self.topology, options)
        devices = len(self.topology.devices)
        self.columns = {
            name: Column(_TYPES.get(name, np.uint32), devices if name.endswith("_held") else None)
            for name in Pools._fields
        }
        self.table = Table(np.zeros(2 * _START, np.uint64), np.zeros(2 * _START, np.uint32), np.zeros(1, np.uint64))
        self._pools: Pools | None = None
        self._configs: dict[tuple[int, OperatorConfig], int] = {}
        self._keys: dict[tuple[str, tuple[int, ...], str], int] = {}
        self._nodes = 0
        self._parameters = self.graph.of_kind("parameter")
        self.configs: list[OperatorConfig | None] = []
        """Config of each number; number 0 is none."""
        self.operators: list[int] = []
        """Operator of each config."""
        self._reshard(None, "", 1)
        self._config(None, None, 0)
        self._add_plan(None, None)

    @property
    def pools(self) -> Pools:
        """All columns. Rows past their size hold zeros."""
        if self._pools is None:
            self._pools = Pools(**{name: column.array for name, column in self.columns.items()})
        return self._pools

    def _append(self, name: str, values: Iterable[Any]) -> None:
        self.columns[name].extend(list(values))
        self._pools = None

    def _rows(self, name: str, first: str, last: str, **columns: Iterable[Any]) -> None:
        """One row: values of columns that belong together, and where they begin and end. ``name``: any of them."""
        begin = self.columns[name].size
        for column, values in columns.items():
            self._append(column, values)
        self._append(first, [begin])
        self._append(last, [self.columns[name].size])

    # ---- keys

    def put(self, kind: int, a: int, b: int, value: int) -> None:
        """Set a key of the hash table."""
        if 2 * int(self.table.size[0]) >= len(self.table.keys):
            old = self.table
            size = 4 * len(old.keys)
            self.table = Table(np.zeros(size, np.uint64), np.zeros(size, np.uint32), np.zeros(1, np.uint64))
            for key in np.flatnonzero(old.keys):
                k = int(old.keys[key])
                put(self.table, k >> 60, (k >> 32) & 0xFFFFFFF, k & 0xFFFFFFFF, int(old.values[key]))
        put(self.table, kind, a, b, value)

    def _step(self, kind: int, a: int, b: int) -> int:
        """Number of a tuple's beginning."""
        found = int(find(self.table, kind, a, b))
        if found == int(MISSING):
            found = self._nodes
            self._nodes += 1
            self.put(kind, a, b, found)
        return found

    # ---- configs

    def config(self, operator: int, config: OperatorConfig) -> int:
        """Number of a config of an operator."""
        key = operator, config
        if (known := self._configs.get(key)) is None:
            known = self._configs[key] = self._config(self.lowering.placed(operator, config), config, operator)
        return known

    def _config(self, placed: Placed | None, config: OperatorConfig | None, operator: int) -> int:
        self.configs.append(config)
        self.operators.append(operator)
        devices = placed.placement.devices if placed is not None else ()
        self._rows(
            "entry_device", "config_first", "config_last", entry_device=devices,
            entry_forward_s=placed.forward_s if placed is not None else (),
            entry_backward_s=placed.backward_s if placed is not None else (),
            entry_ticks=_ticks(placed.forward_s, placed.backward_s) if placed is not None else (),
        )  # fmt: skip
        for name, layouts in (("config_reads", placed and placed.reads), ("config_writes", placed and placed.writes)):
            self._append(name, [self.columns["layout"].size])
            self._append("layout", layouts or ())
        self._append("config_shard", [bool(config and config.shard_weights)])
        held = (
            np.zeros(len(self.topology.devices), np.int64) if placed is None else self.ceiling.placed(operator, placed)
        )
        self._append("config_held", [held])
        return len(self.configs) - 1

    # ---- reshards

    def add(self, kind: int, a: int, b: int) -> None:
        """Add what a missing key asks for. WEIGHT and HELD need the readers' layouts: ``weight``, ``kept``."""
        itemsize = 1 << (kind - RESHARD)
        self.put(kind, a, b, self._reshard(self.lowering.reshard(a, b, itemsize), "", itemsize))

    def _reshard(self, plan: Reshard | None, dtype: str, itemsize: int) -> int:
        """Number of a new reshard; ``dtype`` matters where exchanges go in buckets."""
        number = self.columns["reshard_first"].size
        phases = plan.phases if plan is not None else ()
        first = self.columns["duration"].size
        for phase in phases:
            for exchange in phase.exchanges:
                self._exchange(exchange, dtype)
        middle = first + (len(phases[0].exchanges) if phases else 0)
        for name, value in (("reshard_first", first), ("reshard_middle", middle)):
            self._append(name, [value])
        self._append("reshard_last", [self.columns["duration"].size])
        nothing = np.zeros(len(self.topology.devices), np.int64)
        self._append("reshard_held", [nothing if plan is None else self.ceiling.moved(plan, itemsize)])
        return number

    def _exchange(self, exchange: Exchange, dtype: str) -> None:
        transfer, count = exchange.transfer, len(exchange.devices)
        ring = exchange.form == "all_reduce"
        amount = exchange.nbytes // (2 * (count - 1)) if ring else 0
        links, drags, latency = self._loads(exchange) if dtype else ({}, {}, 0.0)
        self._rows("send", "send_first", "send_last", send=exchange.senders)
        self._rows("receive", "receive_first", "receive_last", receive=exchange.receivers)
        self._rows("link", "link_first", "link_last", link=[r for r, _ in transfer.links],
                   link_s=[s for _, s in transfer.links],
                   link_ticks=[int(min(s, transfer.duration_s) / TICK) for _, s in transfer.links],
                   link_load=[links.get(r, 0) for r, _ in transfer.links])  # fmt: skip
        self._rows("drag", "drag_first", "drag_last", drag=[r for r, _ in transfer.drag],
                   drag_s=[s for _, s in transfer.drag],
                   drag_load=[drags.get(r, 0) for r, _ in transfer.drag])  # fmt: skip
        self._append("duration", [transfer.duration_s])
        self._append("latency", [latency])
        self._append("amount", [amount])
        key = exchange.form, exchange.devices, dtype
        if key not in self._keys:
            self._keys[key] = len(self._keys)
            self._append("key_factor", [self.topology.communication.factors[exchange.form]])
            self._append("key_ring", [count if ring else 0])
        self._append("key", [self._keys[key]])

    def _loads(self, exchange: Exchange) -> tuple[dict[int, int], dict[int, int], float]:
        """What a bucket adds up: bytes by link and by processor, and the longest latency. Of an all-reduce edges of the
        ring instead of bytes, which a bucket multiplies by its own."""
        ring = sorted(exchange.devices)
        messages: Iterable[tuple[int, int, int]] = exchange.messages
        if exchange.form == "all_reduce":
            messages = [(d, ring[(k + 1) % len(ring)], 1) for k, d in enumerate(ring)]
        links: dict[int, int] = {}
        drags: dict[int, int] = {}
        latency = 0.0
        for source, destination, nbytes in messages:
            route = self.topology.route(source, destination)
            latency = max(latency, route.latency_s)
            for r in route.resources:
                links[r] = links.get(r, 0) + nbytes
            for device in (source, destination):
                processor = self.topology.processor_of[device]
                drags[processor] = drags.get(processor, 0) + nbytes
        return links, drags, latency

    # ---- weights and buffers

    def weight(self, w: int, needs: list[tuple[int, bool]], shard: bool) -> None:
        """Add the plan of weight ``w`` whose edges want the layouts ``needs`` (with whether gradients flow back)."""
        tensor = self._parameters[w]
        node = self._step(WEIGHT, w, int(shard))
        for need, flows in needs:
            node = self._step(STEP, node, 2 * need + flows)
        plan = self.lowering.weight(tensor, tuple(n for n, _ in needs), [flows for _, flows in needs], shard)
        self.put(PLAN, node, 0, self._add_plan(plan, tensor))

    def _add_plan(self, plan: WeightPlan | None, tensor: Tensor | None) -> int:
        number = self.columns["plan_sync"].size
        trained = plan is not None and plan.sync is not None
        gathers, sync, held = [], 0, np.zeros(len(self.topology.devices), np.int64)
        if plan is not None and tensor is not None:
            gathers = [
                self._reshard(forward, "", tensor.itemsize) if forward.exchanges else 0 for forward in plan.forward
            ]
            if plan.sync is not None:
                sync = self._reshard(plan.sync, tensor.dtype, tensor.itemsize)
            held = self.ceiling.weight(plan, tensor.itemsize)
        self._append("plan_gather", [self.columns["gather"].size])
        self._append("gather", gathers)
        self._append("plan_sync", [sync])
        storage = plan.storage if plan is not None and trained else ()
        self._rows("store_device", "store_first", "store_last", store_device=[e.device for e in storage],
                   store_bytes=[volume(e.box) * tensor.itemsize for e in storage] if tensor else ())  # fmt: skip
        self._append("plan_held", [held])
        return number

    def kept(self, buffer: int, layouts: list[int]) -> None:
        """Add the layout in which a buffer is kept whose readers want ``layouts``."""
        node = self._step(HELD, buffer, 0)
        for layout in layouts:
            node = self._step(STEP, node, layout)
        found = kept(self.lowering.layout(layout) for layout in layouts)
        self.put(LAYOUT, node, 0, self.lowering.intern(found))


def _ticks(forward_s: Iterable[float], backward_s: Iterable[float]) -> list[int]:
    """Seconds of both as TICKs, rounded down."""
    return [int(f / TICK) + int(b / TICK) for f, b in zip(forward_s, backward_s, strict=True)]
