"""Templates: what configs, reshards and weight plans come to, as flat arrays that grow.

Compiled code makes them (``configs``, ``fill``). Python adds what is few: the splits of operators, and what follows
from a split over a link; and it makes room.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from typing import Any, Final

import numpy as np

from flexsearch.compiled import F64, I64
from flexsearch.cost.ticks import TICK
from flexsearch.direct import direct
from flexsearch.lower.arrays import Pools, Program, State
from flexsearch.lower.change import MOST_MISSING, Change, Wiring
from flexsearch.lower.configs import intern_config
from flexsearch.lower.fill import IN_PYTHON, NO_ROOM, fill
from flexsearch.lower.footprints import Landings, Sums
from flexsearch.lower.growing import Columns, GrowingPools
from flexsearch.lower.keys import DERIVED, HELD, LAYOUT, LIKE, MISSING, OVER, STEP, Keys
from flexsearch.lower.layout import empty_side
from flexsearch.lower.orbits import make_block_map
from flexsearch.lower.pieces import Pieces, kept
from flexsearch.lower.program import make_wiring
from flexsearch.lower.rows import NEVER
from flexsearch.lower.split import Degrees, Region
from flexsearch.lower.tables import Requests, Scratch, Splits, TemplateTables, WeightAtHand
from flexsearch.lower.workspace import FULL, Workspace, make_workspace
from flexsearch.packed import dtypes, zeros
from flexsearch.strategy import OperatorConfig, Sharding
from flexsearch.strategy.config import Shares

_intern_config = direct(intern_config)
_fill = direct(fill)

_GROUPS: Final = (
    ("pieces", "extents", "cost", "piece_first", "reads", "writes", "last", "operator"),
    ("forward", "backward", "inputs", "weight", "cast"), ("extent", "samples", "part"),
    ("grid", "first", "held_by", "spread"), ("position",), ("follow_split", "follow_first", "follow_count"),
)  # fmt: skip
"""Columns of ``Splits`` that grow together."""
_MOVES = 1 << 14
"""Moves, and rows of links, for which the planner's workspace has room at first."""


