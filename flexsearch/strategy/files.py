"""The strategy file: ``flexsearch.strategy/2``, and ``/1``, which is still read. Plain data (see ``contents``).

What is as in the plain case is left out: one stage on all devices in their order, one microbatch, an operator on every
position of its mesh, weights kept whole.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from flexsearch.files import FileModel, parse, printable, read_json
from flexsearch.graph.precision import Precision
from flexsearch.quantities import MAX_DEVICES, Capacity, Count, Degree, DeviceIndex, Name
from flexsearch.strategy.positions import Numbers
from flexsearch.strategy.records import (
    Blocks,
    GraphReference,
    Input,
    Measurement,
    OptimizerName,
    Options,
    Prediction,
    Recipes,
    Recompute,
    Reference,
    Search,
    SearchRecord,
    SynchroniseBy,
    check_gradients,
)
from flexsearch.strategy.stage import ScheduleKind
from flexsearch.topology import Topology

StatesName = Literal["whole", "optimizer", "gradients", "weights", "sharded"]
"""``States`` in files; ``sharded`` is an older word for ``weights``."""


class OperatorRange(FileModel):
    """Operators from ``first`` to ``last``, in the order of the file's ``operators``."""

    first: Name
    last: Name


class StageFile(FileModel):
    """A stage. ``operators``: names, or a range; left out where there is one stage. ``mesh``: its devices in order,
    by index into the topology; or ``axes``, all devices by the axes of the topology, the slowest first; left out: all
    devices in their order. ``replicas``: so many equal parts of the mesh run the stage."""

    operators: tuple[Name, ...] | None = None
    range: OperatorRange | None = None
    mesh: Numbers | None = None
    axes: Literal["hosts x devices", "devices x hosts"] | None = None
    replicas: Degree | None = None

    @model_validator(mode="after")
    def _once(self) -> StageFile:
        if self.operators is not None and self.range is not None:
            raise ValueError("gives both operators and a range; remove one of them")
        if self.mesh is not None and self.axes is not None:
            raise ValueError("gives both a mesh and axes; remove one of them")
        return self


class SplitFile(FileModel):
    """Into which pieces something is split. ``shares``: relative sizes of the parts of samples, where they are not
    equal. ``positions``: who computes each piece, as positions in the mesh of the operator's stage; left out: all of
    them in order."""

    degrees: dict[Name, Degree] | None = None
    shares: dict[Name, tuple[Degree, ...]] | None = None
    positions: Numbers | None = None
    replicas: Degree | None = None


class ConfigFile(SplitFile):
    """How an operator is split. ``weight_gradient``: the same of what makes the gradients of its weights, where that is
    not split as the rest. ``states``: which states of its weights are kept in parts; ``sharded_over``: by groups of so
    many devices, left out: by all."""

    weight_gradient: SplitFile | None = None
    states: StatesName | None = None
    sharded_over: Degree | None = None


class SynchronisationFile(FileModel):
    """How replicas of weights come to agree; fields as of ``Options``. What is the usual is left out."""

    bucket_bytes: Capacity
    synchronise_by: SynchroniseBy | None = None
    prefetch: Count | None = None
    reshard_after_forward: bool | None = None
    recipes: Recipes | None = None


Order = Annotated[str, Field(pattern=r"^\d{1,6}[FBIW]\d{1,6}( \d{1,6}[FBIW]\d{1,6})*$", max_length=2**22)]
"""Actions as PyTorch's pipelining writes them: "0F0 0F1 0B0 0B1"."""


class StrategyFile(FileModel):
    """Contents of a strategy file. ``cluster`` is the topology itself: training code needs no second file. ``orders``:
    what the devices run with the schedule "auto", by group of devices that hold the same stages, in the order of their
    first stages."""

    format: Literal["flexsearch.strategy/2"] = "flexsearch.strategy/2"
    graph: GraphReference
    inputs: tuple[Input, ...]
    topology: Reference
    cluster: Topology
    optimizer: OptimizerName = "momentum"
    precision: Precision | None = None
    gradients: Literal["float32"] | None = None
    recompute: Recompute | None = None
    recompute_blocks: Blocks | None = None
    synchronisation: SynchronisationFile
    stages: Annotated[tuple[StageFile, ...], Field(min_length=1, max_length=MAX_DEVICES)] | None = None
    schedule: ScheduleKind | Literal["auto"] | None = None
    orders: Annotated[tuple[Order, ...], Field(min_length=1, max_length=MAX_DEVICES)] | None = None
    microbatches: Annotated[Count, Field(ge=1)] | None = None
    operators: dict[Name, ConfigFile]
    prediction: Prediction | None = None
    measurement: Measurement | None = None
    search: Search | None = None

    _suit = field_validator("gradients")(check_gradients)

    @model_validator(mode="after")
    def _consistent(self) -> StrategyFile:
        _check_cluster(self.cluster, self.topology)
        if (self.schedule == "auto") != (self.orders is not None):
            raise ValueError("gives only one of schedule auto and orders; give both, or another schedule alone")
        if self.stages is not None and len(self.stages) > 1:
            for number, stage in enumerate(self.stages):
                if stage.operators is None and stage.range is None:
                    raise ValueError(f"stages.{number} needs operators or a range, because there are several stages")
        return self


class SearchV1(SearchRecord):
    """As ``Search``, with ``optimal`` for what is locally optimal."""

    optimal: bool = False


class OptionsV1(FileModel):
    """Options of version 1."""

    bucket_bytes: Capacity = Options().bucket_bytes
    optimizer: OptimizerName = "momentum"


class ConfigV1(FileModel):
    """A config of version 1, with devices of the topology."""

    degrees: dict[Name, Degree] = Field(default_factory=dict)
    devices: Annotated[tuple[DeviceIndex, ...], Field(min_length=1, max_length=MAX_DEVICES)]
    replicas: Degree = 1
    shard_weights: bool = False


class StrategyV1(FileModel):
    """Contents of a strategy file of version 1: one stage, one microbatch."""

    format: Literal["flexsearch.strategy/1"] = "flexsearch.strategy/1"
    graph: GraphReference
    inputs: tuple[Input, ...]
    topology: Reference
    cluster: Topology
    options: OptionsV1 = OptionsV1()
    operators: dict[Name, ConfigV1]
    prediction: Prediction | None = None
    search: SearchV1 | None = None

    @model_validator(mode="after")
    def _consistent(self) -> StrategyV1:
        _check_cluster(self.cluster, self.topology)
        return self


def _check_cluster(cluster: Topology, reference: Reference) -> None:
    if cluster.content_hash() != reference.hash:
        raise ValueError("topology.hash is not that of the cluster; was the file edited?")


def read_strategy(path: str | Path) -> StrategyFile | StrategyV1:
    """A strategy file of either version. Raises FileFormatError that names the wrong field."""
    data, source = read_json(path, "strategy"), f"file {printable(str(path))}"
    if isinstance(data, dict) and data.get("format") == "flexsearch.strategy/1":
        return parse(StrategyV1, data, source, "strategy")
    return parse(StrategyFile, data, source, "strategy")
