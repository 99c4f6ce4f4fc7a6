"""First weights of a model on the meta device: module by module, so that no rank ever has all of them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from flexsearch.errors import RuntimeFailure
from flexsearch.runtime.stored import Stored

Initialise = Callable[[nn.Module], object]


def initialise(model: nn.Module, stored: Stored, seed: int, function: Initialise | None) -> None:
    """Draw the values of every module in the order of ``model.modules()`` and keep this rank's pieces.

    ``function(module)`` fills a module's own parameters and buffers; by default its ``reset_parameters``. These are the
    values that the model has if it is built after ``torch.manual_seed(seed)``, where each module draws its own weights
    in its constructor and submodules are made in the order in which they are registered, as PyTorch's layers do.
    Raises RuntimeFailure for a module that cannot fill its own.
    """
    done: set[str] = set()  # a tied weight keeps what its first module drew
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for path, module in model.named_modules():
            own = [*module._parameters.items(), *module._buffers.items()]
            if any(tensor is not None and tensor.is_meta for _, tensor in own):
                _fill(path, module, function)
                try:
                    for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
                        name = f"{path}.{key}" if path else key
                        if tensor is None:
                            continue
                        if name not in stored.names:
                            stored.set_transient(name, tensor.detach())
                        elif stored.names[name] not in done:
                            done.add(stored.names[name])
                            stored.set(name, tensor.detach())
                finally:
                    module._parameters.update({k: t for k, t in own if k in module._parameters})
                    module._buffers.update({k: t for k, t in own if k in module._buffers})
    stored.changed()


def _fill(path: str, module: nn.Module, function: Initialise | None) -> None:
    """Give a module's own tensors values, on the CPU."""
    fill = function or _own_function(path, module)
    for key, parameter in module._parameters.items():
        if parameter is not None and parameter.is_meta:
            module._parameters[key] = nn.Parameter(_unset(parameter), parameter.requires_grad)
    for key, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta:
            module._buffers[key] = _unset(buffer)
    blank = {id(x): x._version for x in (*module._parameters.values(), *module._buffers.values()) if x is not None}
    fill(module)
    for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
        if tensor is None or not tensor.numel():
            continue
        if tensor.is_floating_point():
            left = bool(tensor.isnan().all())
        else:  # it may hold zeros, if somebody has written them
            left = blank.get(id(tensor)) == tensor._version and not tensor.any()
        if left:
            raise RuntimeFailure(
                f"initialising {path or 'the model'!r} left {key!r} without values",
                "Pass parallelize(initialise=function), which is called with each module.",
            )


def _unset(tensor: Tensor) -> Tensor:
    value = float("nan") if tensor.is_floating_point() else 0
    return torch.full(tensor.shape, value, dtype=tensor.dtype)


def _own_function(path: str, module: nn.Module) -> Initialise:
    for name in ("reset_parameters", "_reset_parameters"):
        if callable(reset := getattr(module, name, None)):
            return lambda _: reset()
    raise RuntimeFailure(
        f"the model is on the meta device, and {path or 'the model'!r} ({type(module).__name__}) has weights but no "
        "reset_parameters",
        "Pass parallelize(initialise=function), which is called with each module, or load a state.",
    )