class Templates:
    """Templates for one graph on one topology. ``tables``, ``pools``: as they are now; fetch
    them again after adding anything. ``share``: whether operators that are alike have one number for a config;
    ``halved``: whether backward passes in two halves will be asked for;
    ``ruled``: whether configs are to be replaced by the nearest that is allowed (DERIVED: NEAREST)."""

    def __init__(self, lowering: Pieces, share: bool = True, halved: bool = True) -> None:
        self.lowering, self.graph, self.topology = lowering, lowering.graph, lowering.topology
        self.keys, self._halved = Keys(), halved
        self.alike = self._find_alike() if share else list(range(len(self.graph.operators)))
        """By operator: the first one that shares its configs."""
        self.configs = Configs(self)
        self._growing = GrowingPools()
        self._columns = tuple(Columns({name: dtypes(Splits)[name] for name in group}) for group in _GROUPS)
        self._split_columns, self._times, self._piece_columns = self._columns[:3]
        self._operands, self._positions, self._followed = self._columns[3:]
        self._splits: Splits | None = None
        self._room = 0
        """Of all columns together, when ``_splits`` was made of them."""
        self._config_numbers: dict[tuple[int, OperatorConfig], int] = {}
        self._numbers: dict[tuple[int, Degrees, int, Shares], int] = {}
        self._split_keys: list[tuple[int, Degrees, int, Shares]] = []
        self._costs: dict[tuple[int, tuple[tuple[int, ...], ...]], int] = {}
        """By operator and extents of its pieces: where their times stand."""
        self.followed: set[tuple[int, int]] = set()
        """Links, and splits of which it is known what follows over them."""
        self._kinds = np.unique(lowering.costs.kinds)
        self._moves = _MOVES
        self._workspace, self._scratch = self._new_workspace(), self._new_scratch()
        self._fixed = self._new_fixed()
        self._tables: TemplateTables | None = None

    @cached_property
    def wiring(self) -> Wiring:
        """Which slots belong to which tensors."""
        return make_wiring(self.graph, self.lowering)

    # ---- the arrays

    @property
    def pools(self) -> Pools:
        """The templates. Rows past their number hold zeros."""
        return self._growing.pools

    @property
    def nbytes(self) -> int:
        """Bytes of the templates."""
        return self._growing.nbytes

    @property
    def landings(self) -> Landings:
        """What the reshards leave on devices."""
        return self._growing.landings

    @property
    def tables(self) -> TemplateTables:
        """All that compiled code needs to make templates."""
        if self._splits is None or self._room < sum([columns.room for columns in self._columns]):
            self._splits = Splits(**{name: a for columns in self._columns for name, a in columns.arrays.items()})
            self._room = sum(columns.room for columns in self._columns)
        now, growing, layouts = self._tables, self._growing, self.lowering.layouts.pool
        if (
            now is None or now.keys is not self.keys.table or now.layouts is not layouts
            or now.splits is not self._splits or now.pools is not growing.pools or now.workspace is not self._workspace
        ):  # fmt: skip
            now = self._tables = TemplateTables(
                pools=growing.pools, landings=growing.landings, keys=self.keys.table, layouts=layouts,
                splits=self._splits, workspace=self._workspace, used=growing.used, scratch=self._scratch, **self._fixed
            )  # fmt: skip
        return now

    def ruled(self) -> None:
        """From now on, configs are replaced by the nearest that is allowed."""
        self._fixed["ruled"][0] = 1

    def make_room(self) -> None:
        """Let grow what is more than half full, or all."""
        if self._tables is not None and self.keys.table is not self._tables.keys:  # it was full, and has grown
            self._fixed["full"][0] = 0
            return
        full = self._growing.full()
        layouts, workspace = self.lowering.layouts, bool(self._workspace.result[FULL])
        more = layouts.filled > 0.5
        if not full and not more and not workspace:
            full, more = self._growing.groups(), True
        self._growing.grow(full)
        if more:
            layouts.grow()
        if workspace:
            self._moves *= 2
            self._workspace = self._new_workspace()
        self._fixed["full"][0] = 0

    @property
    def _entries(self) -> int:
        """Most entries of a layout that must be planned: all readers of a weight may want it on all devices."""
        readers = [len(self.graph.consumers[t.name]) for t in self.graph.of_kind("parameter")]
        return len(self.lowering.network.devices) * max(readers, default=1)

    @property
    def _dimensions(self) -> int:
        return max(1, *(len(t.shape) for t in self.graph.tensors))

    def _new_workspace(self) -> Workspace:
        sizes = len(self.lowering.network.devices), self._dimensions, self._entries, self._moves, self._moves
        return make_workspace(self.lowering.planner.pricing.tally, *sizes)

    def _new_scratch(self) -> Scratch:
        entries, rank, devices = self._entries, self._dimensions, len(self.lowering.network.devices)
        readers = entries // devices
        return zeros(
            Scratch, entries, source=empty_side(entries, rank), destination=empty_side(entries, rank),
            plain_source=empty_side(entries, 0), plain_destination=empty_side(entries, 0), box=(entries, rank, 2),
            plain_box=(entries, 0, 2), need=readers, flows=readers,
        )  # fmt: skip

    def _new_fixed(self) -> dict[str, Any]:
        """What of the tables stays."""
        lowering, devices = self.lowering, len(self.lowering.network.devices)
        weights = {t.dtype: (t.itemsize, self.graph.gradient[t.name].itemsize) for t in self.graph.of_kind("parameter")}
        sizes = [weights[dtype] for dtype in self.lowering.weight_types] or [(1, 1)]
        return {
            "routes": lowering.network.routes, "rates": lowering.planner.pricing.rates,
            "bandwidth": np.array([r.bandwidth or 0.0 for r in self.topology.resources]),
            "decisive": lowering.network.decisive.astype(np.uint8),
            "blocks": make_block_map(
                lowering.image, lowering.replicas, len(self.topology.devices), lowering.inside
            ),
            "kind": np.searchsorted(self._kinds, self.lowering.costs.kinds).astype(np.uint32),
            "itemsize": np.array([own for own, _ in sizes], np.int64),
            "gradient_itemsize": np.array([gradient for _, gradient in sizes], np.int64),
            "requests": zeros(Requests, MOST_MISSING + self._entries, size=2), "weight": zeros(WeightAtHand),
            "sums": zeros(Sums, devices),
            "ruled": np.zeros(1, np.uint8), "full": np.zeros(1, np.uint8),
        }  # fmt: skip

    def _number(self, intern: Callable[[], Any]) -> int:
        """What ``intern`` says as soon as there is room."""
        while (number := int(intern())) == int(MISSING):
            self.make_room()
        return number

    # ---- configs

    def config(self, operator: int, config: OperatorConfig) -> int:
        """Number of a config of an operator."""
        key = self.alike[operator], config
        if (cached := self._config_numbers.get(key)) is None:
            split, devices = np.uint64(self.split(operator, config)), np.array(config.devices, np.uint32)
            sharding = np.uint64(config.sharding.rank)
            cached = self._number(lambda: _intern_config(self.tables, split, devices, sharding))
            self._config_numbers[key] = cached
        return cached

    def split(self, operator: int, config: OperatorConfig) -> int:
        """Number of a config's split of an operator."""
        key = self.alike[operator], config.degrees, config.replicas, config.shares
        if (cached := self._numbers.get(key)) is None:
            cached = self._numbers[key] = self._add_split(*key)
            self._split_keys.append(key)
        return cached

    def operator(self, config: int) -> int:
        """Operator of a config; of several that are alike, the first."""
        return self._split_keys[int(self.pools.config_split[config])][0]

    def in_place(self, split: int) -> OperatorConfig:
        """A split on the mesh whose devices are its positions."""
        _, degrees, replicas, shares = self._split_keys[split]
        return OperatorConfig(degrees, self._mesh(split), replicas, shares=shares)

    def _mesh(self, split: int) -> tuple[int, ...]:
        """The positions of a split."""
        return _positions(int(self._split_columns.arrays["pieces"][split]))

    def follows(self, link: int, split: int, target: int, config: OperatorConfig) -> int:
        """Set what follows a split over a link: ``config`` of operator ``target``, as of ``in_place``. Returns the
        number of its split."""
        followed, count = self.split(target, config), len(config.devices)
        first = int(MISSING)
        if config.devices != self._mesh(split):
            first = self._positions.extend(count, position=config.devices)
        row = self._followed.add(follow_split=followed, follow_first=first, follow_count=count)
        self.keys.put(OVER, link, split, row)
        self.followed.add((link, split))
        return followed

    def like(self, operator: int, split: int) -> None:
        """Set the split of another operator that is like ``split``."""
        self.keys.put(LIKE, operator, split, self.split(operator, self.in_place(split)))

    def derive(self, how: int, config: int, rule: Callable[[int, OperatorConfig], OperatorConfig]) -> None:
        """Set the config that ``rule`` derives from another of the same operator."""
        operator, now = self.operator(config), self.configs[config]
        assert now is not None
        self.keys.put(DERIVED, how, config, self.config(operator, rule(operator, now)))

    def _add_split(self, operator: int, degrees: Degrees, replicas: int, shares: Shares) -> int:
        config = OperatorConfig(degrees, (), replicas, shares=shares)
        split, piece_first = self.lowering.split(operator, config), int(MISSING)
        count = len(split.extent_of)
        if len(split.extents) > 1 or operator in self.lowering.readers:
            samples, part = self.lowering.samples(operator, config, split)
            piece_first = self._piece_columns.extend(count, extent=split.extent_of, samples=samples, part=part)
        if (cost := self._costs.get((operator, split.extents))) is None:
            cost = self._costs[operator, split.extents] = self._times.size
            for kind in self._kinds.tolist():
                self._add_times(operator, split.extents, kind)
        regions = (*split.inputs, *split.outputs)
        reads = self._add_operands(regions)
        return self._split_columns.add(
            pieces=count, extents=len(split.extents), cost=cost, piece_first=piece_first, reads=reads,
            writes=reads + len(split.inputs), last=reads + len(regions), operator=operator,
        )  # fmt: skip

    def _add_times(self, operator: int, extents: Sequence[tuple[int, ...]], kind: int) -> None:
        """Append what pieces of these extents take on a kind of device."""
        costs, count = self.lowering.costs, len(extents)
        forward, backward = _ticks(costs.of_extents(operator, extents, kind))
        inputs, weight = _ticks(costs.halves(operator, extents, kind)) if self._halved else (0, 0)
        cast = _ticks(costs.casting(operator, extents, kind))
        self._times.extend(count, forward=forward, backward=backward, inputs=inputs, weight=weight, cast=cast)

    def _add_operands(self, regions: Sequence[Region]) -> int:
        """Append the operands of a split; returns where."""
        at = self._operands.size
        for region in regions:
            first, held_by = int(MISSING), 0
            if region.held is not None:
                held_by = len(region.held)
                first = self._positions.extend(held_by, position=region.held)
            self._operands.add(grid=region.grid.number, first=first, held_by=held_by, spread=region.blocks > 1)
        return at

    def _find_alike(self) -> list[int]:
        """By operator: the first one of the same shape and cost."""
        graph, first = self.graph, dict[object, int]()
        return [
            first.setdefault(
                (
                    self.lowering.costs.alike[i], tuple(name in graph.differentiable for name in op.inputs),
                    tuple(graph.tensor[name].kind == "parameter" for name in op.inputs),
                    self.lowering.blocks(i), i in self.lowering.readers,
                ), i
            )
            for i, op in enumerate(graph.operators)
        ]

    # ---- what compiled code leaves to Python

    def fill(self, wiring: Wiring, program: Program, state: State, change: Change) -> None:
        """Add what ``change`` says is missing for the plan ``state``."""
        while (left := int(_fill(self.tables, wiring, program, state, change, np.int64(NEVER)))) == NO_ROOM:
            self.make_room()
        if left == IN_PYTHON:
            rows = change.missing[: int(change.lacking[0])]
            for buffer in {int(a) for kind, a, _ in rows.tolist() if kind == HELD}:
                slots = wiring.buffer_slot[wiring.buffer_first[buffer] : wiring.buffer_last[buffer]]
                configs = self.pools.config_reads[state.config[wiring.slot_operator[slots]]]
                self.kept(buffer, self.pools.layout[configs + wiring.slot_position[slots]].tolist())

    def kept(self, buffer: int, layouts: list[int]) -> None:
        """Add the layout in which a buffer is kept whose readers want ``layouts``."""
        node = self.keys.number(HELD, buffer, 0)
        for layout in layouts:
            node = self.keys.number(STEP, node, layout)
        buffer_layout = kept(self.lowering.layout(layout) for layout in layouts)
        self.keys.put(LAYOUT, node, 0, self.lowering.intern(buffer_layout))


class Configs:
    """Configs by number; number 0 is none. Made where they are read."""

    def __init__(self, templates: Templates) -> None:
        self._templates = templates
        self._configs: dict[int, OperatorConfig] = {}

    def __getitem__(self, number: int) -> OperatorConfig | None:
        if number == 0:
            return None
        if (cached := self._configs.get(number)) is None:
            templates, pools = self._templates, self._templates.pools
            split = templates.in_place(int(pools.config_split[number]))
            devices = templates.lowering.layouts.devices(int(pools.config_mesh[number])).tolist()
            sharding = Sharding.of_rank(int(pools.config_sharding[number]))
            cached = self._configs[number] = split.on(devices).sharded(*sharding)
        return cached

    def __len__(self) -> int:
        return int(self._templates.tables.used.configs[0])


@lru_cache(maxsize=1024)
def _positions(count: int) -> tuple[int, ...]:
    """The positions of a mesh of so many devices."""
    return tuple(range(count))


def _ticks(seconds: F64) -> I64:
    """Whole ticks."""
    ticks: I64 = (seconds / TICK).astype(np.int64)
    return ticks
