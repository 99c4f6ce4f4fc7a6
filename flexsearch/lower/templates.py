"""Templates: what placements, reshards and weight plans of :mod:`flexsearch.lower` come to, as flat arrays that grow.

Nothing is decided here. Each number was made by lowering; this module only lays it out for ``walk`` and ``change``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from flexsearch.compiled import F64, I64
from flexsearch.cost.ticks import TICK
from flexsearch.graph import Tensor
from flexsearch.lower import Lowering, Reshard
from flexsearch.lower.arrays import Pools
from flexsearch.lower.ceiling import Ceiling
from flexsearch.lower.desk import FIRST, MIDDLE, Desk
from flexsearch.lower.exchanges import Rows, append
from flexsearch.lower.keys import HELD, LAYOUT, PLAN, RESHARD, STEP, WEIGHT, Keys
from flexsearch.lower.lowering import Placed, kept
from flexsearch.lower.weights import WeightPlan
from flexsearch.strategy import OperatorConfig, Options
from flexsearch.topology.parts import FORMS

_TYPES: dict[str, Any] = {
    "config_shard": np.uint8, "entry_forward_s": np.float64, "entry_backward_s": np.float64, "duration": np.float64,
    "start": np.float64, "amount": np.uint64, "link_s": np.float64, "link_load": np.float64, "drag_s": np.float64,
    "drag_load": np.float64, "key_form": np.uint8, "key_group": np.uint8, "store_bytes": np.uint64,
    "entry_forward": np.int64, "entry_backward": np.int64, "link_ticks": np.int64,
    "config_held": np.int64, "reshard_held": np.int64, "plan_held": np.int64,
}  # fmt: skip
"""Columns of ``Pools`` that are not uint32."""
_START = 1024
_NOBODY = np.zeros(0, np.uint32)


class Column:
    """A growing array; ``width``: of its rows, if they are rows. ``extend`` and ``add`` say whether it is a new one."""

    def __init__(self, dtype: Any, width: int | None = None) -> None:
        self.array: npt.NDArray[Any] = np.zeros(_START if width is None else (_START, width), dtype=dtype)
        self.size = 0

    def extend(self, values: npt.NDArray[Any] | Sequence[Any]) -> bool:
        """Append values (or rows)."""
        end = self.size + len(values)
        full = end > len(self.array)
        if full:
            grown = np.zeros((max(end, 2 * len(self.array)), *self.array.shape[1:]), dtype=self.array.dtype)
            grown[: self.size] = self.array[: self.size]
            self.array = grown
        if len(values):
            self.array[self.size : end] = values
        self.size = end
        return full

    def double(self) -> None:
        """Make room for twice as many."""
        self.array = np.concatenate((self.array, np.zeros_like(self.array)))

    def add(self, value: Any) -> bool:
        """Append one value (or row)."""
        if self.size == len(self.array):
            return self.extend([value])
        self.array[self.size] = value
        self.size += 1
        return False


class Templates:
    """Templates for one graph on one topology, under one set of options. ``pools``, ``keys.table``: as they are now;
    fetch them again after adding anything. ``share``: whether operators that are alike have one number for a config."""

    def __init__(self, lowering: Lowering, options: Options, share: bool = True) -> None:
        self.lowering, self.graph, self.topology = lowering, lowering.graph, lowering.topology
        self.ceiling = Ceiling(self.graph, self.topology, options)
        devices = len(self.topology.devices)
        self.columns = {
            name: Column(_TYPES.get(name, np.uint32), devices if name.endswith("_held") else None)
            for name in Pools._fields
        }
        self.keys = Keys()
        self._pools: Pools | None = None
        self._rows_of_exchanges = Rows(**{name: self.columns[name].array for name in Rows._fields})
        self._exchanges = np.zeros(5, np.uint64)
        """Entries of ``Rows`` so far: sends, receives, links, drags, exchanges."""
        self._configs: dict[tuple[int, OperatorConfig], int] = {}
        self.alike = self._find_alike() if share else list(range(len(self.graph.operators)))
        """By operator: the first one that shares its configs."""
        self._keys: dict[tuple[str, bytes, bytes, str], int] = {}
        self._plans: dict[tuple[int, str], int] = {}
        self._parameters = self.graph.of_kind("parameter")
        self.configs: list[OperatorConfig | None] = []
        """Config of each number; number 0 is none."""
        self.operators: list[int] = []
        """Operator of each config; of several that are alike, the first."""
        self._reshard(None, "", 1)
        self._config(None, None, 0)
        self._add_plan(None, None)

    @property
    def pools(self) -> Pools:
        """All columns. Rows past their size hold zeros."""
        if self._pools is None:
            self._pools = Pools(**{name: column.array for name, column in self.columns.items()})
        return self._pools

    def _append(self, name: str, values: npt.NDArray[Any] | Sequence[Any]) -> None:
        if self.columns[name].extend(values):
            self._pools = None

    def _one(self, name: str, value: Any) -> None:
        if self.columns[name].add(value):
            self._pools = None

    def _rows(self, name: str, first: str, last: str, **columns: npt.NDArray[Any] | Sequence[Any]) -> None:
        """One row: values of columns that belong together, and where they begin and end. ``name``: any of them."""
        begin = self.columns[name].size
        for column, values in columns.items():
            self._append(column, values)
        self._one(first, begin)
        self._one(last, self.columns[name].size)

    # ---- configs

    def config(self, operator: int, config: OperatorConfig) -> int:
        """Number of a config of an operator."""
        operator = self.alike[operator]
        key = operator, config
        if (known := self._configs.get(key)) is None:
            known = self._configs[key] = self._config(self.lowering.placed(operator, config), config, operator)
        return known

    def _find_alike(self) -> list[int]:
        """By operator: the first one of the same shape and cost, which keeps the same for its backward."""
        graph, first = self.graph, dict[object, int]()
        return [
            first.setdefault(
                (self.lowering.costs.alike[i], rule, tuple(name in graph.differentiable for name in op.inputs)), i
            )
            for i, (op, rule) in enumerate(zip(graph.operators, self.ceiling.rules, strict=True))
        ]

    def _config(self, placed: Placed | None, config: OperatorConfig | None, operator: int) -> int:
        self.configs.append(config)
        self.operators.append(operator)
        nothing: tuple[int, ...] = ()
        self._rows(
            "entry_device", "config_first", "config_last",
            entry_device=nothing if placed is None else placed.device,
            entry_forward_s=nothing if placed is None else placed.seconds[0],
            entry_backward_s=nothing if placed is None else placed.seconds[1],
            entry_forward=nothing if placed is None else _ticks(placed.seconds[0]),
            entry_backward=nothing if placed is None else _ticks(placed.seconds[1]),
        )  # fmt: skip
        reads, writes = ((), ()) if placed is None else (placed.reads, placed.writes)
        for name, layouts in (("config_reads", reads), ("config_writes", writes)):
            self._one(name, self.columns["layout"].size)
            self._append("layout", [layout.number for layout in layouts])
        self._one("config_shard", bool(config and config.shard_weights))
        held = (
            np.zeros(len(self.topology.devices), np.int64) if placed is None else self.ceiling.placed(operator, placed)
        )
        self._one("config_held", held)
        return len(self.configs) - 1

    # ---- reshards

    def add(self, kind: int, a: int, b: int) -> None:
        """Add what a missing key asks for. WEIGHT and HELD need the readers' layouts: ``weight``, ``kept``."""
        itemsize = 1 << (kind - RESHARD)
        self.keys.put(kind, a, b, self._reshard(self.lowering.reshard(a, b, itemsize), "", itemsize))

    def _reshard(self, plan: Reshard | None, dtype: str, itemsize: int) -> int:
        """Number of a new reshard; ``dtype`` matters where exchanges go in buckets."""
        number, first = self.columns["reshard_first"].size, int(self._exchanges[-1])
        middle, held = 0, np.zeros(len(self.topology.devices), np.int64)
        if plan is not None:
            desk = plan.planned()
            middle, held = int(desk.result[MIDDLE] - desk.result[FIRST]), self.ceiling.moved(plan, itemsize)
            self._append_exchanges(desk)
            if dtype:
                self._set_keys(desk, first, dtype)
        for name, value in (("first", first), ("middle", first + middle), ("last", int(self._exchanges[-1]))):
            self._one(f"reshard_{name}", value)
        self._one("reshard_held", held)
        return number

    def _append_exchanges(self, desk: Desk) -> None:
        """Add the exchanges of the reshard on the desk."""
        on = desk.exchanges
        while not append(
            desk.result, on.end, on.send, on.receive, on.loads, on.start, on.duration, on.amount, on.linear,
            self.topology.decisive, self._rows_of_exchanges, self._exchanges,
        ):  # fmt: skip
            for name in Rows._fields:
                self.columns[name].double()
            self._rows_of_exchanges = Rows(**{name: self.columns[name].array for name in Rows._fields})
            self._pools = None

    def _set_keys(self, desk: Desk, first: int, dtype: str) -> None:
        """Give exchanges from number ``first`` on their keys: numbers of what those have in common that may go in one
        bucket: form, senders, receivers, type of elements."""
        rows = self._rows_of_exchanges
        for x in range(first, int(self._exchanges[-1])):
            form = FORMS[int(desk.exchanges.form[int(desk.result[FIRST]) + x - first])]
            send = rows.send[rows.send_first[x] : rows.send_last[x]].tobytes()
            key = form, send, rows.receive[rows.receive_first[x] : rows.receive_last[x]].tobytes(), dtype
            if key not in self._keys:
                self._keys[key] = len(self._keys)
                self._one("key_form", FORMS.index(form))
                self._one("key_group", self.lowering.planner.pricing.by_group(form))
            rows.key[x] = self._keys[key]

    # ---- weights and buffers

    def weight(self, w: int, needs: list[tuple[int, bool]], shard: bool) -> None:
        """Add the plan of weight ``w`` whose edges want the layouts ``needs`` (with whether gradients flow back)."""
        tensor = self._parameters[w]
        node = self.keys.number(WEIGHT, w, int(shard))
        for need, flows in needs:
            node = self.keys.number(STEP, node, 2 * need + flows)
        plan = self.lowering.weight(tensor, tuple(n for n, _ in needs), [flows for _, flows in needs], shard)
        key = id(plan), tensor.dtype  # lowering keeps the plan, so that its id stays its own
        if (known := self._plans.get(key)) is None:
            known = self._plans[key] = self._add_plan(plan, tensor)
        self.keys.put(PLAN, node, 0, known)

    def _add_plan(self, plan: WeightPlan | None, tensor: Tensor | None) -> int:
        number, gathers, sync = self.columns["plan_sync"].size, [], 0
        held, devices, nbytes = np.zeros(len(self.topology.devices), np.int64), _NOBODY, np.zeros(0, np.int64)
        if plan is not None and tensor is not None:
            gathers = [
                self._reshard(forward, "", tensor.itemsize) if forward.crosses else 0 for forward in plan.forward
            ]
            held = self.ceiling.weight(plan, tensor.itemsize)
            if plan.sync is not None:
                sync = self._reshard(plan.sync, tensor.dtype, tensor.itemsize)
                devices, nbytes = plan.stored.device, plan.stored.grid.volume * tensor.itemsize
        self._one("plan_gather", self.columns["gather"].size)
        self._append("gather", gathers)
        self._one("plan_sync", sync)
        self._rows("store_device", "store_first", "store_last", store_device=devices, store_bytes=nbytes)
        self._one("plan_held", held)
        return number

    def kept(self, buffer: int, layouts: list[int]) -> None:
        """Add the layout in which a buffer is kept whose readers want ``layouts``."""
        node = self.keys.number(HELD, buffer, 0)
        for layout in layouts:
            node = self.keys.number(STEP, node, layout)
        found = kept(self.lowering.layout(layout) for layout in layouts)
        self.keys.put(LAYOUT, node, 0, self.lowering.intern(found))


def _ticks(seconds: F64) -> I64:
    """Whole ticks."""
    found: I64 = (seconds / TICK).astype(np.int64)
    return found
