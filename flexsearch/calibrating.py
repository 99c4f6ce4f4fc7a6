"""Floor 5: figures of the cost model fitted to measured iteration times, which come as rows of a CSV file.

A row has ``measured_s`` and says which plan took it: ``strategy``, a strategy file (beside the rows); or ``graph`` and
a layout, as data, tensor, pipeline, microbatches. ``docs/files.md`` has all columns.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, get_args

import numpy as np
from pydantic import ValidationError

from flexsearch.cost import Learned, Profile
from flexsearch.cost.learned import FULL, TRAFFIC, Residual, network_name
from flexsearch.errors import FileFormatError, FlexsearchError, ProfileError
from flexsearch.files import content_hash
from flexsearch.graph import OperatorGraph
from flexsearch.search.hybrid import Layout, plan_layout
from flexsearch.simulate.staged import StagedSimulators, step_of_strategy
from flexsearch.strategy import Options, States, Strategy
from flexsearch.strategy.stage import ScheduleKind
from flexsearch.topology import Topology
from flexsearch.topology.changes import with_code

if TYPE_CHECKING:
    from flexsearch.measure.learning import Figure, Fitted

NUMBERS: Final = ("data", "tensor", "pipeline", "microbatches", "chunks")
"""Columns of a layout that are whole numbers of 1 or more; each is 1 unless it is given."""
OPTIONS: Final = ("optimizer", "precision", "gradients", "recompute", "reshard_after_forward")
COLUMNS: Final = (
    "measured_s", "strategy", "graph", "batch", "seq", "topology", "weight", "group", *NUMBERS, "schedule", "states",
    *OPTIONS,
)  # fmt: skip
UPPER: Final[Mapping[str, float]] = {
    "matrix": 1.0, "other": 1.0, "memory": 1.0, "attention_forward": 2.0, "attention_backward": 2.0,
    "matrix_size": 1e6, "overhead_s": 1000.0,
}  # fmt: skip
"""The largest values of a device's efficiency that make sense; a share of ``traffic`` is at most 1."""
OF_NONE: Final[Mapping[str, float]] = {"matrix_size": 64.0, "overhead_s": 1e-6}
"""How far figures may well lie from 0, where they are 0; of others half of what they are."""
MOST: Final = 1e6
"""The largest number of a row: seconds, devices, microbatches, a weight."""
LEAST: Final = 1e-3
"""The smallest share of a peak."""
ODD: Final = 100.0
"""A step that is so many times as long or as short as predicted was measured in another unit, most likely."""
FAR: Final = 4.0
"""A figure that is so many times what its file says, or that part of it, stands for something else: a chain of kernels
that the graph has as one operator, a host that others use. Figures of an efficiency go no further than that."""


@dataclass(frozen=True)
class Measured:
    """A row. ``where``: file and line; ``name``: the plan in words; ``plan``: the same of equal plans; ``model``: its
    graph and sequence length; ``group``: rows that are left out together; ``half``: whether it computes in half
    precision; ``predict``: iteration time (s) under a profile."""

    where: str
    name: str
    plan: str
    model: str
    group: str
    weight: float
    measured_s: float
    topology: Topology
    half: bool
    predict: Callable[[Profile], float]


@dataclass(frozen=True)
class Calibrated:
    """What rows taught. ``profile``: with it; ``figures``: those that were fitted, with the value before; ``most``: how
    many the rows allowed."""

    rows: tuple[Measured, ...]
    profile: Profile
    fitted: Fitted
    figures: tuple[Figure, ...]
    most: int

    @property
    def changed(self) -> dict[str, tuple[float, float]]:
        """By name, the value before and after."""
        points = self.fitted.point.tolist()
        return {self.figures[k].name: (self.figures[k].prior, points[k]) for k in self.fitted.chosen}

    @property
    def odd(self) -> list[str]:
        """Where the rows stand whose times are ``ODD``."""
        rows = zip(self.rows, self.fitted.after.tolist(), strict=True)
        return [row.where for row, error in rows if not 1.0 / ODD < 1.0 + error < ODD]

    @property
    def doubtful(self) -> dict[str, str]:
        """By name of a figure that hardly stands for what it is named after, why."""
        cluster = self.rows[0].topology
        starts = {
            "task_s": max(device.overhead_s for device in cluster.devices), "start_s": cluster.communication.overhead_s
        }  # fmt: skip
        told = {}
        for k in self.fitted.chosen:
            figure, value = self.figures[k], float(self.fitted.point[k])
            own = starts.get(figure.name, 0.0)
            times = (own + value) / (own + figure.prior) if own + figure.prior > 0.0 else 1.0
            if min(abs(value - figure.least), abs(value - figure.most)) <= 1e-3 * abs(value):
                told[figure.name] = "the rows would have it further from what its file says than makes sense"
            elif not 1.0 / FAR < times < FAR:
                told[figure.name] = f"with it that part of a step takes {times:.2g} times as long"
        return told


