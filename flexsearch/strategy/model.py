"""A whole plan: a config for every operator, options, and the graph and topology it was made for; as a JSON file."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from flexsearch.errors import FileFormatError, StrategyError, TopologyError
from flexsearch.files import FileModel, content_hash, load, printable, save
from flexsearch.graph import Dtype, OperatorGraph, Tracing
from flexsearch.quantities import (
    MAX_BYTES,
    MAX_DEVICES,
    MAX_PIECES,
    Capacity,
    Count,
    Degree,
    DeviceIndex,
    Digest,
    Name,
    PredictedSeconds,
    Seed,
    Shape,
    Text,
)
from flexsearch.strategy.config import OperatorConfig, check_config, read_pin
from flexsearch.topology import Topology


class Options(FileModel):
    """What is chosen for the whole step. ``bucket_bytes``: gradients are synchronised in buckets of about this size.
    ``optimizer``: how much state an update reads and writes (none, one, or two tensors per weight). ``prefetch``: a
    sharded weight is gathered so many operators with weights before the first one that reads it."""

    bucket_bytes: Capacity = 25 * 2**20
    optimizer: Literal["sgd", "momentum", "adam"] = "momentum"
    prefetch: Count = 1


class Made(FileModel):
    """What a file was made for: the name for people, the hash for the check."""

    name: Text
    hash: Digest


class MadeGraph(Made):
    """The graph, and how its model must be imported to give it again."""

    tracing: Tracing = Tracing()


class Prediction(FileModel):
    """What the simulator said when the strategy was made."""

    iteration_s: PredictedSeconds
    data_parallel_s: PredictedSeconds | None = None
    peak_bytes: Annotated[int, Field(ge=0)] | None = None


class Search(FileModel):
    """How the strategy was found: with a budget of proposals, the same graph, topology, options, pins and seed give the
    same strategy. ``proposals``, ``climbs``: made so far, searches that it was resumed from included. ``start``: what
    led to it. ``optimal``: no change of one operator is known to make it faster. ``bound_s``: no plan is faster."""

    seed: Seed
    proposals: Count
    climbs: Count = 0
    start: Text = ""
    pins: tuple[Text, ...] = ()
    optimal: bool = False
    bound_s: PredictedSeconds | None = None

    @field_validator("pins")
    @classmethod
    def _readable(cls, pins: tuple[str, ...]) -> tuple[str, ...]:
        for pin in pins:
            try:
                read_pin(pin)
            except StrategyError as error:
                raise ValueError(error.message) from error
        return pins


class _ConfigFile(FileModel):
    degrees: dict[Name, Degree] = Field(default_factory=dict)
    devices: Annotated[tuple[DeviceIndex, ...], Field(min_length=1, max_length=MAX_DEVICES)]
    replicas: Degree = 1
    shard_weights: bool = False


class Input(FileModel):
    """A tensor that the model is fed: enough to trace the model again where the strategy is used."""

    name: Name
    shape: Shape
    dtype: Dtype


class StrategyFile(FileModel):
    """Contents of a strategy file. ``cluster`` is the topology itself: training code needs no second file."""

    format: Literal["flexsearch.strategy/1"] = "flexsearch.strategy/1"
    graph: MadeGraph
    inputs: tuple[Input, ...]
    topology: Made
    cluster: Topology
    options: Options = Options()
    operators: dict[Name, _ConfigFile]
    prediction: Prediction | None = None
    search: Search | None = None

    @model_validator(mode="after")
    def _untouched(self) -> StrategyFile:
        if self.cluster.content_hash() != self.topology.hash:
            raise ValueError("topology.hash is not that of the cluster; was the file edited?")
        return self


def _check_together(graph: OperatorGraph, topology: Topology) -> None:
    """Raise StrategyError if the graph is too large for so many devices: bytes over a link must fit an int64, and the
    work grows with operators and devices."""
    devices, operators = len(topology.devices), len(graph.operators)
    nbytes = sum(tensor.nbytes for tensor in graph.tensors)
    if nbytes * devices >= MAX_BYTES or operators * devices > MAX_PIECES:
        raise StrategyError(
            f"graph {graph.name!r} on topology {topology.name!r} is too large: {operators:,} operators and "
            f"{nbytes:.3g} bytes on {devices:,} devices (operators x devices: at most {MAX_PIECES:,}; "
            f"bytes x devices: below 2^60)",
            "Plan for fewer devices, or for a part of the model.",
        )


class Strategy:
    """A config for every operator of one graph on one topology. Immutable by convention."""

    def __init__(
        self,
        graph: MadeGraph,
        inputs: tuple[Input, ...],
        cluster: Topology,
        configs: Mapping[str, OperatorConfig],
        options: Options | None = None,
        prediction: Prediction | None = None,
        search: Search | None = None,
    ) -> None:
        self.graph, self.inputs, self.cluster = graph, inputs, cluster
        self.topology = Made(name=cluster.name, hash=cluster.content_hash())
        self.configs = dict(configs)
        self.options = options or Options()
        self.prediction, self.search = prediction, search

    @classmethod
    def make(
        cls,
        graph: OperatorGraph,
        topology: Topology,
        configs: Mapping[str, OperatorConfig],
        options: Options | None = None,
        prediction: Prediction | None = None,
        search: Search | None = None,
    ) -> Strategy:
        """Strategy for this graph and topology, checked. Raises StrategyError."""
        made = MadeGraph(name=graph.name, hash=graph.content_hash(), tracing=graph.tracing)
        inputs = tuple(Input(name=t.name, shape=t.shape, dtype=t.dtype) for t in graph.of_kind("input"))
        strategy = cls(made, inputs, topology, configs, options, prediction, search)
        strategy.check(graph, topology)
        return strategy

    def in_order(self, graph: OperatorGraph) -> tuple[OperatorConfig, ...]:
        """The configs in the order of the graph's operators."""
        return tuple(self.configs[op.name] for op in graph.operators)

    def check(self, graph: OperatorGraph, topology: Topology) -> None:
        """Raise StrategyError unless this strategy was made for ``graph`` and ``topology`` and is legal there."""
        for what, made, name, found in (
            ("graph", self.graph, graph.name, graph.content_hash()),
            ("topology", self.topology, topology.name, topology.content_hash()),
        ):
            if made.hash != found:
                raise StrategyError(
                    f"this strategy was made for {what} {made.name!r} ({made.hash}), not for {name!r} ({found}). "
                    f"Give the {what} it was made for, or run `flexsearch optimize` again."
                )
        _check_together(graph, topology)
        expected = tuple(Input(name=t.name, shape=t.shape, dtype=t.dtype) for t in graph.of_kind("input"))
        if self.inputs != expected:
            raise StrategyError(
                "inputs are not those of the graph; was the strategy edited?", "Run `flexsearch optimize` again."
            )
        missing = [op.name for op in graph.operators if op.name not in self.configs]
        extra = sorted(set(self.configs) - set(graph.index))
        if missing or extra:
            text = f"no config for {missing[:3]}" if missing else f"configs for unknown operators {extra[:3]}"
            raise StrategyError(f"the strategy has {text}; was it edited? Run `flexsearch optimize` again.")
        for op in graph.operators:
            check_config(op, self.configs[op.name], len(topology.devices))

    @cached_property
    def devices(self) -> tuple[int, ...]:
        """All devices used, ascending."""
        return tuple(sorted({d for config in self.configs.values() for d in config.devices}))

    def content_hash(self) -> str:
        """Digest of what is executed: configs, options, graph and topology; not of predictions or the search."""
        return content_hash(self.to_file().model_dump(mode="json", exclude={"prediction", "search"}))

    def to_file(self) -> StrategyFile:
        """The file contents."""
        return StrategyFile(
            graph=self.graph,
            inputs=self.inputs,
            topology=self.topology,
            cluster=self.cluster,
            options=self.options,
            operators={
                name: _ConfigFile(
                    degrees=dict(c.degrees), devices=c.devices, replicas=c.replicas, shard_weights=c.shard_weights
                )
                for name, c in self.configs.items()
            },
            prediction=self.prediction,
            search=self.search,
        )

    @classmethod
    def from_file(cls, file: StrategyFile) -> Strategy:
        """The strategy that a file holds; ``check`` it against a graph and a topology before use."""
        configs = {
            name: OperatorConfig(tuple(c.degrees.items()), c.devices, c.replicas, c.shard_weights)
            for name, c in file.operators.items()
        }
        return cls(file.graph, file.inputs, file.cluster, configs, file.options, file.prediction, file.search)

    def save(self, path: str | Path) -> None:
        """Write the strategy file, atomically."""
        save(self.to_file(), path)

    @classmethod
    def load(cls, path: str | Path) -> Strategy:
        """Read a strategy file. Raises FileFormatError that names the wrong field."""
        try:
            return cls.from_file(load(StrategyFile, path, "strategy"))
        except TopologyError as error:  # pydantic hands it on without its place
            where = f"strategy file {printable(str(path))}: cluster.{error.message}"
            raise FileFormatError(where, error.remedy) from error

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Strategy) and self.to_file() == other.to_file()

    __hash__ = None  # type: ignore[assignment]  # holds a dict
