"""What a plan consists of, as the records of a strategy file and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from flexsearch.errors import StrategyError
from flexsearch.graph.weight_gradients import owner_of, weight_gradient_of
from flexsearch.strategy.config import OperatorConfig, States
from flexsearch.strategy.files import (
    ConfigFile,
    OperatorRange,
    SplitFile,
    StageFile,
    StatesName,
    StrategyFile,
    StrategyV1,
    SynchronisationFile,
)
from flexsearch.strategy.records import Options, Search
from flexsearch.strategy.stage import Stage, by_axes, whole

Configs = Mapping[str, OperatorConfig]
_STATES: Final[dict[States, StatesName]] = {
    States.OPTIMIZER: "optimizer", States.GRADIENTS: "gradients", States.WEIGHTS: "weights"
}  # fmt: skip


# ---- to records


def synchronisation_file(options: Options) -> SynchronisationFile:
    """How replicas of weights come to agree."""
    return SynchronisationFile(
        bucket_bytes=options.bucket_bytes,
        synchronise_by=None if options.synchronise_by == Options().synchronise_by else options.synchronise_by,
        prefetch=None if options.prefetch == Options().prefetch else options.prefetch,
        reshard_after_forward=options.reshard_after_forward or None,
        recipes=options.recipes or None,
    )


def stage_files(stages: Sequence[Stage], configs: Configs) -> tuple[StageFile, ...]:
    """The stages, whose operators are ranges of those of the file where they can be."""
    names, several = _names(configs), len(stages) > 1
    files = []
    for stage in stages:
        own = tuple(name for name in stage.operators if owner_of(name) not in configs)
        first = names.index(own[0]) if own else 0
        together = several and len(own) > 1 and tuple(names[first : first + len(own)]) == own
        files.append(
            StageFile(
                operators=own if several and not together else None,
                range=OperatorRange(first=own[0], last=own[-1]) if together else None,
                mesh=stage.mesh,
                replicas=None if stage.replicas == 1 else stage.replicas,
            )
        )
    return tuple(files)


def config_files(stages: Sequence[Stage], configs: Configs) -> dict[str, ConfigFile]:
    """The configs, with positions in the mesh of the operator's stage in place of devices."""
    mesh = {name: stage.positions for stage in stages for name in stage.operators}
    return {
        name: _config_file(configs[name], mesh[name], configs.get(weight_gradient_of(name))) for name in _names(configs)
    }


def _names(configs: Configs) -> list[str]:
    """Operators of the file: what belongs to another one is in its entry."""
    return [name for name in configs if owner_of(name) not in configs]


def _config_file(config: OperatorConfig, mesh: tuple[int, ...], weights: OperatorConfig | None = None) -> ConfigFile:
    """``weights``: the config of what makes the gradients of its weights, if that has one."""
    place = {device: position for position, device in enumerate(mesh)}
    positions = tuple(place[device] for device in config.devices)
    return ConfigFile(
        degrees=dict(config.degrees) or None,
        shares=dict(config.shares) or None,
        positions=None if positions == tuple(range(len(mesh))) else positions,
        weight_gradient=None
        if weights is None
        else SplitFile(**_config_file(weights, mesh).model_dump(include=set(SplitFile.model_fields))),
        replicas=None if config.replicas == 1 else config.replicas,
        states=_STATES.get(config.states),
        sharded_over=config.sharded_over or None,
    )


# ---- from records


def options_of(file: StrategyFile) -> Options:
    """The options of a file."""
    options = Options(
        bucket_bytes=file.synchronisation.bucket_bytes, optimizer=file.optimizer,
        synchronise_by=file.synchronisation.synchronise_by or Options().synchronise_by,
        precision=file.precision or "as-is", gradients=file.gradients or "as-is",
        recompute=file.recompute or "none", recompute_blocks=file.recompute_blocks,
        reshard_after_forward=file.synchronisation.reshard_after_forward or False,
        recipes=file.synchronisation.recipes or (),
    )  # fmt: skip
    if (prefetch := file.synchronisation.prefetch) is not None:
        options = options.model_copy(update={"prefetch": prefetch})
    return options


def stages_of(file: StrategyFile) -> tuple[Stage, ...]:
    """The stages of a file. Raises StrategyError where they contradict the rest of it."""
    names = tuple(file.operators)
    if file.stages is None:
        return whole(names, file.cluster)
    place = {name: k for k, name in enumerate(names)}
    stages = []
    for number, stage in enumerate(file.stages):
        operators = stage.operators if stage.operators is not None else names
        if stage.range is not None:
            ends = stage.range.first, stage.range.last
            for name in ends:
                if name not in place:
                    raise StrategyError(
                        f"stages.{number}.range names {name!r}, which is not among the operators of the file",
                        "Name two of them.",
                    )
            operators = names[place[ends[0]] : place[ends[1]] + 1]
        if stage.axes is not None:
            mesh = by_axes(file.cluster, stage.axes)
        else:
            mesh = stage.mesh if stage.mesh is not None else tuple(range(len(file.cluster.devices)))
        replicas = stage.replicas or 1
        if len(mesh) % replicas:
            raise StrategyError(
                f"stages.{number}.replicas is {replicas}, which does not divide its mesh of {len(mesh)} devices",
                "Give a number of replicas that does.",
            )
        stages.append(Stage(operators, mesh, replicas))
    return tuple(stages)


def configs_of(file: StrategyFile, stages: Sequence[Stage]) -> dict[str, OperatorConfig]:
    """The configs of a file, with devices in place of positions. Raises StrategyError for an operator without a stage
    and a position outside its mesh."""
    mesh = {name: stage.positions for stage in stages for name in stage.operators}
    configs = {}
    for name, config in file.operators.items():
        if name not in mesh:
            raise StrategyError(f"stages: operator {name!r} is in no stage", "Add it to one.")
        configs[name] = _config(name, config, mesh[name])
        if (split := config.weight_gradient) is not None:
            own = _config(f"{name}.weight_gradient", ConfigFile(**split.model_dump()), mesh[name])
            configs[weight_gradient_of(name)] = own
    return configs


def _config(name: str, file: ConfigFile, mesh: tuple[int, ...]) -> OperatorConfig:
    positions = file.positions if file.positions is not None else tuple(range(len(mesh)))
    for position in positions:
        if position >= len(mesh):
            raise StrategyError(
                f"operators.{name}.positions names position {position}; the mesh of its stage has {len(mesh)}",
                f"Give positions from 0 to {len(mesh) - 1}.",
            )
    devices = tuple(mesh[position] for position in positions)
    degrees, shares = tuple((file.degrees or {}).items()), tuple((file.shares or {}).items())
    states = States.WEIGHTS if file.states == "sharded" else States[(file.states or "whole").upper()]
    return OperatorConfig(degrees, devices, file.replicas or 1, states, shares, file.sharded_over or 0)


def from_v1(file: StrategyV1) -> tuple[dict[str, OperatorConfig], Options, Search | None]:
    """Configs, options and search of a file of version 1."""
    configs = {
        name: OperatorConfig(
            tuple(config.degrees.items()),
            config.devices,
            config.replicas,
            States.WEIGHTS if config.shard_weights else States.WHOLE,
        )
        for name, config in file.operators.items()
    }
    options = Options(bucket_bytes=file.options.bucket_bytes, optimizer=file.options.optimizer)
    search: Search | None = None
    if (old := file.search) is not None:
        search = Search(
            seed=old.seed, proposals=old.proposals, climbs=old.climbs, start=old.start, pins=old.pins,
            locally_optimal=old.optimal, bound_s=old.bound_s,
        )  # fmt: skip
    return configs, options, search
