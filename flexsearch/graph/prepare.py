"""Models as they come: wrapped, with a KV cache, returning more than the loss."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

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


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside ``torch.compile``, DistributedDataParallel and DataParallel, whose names its state has."""
    while (attribute := WRAPPERS.get(type(model).__name__)) is not None:
        model = getattr(model, attribute)
    return model


def refuse_sharded(model: nn.Module) -> None:
    """Raise ImportModelError for a model that PyTorch has sharded already."""
    modules = (f"layer {name!r}" if name else "the model" for name, module in model.named_modules()
               if type(module).__name__ == "FullyShardedDataParallel")  # fmt: skip
    tensors = (f"{name!r} is a DTensor" for name, tensor in model.named_parameters() if hasattr(tensor, "placements"))
    first = next((f"{what} is wrapped in FullyShardedDataParallel" for what in modules), None) or next(tensors, None)
    if first is not None:
        raise ImportModelError(
            f"{first}: the model has been sharded already (fully_shard, FSDP, parallelize_module)",
            "Give the plain model; the plan shards it.",
        )


CACHE = "use_cache is turned off: the keys and values of earlier calls play no part in training"


@contextmanager
def plain(model: nn.Module, batch: Mapping[str, Any]) -> Iterator[list[str]]:
    """For a while without what only hinders tracing: a KV cache, which training does not read, compiled calls
    (``module.compile()``), activation checkpoints. Yields notes about what was turned off that a user can see.

    ``batch``: keyword arguments of the model. Raises ImportModelError if the model draws random numbers by numpy or by
    Python's own module in that time, which a graph would repeat for ever.
    """
    configs = _configurations(model)
    cached = [config for config in configs if getattr(config, "use_cache", False) is True]
    labelled = [config for config in configs[:1] if _single_label(config, batch.get("labels"))]
    compiled = [m for m in model.modules() if getattr(m, "_compiled_call_impl", None) is not None]
    calls = [m._compiled_call_impl for m in compiled]
    notes = [CACHE] if cached else []
    drawn = _draws()
    try:
        for config in cached:
            config.use_cache = False
        for config in labelled:
            config.problem_type = "single_label_classification"
        for module in compiled:
            module._compiled_call_impl = None
        with traceable_autograd(notes):
            yield notes
        if _draws() != drawn:
            raise ImportModelError(
                "the model draws random numbers by numpy or Python's random, not by PyTorch: a graph would hold this "
                "one draw for ever",
                f"{_sentence(switches(model)) or 'Draw them by torch.rand, or outside the model and pass them in'}.",
            )
    finally:
        for config in cached:
            config.use_cache = True
        for config in labelled:
            config.problem_type = None
        for module, call in zip(compiled, calls, strict=True):
            module._compiled_call_impl = call


def _configurations(model: nn.Module) -> list[Any]:
    """Those of the model's modules, each once; the model's own first."""
    configs = (getattr(module, "config", None) for module in model.modules())
    return list({id(config): config for config in configs if config is not None}.values())


def _single_label(config: Any, labels: Any) -> bool:
    """Whether a classifier of Hugging Face would find out by itself that each sample has one class.

    Most look at the labels' dtype; DeBERTa selects the labels that count, which makes the shapes depend on values, but
    only if its configuration does not say of which kind its labels are.
    """
    undecided = getattr(config, "problem_type", "") is None and getattr(config, "num_labels", 0) > 1
    return undecided and getattr(labels, "ndim", 0) == 1 and not labels.is_floating_point()


def _draws() -> tuple[Any, ...]:
    """The states of the generators that PyTorch knows nothing of."""
    name, keys, *rest = np.random.get_state(legacy=True)
    return (random.getstate(), name, bytes(np.asarray(keys)), *rest)


STATIC: Mapping[str, Any] = {
    "layerdrop": 0.0,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
    "apply_spec_augment": False,
    "experts_implementation": "batched_mm",
}
"""Options of Hugging Face's configurations that can make a model depend on draws or values -> what turns that off."""

OTHERWISE = "turn off in the model's configuration what depends on values or is drawn at random (layer drop, masking)"


def switches(model: nn.Module) -> str:
    """What to turn off in a model's configuration so that it is a static graph; empty if it has none of these."""
    dynamic: dict[str, Any] = {}
    for config in _configurations(model):
        options = vars(config) if hasattr(config, "__dict__") else {}
        for name, value in STATIC.items():
            if name == "experts_implementation":  # every configuration has it; without experts it means nothing
                choice: Callable[[], bool] = getattr(model, "_can_set_experts_implementation", lambda: True)
                of_experts = any("experts" in key for key in options if key[0] != "_")
                loops = of_experts and getattr(config, f"_{name}", "") == "eager" and choice()
            else:
                loops = bool(options.get(name))
            if loops:
                dynamic[name] = value
    settings = " and ".join(f"{name}={value!r}" for name, value in dynamic.items())
    return f"set {settings} in the model's configuration" if dynamic else ""


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def own_loss(output: Any) -> Any:
    """The loss in what a model returns that computes it itself: the item of that name of a mapping (``ModelOutput`` of
    Hugging Face), of a dataclass or of a named tuple, else the output as it is. Raises ImportModelError if these have
    none."""
    if is_dataclass(output) and not isinstance(output, Mapping):
        output = {field.name: getattr(output, field.name) for field in fields(output)}
    elif isinstance(output, tuple) and hasattr(output, "_asdict"):
        output = output._asdict()
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
