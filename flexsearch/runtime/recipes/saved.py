"""What a checkpoint keeps of recipes: each rank its own state, and where replicas differ its weights and the
optimizer's states of them, so that the same plan goes on to the bit."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.optim import Optimizer

from flexsearch.runtime.recipes.member import Member
from flexsearch.runtime.recipes.served import Served

ROWS: Final = ("residual", "velocity", "reference", "outer")
COUNTS: Final = ("step", "rounds")


def description(members: Sequence[Member]) -> str:
    """Of the groups that a rank takes part in: a state belongs to these alone."""
    groups = [member.group for member in members]
    return repr([(repr(g.recipe), g.names, g.boxes, g.devices, g.servers) for g in groups])


def saved_state(members: Sequence[Member], optimizer: Optimizer | None, rank: int) -> dict[str, Any]:
    """Of this rank, by names that no other rank uses."""
    state: dict[str, Any] = {f"{rank}.groups": (description(members),)}
    for k, member in enumerate(members):
        state.update((f"{rank}.{k}.{name}", value.clone()) for name, value in _tensors(member, optimizer).items())
    return state


def wanted_state(saved: Mapping[str, Any], rank: int, prefix: str) -> dict[str, Any]:
    """What of a checkpoint with the metadata ``saved`` this rank may read: tensors to read into."""
    start, state = f"{prefix}{rank}.", dict[str, Any]()
    for key, metadata in saved.items():
        if key.startswith(start):
            tensor = isinstance(metadata, TensorStorageMetadata)
            state[key.removeprefix(prefix)] = (
                torch.empty(tuple(metadata.size), dtype=metadata.properties.dtype) if tensor else ("",)
            )
    return state


def take_state(members: Sequence[Member], optimizer: Optimizer | None, state: Mapping[str, Any], rank: int) -> None:
    """Go on from a state that was read. If it is of other groups, warn that it does not count."""
    (groups,) = state.get(f"{rank}.groups", ("",))
    if groups != description(members):
        warnings.warn(
            "the checkpoint was saved under another plan, or without recipes: the mean of the replicas' weights is "
            "taken, and recipes begin anew, without what replicas had not sent yet",
            stacklevel=4,
        )
        return
    for k, member in enumerate(members):
        start = f"{rank}.{k}."
        own = {key.removeprefix(start): value for key, value in state.items() if key.startswith(start)}
        _take(member, optimizer, own)


def _tensors(member: Member, optimizer: Optimizer | None) -> dict[str, Tensor]:
    if isinstance(member, Served):
        return member.saved()
    state, tensors = member.state, dict[str, Tensor]()
    tensors.update((name, torch.tensor(getattr(state, name))) for name in COUNTS)
    tensors.update((name, row) for name in ROWS if (row := getattr(state, name)) is not None)
    tensors.update((f"memory.{k}", part) for k, part in enumerate(state.memory or ()))
    if not member.agrees and member.parameters:
        tensors["weights"] = member.weights
        for k, parameter in enumerate(member.parameters):
            kept = optimizer.state.get(parameter, {}) if optimizer is not None else {}
            tensors.update((f"optimizer.{k}.{key}", x) for key, x in kept.items() if isinstance(x, Tensor))
    return tensors


def _take(member: Member, optimizer: Optimizer | None, tensors: Mapping[str, Tensor]) -> None:
    if isinstance(member, Served):
        member.take(tensors)
        return
    device = member.weights.device
    if "weights" in tensors:
        member.weights = tensors["weights"].to(device)
    member.start()
    parts = sorted(int(key.removeprefix("memory.")) for key in tensors if key.startswith("memory."))
    kept: dict[str, Any] = {name: int(tensors[name]) for name in COUNTS}
    kept |= {name: tensors[name].to(device) for name in ROWS if name in tensors}
    member.state = replace(
        member.state, **kept,
        memory=tuple(tensors[f"memory.{k}"].to(device) for k in parts) or member.state.memory,
    )  # fmt: skip
    for k, parameter in enumerate(member.parameters):
        start = f"optimizer.{k}."
        for key, value in tensors.items():
            if key.startswith(start) and optimizer is not None:
                own = optimizer.state[parameter].get(key.removeprefix(start))
                if isinstance(own, Tensor):
                    own.copy_(value)
