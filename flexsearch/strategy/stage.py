"""Stages: which operators run on which mesh, and when microbatches pass through them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from flexsearch.errors import StrategyError
from flexsearch.graph import OperatorGraph
from flexsearch.strategy.config import OperatorConfig
from flexsearch.topology import Topology

ScheduleKind = Literal[
    "gpipe", "1f1b", "interleaved-1f1b", "breadth-first", "zero-bubble", "zero-bubble-v", "dualpipe-v"
]
"""In which order the devices of a pipeline run its actions."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A convex part of the operator graph with a mesh of its own.

    ``operators``: their names. ``mesh``: devices in order, by index into the topology; those of each replica one after
    the other. ``replicas``: so many equal parts of the mesh run the stage, each on its share of the batch. Configs of
    the stage's operators name devices of the first replica; the others do the same at the same positions.
    """

    operators: tuple[str, ...]
    mesh: tuple[int, ...]
    replicas: int = 1

    @property
    def positions(self) -> tuple[int, ...]:
        """The devices that configs can name: those of the first replica."""
        return self.mesh[: len(self.mesh) // self.replicas]


def whole(operators: Sequence[str], topology: Topology) -> tuple[Stage, ...]:
    """The plain case: one stage on all devices."""
    return (Stage(tuple(operators), tuple(range(len(topology.devices)))),)


def is_whole(stages: Sequence[Stage], topology: Topology) -> bool:
    """Whether there is one stage, on all devices in their order."""
    return len(stages) == 1 and stages[0].mesh == tuple(range(len(topology.devices))) and stages[0].replicas == 1


def by_axes(topology: Topology, axes: str) -> tuple[int, ...]:
    """All devices in the order of ``axes``: "hosts x devices" (host by host) or "devices x hosts" (the first device of
    each host, then the second of each). Raises StrategyError if hosts have different numbers of devices."""
    hosts: dict[str, list[int]] = {}
    for index, device in enumerate(topology.devices):
        hosts.setdefault(device.host, []).append(index)
    rows = list(hosts.values())
    if len({len(row) for row in rows}) > 1:
        raise StrategyError(
            f'the mesh "{axes}" needs hosts with equally many devices; those of {topology.name} have '
            f"{', '.join(str(len(row)) for row in rows[:4])}{', ...' if len(rows) > 4 else ''}",
            "List the devices of the mesh.",
        )
    ordered = rows if axes == "hosts x devices" else list(zip(*rows, strict=True))
    return tuple(device for row in ordered for device in row)


def check_stages(
    graph: OperatorGraph, stages: Sequence[Stage], configs: Mapping[str, OperatorConfig], device_count: int
) -> None:
    """Raise StrategyError unless every operator is in one stage, data flows from a stage only to itself and to later
    ones (which makes stages convex), and every config names devices of its stage's mesh."""
    of: dict[str, int] = {}
    for number, stage in enumerate(stages):
        _check_mesh(number, stage, device_count)
        for name in stage.operators:
            if name in of:
                raise StrategyError(
                    f"stages: operator {name!r} is in stage {of[name]} and in stage {number}", "Leave one of them out."
                )
            if name not in graph.index:
                raise StrategyError(
                    f"stages: stage {number} has an unknown operator {name!r}", "Name operators of the graph."
                )
            of[name] = number
    for op in graph.operators:
        if op.name not in of:
            raise StrategyError(f"stages: operator {op.name!r} is in no stage", "Add it to one.")
        for name in op.inputs:
            if name in graph.producer and of[graph.operators[graph.producer[name]].name] > of[op.name]:
                producer = graph.operators[graph.producer[name]].name
                raise StrategyError(
                    f"stages: {op.name!r} in stage {of[op.name]} reads from {producer!r} in the later stage "
                    f"{of[producer]}",
                    "Put operators into stages in the order in which data flows.",
                )
        stage = stages[of[op.name]]
        if outside := sorted(set(configs[op.name].devices) - set(stage.positions)):
            raise StrategyError(
                f"operator {op.name!r}: device {outside[0]} is not in the mesh of its stage {of[op.name]}",
                "Give positions in that mesh.",
            )


def _check_mesh(number: int, stage: Stage, device_count: int) -> None:
    mesh = stage.mesh
    problem = remedy = ""
    if len(set(mesh)) != len(mesh):
        problem, remedy = "names a device twice", "Name each device once."
    elif max(mesh) >= device_count or min(mesh) < 0:
        problem = f"names device {max(mesh)}; there are devices 0 to {device_count - 1}"
        remedy = "Name devices of the topology."
    elif stage.replicas < 1 or len(mesh) % stage.replicas:
        problem = f"of {len(mesh)} devices cannot be divided among {stage.replicas} replicas"
        remedy = "Give a number of replicas that divides the mesh."
    if problem:
        raise StrategyError(f"stages: the mesh of stage {number} {problem}", remedy)


def check_batch(batch: int, replicas: int, microbatches: int) -> None:
    """Raise StrategyError, with the nearest numbers that do, unless a batch can be divided among ``replicas``, and the
    share of each into ``microbatches``."""
    if batch % replicas:
        raise StrategyError(
            f"a batch of {batch} cannot be divided among {replicas} replicas", f"Use {_nearest(batch, replicas)}."
        )
    share = batch // replicas
    if share % microbatches:
        text = f"a batch of {batch}" if replicas == 1 else f"a share of {share} samples"
        raise StrategyError(
            f"microbatches: {text} cannot be divided into {microbatches} microbatches",
            f"Use {_nearest(share, microbatches)}.",
        )


def _nearest(count: int, wanted: int) -> str:
    """The divisors of ``count`` on both sides of a number."""
    divisors = [n for n in range(1, count + 1) if count % n == 0]
    below = [n for n in divisors if n <= wanted][-1:]
    return " or ".join(str(n) for n in dict.fromkeys([*below, *[n for n in divisors if n >= wanted][:1]]))