def read_rows(path: Path, topology: Topology) -> list[Measured]:
    """The rows of a CSV file. Raises FileFormatError that names the line and the column."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            reader.fieldnames = columns = [name.strip() for name in reader.fieldnames or ()]
            lines = [(reader.line_num, line) for line in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        remedy = "Give a CSV file with a line of column names."
        reason = error.strerror if isinstance(error, OSError) else error
        raise FileFormatError(f"{path} cannot be read: {reason}", remedy) from error
    if not lines:
        raise FileFormatError(f"{path} has no rows", f"Its first line names columns: {', '.join(COLUMNS[:3])}, ...")
    if twice := next((name for name in columns if columns.count(name) > 1), None):
        raise FileFormatError(f"{path}: there are two columns {twice!r}", "Leave one of them out.")
    if unknown := [name for name in columns if name not in COLUMNS]:
        remedy = "Separate columns by commas." if len(columns) == 1 else f"The columns are {', '.join(COLUMNS)}."
        raise FileFormatError(f"{path}: unknown column {unknown[0]!r}", remedy)
    if "measured_s" not in columns:
        raise FileFormatError(f"{path}: the column measured_s is missing", "It holds the iteration times in seconds.")
    if "strategy" not in columns and "graph" not in columns:
        raise FileFormatError(
            f"{path}: there is neither a column strategy nor a column graph",
            "Name the strategy file of each row, or its graph and layout (data, tensor, pipeline, microbatches).",
        )
    rows, graphs = [], dict[tuple[str, str, str], OperatorGraph]()
    for number, line in lines:
        where = f"{path}, line {number}"
        try:
            if None in line:
                raise FileFormatError(f"it has more than the {len(columns)} fields of the first line")
            row = {name: text.strip() for name, text in line.items() if text is not None and text.strip()}
            rows.append(_Reader(path.parent, topology, row, graphs).read(where))
        except FlexsearchError as error:
            raise error.at(where) from error
    # What a fit says of other models, the others must teach: else each plan is left out by itself.
    several = len({row.model for row in rows}) > 1
    return [row if row.group else replace(row, group=row.model if several else row.plan) for row in rows]


class _Reader:
    """One row. ``graphs``: those that were read before, by name and size."""

    def __init__(
        self, folder: Path, topology: Topology, row: dict[str, str], graphs: dict[tuple[str, str, str], OperatorGraph]
    ) -> None:
        self.folder, self.topology, self.row, self.graphs = folder, topology, row, graphs

    def read(self, where: str) -> Measured:
        measured_s, weight = self.number("measured_s"), self.number("weight", "1")
        if (path := self.row.get("strategy")) is not None:
            plan = Strategy.load(self.folder / path)
            graph = self.graph(self.row.get("graph", plan.graph.name))
            plan.check(graph, plan.cluster)
            name, cluster = path, plan.cluster
            half = plan.options.precision != "as-is"
            said: Any = plan.to_file().model_dump(mode="json", exclude={"prediction", "measurement", "search"})

            def of_strategy(profile: Profile) -> float:
                return step_of_strategy(graph, plan, profile).makespan_s

            predict: Callable[[Profile], float] = of_strategy
        else:
            if "graph" not in self.row:
                raise FileFormatError("it names neither a strategy nor a graph")
            graph, layout, options = self.graph(self.row["graph"]), self.layout(), self.options()
            cluster = self.cluster(self.row["topology"]) if "topology" in self.row else self.topology
            half = options.precision != "as-is"
            name = f"{self.row['graph']}, batch {graph.batch}, {layout.data} x {layout.tensor} x {layout.pipeline}"
            name += f", {layout.microbatches} microbatches" if layout.microbatches > 1 else ""
            said = cluster.name, repr(layout), repr(options)
            if layout.devices != len(cluster.devices):
                raise FileFormatError(
                    f"the layout takes {layout.devices} devices, and {cluster.name} has {len(cluster.devices)}",
                    "The column topology may name another size of the cluster, as dgx-a100:4.",
                )
            predict = _LayoutTime(graph, cluster, layout, options)
        if network_name(cluster.name) != network_name(self.topology.name):
            raise FileFormatError(f"it was measured on {cluster.name}, and the topology is {self.topology.name}")
        own, model = content_hash([graph.content_hash(), said]), f"{graph.name} {self.row.get('seq', '')}".strip()
        return Measured(where, name, own, model, self.row.get("group", ""), weight, measured_s, cluster, half, predict)

    def cluster(self, name: str) -> Topology:
        """Another cluster, with the code of the one that rows were measured on."""
        cluster, code = Topology.load(name), self.topology.code
        return cluster if code is None or cluster.code is None else with_code(cluster, code.kind)

    def number(self, column: str, usual: str = "") -> float:
        """A number above 0, at most ``MOST``."""
        text = self.row.get(column, usual)
        try:
            value = float(text)
        except ValueError:
            value = inf
        if not isfinite(value) or not 0.0 < value <= MOST:
            shown = repr(text) if text else "empty"
            raise FileFormatError(f"{column} is {shown}", f"Give a number above 0, at most {MOST:,.0f}.")
        return value

    def whole(self, column: str, usual: str = "") -> int:
        """A whole number above 0."""
        value = self.number(column, usual)
        if value != int(value):
            raise FileFormatError(f"{column} is {value:g}", "Give a whole number.")
        return int(value)

    def graph(self, name: str) -> OperatorGraph:
        """A file beside the rows, or a shipped graph, of the size that the row says."""
        key = name, self.row.get("batch", ""), self.row.get("seq", "")
        if key not in self.graphs:
            here = self.folder / name
            seq = self.whole("seq") if "seq" in self.row else None
            loaded = OperatorGraph.load(str(here) if here.is_file() else name)
            self.graphs[key] = loaded.resized(self.row.get("batch"), seq)
        return self.graphs[key]

    def layout(self) -> Layout:
        counts: Any = {column: self.whole(column, "1") for column in NUMBERS}
        schedule, states = self.row.get("schedule", "1f1b"), self.row.get("states", "whole")
        if schedule not in get_args(ScheduleKind):
            raise FileFormatError(f"schedule is {schedule!r}", f"Give one of {', '.join(get_args(ScheduleKind))}.")
        kept = {level.name.lower(): level for level in States}
        if states not in kept:
            raise FileFormatError(f"states is {states!r}", f"Give one of {', '.join(kept)}.")
        return Layout(**counts, schedule=schedule, states=kept[states])  # type: ignore[arg-type]

    def options(self) -> Options:
        said: dict[str, Any] = {column: self.row[column] for column in OPTIONS if column in self.row}
        if (again := said.get("reshard_after_forward")) is not None:
            if again.lower() not in ("true", "false"):
                raise FileFormatError(f"reshard_after_forward is {again!r}", "Give true or false.")
            said["reshard_after_forward"] = again.lower() == "true"
        try:
            return Options(**said)
        except ValidationError as error:
            wrong = error.errors()[0]
            raise FileFormatError(f"{wrong['loc'][0]} is {wrong['input']!r}", str(wrong["msg"])) from error


class _LayoutTime:
    """Iteration time (s) of a layout under a profile. Its plan is the one under the first profile that is asked about:
    what was measured does not change with what the figures are thought to be."""

    def __init__(self, graph: OperatorGraph, topology: Topology, layout: Layout, options: Options) -> None:
        self._graph, self._topology, self._layout, self._options = graph, topology, layout, options
        self._simulators: StagedSimulators | None = None

    def __call__(self, profile: Profile) -> float:
        if self._simulators is None:
            self._simulators = StagedSimulators(self._graph, self._topology, profile, self._options)
            self._plan = plan_layout(self._simulators, self._layout, self._options)
        return self._simulators.under(profile).simulator(*self._plan, self._options).seconds


def calibrate(rows: Sequence[Measured], topology: Topology, profile: Profile) -> Calibrated:
    """What measured times teach a profile. Figures that no row depends on are left alone. Raises ProfileError where the
    rows are too few, or of one plan."""
    from flexsearch.measure.learning import PLANS_EACH, corrected, fit, typical

    plans = len({row.group for row in rows})
    distinct = len({row.plan for row in rows})
    if distinct == 1:
        raise ProfileError(
            f"the rows ({len(rows)}) are all of one plan, which does not tell computing from communication",
            "Measure other plans, or other models, too.",
        )
    if len(rows) < PLANS_EACH or plans < 2:
        raise ProfileError(
            f"{len(rows)} rows in {plans} group{'s' if plans != 1 else ''} are too few: a figure takes {PLANS_EACH} "
            "plans, and the rows of a group are left out together to see what the others teach",
            f"Measure at least {PLANS_EACH} plans, of 2 groups.",
        )
    prior = profile.learned or Learned()
    figures, most = _figures(rows, topology, profile, prior), distinct // PLANS_EACH

    def predict(point: np.ndarray[Any, Any], number: int) -> float:
        values = dict(zip((figure.name for figure in figures), point.tolist(), strict=True))
        learned = corrected(prior, topology.name, values)
        try:
            return rows[number].predict(profile.model_copy(update={"learned": learned}))
        except FlexsearchError as error:
            raise error.at(rows[number].where) from error

    names = sorted({row.group for row in rows})
    fitted = fit(
        predict, [row.measured_s for row in rows], figures, weights=np.array([row.weight for row in rows]),
        groups=[names.index(row.group) for row in rows], most=most,
    )  # fmt: skip
    if not fitted.chosen:
        return Calibrated(tuple(rows), profile, fitted, figures, most)
    values = {figures[k].name: float(fitted.point[k]) for k in fitted.chosen}
    own = {figure.name: figure.prior for figure in figures[-2:] if figure.name in ("time", "start_s")}
    used = own | values if any(name in own for name in values) else values
    errors = np.abs(fitted.left_out)
    learned = corrected(prior, topology.name, used).model_copy(
        update={
            "plans": prior.plans + distinct, "error": typical(fitted.left_out),
            "residual": Residual(n=len(rows), median=float(np.median(errors)), p90=float(np.quantile(errors, 0.9))),
        }
    )
    return Calibrated(tuple(rows), profile.model_copy(update={"learned": learned}), fitted, figures, most)


def _figures(
    rows: Sequence[Measured], topology: Topology, profile: Profile, prior: Learned
) -> tuple[Figure, ...]:  # fmt: skip
    """What the rows may teach: where all compute in half precision, or none, figures of the device's efficiency for
    that, as far as its file names them; else the scale of computing and the host's time; where there are several
    devices, what communication takes."""
    from flexsearch.measure.learning import Figure, computing_figures, network_figures

    device = topology.devices[0]
    halves = {row.half for row in rows}
    efficiency, prefix = (device.efficiency, "") if True in halves else (device.efficiency_full, FULL)
    figures: list[Figure] = []
    if efficiency is not None and not profile.entries and len(halves) == 1:
        named = {name: value for name, value in efficiency.model_dump().items() if name in UPPER}
        named |= {TRAFFIC + name: share for name, share in efficiency.traffic.items()}
        for name, value in named.items():
            now = prior.efficiency.get(prefix + name, value)
            spread = 0.5 * now or OF_NONE[name]
            least, most = (value / FAR, value * FAR) if value else (0.0, FAR * FAR * OF_NONE[name])
            least, most = max(least, LEAST * min(1.0, now)), min(most, UPPER.get(name, 1.0))
            figures.append(Figure(prefix + name, now, spread, min(least, now), max(most, now)))
    else:
        overhead_s = max(one.overhead_s for one in topology.devices)
        figures += computing_figures(prior, overhead_s, len(rows))
    if any(len(row.topology.devices) > 1 for row in rows):
        figures += network_figures(prior, topology.name, topology.communication.overhead_s, len(rows))
    return tuple(figures)
