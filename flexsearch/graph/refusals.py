"""What a graph of forward operators would lose without a word: hooks on gradients, parameters of nobody, and numbers of
Python that each call of the model changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from flexsearch.errors import ImportModelError
from flexsearch.graph.holders import Holder, attributes_of, holders_of
from flexsearch.graph.private import converting_by

_AFTERWARDS = "Remove it, and change gradients after step(batch), before the optimizer's step."
_OF_FORM = frozenset({"to", "type_as", "view_as", "expand_as", "reshape_as"})
"""Methods that read no values of their other operand."""


def refuse_hooks(model: nn.Module) -> None:
    """Raise ImportModelError if a gradient would pass through a function of the user's."""
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise ImportModelError(f"parameter {name!r} has a hook, which a plan would not call", _AFTERWARDS)
    for name, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            where = f"layer {name!r}" if name else "the model"
            raise ImportModelError(f"{where} has a backward hook, which a plan would not call", _AFTERWARDS)


def weights_stay() -> AbstractContextManager[Any]:
    """While tracing, a layer that converts its weights (``layer.to(dtype)``, which ends in an error of torch's own)
    stays as it is where they are so already. Raises ImportModelError where they are not."""

    def stay(module: nn.Module, convert: Callable[[Tensor], Tensor], recurse: bool) -> nn.Module:
        for x in (*module.parameters(recurse), *module.buffers(recurse)):
            with torch.no_grad():
                other = convert(x)
            if (other.dtype, other.device) != (x.dtype, x.device):
                raise ImportModelError(
                    f"the model converts weights of a {type(module).__name__} from {x.dtype} on {x.device} to "
                    f"{other.dtype} on {other.device} as it is called",
                    "Convert that layer before, or call the model once: its weights then are what the call makes of "
                    "them.",
                )
        return module

    return converting_by(stay)


class Refusing(TorchFunctionMode):
    """While tracing, which puts fake tensors in the place of the model's parameters, refuses others that would be
    trained, as they would be constants of the graph; and hooks on what is computed."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.register_hook:
            raise ImportModelError(
                "the model puts a hook on the gradient of an activation (register_hook), which a plan would not call",
                "Leave it out, or write what it does with PyTorch's operators: factor * x + (x - factor * x).detach() "
                "scales the gradient of x.",
            )
        result = func(*args, **(kwargs or {}))
        if torch.is_grad_enabled() and getattr(func, "__name__", "") not in _OF_FORM:
            others = [x for x in pytree.tree_leaves((args, kwargs)) if _is_of_nobody(x)]
            if others and any(isinstance(x, Tensor) and x.requires_grad for x in pytree.tree_leaves(result)):
                raise ImportModelError(
                    f"a parameter of shape {tuple(others[0].shape)} is read that is none of the model's, or is not "
                    "read through the model: it would be a constant",
                    "Make it a part of the model (in a list: nn.ModuleList, nn.ParameterList), read it there when the "
                    "loss is called (model.NAME), or detach() it if it is not trained.",
                )
        return result


def _is_of_nobody(x: Any) -> bool:
    """Whether it is a parameter that is trained, and no fake tensor."""
    return isinstance(x, nn.Parameter) and x.requires_grad and not hasattr(x, "fake_mode")


_MISSING = object()


def _any_values(x: Tensor) -> Tensor:
    """Values that no model has, in the form of ``x``."""
    values = torch.rand(tuple(x.shape), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (values * 2).to("cpu" if x.is_meta else x.device, x.dtype)


def _with_any_values(value: Any) -> Any:
    """A nest of tensors, or an object that holds some, with values that no model has."""
    if (attributes := attributes_of(value)) is None:
        return pytree.tree_map_only(Tensor, _any_values, value)
    clone = copy(value)
    vars(clone).update(pytree.tree_map_only(Tensor, _any_values, attributes))
    return clone


class Attributes:
    """Attributes of a model's modules, and of the objects that they lead to (``holders``), that are numbers of Python,
    as they were; and ``changed``: those that are others at the end of a trace, and attributes that then hold other
    tensors."""

    def __init__(self, model: nn.Module, loss: Any = None) -> None:
        self.holders = holders_of(model, loss)
        self._before: dict[tuple[Holder, str], int | float] = {}
        self.changed: dict[tuple[Holder, str], Any] = {}

    def start(self) -> None:
        """Before the first trace, with the model as it is traced."""
        self._before = self._before or self._now()

    def _now(self) -> dict[tuple[Holder, str], int | float]:
        return {
            (holder, name): value
            for holder in self.holders
            for name, value in holder.own().items()
            if type(value) in (int, float, bool)
        }

    def note(self, states: Mapping[tuple[Holder, str], Any]) -> None:
        """At the end of a trace. ``states``: attributes that then are other tensors (``Assigned.states``)."""
        now = self._now()
        self.changed = {key: now[key] for key, value in self._before.items() if key in now and now[key] != value}
        self.changed.update(states)

    @contextmanager
    def later(self, changed: Mapping[tuple[Holder, str], Any]) -> Iterator[None]:
        """For a while, numbers are those after a call, and tensors hold other values."""
        before = {(holder, name): holder.attributes.get(name, _MISSING) for holder, name in changed}
        self._put({key: _with_any_values(value) for key, value in changed.items()})
        try:
            yield
        finally:
            self._put(before)

    def _put(self, values: Mapping[tuple[Holder, str], Any]) -> None:
        for (holder, name), value in values.items():
            if value is _MISSING:
                holder.attributes.pop(name, None)
            else:
                holder.attributes[name] = value

    def error(self, key: tuple[Holder, str], value: Any) -> ImportModelError:
        """What to tell if the model computes something else with what is changed: to ``value``."""
        holder, name = key
        path = ".".join(filter(None, (holder.path, name)))
        others = "" if holder.is_module else " of a module"
        if not isinstance(value, int | float):
            return ImportModelError(
                f"the model computes with {path!r}, which each call makes anew, or writes into, for the next one: a "
                "graph would begin with the same values for ever",
                f"Make it a buffer{others}, as in self.register_buffer({name!r}, torch.zeros(...)) for one tensor, and "
                "assign that.",
            )
        before = self._before[key]
        return ImportModelError(
            f"the model computes with {path!r}, a number that each call changes (before the first it is {before}): a "
            "graph would hold one value for ever",
            f"Make it a buffer{others}, self.register_buffer({name!r}, torch.tensor({before})), and change it in "
            "place.",
        )
