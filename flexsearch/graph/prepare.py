"""Models as they come: wrapped, with a KV cache, returning more than the loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from flexsearch.errors import ImportModelError
from flexsearch.graph.regions import traceable_autograd

if TYPE_CHECKING:
    from torch import nn

WRAPPERS: Mapping[str, str] = {
    "OptimizedModule": "_orig_mod",
    "DistributedDataParallel": "module",
    "DataParallel": "module",
}
"""Class of a module that only wraps another one (torch.compile, data parallelism) -> its attribute for that."""

CACHE = "use_cache is turned off: the keys and values of earlier calls play no part in training"


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside ``torch.compile``, DistributedDataParallel and DataParallel, whose names its state has."""
    while (attribute := WRAPPERS.get(type(model).__name__)) is not None:
        model = getattr(model, attribute)
    return model


@contextmanager
def plain(model: nn.Module) -> Iterator[list[str]]:
    """For a while without what only hinders tracing: a KV cache, which training does not read, compiled calls
    (``module.compile()``), activation checkpoints. Yields notes about what was turned off that a user can see."""
    configs: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    cached = {id(config): config for config in configs if getattr(config, "use_cache", False) is True}
    compiled = [m for m in model.modules() if getattr(m, "_compiled_call_impl", None) is not None]
    calls = [m._compiled_call_impl for m in compiled]
    try:
        for config in cached.values():
            config.use_cache = False
        for module in compiled:
            module._compiled_call_impl = None
        notes = [CACHE] if cached else []
        with traceable_autograd(notes):
            yield notes
    finally:
        for config in cached.values():
            config.use_cache = True
        for module, call in zip(compiled, calls, strict=True):
            module._compiled_call_impl = call


def own_loss(output: Any) -> Any:
    """The loss in what a model returns that computes it itself: the item of that name of a mapping (``ModelOutput`` of
    Hugging Face), else the output as it is. Raises ImportModelError if the mapping has none."""
    if not isinstance(output, Mapping):
        return output
    loss = output.get("loss")
    if loss is None:
        names = ", ".join(str(name) for name in output)
        raise ImportModelError(
            f"the model returns {names} and no loss",
            "Put the labels into the batch, as the data collator does, or give loss=lambda output, targets: ...",
        )
    return loss
