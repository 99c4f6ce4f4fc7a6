"""A whole plan: a config for every operator, stages, options, and the graph and topology it was made for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from flexsearch.errors import FileFormatError, StrategyError, TopologyError
from flexsearch.files import content_hash, printable, save
from flexsearch.graph import OperatorGraph
from flexsearch.graph.resize import options_for
from flexsearch.graph.weight_gradients import owner_of, weight_gradient_of, with_weight_gradients
from flexsearch.quantities import MAX_BYTES, MAX_PIECES
from flexsearch.strategy.config import OperatorConfig, check_config
from flexsearch.strategy.contents import (
    config_files,
    configs_of,
    from_v1,
    options_of,
    stage_files,
    stages_of,
    synchronisation_file,
)
from flexsearch.strategy.files import StrategyFile, StrategyV1, read_strategy
from flexsearch.strategy.records import (
    GraphReference,
    Input,
    Measurement,
    Options,
    Prediction,
    Reference,
    Search,
    check_recompute,
)
from flexsearch.strategy.schedule import check_schedule, ranks_of
from flexsearch.strategy.stage import ScheduleKind, Stage, check_batch, check_stages, is_whole, whole
from flexsearch.topology import Topology


class Strategy:
    """A config for every operator of one graph on one topology. Immutable by convention.

    ``stages``: which operators run on which mesh; by default one stage on all devices. ``microbatches``: into how many
    parts the batch is split in time. ``schedule``: in which order devices run the stages' microbatches; of no effect
    with one stage and one microbatch. ``orders``: their actions, by group of devices ("0F0 0I0 0W0 ..."), where these
    are not what the schedule, "zero-bubble", says.
    """

    def __init__(
        self,
        graph: GraphReference,
        inputs: tuple[Input, ...],
        cluster: Topology,
        configs: Mapping[str, OperatorConfig],
        options: Options | None = None,
        prediction: Prediction | None = None,
        search: Search | None = None,
        *,
        stages: Sequence[Stage] = (),
        microbatches: int = 1,
        schedule: ScheduleKind = "1f1b",
        orders: Sequence[str] = (),
        measurement: Measurement | None = None,
    ) -> None:
        self.graph, self.inputs, self.cluster = graph, inputs, cluster
        self.topology = Reference(name=cluster.name, hash=cluster.content_hash())
        self.configs = _in_pairs(configs)
        self.stages = _with_pairs(stages, self.configs) or whole(tuple(self.configs), cluster)
        self.microbatches, self.schedule, self.orders = microbatches, schedule, tuple(orders)
        self.options = options or Options()
        self.prediction, self.measurement, self.search = prediction, measurement, search
        self.example: tuple[Any, Any, Any] | None = None
        """What ``optimize`` was called with: inputs and targets, without values, and the loss. Not part of the file."""

    @classmethod
    def make(
        cls,
        graph: OperatorGraph,
        topology: Topology,
        configs: Mapping[str, OperatorConfig],
        options: Options | None = None,
        prediction: Prediction | None = None,
        search: Search | None = None,
        *,
        stages: Sequence[Stage] = (),
        microbatches: int = 1,
        schedule: ScheduleKind = "1f1b",
        orders: Sequence[str] = (),
    ) -> Strategy:
        """Strategy for this graph and topology, checked. Raises StrategyError."""
        reference = GraphReference(name=graph.name, hash=graph.content_hash(), tracing=graph.tracing)
        inputs = tuple(Input(name=t.name, shape=t.shape, dtype=t.dtype) for t in graph.of_kind("input"))
        strategy = cls(
            reference, inputs, topology, configs, options, prediction, search, stages=stages,
            microbatches=microbatches, schedule=schedule, orders=orders,
        )  # fmt: skip
        strategy.check(graph, topology)
        return strategy

    @property
    def weight_gradients(self) -> tuple[str, ...]:
        """Operators whose weights' gradients have a split of their own: that of another operator
        (``graph.weight_gradients``)."""
        return tuple(owner for owner in map(owner_of, self.configs) if owner in self.configs)

    def undivided(self) -> Strategy:
        """The same plan with all gradients of weights split as the rest of their operators, without what was said of
        it."""
        pairs = set(map(weight_gradient_of, self.weight_gradients))
        stages = [replace(s, operators=tuple(n for n in s.operators if n not in pairs)) for s in self.stages]
        return Strategy(
            self.graph, self.inputs, self.cluster, {n: c for n, c in self.configs.items() if n not in pairs},
            self.options, stages=stages, microbatches=self.microbatches, schedule=self.schedule, orders=self.orders,
        )  # fmt: skip

    def planned(self, graph: OperatorGraph) -> OperatorGraph:
        """The graph that is planned: ``graph``, with operators of their own for those gradients. Raises
        StrategyError."""
        return with_weight_gradients(graph, self.weight_gradients)

    def in_order(self, graph: OperatorGraph) -> tuple[OperatorConfig, ...]:
        """The configs in the order of the graph's operators."""
        return tuple(self.configs[op.name] for op in graph.operators)

    def check(self, graph: OperatorGraph, topology: Topology) -> None:
        """Raise StrategyError unless this strategy was made for ``graph`` and ``topology`` and is legal there."""
        self._check_hashes(graph, topology)
        graph = self.planned(graph)
        _check_together(graph, topology, self.stages)
        expected = tuple(Input(name=t.name, shape=t.shape, dtype=t.dtype) for t in graph.of_kind("input"))
        if self.inputs != expected:
            raise StrategyError(
                "inputs are not those of the graph; was the strategy edited?", "Run `flexsearch optimize` again."
            )
        missing = [op.name for op in graph.operators if op.name not in self.configs]
        extra = sorted(set(self.configs) - set(graph.index))
        if missing or extra:
            text = f"no config for {missing[:3]}" if missing else f"configs for unknown operators {extra[:3]}"
            raise StrategyError(f"the strategy has {text}; was it edited?", "Run `flexsearch optimize` again.")
        for op in graph.operators:
            check_config(op, self.configs[op.name], len(topology.devices))
            if op.half == "weights" and self.configs[op.name].states:
                raise StrategyError(
                    f"operator {op.name!r} cannot say how states of weights are kept",
                    f"Let {owner_of(op.name)!r} say it.",
                )
        check_stages(graph, self.stages, self.configs, len(topology.devices))
        if not self.orders and (len(self.stages) > 1 or self.microbatches > 1):  # else it is of no effect
            check_schedule(self.schedule, ranks_of([stage.positions for stage in self.stages]), self.microbatches)
        check_recompute(self.options, len(self.stages))
        check_batch(graph.batch, max(stage.replicas for stage in self.stages), self.microbatches)

    @property
    def is_plain(self) -> bool:
        """Whether there is one stage, on all devices in their order, and one microbatch."""
        return is_whole(self.stages, self.cluster) and self.microbatches == 1

    def check_supported(self, graph: OperatorGraph, topology: Topology) -> None:
        """Raise StrategyError unless :meth:`check` passes and the strategy has one stage on all devices, one
        microbatch, and no split of weights' gradients, as the search over configs takes it."""
        self.check(graph, topology)
        self._check_plain()
        if self.weight_gradients:
            raise StrategyError(
                f"operators.{self.weight_gradients[0]}.weight_gradient: the search goes on from plans in which "
                "gradients of weights are split as the rest",
                "Remove it from the file, and search with --weight-gradients.",
            )

    def _check_plain(self) -> None:
        remedy = "Remove {} from the file, or run `flexsearch optimize` again."
        if not is_whole(self.stages, self.cluster):
            count = f"{len(self.stages)} stages" if len(self.stages) > 1 else "a stage with a mesh of its own"
            raise StrategyError(
                f"stages: the strategy has {count}; the search over configs takes plans with one stage on all devices",
                remedy.format("`stages`, and give positions among all devices,"),
            )
        if self.microbatches > 1:
            raise StrategyError(
                f"microbatches: the strategy has {self.microbatches}; the search over configs takes plans with one",
                remedy.format("`microbatches`"),
            )

    def _check_hashes(self, graph: OperatorGraph, topology: Topology) -> None:
        for what, reference, name, digest in (
            ("graph", self.graph, graph.name, graph.content_hash()),
            ("topology", self.topology, topology.name, topology.content_hash()),
        ):
            if reference.hash != digest:
                remedy = f"Give the {what} it was made for, or run `flexsearch optimize` again."
                if what == "graph" and (options := self.resizing(graph)):
                    remedy = f"It was made for another batch or sequence length: give {options}."
                raise StrategyError(
                    f"this strategy was made for {what} {reference.name!r} ({reference.hash}), not for {name!r} "
                    f"({digest})",
                    remedy,
                )

    def resizing(self, graph: OperatorGraph) -> str:
        """The options ("--batch 512 --seq 2048") that make ``graph`` the one this was made for; empty if they need not
        or cannot."""
        inputs = graph.of_kind("input")
        if not inputs or [(x.name, x.dtype) for x in self.inputs] != [(t.name, t.dtype) for t in inputs]:
            return ""
        return options_for(graph, self.inputs[0].shape, self.graph.hash)

    @cached_property
    def devices(self) -> tuple[int, ...]:
        """All devices used, ascending."""
        return tuple(sorted({d for config in self.configs.values() for d in config.devices}))

    def content_hash(self) -> str:
        """Digest of what is executed: configs, options, graph and topology; not of predictions, measurements or the
        search."""
        notes = {"prediction", "measurement", "search"}
        return content_hash(self.to_file().model_dump(mode="json", exclude=notes, exclude_none=True))

    def to_file(self) -> StrategyFile:
        """The file contents."""
        plain = is_whole(self.stages, self.cluster)
        return StrategyFile(
            graph=self.graph,
            inputs=self.inputs,
            topology=self.topology,
            cluster=self.cluster,
            optimizer=self.options.optimizer,
            precision=None if self.options.precision == "as-is" else self.options.precision,
            gradients=None if self.options.gradients == "as-is" else self.options.gradients,
            recompute=None if self.options.recompute == "none" else self.options.recompute,
            recompute_blocks=self.options.recompute_blocks,
            synchronisation=synchronisation_file(self.options),
            stages=None if plain else stage_files(self.stages, self.configs),
            schedule=None if plain and self.microbatches == 1 else "auto" if self.orders else self.schedule,
            orders=self.orders or None,
            microbatches=None if self.microbatches == 1 else self.microbatches,
            operators=config_files(self.stages, self.configs),
            prediction=self.prediction,
            measurement=self.measurement,
            search=self.search,
        )

    @classmethod
    def from_file(cls, file: StrategyFile | StrategyV1) -> Strategy:
        """The strategy that a file holds; ``check`` it against a graph and a topology before use. Raises StrategyError
        for stages and positions that contradict each other."""
        if isinstance(file, StrategyV1):
            configs, options, search = from_v1(file)
            return cls(file.graph, file.inputs, file.cluster, configs, options, file.prediction, search)
        stages = stages_of(file)
        return cls(
            file.graph, file.inputs, file.cluster, configs_of(file, stages), options_of(file), file.prediction,
            file.search, stages=stages, microbatches=file.microbatches or 1,
            schedule="zero-bubble" if file.schedule == "auto" else file.schedule or "1f1b", orders=file.orders or (),
            measurement=file.measurement,
        )  # fmt: skip

    def save(self, path: str | Path) -> None:
        """Write the strategy file, atomically."""
        save(self.to_file(), path)

    @classmethod
    def load(cls, path: str | Path) -> Strategy:
        """Read a strategy file of any version. Raises FileFormatError that names the wrong field."""
        where = f"strategy file {printable(str(path))}"
        try:
            return cls.from_file(read_strategy(path))
        except TopologyError as error:  # pydantic hands it on without its place
            raise FileFormatError(f"{where}: cluster.{error.message}", error.remedy) from error
        except StrategyError as error:
            raise FileFormatError(f"{where}: {error.message}", error.remedy) from error

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Strategy) and self.to_file() == other.to_file()

    __hash__ = None  # type: ignore[assignment]  # holds a dict


