"""Checkpoints by ``torch.distributed.checkpoint``: every rank writes and reads its pieces, with their places in the
whole tensors, so that they can be loaded under another plan, on another number of ranks, or into a plain model.

Keys are those of PyTorch: ``model.NAME``, and for the optimizer ``optimizer.state.NAME.KEY`` and
``optimizer.param_groups.NAME.KEY``, which is what ``torch.distributed.checkpoint.state_dict`` gives and takes with
``flatten_optimizer_state_dict``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as read_checkpoint
from torch.distributed.checkpoint.state_dict_saver import save as write_checkpoint
from torch.optim import Optimizer

from flexsearch.errors import RuntimeFailure
from flexsearch.graph.ops import KernelContext
from flexsearch.runtime.recipes.synchronisation import Synchronisation
from flexsearch.runtime.sharded import ShardedTensor
from flexsearch.runtime.stored import Stored

_STATE, _GROUPS = "state.", "param_groups."


def model_state(stored: Stored) -> dict[str, Tensor]:
    """The model's state under its own names; loading it writes this rank's pieces."""
    state: dict[str, Tensor] = {}
    for name, original in stored.names.items():
        whole = stored.counters.get(original, stored.other.get(original))
        if original in stored.layouts:
            held = [tensor for _, tensor in stored.pieces(original)]
            if held:
                state[name] = ShardedTensor(stored.shapes[name], held[0].dtype, stored.chunks(name))
        elif whole is not None:
            state[name] = whole
    return state


def optimizer_state(stored: Stored, optimizer: Optimizer) -> dict[str, Any]:
    """The optimizer's state, flat: tensors of a weight's shape in pieces, all else as it is."""
    flat: dict[str, Any] = {}
    for name, parameters in _trained(stored).items():
        states = [optimizer.state.get(p, {}) for p in parameters]
        for key in states[0]:
            value = states[0][key]
            if isinstance(value, Tensor) and value.shape == parameters[0].shape and value.dim():
                of = {id(p): state[key] for p, state in zip(parameters, states, strict=True)}
                flat[f"{_STATE}{name}.{key}"] = ShardedTensor(
                    stored.shapes[name], value.dtype, stored.chunks(name, _in_place_of(of))
                )
            elif isinstance(value, Tensor) and value.numel() > 1:
                raise RuntimeFailure(
                    f"the optimizer keeps {key!r} of shape {tuple(value.shape)} for {name!r}, of which this rank has "
                    f"{tuple(parameters[0].shape)}: a checkpoint cannot tell where that belongs",
                    "Use an optimizer whose states have a number for each weight, as SGD, Adam or AdamW.",
                )
            elif value is not None:
                flat[f"{_STATE}{name}.{key}"] = value
    of_parameter = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    for name, parameters in _trained(stored).items():
        group = of_parameter.get(id(parameters[0]), {})
        flat.update({f"{_GROUPS}{name}.{key}": value for key, value in group.items() if key != "params"})
    return flat


def _in_place_of(of: Mapping[int, Tensor]) -> Callable[[Tensor], Tensor | None]:
    """What is kept of a tensor, by its ``id``."""
    return lambda tensor: of.get(id(tensor))


def _trained(stored: Stored) -> dict[str, list[nn.Parameter]]:
    """This rank's trained parameters, in the order of their pieces, by the model's first name for the weight."""
    names: dict[str, str] = {}
    for name, original in stored.names.items():
        names.setdefault(original, name)
    result = {}
    for original, name in names.items():
        held = [p for _, p in stored.pieces(original) if isinstance(p, nn.Parameter)]
        if held and stored.graph.tensor[original].requires_grad:  # frozen since or not: its states are kept
            result[name] = held
    return result


def _make_room(stored: Stored, optimizer: Optimizer, saved: Mapping[str, Any], prefix: str) -> None:
    """Give the optimizer the states that a checkpoint has, without values yet."""
    for name, parameters in _trained(stored).items():
        start = f"{prefix}{_STATE}{name}."
        for key, metadata in saved.items():
            if not key.startswith(start) or "." in (field := key.removeprefix(start)):
                continue
            size = getattr(metadata, "size", None)
            for p in parameters:
                value: Any = 0
                if size is not None and len(size):
                    value = torch.zeros_like(p, requires_grad=False, dtype=metadata.properties.dtype)
                elif size is not None:
                    old = optimizer.state[p].get(field)
                    place = old.device if isinstance(old, Tensor) else "cpu"
                    value = torch.zeros((), dtype=metadata.properties.dtype, device=place)
                optimizer.state[p][field] = value


def _take_groups(stored: Stored, optimizer: Optimizer, flat: Mapping[str, Any]) -> None:
    """Have each parameter group use the options that its first weight had."""
    names = {id(p): name for name, parameters in _trained(stored).items() for p in parameters}
    for group in optimizer.param_groups:
        for p in [p for p in group["params"] if id(p) in names][:1]:  # a rank may have none
            start = f"{_GROUPS}{names[id(p)]}."
            group.update({key.removeprefix(start): value for key, value in flat.items() if key.startswith(start)})
    for name, parameters in _trained(stored).items():  # plain values, and one tensor for the two pieces of a weight
        for key in list(optimizer.state.get(parameters[0], {})):
            value = flat.get(f"{_STATE}{name}.{key}")
            if value is not None and not isinstance(value, ShardedTensor):
                for p in parameters:
                    optimizer.state[p][key] = value.clone() if isinstance(value, Tensor) else value


def draws(context: KernelContext) -> dict[str, int]:
    """What the masks of dropout depend on besides the place of an element."""
    return {"seed": context.seed, "step": context.step}


def save(
    folder: str | Path, stored: Stored, context: KernelContext, optimizer: Optimizer | None, extra: Mapping[str, Any],
    recipes: Synchronisation,
) -> None:  # fmt: skip
    """Write a checkpoint. All ranks must call it."""
    own = recipes.saved(optimizer)
    with recipes.agreed():
        state: dict[str, Any] = {"model": model_state(stored), "draws": draws(context), "extra": (dict(extra),)}
        state["recipes"] = own
        _write(folder, state, stored, None if recipes.asynchronous else optimizer)


def _write(folder: str | Path, state: dict[str, Any], stored: Stored, optimizer: Optimizer | None) -> None:
    if optimizer is not None:
        state["optimizer"] = optimizer_state(stored, optimizer)
    with _told(f"no checkpoint can be written to {folder}", "Name a folder that can be made, and that all ranks see."):
        write_checkpoint(state, checkpoint_id=str(folder))


@contextmanager
def _told(problem: str, remedy: str) -> Iterator[None]:
    """Raise a RuntimeFailure for the errors of ``torch.distributed.checkpoint``, which are no ``Exception`` where they
    come from several ranks."""
    try:
        yield
    except (OSError, CheckpointException) as error:
        reason = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
        raise RuntimeFailure(f"{problem}: {type(reason).__name__}: {reason}", remedy) from error


def load(
    folder: str | Path, stored: Stored, context: KernelContext, optimizer: Optimizer | None, recipes: Synchronisation
) -> dict[str, Any]:
    """Read a checkpoint into the pieces of this rank. All ranks must call it. Returns what was saved as ``extra``.

    Raises RuntimeFailure if there is none, or if it is of another model or without an optimizer's state."""
    reader = FileSystemReader(str(folder))
    try:
        saved = reader.read_metadata().state_dict_metadata
    except (OSError, RuntimeError, ValueError) as error:
        raise RuntimeFailure(f"no checkpoint in {folder}: {error}", "Name the folder that was saved.") from error
    state: dict[str, Any] = {"model": model_state(stored), "recipes": recipes.wanted(saved, "recipes.")}
    optimizer, of_server = (None, optimizer) if recipes.asynchronous else (optimizer, None)
    _check_model(folder, stored, saved)
    state["draws"] = {key: 0 for key in draws(context) if f"draws.{key}" in saved}
    if "extra" in saved:
        state["extra"] = ({},)  # a tuple is one object, however it is nested
    if optimizer is not None:
        if not any(key.startswith("optimizer.") for key in saved):
            raise RuntimeFailure(f"the checkpoint in {folder} has no optimizer's state", "Load it without optimizer.")
        _make_room(stored, optimizer, saved, "optimizer.")
        flat = optimizer_state(stored, optimizer)
        state["optimizer"] = {key: value for key, value in flat.items() if f"optimizer.{key}" in saved}
    with _told(f"the checkpoint in {folder} cannot be read", "Is it complete, and do all ranks see it?"):
        read_checkpoint(state, storage_reader=reader)
    if optimizer is not None:
        _take_groups(stored, optimizer, state["optimizer"])
    for key, value in state["draws"].items():
        setattr(context, key, value)
    stored.changed()
    recipes.load(optimizer or of_server, state["recipes"])
    extra: dict[str, Any] = state.get("extra", ({},))[0]
    return extra


def _check_model(folder: str | Path, stored: Stored, saved: Mapping[str, Any]) -> None:
    for name, shape in stored.shapes.items():
        metadata = saved.get(f"model.{name}")
        if metadata is None:
            raise RuntimeFailure(
                f"the checkpoint in {folder} has no {name!r}: it is of another model", "Load it into its own model."
            )
        if tuple(metadata.size) != shape:
            raise RuntimeFailure(f"{name!r} has shape {tuple(metadata.size)} in the checkpoint, {shape} here")
