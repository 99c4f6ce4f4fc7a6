"""Variants of a plan with stages and microbatches: the same with one part of another plan, or with one number, order or
option changed; and what each would cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, get_args

from flexsearch.cost import Profile
from flexsearch.errors import FlexsearchError
from flexsearch.graph import OperatorGraph
from flexsearch.graph.precision import Gradients, Precision
from flexsearch.simulate.staged import StagedSimulators
from flexsearch.strategy import OperatorConfig, Options, Sharding, States, Strategy
from flexsearch.strategy.config import check_config
from flexsearch.strategy.pipeline import Pipeline
from flexsearch.strategy.stage import ScheduleKind
from flexsearch.topology import Topology

Part = Literal[
    "devices", "borders", "schedule", "microbatches", "sharding", "bucket_bytes", "synchronise_by", "optimizer",
    "precision", "gradients", "prefetch", "recompute", "recompute_blocks", "reshard_after_forward",
]  # fmt: skip
PARTS: Final[dict[Part, str]] = {
    "devices": "data x tensor x pipeline", "borders": "borders of stages", "schedule": "schedule",
    "microbatches": "microbatches", "sharding": "sharded states", "precision": "precision",
    "gradients": "gradients of weights",
    "recompute": "recomputation", "recompute_blocks": "blocks computed again",
    "reshard_after_forward": "second gather of sharded weights",
    "prefetch": "prefetch of sharded weights", "bucket_bytes": "gradient buckets",
    "synchronise_by": "gradients summed by", "optimizer": "optimizer",
}  # fmt: skip
"""Parts in which plans differ, in words. ``devices``: which devices each stage has; borders and splits go with them."""


@dataclass(frozen=True)
class Plan:
    """A plan of one graph. ``configs``: one for each operator, by positions in the mesh of its stage, with weights
    whole; ``shardings``: by operator."""

    pipeline: Pipeline
    configs: tuple[OperatorConfig, ...]
    shardings: tuple[Sharding, ...]
    options: Options

    @classmethod
    def of(cls, strategy: Strategy, graph: OperatorGraph) -> Plan:
        """That of a strategy (checked). Raises StrategyError as ``Pipeline.of``."""
        graph = strategy.planned(graph)
        pipeline, configs = Pipeline.of(strategy, graph), strategy.in_order(graph)
        places = [{d: k for k, d in enumerate(mesh)} for mesh in _meshes(pipeline, len(configs))]
        return cls(
            pipeline,
            tuple(
                config.on(place[d] for d in config.devices).sharded(States.WHOLE)
                for config, place in zip(configs, places, strict=True)
            ),
            tuple(config.sharding for config in configs), strategy.options,
        )  # fmt: skip

    def placed(self) -> tuple[OperatorConfig, ...]:
        """The configs on the devices of their stages. Raises IndexError where a stage has too few."""
        meshes = _meshes(self.pipeline, len(self.configs))
        return tuple(
            config.on(mesh[k] for k in config.devices).sharded(*sharding)
            for config, mesh, sharding in zip(self.configs, meshes, self.shardings, strict=True)
        )

    def differing(self, other: Plan) -> list[Part]:
        """In what this plan differs from another, beside the splits of operators."""
        if self._devices != other._devices:
            parts: list[Part] = ["devices"]
        else:
            own: dict[Part, bool] = {
                "borders": self.pipeline.first != other.pipeline.first, "sharding": self.shardings != other.shardings,
            }  # fmt: skip
            parts = [part for part, differs in own.items() if differs]
        if self.pipeline.orders != other.pipeline.orders or self.pipeline.schedule != other.pipeline.schedule:
            parts.append("schedule")
        alone = [part for part in PARTS if part == "microbatches" or part in Options.model_fields]
        return parts + [part for part in alone if self.value(part) != other.value(part)]

    def is_within(self, host: int) -> bool:
        """Whether a host of so many devices has several replicas, but not all."""
        block = len({device for devices in self.pipeline.devices for device in devices})
        return 1 < host // block < self.pipeline.replicas and host % block == 0

    def value(self, part: Part) -> object:
        """What a part is here: a number, a name; of the devices, of each stage."""
        if part == "devices":
            ranks, tensor = len(set(self.pipeline.devices)), max(map(len, self.pipeline.devices))
            return f"{self.pipeline.replicas} x {tensor} x {ranks}"
        if part == "borders":
            return ", ".join(map(str, self.pipeline.first[1:]))
        if part == "schedule" and self.pipeline.orders:
            return "its own"
        if part == "sharding":
            kept = sorted({sharding for sharding in self.shardings if sharding.states}, key=lambda one: one.rank)
            words = (states.name.lower() + (f" over {over} devices" if over else "") for states, over in kept)
            return " and ".join(words) or "whole"
        return getattr(self.options if part in Options.model_fields else self.pipeline, part)

    @property
    def _devices(self) -> tuple[int, tuple[tuple[int, ...], ...]]:
        return self.pipeline.replicas, self.pipeline.devices

    def having(self, part: Part, other: Plan) -> Plan:
        """This plan with a part of another."""
        if part == "devices":
            pipeline = replace(
                self.pipeline, replicas=other.pipeline.replicas, first=other.pipeline.first,
                devices=other.pipeline.devices,
            )  # fmt: skip
            return Plan(pipeline, other.configs, other.shardings, self.options)
        if part == "sharding":
            return replace(self, shardings=other.shardings)
        if part in Options.model_fields:
            return replace(self, options=self.options.model_copy(update={part: getattr(other.options, part)}))
        pipeline = other.pipeline
        if part == "schedule":
            changed = replace(self.pipeline, schedule=pipeline.schedule, orders=pipeline.orders)
        elif part == "microbatches":
            changed = replace(self.pipeline, microbatches=pipeline.microbatches)
        else:
            changed = replace(self.pipeline, first=pipeline.first)
        return replace(self, pipeline=changed)

    def splitting(self, operators: Sequence[int], other: Plan) -> Plan:
        """This plan with some operators split as in another."""
        chosen = set(operators)
        configs = (theirs if i in chosen else own for i, (own, theirs) in enumerate(self._beside(other)))
        return replace(self, configs=tuple(configs))

    def _beside(self, other: Plan) -> Iterator[tuple[OperatorConfig, OperatorConfig]]:
        return zip(self.configs, other.configs, strict=True)

    def neighbours(self, host: int = 0) -> Iterator[tuple[Part, Plan]]:
        """Plans that differ in the schedule, the number of microbatches, what is computed or gathered again, how far
        ahead it is gathered, or the sharding alone; not all are legal. ``host``: devices of a host, over which weights
        may be sharded; 0: none."""
        pipeline, options = self.pipeline, self.options
        if len(pipeline.devices) > 1:
            for kind in get_args(ScheduleKind):
                if kind != pipeline.schedule or pipeline.orders:
                    yield "schedule", replace(self, pipeline=replace(pipeline, schedule=kind, orders=()))
        for count in (2 * pipeline.microbatches, pipeline.microbatches // 2):
            if count:
                yield "microbatches", replace(self, pipeline=replace(pipeline, microbatches=count))
        for again in ("none", "attention", "full"):
            if again != options.recompute:
                changed = {"recompute": again, "recompute_blocks": None}
                yield "recompute", replace(self, options=options.model_copy(update=changed))
        if any(sharding.states == States.WEIGHTS for sharding in self.shardings):
            other = options.model_copy(update={"reshard_after_forward": not options.reshard_after_forward})
            yield "reshard_after_forward", replace(self, options=other)
        if any(sharding.states for sharding in self.shardings):
            for depth in {2 * options.prefetch or 1, options.prefetch // 2} - {options.prefetch}:
                yield "prefetch", replace(self, options=options.model_copy(update={"prefetch": depth}))
        if pipeline.replicas > 1:
            inside = [Sharding(states, host) for states in States if states and self.is_within(host)]
            for sharding in (*map(Sharding, States), *inside):
                if {own for own in self.shardings if own.states} != ({sharding} if sharding.states else set()):
                    yield "sharding", replace(self, shardings=(sharding,) * len(self.shardings))


def _meshes(pipeline: Pipeline, operators: int) -> list[tuple[int, ...]]:
    """By operator, the devices of its stage."""
    ends = [*pipeline.first[1:], operators]
    return [mesh for mesh, a, b in zip(pipeline.devices, pipeline.first, ends, strict=True) for _ in range(a, b)]


@dataclass(frozen=True)
class Outcome:
    """``seconds``: of a step, None where the variant is not legal; ``missing``: bytes that the fullest device lacks;
    ``shortfall``: as of an evaluation; ``remark``: why it is not legal."""

    seconds: float | None
    missing: int = 0
    shortfall: float = 0.0
    remark: str = ""


class Variants:
    """What plans of one graph on one topology cost."""

    def __init__(self, graph: OperatorGraph, topology: Topology, profile: Profile | None) -> None:
        self.graph, self.topology, self.profile = graph, topology, profile
        self._simulators: dict[tuple[Precision, Gradients], StagedSimulators] = {}

    def outcome(self, plan: Plan) -> Outcome:
        """A plan, simulated."""
        types = plan.options.precision, plan.options.gradients
        if types not in self._simulators:
            self._simulators[types] = StagedSimulators(self.graph, self.topology, self.profile, plan.options)
        simulators, pipeline = self._simulators[types], plan.pipeline
        try:
            configs = plan.placed()
            share, _, _ = simulators.share(pipeline.replicas, pipeline.microbatches)
            for op, config in zip(share.graph.operators, configs, strict=True):
                check_config(op, config, len(share.topology.devices))
            simulator = simulators.exact(pipeline, configs, plan.options)
        except FlexsearchError as error:
            return Outcome(None, remark=error.message)
        except IndexError:
            return Outcome(None, remark="a stage has fewer devices")
        room = [device.usable_bytes for device in simulator.topology.devices]
        missing = (int(peak) - most for peak, most in zip(simulator.peaks(), room, strict=True))
        return Outcome(simulator.seconds, max(0, *missing), simulator.missing_memory())