def _check_together(graph: OperatorGraph, topology: Topology, stages: Sequence[Stage]) -> None:
    """Raise StrategyError if the graph is too large for so many devices: bytes over a link must fit an int64, and the
    work grows with operators and devices (those of one replica of each stage)."""
    devices, operators = len(topology.devices), len(graph.operators)
    pieces = sum(len(stage.operators) * len(stage.positions) for stage in stages)
    nbytes = sum(tensor.nbytes for tensor in graph.tensors)
    if nbytes * pieces // operators >= MAX_BYTES or pieces > MAX_PIECES:
        raise StrategyError(
            f"graph {graph.name!r} on topology {topology.name!r} is too large: {operators:,} operators and "
            f"{nbytes:.3g} bytes on {devices:,} devices (operators x devices: at most {MAX_PIECES:,}; "
            f"bytes x devices: below 2^60)",
            "Plan for fewer devices, or for a part of the model.",
        )


def _in_pairs(configs: Mapping[str, OperatorConfig]) -> dict[str, OperatorConfig]:
    """The configs in an order in which what makes the gradients of an operator's weights comes right before it."""
    ordered: dict[str, OperatorConfig] = {}
    for name, config in configs.items():
        if owner_of(name) not in configs:
            if (other := weight_gradient_of(name)) in configs:
                ordered[other] = configs[other]
            ordered[name] = config
    return ordered


def _with_pairs(stages: Sequence[Stage], configs: Mapping[str, OperatorConfig]) -> tuple[Stage, ...]:
    """Stages of which each has, right before its operators, what makes the gradients of their weights."""
    return tuple(
        replace(
            stage,
            operators=tuple(
                member
                for name in stage.operators
                if owner_of(name) not in configs
                for member in (weight_gradient_of(name), name)
                if member == name or member in configs
            ),
        )
        for stage in stages
    )
